"""Noise of one unit in the last place: on the inputs of a program, or on the result of each op.

    with NoiseOfOps(seed=0):
        1 - torch.cosine_similarity(x, x, 0)      1.2e-7, say, where torch alone gives exactly 0

An op's result is left alone where it is exact, whatever computes it: whole numbers that are the
same in float64 (the tanh of 10 is not: in float32 it is 1), and what stands among the inputs
(copies, `where`, `sort`, `abs` but for signs). float16 and bfloat16 are left alone too: how much
torch rounds there, float64 tells.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from tests.drawn.programs import Leaf

__all__ = ["NoiseOfOps", "noise_on"]

_DTYPES = (torch.float32, torch.float64, torch.complex64, torch.complex128)


def noise_on(
    leaves: Sequence[Leaf], values: Sequence[torch.Tensor], seed: int, least: float
) -> list[torch.Tensor]:
    """Inputs that are off by a unit of their leaf's dtype, or by `least`, relative to them."""
    generator = torch.Generator()
    generator.manual_seed(seed)
    noisy = []
    for leaf, value in zip(leaves, values, strict=True):
        if leaf.value.is_floating_point() or leaf.value.is_complex():
            unit = max(least, torch.finfo(leaf.value.dtype).eps)
            value = value * (1 + unit * _signs(value, generator))
        noisy.append(value)
    return noisy


class NoiseOfOps(TorchDispatchMode):
    """While it is entered, what an op rounds is off by one unit more."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._generator = torch.Generator()
        self._generator.manual_seed(seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        before = [x.clone() for x in inputs if x.dtype in _DTYPES and not x._is_zerotensor()]
        gives_views = _gives_views(func)
        wide = [] if gives_views else _in_float64(func, args, kwargs or {})
        result = func(*args, **(kwargs or {}))
        if not gives_views:
            for value, double in zip_longest(tree_leaves(result), wide):
                has_memory = isinstance(value, torch.Tensor) and not value._is_zerotensor()
                if has_memory and value.dtype in _DTYPES:
                    self._disturb(value, before, double)
        return result

    def _disturb(self, value: torch.Tensor, inputs: Sequence[torch.Tensor], double: Any) -> None:
        exact = value == value.round() if not value.is_complex() else value == 0
        if isinstance(double, torch.Tensor) and double.shape == value.shape:
            exact &= value == double
        for x in inputs:
            if x.dtype == value.dtype:
                exact |= torch.isin(value.abs(), x.abs())
        unit = torch.finfo(value.dtype).eps
        value.mul_(torch.where(exact, 1, 1 + unit * _signs(value, self._generator)).to(value.dtype))


def _in_float64(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """An op's results on inputs of double width; none where it has none."""

    def doubled(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        wide = {torch.float32: torch.float64, torch.complex64: torch.complex128}
        return value.detach().to(wide.get(value.dtype, value.dtype), copy=True)

    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return tree_leaves(func(*tree_map(doubled, args), **tree_map(doubled, kwargs)))
    except Exception:
        return []
    finally:
        torch.set_default_dtype(before)


def _signs(value: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(0, 2, value.shape, generator=generator).double() * 2 - 1


def _gives_views(func: Any) -> bool:
    """Whether a result of an op lies in the memory of an argument that it does not write to."""
    return any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
