"""What the JAX runtime has processes compare: steps when they are compiled, gathers; or every op.

In the mode "every" each run of a step and each op that runs outside of one is compared. Functions
of the runtime are then wrapped, so that the other modes cost nothing per op.
"""

from __future__ import annotations

import hashlib
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import lru_cache, wraps
from typing import Any

import jax
import numpy as np
import torch

from xla_dtensor.runtimes import same_program
from xla_dtensor.runtimes.base import Runtime
from xla_dtensor.runtimes.jax.arrays.storage import Storage
from xla_dtensor.runtimes.jax.arrays.store import KeyValueStore
from xla_dtensor.runtimes.jax.arrays.trace import active_trace
from xla_dtensor.runtimes.jax.arrays.values import numpy_from_torch
from xla_dtensor.runtimes.jax.compile.lone_traces import LoneTraces
from xla_dtensor.runtimes.jax.compile.program import Program
from xla_dtensor.runtimes.jax.eager import manual, ops
from xla_dtensor.runtimes.jax.eager.tensor import JaxTensor
from xla_dtensor.runtimes.nested import leaves

__all__ = [
    "checking_every_op",
    "compare_program",
    "compare_run",
    "name_in_job",
    "name_of_step",
    "note_run",
    "note_trace",
    "start",
]

_METHODS = (
    "put",
    "make",
    "from_shards",
    "constrain",
    "enter_manual",
    "leave_manual",
    "run_manual_op",
    "manual_collective",
    "run_layers",
)
_inside = False
_lone_traces: LoneTraces | None = None
_steps: Counter[str] = Counter()
_for_ever = ExitStack()


def start(runtime: Runtime) -> None:
    """Begin to compare as the environment says; nothing in a process alone."""
    store = KeyValueStore.of_job()
    if store is None or same_program.checks() is not None:
        return
    global _lone_traces
    mode = same_program.how_checked()
    same_program.start_checks(store, mode)
    _lone_traces = None if mode == "off" else LoneTraces(store)
    if mode == "every":
        _for_ever.enter_context(checking_every_op(runtime))


def name_of_step(step: Callable[..., Any]) -> str:
    """Return what messages call a step."""
    name = getattr(step, "__qualname__", None) or type(step).__qualname__
    return f"the compiled step {name!r}"


def name_in_job(step: Callable[..., Any]) -> str:
    """Return what a step is called in all processes: by its name, and as the how many-th of it."""
    name = name_of_step(step)
    _steps[name] += 1
    return name if _steps[name] == 1 else f"{name} (number {_steps[name]} of this name)"


def note_trace(name: str, number: int, why: str, before: Program | None) -> None:
    """Tell the other processes that a call is traced anew; not the first one, which all trace."""
    if _lone_traces is not None and before is not None and len(_processes_of_program(before)) > 1:
        _lone_traces.note_trace(name, number, why)


def note_run(name: str, number: int, program: Program) -> None:
    """Note that a call is run by a program that was there.

    Raises:
        ProgramMismatchError: Another process traces that call anew, or was given other numbers.
    """
    if _lone_traces is not None and len(_processes_of_program(program)) > 1:
        _lone_traces.note_run(name, number, [current() for _, current in program.numbers])


def compare_program(
    step: Callable[..., Any], digest: str, lowered: Any, inputs: Any, host: Sequence[Storage]
) -> None:
    """Compare a step's program, which is about to be compiled, and the host tensors it is given.

    Processes that draw on the host each have numbers of their own, and on the mesh there is one.
    """
    checks = same_program.checks()
    if checks is None or checks.mode == "off":
        return
    what = f"{name_of_step(step)}, compiled for its first run"
    host_lines = [_host_line(storage) for storage in host]
    group = _processes(jax.tree.leaves(inputs))
    checks.compare_once(what, digest, group, lowered.as_text, host_lines)


def _host_line(storage: Storage) -> str:
    array = np.asarray(storage.array.addressable_data(0))
    crc = zlib.crc32(np.ascontiguousarray(array).tobytes())
    return f"host tensor of shape={storage.shape}, dtype={array.dtype}, values {crc}"


def compare_run(step: Callable[..., Any], program: Program) -> None:
    """Compare a run of a step, in the mode "every"."""
    checks = same_program.checks()
    if checks is not None and checks.mode == "every":
        checks.compare(name_of_step(step), program.digest, _processes_of_program(program))


def _processes_of_program(program: Program) -> tuple[int, ...]:
    shardings = [storage.lies for storage in (*program.state, *program.read)]
    return _processes(shardings or jax.tree.leaves(program.executable.input_shardings))


@contextmanager
def checking_every_op(runtime: Runtime) -> Iterator[None]:
    """Compare every op that runs outside of a compiled step, for the time of a block."""
    originals = ops.run_op, {name: runtime.__dict__.get(name) for name in _METHODS}
    ops.run_op = _compared(ops.run_op, _name_of_op)
    for name in _METHODS:
        setattr(runtime, name, _compared(getattr(runtime, name), lambda *_, name=name: name))
    try:
        yield
    finally:
        ops.run_op = originals[0]
        for name, method in originals[1].items():
            if method is None:
                delattr(runtime, name)
            else:
                setattr(runtime, name, method)


def _name_of_op(func: Any, *_: Any) -> str:
    """Return an op's name; "" where it runs no program, or gathers, which is compared by itself."""
    reads = func is torch.ops.aten._local_scalar_dense.default
    return "" if reads or manual.view_rule(func) is not None else str(func)


def _compared(function: Callable[..., Any], name: Callable[..., str]) -> Callable[..., Any]:
    @wraps(function)
    def compared(*args: Any, **kwargs: Any) -> Any:
        global _inside
        checks = same_program.checks()
        every = checks is not None and checks.mode == "every"
        if checks is None or not every or _inside or active_trace() is not None:
            return function(*args, **kwargs)
        what = name(*args)
        if not what:
            return function(*args, **kwargs)
        # What from_shards is given first is each process's own.
        arguments = list(leaves((args[what == "from_shards" :], kwargs)))
        arrays = [leaf._storage.array for leaf in arguments if isinstance(leaf, JaxTensor)]
        group = _processes(arrays) if arrays else _processes_of_meshes(arguments)
        text = "\n".join(map(_described, arguments))
        digest = hashlib.sha256(text.encode()).hexdigest()
        checks.compare(what, digest, group, lambda: text)
        _inside = True
        try:
            return function(*args, **kwargs)
        finally:
            _inside = False

    return compared


def _described(argument: Any) -> str:
    if isinstance(argument, JaxTensor):
        spec = getattr(argument._storage.array.sharding, "spec", "")
        return f"tensor of shape={tuple(argument.shape)}, dtype={argument.dtype}, {spec}"
    if isinstance(argument, torch.Tensor):
        values = zlib.crc32(numpy_from_torch(argument).tobytes()) if not argument.is_meta else None
        return (
            f"host tensor of shape={tuple(argument.shape)}, dtype={argument.dtype}, values {values}"
        )
    if callable(argument) and not hasattr(argument, "_schema"):
        return type(argument).__qualname__
    return repr(argument)[:500]


def _processes(arrays: Sequence[Any]) -> tuple[int, ...]:
    # Constants of a trace that are host arrays lie nowhere.
    candidates = (getattr(array, "sharding", array) for array in arrays)
    shardings = {sharding for sharding in candidates if isinstance(sharding, jax.sharding.Sharding)}
    widest = max(shardings, key=lambda s: len(s.device_set), default=None)
    return () if widest is None else _processes_of(widest)


@lru_cache(maxsize=4096)
def _processes_of(sharding: Any) -> tuple[int, ...]:
    return tuple(sorted({device.process_index for device in sharding.device_set}))


def _processes_of_meshes(arguments: Sequence[Any]) -> tuple[int, ...]:
    meshes = [leaf.mesh for leaf in arguments if hasattr(leaf, "mesh")]
    if not meshes:
        return ()
    device_ids = set(meshes[0].root.device_ids.reshape(-1).tolist())
    return tuple(sorted({d.process_index for d in jax.devices() if d.id in device_ids}))
