"""linear, matmul and attention on torch_xla, each dot over exactly the contracted dims.

torch_xla lowers an einsum of two tensors to one ``dot_general`` with batch dims. Everything else it
has flattens batch and head dims into one before XLA sees them. So the whole ops are said as
einsums here, and leading dims stay apart in the forward and in the backward::

    linear          bsn,mn->bsm
    matmul          bhqd,bhdk->bhqk     a dim of size 1 is broadcast by the dot itself
    attention       bgrqd,bgkd->bgrqk   several query heads to one key head: a dim of their own
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._C import DispatchKey, DispatchKeySet

from xla_dtensor.runtimes import whole_ops

__all__ = ["EXTRA_KEYS", "register_whole_ops", "whole_op"]

# What DTensors carry. AutogradPrivateUse3 lets whole ops be caught; naming a second backend drops
# the autocast key of the first, so that one is named again.
EXTRA_KEYS = DispatchKeySet(DispatchKey.AutogradPrivateUse3) | DispatchKeySet(
    torch._C._dispatch_key_parse("AutocastXLA")
)

aten = torch.ops.aten
_weight_grad = torch.ops.xla_dtensor.linear_weight_grad.default
_attention_grad = torch.ops.xla_dtensor.sdpa_backward.default
# What einsum takes for names of dims, without those that an equation here uses itself.
_LETTERS = "abcdefghijklmnoprstuvw"
_is_functional = torch._is_functional_tensor  # pyright: ignore[reportPrivateImportUsage]
_to_functional = torch._to_functional_tensor  # pyright: ignore[reportPrivateImportUsage]
_from_functional = torch._from_functional_tensor  # pyright: ignore[reportPrivateImportUsage]
_sync_functional = torch._sync  # pyright: ignore[reportPrivateImportUsage]
_registrations: list[torch.library.Library] = []


def register_whole_ops() -> None:
    """Install the kernels; calling it again does nothing."""
    if _registrations:
        return
    whole_ops.register()
    # Our own two ops on plain XLA tensors, for graphs of torch.compile.
    kernels = torch.library.Library("xla_dtensor", "IMPL")
    _registrations.append(kernels)
    kernels.impl("linear_weight_grad", _linear_weight_grad, "XLA")
    kernels.impl("sdpa_backward", _sdpa_backward, "XLA")


def whole_op(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Callable[[], Any] | None:
    """Return what to run in place of a whole op; None for other ops, and where torch's is whole.

    Args:
        func: An ``OpOverload``.
        args: Its positional arguments, payloads in place.
        kwargs: Its keyword arguments.
    """
    fits = _FITS.get(func)
    if fits is None or not fits(*args, **kwargs):
        return None
    if func in _IN_PARTS:
        return lambda: _unwrapped_run(_RUN[func], args, kwargs)
    return lambda: _RUN[func](*args, **kwargs)


def _unwrapped_run(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run a function of several ops, on tensors without the wrapper: it only costs time there."""
    wrapped = any(isinstance(v, torch.Tensor) and _is_functional(v) for v in args)
    if not wrapped:
        return function(*args, **kwargs)
    plain = [_unwrapped(v) if isinstance(v, torch.Tensor) else v for v in args]
    named = {k: _unwrapped(v) if isinstance(v, torch.Tensor) else v for k, v in kwargs.items()}
    with torch._C._AutoDispatchBelowAutograd():
        output = function(*plain, **named)
    return _wrapped(output) if isinstance(output, torch.Tensor) else tuple(map(_wrapped, output))


def _einsum(equation: str, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """One dot: the functional wrapper would take an einsum apart before torch_xla sees it."""
    wrapped = _is_functional(a) or _is_functional(b)
    with torch._C._AutoDispatchBelowAutograd():
        product = torch.einsum(equation, _unwrapped(a), _unwrapped(b))
    return _wrapped(product) if wrapped else product


def _wrapped(tensor: torch.Tensor) -> torch.Tensor:
    # What torch_xla's kernels return is wrapped where the process called use_spmd() itself.
    return tensor if _is_functional(tensor) else _to_functional(tensor)


def _unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    if not _is_functional(tensor):
        return tensor
    _sync_functional(tensor)
    return _from_functional(tensor)


# ------------------------------------------------------------------ products


def _is_linear(x: torch.Tensor, weight: torch.Tensor, bias: Any = None) -> bool:
    # torch says what is wrong with other shapes.
    fits = x.ndim > 0 and weight.ndim == 2 and x.shape[-1] == weight.shape[1]
    return fits and (bias is None or bias.shape == weight.shape[:1])


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
    product = _einsum("...n,mn->...m", x, weight)
    return product if bias is None else product + bias


def _linear_weight_grad(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return _einsum("...m,...n->mn", grad, x)


def _is_batched(a: torch.Tensor, b: torch.Tensor) -> bool:
    if min(a.ndim, b.ndim) == 0 or max(a.ndim, b.ndim) < 3:
        return False
    return a.shape[-1] == b.shape[-2 if b.ndim > 1 else 0] and _broadcasts(a, b)


def _broadcasts(a: torch.Tensor, b: torch.Tensor) -> bool:
    pairs = zip(reversed(a.shape[:-2]), reversed(b.shape[:-2]), strict=False)
    return all(size_a == size_b or 1 in (size_a, size_b) for size_a, size_b in pairs)


def _matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    row, column = "x" * (a.ndim > 1), "y" * (b.ndim > 1)
    return _dot(f"{row}z", a, f"z{column}", b, f"{row}{column}")


def _dot(dims_a: str, a: torch.Tensor, dims_b: str, b: torch.Tensor, out: str) -> torch.Tensor:
    """Return an einsum over the last dims; those before them are batch dims, and broadcast."""
    batch = _LETTERS[: max(a.ndim - len(dims_a), b.ndim - len(dims_b))]
    of_a = batch[len(batch) - (a.ndim - len(dims_a)) :]
    of_b = batch[len(batch) - (b.ndim - len(dims_b)) :]
    return _einsum(f"{of_a}{dims_a},{of_b}{dims_b}->{batch}{out}", a, b)


# ------------------------------------------------------------------ attention


def _always(*_: Any, **__: Any) -> bool:
    return True


def _is_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **__: Any) -> bool:
    # torch says what is wrong with other arguments.
    return q.dtype == k.dtype == v.dtype and min(q.ndim, k.ndim, v.ndim) > 1


def _attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Without dropout, which is written out above this."""
    shape = (*torch.broadcast_shapes(q.shape[:-2], *_leading(k, v, enable_gqa)), q.shape[-2])
    split = _split(q, k, v, mask, enable_gqa)
    weights = _weights(*split[:2], split[3], is_causal, _scale(q, scale))
    out = _matmul(weights.to(v.dtype), split[2])
    return out.reshape(*shape, v.shape[-1])


def _leading(k: torch.Tensor, v: torch.Tensor, gqa: bool) -> list[Any]:
    # With grouped heads, those of the query count.
    return [] if gqa else [k.shape[:-2], v.shape[:-2]]


def _scale(q: torch.Tensor, scale: float | None) -> float:
    return q.shape[-1] ** -0.5 if scale is None else scale


def _split(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, gqa: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Give the query heads of one key head a dim of their own; keys are not repeated."""
    groups = k.shape[-3] if k.ndim > 2 else 0
    if not gqa or q.shape[-3] == groups == v.shape[-3]:
        return q, k, v, mask
    if v.shape[-3] != groups:
        k = k.repeat_interleave(q.shape[-3] // groups, -3)
        v = v.repeat_interleave(q.shape[-3] // v.shape[-3], -3)
        return q, k, v, mask
    if mask is not None and mask.ndim >= 3:
        heads = (1, 1) if mask.shape[-3] == 1 else (groups, q.shape[-3] // groups)
        mask = mask.unflatten(-3, heads)
    split = q.unflatten(-3, (groups, q.shape[-3] // groups))
    return split, k.unsqueeze(-3), v.unsqueeze(-3), mask


def _weights(
    q: torch.Tensor,
    k: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool,
    scale: float,
) -> torch.Tensor:
    """Return softmax(q k^T * scale + mask), in float32 at least; zeros in rows without a key."""
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = _dot("xz", q.to(wide), "yz", k.to(wide), "xy") * scale
    if is_causal:
        scores = torch.where(_causal(scores), scores, float("-inf"))
    if mask is None:  # Of a causal one each query sees the first key.
        return torch.softmax(scores, -1)
    is_bool = mask.dtype == torch.bool
    scores = torch.where(mask, scores, float("-inf")) if is_bool else scores + mask
    weights = torch.softmax(scores, -1)
    return torch.where((scores == float("-inf")).all(-1, keepdim=True), 0.0, weights)


def _causal(scores: torch.Tensor) -> torch.Tensor:
    numbers = (torch.arange(n, device=scores.device) for n in scores.shape[-2:])
    rows, columns = map(_unwrapped, numbers)
    return columns <= rows.unsqueeze(-1)


def _sdpa_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    split_q, split_k, split_v, split_mask = _split(q, k, v, mask, enable_gqa)
    factor = _scale(q, scale)
    weights = _weights(split_q, split_k, split_mask, is_causal, factor)
    wide = weights.dtype
    split_grad = grad.reshape(*weights.shape[:-1], v.shape[-1]).to(wide)
    to_weights = _dot("xz", split_grad, "yz", split_v.to(wide), "xy")
    to_scores = weights * (to_weights - (weights * to_weights).sum(-1, keepdim=True)) * factor
    products = (
        (_matmul(to_scores, split_k.to(wide)), split_q, q),
        (_dot("zx", to_scores, "zy", split_q.to(wide), "xy"), split_k, k),
        (_dot("zx", weights, "zy", split_grad, "xy"), split_v, v),
    )
    first, second, third = (_summed(*product, enable_gqa) for product in products)
    return first, second, third


def _summed(
    grad: torch.Tensor, split: torch.Tensor, tensor: torch.Tensor, gqa: bool
) -> torch.Tensor:
    """Add up what was broadcast, and give the gradient its tensor's shape and dtype."""
    total = grad.sum_to_size(split.shape)
    if gqa and split.shape[-3] > tensor.shape[-3]:
        repeats = split.shape[-3] // tensor.shape[-3]
        total = total.unflatten(-3, (tensor.shape[-3], repeats)).sum(-3)
    return total.reshape(tensor.shape).to(tensor.dtype)


_FITS: dict[Any, Callable[..., bool]] = {
    aten.linear.default: _is_linear,
    aten.matmul.default: _is_batched,
    aten.scaled_dot_product_attention.default: _is_attention,
    _weight_grad: _always,
    _attention_grad: _always,
}
_IN_PARTS = {aten.scaled_dot_product_attention.default, _attention_grad}
_RUN: dict[Any, Callable[..., Any]] = {
    aten.linear.default: _linear,
    aten.matmul.default: _matmul,
    aten.scaled_dot_product_attention.default: _attention,
    _weight_grad: _linear_weight_grad,
    _attention_grad: _sdpa_backward,
}
