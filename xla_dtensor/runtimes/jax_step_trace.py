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

from xla_dtensor.runtimes.host_work import HostTape
from xla_dtensor.runtimes.host_work.python_random import PythonRandom
from xla_dtensor.runtimes.jax_calls import Call, FloatInputs
from xla_dtensor.runtimes.jax_constants import TracedProgram, traced_program
from xla_dtensor.runtimes.jax_gradients import GradientEffects
from xla_dtensor.runtimes.jax_host_inputs import HostInputs, HostPart, refuse_writes_to_host
from xla_dtensor.runtimes.jax_lending import lent, lifted
from xla_dtensor.runtimes.jax_rebound import Rebound, rebound_tensors
from xla_dtensor.runtimes.jax_slots import row_type
from xla_dtensor.runtimes.jax_stacks import all_rows
from xla_dtensor.runtimes.jax_step_values import bound, replaced, split_outputs, written_arguments
from xla_dtensor.runtimes.jax_tensor import Storage
from xla_dtensor.runtimes.jax_trace import Trace
from xla_dtensor.runtimes.jax_traced_stacks import gather, placed_values
from xla_dtensor.runtimes.jax_watch import Watch, watching
from xla_dtensor.runtimes.module_names import naming_modules
from xla_dtensor.runtimes.optimizer_inputs import OptimizerInputs
from xla_dtensor.runtimes.premises import Premises
from xla_dtensor.runtimes.premises.modules import Modules
from xla_dtensor.runtimes.premises.reach import Reach
from xla_dtensor.runtimes.python_state import PythonState

__all__ = ["Before", "TracedStep", "traced_step"]


@dataclass(frozen=True)
class Before:
    """What there was before a trace.

    Args:
        python: Gradients, optimizers and modules.
        reach: What the step reaches by name.
        tape: Of the host, not begun.
        random: Generators that a step must not use.
    """

    python: PythonState
    reach: Reach
    tape: HostTape
    random: PythonRandom

    @classmethod
    def of(cls, step: Callable[..., Any], call: Call) -> Before:
        """Take down what there is before `step` is traced for a call."""
        python, reach = PythonState.now(), Reach.of(step, *call.given)
        tape = HostTape(python.host_memories, reach.generators)
        return cls(python, reach, tape, PythonRandom(reach.randoms))

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
        rebound: The tensors that it replaced, and that the next call finds replaced.
        gradients: What it did to parameters' gradients.
        lasting: What it made and left behind.
        written: Positions of the arguments that it wrote to.
        tree: How its results nest.
        static: Of each result how to wrap it.
        pinned: Of each result how it has to lie.
    """

    trace: Trace
    watch: Watch
    numbers: list[tuple[Storage, Callable[[], float]]]
    arguments: list[Storage]
    program: TracedProgram = field(init=False)
    host: HostPart | None = field(init=False)
    rebound: list[Rebound] = field(init=False)
    gradients: GradientEffects = field(init=False)
    lasting: list[Storage] = field(init=False)
    written: list[int] = field(init=False)
    tree: TreeSpec = field(init=False)
    static: list[Any] = field(init=False)
    pinned: list[Any] = field(init=False)

    def alone(self) -> set[Storage]:
        """Return the storages that are no rows of stacks: they get other values between runs."""
        rebound = (each.storages[0] for each in self.rebound)
        return {*(storage for storage, _ in self.numbers), *self.host_storages(), *rebound}

    def host_storages(self) -> list[Storage]:
        """Return the storages of the plain tensors that go into the program."""
        return [] if self.trace.host is None else self.trace.host.storages


def traced_step(
    step: Callable[..., Any],
    call: Call,
    before: Before,
    lent_names: Collection[str],
    floats: FloatInputs,
    made: Container[Storage] = (),
) -> TracedStep:
    """Trace a step.

    Args:
        step: The step.
        call: What it is called with.
        before: What there was before.
        lent_names: The settings of optimizers that are inputs.
        floats: The floats among the arguments that are inputs.
        made: The storages that earlier programs of the step made.

    Returns:
        What was found. The tensors of the step have their values of before.
    """
    tensors = call.tensors
    numbers: list[tuple[Storage, Callable[[], float]]] = []
    inputs = OptimizerInputs(lifted, partial(lent, numbers), lent_names, gather)
    requiring = (id(tensor) for tensor, _ in before.python.gradients)
    premises = Premises(before.reach, Modules(before.python.modules, requiring))
    tape = before.tape
    trace, watch = Trace(HostInputs(tape)), Watch(inputs, premises)
    found = TracedStep(trace, watch, numbers, [t._storage for t in tensors if t is not None])
    rows = all_rows()

    def traced(arrays: Sequence[jax.Array], of_rows: Sequence[jax.Array]) -> Any:
        trace.give_rows(rows, of_rows)
        with bound(tensors, arrays, trace), watching(watch, tape), naming_modules(jax.named_scope):
            leaves = floats.lent(call, partial(lent, numbers))
            args, kwargs = tree_unflatten(list(replaced(leaves, tensors)), call.tree)
            out_leaves, found.tree = tree_flatten(step(*args, **kwargs))
            found.static, results, found.pinned = split_outputs(out_leaves)
            del out_leaves, args, kwargs
            found.written, written = written_arguments(call.leaves, tensors, arrays)
            refuse_writes_to_host(trace)
        watch.inputs.check_settings_unchanged()
        before.random.refuse_draws()
        found.lasting = trace.lasting_beyond(tensors)
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
    found.rebound = rebound_tensors(premises.replaced(), trace, set(found.lasting), made)
    watch.settle(trace, tape, found.rebound)
    found.gradients = GradientEffects.of(before.python.gradients, trace.captured)
    found.program = traced_program(closed, [storage for storage, _, _ in rows], trace)
    found.host = _host_part(trace.host)
    return found


def _host_part(host: HostInputs | None) -> HostPart | None:
    work, delivered = (None, []) if host is None else host.tape.finish()
    return None if work is None or host is None else HostPart(work, host.storages, delivered)
