"""The devices of a topology that is not here, as libtpu describes them to its compiler.

They can be compiled for and hold nothing. libtpu may end the process over a topology or a mesh that
it does not like, and it stays in the process for good: ask in a child process.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from mesh_utils import Topology
from xla_dtensor.errors import CompileError

__all__ = ["absent_devices", "libtpu_options"]


def libtpu_options(topology: Topology) -> tuple[str, dict[str, Any]]:
    """Say a topology in libtpu's words.

    Args:
        topology: TPU chips.

    Returns:
        The name, and the options that go with it.

    Raises:
        CompileError: Chips that are no TPUs, or a box whose wrap nobody knows.

    Example:
        >>> libtpu_options(Topology.parse("2xv5e:16x16"))
        ('v5e:16x16', {'wrap': (True, True, False), 'num_slices': 2})
    """
    chip = topology.chip
    if chip is None or not topology.torus_rank or topology.wrap is None:
        raise CompileError(
            f"A program was asked for, for {topology!r}. libtpu compiles for TPUs whose links are "
            "known. Pass a topology such as Topology.parse('v5p:8x8x8')."
        )
    box = "x".join(map(str, topology.shape[: topology.torus_rank]))
    options: dict[str, Any] = {}
    if any(topology.wrap):
        options["wrap"] = topology.wrap
    if chip.name == "v4":
        options["chip_config_name"] = "megacore"  # one device per chip
    if topology.num_slices > 1:
        options["num_slices"] = topology.num_slices
    return f"{chip.name}:{box}{'_twisted' if topology.twist else ''}", options


def absent_devices(topology: Topology) -> tuple[Any, ...]:
    """Return libtpu's devices of a topology.

    Args:
        topology: TPU chips.

    Returns:
        Devices whose ids are those of ``topology.device_ids``.

    Raises:
        CompileError: Chips that are no TPUs, libtpu is missing, or it refuses them.
    """
    name, options = libtpu_options(topology)
    if importlib.util.find_spec("libtpu") is None:
        raise CompileError(
            f"A program was asked for, for {topology.name}. libtpu, the TPU's compiler, is not "
            "installed. Install it: pip install 'xla-dtensor[preflight]'."
        )
    topologies: Any = importlib.import_module("jax.experimental.topologies")
    try:
        found = tuple(topologies.get_topology_desc(name, "tpu", **options).devices)
    except Exception as error:  # libtpu's errors have no common type
        raise CompileError(
            f"A program was asked for, for {topology.name}. libtpu refuses {name} with {options}: "
            f"{error}. Pass a slice that exists."
        ) from error
    ids = {device.id for device in found}
    if ids != set(topology.device_ids.tolist()):
        raise CompileError(
            f"A program was asked for, for {topology.name}. libtpu lists other devices than were "
            f"expected: {len(ids)}, from {min(ids)} to {max(ids)}. Use the libtpu that this "
            "version was made for."
        )
    return found
