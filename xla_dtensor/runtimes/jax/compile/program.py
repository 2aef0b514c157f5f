"""One compiled trace of a step: the executable, and which storages its inputs and outputs are."""

from __future__ import annotations

import contextlib
import gc
import signal
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
import torch
from jax.core import ShapedArray
from jax.extend.core import DropVar, Jaxpr, Literal, Var
from jax.sharding import AbstractMesh, Mesh, NamedSharding, SingleDeviceSharding
from torch.utils._pytree import TreeSpec, tree_unflatten

from mesh_utils import MeshError, find_chip
from xla_dtensor.core.errors import CompileError
from xla_dtensor.runtimes.guards.values import Change
from xla_dtensor.runtimes.jax.arrays.private import (
    constants_of,
    context_on_mesh,
    is_jaxpr,
    open_jaxpr,
    with_constants,
)
from xla_dtensor.runtimes.jax.arrays.products import keep_product_orders
from xla_dtensor.runtimes.jax.arrays.storage import Storage
from xla_dtensor.runtimes.jax.compile.effects import Given, Made, Run, RunEffects
from xla_dtensor.runtimes.jax.compile.gradients import GRADIENTS, GradientEffects, KnownLeaves
from xla_dtensor.runtimes.jax.compile.host_inputs import HostPart
from xla_dtensor.runtimes.jax.compile.layers.slots import Holding, Slot, Slots
from xla_dtensor.runtimes.jax.compile.layers.stacks import give_stack, stack_of
from xla_dtensor.runtimes.jax.compile.layers.watch import Watch
from xla_dtensor.runtimes.jax.compile.moving import Aliases, MovingData, MovingTensor
from xla_dtensor.runtimes.jax.compile.trace import Call, Key
from xla_dtensor.runtimes.jax.compile.trace_values import Delivered, inner
from xla_dtensor.runtimes.jax.eager.checks import Branch, OtherWayError, raise_flagged
from xla_dtensor.runtimes.nested import Writes
from xla_dtensor.runtimes.opened import close_all

__all__ = ["Blueprint", "KeptPrograms", "Program", "rehomed", "rehomed_sharding"]


# ------------------------------------------------------- The same traced program for other devices
#
# What XLA makes of a step on hardware that is not here.
#
# A step is traced on the devices of this process, and its program names them everywhere: in the
# constraints, in the types of all values (an array's type holds an abstract mesh, which knows the
# kind of device), in the meshes of manual regions and in the context of every equation. Tracing it
# anew for absent devices is not possible, because its parameters lie on those that are here. So the
# traced program is written anew, equation by equation, with each mesh put on other devices::
#
#   traced on   Mesh(f0=2, f1=2, f2=2)  over  CPU 0 .. CPU 7
#   rehomed     Mesh(f0=2, f1=2, f2=2)  over  TPU 0 .. TPU 7    place for place, the same axis names
#
#   a = sharding_constraint b   with P(f0) on the first          the same with P(f0) on the second
#   c = scan(jaxpr={...})                                        the same, its jaxpr rehomed as well
#
# Such a program can be lowered and compiled by the new devices' compiler, libtpu for a topology
# that nobody has booked, and run where the devices exist.
#
# Invariants:
#
# * Only devices change: names, sizes and kinds of axes, shapes, dtypes and the order of equations
#   stay.
# * All meshes of a program list the same number of devices in one order (JAX sees to that), so a
#   place in that order says everything. Meshes without axes ("none in use") stay what they are.
# * A jaxpr that is called from several places stays one jaxpr, so XLA's input grows by nothing.
# * A custom gradient rule survives as its forward program alone. A step's gradients are in the
#   program by then, and nobody differentiates it again.
# * Where a value lives on its device (host memory, say) is left to the new device's default.

# What makes the function that is lowered out of a jaxpr.
ProgramOf = Callable[[Any], Callable[..., Any]]


def rehomed(closed: Any, devices: Sequence[Any]) -> Any:
    """Return a closed jaxpr in which every mesh lies on other devices.

    Args:
        closed: What ``jax.make_jaxpr`` returned; meshes over N devices in one order.
        devices: N devices, those that take their places.

    Returns:
        A closed jaxpr. Its arrays (``consts``) are host arrays.

    Raises:
        CompileError: A mesh of the program has another size.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> double = jax.make_jaxpr(lambda x: x * 2)(jnp.ones(4))
        >>> jax.core.eval_jaxpr(rehomed(double, jax.devices()[:1]).jaxpr, [], jnp.ones(4))[0].sum()
        Array(8., dtype=float32)
    """
    return _Rehoming(devices).value(closed)


def rehomed_sharding(sharding: Any, devices: Sequence[Any]) -> Any:
    """Return a sharding over other devices; None, and what names no device, as it is.

    Args:
        sharding: A sharding of JAX, or None.
        devices: The devices that take the places of those that it names.
    """
    return _Rehoming(devices).value(sharding)


class _Rehoming:
    """One rewriting; remembers the jaxprs and meshes that it has seen."""

    def __init__(self, devices: Sequence[Any]) -> None:
        self._devices = np.empty(len(devices), dtype=object)
        self._devices[:] = devices
        # The originals are kept along: an id is a name only as long as its object lives.
        self._jaxprs: dict[int, tuple[Any, Any]] = {}
        self._meshes: dict[Any, Any] = {}

    def value(self, value: Any) -> Any:
        """Return any parameter of an equation, rehomed."""
        if is_jaxpr(value):
            return self._once(value, self._jaxpr)
        if isinstance(value, NamedSharding):
            return NamedSharding(self._mesh(value.mesh), value.spec)
        if isinstance(value, SingleDeviceSharding):
            return SingleDeviceSharding(self._devices[0])
        if isinstance(value, Mesh | AbstractMesh):
            return self._mesh(value)
        if isinstance(value, ShapedArray):
            return self._type(value)
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*map(self.value, value))
        if type(value) in (tuple, list):
            return type(value)(map(self.value, value))
        if type(value) is dict:
            return {name: self.value(entry) for name, entry in value.items()}
        return value

    def _once(self, old: Any, rewrite: Callable[[Any], Any]) -> Any:
        if id(old) not in self._jaxprs:
            self._jaxprs[id(old)] = (old, rewrite(old))
        return self._jaxprs[id(old)][1]

    def _mesh(self, mesh: Any) -> Any:
        if not mesh.axis_names:
            return mesh
        if mesh not in self._meshes:
            self._meshes[mesh] = self._moved(mesh)
        return self._meshes[mesh]

    def _moved(self, mesh: Any) -> Any:
        if mesh.size != len(self._devices):
            raise CompileError(
                f"A program over {mesh.size} devices was asked for over {len(self._devices)} "
                "others. Each device of the program needs one that takes its place. Pass as many "
                f"devices as the mesh {dict(mesh.shape)} has."
            )
        sizes = tuple(mesh.shape.values())
        new_mesh = Mesh(self._devices.reshape(sizes), mesh.axis_names, axis_types=mesh.axis_types)
        return new_mesh.abstract_mesh if isinstance(mesh, AbstractMesh) else new_mesh

    def _type(self, aval: Any) -> Any:
        sharding = getattr(aval, "sharding", None)
        if sharding is None or not sharding.mesh.axis_names:
            return aval
        return aval.update(sharding=self.value(sharding))

    def _jaxpr(self, jaxpr: Any) -> Any:
        if not isinstance(jaxpr, Jaxpr):
            return with_constants(self.value(open_jaxpr(jaxpr)), map(_on_host, constants_of(jaxpr)))
        constants = constants_of(jaxpr)
        variables: dict[Any, Any] = {}

        def atom(old: Any) -> Any:
            if isinstance(old, Literal):
                return Literal(_on_host(old.val), self.value(old.aval))
            if isinstance(old, DropVar):
                return DropVar(self.value(old.aval))
            if old not in variables:
                variables[old] = Var(self.value(old.aval))
            return variables[old]

        def atoms(old: Sequence[Any]) -> list[Any]:
            return [atom(variable) for variable in old]

        def equation(old: Any) -> Any:
            return old.replace(
                invars=atoms(old.invars),
                outvars=atoms(old.outvars),
                params={name: self.value(parameter) for name, parameter in old.params.items()},
                ctx=self._context(old.ctx),
            )

        new_jaxpr = jaxpr.replace(
            constvars=atoms(jaxpr.constvars),
            invars=atoms(jaxpr.invars),
            eqns=[equation(old) for old in jaxpr.eqns],
            outvars=atoms(jaxpr.outvars),
        )
        return with_constants(new_jaxpr, map(_on_host, constants)) if constants else new_jaxpr

    def _context(self, context: Any) -> Any:
        mesh = context.cur_abstract_mesh
        if mesh is None or not mesh.axis_names:
            return context
        return context_on_mesh(context, self._mesh(mesh))


@dataclass(frozen=True)
class Blueprint:
    """A traced program with all that lowering it takes, for these devices or for others.

    Args:
        jaxpr: The trace; its constants are inputs.
        program_of: Makes the function that is lowered out of a jaxpr.
        inputs: The types of that function's arguments, as ``jax.ShapeDtypeStruct``, in any nesting.
            Those of arrays that nobody has placed have no sharding.
        out_shardings: How its results are to lie.
        donated: The positions of the arguments whose memory the results take over.
    """

    jaxpr: Any
    program_of: ProgramOf
    inputs: tuple[Any, ...]
    out_shardings: Any
    donated: tuple[int, ...]

    @classmethod
    def of(
        cls,
        jaxpr: Any,
        program_of: ProgramOf,
        inputs: tuple[Any, ...],
        out_shardings: Any,
        donated: tuple[int, ...],
    ) -> Blueprint:
        """Make one from the arrays that the program will be given; they are not kept."""
        types = jax.tree.map(_type_of, inputs)
        return cls(jaxpr, program_of, types, out_shardings, donated)

    def lowered(self, *inputs: Any) -> Any:
        """Lower the program for the devices that it was traced on, and for these inputs."""
        return self._lower(self.jaxpr, self.out_shardings, inputs)

    def lowered_for(self, devices: Sequence[Any]) -> Any:
        """Lower the program for other devices.

        Args:
            devices: As many as the program runs on, in the order of the root mesh: the first takes
                the place of the first.

        Returns:
            ``jax.stages.Lowered``. ``compile()`` runs those devices' compiler.

        Raises:
            CompileError: The program runs on another number of devices, or on one only.
        """
        rehoming = _Rehoming(devices)
        if not any(isinstance(s, NamedSharding) for s in self._shardings()):
            raise CompileError(
                f"A step was asked for over {len(devices)} other devices. None of its tensors lies "
                "on a mesh, so its program is one device's. Make its parameters or its arguments "
                "with distribute_tensor, then call it and ask again."
            )

        def retyped(old: Any) -> Any:
            sharding = rehoming.value(old.sharding)
            return jax.ShapeDtypeStruct(old.shape, old.dtype, sharding=sharding)

        inputs = jax.tree.map(retyped, self.inputs)
        outs = jax.tree.map(rehoming.value, self.out_shardings)
        return self._lower(rehoming.value(self.jaxpr), outs, inputs)

    def _lower(self, jaxpr: Any, out_shardings: Any, inputs: Any) -> Any:
        program = self.program_of(jaxpr)
        jitted = jax.jit(program, donate_argnums=self.donated, out_shardings=out_shardings)
        lowered = jitted.lower(*inputs)
        keep_product_orders(lowered)
        return lowered

    def _shardings(self) -> list[Any]:
        return [leaf.sharding for leaf in jax.tree.leaves(self.inputs)]


def _on_host(constant: Any) -> Any:
    """Return a constant without its device, which JAX's own host arrays have in their type too."""
    return np.asarray(constant) if hasattr(constant, "dtype") else constant


def _type_of(array: Any) -> Any:
    if isinstance(array, jax.ShapeDtypeStruct):
        return array
    placed = array.sharding if getattr(array, "committed", False) else None
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=placed)


# -------------------------------------------------------------------- One compiled trace of a step


@dataclass(eq=False)
class Program:
    """A compiled trace. See :mod:`xla_dtensor.runtimes.jax.compile.step`.

    Args:
        executable: What XLA made.
        state: Read and written: inputs and outputs.
        read: Read only.
        constants: Arrays of the trace that are no storage's.
        places: Of each of the trace's constants its number among `state` and `read`; None for one
            of `constants`.
        lasting: References to what the step made and left behind; outputs.
        written: Positions of the arguments that the step wrote to.
        holding: What the trace's inputs and results are.
        numbers: Python's numbers that are read anew on every call, and where they go.
        out_tree: How the step's results nest.
        out_static: Of each result how to wrap it, or its value where it is no tensor.
        watch: What the trace took for granted.
        slots: Which of the storages travel as one array.
        blueprint: The trace itself, for other devices.
        flops: Floating-point operations of its products, on all devices together.
        gradients: What the trace did to parameters' gradients.
        again: Why the next call has to trace anew; None if it need not.
        digest: Equal for programs that do the same.
        host: What is done on the host for each run.
        moving: Tensors that are read by name.
        data: Tensors whose data are looked up.
        effects: What is assigned in Python after each run.
        aliases: The arguments that the step also finds by name.
        writes: The containers among the arguments that it writes to.
        flags: What the first results say of the step's checks; None without checks.
        branches: Which way it goes where the step's Python has two.
        last_call: The number of the last call that it has served.
    """

    executable: Any
    state: list[Storage]
    read: list[Storage]
    constants: list[Any]
    places: Sequence[int | None]
    lasting: list[Any]
    written: list[int]
    holding: Holding
    numbers: list[tuple[Storage, Callable[[], float]]]
    out_tree: TreeSpec
    out_static: list[Any]
    watch: Watch
    slots: Slots
    blueprint: Blueprint
    flops: int
    gradients: GradientEffects = field(default_factory=lambda: GradientEffects([], []))
    again: str | None = None
    digest: str = ""
    host: HostPart | None = None
    moving: list[MovingTensor] = field(default_factory=list)
    data: list[MovingData] = field(default_factory=list)
    effects: RunEffects = field(default_factory=lambda: RunEffects([], {}))
    aliases: Aliases = field(default_factory=Aliases)
    writes: Writes = field(default_factory=Writes)
    flags: Any = None
    branches: Sequence[Branch] = ()
    last_call: int = 0
    _has_run: bool = False
    _given: dict[int, bytes] = field(default_factory=dict)  # the numbers of the last run
    _found: list[torch.Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._known = {*self.state, *self.read}
        if self.host is not None:
            self.host.work.may_be_taken_back = bool(self.branches)

    @property
    def way(self) -> tuple[bool, ...]:
        """The answers to its branches."""
        return tuple(branch.answer for branch in self.branches)

    def peak_flops(self) -> float | None:
        """Return the peak of all its devices together, in bf16; None where nobody knows it."""
        arrays = jax.tree.leaves(self.executable.input_shardings)
        devices = max((s.device_set for s in arrays), key=len, default=())
        kinds = {device.device_kind for device in devices}
        if len(kinds) != 1:
            return None
        try:
            chip = find_chip(kinds.pop())
        except MeshError:
            return None
        peak = chip.peak("bf16")
        return None if peak is None else peak * len(devices) / chip.devices_per_chip

    def host_storages(self) -> Sequence[Storage]:
        """Return the storages of the plain tensors that go into the program."""
        return () if self.host is None else self.host.storages

    @property
    def num_arguments(self) -> int:
        """How many tensors a call gives to it."""
        return sum(map(len, self.blueprint.inputs[-2:]))

    @property
    def num_flags(self) -> int:
        """How many of the program's results are none of the step's."""
        return 0 if self.flags is None else self.flags.num_leaves

    def stale(self) -> Change | None:
        """Return why the program does not fit what Python holds now; None if it fits."""
        if self.again is not None:
            return Change(self.again, for_good=True)
        change = self.watch.broken()
        if change is not None:
            return change
        # Not for good: the program that made the gradients hangs them there again when it runs.
        why = self.gradients.broken()
        return None if why is None else Change(why, name=GRADIENTS)

    def prepare(self, arguments: Sequence[Storage]) -> Change | None:
        """Do the host's part of the next run; return why the program does not fit what it reads."""
        change = self._bind(arguments)
        if change is not None or self.host is None:
            return change
        why = self.host.prepare()
        return None if why is None else Change(why)

    def unfit(self, arguments: Sequence[Storage]) -> Change | None:
        """Return what `prepare` would; on the host nothing is done."""
        change = self._bind(arguments)
        if change is not None or self.host is None:
            return change
        why = self.host.work.otherwise()
        return None if why is None else Change(why)

    def _bind(self, arguments: Sequence[Storage]) -> Change | None:
        for moving_tensor in self.moving:
            work = None if self.host is None else self.host.work
            moving_tensor.bind(self.read, self.state, work)
        for entry in self.data:
            entry.bind(self.read, self.state)
        self._found = [entry.moving.there for entry in self.moving]
        if self.moving or self.data:
            self._known = {*self.state, *self.read}
            if len(self._known) < len(self.state) + len(self.read):
                return Change("two names have one tensor, and had one each")
        if not self.aliases.hold(self._known, arguments):
            return Change("an argument is a tensor that the step also finds by name, or was one")
        return None

    def run(self, arguments: Sequence[Storage], leaves: Sequence[Any] = ()) -> Any:
        """Run it.

        Args:
            arguments: The storages of the call's tensors.
            leaves: All leaves of its arguments.

        Returns:
            What the step returns.
        """
        write_settings = self.watch.inputs.after_run()
        for place, (storage, current) in enumerate(self.numbers):
            number = np.asarray(current(), storage.array.dtype)
            if self._given.get(place) != number.tobytes():  # 0.0 equals -0.0
                storage.array = _everywhere(number, storage.array.sharding)
                self._given[place] = number.tobytes()
        self.gradients.release(self.lasting)
        state = [_taken(slot, self.state) for slot in self.slots.state]
        read = [_taken(slot, self.read) for slot in self.slots.read]
        inputs, donated = self.holding.divided([s.array for s in arguments])
        with uninterrupted():
            outputs = self._executed(state, read, self.constants, inputs, donated)
            results, state, lasting, written = outputs
            for position, array in zip(self.written, written, strict=True):
                arguments[position].array = array
            for slot, array in zip(self.slots.state, state, strict=True):
                _give(array, [self.state[place] for place in slot])
            if self.flags is not None:
                self._raise_flagged(results)
            made = self._leave(lasting, arguments, leaves)
            self.gradients.repeat()
            write_settings()
        return self._outputs(iter(results[self.num_flags :]), made)

    def _raise_flagged(self, results: Sequence[jax.Array]) -> None:
        try:
            raise_flagged(self.flags, results)
        except OtherWayError:
            if self.host is not None:
                self.host.work.take_back()  # It is done once more for the program that is run.
            raise

    def _executed(self, *inputs: Any) -> Any:
        try:
            return self.executable(*inputs)
        except ValueError:
            # Nothing was run. Where somebody has written to a tensor in place, outside of the step,
            # it may lie otherwise than when the step was compiled.
            wanted = self.executable.input_shardings[0]
            if jax.tree.all(jax.tree.map(_lies_as, inputs, wanted)):
                raise
            return self.executable(*jax.tree.map(_put, inputs, wanted))

    def lost(self, arguments: Sequence[Storage] = ()) -> str:
        """Return what a run with these arguments that failed has left, for an error."""
        storages = (*self.state, *arguments)
        arrays = [None if storage.row else storage.array for storage in storages]
        num_lost = sum(array is not None and array.is_deleted() for array in arrays)
        if num_lost:
            return (
                f"{num_lost} tensors that the step writes to were given to the program that "
                "failed, and have no values any more: load a checkpoint."
            )
        drawn = " What it draws of plain CPU tensors is drawn." if self.host is not None else ""
        return f"The model, the optimizer and gradients are as they were before the call.{drawn}"

    def _leave(
        self, arrays: Sequence[jax.Array], arguments: Sequence[Storage], leaves: Sequence[Any]
    ) -> Run:
        """Leave behind what the step makes: in the trace's tensors, later in new ones."""
        pairs = list(zip(self.slots.lasting, arrays, strict=True))
        own = {s[0]: a for s, a in pairs if len(s) == 1 and s[0] in self.effects.forms}
        for slot, array in pairs:
            if not self._has_run or slot[0] not in own:
                _give(array, [self.lasting[place]() for place in slot])
        delivered = {} if self.host is None else self.host.delivered
        given = Given(own, arguments, leaves, delivered, self._found)
        run = self.effects.do(given, is_first=not self._has_run)
        for moving_tensor in self.moving:
            if moving_tensor.number is not None and moving_tensor.is_alike:
                moving_tensor.moving.there = run.made.get(
                    moving_tensor.key, moving_tensor.moving.there
                )
        self._found = []
        self._has_run = True
        return run

    def _outputs(self, arrays: Iterator[jax.Array], run: Run) -> Any:
        leaves = [self._output(leaf, arrays, run) for leaf in self.out_static]
        return close_all(tree_unflatten(leaves, self.out_tree))

    def _output(self, leaf: Any, arrays: Iterator[jax.Array], run: Run) -> Any:
        if isinstance(leaf, Made):
            return leaf.part(run)
        if isinstance(leaf, Delivered):
            assert self.host is not None
            return self.host.delivered[leaf.number]
        return leaf(next(arrays)) if callable(leaf) else leaf.value


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Let Ctrl-C wait: a program's state is in its results until they are put where they belong."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is None:  # one that C code has put there
        yield
        return
    signals: list[Any] = []
    handler = signal.signal(signal.SIGINT, lambda *args: signals.append(args))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if signals and callable(handler):
            handler(*signals[0])


def _lies_as(array: Any, sharding: Any) -> bool:
    return sharding is None or array.sharding.is_equivalent_to(sharding, array.ndim)


def _put(array: Any, sharding: Any) -> Any:
    return array if sharding is None else jax.device_put(array, sharding)  # None: it is not read


def _taken(slot: Slot, storages: Sequence[Storage]) -> jax.Array:
    if len(slot) == 1:
        return storages[slot[0]].array
    return stack_of([storages[place] for place in slot]).array


def _give(array: jax.Array, storages: Sequence[Storage | None]) -> None:
    if len(storages) > 1:
        give_stack(array, storages)
    elif storages[0] is not None:
        storages[0].array = array


def _everywhere(number: np.ndarray[Any, Any], sharding: Any) -> jax.Array:
    if sharding.is_fully_addressable:
        return jax.device_put(number, sharding)
    # device_put would ask the other processes for theirs on each call (see ``lone_traces``).
    return jax.make_array_from_callback((), sharding, number.__getitem__)


# --------------------------------------------------------------------------------------------- Kept
#
# The programs that a compiled step keeps, and whether the next call finds what the last one left.
#
# Programs are kept under what a call is given, and under which leaves have gradients. Under one key
# there may be several, such as one for training and one for evaluation; the newest comes first, and
# of those whose Python branches on tensors the one that was right the last time.

_PROGRAMS_PER_KEY, _PROGRAMS_PER_WAY = 16, 4
_MOST_KEYS = 1024


class KeptPrograms:
    """See the module docstring."""

    def __init__(self) -> None:
        self._programs: dict[tuple[Key, frozenset[int]], list[Program]] = {}
        self._leaves = KnownLeaves()
        self._made: weakref.WeakSet[Storage] = weakref.WeakSet()

    @property
    def made(self) -> weakref.WeakSet[Storage]:
        """The storages that the programs' traces made, and that are still there."""
        return self._made

    def under(self, key: Key) -> Sequence[Program]:
        """Return the programs that may fit a call."""
        return self._programs.get((key, self._leaves.having()), ())

    def is_full(self, key: Key) -> bool:
        """Tell whether one more program under a key would take the place of another one."""
        return len(self.under(key)) >= _PROGRAMS_PER_WAY

    def changed_numbers(self, call: Call, key: Key) -> set[int]:
        """Return the places of the arguments that alone keep a call from a program that is kept."""
        keys = (program_key for program_key, _ in self._programs)
        return set().union(*(call.changed_numbers(key, other) for other in keys))

    def why_none(self, call: Call, key: Key) -> str:
        """Return why there is no program under a key."""
        keys = [program_key for program_key, _ in self._programs]
        if not keys:
            return "first call"
        if key in keys:
            return "gradients are there that were not, or the other way round"
        return call.difference(key, keys[-1])

    def place(
        self, key: Key, program: Program, before: Sequence[tuple[torch.Tensor, Any]]
    ) -> tuple[Key, frozenset[int]]:
        """Return what a new program is to be kept under.

        Args:
            key: What its call was given.
            program: The program.
            before: Every leaf, with the gradient that it had before the trace.
        """
        self._leaves.add(program.gradients)
        return key, self._leaves.had(before)

    def add(
        self, place: tuple[Key, frozenset[int]], program: Program, named: Collection[int]
    ) -> None:
        """Keep a new program, when nothing but the step holds what the trace has made.

        Args:
            place: What it is to be kept under.
            program: The program.
            named: The ids of what the trace assigned to names that guards look after.
        """
        programs = self._programs.setdefault(place, [])
        storages = [
            storage
            for storage in (reference() for reference in program.lasting)
            if storage is not None
        ]
        if self._makes_new_state(program, programs[0] if programs else None, storages, named):
            program.again = "the call before made new state"
        self._made.update(storages)
        programs.insert(0, program)

    def prefer(self, program: Program) -> None:
        """Let a program with branches come first."""
        for programs in self._programs.values():
            if program.branches and program in programs[1:]:
                programs.remove(program)
                programs.insert(0, program)

    def drop(self, program: Program) -> None:
        """Keep a program no longer."""
        for programs in self._programs.values():
            programs[:] = [entry for entry in programs if entry is not program]

    def let_go(self, newest: Program) -> None:
        """Let go of programs that no call fits any more, and of those that nobody has used."""
        for programs in self._programs.values():
            changes = (
                (program, None if program is newest else program.stale()) for program in programs
            )
            fitting = [
                program for program, change in changes if change is None or not change.for_good
            ]
            fitting.sort(key=lambda program: program.last_call, reverse=True)
            of_way = Counter[tuple[bool, ...]]()
            in_use: set[Program] = set()
            for program in fitting:
                of_way[program.way] += 1
                if of_way[program.way] <= _PROGRAMS_PER_WAY and len(in_use) < _PROGRAMS_PER_KEY:
                    in_use.add(program)
            programs[:] = [program for program in programs if program in in_use]
        used = {
            key: max(p.last_call for p in group) for key, group in self._programs.items() if group
        }
        latest = sorted(used, key=used.__getitem__)[-_MOST_KEYS:]
        kept = {key: self._programs[key] for key in latest}
        known = self._leaves.keep(p.gradients for group in kept.values() for p in group)
        self._programs = {}
        for (key, leaves), group in kept.items():
            self._programs.setdefault((key, leaves.intersection(known)), []).extend(group)

    def executables(self) -> Iterator[Any]:
        """Yield what the programs run."""
        return (program.executable for programs in self._programs.values() for program in programs)

    def _makes_new_state(
        self,
        program: Program,
        previous: Program | None,
        storages: Sequence[Storage],
        named: Collection[int],
    ) -> bool:
        """Tell whether the next call finds state that this trace did not find.

        It does when the trace made tensors that last, an optimizer's moments, say. It does not when
        they take the place of those that the trace before made: gradients, or a cache that the step
        makes anew each time; nor where the step reads nothing that an earlier call has made.
        """
        grads = program.gradients.storages()
        storages = [
            storage for storage in storages if id(storage) not in grads and id(storage) not in named
        ]
        if previous is None or not storages:
            return bool(storages)
        moments = map(inner, program.watch.inputs.moments())
        of_optimizers = {id(payload._storage) for payload in moments if payload is not None}
        if any(id(storage) in of_optimizers for storage in storages):
            return True
        if not any(storage in self._made for storage in program.read):
            return False
        gc.collect()
        return len(storages) != sum(reference() is None for reference in previous.lasting)
