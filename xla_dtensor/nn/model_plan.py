"""How a model's weights and a batch's rows lie on a mesh whose axes have the usual names.

    mesh (dp=2, fsdp=2, tp=2)
    q_proj.weight (32, 32)   style "colwise"    ->  [tp, fsdp]
    o_proj.weight (32, 32)   style "rowwise"    ->  [fsdp, tp]
    norm.weight (32,)        no style           ->  [fsdp]
    input_ids (16, 128)                         ->  [dp.fsdp, -]

* Over ``tp`` weights are cut as the model's own plan says, where it has one (models of Transformers
  do). A mesh with such an axis and a model without a plan is an error: nothing would be cut.
* Over ``fsdp`` each weight is cut along its first dim that the axis divides and that is not cut.
* Rows of a batch are cut over all axes but ``tp``. Other axes cut nothing else.

Adapters of peft lie as what they adapt would lie without a style: over ``fsdp`` only.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Placement, Replicate, Shard

from mesh_utils import Mesh
from xla_dtensor.core.errors import RulesError
from xla_dtensor.core.rules import Entry, ShardingRule, ShardingRules
from xla_dtensor.dtensor.api import (
    distribute_tensor,
    follow_parameters,
    parameter_in_place_of,
)
from xla_dtensor.dtensor.dtensor import DTensor
from xla_dtensor.dtensor.mesh import DeviceMesh, as_device_mesh
from xla_dtensor.nn.shard_module import shard_module

__all__ = ["model_plan", "put_model", "row_placements"]

# What peft writes into the path of a weight that was there before.
_PEFT_PARTS = re.compile(r"\.(base_layer|original_module|modules_to_save\.\w+)(?=\.)")


def model_plan(
    model: nn.Module, mesh: Any, *, tp_axis: str = "tp", fsdp_axis: str = "fsdp"
) -> ShardingRules:
    """Return rules for each of a model's parameters, by its own plan and the names of the axes.

    Args:
        model: The model. Its plan is what Transformers calls ``tp_plan``.
        mesh: The mesh.
        tp_axis: The axis that the plan's styles cut along.
        fsdp_axis: The axis over which every parameter is cut besides.

    Returns:
        One rule per parameter, as :func:`xla_dtensor.shard_module` takes them.

    Raises:
        RulesError: The mesh has `tp_axis`, and the model has no plan, or one with a style that is
            not known here.

    Example:
        >>> mesh = Mesh.arange((2, 2), ("fsdp", "tp"))
        >>> model = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 4, bias=False))
        >>> model._tp_plan = {"0": "colwise", "1": "rowwise"}
        >>> for rule in model_plan(model, mesh).rules:
        ...     print(rule.pattern, rule.placements)
        0.weight ('tp', 'fsdp')
        0.bias ('tp',)
        1.weight ('fsdp', 'tp')
    """
    mesh = mesh if isinstance(mesh, Mesh) else as_device_mesh(mesh).value
    sizes = dict(zip(mesh.axis_names, mesh.mesh_shape, strict=True))
    styles = _styles(model) if sizes.get(tp_axis, 1) > 1 else []
    base = _base_of(model)
    prefix = next(f"{path}." if path else "" for path, m in model.named_modules() if m is base)
    rules = []
    for path, tensor in model.named_parameters():
        own_path = _PEFT_PARTS.sub("", path.removeprefix(prefix))
        entries = _entries(own_path, tensor, styles, sizes, tp_axis, fsdp_axis)
        rules.append(ShardingRule(path, entries))
    return ShardingRules(rules)


def put_model(
    model: nn.Module,
    mesh: Any,
    plan: Any = None,
    *,
    optimizers: Iterable[torch.optim.Optimizer] = (),
) -> nn.Module:
    """Put a model on a mesh, in place; what lies on a mesh already stays as it lies.

    Where a part of it does, as a model's does that adapters were added to, `plan` is not asked: the
    other parameters are cut over ``fsdp`` only.

    Args:
        model: The model.
        mesh: The mesh.
        plan: Rules, as :func:`xla_dtensor.shard_module` takes them. None: :func:`model_plan`.
        optimizers: Optimizers of the model's parameters, which are other objects on the mesh; see
            :func:`~xla_dtensor.dtensor.api.follow_parameters`.

    Returns:
        The same model.

    Raises:
        DistributeError: An optimizer's state cannot lie as its parameter does.
        RulesError: Rules that do not fit, see :func:`xla_dtensor.shard_module`, :func:`model_plan`.
    """
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        _put_rest(model, as_device_mesh(mesh))
    elif plan is None:
        shard_module(model, mesh, model_plan(model, mesh), unmatched="replicate")
    else:
        shard_module(model, mesh, plan)
    for optimizer in optimizers:
        follow_parameters(optimizer)
    return model


def _put_rest(model: nn.Module, mesh: DeviceMesh) -> None:
    sizes = dict(zip(mesh.value.axis_names, mesh.value.mesh_shape, strict=True))
    on_mesh: dict[int, nn.Parameter] = {}  # tied ones stay tied
    for path, plain in list(model.named_parameters(remove_duplicate=False)):
        if isinstance(plain, DTensor):
            continue
        if id(plain) not in on_mesh:
            entries = _entries(path, plain, [], sizes, "", "fsdp")
            dtensor = distribute_tensor(plain.detach(), mesh, entries)
            on_mesh[id(plain)] = parameter_in_place_of(plain, dtensor)
        owner, _, name = path.rpartition(".")
        setattr(model.get_submodule(owner), name, on_mesh[id(plain)])


def row_placements(mesh: DeviceMesh, *, tp_axis: str = "tp") -> list[Placement]:
    """Return how a tensor of rows lies: cut over all axes but the tensor parallel one.

    Args:
        mesh: The mesh.
        tp_axis: The axis over which every device has the same rows.
    """
    names = mesh.mesh_dim_names or (None,) * mesh.ndim
    return [Replicate() if name == tp_axis else Shard(0) for name in names]


def _styles(model: nn.Module) -> list[ShardingRule]:
    plans = [getattr(module, "_tp_plan", None) for module in (model, _base_of(model))]
    plan = next((plan for plan in plans if plan), None)
    if not plan:
        raise RulesError(
            f"A plan was asked for a {type(model).__name__} on a mesh with a tensor parallel axis. "
            "The model has no tp_plan, so nothing would be cut over that axis. Pass rules as "
            "plan=, for example {'layers.*.up_proj': 'colwise', '**': None}, or a mesh without "
            "that axis."
        )
    return [ShardingRule(pattern, style) for pattern, style in plan.items()]


def _base_of(model: nn.Module) -> nn.Module:
    """The model inside of peft's wrapper."""
    get_base_model = getattr(model, "get_base_model", None)
    return model if get_base_model is None else get_base_model()


def _entries(
    path: str,
    tensor: torch.Tensor,
    styles: list[ShardingRule],
    sizes: dict[Any, int],
    tp_axis: str,
    fsdp_axis: str,
) -> tuple[Entry, ...]:
    entries: list[Entry] = [None] * tensor.ndim
    for style in styles:
        placed = style.entries_for(path, tensor.ndim, tp_axis) if style.matches(path) else ""
        if not isinstance(placed, str):
            entries = list(placed)
            break
    size = sizes.get(fsdp_axis, 1)
    free = (
        dim
        for dim, extent in enumerate(tensor.shape)
        if entries[dim] is None and extent and extent % size == 0
    )
    dim = next(free, None) if size > 1 else None
    if dim is not None:
        entries[dim] = fsdp_axis
    return tuple(entries)
