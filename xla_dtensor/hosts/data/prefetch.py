"""Run an iterator ahead in a thread: a bounded queue, errors with their traceback, a clean end.

The executors of concurrent.futures are no help here: the program waits for their threads when it
ends, and one that waits for another process would keep it from ending.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from xla_dtensor.runtimes.live_objects import undisturbed

__all__ = ["Ahead"]

_END = object()
_LOOK_SECONDS = 0.1
_JOIN_SECONDS = 10  # a loader that hangs must not keep the program from ending


class Ahead(Iterator[Any]):
    """The values of an iterator that a thread runs ahead of whoever takes them.

    `make` is called in the thread, with a function that tells whether it is to stop. `depth` values
    may wait, and one more is in the making; 0: no thread, each is made when it is asked for.

    Example:
        >>> list(Ahead(lambda stopped: iter(range(3)), depth=2))
        [0, 1, 2]
    """

    def __init__(self, make: Callable[[Callable[[], bool]], Iterator[Any]], depth: int) -> None:
        self._queue: queue.Queue[Any] = queue.Queue(max(depth, 1))
        self._stopped = threading.Event()
        self._iterator = None if depth else make(self._stopped.is_set)
        # The thread holds the queue and the event, and not this object.
        thread = threading.Thread(
            target=_run_ahead,
            args=(make, self._queue, self._stopped),
            name="xla_dtensor loader",
            daemon=True,
        )
        if depth:
            thread.start()
        # Also where nobody closes it: a loop left by `break`, or the end of the program.
        self._end = weakref.finalize(self, _stop, thread, self._queue, self._stopped)

    def __next__(self) -> Any:
        """Return the next value, raising what the thread raised, with its traceback."""
        if self._stopped.is_set():
            raise StopIteration
        if self._iterator is not None:
            return next(self._iterator)
        value, error = self._queue.get()
        if error is None:
            return value
        self.close()
        raise error

    def close(self) -> None:
        """Stop the thread, and wait up to ten seconds for its end."""
        iterator, self._iterator = self._iterator, None
        if iterator is not None and hasattr(iterator, "close"):
            iterator.close()  # pyright: ignore[reportAttributeAccessIssue]
        self._end()


def _run_ahead(make: Any, values: queue.Queue[Any], stopped: threading.Event) -> None:
    """Put pairs of a value and an error, of which the last is StopIteration."""

    def put(value: Any, error: BaseException | None) -> bool:
        while not stopped.is_set():
            with contextlib.suppress(queue.Full):
                values.put((value, error), timeout=_LOOK_SECONDS)
                return True
        return False

    try:
        iterator = make(stopped.is_set)
        try:
            while True:
                with undisturbed():  # a step that is traced meanwhile looks through all objects
                    value = next(iterator, _END)
                if value is _END or not put(value, None):
                    break
                del value  # or it would live until the next one is there
        finally:
            if hasattr(iterator, "close"):
                iterator.close()
    except BaseException as error:
        put(None, error)
    else:
        put(None, StopIteration())


def _stop(thread: threading.Thread, values: queue.Queue[Any], stopped: threading.Event) -> None:
    stopped.set()
    with contextlib.suppress(queue.Empty):
        while True:
            values.get_nowait()
    if thread.is_alive() and thread is not threading.current_thread():
        thread.join(_JOIN_SECONDS)
