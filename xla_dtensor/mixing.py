"""Plain tensors among the arguments of an op on DTensors.

DTensors are global here, so a plain tensor beside one has a single meaning: its value, the same on
every device. Masks, position ids and caches made inside a model's forward are such tensors. They
enter as Replicate, with one log line per op. ``implicit_replication(False)`` gives PyTorch's rule
instead, under which only tensors of one element pass.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.distributed.tensor import Replicate

from xla_dtensor.core import Layout
from xla_dtensor.device_mesh import DeviceMesh
from xla_dtensor.errors import MixedTensorsError
from xla_dtensor.global_state import GlobalState
from xla_dtensor.modes import current_modes
from xla_dtensor.nested import leaves, map_nested
from xla_dtensor.runtimes.registry import get_runtime
from xla_dtensor.written import written_values

__all__ = ["admit_plain", "on_mesh", "run_writing_to_both"]

logger = logging.getLogger("xla_dtensor")
_logged: set[Any] = set()


def admit_plain(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Let the plain tensors among an op's arguments pass, with a log line, or refuse them.

    Args:
        func: The ``OpOverload`` that is called.
        args: Its arguments, as the caller passed them.
        kwargs: Its keyword arguments.

    Raises:
        MixedTensorsError: Plain tensors are not allowed, and one has not one element.
    """
    if not current_modes().implicit and not torch._C._get_dtensor_allow_implicit_replication():
        _apply_torchs_rule(func, args, kwargs)
    elif func not in _logged:
        _log(func, args, kwargs)


def _apply_torchs_rule(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    for place, tensor in _plain_tensors(func, args, kwargs):
        if tensor.numel() != 1:
            raise MixedTensorsError(
                f"{func} was called on DTensors and a plain torch.Tensor of "
                f"shape={tuple(tensor.shape)} as {place}. This is "
                "implicit_replication(False), which is PyTorch's rule: got mixed torch.Tensor and "
                "DTensor. Pass distribute_tensor(tensor, mesh), or allow it with "
                "implicit_replication()."
            )
        if tensor.ndim == 1:
            warnings.warn(
                f"{func}: found a non-scalar tensor with numel=1 and ndim!=0 as {place}, we are "
                "implicitly creating a replicated DTensor for it. Change it to a scalar tensor or "
                "create a DTensor explicitly.",
                UserWarning,
                stacklevel=5,
            )


def _log(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    # One element is a number in a tensor's clothing: PyTorch lets it pass without a word.
    several = [found for found in _plain_tensors(func, args, kwargs) if found[1].numel() != 1]
    if several:
        _logged.add(func)
        place, tensor = several[0]
        logger.info(
            "%s was called on DTensors and a plain torch.Tensor of shape=%s as %s; it counts as "
            "Replicate: its value, the same on every device.",
            func,
            tuple(tensor.shape),
            place,
        )


def _plain_tensors(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each plain tensor with a description of the argument that it is."""
    # On a device with a backend of its own, torch itself makes plain tensors of numbers, for
    # instance for x[:, 2] = 7.0.
    runtime = get_runtime()
    if func is torch.ops.aten.copy_.default and torch.device(runtime.torch_device).type != "cpu":
        args = [None if i and runtime.is_payload(v) else v for i, v in enumerate(args)]
    names = [argument.name for argument in func._schema.arguments]
    for position, value in enumerate(args):
        name = names[position] if position < len(names) else "?"
        yield from _plain_in(value, f"argument {position} ({name!r})")
    for name, value in kwargs.items():
        yield from _plain_in(value, f"argument {name!r}")


def _plain_in(value: Any, place: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _plain_in(item, f"item {index} of {place}")
    elif isinstance(value, torch.Tensor) and not isinstance(value, TorchDTensor):
        yield place, value


def run_writing_to_both(func: Any, args: Any, kwargs: Any, mesh: DeviceMesh) -> Any:
    """Run an op that writes, with plain tensors among its arguments.

    A runtime writes to payloads, or to plain tensors. Where an op such as ``_foreach_add_`` writes
    to both, plain ones are written to by way of payloads of their own.

    Args:
        func: The ``OpOverload``.
        args: Its arguments, payloads in place of DTensors.
        kwargs: Its keyword arguments.
        mesh: The mesh of the DTensors.

    Returns:
        What the op returns.
    """
    runtime = get_runtime()
    written = [t for t in leaves(written_values(func, args, kwargs)) if t is not None]
    host = [t for t in written if not runtime.is_payload(t)]
    if not host or len(host) == len(written):
        return runtime.run_op(func, args, kwargs)

    def replicated(tensor: torch.Tensor) -> torch.Tensor:
        layout = Layout.from_placements((Replicate(),) * mesh.ndim, tensor.ndim, mesh.value)
        return runtime.put(tensor, layout)

    stand_ins = {id(tensor): replicated(tensor) for tensor in host}
    args, kwargs = map_nested(lambda v: stand_ins.get(id(v), v), (args, kwargs))
    result = runtime.run_op(func, args, kwargs)
    for tensor in host:
        tensor.copy_(runtime.to_host(stand_ins[id(tensor)]))
    return result


def on_mesh(result: Any, state: GlobalState | None) -> Any:
    """Return one of an op's results as a payload.

    A ``_foreach_`` op gives plain results for the plain tensors in its lists.
    """
    if type(result) is not torch.Tensor or state is None or result.device.type != "cpu":
        return result
    if get_runtime().is_payload(result) or torch._is_functional_tensor(result):  # pyright: ignore
        return result
    return get_runtime().put(result, state.span_layout)
