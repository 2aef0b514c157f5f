"""Collectives as lines of a report: equal ones summed, each with its network and its origin.

Two collectives are equal if they do the same over the same axes with as many bytes, for the same
line of source in the same phase. Layers that differ in nothing but their number are one line:
"layers.0/attention" and "layers.1/attention" become "layers.*/attention".

What XLA for TPU sends between slices is printed as a send and a recv of one rendezvous. Together
they are one collective over DCN, whose kind the compiler gives as the type of the transfer.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import numpy as np

from mesh_utils import Axis
from xla_dtensor.report.attribution import Origin, origin_of
from xla_dtensor.report.collective import Collective
from xla_dtensor.report.collective_reader import DCN_TARGET
from xla_dtensor.report.device_groups import device_groups

__all__ = ["CollectiveLine", "NetworkName", "collective_lines", "starred"]

NetworkName: TypeAlias = Literal["ICI", "DCN", "-"]
"""Which wires carry it: inside a slice, between slices, or none (or nobody knows)."""

_RENDEZVOUS = "_xla_host_transfer_rendezvous"
_TRANSFER = "_xla_megascale_transfer_type"
_COUNTER = re.compile(r"(?<=[./])\d+(?=[./ ]|$)")


@dataclass(frozen=True, slots=True)
class CollectiveLine:
    """Equal collectives of a program, as one line.

    Attributes:
        kind: what they do, "all-gather"; "send" and "recv" only where they are no pair.
        axes: the mesh axes, as of `Collective`; None where the groups follow none.
        network: "ICI" inside a slice, "DCN" between slices; "-" where nothing is sent, or where
            nobody knows.
        bytes_each: the payload of one of them on one device: the larger of what goes in and out.
        count: how many of them are in the program.
        executions: how often they run in one step, all of them together.
        at_least: whether a loop of unknown trip count makes `executions` a lower bound.
        origin: the module, the phase and the line of source they were made for.

    Example:
        >>> origin = Origin("Llama/layers.*/attention", "forward", "dot_general", None)
        >>> line = CollectiveLine("all-gather", ("fsdp",), "ICI", 1 << 20, 2, 64, False, origin)
        >>> line.bytes_per_device, line.is_attributed
        (67108864, False)
    """

    kind: str
    axes: tuple[Axis, ...] | None
    network: NetworkName
    bytes_each: int
    count: int
    executions: int
    at_least: bool
    origin: Origin

    @property
    def bytes_per_device(self) -> int:
        """The payload on one device in one step. Bytes on the wire depend on the algorithm."""
        return self.bytes_each * self.executions

    @property
    def moves(self) -> bool:
        """Whether devices talk to each other: not if each is alone in its group."""
        return self.axes != ()

    @property
    def is_attributed(self) -> bool:
        """Whether it has a mesh axis and a line of source."""
        return bool(self.axes) and self.origin.source is not None


def collective_lines(
    collectives: Iterable[Collective],
    slice_of: Sequence[int] | None = None,
    program_size: int | None = None,
    fast: NetworkName = "ICI",
) -> tuple[CollectiveLine, ...]:
    """Makes the lines of a report.

    Args:
        collectives: as `collectives()` lists them.
        slice_of: the slice of each device, in the order of the mesh's root; None if there is only
            one, or if nobody knows.
        program_size: how many devices run the program together: of several slices often those of
            one. By default all.
        fast: the network inside a slice; "-" where it is not known.

    Returns:
        The lines, the most bytes first.

    Example:
        >>> collective_lines([])
        ()
    """
    slices = None if slice_of is None else np.asarray(slice_of)
    lines: dict[tuple[object, ...], CollectiveLine] = {}
    for item, kind, size in _paired(collectives):
        line = CollectiveLine(
            kind=kind,
            axes=item.axes,
            network=_network(item, slices, program_size, fast),
            bytes_each=size,
            count=1,
            executions=1 if item.executions is None else item.executions,
            at_least=item.executions is None,
            origin=origin_of(item.op_name, item.source),
        )
        key = (
            *(line.kind, line.axes, line.network, line.bytes_each),
            *(line.origin.phase, line.origin.op, line.origin.source),
            starred(line.origin.module or ""),
        )
        lines[key] = _sum(lines[key], line) if key in lines else line
    return tuple(sorted(lines.values(), key=_order))


def starred(name: str) -> str:
    """Writes a star for each number that is a part of a name.

    Args:
        name: the path of a module, or the name of a parameter.

    Returns:
        The same for each of the layers of a list.

    Example:
        >>> starred("layers.12.wq.weight exp_avg"), starred("Llama/layers.0/attention")
        ('layers.*.wq.weight exp_avg', 'Llama/layers.*/attention')
    """
    return _COUNTER.sub("*", name)


def _paired(collectives: Iterable[Collective]) -> list[tuple[Collective, str, int]]:
    """Each collective with its kind and payload; a send and a recv that belong together are one."""
    found: list[tuple[Collective, str, int]] = []
    places: dict[tuple[str, str, str], int] = {}
    for item in collectives:
        attributes = dict(item.frontend_attributes)
        meeting, transfer = attributes.get(_RENDEZVOUS), attributes.get(_TRANSFER)
        if meeting is None or transfer is None or item.kind not in ("send", "recv"):
            found.append((item, item.kind, item.payload_bytes))
            continue
        key = item.computation, meeting, transfer
        if key not in places:
            places[key] = len(found)
            found.append((item, transfer.lower().replace("_", "-"), item.payload_bytes))
            continue
        first, kind, size = found[places[key]]
        told = first if first.op_name is not None or item.op_name is None else item
        found[places[key]] = told, kind, max(size, item.payload_bytes)
    return found


def _network(
    item: Collective,
    slices: np.ndarray[tuple[int], np.dtype[np.int64]] | None,
    program_size: int | None,
    fast: NetworkName,
) -> NetworkName:
    if DCN_TARGET in dict(item.frontend_attributes):
        return "DCN"
    if item.axes == ():
        return "-"
    if slices is None or (program_size is not None and program_size < slices.size):
        return fast  # A program of one slice talks inside of it, but for its DCN transfers.
    if item.source_target_pairs:
        members = np.array(item.source_target_pairs)
    elif item.replica_groups is not None:
        channel = item.channel_id is not None
        ids = item.use_global_device_ids
        groups = item.replica_groups
        members = device_groups(groups, item.kind, channel, ids, 1, slices.size)
    else:
        return "-"
    if members is None or members.max(initial=0) >= slices.size:
        return "-"
    places = slices[members]
    return "DCN" if (places != places[:, :1]).any() else fast


def _sum(one: CollectiveLine, other: CollectiveLine) -> CollectiveLine:
    same = one.origin.module == other.origin.module
    origin = one.origin
    if not same and origin.module is not None:
        origin = replace(origin, module=starred(origin.module))
    return replace(
        one,
        count=one.count + other.count,
        executions=one.executions + other.executions,
        at_least=one.at_least or other.at_least,
        origin=origin,
    )


def _order(line: CollectiveLine) -> tuple[object, ...]:
    origin = line.origin
    axes = "mixed" if line.axes is None else ", ".join(map(str, line.axes))
    return (
        -line.bytes_per_device,
        line.kind,
        axes,
        origin.module or "",
        origin.phase,
        origin.op or "",
    )
