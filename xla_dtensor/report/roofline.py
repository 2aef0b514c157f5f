"""How long a step takes at least, by what each part of the machine has to do: MODELLED.

    compute    the operations of the step's products / the peak of the chips
    HBM        a lower bound of the bytes that each chip moves / its HBM bandwidth
    ICI        what each collective moves over the links of its mesh axes (mesh_utils.network)
    DCN        what goes between slices / the bandwidth of a chip to them

Nothing of it was measured. What is wrong with it on purpose:

- bytes of HBM: everything that is held is read, and what is written back is written, once; the
  compiler's temporaries are written once and read once. Caches are left out, but so is every second
  time that a weight is read (in the backward, say): a real step moves more.
- collectives have bandwidth alone, no latency; one axis is at work at a time, so the seconds of all
  axes add up to ICI's. A loop of unknown trip count counts once.
- between slices an all-reduce of n slices sends 2 (n - 1) / n of its bytes, an all-gather n - 1
  times its input, an all-to-all (n - 1) / n: a ring, as for the links inside.
- the step takes the longest of the four if they overlap perfectly (`step_seconds`), their sum if
  nothing does (`step_seconds_no_overlap`). A real step lies between, or above.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mesh_utils import Axis, Chip, MeshError, Network, TopologyError
from mesh_utils.network import Collective as Exchange
from mesh_utils.traffic import MeshTraffic, TrafficSeconds
from xla_dtensor.report.collective import (
    DCN_TARGET,
    TRANSFER_TYPE,
    Collective,
    Granules,
    axis_names,
    device_groups,
)
from xla_dtensor.report.hlo_text import HloError
from xla_dtensor.report.report import Evidence

__all__ = [
    "CollectiveTimes",
    "Roofline",
    "megascale_bytes",
    "roofline",
    "why_no_roofline",
]


# ------------------------------ What each collective of a program costs on the links of a topology
#
# MODELLED.
#
# mesh_utils.traffic knows what a collective over mesh axes takes; here the collectives of a program
# are put to it: their bytes, their groups, and how often they run.

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
        program = evidence.program
        self._counts = program.replica_count, program.num_partitions
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
            text = axis_names(collective.axes)
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
            dcn_bytes = megascale_bytes(collective, self._slices(collective.axes))
            return TrafficSeconds(0.0, self.traffic.dcn_seconds(dcn_bytes))
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
        local = device_groups(collective, *self._counts)
        groups = None if local is None else self._devices(local)
        if groups is None:
            self._doubt("collectives whose groups could not be told take no time")
            return nothing
        return self.traffic.group_seconds(groups, collective.payload_bytes, kind)

    def _doubt(self, text: str) -> None:
        self._doubts[text] = None

    def _slices(self, axes: tuple[Axis, ...] | None) -> int:
        every = self.traffic.topology.num_slices
        return every if not axes else max(2, self.traffic.slices(axes))

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
    match dict(collective.frontend_attributes).get(TRANSFER_TYPE):
        case "ALL_REDUCE":
            return 2 * (slices - 1) / slices * size
        case "ALL_GATHER":
            return (slices - 1) * size
        case "ALL_TO_ALL" | "REDUCE_SCATTER":
            return (slices - 1) / slices * size
    return size


# ----------------------------------------------------------------------------------------- Roofline

_PEAKS = {"bf16": "bf16", "f16": "bf16", "s8": "int8", "u8": "int8", "s4": "int8", "f32": "bf16"}


@dataclass(frozen=True)
class Roofline:
    """The modelled time of a step. Every figure is modelled; see the module docstring.

    Attributes:
        compute_seconds: of the operations of the step's products, at the chips' peak.
        hbm_seconds: of `hbm_bytes` at the bandwidth of the memory.
        ici_seconds: of the collectives inside a slice, by mesh axes ("tp", "dp, tp", "dp:(2)4",
            "mixed" for groups that follow no axes).
        dcn_seconds: of what goes between slices.
        binding: the longest: "compute", "HBM", "ICI" (all axes together) or "DCN".
        step_seconds: the longest: everything overlaps.
        step_seconds_no_overlap: the sum: nothing does.
        mfu: the share of the peak that these operations get in `step_seconds`. What is computed
            again counts: without rematerialization it is the model FLOPs utilisation.
        mfu_no_overlap: the same in `step_seconds_no_overlap`.
        hbm_bytes: what each device reads and writes at least.
        assumptions: what was taken for this machine and this program, in words.

    Example:
        >>> found = Roofline(0.5, 0.2, {"tp": 0.3, "dp": 0.3}, 0.1, "ICI", 0.6, 1.4, 0.83, 0.36)
        >>> round(found.total_ici_seconds, 3)
        0.6
    """

    compute_seconds: float
    hbm_seconds: float
    ici_seconds: Mapping[str, float]
    dcn_seconds: float
    binding: str
    step_seconds: float
    step_seconds_no_overlap: float
    mfu: float | None
    mfu_no_overlap: float | None
    hbm_bytes: int = 0
    assumptions: tuple[str, ...] = field(default=())

    @property
    def total_ici_seconds(self) -> float:
        """Modelled seconds of all mesh axes together."""
        return sum(self.ici_seconds.values())


def roofline(evidence: Evidence, collectives: Iterable[Collective]) -> Roofline | None:
    """Models the time of a step.

    Args:
        evidence: what the compiled step left behind.
        collectives: its collectives, as `collectives(...)` lists them.

    Returns:
        The modelled times; None where the machine, its figures or the operations are not known:
        `why_no_roofline` says which.
    """
    figures = _known(evidence)
    if isinstance(figures, str):
        return None
    chip, times = figures.chip, figures.times
    for collective in collectives:
        times.add(collective)
    compute = figures.flops / evidence.mesh.root.size() / figures.peak
    size = hbm_bytes(evidence)
    hbm = size / figures.hbm_rate
    ici = sum(times.ici.values())
    parts = {"compute": compute, "HBM": hbm, "ICI": ici, "DCN": times.dcn}
    longest, total = max(parts.values()), sum(parts.values())
    return Roofline(
        compute_seconds=compute,
        hbm_seconds=hbm,
        ici_seconds=dict(sorted(times.ici.items(), key=lambda pair: (-pair[1], pair[0]))),
        dcn_seconds=times.dcn,
        binding=max(parts, key=lambda name: parts[name]),
        step_seconds=longest,
        step_seconds_no_overlap=total,
        mfu=compute / longest if longest else None,
        mfu_no_overlap=compute / total if total else None,
        hbm_bytes=size,
        assumptions=(*_assumptions(evidence, chip), *times.doubts),
    )


def why_no_roofline(evidence: Evidence) -> str | None:
    """Says what is missing for a model of the step's time.

    Args:
        evidence: what the compiled step left behind.

    Returns:
        The reason, a part of a sentence; None where nothing is missing.

    Example:
        >>> from mesh_utils import Mesh
        >>> why_no_roofline(Evidence("a step", "HloModule m", Mesh.arange((8,))))
        'the machine is not known, so neither are its speeds'
    """
    reason = _known(evidence)
    return reason if isinstance(reason, str) else None


class _Known(NamedTuple):
    """What a model is made of; rates are those of one device."""

    chip: Chip
    flops: float
    peak: float
    hbm_rate: float
    times: CollectiveTimes


def _known(evidence: Evidence) -> _Known | str:
    topology = evidence.topology
    if topology is None or topology.chip is None:
        return "the machine is not known, so neither are its speeds"
    if evidence.flops is None:
        return "the floating-point operations of the step were not counted"
    chip, cores, dtype = topology.chip, topology.devices_per_chip, evidence.compute_dtype
    peak, hbm_rate = chip.peak(_peak_name(dtype)), chip.hbm_bytes_per_second
    if not peak:
        return f"no source gives the peak of {chip.title} for products of {dtype}"
    if not hbm_rate:
        return f"no source gives the HBM bandwidth of {chip.title}"
    try:
        times = CollectiveTimes(evidence)
    except MeshError as error:
        return f"its links cannot be modelled: {str(error).split('. ')[1]}"
    except HloError:
        return "the program cannot be read"
    return _Known(chip, evidence.flops, peak / cores, hbm_rate / cores, times)


def hbm_bytes(evidence: Evidence) -> int:
    """Counts what each device moves to and from its memory at least.

    Args:
        evidence: what the compiled step left behind.

    Returns:
        Bytes: inputs once, results once, the compiler's temporaries twice.

    Example:
        >>> from mesh_utils import Mesh
        >>> from xla_dtensor.report.report import Held
        >>> weight = Held("w", "parameter", (8, 4), "f32", (4, 4), input=0, output=0)
        >>> hbm_bytes(Evidence("a step", "HloModule m", Mesh.arange((2,)), held=(weight,)))
        128
    """
    size = sum(
        tensor.device_bytes * ((tensor.input is not None) + (tensor.output is not None))
        for tensor in evidence.held
    )
    memory = evidence.memory
    if memory is None:
        return size
    return (size or memory.arguments + memory.results) + 2 * memory.temporaries


def _assumptions(evidence: Evidence, chip: Chip) -> tuple[str, ...]:
    topology = evidence.topology
    sentences = () if topology is None else topology.assumptions
    dtype = evidence.compute_dtype
    if _peak_name(dtype) == "bf16" and dtype != "bf16":
        sentences = (*sentences, f"products of {dtype} run at the peak of bf16 on {chip.title}")
    if evidence.memory is None:
        sentences = (
            *sentences,
            "the compiler did not say what its temporaries take: HBM without them",
        )
    return sentences


def _peak_name(dtype: str) -> str:
    return "fp8" if dtype.startswith("f8") else _PEAKS.get(dtype, dtype)
