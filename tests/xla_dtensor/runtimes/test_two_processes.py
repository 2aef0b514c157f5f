"""Two processes of four devices each are one mesh: nobody may assume that all shards are here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.xla_dtensor.runtimes.process_pair import answers_of

# One worker: the fixture starts processes, once for all.
pytestmark = [
    pytest.mark.only_on("jax"),
    pytest.mark.thorough,
    pytest.mark.xdist_group("pair"),
]

PROGRAM = Path(__file__).with_name("two_processes.py")


@pytest.fixture(scope="module")
def answers() -> list[dict[str, Any]]:
    """What each process printed."""
    return answers_of(PROGRAM)


def expected_training() -> tuple[list[float], torch.Tensor]:
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(8, 6))
    optimizer = torch.optim.AdamW([weight], lr=0.1)
    losses = []
    for i in range(4):
        loss = nn.functional.linear(torch.full((16, 6), 1.0 + i), weight).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, weight.detach()


def test_each_process_reaches_half_of_the_devices(answers: list[dict[str, Any]]) -> None:
    assert [(a["devices"], a["addressable"]) for a in answers] == [(8, 4), (8, 4)]


def test_each_process_holds_its_own_shards_only(answers: list[dict[str, Any]]) -> None:
    assert all(a["shards_right"] for a in answers)
    assert sum(a["shard_rows"] for a in answers) == 10
    assert all(0 < a["shard_rows"] < 10 for a in answers)


def test_all_agree_on_the_sharding_and_the_whole_value(answers: list[dict[str, Any]]) -> None:
    assert {a["sharding"] for a in answers} == {"{devices=[8,1]<=[2,4]T(1,0)}"}
    assert all(a["full_is_right"] for a in answers)
    assert all("shape=(10, 6)" in a["repr"] for a in answers)


def test_a_compiled_step_trains_as_one_process_does(answers: list[dict[str, Any]]) -> None:
    losses, weight = expected_training()
    for answer in answers:
        assert answer["losses"] == pytest.approx(losses, rel=1e-5)
        torch.testing.assert_close(torch.tensor(answer["weight"]), weight, atol=1e-5, rtol=1e-5)


def test_branches_go_one_way_in_all_processes(answers: list[dict[str, Any]]) -> None:
    for answer in answers:
        assert answer["tops"] == pytest.approx([7 / 8, 0.7, 35 / 64, 7 / 8])
        assert answer["count"] == [4.0] * 8


def test_communication_crosses_the_processes(answers: list[dict[str, Any]]) -> None:
    assert all("('dp',)" in a["axes"] for a in answers)


def test_a_mesh_of_which_one_process_reaches_no_device(answers: list[dict[str, Any]]) -> None:
    here, there = answers
    assert (here["near_coordinate"], there["near_coordinate"]) == ([0], None)
    assert here["near_shape"] == there["near_shape"] == [10, 6]
    assert (here["near_shards"], there["near_shards"]) == (4, 0)
    assert here["near_value"] == (torch.arange(60.0).reshape(10, 6) * 2).tolist()
    assert there["near_value"] == []
