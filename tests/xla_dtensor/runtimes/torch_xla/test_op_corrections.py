"""Ops that a runtime once got wrong, by name: each was found by the op sweep.

Values and gradients are compared with plain torch, for even and uneven placements.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import Replicate, Shard
from torch.utils._pytree import tree_flatten

from xla_dtensor import DeviceMesh, distribute_module, distribute_tensor
from xla_dtensor import compile as xla_compile
from xla_dtensor.errors import UnsupportedOpError
from xla_dtensor.runtimes import Runtime

aten = torch.ops.aten
Check = Callable[..., None]


def f(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator)


@pytest.fixture
def check(mesh: DeviceMesh) -> Check:
    """Call a function on plain tensors and on DTensors; compare results and gradients."""

    def placements(ndim: int) -> list[list[Any]]:
        choices = [Replicate(), *(Shard(dim) for dim in range(ndim))]
        pairs = [list(pair) for pair in itertools.product(choices, choices)]
        return pairs[:: max(1, len(pairs) // 3)]

    def leaves(values: Any) -> list[torch.Tensor]:
        return [v for v in tree_flatten(values)[0] if isinstance(v, torch.Tensor)]

    def pulled(result: Any, inputs: list[torch.Tensor]) -> Any:
        outputs = [v for v in leaves(result) if v.requires_grad and v.numel()]
        wanted = [v for v in inputs if v.requires_grad]
        if not outputs or not wanted:
            return []
        weights = [torch.linspace(0.5, 1.5, v.numel()).reshape(v.shape) for v in outputs]
        products = zip(outputs, weights, strict=True)
        total = torch.stack([(v * w.to(v.device)).sum().real for v, w in products]).sum()
        return torch.autograd.grad(total, wanted)

    def run(function: Callable[..., Any], *tensors: torch.Tensor) -> None:
        plain = [t.clone().requires_grad_(t.is_floating_point()) for t in tensors]
        expected = function(*plain)
        gradients = pulled(expected, plain)
        for chosen in zip(
            range(3), *(itertools.cycle(placements(t.ndim)) for t in tensors), strict=False
        ):
            given = [
                distribute_tensor(t, mesh, p).requires_grad_(t.is_floating_point())
                for t, p in zip(tensors, chosen[1:], strict=True)
            ]
            found = function(*given)
            both = zip(
                leaves((found, pulled(found, given))), leaves((expected, gradients)), strict=True
            )
            for ours, theirs in both:
                torch.testing.assert_close(
                    ours.detach().cpu(), theirs.detach(), equal_nan=True, rtol=1e-4, atol=1e-4
                )

    return run


# --------------------------------------------------------------------- gradients lost in silence


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (
            lambda x, y: F.kl_div(F.log_softmax(x, 1), F.softmax(y, 1), reduction="sum"),
            [(5, 6)] * 2,
        ),
        (F.selu, [(5, 6)]),
        (torch.std, [(5, 6)]),
        (lambda x: torch.std(x, 1), [(5, 6)]),
        (torch.diag, [(5, 5)]),
        (lambda x: torch.diag(x, 2), [(3, 5)]),
        (lambda a, b: torch.cross(a, b, dim=1), [(5, 3), (5, 3)]),
    ],
    ids=["kl_div", "selu", "std", "std_dim", "diag", "diag_offset", "cross"],
)
def test_composite_ops_keep_their_gradient(
    check: Check, function: Callable[..., Any], shapes: list[tuple[int, ...]]
) -> None:
    check(function, *(f(*shape) + i for i, shape in enumerate(shapes)))


@pytest.mark.only_on("torch_xla")
def test_linear_algebra_keeps_its_gradient(check: Check) -> None:
    x = f(5, 5) @ f(5, 5).mT + 5 * torch.eye(5)
    check(torch.inverse, x)
    check(torch.logdet, x)
    check(lambda t: torch.svd(t)[1], f(6, 4))


def test_max_pooling_with_dilation(check: Check) -> None:
    def pool(x: torch.Tensor) -> Any:
        return F.max_pool2d(x, 3, padding=1, dilation=(1, 2))

    on_runtime(check, "max_pool2d", pool, f(1, 2, 6, 8))


def on_runtime(check: Check, op: str, function: Callable[..., Any], *tensors: torch.Tensor) -> None:
    """Check, or see that it is refused by name."""
    try:
        check(function, *tensors)
    except UnsupportedOpError as error:
        if op not in str(error):
            raise


# --------------------------------------------------------------------- convolutions


@pytest.mark.parametrize(
    ("shape", "weight", "options"),
    [
        ((1, 4, 5), (1, 4, 3), {"stride": 2}),
        ((4, 4, 8), (8, 2, 1), {"groups": 2}),
        ((2, 4, 5, 5), (4, 1, 1, 1), {"groups": 4}),
        ((8, 16, 16, 16), (16, 16, 3, 3), {"stride": 2, "dilation": 2}),
        ((1, 4, 5, 5), (1, 4, 2, 3), {"padding": "same", "dilation": 3}),
    ],
)
@pytest.mark.filterwarnings("ignore:Using padding='same'")
def test_convolution_however_it_is_cut(
    check: Check, shape: tuple[int, ...], weight: tuple[int, ...], options: dict[str, Any]
) -> None:
    conv = F.conv1d if len(shape) == 3 else F.conv2d
    on_runtime(check, "convolution", lambda x, w: conv(x, w, **options), f(*shape), f(*weight))


def test_transposed_convolution(check: Check) -> None:
    on_runtime(check, "convolution", F.conv_transpose1d, f(1, 4, 5), f(4, 8, 3))


# --------------------------------------------------------------------- extrema

INF, NAN = math.inf, math.nan
ODD = torch.tensor(
    [[-INF] * 5, [INF] * 5, [1, -INF, 2, INF, NAN], [-INF, 3, 3, -INF, 3], [NAN] * 5]
)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.amax(1),
        lambda x: x.amin(1),
        lambda x: x.max(1),
        lambda x: x.min(0),
        lambda x: x[:1].max(),
        lambda x: x[1:2].min(),
        lambda x: x.argmax(1),
        lambda x: x.argmin(0, keepdim=True),
        lambda x: x.argmax(),
        lambda x: torch.aminmax(x, dim=1),
        lambda x: torch.linalg.vector_norm(x, INF, 1),
    ],
    ids=[
        "amax",
        "amin",
        "max_dim",
        "min_dim",
        "max",
        "min",
        "argmax",
        "argmin",
        "argmax_all",
        "aminmax",
        "norm",
    ],
)
def test_extrema_of_infinities_nans_and_ties(check: Check, function: Callable[..., Any]) -> None:
    with torch.no_grad():
        check(lambda x: function(x.detach()), ODD)


def test_running_extrema(check: Check) -> None:
    on_runtime(check, "cummax", lambda x: torch.cummax(x.detach(), 1), ODD[:2])
    on_runtime(check, "cummax", lambda x: torch.cummax(x.detach(), 1), ODD[3:4])
    on_runtime(check, "cummin", lambda x: torch.cummin(x, 1), f(5, 6))


def test_infinite_norm(check: Check) -> None:
    check(lambda x: torch.norm(x, INF, 1), f(5, 5))
    check(lambda x: torch.norm(x, -INF, (0, 1)), f(5, 5))


# --------------------------------------------------------------------- numbers without dims


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.softmax(x, 0),
        lambda x: torch.cumprod(x, 0),
        lambda x: torch.cummax(x, 0)[0],
        lambda x: torch.max(x, 0)[0],
        lambda x: x.sort(0)[0],
        lambda x: x.squeeze(0),
        lambda x: x.amax(0),
    ],
    ids=["softmax", "cumprod", "cummax", "max", "sort", "squeeze", "amax"],
)
def test_a_number_lends_a_dim(check: Check, function: Callable[..., Any]) -> None:
    on_runtime(check, "cummax", function, torch.tensor(1.5))


def test_index_fill_of_a_number(check: Check) -> None:
    check(lambda x, i: x.index_fill(0, i, 2.0), torch.tensor(1.5), torch.tensor([0]))


# --------------------------------------------------------------------- views and masks


@pytest.mark.parametrize("dims", [(0, 1), (1, 0), (1, 2), (-1, 0)])
def test_diagonal_of_any_two_dims(check: Check, dims: tuple[int, int]) -> None:
    check(lambda x: [torch.diagonal(x, offset, *dims) for offset in (0, 2, -1)], f(5, 6, 7))


def test_write_to_a_diagonal(check: Check) -> None:
    def write(x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        y.diagonal(1, 0, 1).mul_(3)
        return y

    check(write, f(5, 6, 7))


def test_overlapping_as_strided(check: Check) -> None:
    check(lambda x: torch.as_strided(x, (2, 1, 1, 2), (1, 7, 7, 1), 0), f(16))
    check(lambda x: torch.as_strided(x, (2, 2), (1, 2), 1), f(3, 3))


@pytest.mark.only_on("torch_xla")
def test_as_strided_past_a_view_is_refused(mesh: DeviceMesh) -> None:
    view = distribute_tensor(f(8), mesh, [Replicate(), Replicate()])[4:]
    with pytest.raises(UnsupportedOpError, match=r"on a view of shape=\(4,\)"):
        torch.as_strided(view, (4, 2), (1, 1), 0)


def test_masked_scatter_and_select(check: Check) -> None:
    mask = f(5, 6) > 0

    def scatter(x: torch.Tensor, m: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x.masked_scatter(m, y)

    on_runtime(check, "masked_scatter", scatter, f(5, 6), mask, f(6, 5))
    on_runtime(check, "masked_select", torch.masked_select, f(5, 6), mask)


def test_truth_and_counts(check: Check) -> None:
    x = torch.tensor([[0.0, 1, 2], [0, 0, 0], [3, NAN, 0]])
    check(lambda t: torch.all(t.detach(), dim=1), x)
    check(lambda t: torch.any(t.detach(), dim=(0, 1)), x)
    check(lambda t: torch.count_nonzero(t.detach(), dim=0), x)
    check(lambda t: torch.count_nonzero(t.detach()), x)


# --------------------------------------------------------------------- the rest


def test_elu_gradient(check: Check) -> None:
    check(lambda x: F.elu(x, 1.7), 3 * f(20))


def test_batch_norm_in_evaluation(check: Check) -> None:
    def norm(x: torch.Tensor) -> torch.Tensor:
        return F.batch_norm(x, torch.zeros(3), torch.ones(3), training=False)

    check(norm, f(4, 3, 5))


def test_batch_norm_that_returns_and_writes(check: Check) -> None:
    def norm(x: torch.Tensor) -> Any:
        mean, variance = x.detach()[0] * 0, x.detach()[0] * 0 + 1
        result = aten._native_batch_norm_legit(x, None, None, mean, variance, True, 0.5, 1e-5)
        return *result, mean, variance

    check(norm, f(4, 3))


def test_running_statistics_in_plain_tensors(mesh: DeviceMesh) -> None:
    x = f(4, 3)
    (mean, variance), (expected_mean, expected) = (
        (torch.zeros(3), torch.ones(3)) for _ in range(2)
    )
    F.batch_norm(x, expected_mean, expected, training=True, momentum=0.5)
    given = distribute_tensor(x, mesh, [Shard(0), Replicate()])
    F.batch_norm(given, mean, variance, training=True, momentum=0.5)
    torch.testing.assert_close((mean, variance), (expected_mean, expected))


@pytest.mark.parametrize("order", [0, 1, 2, 5])
def test_polygamma_of_negative_numbers(check: Check, order: int) -> None:
    x = torch.tensor([-8.3, -3.25, -0.5, 0.75, 4.0, 11.5])
    with torch.no_grad():
        on_runtime(check, "polygamma", lambda t: torch.polygamma(order, t.detach()) / 1e6, x)


def test_average_pooling_with_a_divisor(check: Check) -> None:
    def pool(x: torch.Tensor) -> torch.Tensor:
        return F.avg_pool2d(x, 3, 1, 1, ceil_mode=True, divisor_override=2)

    on_runtime(check, "avg_pool2d", pool, f(1, 3, 9, 9))


def test_nearest_by_scale(check: Check) -> None:
    on_runtime(
        check, "upsample_nearest2d", lambda x: F.interpolate(x, scale_factor=1.7), f(2, 3, 4, 4)
    )


def test_max_unpooling(check: Check) -> None:
    def pool(x: torch.Tensor) -> torch.Tensor:
        return F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), [2, 2])

    on_runtime(check, "max", pool, f(1, 2, 4, 6))


def test_loss_of_one_sample(check: Check) -> None:
    check(lambda x: F.nll_loss(F.log_softmax(x, 0), torch.tensor(2)), f(5))


def test_linspace_without_steps(check: Check) -> None:
    check(lambda a, b: torch.linspace(a.detach(), b.detach(), 0), f(), f() + 1)


@pytest.mark.only_on("torch_xla")
def test_what_runs_on_the_host_is_said_once(
    mesh: DeviceMesh, caplog: pytest.LogCaptureFixture
) -> None:
    from xla_dtensor.runtimes.torch_xla import correct_writes as torch_xla_corrections_host

    torch_xla_corrections_host._logged.clear()
    x = distribute_tensor(f(8, 4), mesh, [Shard(0), Replicate()])
    for _ in range(2):
        assert torch.equal(torch.nonzero(x > 0).cpu(), torch.nonzero(f(8, 4) > 0))
    messages = [r.getMessage() for r in caplog.records if "runs on the host" in r.getMessage()]
    assert messages == [
        "The op aten.nonzero.default runs on the host: torch_xla has no right kernel for it. "
        "(Said once.)"
    ]


@pytest.mark.only_on("torch_xla")
def test_the_host_is_refused_inside_a_compiled_step(mesh: DeviceMesh, runtime: Runtime) -> None:
    x = distribute_tensor(f(8, 4), mesh, [Shard(0), Replicate()])
    step = runtime.compile(lambda: torch.nonzero(x > 0))
    with pytest.raises(UnsupportedOpError, match=r"nonzero.default was called inside a compiled"):
        step()


@pytest.mark.only_on("torch_xla")
def test_what_torch_refuses_is_refused_as_torch_does(mesh: DeviceMesh) -> None:
    x = distribute_tensor(f(8, 4), mesh, [Shard(0), Replicate()])
    with pytest.raises(RuntimeError) as raised:
        torch.mm(x, x)
    assert not isinstance(raised.value, UnsupportedOpError)
    with pytest.raises(UnsupportedOpError, match=r"aten\._to_copy\.default was called"):
        x.chalf()


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu_has_the_precision_of_float64(mesh: DeviceMesh, approximate: str) -> None:
    torch.manual_seed(0)
    plain = torch.randn(64, dtype=torch.float64, requires_grad=True)
    given: Any = distribute_tensor(plain.detach(), mesh).requires_grad_()
    wanted, found = (torch.nn.functional.gelu(x, approximate=approximate) for x in (plain, given))
    wanted.sum().backward()
    found.sum().backward()
    torch.testing.assert_close(found.cpu(), wanted.detach(), rtol=0, atol=1e-14)
    torch.testing.assert_close(given.grad.cpu(), plain.grad, rtol=0, atol=1e-14)


def test_layer_norm_asks_nothing_of_the_host(mesh: DeviceMesh) -> None:
    """Its backward, which torch_xla leaves to the host, would cut a compiled step in two."""
    torch.manual_seed(0)
    plain = torch.nn.Sequential(torch.nn.LayerNorm(6), torch.nn.GELU(), torch.nn.GroupNorm(2, 8))
    ours = distribute_module(copy.deepcopy(plain), mesh)
    x = torch.randn(16, 8, 6)

    def step(x: torch.Tensor) -> None:
        (ours(x) ** 3).mean().backward()

    xla_compile(step)(distribute_tensor(x, mesh, [Shard(0), Replicate()]))
    (plain(x) ** 3).mean().backward()
    for given, wanted in zip(ours.parameters(), plain.parameters(), strict=True):
        grad: Any = given.grad
        torch.testing.assert_close(grad.full_tensor().cpu(), wanted.grad)
