"""Loading a DTensor from a checkpoint: host buffers to fill, and when they go to the devices.

DCP writes what it reads into a CPU tensor in place, piece by piece, and says nothing when the last
piece is in. So a buffer is a tensor that tells its load of every write. It is filled with the
present values first, so that a checkpoint with a hole leaves the rest alone. Buffers go to the
devices, as the tensor's placements say,

* when every element of the tensor's blocks has been written, which is the ordinary case, or
* when the tensor's value is asked for, whatever asks: until then the tensor is of a subclass whose
  ``_local_tensor`` writes first, or
* when the tensor is dropped, since others may share its memory.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.distributed.tensor import Replicate

from xla_dtensor.checkpoint_shards import (
    Offset,
    device_indices,
    distinct_indices,
    extents_of,
    host_shards,
    offset_of,
)
from xla_dtensor.core import Layout, LayoutError
from xla_dtensor.nested import leaves, map_nested
from xla_dtensor.runtimes.registry import get_runtime
from xla_dtensor.written import written_targets

if TYPE_CHECKING:
    from xla_dtensor.dtensor import DTensor

__all__ = ["STATE_KEY", "Load", "checkpoint_lock", "layout_to_load"]

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
                offset: data.clone(memory_format=torch.contiguous_format)
                for offset, data in shards.items()
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
                value: torch.Tensor = next(iter(staged.values()))
                if payload.ndim:
                    value = runtime.from_shards(tiles, tuple(payload.shape), self._layout)
                runtime.run_op(torch.ops.aten.copy_.default, (payload, value), {})

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
    whole = [Replicate() if p.is_partial() else p for p in placements]
    layout = Layout.from_placements(whole, tensor.ndim, mesh)
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
            for value in leaves((tuple(args), kwargs or {})):
                if hasattr(type(value), "settled_kind"):
                    _settle(value)
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
        given = dict(kwargs or {})
        buffers = [v for v in leaves((tuple(args), given)) if isinstance(v, _Buffer)]
        plain_args, plain_kwargs = map_nested(_plain, (tuple(args), given))
        result = func(*plain_args, **plain_kwargs)
        if func._schema.is_mutable:
            for target in _targets(func, args, given):
                target._load.written(target._plain)
            return written_targets(func, args, given)
        return map_nested(lambda value: _view(value, buffers), result)


def _plain(value: Any) -> Any:
    return value._plain if isinstance(value, _Buffer) else value


def _view(value: Any, buffers: Sequence[_Buffer]) -> Any:
    if isinstance(value, torch.Tensor):
        for buffer in buffers:
            if torch._C._is_alias_of(value, buffer._plain):  # pyright: ignore[reportAttributeAccessIssue]
                return _Buffer(value, buffer._load)
    return value


def _targets(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[_Buffer]:
    named = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | {**kwargs}
    writes = [a.name for a in func._schema.arguments if a.alias_info and a.alias_info.is_write]
    values = [named[name] for name in writes if name in named]
    return [value for value in leaves(values) if isinstance(value, _Buffer)]
