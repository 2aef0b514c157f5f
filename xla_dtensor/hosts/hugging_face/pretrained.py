"""from_pretrained: a model of Transformers, read from its files straight onto a mesh.

    model = xd.from_pretrained(LlamaForCausalLM, "meta-llama/Llama-3.1-8B", mesh=mesh)

    config.json         the model on the meta device: shapes, no memory
    plan                how each parameter lies: the model's own, or rules
    *.safetensors       each process reads the blocks that its devices hold

Transformers' own ``from_pretrained`` loads a model to one host, or cuts it by process groups and
local tensors; a ``device_mesh=`` that it is given alone it does not read. The model that comes back
here is the same one with DTensors, for XDTrainer, ``compile_generate``, or a loop of one's own.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from xla_dtensor.core.errors import ArgumentTypeError
from xla_dtensor.hosts.hugging_face import load_hf
from xla_dtensor.nn.materialize import materialize
from xla_dtensor.nn.model_plan import put_model

__all__ = ["from_pretrained"]

_FILES = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]


def from_pretrained(
    cls: Any,
    name: str | os.PathLike[str],
    *,
    mesh: Any,
    plan: Any = None,
    dtype: torch.dtype | str | None = "auto",
    strict: bool = True,
    revision: str | None = None,
    **config: Any,
) -> Any:
    """Load a model of Transformers onto a mesh.

    Args:
        cls: The model's class, or one of Transformers' ``AutoModelFor...``.
        name: A folder with the config and safetensors files; or the name of a model on the Hub,
            which is downloaded as a whole.
        mesh: The mesh.
        plan: Rules, as :func:`xla_dtensor.shard_module` takes them. None: the model's own plan over
            an axis "tp", and everything cut over an axis "fsdp".
        dtype: What floating-point weights become; "auto": what they are in the files.
        strict: Refuse weights that only the model or only the files have. False: weights that no
            file has are initialised as the model does, those of a new head for example.
        revision: Of a model on the Hub.
        **config: Attributes of the config that are to differ, ``attn_implementation="eager"``.

    Returns:
        The model, in eval mode as Transformers returns it.

    Raises:
        ArgumentTypeError: `cls` is no class of Transformers, the model is quantized, or an argument
            is no attribute of its config.
        RulesError: A plan that does not fit the model.
        WeightsError: Files that are damaged or not there, or that do not fit the model.

    Example:
        >>> import tempfile, transformers, xla_dtensor as xd
        >>> mesh = xd.init_device_mesh("xla", (4, 2), mesh_dim_names=("fsdp", "tp"))
        >>> config = transformers.LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=32,
        ...     num_hidden_layers=1, num_attention_heads=2)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     transformers.LlamaForCausalLM(config).save_pretrained(folder)
        ...     model = from_pretrained(transformers.AutoModelForCausalLM, folder, mesh=mesh)
        >>> type(model).__name__, model.lm_head.weight.mesh_layout.text()
        ('LlamaForCausalLM', '[tp, fsdp]')
    """
    folder = _folder_of(name, revision)
    model = _on_meta(cls, folder, config)
    put_model(model, mesh, plan)
    load_hf(folder, model, dtype=dtype, strict=strict)
    materialize(model, mesh, init=False if strict else None)
    return model.eval()


def _folder_of(name: str | os.PathLike[str], revision: str | None) -> Path:
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(str(name), revision=revision, allow_patterns=_FILES))


def _on_meta(cls: Any, folder: Path, changes: dict[str, Any]) -> Any:
    """Make a model of the shapes that a folder's config says, without values."""
    from transformers import AutoConfig, GenerationConfig

    kind = getattr(cls, "config_class", None)
    if kind is None and not hasattr(cls, "from_config"):
        raise ArgumentTypeError(
            f"from_pretrained was given {cls!r} to load {str(folder)!r} as. It makes models of "
            "Transformers by their config. Pass a class such as LlamaForCausalLM, or "
            "AutoModelForCausalLM; other modules load with xd.checkpoint.load_hf."
        )
    loader = kind or AutoConfig
    config, unused = loader.from_pretrained(folder, return_unused_kwargs=True, **changes)
    if "quantization_config" in unused or getattr(config, "quantization_config", None) is not None:
        raise ArgumentTypeError(
            f"from_pretrained was to load {str(folder)!r} with a quantization_config. Its "
            "quantized weights, or how they are made, are Transformers' own. Load the weights as "
            "they were before, and call torchao's quantize_(model, ...) on the model that comes "
            "back; or load it with Transformers to the host, and give it to "
            "xla_dtensor.nn.model_plan.put_model(model, mesh)."
        )
    if unused:
        raise ArgumentTypeError(
            f"from_pretrained was given {', '.join(unused)} to load {str(folder)!r} with. Its "
            f"{type(config).__name__} has no such attribute. Pass attributes of the config; what "
            "Transformers' own from_pretrained takes besides is not for a mesh."
        )
    with torch.device("meta"):
        model = cls(config) if kind is not None else cls.from_config(config)
    if model.can_generate() and (folder / "generation_config.json").exists():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model
