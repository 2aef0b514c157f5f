"""Weights between modules and transformers: each reads what the other writes, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import xla_dtensor as xd
from xla_dtensor.hosts.hugging_face import load_hf, save_hf
from xla_dtensor.models.decoder import Llama, Mixtral
from xla_dtensor.plan.model_sizes import ModelSizes

hf = pytest.importorskip("transformers")
pytestmark = [pytest.mark.usefixtures("runtime"), pytest.mark.only_on("jax")]

_SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
_EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
_EXPERT_RULES: dict[str, Any] = {
    "**.experts.gate_up_proj": ["dp", "tp", None],
    "**.experts.down_proj": ["dp", None, "tp"],
}
_RULES: dict[str, Any] = {
    "**.embed_tokens.weight": [("dp", "tp"), None],
    "lm_head.weight": [("dp", "tp"), None],
    "**.o_proj.weight": ["dp", "tp"],
    "**.*_proj.weight": ["tp", "dp"],
    "**": None,
}


def config_of(kind: str, **more: Any) -> Any:
    torch.manual_seed(0)
    if kind == "llama":
        return hf.LlamaConfig(**_SIZES, **more)
    if kind == "mixtral":
        return hf.MixtralConfig(**_SIZES, **_EXPERTS, **more)
    sizes = {**_SIZES, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    return hf.Qwen3MoeConfig(**sizes, head_dim=8, **more)


def model_of(config: Any, device: str = "cpu") -> Any:
    with torch.device(device):
        return hf.AutoModelForCausalLM.from_config(config)


def sharded(model: nn.Module, mesh: xd.DeviceMesh) -> Any:
    has_experts = any("experts" in name for name, _ in model.named_parameters())
    return xd.shard_module(model, mesh, (_EXPERT_RULES if has_experts else {}) | _RULES)


def assert_equal(module: nn.Module, expected: nn.Module) -> None:
    wanted = dict(expected.named_parameters())
    found = dict(module.named_parameters())
    assert found.keys() == wanted.keys()
    for name, parameter in found.items():
        value = parameter.full_tensor() if isinstance(parameter, xd.DTensor) else parameter
        assert parameter.dtype == wanted[name].dtype
        assert torch.equal(value.detach().cpu(), wanted[name].detach()), name


@pytest.mark.parametrize("most", ["20KB", "5GB"])
@pytest.mark.parametrize("kind", ["llama", "mixtral", "qwen3_moe"])
def test_transformers_files_reach_a_sharded_model_without_values(
    mesh: xd.DeviceMesh, tmp_path: Path, kind: str, most: str
) -> None:
    config = config_of(kind)
    expected = model_of(config)
    expected.save_pretrained(tmp_path, max_shard_size=most)
    assert (tmp_path / "model.safetensors").exists() == (most == "5GB")
    model = sharded(model_of(config, "meta"), mesh)
    result = load_hf(tmp_path, model)
    assert not result.missing
    assert not result.unexpected
    assert_equal(model, expected)
    assert all(isinstance(p, xd.DTensor) for p in model.parameters())


def test_a_loaded_model_computes_once_its_buffers_are_made(
    mesh: xd.DeviceMesh, tmp_path: Path
) -> None:
    expected = model_of(config_of("llama")).eval()
    expected.save_pretrained(tmp_path)
    model = sharded(model_of(expected.config, "meta"), mesh)
    load_hf(tmp_path, model)
    xd.materialize(model, init=False)
    assert_equal(model, expected)
    tokens = torch.randint(0, 64, (4, 8))
    with torch.no_grad():
        found = model.eval()(xd.distribute_tensor(tokens, mesh)).logits
        torch.testing.assert_close(found.full_tensor().cpu(), expected(tokens).logits)


@pytest.mark.parametrize("kind", ["llama", "mixtral", "qwen3_moe"])
def test_transformers_reads_what_a_sharded_model_writes(
    mesh: xd.DeviceMesh, tmp_path: Path, kind: str
) -> None:
    model = model_of(config_of(kind))
    expected = hf.AutoModelForCausalLM.from_config(model.config)
    expected.load_state_dict(model.state_dict())
    names = save_hf(tmp_path / "all", sharded(model, mesh), max_shard_bytes="20KB")
    assert len(names) > 1
    again, report = hf.AutoModelForCausalLM.from_pretrained(
        tmp_path / "all", output_loading_info=True
    )
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert type(again) is type(expected)
    assert_equal(again, expected)
    # The same names and bytes in all files together as transformers writes itself.
    expected.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    ours, theirs = (
        json.loads((tmp_path / folder / "model.safetensors.index.json").read_text())
        for folder in ("all", "theirs")
    )
    assert ours["metadata"] == theirs["metadata"]
    assert ours["weight_map"].keys() == theirs["weight_map"].keys()


def test_a_tied_output_is_in_the_files_once_and_stays_tied(
    mesh: xd.DeviceMesh, tmp_path: Path
) -> None:
    config = config_of("llama", tie_word_embeddings=True)
    expected = model_of(config)
    expected.save_pretrained(tmp_path / "theirs")
    model = sharded(model_of(config, "meta"), mesh)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    result = load_hf(tmp_path / "theirs", model)
    assert "lm_head.weight" in result.loaded
    assert not result.missing
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert_equal(model, expected)
    save_hf(tmp_path / "ours", model)
    again = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert again.lm_head.weight is again.model.embed_tokens.weight
    assert_equal(again, expected)


@pytest.mark.parametrize("kind", ["llama", "mixtral"])
def test_the_reference_models_read_and_write_the_same_files(
    mesh: xd.DeviceMesh, tmp_path: Path, kind: str
) -> None:
    sizes = ModelSizes.load(f"{kind}-tiny")
    with torch.device("meta"):
        model: Any = Llama(sizes) if kind == "llama" else Mixtral(sizes, capacity=None)
        model.model.layers = xd.scan_layers(model.model.layers)
    sharded(model, mesh)
    torch.manual_seed(1)
    first = Llama(sizes) if kind == "llama" else Mixtral(sizes, capacity=None)
    save_hf(tmp_path / "plain", first)
    theirs = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "plain").eval()
    assert_equal(theirs, first)
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="50KB")
    load_hf(tmp_path / "theirs", model)
    assert_equal(model, first)
    save_hf(tmp_path / "ours", model, max_shard_bytes="50KB")
    assert_equal(hf.AutoModelForCausalLM.from_pretrained(tmp_path / "ours"), first)


def test_values_are_converted_as_transformers_converts_them(
    mesh: xd.DeviceMesh, tmp_path: Path
) -> None:
    config = config_of("mixtral")
    model_of(config).save_pretrained(tmp_path / "wide")
    narrow = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "wide", dtype=torch.bfloat16)
    model = sharded(model_of(config, "meta"), mesh)
    load_hf(tmp_path / "wide", model, dtype=torch.bfloat16)
    assert_equal(model, narrow)
    save_hf(tmp_path / "half", model, dtype=torch.float16)
    again = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "half")
    assert again.dtype == torch.float16
    assert_equal(again, narrow.half())
