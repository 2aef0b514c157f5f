"""The states of generators other than torch's own, at the places of a tape where they matter.

Setting a generator's state is no op that could be seen, so it is found by comparing states. A state
that a generator had before, on this tape, stands for that place; any other one is a constant, like
the seed that the step has written down::

    rand                    begins with some state s0        place: the beginning
                            leaves s1                        place: after draw 0
    generator.set_state(s0) found by comparing               go back to the beginning, whatever
    rand                                                     state that is on the next call

A step may also set the very state that it began with (it seeds with 0, and so did the script before
it). So that this can be told, a generator has a state of nobody's until the step draws or sets one:
the *mark*, by which the step also knows the beginning, should it ask.

torch's own generator is set by functions, which are noted (``seeding``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from xla_dtensor.runtimes.torch_own import past_functions

__all__ = ["Place", "Places", "States", "Unmarked", "address_of", "draw_mark", "generator_of"]

_MARK = 640  # how many draws a mark is away from the state before it


@dataclass(frozen=True)
class Place:
    """A place of a tape, or a constant state.

    Args:
        key: The beginning of a generator, by its address, or the number of the draw before; None
            where the state is a constant.
        state: The constant.
    """

    key: tuple[str, int] | None
    state: torch.Tensor | None = None

    @classmethod
    def beginning(cls, generator: torch.Generator) -> Place:
        """Return the place where a tape begins."""
        return cls(("beginning", address_of(generator)))

    @classmethod
    def after(cls, draw: int) -> Place:
        """Return the place after the n-th draw."""
        return cls(("after", draw))


@dataclass
class _Followed:
    """A generator that is followed.

    Args:
        generator: The generator.
        first: Its state when the tape began.
        expected: The bytes of the state that it has if nobody has set it.
        mark: The bytes of its mark; none for a generator that came up later.
        is_used: The step has drawn from it, or set it.
    """

    generator: torch.Generator
    first: torch.Tensor
    expected: bytes
    mark: bytes = b""
    is_used: bool = False


class Places:
    """Follows generators while a tape is written.

    Args:
        made: The addresses of those that the step makes; it may grow.
    """

    def __init__(self, made: Collection[int] = ()) -> None:
        self._followed: dict[int, _Followed] = {}
        self._found: dict[bytes, Place] = {}
        self._num_draws = 0
        self._made = made

    def note(self, generator: torch.Generator) -> None:
        """Follow a generator that is older than the tape, from before the step uses it."""
        is_known = address_of(generator) in self._followed
        if is_known or is_default(generator) or generator.device.type != "cpu":
            return
        first = generator.get_state()
        with _disable_current_modes():  # Nobody's draw, and none of the tape.
            torch.empty(_MARK, dtype=torch.int64).random_(generator=generator)
        mark = _key(generator.get_state())
        self._followed[address_of(generator)] = _Followed(generator, first, mark, mark)
        self._found[mark] = Place.beginning(generator)

    @property
    def generators(self) -> list[torch.Generator]:
        """All generators that were followed so far."""
        return [record.generator for record in self._followed.values()]

    def set_from(self, generator: torch.Generator) -> Place | None:
        """Return where a generator's state was set from; None if it is as the last draw left it.

        After this the generator has the state that PyTorch would draw with.
        """
        if is_default(generator):
            return None
        state = generator.get_state()
        key = _key(state)
        record = self._followed.get(address_of(generator))
        if record is None:
            self._followed[address_of(generator)] = _Followed(generator, state, key)
            # One of somebody's that nobody could name is as its last draw left it.
            return Place(None, state) if address_of(generator) in self._made else None
        was_used, record.is_used = record.is_used, True
        if key == record.mark:
            generator.set_state(record.first)
            record.expected = _key(record.first)
            return Place.beginning(generator) if was_used else None
        if key == record.expected:
            return None
        record.expected = key
        return self._found.get(key, Place(None, state))

    def drawn(self, generator: torch.Generator) -> int:
        """Note that an op has drawn; return the number of the draw."""
        number = self._num_draws
        self._num_draws += 1
        record = self._followed.get(address_of(generator))
        if record is not None:
            record.expected = _key(generator.get_state())
            self._found[record.expected] = Place.after(number)
        return number

    def put_back(self) -> None:
        """Give every generator the state in which it was found."""
        for record in self._followed.values():
            record.generator.set_state(record.first)


class States:
    """The states that generators have at the places of a tape, while it is done again."""

    def __init__(self) -> None:
        self._states: dict[Any, torch.Tensor] = {}

    def note(self, place: Place, generator: torch.Generator) -> None:
        """Note the state at a place."""
        self._states[place.key] = generator.get_state()

    def go_to(self, place: Place, generator: torch.Generator) -> None:
        """Give a generator the state of a place."""
        state = self._states[place.key] if place.state is None else place.state
        generator.set_state(state)


class Unmarked:
    """torch's own generator as it moves where nothing is traced, while marks are drawn from it.

    A trace draws a mark for each draw on the mesh (``runtimes.jax.lower.random``), and a run of the
    program does not. So that both give the host the same numbers, a draw of the host's is made from
    the state that there is without the marks::

        mark          s0 -> s1        s1 stands for s0
        torch.rand    s1 -> s2        made from s0, which it moves to t1; s2 stands for t1
        set_state(s0), mark           what is computed again: s1 stands for s0, as before
    """

    def __init__(self) -> None:
        self._states: dict[bytes, torch.Tensor] = {}

    def state(self) -> torch.Tensor:
        """Return the state that there is without the marks."""
        state = torch.default_generator.get_state()
        return self._states.get(_key(state), state)

    def mark(self) -> int:
        """Draw a mark."""
        unmarked = self.state()
        number = draw_mark()
        self._note(unmarked)
        return number

    @contextlib.contextmanager
    def drawing(self) -> Iterator[None]:
        """Let the block draw from the state that there is without the marks."""
        generator = torch.default_generator
        state, unmarked = generator.get_state(), self.state()
        generator.set_state(unmarked)
        try:
            yield
        finally:
            after = generator.get_state()
            if _key(unmarked) != _key(state):
                generator.set_state(state)
                draw_mark()
            self._note(after)

    def _note(self, unmarked: torch.Tensor) -> None:
        self._states.setdefault(_key(torch.default_generator.get_state()), unmarked)


def draw_mark() -> int:
    """Draw a number from torch's own generator by which its state is known again."""
    with _disable_current_modes():  # Nobody's draw, and none of the tape.
        return int(torch.randint(2**63 - 1, (), device="cpu"))


def generator_of(kwargs: Mapping[str, Any], args: Iterable[Any]) -> torch.Generator:
    """Return the generator that an op draws from."""
    for argument in (*kwargs.values(), *args):
        if isinstance(argument, torch._C.Generator):
            return argument
    return torch.default_generator


def address_of(generator: torch.Generator) -> int:
    """Return what tells a generator from others; the dispatcher makes new Python objects of one."""
    return generator._cdata  # pyright: ignore[reportAttributeAccessIssue]


def is_default(generator: torch.Generator) -> bool:
    """Tell whether this is torch's own generator of the CPU."""
    return address_of(generator) == address_of(torch.default_generator)


def _key(state: torch.Tensor) -> bytes:
    return _numpy(state).tobytes()


_numpy = past_functions("numpy")
