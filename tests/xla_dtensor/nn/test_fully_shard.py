"""fully_shard: where parameters lie, what training gives, and what is communicated for it."""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

import xla_dtensor as xd
from xla_dtensor.errors import (
    ArgumentTypeError,
    DistributeError,
    LocalViewError,
    UnsupportedOpError,
)
from xla_dtensor.runtimes import Runtime

R = Replicate()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 64)
        self.second = nn.Linear(64, 16)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.last = nn.Linear(16, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(x + self.scale * self.second(torch.relu(self.first(x))))


@pytest.fixture(scope="module")
def plain() -> Model:
    torch.manual_seed(0)
    return Model()


@pytest.fixture(scope="module")
def dp(mesh: xd.DeviceMesh) -> xd.DeviceMesh:
    return xd.init_device_mesh("xla", (8,), mesh_dim_names=("dp",))


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(16, 16, generator=generator)
    return x, torch.randint(0, 8, (16,), generator=generator)


def sharded(plain: nn.Module, mesh: Any, **options: Any) -> Any:
    model: Any = copy.deepcopy(plain)
    for linear in (model.first, model.second):
        xd.fully_shard(linear, mesh=mesh, **options)
    return xd.fully_shard(model, mesh=mesh, **options)


def trained(model: nn.Module, steps: int, compiled: bool) -> tuple[list[float], Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def train(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        logits = model(x)
        loss = F.cross_entropy(logits, y.to(logits.device))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        return loss

    step: Any = xd.compile(train) if compiled else train
    return [step(*batch()).item() for _ in range(steps)], (optimizer, step)


def compare(model: nn.Module, plain: nn.Module) -> None:
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.detach().cpu(), theirs.detach(), msg=name)


@pytest.mark.parametrize(
    "compiled",
    [
        pytest.param(False, marks=pytest.mark.thorough, id="eager"),
        pytest.param(True, id="compiled"),
    ],
)
def test_training(dp: xd.DeviceMesh, plain: Model, compiled: bool) -> None:
    model, reference = sharded(plain, dp), copy.deepcopy(plain)
    assert {xd.FSDPModule, TorchFSDPModule, Model} <= set(type(model).__mro__)
    losses, (optimizer, _) = trained(model, 3, compiled)
    expected, _ = trained(reference, 3, compiled=False)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected))
    compare(model, reference)
    for parameter in model.parameters():
        assert type(parameter.data) is xd.DTensor
        placement = Shard(0) if parameter.ndim else R
        state = optimizer.state[parameter]
        for each in (parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"]):
            assert each.placements == (placement,)
            if parameter.ndim:
                assert each.xla_sharding().num_tiles(0) == 8


def gathers(step: Any, shape: str) -> int:
    return len(re.findall(rf"= {re.escape(shape)}\S* all-gather", step.hlo()))


@pytest.mark.only_on("jax")
@pytest.mark.parametrize("reshard", [True, False])
def test_parameters_are_gathered_again_for_the_backward(
    dp: xd.DeviceMesh, plain: Model, reshard: bool
) -> None:
    _, (_, step) = trained(sharded(plain, dp, reshard_after_forward=reshard), 1, compiled=True)
    # The weight of `second` is needed for its input's gradient, that of `first` is not.
    assert gathers(step, "f32[16,64]") == 1 + reshard
    assert gathers(step, "f32[64,16]") == 1


def watch(model: Any) -> list[Any]:
    """Collect what the forwards of `first` and of the model see of their parameters."""
    seen: list[Any] = []
    for module, name in ((model, "scale"), (model.first, "weight")):
        forward = module.forward

        def watched(*args: Any, m: Any = module, n: str = name, f: Any = forward) -> Any:
            seen.append(getattr(m, n))
            return f(*args)

        module.forward = watched
    return seen


def test_during_forward_parameters_are_whole_and_plain(dp: xd.DeviceMesh, plain: Model) -> None:
    model = sharded(plain, dp)
    seen = watch(model)
    model(batch()[0])
    assert not any(isinstance(tensor, xd.DTensor) for tensor in seen)
    assert [tuple(tensor.shape) for tensor in seen] == [(), (64, 16)]
    assert isinstance(model.first.weight, nn.Parameter)


def test_unshard_and_reshard(dp: xd.DeviceMesh, plain: Model) -> None:
    model = sharded(plain, dp)
    model.first.unshard(async_op=True).wait()
    assert torch.equal(model.first.weight.detach().cpu(), plain.first.weight)
    assert not isinstance(model.first.weight, xd.DTensor)
    model(batch()[0])
    assert not isinstance(model.first.weight, xd.DTensor)
    model(batch()[0]).sum().backward()
    assert model.first.weight.placements == (Shard(0),)
    model.first.unshard()
    model.reshard()
    model.first.reshard()
    assert model.first.weight.placements == (Shard(0),)


def test_an_error_in_forward_leaves_the_parameters_sharded(dp: xd.DeviceMesh, plain: Model) -> None:
    model = sharded(plain, dp)
    with pytest.raises(RuntimeError):
        model(torch.ones(16, 3))
    assert model.first.weight.placements == (Shard(0),)
    torch.testing.assert_close(model(batch()[0]).detach().cpu(), plain(batch()[0]).detach())


def test_mixed_precision(dp: xd.DeviceMesh, plain: Model) -> None:
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32
    )
    inner = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model: Any = copy.deepcopy(plain)
    for linear in (model.first, model.second):
        xd.fully_shard(linear, mesh=dp, mp_policy=inner)
    xd.fully_shard(model, mesh=dp, mp_policy=policy)
    seen = watch(model)
    out = model(batch()[0])
    out.square().sum().backward()
    assert ({t.dtype for t in seen}, out.dtype) == ({torch.bfloat16}, torch.float32)
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
    half = copy.deepcopy(plain).bfloat16()
    half(batch()[0].bfloat16()).float().square().sum().backward()
    for ours, theirs in zip(model.parameters(), half.parameters(), strict=True):
        assert theirs.grad is not None
        torch.testing.assert_close(ours.grad.cpu(), theirs.grad.float(), atol=2.0, rtol=0.1)


def test_hybrid_sharding(mesh: xd.DeviceMesh, plain: Model) -> None:
    model, reference = sharded(plain, mesh), copy.deepcopy(plain)
    losses, _ = trained(model, 2, compiled=False)
    expected, _ = trained(reference, 2, compiled=False)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected))
    assert model.first.weight.placements == (R, Shard(0))
    assert model.first.weight.grad.placements == (R, Shard(0))


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_beside_tensor_parallelism(mesh: xd.DeviceMesh, plain: Model, compiled: bool) -> None:
    reference, model = copy.deepcopy(plain), copy.deepcopy(plain)
    xd.install()
    plan: dict[str, Any] = {"first": ColwiseParallel(), "second": RowwiseParallel()}
    parallelize_module(model, mesh["tp"], plan)
    for linear in (model.first, model.second):
        xd.fully_shard(linear, mesh=mesh["dp"])
    xd.fully_shard(model, mesh=mesh["dp"])
    colwise: Any = model.first.weight
    rowwise: Any = model.second.weight
    assert colwise.placements == (_StridedShard(0, split_factor=4), Shard(0))
    assert type(colwise.placements[0]) is _StridedShard
    assert rowwise.placements == (Shard(0), Shard(1))
    assert str(colwise.xla_sharding()) == "{devices=[8,1]<=[2,4]T(1,0)}"
    losses, _ = trained(model, 2, compiled)
    expected, _ = trained(reference, 2, compiled=False)
    xd.uninstall()
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected))
    compare(model, reference)
    assert colwise.grad.placements == colwise.placements


class TestGradientAccumulation:
    def test_without_a_sync(self, dp: xd.DeviceMesh, plain: Model) -> None:
        model, reference = sharded(plain, dp), copy.deepcopy(plain)
        x, y = batch()
        for number in range(3):
            last = number == 2
            model.set_requires_gradient_sync(last)
            inputs = [xd.distribute_tensor(t, dp, [Shard(0)]) for t in (x + number, y)]
            rows, classes = (t.full_tensor() if last else t.to_local() for t in inputs)
            F.cross_entropy(model(rows), classes).backward()
            F.cross_entropy(reference(x + number), y).backward()
            if not last:
                assert all(p.grad is None for p in model.parameters())
        for (name, ours), theirs in zip(
            model.named_parameters(), reference.parameters(), strict=True
        ):
            assert theirs.grad is not None
            torch.testing.assert_close(ours.grad.cpu(), theirs.grad, msg=name)

    @pytest.mark.only_on("jax")
    def test_nothing_is_reduced_without_a_sync(self, dp: xd.DeviceMesh, plain: Model) -> None:
        bytes_reduced = {}
        for microbatches in (1, 4):
            model = sharded(plain, dp)

            def step(x: Any, y: Any, model: Any = model, count: int = microbatches) -> None:
                for number in range(count):
                    model.set_requires_gradient_sync(number == count - 1)
                    F.cross_entropy(model(x), y).backward()

            inputs = [xd.distribute_tensor(t, dp, [Shard(0)]) for t in batch()]
            compiled = xd.compile(step)
            compiled(*(t.to_local() for t in inputs))
            reductions = r" (?:all-reduce|reduce-scatter)\("
            bytes_reduced[microbatches] = len(re.findall(reductions, compiled.hlo()))
        assert bytes_reduced[4] <= 2 * bytes_reduced[1]

    @pytest.mark.parametrize("unshard", [False, True])
    def test_unshard_before_it(self, dp: xd.DeviceMesh, plain: Model, unshard: bool) -> None:
        model, reference = sharded(plain, dp), copy.deepcopy(plain)
        x, y = batch()
        rows, classes = (xd.distribute_tensor(t, dp, [Shard(0)]).to_local() for t in (x, y))
        for sync in (False, True):
            model.set_requires_gradient_sync(sync)
            if unshard:
                for each in (model, model.first, model.second):
                    each.unshard()
            F.cross_entropy(model(rows), classes).backward()
            F.cross_entropy(reference(x), y).backward()
            # As in PyTorch, the backward gives up what was gathered: an optimizer's step follows.
            assert isinstance(model.first.weight.data, xd.DTensor)
            assert isinstance(model.scale.data, xd.DTensor)
            assert sync or all(p.grad is None for p in model.parameters())
        for (name, ours), theirs in zip(
            model.named_parameters(), reference.parameters(), strict=True
        ):
            assert theirs.grad is not None
            torch.testing.assert_close(ours.grad.cpu(), theirs.grad, msg=name)

    def test_microbatches_add_up_in_the_reduce_dtype(self, dp: xd.DeviceMesh) -> None:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        model = xd.fully_shard(nn.Linear(8, 8, bias=False), mesh=dp, mp_policy=policy)
        for number, value in enumerate((256.0, 1.0)):
            model.set_requires_gradient_sync(number == 1)
            rows = xd.distribute_tensor(torch.full((8, 8), value), dp, [Shard(0)]).to_local()
            model(rows).sum().backward()
        # 257 is no bfloat16.
        assert torch.equal(model.weight.grad.cpu(), torch.full((8, 8), 257.0))

    def test_unshard_stays_through_a_forward(self, dp: xd.DeviceMesh, plain: Model) -> None:
        model = sharded(plain, dp)
        model.set_requires_gradient_sync(False)
        model.first.unshard()
        model(xd.distribute_tensor(batch()[0], dp, [Shard(0)]))
        assert torch.equal(model.first.weight.detach().cpu(), plain.first.weight)
        assert not isinstance(model.first.weight, (xd.DTensor, xd.LocalView))
        assert isinstance(model.second.weight.data, xd.DTensor)

    def test_plain_inputs_are_refused_without_a_sync(self, dp: xd.DeviceMesh, plain: Model) -> None:
        model = sharded(plain, dp)
        model.set_requires_gradient_sync(False)
        with pytest.raises(LocalViewError, match="plain tensors only"):
            model(batch()[0])
        model.set_requires_gradient_sync(True)
        model(batch()[0])

    @pytest.mark.only_on("jax")
    def test_of_calls_of_a_compiled_step(self, dp: xd.DeviceMesh, plain: Model) -> None:
        """What `set_requires_gradient_sync` says, and what was left, is read in each call."""
        model, reference = sharded(plain, dp), copy.deepcopy(plain)
        step = xd.compile(lambda rows, classes: F.cross_entropy(model(rows), classes).backward())
        x, y = batch()
        for number in range(8):
            model.set_requires_gradient_sync(number % 2 == 1)
            step(*(xd.distribute_tensor(t, dp, [Shard(0)]).to_local() for t in (x + number, y)))
            F.cross_entropy(reference(x + number), y).backward()
            if number % 2:
                compare_gradients(model, reference)
                for each in (model, reference):
                    each.zero_grad()
        assert step.stats()["traces"] <= 5

    @pytest.mark.parametrize("inputs", ["rows", "batch"])
    def test_of_a_parameter_that_the_last_one_does_not_use(
        self, dp: xd.DeviceMesh, inputs: str
    ) -> None:
        model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        model.__class__ = type("Both", (nn.Sequential,), {"forward": both})
        reference = copy.deepcopy(model)
        for module in (*model, model):
            xd.fully_shard(module, mesh=dp)
        x = torch.sin(torch.arange(32.0).reshape(8, 4))
        given = xd.distribute_tensor(x, dp, [Shard(0)])
        for last in (False, True):
            model.set_requires_gradient_sync(last)
            rows = given if last and inputs == "batch" else given.to_local()
            (model(rows, not last) ** 2).mean().backward()
            (reference(x, not last) ** 2).mean().backward()
        compare_gradients(model, reference)


def both(self: Any, x: Any, both: bool) -> Any:
    return self[0](x) + (self[1](x) if both else 0)


def compare_gradients(model: nn.Module, reference: nn.Module) -> None:
    pairs = zip(model.named_parameters(), reference.parameters(), strict=True)
    for (name, ours), theirs in pairs:
        assert ours.grad is not None
        torch.testing.assert_close(ours.grad.cpu(), theirs.grad, msg=name)


class TestSettings:
    @pytest.mark.only_on("jax")
    @pytest.mark.parametrize("is_compiled", [False, True])
    def test_divide_factor_of_losses_per_device(self, dp: xd.DeviceMesh, is_compiled: bool) -> None:
        """The sum of the devices' gradients is divided by it, by 1 too."""
        model = xd.fully_shard(nn.Linear(4, 2, bias=False), mesh=dp)
        rows = xd.distribute_tensor(torch.ones(8, 4), dp, [Shard(0)]).to_local()

        def step() -> Any:
            model(rows).sum().backward()
            gradient, model.weight.grad = model.weight.grad, None
            return gradient

        step = xd.compile(step) if is_compiled else step
        for factor in (8.0, 1.0, 2.0):
            model.set_gradient_divide_factor(factor)
            assert torch.equal(step().cpu(), torch.full((2, 4), 8 / factor))

    def test_unshard_without_gradients(self, dp: xd.DeviceMesh, plain: Model) -> None:
        model, reference = sharded(plain, dp), copy.deepcopy(plain)
        with torch.no_grad():
            model.first.unshard()
        x, y = batch()
        rows, classes = (xd.distribute_tensor(t, dp, [Shard(0)]) for t in (x, y))
        F.cross_entropy(model(rows), classes).backward()
        F.cross_entropy(reference(x), y).backward()
        compare_gradients(model, reference)

    def test_dtypes_in_dataclasses(self, dp: xd.DeviceMesh) -> None:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
        model: Any = nn.Linear(4, 2)
        model.__class__ = type("OfPairs", (nn.Linear,), {"forward": of_pair})
        xd.fully_shard(model, mesh=dp, mp_policy=policy)
        output = model(Pair(torch.ones(8, 4), 3))
        assert (output.x.dtype, output.number) == (torch.float32, 3)

    def test_another_method_as_forward(self, dp: xd.DeviceMesh, plain: Model) -> None:
        model, reference = sharded(plain, dp), copy.deepcopy(plain)
        model.encode = lambda x: model.second(torch.relu(model.first(x))) * model.scale
        with pytest.raises(ArgumentTypeError, match="'embed', which FSDPModel does not have"):
            xd.register_fsdp_forward_method(model, "embed")
        xd.register_fsdp_forward_method(model, "encode")
        x, _ = batch()
        expected = reference.second(torch.relu(reference.first(x))) * reference.scale
        torch.testing.assert_close(model.encode(x).detach().cpu(), expected.detach())
        assert isinstance(model.scale.data, xd.DTensor)
        with pytest.raises(UnsupportedOpError, match="register_fsdp_forward_method"):
            model._get_fsdp_state()


@dataclass
class Pair:
    x: Any
    number: int


def of_pair(self: Any, pair: Pair) -> Pair:
    return Pair(F.linear(pair.x, self.weight, self.bias), pair.number)


def test_a_plain_batch_is_announced_once_per_mesh(
    runtime: Runtime, plain: Model, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("rows", "others"):
        mesh = xd.init_device_mesh("xla", (8,), mesh_dim_names=(name,))
        model = sharded(plain, mesh)
        model(xd.distribute_tensor(batch()[0], mesh, [Shard(0)]))
        assert caplog.records == []
        model(batch()[0])
        model(batch()[0])
        sharded(plain, mesh)(batch()[0])
        (record,) = caplog.records
        assert record.levelname == "WARNING"
        assert f"plain inputs for the global batch and shards it over the mesh ({name}=8)" in (
            record.getMessage()
        )
        caplog.clear()


def test_frozen_parameters_and_adapters(dp: xd.DeviceMesh, plain: Model) -> None:
    base = copy.deepcopy(plain).requires_grad_(False)
    base.last = nn.Linear(16, 8, bias=False)  # the adapter
    reference = copy.deepcopy(base)
    model = sharded(base, dp)
    losses, _ = trained(model, 2, compiled=False)
    expected, _ = trained(reference, 2, compiled=False)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected))
    assert model.first.weight.grad is None
    assert torch.equal(model.first.weight.cpu(), plain.first.weight)


def test_ignored_and_placed_parameters(dp: xd.DeviceMesh, plain: Model) -> None:
    model: Any = copy.deepcopy(plain)
    bias = model.first.bias
    xd.fully_shard(
        model,
        mesh=dp,
        ignored_params={bias},
        shard_placement_fn=lambda p: Shard(1) if p.ndim == 2 else None,
    )
    assert model.first.bias is bias
    assert model.first.weight.placements == (Shard(1),)
    assert model.second.bias.placements == (Shard(0),)


def test_divide_factor(dp: xd.DeviceMesh, plain: Model) -> None:
    model, reference = sharded(plain, dp), copy.deepcopy(plain)
    for each in (model, model.first, model.second):
        each.set_gradient_divide_factor(4.0)
    model(batch()[0]).square().mean().backward()
    reference(batch()[0]).square().mean().backward()
    assert reference.first.weight.grad is not None
    torch.testing.assert_close(model.first.weight.grad.cpu(), reference.first.weight.grad * 2)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.head = nn.Linear(8, 16, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(x))


def load_assigned(model: Any, with_state: dict[str, torch.Tensor]) -> None:
    """Load with assign=True: each name gets a Parameter of its own."""
    made: dict[str, torch.Tensor] = {}
    for name, old in model.state_dict().items():
        new = with_state[name].clone()
        if isinstance(old, xd.DTensor):
            new = xd.distribute_tensor(new, old.device_mesh, old.placements)
        made[name] = nn.Parameter(new)
    model.load_state_dict(made, assign=True)


def tie(model: Tied) -> None:
    model.embedding.weight = model.head.weight


def untie(model: Tied) -> None:
    model.head.weight = nn.Parameter(model.head.weight.detach() * 2)


REPLACED = {
    "loaded": lambda model: load_assigned(model, {k: torch.ones(16, 8) for k in TIED_NAMES}),
    "tied": tie,
    "untied": lambda model: (tie(model), untie(model)),
}
TIED_NAMES = ("embedding.weight", "head.weight")


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("how", REPLACED)
@pytest.mark.parametrize("grouped", [False, True])
def test_parameters_that_are_assigned_afterwards(
    dp: xd.DeviceMesh, how: str, compiled: bool, grouped: bool
) -> None:
    """What the modules have now is used and trained, before a step and after one."""
    torch.manual_seed(0)
    reference = Tied()
    model: Any = copy.deepcopy(reference)
    if grouped:
        xd.fully_shard([model.embedding, model.head], mesh=dp)
    xd.fully_shard(model, mesh=dp)
    tokens = torch.arange(16)

    def gradients(of: Any) -> torch.Tensor:
        of.zero_grad()
        loss = of(tokens).square().sum()
        loss.backward()
        return loss.detach()

    step: Any = xd.compile(gradients) if compiled else gradients
    half = {k: v.detach() * 0.5 for k, v in reference.state_dict().items()}
    for change in (lambda _: None, REPLACED[how], partial(load_assigned, with_state=half)):
        change(model)
        change(reference)
        torch.testing.assert_close(step(model).cpu(), gradients(reference))
        for mine, its in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(mine.grad.full_tensor().cpu(), its.grad)
            assert mine.placements == (Shard(0),)


def test_a_parameter_that_is_assigned_has_to_lie_on_the_mesh(dp: xd.DeviceMesh) -> None:
    model: Any = xd.fully_shard(Tied(), mesh=dp)
    before = model.head.weight
    model.head.weight = nn.Parameter(torch.ones(16, 8))
    with pytest.raises(
        DistributeError, match=r"Linear\.weight, which fully_shard manages, was given"
    ):
        model(torch.arange(8))
    model.head.weight = before
    model(torch.arange(8))
    del model.embedding.weight  # what reparametrizations do
    model.embedding.weight = before
    assert model(torch.arange(8)).shape == (8, 16)


class WithBuffer(nn.Module):
    """Parameters and a buffer meet in all kinds of ops; the buffer is written."""

    shift: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))
        self.register_buffer("shift", torch.arange(8.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight: Any = self.inner.weight
        shift = self.shift.clone()
        mixed = torch.mv(weight, shift) + weight @ shift + F.linear(shift, weight)
        rows = torch.cat([weight, shift[None]]).mean(0) + torch.where(weight > 0, weight, shift)[0]
        self.shift.mul_(0.5)
        return self.inner(x) * (mixed + rows).sin() + torch.dot(weight[0], shift)


def test_buffers_meet_gathered_parameters(dp: xd.DeviceMesh) -> None:
    torch.manual_seed(0)
    plain = WithBuffer()
    ours, x = xd.fully_shard(copy.deepcopy(plain), mesh=dp), torch.randn(16, 8)
    for _ in range(2):
        results = [model(x).square().mean() for model in (plain, ours)]
        for loss in results:
            loss.backward()
        torch.testing.assert_close(results[1].detach().cpu(), results[0].detach())
    for (name, one), other in zip(ours.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad.full_tensor().cpu(), other.grad, msg=name)
    torch.testing.assert_close(ours.shift.cpu(), plain.shift)


def test_refusals(dp: xd.DeviceMesh, mesh: xd.DeviceMesh, plain: Model) -> None:
    model = sharded(plain, dp)
    with pytest.raises(DistributeError, match="called on before"):
        xd.fully_shard(model, mesh=dp)
    with pytest.raises(ArgumentTypeError, match="ModuleList"):
        xd.fully_shard(nn.ModuleList([nn.Linear(2, 2)]), mesh=dp)
    with pytest.raises(UnsupportedOpError, match="CPUOffloadPolicy"):
        xd.fully_shard(nn.Linear(8, 8), mesh=dp, offload_policy=CPUOffloadPolicy())
    three = xd.init_device_mesh("xla", (2, 2, 2))
    with pytest.raises(DistributeError, match="one axis, or over the second of two"):
        xd.fully_shard(nn.Linear(8, 8), mesh=three)
    with pytest.raises(UnsupportedOpError, match="made from annotations"):
        model.set_custom_all_gather(None)
    with pytest.raises(UnsupportedOpError, match="deepcopy was called"):
        copy.deepcopy(model)
    with pytest.raises(UnsupportedOpError, match="over all axes"):
        model.set_requires_all_reduce(False)
    on_dp = nn.Linear(8, 8)
    on_dp.weight = nn.Parameter(xd.distribute_tensor(on_dp.weight.detach(), mesh["dp"], [Shard(0)]))
    with pytest.raises(DistributeError, match="axes of its own"):
        xd.fully_shard(on_dp, mesh=mesh["dp"])
