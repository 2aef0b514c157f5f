"""shard_module: put a model on a mesh as a list of rules says.

    shard_module(model, mesh, {
        "layers.*.mlp.up_proj.weight": ["tp", "dp"],
        "layers.*.mlp.down_proj.weight": ["dp", "tp"],
        "**": None,                                       every other tensor: copied
        "layers.*()": ["dp", None, None],                 what a layer returns
    })

The rules' forms are described in :mod:`xla_dtensor.core.rules` and, for YAML files, in
:mod:`xla_dtensor.core.rules`. All rules are checked against the model and the mesh before
anything is changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import torch
import yaml
from torch import nn

from mesh_utils import Mesh
from xla_dtensor.core import Layout
from xla_dtensor.core.argument_types import argument_types
from xla_dtensor.core.errors import ArgumentTypeError, DistributeError, RulesError
from xla_dtensor.core.rules import ShardingPlan, ShardingRules, TensorFacts, read_rules
from xla_dtensor.dtensor.api import distribute_tensor, parameter_in_place_of, parts_of
from xla_dtensor.dtensor.dtensor import DTensor
from xla_dtensor.dtensor.mesh import DeviceMesh, as_device_mesh
from xla_dtensor.dtensor.redistribute import torch_placements
from xla_dtensor.spmd.annotate import mark_sharding_with_gradients

__all__ = ["load_rules", "shard_module", "sharding_plan"]

_MARK = "_shard_module_applied"


@argument_types
def shard_module(
    model: nn.Module,
    mesh: Any,
    rules: Any,
    *,
    unmatched: Literal["error", "replicate"] = "error",
) -> nn.Module:
    """Turn a model's parameters and buffers into DTensors as rules say, in place.

    Tied weights stay tied. Rules for outputs become forward hooks, which tell XLA how the output
    and its gradient lie.

    Args:
        model: The model. On the meta device it stays abstract.
        mesh: The mesh.
        rules: ShardingRules, a mapping or list of pairs, or the path of a YAML file.
        unmatched: What becomes of a parameter that no rule matches: "error", or "replicate".
            Buffers that no rule matches are replicated.

    Returns:
        The same model.

    Raises:
        RulesError: Rules that cannot be read, or do not fit: one error with all that is wrong.
        DistributeError: A parameter lies on a mesh otherwise, or shard_module was called before.
        ArgumentTypeError: Not a module, or not a mesh.

    Example:
        >>> import xla_dtensor as xd
        >>> mesh = xd.init_device_mesh("xla", (2, 4), mesh_dim_names=("dp", "tp"))
        >>> shard_module(nn.Linear(8, 16), mesh, {"": "colwise"}).weight.mesh_layout.text()
        '[tp, -]'
    """
    plan = sharding_plan(model, mesh, rules, unmatched=unmatched)
    device_mesh = as_device_mesh(mesh)
    if getattr(model, _MARK, False):
        raise DistributeError(
            f"shard_module was called on a {type(model).__name__} that it was called on before. "
            "Its hooks would run twice. Call it once per model; move single parameters with "
            "redistribute."
        )
    _check_distributed(model, plan, device_mesh)
    _replace_tensors(model, plan, device_mesh)
    for output in plan.outputs:
        hook = _OutputHook(output.path, output.index, output.layout, output.pattern)
        model.get_submodule(output.path).register_forward_hook(hook)
    setattr(model, _MARK, True)
    return model


@argument_types
def sharding_plan(
    model: nn.Module,
    mesh: Any,
    rules: Any,
    *,
    unmatched: Literal["error", "replicate"] = "error",
) -> ShardingPlan:
    """Say what :func:`shard_module` would do, and leave the model as it is.

    With a :class:`mesh_utils.Mesh` no runtime is started, so a large model can be planned on the
    meta device.

    Args:
        model: The model.
        mesh: The mesh.
        rules: As for :func:`shard_module`.
        unmatched: As for :func:`shard_module`.

    Returns:
        The plan: path -> Layout; ``print(plan)`` shows it as a table.

    Raises:
        RulesError: Rules that cannot be read, or do not fit.
        ArgumentTypeError: Not a module, or not a mesh.

    Example:
        >>> with torch.device("meta"):
        ...     model = nn.Linear(1024, 4096, bias=False)
        >>> print(sharding_plan(model, Mesh.arange((4,), ("tp",)), {"weight": ["tp", None]}))
        tensor    shape         placements  bytes/device       bytes  padding  rule
        weight    (4096, 1024)  [tp, -]        4,194,304  16,777,216        0  weight
        total x1                               4,194,304  16,777,216        0
    """
    if not isinstance(model, nn.Module):
        raise ArgumentTypeError(
            f"A sharding plan was asked for an object of type={type(model).__name__}. Only a "
            "torch.nn.Module has parameters that rules can name. Pass a module, or use "
            "distribute_tensor."
        )
    mesh = mesh if isinstance(mesh, Mesh) else as_device_mesh(mesh).value
    modules = [name for name, _ in model.named_modules()]
    sharding_rules = load_rules(rules)
    return sharding_rules.resolve(dict(_facts(model)), mesh, unmatched=unmatched, modules=modules)


def load_rules(rules: Any) -> ShardingRules:
    """Read rules from whatever :func:`shard_module` takes.

    Args:
        rules: ShardingRules, a mapping or list of pairs, or the path of a YAML file.

    Returns:
        The rules.

    Raises:
        RulesError: They cannot be read, or a YAML file has a key twice.
    """
    if not isinstance(rules, (str, PathLike)):
        return read_rules(rules)
    path = Path(rules)
    try:
        rules = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except (OSError, UnicodeDecodeError, RecursionError, yaml.YAMLError) as error:
        raise RulesError(
            f"Sharding rules were to be read from {str(path)!r}. That failed: {error}. Pass the "
            "path of a YAML file, or the rules as a dict."
        ) from error
    return read_rules(rules)


class _Loader(yaml.SafeLoader):
    """Refuses a key that is there twice, of which YAML would keep the last, and rules the first."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        twice = next((key for index, key in enumerate(keys) if key in keys[:index]), None)
        if twice is not None:
            raise yaml.constructor.ConstructorError(
                None, None, f"the key {twice!r} is there twice", node.start_mark
            )
        return super().construct_mapping(node, deep)


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """(path, tensor, whether it is a buffer), of tied tensors each name."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        yield name, parameter, False
    for name, buffer in model.named_buffers(remove_duplicate=False):
        yield name, buffer, True


def _facts(model: nn.Module) -> Iterator[tuple[str, TensorFacts]]:
    paths: dict[int, str] = {}
    for path, tensor, is_buffer in _tensors(model):
        first = paths.setdefault(id(tensor), path)
        same_as = None if first == path else first
        # Of what is made of tensors the values count, not the few scales.
        values = max(parts_of(tensor).values(), key=torch.Tensor.numel, default=tensor)
        yield path, TensorFacts(tuple(tensor.shape), values.itemsize, is_buffer, same_as)


def _check_distributed(model: nn.Module, plan: ShardingPlan, mesh: DeviceMesh) -> None:
    for path, tensor, _ in _tensors(model):
        if isinstance(tensor, DTensor) and (
            tensor.device_mesh != mesh or tensor.mesh_layout != plan[path]
        ):
            raise DistributeError(
                f"shard_module was called on a model whose tensor {path!r} is {tensor!r}, and the "
                f"rules say {plan[path]}. It lies on a mesh already, otherwise than asked. Call "
                "shard_module on the plain model, or write a rule that says how it lies."
            )


def _replace_tensors(model: nn.Module, plan: ShardingPlan, mesh: DeviceMesh) -> None:
    # One object stays one object. Old tensors are let go one by one: two copies may not fit.
    layouts = {id(tensor): plan[path] for path, tensor, _ in _tensors(model)}
    distributed: dict[int, Any] = {}
    for module in model.modules():
        for slots in (module._parameters, module._buffers):
            for name, tensor in slots.items():
                if tensor is None or isinstance(tensor, DTensor):
                    continue
                if id(tensor) not in distributed:
                    layout = layouts[id(tensor)]
                    distributed[id(tensor)] = _distributed(tensor, layout, mesh)
                slots[name] = distributed[id(tensor)]


def _distributed(tensor: torch.Tensor, layout: Layout, mesh: DeviceMesh) -> torch.Tensor:
    distributed = distribute_tensor(tensor.detach(), mesh, torch_placements(layout))
    if isinstance(tensor, nn.Parameter):
        return parameter_in_place_of(tensor, distributed)
    return distributed


@dataclass(frozen=True)
class _OutputHook:
    """A forward hook that says how an output lies; a class, so that the model can be pickled."""

    path: str
    index: int | None
    layout: Layout
    pattern: str

    def __call__(self, module: nn.Module, inputs: Any, output: Any) -> Any:
        if self.index is None:
            return self._placed(output, output)
        if not isinstance(output, (tuple, list)) or self.index >= len(output):
            raise self._misfit(output, "There is no such output", "the pattern without an index")
        values = list(output)
        values[self.index] = self._placed(values[self.index], output)
        if isinstance(output, list):
            return values
        return type(output)(*values) if hasattr(output, "_fields") else tuple(values)

    def _placed(self, tensor: Any, output: Any) -> torch.Tensor:
        if not isinstance(tensor, torch.Tensor):
            reason = f"A {type(tensor).__name__} cannot be placed"
            raise self._misfit(output, reason, "the pattern with the index of a tensor, e.g. [0]")
        if tensor.ndim != self.layout.ndim:
            reason = f"The output of shape={tuple(tensor.shape)} has {tensor.ndim} dims"
            raise self._misfit(output, reason, "one entry per dim of the output")
        if tensor.is_meta:
            return tensor
        return mark_sharding_with_gradients(
            tensor, self.layout.mesh, self.layout.to_partition_spec()
        )

    def _misfit(self, output: Any, reason: str, instead: str) -> RulesError:
        index = "" if self.index is None else f", index={self.index}"
        return RulesError(
            f"The rule {self.pattern!r} says {self.layout}{index} of what the module "
            f"{self.path!r} returns, which is of type={type(output).__name__}. {reason}. Write "
            f"{instead}."
        )
