"""A DTensor with values, made like one on the meta device: what module.to_empty() asks for.

A model too large for one host is built on the meta device, its parameters are distributed there,
and then get their memory, shard by shard::

    with torch.device("meta"):
        model = Model()
    distribute_module(model, mesh, partition_fn)      shapes and placements, no values
    model.to_empty(device="xla")                      memory on the mesh, nothing on the host
    load_or_initialize(model)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from xla_dtensor.off_mesh import is_off_mesh
from xla_dtensor.runtimes import functional_ops
from xla_dtensor.runtimes.registry import get_runtime

__all__ = ["made_of_meta"]

aten = torch.ops.aten
_FILLS = {
    aten.zeros_like.default: 0,
    aten.ones_like.default: 1,
    aten.empty_like.default: 0,
    aten.rand_like.default: "uniform",
    aten.randn_like.default: "normal",
}


def made_of_meta(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
    """Make a payload like a DTensor on the meta device, where one is asked for.

    Args:
        func: An ``OpOverload`` such as ``aten.empty_like.default``.
        args: Its arguments, the DTensor first.
        kwargs: Its keyword arguments. Any device but meta stands for the devices of the mesh.

    Returns:
        The payload, lying as the DTensor does; None where the result has no values either.
    """
    like, device = args[0], kwargs.get("device")
    if device is None or torch.device(device).type == "meta" or is_off_mesh(like._spec.mesh):
        return None
    if not like._local_tensor.is_meta or functional_ops.is_traced(like._local_tensor):
        return None
    fill = args[1] if func is aten.full_like.default else _FILLS[func]
    dtype = kwargs.get("dtype") or like.dtype
    return get_runtime().make(fill, tuple(like.shape), dtype, like._spec.layout)
