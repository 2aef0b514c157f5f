"""Merging and splitting the axes of a DeviceMesh, as PyTorch's _flatten and _unflatten do.

A merged axis has a name of its own, which the root mesh remembers::

    mesh = init_device_mesh("xla", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
    mesh["dp", "tp"]._flatten()        (dp_tp=4), a submesh of mesh
    mesh["dp_tp"]                      the same
    mesh["pp", "dp_tp"]                (pp=2, dp_tp=4)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mesh_utils import Axis, Mesh
from xla_dtensor.errors import DistributeError

__all__ = ["Merged", "flattened", "submesh", "unflattened"]

Merged = dict[str, tuple[Axis, ...]]
"""Names of merged axes, with the axes of the root that each is made of."""


def flattened(mesh: Mesh, name: str | None, merged: Merged) -> Mesh:
    """Merge all axes of a mesh into one, and remember its name.

    Args:
        mesh: A mesh with named axes.
        name: The name of the merged axis; the names of its parts joined by "_" when None.
        merged: What was merged before under the same root; the new name is added.

    Returns:
        A mesh of one axis, over the same devices in the same order.

    Raises:
        DistributeError: Unnamed axes, or a name that stands for other axes already.

    Example:
        >>> flattened(Mesh.arange((2, 4), ("dp", "tp")), None, {})
        Mesh(dp_tp=8, devices=0..7)
    """
    names = mesh.axis_names
    if not all(isinstance(axis, str) for axis in names):
        raise DistributeError(
            f"_flatten() was called on a mesh ({mesh.axes_text()}). Its axes have no names, so the "
            "merged one would have none. Pass mesh_dim_names= where the mesh is made."
        )
    name = "_".join(str(axis) for axis in names) if name is None else name
    if names == (name,):
        return mesh
    known = (name,) if name in mesh.root.axis_names else merged.get(name, names)
    if known != names:
        raise DistributeError(
            f"_flatten({name!r}) was called on a mesh ({mesh.axes_text()}). The name stands for "
            f"{known} of ({mesh.root.axes_text()}) already. Pass another name."
        )
    merged[name] = names
    return _merge(mesh, names, name)


def _merge(mesh: Mesh, axes: tuple[Axis, ...], name: str) -> Mesh:
    first = axes[0]
    one = len(axes) == 1  # it only gets another name
    return (
        mesh.factored({first: ((name, mesh.size(first)),)}) if one else mesh.flattened(axes, name)
    )


def submesh(mesh: Mesh, names: Sequence[str], merged: Mapping[str, tuple[Axis, ...]]) -> Mesh:
    """Cut out axes, those that were merged among them.

    Args:
        mesh: The mesh.
        names: The axes, in the order of the result.
        merged: The merged axes of its root.

    Returns:
        The submesh.

    Raises:
        AxisError: An unknown axis, or one twice.

    Example:
        >>> submesh(Mesh.arange((2, 2, 2), ("a", "b", "c")), ("a", "b_c"), {"b_c": ("b", "c")})
        Mesh(a=2, b_c=4, devices=0..7)
    """
    own = mesh.axis_names
    parts = {n: merged[n] for n in names if n not in own and set(merged.get(n, "?")) <= set(own)}
    cut = mesh[tuple(axis for name in names for axis in parts.get(name, (name,)))]
    for name, axes in parts.items():
        cut = _merge(cut, axes, name)
    return cut


def unflattened(mesh: Mesh, axis: Any, sizes: Sequence[int], names: Sequence[str]) -> Mesh:
    """Split one axis into several.

    Args:
        mesh: The mesh.
        axis: The axis, by name or number.
        sizes: Sizes of its parts, outer to inner.
        names: Their names.

    Returns:
        The mesh with the parts in the axis's place, over the same devices in the same order.

    Raises:
        DistributeError: Not as many names as sizes.
        AxisError: An unknown axis, or a name twice.
        MeshError: Sizes that do not multiply to the size of the axis.

    Example:
        >>> unflattened(Mesh.arange((8,), ("all",)), "all", (2, 4), ("dp", "tp"))
        Mesh(dp=2, tp=4, devices=0..7)
    """
    if len(sizes) != len(names):
        raise DistributeError(
            f"_unflatten was called with mesh_sizes={tuple(sizes)} and "
            f"mesh_dim_names={tuple(names)}. Each part of the axis has a size and a name. Pass as "
            "many names as sizes."
        )
    where = mesh.axis_names[mesh.axis_index(axis)]
    return mesh.factored({where: tuple(zip(names, sizes, strict=True))})
