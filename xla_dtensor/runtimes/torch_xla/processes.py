"""Which process of a job this is, on torch_xla: it finds the others itself, where there are TPUs.

``PJRT_DEVICE=TPU`` is all that torch_xla 2.9 needs: libtpu reads the slice's hosts from the
machine, and one process per host, in SPMD mode, drives all of its chips. On CPU its client is one
process, whatever the environment says.
"""

from __future__ import annotations

import torch_xla.runtime as xr

__all__ = ["index_and_count"]


def index_and_count() -> tuple[int, int]:
    """Return this process's number and how many there are, after torch_xla has started."""
    return int(xr.process_index()), int(xr.process_count())
