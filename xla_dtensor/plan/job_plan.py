"""A job's training plan: the step that a job file names, on the mesh that it describes.

The function that makes a job's model is called with the job and returns model, make_step, inputs,
placements and, perhaps, rules (``xla_dtensor/models/training.py`` states that contract). Here it
becomes a function of the mesh, which is what is compiled: the model is sharded by the rules, then
the step is made, so that its optimizer holds the sharded parameters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import Placement

from mesh_utils import JobConfig
from xla_dtensor.core import Layout
from xla_dtensor.core.errors import CompileError
from xla_dtensor.dtensor.mesh import DeviceMesh
from xla_dtensor.dtensor.redistribute import torch_placements
from xla_dtensor.nn.shard_module import shard_module
from xla_dtensor.plan.aot import function_of
from xla_dtensor.plan.search import HUGGING_FACE, REFERENCE, maker_of, with_variant

__all__ = ["job_plan"]


def job_plan(
    mesh: DeviceMesh,
    *,
    job: str,
    model: str | None = None,
    variant: Mapping[str, Any] | None = None,
    **options: Any,
) -> Any:
    """Return model, step, inputs and placements of a job.

    Args:
        mesh: The job's mesh.
        job: A job file, or its name.
        model: A reference model, a config.json, or "module:function" of your own; the job's when
            None.
        variant: Axes or a slice in place of the job's: see ``job_variant``.
        **options: Of the reference models (``sequence``, ``per_group``, ``dtype``, ...), or of your
            function.

    Returns:
        What a ``TrainingPlan`` is read from.

    Raises:
        CompileError: The job names no model, or the function returns something else.
        JobError: No such job, model, or batch.
    """
    config = with_variant(JobConfig.load(job), variant)
    name = model or config.model
    if name is None:
        raise CompileError(
            f"Job {config.name!r} was to be compiled. It names no model, and none was passed. Pass "
            "a reference model, such as 'llama3-8b', or 'module:function'."
        )
    maker = maker_of(name)
    if maker == "function":
        training = function_of(name)(config, **options)
    else:
        function = REFERENCE if maker == "reference" else HUGGING_FACE
        training = function_of(function)(name, config, **_read(options))
    if not isinstance(training, tuple) or len(training) not in (4, 5):
        raise CompileError(
            f"The model {name!r} of job {config.name!r} was called with the job. It returned "
            f"{type(training).__name__}. Return (model, make_step, inputs, placements), as "
            "xla_dtensor/models/training.py does."
        )
    built, make_step, inputs, placements, *own_rules = training
    rules = own_rules[0] if own_rules and own_rules[0] is not None else config.sharding
    sharded = built if rules is None else shard_module(built, mesh, rules)
    step = make_step(sharded, mesh)
    input_placements = [
        _placements(placement, tensor, mesh)
        for placement, tensor in zip(placements, inputs, strict=True)
    ]
    return sharded, step, tuple(inputs), tuple(input_placements)


def _read(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options as they come from JSON: a dtype is its name."""
    keywords = dict(options)
    for name in ("dtype", "moment_dtype"):
        if isinstance(keywords.get(name), str):
            keywords[name] = getattr(torch, keywords[name])
    return keywords


def _placements(spec: Any, tensor: Any, mesh: DeviceMesh) -> Sequence[Placement] | None:
    """An entry per dim, as in sharding rules, in DTensor's words: a placement per axis."""
    if spec is None:
        return None
    layout = Layout.from_partition_spec(spec, mesh.value, tensor_ndim=tensor.ndim)
    return torch_placements(layout)
