"""Seeds that show each class of differences, by its name; any one of them has to."""

from __future__ import annotations

__all__ = ["EXAMPLES"]

EXAMPLES: dict[str, tuple[int, ...]] = {
    "a plain tensor beside a DTensor": (3, 12),
    "an op without a rule": (8, 9),
    "a reduction over an empty shard": (4,),
    "placements that PyTorch refuses": (7, 8, 16),
    "a label with a mask or a norm pending": (3, 7, 24),
    "a strided label that no tiling has": (7, 23),
    "the label of a matmul": (20,),
    "a label after one that differs": (6, 74),
    "the label of a gradient": (82,),
    "the gradient of a max or mean of parts": (131, 137, 146),
    "a mean over uneven shards": (85, 193),
    "the gradient of mse_loss": (18, 62, 423),
    "a write of a sharded tensor into a replicated one": (143, 342),
    "a number added to a pending sum": (541,),
    "the placements of argmax": (159, 352),
}
