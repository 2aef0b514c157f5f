"""torch's DeviceMesh over the runtime's devices, backed by a :class:`mesh_utils.Mesh`.

Stock torch leaves a mesh of device type "xla" half built: no coordinate, no submesh by name. The
subclass here answers those from the plain mesh value it carries (``.value``), and so needs no
process group. A submesh keeps its root on the object, because a tensor on ``mesh["tp"]`` is a
tensor of the whole root mesh.

One process may reach many devices. Where torch asks for "my" coordinate or rank, the answer is
that of the first addressable device of the mesh.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NoReturn

import torch
from torch.distributed.device_mesh import DeviceMesh as TorchDeviceMesh
from torch.utils._python_dispatch import _disable_current_modes

from mesh_utils import Mesh
from mesh_utils.mesh_input import read_mesh_shape
from xla_dtensor.argument_types import argument_types
from xla_dtensor.axis_groups import axis_group
from xla_dtensor.errors import ArgumentTypeError, DistributeError, MeshRankError
from xla_dtensor.mesh_reshaping import Merged, flattened, submesh, unflattened
from xla_dtensor.process_groups import NoGroups, refuse_group
from xla_dtensor.process_ranks import (
    coordinate_here,
    devices_of_ranks,
    ranks_here,
    ranks_of_devices,
)
from xla_dtensor.rank_notice import warn_of_one_rank
from xla_dtensor.runtimes.registry import get_runtime

__all__ = ["DeviceMesh", "as_device_mesh", "current_mesh", "init_device_mesh", "mesh_text"]


@argument_types
class DeviceMesh(TorchDeviceMesh):
    """A device mesh of type "xla".

    Args:
        mesh: The plain mesh value. Made by :func:`init_device_mesh` or :func:`as_device_mesh`.
    """

    def __init__(self, mesh: Mesh) -> None:
        named = all(isinstance(name, str) for name in mesh.axis_names)
        names = tuple(str(name) for name in mesh.axis_names) if named else None
        ranks = torch.from_numpy(ranks_here(mesh)).int()
        super().__init__("xla", ranks, mesh_dim_names=names)
        self.value = mesh
        self._dim_group_names: list[str] = NoGroups(mesh)
        self._merged: Merged = {}
        self._coordinate_on_dim = self.get_coordinate()

    def get_coordinate(self) -> Any:
        """Return the coordinate of the first addressable device of the mesh, None without one."""
        return coordinate_here(self.value)

    def get_rank(self) -> int:
        """Return the rank of the first addressable device; see :mod:`~xla_dtensor.process_ranks`.

        It is below the number of devices, another in each process, and 0 in the first.
        """
        return int(ranks_of_devices(min(get_runtime().addressable_device_ids())))

    def get_local_rank(self, mesh_dim: int | str | None = None) -> int:
        """Return the first addressable device's position along an axis."""
        if mesh_dim is None and self.value.ndim > 1:
            raise MeshRankError(
                f"get_local_rank() was called on a mesh with axes {mesh_text(self.value)}. It has "
                f"{self.value.ndim} axes, so the question has {self.value.ndim} answers. Pass "
                "mesh_dim, an axis name or number."
            )
        coordinate = self.get_coordinate()
        if coordinate is None:
            raise MeshRankError(
                f"get_local_rank() was called on a mesh {mesh_text(self.value)} of which this "
                "process reaches no device. Such a process has no place in it. Check "
                "get_coordinate() is not None first."
            )
        axis = 0 if mesh_dim is None else self.value.axis_index(mesh_dim)
        devices = get_runtime().addressable_device_ids()
        warn_of_one_rank(self.value, axis, tuple(devices), mesh_text(self.value))
        return coordinate[axis]

    @argument_types
    def __getitem__(self, mesh_dim_names: str | tuple[str, ...]) -> DeviceMesh:
        names = (mesh_dim_names,) if isinstance(mesh_dim_names, str) else tuple(mesh_dim_names)
        if names == self.value.axis_names:
            return self
        return _device_mesh(submesh(self.value, names, self._get_root_mesh()._merged))

    def _flatten(self, mesh_dim_name: str | None = None, backend_override: Any = None) -> Any:
        """Merge all axes into one, of which the root mesh knows the name from then on."""
        return _device_mesh(flattened(self.value, mesh_dim_name, self._get_root_mesh()._merged))

    def _unflatten(
        self,
        dim: int | str,
        mesh_sizes: Sequence[int],
        mesh_dim_names: Sequence[str],
        backend_override: Any = None,
    ) -> DeviceMesh:
        """Split one axis into several."""
        return _device_mesh(unflattened(self.value, dim, mesh_sizes, mesh_dim_names))

    def get_group(self, mesh_dim: int | str | None = None) -> Any:
        """Return what names an axis's members after install(); refused before."""
        return axis_group(self.value, mesh_dim)

    def get_all_groups(self) -> NoReturn:
        """Refused, as :meth:`get_group`."""
        refuse_group(self.value)

    def _get_root_mesh(self) -> DeviceMesh:
        return _device_mesh(self.value.root)

    def __hash__(self) -> int:
        return hash(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DeviceMesh) and self.value == other.value

    def __repr__(self) -> str:
        return f"DeviceMesh({mesh_text(self.value)}, device: 'xla')"

    def __reduce__(self) -> Any:
        return (_device_mesh, (self.value,))

    def __deepcopy__(self, memo: Any) -> DeviceMesh:
        return self


@lru_cache(maxsize=1024)
def _device_mesh(mesh: Mesh) -> DeviceMesh:
    with _disable_current_modes():  # its ids are read, also while torch.compile traces
        return DeviceMesh(mesh)


def mesh_text(mesh: Mesh) -> str:
    """Return the axes with their sizes, e.g. ``(dp=2, tp=4)``."""
    pairs = zip(mesh.axis_names, mesh.mesh_shape, strict=True)
    return "(" + ", ".join(f"{name}={size}" for name, size in pairs) + ")"


def as_device_mesh(mesh: Any) -> DeviceMesh:
    """Return our DeviceMesh for a mesh value or for a stock DeviceMesh of type "xla".

    Args:
        mesh: A :class:`mesh_utils.Mesh`, a torch DeviceMesh, or torch_xla's or our spmd Mesh.

    Returns:
        The same object for equal meshes.

    Raises:
        DistributeError: A DeviceMesh of another device type.
        ArgumentTypeError: Another kind of object.
    """
    mesh = getattr(mesh, "real_obj", mesh)  # torch.compile traces with a stand-in
    if isinstance(mesh, DeviceMesh):
        return mesh
    if isinstance(mesh, Mesh):
        return _device_mesh(mesh)
    if isinstance(mesh, TorchDeviceMesh):
        if mesh.device_type != "xla":
            raise DistributeError(
                f"A DeviceMesh with device_type={mesh.device_type!r} was passed. xla_dtensor "
                "computes on the devices of its runtime, which torch calls 'xla'. Pass "
                "init_device_mesh('xla', mesh_shape, mesh_dim_names=...)."
            )
        ids = devices_of_ranks(mesh.mesh.numpy())
        return _device_mesh(Mesh(ids, tuple(mesh.mesh.shape), mesh.mesh_dim_names))
    if isinstance(getattr(mesh, "value", None), Mesh):  # xla_dtensor.spmd.Mesh
        return _device_mesh(mesh.value)
    if hasattr(mesh, "get_logical_mesh"):  # torch_xla.distributed.spmd.Mesh
        return _device_mesh(Mesh(mesh.device_ids, mesh.mesh_shape, mesh.axis_names))
    raise ArgumentTypeError(
        f"A mesh was expected, but an object of type={type(mesh).__name__} was passed. Axes and "
        "devices cannot be read from it. Pass init_device_mesh('xla', ...) or a mesh_utils.Mesh."
    )


def current_mesh(what: str) -> DeviceMesh:
    """Return the mesh of the innermost ``with mesh:`` block.

    Raises:
        DistributeError: Outside of any such block.
    """
    from torch.distributed.device_mesh import _mesh_resources

    try:
        return as_device_mesh(_mesh_resources.get_current_mesh())
    except RuntimeError:
        raise DistributeError(
            f"{what} was called without a mesh. No mesh was passed and no `with mesh:` block is "
            "open. Pass device_mesh=, or call it inside `with init_device_mesh('xla', ...):`."
        ) from None


@argument_types
def init_device_mesh(
    device_type: str,
    mesh_shape: Sequence[int],
    *,
    mesh_dim_names: Sequence[str] | None = None,
    backend_override: Any = None,
) -> DeviceMesh:
    """Return a mesh over the runtime's devices, starting the runtime if none runs.

    Args:
        device_type: "xla".
        mesh_shape: Sizes of the axes, least network-hungry first. Their product may be smaller
            than the number of devices: the first ones are taken.
        mesh_dim_names: One name per axis.
        backend_override: Accepted for torch's signature; XLA has no process group back ends.

    Returns:
        The mesh. The first one made over a set of devices fixes their order in every program.

    Raises:
        DistributeError: Another device type, or more devices asked for than there are.
        MeshError: A shape or names of which no mesh can be made.

    Example:
        >>> mesh = init_device_mesh("xla", (2, 4), mesh_dim_names=("dp", "tp"))
        >>> mesh["tp"]
        DeviceMesh((tp=4), device: 'xla')
    """
    if device_type != "xla":
        raise DistributeError(
            f"init_device_mesh was called with device_type={device_type!r}. xla_dtensor places "
            "tensors on its runtime's devices only. Pass 'xla', or use "
            "torch.distributed.device_mesh.init_device_mesh for that device type."
        )
    runtime = get_runtime()
    mesh_shape = read_mesh_shape(mesh_shape)
    ids, wanted = runtime.device_ids(), math.prod(mesh_shape)
    if wanted > len(ids):
        raise DistributeError(
            f"init_device_mesh was called with mesh_shape={mesh_shape}, which takes "
            f"{wanted} devices. The runtime {runtime.name!r} has {len(ids)}. Pass a smaller shape, "
            f"or on CPU start with get_runtime({runtime.name!r}, num_cpu_devices={wanted})."
        )
    names = tuple(mesh_dim_names) if mesh_dim_names is not None else None
    mesh = _device_mesh(Mesh(ids[:wanted], mesh_shape, names))
    runtime.root(mesh.value)
    return mesh
