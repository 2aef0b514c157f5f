"""Tensors of a report, looked up by name, and pictures of how they lie."""

from __future__ import annotations

from collections.abc import Sequence

from mesh_utils import Mesh
from xla_dtensor.core import Layout, LayoutError
from xla_dtensor.report.collective_lines import starred
from xla_dtensor.report.compile_report import CompileReport
from xla_dtensor.report.errors import ReportError
from xla_dtensor.report.hlo_shape import element_bytes
from xla_dtensor.report.placement_texts import axis_uses
from xla_dtensor.report.report_machine import MeshAxis
from xla_dtensor.report.report_tensors import TensorLine
from xla_dtensor.report.sharding_blocks import ShardingPicture, picture_of

__all__ = ["layout_of_text", "picture_of_tensor", "tensor_line"]


def tensor_line(report: CompileReport, name: str) -> TensorLine:
    """Looks a tensor up.

    Args:
        report: the report.
        name: of the tensor, "layers.0.wq.weight": also where equal layers are one line.

    Returns:
        Its line.

    Raises:
        ReportError: the report names no such tensor.
    """
    names = {line.name: line for line in report.tensors}
    found = names.get(name) or names.get(starred(name))
    if found is None:
        near = ", ".join(list(names)[:5]) or "none: its program names no tensors"
        raise ReportError(
            f"The tensor name={name!r} was asked for, of the report {report.title!r}. It has no "
            f"tensor of that name. The largest ones are {near}."
        )
    return found


def layout_of_text(text: str | None, mesh: Sequence[MeshAxis], ndim: int) -> Layout | None:
    """Reads a layout as a value.

    Args:
        text: a layout's, or placements for each axis in order; None if there is none.
        mesh: the axes.
        ndim: the number of dims of the tensor.

    Returns:
        The layout, on devices numbered along the mesh; None for text that says something else.

    Example:
        >>> axes = [MeshAxis("dp", 2, 1), MeshAxis("tp", 4, 1)]
        >>> str(layout_of_text("Shard(1), Replicate()", axes, 2)), layout_of_text("[pp]", axes, 1)
        ('[-, dp]', None)
    """
    if text is None:
        return None
    value = Mesh.arange(tuple(axis.size for axis in mesh), tuple(axis.name for axis in mesh))
    if text.lstrip().startswith("["):
        try:
            found = Layout.parse(text, value)
        except LayoutError:
            return None
        return found if found.ndim == ndim else None
    uses = axis_uses(text, mesh, ndim)
    if uses is None or any(use.is_strided for use in uses):
        return None
    dims = ([mesh[use.place].name for use in uses if use.dim == dim] for dim in range(ndim))
    partial = tuple((mesh[use.place].name, "sum") for use in uses if use.is_partial)
    return Layout(value, tuple(map(tuple, dims)), partial)


def picture_of_tensor(report: CompileReport, line: TensorLine) -> ShardingPicture:
    """Shows how a tensor of a report lies.

    Args:
        report: the report.
        line: the tensor.

    Returns:
        A picture, on devices numbered along the mesh.

    Raises:
        ReportError: it is not known how the tensor lies.
    """
    layout = layout_of_text(line.layout, report.mesh, len(line.shape))
    try:
        sharding = None if layout is None else layout.op_sharding()
    except LayoutError:
        sharding = None
    if layout is None or sharding is None:
        raise ReportError(
            f"A picture of the tensor {line.name!r} was asked for. Its layout is "
            f"{line.layout!r}, which names no blocks on the mesh. Ask for another tensor."
        )
    notes = [f"asked for was {line.requested}"] if line.differs else []
    if line.count > 1:
        notes.append(f"{line.count:,} tensors lie like this")
    return picture_of(
        sharding,
        line.shape,
        layout.mesh,
        layout=layout,
        title=f"{line.name} {line.dtype}",
        element_bytes=element_bytes(line.dtype) or None,
        notes=notes,
    )
