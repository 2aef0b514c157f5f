"""Checkpoints of Lightning as checkpoints of :mod:`xla_dtensor.checkpoint`, one folder each.

    epoch=1-step=40.ckpt/                 what ModelCheckpoint, trainer.save_checkpoint name
        step_00000000/                    one checkpoint: model, optimizers, lightning, rng
            manifest.json, *.distcp

Lightning's checkpoint is one dict. Its weights and optimizer states are saved shard by shard, each
once; the rest (loops, schedulers, callbacks, hyperparameters) is one plain value, "lightning". So a
checkpoint is whole or not there, and its weights load on any mesh. Lightning names checkpoints
itself, so each folder has one, of step 0.

The states of the random number generators are saved too. Lightning does not save them: a resumed
run with dropout goes on as if it had not stopped here only.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.utils import _pytree as pytree

from xla_dtensor import checkpoint
from xla_dtensor.core.errors import CheckpointError
from xla_dtensor.dtensor.api import distribute_tensor
from xla_dtensor.dtensor.dtensor import DTensor
from xla_dtensor.hosts.checkpoint.folders import folder_of, read_manifest
from xla_dtensor.hosts.checkpoint.storage import open_storage

__all__ = [
    "is_folder",
    "load_optimizers",
    "load_rest",
    "load_state",
    "load_weights",
    "read_checkpoint",
    "save_state",
    "save_trainer",
]

_STEP = 0
_REST = "lightning"
_FOLDER = "xla_dtensor_folder"


def is_folder(path: str | os.PathLike[str]) -> bool:
    """Tell whether a path is a checkpoint of this library, not a file of Lightning's own."""
    return bool(checkpoint.steps(path)) if not os.path.isfile(path) else False


def read_checkpoint(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return a checkpoint as Lightning has it: one dict, of plain CPU tensors. No mesh is needed.

    Args:
        path: The folder that a Trainer or Fabric on a mesh has saved, on this machine.

    Returns:
        Of a Trainer's checkpoint, what ``torch.load`` gives of one that Lightning saved: save it
        with ``torch.save``, and ``load_from_checkpoint`` takes it. Of Fabric's, its dict.

    Raises:
        CheckpointError: There is none.
    """
    state = _read_plain(path, None)
    state.pop("rng", None)
    if _REST not in state:
        return state
    extras = state[_REST]
    optimizers = state.get("optimizers", {})
    if "optimizer_states" in extras:
        extras["optimizer_states"] = [_by_index(optimizers[str(i)]) for i in range(len(optimizers))]
    return {**extras, "state_dict": state.get("model", {})}


def _by_index(state: dict[str, Any]) -> dict[str, Any]:
    """An optimizer's state whose parameters have numbers; torch reads those of a dict as a list."""
    parameter_states = state.get("state", {})
    if isinstance(parameter_states, list):
        parameter_states = {i: values for i, values in enumerate(parameter_states) if values}
    return {**state, "state": parameter_states}


# -------------------------------------------------------------------------------------- The Trainer


def save_trainer(
    path: str | os.PathLike[str],
    dumped: Mapping[str, Any],
    optimizers: Iterable[torch.optim.Optimizer],
) -> None:
    """Save a Trainer's checkpoint.

    Args:
        path: The folder, made where there is none.
        dumped: Lightning's dict, with DTensors.
        optimizers: The optimizers whose states are in it, if it has any.
    """
    extras = {key: value for key, value in dumped.items() if key != "state_dict"}
    state: dict[str, Any] = {"model": dict(dumped["state_dict"])}
    if "optimizer_states" in extras:
        extras["optimizer_states"] = []
        state["optimizers"] = {str(i): optimizer for i, optimizer in enumerate(optimizers)}
    state[_REST] = _Value(pytree.tree_map_only(DTensor, DTensor.cpu, extras))
    checkpoint.save(path, state, step=_STEP, keep=1)


def load_rest(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return what a Trainer's checkpoint has beside tensors, as its dict for Lightning.

    Weights and optimizer states are loaded into what is on the mesh, by `load_weights` and
    `load_optimizers`: in the dict they are empty.
    """
    holder = _Value({})
    checkpoint.load(path, {_REST: holder}, only=[_REST], rng=False)
    return {**holder.value, "state_dict": {}, _FOLDER: os.fspath(path)}


def load_weights(module: nn.Module, loaded: Mapping[str, Any], strict: bool) -> None:
    """Load weights into a module on a mesh, from our folder or from Lightning's own file."""
    if _FOLDER not in loaded:
        with torch.no_grad():
            module.load_state_dict(loaded["state_dict"], strict=strict)
        return
    only = ["model.*"]
    checkpoint.load(loaded[_FOLDER], {"model": module}, only=only, strict=strict, rng=False)


def load_optimizers(optimizers: Iterable[torch.optim.Optimizer], loaded: Mapping[str, Any]) -> None:
    """Load the states of optimizers, and of the random number generators."""
    if _FOLDER not in loaded:
        for optimizer, state in zip(optimizers, loaded["optimizer_states"], strict=True):
            optimizer.load_state_dict(state)
            _put_state(optimizer)
        return
    states = {str(i): optimizer for i, optimizer in enumerate(optimizers)}
    only = ["optimizers.*", "rng*"]
    checkpoint.load(loaded[_FOLDER], {"optimizers": states}, only=only)


def _put_state(optimizer: torch.optim.Optimizer) -> None:
    """Let what an optimizer keeps of a parameter lie as the parameter lies."""
    for parameter, values in optimizer.state.items():
        if not isinstance(parameter, DTensor):
            continue
        for name, value in values.items():
            plain = isinstance(value, torch.Tensor) and not isinstance(value, DTensor)
            if plain and value.shape == parameter.shape:
                mesh, placements = parameter.device_mesh, parameter.placements
                values[name] = distribute_tensor(value, mesh, placements)


class _Value:
    """One plain value of a checkpoint, whatever it is made of."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> Any:
        return self.value

    def load_state_dict(self, value: Any) -> None:
        self.value = value


# ------------------------------------------------------------------------------------------- Fabric


def save_state(
    path: str | os.PathLike[str],
    state: Mapping[str, Any],
    filters: Mapping[str, Callable[[str, Any], bool]],
) -> None:
    """Save a state as Fabric has it: a dict of modules, optimizers and values.

    Args:
        path: The folder.
        state: The state.
        filters: For some of its keys, what of their state dicts is saved.
    """
    selection: dict[str, Any] = {}
    for key, value in state.items():
        if key in filters:
            items = value.state_dict() if hasattr(value, "state_dict") else value
            selection[key] = {
                name: entry for name, entry in items.items() if filters[key](name, entry)
            }
        else:
            selection[key] = value
    checkpoint.save(path, selection, step=_STEP, keep=1)


def load_state(path: str | os.PathLike[str], state: dict[str, Any], strict: bool) -> dict[str, Any]:
    """Load a state of Fabric in place.

    Returns:
        What the checkpoint has besides, as plain CPU tensors and values.

    Raises:
        KeyError: With `strict`, a key is not in the checkpoint.
        CheckpointError: It does not fit.
    """
    manifest = read_manifest(open_storage(path), _STEP)
    saved = {str(entry.path[0]) for entry in manifest.entries.values()} - {"rng"}
    missing = [key for key in state if key not in saved]
    if strict and missing:
        raise KeyError(
            f"The requested state contains a key {missing[0]!r} that does not exist in the loaded "
            "checkpoint. To disable strict loading, set `strict=False`."
        )
    targets = {key: value for key, value in state.items() if key in saved}
    names = [n for n, e in manifest.entries.items() if str(e.path[0]) in {*targets, "rng"}]
    only = [glob.escape(name) for name in names]
    checkpoint.load(path, targets, only=only, strict=strict)
    state.update(targets)
    extra_keys = saved - set(targets)
    return _read_plain(path, extra_keys) if extra_keys else {}


def _read_plain(path: str | os.PathLike[str], keys: set[str] | None) -> dict[str, Any]:
    if not is_folder(path):
        raise CheckpointError(
            f"The checkpoint {os.fspath(path)!r} was to be read. There is none of this library "
            "there. Pass the folder that a Trainer or Fabric on a mesh has saved."
        )
    state: dict[str, Any] = {}
    reader = FileSystemReader(Path(path) / folder_of(_STEP))
    planner = _EmptyStateDictLoadPlanner(keys=keys)
    _load_state_dict(state, storage_reader=reader, planner=planner, no_dist=True)
    return state
