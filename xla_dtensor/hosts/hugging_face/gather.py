"""Values of a part of a tensor on the process that writes it, whatever process holds them.

What one process holds, it reads, one device after the other. What several hold, XLA gathers: all
of them cut a piece out and ask for a copy on every device, so a gather moves a piece, and at most a
device's shard to find it, but never a tensor. They must therefore come here with the same parts in
the same order; that they were called alike is checked beforehand.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

import torch
from torch.distributed.tensor import Shard

from mesh_utils import Mesh
from xla_dtensor.core import Layout
from xla_dtensor.core.errors import WeightsError
from xla_dtensor.dtensor.dcp import Index, Offset, extents_of, offset_of, shard_indices
from xla_dtensor.dtensor.dtensor import DTensor
from xla_dtensor.dtensor.mesh import DeviceMesh
from xla_dtensor.hosts.blocks import intersection, relative, shifted, whole_block, windows
from xla_dtensor.hosts.exchange import own_process, process_of_device
from xla_dtensor.runtimes.registry import current_runtime, get_runtime

__all__ = ["GATHERED_BYTES", "Team", "part_of"]

aten = torch.ops.aten
GATHERED_BYTES = 128 << 20
"""Most bytes of a tensor that are on the host at once.

A matrix of an 8B model's feed-forward part, 14336 x 4096 in bfloat16, is one piece of this size.
"""
_ON_EACH_DEVICE = 32 << 20  # bytes that are gathered at once; every device has a copy for a moment


class Team:
    """The processes that hold a set of tensors together.

    Args:
        tensors: The tensors; those that are no DTensors every process has for itself.

    Raises:
        WeightsError: Two tensors are held by different processes, or one by none of this process.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self.members: tuple[int, ...] = ()
        self._mesh: DeviceMesh | None = None
        processes = _processes()
        for tensor in tensors:
            if not isinstance(tensor, DTensor):
                continue
            ids = tensor._spec.mesh.value.device_ids.reshape(-1).tolist()
            members = tuple(sorted({processes.get(int(device), 0) for device in ids}))
            if self._mesh is not None and members != self.members:
                raise WeightsError(
                    f"Weights on devices of the processes {self.members} and of {members} were to "
                    "be written together. A file is written by one process, which gets every "
                    "tensor of it from the others. Write the parts of the model one by one."
                )
            self.members, self._mesh = members, self._mesh or tensor._spec.mesh
        own = own_process() if processes else 0
        if not self.members:  # every process has all; the first one writes
            self.members = tuple(sorted(set(processes.values()))) or (0,)
        if own not in self.members:
            raise WeightsError(
                f"Weights on devices of the processes {self.members} were to be written by process "
                f"{own}. It holds none of them. Call save_hf in those processes only."
            )
        self.index = self.members.index(own)

    @property
    def count(self) -> int:
        """How many processes there are."""
        return len(self.members)

    def numbers(self, number: int) -> list[int]:
        """Return the number that each process passes, by place: all have to call this alike.

        Without DTensors there is nothing to talk over, and a process hears itself only.
        """
        mesh = self._mesh
        if self.count == 1 or mesh is None:
            return [number] * (1 if mesh is None else self.count)
        runtime, processes = get_runtime(), _processes()
        layout = Layout.from_placements([Shard(0)] * mesh.ndim, 1, mesh.value)
        ids = [int(device) for device in runtime.root(mesh.value).device_ids.reshape(-1)]
        on_mesh = [int(device) for device in mesh.value.device_ids.reshape(-1)]
        message = torch.tensor([number], dtype=torch.int64)
        own_devices = set(runtime.addressable_device_ids()) & set(ids)
        payload = runtime.from_shards(dict.fromkeys(own_devices, message), (len(on_mesh),), layout)
        numbers = runtime.to_host(payload).tolist()
        by_process = {processes[device]: n for device, n in zip(on_mesh, numbers, strict=True)}
        return [int(by_process[member]) for member in self.members]


def _processes() -> dict[int, int]:
    """Device id -> the process that has it; nothing before a runtime has started."""
    return {} if current_runtime() is None else process_of_device()


def part_of(tensor: torch.Tensor, part: Index, is_receiver: bool) -> torch.Tensor | None:
    """Return a part of a tensor on the host.

    Args:
        tensor: A DTensor: all processes that hold some of it have to call this alike. Or a tensor
            that this process has.
        part: One slice per dim.
        is_receiver: Whether this process wants the values.

    Returns:
        A CPU tensor of memory that goes with it; None where this process does not want it.
    """
    with torch.no_grad():
        if not isinstance(tensor, DTensor):
            return tensor.detach()[part].cpu() if is_receiver else None
        if tensor.is_partial():
            tensor = DTensor.reduce_partial(tensor)
        payload, mesh = tensor._local_tensor, tensor._spec.mesh.value
        if tensor.numel() and _is_held_by_each(tensor):
            return _local_part(payload, mesh, part) if is_receiver else None
        out = torch.empty(extents_of(part), dtype=tensor.dtype) if is_receiver else None
        layout = Layout.replicated(mesh, tensor.ndim)
        for window in windows(extents_of(part), tensor.element_size(), _ON_EACH_DEVICE):
            cut = _sliced(payload, shifted(window, part))
            gathered = get_runtime().constrain(cut, layout)
            if out is not None:  # a copy is here, so nobody has to take part in reading it
                out[window] = get_runtime().to_host(gathered)
        return out


def _is_held_by_each(tensor: DTensor) -> bool:
    """Tell whether each process that holds some of a tensor holds all of it, by itself."""
    runtime, processes = get_runtime(), _processes()
    sharding = runtime.op_sharding(tensor._local_tensor)
    root = runtime.root(tensor._spec.mesh.value)
    by_process: dict[int, set[Offset]] = {}
    for device, index in shard_indices(root, sharding, tuple(tensor.shape)).items():
        if all(extents_of(index)):
            by_process.setdefault(processes.get(device, 0), set()).add(offset_of(index))
    return len({frozenset(offsets) for offsets in by_process.values()}) == 1


def _sliced(payload: torch.Tensor, part: Index) -> torch.Tensor:
    for dim, (cut, size) in enumerate(zip(part, payload.shape, strict=True)):
        if cut != slice(0, size):
            arguments = (payload, dim, cut.start, cut.stop)
            payload = get_runtime().run_op(aten.slice.Tensor, arguments, {})
    return payload


def _local_part(payload: torch.Tensor, mesh: Mesh, part: Index) -> torch.Tensor:
    """Put a part together of what this process's devices hold, one device after the other."""
    runtime, shape = get_runtime(), tuple(payload.shape)
    if not shape:
        return runtime.to_host(payload)
    sharding = runtime.op_sharding(payload)
    tile = prod(sharding.shape_per_tile(shape))
    if tile * payload.element_size() > 2 * GATHERED_BYTES and part != whole_block(shape):
        # One device's shard is too much at once.
        cut = runtime.run_op(aten.clone.default, (_sliced(payload, part),), {})
        return _local_part(cut, mesh, whole_block(cut.shape))
    out = torch.empty(extents_of(part), dtype=payload.dtype)
    own_devices = set(runtime.addressable_device_ids())
    offsets: set[Offset] = set()
    for device, index in shard_indices(runtime.root(mesh), sharding, shape).items():
        common = intersection(index, part)
        if device in own_devices and common is not None and offset_of(index) not in offsets:
            offsets.add(offset_of(index))
            shard = runtime.addressable_shards(payload, devices=[device])[0].data
            out[relative(common, part)] = shard[relative(common, index)]
    return out
