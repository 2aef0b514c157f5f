"""Ops that torch_xla 2.9 can do neither rightly nor in other words: PyTorch runs them on the host.

torch_xla itself does so with every op that it has no kernel for. Here it is done too for ops whose
kernels give wrong values or end the process, and for those that raise an error of torch_xla's own.
Values go to the host and back, which is slow and is logged once per op; what comes back is
replicated until XLA decides otherwise. Inside a compiled step there is no host to go to.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from xla_dtensor.errors import UnsupportedOpError
from xla_dtensor.nested import leaves, map_nested
from xla_dtensor.runtimes.registry import get_runtime
from xla_dtensor.runtimes.torch_xla_corrections_points import assign
from xla_dtensor.runtimes.torch_xla_sharding import DEVICE

__all__ = ["has_manual", "run_on_host"]

_log = logging.getLogger(__name__)
_logged: set[Any] = set()


def has_manual(*arguments: Any) -> bool:
    """Tell whether a manual payload is among some arguments: it cannot be read on the host."""
    from xla_dtensor.runtimes.torch_xla_manual_nodes import ManualPayload  # it imports us

    return any(isinstance(value, ManualPayload) for value in leaves(arguments))


def run_on_host(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run an op on the host; what it wrote into is written on the devices as well.

    Args:
        func: An ``OpOverload``.
        args: Its positional arguments, payloads in place.
        kwargs: Its keyword arguments.

    Returns:
        What the op returns, on the devices.

    Raises:
        UnsupportedOpError: A step is being compiled.
    """
    if not importlib.import_module("torch_xla")._XLAC._get_allow_execution():
        raise UnsupportedOpError(
            f"The op {func} was called inside a compiled step. torch_xla has no right kernel for "
            "it, and a compiled step cannot run it on the host. Call it outside the step, or write "
            "it with other ops."
        )
    _log_once(func)
    copies: dict[int, torch.Tensor] = {}

    def to_host(value: Any) -> Any:
        if isinstance(value, torch.device):
            return torch.device("cpu")
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) not in copies:
            runtime = get_runtime()
            copies[id(value)] = runtime.to_host(value) if runtime.is_payload(value) else value.cpu()
        return copies[id(value)]

    host_args, host_kwargs = map_nested(to_host, (tuple(args), dict(kwargs)))
    result = func(*host_args, **host_kwargs)
    written = {id(copies[id(to)]): to for to in _written(func, args, kwargs)}
    for to in written.values():
        assign(to, copies[id(to)].to(DEVICE))

    def back(value: Any) -> Any:
        if isinstance(value, tuple | list):
            return [back(item) for item in value] if type(value) is list else (*map(back, value),)
        if not isinstance(value, torch.Tensor):
            return value
        return written[id(value)] if id(value) in written else value.to(DEVICE)

    return back(result)


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    given = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | dict(kwargs)
    values: list[Any] = []
    for argument in func._schema.arguments:
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = given.get(argument.name)
            values += value if isinstance(value, list | tuple) else [value]
    return [v for v in values if isinstance(v, torch.Tensor) and v.device.type == "xla"]


def _log_once(func: Any) -> None:
    if func not in _logged:
        _logged.add(func)
        _log.warning(
            "The op %s runs on the host: torch_xla has no right kernel for it. (Said once.)", func
        )
