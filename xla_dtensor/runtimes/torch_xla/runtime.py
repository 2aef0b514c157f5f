"""The torch_xla runtime: lazy tensors, annotated; programs partitioned by GSPMD. torch 2.9 only.

Partition ids are device ids: torch_xla's device assignment is the identity, so the root of every
mesh is the plain count over all devices, and a permuted mesh is a permuted tile assignment.

A payload that has not been computed yet has no sharding but what it was annotated with. Methods
that say how a payload really lies therefore run all pending work first, which is what the end of
a step does as well; inside a compiled step they raise.

Limits: a mesh covers all devices (torch_xla aborts on others), and programs over several hosts
cannot be tested without them.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache
from types import ModuleType
from typing import Any, ClassVar

import numpy as np
import torch

from mesh_utils import Axis, Mesh
from xla_dtensor.core import Layout, ManualRegion, OpSharding
from xla_dtensor.core.errors import CompileError, DistributeError
from xla_dtensor.runtimes.base import AddressableShard, CompiledStep, Runtime
from xla_dtensor.runtimes.nested import runs_as_it_is
from xla_dtensor.runtimes.state import follow_torch_seed, pack_state, unpack_state
from xla_dtensor.runtimes.torch_xla.annotations import (
    DEVICE,
    input_sharding,
    parse_annotation,
    start,
    to_annotation,
    xlac,
)
from xla_dtensor.runtimes.torch_xla.correct_derivatives import register_composites, register_strided
from xla_dtensor.runtimes.torch_xla.corrections import may_be_corrected
from xla_dtensor.runtimes.torch_xla.local import LocalViews
from xla_dtensor.runtimes.torch_xla.manual import ManualRegions
from xla_dtensor.runtimes.torch_xla.payload import (
    Annotations,
    UnevenPayloads,
    check_shards,
    functionalization,
    is_payload,
    padded_shard,
    put_host,
    refuse_unwrapped,
    run_op,
    shard_of,
    to_payload,
    to_plain,
)
from xla_dtensor.runtimes.torch_xla.step import (
    TorchXlaStep,
    correct_program_keys,
    correct_reads,
    refuse_openxla,
)
from xla_dtensor.runtimes.torch_xla.whole_ops import EXTRA_KEYS, register_whole_ops

__all__ = ["TorchXlaRuntime"]


# --------------------------------------------------------------------------------------- torch.xla
#
# What torch looks up by a device's name, and torch_xla 2.9 does not provide.
#
# ``torch.utils.checkpoint`` needs it, first to run at all, then to repeat the random numbers of the
# forward pass: without the functions here it would recompute another dropout, and gradients would
# be wrong in silence.


def register_device_module() -> None:
    """Make ``torch.xla``; calling it again, or after another package made it, does nothing."""
    if hasattr(torch, "xla"):
        return
    module = ModuleType("torch.xla", __doc__)
    functions = (current_device, device, device_count, get_rng_state, is_available, set_rng_state)
    module.__dict__.update({function.__name__: function for function in functions})
    module.__dict__["_initialized"] = True
    torch._register_device_module("xla", module)


def is_available() -> bool:
    """Tell that there are devices."""
    return True


def device_count() -> int:
    """Return the number of devices that torch sees: one, over which XLA spreads programs."""
    return 1


def current_device() -> int:
    """Return the one device's number."""
    return 0


@contextlib.contextmanager
def device(_: Any) -> Iterator[None]:
    """Do nothing: there is one device."""
    yield


def get_rng_state(_: Any = None) -> torch.Tensor:
    """Return the state of the devices' random number generator."""
    seed = xlac()._xla_get_rng_seed("")
    # An unsigned number, in a tensor of signed ones.
    return torch.tensor(seed - 2**64 if seed >= 2**63 else seed)


def set_rng_state(state: torch.Tensor, _: Any = None) -> None:
    """Put the devices' random number generator into a state that `get_rng_state` returned."""
    xlac()._xla_set_rng_seed(int(state) % 2**64, "")


# ----------------------------------------------- The devices' random number generator on torch_xla
#
# One number that torch_xla advances by itself.
#
# It advances with every draw, and with every program that runs. So the numbers that follow a seed
# depend on where the program is cut by reading a value, but never on how the tensors lie.
#
# ``torch.utils.checkpoint`` rewinds it, and torch's CPU generator, but knows nothing of generators
# beside it. Taking one up therefore draws a number from the CPU's, as a mark: a mark that comes
# again is torch going back to where it was, and the generator starts once more from where it was
# then.

_STARTS_AT = 101  # torch_xla's own first seed
_MARKS_KEPT = 16_384


class TorchXlaGenerator:
    """torch_xla's generator, and others in its place for a while.

    A generator beside it is a list of its one number, which is changed in place.
    """

    def __init__(self) -> None:
        self._xlac: Any = importlib.import_module("torch_xla")._XLAC
        self._starts: OrderedDict[int, tuple[list[int], int]] = OrderedDict()
        if self.read(None) == _STARTS_AT:
            self.seed(torch.initial_seed())

    def seed(self, number: int) -> None:
        """Start anew from `number`."""
        self.write(number, None)

    def read(self, rng: list[int] | None) -> int:
        """Return the present number of a generator, of torch_xla's own if None."""
        return int(self._xlac._xla_get_rng_seed("")) if rng is None else rng[0]

    def write(self, number: int, rng: list[int] | None) -> None:
        """Put a generator, or torch_xla's own, where :meth:`read` found it."""
        # Who sets the state wants what follows from it, not what an old mark would repeat.
        self._starts.clear()
        if rng is None:
            self._set(number)
        else:
            rng[0] = number

    def _set(self, number: int) -> None:
        self._xlac._xla_set_rng_seed(number % 2**64, "")

    @contextlib.contextmanager
    def using(self, rng: list[int]) -> Iterator[None]:
        """Let draws take from `rng` and advance it, and put back torch_xla's own."""
        mark = int(torch.randint(2**63 - 1, (), device="cpu"))
        marked, start = self._starts.get(mark, (None, 0))
        repeats = marked is rng
        if not repeats:
            start = rng[0]
            self._starts[mark] = rng, start
            if len(self._starts) > _MARKS_KEPT:
                self._starts.popitem(last=False)
        state = self.read(None)
        self._set(start)
        try:
            yield
        finally:
            if not repeats:
                rng[0] = self.read(None)
            self._set(state)


# --------------------------------------------------------------------------- The torch_xla runtime

_COPIES = (torch.ops.aten.clone.default, torch.ops.aten._to_copy.default)


@runs_as_it_is
class TorchXlaRuntime(Runtime):
    """Payloads are torch_xla lazy tensors. Get it by ``get_runtime("torch_xla")``.

    Args:
        num_cpu_devices: Virtual CPU devices. None: as XLA_DTENSOR_CPU_DEVICES says, else whatever
            torch_xla finds.
        dump_hlo: Folder where XLA writes the HLO of compiled steps, for `CompiledStep.hlo`. None:
            as XLA_DTENSOR_DUMP_HLO says, else nowhere.
        compile_cache: Folder for compiled programs, True or False; see
            :mod:`xla_dtensor.runtimes.registry`.

    Raises:
        RuntimeSetupError: torch_xla is missing, of another version, or was started otherwise.
    """

    name: ClassVar[str] = "torch_xla"
    install_hint: ClassVar[str] = "pip install 'xla-dtensor[torch-xla]'"
    torch_device: ClassVar[Any] = DEVICE
    extra_dispatch_keys: ClassVar[Any] = EXTRA_KEYS
    pins_products: ClassVar[bool] = True
    has_strides: ClassVar[bool] = False

    def __init__(
        self,
        num_cpu_devices: int | None = None,
        dump_hlo: str | os.PathLike[str] | None = None,
        compile_cache: str | os.PathLike[str] | bool | None = None,
    ) -> None:
        self._started = start(num_cpu_devices, dump_hlo, compile_cache)
        self.wraps_plain_tensors = self._started.wraps_all
        register_device_module()
        refuse_openxla()
        correct_program_keys()
        correct_reads()
        register_composites()
        register_whole_ops()
        self._torch_xla = importlib.import_module("torch_xla")
        self._xlac = self._torch_xla._XLAC
        self._num_devices = int(self._xlac._xla_num_global_devices())
        # libtpu's partitioner, and one device's none, have no such faults.
        on_tpu = os.environ.get("PJRT_DEVICE") == "TPU"
        register_strided(1 if on_tpu else self._num_devices)
        self._addressable = tuple(map(_device_id, self._xlac._xla_get_runtime_devices()))
        self._root = Mesh.arange((self._num_devices,), ("device",))
        self._uneven = UnevenPayloads()
        self._manual = ManualRegions(self.root, self._op_sharding_for)
        self._annotations = Annotations(
            self._uneven, self._manual.check_global, self.wraps_plain_tensors
        )
        self._annotations.correct_fsdp_v2()
        self._local = LocalViews(self._op_sharding_for, self.known_sharding, self._manual)
        self._rng = TorchXlaGenerator()
        follow_torch_seed(self.manual_seed)

    # ------------------------------------------------------------------ devices

    def device_ids(self) -> tuple[int, ...]:
        return tuple(range(self._num_devices))

    def addressable_device_ids(self) -> tuple[int, ...]:
        return tuple(sorted(self._addressable))

    def device_attributes(self) -> Sequence[Mapping[str, Any]]:
        devices = importlib.import_module("torch_xla.runtime").global_runtime_device_attributes()
        return sorted(devices, key=lambda attributes: _device_id(attributes["name"]))

    def describe(self) -> Mapping[str, str]:
        runtime = importlib.import_module("torch_xla.runtime")
        return {
            "runtime": self.name,
            "torch": torch.__version__,
            "torch_xla": self._torch_xla.__version__,
            "platform": str(runtime.device_type()),
            "devices": f"{self._num_devices}, {len(self._addressable)} of them addressable",
            "processes": str(self._xlac._xla_get_num_processes()),
            "settings": " ".join(f"{k}={v}" for k, v in sorted(self._started.settings.items())),
        }

    def root(self, mesh: Mesh) -> Mesh:
        if not _covers(mesh.root, self._num_devices):
            raise DistributeError(
                f"{mesh!r} was asked for on torch_xla, which runs on devices "
                f"0..{self._num_devices - 1}. Its programs run on all devices, and it aborts the "
                "process on a mesh of others. Pass a mesh over all devices, or one cut out of it "
                "by axis names."
            )
        return self._root

    # ------------------------------------------------------------------ tensors

    def is_payload(self, tensor: torch.Tensor) -> bool:
        return is_payload(tensor)

    def put(self, tensor: torch.Tensor, layout: Layout) -> torch.Tensor:
        sharding = self._op_sharding_for(tensor.shape, layout)
        # Nothing to place in an empty tensor, and torch_xla is of two minds about its annotation.
        annotation = to_annotation(sharding) if tensor.numel() else None
        with functionalization():
            return self._annotations.note(put_host(tensor, annotation), sharding)

    def make(
        self, fill: float | str, shape: Sequence[int], dtype: torch.dtype, layout: Layout
    ) -> torch.Tensor:
        makers = {"uniform": torch.rand, "normal": torch.randn}
        with functionalization():
            if isinstance(fill, str):
                tensor = makers[fill](tuple(shape), dtype=dtype, device=DEVICE)
            else:
                tensor = torch.full(tuple(shape), fill, dtype=dtype, device=DEVICE)
        return self.constrain(to_payload(tensor), layout)

    def from_shards(
        self, shards: Mapping[int, torch.Tensor], shape: Sequence[int], layout: Layout
    ) -> torch.Tensor:
        sharding = self._op_sharding_for(shape, layout)
        shards = dict(shards)  # each is read once: a mapping may read them from a file
        check_shards(shards, shape, sharding, self._addressable)
        tile = sharding.shape_per_tile(shape)
        # In torch_xla's own order of its devices, which need not be that of their ids.
        padded = [padded_shard(shards[device], tile) for device in self._addressable]
        with functionalization():
            annotation = to_annotation(sharding)
            tensor = self._xlac._global_tensor_from_cpu_shards(padded, annotation, list(shape))
            return self._annotations.note(to_payload(tensor), sharding)

    def constrain(self, payload: torch.Tensor, layout: Layout) -> torch.Tensor:
        self._manual.check_global(payload)
        return self._annotated_copy(payload, self._op_sharding_for(payload.shape, layout))

    def _annotated_copy(self, payload: torch.Tensor, sharding: OpSharding) -> torch.Tensor:
        with functionalization():
            # A clone shares its source's graph node. mark_sharding would annotate that one (and
            # with it the source); this call makes a new node, for every dtype.
            constrained = to_payload(payload).clone()
            if payload.numel():
                self._xlac._xla_annotate_custom_sharding(constrained, to_annotation(sharding))
        return self._annotations.note(constrained, sharding)

    def annotate(self, payload: torch.Tensor, layout: Layout) -> None:
        self._annotations.annotate(payload, self._op_sharding_for(payload.shape, layout))

    def annotate_view(self, view: torch.Tensor, layout: Layout) -> None:
        self._annotations.annotate_view(view, self._op_sharding_for(view.shape, layout))

    def annotate_written(self, base: torch.Tensor, layout: Layout) -> None:
        self._annotations.annotate_written(base, self._op_sharding_for(base.shape, layout))

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._annotations.alias(tensor)

    def annotation(self, payload: torch.Tensor) -> OpSharding | None:
        return self._annotations.of(payload)

    def clear_annotation(self, payload: torch.Tensor) -> None:
        self._annotations.clear(payload)

    def reshaped_in_place(self, payload: torch.Tensor, layout: Layout) -> None:
        # torch_xla would hold on to a sharding of the old shape, and fail to compile it.
        if self._annotations.has_annotation(payload):
            self.annotate(payload, layout)

    def op_sharding(self, payload: torch.Tensor) -> OpSharding:
        self._manual.check_global(payload)
        if payload.numel() == 0:
            return self._annotations.of_empty(payload)
        with functionalization():
            self._materialise(payload)
            return parse_annotation(self._xlac._get_xla_sharding_spec(payload))

    def addressable_shards(
        self, payload: torch.Tensor, devices: Collection[int] | None = None
    ) -> tuple[AddressableShard, ...]:
        sharding = self.op_sharding(payload)
        if payload.numel() == 0:
            empty = torch.empty(sharding.shape_per_tile(payload.shape), dtype=payload.dtype)
            devices = sorted(self._addressable)
            return tuple(shard_of(device, empty, payload, sharding) for device in devices)
        with functionalization():
            if not self._xlac._get_xla_sharding_spec(payload):
                # Fresh from the host: on every device, though torch_xla has not noted it.
                self._xlac._xla_mark_sharding(payload, to_annotation(sharding))
            tiles = self._xlac._get_local_shards([payload])[0]
        shards = [shard_of(_device_id(name), tile, payload, sharding) for tile, name in tiles]
        selection = [s for s in shards if devices is None or s.device_id in devices]
        return tuple(sorted(selection, key=lambda shard: shard.device_id))

    def to_host(self, payload: torch.Tensor) -> torch.Tensor:
        if payload.numel() == 0:
            return torch.empty(payload.shape, dtype=payload.dtype)
        sharding = self.op_sharding(payload)
        if sharding.is_tiled and len(self._addressable) == self._num_devices:
            # Put together here: .cpu() would gather it on every device, by a program of its own.
            host = torch.empty(payload.shape, dtype=payload.dtype)
            for shard in self.addressable_shards(payload):
                host[shard.index] = shard.data
            return host
        with functionalization():
            return payload.detach().cpu()

    def to_plain(self, payload: torch.Tensor) -> torch.Tensor:
        """Return a payload's present value as a plain XLA tensor, to be handed to users.

        An op on a DTensor and a payload (rather than such a plain tensor) returns no DTensor.
        """
        self._manual.check_global(payload)
        with functionalization():
            plain = payload.detach()
            return plain if self.wraps_plain_tensors else to_plain(plain)

    def enter_manual(
        self, payload: torch.Tensor, layout: Layout, region: ManualRegion
    ) -> torch.Tensor:
        return self._manual.enter(payload, layout, region)

    def leave_manual(
        self, manual: torch.Tensor, layout: Layout, region: ManualRegion
    ) -> torch.Tensor:
        return self._annotations.note(*self._manual.leave(manual, layout, region))

    def run_manual_op(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return self._manual.run_op(func, args, kwargs)

    def manual_collective(
        self,
        name: str,
        manual: torch.Tensor,
        region: ManualRegion,
        axes: tuple[Axis, ...],
        **options: Any,
    ) -> torch.Tensor:
        return self._manual.collective(name, manual, region, axes, **options)

    def enter_local(
        self, payload: torch.Tensor, layout: Layout, region: ManualRegion
    ) -> torch.Tensor:
        return self._local.enter(payload, layout, region)

    def leave_local(
        self, local: torch.Tensor, layout: Layout, region: ManualRegion
    ) -> torch.Tensor:
        payload, sharding = self._local.leave(local, layout, region)
        return payload if sharding is None else self._annotations.note(payload, sharding)

    def run_local_op(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return self._local.run_op(func, args, kwargs)

    def local_collective(
        self,
        name: str,
        local: torch.Tensor,
        region: ManualRegion,
        axes: tuple[Axis, ...],
        **options: Any,
    ) -> torch.Tensor:
        return self._local.collective(name, local, region, axes, **options)

    def _op_sharding_for(self, shape: Sequence[int], layout: Layout) -> OpSharding:
        if layout.ndim != len(shape):
            raise DistributeError(
                f"The layout {layout} was asked for on a tensor of shape={tuple(shape)}. The "
                f"layout is one of {layout.ndim} dims, the tensor has {len(shape)}. Pass a layout "
                "of the tensor's rank."
            )
        return layout.op_sharding(self.root(layout.mesh))

    def _materialise(self, payload: torch.Tensor) -> None:
        if self._xlac._check_tensor_need_materialization([payload])[0]:
            if not self._xlac._get_allow_execution():
                raise CompileError(
                    "How a tensor lies was asked for inside a compiled step. It is decided when "
                    "the step's program is compiled. Ask after the call, for a returned tensor."
                )
            self._torch_xla.sync()
            self._uneven.restore()
        # A program that runs has already been noted as the tensor's value, but is not there yet.
        self._xlac._xla_wait_device_ops([])

    def native_sharding(self, sharding: OpSharding) -> Any:
        return to_annotation(sharding)

    def known_sharding(self, payload: torch.Tensor) -> OpSharding | None:
        with functionalization():
            text = self._xlac._get_xla_sharding_spec(payload) if payload.numel() else ""
        sharding = parse_annotation(text or "")
        return sharding if sharding.is_tiled else self.annotation(payload)

    def input_sharding(self, tensor: torch.Tensor, sharding: OpSharding, minibatch: bool) -> Any:
        return input_sharding(tensor, sharding, minibatch)

    def barrier(self, payloads: Sequence[torch.Tensor]) -> None:
        self._manual.check_global(payloads)
        with functionalization():
            self._xlac._xla_optimization_barrier_(list(payloads))

    # ------------------------------------------------------------------ programs

    def run_op(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        self._manual.check_global(*args, *kwargs.values())
        if self.wraps_plain_tensors:
            refuse_unwrapped(func, args, kwargs)
        output = run_op(func, args, kwargs)
        if func in _COPIES and args[0] in self._uneven and output.dtype == args[0].dtype:
            # It shares its source's node. The first that is read on the host says there that it
            # lies replicated, and no later program would fit the other one's shards.
            output = self._annotated_copy(output, self._uneven.of(args[0]))
        if func is torch.ops.aten.detach.default:
            self._annotations.follow(args[0], output)
        return output

    def runs_itself(self, func: Any) -> bool:
        return may_be_corrected(func)

    def compile(self, step: Callable[..., Any]) -> CompiledStep:
        return TorchXlaStep(step, self._started.dump_dir, self._uneven.restore)

    # ------------------------------------------------------------------ random numbers

    def manual_seed(self, seed: int) -> None:
        self._rng.seed(seed)

    def get_rng_state(self, rng: Any = None) -> torch.Tensor:
        return pack_state(self._rng.read(rng))

    def set_rng_state(self, state: torch.Tensor, rng: Any = None) -> None:
        self._rng.write(unpack_state(state), rng)

    def new_rng(self, seed: int) -> Any:
        return [seed]

    def using_rng(self, rng: Any) -> AbstractContextManager[None]:
        return self._rng.using(rng)

    def synchronize(self) -> None:
        self._torch_xla.sync(wait=True)
        with functionalization():
            self._uneven.restore()
        self._xlac._xla_wait_device_ops([])


def _device_id(name: str) -> int:
    return int(name.rpartition(":")[2])


@lru_cache(256)
def _covers(mesh: Mesh, num_devices: int) -> bool:
    return np.array_equal(np.sort(mesh.device_ids, axis=None), np.arange(num_devices))
