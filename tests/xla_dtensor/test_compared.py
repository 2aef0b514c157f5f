"""What is compared is computed once: in processes whose XLA optimizes, which the tests' does not.

XLA:CPU rounds a * b in one of two copies only where LLVM fuses it into the sum that follows.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import version

import pytest

from tests.hosts import Hosts
from tests.xla_dtensor.host_tasks_compared import OPERANDS, OPS

TASK = "tests.xla_dtensor.host_tasks_compared:wrong_gradients"
KEEPS_BARRIERS = tuple(map(int, version("jax").split(".")[:3])) >= (0, 11, 2)
pytestmark = [
    pytest.mark.only_on("jax"),
    pytest.mark.skipif(not KEEPS_BARRIERS, reason="XLA:CPU drops barriers before it fuses"),
]
KNOWN = [("fma", "less amax"), ("fma", "norm of columns"), ("fma", "scatter_reduce")]


@pytest.fixture(scope="module")
def optimized() -> Iterator[Hosts]:
    """One process of 8 devices, compiled as users' are."""
    hosts = Hosts(1, 8, XLA_FLAGS="")
    yield hosts
    hosts.close()


def test_what_was_wrong_before(optimized: Hosts) -> None:
    assert optimized.run(TASK, cases=KNOWN) == [[]]


@pytest.mark.thorough
@pytest.mark.parametrize("operand", OPERANDS)
def test_gradients(operand: str, optimized: Hosts) -> None:
    assert optimized.run(TASK, cases=[(operand, op) for op in OPS]) == [[]]
