"""Names for values on the JAX runtime, by which a policy knows them (``jax.checkpoint``)."""

from __future__ import annotations

from jax.ad_checkpoint import checkpoint_name

from xla_dtensor.runtimes.jax_convert import x64
from xla_dtensor.runtimes.jax_tensor import JaxTensor, Storage

__all__ = ["named"]


def named(tensor: JaxTensor, name: str) -> JaxTensor:
    """Return a tensor of the same values that has a name."""
    with x64():
        made = Storage(checkpoint_name(tensor.value(), name))
    return JaxTensor(made, shape=tuple(tensor.shape), stride=tensor.stride(), dtype=tensor.dtype)
