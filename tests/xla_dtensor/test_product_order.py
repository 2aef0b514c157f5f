"""Products and their gradients on three mesh axes have their tiles where they say.

XLA's partitioner loses the order of some products' tiles (``xla_dtensor.core.product_order``). What
is compared is what lies on each device, as well as the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard

import xla_dtensor as xd
from xla_dtensor.runtimes import Runtime

R = Replicate()
Placements = Sequence[Any]
_LONG = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]


@pytest.fixture(scope="module")
def cube(runtime: Runtime) -> xd.DeviceMesh:
    return xd.init_device_mesh("xla", (2, 2, 2), mesh_dim_names=("a", "b", "c"))


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def gathered(tensor: Any) -> torch.Tensor:
    """Return the whole, put together from what each device has."""
    whole = torch.full(tuple(tensor.shape), torch.nan, dtype=tensor.dtype)
    for shard in tensor.addressable_shards():
        whole[shard.index] = shard.data
    return whole


OUT = [Shard(1), Shard(0), Shard(1)]
KNOWN: dict[str, tuple[Callable[..., Any], Placements, Placements, Placements]] = {
    "transposed": (lambda x, y: x.mT @ y, [R, Shard(0), Shard(1)], OUT, OUT),
    "torch_xla": (
        lambda x, y: x.mT @ y,
        [Shard(1), Shard(1), Shard(0)],
        [R, Shard(1), Shard(0)],
        [Shard(0), Shard(0), Shard(1)],
    ),
    "batch": (
        torch.bmm,
        [Shard(2), Shard(0), Shard(0)],
        [Shard(1), Shard(0), Shard(0)],
        [Shard(0), Shard(2), Shard(2)],
    ),
    "batch_torch_xla": (
        torch.bmm,
        [Shard(1), R, Shard(2)],
        [R, Shard(2), Shard(1)],
        [Shard(2), Shard(2), Shard(1)],
    ),
}


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", KNOWN)
def test_a_product_that_is_redistributed(cube: xd.DeviceMesh, name: str, compiled: bool) -> None:
    function, *placements = KNOWN[name]
    shape = (8, 8, 8) if function is torch.bmm else (16, 16)
    x, y = random(*shape), random(*shape).flip(0)
    step = lambda a, b: function(a, b).redistribute(cube, placements[2])  # noqa: E731
    run: Any = xd.compile(step) if compiled else step
    found = run(
        *(xd.distribute_tensor(t, cube, p) for t, p in zip((x, y), placements, strict=False))
    )
    assert found.placements == tuple(placements[2])
    torch.testing.assert_close(gathered(found), function(x, y), rtol=0, atol=1e-12)


def two_layers(x: Any, w: Any, bias: Any) -> Any:
    hidden = F.gelu(F.linear(x, w, bias))
    return (F.linear(hidden, w) ** 2).mean() + (x.mT @ x).tanh().mean()


def attention(x: Any, to_keys: Any, to_out: Any, to_words: Any, words: Any) -> Any:
    scores = torch.einsum("btd,bsd->bts", x, F.linear(x, to_keys))
    hidden = F.linear(scores.softmax(-1) @ x, to_out)
    return F.cross_entropy(F.linear(hidden, to_words).flatten(0, 1), words.flatten())


def heads(x: Any, to_both: Any, to_out: Any) -> Any:
    split = F.linear(x, to_both).unflatten(-1, (4, 4)).transpose(1, 2)
    keys, values = split.split(2, dim=-1)
    queries = x.unflatten(-1, (4, 2)).transpose(1, 2)
    mixed = torch.matmul(torch.matmul(queries, keys.mT).softmax(-1), values)
    return (F.linear(mixed.transpose(1, 2).flatten(2), to_out) ** 2).mean()


# What is computed, and the shapes of what it is given.
PROGRAMS: dict[Callable[..., Any], tuple[tuple[int, ...], ...]] = {
    two_layers: ((16, 8), (8, 8), (8,)),
    attention: ((8, 8, 8), (8, 8), (8, 8), (16, 8), (8, 8)),
    heads: ((8, 8, 8), (16, 8), (8, 8)),
}


def given_to(program: Callable[..., Any]) -> list[torch.Tensor]:
    values = [random(*shape) for shape in PROGRAMS[program]]
    if program is attention:
        values[-1] = torch.arange(64).reshape(8, 8) % 16
    return values


def check_gradients(
    cube: xd.DeviceMesh,
    program: Callable[..., Any],
    placements: Sequence[Placements],
    compiled: bool,
) -> None:
    values = given_to(program)
    plain = [v.clone().requires_grad_(v.is_floating_point()) for v in values]
    program(*plain).backward()
    placed = [
        xd.distribute_tensor(value, cube, each).requires_grad_(value.is_floating_point())
        for value, each in zip(values, placements, strict=True)
    ]

    def step() -> None:
        program(*placed).full_tensor().backward()

    (xd.compile(step) if compiled else step)()
    placed[0].detach().cpu()  # the gradients are computed by the way, and read afterwards
    for mine, wanted in zip(placed, plain, strict=True):
        if wanted.grad is not None:
            error = (gathered(mine.grad) - wanted.grad).abs().max()
            assert error < 1e-12, placements


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_the_attention_that_was_found_wrong(cube: xd.DeviceMesh, compiled: bool) -> None:
    """On the JAX runtime: a batch dim of the keys' gradient was cut by an axis of its sum."""
    placements = [
        [Shard(2), Shard(0), R],
        [Shard(1), Shard(0), Shard(1)],
        [Shard(1), R, R],
        [R, Shard(0), Shard(0)],
        [Shard(1), Shard(0), Shard(0)],
    ]
    check_gradients(cube, attention, placements, compiled)


def test_the_gradient_that_was_found_wrong(cube: xd.DeviceMesh) -> None:
    """Seed 1879 of the programs against PyTorch: two of four columns had changed places."""
    x, bias = random(16, 8), random(16)
    plain = x.clone().requires_grad_()
    (F.linear(plain, plain, bias) ** 2).mean().backward()
    mine = xd.distribute_tensor(x, cube, [Shard(1), Shard(0), Shard(1)]).requires_grad_()
    other = xd.distribute_tensor(bias, cube, [R, R, Shard(0)]).requires_grad_()
    out: Any = F.linear(mine, mine, other)
    (out * out).mean().full_tensor().backward()
    mine.detach().cpu()
    torch.testing.assert_close(gathered(mine.grad), plain.grad, rtol=0, atol=1e-12)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[Callable[..., Any], list[Placements]]:
    """A program, and placements of what it is given on three axes."""
    program = draw(st.sampled_from(list(PROGRAMS)))
    placements: list[Placements] = []
    for shape in PROGRAMS[program]:
        places = [R, *map(Shard, range(len(shape)))]
        placements.append([draw(st.sampled_from(places)) for _ in range(3)])
    return program, placements


Drawn = tuple[Callable[..., Any], Sequence[Placements]]


@given(layouts(), st.booleans())
@settings(max_examples=15, deadline=None, suppress_health_check=_LONG)
def test_gradients_of_any_layouts(cube: xd.DeviceMesh, drawn: Drawn, compiled: bool) -> None:
    check_gradients(cube, *drawn, compiled)


@pytest.mark.slow
@given(layouts(), st.booleans())
@settings(max_examples=250, deadline=None, suppress_health_check=_LONG)
def test_gradients_of_any_of_many_layouts(
    cube: xd.DeviceMesh, drawn: Drawn, compiled: bool
) -> None:
    check_gradients(cube, *drawn, compiled)


@pytest.mark.only_on("torch_xla")
def test_what_torch_xla_is_told_is_needed(
    cube: xd.DeviceMesh, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(runtime), "pins_products", False)
    monkeypatch.setattr("xla_dtensor.dispatch._answers", {})
    with pytest.raises(AssertionError, match="Mismatched elements"):
        test_the_gradient_that_was_found_wrong(cube)
