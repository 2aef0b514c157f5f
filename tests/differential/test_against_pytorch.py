"""Random programs: xla_dtensor against PyTorch's own DTensor, by the stored results.

The values and gradients of 8 ranks were made by torch 2.15; the placements also by torch 2.9. See
:mod:`tests.differential.make_oracle`. ``python -m tests.differential.show SEED`` prints a program.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import xla_dtensor as xd
from tests.differential.differences import Difference, differences, labels_for
from tests.differential.examples import EXAMPLES
from tests.differential.explained import EXPLAINED, Explanation, explain
from tests.differential.generating import make_program
from tests.differential.stored import load
from xla_dtensor.runtimes import Runtime

SEEDS = sorted(load()[1])
IN_A_GROUP = 25
GROUPS = [SEEDS[i : i + IN_A_GROUP] for i in range(0, len(SEEDS), IN_A_GROUP)]
# The default suite runs 100 programs; the others are `slow`.
MANY = [
    pytest.param(group, id=f"{group[0]}-{group[-1]}", marks=[pytest.mark.thorough] * (number >= 4))
    for number, group in enumerate(GROUPS)
]
VERSION = ".".join(torch.__version__.split(".")[:2])
SEMANTICS = Path(__file__).parents[2] / "docs" / "semantics.md"


@pytest.fixture(scope="module")
def meshes(runtime: Runtime) -> Iterator[dict[tuple[int, ...], Any]]:
    """The meshes of the programs; XLA optimizes less, as each op is compiled and run once."""
    shapes = ((8,), (2, 4), (2, 2, 2))
    made = {shape: xd.init_device_mesh("xla", shape) for shape in shapes}
    if runtime.name != "jax":
        yield made
        return
    jax: Any = sys.modules["jax"]
    jax.config.update("jax_disable_most_optimizations", True)
    yield made
    jax.config.update("jax_disable_most_optimizations", False)


def found(seed: int, meshes: Any) -> list[Difference]:
    return differences(seed, meshes[make_program(seed).mesh_shape])


@pytest.mark.thorough
@pytest.mark.parametrize("seeds", MANY)
@pytest.mark.filterwarnings("ignore")
def test_programs(seeds: list[int], meshes: Any) -> None:
    unexplained = [d for seed in seeds for d in found(seed, meshes) if explain(d) is None]
    assert not unexplained, "\n".join(map(str, unexplained))


@pytest.mark.thorough
@pytest.mark.parametrize("explanation", EXPLAINED, ids=lambda e: e.name)
@pytest.mark.filterwarnings("ignore")
def test_a_class_still_explains_something(
    explanation: Explanation, meshes: Any, runtime: Runtime
) -> None:
    if f"{runtime.name} {VERSION}" not in explanation.where:
        pytest.skip(f"looked for only on {', '.join(explanation.where)}")
    examples = EXAMPLES[explanation.name]
    shown = {e.name for seed in examples for d in found(seed, meshes) if (e := explain(d))}
    assert explanation.name in shown


def test_every_class_is_documented() -> None:
    text = SEMANTICS.read_text(encoding="utf-8")
    assert [e.name for e in EXPLAINED if f"| {e.name} |" not in text] == []


def test_there_are_enough_programs() -> None:
    assert len(SEEDS) >= 2000
    with_gradients = sum(bool(run.gradients) for run in load()[1].values())
    assert with_gradients >= len(SEEDS) // 2
    assert all(labels_for(seed, "2.9") is not None for seed in SEEDS)
