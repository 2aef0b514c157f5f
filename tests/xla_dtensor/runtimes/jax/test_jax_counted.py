"""Loops with a 32-bit counter, beside ``lax.scan``."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xla_dtensor import DeviceMesh
from xla_dtensor.runtimes import Runtime

pytestmark = pytest.mark.only_on("jax")


@settings(deadline=None, max_examples=25)
@given(length=st.integers(0, 6), reverse=st.booleans(), width=st.integers(0, 3))
def test_it_is_a_scan(runtime: Runtime, length: int, reverse: bool, width: int) -> None:
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax import lax

    from xla_dtensor.runtimes.jax.arrays.values import counted_scan

    def body(carry: Any, row: Any) -> Any:
        total, turns = carry
        x, number = row
        return (total * 0.5 + x, turns + 1), {"total": total, "number": number + turns}

    given = jnp.arange(length * width, dtype=jnp.float32).reshape(length, width), jnp.arange(length)
    start = jnp.ones(width, jnp.float32), jnp.int32(0)
    expected = lax.scan(body, start, given, reverse=reverse)
    found = counted_scan(body, start, given, reverse=reverse)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


def test_it_counts_in_32_bits_and_flops_are_counted_as_often(runtime: Runtime) -> None:
    import jax
    import jax.numpy as jnp
    from jax import lax

    from xla_dtensor.runtimes.jax.arrays.values import counted_scan, x64
    from xla_dtensor.runtimes.jax.compile.inspect import flops_of

    def loop(scan: Any, x: Any, weights: Any) -> Any:
        return scan(lambda x, w: (x @ w, None), x, weights)[0]

    x, weights = jnp.ones((4, 4), jnp.float32), jnp.ones((7, 4, 4), jnp.float32)
    with x64():
        for scan, counter in ((counted_scan, "s32"), (lax.scan, "s64")):
            jitted = jax.jit(lambda x, w, scan=scan: loop(scan, x, w))
            assert flops_of(jax.make_jaxpr(jitted)(x, weights)) == 7 * 2 * 4**3
            text = jitted.lower(x, weights).as_text(dialect="hlo")
            assert re.search(r"pred\[\] compare\(.*\), direction=LT", text)
            (loop_type,) = re.findall(r"\(([su]\d+)\[\].*\) while\(", text)
            assert loop_type == counter


def test_rows_of_a_manual_region(mesh: DeviceMesh) -> None:
    import jax
    import jax.numpy as jnp
    from jax.sharding import PartitionSpec

    from xla_dtensor.runtimes.jax.arrays.values import counted_scan

    devices = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))

    def sums(x: Any) -> Any:
        return counted_scan(lambda total, row: (total + row, total + row), x[0] * 0, x)[1]

    x = jnp.arange(24.0).reshape(3, 8)
    shards = PartitionSpec(None, "x")
    mapped = jax.shard_map(sums, mesh=devices, in_specs=shards, out_specs=shards)
    assert mapped(x).tolist() == jnp.cumsum(x, 0).tolist()
