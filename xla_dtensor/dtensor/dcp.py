"""DTensors in torch.distributed.checkpoint: their shards to save, and buffers to load into.

DCP writes what it reads into a CPU tensor in place, piece by piece, and says nothing when the last
piece is in. So a buffer is a tensor that tells its load of every write. It is filled with the
present values first, so that a checkpoint with a hole leaves the rest alone. Buffers go to the
devices, as the tensor's placements say,

* when every element of the tensor's blocks has been written, which is the ordinary case, or
* when the tensor's value is asked for, whatever asks: until then the tensor is of a subclass whose
  ``_local_tensor`` writes first, or
* when the tensor is dropped, since others may share its memory.

torch.distributed.checkpoint on DTensors: what its default planners ask a tensor, answered.

Saving offers one write item per *distinct* shard that this process can reach, wherever it lies:
replicas on several devices are one item, and what several processes offer DCP's planner takes once.
Loading hands out host buffers, because DCP writes what it reads into a CPU tensor in place; what
was written goes to the devices by itself. Reshaping a mesh needs nothing else: DCP cuts saved
chunks and wanted chunks against each other by their offsets.

Example:
    >>> import tempfile, torch, xla_dtensor as xd
    >>> import torch.distributed.checkpoint as dcp
    >>> from torch.distributed.tensor import Replicate, Shard
    >>> mesh = xd.init_device_mesh("xla", (2, 4))
    >>> saved = xd.distribute_tensor(torch.arange(8), mesh, [Replicate(), Shard(0)])
    >>> len(create_write_items("w", saved))
    4
    >>> loaded = xd.distribute_tensor(torch.zeros(8).long(), mesh, [Shard(0), Shard(0)])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = dcp.save({"w": saved}, checkpoint_id=folder, no_dist=True)
    ...     dcp.load({"w": loaded}, checkpoint_id=folder, no_dist=True)
    >>> loaded.tolist()
    [0, 1, 2, 3, 4, 5, 6, 7]
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.distributed.tensor import Replicate

from mesh_utils import Mesh
from xla_dtensor.core import Layout, LayoutError, OpSharding
from xla_dtensor.core.errors import DistributeError
from xla_dtensor.runtimes.nested import leaves, map_nested
from xla_dtensor.runtimes.registry import get_runtime
from xla_dtensor.runtimes.written import written_targets

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem

    from xla_dtensor.dtensor.dtensor import DTensor

__all__ = [
    "Index",
    "Offset",
    "create_chunk_list",
    "create_write_items",
    "device_indices",
    "distinct_indices",
    "extents_of",
    "get_tensor_shard",
    "host_shards",
    "layout_to_load",
    "offset_of",
    "shard_indices",
]


# -------------------------------------------------------------------------------- Checkpoint shards
#
# Which blocks of a DTensor this process can reach, and their values on the host.
#
# A block is an *index*, one slice per dim, and is known by its *offset*, the first element along
# each dim: shards of one sharding never begin at the same element unless they are the same.

Index: TypeAlias = tuple[slice, ...]
Offset: TypeAlias = tuple[int, ...]


def real_sharding(tensor: DTensor) -> OpSharding:
    """Return how the tensor really lies."""
    return get_runtime().op_sharding(tensor._local_tensor)


def device_indices(tensor: DTensor, sharding: OpSharding) -> dict[int, Index]:
    """What each device of the mesh that this process reaches holds."""
    runtime = get_runtime()
    order = runtime.root(tensor._spec.mesh.value).device_ids.ravel().tolist()
    position = {int(device): place for place, device in enumerate(order)}
    devices = sorted(set(runtime.addressable_device_ids()) & set(position))
    return {d: sharding.shard_index(position[d], tuple(tensor.shape)) for d in devices}


@lru_cache(maxsize=512)  # layers of a model lie alike, and a pod has thousands of devices
def shard_indices(root: Mesh, sharding: OpSharding, shape: tuple[int, ...]) -> dict[int, Index]:
    """What each device of a root mesh holds, in the order of the mesh. Do not change it."""
    devices = root.device_ids.ravel().tolist()
    return {int(device): sharding.shard_index(i, shape) for i, device in enumerate(devices)}


def chunks_of(tensor: DTensor, sharding: OpSharding) -> list[ChunkStorageMetadata]:
    """Return the distinct blocks as DCP's chunks; one of the whole shape for an empty tensor."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    if tensor.numel() == 0:
        zeros = torch.Size([0] * tensor.ndim)
        return [ChunkStorageMetadata(offsets=zeros, sizes=tensor.size())]
    distinct = distinct_indices(device_indices(tensor, sharding).values())
    return [
        ChunkStorageMetadata(offsets=torch.Size(offset), sizes=torch.Size(extents_of(index)))
        for offset, index in distinct.items()
    ]


def distinct_indices(indices: Iterable[Index]) -> dict[Offset, Index]:
    """The non-empty ones, each once, by offset."""
    distinct: dict[Offset, Index] = {}
    for index in indices:
        if all(extents_of(index)):
            distinct.setdefault(offset_of(index), index)
    return distinct


def offset_of(index: Index) -> Offset:
    """Return the first element along each dim."""
    return tuple(int(part.start) for part in index)


def extents_of(index: Index) -> tuple[int, ...]:
    """Return the number of elements along each dim."""
    return tuple(int(part.stop - part.start) for part in index)


def host_shards(payload: torch.Tensor) -> dict[Offset, torch.Tensor]:
    """The distinct shards of this process, from the first device that holds each."""
    if payload.numel() == 0:
        return {(0,) * payload.ndim: torch.empty(payload.shape, dtype=payload.dtype)}
    shards = get_runtime().addressable_shards(payload)
    first = {offset_of(s.index): s.data for s in reversed(shards) if all(extents_of(s.index))}
    return {offset: shard.detach() for offset, shard in first.items()}


# ------------------------------------------------------------- Loading a DTensor from a checkpoint

STATE_KEY = "_checkpoint"  # in a DTensor's __dict__: the save or the load that it takes part in
checkpoint_lock = threading.RLock()  # DCP may write and read in several threads
_PAYLOAD: Any = TorchDTensor.__dict__["_local_tensor"]  # the slot, past any property


class Load:
    """One load of one tensor: its staging buffers, and when they go to the devices."""

    def __init__(self, tensor: DTensor) -> None:
        self._tensor = weakref.ref(tensor)
        self._layout = layout_to_load(tensor)
        runtime = get_runtime()
        self.sharding = self._layout.op_sharding(runtime.root(self._layout.mesh))
        self._indices = device_indices(tensor, self.sharding)
        distinct = distinct_indices(self._indices.values())
        self._total = self._unwritten = sum(
            torch.Size(extents_of(index)).numel() for index in distinct.values()
        )
        self._written: set[tuple[Any, ...]] = set()
        self._staged: dict[Offset, torch.Tensor] | None = None
        self._payload: torch.Tensor | None = None
        self._dirty = False

    def shard(self, tensor: DTensor, offset: Offset) -> torch.Tensor | None:
        """Return the buffer at an offset."""
        if self._staged is None:
            self._payload = _PAYLOAD.__get__(tensor)
            self._staged = self._present_values(self._payload)
        plain = self._staged.get(offset)
        return None if plain is None else _Buffer(plain, self)

    def _present_values(self, payload: Any) -> dict[Offset, torch.Tensor]:
        runtime = get_runtime()
        with torch.no_grad():
            if payload.numel() and runtime.op_sharding(payload) != self.sharding:
                payload = runtime.constrain(payload, self._layout)
            shards = host_shards(payload)
            # Memory of their own: nothing but a commit may write to what the runtime holds.
            return {
                offset: shard.clone(memory_format=torch.contiguous_format)
                for offset, shard in shards.items()
            }

    def written(self, part: torch.Tensor) -> None:
        """Hear that a view of a buffer, or a whole one, was written to."""
        with checkpoint_lock:
            block = (part.untyped_storage().data_ptr(), part.storage_offset(), tuple(part.shape))
            if block not in self._written:
                self._written.add(block)
                self._unwritten -= part.numel()
            self._dirty = True
            # A count says when to commit. That it may be wrong, where blocks overlap, costs time
            # only: a commit writes all that is staged, and the next write commits again.
            if self._unwritten <= 0:
                self.commit()
                self._unwritten = self._total  # a tensor with two names is loaded twice
                return
            tensor = self._tensor()
            if tensor is not None and not hasattr(type(tensor), "settled_kind"):
                tensor.__class__ = _being_loaded(type(tensor))

    def commit(self) -> None:
        """Write the buffers to the devices, if anything was written to them."""
        with checkpoint_lock:
            staged, payload, dirty = self._staged, self._payload, self._dirty
            self._forget()
            if not dirty or staged is None or payload is None or payload.numel() == 0:
                return
            runtime = get_runtime()
            tiles = {
                device: staged[offset_of(index)]
                if all(extents_of(index))
                else torch.empty(extents_of(index), dtype=payload.dtype)
                for device, index in self._indices.items()
            }
            with torch.no_grad():
                # A number has no tiles; run_op puts a host tensor where the payload lies.
                source: torch.Tensor = next(iter(staged.values()))
                if payload.ndim:
                    source = runtime.from_shards(tiles, tuple(payload.shape), self._layout)
                runtime.run_op(torch.ops.aten.copy_.default, (payload, source), {})

    def discard(self) -> None:
        """Drop what was written: the tensor gets another value."""
        with checkpoint_lock:
            self._forget()

    def _forget(self) -> None:
        self._staged, self._payload, self._dirty = None, None, False
        self._written.clear()
        tensor = self._tensor()
        if tensor is not None:
            _unmark(tensor)

    def __del__(self) -> None:
        if self._dirty and not sys.is_finalizing():
            self.commit()


def layout_to_load(tensor: DTensor) -> Layout:
    """Return the tensor's placements, as far as XLA has them."""
    mesh, placements = tensor._spec.mesh.value, tensor._spec.placements
    placements = [Replicate() if p.is_partial() else p for p in placements]
    layout = Layout.from_placements(placements, tensor.ndim, mesh)
    try:
        layout.op_sharding(get_runtime().root(mesh))
    except LayoutError:
        # A label that PyTorch's propagator made, and that no XLA sharding expresses.
        return Layout.replicated(mesh, tensor.ndim)
    return layout


@lru_cache
def _being_loaded(kind: type[DTensor]) -> type[DTensor]:
    """What a DTensor is while buffers hold newer values than its devices."""

    class BeingLoaded(kind):
        settled_kind = kind

        @staticmethod
        def __new__(cls: Any, *args: Any, **kwargs: Any) -> Any:
            return kind(*args, **kwargs)

        @property
        def _local_tensor(self) -> Any:
            _settle(self)
            return _PAYLOAD.__get__(self)

        @_local_tensor.setter
        def _local_tensor(self, payload: torch.Tensor) -> None:
            self.__dict__[STATE_KEY].discard()
            _unmark(self)
            _PAYLOAD.__set__(self, payload)

        @classmethod
        def __torch_dispatch__(
            cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
        ) -> Any:
            for leaf in leaves((tuple(args), kwargs or {})):
                if hasattr(type(leaf), "settled_kind"):
                    _settle(leaf)
            return kind.__torch_dispatch__(func, types, args, kwargs)

    return BeingLoaded


def _settle(tensor: Any) -> None:
    tensor.__dict__[STATE_KEY].commit()
    _unmark(tensor)


def _unmark(tensor: Any) -> None:
    tensor.__class__ = getattr(type(tensor), "settled_kind", type(tensor))


class _Buffer(torch.Tensor):
    """A shard on the host, or a view of one, that tells its load when it is written to."""

    _plain: torch.Tensor
    _load: Load

    @staticmethod
    def __new__(cls, plain: torch.Tensor, load: Load) -> _Buffer:
        self = torch.Tensor._make_subclass(cls, plain)
        self._plain, self._load = plain, load
        return self

    def __init__(self, *args: Any) -> None:
        pass

    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore

    @classmethod
    def __torch_dispatch__(
        cls,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        options = dict(kwargs or {})
        buffers = [v for v in leaves((tuple(args), options)) if isinstance(v, _Buffer)]
        plain_args, plain_kwargs = map_nested(_plain, (tuple(args), options))
        output = func(*plain_args, **plain_kwargs)
        if func._schema.is_mutable:
            for target in _targets(func, args, options):
                target._load.written(target._plain)
            return written_targets(func, args, options)
        return map_nested(lambda leaf: _view(leaf, buffers), output)


def _plain(leaf: Any) -> Any:
    return leaf._plain if isinstance(leaf, _Buffer) else leaf


def _view(leaf: Any, buffers: Sequence[_Buffer]) -> Any:
    if isinstance(leaf, torch.Tensor):
        for buffer in buffers:
            if torch._C._is_alias_of(leaf, buffer._plain):  # pyright: ignore[reportAttributeAccessIssue]
                return _Buffer(leaf, buffer._load)
    return leaf


def _targets(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[_Buffer]:
    arguments = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | {**kwargs}
    writes = [a.name for a in func._schema.arguments if a.alias_info and a.alias_info.is_write]
    targets = [arguments[name] for name in writes if name in arguments]
    return [target for target in leaves(targets) if isinstance(target, _Buffer)]


# -------------------------------------------------------- torch.distributed.checkpoint on DTensors


def create_write_items(fqn: str, tensor: DTensor) -> list[WriteItem]:
    """Return one write item per distinct shard on this process's devices.

    Args:
        fqn: The tensor's name in the checkpoint.
        tensor: The tensor to save. Its shards are read when DCP asks for them, not here.

    Returns:
        Items in the order of the first device that holds each. An empty tensor has one, of its
        whole shape, so that its name is in the checkpoint.

    Raises:
        DistributeError: A tensor on the meta device.
    """
    # Here, because it takes 0.3 s to import, and only who saves needs it.
    from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    _check_has_value(tensor, "saved")
    setattr(tensor, STATE_KEY, _Save())
    properties = TensorProperties(dtype=tensor.dtype, requires_grad=tensor.requires_grad)
    return [
        WriteItem(
            index=MetadataIndex(fqn, chunk.offsets),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=tensor.size()),
        )
        for chunk in chunks_of(tensor, real_sharding(tensor))
    ]


def create_chunk_list(tensor: DTensor) -> list[ChunkStorageMetadata]:
    """Return the distinct blocks of `tensor` that this process needs, and begin to load it.

    Args:
        tensor: The tensor to be overwritten. Blocks are those of its placements.

    Returns:
        One chunk per distinct block on this process's devices.

    Raises:
        DistributeError: A tensor on the meta device.
    """
    _check_has_value(tensor, "loaded")
    load = Load(tensor)
    setattr(tensor, STATE_KEY, load)
    return chunks_of(tensor, load.sharding)


def get_tensor_shard(tensor: DTensor, index: MetadataIndex) -> torch.Tensor:
    """Return one shard: its values on the host or, after `create_chunk_list`, a buffer to fill.

    Args:
        tensor: The tensor.
        index: Its `offset` is that of an item or a chunk handed out before.

    Returns:
        A CPU tensor of the shard's shape. A buffer holds the present values, and what is written
        into it in place reaches the devices before the tensor is read.

    Raises:
        DistributeError: No shard begins at that offset, or the index has none.
    """
    with checkpoint_lock:
        state = tensor.__dict__.get(STATE_KEY) or _Save()
        shard = None if index.offset is None else state.shard(tensor, tuple(index.offset))
    if shard is None:
        raise DistributeError(
            f"The shard at offset={None if index.offset is None else tuple(index.offset)} of "
            f"{index.fqn!r} was asked for. No shard of {tensor!r} in this process begins there. "
            "Pass an offset of __create_write_items__ or __create_chunk_list__."
        )
    return shard


def _check_has_value(tensor: DTensor, verb: str) -> None:
    # Asking for the payload also finishes a load that was broken off.
    if tensor._local_tensor.is_meta:
        raise DistributeError(
            f"{tensor!r} on the meta device was to be {verb}. It has no value and no shards. "
            "Materialise it first, e.g. with module.to_empty(device=...)."
        )


class _Save:
    """Hands out each shard once per reading of the devices, which reads all shards at once.

    Only the tensor read last keeps its shards on the host, and only those not yet asked for.
    """

    _latest: _Save | None = None

    def __init__(self) -> None:
        self._left: dict[Offset, torch.Tensor] = {}
        self._version: object = None
        _Save._keep(None)

    def shard(self, tensor: DTensor, offset: Offset) -> torch.Tensor | None:
        """Return the values at an offset."""
        version = None if tensor.is_inference() else tensor._version
        if offset not in self._left or version is None or self._version != version:
            _Save._keep(self)
            self._left, self._version = host_shards(tensor._local_tensor), version
        return self._left.pop(offset, None)

    @staticmethod
    def _keep(save: _Save | None) -> None:
        if _Save._latest is not None:
            _Save._latest._left = {}
        _Save._latest = save
