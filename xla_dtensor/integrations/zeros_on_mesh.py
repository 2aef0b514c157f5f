"""``torch.zeros`` on a mesh, for code that writes what the mesh computes to what it has made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import Placement, Replicate
from torch.overrides import TorchFunctionMode

import xla_dtensor as xd
from xla_dtensor.dtensor.mesh import DeviceMesh

__all__ = ["ZerosOnMesh"]


class ZerosOnMesh(TorchFunctionMode):
    """In its block ``torch.zeros(shape)`` of floating point lies on a mesh.

    A plain tensor cannot take what a program computes: its values exist only when that runs.

    Args:
        mesh: The mesh.
        lies: The placements of a shape; None: whole on each device.
    """

    def __init__(
        self, mesh: DeviceMesh, lies: Callable[[Sequence[int]], list[Placement]] | None = None
    ) -> None:
        super().__init__()
        self._mesh = mesh
        self._lies = lies or (lambda shape: [Replicate()] * mesh.ndim)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is not torch.zeros:
            return func(*args, **kwargs)
        like = func(*args, **{**kwargs, "device": "meta"})
        if (
            not like.is_floating_point()
            or torch.device(kwargs.get("device") or "cpu") == like.device
        ):
            return func(*args, **kwargs)
        placements = self._lies(like.shape)
        return xd.zeros(like.shape, dtype=like.dtype, device_mesh=self._mesh, placements=placements)
