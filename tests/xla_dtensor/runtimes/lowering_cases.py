"""The calls of ops, which test_op_tables and test_jax_lowering make on sharded inputs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map

from xla_dtensor.runtimes import whole_ops as linear_loss_ops  # noqa: F401 - torch.ops.xla_dtensor

aten = torch.ops.aten
whole = torch.ops.xla_dtensor
_generator = torch.Generator().manual_seed(7)


def draw_anew() -> None:
    """What a file of cases begins with: it draws the same in whatever order files are imported."""
    _generator.manual_seed(7)


def f(*shape: int, low: float = -2.0, high: float = 2.0) -> torch.Tensor:
    return low + (high - low) * torch.rand(shape, generator=_generator)


def pos(*shape: int) -> torch.Tensor:
    return f(*shape, low=0.5, high=3.0)


def ints(*shape: int, low: int = -5, high: int = 6) -> torch.Tensor:
    values = torch.randint(low, high, shape, generator=_generator)
    return torch.where(values == 0, 1, values)  # torch refuses to divide integers by 0


def index(*shape: int, high: int) -> torch.Tensor:
    return torch.randint(0, high, shape, generator=_generator)


def flags(*shape: int) -> torch.Tensor:
    return f(*shape) > 0


class Case:
    """One call of an op. Both sides get the same arguments."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.args, self.kwargs = args, kwargs

    def mapped(self, function: Callable[[torch.Tensor], Any]) -> Case:
        made = Case()
        made.args, made.kwargs = tree_map(
            lambda v: function(v) if isinstance(v, torch.Tensor) else v, (self.args, self.kwargs)
        )
        return made

    def run(self, op: Any) -> Any:
        return op(*self.args, **self.kwargs)

    def tensors(self) -> list[torch.Tensor]:
        return [v for v in tree_flatten((self.args, self.kwargs))[0] if isinstance(v, torch.Tensor)]


def overload(name: str) -> Any:
    packet, _, which = name.partition(".")
    space = aten if hasattr(aten, packet) else whole  # both have a put
    return getattr(getattr(space, packet), which or "default")


def named(names: str, *cases: Case) -> dict[Any, list[Case]]:
    return {overload(name): list(cases) for name in names.split()}


A, B = f(5, 6), f(5, 6)
UNEQUAL = torch.tensor([[2], [-1], [5], [4], [-3]])  # no two alike: which comes first is free
POINTWISE: dict[Any, list[Case]] = {
    **named(
        "neg exp exp2 expm1 sin cos tan atan sinh cosh tanh asinh i0 sigmoid erf erfc floor ceil "
        "round trunc frac sign sgn relu silu gelu square abs isnan isinf signbit logical_not "
        "nan_to_num",
        Case(A),
    ),
    **named(
        "polygamma",
        Case(1, pos(5, 6)),
        Case(0, pos(5, 6)),
        Case(2, pos(5, 6)),
        Case(3, pos(5, 6) - 4.25),
    ),
    **named("special_i1", Case(A)),
    **named("gcd lcm", Case(ints(5, 6), ints(6))),
    **named("nextafter", Case(A, B)),
    **named(
        "bitwise_left_shift.Tensor bitwise_right_shift.Tensor __lshift__.Tensor __rshift__.Tensor",
        Case(ints(5, 6), index(5, 6, high=5)),
    ),
    **named("__lshift__.Scalar __rshift__.Scalar", Case(ints(5, 6), 2)),
    **named("log log2 log10 log1p sqrt rsqrt reciprocal lgamma digamma acosh", Case(pos(5, 6) + 1)),
    **named("asin acos atanh erfinv", Case(f(5, 6, low=-0.9, high=0.9))),
    **named("gelu", Case(A), Case(A, approximate="tanh")),
    **named("softplus", Case(A), Case(A * 30, 2, 10)),
    **named(
        "mul.Tensor div.Tensor maximum minimum fmax fmin atan2 copysign.Tensor fmod.Tensor "
        "remainder.Tensor hypot logaddexp eq.Tensor ne.Tensor lt.Tensor le.Tensor gt.Tensor "
        "ge.Tensor logical_and logical_or logical_xor add.Tensor sub.Tensor rsub.Tensor "
        "floor_divide",
        Case(A, B),
        Case(A, f(6)),
        Case(f(5, 1), f(1, 6)),
        Case(A, torch.tensor(1.5, dtype=torch.float64)),
        Case(ints(5, 6), torch.tensor(1.5)),
    ),
    **named(
        "mul.Scalar div.Scalar copysign.Scalar fmod.Scalar remainder.Scalar eq.Scalar ne.Scalar "
        "lt.Scalar le.Scalar gt.Scalar ge.Scalar add.Scalar sub.Scalar rsub.Scalar",
        Case(A, 1.5),
        Case(A, 2),
        Case(ints(5, 6), -3),
        Case(ints(5, 6), 1.5),
    ),
    **named("pow.Tensor_Tensor", Case(pos(5, 6), B), Case(pos(5, 1), f(6))),
    **named("heaviside", Case(A, B), Case(torch.zeros(5, 6), f(6))),
    **named("pow.Tensor_Scalar", Case(A, 2), Case(A, 3), Case(pos(5, 6), -0.5), Case(A, 0)),
    **named(
        "pow.Tensor_Tensor",
        Case(pos(5, 6), B),
        Case(ints(5, 6), ints(6)),
        Case(ints(4), ints(4) + 70),
    ),
    **named("pow.Scalar", Case(2.0, A), Case(2, ints(5, 6)), Case(3, ints(5, 6) + 70)),
    **named("add.Tensor sub.Tensor rsub.Tensor", Case(A, B, alpha=3), Case(A, f(6), alpha=0.5)),
    **named("add.Scalar sub.Scalar rsub.Scalar", Case(A, 1.5), Case(A, 2, 3)),
    **named(
        "bitwise_and.Tensor bitwise_or.Tensor bitwise_xor.Tensor",
        Case(ints(5, 6), ints(5, 6)),
        Case(flags(5, 6), flags(6)),
    ),
    **named("bitwise_and.Scalar bitwise_or.Scalar bitwise_xor.Scalar", Case(ints(5, 6), 3)),
    **named(
        "bitwise_and.Scalar_Tensor bitwise_or.Scalar_Tensor bitwise_xor.Scalar_Tensor "
        "remainder.Scalar_Tensor",
        Case(3, ints(5, 6)),
    ),
    **named("bitwise_left_shift.Tensor_Scalar bitwise_right_shift.Tensor_Scalar", Case(ints(5), 2)),
    **named("bitwise_left_shift.Scalar_Tensor", Case(3, index(5, 6, high=9))),
    **named("bitwise_right_shift.Scalar_Tensor", Case(300, index(5, 6, high=9))),
    **named("bitwise_not", Case(ints(5, 6)), Case(flags(5, 6))),
    **named("sigmoid_backward tanh_backward silu_backward gelu_backward", Case(A, B)),
    **named("gelu_backward", Case(A, B), Case(A, B, approximate="tanh")),
    **named("threshold_backward", Case(A, B, 0), Case(A, B, 0.5)),
    **named("lerp.Tensor", Case(A, B, f(5, 6)), Case(A, f(6), f(5, 1))),
    **named("lerp.Scalar", Case(A, B, 0.3), Case(A, B, 0.9)),
    **named(
        "div.Tensor_mode",
        *(Case(A, B, rounding_mode=m) for m in (None, "floor", "trunc")),
        *(Case(ints(5, 6), ints(6), rounding_mode=m) for m in (None, "floor", "trunc")),
    ),
    **named(
        "div.Scalar_mode",
        *(Case(x, -2, rounding_mode=m) for x in (A, ints(5, 6)) for m in ("floor", "trunc")),
    ),
    **named("addcmul addcdiv", Case(A, B, pos(5, 6)), Case(A, f(6), pos(5, 1), value=0.5)),
    **named("clamp", Case(A, -0.5, 0.5), Case(A, None, 1), Case(A, 0.5, -0.5), Case(A, 1)),
    **named("clamp.Tensor", Case(A, f(6), B), Case(A, None, B)),
    **named("clamp_min clamp_max", Case(A, 0.5), Case(ints(5, 6), 1.5)),
    **named("clamp_min.Tensor clamp_max.Tensor", Case(A, B), Case(A, f(6))),
    **named("where.self", Case(A > 0, A, B), Case(flags(6), A, ints(5, 1))),
    **named("where.ScalarSelf", Case(A > 0, 1.5, B), Case(flags(5, 6), 1.5, ints(5, 6))),
    **named("where.ScalarOther", Case(A > 0, A, 2), Case(flags(5, 6), ints(5, 6), 1.5)),
    **named("where.Scalar", Case(A > 0, 1, 2), Case(A > 0, 1.5, 2), Case(A > 0, True, False)),
    **named("masked_fill.Scalar", Case(A, A > 0, -math.inf), Case(ints(5, 6), flags(6), 7)),
    **named("masked_fill.Tensor", Case(A, A > 0, torch.tensor(2.5))),
}
S = f(5, 6, 3)
REDUCTIONS: dict[Any, list[Case]] = {
    **named("sum mean prod", Case(A), Case(A, dtype=torch.float64)),
    **named("sum prod", Case(A), Case(ints(3, 2)), Case(flags(5, 6)), Case(f(0, 3)), Case(f())),
    **named("amax amin max min argmax argmin any all", Case(A), Case(ints(5, 6)), Case(f())),
    **named("any all", Case(A > 0), Case(ints(5, 6)), Case(flags(0, 3))),
    **named("_is_any_true _is_all_true", Case(A > 0), Case(A > 9), Case(A > -9)),
    **named(
        "sum.dim_IntList mean.dim",
        Case(S, [1]),
        Case(S, [0, -1], True),
        Case(S, None),
        Case(S, []),
        Case(S, [1], dtype=torch.float64),
        Case(f(), [0]),
    ),
    **named("amax amin", Case(A), Case(S, [1]), Case(S, [0, -1], True), Case(ints(5, 6), [0])),
    **named("any.dim all.dim", Case(A > 0, 1), Case(A > 0, -1, True), Case(ints(5, 6), 0)),
    **named("any.dims all.dims", Case(S > 0, [0, 2]), Case(S > 0, [1], True)),
    **named("prod.dim_int", Case(S, 1), Case(S, -1, True), Case(ints(5, 6), 0)),
    **named("max.dim min.dim", Case(A, 1), Case(S, -2, True), Case(ints(5, 6), 0), Case(f(), 0)),
    **named("argmax argmin", Case(A), Case(S, 1), Case(S, -1, True), Case(f(), 0)),
    **named("logsumexp", Case(A, [1]), Case(S, [0, -1], True)),
    **named(
        "var.correction",
        Case(A),
        Case(S, [1], correction=0),
        Case(S, [0, -1], correction=2, keepdim=True),
    ),
    **named(
        "linalg_vector_norm",
        *(Case(S, p, [1]) for p in (2, 1, 0, 3, math.inf, -math.inf, 0.5)),
        Case(A),
        Case(A, 2, None, True),
    ),
    **named("cumprod", Case(A, 1), Case(f(), 0)),
    **named("logcumsumexp", Case(A, 1), Case(S, -3), Case(f(), 0)),
    **named("cumsum", Case(A, 1), Case(ints(5, 6), 0), Case(flags(5, 6), 1)),
    **named("_softmax _log_softmax", Case(A, 1, False), Case(S, -3, False), Case(f(), 0, False)),
    **named(
        "_softmax_backward_data",
        Case(A, torch.softmax(B, 1), 1, torch.float32),
    ),
    **named("_log_softmax_backward_data", Case(A, torch.log_softmax(B, 0), 0, torch.float32)),
    **named("topk", Case(A, 2), Case(A, 3, 0, False), Case(UNEQUAL, 2, 0), Case(f(), 1)),
    **named("sort", Case(A), Case(A, 0, True), Case(f())),
    **named("sort.stable", Case(A, stable=True), Case(ints(5, 6), stable=True, descending=True)),
}
MOVING: dict[Any, list[Case]] = {
    **named("clone zero", Case(A), Case(f()), Case(f(0, 3))),
    **named("_unsafe_view", Case(S, [30, 3])),
    **named("reshape", Case(S, [6, 15]), Case(S, [-1]), Case(f(), [1, 1])),
    **named(
        "cat", Case([A, f(2, 6)]), Case([A, f(5, 2)], -1), Case([f(0), A]), Case([A, ints(5, 6)])
    ),
    **named("stack", Case([A, B]), Case([A, B], -1), Case([f(), f()])),
    **named("repeat", Case(A, [2, 3]), Case(A, [2, 1, 2])),
    **named("flip", Case(A, [1]), Case(S, [0, -1])),
    **named("roll", Case(A, [2]), Case(S, [1, -2], [0, 2])),
    **named("tril triu", Case(A), Case(S.permute(2, 0, 1).contiguous(), 1), Case(A, -2)),
    **named(
        "constant_pad_nd", Case(A, [1, 2]), Case(S, [1, 0, 2, 3], 1.5), Case(A, [-1, 2, 0, -2])
    ),
    **named("slice_backward", Case(f(2, 6), [5, 6], 0, 1, 5, 2), Case(A, [5, 9], -1, 2, 8, 1)),
    **named("select_backward", Case(f(6), [5, 6], 0, 2), Case(f(5), [5, 6], -1, -2)),
    **named("fill.Scalar", Case(A, 2), Case(ints(5, 6), 3)),
    **named("fill.Tensor", Case(A, torch.tensor(2.5))),
    **named("copy", Case(A, B), Case(A, f(6)), Case(A, ints(5, 6))),
    **named("zeros_like ones_like", Case(A), Case(A, dtype=torch.int64), Case(ints(5, 6))),
    **named("full_like", Case(A, 2.5), Case(ints(5, 6), 3), Case(A, 2, dtype=torch.int64)),
    **named("_new_zeros_with_same_feature_meta", Case(A, B[:2])),
    **named("new_zeros new_ones", Case(A, [2, 3]), Case(A, [], dtype=torch.bool)),
    **named("new_full", Case(A, [2, 3], 1.5), Case(ints(5, 6), [0], 1)),
}
PLACES = torch.tensor([[0, 2, 1], [4, 4, 3]])
EVEN_PLACES = torch.tensor([[0, 2, 1, 4], [4, 4, 3, 0]])
LOG_PROBABILITIES = torch.log_softmax(f(6, 5), 1)
IMAGE = torch.log_softmax(f(2, 4, 3, 3), 1)
# With ignore_index=-100 only: torch's backward writes outside its buffer at any other such class.
CLASSES = torch.tensor([0, 4, 2, 1, -100, 3])
TOTAL = torch.tensor(5.0)
INDEXING: dict[Any, list[Case]] = {
    **named(
        "embedding",
        Case(A, PLACES),
        Case(A, torch.tensor(3)),
        Case(A, PLACES, 2),
        Case(A, EVEN_PLACES),
        Case(A, EVEN_PLACES, 2),
    ),
    **named("embedding_renorm", Case(A, PLACES, 1.0, 2.0), Case(A, PLACES[0], 1.5, 1.0)),
    **named(
        "embedding_dense_backward",
        Case(f(2, 3, 6), PLACES, 5, -1, False),
        Case(f(2, 3, 6), PLACES, 7, 2, True),
    ),
    **named(
        "index_select", Case(A, 0, PLACES[1]), Case(S, -2, PLACES[0]), Case(f(), 0, PLACES[0, :1])
    ),
    **named(
        "gather",
        Case(A, 0, PLACES),
        Case(S, -1, index(5, 4, 2, high=3)),
        Case(f(), 0, PLACES[0, 0]),
        Case(f(5), 0, index(0, high=5)),
    ),
    **named(
        "scatter.src", Case(A, 1, torch.tensor([[0, 2, 1]]), B), Case(f(), 0, PLACES[0, 0], f())
    ),
    **named("scatter.value", Case(A, -1, PLACES, 1.5)),
    **named("scatter_add", Case(A, 0, PLACES, B), Case(S, 2, index(5, 2, 7, high=3), f(5, 6, 8))),
    **named(
        "index.Tensor",
        Case(A, [PLACES]),
        Case(S, [None, PLACES, None]),
        Case(S, [PLACES[1], None, torch.tensor([0, -1, 2])]),
        Case(S, [None, PLACES[1], PLACES[0]]),
        Case(A, [EVEN_PLACES]),
    ),
    **named(
        "index_put",
        Case(A, [PLACES[0]], f(6)),
        Case(A, [PLACES[1]], f(3, 6), True),
        Case(S, [PLACES[0], None, torch.tensor([0, 1, 2])], f(3, 6)),
    ),
    **named(
        "put",
        Case(A, torch.tensor([[0, 29], [-3, 7]]), f(2, 2)),
        Case(A, torch.tensor([4, 4, 12]), f(3), True),
        Case(f(), torch.tensor([0]), f(1)),
    ),
    **named(
        "index_add",
        Case(A, 0, PLACES[1], f(3, 6)),
        Case(S, -1, PLACES[0], S, alpha=0.5),
        Case(f(), 0, PLACES[0, :1], f()),
    ),
    **named(
        "max_unpool2d",
        Case(
            f(8, 2, 2), (torch.arange(4) * 5 % 12).reshape(1, 2, 2).expand(8, 2, 2).clone(), [3, 4]
        ),
    ),
    **named(
        "max_unpool3d",
        Case(
            f(2, 1, 2, 2),
            torch.tensor([7, 0, 3, 11] * 2).reshape(2, 1, 2, 2),
            [2, 2, 3],
            [1, 1, 1],
            [0, 0, 0],
        ),
    ),
    **named(
        "index_copy",
        Case(A, 0, PLACES[0], f(3, 6)),
        Case(S, -1, torch.tensor([2, 0]), f(*S.shape[:2], 2)),
        Case(f(), 0, PLACES[0, :1], f()),
    ),
    **named(
        "index_fill.int_Scalar", Case(A, 1, torch.tensor([-1, 2]), 1.5), Case(S, 0, PLACES[0], 2)
    ),
    **named("index_fill.int_Tensor", Case(A, 0, torch.tensor([0, 4]), f())),
    **named("one_hot", Case(PLACES, 6)),
    **named(
        "nll_loss_forward",
        *(Case(LOG_PROBABILITIES, CLASSES, w, r, -100) for w in (None, pos(5)) for r in (0, 1, 2)),
        Case(LOG_PROBABILITIES[0], torch.tensor(3), None, 1, -100),
    ),
    **named("nll_loss2d_forward", Case(IMAGE, index(2, 3, 3, high=4), pos(4), 1, 2)),
    **named(
        "nll_loss_backward",
        Case(TOTAL, LOG_PROBABILITIES, CLASSES, None, 1, -100, TOTAL),
        Case(f(6), LOG_PROBABILITIES, index(6, high=5), pos(5), 0, 2, TOTAL),
    ),
    **named(
        "nll_loss2d_backward", Case(TOTAL, IMAGE, index(2, 3, 3, high=4), None, 2, -100, TOTAL)
    ),
}
Q, K = f(2, 4, 5, 6), f(2, 4, 7, 6)
PRODUCTS: dict[Any, list[Case]] = {
    **named("mm", Case(A, f(6, 7)), Case(ints(5, 6), ints(6, 3)), Case(f(0, 6), f(6, 3))),
    **named("_int_mm", Case(ints(17, 8).to(torch.int8) * 20, ints(8, 16).to(torch.int8) * 20)),
    **named("bmm", Case(S, f(5, 3, 4))),
    **named("mv", Case(A, f(6))),
    **named("dot", Case(f(5), f(5)), Case(ints(5), ints(5))),
    **named("matmul", Case(A, f(6, 7)), Case(S, f(3)), Case(f(6), S)),
    **named("addmm", Case(f(7), A, f(6, 7)), Case(f(5, 7), A, f(6, 7), beta=0.5, alpha=2)),
    **named("addmm", Case(torch.full((7,), math.nan), A, f(6, 7), beta=0), Case(f(7), A, f(6, 7))),
    **named("baddbmm", Case(f(5, 6, 4), S, f(5, 3, 4)), Case(f(4), S, f(5, 3, 4), beta=2)),
    **named("addmv", Case(f(5), A, f(6)), Case(f(5), A, f(6), alpha=0.5)),
    **named("linear", Case(S, f(7, 3), f(7)), Case(A, f(7, 6)), Case(f(6), f(7, 6), f(7))),
    **named("scaled_dot_product_attention", Case(Q, K, K), Case(Q, K, K, None, 0.0, True)),
    **named(
        "_weight_norm_interface_backward",
        Case(A, B, A[:, :1] + 3, B[:, :1].abs() + 1, 0),
        Case(S, S.flip(0), S[:1, :1] + 3, S[:1, :1].abs() + 1, 2),
    ),
    **named("native_layer_norm", Case(S, [3], f(3), f(3), 1e-5), Case(S, [6, 3], None, None, 0.1)),
}
CASES = {**POINTWISE, **REDUCTIONS, **MOVING, **INDEXING, **PRODUCTS}
# Their values are undefined or random: shape, dtype and range are all there is to compare.
RANGES: dict[Any, tuple[Case, float, float]] = {
    overload("empty_like"): (Case(A), 0, 0),
    overload("new_empty"): (Case(A, [2, 3]), 0, 0),
    overload("new_empty_strided"): (Case(A, [2, 3], [3, 1]), 0, 0),
    overload("rand_like"): (Case(A), 0, 1),
    overload("randn_like"): (Case(A), -9, 9),
    overload("normal_functional"): (Case(A, 100, 0.1), 99, 101),
    overload("normal.Tensor_float"): (Case(A + 100, 0.1), 90, 110),
    overload("normal.float_Tensor"): (Case(100.0, pos(5, 6) / 10), 90, 110),
    overload("normal.Tensor_Tensor"): (Case(A + 100, pos(5, 6) / 10), 90, 110),
    overload("log_normal"): (Case(A, 0, 0.1), 0.2, 5),
    overload("cauchy"): (Case(A, 0, 1e-9), -1, 1),
    overload("geometric"): (Case(A, 0.9), 1, 40),
    overload("poisson"): (Case(pos(5, 6)), 0, 60),
    overload("binomial"): (Case(torch.full((5, 6), 10.0), f(5, 6, low=0, high=1)), 0, 10),
    overload("_standard_gamma"): (Case(pos(5, 6)), 0, 60),
    overload("_sample_dirichlet"): (Case(pos(5, 6)), 0, 1),
    overload("multinomial"): (Case(pos(5, 6), 3), 0, 5),
    overload("randint_like"): (Case(A, 7), 0, 6),
    overload("randint_like.low_dtype"): (Case(A, 3, 7), 3, 6),
    overload("random"): (Case(ints(5, 6)), 0, 2**63 - 1),
    overload("random.from"): (Case(A, 3, 7), 3, 6),
    overload("random.to"): (Case(A, 7), 0, 6),
    overload("bernoulli.Tensor"): (Case(A, f(5, 6, low=0, high=1)), 0, 1),
    overload("rrelu_with_noise_functional"): (Case(A, A, 0.1, 0.3, True), -2, 2),
    overload("uniform"): (Case(A, 3, 4), 3, 4),
    overload("bernoulli"): (Case(f(5, 6, low=0, high=1)), 0, 1),
    overload("bernoulli.p"): (Case(A, 0.3), 0, 1),
    overload("exponential"): (Case(A, 2.0), 0, 20),
    overload("native_dropout"): (Case(pos(5, 6), 0.5, True), 0, 6),
}
# Not torch's own, or not on torch's CPU: compared with what they stand for, in test_whole_ops.
ELSEWHERE = {
    whole.linear_weight_grad.default,
    whole.sdpa_backward.default,
    whole.sdpa_lean.default,
    whole.sdpa_lean_backward.default,
    whole.linear_loss.default,
    whole.linear_loss_backward.default,
    aten._grouped_mm.default,
    aten._assert_async.default,
    aten._assert_async.msg,
}
