"""Ops on all devices' tensors at once: the op of the stack, through torch's batching rules.

The rules of ``torch.vmap`` know for each op how the op of a stack looks: ``mm`` becomes ``bmm``,
``t`` swaps the last two dims. Only some ops are run so: those of which XLA's partitioner sees that
devices need nothing from each other. Others compile to collectives: gathers and writes by index,
convolutions and norms, whose rules merge the stack's dim with others or hide it among indices.

Wrapper subclasses are called with the keys of vmap switched off; here they are switched on. An op
without a rule would be run once per device: that is switched off.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch._C import DispatchKey
from torch._functorch.predispatch import lazy_load_decompositions

from xla_dtensor.nested import leaves, map_nested
from xla_dtensor.runtimes.foreach import run_foreach
from xla_dtensor.runtimes.torch_xla_corrections import correction
from xla_dtensor.runtimes.torch_xla_corrections_dtypes import in_torchs_dtypes
from xla_dtensor.runtimes.torch_xla_local_composed import COMPOSED, PARTIAL_REGIONS
from xla_dtensor.runtimes.torch_xla_local_payload import LocalPayload, annotate_stack
from xla_dtensor.runtimes.torch_xla_payload import to_payload
from xla_dtensor.runtimes.torch_xla_sharding import DEVICE, xlac

__all__ = ["draws_numbers", "is_batched", "run_batched"]

aten = torch.ops.aten
_KEYS = (
    DispatchKey.FuncTorchDynamicLayerFrontMode,
    DispatchKey.FuncTorchDynamicLayerBackMode,
    DispatchKey.FuncTorchBatched,
    DispatchKey.FuncTorchBatchedDecomposition,
    DispatchKey.FuncTorchVmapMode,
    DispatchKey.Functionalize,
)
# Beside views, pointwise ops and what draws random numbers. Each compiles to no collective.
_BATCHED = frozenset(
    (
        *("mm", "bmm", "mv", "dot", "addmm", "baddbmm", "linear", "_unsafe_view"),
        *("sum", "mean", "prod", "amax", "amin", "argmax", "argmin", "any", "all"),
        *("var", "std", "logsumexp", "linalg_vector_norm", "cumsum", "cumprod", "topk", "sort"),
        *("_softmax", "_softmax_backward_data", "_log_softmax", "_log_softmax_backward_data"),
        *("cat", "stack", "flip", "roll", "tril", "triu", "constant_pad_nd"),
        *("_to_copy", "copy_", "fill_", "zero_", "floor_divide", "floor_divide_"),
    )
)


_TAG = torch.Tag
_functorch: Any = importlib.import_module("torch._C._functorch")
_FOREACH = "_foreach_"


@lru_cache(4096)
def is_batched(func: Any, is_whole: bool) -> bool:
    """Tell whether an ``OpOverload`` is run here.

    Args:
        func: The op.
        is_whole: Whether the local payloads' region covers all mesh axes. Where it does not, other
            ways to run an op gather along the rest.
    """
    if func in PARTIAL_REGIONS and is_whole:
        return False
    name = func.overloadpacket.__name__
    return (
        func.is_view
        or _TAG.pointwise in func.tags
        or draws_numbers(func)
        or name in _BATCHED
        or func in COMPOSED
        or _single_of(func) is not None
    )


@lru_cache(4096)
def draws_numbers(func: Any) -> bool:
    """Tell whether an op draws random numbers, of which each device gets its own."""
    return _TAG.nondeterministic_seeded in func.tags


def run_batched(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], like: LocalPayload
) -> Any:
    """Run an op on the stacks of local payloads.

    Args:
        func: An ``OpOverload`` that :func:`is_batched`.
        args: Its arguments: local payloads, host tensors and plain XLA tensors in place.
        kwargs: The same by name.
        like: One of the local payloads.

    Returns:
        Local payloads in place of tensors; nothing of use where the op writes in place.

    Raises:
        RuntimeError: No rule for this op, or what the op itself raises.
    """
    region, size = like._region, like._stack.shape[0]
    with _layer(size) as level:

        def batched(value: Any) -> Any:
            if isinstance(value, LocalPayload):
                return _functorch._add_batch_dim(value._stack, 0, level)
            if isinstance(value, torch.Tensor):
                return to_payload(value.to(DEVICE))
            return value

        def local(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            return LocalPayload(_stacked(value, level, size), region)

        result = _run(func, map_nested(batched, tuple(args)), map_nested(batched, dict(kwargs)))
        if func._schema.is_mutable:
            return None
        found = map_nested(local, result)
        if draws_numbers(func):  # Nothing else says where these lie.
            for value in leaves(found):
                if isinstance(value, LocalPayload):
                    annotate_stack(value)
        return found


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    single = _single_of(func)
    if single is not None:
        results = run_foreach(single, args, kwargs)
        if func._schema.is_mutable:
            for target, value in zip(args[0], results, strict=True):
                target.copy_(value)
        return results
    if func in COMPOSED:
        return COMPOSED[func](*args, **kwargs)
    return in_torchs_dtypes(func, args, kwargs, _run_once)


def _run_once(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    corrected: Callable[[], Any] | None = correction(func, args, kwargs)
    return func(*args, **kwargs) if corrected is None else corrected()


@lru_cache(4096)
def _single_of(func: Any) -> Any:
    """The functional form of a foreach op that :func:`run_foreach` knows; None for others."""
    name = func.overloadpacket.__name__
    if not name.startswith(_FOREACH):
        return None
    single = name.removeprefix(_FOREACH).rstrip("_")
    if single not in ("norm", "copy") and not hasattr(torch, single):
        return None
    return getattr(getattr(aten, _FOREACH + single), func._overloadname, None)


def _stacked(value: torch.Tensor, level: int, size: int) -> torch.Tensor:
    stack, dim = _functorch._unwrap_batched(value, level)
    if dim is None:
        return to_payload(stack.to(DEVICE)).expand(size, *stack.shape).clone()
    return stack.movedim(dim, 0) if dim else stack


@contextmanager
def _layer(size: int) -> Iterator[int]:
    """Run the body in a new layer of vmap, without gradients, fallbacks or reading."""
    allowed = xlac()._get_allow_execution()
    fallback = _functorch._is_vmap_fallback_enabled()
    excluded = [torch._C._dispatch_tls_is_dispatch_key_excluded(key) for key in _KEYS]
    for key in _KEYS:
        torch._C._dispatch_tls_set_dispatch_key_excluded(key, False)
    try:
        with torch.no_grad():
            lazy_load_decompositions()
            level = _functorch._vmap_increment_nesting(size, "different")
            _functorch._set_vmap_fallback_enabled(False)
            xlac()._set_allow_execution(False)
            try:
                yield level
            finally:
                xlac()._set_allow_execution(allowed)
                _functorch._set_vmap_fallback_enabled(fallback)
                _functorch._vmap_decrement_nesting()
    finally:
        for key, was in zip(_KEYS, excluded, strict=True):
            torch._C._dispatch_tls_set_dispatch_key_excluded(key, was)
