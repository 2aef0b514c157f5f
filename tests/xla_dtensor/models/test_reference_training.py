"""What a job compiles: sharded steps train as plain ones, experts' tokens change places."""

from __future__ import annotations

import copy
from math import prod
from typing import TYPE_CHECKING, Any

import pytest
import torch

from mesh_utils import JobConfig, Mesh
from mesh_utils.errors import JobError
from tests.xla_dtensor.models.jobs import JOBS, job_like
from xla_dtensor.models import own_model
from xla_dtensor.models.training import AdamW, Training, make, rules_of
from xla_dtensor.plan.estimate import batch_of
from xla_dtensor.plan.model_sizes import ModelSizes

if TYPE_CHECKING:
    from xla_dtensor.runtimes import Runtime


@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16])
def test_adamw(moments: torch.dtype) -> None:
    weights = [torch.nn.Parameter(torch.randn(5, 3)) for _ in range(2)]
    copies = copy.deepcopy(weights)
    ours = AdamW(weights, lr=0.01, weight_decay=0.2, moment_dtype=moments)
    theirs = torch.optim.AdamW(copies, lr=0.01, betas=(0.9, 0.95), weight_decay=0.2)
    for _ in range(3):
        for mine, other in zip(weights, copies, strict=True):
            mine.grad = torch.randn_like(mine)
            other.grad = mine.grad.clone()
        ours.step()
        theirs.step()
    tolerance = 1e-6 if moments == torch.float32 else 1e-3
    for mine, other in zip(weights, copies, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=tolerance)
        assert ours.state[mine]["exp_avg_sq"].dtype == moments


def test_adamw_computes_in_float32_and_rounds_once() -> None:
    weight = torch.nn.Parameter(torch.randn(50, 30, dtype=torch.bfloat16))
    ours = AdamW([weight], lr=0.01, weight_decay=0.2, moment_dtype=torch.float32)
    first, second = torch.zeros(50, 30), torch.zeros(50, 30)
    for step in range(1, 5):
        weight.grad = torch.randn_like(weight)
        grad, before = weight.grad.float(), weight.detach().float()
        first = 0.9 * first + 0.1 * grad
        second = 0.95 * second + 0.05 * grad * grad
        root = (second / (1 - 0.95**step)).sqrt() + 1e-8
        wanted = before * (1 - 0.01 * 0.2) - 0.01 * (first / (1 - 0.9**step)) / root
        ours.step()
        torch.testing.assert_close(ours.state[weight]["exp_avg"], first, rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(ours.state[weight]["exp_avg_sq"], second, rtol=1e-6, atol=1e-7)
        rounded = wanted.to(torch.bfloat16)
        assert (weight.detach() != rounded).float().mean() < 0.01  # at a tie of the rounding
        torch.testing.assert_close(weight.detach(), rounded, rtol=2**-7, atol=0)


def test_a_large_job_takes_no_memory() -> None:
    job = JobConfig.load("llama3_405b_v5p_4slices")
    training = make(str(job.model), job, sequence=4096)
    tensors = [*training.model.parameters(), *training.inputs]
    assert all(tensor.is_meta for tensor in tensors)
    assert {value.dtype for value in training.model.parameters()} == {torch.bfloat16}
    assert sum(value.numel() for value in training.model.parameters()) == 405_853_388_800
    assert [tuple(given.shape) for given in training.inputs] == [(2048, 4096)] * 2
    assert training.placements == ((("dp", "fsdp"), None),) * 2


def test_a_sequence_that_is_cut() -> None:
    job = JobConfig.load("llama3_70b_v6e_long")
    training = make("llama-tiny", job, sequence=131072, per_group=2)
    assert tuple(training.inputs[0].shape) == (64, 131072)
    assert training.placements[0] == (("fsdp",), ("cp",))
    with pytest.raises(JobError, match=r"sequences=32 of length=100\. .* into 32 and 8 parts"):
        make("llama-tiny", job, sequence=100)
    with pytest.raises(JobError, match=r"Model 'llama9' was asked for"):
        make("llama9", job)


def test_rules_of_experts() -> None:
    job = JOBS["mixtral-tiny"]
    sizes = ModelSizes.load("mixtral-tiny")
    rules = rules_of(job, sizes, batch_of(job))
    assert rules is not None
    found = {rule.pattern: rule.entries for rule in rules.activations}
    assert found["**.experts.arrivals"] == ("ep", "fsdp", None, None, None)
    assert found["**.experts.unpacked"] == (None, ("fsdp", "ep"), None, None, None)
    other = job_like("mixtral_8x7b_v6e", fsdp=8)
    whole = rules_of(other, sizes, batch_of(other))
    assert whole is not None
    found = {rule.pattern: rule.entries for rule in whole.activations}
    assert found["**.experts.arrivals"] == (None, "fsdp", None, None, None)
    assert found["model.layers.*"] == found["**.mlp"] == ("fsdp", None, None)


def test_rules_of_a_dense_model() -> None:
    job = JOBS["llama-tiny"]
    rules = rules_of(job, ModelSizes.load("llama-tiny"), batch_of(job))
    assert rules is not None
    found = {rule.pattern: rule.entries for rule in rules.activations}
    assert found["**.q_proj"] == found["**.up_proj"] == ("fsdp", None, "tp")
    assert found["**.down_proj"] == found["**.self_attn"] == ("fsdp", None, None)
    assert rules.activations[0].pattern == "model.layers.*"


def run(name: str, sharded: bool, dtype: torch.dtype = torch.float32) -> tuple[list[float], Any]:
    """The losses of three steps, and the compiled step."""
    job = JOBS[name]
    torch.manual_seed(0)
    training: Training = make(
        name, job, sequence=32, per_group=2, dtype=dtype, learning_rate=0.01, device="cpu"
    )
    model, inputs, step = training.model, training.inputs, None
    if sharded:
        import xla_dtensor as xd

        shape = [axis.size for axis in job.axes]
        mesh = xd.init_device_mesh("xla", tuple(shape), mesh_dim_names=job.axis_names)
        xd.shard_module(model, mesh, training.rules)
        pairs = zip(inputs, training.placements, strict=True)
        inputs = tuple(xd.distribute_tensor(given, mesh, lies) for given, lies in pairs)
        step = xd.compile(training.make_step(model, mesh))
    else:
        step = training.make_step(model, None)
    losses = [step(*inputs) for _ in range(3)]
    return [float(getattr(loss, "full_tensor", lambda loss=loss: loss)()) for loss in losses], step


@pytest.mark.thorough
@pytest.mark.only_on("jax")
@pytest.mark.parametrize("name", list(JOBS))
def test_sharded_steps_train_as_plain_ones(runtime: Runtime, name: str) -> None:
    expected, _ = run(name, sharded=False)
    found, step = run(name, sharded=True)
    assert expected[0] > expected[2]
    assert found == pytest.approx(expected, rel=2e-4)
    from xla_dtensor.report import collectives

    mesh = Mesh.arange(tuple(axis.size for axis in JOBS[name].axes), JOBS[name].axis_names)
    kinds: dict[object, set[str]] = {}
    for each in collectives(step.hlo(), mesh):
        kinds.setdefault(each.axes, set()).add(each.kind)
    # Tokens go to experts and back, and the norm of all gradients is summed; weights are gathered.
    if name == "mixtral-tiny":
        assert kinds["ep",] == {"all-to-all", "all-reduce"}
    else:
        assert "all-gather" in kinds["fsdp",]
        assert "all-reduce" in kinds["tp",]


def test_own_model_is_a_training() -> None:
    job = job_like("llama3_8b_v6e_8", fsdp=8)
    model, make_step, inputs, placements = own_model.training(job)
    assert {value.device.type for value in [*model.parameters(), *inputs]} == {"meta"}
    assert placements == ((("fsdp",), None, None),)
    assert inputs[0].shape[0] == prod(axis.size for axis in job.axes)
    loss = make_step(model, None)(*inputs)
    assert loss.shape == ()
