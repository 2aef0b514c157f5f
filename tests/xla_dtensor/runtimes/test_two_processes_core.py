"""Ops, redistribute, LocalViews and checkpoints where no process reaches all shards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.xla_dtensor.runtimes.process_pair import answers_of

# One worker: the fixture starts processes, once for all.
pytestmark = [
    pytest.mark.only_on("jax"),
    pytest.mark.thorough,
    pytest.mark.xdist_group("pair core"),
]

PROGRAM = Path(__file__).with_name("two_processes_core.py")
CHECKS = (
    "ops",
    "redistribute",
    "local_views",
    "reading_local_views",
    "each_process_gives_its_shards",
    "random_numbers",
    "fully_sharded_training",
    "checkpoint",
)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each process says of each check."""
    return answers_of(PROGRAM, str(tmp_path_factory.mktemp("pair")))


@pytest.mark.parametrize("name", CHECKS)
def test_in_both_processes(outcomes: list[dict[str, Any]], name: str) -> None:
    for outcome in outcomes:
        assert outcome[name] is None, outcome[name]


def test_no_check_is_left_out(outcomes: list[dict[str, Any]]) -> None:
    assert all(set(outcome) == set(CHECKS) for outcome in outcomes)
