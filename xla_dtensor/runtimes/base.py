"""The runtime interface: the few verbs that the DTensor layer needs from an XLA back end.

A *payload* is the torch tensor that stands for one global tensor on the runtime's devices: a
``JaxTensor`` over a ``jax.Array`` on the JAX runtime, an XLA lazy tensor on torch_xla. The DTensor
layer keeps a payload per DTensor, runs aten ops on payloads through :meth:`Runtime.run_op`, and
says how they lie by :meth:`Runtime.put` and :meth:`Runtime.constrain`. Everything above this file
is the same on every runtime; everything that differs between runtimes is below it.

Shardings cross this border as :class:`~xla_dtensor.core.Layout` (asked for) and
:class:`~xla_dtensor.core.OpSharding` (read back), the latter relative to :meth:`Runtime.root`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

if TYPE_CHECKING:
    from mesh_utils import Mesh
    from xla_dtensor.core import Layout, OpSharding

__all__ = ["AddressableShard", "CompiledStep", "Runtime"]


@dataclass(frozen=True)
class AddressableShard:
    """One device's part of a global tensor, on a device that this process can reach.

    Args:
        device_id: Global id of the device.
        index: One slice per dim into the global tensor; empty slices for a shard of padding only.
        data: The values as a CPU tensor, padding cut off.
        num_bytes_on_device: Bytes that the device holds for this shard, padding included.
    """

    device_id: int
    index: tuple[slice, ...]
    data: torch.Tensor
    num_bytes_on_device: int


class CompiledStep(ABC):
    """A Python step that runs as one XLA program. Call it like the function it was made from."""

    @abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step, tracing and compiling it first where needed."""

    @abstractmethod
    def hlo(self) -> str:
        """Return the partitioned, optimised HLO text of the program used last."""

    @abstractmethod
    def stats(self) -> Mapping[str, Any]:
        """Return counts: calls, traces, and the reason of each trace."""


class Runtime(ABC):
    """An XLA back end. Subclass it, register it under the entry point group, and it can be chosen.

    The conformance tests in ``tests/xla_dtensor/runtimes/test_conformance.py`` state what each
    method has to guarantee.
    """

    name: ClassVar[str]
    install_hint: ClassVar[str]

    # Keys that every DTensor of this runtime must carry beside those of its device, so that whole
    # ops reach the runtime (see runtimes/README.md). None where the device has its own.
    extra_dispatch_keys: ClassVar[Any] = None

    # ------------------------------------------------------------------ devices

    @abstractmethod
    def device_ids(self) -> tuple[int, ...]:
        """Return the ids of all devices of the job, those of other processes included."""

    @abstractmethod
    def addressable_device_ids(self) -> tuple[int, ...]:
        """Return the ids of the devices that this process can reach."""

    @abstractmethod
    def describe(self) -> Mapping[str, str]:
        """Return what the doctor prints: versions, platform, settings that this runtime made."""

    @abstractmethod
    def root(self, mesh: Mesh) -> Mesh:
        """Return the mesh whose flat order is the partition order of programs over `mesh`."""

    # ------------------------------------------------------------------ tensors

    @abstractmethod
    def is_payload(self, tensor: torch.Tensor) -> bool:
        """Tell whether `tensor` is one of this runtime's payloads."""

    @abstractmethod
    def put(self, tensor: torch.Tensor, layout: Layout) -> torch.Tensor:
        """Copy a host tensor, equal in every process, to the devices as `layout` says."""

    @abstractmethod
    def from_shards(
        self, shards: Mapping[int, torch.Tensor], shape: Sequence[int], layout: Layout
    ) -> torch.Tensor:
        """Build a global tensor from one host tensor per addressable device, keyed by device id."""

    @abstractmethod
    def constrain(self, payload: torch.Tensor, layout: Layout) -> torch.Tensor:
        """Return a new payload with the same values that lies as `layout` says."""

    @abstractmethod
    def op_sharding(self, payload: torch.Tensor) -> OpSharding:
        """Return how the payload really lies, read from the runtime, relative to the root."""

    @abstractmethod
    def addressable_shards(self, payload: torch.Tensor) -> tuple[AddressableShard, ...]:
        """Return this process's shards, ordered by device id."""

    @abstractmethod
    def to_host(self, payload: torch.Tensor) -> torch.Tensor:
        """Return the whole value as a CPU tensor. All processes have to call this alike."""

    def to_plain(self, payload: torch.Tensor) -> torch.Tensor:
        """Return a payload's value as a tensor to hand to users, fit to be mixed with DTensors."""
        return payload.detach()

    # ------------------------------------------------------------------ programs

    @abstractmethod
    def run_op(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run one aten op on payloads, below autograd."""

    @abstractmethod
    def compile(self, step: Callable[..., Any]) -> CompiledStep:
        """Return `step` as one XLA program, see :func:`xla_dtensor.compile`."""

    @abstractmethod
    def manual_seed(self, seed: int) -> None:
        """Seed the device's random number generator."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until all work handed to the devices is done."""
