"""Random numbers: the same however a tensor lies, repeated where torch repeats them, else fresh."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import Replicate, Shard
from torch.utils.checkpoint import checkpoint

import xla_dtensor as xd
from xla_dtensor.errors import CompileError
from xla_dtensor.runtimes import Runtime

Op = Callable[[Any], Any]
PLACEMENTS: tuple[list[Any], ...] = (
    [Replicate(), Replicate()],
    [Shard(0), Replicate()],
    [Replicate(), Shard(1)],
    [Shard(0), Shard(1)],
    [Shard(1), Shard(0)],
    [Shard(0), Shard(0)],
)
OPS: dict[str, Op] = {
    "rand": torch.rand_like,
    "randn": torch.randn_like,
    "randint": lambda x: torch.randint_like(x, 3, 100),
    "normal_": lambda x: x.clone().normal_(),
    "uniform_": lambda x: x.clone().uniform_(-1, 1),
    "exponential_": lambda x: x.clone().exponential_(2.0),
    "random_": lambda x: x.clone().random_(10),
    "bernoulli": lambda x: torch.bernoulli(x * 0.5),
    "bernoulli_": lambda x: x.clone().bernoulli_(0.3),
    "multinomial": lambda x: torch.multinomial(x, 5, replacement=True),
    "dropout": lambda x: F.dropout(x, 0.5),
    "dropout1d": lambda x: F.dropout1d(x, 0.5),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.5, training=True),
}
# torch_xla has these on the host only, where a compiled step cannot go.
EAGER_OPS: dict[str, Op] = {
    **OPS,
    "cauchy_": lambda x: x.clone().cauchy_(),
    "geometric_": lambda x: x.clone().geometric_(0.4),
    "log_normal_": lambda x: x.clone().log_normal_(),
    "multinomial without replacement": lambda x: torch.multinomial(x, 5),
    "normal": lambda x: torch.normal(x, x),
    "normal of std": lambda x: torch.normal(2.0, x),
    "poisson": lambda x: torch.poisson(x * 3),
    "rrelu": lambda x: F.rrelu(-x, training=True),
}

# What follows the draw is arithmetic, of which XLA may fuse a product and a sum, or not;
# exponential_ differs only where LLVM does not optimize (tests/hosts.py).
ROUNDED = ("normal", "normal of std", "log_normal_", "exponential_")


def source(shape: tuple[int, ...] = (10, 7)) -> torch.Tensor:
    return torch.linspace(0.1, 1, shape[0] * shape[1]).reshape(shape)


def drawn(mesh: xd.DeviceMesh, op: Op, placements: Any, **put: Any) -> torch.Tensor:
    """Run `op` on the source, after seeding; return the whole result."""
    x: Any = xd.distribute_tensor(source(**put), mesh, placements)
    torch.manual_seed(5)
    return op(x).full_tensor().cpu()


@pytest.fixture
def ones(mesh: xd.DeviceMesh) -> Any:
    x = xd.distribute_tensor(torch.ones(16, 16), mesh, [Shard(0), Replicate()])
    return x.requires_grad_()


def block(x: torch.Tensor) -> torch.Tensor:
    return F.dropout(x, 0.5).sin()


# ---------------------------------------------------------------------- however a tensor lies


@pytest.mark.thorough
@pytest.mark.parametrize("name", EAGER_OPS)
def test_values_are_the_same_under_every_placement(mesh: xd.DeviceMesh, name: str) -> None:
    op = EAGER_OPS[name]
    expected = drawn(mesh, op, PLACEMENTS[0])
    for placements in PLACEMENTS[2:]:
        found = drawn(mesh, op, placements)
        if name in ROUNDED:
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
        else:
            assert torch.equal(found, expected), placements
    assert expected.unique().numel() > 1


def test_values_in_a_program_are_the_same_under_every_placement(mesh: xd.DeviceMesh) -> None:
    step = xd.compile(lambda x: [op(x) for op in OPS.values()])

    def values(placements: Any) -> list[torch.Tensor]:
        x: Any = xd.distribute_tensor(source(), mesh, placements)
        torch.manual_seed(5)
        return [value.full_tensor().cpu() for value in step(x)]

    expected = values(PLACEMENTS[0])
    for placements in (PLACEMENTS[3], PLACEMENTS[5]):
        for name, found, value in zip(OPS, values(placements), expected, strict=True):
            rounding = 1e-6 if name in ROUNDED else 0
            torch.testing.assert_close(found, value, rtol=rounding, atol=rounding)


@pytest.mark.thorough
@pytest.mark.parametrize("placements", PLACEMENTS[1:], ids=str)
@pytest.mark.parametrize("shape", [(16, 8), (10, 7), (3, 5)], ids=str)
def test_factories_draw_the_same_under_every_placement(
    mesh: xd.DeviceMesh, placements: list[Any], shape: tuple[int, ...]
) -> None:
    # Normal numbers are made by logarithms and roots, which the quick compiler of the tests rounds
    # by the size of a shard. By XLA's usual compiler all bits were equal.
    for make, rounding in ((xd.rand, 0.0), (xd.randn, 2.4e-7)):
        whole = []
        for lies in (PLACEMENTS[0], placements):
            torch.manual_seed(2)
            whole.append(make(shape, device_mesh=mesh, placements=lies).full_tensor().cpu())
        torch.testing.assert_close(*whole, rtol=rounding, atol=0.0)


@pytest.mark.parametrize("name", ["rand", "dropout"])
def test_devices_with_the_same_part_hold_the_same_values(mesh: xd.DeviceMesh, name: str) -> None:
    for placements in ([Replicate(), Replicate()], [Replicate(), Shard(1)]):
        x: Any = xd.distribute_tensor(source((8, 8)), mesh, placements)
        result = OPS[name](x)
        whole = result.full_tensor().cpu()
        shards = result.addressable_shards()
        assert len(shards) == 8
        assert all(torch.equal(shard.data, whole[shard.index]) for shard in shards)


@pytest.mark.parametrize("placements", PLACEMENTS[1:5], ids=str)
@pytest.mark.parametrize("compiled", [False, True])
def test_dropout_drops_the_same_in_the_backward(
    mesh: xd.DeviceMesh, placements: list[Any], compiled: bool
) -> None:
    def step(x: Any) -> Any:
        y = F.dropout(x, 0.25)
        return y.detach(), torch.autograd.grad(y.sum(), x)[0]

    x: Any = xd.distribute_tensor(torch.ones(10, 7), mesh, placements).requires_grad_()
    y, grad = (xd.compile(step) if compiled else step)(x)
    # Of a 1 it makes 0 or 1 / 0.75, which is its slope as well.
    assert torch.equal(y.full_tensor().cpu(), grad.full_tensor().cpu())
    assert y.full_tensor().cpu().unique().tolist() == pytest.approx([0, 1 / 0.75])


def test_dropout_in_attention_drops_the_same_under_every_placement(mesh: xd.DeviceMesh) -> None:
    def attention(x: Any) -> Any:
        heads = x.reshape(1, 2, 8, 4)
        return F.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.5)

    expected = drawn(mesh, attention, PLACEMENTS[0], shape=(16, 4))
    for placements in PLACEMENTS[1:4]:
        found = drawn(mesh, attention, placements, shape=(16, 4))
        torch.testing.assert_close(found, expected)


LIKES: dict[str, Op] = {
    "rand": torch.rand_like,
    "randn": torch.randn_like,
    "zeros": torch.zeros_like,
    "ones": torch.ones_like,
    "empty": torch.empty_like,
    "full": lambda x: torch.full_like(x, 3.0),
}


@pytest.mark.parametrize("name", LIKES)
@pytest.mark.parametrize("placements", PLACEMENTS[1:5], ids=str)
def test_like_another_lies_like_the_other(
    mesh: xd.DeviceMesh, name: str, placements: list[Any]
) -> None:
    x: Any = xd.distribute_tensor(source((16, 8)), mesh, placements)
    y = LIKES[name](x)
    assert y.placements == x.placements
    assert y.xla_sharding() == x.xla_sharding()


# ---------------------------------------------------------------------- repeated and fresh


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint_repeats_the_dropout_of_the_forward(ones: Any, use_reentrant: bool) -> None:
    first: Any = checkpoint(block, ones, use_reentrant=use_reentrant)
    second: Any = checkpoint(block, ones, use_reentrant=use_reentrant)
    (first.sum() + 100 * second.sum()).backward()
    kept = [(y.detach().cpu() != 0).float() for y in (first, second)]
    assert not torch.equal(*kept)
    # Where the forward kept a 1, it became 2, and sin has the slope cos(2) there.
    expected = (kept[0] + 100 * kept[1]) * 2 * torch.tensor(2.0).cos()
    torch.testing.assert_close(ones.grad.cpu(), expected)


def test_checkpoint_in_a_program_repeats_the_dropout(ones: Any) -> None:
    def step(x: torch.Tensor) -> Any:
        y: Any = checkpoint(block, x, use_reentrant=False)
        (grad,) = torch.autograd.grad(y.sum(), x)
        return y.detach(), grad

    compiled = xd.compile(step)
    results = [compiled(ones) for _ in range(3)]
    assert all(torch.equal(y.cpu() != 0, grad.cpu() != 0) for y, grad in results)
    assert not torch.equal(results[0][0].cpu(), results[1][0].cpu())
    assert not torch.equal(results[1][0].cpu(), results[2][0].cpu())


def test_seeding_the_runtime_repeats(runtime: Runtime, ones: Any) -> None:
    runtime.manual_seed(3)
    first, after = torch.rand_like(ones).cpu(), torch.rand_like(ones).cpu()
    runtime.manual_seed(3)
    again = torch.rand_like(ones).cpu()
    runtime.manual_seed(4)
    other = torch.rand_like(ones).cpu()
    assert torch.equal(again, first)
    assert not torch.equal(after, first)
    assert not torch.equal(other, first)


def test_seeding_torch_repeats(ones: Any) -> None:
    values = []
    for number in (0, 1, 0):
        torch.manual_seed(number)
        values.append((torch.rand_like(ones).cpu(), torch.randn_like(ones).cpu()))
    assert torch.equal(values[0][0], values[2][0])
    assert torch.equal(values[0][1], values[2][1])
    assert not torch.equal(values[0][0], values[1][0])


def test_seeding_torch_repeats_a_compiled_step(ones: Any) -> None:
    step = xd.compile(torch.rand_like)
    step(ones)
    traced = step.stats()["traces"]
    values = []
    for number in (0, 0, 1):
        torch.manual_seed(number)
        values.append([step(ones).cpu() for _ in range(2)])
    assert all(torch.equal(a, b) for a, b in zip(values[0], values[1], strict=True))
    assert not torch.equal(*values[0])
    assert not torch.equal(values[0][0], values[2][0])
    assert step.stats()["traces"] == traced


def test_drawing_on_the_cpu_does_not_change_what_the_devices_draw(ones: Any) -> None:
    torch.manual_seed(0)
    expected = torch.rand_like(ones).cpu()
    torch.manual_seed(0)
    torch.rand(3)
    assert torch.equal(torch.rand_like(ones).cpu(), expected)


def test_what_a_draw_takes_from_the_cpu_generator(ones: Any, runtime: Runtime) -> None:
    torch.manual_seed(0)
    if runtime.name == "jax":
        torch.randint(2**63 - 1, ())
    expected = torch.get_rng_state()
    torch.manual_seed(0)
    torch.rand_like(ones)
    assert torch.equal(torch.get_rng_state(), expected)


def test_a_generator_of_the_users_own_decides(ones: Any, runtime: Runtime) -> None:
    def values(seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            return torch.stack([ones.clone().normal_(generator=generator).cpu() for _ in range(2)])

    before = runtime.get_rng_state()
    first = values(3)
    assert torch.equal(values(3), first)
    assert not torch.equal(values(4), first)
    assert not torch.equal(first[0], first[1])
    if runtime.name == "jax":
        assert torch.equal(runtime.get_rng_state(), before)


@pytest.mark.only_on("jax")
def test_a_generator_in_a_program_is_refused(ones: Any) -> None:
    generator = torch.Generator()
    step = xd.compile(lambda x: x.detach().clone().normal_(generator=generator))
    with pytest.raises(CompileError, match="every call of the program would repeat the numbers"):
        step(ones)


# ---------------------------------------------------------------------- distributions


def test_distributions_are_those_of_torch(mesh: xd.DeviceMesh) -> None:
    torch.manual_seed(0)
    whole = torch.full((64, 64), 0.6)
    x: Any = xd.distribute_tensor(whole, mesh, [Shard(0), Shard(1)])
    for name in ("randint", "random_", "geometric_", "log_normal_", "normal", "poisson", "rrelu"):
        found, expected = EAGER_OPS[name](x).full_tensor().cpu(), EAGER_OPS[name](whole)
        assert found.dtype == expected.dtype
        assert abs(found.mean() - expected.mean()) < 4 * expected.std() / 64 * 1.5, name
        smaller = torch.minimum(found.std(), expected.std())
        assert smaller > (0.2 if name == "log_normal_" else 0.8) * expected.std(), name


def test_draws_without_replacement_are_distinct_and_possible(mesh: xd.DeviceMesh) -> None:
    weights = torch.tensor([[1.0, 0.0, 2.0, 3.0], [0.0, 5.0, 1.0, 1.0]]).repeat(4, 1)
    x: Any = xd.distribute_tensor(weights, mesh, [Shard(0), Replicate()])
    sample: Any = torch.multinomial(x, 3)
    found = sample.full_tensor().cpu()
    assert [sorted(row) for row in found.tolist()] == [[0, 2, 3], [1, 2, 3]] * 4
    assert found.dtype == torch.int64


@pytest.mark.parametrize(
    ("dtype", "most"),
    [(torch.float32, 2**24), (torch.int64, 2**63 - 1), (torch.uint8, 255), (torch.bool, 1)],
)
def test_random_fills_the_range_of_a_dtype(
    mesh: xd.DeviceMesh, dtype: torch.dtype, most: int
) -> None:
    x: Any = xd.distribute_tensor(torch.zeros(32, 32, dtype=dtype), mesh, [Shard(0), Shard(1)])
    found = x.random_().full_tensor().cpu()
    assert 0 <= found.min().item() < most / 10
    assert most * 0.9 < found.max().item() <= most


@pytest.mark.only_on("jax")
@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("seed", [1, 5])
def test_fork_rng_puts_the_devices_state_back(
    mesh: xd.DeviceMesh, is_compiled: bool, seed: int
) -> None:
    x = xd.distribute_tensor(torch.ones(16), mesh)
    step = xd.compile(lambda x: F.dropout(x, 0.5)) if is_compiled else lambda x: F.dropout(x, 0.5)
    torch.manual_seed(1)
    expected = [step(x).tolist() for _ in range(3)]
    torch.manual_seed(1)
    found, validated = [], []
    for _ in range(3):
        found.append(step(x).tolist())
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            validated.append(step(x).tolist())
        torch.rand(3)
    assert found == expected
    assert validated == [validated[0]] * 3


@pytest.mark.only_on("jax")
@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_state_that_is_set_again_repeats_and_goes_on(
    mesh: xd.DeviceMesh, is_compiled: bool
) -> None:
    def step(x: Any) -> Any:
        state = torch.get_rng_state()
        first = F.dropout(x, 0.5)
        torch.set_rng_state(state)
        return first, F.dropout(x, 0.5), F.dropout(x, 0.5)

    step = xd.compile(step) if is_compiled else step
    x = xd.distribute_tensor(torch.ones(64), mesh)
    state = torch.get_rng_state()
    calls = [[each.tolist() for each in step(x)] for _ in range(2)]
    torch.set_rng_state(state)
    assert [each.tolist() for each in step(x)] == calls[0]
    assert all(first == again != later for first, again, later in calls)
    assert calls[0][2] != calls[1][0]


@pytest.mark.only_on("jax")
def test_the_hosts_numbers_are_those_of_pytorch_whichever_call_is_traced(
    mesh: xd.DeviceMesh,
) -> None:
    def step(x: Any) -> Any:
        # What is computed again draws again, on the mesh and on the host.
        y = checkpoint(lambda x: F.dropout(x, 0.5) * torch.rand(16), x, use_reentrant=False)
        torch.rand_like(x.detach())
        y.sum().backward()
        return torch.rand(2)

    x = xd.distribute_tensor(torch.ones(16), mesh).requires_grad_()
    torch.manual_seed(7)
    expected = [(torch.rand(16), torch.rand(2), torch.randperm(5))[1:] for _ in range(3)]
    for is_traced_before in (False, True):
        compiled = xd.compile(step)
        if is_traced_before:
            compiled(x)
        torch.manual_seed(7)
        for numbers, places in expected:
            torch.testing.assert_close(compiled(x), numbers)
            assert torch.equal(torch.randperm(5), places)
