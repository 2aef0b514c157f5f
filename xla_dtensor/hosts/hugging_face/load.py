"""Loading weights: what comes from where, checked as a whole, then tensor by tensor."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

import torch
from torch import nn
from torch.distributed.tensor import Replicate

from xla_dtensor.core.argument_types import argument_types
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

__all__ = ["LoadedWeights", "load_hf"]

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
    aliases: list[tuple[Piece, ...]]  # what the files have under other names of a tied tensor


@argument_types
def load_hf(
    path: str | os.PathLike[str],
    module: nn.Module,
    *,
    names: Names = None,
    dtype: torch.dtype | str | None = None,
    strict: bool = True,
    progress: bool = True,
) -> LoadedWeights:
    """Give a module the weights of safetensors files, in place.

    Each process reads the blocks that its devices hold, tile by tile. Everything is checked before
    the first value is changed. On several processes each calls this; they do not wait for others.

    Args:
        path: A folder with ``model.safetensors``, or with ``model.safetensors.index.json`` and what
            that names; or one of these files.
        module: Parameters and persistent buffers that are DTensors get their tiles, on the meta
            device too; plain tensors get the whole. Parameters stay the objects that they are, as
            far as torch can do that. Buffers that no file has stay on the meta device:
            ``xd.materialize(module, init=False)`` makes these.
        names: What tensors are called in the files, where that is not their name in the module:
            patterns, or a function, see :mod:`xla_dtensor.hosts.hugging_face.names`. How
            transformers stores its own models is known without it.
        dtype: What floating-point tensors become; "auto": what they are in the files; None: what
            they are in the module.
        strict: Refuse tensors that only the module or only the files have, and two values for a
            tied tensor. Buffers that files of old versions have, and the module makes by itself,
            do not count.
        progress: Show a bar, where tqdm is installed and stderr is a terminal.

    Returns:
        What was loaded, what was missing and unexpected, and how many bytes this process read.

    Raises:
        WeightsError: Files that are damaged or not there, or that do not fit the module: names
            differ (strict), or shapes do.
        ArgumentTypeError: Not a module, or `names` of another kind.

    Example:
        >>> import tempfile, xla_dtensor as xd
        >>> from xla_dtensor.checkpoint import save_hf
        >>> mesh = xd.init_device_mesh("xla", (2, 4), mesh_dim_names=("dp", "tp"))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     names = save_hf(folder, nn.Linear(4, 8))
        ...     with torch.device("meta"):
        ...         model = nn.Linear(4, 8)
        ...     _ = xd.shard_module(model, mesh, {"weight": ["tp", None], "bias": ["tp"]})
        ...     load_hf(folder, model).bytes_read
        160
        >>> model.weight.is_meta, model.weight.local_shape
        (False, torch.Size([2, 4]))
    """
    slots = slots_of(module)
    rules = NameRules(names, stored=stored_by_transformers(module))
    with WeightFiles(path) as files:
        sources, missing, misfits = _sources(slots, files.tensors, rules, dtype)
        unexpected = _unexpected(module, sources, files.tensors)
        if misfits or (strict and (missing or unexpected)):
            raise _misfit(path, module, misfits, missing, unexpected, files.tensors)
        sources.sort(key=lambda source: _place(files, source))
        sizes = [sum(files.tensors[p.key].num_bytes for p in s.pieces) for s in sources]
        with moving("loading", sum(sizes), None if progress else False) as advance:
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
    misfits: list[str] = []
    for slot in slots:
        candidates = [rules.pieces(name, slot.tensor.shape, tensors) for name in slot.names]
        complete = [c for c in candidates if c and all(piece.key in tensors for piece in c)]
        if not complete:
            absent = [piece.key for c in candidates for piece in c if piece.key not in tensors]
            if absent:  # otherwise the rules say that it is in no file
                name = slot.names[0]
                missing.append(name if name in absent else f"{name} (as {absent[0]})")
            continue
        pieces, *aliases = complete
        target = _dtype_for(slot.tensor, tensors[pieces[0].key].dtype, dtype)
        for piece in pieces:
            misfits += _faults(slot.names[0], piece, tensors[piece.key], target)
        sources.append(_Source(slot, pieces, target, [p for p in aliases if p != pieces]))
    return sources, missing, misfits


def _dtype_for(
    tensor: torch.Tensor, stored: torch.dtype, dtype: torch.dtype | str | None
) -> torch.dtype:
    if dtype is None or not tensor.dtype.is_floating_point:
        return tensor.dtype
    if dtype == "auto":
        return stored if stored.is_floating_point else tensor.dtype
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise WeightsError(
            f"Weights were to be loaded with dtype={dtype!r}. Values of parameters are converted "
            "to a floating-point dtype, or not at all. Pass e.g. torch.bfloat16, 'auto' for that "
            "of the files, or None for that of the module."
        )
    return dtype


def _faults(name: str, piece: Piece, stored: FileTensor, dtype: torch.dtype) -> Iterator[str]:
    if stored.shape != piece.shape:
        yield f"{name} has shape={piece.shape}, {piece.key} in the files {stored.shape}"
    elif stored.dtype.is_floating_point != dtype.is_floating_point:
        yield f"{name} has dtype={dtype}, {piece.key} in the files {stored.dtype}"


def _unexpected(
    module: nn.Module, sources: Iterable[_Source], tensors: dict[str, FileTensor]
) -> list[str]:
    used = {p.key for s in sources for pieces in (s.pieces, *s.aliases) for p in pieces}
    used |= dropped_names(module)
    return [key for key in tensors if key not in used and not is_ignorable(module, key)]


def _misfit(
    path: str | os.PathLike[str],
    module: nn.Module,
    misfits: Sequence[str],
    missing: Sequence[str],
    unexpected: Sequence[str],
    tensors: dict[str, FileTensor],
) -> WeightsError:
    near_names = [_near(name, unexpected) for name in missing[:_LISTED]]
    parts = [
        f"{what} ({count}): {', '.join(names[:_LISTED])}{', ...' * (count > _LISTED)}"
        for what, count, names in (
            ("of another shape or kind", len(misfits), misfits),
            ("missing in the files", len(missing), near_names),
            ("not in the module", len(unexpected), unexpected),
        )
        if count
    ]
    remedy = "Pass names= that says what they are called in the files, or strict=False to load "
    remedy += "what is found"
    if misfits:
        remedy = "Pass the weights of this model, or names= that says how they are cut"
    return WeightsError(
        f"A {type(module).__name__} was to get the weights of path={os.fspath(path)!r}, which has "
        f"{len(tensors)} tensors. They do not fit the module: {'; '.join(parts)}. {remedy}."
    )


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
            placements = tuple(Replicate() if p.is_partial() else p for p in spec.placements)
            content = DTensor._wrapping(filled(tensor, dtype, read), spec.mesh, placements)
        elif in_place and tensor.device.type == "cpu" and tensor.is_contiguous():
            read(whole_block(tensor.shape), tensor.detach())
            torch.autograd.graph.increment_version(tensor)
            return
        else:
            content = torch.empty(tensor.shape, dtype=dtype)
            read(whole_block(tensor.shape), content)
            content = content if tensor.is_meta else content.to(tensor.device)
        if in_place:
            tensor.copy_(content)
        else:
            slot.replace(content)


def _check_tied(files: WeightFiles, source: _Source) -> None:
    """Refuse two values for a tensor that the module has under two names."""
    stored = files.tensors[source.pieces[0].key].dtype
    for alias in source.aliases:
        for index in blocks_of(source.slot.tensor):
            for window in windows(extents_of(index), stored.itemsize, _COMPARED):
                part = shifted(window, index)
                first, second = (torch.empty(extents_of(part), dtype=stored) for _ in range(2))
                _reader(files, source.pieces)(part, first)
                _reader(files, alias)(part, second)
                if not torch.equal(first, second):
                    raise WeightsError(
                        f"The tied tensor {' = '.join(source.slot.names)} was to be loaded. The "
                        f"files have different values under {source.pieces[0].key!r} and "
                        f"{alias[0].key!r}. Load into a module without the tie, or pass "
                        "strict=False for the first."
                    )
