"""Who makes a job's model: a reference model, Hugging Face Transformers, or the user's function.

    maker_of("llama3-8b")               the reference models
    maker_of("my_file:training")        the function itself
    maker_of("qwen3/config.json")       Transformers, where the reference models cannot be like it

Without torch.
"""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, TypeAlias

from mesh_utils.errors import JobError
from xla_dtensor.model_sizes import ModelSizes

__all__ = ["HUGGING_FACE", "REFERENCE", "Maker", "maker_of"]

Maker: TypeAlias = Literal["reference", "transformers", "function"]

REFERENCE = "xla_dtensor.models.training:make"
HUGGING_FACE = "xla_dtensor.models.hugging_face:make"


def maker_of(name: str) -> Maker:
    """Say who makes a model.

    Args:
        name: A reference model, the path of a config.json, or "module:function".

    Returns:
        "transformers" for a config that the reference models refuse and that names a type.

    Raises:
        JobError: No such model or file; or only Transformers has it, and is not installed.

    Example:
        >>> maker_of("mixtral-8x7b"), maker_of("my_file:training")
        ('reference', 'function')
    """
    if ":" in name:
        return "function"
    try:
        ModelSizes.load(name)
    except JobError as error:
        if not isinstance(_model_type(name), str):
            raise
        if find_spec("transformers") is None:
            raise JobError(
                f"{str(error).partition(' Pass ')[0]} Transformers might make it, and is not "
                "installed. Install transformers, or pass a module:function that makes your model."
            ) from None
        return "transformers"
    return "reference"


def _model_type(name: str) -> Any:
    try:
        config = json.loads(Path(name).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return config.get("model_type") if isinstance(config, dict) else None
