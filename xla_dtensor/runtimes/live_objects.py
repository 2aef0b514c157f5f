"""Live objects of some classes, found among those that Python's garbage collector knows.

A loop over ``gc.get_objects()`` breaks other threads: while it runs it refers to every object, also
to tuples that another thread is making just now, and CPython's ``tuple(generator)`` then ends with
"SystemError: bad argument to internal function". So threads of this library make their values under
a lock that the search takes (`undisturbed`), and the search is as short as it can be: the choice is
made by one call that runs no bytecode.

Of a tensor that only torch itself still holds (a graph, say) the Python object is torch's, and does
not keep the tensor: it would be an undefined one as soon as torch drops it. Those found do keep it.

Example:
    >>> class Thing: ...
    >>> thing = Thing()
    >>> live_objects(Thing) == [thing]
    True
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator
from itertools import compress
from typing import Any

import torch

from xla_dtensor.runtimes.new_garbage import objects_late_in_block, show_all_objects

__all__ = ["live_objects", "undisturbed"]

_searching = threading.RLock()
_WAIT_SECONDS = 30  # for a thread that is making a value; one that hangs must not hang the rest


def live_objects(*classes: type, late: bool = False) -> list[Any]:
    """Return the objects whose class is one of these or derived from it.

    Args:
        *classes: The classes.
        late: Nobody looks afterwards for what the block of ``old_objects_aside`` has made before.

    Returns:
        The objects, in no particular order.
    """
    subclasses = {subclass for base in classes for subclass in _derived(base)}
    is_alone = _searching.acquire(timeout=_WAIT_SECONDS)
    try:
        objects = (objects_late_in_block() if late else None) or _all_objects()
        instances = list(compress(objects, map(subclasses.__contains__, map(type, objects))))
        del objects
        for instance in instances:
            if isinstance(instance, torch.Tensor):
                instance._fix_weakref()  # pyright: ignore[reportAttributeAccessIssue]
    finally:
        if is_alone:
            _searching.release()
    return instances


def _all_objects() -> list[Any]:
    """Return the objects that are tracked, those that the user froze among them."""
    show_all_objects()
    if not gc.get_freeze_count():
        return gc.get_objects()
    gc.collect()  # Garbage that is frozen stays for ever, and what is new is frozen with the rest.
    gc.unfreeze()
    objects = gc.get_objects()
    gc.freeze()
    return objects


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Let nobody search while the block runs; for what a thread of this library makes."""
    with _searching:
        yield


def _derived(base: type) -> Iterator[type]:
    yield base
    for subclass in type.__subclasses__(base):
        yield from _derived(subclass)
