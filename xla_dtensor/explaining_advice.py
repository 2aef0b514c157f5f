"""What would change how a tensor lies: axes that still copy it, and sizes that need no padding."""

from __future__ import annotations

from collections.abc import Sequence

from xla_dtensor.core import Layout

__all__ = ["padding_words", "sharding_advice"]


def padding_words(shape: Sequence[int], tile: Sequence[int]) -> list[str]:
    """Say which dims are filled up so that all blocks are equal.

    Args:
        shape: Of the tensor.
        tile: What one device holds.

    Example:
        >>> padding_words((10, 6), (3, 6))
        ['Dim 0 of 10 in 4 blocks is padded to 12.']
    """
    words: list[str] = []
    for dim, (extent, size) in enumerate(zip(shape, tile, strict=True)):
        blocks = -(-extent // size) if size else 1
        if size and blocks * size != extent:
            words.append(f"Dim {dim} of {extent} in {blocks} blocks is padded to {blocks * size}.")
    return words


def sharding_advice(layout: Layout, shape: Sequence[int], tile: Sequence[int]) -> list[str]:
    """Say what would make the parts smaller, or even.

    Args:
        layout: How it lies.
        shape: Of the tensor.
        tile: What one device holds.

    Example:
        >>> from mesh_utils import Mesh
        >>> mesh = Mesh.arange((2, 4), ("dp", "tp"))
        >>> sharding_advice(Layout.parse("[tp, -]", mesh), (8, 6), (2, 6))
        ['dp copies it; Shard(1) on dp would leave 1/2 of it on each device.']
    """
    advice: list[str] = []
    used = {*layout.sharded_axes, *(axis for axis, _ in layout.partial)}
    for axis, size in zip(layout.mesh.axis_names, layout.mesh.mesh_shape, strict=True):
        if size == 1 or axis in used:
            continue
        # An uncut dim first: then the blocks stay what the placements of other axes say.
        dims = [dim for dim, extent in enumerate(tile) if extent and extent % size == 0]
        dims.sort(key=lambda dim: (tile[dim] != shape[dim], -tile[dim]))
        if dims:
            advice.append(
                f"{axis} copies it; Shard({dims[0]}) on {axis} would leave 1/{size} of it on each "
                "device."
            )
    for dim, (extent, size) in enumerate(zip(shape, tile, strict=True)):
        blocks = layout.num_shards(dim)
        even = -(-extent // blocks) * blocks
        if size and even != extent:
            advice.append(f"{even} in place of {extent} along dim {dim} needs no padding.")
    return advice
