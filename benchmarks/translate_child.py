"""The child of `benchmarks.translate`: times our translation beside torch_xla's, prints JSON lines.

Run as ``python -m benchmarks.translate_child --sizes 8 --rounds 5``. It never imports jax.

*Uncached* is a translation on a mesh that has been translated on before, of a sharding that has
not: our caches of layouts are cleared before each round, what the mesh itself remembers stays.
torch_xla's is its Python arguments and its C++ object, its cache bypassed. torch_xla asks for as
many devices as the mesh has; the count that it checks against is replaced while a mesh is made.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any
from unittest import mock

import numpy as np

from benchmarks.timing import Timing, Work, interleaved
from benchmarks.translate_cases import Case, cases
from mesh_utils import Mesh
from xla_dtensor.core import Layout, OpSharding, placements
from xla_dtensor.core import layout as layout_module

_CACHED_CALLS = 100
_REPEATS = 5
_MAX_COMPARED = 4096
_LAYOUT_CACHES = [v for v in vars(layout_module).values() if hasattr(v, "cache_clear")]


def main(arguments: Sequence[str] | None = None) -> None:
    """Times every case; one JSON object per line on stdout."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--without-torch-xla", action="store_true")
    asked = parser.parse_args(arguments)
    peer = None if asked.without_torch_xla else TorchXla()
    made: dict[Any, tuple[Mesh, Any]] = {}
    for case in cases(tuple(int(size) for size in asked.sizes.split(","))):
        key = (case.num_devices, case.order, case.mesh_shape)
        if key not in made:
            made.clear()
            made[key] = _make_meshes(case, peer, asked.rounds)
        _time_case(case, *made[key], peer, asked.rounds)


class TorchXla:
    """torch_xla's own translation."""

    def __init__(self) -> None:
        os.environ["PJRT_DEVICE"] = "CPU"
        runtime = importlib.import_module("torch_xla.runtime")
        runtime.use_spmd()
        self._runtime = runtime
        self._mesh_class: Any = importlib.import_module("torch_xla.distributed.spmd").Mesh

    def mesh(self, case: Case) -> Any:
        """torch_xla's mesh, made by its own constructor."""
        size = case.num_devices
        with mock.patch.object(self._runtime, "global_runtime_device_count", partial(int, size)):
            return self._mesh_class(case.device_ids, case.mesh_shape, case.axis_names)

    def clear(self) -> None:
        """Forgets translations."""
        self._mesh_class._get_op_sharding_args.cache_clear()
        self._mesh_class.get_op_sharding.cache_clear()

    def tiles(self, mesh: Any, case: Case, tile_dims: Sequence[int]) -> np.ndarray:
        """The devices of each tile, ascending: int64 [number of tiles, copies]."""
        assignment = mesh._get_op_sharding_args(case.partition_spec)[0]
        return np.sort(np.array(assignment).reshape(math.prod(tile_dims), -1), axis=1)


def _make_meshes(case: Case, peer: TorchXla | None, rounds: int) -> tuple[Mesh, Any]:
    ids, shape, names = case.device_ids, case.mesh_shape, case.axis_names
    mesh = Mesh(ids, shape, names)
    translation = _translation(case, mesh)
    start = time.perf_counter()
    translation()
    first = (time.perf_counter() - start) * 1e6
    if len(shape) == 2:
        works = {"ours": Work(lambda: Mesh(ids, shape, names))}
        if peer is not None:
            works["torch_xla"] = Work(partial(peer.mesh, case))
        _emit(case, "mesh", interleaved(works, rounds), first_translation=first)
    return mesh, None if peer is None else peer.mesh(case)


def _time_case(case: Case, mesh: Mesh, theirs: Any, peer: TorchXla | None, rounds: int) -> None:
    ours = _translation(case, mesh)
    works = {
        "ours": Work(ours, before=_clear, repeats=_REPEATS),
        "ours cached": Work(ours, before=ours, calls=_CACHED_CALLS),
    }
    facts: dict[str, Any] = {"bytes": deep_size(ours())}
    if peer is not None:
        get = partial(type(theirs).get_op_sharding, theirs, case.partition_spec)
        works["torch_xla"] = Work(get, before=peer.clear, repeats=_REPEATS)
        works["torch_xla cached"] = Work(get, before=get, calls=_CACHED_CALLS)
        if case.num_devices <= _MAX_COMPARED:
            facts["same"] = _same(ours(), peer, theirs, case)
    _emit(case, "translation", interleaved(works, rounds), **facts)


def _same(ours: OpSharding, peer: TorchXla, theirs: Any, case: Case) -> bool:
    tiles = ours.tile_dims[: ours.tensor_ndim]
    mine = np.sort(ours.tile_assignment.reshape(math.prod(tiles), -1), axis=1)
    return np.array_equal(mine, peer.tiles(theirs, case, tiles))


def _translation(case: Case, mesh: Mesh) -> Callable[[], OpSharding]:
    asked = tuple(_placement(text, mesh) for text in case.placements)
    ndim, root = case.tensor_ndim, Mesh.arange((case.num_devices,), ("device",))
    return lambda: Layout.from_placements(asked, ndim, mesh).op_sharding(root)


def _placement(text: str, mesh: Mesh) -> Any:
    kind, _, outer = text.partition("/")
    if importlib.util.find_spec("torch") is None:
        module: Any = placements
        strided: Any = placements.StridedShard
    else:
        module = importlib.import_module("torch.distributed.tensor")
        strided = importlib.import_module("torch.distributed.tensor.placement_types")._StridedShard
    if kind == "R":
        return module.Replicate()
    dim = int(kind[1:])
    return strided(dim, split_factor=mesh.size(outer)) if outer else module.Shard(dim)


def _clear() -> None:
    for cache in _LAYOUT_CACHES:
        cache.cache_clear()


def deep_size(value: object, seen: set[int] | None = None) -> int:
    """Bytes of an object and all that it refers to, each once; classes do not count.

    Example:
        >>> deep_size((1, 1)) == sys.getsizeof((1, 1)) + sys.getsizeof(1)
        True
    """
    seen = set() if seen is None else seen
    if id(value) in seen or isinstance(value, type):
        return 0
    seen.add(id(value))
    parts: list[object] = list(getattr(value, "__dict__", {}).values())
    for cls in type(value).__mro__:
        slots = getattr(cls, "__slots__", ())
        names = (slots,) if isinstance(slots, str) else slots
        parts += [getattr(value, name) for name in names if hasattr(value, name)]
    if isinstance(value, dict):
        parts += [*value, *value.values()]
    if isinstance(value, (list, tuple, set, frozenset)):
        parts += value
    return sys.getsizeof(value) + sum(deep_size(part, seen) for part in parts)


def _emit(case: Case, kind: str, timings: dict[str, Timing], **facts: Any) -> None:
    row = {
        "kind": kind,
        "num_devices": case.num_devices,
        "order": case.order,
        "mesh_shape": case.mesh_shape,
        "placements": case.placements,
        "partition_spec": case.partition_spec,
        "microseconds": {name: asdict(timing) for name, timing in timings.items()},
        **facts,
    }
    print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
