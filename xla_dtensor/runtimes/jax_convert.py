"""Values between torch and JAX on the host: dtypes one to one, int64 and bfloat16 included.

JAX narrows 64-bit values unless its 64-bit mode is on. The library turns that mode on around its
own calls only (:func:`x64`), so a user's own JAX code in the same process keeps its meaning.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import jax
import ml_dtypes
import numpy as np
import torch

from xla_dtensor.errors import UnsupportedOpError

__all__ = ["in_dtype", "jax_dtype", "numpy_from_torch", "torch_dtype", "torch_from_numpy", "x64"]

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
_numpy: Any = torch._C.TensorBase.numpy  # pyright: ignore[reportAttributeAccessIssue]


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
    """Return a host tensor's values as a NumPy array; it may share the tensor's memory."""
    tensor = tensor.detach()
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
