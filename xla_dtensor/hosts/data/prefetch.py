"""Run an iterator ahead in a thread: a bounded queue, errors with their traceback, a clean end."""

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


class _Line:
    """The queue between the thread and the one who takes. The thread holds nothing else."""

    def __init__(self, depth: int) -> None:
        self.queue: queue.Queue[tuple[str, Any]] = queue.Queue(depth)
        self.stopped = threading.Event()
        self.thread: threading.Thread | None = None

    def put(self, kind: str, value: Any) -> bool:
        while not self.stopped.is_set():
            with contextlib.suppress(queue.Full):
                self.queue.put((kind, value), timeout=_LOOK_SECONDS)
                return True
        return False

    def close(self) -> None:
        self.stopped.set()
        with contextlib.suppress(queue.Empty):
            while True:
                self.queue.get_nowait()
        if self.thread is not None and self.thread is not threading.current_thread():
            self.thread.join(_JOIN_SECONDS)


def _run(line: _Line, make: Callable[[Callable[[], bool]], Iterator[Any]]) -> None:
    try:
        iterator = make(line.stopped.is_set)
        try:
            while True:
                with undisturbed():  # a step that is traced meanwhile looks through all objects
                    value = next(iterator, _END)
                if value is _END:
                    break
                if not line.put("value", value):
                    return
                del value  # or it would live until the next one is there
        finally:
            close = getattr(iterator, "close", None)
            if close is not None:
                close()
    except BaseException as error:
        line.put("error", error)
    else:
        line.put("end", None)


class Ahead(Iterator[Any]):
    """The values of an iterator that a thread runs ahead of whoever takes them.

    Args:
        make: Called in the thread, with a function that tells whether it is to stop; returns the
            iterator, a generator where it has something to close.
        depth: How many values may wait. One more is in the making. 0: no thread; each value is made
            when it is asked for.

    Example:
        >>> list(Ahead(lambda stopped: iter(range(3)), depth=2))
        [0, 1, 2]
    """

    def __init__(self, make: Callable[[Callable[[], bool]], Iterator[Any]], depth: int) -> None:
        self._line = line = _Line(max(depth, 1))
        self._iterator = make(line.stopped.is_set) if depth == 0 else None
        if depth:
            line.thread = threading.Thread(
                target=_run, args=(line, make), name="xla_dtensor loader", daemon=True
            )
            line.thread.start()
        # Also where nobody closes it: a loop left by `break`, or the end of the program.
        self._end = weakref.finalize(self, line.close)

    def __next__(self) -> Any:
        """Return the next value, raising what the thread raised, with its traceback."""
        if self._line.stopped.is_set():
            raise StopIteration
        if self._iterator is not None:
            return next(self._iterator)
        kind, value = self._line.queue.get()
        if kind == "value":
            return value
        self.close()
        if kind == "error":
            raise value
        raise StopIteration

    def close(self) -> None:
        """Stop the thread, and wait up to ten seconds for its end."""
        iterator, self._iterator = self._iterator, None
        if iterator is not None and hasattr(iterator, "close"):
            iterator.close()  # pyright: ignore[reportAttributeAccessIssue]
        self._end()
