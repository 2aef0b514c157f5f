"""Payloads as what a library of JAX's takes and gives: whole arrays, without padding.

JAX has no uneven global arrays, and a payload's padding is nobody else's business. So an array that
goes out is whole along each dim that its tiles do not divide, and one that comes in is cut there:

    w (10, 4) as [0, 1] on (2, 4)    tiles of (5, 1): goes out as it lies
    w (9, 4) as [0, 1] on (2, 4)     9 rows in 2 tiles: goes out as tiles of (9, 1)
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import jax
import numpy as np
import torch
from jax.sharding import NamedSharding, PartitionSpec

from xla_dtensor.core import Layout
from xla_dtensor.runtimes.jax.arrays.sharding import padded_shape, place
from xla_dtensor.runtimes.jax.arrays.storage import Storage
from xla_dtensor.runtimes.jax.arrays.values import (
    jax_dtype,
    numpy_from_torch,
    torch_from_numpy,
    x64,
)
from xla_dtensor.runtimes.jax.eager.tensor import JaxTensor

__all__ = ["NativeArrays"]

T = TypeVar("T")


class NativeArrays:
    """The way out and in.

    Args:
        sharding_of: Returns how a layout is said in JAX.
    """

    def __init__(self, sharding_of: Callable[[Layout], NamedSharding]) -> None:
        self._sharding_of = sharding_of

    def array(self, payload: JaxTensor, layout: Layout) -> jax.Array:
        """Return a payload's array as `struct` says: its own one, where it lies so already."""
        with x64():
            shape = tuple(payload.shape)
            even = _even(shape, self._sharding_of(layout))
            array = payload.placed()
            if tuple(array.shape) == shape and array.sharding == even:
                return array
            return place(payload.value(), even)

    def struct(
        self, shape: tuple[int, ...], dtype: torch.dtype, layout: Layout
    ) -> jax.ShapeDtypeStruct:
        """Return what the array of such a payload is, out there."""
        even = _even(shape, self._sharding_of(layout))
        return jax.ShapeDtypeStruct(shape, jax_dtype(dtype), sharding=even)

    def payload(self, array: jax.Array, layout: Layout) -> JaxTensor:
        """Return an array that is as `struct` says as a payload. It may keep the array: copy it."""
        with x64():
            shape, sharding = tuple(array.shape), self._sharding_of(layout)
            if padded_shape(shape, sharding) != shape:
                array = place(array, sharding)
            return JaxTensor(Storage(array, shape, sharding))

    @staticmethod
    def numpy(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
        """Return a host tensor as a NumPy array, which may share its memory."""
        return numpy_from_torch(tensor)

    @staticmethod
    def host_tensor(array: np.ndarray[Any, Any]) -> torch.Tensor:
        """Return a NumPy array as a host tensor that shares nothing."""
        return torch_from_numpy(array)

    @staticmethod
    def with_64_bits(function: Callable[[], T]) -> T:
        """Call a function where JAX keeps 64-bit types, in a thread of its own.

        The mode is a thread's, and a library that finds an event loop running in its thread, as
        in a notebook, goes on in another one.
        """

        def call() -> T:
            with x64():
                return function()

        with ThreadPoolExecutor(1) as pool:
            return pool.submit(call).result()


def _even(shape: tuple[int, ...], sharding: NamedSharding) -> NamedSharding:
    divides = [a == b for a, b in zip(shape, padded_shape(shape, sharding), strict=True)]
    if all(divides):
        return sharding
    spec = [entry if fits else None for entry, fits in zip(sharding.spec, divides, strict=True)]
    return NamedSharding(sharding.mesh, PartitionSpec(*spec))
