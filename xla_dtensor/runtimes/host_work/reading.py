"""Reads of plain tensors that are no op: ``tolist`` and ``numpy``.

What Python makes of the values cannot be followed. So it is noted that they were read.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator
from typing import Any

import torch

from xla_dtensor.runtimes.host_work.tape import HostTape, is_host

__all__ = ["noting_reads"]

_READS = ("tolist", "numpy", "__array__")


@contextlib.contextmanager
def noting_reads(tape: HostTape) -> Iterator[None]:
    """Note the reads of plain tensors on a tape, in this thread, for the time of a block."""
    thread = threading.get_ident()
    own = {name: vars(torch.Tensor).get(name) for name in _READS}

    def noted(name: str) -> Any:
        read = getattr(torch.Tensor, name)

        @functools.wraps(read)
        def reading(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == thread and is_host(tensor):
                tape.note_read(tensor)
            return read(tensor, *args, **kwargs)

        return reading

    for name in _READS:
        setattr(torch.Tensor, name, noted(name))
    try:
        yield
    finally:
        for name, function in own.items():
            if function is None:
                delattr(torch.Tensor, name)
            else:
                setattr(torch.Tensor, name, function)
