"""The child of `benchmarks.annotate`: times annotations in one process, prints JSON lines.

Run as ``python -m benchmarks.annotate_child jax --rounds 10 --calls 100 --layers 8``. Processes:

| name | |
|---|---|
| jax | the JAX runtime |
| torch_xla | the torch_xla runtime, started by xla_dtensor: functionalization is off |
| use_spmd | a script of torch_xla's own that called use_spmd() itself: it is on |
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any
from unittest import mock

import torch

from benchmarks.annotate_model import BATCH, DIM, LENGTH, Mark, Training, unmarked
from benchmarks.timing import Timing, Work, interleaved

PROCESSES = ("jax", "torch_xla", "use_spmd")

_NUM_DEVICES = 8
_SHAPE = (16, 64)
_SPEC = ("dp", "tp")
_BUDGET_SECONDS = 20.0


class _TracedError(Exception):
    """Raised where a step's trace is done, so that it is not compiled."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Times single annotations, then steps with many; one JSON object per line on stdout."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("process", choices=PROCESSES)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--calls", type=int, required=True)
    parser.add_argument("--layers", type=int, required=True)
    asked = parser.parse_args(arguments)
    _start(asked.process)
    spmd: Any = importlib.import_module("xla_dtensor.spmd")
    spmd.set_global_mesh(spmd.Mesh(range(_NUM_DEVICES), (2, 4), ("dp", "tp")))
    _emit(asked.process, "call", interleaved(_calls(asked.process, asked.calls), asked.rounds))
    for name, timing in _traces(asked.process, asked.layers, asked.rounds).items():
        _emit(asked.process, "trace", {name: timing})


def _start(process: str) -> None:
    if process == "use_spmd":
        os.environ |= {"CPU_NUM_DEVICES": str(_NUM_DEVICES), "PJRT_DEVICE": "CPU", "NPROC": "64"}
        importlib.import_module("torch_xla.runtime").use_spmd()
        importlib.import_module("torch_xla").device()
        return
    import xla_dtensor as xd

    xd.get_runtime(process, num_cpu_devices=_NUM_DEVICES)


def _emit(process: str, part: str, timings: Mapping[str, Timing]) -> None:
    times = {name: asdict(timing) for name, timing in timings.items()}
    print(json.dumps({"process": process, "part": part, "microseconds": times}), flush=True)


def _marks(process: str) -> dict[str, Mark]:
    """Every way to annotate in this process, ours and torch_xla's own, as functions to a tensor."""
    ours: Any = importlib.import_module("xla_dtensor.spmd")
    mesh = ours.get_global_mesh()

    def in_place(tensor: Any, spec: tuple[Any, ...]) -> Any:
        ours.mark_sharding(tensor, mesh, spec)
        return tensor

    marks: dict[str, Mark] = {
        "mark_sharding": in_place,
        "with_gradients": lambda t, spec: ours.mark_sharding_with_gradients(t, mesh, spec),
    }
    if process == "jax":
        return marks
    theirs: Any = importlib.import_module("torch_xla.distributed.spmd")
    _search_for_torchax_once()
    their_mesh = theirs.Mesh(list(range(_NUM_DEVICES)), (2, 4), ("dp", "tp"))

    def their_in_place(tensor: Any, spec: tuple[Any, ...]) -> Any:
        theirs.mark_sharding(tensor, their_mesh, spec)
        return tensor

    marks["torch_xla's mark_sharding"] = their_in_place
    marks["torch_xla's with_gradients"] = lambda t, spec: theirs.mark_sharding_with_gradients(
        t, their_mesh, spec
    )
    return marks


def _search() -> Callable[[], object]:
    return importlib.import_module("torch_xla._internal.jax_workarounds").maybe_get_torchax


def _search_for_torchax_once() -> None:
    """Let torch_xla know at once whether torchax is there.

    Its mark_sharding tries to import it on each call. Where torchax is not installed, that takes
    many times as long as the rest; it is timed separately.
    """
    own = importlib.import_module("torch_xla.distributed.spmd.xla_sharding")
    found = _search()()
    vars(own)["maybe_get_torchax"] = lambda: found


# ---------------------------------------------------------------------- single annotations


def _calls(process: str, calls: int) -> dict[str, Work]:
    """One annotation of an activation that was not annotated before."""
    plain = _plain(process, torch.ones(_SHAPE)).requires_grad_()
    works = {name: _on_fresh(mark, plain, calls) for name, mark in _marks(process).items()}
    wrapped = _distributed(torch.ones(_SHAPE)).requires_grad_()
    works["mark_sharding of a DTensor"] = _on_fresh(
        _marks(process)["mark_sharding"], wrapped, calls
    )
    if process == "jax":
        works["jax.device_put"] = _device_put(plain, calls)
    else:
        works["torch_xla's search for torchax"] = Work(_search(), calls=calls)
    return works


def _on_fresh(mark: Mark, source: Any, calls: int) -> Work:
    fresh: deque[Any] = deque()

    def make() -> None:
        fresh.extend(source * 2 for _ in range(calls - len(fresh)))

    return Work(lambda: mark(fresh.pop(), _SPEC), before=make, after=_wait, calls=calls)


def _device_put(source: Any, calls: int) -> Work:
    """What JAX itself does to move an array, the least that an annotation can cost there."""
    jax: Any = importlib.import_module("jax")
    from xla_dtensor.spmd import mark_sharding

    moved: Any = source.detach() * 2
    mark_sharding(moved, None, _SPEC)
    sharding, array = moved.value().sharding, source.detach().value()
    return Work(lambda: jax.device_put(array, sharding), after=_wait, calls=calls)


def _plain(process: str, tensor: torch.Tensor) -> Any:
    """A plain tensor of the runtime, replicated."""
    if process != "jax":
        return tensor.to("xla")
    from xla_dtensor.spmd import mark_sharding

    mark_sharding(tensor, None, (None,) * tensor.ndim)
    return tensor


def _distributed(tensor: torch.Tensor) -> Any:
    import xla_dtensor as xd
    from xla_dtensor.spmd import get_global_mesh

    return xd.distribute_tensor(tensor, get_global_mesh())


def _wait() -> None:
    from xla_dtensor import get_runtime

    get_runtime().synchronize()


# ---------------------------------------------------------------------- whole steps


def _traces(process: str, layers: int, rounds: int) -> dict[str, Timing]:
    """Trace a training step without annotations, and with each kind of them, in turns."""
    marks = {"no annotations": unmarked, **_marks(process)}
    training = Training(layers, _placed(process))
    x = _plain(process, torch.randn(BATCH, LENGTH, DIM))
    _marks(process)["mark_sharding"](x, ("dp", None, None))
    _wait()
    trace = _traced_on_jax if process == "jax" else _traced_lazily
    works = {name: trace(training, x, mark) for name, mark in marks.items()}
    return interleaved(works, rounds, _BUDGET_SECONDS)


def _placed(process: str) -> Callable[[Any], Any]:
    """Parameters as torch_xla's scripts have them: moved, the matrices cut over tp."""

    def place(model: Any) -> Any:
        import xla_dtensor as xd
        from xla_dtensor.spmd import get_global_mesh, mark_sharding

        jax = process == "jax"
        model = xd.distribute_module(model, get_global_mesh()) if jax else model.to("xla")
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                columns = "qkv" in name or "up" in name
                mark_sharding(parameter, None, ("tp", None) if columns else (None, "tp"))
        return model

    return place


def _traced_lazily(training: Training, x: Any, mark: Mark) -> Work:
    """On torch_xla a step is traced by running it; what it computes is computed afterwards."""
    torch_xla: Any = importlib.import_module("torch_xla")

    def run_it() -> None:
        torch_xla.sync(wait=True)

    def trace() -> None:
        # Backward too on this thread, whose CPU time is read; autograd has one for the device.
        with torch.autograd.set_multithreading_enabled(False):
            training.step(x, x, mark)

    return Work(trace, after=run_it)


def _traced_on_jax(training: Training, x: Any, mark: Mark) -> Work:
    """The trace of xla_dtensor.compile, without XLA's lowering and compilation after it."""
    import xla_dtensor as xd

    jax_compile: Any = importlib.import_module("xla_dtensor.runtimes.jax.compile.step")

    def trace() -> None:
        compiled = xd.compile(lambda a: training.step(a, a, mark))
        with mock.patch.object(jax_compile.JaxCompiledStep, "_finish", side_effect=_TracedError):
            try:
                compiled(x)
            except _TracedError:
                return
        raise RuntimeError("The step was not traced.")

    return Work(trace)


if __name__ == "__main__":
    main()
