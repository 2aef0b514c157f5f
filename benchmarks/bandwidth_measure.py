"""Times one collective on one axis of a JAX mesh; all groups of the axis are at work at once.

S bytes are what an all-gather results in on each device, and what each device puts into the
others. Bandwidth is counted as the model counts it (mesh_utils/network.py), so that the two can
stand beside each other:

    all-gather, reduce-scatter, all-to-all      (1 - 1/k) S / seconds
    all-reduce                                  2 (1 - 1/k) S / seconds
    permute, to the next of the group           S / seconds

Several calls are queued, and the time until the last is done is shared out to them: a device works
through them one after the other, and the next is sent to it meanwhile.
"""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias

Kind: TypeAlias = Literal["all-gather", "reduce-scatter", "all-reduce", "all-to-all", "permute"]

KINDS: tuple[Kind, ...] = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "permute")

_COLUMNS = 128
_BYTES_PER_ROW = 4 * _COLUMNS
_OPCODES = {"permute": "collective-permute"}
"""What a kind is called in a compiled program, where that is another name."""


@dataclass(frozen=True)
class Measured:
    """What was measured.

    Attributes:
        kind: the collective.
        num_bytes: S: what was asked for, rounded up to whole rows for each device.
        seconds_least: of one call, the least of the rounds.
        seconds_median: the median.
        bandwidth: bus bandwidth per device in bytes per second, of the median.
        bandwidth_most: of the least.
        compiled: the collectives in the compiled program: another one may stand for what was asked.
    """

    kind: Kind
    num_bytes: int
    seconds_least: float
    seconds_median: float
    bandwidth: float
    bandwidth_most: float
    compiled: tuple[str, ...]


def moved_bytes(kind: Kind, num_bytes: int, size: int) -> float:
    """The bytes that count for the bandwidth.

    Args:
        kind: the collective.
        num_bytes: S.
        size: k, the devices of the axis.

    Returns:
        Bytes per device.

    Example:
        >>> moved_bytes("all-gather", 80, 4), moved_bytes("all-reduce", 80, 4)
        (60.0, 120.0)
    """
    if kind == "permute":
        return float(num_bytes)
    passes = 2 if kind == "all-reduce" else 1
    return passes * (1 - 1 / size) * num_bytes


def program(mesh: Any, axis: str, kind: Kind, num_bytes: int) -> tuple[Any, Any, int]:
    """Makes a collective.

    Args:
        mesh: a jax.sharding.Mesh.
        axis: one of its axes.
        kind: which.
        num_bytes: S, at least.

    Returns:
        The jitted function, its argument on the devices, and S.
    """
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    size = mesh.shape[axis]
    rows = -(-num_bytes // (_BYTES_PER_ROW * size)) * size  # of S, a whole number for each device
    split, whole = PartitionSpec(axis), PartitionSpec()
    following = [(place, (place + 1) % size) for place in range(size)]
    body, inputs, outputs, global_rows = {
        "all-gather": (partial(_gather, axis), split, whole, rows),
        "reduce-scatter": (partial(_scatter, axis), whole, split, rows),
        "all-reduce": (partial(_reduce, axis), whole, whole, rows),
        "all-to-all": (partial(_exchange, axis), split, split, rows * size),
        "permute": (partial(_permute, axis, following), split, split, rows * size),
    }[kind]
    mapped = jax.shard_map(body, mesh=mesh, in_specs=inputs, out_specs=outputs, check_vma=False)
    sharding = NamedSharding(mesh, inputs)
    fill = jax.jit(
        lambda: jnp.arange(global_rows * _COLUMNS, dtype=jnp.float32).reshape(-1, _COLUMNS),
        out_shardings=sharding,
    )
    return jax.jit(mapped), fill(), rows * _BYTES_PER_ROW


def _gather(axis: str, x: Any) -> Any:
    import jax

    return jax.lax.all_gather(x, axis, tiled=True)


def _scatter(axis: str, x: Any) -> Any:
    import jax

    return jax.lax.psum_scatter(x, axis, tiled=True)


def _reduce(axis: str, x: Any) -> Any:
    import jax

    return jax.lax.psum(x, axis)


def _exchange(axis: str, x: Any) -> Any:
    import jax

    return jax.lax.all_to_all(x, axis, 0, 0, tiled=True)


def _permute(axis: str, following: list[tuple[int, int]], x: Any) -> Any:
    import jax

    return jax.lax.ppermute(x, axis, following)


def measure(
    mesh: Any, axis: str, kind: Kind, num_bytes: int, *, rounds: int = 10, calls: int = 10
) -> Measured:
    """Times a collective on an axis.

    Args:
        mesh: a jax.sharding.Mesh.
        axis: one of its axes, of two devices or more.
        kind: which collective.
        num_bytes: S, at least.
        rounds: how often it is timed.
        calls: how many calls are queued in a round.

    Returns:
        What was measured.
    """
    function, x, exact = program(mesh, axis, kind, num_bytes)
    compiled = function.lower(x).compile()
    compiled(x).block_until_ready()
    times = [_timed(compiled, x, calls) for _ in range(rounds)]
    moved = moved_bytes(kind, exact, mesh.shape[axis])
    least, median = min(times), statistics.median(times)
    return Measured(
        kind, exact, least, median, moved / median, moved / least, _collectives(compiled.as_text())
    )


def _timed(call: Callable[[Any], Any], x: Any, calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls - 1):
        call(x)  # what it returns is freed when it is done
    call(x).block_until_ready()
    return (time.perf_counter() - start) / calls


def _collectives(text: str) -> tuple[str, ...]:
    names = "all-gather|reduce-scatter|all-reduce|all-to-all|collective-permute"
    found = re.findall(rf" ({names})(?:-start)?\(", text)
    return tuple(dict.fromkeys(found))


def is_as_asked(measured: Measured) -> bool:
    """Whether the compiled program has the collective that was asked for, and no other.

    Args:
        measured: what was measured.

    Returns:
        False where the compiler made another one of it.
    """
    return measured.compiled == (_OPCODES.get(measured.kind, measured.kind),)
