"""Collectives between local views on torch_xla: those of manual regions, in one of their own each.

A stack enters a region, the collective runs on each device's tensor, the results leave as a stack.
So each is the one collective that it says, where compositions of ops on the stack are left to
XLA's partitioner: of ``stack.sum(0)`` cut in blocks it makes an all-reduce of the whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mesh_utils import Axis
from xla_dtensor.runtimes.torch_xla_local_payload import (
    LocalPayload,
    cuts_of,
    enter_tile,
    leave_tile,
)
from xla_dtensor.runtimes.torch_xla_manual_collectives import run_collective

__all__ = ["run_local_collective"]


def run_local_collective(
    name: str, local: LocalPayload, axes: tuple[Axis, ...], options: Mapping[str, Any]
) -> LocalPayload:
    """Run one of the collectives of :meth:`Runtime.manual_collective` on a local payload.

    Args:
        name: Which.
        local: What each device has.
        axes: The axes along which members are numbered, some of the region's.
        options: As the collective takes them.

    Returns:
        What each device has afterwards.

    Raises:
        DistributeError: Wrong options.
        UnsupportedOpError: No such collective.
    """
    region = local._region
    mixed = [options[key] for key in ("dim", "split_dim", "concat_dim") if key in options]
    cuts = () if name == "axis_index" else cuts_of(local, mixed)
    result = run_collective(name, enter_tile(local, cuts), region.mesh, axes, options)
    return LocalPayload(leave_tile(result, region, cuts), region)
