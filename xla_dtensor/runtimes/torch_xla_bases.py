"""Keep a payload annotated when a view of it is written to.

The functional wrapper answers a write into a view with a new value for the base, which torch_xla
does not annotate: XLA would then lay the base out as whatever reads it next likes best. So each
annotated payload is known by its storage, which its views share, and is annotated again.
"""

from __future__ import annotations

import importlib
import weakref
from collections.abc import Iterable
from typing import Any

import torch

__all__ = ["annotate_bases_again", "note_base"]

_bases: dict[int, tuple[weakref.ref[torch.Tensor], Any]] = {}


def _xlac() -> Any:
    return importlib.import_module("torch_xla")._XLAC


def _storage(payload: torch.Tensor) -> int:
    return payload.untyped_storage()._cdata


def note_base(payload: torch.Tensor, annotation: Any) -> None:
    """Remember that `payload` was told to lie as `annotation` says."""
    key = _storage(payload)

    def forget(dead: weakref.ref[torch.Tensor]) -> None:
        if key in _bases and _bases[key][0] is dead:
            del _bases[key]

    _bases[key] = (weakref.ref(payload, forget), annotation)


def annotate_bases_again(written: Iterable[torch.Tensor]) -> None:
    """Annotate the bases of views that an op has written to."""
    for view in written:
        reference, annotation = _bases.get(_storage(view), (None, None))
        base = None if reference is None else reference()
        if base is None or base is view or _xlac()._get_xla_op_sharding(base) is not None:
            continue
        _xlac()._xla_annotate_custom_sharding(base, annotation)
