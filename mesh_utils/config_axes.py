"""The axes of a job: their sizes inside slices (ici) and across them (dcn).

    axes:
      dp:   {dcn: -1}             as many as there are slices
      fsdp: {ici: -1}             what is left of a slice
      tp:   {ici: 4}              the last axis is the hungriest

A size that is not written is 1. One ici may be -1 and one dcn: what is left of the devices of a
slice, and of the slices. So the ici sizes multiply to a slice, and no group inside ICI is larger.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from mesh_utils.errors import JobError
from mesh_utils.job_file import nearest
from mesh_utils.mesh_input import as_integer
from mesh_utils.network import Network
from mesh_utils.topology import Topology

_AXIS_KEYS = ("ici", "dcn", "weight")


@dataclass(frozen=True)
class JobAxis:
    """One mesh axis of a job.

    Attributes:
        name: its name.
        ici: its size inside a slice.
        dcn: its size across slices.
        weight: bytes that it gathers, in any unit, for the search; None where no axis says.

    Example:
        >>> str(JobAxis("fsdp", 32, 2))
        'fsdp=64 (2 over DCN)'
    """

    name: str
    ici: int = 1
    dcn: int = 1
    weight: float | None = None

    @property
    def size(self) -> int:
        """Its devices."""
        return self.ici * self.dcn

    def __str__(self) -> str:
        return f"{self.name}={self.size}" + (f" ({self.dcn} over DCN)" if self.dcn > 1 else "")


def read_axes(data: object, asked: str, topology: Topology) -> tuple[JobAxis, ...]:
    """Reads the axes of a job, and fills in what is -1.

    Args:
        data: what the job file says under `axes`.
        asked: the job, to begin messages with.
        topology: its chips.

    Returns:
        The axes, in order.

    Raises:
        JobError: no axes, unknown keys, sizes that are none, two -1, or sizes that do not multiply
            to the devices of a slice and to the slices.

    Example:
        >>> axes = {"dp": {"dcn": -1}, "fsdp": {"ici": -1}, "tp": {"ici": 4}}
        >>> for axis in read_axes(axes, "Job 'x'", Topology.parse("4xv5e:16x16")):
        ...     print(axis)
        dp=4 (4 over DCN)
        fsdp=64
        tp=4
    """
    axes = read_sizes(data, asked)
    if len({axis.weight is None for axis in axes}) > 1:
        unsaid = next(axis.name for axis in axes if axis.weight is None)
        raise JobError(
            f"{asked} was read with a weight for some axes. Axis {unsaid!r} has none, and it would "
            f"count for nothing. Write a weight for {unsaid!r} too, or none at all."
        )
    per_slice = topology.devices_per_slice
    count = topology.num_slices
    inside = f"A slice of {topology.name} has {per_slice} devices"
    across = f"{topology.name} has {count} slice{'' if count == 1 else 's'}"
    ici = _filled(axes, "ici", per_slice, inside, asked)
    dcn = _filled(axes, "dcn", count, across, asked)
    return tuple(
        JobAxis(axis.name, inner, outer, axis.weight)
        for axis, inner, outer in zip(axes, ici, dcn, strict=True)
    )


def read_sizes(data: object, asked: str) -> tuple[JobAxis, ...]:
    """Reads axes as they are written, -1 left as it is.

    Args:
        data: what the job file says under `axes`.
        asked: the job, to begin messages with.

    Returns:
        The axes, in order.

    Raises:
        JobError: no axes, unknown keys, or sizes that are none.
    """
    if not isinstance(data, Mapping) or not data:
        raise JobError(
            f"{asked} was read with axes={data!r}. That is no mapping from names of axes to sizes. "
            "Write such as axes: {fsdp: {ici: -1}, tp: {ici: 4}}."
        )
    given = cast("Mapping[object, object]", data)
    return tuple(_read_axis(name, entry, asked) for name, entry in given.items())


def _read_axis(name: object, entry: object, asked: str) -> JobAxis:
    if not isinstance(name, str) or not name.isidentifier():
        raise JobError(
            f"{asked} was read with an axis named {name!r}. A name is of letters, digits and '_'. "
            "Write such as dp, fsdp, tp, cp or ep."
        )
    if not isinstance(entry, Mapping):
        raise JobError(
            f"{asked} was read with axis {name}={entry!r}. Nothing says whether that is inside "
            f"slices or across them. Write {name}: {{ici: {_plain_size(entry)}}}, or dcn."
        )
    given = cast("Mapping[object, object]", entry)
    for key in given:
        if key not in _AXIS_KEYS:
            raise JobError(
                f"{asked} was read with {key!r} for axis {name!r}. An axis has no such key. "
                f"Write {nearest(key, _AXIS_KEYS)}."
            )
    sizes = [_read_size(given.get(key, 1), key, name, asked) for key in ("ici", "dcn")]
    return JobAxis(name, sizes[0], sizes[1], _read_weight(given.get("weight"), name, asked))


def _plain_size(entry: object) -> object:
    return entry if as_integer(entry) is not None else -1


def _read_size(given: object, key: str, name: str, asked: str) -> int:
    size = as_integer(given)
    if size is None or (size < 1 and size != -1):
        raise JobError(
            f"{asked} was read with {key}={given!r} for axis {name!r}. That is no number of "
            "devices. Write 1 or more, or -1 on one axis for what is left."
        )
    return size


def _read_weight(given: object, name: str, asked: str) -> float | None:
    if given is None:
        return None
    weight = given if isinstance(given, (int, float)) and not isinstance(given, bool) else -1.0
    if not math.isfinite(weight) or weight < 0:
        raise JobError(
            f"{asked} was read with weight={given!r} for axis {name!r}. A weight is the bytes that "
            "the axis gathers, in any unit. Write 0 or more."
        )
    return float(weight)


def _filled(
    axes: Sequence[JobAxis], key: str, count: int, there: str, asked: str
) -> tuple[int, ...]:
    """The sizes of all axes inside or across slices, -1 replaced."""
    sizes = [axis.ici if key == "ici" else axis.dcn for axis in axes]
    written = ", ".join(f"{axis.name}={size}" for axis, size in zip(axes, sizes, strict=True))
    open_axes = [axis.name for axis, size in zip(axes, sizes, strict=True) if size == -1]
    known = math.prod(size for size in sizes if size != -1)
    if len(open_axes) > 1:
        raise JobError(
            f"{asked} was read with {key} sizes {written}. {len(open_axes)} of them are -1, and "
            f"only one can be what is left. Write a number for {', '.join(open_axes[1:])}, such "
            f"as {key}: 1."
        )
    if open_axes and count % known == 0:
        return tuple(count // known if size == -1 else size for size in sizes)
    if known == count and not open_axes:
        return tuple(sizes)
    fitting = nearest_sizes(sizes, count)
    instead = ", ".join(f"{axis.name}={size}" for axis, size in zip(axes, fitting, strict=True))
    product = f"no multiple of {known}" if open_axes else f"and the product is {known}"
    raise JobError(
        f"{asked} was read with {key} sizes {written}. {there}, {product}. "
        f"Write {key} sizes {instead}, or others with that product."
    )


def nearest_sizes(sizes: Sequence[int], count: int) -> tuple[int, ...]:
    """Sizes of a given product, like those given.

    Args:
        sizes: positive, or -1.
        count: the product.

    Returns:
        One axis changed if that will do: with a -1, another one, to the nearest that leaves a whole
        number; else what the others share with the product, and the rest on the first axis.

    Example:
        >>> nearest_sizes([-1, 3], 128), nearest_sizes([2, 3, 4], 64), nearest_sizes([2, 3, 5], 64)
        ((64, 2), (2, 8, 4), (64, 1, 1))
    """
    plain = [max(size, 1) for size in sizes]
    left = next((axis for axis, size in enumerate(sizes) if size == -1), None)
    for axis, size in enumerate(sizes):
        others = math.prod(plain) // plain[axis]
        if axis == left or count % others:
            continue
        if left is None:
            return (*plain[:axis], count // others, *plain[axis + 1 :])
        fitting = [part for part in range(1, count // others + 1) if count // others % part == 0]
        plain[axis] = min(fitting, key=lambda part: (abs(part - size), part))
        plain[left] = count // math.prod(plain)
        return tuple(plain)
    shared: list[int] = []
    for size in plain[1:]:
        shared.append(math.gcd(size, count // math.prod(shared)))
    return (count // math.prod(shared), *shared)


def over_dcn(asked: str, axis: JobAxis, axis_names: Sequence[str], topology: Topology) -> str:
    """The warning for an axis of tensor parallelism that runs over DCN.

    Args:
        asked: the job, to begin with.
        axis: the axis.
        axis_names: all axes.
        topology: the chips.

    Returns:
        What it costs in the model, and what to do instead.

    Example:
        >>> topology = Topology.parse("2xv5p:4x4x4")
        >>> print(over_dcn("Job 'x'", JobAxis("tp", 4, 2), ["dp", "tp"], topology))
        Job 'x' puts tp=8 across 2 slices. Modelled, it gets at most 41.2 GB/s per device for \
all-gathers, inside a slice at most 600. Give its dcn part to 'dp'.
    """
    others = [name for name in axis_names if name != axis.name]
    instead = f"Give its dcn part to {others[0]!r}" if others else "Add an axis for the slices"
    where = f"{asked} puts {axis.name}={axis.size} across {axis.dcn} slices"
    network = None if topology.wrap is None else Network.of(topology)
    if network is None or network.dcn_links is None or network.link_bytes_per_second is None:
        return f"{where}. It waits for DCN in every layer; the model has no figure. {instead}."
    link = network.link_bytes_per_second / 1e9
    most = max(2, min(axis.size, topology.devices_per_slice))
    over, inside = network.bound(axis.size, axis.dcn) * link, network.bound(most) * link
    return (
        f"{where}. Modelled, it gets at most {over:.3g} GB/s per device for all-gathers, inside a "
        f"slice at most {inside:.3g}. {instead}."
    )
