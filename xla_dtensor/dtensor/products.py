"""Products of DTensors: factors told to agree, results pinned, optimizers over equal tensors.

On a mesh of four axes larger than 1 XLA was found to get products wrong whose factors disagree on
what an axis means (:mod:`xla_dtensor.core.product_order`), even where it may choose how the result
lies. So they are told before the product is made, the smaller one what is left of its cut:

    linear    [a.c, d] x [a.d, c]    the weight is told [-, d]

That is for each op that is run by itself, and for the torch_xla runtime's programs: a step of the
JAX runtime is looked at as a whole.

`agreeing_factors` is asked by dispatch before a product, and `pin_products` after it. Optimizers of
torch with ``fused=True`` over DTensors are a section of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from string import ascii_letters
from typing import Any

import torch
from torch.optim.adagrad import _multi_tensor_adagrad
from torch.optim.adam import _multi_tensor_adam

from xla_dtensor.core import Layout
from xla_dtensor.core.placements import Gap, axis_sizes, entry_axis, entry_size
from xla_dtensor.core.product_order import Factor, ProductDims
from xla_dtensor.dtensor.labels import GlobalState
from xla_dtensor.dtensor.mesh import DeviceMesh
from xla_dtensor.runtimes import (
    Runtime,
    functional,  # defines torch.ops.xla_dtensor
)
from xla_dtensor.runtimes.nested import leaves

__all__ = ["FUSED", "agreeing_factors", "has_factors", "may_disagree", "pin_products"]

aten = torch.ops.aten


# ---------------------------------------------------------------------------------- Product factors

_MIN_AXES = 4


def has_factors(func: Any) -> bool:
    """Whether an op is a product of two arguments that :func:`agreeing_factors` knows."""
    return func in _EQUATIONS or func in _BY_SHAPE or func is aten.einsum.default


def may_disagree(mesh: DeviceMesh, runtime: Runtime, has_values: bool) -> bool:
    """Whether the factors of a product on a mesh are to be told.

    Args:
        mesh: The mesh of one of them.
        runtime: The runtime.
        has_values: Whether the op is run now; it may be recorded for later.
    """
    if len(mesh.value.root.mesh_shape) < _MIN_AXES:
        return False
    return runtime.tells_factors if has_values else runtime.pins_products


def agreeing_factors(func: Any, args: Sequence[Any], payloads: Sequence[Any]) -> Sequence[Any]:
    """Return the payloads of a product's arguments, with factors that lie so that they agree.

    Args:
        func: The ``OpOverload``, of which :func:`has_factors`.
        args: Its arguments.
        payloads: The arguments with payloads in place of DTensors.
    """
    if func is aten.einsum.default:
        equation, tensors = args[0].replace(" ", ""), payloads[1]
        if len(tensors) != 2 or not _is_plain(equation):
            return payloads
        return [payloads[0], _agreeing(equation, args[1], tensors), *payloads[2:]]
    first, equation = _EQUATIONS.get(func, (0, ""))
    if not equation:
        equation = _BY_SHAPE[func](*args)
    factors = args[first : first + 2]
    agreed = _agreeing(equation, factors, payloads[first : first + 2]) if equation else None
    return [*payloads[:first], *agreed, *payloads[first + 2 :]] if agreed else payloads


def _agreeing(equation: str, factors: Sequence[Any], payloads: Sequence[Any]) -> list[Any]:
    """Return the payloads of two factors, told to agree if their mesh has many axes."""
    states = [getattr(factor, "_spec", None) for factor in factors]
    layouts = [state.span_layout for state in states if isinstance(state, GlobalState)]
    terms = equation.partition("->")[0].split(",")
    if [layout.ndim for layout in layouts] != [len(term) for term in terms]:
        return list(payloads)  # a plain tensor, or a weight that is a vector
    mesh = layouts[0].mesh
    entries = [entry for layout in layouts for dim in layout.dims for entry in dim]
    has_many = sum(size > 1 for size in mesh.mesh_shape) >= _MIN_AXES
    if not has_many or mesh != layouts[1].mesh or any(isinstance(entry, Gap) for entry in entries):
        return list(payloads)
    sizes = axis_sizes(mesh)
    cuts = ProductDims.of_equation(equation).agreed(
        *(Factor(f.shape, layout.dims) for f, layout in zip(factors, layouts, strict=True)),
        size=lambda entry: entry_size(entry, sizes),
        overlaps=lambda a, b: entry_axis(a) == entry_axis(b),
    )
    return [
        functional.constrain(payload, Layout(mesh, cut))
        for payload, cut in zip(payloads, cuts[:2], strict=True)
    ]


def _is_plain(equation: str) -> bool:
    """Whether an einsum names its result, and no letter twice in a factor."""
    factors, arrow, _ = equation.partition("->")
    terms = factors.split(",")
    return bool(arrow) and "." not in equation and all(len(set(f)) == len(f) for f in terms)


def _of_linear(x: Any, weight: Any, *_: Any) -> str:
    rows = ascii_letters[: x.ndim - 1]
    return f"{rows}Y,ZY->{rows}Z"


def _of_weight_grad(grad: Any, x: Any, *_: Any) -> str:
    rows = ascii_letters[: x.ndim - 1]
    return f"{rows}Z,{rows}Y->ZY"


def _of_matmul(a: Any, b: Any, *_: Any) -> str:
    """Batch dims are counted from the last; one of size 1 is none beside a larger one."""
    a_letters, b_letters = (["Y"], ["Y"]) if a.ndim == 1 else (["X", "Y"], ["Y"])
    if b.ndim > 1:
        b_letters.append("Z")
    letters = [*a_letters[:-1], *b_letters[1:]]
    for place in range(max(a.ndim, b.ndim) - 2):
        sizes = [t.shape[-3 - place] if place < t.ndim - 2 else None for t in (a, b)]
        a_letter, b_letter = ascii_letters[2 * place : 2 * place + 2]
        b_letter = a_letter if sizes[0] == sizes[1] else b_letter
        if sizes[0] is not None:
            a_letters.insert(0, a_letter)
        if sizes[1] is not None:
            b_letters.insert(0, b_letter)
        is_left = sizes[1] is None or (sizes[0] is not None and sizes[0] >= sizes[1])
        letters.insert(0, a_letter if is_left else b_letter)
    return f"{''.join(a_letters)},{''.join(b_letters)}->{''.join(letters)}"


def _of_convolution(x: Any, *options: Any) -> str:
    transposed, _, groups = options[-3:]
    if groups != 1:
        return ""
    kernel = "XC" if transposed else "CX"
    places = ascii_letters[: x.ndim - 2]
    return f"BX{places},{kernel}{places.upper().translate(_APART)}->BC{places}"


# Letters of the kernel's places, of which the result has none.
_APART = str.maketrans("ABC", "RST")
# The place of the first factor among the arguments, and what is computed.
_EQUATIONS: dict[Any, tuple[int, str]] = {
    aten.mm.default: (0, "xy,yz->xz"),
    aten._int_mm.default: (0, "xy,yz->xz"),
    aten.addmm.default: (1, "xy,yz->xz"),
    aten.bmm.default: (0, "bxy,byz->bxz"),
    aten.baddbmm.default: (1, "bxy,byz->bxz"),
    aten.addbmm.default: (1, "bxy,byz->xz"),
    aten.mv.default: (0, "xy,y->x"),
    aten.addmv.default: (1, "xy,y->x"),
}
_BY_SHAPE: dict[Any, Any] = {
    aten.linear.default: _of_linear,
    aten.matmul.default: _of_matmul,
    aten.convolution.default: _of_convolution,
    torch.ops.xla_dtensor.linear_weight_grad.default: _of_weight_grad,
}


# ------------------------------- Products that XLA might put on the wrong devices, by their labels
#
# They are pinned to them.
#
# Which products XLA gets wrong, and why, see :mod:`xla_dtensor.core.product_order`. The JAX runtime
# looks at how a whole program will be cut. Where that cannot be asked before compiling, the labels
# are the next best: a product is told to lie as its label says, with the sum done,
#
#     linear_weight_grad   [b, c] x [b, a.c]  ->  [c, a] sum(b)        told [c, a]
#
# so that what is done with it later cannot ask XLA for a cut whose order it loses. On a mesh of
# three axes larger than 1 all products are told: how XLA cuts a factor that nobody placed may
# differ from its label. On one of two only a product with batch dims is concerned, and only where
# its sum is cut.
#
# On one of four the factors are told too (:mod:`xla_dtensor.dtensor.products`).

_BATCHED = frozenset(
    {
        aten.bmm.default,
        aten.baddbmm.default,
        aten.matmul.default,
        aten.einsum.default,
    }
)
_PRODUCTS = _BATCHED | {
    aten.mm.default,
    aten._int_mm.default,
    aten.addmm.default,
    aten.mv.default,
    aten.addmv.default,
    aten.addbmm.default,
    aten.linear.default,
    aten.convolution.default,
    aten.convolution_backward.default,
}
_NAMES = frozenset({"xla_dtensor::linear_weight_grad"})


def pin_products(states: Any, func: Any, dtensors: Sequence[Any]) -> None:
    """Note in the states of a product's outputs whether those are to be told how to lie.

    Args:
        states: A state, or nested lists of states and None.
        func: The ``OpOverload``.
        dtensors: The DTensors among its arguments.
    """
    if func not in _PRODUCTS and func._schema.name not in _NAMES:
        return
    pending = {axis for tensor in dtensors for axis in _partial_axes(tensor._spec)}
    for state in leaves([states]):
        if isinstance(state, GlobalState):
            # A tensor on a submesh may be cut along the other axes as well.
            axes = sum(size > 1 for size in state.span_layout.mesh.mesh_shape)
            is_cut_sum = not pending.issuperset(_partial_axes(state))
            state.pinned = axes > 2 or (axes == 2 and is_cut_sum and func in _BATCHED)


def _partial_axes(state: GlobalState) -> list[Any]:
    names = state.mesh.value.axis_names
    return [n for n, p in zip(names, state.placements, strict=True) if p.is_partial()]


# ---------------------------------------------------------------- fused=True of torch's optimizers
#
# The ops behind it, as the ops on lists that XLA fuses.
#
# On a GPU a fused optimizer is one kernel for all parameters. XLA makes such kernels of ordinary
# ops, so here the fused ops are torch's own ``foreach`` form, which is the same formula::
#
#     torch.optim.AdamW(model.parameters(), fused=True)      the default of transformers' Trainer
#         aten._fused_adamw_(params, grads, ..., lr=...)      what its step calls
#             torch.optim.adam._multi_tensor_adam(...)        what runs
#
# Invariants:
#
# * With ``grad_scale`` gradients are divided by it first; where ``found_inf`` is 1 nothing changes.
# * torch counts a step before it calls the fused op, and in the other form while it runs.
# * A compiled step takes the other form by itself (``optimizer``): the ops here would
#   make its rate a number of Python.

foreach: Any = torch  # whose ops on lists are not public


def _guarded(
    update: Callable[..., None], written: list[Any], grads: Any, grad_scale: Any, found_inf: Any
) -> None:
    """Update with unscaled gradients, unless one of them is infinite."""
    if grad_scale is not None:
        grads = [grad / grad_scale for grad in grads]
    copies = None if found_inf is None else [tensor.clone() for tensor in written]
    update(list(grads))
    if copies is not None:
        for tensor, copy in zip(written, copies, strict=True):
            tensor.copy_(torch.where(found_inf != 0, copy, tensor))


def _number(rate: Any) -> float:
    return rate.item() if isinstance(rate, torch.Tensor) else rate


def _on_lists(form: Callable[..., None], **fixed: Any) -> Callable[..., None]:
    """The fused op that computes what one of torch's functions on lists does."""

    def run(
        params: Any,
        grads: Any,
        *states: Any,
        grad_scale: Any = None,
        found_inf: Any = None,
        **options: Any,
    ) -> None:
        *state_lists, steps = map(list, states)
        options["lr"] = _number(options["lr"])
        has_complex = any(param.is_complex() for param in params)

        def update(grads: list[Any]) -> None:
            foreach._foreach_sub_(steps, 1)
            lists = (list(params), grads, *state_lists, steps, None, None)
            form(*lists, has_complex=has_complex, differentiable=False, **fixed, **options)

        written = [*params, *(tensor for tensors in state_lists for tensor in tensors)]
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
