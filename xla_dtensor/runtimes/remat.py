"""What a backward pass keeps of the forward pass, and what it computes again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from xla_dtensor.errors import ArgumentTypeError, ScanError
from xla_dtensor.runtimes import whole_ops as whole_ops  # defines torch.ops.xla_dtensor

__all__ = ["AS_SEEN", "KINDS", "Remat"]

aten = torch.ops.aten
KINDS = ("none", "full", "dots", "dots_no_batch")
_WITH_NAMES = ("save", "offload")

# Ops that stay whole on a mesh, and what torch makes of them elsewhere: policies that list ops
# name those.
_ATTENTION = (
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
)
AS_SEEN: dict[Any, tuple[Any, ...]] = {
    aten.linear.default: (aten.mm.default, aten.addmm.default),
    aten.matmul.default: (aten.mm.default, aten.bmm.default),
    aten.scaled_dot_product_attention.default: _ATTENTION,
    torch.ops.xla_dtensor.sdpa_lean.default: (
        aten.scaled_dot_product_attention.default,
        *_ATTENTION,
    ),
}


@dataclass(frozen=True)
class Remat:
    """A choice of what to keep.

    Args:
        kind: One of :data:`KINDS`, "save", "offload" or "selective".
        names: The names behind "save:" and "offload:".
        contexts: A ``context_fn`` as ``torch.utils.checkpoint.checkpoint`` takes it.
        text: How the user wrote it.
    """

    kind: str
    names: tuple[str, ...] = ()
    contexts: Callable[[], Any] | None = None
    text: str = ""

    @classmethod
    def of(cls, value: Any) -> Remat:
        """Read what a user wrote.

        Raises:
            ScanError: Not a known text.
            ArgumentTypeError: Neither a text nor a function.

        Example:
            >>> Remat.of("save:scores, mlp").names
            ('scores', 'mlp')
        """
        if callable(value):
            return cls("selective", contexts=value, text=getattr(value, "__name__", repr(value)))
        if not isinstance(value, str):
            raise ArgumentTypeError(
                f"remat={value!r} is of type={type(value).__name__}. What to keep is said by a "
                "name, or by a context_fn of torch.utils.checkpoint. Pass 'none', 'full', 'dots', "
                "'save:NAME', 'offload:NAME' or such a function."
            )
        kind, colon, rest = value.partition(":")
        names = tuple(name.strip() for name in rest.split(",") if name.strip())
        if (kind in KINDS and not colon) or (kind in _WITH_NAMES and names):
            return cls(kind, names, text=value)
        raise ScanError(
            f"remat={value!r} was passed. It is none of {', '.join(map(repr, KINDS))}, nor 'save:' "
            "or 'offload:' with names. Pass one of these; names are those that the block gives "
            "with xd.checkpoint_name."
        )
