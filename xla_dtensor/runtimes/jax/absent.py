"""A PyTorch step for devices that are not here: traced without a single value, then compiled.

The JAX runtime is given the devices of a topology, which have a compiler and no
memory. So everything, the making of a model included, happens inside one JAX trace that nobody will
ever run::

    runtime = AbsentRuntime.of(topology)              512 chips of v5p, say
    program = runtime.abstractly(build)               build() makes a model, an optimizer, a step
                                                      and its inputs, and returns them

    parameters, moments, batches                      values of that outer trace: shapes, no bytes
    ops between steps (an init, a copy)               part of the outer trace, and dropped with it
    the step                                          a trace within it, as on real devices

Such a value has no sharding that JAX could tell. It lies as its storage was told (`Storage.lies`):
what was distributed, as it was distributed; state that the step itself has made (an optimizer's
moments), as the label of its DTensor says; the rest (counters, rates, random state) everywhere.

Invariants:

* A step is traced as often as it would be called on real devices before its program stays the same:
  once more where the first call makes state.
* No value is ever read: what needs one is the same error as inside a compiled step.
* Inputs and results of the program are those of the real one, one for one.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import jax
import jax.core
import jax.numpy as jnp
import torch
from jax.sharding import NamedSharding, PartitionSpec
from torch.distributed.tensor import DTensor

from mesh_utils import Mesh, Topology
from xla_dtensor.core import Layout
from xla_dtensor.core.errors import CompileError
from xla_dtensor.runtimes.jax.arrays import values
from xla_dtensor.runtimes.jax.arrays.sharding import named_sharding, padded_shape, place
from xla_dtensor.runtimes.jax.arrays.storage import Storage
from xla_dtensor.runtimes.jax.arrays.values import jax_dtype, x64
from xla_dtensor.runtimes.jax.compile.effects import Given
from xla_dtensor.runtimes.jax.compile.inspect import Names, Traced
from xla_dtensor.runtimes.jax.compile.layers.slots import Slots
from xla_dtensor.runtimes.jax.compile.program import Blueprint, Program
from xla_dtensor.runtimes.jax.compile.step import JaxCompiledStep
from xla_dtensor.runtimes.jax.compile.trace_values import inner
from xla_dtensor.runtimes.jax.eager.tensor import JaxTensor
from xla_dtensor.runtimes.jax.runtime import JaxRuntime
from xla_dtensor.runtimes.live_objects import live_objects
from xla_dtensor.runtimes.state import named_from

__all__ = ["absent_devices"]


# ----------------------------------------------------------------------------------------- Topology
#
# The devices of a topology that is not here, as libtpu describes them to its compiler.
#
# They can be compiled for and hold nothing. libtpu may end the process over a topology or a mesh
# that it does not like, and it stays in the process for good: ask in a child process.


def libtpu_options(topology: Topology) -> tuple[str, dict[str, Any]]:
    """Say a topology in libtpu's words.

    Args:
        topology: TPU chips.

    Returns:
        The name, and the options that go with it.

    Raises:
        CompileError: Chips that are no TPUs, or a box whose wrap nobody knows.

    Example:
        >>> libtpu_options(Topology.parse("2xv5e:16x16"))
        ('v5e:16x16', {'wrap': (True, True, False), 'num_slices': 2})
    """
    chip = topology.chip
    if chip is None or not topology.torus_rank or topology.wrap is None:
        raise CompileError(
            f"A program was asked for, for {topology!r}. libtpu compiles for TPUs whose links are "
            "known. Pass a topology such as Topology.parse('v5p:8x8x8')."
        )
    box = "x".join(map(str, topology.shape[: topology.torus_rank]))
    options: dict[str, Any] = {}
    if any(topology.wrap):
        options["wrap"] = topology.wrap
    if chip.name == "v4":
        options["chip_config_name"] = "megacore"  # one device per chip
    if topology.num_slices > 1:
        options["num_slices"] = topology.num_slices
    return f"{chip.name}:{box}{'_twisted' if topology.twist else ''}", options


def absent_devices(topology: Topology) -> tuple[Any, ...]:
    """Return libtpu's devices of a topology.

    Args:
        topology: TPU chips.

    Returns:
        Devices whose ids are those of ``topology.device_ids``.

    Raises:
        CompileError: Chips that are no TPUs, libtpu is missing, or it refuses them.
    """
    name, options = libtpu_options(topology)
    if importlib.util.find_spec("libtpu") is None:
        raise CompileError(
            f"A program was asked for, for {topology.name}. libtpu, the TPU's compiler, is not "
            "installed. Install it: pip install 'xla-dtensor[preflight]'."
        )
    topologies: Any = importlib.import_module("jax.experimental.topologies")
    try:
        devices = tuple(topologies.get_topology_desc(name, "tpu", **options).devices)
    except Exception as error:  # libtpu's errors have no common type
        raise CompileError(
            f"A program was asked for, for {topology.name}. libtpu refuses {name} with {options}: "
            f"{error}. Pass a slice that exists."
        ) from error
    ids = {device.id for device in devices}
    if ids != set(topology.device_ids.tolist()):
        raise CompileError(
            f"A program was asked for, for {topology.name}. libtpu lists other devices than were "
            f"expected: {len(ids)}, from {min(ids)} to {max(ids)}. Use the libtpu that this "
            "version was made for."
        )
    return devices


# ---------------------------------------------------- A PyTorch step for devices that are not here

T = TypeVar("T")
_MOST_TRACES = 4


class AbsentRuntime(JaxRuntime):
    """The JAX runtime over devices that are not here; see the module docstring.

    Args:
        devices: Devices of a topology, those of all slices. The process has no others from then on.
    """

    is_abstract: ClassVar[bool] = True

    def __init__(self, devices: Sequence[Any]) -> None:
        super().__init__()
        values.set_absent_devices(devices)

    @classmethod
    def of(cls, topology: Topology | Sequence[Any]) -> AbsentRuntime:
        """Make the runtime of a topology, or of devices that are to count as absent."""
        is_topology = isinstance(topology, Topology)
        return cls(absent_devices(topology) if is_topology else topology)

    def traced(self, plan: Callable[[], Any], root: Mesh) -> Traced:
        """Trace the step of a plan.

        Args:
            plan: Makes a ``TrainingPlan``.
            root: The mesh that layouts are said on.

        Returns:
            What there is to compile, with the names of what it holds.
        """

        def trace() -> Traced:
            training = plan()
            with named_from(training.models):
                program = training.step.settled(*training.inputs)
            tensors = [tensor for tensor in map(inner, training.inputs) if tensor is not None]
            arguments = [tensor._storage for tensor in tensors]
            return Traced(program, Names(training.models, training.inputs), arguments, root)

        return self.abstractly(trace)

    def abstractly(self, build: Callable[[], T]) -> T:
        """Call `build` where tensors have no values, and return what it returns.

        What it returns must hold no tensors: their values end with the call.
        """
        built: list[T] = []

        def run() -> None:
            built.append(build())

        with x64():
            jax.make_jaxpr(run)()
        return built[0]

    def put(self, tensor: torch.Tensor, layout: Layout) -> torch.Tensor:
        return self._placeholder(tuple(tensor.shape), tensor.dtype, layout)

    def make(
        self, fill: float | str, shape: Sequence[int], dtype: torch.dtype, layout: Layout
    ) -> torch.Tensor:
        return self._placeholder(tuple(shape), dtype, layout)

    def from_shards(
        self, shards: Mapping[int, torch.Tensor], shape: Sequence[int], layout: Layout
    ) -> torch.Tensor:
        return self._placeholder(tuple(shape), next(iter(shards.values())).dtype, layout)

    def compile(self, step: Callable[..., Any]) -> AbsentStep:
        return AbsentStep(step, self)

    def _placeholder(
        self, shape: tuple[int, ...], dtype: torch.dtype, layout: Layout
    ) -> torch.Tensor:
        with x64():
            sharding = self._sharding(layout)
            array = place(jnp.zeros(shape, jax_dtype(dtype)), sharding)
        return JaxTensor(Storage(array, shape, sharding), dtype=dtype)

    def sharding_of(self, tensor: DTensor) -> NamedSharding | None:
        """Return how a DTensor is to lie by its label; None where it has none."""
        layout = getattr(tensor._spec, "layout", None)
        if layout is None:
            return None
        root = self.root(layout.mesh)
        return named_sharding(layout.op_sharding(root), root, layout.ndim)


class AbsentProgram(Program):
    """A traced step without an executable: calling it moves nothing."""

    def run(self, arguments: Sequence[Storage], leaves: Sequence[Any] = ()) -> Any:
        self.gradients.release(self.lasting)
        runtime = self.executable
        owners = _owners({id(s()) for s in self.lasting if s() is not None})
        for reference in self.lasting:
            storage = reference()
            if storage is None:
                continue
            label = owners.get(id(storage))
            storage.sharding = None if label is None else runtime.sharding_of(label)
            storage.array = place(jnp.zeros(storage.shape, storage.array.dtype), storage.sharding)
        storages = [reference() for reference in self.lasting]
        arrays = {n: s.array for n, s in enumerate(storages) if s is not None}
        delivered = {} if self.host is None else self.host.delivered
        run = self.effects.do(Given(arrays, arguments, leaves, delivered, ()), is_first=True)
        self.gradients.repeat()
        types = jax.eval_shape(
            self.blueprint.program_of(self.blueprint.jaxpr), *self.blueprint.inputs
        )
        results = types[0][self.num_flags :]
        zeros = (jnp.zeros(output.shape, output.dtype) for output in results)
        return self._outputs(zeros, run)


class AbsentStep(JaxCompiledStep):
    """A step over absent devices. Calls trace it; `blueprint()` is what there is to compile."""

    _program_type = AbsentProgram
    _runtime: AbsentRuntime

    def settled(self, *args: Any, **kwargs: Any) -> AbsentProgram:
        """Trace the step until its program stays the same.

        Args:
            *args: The step's arguments, as it will be called.
            **kwargs: The same.

        Returns:
            The program.

        Raises:
            CompileError: It makes new state on every call.
        """
        for _ in range(_MOST_TRACES):
            num_traces = self._traces
            self(*args, **kwargs)
            program = self._called()
            if self._traces == num_traces or program.stale() is None:
                assert isinstance(program, AbsentProgram)
                return program
        raise CompileError(
            f"A step was traced {_MOST_TRACES} times for devices that are not here, and each time "
            f"for another reason: {'; '.join(self.stats()['reasons'])}. Its program would be "
            "compiled anew on every call. Let it make its state once, and keep it."
        )

    def _settle(self, storages: Sequence[Storage], arguments: Sequence[Storage]) -> None:
        """Nothing has to move; find out what "on all devices" is."""
        for storage in (*storages, *arguments):
            if isinstance(storage.lies, NamedSharding) and len(storage.lies.device_set) > 1:
                self._everywhere = NamedSharding(storage.lies.mesh, PartitionSpec())
                return
        raise CompileError(
            "A step was traced for devices that are not here. None of its tensors lies on a mesh "
            "of them. Make its parameters or its arguments with distribute_tensor."
        )

    def _placed(self, constants: Sequence[Any], executable: Any) -> list[Any]:
        return list(constants)

    def _lying(self, storage: Storage) -> NamedSharding:
        sharding = storage.lies
        everywhere = self._everywhere
        if not isinstance(sharding, NamedSharding) or sharding.device_set != everywhere.device_set:
            return everywhere
        # What is left open is XLA's to choose on real devices. Nothing is taken for granted here.
        spec = [None if entry is PartitionSpec.UNCONSTRAINED else entry for entry in sharding.spec]
        return NamedSharding(sharding.mesh, PartitionSpec(*spec))

    def _inputs(
        self,
        state: Sequence[Storage],
        read: Sequence[Storage],
        constants: Sequence[Any],
        arguments: tuple[Sequence[Storage], Sequence[Storage]],
        slots: Slots,
    ) -> tuple[Any, ...]:
        everywhere = self._everywhere
        shapes = [jax.ShapeDtypeStruct(c.shape, c.dtype, sharding=everywhere) for c in constants]
        return super()._inputs(state, read, shapes, arguments, slots)

    def _held(self, storage: Storage) -> jax.ShapeDtypeStruct:
        shape = padded_shape(storage.shape, storage.sharding)
        return jax.ShapeDtypeStruct(shape, storage.array.dtype, sharding=self._lying(storage))

    def _executable(
        self, blueprint: Blueprint, inputs: tuple[Any, ...], host: Sequence[Storage]
    ) -> Any:
        return self._runtime


def _owners(storages: set[int]) -> dict[int, DTensor]:
    """The DTensors whose values lie in these storages, by the storage's id."""
    gc.collect()
    owners: dict[int, DTensor] = {}
    for candidate in live_objects(DTensor):
        tensor = inner(candidate)
        if tensor is not None and not tensor._steps and id(tensor._storage) in storages:
            owners[id(tensor._storage)] = candidate
    return owners
