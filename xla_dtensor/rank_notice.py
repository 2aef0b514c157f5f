"""One log line for a program that asks which rank it is, where one process is many devices.

PyTorch's ranks use ``mesh.get_local_rank()`` to take their own rows of a batch or their own columns
of a weight. A process that drives all devices has one answer, that of its first device: the rows of
rank 0 would be the whole batch, silently.
"""

from __future__ import annotations

import logging
import sys

import numpy as np

from mesh_utils import Axis, Mesh

__all__ = ["warn_of_one_rank"]

logger = logging.getLogger("xla_dtensor")
_warned: set[Mesh] = set()


def warn_of_one_rank(mesh: Mesh, axis: int, devices: tuple[int, ...], text: str) -> None:
    """Warn, once per mesh, where a process with several devices along an axis is asked its rank.

    Args:
        mesh: The mesh.
        axis: The number of the axis.
        devices: The ids of the devices that the process reaches.
        text: The mesh as a text, for the message.
    """
    places = np.argwhere(np.isin(mesh.device_ids, devices))[:, axis]
    if mesh in _warned or len(np.unique(places)) < 2 or _asked_by_torch():
        return
    _warned.add(mesh)
    name: Axis = mesh.axis_names[axis]
    logger.warning(
        "get_local_rank() was called for axis %r of the mesh %s, of which this process has %d "
        "devices. It is the first one's number, in all of the program: rows or columns chosen by "
        "it are the same on every device. Shard the whole value with distribute_tensor; per device "
        "there is xla_dtensor.axis_index(view, axis).",
        name,
        text,
        len(np.unique(places)),
    )


def _asked_by_torch() -> bool:
    """Tell whether code of torch's asked, which knows to ask for the shard of the first device."""
    return str(sys._getframe(3).f_globals.get("__name__")).split(".")[0] == "torch"
