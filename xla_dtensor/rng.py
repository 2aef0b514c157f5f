"""Random numbers on a mesh: seeding, and torch's questions about it.

One generator draws for all devices of the process, and a draw is one of the global tensor: the
values do not depend on placements, all devices of a replicated tensor hold the same, and nothing
has to be offset or synchronised per device. The names and arguments are those of
``torch.distributed.tensor._random``.

===============================  =====================  ==========================================
generator                        seeded by              drawn from by
===============================  =====================  ==========================================
the devices', one per process    ``torch.manual_seed``  random ops and factories of DTensors
named ones beside it             ``RNGStatesTracker``   the same, inside ``tracker.fork(name)``
torch's own for the CPU          ``torch.manual_seed``  plain tensors
===============================  =====================  ==========================================

Drawing on the CPU never changes what the devices draw. The other way round, the CPU's generator
gives one number to each draw on the mesh (JAX) or each fork (torch_xla): ``torch.utils.checkpoint``
rewinds no other, and by these numbers a dropout is repeated. A few ops that torch_xla runs on the
host draw from it outright, with values that do not depend on placements either.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh as TorchDeviceMesh
from torch.distributed.tensor import _random as torch_random

from xla_dtensor.argument_types import argument_types
from xla_dtensor.device_mesh import as_device_mesh, mesh_text
from xla_dtensor.errors import MeshRankError
from xla_dtensor.rng_trackers import OffsetBasedRNGTracker, RNGStatesTracker
from xla_dtensor.runtimes.registry import get_runtime

__all__ = ["OffsetBasedRNGTracker", "RNGStatesTracker", "is_rng_supported_mesh", "manual_seed"]

_rng_tracker: OffsetBasedRNGTracker | None = None


def is_rng_supported_mesh(device_mesh: Any) -> bool:
    """Tell whether random ops may be used on a mesh.

    Args:
        device_mesh: The mesh.

    Returns:
        True for an "xla" mesh. For a mesh of another device type what torch says, which warns
        where the answer is no.

    Example:
        >>> import xla_dtensor as xd
        >>> is_rng_supported_mesh(xd.init_device_mesh("xla", (8,)))
        True
    """
    if _is_torchs(device_mesh):
        return torch_random.is_rng_supported_mesh(device_mesh)
    as_device_mesh(device_mesh)
    return True


@argument_types
def manual_seed(seed: int, device_mesh: Any) -> None:
    """Seed the generator of a mesh, and with it torch's others, as ``torch.manual_seed`` does.

    Every process of the job has to call it with the same seed. All meshes of a process share one
    generator.

    Args:
        seed: The seed; as in torch, any integer of 64 bits.
        device_mesh: The mesh. One of another device type than "xla" is seeded by torch, which
            warns where it cannot.

    Raises:
        MeshRankError: This process reaches no device of the mesh.

    Example:
        >>> import xla_dtensor as xd
        >>> mesh = xd.init_device_mesh("xla", (8,))
        >>> manual_seed(0, mesh)
        >>> first = xd.rand(8, device_mesh=mesh).full_tensor().cpu()
        >>> manual_seed(0, mesh)
        >>> bool((xd.rand(8, device_mesh=mesh).full_tensor().cpu() == first).all())
        True
    """
    global _rng_tracker
    if _is_torchs(device_mesh):
        torch_random.manual_seed(seed, device_mesh)
        return
    mesh = as_device_mesh(device_mesh)
    if mesh.get_coordinate() is None:
        raise MeshRankError(
            f"manual_seed was called with seed={seed} and a mesh {mesh_text(mesh.value)}. "
            "manual_seed requires the current rank to be a part of the device mesh, and this "
            "process reaches none of its devices. Call it in the processes of the mesh only."
        )
    if _rng_tracker is None:
        _rng_tracker = OffsetBasedRNGTracker(mesh, run_state_sync=False)
    torch.manual_seed(seed)
    # torch has passed it on, unless another package holds the place where it does so.
    get_runtime().manual_seed(seed)


def _is_torchs(mesh: Any) -> bool:
    return isinstance(mesh, TorchDeviceMesh) and mesh.device_type != "xla"
