"""What each call does in a job of several processes: the table of docs/hosts.md, run.

Each function is called with a `Setting` and either needs no other process ("alone"), has to be
called by all ("together"), or refuses ("raises NAME").
"""

from __future__ import annotations

import copy
import io
import os
import pickle
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard

import xla_dtensor as xd
from xla_dtensor.errors import XlaDTensorError
from xla_dtensor.runtimes.same_program import checks

__all__ = ["ROWS", "audit"]

_PATIENCE_SECONDS = 8.0


class Setting:
    """What the rows work on: a sharded, a replicated and a one-element DTensor."""

    def __init__(self, mesh_shape: tuple[int, ...]) -> None:
        self.mesh = xd.init_device_mesh("xla", mesh_shape, mesh_dim_names=("dp", "tp"))
        self.value = torch.arange(64.0).reshape(8, 8)
        self.x: Any = xd.distribute_tensor(self.value, self.mesh, [Shard(0), Shard(1)])
        self.same: Any = xd.distribute_tensor(self.value, self.mesh)
        self.scalar: Any = self.same.sum()
        self.loss = xd.compile(lambda x: (x @ x.t()).mean())(self.x)
        self.view: Any = self.x.to_local()
        self.step = xd.compile(lambda x: x @ x.t())
        self.step(self.x)
        self.module = nn.Linear(8, 8, bias=False)
        self.module.weight = nn.Parameter(self.x.detach())
        self.file = os.path.join(tempfile.mkdtemp(), "programs")


def _write_items(s: Setting) -> Any:
    items = s.x.__create_write_items__("w", s.x)
    return [s.x.__get_tensor_shard__(item.index) for item in items]


def _torch_save(s: Setting) -> Any:
    file = io.BytesIO()
    torch.save(s.x, file)
    file.seek(0)
    return torch.load(file).full_tensor().cpu()


def _strict(s: Setting) -> Any:
    with xd.strict_placements():
        return s.x + 1


def _fully_sharded(s: Setting) -> Any:
    torch.manual_seed(0)
    module: Any = xd.fully_shard(nn.Linear(8, 8), mesh=s.mesh["dp"])
    module.unshard()
    module.reshard()
    return module(s.value).cpu().shape


def _seeded(s: Setting) -> Any:
    xd.manual_seed(3, s.mesh)
    return xd.rand(8, 8, device_mesh=s.mesh, placements=[Shard(0), Shard(1)])


def _saved_step(s: Setting) -> Any:
    s.step.save(s.file)
    s.step.load(s.file)


def _refused(*calls: Callable[[], Any]) -> None:
    """Make calls that all have to raise the same; raise the last one's error."""
    errors = []
    for call in calls:
        try:
            call()
        except XlaDTensorError as error:
            errors.append(error)
    assert len(errors) == len(calls), f"{len(errors)} of {len(calls)} calls raised"
    assert len({type(error) for error in errors}) == 1, errors
    raise errors[-1]


# The first cell of each row of the table in docs/hosts.md -> what it does, and the second cell.
ROWS: dict[str, tuple[str, Callable[[Setting], Any]]] = {
    "`repr(x)`, `str(x)`, `print(x)`, `f'{x}'`": ("alone", lambda s: (repr(s.x), f"{s.x}")),
    "`x.shape`, `.dtype`, `.placements`, `.device_mesh`, `.local_shape`": (
        "alone",
        lambda s: (s.x.shape, s.x.dtype, s.x.placements, s.x.device_mesh, s.x.local_shape),
    ),
    "`x.xla_sharding()`": ("alone", lambda s: s.x.xla_sharding()),
    "`x.addressable_shards()`": ("alone", lambda s: s.x.addressable_shards()),
    "`mesh.get_rank()`, `.get_local_rank(axis)`, `.get_coordinate()`, `.mesh`": (
        "alone",
        lambda s: (s.mesh.get_rank(), s.mesh.get_local_rank("dp"), s.mesh.get_coordinate()),
    ),
    "`compute_local_shape_and_global_offset`": (
        "alone",
        lambda s: xd.compute_local_shape_and_global_offset((8, 8), s.mesh, ("dp", "tp")),
    ),
    "`x.item()`, `bool(x)`, `float(x)` of a replicated x": (
        "alone",
        lambda s: (s.scalar.item(), bool(s.scalar), float(s.scalar), s.loss.item()),
    ),
    "`x.full_tensor()`, `.cpu()`, `.numpy()`, `.tolist()` of a replicated x": (
        "together",
        lambda s: (s.same.full_tensor(), s.same.cpu(), s.same.numpy(), s.same.tolist()),
    ),
    "`x.full_tensor()`, `.cpu()`, `.numpy()`, `.tolist()` of a sharded x": (
        "together",
        lambda s: (s.x.full_tensor(), s.x.cpu(), s.x.numpy(), s.x.tolist()),
    ),
    "`x.item()`, `bool(x)` of a sharded x": (
        "together",
        lambda s: xd.distribute_tensor(torch.ones(1, 1), s.mesh, [Shard(0), Shard(1)]).item(),
    ),
    "`torch.equal`, `torch.allclose`": ("together", lambda s: torch.equal(s.x, s.x + 0)),
    "an op, `x.redistribute()`": (
        "together",
        lambda s: (s.x @ s.x.t()).redistribute(placements=[Replicate(), Shard(1)]),
    ),
    "`distribute_tensor`, `rand`, `zeros`": (
        "together",
        lambda s: (xd.distribute_tensor(s.value, s.mesh, [Shard(1), Shard(0)]), _seeded(s)),
    ),
    "`manual_seed`, `torch.manual_seed`": ("alone", lambda s: xd.manual_seed(3, s.mesh)),
    "`x.to_local()`": ("together", lambda s: s.x.to_local()),
    "`repr(view)` of a LocalView": ("alone", lambda s: repr(s.view)),
    "`view.addressable_shards()`": ("together", lambda s: s.view.addressable_shards()),
    "`view.item()`, `bool(view)`, `view.cpu()` of a view that differs by device": (
        "raises LocalViewError",
        lambda s: _refused(
            lambda: s.view.flatten()[:1].item(), lambda: bool(s.view[0, 0]), lambda: s.view.cpu()
        ),
    ),
    "`from_local(view)`": (
        "together",
        lambda s: xd.DTensor.from_local(s.view, s.mesh, [Shard(0), Shard(1)]),
    ),
    "`from_local(tensor)` with Replicate": (
        "together",
        lambda s: xd.DTensor.from_local(s.value, s.mesh, [Replicate(), Replicate()]),
    ),
    "`from_local(tensor)` with Shard or Partial, several devices in the process": (
        "raises DistributeError",
        lambda s: xd.DTensor.from_local(s.value, s.mesh, [Shard(0), Partial()]),
    ),
    "`LocalView.from_shards({device_id: tensor})`": (
        "together",
        lambda s: xd.LocalView.from_shards(
            {i: torch.ones(2, 2) * i for i in xd.get_runtime().addressable_device_ids()}, s.mesh
        ),
    ),
    "a compiled step": ("together", lambda s: s.step(s.x)),
    "`step.hlo()`, `.stats()`, `.metrics()`": ("alone", lambda s: (s.step.hlo(), s.step.stats())),
    "`step.save(file)`, `step.load(file)`": ("alone", _saved_step),
    "`torch.save`, `pickle`": ("together", lambda s: (_torch_save(s), pickle.dumps(s.x))),
    "`copy.deepcopy`": ("together", lambda s: copy.deepcopy(s.x)),
    "`module.state_dict()`": ("alone", lambda s: s.module.state_dict()),
    "torch.distributed.checkpoint's hooks (`__create_write_items__` ...)": ("alone", _write_items),
    "`strict_placements()`": ("together", _strict),
    "`fully_shard`, `module.unshard()`": ("together", _fully_sharded),
    "`mesh.get_group()`": ("raises ProcessGroupError", lambda s: s.mesh.get_all_groups()),
}


def audit(mesh_shape: tuple[int, ...]) -> dict[str, str]:
    """What each row really does: "alone", "together" or "raises NAME".

    "alone" rows are called by process 0 first, while the others wait at a barrier; each op that
    needs another process would then raise.
    """
    found, setting, runs = {}, Setting(mesh_shape), checks()
    assert runs is not None
    before, runs.patience_seconds = runs.patience_seconds, _PATIENCE_SECONDS
    try:
        for name, (kind, call) in ROWS.items():
            with xd.program_checks("every"):
                found[name] = _done(name, kind, call, setting)
    finally:
        runs.patience_seconds = before
    return found


def _done(name: str, kind: str, call: Callable[[Setting], Any], setting: Setting) -> str:
    runs: Any = checks()
    if kind == "alone" and runs._store.index != 0:
        xd.check_same_program(name)
    compared = runs._counts.total()
    try:
        call(setting)
        did = "together" if runs._counts.total() > compared else "alone"
    except (XlaDTensorError, RuntimeError) as error:
        did = f"raises {type(error).__name__}" + ("" if kind.startswith("raises") else f": {error}")
    if kind == "alone" and runs._store.index == 0:
        xd.check_same_program(name)
    return did
