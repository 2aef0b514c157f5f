"""The child of `benchmarks.mesh_libtpu`: compiles collectives for TPU slices, prints JSON lines.

Run as ``python -m benchmarks.mesh_libtpu_child FILE --numbers 0 1 2 3``. FILE holds a JSON list of
cases. It needs no TPU, only libtpu. A mesh that libtpu does not like can end this process, so a
line says which mesh is begun before anything is compiled.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from benchmarks.mesh_libtpu_where import RINGS, digest
from mesh_utils import Topology, assign, create_device_mesh, create_hybrid_device_mesh

Groups: TypeAlias = tuple[int, frozenset[bytes]]
"""An axis by its place and the ids of its groups, each in order."""

RESULT_BYTES = 64 * 2**20
"""What an all-gather results in, and what an all-reduce takes: bandwidth-bound."""

KINDS = ("all-gather", "all-reduce")

STRATEGIES = ("search", "rings", "rows", "jax")
"""The search's mesh; the same axes with their chips in snakes and rings wherever that makes the
steps shorter; the same in rows, everywhere; JAX's."""

_COLUMNS = 128
_BYTES_PER_ROW = 4 * _COLUMNS


def main(arguments: Sequence[str] | None = None) -> None:
    """Compiles for meshes: the number of one is 4 * case + place in STRATEGIES."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--numbers", type=int, nargs="+", required=True)
    asked = parser.parse_args(arguments)
    cases = json.loads(asked.file.read_text(encoding="utf-8"))
    known: dict[Groups, dict[str, Any]] = {}
    begun = -1
    for number in asked.numbers:
        place, which = divmod(number, len(STRATEGIES))
        if place != begun:
            known.clear()
            begun = place
        _emit({"begun": number})
        start = time.process_time()
        found = _compiled(cases[place], STRATEGIES[which], known)
        row = {"number": number, "case": place, "strategy": STRATEGIES[which], **found}
        _emit({**row, "seconds": round(time.process_time() - start, 2)})


def _emit(row: dict[str, Any]) -> None:
    print(json.dumps(row), flush=True)


def _compiled(
    case: dict[str, Any], strategy: str, known: dict[Groups, dict[str, Any]]
) -> dict[str, Any]:
    """What came of a mesh.

    An axis whose groups hold the same devices in the same order as in another mesh of the case is
    the same program for the same chips: it is known already.
    """
    try:
        placed = _mesh_devices(case, strategy)
    except Exception as error:  # whatever it is, it is the result
        return {"error": _text(error), "devices": "", "axes": []}
    from jax.sharding import Mesh

    names = tuple("abcdefgh"[: placed.ndim])
    mesh = Mesh(placed, names)
    ids = np.vectorize(lambda device: device.id, otypes=[np.int64])(placed)
    axes: list[dict[str, Any]] = []
    for place, name in enumerate(names):
        if ids.shape[place] == 1:
            continue
        rows = np.moveaxis(ids, place, -1).reshape(-1, ids.shape[place])
        key = (place, frozenset(map(bytes, np.ascontiguousarray(rows))))
        if key not in known:
            known[key] = _axis(mesh, name)
        axes.append(known[key])
    return {"error": "", "devices": digest(ids), "axes": axes}


@lru_cache(maxsize=2)
def _devices(name: str, options: str) -> list[Any]:
    from jax.experimental import topologies

    read = {key: tuple(v) if isinstance(v, list) else v for key, v in json.loads(options).items()}
    return list(topologies.get_topology_desc(name, "tpu", **read).devices)


def _mesh_devices(case: dict[str, Any], strategy: str) -> np.ndarray:
    """The devices of libtpu in the shape of the mesh."""
    devices = _devices(case["libtpu"], json.dumps(case["options"]))
    shape, dcn = case["shape"], case["dcn"]
    if strategy == "jax":
        split = {"strategy": "jax", "allow_split_physical_axes": True}
        if dcn is None:
            return create_device_mesh(shape, devices, **split)
        return create_hybrid_device_mesh(shape, dcn, devices, **split)
    # By id: devices do not tell whether their slice is twisted.
    topology = Topology.parse(case["topology"], wrap=case["wrap"])
    made = assign(topology, shape, dcn, rings=RINGS[strategy])
    by_id = {device.id: device for device in devices}
    return np.vectorize(by_id.__getitem__, otypes=[object])(made.device_ids)


def _axis(mesh: Any, name: str) -> dict[str, Any]:
    """Compiles both collectives on an axis."""
    found: dict[str, Any] = {"axis": name, "size": mesh.shape[name]}
    for kind in KINDS:
        try:
            text = _program(mesh, name, kind)
        except Exception as error:  # a mesh that does not compile is a result
            found[kind] = {"error": _text(error)}
        else:
            found[kind] = {"how": list(dict.fromkeys(algorithms(text)))}
    return found


def _program(mesh: Any, name: str, kind: str) -> str:
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    step = {
        "all-gather": lambda x: jax.lax.all_gather(x, name, tiled=True),
        "all-reduce": lambda x: jax.lax.psum(x, name),
    }[kind]
    mapped = jax.shard_map(
        step,
        mesh=mesh,
        in_specs=PartitionSpec(name),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    size = mesh.shape[name]
    # Each device has 1/size of what is gathered, or all of what is reduced.
    rows = RESULT_BYTES // _BYTES_PER_ROW * (1 if kind == "all-gather" else size)
    rows = -(-rows // (8 * size)) * 8 * size
    sharding = NamedSharding(mesh, PartitionSpec(name))
    x = jax.ShapeDtypeStruct((rows, _COLUMNS), "float32", sharding=sharding)
    return jax.jit(mapped).lower(x).compile().as_text() or ""


_OPCODE = re.compile(r" ([a-z][a-z-]*?)(?:-start)?\(")
_COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")


def algorithms(text: str) -> Iterator[str]:
    """What XLA says it does, for each collective of a compiled program.

    Args:
        text: the program.

    Yields:
        The instruction, its emitter, and its strategy with its colours and phases; of a transfer
        between slices what it is for.

    Example:
        >>> config = '{"collective_algorithm_config":{"emitter":"1DAllGather","debug":""}}'
        >>> list(algorithms(f"%a = f32[8]{{0}} all-gather(%x), backend_config={config}"))
        ['all-gather: 1DAllGather']
    """
    for line in text.splitlines():
        _, _, operation = line.partition(" = ")
        opcode = _OPCODE.search(operation)
        if opcode is None:
            continue
        transfer = re.search(r'_xla_megascale_transfer_type="?(\w+)', line)
        if transfer is not None and opcode[1] == "send":
            yield f"send: DCN {transfer[1]}"
        words = _words(_backend_config(line))
        if words:
            yield f"{opcode[1]}: {' '.join(words)}"


def _backend_config(line: str) -> dict[str, Any]:
    _, found, rest = line.partition("backend_config=")
    if not found or not rest.startswith("{"):
        return {}
    return json.JSONDecoder().raw_decode(rest)[0]


def _words(config: dict[str, Any]) -> list[str]:
    """What a configuration says of the algorithm; nothing where it does not say."""
    chosen = config.get("collective_algorithm_config", {})
    if chosen:
        words = [chosen.get(key, "") for key in ("emitter", "strategy")]
        for key in ("colors", "phases"):
            value = re.search(rf"\b{key}:(\d+)", chosen.get("debug", ""))
            words += [f"{key}={value[1]}"] if value else []
        return [word for word in words if word]
    # tpu7x: the SparseCores do it.
    for kind, offloaded in config.get("collective_offload_config", {}).items():
        colors = offloaded.get("ici_strategy_config", {}).get("color_strategies", [])
        if not colors:
            return ["SparseCore", kind.removesuffix("_offload_config")]
        rings = colors[0].get("phase_rings", [])
        dims = [ring.get("ring_dim", "EXPLICIT").removeprefix("ICI_RING_DIM_") for ring in rings]
        return ["SparseCore", f"colors={len(colors)}", f"phases={len(rings)}", ",".join(dims)]
    return []


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


if __name__ == "__main__":
    sys.exit(main())
