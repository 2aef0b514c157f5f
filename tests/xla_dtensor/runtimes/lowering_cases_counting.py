"""The calls of ops that sort, count and scatter: test_jax_lowering_counting makes them."""

from __future__ import annotations

import math
from typing import Any

import torch

from tests.xla_dtensor.runtimes.lowering_cases import (
    PLACES,
    Case,
    draw_anew,
    f,
    flags,
    index,
    ints,
    named,
)

draw_anew()
A, S = f(5, 6), f(5, 6, 3)
GAPS = torch.where(f(5, 6) > 1, math.nan, f(5, 6))
EVEN = torch.tensor([[1.0, 2.0, 2.0, 1.0], [4.0, 5.0, 6.0, 7.0]])
EDGES = torch.tensor([-2.0, -0.5, 0.0, 1.0, 2.0])
SORTING: dict[Any, list[Case]] = {
    **named("kthvalue", Case(A, 2), Case(S, 3, -2, True), Case(A[0].argsort(), 4), Case(f(), 1)),
    **named("median nanmedian", Case(A), Case(GAPS), Case(ints(5, 1)), Case(f()), Case(f(0))),
    **named(
        "median.dim nanmedian.dim",
        Case(S, 1),
        Case(GAPS, 0),
        Case(GAPS, -1, True),
        Case(torch.full((2, 3), math.nan), 1),
        Case(f(), 0),
    ),
    **named("mode", Case(ints(5, 6)), Case(EVEN, -1), Case(ints(5, 6, 3), 0, True), Case(f(), 0)),
    **named(
        "cummax cummin",
        Case(S, 1),
        Case(GAPS, 0),
        Case(ints(5, 6), -1),
        Case(flags(6), 0),
        Case(f(), 0),
    ),
    **named(
        "searchsorted.Tensor",
        Case(EDGES, A),
        Case(A.sort().values, f(5, 3), right=True, out_int32=True),
        Case(A, f(5, 3), side="right", sorter=A.argsort()),
        Case(S.sort().values, S, side="left"),
        Case(EDGES, torch.tensor([0.0, 1.0, math.nan, math.inf, -9.0]), right=True),
        Case(torch.arange(5), ints(5, 6)),
    ),
    **named("searchsorted.Scalar", Case(EDGES, 0.0), Case(EDGES, 0.0, right=True)),
    **named("bucketize.Tensor", Case(A, EDGES), Case(S, EDGES, out_int32=True, right=True)),
    **named("bucketize.Scalar", Case(0.5, EDGES), Case(1, EDGES, right=True)),
}
TIES = torch.tensor([0, 2, 0, 0])
REDUCES = [(r, i) for r in ("prod", "mean", "amax", "amin") for i in (True, False)]
SCATTERING: dict[Any, list[Case]] = {
    **named(
        "scatter_reduce.two",
        *(Case(A, 0, index(4, 6, high=5), f(5, 6), r, include_self=i) for r, i in REDUCES),
        *(Case(S, -1, index(5, 2, 7, high=3), f(5, 6, 8), "sum", include_self=i) for i in (0, 1)),
        *(Case(ints(5, 6), 1, PLACES, ints(5, 6), r, include_self=i) for r, i in REDUCES),
        Case(f(), 0, torch.tensor(0), f(), "prod"),
        Case(A, 0, index(0, 6, high=5), f(5, 6), "sum"),
    ),
    **named(
        "scatter.reduce",
        *(Case(A, 0, index(4, 6, high=5), f(5, 6), reduce=r) for r in ("add", "multiply")),
        Case(ints(5, 6), 1, PLACES, ints(5, 6), reduce="multiply"),
    ),
    **named("scatter.value_reduce", Case(A, 0, index(4, 6, high=5), 2.5, reduce="multiply")),
    **named(
        "index_reduce",
        *(Case(A, 0, TIES, f(4, 6), r, include_self=i) for r, i in REDUCES),
        *(Case(S, -1, TIES, f(5, 6, 4), r, include_self=i) for r, i in REDUCES),
        *(Case(ints(5, 6), 0, TIES, ints(4, 6), r, include_self=i) for r, i in REDUCES),
        Case(f(), 0, torch.tensor(0), f(), "amax"),
    ),
    **named(
        "masked_scatter",
        Case(A, A > 0, f(5, 6)),
        Case(S, f(6, 1) > 0, f(90)),
        Case(ints(5, 6), A > 9, ints(1)),
    ),
    **named(
        "masked_scatter_backward", Case(A, A > 0, [5, 6]), Case(A, A > 0, [40]), Case(A, A > 9, [2])
    ),
}
LENGTHS = torch.tensor([2, 0, 1, 2])
OFFSETS = torch.tensor([0, 2, 2, 3, 5])
PER_ROW = torch.tensor([[1, 5], [3, 3], [0, 6], [2, 4], [6, 0]])
ZEROS = torch.tensor([0.0, 2.0, 3.0, 0.0, 0.0])
SEGMENTS: dict[Any, list[Case]] = {
    **named(
        "segment_reduce",
        *(Case(A, r, lengths=LENGTHS) for r in ("sum", "mean", "prod", "max", "min")),
        *(Case(A, r, offsets=OFFSETS, initial=1.5) for r in ("sum", "mean", "prod", "max", "min")),
        *(Case(S, r, lengths=PER_ROW, axis=1) for r in ("sum", "mean", "prod", "max", "min")),
        *(Case(ZEROS, "prod", lengths=LENGTHS, initial=i) for i in (None, 2.0)),
        Case(torch.tensor([1.0, 1.0, 2.0, math.nan, 3.0]), "max", lengths=torch.tensor([3, 2])),
        Case(A, "sum", offsets=torch.tensor([1, 3]), unsafe=True),
    ),
    **named(
        "_segment_reduce_backward",
        Case(f(4, 6), f(4, 6), A, "sum", lengths=LENGTHS),
        Case(f(4, 6), f(4, 6), A, "mean", offsets=OFFSETS),
    ),
}
COUNTING: dict[Any, list[Case]] = {
    **named(
        "histc", Case(A), Case(A, 5, -1, 1), Case(A, bins=3), Case(torch.ones(4), 4), Case(S, 7)
    ),
    **named(
        "histogram.bins_tensor",
        Case(A, EDGES),
        Case(A, EDGES, density=True),
        Case(A, EDGES, weight=A.abs()),
    ),
    **named(
        "histogram.bin_ct",
        Case(A, 4),
        Case(A, 3, range=[-1.0, 1.0]),
        Case(A, 5, weight=A.abs(), density=True),
        Case(f(), 4, density=True),
        Case(torch.full((3,), 2.0), 3),
    ),
    **named("_histogramdd_bin_edges", Case(f(9, 2), [3, 4]), Case(f(9, 1), [2], range=[0.0, 2.0])),
    **named(
        "_histogramdd_from_bin_cts", Case(f(9, 2), [3, 4]), Case(f(9, 2), [2, 2], density=True)
    ),
    **named("_histogramdd_from_bin_tensors", Case(f(9, 2), [EDGES, EDGES[1:]])),
    **named(
        "nonzero_static",
        Case(A > 0, size=4),
        Case(ints(5, 6), size=33, fill_value=-7),
        Case(f(0), size=2),
        Case(torch.tensor(3), size=2),
    ),
    **named("hash_tensor", Case(A), Case(S, [1]), Case(ints(5, 6), [0], keepdim=True), Case(A > 0)),
}
REPEATS = torch.tensor([2, 0, 3, 1])
BY_VALUES: dict[Any, list[Case]] = {
    **named("nonzero", Case(A > 0), Case(ints(5, 6) - 1), Case(f()), Case(f(0, 3))),
    **named("masked_select", Case(A, A > 0), Case(S, f(6, 1) > 0), Case(A, A > 9)),
    **named("_unique", Case(ints(5, 6)), Case(ints(7), True, True)),
    **named("_unique2", Case(ints(5, 6), True, True, True), Case(PLACES)),
    **named("unique_dim", Case(PLACES[:, [0, 0, 1]], 1, True, True, True)),
    **named("unique_consecutive", Case(TIES, True, True), Case(PLACES[:, [0, 0, 1]], dim=1)),
    **named("unique_dim_consecutive", Case(PLACES[:, [0, 0, 1]], 1, True, True)),
    **named("bincount", Case(TIES), Case(TIES, f(4), 6), Case(index(0, high=2), minlength=3)),
    **named("repeat_interleave.Tensor", Case(REPEATS), Case(REPEATS, output_size=6)),
}
STATIC = SORTING | SCATTERING | SEGMENTS | COUNTING
ALL = STATIC | BY_VALUES
