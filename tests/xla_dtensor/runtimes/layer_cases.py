"""Calls of the layers of torch.nn.functional, and the lowerings that each has to reach."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from tests.xla_dtensor.runtimes.lowering_cases import draw_anew, f, index, pos

aten = torch.ops.aten


@dataclass(frozen=True)
class Layer:
    """A call: `ops`, separated by spaces, are the lowerings that it has to reach."""

    ops: str
    call: Callable[..., Any]
    inputs: tuple[torch.Tensor, ...]

    def lowerings(self) -> list[Any]:
        return [
            getattr(getattr(aten, name.partition(".")[0]), name.partition(".")[2] or "default")
            for name in self.ops.split()
        ]


def layer(ops: str, call: Callable[..., Any], *inputs: torch.Tensor) -> Layer:
    return Layer(ops, call, inputs)


def both(name: str, suffix: str = "_backward") -> str:
    return f"{name} {name}{suffix}"


draw_anew()
LINE, IMAGE, VOLUME = f(4, 8, 11), f(4, 8, 9, 10), f(3, 4, 5, 6, 7)
CONVOLUTION = "convolution convolution_backward"
CONVOLUTIONS = {
    "conv1d": layer(
        CONVOLUTION, lambda x, w, b: F.conv1d(x, w, b, 2, 3, 2), LINE, f(6, 8, 3), f(6)
    ),
    "conv1d groups": layer(
        CONVOLUTION, lambda x, w: F.conv1d(x, w, None, 2, 1, 2, 4), LINE, f(12, 2, 3)
    ),
    "conv2d": layer(
        CONVOLUTION, lambda x, w, b: F.conv2d(x, w, b, (2, 1), (1, 0)), IMAGE, f(6, 8, 3, 2), f(6)
    ),
    "conv2d same": layer(
        CONVOLUTION,
        lambda x, w: F.conv2d(x, w, padding="same", dilation=(1, 2)),
        IMAGE,
        f(6, 8, 3, 3),
    ),
    "conv2d depthwise": layer(
        CONVOLUTION, lambda x, w, b: F.conv2d(x, w, b, 1, 1, 1, 8), IMAGE, f(8, 1, 3, 3), f(8)
    ),
    "conv2d groups": layer(
        CONVOLUTION, lambda x, w: F.conv2d(x, w, None, 2, 1, 1, 2), IMAGE, f(6, 4, 3, 3)
    ),
    "conv2d one image": layer(CONVOLUTION, F.conv2d, f(8, 9, 10), f(4, 8, 3, 3), f(4)),
    "conv3d": layer(
        CONVOLUTION, lambda x, w: F.conv3d(x, w, None, 1, (1, 0, 1)), VOLUME, f(2, 4, 3, 2, 3)
    ),
    "transposed 1d": layer(
        CONVOLUTION,
        lambda x, w, b: F.conv_transpose1d(x, w, b, 3, 1, 2, dilation=2),
        LINE,
        f(8, 6, 3),
        f(6),
    ),
    "transposed 2d": layer(
        CONVOLUTION,
        lambda x, w: F.conv_transpose2d(x, w, None, 2, 1, 1),
        IMAGE,
        f(8, 6, 3, 3),
    ),
    "transposed 2d groups": layer(
        CONVOLUTION,
        lambda x, w, b: F.conv_transpose2d(x, w, b, (2, 1), 1, (1, 0), 4, (1, 2)),
        IMAGE,
        f(8, 3, 3, 2),
        f(12),
    ),
    "transposed 1d groups, more padding than stride": layer(
        CONVOLUTION,
        lambda x, w: F.conv_transpose1d(x, w, None, 1, 2, 2, 2, 3),
        LINE,
        f(8, 3, 2),
    ),
    "transposed 3d": layer(
        CONVOLUTION,
        lambda x, w: F.conv_transpose3d(x, w, None, (1, 2, 1), 1),
        VOLUME,
        f(4, 2, 3, 3, 2),
    ),
}

POOLING = {
    "avg_pool1d": layer(
        both("avg_pool2d"), lambda x: F.avg_pool1d(x, 3, 2, 1, ceil_mode=True), LINE
    ),
    "avg_pool2d": layer(
        both("avg_pool2d"), lambda x: F.avg_pool2d(x, (3, 2), None, 1, True, False), IMAGE
    ),
    "avg_pool2d divisor": layer(
        both("avg_pool2d"), lambda x: F.avg_pool2d(x, 3, 2, 1, False, True, 5), IMAGE
    ),
    "avg_pool3d": layer(both("avg_pool3d"), lambda x: F.avg_pool3d(x, 2, (2, 1, 3), 1), VOLUME),
    "lp_pool": layer(both("avg_pool2d"), lambda x: F.lp_pool2d(x, 3, 2), IMAGE.abs()),
    "max_pool1d": layer(
        both("max_pool2d_with_indices"),
        lambda x: F.max_pool1d(x, 3, 2, 1, 2, return_indices=True),
        LINE,
    ),
    "max_pool2d": layer(
        both("max_pool2d_with_indices"),
        lambda x: F.max_pool2d(x, 3, 2, 1, ceil_mode=True, return_indices=True),
        IMAGE,
    ),
    "max_pool2d of equal numbers": layer(
        both("max_pool2d_with_indices"),
        lambda x: F.max_pool2d(x, (2, 3), 1, (1, 0), (2, 1), return_indices=True),
        IMAGE.round(),
    ),
    "max_pool2d large": layer(
        both("max_pool2d_with_indices"), lambda x: F.max_pool2d(x, 9, 1, 2), IMAGE
    ),
    "max_pool3d": layer(
        both("max_pool3d_with_indices"),
        lambda x: F.max_pool3d(x, (2, 3, 2), 2, (0, 1, 1), return_indices=True),
        VOLUME,
    ),
    "adaptive averages": layer(
        both("_adaptive_avg_pool2d"), lambda x: F.adaptive_avg_pool2d(x, (4, 7)), IMAGE
    ),
    "adaptive averages, more than there are": layer(
        both("_adaptive_avg_pool3d"), lambda x: F.adaptive_avg_pool3d(x, (3, 1, 9)), VOLUME
    ),
    "adaptive maxima": layer(
        both("adaptive_max_pool2d"),
        lambda x: F.adaptive_max_pool2d(x, (4, 12), return_indices=True),
        IMAGE.round(),
    ),
    "adaptive maxima 3d": layer(
        both("adaptive_max_pool3d"),
        lambda x: F.adaptive_max_pool3d(x, (3, 4, 2), return_indices=True),
        VOLUME,
    ),
    "fractional maxima": layer(
        both("fractional_max_pool2d"),
        lambda x, u: F.fractional_max_pool2d(
            x, 2, (5, 6), return_indices=True, _random_samples=u.detach()
        ),
        IMAGE,
        f(4, 8, 2, low=0, high=1),
    ),
    "fractional maxima 3d": layer(
        both("fractional_max_pool3d"),
        lambda x, u: F.fractional_max_pool3d(
            x, (2, 1, 3), (1, 4, 3), return_indices=True, _random_samples=u.detach()
        ),
        VOLUME,
        f(3, 4, 3, low=0, high=1),
    ),
}


NORMALIZED = "_native_batch_norm_legit_functional native_batch_norm_backward"
NORMS = {
    "batch norm": layer(
        NORMALIZED,
        lambda x, m, v, w, b: F.batch_norm(x, m.detach(), v.detach(), w, b, training=True),
        IMAGE,
        f(8),
        pos(8),
        f(8),
        f(8),
    ),
    "batch norm, evaluated": layer(
        NORMALIZED,
        lambda x, m, v, w: F.batch_norm(x, m.detach(), v.detach(), w),
        LINE,
        f(8),
        pos(8),
        f(8),
    ),
    "batch norm without statistics": layer(
        "_native_batch_norm_legit.no_stats native_batch_norm_backward",
        lambda x: F.batch_norm(x, None, None, training=True),
        f(5, 6),
    ),
    "batch norm with update": layer(
        "_batch_norm_with_update_functional batch_norm_backward",
        lambda x, w, b, m, v: aten._batch_norm_with_update(
            x, w, b, m.detach().clone(), v.detach().clone(), 0.1, 1e-5
        )[0],
        IMAGE,
        f(8),
        f(8),
        f(8),
        pos(8),
    ),
    "instance norm": layer(
        "native_batch_norm_backward",
        lambda x, w, b: F.instance_norm(x, None, None, w, b),
        IMAGE,
        f(8),
        f(8),
    ),
    "group norm": layer(
        both("native_group_norm"), lambda x, w, b: F.group_norm(x, 4, w, b), IMAGE, f(8), f(8)
    ),
    "group norm plain": layer(both("native_group_norm"), lambda x: F.group_norm(x, 2), LINE),
}

CLASSES = index(6, high=5)
BAG, OFFSETS = index(9, high=7), torch.tensor([0, 0, 4, 9])
# The table of embeddings, in which some rows are in several bags.
TABLE_OF_ROWS = f(7, 4)


def bags(mode: str, **options: Any) -> Layer:
    names = "_embedding_bag _embedding_bag_backward"
    return layer(
        names,
        lambda w, i, o: F.embedding_bag(i, w, o, mode=mode, **options),
        TABLE_OF_ROWS,
        BAG,
        OFFSETS,
    )


def ctc(zero_infinity: bool = False) -> Callable[..., Any]:
    def call(x: Any, targets: Any, steps: Any, lengths: Any) -> Any:
        probs = torch.log_softmax(x, -1)
        return F.ctc_loss(
            probs, targets, steps, lengths, reduction="none", zero_infinity=zero_infinity
        )

    return call


LENGTHS = (torch.tensor([9, 8, 7]), torch.tensor([4, 0, 2]))
CTC = "_ctc_loss.Tensor _ctc_loss_backward.Tensor"
OTHERS = {
    "margins": layer(
        both("multi_margin_loss"),
        lambda x, y, w: F.multi_margin_loss(x, y, p=2, margin=0.7, weight=w.detach()),
        f(6, 5),
        CLASSES,
        pos(5),
    ),
    "margins of one row": layer(
        both("multi_margin_loss"),
        lambda x, y: F.multi_margin_loss(x, y, reduction="none"),
        f(5),
        torch.tensor([2]),
    ),
    "margins of labels": layer(
        "multilabel_margin_loss_forward multilabel_margin_loss_backward",
        F.multilabel_margin_loss,
        f(3, 4),
        torch.tensor([[3, 0, -1, 1], [-1, 2, 0, 1], [1, 2, 3, 0]]),
    ),
    "bilinear form": layer("_trilinear", F.bilinear, f(5, 6), f(5, 3), f(4, 6, 3), f(4)),
    "hardshrink": layer("hardshrink_backward", F.hardshrink, f(5, 6)),
    "softshrink": layer("softshrink_backward", F.softshrink, f(5, 6)),
    **{
        f"cdist {p}": layer(
            "_cdist_forward _cdist_backward",
            lambda a, b, p=p: torch.cdist(a, b, p),
            f(3, 5, 4),
            f(1, 6, 4),
        )
        for p in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, float("inf"))
    },
    "cdist of equal rows": layer(
        "_cdist_forward _cdist_backward",
        lambda a: torch.cdist(a, a.detach().clone(), 2.0),
        f(5, 4),
    ),
    **{
        f"pdist {p}": layer("_pdist_forward _pdist_backward", lambda a, p=p: F.pdist(a, p), f(6, 4))
        for p in (1.0, 2.0, 3.0, float("inf"))
    },
    "bag sums": bags("sum"),
    "bag means": bags("mean", padding_idx=2),
    "bag maxima": bags("max", padding_idx=2),
    "bags with a last offset": bags("mean", include_last_offset=True),
    "bags with weights": layer(
        "_embedding_bag _embedding_bag_per_sample_weights_backward",
        lambda w, i, o, s: F.embedding_bag(
            i, w, o, mode="sum", per_sample_weights=s, padding_idx=3
        ),
        TABLE_OF_ROWS,
        BAG,
        OFFSETS,
        f(9),
    ),
    "ctc": layer(CTC, ctc(), f(9, 3, 6), index(3, 5, high=5) + 1, *LENGTHS),
    "ctc of equal labels": layer(
        CTC, ctc(True), f(9, 3, 6), torch.ones(3, 5, dtype=torch.int64), *LENGTHS
    ),
    "ctc of joined targets": layer(CTC, ctc(), f(9, 3, 6), index(6, high=5) + 1, *LENGTHS),
    "ctc of one sequence": layer(
        CTC, ctc(), f(9, 6), index(4, high=5) + 1, torch.tensor(9), torch.tensor(4)
    ),
    "ctc, impossible": layer(
        CTC,
        ctc(True),
        f(3, 2, 6),
        torch.ones(2, 3, dtype=torch.int64),
        torch.tensor([3, 3]),
        torch.tensor([3, 1]),
    ),
}
LAYERS = {**CONVOLUTIONS, **POOLING, **NORMS, **OTHERS}
# Not called by torch.nn.functional with tensors that need gradients; each has a test of its own.
DIRECT = {
    aten._ctc_loss.default,
    aten._ctc_loss_backward.default,
    aten._embedding_bag_forward_only.default,
    aten._embedding_bag_dense_backward.default,
}
