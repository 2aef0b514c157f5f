"""Runtimes: how a global tensor, its sharding and its ops reach XLA.

``base`` holds the interface, ``registry`` finds and starts a runtime by name. The two runtimes
themselves (``runtime``, ``runtime``) are imported only when they are started: this
package is the only place in the library where jax or torch_xla may be imported.
"""

from xla_dtensor.runtimes.base import (
    AddressableShard,
    CompiledStep,
    Difference,
    Runtime,
    Verification,
)
from xla_dtensor.runtimes.registry import current_runtime, get_runtime, installed_runtimes

__all__ = [
    "AddressableShard",
    "CompiledStep",
    "Difference",
    "Runtime",
    "Verification",
    "current_runtime",
    "get_runtime",
    "installed_runtimes",
]
