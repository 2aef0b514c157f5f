"""The tensors of a module that its weights in files are about: parameters and kept buffers.

A tied tensor is one :class:`Slot` with several names. What ``torch.compile`` and activation
checkpointing put into names is left out of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from xla_dtensor.core.errors import ArgumentTypeError

__all__ = ["Slot", "dropped_names", "is_ignorable", "model_type_of", "slots_of"]

_WRAPPERS = re.compile(r"(_orig_mod|_checkpoint_wrapped_module)\.")
_OLD_BUFFERS = re.compile(r"(^|\.)rotary_emb\.inv_freq$")  # kept in files by transformers < 4.32


@dataclass
class Slot:
    """A tensor of a module.

    Args:
        names: Under which the module has it.
        tensor: The tensor.
        holders: The dicts of modules that have it, and the key in each.
    """

    names: list[str]
    tensor: torch.Tensor
    holders: list[tuple[dict[str, Any], str]] = field(default_factory=list)

    def replace(self, content: torch.Tensor) -> None:
        """Give it another content: the object stays, where torch can do that, or is replaced."""
        old: Any = self.tensor
        new: Any = content
        if isinstance(old, nn.Parameter):
            new = nn.Parameter(content, old.requires_grad)
        new.__dict__.update(old.__dict__)
        hooks = old._backward_hooks or getattr(old, "_post_accumulate_grad_hooks", None)
        if not hooks:
            try:
                torch.utils.swap_tensors(old, new)
                return
            except RuntimeError:  # a gradient was recorded with it, or a weak reference is kept
                pass
        for holder, key in self.holders:
            holder[key] = new
        self.tensor = new


def slots_of(module: nn.Module) -> list[Slot]:
    """List parameters, and buffers that a state dict has, in the order of the modules.

    Args:
        module: The module.

    Returns:
        Each tensor once.

    Raises:
        ArgumentTypeError: Not a module.
    """
    if not isinstance(module, nn.Module):
        raise ArgumentTypeError(
            f"Weights were to be moved for an object of type={type(module).__name__}. Names and "
            "tensors are those of a torch.nn.Module. Pass a module."
        )
    slots: dict[int, Slot] = {}
    for name, holder, key, tensor, is_saved in _tensors_of_module(module):
        if is_saved:
            slot = slots.setdefault(id(tensor), Slot([], tensor))
            if name not in slot.names:
                slot.names.append(name)
            slot.holders.append((holder, key))
    return list(slots.values())


def dropped_names(module: nn.Module) -> set[str]:
    """Return the names of buffers that a state dict does not have."""
    return {name for name, _, _, _, is_saved in _tensors_of_module(module) if not is_saved}


def _tensors_of_module(
    module: nn.Module,
) -> Iterator[tuple[str, dict[str, Any], str, torch.Tensor, bool]]:
    """(name, dict, key, tensor, whether a state dict has it), of tied tensors each place."""
    for prefix, part in module.named_modules(remove_duplicate=False):
        for slots, left_out in (
            (part._parameters, frozenset[str]()),
            (part._buffers, part._non_persistent_buffers_set),
        ):
            for key, tensor in slots.items():
                if tensor is not None:
                    name = _WRAPPERS.sub("", f"{prefix}.{key}" if prefix else key)
                    yield name, slots, key, tensor, key not in left_out


def is_ignorable(module: nn.Module, key: str) -> bool:
    """Tell whether a tensor of the files that the module lacks is known to say nothing.

    Args:
        module: The module. Models of transformers say what their old files have too much.
        key: Its name in the files.
    """
    patterns = getattr(module, "_keys_to_ignore_on_load_unexpected", None) or ()
    return bool(_OLD_BUFFERS.search(key)) or any(re.search(text, key) for text in patterns)


def model_type_of(module: nn.Module, config: Any) -> str | None:
    """Return what a ``config.json`` of the module says as its model_type, if that is known.

    Args:
        module: One of transformers has a `config`, those in ``xla_dtensor/models`` have `sizes`.
        config: A config that goes before these, or None.
    """
    sources = [config, getattr(module, "config", None)]
    sources += [getattr(part, "sizes", None) for part in module.modules()]
    for source in sources:
        kind = source.get("model_type") if isinstance(source, dict) else None
        kind = kind or getattr(source, "model_type", None)
        if isinstance(kind, str):
            return kind
    return None
