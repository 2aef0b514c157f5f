"""What an optimizer keeps between steps, per parameter, without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mesh_utils.errors import JobError
from xla_dtensor.core.dtypes import itemsize_bytes

__all__ = ["ADAMW", "OPTIMIZERS", "OptimizerState", "optimizer_state"]


@dataclass(frozen=True)
class OptimizerState:
    """Arrays of the parameter's shape, sharded like it, and counters.

    Args:
        name: What it is called.
        moments: The dtype of each array that it keeps per parameter; "" is the parameter's own.
        counters: The dtype of each single number that it keeps per parameter, on every device.

    Example:
        >>> ADAMW.per_element_bytes("bf16"), ADAMW.counter_bytes
        (8, 4)
    """

    name: str
    moments: tuple[str, ...] = ()
    counters: tuple[str, ...] = ()

    def per_element_bytes(self, dtype: str) -> int:
        """Bytes of state for each element of a parameter.

        Args:
            dtype: The parameter's.
        """
        return sum(itemsize_bytes(moment or dtype) for moment in self.moments)

    @property
    def counter_bytes(self) -> int:
        """Bytes of the single numbers of one parameter."""
        return sum(map(itemsize_bytes, self.counters))

    @property
    def arrays_per_parameter(self) -> int:
        """Arrays and numbers per parameter."""
        return len(self.moments) + len(self.counters)


ADAMW = OptimizerState("AdamW", ("float32", "float32"), ("float32",))
"""AdamW with float32 moments, and a float32 counter of steps per parameter, as torch keeps it."""

OPTIMIZERS: Mapping[str, OptimizerState] = {
    "adamw": ADAMW,
    "adamw-bf16": OptimizerState("AdamW", ("bfloat16", "bfloat16"), ("float32",)),
    "adamw-master": OptimizerState("AdamW, float32 weights", ("float32",) * 3, ("float32",)),
    "sgd": OptimizerState("SGD"),
    "sgd-momentum": OptimizerState("SGD with momentum", ("",)),
}


def optimizer_state(name: str) -> OptimizerState:
    """Look an optimizer up.

    Args:
        name: One of `OPTIMIZERS`.

    Returns:
        What it keeps.

    Raises:
        JobError: There is none of that name.
    """
    if name not in OPTIMIZERS:
        raise JobError(
            f"The optimizer {name!r} was asked for. What it keeps is not known here. "
            f"Pass one of {', '.join(OPTIMIZERS)}."
        )
    return OPTIMIZERS[name]
