"""Walk over a batch: tensors in dicts, lists, tuples and named tuples, with a path to each.

What is said of a batch (placements, shapes, padding) may be said once for all of it, or in the
batch's own structure, down to any depth: what stands at a place holds for all below it.

    batch        {"text": {"tokens": t, "labels": l}, "weight": w}
    placements   {"text": [Shard(0), Shard(1)], "weight": [Shard(0), Replicate()]}
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.distributed.tensor import Placement

from xla_dtensor.core.errors import DataError

__all__ = [
    "Path",
    "Said",
    "is_host_tensor",
    "map_batch",
    "path_text",
    "said_number",
    "said_placements",
    "said_shape",
    "tensors_of",
    "with_tensors",
]

Path = tuple[Any, ...]


class Said:
    """Something said of a batch, once or in the batch's structure.

    Args:
        name: The argument that said it, for messages.
        value: What was said.
        is_value: Tells whether an object is what is said, and no structure.
    """

    def __init__(self, name: str, value: Any, is_value: Callable[[Any], bool]) -> None:
        self.name, self.value, self._is_value = name, value, is_value

    @property
    def is_said(self) -> bool:
        """Whether it is said once for all from here on."""
        return self._is_value(self.value)

    def below(self, key: Any, path: Path) -> Said:
        """Return what was said of the child at `key`."""
        if self._is_value(self.value):
            return self
        try:
            value = self.value[key]
        except (KeyError, IndexError, TypeError):
            raise DataError(
                f"{self.name} was passed in a structure that has nothing for the batch's leaf "
                f"{path_text(path)}. What is not said once has to be said for every leaf. Add it, "
                f"or pass one value for the whole batch."
            ) from None
        return Said(self.name, value, self._is_value)

    def at_leaf(self, path: Path) -> Any:
        """Return what was said of a leaf."""
        if self._is_value(self.value):
            return self.value
        raise DataError(
            f"{self.name}={self.value!r} was passed for the batch's leaf {path_text(path)}. It is "
            "neither a value nor of the batch's structure. Pass one value for the whole batch, or "
            "one per leaf."
        )


def said_placements(value: Any) -> Said:
    """Return placements: None, placements or aliases in a sequence, or a ShardingSpec."""
    return Said("placements", value, _is_placements)


def said_shape(value: Any) -> Said:
    """Return global shapes: None, or a sequence of sizes and None."""
    return Said("global_shape", value, _is_shape)


def said_number(name: str, value: Any) -> Said:
    """Return numbers."""
    return Said(name, value, lambda v: isinstance(v, (bool, int, float, complex)))


def _is_placements(value: Any) -> bool:
    if value is None or hasattr(value, "partition_spec"):
        return True
    if not isinstance(value, (list, tuple)):
        return not hasattr(value, "keys")  # no placements: refused later, with its own message
    return all(isinstance(entry, Placement) for entry in value) or all(map(_is_alias, value))


def _is_alias(entry: Any) -> bool:
    named = isinstance(entry, tuple) and bool(entry) and all(isinstance(e, str) for e in entry)
    return entry is None or isinstance(entry, str) or named


def _is_shape(value: Any) -> bool:
    return value is None or (
        isinstance(value, (list, tuple))
        and all(entry is None or isinstance(entry, int) for entry in value)
    )


def is_host_tensor(leaf: Any) -> bool:
    """Tell whether a leaf is to be put on the mesh: a plain tensor, or an array of numbers."""
    if isinstance(leaf, torch.Tensor):
        return not isinstance(leaf, TorchDTensor)
    return isinstance(leaf, np.ndarray) and (leaf.dtype.kind in "biufc" or _is_bfloat16(leaf))


def _is_bfloat16(array: np.ndarray[Any, Any]) -> bool:
    return array.dtype.name == "bfloat16"


def _as_tensor(leaf: Any) -> torch.Tensor:
    if isinstance(leaf, torch.Tensor):
        return leaf
    array = leaf if leaf.flags.writeable else leaf.copy()  # torch has no read-only tensors
    if _is_bfloat16(array):
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(
        np.ascontiguousarray(array) if min(array.strides, default=0) < 0 else array
    )


def with_tensors(batch: Any) -> Any:
    """Return a batch with tensors for its arrays."""
    return map_batch(lambda path, tensor: tensor, batch)


def map_batch(function: Callable[..., Any], batch: Any, *said: Said, path: Path = ()) -> Any:
    """Return `batch` with `function(path, tensor, *what was said of it)` for every host tensor.

    Everything else, such as texts and DTensors, stays. Mappings come back as dicts.
    """
    if isinstance(batch, Mapping):
        return {
            key: map_batch(function, value, *_below(said, key, path), path=(*path, key))
            for key, value in batch.items()
        }
    if isinstance(batch, (list, tuple)):
        values = [
            map_batch(function, value, *_below(said, place, path), path=(*path, place))
            for place, value in enumerate(batch)
        ]
        if isinstance(batch, tuple) and hasattr(batch, "_fields"):
            return type(batch)(*values)
        return values if isinstance(batch, list) else tuple(values)
    if not is_host_tensor(batch):
        return batch
    return function(path, _as_tensor(batch), *(each.at_leaf(path) for each in said))


def _below(said: tuple[Said, ...], key: Any, path: Path) -> tuple[Said, ...]:
    return tuple(each.below(key, (*path, key)) for each in said)


def tensors_of(batch: Any) -> Iterator[tuple[Path, torch.Tensor]]:
    """Yield the host tensors of a batch with their paths."""
    found: list[tuple[Path, torch.Tensor]] = []
    map_batch(lambda path, tensor: found.append((path, tensor)), batch)
    yield from found


def path_text(path: Path) -> str:
    """Return a path as Python would write it, e.g. ``['text'][0]``; ``itself`` for the batch."""
    return "".join(f"[{key!r}]" for key in path) or "itself"
