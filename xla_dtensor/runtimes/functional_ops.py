"""Annotations as functional ops, so that torch.compile can record them in its graph.

``torch.compile`` traces with fake payloads, which no runtime can place. What the DTensor layer asks
of the runtime (put a host tensor, constrain, hand out a plain tensor) is therefore also an op of
torch's: on a fake payload it is recorded, and on a payload it is what the runtime does::

    %constrain = torch.ops.xla_dtensor.constrain(%payload, "[dp, tp] on (dp=2, tp=4) #3")

Tensors are the only inputs of such a call. How the result is to lie is a text that names a
:class:`~xla_dtensor.core.Layout` kept by this process, and so a constant of the graph.

An op that the runtime does not leave to torch (a linear that has to stay whole, an op that
torch_xla gets wrong) is recorded under a name of ours in the same way, see :func:`run_traced`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch

from xla_dtensor.core import Layout
from xla_dtensor.nested import leaves, map_nested
from xla_dtensor.runtimes.layout_names import layout_names, name_of
from xla_dtensor.runtimes.registry import get_runtime

__all__ = [
    "KERNELS",
    "constrain",
    "define",
    "functional_form",
    "is_traced",
    "put",
    "reshaped",
    "run_traced",
    "to_plain",
]

_is_functional = torch._is_functional_tensor  # pyright: ignore[reportPrivateImportUsage]
_from_functional = torch._from_functional_tensor  # pyright: ignore[reportPrivateImportUsage]
_to_functional = torch._to_functional_tensor  # pyright: ignore[reportPrivateImportUsage]
_sync = torch._sync  # pyright: ignore[reportPrivateImportUsage]
_library = torch.library.Library("xla_dtensor", "FRAGMENT")

# What the ops of this module do with payloads, for runtimes whose payloads dispatch themselves.
KERNELS: dict[Any, Callable[..., Any]] = {}


def is_traced(tensor: torch.Tensor) -> bool:
    """Tell whether a payload is a stand-in of torch.compile's, without values."""
    if type(tensor) in (torch.Tensor, torch.nn.Parameter) or _is_local(tensor):
        return False
    return not get_runtime().is_payload(tensor)


def _is_local(value: Any) -> bool:
    return getattr(value, "_is_local_payload", False)


def constrain(payload: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Return a new payload with the same values that lies as `layout` says, or record that."""
    if payload.is_meta:
        return payload.clone()
    if is_traced(payload):
        return torch.ops.xla_dtensor.constrain.default(payload, name_of(layout))
    return get_runtime().constrain(payload, layout)


def put(tensor: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Return a payload with the values of a host tensor, or record that."""
    if is_traced(tensor):
        return torch.ops.xla_dtensor.put.default(tensor, name_of(layout))
    return get_runtime().put(tensor, layout)


def to_plain(payload: torch.Tensor) -> torch.Tensor:
    """Return a payload's value as a tensor to hand to users, or record that."""
    if is_traced(payload):
        return torch.ops.xla_dtensor.to_plain.default(payload)
    return get_runtime().to_plain(payload)


# ---------------------------------------------------------------------- the ops


def _constrain(payload: torch.Tensor, layout: str) -> torch.Tensor:
    if not get_runtime().is_payload(payload):
        return _put(payload, layout)  # made inside the graph, on the host
    return get_runtime().constrain(payload, layout_names.value(layout))


def _put(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    runtime, wanted = get_runtime(), layout_names.value(layout)
    if runtime.is_payload(tensor):  # a plain tensor of the runtime's, which a stand-in cannot show
        return runtime.constrain(tensor, wanted)
    return runtime.put(tensor.detach(), wanted)


def _to_plain(payload: torch.Tensor) -> torch.Tensor:
    runtime = get_runtime()
    return runtime.to_plain(payload) if runtime.is_payload(payload) else payload.clone()


def _like(tensor: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=get_runtime().torch_device
    )


def _contiguous_like(tensor: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=get_runtime().torch_device)


def define(schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """Define an op that runs `run` on payloads and `fake` on stand-ins; return its overload."""
    name = schema.partition("(")[0]
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    packet, _, overload = name.partition(".")
    op = getattr(getattr(torch.ops.xla_dtensor, packet), overload or "default")
    torch.library.register_fake(f"xla_dtensor::{name}", fake, lib=_library)
    # Payloads of torch_xla are functional tensors, as are those that AOTAutograd traces with.
    _library.impl(name, _functionalized(op, run), "Functionalize")
    _library.impl(name, run, "CompositeExplicitAutograd")
    KERNELS[op] = run
    return op


def _functionalized(op: Any, run: Callable[..., Any]) -> Callable[..., Any]:
    """Return what `op` does below functionalization: `run` payloads, record stand-ins."""

    def unwrapped(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and _is_functional(value):
            _sync(value)
            return _from_functional(value)
        return value

    def wrapped(value: Any) -> Any:
        return _to_functional(value) if isinstance(value, torch.Tensor) else value

    def kernel(*args: Any, **kwargs: Any) -> Any:
        inner = map_nested(unwrapped, (args, kwargs))
        if not any(isinstance(value, torch.Tensor) and is_traced(value) for value in leaves(inner)):
            return run(*args, **kwargs)
        functionalize = torch._C.DispatchKeySet(torch._C.DispatchKey.Functionalize)
        with torch._C._ExcludeDispatchKeyGuard(functionalize):
            return map_nested(wrapped, op(*inner[0], **inner[1]))

    return kernel


define("constrain(Tensor payload, str layout) -> Tensor", _constrain, _like)
define("put(Tensor tensor, str layout) -> Tensor", _put, _contiguous_like)
define("to_plain(Tensor payload) -> Tensor", _to_plain, _like)


def run_traced(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run an op on stand-ins; record it as one of ours if the runtime has to run it itself.

    Args:
        func: An ``OpOverload``.
        args: Its positional arguments, payloads in place.
        kwargs: Its keyword arguments.
    """
    runtime = get_runtime()
    if not any(isinstance(value, torch.Tensor) and is_traced(value) for value in leaves(args)):
        return func(*args, **kwargs)
    if torch.Tag.inplace_view in func.tags:
        # A new stand-in: torch cannot change the shape of one on an XLA device.
        return functional_form(func)(*args, **kwargs)
    if torch.device(runtime.torch_device).type != "cpu":
        moved = 1 if func._schema.is_mutable else 0  # not what is written to
        args = (*args[:moved], *map_nested(_on_device, tuple(args[moved:])))
    functional = functional_form(func) if func._schema.is_mutable else func
    if functional is None or not runtime.runs_itself(func):
        return func(*args, **kwargs)
    result = _recorded(_fitting(functional, args))(*args, **kwargs)
    return result if functional is func else args[0].copy_(result)


def reshaped(view: Any, payload: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return what a payload is after ``t_`` or the like: itself, or a view of a stand-in.

    Args:
        view: The op that returns a view instead.
        payload: The payload, changed already, or a stand-in, which `run_traced` does not change.
        args: The arguments, the tensor first.
        kwargs: The keyword arguments.
    """
    return view(payload, *args[1:], **kwargs) if is_traced(payload) else payload


def _on_device(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.device.type == "cpu":
        return value.to(get_runtime().torch_device)
    return value


def functional_form(func: Any) -> Any:
    """Return the op that computes what an in-place op writes; None if it has no name of its own."""
    namespace, _, name = func._schema.name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), name.removesuffix("_"), None)
    if packet is None or not name.endswith("_"):
        return None
    return next((op for op in _overloads(packet) if _takes(op) == _takes(func)), None)


def _overloads(packet: Any) -> list[Any]:
    return [getattr(packet, name) for name in packet.overloads()]


def _takes(func: Any) -> list[tuple[str, str]]:
    return [(argument.name, str(argument.type)) for argument in func._schema.arguments]


def _fitting(func: Any, args: Sequence[Any]) -> Any:
    """Return the overload that takes numbers, where `func` takes tensors made of them."""

    def takes(op: Any) -> bool:
        given = zip(args, _takes(op), strict=False)
        return all(
            kind != "Tensor" or isinstance(value, torch.Tensor) for value, (_, kind) in given
        )

    names = [name for name, _ in _takes(func)]
    overloads = [func, *_overloads(func.overloadpacket)]
    same = [op for op in overloads if [name for name, _ in _takes(op)] == names]
    return next((op for op in same if takes(op)), func)


@cache
def _recorded(func: Any) -> Any:
    """Return an op of ours that stands for `func` in graphs, and has the runtime run it."""

    def run(*args: Any, **kwargs: Any) -> Any:
        runtime = get_runtime()
        run = runtime.run_local_op if any(map(_is_local, leaves(args))) else runtime.run_op
        return run(func, args, kwargs)

    return define("aten_" + str(func._schema).removeprefix("aten::"), run, func)
