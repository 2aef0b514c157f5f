"""What JAX does not offer in public: every use of its private modules and attributes.

A release of JAX may rename what begins with an underscore, so this file is the only one that a new
release can break by that. It gives out functions and records of this project; no class or module of
JAX leaves it. ``tests/xla_dtensor/runtimes/jax/test_jax_private.py`` has a test of each function,
which names the public function of JAX that would replace it. Everything else in this folder uses
``jax``, ``jax.extend`` and ``jax.interpreters``::

    jaxpr = inputs_only(jax.make_jaxpr(step)(x))      its constants are inputs, on every JAX
    with frames_of(origin): ...                       equations get the frames of another place

Jaxprs changed in JAX 0.11: until 0.10 a ``ClosedJaxpr`` holds a ``Jaxpr`` and the values of its
constants; from 0.11.1 on both are one class, and variables without a value are plain inputs. The
functions under "Jaxprs" hide that, so that the rest of the project has one form.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax._src import distributed, monitoring, source_info_util, xla_bridge
from jax._src.clusters import ClusterEnv
from jax._src.interpreters import partial_eval
from jax.extend.core import (
    ClosedJaxpr,  # pyright: ignore[reportPrivateImportUsage] - an alias now
    Jaxpr,
)
from jaxlib import xla_client

__all__ = [
    "Cluster",
    "Job",
    "PartialEvaluation",
    "around_listeners",
    "constants_of",
    "context_on_mesh",
    "device_ids",
    "devices_have_started",
    "executable_inputs",
    "frames_here",
    "frames_of",
    "frames_of_equation",
    "hlo_sharding_text",
    "inputs_only",
    "is_jaxpr",
    "job",
    "leave_out_frames_of",
    "line_of_equation",
    "line_of_origin",
    "lowered_inputs",
    "open_jaxpr",
    "partial_evaluation",
    "present_cluster",
    "raised_shapes",
    "through_hlo",
    "trace_of",
    "with_constants",
]

# ------------------------------------------------------------------ Jaxprs


def is_jaxpr(term: Any) -> bool:
    """Tell whether a value is a jaxpr, with values for its constants or without."""
    return isinstance(term, Jaxpr | ClosedJaxpr)


def open_jaxpr(jaxpr: Any) -> Any:
    """Return the jaxpr whose equations and variables are to be read; an open one as it is."""
    return jaxpr if isinstance(jaxpr, Jaxpr) else jaxpr.jaxpr


def constants_of(jaxpr: Any) -> tuple[Any, ...]:
    """Return the values of a jaxpr's constants; none for one that has no values."""
    return tuple(getattr(jaxpr, "consts", ()))


def with_constants(jaxpr: Any, constants: Iterable[Any]) -> Any:
    """Return an open jaxpr with values for its first inputs, the ``constvars``."""
    return ClosedJaxpr(jaxpr, list(constants))


def inputs_only(jaxpr: Any) -> Any:
    """Return a jaxpr whose constants are its first inputs."""
    jaxpr = open_jaxpr(jaxpr)
    return jaxpr.replace(constvars=[], invars=[*jaxpr.constvars, *jaxpr.invars])


def context_on_mesh(context: Any, mesh: Any) -> Any:
    """Return the context of an equation (``equation.ctx``) with another abstract mesh in use.

    Both meshes have one number of devices. The old context is entered, so that whatever else it
    holds in this release of JAX stays.
    """
    with context.manager, jax.sharding.use_abstract_mesh(mesh):
        return type(context)()


class PartialEvaluation(NamedTuple):
    """A jaxpr cut into what is known early and what is computed late.

    Attributes:
        known: takes the known inputs; returns known results, then the values that are saved.
        staged: takes the saved values, then all inputs; returns the results that are not known.
        is_staged: for each result whether `staged` returns it.
        num_saved: how many values are saved.
    """

    known: Any
    staged: Any
    is_staged: Sequence[bool]
    num_saved: int


def partial_evaluation(
    jaxpr: Any, is_late: Sequence[bool], late_results: Sequence[bool], policy: Callable[..., Any]
) -> PartialEvaluation:
    """Cut a jaxpr in two, as ``jax.checkpoint`` does.

    Args:
        jaxpr: The jaxpr, without constants.
        is_late: For each input whether it is known late only.
        late_results: For each result whether it is wanted late.
        policy: One of ``jax.checkpoint_policies``: says which values are saved.
    """
    early, late, _, is_staged, num_saved = partial_eval.partial_eval_jaxpr_custom(
        jaxpr, list(is_late), [True] * len(is_late), list(late_results), list(late_results), policy
    )
    return PartialEvaluation(early, late, is_staged, num_saved)


# ------------------------------------------------------------------ values and programs


def trace_of(tracer: Any) -> Any:
    """Return the trace that a tracer belongs to, for ``jax.extend.core.set_current_trace``.

    None for a value that is no tracer.
    """
    return getattr(tracer, "_trace", None)


def device_ids(sharding: Any) -> tuple[int, ...]:
    """Return the ids of a sharding's devices, in the order of the program's partitions."""
    return tuple(device.id for device in sharding._device_assignment)


def hlo_sharding_text(sharding: Any, ndim: int) -> str:
    """Return the sharding of a value of `ndim` dims as XLA writes it: ``{devices=[2,1]<=[2]}``."""
    return str(sharding._to_xla_hlo_sharding(ndim))


def lowered_inputs(lowered: Any) -> list[int]:
    """Return which inputs a lowered program (``jax.stages.Lowered``) still has, by position."""
    return sorted(lowered._lowering.compile_args["kept_var_idx"])


def executable_inputs(compiled: Any, count: int) -> list[int]:
    """Return which of `count` inputs a compiled program still has, by position.

    Args:
        compiled: ``jax.stages.Compiled``; one that was loaded from a file does not say, and has
            all.
        count: The number of inputs of the function that was compiled.
    """
    positions = getattr(compiled._executable, "_kept_var_idx", None)
    return list(range(count)) if positions is None else sorted(positions)


def through_hlo(module: Any) -> str:
    """Return a lowered program as XLA reads it: translated to HLO, and back to StableHLO.

    Shardy's attributes come back as attributes of custom calls, see
    :mod:`xla_dtensor.runtimes.jax.arrays.products`.

    Args:
        module: The operation of an MLIR module.
    """
    translate = xla_client._xla.mlir  # pyright: ignore[reportPrivateImportUsage]
    hlo = translate.mlir_module_to_xla_computation(
        str(module), use_tuple_args=False, return_tuple=False
    )
    return translate.xla_computation_to_mlir_module(hlo)


# -------------------------------------------------------------------- Frames and names of equations


def raised_shapes(error: Any) -> list[tuple[int, ...]]:
    """Return the shapes of what failed checks tell with their messages, of those with one array.

    Args:
        error: Of ``checkify``, with its values.
    """
    told = [effect.shape_dtypes for effect, failed in error._pred.items() if failed.any()]
    return [tuple(arrays[0].shape) for arrays in told if len(arrays) == 1]


def frames_here() -> Any:
    """Return the Python frames and names that an equation made now would have."""
    return source_info_util.current()


@contextlib.contextmanager
def frames_of(origin: Any, name: str) -> Iterator[None]:
    """Give equations made inside the frames of another place, and its names after `name`.

    Args:
        origin: From :func:`frames_here`.
        name: What the names begin with.
    """
    state = source_info_util._source_info_context
    outer = state.context
    names = source_info_util.new_name_stack(name) + origin.name_stack
    state.context = outer.replace(traceback=origin.traceback, name_stack=names)
    try:
        yield
    finally:
        state.context = outer


def frames_of_equation(equation: Any) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which equations get another one's frames, its names after today's."""
    names = source_info_util.current_name_stack() + equation.source_info.name_stack
    return source_info_util.user_context(equation.source_info.traceback, name_stack=names)


def line_of_equation(equation: Any) -> str:
    """Return the innermost line of a user that made an equation: ``train.py:14 (loss)``; or ""."""
    return line_of_origin(equation.source_info)


def line_of_origin(origin: Any) -> str:
    """Return the same of what :func:`frames_here` returned."""
    frame = source_info_util.user_frame(origin.traceback)
    return "" if frame is None else f"{frame.file_name}:{frame.start_line} ({frame.function_name})"


def leave_out_frames_of(*folders: Path, but: Path | None = None) -> None:
    """Let JAX count the frames of what lies in these folders as its own, those in `but` not."""
    if but is not None and f"{but}{os.sep}" not in source_info_util._include_paths:
        source_info_util.register_inclusion(f"{but}{os.sep}")
    for folder in folders:
        prefix = f"{folder}{os.sep}"
        if prefix not in source_info_util._exclude_paths:
            source_info_util.register_exclusion(prefix)


# ------------------------------------------------------------------ listeners

_LISTENERS = ("", "_duration_secs", "_time_span")


@contextlib.contextmanager
def around_listeners(begins: Callable[[], None], ends: Callable[[], None]) -> Iterator[None]:
    """Say when functions begin and end that users have JAX call of its events (jax.monitoring).

    Args:
        begins: Called before those of one event are called.
        ends: Called behind them.
    """

    def first(*event: Any, **facts: Any) -> None:
        begins()

    def last(*event: Any, **facts: Any) -> None:
        ends()

    lists = [getattr(monitoring, f"_event{kind}_listeners", []) for kind in _LISTENERS]
    lists = [
        callbacks
        for callbacks in (*lists, getattr(monitoring, "_scalar_listeners", []))
        if callbacks
    ]
    for listeners in lists:
        listeners.insert(0, first)
        listeners.append(last)
    try:
        yield
    finally:
        for listeners in lists:
            listeners[:] = [listener for listener in listeners if listener not in (first, last)]


# ------------------------------------------------------------------ processes


def devices_have_started() -> bool:
    """Tell whether JAX has its devices: their number, and the job, are fixed from then on."""
    return xla_bridge.backends_are_initialized()


class Job(NamedTuple):
    """The job of several processes that this one has joined.

    Attributes:
        client: JAX's client of the coordination service.
        preemption: JAX's preemption manager; None where it does not run.
        address: the service's address.
        num_processes: how many processes there are.
        process_id: this one's number.
    """

    client: Any
    preemption: Any
    address: str | None
    num_processes: int
    process_id: int


def job() -> Job | None:
    """Return the job that ``jax.distributed.initialize`` joined; None for a process alone."""
    state: Any = distributed.global_state
    if state.client is None:
        return None
    return Job(
        state.client,
        state.preemption_sync_manager,
        state.coordinator_address,
        state.num_processes,
        state.process_id,
    )


class Cluster(NamedTuple):
    """A cluster that JAX detects: what it reads there, each asked for when it is needed.

    Attributes:
        name: JAX's name of the kind, such as "slurm".
        num_processes: returns how many processes the job has.
        process_id: returns this process's number.
        local_process_id: returns its number on this machine; None where nobody says.
        coordinator_address: takes a time limit in seconds and a port (a text, or None).
    """

    name: str
    num_processes: Callable[[], int]
    process_id: Callable[[], int]
    local_process_id: Callable[[], int | None]
    coordinator_address: Callable[[int, str | None], str]


def present_cluster() -> Cluster | None:
    """Return the cluster that JAX detects around this process; None where there is none."""
    kinds: Any = (kind for kind in ClusterEnv._cluster_types if not kind.opt_in_only_method)
    kind = next((kind for kind in kinds if kind.is_env_present()), None)
    if kind is None:
        return None
    return Cluster(
        kind.name,
        kind.get_process_count,
        kind.get_process_id,
        kind.get_local_process_id,
        kind.get_coordinator_address,
    )
