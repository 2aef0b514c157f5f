"""Run one aten op on JaxTensors, below autograd: the order in which a rule is looked for.

1. *Special* ops that need tensors, not arrays: copies, reading on the host (``jax_special``).
2. *Views*: a new JaxTensor over the same storage (``jax_views``).
3. *Mutating* ops, known from their schema: the functional op, then a write through the views.
4. *Functional* ops: our own lowering, else torch's decomposition into ops that have one.

Every functional result is held to what torch's meta device says of it (``op_meta``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from xla_dtensor.errors import CompileError, UnsupportedOpError, WriteError
from xla_dtensor.nested import map_nested
from xla_dtensor.runtimes import (
    functional_ops,
    jax_batch_norm,
    jax_manual,
    jax_manual_ops,
    jax_special,
    jax_views,
)
from xla_dtensor.runtimes.foreach import is_foreach, writes_to_a_list
from xla_dtensor.runtimes.index_bounds import (
    BOUNDS,
    Bound,
    check_bounds,
    host_extremes,
    name_of,
)
from xla_dtensor.runtimes.jax_compared import COMPARED, read_once
from xla_dtensor.runtimes.jax_composed import COMPOSED
from xla_dtensor.runtimes.jax_convert import in_dtype, jax_dtype, numpy_from_torch, x64
from xla_dtensor.runtimes.jax_foreach import (
    run_foreach_on_rows,
    write_foreach,
)
from xla_dtensor.runtimes.jax_host_inputs import admitted, with_values
from xla_dtensor.runtimes.jax_lowering import find_lowering
from xla_dtensor.runtimes.jax_placing import host_value
from xla_dtensor.runtimes.jax_scalar import unwrap_number
from xla_dtensor.runtimes.jax_tensor import JaxTensor, Storage
from xla_dtensor.runtimes.jax_trace import active_trace, refuse_write_to_host
from xla_dtensor.runtimes.jax_value_checks import flag
from xla_dtensor.runtimes.op_meta import Meta, output_meta, raise_torchs_error
from xla_dtensor.runtimes.value_checks import are_checked
from xla_dtensor.written import refuse_overlap, written_arguments

__all__ = ["as_array", "run_op", "write"]

jax_special.SPECIAL.update(jax_batch_norm.RULES)


def run_op(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run the aten op `func`; JaxTensors among the arguments come out as JaxTensors.

    Args:
        func: An ``OpOverload``.
        args: Its positional arguments; plain CPU tensors stand for their global value.
        kwargs: Its keyword arguments.

    Returns:
        What the op returns, with JaxTensors in place of tensors.

    Raises:
        UnsupportedOpError: No rule for this op.
    """
    trace = active_trace()
    if trace is None:
        return _run(func, args, kwargs)
    given = (args, kwargs) if trace.host is None else admitted(func, args, kwargs)
    with trace.sources.of_op():
        try:
            return _run(func, *given)
        except CompileError:
            known = None if given[0] is args else with_values(func, args, kwargs)
            if known is None:
                raise
            # Their values have to be known: a mask's, on which the shape of the result depends.
            return _run(func, *known)


def _run(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    with x64():
        special = jax_special.SPECIAL.get(func) or functional_ops.KERNELS.get(func)
        if special is not None:
            return special(*args, **kwargs)
        view = jax_views.view_rule(func)
        if view is not None and isinstance(args[0], JaxTensor):
            return view(func, args, kwargs)
        if torch.Tag.inplace_view in func.tags:
            return _run_inplace_view(func, args, kwargs)
        if func._schema.is_mutable:
            return _run_mutating(func, args, kwargs)
        if is_foreach(func):
            return run_foreach_on_rows(func, args, kwargs)
        return _run_functional(func, args, kwargs)


def _run_functional(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    # The ops that one of them is composed of have other ranges, and its own was looked at.
    if func in BOUNDS and _decomposing.isdisjoint(BOUNDS):
        check_bounds(func, args, kwargs, partial(_extremes, func))
    lowering = find_lowering(func)
    if lowering is None:
        return _decompose(func, args, kwargs)
    trace = active_trace()
    if trace is not None and func in COMPARED:
        read_once(trace, func, args)
    meta = output_meta(func, args, kwargs)
    axes = jax_manual.axes_of(args, kwargs)
    if axes is not None:
        result = jax_manual_ops.run_lowering(axes, func, lowering, args, kwargs, meta)
        return _wrapped(func, result, meta, axes)
    array_args, array_kwargs = map_nested(as_array, (tuple(args), dict(kwargs)))
    options = {"meta": meta} if lowering.wants_meta else {}
    try:
        result = lowering(*array_args, **array_kwargs, **options)
    except (TypeError, ValueError, AttributeError):  # JAX's, or a lowering's that wants the meta
        raise_torchs_error(func, args, kwargs)
        raise
    return _wrapped(func, result, meta)


def _extremes(func: Any, bound: Bound) -> tuple[float, float] | None:
    """Return the smallest and the largest number; None while a step is traced."""
    index = bound.index
    if not isinstance(index, JaxTensor):
        return host_extremes(bound)
    is_traced = active_trace() is not None
    if is_traced and not are_checked():
        return None
    index = index if bound.of is None else bound.of(index)
    array = index.raw() if index._storage.manual is not None else index.value()
    extremes = _low_and_high(array, bound.ignored)
    if is_traced:
        flag(bound, name_of(func), extremes)
        return None
    low, high = host_value(extremes).tolist()
    return None if low > high else (low, high)


@partial(jax.jit, static_argnums=1)
def _low_and_high(array: jax.Array, ignored: int | None) -> jax.Array:
    if ignored is None:
        return jnp.stack([jnp.min(array), jnp.max(array)])
    limits = jnp.iinfo(array.dtype)
    low = jnp.where(array == ignored, limits.max, array)
    high = jnp.where(array == ignored, limits.min, array)
    return jnp.stack([jnp.min(low), jnp.max(high)])


def as_array(value: Any) -> Any:
    """Return the JAX value of a tensor argument; anything else as it is."""
    if isinstance(value, JaxTensor):
        return value.value()
    if isinstance(value, torch.Tensor):
        return jnp.asarray(np.array(numpy_from_torch(value)))
    return unwrap_number(value)


def _wrapped(func: Any, result: Any, meta: Any, axes: jax_manual.ManualAxes | None = None) -> Any:
    if isinstance(result, (jax.Array, np.ndarray, np.generic)):
        array = result if isinstance(result, jax.Array) else jnp.asarray(result)
        return _wrap_one(func, array, meta, axes)
    if isinstance(result, (tuple, list)):
        metas = meta if isinstance(meta, (tuple, list)) else [None] * len(result)
        if len(metas) != len(result):
            raise UnsupportedOpError(
                f"The op {func} gave {len(result)} results where torch gives {len(metas)}. Its "
                "lowering on the JAX runtime is wrong for these arguments. Please report it with "
                "the arguments' shapes."
            )
        wrapped = [_wrapped(func, r, m, axes) for r, m in zip(result, metas, strict=True)]
        return wrapped if isinstance(result, list) else tuple(wrapped)
    return result


def _wrap_one(
    func: Any, array: jax.Array, meta: Meta | None, axes: jax_manual.ManualAxes | None
) -> JaxTensor:
    shape = tuple(array.shape if axes is None else array.shape[axes.ndim :])
    if not isinstance(meta, Meta):
        return JaxTensor(Storage(array, manual=axes), shape=shape)
    if shape != meta.shape:
        raise UnsupportedOpError(
            f"The op {func} gave shape={shape} where torch gives {meta.shape}. Its "
            "lowering on the JAX runtime is wrong for these arguments. Please report it with the "
            "arguments' shapes."
        )
    dtype = jax_dtype(meta.dtype)
    array = array if array.dtype == dtype else array.astype(dtype)
    storage = Storage(array, manual=axes)
    return JaxTensor(storage, shape=shape, stride=meta.stride, dtype=meta.dtype)


def _decompose(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    from torch._decomp import decomposition_table

    decomposition = COMPOSED.get(func) or decomposition_table.get(func)
    # torch's reference decompositions end in prims, whose aten form is what we lower. An aten op
    # that decomposes into its own prim would come back here for ever.
    if func.namespace == "prims":
        decomposition = func.overloadpacket.impl_aten
    if decomposition is not None and func not in _decomposing:
        _decomposing.add(func)
        try:
            return _all_jax(decomposition(*args, **kwargs), (args, kwargs))
        finally:
            _decomposing.discard(func)
    if torch._C._dispatch_has_kernel_for_dispatch_key(
        func.name(), torch._C.DispatchKey.CompositeImplicitAutograd
    ):
        return _all_jax(func.decompose(*args, **kwargs), (args, kwargs))
    raise UnsupportedOpError(
        f"The op {func} was called on tensors of the JAX runtime. It has no lowering to XLA there. "
        "Write it with other ops, move the tensor to the host with .full_tensor().cpu(), or "
        "register a lowering (see xla_dtensor/runtimes/README.md)."
    )


def _all_jax(result: Any, given: Any) -> Any:
    """Put what a decomposition made on the host, such as an empty tensor, into JaxTensors."""

    def made(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or isinstance(value, JaxTensor) or value.is_meta:
            return value
        # In a manual region a host tensor is the same on every device, and may stay.
        in_manual = jax_manual.axes_of(given) is not None
        return value if in_manual else JaxTensor(Storage(as_array(value)))

    return map_nested(made, result)


def _run_inplace_view(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """``t_``, ``squeeze_``, ...: the tensor becomes its own view."""
    functional, _ = _functional_variant(func)
    target, trace = args[0], active_trace()
    if trace is not None:
        trace.refuse_new_shape(target)
    if functional is None or jax_views.view_rule(functional) is None:
        raise UnsupportedOpError(
            f"The op {func} changes the shape of a tensor of the JAX runtime in place. It has no "
            "form that returns a view instead. Make a new tensor."
        )
    view = run_op(functional, args, kwargs)
    torch.Tensor.data.__set__(target, view)  # pyright: ignore
    target._steps, target._cached = view._steps, None
    return target


def _run_mutating(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    functional, prefix = _functional_variant(func)
    names = [a.name for a in func._schema.arguments]
    given = dict(zip(names, args, strict=False)) | dict(kwargs)
    written = written_arguments(func)
    if functional is None:
        raise UnsupportedOpError(
            f"The op {func} writes to a tensor of the JAX runtime. It has no functional form that "
            "could be lowered to XLA. Use the op that returns its result instead."
        )
    refuse_overlap(func, args, kwargs)
    if writes_to_a_list(func):
        write_foreach(functional, args, kwargs, write)
        return None if not func._schema.returns else args[0]
    if prefix:
        result = run_op(functional, args, kwargs)
    else:
        accepted = [a for a in functional._schema.arguments if a.name in given]
        by_position = [given[a.name] for a in accepted if not a.kwarg_only]
        result = run_op(
            functional, by_position, {a.name: given[a.name] for a in accepted if a.kwarg_only}
        )
    targets = [given[name] for name in written]
    own = sum(returned.alias_info is None for returned in func._schema.returns)
    if own:  # batch norm returns its output and writes the running statistics
        for target, value in zip(targets, result[own:], strict=True):
            write(target, value)
        return result[0] if own == 1 else tuple(result[:own])
    if len(targets) == 1 and isinstance(targets[0], (list, tuple)):
        _write_all(targets[0], result)
    else:
        _write_all(targets, result if isinstance(result, (tuple, list)) else [result])
    if not func._schema.returns:
        return None
    return targets[0] if len(targets) == 1 else tuple(targets)


def _write_all(targets: Sequence[Any], results: Sequence[Any]) -> None:
    for target, result in zip(targets, results, strict=True):
        write(target, result)


def write(target: torch.Tensor, result: torch.Tensor) -> None:
    """Give `target` the values of `result`, cast to its dtype and broadcast to its shape."""
    if jax_manual.axes_of((target, result)) is not None:
        jax_manual_ops.write(target, result)
        return
    if not isinstance(target, JaxTensor):
        if isinstance(result, JaxTensor):
            refuse_write_to_host(target)
        target.copy_(result.host() if isinstance(result, JaxTensor) else result)
        return
    value = in_dtype(jnp.asarray(as_array(result)), jax_dtype(target.dtype))
    shape = tuple(target.shape)
    if value.shape != shape and np.broadcast_shapes(value.shape, shape) != shape:
        raise WriteError(
            f"A result of shape={value.shape} was to be written to a tensor of shape={shape}. An "
            "op in place cannot make its tensor larger. Use the op that returns its result instead."
        )
    target.set_value(jnp.broadcast_to(value, shape))


_decomposing: set[Any] = set()
_VARIANTS: dict[Any, tuple[Any, bool]] = {}


def _functional_variant(func: Any) -> tuple[Any, bool]:
    """Return the functional op of a mutating one, and whether it takes the very same arguments."""
    if func not in _VARIANTS:
        _VARIANTS[func] = _look_up_variant(func)
    return _VARIANTS[func]


def _look_up_variant(func: Any) -> tuple[Any, bool]:
    namespace, _, name = func._schema.name.partition("::")
    ops = getattr(torch.ops, namespace)
    if name.startswith("__i"):  # mask &= other
        return _overload(ops, (f"__{name[3:]}",), _arguments(func)), True
    if name.endswith("_"):
        return _overload(ops, (name[:-1], f"{name[:-1]}_functional"), _arguments(func)), True
    if any(returned.alias_info is None for returned in func._schema.returns):
        return _overload(ops, (f"{name}_functional",), _arguments(func)), True
    kept = [(n, t) for n, t in _arguments(func) if not _is_written(func, n)]
    found = _overload(ops, (name,), kept)
    return (
        (found, False) if found is not None else (_overload(ops, (name,), _arguments(func)), False)
    )


def _overload(ops: Any, names: Sequence[str], arguments: Sequence[Any]) -> Any:
    """Find the functional overload with exactly these arguments.

    Names alone can mislead: pow.Scalar takes the scalar first and pow_.Scalar takes it second.
    """
    for name in names:
        packet = getattr(ops, name, None)
        for overload in packet.overloads() if packet is not None else ():
            op = getattr(packet, overload)
            if not op._schema.is_mutable and _arguments(op) == list(arguments):
                return op
    return None


def _arguments(func: Any) -> list[tuple[str, str]]:
    return [(a.name, str(a.type)) for a in func._schema.arguments]


def _is_written(func: Any, name: str) -> bool:
    return any(
        a.name == name and a.alias_info is not None and a.alias_info.is_write
        for a in func._schema.arguments
    )
