"""``torch.manual_seed`` reaches the runtime's devices.

torch seeds the devices that it knows, and whatever sits under the name of the backend that it
leaves free ("PrivateUse1"): if ``torch.<that name>`` has ``manual_seed_all``, it is called. The
JAX runtime has no device of its own in torch, torch_xla's is not among those that torch seeds; the
module registered here is how both hear of it. Nothing of torch is replaced, and there is no such
device: the module says so.

The call comes with every ``torch.manual_seed``, also with the seed that was set before. A look at
``torch.initial_seed()`` would miss that.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from types import ModuleType

import torch

__all__ = ["follow_torch_seed"]

logger = logging.getLogger("xla_dtensor")
_MODULE = "xla_dtensor's ear for torch.manual_seed"


def follow_torch_seed(seed: Callable[[int], None]) -> bool:
    """Call `seed` whenever torch's generators are seeded.

    Args:
        seed: Seeds the runtime's generator; given what ``torch.manual_seed`` was given.

    Returns:
        Whether torch will call it: not when another package holds the name of the free backend.
    """
    name = torch._C._get_privateuse1_backend_name()
    present = getattr(torch, name, None)
    if present is not None and present.__doc__ != _MODULE:
        logger.warning(
            "torch.manual_seed does not reach xla_dtensor's devices, because torch.%s is another "
            "package's. Call xla_dtensor.manual_seed(seed, mesh) as well.",
            name,
        )
        return False
    module = ModuleType(f"torch.{name}", _MODULE) if present is None else present
    process = os.getpid()
    module.__dict__.update(
        # A data loader's worker seeds torch, too. It is a fork, in which no runtime may be used.
        _is_in_bad_fork=lambda: os.getpid() != process,
        manual_seed_all=seed,
        is_available=lambda: False,
        is_initialized=lambda: False,
        device_count=lambda: 0,
    )
    if present is None:
        torch._register_device_module(name, module)
    return True
