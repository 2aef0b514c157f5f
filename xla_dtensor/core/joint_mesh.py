"""One mesh of the axes of two, where these were cut out of the same devices in different ways.

A program may split one row of devices twice, and take an axis from each::

    world (8)  ->  (batch=2, tp=4)["tp"]             splits the inner four
               ->  (replicate=1, fsdp=2, tp=4)["fsdp"]    splits the outer two
    joint_mesh of both                               (fsdp=2, tp=4)

The axes must walk through the devices independently of each other.
"""

from __future__ import annotations

from functools import lru_cache

from mesh_utils import Mesh
from xla_dtensor.core.spanning import mesh_of_walks, spanning_mesh

__all__ = ["joint_mesh"]


@lru_cache(maxsize=1024)
def joint_mesh(outer: Mesh, inner: Mesh) -> Mesh | None:
    """Return the mesh with the axes of both.

    Args:
        outer: A mesh.
        inner: Another one over the same devices.

    Returns:
        A mesh with the axes of `outer`, then those of `inner`. Where one mesh has all of them it is
        that one's submesh, in its order. None where there is none: an axis of the same name, axes
        that are not independent, or other devices.

    Example:
        >>> world = Mesh.arange((8,), ("world",))
        >>> batch = world.factored({"world": (("batch", 2), ("tp", 4))})
        >>> dense = world.factored({"world": (("fsdp", 2), ("tp", 4))})
        >>> joint_mesh(dense["fsdp"], batch["tp"])
        Mesh(fsdp=2, tp=4, devices=0..7)
        >>> joint_mesh(dense["fsdp"], batch["batch"]) is None
        True
    """
    names = {*outer.axis_names, *inner.axis_names}
    if len(names) < outer.ndim + inner.ndim:
        return None
    span = spanning_mesh(outer)
    if spanning_mesh(inner) == span:
        return span[tuple(axis for axis in span.axis_names if axis in names)]
    if {*span.device_ids.flat} != {*inner.root.device_ids.flat}:
        return None
    walks = (outer.digits(span), inner.digits(span))
    if walks[0] is None or walks[1] is None:
        return None
    found = mesh_of_walks(span, (*outer.axis_names, *inner.axis_names), (*walks[0], *walks[1]))
    return None if found is None else found[(*outer.axis_names, *inner.axis_names)]
