"""LocalPayload: the tensors that the devices have of their own, kept as one stack.

A local view has one torch shape and a value per device. On torch_xla its values are one ordinary
lazy tensor with a leading dim that counts the devices along the region's axes, and lies along them:

    region over (dp=2, tp=4), each device has (3, 5)      stack (8, 3, 5), device i has stack[i]

So, unlike a manual tensor, it can be read and outlives a sync. For one op it can be made a manual
tensor and back (`enter_tile`, `leave_tile`), by which nothing moves.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, TypeAlias

import torch

from mesh_utils import Axis, Mesh
from xla_dtensor.core import Layout, ManualRegion, OpSharding
from xla_dtensor.runtimes.functional_ops import KERNELS
from xla_dtensor.runtimes.registry import get_runtime
from xla_dtensor.runtimes.torch_xla_manual_nodes import ManualPayload, entered, left, marked
from xla_dtensor.runtimes.torch_xla_payload import functionalization, to_payload, to_plain
from xla_dtensor.runtimes.torch_xla_program_keys import remember
from xla_dtensor.runtimes.torch_xla_sharding import to_annotation, xlac

__all__ = [
    "Known",
    "LocalPayload",
    "annotate_stack",
    "cuts_of",
    "enter_tile",
    "leave_tile",
]

aten = torch.ops.aten
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
    _known: Known = ()

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


def annotate_stack(local: LocalPayload) -> None:
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
    if not local._known:
        return ()
    mixed = frozenset(dim % max(local.ndim, 1) for dim in without)
    return _even_cuts(tuple(local.shape), local._region, local._known, mixed)


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
