"""install(): torch.distributed.tensor's own functions, for "xla" meshes, lead here.

Code that imports ``torch.distributed.tensor`` and calls ``parallelize_module``, ``local_map`` or
``distribute_tensor`` then runs unchanged. Stock torch sends an "xla" mesh to torch_xla, or leaves
it half built. What is replaced, by functions that look at the mesh and call torch's original for
any other device type:

======================================  ============================================
torch.distributed.tensor                distribute_tensor, distribute_module, ones,
                                        zeros, empty, full, rand, randn
torch.distributed.tensor.DTensor        from_local
torch.distributed.tensor._random        manual_seed, is_rng_supported_mesh
torch.distributed.tensor.parallel       loss_parallel
torch.distributed.fsdp                  fully_shard
torch.distributed._state_dict_utils     what StateDictOptions(full_state_dict=True) asks for
                                        (see :mod:`xla_dtensor.state_dicts`)
torch.distributed                       init_device_mesh; get_rank, get_world_size (of a
                                        mesh axis, see :mod:`xla_dtensor.axis_groups`)
torch.distributed._functional_          the collectives, for LocalViews (see
collectives                             :mod:`xla_dtensor.functional_collectives`)
======================================  ============================================

A module that imported one of these by name has its name replaced too. cpu and cuda meshes are not
touched. Calling install() again does nothing; ``uninstall()`` puts everything back.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import logging
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as torch_collectives
import torch.distributed.device_mesh as torch_device_mesh
import torch.distributed.fsdp as torch_fsdp
import torch.distributed.tensor as torch_tensor
import torch.distributed.tensor._api as torch_api
import torch.distributed.tensor._random as torch_random
import torch.distributed.tensor.parallel as torch_parallel

from mesh_utils import Mesh
from xla_dtensor import api, axis_groups, factories, functional_collectives, rng, state_dicts
from xla_dtensor.axis_groups import AxisGroup, allow_groups
from xla_dtensor.device_mesh import init_device_mesh
from xla_dtensor.dtensor import DTensor
from xla_dtensor.fsdp_module import fully_shard
from xla_dtensor.local_view import LocalView
from xla_dtensor.modes import loss_parallel

__all__ = ["install", "is_installed", "uninstall"]

logger = logging.getLogger("xla_dtensor")
_replaced: dict[Any, Any] = {}  # torch's function -> ours
torch_from_local = torch_tensor.DTensor.from_local
_DYNAMO_TORCHS = "torch.distributed.tensor._api.DTensor#from_local"
_DYNAMO_OURS = f"{__name__}.torch_from_local"
_FACTORIES = ("ones", "zeros", "empty", "full", "rand", "randn")


def install() -> None:
    """Let torch.distributed.tensor's functions work on "xla" meshes.

    Example:
        >>> import torch, xla_dtensor as xd
        >>> from torch.distributed.tensor import Shard, distribute_tensor
        >>> xd.install()
        >>> mesh = xd.init_device_mesh("xla", (8,))
        >>> distribute_tensor(torch.ones(8, 2), mesh, [Shard(0)])
        DTensor(shape=(8, 2), dtype=float32, placements=(S(0)), mesh=(0=8), local_shape=(1, 2))
        >>> xd.uninstall()
    """
    if _replaced:
        return
    for name in ("distribute_tensor", "distribute_module"):
        _replace(getattr(torch_api, name), getattr(api, name))
    for name in _FACTORIES:
        _replace(getattr(torch_tensor, name), getattr(factories, name))
    original = torch_tensor.DTensor.from_local
    _replaced[original] = _routed(original, DTensor.from_local)
    torch_tensor.DTensor.from_local = staticmethod(_replaced[original])  # pyright: ignore
    _move_dynamo_rule(_DYNAMO_TORCHS, _DYNAMO_OURS)
    _replace(torch_device_mesh.init_device_mesh, init_device_mesh)
    for name in ("manual_seed", "is_rng_supported_mesh"):
        _replace(getattr(torch_random, name), getattr(rng, name))
    _replace(torch_fsdp.fully_shard, fully_shard)
    _put(torch_parallel.loss_parallel, _both(torch_parallel.loss_parallel, loss_parallel))
    for original, ours in state_dicts.replacements():
        _put(original, ours)
    for name, ours in functional_collectives.BY_NAME.items():
        original = getattr(torch_collectives, name)
        _put(original, _routed_by_first(LocalView, original, ours))
    for name, ours in axis_groups.BY_NAME.items():
        original = getattr(dist, name)
        _put(original, _routed_by_first(AxisGroup, original, ours))
    allow_groups(True)
    logger.info("torch.distributed.tensor works on 'xla' meshes through xla_dtensor now.")


def uninstall() -> None:
    """Put torch's own functions back."""
    if not _replaced:
        return
    for original, ours in _replaced.items():
        _rebind(ours, original)
    from_local = next(f for f in _replaced if f.__qualname__ == "DTensor.from_local")
    torch_tensor.DTensor.from_local = staticmethod(from_local)  # pyright: ignore
    _move_dynamo_rule(_DYNAMO_OURS, _DYNAMO_TORCHS)
    _replaced.clear()
    allow_groups(False)
    logger.info("torch.distributed.tensor is as torch made it again.")


def is_installed() -> bool:
    """Tell whether :func:`install` is in force."""
    return bool(_replaced)


def _move_dynamo_rule(old: str, new: str) -> None:
    """Let Dynamo's rule for DTensor.from_local be that of torch's own, wherever that is.

    Dynamo does not read from_local, but puts a call of it into its graph as it is. It looks for it
    by name, and again whenever a process group is made: it would find the function that leads to
    ours, which has to be read.
    """
    rules: Any = importlib.import_module("torch._dynamo.trace_rules")
    names: dict[str, Any] = rules.manual_torch_name_rule_map
    if old in names:
        names[new] = names.pop(old)
        rules.clear_lru_cache()


def _replace(original: Callable[..., Any], ours: Callable[..., Any]) -> None:
    _put(original, _routed(original, ours))


def _put(original: Callable[..., Any], new: Callable[..., Any]) -> None:
    _replaced[original] = new
    _rebind(original, new)


def _both(original: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    """Enter torch's context and ours: which tensors will meet it is not known yet."""

    @functools.wraps(original)
    @contextlib.contextmanager
    def both() -> Iterator[None]:
        with original(), ours():
            yield

    return both


def _rebind(old: Any, new: Any) -> None:
    """Replace a function in every module that has it under its name."""
    name = old.__name__
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get(name) is old and module.__name__ != __name__:
            setattr(module, name, new)


def _routed(original: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def route(*args: Any, **kwargs: Any) -> Any:
        return (ours if _is_for_xla(signature, args, kwargs) else original)(*args, **kwargs)

    return route


def _routed_by_first(
    kind: type, original: Callable[..., Any], ours: Callable[..., Any]
) -> Callable[..., Any]:
    @functools.wraps(original)
    def route(*args: Any, **kwargs: Any) -> Any:
        first = args[0] if args else next(iter(kwargs.values()), None)
        return (ours if isinstance(first, kind) else original)(*args, **kwargs)

    return route


def _is_for_xla(signature: inspect.Signature, args: Any, kwargs: Any) -> bool:
    given = (*args, *kwargs.values())
    if "device_type" in signature.parameters:
        return "xla" in (given[:1] if args else (kwargs.get("device_type"),))
    # torch.compile does not ask a tensor whether it is a mesh, and in torch 2.13 takes a mesh to be
    # of none of several types at once.
    others = [v for v in given if not isinstance(v, torch.Tensor)]
    if any(isinstance(v, Mesh) for v in others):
        return True
    meshes = [v for v in others if isinstance(v, torch_device_mesh.DeviceMesh)]
    if not meshes:
        try:
            meshes = [torch_device_mesh._mesh_resources.get_current_mesh()]
        except RuntimeError:  # torch says so itself: no mesh was given, and none is open
            return False
    return meshes[0].device_type == "xla"
