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

from mesh_utils import Chip, MeshError
from xla_dtensor.report.collective import Collective
from xla_dtensor.report.collective_seconds import CollectiveTimes
from xla_dtensor.report.errors import HloError
from xla_dtensor.report.evidence import Evidence

__all__ = ["Roofline", "roofline", "why_no_roofline"]

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
    if why_no_roofline(evidence) is not None:
        return None
    topology, flops = evidence.topology, evidence.flops
    assert topology is not None
    assert topology.chip is not None
    assert flops is not None
    chip = topology.chip
    peak = chip.peak(_peak_name(evidence.compute_dtype))
    hbm_rate = chip.hbm_bytes_per_second
    assert peak is not None
    assert hbm_rate is not None
    cores = topology.devices_per_chip
    times = CollectiveTimes(evidence)
    for each in collectives:
        times.add(each)
    compute = flops / evidence.mesh.root.size() / (peak / cores)
    moved = hbm_bytes(evidence)
    hbm = moved / (hbm_rate / cores)
    ici = sum(times.ici.values())
    parts = {"compute": compute, "HBM": hbm, "ICI": ici, "DCN": times.dcn}
    longest, total = max(parts.values()), sum(parts.values())
    return Roofline(
        compute_seconds=compute,
        hbm_seconds=hbm,
        ici_seconds=dict(sorted(times.ici.items(), key=lambda item: (-item[1], item[0]))),
        dcn_seconds=times.dcn,
        binding=max(parts, key=lambda name: parts[name]),
        step_seconds=longest,
        step_seconds_no_overlap=total,
        mfu=compute / longest if longest else None,
        mfu_no_overlap=compute / total if total else None,
        hbm_bytes=moved,
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
    topology = evidence.topology
    if topology is None or topology.chip is None:
        return "the machine is not known, so neither are its speeds"
    if evidence.flops is None:
        return "the floating-point operations of the step were not counted"
    dtype, title = evidence.compute_dtype, topology.chip.title
    if not topology.chip.peak(_peak_name(dtype)):
        return f"no source gives the peak of {title} for products of {dtype}"
    if not topology.chip.hbm_bytes_per_second:
        return f"no source gives the HBM bandwidth of {title}"
    try:
        CollectiveTimes(evidence)
    except MeshError as error:
        return f"its links cannot be modelled: {str(error).split('. ')[1]}"
    except HloError:
        return "the program cannot be read"
    return None


def hbm_bytes(evidence: Evidence) -> int:
    """Counts what each device moves to and from its memory at least.

    Args:
        evidence: what the compiled step left behind.

    Returns:
        Bytes: inputs once, results once, the compiler's temporaries twice.

    Example:
        >>> from mesh_utils import Mesh
        >>> from xla_dtensor.report.evidence import Held
        >>> weight = Held("w", "parameter", (8, 4), "f32", (4, 4), input=0, output=0)
        >>> hbm_bytes(Evidence("a step", "HloModule m", Mesh.arange((2,)), held=(weight,)))
        128
    """
    held = sum(
        each.device_bytes * ((each.input is not None) + (each.output is not None))
        for each in evidence.held
    )
    memory = evidence.memory
    if memory is None:
        return held
    return (held or memory.arguments + memory.results) + 2 * memory.temporaries


def _assumptions(evidence: Evidence, chip: Chip) -> tuple[str, ...]:
    topology = evidence.topology
    told = () if topology is None else topology.assumptions
    dtype = evidence.compute_dtype
    if _peak_name(dtype) == "bf16" and dtype != "bf16":
        told = (*told, f"products of {dtype} run at the peak of bf16 on {chip.title}")
    if evidence.memory is None:
        told = (*told, "the compiler did not say what its temporaries take: HBM without them")
    return told


def _peak_name(dtype: str) -> str:
    return "fp8" if dtype.startswith("f8") else _PEAKS.get(dtype, dtype)
