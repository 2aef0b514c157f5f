"""Labels: what a DTensor knows beside its payload, and the placements of an op's result.

`propagate` gives the placements of what an op returns, forward or backward: a gradient is the
result of an op like any other. Whole ops have rules here (`WHOLE_OP_LABELS`); of all others
PyTorch's ShardingPropagator is asked, on a mesh that only has the shape.

Many DTensors share one GlobalState: an op's answer is kept with the state of its output, so a
repeated op makes none. Its parts are therefore never assigned to; a DTensor that changes is given
another.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from math import prod
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.distributed.device_mesh import DeviceMesh as TorchDeviceMesh
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._python_dispatch import _disable_current_modes

from mesh_utils import Axis, Mesh
from xla_dtensor.core import Layout, LayoutError
from xla_dtensor.core.spanning import layout_on_span, spanning_mesh
from xla_dtensor.dtensor.mesh import DeviceMesh, as_device_mesh
from xla_dtensor.runtimes import scalars
from xla_dtensor.runtimes.guards import off_the_record
from xla_dtensor.runtimes.nested import leaves, map_nested
from xla_dtensor.runtimes.op_meta import Meta, output_meta
from xla_dtensor.runtimes.whole_ops import (
    is_foreach,
    linear_loss,
    linear_loss_backward,
    num_places,
)

__all__ = [
    "GlobalState",
    "MadeBy",
    "OuterCuts",
    "Placements",
    "joint_mesh",
    "labels_of_outputs",
    "legal_placements",
    "note_op",
    "outer_cuts_of_layout",
    "placements_on",
    "propagate",
    "rule_words",
    "same_placements",
    "split",
    "with_strides",
]


# ----------------------------------- What is known of the mesh axes that a tensor's own mesh lacks
#
# A tensor on ``mesh["tp"]`` is a tensor of the whole (dp, tp) mesh. Its placements say nothing of
# dp, yet its rows may well be sharded over dp: it was computed from a batch that is. A constraint
# that took "nothing said" for "replicated" would gather the batch at every redistribute of a
# tensor-parallel plan. So a tensor's state carries what is known, as (axis, dim) pairs, and ops
# pass it on: labels are propagated on the mesh of all axes of which something is known, and taken
# apart again.
#
#     x   on mesh["tp"]: [Replicate()], known dp on dim 0        a batch
#     w   on mesh["tp"]: [Shard(0)]
#     F.linear(x, w)     on mesh["tp"]: [Shard(1)], known dp on dim 0
#
# Where nothing is known the dims stay open for XLA to choose, where it can be told so.

OuterCuts: TypeAlias = tuple[tuple[Axis, int], ...]


def outer_cuts_of_layout(layout: Layout | None, mesh: DeviceMesh) -> OuterCuts:
    """Return what a layout on the spanning mesh says of the axes that `mesh` lacks.

    Args:
        layout: A layout of whole axes, or None.
        mesh: The mesh.
    """
    if layout is None:
        return ()
    inner_axes = set(mesh.value.axis_names)
    pairs = [(axis, dim) for dim, axes in enumerate(layout.dims) for axis in axes]
    return tuple((axis, dim) for axis, dim in pairs if axis not in inner_axes)  # pyright: ignore


def _cuts(state: GlobalState) -> list[tuple[Axis, int]]:
    pairs = zip(state.mesh.value.axis_names, state.placements, strict=True)
    return [(axis, p.dim) for axis, p in pairs if type(p) is Shard]


def _related(mesh: DeviceMesh, other_mesh: DeviceMesh) -> bool:
    if mesh is other_mesh or spanning_mesh(mesh.value) == spanning_mesh(other_mesh.value):
        return True
    # A submesh without axes of size 1 has all devices, and so spans them by itself.
    root = mesh.value.root
    names = {*mesh.value.axis_names, *other_mesh.value.axis_names}
    return root == other_mesh.value.root and names <= {*root.axis_names}


def joint_mesh(mesh: DeviceMesh, states: Sequence[GlobalState]) -> DeviceMesh:
    """Return the mesh of the axes of `mesh` and all that `states` know of.

    `mesh` itself where there are no others, which is nearly always.
    """
    if not [state for state in states if state.outer_cuts or state.mesh is not mesh]:
        return mesh
    span = spanning_mesh(mesh.value)
    axes = set(mesh.value.axis_names)
    for state in states:
        if _related(state.mesh, mesh):
            axes |= {axis for axis, _ in (*_cuts(state), *state.outer_cuts)}
    if axes == set(mesh.value.axis_names):
        return mesh
    return as_device_mesh(span[tuple(axis for axis in span.axis_names if axis in axes)])


def placements_of_outer_cuts(outer_cuts: OuterCuts, mesh: DeviceMesh) -> tuple[Any, ...]:
    """Return what is known as placements on a mesh."""
    dims = dict(outer_cuts)
    return tuple(
        Shard(dims[axis]) if axis in dims else Replicate() for axis in mesh.value.axis_names
    )


def placements_on(state: GlobalState, mesh: DeviceMesh) -> tuple[Any, ...]:
    """Return a tensor's placements on another mesh of the same devices; Replicate if unknown."""
    if state.mesh is mesh or state.mesh == mesh:
        return state.placements
    if not _related(state.mesh, mesh):
        return (Replicate(),) * mesh.ndim
    by_axis: dict[Axis, Any] = {axis: Shard(dim) for axis, dim in state.outer_cuts}
    by_axis |= dict(zip(state.mesh.value.axis_names, state.placements, strict=True))
    return tuple(by_axis.get(axis, Replicate()) for axis in mesh.value.axis_names)


def split(placements: Sequence[Any], joint: DeviceMesh, mesh: DeviceMesh) -> tuple[Any, OuterCuts]:
    """Take placements on a joint mesh apart: those on `mesh`, and what is known beside it."""
    by_axis = dict(zip(joint.value.axis_names, placements, strict=True))
    inner_axes = mesh.value.axis_names
    outer_cuts = tuple(
        (axis, p.dim) for axis, p in by_axis.items() if axis not in inner_axes and type(p) is Shard
    )
    return tuple(by_axis[axis] for axis in inner_axes), outer_cuts


# ------------------------------------------------------------------------------------- GlobalState

_tokens: dict[Any, object] = {}
_TOKENS_LIMIT = 50_000


class GlobalState(DTensorSpec):
    """What a DTensor knows beside its payload; torch reads mesh, placements and meta from it."""

    mesh: DeviceMesh
    # None until it is asked for.
    cached_token: object | None = None
    # (axis, dim) pairs: what is known of the axes that the mesh lacks, where it is a submesh.
    outer_cuts: OuterCuts = ()
    # Which op it is the state of the output of, for `explain`; None where a caller placed it.
    made_by: Any = None
    # Whether such an output is told to lie as its label says; see `products`.
    pinned: bool = False

    @property
    def layout(self) -> Layout:
        """The placements as a Layout of the mesh value."""
        return Layout.from_placements(self.placements, len(self.shape), self.mesh.value)

    @property
    def span_layout(self) -> Layout:
        """The layout over all devices of the root, with what is known of the other axes."""
        return layout_on_span(self.layout, self.outer_cuts)

    def outer_cuts_on(self, mesh: DeviceMesh) -> OuterCuts:
        """Return what is known of the axes that a mesh of the same devices lacks."""
        if mesh is self.mesh:
            return self.outer_cuts
        if not _related(self.mesh, mesh):
            return ()
        inner_axes = mesh.value.axis_names
        return tuple(pair for pair in (*_cuts(self), *self.outer_cuts) if pair[0] not in inner_axes)

    def with_placements(self, mesh: DeviceMesh, placements: tuple[Any, ...]) -> GlobalState:
        """Return the state of the same values on another mesh, or with other placements."""
        meta: Any = self.tensor_meta
        state = GlobalState(mesh, placements, tensor_meta=meta)
        state.outer_cuts = self.outer_cuts_on(mesh)
        return state

    def with_stride(self, stride: tuple[int, ...]) -> GlobalState:
        """Return the state of the same tensor with another stride, as torch tells views by it."""
        meta: Any = self.tensor_meta
        if stride == meta.stride:
            return self
        meta = TensorMeta(meta.shape, stride, meta.dtype)
        state = GlobalState(self.mesh, self.placements, tensor_meta=meta)
        state.outer_cuts = self.outer_cuts
        return state

    def token(self) -> object:
        """Return an object that is one and the same for states of the same meaning.

        Comparing states takes microseconds, comparing their tokens none.
        """
        if self.cached_token is None:
            meta: Any = self.tensor_meta
            # In torch 2.9 a _StridedShard equals the Shard of its dim, and has its hash.
            kinds = tuple(map(type, self.placements))
            key = (self.mesh, kinds, self.placements, self.outer_cuts)
            key = (*key, meta.shape, meta.stride, meta.dtype)
            if len(_tokens) >= _TOKENS_LIMIT:
                _tokens.clear()
            try:
                token = _tokens.setdefault(key, object())
            except TypeError:  # a size that torch.compile has not fixed
                token = object()
            self.cached_token = token
        return self.cached_token

    def _check_equals(self, other: Any, skip_shapes: bool = False) -> bool:
        # Newer versions of torch guard compiled functions with this, and leave the shapes to guards
        # on the inner tensor, of which there are none for a JaxTensor.
        is_equal = super()._check_equals(other)  # pyright: ignore[reportAttributeAccessIssue]
        return is_equal and self.outer_cuts == getattr(other, "outer_cuts", ())


# ----------------------------------------- Keep a strided shard strided in the labels of torch 2.9
#
# There a ``_StridedShard`` is a kind of ``Shard``, and most of torch's rules answer with a plain
# ``Shard`` where they mean "as the argument". On a (dp=2, tp=4) mesh, ``x + 1`` of a tensor that
# lies as ``[_StridedShard(0, 4), Shard(0)]``, rows cut by tp and then by dp, would be labelled
# ``[Shard(0), Shard(0)]``, cut by dp and then by tp.

_CONFUSED = issubclass(_StridedShard, Shard)


def same_placements(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """Tell whether placements are equal; in torch 2.9 a strided shard equals the plain one.

    Example:
        >>> same_placements([_StridedShard(0, split_factor=4)], [Shard(0)])
        False
    """
    return list(map(type, a)) == list(map(type, b)) and tuple(a) == tuple(b)


def with_strides(answer: Any, arguments: Iterable[Sequence[Any]]) -> Any:
    """Return torch's answer with the strides of the arguments.

    Args:
        answer: The placements of an output, or a list with one (or None) per output.
        arguments: The placements of each tensor argument.

    Returns:
        The same structure. A placement whose stride cannot be told is Replicate.
    """
    strided = [a for a in arguments if any(isinstance(p, _StridedShard) for p in a)]
    if not _CONFUSED or not strided or answer is None:
        return answer
    if isinstance(answer, list):
        return [with_strides(placements, strided) for placements in answer]
    return tuple(_placement(answer, axis, strided) for axis in range(len(answer)))


def _placement(output: Sequence[Any], axis: int, strided: Sequence[Sequence[Any]]) -> Any:
    placement = output[axis]
    sources = [a for a in strided if axis < len(a) and isinstance(a[axis], _StridedShard)]
    if type(placement) is not Shard or not sources:
        return placement
    for source in sources:
        # The stride counts the cuts that later axes make outside: they have to be there again.
        if _later_cuts(source, axis) == _later_cuts(output, axis):
            return _StridedShard(placement.dim, split_factor=source[axis].split_factor)
    return Replicate()


def _later_cuts(placements: Sequence[Any], axis: int) -> list[int]:
    dim = placements[axis].dim
    later = range(axis + 1, len(placements))
    return [i for i in later if getattr(placements[i], "dim", None) == dim]


# ---------------------------------------------------------------------------------- Whole op labels
#
# Labels for the ops that xla_dtensor keeps whole and that PyTorch's propagator never sees, and for
# convolutions and batch norm: PyTorch's rules gather a batch that is cut, or cut the channels, as
# its kernels on each device need that. A global view does not, and a program that was told to lie
# so moved twice the bytes of one by hand.
#
# Each rule looks at one mesh axis at a time, which is enough because the axes act independently: it
# maps the placements that the arguments have on the axis to the output's. What no rule names is
# Replicate.

aten = torch.ops.aten
Shape = Sequence[int]


def _dim(placement: Placement) -> int | None:
    """The sharded dim, None for anything but a plain Shard."""
    return placement.dim if type(placement) is Shard else None  # pyright: ignore


class _Factor(NamedTuple):
    """A factor of a product on one mesh axis: which dim of the product it cuts, and its sizes."""

    cuts: int | None
    shape: Sequence[int]


def _product(left: _Factor, right: _Factor) -> Placement:
    """Let the larger factor stay as it is, the left one of two alike; the other is gathered.

    So XLA does it. PyTorch would take what moves the fewest bytes, which is the same thing mostly.
    """
    dim = right.cuts if left.cuts is None else left.cuts
    if None not in (left.cuts, right.cuts) and left.cuts != right.cuts:
        dim = right.cuts if prod(right.shape) > prod(left.shape) else left.cuts
    return Replicate() if dim is None else Shard(dim)


def _linear(x: Any, weight: Any, x_shape: Shape, weight_shape: Shape) -> Placement:
    x_dim, weight_dim, last = _dim(x), _dim(weight), len(x_shape) - 1
    if x_dim == last and weight_dim == 1:
        return Partial()
    return _product(
        _Factor(None if x_dim == last else x_dim, x_shape),
        _Factor(last if weight_dim == 0 else None, weight_shape),
    )


def _matmul(a: Any, b: Any, a_shape: Shape, b_shape: Shape) -> Placement:
    a_ndim, b_ndim = len(a_shape), len(b_shape)
    a_dim, b_dim = _dim(a), _dim(b)
    a_sum, b_sum = a_ndim - 1, max(b_ndim - 2, 0)
    if a_dim == a_sum and b_dim == b_sum:
        return Partial()
    # A dim of size 1 is spread over the other factor's; the sums of a vector leave no dim.
    if a_dim is not None and (a_dim == a_sum or a_shape[a_dim] == 1):
        a_dim = None
    if b_dim is not None and (b_dim == b_sum or b_shape[b_dim] == 1):
        b_dim = None
    if a_dim is not None and b_ndim > 1:
        a_dim += max(a_ndim, b_ndim) - a_ndim
    if b_dim is not None:
        b_dim += max(a_ndim, b_ndim) - b_ndim if a_ndim > 1 else -(b_dim > b_sum)
    return _product(_Factor(a_dim, a_shape), _Factor(b_dim, b_shape))


def _weight_grad(grad: Any, x: Any, grad_shape: Shape, x_shape: Shape) -> Placement:
    grad_dim, x_dim, last = _dim(grad), _dim(x), len(x_shape) - 1
    if grad_dim is not None and grad_dim == x_dim and grad_dim < last:
        return Partial()
    return _product(
        _Factor(0 if grad_dim == last else None, grad_shape),
        _Factor(1 if x_dim == last else None, x_shape),
    )


def _attention(q: Any, k: Any, v: Any, q_shape: Shape, *_: Shape) -> Placement:
    ndim = len(q_shape)
    q_dim, k_dim, v_dim = _dim(q), _dim(k), _dim(v)
    if q_dim is not None and q_dim == k_dim == v_dim and q_dim < ndim - 2:
        return Shard(q_dim)
    if q_dim == ndim - 2 and k_dim is None and v_dim is None:
        return Shard(ndim - 2)
    return Replicate()


def _convolution(x: Any, weight: Any, x_shape: Shape, weight_shape: Shape) -> Placement:
    """Channels are the sums of a product; the dims of an image are whole on each device."""
    if _dim(x) == _dim(weight) == 1:
        return Partial()
    return _product(
        _Factor(0 if _dim(x) == 0 else None, x_shape),
        _Factor(1 if _dim(weight) == 0 else None, weight_shape),
    )


def _image_grad(grad: Any, weight: Any, grad_shape: Shape, weight_shape: Shape) -> Placement:
    if _dim(grad) == 1 and _dim(weight) == 0:
        return Partial()
    return _product(
        _Factor(0 if _dim(grad) == 0 else None, grad_shape),
        _Factor(1 if _dim(weight) == 1 else None, weight_shape),
    )


def _kernel_grad(grad: Any, x: Any, grad_shape: Shape, x_shape: Shape) -> Placement:
    if _dim(grad) == _dim(x) == 0:
        return Partial()
    return _product(
        _Factor(0 if _dim(grad) == 1 else None, grad_shape),
        _Factor(1 if _dim(x) == 1 else None, x_shape),
    )


def _convolutions(num_axes: int, args: Any) -> Any:
    transposed, groups = args[6], args[8]
    return None if transposed or groups > 1 else _per_axis(_convolution, 2)(num_axes, args)


def _convolution_grads(num_axes: int, args: Any) -> Any:
    (grad, x, weight), transposed, groups = args[:3], args[7], args[9]
    if transposed or groups > 1:
        return None
    of_bias = [Shard(0) if _dim(p) == 1 else Partial() if _dim(p) == 0 else p for p in grad[0]]
    return [
        _per_axis(_image_grad, 2)(num_axes, (grad, weight)),
        _per_axis(_kernel_grad, 2)(num_axes, (grad, x)),
        tuple(of_bias),
    ]


def _batch_norm(num_axes: int, args: Any) -> list[Any]:
    """The result lies as the images, what is one number for each channel as their channels."""
    placements = args[0][0]
    images = tuple([Replicate() if _dim(p) is None else p for p in placements])
    numbers = tuple([Shard(0) if _dim(p) == 1 else Replicate() for p in placements])
    return [images, numbers, numbers]


def _batch_norm_and_averages(num_axes: int, args: Any) -> list[Any]:
    images, *numbers = _batch_norm(num_axes, args)
    return [images, *numbers, *numbers]


def _batch_norm_grads(num_axes: int, args: Any) -> list[Any]:
    return _batch_norm(num_axes, args[1:])


def _per_axis(rule: Callable[..., Placement], tensors: int) -> Callable[[int, Any], Any]:
    def placements(num_axes: int, args: Any) -> tuple[Placement, ...]:
        operands = args[:tensors]
        shapes = [shape for _, shape, *_ in operands]
        return tuple(
            [rule(*[label[axis] for label, *_ in operands], *shapes) for axis in range(num_axes)]
        )

    return placements


def _attention_grads(num_axes: int, args: Any) -> list[Any]:
    return [args[1][0], args[2][0], args[3][0]]


def _lean_attention(num_axes: int, args: Any) -> list[Any]:
    output = _per_axis(_attention, 3)(num_axes, args)
    return [output, output]  # the sums have all dims of the output but the last


def _linear_loss(num_axes: int, args: Any) -> list[Any]:
    """One number for each token: it lies as the tokens do."""
    placements, shape = args[0][:2]
    token_cuts = [p if _dim(p) not in (None, len(shape) - 1) else Replicate() for p in placements]
    return [tuple(token_cuts), tuple(token_cuts)]


def _linear_loss_grads(num_axes: int, args: Any) -> list[Any]:
    of_bias = [p if _dim(p) == 0 else Replicate() for p in args[2][0]]
    return [args[1][0], args[2][0], tuple(of_bias)]


def _replicated(num_axes: int, args: Any) -> tuple[Placement, ...]:
    """PyTorch has no rule for products of groups of rows, and asking it logs an error each time."""
    return (Replicate(),) * num_axes


def _bits(num_axes: int, args: Any) -> tuple[Placement, ...]:
    """The bits of a sum are not the sum of bits, as PyTorch's label would have it."""
    return tuple([p if _dim(p) is not None else Replicate() for p in args[0][0]])


WHOLE_OP_LABELS: dict[Any, Callable[[int, Any], Any]] = {
    aten.linear.default: _per_axis(_linear, 2),
    aten.matmul.default: _per_axis(_matmul, 2),
    aten.scaled_dot_product_attention.default: _per_axis(_attention, 3),
    torch.ops.xla_dtensor.linear_weight_grad.default: _per_axis(_weight_grad, 2),
    torch.ops.xla_dtensor.sdpa_backward.default: _attention_grads,
    torch.ops.xla_dtensor.sdpa_lean.default: _lean_attention,
    torch.ops.xla_dtensor.sdpa_lean_backward.default: _attention_grads,
    linear_loss: _linear_loss,
    linear_loss_backward: _linear_loss_grads,
    aten.view.dtype: _bits,
    aten._grouped_mm.default: _replicated,
    aten.convolution.default: _convolutions,
    aten.convolution_backward.default: _convolution_grads,
    aten.native_batch_norm.default: _batch_norm,
    aten._native_batch_norm_legit_functional.default: _batch_norm_and_averages,
    aten._native_batch_norm_legit.no_stats: _batch_norm,
    aten.native_batch_norm_backward.default: _batch_norm_grads,
}


# ------------------------------------------------------------------------ Placements of op outputs
#
# PyTorch's own ShardingPropagator, asked on a shadow mesh.
#
# Ops run on global tensors, so their values are right whatever the placements; what PyTorch would
# have said of the output is a *label*. It is computed by PyTorch's propagator on a shadow mesh of
# device type "cpu" (the propagator consults device handles that "xla" does not have, and only
# shapes matter), and it is never enforced.
#
# An op without a rule gets Replicate, with one log line per op; where a rule exists but refuses the
# placements on all mesh axes together, each axis is asked about alone. Answers are cached per op,
# argument description and mesh.

Placements = tuple[Any, ...]
logger = logging.getLogger("xla_dtensor")

_SAME_AS_FIRST = {
    aten.detach.default,
    aten.alias.default,
    aten.clone.default,
    aten._to_copy.default,
    aten.contiguous.default,
}
# What is made like the first argument, of other values.
_LIKE_FIRST = {aten.zeros_like.default, aten.ones_like.default, aten.empty_like.default}
_LIKE_FIRST |= {aten.full_like.default}
# What leaves all dims but one as they are, and where it is told which.
_ALONG_A_DIM = {
    aten.cat.default: 1,
    aten.slice.Tensor: 1,
    aten.split.Tensor: 2,
    aten.split_with_sizes.default: 2,
}
_MANY = 16
_cache: dict[Any, Any] = {}
_CACHE_LIMIT = 50_000
_logged: set[Any] = set()


def propagate(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], mesh: DeviceMesh) -> Any:
    """Return the placements of the op's outputs.

    Args:
        func: An ``OpOverload``.
        args: Its arguments, DTensors in place.
        kwargs: Its keyword arguments.
        mesh: The mesh to express the answer on.

    Returns:
        One tuple of placements for all outputs, or a list with one (or None) per output.
    """
    if func in _SAME_AS_FIRST:
        return _placements(args[0], mesh)
    args, kwargs = map_nested(lambda v: _describe(v, mesh), (tuple(args), dict(kwargs)))
    key = (func, mesh, _hashable((args, kwargs)))
    try:
        answer = _cache.get(key)
    except TypeError:  # an argument that has no hash
        return _ask(func, args, kwargs, mesh)
    if answer is None:
        if len(_cache) >= _CACHE_LIMIT:
            _cache.clear()
        answer = _cache[key] = _ask(func, args, kwargs, mesh)
    return answer


def outer_cuts_of_outputs(
    func: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    view_cuts: Sequence[OuterCuts],
    span: Mesh,
    output: Any,
) -> list[OuterCuts]:
    """Return what is known of each output of an op on LocalViews, outside of their region."""
    axes = {axis for cuts in view_cuts for axis, _ in cuts}
    mesh = as_device_mesh(span[tuple(axis for axis in span.axis_names if axis in axes)])
    outputs = [output] if isinstance(output, torch.Tensor) else list(output)
    labels = labels_of_outputs(propagate(func, args, kwargs, mesh), len(outputs))
    outer_cuts: list[OuterCuts] = []
    for label, tensor in zip(labels, outputs, strict=True):
        ndim = tensor.ndim if isinstance(tensor, torch.Tensor) else 0
        pairs = zip(mesh.value.axis_names, legal_placements(label, ndim, mesh), strict=True)
        outer_cuts.append(tuple((axis, p.dim) for axis, p in pairs if type(p) is Shard))
    return outer_cuts


def labels_of_outputs(placements: Any, count: int) -> list[Any]:
    """Return one answer of :func:`propagate` per output, where it may have given one for all."""
    labels = placements if isinstance(placements, list) else [placements]
    return labels if len(labels) == count else labels[:1] * count


def _placements(tensor: torch.Tensor, mesh: DeviceMesh) -> Placements:
    if isinstance(tensor, TorchDTensor):
        return placements_on(tensor._spec, mesh)  # pyright: ignore[reportArgumentType]
    return placements_of_outer_cuts(getattr(tensor, "_outer_cuts", ()), mesh)


class _Described(tuple):
    """(placements, shape, stride, dtype) of one DTensor argument."""

    __slots__ = ()


def _describe(argument: Any, mesh: DeviceMesh) -> Any:
    if isinstance(argument, torch.Tensor):
        placements = _placements(argument, mesh)
        return _Described((placements, argument.shape, argument.stride(), argument.dtype))
    return scalars.stand_in(argument)


def _hashable(argument: Any) -> Any:
    if isinstance(argument, _Described):
        # In torch 2.9 a _StridedShard equals the Shard of its dim, and has its hash.
        return (*map(type, argument[0]), *argument)
    if isinstance(argument, (list, tuple)):
        return (type(argument).__name__, *[_hashable(v) for v in argument])
    if isinstance(argument, dict):
        return tuple([(k, _hashable(v)) for k, v in argument.items()])
    return (type(argument), argument)


def _ask(func: Any, args: Any, kwargs: Any, mesh: DeviceMesh) -> Any:
    replicated = (Replicate(),) * mesh.ndim
    described = [v for v in leaves((args, kwargs)) if isinstance(v, _Described)]
    # torch's rules for views do not end on empty shapes, of which there is nothing to place.
    is_copied = not [d for d in described if d[0] != replicated]
    if is_copied or [d for d in described if 0 in d[1]]:
        return replicated
    rule = WHOLE_OP_LABELS.get(func)
    answer = None if rule is None else rule(mesh.ndim, args)
    if answer is not None:
        return answer
    is_along = func in _ALONG_A_DIM
    by_element = torch.Tag.pointwise in func.tags or func in _LIKE_FIRST
    if is_along or (by_element and _is_known_to_torch(func)):
        alike = _across(func, args, described) if is_along else described
        shared = _shared_cuts(func, alike, mesh)
        if shared is not None:
            return shared
    if is_foreach(func):
        of_lists = _ask_once_of_each_kind(func, args, kwargs, mesh)
        if of_lists is not None:
            return of_lists
    if func is aten.stack.default and len(args[0]) > _MANY and not any(d[1] for d in described):
        return _ask_by_parts(args, kwargs, mesh)
    # The propagator raises half a dozen types for ops and shapes that it has no rule for. A label
    # is never needed for a right value, so none of them may stop the program.
    try:
        # torch.compile may be tracing; the question is answered outside of its graph. A step's
        # guards need nothing of it: a label, a user's own rule for one too, decides no value.
        with _disable_current_modes(), off_the_record():
            return _from_propagator(func, args, kwargs, mesh)
    except NotImplementedError as error:
        _log_once(func, error)
        return replicated
    except Exception as error:
        return _axis_by_axis(func, args, kwargs, mesh, error)


def _shared_cuts(func: Any, described: Sequence[Any], mesh: DeviceMesh) -> Placements | None:
    """Return how all cut arguments of an op element by element are; None where torch is to say.

    Where they are cut alike, evenly, beside copies, torch's answer is that. It goes through all
    ways to cut them, with what each costs: 20 ms for a product on a mesh of two axes.
    """
    shape, sizes = torch.broadcast_shapes(*[d[1] for d in described]), mesh.value.mesh_shape
    shared: list[Any] = []
    for placements, own_shape, *_ in described:
        if set(placements) == {Replicate()}:
            continue
        num_tiles, num_new = [1] * len(shape), len(shape) - len(own_shape)
        cuts: list[Any] = []
        for placement, size in zip(placements, sizes, strict=True):
            if type(placement) is Shard:
                dim = placement.dim + num_new
                num_tiles[dim] *= size
                cuts.append(Shard(dim))
            elif type(placement) is Replicate:
                cuts.append(placement)
            else:
                return None
        # A dim of size 1, which is broadcast, is cut into no tiles.
        is_even = not any(
            n % tiles for n, tiles in zip(own_shape, num_tiles[num_new:], strict=True)
        )
        if not is_even or (shared and shared != cuts):
            return None
        shared = cuts
    is_given = not func._schema.is_mutable or described[0][0] == tuple(shared)
    return tuple(shared) if is_given else None


def _ask_once_of_each_kind(
    func: Any, args: Sequence[Any], kwargs: Any, mesh: DeviceMesh
) -> list[Any] | None:
    """Answer for a foreach op's lists by what their tensors are; None where no two are alike.

    torch goes through all lists for each of their tensors: 5 s for a norm of 1,100 parameters.
    """
    places = range(num_places(args))
    kinds = [_hashable([a[place] for a in args if isinstance(a, list)]) for place in places]
    numbers = {kind: number for number, kind in enumerate(dict.fromkeys(kinds))}
    if len(numbers) == len(kinds):
        return None
    first = [kinds.index(kind) for kind in numbers]
    short = tuple([a[place] for place in first] if isinstance(a, list) else a for a in args)
    labels = labels_of_outputs(_ask(func, short, kwargs, mesh), len(first))
    return [labels[numbers[kind]] for kind in kinds]


def _across(func: Any, args: Sequence[Any], described: Sequence[Any]) -> list[Any]:
    """Return the arguments of an op along a dim as if they had one element along it."""
    place, across = _ALONG_A_DIM[func], []
    dim = args[place] if len(args) > place else 0
    for placements, shape, *fields in described:
        sizes = list(shape)
        sizes[dim] = 1
        across.append((placements, torch.Size(sizes), *fields))
    return across


@lru_cache(maxsize=4096)
def _is_known_to_torch(func: Any) -> bool:
    """Tell whether torch has a rule for an op that returns one tensor."""
    if [str(output.type) for output in func._schema.returns] != ["Tensor"]:
        return False
    propagator = _propagator()
    tables = ("op_to_rules", "op_strategy_funcs", "op_single_dim_strategy_funcs")
    return any(func in getattr(propagator, table, ()) for table in tables)


def _ask_by_parts(args: Any, kwargs: Any, mesh: DeviceMesh) -> Any:
    """Ask about a stack of many 0-dim tensors, the norms of all gradients, in a few at a time.

    torch goes through the operands and keeps what they have come to, so that may stand for those
    before. Asked about all at once torch 2.9 compares each with each: a second for 400.
    """
    operands, *options = args
    answer = _ask(aten.stack.default, (operands[:_MANY], *options), kwargs, mesh)
    for start in range(_MANY, len(operands), _MANY):
        first = _Described((answer, *operands[0][1:]))
        part = [first, *operands[start : start + _MANY]]
        answer = _ask(aten.stack.default, (part, *options), kwargs, mesh)
    return answer


def _axis_by_axis(func: Any, args: Any, kwargs: Any, mesh: DeviceMesh, error: Exception) -> Any:
    """Ask about one mesh axis at a time, the others replicated; put the answers together."""
    answers = []
    for axis in range(mesh.ndim):

        def only(argument: Any, axis: int = axis) -> Any:
            if not isinstance(argument, _Described):
                return argument
            placements = [Replicate()] * mesh.ndim
            placements[axis] = argument[0][axis]
            return _Described((tuple(placements), *argument[1:]))

        alone_args, alone_kwargs = map_nested(only, (args, kwargs))
        try:
            with _disable_current_modes(), off_the_record():
                answers.append(_from_propagator(func, alone_args, alone_kwargs, mesh))
        except Exception:
            answers.append(None)
    first_answer = next((a for a in answers if a is not None), None)
    if first_answer is None:
        _log_once(func, error)
    if isinstance(first_answer, list):
        return [_merged([a and a[i] for a in answers]) for i in range(len(first_answer))]
    return _merged(answers)


def _merged(answers: Sequence[Any]) -> Placements:
    """Take from each axis's answer the placement on that axis."""
    return tuple(
        Replicate() if answer is None or len(answer) != len(answers) else answer[axis]
        for axis, answer in enumerate(answers)
    )


def legal_placements(placements: Any, ndim: int, mesh: DeviceMesh) -> Placements:
    """Return a label that says something of a tensor with `ndim` dims on `mesh`.

    Some of torch's rules answer for another number of axes (constant_pad_nd in 2.9) or dims (norm
    in 2.13), some with a Partial that carries state of torch's own run (embedding), and some keep a
    stride that has lost its meaning (view in 2.13). Such placements become plain, or Replicate.

    Args:
        placements: torch's answer; None where it has none.
        ndim: The output's number of dims.
        mesh: The mesh that the label refers to.

    Returns:
        One placement per mesh axis, which together are a tiling of the tensor.
    """
    if isinstance(placements, list):
        placements = placements[0]
    if placements is None or len(placements) != mesh.ndim:
        return (Replicate(),) * mesh.ndim
    legal = tuple([_legal(placement, ndim) for placement in placements])
    is_strided = bool([p for p in legal if isinstance(p, _StridedShard)])
    if is_strided and not _is_tiling(legal, ndim, mesh):
        return tuple(Replicate() if isinstance(p, _StridedShard) else p for p in legal)
    return legal


def _legal(placement: Any, ndim: int) -> Any:
    if placement.is_partial():
        return placement if type(placement) is Partial else Partial(placement.reduce_op)
    return placement if getattr(placement, "dim", -1) < ndim else Replicate()


def _is_tiling(placements: Placements, ndim: int, mesh: DeviceMesh) -> bool:
    try:
        Layout.from_placements(placements, ndim, mesh.value).op_sharding()
    except LayoutError:
        return False
    return True


def _log_once(func: Any, error: Exception) -> None:
    if func not in _logged:
        _logged.add(func)
        logger.info(
            "No placement rule for %s (%s); its outputs are labelled Replicate. Values are not "
            "affected.",
            func,
            type(error).__name__,
        )


class _Propagator(ShardingPropagator):
    """torch's own, which finds what an op returns where the runtime finds it: asked once for both.

    torch's way, through fake tensors, takes a fifth of what a label takes.
    """

    def _propagate_tensor_meta_non_cached(self, op_schema: OpSchema) -> Any:
        arguments = map_nested(_on_meta, (op_schema.args_schema, op_schema.kwargs_schema))
        meta = output_meta(op_schema.op, *arguments)
        if meta is None:
            return super()._propagate_tensor_meta_non_cached(op_schema)
        return map_nested(_tensor_meta, meta)


def _on_meta(argument: Any) -> Any:
    if not isinstance(argument, DTensorSpec):
        return argument
    meta: Any = argument.tensor_meta
    return torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device="meta")


def _tensor_meta(returned: Any) -> Any:
    if not isinstance(returned, Meta):
        return None
    return TensorMeta(torch.Size(returned.shape), returned.stride, returned.dtype)


@cache
def _propagator() -> _Propagator:
    """Return it with torch's own rules, those that users register later too."""
    propagator = object.__new__(_Propagator)
    propagator.__dict__ = TorchDTensor._op_dispatcher.sharding_propagator.__dict__
    return propagator


def _from_propagator(func: Any, args: Any, kwargs: Any, mesh: DeviceMesh) -> Any:
    shadow = _shadow_mesh(mesh.value)
    propagator = _propagator()

    def to_spec(argument: Any) -> Any:
        if not isinstance(argument, _Described):
            return argument
        placements, shape, stride, dtype = argument
        return DTensorSpec(shadow, placements, tensor_meta=TensorMeta(shape, stride, dtype))

    schema_args, schema_kwargs = map_nested(to_spec, (args, kwargs))
    schema_info = propagator.op_to_schema_info.get(func)
    schema_info = schema_info or getattr(
        propagator, "op_to_schema_info_for_single_dim_strategy", {}
    ).get(func)
    schema = OpSchema(func, schema_args, schema_kwargs, schema_info=schema_info)
    output = propagator.propagate_op_sharding_non_cached(schema).output_spec
    if output is None:
        return (Replicate(),) * mesh.ndim
    arguments = [v[0] for v in leaves((args, kwargs)) if isinstance(v, _Described)]
    if isinstance(output, DTensorSpec):
        return with_strides(output.placements, arguments)
    return with_strides([None if spec is None else spec.placements for spec in output], arguments)


@lru_cache(maxsize=64)
def _shadow_mesh(mesh: Mesh) -> TorchDeviceMesh:
    # torch skips process groups for "xla" only; the type is changed afterwards.
    shadow = TorchDeviceMesh("xla", torch.arange(mesh.size()).reshape(mesh.mesh_shape))
    name = "_device_type" if "_device_type" in vars(shadow) else "device_type"
    vars(shadow)[name] = "cpu"
    shadow._coordinate_on_dim = [0] * mesh.ndim  # pyright: ignore
    shadow._dim_group_names = []  # pyright: ignore
    shadow._rank = 0  # pyright: ignore
    _prepare_cost_model(shadow)
    return shadow


def _prepare_cost_model(shadow: TorchDeviceMesh) -> None:
    """Let torch compute (and cache) the mesh's topology without a process group."""
    from torch.distributed.device_mesh import _mesh_resources
    from torch.distributed.tensor._collective_utils import MeshTopoInfo

    answers: dict[str, Callable[[str], int]] = {
        "num_hosts": lambda _: 1,
        "num_devices_per_host": lambda _: shadow.size(),
    }
    _mesh_resources.__dict__.update(answers)
    try:
        MeshTopoInfo.build_from_mesh(shadow)
    finally:
        for name in answers:
            del _mesh_resources.__dict__[name]


# ---------------------------------------- Which op made a DTensor, and by what rule its label came
#
# Kept with the label, in words later.


@dataclass(frozen=True, slots=True)
class MadeBy:
    """The op that a state was made for. It holds no tensors, and no other states.

    Attributes:
        func: The ``OpOverload``; a text for what is no op of torch's.
        arguments: The mesh, the placements and the shape of each DTensor among its arguments.
    """

    func: Any
    arguments: tuple[tuple[DeviceMesh, tuple[Any, ...], tuple[int, ...]], ...]

    @property
    def words(self) -> str:
        """The op with its arguments."""
        operands = [
            f"{shape} {Layout.from_placements(placements, len(shape), mesh.value)}"
            for mesh, placements, shape in self.arguments
        ]
        return f"{self.func} of {' and '.join(operands)}" if operands else str(self.func)

    @property
    def takes_copies(self) -> bool:
        """Whether all its arguments are labelled as copies."""
        return all(p == Replicate() for _, placements, _ in self.arguments for p in placements)


def note_op(states: Any, func: Any, dtensors: Sequence[Any]) -> Any:
    """Keep with the states of an op's outputs which op they are of; return the states.

    Called once for each new answer, not for each op.

    Args:
        states: A state, or nested lists of states and None.
        func: The op.
        dtensors: The DTensors among its arguments.
    """
    arguments = [(t._spec.mesh, tuple(t._spec.placements), tuple(t.shape)) for t in dtensors]
    made_by = MadeBy(func, tuple(arguments))
    for state in [states] if isinstance(states, GlobalState) else leaves(states):
        if isinstance(state, GlobalState):
            state.made_by = made_by
    return states


def rule_words(made_by: MadeBy) -> str:
    """Say by what rule an op's output got its label.

    Args:
        made_by: The op.
    """
    func = made_by.func
    if isinstance(func, str):
        return "its caller said how the result is to lie, and XLA is told so"
    if func in _SAME_AS_FIRST:
        return "its result is labelled as its argument"
    if made_by.takes_copies:
        return "all its arguments are labelled as copies, so its result is"
    if func in WHOLE_OP_LABELS:
        return "the label is by a rule of xla_dtensor's, as PyTorch has none for this op"
    if func in _logged:
        return "PyTorch has no rule that fits, so its result is labelled as copies"
    return "the label is what PyTorch's rule for this op says of these arguments"
