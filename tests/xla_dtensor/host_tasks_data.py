"""What processes do in the tests of feeding; on one process they are called as they are."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import Replicate, Shard
from torch.utils.data import DataLoader

import xla_dtensor as xd
import xla_dtensor.spmd as xs
from mesh_utils import Mesh
from xla_dtensor.dtensor.mesh import DeviceMesh, as_device_mesh
from xla_dtensor.hosts.data.sampler import LastBatch, shuffled


class Rows:
    """A data set of numbered rows that notes what is read of it."""

    def __init__(self, length: int, width: int) -> None:
        self.length, self.width = length, width
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.read.append(index)
        return {"x": index * 100 + torch.arange(self.width), "y": index}


class Stream:
    """Batches of rows with torchdata's methods; its state is that of the batch given last."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches, self.place, self.begun = batches, 0, 0

    def __iter__(self) -> Iterator[Any]:
        self.place, self.begun = self.begun, 0
        while self.place < len(self.batches):
            self.place += 1
            yield self.batches[self.place - 1]

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.begun = state["place"]


def mesh_of(shape: tuple[int, ...], order: tuple[int, ...] | None = None) -> DeviceMesh:
    """The job's devices as a mesh, its axes taken from the devices in some order."""
    ids = np.array(xd.get_runtime().device_ids()[:8])
    order = order or tuple(range(len(shape)))
    inner = tuple(int(np.array(shape)[list(order).index(i)]) for i in range(len(shape)))
    arranged = ids.reshape(inner).transpose(order)
    names = tuple("abc"[: len(shape)])
    return as_device_mesh(Mesh(arranged.ravel().tolist(), shape, names))


def placements_of(texts: str) -> list[Any]:
    return [Replicate() if text == "R" else Shard(int(text)) for text in texts]


def feed(case: dict[str, Any]) -> dict[str, Any]:
    """An epoch of a data set: the global batches, and what this process should have read."""
    mesh = mesh_of(case["shape"], case["order"])
    cut = placements_of(case["cut"])
    rows = [p if p == Shard(0) else Replicate() for p in cut]
    data = Rows(case["length"], case["width"])
    sampler = xd.ShardedSampler(data, case["batch_size"], mesh, cut, last=case["last"], seed=7)
    loader = xd.ShardedLoader(
        DataLoader(data, batch_sampler=sampler),  # pyright: ignore[reportArgumentType]
        mesh,
        {"x": cut, "y": rows},
        whole=(1,),
        mask="real",
        pad_value={"x": -1, "y": -1},
        prefetch=case["prefetch"],
    )
    order = shuffled(np.arange(len(data)), len(data), 7, 0)
    size, batches, right = case["batch_size"], [], []
    read = 0
    for number, batch in enumerate(loader):
        batches.append({name: batch[name].full_tensor().tolist() for name in ("x", "y", "real")})
        held = {
            row
            for shard in batch["x"].addressable_shards()
            for row in range(shard.index[0].start, shard.index[0].stop)
        }
        places = [number * size + row for row in sorted(held) if number * size + row < len(data)]
        expected = order[places or [number * size]].tolist()
        right.append(data.read[read : read + len(expected)] == expected)
        read += len(expected)
    return {"batches": batches, "read_exactly": [*right, len(data.read) == read]}


def own_parts(case: dict[str, Any]) -> bool:
    """Whether shard_batch makes a tensor of each process's own part, in every dim."""
    mesh, cut = mesh_of(case["shape"], case["order"]), placements_of(case["cut"])
    shape = (case["batch_size"], case["width"])
    whole = torch.arange(shape[0] * shape[1]).reshape(shape)
    own = xd.process_part(shape, mesh, cut).take(whole)
    made = [
        xd.shard_batch(own, mesh, cut, global_shape=shape, check=True, timeout_seconds=60),
        xd.shard_batch({"t": (whole,)}, mesh, cut, whole=True)["t"][0],
        xd.distribute_tensor(whole, mesh, cut),
    ]
    held = [
        {(str(s.device_id), str(s.index)): s.data.tolist() for s in each.addressable_shards()}
        for each in made
    ]
    return held[0] == held[1] == held[2] and all(torch.equal(m.full_tensor(), whole) for m in made)


def caught(function: Any, *arguments: Any, **options: Any) -> str:
    try:
        function(*arguments, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def wrong_feeds() -> dict[str, str]:
    """What is raised where processes feed what is no batch."""
    mesh = mesh_of((2, 4))
    own = mesh.get_coordinate()[0]
    rows, copies = [Shard(0), Replicate()], [Replicate(), Replicate()]
    values = torch.arange(8.0).reshape(4, 2)
    shard, options = xd.shard_batch, {"check": True, "timeout_seconds": 60}
    wrong = {
        "same": caught(shard, values, mesh, rows, **options),
        "constant": caught(shard, torch.ones(4, 2), mesh, rows, **options),
        "copies": caught(shard, {"v": values + own}, mesh, copies, **options),
        "right copies": caught(shard, {"v": values}, mesh, copies, **options),
        "shapes": caught(shard, torch.ones(4, 3 + own), mesh, rows, timeout_seconds=60),
        "dtypes": caught(shard, torch.ones(4, 5).to([torch.float, torch.int][own]), mesh, rows),
    }
    lists = [[values + own], [values, values + own + 10]]
    for check in ("first", "always", "off"):
        for number, batches in enumerate(lists):
            loader = xd.ShardedLoader(batches, mesh, copies, check=check, timeout_seconds=60)
            wrong[f"loader {check} {number}"] = caught(list, loader)
    return wrong


def late_feed() -> str:
    """What is raised where another process does not come."""
    mesh = mesh_of((8,))
    if mesh.get_coordinate()[0] > 0:
        time.sleep(1.5)
        return "late"
    return caught(xd.shard_batch, torch.ones(12, 7), mesh, [Shard(0)], timeout_seconds=0.5)


def uneven_streams(last: LastBatch, counts: list[int], rows: list[int]) -> dict[str, Any]:
    """Processes with different numbers of batches, and rows in the last."""
    mesh = mesh_of((len(counts), 8 // len(counts)))
    own = mesh.get_coordinate()[0]
    batches = [(torch.full((2, 3), own * 10 + n), [f"{n}"]) for n in range(counts[own])]
    batches[-1] = (batches[-1][0][: rows[own]], batches[-1][1])
    loader = xd.ShardedLoader(
        batches, mesh, [Shard(0), Replicate()], last=last, mask="real", pad_value=-1
    )
    found: list[Any] = []

    def read() -> None:
        found.extend(
            (b[0].full_tensor()[:, 0].tolist(), b[-1].full_tensor().tolist()) for b in loader
        )

    return {"raised": caught(read), "batches": found}


def failing_process() -> str:
    """What each process hears when the loader of the second fails."""
    mesh = mesh_of((2, 4))
    own = mesh.get_coordinate()[0]

    def batches() -> Iterator[Any]:
        yield torch.full((2,), own)
        if own == 1:
            raise OSError("the disk is gone")
        yield torch.full((2,), own)

    return caught(list, xd.ShardedLoader(batches(), mesh, [Shard(0), Replicate()]))


def resume(states: Any = None, take: int = 2) -> dict[str, Any]:
    """Go on from states of three kinds of loader, take some batches, and return their states."""
    mesh, rows = mesh_of((4, 2)), [Shard(0), Replicate()]
    data = Rows(40, 2)
    sampler = xd.ShardedSampler(data, 8, mesh, rows, seed=5)
    sequences = [torch.full((1 + n % 5,), n) for n in range(60)]
    loaders = {
        "sampler": xd.ShardedLoader(DataLoader(data, batch_sampler=sampler), mesh, rows),  # pyright: ignore[reportArgumentType]
        "whole": xd.ShardedLoader(
            Stream([{"y": torch.arange(8) + 8 * n} for n in range(5)]), mesh, rows, whole=True
        ),
        "packed": xd.ShardedLoader(
            xd.PackedBatches(sequences, 4, 6, lookahead=3), mesh, rows, whole=True
        ),
    }
    result: dict[str, Any] = {"seen": {}, "states": {}}
    for name, loader in loaders.items():
        if states is not None:
            loader.load_state_dict(states[name])
        seen = result["seen"][name] = []
        with loader:
            for batch in loader:
                key = "tokens" if name == "packed" else "y"
                seen.append(batch[key].full_tensor().tolist())
                if len(seen) == take:
                    time.sleep(0.05)  # batches are waiting now, and do not count
                    result["states"][name] = loader.state_dict()
                    break
    return result


def resume_streams(state: Any, take: int, cut: str) -> dict[str, Any]:
    """Each process has a stateful loader of its own rows."""
    mesh = mesh_of((8,))
    part = xd.process_part((8,), mesh, placements_of(cut))
    batches = [torch.arange(8)[torch.from_numpy(part.positions())] + 8 * n for n in range(6)]
    loader = xd.ShardedLoader(Stream(batches), mesh, placements_of(cut), snapshot_every=2)
    if state is not None:
        raised = caught(loader.load_state_dict, state)
        if raised != "nothing was raised":
            return {"raised": raised}
    seen: list[Any] = []
    for batch in loader:
        seen.append(batch.full_tensor().tolist())
        if len(seen) == take:
            break
    return {"seen": seen, "state": loader.state_dict()}


def sharding_spec(minibatch: bool) -> list[Any]:
    """torch_xla's loader by its own arguments, fed with each process's rows or the whole."""
    ids = xd.get_runtime().device_ids()[:8]
    spec = xs.ShardingSpec(xs.Mesh(ids, (4, 2), ("data", "model")), ("data", None), minibatch)
    own = torch.arange(8)
    if minibatch:
        mesh = as_device_mesh(spec.mesh)
        own = own[
            torch.from_numpy(xd.process_part((8,), mesh, [Shard(0), Replicate()]).positions())
        ]
    host = [{"x": own[:, None] + torch.arange(3)}] * 2
    loader = xd.MpDeviceLoader(host, "xla", input_sharding=spec, loader_prefetch_size=4)
    return [batch["x"].full_tensor().tolist() for batch in loader]
