"""Calls that resize, pad and sample images, and all calls of layers together."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from tests.xla_dtensor.runtimes import layer_cases
from tests.xla_dtensor.runtimes.layer_cases import DIRECT, IMAGE, LINE, VOLUME, Layer, both, layer
from tests.xla_dtensor.runtimes.lowering_cases import draw_anew, f

draw_anew()


def resizing(name: str, x: torch.Tensor, **options: Any) -> Layer:
    return layer(both(name), lambda x: F.interpolate(x, **options), x)


SMALL = f(2, 4, 5, 6)
RESIZING = {
    "nearest 1d": resizing("upsample_nearest1d", LINE, size=17),
    "nearest 2d": resizing("upsample_nearest2d", IMAGE, scale_factor=(2, 0.6)),
    "nearest 3d": resizing("upsample_nearest3d", VOLUME, size=(7, 3, 8)),
    "exact 1d": resizing("_upsample_nearest_exact1d", LINE, size=7, mode="nearest-exact"),
    "exact 2d": resizing(
        "_upsample_nearest_exact2d", IMAGE, scale_factor=1.7, mode="nearest-exact"
    ),
    "exact 3d": resizing("_upsample_nearest_exact3d", VOLUME, size=4, mode="nearest-exact"),
    "linear": resizing("upsample_linear1d", LINE, scale_factor=2.3, mode="linear"),
    "bilinear": resizing("upsample_bilinear2d", IMAGE, size=(13, 5), mode="bilinear"),
    "bilinear corners": resizing(
        "upsample_bilinear2d", IMAGE, size=(13, 1), mode="bilinear", align_corners=True
    ),
    "bilinear factor": resizing(
        "upsample_bilinear2d",
        IMAGE,
        scale_factor=1.3,
        mode="bilinear",
        recompute_scale_factor=False,
    ),
    "trilinear": resizing("upsample_trilinear3d", VOLUME, size=(9, 3, 7), mode="trilinear"),
    "bicubic": resizing("upsample_bicubic2d", IMAGE, size=(15, 6), mode="bicubic"),
    "bicubic corners": resizing(
        "upsample_bicubic2d", IMAGE, scale_factor=1.5, mode="bicubic", align_corners=True
    ),
    "bilinear antialias": resizing(
        "_upsample_bilinear2d_aa", IMAGE, size=(4, 13), mode="bilinear", antialias=True
    ),
    "bicubic antialias": resizing(
        "_upsample_bicubic2d_aa", IMAGE, size=(4, 13), mode="bicubic", antialias=True
    ),
    "antialias corners": resizing(
        "_upsample_bilinear2d_aa",
        IMAGE,
        size=(5, 4),
        mode="bilinear",
        antialias=True,
        align_corners=True,
    ),
    "area": resizing("_adaptive_avg_pool2d", IMAGE, size=(4, 7), mode="area"),
    "replicate 1d": layer(
        "replication_pad1d_backward", lambda x: F.pad(x, (2, 3), "replicate"), LINE
    ),
    "replicate 2d": layer(
        "replication_pad2d_backward", lambda x: F.pad(x, (2, -1, 0, 3), "replicate"), IMAGE
    ),
    "replicate 3d": layer(
        "replication_pad3d_backward", lambda x: F.pad(x, (1, 2, 3, 0, 0, 1), "replicate"), VOLUME
    ),
}


def sampling(mode: str, padding: str, align: bool, x: torch.Tensor) -> Layer:
    ndim = x.ndim - 2
    grid = f(x.shape[0], *(3, 5, 4)[:ndim], ndim, low=-1.6, high=1.6)
    return layer(
        both(f"grid_sampler_{ndim}d"),
        lambda x, g: F.grid_sample(x, g, mode, padding, align),
        x,
        grid,
    )


GRIDS = {
    f"{mode} {padding} {align} {x.ndim}": sampling(mode, padding, align, x)
    for x, modes in (
        (SMALL, ("bilinear", "nearest", "bicubic")),
        (VOLUME, ("bilinear", "nearest")),
    )
    for mode, padding, align in zip(
        modes, ("zeros", "border", "reflection"), (False, True, False), strict=False
    )
} | {
    "bilinear reflection": sampling("bilinear", "reflection", True, SMALL),
    "bilinear border": sampling("bilinear", "border", False, SMALL),
    "bicubic border": sampling("bicubic", "border", True, SMALL),
    "identity": layer(
        both("grid_sampler_2d"),
        lambda x, theta: F.grid_sample(
            x, F.affine_grid(theta, [2, 4, 5, 6], align_corners=True), align_corners=True
        ),
        SMALL,
        torch.eye(2, 3).repeat(2, 1, 1) * 0.9,
    ),
}
LAYERS = {**layer_cases.LAYERS, **RESIZING, **GRIDS}
# Every lowering that one of the calls has to reach.
ALL = {op for case in LAYERS.values() for op in case.lowerings()} | DIRECT
