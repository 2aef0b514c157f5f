"""The core of DTensor in one of two processes: python two_processes_core.py PORT NUM ID FOLDER.

Prints one line of JSON: for each check None, or what went wrong in this process. Every check runs
in both processes alike, as each communicates.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import Partial, Replicate, Shard

import xla_dtensor as xd
from xla_dtensor.collectives import axis_index, psum
from xla_dtensor.errors import DistributeError, LocalViewError

R = Replicate()
CHECKS: dict[str, Callable[[xd.DeviceMesh, Path], None]] = {}


def check(function: Callable[[xd.DeviceMesh, Path], None]) -> Callable[..., None]:
    """Put a function into the table."""
    CHECKS[function.__name__] = function
    return function


def numbers(*shape: int) -> torch.Tensor:
    """The same numbers in both processes."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(3))


def refused(error: type[Exception], call: Callable[[], Any]) -> None:
    """Check that a call raises."""
    try:
        call()
    except error:
        return
    raise AssertionError(f"{error.__name__} was not raised")


@check
def ops(mesh: xd.DeviceMesh, folder: Path) -> None:
    """Values and gradients of ops on sharded, uneven and mixed operands."""
    x, w = numbers(10, 6).requires_grad_(), numbers(4, 6).requires_grad_()
    dx: Any = xd.distribute_tensor(x.detach(), mesh, [Shard(0), R]).requires_grad_()
    dw: Any = xd.distribute_tensor(w.detach(), mesh, [R, Shard(0)]).requires_grad_()

    def run(x: Any, w: Any) -> Any:
        y = F.layer_norm(F.linear(x, w), (4,))
        y = torch.cat([y.softmax(-1), y.cumsum(0)], 1)[1:, ::2]
        return y + torch.arange(4.0)

    torch.testing.assert_close(run(dx, dw).detach().cpu(), run(x, w).detach())
    run(dx, dw).square().sum().backward()
    run(x, w).square().sum().backward()
    torch.testing.assert_close(dx.grad.cpu(), x.grad, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(dw.grad.cpu(), w.grad, atol=1e-4, rtol=1e-5)


@check
def redistribute(mesh: xd.DeviceMesh, folder: Path) -> None:
    """Every pair of placements, even and uneven."""
    kinds = ([R, R], [Shard(0), R], [R, Shard(1)], [Shard(0), Shard(0)], [Shard(1), Shard(0)])
    for shape in ((8, 8), (5, 7)):
        x = numbers(*shape)
        for source in kinds:
            d = xd.distribute_tensor(x, mesh, source)
            for target in kinds:
                moved = d.redistribute(placements=target)
                assert all(torch.equal(s.data, x[s.index]) for s in moved.addressable_shards())
                assert len(moved.addressable_shards()) == 4


@check
def local_views(mesh: xd.DeviceMesh, folder: Path) -> None:
    """to_local, ops, collectives, from_local and gradients."""
    a, b = numbers(8, 8).requires_grad_(), numbers(8, 6).requires_grad_()
    da: Any = xd.distribute_tensor(a.detach(), mesh, [Shard(0), Shard(1)]).requires_grad_()
    db: Any = xd.distribute_tensor(b.detach(), mesh, [R, Shard(0)]).requires_grad_()
    view = da.to_local() @ db.to_local(grad_placements=[Partial(), Shard(0)])
    assert tuple(view.shape) == (4, 6)
    summed = xd.DTensor.from_local(psum(view, "tp"), mesh, [Shard(0), R])
    pending = xd.DTensor.from_local(view, mesh, [Shard(0), Partial()])
    for out in (summed, pending):
        torch.testing.assert_close(out.detach().cpu(), (a @ b).detach())
    pending.square().sum().backward()
    (a @ b).square().sum().backward()
    torch.testing.assert_close(da.grad.cpu(), a.grad)
    torch.testing.assert_close(db.grad.cpu(), b.grad)
    on_dp: Any = xd.distribute_tensor(a.detach(), mesh, [Shard(0), R]).to_local()
    shards = on_dp.addressable_shards()
    rows = a.detach()[:4] if jax.process_index() == 0 else a.detach()[4:]
    assert all(torch.equal(shard.data, rows) for shard in shards)


@check
def reading_local_views(mesh: xd.DeviceMesh, folder: Path) -> None:
    """What differs between the processes is not read as one value."""
    d: Any = xd.distribute_tensor(torch.arange(8.0), mesh, [Shard(0), R])
    refused(LocalViewError, lambda: d.to_local().sum().item())
    refused(LocalViewError, lambda: bool(d.to_local()[0] > 1))
    assert psum(d.to_local().sum(), "dp").item() == 28.0
    assert d.redistribute(placements=[R, R]).to_local().tolist() == list(range(8))


@check
def each_process_gives_its_shards(mesh: xd.DeviceMesh, folder: Path) -> None:
    """from_shards needs the tensors of this process's devices only."""
    mine = {d.id: torch.full((2,), float(d.id)) for d in jax.local_devices()}
    view = xd.LocalView.from_shards(mine, mesh)
    whole = xd.DTensor.from_local(view, mesh, [Shard(0), Shard(0)])
    ids = torch.tensor(mesh.value.device_ids.reshape(-1)).float()
    assert torch.equal(whole.cpu(), ids.repeat_interleave(2))
    refused(DistributeError, lambda: xd.DTensor.from_local(torch.ones(2), mesh, [Shard(0), R]))
    index: Any = axis_index(view, "dp")
    places = index.addressable_shards()
    assert {int(shard.data) for shard in places} == {jax.process_index()}


@check
def random_numbers(mesh: xd.DeviceMesh, folder: Path) -> None:
    """Draws are those of the whole value, however it is cut."""
    drawn = []
    for placements in ([R, R], [Shard(0), Shard(1)], [R, Shard(0)]):
        xd.manual_seed(5, mesh)
        drawn.append(xd.randn(8, 8, device_mesh=mesh, placements=placements).cpu())
    assert torch.equal(drawn[0], drawn[1])
    assert torch.equal(drawn[0], drawn[2])


@check
def fully_sharded_training(mesh: xd.DeviceMesh, folder: Path) -> None:
    """fully_shard beside plain torch."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
    model.load_state_dict(plain.state_dict())
    for layer in (model[0], model[2]):
        xd.fully_shard(layer, mesh=mesh)
    xd.fully_shard(model, mesh=mesh)
    x, y = numbers(16, 16), torch.arange(16) % 8
    losses = []
    for net in (model, plain):
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        for _ in range(2):
            optimizer.zero_grad()
            loss = F.cross_entropy(net(x), y)
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
    assert abs(losses[0] - losses[1]) < 1e-5
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.detach().cpu(), theirs.detach())


@check
def checkpoint(mesh: xd.DeviceMesh, folder: Path) -> None:
    """Each process writes its own shards; they are read back on another mesh."""
    x, even = numbers(10, 6), numbers(8, 8)
    saved = {
        "uneven": xd.distribute_tensor(x, mesh, [Shard(0), R]),
        "even": xd.distribute_tensor(even, mesh, [Shard(1), Shard(0)]),
        "copied": xd.distribute_tensor(even, mesh, [R, R]),
    }
    save(saved, checkpoint_id=str(folder))
    other = xd.init_device_mesh("xla", (8,))
    loaded: Any = {
        "uneven": xd.zeros(10, 6, device_mesh=other, placements=[Shard(1)]),
        "even": xd.zeros(8, 8, device_mesh=other, placements=[Shard(0)]),
        "copied": xd.zeros(8, 8, device_mesh=mesh, placements=[Shard(0), Shard(1)]),
    }
    load(loaded, checkpoint_id=str(folder))
    for name, value in (("uneven", x), ("even", even), ("copied", even)):
        assert torch.equal(loaded[name].cpu(), value), name


def main(port: int, num_processes: int, process: int, folder: str) -> None:
    """Run all checks and print their outcome."""
    jax.config.update("jax_num_cpu_devices", 4)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", num_processes, process)
    xd.get_runtime("jax")
    # For torch's checkpoint planners only: which process writes what.
    store = dist.FileStore(  # pyright: ignore[reportPrivateImportUsage]
        str(Path(folder) / "store"), num_processes
    )
    dist.init_process_group("gloo", store=store, rank=process, world_size=num_processes)
    mesh = xd.init_device_mesh("xla", (2, 4), mesh_dim_names=("dp", "tp"))
    outcome: dict[str, str | None] = {}
    for name, function in CHECKS.items():
        try:
            function(mesh, Path(folder) / name)
            outcome[name] = None
        except Exception:
            outcome[name] = traceback.format_exc()[-2000:]
    print(json.dumps(outcome))
    dist.destroy_process_group()
    jax.distributed.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
