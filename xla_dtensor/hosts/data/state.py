"""The state of somebody else's loader: whose method to ask, and when.

Two protocols are known. torchdata's StatefulDataLoader and ``torchdata.nodes.Loader`` have
``state_dict()`` and ``load_state_dict(state)`` on the loader; grain's iterators have
``get_state()`` and ``set_state(state)``. Both say where the loader is *after* the batch it gave
last, which is why the state is taken right there, by the thread that reads, and travels with the
batch. A loader with neither is read again up to the batch.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

__all__ = ["begin", "has_state", "state_after"]


def has_state(loader: Any, iterator: Any = None) -> bool:
    """Tell whether a loader, or its iterator, says where it is."""
    on_loader = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
    return on_loader or hasattr(iterator, "get_state")


def begin(loader: Iterable[Any], state: Any, skip: int) -> Iterator[Any]:
    """Return an iterator over a loader, from a state on.

    Args:
        loader: The loader.
        state: What `state_after` returned; None for the beginning.
        skip: How many batches to read and throw away.
    """
    if state is not None and state["of"] == "loader":
        loader.load_state_dict(state["state"])  # pyright: ignore[reportAttributeAccessIssue]
    iterator = iter(loader)
    if state is not None and state["of"] == "iterator":
        iterator.set_state(state["state"])  # pyright: ignore[reportAttributeAccessIssue]
    for _ in itertools.islice(iterator, skip):
        pass
    return iterator


def state_after(loader: Any, iterator: Any) -> dict[str, Any] | None:
    """Return where a loader is after the batch that it gave last; None where it cannot tell."""
    if hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict"):
        return {"of": "loader", "state": copy.deepcopy(loader.state_dict())}
    if hasattr(iterator, "get_state"):
        return {"of": "iterator", "state": copy.deepcopy(iterator.get_state())}
    return None
