"""Which part of a batch a process has: of a global tensor, of the rows, in a batch's structure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.distributed.tensor import Placement, Replicate

from mesh_utils import Mesh
from xla_dtensor.core import Layout
from xla_dtensor.core.argument_types import argument_types
from xla_dtensor.core.errors import ArgumentTypeError, DataError
from xla_dtensor.dtensor.dcp import shard_indices
from xla_dtensor.dtensor.mesh import DeviceMesh, as_device_mesh, current_mesh, mesh_text
from xla_dtensor.dtensor.redistribute import checked_placements, torch_placements
from xla_dtensor.hosts.exchange import feeding_processes, own_process, process_of_device
from xla_dtensor.runtimes.registry import get_runtime

__all__ = [
    "Path",
    "PerLeaf",
    "ProcessPart",
    "map_batch",
    "part_of",
    "path_text",
    "placements_for",
    "placements_per_leaf",
    "process_part",
    "read_sharding_specs",
    "rows_layout",
    "rows_part",
    "rows_placements",
    "shape_per_leaf",
    "tensors_of",
    "tiles_of",
    "with_tensors",
]

Path = tuple[Any, ...]
"""Keys that lead to a leaf of a batch."""

Run: TypeAlias = tuple[int, int]
"""(start, stop): consecutive positions along a dim."""

# ----------------------------------------------------------------------- Which part a process holds
#
#     mesh (dp=4, tp=2) over 2 processes of 4 devices, a batch of shape (8, 6)
#
#     [Shard(0), Replicate()]     process 0: rows 0 to 3, process 1: rows 4 to 7
#     [Replicate(), Shard(0)]     each process all rows
#     [Shard(1), Shard(0)]        process 0: columns 0 to 3 of all rows (tiles of 2, 2, 2)
#
# A part is a product of runs, one tuple of (start, stop) per dim. The devices of a process need not
# be neighbours, so that there may be several runs along a dim; a process's own tensor then holds
# them joined. Where a process's shards are no such product, its part is the smallest one that
# covers them.


@dataclass(frozen=True)
class ProcessPart:
    """What one process holds of a global tensor.

    Args:
        global_shape: The whole tensor's shape.
        runs: Per dim the positions that the process holds, as (start, stop), ascending.
        blocks: What each of its devices holds, one slice per dim into the whole, by device id.
    """

    global_shape: tuple[int, ...]
    runs: tuple[tuple[Run, ...], ...]
    blocks: dict[int, tuple[slice, ...]] = field(repr=False)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the process's own tensor."""
        return tuple(sum(stop - start for start, stop in runs) for runs in self.runs)

    def positions(self, dim: int = 0) -> NDArray[np.int64]:
        """Return the positions along a dim, e.g. the rows to read."""
        runs = self.runs[dim]
        return np.concatenate([np.arange(*run, dtype=np.int64) for run in (*runs, (0, 0))])

    def take(self, whole: Any, dims: Iterable[int] | None = None) -> Any:
        """Cut the process's own tensor out of one that is whole along `dims`; all when None."""
        for dim in range(len(self.runs)) if dims is None else dims:
            runs = self.runs[dim]
            if runs == ((0, self.global_shape[dim]),):
                continue
            pieces = [whole.narrow(dim, start, stop - start) for start, stop in runs]
            if len(pieces) == 1:
                whole = pieces[0]
            else:
                whole = torch.cat(pieces, dim) if pieces else whole.narrow(dim, 0, 0)
        return whole

    def own_index(self, block: tuple[slice, ...]) -> tuple[slice, ...]:
        """Return where a device's block lies in the process's own tensor."""
        return tuple(_own_slice(runs, part) for runs, part in zip(self.runs, block, strict=True))

    def text(self, dim: int = 0) -> str:
        """Return the positions along a dim as a short text, e.g. ``0:4,8:12``."""
        return ",".join(f"{start}:{stop}" for start, stop in self.runs[dim])


def _own_slice(runs: tuple[Run, ...], part: slice) -> slice:
    offset = 0
    for start, stop in runs:
        if start <= part.start and part.stop <= stop and part.start < part.stop:
            return slice(offset + part.start - start, offset + part.stop - start)
        offset += stop - start
    return slice(0, 0)


@argument_types
def process_part(
    global_shape: Sequence[int], mesh: Any = None, placements: Any = None
) -> ProcessPart:
    """Tell which part of a global tensor this process has to read.

    Args:
        global_shape: The shape of the whole.
        mesh: The mesh; that of the open ``with mesh:`` block when None.
        placements: One per mesh axis, or one alias entry per dim, e.g. ``("dp", None)``.

    Returns:
        The part: `runs` per dim, `positions(dim)`, and the `shape` of the process's own tensor.

    Raises:
        DistributeError: Wrong mesh or placements.
        DataError: The process holds no device of the mesh.

    Example:
        >>> from torch.distributed.tensor import Shard
        >>> import xla_dtensor as xd
        >>> mesh = xd.init_device_mesh("xla", (8,), mesh_dim_names=("dp",))
        >>> xd.process_part((16, 4), mesh, [Shard(0)]).runs
        (((0, 16),), ((0, 4),))
    """
    device_mesh = current_mesh("process_part") if mesh is None else as_device_mesh(mesh)
    shape = tuple(int(extent) for extent in global_shape)
    checked = checked_placements("process_part", placements, device_mesh, len(shape), partial=False)
    return part_of(shape, Layout.from_placements(checked, len(shape), device_mesh.value))


def part_of(shape: tuple[int, ...], layout: Layout, process: int | None = None) -> ProcessPart:
    """Return a process's part under a layout; this process's when None."""
    own = own_process() if process is None else process
    return _part(shape, layout, get_runtime().root(layout.mesh), own)


@lru_cache(maxsize=1024)
def _part(shape: tuple[int, ...], layout: Layout, root: Mesh, process: int) -> ProcessPart:
    sharding = layout.op_sharding(root)
    holders = process_of_device()
    indices = shard_indices(root, sharding, shape)
    blocks = {device: index for device, index in indices.items() if holders.get(device) == process}
    if not blocks:
        raise DataError(
            f"A batch of shape={shape} was to be fed to the mesh {mesh_text(layout.mesh)} by "
            f"process {process}. That process holds no device of the mesh, so it has no part of "
            "the batch. Feed it in the processes that do."
        )
    runs = tuple(
        _joined({(index[dim].start, index[dim].stop) for index in blocks.values()})
        for dim in range(len(shape))
    )
    return ProcessPart(shape, runs, blocks)


def _joined(pieces: Iterable[Run]) -> tuple[Run, ...]:
    runs: list[Run] = []
    for start, stop in sorted(piece for piece in pieces if piece[0] < piece[1]):
        if runs and start <= runs[-1][1]:
            runs[-1] = (runs[-1][0], max(stop, runs[-1][1]))
        else:
            runs.append((start, stop))
    return tuple(runs)


def tiles_of(layout: Layout, dim: int) -> tuple[int, int]:
    """Return into how many tiles a dim is cut, and how many of them this process holds."""
    count = layout.num_shards(dim)
    shape = tuple(layout.num_shards(d) for d in range(layout.ndim))
    return count, part_of(shape, layout).shape[dim]


# -------------------------------------------------------------------------------- Walk over a batch
#
# Tensors in dicts, lists, tuples and named tuples, with a path to each. What is said of a batch
# (placements, shapes, padding) may be said once for all of it, or in the batch's own structure,
# down to any depth: what stands at a place holds for all below it.
#
#     batch        {"text": {"tokens": t, "labels": l}, "weight": w}
#     placements   {"text": [Shard(0), Shard(1)], "weight": [Shard(0), Replicate()]}


class PerLeaf:
    """Something said of a batch, once or in the batch's structure."""

    def __init__(self, name: str, tree: Any, is_leaf: Callable[[Any], bool]) -> None:
        self.name = name  # the argument that said it, for messages
        self.tree = tree
        self.is_leaf = is_leaf  # whether an object is what is said, and no structure

    def at(self, path: Path) -> Any:
        """Return what was said of a leaf."""
        node = self.tree
        for depth, key in enumerate(path, start=1):
            if self.is_leaf(node):
                return node
            try:
                node = node[key]
            except (KeyError, IndexError, TypeError):
                raise DataError(
                    f"{self.name} was passed in a structure that has nothing for the batch's leaf "
                    f"{path_text(path[:depth])}. What is not said once has to be said for every "
                    "leaf. Add it, or pass one value for the whole batch."
                ) from None
        if self.is_leaf(node):
            return node
        raise DataError(
            f"{self.name}={node!r} was passed for the batch's leaf {path_text(path)}. It is "
            "neither a value nor of the batch's structure. Pass one value for the whole batch, or "
            "one per leaf."
        )


def placements_per_leaf(placements: Any) -> PerLeaf:
    """Return placements: None, placements or aliases in a sequence, or a ShardingSpec."""
    return PerLeaf("placements", placements, _is_placements)


def shape_per_leaf(global_shape: Any) -> PerLeaf:
    """Return global shapes: None, or a sequence of sizes and None."""
    return PerLeaf("global_shape", global_shape, _is_shape)


def _is_placements(node: Any) -> bool:
    if node is None or hasattr(node, "partition_spec"):
        return True
    if not isinstance(node, (list, tuple)):
        return not hasattr(node, "keys")  # no placements: refused later, with its own message
    return all(isinstance(entry, Placement) for entry in node) or all(map(_is_alias, node))


def _is_alias(entry: Any) -> bool:
    is_names = isinstance(entry, tuple) and bool(entry) and all(isinstance(e, str) for e in entry)
    return entry is None or isinstance(entry, str) or is_names


def _is_shape(node: Any) -> bool:
    return node is None or (
        isinstance(node, (list, tuple))
        and all(entry is None or isinstance(entry, int) for entry in node)
    )


def map_batch(function: Callable[[Path, Any], Any], batch: Any, path: Path = ()) -> Any:
    """Return `batch` with ``function(path, tensor)`` for every host tensor and array of numbers.

    Everything else, such as texts and DTensors, stays. Mappings come back as dicts: torch's pytrees
    would take those of a class that nobody registered, such as a tokenizer's, for leaves.
    """
    if isinstance(batch, Mapping):
        return {key: map_batch(function, v, (*path, key)) for key, v in batch.items()}
    if isinstance(batch, (list, tuple)):
        values = [map_batch(function, v, (*path, place)) for place, v in enumerate(batch)]
        if isinstance(batch, tuple) and hasattr(batch, "_fields"):
            return type(batch)(*values)
        return values if isinstance(batch, list) else tuple(values)
    tensor = _host_tensor(batch)
    return batch if tensor is None else function(path, tensor)


def _host_tensor(leaf: Any) -> torch.Tensor | None:
    if isinstance(leaf, torch.Tensor):
        return None if isinstance(leaf, TorchDTensor) else leaf
    if not isinstance(leaf, np.ndarray):
        return None
    is_bfloat16 = leaf.dtype.name == "bfloat16"
    if not is_bfloat16 and leaf.dtype.kind not in "biufc":
        return None
    # torch has neither read-only tensors nor negative strides.
    array = leaf if leaf.flags.writeable else leaf.copy()
    array = np.ascontiguousarray(array) if min(array.strides, default=0) < 0 else array
    if is_bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def with_tensors(batch: Any) -> Any:
    """Return a batch with tensors for its arrays."""
    return map_batch(lambda path, tensor: tensor, batch)


def tensors_of(batch: Any) -> dict[Path, torch.Tensor]:
    """Return the host tensors of a batch by their paths."""
    tensors: dict[Path, torch.Tensor] = {}
    map_batch(tensors.__setitem__, batch)
    return tensors


def path_text(path: Path) -> str:
    """Return a path as Python would write it, e.g. ``['text'][0]``; ``itself`` for the batch."""
    return "".join(f"[{key!r}]" for key in path) or "itself"


# ------------------------------------------------------------- ShardingSpecs of torch_xla's loaders
#
# ShardingSpec(mesh, ("data", None), minibatch=True) says that each process passes its own rows,
# whole along the other dims; minibatch=False that each passes the whole batch. Tensors of another
# rank than the spec's are replicated, as torch_xla does.

_MANY_DIMS = 64


def read_sharding_specs(sharding: Any) -> tuple[DeviceMesh, bool | range]:
    """Return the mesh of ``input_sharding=``, and what each process passes whole."""
    specs = list(_specs(sharding))
    meshes = {as_device_mesh(spec.mesh) for spec in specs}
    kinds = {bool(spec.minibatch) for spec in specs}
    if len(meshes) != 1 or len(kinds) != 1:
        raise DataError(
            f"input_sharding has {len(specs)} specs on {len(meshes)} meshes with "
            f"minibatch={sorted(kinds)}. A batch lies on one mesh, and a process passes its own "
            "rows or the whole batch. Pass specs that agree on both."
        )
    return meshes.pop(), range(1, _MANY_DIMS) if kinds.pop() else True


def _specs(sharding: Any) -> Iterator[Any]:
    if hasattr(sharding, "partition_spec") and hasattr(sharding, "mesh"):
        yield sharding
    elif isinstance(sharding, (Mapping, list, tuple)):
        for child in sharding.values() if isinstance(sharding, Mapping) else sharding:
            if child is not None:
                yield from _specs(child)
    else:
        raise ArgumentTypeError(
            f"input_sharding holds an object of type={type(sharding).__name__}. It takes what "
            "torch_xla's loaders take. Pass a ShardingSpec, or ShardingSpecs in the structure of "
            "the batch."
        )


def placements_for(sharding: Any, ndim: int, path: tuple[Any, ...]) -> Any:
    """Return the placements that a spec means for a tensor; anything else as it is."""
    if not hasattr(sharding, "partition_spec"):
        return sharding
    spec, mesh = tuple(sharding.partition_spec), as_device_mesh(sharding.mesh).value
    if len(spec) == ndim:
        return torch_placements(Layout.from_partition_spec(spec, mesh))
    if ndim and sharding.minibatch and len(feeding_processes(mesh)) > 1:
        raise DataError(
            f"A ShardingSpec with partition_spec={spec} and minibatch=True was given for a tensor "
            f"of {ndim} dims, at {path!r}. It is for {len(spec)} dims, and a tensor of each "
            "process's own rows cannot be replicated. Pass specs in the structure of the batch."
        )
    return None


# --------------------------------------------- How the rows of a batch are cut: its first dim alone


def rows_placements(placements: Any, mesh: DeviceMesh) -> tuple[Placement, ...]:
    """Return how rows lie: of the batch's placements, in a structure of the first."""
    while not _is_placements(placements):
        children = placements.values() if hasattr(placements, "values") else placements
        placements = next(iter(children), None)
    if hasattr(placements, "partition_spec"):
        placements = placements_for(placements, len(placements.partition_spec), ())
    if not isinstance(placements, (list, tuple)):
        return checked_placements("ShardedLoader", placements, mesh, 1, partial=False)
    if placements and not any(isinstance(p, Placement) for p in placements):
        placements = torch_placements(Layout.from_aliases(tuple(placements), mesh.value))
    rows = [p if getattr(p, "dim", None) == 0 else Replicate() for p in placements]
    return checked_placements("ShardedLoader", rows, mesh, 1, partial=False)


def rows_layout(mesh: DeviceMesh, placements: tuple[Placement, ...]) -> Layout:
    """Return the layout of a tensor of one dim."""
    return Layout.from_placements(placements, 1, mesh.value)


def rows_part(
    rows: int, mesh: DeviceMesh, placements: tuple[Placement, ...], process: int | None = None
) -> ProcessPart:
    """Return which of `rows` rows a process holds; this one when None."""
    return part_of((rows,), rows_layout(mesh, placements), process)
