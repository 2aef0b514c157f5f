"""Sweeps: tests of which each run takes its share, and the slow tests the rest.

An op has hundreds of cases, a layout too, and they are tested on two runtimes and two versions of
torch. Each of these runs takes other cases of a sweep, always the same ones::

    @pytest.mark.sweep(3)
    @pytest.mark.parametrize("op", OPS)     of 300 cases 100 with JAX on torch 2.9, 100 of the 300
    def test_values(op): ...                with torch_xla, 100 of the 300 on torch 2.15; what a run
                                            leaves out is `slow` there

Invariant: a case is in a run's share or is `slow` in it, so that `make test` and `make test-slow`
together run all cases everywhere.
"""

from __future__ import annotations

import hashlib
from importlib.metadata import version

import pytest

__all__ = ["is_of_the_share", "leave_out"]


def is_of_the_share(name: str, parts: int, run: str) -> bool:
    """Tell whether one of `parts` equal shares, which a run takes, has a case.

    Args:
        name: The case's name, with the test's.
        parts: How many shares there are.
        run: Names the run: its runtime and version of torch.

    Example:
        >>> cases = [f"test_values[{op}]" for op in range(3000)]
        >>> 900 < sum(is_of_the_share(case, 3, "jax 2.9") for case in cases) < 1100
        True
    """
    digest = hashlib.sha256(f"{run} {name}".encode()).digest()
    return int.from_bytes(digest[:8]) % parts == 0


def leave_out(items: list[pytest.Item], runtime: str) -> None:
    """Mark as `slow` the cases of sweeps that are not of this run's share."""
    run = f"{runtime} {'.'.join(version('torch').split('.')[:2])}"
    for item in items:
        sweep = item.get_closest_marker("sweep")
        if sweep is not None and not is_of_the_share(item.nodeid, sweep.args[0], run):
            item.add_marker(pytest.mark.slow)
