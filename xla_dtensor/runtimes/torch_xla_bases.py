"""What a write into a payload, or into a view of it, has to reach besides the payload.

The functional wrapper answers a write into a view with a new value for the base, which torch_xla
does not annotate: XLA would then lay the base out as whatever reads it next likes best. So each
annotated payload is known by its storage, which its views share, and is annotated again.

A payload may also be another face of a plain XLA tensor, one without the wrapper (a parameter that
was annotated in place and is written through what mark_sharding returned). After each write the
plain tensor is given the payload's new value.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch

from xla_dtensor.runtimes.torch_xla_sharding import xlac

__all__ = [
    "annotate_bases_again",
    "note_alias",
    "note_base",
    "note_source",
    "write_to_sources",
]

# Of each storage the living payloads over it, by their id, and what each was told last.
_bases: dict[int, dict[int, tuple[weakref.ref[torch.Tensor], Any]]] = {}


def _storage(payload: torch.Tensor) -> int:
    return payload.untyped_storage()._cdata


class _Reference(weakref.ref):  # pyright: ignore[reportMissingTypeArgument]
    """A reference to a payload that knows under which keys it is kept."""

    __slots__ = ("name", "storage")


def _forget(dead: Any) -> None:
    noted = _bases.get(dead.storage)
    if noted is None or dead.name not in noted or noted[dead.name][0] is not dead:
        return
    del noted[dead.name]
    if not noted:
        del _bases[dead.storage]


def note_base(payload: torch.Tensor, annotation: Any) -> None:
    """Remember that `payload` was told to lie as `annotation` says."""
    reference: Any = _Reference(payload, _forget)
    reference.storage, reference.name = _storage(payload), id(payload)
    _bases.setdefault(reference.storage, {})[reference.name] = reference, annotation


def note_alias(source: torch.Tensor, alias: torch.Tensor) -> None:
    """Remember of an alias what its source was told."""
    noted = _bases.get(_storage(source), {}).get(id(source))
    if noted is not None and noted[0]() is source:
        note_base(alias, noted[1])


def annotate_bases_again(written: Iterable[torch.Tensor], *, reshaped: bool = False) -> None:
    """Annotate what an op has written to, or the base of the view that it has written to.

    Some ops in place, such as index_put_, answer with a value that is not annotated.

    Args:
        written: What the op has written to.
        reshaped: The op has changed its shape, so that its annotation no longer fits.
    """
    for view in written:
        for reference, annotation in tuple(_bases.get(_storage(view), {}).values()):
            base = reference()
            if (
                base is None
                or (base is view and reshaped)
                or xlac()._get_xla_op_sharding(base) is not None
            ):
                continue
            xlac()._xla_annotate_custom_sharding(base, annotation)


_sources: dict[int, tuple[torch.Tensor, weakref.ref[torch.Tensor], Any]] = {}


def note_source(payload: torch.Tensor, base: torch.Tensor, source: torch.Tensor) -> None:
    """Remember that a payload is another face of the plain XLA tensor `source`.

    Args:
        payload: An alias of `base`, for users: its shape may be changed in place.
        base: The wrapped tensor itself, of which nobody else knows.
        source: The plain tensor.
    """
    key = _storage(base)

    def forget(dead: weakref.ref[torch.Tensor]) -> None:
        if key in _sources and dead in _sources[key]:
            del _sources[key]

    _sources[key] = (base, weakref.ref(source, forget), weakref.ref(payload, forget))


def write_to_sources(written: Iterable[torch.Tensor]) -> None:
    """Give plain tensors the new values of the payloads, or their views, that were written to."""
    for view in written if _sources else ():
        base, source, _ = _sources.get(_storage(view), (None, None, None))
        plain = None if source is None else source()
        if base is not None and plain is not None:
            torch._sync(base)  # pyright: ignore[reportPrivateImportUsage]
            value = torch._from_functional_tensor(base)  # pyright: ignore
            xlac()._replace_xla_tensor(plain, value)
