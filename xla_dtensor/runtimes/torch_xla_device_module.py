"""``torch.xla``: what torch looks up by a device's name, and torch_xla 2.9 does not provide.

``torch.utils.checkpoint`` needs it, first to run at all, then to repeat the random numbers of the
forward pass: without the functions here it would recompute another dropout, and gradients would be
wrong in silence.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch

from xla_dtensor.runtimes.torch_xla_sharding import xlac

__all__ = ["register_device_module"]


def register_device_module() -> None:
    """Make ``torch.xla``; calling it again, or after another package made it, does nothing."""
    if hasattr(torch, "xla"):
        return
    module = ModuleType("torch.xla", __doc__)
    functions = (current_device, device, device_count, get_rng_state, is_available, set_rng_state)
    module.__dict__.update({function.__name__: function for function in functions})
    module.__dict__["_initialized"] = True
    torch._register_device_module("xla", module)


def is_available() -> bool:
    """Tell that there are devices."""
    return True


def device_count() -> int:
    """Return the number of devices that torch sees: one, over which XLA spreads programs."""
    return 1


def current_device() -> int:
    """Return the one device's number."""
    return 0


@contextlib.contextmanager
def device(_: Any) -> Iterator[None]:
    """Do nothing: there is one device."""
    yield


def get_rng_state(_: Any = None) -> torch.Tensor:
    """Return the state of the devices' random number generator."""
    seed = xlac()._xla_get_rng_seed("")
    # An unsigned number, in a tensor of signed ones.
    return torch.tensor(seed - 2**64 if seed >= 2**63 else seed)


def set_rng_state(state: torch.Tensor, _: Any = None) -> None:
    """Put the devices' random number generator into a state that `get_rng_state` returned."""
    xlac()._xla_set_rng_seed(int(state) % 2**64, "")
