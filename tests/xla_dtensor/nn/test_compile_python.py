"""What Python changes between the calls of a compiled step: the rest of the cases.

The reasons for a new trace, arguments, and what is refused. The contract: test_python_changes.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard

import xla_dtensor as xd
from tests.xla_dtensor import python_changes_modules
from tests.xla_dtensor.python_changes import CASES
from tests.xla_dtensor.test_python_changes import MECHANISMS, called, check, names_as_they_were
from xla_dtensor.errors import ArgumentTypeError, CompileError, ScanError

_ = names_as_they_were  # a fixture of each test


@pytest.mark.parametrize("name", sorted(CASES.keys() - set(MECHANISMS.values())))
def test_a_step_gives_what_pytorch_gives(mesh: xd.DeviceMesh, name: str) -> None:
    check(name, mesh)


@pytest.mark.only_on("jax")
@pytest.mark.parametrize("name", ["a_variable_around", "a_host_tensor_is_written"])
def test_the_comparison_can_fail(mesh: xd.DeviceMesh, name: str, monkeypatch: Any) -> None:
    """Without guards, and without the host's work, the first call's values stay."""
    from xla_dtensor.runtimes.jax.compile import program as jax_program

    monkeypatch.setattr(jax_program.Program, "stale", lambda program: None)
    monkeypatch.setattr(jax_program.Program, "prepare", lambda program, arguments: None)
    expected, _ = called(CASES[name], lambda tensor: tensor, lambda step: step)
    found, _ = called(CASES[name], lambda t: xd.distribute_tensor(t, mesh), xd.compile)
    assert not torch.allclose(found[-1][0], expected[-1][0])


REASONS = {
    "a_variable_around": "'scale' of a_variable_around changed from 2.0 to 3.0",
    "a_global_of_a_helper": "the global 'GLOBAL' of tests.xla_dtensor.python_changes changed from",
    "an_item_of_a_dict": "the item 'bias' of the global 'TABLE' of tests.xla_dtensor.python_change",
    "a_name_of_another_module": "tests.xla_dtensor.python_changes_elsewhere",
    "a_slot": "Slotted.mode changed from",
    "trainer_scale": "Config.scale changed from 1.0 to 3.0",
    "trainer_dropout": "Dropout.p changed from 0.0 to 1.0",
    "trainer_eval": "training changed from True to False",
    "trainer_frozen": "Linear.weight.requires_grad changed to False",
    "trainer_hook": "a hook of Linear was added",
    "a_tensor_of_the_mesh_is_replaced": "'weight' of a_tensor_of_the_mesh_is_replaced changed",
    "a_number_of_a_host_tensor": "a number that the step reads of a host tensor changed from",
    "a_shape_of_a_host_tensor": "where the trace had",
}


@pytest.mark.only_on("jax")
@pytest.mark.parametrize("name", REASONS)
def test_the_reason_names_what_changed(mesh: xd.DeviceMesh, name: str) -> None:
    _, step = called(CASES[name], lambda t: xd.distribute_tensor(t, mesh), xd.compile)
    assert any(REASONS[name] in reason for reason in step.stats()["reasons"]), step.stats()


# ---------------------------------------------------------------------- arguments


@pytest.mark.only_on("jax")
class TestArguments:
    def test_a_float_that_is_asked_for_is_part_of_the_program(self, mesh: xd.DeviceMesh) -> None:
        step = xd.compile(lambda x, beta: x * np.exp(beta) if isinstance(beta, float) else x)
        x = xd.distribute_tensor(torch.ones(4), mesh)
        for beta in (0.1, 0.2, 0.1, 0.2):
            torch.testing.assert_close(step(x, beta).cpu(), torch.full((4,), float(np.exp(beta))))
        assert step.stats()["reasons"][1:] == (
            "args[1] changed from 0.1 to 0.2",
            "what the step asks of a number changed",
        )

    def test_a_number_in_a_tensor_is_an_input(self, mesh: xd.DeviceMesh) -> None:
        step = xd.compile(lambda x, beta: x * beta)
        x = xd.distribute_tensor(torch.ones(4), mesh)
        for beta in (0.1, 0.2, 0.3):
            found = step(x, torch.tensor(beta)).cpu()
            torch.testing.assert_close(found, torch.full((4,), beta))
        assert step.stats()["traces"] == 1

    def test_minus_zero_and_nan(self, mesh: xd.DeviceMesh) -> None:
        step = xd.compile(lambda x, beta: x / beta)
        x = xd.distribute_tensor(torch.ones(4), mesh)
        found = [step(x, beta)[0].item() for beta in (0.0, -0.0)]
        assert found == [float("inf"), float("-inf")]
        assert np.isnan(step(x, float("nan"))[0].item())
        traces = step.stats()["traces"]
        assert np.isnan(step(x, float("nan"))[0].item())
        assert step.stats()["traces"] == traces

    def test_an_array_is_refused(self, mesh: xd.DeviceMesh) -> None:
        step = xd.compile(lambda x, table: x * table[0])
        x = xd.distribute_tensor(torch.ones(4), mesh)
        with pytest.raises(ArgumentTypeError, match=r"args\[1\], a NumPy array of shape=\(4,\)"):
            step(x, np.ones(4))

    def test_reasons_name_the_argument(self, mesh: xd.DeviceMesh) -> None:
        step = xd.compile(lambda x, mask=None, n=1: x * n if mask is None else x)
        x = xd.distribute_tensor(torch.ones(4), mesh)
        step(x)
        step(x, n=2)
        step(x, n=3)
        step(xd.distribute_tensor(torch.ones(8), mesh), n=3)
        assert step.stats()["reasons"][1:] == (
            "arguments that nest in another way",
            "kwargs['n'] changed from 2 to 3",
            "args[0] changed from a DTensor of shape=(4,), dtype=torch.float64, "
            "placements=(Replicate(), Replicate()), requires_grad=False to a DTensor of "
            "shape=(8,), dtype=torch.float64, placements=(Replicate(), Replicate()), "
            "requires_grad=False",
        )


# ---------------------------------------------------------------------- what is refused


GENERATORS: dict[str, Callable[[], Any]] = {
    "Python's random": lambda: random,
    "numpy.random": lambda: np.random.mtrand,
    "a Random": lambda: random.Random(0),
    "a Generator": lambda: np.random.default_rng(0),
    "a RandomState": lambda: np.random.RandomState(0),
}


@pytest.mark.only_on("jax")
@pytest.mark.parametrize("name", GENERATORS)
def test_pythons_draws_are_refused(mesh: xd.DeviceMesh, name: str) -> None:
    generator = GENERATORS[name]()
    step = xd.compile(lambda x: x * float(generator.random()))
    x = xd.distribute_tensor(torch.ones(4), mesh)
    random.seed(3)
    np.random.seed(3)
    with pytest.raises(CompileError, match=f"drew numbers from {name} while"):
        step(x)
    found = generator.random()  # It was put back.
    random.seed(3)
    np.random.seed(3)
    assert found == GENERATORS[name]().random()


@pytest.mark.only_on("jax")
def test_a_buffer_of_the_host_takes_no_values_of_the_mesh(mesh: xd.DeviceMesh) -> None:
    layer = nn.BatchNorm1d(4, affine=False)
    step = xd.compile(lambda x: layer(x))
    with pytest.raises(CompileError, match="wrote what it computes on the mesh to a plain CPU"):
        step(xd.distribute_tensor(torch.randn(8, 4), mesh))
    assert layer.num_batches_tracked == 0  # taken back


def _indexed(h: Any) -> Any:
    out = torch.zeros(8, 4)
    return out.index_add_(0, torch.tensor([1, 3, 5, 7, 0, 2, 4, 6]), h)


def _through_a_view(h: Any) -> Any:
    out = torch.ones(2, 8, 4)
    first = out[0]
    first.copy_(h)
    return out


def _counted(h: Any) -> Any:
    total = torch.zeros(())
    for i in range(3):
        total += (h * i).sum()
    return total


def _some_elements(h: Any) -> Any:
    out = torch.tensor([1.0, 2.0, 3.0, 4.0])
    out[1:3] = h[0, 1:3]
    return out


def _onto_a_draw(h: Any) -> Any:
    return torch.randn(8, 4).clone().mul_(h)


def _some_of_many(h: Any) -> Any:
    parts = [torch.zeros(8, 4) for _ in range(3)]
    parts[1] += h
    return torch.stack(parts)


def _out(h: Any) -> Any:
    return torch.mul(h.detach(), 2, out=torch.empty(8, 4))


def _after_it_was_used(h: Any) -> Any:
    out = torch.arange(32.0).reshape(8, 4)
    before = out * 2
    out += h
    return out * before


def _of_another_dtype(h: Any) -> Any:
    out = torch.zeros(8, 4, dtype=torch.int64)
    out[h > 0] = 3
    return out * h


MADE = (_indexed, _through_a_view, _counted, _some_elements, _onto_a_draw)
MADE += (_some_of_many, _out, _after_it_was_used, _of_another_dtype)


@pytest.mark.only_on("jax")
@pytest.mark.parametrize("make", MADE)
def test_what_a_step_makes_on_the_host_takes_values_of_the_mesh(
    mesh: xd.DeviceMesh, make: Callable[[Any], Any]
) -> None:
    def step(x: Any, w: Any) -> tuple[Any, ...]:
        value = make(x @ w)
        if not value.requires_grad:
            return (value,)
        return value.detach(), *torch.autograd.grad((value * value).sum(), [w])

    x, w = torch.arange(32.0).reshape(8, 4) / 10 - 1, torch.eye(4) + 0.5
    on_mesh = nn.Parameter(xd.distribute_tensor(w, mesh, [Shard(0), Replicate()]))
    compiled = xd.compile(step)
    for turn in range(3):
        torch.manual_seed(turn)
        expected = step(x + turn, nn.Parameter(w))
        torch.manual_seed(turn)
        given = xd.distribute_tensor(x + turn, mesh, [Shard(0), Replicate()])
        found = tuple(value.full_tensor().cpu() for value in compiled(given, on_mesh))
        torch.testing.assert_close(found, expected)
    assert compiled.stats()["reasons"] == ("first call",)
    assert compiled.verify(given, on_mesh).is_same


@pytest.mark.only_on("jax")
def test_lines_that_make_what_lies_on_the_mesh_are_found_at_once(mesh: xd.DeviceMesh) -> None:
    traced: list[int] = []
    kept = torch.zeros(())

    def step(x: Any, limit: float) -> Any:
        first, second, count = torch.zeros(8), torch.zeros(8), torch.zeros(())
        traced.append(len(traced))
        first[:4] = x[:4]
        second += first * 2
        third = torch.empty_like(second)
        third.copy_(x + second)
        while count < limit:  # with a number of the host it would wait for ever
            count += x.max()
        kept.add_(1)
        return third + count

    compiled, x = xd.compile(step), torch.linspace(1, 2, 8)
    found = compiled(xd.distribute_tensor(x, mesh), 3.0).cpu()
    assert len(traced) <= 4  # of them one for the loop, which turns once more
    assert kept.item() == 1
    torch.testing.assert_close(found, step(x, 3.0), rtol=1e-6, atol=0)


@pytest.mark.only_on("jax")
def test_a_hook_that_is_added_again_is_the_same(mesh: xd.DeviceMesh) -> None:
    layer = xd.distribute_module(torch.nn.Linear(8, 8), mesh)
    step = xd.compile(lambda x: layer(x))
    x = xd.distribute_tensor(torch.ones(8, 8), mesh)
    plain = step(x).cpu()
    for times in (2, 2, 3):
        handle = layer.register_forward_hook(lambda module, args, output, k=times: output * k)
        torch.testing.assert_close(step(x).cpu(), plain * times)
        handle.remove()
    assert step.stats()["traces"] == 3


@pytest.mark.only_on("jax")
def test_a_view_of_what_is_older_takes_no_values_of_the_mesh(mesh: xd.DeviceMesh) -> None:
    """Though its line makes a tensor of the step's own in the first call."""
    older = torch.zeros(4)

    def step(x: Any, is_own: bool) -> Any:
        out = torch.zeros(4) if is_own else older[:]
        return out.copy_(x)

    x = xd.distribute_tensor(torch.ones(4), mesh)
    compiled = xd.compile(step)
    assert compiled(x, True).full_tensor().tolist() == [1] * 4
    with pytest.raises(CompileError, match="wrote what it computes on the mesh to a plain CPU"):
        compiled(x, False)
    assert older.tolist() == [0] * 4


@pytest.mark.only_on("jax")
def test_a_parameter_of_the_host_is_not_trained_on_the_mesh(mesh: xd.DeviceMesh) -> None:
    weight = nn.Parameter(torch.ones(4))  # that somebody forgot to distribute
    optimizer = torch.optim.SGD([weight], lr=0.1)

    def step(x: torch.Tensor) -> None:
        (x * weight).square().mean().backward()
        optimizer.step()

    with pytest.raises(CompileError, match="wrote what it computes on the mesh to a plain CPU"):
        xd.compile(step)(xd.distribute_tensor(torch.ones(8, 4), mesh))
    assert weight.tolist() == [1] * 4
    assert weight.grad is None


@pytest.mark.only_on("jax")
@pytest.mark.parametrize("what", ["draw", "write"])
def test_a_loop_draws_and_writes_nothing_on_the_host(mesh: xd.DeviceMesh, what: str) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if what == "draw":
                return self.linear(x) * torch.rand(())
            self.count += 1
            return self.linear(x)

    blocks = [Block() for _ in range(3)]
    for block in blocks:
        xd.distribute_module(block.linear, mesh)
    layers = xd.scan_layers(blocks)
    x = xd.distribute_tensor(torch.ones(2, 4), mesh)
    for run in (layers, xd.compile(lambda x: layers(x))):
        with pytest.raises(ScanError, match="on the host" if what == "draw" else "a host tensor"):
            run(x)


# ---------------------------------------------------------------------- failures


@pytest.mark.only_on("jax")
def test_a_failed_trace_leaves_the_host_as_it_was(mesh: xd.DeviceMesh) -> None:
    weight, layer = torch.ones(4), python_changes_modules.Noting()

    def step(x: torch.Tensor) -> torch.Tensor:
        weight.mul_(2)
        out = layer(x) + torch.rand(4) * weight
        return out * float(out.sum())  # a value that is not there

    state = torch.get_rng_state()
    with pytest.raises(CompileError):
        xd.compile(step)(xd.distribute_tensor(torch.ones(8, 4), mesh))
    assert torch.equal(weight, torch.ones(4))
    assert torch.equal(torch.get_rng_state(), state)
    assert layer.size is None
    assert layer.auxiliary is None


@pytest.mark.only_on("jax")
def test_what_does_not_change_is_not_done_again(mesh: xd.DeviceMesh, monkeypatch: Any) -> None:
    from xla_dtensor.runtimes.host_work import steps

    weight = torch.ones(4)
    step = xd.compile(lambda x: x * (weight + 1))
    x = xd.distribute_tensor(torch.ones(4), mesh)
    step(x)
    done: list[Any] = []
    usual = steps.Call.redo
    monkeypatch.setattr(steps.Call, "redo", lambda s, run: (done.append(s.func), usual(s, run)))
    step(x)
    assert not done
    weight.add_(1)
    assert step(x)[0].item() == 3
    assert done


# ---------------------------------------------------------------------- torch's settings


def autocast_in_turns(call: int) -> Any:
    """Let every other call compute in bfloat16."""
    return torch.autocast("cpu", dtype=torch.bfloat16, enabled=call % 2 == 1)


def default_dtype_in_turns(call: int) -> Any:
    """Give every other call another default dtype."""
    torch.set_default_dtype((torch.float64, torch.float32)[call % 2])
    return contextlib.nullcontext()


def grad_mode_in_turns(call: int) -> Any:
    """Let every other call record no graph."""
    return torch.set_grad_enabled(call % 2 == 1)


@pytest.mark.parametrize("around", [autocast_in_turns, default_dtype_in_turns, grad_mode_in_turns])
def test_what_is_in_force_around_a_call(mesh: xd.DeviceMesh, around: Any) -> None:
    weight = torch.linspace(-1, 1, 16).reshape(4, 4)
    placed = xd.distribute_tensor(weight, mesh)

    def make(w: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda x: (x @ w) + torch.ones(4) * (2 if torch.is_grad_enabled() else 1)

    plain, compiled = make(weight), xd.compile(make(placed))
    for call in range(4):
        x = torch.ones(4, 4, dtype=torch.float64) / 3
        with around(call):
            expected, found = plain(x), compiled(xd.distribute_tensor(x, mesh))
        assert found.dtype == expected.dtype
        torch.testing.assert_close(found.cpu(), expected)
    if xd.get_runtime().name == "jax":
        assert compiled.stats()["traces"] == 2


@pytest.mark.only_on("jax")
def test_operators_and_no_grad_are_no_state(mesh: xd.DeviceMesh) -> None:
    """Both note things on themselves when they are used: what they are called, what to put back."""
    off, multiply = torch.no_grad(), torch.ops.aten.mul.Tensor
    vars(multiply).pop("_namespace", None)

    @xd.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        with off:
            return multiply(x, 2)

    x = xd.distribute_tensor(torch.ones(8), mesh)
    for _ in range(3):
        step(x)
        assert multiply._namespace == "aten"
    assert step.stats()["reasons"] == ("first call",)
