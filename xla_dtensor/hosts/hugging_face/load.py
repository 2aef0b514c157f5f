"""Loading weights: what comes from where, checked as a whole, then tensor by tensor."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

import torch
from torch import nn
from torch.distributed.tensor import Replicate

from xla_dtensor.core.errors import WeightsError
from xla_dtensor.dtensor.dcp import Index, extents_of
from xla_dtensor.dtensor.dtensor import DTensor
from xla_dtensor.dtensor.mesh import is_off_mesh
from xla_dtensor.hosts.blocks import (
    Read,
    blocks_of,
    filled,
    intersection,
    moving,
    relative,
    shifted,
    whole_block,
    windows,
)
from xla_dtensor.hosts.hugging_face.files import FileTensor, WeightFiles
from xla_dtensor.hosts.hugging_face.module import Slot, dropped_names, is_ignorable, slots_of
from xla_dtensor.hosts.hugging_face.names import (
    NameRules,
    Names,
    Piece,
    stored_by_transformers,
)

__all__ = ["LoadedWeights", "load_weights"]

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


def load_weights(
    path: str | os.PathLike[str],
    module: nn.Module,
    names: Names,
    dtype: torch.dtype | str | None,
    strict: bool,
    progress: bool,
) -> LoadedWeights:
    """Load weights: see :func:`xla_dtensor.hosts.hugging_face.load_hf`."""
    slots = slots_of(module)
    rules = NameRules(names, stored=stored_by_transformers(module))
    with WeightFiles(path) as files:
        sources, missing, wrong = _sources(slots, files.tensors, rules, dtype)
        unexpected = _unexpected(module, sources, files.tensors)
        if wrong or (strict and (missing or unexpected)):
            raise _misfit(path, module, wrong, missing, unexpected, files.tensors)
        sources.sort(key=lambda source: _place(files, source))
        sizes = [sum(files.tensors[p.key].num_bytes for p in s.pieces) for s in sources]
        with moving("loading", sum(sizes), progress and sys.stderr.isatty()) as advance:
            for source, size in zip(sources, sizes, strict=True):
                if strict:
                    _check_tied(files, source)
                _give_values(source.slot, source.dtype, _reader(files, source.pieces))
                advance(size)
        loaded = tuple(name for source in sources for name in source.slot.names)
        return LoadedWeights(loaded, tuple(missing), tuple(unexpected), files.bytes_read)


def _place(files: WeightFiles, source: _Source) -> tuple[str, int]:
    first = files.tensors[source.pieces[0].key]
    return first.file.name, first.place


# ---------------------------------------------------------------------------- What comes from where


def _sources(
    slots: Iterable[Slot],
    tensors: dict[str, FileTensor],
    rules: NameRules,
    dtype: torch.dtype | str | None,
) -> tuple[list[_Source], list[str], list[str]]:
    """Return what can be loaded, which names the files lack, and what is wrong."""
    sources: list[_Source] = []
    missing: list[str] = []
    wrong: list[str] = []
    for slot in slots:
        ways = [rules.pieces(name, slot.tensor.shape, tensors) for name in slot.names]
        there = [pieces for pieces in ways if pieces and all(p.key in tensors for p in pieces)]
        if not there:
            lacking = [piece.key for pieces in ways for piece in pieces if piece.key not in tensors]
            if lacking:  # otherwise the rules say that it is in no file
                name = slot.names[0]
                missing.append(name if name in lacking else f"{name} (as {lacking[0]})")
            continue
        target, faults = _dtype_for(slot.tensor, tensors[there[0][0].key].dtype, dtype), []
        for piece in there[0]:
            faults += _faults(slot.names[0], piece, tensors[piece.key], target)
        wrong += faults
        sources.append(_Source(slot, there[0], target, [p for p in there[1:] if p != there[0]]))
    return sources, missing, wrong


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
    near = get_close_matches(name.split(" ")[0], candidates, n=1, cutoff=0.5)
    return f"{name} (the nearest there is {near[0]})" if near else name


# ------------------------------------------------------------------------------------------- Values


def _reader(files: WeightFiles, pieces: Sequence[Piece]) -> Read:
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


def _give_values(slot: Slot, dtype: torch.dtype, read: Read) -> None:
    """Give a tensor of a module its values.

    A tensor that has values gets the new ones in place. One on the meta device, or of another
    dtype, gets another content: see :meth:`xla_dtensor.hosts.hugging_face.module.Slot.replace`.
    What lies on devices of other processes only is left to these.
    """
    tensor = slot.tensor
    in_place = tensor.dtype == dtype and not tensor.is_meta
    with torch.no_grad():
        if isinstance(tensor, DTensor):
            if is_off_mesh(tensor._spec.mesh):
                return
            spec = tensor._spec
            lies = tuple(Replicate() if p.is_partial() else p for p in spec.placements)
            value = DTensor._wrapping(filled(tensor, dtype, read), spec.mesh, lies)
        elif in_place and tensor.device.type == "cpu" and tensor.is_contiguous():
            read(whole_block(tensor.shape), tensor.detach())
            torch.autograd.graph.increment_version(tensor)
            return
        else:
            value = torch.empty(tensor.shape, dtype=dtype)
            read(whole_block(tensor.shape), value)
            value = value if tensor.is_meta else value.to(tensor.device)
        if in_place:
            tensor.copy_(value)
        else:
            slot.replace(value)


def _check_tied(files: WeightFiles, source: _Source) -> None:
    """Refuse two values for a tensor that the module has under two names."""
    stored = files.tensors[source.pieces[0].key].dtype
    for names in source.also:
        for index in blocks_of(source.slot.tensor):
            for window in windows(extents_of(index), stored.itemsize, _COMPARED):
                part = shifted(window, index)
                first, second = (torch.empty(extents_of(part), dtype=stored) for _ in range(2))
                _reader(files, source.pieces)(part, first)
                _reader(files, names)(part, second)
                if not torch.equal(first, second):
                    raise WeightsError(
                        f"The tied tensor {' = '.join(source.slot.names)} was to be loaded. The "
                        f"files have different values under {source.pieces[0].key!r} and "
                        f"{names[0].key!r}. Load into a module without the tie, or pass "
                        "strict=False for the first."
                    )
