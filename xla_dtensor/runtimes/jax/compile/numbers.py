"""Traced numbers beside ordinary CPU tensors.

Where Python writes ``number * tensor``, torch makes a tensor of the number. Of a number that exists
only in the program (a SymFloat) it makes a NaN, whatever follows is NaN, and nobody hears of it.
While a step is traced, :class:`NumbersMeetTensors` computes such ops in the program instead::

    step = torch.ones(())        # a counter that a capturable optimizer has just made
    lr / (1 - beta**step)        # lr is a traced number: the quotient is the program's
"""

from __future__ import annotations

from typing import Any

import torch

from xla_dtensor.core.errors import CompileError
from xla_dtensor.runtimes.host_work.mode import HostOps
from xla_dtensor.runtimes.host_work.tape import HostTape
from xla_dtensor.runtimes.jax.eager.scalar import ScalarNode

__all__ = ["NumbersMeetTensors"]


class NumbersMeetTensors(HostOps):
    """Send ops of ordinary tensors and traced numbers to the program; others are the host's."""

    def on_host(self, tape: HostTape, func: Any, args: Any, kwargs: Any) -> Any:
        if not any(map(_is_traced, (*args, *kwargs.values()))):
            return tape.call(func, args, kwargs)
        from xla_dtensor.runtimes.jax.eager.ops import run_op

        if func._schema.is_mutable:
            raise CompileError(
                f"The op {func} writes a number that exists only in the program to an ordinary CPU "
                "tensor, while a step is traced. The tensor would keep the value of this one "
                "trace. Make it with distribute_tensor, or write the op without '_' at the end."
            )
        return run_op(func, args, kwargs)


def _is_traced(value: Any) -> bool:
    return isinstance(value, torch.SymFloat | torch.SymInt) and isinstance(value.node, ScalarNode)
