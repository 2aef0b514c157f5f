"""Local views on torch_xla: ops on what each device has of its own, with values that stay readable.

A local payload is a stack. An op acts on it in one of two ways:

* Through torch's batching rules, as one op of the stack: views, which
  so alias their base, pointwise ops, matrix products, reductions and what draws random numbers.
* In a manual region of its own: in, the op on each device's tensor, out. No device can need
  anything of another there, so every op that manual regions know works, at four times the cost to
  trace. What the op writes is copied into the stack.

What depends on values for its shape, or is computed on the host, is refused.

A region may cover some of the axes. Along the others, ops of the first kind leave all to XLA; those
of the second, and collectives, give every device the whole, so XLA gathers along an axis that a
tensor was cut along.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from math import prod
from typing import Any, TypeAlias

import numpy as np
import torch
from torch._C import DispatchKey
from torch._functorch.predispatch import lazy_load_decompositions

from mesh_utils import Axis, Mesh
from xla_dtensor.core import Layout, ManualRegion, OpSharding
from xla_dtensor.core.errors import (
    DistributeError,
    LocalViewError,
    ManualRegionError,
    UnsupportedOpError,
)
from xla_dtensor.core.placements import entry_axis
from xla_dtensor.runtimes.functional import KERNELS, functional_form
from xla_dtensor.runtimes.nested import leaves, map_nested
from xla_dtensor.runtimes.registry import get_runtime
from xla_dtensor.runtimes.torch_xla.annotations import DEVICE, to_annotation, xlac
from xla_dtensor.runtimes.torch_xla.correct_values import in_torchs_dtypes
from xla_dtensor.runtimes.torch_xla.corrections import correction
from xla_dtensor.runtimes.torch_xla.manual import (
    ManualPayload,
    ManualRegions,
    entered,
    left,
    marked,
    run_collective,
)
from xla_dtensor.runtimes.torch_xla.payload import functionalization, to_payload, to_plain
from xla_dtensor.runtimes.torch_xla.step import remember
from xla_dtensor.runtimes.whole_ops import run_foreach

__all__ = ["LocalPayload", "LocalViews"]


# ----------------------------------- Ops on the stacks of local payloads that are said with others
#
# Of those in `COMPOSED` torch_xla and XLA's partitioner make a wrong program, or one with
# collectives, or none. Those in `PARTIAL_REGIONS` run well on each device by itself; but a region
# over some mesh axes has no other way to do that than to gather along the rest, so there they are
# said with ops that leave the rest to XLA.

aten = torch.ops.aten
_NONE, _MEAN = 0, 1  # torch's numbers for reductions of a loss


def _normal(x: torch.Tensor, dtype: torch.dtype | None = None, **_: Any) -> torch.Tensor:
    """By Box and Muller's method: XLA's own draws pairs, and cuts them across the devices."""
    radius = (-2 * torch.log1p(-torch.rand_like(x, dtype=torch.float32))).sqrt()
    angle = torch.rand_like(x, dtype=torch.float32) * (2 * torch.pi)
    return (radius * angle.cos()).to(x.dtype if dtype is None else dtype)


def _normal_in_place(
    x: torch.Tensor, mean: float = 0, std: float = 1, generator: None = None
) -> torch.Tensor:
    return x.copy_(_normal(x, torch.float32) * std + mean)


def _glu_backward(grad: torch.Tensor, x: torch.Tensor, dim: int) -> torch.Tensor:
    first, second = x.chunk(2, dim)
    gate = second.sigmoid()
    return torch.cat([grad * gate, grad * first * gate * (1 - gate)], dim)


def _safe_softmax(x: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    weights = torch.softmax(x, dim, dtype=dtype)
    nothing = (x == float("-inf")).all(dim, keepdim=True)
    return torch.where(nothing, torch.zeros_like(weights), weights)


def _filled(value: float) -> Callable[..., torch.Tensor]:
    def like(x: torch.Tensor, dtype: torch.dtype | None = None, **_: Any) -> torch.Tensor:
        # Lies as x does: nothing else says where a constant is.
        kept = torch.where(x == x, value, value)
        return kept.to(x.dtype if dtype is None else dtype)

    return like


def _picked(
    x: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None, ignored: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Which class counts in each row, as a mask; and each row's weight."""
    classes = torch.arange(x.shape[-1], device=x.device)
    counts = target != ignored
    mask = (target.unsqueeze(-1) == classes) & counts.unsqueeze(-1)
    if weight is None:
        return mask, counts.to(x.dtype)
    return mask, torch.where(mask, weight, torch.zeros_like(weight)).sum(-1)


def _nll_loss(
    x: torch.Tensor, target: torch.Tensor, weight: Any, reduction: int, ignored: int
) -> tuple[torch.Tensor, torch.Tensor]:
    mask, weights = _picked(x, target, weight, ignored)
    losses = -torch.where(mask, x, torch.zeros_like(x)).sum(-1) * weights
    total = weights.sum()
    if reduction == _NONE:
        return losses, torch.zeros_like(total)
    return (losses.sum() / total if reduction == _MEAN else losses.sum()), total


def _nll_loss_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    target: torch.Tensor,
    weight: Any,
    reduction: int,
    ignored: int,
    total: torch.Tensor,
) -> torch.Tensor:
    mask, weights = _picked(x, target, weight, ignored)
    each = grad / total if reduction == _MEAN else grad
    return torch.where(mask, -(weights * each).unsqueeze(-1), torch.zeros_like(x))


PARTIAL_REGIONS: dict[Any, Callable[..., Any]] = {
    aten._safe_softmax.default: _safe_softmax,
    aten.nll_loss_forward.default: _nll_loss,
    aten.nll_loss_backward.default: _nll_loss_backward,
    aten.empty_like.default: _filled(0),
    aten.zeros_like.default: _filled(0),
    aten.ones_like.default: _filled(1),
}
COMPOSED: dict[Any, Callable[..., Any]] = {
    aten.count_nonzero.default: lambda x, dim=None: (x != 0).sum(dim),
    aten.count_nonzero.dim_IntList: lambda x, dim: (x != 0).sum(dim),
    aten.randn_like.default: _normal,
    aten.normal_.default: _normal_in_place,
    aten.glu_backward.default: _glu_backward,
    **PARTIAL_REGIONS,
}


# ------------------------------------------------------------------------------------ LocalPayload
#
# The tensors that the devices have of their own, kept as one stack.
#
# A local view has one torch shape and a value per device. On torch_xla its values are one ordinary
# lazy tensor with a leading dim that counts the devices along the region's axes, and lies along
# them:
#
#     region over (dp=2, tp=4), each device has (3, 5)      stack (8, 3, 5), device i has stack[i]
#
# So, unlike a manual tensor, it can be read and outlives a sync. For one op it can be made a manual
# tensor and back (`enter_tile`, `leave_tile`), by which nothing moves.

Known: TypeAlias = tuple[tuple[Axis, int], ...]
_MAX_RANK = 5  # of annotations that torch_xla can be told at once


class LocalPayload(torch.Tensor):
    """One tensor per device of a region, all of one shape. Only the runtime's ops take it.

    Args:
        stack: A payload of shape [number of devices, *local shape].
        region: The axes along which the devices are counted.
    """

    _stack: torch.Tensor
    _region: ManualRegion
    _is_local_payload = True  # Seen by modules that cannot import this class.
    # (axis, dim) pairs: how the stack is cut along mesh axes outside of the region, if known.
    _outer_cuts: Known = ()

    @staticmethod
    def __new__(cls, stack: torch.Tensor, region: ManualRegion) -> LocalPayload:
        self = torch.Tensor._make_wrapper_subclass(  # pyright: ignore[reportAttributeAccessIssue]
            cls, stack.shape[1:], dtype=stack.dtype, device=stack.device
        )
        self._stack, self._region = stack, region
        remember(stack)
        return self

    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore[reportAssignmentType]

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func is aten._has_compatible_shallow_copy_type.default:  # Asked for by `become`.
            return True
        # Called by graphs of torch.compile; local views call the runtime.
        kernel = KERNELS.get(func)
        if kernel is not None:
            return kernel(*args, **(kwargs or {}))
        return get_runtime().run_local_op(func, args, kwargs or {})

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"LocalPayload(shape={tuple(self.shape)}, dtype={self.dtype})"

    def become(self, view: LocalPayload) -> None:
        """Take over the stack and the shape of a view of this payload, in place."""
        torch.Tensor.data.__set__(self, LocalPayload(view._stack, view._region))  # pyright: ignore
        self._stack = view._stack


@lru_cache(1024)
def _flat_sharding(region: ManualRegion, ndim: int) -> OpSharding:
    """How a stack of `ndim` dims lies, relative to the root."""
    root = Mesh.arange((region.mesh.root.size(),), ("device",))
    spec = (region.axes, *[None] * (ndim - 1))
    return Layout.from_partition_spec(spec, region.mesh).op_sharding(root)


def _annotate_stack(local: LocalPayload) -> None:
    """Tell XLA, in place, that a value that no program has computed yet lies along the region."""
    stack, region = local._stack, local._region
    if region.is_whole and stack.numel():
        annotation = to_annotation(_flat_sharding(region, stack.ndim))
        xlac()._xla_annotate_custom_sharding(stack, annotation)


def cuts_of(local: LocalPayload, without: Sequence[int] = ()) -> Known:
    """Return what is known of axes outside of the region, as far as tiles can be cut so.

    Args:
        local: What each device has.
        without: Dims that are not to be cut, because an op mixes what lies along them.
    """
    if not local._outer_cuts:
        return ()
    mixed = frozenset(dim % max(local.ndim, 1) for dim in without)
    return _even_cuts(tuple(local.shape), local._region, local._outer_cuts, mixed)


@lru_cache(1024)
def _even_cuts(
    shape: tuple[int, ...], region: ManualRegion, known: Known, mixed: frozenset[int]
) -> Known:
    left, cuts = list(shape), []
    for axis, dim in known:
        if axis in region.axes or dim in mixed or dim >= len(shape):
            continue
        size = region.mesh.size(axis)
        if left[dim] and left[dim] % size == 0:
            left[dim] //= size
            cuts.append((axis, dim))
    fits = len(_rows(shape, region, tuple(cuts))[0]) < _MAX_RANK
    return tuple(cuts) if fits else ()


@lru_cache(1024)
def _rows(
    shape: tuple[int, ...], region: ManualRegion, cuts: Known
) -> tuple[tuple[int, ...], OpSharding]:
    """A device's shape with the dims between cuts merged, and how a stack of these lies."""
    sizes: list[int] = []
    spec: list[Any] = [region.axes]
    cut = {dim for _, dim in cuts}
    for dim, size in enumerate(shape):
        if dim in cut:
            spec.append(tuple(axis for axis, at in cuts if at == dim))
            sizes.append(size)
        elif len(spec) > 1 and spec[-1] is None:
            sizes[-1] *= size
        else:
            spec.append(None)
            sizes.append(size)
    if not sizes:
        spec, sizes = [region.axes, None], [1]
    root = Mesh.arange((region.mesh.root.size(),), ("device",))
    return tuple(sizes), Layout.from_partition_spec(tuple(spec), region.mesh).op_sharding(root)


def _cut_shape(shape: Sequence[int], region: ManualRegion, cuts: Known, grow: bool) -> list[int]:
    cut = list(shape)
    for axis, dim in cuts:
        size = region.mesh.size(axis)
        cut[dim] = cut[dim] * size if grow else cut[dim] // size
    return cut


def enter_tile(local: LocalPayload, cuts: Known = ()) -> ManualPayload:
    """Return each device's own tensor as a manual payload; the local payload stays as it is.

    Args:
        local: What each device has.
        cuts: Of :func:`cuts_of`: the tile is cut along these axes too. Otherwise it is a copy
            there.
    """
    region, shape = local._region, tuple(local.shape)
    sizes, sharding = _rows(shape, region, cuts)
    tile = _cut_shape(shape, region, cuts, grow=False)
    with functionalization():
        rows = local._stack.reshape(local._stack.shape[0], *sizes)
        row = to_plain(entered(rows, sharding))
        return marked(aten.view_copy.default(row, tile))


def leave_tile(tile: torch.Tensor, region: ManualRegion, cuts: Known = ()) -> torch.Tensor:
    """Return the stack of the devices' values of a manual payload, cut as it was entered."""
    shape = tuple(_cut_shape(tile.shape, region, cuts, grow=True))
    sizes, sharding = _rows(shape, region, cuts)
    with functionalization():
        row_shape = [size // sharding.num_tiles(dim + 1) for dim, size in enumerate(sizes)]
        row = to_payload(aten.view_copy.default(to_plain(tile), [1, *row_shape]))
        rows = left(row, sharding)
        return rows.reshape(rows.shape[0], *shape)


# ------------------------------------------------------------- Ops on all devices' tensors at once
#
# The op of the stack, through torch's batching rules.
#
# The rules of ``torch.vmap`` know for each op how the op of a stack looks: ``mm`` becomes ``bmm``,
# ``t`` swaps the last two dims. Only some ops are run so: those of which XLA's partitioner sees
# that devices need nothing from each other. Others compile to collectives: gathers and writes by
# index, convolutions and norms, whose rules merge the stack's dim with others or hide it among
# indices.
#
# Wrapper subclasses are called with the keys of vmap switched off; here they are switched on. An op
# without a rule would be run once per device: that is switched off.

_KEYS = (
    DispatchKey.FuncTorchDynamicLayerFrontMode,
    DispatchKey.FuncTorchDynamicLayerBackMode,
    DispatchKey.FuncTorchBatched,
    DispatchKey.FuncTorchBatchedDecomposition,
    DispatchKey.FuncTorchVmapMode,
    DispatchKey.Functionalize,
)
# Beside views, pointwise ops and what draws random numbers. Each compiles to no collective.
_BATCHED = frozenset(
    (
        *("mm", "bmm", "mv", "dot", "addmm", "baddbmm", "linear", "_unsafe_view"),
        *("sum", "mean", "prod", "amax", "amin", "argmax", "argmin", "any", "all"),
        *("var", "std", "logsumexp", "linalg_vector_norm", "cumsum", "cumprod", "topk", "sort"),
        *("_softmax", "_softmax_backward_data", "_log_softmax", "_log_softmax_backward_data"),
        *("cat", "stack", "flip", "roll", "tril", "triu", "constant_pad_nd"),
        *("_to_copy", "copy_", "fill_", "zero_", "floor_divide", "floor_divide_"),
    )
)


_TAG = torch.Tag
_functorch: Any = importlib.import_module("torch._C._functorch")
_FOREACH = "_foreach_"


@lru_cache(4096)
def is_batched(func: Any, is_whole: bool) -> bool:
    """Tell whether an ``OpOverload`` is run here.

    Args:
        func: The op.
        is_whole: Whether the local payloads' region covers all mesh axes. Where it does not, other
            ways to run an op gather along the rest.
    """
    if func in PARTIAL_REGIONS and is_whole:
        return False
    name = func.overloadpacket.__name__
    return (
        func.is_view
        or _TAG.pointwise in func.tags
        or draws_numbers(func)
        or name in _BATCHED
        or func in COMPOSED
        or _single_of(func) is not None
    )


@lru_cache(4096)
def draws_numbers(func: Any) -> bool:
    """Tell whether an op draws random numbers, of which each device gets its own."""
    return _TAG.nondeterministic_seeded in func.tags


def run_batched(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], like: LocalPayload
) -> Any:
    """Run an op on the stacks of local payloads.

    Args:
        func: An ``OpOverload`` that :func:`is_batched`.
        args: Its arguments: local payloads, host tensors and plain XLA tensors in place.
        kwargs: The same by name.
        like: One of the local payloads.

    Returns:
        Local payloads in place of tensors; nothing of use where the op writes in place.

    Raises:
        RuntimeError: No rule for this op, or what the op itself raises.
    """
    region, size = like._region, like._stack.shape[0]
    with _layer(size) as level:

        def batched(value: Any) -> Any:
            if isinstance(value, LocalPayload):
                return _functorch._add_batch_dim(value._stack, 0, level)
            if isinstance(value, torch.Tensor):
                return to_payload(value.to(DEVICE))
            return value

        def local(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            return LocalPayload(_stacked(value, level, size), region)

        result = _run(func, map_nested(batched, tuple(args)), map_nested(batched, dict(kwargs)))
        if func._schema.is_mutable:
            return None
        found = map_nested(local, result)
        if draws_numbers(func):  # Nothing else says where these lie.
            for value in leaves(found):
                if isinstance(value, LocalPayload):
                    _annotate_stack(value)
        return found


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    single = _single_of(func)
    if single is not None:
        results = run_foreach(single, args, kwargs)
        if func._schema.is_mutable:
            for target, value in zip(args[0], results, strict=True):
                target.copy_(value)
        return results
    if func in COMPOSED:
        return COMPOSED[func](*args, **kwargs)
    return in_torchs_dtypes(func, args, kwargs, _run_once)


def _run_once(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    corrected: Callable[[], Any] | None = correction(func, args, kwargs)
    return func(*args, **kwargs) if corrected is None else corrected()


@lru_cache(4096)
def _single_of(func: Any) -> Any:
    """The functional form of a foreach op that :func:`run_foreach` knows; None for others."""
    name = func.overloadpacket.__name__
    if not name.startswith(_FOREACH):
        return None
    single = name.removeprefix(_FOREACH).rstrip("_")
    if single not in ("norm", "copy") and not hasattr(torch, single):
        return None
    return getattr(getattr(aten, _FOREACH + single), func._overloadname, None)


def _stacked(value: torch.Tensor, level: int, size: int) -> torch.Tensor:
    stack, dim = _functorch._unwrap_batched(value, level)
    if dim is None:
        return to_payload(stack.to(DEVICE)).expand(size, *stack.shape).clone()
    return stack.movedim(dim, 0) if dim else stack


@contextmanager
def _layer(size: int) -> Iterator[int]:
    """Run the body in a new layer of vmap, without gradients, fallbacks or reading."""
    allowed = xlac()._get_allow_execution()
    fallback = _functorch._is_vmap_fallback_enabled()
    excluded = [torch._C._dispatch_tls_is_dispatch_key_excluded(key) for key in _KEYS]
    for key in _KEYS:
        torch._C._dispatch_tls_set_dispatch_key_excluded(key, False)
    try:
        with torch.no_grad():
            lazy_load_decompositions()
            level = _functorch._vmap_increment_nesting(size, "different")
            _functorch._set_vmap_fallback_enabled(False)
            xlac()._set_allow_execution(False)
            try:
                yield level
            finally:
                xlac()._set_allow_execution(allowed)
                _functorch._set_vmap_fallback_enabled(fallback)
                _functorch._vmap_decrement_nesting()
    finally:
        for key, was in zip(_KEYS, excluded, strict=True):
            torch._C._dispatch_tls_set_dispatch_key_excluded(key, was)


# -------------------------------------------- The way into a local view and out of it on torch_xla
#
# From a global tensor to a stack, and back.
#
# In a manual region nothing moves at the border, so that is the way: in as the layout says, out
# with one row for each device. (16, 8) as [dp, tp] on (dp=2, tp=4) is the stack (8, 8, 2).
#
# A region over some axes says nothing of the others, and a tensor that is known to be cut along
# them is to stay so. There the stack is the tensor reshaped: (16, 8) as [dp, tp] with a region over
# (tp,) is (16, 4, 2), with the dim of tp in front (4, 16, 2), annotated as [tp, dp, -].


def enter(
    payload: torch.Tensor,
    layout: Layout,
    region: ManualRegion,
    sharding: OpSharding,
    annotation: OpSharding | None,
) -> LocalPayload:
    """Return each device's shard of a payload.

    Args:
        payload: A global payload; it stays as it is.
        layout: Names axes of the region, which divide the shape.
        region: The axes along which the devices are counted.
        sharding: The layout's, relative to the root.
        annotation: What the payload was told last.
    """
    inner = None
    if not region.is_whole and annotation is not None and payload.numel():
        shape = tuple(payload.shape)
        inner = _sharding_of_stack(annotation, sharding, shape, layout, region)
    copied = len(region.copied_axes(layout)) == len(region.axes)
    if inner is None and copied and not region.is_whole:
        # The same on every device: as it lies along the other axes.
        with functionalization():
            count = prod(region.sizes)
            whole = payload.unsqueeze(0).expand(count, *payload.shape).clone()
        return LocalPayload(whole, region)
    if inner is None:
        return LocalPayload(leave_tile(entered(payload, sharding), region), region)
    with functionalization():
        stack = _cut(payload, layout, region).clone()
        xlac()._xla_annotate_custom_sharding(stack, to_annotation(inner))
    return LocalPayload(stack, region)


def leave(
    local: LocalPayload, layout: Layout, sharding: OpSharding, cuts: Known = ()
) -> tuple[torch.Tensor, OpSharding | None]:
    """Return the payload whose shards are `local`, and how it lies; None where XLA chooses.

    Args:
        local: What each device has.
        layout: Names axes of the region; along the others all devices have the same.
        sharding: The layout's with the cuts, relative to the root.
        cuts: How the local tensors are cut along other axes.
    """
    if local._region.is_whole or local._region.copied_axes(layout):
        return left(enter_tile(local, cuts), sharding), sharding
    with functionalization():
        return _joined(local, layout), None


def _axes_of(layout: Layout, dim: int) -> list[Axis]:
    axes = [entry_axis(entry) for entry in layout.dims[dim]]
    return [axis for axis in axes if axis is not None]


def _cut(payload: torch.Tensor, layout: Layout, region: ManualRegion) -> torch.Tensor:
    place, split = _split_dims(layout, region, tuple(payload.shape))
    found = payload.reshape(split)
    for axis in region.axes:
        if axis not in place:
            place[axis] = found.ndim
            found = found.unsqueeze(-1)
    front = [place[axis] for axis in region.axes]
    rest = [dim for dim in range(found.ndim) if dim not in front]
    found = found.permute(*front, *rest)
    tile = found.shape[len(front) :]
    return found.expand(*region.sizes, *tile).reshape(prod(region.sizes), *tile)


def _joined(local: LocalPayload, layout: Layout) -> torch.Tensor:
    region = local._region
    shape = layout.get_global_shape(tuple(local.shape))
    place, split = _split_dims(layout, region, shape)
    front = [place[axis] for axis in region.axes]
    order = [*front, *(dim for dim in range(len(split)) if dim not in front)]
    stack = local._stack.reshape(*region.sizes, *local.shape)
    return stack.permute(*(order.index(dim) for dim in range(len(split)))).reshape(shape).clone()


def _split_dims(
    layout: Layout, region: ManualRegion, shape: tuple[int, ...]
) -> tuple[dict[Axis, int], list[int]]:
    """A shape with dims of their own for the axes, and where these are."""
    place: dict[Axis, int] = {}
    split: list[int] = []
    for dim, size in enumerate(shape):
        for axis in _axes_of(layout, dim):
            place[axis] = len(split)
            split.append(region.mesh.size(axis))
        split.append(size // prod(region.mesh.size(axis) for axis in _axes_of(layout, dim)))
    return place, split


@lru_cache(1024)
def _sharding_of_stack(
    annotation: OpSharding,
    sharding: OpSharding,
    shape: tuple[int, ...],
    layout: Layout,
    region: ManualRegion,
) -> OpSharding | None:
    """How the stack lies of a tensor that is cut along other axes besides; None if it is not."""
    count = region.mesh.root.size()
    whole = [annotation.shard_index(device, shape) for device in range(count)]
    outer = [sharding.shard_index(device, shape) for device in range(count)]
    tile = sharding.shape_per_tile(shape)
    parts = [annotation.num_tiles(dim) for dim in range(len(shape))]
    pieces = [max(part // sharding.num_tiles(dim), 1) for dim, part in enumerate(parts)]
    even = all(size % piece == 0 for size, piece in zip(tile, pieces, strict=True))
    if max(pieces, default=1) == 1 or not even:
        return None
    places: dict[tuple[int, ...], list[int]] = {}
    for device in range(count):
        at = dict(zip(region.mesh.axis_names, region.mesh.coordinates(device), strict=True))
        row = int(np.ravel_multi_index([int(at[axis]) for axis in region.axes], region.sizes))
        inner = []
        for dim, (own, cut) in enumerate(zip(whole[device], outer[device], strict=True)):
            size = tile[dim] // pieces[dim]
            if own.stop - own.start != size or not cut.start <= own.start < cut.stop:
                return None
            inner.append((own.start - cut.start) // size)
        places.setdefault((row, *inner), []).append(device)
    copies = len(next(iter(places.values())))
    dims = (prod(region.sizes), *pieces)
    if len(places) != prod(dims) or any(len(same) != copies for same in places.values()):
        return None
    assignment = np.zeros((*dims, copies), dtype=np.int64)
    for place, devices in places.items():
        assignment[place] = devices
    if copies == 1:
        return OpSharding.from_assignment(assignment[..., 0])
    return OpSharding.from_assignment(assignment, ("replicated",))


# ---------------------------------------------------- Collectives between local views on torch_xla
#
# Those of manual regions, in one of their own each.
#
# A stack enters a region, the collective runs on each device's tensor, the results leave as a
# stack. So each is the one collective that it says, where compositions of ops on the stack are left
# to XLA's partitioner: of ``stack.sum(0)`` cut in blocks it makes an all-reduce of the whole.


def run_local_collective(
    name: str, local: LocalPayload, axes: tuple[Axis, ...], options: Mapping[str, Any]
) -> LocalPayload:
    """Run one of the collectives of :meth:`Runtime.manual_collective` on a local payload.

    Args:
        name: Which.
        local: What each device has.
        axes: The axes along which members are numbered, some of the region's.
        options: As the collective takes them.

    Returns:
        What each device has afterwards.

    Raises:
        DistributeError: Wrong options.
        UnsupportedOpError: No such collective.
    """
    region = local._region
    mixed = [options[key] for key in ("dim", "split_dim", "concat_dim") if key in options]
    cuts = () if name == "axis_index" else cuts_of(local, mixed)
    result = run_collective(name, enter_tile(local, cuts), region.mesh, axes, options)
    return LocalPayload(leave_tile(result, region, cuts), region)


# ------------------------------------------------------------------ x[mask] = value on local views
#
# The one op with a mask of the devices' own that has a shape.
#
# What a mask picks has another size on each device, and a program has one. But a value that is the
# same for all that the mask picks can be written where the mask says, without counting.

_WRITES = {aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}
Run = Callable[..., Any]


def is_mask(value: object) -> bool:
    """Tell whether an index is a mask that each device has its own of."""
    return isinstance(value, LocalPayload) and value.dtype in (torch.bool, torch.uint8)


def is_masked_write(func: Any, args: Sequence[Any]) -> bool:
    """Tell whether an op writes one value wherever a mask of the devices' own says."""
    if func not in _WRITES:
        return False
    given = [index for index in args[1] if index is not None]
    if len(given) != 1 or not is_mask(given[0]):
        return False
    rest = args[0].ndim - args[1].index(given[0]) - given[0].ndim
    leading = args[2].shape[: max(0, args[2].ndim - rest)]
    return all(size == 1 for size in leading)


def masked_write(run: Run, func: Any, args: Sequence[Any], accumulate: bool = False) -> Any:
    """Run an op of :func:`is_masked_write`.

    Args:
        run: Runs an op on local payloads.
        func: The op.
        args: The tensor to write to, the indices and the value.
        accumulate: Whether the value is added.
    """
    target, indices, value = args[:3]
    lead, mask = next((at, index) for at, index in enumerate(indices) if index is not None)
    rest = target.ndim - lead - mask.ndim
    flags = run(aten.view.default, mask, [*mask.shape, *[1] * rest])
    flags = run(aten._to_copy.default, flags, dtype=torch.bool)
    while value.ndim > rest:
        value = _run_on_any(run, value)
    new = run(aten.add.Tensor, target, value) if accumulate else value
    result = run(aten.where.self, flags, new, target)
    if result.dtype != target.dtype:
        result = run(aten._to_copy.default, result, dtype=target.dtype)
    return run(aten.copy_.default, target, result) if func._schema.is_mutable else result


def _run_on_any(run: Run, value: torch.Tensor) -> torch.Tensor:
    if isinstance(value, LocalPayload):
        return run(aten.select.int, value, 0, 0)
    return value.select(0, 0)


# ------------------------------------------------------------------------ Local views on torch_xla

# Their rules do not keep a tensor apart from its neighbours in the stack.
_REFUSED_VIEWS = {aten.as_strided.default}
# What their schemas do not say.
_HIDDEN_WRITES = {aten.native_batch_norm.default: ("running_mean", "running_var")}
_BROKEN = "Check failed"  # torch_xla's words for a failure of its own.
_INDEXED = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}


class LocalViews:
    """What the runtime does with local payloads.

    Args:
        op_sharding_for: Returns the OpSharding of a shape and a layout, relative to the root;
            raises what the runtime raises for wrong ones.
        annotation: :meth:`Runtime.annotation`.
        manual: The runtime's manual regions.
    """

    def __init__(
        self,
        op_sharding_for: Callable[[Sequence[int], Layout], OpSharding],
        annotation: Callable[[torch.Tensor], OpSharding | None],
        manual: ManualRegions,
    ) -> None:
        self._op_sharding_for = op_sharding_for
        self._annotation = annotation
        self._manual = manual

    def enter(self, payload: torch.Tensor, layout: Layout, region: ManualRegion) -> LocalPayload:
        """See :meth:`Runtime.enter_local`."""
        region.check_layout(layout)
        self._manual.check_global(payload)
        sharding = self._op_sharding_for(payload.shape, layout)
        if any(size % sharding.num_tiles(dim) for dim, size in enumerate(payload.shape)):
            raise DistributeError(
                f"A local view of a tensor of shape={tuple(payload.shape)} was asked for as "
                f"{layout}. The axes do not divide it evenly, and all local tensors have one "
                "shape. Pad it first."
            )
        _check_spans(region)
        return enter(payload, layout, region, sharding, self._annotation(payload))

    def leave(
        self, local: torch.Tensor, layout: Layout, region: ManualRegion
    ) -> tuple[torch.Tensor, OpSharding | None]:
        """Return the payload of :meth:`Runtime.leave_local`, and how it lies if that is known."""
        region.check_layout(layout)
        given = _checked(local, region)
        # Cut within the shards of the layout.
        dims, cuts = list(layout.dims), cuts_of(given)
        for axis, dim in cuts:
            dims[dim] = (*dims[dim], axis)  # pyright: ignore
        cut = Layout(layout.mesh, tuple(dims))
        return leave(given, layout, self._op_sharding_for(given.shape, cut), cuts)

    def run_op(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """See :meth:`Runtime.run_local_op`."""
        values = leaves((tuple(args), dict(kwargs)))
        like = next(value for value in values if isinstance(value, LocalPayload))
        written = _written(func, args, kwargs)
        if func is aten._has_compatible_shallow_copy_type.default:
            return all(isinstance(value, LocalPayload) for value in args)
        if torch.Tag.inplace_view in func.tags:
            return self._reshape_in_place(func, args, kwargs)
        if is_masked_write(func, args):
            accumulate = args[3] if len(args) > 3 else kwargs.get("accumulate", False)
            return masked_write(self._run, func, args, accumulate)
        _check_has_shape(func, args)
        if is_batched(func, like._region.is_whole) and func not in _REFUSED_VIEWS:
            try:
                found = run_batched(func, args, kwargs, like)
            except RuntimeError as error:
                # In a manual region the op says what is wrong in terms of one device's shapes.
                if func.is_view or draws_numbers(func):
                    raise _refusal(func, args, kwargs) from error
            else:
                return _returned(func, written) if func._schema.is_mutable else found
        elif func.is_view or draws_numbers(func):
            raise _refusal(func, args, kwargs)
        return self._run_manual(func, args, kwargs, written, like._region)

    def _run(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        return self.run_op(func, args, kwargs)

    def _run_manual(
        self,
        func: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        written: list[LocalPayload],
        region: ManualRegion,
    ) -> Any:
        tiles: dict[int, torch.Tensor] = {}

        def tile(value: Any) -> Any:
            if not isinstance(value, LocalPayload):
                return value
            if id(value) not in tiles:
                tiles[id(value)] = enter_tile(value)
            return tiles[id(value)]

        def local(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            return LocalPayload(leave_tile(value, region), region)

        try:
            result = self._manual.run_op(
                func, map_nested(tile, tuple(args)), map_nested(tile, dict(kwargs))
            )
        except (ManualRegionError, UnsupportedOpError) as error:
            raise _refusal(func, args, kwargs) from error
        except RuntimeError as error:
            if _BROKEN not in str(error):
                raise
            raise _refusal(func, args, kwargs) from error
        for target in {id(target): target for target in written}.values():
            stack = leave_tile(tiles[id(target)], region)
            with functionalization():
                target._stack.copy_(stack)
        makes_results = any(returned.alias_info is None for returned in func._schema.returns)
        return map_nested(local, result) if makes_results else _returned(func, written)

    def _reshape_in_place(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> LocalPayload:
        """Run ``t_``, ``squeeze_`` and the like: the payload becomes a view of what it was."""
        view = functional_form(func)
        if view is None or not view.is_view:
            raise _refusal(func, args, kwargs)
        args[0].become(self.run_op(view, args, kwargs))
        return args[0]

    def collective(
        self,
        name: str,
        local: torch.Tensor,
        region: ManualRegion,
        axes: tuple[Axis, ...],
        **options: Any,
    ) -> torch.Tensor:
        """See :meth:`Runtime.local_collective`."""
        return run_local_collective(name, _checked(local, region), axes, options)


def _check_spans(region: ManualRegion) -> None:
    mesh, root = region.mesh, region.mesh.root
    if mesh.size() < root.size():
        raise UnsupportedOpError(
            f"A local view over axes={region.axes} of a mesh ({mesh.axes_text()}) was asked for on "
            f"the runtime 'torch_xla'. Its programs run on all {root.size()} devices of "
            f"({root.axes_text()}). Make the region on a mesh over all of them."
        )


def _checked(local: torch.Tensor, region: ManualRegion) -> LocalPayload:
    if isinstance(local, LocalPayload) and local._region == region:
        return local
    what = f"one over axes={local._region.axes}" if isinstance(local, LocalPayload) else "none"
    raise LocalViewError(
        f"A local payload over axes={region.axes} was asked for, and a tensor of "
        f"shape={tuple(local.shape)} given, which is {what}. The devices would be counted "
        "otherwise. Pass a result of enter_local for this region."
    )


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[LocalPayload]:
    """The local payloads that an op writes into, in the order of its arguments."""
    names = list(_HIDDEN_WRITES.get(func, ()))
    if func._schema.is_mutable:
        infos = [(a.name, a.alias_info) for a in func._schema.arguments]
        names += [name for name, info in infos if info is not None and info.is_write]
    if not names:
        return []
    given = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | dict(kwargs)
    if func in _HIDDEN_WRITES and not given.get("training"):
        return []
    written: list[LocalPayload] = []
    for value in leaves([given.get(name) for name in names]):
        if isinstance(value, LocalPayload):
            written.append(value)
        elif isinstance(value, torch.Tensor):
            raise LocalViewError(
                f"{func} was called on a local view, to write into a tensor of "
                f"shape={tuple(value.shape)} that is none. Each device has its own values, which "
                "one tensor outside cannot hold. Write into a local view."
            )
    return written


def _returned(func: Any, written: list[LocalPayload]) -> Any:
    """What an op that makes no tensors of its own returns."""
    if not func._schema.returns:
        return None
    return written[0] if len(written) == 1 else tuple(written)


def _check_has_shape(func: Any, args: Sequence[Any]) -> None:
    if func.overloadpacket.__name__ in _INDEXED:
        depends = any(map(is_mask, args[1]))
    else:
        depends = torch.Tag.dynamic_output_shape in func.tags
    if depends:
        raise UnsupportedOpError(
            f"{func} was called on a local view, and the shape of its result depends on the "
            "values, which differ between devices. A program has one shape for all. Use "
            "torch.where, masked_fill, or topk with a fixed number."
        )


def _refusal(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> UnsupportedOpError:
    shapes = [
        tuple(value.shape)
        for value in leaves((tuple(args), dict(kwargs)))
        if isinstance(value, LocalPayload)
    ]
    return UnsupportedOpError(
        f"{func} was called on a local view, with shapes={shapes}. The runtime 'torch_xla' cannot "
        "run it on each device by itself: torch_xla computes it on the host, or has no rule for "
        "it. Use other ops, or the runtime 'jax'."
    )
