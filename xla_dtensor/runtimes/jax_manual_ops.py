"""Ops on manual tensors: lowerings, views and writes, each run on every device's own tile.

The arguments of an op are taken apart into arrays, which the program is given, and all else, which
is a constant in it and part of the key by which it is kept.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
import torch

from xla_dtensor.errors import CompileError, ManualRegionError, UnsupportedOpError
from xla_dtensor.nested import leaves, map_nested
from xla_dtensor.runtimes.jax_convert import in_dtype, jax_dtype, numpy_from_torch
from xla_dtensor.runtimes.jax_host_inputs import host_input
from xla_dtensor.runtimes.jax_lowering import random
from xla_dtensor.runtimes.jax_lowering.table import Lowering
from xla_dtensor.runtimes.jax_manual import ManualAxes, axes_of, mapped
from xla_dtensor.runtimes.jax_scalar import unwrap_number
from xla_dtensor.runtimes.jax_tensor import JaxTensor, ViewStep, read_through, write_through
from xla_dtensor.runtimes.jax_trace import active_trace
from xla_dtensor.runtimes.op_meta import of_tensor

__all__ = ["keyed", "read_steps", "run_lowering", "write"]

aten = torch.ops.aten
# Ops whose Python floats are inputs of the kept program, not constants in it: optimizers call these
# with another number in each step. Their lowerings treat a number and a 0-dim array alike.
_FLOATS_VARY = frozenset(
    {
        aten.add.Tensor,
        aten.add.Scalar,
        aten.sub.Tensor,
        aten.sub.Scalar,
        aten.mul.Tensor,
        aten.mul.Scalar,
        aten.div.Tensor,
        aten.div.Scalar,
        aten.addcmul.default,
        aten.addcdiv.default,
        aten.lerp.Scalar,
    }
)


class _Slot:
    """Stands for the n-th array among an op's arguments."""

    def __init__(self, number: int) -> None:
        self.number = number


class _Arguments:
    """An op's arguments, taken apart into arrays and the rest."""

    def __init__(self, func: Any, axes: ManualAxes, args: Any, kwargs: Any) -> None:
        self.arrays: list[Any] = []
        self.stacked: list[bool] = []
        self._func, self._axes = func, axes
        self._floats_vary = func in _FLOATS_VARY and active_trace() is None
        self.structure = map_nested(self._taken, (tuple(args), dict(kwargs)))

    def add(self, array: Any, stacked: bool) -> _Slot:
        self.arrays.append(array)
        self.stacked.append(stacked)
        return _Slot(len(self.arrays) - 1)

    def _taken(self, value: Any) -> Any:
        if isinstance(value, JaxTensor):
            if value._storage.manual != self._axes:
                _refuse_mixing(self._func, self._axes, value)
            return self.add(value.raw(), True)
        if isinstance(value, torch.Tensor):
            stand_in = host_input(value)
            host = np.array(numpy_from_torch(value)) if stand_in is None else stand_in.value()
            return self.add(host, False)
        number = unwrap_number(value)
        if isinstance(number, jax.Array) or (isinstance(number, float) and self._floats_vary):
            return self.add(number, False)
        return number

    def filled(self, arrays: Sequence[Any]) -> Any:
        return map_nested(lambda v: arrays[v.number] if isinstance(v, _Slot) else v, self.structure)


def _refuse_mixing(func: Any, axes: ManualAxes, other: JaxTensor) -> NoReturn:
    what = "global" if other._storage.manual is None else "in another region"
    raise ManualRegionError(
        f"The op {func} was called on a manual tensor over the axes {axes.region.axes} and on a "
        f"tensor of shape={tuple(other.shape)} that is {what}. The one has a value per device, the "
        "other has not. Call enable_manual_sharding on the other one, or disable_manual_sharding "
        "on this one."
    )


def run_lowering(
    axes: ManualAxes, func: Any, lowering: Lowering, args: Any, kwargs: Any, meta: Any
) -> Any:
    """Run a functional op's lowering on every device's tiles.

    Args:
        axes: The manual axes of the tensors among the arguments.
        func: The op.
        lowering: Its lowering, a function on arrays.
        args: Its arguments: manual payloads, host tensors, anything else.
        kwargs: Its keyword arguments.
        meta: What torch says of the result, for one tile.

    Returns:
        The lowering's result, with stacked arrays.

    Raises:
        ManualRegionError: A tensor among the arguments is not of this region.
        UnsupportedOpError: The shape of the result depends on values.
    """
    try:
        return _run_lowering(axes, func, lowering, args, kwargs, meta)
    except (jax.errors.ConcretizationTypeError, jax.errors.NonConcreteBooleanIndexError):
        _refuse_values(func)
    except CompileError:
        if active_trace() is not None:
            raise
        _refuse_values(func)


def _refuse_values(func: Any) -> NoReturn:
    raise UnsupportedOpError(
        f"The op {func} was called on a manual tensor. The shape of its result depends on values, "
        "which differ between the devices. Use an op with a fixed shape, such as torch.where, or "
        "call disable_manual_sharding first."
    ) from None


def _run_lowering(
    axes: ManualAxes, func: Any, lowering: Lowering, args: Any, kwargs: Any, meta: Any
) -> Any:
    given = _Arguments(func, axes, args, kwargs)
    options = {"meta": meta} if lowering.wants_meta else {}
    draw = None
    if random.draws(lowering):
        ordinal = np.arange(prod(axes.region.sizes)).reshape(axes.region.sizes)
        draw = (given.add(random.next_key_data(), False), given.add(ordinal, True))

    def on_tile(*arrays: Any) -> Any:
        tile_args, tile_kwargs = given.filled(arrays)
        if draw is None:
            result = lowering(*tile_args, **tile_kwargs, **options)
        else:
            with random.lent(*(arrays[slot.number] for slot in draw)):
                result = lowering(*tile_args, **tile_kwargs, **options)
        return jax.tree.map(jnp.asarray, result)

    try:
        precision = torch.get_float32_matmul_precision()
        key = (func, _frozen(given.structure), _frozen(options), precision)
        hash(key)
    except TypeError:
        key = None
    # The program that is kept holds `given`: its slots and constants, but no arrays.
    arrays, given.arrays = given.arrays, []
    return mapped(axes, on_tile, arrays, given.stacked, key)


def _frozen(value: Any) -> Hashable:
    """Return a hashable form in which 1, 1.0 and True differ."""
    kind = type(value)
    if kind in (tuple, list):
        return (kind, *map(_frozen, value))
    if kind is dict:
        return (kind, *((k, _frozen(v)) for k, v in value.items()))
    return (kind, value.number if kind is _Slot else value)


# ---------------------------------------------------------------------- views and writes


def keyed(
    step: ViewStep | None, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], number: int
) -> ViewStep | None:
    """Return a view step of a manual tensor with the key by which its program is kept."""
    if step is None or any(isinstance(v, torch.SymInt) for v in leaves((tuple(args), kwargs))):
        return step
    rest = _frozen((tuple(args[1:]), dict(kwargs)))
    return replace(step, key=(func, number, of_tensor(args[0]), rest))


def _key_of_steps(steps: Sequence[ViewStep]) -> Any:
    keys = tuple(step.key for step in steps)
    return None if None in keys else keys


def read_steps(axes: ManualAxes, steps: Sequence[ViewStep], base: jax.Array) -> jax.Array:
    """Return what a view of a manual tensor shows, stacked."""
    keys = _key_of_steps(steps)
    key = None if keys is None else ("read", keys)
    return mapped(axes, lambda tile: read_through(steps, tile), [base], [True], key)


def write(target: torch.Tensor, result: torch.Tensor) -> None:
    """Give `target` the values of `result` on each device; at least one of them is manual."""
    axes = axes_of((target, result))
    assert axes is not None
    if not isinstance(target, JaxTensor):
        raise ManualRegionError(
            f"A manual tensor over the axes {axes.region.axes} was written to a CPU tensor of "
            f"shape={tuple(target.shape)}. Each device has a value of its own, and the CPU tensor "
            "has room for one. Call disable_manual_sharding first, or write to a manual tensor."
        )
    given = _Arguments(aten.copy_.default, axes, (target, result), {})
    steps, shape, dtype = target._steps, tuple(target.shape), jax_dtype(target.dtype)
    keys = _key_of_steps(steps)

    def on_tile(base: Any, new: Any) -> Any:
        return write_through(steps, base, jnp.broadcast_to(in_dtype(new, dtype), shape))

    # `given` holds what the target shows; below its views lies the whole tile.
    arrays = [target._storage.read(), given.arrays[1]]
    key = None if keys is None else ("write", keys, shape, dtype)
    target._storage.write(mapped(axes, on_tile, arrays, given.stacked, key))
