"""What all spellings of the benchmarked step share: names, how tensors lie, AdamW's constants."""

from __future__ import annotations

__all__ = [
    "ACTIVATIONS",
    "AXES",
    "BETAS",
    "BY_HAND",
    "CLIP",
    "DECAY",
    "EPS",
    "MARKED",
    "MODELS",
    "ONLY_ON_JAX",
    "OURS",
    "OURS_ON_TORCH_XLA",
    "RATE",
    "TORCHAX",
    "TORCH_COMPILE",
    "axes_of",
]

MODELS = ("llama", "vit", "mixtral", "resnet")
# Run by xla_dtensor on JAX and by hand in JAX. Elsewhere they would need more than their models:
# torchax's step threads no buffers, and on torch_xla and for pods their steps were not tried.
ONLY_ON_JAX = ("mixtral", "resnet")
# The ways to run a step, as tables and plots name them.
OURS, OURS_ON_TORCH_XLA = "xla_dtensor on JAX", "xla_dtensor on torch_xla"
BY_HAND, MARKED = "JAX by hand", "torch_xla, mark_sharding"
TORCHAX = "torchax, jax_jit"
TORCH_COMPILE = "torch.compile, flash attention"

AXES = ("dp", "tp")
RATE, DECAY, EPS, CLIP = 1e-3, 0.1, 1e-8, 1.0
BETAS = (0.9, 0.95)

# Tensor parallel, and the other dim of each matrix over dp (FSDP).
_COLUMNS = ("wq", "wk", "wv", "w1", "w3", "output", "tok_embeddings")
_ROWS = ("wo", "w2")
# Of a convolution, [channels after, channels before, height, width], in pairs like w1 and w2.
_CONVOLUTIONS = {"conv1": ("tp", "dp", None, None), "conv2": ("dp", "tp", None, None)}
ACTIVATIONS: dict[str, tuple[str | None, ...]] = {
    "residual": ("dp", None, None),
    "logits": ("dp", None, "tp"),
    "features": ("dp", None, None, None),
    "classes": ("dp", "tp"),
}


def axes_of(name: str) -> tuple[str | None, ...]:
    """Returns the mesh axis of each dim of a parameter; () for one that is replicated.

    Args:
        name: As in the model's state_dict.

    Example:
        >>> axes_of("layers.0.attention.wq.weight"), axes_of("layers.0.attention.wq.bias")
        (('tp', 'dp'), ('tp',))
    """
    module, _, kind = name.rpartition(".")
    leaf = module.rpartition(".")[2]
    if leaf in _CONVOLUTIONS:
        return _CONVOLUTIONS[leaf]
    if leaf in _COLUMNS:
        return ("tp", "dp") if kind == "weight" else ("tp",)
    return ("dp", "tp") if leaf in _ROWS and kind == "weight" else ()
