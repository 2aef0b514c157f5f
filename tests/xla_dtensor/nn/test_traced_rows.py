"""Layers' tensors stay rows of one value while a step is traced; nobody's values depend on that."""

from __future__ import annotations

import copy
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import xla_dtensor as xd
from tests.xla_dtensor.nn.scanned_blocks import DIM, batch, model, on, placed, scanned, trainer

pytestmark = pytest.mark.only_on("jax")
foreach: Any = vars(torch)
Optimizer = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Optimizer] = {
    "adamw": torch.optim.AdamW,
    "amsgrad": lambda p: torch.optim.Adam(p, amsgrad=True, weight_decay=0.1, maximize=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "nadam": torch.optim.NAdam,
    "adagrad": lambda p: torch.optim.Adagrad(p, lr_decay=0.1),
    "adafactor": torch.optim.Adafactor,  # whose lists are worked through tensor by tensor
    "one by one": lambda p: torch.optim.AdamW(p, foreach=False),
}
LAYERS, KINDS = 3, 2  # a weight and a bias each


class Small(nn.Module):
    """A layer of two parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.wide(x))


class Lists:
    """What an optimizer works on: parameters, gradients, moments and counters, layer by layer."""

    def __init__(self, layers: Any) -> None:
        self.p: list[Any] = list(layers.parameters())
        self.g: list[Any] = []
        self.m = [torch.zeros_like(p) for p in self.p]
        self.c = [(torch.zeros_like(p) + i % 2 + 1).mean().detach() for i, p in enumerate(self.p)]


def bias_correction(x: Lists) -> None:
    steps = [c.item() for c in x.c]
    foreach["_foreach_div_"](x.m, [1 - 0.9**step for step in steps])


def numbers_of_two_layers(x: Lists) -> None:
    one, other = x.c[0].item(), x.c[KINDS].item()
    foreach["_foreach_mul_"](x.g, 1 / (one * other + one))


def numbers_of_their_own(x: Lists) -> None:
    norms = [g.norm().item() for g in x.g]
    steps = [c.item() for c in x.c]
    foreach["_foreach_mul_"](x.g, [s / (n + 1) for n, s in zip(norms, steps, strict=True)])


def root(x: Lists) -> None:
    roots = foreach["_foreach_sqrt"](foreach["_foreach_abs"](x.g))
    foreach["_foreach_add_"](x.p, roots, alpha=-0.1)


def norm(x: Lists) -> None:
    total = torch.linalg.vector_norm(torch.stack(foreach["_foreach_norm"](x.g)))
    foreach["_foreach_mul_"](x.g, 1 / (total + 1))


def swap(x: Lists) -> None:
    kept = x.p[0].clone()
    x.p[0].copy_(x.p[KINDS])
    x.p[KINDS].copy_(kept)


def crosswise(x: Lists) -> None:
    foreach["_foreach_add_"](x.g, x.m[KINDS:] + x.m[:KINDS], alpha=0.5)


def one_by_one(x: Lists) -> None:
    for m, g, c in zip(x.m, x.g, x.c, strict=True):
        c.add_(1)
        m.mul_(0.9).add_(g, alpha=0.1)
        g.copy_(m / (m.abs().max() + c))


def numbers_of_each_layer(x: Lists) -> None:
    for i, g in enumerate(x.g):
        g.mul_(0.5 + i // KINDS / 10).add_(g * g, alpha=0.1 * (i // KINDS))


def more_in_later_layers(x: Lists) -> None:
    for i, g in enumerate(x.g):
        for _ in range(i // KINDS):
            g.mul_(0.5)


def sums_over_layers(x: Lists) -> None:
    for kind in range(KINDS):
        total = sum(x.g[kind::KINDS])
        for m in x.m[kind::KINDS]:
            m.add_(total)


def matrices(x: Lists) -> None:
    for g in x.g[0::KINDS]:
        g.copy_(g @ g.mT @ g / (1 + g.norm()))


def twice(x: Lists) -> None:
    sums = foreach["_foreach_add"]([x.g[1], x.g[1]], [x.m[1], x.m[1 + KINDS]])
    x.m[1].copy_(sums[0] + 2 * sums[1])


def numbers_each(x: Lists) -> None:
    foreach["_foreach_mul_"](x.g, [0.5 + i / 10 for i in range(len(x.g))])


def of_fewer_dims(x: Lists) -> None:
    foreach["_foreach_copy_"](x.m[0::KINDS], x.g[1::KINDS])
    foreach["_foreach_copy_"](x.m[1::KINDS], x.c[1::KINDS])


def norms_of_a_dtype(x: Lists) -> None:
    norms = foreach["_foreach_norm"](x.g, 1, torch.float64)
    foreach["_foreach_mul_"](x.m, [1 / (norm + 1) for norm in norms])


OPS: dict[str, Callable[[Lists], Any]] = {
    "scale": lambda x: foreach["_foreach_mul_"](x.g, 0.5),
    "numbers": numbers_each,
    "lerp": lambda x: foreach["_foreach_lerp_"](x.m, x.g, 0.1),
    "lerp by tensors": lambda x: foreach["_foreach_lerp_"](x.m, x.g, x.p),
    "addcmul": lambda x: foreach["_foreach_addcmul_"](x.m, x.g, x.g, 0.3),
    "addcdiv by numbers": lambda x: foreach["_foreach_addcdiv_"](
        x.m, x.g, [p.abs() + 1 for p in x.p], [0.1 * i for i in range(len(x.p))]
    ),
    "count": lambda x: foreach["_foreach_add_"](x.c, 1),
    "counters": lambda x: foreach["_foreach_mul_"](x.g, x.c),
    "powers": lambda x: foreach["_foreach_mul_"](x.m, foreach["_foreach_pow"](0.9, x.c)),
    "maximum": lambda x: foreach["_foreach_maximum_"](x.m, x.g),
    "maximum of numbers": lambda x: foreach["_foreach_maximum_"](x.m, 0.01),
    "minimum of numbers": lambda x: foreach["_foreach_minimum_"](x.m, [0.1] * 5 + [0.2]),
    "zero": lambda x: foreach["_foreach_zero_"](x.g),
    "powers of whole numbers": lambda x: foreach["_foreach_pow_"](x.g, [2, 3, 1, 2, 0, 4]),
    "of fewer dims": of_fewer_dims,
    "norms of a dtype": norms_of_a_dtype,
    "copy": lambda x: foreach["_foreach_copy_"](x.m, x.g),
    "one": lambda x: x.g[1].mul_(2),
    "view": lambda x: x.p[KINDS][0].mul_(0.5),
    "some": lambda x: foreach["_foreach_mul_"](x.g[1:], 3.0),
    "reversed": lambda x: foreach["_foreach_sub_"](x.g[::-1], x.m[::-1]),
    "update": lambda x: foreach["_foreach_add_"](x.p, x.m, alpha=-0.1),
    "clip": lambda x: nn.utils.clip_grad_norm_(x.p, 0.5),
    "clip values": lambda x: nn.utils.clip_grad_value_(x.p, 0.05),
    "bias correction": bias_correction,
    "numbers of two layers": numbers_of_two_layers,
    "numbers of their own": numbers_of_their_own,
    "root": root,
    "norm": norm,
    "swap": swap,
    "crosswise": crosswise,
    "twice": twice,
    "one by one": one_by_one,
    "numbers of each layer": numbers_of_each_layer,
    "more in later layers": more_in_later_layers,
    "sums over layers": sums_over_layers,
    "matrices": matrices,
}


def through(layers: Any, x: torch.Tensor, *args: Any) -> torch.Tensor:
    if isinstance(layers, xd.ScannedLayers):
        return layers(x, *args)
    for layer in layers:
        x = layer(x, *args)
    return x


def stepping(layers: Any, lists: Lists, program: list[str]) -> Callable[[torch.Tensor], Any]:
    def step(x: torch.Tensor) -> torch.Tensor:
        loss = through(layers, x).square().mean()
        loss.backward()
        with torch.no_grad():
            lists.g = [p.grad for p in lists.p]
            for name in program:
                OPS[name](lists)
            foreach["_foreach_add_"](lists.m, lists.g)
        lists.g = []
        for p in lists.p:
            p.grad = None
        return loss.detach()

    return step


def small_layers(count: int = LAYERS) -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(Small().double() for _ in range(count))


def check_program(mesh: xd.DeviceMesh, program: list[str], count: int = LAYERS) -> None:
    plain = small_layers(count)
    rules = {"**.wide.weight": ["tp", "dp"], "**.wide.bias": ["tp"]}
    ours = xd.shard_module(xd.scan_layers(copy.deepcopy(plain), "full"), mesh, rules)
    expected, found = Lists(plain), Lists(ours)
    theirs = stepping(plain, expected, program)
    step = xd.compile(stepping(ours, found, program))
    for i in range(3):
        x = batch(i).double()
        torch.testing.assert_close(step(on(mesh, x)).cpu(), theirs(x), rtol=1e-9, atol=1e-9)
    for name in "pmc":
        for a, b in zip(getattr(found, name), getattr(expected, name), strict=True):
            torch.testing.assert_close(a.detach().cpu(), b.detach(), rtol=1e-9, atol=1e-9)


@pytest.mark.thorough
@pytest.mark.parametrize("name", OPS)
def test_an_op_on_rows_does_what_torch_does(mesh: xd.DeviceMesh, name: str) -> None:
    # On rows of gradients and moments; behind factors by layer also on tensors that are no rows.
    check_program(mesh, ["copy", "scale", name, "counters", name, "update"])


def test_as_many_layers_as_a_row_has_elements(mesh: xd.DeviceMesh) -> None:
    check_program(mesh, ["counters", "of fewer dims", "update"], DIM)


@pytest.mark.thorough
@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(st.sampled_from(sorted(OPS)), min_size=4, max_size=8))
def test_any_ops_on_rows_do_what_torch_does(mesh: xd.DeviceMesh, program: list[str]) -> None:
    check_program(mesh, program)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_keep_their_dtype(mesh: xd.DeviceMesh, dtype: torch.dtype) -> None:
    layers = xd.shard_module(
        xd.scan_layers(small_layers().to(dtype)), mesh, {}, unmatched="replicate"
    )
    lists = Lists(layers)
    lists.c = [c.float() for c in lists.c]
    program = ["lerp", "counters", "bias correction", "numbers", "norm", "powers", "update"]
    step = xd.compile(stepping(layers, lists, program))
    step(on(mesh, batch().to(dtype)))
    step(on(mesh, batch().to(dtype)))
    assert {t.dtype for t in (*lists.p, *lists.m)} == {dtype}
    assert {t.dtype for t in lists.c} == {torch.float32}
    assert all(t.isfinite().all().item() for t in (*lists.p, *lists.m))


# ---------------------------------------------------------------------- how much is traced


def equations(mesh: xd.DeviceMesh, count: int, optimizer: Optimizer) -> Counter[str]:
    """How often each primitive stands in the trace of a step over `count` layers."""
    net = placed(scanned(model(count=count)), mesh)
    step: Any = xd.compile(trainer(net, optimizer(net.parameters())))
    step(on(mesh, batch()))
    assert step.stats()["traces"] == 1
    return Counter(equation.primitive.name for equation in step._called().blueprint.jaxpr.eqns)


def trains_on_stacks(mesh: xd.DeviceMesh, optimizer: Optimizer) -> bool:
    return equations(mesh, 3, optimizer) == equations(mesh, 6, optimizer)


@pytest.mark.thorough
@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_a_step_has_as_many_equations_for_any_depth(mesh: xd.DeviceMesh, name: str) -> None:
    assert trains_on_stacks(mesh, OPTIMIZERS[name])


@pytest.mark.thorough
def test_numbers_of_each_layer_cost_one_op_of_all_layers(mesh: xd.DeviceMesh) -> None:
    layers = xd.shard_module(xd.scan_layers(small_layers()), mesh, {}, unmatched="replicate")
    weights = list(layers.parameters())[::KINDS]

    def step(x: torch.Tensor) -> torch.Tensor:
        y = layers(x)
        with torch.no_grad():
            for number, weight in enumerate(weights):
                weight.pow_(3.5 + number)
        return y

    compiled: Any = xd.compile(step)
    compiled(on(mesh, batch().double()))
    shapes = [
        tuple(equation.outvars[0].aval.shape)
        for equation in compiled._called().blueprint.jaxpr.eqns
        if equation.primitive.name == "pow"
    ]
    assert sorted(map(len, shapes)) == [2] * (LAYERS - 1) + [3]


def test_whoever_imports_torch_xla_changes_nothing_of_it(
    mesh: xd.DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    patched = pytest.importorskip("torch_xla._patched_functions").clip_grad_norm_
    monkeypatch.setattr(nn.utils, "clip_grad_norm_", patched)  # as importing it just now would
    assert trains_on_stacks(mesh, torch.optim.SGD)


# ---------------------------------------------------------------------- what else may happen


@pytest.mark.thorough
def test_gradients_add_up_over_microbatches(mesh: xd.DeviceMesh) -> None:
    plain = model()
    net = placed(scanned(plain), mesh)

    def accumulating(net: Any) -> Callable[..., Any]:
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)

        def step(*batches: torch.Tensor) -> torch.Tensor:
            for x in batches:
                loss = net(x).square().mean() / len(batches)
                loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return step

    step, expected = xd.compile(accumulating(net)), accumulating(plain)
    for i in range(3):
        given_ = [batch(i), batch(10 + i), batch(20 + i)]
        found = step(*(on(mesh, x) for x in given_))
        torch.testing.assert_close(found.cpu(), expected(*given_), rtol=1e-5, atol=1e-6)


def test_an_average_of_the_weights_follows(mesh: xd.DeviceMesh) -> None:
    def averaging(net: Any) -> tuple[Callable[..., Any], Any]:
        average = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.8))
        average.n_averaged.fill_(1)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

        def step(x: torch.Tensor) -> torch.Tensor:
            loss = net(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                pairs = list(zip(average.module.parameters(), net.parameters(), strict=True))
                foreach["_foreach_lerp_"]([a for a, _ in pairs], [p for _, p in pairs], 0.2)
            return loss.detach()

        return step, average

    plain = model()
    (step, ours), (expected, theirs) = averaging(placed(scanned(plain), mesh)), averaging(plain)
    step = xd.compile(step)
    for i in range(3):
        step(on(mesh, batch(i)))
        expected(batch(i))
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a.detach().cpu(), b.detach(), rtol=1e-5, atol=1e-6)


def test_how_a_parameter_lies_is_known_inside_of_a_step(mesh: xd.DeviceMesh) -> None:
    net = placed(scanned(model()), mesh)
    weight = net.layers[1].wide.weight
    outside, seen = weight.xla_sharding(), []
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    run = trainer(net, optimizer)

    def asking(x: torch.Tensor) -> torch.Tensor:
        seen.append(weight.xla_sharding())
        net(x)
        seen.append(weight.xla_sharding())
        return run(x)

    step = xd.compile(asking)
    step(on(mesh, batch()))
    step(on(mesh, torch.cat([batch(), batch()])))  # traced anew, with stacks of the first call
    assert seen == [outside] * 4


def test_another_thread_reads_other_weights_during_a_trace(mesh: xd.DeviceMesh) -> None:
    net, other = placed(scanned(model()), mesh), placed(scanned(model()), mesh)
    train_other = xd.compile(trainer(other, torch.optim.SGD(other.parameters(), lr=0.1)))
    train_other(on(mesh, batch()))  # its weights are rows of stacks now
    before = copy.deepcopy(other.layers[1].wide.weight.full_tensor().detach())
    train_other(on(mesh, batch(1)))
    read: list[torch.Tensor] = []

    def reading() -> None:
        read.append(other.layers[1].wide.weight.full_tensor().detach().clone())

    run = trainer(net, torch.optim.SGD(net.parameters(), lr=0.1))

    def step(x: torch.Tensor) -> torch.Tensor:
        thread = threading.Thread(target=reading)
        thread.start()
        thread.join()
        return run(x)

    xd.compile(step)(on(mesh, batch()))
    torch.testing.assert_close(read[0], other.layers[1].wide.weight.full_tensor().detach())
    assert not torch.equal(read[0], before)


@pytest.mark.thorough
def test_a_step_that_fails_leaves_stacks_as_they_were(mesh: xd.DeviceMesh) -> None:
    plain = model()
    net = placed(scanned(plain), mesh)
    ours, theirs = (
        torch.optim.AdamW(net.parameters(), lr=1e-2),
        torch.optim.AdamW(plain.parameters(), lr=1e-2),
    )
    run, expected = trainer(net, ours), trainer(plain, theirs)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = run(x)
        if x.shape[0] == 8:
            raise ValueError("after all has been written")
        return loss

    compiled = xd.compile(step)
    for i in range(2):
        compiled(on(mesh, batch(i)))
        expected(batch(i))
    with pytest.raises(ValueError, match="after all"):
        compiled(on(mesh, torch.cat([batch(), batch()])))
    found = compiled(on(mesh, batch(2)))
    torch.testing.assert_close(found.cpu(), expected(batch(2)), rtol=1e-5, atol=1e-6)
    for a, b in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a.detach().cpu(), b.detach(), rtol=1e-4, atol=1e-5)


def test_the_first_layers_of_a_stack_are_a_stack_of_their_own(mesh: xd.DeviceMesh) -> None:
    plain = model()
    net = placed(scanned(plain), mesh)
    first = placed(copy.deepcopy(plain), mesh)
    few = xd.scan_layers(nn.ModuleList(list(net.layers)[:2]))
    train = xd.compile(trainer(net, torch.optim.SGD(net.parameters(), lr=0.0)))
    train(on(mesh, batch()))
    run = xd.compile(lambda x: few(x))
    expected = first.layers[1](first.layers[0](on(mesh, batch())))
    for _ in range(2):
        found = run(on(mesh, batch()))
        torch.testing.assert_close(
            found.full_tensor(), expected.full_tensor(), rtol=1e-5, atol=1e-6
        )
        train(on(mesh, batch()))


class Gated(nn.Module):
    """A layer with a number of its own, which its user, or another layer, may read."""

    def __init__(self, other: list[Gated] | None = None) -> None:
        super().__init__()
        self.wide, self.gate = nn.Linear(DIM, DIM), nn.Parameter(torch.rand(()) + 0.5)
        self.other = other

    def forward(self, x: torch.Tensor, scale: Any = 1.0) -> torch.Tensor:
        if self.other is not None:
            scale = self.other[0].gate.detach().item()
        return x + torch.tanh(self.wide(x)) * self.gate * (1 - 0.9 ** (scale + 1))


class Twice(nn.Module):
    """Two stacks of layers; the second one's blocks use a number of a row of the first."""

    def __init__(self, read_in_block: bool) -> None:
        super().__init__()
        self.a: Any = nn.ModuleList(Gated() for _ in range(LAYERS))
        others = [self.a[1]] if read_in_block else None
        self.b: Any = nn.ModuleList(Gated(others) for _ in range(LAYERS))

    def scanned(self) -> Twice:
        made = copy.deepcopy(self)
        made.a, made.b = xd.scan_layers(made.a), xd.scan_layers(made.b, ignore=("other",))
        return made

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = through(self.a, x)
        number = self.a[1].gate.detach().item()
        return through(self.b, x, number) * (1 - 0.9 ** (number + 1))


@pytest.mark.parametrize("read_in_block", [False, True])
def test_a_block_uses_the_number_of_another_stacks_row(
    mesh: xd.DeviceMesh, read_in_block: bool
) -> None:
    torch.manual_seed(0)
    plain = Twice(read_in_block)
    net = xd.shard_module(plain.scanned(), mesh, {}, unmatched="replicate")
    ours = xd.compile(trainer(net, torch.optim.AdamW(net.parameters(), lr=1e-2)))
    theirs = trainer(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2))
    for i in range(3):
        found = ours(on(mesh, batch(i)))
        torch.testing.assert_close(found.cpu(), theirs(batch(i)), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_a_number_of_a_row_is_the_number(mesh: xd.DeviceMesh, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    plain = nn.ModuleList(Gated().to(dtype) for _ in range(LAYERS))
    net: Any = xd.scan_layers(copy.deepcopy(plain))
    xd.shard_module(net, mesh, {}, unmatched="replicate")

    def step(x: torch.Tensor) -> Any:
        net(x)
        return [x.double() * layer.gate.detach().item() for layer in net]

    found = xd.compile(step)(on(mesh, torch.ones(4, 6, DIM, dtype=dtype)))
    for each, layer in zip(found, plain, strict=True):
        wanted: Any = layer.gate
        assert each.cpu().unique().item() == wanted.item()


class Outer(nn.Module):
    """A layer that has layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, DIM)
        self.inner: Any = nn.ModuleList(Small() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return through(self.inner, x + torch.tanh(self.first(x)))


@pytest.mark.thorough
def test_layers_in_layers(mesh: xd.DeviceMesh) -> None:
    plain = model(Outer)
    net = copy.deepcopy(plain)
    for layer in net.layers:
        layer.inner = xd.scan_layers(layer.inner)
    net.layers = xd.scan_layers(net.layers)
    net = xd.shard_module(net, mesh, {}, unmatched="replicate")
    torch.testing.assert_close(
        net(on(mesh, batch())).detach().cpu(), plain(batch()).detach(), rtol=1e-5, atol=1e-6
    )
    ours = xd.compile(trainer(net, torch.optim.AdamW(net.parameters(), lr=1e-2)))
    theirs = trainer(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2))
    for i in range(3):
        found = ours(on(mesh, batch(i)))
        torch.testing.assert_close(found.cpu(), theirs(batch(i)), rtol=1e-5, atol=1e-6)
