"""Guards beside premises: both are asked on each call, and where they differ is written down.

``XLA_DTENSOR_GUARDS=shadow`` lets each trace record what the step reads. What premises say still
decides; a call on which only one of the two breaks is a line of the logger ``xla_dtensor.guards``.
``XLA_DTENSOR_GUARDS=shadow:FILE`` writes the lines into a file as well.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

from xla_dtensor.core.errors import ArgumentTypeError
from xla_dtensor.runtimes.premises.guards.comparing import Guards
from xla_dtensor.runtimes.premises.guards.recording import Recording
from xla_dtensor.runtimes.premises.values import Change, Moving

__all__ = ["Shadow"]

_VARIABLE = "XLA_DTENSOR_GUARDS"
_logger = logging.getLogger("xla_dtensor.guards")


class Shadow:
    """The guards of one trace, where the environment asks for them.

    Args:
        step: The step.
        arguments: What it is called with.

    Raises:
        ArgumentTypeError: The environment asks for something else.
    """

    def __init__(self, step: Any, arguments: Iterable[Any]) -> None:
        asked, _, self._file = os.environ.get(_VARIABLE, "").partition(":")
        if asked not in ("", "shadow"):
            raise ArgumentTypeError(
                f"{_VARIABLE}={asked!r} is not known. It lets guards run beside premises. Set it "
                "to 'shadow', to 'shadow:FILE', or to nothing."
            )
        self._recording = Recording(step, arguments) if asked else None
        self._guards: Guards | None = None
        self._name = getattr(step, "__qualname__", type(step).__name__)

    def watching(self) -> AbstractContextManager[Any]:
        """Return the block in which the step runs."""
        return self._recording or nullcontext()

    def settle(
        self,
        reads: Callable[[Any], bool],
        instead: Mapping[int, Moving | torch.Tensor],
    ) -> None:
        """End the trace."""
        if self._recording is not None:
            self._guards = self._recording.guards()
            # A Moving is told which tensor is there, by premises and not by these.
            own = {key: _copied(value) for key, value in instead.items()}
            self._guards.settle(reads, own)
            self._recording = None

    def compare(self, change: Change | None) -> None:
        """Write down where the guards differ from what premises say."""
        if self._guards is None:
            return
        seen = self._guards.broken()
        if (seen is None) != (change is None):
            text = f"{self._name}: premises: {_why(change)}; guards: {_why(seen)}"
            _logger.info(text)
            if self._file:
                with Path(self._file).open("a", encoding="utf-8") as file:
                    file.write(text.replace("\n", " ") + "\n")


def _copied(value: Moving | torch.Tensor) -> Moving | torch.Tensor:
    return Moving(value.tensor, value.fits) if isinstance(value, Moving) else value


def _why(change: Change | None) -> str:
    return "hold" if change is None else change.why
