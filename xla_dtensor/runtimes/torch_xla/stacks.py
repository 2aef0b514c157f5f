"""What each device has of its own on torch_xla, as one stack, and ops that run on all at once.

Views, which so alias their base, pointwise ops, matrix products, reductions and what draws random
numbers go through torch's batching rules, as one op of the stack. Along axes outside of a region
they leave all to XLA, so nothing is gathered where a tensor is known to be cut.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache, reduce
from math import prod
from typing import Any, TypeAlias

import torch
from torch._C import DispatchKey, DispatchKeySet
from torch._decomp import get_decompositions
from torch._functorch.predispatch import lazy_load_decompositions

from mesh_utils import Axis, Mesh
from xla_dtensor.core import Layout, ManualRegion, OpSharding
from xla_dtensor.runtimes.functional import KERNELS
from xla_dtensor.runtimes.nested import map_nested
from xla_dtensor.runtimes.registry import get_runtime
from xla_dtensor.runtimes.torch_xla.annotations import DEVICE, to_annotation, xlac
from xla_dtensor.runtimes.torch_xla.correct_values import in_torchs_dtypes
from xla_dtensor.runtimes.torch_xla.corrections import correction
from xla_dtensor.runtimes.torch_xla.manual import (
    ManualPayload,
    full_to_shard,
    mark_manual,
    no_execution,
    shard_to_full,
)
from xla_dtensor.runtimes.torch_xla.payload import functionalization, to_payload, to_plain
from xla_dtensor.runtimes.torch_xla.step import remember
from xla_dtensor.runtimes.whole_ops import is_foreach, run_foreach
from xla_dtensor.runtimes.written import written_targets

__all__ = [
    "LocalPayload",
    "OuterCuts",
    "cuts_of",
    "draws_numbers",
    "enter_tile",
    "even_cuts",
    "is_batched",
    "is_mask",
    "is_masked_write",
    "leave_tile",
    "run_batched",
]

aten = torch.ops.aten


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

OuterCuts: TypeAlias = tuple[tuple[Axis, int], ...]
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
    _outer_cuts: OuterCuts = ()

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
def _stack_sharding(region: ManualRegion, *spec: Any) -> OpSharding:
    """How a stack lies whose local dims are cut as `spec` says, relative to the root."""
    root = Mesh.arange((region.mesh.root.size(),), ("device",))
    return Layout.from_partition_spec((region.axes, *spec), region.mesh).op_sharding(root)


def cuts_of(local: LocalPayload, mixed: Sequence[int] = ()) -> OuterCuts:
    """Return along which axes outside of the region a tile can be cut, but for its mixed dims."""
    if not local._outer_cuts:
        return ()
    uncut = frozenset(dim % max(local.ndim, 1) for dim in mixed)
    return even_cuts(tuple(local.shape), local._region, local._outer_cuts, uncut)


@lru_cache(1024)
def even_cuts(
    shape: tuple[int, ...], region: ManualRegion, axis_dims: OuterCuts, uncut: frozenset[int]
) -> OuterCuts:
    """Return those of `axis_dims` that divide a device's shape, as far as torch_xla can be told."""
    sizes, cuts = list(shape), []
    for axis, dim in axis_dims:
        if axis in region.axes or dim in uncut or dim >= len(shape):
            continue
        count = region.mesh.size(axis)
        if sizes[dim] and sizes[dim] % count == 0:
            sizes[dim] //= count
            cuts.append((axis, dim))
    fits = len(_rows(shape, region, tuple(cuts))[0]) < _MAX_RANK
    return tuple(cuts) if fits else ()


@lru_cache(1024)
def _rows(
    shape: tuple[int, ...], region: ManualRegion, cuts: OuterCuts
) -> tuple[tuple[int, ...], OpSharding]:
    """A device's shape with the dims between cuts merged, and how a stack of these lies."""
    sizes: list[int] = []
    spec: list[Any] = []
    for dim, size in enumerate(shape):
        axes = tuple(axis for axis, cut in cuts if cut == dim) or None
        if spec and spec[-1] is None and axes is None:
            sizes[-1] *= size
        else:
            spec.append(axes)
            sizes.append(size)
    return tuple(sizes or [1]), _stack_sharding(region, *(spec or [None]))


def enter_tile(local: LocalPayload, cuts: OuterCuts = ()) -> ManualPayload:
    """Return each device's own tensor as a manual payload; the local payload stays as it is.

    Args:
        local: What each device has.
        cuts: Of :func:`cuts_of`: the tile is cut along these axes too. Otherwise it is a copy
            there.
    """
    region, shape = local._region, list(local.shape)
    sizes, sharding = _rows(tuple(shape), region, cuts)
    for axis, dim in cuts:
        shape[dim] //= region.mesh.size(axis)
    with functionalization():
        rows = local._stack.reshape(local._stack.shape[0], *sizes)
        return mark_manual(aten.view_copy.default(to_plain(full_to_shard(rows, sharding)), shape))


def leave_tile(tile: torch.Tensor, region: ManualRegion, cuts: OuterCuts = ()) -> LocalPayload:
    """Return the local payload of the devices' tensors, cut as they were entered."""
    shape = list(tile.shape)
    for axis, dim in cuts:
        shape[dim] *= region.mesh.size(axis)
    sizes, sharding = _rows(tuple(shape), region, cuts)
    row_shape = [size // sharding.num_tiles(dim + 1) for dim, size in enumerate(sizes)]
    with functionalization():
        row = to_payload(aten.view_copy.default(to_plain(tile), [1, *row_shape]))
        rows = shard_to_full(row, sharding)
        return LocalPayload(rows.reshape(rows.shape[0], *shape), region)


# -------------------------------------------------- Ops on the stacks that are said with other ops
#
# Of random numbers, writes through a mask and the gradient of glu, torch_xla and XLA's partitioner
# make a wrong program, or one with collectives, or none. The others run well on each device by
# itself. But in a region over some mesh axes that would gather along the rest, which these leave to
# XLA.

_NONE, _MEAN = 0, 1  # torch's numbers for reductions of a loss
_WRITES = {aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}


def _normal(x: torch.Tensor, dtype: torch.dtype | None = None, **_: Any) -> torch.Tensor:
    """By Box and Muller's method: XLA's own draws pairs, and cuts them across the devices."""
    radius = (-2 * torch.log1p(-torch.rand_like(x, dtype=torch.float32))).sqrt()
    angle = torch.rand_like(x, dtype=torch.float32) * (2 * torch.pi)
    return (radius * angle.cos()).to(x.dtype if dtype is None else dtype)


def _normal_in_place(
    x: torch.Tensor, mean: float = 0, std: float = 1, generator: None = None
) -> torch.Tensor:
    return x.copy_(_normal(x, torch.float32) * std + mean)


def is_mask(index: object) -> bool:
    """Tell whether an index is a mask that each device has its own of."""
    return isinstance(index, LocalPayload) and index.dtype in (torch.bool, torch.uint8)


def is_masked_write(func: Any, args: Sequence[Any]) -> bool:
    """Tell whether an op writes one value wherever a mask of the devices' own says."""
    if func not in _WRITES:
        return False
    target, indices, source = args[:3]
    places = [place for place, index in enumerate(indices) if index is not None]
    if len(places) != 1 or not is_mask(indices[places[0]]):
        return False
    trailing = target.ndim - places[0] - indices[places[0]].ndim
    return all(size == 1 for size in source.shape[: max(0, source.ndim - trailing)])


def _masked_write(
    target: torch.Tensor,
    indices: Sequence[Any],
    source: torch.Tensor,
    accumulate: bool = False,
    unsafe: bool = False,
) -> torch.Tensor:
    """What a mask picks differs in size from device to device: write where it says, uncounted."""
    lead, mask = next((dim, index) for dim, index in enumerate(indices) if index is not None)
    trailing = target.ndim - lead - mask.ndim
    if mask.shape != target.shape[lead : lead + mask.ndim]:  # In one device's shapes, as PyTorch.
        raise IndexError(
            f"The shape of the mask {list(mask.shape)} at index {lead} does not match the shape of "
            f"the indexed tensor {list(target.shape)} at index {lead}"
        )
    picked = mask.view([*mask.shape, *[1] * trailing]).to(torch.bool)
    while source.ndim > trailing:
        source = source.select(0, 0)
    return torch.where(picked, target + source if accumulate else source, target).to(target.dtype)


def _filled(number: float) -> Callable[..., torch.Tensor]:
    def like(x: torch.Tensor, dtype: torch.dtype | None = None, **_: Any) -> torch.Tensor:
        # Lies as x does: nothing else says where a constant is.
        return torch.where(x == x, number, number).to(x.dtype if dtype is None else dtype)

    return like


def _class_mask(
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
    mask, weights = _class_mask(x, target, weight, ignored)
    losses = -torch.where(mask, x, torch.zeros_like(x)).sum(-1) * weights
    # As `poison` has it, but row by row: to look at all would reduce over other axes.
    is_class = (target == ignored) | ((target >= 0) & (target < x.shape[-1]))
    losses = torch.where(is_class, losses, float("nan")).to(x.dtype)
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
    mask, weights = _class_mask(x, target, weight, ignored)
    row_grad = grad / total if reduction == _MEAN else grad
    return torch.where(mask, -(weights * row_grad).unsqueeze(-1), torch.zeros_like(x))


COMPOSED: dict[Any, Callable[..., Any]] = {
    aten.randn_like.default: _normal,
    aten.normal_.default: _normal_in_place,
    aten.index_put.default: _masked_write,
    **get_decompositions([aten.glu_backward.default, aten._safe_softmax.default]),
    aten.nll_loss_forward.default: _nll_loss,
    aten.nll_loss_backward.default: _nll_loss_backward,
    aten.empty_like.default: _filled(0),
    aten.zeros_like.default: _filled(0),
    aten.ones_like.default: _filled(1),
}


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

_KEYS = reduce(
    DispatchKeySet.add,
    (
        DispatchKey.FuncTorchDynamicLayerFrontMode,
        DispatchKey.FuncTorchDynamicLayerBackMode,
        DispatchKey.FuncTorchBatched,
        DispatchKey.FuncTorchBatchedDecomposition,
        DispatchKey.FuncTorchVmapMode,
    ),
    DispatchKeySet(DispatchKey.Functionalize),
)
# Beside views, pointwise ops and what draws random numbers. Each compiles to no collective.
_BATCHED = frozenset(
    (
        *("mm", "bmm", "mv", "dot", "addmm", "baddbmm", "linear", "_unsafe_view"),
        *("sum", "mean", "prod", "amax", "amin", "argmax", "argmin", "any", "all", "count_nonzero"),
        *("var", "std", "logsumexp", "linalg_vector_norm", "cumsum", "cumprod", "topk", "sort"),
        *("_softmax", "_softmax_backward_data", "_log_softmax", "_log_softmax_backward_data"),
        *("cat", "stack", "flip", "roll", "tril", "triu", "constant_pad_nd"),
        *("_to_copy", "copy_", "fill_", "zero_", "floor_divide", "floor_divide_"),
    )
)
_functorch: Any = importlib.import_module("torch._C._functorch")


@lru_cache(4096)
def is_batched(func: Any) -> bool:
    """Tell whether an ``OpOverload`` is run as one op of the stacks."""
    if func in _WRITES or func is aten.as_strided.default:
        return False  # Rules for strides do not keep a tensor apart from its neighbours.
    return (
        func.is_view
        or torch.Tag.pointwise in func.tags
        or draws_numbers(func)
        or func.overloadpacket.__name__ in _BATCHED
        or func in COMPOSED
        or _functional_foreach(func) is not None
    )


@lru_cache(4096)
def draws_numbers(func: Any) -> bool:
    """Tell whether an op draws random numbers, of which each device gets its own."""
    return torch.Tag.nondeterministic_seeded in func.tags


def run_batched(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], region: ManualRegion
) -> Any:
    """Run an op on the stacks of local payloads.

    Args:
        func: An ``OpOverload`` that :func:`is_batched`.
        args: Its arguments: local payloads, host tensors and plain XLA tensors in place.
        kwargs: The same by name.
        region: That of the local payloads.

    Returns:
        What the op returns, with local payloads in place of tensors.

    Raises:
        RuntimeError: No rule for this op, or what the op itself raises.
    """
    size = prod(region.sizes)
    with no_execution(func), _layer(size) as level:

        def batched(tensor: Any) -> Any:
            if isinstance(tensor, LocalPayload):
                return _functorch._add_batch_dim(tensor._stack, 0, level)
            return to_payload(tensor.to(DEVICE)) if isinstance(tensor, torch.Tensor) else tensor

        def local(output: Any) -> Any:
            if not isinstance(output, torch.Tensor):
                return output
            stack, dim = _functorch._unwrap_batched(output, level)
            if dim is None:
                stack = to_payload(stack.to(DEVICE)).expand(size, *stack.shape).clone()
            elif dim:
                stack = stack.movedim(dim, 0)
            if draws_numbers(func) and region.is_whole and stack.numel():
                # Nothing else says where these lie.
                annotation = to_annotation(_stack_sharding(region, *[None] * (stack.ndim - 1)))
                xlac()._xla_annotate_custom_sharding(stack, annotation)
            return LocalPayload(stack, region)

        output = _run(func, map_nested(batched, tuple(args)), map_nested(batched, dict(kwargs)))
        if func._schema.is_mutable:
            return written_targets(func, args, kwargs)
        return map_nested(local, output)


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    foreach = _functional_foreach(func)
    if foreach is not None:
        outputs = run_foreach(foreach, args, kwargs)
        if func._schema.is_mutable:
            for target, output in zip(args[0], outputs, strict=True):
                target.copy_(output)
        return outputs
    if func in _WRITES and func._schema.is_mutable:
        return args[0].copy_(_masked_write(*args, **kwargs))
    if func in COMPOSED:
        device = kwargs.get("device")
        if device is not None and device.type != "xla":
            raise NotImplementedError(str(func))  # As a manual region, which says so.
        return COMPOSED[func](*args, **kwargs)
    return in_torchs_dtypes(func, args, kwargs, _run_once)


def _run_once(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    corrected: Callable[[], Any] | None = correction(func, args, kwargs)
    return func(*args, **kwargs) if corrected is None else corrected()


@lru_cache(4096)
def _functional_foreach(func: Any) -> Any:
    """The functional form of a foreach op; None for other ops."""
    name = func.overloadpacket.__name__
    functional = getattr(getattr(aten, name.rstrip("_"), None), func._overloadname, None)
    return functional if functional is not None and is_foreach(functional) else None


@contextmanager
def _layer(size: int) -> Iterator[int]:
    """Run the body in a new layer of vmap, without gradients or fallbacks."""
    fallback = _functorch._is_vmap_fallback_enabled()
    included = torch._C._dispatch_tls_local_include_set()
    excluded = torch._C._dispatch_tls_local_exclude_set() - _KEYS
    with torch._C._ForceDispatchKeyGuard(included, excluded), torch.no_grad():
        lazy_load_decompositions()
        level = _functorch._vmap_increment_nesting(size, "different")
        _functorch._set_vmap_fallback_enabled(False)
        try:
            yield level
        finally:
            _functorch._set_vmap_fallback_enabled(fallback)
            _functorch._vmap_decrement_nesting()
