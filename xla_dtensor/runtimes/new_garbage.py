"""Collect what was made lately, without a look at all that was there before.

At the end of a trace the garbage collector says what the step dropped in cycles. A full collection
walks over every object of the process, those of torch and jax alone are half a million: 0.2 s and
more, several times as long as a small step takes to trace. Python can set objects aside (its
"permanent generation"), and putting all of them there and back costs nothing. In between, each
collection, also one that Python starts by itself, walks over what is new.

Example:
    >>> import gc, weakref
    >>> class Node: ...
    >>> with old_objects_aside():
    ...     node = Node()
    ...     node.itself = node
    ...     reference = weakref.ref(node)
    ...     del node
    ...     _ = gc.collect()
    >>> reference() is None
    True
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

__all__ = ["old_objects_aside", "show_all_objects", "tracked_objects"]

_is_inside = _set_aside = False
_brought_back: set[int] = set()  # by who looked for objects, while a block runs


@contextlib.contextmanager
def old_objects_aside() -> Iterator[None]:
    """Let collections inside the block walk only over what the block makes.

    Nothing happens inside another such block, or where the user has set objects aside with
    ``gc.freeze()``: they would come back with ours.
    """
    global _is_inside, _set_aside
    if _is_inside or gc.get_freeze_count():  # which counts them one by one
        yield
        return
    gc.freeze()
    _is_inside = _set_aside = True
    try:
        yield
    finally:
        if _set_aside:
            gc.unfreeze()
        _is_inside = _set_aside = False
        _brought_back.clear()


def show_all_objects() -> None:
    """Put back what a block has set aside; for who looks for objects while it runs."""
    global _set_aside
    if _set_aside:
        _set_aside = False
        new = set(map(id, gc.get_objects()))
        gc.unfreeze()
        _brought_back.update(set(map(id, gc.get_objects())) - new)


def tracked_objects() -> set[int]:
    """Return the ids of the tracked objects that no block has set aside, now or before."""
    return set(map(id, gc.get_objects())) - _brought_back
