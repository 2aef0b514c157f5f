"""XLA puts some products on the wrong devices; `keep_product_orders` tells those how to lie.

Each program is compiled by JAX alone and compared with numpy. Without the function a part of them
is wrong: when a later XLA is right, `test_xla_is_wrong_without` says so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytestmark = [pytest.mark.usefixtures("runtime"), pytest.mark.only_on("jax")]

Spec = tuple[tuple[str, ...], ...]
# What it is, the shapes of both factors, and how they and the result are cut.
KNOWN = {
    "transposed": ("nm,nk->mk", (16, 16), (16, 16), "b,c", "b,ac", "b,ac"),
    "to_rows": ("nm,nk->mk", (16, 16), (16, 16), "b,c", "b,ac", "b,"),
    "other_sums": ("nm,nk->mk", (16, 16), (16, 16), "a,c", "b,ac", "bc,a"),
    "two_dims": ("bsm,bsn->mn", (16, 16, 8), (16, 16, 8), "b,ac,", "c,a,b", "c,ba"),
    "batch": ("bmk,bkn->bmn", (8, 8, 8), (8, 8, 16), "bc,,a", "bc,a,", "a,,bc"),
    "one_factor_of_more_copies": ("nm,nk->mk", (16, 8), (16, 32), "c,ba", "c,a", ",c"),
    "one_factor_of_more_pieces": ("mn,nk->mk", (16, 32), (32, 16), "ab,c", "c,b", "a,c"),
    "a_finer_result": ("mn,nk->mk", (16, 32), (32, 16), ",c", "a,cb", "ba,"),
    "a_finer_batch": ("bmk,bkn->bmn", (8, 8, 8), (8, 8, 8), "b,,ac", "b,ac,", "bc,,"),
    "a_batch_of_a_sum": ("bmk,bkn->bmn", (8, 8, 8), (8, 8, 8), "b,,ca", "b,ca,", "ba,c,"),
    "other_batches": ("bmk,bkn->bmn", (8, 8, 8), (8, 8, 8), "ab,,c", "cb,a,", "b,,ac"),
    "two_batches": ("abmk,abkn->abmn", (8,) * 4, (8,) * 4, "a,,,bc", "a,,bc,", "ac,,b,"),
    "another_batch": ("abmk,abkn->abmn", (8,) * 4, (8,) * 4, "ba,,,c", ",,c,ab", ",c,,"),
    "too_few": ("bsm,bsn->mn", (8, 16, 8), (8, 16, 16), "a,b,c", "ac,b,", "a,"),
    "too_few_too": ("bsm,bsn->mn", (8, 8, 8), (8, 8, 16), "a,,bc", "a,b,c", ",b"),
    "convolution": ("conv", (8, 16, 8), (8, 16, 1), "c,b,", "c,b,", "b,ac,"),
    "its_gradient": ("wconv", (8, 16, 8), (8, 8, 8), "a,c,", "b,ac,", "bc,,"),
}
KINDS = {
    "nm,nk->mk": ((16, 8), (16, 32)),
    "mn,nk->mk": ((8, 16), (16, 16)),
    "bsm,bsn->mn": ((8, 16, 8), (8, 16, 16)),
    "bsn,mn->bsm": ((8, 8, 16), (16, 16)),
    "bmk,bkn->bmn": ((8, 8, 16), (8, 16, 8)),
    "bmk,bnk->bmn": ((8, 8, 8), (8, 16, 8)),
    "abmk,abkn->abmn": ((8, 8, 8, 8), (8, 8, 8, 8)),
    "absm,absn->amn": ((8, 8, 8, 8), (8, 8, 8, 8)),
    "bk,bkn->bn": ((8, 8), (8, 8, 16)),
    "bsk,bsk->bs": ((8, 8, 8), (8, 8, 8)),
}
MESHES = [(2, 2, 2), (2, 4), (4, 2)]


def function(kind: str) -> Callable[[Any, Any], Any]:
    import jax

    if kind == "conv":
        return lambda x, w: jax.lax.conv_general_dilated(x, w, (1,), "VALID")
    if kind == "wconv":
        order = ("CNW", "IOW", "NCW")
        return lambda x, g: jax.lax.conv_general_dilated(
            x, g, (1,), "VALID", dimension_numbers=order
        )
    import jax.numpy as jnp

    return lambda x, y: jnp.einsum(kind, x, y)


def read(text: str) -> Spec:
    return tuple(tuple(dim) for dim in text.split(","))


def lowered(
    program: Callable[..., Any],
    specs: Sequence[Spec],
    *values: Any,
    sizes: tuple[int, ...] = (2, 2, 2),
) -> Any:
    import jax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(np.array(jax.devices()).reshape(sizes), tuple("abc"[: len(sizes)]))
    cut = [NamedSharding(mesh, PartitionSpec(*[dim or None for dim in spec])) for spec in specs]
    # A function of its own: JAX keeps what it has lowered, and this is changed in place.
    jitted = jax.jit(
        lambda *args: program(*args), in_shardings=tuple(cut[:-1]), out_shardings=cut[-1]
    )
    return jitted.lower(*values)


def run(program: Any, *values: Any) -> Any:
    import jax

    compiled = program.compile()
    given_ = map(jax.device_put, values, compiled.input_shardings[0])
    return np.asarray(compiled(*given_))


def example(kind: str, *shapes: tuple[int, ...]) -> tuple[Any, Any, Any]:
    from xla_dtensor.runtimes.jax.arrays.values import x64

    random = np.random.default_rng(0)
    left, right = (random.standard_normal(shape) for shape in shapes)
    if "conv" not in kind:
        return left, right, np.einsum(kind, left, right)
    import jax

    with x64():
        return left, right, np.asarray(jax.jit(function(kind))(left, right))


@pytest.fixture(autouse=True)
def in_float64(runtime: Any) -> Any:
    from xla_dtensor.runtimes.jax.arrays.values import x64

    with x64():
        yield


@pytest.mark.parametrize("name", KNOWN)
def test_xla_is_wrong_without(name: str) -> None:
    kind, *rest = KNOWN[name]
    left, right, wanted = example(kind, *rest[:2])
    program = lowered(function(kind), [*map(read, rest[2:])], left, right)
    assert np.abs(run(program, left, right) - wanted).max() > 1


@pytest.mark.parametrize("name", KNOWN)
def test_it_is_right_with(name: str) -> None:
    from xla_dtensor.runtimes.jax.arrays.products import keep_product_orders

    kind, *rest = KNOWN[name]
    left, right, wanted = example(kind, *rest[:2])
    program = lowered(function(kind), [*map(read, rest[2:])], left, right)
    assert keep_product_orders(program) == 1
    assert np.abs(run(program, left, right) - wanted).max() < 1e-12


def test_asked_twice_it_has_nothing_left_to_do() -> None:
    from xla_dtensor.runtimes.jax.arrays.products import keep_product_orders

    kind, *rest = KNOWN["transposed"]
    left, right, _ = example(kind, *rest[:2])
    program = lowered(function(kind), [*map(read, rest[2:])], left, right)
    assert keep_product_orders(program) == 1
    text = program.as_text()
    assert "xla_dtensor" not in text
    assert keep_product_orders(program) == 0
    assert program.as_text() == text


def test_other_programs_stay_as_they_are() -> None:
    from xla_dtensor.runtimes.jax.arrays.products import keep_product_orders

    left, right, wanted = example("mn,nk->mk", (16, 16), (16, 16))
    specs = [read("a,b"), read("b,c"), read("a,c")]
    program = lowered(function("mn,nk->mk"), specs, left, right)
    text = program.as_text()
    assert keep_product_orders(program) == 0
    assert program.as_text() == text
    assert np.abs(run(program, left, right) - wanted).max() < 1e-12


def test_products_in_loops_and_in_functions() -> None:
    """The product is in a scan's body, and in a function that is called with two cuts."""
    import jax

    from xla_dtensor.runtimes.jax.arrays.products import keep_product_orders

    left, right, _ = example("nm,nk->mk", (16, 16), (16, 16))
    inner = jax.jit(lambda x, y: x.T @ y)

    def scanned(x: Any, y: Any) -> Any:
        body = lambda carry, _: (x.T @ carry / 16, None)  # noqa: E731
        found, _ = jax.lax.scan(body, y, None, length=3)
        return found

    def called(x: Any, y: Any) -> Any:
        return inner(x, y) + inner(y, x).T + inner(x, y)

    specs = [read("b,c"), read("b,ac"), read("b,ac")]
    for program in (scanned, called):
        made = lowered(program, specs, left, right)
        assert keep_product_orders(made) >= 1, program
        wanted = np.asarray(program(left, right))
        assert np.abs(run(made, left, right) - wanted).max() < 1e-12, program


def test_inside_a_manual_computation_the_other_axes_count() -> None:
    import jax
    from jax.sharding import Mesh, PartitionSpec

    from xla_dtensor.runtimes.jax.arrays.products import keep_product_orders

    mesh = Mesh(np.array(jax.devices()).reshape(2, 2, 2), ("a", "b", "c"))
    left, right, _ = example("bmk,bkn->bmn", (16, 8, 8), (16, 8, 16))

    def program(x: Any, y: Any) -> Any:
        rows = PartitionSpec("a")
        by_a = jax.shard_map(
            lambda s, t: s @ t, mesh=mesh, in_specs=rows, out_specs=rows, axis_names={"a"}
        )
        return by_a(x, y)

    specs = [read("ab,,c"), read("ab,c,"), read("ac,,b")]
    made = lowered(program, specs, left, right)
    assert keep_product_orders(made) == 1
    assert np.abs(run(made, left, right) - left @ right).max() < 1e-12


def test_a_part_of_an_axis_is_read_and_written() -> None:
    """Devices are numbered 4 * x + y; dim 0 is cut by the inner half of y."""
    from jax._src.interpreters.mlir import make_ir_context
    from jaxlib.mlir import ir

    from xla_dtensor.runtimes.jax.arrays.products import cut_of, meshes_of

    text = """module { sdy.mesh @m = <["x"=2, "y"=4]>
    func.func @main(%0: tensor<8x8xf32> {sdy.sharding = #sdy.sharding<@m, [{"y":(2)2}, {"x"}]>},
                    %1: tensor<8x8xf32>) { return } }"""
    with make_ir_context(), ir.Location.unknown():
        module = ir.Module.parse(text)
        meshes = meshes_of(module.operation)
        given_ = module.body.operations[1].regions[0].blocks[0].arguments
        cut = cut_of(given_[0], meshes)
        assert cut is not None
        assert cut.tiles().tolist() == [[[0, 2], [4, 6]], [[1, 3], [5, 7]]]
        assert str(cut.attribute()) == '#sdy.sharding<@m, [{"y":(2)2}, {"x"}]>'
        assert cut.without(cut.dims[0]).tiles().tolist() == [[[0, 1, 2, 3], [4, 5, 6, 7]]]
        assert cut_of(given_[1], meshes) is None


def check(sizes: tuple[int, ...], kind: str, specs: Sequence[Spec]) -> None:
    from xla_dtensor.runtimes.jax.arrays.products import keep_product_orders

    left, right, wanted = example(kind, *KINDS[kind])
    program = lowered(function(kind), specs, left, right, sizes=sizes)
    keep_product_orders(program)
    assert np.abs(run(program, left, right) - wanted).max() < 1e-12


@st.composite
def programs(draw: st.DrawFn) -> tuple[tuple[int, ...], str, list[Spec]]:
    """A mesh, a kind of product, and any cuts of its factors and its result."""
    sizes = draw(st.sampled_from(MESHES))
    kind = draw(st.sampled_from(sorted(KINDS)))
    factors, result = kind.split("->")
    specs = []
    for term in (*factors.split(","), result):
        dims: list[list[str]] = [[] for _ in term]
        for axis in draw(st.permutations("abc"[: len(sizes)])):
            place = draw(st.integers(0, len(term)))
            if place < len(term):
                dims[place].append(axis)
        specs.append(tuple(tuple(dim) for dim in dims))
    return sizes, kind, specs


_LONG = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]


@given(programs())
@settings(max_examples=60, deadline=None, suppress_health_check=_LONG)
def test_any_product_is_right(program: tuple[tuple[int, ...], str, list[Spec]]) -> None:
    check(*program)


@pytest.mark.thorough
@given(programs())
@settings(max_examples=4_000, deadline=None, suppress_health_check=_LONG)
def test_any_of_many_products_is_right(
    program: tuple[tuple[int, ...], str, list[Spec]],
) -> None:
    check(*program)
