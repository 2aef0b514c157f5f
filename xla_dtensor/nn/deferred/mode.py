"""While a model is initialised: every op passes here, to be made anew and to be noted.

An initialisation writes to parameters in place: to themselves, to ``.data``, to views. Each write
to a DTensor is handed to a :class:`~xla_dtensor.nn.deferred.draws.Maker`. How many elements of each
tensor got a value is counted, so that what nobody initialised can be named afterwards. Tensors that
have their values already are *kept*: writes to them are left out, and so is nothing that the random
numbers after them depend on. The same holds for a tied tensor, which its first module initialises:
where constructors drew for two modules, what the second drew was dropped when they were tied.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from xla_dtensor.dtensor.dtensor import DTensor
from xla_dtensor.dtensor.mesh import is_off_mesh
from xla_dtensor.nn.deferred.draws import DRAWS, Maker
from xla_dtensor.nn.deferred.tensors import Entry
from xla_dtensor.runtimes.nested import leaves
from xla_dtensor.runtimes.written import written_targets, written_values

__all__ = ["Initialising"]

aten = torch.ops.aten
# What gives an element a value whatever it held before.
_GIVES_VALUES = DRAWS | {
    aten.zero_.default,
    aten.fill_.Scalar,
    aten.fill_.Tensor,
    aten.copy_.default,
    aten.bernoulli_.Tensor,
}


class Initialising(TorchDispatchMode):
    """The mode under which initialisations run.

    Args:
        maker: Makes the values of DTensors.
        entries: The tensors of the model.
    """

    def __init__(self, maker: Maker, entries: Iterable[Entry]) -> None:
        super().__init__()
        self._maker = maker
        # By id, and not by weak reference: a tensor with one cannot be swapped back.
        self._entries = {id(entry.tensor): entry for entry in entries}
        self._views: Any = WeakIdKeyDictionary()
        # Whose own initialisation runs; None while it is the caller's, after all is tied.
        self.owner: nn.Module | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            self._write(func, args, kwargs)
            return written_targets(func, args, kwargs)
        first = args[0] if args and isinstance(args[0], torch.Tensor) else None
        if first is not None and any(r.alias_info is not None for r in func._schema.returns):
            result = func(*args, **kwargs)
            entry = self._entry(first)
            for view in leaves(result if isinstance(result, (tuple, list)) else (result,)):
                if entry is not None and isinstance(view, torch.Tensor):
                    self._views[view] = entry
            return result
        if any(isinstance(value, DTensor) for value in leaves((tuple(args), kwargs))):
            return self._maker.compute(func, args, kwargs)
        return func(*args, **kwargs)

    def _entry(self, tensor: torch.Tensor) -> Entry | None:
        return self._entries.get(id(tensor)) or self._views.get(tensor)

    def _is_to_stay(self, entry: Entry) -> bool:
        modules = [module for module, _ in entry.places]
        is_anothers = self.owner in modules and self.owner is not modules[0]
        return entry.kept or is_anothers

    def _write(self, func: Any, args: Sequence[Any], kwargs: Any) -> None:
        targets = [t for t in leaves(written_values(func, args, kwargs)) if t is not None]
        found = [self._entry(t) for t in targets]
        if any(entry is not None and self._is_to_stay(entry) for entry in found):
            self._maker.skip(func, targets[0], args, kwargs)
            return
        target: Any = targets[0] if targets else None
        if isinstance(target, TorchDTensor) and is_off_mesh(target._spec.mesh):  # pyright: ignore
            self._maker.skip(func, target, args, kwargs)
        elif len(targets) == 1 and isinstance(target, DTensor):
            self._maker.write(func, target, args, kwargs)
        else:
            func(*args, **kwargs)
        if func in _GIVES_VALUES or "out" in kwargs:
            for written, entry in zip(targets, found, strict=True):
                if entry is not None:
                    entry.given += written.numel()
