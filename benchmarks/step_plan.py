"""What both spellings of the benchmarked step share: how tensors lie, and AdamW's constants."""

from __future__ import annotations

__all__ = ["ACTIVATIONS", "AXES", "BETAS", "CLIP", "DECAY", "EPS", "RATE", "axes_of"]

AXES = ("dp", "tp")
RATE, DECAY, EPS, CLIP = 1e-3, 0.1, 1e-8, 1.0
BETAS = (0.9, 0.95)

# Tensor parallel, and the other dim of each matrix over dp (FSDP).
_COLUMNS = ("wq", "wk", "wv", "w1", "w3", "output", "tok_embeddings")
_ROWS = ("wo", "w2")
ACTIVATIONS: dict[str, tuple[str | None, ...]] = {
    "residual": ("dp", None, None),
    "logits": ("dp", None, "tp"),
    "batch": ("dp", None),
}


def axes_of(name: str) -> tuple[str | None, ...]:
    """Returns the mesh axis of each dim of a parameter; () for one that is replicated.

    Args:
        name: As in the model's state_dict.
    """
    leaf = name.removesuffix(".weight").rpartition(".")[2]
    if leaf in _COLUMNS:
        return ("tp", "dp")
    return ("dp", "tp") if leaf in _ROWS else ()
