"""Drawing: a mesh on its chips, as text or SVG.

    >>> from mesh_utils import Topology, assign
    >>> found = assign(Topology.parse("v5e:4x4"), (4, 4), axis_names=("fsdp", "tp"))
    >>> drawing = draw_mesh(found.topology, found.mesh)
    >>> print(drawing.text())
        x   0   1   2   3
    y 0   0,0 0,1 1,0 1,1
    y 1   0,3 0,2 1,3 1,2
    y 2   3,0 3,1 2,0 2,1
    y 3   3,3 3,2 2,3 2,2
    >>> drawing.save("mesh.svg")  # doctest: +SKIP

Each chip is there once, with its place in the mesh: "3,1" is fsdp=3, tp=1. In the pictures each
link has the colours of the axes that use it (drawing_links.py), and a legend gives what each axis
gets. All of that is modelled: see network.py.

Of several slices the first is drawn; HybridMesh and `assign` lay all of them out alike.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from mesh_utils.argument_types import argument_types
from mesh_utils.drawing_labels import LabelArray, chip_labels
from mesh_utils.drawing_links import LinkFlags, axis_links
from mesh_utils.drawing_scene import Scene, make_scene
from mesh_utils.drawing_svg import svg_of_scene
from mesh_utils.drawing_text import text_of_chips
from mesh_utils.errors import MeshError
from mesh_utils.mesh import Mesh
from mesh_utils.mesh_input import Axis
from mesh_utils.network import Network
from mesh_utils.network_report import AxisReport, axis_reports
from mesh_utils.topology import Topology


@dataclass(frozen=True, eq=False)
class Drawing:
    """A mesh on its chips. Make one with `draw_mesh`.

    Attributes:
        topology: the chips.
        mesh: the mesh.
        network: the links.
        reports: what each axis gets.
    """

    topology: Topology
    mesh: Mesh
    network: Network
    reports: tuple[AxisReport, ...]

    @cached_property
    def labels(self) -> LabelArray:
        """What is written at each chip of the first slice, [x, y, z]."""
        return chip_labels(self.topology, self.mesh)

    @cached_property
    def uses(self) -> dict[Axis, LinkFlags]:
        """The links of the first slice that each axis uses, [x, y, z, dim]."""
        return axis_links(self.topology, self.mesh, self.network)

    def text(self, width: int = 100) -> str:
        """Writes the chips as text.

        Args:
            width: characters of a line.

        Returns:
            Lines, plane by plane; slices of more than 512 chips are abbreviated.
        """
        return text_of_chips(self.labels, self.topology.torus_rank, width)

    @cached_property
    def scene(self) -> Scene:
        """The picture: its boxes, lines and words."""
        return make_scene(
            self.network,
            self.labels,
            list(self.uses.values()),
            title=f"{self.topology.name}: {self.mesh.axes_text()}",
            axis_names=[str(axis) for axis in self.mesh.axis_names],
            legend=[_legend_line(report) for report in self.reports],
            notes=self._notes(),
        )

    def svg(self) -> str:
        """Writes the picture as SVG.

        Returns:
            The file's text, the same for the same mesh.
        """
        return svg_of_scene(self.scene)

    def save(self, path: str | Path) -> None:
        """Writes the picture to a file.

        Args:
            path: the file; it ends in .svg.

        Raises:
            MeshError: another ending.
            OSError: the file cannot be written.
        """
        file = Path(path)
        check_format(file)
        file.write_text(self.svg(), encoding="utf-8")

    def _notes(self) -> list[str]:
        names = ", ".join(str(axis) for axis in self.mesh.axis_names)
        lines = [f"In each square: {names}. Bandwidths are modelled, not measured."]
        if self.network.switched:
            lines.append("A switch joins these devices: no links are drawn.")
        else:
            lines.append("Grey links: no axis uses them. A stub with a dot: the link wraps.")
        if self.network.shape[2] > 1:
            lines.append("Slanted stubs lead to the next plane (up) and the one before (down).")
        if self.network.num_slices > 1:
            lines.append(f"Slice 0 of {self.network.num_slices}.")
        return lines


@argument_types
def draw_mesh(topology: Topology, mesh: Mesh, network: Network | None = None) -> Drawing:
    """Draws a mesh.

    Args:
        topology: its chips.
        mesh: a mesh of all of them.
        network: the links, where they are not `Network.of(topology)`.

    Returns:
        The drawing: see `Drawing.text`, `svg` and `save`.

    Raises:
        MeshError: ids that are not in the topology, or a wrap that is not known.

    Example:
        >>> drawing = draw_mesh(Topology.parse("v5e:2x2"), Mesh.arange((2, 2), ("dp", "tp")))
        >>> drawing.svg().splitlines()[1]
        '<title>v5e:2x2: dp=2, tp=2</title>'
    """
    links = Network.of(topology) if network is None else network
    return Drawing(topology, mesh, links, axis_reports(topology, mesh, network=links))


def check_format(path: Path) -> None:
    """Refuses a file that is no drawing by its name.

    Args:
        path: the file.

    Raises:
        MeshError: it does not end in .svg.
    """
    if path.suffix.lower() != ".svg":
        raise MeshError(
            f"A drawing was asked for as {str(path)!r}. Drawings are SVG, which other programs "
            "turn into PNG. Pass a name that ends in .svg."
        )


def _legend_line(report: AxisReport) -> str:
    name = f"{report.axis}={report.size}"
    if report.size == 1:
        return f"{name}: one device, nothing moves"
    where = "no rows of chips" if report.span is None else str(report.span)[5:-1]
    links = report.links["all-gather"]
    rate = report.bytes_per_second()
    speed = f"{links:.3g} links" if rate is None else f"{rate / 1e9:.3g} GB/s"
    if math.isinf(links):
        speed = "on one chip"
    crosses = ", over DCN" if report.crosses_slices else ""
    share = f"{100 * report.fraction():.0f} % of the bound"
    return f"{name} on {where}: {speed} all-gather, {share} ({report.strategy}{crosses})"
