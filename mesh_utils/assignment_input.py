"""Reads what an assignment is asked for: shapes with one -1, weights by axis."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import SupportsIndex, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from mesh_utils.errors import AxisError, MeshError, TopologyError
from mesh_utils.mesh_input import Axis, as_integer
from mesh_utils.topology import Topology

Weights: TypeAlias = (
    Sequence[float]
    | NDArray[np.floating]
    | Mapping[str, float]
    | Mapping[int, float]
    | Mapping[Axis, float]
)
"""Bytes that each axis gathers, in any unit: in mesh order, or by axis."""


def settle_shapes(
    topology: Topology,
    mesh_shape: Iterable[SupportsIndex],
    dcn_mesh_shape: Iterable[SupportsIndex] | None,
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Reads the shapes of a mesh inside slices and across them.

    Args:
        topology: the chips.
        mesh_shape: sizes inside a slice; one may be -1.
        dcn_mesh_shape: sizes across slices; one may be -1; None for one slice.

    Returns:
        Both, filled.

    Raises:
        MeshError: what is no shape, or does not multiply to the devices there are.

    Example:
        >>> settle_shapes(Topology.parse("4xv5e:4x4"), (-1, 4), (-1, 1))
        ((4, 4), (4, 1))
    """
    per_slice, slices = topology.devices_per_slice, topology.num_slices
    ici = fill_shape("mesh_shape", mesh_shape, per_slice, f"devices in a slice of {topology!r}")
    if dcn_mesh_shape is None:
        if slices > 1:
            raise TopologyError(
                f"A mesh of {ici} was asked for on {slices} slices, {topology!r}. Nothing says "
                "which axis runs across slices, over DCN. "
                f"Pass dcn_mesh_shape={(slices, *(1,) * (len(ici) - 1))}, or create_hybrid_"
                "device_mesh."
            )
        return ici, (1,) * len(ici)
    dcn = fill_shape("dcn_mesh_shape", dcn_mesh_shape, slices, f"slices of {topology!r}")
    if len(dcn) != len(ici):
        raise MeshError(
            f"A mesh was asked for with mesh_shape={ici} and dcn_mesh_shape={dcn}. They have "
            f"{len(ici)} and {len(dcn)} axes. Pass a size for each axis in both, 1 where there is "
            "none."
        )
    return ici, dcn


def fill_shape(name: str, given: Iterable[SupportsIndex], count: int, what: str) -> tuple[int, ...]:
    """Reads a shape, and fills in its -1.

    Args:
        name: the argument, for the message.
        given: a size for each axis, one of which may be -1.
        count: what they are to multiply to.
        what: what is counted, for the message.

    Returns:
        The sizes.

    Raises:
        MeshError: sizes that are none, more than one -1, or a product that is not `count`.

    Example:
        >>> fill_shape("mesh_shape", (2, -1), 16, "devices")
        (2, 8)
    """
    is_list = hasattr(given, "__iter__") and not isinstance(given, (str, bytes, Mapping))
    read = tuple(as_integer(size) for size in given) if is_list else ()
    sizes = tuple(0 if size is None else size for size in read)
    if not sizes or any(size < 1 and size != -1 for size in sizes) or sizes.count(-1) > 1:
        raise MeshError(
            f"A mesh was asked for with {name}={given!r}. That is no size of 1 or more for each "
            "axis, of which one may be -1, for what is left. Pass such sizes, as in (-1, 4)."
        )
    known = math.prod(size for size in sizes if size != -1)
    if -1 in sizes and count % known == 0:
        return tuple(count // known if size == -1 else size for size in sizes)
    if known != count or -1 in sizes:
        raise MeshError(
            f"A mesh was asked for with {name}={sizes}, a product of {known}. There are {count} "
            f"{what}. Pass {name}={_nearest(sizes, count)}, or others with that product."
        )
    return sizes


def _nearest(sizes: tuple[int, ...], count: int) -> tuple[int, ...]:
    """A shape of that product, like the one given: one axis changed where that will do."""
    plain = tuple(max(size, 1) for size in sizes)
    for axis in range(len(plain)):
        others = math.prod(plain) // plain[axis]
        if count % others == 0:
            return (*plain[:axis], count // others, *plain[axis + 1 :])
    shape = [math.gcd(size, count) for size in plain[1:]]
    while count % math.prod(shape):
        shape[shape.index(max(shape))] = 1
    return (count // math.prod(shape), *shape)


def read_weights(weights: Weights | None, axis_names: tuple[Axis, ...]) -> tuple[float, ...]:
    """Reads what each axis gathers.

    Args:
        weights: bytes, in any unit, by axis or in mesh order; None doubles them from axis to axis.
        axis_names: the axes.

    Returns:
        A weight for each axis.

    Raises:
        AxisError: an axis that is not there.
        MeshError: no weights: too many or few, negative, not finite, or all 0.

    Example:
        >>> read_weights(None, ("dp", "tp")), read_weights({"tp": 3}, ("dp", "tp"))
        ((1.0, 2.0), (0.0, 3.0))
    """
    if weights is None:
        return tuple(2.0**number for number in range(len(axis_names)))
    if isinstance(weights, Mapping):
        by_axis = dict(cast("Mapping[Axis, float]", weights))
        unknown = [axis for axis in by_axis if axis not in axis_names]
        if unknown:
            raise AxisError(
                f"A mesh was asked for with weights={by_axis!r}. It has no axis "
                f"{unknown[0]!r}. Pass weights for some of {', '.join(map(str, axis_names))}."
            )
        values: list[object] = [by_axis.get(axis, 0.0) for axis in axis_names]
    else:
        given: object = weights
        is_list = isinstance(given, (list, tuple, np.ndarray))
        values = list(cast("Sequence[object]", given)) if is_list else []
    numbers = [_number(value) for value in values]
    fine = all(math.isfinite(number) and number >= 0 for number in numbers)
    if len(numbers) != len(axis_names) or not fine or not any(numbers):
        raise MeshError(
            f"A mesh of {len(axis_names)} axes was asked for with weights={weights!r}. That is no "
            "number of bytes, 0 or more, for each axis, of which one is more than 0. "
            f"Pass such as {tuple(2.0**number for number in range(len(axis_names)))}."
        )
    return tuple(numbers)


def _number(value: object) -> float:
    """A number as a float; nan for what is none."""
    if isinstance(value, (bool, str, bytes)):
        return math.nan
    try:
        return float(value)  # pyright: ignore[reportArgumentType]
    except (TypeError, ValueError):
        return math.nan
