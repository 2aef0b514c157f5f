"""strict_placements: what XLA does is what the labels say, eagerly, compiled, and in backward."""

from __future__ import annotations

import threading
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import Partial, Replicate, Shard

import xla_dtensor as xd
from xla_dtensor.dtensor.modes import current_modes
from xla_dtensor.report import collectives
from xla_dtensor.runtimes import Runtime

R = Replicate()
ROWS = (Shard(0), R)
untyped: Any = torch  # some of its names are private to it


def put(mesh: xd.DeviceMesh, *shape: int, to: Any = ROWS) -> Any:
    torch.manual_seed(sum(shape))
    return xd.distribute_tensor(torch.randn(shape), mesh, list(to))


def lies_as_labelled(d: Any, mesh: xd.DeviceMesh) -> bool:
    sharding = d.mesh_layout.op_sharding(xd.get_runtime().root(mesh.value))
    return d.xla_sharding().canonical() == sharding.canonical()


# f(x, w) with x (8, 12) and w (12, 16)
OPS: dict[str, Any] = {
    "add": lambda x, w: x + 1,
    "broadcast": lambda x, w: x * x[0],
    "compare": lambda x, w: x > 0,
    "cast": lambda x, w: x.to(torch.bfloat16),
    "softmax": lambda x, w: x.softmax(-1),
    "matmul": lambda x, w: x @ w,
    "linear": lambda x, w: F.linear(x, w.t()),
    "cat": lambda x, w: torch.cat([x, x], 1),
    "transpose": lambda x, w: x.t(),
    "view": lambda x, w: x.view(8, 4, 3),
    "unsqueeze": lambda x, w: x.unsqueeze(0),
    "clone": lambda x, w: x.clone(),
    "detach": lambda x, w: x.detach(),
    "split": lambda x, w: x.split(6, dim=1),
    "sort": lambda x, w: x.sort(dim=1),
    "zeros_like": lambda x, w: torch.zeros_like(x),
    "index": lambda x, w: x[torch.tensor([1, 0, 3])],
    "foreach": lambda x, w: untyped._foreach_mul([x, w], 2.0),
    "in_place": lambda x, w: x.clone().add_(1),
}


@pytest.mark.thorough
@pytest.mark.parametrize(
    "placements", [(Shard(0), R), (Shard(0), Shard(1)), (R, Shard(0))], ids=str
)
@pytest.mark.parametrize("name", OPS)
def test_every_output_lies_as_its_label_says(
    name: str, placements: Any, mesh: xd.DeviceMesh
) -> None:
    x, w = put(mesh, 8, 12, to=placements), put(mesh, 12, 16, to=(R, Shard(1)))
    expected = OPS[name](x.cpu(), w.cpu())
    with xd.strict_placements():
        found = OPS[name](x, w)
    several = isinstance(found, (list, tuple))
    for one, value in zip(
        found if several else [found], expected if several else [expected], strict=True
    ):
        assert any(p.is_partial() for p in one.placements) or lies_as_labelled(one, mesh)
        torch.testing.assert_close(one.cpu(), value)


def test_a_pending_output_is_left_to_xla(mesh: xd.DeviceMesh) -> None:
    x = put(mesh, 8, 12, to=(Shard(0), Shard(1)))
    with xd.strict_placements():
        total = x.sum(1)
    assert total.placements == (Shard(0), Partial("sum"))
    torch.testing.assert_close(total.cpu(), x.cpu().sum(1))


def all_gathers(step: Any, mesh: xd.DeviceMesh) -> int:
    return sum(c.kind == "all-gather" for c in collectives(step.hlo(), mesh.value))


def test_a_compiled_step_is_traced_anew_in_each_mode(mesh: xd.DeviceMesh, runtime: Runtime) -> None:
    x = put(mesh, 8, 12, to=(Shard(0), Shard(1)))
    step = xd.compile(lambda x: x.softmax(-1))
    texts: dict[bool, str] = {}
    for strict in (False, True, False, True):
        with xd.strict_placements(strict):
            y = cast("Any", step(x))
            text = step.hlo()
        torch.testing.assert_close(y.cpu(), x.cpu().softmax(-1))
        assert y.placements == (Shard(0), R)
        # XLA would rather leave the result cut as its argument is.
        assert lies_as_labelled(y, mesh) is strict
        assert texts.setdefault(strict, text) == text
    assert texts[True] != texts[False]
    # Back in a mode, its program is there: four calls, two programs.
    assert step.stats()["traces"] == 2
    assert step.stats()["calls"] == 4


def test_hlo_communicates_where_labels_say(mesh: xd.DeviceMesh) -> None:
    x, w = put(mesh, 8, 16, to=(R, R)), put(mesh, 16, 16, to=(R, Shard(1)))

    def f(x: Any, w: Any) -> Any:
        # Labels: (R, S(1)), then (R, R) by index, on which XLA would rather stay cut.
        hidden = x @ w
        return (hidden[torch.arange(8)].sort(dim=1).values).redistribute(placements=[R, Shard(0)])

    loose, strict = xd.compile(f), xd.compile(f)
    first = loose(x, w)
    with xd.strict_placements():
        second = strict(x, w)
    torch.testing.assert_close(first.cpu(), second.cpu())
    assert all_gathers(strict, mesh) >= 1
    assert all_gathers(strict, mesh) >= all_gathers(loose, mesh)


def test_gradients_are_labelled_truly(mesh: xd.DeviceMesh) -> None:
    x = put(mesh, 8, 12, to=(Shard(0), R))
    w = put(mesh, 12, 16, to=(R, Shard(1))).requires_grad_()
    seen: list[Any] = []
    with xd.strict_placements():
        hidden = (x @ w).relu()
        hidden.register_hook(lambda grad: seen.extend([current_modes(), (grad * 2).detach()]))
        hidden.square().sum().backward()
    modes, grad = seen
    # On torch_xla a backward runs in a thread of PyTorch's.
    assert modes.strict
    assert lies_as_labelled(grad, mesh)
    plain = w.detach().cpu().requires_grad_()
    (x.cpu() @ plain).relu().square().sum().backward()
    torch.testing.assert_close(w.grad.cpu(), plain.grad, atol=1e-4, rtol=1e-4)


def test_views_stay_views(mesh: xd.DeviceMesh) -> None:
    x = put(mesh, 8, 12)
    expected = x.cpu()
    before = x.xla_sharding()
    with xd.strict_placements():
        x.t()[3].fill_(5)
        x.view(4, 2, 12)[:, 1].mul_(2)
        row = x[2]
        x.add_(1)
    expected.t()[3].fill_(5)
    expected.view(4, 2, 12)[:, 1].mul_(2)
    expected.add_(1)
    torch.testing.assert_close(x.cpu(), expected)
    torch.testing.assert_close(row.cpu(), expected[2])
    assert x.xla_sharding() == before


def test_a_written_tensor_lies_as_labelled(mesh: xd.DeviceMesh) -> None:
    x, y = put(mesh, 8, 12, to=(Shard(0), Shard(1))), put(mesh, 8, 12, to=(R, R))
    made = x + 0  # outside: nobody has told XLA how it lies
    with xd.strict_placements():
        made.mul_(y)
        out: Any = torch.add(x, y, out=put(mesh, 8, 12, to=(R, Shard(0))))
    assert made.placements == (Shard(0), Shard(1))
    assert out.placements == (R, Shard(0))
    assert lies_as_labelled(made, mesh)
    assert lies_as_labelled(out, mesh)
    torch.testing.assert_close(made.cpu(), x.cpu() * y.cpu())
    torch.testing.assert_close(out.cpu(), x.cpu() + y.cpu())


def test_the_mode_nests_and_ends(mesh: xd.DeviceMesh, runtime: Runtime, monkeypatch: Any) -> None:
    x = put(mesh, 8, 12)
    told: list[Any] = []
    constrain = runtime.constrain
    monkeypatch.setattr(runtime, "constrain", lambda *a: told.append(a) or constrain(*a))
    with xd.strict_placements():
        _ = x + 1
        with xd.strict_placements(False):
            _ = x + 2
        with pytest.raises(ZeroDivisionError), xd.strict_placements():
            raise ZeroDivisionError
        _ = x + 3
    _ = x + 4
    assert len(told) == 2


def test_the_mode_is_this_threads_own(mesh: xd.DeviceMesh, runtime: Runtime) -> None:
    found: list[Any] = []
    with xd.strict_placements():
        thread = threading.Thread(target=lambda: found.append(current_modes()))
        thread.start()
        thread.join()
    assert [modes.strict for modes in found] == [False]


def test_uneven_shapes(mesh: xd.DeviceMesh) -> None:
    x = put(mesh, 7, 5, to=(Shard(0), Shard(1)))
    with xd.strict_placements():
        y = cast("Any", (x + 1).t() * 2)
    assert y.placements == (Shard(1), Shard(0))
    assert lies_as_labelled(y, mesh)
    torch.testing.assert_close(y.cpu(), (x.cpu() + 1).t() * 2)


def test_meta_tensors_have_nowhere_to_lie(mesh: xd.DeviceMesh) -> None:
    x = xd.distribute_tensor(torch.empty(8, 4, device="meta"), mesh, [Shard(0), R])
    with xd.strict_placements():
        y = cast("Any", x + 1)
    assert y.is_meta
    assert y.placements == (Shard(0), R)
