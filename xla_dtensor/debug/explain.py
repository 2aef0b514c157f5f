"""explain(tensor): why a tensor lies as it does, in plain words, and what would change it."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from xla_dtensor.core import Layout, OpSharding
from xla_dtensor.core.argument_types import argument_types
from xla_dtensor.core.errors import ArgumentTypeError, XlaDTensorError
from xla_dtensor.core.translate import layout_of_op_sharding
from xla_dtensor.dtensor.dtensor import DTensor
from xla_dtensor.dtensor.labels import MadeBy, rule_words
from xla_dtensor.dtensor.mesh import is_off_mesh, mesh_text
from xla_dtensor.plan.live import evidence_of
from xla_dtensor.report.attribution import CommCounts
from xla_dtensor.report.attribution import comm_counts as count
from xla_dtensor.report.compile_report import CompileReport
from xla_dtensor.report.page import layout_of_text, tensor_line
from xla_dtensor.report.render import mesh_axes_text
from xla_dtensor.report.report import Evidence, TensorLine
from xla_dtensor.report.texts import bytes_text
from xla_dtensor.runtimes.base import CompiledStep
from xla_dtensor.runtimes.registry import get_runtime

__all__ = ["comm_counts", "explain", "padding_words", "profile"]


# ------------------------------------------------------------- What would change how a tensor lies
#
# Axes that still copy it, and sizes that need no padding.


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


def _sharding_advice(layout: Layout, shape: Sequence[int], tile: Sequence[int]) -> list[str]:
    """What would make the parts smaller, or even.

    Example:
        >>> from mesh_utils import Mesh
        >>> mesh = Mesh.arange((2, 4), ("dp", "tp"))
        >>> _sharding_advice(Layout.parse("[tp, -]", mesh), (8, 6), (2, 6))
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


# --------------------------------------------------------------------------------- explain(tensor)


@dataclass(frozen=True)
class Explanation:
    """Why a tensor lies as it does.

    Attributes:
        what: The tensor, in a line.
        asked: What its label is, or what was asked for, and where that comes from.
        real: How it really lies, and whether that is the same; "" if it is not known.
        held: What one device holds of it, padding told.
        advice: What would change it.
        agrees: Whether it lies as labelled; None if that is not known.
    """

    what: str
    asked: tuple[str, ...]
    real: str
    held: tuple[str, ...]
    advice: tuple[str, ...] = ()
    agrees: bool | None = None

    def __str__(self) -> str:
        lines = [self.what, *self.asked, self.real, *self.held]
        lines += [f"To change it: {words}" for words in self.advice]
        return "\n".join(line for line in lines if line)


def explain(tensor: torch.Tensor | CompileReport, name: str | None = None) -> Explanation:
    """Say why a tensor lies as it does.

    Labels are PyTorch's placements and are not enforced, so a value that a step computes may lie
    otherwise; here both are said, with the op that made the value and the rule of its label.

    Args:
        tensor: A DTensor; or a report, with the name of a parameter or another tensor in it.
        name: That name.

    Returns:
        The explanation; print it.

    Raises:
        ArgumentTypeError: Something else, or a report without a name.
        ReportError: The report has no tensor of that name.

    Example:
        >>> import torch, xla_dtensor as xd
        >>> from torch.distributed.tensor import Replicate, Shard
        >>> mesh = xd.init_device_mesh("xla", (2, 4), mesh_dim_names=("dp", "tp"))
        >>> print(explain(xd.distribute_tensor(torch.ones(10, 6), mesh, [Replicate(), Shard(0)])))
        A float32 tensor of shape (10, 6) on the mesh (dp=2, tp=4).
        It is labelled (Replicate(), Shard(dim=0)), that is [tp, -]; it was placed so as asked.
        It lies as labelled: {devices=[4,1,2]<=[2,4]T(1,0) last_tile_dim_replicate}.
        A device holds (3, 6), 72 B of 240 B.
        Dim 0 of 10 in 4 blocks is padded to 12.
        To change it: dp copies it; Shard(1) on dp would leave 1/2 of it on each device.
        To change it: 12 in place of 10 along dim 0 needs no padding.
    """
    if isinstance(tensor, CompileReport):
        if name is None:
            raise ArgumentTypeError(
                "explain was called with a report and no name. A report has many tensors. Pass the "
                "name of one, such as explain(report, 'layers.0.wq.weight')."
            )
        return _of_line(tensor, name)
    if not isinstance(tensor, DTensor):
        raise ArgumentTypeError(
            f"explain was called with an object of type={type(tensor).__name__}. It lies on no "
            "mesh. Pass a DTensor, or a report and the name of a tensor in it."
        )
    return _of_dtensor(tensor)


def _of_dtensor(tensor: DTensor) -> Explanation:
    state, shape = tensor._spec, tuple(tensor.shape)
    real = _real(tensor)
    layout = state.span_layout
    root = get_runtime().root(layout.mesh)
    labelled = layout.op_sharding(root)
    pending = [str(axis) for axis, _ in state.layout.partial]
    agrees = None if real is None or pending else real == labelled
    sharding = real if real is not None else labelled
    tile = sharding.shape_per_tile(shape) if sharding.kind in ("tiled", "replicated") else shape
    size = tensor.element_size()
    device, total = math.prod(tile) * size, math.prod(shape) * size
    dtype = str(tensor.dtype).removeprefix("torch.")
    kind = "parameter" if getattr(tensor, "_is_param", False) else "tensor"
    sentences = [f"A device holds {tile}, {bytes_text(device)} of {bytes_text(total)}."]
    sentences += padding_words(shape, tile)
    real_layout = layout
    if real is not None and real != labelled:
        real_layout = layout_of_op_sharding(real, layout.mesh, layout.ndim, root)
    advice = _label_advice(tensor, pending, agrees)
    if real_layout is not None:
        advice += _sharding_advice(real_layout, shape, tile)
    return Explanation(
        what=f"A {dtype} {kind} of shape {shape} on the mesh {mesh_text(state.mesh.value)}.",
        asked=tuple(_label_words(tensor)),
        real=_real_words(real, labelled, real_layout, pending),
        held=tuple(sentences),
        advice=tuple(advice),
        agrees=agrees,
    )


def _real(tensor: DTensor) -> OpSharding | None:
    """How it really lies; None while a step is traced, or without values."""
    if tensor.is_meta or is_off_mesh(tensor._spec.mesh):
        return None
    if not get_runtime().is_payload(tensor._local_tensor):
        return None
    try:
        return tensor.xla_sharding()
    except (XlaDTensorError, AttributeError, TypeError):
        return None  # a value of a step that is being traced lies nowhere yet


def _label_words(tensor: DTensor) -> list[str]:
    state: Any = tensor._spec
    placements = ", ".join(map(repr, state.placements))
    text = f"It is labelled ({placements}), that is {state.layout}"
    made_by: MadeBy | None = state.made_by
    if made_by is None:
        lines = [f"{text}; it was placed so as asked."]
    elif isinstance(made_by.func, str):
        lines = [f"{text}; {made_by.words} made it, and it was placed so as asked."]
    else:
        lines = [f"{text}.", f"{made_by.words} made it; {rule_words(made_by)}."]
    for axis, dim in state.outer_cuts:
        lines.append(
            f"Its mesh lacks the axis {axis!r}, of which it is known that it cuts dim {dim}."
        )
    return lines


def _real_words(
    real: OpSharding | None, labelled: OpSharding, real_layout: Layout | None, pending: list[str]
) -> str:
    if real is None:
        return "How it really lies is not known: it has no value yet, or none in this process."
    if pending:
        over = ", ".join(pending)
        return (
            f"The label says that a sum over {over} is pending; a global value has none, so it is "
            f"whole or XLA still holds it back. It lies as {real}."
        )
    if real == labelled:
        return f"It lies as labelled: {real}."
    words = "" if real_layout is None else f", that is {real_layout}"
    return (
        f"It does NOT lie as labelled: XLA chose {real}{words}, from what it computes with it. "
        f"Labels are not enforced."
    )


def _label_advice(tensor: DTensor, pending: list[str], agrees: bool | None) -> list[str]:
    if pending:
        return ["redistribute to Replicate() or Shard(dim) says how the sum is to lie."]
    if agrees is False:
        made_by: Any = tensor._spec.made_by  # pyright: ignore[reportAttributeAccessIssue]
        words = "redistribute to the label tells XLA; strict_placements() does so for every op"
        return [f"{words}." if made_by is not None else "redistribute tells XLA how it is to lie."]
    return []


# -------------------------------------------------------- Why a tensor of a report lies as it does
#
# What was asked for, and what XLA chose.


def _of_line(report: CompileReport, name: str) -> Explanation:
    """Why a tensor of a report lies as it does; equal layers are one line."""
    line = tensor_line(report, name)
    shape, tile = tuple(line.shape), tuple(line.device_shape)
    many = f", one of {line.count:,} that lie alike" if line.count > 1 else ""
    sentences = [
        f"A device holds {tile}, {bytes_text(line.device_bytes)} of "
        f"{bytes_text(line.global_bytes)}."
    ]
    layout = layout_of_text(line.layout, report.mesh, len(shape))
    advice = [] if layout is None else _sharding_advice(layout, shape, tile)
    return Explanation(
        what=f"{name} ({line.role}), {line.dtype} of shape {shape}{many}, on the mesh "
        f"{mesh_axes_text(report.mesh)}.",
        asked=(_asked(line),),
        real=_chosen(line),
        held=(*sentences, *padding_words(shape, tile)),
        advice=(*_fixes(report, line, name), *advice),
        agrees=None if line.requested is None or line.chosen is None else not line.differs,
    )


def _asked(line: TensorLine) -> str:
    if line.requested is None:
        return "Nobody asked how it is to lie."
    return f"Asked for was {line.requested}."


def _chosen(line: TensorLine) -> str:
    if line.chosen is None:
        return "How the compiled program lays it out cannot be said in axes of the mesh."
    if line.requested is None:
        return f"The compiled program lays it out as {line.chosen}: XLA's choice."
    if line.differs:
        return f"The compiled program lays it out OTHERWISE: as {line.chosen}."
    return "The compiled program lays it out so."


def _fixes(report: CompileReport, line: TensorLine, name: str) -> list[str]:
    """What the report's findings say of it."""
    names = {name, line.name}
    return [
        f"{finding.title}: {finding.fix}"
        for finding in report.findings
        if any(tensor_name in f"{finding.title} {finding.detail}" for tensor_name in names)
    ]


# -------------------------------------------------------------------------------------- Live counts
#
# CommDebugMode's questions, answered from the program of a step that runs here.
#
# step = xd.compile(train) step(batch) print(xd.comm_counts(step, mesh))


def comm_counts(
    source: CompiledStep | CompileReport | Evidence, mesh: object = None, *models: torch.nn.Module
) -> CommCounts:
    """Count what each module communicates, forward and backward, in the compiled program.

    PyTorch's CommDebugMode counts calls of collectives while Python runs, and is blind to what XLA
    inserts. This has its methods (``get_comm_counts``, ``get_total_counts``,
    ``generate_comm_debug_tracing_table``, ...) and reads the program. Names of modules are known on
    the JAX runtime; torch_xla's programs carry none, and everything counts as "Global" there.

    Args:
        source: What ``compile`` returned, after a call; or a report, or its evidence.
        mesh: The mesh to name axes of; needed with a step only.
        *models: Taken as by ``report_of``; names of modules are in the program itself.

    Returns:
        The counts by module. Their sums are those of the report.

    Raises:
        CompileError: The step was not called yet.
        ArgumentTypeError: `source` is nothing of the kind.

    Example:
        >>> import torch, xla_dtensor as xd
        >>> from torch.distributed.tensor import Shard
        >>> mesh = xd.init_device_mesh("xla", (8,), mesh_dim_names=("dp",))
        >>> total = xd.compile(lambda x: x.sum())
        >>> _ = total(xd.distribute_tensor(torch.ones(8), mesh, [Shard(0)]))
        >>> xd.comm_counts(total, mesh).get_comm_counts()
        {'all-reduce': 1}
    """
    if isinstance(source, CompileReport | Evidence):
        return count(source)
    return count(evidence_of(source, mesh, *models))


# ---------------------------------------- Record what host and devices do while compiled steps run


@argument_types
def profile(folder: str | os.PathLike[str]) -> AbstractContextManager[None]:
    """Return a context that records what runs inside, for TensorBoard, XProf or Perfetto.

    A compiled step's ops carry the names of the modules that they come from:
    ``Llama/layers.0/attention/...`` and, for their gradients, ``backward/Llama/layers.0/...``.

    Args:
        folder: Where the recording is written to; it is made if it is not there.

    Raises:
        UnsupportedOpError: The runtime records no profiles.

    Example:
        >>> import tempfile, torch, xla_dtensor as xd
        >>> step = xd.compile(lambda x: x * 2)
        >>> with tempfile.TemporaryDirectory() as folder, xd.profile(folder):
        ...     step(torch.ones(2)).tolist()
        [2.0, 2.0]
    """
    return get_runtime().profile(folder)
