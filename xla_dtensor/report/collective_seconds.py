"""What each collective of a program costs on the links of a topology: MODELLED.

mesh_utils.mesh_traffic knows what a collective over mesh axes takes; here the collectives of a
program are put to it: their bytes, their groups, and how often they run.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from mesh_utils import Axis, MeshError, Network, TopologyError
from mesh_utils.mesh_traffic import MeshTraffic, TrafficSeconds
from mesh_utils.network import Collective as Exchange
from xla_dtensor.report.collective import Collective
from xla_dtensor.report.collective_reader import DCN_TARGET
from xla_dtensor.report.device_groups import device_groups
from xla_dtensor.report.evidence import Evidence
from xla_dtensor.report.granules import Granules
from xla_dtensor.report.hlo_module import HloModule

__all__ = ["CollectiveTimes", "axes_text", "megascale_bytes"]

_EXCHANGES: dict[str, Exchange] = {
    "all-gather": "all-gather",
    "reduce-scatter": "reduce-scatter",
    "all-reduce": "all-reduce",
    "all-to-all": "all-to-all",
    "ragged-all-to-all": "all-to-all",
    "collective-broadcast": "all-gather",  # each byte reaches each member once, as in a gather
}


class CollectiveTimes:
    """Adds up the modelled seconds of collectives.

    Args:
        evidence: for which machine and mesh.

    Attributes:
        ici: seconds inside the slices, by the text of the axes.
        dcn: seconds between slices.
        doubts: what was left out or counted once, in words.

    Raises:
        MeshError: a topology whose links are not known, or that has not the mesh's devices.
        HloError: text that is no program.
    """

    def __init__(self, evidence: Evidence) -> None:
        if evidence.topology is None:
            raise ValueError("CollectiveTimes was asked for without a topology. It has the links.")
        mesh = evidence.mesh
        self.mesh = mesh if mesh.size() == mesh.root.size() else mesh.root
        self.traffic = MeshTraffic(evidence.topology, self.mesh)
        _check_known(self.traffic.network)
        self.ici: dict[str, float] = {}
        self.dcn = 0.0
        self._doubts: dict[str, None] = {}
        self._ids = mesh.root.device_ids.reshape(-1)
        header = HloModule.parse_header(evidence.hlo_text)
        self._counts = header.replica_count, header.num_partitions
        slices = evidence.granules
        self._granules = None if slices is None else Granules(slices)

    @property
    def doubts(self) -> tuple[str, ...]:
        """What makes the times lower bounds."""
        return tuple(self._doubts)

    def add(self, collective: Collective) -> TrafficSeconds:
        """Adds one collective, as often as it runs.

        Args:
            collective: of the program.

        Returns:
            The modelled seconds of one run of it.
        """
        try:
            seconds = self.seconds(collective)
        except MeshError:
            self._doubt("collectives whose groups no link model covers take no time")
            return TrafficSeconds(0.0)
        times = collective.executions
        if times is None:
            times = 1
            self._doubt("a loop whose length the program does not say is counted once")
        if seconds.ici:
            text = axes_text(collective.axes)
            self.ici[text] = self.ici.get(text, 0.0) + times * seconds.ici
        self.dcn += times * seconds.dcn
        return seconds

    def seconds(self, collective: Collective) -> TrafficSeconds:
        """Models one run of a collective.

        Args:
            collective: of the program.

        Returns:
            Seconds; none for a recv, which its send speaks for.

        Raises:
            MeshError: groups that lie unevenly on the slices.
        """
        nothing = TrafficSeconds(0.0)
        if DCN_TARGET in dict(collective.frontend_attributes):
            moved = megascale_bytes(collective, self._slices(collective.axes))
            return TrafficSeconds(0.0, self.traffic.dcn_seconds(moved))
        if collective.kind == "recv" or collective.axes == ():
            return nothing
        if collective.source_target_pairs:
            pairs = self._devices(np.array(collective.source_target_pairs, np.int64))
            size = collective.operand_bytes
            return nothing if pairs is None else self.traffic.permute_seconds(pairs, size)
        kind = _EXCHANGES.get(collective.kind)
        if kind is None:
            return nothing
        if collective.axes is not None:
            return self.traffic.seconds(collective.axes, collective.payload_bytes, kind)
        groups = self._mixed_groups(collective)
        if groups is None:
            self._doubt("collectives whose groups could not be told take no time")
            return nothing
        return self.traffic.group_seconds(groups, collective.payload_bytes, kind)

    def _doubt(self, text: str) -> None:
        self._doubts[text] = None

    def _slices(self, axes: tuple[Axis, ...] | None) -> int:
        every = self.traffic.topology.num_slices
        return every if not axes else max(2, self.traffic.slices(axes))

    def _mixed_groups(self, collective: Collective) -> NDArray[np.int64] | None:
        if collective.replica_groups is None:
            return None
        local = device_groups(
            collective.replica_groups,
            collective.kind,
            collective.channel_id is not None,
            collective.use_global_device_ids,
            *self._counts,
        )
        return None if local is None else self._devices(local)

    def _devices(self, local: NDArray[np.int64]) -> NDArray[np.int64] | None:
        """The device ids of places in the program; of a program of one slice those of the first."""
        if local.max(initial=0) >= self._counts[0] * self._counts[1]:
            return None
        if self._counts[0] * self._counts[1] < self._ids.size:
            if self._granules is None or local.max(initial=0) >= self._granules.places.shape[1]:
                return None
            local = self._granules.places[0][local]
        return self._ids[local] if local.max(initial=0) < self._ids.size else None


def _check_known(network: Network) -> None:
    if network.link_bytes_per_second is None or (network.num_slices > 1 and not network.dcn_links):
        raise TopologyError(
            "The times of collectives were asked for. The bandwidth of a link, or between slices, "
            "is not known. Pass a topology of a chip whose figures are."
        )


def megascale_bytes(collective: Collective, slices: int) -> float:
    """Counts what a device sends to other slices, in a transfer that XLA for TPU prints.

    Args:
        collective: its send; of its recv nothing is counted.
        slices: how many slices take part.

    Returns:
        Bytes of each device, one way, modelled as a ring over the slices.
    """
    size = collective.operand_bytes
    match dict(collective.frontend_attributes).get("_xla_megascale_transfer_type"):
        case "ALL_REDUCE":
            return 2 * (slices - 1) / slices * size
        case "ALL_GATHER":
            return (slices - 1) * size
        case "ALL_TO_ALL" | "REDUCE_SCATTER":
            return (slices - 1) / slices * size
    return size


def axes_text(axes: Sequence[Axis] | None) -> str:
    """Writes the axes of a collective.

    Args:
        axes: as `Collective.axes`.

    Returns:
        "tp", "dp, tp"; "mixed" for groups that follow no axes.

    Example:
        >>> axes_text(("dp", "tp:(2)4")), axes_text(None)
        ('dp, tp:(2)4', 'mixed')
    """
    return "mixed" if axes is None else ", ".join(map(str, axes))
