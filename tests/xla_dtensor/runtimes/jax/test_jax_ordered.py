"""Programs outside of a step have their products' tiles where they belong."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytestmark = [pytest.mark.usefixtures("runtime"), pytest.mark.only_on("jax")]


def placed(value: Any, *dims: Any) -> Any:
    import jax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(np.array(jax.devices()).reshape(2, 2, 2), ("a", "b", "c"))
    return jax.device_put(value, NamedSharding(mesh, PartitionSpec(*dims)))


def test_a_product_that_xla_gets_wrong_is_right() -> None:
    """`x.T @ y` whose result is told to lie as the right factor; see `test_jax_product_order`."""
    import jax

    from xla_dtensor.runtimes.jax.arrays.products import OrderedProgram

    random = np.random.default_rng(0)
    left, right = (random.standard_normal((16, 16)).astype(np.float32) for _ in range(2))
    x, y = placed(left, "b", "c"), placed(right, "b", ("a", "c"))

    lies = y.sharding

    def function(given: Any) -> Any:
        x, y = given
        return jax.lax.with_sharding_constraint(x.T @ y, lies)

    calls = 0

    def counted(given: Any) -> Any:
        nonlocal calls
        calls += 1
        return function(given)

    program = OrderedProgram(counted)
    assert np.abs(np.asarray(jax.jit(function)((x, y))) - left.T @ right).max() > 1
    for _ in range(2):
        np.testing.assert_allclose(program((x, y)), left.T @ right, rtol=1e-4, atol=1e-4)
    assert calls == 1


def test_each_sharding_is_a_program_of_its_own() -> None:
    from xla_dtensor.runtimes.jax.arrays.products import OrderedProgram

    program = OrderedProgram(lambda x: x * 2)
    value = np.ones((8, 8), np.float32)
    for dims in (("a",), (None, "b"), ("a",)):
        found = program(placed(value, *dims))
        assert found.sharding.is_equivalent_to(placed(value, *dims).sharding, 2)
    assert len(program._programs) == 2
    assert program(np.ones(3, np.int32)).dtype == np.int32
