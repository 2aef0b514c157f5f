"""What a module's weights are in files, and how their parts are read from the devices."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from xla_dtensor.core.errors import WeightsError
from xla_dtensor.dtensor.dcp import Index
from xla_dtensor.hosts.hugging_face.config import config_text
from xla_dtensor.hosts.hugging_face.gather import Team, part_of
from xla_dtensor.hosts.hugging_face.module import Slot, model_type_of, slots_of
from xla_dtensor.hosts.hugging_face.names import NameRules, Names, Piece
from xla_dtensor.hosts.hugging_face.plan import WrittenTensor, bytes_of, files_for
from xla_dtensor.hosts.hugging_face.windows import shifted
from xla_dtensor.hosts.hugging_face.write import write_files

__all__ = ["save"]


def save(
    path: str | os.PathLike[str],
    module: nn.Module,
    max_shard_bytes: int | str,
    names: Names,
    dtype: torch.dtype | None,
    config: Any,
    progress: bool,
) -> tuple[str, ...]:
    """Save weights: see :func:`xla_dtensor.hosts.checkpoint.hugging_face.save_hf`."""
    slots = slots_of(module)
    text = config_text(module, config, dtype)
    rules = NameRules(names, model_type_of(module, config))
    tensors = [tensor for slot in slots for tensor in _written_tensors(slot, rules, dtype)]
    files = files_for(tensors, bytes_of(max_shard_bytes))
    team = Team(slot.tensor for slot in slots)
    texts = {} if text is None else {"config.json": text}
    write_files(Path(path), files, team, texts, progress)
    return tuple(file.name for file in files)


def _written_tensors(
    slot: Slot, rules: NameRules, dtype: torch.dtype | None
) -> Iterator[WrittenTensor]:
    name, tensor = slot.names[0], slot.tensor
    if not _has_values(tensor):
        raise WeightsError(
            f"The tensor {name!r} on the meta device was to be written. It has no values. Load or "
            "materialise the module first."
        )
    target = dtype if dtype is not None and tensor.dtype.is_floating_point else tensor.dtype
    for piece in rules.pieces(name, tuple(tensor.shape)):
        yield WrittenTensor(piece.key, piece.shape, target, _tensor_reader(tensor, piece, target))


def _has_values(tensor: torch.Tensor) -> bool:
    return not getattr(tensor, "_local_tensor", tensor).is_meta


def _tensor_reader(
    tensor: torch.Tensor, piece: Piece, dtype: torch.dtype
) -> Callable[[Index, bool], torch.Tensor | None]:
    def read(part: Index, wanted: bool) -> torch.Tensor | None:
        inner = (slice(0, 1), *part) if piece.stacked else part
        values = part_of(tensor, shifted(inner, piece.at), wanted)
        return None if values is None else values.to(dtype)

    return read
