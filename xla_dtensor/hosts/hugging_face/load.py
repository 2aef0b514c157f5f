"""Loading weights: what comes from where, checked as a whole, then tensor by tensor."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import torch
from torch import nn

from xla_dtensor.core.errors import WeightsError
from xla_dtensor.dtensor.dcp import Index, extents_of
from xla_dtensor.hosts.hugging_face.files import WeightFiles
from xla_dtensor.hosts.hugging_face.format import FileTensor
from xla_dtensor.hosts.hugging_face.memory import FreedMemory
from xla_dtensor.hosts.hugging_face.module import Slot, dropped_names, is_ignorable, slots_of
from xla_dtensor.hosts.hugging_face.names import NameRules, Names, Piece
from xla_dtensor.hosts.hugging_face.place import blocks_of, give_values
from xla_dtensor.hosts.hugging_face.progress import progress_bar
from xla_dtensor.hosts.hugging_face.windows import intersection, relative, shifted, windows

__all__ = ["LoadedWeights", "load"]

_LISTED = 5  # names of a kind in a message
_COMPARED = 16 << 20  # bytes of a tied tensor that are compared at once


@dataclass(frozen=True, slots=True)
class LoadedWeights:
    """What was loaded, and what was not.

    Attributes:
        loaded: Names in the module of what has new values; of a tied tensor all.
        missing: Names in the module that the files lack.
        unexpected: Names in the files that the module lacks.
        bytes_read: Bytes that this process read, headers aside.
    """

    loaded: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    bytes_read: int


@dataclass
class _Source:
    """A tensor of the module and the pieces that it is made of."""

    slot: Slot
    pieces: tuple[Piece, ...]
    dtype: torch.dtype
    also: list[tuple[Piece, ...]]  # what the files have under other names of a tied tensor


def load(
    path: str | os.PathLike[str],
    module: nn.Module,
    names: Names,
    dtype: torch.dtype | str | None,
    strict: bool,
    progress: bool,
) -> LoadedWeights:
    """Load weights: see :func:`xla_dtensor.hosts.checkpoint.hugging_face.load_hf`."""
    slots = slots_of(module)
    with WeightFiles(path) as files:
        sources, missing, wrong = _sources(slots, files.tensors, NameRules(names), dtype)
        unexpected = _unexpected(module, sources, files.tensors)
        if wrong or (strict and (missing or unexpected)):
            raise _misfit(path, module, wrong, missing, unexpected, files.tensors)
        sources.sort(key=lambda source: _place(files, source))
        total = sum(files.tensors[p.key].num_bytes for source in sources for p in source.pieces)
        freed = FreedMemory()
        with progress_bar("load", total, progress) as advance:
            for source in sources:
                if strict:
                    _check_tied(files, source)
                give_values(source.slot, source.dtype, _piece_reader(files, source.pieces))
                count = sum(files.tensors[piece.key].num_bytes for piece in source.pieces)
                advance(count)
                freed.after(count)
        loaded = tuple(name for source in sources for name in source.slot.names)
        return LoadedWeights(loaded, tuple(missing), tuple(unexpected), files.bytes_read)


def _place(files: WeightFiles, source: _Source) -> tuple[str, int]:
    first = files.tensors[source.pieces[0].key]
    return first.file.name, first.start


# ---------------------------------------------------------------------------- What comes from where


def _sources(
    slots: Iterable[Slot],
    tensors: dict[str, FileTensor],
    rules: NameRules,
    dtype: torch.dtype | str | None,
) -> tuple[list[_Source], list[str], list[str]]:
    """Return what can be loaded, which names the files lack, and what is wrong."""
    found: list[_Source] = []
    missing: list[str] = []
    wrong: list[str] = []
    for slot in slots:
        made = [rules.pieces(name, slot.tensor.shape, tensors) for name in slot.names]
        there = [p for p in made if p and all(piece.key in tensors for piece in p)]
        if not there:
            lacking = [piece.key for pieces in made for piece in pieces if piece.key not in tensors]
            if lacking:  # otherwise the rules say that it is in no file
                name = slot.names[0]
                missing.append(name if name in lacking else f"{name} (as {lacking[0]})")
            continue
        target, faults = _dtype_for(slot.tensor, tensors[there[0][0].key].dtype, dtype), []
        for piece in there[0]:
            faults += _faults(slot.names[0], piece, tensors[piece.key], target)
        wrong += faults
        found.append(_Source(slot, there[0], target, [p for p in there[1:] if p != there[0]]))
    return found, missing, wrong


def _dtype_for(
    tensor: torch.Tensor, stored: torch.dtype, asked: torch.dtype | str | None
) -> torch.dtype:
    if asked is None or not tensor.dtype.is_floating_point:
        return tensor.dtype
    if asked == "auto":
        return stored if stored.is_floating_point else tensor.dtype
    if not isinstance(asked, torch.dtype) or not asked.is_floating_point:
        raise WeightsError(
            f"Weights were to be loaded with dtype={asked!r}. Values of parameters are converted "
            "to a floating-point dtype, or not at all. Pass e.g. torch.bfloat16, 'auto' for that "
            "of the files, or None for that of the module."
        )
    return asked


def _faults(name: str, piece: Piece, stored: FileTensor, dtype: torch.dtype) -> Iterator[str]:
    if stored.shape != piece.shape:
        yield f"{name} has shape={piece.shape}, {piece.key} in the files {stored.shape}"
    elif stored.dtype.is_floating_point != dtype.is_floating_point:
        yield f"{name} has dtype={dtype}, {piece.key} in the files {stored.dtype}"


def _unexpected(
    module: nn.Module, sources: Iterable[_Source], tensors: dict[str, FileTensor]
) -> list[str]:
    used = {p.key for s in sources for pieces in (s.pieces, *s.also) for p in pieces}
    used |= dropped_names(module)
    return [key for key in tensors if key not in used and not is_ignorable(module, key)]


def _misfit(
    path: str | os.PathLike[str],
    module: nn.Module,
    wrong: Sequence[str],
    missing: Sequence[str],
    unexpected: Sequence[str],
    tensors: dict[str, FileTensor],
) -> WeightsError:
    near = [_near(name, unexpected) for name in missing[:_LISTED]]
    parts = [
        f"{what} ({count}): {_listed(names, count)}"
        for what, count, names in (
            ("of another shape or kind", len(wrong), wrong),
            ("missing in the files", len(missing), near),
            ("not in the module", len(unexpected), unexpected),
        )
        if count
    ]
    instead = "Pass names= that says what they are called in the files, or strict=False to load "
    instead += "what is found"
    if wrong:
        instead = "Pass the weights of this model, or names= that says how they are cut"
    return WeightsError(
        f"A {type(module).__name__} was to get the weights of path={os.fspath(path)!r}, which has "
        f"{len(tensors)} tensors. They do not fit the module: {'; '.join(parts)}. {instead}."
    )


def _listed(names: Sequence[str], count: int) -> str:
    return ", ".join(names[:_LISTED]) + (", ..." if count > _LISTED else "")


def _near(name: str, candidates: Sequence[str]) -> str:
    found = get_close_matches(name.split(" ")[0], candidates, n=1, cutoff=0.5)
    return f"{name} (the nearest there is {found[0]})" if found else name


# ---------------------------------------------------------------------- values


def _piece_reader(
    files: WeightFiles, pieces: Sequence[Piece]
) -> Callable[[Index, torch.Tensor], Any]:
    """Return a function that fills a tensor with a part of what the pieces make up."""

    def read(index: Index, out: torch.Tensor) -> None:
        for piece in pieces:
            common = intersection(index, piece.at)
            if common is None:
                continue
            part, target = relative(common, piece.at), out[relative(common, index)]
            if piece.stacked:
                part, target = part[1:], target[0]
            files.read(piece.key, part, target)

    return read


def _check_tied(files: WeightFiles, source: _Source) -> None:
    """Refuse two values for a tensor that the module has under two names."""
    stored = files.tensors[source.pieces[0].key].dtype
    for other, index in itertools.product(source.also, blocks_of(source.slot.tensor)):
        for window in windows(extents_of(index), stored.itemsize, _COMPARED):
            part = shifted(window, index)
            first, second = (torch.empty(extents_of(part), dtype=stored) for _ in range(2))
            _piece_reader(files, source.pieces)(part, first)
            _piece_reader(files, other)(part, second)
            if not torch.equal(first, second):
                raise WeightsError(
                    f"The tied tensor {' = '.join(source.slot.names)} was to be loaded. The files "
                    f"have different values under {source.pieces[0].key!r} and {other[0].key!r}. "
                    "Load into a module without the tie, or pass strict=False for the first."
                )
