"""Writes through views of sharded DTensors and marked tensors: values, and the sharding stays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard

import xla_dtensor as xd
import xla_dtensor.spmd as xs
from xla_dtensor.errors import UnsupportedOpError
from xla_dtensor.report import collectives
from xla_dtensor.runtimes import Runtime

R = Replicate()
X = torch.arange(64.0).reshape(8, 8)
PLACEMENTS: dict[str, list[Any]] = {
    "rows": [Shard(0), R],
    "columns": [R, Shard(1)],
    "both": [Shard(0), Shard(1)],
}


def _columns(x: Any) -> None:
    x[:, 2:4] = 1


def _row(x: Any) -> None:
    x[0].mul_(2)


def _two(x: Any) -> None:
    x[2:6].mul_(2)
    x.t()[1].zero_()


def _flat(x: Any) -> None:
    x.view(-1)[3:5].fill_(1)


def _copied(x: Any) -> None:
    x[0:4].copy_(torch.ones(4, 8))


def _element(x: Any) -> None:
    x[1, 2] = 3


def _foreach(x: Any) -> None:
    torch.ops.aten._foreach_mul_.Scalar([x.view(-1)[3:5], x[1]], 2.0)


WRITES: dict[str, Callable[[Any], None]] = {
    "columns": _columns,
    "row": _row,
    "two": _two,
    "flat": _flat,
    "diagonal": lambda x: x.diagonal().fill_(2),
    "steps": lambda x: x[:, ::2].add_(1),
    "copied": _copied,
    "element": _element,
    "foreach": _foreach,
}


def wanted(write: Callable[[Any], None], x: torch.Tensor) -> torch.Tensor:
    written = x.clone()
    write(written)
    return written


@pytest.fixture
def put(mesh: xd.DeviceMesh, placements: str) -> Callable[[], Any]:
    return lambda: xd.distribute_tensor(X, mesh, PLACEMENTS[placements])


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("placements", PLACEMENTS)
def test_the_sharding_stays(put: Callable[[], Any], placements: str, write: str) -> None:
    asked = put().xla_sharding()
    parameter: Any = nn.Parameter(put())
    for given in (put(), put().detach(), parameter):
        with torch.no_grad():
            WRITES[write](given)
        assert given.xla_sharding() == asked
        assert torch.equal(given.detach().cpu(), wanted(WRITES[write], X))


@pytest.mark.thorough
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("placements", PLACEMENTS)
def test_in_a_compiled_step(
    runtime: Runtime, put: Callable[[], Any], placements: str, write: str
) -> None:
    given, asked = put(), put().xla_sharding()

    def step(x: Any) -> None:
        WRITES[write](x)

    xd.compile(step)(given)
    assert given.xla_sharding() == asked
    assert torch.equal(given.cpu(), wanted(WRITES[write], X))


@pytest.mark.thorough
@pytest.mark.only_on("torch_xla")
@pytest.mark.parametrize("synced", [True, False], ids=["computed", "pending"])
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("placements", PLACEMENTS)
def test_what_was_never_annotated_lies_as_labelled(
    runtime: Runtime, put: Callable[[], Any], placements: str, write: str, synced: bool
) -> None:
    """An op's result lies as XLA likes; once written through a view, as its label says."""
    asked = put().xla_sharding()
    for result in (put() * 2, put().clone() + X):
        if synced:
            runtime.synchronize()
        WRITES[write](result)
        assert result.xla_sharding() == asked
        assert torch.equal(result.cpu(), wanted(WRITES[write], X * 2))


DTYPES = [torch.int32, torch.uint8, torch.bfloat16, torch.complex64]


@pytest.mark.parametrize("viewed", DTYPES, ids=str)
def test_another_dtype(mesh: xd.DeviceMesh, runtime: Runtime, viewed: torch.dtype) -> None:
    """``view(dtype)`` shows the same bits, and writes go through it; torch_xla asks the host."""

    def step(x: Any) -> Any:
        x = x.clone()
        bits = x.view(viewed)
        bits[1:3] = 0
        return x, bits

    numbers = torch.rand(8, 8, generator=torch.Generator().manual_seed(0)) + 1
    for dtype in (torch.float32, torch.int16, torch.complex64):
        # A float's sign, exponent and first digits are in all its parts: no denormal numbers.
        x = numbers.bfloat16().repeat(1, 4)
        x = x.view(torch.float32).view(dtype) if dtype != torch.int16 else x.view(dtype)
        given = xd.distribute_tensor(x, mesh, [Shard(0), Shard(1)])
        for function in (step, xd.compile(step)) if runtime.name == "jax" else (step,):
            for found, expected in zip(function(given), step(x), strict=True):
                assert found.dtype == expected.dtype
                assert torch.equal(found.cpu().view(torch.uint8), expected.view(torch.uint8))


def test_the_bits_of_a_sum_are_no_sum(mesh: xd.DeviceMesh) -> None:
    """PyTorch's own label would have them added up."""
    columns: Any = xd.distribute_tensor(X, mesh, [R, Shard(1)])
    product: Any = columns @ xd.distribute_tensor(X, mesh, [R, Shard(0)])
    assert product.placements == (R, Partial())
    bits: Any = product.view(torch.int32)
    assert bits.placements == (R, R)
    assert torch.equal(bits.cpu(), (X @ X).view(torch.int32))


@pytest.mark.only_on("jax")
def test_a_bool_is_no_byte(mesh: xd.DeviceMesh) -> None:
    flags: Any = torch.tensor([0, 1, 2, 0, 1, 2, 0, 1], dtype=torch.uint8)
    given = xd.distribute_tensor(flags.clone(), mesh, [R, Shard(0)])
    for tensor in (given, flags):
        tensor.view(torch.bool)[:2] = True
    assert torch.equal(given.cpu(), flags)  # the 2 is still one
    with pytest.raises(UnsupportedOpError, match="int16 was viewed as"):
        given.to(torch.int16).view(torch.bool)


@pytest.mark.only_on("torch_xla")
def test_a_replicated_label_says_nothing(mesh: xd.DeviceMesh) -> None:
    """It may only mean that nothing is known: no gather is made for it."""
    given: Any = xd.distribute_tensor(X, mesh, [Shard(0), R])

    def step(x: Any) -> Any:
        unlabelled = xd.DTensor._wrapping((x * 2)._local_tensor, mesh, (R, R))
        unlabelled[:, 0].fill_(1)
        return unlabelled

    compiled = xd.compile(step)
    found: Any = compiled(given)
    assert collectives(compiled.hlo()) == ()
    assert found.xla_sharding() == given.xla_sharding()


@pytest.mark.thorough
@pytest.mark.parametrize("write", [name for name in WRITES if name not in ("foreach",)])
@pytest.mark.parametrize("spec", [("dp", None), (None, "tp"), ("dp", "tp")], ids=str)
@pytest.mark.parametrize("through", ["the wrapper", "the tensor"])
def test_a_marked_tensor(
    mesh: xd.DeviceMesh, runtime: Runtime, spec: Any, write: str, through: str
) -> None:
    marked_mesh = xs.Mesh(list(range(8)), (2, 4), ("dp", "tp"))
    plain = X.clone() if runtime.name == "jax" else X.to("xla")
    marked: Any = xs.mark_sharding(plain, marked_mesh, spec)
    asked = marked.xla_sharding()
    target: Any = marked if through == "the wrapper" else plain
    WRITES[write](target)
    assert marked.xla_sharding() == asked
    assert torch.equal(target.cpu(), wanted(WRITES[write], X))
    assert torch.equal(marked.cpu(), wanted(WRITES[write], X))
