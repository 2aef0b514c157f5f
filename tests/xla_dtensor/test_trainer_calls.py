"""What trainers and savers call on DTensors and sharded modules gives what it gives in PyTorch."""

from __future__ import annotations

import copy
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import Replicate, Shard
from torch.utils.checkpoint import checkpoint

import xla_dtensor as xd
from xla_dtensor.errors import ArgumentTypeError, DistributeError
from xla_dtensor.runtimes import Runtime

pytestmark = pytest.mark.usefixtures("runtime")
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


@pytest.fixture(scope="module")
def mesh(runtime: Runtime) -> xd.DeviceMesh:
    return xd.init_device_mesh("xla", (2, 4), mesh_dim_names=("dp", "tp"))


def placed(value: torch.Tensor, mesh: xd.DeviceMesh) -> Any:
    return xd.distribute_tensor(value, mesh, [Shard(0), Replicate()])


def model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(12, 18), nn.GELU(), nn.Linear(18, 12))


def sharded(mesh: xd.DeviceMesh, seed: int = 0) -> Any:
    plan = {"0.weight": ["tp", "dp"]}
    return xd.shard_module(model(seed), mesh, plan, unmatched="replicate")


def data() -> torch.Tensor:
    return torch.randn(16, 12, generator=torch.Generator().manual_seed(5))


# ------------------------------------------------------------------ devices


def test_to_the_meshs_device_type_stays(mesh: xd.DeviceMesh) -> None:
    x = placed(torch.ones(8, 4), mesh)
    assert x.to(mesh.device_type) is x
    assert x.to(device=mesh.device_type) is x
    half = x.to(mesh.device_type, torch.bfloat16, copy=True)
    assert (half.dtype, half.placements) == (torch.bfloat16, x.placements)
    assert sharded(mesh).to(mesh.device_type)[0].weight.placements == (Shard(1), Shard(0))


@pytest.mark.only_on("jax")
def test_module_cpu(mesh: xd.DeviceMesh) -> None:
    mine = sharded(mesh)
    mine(placed(data(), mesh)).sum().backward()
    gradient = mine[0].weight.grad.cpu()
    with pytest.raises(DistributeError, match="set_overwrite_module_params_on_conversion"):
        mine.cpu()
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        mine.cpu()
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)
    assert type(mine[0].weight) is nn.Parameter
    torch.testing.assert_close(mine[0].weight.grad, gradient, rtol=0, atol=0)
    torch.testing.assert_close(mine(data()), model()(data()))


def test_new_tensor_and_trunc_normal(mesh: xd.DeviceMesh) -> None:
    x = placed(torch.zeros(16, 8, dtype=torch.float64), mesh)
    made = x.new_tensor([1.0, 2.0], device="cpu")
    assert (type(made), made.dtype, made.tolist()) == (torch.Tensor, torch.float64, [1, 2])
    assert x.new_tensor(3, dtype=torch.int32, device="cpu").dtype == torch.int32
    drawn = nn.init.trunc_normal_(x, std=2.0, a=-1.0, b=1.0).cpu()
    assert drawn.unique().numel() > 100
    assert drawn.abs().max() <= 1


# ------------------------------------------------------------------ memory


@pytest.mark.only_on("jax")
def test_safetensors(mesh: xd.DeviceMesh, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    mine = sharded(mesh)
    state = mine.state_dict()
    save_file(state, tmp_path / "model.safetensors")
    for name, value in load_file(tmp_path / "model.safetensors").items():
        torch.testing.assert_close(value, model().state_dict()[name], rtol=0, atol=0)
    with torch.no_grad():
        mine[0].weight.mul_(2)
    save_file(state, tmp_path / "model.safetensors")  # not what was read before
    found = load_file(tmp_path / "model.safetensors")["0.weight"]
    weight = model().state_dict()["0.weight"]
    # A compiled step's later calls leave the tensor's version as it is.
    double: Any = xd.compile(lambda: mine[0].weight.detach().mul_(2))
    for number in range(3):
        double()
        save_file(state, tmp_path / "model.safetensors")
        again = load_file(tmp_path / "model.safetensors")["0.weight"]
        torch.testing.assert_close(again, weight * 2 ** (number + 2), rtol=0, atol=0)
    torch.testing.assert_close(found, weight * 2, rtol=0, atol=0)


@pytest.fixture
def torchs_functions() -> Iterator[None]:
    xd.install()
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    xd.uninstall()


@pytest.mark.usefixtures("torchs_functions")
@pytest.mark.parametrize("how", ["placements", "fully_shard"])
@pytest.mark.parametrize("more", [{}, {"broadcast_from_rank0": True}], ids=["", "broadcast"])
def test_whole_state_dicts(mesh: xd.DeviceMesh, how: str, more: dict[str, Any]) -> None:
    def trained(seed: int) -> tuple[Any, Any]:
        is_placed = how == "placements"
        mine = sharded(mesh, seed) if is_placed else xd.fully_shard(model(seed), mesh=mesh["dp"])
        optimizer = torch.optim.AdamW(mine.parameters())
        mine(placed(data(), mesh)).square().sum().backward()
        optimizer.step()
        return mine, optimizer

    mine, optimizer = trained(0)
    whole = get_model_state_dict(mine, options=WHOLE)
    moments = get_optimizer_state_dict(mine, optimizer, options=WHOLE)
    assert {type(value) for value in whole.values()} == {torch.Tensor}
    on_mesh: Any = get_model_state_dict(mine, options=StateDictOptions(full_state_dict=True))
    for name, value in mine.named_parameters():
        torch.testing.assert_close(whole[name], value.detach().cpu(), rtol=0, atol=0)
        assert on_mesh[name].shape == value.shape
    other, others_optimizer = trained(1)
    options = StateDictOptions(full_state_dict=True, **more)
    set_model_state_dict(other, whole, options=options)
    set_optimizer_state_dict(other, others_optimizer, moments, options=options)
    for one, two in zip(mine.parameters(), other.parameters(), strict=True):
        assert one.placements == two.placements
        torch.testing.assert_close(one.detach().cpu(), two.detach().cpu(), rtol=0, atol=0)
        first, second = optimizer.state[one]["exp_avg"], others_optimizer.state[two]["exp_avg"]
        torch.testing.assert_close(first.cpu(), second.cpu(), rtol=0, atol=0)


# ------------------------------------------------------------------ mixed precision


def under_autocast(layer: Any, x: Any, device_type: str) -> Any:
    with torch.autocast(device_type, dtype=torch.bfloat16):
        return layer(x) @ x.mT, F.softmax(x, -1)


BESIDE_TORCH_XLA = """
import sys, torch, xla_dtensor as xd
if sys.argv[1] == "before":
    import torch_xla
xd.get_runtime("jax", num_cpu_devices=8)
if sys.argv[1] == "after":
    import torch_xla.core.xla_model
x = xd.distribute_tensor(torch.ones(8, 8), xd.init_device_mesh("xla", (8,)))
with torch.autocast("xla", dtype=torch.bfloat16):
    print("dtypes", (x @ x).dtype, (x + x).dtype)
"""


@pytest.mark.only_on("jax")
@pytest.mark.skipif(importlib.util.find_spec("torch_xla") is None, reason="torch_xla is not there")
@pytest.mark.parametrize("when", ["before", "after"])
def test_autocast_where_torch_xla_is_imported_as_well(when: str) -> None:
    """Both register kernels for autocast; a second fallback would end the process."""
    command = [sys.executable, "-c", BESIDE_TORCH_XLA, when]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert "dtypes torch.bfloat16 torch.float32" in done.stdout, done.stderr[-2000:]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_autocast_of_the_meshs_device_type(mesh: xd.DeviceMesh, compiled: bool) -> None:
    layer = nn.Linear(12, 12)
    mine = xd.distribute_module(copy.deepcopy(layer), mesh)
    step = xd.compile(under_autocast) if compiled else under_autocast
    found, soft = step(mine, placed(data(), mesh), mesh.device_type)
    wanted, wanted_soft = under_autocast(layer, data(), "cpu")
    assert found.dtype == torch.bfloat16
    assert soft.dtype == wanted_soft.dtype
    torch.testing.assert_close(found.detach().cpu(), wanted.detach(), rtol=0.02, atol=0.05)


@pytest.mark.only_on("jax")
def test_autocast_around_a_compiled_step_and_of_plain_tensors(mesh: xd.DeviceMesh) -> None:
    step = xd.compile(lambda x: x @ x.mT)
    x = placed(data(), mesh)
    assert step(x).dtype == torch.float32
    with torch.autocast(mesh.device_type, dtype=torch.bfloat16):
        assert step(x).dtype == torch.bfloat16
        assert (data() @ data().mT).dtype == torch.float32
    assert step(x).dtype == torch.float32


@pytest.mark.only_on("jax")
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_checkpoint_recomputes_under_autocast(mesh: xd.DeviceMesh, compiled: bool) -> None:
    """The backward pass runs outside of autocast, and recomputes in bfloat16 all the same."""
    plain = model()
    mine: Any = xd.distribute_module(copy.deepcopy(plain), mesh)

    def step(layers: Any, x: Any, device_type: str) -> Any:
        with torch.autocast(device_type, dtype=torch.bfloat16):
            loss = checkpoint(layers, x, use_reentrant=False).float().square().sum()
        loss.backward()
        return loss

    (xd.compile(step) if compiled else step)(mine, placed(data(), mesh), mesh.device_type)
    step(plain, data(), "cpu")
    for one, two in zip(mine.parameters(), plain.parameters(), strict=True):
        assert one.grad is not None
        torch.testing.assert_close(one.grad.cpu(), two.grad, rtol=0.05, atol=0.05)


def test_grad_scaler(mesh: xd.DeviceMesh) -> None:
    """Two steps and one whose gradients overflow, which is skipped."""

    def train(layers: Any, x: Any) -> tuple[list[torch.Tensor], float]:
        optimizer = torch.optim.AdamW(layers.parameters(), lr=1e-2)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for factor in (1.0, 1.0, torch.inf):
            scaler.scale((layers(x) * factor - 1).square().mean()).backward()
            scaler.unscale_(optimizer)
            if factor == 1.0:
                nn.utils.clip_grad_norm_(layers.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return [each.detach().cpu() for each in layers.parameters()], scaler.get_scale()

    found, scale = train(sharded(mesh), placed(data(), mesh))
    wanted, wanted_scale = train(model(), data())
    assert scale == wanted_scale == 512
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)


# ------------------------------------------------------------------ layers that torch has as one op


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "bidirectional": True}], ids=["", "2"])
def test_lstm(mesh: xd.DeviceMesh, dtype: torch.dtype, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    plain = nn.LSTM(6, 4, batch_first=True, **options).to(dtype)
    mine = xd.distribute_module(copy.deepcopy(plain), mesh)
    x = torch.randn(8, 3, 6, dtype=dtype)
    found, wanted = mine(placed(x, mesh))[0], plain(x)[0]
    tolerance = {"rtol": 0, "atol": 1e-5 if dtype == torch.float32 else 0.05}
    torch.testing.assert_close(found.detach().cpu(), wanted.detach(), **tolerance)
    found.sum().backward()
    wanted.sum().backward()
    for one, two in zip(mine.parameters(), plain.parameters(), strict=True):
        assert one.grad is not None
        torch.testing.assert_close(one.grad.cpu(), two.grad, rtol=0.02, atol=tolerance["atol"] * 10)


PAD = torch.arange(4).expand(8, 4) == 3
CAUSAL = nn.Transformer.generate_square_subsequent_mask(4)
MASKS: dict[str, dict[str, Any]] = {
    "none": {},
    "padding": {"src_key_padding_mask": PAD},
    "causal": {"mask": CAUSAL, "is_causal": True},
    "both": {"mask": CAUSAL.isinf(), "src_key_padding_mask": PAD},
}


@pytest.mark.parametrize("masks", MASKS)
@pytest.mark.parametrize("options", [{}, {"norm_first": True, "activation": "gelu"}], ids=["", "n"])
def test_encoder_in_eval(mesh: xd.DeviceMesh, masks: str, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, **options)
    plain = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    mine = xd.distribute_module(copy.deepcopy(plain), mesh)
    x, given = torch.randn(8, 4, 16), MASKS[masks]
    if "src_key_padding_mask" in given:
        given = {**given, "src_key_padding_mask": placed(PAD, mesh)}
    with torch.no_grad():
        found, wanted = mine(placed(x, mesh), **given), plain(x, **MASKS[masks])
    torch.testing.assert_close(found.cpu(), wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("average", [True, False])
def test_attention_in_eval_gives_its_weights(mesh: xd.DeviceMesh, average: bool) -> None:
    torch.manual_seed(0)
    plain = nn.MultiheadAttention(16, 4, batch_first=True).eval()
    mine = xd.distribute_module(copy.deepcopy(plain), mesh)
    x = torch.randn(8, 4, 16)
    on_mesh = placed(x, mesh)
    with torch.no_grad():
        found = mine(on_mesh, on_mesh, on_mesh, average_attn_weights=average)
        wanted = plain(x, x, x, average_attn_weights=average)
    for one, two in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.cpu(), two, rtol=0, atol=1e-6)


# ------------------------------------------------------------------ what would be lost in silence


def _generator(x: Any) -> Iterator[Any]:
    yield x * 2


async def _coroutine(x: Any) -> Any:
    return x * 2


@pytest.mark.parametrize("step", [_generator, _coroutine])
def test_steps_that_run_after_the_call(step: Any) -> None:
    with pytest.raises(ArgumentTypeError, match=r"a generator function or a coroutine\. .* Pass a"):
        xd.compile(step)


@pytest.mark.parametrize("value", [0, -1, 2.5, "x"])
def test_reshard_after_forward(mesh: xd.DeviceMesh, value: Any) -> None:
    with pytest.raises(
        ArgumentTypeError, match=f"reshard_after_forward={value!r}. It says whether"
    ):
        xd.fully_shard(nn.Linear(8, 8), mesh=mesh["dp"], reshard_after_forward=value)


def test_weights_that_are_tied_over_two_groups(mesh: xd.DeviceMesh) -> None:
    one, other = nn.Linear(4, 4), nn.Linear(4, 4)
    other.weight = one.weight
    xd.fully_shard(one, mesh=mesh["dp"])
    with pytest.raises(
        DistributeError, match=r"parameter 'weight' is tied .* Call it once for both"
    ):
        xd.fully_shard(other, mesh=mesh["dp"])
    both = [nn.Linear(4, 4), nn.Linear(4, 4)]
    both[1].weight = both[0].weight
    xd.fully_shard(both, mesh=mesh["dp"])
    assert both[0].weight is both[1].weight


def test_numpy_arrays_beside_dtensors(mesh: xd.DeviceMesh) -> None:
    x, array = placed(torch.ones(8, 6), mesh), np.ones(6, "f")
    for combine in (lambda: x + array, lambda: np.add(x, array)):
        with pytest.raises(
            DistributeError, match=r"NumPy array was combined .* Pass torch\.from_n"
        ):
            combine()
    assert (x + torch.from_numpy(array)).shape == (8, 6)
    assert np.asarray(x.cpu()).shape == (8, 6)
