"""Largest and smallest values: torch_xla 2.9 is wrong on infinities, NaNs and ties.

It starts from the largest finite number, so that the maximum of ``-inf`` alone is -3.4e38; on the
CPU it passes over NaNs; the places that it gives are wrong where a dim with NaNs or infinities is
cut; and of equal values in ``cummax`` it gives the first place, PyTorch the last. ``amax`` and
``amin`` without dims return their input unchanged.

Here a place is the least one at which the extremum stands, which is a minimum of whole numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

__all__ = ["EXTREMA", "extreme_value"]

aten = torch.ops.aten
Replacement = Callable[[], torch.Tensor] | None


def _extremum(
    largest: bool, x: torch.Tensor, dim: Sequence[int] = (), keepdim: bool = False
) -> Replacement:
    if x.numel() == 0:
        return None
    return lambda: extreme_value(largest, x, list(dim) or list(range(x.ndim)), keepdim)


def extreme_value(largest: bool, x: torch.Tensor, dims: list[int], keepdim: bool) -> torch.Tensor:
    """Return the largest or smallest values along `dims`, infinities and NaNs as PyTorch has it.

    Raises:
        IndexError: There is no such dim.
    """
    number = max(x.ndim, 1)
    for dim in dims:
        if not -number <= dim < number:
            raise IndexError(
                "Dimension out of range (expected to be in range of "
                f"[{-number}, {number - 1}], but got {dim})"
            )
    if x.ndim == 0:
        return x.clone()
    found = (aten.amax if largest else aten.amin).default(x, dims, keepdim)
    if not x.is_floating_point():
        return found
    least = -math.inf if largest else math.inf
    only_least = (x != least).to(torch.int32).sum(dims, keepdim) == 0
    any_nan = (x != x).to(torch.int32).sum(dims, keepdim) > 0
    return found.masked_fill(only_least, least).masked_fill(any_nan, math.nan)


def _place(largest: bool, x: torch.Tensor, dim: int, keepdim: bool) -> torch.Tensor:
    extremum = extreme_value(largest, x, [dim], True)
    if x.ndim == 0:
        return torch.zeros_like(x, dtype=torch.int64)
    stands = (x == extremum) | ((x != x) & (extremum != extremum))
    size = x.shape[dim]
    places = torch.where(stands, _counted(x, dim), size)
    return aten.amin.default(places, [dim], keepdim)


def _counted(x: torch.Tensor, dim: int) -> torch.Tensor:
    shape = [1] * x.ndim
    shape[dim] = x.shape[dim]
    return torch.arange(x.shape[dim], device=x.device).reshape(shape).expand(x.shape)


def _whole(largest: bool, x: torch.Tensor) -> Replacement:
    return _extremum(largest, x)


def _with_place(largest: bool, x: torch.Tensor, dim: int, keepdim: bool = False) -> Replacement:
    if x.numel() == 0:
        return None
    return lambda: (extreme_value(largest, x, [dim], keepdim), _place(largest, x, dim, keepdim))


def _place_alone(
    largest: bool, x: torch.Tensor, dim: int | None = None, keepdim: bool = False
) -> Replacement:
    if x.numel() == 0:
        return None

    def place() -> torch.Tensor:
        if dim is not None:
            return _place(largest, x, dim, keepdim)
        found = _place(largest, x.reshape(-1), 0, False)
        return found.reshape([1] * x.ndim) if keepdim else found

    return place


def _running(largest: bool, x: torch.Tensor, dim: int) -> Replacement:
    if x.numel() == 0 or x.ndim == 0:
        return None
    run = (aten.cummax if largest else aten.cummin).default

    def running() -> tuple[torch.Tensor, torch.Tensor]:
        values = run(x, dim)[0]
        if x.is_floating_point():
            values = values.masked_fill((x != x).to(torch.int32).cumsum(dim) > 0, math.nan)
        stands = (x == values) | (x != x)
        places = torch.where(stands, _counted(x, dim), -1)
        return values, aten.cummax.default(places, dim)[0]

    return running


def _both(rule: Callable[..., Replacement], largest: Any, smallest: Any) -> dict[Any, Any]:
    return {
        largest: lambda *args, **kwargs: rule(True, *args, **kwargs),
        smallest: lambda *args, **kwargs: rule(False, *args, **kwargs),
    }


EXTREMA: dict[Any, Callable[..., Replacement]] = {
    **_both(_extremum, aten.amax.default, aten.amin.default),
    **_both(_whole, aten.max.default, aten.min.default),
    **_both(_with_place, aten.max.dim, aten.min.dim),
    **_both(_place_alone, aten.argmax.default, aten.argmin.default),
    **_both(_running, aten.cummax.default, aten.cummin.default),
}
