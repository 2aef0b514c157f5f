"""Python's and NumPy's random numbers, which a step must not draw while it is traced.

torch's own draws on the host are done again before each run (``tape``). A number of Python's is
part of what Python computes, and cannot be: it would be the same on every call. So a trace in which
one of these generators has moved is refused, and they are put back.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np

from xla_dtensor.core.errors import CompileError

__all__ = ["PythonRandom", "is_python_random"]

_KINDS = (random.Random, np.random.Generator, np.random.RandomState)


def is_python_random(value: Any) -> bool:
    """Tell whether a value is a generator of Python's or NumPy's random numbers."""
    return isinstance(value, _KINDS) and not isinstance(value, random.SystemRandom)


class PythonRandom:
    """The states of generators before a trace: of the modules ``random`` and ``numpy.random``."""

    def __init__(self) -> None:
        self._generators: list[tuple[str, Callable[[], Any], Callable[[Any], None]]] = [
            ("Python's random", random.getstate, random.setstate),
            ("numpy.random", _numpy_state, np.random.set_state),
        ]
        self._before = [read() for _, read, _ in self._generators]

    def note(self, generator: Any) -> None:
        """Note the state of one more generator, that the step has just met."""
        self._generators.append(_of_object(generator))
        self._before.append(self._generators[-1][1]())

    def refuse_draws(self) -> None:
        """Raise if a generator has moved."""
        for (name, read, _), state in zip(self._generators, self._before, strict=True):
            if repr(read()) != repr(state):
                raise CompileError(
                    f"The step drew numbers from {name} while it was traced. Python runs once, so "
                    "each call would use those same numbers. Draw with torch inside the step "
                    "(torch.rand is drawn anew on every call), or draw before the call and pass "
                    "the numbers as a tensor."
                )

    def put_back(self) -> None:
        """Give all generators their states of before."""
        for (_, read, write), state in zip(self._generators, self._before, strict=True):
            if repr(read()) != repr(state):
                write(state)


def _numpy_state() -> Any:
    return _plain(np.random.get_state(legacy=True))


class _Keys(np.ndarray[Any, Any]):
    """The words of a state; its text has all of them."""

    def __new__(cls, keys: Any) -> _Keys:
        return np.asarray(keys).view(cls)

    def __repr__(self) -> str:
        return self.tobytes().hex()


def _of_object(generator: Any) -> tuple[str, Callable[[], Any], Callable[[Any], None]]:
    name = f"a {type(generator).__name__}"
    if isinstance(generator, random.Random):
        return name, generator.getstate, generator.setstate
    if isinstance(generator, np.random.RandomState):
        return name, lambda: _plain(generator.get_state(legacy=True)), generator.set_state
    bits: Any = generator.bit_generator
    return name, lambda: bits.state, lambda state: setattr(bits, "state", state)


def _plain(state: Any) -> Any:
    name, keys, *numbers = state
    return (name, _Keys(keys), *numbers)
