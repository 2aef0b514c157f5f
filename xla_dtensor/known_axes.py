"""What is known of the mesh axes that a tensor's own mesh lacks.

A tensor on ``mesh["tp"]`` is a tensor of the whole (dp, tp) mesh. Its placements say nothing of dp,
yet its rows may well be sharded over dp: it was computed from a batch that is. A constraint that
took "nothing said" for "replicated" would gather the batch at every redistribute of a tensor-
parallel plan. So a tensor's state carries what is known, as (axis, dim) pairs, and ops pass it on:
labels are propagated on the mesh of all axes of which something is known, and taken apart again.

    x   on mesh["tp"]: [Replicate()], known dp on dim 0        a batch
    w   on mesh["tp"]: [Shard(0)]
    F.linear(x, w)     on mesh["tp"]: [Shard(1)], known dp on dim 0

Where nothing is known the dims stay open for XLA to choose, where it can be told so.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from torch.distributed.tensor import Replicate, Shard

from mesh_utils import Axis
from xla_dtensor.core import Layout
from xla_dtensor.core.spanning import spanning_mesh
from xla_dtensor.device_mesh import DeviceMesh, as_device_mesh

if TYPE_CHECKING:
    from xla_dtensor.global_state import GlobalState

__all__ = [
    "Known",
    "joint_mesh",
    "known_beside",
    "known_of_layout",
    "known_placements",
    "placements_on",
    "split",
]

Known: TypeAlias = tuple[tuple[Axis, int], ...]


def known_beside(mesh: DeviceMesh, states: Iterable[GlobalState]) -> Known:
    """Return what tensors of one shape know of the axes that `mesh` lacks."""
    own, found = set(mesh.value.axis_names), {}
    for state in states:
        if not _related(state.mesh, mesh):
            continue
        for axis, dim in (*_cuts(state), *state.known):
            if axis not in own:
                found.setdefault(axis, dim)
    return tuple(found.items())


def known_of_layout(layout: Layout | None, mesh: DeviceMesh) -> Known:
    """Return what a layout on the spanning mesh says of the axes that `mesh` lacks.

    Args:
        layout: A layout of whole axes, or None.
        mesh: The mesh.
    """
    if layout is None:
        return ()
    own = set(mesh.value.axis_names)
    pairs = [(axis, dim) for dim, axes in enumerate(layout.dims) for axis in axes]
    return tuple((axis, dim) for axis, dim in pairs if axis not in own)  # pyright: ignore


def _cuts(state: GlobalState) -> list[tuple[Axis, int]]:
    pairs = zip(state.mesh.value.axis_names, state.placements, strict=True)
    return [(axis, p.dim) for axis, p in pairs if type(p) is Shard]


def _related(one: DeviceMesh, other: DeviceMesh) -> bool:
    if one is other or spanning_mesh(one.value) == spanning_mesh(other.value):
        return True
    # A submesh without axes of size 1 has all devices, and so spans them by itself.
    root = one.value.root
    names = {*one.value.axis_names, *other.value.axis_names}
    return root == other.value.root and names <= {*root.axis_names}


def joint_mesh(mesh: DeviceMesh, states: Sequence[GlobalState]) -> DeviceMesh:
    """Return the mesh of the axes of `mesh` and all that `states` know of.

    `mesh` itself where there are no others, which is nearly always.
    """
    if all(state.mesh is mesh and not state.known for state in states):
        return mesh
    span = spanning_mesh(mesh.value)
    axes = set(mesh.value.axis_names)
    for state in states:
        if _related(state.mesh, mesh):
            axes |= {axis for axis, _ in (*_cuts(state), *state.known)}
    if axes == set(mesh.value.axis_names):
        return mesh
    return as_device_mesh(span[tuple(axis for axis in span.axis_names if axis in axes)])


def known_placements(known: Known, mesh: DeviceMesh) -> tuple[Any, ...]:
    """Return what is known as placements on a mesh."""
    on = dict(known)
    return tuple(Shard(on[axis]) if axis in on else Replicate() for axis in mesh.value.axis_names)


def placements_on(state: GlobalState, mesh: DeviceMesh) -> tuple[Any, ...]:
    """Return a tensor's placements on another mesh of the same devices; Replicate if unknown."""
    if state.mesh is mesh or state.mesh == mesh:
        return state.placements
    if not _related(state.mesh, mesh):
        return (Replicate(),) * mesh.ndim
    on: dict[Axis, Any] = {axis: Shard(dim) for axis, dim in state.known}
    on |= dict(zip(state.mesh.value.axis_names, state.placements, strict=True))
    return tuple(on.get(axis, Replicate()) for axis in mesh.value.axis_names)


def split(placements: Sequence[Any], joint: DeviceMesh, mesh: DeviceMesh) -> tuple[Any, Known]:
    """Take placements on a joint mesh apart: those on `mesh`, and what is known beside it."""
    on = dict(zip(joint.value.axis_names, placements, strict=True))
    own = mesh.value.axis_names
    known = tuple((axis, p.dim) for axis, p in on.items() if axis not in own and type(p) is Shard)
    return tuple(on[axis] for axis in own), known
