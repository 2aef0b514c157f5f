"""The tensors of a model that is to get its values: which there are, their memory, and back again.

A parameter on the meta device keeps its identity: its object is given the content of one with
memory, so an optimizer that was made before, ``fully_shard``'s hooks and tied modules see it. A
tensor that is no DTensor yet cannot become one in place, and is replaced wherever it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from xla_dtensor.core.errors import DistributeError
from xla_dtensor.dtensor.api import distribute_tensor
from xla_dtensor.dtensor.dtensor import DTensor
from xla_dtensor.dtensor.mesh import DeviceMesh, is_off_mesh

__all__ = ["Entry", "give_memory", "model_entries", "refuse_stale", "refuse_unknown"]

_NAMES_SHOWN = 12


@dataclass(eq=False)
class Entry:
    """A parameter or a buffer.

    Args:
        name: Its first path in the model.
        tensor: The tensor.
        places: (module, name) pairs, all places that share it.
        is_buffer: Whether it is a buffer.
        is_saved: Whether checkpoints have it.
        kept: It has its values; initialisation leaves it alone.
        given: How many elements were given a value.
    """

    name: str
    tensor: Any
    places: list[tuple[nn.Module, str]] = field(repr=False)
    is_buffer: bool
    is_saved: bool
    kept: bool
    given: int = 0

    @property
    def is_complete(self) -> bool:
        """Whether all elements have a value, or none is asked of this process."""
        return self.kept or self.given >= self.tensor.numel() or _is_elsewhere(self.tensor)

    def replace(self, tensor: torch.Tensor) -> None:
        """Put another tensor in all places."""
        for module, name in self.places:
            slots: Any = module._buffers if self.is_buffer else module._parameters
            slots[name] = tensor
        self.tensor = tensor


def model_entries(model: nn.Module) -> list[Entry]:
    """Return the parameters and buffers of a model, each once, in the order of its modules."""
    found: dict[int, Entry] = {}
    for path, module in model.named_modules():
        for name, tensor, is_buffer in _slots(module):
            if id(tensor) not in found:
                found[id(tensor)] = Entry(
                    f"{path}.{name}" if path else name,
                    tensor,
                    [],
                    is_buffer,
                    is_saved=not is_buffer or name not in module._non_persistent_buffers_set,
                    kept=not tensor.is_meta,
                )
            found[id(tensor)].places.append((module, name))
    return list(found.values())


def _slots(module: nn.Module) -> Iterator[tuple[str, torch.Tensor, bool]]:
    for name, parameter in module._parameters.items():
        if parameter is not None:
            yield name, parameter, False
    for name, buffer in module._buffers.items():
        if buffer is not None:
            yield name, buffer, True


def _is_elsewhere(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, DTensor) and is_off_mesh(tensor._spec.mesh)


def give_memory(entry: Entry, mesh: DeviceMesh | None) -> Callable[[], None]:
    """Give a tensor on the meta device memory where it lies, filled with zeros.

    Args:
        entry: A parameter or buffer on the meta device. A plain one is replicated on `mesh`; a
            plain buffer without a mesh stays a plain tensor of the host.
        mesh: The mesh.

    Returns:
        A function that takes it back.
    """
    before = entry.tensor
    if not isinstance(before, DTensor):
        made: Any = torch.zeros_like(before, device="cpu")
        if mesh is not None:
            made = _with_memory(distribute_tensor(before.detach(), mesh))
        if not entry.is_buffer:
            made = nn.Parameter(made, before.requires_grad)
        made.__dict__.update(before.__dict__)
        entry.replace(made)
        return lambda: entry.replace(before)
    if _is_elsewhere(before):
        return lambda: None
    made = _with_memory(before.detach())
    if isinstance(before, nn.Parameter):
        made = nn.Parameter(made, before.requires_grad)
    made.__dict__.update(before.__dict__)
    _swap(entry, made)
    return lambda: torch.utils.swap_tensors(before, made)


def _with_memory(tensor: Any) -> Any:
    return tensor if _is_elsewhere(tensor) else torch.empty_like(tensor, device="xla")


def _swap(entry: Entry, made: torch.Tensor) -> None:
    tensor = entry.tensor
    hooked = tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None)
    reason = "It has gradient hooks, which would be lost" if hooked else ""
    if not reason:
        try:
            torch.utils.swap_tensors(tensor, made)
        except RuntimeError as error:
            reason = f"torch cannot give it another content: {error}".rstrip(".")
    if reason:
        raise DistributeError(
            f"materialize was called on a model with {entry.name}={tensor!r} on the meta device. "
            f"{reason}. Materialize before anything else holds the parameter."
        )


def refuse_stale(model: nn.Module) -> None:
    """Refuse a model with a tensor on the meta device that is neither parameter nor buffer.

    Raises:
        DistributeError: There is one.
    """
    names: list[str] = []
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            plain = isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter)
            if plain and value.is_meta and not _is_elsewhere(value):
                names.append(f"{path}.{name}" if path else name)
    if names:
        raise DistributeError(
            f"materialize was called on a model with attributes={_shown(names)}. These tensors "
            "are on the meta device, and neither parameters nor buffers, so nothing can give them "
            "values. Register them with register_buffer, or make them outside of "
            "torch.device('meta')."
        )


def refuse_unknown(entries: list[Entry], initialised: bool) -> None:
    """Refuse tensors whose values nobody has given.

    Args:
        entries: The model's tensors.
        initialised: Whether it was to be initialised; if not, only what no checkpoint has counts.

    Raises:
        DistributeError: There are such tensors.
    """
    missing = [e for e in entries if not e.is_complete and (initialised or not e.is_saved)]
    if not missing:
        return
    shown = _shown([f"{e.name} ({e.given} of {e.tensor.numel()} elements)" for e in missing])
    what = "no initialisation has given all their values"
    if not initialised:
        what = "no checkpoint has these buffers, and nothing computes them anew"
    raise DistributeError(
        f"materialize was called on a model with unknown={shown}. They were made on the meta "
        f"device, where what a constructor computes is lost, and {what}. Give the module a "
        "reset_parameters(), or pass init=function, which is called with each module and writes to "
        "them in place."
    )


def _shown(names: list[str]) -> str:
    more = len(names) - _NAMES_SHOWN
    return ", ".join(names[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")
