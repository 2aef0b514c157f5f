"""The JAX runtime: TPU, GPU and CPU through ``jax.Array``, eager and compiled.

Starting it fixes what can only be fixed once: the number of virtual CPU devices, and on CPU the
size of XLA's thread pool. With more virtual devices than cores, XLA:CPU's collectives can starve
that pool and stop for ever; ``NPROC`` is therefore raised while the client is made, on CPU only,
only if the user has not set it, and is taken away again so that child processes do not inherit it.
So is the flag that switches XLA's third form of shardings off, for the jaxlibs that end the process
(also with libtpu's compiler) where an axis moves from a dim to another and a coprime one stays, as
from [-, (a, b)] to [a, b] on a (2, 3) mesh: "Check failed: sliced.has_value()".
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding

from mesh_utils import Axis, Mesh
from xla_dtensor.core import Layout, ManualRegion, OpSharding
from xla_dtensor.core.errors import DistributeError, RuntimeSetupError
from xla_dtensor.runtimes import whole_ops
from xla_dtensor.runtimes.base import AddressableShard, CompiledStep, Layers, Runtime
from xla_dtensor.runtimes.jax.arrays import autocast
from xla_dtensor.runtimes.jax.arrays import trace as jax_trace
from xla_dtensor.runtimes.jax.arrays import values as jax_devices
from xla_dtensor.runtimes.jax.arrays.private import devices_have_started, leave_out_frames_of
from xla_dtensor.runtimes.jax.arrays.sharding import (
    named_sharding,
    padded,
    padded_shape,
    place,
    put_host_array,
    read_op_sharding,
)
from xla_dtensor.runtimes.jax.arrays.storage import Storage
from xla_dtensor.runtimes.jax.arrays.trace import (
    active_trace,
    array_before,
    host_input,
    is_tracer,
    refuse_read,
)
from xla_dtensor.runtimes.jax.arrays.values import (
    jax_dtype,
    numpy_from_torch,
    torch_from_numpy,
    x64,
)
from xla_dtensor.runtimes.jax.compile import same_program
from xla_dtensor.runtimes.jax.compile.host_inputs import refuse_host_input
from xla_dtensor.runtimes.jax.compile.layers import scan
from xla_dtensor.runtimes.jax.eager import manual as jax_manual
from xla_dtensor.runtimes.jax.eager import manual as jax_manual_collectives
from xla_dtensor.runtimes.jax.eager import ops
from xla_dtensor.runtimes.jax.eager import tensor as jax_annotate
from xla_dtensor.runtimes.jax.eager.ops import JaxProgram
from xla_dtensor.runtimes.jax.eager.tensor import EXTRA_KEYS, JaxTensor
from xla_dtensor.runtimes.jax.lower import random
from xla_dtensor.runtimes.jax.lower import random as jax_generator
from xla_dtensor.runtimes.jax.lower.attention import fits_cudnn
from xla_dtensor.runtimes.jax.native import NativeArrays
from xla_dtensor.runtimes.nested import runs_as_it_is
from xla_dtensor.runtimes.registry import cache_folder
from xla_dtensor.runtimes.state import (
    follow_torch_seed,
    follow_torch_states,
    pack_state,
    unpack_state,
)
from xla_dtensor.runtimes.whole_ops import Remat
from xla_dtensor.versions import PACKAGE_FOLDER

__all__ = ["JaxRuntime"]


# --------------------------------------------------------------------- Make an array where it lies
#
# A program without inputs, each device computing its own tile.
#
# Random values are counted from one key by the position in the global array (JAX's partitionable
# generator), so that they do not depend on how the array is cut.

_DRAWS = {"uniform": jax.random.uniform, "normal": jax.random.normal}


def make_array(
    fill: float | str, shape: tuple[int, ...], dtype: Any, sharding: NamedSharding
) -> jax.Array:
    """Make an array of a number, or of "uniform" or "normal" draws, padded to its tiles."""
    if isinstance(fill, str):
        return _drawer(fill, shape, jnp.dtype(dtype), sharding)(random.next_key())
    return _filler(shape, jnp.dtype(dtype), sharding)(jnp.asarray(fill, dtype))


@lru_cache(maxsize=1024)
def _filler(shape: tuple[int, ...], dtype: Any, sharding: NamedSharding) -> Any:
    return jax.jit(lambda x: padded(jnp.full(shape, x, dtype), sharding), out_shardings=sharding)


@lru_cache(maxsize=1024)
def _drawer(kind: str, shape: tuple[int, ...], dtype: Any, sharding: NamedSharding) -> Any:
    wide = jnp.promote_types(dtype, jnp.float32)
    draw = _DRAWS[kind]
    return jax.jit(
        lambda key: padded(draw(key, shape, wide).astype(dtype), sharding), out_shardings=sharding
    )


# -------------------------------------------------------------------------------------------- Names
#
# Names for values on the JAX runtime, by which a policy knows them (``jax.checkpoint``).


def named(tensor: JaxTensor, name: str) -> JaxTensor:
    """Return a tensor of the same values that has a name."""
    with x64():
        storage = Storage(checkpoint_name(tensor.value(), name))
    return JaxTensor(storage, shape=tuple(tensor.shape), stride=tensor.stride(), dtype=tensor.dtype)


# --------------------------------------------------------------------------------- The JAX runtime

_THREADS_ON_CPU = "64"
_THIRD_FORM = "xla_enable_hlo_sharding_v3"
_WRONG_WITH_IT = ("0.11.", "0.12.")  # 0.10.2 has no such flag and is right; newer ones: unknown
_CPU_DEVICES = "XLA_DTENSOR_CPU_DEVICES"


@runs_as_it_is
class JaxRuntime(Runtime):
    """DTensors as ``jax.Array``.

    Args:
        num_cpu_devices: Number of virtual devices when JAX runs on CPU. None: the environment
            variable ``XLA_DTENSOR_CPU_DEVICES``, else JAX's own setting.
        dump_hlo: Taken so that one call starts either runtime. JAX hands out a step's HLO without
            writing files.
        compile_cache: Folder for compiled programs, True or False; see
            :mod:`xla_dtensor.runtimes.registry`.

    Raises:
        RuntimeSetupError: JAX has started before with another number of CPU devices.
    """

    name: ClassVar[str] = "jax"
    install_hint: ClassVar[str] = "pip install 'xla-dtensor[jax]'"
    extra_dispatch_keys: ClassVar[Any] = EXTRA_KEYS

    def __init__(
        self,
        num_cpu_devices: int | None = None,
        dump_hlo: str | os.PathLike[str] | None = None,
        compile_cache: str | os.PathLike[str] | bool | None = None,
    ) -> None:
        self._settings = _start_jax(num_cpu_devices or _cpu_devices_of_environment())
        self._settings |= _keep_programs(compile_cache)
        leave_out_frames_of(
            Path(torch.__file__).parent, PACKAGE_FOLDER, but=PACKAGE_FOLDER / "models"
        )
        whole_ops.register()
        autocast.register()
        self._roots: dict[tuple[int, ...], Mesh] = {}
        jax_generator.start()
        follow_torch_seed(self.manual_seed)
        follow_torch_states(random.keep_beside, random.put_back_beside)
        same_program.start(self)

    has_scopes: ClassVar[bool] = True
    has_value_tokens: ClassVar[bool] = True

    def scope(self, name: str) -> AbstractContextManager[Any]:
        return jax.named_scope(name)

    def profile(self, folder: str | os.PathLike[str]) -> AbstractContextManager[Any]:
        return jax.profiler.trace(os.fspath(folder))

    # ------------------------------------------------------------------ attention

    def has_attention_kernel(self, q: Any, k: Any, v: Any, is_causal: bool) -> bool:
        return fits_cudnn(q, k, v, is_causal)

    # ------------------------------------------------------------------ loops

    has_loops: ClassVar[bool] = True

    def run_layers(
        self, layers: Layers, carry: Sequence[Any], shared: Sequence[Any], remat: Remat
    ) -> Sequence[torch.Tensor]:
        return scan.run(layers, carry, shared, remat)

    def named(self, payload: Any, name: str) -> torch.Tensor:
        return named(payload, name)

    # ------------------------------------------------------------------ devices

    def device_ids(self) -> tuple[int, ...]:
        return tuple(device.id for device in jax_devices.devices())

    def addressable_device_ids(self) -> tuple[int, ...]:
        return tuple(device.id for device in jax_devices.local_devices())

    def device_attributes(self) -> Sequence[Mapping[str, Any]]:
        devices = jax_devices.devices()
        return [_attributes(device) for device in sorted(devices, key=lambda d: d.id)]

    def memory_statistics(self) -> Mapping[int, Mapping[str, int]]:
        return jax_devices.memory_statistics()

    def describe(self) -> Mapping[str, str]:
        devices = jax_devices.devices()
        return {
            "jax": jax.__version__,
            "platform": devices[0].platform,
            "devices": f"{len(devices)} x {devices[0].device_kind}",
            "processes": str(jax.process_count()),
            **self._settings,
        }

    def root(self, mesh: Mesh) -> Mesh:
        key = tuple(np.sort(mesh.root.device_ids, axis=None).tolist())
        if key not in self._roots:
            unknown = set(key) - set(self.device_ids())
            if unknown:
                raise DistributeError(
                    f"A mesh over device ids {_short(key)} was asked for, but JAX has devices "
                    f"{_short(self.device_ids())}. The ids {_short(sorted(unknown))} do not exist. "
                    "Pass ids from get_runtime().device_ids(), or start with more virtual CPU "
                    "devices: get_runtime('jax', num_cpu_devices=N)."
                )
            self._roots[key] = mesh.root
        return self._roots[key]

    # ------------------------------------------------------------------ tensors

    def is_payload(self, tensor: torch.Tensor) -> bool:
        return isinstance(tensor, JaxTensor)

    def _sharding(self, layout: Layout) -> jax.sharding.NamedSharding:
        root = self.root(layout.mesh)
        op_sharding = layout.op_sharding(root)
        return named_sharding(op_sharding, root, layout.ndim, layout.open_dims)

    def put(self, tensor: torch.Tensor, layout: Layout) -> torch.Tensor:
        stand_in = host_input(tensor)
        if stand_in is not None:
            return self.constrain(stand_in, layout)
        with x64():
            sharding = self._sharding(layout)
            array = put_host_array(numpy_from_torch(tensor), sharding)
        return JaxTensor(Storage(array, tuple(tensor.shape), sharding))

    def make(
        self, fill: float | str, shape: Sequence[int], dtype: torch.dtype, layout: Layout
    ) -> torch.Tensor:
        with x64():
            sharding = self._sharding(layout)
            array = make_array(fill, tuple(shape), jax_dtype(dtype), sharding)
        return JaxTensor(Storage(array, tuple(shape), sharding), dtype=dtype)

    def from_shards(
        self, shards: Mapping[int, torch.Tensor], shape: Sequence[int], layout: Layout
    ) -> torch.Tensor:
        sharding, shape = self._sharding(layout), tuple(shape)
        target = padded_shape(shape, sharding)
        tile = sharding.shard_shape(target)
        by_id = {device.id: device for device in jax.local_devices()}
        arrays = []
        with x64():
            for device_id, shard in shards.items():
                refuse_host_input(shard, "make a tensor of shards from")
                host = numpy_from_torch(shard)
                missing = [(0, t - n) for t, n in zip(tile, host.shape, strict=True)]
                padded = np.pad(host, missing) if host.ndim else host
                arrays.append(jax.device_put(padded, by_id[device_id]))
                del shard, host, padded  # `shards` may read the next one while this one waits
            array = jax.make_array_from_single_device_arrays(target, sharding, arrays)
        return JaxTensor(Storage(array, shape, sharding))

    def constrain(self, payload: torch.Tensor, layout: Layout) -> torch.Tensor:
        assert isinstance(payload, JaxTensor)
        with x64():
            sharding = self._sharding(layout)
            array = place(payload.value(), sharding)
        return JaxTensor(Storage(array, tuple(payload.shape), sharding), stride=payload.stride())

    def constrain_new(self, payload: torch.Tensor, layout: Layout) -> torch.Tensor:
        assert isinstance(payload, JaxTensor)
        sharding, array = self._sharding(layout), array_before(payload._storage)
        # Zeros of a tensor's shape are made where it lies: nothing is left to do.
        lies_so = not is_tracer(array) and array.sharding.is_equivalent_to(sharding, array.ndim)
        if payload._steps or not lies_so or array.shape != tuple(payload.shape):
            return self.constrain(payload, layout)
        storage = Storage(array, tuple(payload.shape), sharding)
        return JaxTensor(storage, stride=payload.stride())

    def summed_up(self, payload: torch.Tensor, layout: Layout) -> torch.Tensor:
        traced = isinstance(payload, JaxTensor) and is_tracer(array_before(payload._storage))
        return self.constrain(payload, layout) if traced else payload

    def op_sharding(self, payload: torch.Tensor) -> OpSharding:
        assert isinstance(payload, JaxTensor)
        with x64():
            array = payload.placed()
        return read_op_sharding(array, self._roots)

    def addressable_shards(
        self, payload: torch.Tensor, devices: Collection[int] | None = None
    ) -> tuple[AddressableShard, ...]:
        assert isinstance(payload, JaxTensor)
        with x64():
            array = payload.placed()
            if is_tracer(array):
                refuse_read("read on the host")
            shards = sorted(array.addressable_shards, key=lambda s: s.device.id)
            selected = [s for s in shards if devices is None or s.device.id in devices]
            return tuple(_trimmed(shard, tuple(payload.shape)) for shard in selected)

    def to_host(self, payload: torch.Tensor) -> torch.Tensor:
        assert isinstance(payload, JaxTensor)
        return payload.host()

    def jax_array(self, payload: torch.Tensor) -> jax.Array:
        assert isinstance(payload, JaxTensor)
        with x64():
            return payload.value()

    def barrier(self, payloads: Sequence[torch.Tensor]) -> None:
        tensors = [payload for payload in payloads if isinstance(payload, JaxTensor)]
        with x64():
            arrays = jax.lax.optimization_barrier([tensor.value() for tensor in tensors])
            for tensor, array in zip(tensors, arrays, strict=True):
                tensor.set_value(array)

    # ------------------------------------------------------------------ annotations in place

    def annotate(self, payload: torch.Tensor, layout: Layout) -> None:
        assert isinstance(payload, JaxTensor)
        with x64():
            jax_annotate.annotate(payload, self._sharding(layout))

    def annotation(self, payload: torch.Tensor) -> OpSharding | None:
        assert isinstance(payload, JaxTensor)
        return jax_annotate.annotation(payload)

    def known_sharding(self, payload: torch.Tensor) -> OpSharding | None:
        assert isinstance(payload, JaxTensor)
        array = array_before(payload._storage)
        if payload._steps or is_tracer(array):
            return self.annotation(payload)
        sharding = read_op_sharding(array, self._roots)
        return sharding if sharding.is_tiled else self.annotation(payload)

    def clear_annotation(self, payload: torch.Tensor) -> None:
        assert isinstance(payload, JaxTensor)
        with x64():
            jax_annotate.clear_annotation(payload)

    def when_step_ends(self, payload: torch.Tensor, undo: Callable[[], None]) -> None:
        assert isinstance(payload, JaxTensor)
        jax_annotate.when_step_ends(payload, undo)

    def value_token(self, payload: torch.Tensor) -> object | None:
        assert isinstance(payload, JaxTensor)
        payload._storage.read()  # a trace hears of it
        return payload._storage.array

    # ------------------------------------------------------------------ manual regions

    def enter_manual(
        self, payload: torch.Tensor, layout: Layout, region: ManualRegion
    ) -> torch.Tensor:
        assert isinstance(payload, JaxTensor)
        return jax_manual.enter(payload, layout, region, self.root(region.mesh))

    def leave_manual(
        self, manual: torch.Tensor, layout: Layout, region: ManualRegion
    ) -> torch.Tensor:
        assert isinstance(manual, JaxTensor)
        return jax_manual.leave(manual, layout, region, self.root(region.mesh))

    def run_manual_op(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return ops.run_op(func, args, kwargs)

    def manual_collective(
        self,
        name: str,
        manual: torch.Tensor,
        region: ManualRegion,
        axes: tuple[Axis, ...],
        **options: Any,
    ) -> torch.Tensor:
        assert isinstance(manual, JaxTensor)
        return jax_manual_collectives.run(name, manual, region, axes, options)

    # ------------------------------------------------------------------ programs

    @property
    def is_tracing(self) -> bool:
        return active_trace() is not None

    @property
    def tells_factors(self) -> bool:
        return not self.is_tracing  # a step is looked at as a whole

    def note_write_to_host(
        self, target: torch.Tensor, put: Callable[[torch.Tensor], torch.Tensor]
    ) -> bool:
        return jax_trace.note_write_to_host(target, put)

    def note_new_data(self, tensor: Any) -> None:
        trace = active_trace()
        if trace is not None:
            trace.note_new_data(tensor)

    def is_same_memory(self, payload: torch.Tensor, other: torch.Tensor) -> bool:
        assert isinstance(payload, JaxTensor)
        assert isinstance(other, JaxTensor)
        alike = payload.shape == other.shape and payload.stride() == other.stride()
        return payload._storage is other._storage and payload._steps == other._steps and alike

    def run_op(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return ops.run_op(func, args, kwargs)

    def runs_itself(self, func: Any) -> bool:
        return func in whole_ops.WHOLE_OPS and func.namespace == "aten"

    def jax_program(
        self, fn: Callable[..., Any], arguments: Any, mesh: Mesh, in_layouts: Sequence[Layout]
    ) -> JaxProgram:
        """Return a JAX function as one that runs on tiles; see ``call_jax``."""
        return JaxProgram(fn, arguments, mesh, in_layouts, self)

    def native_arrays(self) -> NativeArrays:
        """Return the way to JAX's own libraries; see ``native``."""
        return NativeArrays(self._sharding)

    def compile(self, step: Callable[..., Any]) -> CompiledStep:
        from xla_dtensor.runtimes.jax.compile.step import JaxCompiledStep

        return JaxCompiledStep(step, self)

    # ------------------------------------------------------------------ random numbers

    def manual_seed(self, seed: int) -> None:
        jax_generator.seed(seed)

    def skip_draw(self) -> None:
        with x64():
            jax_generator.next_key()

    def get_rng_state(self, rng: Any = None) -> torch.Tensor:
        return pack_state(jax_generator.read(rng))

    def set_rng_state(self, state: torch.Tensor, rng: Any = None) -> None:
        jax_generator.write(unpack_state(state), rng)

    def new_rng(self, seed: int) -> Any:
        return jax_generator.new_rng(seed)

    def using_rng(self, rng: Any) -> AbstractContextManager[None]:
        return jax_generator.using(rng)

    def first_process_state(self) -> torch.Tensor:
        return pack_state(jax_generator.first_process_state())

    def synchronize(self) -> None:
        jax.effects_barrier()
        for array in jax.live_arrays():
            array.block_until_ready()


_ATTRIBUTES = ("coords", "core_on_chip", "slice_index", "process_index", "device_kind")


def _attributes(device: Any) -> dict[str, Any]:
    attributes = {name: getattr(device, name, None) for name in _ATTRIBUTES}
    name = f"{device.platform.upper()}:{device.id}"
    return {"name": name} | {
        key: attribute for key, attribute in attributes.items() if attribute is not None
    }


def _trimmed(shard: Any, shape: tuple[int, ...]) -> AddressableShard:
    bounds = [
        (min(s.start or 0, n), n if s.stop is None else min(s.stop, n))
        for s, n in zip(shard.index, shape, strict=True)
    ]
    # Through an array of its own: the one that the shards are of would keep what was read.
    copy = jax.make_array_from_single_device_arrays(
        shard.data.shape, shard.data.sharding, [shard.data]
    )
    tile = np.asarray(copy)
    logical = tile[tuple(slice(0, stop - start) for start, stop in bounds)]
    index = tuple(slice(start, stop) for start, stop in bounds)
    return AddressableShard(shard.device.id, index, torch_from_numpy(logical), int(tile.nbytes))


def _short(ids: Sequence[int]) -> str:
    return str(list(ids)) if len(ids) <= 16 else f"{list(ids[:16])[:-1]}... ({len(ids)})"


def _cpu_devices_of_environment() -> int | None:
    text = os.environ.get(_CPU_DEVICES, "")
    if text and not (text.isdecimal() and int(text) > 0):
        raise RuntimeSetupError(
            f"The environment has {_CPU_DEVICES}={text!r}. It is the number of virtual devices "
            "that a CPU is to have. Set it to a positive number, or unset it."
        )
    return int(text) if text else None


def _start_jax(num_cpu_devices: int | None) -> dict[str, str]:
    """Start JAX's devices; return the settings that were made, for the doctor."""
    settings: dict[str, str] = {}
    if devices_have_started():
        count = len(jax.devices())
        if num_cpu_devices and jax.default_backend() == "cpu" and count != num_cpu_devices:
            raise RuntimeSetupError(
                f"num_cpu_devices={num_cpu_devices} was asked for, but JAX already runs with "
                f"{count} CPU devices. Their number is fixed when JAX makes its first array. Call "
                "get_runtime('jax', num_cpu_devices=...) before any use of JAX, or set the "
                "environment variable XLA_DTENSOR_CPU_DEVICES."
            )
        return settings
    if num_cpu_devices:
        jax.config.update("jax_num_cpu_devices", num_cpu_devices)
        settings["jax_num_cpu_devices"] = str(num_cpu_devices)
    added: dict[str, str] = {}
    platforms = jax.config.jax_platforms  # pyright: ignore[reportAttributeAccessIssue]
    if "NPROC" not in os.environ and (not platforms or "cpu" in platforms):
        added["NPROC"] = _THREADS_ON_CPU
    flags = os.environ.get("XLA_FLAGS", "")
    if jax.__version__.startswith(_WRONG_WITH_IT) and _THIRD_FORM not in flags:
        added["XLA_FLAGS"] = f"{flags} --{_THIRD_FORM}=false".strip()
    environment = dict(os.environ)
    os.environ.update(added)
    try:
        jax.devices()
    finally:
        for name in added:
            os.environ.pop(name)
            os.environ.update({name: environment[name]} if name in environment else {})
    return settings | {f"{name} while starting": setting for name, setting in added.items()}


def _keep_programs(choice: str | os.PathLike[str] | bool | None) -> dict[str, str]:
    """Let XLA keep what it compiles, unless the user has given JAX a folder of their own."""
    name = "jax_compilation_cache_dir"
    folder = cache_folder(choice, on_cpu=jax.default_backend() == "cpu")
    if folder is None or getattr(jax.config, name):
        return {}
    jax.config.update(name, str(folder))
    return {name: str(folder)}
