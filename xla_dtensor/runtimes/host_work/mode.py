"""The dispatch modes under which ops on plain tensors reach a tape."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from xla_dtensor.core.errors import ScanError
from xla_dtensor.runtimes.host_work.tape import DRAWS, HostTape

__all__ = ["HostOps", "LoopOps"]

_PLAIN = (torch.Tensor, torch.nn.Parameter)


class HostOps(TorchDispatchMode):
    """Hand ops on plain tensors to a tape; others go on.

    Args:
        tape: The tape; None where nothing is written down.
    """

    def __init__(self, tape: HostTape | None) -> None:
        super().__init__()
        self._tape = tape

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let torch.compile work under this mode: it gives way to other modes."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._tape is None or any(kind not in _PLAIN for kind in types):
            return func(*args, **kwargs)
        return self.on_host(self._tape, func, args, kwargs)

    def on_host(self, tape: HostTape, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an op on plain tensors."""
        return tape.call(func, args, kwargs)


class LoopOps(HostOps):
    """The same in the block of a loop, whose Python runs once, whatever the number of turns."""

    def on_host(self, tape: HostTape, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an op on plain tensors, unless it would have to run in each turn."""
        if DRAWS in getattr(func, "tags", ()):
            _refuse(f"drew random numbers on the host with {func}", "be the same in all of them")
        if tape.writes_to_older(func, args, kwargs):
            _refuse(f"wrote to a host tensor with {func}", "happen once")
        return super().on_host(tape, func, args, kwargs)


def _refuse(what: str, fate: str) -> None:
    raise ScanError(
        f"A block of scan_layers {what}. Its layers run as one loop, whose Python runs once, and "
        f"that would {fate}. Use a tensor on the mesh, torch.rand_like(x) for instance, or call "
        "the layers one by one."
    )
