"""In-place writes on sharded tensors, alone and in chains, in one program, against plain torch.

XLA's partitioner gets some writes wrong on sharded dims without a word, and ends the process over
others (docs/decisions/writes.md). What counts is the write, the sharding, and the chain in one
program: each alone may be right.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import xla_dtensor as xd
from mesh_utils import Mesh
from xla_dtensor import DeviceMesh, distribute_tensor
from xla_dtensor.dtensor.mesh import as_device_mesh
from xla_dtensor.runtimes import Runtime

ROWS, COLUMNS = 8, 16
Write = Callable[[Any], Any]
SPECS = [("a", "b"), ("b", "a"), ("a", None), (None, "b"), (("a", "b"), None), (None, ("b", "a"))]
MESHES = [(2, 4), (4, 2)]
# A program each: the others would take more than a minute per runtime.
QUICK = [("a", "b"), ("a", None), (None, "b")]
QUICK_FIRST: list[Any] = [
    spec if spec in QUICK else pytest.param(spec, marks=pytest.mark.thorough) for spec in SPECS
]


def index(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers)


def _slice(start: int, length: int, step: int) -> Write:
    def write(x: Any) -> None:
        view = x[start : start + length : step]
        view.copy_(view * 2 + 1)

    return write


def _columns(start: int, length: int, step: int) -> Write:
    def write(x: Any) -> None:
        x[:, start : start + length : step] = x[:, :1] + 3

    return write


def _shifted(start: int, length: int, step: int) -> Write:
    def write(x: Any) -> None:
        x[start : start + length] = x[: x[start : start + length].shape[0]] * 2

    return write


def _row(start: int, length: int, step: int) -> Write:
    def write(x: Any) -> None:
        x[start] = 5.0

    return write


def _element(start: int, length: int, step: int) -> Write:
    def write(x: Any) -> None:
        x[start, length] = 7.0

    return write


def _picked(start: int, length: int, step: int) -> Write:
    def write(x: Any) -> None:
        x[index(start, (start + step) % ROWS)] = x[index(0, 1)] - 1

    return write


def _points(start: int, length: int, step: int) -> Write:
    def write(x: Any) -> None:
        x[index(start, (start + 1) % ROWS), index(length, step)] = -2.0

    return write


def _added(start: int, length: int, step: int) -> Write:
    def write(x: Any) -> None:
        x.index_add_(0, index(start, start, 0), x[:3] * 3)

    return write


def _scattered(start: int, length: int, step: int) -> Write:
    def write(x: Any) -> None:
        at = (torch.arange(COLUMNS) * step + start) % ROWS
        x.scatter_(0, at.unsqueeze(0), x[:1] * 4)

    return write


def _scatter_added(start: int, length: int, step: int) -> Write:
    def write(x: Any) -> None:
        at = (torch.arange(ROWS) + start) % COLUMNS
        x.scatter_add_(1, at.unsqueeze(1), x[:, :1])

    return write


def _masked(start: int, length: int, step: int) -> Write:
    def write(x: Any) -> None:
        x.masked_fill_(x > start, 0.5)

    return write


def _diagonal(start: int, length: int, step: int) -> Write:
    def write(x: Any) -> None:
        x.diagonal(start % 3).add_(10)

    return write


def _transposed(start: int, length: int, step: int) -> Write:
    def write(x: Any) -> None:
        x.t()[length] += 2

    return write


def _flat(start: int, length: int, step: int) -> Write:
    def write(x: Any) -> None:
        x.view(-1)[start * 3 : start * 3 + length].mul_(-1)

    return write


def _rolled(start: int, length: int, step: int) -> Write:
    def write(x: Any) -> None:
        x.copy_(torch.cat([x[step:], x[:step]]).roll(length, 1).flip(0))

    return write


def _listed_columns(start: int, length: int, step: int) -> Write:
    def write(x: Any) -> None:
        x[:, index(length, start + 8)] = x[:, :2] * 2

    return write


def _put_added(start: int, length: int, step: int) -> Write:
    def write(x: Any) -> None:
        x.index_put_((index(start, start, 3),), x[:3] * 2, accumulate=True)

    return write


def _grid(start: int, length: int, step: int) -> Write:
    def write(x: Any) -> None:
        rows, columns = index(start, (start + 3) % ROWS), index(length, length + 1, length + 4)
        x[rows.unsqueeze(1), columns] = x[:2, :3] - 7

    return write


def _copied(start: int, length: int, step: int) -> Write:
    def write(x: Any) -> None:
        x.index_copy_(1, index(start, length + 8, 0 if start else 1), x[:, :3] * 3)

    return write


def _filled(start: int, length: int, step: int) -> Write:
    def write(x: Any) -> None:
        x.index_fill_(1, index(start, length), 2.0)

    return write


def _reduced(start: int, length: int, step: int) -> Write:
    def write(x: Any) -> None:
        at = (torch.arange(ROWS) + start) % COLUMNS
        x.scatter_reduce_(1, at.unsqueeze(1), x[:, length : length + 1] * 2, "amax")

    return write


def _put_flat(start: int, length: int, step: int) -> Write:
    def write(x: Any) -> None:
        x.put_(index(start, 40 + length, 90), x[0, :3] * 5)

    return write


def _set_by_mask(start: int, length: int, step: int) -> Write:
    def write(x: Any) -> None:
        x[x > start] = 0.5

    return write


WRITES = [
    _slice, _columns, _shifted, _row, _element, _picked, _points, _added, _scattered,
    _scatter_added, _masked, _diagonal, _transposed, _flat, _rolled, _listed_columns, _put_added,
    _grid, _copied, _filled, _set_by_mask, _put_flat, _reduced,
]  # fmt: skip


@st.composite
def chains(draw: st.DrawFn) -> list[tuple[str, Write]]:
    chain: list[tuple[str, Write]] = []
    for make in draw(st.lists(st.sampled_from(WRITES), min_size=2, max_size=4)):
        numbers = draw(st.integers(0, ROWS - 1)), draw(st.integers(1, 7)), draw(st.integers(1, 3))
        chain.append((f"{make.__name__}{numbers}", make(*numbers)))
    return chain


def values() -> torch.Tensor:
    return torch.arange(float(ROWS * COLUMNS)).reshape(ROWS, COLUMNS) - 40


def check(
    chain: list[tuple[str, Write]], mesh_shape: tuple[int, ...], spec: Any, eager: bool = True
) -> None:
    def run(x: Any) -> Any:
        x = x.clone()
        for _, write in chain:
            write(x)
        return x

    mesh = as_device_mesh(Mesh.arange(mesh_shape, ("a", "b")))
    source = distribute_tensor(values(), mesh, spec)
    expected = run(values())
    for how in (xd.compile(run), run)[: 1 + eager]:
        found = how(source)
        assert torch.equal(found.cpu(), expected), (how, [name for name, _ in chain], spec)


@settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(chains(), st.sampled_from(MESHES), st.sampled_from(SPECS))
def test_chains_of_writes(
    runtime: Runtime, chain: list[tuple[str, Write]], mesh_shape: tuple[int, ...], spec: Any
) -> None:
    check(chain, mesh_shape, spec)


@pytest.mark.thorough
@pytest.mark.parametrize("spec", QUICK_FIRST, ids=str)
@pytest.mark.parametrize("make", WRITES)
def test_a_write_alone(runtime: Runtime, make: Callable[[int, int, int], Write], spec: Any) -> None:
    check([(make.__name__, make(2, 5, 3))], (2, 4), spec, eager=False)


@pytest.mark.parametrize("step", [2, 3, 8])
def test_one_row_by_a_step(runtime: Runtime, step: int) -> None:
    """XLA's partitioner makes an invalid program of such a slice. Also read, and differentiated."""
    mesh = as_device_mesh(Mesh.arange((2, 4), ("a", "b")))
    check([("one", _slice(5, 1, step)), ("last", _slice(7, 4, step))], (2, 4), ("b", "a"))
    x = distribute_tensor(values(), mesh, ("b", "a")).requires_grad_()
    row = x[5 : 5 + min(step, 3) : step]
    (row * row).sum().backward()
    expected = torch.zeros(ROWS, COLUMNS)
    expected[5] = 2 * values()[5]
    assert x.grad is not None
    assert torch.equal(row.detach().cpu(), values()[5:6])
    assert torch.equal(x.grad.cpu(), expected)


@pytest.mark.parametrize("make", [_added, _scattered, _scatter_added, _points, _set_by_mask])
def test_a_write_keeps_the_sharding(
    runtime: Runtime, make: Callable[[int, int, int], Write]
) -> None:
    mesh = as_device_mesh(Mesh.arange((2, 4), ("a", "b")))
    x = distribute_tensor(values(), mesh, ("a", "b"))
    before = str(x.xla_sharding())
    make(2, 5, 3)(x)
    assert {shard.num_bytes_on_device for shard in x.addressable_shards()} == {4 * 4 * 4}
    assert str(x.xla_sharding()) == before


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_slices_written_one_after_another(runtime: Runtime, spec: Any) -> None:
    chain = [("shifted", _shifted(1, 2, 1)), ("row", _row(0, 1, 1)), ("column", _columns(0, 9, 2))]
    check(chain, (2, 4), spec)


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_gradients_of_slices(runtime: Runtime, mesh: DeviceMesh, spec: Any) -> None:
    """What many slices of one tensor send back is added up, in one program."""

    def loss(x: Any) -> Any:
        parts = [x[1:3].sum() * 2, (x[0] ** 2).sum(), x[:, 1::3].sum(), (x[-1, 2:5] * 3).sum()]
        return sum(parts[1:], parts[0])

    def grad(x: Any) -> Any:
        x = x.detach().requires_grad_()
        loss(x).backward()
        return x.grad

    named = Mesh.arange((2, 4), ("a", "b"))
    source = distribute_tensor(values(), as_device_mesh(named), spec)
    expected = grad(values())
    assert torch.equal(xd.compile(grad)(source).cpu(), expected)
    assert torch.equal(grad(source).cpu(), expected)


LISTED = index(3, 1, 3)
GRADIENTS: dict[str, Callable[[Any], Any]] = {
    "index_select": lambda x: x.index_select(0, LISTED),
    "index": lambda x: x[LISTED, index(1, 2, 1)],
    "embedding": lambda x: torch.nn.functional.embedding(LISTED, x),
    "gather": lambda x: x.gather(1, torch.arange(ROWS * 3).reshape(ROWS, 3) % 7),
    "scatter": lambda x: x.scatter(1, index(*[3] * ROWS).unsqueeze(1), x[:, :1] * 2),
    "scatter_add": lambda x: x.scatter_add(1, index(*[3] * ROWS).unsqueeze(1), x[:, :1] * 2),
    "diagonal": lambda x: x.diagonal(1),
    "nll": lambda x: torch.nn.functional.nll_loss(x, torch.arange(ROWS), reduction="none"),
    "max": lambda x: x.max(1).values,
}


@pytest.mark.thorough
@pytest.mark.parametrize("spec", QUICK_FIRST, ids=str)
@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_that_write_by_index(runtime: Runtime, name: str, spec: Any) -> None:
    def grad(x: Any) -> Any:
        x = x.detach().requires_grad_()
        (GRADIENTS[name](x) ** 2).sum().backward()
        return x.grad

    source = distribute_tensor(values(), as_device_mesh(Mesh.arange((2, 4), ("a", "b"))), spec)
    assert torch.equal(xd.compile(grad)(source).cpu(), grad(values()))
