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
import operator
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import compress
from typing import Any

__all__ = [
    "KnownObjects",
    "objects_late_in_block",
    "old_objects_aside",
    "show_all_objects",
    "tracked_ids",
    "tracked_objects",
]


_NOT_KEPT = frozenset({tuple, types.FrameType})


@dataclass(frozen=True, eq=False)
class KnownObjects:
    """Objects, and their ids, which nothing made later has while this is held: it keeps them.

    All but tuples, which CPython does not fill where somebody else refers to them, and frames,
    which would keep what their functions drop when they return.
    """

    ids: set[int] = field(default_factory=set)
    kept: list[Any] = field(default_factory=list)

    @classmethod
    def of(cls, objects: list[Any]) -> KnownObjects:
        """Take down objects."""
        is_not_kept = map(_NOT_KEPT.__contains__, map(type, objects))
        return cls(set(map(id, objects)), list(compress(objects, map(operator.not_, is_not_kept))))


_is_inside = _set_aside = False
_brought_back = KnownObjects()  # by who looked for objects, while a block runs


@contextlib.contextmanager
def old_objects_aside() -> Iterator[None]:
    """Let collections inside the block walk only over what the block makes.

    Nothing happens inside another such block, or where the user has set objects aside with
    ``gc.freeze()``: they would come back with ours.
    """
    global _is_inside, _set_aside, _brought_back
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
        _brought_back = KnownObjects()


def show_all_objects() -> None:
    """Put back what a block has set aside; for who looks for objects while it runs."""
    global _set_aside, _brought_back
    if _set_aside:
        _set_aside = False
        new = set(map(id, gc.get_objects()))
        gc.unfreeze()
        _brought_back = KnownObjects.of([o for o in gc.get_objects() if id(o) not in new])


def objects_late_in_block() -> list[Any] | None:
    """Return the tracked objects, those set aside too; None outside of a block.

    What is no garbage by then is set aside with the rest, so that collections later in the block
    walk over as little as before.
    """
    if not _set_aside:
        return None
    gc.collect()
    gc.unfreeze()
    objects = gc.get_objects()
    gc.freeze()
    return objects


def tracked_objects(before: KnownObjects | None = None) -> list[Any]:
    """Return the tracked objects that no block has set aside, now or before.

    Args:
        before: Others to leave out.
    """
    objects = gc.get_objects()
    new = _new_ids(objects, before)
    return list(compress(objects, map(new.__contains__, map(id, objects))))


def tracked_ids(before: KnownObjects | None = None) -> set[int]:
    """Return the ids of `tracked_objects`."""
    return _new_ids(gc.get_objects(), before)


def _new_ids(objects: list[Any], before: KnownObjects | None) -> set[int]:
    # In C: with half a million objects a loop would take longer than a small trace.
    return set(map(id, objects)).difference(_brought_back.ids, before.ids if before else ())
