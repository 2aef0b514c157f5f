"""The runtime interface: the few verbs that the DTensor layer needs from an XLA back end.

A *payload* is the torch tensor that stands for one global tensor on the runtime's devices: a
``JaxTensor`` over a ``jax.Array`` on the JAX runtime, an XLA lazy tensor on torch_xla. The DTensor
layer keeps a payload per DTensor, runs aten ops on payloads through :meth:`Runtime.run_op`, and
says how they lie by :meth:`Runtime.put` and :meth:`Runtime.constrain`. Everything above this file
is the same on every runtime; everything that differs between runtimes is below it.

Shardings cross this border as :class:`~xla_dtensor.core.Layout` (asked for) and
:class:`~xla_dtensor.core.OpSharding` (read back), the latter relative to :meth:`Runtime.root`.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import update_wrapper
from types import MethodType
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import torch

from mesh_utils import Mesh
from xla_dtensor.core.errors import CompileError, UnsupportedOpError
from xla_dtensor.report.report import Evidence

if TYPE_CHECKING:
    from mesh_utils import Axis, Mesh
    from xla_dtensor.core import Layout, ManualRegion, OpSharding
    from xla_dtensor.runtimes.whole_ops import Remat

__all__ = [
    "AddressableShard",
    "CompiledStep",
    "Difference",
    "Layers",
    "Runtime",
    "Verification",
    "refuse_lost_write",
]


# ------------------------------------------------------------------ What a runtime makes of a step
#
# Something to call, and to ask about its programs.


@dataclass(frozen=True)
class Difference:
    """Something that a program has otherwise than a trace of the step gives it now.

    Args:
        what: "constant", "op", "input", "output" or "host op", an op on plain CPU tensors.
        kept: What the program has; "nothing" where it has none.
        now: What a trace gives now; "nothing" where it gives none.
        line: The user's line that it comes from, ``train.py:14 (loss)``; "" where nobody knows.
    """

    what: str
    kept: str
    now: str
    line: str = ""

    def __str__(self) -> str:
        at = f", {self.line}" if self.line else ""
        return f"{self.what}: {self.kept} in the program, {self.now} now{at}"


@dataclass(frozen=True)
class Verification:
    """What :meth:`CompiledStep.verify` has found.

    Args:
        is_same: Whether the call would run the program that a trace gives now.
        differences: What is otherwise in the program that the call would run.
        note: Why no programs were compared; "" where they were.
    """

    is_same: bool
    differences: tuple[Difference, ...] = ()
    note: str = ""

    def __str__(self) -> str:
        return "\n".join(map(str, self.differences)) or self.note or "same"


class CompiledStep(ABC):
    """A Python step that runs as one XLA program. Call it like the function it was made from.

    Its name, its signature and its docstring are the function's: libraries ask for them.

    Attributes:
        _step: The function.
    """

    _step: Callable[..., Any]

    def __init__(self, step: Callable[..., Any]) -> None:
        self._step = step
        update_wrapper(self, step, updated=())

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """Be a method where a class has it, as the function itself would be."""
        return self if instance is None else MethodType(self, instance)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy what holds the step: a copy has the function and makes programs of its own."""
        return _compiled_again, (self._step,)

    @abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step, tracing and compiling it first where needed."""

    @abstractmethod
    def hlo(self) -> str:
        """Return the partitioned, optimised HLO text of the program used last."""

    @abstractmethod
    def stats(self) -> Mapping[str, Any]:
        """Return counts: calls, traces, and the reason of each trace."""

    def explain(self) -> str:
        """Return what the step's programs are made of, and why it was traced, as text to print.

        Returns:
            Tables: the inputs of the program used last; its guards, by what holds them; what is
            assigned in Python after each run; the call and the reason of each trace; the seconds of
            tracing, lowering and compiling; the milliseconds that the last call spent on guards and
            on the launch. A runtime shows those that it knows.

        Raises:
            CompileError: The step was not called yet.

        Example:
            >>> import torch, xla_dtensor as xd
            >>> mesh = xd.init_device_mesh("xla", (2, 4), mesh_dim_names=("dp", "tp"))
            >>> step = xd.compile(lambda x: x * 2)
            >>> _ = step(xd.distribute_tensor(torch.ones(4), mesh))
            >>> print(step.explain().splitlines()[0])
            <lambda>: 1 calls, 1 traces
        """
        stats = self.stats()
        name = getattr(self._step, "__qualname__", type(self._step).__name__)
        head = f"{name}: {stats['calls']} calls, {stats['traces']} traces"
        return "\n".join([head, *(f"  {reason}" for reason in stats["reasons"])])

    @abstractmethod
    def metrics(self, tokens_per_step: int | None = None) -> Mapping[str, float | None]:
        """Return how fast the step goes, over its last 100 calls.

        Args:
            tokens_per_step: Tokens per call; by default the size of the largest tensor of integers
                among the arguments.

        Returns:
            "step_seconds", the median time from one call to the next; "tokens_per_second";
            "flops_per_step" and "flops_per_second", the floating-point operations of matrix
            products and convolutions on all devices together; "mfu", the latter as a fraction of
            what the devices can do in bfloat16. None for what is not known (yet).

        Raises:
            CompileError: The step was not called yet.
        """

    def verify(self, *args: Any, **kwargs: Any) -> Verification:
        """Trace the step as Python is now, and compare with the program that a call would run.

        A call runs a kept program where nothing has changed that the step is known to read. This is
        the proof: the program, its constants and the step's work on the host are those of a new
        trace. Nothing is run and nothing counts as a call or a trace. Parameters, gradients,
        optimizers, generators, arguments and what the step assigns in Python are afterwards what
        they were, also where the step raises. Other effects of its Python, such as printing, happen
        once more.

        With ``XLA_DTENSOR_VERIFY_STEPS=N`` in the environment when the step is compiled, every N-th
        call is verified before it runs, and one that differs raises ``CompileError``.

        What is assigned in Python after each run is not compared, and where only one of the traces
        tells a value how to lie, that is no difference.

        Args:
            *args: Arguments of a call that is to be verified.
            **kwargs: Its keyword arguments.

        Returns:
            What is otherwise: constants, ops, inputs and outputs, with the user's lines. Where the
            call would trace anew, nothing is, and its ``note`` says why that would happen.

        Raises:
            CompileError: The runtime cannot verify; or tracing the step raises it.

        Example:
            >>> import torch, xla_dtensor as xd
            >>> def scaled(x, factor=2.0):
            ...     return x * factor
            >>> mesh = xd.init_device_mesh("xla", (2, 4), mesh_dim_names=("dp", "tp"))
            >>> step, x = xd.compile(scaled), xd.distribute_tensor(torch.ones(4), mesh)
            >>> step(x).full_tensor().tolist()
            [2.0, 2.0, 2.0, 2.0]
            >>> step.verify(x).is_same
            True
        """
        raise CompileError(
            f"A compiled step was asked to verify a call of {len(args) + len(kwargs)} arguments. "
            f"{type(self).__name__} cannot trace without running. Compare its results with the "
            "plain step's instead."
        )

    def evidence(
        self, mesh: Mesh, models: Sequence[torch.nn.Module] = (), **facts: Any
    ) -> Evidence:
        """Return what the program used last leaves behind, for a report.

        Args:
            mesh: The mesh to name axes of; its root lists the program's devices.
            models: Modules, by whose paths tensors are named where the runtime can tell them.
            **facts: What else the evidence says, ``title`` among it.

        Returns:
            The evidence: the program's text, and what else this runtime knows of it.

        Raises:
            CompileError: The step was not called yet.
        """
        return Evidence(hlo_text=self.hlo(), mesh=mesh.root, **facts)

    def export(
        self,
        path: str | os.PathLike[str],
        mesh: Mesh,
        models: Sequence[torch.nn.Module] = (),
        platforms: Sequence[str] | None = None,
    ) -> None:
        """Write the program used last as StableHLO with its shardings, for other compilers.

        Weights and optimizer state are inputs of it, and outputs. They are not written: save them
        with :mod:`xla_dtensor.checkpoint`.

        Args:
            path: A folder, which is made: "program.jax" for ``jax.export.deserialize``,
                "program.mlir" the same as text, "signature.json" with name, shape, dtype and layout
                of each input and output in order.
            mesh: The mesh to name axes of; its root lists the program's devices.
            models: Modules, by whose paths tensors are named.
            platforms: What to write it for, "tpu" or "cuda" for example. None: the devices at hand.

        Raises:
            CompileError: The step was not called yet; this runtime cannot write it; the package
                flatbuffers is not installed; XLA would have to be told how a product lies.

        Example:
            >>> import os, tempfile, torch, xla_dtensor as xd
            >>> mesh = xd.init_device_mesh("xla", (2, 4), mesh_dim_names=("dp", "tp"))
            >>> model = xd.shard_module(torch.nn.Linear(8, 4), mesh, {"": "colwise"})
            >>> step = xd.compile(lambda x: model(x))
            >>> _ = step(xd.distribute_tensor(torch.ones(2, 8), mesh))
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     step.export(folder, mesh.value, [model])
            ...     print(*sorted(os.listdir(folder)))
            program.jax program.mlir signature.json
        """
        raise CompileError(
            f"A compiled step was asked to export its program to path={os.fspath(path)!r}. "
            f"{type(self).__name__} cannot write it. Use the runtime jax."
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the programs compiled so far to a file, for `load` in another process.

        Args:
            path: The file; one that is there is replaced.

        Raises:
            CompileError: There is no program yet, or this runtime cannot write programs.
        """
        raise CompileError(
            f"A compiled step was asked to save its programs to path={os.fspath(path)!r}. "
            f"{type(self).__name__} cannot write them. Use the runtime's compile cache instead."
        )

    def load(self, path: str | os.PathLike[str]) -> None:
        """Read programs that `save` wrote; a call whose trace is one of theirs is not compiled.

        Load only files that you trust: they contain code.

        Args:
            path: The file.

        Raises:
            CompileError: It is no such file, or was written on other devices.
        """
        raise CompileError(
            f"A compiled step was asked to load programs from path={os.fspath(path)!r}. "
            f"{type(self).__name__} cannot read them. Use the runtime's compile cache instead."
        )


def refuse_lost_write(argument: torch.Tensor) -> NoReturn:
    """Refuse a write to an argument that is on the host.

    Raises:
        CompileError: Always.
    """
    raise CompileError(
        f"A compiled step wrote in place to an argument of shape={tuple(argument.shape)} that is a "
        "plain CPU tensor. The program works on a copy of it, and the write would be lost. Pass a "
        "DTensor, or write to argument.clone()."
    )


def _compiled_again(step: Callable[..., Any]) -> Any:
    from xla_dtensor.runtimes.registry import get_runtime

    return get_runtime().compile(step)


# --------------------------------------------------------------------------- The runtime interface


@dataclass(frozen=True)
class AddressableShard:
    """One device's part of a global tensor, on a device that this process can reach.

    Args:
        device_id: Global id of the device.
        index: One slice per dim into the global tensor; empty slices for a shard of padding only.
        data: The values as a CPU tensor, padding cut off.
        num_bytes_on_device: Bytes that the device holds for this shard, padding included.
    """

    device_id: int
    index: tuple[slice, ...]
    data: torch.Tensor
    num_bytes_on_device: int


class Runtime(ABC):
    """An XLA back end. Subclass it, register it under the entry point group, and it can be chosen.

    The conformance tests in ``tests/xla_dtensor/runtimes/test_conformance.py`` state what each
    method has to guarantee.
    """

    name: ClassVar[str]
    install_hint: ClassVar[str]

    # Keys that every DTensor of this runtime must carry beside those of its device, so that whole
    # ops reach the runtime (see runtimes/README.md). None where the device has its own.
    extra_dispatch_keys: ClassVar[Any] = None

    # The device that payloads report.
    torch_device: ClassVar[Any] = "cpu"

    # Whether what is computed in a `scope` has its name in the compiled program.
    has_scopes: ClassVar[bool] = False

    def scope(self, name: str) -> AbstractContextManager[Any]:
        """Name what is computed inside, where programs carry names; scopes nest."""
        return nullcontext()

    def note_new_data(self, tensor: Any) -> None:  # noqa: B027
        """Be told that a DTensor is about to get another payload: ``tensor.data = other``."""

    def is_same_memory(self, payload: torch.Tensor, other: torch.Tensor) -> bool:
        """Tell whether two payloads are known to be one memory, seen alike."""
        return payload is other

    # Whether tensors have no values, because their devices are not here (``absent``).
    is_abstract: ClassVar[bool] = False

    # Whether products are pinned to their labels, because nobody can look at how a program will be
    # cut before XLA cuts it (``products``).
    pins_products: ClassVar[bool] = False

    # Whether payloads have torch's strides. Where they have none, dispatch asks torch for them.
    has_strides: ClassVar[bool] = True

    # Whether `value_token` tells of every write. Else only autograd's version counters do.
    has_value_tokens: ClassVar[bool] = False

    # Whether torch_xla wraps each plain tensor, because the process called use_spmd() itself.
    wraps_plain_tensors: bool = False

    @property
    def is_tracing(self) -> bool:
        """Whether a step is traced at present, so that tensors have no values."""
        return False

    @property
    def tells_factors(self) -> bool:
        """Whether factors of a product are told to agree by their labels (``products``)."""
        return self.pins_products

    def profile(self, folder: str | os.PathLike[str]) -> AbstractContextManager[None]:
        """Record what host and devices do, for TensorBoard or Perfetto.

        Args:
            folder: Where the recording is written to.
        """
        raise _missing(self, "profiles")

    # ------------------------------------------------------------------ attention

    def has_attention_kernel(self, q: Any, k: Any, v: Any, is_causal: bool) -> bool:
        """Tell whether the device has a kernel for an attention without a mask, of any length.

        Args:
            q: (..., query heads, queries, dim).
            k: (..., key heads, keys, dim).
            v: (..., key heads, keys, value dim).
            is_causal: Whether a query sees no key behind it.
        """
        return False

    # ------------------------------------------------------------------ loops

    # Whether equal layers can be run as one loop: `run_layers` and `named` are there.
    has_loops: ClassVar[bool] = False

    def run_layers(
        self,
        layers: Layers,
        carry: Sequence[torch.Tensor],
        shared: Sequence[torch.Tensor],
        remat: Remat,
    ) -> Sequence[torch.Tensor]:
        """Run equal layers one after the other, as a loop with gradients.

        Args:
            layers: The layers, at least one.
            carry: What the first is given and each returns.
            shared: What every one is given besides.
            remat: What the backward pass keeps.

        Raises:
            ScanError: A layer cannot be run in a loop.
        """
        raise _missing(self, "loops of layers")

    def named(self, payload: torch.Tensor, name: str) -> torch.Tensor:
        """Return a payload of the same values with a name that `remat` may refer to."""
        raise _missing(self, "loops of layers")

    # ------------------------------------------------------------------ devices

    @abstractmethod
    def device_ids(self) -> tuple[int, ...]:
        """Return the ids of all devices of the job, those of other processes included."""

    @abstractmethod
    def addressable_device_ids(self) -> tuple[int, ...]:
        """Return the ids of the devices that this process can reach."""

    def device_attributes(self) -> Sequence[Mapping[str, Any]]:
        """Return what is known of each device, ordered by id.

        Each has a "name", such as "TPU:3", whose number is the id; "coords", "core_on_chip",
        "slice_index" and "process_index" where the platform has them. mesh_utils.read_devices
        reads them.
        """
        return [{"name": f"{self.name.upper()}:{i}"} for i in sorted(self.device_ids())]

    def memory_statistics(self) -> Mapping[int, Mapping[str, int]]:
        """Return what this process's devices say of their memory, by id: nothing where they do not.

        In bytes: "peak_bytes_in_use", "bytes_in_use" and "bytes_limit", each where it is known.
        """
        return {}

    @abstractmethod
    def describe(self) -> Mapping[str, str]:
        """Return what the doctor prints: versions, platform, settings that this runtime made."""

    @abstractmethod
    def root(self, mesh: Mesh) -> Mesh:
        """Return the mesh whose flat order is the partition order of programs over `mesh`."""

    # ------------------------------------------------------------------ tensors

    @abstractmethod
    def is_payload(self, tensor: torch.Tensor) -> bool:
        """Tell whether `tensor` is one of this runtime's payloads."""

    @abstractmethod
    def put(self, tensor: torch.Tensor, layout: Layout) -> torch.Tensor:
        """Copy a host tensor, equal in every process, to the devices as `layout` says."""

    def make(
        self, fill: float | str, shape: Sequence[int], dtype: torch.dtype, layout: Layout
    ) -> torch.Tensor:
        """Make a global tensor where it lies, the whole nowhere.

        `fill` is a number, or "uniform" on [0, 1) or "normal": then the values depend on the state
        of the generator, not on the layout.
        """
        values = {"uniform": torch.rand, "normal": torch.randn}
        if isinstance(fill, str):
            return self.put(values[fill](tuple(shape), dtype=dtype), layout)
        return self.put(torch.full(tuple(shape), fill, dtype=dtype), layout)

    @abstractmethod
    def from_shards(
        self, shards: Mapping[int, torch.Tensor], shape: Sequence[int], layout: Layout
    ) -> torch.Tensor:
        """Build a global tensor from one host tensor per addressable device, keyed by device id."""

    @abstractmethod
    def constrain(self, payload: torch.Tensor, layout: Layout) -> torch.Tensor:
        """Return a new payload with the same values that lies as `layout` says."""

    def constrain_new(self, payload: torch.Tensor, layout: Layout) -> torch.Tensor:
        """Return what an op has just made, which nobody else has, lying as `layout` says."""
        return self.constrain(payload, layout)

    def summed_up(self, payload: torch.Tensor, layout: Layout) -> torch.Tensor:
        """Return a gradient that, in a program, lies as `layout` says before it is moved on.

        `payload` itself where nothing is being traced, or the compiler needs no telling.
        """
        return payload

    @abstractmethod
    def op_sharding(self, payload: torch.Tensor) -> OpSharding:
        """Return how the payload really lies, read from the runtime, relative to the root."""

    @abstractmethod
    def addressable_shards(
        self, payload: torch.Tensor, devices: Collection[int] | None = None
    ) -> tuple[AddressableShard, ...]:
        """Return this process's shards, ordered by device id; of `devices` only, where given."""

    @abstractmethod
    def to_host(self, payload: torch.Tensor) -> torch.Tensor:
        """Return the whole value as a CPU tensor. All processes have to call this alike."""

    def jax_array(self, payload: torch.Tensor) -> Any:
        """Return the whole value as a global jax.Array; while a step is traced, its tracer."""
        raise _missing(self, "arrays of JAX")

    # ------------------------------------------------------------------ annotations in place

    def annotate(self, payload: torch.Tensor, layout: Layout) -> None:
        """Tell XLA how `payload` is to lie, in place: same tensor, same values, no new op."""
        raise _missing(self, "annotations in place")

    def annotate_view(self, view: torch.Tensor, layout: Layout) -> None:
        """Tell XLA how `view`, which may share its values with a base, is to lie.

        Unlike `annotate` it says nothing of the base, and is not remembered.
        """
        self.annotate(view, layout)

    def annotate_written(  # noqa: B027
        self, base: torch.Tensor, layout: Layout
    ) -> None:
        """Hear that `base`, labelled `layout`, was written to through a view of it.

        Nothing to do where a write answers with a value that lies as the one before.
        """

    def annotation(self, payload: torch.Tensor) -> OpSharding | None:
        """Return what `payload` was told, relative to the root; None when it was told nothing."""
        raise _missing(self, "annotations in place")

    def clear_annotation(self, payload: torch.Tensor) -> None:
        """Take back what `payload` was told: XLA may lay it as it likes from now on."""
        raise _missing(self, "annotations in place")

    def when_step_ends(  # noqa: B027
        self, payload: torch.Tensor, undo: Callable[[], None]
    ) -> None:
        """Call `undo` after the trace in progress, if its annotation of `payload` ends with it.

        Nothing to do where there is no trace, or where what a step annotates stays annotated.
        """

    def reshaped_in_place(  # noqa: B027
        self, payload: torch.Tensor, layout: Layout
    ) -> None:
        """Hear that ``t_`` or the like has changed the shape of `payload`, labelled `layout` now.

        Nothing to do where what a payload was told follows its views.
        """

    # ------------------------------------------------------------------ manual regions

    def enter_manual(
        self, payload: torch.Tensor, layout: Layout, region: ManualRegion
    ) -> torch.Tensor:
        """Return each device's tile of `payload` as one manual payload of the tile's shape.

        `layout` names axes of the region only and divides the shape evenly. Along the region's
        other axes each device gets a copy. Below autograd; the source stays as it is.
        """
        raise _missing(self, "manual regions")

    def leave_manual(
        self, manual: torch.Tensor, layout: Layout, region: ManualRegion
    ) -> torch.Tensor:
        """Return the payload whose tiles under `layout` are `manual`; `enter_manual` undone.

        Along axes that `layout` does not name all devices must hold the same values.
        """
        raise _missing(self, "manual regions")

    def run_manual_op(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run one aten op on every device's own tile, with no communication.

        Tensors among the arguments are manual payloads of one region, or host tensors, which every
        device sees alike. Tensors among the results are manual payloads.
        """
        raise _missing(self, "manual regions")

    def manual_collective(
        self,
        name: str,
        manual: torch.Tensor,
        region: ManualRegion,
        axes: tuple[Axis, ...],
        **options: Any,
    ) -> torch.Tensor:
        """Run a collective over some axes of a region, below autograd; return a manual payload.

        The members of a group are numbered along `axes`, the first being the outermost; `n` is
        their number.

        ================  =================================  =====================================
        name              options                            result on member i
        ================  =================================  =====================================
        "all_reduce"      op="sum", "max" or "min"           the reduction of all members' tensors
        "all_gather"      dim                                all members' tensors, joined along dim
        "reduce_scatter"  dim (of a size that n divides)     block i along dim of the sum
        "all_to_all"      split_dim, concat_dim              block i along split_dim of each
                                                             member's tensor, joined along
                                                             concat_dim in member order
        "permute"         pairs of (source, destination)     the tensor of its source, zeros if none
        "axis_index"      none                               i, an int64 scalar
        ================  =================================  =====================================
        """
        raise _missing(self, "manual regions")

    def value_token(self, payload: torch.Tensor) -> object | None:
        """Return an object that is another one once `payload` has been written to.

        None where the runtime cannot tell, and only torch's version counter does. A trace in
        progress hears that it depends on the value.
        """
        return None

    # ------------------------------------------------------------------ local views

    # A local payload is like a manual payload, but may be read, and may be computed before it
    # leaves its region. The same thing where manual payloads can do that.

    def enter_local(
        self, payload: torch.Tensor, layout: Layout, region: ManualRegion
    ) -> torch.Tensor:
        """Return each device's shard of `payload` as one local payload; see `enter_manual`."""
        return self.enter_manual(payload, layout, region)

    def leave_local(
        self, local: torch.Tensor, layout: Layout, region: ManualRegion
    ) -> torch.Tensor:
        """Return the payload whose shards under `layout` are `local`; see `leave_manual`."""
        return self.leave_manual(local, layout, region)

    def run_local_op(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run one aten op on every device's own tensor, with no communication.

        Tensors among the arguments are local payloads of one region, or host tensors, which every
        device sees alike. Tensors among the results are local payloads.
        """
        return self.run_manual_op(func, args, kwargs)

    def local_collective(
        self,
        name: str,
        local: torch.Tensor,
        region: ManualRegion,
        axes: tuple[Axis, ...],
        **options: Any,
    ) -> torch.Tensor:
        """Run a collective on a local payload; names and options as for `manual_collective`."""
        return self.manual_collective(name, local, region, axes, **options)

    def native_sharding(self, sharding: OpSharding) -> Any:
        """Return an OpSharding as the object that the runtime's own functions take."""
        return sharding

    def known_sharding(self, payload: torch.Tensor) -> OpSharding | None:
        """Return how a payload lies as far as that is known without running anything."""
        return self.annotation(payload)

    def input_sharding(self, tensor: torch.Tensor, sharding: OpSharding, minibatch: bool) -> Any:
        """Return what the runtime's own data loaders want to be told of a host tensor."""
        raise _missing(self, "input shardings for data loaders of its own")

    def barrier(self, payloads: Sequence[torch.Tensor]) -> None:
        """Keep XLA from moving work across this point, for the values of these payloads."""
        raise _missing(self, "optimization barriers")

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a payload over the storage of a plain device tensor: writes to one reach both."""
        return tensor.detach()

    def to_plain(self, payload: torch.Tensor) -> torch.Tensor:
        """Return a payload's value as a tensor to hand to users, fit to be mixed with DTensors."""
        return payload.detach()

    # ------------------------------------------------------------------ programs

    def note_write_to_host(
        self, target: torch.Tensor, put: Callable[[torch.Tensor], torch.Tensor]
    ) -> bool:
        """Be told that an op is about to write what the mesh holds to a plain tensor.

        Args:
            target: The tensor.
            put: What returns such a tensor on the mesh, whole on each device.

        Returns:
            Whether the op is to be left out: it will come again, with such a tensor.
        """
        return False

    @abstractmethod
    def run_op(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run one aten op on payloads, below autograd."""

    def runs_itself(self, func: Any) -> bool:
        """Tell whether an aten op has to reach :meth:`run_op` from a graph of torch.compile, too.

        Such are ops that torch would take apart, and ops that it would have the device get wrong.
        """
        return False

    @abstractmethod
    def compile(self, step: Callable[..., Any]) -> CompiledStep:
        """Return `step` as one XLA program, see :func:`xla_dtensor.compile`."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until all work handed to the devices is done."""

    # ------------------------------------------------------------------ random numbers

    # One generator per process draws for all its devices: a draw is one of the global tensor,
    # with the same values however that lies. Other generators may stand beside it; they are
    # objects of the runtime's own, and None stands for the one in use.

    @abstractmethod
    def manual_seed(self, seed: int) -> None:
        """Seed the generator in use. torch.manual_seed has to come here as well."""

    def skip_draw(self) -> None:  # noqa: B027
        """Advance the generator in use by one draw, which only other processes have part in.

        Nothing to do where there is one process.
        """

    def get_rng_state(self, rng: Any = None) -> torch.Tensor:
        """Return a generator's state: a uint8 tensor of shape (8,) that only the runtime reads."""
        raise _missing(self, "the state of its random number generator")

    def set_rng_state(self, state: torch.Tensor, rng: Any = None) -> None:
        """Put a generator into a state that `get_rng_state` returned: it draws the same again."""
        raise _missing(self, "the state of its random number generator")

    def new_rng(self, seed: int) -> Any:
        """Return a generator beside the one in use."""
        raise _missing(self, "several random number generators")

    def using_rng(self, rng: Any) -> AbstractContextManager[None]:
        """Let draws inside, in a compiled step too, take from `rng`; it is where they left it."""
        raise _missing(self, "several random number generators")

    def first_process_state(self) -> torch.Tensor:
        """Return the state of the first process's generator. All processes call this alike."""
        return self.get_rng_state()


def _missing(runtime: Runtime, method: str) -> UnsupportedOpError:
    return UnsupportedOpError(
        f"The runtime {runtime.name!r} was asked for {method}. It does not have them. Use another "
        "runtime, or implement the methods of xla_dtensor.runtimes.base."
    )


# ----------------------------------------------- Equal layers that a runtime is to run as one loop


@dataclass(frozen=True)
class Layers:
    """What there is to run.

    Args:
        call: Runs one block on lists of carry and shared tensors; returns a list.
        swapped: A context in which the block has the given tensors for its own.
        tensors: Each layer's parameters and buffers, all in the same order.
        names: What errors call the tensors of a layer.
        modules: The layers; the first one's code is run for all.
    """

    call: Callable[[Sequence[Any], Sequence[Any]], Sequence[Any]]
    swapped: Callable[[Sequence[Any]], AbstractContextManager[None]]
    tensors: Sequence[Sequence[torch.Tensor]]
    names: Sequence[str]
    modules: Sequence[torch.nn.Module]
