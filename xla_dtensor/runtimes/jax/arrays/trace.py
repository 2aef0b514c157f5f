"""What a traced step touches: the storages it reads, writes and leaves behind.

A user's step closes over its model and optimizer; nobody lists their tensors. While a step is
traced, every storage reports to the one active :class:`Trace`:

* read or written, and older than the trace: *captured*, an input of the program;
* captured and written: *state*, an output as well, whose buffer is donated;
* created during the trace and still alive at its end: *lasting*, an output (new optimizer state,
  gradients that nobody cleared).

The tracing itself is single-threaded (autograd's worker thread is switched off around it), so the
active trace is a plain module variable. Other threads, such as one that loads batches ahead, take
no part in it: what they make is no result of the step.
"""

from __future__ import annotations

import contextlib
import gc
import linecache
import threading
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import torch
import torch.utils.checkpoint as torch_checkpoint
from torch._C._functorch import peek_interpreter_stack
from torch.utils._pytree import tree_leaves

from xla_dtensor.core.errors import CompileError
from xla_dtensor.runtimes.jax.arrays.private import frames_here, frames_of, line_of_origin
from xla_dtensor.runtimes.new_garbage import old_objects_aside, tracked_objects
from xla_dtensor.runtimes.same_program import user_frame

if TYPE_CHECKING:
    import jax

    from xla_dtensor.runtimes.host_work import HostTape
    from xla_dtensor.runtimes.jax.arrays.storage import KeptStack, Storage

__all__ = [
    "MaskError",
    "Trace",
    "active_trace",
    "array_before",
    "array_read",
    "host_input",
    "note_write",
    "note_write_to_host",
    "refuse_read",
    "refuse_write_to_host",
    "refusing_reads",
]


# ------------------------------------------------------- torch.utils.checkpoint in a compiled step
#
# The second forward has to stay a second one.
#
# In a step that is traced, a checkpointed region and its recomputation are the same equations of
# the same values. XLA merges them, keeps the first ones' results until the backward pass, and
# nothing is saved, without a word. So while PyTorch recomputes, what is read from outside of the
# region (the saved inputs, the parameters) is read through an ``optimization_barrier``, together
# with the gradient that has just been computed::
#
#     x, w, gradient  ->  barrier  ->  x', w'        the same values, not before that gradient
#     x', w'          ->  the region once more
#
# The barrier's outputs are other values to XLA, so the recomputation stays; and they depend on the
# gradient, so it is not scheduled before the backward pass comes to it.
#
# Where Python branches on a tensor in a region, it goes the same way the second time.


class Recomputation:
    """What is read while a region is computed a second time.

    Args:
        after: The value that it is not to begin before; None where there is none yet.
    """

    def __init__(self, predecessor: Any) -> None:
        self._predecessor = predecessor
        self._storages: weakref.WeakSet[Storage] = weakref.WeakSet()
        self._late: dict[int, tuple[Any, Any]] = {}

    def adopt(self, storage: Storage) -> None:
        """Note a storage that the recomputation itself makes."""
        self._storages.add(storage)

    def array_of(self, storage: Storage) -> Any:
        """Return the storage's array, behind the barrier unless it is of this recomputation."""
        array = storage.array
        if storage in self._storages or self._predecessor is None:
            return array
        if id(array) not in self._late:
            import jax

            late, _ = jax.lax.optimization_barrier((array, self._predecessor))
            # The array goes along: while it lives, nothing else has its id.
            self._late[id(array)] = (array, late)
        return self._late[id(array)][1]


class _Scoped:
    """A context manager of torch's inside of one of ours."""

    _scope: contextlib.AbstractContextManager[None]

    def __enter__(self) -> None:
        self._scope.__enter__()
        super().__enter__()  # pyright: ignore[reportAttributeAccessIssue]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # pyright: ignore[reportAttributeAccessIssue]
        self._scope.__exit__(None, None, None)


_hooks_installed = False


@contextlib.contextmanager
def _recomputing(region: Any) -> Iterator[None]:
    """Compute a region again: what torch has made for it, as in `_computing`."""
    trace = active_trace()
    if trace is None:
        yield
        return
    outer, trace.recomputation = trace.recomputation, Recomputation(trace.latest)
    try:
        with contextlib.nullcontext() if trace.truths is None else trace.truths.again(region):
            yield
    finally:
        trace.recomputation = outer


@contextlib.contextmanager
def _computing(region: Any) -> Iterator[None]:
    """Compute a region for the first time."""
    trace = active_trace()
    truths = None if trace is None else trace.truths
    with contextlib.nullcontext() if truths is None else truths.first(region):
        yield


@contextlib.contextmanager
def honouring_checkpoints() -> Iterator[None]:
    """Let torch's checkpoint tell the trace in progress when it computes a region again."""
    global _hooks_installed
    if _hooks_installed:  # a trace in a trace
        yield
        return
    first, hooks = torch_checkpoint._checkpoint_hook, torch_checkpoint._recomputation_hook
    function = torch_checkpoint.CheckpointFunction
    forward, backward = function.forward, function.backward

    class First(_Scoped, first):
        def __init__(self, frame: Any) -> None:
            super().__init__(frame)
            self._scope = _computing(frame)

    class Hooks(_Scoped, hooks):
        def __init__(self, frame: Any, gid: Any) -> None:
            super().__init__(frame, gid)
            self._scope = _recomputing(frame())

    def reentrant_forward(ctx: Any, *args: Any) -> Any:
        with _computing(ctx):
            return forward(ctx, *args)

    def reentrant(ctx: Any, *grads: Any) -> Any:
        run = ctx.run_function

        def recomputed(*args: Any) -> Any:
            with _recomputing(ctx):
                return run(*args)

        ctx.run_function = recomputed
        try:
            return backward(ctx, *grads)
        finally:
            ctx.run_function = run

    torch_checkpoint._checkpoint_hook, torch_checkpoint._recomputation_hook = First, Hooks
    function.forward = staticmethod(reentrant_forward)  # pyright: ignore
    function.backward = staticmethod(reentrant)
    _hooks_installed = True
    try:
        yield
    finally:
        _hooks_installed = False
        torch_checkpoint._checkpoint_hook, torch_checkpoint._recomputation_hook = first, hooks
        function.forward = staticmethod(forward)
        function.backward = staticmethod(backward)


# ----------------------------- Which line of the user's source an op of a traced step was made for
#
# JAX notes for every equation the Python frames that led to it, and XLA carries them into the
# compiled program. Two things stand in the way of their use for a PyTorch step:
#
# * The innermost frames are torch's and ours. They are left out, as JAX leaves out its own.
# * In the backward there are no frames of the model: autograd calls each node from C++, under the
#   one line ``loss.backward()``. So every op of the forward leaves its frames, and the names of the
#   modules around it, under the number of the autograd node that was made for it, and an op that
#   runs for a node is given that node's; its modules' names then come after ``backward``.
#
# An op that runs in the backward with autograd on is the forward computed again (checkpointing): it
# runs under the model's own frames, and keeps them.

# The number that the next autograd node will have.
_next_node: Any = torch._C._autograd._get_sequence_nr  # pyright: ignore[reportAttributeAccessIssue]


class Sources:
    """Frames and names of a trace's ops, by the number of their autograd node."""

    def __init__(self) -> None:
        self._frames: dict[int, Any] = {}

    @contextlib.contextmanager
    def of_op(self) -> Iterator[None]:
        """Note where the op that runs inside comes from, or give it the frames of its node."""
        node: Any = None if torch.is_grad_enabled() else torch._C._current_autograd_node()
        if node is None:
            # A node takes its number just before its op runs; later ops without a node keep off.
            number = _next_node() - 1
            if number not in self._frames:
                self._frames[number] = frames_here()
            yield
            return
        origin = self._frames.get(node._sequence_nr())
        with contextlib.nullcontext() if origin is None else frames_of(origin, "backward"):
            yield

    def of_backward(self) -> str:
        """Return whose backward runs, and the line of its forward; "" in a forward."""
        node: Any = torch._C._current_autograd_node()
        if node is None or node._sequence_nr() not in self._frames:
            return ""
        return f", in {node.name()} of {line_of_origin(self._frames[node._sequence_nr()])}"


# ---------------------------------------------------------------------- What a traced step touches

_active: Trace | None = None
_thread = 0  # the thread that traces


class HostTensors(Protocol):
    """The plain tensors that go into a program: what ops ask ``compile.host_inputs``.

    Attributes:
        tape: What the step computes on the host.
        storages: Those that stand for plain tensors in the program.
    """

    tape: HostTape
    storages: list[Storage]

    def input_of(self, tensor: torch.Tensor) -> Any | None:
        """Return what stands for a plain tensor in the program; None for a constant."""
        ...

    def admitted(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return an op's arguments, with what stands for the plain tensors among them."""
        ...

    def with_values(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Return an op's arguments with the plain tensors as constants; None where it has none."""
        ...


class Rows(Protocol):
    """One parameter of every layer as rows of a stack: what ops ask ``compile.layers.rows``."""

    def number(self, tensor: Any) -> Any | None:
        """Return the SymFloat or SymInt of a tensor that is a row; None for another one."""
        ...

    def run(self, func: Any, args: Any, kwargs: Any) -> Any | None:
        """Run a functional op on tensors that are rows; None where it is not an op of rows."""
        ...

    def give(self, target: Any, source: Any) -> bool:
        """Write a tensor that is a row to another one, which becomes a row; whether it has."""
        ...

    def forget(self) -> None:
        """Let go of what ops have made."""
        ...


class Truths(Protocol):
    """The truth values that a trace takes for granted: what ops ask ``eager.checks``."""

    checks: list[Any]
    branches: list[Any]

    def answer(self, question: Any) -> bool:
        """Answer a branch of Python's."""
        ...

    def first(self, region: Any) -> contextlib.AbstractContextManager[None]:
        """Note what is answered inside, where a region of torch's checkpoint is computed."""
        ...

    def again(self, region: Any) -> contextlib.AbstractContextManager[None]:
        """Answer the same inside, where it is computed again."""
        ...


class Trace:
    """The storages that one traced step touched.

    Args:
        rows: What ops make of rows of stacks.
        host: The plain tensors that go into the program; None where nothing is written down.
    """

    def __init__(self, rows: Rows, host: HostTensors | None = None) -> None:
        self.rows, self.host = rows, host
        self.captured: dict[Storage, jax.Array] = {}
        self.state: dict[Storage, None] = {}
        # In the order in which they were made: programs must come out alike in every process.
        self._created: weakref.WeakKeyDictionary[Storage, None] = weakref.WeakKeyDictionary()
        self._arguments: dict[Storage, None] = {}
        self.arguments: set[int] = set()  # the ids of their tensors
        self._single: weakref.WeakSet[Storage] = weakref.WeakSet()
        self._row_values: weakref.WeakKeyDictionary[Storage, tuple[KeptStack, int, Any]] = (
            weakref.WeakKeyDictionary()
        )
        # Those of them that are captured.
        self.captured_rows: dict[Storage, tuple[KeptStack, int]] = {}
        self._constrained: list[Storage] = []
        self._annotated: weakref.WeakSet[Storage] = weakref.WeakSet()
        self.at_end: list[Callable[[], None]] = []
        # The tensors whose .data the step has assigned, by ids, with payload and spec of before.
        self.new_data: dict[int, tuple[Any, Any, Any]] = {}
        # Questions about numbers that Python knows, which the step branched on, with the answers.
        self.answers: list[tuple[Callable[[], Any], Any]] = []
        # What Python's own numbers have come to, by what it was computed of (``scalar``).
        self.numbers: dict[Hashable, tuple[Any, Sequence[Any]]] = {}
        # The nodes of the numbers that only the program knows, what item() gives, in their order.
        self.items: weakref.WeakKeyDictionary[Any, None] = weakref.WeakKeyDictionary()
        # The value computed last, and the region that torch's checkpoint is computing again.
        self.latest: Any = None
        self.recomputation: Recomputation | None = None
        self.sources = Sources()
        # What is answered where Python asks for a truth value; None where nobody looks at flags.
        self.truths: Truths | None = None

    def give_rows(
        self, rows: Sequence[tuple[Storage, KeptStack, int]], stand_ins: Sequence[Any]
    ) -> None:
        """Say what stands in this trace for storages that are rows of a stack, which stays whole.

        Args:
            rows: The storages, with their stacks and lanes.
            stand_ins: A value of the trace for each.
        """
        for (storage, stack, lane), stand_in in zip(rows, stand_ins, strict=True):
            self._row_values[storage] = (stack, lane, stand_in)

    def capture(self, storage: Storage) -> None:
        """Record that the step depends on `storage`."""
        if storage in self.captured or storage in self._created:
            return
        row = self._row_values.get(storage)
        if row is not None and storage.row == row[:2]:
            storage.array = row[2]
            self.captured_rows[storage] = row[:2]
        self.captured[storage] = storage.array

    def depend_on(self, storage: Storage) -> None:
        """Record after the trace that an older storage is to be the same in each run."""
        if storage.row is None and storage not in self._created:
            self.captured.setdefault(storage, storage.array)

    def given_to(self, inner: Trace) -> None:
        """Let a trace inside of this one know what this one was given."""
        inner._row_values, inner.host = self._row_values, self.host
        inner.truths = self.truths

    def array_before(self, storage: Storage) -> jax.Array | None:
        """Return the array of a storage that is older and was not written to; None for others."""
        if storage not in self.captured or storage in self.state:
            return None
        row = self.captured_rows.get(storage)
        return self.captured[storage] if row is None else row[0].row(row[1])

    def lasting(self) -> list[Storage]:
        """Return the storages made by the step that something outside still holds."""
        self.rows.forget()
        gc.collect()
        return [s for s in self._created if s not in self.captured]

    def lasting_beyond(self, arguments: Iterable[Any]) -> list[Storage]:
        """Return the lasting storages that are no argument's."""
        passed = {id(tensor._storage) for tensor in arguments if tensor is not None}
        return [s for s in self.lasting() if id(s) not in passed]

    def adopt(self, storage: Storage) -> None:
        """Treat `storage` as made by the step."""
        self._created[storage] = None
        if is_tracer(storage.array):
            self.latest = storage.array
        if self.recomputation is not None:
            self.recomputation.adopt(storage)

    def adopt_argument(self, storage: Storage) -> None:
        """Treat `storage`, which stands for an argument, as made by the step."""
        self._created[storage] = None
        self._arguments[storage] = None

    def refuse_new_shape(self, tensor: Any) -> None:
        """Raise for a tensor from before the step that becomes its own view."""
        is_argument = id(tensor) in self.arguments
        if is_argument or not any(new is tensor for new in tracked_objects()):
            what = "an argument" if is_argument else "a tensor from before the call"
            raise CompileError(
                f"A compiled step changed the shape of {what} of shape={tuple(tensor.shape)} "
                "in place (t_, unsqueeze_, squeeze_, transpose_). Python runs only while the step "
                "is traced, and in later calls the tensor would keep its shape. Use the op that "
                "returns a view, or return the result."
            )

    def note_new_data(self, tensor: Any) -> None:
        """Record that a tensor that is older than the step is about to get another payload."""
        payload, spec = tensor._local_tensor, tensor._spec
        storage: Any = getattr(payload, "_storage", None)
        if not self.owns(storage):
            self.new_data.setdefault(id(tensor), (tensor, payload, spec))

    def keep_single(self, storages: Iterable[Storage]) -> None:
        """Let storages not become rows of a stack: who made them compares their arrays later."""
        self._single.update(storages)

    def may_be_row(self, storage: Storage) -> bool:
        """Tell whether nobody looks for the very array that `storage` has."""
        return storage not in self._arguments and storage not in self._single

    def owns(self, storage: Storage) -> bool:
        """Tell whether the step made `storage` itself: it is neither captured nor an argument."""
        return storage in self._created and storage not in self._arguments

    def constrain(self, storage: Storage, sharding: Any) -> None:
        """Constrain what the step reads of a storage that it does not own; None takes that back."""
        storage.constraint = sharding
        self._constrained.append(storage)

    def has_cleared(self, storage: Storage) -> bool:
        """Tell whether the step took back what a storage, older than itself, was told."""
        return storage.constraint is None and storage in self._constrained

    def note_annotated(self, storage: Storage) -> None:
        """Record that the step annotated a storage of its own."""
        self._annotated.add(storage)

    def undo(self) -> None:
        """Give every captured storage back the array it had before the trace."""
        for storage, array in self.captured.items():
            if storage in self.captured_rows:
                stack, lane = self.captured_rows[storage]
                stack.take_back(storage, lane)
            else:
                storage.array = array

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Make this the trace that storages report to; on an error undo what it changed."""
        global _active, _thread
        _active, _thread = self, threading.get_ident()
        try:
            with honouring_checkpoints(), old_objects_aside():
                yield
        except BaseException:
            self.undo()
            raise
        finally:
            _active = None
            for storage in self._constrained:
                storage.constraint = None
            for storage in self._annotated:
                storage.unannotated = None
            for undo in reversed(self.at_end):
                undo()


def active_trace() -> Trace | None:
    """Return the trace in progress in this thread, or None."""
    active = _active
    return active if active is not None and threading.get_ident() == _thread else None


def host_input(tensor: torch.Tensor) -> Any | None:
    """Return what stands for a plain tensor in the step that is traced; None for a constant."""
    trace = active_trace()
    return None if trace is None or trace.host is None else trace.host.input_of(tensor)


def refuse_nesting() -> None:
    """Raise when a compiled step is called while another one is traced in this thread."""
    if active_trace() is not None:
        raise CompileError(
            "A compiled step was called inside the trace of another one. One program cannot hold "
            "another that keeps its own state. Call the plain function inside the step, and "
            "compile only the outermost one."
        )


def refuse_transforms(arguments: Any) -> None:
    """Raise when a compiled step is to be transformed, or differentiated in forward mode."""
    interpreter = peek_interpreter_stack()
    forward = torch.autograd.forward_ad
    is_dual = forward._current_level >= 0 and any(
        forward.unpack_dual(leaf).tangent is not None
        for leaf in tree_leaves(arguments)
        if isinstance(leaf, torch.Tensor)
    )
    if interpreter is not None or is_dual:
        transform = "" if interpreter is None else interpreter.key().name.lower()
        what = f"inside of torch.func's {transform}" if transform else "with a tangent"
        raise CompileError(
            f"A compiled step was called {what}. Its program has no derivative and no batch of "
            "its own, which torch.func and forward mode would ask for. Transform the plain "
            "function, and compile what calls the transform: xd.compile(torch.func.jvp(...))."
        )


def array_before(storage: Storage) -> Any:
    """Return the array of a storage, as it was before the trace in progress if that only reads it.

    For questions about how a tensor lies: of what a trace computes nobody knows that yet.
    """
    trace = active_trace()
    array = None if trace is None else trace.array_before(storage)
    return storage.array if array is None else array


def array_read(storage: Storage) -> Any:
    """Return the array that a read of a storage sees; the trace in progress captures it."""
    trace = active_trace()
    if trace is None:
        return storage.array
    trace.capture(storage)
    recomputation = trace.recomputation
    return storage.array if recomputation is None else recomputation.array_of(storage)


def note_write(storage: Storage) -> None:
    """Report that a storage is about to be rebound."""
    if (trace := active_trace()) is not None:
        trace.capture(storage)
        if storage in trace.captured:
            trace.state[storage] = None


class MaskError(CompileError):
    """A step that is traced asks how many elements a mask selects."""


def refuse_read(what: str) -> NoReturn:
    """Raise the error for Python that needs a value which exists only when the program runs."""
    instead = (
        "Return the tensor from the step and read it outside, or use torch.where instead of `if`."
    )
    if "mask" in what:
        instead = (
            "Sums, means and losses of x[mask], and what is computed with each element, need no "
            "such number. Else write torch.where(mask, x, 0), or return x[mask] from the step."
        )
    raise (MaskError if "mask" in what else CompileError)(
        f"A tensor's value was {what} while a step was traced. The step becomes one program, so "
        f"its tensors have no values yet. {instead}{_user_line()}"
    )


# What torch's C++ says where it looks into the memory of a tensor that has none, and Python of
# f"{loss.item():.3f}".
_UNREADABLE = {
    "its data is not allocated yet": "read by an op that takes a tensor of the host there",
    "unsupported format string passed to Sym": "written as text with a format",
}


@contextlib.contextmanager
def refusing_reads() -> Iterator[None]:
    """Turn the errors of others for a value that they cannot read into ours."""
    try:
        yield
    except (RuntimeError, TypeError) as error:
        for text, what in _UNREADABLE.items():
            if text in str(error):
                refuse_read(what)
        raise


def refuse_write_to_host(target: Any) -> None:
    """Raise where a step that is traced writes what it computes to a plain CPU tensor."""
    if active_trace() is not None:
        raise CompileError(
            "A compiled step wrote what it computes on the mesh to a plain CPU tensor of "
            f"shape={tuple(target.shape)}, a parameter or a buffer of a module that was not "
            "distributed for instance. The values exist only when the program runs, after Python "
            "has gone on. Put it on the mesh before the step: distribute_module(model, mesh), or "
            "distribute_tensor." + _user_line()
        )


def note_write_to_host(target: torch.Tensor, put: Callable[[torch.Tensor], torch.Tensor]) -> bool:
    """Note the line of the step that makes a plain tensor which is to lie on the mesh.

    Returns:
        Whether there is one. The trace goes on, to find others, and is made once more.
    """
    trace = active_trace()
    return trace is not None and trace.host is not None and trace.host.tape.note(target, put)


def _user_line() -> str:
    frame = user_frame()
    if frame is None:
        return ""
    file, number = frame.f_code.co_filename, frame.f_lineno
    return f" (at {file}:{number}: {linecache.getline(file, number).strip()})"


def is_tracer(array: Any) -> bool:
    """Tell whether a JAX value belongs to a trace in progress."""
    import jax.core

    return isinstance(array, jax.core.Tracer)
