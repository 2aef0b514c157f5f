"""Processes of a job, each with its own devices."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.hosts import Hosts
from tests.xla_dtensor.host_tasks_audit import ROWS
from tests.xla_dtensor.nn.scanned_blocks import batch, model, trainer

HOSTS = Path(__file__).parents[3] / "docs" / "hosts.md"
TASKS = "tests.xla_dtensor.host_tasks"


def test_two_processes_make_one_mesh(hosts: Callable[..., Hosts]) -> None:
    found = hosts(2, 4).run(f"{TASKS}:matmul", mesh_shape=(2, 4))
    assert all(each["right"] for each in found)
    assert [len(each["shards"]) for each in found] == [4, 4]
    assert not {*found[0]["shards"]} & {*found[1]["shards"]}


def test_ranks_are_below_the_world_size_as_pytorchs_are(hosts: Callable[..., Hosts]) -> None:
    first, second = hosts(2, 4).run(f"{TASKS}:places", mesh_shape=(2, 4))
    for each in (first, second):
        assert each["ranks"] == [[0, 1, 2, 3], [4, 5, 6, 7]]
        assert each["found"] == [each["coordinate"]]
        assert each["local"] == each["coordinate"]
        assert each["stock"]
    assert (first["rank"], second["rank"]) == (0, 4)
    assert (first["coordinate"], second["coordinate"]) == ([0, 0], [1, 0])
    # A CPU device's id says its process, and is no rank.
    assert max(second["device_ids"]) >= 8


def test_a_submesh_is_the_group_that_a_process_is_in(hosts: Callable[..., Hosts]) -> None:
    first, second = hosts(2, 4).run(f"{TASKS}:places", mesh_shape=(2, 4))
    assert first["submeshes"] == {"dp": [0, 4], "tp": [0, 1, 2, 3]}
    assert second["submeshes"] == {"dp": [0, 4], "tp": [4, 5, 6, 7]}
    assert first["in_submeshes"] == {"dp": 0, "tp": 0}
    assert second["in_submeshes"] == {"dp": 1, "tp": 0}
    assert (first["offsets"], second["offsets"]) == ((0, 0), (4, 0))
    assert first["part_of_submesh"] == second["part_of_submesh"] == ((2,), (0,))


def test_a_tensor_on_a_submesh_is_in_every_process(hosts: Callable[..., Hosts]) -> None:
    whole = [float(i) for i in range(8)]
    for found in hosts(2, 4).run(f"{TASKS}:submeshes"):
        assert found == [[4, 56.0, whole], [4, 56.0, whole]]


def test_a_job_is_joined_once(hosts: Callable[..., Hosts]) -> None:
    group = hosts(2, 4)
    same = group.run(f"{TASKS}:join_again")
    assert [text.split(",")[0] for text in same] == ["ProcessInfo(index=0", "ProcessInfo(index=1"]
    assert all("count=2" in text and "found_by='arguments'" in text for text in same)
    for text in group.run(f"{TASKS}:join_again", num_processes=3):
        assert text.startswith("RuntimeSetupError: init_distributed was called again")
        assert "num_processes=3; the first call had coordinator_address='127.0.0.1:" in text


def rows_of_docs() -> dict[str, str]:
    """The table of docs/hosts.md: call -> who has to call it."""
    section = HOSTS.read_text().split("## Processes")[1].split("\n## ")[0]
    cells = re.findall(r"^\| (.+?) \| (alone|together|raises `\w+`) \|", section, re.MULTILINE)
    return {call: kind.replace("`", "") for call, kind in cells}


def test_the_table_of_the_docs_lists_what_is_tested() -> None:
    assert rows_of_docs() == {name: kind for name, (kind, _) in ROWS.items()}


@pytest.mark.parametrize("shape", [(2, 4), pytest.param((4, 2), marks=pytest.mark.thorough)])
def test_each_call_does_what_the_table_says(
    hosts: Callable[..., Hosts], shape: tuple[int, int]
) -> None:
    expected = {name: kind for name, (kind, _) in ROWS.items()}
    for found in hosts(*shape).run(f"{TASKS}_audit:audit", mesh_shape=shape):
        assert found == expected


@pytest.mark.parametrize(
    ("shape", "cases"),
    [
        ((2, 4), 11),
        pytest.param((2, 4), 110, marks=pytest.mark.thorough),
        pytest.param((4, 2), 66, marks=pytest.mark.thorough),
    ],
)
def test_drawn_programs_give_what_torch_gives(
    hosts: Callable[..., Hosts], shape: tuple[int, int], cases: int
) -> None:
    found: list[Any] = hosts(*shape).run(f"{TASKS}_drawn:drawn", cases=cases, timeout_seconds=280)
    assert [wrong for wrong, _ in found] == [[]] * shape[0]
    # Also where some drew on a mesh of which others reach no device.
    assert all(state == found[0][1] for _, state in found)


def test_stacks_of_layers_come_apart_in_one_process_alone(hosts: Callable[..., Hosts]) -> None:
    plain = model()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    step = trainer(plain, optimizer)
    expected = [step(batch(i)).item() for i in range(4)]
    both = hosts(2, 4).run(f"{TASKS}:scanned_steps", reader=1)
    assert [found["read"] for found in both] == [0, 4]
    for found in both:
        assert found["losses"] == pytest.approx(expected, rel=1e-4)
        assert found["rows"] == 4, "the layers' weights were no stack between the steps"
        for name, parameter in plain.named_parameters():
            torch.testing.assert_close(
                torch.tensor(found["parameters"][name]), parameter.detach(), rtol=1e-4, atol=2e-5
            )


@pytest.mark.thorough
@pytest.mark.parametrize(("kind", "count"), [("program", 40), ("training", 6)])
def test_judged_programs_on_two_processes(
    hosts: Callable[..., Hosts], kind: str, count: int
) -> None:
    both: list[Any] = hosts(2, 4).run(
        "tests.xla_dtensor.host_tasks_judged:judged",
        kind=kind,
        first=7000,
        count=count,
        timeout_seconds=280,
    )
    assert both[0] == both[1]
    assert [row for row in both[0] if row[1] not in ("right", "refused", "unjudged")] == []
