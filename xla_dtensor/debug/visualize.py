"""visualize_sharding: which device holds which block, of anything that says how a tensor lies.

xd.visualize_sharding(x)                               a live DTensor, as it really lies
xd.visualize_sharding([Shard(0), Replicate()], mesh=mesh, shape=(10, 6))
xd.visualize_sharding(("dp", None), mesh=mesh)         a partition spec; without a shape, too
xd.visualize_sharding("{devices=[2,4]<=[8]}")          XLA's text, as for torch_xla's function
xd.visualize_sharding(report, name="layers.0.w1.weight", svg="w1.svg")
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from mesh_utils import Mesh
from xla_dtensor.core import Layout, OpSharding
from xla_dtensor.core.argument_types import argument_types
from xla_dtensor.core.errors import ArgumentTypeError
from xla_dtensor.dtensor.dtensor import DTensor
from xla_dtensor.dtensor.mesh import as_device_mesh
from xla_dtensor.report.compile_report import CompileReport
from xla_dtensor.report.page import picture_of_tensor, tensor_line
from xla_dtensor.report.sharding_picture import ShardingPicture, picture_of
from xla_dtensor.runtimes.registry import get_runtime

__all__ = ["sharding_picture", "visualize_sharding"]


@argument_types
def visualize_sharding(
    sharding: Any,
    header: str = "",
    use_rich: bool = False,
    *,
    mesh: object = None,
    shape: Sequence[int] | None = None,
    name: str | None = None,
    use_color: bool = True,
    max_width: int = 100,
    svg: str | os.PathLike[str] | None = None,
) -> ShardingPicture:
    """Print which device holds which block of a tensor of any rank.

    The names of the arguments are PyTorch's and torch_xla's. Tensors of more than two dims are
    shown two dims at a time: the last two that are cut, once for each block of the others. Of more
    than eight rows or columns of blocks the first ones and the last are shown.

    Args:
        sharding: A DTensor or a plain tensor of the runtime, as it really lies; placements, a
            partition spec or a Layout, as asked for; an OpSharding or XLA's text of one; or a
            CompileReport, with `name`.
        header: Printed above.
        use_rich: Print with rich, in colour where the terminal can.
        mesh: The mesh that placements or a partition spec refer to, or whose axes to name.
        shape: The tensor's shape, where `sharding` does not have it.
        name: Of the tensor in a report.
        use_color: Whether rich uses colours.
        max_width: Characters of a line.
        svg: A file to write the picture to, too.

    Returns:
        The picture, which also has ``text()``, ``rich()`` and ``svg()``.

    Raises:
        ArgumentTypeError: Nothing that says how a tensor lies, or a mesh is missing.
        LayoutError: Placements or a partition spec that do not fit the mesh.
        ReportError: A name that the report has not, or a sharding without blocks.

    Example:
        >>> import torch, xla_dtensor as xd
        >>> from torch.distributed.tensor import Replicate, Shard
        >>> mesh = xd.init_device_mesh("xla", (2, 4), mesh_dim_names=("dp", "tp"))
        >>> x = xd.distribute_tensor(torch.ones(10, 6), mesh, [Replicate(), Shard(0)])
        >>> _ = visualize_sharding(x)
        float32 [tp, -] on dp=2, tp=4
          dim 0: 10 in 4 blocks of 3 by tp, the last of 1 (2 of padding)
          dim 1: 6 whole
          each block on 2 devices, copied along dp
          a device holds 3 x 6, 72 of 240 bytes
        <BLANKLINE>
        devices        0:6
        tp 0     0:3   0, 4
        tp 1     3:6   1, 5
        tp 2     6:9   2, 6
        tp 3     9:10  3, 7
    """
    picture = sharding_picture(sharding, mesh=mesh, shape=shape, name=name)
    if svg is not None:
        Path(svg).write_text(picture.svg(), encoding="utf-8")
    if header:
        sys.stdout.write(f"{header}\n")
    if use_rich:
        from rich.console import Console

        Console(width=max_width).print(picture.rich(use_color=use_color))
    else:
        sys.stdout.write(picture.text(max_width) + "\n")
    return picture


def sharding_picture(
    sharding: Any,
    *,
    mesh: object = None,
    shape: Sequence[int] | None = None,
    name: str | None = None,
) -> ShardingPicture:
    """Return what :func:`visualize_sharding` prints.

    Args:
        sharding: As there.
        mesh: As there.
        shape: As there.
        name: As there.
    """
    if isinstance(sharding, CompileReport):
        return picture_of_tensor(sharding, tensor_line(sharding, name or ""))
    inner_mesh = None if mesh is None else as_device_mesh(mesh).value
    if isinstance(sharding, DTensor):
        return _of_dtensor(sharding)
    if isinstance(sharding, torch.Tensor):
        return _of_payload(sharding, inner_mesh)
    if isinstance(sharding, str) and sharding.strip()[:1] in ("", "{"):
        sharding = OpSharding.parse(sharding or "{replicated}")
    if isinstance(sharding, OpSharding):
        return picture_of(sharding, shape, inner_mesh, root=_root(inner_mesh))
    if isinstance(sharding, Layout):
        return _of_layout(sharding, shape)
    if inner_mesh is not None and isinstance(sharding, str | tuple | list):
        return _of_layout(_layout(sharding, inner_mesh, shape), shape)
    raise ArgumentTypeError(
        f"A picture was asked for, of an object of type={type(sharding).__name__}"
        f"{'' if inner_mesh is not None else ', without a mesh'}. That does not say how a tensor "
        "lies. Pass a DTensor, placements or a partition spec with mesh=, a Layout, XLA's text, or "
        "a report with name=."
    )


def _layout(sharding: Any, mesh: Mesh, shape: Sequence[int] | None) -> Layout:
    if isinstance(sharding, str):
        return Layout.parse(sharding, mesh)
    if any(hasattr(entry, "is_replicate") or hasattr(entry, "is_shard") for entry in sharding):
        dims = [getattr(entry, "dim", -1) for entry in sharding]
        ndim = max(dims, default=-1) + 1 if shape is None else len(shape)
        return Layout.from_placements(sharding, ndim, mesh)
    ndim = None if shape is None else len(shape)
    return Layout.from_partition_spec(tuple(sharding), mesh, tensor_ndim=ndim)


def _of_layout(layout: Layout, shape: Sequence[int] | None) -> ShardingPicture:
    return picture_of(layout.op_sharding(), shape, layout.mesh, layout=layout)


def _root(mesh: Mesh | None) -> Mesh | None:
    return None if mesh is None else get_runtime().root(mesh)


def _of_dtensor(tensor: DTensor) -> ShardingPicture:
    state, real = tensor._spec, tensor.xla_sharding()
    mesh = state.mesh.value
    root = get_runtime().root(mesh)
    notes: list[str] = []
    layout = state.span_layout
    if any(placement.is_partial() for placement in state.placements):
        notes.append(f"labelled {state.layout}: here the sum is made, or left to the next op")
    elif layout.op_sharding(root) != real:
        notes.append(f"labelled {state.layout}; shown is how XLA has laid it out")
    fits = layout.op_sharding(root) == real
    return picture_of(
        real,
        tuple(tensor.shape),
        layout.mesh,
        layout=layout if fits else None,
        root=root,
        title=str(tensor.dtype).removeprefix("torch."),
        element_bytes=tensor.element_size(),
        notes=notes,
    )


def _of_payload(tensor: torch.Tensor, mesh: Mesh | None) -> ShardingPicture:
    runtime = get_runtime()
    if not runtime.is_payload(tensor):
        raise ArgumentTypeError(
            f"A picture was asked for, of a {type(tensor).__name__} of shape={tuple(tensor.shape)} "
            "in the host's memory. It lies on no device of a mesh. Pass a DTensor."
        )
    return picture_of(
        runtime.op_sharding(tensor),
        tuple(tensor.shape),
        mesh,
        root=_root(mesh),
        title=str(tensor.dtype).removeprefix("torch."),
        element_bytes=tensor.element_size(),
    )
