"""What a checkpoint holds of a nested state: a flat list of tensors and plain values, by name.

* A dict is walked; a list or tuple is walked if it holds a tensor, and is one plain value if not.
* A module or an optimizer is walked as its ``state_dict()``, and so is any other object whose state
  holds a DTensor. Every other object with ``state_dict`` and ``load_state_dict`` (a loader, a
  scheduler, a scaler) is one plain value: its state may have another form each time.
* Weights that a module has under two names are saved once.
* A tensor that is made of tensors, a quantized one of torchao's, is walked as its parts.

Loading walks the state to be loaded in the same way. Tensors are filled in place, plain values are
set where they were found, and objects are given what was loaded. Only an optimizer's form comes
from the checkpoint: a new optimizer has no state yet.

The states of random number generators are in a checkpoint too, as an object of the state: torch's
on the CPU, and the devices'.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor as TorchDTensor

from xla_dtensor.core.errors import CheckpointError
from xla_dtensor.dtensor.api import parts_of
from xla_dtensor.dtensor.dtensor import DTensor
from xla_dtensor.dtensor.groups import GroupDTensor
from xla_dtensor.dtensor.local import LocalView
from xla_dtensor.dtensor.random import RNGStatesTracker
from xla_dtensor.hosts.checkpoint.manifest import Entry, PathKey
from xla_dtensor.runtimes.registry import current_runtime

__all__ = ["GENERATORS", "Generators", "Leaf", "Walk", "is_stored_as_tensor"]

GENERATORS = "rng"  # their name in a checkpoint
logger = logging.getLogger("xla_dtensor")


@dataclass
class Leaf:
    """One tensor or plain value of a state.

    Attributes:
        path: The keys that lead to it.
        value: The tensor or value.
        set: Puts another value in its place; None where that cannot be.
        same_as: The name of a leaf before it that is the same tensor.
    """

    path: PathKey
    value: Any
    set: Callable[[Any], None] | None = None
    same_as: str | None = None

    @property
    def name(self) -> str:
        """Its name in the checkpoint: the keys, joined by points."""
        return ".".join(str(key) for key in self.path)


class Walk:
    """A walk over a state.

    Args:
        state: The nested state.
        saved: The entries of the checkpoint that are to be loaded; None to save.
        partial: Whether what is not among them is to stay.

    Attributes:
        leaves: Its leaves, by name.
    """

    def __init__(
        self,
        state: Mapping[str, Any],
        saved: Mapping[str, Entry] | None = None,
        partial: bool = False,
    ) -> None:
        self.leaves: dict[str, Leaf] = {}
        self._saved, self._partial = saved, partial
        self._owners: list[tuple[PathKey, Callable[[], None]]] = []
        for key, child in state.items():
            setter = _item_setter(state, key) if isinstance(state, MutableMapping) else None
            self._visit((key,), child, setter)

    def give_back(self, loaded: set[str]) -> None:
        """Give objects the states that were loaded, those only of which something was.

        Args:
            loaded: Names of leaves.
        """
        paths = [self.leaves[name].path for name in loaded]
        # Inner objects first: an outer one may hold them.
        for path, give in reversed(self._owners):
            if any(p[: len(path)] == path for p in paths):
                give()

    def _visit(self, path: PathKey, node: Any, setter: Callable[[Any], None] | None) -> None:
        if isinstance(node, Mapping) and node:
            for key, child in node.items():
                self._visit((*path, _checked_key(path, key)), child, _item_setter(node, key))
        elif isinstance(node, (list, tuple)) and next(_tensors(node), None) is not None:
            for i, child in enumerate(node):
                set_item = _item_setter(node, i) if isinstance(node, list) else None
                self._visit((*path, i), child, set_item)
        elif parts := parts_of(node):
            for name, part in parts.items():
                self._visit((*path, name), part, None)
        elif isinstance(node, torch.optim.Optimizer):
            self._visit_optimizer(path, node)
        elif isinstance(node, torch.nn.Module):
            self._visit_module(path, node)
        elif isinstance(node, RNGStatesTracker):
            self._add(Leaf(path, node.get_states(), node.set_states))
        elif callable(getattr(node, "state_dict", None)) and not isinstance(node, type):
            self._visit_object(path, node)
        else:
            self._add(Leaf(path, _checked(path, node), setter))

    def _visit_object(self, path: PathKey, owner: Any) -> None:
        state = owner.state_dict()
        if any(isinstance(tensor, TorchDTensor) for tensor in _tensors(state)):
            self._visit(path, state, None)
            self._owners.append((path, lambda: owner.load_state_dict(state)))
        else:
            self._add(Leaf(path, state, owner.load_state_dict))

    def _visit_module(self, path: PathKey, module: torch.nn.Module) -> None:
        state = module.state_dict()
        first: dict[int, str] = {}
        aliases: dict[str, str] = {}
        for pairs in (module.named_parameters, module.named_buffers):
            for name, tensor in pairs(remove_duplicate=False):
                if name in state:
                    original = first.setdefault(id(tensor), name)
                    aliases |= {name: original} if original != name else {}
        for key, child in state.items():
            self._visit((*path, key), child, _item_setter(state, key))
        for name, original in aliases.items():
            self.leaves[Leaf((*path, name), None).name].same_as = Leaf((*path, original), None).name
        self._owners.append((path, lambda: _load_module(module, state)))

    def _visit_optimizer(self, path: PathKey, optimizer: torch.optim.Optimizer) -> None:
        state = optimizer.state_dict()
        if self._saved is not None:
            current = state["state"]
            base = {i: dict(values) for i, values in current.items()} if self._partial else {}
            state["state"] = base | _as_saved(path, optimizer, current, self._saved, base)
        for key, child in state.items():
            if key != "state" or child:
                self._visit((*path, key), child, _item_setter(state, key))
        self._owners.append((path, lambda: optimizer.load_state_dict(state)))

    def _add(self, leaf: Leaf) -> None:
        first = self.leaves.setdefault(leaf.name, leaf)
        if first is not leaf:
            raise CheckpointError(
                f"A state with the keys {list(first.path)} and {list(leaf.path)} was given. Both "
                f"have the name {leaf.name!r} in a checkpoint. Rename one of them."
            )


def is_stored_as_tensor(value: Any) -> bool:
    """Tell whether a leaf is stored in pieces, rather than pickled whole."""
    plain = isinstance(value, torch.Tensor) and value.layout == torch.strided
    return plain and not value.is_quantized


def _load_module(module: torch.nn.Module, state: Mapping[str, Any]) -> None:
    with torch.no_grad():
        module.load_state_dict(state)


def _as_saved(
    path: PathKey,
    optimizer: torch.optim.Optimizer,
    current: Mapping[Any, Any],
    saved: Mapping[str, Entry],
    base: Mapping[Any, dict[Any, Any]],
) -> dict[Any, Any]:
    """The state of an optimizer in the form of the checkpoint, with its tensors where it has some.

    What it has not yet lies as its parameter does, if it has the parameter's shape.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    states: dict[Any, Any] = {}
    depth = len(path)
    for entry in saved.values():
        keys = entry.path
        if keys[:depth] != path or keys[depth : depth + 1] != ("state",) or len(keys) < depth + 3:
            continue
        index, name = keys[depth + 1], keys[depth + 2]
        tensor = current.get(index, {}).get(name)
        holder = states.setdefault(index, base.get(index, {}))
        fits = isinstance(tensor, torch.Tensor) and tuple(tensor.shape) == entry.shape
        if fits or entry.shape is None or len(keys) > depth + 3:
            holder[name] = tensor
        else:
            holder[name] = _like_parameter(parameters, index, entry)
    return states


def _like_parameter(parameters: list[Any], index: Any, entry: Entry) -> torch.Tensor:
    dtype = getattr(torch, str(entry.dtype))
    if isinstance(index, int) and index < len(parameters) and entry.layout is not None:
        parameter = parameters[index]
        if tuple(parameter.shape) == entry.shape:
            return torch.zeros_like(parameter.detach(), dtype=dtype)
    assert entry.shape is not None
    return torch.zeros(entry.shape, dtype=dtype)


def _tensors(node: Any) -> Iterator[torch.Tensor]:
    if isinstance(node, torch.Tensor):
        yield node
    elif isinstance(node, Mapping):
        for child in node.values():
            yield from _tensors(child)
    elif isinstance(node, (list, tuple)):
        for child in node:
            yield from _tensors(child)


def _item_setter(holder: Any, key: Any) -> Callable[[Any], None]:
    return lambda value: holder.__setitem__(key, value)


def _checked_key(path: PathKey, key: Any) -> str | int:
    if isinstance(key, (str, int)) and not isinstance(key, bool):
        return key
    raise CheckpointError(
        f"The dict at {list(path)} has the key {key!r}. A manifest can name str and int keys only. "
        "Pass a dict with such keys."
    )


def _checked(path: PathKey, value: Any) -> Any:
    if isinstance(value, (LocalView, GroupDTensor)):
        reason, remedy = "It has another value on each device", "the DTensor that it came from"
    elif isinstance(value, TorchDTensor) and not isinstance(value, DTensor):
        reason, remedy = "It is torch's own DTensor", "it to torch.distributed.checkpoint"
    elif isinstance(value, torch.Tensor) and value.is_meta:
        reason, remedy = "It is on the meta device and has no value", "the materialised tensor"
    else:
        return value
    raise CheckpointError(
        f"The tensor at {list(path)} was given to a checkpoint. {reason}. Pass {remedy}."
    )


# ------------------------------------------------------------------------- Random number generators


class Generators:
    """The generators of this process, as an object with a state.

    Example:
        >>> saved = Generators().state_dict()
        >>> first = torch.rand(3)
        >>> Generators().load_state_dict(saved)
        >>> torch.equal(torch.rand(3), first)
        True
    """

    def state_dict(self) -> dict[str, Any]:
        """Return the states. That of the devices is there once a runtime has started."""
        state: dict[str, Any] = {"torch": torch.get_rng_state()}
        runtime = current_runtime()
        if runtime is not None:
            state |= {"devices": runtime.get_rng_state().cpu(), "runtime": runtime.name}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on as those whose states are given would have."""
        torch.set_rng_state(state["torch"])
        runtime = current_runtime()
        if runtime is None or "devices" not in state:
            return
        if runtime.name != state["runtime"]:
            logger.warning(
                "the devices' random state was saved on %s and is not loaded on %s",
                state["runtime"],
                runtime.name,
            )
            return
        runtime.set_rng_state(state["devices"])
