"""Meshes, slices and batches found by compiling: what is asked of the compiler, and the answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from mesh_utils import JobConfig
from xla_dtensor.errors import CompileError
from xla_dtensor.plan.search import (
    Budget,
    Trial,
    compiled_batch,
    compiled_smallest,
    compiled_sweep,
    short,
)
from xla_dtensor.plan.sweep import QuickCase
from xla_dtensor.report.report import CompilerMemory, Evidence

GIB = 1 << 30


@dataclass
class Compiler:
    """In libtpu's place: gives evidence by a rule, and takes its time.

    Args:
        bytes_of: What a job takes on each device, with so many sequences per part of the batch.
        seconds: How long each program takes.
        flops_of: Of a step, all devices together.
    """

    bytes_of: Callable[[JobConfig, int], int]
    seconds: float = 1.0
    flops_of: Callable[[JobConfig], float] = lambda job: 1e15
    clock: float = 0.0
    asked: list[tuple[str, int]] = field(default_factory=list[tuple[str, int]])
    limits: list[float] = field(default_factory=list[float])

    def __call__(self, job: JobConfig, per_group: int, seconds: float) -> Evidence:
        self.clock += self.seconds
        self.asked.append((" ".join(map(str, job.axes)), per_group))
        self.limits.append(seconds)
        size = self.bytes_of(job, per_group)
        if size < 0:
            raise CompileError("It ended with signal 6. Mend what it says last:\nF0 hlo.cc] check")
        return Evidence(
            "a step",
            f"HloModule m, num_partitions={job.topology().num_devices}",
            job.mesh(),
            job.topology(),
            memory=CompilerMemory(0, 0, 0, size),
            flops=self.flops_of(job),
        )

    def budget(self, seconds: float) -> Budget:
        return Budget(seconds, now=lambda: self.clock)


def case(name: str) -> QuickCase:
    return QuickCase.of(JobConfig.load(name))


def sixteen() -> QuickCase:
    """Llama 3 8B on 16 chips, by the rules of a shipped job with two axes."""
    rules = dict(JobConfig.load("llama3_70b_v5p").sharding or {})
    return QuickCase.of(
        JobConfig.parse(
            {
                "name": "sixteen",
                "accelerator": "v6e:4x4",
                "model": "llama3-8b",
                "axes": {"fsdp": {"ici": -1}, "tp": {"ici": 4}},
                "sharding": rules,
            }
        )
    )


def axes(trial: Trial) -> str:
    return " ".join(map(str, trial.job.axes))


def test_a_sweep_is_ranked_anew_by_what_was_compiled() -> None:
    """tp=2 comes second by the rules; its program does the least."""
    sizes = {1: 3e15, 2: 1e15, 4: 2e15}
    compiler = Compiler(lambda *_: GIB, flops_of=lambda job: sizes[job.axes[1].ici])
    found = compiled_sweep(sixteen(), "fsdp=*,tp=*", compiler, budget=compiler.budget(100))
    assert [asked for asked, _ in compiler.asked] == [
        "fsdp=16 tp=1",
        "fsdp=8 tp=2",
        "fsdp=4 tp=4",
    ]
    assert [per_group for _, per_group in compiler.asked] == [1, 2, 4]  # the same batch for each
    assert [axes(each) for each in found[:3]] == ["fsdp=8 tp=2", "fsdp=4 tp=4", "fsdp=16 tp=1"]
    assert [each.outcome for each in found[:4]] == ["fits"] * 3 + ["not compiled"]
    assert found[0].step_seconds is not None
    assert found[0].step_seconds < (found[1].step_seconds or 0)


def test_what_is_refused_or_too_large_is_a_row_and_the_next_is_tried() -> None:
    sizes = {1: -1, 2: 200 * GIB, 4: GIB, 8: GIB}
    compiler = Compiler(lambda job, _: sizes[job.axes[1].ici])
    found = compiled_sweep(sixteen(), "fsdp=*,tp=*", compiler, budget=compiler.budget(100), best=2)
    outcome = {axes(each): each.outcome for each in found}
    assert outcome["fsdp=16 tp=1"] == "refused"
    assert outcome["fsdp=8 tp=2"] == "does not fit"
    assert outcome["fsdp=4 tp=4"] == outcome["fsdp=2 tp=8"] == "fits"
    refused = next(each for each in found if axes(each) == "fsdp=16 tp=1")
    assert refused.refused == "F0 hlo.cc] check"
    assert len(compiler.asked) == 4


def test_the_budget_ends_a_sweep_and_limits_each_program() -> None:
    compiler = Compiler(lambda *_: GIB, seconds=40)
    found = compiled_sweep(sixteen(), "fsdp=*,tp=*", compiler, budget=compiler.budget(60))
    assert compiler.limits == [60, 20]
    assert sum(each.report is not None for each in found) == 2


def test_slices_are_tried_until_one_fits() -> None:
    def size(job: JobConfig, _: int) -> int:
        return (10 if job.topology().num_devices >= 32 else 20) * GIB

    compiler = Compiler(size)
    one = case("llama3_8b_v5e")
    found = compiled_smallest(one, "v5e", compiler, budget=compiler.budget(100))
    assert [each.job.topology().num_devices for each in found] == [8, 16, 32]
    assert [each.outcome for each in found] == ["does not fit", "does not fit", "fits"]
    late = Compiler(size, seconds=10)
    found = compiled_smallest(one, "v5e", late, budget=late.budget(15))
    assert [each.outcome for each in found] == ["does not fit", "does not fit", "not compiled"]


@pytest.mark.parametrize("most", [1, 2, 3, 5, 6])
def test_the_largest_batch_is_found(most: int) -> None:
    """Memory that grows in a line with the batch, and one that jumps."""
    one = case("llama3_8b_v5e")
    room = one.estimate().capacity_bytes or 0

    def line(_: JobConfig, count: int) -> int:
        return room - GIB // 4 + (count - most) * GIB // 2

    def jump(_: JobConfig, count: int) -> int:
        return 2 * room if count > most else GIB

    for rule in (line, jump):
        compiler = Compiler(rule)
        found = compiled_batch(one, compiler, budget=compiler.budget(100))
        fitting = [each.per_group for each in found if each.outcome == "fits"]
        assert max(fitting) == most
        counts = [count for _, count in compiler.asked]
        assert len(set(counts)) == len(counts) <= 6


def test_no_batch_fits() -> None:
    compiler = Compiler(lambda *_: 100 * GIB)
    found = compiled_batch(case("llama3_8b_v5e"), compiler, budget=compiler.budget(100))
    assert {each.outcome for each in found} == {"does not fit"}
    assert min(each.per_group for each in found) == 1
    assert compiled_batch(case("llama3_405b_v6e_2slices"), compiler, budget=Budget(1)) is not None


def test_refusals_are_cut_to_a_line() -> None:
    assert short("A step was asked for. It took too long, and was ended. Raise the limit.") == (
        "It took too long, and was ended"
    )
    assert len(short("x" * 500)) == 200
