"""JAX's own mesh functions: the one place that asks them.

JAX is imported here, when it is asked, and no backend starts. Devices that JAX does not know
(torch_xla's, Devices, those of a Topology) are shown to it in the form that its mesh functions
look at.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mesh_utils.device import Coords, Device
from mesh_utils.errors import MeshError


@dataclass(frozen=True, slots=True)
class JaxDevice:
    """What JAX's mesh functions ask of a device. The id is its place in the list."""

    id: int
    platform: str
    device_kind: str
    process_index: int
    coords: Coords
    core_on_chip: int
    slice_index: int = 0


def jax_mesh_utils(asked: str, instead: str) -> Any:
    """Imports JAX's mesh functions.

    Args:
        asked: what needs them, for the message.
        instead: what else to do, for the message.

    Returns:
        The module jax.experimental.mesh_utils.

    Raises:
        MeshError: JAX cannot be imported.
    """
    try:
        from jax.experimental import mesh_utils
    except ImportError as error:
        raise MeshError(
            f"{asked} JAX cannot be imported: {error}. Install jax, or {instead}."
        ) from error
    return mesh_utils


def jax_default_devices() -> list[object]:
    """The devices that JAX has here; this starts its backend.

    Returns:
        jax.devices().

    Raises:
        MeshError: JAX cannot be imported.
    """
    asked = "A mesh was asked for without devices, which are jax.devices() then."
    jax_mesh_utils(asked, "pass devices, or a Topology")
    return list(sys.modules["jax"].devices())  # its parent, which is there by now


def shown_to_jax(devices: Sequence[Device]) -> list[JaxDevice]:
    """Shows devices to JAX as they are.

    Args:
        devices: the devices.

    Returns:
        What JAX looks at; the id of each is its place in the list.
    """
    return [
        JaxDevice(
            place,
            "gpu" if device.coords is None else "tpu",
            device.kind,
            device.process_index or 0,
            device.coords or (0, 0, 0),
            device.core_on_chip,
            device.slice_index or 0,
        )
        for place, device in enumerate(devices)
    ]
