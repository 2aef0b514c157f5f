"""call_jax: JAX functions and Pallas kernels on each device's tiles, with gradients."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard

import xla_dtensor as xd
from mesh_utils import Mesh
from xla_dtensor.core import Layout
from xla_dtensor.dtensor.mesh import as_device_mesh
from xla_dtensor.errors import (
    ArgumentTypeError,
    DistributeError,
    ManualRegionError,
    UnsupportedOpError,
)
from xla_dtensor.runtimes import Runtime
from xla_dtensor.spmd.call_jax import call_jax

on_jax = pytest.mark.only_on("jax")
ROOT = Mesh.arange((2, 4), ("dp", "tp"))
MESHES = {
    "one axis": (Mesh.arange((8,), ("a",)), (("a",), None)),
    "two axes": (ROOT, ("dp", "tp")),
    "three axes": (Mesh.arange((2, 2, 2), ("a", "b", "c")), (("c", "a"), "b")),
    "permuted": (ROOT["tp", "dp"], ("tp", "dp")),
    "axis of size 1": (Mesh.arange((4, 1, 2), ("a", "one", "b")), (("a", "one"), "b")),
    "submesh": (ROOT["tp"], (None, "tp")),
}
_COLLECTIVE = re.compile(
    r" (all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)\S*\("
)


@pytest.fixture(params=list(MESHES))
def case(request: pytest.FixtureRequest, runtime: Runtime) -> tuple[xd.DeviceMesh, Any]:
    """A mesh, and the names that cut the two dims of a matrix."""
    runtime.root(ROOT)
    mesh, spec = MESHES[request.param]
    return as_device_mesh(mesh), spec


def _flat(entry: Any) -> tuple[str, ...]:
    return () if entry is None else (entry,) if isinstance(entry, str) else entry


def put(x: torch.Tensor, mesh: xd.DeviceMesh, placements: Any = None, grad: bool = False) -> Any:
    return xd.distribute_tensor(x, mesh, placements).requires_grad_(grad)


def compared(
    ours: Callable[..., Any], plain: Callable[..., Any], mesh: Any, *given: tuple[Any, Any]
) -> tuple[Any, list[Any]]:
    """Check value and gradients of `ours` against `plain`, eagerly and in a compiled step."""

    def gradients(function: Any, tensors: Any) -> tuple[Any, ...]:
        tensors = [t.detach().requires_grad_(t.is_floating_point()) for t in tensors]
        result = function(*tensors)
        (result * torch.arange(1.0, 1 + result.numel()).reshape(result.shape)).sum().backward()
        return (result.detach(), *(t.grad for t in tensors if t.grad is not None))

    expected = gradients(plain, [x for x, _ in given])
    inputs = [put(x, mesh, placements) for x, placements in given]
    eager = gradients(ours, inputs)
    compiled: Any = xd.compile(lambda *tensors: gradients(ours, tensors))
    for found in (eager, compiled(*inputs)):
        assert len(found) == len(expected)
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a.cpu(), b, rtol=1e-5, atol=1e-5)
    return compiled, list(eager)


# ---------------------------------------------------------------------- values and gradients


@on_jax
def test_each_device_computes_on_its_tile(case: tuple[xd.DeviceMesh, Any]) -> None:
    import jax

    mesh, spec = case
    seen: list[tuple[int, ...]] = []

    def numbered(x: Any) -> Any:
        seen.append(x.shape)
        index = sum(
            jax.lax.axis_index(name) * 10**i for i, name in enumerate(mesh.value.axis_names)
        )
        return x * 0 + index

    x = torch.zeros(8, 16)
    y = call_jax(numbered, [spec], spec)(put(x, mesh, spec))
    assert seen[0] == y._local_shape()
    for shard in y.addressable_shards():
        if shard.device_id in mesh.value.device_ids:
            place = mesh.value.coordinates(shard.device_id)
            assert set(shard.data.unique().tolist()) == {
                sum(c * 10**i for i, c in enumerate(place))
            }


@on_jax
def test_a_matmul_with_a_sum_over_the_inner_dim(case: tuple[xd.DeviceMesh, Any]) -> None:
    import jax

    mesh, (rows, columns) = case

    def product(x: Any, w: Any) -> Any:
        return jax.lax.psum(x @ w, _flat(columns)) if columns else x @ w

    ours = call_jax(product, [(rows, columns), (columns, None)], (rows, None))
    x, w = torch.randn(8, 16), torch.randn(16, 3)
    _, (result, grad_x, grad_w) = compared(
        ours, torch.matmul, mesh, (x, (rows, columns)), (w, (columns, None))
    )
    assert result.mesh_layout == Layout.from_partition_spec((rows, None), mesh.value)
    assert grad_x.xla_sharding() == put(x, mesh, (rows, columns)).xla_sharding()
    assert grad_w.xla_sharding() == put(w, mesh, (columns, None)).xla_sharding()


@on_jax
def test_partial_outputs_are_reduced(case: tuple[xd.DeviceMesh, Any]) -> None:
    mesh, entries = case
    cutting = tuple(name for entry in entries for name in _flat(entry))
    placements = [Partial() if n in cutting else Replicate() for n in mesh.value.axis_names]
    ours = call_jax(lambda x: x.sum(1), [(None, cutting)], placements)
    _, (result, _) = compared(ours, lambda x: x.sum(1), mesh, (torch.randn(8, 16), (None, cutting)))
    assert all(p == Replicate() for p in result.placements)


@on_jax
def test_a_mean_of_terms(mesh: xd.DeviceMesh) -> None:
    ours = call_jax(lambda x: x.mean(0), [("dp", None)], [Partial("avg"), Replicate()])
    compared(ours, lambda x: x.mean(0), mesh, (torch.randn(8, 3), ("dp", None)))


@on_jax
def test_copies_share_the_gradient(mesh: xd.DeviceMesh) -> None:
    # The argument is copied along tp, the output along both axes.
    import jax

    def scaled(x: Any, w: Any) -> Any:
        return jax.lax.all_gather(x * w, "dp", tiled=True)

    ours = call_jax(scaled, [("dp", None), None], None)
    compared(ours, lambda x, w: x * w, mesh, (torch.randn(8, 3), None), (torch.randn(3), None))


@on_jax
def test_several_outputs_some_without_a_gradient(mesh: xd.DeviceMesh) -> None:
    import jax.numpy as jnp

    def both(x: Any, index: Any) -> Any:
        return x[index] * 2, jnp.argsort(x, axis=0), x.sum(1)

    entry = ("dp", None)
    ours = call_jax(both, [entry, None], [entry, entry, ("dp",)])
    x = torch.randn(4, 3)
    index = torch.tensor([1, 0])
    dx = put(x, mesh, entry, grad=True)
    doubled, order, total = ours(dx, put(index, mesh))
    rows = torch.cat([x[:2][index], x[2:][index]])
    assert torch.equal(doubled.cpu(), rows * 2)
    assert order.dtype == torch.int64
    assert not order.requires_grad
    assert torch.equal(order.cpu(), torch.cat([x[:2].argsort(0), x[2:].argsort(0)]))
    doubled.sum().backward()  # no gradient comes from `total`
    assert torch.equal(dx.grad.cpu(), torch.full((4, 3), 2.0))
    torch.testing.assert_close(total.detach().cpu(), x.sum(1))


@on_jax
@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.int8, torch.int64, torch.bfloat16, torch.float64], ids=str
)
def test_dtypes_are_torch_s(dtype: torch.dtype, mesh: xd.DeviceMesh) -> None:
    x = (torch.arange(8) * 2**40 if dtype == torch.int64 else torch.arange(8)).to(dtype)
    y = call_jax(lambda x: x[::-1], [("tp",)], ("tp",))(put(x, mesh, ("tp",)))
    assert y.dtype == dtype
    assert torch.equal(y.cpu(), x.reshape(4, 2).flip(1).flatten())


# ---------------------------------------------------------------------- kernels


def _pallas_square() -> Any:
    """x ** 2 as a Pallas kernel, with a wrong gradient on purpose, to see whose rule is used."""
    import jax
    from jax.experimental import pallas as pl

    def kernel(x_ref: Any, o_ref: Any) -> None:
        o_ref[...] = x_ref[...] * x_ref[...]

    def run(x: Any) -> Any:
        with jax.enable_x64(False):
            block = pl.BlockSpec((1, x.shape[1]), lambda i: (i, 0))
            return pl.pallas_call(
                kernel,
                grid=(x.shape[0],),
                in_specs=[block],
                out_specs=block,
                out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
                interpret=True,
            )(x)

    square = jax.custom_vjp(run)
    square.defvjp(lambda x: (run(x), x), lambda x, g: (g * x * 3,))
    return square


@on_jax
def test_a_pallas_kernel(mesh: xd.DeviceMesh) -> None:
    ours = call_jax(_pallas_square(), [("dp", "tp")], ("dp", "tp"))

    class Plain(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            return grad * ctx.saved_tensors[0] * 3

    x = torch.randn(4, 8)
    compiled, (result, grad) = compared(ours, Plain.apply, mesh, (x, ("dp", "tp")))
    assert str(result.xla_sharding()) == str(grad.xla_sharding()) == "{devices=[2,4]<=[8]}"
    # The step's own sums aside, nothing is moved: each device ran the kernel on its own tile.
    assert not _COLLECTIVE.findall(compiled.hlo())


# ---------------------------------------------------------------------- arguments


@on_jax
def test_an_input_that_lies_otherwise_is_moved(mesh: xd.DeviceMesh) -> None:
    tiles: list[Any] = []

    def noted(x: Any) -> Any:
        tiles.append(x.shape)
        return x + 1

    ours = call_jax(noted, [[Shard(0), Replicate()]], [Shard(0), Replicate()])
    x = put(torch.arange(16.0).reshape(4, 4), mesh, [Replicate(), Shard(1)], grad=True)
    y = ours(x)
    y.sum().backward()
    assert tiles[0] == (2, 4)
    assert tuple(y.placements) == (Shard(0), Replicate())
    assert x.grad.placements == x.placements
    compiled: Any = xd.compile(lambda x: ours(x))
    assert torch.equal(compiled(x.detach()).cpu(), y.detach().cpu())
    assert Counter(_COLLECTIVE.findall(compiled.hlo())) == {"all-gather": 1}


@on_jax
def test_plain_and_static_arguments(mesh: xd.DeviceMesh) -> None:
    traced: list[Any] = []

    def function(x: Any, pair: Any, *, power: int, flag: Any = None) -> Any:
        traced.append((power, flag))
        return (x * pair["scale"]) ** power + pair["bias"]

    ours = call_jax(function, [("tp",), None, ("tp",)], ("tp",))
    x, bias = torch.arange(8.0), torch.arange(8.0) * 10
    pair = {"scale": torch.tensor(2.0), "bias": bias}
    first = ours(put(x, mesh, ("tp",)), pair, power=2)
    assert torch.equal(first.cpu(), (x * 2) ** 2 + bias)
    count = len(traced)
    ours(put(x + 1, mesh, ("tp",)), pair, power=2)
    assert len(traced) == count  # the program is kept
    third = ours(put(x, mesh, ("tp",)), pair, power=3, flag="other")
    assert torch.equal(third.cpu(), (x * 2) ** 3 + bias)
    assert traced[-1] == (3, "other")


@on_jax
def test_the_mesh_is_found(mesh: xd.DeviceMesh) -> None:
    one: Any = torch.ones(4)
    for ours in (
        call_jax(lambda x: x + 1, [("tp",)], ("tp",), mesh),
        call_jax(lambda x: x + 1, [("tp",)], ("tp",), device_mesh=mesh.value),
    ):
        assert ours(one).device_mesh == mesh
    with mesh:
        assert call_jax(lambda x: x + 1, [None], None)(one).device_mesh == mesh
    with pytest.raises(DistributeError, match="call_jax was called without a mesh"):
        call_jax(lambda x: x + 1, [None], None)(one)


@on_jax
def test_a_mesh_without_names(runtime: Runtime) -> None:
    import jax

    mesh = xd.init_device_mesh("xla", (2, 4))
    ours = call_jax(lambda x: jax.lax.psum(x.sum(), "1"), [[Replicate(), Shard(0)]], None)
    assert ours(put(torch.arange(8.0), mesh, [Replicate(), Shard(0)])).item() == 28


@on_jax
def test_no_grad_keeps_nothing(mesh: xd.DeviceMesh) -> None:
    ours = call_jax(lambda x: x * x, [None], None)
    x = put(torch.ones(4), mesh, grad=True)
    with torch.no_grad():
        assert not ours(x).requires_grad
    assert ours(x).requires_grad


@on_jax
def test_inside_a_larger_model(mesh: xd.DeviceMesh) -> None:
    import jax

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4))
    x = torch.randn(16, 8)
    loss = model[1](torch.tanh(model[0](x))).sum()
    expected = torch.autograd.grad(loss, tuple(model.parameters()))
    xd.distribute_module(model, mesh)
    tanh = call_jax(jax.numpy.tanh, [("dp", "tp")], ("dp", "tp"))
    dx = put(x, mesh, ("dp", None))

    def step(x: Any) -> Any:
        return torch.autograd.grad(model[1](tanh(model[0](x))).sum(), tuple(model.parameters()))

    compiled: Any = xd.compile(step)
    for found in (step(dx), compiled(dx)):
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a.cpu(), b)


# ---------------------------------------------------------------------- what is refused


def _tuple(x: Any) -> Any:
    return x, x


REFUSED: dict[str, tuple[Any, type[Exception], str]] = {
    "too few entries": (
        lambda x, m: call_jax(_tuple, [None], None)(x, x),
        DistributeError,
        "called through call_jax with 2 tensors. Its in_placements have 1 entries",
    ),
    "no list of entries": (
        lambda x, m: call_jax(_tuple, None, None),  # pyright: ignore
        DistributeError,
        "call_jax was called with in_placements=None. There is one entry per tensor",
    ),
    "one array for several": (
        lambda x, m: call_jax(lambda x: x, [None], [None, None])(x),
        DistributeError,
        "in call_jax returned one array. Its out_placements are a list of 2 entries",
    ),
    "several arrays for one": (
        lambda x, m: call_jax(_tuple, [None], None)(x),
        DistributeError,
        "_tuple in call_jax returned a tuple of 2 arrays. Its out_placements are one entry",
    ),
    "too many arrays": (
        lambda x, m: call_jax(_tuple, [None], [None, None, None])(x),
        DistributeError,
        "returned a tuple of 2 arrays. Its out_placements are a list of 3 entries",
    ),
    "an output of another rank": (
        lambda x, m: call_jax(lambda x: x.sum(), [None], ("dp", None))(x),
        DistributeError,
        r"alias placements=\('dp', None\) for a tensor with 0 dims",
    ),
    "an output that is no array": (
        lambda x, m: call_jax(lambda x: {"a": x}, [None], None)(x),
        UnsupportedOpError,
        "It is no array of a dtype that torch has. Return arrays",
    ),
    "an uneven input": (
        lambda x, m: call_jax(lambda x: x, [(None, "tp")], None)(x),
        DistributeError,
        r"tensor 0 of shape=\(8, 6\), its dim 1 cut by 'tp' of the mesh \(dp=2, tp=4\). 4 tiles do",
    ),
    "a maximum": (
        lambda x, m: call_jax(lambda x: x, [None], [Partial("max"), Replicate()])(x),
        DistributeError,
        "Only sums and means have a gradient there. Pass Partial",
    ),
    "a partial input": (
        lambda x, m: call_jax(lambda x: x, [[Partial(), Replicate()]], None)(x),
        DistributeError,
        "a reduction is still pending",
    ),
    "a list as a constant": (
        lambda x, m: call_jax(lambda x, y: x, [None], None)(x, np.ones(3)),
        ArgumentTypeError,
        "with an argument of type=ndarray. What is no tensor is a constant of the program",
    ),
    "a plain tensor that needs a gradient": (
        lambda x, m: call_jax(lambda x: x, [None], None, m)(torch.ones(3, requires_grad=True)),
        DistributeError,
        r"a plain tensor of shape=\(3,\) that requires grad. Its gradient would end",
    ),
    "an unknown axis": (
        lambda x, m: call_jax(lambda x: x, [("pp", None)], None)(x),
        ValueError,
        "'pp' is no axis of the mesh with dp=2, tp=4",
    ),
}


@on_jax
@pytest.mark.parametrize("name", list(REFUSED))
def test_bad_input(name: str, mesh: xd.DeviceMesh, count_sentences: Callable[[str], int]) -> None:
    call, error, text = REFUSED[name]
    with pytest.raises(error, match=text) as raised:
        call(put(torch.ones(8, 6), mesh), mesh)
    assert count_sentences(str(raised.value)) >= 3


@on_jax
def test_a_manual_tensor_is_refused(mesh: xd.DeviceMesh) -> None:
    class Manual(torch.Tensor):
        _is_per_device = True

        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            raise AssertionError("it was computed with")

        def __repr__(self, *, tensor_contents: Any = None) -> str:
            return "a manual tensor"

    manual = torch.Tensor._make_wrapper_subclass(Manual, (3,))
    with pytest.raises(ManualRegionError, match="Call disable_manual_sharding first"):
        call_jax(lambda x: x, [None], None, mesh)(manual)


@on_jax
def test_an_axis_in_two_places_of_the_order_is_refused(runtime: Runtime) -> None:
    runtime.root(ROOT)
    ids = np.arange(8).reshape(2, 2, 2).transpose(0, 2, 1)
    mesh = as_device_mesh(Mesh(ids, (4, 2), ("p", "q")))
    with pytest.raises(DistributeError, match="Its axis 'p' walks through the devices in several"):
        call_jax(lambda x: x, [None], None)(put(torch.ones(4), mesh))


@pytest.mark.only_on("torch_xla")
def test_other_runtimes_refuse(mesh: xd.DeviceMesh) -> None:
    with pytest.raises(UnsupportedOpError, match=r"on the runtime 'torch_xla'\. Only JAX's own"):
        call_jax(lambda x: x, [None], None)(put(torch.ones(4), mesh))
