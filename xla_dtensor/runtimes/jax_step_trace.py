"""One trace of a step: the Python step runs once on tracers, and what it touched is written down.

What a trace needs to know of the time before it (``Before``) is taken down first, and is what is
restored where the trace, or compiling what it found, fails: gradients, optimizers, modules, tensors
of the host and random generators. Storages are given their arrays back by the trace itself.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from xla_dtensor.runtimes.argument_containers import Containers, Writes
from xla_dtensor.runtimes.host_work import HostTape
from xla_dtensor.runtimes.host_work.iterators import Iterators
from xla_dtensor.runtimes.host_work.python_random import PythonRandom
from xla_dtensor.runtimes.jax_aliases import Aliases
from xla_dtensor.runtimes.jax_calls import Call
from xla_dtensor.runtimes.jax_constants import TracedProgram, traced_program
from xla_dtensor.runtimes.jax_effects import Plan, RunEffects
from xla_dtensor.runtimes.jax_gradients import GradientEffects
from xla_dtensor.runtimes.jax_host_inputs import HostInputs, HostPart, refuse_writes_to_host
from xla_dtensor.runtimes.jax_lending import lent, lent_tensor, lifted
from xla_dtensor.runtimes.jax_moving import MovingTensor, moving_tensors
from xla_dtensor.runtimes.jax_slots import row_type
from xla_dtensor.runtimes.jax_stacks import all_rows
from xla_dtensor.runtimes.jax_step_values import bound, replaced, split_outputs, written_arguments
from xla_dtensor.runtimes.jax_tensor import Storage
from xla_dtensor.runtimes.jax_trace import Trace, refusing_reads
from xla_dtensor.runtimes.jax_traced_stacks import gather, placed_values
from xla_dtensor.runtimes.jax_value_checks import with_flags
from xla_dtensor.runtimes.jax_watch import Watch, watching
from xla_dtensor.runtimes.module_names import naming_modules
from xla_dtensor.runtimes.opened import close_all, open_all
from xla_dtensor.runtimes.optimizer_inputs import OptimizerInputs
from xla_dtensor.runtimes.premises import Premises
from xla_dtensor.runtimes.premises.effects import Effect
from xla_dtensor.runtimes.premises.modules import Modules
from xla_dtensor.runtimes.premises.reach import Reach
from xla_dtensor.runtimes.python_state import PythonState
from xla_dtensor.runtimes.value_checks import are_checked

__all__ = ["Before", "TracedStep", "traced_step"]


@dataclass(frozen=True)
class Before:
    """What there was before a trace.

    Args:
        python: Gradients, optimizers and modules.
        reach: What the step reaches by name.
        tape: Of the host, not begun.
        random: Generators that a step must not use.
        iterators: Those that a step must not take from.
    """

    python: PythonState
    reach: Reach
    tape: HostTape
    random: PythonRandom
    iterators: Iterators

    @classmethod
    def of(cls, step: Callable[..., Any], call: Call) -> Before:
        """Take down what there is before `step` is traced for a call."""
        python, reach = PythonState.now(), Reach.of(step, *call.given)
        tape = HostTape(python.host_memories, reach.generators)
        unmoved = PythonRandom(reach.randoms), Iterators(reach.iterators)
        return cls(python, reach, tape, *unmoved)

    def restore(self) -> None:
        """Make it so again."""
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
        program: The jaxpr, with the owners of its constants.
        host: What the host does for each run; None for nothing.
        moving: The tensors that are read by name.
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
    program: TracedProgram = field(init=False)
    host: HostPart | None = field(init=False)
    moving: list[MovingTensor] = field(init=False)
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
        moving = {each.storages[0] for each in self.moving} - {None}
        alone = {*(storage for storage, _ in self.numbers), *self.host_storages(), *moving}
        return {storage for storage in alone if storage is not None}

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
) -> TracedStep:
    """Trace a step.

    Args:
        step: The step.
        call: What it is called with.
        before: What there was before.
        lent_names: The settings of optimizers that are inputs.
        made: The storages that earlier programs of the step made.
        names: The names that were seen to be given other tensors.

    Returns:
        What was found. The tensors of the step have their values of before.
    """
    tensors = call.tensors
    numbers: list[tuple[Storage, Callable[[], float]]] = []
    lend = partial(lent, numbers), partial(lent_tensor, numbers)
    inputs = OptimizerInputs(lifted, *lend, lent_names, gather)
    premises = Premises(before.reach, Modules(before.python.modules))
    tape = before.tape
    trace, watch = Trace(HostInputs(tape)), Watch(inputs, premises)
    found = TracedStep(trace, watch, numbers, call.storages())
    rows = all_rows()
    assigned: list[Effect] = []
    as_given: list[Any] = []

    def traced(arrays: Sequence[jax.Array], of_rows: Sequence[jax.Array]) -> Any:
        trace.give_rows(rows, of_rows)
        with bound(tensors, arrays, trace), watching(watch, tape), naming_modules(jax.named_scope):
            given = list(replaced(call.leaves, tensors))
            args, kwargs = close_all(tree_unflatten(given, call.tree))
            containers = Containers.of((args, kwargs), call.given)
            with refusing_reads():
                result = step(*args, **kwargs)
            found.writes, contents = containers.written()
            outputs = (result, contents) if contents else result
            out_leaves, found.tree = tree_flatten(open_all(outputs))
            found.static, results, found.pinned = split_outputs(out_leaves)
            del out_leaves, args, kwargs, containers, result, contents, outputs
            found.written, written = written_arguments(call.leaves, tensors, arrays, trace)
            refuse_writes_to_host(trace)
        watch.inputs.check_settings_unchanged()
        before.random.refuse_draws()
        before.iterators.refuse_moves()
        found.lasting = trace.lasting_beyond(tensors)
        assigned.extend(premises.effects.found())
        as_given.extend(given)
        state, lasting = placed_values([*trace.state]), placed_values(found.lasting)
        for storage, value in zip(found.lasting, lasting, strict=True):
            if storage.row is not None:
                storage.array = value
        return results, state, lasting, written

    arrays = [storage.array for storage in found.arguments]
    with trace.active():
        types = [row_type(stack.array) for _, stack, _ in rows]
        closed = jax.make_jaxpr(traced)(arrays, types)
    trace.undo()
    seen = premises.sightings()
    found.moving = moving_tensors(seen, trace, tape, made, names, {*found.arguments})
    places = {id(each.found): place for place, each in enumerate(found.moving)}
    gradients = [each for each in before.python.gradients if not call.has(each[0])]
    found.gradients = GradientEffects.of(gradients, trace.captured)
    plan = Plan(found.lasting, as_given, tape, places, found.gradients.storages())
    found.effects = plan.effects(assigned, call.leaves)
    found.aliases = Aliases.of((each.found for each in seen), found.arguments)
    watch.settle(trace, tape, found.moving, found.aliases)
    found.program = traced_program(closed, [storage for storage, _, _ in rows], trace)
    if are_checked():
        found.program, found.flags = with_flags(found.program)
        found.pinned = [*[None] * found.flags.num_leaves, *found.pinned]
    found.host = _host_part(trace.host)
    return found


def _host_part(host: HostInputs | None) -> HostPart | None:
    work, delivered = (None, []) if host is None else host.tape.finish()
    return None if work is None or host is None else HostPart(work, host.storages, delivered)
