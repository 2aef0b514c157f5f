"""ManualTensor: what each device has, written once.

Inside a manual region (:mod:`xla_dtensor.manual`) a tensor is one device's tile: its shape is the
tile's, ops act on every device's own tile, and nothing is communicated but by the collectives that
the program calls. On a (dp=2, tp=4) mesh::

    x = distribute_tensor(torch.ones(16, 8), mesh, [Shard(0), Shard(1)])
    y = enable_manual_sharding(x, ("dp", "tp"), mesh=mesh)      a ManualTensor of shape (8, 2)
    z = psum(y.sum(1), "tp")                                    the row sums, on every device of tp
    disable_manual_sharding(z, ("dp",), (16,), mesh=mesh)       a global tensor again, shape (16,)

Values differ between devices, so there is no one value to read: ``item``, ``cpu``, ``bool`` and
their like raise. A ManualTensor meets only ManualTensors of its region, plain CPU tensors and
numbers, which every device sees alike; a global tensor beside it raises, because one of the two
shapes would be misunderstood. Both are errors here and not in XLA, which aborts the process.

Autograd is PyTorch's own: this class wraps the runtime's manual payload below autograd, as DTensor
wraps its payload.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch

from mesh_utils import Axis
from xla_dtensor.core import ManualRegion
from xla_dtensor.device_mesh import mesh_text
from xla_dtensor.errors import ManualRegionError
from xla_dtensor.nested import leaves, map_nested
from xla_dtensor.per_device import PerDeviceTensor
from xla_dtensor.runtimes.registry import get_runtime
from xla_dtensor.written import written_targets

__all__ = ["ManualTensor"]

aten = torch.ops.aten
_READS = frozenset({aten._local_scalar_dense.default, aten.equal.default, aten.allclose.default})


class ManualTensor(PerDeviceTensor):
    """One device's tile, on every device at once. Made by ``enable_manual_sharding``."""

    @staticmethod
    def __new__(
        cls, payload: torch.Tensor, region: ManualRegion, *, requires_grad: bool = False
    ) -> ManualTensor:
        """Wrap `payload`, the runtime's manual payload, of the tile's shape."""
        return cls._wrapping(payload, region, requires_grad)

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        region = _one_region(func, args, kwargs)
        if func in _READS or _leaves_device(func, kwargs):
            refuse_read(func, region)
        payload_args, payload_kwargs = map_nested(_payload_of, (tuple(args), kwargs))
        result = get_runtime().run_manual_op(func, payload_args, payload_kwargs)
        if torch.Tag.inplace_view in func.tags:
            return args[0]._reshaped_in_place()
        if func._schema.is_mutable:
            return written_targets(func, args, kwargs)
        return map_nested(lambda v: _wrapped(v, region), result)

    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore[reportAssignmentType]

    @property
    def global_tensor(self) -> ManualTensor:
        """The tensor itself, for scripts that unwrap what torch_xla returns."""
        return self

    def _communicated(self, name: str, axes: tuple[Axis, ...], options: Any) -> ManualTensor:
        runtime = get_runtime()
        return self._like(
            runtime.manual_collective(name, self._payload, self._region, axes, **options)
        )

    def cpu(self, *_: Any, **__: Any) -> torch.Tensor:
        """Refused: see the message."""
        refuse_read("cpu()", self._region)

    def numpy(self, *, force: bool = False) -> Any:
        """Refused: see the message."""
        refuse_read("numpy()", self._region)

    def tolist(self) -> Any:
        """Refused: see the message."""
        refuse_read("tolist()", self._region)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return (
            f"ManualTensor(local_shape={tuple(self.shape)}, dtype={dtype}, "
            f"axes={self._region.axes}, mesh={mesh_text(self._region.mesh)})"
        )

    def __deepcopy__(self, memo: Any) -> NoReturn:
        refuse_read("deepcopy", self._region)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        refuse_read("pickle", self._region)


def refuse_read(what: Any, region: ManualRegion) -> NoReturn:
    """Raise the error for Python that needs the value of a manual tensor."""
    raise ManualRegionError(
        f"{what} was called on a manual tensor over the axes {region.axes} of the mesh "
        f"{mesh_text(region.mesh)}. It has another value on each device, so there is none to read. "
        "Call disable_manual_sharding first, or reduce it with a collective and then disable."
    )


def _payload_of(value: Any) -> Any:
    return value._payload if isinstance(value, ManualTensor) else value


def _wrapped(value: Any, region: ManualRegion) -> Any:
    return ManualTensor(value, region) if isinstance(value, torch.Tensor) else value


def _one_region(func: Any, args: Sequence[Any], kwargs: Any) -> ManualRegion:
    """Return the region of the manual tensors among the arguments; refuse what cannot be mixed."""
    tensors = [v for v in leaves((args, kwargs)) if isinstance(v, torch.Tensor)]
    manual = [t for t in tensors if isinstance(t, ManualTensor)]
    region, runtime = manual[0]._region, get_runtime()
    other = next((t._region for t in manual if t._region != region), None)
    if other is not None:
        raise ManualRegionError(
            f"{func} was called on manual tensors of two regions, over the axes {region.axes} of "
            f"the mesh {mesh_text(region.mesh)} and over {other.axes} of {mesh_text(other.mesh)}. "
            "A tile of one is no tile of the other. Disable manual sharding for one of them, and "
            "enable it again with the other's mesh and axes."
        )
    for tensor in tensors:
        if not isinstance(tensor, ManualTensor) and _is_global(func, tensor, runtime):
            raise ManualRegionError(
                f"{func} was called on a manual tensor of local shape={tuple(manual[0].shape)} and "
                f"a global one of shape={tuple(tensor.shape)}. One is a device's tile, the other "
                "the whole. Call enable_manual_sharding on the global one, or "
                "disable_manual_sharding on the manual one."
            )
    return region


def _is_global(func: Any, tensor: torch.Tensor, runtime: Any) -> bool:
    if hasattr(tensor, "_local_tensor"):
        return True
    # On a device with a backend of its own, torch itself makes plain tensors of numbers, for
    # instance for x[:, 2] = 7.0. Every device sees those alike.
    number = tensor.ndim == 0 or func is aten.copy_.default
    return runtime.is_payload(tensor) and not (number and _has_own_device(runtime))


def _has_own_device(runtime: Any) -> bool:
    return torch.device(runtime.torch_device).type != "cpu"


def _leaves_device(func: Any, kwargs: Any) -> bool:
    """Tell whether an op copies a tensor to another device: off an XLA device, or to "meta"."""
    device = kwargs.get("device")
    if func is not aten._to_copy.default or device is None:
        return False
    # The JAX runtime's tensors report "cpu"; there, .cpu() is caught as a method.
    return torch.device(device).type == "cpu" and _has_own_device(get_runtime())
