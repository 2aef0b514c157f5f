"""``fused=True`` of torch's optimizers: the ops behind it, as the ops on lists that XLA fuses.

On a GPU a fused optimizer is one kernel for all parameters. XLA makes such kernels of ordinary ops,
so here the fused ops are torch's own ``foreach`` form, which is the same formula::

    torch.optim.AdamW(model.parameters(), fused=True)      the default of transformers' Trainer
        aten._fused_adamw_(params, grads, ..., lr=...)      what its step calls
            torch.optim.adam._multi_tensor_adam(...)        what runs

Invariants:

* With ``grad_scale`` gradients are divided by it first; where ``found_inf`` is 1 nothing changes.
* torch counts a step before it calls the fused op, and in the other form while it runs.
* A compiled step takes the other form by itself (``runtimes.optimizer_inputs``): the ops here would
  make its rate a number of Python.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.adagrad import _multi_tensor_adagrad
from torch.optim.adam import _multi_tensor_adam

__all__ = ["FUSED"]

aten = torch.ops.aten
foreach: Any = torch  # whose ops on lists are not public


def _guarded(
    update: Callable[..., None], written: list[Any], grads: Any, grad_scale: Any, found_inf: Any
) -> None:
    """Update with unscaled gradients, unless one of them is infinite."""
    if grad_scale is not None:
        grads = [grad / grad_scale for grad in grads]
    before = None if found_inf is None else [tensor.clone() for tensor in written]
    update(list(grads))
    if before is not None:
        for tensor, old in zip(written, before, strict=True):
            tensor.copy_(torch.where(found_inf != 0, old, tensor))


def _number(rate: Any) -> float:
    return rate.item() if isinstance(rate, torch.Tensor) else rate


def _on_lists(form: Callable[..., None], **fixed: Any) -> Callable[..., None]:
    """The fused op that computes what one of torch's functions on lists does.

    Args:
        form: Takes parameters, gradients, lists of state and the counts of steps.
        **fixed: What the fused op has no argument for.
    """

    def run(
        params: Any,
        grads: Any,
        *states: Any,
        grad_scale: Any = None,
        found_inf: Any = None,
        **options: Any,
    ) -> None:
        *others, steps = map(list, states)
        options["lr"] = _number(options["lr"])
        has_complex = any(param.is_complex() for param in params)

        def update(grads: list[Any]) -> None:
            foreach._foreach_sub_(steps, 1)
            given = (list(params), grads, *others, steps, None, None)
            form(*given, has_complex=has_complex, differentiable=False, **fixed, **options)

        written = [*params, *(tensor for tensors in others for tensor in tensors)]
        _guarded(update, written, grads, grad_scale, found_inf)

    return run


def _sgd(
    params: Any,
    grads: Any,
    buffers: Any,
    *,
    weight_decay: float,
    momentum: float,
    lr: Any,
    dampening: float,
    nesterov: bool,
    maximize: bool,
    is_first_step: bool,
    grad_scale: Any = None,
    found_inf: Any = None,
) -> None:
    def update(grads: list[Any]) -> None:
        if maximize:
            grads = list(foreach._foreach_neg(grads))
        if weight_decay:
            grads = list(foreach._foreach_add(grads, params, alpha=weight_decay))
        if momentum and is_first_step:
            foreach._foreach_copy_(buffers, grads)
        elif momentum:
            foreach._foreach_mul_(buffers, momentum)
            foreach._foreach_add_(buffers, grads, alpha=1 - dampening)
        if momentum and nesterov:
            grads = list(foreach._foreach_add(grads, buffers, alpha=momentum))
        elif momentum:
            grads = list(buffers)
        foreach._foreach_sub_(params, foreach._foreach_mul(grads, _number(lr)))

    _guarded(update, [*params, *(buffers if momentum else ())], grads, grad_scale, found_inf)


FUSED: dict[Any, Callable[..., None]] = {
    getattr(packet, overload): run
    for packet, run in (
        (
            aten._fused_adam_,
            _on_lists(_multi_tensor_adam, capturable=False, decoupled_weight_decay=False),
        ),
        (
            aten._fused_adamw_,
            _on_lists(_multi_tensor_adam, capturable=False, decoupled_weight_decay=True),
        ),
        (aten._fused_adagrad_, _on_lists(_multi_tensor_adagrad, has_sparse_grad=False)),
        (aten._fused_sgd_, _sgd),
    )
    for overload in packet.overloads()
    if "out" not in overload
}
