"""Manual regions: the border between global tensors and per-device ones.

``enable_manual_sharding`` cuts a global tensor into its tiles, ``disable_manual_sharding`` puts
tiles together again. In between, :class:`~xla_dtensor.dtensor.manual.ManualTensor` and the
collectives of :mod:`xla_dtensor.collectives`. A row-parallel matmul, written by hand::

    x = enable_manual_sharding(x, (None, "tp"), mesh=mesh)      (16, 2): columns of the device
    w = enable_manual_sharding(w, ("tp", None), mesh=mesh)      (2, 5): rows of the device
    y = psum(x @ w, "tp")                                       (16, 5), the same on all of tp
    y = disable_manual_sharding(y, (None, None), (16, 5), mesh=mesh)

Gradients are those of the function from global tensors to global tensors. Two rules make them so,
those of JAX's shard_map without replication checks: where a tensor enters as copies, the gradients
of the copies are summed; where copies leave as one tensor, each gets its share of the gradient.

Invariants: entering and leaving move no data when the tensor lies as the partition spec says. A dim
that the mesh does not divide is padded with zeros behind its end, and cut off when it leaves.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import Any, NoReturn

import torch

from mesh_utils import Axis, Mesh
from xla_dtensor.core import Layout, LayoutError, ManualRegion
from xla_dtensor.core.errors import ArgumentTypeError, ManualRegionError
from xla_dtensor.dtensor.collectives import psum
from xla_dtensor.dtensor.dtensor import DTensor
from xla_dtensor.dtensor.local_border import PerDeviceTensor
from xla_dtensor.dtensor.mesh import DeviceMesh, as_device_mesh, mesh_text
from xla_dtensor.dtensor.redistribute import as_plain, torch_placements
from xla_dtensor.runtimes.nested import leaves, map_nested
from xla_dtensor.runtimes.registry import get_runtime
from xla_dtensor.runtimes.whole_ops import LinearResult
from xla_dtensor.runtimes.written import written_targets

__all__ = ["ManualTensor", "enter_region", "leave_region"]


# ------------------------------------------------------------------------------------ ManualTensor
#
# What each device has, written once.
#
# Inside a manual region a tensor is one device's tile: its shape is the tile's, ops act on every
# device's own tile, and nothing is communicated but by the collectives that the program calls. On a
# (dp=2, tp=4) mesh::
#
#   x = distribute_tensor(torch.ones(16, 8), mesh, [Shard(0), Shard(1)])
#   y = enable_manual_sharding(x, ("dp", "tp"), mesh=mesh)      a ManualTensor of shape (8, 2)
#   z = psum(y.sum(1), "tp")                                    the row sums, on every device of tp
#   disable_manual_sharding(z, ("dp",), (16,), mesh=mesh)       a global tensor again, shape (16,)
#
# Values differ between devices, so there is no one value to read: ``item``, ``cpu``, ``bool`` and
# their like raise. A ManualTensor meets only ManualTensors of its region, plain CPU tensors and
# numbers, which every device sees alike; a global tensor beside it raises, because one of the two
# shapes would be misunderstood. Both are errors here and not in XLA, which aborts the process.
#
# Autograd is PyTorch's own: this class wraps the runtime's manual payload below autograd, as
# DTensor wraps its payload.

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
        output = get_runtime().run_manual_op(func, payload_args, payload_kwargs)
        if torch.Tag.inplace_view in func.tags:
            return args[0]._reshaped_in_place()
        if func._schema.is_mutable:
            return written_targets(func, args, kwargs)
        return map_nested(lambda v: _wrapped(v, region), output)

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


def _payload_of(leaf: Any) -> Any:
    return leaf._payload if isinstance(leaf, ManualTensor) else leaf


def _wrapped(leaf: Any, region: ManualRegion) -> Any:
    return ManualTensor(leaf, region) if isinstance(leaf, torch.Tensor) else leaf


def _one_region(func: Any, args: Sequence[Any], kwargs: Any) -> ManualRegion:
    """Return the region of the manual tensors among the arguments; refuse what cannot be mixed."""
    tensors = [v for v in leaves((args, kwargs)) if isinstance(v, torch.Tensor)]
    manual = [t for t in tensors if isinstance(t, ManualTensor)]
    region, runtime = manual[0]._region, get_runtime()
    second = next((t._region for t in manual if t._region != region), None)
    if second is not None:
        raise ManualRegionError(
            f"{func} was called on manual tensors of two regions, over the axes {region.axes} of "
            f"the mesh {mesh_text(region.mesh)} and over {second.axes} of "
            f"{mesh_text(second.mesh)}. A tile of one is no tile of the other. Disable manual "
            "sharding for one of them, and enable it again with the other's mesh and axes."
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


# ---------------------------------------------------------------------------------- Manual regions


def enter_region(
    tensor: torch.Tensor,
    partition_spec: Sequence[Any],
    mesh: DeviceMesh | Mesh,
    axes: Iterable[Axis] | None = None,
) -> ManualTensor:
    """Cut a global tensor into its tiles; see ``xla_dtensor.spmd.enable_manual_sharding``.

    Args:
        tensor: A DTensor, a plain tensor of the runtime, or a CPU tensor without gradient.
        partition_spec: Per dim a manual axis, a tuple of them, or None.
        mesh: The mesh.
        axes: The axes that become manual; None for all.

    Returns:
        The tile, on every device.

    Raises:
        ManualRegionError: The tensor is manual already.
        LayoutError: A partition spec that does not fit tensor, mesh or axes.
    """
    mesh_value = as_device_mesh(mesh).value
    region = ManualRegion.over(mesh_value, axes)
    layout = _border_layout("enable_manual_sharding", partition_spec, tensor.ndim, region)
    if isinstance(tensor, ManualTensor):
        raise ManualRegionError(
            f"enable_manual_sharding was called on {tensor!r}. It is a device's tile already. Call "
            "it once, on the global tensor."
        )
    source = _on_devices(tensor, region.mesh)
    shape = tuple(source.shape)
    padding = [
        tile * layout.op_sharding().num_tiles(dim) - size
        for dim, (tile, size) in enumerate(
            zip(region.tile_shape(layout, shape), shape, strict=True)
        )
    ]
    if any(padding):
        behind = [pad for dim in reversed(padding) for pad in (0, dim)]
        source = torch.nn.functional.pad(source, behind)
    return _Enter.apply(source, layout, region)  # pyright: ignore[reportReturnType]


def leave_region(
    tensor: torch.Tensor, partition_spec: Sequence[Any], full_shape: Sequence[int], mesh: Any = None
) -> DTensor:
    """Put tiles together again; see ``xla_dtensor.spmd.disable_manual_sharding``.

    Args:
        tensor: A ManualTensor.
        partition_spec: Per dim a manual axis, a tuple of them, or None. Along axes that it does
            not name, all devices must hold the same values.
        full_shape: The global shape.
        mesh: The mesh of the region; may be left out.

    Returns:
        The global tensor.

    Raises:
        ManualRegionError: No manual tensor, another mesh, or a shape of which the tile is no tile.
        LayoutError: A partition spec that does not fit tensor, mesh or axes.
    """
    if not isinstance(tensor, ManualTensor):
        raise ManualRegionError(
            f"disable_manual_sharding was called on a {type(tensor).__name__} of "
            f"shape={tuple(tensor.shape)}. It is global already. Pass what enable_manual_sharding "
            "returned, or what was computed from it."
        )
    region = tensor.region
    if mesh is not None and as_device_mesh(mesh).value != region.mesh:
        raise ManualRegionError(
            "disable_manual_sharding was called with the mesh "
            f"{mesh_text(as_device_mesh(mesh).value)} on a tensor that is manual over "
            f"{mesh_text(region.mesh)}. Its tiles are those of the latter. Pass that mesh, or none."
        )
    layout = _border_layout("disable_manual_sharding", partition_spec, tensor.ndim, region)
    shape = tuple(full_shape)
    tile = region.tile_shape(layout, shape) if len(shape) == tensor.ndim else None
    if tile != tuple(tensor.shape):
        raise ManualRegionError(
            f"disable_manual_sharding was called with full_shape={shape} and "
            f"partition_spec={tuple(partition_spec)} on tiles of shape={tuple(tensor.shape)}. A "
            f"tensor of that full shape has tiles of shape={tile}. Pass the shape that the tiles "
            "make up, or another partition spec."
        )
    dtensor: Any = _Leave.apply(tensor, layout, region)
    if tuple(dtensor.shape) != shape:
        dtensor = dtensor[tuple(slice(0, size) for size in shape)]
        dtensor = dtensor.redistribute(placements=torch_placements(layout))
    return dtensor


def _border_layout(
    function: str, partition_spec: Sequence[Any], ndim: int, region: ManualRegion
) -> Layout:
    layout = Layout.from_partition_spec(partition_spec, region.mesh)
    if layout.ndim != ndim:
        raise LayoutError(
            f"{function} was called with partition_spec={tuple(partition_spec)} on a tensor with "
            f"{ndim} dims. A partition spec has one entry per dim. Pass {ndim} entries; None "
            "leaves a dim whole."
        )
    region.check_layout(layout)
    return layout


def _on_devices(tensor: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    """Return the tensor as a DTensor or a plain tensor of the runtime."""
    runtime = get_runtime()
    if isinstance(tensor, DTensor) or runtime.is_payload(tensor):
        return tensor
    if tensor.requires_grad:
        raise ArgumentTypeError(
            f"enable_manual_sharding was called on a CPU tensor of shape={tuple(tensor.shape)} "
            "that requires grad. Its gradient would end at the copy to the devices. Put it there "
            "first: mark_sharding(tensor, mesh, partition_spec)."
        )
    device_mesh = as_device_mesh(mesh)
    layout = Layout.replicated(mesh, tensor.ndim)
    return DTensor._wrapping(runtime.put(tensor, layout), device_mesh, torch_placements(layout))


def _payload(tensor: Any) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


class _Enter(LinearResult):
    @staticmethod
    def forward(ctx: Any, tensor: Any, layout: Layout, region: ManualRegion) -> Any:
        ctx.border, ctx.plain = (layout, region), not isinstance(tensor, DTensor)
        return ManualTensor(get_runtime().enter_manual(_payload(tensor), layout, region), region)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        layout, region = ctx.border
        copied = region.copied_axes(layout)
        if copied:
            grad = psum(grad, copied)
        dtensor: Any = _Leave.apply(grad, layout, region, False)
        return (as_plain(dtensor) if ctx.plain else dtensor), None, None


class _Leave(LinearResult):
    @staticmethod
    def forward(
        ctx: Any, tensor: Any, layout: Layout, region: ManualRegion, share: bool = True
    ) -> Any:
        ctx.border, ctx.share = (layout, region), share
        payload = get_runtime().leave_manual(tensor._payload, layout, region)
        return DTensor._wrapping(payload, as_device_mesh(region.mesh), torch_placements(layout))

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        layout, region = ctx.border
        tile: Any = _Enter.apply(grad, layout, region)
        copies = prod(region.mesh.size(axis) for axis in region.copied_axes(layout))
        if ctx.share and copies > 1:
            tile = tile / copies
        return tile, None, None, None
