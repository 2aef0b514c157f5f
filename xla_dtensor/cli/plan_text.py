"""What ``plan --quick`` prints: an estimate, a sweep, a slice or a batch, as text or for JSON.

What ``plan`` prints of meshes, slices or batches that it compiled, as text or for JSON.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from xla_dtensor.cli.subcommand import gigabytes_per_second, json_number, table
from xla_dtensor.core.rules import folded

if TYPE_CHECKING:
    from mesh_utils import JobConfig
    from xla_dtensor.plan.estimate import Batch, QuickEstimate, QuickTensor
    from xla_dtensor.plan.search import Trial
    from xla_dtensor.plan.sweep import QuickCase, SweptMesh

__all__ = [
    "batch_data",
    "batch_text",
    "estimate_data",
    "estimate_text",
    "search_data",
    "search_text",
    "smallest_data",
    "smallest_text",
    "sweep_data",
    "sweep_text",
]


# ------------------------------------------------------------------------ What plan --quick prints

SCHEMA = 1
_SHOWN = 5
_ALSO = (
    "Gathered weights, attention and buffers of collectives come on top: "
    "only compiling tells whether it fits."
)


def size_text(num_bytes: int) -> str:
    """Write a number of bytes.

    Args:
        num_bytes: Bytes; may be negative.

    Returns:
        GiB, MiB, KiB or B with up to three digits behind the point.

    Example:
        >>> size_text(3 << 30), size_text(1536), size_text(12)
        ('3.000 GiB', '1.5 KiB', '12 B')
    """
    for unit, exponent, digits in (("GiB", 30, 3), ("MiB", 20, 1), ("KiB", 10, 1)):
        if abs(num_bytes) >= 1 << exponent:
            return f"{num_bytes / (1 << exponent):,.{digits}f} {unit}"
    return f"{num_bytes} B"


def estimate_text(case: QuickCase, batch: Batch, estimate: QuickEstimate) -> str:
    """Writes an estimate, and of what it is, as lines."""
    lines = [_title(case, estimate), *_batch_lines(case, batch), ""]
    rows: list[tuple[str, ...]] = []
    for part in estimate.parts:
        name = f"{part.role}s" if part.role != "optimizer state" else part.role
        size = size_text(part.device_bytes)
        size += f", {size_text(part.padding_bytes)} of padding in all" if part.padding_bytes else ""
        rows.append((name, f"{part.count:,}", f"{part.device_bytes:,}", size))
    rows.append(("exact part", "", f"{estimate.exact_bytes:,}", size_text(estimate.exact_bytes)))
    bound = estimate.activations
    for part in bound.parts if bound else ():
        rows.append(
            (part.name, f"{part.count:,}", f"{part.device_bytes:,}", size_text(part.device_bytes))
        )
    least = estimate.lower_bound_bytes
    if bound is not None:
        rows.append(("at least, together", "", f"{least:,}", size_text(least)))
    room = estimate.capacity_bytes
    if room is not None:
        rows.append((_room_name(estimate), "", f"{room:,}", size_text(room)))
    lines += table(rows, ("on each device", "tensors", "bytes", ""))
    lines += ["", *_verdict(estimate), "", "largest parameters, on each device"]
    lines += table(_tensor_rows(estimate.tensors))
    lines += _replicated_lines(estimate)
    return "\n".join(lines)


def _title(case: QuickCase, estimate: QuickEstimate) -> str:
    topology, model = case.job.topology(), case.sizes.name if case.sizes else "own model"
    count = sum(tensor.total_bytes for tensor in estimate.tensors)
    axes = " ".join(map(str, case.job.axes))
    return (
        f"{case.job.name}: {model}, {size_text(count)} of parameters, on {topology.name}, "
        f"{topology.num_devices:,} devices, {axes}"
    )


def _batch_lines(case: QuickCase, batch: Batch) -> list[str]:
    kind = f"{case.dtype}, {case.optimizer.name}"
    if case.sizes is None:
        return [f"{kind}; activations are not known without compiling"]
    per_group = batch.sequences // batch.groups
    return [
        f"{kind}; {batch.sequences:,} sequences of {batch.length:,} tokens, {per_group:,} for each "
        f"of {batch.groups:,} parts of the batch"
    ]


def _room_name(estimate: QuickEstimate) -> str:
    is_usable = estimate.chip is not None and estimate.chip.usable_hbm_bytes is not None
    return "usable HBM" if is_usable else "HBM (what is usable is not known)"


def _verdict(estimate: QuickEstimate) -> list[str]:
    if estimate.cannot_fit:
        return ["CANNOT FIT, whatever the batch:", f"  {estimate.proof}"]
    if estimate.capacity_bytes is None or estimate.spare_bytes is None:
        return ["Whether it fits is not known: nothing says how much memory a device has."]
    if estimate.batch_cannot_fit:
        missing = size_text(-estimate.spare_bytes)
        return [
            f"DOES NOT FIT with this batch: at least {missing} too much.",
            "  Cut tokens over more devices, take fewer or shorter sequences, or offload the "
            "inputs of layers.",
        ]
    return [f"Not refused: at most {size_text(estimate.spare_bytes)} are left.", f"  {_ALSO}"]


def _tensor_rows(tensors: Sequence[QuickTensor]) -> list[tuple[str, ...]]:
    """A row for those that take most; equal ones of numbered layers share it."""
    groups: dict[tuple[object, ...], list[QuickTensor]] = {}
    for tensor in tensors:
        key = (folded(tensor.name), tensor.shape, tensor.dtype, tensor.lies)
        groups.setdefault(key, []).append(tensor)
    rows: list[tuple[int, tuple[str, ...]]] = []
    for group in groups.values():
        first, total = group[0], sum(tensor.device_bytes for tensor in group)
        name = first.name if len(group) == 1 else f"{folded(first.name)} x{len(group)}"
        shape = " x ".join(map(str, first.shape))
        rows.append((total, (name, shape, first.lies, size_text(total))))
    return [row for _, row in sorted(rows, key=lambda pair: -pair[0])[:_SHOWN]]


def _replicated_lines(estimate: QuickEstimate) -> list[str]:
    tensors = estimate.replicated
    if not tensors:
        return []
    total = size_text(sum(tensor.device_bytes for tensor in tensors))
    return [
        "",
        f"whole on every device: {len(tensors):,} parameters, {total}",
        *table(_tensor_rows(tensors)),
    ]


def estimate_data(case: QuickCase, batch: Batch, estimate: QuickEstimate) -> dict[str, Any]:
    """Gathers an estimate for JSON; bytes are those of one device."""
    bound = estimate.activations
    return {
        "schema": SCHEMA,
        "job": case.job.name,
        "model": case.sizes.name if case.sizes else None,
        "topology": case.job.topology().name,
        "axes": {axis.name: axis.size for axis in case.job.axes},
        "dtype": case.dtype,
        "optimizer": case.optimizer.name,
        "sequences": batch.sequences if case.sizes else None,
        "sequence_tokens": batch.length if case.sizes else None,
        "parts": [asdict(part) for part in estimate.parts],
        "activations_at_least": [
            {
                "name": part.name,
                "count": part.count,
                "device_bytes": part.device_bytes,
                "why": part.why,
            }
            for part in (bound.parts if bound else ())
        ],
        "exact_bytes": estimate.exact_bytes,
        "lower_bound_bytes": estimate.lower_bound_bytes,
        "capacity_bytes": estimate.capacity_bytes,
        "cannot_fit": estimate.cannot_fit,
        "batch_cannot_fit": estimate.batch_cannot_fit,
        "proof": estimate.proof,
        "largest": [_tensor_data(tensor) for tensor in estimate.largest(_SHOWN)],
        "replicated": [_tensor_data(tensor) for tensor in estimate.replicated],
    }


def _tensor_data(tensor: QuickTensor) -> dict[str, Any]:
    return {
        "name": tensor.name,
        "shape": list(tensor.shape),
        "lies": tensor.lies,
        "device_bytes": tensor.device_bytes,
    }


def sweep_text(case: QuickCase, meshes: Sequence[SweptMesh]) -> str:
    """Writes a sweep as lines; the first mesh moves least in the model."""
    devices = case.job.topology().num_devices
    header = ("mesh", "comm. s/step", "each axis, modelled", "at least", "")
    return "\n".join(
        [
            f"{case.job.name} on {case.job.topology().name}, {devices:,} sequences of "
            f"{case.sequence:,} tokens for every mesh.",
            "Seconds are modelled from the rules and the links, one collective after the other: "
            "they rank meshes.",
            "",
            *table(map(_mesh_row, meshes), header),
        ]
    )


def _mesh_row(mesh: SweptMesh) -> tuple[str, ...]:
    axes = " ".join(map(str, mesh.axes))
    least = "" if mesh.estimate is None else size_text(mesh.estimate.lower_bound_bytes)
    per_axis = ", ".join(
        f"{axis} {seconds:.3g} s at {gigabytes_per_second(mesh.bytes_per_second[axis])}"
        for axis, seconds in mesh.seconds.items()
        if seconds
    )
    total = f"{mesh.total_seconds:.3g}" if mesh.seconds else "-"
    return (axes, total, per_axis, least, mesh.refused or "")


def sweep_data(case: QuickCase, meshes: Sequence[SweptMesh]) -> dict[str, Any]:
    """Gathers a sweep for JSON."""
    return {
        "schema": SCHEMA,
        "job": case.job.name,
        "topology": case.job.topology().name,
        "sequence_tokens": case.sequence,
        "meshes": [
            {
                "axes": {axis.name: axis.size for axis in mesh.axes},
                "modelled_seconds": dict(mesh.seconds),
                "modelled_bytes_per_second": {
                    axis: json_number(rate) for axis, rate in mesh.bytes_per_second.items()
                },
                "exact_bytes": mesh.estimate and mesh.estimate.exact_bytes,
                "lower_bound_bytes": mesh.estimate and mesh.estimate.lower_bound_bytes,
                "refused": mesh.refused,
            }
            for mesh in meshes
        ],
    }


def smallest_text(
    case: QuickCase, chip: str, smallest: tuple[JobConfig, QuickEstimate] | None
) -> str:
    """Writes which slice of a chip is the smallest that is not refused; None for none."""
    if smallest is None:
        return f"No slice of {chip} is large enough for {case.job.name} with these axes."
    job, estimate = smallest
    least, room = estimate.lower_bound_bytes, estimate.capacity_bytes or 0
    axes = " ".join(map(str, job.axes))
    return "\n".join(
        [
            f"{job.topology().name}, {job.topology().num_devices:,} devices, {axes}: at least "
            f"{size_text(least)} of {size_text(room)} per device, one sequence of "
            f"{case.sequence:,} tokens per part of the batch.",
            f"Every smaller slice of {chip} that these axes divide is too small. {_ALSO}",
        ]
    )


def smallest_data(chip: str, smallest: tuple[JobConfig, QuickEstimate] | None) -> dict[str, Any]:
    """Gathers the smallest slice for JSON: its job and what that takes; None for none."""
    if smallest is None:
        return {"schema": SCHEMA, "chip": chip, "topology": None}
    job, estimate = smallest
    return {
        "schema": SCHEMA,
        "chip": chip,
        "topology": job.topology().name,
        "axes": {axis.name: axis.size for axis in job.axes},
        "exact_bytes": estimate.exact_bytes,
        "lower_bound_bytes": estimate.lower_bound_bytes,
        "capacity_bytes": estimate.capacity_bytes,
    }


def batch_text(case: QuickCase, largest: tuple[int, QuickEstimate] | None) -> str:
    """Writes the largest batch that is not refused, and what it takes; None for none."""
    if largest is None:
        if case.sizes is None:
            return "No batch can be named: activations of this model are not known."
        return f"Not even one sequence of {case.sequence:,} tokens per part of the batch fits."
    count, estimate = largest
    batch = case.batch(count)
    least = size_text(estimate.lower_bound_bytes)
    return "\n".join(
        [
            f"At most {count:,} sequences of {case.sequence:,} tokens per part of the batch, "
            f"{batch.sequences:,} in all: at least {least} of "
            f"{size_text(estimate.capacity_bytes or 0)} per device.",
            f"This is a bound from above. {_ALSO}",
        ]
    )


def batch_data(case: QuickCase, largest: tuple[int, QuickEstimate] | None) -> dict[str, Any]:
    """Gathers the largest batch for JSON: sequences per part, and what they take."""
    count = 0 if largest is None else largest[0]
    return {
        "schema": SCHEMA,
        "job": case.job.name,
        "sequence_tokens": case.sequence,
        "sequences_per_group_at_most": count,
        "sequences_at_most": case.batch(count).sequences if count else 0,
        "lower_bound_bytes": None if largest is None else largest[1].lower_bound_bytes,
    }


# --------------------------------------------------------------------------------- Plan search text

_HEADER = (
    "",
    "sequences",
    "comm. by the rules",
    "step, compiled",
    "no overlap",
    "memory",
    "compiled in",
    "",
)


def search_text(
    case: QuickCase, trials: Sequence[Trial], answer: Trial | None, spent: float, budget: float
) -> str:
    """Writes a table of what was tried, the answer, and of how many seconds so many were spent."""
    count = sum(trial.report is not None for trial in trials)
    lines = [
        "",
        f"{count} compiled by libtpu in {spent:.0f} s of {budget:.0f} s. Memory is the compiler's; "
        "seconds of a step are modelled,",
        'from the rules before compiling, from the compiled program after it: "step" if all '
        "overlaps, then if nothing does.",
        "",
        *table((_row(trial, case) for trial in trials), _HEADER),
        "",
        _answer(case, answer, trials),
    ]
    return "\n".join(lines)


def _row(trial: Trial, case: QuickCase) -> tuple[str, ...]:
    report, estimate = trial.report, trial.estimate
    roofline = None if report is None else report.roofline
    if report is not None:
        memory = size_text(report.memory.total_bytes)
    else:
        memory = "" if estimate is None else f"> {size_text(estimate.lower_bound_bytes)}"
    return (
        _name(trial, case),
        f"{_sequences(trial):,}" if estimate is not None else "",
        f"{sum(trial.modelled.values()):.3g} s" if trial.modelled else "-",
        "-" if roofline is None else f"{roofline.step_seconds:.3g} s",
        "-" if roofline is None else f"{roofline.step_seconds_no_overlap:.3g} s",
        memory,
        f"{trial.seconds:.0f} s" if trial.seconds else "-",
        trial.outcome if trial.refused is None else f"{trial.outcome}: {trial.refused}",
    )


def _name(trial: Trial, case: QuickCase) -> str:
    axes = " ".join(map(str, trial.job.axes))
    same = trial.job.accelerator == case.job.accelerator
    return axes if same else f"{trial.job.topology().name} {axes}"


def _sequences(trial: Trial) -> int:
    from xla_dtensor.plan.estimate import batch_of

    return trial.per_group * batch_of(trial.job, sequence=_ANY).groups


_ANY = 1 << 30
"""Tokens: a length that every axis divides."""


def _answer(case: QuickCase, answer: Trial | None, trials: Sequence[Trial]) -> str:
    if answer is None:
        tried = any(trial.report is not None or trial.seconds for trial in trials)
        return "Nothing that was compiled fits." if tried else "Nothing was compiled."
    room = None if answer.report is None else answer.report.memory.spare_bytes
    spare = "" if room is None else f", {size_text(room)} to spare"
    batch = f"{answer.per_group:,} sequences per part of the batch"
    return f"found: {_name(answer, case)}, {batch}{spare}."


def search_data(
    case: QuickCase, trials: Sequence[Trial], answer: Trial | None, spent: float
) -> dict[str, Any]:
    """Gathers what was tried for JSON; bytes are those of one device."""
    return {
        "schema": SCHEMA,
        "job": case.job.name,
        "seconds": spent,
        "found": None if answer is None else trials.index(answer),
        "trials": [_trial_data(trial) for trial in trials],
    }


def _trial_data(trial: Trial) -> dict[str, Any]:
    report, estimate = trial.report, trial.estimate
    roofline = None if report is None else report.roofline
    return {
        "topology": trial.job.topology().name,
        "axes": {axis.name: axis.size for axis in trial.job.axes},
        "sequences_per_group": trial.per_group,
        "outcome": trial.outcome,
        "refused": trial.refused,
        "modelled_seconds": trial.modelled,
        "lower_bound_bytes": estimate and estimate.lower_bound_bytes,
        "compiled": report
        and {
            "total_bytes": report.memory.total_bytes,
            "capacity_bytes": report.memory.capacity_bytes,
            "step_seconds": roofline and roofline.step_seconds,
            "step_seconds_no_overlap": roofline and roofline.step_seconds_no_overlap,
            "binding": roofline and roofline.binding,
            "findings": [finding.code for finding in report.findings],
        },
        "compile_seconds": trial.seconds,
    }
