"""The child of `benchmarks.dispatch`: times small ops on one runtime, prints JSON lines.

Run as ``python -m benchmarks.dispatch_child jax --rounds 10 --calls 200``. Results are dropped
at once: on torch_xla, whose ops only build a graph, nothing is ever computed.
"""

from __future__ import annotations

import argparse
import cProfile
import importlib
import io
import json
import os
import pstats
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch.distributed.tensor import Replicate, Shard
from torch.nn import functional

from benchmarks.timing import Work, interleaved

_NUM_DEVICES = 8
_ROWS, _COLUMNS, _FEATURES = 16, 64, 32
_PLACES = [3, 1, 4, 1, 5, 9, 2, 6]
_untyped: Any = torch  # some of its names are private to it
_PROFILED_CALLS = 2000
_PROFILED_LINES = 25

Op = Callable[[Any, Any, Any], Any]
_TORCH_OPS: dict[str, Op] = {
    "add": lambda x, w, i: x + x,
    "mul": lambda x, w, i: x * 2.5,
    "linear": lambda x, w, i: functional.linear(x, w),
    "view": lambda x, w, i: x.view(_ROWS, 8, 8),
    "softmax": lambda x, w, i: x.softmax(-1),
    "add_": lambda x, w, i: x.add_(x),
    "foreach_add": lambda x, w, i: _untyped._foreach_add([x, w], 1),
    "index_list": lambda x, w, i: x[_PLACES],
    "index": lambda x, w, i: x[i],
    "index_put_": lambda x, w, i: x.index_put_((i,), x[0]),
    "embedding": lambda x, w, i: functional.embedding(i, x),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Times every op in every variant; one JSON object per line on stdout."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runtime", choices=("jax", "torch_xla"))
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--calls", type=int, required=True)
    parser.add_argument("--profile", action="store_true")
    asked = parser.parse_args(arguments)
    distributed = _distributed(asked.runtime)
    others = (_jax_variants if asked.runtime == "jax" else _torch_xla_variants)(*distributed)
    variants = {"DTensor": (_TORCH_OPS, distributed), **others}
    for op in _TORCH_OPS:
        if asked.profile:
            print(json.dumps({"op": op, "profile": _profile(_TORCH_OPS[op], distributed)}))
            continue
        works, failed = _works(op, variants, asked.calls)
        timings = interleaved(works, asked.rounds, budget_seconds=5.0)
        row = {
            "runtime": asked.runtime,
            "op": op,
            "microseconds": {name: asdict(timing) for name, timing in timings.items()},
            "failed": failed,
        }
        print(json.dumps(row), flush=True)


def _distributed(runtime: str) -> tuple[Any, Any, Any]:
    import xla_dtensor as xd

    xd.get_runtime(runtime, num_cpu_devices=_NUM_DEVICES)
    mesh = xd.init_device_mesh("xla", (2, 4), mesh_dim_names=("dp", "tp"))
    x = xd.distribute_tensor(torch.ones(_ROWS, _COLUMNS), mesh, [Shard(0), Replicate()])
    w = xd.distribute_tensor(torch.ones(_FEATURES, _COLUMNS), mesh, [Replicate(), Shard(0)])
    i = xd.distribute_tensor(torch.tensor(_PLACES), mesh, [Replicate(), Replicate()])
    return x, w, i


def _jax_variants(x: Any, w: Any, i: Any) -> Mapping[str, Any]:
    jnp = importlib.import_module("jax.numpy")
    softmax = importlib.import_module("jax.nn").softmax
    bare = (x._local_tensor, w._local_tensor, i._local_tensor)
    arrays = tuple(tensor.value() for tensor in bare)
    ops: dict[str, Op] = {
        "add": lambda a, b, i: jnp.add(a, a),
        "mul": lambda a, b, i: jnp.multiply(a, 2.5),
        "linear": lambda a, b, i: jnp.dot(a, b.T),
        "view": lambda a, b, i: jnp.reshape(a, (_ROWS, 8, 8)),
        "softmax": lambda a, b, i: softmax(a, -1),
        # An array is never written to.
        "add_": lambda a, b, i: jnp.add(a, a),
        "foreach_add": lambda a, b, i: [jnp.add(a, 1), jnp.add(b, 1)],
        "index_list": lambda a, b, i: a[jnp.asarray(_PLACES)],
        "index": lambda a, b, i: a[i],
        "index_put_": lambda a, b, i: a.at[i].set(a[0]),
        "embedding": lambda a, b, i: jnp.take(a, i, axis=0),
    }
    return {"bare": (_TORCH_OPS, bare), "native": (ops, arrays)}


def _torch_xla_variants(x: Any, w: Any, i: Any) -> Mapping[str, Any]:
    spmd = importlib.import_module("torch_xla.distributed.spmd")
    mesh = spmd.Mesh(list(range(_NUM_DEVICES)), (2, 4), ("dp", "tp"))
    marked = (
        spmd.mark_sharding(torch.ones(_ROWS, _COLUMNS).to("xla"), mesh, ("dp", None)),
        spmd.mark_sharding(torch.ones(_FEATURES, _COLUMNS).to("xla"), mesh, ("tp", None)),
        spmd.mark_sharding(torch.tensor(_PLACES).to("xla"), mesh, (None,)),
    )
    bare = (x._local_tensor, w._local_tensor, i._local_tensor)
    return {"bare": (_TORCH_OPS, bare), "native": (_TORCH_OPS, marked)}


def _works(
    op: str, variants: Mapping[str, Any], calls: int
) -> tuple[dict[str, Work], dict[str, str]]:
    """What to time, and why the other variants cannot be."""
    works: dict[str, Work] = {}
    failed: dict[str, str] = {}
    for name, (ops, operands) in variants.items():
        call = _bound(ops[op], operands)
        try:
            call()
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {error}"
        else:
            works[name] = Work(call, before=call, after=_wait, calls=calls)
    return works, failed


def _bound(op: Op, operands: tuple[Any, Any, Any]) -> Callable[[], object]:
    x, w, i = operands
    return lambda: op(x, w, i)


def _wait() -> None:
    from xla_dtensor import get_runtime

    get_runtime().synchronize()


def _profile(op: Op, operands: tuple[Any, Any, Any]) -> str:
    call = _bound(op, operands)
    call()
    profile = cProfile.Profile()
    profile.enable()
    for _ in range(_PROFILED_CALLS):
        call()
    profile.disable()
    text = io.StringIO()
    pstats.Stats(profile, stream=text).sort_stats("tottime").print_stats(_PROFILED_LINES)
    return "\n".join(_profile_lines(text.getvalue()))


def _profile_lines(text: str) -> Iterator[str]:
    """pstats' lines, in microseconds per call of the op."""
    scale = 1e6 / _PROFILED_CALLS
    yield f"{'times':>7} {'own us':>8} {'total us':>9}  function"
    for line in text.splitlines():
        words = line.split(None, 5)
        if len(words) == 6 and words[0][0].isdigit() and words[1] != "function":
            times = int(words[0].split("/")[0]) / _PROFILED_CALLS
            own, total = float(words[1]) * scale, float(words[3]) * scale
            where = words[5].replace(os.getcwd() + os.sep, "").rpartition("site-packages/")[2]
            yield f"{times:7.1f} {own:8.2f} {total:9.2f}  {where}"


if __name__ == "__main__":
    main()
