"""What a function of the mesh gives to be compiled: model, step, inputs and placements.

    def llama(mesh):                                       called with the mesh of the pod
        with torch.device("meta"):
            model = Llama(...)                             405 billion parameters, no memory
        shard_module(model, mesh, RULES)
        optimizer = torch.optim.AdamW(model.parameters())

        def step(tokens, targets):                         an ordinary training step
            ...
        tokens = torch.empty(256, 8192, dtype=torch.int64, device="meta")
        return model, step, (tokens, tokens), ([Shard(0), Replicate()],) * 2

The same function serves a real job: what it returns there has values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from xla_dtensor.core.errors import CompileError
from xla_dtensor.dtensor.api import distribute_tensor
from xla_dtensor.dtensor.mesh import DeviceMesh
from xla_dtensor.nn.compile import compile
from xla_dtensor.runtimes.base import CompiledStep

__all__ = ["TrainingPlan"]


@dataclass(frozen=True, eq=False)
class TrainingPlan:
    """A step with all that it needs; see the module docstring.

    Attributes:
        models: the modules whose tensors are known by their paths.
        step: the step, plain or compiled.
        inputs: its arguments, as DTensors where they are tensors.
    """

    models: tuple[torch.nn.Module, ...]
    step: CompiledStep
    inputs: tuple[Any, ...]

    @classmethod
    def of(
        cls, function: Callable[..., Any], mesh: DeviceMesh, keywords: Mapping[str, Any]
    ) -> TrainingPlan:
        """Call the function and read what it gives.

        Args:
            function: See the module docstring.
            mesh: The mesh.
            keywords: Its other arguments.

        Returns:
            The plan. Inputs lie as asked; buffers that nobody has placed lie everywhere.

        Raises:
            CompileError: It gives something else, or a model of which parameters lie nowhere.
        """
        training = function(mesh, **keywords)
        if not isinstance(training, Sequence) or len(training) != 4 or not callable(training[1]):
            raise CompileError(
                f"The function {_name(function)} was called to learn what to compile. It gave "
                f"{type(training).__name__} where (model, step, inputs, placements) is read. "
                "Return these four."
            )
        model, step, inputs, placements = training
        models = tuple(model) if isinstance(model, list | tuple) else (model,)
        for module in models:
            _check_parameters(module)
            _place_buffers(module, mesh)
        compiled = step if isinstance(step, CompiledStep) else compile(step)
        return cls(models, compiled, tuple(_placed(inputs, placements, mesh)))


def _name(function: Any) -> str:
    return getattr(function, "__qualname__", repr(function))


def _check_parameters(model: torch.nn.Module) -> None:
    unplaced = [name for name, p in model.named_parameters() if not isinstance(p, DTensor)]
    if unplaced:
        raise CompileError(
            f"A model was to be compiled for a mesh of which {len(unplaced)} parameters lie "
            f"nowhere, {unplaced[0]!r} the first of them. Who replicates weights unasked wastes "
            "the memory that is to be found out here. Place every parameter: "
            "shard_module(model, mesh, rules)."
        )


def _place_buffers(model: torch.nn.Module, mesh: DeviceMesh) -> None:
    everywhere = [Replicate()] * mesh.ndim
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if not isinstance(buffer, DTensor):
                placed = distribute_tensor(buffer, mesh, everywhere)
                keep = name not in module._non_persistent_buffers_set
                module.register_buffer(name, placed, persistent=keep)


def _placed(inputs: Any, placements: Any, mesh: DeviceMesh) -> Iterator[Any]:
    values = tuple(inputs) if isinstance(inputs, list | tuple) else (inputs,)
    layouts = (None,) * len(values) if placements is None else tuple(placements)
    if len(layouts) != len(values):
        raise CompileError(
            f"A step was given {len(values)} inputs and {len(layouts)} placements. Each input lies "
            "in its own way. Give as many placements as inputs, None for those that are no tensors."
        )
    for argument, layout in zip(values, layouts, strict=True):
        if isinstance(argument, torch.Tensor) and not isinstance(argument, DTensor):
            argument = distribute_tensor(argument, mesh, layout or [Replicate()] * mesh.ndim)
        yield argument
