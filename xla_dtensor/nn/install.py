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
torch.nn.attention.flex_attention       flex_attention
torch.distributed.fsdp                  fully_shard, register_fsdp_forward_method
torch.distributed._state_dict_utils     what StateDictOptions(full_state_dict=True) asks for
                                        (see :mod:`xla_dtensor.nn.install`)
torch.distributed                       init_device_mesh; get_rank, get_world_size (of a
                                        mesh axis, see :mod:`xla_dtensor.dtensor.mesh`)
torch.distributed._functional_          the collectives, for LocalViews (see
collectives                             :mod:`xla_dtensor.dtensor.collectives`)
======================================  ============================================

A module that imported one of these by name has its name replaced too. cpu and cuda meshes are not
touched; ``fully_shard`` without a mesh is for the accelerator, which "xla" is where a runtime runs
or torch has no other. Where transformers is imported, its ``from_pretrained`` refuses "xla" meshes,
which it takes and does not read. Calling install() again does nothing; ``uninstall()`` puts
everything back. What ``xd.install()`` answers besides is in :mod:`xla_dtensor.hosts.accelerator`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as torch_collectives
import torch.distributed._state_dict_utils as torchs
import torch.distributed.device_mesh as torch_device_mesh
import torch.distributed.fsdp as torch_fsdp
import torch.distributed.tensor as torch_tensor
import torch.distributed.tensor._api as torch_api
import torch.distributed.tensor._random as torch_random
import torch.distributed.tensor.parallel as torch_parallel
import torch.nn.attention.flex_attention as torch_flex

from mesh_utils import Mesh
from xla_dtensor.core.errors import DistributeError
from xla_dtensor.dtensor import api, collectives, dtensor, mesh, random
from xla_dtensor.dtensor.dtensor import DTensor
from xla_dtensor.dtensor.local import LocalView
from xla_dtensor.dtensor.mesh import AxisGroup, allow_groups, init_device_mesh
from xla_dtensor.dtensor.modes import loss_parallel
from xla_dtensor.nn.flex_attention import flex_attention
from xla_dtensor.nn.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from xla_dtensor.runtimes.registry import ENVIRONMENT_VARIABLE, current_runtime, get_runtime

__all__ = [
    "at_uninstall",
    "install",
    "is_accelerator",
    "is_installed",
    "put",
    "put_attribute",
    "uninstall",
]


# ---------------------------------------------------------- Whole state dicts by torch's functions
#
# ``StateDictOptions(full_state_dict=True)``, both ways.
#
#   options = StateDictOptions(full_state_dict=True, cpu_offload=True)
#   whole = get_model_state_dict(model, options=options)     plain tensors, to be saved by anyone
#   set_model_state_dict(other, whole, options=options)      each lies as the other's parameter does
#
# torch goes by local tensors: it replicates a DTensor and takes ``to_local()``, and it writes this
# rank's part of a whole tensor into one. Here a process has several devices and a local tensor is a
# view of all of them, so whole tensors are taken, and distributed. ``xd.install()`` puts these
# functions in place of torch's.


def replacements() -> Iterator[tuple[Callable[..., Any], Callable[..., Any]]]:
    """Yield functions of torch, each with what is to be called instead."""
    yield torchs._gather_state_dict, _gather(torchs._gather_state_dict)
    yield torchs._broadcast_state_dict, _broadcast(torchs._broadcast_state_dict)


def _gather(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def gather(state_dict: Any, *args: Any, cpu_offload: bool = False, **options: Any) -> Any:
        return original(_full(state_dict, cpu_offload), *args, cpu_offload=cpu_offload, **options)

    return gather


def _full(state: Any, on_host: bool) -> Any:
    if isinstance(state, DTensor):
        return state.cpu() if on_host else state.full_tensor()
    if api.parts_of(state):
        return api.map_parts(lambda part: _full(part, on_host), state)
    if isinstance(state, dict):
        return {key: _full(part, on_host) for key, part in state.items()}
    if isinstance(state, (list, tuple)):
        return type(state)(_full(part, on_host) for part in state)
    return state


def _broadcast(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def broadcast(
        full_state_dict: Mapping[str, Any],
        local_state_dict: dict[str, Any],
        device: torch.device,
        pg: Any = None,
        strict: bool = False,
        **options: Any,
    ) -> None:
        if not any(isinstance(tensor, DTensor) for tensor in local_state_dict.values()):
            original(full_state_dict, local_state_dict, device, pg, strict, **options)
            return
        rank_0_state: dict[str, Any] = {}
        for key in _from_rank_0(list(full_state_dict), pg):
            rank_0_state[key] = _from_rank_0(full_state_dict.get(key), pg)
        torchs._distribute_state_dict(rank_0_state, local_state_dict, device, pg)
        for key in list(local_state_dict) if strict else ():
            if key not in rank_0_state:
                del local_state_dict[key]

    return broadcast


def _from_rank_0(state: Any, group: Any) -> Any:
    """Return what rank 0 gave."""
    message = [state]
    if dist.get_world_size(group) > 1:
        dist.broadcast_object_list(message, src=0, group=group)
    return message[0]


# --------------------------------------------------------------------------------------- install()

logger = logging.getLogger("xla_dtensor")
_replaced: dict[Any, Any] = {}  # torch's function -> ours
_undo: list[Callable[[], object]] = []  # what else uninstall() does, the last of it first
torch_from_local = torch_tensor.DTensor.from_local
_DYNAMO_TORCHS = "torch.distributed.tensor._api.DTensor#from_local"
_DYNAMO_OURS = f"{__name__}.torch_from_local"
torch_has_one = torch.accelerator.is_available
_NOT_ON_XLA = (
    "fully_shard was called without a mesh, and torch has an accelerator of its own: the model is "
    "on torch's mesh, and nothing of it on XLA. Pass mesh=, or choose a runtime before, by "
    "xla_dtensor.get_runtime() or %s=jax."
)
_SMALL_MESH = (
    "init_device_mesh made %s, and there are %d devices: the others do nothing. WORLD_SIZE and "
    "get_world_size() count processes; xla_dtensor.get_runtime().device_ids() has all devices."
)
_warned: set[Any] = set()
_FACTORIES = ("ones", "zeros", "empty", "full", "rand", "randn")


def install(start: Callable[[], object] = get_runtime) -> None:
    """Let torch.distributed.tensor's functions work on "xla" meshes.

    Args:
        start: Called before torch's ``init_device_mesh``, and ``fully_shard`` without a mesh, ask
            for all devices.

    Example:
        >>> import torch, xla_dtensor as xd
        >>> install()
        >>> from torch.distributed.tensor import Shard, distribute_tensor
        >>> mesh = xd.init_device_mesh("xla", (8,))
        >>> distribute_tensor(torch.ones(8, 2), mesh, [Shard(0)])
        DTensor(shape=(8, 2), dtype=float32, placements=(S(0)), mesh=(0=8), local_shape=(1, 2))
        >>> uninstall()
    """
    if _replaced:
        return
    for name in ("distribute_tensor", "distribute_module"):
        _replace(getattr(torch_api, name), getattr(api, name))
    for name in _FACTORIES:
        _replace(getattr(torch_tensor, name), getattr(dtensor, name))
    from_local = _routed(torch_tensor.DTensor.from_local, DTensor.from_local)
    put_attribute(torch_tensor.DTensor, "from_local", staticmethod(from_local))
    _refuse_unread_meshes()
    _move_dynamo_rule(_DYNAMO_TORCHS, _DYNAMO_OURS)
    _replace(torch_device_mesh.init_device_mesh, _of_all(start, init_device_mesh))
    for name in ("manual_seed", "is_rng_supported_mesh"):
        _replace(getattr(torch_random, name), getattr(random, name))
    put(torch_fsdp.fully_shard, _sharded(start, torch_fsdp.fully_shard))
    forward_method = torch_fsdp.register_fsdp_forward_method
    put(forward_method, _routed_by_first(FSDPModule, forward_method, register_fsdp_forward_method))
    put(torch_parallel.loss_parallel, _both(torch_parallel.loss_parallel, loss_parallel))
    for original, replacement in replacements():
        put(original, replacement)
    for name, replacement in collectives.BY_NAME.items():
        original = getattr(torch_collectives, name)
        put(original, _routed_by_first(LocalView, original, replacement))
    for name, replacement in mesh.BY_NAME.items():
        original = getattr(dist, name)
        put(original, _routed_by_first(AxisGroup, original, replacement))
    put(
        torch_flex.flex_attention,
        _routed_by_first(
            (DTensor, LocalView), torch_flex.flex_attention, torch.compiler.disable(flex_attention)
        ),
    )
    allow_groups(True)
    logger.info("torch.distributed.tensor works on 'xla' meshes through xla_dtensor now.")


def uninstall() -> None:
    """Put torch's own functions back."""
    if not _replaced:
        return
    for original, replacement in _replaced.items():
        _rebind(replacement, original)
    while _undo:
        _undo.pop()()
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


def _replace(original: Callable[..., Any], replacement: Callable[..., Any]) -> None:
    put(original, _routed(original, replacement))


def put(original: Callable[..., Any], new: Callable[..., Any]) -> None:
    """Put a function in the place of torch's, in every module that has it, until uninstall()."""
    _replaced[original] = new
    _rebind(original, new)


def put_attribute(owner: type, name: str, new: Any) -> None:
    """Give a class another attribute, until uninstall()."""
    if name in vars(owner):
        at_uninstall(functools.partial(setattr, owner, name, vars(owner)[name]))
    else:
        at_uninstall(functools.partial(delattr, owner, name))
    setattr(owner, name, new)


def at_uninstall(undo: Callable[[], object]) -> None:
    """Do this, too, when :func:`uninstall` is called."""
    _undo.append(undo)


def _refuse_unread_meshes() -> None:
    """Let Transformers' from_pretrained refuse the mesh that it takes, and would not read."""
    modeling = sys.modules.get("transformers.modeling_utils")
    if modeling is None:
        return
    original = modeling.PreTrainedModel.from_pretrained.__func__

    @functools.wraps(original)
    def from_pretrained(cls: type, *args: Any, **kwargs: Any) -> Any:
        if getattr(kwargs.get("device_mesh"), "device_type", None) == "xla":
            raise DistributeError(
                f"{cls.__name__}.from_pretrained was given an 'xla' mesh as device_mesh. "
                "Transformers does not read it, and would load the whole model on this host. "
                "Write xd.from_pretrained(cls, name, mesh=mesh)."
            )
        return original(cls, *args, **kwargs)

    put_attribute(modeling.PreTrainedModel, "from_pretrained", classmethod(from_pretrained))


def _both(original: Callable[..., Any], context: Callable[..., Any]) -> Callable[..., Any]:
    """Enter torch's context and ours: which tensors will meet it is not known yet."""

    @functools.wraps(original)
    @contextlib.contextmanager
    def both() -> Iterator[None]:
        with original(), context():
            yield

    return both


def _rebind(old: Any, new: Any) -> None:
    """Replace a function in every module that has it under its name."""
    name = old.__name__
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get(name) is old and module.__name__ != __name__:
            setattr(module, name, new)


def is_accelerator() -> bool:
    """Tell whether "xla" is the accelerator: a runtime runs or is named, or torch has no other."""
    chosen = current_runtime() is not None or bool(os.environ.get(ENVIRONMENT_VARIABLE))
    return chosen or not torch_has_one()


def _of_all(start: Callable[[], object], replacement: Callable[..., Any]) -> Callable[..., Any]:
    """Start before a mesh is made, and say so where it leaves devices out."""

    @functools.wraps(replacement)
    def init_device_mesh(*args: Any, **kwargs: Any) -> Any:
        start()
        device_mesh = replacement(*args, **kwargs)
        count = len(get_runtime().device_ids())
        if device_mesh.size() < count and device_mesh not in _warned:
            _warned.add(device_mesh)
            logger.warning(_SMALL_MESH, device_mesh, count)
        return device_mesh

    return init_device_mesh


def _sharded(start: Callable[[], object], original: Callable[..., Any]) -> Callable[..., Any]:
    """Lead fully_shard by its mesh; without one to the accelerator's devices, as torch does."""

    @functools.wraps(original)
    def shard(*args: Any, **kwargs: Any) -> Any:
        device_type = _device_type(args, kwargs)
        if device_type is None and is_accelerator():
            start()
            device_type = "xla"
        elif device_type is None:
            logger.warning(_NOT_ON_XLA, ENVIRONMENT_VARIABLE)
        return (fully_shard if device_type == "xla" else original)(*args, **kwargs)

    return shard


def _routed(original: Callable[..., Any], replacement: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def route(*args: Any, **kwargs: Any) -> Any:
        return (replacement if _is_for_xla(signature, args, kwargs) else original)(*args, **kwargs)

    return route


def _routed_by_first(
    kind: type | tuple[type, ...], original: Callable[..., Any], replacement: Callable[..., Any]
) -> Callable[..., Any]:
    @functools.wraps(original)
    def route(*args: Any, **kwargs: Any) -> Any:
        first = args[0] if args else next(iter(kwargs.values()), None)
        return (replacement if isinstance(first, kind) else original)(*args, **kwargs)

    return route


def _is_for_xla(signature: inspect.Signature, args: Any, kwargs: Any) -> bool:
    if "device_type" in signature.parameters:
        return "xla" in (args[:1] if args else (kwargs.get("device_type"),))
    return _device_type(args, kwargs) == "xla"


def _device_type(args: Any, kwargs: Any) -> str | None:
    """Return that of the mesh among the arguments, or of the open one; None without a mesh."""
    # torch.compile does not ask a tensor whether it is a mesh, and in torch 2.13 takes a mesh to be
    # of none of several types at once.
    arguments = (*args, *kwargs.values())
    arguments = tuple(v for v in arguments if not isinstance(v, torch.Tensor))
    if any(isinstance(v, Mesh) for v in arguments):
        return "xla"
    meshes = [v for v in arguments if isinstance(v, torch_device_mesh.DeviceMesh)]
    if not meshes:
        try:
            meshes = [torch_device_mesh._mesh_resources.get_current_mesh()]
        except RuntimeError:  # torch says so itself: no mesh was given, and none is open
            return None
    return meshes[0].device_type
