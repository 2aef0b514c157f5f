"""A checkpoint that is written in the background: one at a time, and no error of it is lost."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

__all__ = ["Pending", "finish_pending", "start_pending"]

logger = logging.getLogger("xla_dtensor")


class Pending:
    """A checkpoint being written; made by ``checkpoint.async_save``."""

    def __init__(self, write: Callable[[], str]) -> None:
        self._write = write
        self._folder: str | None = None
        self._error: BaseException | None = None
        self._is_known = False
        # Not a daemon: Python waits for it at the end of the program.
        self._thread = threading.Thread(target=self._run, name="xla_dtensor checkpoint")
        self._thread.start()

    def wait(self, timeout_seconds: float | None = None) -> str:
        """Wait until the checkpoint is whole, and return its folder.

        Args:
            timeout_seconds: How long to wait. None: until it is done.

        Raises:
            CheckpointError: It could not be written.
            TimeoutError: It is not done yet.
        """
        self._thread.join(timeout_seconds)
        if self._thread.is_alive():
            raise TimeoutError(
                f"A checkpoint was waited for with timeout_seconds={timeout_seconds}. It is not "
                "written yet. Wait again, or longer."
            )
        self._is_known = True
        if self._error is not None:
            raise self._error
        assert self._folder is not None
        return self._folder

    def done(self) -> bool:
        """Tell whether it is written, or has failed: then `wait` raises at once."""
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._folder = self._write()
        except BaseException as error:
            self._error = error
            logger.error("a checkpoint could not be written: %s", error)
        finally:
            del self._write  # with the copies it holds

    @property
    def is_known(self) -> bool:
        """Whether somebody has waited for it."""
        return self._is_known


_pending: Pending | None = None


def finish_pending() -> None:
    """Wait for the checkpoint in the background, and raise its error if nobody has seen it."""
    global _pending
    pending, _pending = _pending, None
    if pending is not None and not pending.is_known:
        pending.wait()


def start_pending(write: Callable[[], str]) -> Pending:
    """Write a checkpoint in a thread of its own.

    Args:
        write: Writes it and returns its folder.
    """
    global _pending
    _pending = Pending(write)
    return _pending
