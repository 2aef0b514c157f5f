"""ManualRegion: the mesh axes along which a program is written per device.

Outside a manual region a tensor is global and XLA decides what each device does. Inside one, a
tensor is what ONE device has: shapes are those of its tile, and nothing is communicated but by the
collectives that the program calls. A region may cover all axes of the mesh or some of them; along
the others its tensors stay global.

    mesh (dp=2, tp=4), x of shape (16, 8) as [dp, tp]
    region over (dp, tp): a tensor of shape (8, 2), one per device
    region over (tp,):    a tensor of shape (16, 2), one per coordinate of tp; dp is XLA's

Invariants: the axes are whole axes of the mesh, in its order, at least one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

from mesh_utils import Axis, Mesh
from xla_dtensor.core.entries import entry_axis
from xla_dtensor.core.errors import LayoutError
from xla_dtensor.core.layout import Layout

__all__ = ["ManualRegion"]


@dataclass(frozen=True)
class ManualRegion:
    """Axes of a mesh along which tensors are per device.

    Args:
        mesh: The mesh.
        axes: Some of its axes, by name, in mesh order; :meth:`over` makes them so.

    Example:
        >>> region = ManualRegion.over(Mesh.arange((2, 4), ("dp", "tp")), ["tp"])
        >>> region.axes, region.sizes
        (('tp',), (4,))
    """

    mesh: Mesh
    axes: tuple[Axis, ...]

    @classmethod
    def over(cls, mesh: Mesh, axes: Iterable[Axis] | None = None) -> ManualRegion:
        """Make the region over some axes of a mesh, or over all.

        Args:
            mesh: The mesh.
            axes: Names or positions, in any order; None for all.

        Raises:
            LayoutError: No axis, or one twice.
            AxisError: An unknown axis.
        """
        if axes is None:
            return cls(mesh, tuple(mesh.axis_names))
        asked = tuple(axes)
        indices = sorted({mesh.axis_index(axis) for axis in asked})
        if len(indices) != len(asked) or not asked:
            raise LayoutError(
                f"A manual region over axes={asked} was asked for on a mesh ({mesh.axes_text()}). "
                "It needs at least one axis, and each only once. Pass some of the mesh's axes, or "
                "None for all."
            )
        return cls(mesh, tuple(mesh.axis_names[index] for index in indices))

    @property
    def sizes(self) -> tuple[int, ...]:
        """The size of each manual axis."""
        return tuple(self.mesh.size(axis) for axis in self.axes)

    @property
    def is_whole(self) -> bool:
        """Whether every axis of the mesh is manual; axes of size 1 do not count."""
        return prod(self.sizes) == self.mesh.size()

    def check_layout(self, layout: Layout) -> None:
        """Raise when tensors of this layout cannot cross the border of the region.

        Raises:
            LayoutError: The layout shards over an axis that is not manual, or is no tiling.
        """
        used = {entry_axis(entry) for dim in layout.dims for entry in dim}
        foreign = [axis for axis in used if axis is not None and axis not in self.axes]
        if layout.mesh != self.mesh or foreign:
            raise LayoutError(
                f"The layout {layout} was given for a manual region over the axes {self.axes}. At "
                "its border only manual axes may be named, on the region's own mesh. Leave "
                f"{foreign or 'the other mesh'} out of the partition spec."
            )
        layout.op_sharding()

    def copied_axes(self, layout: Layout) -> tuple[Axis, ...]:
        """Return the manual axes along which a tensor of this layout is copied."""
        used = {entry_axis(entry) for dim in layout.dims for entry in dim}
        return tuple(axis for axis in self.axes if axis not in used)

    def tile_shape(self, layout: Layout, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape inside the region of a global `shape`, padding included.

        Example:
            >>> mesh = Mesh.arange((2, 4), ("dp", "tp"))
            >>> region = ManualRegion.over(mesh)
            >>> region.tile_shape(Layout.from_partition_spec(("tp", None), mesh), (10, 6))
            (3, 6)
        """
        return layout.op_sharding().shape_per_tile(shape)
