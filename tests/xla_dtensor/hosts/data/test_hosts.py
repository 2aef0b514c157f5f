"""Feeding by several processes: the batches of one process, each reading exactly its part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.hosts import Hosts
from tests.xla_dtensor import host_tasks_data as tasks
from xla_dtensor.runtimes import Runtime

pytestmark = pytest.mark.only_on("jax")
Groups = Callable[..., Hosts]
TASKS = "tests.xla_dtensor.host_tasks_data:"
SHAPES = ((2, 4), (4, 2))
DRAWN = settings(
    max_examples=20,
    deadline=None,
    database=None,
    derandomize=True,
    phases=[Phase.generate],  # a failing case may leave processes waiting for each other
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    shape = draw(st.sampled_from([(8,), (2, 4), (4, 2), (2, 2, 2)]))
    return {
        "shape": shape,
        "order": tuple(draw(st.permutations(range(len(shape))))),
        "cut": "".join(draw(st.sampled_from("R01")) for _ in shape),
        "batch_size": draw(st.integers(1, 12)),
        "width": draw(st.integers(1, 9)),
    }


@given(cases(), st.integers(1, 30), st.sampled_from(["drop", "pad"]), st.sampled_from([0, 2]))
@DRAWN
def test_the_batches_are_those_of_one_process(
    runtime: Runtime, hosts: Groups, case: dict[str, Any], length: int, last: str, prefetch: int
) -> None:
    length = max(length % (3 * case["batch_size"]), 1 if last == "pad" else case["batch_size"])
    case = {**case, "length": length, "last": last, "prefetch": prefetch}
    alone = tasks.feed(case)
    assert all(alone["read_exactly"])
    numbers = [y for batch in alone["batches"] for y in batch["y"] if y >= 0]
    kept = length if last == "pad" else length - length % case["batch_size"]
    assert len(set(numbers)) == len(numbers) == kept
    for shape in SHAPES:
        for found in hosts(*shape).run(TASKS + "feed", case=case):
            assert found["batches"] == alone["batches"]
            assert all(found["read_exactly"])


@given(cases())
@DRAWN
def test_own_parts_make_the_whole(runtime: Runtime, hosts: Groups, case: dict[str, Any]) -> None:
    assert tasks.own_parts(case)
    for shape in SHAPES:
        assert all(hosts(*shape).run(TASKS + "own_parts", case=case))


def test_wrong_feeds_are_found(hosts: Groups) -> None:
    for found in hosts(2, 4).run(TASKS + "wrong_feeds"):
        good = "nothing was raised"
        assert found["constant"] == found["right copies"] == good
        assert "passes as its rows 0:4 what process 1 passes as 4:8" in found["same"]
        assert "leaf ['v'] the processes 0 and 1 both hold the block [0:4,0:2]" in found["copies"]
        assert "global shape=[8, 3], process 1 of shape=[8, 4]" in found["shapes"]
        assert "dtype=torch.float32, process 1 of dtype=torch.int32" in found["dtypes"]
        assert "ShardedLoader, batch 1: " in found["loader first 0"]
        assert found["loader first 1"] == found["loader off 0"] == found["loader off 1"] == good
        assert "ShardedLoader, batch 2: " in found["loader always 1"]


def test_a_process_that_does_not_come(hosts: Groups) -> None:
    first, second = hosts(2, 4).run(TASKS + "late_feed")
    assert first.startswith("FeedMismatchError: Process 0 waited 0.5 s for process 1 to say the")
    assert second == "late"


def test_streams_of_different_lengths(hosts: Groups) -> None:
    real, half = [True] * 4, [True, True, False, False]
    for found in hosts(2, 4).run(TASKS + "uneven_streams", last="drop", counts=[2, 3], rows=[2, 1]):
        assert found["raised"] == "nothing was raised"
        assert found["batches"] == [([0, 0, 10, 10], real), ([1, 1, 11, 11], real)]
    for found in hosts(2, 4).run(TASKS + "uneven_streams", last="pad", counts=[3, 2], rows=[2, 1]):
        assert found["batches"] == [
            ([0, 0, 10, 10], real),
            ([1, 1, 11, -1], [True, True, True, False]),
            ([2, 2, -1, -1], half),
        ]
    for found in hosts(2, 4).run(
        TASKS + "uneven_streams", last="error", counts=[2, 2], rows=[2, 1]
    ):
        assert "batch 2 has too few rows in a process; this one has " in found["raised"]
        assert found["batches"] == [([0, 0, 10, 10], real)]


def test_a_loader_that_fails_is_told_to_the_others(hosts: Groups) -> None:
    first, second = hosts(2, 4).run(TASKS + "failing_process")
    assert second == "OSError: the disk is gone"
    assert "The loader of process 1 failed at batch 2 of its loader: OSError: the disk" in first


@pytest.mark.parametrize("first", [None, (2, 4), (4, 2)])
def test_a_job_goes_on_with_another_number_of_processes(
    runtime: Runtime, hosts: Groups, first: tuple[int, int] | None
) -> None:
    def run(group: tuple[int, int] | None, **arguments: Any) -> Any:
        if group is None:
            return tasks.resume(**arguments)
        found = hosts(*group).run(TASKS + "resume", **arguments)
        assert len({str(each) for each in found}) == 1
        return found[0]

    everything = tasks.resume(take=99)["seen"]
    assert [len(batches) for batches in everything.values()] == [5, 5, 9]
    begun = run(first)
    for second in (None, *SHAPES):
        rest = run(second, states=begun["states"], take=99)["seen"]
        for name, batches in everything.items():
            assert begun["seen"][name] + rest[name] == batches


def test_streams_with_a_state_per_process(hosts: Groups) -> None:
    begun = hosts(2, 4).run(TASKS + "resume_streams", state=None, take=3, cut="0")
    assert begun[0]["state"] == begun[1]["state"]
    assert sorted(begun[0]["state"]["inner"]) == ["0:4", "4:8"]
    rest = hosts(2, 4).run(TASKS + "resume_streams", state=begun[0]["state"], take=9, cut="0")
    whole = [[8 * n + row for row in range(8)] for n in range(6)]
    assert [each["seen"] for each in rest] == [whole[3:]] * 2
    for found in hosts(4, 2).run(
        TASKS + "resume_streams", state=begun[0]["state"], take=9, cut="0"
    ):
        assert "processes read the rows ['0:2', '2:4', '4:6', '6:8'] was given" in found["raised"]
        assert "of one with ['0:4', '4:8']" in found["raised"]


@pytest.mark.parametrize("minibatch", [True, False])
def test_a_sharding_spec_with_minibatch(runtime: Runtime, hosts: Groups, minibatch: bool) -> None:
    alone = tasks.sharding_spec(minibatch)
    assert alone == [[[row, row + 1, row + 2] for row in range(8)]] * 2
    assert hosts(2, 4).run(TASKS + "sharding_spec", minibatch=minibatch) == [alone] * 2
