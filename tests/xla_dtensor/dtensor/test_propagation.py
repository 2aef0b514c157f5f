"""Labels come from torch's propagator, are cached, and never stop a program."""

from __future__ import annotations

import logging
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import xla_dtensor as xd
from xla_dtensor.dtensor import labels as propagation
from xla_dtensor.dtensor import labels as strided_labels
from xla_dtensor.dtensor.labels import legal_placements, propagate

R, P = Replicate(), Partial()
aten = torch.ops.aten
STRIDED = _StridedShard(0, split_factor=4)


def make(mesh: xd.DeviceMesh, shape: tuple[int, ...], *placements: Any) -> Any:
    return xd.distribute_tensor(torch.zeros(shape), mesh, placements)


@pytest.fixture
def empty_cache(monkeypatch: pytest.MonkeyPatch) -> dict[Any, Any]:
    cache: dict[Any, Any] = {}
    monkeypatch.setattr(propagation, "_cache", cache)
    monkeypatch.setattr(propagation, "_logged", set())
    return cache


def test_answers_are_cached_by_meaning(mesh: xd.DeviceMesh, empty_cache: dict[Any, Any]) -> None:
    a, b = make(mesh, (8, 8), Shard(0), Shard(1)), make(mesh, (8, 8), Shard(0), Shard(1))
    for args in ((a, b), (b, a)):
        assert propagate(aten.add.Tensor, args, {}, mesh) == (Shard(0), Shard(1))
    assert len(empty_cache) == 1
    propagate(aten.add.Tensor, (a, 1), {}, mesh)
    propagate(aten.add.Tensor, (a, True), {}, mesh)
    propagate(aten.add.Tensor, (a, 1.0), {}, mesh)
    assert len(empty_cache) == 4


def test_strided_shards_have_answers_of_their_own(mesh: xd.DeviceMesh, empty_cache: Any) -> None:
    plain, strided = make(mesh, (8, 8), Shard(0), Shard(0)), make(mesh, (8, 8), STRIDED, Shard(0))
    for d in (plain, strided, plain):
        first, second = propagate(aten.neg.default, (d,), {}, mesh)
        assert type(first) is type(d.placements[0])
        assert second == Shard(0)


def test_plain_arguments_count_as_replicated(mesh: xd.DeviceMesh, empty_cache: Any) -> None:
    a = make(mesh, (8, 8), Shard(0), Shard(1))
    assert propagate(aten.mul.Tensor, (torch.ones(8), a), {}, mesh) == (Shard(0), Shard(1))


def test_an_op_without_a_rule_is_logged_once(
    mesh: xd.DeviceMesh, empty_cache: Any, caplog: pytest.LogCaptureFixture
) -> None:
    library = torch.library.Library("xla_dtensor_test", "FRAGMENT")
    library.define("no_rule(Tensor x) -> Tensor")
    func = torch.ops.xla_dtensor_test.no_rule.default
    with caplog.at_level(logging.INFO, "xla_dtensor"):
        for shape in ((8, 8), (4, 8), (8,)):
            answer = propagate(func, (make(mesh, shape, Shard(0), R),), {}, mesh)
            assert legal_placements(answer, len(shape), mesh) == (R, R)
    (record,) = caplog.records
    assert record.getMessage().endswith(
        "its outputs are labelled Replicate. Values are not affected."
    )


def test_replicated_arguments_need_no_rule(mesh: xd.DeviceMesh, empty_cache: Any) -> None:
    answer = propagate(aten.sort.default, (make(mesh, (8, 8), R, R), 0), {}, mesh)
    assert answer == (R, R)


def test_one_axis_that_does_not_fit_leaves_the_other(mesh: xd.DeviceMesh, empty_cache: Any) -> None:
    d = make(mesh, (8, 12), Shard(0), Shard(1))
    assert d.view(8, 3, 4).placements == (Shard(0), R)


def test_labels_of_a_whole_training_step_are_legal(mesh: xd.DeviceMesh) -> None:
    w = make(mesh, (12, 12), R, Shard(0)).requires_grad_()
    x = make(mesh, (8, 12), Shard(0), R)
    loss = torch.nn.functional.linear(x, w).softmax(-1).square().mean()
    loss.backward()
    assert w.grad is not None
    assert w.grad.mesh_layout.ndim == 2


@pytest.mark.parametrize(
    ("answer", "ndim", "expected"),
    [
        ((Shard(0), Shard(1)), 2, (Shard(0), Shard(1))),
        ((Shard(0), Shard(1)), 1, (Shard(0), R)),
        ((Shard(0), Shard(1)), 0, (R, R)),
        ((Partial("max"), Shard(0)), 1, (Partial("max"), Shard(0))),
        ((STRIDED, Shard(0)), 1, (STRIDED, Shard(0))),
        # Nothing is left that the stride could step over: no tiling is like that.
        ((STRIDED, R), 1, (R, R)),
        ((R,), 2, (R, R)),
        (None, 2, (R, R)),
        ([(Shard(0), R), None], 1, (Shard(0), R)),
    ],
)
def test_legal_placements(mesh: xd.DeviceMesh, answer: Any, ndim: int, expected: Any) -> None:
    found = legal_placements(answer, ndim, mesh)
    assert [*map(repr, found)] == [*map(repr, expected)]


def test_partials_of_torchs_own_become_plain(mesh: xd.DeviceMesh) -> None:
    table = make(mesh, (16, 4), R, Shard(0))
    tokens = xd.distribute_tensor(torch.arange(8), mesh, [Shard(0), R])
    found = cast("Any", torch.nn.functional.embedding(tokens, table))
    (_, pending) = found.placements
    assert type(pending) is Partial
    assert pending.reduce_op == "sum"


@pytest.mark.parametrize(
    ("answer", "argument", "expected"),
    [
        ((Shard(0), Shard(0)), (STRIDED, Shard(0)), (STRIDED, Shard(0))),
        (
            (Shard(1), Shard(1)),
            (STRIDED, Shard(0)),
            (_StridedShard(1, split_factor=4), Shard(1)),
        ),
        # The outer cut is gone: there is nothing left that the stride could count.
        ((Shard(0), R), (STRIDED, Shard(0)), (R, R)),
        ((P, Shard(0)), (STRIDED, Shard(0)), (P, Shard(0))),
        ((Shard(0), Shard(0)), (Shard(0), Shard(0)), (Shard(0), Shard(0))),
    ],
)
def test_strides_are_put_back(
    answer: Any, argument: Any, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(strided_labels, "_CONFUSED", True)
    found = strided_labels.with_strides([answer, None], [argument])
    assert [*map(repr, found[0])] == [*map(repr, expected)]
    assert found[1] is None


@given(
    st.lists(
        st.tuples(*[st.sampled_from([R, P, Partial("max"), Partial("avg")])] * 2),
        min_size=17,
        max_size=50,
    )
)
def test_many_numbers_are_stacked_as_torch_says_of_all_at_once(
    mesh: xd.DeviceMesh, placements: list[Any]
) -> None:
    numbers = [propagation._Described((each, (), (), torch.float32)) for each in placements]
    wanted = propagation._from_propagator(aten.stack.default, (numbers,), {}, mesh)
    assert propagation._ask(aten.stack.default, (numbers,), {}, mesh) == wanted


# Element by element, and made like the first argument; what a cut one may stand beside.
UNARY = (aten.neg.default, aten.sqrt.default, aten.silu.default, aten.zeros_like.default)
BINARY = (aten.add.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.gt.Tensor, aten.pow.Tensor_Tensor)
TERNARY = (aten.addcmul.default, aten.lerp.Tensor, aten.addcdiv.default)
SHAPE = (8, 3, 16)
PLACEMENT = st.sampled_from([R, P, Shard(0), Shard(1), Shard(2)])
BESIDE = st.one_of(
    st.just(None),  # as the first
    st.tuples(st.tuples(PLACEMENT, PLACEMENT), st.just(SHAPE)),
    st.tuples(st.just((R, R)), st.sampled_from([SHAPE, (3, 16), (16,), (), (8, 1, 16)])),
    st.sampled_from([((R, Shard(0)), (16,)), ((Shard(1), R), (3, 16)), ((Shard(0), R), (8, 1, 1))]),
)


def described(label: Any, shape: tuple[int, ...]) -> Any:
    strides = torch.empty(shape, device="meta").stride()
    return propagation._Described((label, torch.Size(shape), strides, torch.float32))


def check_as_torch_says(mesh: xd.DeviceMesh, func: Any, args: Any) -> None:
    """Compare a label with the one of torch's propagator, where it has one."""
    answer = propagation._ask(func, args, {}, mesh)
    try:
        wanted = propagation._from_propagator(func, args, {}, mesh)
    except Exception:  # Each axis is asked about alone.
        return
    wanted = wanted if isinstance(wanted, list) else [wanted]
    assert propagation.labels_of_outputs(answer, len(wanted)) == wanted


@given(
    st.sampled_from([*UNARY, *BINARY, *TERNARY]),
    st.tuples(PLACEMENT, PLACEMENT),
    st.lists(BESIDE, min_size=2, max_size=2),
)
def test_what_is_cut_alike_stays_so_as_torch_says(
    mesh: xd.DeviceMesh, func: Any, label: Any, beside: list[Any]
) -> None:
    count = 0 if func in UNARY else 1 if func in BINARY else 2
    first = (label, SHAPE)
    args = tuple(described(*(each or first)) for each in [first, *beside[:count]])
    if all(arg[0] == (R, R) for arg in args):
        return
    check_as_torch_says(mesh, func, args)


@given(
    st.sampled_from(
        [
            aten._foreach_sqrt.default,
            aten._foreach_mul.Scalar,
            aten._foreach_add.List,
            aten._foreach_addcdiv.Scalar,
            aten._foreach_norm.Scalar,
            aten._foreach_max.default,
        ]
    ),
    st.lists(st.tuples(PLACEMENT, PLACEMENT), min_size=1, max_size=2),
    st.lists(BESIDE, min_size=2, max_size=2),
    st.lists(st.integers(0, 1), min_size=1, max_size=4),
)
def test_tensors_of_one_kind_in_lists_lie_as_torch_says(
    mesh: xd.DeviceMesh, func: Any, labels: list[Any], beside: list[Any], order: list[int]
) -> None:
    lists = [a for a in func._schema.arguments if str(a.type) == "List[Tensor]"]
    args = [
        [described(*(each or (labels[place % len(labels)], SHAPE))) for place in order]
        for each in [None, *beside][: len(lists)]
    ]
    if all(label == (R, R) for each in args for label, *_ in each):
        return
    numbers = [2.0] if func in (aten._foreach_mul.Scalar, aten._foreach_norm.Scalar) else []
    check_as_torch_says(mesh, func, (*args, *numbers))


@given(
    st.sampled_from(sorted(propagation._ALONG_A_DIM, key=str)),
    st.sampled_from([-1, 0, 1, 2]),
    st.lists(st.tuples(PLACEMENT, PLACEMENT), min_size=2, max_size=2),
    st.booleans(),
)
def test_what_is_not_cut_along_the_dim_of_an_op_stays_so_as_torch_says(
    mesh: xd.DeviceMesh, func: Any, dim: int, labels: list[Any], alike: bool
) -> None:
    first = described(labels[0], SHAPE)
    args = {
        aten.cat.default: ([first, first if alike else described(labels[1], SHAPE)], dim),
        aten.slice.Tensor: (first, dim, 0, 2),
        aten.split.Tensor: (first, 2, dim),
        aten.split_with_sizes.default: (first, [1, SHAPE[dim] - 1], dim),
    }[func]
    if all(label == (R, R) for label in labels):
        return
    check_as_torch_says(mesh, func, args)


def test_torch_is_not_asked_about_what_is_cut_alike(
    mesh: xd.DeviceMesh, empty_cache: dict[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("torch was asked")

    x, y, row = make(mesh, (8, 8), Shard(0), Shard(1)), make(mesh, (8, 8), Shard(0), R), [R, R]
    monkeypatch.setattr(propagation, "_from_propagator", refuse)
    assert propagate(aten.mul.Tensor, (x, x), {}, mesh) == (Shard(0), Shard(1))
    assert propagate(aten.add.Tensor, (y, make(mesh, (8,), *row)), {}, mesh) == (Shard(0), R)
    column, whole = make(mesh, (8, 1), Shard(0), R), make(mesh, (8, 8), R, R)
    assert propagate(aten.mul.Tensor, (whole, column), {}, mesh) == (Shard(0), R)
    assert propagate(aten.add.Tensor, (whole, make(mesh, (8,), R, Shard(0))), {}, mesh) == (
        R,
        Shard(1),
    )
    assert propagate(aten.zeros_like.default, (x,), {}, mesh) == (Shard(0), Shard(1))
    for label, shape in [((Shard(0), R), (3, 8)), ((Shard(0), P), (8, 8))]:  # uneven; a part
        assert propagation._shared_cuts(aten.neg.default, [described(label, shape)], mesh) is None


def test_torch_is_asked_once_for_each_kind_of_tensor_in_a_list(
    mesh: xd.DeviceMesh, empty_cache: dict[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    from_propagator = propagation._from_propagator

    def counted(func: Any, args: Any, *others: Any) -> Any:
        asked.append(len(args[0]))
        return from_propagator(func, args, *others)

    monkeypatch.setattr(propagation, "_from_propagator", counted)
    x, whole = make(mesh, (8, 8), Shard(0), Shard(1)), make(mesh, (8, 8), R, R)
    labels = propagate(aten._foreach_sqrt.default, ([x, whole, x, x],), {}, mesh)
    assert labels == [(Shard(0), Shard(1)), (R, R), (Shard(0), Shard(1)), (Shard(0), Shard(1))]
    assert asked == [2]


@pytest.mark.parametrize(("transposed", "groups"), [(False, 2), (False, 8), (True, 1)])
def test_other_convolutions_are_torchs_to_label(transposed: bool, groups: int) -> None:
    image, kernel = ((Shard(0), R), (16, 8, 4, 4)), ((R, R), (8, 8, 3, 3))
    settings = ([1, 1], [1, 1], [1, 1], transposed, [0, 0], groups)
    forward, backward = aten.convolution.default, aten.convolution_backward.default
    assert propagation.WHOLE_OP_LABELS[forward](2, (image, kernel, None, *settings)) is None
    given = (image, image, kernel, None, *settings, [True] * 3)
    assert propagation.WHOLE_OP_LABELS[backward](2, given) is None
