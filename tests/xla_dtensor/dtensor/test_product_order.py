"""Products and their gradients on three mesh axes have their tiles where they say.

XLA's partitioner loses the order of some products' tiles (``xla_dtensor.core.product_order``). What
is compared is what lies on each device, as well as the whole.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard

import xla_dtensor as xd
from tests.xla_dtensor.dtensor.product_programs import (
    PROGRAMS,
    Placements,
    attention,
    check_gradients,
    gathered,
    heads,
    random,
)
from xla_dtensor.runtimes import Runtime

R = Replicate()
_LONG = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]


@pytest.fixture(scope="module")
def cube(runtime: Runtime) -> xd.DeviceMesh:
    return xd.init_device_mesh("xla", (2, 2, 2), mesh_dim_names=("a", "b", "c"))


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


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_the_keys_that_were_found_wrong(cube: xd.DeviceMesh, compiled: bool) -> None:
    """On the JAX runtime: XLA cut the products of a step otherwise than was expected."""
    placements = [[Shard(2), Shard(2), Shard(1)], [R, R, R], [R, Shard(1), R]]
    check_gradients(cube, heads, placements, compiled)


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
        places = [R, *(Shard(dim) for dim in range(len(shape)))]
        placements.append([draw(st.sampled_from(places)) for _ in range(3)])
    return program, placements


Drawn = tuple[Callable[..., Any], Sequence[Placements]]


@given(layouts(), st.booleans())
@settings(max_examples=3, deadline=None, suppress_health_check=_LONG, derandomize=True)
def test_gradients_of_any_layouts(cube: xd.DeviceMesh, drawn: Drawn, compiled: bool) -> None:
    check_gradients(cube, *drawn, compiled)


@pytest.mark.thorough
@given(layouts(), st.booleans())
# The same layouts each time: XLA of JAX 0.12 has aborted the process on one in some hundreds.
@settings(max_examples=250, deadline=None, suppress_health_check=_LONG, derandomize=True)
def test_gradients_of_any_of_many_layouts(
    cube: xd.DeviceMesh, drawn: Drawn, compiled: bool
) -> None:
    check_gradients(cube, *drawn, compiled)


def on_four_axes(runtime: Runtime, drawn: int, seed: int) -> None:
    """Run programs on 16 devices, in a process of their own."""
    name = "tests.xla_dtensor.dtensor.product_programs"
    command = [sys.executable, "-m", name, runtime.name, str(drawn), str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1800)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.endswith(f"{drawn + 3} programs\n")


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(4))
def test_many_on_four_axes(runtime: Runtime, seed: int) -> None:
    on_four_axes(runtime, drawn=50, seed=seed)


@pytest.mark.only_on("torch_xla")
def test_what_torch_xla_is_told_is_needed(
    cube: xd.DeviceMesh, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(runtime), "pins_products", False)
    monkeypatch.setattr("xla_dtensor.dtensor.dispatch._answers", {})
    with pytest.raises(AssertionError, match="Mismatched elements"):
        test_the_gradient_that_was_found_wrong(cube)
