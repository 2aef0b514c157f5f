"""explain(tensor): why a tensor lies as it does, in plain words, and what would change it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from xla_dtensor.core import Layout, OpSharding
from xla_dtensor.core.decode import layout_of_op_sharding
from xla_dtensor.device_mesh import mesh_text
from xla_dtensor.dtensor import DTensor
from xla_dtensor.errors import ArgumentTypeError, XlaDTensorError
from xla_dtensor.explaining_advice import padding_words, sharding_advice
from xla_dtensor.explaining_labels import MadeBy, rule_words
from xla_dtensor.off_mesh import is_off_mesh
from xla_dtensor.report.compile_report import CompileReport
from xla_dtensor.report.quantities import bytes_text
from xla_dtensor.runtimes.registry import get_runtime

__all__ = ["Explanation", "explain"]


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
        from xla_dtensor.explaining_reports import explain_in_report

        if name is None:
            raise ArgumentTypeError(
                "explain was called with a report and no name. A report has many tensors. Pass the "
                "name of one, such as explain(report, 'layers.0.wq.weight')."
            )
        return explain_in_report(tensor, name)
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
    wanted = layout.op_sharding(root)
    pending = [str(axis) for axis, _ in state.layout.partial]
    agrees = None if real is None or pending else real == wanted
    found = real if real is not None else wanted
    tile = found.shape_per_tile(shape) if found.kind in ("tiled", "replicated") else shape
    size = tensor.element_size()
    device, whole = math.prod(tile) * size, math.prod(shape) * size
    dtype = str(tensor.dtype).removeprefix("torch.")
    kind = "parameter" if getattr(tensor, "_is_param", False) else "tensor"
    held = [f"A device holds {tile}, {bytes_text(device)} of {bytes_text(whole)}."]
    held += padding_words(shape, tile)
    lies = layout if real is None or real == wanted else _layout(real, layout, root)
    advice = _label_advice(tensor, pending, agrees)
    if lies is not None:
        advice += sharding_advice(lies, shape, tile)
    return Explanation(
        what=f"A {dtype} {kind} of shape {shape} on the mesh {mesh_text(state.mesh.value)}.",
        asked=tuple(_label_words(tensor)),
        real=_real_words(real, wanted, lies, pending),
        held=tuple(held),
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
    for axis, dim in state.known:
        lines.append(
            f"Its mesh lacks the axis {axis!r}, of which it is known that it cuts dim {dim}."
        )
    return lines


def _real_words(
    real: OpSharding | None, wanted: OpSharding, lies: Layout | None, pending: list[str]
) -> str:
    if real is None:
        return "How it really lies is not known: it has no value yet, or none in this process."
    if pending:
        over = ", ".join(pending)
        return (
            f"The label says that a sum over {over} is pending; a global value has none, so it is "
            f"whole or XLA still holds it back. It lies as {real}."
        )
    if real == wanted:
        return f"It lies as labelled: {real}."
    words = "" if lies is None else f", that is {lies}"
    return (
        f"It does NOT lie as labelled: XLA chose {real}{words}, from what it computes with it. "
        f"Labels are not enforced."
    )


def _layout(real: OpSharding, layout: Layout, root: Any) -> Layout | None:
    return layout_of_op_sharding(real, layout.mesh, layout.ndim, root)


def _label_advice(tensor: DTensor, pending: list[str], agrees: bool | None) -> list[str]:
    if pending:
        return ["redistribute to Replicate() or Shard(dim) says how the sum is to lie."]
    if agrees is False:
        made_by: Any = tensor._spec.made_by  # pyright: ignore[reportAttributeAccessIssue]
        words = "redistribute to the label tells XLA; strict_placements() does so for every op"
        return [f"{words}." if made_by is not None else "redistribute tells XLA how it is to lie."]
    return []
