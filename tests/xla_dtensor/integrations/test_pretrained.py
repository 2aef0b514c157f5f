"""from_pretrained: files of Transformers, read straight onto a mesh."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import xla_dtensor as xd
from tests.xla_dtensor.integrations.tiny import difference, llama
from xla_dtensor.errors import ArgumentTypeError, DistributeError, WeightsError
from xla_dtensor.runtimes import Runtime

pytestmark = [pytest.mark.usefixtures("runtime"), pytest.mark.only_on("jax")]


@pytest.fixture
def mesh(runtime: Runtime) -> xd.DeviceMesh:
    return xd.init_device_mesh("xla", (4, 2), mesh_dim_names=("fsdp", "tp"))


@pytest.mark.parametrize("automatic", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_values_are_the_files_and_lie_as_the_plan_says(
    tmp_path: Path, mesh: xd.DeviceMesh, automatic: bool, tied: bool
) -> None:
    import transformers

    plain = llama(tie_word_embeddings=tied).eval()
    plain.generation_config.max_new_tokens = 7
    plain.save_pretrained(tmp_path)
    cls = transformers.AutoModelForCausalLM if automatic else type(plain)
    model = xd.from_pretrained(cls, tmp_path, mesh=mesh)
    assert type(model) is type(plain)
    assert not model.training
    assert difference(model, plain) == 0.0
    assert (model.lm_head.weight is model.model.embed_tokens.weight) is tied
    assert model.model.layers[1].mlp.down_proj.weight.mesh_layout.text() == "[fsdp, tp]"
    assert model.generation_config.max_new_tokens == 7
    ids = torch.arange(16).reshape(4, 4)
    logits = model(ids).logits.full_tensor().cpu()
    torch.testing.assert_close(logits, plain(ids).logits, atol=1e-6, rtol=1e-5)


def test_dtypes_rules_and_attributes_of_the_config(tmp_path: Path, mesh: xd.DeviceMesh) -> None:
    plain = llama().bfloat16()
    plain.save_pretrained(tmp_path)

    def loaded(**options: Any) -> Any:
        return xd.from_pretrained(type(plain), tmp_path, mesh=mesh, **options)

    assert loaded().dtype is torch.bfloat16
    model = loaded(dtype=torch.float32, plan={"**": None}, attn_implementation="eager")
    assert model.dtype is torch.float32
    assert model.lm_head.weight.mesh_layout.text() == "[-, -]"
    assert model.config._attn_implementation == "eager"
    with pytest.raises(ArgumentTypeError, match=r"given low_cpu_mem_usage .* LlamaConfig"):
        loaded(low_cpu_mem_usage=True)


def test_a_new_head_is_refused_or_initialised(tmp_path: Path, mesh: xd.DeviceMesh) -> None:
    import transformers

    llama().save_pretrained(tmp_path)
    cls = transformers.LlamaForSequenceClassification
    with pytest.raises(WeightsError, match=r"score\.weight"):
        xd.from_pretrained(cls, tmp_path, mesh=mesh)
    model = xd.from_pretrained(cls, tmp_path, mesh=mesh, strict=False)
    assert model.score.weight.full_tensor().cpu().std() == pytest.approx(0.02, rel=0.5)


def test_what_is_no_model_of_transformers_is_refused(tmp_path: Path, mesh: xd.DeviceMesh) -> None:
    with pytest.raises(ArgumentTypeError, match="LlamaForCausalLM"):
        xd.from_pretrained(torch.nn.Linear, tmp_path, mesh=mesh)


def test_after_install_a_mesh_that_transformers_does_not_read_is_refused(
    tmp_path: Path, mesh: xd.DeviceMesh
) -> None:
    import transformers

    plain = llama()
    plain.save_pretrained(tmp_path)
    xd.install()
    try:
        with pytest.raises(DistributeError, match=r"xd\.from_pretrained\(cls, name, mesh=mesh\)"):
            transformers.AutoModelForCausalLM.from_pretrained(tmp_path, device_mesh=mesh)
        assert difference(type(plain).from_pretrained(tmp_path), plain) == 0.0
    finally:
        xd.uninstall()
    assert "install" not in type(plain).from_pretrained.__func__.__code__.co_filename


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_on_a_mesh_is_saved_by_its_own_method(
    tmp_path: Path, mesh: xd.DeviceMesh, tied: bool
) -> None:
    from xla_dtensor.nn.model_plan import put_model

    plain = llama(tie_word_embeddings=tied)
    model: Any = put_model(llama(tie_word_embeddings=tied), mesh)
    model.save_pretrained(tmp_path, max_shard_size="40KB")
    assert difference(type(plain).from_pretrained(tmp_path), plain) == 0.0
