"""torchao's quantize_ before and after a model is put on a mesh: values, bytes, tokens, state."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import xla_dtensor as xd
from tests.xla_dtensor.integrations.tiny import llama
from xla_dtensor import checkpoint
from xla_dtensor.errors import ArgumentTypeError, WeightsError
from xla_dtensor.nn.model_plan import put_model
from xla_dtensor.runtimes import Runtime

pytestmark = [pytest.mark.usefixtures("runtime"), pytest.mark.only_on("jax")]
IDS = torch.randint(0, 64, (4, 8), generator=torch.Generator().manual_seed(1))
CONFIGS: dict[str, Any] = {
    "Int8WeightOnlyConfig": {},
    "Int8DynamicActivationInt8WeightConfig": {},
    "Float8WeightOnlyConfig": {},
    "IntxWeightOnlyConfig": {"weight_dtype": getattr(torch, "int4")},  # noqa: B009,
}


def quantize(model: nn.Module, name: str = "Int8WeightOnlyConfig", **options: Any) -> Any:
    from torchao import quantization

    given = {**CONFIGS[name], **options}
    quantization.quantize_(model, getattr(quantization, name)(**given))
    return model


def per_group(size: int) -> Any:
    from torchao.quantization import PerGroup

    return PerGroup(size)


def one_config() -> Any:
    from torchao.quantization import Int8WeightOnlyConfig

    return Int8WeightOnlyConfig()


@pytest.fixture(scope="module")
def mesh(runtime: Runtime) -> xd.DeviceMesh:
    return xd.init_device_mesh("xla", (2, 4), mesh_dim_names=("dp", "tp"))


def model_on(mesh: xd.DeviceMesh, order: str, *config: Any, **options: Any) -> Any:
    model = llama(hidden_size=64, intermediate_size=128).eval()
    if order == "before":
        return put_model(quantize(model, *config, **options), mesh)
    return quantize(put_model(model, mesh), *config, **options)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("order", ["before", "after"])
def test_logits_are_the_plain_quantized_models(mesh: xd.DeviceMesh, order: str, name: str) -> None:
    plain = quantize(llama(hidden_size=64, intermediate_size=128).eval(), name)
    model = model_on(mesh, order, name)
    program = xd.compile(lambda ids: model(ids).logits)
    with torch.no_grad():
        expected = plain(IDS).logits
        by_ops, compiled = model(IDS).logits, program(IDS)
    # A value between two steps of int8 is rounded by how it was summed up: one step of the inputs.
    tolerance = 3e-2 if "Dynamic" in name else 1e-5
    for logits in (by_ops, compiled):
        torch.testing.assert_close(logits.full_tensor().cpu(), expected, atol=tolerance, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cut", [("tp", None), (None, "tp")])
def test_a_layer_with_products_of_int8_is_bit_equal(
    mesh: xd.DeviceMesh, cut: tuple[Any, ...], dtype: torch.dtype
) -> None:
    layer = nn.Linear(64, 32, bias=False).to(dtype)
    plain = quantize(nn.Sequential(layer), "Int8DynamicActivationInt8WeightConfig")
    x = torch.randn(4, 8, 64).to(dtype)
    expected = plain(x)
    model = xd.shard_module(copy.deepcopy(plain), mesh, {"0.weight": cut})
    assert torch.equal(model(x).full_tensor().cpu(), expected)


@pytest.mark.parametrize("order", ["before", "after"])
def test_how_parts_lie_and_what_a_program_is_given(mesh: xd.DeviceMesh, order: str) -> None:
    model = model_on(mesh, order)
    mlp = model.model.layers[0].mlp
    up, down = mlp.up_proj.weight, mlp.down_proj.weight
    assert [up.qdata.mesh_layout.text(), up.scale.mesh_layout.text()] == ["[tp, -]", "[tp, -]"]
    assert [down.qdata.mesh_layout.text(), down.scale.mesh_layout.text()] == ["[-, tp]", "[-, -]"]
    assert {shard.num_bytes_on_device for shard in up.qdata.addressable_shards()} == {128 * 64 // 4}
    program = xd.compile(lambda ids: model(ids).logits)
    with torch.no_grad():
        program(IDS)
    # A device's quarter of each matrix comes in as int8, and none of them as float32.
    inputs = re.search(r"entry_computation_layout=\{\((.*?)\)->", program.hlo())
    assert inputs is not None
    assert inputs[1].count("s8[32,64]") == inputs[1].count("s8[64,32]") * 2 == 4
    assert "f32[32,64]" not in inputs[1]
    assert "f32[64,32]" not in inputs[1]


def test_groups_are_cut_where_they_fit(mesh: xd.DeviceMesh) -> None:
    model = model_on(mesh, "before", granularity=per_group(32))
    weight = model.model.layers[0].mlp.down_proj.weight
    assert weight.scale.shape == (64, 4)
    assert weight.scale.mesh_layout.text() == "[-, tp]"
    weight = model.model.layers[0].self_attn.o_proj.weight
    assert weight.scale.shape == (64, 2)
    assert weight.scale.mesh_layout.text() == "[-, -]"
    plain = quantize(llama(hidden_size=64, intermediate_size=128), granularity=per_group(32))
    assert (model(IDS).logits.full_tensor().cpu() - plain(IDS).logits).abs().max() < 1e-5


def test_a_plan_counts_the_bytes_of_int8(mesh: xd.DeviceMesh) -> None:
    model = quantize(nn.Sequential(nn.Linear(64, 32, bias=False)))
    assert "2,048" in str(xd.sharding_plan(model, mesh, {"0.weight": ("tp", None)}))


@pytest.mark.parametrize("order", ["before", "after"])
def test_generation(mesh: xd.DeviceMesh, order: str) -> None:
    from xla_dtensor.integrations.generation import compile_generate

    plain = quantize(llama(hidden_size=64, intermediate_size=128).eval())
    model = model_on(mesh, order)
    program = compile_generate(model)
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    tokens = model.generate(IDS, cache_implementation="static", **options)
    assert torch.equal(tokens, plain.generate(IDS, **options))
    assert program.stats()["traces"] == 2


def test_weights_are_read_onto_the_mesh_and_quantized_there(
    mesh: xd.DeviceMesh, tmp_path: Path
) -> None:
    plain = llama(hidden_size=64, intermediate_size=128).eval()
    plain.save_pretrained(tmp_path)
    model = quantize(xd.from_pretrained(type(plain), tmp_path, mesh=mesh))
    expected = quantize(plain)(IDS).logits
    assert (model(IDS).logits.full_tensor().cpu() - expected).abs().max() < 1e-5


def test_files_of_quantized_models_are_refused(mesh: xd.DeviceMesh, tmp_path: Path) -> None:
    import transformers

    model = model_on(mesh, "after")
    with pytest.raises(WeightsError, match=r"before quantize_\(\)"):
        checkpoint.save_hf(tmp_path / "again", model)
    plain = llama(hidden_size=64, intermediate_size=128)
    plain.save_pretrained(tmp_path / "plain")
    config = transformers.TorchAoConfig(one_config())
    with pytest.raises(ArgumentTypeError, match=r"quantize_\(model"):
        xd.from_pretrained(type(plain), tmp_path / "plain", mesh=mesh, quantization_config=config)
    loaded = type(plain).from_pretrained(tmp_path / "plain", quantization_config=config)
    expected = loaded(IDS).logits
    loaded.save_pretrained(tmp_path / "quantized")
    with pytest.raises(ArgumentTypeError, match=r"put_model"):
        xd.from_pretrained(type(plain), tmp_path / "quantized", mesh=mesh)
    put_model(loaded, mesh)
    assert (loaded(IDS).logits.full_tensor().cpu() - expected).abs().max() < 1e-5


def test_a_checkpoint_holds_the_parts_and_loads_on_another_mesh(
    mesh: xd.DeviceMesh, tmp_path: Path
) -> None:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    model = model_on(mesh, "after")
    checkpoint.save(tmp_path, {"model": model}, step=1)
    other = xd.init_device_mesh("xla", (8,), mesh_dim_names=("fsdp",))
    loaded = model_on(other, "before")
    with torch.no_grad():
        loaded.model.layers[0].mlp.up_proj.weight.qdata.zero_()
        loaded.model.layers[1].self_attn.k_proj.weight.scale.zero_()
        loaded.model.norm.weight.zero_()
    checkpoint.load(tmp_path, {"model": loaded}, step=1)
    assert loaded.model.layers[0].mlp.up_proj.weight.qdata.mesh_layout.text() == "[fsdp, -]"
    expected = model(IDS).logits.full_tensor().cpu()
    assert (loaded(IDS).logits.full_tensor().cpu() - expected).abs().max() < 1e-5
    # Whole, for torch.save: the library's tensors on the host, as quantize_ makes them there.
    xd.install()
    try:
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = get_model_state_dict(loaded, options=options)
    finally:
        xd.uninstall()
    plain = llama(hidden_size=64, intermediate_size=128).eval()
    plain = quantize(plain)
    plain.load_state_dict(state)
    assert (plain(IDS).logits - expected).abs().max() < 1e-5


def test_a_compiled_step_sees_other_weights(mesh: xd.DeviceMesh) -> None:
    model = model_on(mesh, "before")
    program = xd.compile(lambda ids: model(ids).logits)
    with torch.no_grad():
        program(IDS)
        model.lm_head.weight.qdata.zero_()
        assert program(IDS).abs().max().item() == 0
        fresh = quantize(nn.Sequential(nn.Linear(64, 64, bias=False)))[0]
        model.lm_head.weight = xd.shard_module(fresh, mesh, {"weight": ("tp", None)}).weight
        expected = model(IDS).logits.full_tensor().cpu()
        assert expected.abs().max() > 0.1
        assert (program(IDS).full_tensor().cpu() - expected).abs().max() < 1e-5


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:TorchaoLoraLinear was instantiated:UserWarning")
def test_adapters_train_over_int8(mesh: xd.DeviceMesh) -> None:
    import peft

    options = {"r": 4, "target_modules": ["q_proj", "down_proj"], "init_lora_weights": "gaussian"}
    plain = quantize(llama(hidden_size=64, intermediate_size=128))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        plain = peft.get_peft_model(plain, peft.LoraConfig(**options))
    model = put_model(copy.deepcopy(plain), mesh)

    def step_of(trained: Any) -> Any:
        optimizer = torch.optim.AdamW([p for p in trained.parameters() if p.requires_grad], lr=1e-2)

        def step() -> torch.Tensor:
            loss = trained(input_ids=IDS, labels=IDS).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return step

    by_torch, by_xla = step_of(plain), xd.compile(step_of(model))
    for _ in range(3):
        assert by_xla().item() == pytest.approx(by_torch().item(), abs=1e-5)
    trained = [name for name, p in plain.named_parameters() if p.requires_grad]
    ours: dict[str, Any] = dict(model.named_parameters())
    for name in trained:
        got = ours[name].full_tensor().detach().cpu()
        assert (got - plain.get_parameter(name)).abs().max() < 1e-4, name
    assert by_xla.stats()["traces"] == 1
