"""The operators at the border of a manual region, on torch_xla's lazy tensors.

Each makes new graph nodes and leaves what it was given as it is, but for the label {manual} that
`marked` puts on a node. Empty tensors are made afresh: torch_xla is of two minds about the
annotation of an empty tensor.

Manual payloads are of a class of their own, which is how they are known, and by which a debugger
or a traceback can show them: printing one as a tensor reads it, which aborts the process.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, cast

import torch

from xla_dtensor.core import OpSharding
from xla_dtensor.runtimes.torch_xla_payload import functionalization, to_payload, to_plain
from xla_dtensor.runtimes.torch_xla_sharding import DEVICE, to_annotation, xlac

__all__ = ["ManualPayload", "entered", "fresh", "is_plain", "left", "marked"]

_MANUAL = 4
_is_functional = torch._is_functional_tensor  # pyright: ignore[reportPrivateImportUsage]


class ManualPayload(torch.Tensor):
    """A torch_xla tensor, in the functional wrapper, of which each device has another value."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore[reportAssignmentType]
    _made_in_program: int

    def is_spent(self) -> bool:
        """Tell whether the program that it belongs to has been run, or it has lost its value."""
        # By count, too: what was pending for a view's base hides that its old value is computed.
        if self._made_in_program != _current_program():
            return True
        try:
            with functionalization():
                return not xlac()._check_tensor_need_materialization([self])[0]
        except RuntimeError:  # Neither value nor program, after an op that failed half way.
            return True

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"ManualPayload(shape={tuple(self.shape)}, dtype={self.dtype})"


@lru_cache(1)
def _manual_annotation() -> Any:
    return xlac().OpSharding([], [], [], _MANUAL)


def is_plain(tensor: torch.Tensor) -> bool:
    """Tell whether an XLA tensor is one that torch made by itself, without functional wrapper."""
    return not _is_functional(tensor)


def _current_program() -> int:
    """The number of syncs so far."""
    return xlac()._xla_counter_value("MarkStep") or 0


def _as_payload(value: torch.Tensor) -> ManualPayload:
    payload = to_payload(value)
    # In place: `as_subclass` would make another functional wrapper, a view of this one.
    payload.__class__ = ManualPayload
    manual = cast(ManualPayload, payload)
    manual._made_in_program = _current_program()
    return manual


def marked(value: torch.Tensor) -> ManualPayload:
    """Label an unfinished value as manual, in place, and return it as a manual payload."""
    xlac()._mark_manual_sharding(value, _manual_annotation())
    return _as_payload(value)


def fresh(shape: tuple[int, ...], dtype: torch.dtype) -> ManualPayload:
    """Return zeros as a manual payload."""
    with functionalization():
        return marked(torch.zeros(shape, dtype=dtype, device=DEVICE))


def entered(payload: torch.Tensor, sharding: OpSharding) -> ManualPayload:
    """Return the tiles of `payload` under a sharding that divides it evenly, as a manual payload.

    Args:
        payload: A global payload.
        sharding: Relative to the root.
    """
    if payload.numel() == 0:
        return fresh(sharding.shape_per_tile(payload.shape), payload.dtype)
    with functionalization():
        # A node of its own to annotate: a clone shares its source's until it is annotated.
        placed = to_plain(to_payload(payload).clone())
        xlac()._xla_annotate_custom_sharding(placed, to_annotation(sharding))
        return _as_payload(xlac()._spmd_full_to_shard_shape(placed))


def left(manual: torch.Tensor, sharding: OpSharding) -> torch.Tensor:
    """Return the global payload of which `manual` is the tile under a sharding.

    Args:
        manual: A manual payload that no program has computed yet.
        sharding: Relative to the root.
    """
    full = [size * sharding.num_tiles(dim) for dim, size in enumerate(manual.shape)]
    with functionalization():
        if manual.numel() == 0:
            return to_payload(torch.zeros(full, dtype=manual.dtype, device=DEVICE))
        tile, annotation = to_plain(manual), to_annotation(sharding)
        xlac()._mark_manual_sharding(tile, _manual_annotation())
        data = xlac()._spmd_shard_to_full_shape(tile, annotation, full, manual.dtype)
        return to_payload(data)
