"""Values on the host and on devices: dtypes, loops that count, devices that programs are for.

JAX narrows 64-bit values unless its 64-bit mode is on. The library turns that mode on around its
own calls only (:func:`x64`), so a user's own JAX code in the same process keeps its meaning.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import torch
from jax import lax

from xla_dtensor.core.errors import DistributeError, UnsupportedOpError
from xla_dtensor.runtimes.torch_own import past_functions

__all__ = [
    "counted_scan",
    "device_count",
    "devices",
    "in_dtype",
    "jax_dtype",
    "local_devices",
    "memory_statistics",
    "numpy_from_torch",
    "platform",
    "set_absent_devices",
    "torch_dtype",
    "torch_from_numpy",
    "x64",
]


# -------------------------------------------------------- Values between torch and JAX on the host

_TORCH_TO_NUMPY: dict[torch.dtype, np.dtype[Any]] = {
    torch.bool: np.dtype(np.bool_),
    torch.uint8: np.dtype(np.uint8),
    torch.uint16: np.dtype(np.uint16),
    torch.uint32: np.dtype(np.uint32),
    torch.uint64: np.dtype(np.uint64),
    torch.int8: np.dtype(np.int8),
    torch.int16: np.dtype(np.int16),
    torch.int32: np.dtype(np.int32),
    torch.int64: np.dtype(np.int64),
    torch.float16: np.dtype(np.float16),
    torch.bfloat16: np.dtype(ml_dtypes.bfloat16),
    torch.float32: np.dtype(np.float32),
    torch.float64: np.dtype(np.float64),
    torch.complex64: np.dtype(np.complex64),
    torch.complex128: np.dtype(np.complex128),
    torch.float8_e4m3fn: np.dtype(ml_dtypes.float8_e4m3fn),
    torch.float8_e5m2: np.dtype(ml_dtypes.float8_e5m2),
}
_NUMPY_TO_TORCH = {numpy: torch_ for torch_, numpy in _TORCH_TO_NUMPY.items()}

# dtypes that torch cannot hand to NumPy: they cross as integers of the same width.
_CARRIERS = {
    torch.bfloat16: (torch.int16, np.int16),
    torch.float8_e4m3fn: (torch.uint8, np.uint8),
    torch.float8_e5m2: (torch.uint8, np.uint8),
}


# Not tensor.numpy(): while a step is traced, that is noted as a read of the step's Python.
_numpy = past_functions("numpy")
_address = past_functions("data_ptr")


def x64() -> AbstractContextManager[Any]:
    """Return a context in which JAX keeps 64-bit types."""
    return jax.enable_x64(True)


def in_dtype(array: jax.Array, dtype: Any) -> jax.Array:
    """Return an array in another dtype, by PyTorch's rules for complex numbers.

    As a bool one is whether it is not 0, as a real number its real part.
    """
    if array.dtype.kind == "c" and np.dtype(dtype).kind != "c":
        array = array != 0 if np.dtype(dtype).kind == "b" else array.real
    return array.astype(dtype)


def jax_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    """Return the dtype that JAX uses for torch's `dtype`; never a narrower one."""
    try:
        return _TORCH_TO_NUMPY[dtype]
    except KeyError:
        raise UnsupportedOpError(
            f"A tensor with dtype={dtype} was given to the JAX runtime. XLA has no such dtype. "
            "Convert it first, e.g. with tensor.to(torch.float32)."
        ) from None


def torch_dtype(dtype: Any) -> torch.dtype:
    """Return torch's dtype for a NumPy or JAX `dtype`."""
    return _NUMPY_TO_TORCH[np.dtype(dtype)]


def numpy_from_torch(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """Return a host tensor's values as a NumPy array; it may share the tensor's memory.

    Raises:
        DistributeError: The tensor has no memory.
    """
    tensor = tensor.detach()
    if not _address(tensor) and tensor.numel():
        # torch lets `plain.data = dtensor` through, also with its own DTensors.
        raise DistributeError(
            f"A tensor of shape={tuple(tensor.shape)}, dtype={tensor.dtype} was to be read, and it "
            "has no memory: its .data was set to a DTensor, which makes no DTensor of it. Replace "
            "the tensor itself, e.g. module.weight = torch.nn.Parameter(dtensor)."
        )
    if tensor.is_conj():
        tensor = tensor.resolve_conj()
    if tensor.dtype in _CARRIERS:
        carrier = tensor.contiguous().view(_CARRIERS[tensor.dtype][0])
        return _numpy(carrier).view(_TORCH_TO_NUMPY[tensor.dtype])
    jax_dtype(tensor.dtype)
    return _numpy(tensor.resolve_neg())


def torch_from_numpy(array: np.ndarray[Any, Any]) -> torch.Tensor:
    """Return a NumPy array's values as a new CPU tensor that shares nothing."""
    dtype = torch_dtype(array.dtype)
    array = np.array(array, copy=True, order="C")
    if dtype in _CARRIERS:
        return torch.from_numpy(array.view(_CARRIERS[dtype][1])).view(dtype)
    return torch.from_numpy(array)


# ------------------------------------------------------------------ lax.scan with a 32-bit counter
#
# PyTorch's integers are 64 bits wide, so JAX runs with x64 here, and then ``lax.scan`` counts in
# int64. A TPU has no such numbers: XLA takes them apart into pairs of uint32, after which no pass
# of it knows how often the loop runs, and each index costs two words of carrying arithmetic. The
# TPU program of a loop over layers shows it: ``compare(bitcast-convert(hi), 0)`` and a second
# comparison of the low halves where ``compare(i, 32)`` would stand.
#
# A loop made here is a ``while_loop`` that counts in int32. It has no derivative of its own; every
# loop of this package has a backward pass written by hand.


def counted_scan(
    body: Callable[[Any, Any], tuple[Any, Any]], carry: Any, rows: Any, *, reverse: bool = False
) -> tuple[Any, Any]:
    """Run `body` over the first dim of `rows`.

    Args:
        body: Called with the carry and one row of each array; returns the next carry, of the same
            shapes and dtypes, and what is to be kept of this turn.
        carry: What the first turn is given.
        rows: A tree of arrays that agree in their first dim, at least one array.
        reverse: Whether to begin with the last row.

    Returns:
        The last carry, and what was kept, stacked in the order of the rows.

    Example:
        >>> last, before = counted_scan(lambda a, x: (a + x, a), jnp.float32(0), jnp.ones(3))
        >>> before.tolist()
        [0.0, 1.0, 2.0]
    """
    length = jax.tree.leaves(rows)[0].shape[0]
    if length == 0:
        first = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), rows)
        _, outputs = jax.eval_shape(body, carry, first)
        return carry, jax.tree.map(lambda x: jnp.zeros((0, *x.shape), x.dtype), outputs)
    outputs = _room(lambda: body(carry, jax.tree.map(lambda x: _row(x, 0), rows))[1], length)

    def has_next(state: Any) -> Any:
        return state[0] < jnp.int32(length)

    def turn(state: Any) -> Any:
        count, carry, outputs = state
        index = jnp.int32(length - 1) - count if reverse else count
        carry, output = body(carry, jax.tree.map(lambda x: _row(x, index), rows))
        outputs = jax.tree.map(lambda stack, row: _with_row(stack, row, index), outputs, output)
        return count + jnp.int32(1), carry, outputs

    _, carry, outputs = lax.while_loop(has_next, turn, (jnp.int32(0), carry, outputs))
    return carry, outputs


def _room(row: Callable[[], Any], length: int) -> Any:
    """Arrays for the rows that a function gives, of their memory and their manual axes."""
    jaxpr, tree = jax.make_jaxpr(row, return_shape=True)()
    rooms = [_empty(aval, length) for aval in jaxpr.out_avals]
    return jax.tree.unflatten(jax.tree.structure(tree), rooms)


def _empty(aval: Any, length: int) -> Any:
    room = jnp.zeros((length, *aval.shape), aval.dtype)
    if aval.memory_space != jax.typeof(room).memory_space:
        room = jax.device_put(room, aval.memory_space)
    varying = tuple(aval.mat.varying)
    return lax.pcast(room, varying, to="varying") if varying else room


def _row(array: Any, at: Any) -> Any:
    return lax.dynamic_index_in_dim(array, at, 0, keepdims=False, allow_negative_indices=False)


def _with_row(array: Any, row: Any, at: Any) -> Any:
    return lax.dynamic_update_index_in_dim(array, row, at, 0, allow_negative_indices=False)


# ---------------------------------------------------------- The devices that programs are made for
#
# JAX's own, or those of a machine that is not here.
#
# Whatever asks how many devices there are, or of what kind, in order to decide what a program looks
# like, asks here and not JAX: a step that is compiled for a pod has to be the pod's program.

_absent: tuple[Any, ...] = ()


def set_absent_devices(absent: Sequence[Any]) -> None:
    """Let this process make programs for devices that it does not have; none takes that back."""
    global _absent
    _absent = tuple(absent)


def devices() -> Sequence[Any]:
    """Return all devices of the job."""
    return _absent or jax.devices()


def local_devices() -> Sequence[Any]:
    """Return the devices that this process reaches; of absent ones those of the first process."""
    if not _absent:
        return jax.local_devices()
    first = min(device.process_index for device in _absent)
    return tuple(device for device in _absent if device.process_index == first)


def device_count() -> int:
    """Return how many devices the job has."""
    return len(devices())


def memory_statistics() -> Mapping[int, Mapping[str, int]]:
    """Return what each device of this process says of its memory; nothing where they do not."""
    statistics = {d.id: d.memory_stats() for d in ([] if _absent else jax.local_devices())}
    return {device: dict(numbers) for device, numbers in statistics.items() if numbers}


def has_host_memory() -> bool:
    """Tell whether the devices' memory is this machine's own."""
    return not _absent and jax.default_backend() == "cpu"


def platform() -> str:
    """Return what the devices are: "cpu", "gpu" or "tpu"."""
    return _absent[0].platform if _absent else jax.default_backend()
