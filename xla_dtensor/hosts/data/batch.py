"""shard_batch: the rows of each process become one global batch."""

from __future__ import annotations

import json
import operator
from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch

from mesh_utils import Mesh
from xla_dtensor.core import Layout
from xla_dtensor.core.argument_types import argument_types
from xla_dtensor.core.errors import ArgumentTypeError, DataError
from xla_dtensor.dtensor.dtensor import DTensor
from xla_dtensor.dtensor.mesh import DeviceMesh, as_device_mesh, current_mesh
from xla_dtensor.dtensor.redistribute import checked_placements
from xla_dtensor.hosts.data.check import compare_feeds, digest
from xla_dtensor.hosts.data.exchange import Exchange, exchange_name
from xla_dtensor.hosts.data.nested import (
    Path,
    map_batch,
    path_text,
    said_placements,
    said_shape,
    tensors_of,
    with_tensors,
)
from xla_dtensor.hosts.data.part import part_of, tiles_of
from xla_dtensor.hosts.data.sharding_spec import placements_for
from xla_dtensor.runtimes.registry import get_runtime

__all__ = ["Leaf", "Whole", "layout_of_leaf", "resolve_leaf", "shard_batch", "sharded_leaf"]

Whole = bool | Sequence[int] | Set[int]
"""Along which dims each process passes the whole extent: all, none, or the dims."""

# Per mesh, so that processes outside of it need not count along.
_exchanges: dict[Mesh, Exchange] = {}
_seen: set[Any] = set()


@dataclass(frozen=True)
class Leaf:
    """How one tensor of a batch is to lie.

    Args:
        layout: The layout.
        placements: The same as torch's placements.
        shape: The global shape.
        whole: The dims that this process passes whole.
    """

    layout: Layout
    placements: tuple[Any, ...]
    shape: tuple[int, ...]
    whole: tuple[int, ...]


@argument_types
def shard_batch(
    batch: Any,
    mesh: Any = None,
    placements: Any = None,
    *,
    whole: Whole = False,
    global_shape: Any = None,
    check: bool = False,
    timeout_seconds: float = 300,
) -> Any:
    """Make global DTensors of what each process has. All processes of the mesh call it alike.

    Processes compare shapes and dtypes when they are new. What is new in one of them only is found
    there when the others have not come in time.

    Args:
        batch: A tensor, or tensors in dicts, lists, tuples and named tuples. Each process passes
            its own part, see :func:`process_part`; on one process that is the whole batch. NumPy
            arrays count as tensors; what is neither stays as it is.
        mesh: The mesh; that of the open ``with mesh:`` block when None.
        placements: One per mesh axis (Shard, Replicate), or one alias entry per dim, for all
            tensors; or the batch's structure with such at its places.
        whole: True where each process passes the whole batch, from which it takes its part; or the
            dims of which it passes all, e.g. ``(1,)`` for its own rows with the whole sequence.
        global_shape: The shape of the whole, None for what follows from the process's own part;
            needed along dims that the devices of several processes cut unevenly. For all tensors,
            or in the batch's structure.
        check: Compare checksums between processes: those that hold the same rows have to pass the
            same, and others not. Reads the batch once more on the host.
        timeout_seconds: How long to wait for other processes.

    Returns:
        The batch with a DTensor for every tensor.

    Raises:
        DataError: The parts do not fit the mesh and the placements.
        DistributeError: Wrong placements.
        FeedMismatchError: Processes pass what cannot be one batch.

    Example:
        >>> import torch, xla_dtensor as xd
        >>> from torch.distributed.tensor import Shard
        >>> mesh = xd.init_device_mesh("xla", (8,), mesh_dim_names=("dp",))
        >>> batch = {"x": torch.ones(16, 4), "y": torch.arange(16), "name": "first"}
        >>> xd.shard_batch(batch, mesh, [Shard(0)])["y"]
        DTensor(shape=(16,), dtype=int64, placements=(S(0)), mesh=(dp=8), local_shape=(2,))
    """
    device_mesh = current_mesh("shard_batch") if mesh is None else as_device_mesh(mesh)
    said = (said_placements(placements), said_shape(global_shape))
    batch = with_tensors(batch)
    leaves: dict[Path, Leaf] = {}

    def look(path: Path, tensor: torch.Tensor, asked: Any, shape: Any) -> None:
        leaves[path] = resolve_leaf("shard_batch", path, tensor, device_mesh, asked, shape, whole)

    map_batch(look, batch, *said)
    tensors = dict(tensors_of(batch))
    _agree(tensors, leaves, device_mesh, check, timeout_seconds)
    return map_batch(
        lambda path, tensor: sharded_leaf("shard_batch", path, tensor, leaves[path], device_mesh),
        batch,
    )


def _agree(
    tensors: dict[Path, torch.Tensor],
    leaves: dict[Path, Leaf],
    mesh: DeviceMesh,
    check: bool,
    timeout_seconds: float,
) -> None:
    """Compare with the other processes: shapes where they are new, checksums where asked."""
    kinds = tuple((p, leaf.shape, leaf.layout, tensors[p].dtype) for p, leaf in leaves.items())
    signature = (mesh.value, kinds)
    if not check and signature in _seen:
        return
    _seen.add(signature)
    exchange = _exchanges.get(mesh.value)
    if exchange is None:
        name = f"shard_batch/{exchange_name(mesh.value)}"
        exchange = _exchanges[mesh.value] = Exchange(name, mesh.value, timeout_seconds)
    if exchange.is_alone:
        return
    exchange.timeout_seconds = timeout_seconds
    own = digest(tensors, leaves, with_sums=check)
    said = exchange.all(json.dumps(own).encode(), "the shapes of a batch that shard_batch got")
    compare_feeds({p: json.loads(text) for p, text in said.items()}, "shard_batch")


def layout_of_leaf(
    function: str, path: Path, mesh: DeviceMesh, asked: Any, ndim: int
) -> tuple[Layout, tuple[Any, ...]]:
    """Return how a tensor of `ndim` dims is to lie."""
    named = f"{function}, at the batch's leaf {path_text(path)}," if path else function
    placements = checked_placements(
        named, placements_for(asked, ndim, path), mesh, ndim, partial=False
    )
    return Layout.from_placements(placements, ndim, mesh.value), placements


def resolve_leaf(
    function: str,
    path: Path,
    tensor: torch.Tensor,
    mesh: DeviceMesh,
    asked: Any,
    shape: Sequence[int | None] | None,
    whole: Whole,
) -> Leaf:
    """Find how a tensor is to lie, and the shape of the whole."""
    if tensor.device.type != "cpu" or tensor.layout != torch.strided:
        raise ArgumentTypeError(
            f"{function} was called with a tensor on device={tensor.device}, "
            f"layout={tensor.layout}, at the batch's leaf {path_text(path)}. Values are taken from "
            "dense host memory. Pass tensor.cpu(), or tensor.to_dense()."
        )
    layout, placements = layout_of_leaf(function, path, mesh, asked, tensor.ndim)
    dims = _whole_dims(whole, tensor.ndim)
    given = shape if shape is not None else (None,) * tensor.ndim
    if len(given) != tensor.ndim:
        raise DataError(
            f"{function} was called with global_shape={tuple(given)} for the batch's leaf "
            f"{path_text(path)} of shape={tuple(tensor.shape)}. They have different numbers of "
            "dims. Pass one entry per dim, None for what follows from the tensor."
        )
    sizes = tuple(
        size if size is not None else _inferred(function, path, tensor, layout, dim, dim in dims)
        for dim, size in enumerate(given)
    )
    return Leaf(layout, placements, sizes, dims)


def _whole_dims(whole: Whole, ndim: int) -> tuple[int, ...]:
    if isinstance(whole, bool):
        return tuple(range(ndim)) if whole else ()
    dims = tuple(map(operator.index, whole))
    return tuple(dim for dim in range(ndim) if dim in dims or dim - ndim in dims)


def _inferred(
    function: str, path: Path, tensor: torch.Tensor, layout: Layout, dim: int, is_whole: bool
) -> int:
    extent = int(tensor.shape[dim])
    if is_whole:
        return extent
    tiles, own = tiles_of(layout, dim)
    if tiles == own:
        return extent
    if extent % own == 0:
        return extent // own * tiles
    raise DataError(
        f"{function} was called with shape={tuple(tensor.shape)} at the batch's leaf "
        f"{path_text(path)}. Dim {dim} is cut into {tiles} tiles, of which this process holds "
        f"{own}, and {extent} does not divide by that. Pass global_shape, or equal parts."
    )


def sharded_leaf(
    function: str, path: Path, tensor: torch.Tensor, leaf: Leaf, mesh: DeviceMesh
) -> DTensor:
    """Return the global tensor of which `tensor` is this process's part."""
    part = part_of(leaf.shape, leaf.layout)
    expected = tuple(
        leaf.shape[dim] if dim in leaf.whole else extent for dim, extent in enumerate(part.shape)
    )
    if tuple(tensor.shape) != expected:
        raise DataError(
            f"{function} was called with shape={tuple(tensor.shape)} at the batch's leaf "
            f"{path_text(path)}. Of global_shape={leaf.shape} under {leaf.layout} this process has "
            f"to pass {expected}. Pass what process_part says, or whole=True with the whole batch."
        )
    values = part.take(tensor.detach(), leaf.whole)
    shards = {
        device: values[part.own_index(block)] if values.ndim else values
        for device, block in part.blocks.items()
    }
    payload = get_runtime().from_shards(shards, leaf.shape, leaf.layout)
    return DTensor._wrapping(payload, mesh, leaf.placements, requires_grad=tensor.requires_grad)
