"""Whole state dicts by torch's functions: ``StateDictOptions(full_state_dict=True)``, both ways.

    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    whole = get_model_state_dict(model, options=options)     plain tensors, to be saved by anyone
    set_model_state_dict(other, whole, options=options)      each lies as the other's parameter does

torch goes by local tensors: it replicates a DTensor and takes ``to_local()``, and it writes this
rank's part of a whole tensor into one. Here a process has several devices and a local tensor is a
view of all of them, so whole tensors are taken, and distributed. ``xd.install()`` puts these
functions in place of torch's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._state_dict_utils as torchs

from xla_dtensor.dtensor import DTensor

__all__ = ["replacements"]


def replacements() -> Iterator[tuple[Callable[..., Any], Callable[..., Any]]]:
    """Yield functions of torch, each with what is to be called instead."""
    yield torchs._gather_state_dict, _gather(torchs._gather_state_dict)
    yield torchs._broadcast_state_dict, _broadcast(torchs._broadcast_state_dict)


def _gather(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def gather(state_dict: Any, *args: Any, cpu_offload: bool = False, **options: Any) -> Any:
        whole = _whole(state_dict, cpu_offload)
        return original(whole, *args, cpu_offload=cpu_offload, **options)

    return gather


def _whole(value: Any, on_host: bool) -> Any:
    if isinstance(value, DTensor):
        return value.cpu() if on_host else value.full_tensor()
    if isinstance(value, dict):
        return {key: _whole(item, on_host) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_whole(item, on_host) for item in value)
    return value


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
        if not any(isinstance(value, DTensor) for value in local_state_dict.values()):
            original(full_state_dict, local_state_dict, device, pg, strict, **options)
            return
        whole: dict[str, Any] = {}
        for key in _from_rank_0(list(full_state_dict), pg):
            whole[key] = _from_rank_0(full_state_dict.get(key), pg)
        torchs._distribute_state_dict(whole, local_state_dict, device, pg)
        for key in list(local_state_dict) if strict else ():
            if key not in whole:
                del local_state_dict[key]

    return broadcast


def _from_rank_0(value: Any, group: Any) -> Any:
    """Return what rank 0 gave."""
    given = [value]
    if dist.get_world_size(group) > 1:
        dist.broadcast_object_list(given, src=0, group=group)
    return given[0]
