"""The states of random number generators in a checkpoint: torch's on the CPU, and the devices'."""

from __future__ import annotations

import logging
from typing import Any

import torch

from xla_dtensor.runtimes.registry import current_runtime

__all__ = ["GENERATORS", "Generators"]

GENERATORS = "rng"  # their name in a checkpoint
logger = logging.getLogger("xla_dtensor")


class Generators:
    """The generators of this process, as an object with a state.

    Example:
        >>> saved = Generators().state_dict()
        >>> first = torch.rand(3)
        >>> Generators().load_state_dict(saved)
        >>> torch.equal(torch.rand(3), first)
        True
    """

    def state_dict(self) -> dict[str, Any]:
        """Return the states. That of the devices is there once a runtime has started."""
        state: dict[str, Any] = {"torch": torch.get_rng_state()}
        runtime = current_runtime()
        if runtime is not None:
            state |= {"devices": runtime.get_rng_state().cpu(), "runtime": runtime.name}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on as those whose states are given would have."""
        torch.set_rng_state(state["torch"])
        runtime = current_runtime()
        if runtime is None or "devices" not in state:
            return
        if runtime.name != state["runtime"]:
            logger.warning(
                "the devices' random state was saved on %s and is not loaded on %s",
                state["runtime"],
                runtime.name,
            )
            return
        runtime.set_rng_state(state["devices"])
