"""Findings about what lies in memory: does it fit, what is held whole, what XLA chose otherwise.

Whether a tensor should be sharded is judged by the plan itself: next to the others of its kind. A
plan that keeps all parameters whole (plain data parallelism) is as right as one that shards all of
them, as long as it fits; one that shards all but the vocabulary matrix has forgotten one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from mesh_utils import Mesh
from xla_dtensor.report.collective_lines import starred
from xla_dtensor.report.evidence import Evidence, Held
from xla_dtensor.report.finding import Finding
from xla_dtensor.report.held_shards import free_axes, is_vocabulary, shards
from xla_dtensor.report.quantities import bytes_text

if TYPE_CHECKING:
    from xla_dtensor.report.memory import MemoryReport

__all__ = ["state_findings"]

CAUSES = 3
"""The largest causes of a program that does not fit: more would bury the one to change."""

FEWER_SHARDS = 4
"""A tensor with so many times fewer shards than most of the plan's bytes have is left unsharded. A
factor of 2 can be a dim that an axis does not divide, or a second axis that only some use."""

SMALL_SHARE = 0.005
"""Of the usable HBM. What takes less, with its gradient and optimizer state, is not worth a
change: norms and biases are held whole in right plans."""

SMALL_BYTES = 16 * 2**20
"""The same where the size of the HBM is not known."""

LARGE_STATE = 0.25
"""Of the usable HBM. Where everything is held whole, from here on sharding it pays."""

MOST = 5
"""Findings of one kind; those of more tensors are summed up in the last."""

_STATE = ("parameter", "frozen parameter", "gradient", "optimizer state")


def state_findings(evidence: Evidence, memory: MemoryReport | None) -> Iterator[Finding]:
    """Finds what is the matter with what lies in memory.

    Args:
        evidence: what the compiled step left behind.
        memory: its memory report; None if there is none.

    Yields:
        The findings.
    """
    if memory is not None and memory.fits is False:
        yield _does_not_fit(memory, evidence)
    capacity = None if memory is None else memory.capacity_bytes
    yield from _unsharded(evidence, capacity)
    yield from _differing(evidence.held)
    ones = [str(axis) for axis in evidence.mesh.axis_names if evidence.mesh.size(axis) == 1]
    if ones and evidence.mesh.size() > 1:
        names, verb = ", ".join(ones), "has" if len(ones) == 1 else "have"
        yield Finding(
            "note",
            "axis-of-size-1",
            f"Mesh axis {names} {verb} size 1",
            "Nothing is sharded over it, and placements that name it do nothing.",
            "Give it a size, or leave it out of the mesh.",
        )


# ------------------------------------------------------------------------- does it fit


def _does_not_fit(memory: MemoryReport, evidence: Evidence) -> Finding:
    causes = memory.causes[:CAUSES]
    told = " ".join(f"({place}) {cause.text}" for place, cause in enumerate(causes, 1))
    needed, there = memory.total_bytes, memory.capacity_bytes or 0
    return Finding(
        "error",
        "does-not-fit",
        f"The step does not fit: {bytes_text(needed - there)} too much on each device",
        f"It needs {bytes_text(needed)} of {bytes_text(there)}. The largest causes: {told}",
        _room(causes[0].kind if causes else "", evidence),
    )


def _room(cause: str, evidence: Evidence) -> str:
    if cause == "temporaries":
        return (
            "Keep less for the backward: scan_layers(remat='full') or torch's checkpoint; or give "
            "each device a smaller batch, or shard the sequence over an axis."
        )
    if cause == "program":
        return "Run equal layers as a loop: scan_layers."
    state = [one for one in evidence.held if one.role in _STATE]
    if _typical_shards(state) < evidence.mesh.size():
        return (
            "Shard the state over more devices (fully_shard over every axis), or take more chips."
        )
    return "Take more chips, optimizer state of fewer bytes, or gradients in bfloat16."


# ------------------------------------------------------------------------- held whole


@dataclass(frozen=True)
class _Group:
    """A parameter with its gradient and its optimizer state: they are sharded alike."""

    held: tuple[Held, ...]

    @property
    def first(self) -> Held:
        return self.held[0]

    @property
    def device_bytes(self) -> int:
        return sum(one.device_bytes for one in self.held)

    @property
    def least_sharded(self) -> Held:
        return min(self.held, key=lambda one: (shards(one), -one.device_bytes))


def _unsharded(evidence: Evidence, capacity: int | None) -> Iterator[Finding]:
    state = [one for one in evidence.held if one.role in _STATE and one.device_bytes]
    whole = _optimizer_finding(state, evidence.mesh, capacity)
    if whole is not None:
        yield whole
        state = [one for one in state if one.role != "optimizer state"]
    groups: dict[str, list[Held]] = {}
    for one in state:
        groups.setdefault(one.name.split(" ")[0], []).append(one)
    typical = _typical_shards(state)
    least = SMALL_BYTES if capacity is None else SMALL_SHARE * capacity
    if typical == 1:
        yield from _all_whole(evidence, state, capacity)
        return
    found: dict[str, list[_Group]] = {}
    for name, held in groups.items():
        group = _Group(tuple(held))
        worst = group.least_sharded
        axes = free_axes(worst, evidence.mesh)
        few = shards(worst) * FEWER_SHARDS <= typical
        if few and axes and group.device_bytes >= least:
            found.setdefault(starred(name), []).append(group)
    ranked = sorted(found.items(), key=lambda item: -sum(one.device_bytes for one in item[1]))
    for name, alike in islice(ranked, MOST):
        yield _unsharded_finding(name, alike, typical, evidence.mesh)


def _optimizer_finding(state: list[Held], mesh: Mesh, capacity: int | None) -> Finding | None:
    """Moments that lie otherwise than their parameters, most of them: made before sharding."""
    moments = [one for one in state if one.role == "optimizer state"]
    parameters = {one.name: one for one in state if one.role == "parameter"}
    owned = [(one, parameters.get(one.name.split(" ")[0])) for one in moments]
    less = [
        one
        for one, owner in owned
        if owner is not None
        and one.shape == owner.shape
        and shards(one) * FEWER_SHARDS <= shards(owner)
    ]
    size = sum(one.device_bytes for one in less)
    least = SMALL_BYTES if capacity is None else SMALL_SHARE * capacity
    # Of a few tensors the finding about each says more.
    if size < max(least, sum(one.device_bytes for one in moments) / 2) or mesh.size() == 1:
        return None
    typical = _typical_shards(parameters.values())
    should = sum(one.global_bytes for one in less) // typical
    number = sum(one.layers for one in less)
    return Finding(
        "warning",
        "optimizer-state-unsharded",
        "The optimizer's state is sharded less than the parameters",
        f"{number} arrays take {bytes_text(size)} on each device; sharded as their parameters, "
        f"in {typical}, they would take {bytes_text(should)}.",
        "Make the optimizer of the sharded parameters: after shard_module, fully_shard or loading, "
        "not before.",
    )


def _unsharded_finding(name: str, alike: list[_Group], typical: int, mesh: Mesh) -> Finding:
    worst = alike[0].least_sharded
    size = sum(group.device_bytes for group in alike)
    axes = ", ".join(free_axes(worst, mesh))
    number = sum(group.first.layers for group in alike)
    count = "" if number == 1 else f"{number} of them; "
    vocabulary = is_vocabulary(alike[0].first)
    parts = shards(worst)
    saved = size - size * parts / typical
    return Finding(
        "warning",
        "vocabulary-unsharded" if vocabulary else "tensor-unsharded",
        f"The {'vocabulary matrix' if vocabulary else worst.role} {name} is "
        + ("whole on every device" if parts == 1 else f"in {parts} shards only"),
        f"{count}{bytes_text(size)} on each device with gradients and optimizer state, where most "
        f"of the state has {typical} shards; as many would save {bytes_text(saved)}.",
        f"Shard a dim of it over {axes}: shape {tuple(worst.shape)} can be divided."
        + (" With loss_parallel its logits stay sharded too." if vocabulary else ""),
    )


def _all_whole(evidence: Evidence, state: list[Held], capacity: int | None) -> Iterator[Finding]:
    """Plain data parallelism is right until its state fills the memory."""
    size = sum(one.device_bytes for one in state)
    if capacity is None or evidence.mesh.size() == 1 or size < LARGE_STATE * capacity:
        return
    largest = max(state, key=lambda one: one.device_bytes)
    yield Finding(
        "warning",
        "state-unsharded",
        "Parameters, gradients and optimizer state are whole on every device",
        f"They take {bytes_text(size)} of {bytes_text(capacity)}; the largest is {largest.name} "
        f"with {bytes_text(largest.device_bytes)}.",
        "Shard them: fully_shard, or a plan that shards each parameter over the data axis.",
    )


def _typical_shards(state: Iterable[Held]) -> int:
    """The number of shards that half of the bytes have at least."""
    ranked = sorted(((shards(one), one.global_bytes) for one in state), reverse=True)
    half, seen = sum(size for _, size in ranked) / 2, 0
    for parts, size in ranked:
        seen += size
        if seen >= half:
            return parts
    return 1


# ------------------------------------------------------------------------- asked and chosen


def _differing(held: Iterable[Held]) -> Iterator[Finding]:
    found: dict[tuple[str, str, str], list[Held]] = {}
    for one in held:
        asked, chosen = _words(one.requested), _words(one.chosen)
        if asked and chosen and asked != chosen:
            found.setdefault((starred(one.name), asked, chosen), []).append(one)
    ranked = sorted(found.items(), key=lambda item: -sum(one.device_bytes for one in item[1]))
    for (name, asked, chosen), alike in ranked[:MOST]:
        size = sum(one.device_bytes for one in alike)
        number = sum(one.layers for one in alike)
        more = f" ({number} of them)" if number > 1 else ""
        rest = len(ranked) - MOST
        last = f" {rest} more differ." if rest > 0 and name == ranked[MOST - 1][0][0] else ""
        yield Finding(
            "warning",
            "sharding-differs",
            f"{name} is laid out otherwise than asked{more}",
            f"Asked for: {asked}. XLA chose: {chosen}, {bytes_text(size)} on each device.{last}",
            "Ask for what XLA chose, or pin it in the step with redistribute.",
        )


def _words(text: str | None) -> str:
    return " ".join((text or "").split())
