"""LocalPayload: the tensors that the devices have of their own, kept as one stack.

A local view has one torch shape and a value per device. On torch_xla its values are one ordinary
lazy tensor with a leading dim that counts the devices along the region's axes, and lies along them:

    region over (dp=2, tp=4), each device has (3, 5)      stack (8, 3, 5), device i has stack[i]

So, unlike a manual tensor, it can be read and outlives a sync. For one op it can be made a manual
tensor and back (`enter_tile`, `leave_tile`), by which nothing moves.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import Any

import torch

from mesh_utils import Mesh
from xla_dtensor.core import Layout, ManualRegion, OpSharding
from xla_dtensor.errors import LocalViewError
from xla_dtensor.runtimes.torch_xla_manual_nodes import ManualPayload, entered, left, marked
from xla_dtensor.runtimes.torch_xla_payload import functionalization, to_payload, to_plain
from xla_dtensor.runtimes.torch_xla_sharding import to_annotation

__all__ = [
    "LocalPayload",
    "annotate_stack",
    "enter_tile",
    "leave_tile",
]

aten = torch.ops.aten


@lru_cache(1)
def _xlac() -> Any:
    return importlib.import_module("torch_xla")._XLAC


class LocalPayload(torch.Tensor):
    """One tensor per device of a region, all of one shape. Only the runtime's ops take it.

    Args:
        stack: A payload of shape [number of devices, *local shape].
        region: The axes along which the devices are counted.
    """

    _stack: torch.Tensor
    _region: ManualRegion

    @staticmethod
    def __new__(cls, stack: torch.Tensor, region: ManualRegion) -> LocalPayload:
        self = torch.Tensor._make_wrapper_subclass(  # pyright: ignore[reportAttributeAccessIssue]
            cls, stack.shape[1:], dtype=stack.dtype, device=stack.device
        )
        self._stack, self._region = stack, region
        return self

    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore[reportAssignmentType]

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func is aten._has_compatible_shallow_copy_type.default:  # Asked for by `become`.
            return True
        raise LocalViewError(
            f"{func} was called on a runtime's local payload itself. Each device has another value "
            "of it, so only ops on local views are defined. Pass it to run_local_op, or to "
            "leave_local first."
        )

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
        _xlac()._xla_annotate_custom_sharding(stack, annotation)


def enter_tile(local: LocalPayload) -> ManualPayload:
    """Return each device's own tensor as a manual payload; the local payload stays as it is."""
    with functionalization():
        rows = local._stack.reshape(local._stack.shape[0], prod(local.shape))
        row = to_plain(entered(rows, _flat_sharding(local._region, 2)))
        return marked(aten.view_copy.default(row, list(local.shape)))


def leave_tile(tile: torch.Tensor, region: ManualRegion) -> torch.Tensor:
    """Return the stack of the devices' values of a manual payload."""
    with functionalization():
        row = to_payload(aten.view_copy.default(to_plain(tile), [1, tile.numel()]))
        rows = left(row, _flat_sharding(region, 2))
        return rows.reshape(rows.shape[0], *tile.shape)
