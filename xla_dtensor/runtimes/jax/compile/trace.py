"""One trace of a step: the Python step runs once on tracers, and what it touched is written down.

What a trace needs to know of the time before it (``Before``) is taken down first, and is what is
restored where the trace, or compiling what it found, fails: gradients, optimizers, modules, tensors
of the host and random generators. Storages are given their arrays back by the trace itself.
"""

from __future__ import annotations

import contextlib
import dis
from collections import Counter
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from types import CodeType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch.utils._pytree import (
    TreeSpec,
    keystr,
    tree_flatten,
    tree_flatten_with_path,
    tree_unflatten,
)

from xla_dtensor.core.errors import ArgumentTypeError
from xla_dtensor.runtimes.bounds import are_checked
from xla_dtensor.runtimes.guards import Recording
from xla_dtensor.runtimes.guards.lent import Arithmetic, Lending, is_number
from xla_dtensor.runtimes.guards.owners import Effect
from xla_dtensor.runtimes.guards.values import Sighting
from xla_dtensor.runtimes.host_work import HostTape
from xla_dtensor.runtimes.host_work.iterators import Iterators
from xla_dtensor.runtimes.host_work.python_random import PythonRandom, is_python_random
from xla_dtensor.runtimes.host_work.tape import TraceAgainError, is_host, memory_key
from xla_dtensor.runtimes.jax.arrays.constants import TracedProgram, traced_program
from xla_dtensor.runtimes.jax.arrays.private import around_listeners
from xla_dtensor.runtimes.jax.arrays.storage import Storage
from xla_dtensor.runtimes.jax.arrays.trace import Trace, refusing_reads
from xla_dtensor.runtimes.jax.arrays.values import numpy_from_torch
from xla_dtensor.runtimes.jax.compile.effects import Plan, RunEffects
from xla_dtensor.runtimes.jax.compile.gradients import GRADIENTS, DroppedGradients, GradientEffects
from xla_dtensor.runtimes.jax.compile.host_inputs import HostInputs, HostPart, refuse_writes_to_host
from xla_dtensor.runtimes.jax.compile.layers.rows import Rows, gather, placed_values
from xla_dtensor.runtimes.jax.compile.layers.slots import row_type
from xla_dtensor.runtimes.jax.compile.layers.stacks import all_rows
from xla_dtensor.runtimes.jax.compile.layers.watch import Watch, watching
from xla_dtensor.runtimes.jax.compile.moving import (
    Aliases,
    MovingData,
    MovingTensor,
    moving_data,
    moving_tensors,
)
from xla_dtensor.runtimes.jax.compile.optimizer import (
    OptimizerInputs,
    input_of,
    lent,
    lent_tensor,
    lifted,
)
from xla_dtensor.runtimes.jax.compile.trace_values import (
    Same,
    bound,
    inner,
    refuse_manual,
    replaced,
    split_outputs,
    write_new_data,
    written_arguments,
)
from xla_dtensor.runtimes.jax.eager.checks import Truths, with_flags
from xla_dtensor.runtimes.jax.eager.scalar import LentNode, note_answer, store_items
from xla_dtensor.runtimes.jax.eager.tensor import JaxTensor
from xla_dtensor.runtimes.live_objects import live_objects
from xla_dtensor.runtimes.nested import Containers, Writes
from xla_dtensor.runtimes.opened import close_all, open_all
from xla_dtensor.runtimes.state import naming_modules, trace_settings

__all__ = [
    "Before",
    "Call",
    "Key",
    "TracedStep",
    "traced_step",
    "unread_arguments",
]


# ------------------------------------------------------------- What a compiled step is called with
#
# What of it tells programs apart, and why a call has none.
#
# Of a tensor a program takes the values; its shape, dtype, sharding and labels are part of the
# program, and so is which of the tensors are one and the same. Anything else is a Python value, and
# part of the program as it is. An argument that the step's code never names is nobody's.
#
# A number that was seen to change is lent (``guards.lent``): only its type tells programs apart.

_ANY_NUMBER = "any number of its type"


class Key(NamedTuple):
    """What tells programs apart.

    Attributes:
        leaves: Of each leaf of the arguments what is part of the program.
        same: Of each leaf the place of the first one that is the same tensor.
        tree: How they nest.
        settings: What else tracing depends on, by name.
    """

    leaves: tuple[Any, ...]
    same: tuple[int, ...]
    tree: TreeSpec
    settings: tuple[tuple[str, Any], ...]


class Call:
    """One call of a step.

    Args:
        args: Its arguments.
        kwargs: Its keyword arguments.

    Attributes:
        given: Both.
        leaves: The leaves of both.
        tree: How they nest.
        tensors: The payload of each leaf that is a tensor; None for others.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.given = (args, kwargs)
        self.leaves, self.tree = tree_flatten(open_all((args, kwargs)))
        self.tensors: list[JaxTensor | None] = []
        self.views: Container[int] = ()
        self.lent: Container[int] = ()

    @classmethod
    def of(
        cls, args: tuple[Any, ...], kwargs: dict[str, Any], unread: Container[int | str]
    ) -> Call:
        """Return a call without the arguments that the step does not read.

        Args:
            args: Its arguments.
            kwargs: Its keyword arguments.
            unread: Places and names of the arguments that no code reads.
        """
        if not unread:
            return cls(args, kwargs)
        arguments = tuple(None if i in unread else argument for i, argument in enumerate(args))
        return cls(arguments, {name: None if name in unread else v for name, v in kwargs.items()})

    def bind(self, views: Container[int] = (), lent: Container[int] = ()) -> None:
        """Find the payloads; plain tensors are put on the devices.

        Args:
            views: The places of arguments that stay views of their base, which the program takes
                in their stead. Other views are cut out first, so that a program fits any row.
            lent: The places of numbers that are lent.
        """
        self.views, self.lent = views, lent
        self.tensors = [_payload(leaf, i in views) for i, leaf in enumerate(self.leaves)]

    def storages(self) -> list[Storage]:
        """Return the storages of the tensors among the leaves."""
        return [tensor._storage for tensor in self.tensors if tensor is not None]

    def has(self, tensor: torch.Tensor) -> bool:
        """Tell whether a tensor is one of the leaves."""
        return any(leaf is tensor for leaf in self.leaves)

    def key(self) -> Key:
        """Return what tells this call's program from others."""
        pairs = zip(self.leaves, self.tensors, strict=True)
        leaves = tuple(self._described(i, leaf, t) for i, (leaf, t) in enumerate(pairs))
        first: dict[int, int] = {}
        storages = [None if t is None else id(t._storage) for t in self.tensors]
        same = tuple(i if s is None else first.setdefault(s, i) for i, s in enumerate(storages))
        return Key(leaves, same, self.tree, trace_settings())

    def name(self, place: int) -> str:
        """Return how errors call a leaf: ``args[1]['mask']``."""
        path: Any = tree_flatten_with_path(open_all(self.given))[0][place][0]
        return f"{('args', 'kwargs')[path[0].idx]}{keystr(path[1:])}"

    def changed_numbers(self, key: Key, other: Key) -> set[int]:
        """Return the places of the arguments that are other numbers than in a key, if only they."""
        pairs = enumerate(zip(key.leaves, other.leaves, strict=False))
        changed = {place for place, (mine, theirs) in pairs if mine != theirs}
        are_alike = key._replace(leaves=()) == other._replace(leaves=())
        numbers = all(is_number(self.leaves[n]) for n in changed)
        types = all(key.leaves[n][0] is other.leaves[n][0] for n in changed)
        return changed if are_alike and numbers and types else set()

    def difference(self, key: Key, other: Key) -> str:
        """Return what a program that was made for `other` does not fit this call for."""
        if key.tree != other.tree:
            return "arguments that nest in another way"
        for place, (mine, theirs) in enumerate(zip(key.leaves, other.leaves, strict=True)):
            if mine != theirs:
                return f"{self.name(place)} changed from {_text(theirs)} to {_text(mine)}"
        if key.same != other.same:
            return "other ones of the arguments are the same tensor"
        old_settings = dict(other.settings)
        for name, value in key.settings:
            if old_settings.get(name) != value:
                return f"{name} changed from {old_settings.get(name)} to {value}"
        return "another setting"

    def _described(self, place: int, leaf: Any, tensor: JaxTensor | None) -> Any:
        if tensor is not None:
            spec = getattr(leaf, "_spec", None)
            return (
                type(leaf),
                tuple(tensor.shape),
                tensor.dtype,
                tensor._storage.lies,
                spec and spec.placements,
                getattr(leaf, "_varying", None),
                getattr(leaf, "_uneven", None),
                leaf.requires_grad,
                _grad(leaf),
                _geometry(tensor) if place in self.views else None,
            )
        if isinstance(leaf, np.ndarray):
            raise ArgumentTypeError(
                f"A compiled step was called with {self.name(place)}, a NumPy array of "
                f"shape={leaf.shape}. Its elements would be part of the program, which is made "
                "for one call's. Pass torch.from_numpy(array)."
            )
        if place in self.lent and is_number(leaf):
            return type(leaf), _ANY_NUMBER
        # 0.0 and -0.0 are equal, and so are 1, 1.0 and True.
        value = repr(leaf) if isinstance(leaf, float | complex) else leaf
        return type(leaf), value if _has_hash(value) else Same(value)


def unread_arguments(step: Callable[..., Any]) -> frozenset[int | str]:
    """Return the places and names of a step's arguments that its code never reads.

    Example:
        >>> sorted(unread_arguments(lambda batch, batch_index: batch), key=str)
        [1, 'batch_index']
    """
    function = getattr(step, "__func__", step)
    code = getattr(function, "__code__", None)
    if code is None or hasattr(function, "__wrapped__"):
        return frozenset()
    codes = list(_codes_in(code))
    if any(_SEE_LOCALS & {*code_object.co_names} for code_object in codes):
        return frozenset()
    steps = [
        instruction for code_object in codes for instruction in dis.get_instructions(code_object)
    ]
    read = {
        name
        for instruction in steps
        if _LOADS in instruction.opname
        for name in _several(instruction.argval)
    }
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    bound = int(hasattr(step, "__self__"))
    places = {
        name: place - bound for place, name in enumerate(code.co_varnames[: code.co_argcount])
    }
    unread = [name for name in names[bound:] if name not in read]
    # A keyword argument may have the name of a positional-only one.
    by_name = set(unread).difference(code.co_varnames[: code.co_posonlyargcount])
    return frozenset([*by_name, *(places[name] for name in unread if name in places)])


def _codes_in(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes_in(constant)


_SEE_LOCALS = frozenset({"locals", "eval", "exec", "vars", "dir"})
_LOADS = "LOAD_"


def _several(names: Any) -> tuple[Any, ...]:
    return names if isinstance(names, tuple) else (names,)


def _has_hash(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def _geometry(tensor: JaxTensor) -> Any:
    """Return what tells a view from other views of one base."""
    kinds = tuple(step.read.__code__ for step in tensor._steps)
    return tensor.stride(), tensor.storage_offset(), kinds


def _payload(leaf: Any, stays_view: bool) -> JaxTensor | None:
    refuse_manual(leaf, "called with", "before the call")
    tensor = inner(leaf)
    if tensor is not None:
        if tensor._steps and not (stays_view and tensor._storage.manual is None):
            storage = Storage(tensor.raw(), manual=tensor._storage.manual)
            storage.is_part = True
            return JaxTensor(storage, shape=tuple(tensor.shape), stride=tensor.stride())
        return tensor
    if isinstance(leaf, torch.Tensor):
        return JaxTensor(Storage(jnp.array(numpy_from_torch(leaf))))
    return None


def _grad(leaf: torch.Tensor) -> Same | None:
    """Return what tells an argument's gradient from others, which a program would add to."""
    has_one = leaf.requires_grad and leaf.is_leaf and leaf.grad is not None
    return Same(leaf.grad) if has_one else None


_TENSOR_FACTS = (
    "shape",
    "dtype",
    "sharding",
    "placements",
    "axes",
    "sizes",
    "requires_grad",
    "grad",
    "view",
)


def _text(described: Sequence[Any]) -> str:
    kind, *facts = described
    if len(facts) == 1:
        return str(facts[0]) if isinstance(facts[0], str) else repr(facts[0])
    named = dict(zip(_TENSOR_FACTS, facts, strict=True))
    shown = ("shape", "dtype", "placements", "requires_grad", "grad")
    listed = ", ".join(f"{name}={named[name]}" for name in shown if named[name] is not None)
    view = named["view"]
    of_base = "" if view is None else f", a view with stride={view[0]} from element {view[1]} on"
    return f"a {kind.__name__} of {listed}{of_base}"


# ----------------------------------------------------------------------------- One trace of a step


@dataclass(frozen=True)
class PythonState:
    """Gradients and optimizer state as they were. Holds them alive.

    A step closes over these without listing them, and no Python of its own may be seen to change
    them, so they are found among the objects that Python's garbage collector knows.

    Args:
        gradients: Leaves that may have a gradient, with the one that they had.
        tables: Dicts, with what they held.
        host_memories: The memories of plain CPU tensors, as ``memory_key`` tells them apart.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> before = PythonState.now()
        >>> weight.sum().backward()
        >>> before.restore()
        >>> weight.grad is None
        True
    """

    gradients: list[tuple[torch.Tensor, torch.Tensor | None]]
    tables: list[tuple[dict[Any, Any], dict[Any, Any]]]
    host_memories: set[int] = field(default_factory=set)

    @classmethod
    def now(cls) -> PythonState:
        """Take down what holds at present."""
        state = cls([], [])
        readers: dict[type, Callable[[Any], None] | None] = {}
        for instance in live_objects(torch.Tensor, torch.optim.Optimizer):
            kind = type(instance)
            if kind not in readers:
                readers[kind] = state._reader(kind)
            reader = readers[kind]
            if reader is not None:
                reader(instance)
        return state

    def _reader(self, kind: type) -> Callable[[Any], None] | None:
        if issubclass(kind, torch.Tensor):
            return self._read_tensor
        return self._read_optimizer if issubclass(kind, torch.optim.Optimizer) else None

    def _read_tensor(self, tensor: torch.Tensor) -> None:
        # A view whose base was written where autograd could not follow raises, and so does what
        # torch.func has wrapped: a failed transform leaves that in its traceback.
        with contextlib.suppress(RuntimeError):
            if is_host(tensor):
                self.host_memories.add(memory_key(tensor))
            # One that is frozen may have a gradient of the time before, or another time after.
            may_have_one = tensor.requires_grad or isinstance(tensor, torch.nn.Parameter)
            if tensor.is_leaf and (may_have_one or tensor.grad is not None):
                self.gradients.append((tensor, tensor.grad))

    def _read_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        tables: list[Any] = [optimizer.state, *optimizer.param_groups]
        seen: set[int] = set()
        while tables:
            table = tables.pop()
            if isinstance(table, dict) and id(table) not in seen:
                seen.add(id(table))
                self.tables.append((table, dict(table)))
                tables += table.values()

    def restore(self) -> None:
        """Make it so again."""
        for tensor, grad in self.gradients:
            if tensor.grad is not grad:
                tensor.grad = grad
        for table, entries in self.tables:
            if len(table) != len(entries) or any(table[k] is not v for k, v in entries.items()):
                table.clear()
                table.update(entries)


@dataclass(frozen=True)
class Before:
    """What there was before a trace.

    Args:
        python: Gradients and optimizers.
        recording: Of what the step reads and writes, not begun.
        tape: Of the host, not begun.
        random: Generators that a step must not use.
        iterators: Those that a step must not take from.
        readers: Are told of an optimizer whose settings or state the step's own code reads.
        numbers: Python's numbers that are inputs, and where to read them.
        lending: The numbers that the trace is lent.
        data: The payloads of tensors whose .data the trace assigned.
    """

    python: PythonState
    recording: Recording
    tape: HostTape
    random: PythonRandom
    iterators: Iterators
    readers: list[Callable[[torch.optim.Optimizer], None]]
    numbers: list[tuple[Storage, Callable[[], float]]]
    lending: Lending
    data: dict[int, tuple[Any, Any, Any]] = field(default_factory=dict)

    @classmethod
    def of(cls, step: Callable[..., Any], call: Call, names: Set[Any] = frozenset()) -> Before:
        """Take down what there is before `step` is traced for a call.

        Args:
            step: The step.
            call: The call.
            names: Those that were seen to be given other values, numbers among them.
        """
        python = PythonState.now()
        tape, random, iterators = HostTape(python.host_memories), PythonRandom(), Iterators()
        readers: list[Callable[[torch.optim.Optimizer], None]] = []

        def note(value: Any) -> None:
            if isinstance(value, torch.optim.Optimizer):
                for tell in readers:
                    tell(value)
            elif isinstance(value, torch.Generator):
                tape.note_generator(value)
            else:
                (random if is_python_random(value) else iterators).note(value)

        numbers: list[tuple[Storage, Callable[[], float]]] = []
        node = partial(LentNode, input_of=partial(input_of, numbers))
        lending = Lending(names, Arithmetic(node, note_answer))
        recording = Recording(step, call.leaves, note, lending)
        return cls(python, recording, tape, random, iterators, readers, numbers, lending)

    def restore(self) -> None:
        """Make it so again."""
        for tensor, payload, spec in self.data.values():
            tensor._local_tensor, tensor._spec = payload, spec
        self.recording.rewind()
        self.python.restore()
        self.tape.put_back()
        self.random.put_back()


@dataclass
class TracedStep:
    """What a trace found.

    Args:
        trace: The storages that it touched.
        watch: What it took for granted.
        numbers: Python's numbers that are inputs, and where to read them.
        arguments: The storages of the call's tensors.
        truths: The truth values that it takes for granted.
        program: The jaxpr, with the owners of its constants.
        host: What the host does for each run; None for nothing.
        moving: The tensors that are read by name.
        data: The tensors whose data are looked up in each call.
        gradients: What it did to parameters' gradients.
        effects: What Python assigned.
        aliases: The arguments that it also finds by name.
        writes: The containers among the arguments that it writes to.
        lasting: What it made and left behind.
        written: Positions of the arguments that it wrote to.
        tree: How its results nest.
        static: Of each result how to wrap it.
        pinned: Of each result how it has to lie.
        flags: What its first results say of its checks; None without checks.
    """

    trace: Trace
    watch: Watch
    numbers: list[tuple[Storage, Callable[[], float]]]
    arguments: list[Storage]
    truths: Truths
    program: TracedProgram = field(init=False)
    host: HostPart | None = field(init=False)
    moving: list[MovingTensor] = field(init=False)
    data: list[MovingData] = field(init=False)
    gradients: GradientEffects = field(init=False)
    effects: RunEffects = field(init=False)
    aliases: Aliases = field(init=False)
    writes: Writes = field(init=False)
    lasting: list[Storage] = field(init=False)
    written: list[int] = field(init=False)
    tree: TreeSpec = field(init=False)
    static: list[Any] = field(init=False)
    pinned: list[Any] = field(init=False)
    flags: Any = None

    def alone(self) -> set[Storage]:
        """Return the storages that are no rows of stacks: they get other values between runs."""
        moving = {moving_tensor.storages[0] for moving_tensor in self.moving} - {None}
        moving |= {entry.storage for entry in self.data}
        alone = {*(storage for storage, _ in self.numbers), *self.host_storages(), *moving}
        return {storage for storage in alone if storage is not None}

    def donated(self) -> list[int]:
        """Return the places of the arguments that are written to; none that is given twice."""
        counts = Counter(self.arguments)
        return [place for place in self.written if counts[self.arguments[place]] == 1]

    def host_storages(self) -> list[Storage]:
        """Return the storages of the plain tensors that go into the program."""
        return [] if self.trace.host is None else self.trace.host.storages


def traced_step(
    step: Callable[..., Any],
    call: Call,
    before: Before,
    lent_names: Collection[str],
    made: Container[Storage] = (),
    names: Collection[Any] = (),
    put: Mapping[tuple[str, int], Callable[[torch.Tensor], torch.Tensor]] | None = None,
    truths: Truths | None = None,
) -> TracedStep:
    """Trace a step.

    Args:
        step: The step.
        call: What it is called with.
        before: What there was before.
        lent_names: The settings of optimizers that are inputs.
        made: The storages that earlier programs of the step made.
        names: The names that were seen to be given other tensors.
        put: What puts on the mesh the plain tensors that lines of the program make.
        truths: What its branches are answered.

    Returns:
        What was found. The tensors of the step have their values of before.
    """
    tensors, numbers = call.tensors, before.numbers
    lend = partial(lent, numbers), partial(lent_tensor, numbers)
    inputs = OptimizerInputs(lifted, *lend, lent_names, gather, before.python.tables)
    before.readers.append(inputs.read)
    tape, recording = before.tape, before.recording
    tape.put = put or {}
    trace, watch = Trace(Rows(), HostInputs(tape)), Watch(inputs, recording, before.lending)
    trace.truths, trace.new_data = truths or Truths(), before.data
    outcome = TracedStep(trace, watch, numbers, call.storages(), trace.truths)
    rows = all_rows()
    assigned: list[Effect] = []
    as_given: list[Any] = []

    def traced(arrays: Sequence[jax.Array], of_rows: Sequence[jax.Array]) -> Any:
        trace.give_rows(rows, of_rows)
        with bound(tensors, arrays, trace), watching(watch, tape), naming_modules(jax.named_scope):
            leaves = list(replaced(call.leaves, tensors))
            leaves = [before.lending.argument(*pair) for pair in enumerate(leaves)]
            args, kwargs = close_all(tree_unflatten(leaves, call.tree))
            containers = Containers.of((args, kwargs), call.given)
            # Who counts what JAX compiles is no part of the step.
            unheard = around_listeners(recording.pause, recording.go_on)
            with refusing_reads(), recording, unheard:
                output = step(*args, **kwargs)
            outcome.writes, contents = containers.written()
            outputs = (output, contents) if contents else output
            out_leaves, outcome.tree = tree_flatten(open_all(outputs))
            outcome.static, results, outcome.pinned = split_outputs(out_leaves)
            del out_leaves, args, kwargs, containers, output, contents, outputs
            write_new_data(trace)
            outcome.written, written = written_arguments(call.leaves, tensors, arrays, trace)
            refuse_writes_to_host(trace)
        watch.inputs.check_settings_unchanged()
        before.random.refuse_draws()
        before.iterators.refuse_moves()
        store_items(trace)
        outcome.lasting = trace.lasting_beyond(tensors)
        assigned.extend(recording.effects(tape.shares))
        as_given.extend(leaves)
        state, lasting = placed_values([*trace.state]), placed_values(outcome.lasting)
        for storage, array in zip(outcome.lasting, lasting, strict=True):
            if storage.row is not None:
                storage.array = array
        return results, state, lasting, written

    arrays = [storage.array for storage in outcome.arguments]
    dropped = DroppedGradients(before.python.gradients, trace.captured)
    with trace.active(), dropped.noting():
        recording.begin()
        types = [row_type(stack.array) for _, stack, _ in rows]
        closed = jax.make_jaxpr(traced)(arrays, types)
    trace.undo()
    if tape.missed:
        raise TraceAgainError("writes to plain tensors that it makes itself")
    _settle(outcome, call, before, assigned, as_given, dropped, made, names)
    outcome.program = traced_program(closed, [storage for storage, _, _ in rows], trace)
    if are_checked() or outcome.truths.checks or outcome.truths.branches:
        outcome.program, outcome.flags = with_flags(outcome.program)
        outcome.pinned = [*[None] * outcome.flags.num_leaves, *outcome.pinned]
    work, delivered = tape.finish()
    outcome.host = None if work is None else HostPart(work, outcome.host_storages(), delivered)
    return outcome


def _settle(
    outcome: TracedStep,
    call: Call,
    before: Before,
    assigned: list[Effect],
    given: Sequence[Any],
    notes: DroppedGradients,
    made: Container[Storage],
    names: Collection[Any],
) -> None:
    """Find what a finished trace reads by name, and what each of its runs leaves behind.

    Args:
        outcome: Of the trace.
        call: Its call.
        before: What there was before.
        assigned: What Python has assigned.
        given: The leaves of the arguments, as the step was given them.
        notes: What it did with gradients.
        made: The storages that earlier programs of the step made.
        names: The names that were seen to be given other tensors.
    """
    trace, watch, recording, tape = outcome.trace, outcome.watch, before.recording, before.tape
    seen = recording.sightings(names)
    for of, name, old, new in watch.inputs.replaced():
        seen.append(Sighting((id(of), name), old, new))
        assigned.append(Effect(partial(of.__setitem__, name), new, f"{name!r} of the state"))
    watch.inputs.settle()
    gradients = [pair for pair in before.python.gradients if not call.has(pair[0])]
    if GRADIENTS in names:
        # Not those of other models, which the step reads nothing of.
        pairs = [(inner(leaf), inner(grad), grad) for leaf, grad in gradients if grad is not None]
        there = [
            grad
            for *payloads, grad in pairs
            if any(p is not None and p._storage in trace.captured for p in payloads)
        ]
        seen += (Sighting((GRADIENTS, number), grad, grad) for number, grad in enumerate(there))
        names = {*names, *((GRADIENTS, number) for number in range(len(there)))}
    outcome.moving = moving_tensors(seen, trace, tape, made, names, {*outcome.arguments})
    left_out = {*outcome.arguments, *(entry.storages[0] for entry in outcome.moving)}
    of_optimizers = (*watch.inputs.parameters(), *watch.inputs.moments())
    outcome.data = moving_data(seen, of_optimizers, trace, names, left_out)
    by_name = {id(entry.found): entry.moving for entry in outcome.moving}
    of_gradients = trace.captured, notes, outcome.lasting, by_name
    outcome.gradients = GradientEffects.of(gradients, *of_gradients)
    found = [moving_tensor.found for moving_tensor in outcome.moving]
    arguments = call.leaves, given, call.tensors, call.views
    age, depend_on = recording.age(), trace.depend_on
    plan = Plan(outcome.lasting, *arguments, tape, found, outcome.gradients, age, depend_on)
    outcome.static = [plan.result(static) for static in outcome.static]
    outcome.effects = plan.effects(assigned)
    outcome.aliases = Aliases.of((sighting.found for sighting in seen), outcome.arguments)
    watch.settle(trace, tape, outcome.moving, outcome.data, outcome.aliases)
