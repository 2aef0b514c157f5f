"""ModelSizes: reference models and configs of Hugging Face, read without torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from mesh_utils.errors import JobError
from xla_dtensor.plan.model_sizes import ModelSizes, RopeScaling, model_names

FILE = Path(__file__).resolve().parents[3] / "tpu_configs" / "models.yaml"
DATA: dict[str, Any] = yaml.safe_load(FILE.read_text(encoding="utf-8"))
SMALL: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
}


def by_formula(config: dict[str, Any]) -> int:
    """The number of parameters, counted without a list of them."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads, narrow = config["num_attention_heads"], config["num_key_value_heads"]
    width = config.get("head_dim", hidden // heads)
    attention = 2 * hidden * width * (heads + narrow)
    experts = config.get("num_local_experts")
    feed_forward = 3 * hidden * inner * (experts or 1) + (experts or 0) * hidden
    layer = attention + feed_forward + 2 * hidden
    return config["num_hidden_layers"] * layer + 2 * config["vocab_size"] * hidden + hidden


@pytest.mark.parametrize("name", model_names())
def test_parameters(name: str) -> None:
    entry = DATA["models"][name]
    config = {key: value for part in entry["figures"].values() for key, value in part.items()}
    assert ModelSizes.load(name).num_parameters == by_formula(config) == entry["parameters"]


def test_every_figure_has_a_source() -> None:
    for entry in DATA["models"].values():
        assert set(entry["figures"]) <= set(DATA["sources"])
        keys = [key for part in entry["figures"].values() for key in part]
        assert len(keys) == len(set(keys))


@pytest.mark.parametrize(
    ("name", "billions"),
    [("llama3-8b", 8.03), ("llama3-70b", 70.55), ("llama3-405b", 405.85), ("mixtral-8x7b", 46.70)],
)
def test_published_sizes(name: str, billions: float) -> None:
    assert round(ModelSizes.load(name).num_parameters / 1e9, 2) == billions


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3"}},
        {"rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3"}},
    ],
)
def test_both_forms_of_rotary_settings(rope: dict[str, Any]) -> None:
    part = rope.get("rope_scaling") or rope["rope_parameters"]
    part |= {"factor": 8, "low_freq_factor": 1, "high_freq_factor": 4}
    part["original_max_position_embeddings"] = 8192
    found = ModelSizes.from_config(SMALL | rope)
    assert (found.rope_theta, found.rope_scaling) == (5e5, RopeScaling(8.0, 1.0, 4.0, 8192))


def test_a_config_file(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(SMALL | {"model_type": "mistral", "tie_word_embeddings": True}))
    found = ModelSizes.load(str(path))
    assert (found.model_type, found.num_key_value_heads, found.head_dim) == ("llama", 4, 4)
    assert [name for name, _ in found.parameters()][-1] == "model.norm.weight"


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"model_type": "gpt2"}, r"model_type='gpt2'\. Its parameters are not known here\. Pass"),
        ({"hidden_size": 0}, r"hidden_size=0\. It has to be a positive integer\. Correct"),
        ({"vocab_size": None}, r"vocab_size=None\. It has to be a positive integer\."),
        ({"attention_bias": True}, r"attention_bias=True\. The reference models have "),
        (
            {"hidden_act": "gelu"},
            r"hidden_act='gelu'\. The reference models have hidden_act='silu'",
        ),
        ({"rope_scaling": {"rope_type": "yarn"}}, r"rope_type='yarn'\. .* Pass a module:function"),
        ({"model_type": "mixtral", "sliding_window": 4096}, r"sliding_window=4096\. "),
    ],
)
def test_refusals(change: dict[str, Any], text: str) -> None:
    with pytest.raises(JobError, match=text):
        ModelSizes.from_config(SMALL | change)


def test_names_and_files_that_there_are_not(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"Model 'llama3-8' was asked for\. .* or 'llama3-8b', or"):
        ModelSizes.load("llama3-8")
    broken = tmp_path / "config.json"
    broken.write_text("{")
    with pytest.raises(JobError, match=r"cannot be read as JSON: .* Pass a config\.json"):
        ModelSizes.load(str(broken))
    broken.write_text("[]")
    with pytest.raises(JobError, match=r"of type=list\. A config is a mapping"):
        ModelSizes.load(str(broken))
