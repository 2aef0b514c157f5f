"""torchtitan's Llama on "xla" meshes computes what it computes on one device."""

# torchtitan is installed for the newest torch only.
# pyright: reportMissingImports=false

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import xla_dtensor as xd
from tests.torchtitan.jobs import JOBS, Job, Run, number, plain_batch, step_of, whole
from xla_dtensor.report import collectives

pytestmark = pytest.mark.only_on("jax")

TOLERANCE = 1e-5
R = Replicate()
Parallel = Callable[[str | Job], Run]
# Every job runs eagerly; these, which hold every feature, run as one program too.
COMPILED = [
    "FSDP",
    "HSDP+TP",
    "FSDP+TP, full checkpointing",
    "FSDP+TP, selective checkpointing",
    "full_dtensor, FSDP+TP",
]


def in_float64(run: Run) -> tuple[Any, float]:
    """The plain model with its gradients, and its loss, in float64."""
    model = copy.deepcopy(run.plain).double()
    return model, number(step_of(model)(*plain_batch(run)))


def check_against_one_device(run: Run, loss: float) -> None:
    model, expected = in_float64(run)
    assert loss == pytest.approx(expected, rel=TOLERANCE)
    gradients = {name: p.grad for name, p in model.named_parameters()}
    found = {
        name.replace("_checkpoint_wrapped_module.", ""): p.grad
        for name, p in run.model.named_parameters()
    }
    assert found.keys() == gradients.keys()
    for name, gradient in gradients.items():
        off = (whole(found[name]).double() - gradient).abs().max() / gradient.abs().max()
        assert off < TOLERANCE, name


@pytest.mark.thorough
@pytest.mark.parametrize("name", JOBS)
def test_loss_and_gradients(parallel: Parallel, name: str) -> None:
    run = parallel(name)
    check_against_one_device(run, number(run.step()(*run.batch())))


@pytest.mark.thorough
@pytest.mark.parametrize("name", COMPILED)
def test_loss_and_gradients_compiled(parallel: Parallel, name: str) -> None:
    run = parallel(name)
    check_against_one_device(run, number(xd.compile(run.step())(*run.batch())))


@pytest.mark.thorough
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", ["FSDP+TP", "full_dtensor, HSDP+TP"])
def test_training(parallel: Parallel, name: str, compiled: bool) -> None:
    """Three steps of AdamW, with torchtitan's clip_grad_norm_."""
    found, expected = parallel(name).losses(3, compiled)
    assert found == pytest.approx(expected, rel=TOLERANCE)
    assert expected[2] < expected[1] < expected[0]


def test_where_parameters_lie(parallel: Parallel) -> None:
    model: Any = parallel("FSDP+TP").model
    assert FSDPModule in type(model).__mro__
    layer = model.layers["0"]
    expected = {
        layer.attention.qkv_linear.wqkv.weight: (_StridedShard(0, split_factor=4), Shard(0)),
        layer.attention.wo.weight: (Shard(0), Shard(1)),
        layer.attention_norm.weight: (Shard(0), R),
        model.tok_embeddings.weight: (_StridedShard(0, split_factor=4), Shard(0)),
        model.lm_head.weight: (_StridedShard(0, split_factor=4), Shard(0)),
    }
    for weight, placements in expected.items():
        assert weight.placements == placements
        cuts = sum(2 if axis == "fsdp" else 4 for axis in cut_axes(weight)) or 1
        assert cuts in (2, 6)
        parts = 8 if cuts == 6 else 2
        held = {shard.num_bytes_on_device for shard in weight.addressable_shards()}
        assert held == {4 * weight.numel() // parts}
        assert weight.xla_sharding().is_tiled


def cut_axes(weight: Any) -> list[str]:
    pairs = zip(weight.device_mesh.mesh_dim_names, weight.placements, strict=True)
    return [axis for axis, placement in pairs if placement != R]


def test_what_is_communicated(parallel: Parallel) -> None:
    """Sequence parallelism gathers and scatters along tp; nothing moves whole activations on dp."""
    run = parallel("FSDP+TP")
    step: Any = xd.compile(run.step())
    step(*run.batch())
    mesh = run.model.layers["0"].attention.wo.weight.device_mesh
    found = list(collectives(step.hlo(), mesh.value))
    over = {axis: {c.kind for c in found if c.axes == (axis,)} for axis in ("fsdp", "tp")}
    assert "all-gather" in over["fsdp"]
    assert over["fsdp"] & {"all-reduce", "reduce-scatter"}
    assert over["tp"] & {"all-gather", "all-reduce", "reduce-scatter"}
    # Gathers along fsdp are of parameters: none has more bytes than the largest one's part on tp.
    largest = max(4 * p.numel() for p in run.plain.parameters()) // 4
    gathers = [c for c in found if c.axes == ("fsdp",) and c.kind == "all-gather"]
    assert max(c.payload_bytes for c in gathers) <= largest


@pytest.mark.parametrize(("name", "calls"), [("FSDP+TP", 1), ("FSDP+TP, full checkpointing", 2)])
def test_full_checkpointing_runs_a_block_again(parallel: Parallel, name: str, calls: int) -> None:
    run = parallel(name)
    seen: list[Any] = []
    block = run.model.layers["0"]
    inner = getattr(block, "_checkpoint_wrapped_module", block)
    inner.feed_forward.register_forward_pre_hook(lambda *_: seen.append(1))
    run.step()(*run.batch())
    assert len(seen) == calls


def test_positions(parallel: Parallel) -> None:
    """The trainer passes positions, which RoPE checks and gathers by."""
    run = parallel("FSDP+TP")
    tokens, _ = run.batch()
    positions = torch.arange(tokens.shape[1]).flip(0).expand(tokens.shape)
    with torch.no_grad():
        found = run.model(tokens, positions)
        expected = run.plain(tokens, positions)
        assert not torch.allclose(run.plain(tokens), expected, atol=1e-3)
    torch.testing.assert_close(whole(found), expected, rtol=1e-4, atol=1e-4)


def test_mixed_precision(parallel: Parallel) -> None:
    """torchtitan's default: parameters gathered in bfloat16, gradients reduced in float32."""
    asked = JOBS["FSDP+TP"]
    run = parallel(Job(asked.parallelism, training={"mixed_precision_param": "bfloat16"}))
    loss = number(run.step()(*run.batch()))
    _, expected = in_float64(run)
    assert loss == pytest.approx(expected, rel=1e-2)
    assert loss != pytest.approx(expected, rel=1e-7)
    assert {p.grad.dtype for p in run.model.parameters()} == {torch.float32}
