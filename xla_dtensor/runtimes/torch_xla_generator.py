"""The devices' random number generator on torch_xla: one number that torch_xla advances by itself.

It advances with every draw, and with every program that runs. So the numbers that follow a seed
depend on where the program is cut by reading a value, but never on how the tensors lie.

``torch.utils.checkpoint`` rewinds it, and torch's CPU generator, but knows nothing of generators
beside it. Taking one up therefore draws a number from the CPU's, as a mark: a mark that comes again
is torch going back to where it was, and the generator starts once more from where it was then.
"""

from __future__ import annotations

import contextlib
import importlib
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import torch

__all__ = ["TorchXlaGenerator"]

_STARTS_AT = 101  # torch_xla's own first seed
_MARKS_KEPT = 16_384


class TorchXlaGenerator:
    """torch_xla's generator, and others in its place for a while.

    A generator beside it is a list of its one number, which is changed in place.
    """

    def __init__(self) -> None:
        self._xlac: Any = importlib.import_module("torch_xla")._XLAC
        self._starts: OrderedDict[int, tuple[list[int], int]] = OrderedDict()
        if self.read(None) == _STARTS_AT:
            self.seed(torch.initial_seed())

    def seed(self, number: int) -> None:
        """Start anew from `number`."""
        self.write(number, None)

    def read(self, rng: list[int] | None) -> int:
        """Return the present number of a generator, of torch_xla's own if None."""
        return int(self._xlac._xla_get_rng_seed("")) if rng is None else rng[0]

    def write(self, number: int, rng: list[int] | None) -> None:
        """Put a generator, or torch_xla's own, where :meth:`read` found it."""
        # Who sets the state wants what follows from it, not what an old mark would repeat.
        self._starts.clear()
        if rng is None:
            self._set(number)
        else:
            rng[0] = number

    def _set(self, number: int) -> None:
        self._xlac._xla_set_rng_seed(number % 2**64, "")

    @contextlib.contextmanager
    def using(self, rng: list[int]) -> Iterator[None]:
        """Let draws take from `rng` and advance it, and put back torch_xla's own."""
        mark = int(torch.randint(2**63 - 1, (), device="cpu"))
        marked, start = self._starts.get(mark, (None, 0))
        repeats = marked is rng
        if not repeats:
            start = rng[0]
            self._starts[mark] = rng, start
            if len(self._starts) > _MARKS_KEPT:
                self._starts.popitem(last=False)
        before = self.read(None)
        self._set(start)
        try:
            yield
        finally:
            if not repeats:
                rng[0] = self.read(None)
            self._set(before)
