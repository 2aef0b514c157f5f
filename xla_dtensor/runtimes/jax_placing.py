"""Put arrays where a sharding says, with the padding that JAX's even tiles need.

``place`` is the one gate to the devices. It pads, places, and checks what came back, because
``with_sharding_constraint`` answers an uneven request with a silently replicated array.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from xla_dtensor.errors import ShardingDroppedError
from xla_dtensor.runtimes import same_program

__all__ = [
    "constrained",
    "host_value",
    "padded",
    "padded_shape",
    "place",
    "put_host_array",
    "unpadded",
]


def padded_shape(shape: tuple[int, ...], sharding: NamedSharding | None) -> tuple[int, ...]:
    """Return `shape` with each dim rounded up to a multiple of its number of tiles."""
    if sharding is None:
        return shape
    return tuple(
        -(-size // n) * n for size, n in zip(shape, _tiles(sharding, len(shape)), strict=True)
    )


@lru_cache(maxsize=4096)
def _tiles(sharding: NamedSharding, ndim: int) -> tuple[int, ...]:
    entries = (*sharding.spec, *(None,) * (ndim - len(sharding.spec)))
    sizes = sharding.mesh.shape

    def of(entry: Any) -> int:
        if entry is None or entry is PartitionSpec.UNCONSTRAINED:
            return 1
        names = (entry,) if isinstance(entry, str) else entry
        return int(np.prod([sizes[name] for name in names], dtype=np.int64))

    return tuple(of(entry) for entry in entries)


def padded(value: jax.Array, sharding: NamedSharding | None) -> jax.Array:
    """Return `value` with zeros behind each dim so that it divides by the tiles."""
    target = padded_shape(tuple(value.shape), sharding)
    if target == tuple(value.shape):
        return value
    return jnp.pad(value, [(0, t - s) for t, s in zip(target, value.shape, strict=True)])


def unpadded(
    array: jax.Array, shape: tuple[int, ...], sharding: NamedSharding | None = None
) -> jax.Array:
    """Return the logical part of a padded array.

    Args:
        array: The padded array.
        shape: The logical shape.
        sharding: How `array` lies, if that is known.
    """
    if tuple(array.shape) == shape:
        return array
    result = jax.lax.slice(array, (0,) * len(shape), shape)
    single = [size == 1 < whole for size, whole in zip(shape, array.shape, strict=True)]
    if sharding is None or not any(single) or not isinstance(array, jax.core.Tracer):
        return result
    # One row lies on one device, and is made whole: Shardy 0.10 and 0.12 end the process where
    # dims behind one that it says to be cut are split by a reshape.
    spec = [None if is_one else PartitionSpec.UNCONSTRAINED for is_one in single]
    where = NamedSharding(sharding.mesh, PartitionSpec(*spec))
    return jax.lax.with_sharding_constraint(result, where)


@lru_cache(maxsize=4096)
def _placer(sharding: NamedSharding | None) -> Any:
    # The copy keeps JAX from handing back the very buffer it was given: two storages that shared
    # one would both die when a compiled step donates it.
    if sharding is None or PartitionSpec.UNCONSTRAINED not in tuple(sharding.spec):
        return jax.jit(lambda x: jnp.array(padded(x, sharding), copy=True), out_shardings=sharding)

    def leaving_dims_open(x: jax.Array) -> jax.Array:
        copied = jnp.array(padded(x, sharding), copy=True)
        return jax.lax.with_sharding_constraint(copied, sharding)

    return jax.jit(leaving_dims_open)


def place(value: jax.Array, sharding: NamedSharding | None) -> jax.Array:
    """Return a new array with `value` padded and placed as `sharding` says.

    Works on arrays that span processes, and inside a traced step.

    Raises:
        ShardingDroppedError: XLA gave back another sharding than was asked for.
    """
    if isinstance(value, jax.core.Tracer):
        value = padded(value, sharding)
        return value if sharding is None else jax.lax.with_sharding_constraint(value, sharding)
    if sharding is not None and same_program.checks() is not None and _gathers(value, sharding):
        _compare_gather(value)
    result = _placer(sharding)(value)
    if isinstance(result, jax.core.Tracer):
        return result  # an older array, used in a traced step: how it will lie is not known yet
    if sharding is not None and PartitionSpec.UNCONSTRAINED not in tuple(sharding.spec):
        check_sharding(result, sharding)
    return result


def constrained(value: jax.Array, sharding: NamedSharding) -> jax.Array:
    """Return the logical `value`, told to lie as `sharding` says."""
    return unpadded(place(value, sharding), tuple(value.shape))


def check_sharding(array: jax.Array, asked: NamedSharding) -> None:
    """Raise when `array` does not lie as `asked`."""
    if array.sharding.is_equivalent_to(asked, array.ndim):
        return
    raise ShardingDroppedError(
        f"A tensor of shape={tuple(array.shape)} was asked to lie as {asked.spec} on a mesh "
        f"{dict(asked.mesh.shape)}, but XLA placed it as {array.sharding}. Computing on would cost "
        "memory and time without a word. Choose a sharding whose tiles divide the padded shape, "
        "or replicate this dim."
    )


def put_host_array(array: np.ndarray[Any, Any], sharding: Any) -> jax.Array:
    """Copy a host array, equal in every process, to the devices; each takes only its own tiles."""
    if sharding is None:
        return jnp.array(array)
    target = padded_shape(array.shape, sharding)

    def tile(index: Any) -> np.ndarray[Any, Any]:
        starts = [s.start or 0 for s in index]
        stops = [t if s.stop is None else s.stop for s, t in zip(index, target, strict=True)]
        part = array[tuple(slice(a, b) for a, b in zip(starts, stops, strict=True))]
        missing = [(0, b - a - n) for a, b, n in zip(starts, stops, part.shape, strict=True)]
        # A copy: on CPU, JAX may otherwise keep looking at memory that torch will write to.
        return np.pad(part, missing) if any(m for _, m in missing) else np.array(part)

    result = jax.make_array_from_callback(target, sharding, tile)
    check_sharding(result, sharding)
    return result


def host_value(value: jax.Array) -> np.ndarray[Any, Any]:
    """Return a whole value as a NumPy array, gathering it first when it spans processes."""
    if isinstance(value, jax.core.Tracer):
        from xla_dtensor.runtimes.jax_trace import refuse_read

        refuse_read("read on the host")
    if not value.is_fully_addressable and not value.is_fully_replicated:
        mesh = value.sharding.mesh  # pyright: ignore[reportAttributeAccessIssue]
        _compare_gather(value)
        value = _placer(NamedSharding(mesh, PartitionSpec()))(value)
    if not value.is_fully_addressable:
        value = value.addressable_data(0)
    return np.asarray(value)


def _gathers(value: jax.Array, sharding: NamedSharding) -> bool:
    """Tell whether each process is given what only several of them hold together."""
    spread = not value.is_fully_addressable and not value.is_fully_replicated
    return spread and sharding.is_fully_replicated


def _compare_gather(value: jax.Array) -> None:
    """Have all processes that hold a part say that they gather it, too."""
    found = same_program.checks()
    if found is not None and found.mode != "off":
        group = {device.process_index for device in value.sharding.device_set}
        what = f"the gather of a tensor of shape={tuple(value.shape)}"
        found.compare(what, str(value.dtype), tuple(group))
