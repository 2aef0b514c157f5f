"""The config.json that goes with weights, so that transformers can load them by itself."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from xla_dtensor.core.errors import ArgumentTypeError
from xla_dtensor.plan.model_sizes import ModelSizes

__all__ = ["config_text"]

_ARCHITECTURES = {"llama": "LlamaForCausalLM", "mixtral": "MixtralForCausalLM"}


def config_text(module: nn.Module, config: Any, dtype: torch.dtype | None) -> str | None:
    """Return the text of a config.json.

    Args:
        module: Where there is no `config`, a model of transformers has one, and a model of
            ``xla_dtensor/models`` sizes.
        config: A mapping, a config of transformers, or ModelSizes. None: the module's own.
        dtype: Of the weights, where they are converted.

    Returns:
        The text; None where nothing is known of the model.

    Raises:
        ArgumentTypeError: A config of another kind.

    Example:
        >>> print(config_text(nn.Linear(1, 1), {"model_type": "llama"}, torch.bfloat16))
        {
          "dtype": "bfloat16",
          "model_type": "llama"
        }
        <BLANKLINE>
    """
    architecture = type(module).__name__
    if config is None:
        config = getattr(module, "config", None)
        if not hasattr(config, "to_dict"):
            sizes = (getattr(part, "sizes", None) for part in module.modules())
            config = next((each for each in sizes if isinstance(each, ModelSizes)), None)
            if config is None:
                return None
    if isinstance(config, ModelSizes):
        values = _of_sizes(config)
    elif isinstance(config, Mapping):
        values = dict(config)
    elif hasattr(config, "to_dict"):
        values = dict(config.to_dict())
        values["architectures"] = values.get("architectures") or [architecture]
    else:
        raise ArgumentTypeError(
            f"config={config!r} was passed, of type={type(config).__name__}. A config.json is made "
            "of names and values. Pass a mapping, a config of transformers, or ModelSizes."
        )
    if dtype is not None:
        values["dtype"] = str(dtype).removeprefix("torch.")
        values.pop("torch_dtype", None)
    return json.dumps(values, indent=2, sort_keys=True, default=str) + "\n"


def _of_sizes(sizes: ModelSizes) -> dict[str, Any]:
    values = dataclasses.asdict(sizes)
    del values["name"]
    scaling = values.pop("rope_scaling")
    rope: dict[str, Any] = {"rope_type": "default"}
    if scaling is not None:
        rope = {"rope_type": "llama3", **scaling}
    theta = values["rope_theta"]
    if not sizes.num_local_experts:
        for key in ("num_local_experts", "num_experts_per_tok", "router_aux_loss_coef"):
            del values[key]
    return {
        **values,
        "architectures": [_ARCHITECTURES[sizes.model_type]],
        "hidden_act": "silu",
        "rope_parameters": {**rope, "rope_theta": theta},
        "rope_scaling": None if scaling is None else rope,
    }
