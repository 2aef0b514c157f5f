"""A whole training step as one program: equal to plain PyTorch, traced seldom, and honest."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn

from xla_dtensor import DeviceMesh, distribute_module, distribute_tensor
from xla_dtensor import compile as xla_compile
from xla_dtensor.errors import CompileError
from xla_dtensor.report import collectives

pytestmark = [pytest.mark.only_on("jax"), pytest.mark.usefixtures("runtime")]

STEPS = 6


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 6))


def shard(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
    if isinstance(module, nn.Linear):
        spec = ("tp", None) if name == "0" else (None, "tp")
        module.weight = nn.Parameter(distribute_tensor(module.weight, mesh, spec))


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(16, 8, generator=generator), torch.randn(16, 6, generator=generator))
        for _ in range(STEPS)
    ]


def losses(mesh: DeviceMesh | None, make_optimizer: Callable[..., Any], **options: Any) -> Any:
    """Train on `mesh`, or plainly on the CPU when it is None; return losses, model, step."""
    model = make_model()
    if mesh is not None:
        distribute_module(model, mesh, shard)
    optimizer = make_optimizer(model.parameters())
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: 1 / (1 + i))
    accumulate = options.get("accumulate", 1)

    def train_step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        total: Any = 0.0
        for xs, ys in zip(x.chunk(accumulate), y.chunk(accumulate), strict=True):
            with torch.autocast("cpu", torch.bfloat16, enabled=options.get("autocast", False)):
                loss = nn.functional.mse_loss(model(xs).float(), ys) / accumulate
            loss.backward()
            total = total + loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        return total

    step: Any = train_step if mesh is None else xla_compile(train_step)
    found = []
    for x, y in batches():
        if mesh is not None:
            x, y = (distribute_tensor(t, mesh, ("dp", None)) for t in (x, y))
        found.append(step(x, y).item())
        scheduler.step()
    return found, model, step


OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "adamw-foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "adamw-amsgrad": lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-1),
    "sgd-nesterov": lambda p: torch.optim.SGD(p, lr=1e-1, momentum=0.9, nesterov=True),
    "sgd-foreach": lambda p: torch.optim.SGD(p, lr=1e-1, momentum=0.9, foreach=True),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_losses_and_parameters_equal_plain_pytorch(mesh: DeviceMesh, name: str) -> None:
    expected, plain, _ = losses(None, OPTIMIZERS[name])
    found, model, step = losses(mesh, OPTIMIZERS[name])
    assert found == pytest.approx(expected, abs=2e-6)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.cpu(), theirs.detach(), atol=2e-6, rtol=1e-5)
    assert step.stats()["traces"] <= 2


def test_gradient_accumulation_equals_plain_pytorch(mesh: DeviceMesh) -> None:
    expected, _, _ = losses(None, OPTIMIZERS["adamw"], accumulate=2)
    found, _, _ = losses(mesh, OPTIMIZERS["adamw"], accumulate=2)
    assert found == pytest.approx(expected, abs=2e-6)


def test_autocast_computes_in_bfloat16(mesh: DeviceMesh) -> None:
    expected, _, _ = losses(None, OPTIMIZERS["sgd"], autocast=True)
    found, _, step = losses(mesh, OPTIMIZERS["sgd"], autocast=True)
    assert found == pytest.approx(expected, abs=2e-2)
    # A loss alone would not show it if autocast were ignored.
    assert "bf16[" in step.hlo()


def test_the_learning_rate_is_read_anew_on_every_call(mesh: DeviceMesh) -> None:
    weight = nn.Parameter(distribute_tensor(torch.zeros(8), mesh, ("tp",)))
    optimizer = torch.optim.SGD([weight], lr=1.0)

    def descend() -> None:
        weight.sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step = xla_compile(descend)
    values = []
    for rate in (1.0, 0.5, 0.25, 0.25):
        optimizer.param_groups[0]["lr"] = rate
        step()
        values.append(weight.cpu()[0].item())
    assert values == [-1.0, -1.5, -1.75, -2.0]
    assert optimizer.param_groups[0]["lr"] == 0.25
    assert step.stats()["traces"] == 1


def test_another_baked_hyperparameter_is_noticed(mesh: DeviceMesh) -> None:
    weight = nn.Parameter(distribute_tensor(torch.ones(8), mesh, ("tp",)))
    optimizer = torch.optim.SGD([weight], lr=1.0, weight_decay=0.0)

    def decay() -> None:
        (weight * 0).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step = xla_compile(decay)
    step()
    assert weight.cpu()[0] == 1
    optimizer.param_groups[0]["weight_decay"] = 0.5
    step()
    assert weight.cpu()[0] == 0.5
    assert "weight_decay changed" in step.stats()["reasons"][-1]


def test_eval_mode_is_noticed(mesh: DeviceMesh) -> None:
    model = distribute_module(nn.Sequential(nn.Dropout(0.5)), mesh)
    step = xla_compile(lambda x: model(x))
    x = distribute_tensor(torch.ones(64), mesh)
    assert (step(x).cpu() == 0).any()
    model.eval()
    assert torch.equal(step(x).cpu(), torch.ones(64))


@pytest.mark.parametrize("how", ["data", "assign", "attribute", "copy"])
def test_a_replaced_parameter_is_noticed(mesh: DeviceMesh, how: str) -> None:
    layer = distribute_module(nn.Linear(4, 4, bias=False), mesh)
    step = xla_compile(lambda x: layer(x))
    x = distribute_tensor(torch.eye(4), mesh)
    step(x)
    new = distribute_tensor(torch.full((4, 4), 3.0), mesh)
    if how == "data":
        layer.weight.data = new
    elif how == "assign":
        layer.load_state_dict({"weight": new}, assign=True)
    elif how == "attribute":
        layer.weight = nn.Parameter(new)
    else:
        layer.load_state_dict({"weight": new})
    assert torch.equal(step(x).cpu(), torch.full((4, 4), 3.0))
    assert step.stats()["traces"] == (1 if how == "copy" else 2)


def test_dropout_draws_anew_on_every_call(mesh: DeviceMesh) -> None:
    step = xla_compile(lambda x: nn.functional.dropout(x, 0.5))
    x = distribute_tensor(torch.ones(256), mesh)
    first, second = step(x).cpu(), step(x).cpu()
    assert not torch.equal(first, second)
    assert 0.3 < (first == 0).float().mean() < 0.7
    assert step.stats()["traces"] == 1


def test_buffers_are_state(mesh: DeviceMesh) -> None:
    plain = nn.BatchNorm1d(4)
    ours = cast("Any", distribute_module(nn.BatchNorm1d(4), mesh))
    step = xla_compile(lambda x: ours(x))
    for seed in range(3):
        torch.manual_seed(seed)
        x = torch.randn(16, 4)
        expected = plain(x)
        found = step(distribute_tensor(x, mesh, ("dp", None)))
        torch.testing.assert_close(found.cpu(), expected.detach(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(ours.running_mean.cpu(), plain.running_mean)
    torch.testing.assert_close(ours.running_var.cpu(), plain.running_var)
    assert ours.num_batches_tracked.item() == 3


def test_gradients_that_the_step_leaves_are_there_afterwards(mesh: DeviceMesh) -> None:
    weight = nn.Parameter(distribute_tensor(torch.ones(8), mesh, ("tp",)))

    def gradient(scale: torch.Tensor) -> None:
        weight.grad = None
        (weight * scale).sum().backward()

    step = xla_compile(gradient)
    for value in (2.0, 3.0, 4.0):
        step(distribute_tensor(torch.tensor(value), mesh))
        assert weight.grad is not None
        assert weight.grad.cpu().tolist() == [value] * 8


def test_gradients_accumulate_over_calls(mesh: DeviceMesh) -> None:
    weight = nn.Parameter(distribute_tensor(torch.ones(8), mesh, ("tp",)))
    step = xla_compile(lambda: (weight * 2).sum().backward())
    for call in range(1, 5):
        step()
        assert weight.grad is not None
        assert weight.grad.cpu()[0].item() == 2.0 * call


def test_state_stays_where_it_was_put(mesh: DeviceMesh) -> None:
    _, model, _ = losses(mesh, OPTIMIZERS["adamw"])
    assert str(model[0].weight.xla_sharding()) == str(model[0].weight.mesh_layout.op_sharding())
    assert model[0].weight.xla_sharding().num_tiles(0) == 4
    assert model[2].weight.xla_sharding().kind == "replicated"


def test_state_is_donated(mesh: DeviceMesh) -> None:
    _, _, step = losses(mesh, OPTIMIZERS["adamw"])
    assert "input_output_alias" in step.hlo().splitlines()[0]


def test_communication_goes_over_both_axes(mesh: DeviceMesh) -> None:
    _, _, step = losses(mesh, OPTIMIZERS["adamw"])
    axes = {c.axes for c in collectives(step.hlo(), mesh.value)}
    assert ("dp",) in axes
    assert ("tp",) in axes


def test_a_new_shape_is_a_new_trace_with_its_reason(
    mesh: DeviceMesh, caplog: pytest.LogCaptureFixture
) -> None:
    step = xla_compile(lambda x: x + 1)
    with caplog.at_level(logging.WARNING, logger="xla_dtensor"):
        for n in (1, 2, 3, 4, 2):
            assert step(distribute_tensor(torch.zeros(n), mesh)).shape == (n,)
    assert step.stats()["traces"] == 4
    assert "traced for the 4th time" in caplog.text


def test_grad_mode_is_part_of_the_key(mesh: DeviceMesh) -> None:
    weight = nn.Parameter(distribute_tensor(torch.ones(8), mesh))
    step = xla_compile(lambda: weight * 2)
    with torch.no_grad():
        step()
    step()
    assert step.stats()["traces"] == 2


@pytest.mark.parametrize(
    "function",
    [lambda x: int(x.sum()), lambda x: x.tolist()],
    ids=["int", "tolist"],
)
def test_python_that_needs_a_value_is_a_clear_error(mesh: DeviceMesh, function: Any) -> None:
    with pytest.raises(CompileError, match=r"while a step was traced.*Return the tensor") as error:
        xla_compile(function)(distribute_tensor(torch.ones(8), mesh))
    assert "test_jax_compile.py" in str(error.value)


def test_an_error_while_tracing_leaves_the_state_as_it_was(mesh: DeviceMesh) -> None:
    weight = nn.Parameter(distribute_tensor(torch.ones(8), mesh, ("tp",)))

    def fail() -> None:
        with torch.no_grad():
            weight.add_(1)
        raise ValueError("on purpose")

    with pytest.raises(ValueError, match="on purpose"):
        xla_compile(fail)()
    assert torch.equal(weight.cpu(), torch.ones(8))
    with torch.no_grad():
        weight.add_(1)
    assert torch.equal(weight.cpu(), torch.full((8,), 2.0))


def test_a_scheduler_inside_the_step_is_refused(mesh: DeviceMesh) -> None:
    weight = nn.Parameter(distribute_tensor(torch.ones(8), mesh))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    def step() -> None:
        weight.sum().backward()
        optimizer.step()
        scheduler.step()

    with pytest.raises(CompileError, match="scheduler"):
        xla_compile(step)()


def test_a_step_inside_a_step_is_refused(mesh: DeviceMesh) -> None:
    inner = xla_compile(lambda x: x + 1)
    with pytest.raises(CompileError, match="inside the trace of another"):
        xla_compile(lambda x: inner(x))(distribute_tensor(torch.ones(8), mesh))


def test_the_program_is_asked_for_before_there_is_one(mesh: DeviceMesh) -> None:
    with pytest.raises(CompileError, match="before its first call"):
        xla_compile(lambda x: x).hlo()


def test_a_write_to_an_argument_reaches_the_caller(mesh: DeviceMesh) -> None:
    step = xla_compile(lambda x, y: (x.add_(1) * y).sum())
    uneven = distribute_tensor(torch.zeros(10), mesh, ("tp",))
    one = distribute_tensor(torch.ones(10), mesh, ("dp",))
    assert [step(uneven, one).item() for _ in range(3)] == [10.0, 20.0, 30.0]
    assert torch.equal(uneven.cpu(), torch.full((10,), 3.0))
    assert torch.equal(one.cpu(), torch.ones(10))
    assert uneven.xla_sharding().num_tiles(0) == 4
    other = distribute_tensor(torch.zeros(10), mesh, ("tp",))
    assert step(other, one).item() == 10.0
    assert torch.equal(other.cpu(), torch.ones(10))
    assert step.stats()["traces"] == 1


def test_a_write_to_one_tensor_passed_twice_reaches_it(mesh: DeviceMesh) -> None:
    step = xla_compile(lambda x, y: (x.add_(1) * y).sum())
    x = distribute_tensor(torch.zeros(8), mesh, ("tp",))
    assert step(x, x).item() == 8.0
    assert torch.equal(x.cpu(), torch.ones(8))


def test_a_view_is_an_input_like_any_other(mesh: DeviceMesh) -> None:
    rows = distribute_tensor(torch.arange(32.0).reshape(4, 8), mesh)
    step = xla_compile(lambda x: x.sum())
    assert [step(rows[i]).item() for i in range(4)] == rows.cpu().sum(1).tolist()
    assert step.stats()["traces"] == 1


def test_a_write_that_would_be_lost_is_refused(mesh: DeviceMesh) -> None:
    with pytest.raises(CompileError, match=r"the write would be lost.*clone"):
        xla_compile(lambda x: x.add_(1))(torch.zeros(8))


def test_a_write_to_a_view_is_one_to_its_base(mesh: DeviceMesh) -> None:
    whole = distribute_tensor(torch.zeros(4, 8), mesh)
    step = xla_compile(lambda x: x.add_(1))
    for row in (1, 1, 2):
        step(whole[row])
    assert whole.cpu().sum(1).tolist() == [0, 16, 8, 0]


def test_a_plain_tensor_argument_is_an_input(mesh: DeviceMesh) -> None:
    weight = distribute_tensor(torch.ones(4), mesh, ("tp",))
    step = xla_compile(lambda x: weight * x)
    assert step(torch.full((4,), 2.0)).cpu().tolist() == [2.0] * 4
    assert step(torch.full((4,), 3.0)).cpu().tolist() == [3.0] * 4
    assert step.stats()["traces"] == 1


def test_a_keyword_may_have_the_name_of_an_argument_that_is_not_read(mesh: DeviceMesh) -> None:
    def step(x: Any, /, **others: torch.Tensor) -> torch.Tensor:
        return sum(others.values(), torch.zeros(8, 8))

    x = distribute_tensor(torch.ones(8, 8), mesh, ("dp", "tp"))
    assert torch.equal(xla_compile(step)(x, x=2 * x, y=x).full_tensor(), torch.full((8, 8), 3.0))


def test_programs_that_no_call_fits_are_let_go(tmp_path: Path, mesh: DeviceMesh) -> None:
    """A text in a closure that changes on every call; what is kept can be saved and loaded."""
    x = distribute_tensor(torch.ones(8), mesh, ("dp",))
    setting = {"factor": "0"}

    def step(x: Any) -> Any:
        return x * float(setting["factor"])

    compiled: Any = xla_compile(step)
    for number in range(12):
        setting["factor"] = str(number)
        assert compiled(x).full_tensor().cpu()[0].item() == number
    assert compiled.stats()["traces"] == 12
    assert len(compiled._executables._compiled) <= 8
    compiled.save(tmp_path / "programs")
    other: Any = xla_compile(step)
    other.load(tmp_path / "programs")
    assert other(x).full_tensor().cpu()[0].item() == 11
    assert other.stats()["loaded"] == 1


class Trainer:
    """Counts what JAX tells of, and what it has done itself."""

    def __init__(self) -> None:
        self.events, self.num_events, self.steps = list[str](), 0, list[int]()

    def listen(self, event: str, duration_secs: float, **_: Any) -> None:
        self.events.append(event)
        self.num_events += 1

    def step(self, x: torch.Tensor) -> torch.Tensor:
        import jax

        self.steps.append(1)
        jax.monitoring.record_event_duration_secs("/as/if/compiled", 1.0)
        return x * 2


def test_who_counts_what_jax_compiles_is_no_part_of_the_step(mesh: DeviceMesh) -> None:
    import jax

    trainer = Trainer()
    x = distribute_tensor(torch.ones(16, 8), mesh, ("dp", None))
    step = xla_compile(trainer.step)
    jax.monitoring.register_event_duration_secs_listener(trainer.listen)
    try:
        step(x)
        assert "/as/if/compiled" in trainer.events
        counted = len(trainer.events)
        step(x)
        trainer.listen("another", 0.0)
        step(x)
    finally:
        jax.monitoring.unregister_event_duration_listener(trainer.listen)
    assert len(trainer.events) == trainer.num_events == counted + 1
    assert (trainer.steps, step.stats()["traces"]) == ([1, 1, 1], 1)
