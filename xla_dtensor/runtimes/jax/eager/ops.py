"""Run one aten op on JaxTensors, below autograd: the order in which a rule is looked for.

1. *Special* ops that need tensors, not arrays: copies, reading on the host.
2. *Views*: a new JaxTensor over the same storage (``manual``).
3. *Mutating* ops, known from their schema: the functional op, then a write through the views.
4. *Functional* ops: our own lowering, else torch's decomposition into ops that have one.

Every functional result is held to what torch's meta device says of it (``op_meta``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache, cached_property, lru_cache, partial
from math import prod
from typing import TYPE_CHECKING, Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax
from jax.sharding import AxisType, PartitionSpec
from torch._C import DispatchKey

from mesh_utils import Axis, Mesh
from xla_dtensor.core import Layout
from xla_dtensor.core.errors import CompileError, DistributeError, UnsupportedOpError, WriteError
from xla_dtensor.runtimes import functional as functional_ops
from xla_dtensor.runtimes import scalars
from xla_dtensor.runtimes.bounds import (
    BOUNDS,
    Bound,
    are_checked,
    check_bounds,
    host_extremes,
    name_of,
)
from xla_dtensor.runtimes.jax.arrays import values
from xla_dtensor.runtimes.jax.arrays.sharding import host_value, lying_like, named_sharding
from xla_dtensor.runtimes.jax.arrays.storage import Storage
from xla_dtensor.runtimes.jax.arrays.trace import (
    Trace,
    active_trace,
    is_tracer,
    refuse_write_to_host,
)
from xla_dtensor.runtimes.jax.arrays.values import (
    in_dtype,
    jax_dtype,
    numpy_from_torch,
    torch_dtype,
    x64,
)
from xla_dtensor.runtimes.jax.eager import inline, manual
from xla_dtensor.runtimes.jax.eager.checks import flag, truth
from xla_dtensor.runtimes.jax.eager.composed import COMPOSED
from xla_dtensor.runtimes.jax.eager.manual import refuse_value
from xla_dtensor.runtimes.jax.eager.scalar import sym_number, unwrap_number
from xla_dtensor.runtimes.jax.eager.tensor import JaxTensor
from xla_dtensor.runtimes.jax.lower import find_lowering, random
from xla_dtensor.runtimes.jax.lower.table import Lowering
from xla_dtensor.runtimes.nested import map_nested
from xla_dtensor.runtimes.op_meta import Meta, output_meta, raise_torchs_error
from xla_dtensor.runtimes.whole_ops import is_foreach, run_foreach, writes_to_a_list
from xla_dtensor.runtimes.written import refuse_overlap, written_arguments

if TYPE_CHECKING:
    from xla_dtensor.runtimes.jax.runtime import JaxRuntime

__all__ = ["JaxProgram", "run_op"]


aten = torch.ops.aten

# ----------------------------------------------------------------------------------------- Compared
#
# What an op's result is compared with lies in memory once, in a compiled step.
#
# PyTorch finds the gradient of a largest element by comparing::
#
#     top = x.amax(1, keepdim=True)        x = a * b + c, computed in the step
#     grad_x = grad * (x == top)           every element that is the largest
#
# XLA may compute `x` twice, once fused into the reduction and once into the comparison, and round a
# * b in one of them only. Then no element is equal to the largest, and the gradient is zero or NaN,
# in silence. Such an op reads its operand through an ``optimization_barrier``, and so does whatever
# reads the operand later.
#
# XLA:CPU of JAX before 0.11.2 drops barriers before it fuses, and stays wrong.
#
# Invariant: values do not change, and neither do storages that are older than the step.

_NORMS = (aten.linalg_vector_norm.default, aten._cdist_forward.default, aten._pdist_forward.default)
COMPARED = frozenset(
    {
        *(aten.amax.default, aten.amin.default, aten.aminmax.default),
        *(aten.max.default, aten.min.default, aten.median.default, aten.nanmedian.default),
        *(aten.scatter_reduce.two, aten.index_reduce.default, *_NORMS),
    }
)
"""Ops whose gradient PyTorch finds by comparing their operands with their result."""


def read_once(trace: Trace, func: Any, args: Sequence[Any]) -> None:
    """Let tensors that a step computes be computed once, for all that reads them from now on.

    Args:
        trace: The step's.
        func: One of `COMPARED`. Of the norms only infinite ones compare.
        args: Its arguments, JaxTensors among them.
    """
    if func in _NORMS and not any(isinstance(n, float) and math.isinf(n) for n in args):
        return
    for tensor in args:
        if not isinstance(tensor, JaxTensor) or not trace.owns(tensor._storage):
            continue
        array = tensor._storage.array
        if is_tracer(array) and jnp.issubdtype(array.dtype, jnp.inexact):
            tensor._storage.array = lax.optimization_barrier(array)


# -------------------------------------------------------- Ops that need tensors rather than arrays
#
# Copies between host and devices, reading, rebinding.

SPECIAL: dict[Any, Callable[..., Any]] = {}


def _special(*funcs: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(rule: Callable[..., Any]) -> Callable[..., Any]:
        SPECIAL.update(dict.fromkeys(funcs, rule))
        return rule

    return register


@_special(aten._local_scalar_dense.default)
def _item(x: JaxTensor) -> Any:
    trace = active_trace()
    number = None if trace is None else trace.rows.number(x)
    if number is not None:
        return number
    array = x.value()
    # An older tensor holds an array even now, though it is an input of the program like any other.
    if is_tracer(array) or (trace is not None and not trace.owns(x._storage)):
        if x.dtype == torch.bool:
            return truth(array)
        return sym_number(array.reshape(()))
    return host_value(array).item()


@_special(aten.is_pinned.default)
def _is_pinned(x: JaxTensor, device: Any = None) -> bool:
    return False  # asked by torch.distributed.checkpoint; the values lie on the devices


@_special(aten.copy_.default, torch.ops.prims.copy_to.default)
def _copy_(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    write(target, source)
    return target


@_special(aten._has_same_storage_numel.default)
def _has_same_storage_numel(primal: torch.Tensor, tangent: torch.Tensor) -> bool:
    return primal.numel() == tangent.numel()  # forward mode asks whether they may lie alike


@_special(aten.eye.m_out)
def _eye_out(n: int, m: int, *, out: torch.Tensor) -> torch.Tensor:
    write(out, torch.eye(n, m, dtype=out.dtype, device="cpu"))
    return out


@_special(aten.native_batch_norm.default, aten._native_batch_norm_legit.default)
def _native_batch_norm(
    x: Any,
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_var: Any,
    training: bool,
    momentum: float,
    eps: float,
) -> Any:
    """They write their running statistics; ``native_batch_norm`` does so unsaid by its schema."""
    options = (training, momentum, eps)
    if running_mean is None and running_var is None:
        return run_op(aten._native_batch_norm_legit.no_stats, (x, weight, bias, *options), {})
    # The functional op takes both; one that is missing is not written, whatever it holds.
    means = running_var if running_mean is None else running_mean
    variances = running_mean if running_var is None else running_var
    *outputs, new_mean, new_var = run_op(
        aten._native_batch_norm_legit_functional.default,
        (x, weight, bias, means, variances, *options),
        {},
    )
    if training:
        for statistic, update in ((running_mean, new_mean), (running_var, new_var)):
            if statistic is not None:
                write(statistic, update)
    else:  # as torch on the CPU: nothing to save
        outputs[1:] = [run_op(aten.new_zeros.default, (x, [0]), {}) for _ in outputs[1:]]
    return tuple(outputs)


@_special(aten._to_copy.default)
def _to_copy(
    x: JaxTensor, *, dtype: torch.dtype | None = None, device: Any = None, **kwargs: Any
) -> Any:
    if device is not None and torch.device(device).type == "meta":
        return torch.empty_strided(x.shape, x.stride(), dtype=dtype or x.dtype, device="meta")
    meta = output_meta(aten._to_copy.default, (x,), {"dtype": dtype, **kwargs})
    array = jnp.array(in_dtype(x.raw(), jax_dtype(dtype or x.dtype)), copy=True)
    storage = Storage(array, manual=x._storage.manual)
    return JaxTensor(storage, shape=x.shape, stride=meta.stride, dtype=dtype or x.dtype)


@_special(aten.equal.default)
def _equal(a: JaxTensor, b: JaxTensor) -> bool:
    if tuple(a.shape) != tuple(b.shape):
        return False
    same = jnp.all(as_array(a) == as_array(b))
    return truth(same) if is_tracer(same) else bool(host_value(same))


@_special(aten.allclose.default)
def _allclose(a: JaxTensor, b: JaxTensor, *args: Any, **kwargs: Any) -> bool:
    close: Any = torch.isclose(a, b, *args, **kwargs).all()
    is_close = close.value()
    return truth(is_close) if is_tracer(is_close) else bool(host_value(is_close))


@_special(aten.set_.source_Tensor)
def _set_(target: JaxTensor, source: JaxTensor) -> JaxTensor:
    if target._storage.manual != source._storage.manual:
        refuse_value(target if target._storage.manual is not None else source)
    if target.shape != source.shape or target.dtype != source.dtype:
        raise RuntimeError(
            f"set_ was called with a source of shape={tuple(source.shape)}, dtype={source.dtype} "
            f"on a tensor of shape={tuple(target.shape)}, dtype={target.dtype}. The JAX runtime "
            "cannot change a tensor's shape or dtype in place. Make a new tensor."
        )
    target._storage, target._steps, target._cached = source._storage, source._steps, None
    source._storage.note_alias(target)
    return target


# ------------------------------------------------------------------ strides


@_special(aten.resize_as_.default)
def _resize_as_(x: JaxTensor, template: torch.Tensor, *, memory_format: Any = None) -> JaxTensor:
    return _resize_(x, template.shape, memory_format=memory_format)


@_special(aten.resize_.default)
def _resize_(x: JaxTensor, size: Sequence[int], *, memory_format: Any = None) -> JaxTensor:
    is_plain = memory_format in (None, torch.contiguous_format, torch.preserve_format)
    if prod(size) != x.numel() or not is_plain:
        raise UnsupportedOpError(
            f"resize_ was called with size={tuple(size)}, memory_format={memory_format} on a "
            f"tensor of shape={tuple(x.shape)}. A tensor of the JAX runtime keeps its number of "
            "elements. Pass a size with as many, or make a new tensor."
        )
    if x.is_contiguous():
        view: Any = aten.view.default(x, size)
    else:
        stride = torch.empty(tuple(size), device="meta").stride()
        view = aten.as_strided.default(x, size, stride, x.storage_offset())
    torch.Tensor.data.__set__(x, view)  # pyright: ignore
    x._steps, x._cached = view._steps, None
    return x


# ------------------------------------------------------------------ gradient scaling


@_special(aten._amp_foreach_non_finite_check_and_unscale_.default)
def _check_and_unscale(
    grads: Sequence[torch.Tensor], found_inf: torch.Tensor, inv_scale: torch.Tensor
) -> None:
    """``GradScaler.unscale_``: `found_inf` is 1 after a gradient with a NaN or an infinity."""
    finite = torch.stack([grad.isfinite().all() for grad in grads]).all()
    found_inf.copy_(torch.where(finite, found_inf, 1.0))
    for grad in grads:
        grad.mul_(inv_scale)


# --------------------------------------------------- Run one aten op on JaxTensors, below autograd


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
    if scalars.in_use:
        args, kwargs = scalars.settled(func, args, kwargs)
    host = trace.host
    call = (args, kwargs) if host is None else host.admitted(func, args, kwargs)
    with trace.sources.of_op():
        try:
            return _run(func, *call)
        except CompileError:
            if host is None or call[0] is args:
                raise
            call_of_values = host.with_values(func, args, kwargs)
            if call_of_values is None:
                raise
            # Their values have to be known: a mask's, on which the shape of the result depends.
            return _run(func, *call_of_values)


def _run(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    with x64():
        special = SPECIAL.get(func) or functional_ops.KERNELS.get(func)
        if special is not None:
            return special(*args, **kwargs)
        view = manual.view_rule(func)
        if view is not None and isinstance(args[0], JaxTensor):
            return view(func, args, kwargs)
        if torch.Tag.inplace_view in func.tags:
            return _run_inplace_view(func, args, kwargs)
        if func._schema.is_mutable:
            return _run_mutating(func, args, kwargs)
        if is_foreach(func):
            return run_foreach(func, args, kwargs)
        trace = active_trace()
        of_rows = None if trace is None else trace.rows.run(func, args, kwargs)
        return _run_functional(func, args, kwargs) if of_rows is None else of_rows


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
    axes = manual.axes_of(args, kwargs)
    if axes is not None:
        arrays = manual.run_lowering(axes, func, lowering, args, kwargs, meta)
        return _to_tensors(func, arrays, meta, axes)
    operands = (None, *args[1:]) if lowering.is_factory else tuple(args)
    array_args, array_kwargs = map_nested(as_array, (operands, dict(kwargs)))
    options = {"meta": meta} if lowering.wants_meta else {}
    try:
        with lying_like(_template(lowering, args)):
            arrays = inline.call(func, lowering.function, array_args, {**array_kwargs, **options})
    except (TypeError, ValueError, AttributeError):  # JAX's, or a lowering's that wants the meta
        raise_torchs_error(func, args, kwargs)
        raise
    return _to_tensors(func, arrays, meta)


def _template(lowering: Lowering, args: Sequence[Any]) -> jax.Array | None:
    """Return the array as which new values of an eager op are to lie; None for none."""
    makes_new = lowering.is_factory or random.draws(lowering)
    x = args[0] if makes_new and args else None
    if active_trace() is not None or not isinstance(x, JaxTensor) or x._steps:
        return None
    storage = x._storage
    return None if storage.row is not None or is_tracer(storage.array) else storage.array


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


def as_array(argument: Any) -> Any:
    """Return the JAX value of a tensor argument; anything else as it is."""
    if isinstance(argument, JaxTensor):
        return argument.value()
    if isinstance(argument, torch.Tensor):
        return jnp.asarray(np.array(numpy_from_torch(argument)))
    return unwrap_number(argument)


def _to_tensors(func: Any, arrays: Any, meta: Any, axes: manual.ManualAxes | None = None) -> Any:
    """Return a lowering's arrays as tensors of the shapes, strides and dtypes that torch says."""
    if isinstance(arrays, (tuple, list)):
        metas = meta if isinstance(meta, (tuple, list)) else [None] * len(arrays)
        if len(metas) != len(arrays):
            raise UnsupportedOpError(
                f"The op {func} gave {len(arrays)} results where torch gives {len(metas)}. Its "
                "lowering on the JAX runtime is wrong for these arguments. Please report it with "
                "the arguments' shapes."
            )
        tensors = [_to_tensors(func, a, m, axes) for a, m in zip(arrays, metas, strict=True)]
        return tensors if isinstance(arrays, list) else tuple(tensors)
    if not isinstance(arrays, (jax.Array, np.ndarray, np.generic)):
        return arrays
    array = arrays if isinstance(arrays, jax.Array) else jnp.asarray(arrays)
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
    storage = Storage(array if array.dtype == dtype else array.astype(dtype), manual=axes)
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
            return _onto_devices(decomposition(*args, **kwargs), args, kwargs)
        finally:
            _decomposing.discard(func)
    if _has_kernel(func, DispatchKey.CompositeImplicitAutograd):
        return _onto_devices(func.decompose(*args, **kwargs), args, kwargs)
    if _is_users(func):
        return _run_users(func, args, kwargs)
    raise UnsupportedOpError(
        f"The op {func} was called on tensors of the JAX runtime. It has no lowering to XLA there. "
        "Write it with other ops, move the tensor to the host with .full_tensor().cpu(), or "
        "register a lowering (see xla_dtensor/runtimes/README.md)."
    )


def _has_kernel(func: Any, key: DispatchKey) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key)


def _is_users(func: Any) -> bool:
    """Tell whether torch.library.custom_op has made an op, for all devices, of other ops.

    aten's own kernels of that key are C++ that writes into memory.
    """
    key = DispatchKey.CompositeExplicitAutograd
    return func.namespace not in ("aten", "prims") and _has_kernel(func, key)


def _run_users(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    outputs = func._op_dk(DispatchKey.CompositeExplicitAutograd, *args, **kwargs)
    return _onto_devices(outputs, args, kwargs)


def _onto_devices(outputs: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Put what a decomposition made on the host, such as an empty tensor, into JaxTensors."""

    def put(output: Any) -> Any:
        if not isinstance(output, torch.Tensor) or isinstance(output, JaxTensor) or output.is_meta:
            return output
        # In a manual region a host tensor is the same on every device, and may stay.
        in_manual = manual.axes_of(args, kwargs) is not None
        return output if in_manual else JaxTensor(Storage(as_array(output)))

    return map_nested(put, outputs)


def _run_inplace_view(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """``t_``, ``squeeze_``, ...: the tensor becomes its own view."""
    functional, _ = _functional_variant(func)
    target, trace = args[0], active_trace()
    if trace is not None:
        trace.refuse_new_shape(target)
    if functional is None or manual.view_rule(functional) is None:
        raise UnsupportedOpError(
            f"The op {func} changes the shape of a tensor of the JAX runtime in place. It has no "
            "form that returns a view instead. Make a new tensor."
        )
    view = run_op(functional, args, kwargs)
    torch.Tensor.data.__set__(target, view)  # pyright: ignore
    target._steps, target._cached = view._steps, None
    return target


def _run_mutating(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    functional, takes_the_same = _functional_variant(func)
    if functional is None and _is_users(func):
        return _run_users(func, args, kwargs)
    if functional is None:
        raise UnsupportedOpError(
            f"The op {func} writes to a tensor of the JAX runtime. It has no functional form that "
            "could be lowered to XLA. Use the op that returns its result instead."
        )
    refuse_overlap(func, args, kwargs)
    if writes_to_a_list(func):
        if _meet([argument for argument in args if isinstance(argument, (list, tuple))]):
            for i in range(len(args[0])):  # as PyTorch does, each sees what was written before
                alone = [a[i : i + 1] if isinstance(a, (list, tuple)) else a for a in args]
                _run_mutating(func, alone, kwargs)
            return None if not func._schema.returns else args[0]
        for target, new_value in zip(args[0], run_foreach(functional, args, kwargs), strict=True):
            write(target, new_value)
        return None if not func._schema.returns else args[0]
    by_name = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | dict(kwargs)
    targets = [by_name[name] for name in written_arguments(func)]
    if takes_the_same:
        outputs = run_op(functional, args, kwargs)
    else:
        accepted = [a for a in functional._schema.arguments if a.name in by_name]
        outputs = run_op(
            functional,
            [by_name[a.name] for a in accepted if not a.kwarg_only],
            {a.name: by_name[a.name] for a in accepted if a.kwarg_only},
        )
    outputs = outputs if isinstance(outputs, (tuple, list)) else (outputs,)
    # Batch norm returns its output, and writes the running statistics behind it.
    num_returned = sum(output.alias_info is None for output in func._schema.returns)
    is_list = len(targets) == 1 and isinstance(targets[0], (list, tuple))
    updates = outputs[num_returned:]
    for target, update in zip(targets[0] if is_list else targets, updates, strict=True):
        write(target, update)
    if not func._schema.returns:
        return None
    returned = outputs[:num_returned] or targets
    return returned[0] if len(returned) == 1 else tuple(returned)


def _meet(lists: Sequence[Sequence[Any]]) -> bool:
    """Tell whether one position of the lists writes to what another one reads or writes."""
    places: dict[int, int] = {}
    for number, tensors in enumerate(lists):
        for position, tensor in enumerate(tensors):
            if isinstance(tensor, JaxTensor):
                key = id(tensor._storage)
                found = places.get(key) if number else places.setdefault(key, position)
                if found not in (None, position):
                    return True
    return False


def write(target: torch.Tensor, source: torch.Tensor) -> None:
    """Give `target` the values of `source`, cast to its dtype and broadcast to its shape."""
    if manual.axes_of((target, source)) is not None:
        manual.write(target, source)
        return
    if not isinstance(target, JaxTensor):
        if isinstance(source, JaxTensor):
            refuse_write_to_host(target)
        target.copy_(source.host() if isinstance(source, JaxTensor) else source)
        return
    trace = active_trace()
    if trace is not None and trace.rows.give(target, source):
        return
    array = in_dtype(jnp.asarray(as_array(source)), jax_dtype(target.dtype))
    shape = tuple(target.shape)
    if array.shape != shape and np.broadcast_shapes(array.shape, shape) != shape:
        raise WriteError(
            f"A result of shape={array.shape} was to be written to a tensor of shape={shape}. An "
            "op in place cannot make its tensor larger. Use the op that returns its result instead."
        )
    target.set_value(jnp.broadcast_to(array, shape))


_decomposing: set[Any] = set()


@cache
def _functional_variant(func: Any) -> tuple[Any, bool]:
    """Return the functional op of a mutating one, and whether it takes the very same arguments."""
    namespace, _, name = func._schema.name.partition("::")
    ops = getattr(torch.ops, namespace)
    if name.startswith("__i"):  # mask &= other
        return _overload(ops, (f"__{name[3:]}",), _arguments(func)), True
    if name.endswith("_"):
        return _overload(ops, (name[:-1], f"{name[:-1]}_functional"), _arguments(func)), True
    if any(returned.alias_info is None for returned in func._schema.returns):
        return _overload(ops, (f"{name}_functional",), _arguments(func)), True
    targets = written_arguments(func)
    inputs = [(n, t) for n, t in _arguments(func) if n not in targets]
    return _overload(ops, (name,), inputs) or _overload(ops, (name,), _arguments(func)), False


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


# --------------------------------- A JAX function on each device's tiles, for xla_dtensor.call_jax
#
# The function runs under ``jax.shard_map`` over all axes of a mesh, on a JAX mesh that has the
# DeviceMesh's own axis names, so that it can call ``jax.lax.psum(x, "tp")``. That mesh lists the
# devices in the root's order, as every mesh of a process has to: axes are moved, not devices. A
# mesh (q=4, p=2) whose devices are those of a root (2, 4) read column by column is (p=2, q=4) to
# JAX. Only an axis that takes several digits of the root's order, apart from each other, has no
# such form.
#
# Results are given on the mesh of prime factors that all payloads are on (``sharding``).

_REDUCTIONS = {"sum": lax.psum, "avg": lax.pmean}


@lru_cache(maxsize=256)
def named_mesh(mesh: Mesh, root: Mesh) -> jax.sharding.Mesh:
    """Return a JAX mesh with the axis names of `mesh`, over the root's devices in its order.

    Args:
        mesh: The mesh; axes without a name are called "0", "1", ...
        root: The process's root mesh for its devices. What `mesh` leaves of it gets names that
            start with an underscore.

    Raises:
        DistributeError: An axis is no single digit of the root's order.
    """
    digits = mesh.digits(root)
    if digits is None:
        _refuse_order(mesh, mesh.axis_names[0])
    axes: list[tuple[int, int, str]] = []
    ones: list[str] = []
    for axis, axis_digits in zip(mesh.axis_names, digits, strict=True):
        if len(axis_digits) > 1:
            _refuse_order(mesh, axis)
        axes += [(stride, size, str(axis)) for size, stride in axis_digits]
        if not axis_digits:
            ones.append(str(axis))
    sizes, names, outer = [], [], root.size()
    for stride, size, name in [*sorted(axes, reverse=True), (1, 1, "")]:
        if outer > stride * size:
            sizes.append(outer // (stride * size))
            names.append(f"_rest{len(names)}")
        if size > 1:
            sizes.append(size)
            names.append(name)
        outer = stride
    by_id = {device.id: device for device in values.devices()}
    devices = np.array([by_id[i] for i in root.device_ids.flat], dtype=object)
    shape = (*sizes, *(1 for _ in ones))
    names += ones
    return jax.sharding.Mesh(
        devices.reshape(shape), names, axis_types=(AxisType.Auto,) * len(names)
    )


def _refuse_order(mesh: Mesh, axis: Axis) -> NoReturn:
    raise DistributeError(
        f"call_jax was called on a mesh {mesh!r}. Its axis {axis!r} walks through the devices in "
        "several strides of the process's device order, and JAX has no one name for that. Use a "
        "mesh each of whose axes is one axis, or some neighbouring axes, of the first mesh made."
    )


class JaxProgram:
    """A JAX function for one kind of arguments.

    Args:
        fn: The function.
        arguments: Makes its positional and keyword arguments from a list of tiles.
        mesh: The mesh.
        in_layouts: How each tensor argument lies.
        runtime: The runtime.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        arguments: Callable[[Sequence[Any]], tuple[Sequence[Any], Mapping[str, Any]]],
        mesh: Mesh,
        in_layouts: Sequence[Layout],
        runtime: JaxRuntime,
    ) -> None:
        self._fn, self._arguments = fn, arguments
        self._root = runtime.root(mesh)
        self._mesh = named_mesh(mesh, self._root)
        self._in_layouts = tuple(in_layouts)
        self._out_layouts: tuple[Layout, ...] = ()
        self._reductions: tuple[tuple[tuple[str, str], ...], ...] = ()
        self._for_grad: dict[tuple[bool, ...], Any] = {}
        self._pulls: dict[tuple[bool, ...], Any] = {}
        self.gives_one = False

    # ------------------------------------------------------------------ what it returns

    def tiles(self, payloads: Sequence[torch.Tensor]) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Return shape and dtype of what `fn` returns on one device."""

        def run(*tiles: Any) -> Any:
            outputs = self._call(*tiles)
            self.gives_one = not isinstance(outputs, (tuple, list))
            return (outputs,) if self.gives_one else tuple(outputs)

        with x64():
            arrays = [as_array(p) for p in payloads]
            shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays]
            tiles = jax.eval_shape(self._mapped(run, PartitionSpec()), *shapes)
        return [_shape_and_dtype(tile) for tile in tiles]

    def set_outputs(
        self, layouts: Sequence[Layout], reductions: Sequence[Sequence[tuple[Axis, str]]]
    ) -> None:
        """Say how the outputs lie, and over which axes ("sum" or "avg") each is reduced first."""
        self._out_layouts = tuple(layouts)
        self._reductions = tuple(tuple((str(a), op) for a, op in pairs) for pairs in reductions)

    # ------------------------------------------------------------------ running

    def run(self, payloads: Sequence[torch.Tensor]) -> list[JaxTensor]:
        """Return the outputs."""
        with x64():
            arrays = [as_array(p) for p in payloads]
            outputs = (self._on_tiles if active_trace() else self._jitted)(*arrays)
        return self._to_tensors(outputs, self._out_layouts)

    def run_for_grad(
        self, payloads: Sequence[torch.Tensor], needs_grad: tuple[bool, ...]
    ) -> tuple[list[JaxTensor], Any]:
        """Return the outputs, and what :meth:`gradients` needs; of which inputs, `needs_grad`."""
        with x64():
            arrays = [as_array(p) for p in payloads]
            forward: Callable[..., Any] = partial(self._forward, needs_grad)
            if not active_trace():
                if needs_grad not in self._for_grad:
                    pins = (self._pins(self._out_layouts), None)
                    self._for_grad[needs_grad] = jax.jit(forward, out_shardings=pins)
                forward = self._for_grad[needs_grad]
            outputs, pull = forward(*arrays)
        return self._to_tensors(outputs, self._out_layouts), pull

    def gradients(
        self,
        pull: Any,
        needs_grad: tuple[bool, ...],
        outputs: Sequence[tuple[tuple[int, ...], torch.dtype]],
        grads: Sequence[torch.Tensor | None],
    ) -> list[JaxTensor | None]:
        """Return the gradient of each input, None where it is not needed.

        Args:
            pull: From :meth:`run_for_grad`.
            needs_grad: As there.
            outputs: Global shape and torch dtype of each output.
            grads: The gradient of each output; None is zero.
        """
        with x64():
            cotangents = tuple(
                jnp.zeros(shape, jax_dtype(dtype))
                if grad is None
                else as_array(grad).astype(jax_dtype(dtype))
                for (shape, dtype), grad in zip(outputs, grads, strict=True)
                if dtype.is_floating_point or dtype.is_complex
            )
            layouts = [layout for layout, n in zip(self._in_layouts, needs_grad, strict=True) if n]
            if active_trace():
                arrays = pull(cotangents)
            else:
                if needs_grad not in self._pulls:
                    pins = self._pins(layouts)
                    self._pulls[needs_grad] = jax.jit(lambda p, c: p(c), out_shardings=pins)
                arrays = self._pulls[needs_grad](pull, cotangents)
        tensors = iter(self._to_tensors(arrays, layouts))
        return [next(tensors) if n else None for n in needs_grad]

    # ------------------------------------------------------------------ the function for JAX

    def _call(self, *tiles: Any) -> Any:
        args, kwargs = self._arguments(tiles)
        return jax.tree.map(jnp.asarray, self._fn(*args, **kwargs))

    def _mapped(self, function: Callable[..., Any], out_specs: Any) -> Callable[..., Any]:
        return jax.shard_map(
            function,
            mesh=self._mesh,
            in_specs=tuple(map(_partition_spec, self._in_layouts)),
            out_specs=out_specs,
            check_vma=False,
        )

    @cached_property
    def _on_tiles(self) -> Callable[..., Any]:
        def run(*tiles: Any) -> Any:
            outputs = self._call(*tiles)
            return tuple(map(_reduce, (outputs,) if self.gives_one else outputs, self._reductions))

        return self._mapped(run, tuple(map(_partition_spec, self._out_layouts)))

    @cached_property
    def _jitted(self) -> Callable[..., Any]:
        return jax.jit(self._on_tiles, out_shardings=self._pins(self._out_layouts))

    def _forward(self, needs_grad: tuple[bool, ...], *arrays: Any) -> Any:
        def run(*differentiated: Any) -> Any:
            pending = iter(differentiated)
            inputs = [next(pending) if n else a for n, a in zip(needs_grad, arrays, strict=True)]
            outputs = self._on_tiles(*inputs)
            # Only these have a gradient; the others go along as they are.
            return tuple(o for o in outputs if jnp.issubdtype(o.dtype, jnp.inexact)), outputs

        differentiated = [a for n, a in zip(needs_grad, arrays, strict=True) if n]
        _, pull, outputs = jax.vjp(run, *differentiated, has_aux=True)
        return outputs, pull

    def _pins(self, layouts: Sequence[Layout]) -> tuple[Any, ...]:
        return tuple(
            named_sharding(layout.op_sharding(self._root), self._root, layout.ndim)
            for layout in layouts
        )

    def _to_tensors(self, arrays: Sequence[Any], layouts: Sequence[Layout]) -> list[JaxTensor]:
        pins = self._pins(layouts)
        return [JaxTensor(Storage(a, sharding=p)) for a, p in zip(arrays, pins, strict=True)]


def _shape_and_dtype(tile: Any) -> tuple[tuple[int, ...], torch.dtype]:
    try:
        return tuple(tile.shape), torch_dtype(tile.dtype)
    except (AttributeError, KeyError, TypeError):
        raise UnsupportedOpError(
            f"A function in call_jax returned {tile!r}. It is no array of a dtype that torch "
            "has. Return arrays, one or a tuple of them, and convert them with astype."
        ) from None


def _partition_spec(layout: Layout) -> PartitionSpec:
    def entry_of_names(entry: Any) -> Any:
        if entry is None:
            return None
        return tuple(map(str, entry)) if isinstance(entry, tuple) else str(entry)

    return PartitionSpec(*map(entry_of_names, layout.to_partition_spec()))


def _reduce(output: Any, reductions: Sequence[tuple[str, str]]) -> Any:
    for axis, op in reductions:
        output = _REDUCTIONS[op](output, axis)
    return output
