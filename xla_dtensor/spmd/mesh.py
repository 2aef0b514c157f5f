"""Mesh and HybridMesh as torch_xla's scripts write them, over :class:`mesh_utils.Mesh`.

``Mesh(device_ids, mesh_shape, axis_names)`` has torch_xla's attributes (``shape()``, ``size()``,
``get_logical_mesh()``, ...), and is equal and hashed by value. ``.value`` is the plain mesh behind
it. Functions of this package take it, torch_xla's own Mesh, a DeviceMesh or a plain mesh alike.
Making the first mesh starts the runtime; on JAX it may cover some of the devices only.
"""

from __future__ import annotations

import sys
from ast import literal_eval
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from enum import IntEnum
from math import prod
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mesh_utils import HybridMesh as HybridMeshValue
from mesh_utils import Mesh as MeshValue
from mesh_utils import MeshError, read_devices
from xla_dtensor.core import Layout, OpSharding
from xla_dtensor.core.argument_types import argument_types
from xla_dtensor.core.errors import DistributeError, InvalidMeshError
from xla_dtensor.dtensor.mesh import as_device_mesh, mesh_text
from xla_dtensor.runtimes.registry import get_runtime

__all__ = [
    "HybridMesh",
    "Mesh",
    "ShardingType",
    "as_mesh",
    "convert_to_xla_mesh",
    "get_1d_mesh",
    "get_global_mesh",
    "set_global_mesh",
    "sharding_type_of",
]


# --------------------------------------------------------------------------------------------- Mesh

Names = Sequence[str] | None


@argument_types
class Mesh:
    """Devices arranged along axes.

    Args:
        device_ids: Ids of the runtime's devices, flat, read in row-major order.
        mesh_shape: The size of each axis.
        axis_names: A name for each axis; None leaves them unnamed, to be given by number.

    Raises:
        InvalidMeshError: Of these no mesh can be made; the runtime has no such devices, or cannot
            run on some of them only.

    Example:
        >>> mesh = Mesh(range(8), (4, 2), ("x", "y"))
        >>> dict(mesh.shape())
        {'x': 4, 'y': 2}
        >>> mesh.get_logical_mesh().tolist()
        [[0, 1], [2, 3], [4, 5], [6, 7]]
    """

    def __init__(
        self, device_ids: ArrayLike | range, mesh_shape: Sequence[int], axis_names: Names = None
    ) -> None:
        try:
            self._set(MeshValue(device_ids, mesh_shape, axis_names), axis_names)
        except (MeshError, DistributeError) as error:
            rule = _broken_rule(device_ids, mesh_shape, axis_names)
            raise InvalidMeshError(f"{error} {rule}".strip()) from None

    def _set(self, mesh: MeshValue, axis_names: Names) -> None:
        get_runtime().root(mesh)
        self._value = mesh
        self._axis_names = None if axis_names is None else tuple(axis_names)

    @property
    def value(self) -> MeshValue:
        """The plain mesh."""
        return self._value

    @property
    def device_ids(self) -> NDArray[np.int64]:
        """The device ids, flat."""
        return self._value.device_ids.reshape(-1)

    @property
    def mesh_shape(self) -> tuple[int, ...]:
        """The size of each axis."""
        return self._value.mesh_shape

    @property
    def axis_names(self) -> tuple[str, ...] | None:
        """The names of the axes; None when they were given none."""
        return self._axis_names

    def size(self) -> int:
        """Return the number of devices."""
        return self._value.size()

    def shape(self) -> OrderedDict[Any, int]:
        """Return the size of each axis by its name, or by its number when it has none."""
        return OrderedDict(zip(self._value.axis_names, self.mesh_shape, strict=True))

    def get_logical_mesh(self) -> NDArray[np.int64]:
        """Return the device ids in the shape of the mesh."""
        return self._value.device_ids

    def get_axis_name_idx(self, name: str) -> int | None:
        """Return the number of an axis by its name; None when there is none of that name."""
        names = self._axis_names or ()
        return names.index(name) if name in names else None

    def op_sharding(self, partition_spec: Sequence[Any]) -> OpSharding:
        """Return XLA's encoding of a partition spec, relative to the runtime's root mesh.

        Args:
            partition_spec: Per tensor dim an axis (name or number), a tuple of axes, or None.

        Raises:
            LayoutError: An unknown axis, one twice, or a nested tuple.

        Example:
            >>> str(Mesh(range(8), (4, 2), ("x", "y")).op_sharding((("y", "x"), None)))
            '{devices=[8,1]<=[4,2]T(1,0)}'
        """
        layout = Layout.from_partition_spec(partition_spec, self._value)
        return layout.op_sharding(get_runtime().root(self._value))

    def get_op_sharding(self, partition_spec: Sequence[Any]) -> Any:
        """Return :meth:`op_sharding` as the runtime's own object.

        On the torch_xla runtime that is a ``torch_xla._XLAC.OpSharding``, which torch_xla's own
        functions take; on others it is an :class:`xla_dtensor.OpSharding`.
        """
        return get_runtime().native_sharding(self.op_sharding(partition_spec))

    @classmethod
    def from_str(cls, mesh_str: str) -> Mesh | None:
        """Return the mesh that ``str`` of a mesh wrote; None for any other text.

        Example:
            >>> Mesh.from_str(str(Mesh(range(8), (4, 2), ("x", "y"))))
            Mesh((x=4, y=2))
        """
        try:
            fields = literal_eval(mesh_str)
            return Mesh(fields["device_ids"], fields["mesh_shape"], fields["axis_names"])
        except (ValueError, SyntaxError, KeyError, TypeError):
            return None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mesh) and (self._value, self._axis_names) == (
            other._value,
            other._axis_names,
        )

    def __hash__(self) -> int:
        return hash(self._value)

    def __str__(self) -> str:
        return (
            f"{{'device_ids': {self.device_ids.tolist()}, 'mesh_shape': {self.mesh_shape}, "
            f"'axis_names': {self.axis_names}}}"
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({mesh_text(self._value)})"


def _broken_rule(device_ids: Any, mesh_shape: Any, axis_names: Any) -> str:
    """Return the first rule of torch_xla's that a mesh breaks, as scripts look for it."""
    try:
        ids, names = np.asarray(device_ids).reshape(-1), list(axis_names or ())
        size, num_devices = prod(mesh_shape), len(get_runtime().device_ids())
        rules = (
            (
                not names or len(names) == len(mesh_shape),
                f"Number of axis names ({len(names)}) must match mesh dimensions "
                f"({len(mesh_shape)}).",
            ),
            (len(set(names)) == len(names), "Axis names must be unique."),
            (len(ids) == size, f"Number of device IDs ({len(ids)}) must match mesh size ({size})."),
            (len(set(ids.tolist())) == len(ids), "Device IDs must be unique."),
            (max(ids, default=0) < size, f"Device IDs must be less than mesh size ({size})."),
            (
                len(ids) == num_devices,
                f"Number of device IDs ({len(ids)}) must match the global number of devices "
                f"({num_devices}).",
            ),
        )
        return next((text for is_kept, text in rules if not is_kept), "")
    except (TypeError, ValueError):  # what these are has been said
        return ""


def convert_to_xla_mesh(dt_mesh: Any) -> Mesh:
    """Return the Mesh of a DeviceMesh, PyTorch's or this library's.

    Args:
        dt_mesh: The DeviceMesh.

    Raises:
        InvalidMeshError: The runtime cannot run on these devices only.

    Example:
        >>> import xla_dtensor as xd
        >>> convert_to_xla_mesh(xd.init_device_mesh("xla", (2, 4), mesh_dim_names=("dp", "tp")))
        Mesh((dp=2, tp=4))
    """
    return Mesh(dt_mesh.mesh.reshape(-1), tuple(dt_mesh.mesh.shape), dt_mesh.mesh_dim_names)


@argument_types
class HybridMesh(Mesh):
    """Devices on two networks: the fast one inside a granule, the DCN between granules.

    Axes go from the least network-hungry to the most. Along each axis the DCN part is the outer
    one.

    Args:
        ici_mesh_shape: The size of each axis inside a granule.
        dcn_mesh_shape: The size of each axis across granules; None for ones.
        axis_names: A name for each axis.
        granule: What makes devices one granule: "slice", "process", a number of devices, or a
            function of a :class:`mesh_utils.Device`.
        order: How a granule's devices are laid out, see :class:`mesh_utils.HybridMesh`.

    Raises:
        DistributeError: Several slices without dcn_mesh_shape, or the reverse.
        MeshError: Shapes that do not fit the granules.

    Example:
        >>> mesh = HybridMesh(
        ...     ici_mesh_shape=(1, 4), dcn_mesh_shape=(2, 1), axis_names=("data", "fsdp"), granule=4
        ... )
        >>> dict(mesh.shape())
        {'data': 2, 'fsdp': 4}
    """

    def __init__(
        self,
        *,
        ici_mesh_shape: Sequence[int],
        dcn_mesh_shape: Sequence[int] | None = None,
        axis_names: Names = None,
        granule: Any = "slice",
        order: Any = "auto",
    ) -> None:
        self.device_attributes: list[Mapping[str, Any]] = list(get_runtime().device_attributes())
        devices = read_devices(self.device_attributes)
        dcn = (1,) * len(ici_mesh_shape) if dcn_mesh_shape is None else tuple(dcn_mesh_shape)
        if granule == "slice":
            _check_slices({device.slice_index for device in devices}, dcn)
        mesh = HybridMeshValue(
            devices,
            ici_mesh_shape=ici_mesh_shape,
            dcn_mesh_shape=dcn,
            axis_names=axis_names,
            granule=granule,
            order=order,
        )
        self._set(mesh, axis_names)
        self.ici_mesh_shape = mesh.ici_mesh_shape
        self.dcn_mesh_shape = mesh.dcn_mesh_shape


def _check_slices(slices: set[int | None], dcn_mesh_shape: tuple[int, ...]) -> None:
    """Say early, in torch_xla's words, that the DCN part and the number of slices do not match."""
    if len(slices) > 1 and prod(dcn_mesh_shape) == 1:
        raise DistributeError(
            f"HybridMesh was called without dcn_mesh_shape on {len(slices)} slices. Provide "
            "dcn_mesh_shape to create a mesh for multislice. Its product is the number of slices, "
            f"e.g. ({len(slices)}, 1, ...)."
        )
    if len(slices) == 1 and prod(dcn_mesh_shape) > 1:
        raise DistributeError(
            f"HybridMesh was called with dcn_mesh_shape={dcn_mesh_shape}. Invalid dcn_mesh_shape "
            "for single slice mesh. Leave it out, or say what else is a granule: granule='process' "
            "or a number of devices."
        )


_global_mesh: Mesh | None = None


def set_global_mesh(mesh: Mesh) -> None:
    """Set the mesh that functions take when none is passed, those of torch_xla's own module too.

    Example:
        >>> set_global_mesh(get_1d_mesh("data"))
        >>> get_global_mesh()
        Mesh((data=8))
    """
    global _global_mesh
    _global_mesh = mesh
    its_own = sys.modules.get("torch_xla.distributed.spmd")
    if its_own is not None:  # FSDPv2 asks there
        its_own.set_global_mesh(mesh)


def get_global_mesh() -> Mesh | None:
    """Return the mesh set by :func:`set_global_mesh`, or None."""
    return _global_mesh


_meshes: dict[MeshValue, None] = {}
_MESHES_KEPT = 16


def candidate_meshes() -> list[MeshValue]:
    """Return the meshes by which a tensor may have been annotated, the likeliest first."""
    meshes = [] if _global_mesh is None else [as_device_mesh(_global_mesh).value]
    return [*meshes, *reversed(_meshes)] or [get_1d_mesh().value]


def get_1d_mesh(axis_name: str | None = None) -> Mesh:
    """Return the mesh of all devices along one axis.

    Args:
        axis_name: The axis's name; None leaves it unnamed.

    Example:
        >>> get_1d_mesh("data").mesh_shape
        (8,)
    """
    ids = get_runtime().device_ids()
    return Mesh(ids, (len(ids),), None if axis_name is None else (axis_name,))


def as_mesh(mesh: Any, function: str) -> MeshValue:
    """Return the plain mesh of anything that stands for one; the global mesh for None.

    Raises:
        DistributeError: None was passed, and there is no global mesh.
        ArgumentTypeError: Something else was passed.
    """
    mesh = _global_mesh if mesh is None else mesh
    if mesh is None:
        raise DistributeError(
            f"{function} was called without a mesh. None was passed and there is no global one. "
            "Pass mesh=, or call set_global_mesh once."
        )
    mesh_value = as_device_mesh(mesh).value
    _meshes.pop(mesh_value, None)
    _meshes[mesh_value] = None
    if len(_meshes) > _MESHES_KEPT:
        del _meshes[next(iter(_meshes))]
    return mesh_value


# ------------------------------------------------------------------------------------ ShardingType
#
# XLA's kinds of sharding, with torch_xla's numbers.


class ShardingType(IntEnum):
    """The kinds of sharding that torch_xla tells apart."""

    REPLICATED = 0
    MAXIMAL = 1
    TUPLE = 2
    TILED = 3
    MANUAL = 4
    PARTIAL = 5
    UNKNOWN = 6


def sharding_type_of(op_sharding: OpSharding, num_devices: int) -> ShardingType:
    """Return the kind of a sharding as torch_xla names it.

    Args:
        op_sharding: The sharding.
        num_devices: Devices of the program: on a single one everything is MAXIMAL.

    Example:
        >>> sharding_type_of(OpSharding.parse("{devices=[2,1,4]<=[8] last_tile_dim_replicate}"), 8)
        <ShardingType.PARTIAL: 5>
    """
    if num_devices == 1 or op_sharding.kind == "maximal":
        return ShardingType.MAXIMAL
    op_sharding = op_sharding.canonical()
    if op_sharding.kind == "manual":
        return ShardingType.MANUAL
    if op_sharding.kind == "replicated":
        return ShardingType.REPLICATED
    if not op_sharding.is_tiled:
        return ShardingType.UNKNOWN
    return ShardingType.PARTIAL if op_sharding.subgroup_types else ShardingType.TILED
