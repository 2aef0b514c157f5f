"""Faults that this library once had: small programs that must give what PyTorch gives.

A row is a function of `On`, the place where it runs. It runs twice, on plain CPU torch and on the
mesh, and returns tensors, which are compared in float64. Rows of `LAYOUTS` return what a user reads
of layouts instead (placements, shardings, bytes, collectives) with what it must be. The list of the
faults that these rows find is tools/mutants/mutants.yaml.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.utils._pytree import tree_leaves

import xla_dtensor as xd
from xla_dtensor.report import collectives
from xla_dtensor.runtimes import Runtime

R = Replicate()
Row = Callable[[Any], Any]
VALUES: list[Any] = []
LAYOUTS: list[Any] = []


def numbers(*shape: int, start: float = 0.0) -> torch.Tensor:
    """Return numbers without symmetry, between -1 and 1."""
    return torch.sin(torch.arange(1, 1 + torch.Size(shape).numel()) * 0.7 + start).reshape(shape)


def values(*only: str) -> Callable[[Row], Row]:
    """Register a row of values; on some runtimes only where they are named."""

    def register(row: Row) -> Row:
        marks = [pytest.mark.only_on(*only)] if only else []
        VALUES.append(pytest.param(row, id=row.__name__, marks=marks))
        return row

    return register


def layouts(*only: str) -> Callable[[Row], Row]:
    """Register a row of layouts."""

    def register(row: Row) -> Row:
        marks = [pytest.mark.only_on(*only)] if only else []
        LAYOUTS.append(pytest.param(row, id=row.__name__, marks=marks))
        return row

    return register


class On:
    """Plain CPU torch, or a mesh of (dp=2, tp=4).

    Args:
        mesh: The mesh; None for plain torch.
    """

    def __init__(self, mesh: xd.DeviceMesh | None) -> None:
        self.mesh = mesh

    def put(self, tensor: torch.Tensor, *placements: Any) -> Any:
        """Put a tensor on the mesh, Replicate where nothing is said."""
        if self.mesh is None:
            return tensor.detach().clone()
        return xd.distribute_tensor(tensor.detach(), self.mesh, placements or (R, R))

    def leaf(self, tensor: torch.Tensor, *placements: Any) -> Any:
        """The same, with a gradient."""
        return self.put(tensor, *placements).requires_grad_()

    def compile(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Compile a step."""
        return step if self.mesh is None else xd.compile(step)

    def model(self, module: nn.Module) -> Any:
        """Put a module's parameters and buffers on the mesh."""
        return module if self.mesh is None else xd.distribute_module(module, self.mesh)

    def move(self, tensor: Any, *placements: Any) -> Any:
        """Redistribute."""
        return tensor if self.mesh is None else tensor.redistribute(self.mesh, placements)


@pytest.fixture(autouse=True)
def _in_float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def whole(value: Any) -> Any:
    """Return the value of a result on the host."""
    return value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize("row", VALUES)
def test_value(mesh: xd.DeviceMesh, row: Row) -> None:
    results = []
    for place in (None, mesh):
        torch.manual_seed(3)
        results.append([whole(leaf) for leaf in tree_leaves(row(On(place)))])
    expected, found = results
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9, equal_nan=True)


@pytest.mark.parametrize("row", LAYOUTS)
def test_layout(mesh: xd.DeviceMesh, runtime: Runtime, row: Row) -> None:
    found, expected = row(On(mesh))
    assert found == expected


def kinds(step: Any) -> list[str]:
    """Return the kinds of a program's collectives, sorted."""
    return sorted(each.kind for each in collectives(step.hlo()))


# ---------------------------------------------------------------------- compiled steps


@values()
def a_number_of_a_closure_changes(on: On) -> Any:
    scale = 2.0
    step = on.compile(lambda x: x * scale)
    first = step(on.put(numbers(8)))
    scale = 3.0
    return first, step(on.put(numbers(8)))


@values()
def a_host_tensor_is_written_between_calls(on: On) -> Any:
    weight = numbers(8)
    step = on.compile(lambda x: x * weight)
    first = step(on.put(numbers(8)))
    weight.add_(1)
    return first, step(on.put(numbers(8)))


@values()
def numbers_are_drawn_on_the_host(on: On) -> Any:
    step = on.compile(lambda x: x + torch.randn(8))
    return [step(on.put(numbers(8))) for _ in range(3)]


@values()
def a_step_assigns_an_attribute(on: On) -> Any:
    class Trainer:
        hidden = on.put(numbers(8))

        def step(self, x: Any) -> Any:
            self.hidden = self.hidden * 0.5 + x
            return self.hidden.sum()

    trainer = Trainer()
    step = on.compile(trainer.step)
    return [step(on.put(numbers(8, start=n))) for n in range(4)], trainer.hidden


@values()
def an_argument_is_also_found_by_name(on: On) -> Any:
    state, other = on.put(numbers(8)), on.put(numbers(8, start=1))
    step = on.compile(lambda x: (state.add_(1) * 2 + x) * x)
    return step(other), step(state), state, step(other)


@values()
def an_optimizers_momentum_changes(on: On) -> Any:
    weight = on.leaf(numbers(8, 4), Shard(0), R)
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)

    def step() -> Any:
        optimizer.zero_grad()
        (weight**2).sum().backward()
        optimizer.step()

    step = on.compile(step)
    for momentum in (0.9, 0.9, 0.5, 0.5, 0.1):
        optimizer.param_groups[0]["momentum"] = momentum
        step()
    return weight


@values()
def an_optimizers_state_is_loaded(on: On) -> Any:
    weight = on.leaf(numbers(8, 4), Shard(0), R)
    optimizer = torch.optim.Adam([weight], lr=0.1)

    def step() -> Any:
        optimizer.zero_grad()
        (weight**2).sum().backward()
        optimizer.step()

    step = on.compile(step)
    for _ in range(3):
        step()
    state = copy.deepcopy(optimizer.state_dict())
    for _ in range(2):
        step()
    optimizer.load_state_dict(state)
    step()
    return weight


@values()
def gradients_add_up_over_calls(on: On) -> Any:
    weight = on.leaf(numbers(8, 4), Shard(0), R)

    def step(x: Any) -> None:
        (weight * x).sum().backward()

    step = on.compile(step)
    found = []
    for call in range(5):
        step(on.put(numbers(8, 4, start=call)))
        found.append(weight.grad.clone())
        if call == 2:
            weight.grad = None
    return found


@values()
def a_parameter_is_unfrozen(on: On) -> Any:
    model = on.model(nn.Linear(4, 4))
    model.weight.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Any) -> None:
        optimizer.zero_grad()
        (model(x) ** 2).sum().backward()
        optimizer.step()

    step = on.compile(step)
    for call in range(4):
        step(on.put(numbers(8, 4), Shard(0), R))
        if call == 1:
            model.weight.requires_grad_(True)
    return model.weight, model.bias


# ---------------------------------------------------------------------- gradients


@values("jax")
def complex_linear(on: On) -> Any:
    x = on.leaf(torch.polar(numbers(8, 4), numbers(8, 4)))
    weight = on.leaf(torch.polar(numbers(6, 4), numbers(6, 4) + 2), Shard(0), R)
    F.linear(x, weight).abs().sum().backward()
    return x.grad, weight.grad


@values("jax")
def complex_matmul(on: On) -> Any:
    a = on.leaf(torch.polar(numbers(2, 8, 4), numbers(2, 8, 4)), R, Shard(1))
    b = on.leaf(torch.polar(numbers(2, 4, 6), numbers(2, 4, 6) + 2))
    (a @ b).abs().sum().backward()
    (a @ b[0]).abs().sum().backward()
    return a.grad, b.grad


@values()
def the_gradient_of_solve(on: On) -> Any:
    matrix = on.leaf(numbers(4, 4) + 3 * torch.eye(4))
    right = on.leaf(numbers(4, 2))
    torch.linalg.solve(matrix, right).pow(2).sum().backward()
    return matrix.grad, right.grad


@values()
def attention_of_a_row_that_sees_nothing(on: On) -> Any:
    q, k, v = (on.leaf(numbers(2, 4, 6, 8, start=n), Shard(0), Shard(1)) for n in range(3))
    mask = torch.ones(6, 6, dtype=torch.bool).tril()
    mask[2] = False
    added = torch.zeros(6, 6).masked_fill(~mask, -torch.inf)
    outs = [F.scaled_dot_product_attention(q, k, v, on.put(each)) for each in (mask, added)]
    (outs[0] + outs[1]).pow(2).sum().backward()
    return outs, q.grad, k.grad, v.grad


# ---------------------------------------------------------------------- writes and reads


@values()
def two_slices_are_written(on: On) -> Any:
    def write(x: Any) -> Any:
        y = x.clone()
        y[1:3] = y[:2] * 2
        y[:1] = 5.0
        y[:, 4:8] += y[:, :4]
        return y

    x = on.put(numbers(4, 20), Shard(0), Shard(1))
    return write(x), on.compile(write)(x)


@values()
def one_element_is_taken_by_a_step(on: On) -> Any:
    x = on.put(numbers(8, 16), R, Shard(0))
    return [on.compile(lambda t, n=n: t[n : n + 1 : 3] * 2)(x) for n in (2, 5, 7)]


@values()
def rows_are_added_by_index(on: On) -> Any:
    x, rows = on.put(numbers(8, 16), Shard(0), R), torch.tensor([3, 3, 0])
    add = on.compile(lambda t: t.index_add(0, on.put(rows), t[:3] * 3))
    return add(x), x.index_add(0, on.put(rows), x[:3] * 3)


@values()
def a_nan_that_one_device_has(on: On) -> Any:
    x = torch.tensor([2.0, 6.0, 10.0, torch.nan, 1.0, 3.0, 5.0, 7.0])
    x = on.put(x.reshape(2, 4), R, Shard(1))
    return x.amax(1), x.amin(1), x.max(), x.min(1).values, x.amax()
