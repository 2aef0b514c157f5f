"""Writes through views of DTensors: what the base is labelled is told to the runtime.

On a runtime whose write through a view answers with a new value for the base, nothing says any more
how that lies, and XLA may leave it replicated. The base's label says it::

    y = x * 2          [Shard(0)], never annotated: XLA chose
    y.view(-1)[3] = 1  y has a new value, of which y's label is all that is known
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch.distributed.tensor import Shard

from xla_dtensor.global_state import GlobalState
from xla_dtensor.nested import leaves
from xla_dtensor.runtimes.registry import get_runtime

__all__ = ["tell_bases", "tell_known"]


def tell_bases(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Tell the runtime how the bases of the views lie that an op wrote to.

    A label without a Shard is left out: it may only mean that nothing is known.

    Args:
        func: The ``OpOverload``, which is mutable.
        args: Its arguments, as the caller passed them.
        kwargs: Its keyword arguments.
    """
    given = [args[i] if i < len(args) else kwargs.get(name) for i, name in _written(func)]
    for target in leaves(given):
        base = target._base if isinstance(target, torch.Tensor) else None
        state = None if base is None else getattr(base, "_spec", None)
        if base is None or not isinstance(state, GlobalState) or not _says_something(state):
            continue
        payload, runtime = base._local_tensor, get_runtime()  # pyright: ignore
        if runtime.is_payload(payload):
            runtime.annotate_written(payload, state.span_layout)


@lru_cache(4096)
def _written(func: Any) -> tuple[tuple[int, str], ...]:
    """The places and names of the arguments that an op writes to."""
    arguments = enumerate(func._schema.arguments)
    return tuple((i, a.name) for i, a in arguments if a.alias_info and a.alias_info.is_write)


def tell_known(tensor: Any) -> None:
    """Tell the runtime how a DTensor lies of which more is known than its mesh says."""
    state, runtime = tensor._spec, get_runtime()
    if state.known and _says_something(state) and runtime.is_payload(tensor._local_tensor):
        runtime.annotate_written(tensor._local_tensor, state.span_layout)


def _says_something(state: GlobalState) -> bool:
    placements = state.placements
    sharded = bool(state.known) or any(isinstance(p, Shard) for p in placements)
    return sharded and not any(p.is_partial() for p in placements)
