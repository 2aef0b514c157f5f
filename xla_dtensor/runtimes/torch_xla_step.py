"""A Python step as one XLA program on torch_xla.

torch_xla traces lazily: the Python step runs on every call and builds a graph, which `sync` hands
to the compiler or, if the same graph was seen before, straight to the devices. So "compiled" means
here that the step runs between two syncs with execution forbidden in between: reading a value
inside (`loss.item()`, `if x > 0`) would cut it into several programs, and is an error instead.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from xla_dtensor.errors import CompileError
from xla_dtensor.runtimes.argument_containers import Containers
from xla_dtensor.runtimes.base import CompiledStep
from xla_dtensor.runtimes.premises import Premises
from xla_dtensor.runtimes.step_clock import StepClock, num_tokens
from xla_dtensor.runtimes.torch_xla_program_keys import digest_of_all, synced_as
from xla_dtensor.runtimes.torch_xla_sharding import DEVICE, xlac
from xla_dtensor.runtimes.torch_xla_start import DUMP_VARIABLE, STEP_GRAPH_NAME
from xla_dtensor.runtimes.trace_settings import trace_settings

__all__ = ["TorchXlaStep"]

_MAX_REASONS = 100
_EXECUTED_INSIDE = "Unexpected execution happens inside the compiled function"
_numbers = itertools.count()

_PLAIN_VALUES = (int, float, complex, str, bytes, type(None), torch.dtype)

Signature = tuple[tuple[str, str], ...]


class TorchXlaStep(CompiledStep):
    """See :meth:`Runtime.compile`.

    Args:
        step: The Python step.
        dump_dir: Where XLA writes HLO; None where it does not.
        after_program: Called when the step's program has been handed over.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        dump_dir: Path | None,
        after_program: Callable[[], None] = lambda: None,
    ) -> None:
        self._step = step
        self._dump_dir = dump_dir
        self._after_program = after_program
        self._number = next(_numbers)
        # The graph's name is the HLO module's, which is in the name of the dumped file.
        self._graph_name = f"{STEP_GRAPH_NAME}_{self._number}"
        self._clock = StepClock()
        self._tokens: int | None = None
        self._calls = 0
        self._traces = 0
        self._reasons: list[str] = []
        self._last: Signature | None = None
        self._hlo_files: dict[Signature, Path | None] = {}
        self._digests: dict[tuple[Signature, tuple[int, ...]], str] = {}
        self._premises: Premises | None = None  # of the digests

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        signature = _signature(args, kwargs)
        sync = importlib.import_module("torch_xla").sync
        self._clock.start()
        sync()  # What was computed before belongs to another program.
        compiled_before = _num_compilations()
        self._tokens = num_tokens(pytree.tree_leaves((args, kwargs)))
        given = args, kwargs
        args, kwargs = pytree.tree_map(_on_devices, given)
        leaves = pytree.tree_leaves((args, kwargs))
        containers = Containers.of((args, kwargs), given)
        if self._premises is None or self._premises.broken() is not None:
            self._premises = Premises.of_now(self._step)
            self._digests.clear()
        with _graph_name(self._graph_name):
            result = self._traced(args, kwargs)
            writes, contents = containers.written()
            digest = self._digest(signature, leaves, (result, contents))
            with self._own_program(), synced_as(digest):
                sync()
        writes.do(given, contents)
        self._note(signature, _num_compilations() - compiled_before)
        self._after_program()
        return result

    def hlo(self) -> str:
        if self._last is None:
            raise CompileError(
                "The HLO of a compiled step was asked for before its first call. There is no "
                "program yet. Call the step first."
            )
        path = self._hlo_files.get(self._last)
        if path is None:
            raise CompileError(
                "The HLO of a compiled step was asked for, but XLA has written none. torch_xla can "
                "only dump it where that was asked for at the start. Start with get_runtime("
                f"'torch_xla', dump_hlo='a folder'), or set {DUMP_VARIABLE} to a folder."
            )
        return path.read_text()

    def metrics(self, tokens_per_step: int | None = None) -> Mapping[str, float | None]:
        """See :meth:`CompiledStep.metrics`. torch_xla does not say what a program computes."""
        if self._last is None:
            raise CompileError(
                "The metrics of a compiled step were asked for before its first call. Nothing was "
                "measured yet. Call the step a few times first."
            )
        tokens = self._tokens if tokens_per_step is None else tokens_per_step
        return self._clock.metrics(tokens, None, None)

    def stats(self) -> Mapping[str, Any]:
        """Return calls, traces (programs compiled) and the reason of each (the last 100)."""
        return {"calls": self._calls, "traces": self._traces, "reasons": tuple(self._reasons)}

    def _traced(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        allowed = xlac()._get_allow_execution()
        xlac()._set_allow_execution(False)
        try:
            return self._step(*args, **kwargs)
        except RuntimeError as error:
            if _EXECUTED_INSIDE not in str(error):
                raise
            raise CompileError(
                f"The step {self._step!r} was asked for as one program, but Python reads a value "
                "that the program computes (item(), print, an if on a tensor, a mask as an index). "
                "The value does not exist while the program is being written. Return the tensor "
                "and read it after the call, or use torch.where."
            ) from error
        finally:
            xlac()._set_allow_execution(allowed)

    @contextmanager
    def _own_program(self) -> Iterator[None]:
        """Where HLO is dumped, keep torch_xla from taking the program of an equal graph.

        That program has its dump under another name, or was dropped with it. An empty output of a
        shape that no other step has makes the graph unequal.
        """
        mark = None if self._dump_dir is None else torch.zeros(0, self._number, device=DEVICE)
        yield
        del mark

    def _digest(self, signature: Signature, given: Any, result: Any) -> str:
        """Return the digest of the program that the sync will run, known from an earlier call.

        Which arguments are one tensor is part of the program. What else an argument is, other than
        a tensor or a plain value, is not known: with such, the program is written each time.
        """
        leaves = pytree.tree_leaves(given)
        ids = [_tensor_id(leaf) for leaf in leaves if not isinstance(leaf, _PLAIN_VALUES)]
        first: dict[Any, int] = {}
        key = (signature, tuple(first.setdefault(number, at) for at, number in enumerate(ids)))
        if key in self._digests and None not in ids:
            return self._digests[key]
        digest = digest_of_all(filter(_is_plain, [*leaves, *pytree.tree_leaves(result)]))
        if None not in ids:
            self._digests[key] = digest
        return digest

    def _note(self, signature: Signature, num_compiled: int) -> None:
        if num_compiled:
            self._clock.interrupt()
            self._reasons.append(self._reason(signature))
            del self._reasons[:-_MAX_REASONS]
            self._traces += num_compiled
            self._hlo_files[signature] = self._newest_hlo()
        self._calls += 1
        self._last = signature

    def _reason(self, signature: Signature) -> str:
        if self._last is None:
            return "first call"
        before, now = dict(self._last), dict(signature)
        changed = [
            f"{name}: {before.get(name, 'absent')} -> {now.get(name, 'absent')}"
            for name in {**before, **now}
            if before.get(name) != now.get(name)
        ]
        return "; ".join(changed) or (
            "the arguments are as before, the graph is not: the step reads a Python value that "
            "changed, or tensors that an earlier call made"
        )

    def _newest_hlo(self) -> Path | None:
        if self._dump_dir is None:
            return None
        files = self._dump_dir.glob(f"*{self._graph_name}.*after_optimizations.txt")
        return max(files, key=lambda path: path.stat().st_mtime_ns, default=None)


def _on_devices(leaf: Any) -> Any:
    """Copy a host tensor to the devices: an argument is an input of the program."""
    is_host = isinstance(leaf, torch.Tensor) and type(leaf) is torch.Tensor
    return leaf.to(DEVICE) if is_host and leaf.device.type == "cpu" else leaf


def _is_plain(leaf: Any) -> bool:
    """Tell whether this is an XLA tensor itself: no payload that this library has made."""
    return type(leaf) in (torch.Tensor, torch.nn.Parameter) and leaf.device.type == "xla"


def _tensor_id(leaf: Any) -> int | None:
    """Return torch_xla's number of a tensor, the same for all its aliases; None for others."""
    payload = getattr(leaf, "_local_tensor", leaf)
    return xlac()._xla_get_tensor_id(payload) if _is_plain(payload) else None


def _num_compilations() -> int:
    return xlac()._xla_counter_value("UncachedCompile") or 0


@contextmanager
def _graph_name(name: str) -> Iterator[None]:
    before = xlac()._get_current_graph_name()
    xlac()._set_current_graph_name(name)
    try:
        yield
    finally:
        xlac()._set_current_graph_name(before)


def _signature(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Signature:
    """What a program depends on, by name: of the arguments, and of settings around the call."""
    leaves, _ = pytree.tree_flatten_with_path((args, kwargs))
    arguments = tuple((pytree.keystr(path), _kind(leaf)) for path, leaf in leaves)
    return arguments + tuple((name, repr(value)) for name, value in trace_settings())


def _kind(leaf: Any) -> str:
    if not isinstance(leaf, torch.Tensor):
        return repr(leaf) if isinstance(leaf, int | float | str | None) else type(leaf).__name__
    placements = getattr(leaf, "placements", None)
    kind = f"{leaf.dtype}{list(leaf.shape)}"
    return kind if placements is None else f"{kind} {placements}"
