"""What of the host is no op, noticed while a step is traced: reads, seeds, new generators.

What Python makes of a tensor's values cannot be followed. So it is noted that they were read, by
``tolist``, ``numpy``, a copy of the memory. Seeding torch's own generator, and asking for its state
or setting it, are steps of the tape like ops.

Only this thread's calls count: a loader that draws beside the step is not the step.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from xla_dtensor.runtimes.host_work.generators import address_of
from xla_dtensor.runtimes.host_work.tape import HostTape, is_host

__all__ = ["noticing"]

_READS = (
    "tolist",
    "numpy",
    "__array__",
    "__dlpack__",
    "__deepcopy__",
    "__reduce_ex__",
    "storage",
    "untyped_storage",
    "data_ptr",
)


@contextlib.contextmanager
def noticing(tape: HostTape) -> Iterator[None]:
    """Let a tape know, for the time of a block, what this thread does besides ops."""
    thread = threading.get_ident()

    def is_here() -> bool:
        return threading.get_ident() == thread

    with contextlib.ExitStack() as stack:
        for name in _READS:
            stack.enter_context(_replaced(torch.Tensor, name, _reading(name, tape, is_here)))
        for name, function in _seeding(tape, is_here).items():
            for module in (torch, torch.random):
                stack.enter_context(_replaced(module, name, function))
        stack.enter_context(_replaced(torch, "Generator", _noted_generators(tape, is_here)))
        yield


@contextlib.contextmanager
def _replaced(owner: Any, name: str, replacement: Any) -> Iterator[None]:
    is_own, original = name in vars(owner), vars(owner).get(name)
    setattr(owner, name, replacement)
    try:
        yield
    finally:
        if is_own:
            setattr(owner, name, original)
        else:
            delattr(owner, name)


def _reading(name: str, tape: HostTape, is_here: Callable[[], bool]) -> Any:
    read = getattr(torch.Tensor, name)

    @functools.wraps(read)
    def reading(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if is_here() and is_host(tensor):
            tape.note_read(tensor)
        return read(tensor, *args, **kwargs)

    return reading


def _seeding(tape: HostTape, is_here: Callable[[], bool]) -> dict[str, Any]:
    """Return what stands for torch's functions that set its generator."""
    seed, get_state, set_state = torch.manual_seed, torch.get_rng_state, torch.set_rng_state
    anew, initial = torch.seed, torch.initial_seed

    @functools.wraps(seed)
    def manual_seed(number: Any) -> torch.Generator:
        generator = seed(number)
        if is_here():
            tape.seeded(int(number))
        return generator

    @functools.wraps(get_state)
    def get_rng_state() -> torch.Tensor:
        state = get_state()
        if is_here():
            tape.state_was_read(state)
        return state

    @functools.wraps(set_state)
    def set_rng_state(new_state: torch.Tensor) -> None:
        if is_here():
            tape.state_is_set(new_state)
        set_state(new_state)

    @functools.wraps(anew)
    def seed_anew() -> int:
        number = anew()
        if is_here():
            tape.seeded(None)
        return number

    @functools.wraps(initial)
    def initial_seed() -> int:
        number = initial()
        if is_here():
            tape.seed_was_read(number)
        return number

    return {
        "manual_seed": manual_seed,
        "get_rng_state": get_rng_state,
        "set_rng_state": set_rng_state,
        "seed": seed_anew,
        "initial_seed": initial_seed,
    }


def _noted_generators(tape: HostTape, is_here: Callable[[], bool]) -> Any:
    """Return a class like ``torch.Generator`` that tells the tape of those that are made."""
    base: Any = torch._C.Generator
    meta: Any = type(base)  # newer versions of torch have one of their own

    class Kind(meta):
        def __instancecheck__(cls, value: Any) -> bool:  # pyright: ignore[reportSelfClsParameterName]
            return isinstance(value, base)

    class Generator(base, metaclass=Kind):
        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            generator = base(*args, **kwargs)
            if is_here():
                tape.made_generators.add(address_of(generator))
            return generator

    return Generator
