"""compile(step) on the JAX runtime: an unmodified PyTorch training step as one XLA program.

The first call runs the Python step once, on tracers instead of arrays. While it runs, every
storage reports what it does (``trace``), so the program's inputs and outputs are known without
anyone listing them:

===========================  ======================================================
arguments of the call        inputs
tensors read                 inputs
tensors read and written     inputs and outputs; the old buffer is donated
tensors made that last       outputs (optimizer state, gradients that were kept)
arguments written in place   as tensors read and written
learning rates, counters     inputs (``optimizer``)
random keys                  a tensor read and written like any other
===========================  ======================================================

State comes out with the sharding it went in with; without that pin XLA may leave a replicated
weight sharded, and the second call would compile again.

A step is traced once: torch's optimizers make their state before (``optimizer``). One whose state
comes of its first call is traced once more on the second. From then on a call costs the launch, and
a look at what Python holds (``guards``). What the step assigns in Python is assigned after each run
(``effects``); its other effects happen while it is traced.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
import torch
from jax.sharding import NamedSharding, PartitionSpec

from mesh_utils import Mesh
from xla_dtensor.core.errors import CompileError
from xla_dtensor.report.attribution import AskedFor
from xla_dtensor.report.report import Evidence
from xla_dtensor.runtimes.base import CompiledStep, Verification
from xla_dtensor.runtimes.guards.lent import ARGUMENTS
from xla_dtensor.runtimes.host_work.tape import TraceAgainError
from xla_dtensor.runtimes.jax.arrays.sharding import place
from xla_dtensor.runtimes.jax.arrays.storage import Storage
from xla_dtensor.runtimes.jax.arrays.trace import (
    MaskError,
    refuse_nesting,
    refuse_transforms,
)
from xla_dtensor.runtimes.jax.arrays.values import x64
from xla_dtensor.runtimes.jax.compile.explain import Spent, explanation
from xla_dtensor.runtimes.jax.compile.inspect import asked_for, flops_of
from xla_dtensor.runtimes.jax.compile.layers.slots import (
    Holding,
    Slots,
    program_of,
    row_type,
    slots_of,
    stacked_types,
)
from xla_dtensor.runtimes.jax.compile.moving import MovingTensor
from xla_dtensor.runtimes.jax.compile.optimizer import RATE
from xla_dtensor.runtimes.jax.compile.program import Blueprint, KeptPrograms, Program
from xla_dtensor.runtimes.jax.compile.same_program import (
    compare_program,
    compare_run,
    name_in_job,
    name_of_step,
    note_run,
    note_trace,
)
from xla_dtensor.runtimes.jax.compile.store import Executables
from xla_dtensor.runtimes.jax.compile.trace import (
    Before,
    Call,
    Key,
    TracedStep,
    traced_step,
    unread_arguments,
)
from xla_dtensor.runtimes.jax.compile.trace_values import is_without_values
from xla_dtensor.runtimes.jax.compile.verify import (
    VARIABLE,
    number_asked,
    refuse_differences,
    verification,
)
from xla_dtensor.runtimes.jax.eager.checks import Branch, OtherWayError, Truths
from xla_dtensor.runtimes.jax.eager.selection import selecting
from xla_dtensor.runtimes.state import ProgramToCheck, StepClock, check, num_tokens

if TYPE_CHECKING:
    from xla_dtensor.runtimes.jax.compile.inspect import Traced
    from xla_dtensor.runtimes.jax.runtime import JaxRuntime

__all__ = ["JaxCompiledStep"]

logger = logging.getLogger("xla_dtensor")
_RETRACES_BEFORE_WARNING = 3
_MOST_REASONS = 100
_MOST_WAYS, _MOST_TURNS = 16, 2
MOST_TRACES = "XLA_DTENSOR_MOST_TRACES"
# Traces, and the storages that programs write to, are one process's; threads wait for each other.
_one_at_a_time = threading.RLock()


class JaxCompiledStep(CompiledStep):
    """See the module docstring. Made by :func:`xla_dtensor.compile`."""

    def __init__(self, step: Callable[..., Any], runtime: JaxRuntime) -> None:
        super().__init__(step)
        self._name_in_job = name_in_job(step)
        self._runtime = runtime
        self._kept = KeptPrograms()
        self._last: Program | None = None
        self._calls = 0
        self._traces, self._reasons = 0, deque[tuple[int, str]](maxlen=_MOST_REASONS)
        self._most_traces = number_asked(MOST_TRACES, "how often a step is traced at most")
        self._spent = Spent()
        self._lent_names = {RATE}
        self._executables = Executables()
        self._unread = unread_arguments(step)
        self._views: frozenset[int] = frozenset()  # see Call.bind
        self._names: set[Any] = set()  # that were seen to be given other tensors, or numbers
        self._unlent: set[Any] = set()  # those of numbers that its Python cannot be lent
        self._settle_names()
        self._put: dict[tuple[str, int], Any] = {}  # see HostTape
        self._clock = StepClock()
        self._tokens: int | None = None
        self._digest = ""  # of the program that was compiled last
        self._guesses: dict[Any, bool] = {}  # how branches went last: see Truths
        self._reversed: dict[Any, str] = {}  # after which error those were guessed otherwise
        self._selects = False  # whether what masks select are selections, which few steps need
        self._branches: set[str] = set()  # the places of those that were spoken of
        self._unrun: Before | None = None  # what there was before the trace of one that has not run
        self._verify_every = number_asked(VARIABLE, "that every so many-th call is verified")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        refuse_nesting()
        refuse_transforms((args, kwargs))
        with _one_at_a_time:
            return self._call(args, kwargs)

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._calls += 1
        self._clock.start()
        call = Call.of(args, kwargs, self._unread)
        if any(map(is_without_values, call.leaves)) and not self._runtime.is_abstract:
            return self._step(*args, **kwargs)
        with x64():
            call.bind(self._views, self._lent_places)
            if self._verify_every and self._calls % self._verify_every == 0:
                verdict = self._verification(call)
                refuse_differences(name_of_step(self._step), self._calls, verdict)
            self._tokens = num_tokens(call.leaves)
            program, outputs = self._run(call)
        if not program.writes.paths:
            return outputs
        output, contents = outputs
        program.writes.do((args, kwargs), contents)
        return output

    def verify(self, *args: Any, **kwargs: Any) -> Verification:
        refuse_nesting()
        with _one_at_a_time, x64():
            call = Call.of(args, kwargs, self._unread)
            if any(map(is_without_values, call.leaves)) and not self._runtime.is_abstract:
                return Verification(True, note="nothing to verify: its devices are all elsewhere")
            call.bind(self._views, self._lent_places)
            return self._verification(call)

    def _verification(self, call: Call) -> Verification:
        self._clock.interrupt()
        trace_args = self._lent_names, self._kept.made, self._names, self._put
        with selecting() if self._selects else nullcontext():
            return verification(self._step, call, self._kept, trace_args)

    def _check(self, program: Program, leaves: Sequence[Any]) -> None:
        def requests() -> tuple[AskedFor, ...]:
            return asked_for(program.blueprint.jaxpr)

        name = getattr(self._step, "__qualname__", type(self._step).__name__)
        check(lambda: ProgramToCheck(name, program.executable.as_text, requests, leaves))

    def hlo(self) -> str:
        return self._called().executable.as_text()

    def lowered_for(self, devices: Sequence[Any]) -> Any:
        """Lower the program of the last call for other devices, which need not be here.

        Args:
            devices: As many JAX devices as the program runs on, of a topology, say. The first takes
                the place of the root mesh's first device, and so on.

        Returns:
            ``jax.stages.Lowered``, with the donation and the output shardings of the real program.

        Raises:
            CompileError: The step was not called yet, or runs on another number of devices.
        """
        with x64():
            return self._called().blueprint.lowered_for(devices)

    def hlo_for(self, devices: Sequence[Any]) -> str:
        """Return the partitioned program of the last call, compiled for other devices.

        A compiler may end the process over devices that it does not like: ask in a child process.

        Args:
            devices: As in `lowered_for`.

        Raises:
            CompileError: As in `lowered_for`.
        """
        with x64():
            return self.lowered_for(devices).compile().as_text()

    def evidence(
        self, mesh: Mesh, models: Sequence[torch.nn.Module] = (), **facts: Any
    ) -> Evidence:
        return self._named(mesh, models).evidence(self._called().executable, **facts)

    def export(
        self,
        path: str | os.PathLike[str],
        mesh: Mesh,
        models: Sequence[torch.nn.Module] = (),
        platforms: Sequence[str] | None = None,
    ) -> None:
        from xla_dtensor.runtimes.jax.compile.export import write_export

        with x64():
            write_export(self._named(mesh, models), self._called().executable, path, platforms)

    def _named(self, mesh: Mesh, models: Sequence[torch.nn.Module]) -> Traced:
        """Return the program of the last call, with names of what it holds."""
        from xla_dtensor.runtimes.jax.compile.inspect import Names, Traced

        program = self._called()
        arguments = [None] * program.num_arguments
        root = self._runtime.root(mesh)
        if np.array_equal(mesh.device_ids.ravel(), root.device_ids.ravel()):
            root = mesh  # the same order, by the names that were asked for
        return Traced(program, Names(models, ()), arguments, root)

    def metrics(self, tokens_per_step: int | None = None) -> Mapping[str, float | None]:
        tokens = self._tokens if tokens_per_step is None else tokens_per_step
        return self._clock.metrics(tokens, self._called().flops, self._called().peak_flops())

    def save(self, path: str | os.PathLike[str]) -> None:
        with x64():
            self._executables.save(path)

    def load(self, path: str | os.PathLike[str]) -> None:
        self._executables.load(path)

    def _called(self) -> Program:
        if self._last is None:
            raise CompileError(
                "The HLO of a compiled step was asked for before its first call. The program is "
                "made when the arguments' shapes are known. Call the step once first."
            )
        return self._last

    def stats(self) -> Mapping[str, Any]:
        return {
            "calls": self._calls,
            "traces": self._traces,
            "reasons": tuple(reason for _, reason in self._reasons),
            "loaded": self._executables.taken,
        }

    def explain(self) -> str:
        with x64():
            traces, head = list(self._reasons), super().explain().splitlines()[0]
            return explanation(head, traces, self._called(), self._spent)

    # ------------------------------------------------------------------ calling

    def _run(self, call: Call) -> tuple[Program, Any]:
        """Run the program that goes the way which its branches on tensors take; what it returns."""
        way, why, turns = (), "", 0
        self._reversed.clear()
        for _ in range(_MOST_WAYS):
            program = self._last = self._program_of(call, way, why)
            compare_run(self._step, program)
            try:
                outputs = self._outputs_of(program, call)
            except OtherWayError as other:
                branch = program.branches[other.number]
                turns += other.number < len(way)  # One that a run has told, a layer before, say.
                if turns > _MOST_TURNS:
                    break
                way = (*program.way[: other.number], not branch.answer)
                why = f"{branch} came out {not branch.answer}"
                self._take_guesses(program.branches, other)
            else:
                self._kept.prefer(program)
                return program, outputs
        raise CompileError(
            f"Call {self._calls} of {name_of_step(self._step)} branches on what the mesh computes, "
            "and no program went the way of its values, the last one at "
            f"{branch}. Each way is a program of its own, {_MOST_WAYS} are tried, and a part that "
            "runs several times, a layer of scan_layers, goes one way. Write torch.where instead "
            "of `if`, or take such Python out of the step."
        )

    def _take_guesses(self, branches: Sequence[Branch], error: OtherWayError) -> None:
        """Guess that branches go as a run has found them, the later ones on the wrong way too."""
        times = Counter(branch.place for branch in branches)
        for number, branch in enumerate(branches[error.number :], error.number):
            if number == error.number or times[branch.place] == 1:  # not those of later rounds
                answer = branch.answer != (number in error.numbers)
                self._guesses[branch.place] = self._guesses[branch.place, branch.times] = answer

    def _program_of(self, call: Call, way: tuple[bool, ...] = (), why: str = "") -> Program:
        """Return a program that fits a call, and what the host does for its run done.

        Args:
            call: The call.
            way: The answers to its first branches, as far as runs have told them.
            why: Why there may be no program that goes this way.
        """
        began = time.perf_counter()
        key, arguments = call.key(), call.storages()
        for program in self._kept.under(key):
            if program.way[: len(way)] != way:
                continue
            program.watch.lending.give(call.leaves)
            change = program.stale() or program.prepare(arguments)
            if change is None:
                note_run(self._name_in_job, self._calls, program)
                self._spent.call = {"guards": time.perf_counter() - began}
                self._check(program, call.leaves)
                program.last_call = self._calls
                return program
            self._lent_names.update(program.watch.inputs.changed(may_be_lent=True))
            why = why or change.why
            if change.name is not None:
                self._names.update((change.name, *program.watch.replaced()))
        if not why:
            why = self._kept.why_none(call, key)
        program = self._compiled(why, call, self._with_numbers_lent(call, key), way)
        program.last_call = self._calls
        self._kept.let_go(program)
        self._executables.keep(self._kept.executables())
        return program

    def _settle_names(self) -> None:
        self._lendable = frozenset(self._names - self._unlent)
        self._lent_places = frozenset(name[1] for name in self._lendable if name[0] == ARGUMENTS)

    def _with_numbers_lent(self, call: Call, key: Key) -> Key:
        """Return a call's key where numbers among its arguments that change are lent, or no more.

        Those that select among many programs are none to lend.
        """
        if self._kept.is_full(key):
            self._unlent.update((ARGUMENTS, place) for place in self._lent_places)
        changed = self._kept.changed_numbers(call, key)
        self._names.update((ARGUMENTS, place) for place in changed)
        self._settle_names()
        call.bind(self._views, self._lent_places)
        return call.key()

    def _note(self, reason: str) -> None:
        self._traces += 1
        self._reasons.append((self._calls, reason))
        level = logging.WARNING if self._traces > _RETRACES_BEFORE_WARNING else logging.INFO
        text = "%s is traced for the %dth time, in call %d: %s."
        logger.log(level, text, name_of_step(self._step), self._traces, self._calls, reason)

    def _note_branches(self, branches: Sequence[Branch]) -> None:
        """Say once of each line that branches on a tensor what comes of it."""
        for branch in branches:
            if branch.place not in self._branches:
                self._branches.add(branch.place)
                text = (
                    "%s branches on a tensor, %s. It has a program for each way, and each call "
                    "waits to see whether its values go the way of its program. torch.where is "
                    "one program, and waits for nothing."
                )
                logger.warning(text, name_of_step(self._step), branch)

    def _outputs_of(self, program: Program, call: Call) -> Any:
        """Run a program; where its first run fails, its trace is taken back."""
        began, unrun = time.perf_counter(), self._unrun
        try:
            outputs = program.run(call.storages(), call.leaves)
        except BaseException as error:
            if unrun is not None:
                unrun.restore()
                self._kept.drop(program)
            error.add_note(program.lost(call.storages()))
            raise
        finally:
            self._unrun = None
        self._spent.call["launch"] = time.perf_counter() - began
        return outputs

    def _refuse_another_trace(self, reason: str) -> None:
        """Raise where the environment says that there are enough."""
        if not self._most_traces or self._traces < self._most_traces:
            return
        raise CompileError(
            f"Call {self._calls} of {name_of_step(self._step)} would trace it for the "
            f"{self._traces + 1}th time: {reason}. {MOST_TRACES}={self._most_traces} allows no "
            "more. print(step.explain()) lists what was traced and why. Pass what changes as a "
            "tensor, keep it out of the step, or raise the limit."
        )

    # ------------------------------------------------------------------ tracing

    def _compiled(self, reason: str, call: Call, key: Key, way: tuple[bool, ...]) -> Program:
        """Trace and compile; on an error leave everything as it was."""
        self._clock.interrupt()
        self._refuse_another_trace(reason)
        note_trace(self._name_in_job, self._calls, reason, self._last)
        began = time.perf_counter()
        snapshot = Before.of(self._step, call, self._lendable)
        again, truths = False, Truths(way, self._guesses)
        try:
            trace_args = self._lent_names, self._kept.made, self._names, self._put
            with selecting() if self._selects else nullcontext():
                outcome = traced_step(self._step, call, snapshot, *trace_args, truths)
            counters = snapshot.recording.counters() - self._names
            if counters:  # The next call will find others there: they are lent at once.
                self._names |= counters
                raise TraceAgainError("counts")
            self._spent.compiling.append({"trace": time.perf_counter() - began})
            program = self._finish(outcome)
            self._check(program, call.leaves)
        except BaseException as error:
            snapshot.restore()
            again = self._knows_better(error, snapshot) or self._guesses_other(error, truths)
            if not again:
                raise
        if again:
            call.bind(self._views, self._lent_places)
            return self._compiled(reason, call, call.key(), way)
        self._note(reason)
        self._note_branches(truths.branches)
        place = self._kept.place(key, program, snapshot.python.gradients)
        named = {id(outcome.lasting[number]) for number in outcome.effects.forms}
        self._unrun = snapshot
        if outcome.trace.new_data:
            program.again = "the call before gave a tensor's .data memory that others have as well"
        del snapshot, outcome  # What they hold that the trace has made and dropped, is to go.
        self._kept.add(place, program, named)
        program.digest = self._digest
        return program

    def _knows_better(self, error: BaseException, snapshot: Before) -> bool:
        """Take in what a failed trace has told; return whether the next one will be another one.

        With other arguments as views of their bases, with what other lines make on the mesh, or
        without the numbers that it was lent.
        """
        missed = snapshot.tape.missed
        if isinstance(error, TraceAgainError) or (missed and isinstance(error, Exception)):
            self._put |= missed
            self._views |= getattr(error, "places", frozenset())
            self._settle_names()
            return True
        if isinstance(error, MaskError) and not self._selects:
            self._selects = True
            return True
        if not isinstance(error, Exception) or not snapshot.lending:
            return False
        self._unlent |= snapshot.lending.names
        self._settle_names()
        return True

    def _guesses_other(self, error: BaseException, truths: Truths) -> bool:
        """Where a branch was guessed, its error may be one that no run comes to."""
        for branch in reversed(truths.branches[len(truths.way) :]):
            name = branch.place, branch.times
            if not isinstance(error, Exception) or len(self._reversed) == _MOST_WAYS:
                break
            if name not in self._reversed:
                self._guesses[name] = not branch.answer
                self._reversed[name] = f"{branch} raised {type(error).__name__}: {error}"
                return True
        for text in self._reversed.values():
            error.add_note(f"On another way, which no run has told to be wrong, {text}")
        return False

    def _finish(self, outcome: TracedStep) -> Program:
        trace = outcome.trace
        state = list(trace.state)
        read = [s for s in trace.captured if s not in trace.state]
        jaxpr, owners, constants = outcome.program
        self._settle([*state, *read], outcome.arguments)

        position = {storage: i for i, storage in enumerate([*state, *read])}
        places = [None if s is None else position[s] for s in owners]
        sizes = (len(outcome.written), len(outcome.lasting), len(state))
        written_shardings = [self._lying(outcome.arguments[i]) for i in outcome.written]
        alone = outcome.alone()
        kinds = [None if s in alone else self._kind(s, s in trace.state) for s in position]
        shardings = [self._lying(s) for s in position]
        num_flags = 0 if outcome.flags is None else outcome.flags.num_leaves
        holding = Holding(
            places, sizes, kinds, shardings, outcome.donated(), outcome.written, num_flags
        )
        slots = slots_of(jaxpr, holding)
        made_of = partial(program_of, holding=holding, slots=slots)
        arguments = holding.divided(outcome.arguments)
        inputs = self._inputs(state, read, constants, arguments, slots)
        for moving_tensor in outcome.moving:
            old, new = moving_tensor.storages
            moving_tensor.is_written = old in trace.state
            storages = state if moving_tensor.is_written else read
            moving_tensor.place = -1 if old is None else storages.index(old)
            moving_tensor.number = outcome.lasting.index(new) if new in outcome.lasting else None
            moving_tensor.key = id(moving_tensor.left)
            moving_tensor.forget()
        for entry in outcome.data:
            entry.is_written = entry.storage in trace.state
            entry.place = (state if entry.is_written else read).index(entry.storage)
        pinned = (
            outcome.pinned,
            [state_input.sharding for state_input in inputs[0]],
            self._pinned_lasting(outcome.lasting, slots, outcome.moving),
            written_shardings,
        )
        blueprint = Blueprint.of(jaxpr, made_of, inputs, pinned, donated=(0, 4))
        executable = self._executable(blueprint, inputs, outcome.host_storages())
        return self._program_type(
            executable,
            state,
            read,
            self._placed(constants, executable),
            places,
            [weakref.ref(s) for s in outcome.lasting],
            outcome.written,
            holding,
            outcome.numbers,
            outcome.tree,
            outcome.static,
            outcome.watch,
            slots,
            blueprint,
            flops_of(jaxpr),
            outcome.gradients,
            host=outcome.host,
            moving=outcome.moving,
            data=outcome.data,
            effects=outcome.effects,
            aliases=outcome.aliases,
            writes=outcome.writes,
            flags=outcome.flags,
            branches=outcome.truths.branches,
        )

    def _pinned_lasting(
        self, lasting: Sequence[Storage], slots: Slots, moving: Sequence[MovingTensor]
    ) -> list[Any]:
        """Return how what a step makes has to lie: as what it replaces, or as XLA likes."""
        shardings = {
            lasting[moving_tensor.number]: moving_tensor.lies
            for moving_tensor in moving
            if moving_tensor.number is not None
        }
        return [
            shardings.get(lasting[slot[0]]) if len(slot) == 1 else None for slot in slots.lasting
        ]

    # What a program for devices that are not here does otherwise (``absent``).

    _program_type = Program

    def _placed(self, constants: Sequence[Any], executable: Any) -> list[Any]:
        """Put a program's constants of the host where it wants them: no run moves them there."""
        shardings = executable.input_shardings[0][2]
        return [
            jax.make_array_from_callback(constant.shape, sharding, constant.__getitem__)
            if isinstance(constant, np.ndarray) and isinstance(sharding, NamedSharding)
            else constant
            for constant, sharding in zip(constants, shardings, strict=True)
        ]

    def _lying(self, storage: Storage) -> Any:
        return storage.lies

    def _kind(self, storage: Storage, is_state: bool) -> Hashable | None:
        """Return what storages have in common that may be rows of one stack; None for no row."""
        sharding = self._lying(storage)
        is_open = PartitionSpec.UNCONSTRAINED in tuple(getattr(sharding, "spec", ()))
        if storage.manual is not None or is_open:
            return None
        return is_state, sharding

    def _inputs(
        self,
        state: Sequence[Storage],
        read: Sequence[Storage],
        constants: Sequence[Any],
        arguments: tuple[Sequence[Storage], Sequence[Storage]],
        slots: Slots,
    ) -> tuple[Any, ...]:
        arrays = [[self._held(s) for s in storages] for storages in (state, read, *arguments)]
        state, read = stacked_types(slots.state, arrays[0]), stacked_types(slots.read, arrays[1])
        return state, read, list(constants), arrays[2], arrays[3]

    def _held(self, storage: Storage) -> Any:
        return storage.array if storage.row is None else row_type(storage.row[0].array)

    def _executable(
        self, blueprint: Blueprint, inputs: tuple[Any, ...], host: Sequence[Storage]
    ) -> Any:
        began = time.perf_counter()
        lowered = blueprint.lowered(*inputs)
        lower = time.perf_counter() - began

        def compare(digest: str) -> None:
            compare_program(self._step, digest, lowered, inputs, host)
            self._digest = digest

        executable = self._executables.compiled(lowered, compare)
        seconds = {"lower": lower, "compile": time.perf_counter() - began - lower}
        self._spent.compiling[-1] |= seconds
        return executable

    def _settle(self, storages: Sequence[Storage], arguments: Sequence[Storage]) -> None:
        """Put on all devices what lies on one only because nothing has placed it yet."""
        shardings = [storage.lies for storage in (*storages, *arguments)]
        widest = max(shardings, key=lambda s: len(s.device_set), default=None)
        for storage in storages:
            if len(storage.lies.device_set) < len(widest.device_set):  # pyright: ignore
                everywhere = NamedSharding(widest.mesh, PartitionSpec())  # pyright: ignore
                storage.array = place(storage.array, everywhere)
