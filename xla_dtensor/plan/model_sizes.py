"""ModelSizes: how large a decoder is, and which parameters it has, without torch.

Reference models are in ``tpu_configs/models.yaml``, each figure under its source. A ``config.json``
of Hugging Face Transformers for Llama, Mistral or Mixtral is read as well; nothing is downloaded.

Example:
    >>> sizes = ModelSizes.load("llama3-8b")
    >>> sizes.num_parameters
    8030261248
    >>> next(iter(sizes.parameters()))
    ('model.embed_tokens.weight', (128256, 4096))
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import files
from math import prod
from pathlib import Path
from typing import Any

from mesh_utils.errors import JobError
from mesh_utils.job import nearest, read_yaml

__all__ = ["ModelSizes", "RopeScaling", "model_names"]

_ARCHITECTURES = ("llama", "mistral", "mixtral")
_NEEDED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
)


@dataclass(frozen=True)
class RopeScaling:
    """How Llama 3.1 stretches the rotary embedding to longer sequences than it was trained on.

    Args:
        factor: By how much slow frequencies become slower.
        low_freq_factor: Frequencies with fewer turns than this in the original length are slow.
        high_freq_factor: Those with more turns than this stay; between the two they are blended.
        original_max_position_embeddings: The original length, in tokens.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class ModelSizes:
    """The sizes of a decoder, by the names of Hugging Face's ``config.json``.

    Args:
        name: What it is called here.
        model_type: "llama" or "mixtral". Mistral's is Llama's.
        vocab_size: Rows of the embedding.
        hidden_size: Width of what goes from layer to layer.
        intermediate_size: Width inside the feed-forward part, of one expert where there are some.
        num_hidden_layers: Layers.
        num_attention_heads: Heads of queries.
        num_key_value_heads: Heads of keys and values.
        head_dim: Width of a head.
        rms_norm_eps: Added to the mean square in a norm.
        rope_theta: Base of the rotary embedding.
        rope_scaling: How it is stretched; None for not at all.
        max_position_embeddings: Longest sequence, in tokens.
        num_local_experts: Experts; 0 for a plain feed-forward part.
        num_experts_per_tok: Experts that a token goes to.
        router_aux_loss_coef: Weight of the loss that balances experts.
        tie_word_embeddings: Whether the output projection is the embedding.
    """

    name: str
    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    max_position_embeddings: int = 8192
    num_local_experts: int = 0
    num_experts_per_tok: int = 0
    router_aux_loss_coef: float = 0.0
    tie_word_embeddings: bool = False

    @classmethod
    def load(cls, name_or_path: str) -> ModelSizes:
        """Read a reference model, or a config.json.

        Args:
            name_or_path: One of `model_names()`, or the path of a config.json.

        Returns:
            The sizes.

        Raises:
            JobError: No such model or file, or a model of another architecture.

        Example:
            >>> ModelSizes.load("llama3-405b").num_hidden_layers
            126
        """
        models = _reference_models()
        if name_or_path in models:
            figures = models[name_or_path]["figures"]
            merged = {key: value for part in figures.values() for key, value in part.items()}
            return cls.from_config(merged, name_or_path)
        path = Path(name_or_path)
        if not path.is_file():
            raise JobError(
                f"Model {name_or_path!r} was asked for. There is no such file, nor a reference "
                "model of that name. Pass the path of a config.json, or "
                f"{nearest(name_or_path, models)}."
            )
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise JobError(
                f"Model {name_or_path!r} was asked for. The file cannot be read as JSON: {error}. "
                "Pass a config.json of Hugging Face Transformers."
            ) from None
        return cls.from_config(config, name_or_path)

    @classmethod
    def from_config(cls, config: Mapping[str, Any], name: str = "model") -> ModelSizes:
        """Read a config of Hugging Face Transformers.

        Args:
            config: What its config.json holds; of rotary settings both forms are read.
            name: What to call it.

        Returns:
            The sizes.

        Raises:
            JobError: Another architecture, a figure that is missing, or a setting that the
                reference models do not have.

        Example:
            >>> config = {"model_type": "llama", "vocab_size": 64, "hidden_size": 16,
            ...     "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
            >>> ModelSizes.from_config(config).num_parameters
            4656
        """
        if not isinstance(config, Mapping):
            raise JobError(
                f"Model {name!r} was read, of type={type(config).__name__}. A config is a mapping "
                "of names to figures. Pass a config.json of Hugging Face Transformers."
            )
        kind = config.get("model_type")
        if kind not in _ARCHITECTURES:
            raise JobError(
                f"Model {name!r} was read with model_type={kind!r}. Its parameters are not known "
                f"here. Pass one of {', '.join(_ARCHITECTURES)}, or a module:function."
            )
        for key in _NEEDED:
            if not isinstance(config.get(key), int) or config[key] < 1:
                raise JobError(
                    f"Model {name!r} was read with {key}={config.get(key)!r}. It has to be a "
                    "positive integer. Correct the config."
                )
        _refuse_variants(config, name)
        heads = config["num_attention_heads"]
        rope = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
        experts = config.get("num_local_experts", 8) if kind == "mixtral" else 0
        return cls(
            name=name,
            model_type="mixtral" if kind == "mixtral" else "llama",
            **{key: config[key] for key in _NEEDED},
            num_key_value_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            rms_norm_eps=float(config.get("rms_norm_eps", 1e-5)),
            rope_theta=float(rope.get("rope_theta") or config.get("rope_theta") or 10_000.0),
            rope_scaling=_scaling(rope, name),
            max_position_embeddings=config.get("max_position_embeddings", 8192),
            num_local_experts=experts,
            num_experts_per_tok=config.get("num_experts_per_tok", 2) if experts else 0,
            router_aux_loss_coef=config.get("router_aux_loss_coef", 0.001) if experts else 0.0,
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        )

    def hugging_face_config(self) -> dict[str, Any]:
        """Return what the ``config.json`` of such a model says."""
        values = dataclasses.asdict(self)
        del values["name"]
        scaling = values.pop("rope_scaling")
        rope = {"rope_type": "default"} if scaling is None else {"rope_type": "llama3", **scaling}
        if not self.num_local_experts:
            for key in ("num_local_experts", "num_experts_per_tok", "router_aux_loss_coef"):
                del values[key]
        return {
            **values,
            "architectures": [f"{self.model_type.title()}ForCausalLM"],
            "hidden_act": "silu",
            "rope_parameters": {**rope, "rope_theta": self.rope_theta},
            "rope_scaling": None if scaling is None else rope,
        }

    def parameters(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """List the parameters, named and shaped as in Hugging Face Transformers 5.

        Yields:
            Path and shape, in the order of ``named_parameters``; a tied one once.
        """
        hidden, wide = self.hidden_size, self.num_attention_heads * self.head_dim
        narrow = self.num_key_value_heads * self.head_dim
        yield "model.embed_tokens.weight", (self.vocab_size, hidden)
        for layer in range(self.num_hidden_layers):
            path = f"model.layers.{layer}"
            for name, rows in (("q", wide), ("k", narrow), ("v", narrow)):
                yield f"{path}.self_attn.{name}_proj.weight", (rows, hidden)
            yield f"{path}.self_attn.o_proj.weight", (hidden, wide)
            yield from self._feed_forward(f"{path}.mlp")
            yield f"{path}.input_layernorm.weight", (hidden,)
            yield f"{path}.post_attention_layernorm.weight", (hidden,)
        yield "model.norm.weight", (hidden,)
        if not self.tie_word_embeddings:
            yield "lm_head.weight", (self.vocab_size, hidden)

    def _feed_forward(self, path: str) -> Iterator[tuple[str, tuple[int, ...]]]:
        hidden, inner, experts = self.hidden_size, self.intermediate_size, self.num_local_experts
        if experts:
            yield f"{path}.gate.weight", (experts, hidden)
            yield f"{path}.experts.gate_up_proj", (experts, 2 * inner, hidden)
            yield f"{path}.experts.down_proj", (experts, hidden, inner)
        else:
            yield f"{path}.gate_proj.weight", (inner, hidden)
            yield f"{path}.up_proj.weight", (inner, hidden)
            yield f"{path}.down_proj.weight", (hidden, inner)

    @property
    def num_parameters(self) -> int:
        """How many numbers the parameters have together."""
        return sum(prod(shape) for _, shape in self.parameters())


def model_names() -> tuple[str, ...]:
    """List the reference models.

    Returns:
        Their names; those that end in "-tiny" are for tests.

    Example:
        >>> model_names()[:4]
        ('llama3-8b', 'llama3-70b', 'llama3-405b', 'mixtral-8x7b')
    """
    return tuple(_reference_models())


def _reference_models() -> dict[str, dict[str, Any]]:
    text = files("tpu_configs").joinpath("models.yaml").read_text(encoding="utf-8")
    read: Any = read_yaml(text, "tpu_configs/models.yaml")
    return read["models"]


def _refuse_variants(config: Mapping[str, Any], name: str) -> None:
    """Refuse settings that change what the model computes, or its parameters."""
    plain: dict[str, Any] = {"attention_bias": False, "mlp_bias": False, "hidden_act": "silu"}
    if config["model_type"] == "mixtral":
        plain["sliding_window"] = None
    for key, value in plain.items():
        if config.get(key, value) != value:
            raise JobError(
                f"Model {name!r} was read with {key}={config[key]!r}. The reference models have "
                f"{key}={value!r} only. Pass a module:function that makes your model."
            )


def _scaling(rope: Mapping[str, Any], name: str) -> RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind != "llama3":
        raise JobError(
            f"Model {name!r} was read with rope_type={kind!r}. The reference models stretch their "
            "rotary embedding as Llama 3.1 does, or not at all. Pass a module:function that makes "
            "your model."
        )
    return RopeScaling(
        float(rope["factor"]),
        float(rope["low_freq_factor"]),
        float(rope["high_freq_factor"]),
        int(rope["original_max_position_embeddings"]),
    )
