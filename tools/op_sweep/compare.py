"""When a value found is the value expected.

A float32 result may be off by rounding, which depends on the order of sums. So it is held first
against plain torch's float32 result, and where that is not enough, against float64's: it may be
ten times as far from that one as plain torch's is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_flatten

__all__ = ["difference", "differences", "on_host"]

_RTOL = 1e-4
_ATOL = 1e-5
_TIMES_TORCH = 10.0


def on_host(value: Any) -> Any:
    """Return a tensor as a plain one on the CPU, anything else as it is."""
    return value.detach().cpu() if isinstance(value, torch.Tensor) else value


def differences(found: Any, expected: Any, exact: Any, *, only_kind: bool = False) -> str | None:
    """Compare two results of any structure, leaf by leaf.

    Args:
        found: The result to judge.
        expected: Plain torch's.
        exact: Plain torch's in float64; None where that cannot be had.
        only_kind: Compare shapes and dtypes alone: the values are random.

    Returns:
        What differs, or None.
    """
    mine, theirs = tree_flatten(found)[0], tree_flatten(expected)[0]
    best = tree_flatten(exact)[0] if exact is not None else [None] * len(theirs)
    if len(mine) != len(theirs):
        return f"{len(mine)} results, not {len(theirs)}"
    best = best if len(best) == len(theirs) else [None] * len(theirs)
    for at, (ours, plain, wide) in enumerate(zip(mine, theirs, best, strict=True)):
        told = difference(on_host(ours), on_host(plain), on_host(wide), only_kind=only_kind)
        if told:
            return told if len(theirs) == 1 else f"result {at}: {told}"
    return None


def difference(found: Any, expected: Any, exact: Any, *, only_kind: bool = False) -> str | None:
    """Compare one leaf; see :func:`differences`.

    Example:
        >>> difference(torch.ones(2), torch.ones(3), None)
        'shape (2,), not (3,)'
    """
    if found is None and isinstance(expected, torch.Tensor) and not expected.any():
        return None  # no gradient is a gradient of zeros
    if not isinstance(expected, torch.Tensor):
        return _other_difference(found, expected, only_kind)
    if not isinstance(found, torch.Tensor):
        return f"a {type(found).__name__}, not a tensor"
    if found.shape != expected.shape:
        return f"shape {tuple(found.shape)}, not {tuple(expected.shape)}"
    if found.dtype != expected.dtype:
        return f"{_text(found.dtype)}, not {_text(expected.dtype)}"
    if only_kind or expected.numel() == 0:
        return None
    found, expected = _strided(found), _strided(expected)
    if not (expected.is_floating_point() or expected.is_complex()):
        return None if torch.equal(found, expected) else _text_of_first(found, expected)
    if _close(found, expected, _ATOL):
        return None
    if isinstance(exact, torch.Tensor) and exact.shape == expected.shape:
        exact = _strided(exact)
        wide = torch.complex128 if expected.is_complex() else torch.float64
        error = (expected.to(wide) - exact.to(wide)).abs().nan_to_num(0, 0, 0)
        scale = exact.abs().nan_to_num(0, 0, 0).max() * 1e-6
        if _close(found.to(wide), exact.to(wide), _ATOL + _TIMES_TORCH * error + scale):
            return None
    return _text_of_first(found, expected)


def _other_difference(found: Any, expected: Any, only_kind: bool) -> str | None:
    if isinstance(found, torch.Tensor):
        return f"a tensor, not a {type(expected).__name__}"
    if only_kind or found == expected or (found != found and expected != expected):
        return None
    numbers = (int, float, complex)
    are_numbers = isinstance(found, numbers) and isinstance(expected, numbers)
    if are_numbers and abs(found - expected) <= _ATOL + _RTOL * abs(expected):
        return None
    return f"{found!r}, not {expected!r}"[:120]


def _strided(value: torch.Tensor) -> torch.Tensor:
    return value.to_dense() if value.layout != torch.strided else value.resolve_conj().resolve_neg()


def _close(found: torch.Tensor, expected: torch.Tensor, atol: Any) -> bool:
    same = (found == expected) | (found.isnan() & expected.isnan())
    near = (found - expected).abs() <= atol + _RTOL * expected.abs()
    return bool((same | (near & expected.isfinite() & found.isfinite())).all())


def _text_of_first(found: torch.Tensor, expected: torch.Tensor) -> str:
    same = (found == expected) | ((found != found) & (expected != expected))
    if found.is_floating_point() or found.is_complex():
        same = same | ((found - expected).abs() <= _ATOL + _RTOL * expected.abs())
    off = (~same).reshape(-1).nonzero().reshape(-1)
    if not len(off):
        off = torch.zeros(1, dtype=torch.int64)
    ours, plain = (value.reshape(-1)[off[0]].item() for value in (found, expected))
    return f"{len(off)} of {found.numel()} values, such as {_number(ours)}, not {_number(plain)}"


def _number(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _text(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
