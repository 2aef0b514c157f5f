"""The collectives that a user calls; see :mod:`xla_dtensor.dtensor.collectives`."""

from __future__ import annotations

from xla_dtensor.dtensor.collectives import (
    all_gather,
    all_to_all,
    axis_index,
    permute,
    pmax,
    pmean,
    pmin,
    psum,
    reduce_scatter,
)

__all__ = [
    "all_gather",
    "all_to_all",
    "axis_index",
    "permute",
    "pmax",
    "pmean",
    "pmin",
    "psum",
    "reduce_scatter",
]
