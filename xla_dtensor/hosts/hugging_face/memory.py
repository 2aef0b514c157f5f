"""Giving freed memory back to the system while much is moved.

glibc keeps what is freed in blocks of up to 32 MB and, when small objects came between them, finds
no place there for the next block: a process that moves 16 GB tile by tile, and holds one of them,
was seen to grow by 3 GB.
"""

from __future__ import annotations

import contextlib
import ctypes

__all__ = ["FreedMemory"]

_OFTEN = 256 << 20


class FreedMemory:
    """Counts what was moved, and from time to time gives back what was freed.

    Example:
        >>> freed = FreedMemory()
        >>> freed.after(1 << 30)
    """

    def __init__(self) -> None:
        self._moved = 0

    def after(self, num_bytes: int) -> None:
        """Hear that as many bytes more were moved, and are no longer held."""
        self._moved += num_bytes
        if self._moved >= _OFTEN:
            self._moved = 0
            with contextlib.suppress(OSError, AttributeError):  # only glibc keeps that much
                ctypes.CDLL(None).malloc_trim(0)
