"""xla_distribute_tensor and xla_distribute_module: torch_xla's names for the DTensor functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from xla_dtensor.api import distribute_module, distribute_tensor, refuse_auto_policy
from xla_dtensor.spmd.sharded_tensor import XLAShardedTensor, wrap_as_sharded_tensor

__all__ = ["auto_policy", "xla_distribute_module", "xla_distribute_tensor"]


def xla_distribute_tensor(
    tensor: torch.Tensor, device_mesh: Any, placements: Sequence[Any] | None = None
) -> XLAShardedTensor:
    """Put a tensor on the mesh; :func:`xla_dtensor.distribute_tensor`, whose arguments it takes.

    Returns:
        An XLAShardedTensor. `tensor` stays as it is.

    Raises:
        DistributeError: Wrong mesh or placements.
    """
    return wrap_as_sharded_tensor(distribute_tensor(tensor, device_mesh, placements))


def xla_distribute_module(
    module: nn.Module,
    device_mesh: Any = None,
    partition_fn: Callable[[str, nn.Module, Any], None] | None = None,
    input_fn: Callable[..., Any] | None = None,
    output_fn: Callable[..., Any] | None = None,
) -> nn.Module:
    """Put a module's parameters on the mesh; :func:`xla_dtensor.distribute_module`.

    Raises:
        UnsupportedOpError: `partition_fn` is :func:`auto_policy`.
    """
    return distribute_module(module, device_mesh, partition_fn, input_fn, output_fn)


def auto_policy(mod_name: str, mod: nn.Module, mesh: Any) -> None:
    """Refused: see the message."""
    refuse_auto_policy()
