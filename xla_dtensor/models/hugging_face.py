"""The training of any causal language model of Hugging Face Transformers, from its config.json.

    training = make("config.json", job)        needs the package transformers; downloads nothing

The model is the package's own, on the meta device; its step is a plain one, of cross
entropy, clipping and AdamW.

Llama, Mistral and Mixtral have reference models (``training.py``), whose layers are one loop, whose
loss holds no logits, and whose rules place every value; here it is as the package writes it: layers
one by one, each computed again in the backward (checkpointed), logits held. So it compiles longer
and takes more memory. Values inside the model lie as XLA decides, but for what the job's rules pin.
Sharding rules name the package's parameters; one that no rule matches is refused by name.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mesh_utils import JobConfig
from mesh_utils.errors import JobError
from xla_dtensor.models.training import AdamW, Step, Training, step_of
from xla_dtensor.plan.estimate import batch_of

__all__ = ["make", "make_hugging_face"]


def make(
    model: str,
    job: JobConfig,
    *,
    sequence: int = 8192,
    per_group: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    moment_dtype: torch.dtype | None = torch.float32,
    remat: Any = "full",
    learning_rate: float = 3e-4,
) -> Training:
    """Make the training of a model of Transformers.

    Args:
        model: The path of a config.json.
        job: Says the axes and how the batch lies: by its rule for "model.layers.*", or over all
            axes but tp.
        sequence: Tokens of a sequence.
        per_group: Sequences per group of devices that share them.
        dtype: Of parameters, gradients and activations.
        moment_dtype: Of both moments of AdamW; None for `dtype`.
        remat: "full" computes each layer again in the backward, "none" keeps all.
        learning_rate: Of AdamW.

    Returns:
        Model, step, inputs and placements. The rules are the job's.

    Raises:
        JobError: The package is not installed, or makes no such model; or another `remat`.
    """
    if remat not in ("full", "none"):
        raise JobError(
            f"Model {model!r} was to be made with remat={remat!r}. A model of Transformers "
            "computes its layers again, or not. Pass full or none."
        )
    module = make_hugging_face(model, dtype=dtype)
    if remat == "full" and getattr(module, "supports_gradient_checkpointing", False):
        module.gradient_checkpointing_enable({"use_reentrant": False})
    batch = batch_of(job, sequence=sequence, per_group=per_group)

    def make_step(model: nn.Module, mesh: Any = None) -> Step:
        optimizer = AdamW(model.parameters(), learning_rate, moment_dtype=moment_dtype)
        return step_of(model, optimizer, _loss)

    shape = (batch.sequences, batch.length)
    inputs = tuple(torch.empty(shape, dtype=torch.int64, device="meta") for _ in range(2))
    return Training(module, make_step, inputs, (batch.placement, batch.placement))


def make_hugging_face(path: str, *, dtype: torch.dtype = torch.bfloat16) -> Any:
    """Make a causal language model on the meta device.

    Args:
        path: A config.json.
        dtype: Of its parameters.

    Returns:
        The package's model, in training mode.

    Raises:
        JobError: The package is not installed, or knows no causal language model of that type.
    """
    config = json.loads(Path(path).read_text(encoding="utf-8"))
    kind = config.pop("model_type", None)
    request = f"Model {path!r} was asked for, with model_type={kind!r}"
    try:
        transformers: Any = importlib.import_module("transformers")
    except ImportError as error:
        raise JobError(
            f"{request}. The package transformers, which has it, is not installed. Install it, or "
            "pass a module:function that makes your model."
        ) from error
    try:
        model_config = transformers.AutoConfig.for_model(kind, **config)
        model_config.use_cache = False
        with torch.device("meta"):
            make: Callable[..., Any] = transformers.AutoModelForCausalLM.from_config
            return make(model_config, dtype=dtype).train()
    except (ValueError, KeyError, TypeError) as error:
        why = str(error).split("\n")[0].rstrip(".")[:200]
        raise JobError(
            f"{request}. Transformers {transformers.__version__} makes no causal language model of "
            f"it: {why}. Pass a module:function that makes your model."
        ) from error


def _loss(model: Any, tokens: Tensor, targets: Tensor) -> Tensor:
    logits = model(input_ids=tokens).logits
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
