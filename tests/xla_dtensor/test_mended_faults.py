"""Faults that this library once had: small programs that must give what PyTorch gives.

A row is a function of `On`, the place where it runs. It runs twice, on plain CPU torch and on the
mesh, and returns tensors, which are compared in float64. Rows of `LAYOUTS` return what a user reads
of layouts instead (placements, shardings, bytes, collectives) with what it must be. The list of the
faults that these rows find is tools/mutants/mutants.yaml.
"""

from __future__ import annotations

import contextlib
import copy
import math
import pickle
from collections import ChainMap, Counter, OrderedDict, UserDict, UserList
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.utils.rnn import (
    pack_padded_sequence,
    pack_sequence,
    pad_packed_sequence,
    pad_sequence,
)
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import xla_dtensor as xd
from xla_dtensor.collectives import permute, psum
from xla_dtensor.core.errors import DistributeError
from xla_dtensor.report import collectives
from xla_dtensor.runtimes import Runtime

R = Replicate()
foreach: Any = torch  # whose ops on lists are not public
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
        self.mesh: Any = mesh

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
    moments = optimizer.state[weight]
    moments["exp_avg"] = moments["exp_avg"] * 0  # a tensor of its own, past load_state_dict
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
        found.append(whole(weight.grad))
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


@values()
def a_caller_writes_to_what_was_distributed(on: On) -> Any:
    source = torch.zeros(8)
    x = on.put(source, Shard(0), R)
    source.sub_(1)
    return x.sum(), x + 1


@values()
def numbers_that_need_64_bits(on: On) -> Any:
    x = on.put(torch.tensor([2**40, 2**62, -(2**40), 1] * 2), Shard(0), R)
    return x + x, x.sum(), on.compile(lambda t: t * 3)(x)


@values()
def extremes_of_infinities_and_nans(on: On) -> Any:
    rows = [[-torch.inf, -torch.inf], [1.0, torch.nan], [torch.inf, 2.0], [-torch.inf, 3.0]]
    x = on.put(torch.tensor(rows * 2), Shard(0), R)
    return x.amax(1), x.amin(1), x.max(1).values, x.argmax(1), x.amax()


@values()
def any_two_dims_of_a_diagonal(on: On) -> Any:
    x = on.leaf(numbers(8, 4, 8), Shard(0), R)
    (x.diagonal(0, 0, 2).pow(2).sum() + x.diagonal(1, 0, 1).sum()).backward()
    return x.diagonal(0, 0, 2), x.diagonal(1, 0, 1), x.grad


@values()
def the_infinite_norm(on: On) -> Any:
    x = on.put(numbers(8, 4), Shard(0), R)
    norms = [torch.norm(x, torch.inf, 1), torch.norm(x, -torch.inf, (0, 1)), torch.norm(x, 2, 1)]
    return *norms, torch.linalg.vector_norm(x, torch.inf, 1)


@values()
def whole_numbers_are_divided(on: On) -> Any:
    x = on.put(torch.tensor([2**62, -(2**62) + 1, 7, -7, 2**53 + 1, 6, -6, 0]), Shard(0), R)
    return x // 3, torch.div(x, -7, rounding_mode="trunc")


@values()
def gelu_in_float64(on: On) -> Any:
    x = on.leaf(numbers(8, 4), Shard(0), R)
    F.gelu(x).sum().backward()
    return F.gelu(x), x.grad


@values()
def statistics_of_batch_norm(on: On) -> Any:
    model = on.model(nn.BatchNorm1d(3))
    out = model(on.put(numbers(8, 3), Shard(0), R))
    return out, model.running_mean, model.running_var


@values()
def statistics_of_batch_norm_in_float32(on: On) -> Any:
    """A float64 batch is normed another way on torch_xla."""
    model = on.model(nn.BatchNorm1d(3).float())
    model(on.put(numbers(8, 3).float(), Shard(0), R))
    return [(value * 1000).round() for value in (model.running_mean, model.running_var)]


@values("torch_xla")
def the_gradient_of_kl_div_of_plain_tensors(on: On) -> Any:
    device = "cpu" if on.mesh is None else "xla"
    x = numbers(8, 4).to(device).requires_grad_()
    target = numbers(8, 4, start=2).softmax(1).to(device)
    F.kl_div(x.log_softmax(1), target, reduction="batchmean").backward()
    return x.grad


@values()
def weight_norm_is_trained(on: On) -> Any:
    model = on.model(nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)))
    model(on.put(numbers(8, 4), Shard(0), R)).pow(2).sum().backward()
    return [parameter.grad for parameter in model.parameters()]


@values()
def lists_of_plain_and_placed_tensors(on: On) -> Any:
    placed, plain = on.put(numbers(8), Shard(0), R), numbers(8)
    foreach._foreach_mul_([placed, plain], 2.0)
    foreach._foreach_add_([plain, placed], [placed, placed])
    return placed, plain


@values()
def lists_that_are_zeroed_and_bounded(on: On) -> Any:
    x, y, z = (on.put(numbers(8, start=n), Shard(0), R) for n in range(3))
    foreach._foreach_zero_([x])
    return x, foreach._foreach_maximum([y, z], 0.3), foreach._foreach_norm([y, z], 1)


# ---------------------------------------------------------------------- programs that are alike


@values()
def what_stands_where_in_alike_programs(on: On) -> Any:
    x, y = on.put(numbers(4, 4), Shard(0), R), on.put(numbers(4, 4, start=1), Shard(0), R)
    products = (lambda: x + x * y), (lambda: y + x * y), (lambda: x @ y @ x), (lambda: x @ y @ y)
    return [whole(product()) for product in products]


@values()
def which_arguments_are_one_tensor(on: On) -> Any:
    given = {name: on.put(numbers(4, 4, start=n), Shard(0), R) for n, name in enumerate("xyz")}
    step = on.compile(lambda a, b, c: a @ b @ c)
    return [whole(step(*(given[name] for name in names))) for names in ("xyx", "xyy", "xxy", "xyz")]


@values()
def a_flag_chooses_between_alike_tensors(on: On) -> Any:
    x, y = (on.put(numbers(8, 8, start=n)) for n in range(2))
    first = True
    step = on.compile(lambda: (x if first else y) + x * y)
    found = [whole(step())]
    first = False
    return *found, step()


# ---------------------------------------------------------------------- random numbers


@values()
def a_checkpoint_repeats_its_dropout(on: On) -> Any:
    x = on.leaf(numbers(16, 16) + 2, Shard(0), R)
    out = checkpoint(lambda t: F.dropout(t * 1.0, 0.5), x, use_reentrant=False)
    out.sum().backward()
    return ((out != 0) == (x.grad != 0)).all()


@values()
def each_call_draws_anew(on: On) -> Any:
    step = on.compile(lambda x: (torch.rand_like(x), torch.rand_like(x)))
    drawn = [whole(part) for _ in range(3) for part in step(on.put(numbers(8)))]
    return len({part.sum().item() for part in drawn})


# ---------------------------------------------------------------------- local views


@values()
def a_plain_bias_beside_a_view(on: On) -> Any:
    x, bias = on.put(numbers(8, 4), Shard(0), Shard(1)), numbers(1).requires_grad_()
    if on.mesh is None:
        (x + bias).pow(2).sum().backward()
        return bias.grad
    made = xd.DTensor.from_local(x.to_local() + bias, on.mesh, [Shard(0), Shard(1)])
    made.pow(2).sum().backward()
    return bias.grad


@values()
def a_plain_bias_in_a_sum_over_all(on: On) -> Any:
    x, bias = on.put(numbers(8, 4), Shard(0), Shard(1)), numbers(1).requires_grad_()
    if on.mesh is None:
        (x + bias).sum().backward()
        return bias.grad
    total = psum((x.to_local() + bias).sum(), ("dp", "tp"))
    xd.DTensor.from_local(total, on.mesh, [R, R]).backward()
    return bias.grad


@values()
def a_weight_in_a_sum_of_parts(on: On) -> Any:
    x, weight = on.put(numbers(8, 4), R, Shard(1)), on.leaf(numbers(6, 4), R, Shard(1))
    if on.mesh is None:
        F.linear(x, weight).pow(2).sum().backward()
        return weight.grad
    parts = F.linear(x.to_local(), weight.to_local())
    xd.DTensor.from_local(parts, on.mesh, [R, Partial()]).pow(2).sum().backward()
    return weight.grad


@values()
def a_foreach_write_is_seen_in_a_view(on: On) -> Any:
    x = on.put(numbers(8, 4), Shard(0), R)
    view = x if on.mesh is None else x.to_local()
    before = view.sum()
    foreach._foreach_add_([x], 1.0)
    after = view * 2
    after = after if on.mesh is None else xd.DTensor.from_local(after, on.mesh, [Shard(0), R])
    return before * 0, after


def view_of(mesh: xd.DeviceMesh, shards: list[torch.Tensor]) -> Any:
    return xd.LocalView.from_shards(shards, mesh).requires_grad_()


def shards_of(view: Any) -> list[Any]:
    return [shard.data.tolist() for shard in view.addressable_shards()]


@layouts()
def the_gradient_of_a_mean_of_parts(on: On) -> Any:
    view = view_of(on.mesh, [torch.full((2,), float(n)) for n in range(8)])
    xd.DTensor.from_local(view, on.mesh, [Partial("avg"), Partial("avg")]).sum().backward()
    return shards_of(view.grad), [[0.125, 0.125]] * 8


@layouts()
def the_gradient_of_equal_maxima(on: On) -> Any:
    view = view_of(on.mesh, [torch.tensor([float(n % 2), float(n)]) for n in range(8)])
    xd.DTensor.from_local(view, on.mesh, [Partial("max"), Partial("max")]).sum().backward()
    return shards_of(view.grad), [[0.25 * (n % 2), float(n == 7)] for n in range(8)]


@layouts()
def shards_of_a_dim_that_two_axes_cut_unevenly(on: On) -> Any:
    view = on.put(torch.arange(10.0), Shard(0), Shard(0)).to_local()
    chunks = [c for half in torch.arange(10.0).chunk(2) for c in half.chunk(4)]
    expected = [chunk.tolist() for chunk in chunks]
    return shards_of(view), [*expected[:3], [], *expected[3:], []]


@layouts()
def who_has_no_source_takes_zeros(on: On) -> Any:
    view = xd.LocalView.from_shards([torch.full((1,), n + 1.0) for n in range(8)], on.mesh)
    moved = permute(view, "tp", [(0, 1), (1, 3)])
    return shards_of(moved), [[0.0], [1.0], [0.0], [2.0], [0.0], [5.0], [0.0], [6.0]]


@layouts()
def each_device_draws_its_own(on: On) -> Any:
    view = on.put(torch.zeros(8, 4), Shard(0), Shard(0)).to_local()
    return len({tuple(row[0]) for row in shards_of(torch.rand_like(view))}), 8


# ---------------------------------------------------------------------- how tensors lie


def cuts(tensor: Any) -> tuple[Any, str]:
    """Return what a tensor is labelled, and how it really lies."""
    return tensor.placements, str(tensor.xla_sharding())


@layouts()
def a_write_keeps_how_a_tensor_lies(on: On) -> Any:
    x = on.put(numbers(8, 8), Shard(0), Shard(1))
    before = cuts(x)
    x.copy_(on.put(numbers(8, 8, start=1)))
    x.mul_(on.put(numbers(8, 8), R, Shard(0)))
    return cuts(x), before


@layouts()
def an_uneven_tensor_stays_cut(on: On) -> Any:
    x = on.put(numbers(10, 6), R, Shard(0))
    x.mul_(2)
    x.sum().item()
    x.add_(1)
    x.sum().item()
    sizes = {shard.num_bytes_on_device for shard in x.addressable_shards()}
    return sizes, {3 * 6 * 8}


@layouts()
def a_product_both_of_whose_factors_would_cut_it(on: On) -> Any:
    rows, columns = on.put(numbers(16, 8), Shard(0), R), on.put(numbers(8, 64), Shard(1), R)
    return [(rows @ columns).placements, (rows[:8] @ columns).placements], [
        (Shard(1), R),
        (Shard(1), R),
    ]


@layouts()
def a_redistribute_keeps_what_is_known_of_other_axes(on: On) -> Any:
    x = on.put(numbers(8, 8), Shard(0), Shard(1))
    tp = on.mesh["tp"]
    on_tp = (x * 1).redistribute(tp, [Shard(1)])
    step = on.compile(lambda t: t.redistribute(tp, [R]) * 2)
    step(on_tp)
    return {each.axes for each in collectives(step.hlo(), on.mesh.value)}, {("tp",)}


@layouts()
def an_einsum_keeps_batch_and_heads(on: On) -> Any:
    q, k = (on.put(numbers(4, 8, 4, 4), Shard(0), Shard(1)) for _ in range(2))
    step = on.compile(lambda a, b: torch.einsum("bhqd,bhkd->bhqk", a, b))
    step(q, k)
    return kinds(step), []


@layouts()
def a_result_of_another_shape_under_the_same_call(on: On) -> Any:
    x = on.put(torch.tensor([0, 1, 2, 3, 0, 0, 0, 0]), Shard(0), R)
    first = torch.nonzero(x)
    x.fill_(1)
    results: Any = (first, torch.nonzero(x))
    return [(tuple(t.shape), t._spec.tensor_meta.shape) for t in results], [
        ((3, 1), (3, 1)),
        ((8, 1), (8, 1)),
    ]


@layouts("torch_xla")
def the_label_of_what_is_computed_of_a_strided_shard(on: On) -> Any:
    placements = [_StridedShard(0, split_factor=4), Shard(0)]
    x = on.put(torch.arange(8.0), *placements)
    plain = on.put(torch.arange(8.0), Shard(0), Shard(0))
    found = [(plain * 2).placements[0], (x * 2).placements[0]]
    return [type(each) for each in found], [Shard, _StridedShard]


@layouts("torch_xla")
def the_gradient_of_from_local_with_a_strided_shard(on: On) -> Any:
    placements = [_StridedShard(0, split_factor=4), Shard(0)]
    view = on.put(torch.zeros(8), *placements).to_local().detach().requires_grad_()
    made = xd.DTensor.from_local(view, on.mesh, placements)
    (made * on.put(torch.arange(8.0), Shard(0), Shard(0))).sum().backward()
    return shards_of(view.grad), [[float(n)] for n in (0, 2, 4, 6, 1, 3, 5, 7)]


@layouts("jax")
def a_step_for_devices_in_another_order(on: On) -> Any:
    import jax

    step = on.compile(lambda t: t * 2)
    step(on.put(numbers(8), Shard(0), Shard(0)))
    devices = jax.devices()[:8][::-1]
    given = jax.tree.leaves(step.lowered_for(devices).compile().input_shardings)
    return [[d.id for d in each._device_assignment] for each in given], [[*range(7, -1, -1)]]


# ---------------------------------------------------------------------- what drawn programs found


def complex_numbers(*shape: int) -> torch.Tensor:
    return torch.complex(numbers(*shape), numbers(*shape, start=2.0))


@values("jax")
def sizes_of_complex_numbers(on: On) -> Any:
    """The imaginary part was dropped where the result is real."""
    z = on.put(complex_numbers(8), Shard(0), R)
    norms = [torch.linalg.vector_norm(z, p) for p in (2, 1, float("inf"), 0)]
    return *norms, torch.var(z), torch.std(z), F.normalize(z, dim=0), torch.dist(z, z * 2)


@values("jax")
def gradients_of_complex_functions(on: On) -> Any:
    z = on.leaf(complex_numbers(8), Shard(0), R)
    value = (torch.tanh(z) * torch.sigmoid(z)).abs().sum()
    return torch.autograd.grad(value, z)


@values("jax")
def numbers_are_complex(on: On) -> Any:
    x = on.put(complex_numbers(8), Shard(0), R)
    return x == 1j, x.real != 1j, x.clone().copy_(on.put(torch.tensor(2.0))), x.clone().fill_(1j)


@values()
def a_number_is_turned_round(on: On) -> Any:
    x = on.put(torch.tensor(3.0))
    return x.flip(0), x.roll(1), x.flip(-1)


@values("jax")
def the_largest_of_bools_by_index(on: On) -> Any:
    x, index = on.put(torch.tensor([True, False, False, True])), torch.tensor([0, 1, 1, 3])
    rows = on.put(torch.tensor([False, True, False, True])), on.put(index)
    return [torch.scatter_reduce(x, 0, rows[1], rows[0], how) for how in ("amax", "amin")]


@values("jax")
def a_step_function_of_nan(on: On) -> Any:
    x = on.put(torch.tensor([float("nan"), -1.0, 0.0, 2.0]), Shard(0), R)
    return torch.heaviside(x, on.put(torch.tensor(float("nan")))), torch.heaviside(x, x + 1)


@values("jax")
def half_precision_is_divided_and_cut(on: On) -> Any:
    x = on.put(numbers(8).bfloat16() * 9, Shard(0), R)
    return torch.div(x, x + 2, rounding_mode="trunc").double()


@values()
def what_goes_into_a_number_goes_into_it_exactly(on: On) -> Any:
    """41 / 41 was less than 1 in float32, and its floor 0."""
    results: list[Any] = []
    for dtype, n in ((torch.float32, 41.0), (torch.float64, 49.0), (torch.float32, 7.0)):
        x = on.put((torch.arange(1.0, 513.0) * n).to(dtype), Shard(0), Shard(0))
        rows, number = x.view(64, 8), x[0] * 0 + n
        for divide in (lambda x: x, on.compile):
            step = divide(
                lambda x, rows, number, n=n: [
                    (x / n).floor(),
                    torch.div(x, n, rounding_mode="trunc"),
                    torch.div(x.bfloat16(), n, rounding_mode="trunc").to(x.dtype),
                    (x.bfloat16() // n).to(x.dtype),
                    (x / number).floor(),
                    (rows / number.expand(64, 1)).floor(),
                    (rows / number.view(1)).floor(),
                    (rows / number.view(1).expand(64, 8).clone()).floor(),
                    torch.addcdiv(rows * 0, rows, number.view(1).expand(64, 8)).floor(),
                    (rows * 0 + n).mean(1),
                    torch.histc(x, 30, n, 31 * n),
                    x.clone().div_(n).floor(),
                ]
            )
            results += step(x, rows, number)
    return results


@values("jax")
def products_with_factors_are_rounded_once(on: On) -> Any:
    """In half precision, where the product itself is exact."""
    a, b, c = (on.put(torch.arange(n, n + 16.0).view(4, 4) % 5) for n in range(3))
    results = []
    for dtype in (torch.bfloat16, torch.float16):
        c, a, b = (t.to(dtype) for t in (c, a, b))
        for beta, alpha in ((-4.775, 2.03), (0, 2.03), (1, 0.3)):
            factors = {"beta": beta, "alpha": alpha}
            results.append(torch.addmm(c, a, b, **factors))
            results.append(torch.baddbmm(c[None], a[None], b[None], **factors))
    return [result.double() for result in results]


@values("jax")
def writes_to_expanded_tensors(on: On) -> Any:
    """Elements that share no place, or get one value, may be written to."""
    x, y = on.put(numbers(4, 2), Shard(0), R), on.put(numbers(1, 4), R, Shard(1))
    x.expand(-1, -1).mul_(2)
    x.expand(1, 4, 2)[:, 1:].add_(1)
    y.expand(3, 4)[1, :2].fill_(7)
    return x, y


@values("jax")
def an_argument_and_a_view_of_it(on: On) -> Any:
    """The step had a copy of the view, which did not follow."""
    x = on.put(numbers(4, 2), Shard(0), R)
    row, turned = x[1:3], x.t()
    first = on.compile(lambda a, b: (a.add_(1), b * 1)[1])
    second = on.compile(lambda a, b: (b.mul_(2), a * 1)[1])
    alone = on.compile(lambda b: b.sub_(3).sum())
    return first(x, row), first(x, row), second(x, turned), alone(row), x, row, turned


@values("jax")
def rows_of_one_tensor_are_read(on: On) -> Any:
    x, step = on.put(numbers(4, 2), Shard(0), R), on.compile(lambda a, b: a * b)
    return [step(x[i], x[i + 1]) for i in range(3)]


@values("jax")
def numbers_that_a_step_returns(on: On) -> Any:
    """They were objects of the trace."""
    x, step = (
        on.put(numbers(8), Shard(0), R),
        on.compile(lambda t: (t.sum().item(), t[0].item() * 2)),
    )
    found = [step(x), step(x * 3)]
    assert all(type(number) is float for pair in found for number in pair)
    return torch.tensor(found)


@values("jax")
def bools_are_added_by_index(on: On) -> Any:
    x, index = on.put(torch.tensor([False, False, True])), on.put(torch.tensor([0, 0, 2]))
    return x.index_put((index,), on.put(torch.tensor([True, True, False])), accumulate=True)


@values("jax")
def a_step_takes_one_number_of_a_larger_tensor(on: On) -> Any:
    x, step = on.put(numbers(8), Shard(0), R), on.compile(lambda t: t * torch.arange(34)[3::17][:1])
    return step(x), step(x)


@values("jax")
def fused_optimizers(on: On) -> Any:
    """fused=True is what transformers' Trainer asks for."""
    makers: list[Callable[[Any], Any]] = [
        lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
        lambda p: torch.optim.Adam(p, lr=torch.tensor(1e-2), fused=True, amsgrad=True),
        lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True, fused=True),
        lambda p: torch.optim.Adagrad(p, lr=1e-2, fused=True),
    ]
    found = []
    for compile_ in (lambda step: step, on.compile):
        leaves = [on.leaf(numbers(4, 2, start=float(i)), Shard(0), R) for i in range(len(makers))]
        optimizers = [make([leaf]) for make, leaf in zip(makers, leaves, strict=True)]

        def step(leaves: Any = leaves, optimizers: Any = optimizers) -> None:
            for leaf, optimizer in zip(leaves, optimizers, strict=True):
                optimizer.zero_grad()
                (leaf**3).sum().backward()
                optimizer.step()

        run = compile_(step)
        for _ in range(3):
            run()
        found += leaves
    return found


@values("jax")
def forward_mode(on: On) -> Any:
    x, t = on.put(numbers(4, 2), Shard(0), R), on.put(numbers(4, 2, start=1.0), R, Shard(1))
    w = on.put(numbers(2, 2))
    call = lambda v: torch.tanh(v @ w).softmax(-1)  # noqa: E731
    return torch.func.jvp(call, (x,), (t,))


@values()
def forward_mode_of_whole_ops(on: On) -> Any:
    """Those with a gradient of their own, and what moves a tensor."""
    x, t = on.put(numbers(8, 4), Shard(0), R), on.put(numbers(8, 4, start=1.0), R, Shard(1))
    w = on.put(numbers(4, 4), R, Shard(0))
    found: list[Any] = []
    with forward_ad.dual_level():
        dual: Any = forward_ad.make_dual(x, t)
        found += [F.linear(dual, w, w[0]), dual @ w, torch.einsum("ij,kj->ik", dual, w)]
        found += [on.move(dual, Shard(1), R) * 1, dual if on.mesh is None else dual.full_tensor()]
        rows = dual[None]
        scores = torch.softmax(rows @ rows.mT * 4**-0.5, -1)
        found.append(
            scores @ rows
            if on.mesh is None  # torch's own kernel has no forward derivative on a CPU
            else F.scaled_dot_product_attention(rows, rows, rows)
        )
        return [forward_ad.unpack_dual(value).tangent for value in found]


@values("jax")
def forward_mode_of_local_tensors(on: On) -> Any:
    x, t = on.put(numbers(8, 4), Shard(0), R), on.put(numbers(8, 4, start=1.0), R, Shard(1))
    with forward_ad.dual_level():
        dual: Any = forward_ad.make_dual(x, t)
        if on.mesh is not None:
            view = dual.to_local(grad_placements=[Shard(0), Partial()]) / 4
            dual = xd.DTensor.from_local(view, on.mesh, [Shard(0), Partial()])
        return forward_ad.unpack_dual(dual * 1).tangent


@values()
def calls_that_torch_refuses_and_xla_takes(on: On) -> Any:
    """Numbers that a dtype does not hold, the difference of bools, shapes that do not fit."""
    x = on.put(numbers(8), Shard(0), R)
    mask = x > 0
    small = on.put(torch.ones(4, 1, 5, dtype=torch.int8))
    wide = on.put(torch.ones(4, 5, dtype=torch.int8))
    calls: list[Callable[[], Any]] = [
        lambda: x.clone().fill_(1j),
        lambda: small.clone().fill_(300),
        lambda: x.masked_fill(mask, 1j),
        lambda: x.index_fill(0, on.put(torch.tensor([1])), 1j),
        lambda: x.clamp(min=1j),
        lambda: torch.full_like(x, 1j),
        lambda: mask - x,
        lambda: mask - 1,
        lambda: -mask,
        lambda: small.clone().ge_(wide),
        lambda: x.as_strided((2, 2), (1, 2), storage_offset=7),
    ]
    found = []
    for call in calls:
        try:
            found.append(torch.tensor(float(call().sum())))
        except RuntimeError:
            found.append(torch.tensor(-1.0))
    return found


@values()
def numbers_in_place_of_tensors(on: On) -> Any:
    x = on.put(numbers(4, 2), Shard(0), R)
    written = x.clone()
    written.copy_(3)  # pyright: ignore[reportArgumentType]
    step = on.compile(lambda v: torch.copysign(v, -3))
    return written, torch.copysign(x, -3), step(x)


@values()
def norms_of_complex_numbers(on: On) -> Any:
    x = on.put(torch.complex(numbers(4, 2), numbers(4, 2, start=2.0)).to(torch.complex64))
    found = [torch.norm(x), torch.norm(x, 2, 0, True), torch.norm(x[0, 0], 2, 0, True)]
    return [(value.dtype == torch.float32, (value * 100).round()) for value in found]


@values()
def a_threshold_in_float64(on: On) -> Any:
    return F.threshold(on.put(numbers(8)), 0.123456789012, 1.200932029667416)


@values("jax")
def truth_over_no_dims(on: On) -> Any:
    x = on.put(numbers(4, 2) > 0, Shard(0), R)
    return torch.any(x, dim=()), torch.all(x, dim=()), torch.sum(x, dim=())


@values("jax")
def a_product_of_two_vectors_in_linear(on: On) -> Any:
    x, w = on.leaf(numbers(4), Shard(0), R), on.leaf(numbers(4, start=1.0))
    return torch.autograd.grad(F.linear(x, w).sin(), (x, w))


@values("jax")
def an_identity_is_written(on: On) -> Any:
    return nn.init.eye_(on.put(numbers(4, 3), Shard(0), R))


@values("jax")
def scaled_gradients_of_fused_optimizers(on: On) -> Any:
    """What GradScaler tells them: a scale, and whether a gradient was infinite."""
    found = []
    for is_infinite in (0.0, 1.0):
        leaf = on.leaf(numbers(4, 2), Shard(0), R)
        optimizer: Any = torch.optim.AdamW([leaf], lr=1e-2, fused=True)
        for step in range(2):
            optimizer.grad_scale = on.put(torch.tensor(8.0, dtype=torch.float32))
            optimizer.found_inf = on.put(torch.tensor(step * is_infinite, dtype=torch.float32))
            optimizer.zero_grad()
            (8 * leaf**3).sum().backward()
            optimizer.step()
        found += [leaf, *(optimizer.state[leaf][name] for name in ("step", "exp_avg"))]
    return found


def error_of(call: Callable[[], Any]) -> str:
    with pytest.raises(RuntimeError) as error:
        call()
    return str(error.value)[:60]


@layouts()
def writes_to_an_expanded_tensor(on: On) -> Any:
    """torch_xla added up what was written to one place."""
    row, rows, index = on.put(numbers(4)), on.put(numbers(2, 4)), on.put(torch.tensor([0, 1]))
    writes = {
        "aten.add_.Tensor": lambda x: x.add_(1),
        "aten.copy_.default": lambda x: x.copy_(row),
        "aten.index_put_.default": lambda x: x.index_put_((index,), rows),
        "aten.index_fill_.int_Scalar": lambda x: x.index_fill_(0, index, 1.0),
        "aten.scatter_.src": lambda x: x.scatter_(0, index[:, None], rows),
        "aten.masked_fill_.Scalar": lambda x: x.masked_fill_(rows[:1] > 0, 1.0),
    }
    found = [error_of(lambda write=write: write(row.expand(3, 4))) for write in writes.values()]
    return [f[:45] for f in found], [f"{op} was to write to a view of shape"[:45] for op in writes]


@values()
def writes_beside_parts_that_are_not_safe(on: On) -> Any:
    """torch_xla made copies of what PyTorch only hides from autograd."""
    found = []
    for parts_of in (
        lambda x: torch.unsafe_chunk(x, 4, 1),
        lambda x: torch.unsafe_split(x, 3),
        lambda x: torch.unsafe_split_with_sizes(x, [3, 5], -1),
    ):
        for is_base in (False, True):
            x = on.put(numbers(8, 8), Shard(0), R).clone()
            parts = parts_of(x)
            (x if is_base else parts[1]).mul_(3)
            found.append([x, *parts])
    return found


@layouts()
def writes_to_windows_that_overlap(on: On) -> Any:
    """torch_xla added up what was written to one place, or left the tensor as it was."""
    row = on.put(numbers(8))
    views = row.unfold(0, 3, 2), row.as_strided((3, 3), (2, 1)), row[None].expand(2, 8)
    found = [error_of(lambda view=view: view.mul_(2)) for view in views]
    plain = numbers(8)
    for each in (row, plain):
        each.unfold(0, 2, 3).mul_(2)
        if xd.get_runtime().name == "jax":  # interleaved, and none of them twice
            each.as_strided((2, 3), (3, 2)).add_(1)
    expected = ["aten.mul_.Tensor was to write to a view"] * 3, plain.tolist()
    return ([f[:39] for f in found], whole(row).tolist()), expected


@layouts("jax")
def writes_that_torch_refuses(on: On) -> Any:
    x, y = on.put(numbers(1, 4)), on.put(numbers(3, 4))
    step = on.compile(lambda a: a.t_() * 1)
    found = [
        bool(error_of(lambda: x.clamp_min_(y))),  # torch 2.15 says so itself
        error_of(lambda: step(y)),
        error_of(lambda: torch.heaviside(x, x.float())),
        error_of(lambda: y @ y.float().mT),
        error_of(lambda: on.compile(torch.tensor_split)(y, on.put(torch.tensor([1])))),
    ]
    return found, [
        True,
        "A compiled step changed the shape of an argument of shape=(3",
        "aten.heaviside.default was called on DTensors of dtypes that",
        "A product of tensors of float64 and float32 was asked for. P",
        "A tensor's value was read on the host while a step was trace",
    ]


# ---------------------------------------------------------------------- steps that fail


@layouts("jax")
def a_step_that_fails_leaves_all_as_it_was(on: On) -> Any:
    weight, host = on.leaf(numbers(8), Shard(0), R), torch.zeros(2)
    (weight * 2).sum().backward()

    def step(x: Any) -> None:
        host.add_(1)
        weight.grad = None
        (weight * x).sum().backward()
        raise ValueError("the step")

    torch.manual_seed(5)
    drawn = torch.get_rng_state()
    with contextlib.suppress(ValueError):
        on.compile(step)(on.put(numbers(8)))
    grad = None if weight.grad is None else weight.grad.tolist()
    same = torch.equal(torch.get_rng_state(), drawn)
    return (grad, host.tolist(), same), ([2.0] * 8, [0.0, 0.0], True)


@values()
def a_copy_outlives_a_donated_buffer(on: On) -> Any:
    x = on.put(numbers(8), Shard(0), R)
    y = on.move(x, Shard(0), R)
    step = on.compile(lambda: x.mul_(2).sum())
    return step(), step(), x, y if on.mesh else numbers(8)


# ---------------------------------------------------------------------- dtypes and strides


@values()
def operands_of_two_dtypes(on: On) -> Any:
    small, signed = torch.tensor([3, 250, 7]), torch.tensor([-2, 3, 1])
    byte, char = on.put(small.to(torch.uint8)), on.put(signed.to(torch.int8))
    long, number = on.put(signed * 2**40), on.put(numbers(3).float())
    mask = on.put(torch.tensor([True, False, True]))
    float64 = on.put(numbers(3))
    added = number.clone()
    added.mul_(float64)
    return [
        torch.maximum(byte, char),
        byte + char,
        byte < char,
        mask | long,
        byte & long,
        torch.remainder(long, number),
        torch.where(mask, long, number),
        torch.where(mask, number, float64),
        long.clamp(min=0.5),
        torch.addcmul(float64, char, long, value=0.5),
        torch.lerp(number, number.double().float(), 0.25),
        added,
    ]


@values()
def sums_of_small_integers(on: On) -> Any:
    x = on.put(torch.tensor([100, 100, 100], dtype=torch.int8))
    return [x.cumsum(0), x.sum(), x.prod(), x.all(), on.put(torch.ones(3).bool()).cumsum(0)]


@values()
def half_precision_keeps_its_dtype(on: On) -> Any:
    x = on.put(torch.tensor([1.0, -2.0, 0.5], dtype=torch.bfloat16))
    return [torch.atan2(x, x + 1), torch.hypot(x, x)]


@values()
def integers_are_shifted(on: On) -> Any:
    x = on.put(torch.tensor([2**62 + 1, -(2**62) - 1, 7, -7, 2**40 + 3]))
    n = on.put(torch.tensor([1, 1, 2, 63, 64]))
    small = on.put(torch.tensor([5, -100, 7], dtype=torch.int8))
    written = x.clone()
    written.bitwise_right_shift_(n)
    return [x >> n, x >> 1, x >> 63, small >> 3, small % 3, 3 // (small + 3), written, small << 2]


@values()
def copies_of_views_are_copies(on: On) -> Any:
    found = []
    copies: list[Callable[[Any], Any]] = [
        lambda x: x.t().contiguous(),
        lambda x: x.t().flatten(),
        lambda x: x.t().reshape(-1),
        lambda x: x.movedim(0, 1).flatten(),
        lambda x: (x.t() + 1).contiguous(),
        lambda x: x.expand(3, 2, 4).reshape(6, 4),
        lambda x: x.flatten(),  # a view
        lambda x: x.t().reshape(4, 2, 1),  # a view
    ]
    for copied in copies:
        x = on.put(numbers(2, 4), R, Shard(1))
        found += [x, copied(x).zero_()]
    return found


@values()
def strides_are_those_of_torch(on: On) -> Any:
    x = on.put(numbers(2, 4, 3), R, Shard(1))
    turned = x.transpose(0, 2)
    changed = x.clone()
    changed.transpose_(0, 1)
    made = [turned, turned + 1, turned.clone(), turned.contiguous(), changed, turned.unsqueeze(1)]
    return [torch.tensor(value.stride()) for value in made]


@values()
def logits_are_clamped(on: On) -> Any:
    return torch.logit(on.put(torch.tensor([0.0, 0.1, 0.4, 1.0])), 0.1)


@values()
def distances_of_any_order(on: On) -> Any:
    x, y = on.put(numbers(2, 4), R, Shard(1)), on.put(numbers(2, 4, start=1.0))
    return [torch.dist(x, y, p) for p in (0, 1, 2, 3, float("inf"), float("-inf"))]


@values()
def rows_are_copied_to_all_rows(on: On) -> Any:
    found = []
    shapes: list[Any] = [((8,), (4, 8)), ((1, 8), (4, 8)), ((1,), (8,)), ((), (8,)), ((5,), (3, 5))]
    for shape, target in shapes:
        for lying in ((R, R), (R, Shard(len(target) - 1)), (Shard(0), R)):
            source = on.put(numbers(*shape), R, Shard(len(shape) - 1) if shape else R)
            found.append(on.put(numbers(*target), *lying).copy_(source))
    return found


@values()
def writes_to_empty_slices(on: On) -> Any:
    x, empty = on.put(numbers(1), R, Shard(0)), on.put(numbers(8, 4), R, Shard(0))
    x[1:] = x
    empty[8:].mul_(2)
    empty[:, 4:].copy_(x)
    return [x, empty, empty[8:].fill_(1).add_(x)]


@values()
def large_powers_of_integers(on: On) -> Any:
    x = on.put(torch.tensor([3, 64, 117, 0, -5, 1], dtype=torch.int32))
    e = on.put(torch.tensor([64, 117, 4097, 0, 101, 2**30], dtype=torch.int32))
    written = x.clone().pow_(e)
    return [x**e, x**64, 3**e, x.to(torch.int8) ** 100, x.long() ** 63, written]


@values()
def values_written_by_strides(on: On) -> Any:
    x, small = on.put(numbers(3, 3)), on.put(torch.arange(4, dtype=torch.int8).reshape(2, 2))
    return [torch.as_strided_scatter(x, small, (2, 2), (3, 1), 1), x]


@values()
def the_dtype_of_a_scaled_number_is_its_own(on: On) -> Any:
    """And what it is scaled by may be too large for it, since torch 2.15."""
    x, exponents = numbers(4), torch.tensor([3, -2, 20, 0])
    return [
        torch.ldexp(on.put(x.to(a)), on.put(exponents.to(b)))
        for a in (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32)
        for b in (torch.int8, torch.int64, torch.float32)
    ]


@values()
def quotients_of_special_values(on: On) -> Any:
    """Signs of zeros among them, by what 1 is divided by them gives."""
    special = [0.0, -0.0, 0.3, -0.3, 2.0, 5.5, -5.5, 6.0, math.inf, -math.inf, math.nan]
    a, b = (
        each.reshape(-1) for each in torch.meshgrid(*[torch.tensor(special)] * 2, indexing="ij")
    )
    found: list[Any] = []
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        x, y = on.put(a.to(dtype)), on.put(b.to(dtype))
        floor = torch.div(x, y, rounding_mode="floor")
        found += [torch.div(x, y, rounding_mode="trunc"), torch.remainder(x, y)]
        found += [floor, 1 / floor, torch.floor_divide(x, -2.5), torch.fmod(x, y)]
    return found


HALF = (torch.bfloat16, torch.float16)


@values()
def nan_of_either_sign_is_the_largest(on: On) -> Any:
    """0 / 0 has a sign on a CPU, by which XLA put it before all numbers."""
    nans = torch.tensor([0x7FC00000, -0x400000], dtype=torch.int32).view(torch.float32)
    x = torch.cat([torch.tensor([1.0, -2.0, math.inf, 0.5, -math.inf, 3.0]), nans])
    found: list[Any] = []
    for dtype in (torch.float32, torch.float64, *HALF):
        y = on.put(x.to(dtype))
        ascending, order = torch.sort(y)
        found += [ascending, order[:6], y.topk(8).values, y.topk(8, largest=False).values]
        found += [torch.sort(y, descending=True).values, torch.kthvalue(y, 7).values]
        found += [torch.searchsorted(ascending[:6], y), torch.msort(y)]
    return found


@values()
def nan_stays_and_infinities_count(on: On) -> Any:
    """XLA's faster extrema on a CPU take the other operand; remainder by an infinity was NaN."""
    special = torch.tensor([0.0, 0.3, -0.3, 2.0, math.inf, -math.inf, math.nan])
    found: list[Any] = []
    for dtype in (torch.float32, *HALF):
        x, y = (each.reshape(-1) for each in torch.meshgrid(special, special, indexing="ij"))
        x, y = on.put(x.to(dtype)), on.put(y.to(dtype))
        found += [torch.maximum(x, y), torch.minimum(x, y), torch.remainder(x, y), F.relu(x)]
        found += [x.clamp(min=-1), x.clamp(max=1), x.clamp(-1, 1), torch.clamp(x, min=y)]
        found += [F.threshold(x, 0.1, 20), F.softshrink(x), F.hardtanh(x), F.relu6(x)]
        found += [x.clamp_min(0.5), x.clamp_max(0.5), torch.nan_to_num(x)]
        found += [F.logsigmoid(x).isnan(), F.logsigmoid(x).isinf()]
    return found


@values()
def gradients_that_are_zero_everywhere(on: On) -> Any:
    """torch makes them plain CPU tensors, of a size alone."""
    found: list[Any] = []
    calls: list[Callable[..., Any]] = [
        lambda x, y: torch.sgn(x),
        lambda x, y: (x * 2).sgn_() + y,
        torch.copysign,
        lambda x, y: torch.copysign(x, y.float()),
        lambda x, y: (x * 1).copysign_(y),
    ]
    for call in calls:
        x = on.leaf(torch.tensor([0.5, -2.0, 0.0, 3.0]), Shard(0), R)
        y = on.leaf(torch.tensor([-1.0, 0.25, -3.0, 1.0]))
        step = on.compile(lambda x, y, call=call: _with_gradients(call(x, y), x, y))
        found += [*_with_gradients(call(x, y), x, y), *step(x, y)]
    return found


def _with_gradients(output: Any, *leaves: Any) -> list[Any]:
    gradients = torch.autograd.grad(output.square().sum() + output.sum(), leaves, allow_unused=True)
    return [output.detach(), *(each for each in gradients if each is not None)]


@values()
def the_nan_of_a_loss_is_in_its_gradient(on: On) -> Any:
    x = on.leaf(torch.tensor([0.3, math.nan, 2.0, -math.inf]))
    y = on.put(torch.tensor([math.nan, 1.0, 3.0, 0.0]))
    losses = [F.smooth_l1_loss(x, y, reduction=how) for how in ("sum", "mean")]
    losses += [F.huber_loss(x, y, reduction="sum"), F.logsigmoid(x)[[0, 2, 3]].exp().sum()]
    return [torch.autograd.grad(loss, x)[0] for loss in losses]


@values("jax")
def the_number_that_follows_in_half_precision(on: On) -> Any:
    x, y = torch.tensor([0.0, 1.0, math.inf, -3.0]), torch.tensor([1.0, 2.0, 0.0, math.nan])
    return [torch.nextafter(on.put(x.to(d)), on.put(y.to(d))) for d in (torch.float32, *HALF)]


@values("jax")
def gradients_of_a_spectrogram(on: On) -> Any:
    """XLA made a program of it that failed when it ran, by what the gradient was weighed with."""

    def step(x: Any, weights: Any) -> Any:
        transform = torch.fft.fft if x.is_complex() else torch.fft.rfft
        spectrum = torch.view_as_real(transform(x.unfold(-1, 16, 4)).transpose(1, 2))
        return torch.autograd.grad((spectrum * weights).sum(), [x])

    complex_x = torch.complex(numbers(10, 100), numbers(10, 100) + 1)
    run = on.compile(step)
    return [
        run(on.leaf(x), on.put(numbers(10, rows, 22, 2), *placements))
        for x, rows in ((complex_x, 16), (numbers(10, 100), 9))
        for placements in ((Shard(1), R), (R, Shard(2)), (R, R))
    ]


@values()
def a_reduction_over_no_dims_is_one_over_all(on: On) -> Any:
    x = on.put(numbers(4, 6), Shard(0), R)
    plain = [torch.sum, torch.mean, torch.std, torch.var, torch.amax, torch.amin]
    found = [op(x, dim=(), keepdim=keepdim) for op in plain for keepdim in (False, True)]
    found += [torch.linalg.vector_norm(x, dim=()), *torch.var_mean(x, dim=(), keepdim=True)]
    return [*found, torch.logsumexp(x, (), True), x.long().sum(dim=())]


@layouts("jax")
def whole_numbers_have_no_deviation(on: On) -> Any:
    whole = on.put(torch.arange(4))
    calls = [lambda: whole.std(), lambda: torch.var(whole, dim=0)]
    return [error_of(call) for call in calls], [
        "std and var only support floating point and complex dtypes"
    ] * 2


@layouts("torch_xla")
def what_torch_xla_asserts_is_an_error(on: On) -> Any:
    cube = on.put(numbers(2, 2, 2))
    return error_of(lambda: cube.t_())[:28], "t_ expects a tensor with <= "


@values("torch_xla")
def a_clone_cut_unevenly_is_computed_on_the_host(on: On) -> Any:
    x = on.leaf(numbers(5, 5) + 3, Shard(0), Shard(1))
    y = x.clone()
    y.polygamma_(1)
    (grad,) = torch.autograd.grad((y * on.put(numbers(5, 5))).sum(), x, create_graph=True)
    penalty = (grad * grad).sum()  # reads the clone of the clone that y was
    return y, grad, *torch.autograd.grad(penalty, x), x


@values("torch_xla")
def one_hot_of_what_is_cut_unevenly(on: On) -> Any:
    """XLA ended the process."""
    classes = on.put(torch.tensor([1, 2, 0]), R, Shard(0))
    return [torch.nn.functional.one_hot(classes, number) for number in (8, -1)]


@values()
def sizes_that_values_decide(on: On) -> Any:
    x, counts = on.put(numbers(3, 4)), on.put(torch.tensor([2, 0, 3]))
    rows = x.repeat_interleave(counts, 0)
    return [rows, counts.repeat_interleave(counts), counts.nonzero(), x[x > 0], counts.bincount()]


@layouts("torch_xla")
def a_part_has_no_storage(on: On) -> Any:
    x = on.put(numbers(4, 4))
    parts = [x[1:], x.t(), on.leaf(numbers(4, 4)).chunk(2)[1]]
    found = [error_of(lambda part=part: part.as_strided((2, 2), (2, 1))) for part in parts]
    found.append(error_of(lambda: torch.as_strided_scatter(x[1:], x[:2, :2], (2, 2), (2, 1))))
    found += [error_of(lambda p=part: p.as_strided((2, 2), (1, 1), 0)) for part in parts]
    return [text[:34] for text in found], ["as_strided was called on a view of"] * 7


@values()
def what_is_no_number_or_infinite(on: On) -> Any:
    z = on.put(
        torch.complex(torch.tensor([1.0, float("nan"), 0.0]), numbers(3)).to(torch.complex64)
    )
    flags, small = (
        on.put(torch.tensor([True, False])),
        on.put(torch.tensor([-128, 0]).to(torch.int8)),
    )
    empty = on.put(torch.zeros(0, 3))
    found = [torch.isnan(z), torch.isneginf(flags), torch.isneginf(small), torch.isposinf(small)]
    return [*found, torch.roll(empty, (1, 2), (0, 1)), *torch.linalg.lu(on.put(numbers(2, 3, 5)))]


@values()
def an_index_on_the_host_is_out_of_range(on: On) -> Any:
    x = on.put(numbers(3, 4), R, Shard(0))
    with pytest.raises(IndexError):
        x[:, torch.tensor([0, 4])]
    with pytest.raises(IndexError):
        x[torch.tensor([-4])] = 1.0
    return x[torch.tensor([-3, 2])]


@values()
def a_view_that_torch_refuses(on: On) -> Any:
    x = on.put(numbers(2, 4))
    return torch.tensor(len(error_of(lambda: x.t().view(8))) > 0)


@values()
def log_ndtr_near_5(on: On) -> Any:
    """JAX's has few digits there."""
    x = on.put(torch.linspace(-12, 12, 49).reshape(7, 7), R, Shard(0))
    return torch.log(-torch.special.log_ndtr(x))


@values("jax")
def the_branch_of_a_logarithm(on: On) -> Any:
    """The imaginary part may be beyond pi."""
    z = on.put(torch.complex(numbers(7, 3), numbers(7, 3, start=1.0)) * 9, R, Shard(0))
    one = on.put(torch.complex(torch.tensor(4.0), torch.tensor(9.0)))
    return torch.logaddexp(z, one), torch.logcumsumexp(z, 0), torch.logcumsumexp(one, 0)


@layouts("jax")
def an_axis_moves_to_another_dim_of_a_mesh_of_six(on: On) -> Any:
    """jaxlib 0.11.2 and 0.12 ended the process."""
    mesh = xd.init_device_mesh("xla", (2, 3), mesh_dim_names=("a", "b"))
    x = xd.distribute_tensor(numbers(6, 12), mesh, [Shard(1), Shard(1)])
    for target in ([Shard(0), Shard(1)], [Shard(1), Shard(0)]):
        moved: Any = xd.compile(lambda x, to=target: x.redistribute(placements=to))(x)
        torch.testing.assert_close(moved.full_tensor().cpu(), numbers(6, 12))
        assert list(moved.placements) == target
    return 0, 0


@values()
def writes_through_strides_with_gaps(on: On) -> Any:
    """torch_xla wrote the places one after the other."""
    new, whole = on.put(numbers(2, 2)), [on.put(numbers(16), R, Shard(0)) for _ in range(4)]
    whole[0].as_strided((2, 2), (1, 8)).copy_(new)
    whole[1].as_strided((16,), (1,)).as_strided((2, 2), (8, 1)).mul_(new)
    shown = whole[2].as_strided((2, 2), (2, 5), 3)
    shown.add_(new)
    x = on.leaf(numbers(3, 3), Shard(1), Shard(1))
    part = on.put(numbers(2, 2), Shard(0), Shard(0))
    scattered = torch.as_strided_scatter(x, part, (2, 2), (1, 4), 1)
    (grad,) = torch.autograd.grad((scattered * on.put(numbers(3, 3))).sum(), x)
    return [*whole, shown, scattered, grad]


@values()
def dtypes_that_are_found_from_both(on: On) -> Any:
    small, bytes_ = (
        on.put(torch.tensor([-100, 100, 7]).to(torch.int8)),
        on.put(torch.tensor([200, 3, 255]).to(torch.uint8)),
    )
    half, brain = on.put(numbers(3, 1).half()), on.put(numbers(3).bfloat16())
    whole = on.put(torch.tensor(3, dtype=torch.int32))
    two = torch.ldexp(whole, on.put(torch.tensor(3.0).bfloat16()))
    return [small.__rsub__(bytes_), torch.clamp_max(half, brain), whole.cumsum(0), two]


@values()
def bools_where_floats_are_asked(on: On) -> Any:
    flags, x = on.put(torch.tensor([True, False, True])), on.leaf(numbers(3))
    (grad,) = torch.autograd.grad(torch.fmax(x, flags).sum(), x)
    targets = on.put(torch.tensor([0, 2, 1]).to(torch.uint8))
    loss = F.cross_entropy(on.put(numbers(3, 3)), targets)
    return [torch.isnan(flags), torch.sgn(flags), grad, loss]


@values()
def norms_of_differences(on: On) -> Any:
    far = torch.dist(
        on.put((numbers(50) * 90).half()), on.put((numbers(50, start=2.0) * 90).half())
    )
    z = on.put(torch.complex(numbers(3), numbers(3, start=1.0)).to(torch.complex64))
    return far.float().round(), torch.dist(z, z * 2j).double().round(decimals=5)


@values()
def logarithms_in_float64(on: On) -> Any:
    x = on.put(numbers(20) ** 2 + 0.5, R, Shard(0))
    return torch.log10(x), torch.log2(x)


@values()
def tangents_of_views(on: On) -> Any:
    """torch_xla had no storage to make them in."""
    with forward_ad.dual_level():
        x = forward_ad.make_dual(on.put(numbers(2, 3)), on.put(numbers(2, 3, start=1.0)))
        z = torch.complex(numbers(3), numbers(3, start=1.0)).to(torch.complex64)
        bent = torch.tanh(forward_ad.make_dual(on.put(z), on.put(z * 1j)))
        strided = x.as_strided((2, 2), (3, 1))
        views = (x.t() * 2, x.t(), strided, bent)
        found: list[Any] = [forward_ad.unpack_dual(value).tangent for value in views]
    return [*found[:3], torch.view_as_real(found[3].cpu()).double().round(decimals=4)]


@values("torch_xla")
def bytes_between_pixels_are_rounded(on: On) -> Any:
    image = on.put((torch.arange(96) * 7 % 251).reshape(2, 3, 4, 4).to(torch.uint8))
    return F.interpolate(image, scale_factor=1.7, mode="bilinear", align_corners=True)


@values("torch_xla")
def a_tensor_on_the_cpu(on: On) -> Any:
    x = on.leaf(numbers(4, 5), Shard(0)) if on.mesh is None else on.leaf(numbers(4, 5), Shard(0), R)
    there = x.to("cpu", torch.float32)
    assert type(there) is torch.Tensor
    there.sum().backward()
    return there, x.grad


@values("jax")
def limits_beyond_the_dtype(on: On) -> Any:
    """A limit that all values keep was an OverflowError; PyTorch 2.9 refuses it."""
    small = on.put(torch.tensor([0, 1, 255]).to(torch.uint8))
    with pytest.raises(RuntimeError):
        small.clamp_min(300)
    return [] if torch.__version__ < "2.15" else [small.clamp(-1, 300), F.hardtanh(small)]


@values("jax")
def a_part_is_scattered_into_at_a_place_of_the_whole(on: On) -> Any:
    """Of every second element others were written to; a place of the whole was refused."""
    x, new = on.put(numbers(2, 3, 3)), on.put(numbers(2, 2))
    second = on.put(numbers(16), Shard(0), R)[::2]
    scattered = [torch.as_strided_scatter(x[1], new, (2, 2), (1, 2), place) for place in (1, None)]
    return [*scattered, torch.as_strided_scatter(second, new, (2, 2), (1, 4), 1)]


@values("jax")
def a_part_is_returned_whose_whole_was_written_to(on: On) -> Any:
    """Autograd's error for such parts, which PyTorch raises where they are used, not returned."""

    def step(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        whole = x.square()
        parts = whole.chunk(2)
        whole[...] = whole * 2
        return parts

    return [part.detach() for part in on.compile(step)(on.leaf(numbers(8), Shard(0), R))]


@values()
def parts_of_complex_numbers(on: On) -> Any:
    """On torch_xla what was written to them was lost, and compiled steps were refused."""
    z = on.put(
        torch.complex(numbers(4, 3), numbers(4, 3, start=1.0)).to(torch.complex64), Shard(0), R
    )
    y = z.clone()
    torch.view_as_real(y).mul_(2)
    y.real.add_(1)
    y.imag[0] = 3
    flat = on.put(numbers(4, 2).float(), Shard(0), R)
    torch.view_as_complex(flat).mul_(2j)
    step = on.compile(lambda z: (torch.view_as_real(z), z.imag, z.abs()))
    return [value.double().round(decimals=5) for value in (y.real, y.imag, flat, *step(z))]


@values()
def pointwise_ops_of_two_floats_in_a_step(on: On) -> Any:
    special = torch.tensor([1.0, -2.0, 0.0, -0.0, float("nan"), float("inf"), 1e200])
    x, y = on.put(special.repeat(7)), on.put(special.repeat_interleave(7), R, Shard(0))
    ops = (torch.copysign, torch.fmin, torch.fmax, torch.hypot, torch.logaddexp, torch.logaddexp2)
    step = on.compile(lambda x, y: [op(x, y) for op in ops])
    found = [*step(x, y), torch.special.xlog1py(x, y), torch.copysign(x, -0.0)]
    return [*found, 1 / found[0], 1 / found[-1]]  # zeros have signs


@values()
def places_to_split_at_on_the_mesh(on: On) -> Any:
    """torch read the memory of that tensor."""
    x, places = on.leaf(numbers(5, 4), R, Shard(0)), on.put(torch.tensor([1, 3]))
    parts = torch.tensor_split(x, places, 0)
    weighed = torch.stack([part.sum() * (number + 1) for number, part in enumerate(parts)])
    return [*parts, *torch.autograd.grad(weighed.sum(), x)]


@values()
def a_tangent_that_torch_makes_of_nothing(on: On) -> Any:
    """Zeros without memory, which ended the process in a compiled step on JAX."""

    def step(x: Any, y: Any, tangent: Any) -> Any:
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(y, tangent)
            return forward_ad.unpack_dual(torch.addr(x, dual, dual, beta=0.0, alpha=0.5)).tangent

    given = (on.put(numbers(3, 3)), on.put(numbers(3)), on.put(numbers(3, start=1.0)))
    return step(*given), on.compile(step)(*given)


@values()
def writes_to_windows(on: On) -> Any:
    """On torch_xla what is in no window became 0."""
    x, y = on.put(numbers(8, 5), Shard(1), Shard(0)), on.put(numbers(8), Shard(0), R)
    z, w = on.put(numbers(2, 7)), on.put(numbers(4, 9))
    x.unfold(1, 2, 2)[0] = 0
    y.unfold(0, 3, 3).mul_(3)
    z.unfold(1, 2, 5)[:, 1] = 4
    w.unfold(1, 1, 3).add_(1)
    return x, y, z, w, w.unfold(0, 2, 2)


@values("torch_xla")
def where_an_extreme_norm_is(on: On) -> Any:
    z = on.put(torch.complex(numbers(3, 5), numbers(3, 5, start=1.0)).to(torch.complex64))
    z.requires_grad_()
    norms = [torch.linalg.vector_norm(z, ord=order) for order in (float("inf"), -float("inf"))]
    grads = [torch.autograd.grad(norm, z)[0] for norm in norms]
    half = on.put((numbers(9) * 8).bfloat16())
    return [torch.view_as_real(grad).double().round(decimals=5) for grad in grads], F.logsigmoid(
        half
    )


@values()
def signs_of_nan(on: On) -> Any:
    """They are 0 in PyTorch, NaN in XLA."""
    x = on.put(torch.tensor([float("nan"), -2.0, 0.0, 3.0]))
    return torch.sign(x), torch.sgn(x), x.clone().sign_(), torch.sign(x.bfloat16())


@values()
def numbers_that_a_dtype_does_not_hold(on: On) -> Any:
    """They wrap around in PyTorch; on JAX an OverflowError came out."""
    x, y = on.put(torch.tensor([253, 1, 7], dtype=torch.uint8)), on.put(torch.arange(3).char())
    return x == -3, x - (-3), torch.sub(x, x, alpha=-3), x > -3, y - 200


@values()
def zeros_without_memory_as_a_gradient(on: On) -> Any:
    """The gradient of a view that is written to, differentiated again: a plain tensor arrived."""
    x, w = on.put(numbers(4) - 0.1).requires_grad_(), on.put(numbers(4, start=2.0))
    y = (x.redistribute(placements=[Shard(0), R]) if isinstance(x, xd.DTensor) else x * 1).clone()
    y.unsqueeze(0).abs_()
    (grad,) = torch.autograd.grad((y * w).sum() + (x.mean() * x).sum(), x, create_graph=True)
    return grad, *torch.autograd.grad(grad.square().sum(), x)


@values()
def diagonals_of_whole_numbers(on: On) -> Any:
    """Cut in the dims of the diagonal XLA's all-reduce on CPU has no "or" of these."""
    x = on.put(torch.arange(15).reshape(3, 5), Shard(1), Shard(0))
    y = on.put(torch.arange(50, dtype=torch.int8).reshape(5, 2, 5), R, Shard(2))
    y.diagonal(1, 0, 2).fill_(-1)
    empty = on.put(torch.zeros(0, 3))
    written = torch.diagonal_scatter(empty, empty.diagonal())
    return x.diagonal(1), torch.diag(x, -1), y, torch.diagonal_copy(y, 0, 0, 2), written


@values()
def sums_over_nothing(on: On) -> Any:
    x, y = on.put(torch.zeros(5, 0)), on.put(torch.zeros(0, dtype=torch.uint8))
    return x.cumsum(1), x.cumprod(1), y.cumsum(0), torch.cumsum(x, 0, dtype=torch.float64)


@values()
def precise_in_float64(on: On) -> Any:
    """torch_xla has eps in float32, and XLA loses digits of log1p."""
    x = on.put(numbers(4, 3, 5), Shard(0), R).requires_grad_()
    mean, variance = on.put(torch.zeros(3)), on.put(torch.ones(3))
    y = F.batch_norm(x, mean, variance, training=True, momentum=0.5, eps=0.6)
    (grad,) = torch.autograd.grad(y.pow(3).sum(), x)
    small = on.put(torch.tensor([1e-9, 3e-4, -1e-7, 0.3, -0.9999]))
    scaled = torch.log1p(small) / small, torch.atanh(small) / small
    return y, mean, variance, grad, *(each * 1e3 for each in scaled)


@values()
def quotients_of_complex_numbers(on: On) -> Any:
    """On torch_xla they were real in local views, and ended the process behind these."""
    x = on.put(torch.complex(numbers(4, 2), numbers(4, 2, start=1.0)).to(torch.complex64))
    local = x.to_local() if isinstance(x, xd.DTensor) else x
    parts = [local / 4, local / (2 + 1j), 1 / local, local / local]
    if isinstance(x, xd.DTensor):
        parts = [xd.DTensor.from_local(part, x.device_mesh, [R, R]) for part in parts]
    whole = [torch.view_as_real(part.resolve_conj()).double().round(decimals=5) for part in parts]
    return *whole, torch.tensor(torch.allclose(x, x * 1))


@values()
def places_of_a_pooled_maximum(on: On) -> Any:
    """On torch_xla they were int32 under the name of int64, and failed where they were cast."""
    x = on.put(numbers(1, 2, 6))
    _, places = F.max_pool1d(x, 3, padding=1, ceil_mode=True, return_indices=True)
    return places, places + 0.5, places == 1e-3


@values()
def dtypes_of_a_local_view(on: On) -> Any:
    """On torch_xla an op took the dtype of one operand."""
    signed, unsigned = numbers(3, 4).mul(9).to(torch.int8), numbers(3, 4).mul(9).abs()
    given = [on.put(each, Shard(1), R) for each in (signed, unsigned.to(torch.uint8))]
    x, y = [each.to_local() if isinstance(each, xd.DTensor) else each for each in given]
    parts = [
        torch.maximum(x, y),
        x + y,
        x < y,
        x.cumsum(0),
        x.clamp(min=0.5),
        torch.where(x < y, x, y),
    ]
    mesh = given[0].device_mesh if isinstance(given[0], xd.DTensor) else None
    lying = [Shard(1), R]
    return [part if mesh is None else xd.DTensor.from_local(part, mesh, lying) for part in parts]


@values()
def zeros_of_the_host_as_a_gradient(on: On) -> Any:
    """A compiled step ended in an AssertionError: the second derivative of a write is zero."""

    def second(x: Any, y: Any) -> Any:
        moved = on.move(x * 1, Shard(0), R)
        moved.transpose(-1, -1).abs_()
        grad = torch.autograd.grad((moved * y).sum() + x.mean(), x, create_graph=True)[0]
        loss = (grad * grad).sum() + (x * x).sum()
        return torch.autograd.grad(loss, x)

    x, y = on.leaf(numbers(2, 3)), on.put(numbers(2, 3, start=1.0))
    return second(x, y), on.compile(second)(x, y)


@values()
def a_cut_row_and_a_split_dim(on: On) -> Any:
    """Shardy ended the process: a dim of one row that is cut, and a reshape of one behind it."""
    x = on.put(numbers(1, 1, 6, 6), Shard(1), Shard(3))
    return on.compile(lambda x: F.pixel_unshuffle(x, 3))(x)


@values("jax")
def complex_numbers_as_bools(on: On) -> Any:
    """Those without a real part were False: in casts, masks, any and all along a dim."""
    x = on.put(torch.tensor([[1j, 1], [0, 2j]]))
    written = on.put(torch.zeros(2, 2, dtype=torch.bool))
    written.copy_(x)
    return x.bool(), x.all(0), x.any(1), torch.where(x.bool(), 1, 0), written


@values("torch_xla")
def gradients_at_a_border(on: On) -> Any:
    """What is clamped had one at the border itself; that of logsigmoid of halves was none."""
    x, half = on.leaf(torch.tensor([-3.0, 0.0, 3.0, 6.0])), on.leaf(numbers(20).bfloat16())
    y = F.relu6(x) * 2 + F.hardsigmoid(x) * 3
    grad = torch.autograd.grad(y.sum(), x)[0]
    of_half = torch.autograd.grad((F.logsigmoid(half) * 2).sum(), half)[0]
    return grad.float().double(), of_half.double().round(decimals=1)


@values()
def second_derivatives_of_solves(on: On) -> Any:
    a, b = numbers(4, 4) + 2 * torch.eye(4), numbers(4, 2, start=1.0)
    x = on.leaf(a)
    found = [*torch.autograd.grad(torch.linalg.det(x.mT), x)]
    for op in (torch.linalg.solve, lambda a, b: torch.linalg.slogdet(a.mT)[1]):
        x, y = on.leaf(a, R, Shard(0)), on.leaf(b)
        (first,) = torch.autograd.grad((op(x, y) ** 2).sum(), x, create_graph=True)
        found += [first, *torch.autograd.grad((first**2).sum(), x)]
    return found


@values("jax")
def powers_of_a_complex_zero(on: On) -> Any:
    x, y = torch.tensor([0j, 0j, 2 + 1j]), torch.tensor([1 - 7j, 0.5 + 3j, 0j])
    return on.put(x).pow(on.put(y))


@values()
def what_torch_says_of_wrong_calls(on: On) -> Any:
    z = torch.ones(2, dtype=torch.complex64)
    calls: list[Callable[[], Any]] = [
        lambda: on.put(numbers(2, 3)).argsort(dim=-7),
        lambda: on.put(torch.empty(1, 0)).amax(-1),
        lambda: torch.maximum(on.put(z), on.put(z)),
        lambda: on.put(z).abs_(),
    ]
    kinds = []
    for call in calls:
        try:
            call()
        except (IndexError, TypeError, RuntimeError) as error:
            kinds.append(type(error))
    return torch.tensor([kinds.count(kind) for kind in (IndexError, TypeError, RuntimeError)])


@values()
def joined_along_a_dim_that_nothing_has(on: On) -> Any:
    nothing = on.put(torch.empty(0))
    return [
        torch.cat([nothing, nothing], dim=6),
        torch.view_copy(on.put(numbers(5, 5, 5)).transpose(0, 1), (25, 5)),
        on.put(torch.empty(0, 5))[torch.tensor([], dtype=torch.int64)],
    ]


@values()
def logarithms_in_place(on: On) -> Any:
    x = numbers(3, 4).abs() + 0.1
    return [on.put(x).log10_(), on.put(x).log2_(), on.put(torch.tensor([-0.0, 3.0])).sign_()]


@values()
def gradients_through_a_mask(on: On) -> Any:
    x = on.leaf(numbers(10, 7), Shard(0), Shard(1))
    (g,) = torch.autograd.grad((x[x > 0] ** 2).sum() + (x[x[:, 0] > 0] ** 3).sum(), x)
    y = on.put(numbers(10, 7))
    y[y[:, 1] > 0] = on.put(numbers(7, start=2.0))
    return g, y


@values()
def an_index_that_is_cut_unevenly(on: On) -> Any:
    at = on.put(torch.tensor([[2, 0], [3, 2]]), Shard(1), Shard(0))
    rows = on.put(numbers(5, 5), Shard(1), R)
    return F.embedding(at, rows, padding_idx=2), rows[at], rows.index_select(1, at[0])


@values()
def writes_through_strides_of_what_has_a_graph(on: On) -> Any:
    leaf = on.leaf(numbers(16), Shard(0), R)
    a, b, c, d = (leaf * factor for factor in (1.0, 2.0, 3.0, 4.0))
    a.reshape(4, 4).fill_diagonal_(3)
    b.as_strided((2, 2), (2, 1))[0] = 0
    c.as_strided((2, 3), (6, 2), 1).neg_()
    d.view(2, 8).fill_diagonal_(2)
    loss = (a * b).sum() + (b * c * d).sum()
    return loss, *torch.autograd.grad(loss, leaf)


@values()
def what_is_copied_into_copies_of_views(on: On) -> Any:
    x = on.put(numbers(4, 4), Shard(0), R)
    copies = [x.clone() for _ in range(4)]
    torch.select_copy(copies[0], 0, 1).copy_(on.put(numbers(4)))
    parts: Any = torch.unbind_copy(copies[1])
    parts[2].copy_(on.put(numbers(4)))
    torch.view_copy(copies[2], (2, 8)).copy_(on.put(numbers(2, 8)))
    torch.diagonal_copy(copies[3]).copy_(on.put(numbers(4)))
    return copies


@values()
def writes_over_nan_through_an_expanded_tensor(on: On) -> Any:
    x, y = on.put(torch.full((6,), torch.nan), Shard(0), R), on.put(torch.tensor([torch.nan]))
    x.expand_as(x).zero_()
    y.expand(1, 1).fill_(3)
    return x, y


# ---------------------------------------------------------------------- bug reports of others


def _called(step: Callable[[], Any], calls: int = 3) -> list[Any]:
    return [whole(step()) for _ in range(calls)]


@values("jax")
def data_that_is_assigned_after_a_write(on: On) -> Any:
    """Weights that are clipped or projected after each update; the old memory was updated again."""
    weight = on.leaf(torch.ones(8, 2), Shard(0), R)

    def step() -> Any:
        weight.data.add_(1)
        weight.data = weight.data.clamp(-9, 9) * 2
        return weight.detach().sum()

    return _called(on.compile(step), 4)


@values("jax")
def views_that_were_read_before_the_first_call(on: On) -> Any:
    """What was read was a constant of the program; writes to it were lost, and to its base."""
    base = on.put(numbers(6, 4), Shard(0), R)
    row, flat, turned = base[1], base.view(-1), base.T
    seen = [whole(each.sum()) for each in (row, flat, turned)]

    def step(x: Any) -> Any:
        row.add_(x)
        return row.sum() * x, flat.sum(), turned.cumsum(0)

    compiled, x = on.compile(step), on.put(torch.tensor(0.5))
    for _ in range(3):
        seen += [whole(each) for each in (*compiled(x), row, turned)]
        base.mul_(2)
    return seen


@values("jax")
def gradients_that_are_read_between_two_calls(on: On) -> Any:
    """One that is a view in memory, as a broadcast weight's is, lost what was added to it."""
    scale = on.leaf(numbers(4))
    compiled, seen = on.compile(lambda x: (x * scale).square().sum().backward()), []
    for i in range(4):
        compiled(on.put(numbers(8, 4, start=i), Shard(0), R))
        seen.append(whole(scale.grad.norm()))
    return seen, whole(scale.grad)


@values("jax")
def gradients_that_the_caller_keeps(on: On) -> Any:
    """Those of one task had the values of the next; so had views of them, and what steps store."""
    weight, scale = on.leaf(numbers(4, 2), Shard(0), R), on.leaf(numbers(2))
    kept: Any = Kept()
    kept.steps = []

    def step(x: Any) -> Any:
        (x @ weight * scale).square().mean().backward()
        kept.steps.append(scale.grad)

    compiled, tasks = on.compile(step), []
    for i in range(6):
        compiled(on.put(numbers(8, 4, start=i), Shard(0), R))
        if i % 3 != 2:  # else what is there is added to
            grad: Any = weight.grad
            tasks.append((grad, grad.detach() if i else None, grad[1:]))
            weight.grad = scale.grad = None
    found = [[whole(each) for each in task] for task in tasks], [whole(g) for g in kept.steps]
    return *found, whole(weight.grad), whole(scale.grad)


@layouts("jax")
def gradients_that_nobody_keeps_are_filled_again(on: On) -> Any:
    weight: Any = on.leaf(numbers(4, 2), Shard(0), R)
    compiled = on.compile(lambda x: (x @ weight).square().mean().backward())
    x, ids = on.put(numbers(8, 4), Shard(0), R), set[int]()
    for i in range(9):
        compiled(x)
        grad: Any = weight.grad
        whole(grad.norm() + grad.detach().sum())
        del grad
        if i % 3 == 2:
            ids.add(id(weight.grad))
            weight.grad = None
    return [len(ids), compiled.stats()["traces"]], [1, 2]


@values("jax")
def gradients_that_are_not_there_yet(on: On) -> Any:
    """That there was none was no guard: an update that was called too early never came again."""
    weight: Any
    other: Any
    weight, other = on.leaf(numbers(4, 2), Shard(0), R), on.leaf(numbers(4, 2, start=3))
    optimizer = torch.optim.SGD([weight, other], lr=0.5)

    def norms() -> Any:
        return sum(
            (p.grad.norm() for p in (weight, other) if p.grad is not None), on.put(torch.zeros(()))
        )

    def train(x: Any, first: bool) -> Any:
        optimizer.zero_grad()
        loss = (x @ (weight if first else other)).square().mean()
        loss.backward()
        return loss.detach()

    steps = [on.compile(each) for each in (norms, optimizer.step, train)]
    seen, x = [], on.put(numbers(8, 4), Shard(0), R)
    for i in range(5):
        seen += [whole(steps[0]()), whole(weight), whole(other)]
        steps[1]()
        seen.append(steps[2](x, i % 2 == 0))
        seen += [weight.grad is None, other.grad is None]
    return seen


@values("jax")
def gradients_that_are_there_when_a_step_makes_its_own(on: On) -> Any:
    """Those of micro steps before a full step, which drops its gradients, were left out."""
    weight: Any = on.leaf(numbers(4, 2), Shard(0), R)
    optimizer = torch.optim.SGD([weight], lr=0.5)

    def micro(x: Any) -> None:
        (x @ weight).square().mean().backward()

    def full(x: Any) -> None:
        micro(x)
        optimizer.step()
        optimizer.zero_grad()

    micro_step, full_step, seen = on.compile(micro), on.compile(full), []
    for i in range(6):
        x = on.put(numbers(8, 4, start=i), Shard(0), R)
        for each in [(), (micro_step,), (micro,), (micro_step, micro)][i % 4]:
            each(x)
        full_step(x)
        seen += [whole(weight), weight.grad is None]
    return seen


@values("jax")
def gradients_that_others_add_to(on: On) -> Any:
    """Where that made one lie otherwise, JAX refused it in the next call."""
    weight, x = (
        on.leaf(numbers(4, 3), Shard(0), Shard(1)),
        on.put(numbers(8, 4), Shard(0), Shard(1)),
    )
    compiled, seen = on.compile(lambda: (x @ weight).square().mean().backward()), []
    for _ in range(4):
        compiled()
        (weight * weight).sum().backward()
        seen.append(whole(weight.grad))
    return seen


@values("jax")
def state_that_grows(on: On) -> Any:
    """JAX refused the third call, whose cache had another shape than the program's."""
    kept: Any = Kept()
    kept.cache, kept.last = on.put(numbers(1, 4)), on.put(numbers(4, 4), Shard(0), R)

    def step(x: Any) -> Any:
        total = kept.cache.sum(0) + kept.last.sum()
        kept.cache, kept.last = torch.cat([kept.cache, x[:1]]), x * 2
        return total

    compiled = on.compile(step)
    batches = [
        on.put(numbers(n, 4, start=i), Shard(0), R) for i, n in enumerate((4, 4, 4, 3, 5, 4))
    ]
    return [compiled(x) for x in batches], kept.cache, kept.last


def _parameters_of(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


@layouts("jax")
def a_rate_that_changes_where_parameters_are_walked_over(on: On) -> Any:
    """Lightning clips so: each step of a schedule was traced anew."""
    weight: Any = on.leaf(numbers(4, 2), Shard(0), R)
    optimizer = torch.optim.SGD([weight], lr=0.5)

    def step(x: Any) -> None:
        (x @ weight).square().mean().backward()
        nn.utils.clip_grad_norm_(_parameters_of(optimizer), 0.1)
        optimizer.step()
        optimizer.zero_grad()

    compiled, x = on.compile(step), on.put(numbers(8, 4), Shard(0), R)
    for _ in range(3):
        compiled(x)
        optimizer.param_groups[0]["lr"] *= 0.5
    return [compiled.stats()["traces"]], [1]


@values("jax")
def a_state_that_is_read_where_parameters_are_walked_over(on: On) -> Any:
    weight: Any = on.leaf(numbers(4, 2), Shard(0), R)
    optimizer = torch.optim.SGD([weight], lr=0.5)

    def step(x: Any) -> Any:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                x = x + parameter.detach().sum() * optimizer.state[parameter]["scale"]
        return x

    compiled, seen = on.compile(step), []
    for scale in (1.0, 2.0, 3.0):
        optimizer.state[weight]["scale"] = scale
        seen.append(compiled(on.put(torch.zeros(2))))
    return seen


def _updated_alone(on: On) -> tuple[Any, list[Any]]:
    weight: Any = on.leaf(numbers(4, 2), Shard(0), R)
    scale: Any = on.leaf(numbers(2))
    optimizer = torch.optim.SGD([weight, scale], lr=0.5, momentum=0.9)

    def update() -> Any:
        norm = nn.utils.clip_grad_norm_([weight, scale], 0.1)
        optimizer.step()
        return norm

    compiled, seen = on.compile(update), []
    for i in range(6):
        (on.put(numbers(8, 4, start=i), Shard(0), R) @ weight * scale).square().mean().backward()
        seen += [compiled(), whole(weight), whole(weight.grad)]
        optimizer.zero_grad(set_to_none=i != 3)
    return compiled, seen


@values("jax")
def updates_of_gradients_that_others_make(on: On) -> Any:
    return _updated_alone(on)[1]


@layouts("jax")
def updates_of_gradients_that_others_make_are_traced_twice(on: On) -> Any:
    """Gradients were known by their memory, which is another one after each zero_grad()."""
    return list(_updated_alone(on)[0].stats()["reasons"][1:]), ["a gradient was replaced"]


class Assigning(torch.optim.Optimizer):
    """Gives its state other tensors in each step."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state, grad = self.state[parameter], parameter.grad
                state["mean"] = state.get("mean", torch.zeros_like(grad)) * 0.9 + grad * 0.1
                state["last"] = grad.clone()
                parameter.sub_(state["mean"] * group["lr"])


def _updated(on: On, keeps: bool) -> tuple[Any, list[Any], list[Any]]:
    weight: Any = on.leaf(numbers(4, 2), Shard(0), R)
    optimizer, kept = Assigning([weight]), list[Any]()

    def step(x: Any) -> Any:
        optimizer.zero_grad()
        loss = (x @ weight).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    compiled, losses = on.compile(step), []
    for i in range(6):
        losses.append(compiled(on.put(numbers(8, 4, start=i), Shard(0), R)))
        state = optimizer.state[weight]
        kept += [state["mean"], state["last"]] if keeps else []
        if i == 4:
            state["mean"] = state["mean"] * 0
    return compiled, [*losses, weight, *optimizer.state[weight].values()], kept


@values("jax")
def state_that_optimizers_assign(on: On) -> Any:
    return _updated(on, keeps=True)[1:]


@layouts("jax")
def state_that_optimizers_assign_is_traced_twice(on: On) -> Any:
    """It was traced in each call, as in many optimizers of other libraries."""
    reasons = _updated(on, keeps=False)[0].stats()["reasons"]
    return list(reasons[1:]), ["the call before made new state"]


class Kept:
    """What a step stores."""


@values("jax")
def tensors_that_share_memory_are_stored(on: On) -> Any:
    """From the second call on they were those of the first, or those of the call before were."""
    kept: Any = Kept()
    kept.rows = []

    def step(x: Any) -> Any:
        kept.given, kept.whole, kept.row = x.detach(), x * 2, x[1:, 1]
        kept.part, kept.turned = kept.whole[1:], {"t": kept.whole.T}
        kept.rows.append((x + 1)[-1])
        kept.weight = nn.Parameter(x + 2)
        return x.sum()

    compiled, seen, base = on.compile(step), [], on.put(numbers(6, 4), Shard(0), R)
    for i, x in enumerate((base, base * 2, base[1:], base[2:])):
        compiled(x)
        parts = kept.whole, kept.part, kept.turned["t"]
        kept.whole.mul_(3)
        x.sub_(i)
        names = whole(kept.weight), kept.weight.requires_grad, isinstance(kept.weight, nn.Parameter)
        seen.append([*map(whole, (kept.given, kept.row, *parts)), *names])
    return seen, [whole(row) for row in kept.rows]


class Attributes(dict[str, Any]):
    """A dict as many programs have one."""

    __getattr__ = dict.__getitem__


class Rows(tuple[Any, ...]):
    """A tuple of a class of its own."""

    __slots__ = ()


class Restored(list[Any]):
    """Says how it is made again, where it has attributes."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


def _functions(x: Any) -> Any:
    calls = 0

    def product(times: int = 1, *, factor: Any = x) -> Any:
        nonlocal calls
        calls += 1
        return factor * times if times < 3 else product(times - 1) + x

    return product, lambda: torch.tensor(calls)


def _objects(x: Any) -> list[Any]:
    """Return objects of many kinds that hold `x`; the last one does so where `_inside` looks."""
    module = nn.Linear(4, 4)
    module.weight = nn.Parameter(x * 1)
    distribution = torch.distributions.Normal(x, 1.0, validate_args=False)
    error, counts = ValueError(x), Counter(a=x)
    lists = UserList([x, Restored([x]), *_functions(x)])
    held = SimpleNamespace(x=x), Kept(), Attributes(x=x), Rows((x, 1)), lists
    vars(held[1])["x"] = x
    return [*held, {x}, frozenset([x]), partial(torch.add, x), lambda: x, module, error, counts,
            distribution, OrderedDict(x=x), ChainMap({"x": x})]  # fmt: skip


def _inside(objects: list[Any]) -> list[Any]:
    space, kept, attributes, rows, listed, *others = objects
    one, frozen, added, function, module, error, counts, distribution, ordered, chain = others
    found = space.x, kept.x, attributes["x"], rows[0], listed[0], *one, *frozen, added.args[0]
    restored, product, calls = listed[1:]
    found = *found, restored[0], product(), product(4), calls()
    of_others = function(), module.weight, error.args[0], counts["a"], distribution.loc
    return [whole(each) for each in (*found, *of_others, ordered["x"], chain["x"])]


@values("jax")
def objects_of_any_kind_are_made_for_each_run(on: On) -> Any:
    """Those of a call, stored or returned, had the values of the call after it."""
    kept: Any = Kept()
    kept.all = []

    def step(x: Any) -> Any:
        kept.last = _objects(x * 2)
        kept.all.append(_objects(x * 3))
        return [_objects(x * 4), Attributes(x=x)]

    compiled, results, seen = on.compile(step), [], []
    for i in range(3):
        results.append(compiled(on.put(numbers(4, 4, start=i), Shard(0), R)))
        seen.append(kept.last)
    of_results = [(_inside(objects), whole(given["x"])) for objects, given in results]
    return [[*map(_inside, seen)], [*map(_inside, kept.all)], of_results]


@values("jax")
def arguments_like_containers(on: On) -> Any:
    """Their tensors are inputs; JAX's and PyTorch's own errors came of them."""
    compiled = on.compile(lambda batch, rows: batch["x"] * rows[0] + rows[1] * batch.y)
    x, y = on.put(numbers(4, 2), Shard(0), R), on.put(numbers(2))
    calls = [compiled(Attributes(x=x * i, y=y), Rows((y, i))) for i in range(1, 4)]
    return calls


@values("jax")
def data_that_has_another_name(on: On) -> Any:
    """The tensor that was assigned stayed what it was; the one it was assigned to, too."""
    weight = nn.Parameter(on.put(numbers(8, 2), Shard(0), R))
    kept: Any = Kept()

    def step(x: Any) -> Any:
        new = weight.data * 0.5
        weight.data = kept.new = new
        new.add_(1)
        return (x @ weight).sum().detach()

    compiled, x = on.compile(step), on.put(numbers(4, 8), Shard(0), R)
    return [compiled(x), compiled(x), whole(weight), whole(kept.new)]


@layouts("jax")
def data_that_a_step_assigns(on: On) -> Any:
    """Manual updates and moving averages, as many write them, were traced in each call."""
    weight: Any = on.leaf(numbers(8, 2), Shard(0), R)
    average, payload = on.put(numbers(8, 2), Shard(0), R), weight._local_tensor

    def step(x: Any) -> Any:
        (weight * x).square().sum().backward()
        weight.data = weight.data - 0.1 * weight.grad
        average.data = average.data * 0.9 + weight.data * 0.1
        weight.grad = None

    def failing() -> Any:
        weight.data = weight.data * 2
        raise ValueError("as intended")

    compiled, x = on.compile(step), on.put(numbers(8, 2), Shard(0), R)
    for _ in range(4):
        compiled(x)
    with contextlib.suppress(ValueError):
        on.compile(failing)()
    return [compiled.stats()["traces"], weight._local_tensor is payload], [1, True]


@layouts("jax")
def a_shape_that_a_step_changes_in_place(on: On) -> Any:
    """It was changed in the trace only; what the step itself has made may change."""

    def refused(change: Callable[[Any], Any]) -> str:
        x = on.put(numbers(4, 2), Shard(0), R)
        return error_of(lambda: on.compile(lambda: change(x))())[:60]

    x = on.put(numbers(4, 2), Shard(0), R)
    own = on.compile(lambda: [v.unsqueeze_(0).shape[0] for v in (x.detach(), x.view(-1), x * 2)])
    changes = (lambda t: t.t_(), lambda t: t.unsqueeze_(0), lambda t: t.swapaxes_(0, 1))
    expected = "A compiled step changed the shape of a tensor from before th"
    return [*map(refused, changes), own()], [expected] * 3 + [[1, 1, 1]]


@values("jax")
def lists_with_one_tensor_twice(on: On) -> Any:
    """Each entry sees what the one before it has written."""
    gradient, x = on.put(torch.ones(8, 2), Shard(0), R), on.put(numbers(8, 2), Shard(0), R)
    torch.ops.aten._foreach_mul_.Scalar([gradient, gradient], 3.0)
    torch.ops.aten._foreach_mul_.List([x[:4], x[4:]], [x[4:], x[:4]])
    results = [gradient, x]
    for foreach in (None, True):
        weight = on.leaf(torch.ones(8, 2), Shard(0), R)
        with pytest.warns(UserWarning, match="duplicate parameters"):
            optimizer = torch.optim.SGD([weight, weight], lr=0.1, momentum=0.9, foreach=foreach)

        def step(weight: Any = weight, optimizer: Any = optimizer) -> Any:
            weight.sum().backward()
            nn.utils.clip_grad_norm_([weight, weight], 2.0, foreach=True)
            optimizer.step()
            optimizer.zero_grad()
            return weight.detach().sum()

        results += _called(on.compile(step))
    return results


@values("jax")
def writes_that_are_hidden_from_autograd(on: On) -> Any:
    """``.data`` counted for autograd as ``detach()`` does: the backward was refused."""
    x = on.leaf(numbers(8, 3), Shard(0), R)

    def step() -> Any:
        y = x * x
        x.data.add_(1)
        x.data[2:4].mul_(3)
        y.sum().backward()
        gradient, x.grad = x.grad, None
        return gradient, x.detach().clone()

    compiled = on.compile(step)
    return [step(), compiled(), compiled(), x._version]


@values()
def gradients_of_what_is_written_to_a_plain_tensor(on: On) -> Any:
    """They came back as plain tensors, and so did the optimizer's moments."""
    weight = on.leaf(numbers(5, 3), Shard(0), R)
    rows, sums, column = torch.zeros(6, 3), torch.zeros(5, 3), torch.zeros(5, 2)
    rows[:5] = weight
    sums.add_(weight)
    column[:, 1] = weight[:, 0] * 2
    (rows.square().sum() + sums.sin().sum() + column.cos().sum()).backward()
    assert type(weight.grad) is type(weight)
    return weight.grad


@values()
def sequences_of_several_lengths(on: On) -> Any:
    """They were packed into plain tensors of the host, or not at all."""
    several = [on.leaf(numbers(length, 3), R, Shard(0)) for length in (2, 5, 3)]
    padded = pad_sequence(several, batch_first=True, padding_value=-1.0)
    padded.square().sum().backward()
    sequences = pack_sequence(several, enforce_sorted=False)
    assert type(padded.data) is type(sequences.data) is type(several[0])
    return padded, several[0].grad, sequences.data, sequences.batch_sizes


@values("jax")
def packed_sequences(on: On) -> Any:
    """Compiled, their lengths are Python's numbers or a tensor of the host."""
    model, lengths = on.model(nn.RNN(3, 4, bidirectional=True)), torch.tensor([2, 3, 1])
    x = on.put(numbers(3, 3, 3), R, Shard(1))

    def step(x: Any) -> Any:
        sequences = pack_padded_sequence(x, lengths, enforce_sorted=False)
        outputs, _ = pad_packed_sequence(model(sequences)[0], padding_value=0.5, total_length=4)
        outputs.square().sum().backward()
        gradients = [p.grad for p in model.parameters()]
        model.zero_grad()
        return outputs.detach(), gradients

    return on.compile(step)(x)


@layouts("jax")
def lengths_of_sequences_in_a_program(on: On) -> Any:
    x, lengths = on.put(numbers(6, 4, 3)), torch.tensor([6, 4, 4, 1])
    step = on.compile(lambda x, lengths: pack_padded_sequence(x, lengths).data)
    calls = (
        lambda: step(x, lengths),
        lambda: pack_padded_sequence(x, torch.tensor([1, 2, 3, 4])),
        lambda: pack_padded_sequence(x, torch.tensor([6])),
    )
    return [error_of(call)[:33] for call in calls], [
        "A tensor's value was read on the ",
        "`lengths` array must be sorted in",
        "Expected `len(lengths)` to be equ",
    ]


@values("jax")
def rows_that_a_loss_ignores(on: On) -> Any:
    """NaN: 0 times infinity in the loss, and 0 / 0 in gradients where all are ignored."""
    logits = numbers(5, 7)
    logits[:, 0] = -torch.inf
    weight = on.put(torch.ones(7), Shard(0), R)
    targets = on.put(torch.tensor([0, 1, 2, 0, 4])), on.put(torch.zeros(5, dtype=torch.int64))

    def step(x: Any, target: Any) -> Any:
        losses = [
            F.cross_entropy(x, target, weight, ignore_index=0, reduction=reduction)
            for reduction in ("none", "sum", "mean")
        ]
        (losses[0].sum() + losses[1] + F.cross_entropy(x, target, ignore_index=0)).backward()
        gradient, x.grad = x.grad, None
        return losses, gradient

    x, compiled = on.leaf(logits, Shard(0), Shard(1)), on.compile(step)
    return [run(x, target) for target in targets for run in (step, compiled)]


class State:
    """A state that steps assign."""

    def __init__(self, on: On) -> None:
        first, second = on.put(numbers(4, 3), Shard(0), R), on.put(numbers(4, 3) + 1, Shard(0), R)
        self.pair: Any = (first, second)
        self.table: Any = {"a": first * 2, "b": second * 2}
        self.nested: Any = {"a": [first, (second, 2)]}
        self.latest, self.before = first * 3, second * 3
        self.logs: dict[str, list[Any]] = {}


def pair_by_place(state: State, x: Any) -> Any:
    state.pair = (state.pair[1] * 0.5 + x, state.pair[0])
    return state.pair[0].sum()


def pair_taken_apart(state: State, x: Any) -> Any:
    hidden, cell = state.pair
    state.pair = ((hidden * 0.5 + x).detach(), (cell + hidden).detach())
    return cell.sum()


def table_made_anew(state: State, x: Any) -> Any:
    state.table = {"a": state.table["b"] + x, "b": state.table["a"] * 0.5}
    return state.table["a"].sum()


def nested_in_a_table(state: State, x: Any) -> Any:
    first, (second, number) = state.nested["a"]
    state.nested = {"a": [second + x, (first * number, number)]}
    return (first + second).sum()


def latest_moves_on(state: State, x: Any) -> Any:
    state.latest, state.before = x * 2, state.latest
    return x.sum()


def list_of_a_name(state: State, x: Any) -> Any:
    state.logs.setdefault("loss", []).append(x.sum())
    return x.sum()


STATE_STEPS = (
    pair_by_place,
    pair_taken_apart,
    table_made_anew,
    nested_in_a_table,
    latest_moves_on,
    list_of_a_name,
)


@values("jax")
def states_that_are_assigned_whole(on: On) -> Any:
    """A tuple, a dict, a tensor that moves on to another name: traced in each call."""
    results = []
    for step in STATE_STEPS:
        state, compiled = State(on), on.compile(step)
        for number in range(5):
            results.append(whole(compiled(state, on.put(numbers(4, 3) + number, Shard(0), R))))
        results += [whole(leaf) for leaf in tree_leaves(vars(state))]
    return results


@layouts("jax")
def traces_of_states_that_are_assigned_whole(on: On) -> Any:
    traces = []
    for step in STATE_STEPS:
        state, compiled = State(on), on.compile(step)
        for _ in range(5):
            compiled(state, on.put(torch.ones(4, 3)))
        traces.append(compiled.stats()["traces"])
    return traces, [2] * len(STATE_STEPS)


@values("jax")
def rows_of_a_table_that_grew_too_long(on: On) -> Any:
    """Embedding(max_norm=) had no lowering."""
    model = on.model(nn.Embedding(10, 4, max_norm=1.5))
    tokens = on.put(torch.tensor([[1, 2], [5, 1], [9, 0]]), Shard(0), Shard(1))

    def step(tokens: Any) -> Any:
        model(tokens).square().sum().backward()
        gradient, model.weight.grad = model.weight.grad, None
        return gradient

    compiled = on.compile(step)
    return [step(tokens), compiled(tokens), model.weight]


@values()
def a_padding_mask_on_the_fast_path_of_an_encoder(on: On) -> Any:
    """torch makes nested tensors where the padding stands at the end."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = on.model(nn.TransformerEncoder(layer, 2, enable_nested_tensor=on.mesh is not None))
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    with torch.no_grad():
        x = on.put(numbers(2, 5, 8), Shard(0), R)
        return model.eval()(x, src_key_padding_mask=on.put(padding, Shard(0), R))


@values()
def powers_of_a_vector(on: On) -> Any:
    """torch writes them into a plain tensor."""
    x = on.leaf(numbers(5), Shard(0), R)
    powers = torch.vander(x, 3), torch.vander(x, N=2, increasing=True), torch.vander(x.detach())
    assert type(powers[0].detach()) is type(x)
    return powers


@layouts()
def copies_are_what_the_tensor_was(on: On) -> Any:
    """copy.copy shared no memory, deepcopy dropped gradients, both what Python had put there."""
    found = []
    tensors: Any = on.leaf(numbers(4)), nn.Parameter(on.put(numbers(4)))
    for tensor in tensors:
        tensor.tag = ["decay"]
        tensor.square().sum().backward()
        shallow, deep = copy.copy(tensor), copy.deepcopy(tensor)
        read = pickle.loads(pickle.dumps(tensor))
        copies = (shallow, deep, read)
        before = whole(tensor)
        with torch.no_grad():
            tensor.mul_(2)
        found += [
            [
                torch.equal(whole(each), before * n)
                for each, n in ((shallow, 2), (deep, 1), (read, 1))
            ],
            [isinstance(each, nn.Parameter) for each in copies],
            [each.requires_grad and each.is_leaf for each in copies],
            [each.tag == ["decay"] and each.tag is not tensor.tag for each in copies],
            [each.grad is not None and each.grad is not tensor.grad for each in copies],
        ]
    kinds = [[False] * 3, [True] * 3]
    rest = [[True] * 3, [False, True, True], [False, True, False]]
    return found, [part for kind in kinds for part in ([True] * 3, kind, *rest)]


@layouts("jax")
def programs_of_a_name_that_alternates(on: On) -> Any:
    """Among shapes, placements or parts of a tensor, a name was traced in each call."""
    x = on.put(numbers(8, 4), Shard(0), R)
    alternatives = (
        (x, x[:4] * 1),
        (x, on.move(x, R, R)),
        (x, (x * 1).requires_grad_()),
        x.split(4),
        ((x, x + 1), (x[:4] * 1, x[:4] * 2)),
    )
    traces = []
    for values in alternatives:
        holder: Any = SimpleNamespace()
        step = on.compile(lambda of: sum(t.sum() for t in tree_leaves(of.x)))
        for number in range(9):
            holder.x = values[number % 2]
            step(holder)
        traces.append(step.stats()["traces"] <= 4)
    return traces, [True] * len(alternatives)


@layouts("jax")
def a_tensors_own_data_is_assigned(on: On) -> Any:
    """``p.data -= ...`` reads, writes and assigns it: each call was traced, inside and outside."""
    weight, plain, x = on.leaf(numbers(4, 3), Shard(0), R), numbers(4, 3), on.put(numbers(5, 4))

    def gradient() -> Any:
        weight.grad = None
        (x @ weight).square().sum().backward()
        return weight.grad

    def step() -> Any:
        weight.data -= 0.1 * gradient()

    inside, outside = on.compile(step), on.compile(gradient)
    for _ in range(3):
        inside()
        weight.data -= 0.1 * outside()
        for _ in range(2):
            plain -= 0.2 * numbers(5, 4).T @ (numbers(5, 4) @ plain)
    is_right = torch.allclose(whole(weight), plain)
    return [is_right, inside.stats()["traces"], outside.stats()["traces"]], [True, 1, 1]


@values("jax")
def another_dtype_after_a_compiled_step(on: On) -> Any:
    """Module.to swaps tensors, which torch refuses where something refers to them weakly."""
    model, x = on.model(nn.Linear(4, 3)), on.put(numbers(5, 4), Shard(0), R)

    def step(x: Any) -> Any:
        loss = model(x).square().mean()
        model.zero_grad()
        loss.backward()
        return loss.detach()

    compiled = on.compile(step)
    first = [whole(compiled(x)), whole(compiled(x))]
    model.float()
    second = whole(compiled(x.float()))
    model.double()
    return [*first, second.dtype == torch.float32, compiled(x), model.weight.grad]


@layouts()
def memory_that_others_read(on: On) -> Any:
    """share_memory() and DLPack ended the process: a DTensor has no memory on the host."""
    weight = on.leaf(numbers(6), Shard(0), R)
    with pytest.raises(DistributeError, match="no other process can open"):
        on.model(nn.Linear(3, 2)).share_memory()
    x = weight.detach()
    copies = torch.from_dlpack(x), torch.from_numpy(np.from_dlpack(x))
    sizes = len(pickle.dumps(weight)), weight.data_ptr() and len(pickle.dumps(weight))
    same = [torch.equal(each, whole(x)) for each in copies]
    return [*same, sizes[0] == sizes[1]], [True] * 3


@values("jax")
def settings_of_an_optimizer_that_was_loaded(on: On) -> Any:
    """SGD has no state by which it was seen, and its rate was read where it had been."""
    weight = on.leaf(torch.ones(8, 2), Shard(0), R)
    optimizer = torch.optim.SGD([weight], lr=0.1)

    def step() -> Any:
        weight.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        return weight.detach().sum()

    compiled, results = on.compile(step), []
    for rate in (0.1, 0.5, 0.25):
        state = optimizer.state_dict()
        state["param_groups"][0]["lr"] = rate
        optimizer.load_state_dict(state)
        results.append(whole(compiled()))
    return results


@dataclass
class Batch:
    """What a loop sets as an attribute before each call."""

    x: Any
    y: Any
    number: int = 0


BATCHES = {
    "in a dict": (lambda x, y, k: {"x": x, "y": y}, lambda b: b["x"] * b["y"]),
    "walked": (lambda x, y, k: {"x": x, "y": y}, lambda b: sum(v.sin() for v in b.values())),
    "in a list": (lambda x, y, k: [x, [y, {"z": y + 1}]], lambda b: b[0] * b[1][0] + b[1][1]["z"]),
    "in a dataclass": (Batch, lambda b: b.x * b.y),
    "in an object": (lambda x, y, k: UserDict({"x": x, "y": y}), lambda b: b["x"] * b["y"]),
    "written to": (lambda x, y, k: {"x": x, "y": y}, lambda b: b["x"].mul_(2) + b.pop("y", 0)),
    "kept": (lambda x, y, k: {"x": x, "y": y}, lambda b: b.setdefault("z", b["x"] - 1) * 2),
}


def calls_with_batches(on: On, make: Any, use: Any, place: Any) -> tuple[list[Any], Any]:
    """Set another batch as an attribute for each of three calls."""
    results, compiled = [], on.compile(lambda: use(place.batch))
    for k in range(3):
        x, y = (on.put(numbers(4, 3) + k + i, Shard(0), R) for i in (0, 0.5))
        place.batch = make(x, y, k)
        results += [whole(each).tolist() for each in (compiled(), x, y)]
    return results, compiled


@layouts("jax")
def batches_that_are_set_as_attributes(on: On) -> Any:
    """Of dicts, lists and objects set from outside each call was traced."""
    found: dict[str, Any] = {}
    for called, (make, use) in BATCHES.items():
        place: Any = type("Place", (), {}) if called == "walked" else SimpleNamespace()
        results, compiled = calls_with_batches(on, make, use, place)
        expected, _ = calls_with_batches(On(None), make, use, SimpleNamespace())
        is_right = torch.allclose(torch.tensor(results), torch.tensor(expected))
        found[called] = compiled.stats()["traces"], is_right
    return found, dict.fromkeys(BATCHES, (2, True))


@values("jax")
def batches_of_one_tensor_under_two_names(on: On) -> Any:
    results, place = [], SimpleNamespace(batch=None, other=None)

    def step() -> Any:
        return place.batch["x"].add_(1) * place.batch["y"] - place.other["x"] * place.other["k"]

    compiled = on.compile(step)
    for k in (0, 1, 2, 0):
        x, y = (on.put(numbers(4, 3) + k + i, Shard(0), R) for i in (0, 0.5))
        place.batch = {"x": x, "y": y if k < 1 else x, "k": 2}
        place.other = place.batch if k > 1 else {"x": y, "k": k % 3}
        results += [whole(each) for each in (compiled(), x, y)]
    return results


@values("jax")
def tangents_where_the_other_factor_is_infinite(on: On) -> Any:
    """What has no tangent has a zero that stays one; compiled, it was an ordinary one: NaN."""
    base, exponent = on.put(torch.tensor([0.0, 0.5, 2.0])), on.put(torch.tensor(0.18))
    host = torch.tensor([0.0, 0.5, 2.0])

    def step(base: Any, exponent: Any) -> Any:
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(exponent, torch.ones_like(exponent))
            other = torch.autograd.forward_ad.make_dual(torch.tensor(0.18), torch.tensor(1.0))
            results = torch.pow(base, dual), torch.float_power(base, dual), torch.pow(host, other)
            return [torch.autograd.forward_ad.unpack_dual(each).tangent for each in results]

    return on.compile(step)(base, exponent)


@values("jax")
def rows_by_indices_that_are_cut_unevenly_as_the_rows_are(on: On) -> Any:
    """XLA's partitioner failed in its own verifier."""
    table, cube = on.put(numbers(11, 6), R, Shard(1)), on.put(numbers(6, 4, 9), R, Shard(1))
    places = on.put(torch.arange(15).reshape(3, 5) * 3 % 11, Shard(0), Shard(1))
    read = on.compile(lambda i: (F.embedding(i, table), table[i], cube[i % 6], cube[:, :, i % 9]))
    return read(places)


@layouts("jax")
def copies_of_views_lie_one_after_the_other(on: On) -> Any:
    x = on.put(numbers(1, 2, 3))
    copies = torch.transpose_copy(x, 1, 2), torch.permute_copy(x, (2, 0, 1)), torch.t_copy(x[0])
    return [copy.is_contiguous() for copy in copies], [True] * 3


@layouts("jax")
def transforms_of_a_compiled_step(on: On) -> Any:
    """They ended in errors about storages, and broke all steps that were compiled afterwards."""
    x = on.put(torch.ones(4))
    step = on.compile(lambda x: x.tanh() * 2)

    def dual() -> Any:
        with torch.autograd.forward_ad.dual_level():
            return step(torch.autograd.forward_ad.make_dual(x, x))

    calls = (
        lambda: torch.func.jvp(step, (x,), (x,)),
        lambda: torch.func.vmap(step)(x),
        lambda: torch.func.grad(lambda x: step(x).sum())(x),
        dual,
    )
    found = [error_of(call)[:60] for call in calls]
    tangent = on.compile(lambda x: torch.func.jvp(torch.tanh, (x,), (x,))[1])(x)
    return [*found, round(float(tangent[0]), 4)], [
        "A compiled step was called inside of torch.func's jvp. Its p",
        "A compiled step was called inside of torch.func's vmap. Its ",
        "A compiled step was called inside of torch.func's grad. Its ",
        "A compiled step was called with a tangent. Its program has n",
        0.42,
    ]


@values()
def numbers_in_a_list(on: On) -> Any:
    """torch.tensor, which reads them with Python's dispatch key left out, met a key without it."""
    x = on.put(numbers(4, 6), Shard(0), Shard(1)).requires_grad_()
    losses = [x.sum().detach(), x.detach().mean(), 2.0]
    total = torch.tensor(losses), torch.as_tensor(losses[:2]), torch.tensor([[losses[0]], [1.0]])
    return *total, x.new_tensor(losses), torch.DoubleTensor(losses)


@layouts()
def tensors_made_by_the_oldest_constructor(on: On) -> Any:
    """torch.distributions call it with a size: an error about a dispatch key."""
    x = on.put(numbers(4, 3).abs() + 0.5, Shard(0), R)
    made = x.new(torch.Size([2, 3])), x.new(2), x.new()
    sample = torch.distributions.Laplace(x, x).sample((5,))
    lies = [isinstance(each, xd.DTensor) for each in (*made, sample)]
    shapes = [tuple(each.shape) for each in made]
    return [lies, shapes, x.new([1, 2]).tolist(), x.new(x) is x], [
        [True] * 4,
        [(2, 3), (2,), (0,)],
        [1.0, 2.0],
        True,
    ]


@layouts("jax")
def a_plain_parameter_beside_others_in_a_compiled_step(on: On) -> Any:
    """Its update was refused as a value that is read, without a word of the parameter."""
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    on.model(model[0])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(x: Any) -> None:
        model(x).square().mean().backward()
        optimizer.step()

    message = error_of(lambda: on.compile(step)(on.put(numbers(8, 4))))
    return message, "A compiled step wrote what it computes on the mesh to a plai"


def averaged(parameters: Any, states: Any, k: int) -> None:
    """Evaluate with other weights, as who averages them does."""
    kept = [p.data for p in parameters]
    for p in parameters:
        p.data = p.data * 0.5
    if k % 2:
        for p, data in zip(parameters, kept, strict=True):
            p.data = data


def exchanged(parameters: Any, states: Any, k: int) -> None:
    first, second = parameters
    first.data, second.data = second.data, first.data


def tied(parameters: Any, states: Any, k: int) -> None:
    first, second = parameters
    second.data = first.data if k == 2 else second.data.clone()


def of_moments(parameters: Any, states: Any, k: int) -> None:
    for state in states:
        state["momentum_buffer"].data = state["momentum_buffer"].data * 0.5


DATA_CHANGES = (averaged, exchanged, tied, of_moments)


def training_with_other_data(on: On, change: Any, only_optimizer: bool) -> tuple[list[Any], Any]:
    """Train, and give parameters or moments other data after each step."""
    parameters = [on.leaf(numbers(4, 4) + k, Shard(0), R) for k in range(2)]
    optimizer = torch.optim.SGD(parameters, 0.1, momentum=0.9)
    x, first, results = on.put(numbers(2, 4)), parameters[0], []

    def step() -> None:
        if not only_optimizer:
            (x @ first @ parameters[1]).square().mean().backward()
        optimizer.step()

    compiled = on.compile(step)
    for k in range(5):
        for p in parameters:
            p.grad = torch.ones_like(p.detach()) * (k + 1)
        compiled()
        change(parameters, optimizer.state.values(), k)
        results += [whole(p) for p in parameters]
    return results, compiled


@values("jax")
def data_that_are_replaced_between_calls(on: On) -> Any:
    """Of an optimizer's state, and of parameters that only it knows, the old ones were trained."""
    return [
        training_with_other_data(on, change, only_optimizer)[0]
        for change in DATA_CHANGES
        for only_optimizer in (True, False)
    ]


@layouts("jax")
def traces_of_data_that_are_replaced_between_calls(on: On) -> Any:
    found = [
        training_with_other_data(on, change, only)[1].stats()["traces"] <= 4
        for change in (averaged, exchanged, of_moments)
        for only in (True, False)
    ]
    return found, [True] * 6


@values("jax")
def gradients_divided_by_how_often_an_index_comes(on: On) -> Any:
    """An uneven shard of indices counted its padding as the first one."""
    indices = torch.tensor([[0, 1, 3], [2, 1, 0], [3, 3, 1], [0, 2, 2], [1, 1, 1]])
    found = []
    for placements in ([R, Shard(1)], [Shard(0), Shard(1)], [Shard(0), Shard(0)], [R, R]):
        weight, put = on.leaf(numbers(6, 3)), on.put(indices, *placements)

        def step(weight: Any, put: Any) -> Any:
            rows = F.embedding(put, weight, scale_grad_by_freq=True)
            return torch.autograd.grad(rows.square().sum(), weight)[0]

        found += [whole(step(weight, put)), whole(on.compile(step)(weight, put))]
    return found


@values("jax")
def greatest_divisors_of_the_smallest_number(on: On) -> Any:
    """It has no opposite: the loop for them never ended."""
    found = []
    for dtype in (torch.int8, torch.int16, torch.int32, torch.int64):
        least = torch.iinfo(dtype).min
        a = on.put(
            torch.tensor([least, least, least, 6, 0, -6, least, 12], dtype=dtype), Shard(0), R
        )
        b = on.put(torch.tensor([3, least, 0, 4, 0, 9, 12, -8], dtype=dtype), Shard(0), R)
        found += [whole(torch.gcd(a, b)), whole(torch.lcm(a, b)), whole(torch.gcd(b, a))]
    return found


@values("jax")
def memory_of_a_whole_tensor(on: On) -> Any:
    """full_tensor() had none to read: np.from_dlpack gave what lay at address 0."""
    whole_one = on.put(numbers(5, 3), Shard(0), Shard(1))
    whole_one = whole_one if on.mesh is None else whole_one.full_tensor()
    copies = [torch.from_numpy(np.from_dlpack(whole_one)), torch.from_dlpack(whole_one)]
    saved = safetensors.torch.load(safetensors.torch.save({"w": whole_one}))["w"]
    made = [whole_one.new_tensor([1, 2]), whole_one.new([0.5]), whole_one.new(2, 3).zero_()]
    text = f"{whole_one.sum():.4f}"
    return [*copies, saved, *made, torch.tensor(float(text))]


@layouts("jax")
def counting_an_uneven_view(on: On) -> Any:
    """The first device's number was everybody's: a mean by it was wrong."""
    view = on.put(numbers(5, 2), Shard(0), R).to_local()
    even = on.put(numbers(4, 2), Shard(0), R).to_local()
    refusals = [error_of(view.numel), error_of(lambda: len(view))]
    counted = torch.ones_like(view).sum()
    total = xd.DTensor.from_local(counted, on.mesh, [Partial(), R]).full_tensor().item()
    said = "{} was called on an uneven local view, whose sizes by dim are"
    expected = [said.format(what)[:60] for what in ("numel()", "len()")]
    return [refusals, total, even.numel(), len(even)], [expected, 10, 4, 2]


@layouts("jax")
def as_strided_of_an_argument_that_is_a_view(on: On) -> Any:
    """A compiled step is given the part alone, and read from its beginning."""
    part = on.put(numbers(8), Shard(0), R)[3:6]
    steps = (
        lambda view: torch.as_strided(view, (2,), (1,), 0),
        lambda view: torch.as_strided_copy(view, (2,), (1,), storage_offset=0),
    )
    refusals = [error_of(partial(on.compile(step), part)) for step in steps]
    refusals += [error_of(partial(step, part)) for step in steps]
    return refusals, ["as_strided was called with size=(2,), stride=(1,), storage_o"] * 4


@values("jax")
def ldexp_by_a_complex_number(on: On) -> Any:
    exponent = on.put(torch.tensor([5 + 1j, -2 + 0j, 8 - 2j, 0j]))
    return torch.ldexp(on.put(numbers(4)), exponent), torch.ldexp(on.put(numbers(4)), exponent.real)


@layouts("jax")
def poison_in_the_largest_of_a_bag(on: On) -> Any:
    """An index out of range gave a plausible number, where the indices are cut among devices."""
    weight, offsets = on.put(numbers(10, 5)), on.put(torch.tensor([0, 0, 3]))
    bags = on.compile(lambda indices: F.embedding_bag(indices, weight, offsets, mode="max"))
    found = whole(bags(on.put(torch.tensor([5, 2, 5, 5, 97]), R, Shard(0))))
    return found.isnan().any(1).tolist(), [False, False, True]


@values("jax")
def gradient_of_a_loss_of_no_rows(on: On) -> Any:
    losses: list[Any] = []
    for loss in (F.mse_loss, F.huber_loss, F.smooth_l1_loss):
        x = on.leaf(numbers(0, 4))
        losses.append(loss(x, on.put(numbers(0, 4))))
        losses[-1].backward()
        losses.append(x.grad)
    return losses


@layouts("jax")
def what_to_write_for_a_mask_in_a_compiled_step(on: On) -> Any:
    x, told = on.put(numbers(8), Shard(0), R), list[bool]()
    for step in (lambda x: x[x > 0].sort(), lambda x: x.add(1)[x > 0].unique()):
        try:
            on.compile(step)(x)
        except RuntimeError as error:
            told.append("Else write torch.where(mask, x, 0)" in str(error))
    return told, [True, True]
