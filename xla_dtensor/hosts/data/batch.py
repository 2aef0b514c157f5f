"""shard_batch: the rows of each process become one global batch."""

from __future__ import annotations

import json
import operator
import zlib
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any

import torch

from mesh_utils import Mesh
from xla_dtensor.core import Layout
from xla_dtensor.core.argument_types import argument_types
from xla_dtensor.core.errors import ArgumentTypeError, DataError, FeedMismatchError
from xla_dtensor.dtensor.api import distribute_tensor
from xla_dtensor.dtensor.dtensor import DTensor
from xla_dtensor.dtensor.mesh import DeviceMesh, as_device_mesh, current_mesh
from xla_dtensor.dtensor.redistribute import checked_placements
from xla_dtensor.hosts.data.part import (
    Path,
    PerLeaf,
    map_batch,
    part_of,
    path_text,
    placements_for,
    placements_per_leaf,
    shape_per_leaf,
    tensors_of,
    tiles_of,
    with_tensors,
)
from xla_dtensor.hosts.exchange import Exchange, exchange_name
from xla_dtensor.runtimes.registry import get_runtime

__all__ = [
    "Leaf",
    "Whole",
    "compare_feeds",
    "digest",
    "padded",
    "resolve_leaf",
    "rows_of",
    "shard_batch",
    "sharded_leaf",
    "with_mask",
]

Whole = bool | Sequence[int] | Set[int]
"""Along which dims each process passes the whole extent: all, none, or the dims."""

# ------------------------------------------------------------------------- How one tensor is to lie


@dataclass(frozen=True)
class Leaf:
    """How one tensor of a batch is to lie."""

    layout: Layout
    placements: tuple[Any, ...]  # the same as torch's placements
    shape: tuple[int, ...]  # global
    whole_dims: tuple[int, ...]  # the dims that this process passes whole


def resolve_leaf(
    function: str,
    path: Path,
    tensor: torch.Tensor,
    mesh: DeviceMesh,
    placements: Any,
    shape: Sequence[int | None] | None,
    whole_dims: Whole,
) -> Leaf:
    """Find how a tensor is to lie, and the shape of the whole."""
    if tensor.device.type != "cpu" or tensor.layout != torch.strided:
        raise ArgumentTypeError(
            f"{function} was called with a tensor on device={tensor.device}, "
            f"layout={tensor.layout}, at the batch's leaf {path_text(path)}. Values are taken from "
            "dense host memory. Pass tensor.cpu(), or tensor.to_dense()."
        )
    caller = f"{function}, at the batch's leaf {path_text(path)}," if path else function
    placements = placements_for(placements, tensor.ndim, path)
    placements = checked_placements(caller, placements, mesh, tensor.ndim, partial=False)
    layout = Layout.from_placements(placements, tensor.ndim, mesh.value)
    dims = _whole_dims(whole_dims, tensor.ndim)
    global_shape = shape if shape is not None else (None,) * tensor.ndim
    if len(global_shape) != tensor.ndim:
        raise DataError(
            f"{function} was called with global_shape={tuple(global_shape)} for the batch's leaf "
            f"{path_text(path)} of shape={tuple(tensor.shape)}. They have different numbers of "
            "dims. Pass one entry per dim, None for what follows from the tensor."
        )
    sizes = tuple(
        size if size is not None else _inferred(function, path, tensor, layout, dim, dim in dims)
        for dim, size in enumerate(global_shape)
    )
    return Leaf(layout, placements, sizes, dims)


def _whole_dims(whole_dims: Whole, ndim: int) -> tuple[int, ...]:
    if isinstance(whole_dims, bool):
        return tuple(range(ndim)) if whole_dims else ()
    dims = tuple(map(operator.index, whole_dims))
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
        leaf.shape[dim] if dim in leaf.whole_dims else extent
        for dim, extent in enumerate(part.shape)
    )
    if tuple(tensor.shape) != expected:
        raise DataError(
            f"{function} was called with shape={tuple(tensor.shape)} at the batch's leaf "
            f"{path_text(path)}. Of global_shape={leaf.shape} under {leaf.layout} this process has "
            f"to pass {expected}. Pass what process_part says, or whole=True with the whole batch."
        )
    values = part.take(tensor.detach(), leaf.whole_dims)
    if part.shape == leaf.shape:  # all devices at once take an eighth of the time of each alone
        dtensor = distribute_tensor(values, mesh, leaf.placements)
        dtensor.requires_grad_(tensor.requires_grad)
        return dtensor
    if get_runtime().is_payload(values):
        raise ArgumentTypeError(
            f"{function} was called in a compiled step with what the step was given at the batch's "
            f"leaf {path_text(path)}. Each process has given its own part, and a program has one "
            f"value for all. Call {function} before the step, and give it what comes back."
        )
    shards = {device: values[part.own_index(block)] for device, block in part.blocks.items()}
    payload = get_runtime().from_shards(shards, leaf.shape, leaf.layout)
    return DTensor._wrapping(payload, mesh, leaf.placements, requires_grad=tensor.requires_grad)


# ------------------------------------------------------------------------ Batches with too few rows


def rows_of(batch: Any) -> int:
    """Return the rows of a batch: the first dim of its first tensor that has one."""
    for tensor in tensors_of(batch).values():
        if tensor.ndim:
            return int(tensor.shape[0])
    raise DataError(
        f"A loader gave a batch of type={type(batch).__name__} without a tensor that has rows. "
        "There is nothing to shard. Let it give tensors, alone or in dicts, lists or tuples."
    )


def padded(batch: Any, rows: int, target: int, pad_value: PerLeaf) -> Any:
    """Return a batch of `target` rows of which the first `rows` are those of `batch`."""
    all_rows = rows_of(batch)

    def pad(path: Path, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.ndim == 0 or tensor.shape[0] != all_rows:
            return tensor
        output = tensor.new_full((target, *tensor.shape[1:]), pad_value.at(path))
        output[:rows] = tensor[:rows]
        return output

    return map_batch(pad, batch)


def with_mask(batch: Any, mask: Any, name: str) -> Any:
    """Return a batch with a mask: under a name in a dict, else behind its last entry."""
    if isinstance(batch, Mapping):
        if name in batch:
            raise DataError(
                f"ShardedLoader was called with mask={name!r}, and the loader's batches have that "
                "key. One of them would be lost. Pass another name."
            )
        return {**batch, name: mask}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        raise DataError(
            f"ShardedLoader was called with mask={name!r} for batches of type "
            f"{type(batch).__name__}. A named tuple has no place for another entry. Let the loader "
            "give dicts, or plain tuples."
        )
    if isinstance(batch, (list, tuple)):
        return type(batch)([*batch, mask])
    return batch, mask


# ---------------------------------------------------------------------------- Batches that are none
#
# Three mistakes give no error by themselves: processes disagree on shapes (the program hangs), two
# that hold copies of the same rows pass different ones (the copies differ for ever), or two that
# hold different rows pass the same ones (the job trains on a part of its data). Each process
# publishes a digest: shapes and dtypes, and where asked a checksum per block; all compare all.

Digest = dict[str, dict[str, Any]]


def digest(
    tensors: Mapping[Path, torch.Tensor], leaves: Mapping[Path, Leaf], *, with_sums: bool
) -> Digest:
    """Return what this process says of its batch, with checksums if asked; JSON can write it."""
    leaf_digests: Digest = {}
    for path, tensor in tensors.items():
        leaf = leaves[path]
        leaf_digests[path_text(path)] = {
            "shape": list(leaf.shape),
            "dtype": str(tensor.dtype),
            "layout": str(leaf.layout),
        }
        if with_sums:
            leaf_digests[path_text(path)] |= _sums(tensor, leaf)
    return leaf_digests


def _sums(tensor: torch.Tensor, leaf: Leaf) -> dict[str, Any]:
    if tensor.ndim and len(leaf.whole_dims) == tensor.ndim:
        return {"blocks": {"whole": _checksum(tensor)}, "rows": "whole", "constant": True}
    part = part_of(leaf.shape, leaf.layout)
    own = part.take(tensor.detach(), leaf.whole_dims)
    blocks: dict[str, int] = {}
    for block in part.blocks.values():
        name = ",".join(f"{s.start}:{s.stop}" for s in block)
        if name not in blocks and all(s.start < s.stop for s in block):
            blocks[name] = _checksum(own[part.own_index(block)] if own.ndim else own)
    is_constant = own.numel() == 0 or bool((own == own.reshape(-1)[0]).all())
    return {"blocks": blocks, "rows": part.text(0) if own.ndim else "", "constant": is_constant}


def _checksum(tensor: torch.Tensor) -> int:
    flat = tensor.detach().contiguous().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat.resolve_conj()).reshape(-1)
    return zlib.crc32(flat.view(torch.uint8).numpy().data)


def compare_feeds(digests: Mapping[int, Digest], what: str) -> None:
    """Refuse what processes say of one batch where it cannot be parts of one."""
    for first, second in combinations(sorted(digests), 2):
        _compare_shapes(first, second, digests, what)
        _compare_values(first, second, digests, what)


def _compare_shapes(first: int, second: int, digests: Mapping[int, Digest], what: str) -> None:
    a, b = digests[first], digests[second]
    for path, key in product({**a, **b}, ("shape", "dtype", "layout")):
        x, y = a.get(path, {}).get(key), b.get(path, {}).get(key)
        if x != y:
            raise FeedMismatchError(
                f"{what}: at the batch's leaf {path} process {first} has a tensor of global "
                f"{key}={x}, process {second} of {key}={y}. They would run different programs, "
                "and wait for each other for ever. Feed equal parts, or pass global_shape."
            )


def _compare_values(first: int, second: int, digests: Mapping[int, Digest], what: str) -> None:
    pairs = [(path, a, digests[second][path]) for path, a in digests[first].items()]
    pairs = [(path, a, b) for path, a, b in pairs if "blocks" in a and "blocks" in b]
    for path, a, b in pairs:
        for block, number in a["blocks"].items():
            if b["blocks"].get(block, number) != number:
                raise FeedMismatchError(
                    f"{what}: at the batch's leaf {path} the processes {first} and {second} both "
                    f"hold the block [{block}] and pass different values. Copies would differ in "
                    "silence. Let both read the same rows: see process_part, or ShardedSampler."
                )
    # A tensor of one value, such as a mask of ones, is no evidence of equal rows.
    apart = [(a, b) for _, a, b in pairs if a["rows"] and a["rows"] != b["rows"]]
    rows = next(((a["rows"], b["rows"]) for a, b in apart if not a["constant"]), None)
    sums = [([*a["blocks"].values()], [*b["blocks"].values()]) for a, b in apart]
    if rows is not None and all(x == y for x, y in sums):
        raise FeedMismatchError(
            f"{what}: process {first} passes as its rows {rows[0]} what process {second} "
            f"passes as {rows[1]}, in every tensor. The job would train on the same rows "
            "twice. Let each read its own rows: see ShardedSampler; check='off' if it is meant so."
        )


# -------------------------------------------------------------------------------------- shard_batch

# Per mesh, so that processes outside of it need not count along.
_exchanges: dict[Mesh, Exchange] = {}
_compared: set[Any] = set()


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
    specs, shapes = placements_per_leaf(placements), shape_per_leaf(global_shape)
    batch = with_tensors(batch)
    tensors = tensors_of(batch)
    leaves = {
        path: resolve_leaf(
            "shard_batch", path, tensor, device_mesh, specs.at(path), shapes.at(path), whole
        )
        for path, tensor in tensors.items()
    }
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
    if not check and signature in _compared:
        return
    _compared.add(signature)
    exchange = _exchanges.get(mesh.value)
    if exchange is None:
        name = f"shard_batch/{exchange_name(mesh.value)}"
        exchange = _exchanges[mesh.value] = Exchange(name, mesh.value, timeout_seconds)
    if exchange.is_alone:
        return
    exchange.timeout_seconds = timeout_seconds
    own = digest(tensors, leaves, with_sums=check)
    answers = exchange.all(json.dumps(own).encode(), "the shapes of a batch that shard_batch got")
    compare_feeds({p: json.loads(text) for p, text in answers.items()}, "shard_batch")
