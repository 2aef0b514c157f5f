"""The sizes that `benchmarks.step` runs its models with."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.llama_model import Sizes
from benchmarks.mixtral_model import MixtralSizes
from benchmarks.resnet_model import ResNetSizes
from benchmarks.vit_model import ViTSizes

__all__ = ["KINDS", "AnySizes", "sizes_of"]

AnySizes = Sizes | ViTSizes | ResNetSizes  # MixtralSizes are Sizes.

# small: for tests. cpu: what one processor does in a fraction of a second. pod: compiled for a TPU
# topology; every mesh of up to 16 x 16 divides it.
# tpu: short enough that nobody leaves the scores out. gpu: long enough that everybody does.
_LLAMA = {
    "small": Sizes(64, 32, 4, 4, 64, 1, 4, 16),
    "cpu": Sizes(1024, 256, 8, 4, 768, 4, 8, 128),
    "pod": Sizes(1024, 256, 16, 16, 768, 2, 32, 128),
    "tpu": Sizes(32768, 2048, 16, 8, 5632, 8, 16, 512),
    "gpu": Sizes(32768, 2048, 16, 8, 5632, 8, 4, 2048),
}
_VIT = {
    "small": ViTSizes(16, 4, 3, 32, 4, 64, 1, 16, 4),
    "cpu": ViTSizes(64, 8, 3, 256, 8, 1024, 4, 256, 16),
    "pod": ViTSizes(64, 8, 3, 256, 16, 1024, 2, 256, 32),
    "tpu": ViTSizes(224, 14, 3, 1024, 16, 4096, 12, 1024, 64),
    "gpu": ViTSizes(224, 14, 3, 1024, 16, 4096, 12, 1024, 64),
}
_MIXTRAL = {
    "small": MixtralSizes(64, 32, 4, 4, 64, 1, 4, 16),
    "cpu": MixtralSizes(1024, 256, 8, 4, 512, 2, 8, 128),
    "pod": MixtralSizes(1024, 256, 16, 16, 512, 2, 32, 128),
    "tpu": MixtralSizes(32768, 2048, 16, 8, 2816, 4, 16, 512),
    "gpu": MixtralSizes(32768, 2048, 16, 8, 2816, 4, 4, 2048),
}
_RESNET = {
    "small": ResNetSizes(8, 3, (8, 16), 1, 16, 8),
    "cpu": ResNetSizes(32, 3, (32, 64, 128), 2, 256, 32),
    "pod": ResNetSizes(32, 3, (64, 128, 256), 2, 256, 32),
    "tpu": ResNetSizes(64, 3, (128, 256, 512, 1024), 2, 1024, 128),
    "gpu": ResNetSizes(64, 3, (128, 256, 512, 1024), 2, 1024, 128),
}
_SIZES: dict[str, Mapping[str, AnySizes]] = {
    "llama": _LLAMA,
    "vit": _VIT,
    "mixtral": _MIXTRAL,
    "resnet": _RESNET,
}
KINDS = tuple(_LLAMA)


def sizes_of(model: str, kind: str) -> AnySizes:
    """Returns sizes.

    Args:
        model: One of ``benchmarks.step_plan.MODELS``.
        kind: One of `KINDS`.

    Example:
        >>> sizes_of("llama", "cpu").batch
        8
    """
    return _SIZES[model][kind]
