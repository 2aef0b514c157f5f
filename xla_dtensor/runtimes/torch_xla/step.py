"""A Python step as one XLA program on torch_xla.

torch_xla traces lazily: the Python step runs on every call and builds a graph, which `sync` hands
to the compiler or, if the same graph was seen before, straight to the devices. So "compiled" means
here that the step runs between two syncs with execution forbidden in between: reading a value
inside (`loss.item()`, `if x > 0`) would cut it into several programs, and is an error instead.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import itertools
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from xla_dtensor.core.errors import CompileError
from xla_dtensor.runtimes.base import CompiledStep, Verification, refuse_lost_write
from xla_dtensor.runtimes.guards import Guards, Recording
from xla_dtensor.runtimes.nested import Containers
from xla_dtensor.runtimes.state import StepClock, num_tokens, trace_settings
from xla_dtensor.runtimes.torch_xla.annotations import DEVICE, DUMP_VARIABLE, STEP_GRAPH_NAME, xlac

__all__ = [
    "TorchXlaStep",
    "correct_program_keys",
    "correct_reads",
    "keyed",
    "refuse_openxla",
    "remember",
]


# ---------------------------------------------- Tell programs apart that torch_xla takes for equal
#
# torch_xla keeps compiled programs under a hash of their graph. A node's hash is made of its op and
# its operands' hashes, an input's of its shape, so that which of two alike inputs stands where is
# lost (pytorch/xla#8353). torch_xla 2.9 answers both of these lines with the first one's program::
#
#     (x + x * y).cpu()
#     (y + x * y).cpu()            x + x * y, in silence
#
# So before a program is looked up, its HLO is written, which takes 10 us per node, and a digest of
# it becomes part of the key. torch_xla mixes the value of ``XLA_AUTO_SPMD_MESH`` into each hash;
# what the value says matters with its automatic sharding only. Programs run in three places:
#
# * A read, of plain XLA tensors too. The digest is that of the tensors read.
# * A sync, of every tensor that lives. torch_xla does not say which those are; the digest is that
#   of the payloads that this library has made (:func:`remember`).
# * A compiled step. By what :meth:`Runtime.compile` promises, its program depends on what kinds its
#   arguments are of, and which of them are one tensor: the first call's digest is good for all such
#   calls (:func:`synced_as`), and costs nothing after that.
#
# Invariants:
#
# * Programs that differ in HLO differ in their key; at a sync, as far as payloads are concerned.
# * Equal programs have equal keys, in each process and on each host: a digest depends on nothing
#   but the HLO. Nothing is compiled twice for it, and programs kept on disk stay good.

_VARIABLE = "XLA_AUTO_SPMD_MESH"
_OF_THEIR_TENSORS = (
    "_get_graph_hash",
    "_get_local_shards",
    "_xla_get_cpu_tensors",
    "_xla_sync_multi",
    "_xla_warm_up_cache",
)
_OF_ALL_TENSORS = ("_xla_step_marker", "_xla_sync_live_tensors")

_alive: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()
_lock = threading.RLock()
_keyed_by: int | None = None
_here = threading.local()


def correct_program_keys() -> None:
    """Correct torch_xla's keys; calling it again does nothing."""
    library = xlac()
    if hasattr(library._xla_step_marker, "__wrapped__"):
        return
    for name in _OF_THEIR_TENSORS:
        setattr(library, name, _running(getattr(library, name), _digest))
    for name in _OF_ALL_TENSORS:
        setattr(library, name, _running(getattr(library, name), _digest_of_sync))


def remember(payload: torch.Tensor) -> None:
    """Let the program of a sync be told apart by this payload too, for as long as it lives."""
    _alive[id(payload)] = payload


def digest_of_all(extra: Iterable[torch.Tensor] = ()) -> str:
    """Return the digest of the program that a sync would run now.

    Args:
        extra: Tensors that live as well, beside the payloads that were remembered.
    """
    living = [tensor for tensor in (ref() for ref in _alive.valuerefs()) if tensor is not None]
    for tensor in living:
        # Only C++ may have held it; without this it would go down with what is returned here.
        tensor._fix_weakref()  # pyright: ignore[reportAttributeAccessIssue]
    return _digest([*living, *extra])


@contextmanager
def synced_as(digest: str) -> Iterator[None]:
    """Let the next sync in the body have this digest; what else runs there has its own."""
    _here.digest = digest
    try:
        yield
    finally:
        _here.digest = None


@contextmanager
def keyed(digest: str) -> Iterator[None]:
    """Let a digest be part of the keys of programs that this thread runs in the body."""
    global _keyed_by
    if _keyed_by == threading.get_ident() or xlac()._xla_get_auto_sharding():
        yield
        return
    with _lock:
        previous = os.environ.get(_VARIABLE, "")
        os.environ[_VARIABLE], _keyed_by = digest, threading.get_ident()
        try:
            yield
        finally:
            # Not taken away again: that would move others while threads of XLA read them.
            os.environ[_VARIABLE], _keyed_by = previous, None


def _digest(tensors: Sequence[torch.Tensor], *_: Any, **__: Any) -> str:
    """Return a digest of the program that computes these tensors, "" where there is none to run."""
    try:
        pending = _pending(tensors)
        if not pending:
            return ""
        with keyed(""):
            # The program of a sync may still be on its way, its results have no memory yet. To
            # write HLO over them crashes; to ask for the hash waits for them as the program will.
            xlac()._get_graph_hash(pending)
        program = xlac()._get_xla_tensors_hlo_proto(pending)
    except RuntimeError:
        return ""  # It cannot be compiled either, which torch_xla will say.
    return hashlib.blake2b(program, digest_size=8).hexdigest()


def _pending(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return those that have to be computed, each once and in the order in which a sync has them.

    An alias of a tensor may come and go, and is no result of its own.
    """
    if not tensors:
        return []
    needed = xlac()._check_tensor_need_materialization(list(tensors))
    by_id = {xlac()._xla_get_tensor_id(t): t for t in itertools.compress(tensors, needed)}
    return [by_id[number] for number in sorted(by_id)]


def _digest_of_sync(*_: Any, **__: Any) -> str:
    digest, _here.digest = getattr(_here, "digest", None), None
    return digest_of_all() if digest is None else digest


def _running(run: Callable[..., Any], digest: Callable[..., str]) -> Callable[..., Any]:
    @functools.wraps(run)
    def with_key(*args: Any, **kwargs: Any) -> Any:
        if _keyed_by == threading.get_ident():
            return run(*args, **kwargs)
        with keyed(digest(*args, **kwargs)):
            return run(*args, **kwargs)

    return with_key


# ------------------------------------------------------------------------- What reads reach Python
#
# Read XLA tensors by one function, which gives their program a key of its own.
#
# Whatever reads an XLA tensor in Python passes one of five aten kernels: ``cpu()``, ``item()`` and
# ``print``, ``host.copy_(x)``, ``out=``, and the kernels that torch_xla runs on the host. They are
# overridden at XLA's dispatch key, where plain tensors of users arrive as well::
#
#     x.cpu()  ->  aten::_to_copy, XLA  ->  _xla_get_cpu_tensors([x])
#
# That function lets other threads run while it compiles and copies, and raises what goes wrong.
# torch_xla's own kernels do neither when they are called from Python as kernels: an error of the
# device ends the process there. So they are called only for what reads nothing.

_overrides: list[torch.library.Library] = []
_aten = torch.ops.aten


def correct_reads() -> None:
    """Override the kernels that read; calling it again does nothing."""
    if _overrides:
        return
    library = torch.library.Library("aten", "IMPL")
    _overrides.append(library)
    for name, read in _READS.items():
        kernel = functools.partial(read, torch.library.get_kernel(f"aten::{name}", "XLA"))
        with warnings.catch_warnings():  # that a kernel is overridden
            warnings.simplefilter("ignore", UserWarning)
            library.impl(name, kernel, "XLA", with_keyset=True, allow_override=True)


def _values(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return tensors as they are on the host; a number that stands for one comes as a number."""
    tensors = [t if isinstance(t, torch.Tensor) else torch.tensor(t) for t in tensors]
    on_devices = [tensor for tensor in tensors if _is_on_devices(tensor)]
    xlac = importlib.import_module("torch_xla")._XLAC
    read = iter(xlac._xla_get_cpu_tensors(on_devices) if on_devices else [])
    return [next(read) if _is_on_devices(tensor) else tensor for tensor in tensors]


def _is_on_devices(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "xla"


def _to_copy(own: Any, keys: Any, of: torch.Tensor, **options: Any) -> torch.Tensor:
    device = options.get("device")
    if device is None or device.type in ("xla", "meta"):
        return own.call_boxed(keys, of, **options)
    (host,) = _values([of])
    return _aten._to_copy.default(host, **options) if _changes(host, options) else host


def _changes(host: torch.Tensor, options: dict[str, Any]) -> bool:
    formats = (None, torch.preserve_format, torch.contiguous_format)
    return (
        options["device"].type != "cpu"
        or options.get("dtype") not in (None, host.dtype)
        or options.get("layout") not in (None, host.layout)
        or options.get("memory_format") not in formats
        or bool(options.get("pin_memory"))
    )


def _to_cpu(own: Any, keys: Any, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    del own, keys
    return _values(tensors)


def _copy_(own: Any, keys: Any, to: torch.Tensor, of: torch.Tensor, *options: Any) -> torch.Tensor:
    return _read_into(to, of) if _is_host(to) else own.call_boxed(keys, to, of, *options)


def _copy_from(
    own: Any, keys: Any, of: torch.Tensor, to: torch.Tensor, *options: Any
) -> torch.Tensor:
    return _read_into(to, of) if _is_host(to) else own.call_boxed(keys, of, to, *options)


def _copy_from_and_resize(own: Any, keys: Any, of: torch.Tensor, to: torch.Tensor) -> torch.Tensor:
    if not _is_host(to):
        return own.call_boxed(keys, of, to)
    return _read_into(_aten.resize_.default(to, of.shape), of)


def _is_host(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu"


def _read_into(to: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
    return _aten.copy_.default(to, *_values([of]))


_READS: dict[str, Callable[..., Any]] = {
    "_to_copy": _to_copy,
    "_to_cpu": _to_cpu,
    "copy_": _copy_,
    "_copy_from": _copy_from,
    "_copy_from_and_resize": _copy_from_and_resize,
}


# -------------------------------------------------------- torch.compile by torch_xla's back end


def refuse_openxla() -> None:
    """Let ``torch.compile(backend="openxla")`` raise; calling it again does nothing."""
    bridge: Any = importlib.import_module("torch_xla.core.dynamo_bridge")
    bridge.extract_compiled_graph = _refused


def _refused(model: Any, args: Sequence[Any]) -> Any:
    # It finds the inputs of a graph by ids of their device data. With SPMD, data that was used
    # before may have another id, and torch_xla 2.9 takes that input for a constant: from the
    # second step on gradients are those of the first step's activations, in silence.
    raise CompileError(
        f"torch.compile was called with backend='openxla', on a graph of {len(args)} inputs. With "
        "SPMD torch_xla 2.9 takes some of them for constants, and goes on with the values of the "
        "first step. Compile the whole step with @xla_dtensor.compile, or pass backend='aot_eager'."
    )


# --------------------------------------------------- A Python step as one XLA program on torch_xla

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
        super().__init__(step)
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
        # With what the step read of Python when each was made.
        self._digests: dict[tuple[Signature, tuple[int, ...]], tuple[str, Guards]] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        signature = _signature(args, kwargs)
        sync = importlib.import_module("torch_xla").sync
        self._clock.start()
        sync()  # What was computed before belongs to another program.
        compiled_before = _num_compilations()
        self._tokens = num_tokens(pytree.tree_leaves((args, kwargs)))
        arguments = args, kwargs
        args, kwargs = pytree.tree_map(_on_devices, arguments)
        leaves = pytree.tree_leaves((args, kwargs))
        containers = Containers.of((args, kwargs), arguments)
        key = _key(signature, leaves)
        digest = self._known_digest(key)
        recording = Recording(self._step, leaves) if digest is None else None
        with _graph_name(self._graph_name):
            with recording or nullcontext():
                output = self._traced(args, kwargs)
            _refuse_lost_writes(pytree.tree_leaves(arguments), leaves)
            writes, contents = containers.written()
            if digest is None:
                assert recording is not None
                digest = self._digest(leaves, (output, contents))
                self._keep(key, digest, recording)
            with self._own_program(), synced_as(digest):
                sync()
        writes.do(arguments, contents)
        self._note(signature, _num_compilations() - compiled_before)
        self._after_program()
        return output

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

    def verify(self, *args: Any, **kwargs: Any) -> Verification:
        """See :meth:`CompiledStep.verify`. Each call traces, so there is nothing to compare."""
        return Verification(
            is_same=True,
            note="nothing to verify: torch_xla runs the step's Python on every call, and finds the "
            "program by the graph that comes of it",
        )

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

    def _known_digest(self, key: Any) -> str | None:
        """Return the digest of the program that the sync will run; None if it is not known."""
        digest, guards = self._digests.get(key, (None, None))
        return digest if guards is not None and guards.broken() is None else None

    def _digest(self, arguments: Sequence[Any], output: Any) -> str:
        return digest_of_all(filter(_is_plain, [*arguments, *pytree.tree_leaves(output)]))

    def _keep(self, key: Any, digest: str, recording: Recording) -> None:
        if key is not None:
            guards = recording.guards()
            guards.settle(lambda value: isinstance(value, torch.Tensor))
            self._digests[key] = digest, guards

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
        previous, current = dict(self._last), dict(signature)
        changed = [
            f"{name}: {previous.get(name, 'absent')} -> {current.get(name, 'absent')}"
            for name in {**previous, **current}
            if previous.get(name) != current.get(name)
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


def _refuse_lost_writes(given: Sequence[Any], leaves: Sequence[Any]) -> None:
    """Raise where a step has written to the copy of a host tensor."""
    for argument, leaf in zip(given, leaves, strict=True):
        # What is made in inference mode counts no writes.
        if leaf is not argument and not leaf.is_inference() and leaf._version:
            refuse_lost_write(argument)


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
    previous = xlac()._get_current_graph_name()
    xlac()._set_current_graph_name(name)
    try:
        yield
    finally:
        xlac()._set_current_graph_name(previous)


def _key(signature: Signature, leaves: Sequence[Any]) -> Any:
    """Return what a step's program is found by among those of other calls; None for nothing.

    Which arguments are one tensor is part of the program. What else an argument is, other than a
    tensor or a plain value, is not known: with such, the program is written each time.
    """
    ids = [_tensor_id(leaf) for leaf in leaves if not isinstance(leaf, _PLAIN_VALUES)]
    first: dict[Any, int] = {}
    key = signature, tuple(first.setdefault(number, at) for at, number in enumerate(ids))
    return None if None in ids else key


def _signature(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Signature:
    """What a program depends on, by name: of the arguments, and of settings around the call."""
    leaves, _ = pytree.tree_flatten_with_path((args, kwargs))
    arguments = tuple((pytree.keystr(path), _kind(leaf)) for path, leaf in leaves)
    return arguments + tuple((name, repr(setting)) for name, setting in trace_settings())


def _kind(leaf: Any) -> str:
    if not isinstance(leaf, torch.Tensor):
        return repr(leaf) if isinstance(leaf, int | float | str | None) else type(leaf).__name__
    placements = getattr(leaf, "placements", None)
    kind = f"{leaf.dtype}{list(leaf.shape)}"
    return kind if placements is None else f"{kind} {placements}"
