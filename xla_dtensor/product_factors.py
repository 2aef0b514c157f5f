"""Factors of a product that are told, by their labels, to lie so that they agree.

On a mesh of four axes larger than 1 XLA was found to get products wrong whose factors disagree on
what an axis means (:mod:`xla_dtensor.core.product_order`), even where it may choose how the result
lies. So they are told before the product is made, the smaller one what is left of its cut:

    linear    [a.c, d] x [a.d, c]    the weight is told [-, d]

That is for each op that is run by itself, and for the torch_xla runtime's programs: a step of the
JAX runtime is looked at as a whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from string import ascii_letters
from typing import Any

import torch

from xla_dtensor.core import Layout
from xla_dtensor.core.entries import Gap, axis_sizes, entry_axis, entry_size
from xla_dtensor.core.product_dims import Factor, ProductDims
from xla_dtensor.device_mesh import DeviceMesh
from xla_dtensor.global_state import GlobalState
from xla_dtensor.runtimes import Runtime, functional_ops
from xla_dtensor.runtimes import whole_ops as whole_ops  # defines torch.ops.xla_dtensor

__all__ = ["agreeing_factors", "has_factors", "may_disagree"]

aten = torch.ops.aten
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
    found = _agreeing(equation, factors, payloads[first : first + 2]) if equation else None
    return [*payloads[:first], *found, *payloads[first + 2 :]] if found else payloads


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
        overlaps=lambda one, other: entry_axis(one) == entry_axis(other),
    )
    return [
        functional_ops.constrain(payload, Layout(mesh, cut))
        for payload, cut in zip(payloads, cuts[:2], strict=True)
    ]


def _is_plain(equation: str) -> bool:
    """Whether an einsum names its result, and no letter twice in a factor."""
    factors, arrow, _ = equation.partition("->")
    each = factors.split(",")
    return bool(arrow) and "." not in equation and all(len(set(f)) == len(f) for f in each)


def _of_linear(x: Any, weight: Any, *_: Any) -> str:
    rows = ascii_letters[: x.ndim - 1]
    return f"{rows}Y,ZY->{rows}Z"


def _of_weight_grad(grad: Any, x: Any, *_: Any) -> str:
    rows = ascii_letters[: x.ndim - 1]
    return f"{rows}Z,{rows}Y->ZY"


def _of_matmul(a: Any, b: Any, *_: Any) -> str:
    """Batch dims are counted from the last; one of size 1 is none beside a larger one."""
    left, right = (["Y"], ["Y"]) if a.ndim == 1 else (["X", "Y"], ["Y"])
    if b.ndim > 1:
        right.append("Z")
    result = [*left[:-1], *right[1:]]
    for place in range(max(a.ndim, b.ndim) - 2):
        sizes = [t.shape[-3 - place] if place < t.ndim - 2 else None for t in (a, b)]
        one, other = ascii_letters[2 * place : 2 * place + 2]
        other = one if sizes[0] == sizes[1] else other
        if sizes[0] is not None:
            left.insert(0, one)
        if sizes[1] is not None:
            right.insert(0, other)
        is_left = sizes[1] is None or (sizes[0] is not None and sizes[0] >= sizes[1])
        result.insert(0, one if is_left else other)
    return f"{''.join(left)},{''.join(right)}->{''.join(result)}"


def _of_convolution(x: Any, *others: Any) -> str:
    transposed, _, groups = others[-3:]
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
