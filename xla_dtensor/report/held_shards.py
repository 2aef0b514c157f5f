"""How the arrays of a step are sharded: into how many parts, and over which axes."""

from __future__ import annotations

import math

from mesh_utils import Mesh
from xla_dtensor.report.evidence import Held
from xla_dtensor.report.placement_texts import axis_uses
from xla_dtensor.report.report_machine import MeshAxis

__all__ = ["axis_dims", "free_axes", "is_sharded_over", "is_vocabulary", "shards"]

VOCABULARY_ROWS = 16_384
VOCABULARY_RATIO = 4
"""A matrix is a vocabulary's if its longer dim has so many rows, and so many times the other: no
vocabulary in use is smaller, and no MLP of a language model is so much wider than its model."""


def shards(held: Held) -> int:
    """Counts the different parts of an array.

    Args:
        held: the array.

    Returns:
        Their number; 1 if every device has the whole.

    Example:
        >>> shards(Held("w", "parameter", (8, 4), "f32", (2, 4)))
        4
    """
    parts = zip(held.shape, held.device_shape, strict=True)
    return math.prod(-(-whole // part) for whole, part in parts if part)


def is_sharded_over(held: Held, axis: str, mesh: Mesh) -> bool:
    """Whether an axis splits an array.

    Args:
        held: the array.
        axis: an axis of the mesh, as text.
        mesh: the mesh.

    Returns:
        What its layout says; where that is not known, whether its number of parts allows it.

    Example:
        >>> weight = Held("w", "parameter", (8, 4), "f32", (2, 4), "Replicate(), Shard(0)")
        >>> mesh = Mesh.arange((2, 4), ("dp", "tp"))
        >>> is_sharded_over(weight, "dp", mesh), is_sharded_over(weight, "tp", mesh)
        (False, True)
    """
    splits = _splits(held, mesh)
    if splits is not None:
        return splits.get(axis, False)
    sizes = {str(n): size for n, size in zip(mesh.axis_names, mesh.mesh_shape, strict=True)}
    size = sizes.get(axis, 1)
    return size > 1 and shards(held) % size == 0


def free_axes(held: Held, mesh: Mesh) -> tuple[str, ...]:
    """Lists the axes over which an array could be sharded further.

    Args:
        held: the array.
        mesh: the mesh.

    Returns:
        Axes that do not split it, and whose size divides a dim of a device's part.

    Example:
        >>> weight = Held("w", "parameter", (8, 4), "f32", (2, 4), "Replicate(), Shard(0)")
        >>> free_axes(weight, Mesh.arange((2, 4), ("dp", "tp")))
        ('dp',)
    """
    splits = _splits(held, mesh) or {}
    return tuple(
        str(axis)
        for axis, size in zip(mesh.axis_names, mesh.mesh_shape, strict=True)
        if size > 1
        and not splits.get(str(axis), False)
        and any(dim and dim % size == 0 for dim in held.device_shape)
    )


def is_vocabulary(held: Held) -> bool:
    """Whether an array has the shape of a vocabulary matrix: an embedding, or the head.

    Args:
        held: the array.

    Returns:
        Whether it is a matrix with one dim as long as vocabularies are.

    Example:
        >>> is_vocabulary(Held("embed", "parameter", (128256, 4096), "bf16", (128256, 4096)))
        True
    """
    if len(held.shape) != 2:
        return False
    short, long = sorted(held.shape)
    return long >= VOCABULARY_ROWS and long >= VOCABULARY_RATIO * short


def axis_dims(held: Held, mesh: Mesh) -> dict[str, int | None] | None:
    """Says which dim each axis splits.

    Args:
        held: the array.
        mesh: the mesh.

    Returns:
        For each axis the dim, or None; None at all where the layout is not known.

    Example:
        >>> weight = Held("w", "parameter", (8, 4), "f32", (2, 4), "[tp, -]")
        >>> axis_dims(weight, Mesh.arange((2, 4), ("dp", "tp")))
        {'dp': None, 'tp': 0}
    """
    named = zip(mesh.axis_names, mesh.mesh_shape, strict=True)
    axes = [MeshAxis(axis, size, 1) for axis, size in named]
    uses = axis_uses(held.chosen or held.requested, axes, len(held.shape))
    return None if uses is None else {use.axis: use.dim for use in uses}


def _splits(held: Held, mesh: Mesh) -> dict[str, bool] | None:
    dims = axis_dims(held, mesh)
    return None if dims is None else {axis: dim is not None for axis, dim in dims.items()}
