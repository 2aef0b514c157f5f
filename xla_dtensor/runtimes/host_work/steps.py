"""The steps of a tape: each does again what was done while the step was traced.

A tensor stands on the tape as a *slot*, its number; `env` holds the tensors of one run by slot.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from xla_dtensor.runtimes.host_work.generators import Place, States
from xla_dtensor.runtimes.nested import leaves, map_nested
from xla_dtensor.runtimes.scalars import as_now, stands_for
from xla_dtensor.runtimes.torch_own import past_functions

__all__ = [
    "Alias",
    "Answer",
    "Call",
    "Deliver",
    "Draw",
    "Fresh",
    "Memory",
    "OtherwiseError",
    "ReadSeed",
    "ReadState",
    "Restore",
    "Run",
    "Seed",
    "SetState",
    "Slot",
    "Step",
    "Take",
    "same_bytes",
    "storage_of",
]


_aten = torch.ops.aten
# Not tensor.untyped_storage(): while a step is traced, that is noted as a read of the step's.
storage_of = past_functions("untyped_storage")


class OtherwiseError(Exception):
    """What the step has read came out otherwise; the message says what."""


class Slot(int):
    """The number of a tensor on a tape."""


@dataclass(eq=False)
class Memory:
    """What torch calls a storage.

    Args:
        slot: A tensor over it.
        older: It is older than the tape.
        varies: What it holds can be something else on the next call.
        writes: How often the tape has written to it.
    """

    slot: Slot
    older: bool
    varies: bool
    writes: int = 0

    @property
    def is_constant(self) -> bool:
        """Whether only constants were ever written to it, by the tape."""
        return not (self.older or self.varies)


@dataclass
class Run:
    """One time that a tape is done again.

    Args:
        env: The tensors, by slot.
        taken: What goes into the program.
        delivered: What the step returns.
        states: Of generators.
    """

    env: dict[Slot, torch.Tensor]
    taken: dict[int, torch.Tensor] = field(default_factory=dict)
    delivered: dict[int, torch.Tensor] = field(default_factory=dict)
    states: States = field(default_factory=States)


@dataclass(eq=False)
class Step:
    """One step.

    Args:
        needs: The slots that it reads.
        gives: The slots of the tensors that it makes.
        writes: The memories that it writes to, those of `gives` included.
        kept: It is done again whether or not anything needs what it gives.
    """

    needs: tuple[Slot, ...]
    gives: tuple[Slot, ...] = ()
    writes: tuple[Memory, ...] = ()
    kept: bool = False

    def redo(self, run: Run) -> None:
        """Do it again."""
        raise NotImplementedError


@dataclass(eq=False)
class Call(Step):
    """An op.

    Args:
        func: The ``OpOverload``.
        given: Its arguments and keyword arguments, slots in place of tensors; lent numbers.
        found: What it returned besides tensors, which Python has read.
        shapes: The shapes of what it returned, where they depend on values.
    """

    func: Callable[..., Any] = field(kw_only=True)
    given: tuple[tuple[Any, ...], dict[str, Any]] = field(kw_only=True)
    found: tuple[Any, ...] = field(kw_only=True, default=())
    shapes: tuple[torch.Size, ...] | None = field(kw_only=True, default=None)

    @property
    def has_numbers(self) -> bool:
        """Whether a number of Python's may be another one in each run."""
        return any(map(stands_for, leaves(self.given)))

    def redo(self, run: Run) -> None:
        """Call it again."""
        args, kwargs = map_nested(
            lambda v: run.env[v] if isinstance(v, Slot) else as_now(v), self.given
        )
        outputs = list(leaves(self.func(*args, **kwargs)))
        tensors = [output for output in outputs if isinstance(output, torch.Tensor)]
        run.env.update(zip(self.gives, tensors, strict=True))
        shapes = tuple(tensor.shape for tensor in tensors)
        if self.shapes is not None and shapes != self.shapes:
            raise OtherwiseError(
                f"{self.func} gave a host tensor of shape={tuple(shapes[0])}, where the trace had "
                f"{tuple(self.shapes[0])}"
            )
        non_tensors = tuple(output for output in outputs if not isinstance(output, torch.Tensor))
        if self.found and repr(non_tensors) != repr(self.found):
            raise OtherwiseError(
                f"a number that the step reads of a host tensor changed from {self.found[0]} to "
                f"{non_tensors[0]}"
            )


@dataclass(eq=False)
class Draw(Call):
    """An op that draws.

    Args:
        generator: From which.
        number: How many draws came before.
    """

    generator: torch.Generator = field(kw_only=True)
    number: int = field(kw_only=True)

    def redo(self, run: Run) -> None:
        """Draw again."""
        super().redo(run)
        run.states.note(Place.after(self.number), self.generator)


@dataclass(eq=False)
class Restore(Step):
    """Somebody has set the state of a generator."""

    generator: torch.Generator = field(kw_only=True)
    place: Place = field(kw_only=True)

    def redo(self, run: Run) -> None:
        """Set the state again."""
        run.states.go_to(self.place, self.generator)


@dataclass(eq=False)
class Fresh(Step):
    """A tensor that was made of Python's numbers, as ``torch.tensor`` makes it."""

    value: torch.Tensor = field(kw_only=True)

    def redo(self, run: Run) -> None:
        """Make it again."""
        run.env[self.gives[0]] = self.value.clone()


@dataclass(eq=False)
class Alias(Step):
    """Another tensor over the memory of one: autograd makes some without an op."""

    like: tuple[tuple[int, ...], tuple[int, ...], int, torch.dtype] = field(kw_only=True)
    bits: tuple[bool, bool] = field(kw_only=True, default=(False, False))

    def redo(self, run: Run) -> None:
        """Make it again."""
        size, stride, offset, dtype = self.like
        memory = storage_of(run.env[self.needs[0]])
        alias = torch.empty(0, dtype=dtype).set_(memory, offset, size, stride)
        alias = torch.conj(alias) if self.bits[0] else alias
        run.env[self.gives[0]] = _aten._neg_view(alias) if self.bits[1] else alias


@dataclass(eq=False)
class Answer(Step):
    """Python has read all of a tensor: ``tolist``, ``numpy``."""

    value: torch.Tensor = field(kw_only=True)

    def redo(self, run: Run) -> None:
        """Compare."""
        if not same_bytes(run.env[self.needs[0]], self.value):
            shape = tuple(self.value.shape)
            raise OtherwiseError(
                f"the values that the step reads of a host tensor of shape={shape} changed"
            )


@dataclass(eq=False)
class Take(Step):
    """A tensor goes into the program.

    Args:
        number: Of the input.
        like: Shape and dtype that the program was made for.
    """

    number: int = field(kw_only=True)
    like: tuple[torch.Size, torch.dtype] = field(kw_only=True)

    def redo(self, run: Run) -> None:
        """Copy it."""
        tensor = run.env[self.needs[0]]
        if (tensor.shape, tensor.dtype) != self.like:
            shape, dtype = self.like
            raise OtherwiseError(
                f"a host tensor of shape={tuple(shape)}, dtype={dtype} has "
                f"shape={tuple(tensor.shape)}, dtype={tensor.dtype} now"
            )
        # A copy, as a later step of the tape may write to it.
        run.taken[self.number] = tensor.detach().clone()


@dataclass(eq=False)
class Deliver(Step):
    """The step returns a tensor.

    Args:
        number: Of the result.
        is_copy: It is a constant, which is to stay one whatever is done to the result.
    """

    number: int = field(kw_only=True)
    is_copy: bool = field(kw_only=True)

    def redo(self, run: Run) -> None:
        """Hand it out."""
        tensor = run.env[self.needs[0]]
        run.delivered[self.number] = tensor.clone() if self.is_copy else tensor


@dataclass(eq=False)
class Seed(Step):
    """torch's own generator is seeded."""

    seed: int | None = field(kw_only=True)

    def redo(self, run: Run) -> None:
        """Seed it again."""
        if self.seed is None:
            torch.default_generator.seed()
        else:
            torch.default_generator.manual_seed(self.seed)


@dataclass(eq=False)
class ReadState(Step):
    """Somebody asks for the state of torch's own generator."""

    def redo(self, run: Run) -> None:
        """Ask again."""
        run.env[self.gives[0]] = torch.default_generator.get_state()


@dataclass(eq=False)
class SetState(Step):
    """torch's own generator is given a state."""

    def redo(self, run: Run) -> None:
        """Give it again."""
        torch.default_generator.set_state(run.env[self.needs[0]])


@dataclass(eq=False)
class ReadSeed(Step):
    """Somebody asks for the seed of torch's own generator."""

    seed: int = field(kw_only=True)

    def redo(self, run: Run) -> None:
        """Ask again."""
        seed = torch.default_generator.initial_seed()
        if seed != self.seed:
            raise OtherwiseError(
                f"the seed of torch's generator changed from {self.seed} to {seed}"
            )


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Tell whether two host tensors are equal to the bit, NaN included."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(*(_bytes(tensor) for tensor in (a, b)))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
    # Not reshape(-1): of a single number that keeps the stride it had in a larger tensor.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
