"""Where the axes of the meshes of `benchmarks.mesh_libtpu` lie, and what the model says of them."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

from benchmarks.mesh_libtpu_cases import LibtpuCase
from mesh_utils import Network, assign, create_device_mesh, create_hybrid_device_mesh
from mesh_utils.span import axis_groups, find_span, mesh_places

RINGS: dict[str, bool | None] = {"search": None, "rings": True, "rows": False}
"""What `assign` is told of the order of the chips, for each mesh that the search makes."""


def mesh_ids(case: LibtpuCase) -> dict[str, np.ndarray]:
    """Makes the meshes of a case.

    Args:
        case: the slice and the shape.

    Returns:
        For each of STRATEGIES the device ids in the shape of the mesh; no "jax" where JAX makes
        none.
    """
    topology = case.parsed()
    found = {
        strategy: assign(topology, case.shape, case.dcn, rings=rings).device_ids
        for strategy, rings in RINGS.items()
    }
    split: dict[str, Any] = {"strategy": "jax", "allow_split_physical_axes": True}
    try:
        if case.dcn is None:
            made = create_device_mesh(case.shape, topology, **split)
        else:
            made = create_hybrid_device_mesh(case.shape, case.dcn, topology, **split)
    except (AssertionError, NotImplementedError, TypeError, ValueError):
        return found
    return {**found, "jax": np.vectorize(lambda device: device.id, otypes=[np.int64])(made)}


def digest(ids: np.ndarray) -> str:
    """A short word for the devices of a mesh in their order.

    Args:
        ids: the device ids in the shape of the mesh.

    Returns:
        16 hexadecimal digits.

    Example:
        >>> digest(np.arange(4)) == digest(np.arange(4).reshape(2, 2))
        False
    """
    content = f"{ids.shape} {ids.reshape(-1).tolist()}"
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def where_axes_lie(case: LibtpuCase) -> dict[str, list[dict[str, Any]]]:
    """Finds it from the ids of each mesh.

    Args:
        case: the slice and the shape.

    Returns:
        For each of STRATEGIES, for each axis of more than one device: the span, the strategy that
        the model takes for it, and whether its chips follow each other in rows. Nothing for a mesh
        that JAX does not make.

    Example:
        >>> from benchmarks.mesh_libtpu_cases import libtpu_cases
        >>> case = next(case for case in libtpu_cases() if case.shape == (16,))
        >>> where_axes_lie(case)["jax"][0]["strategy"]
        'whole dims'
    """
    topology = case.parsed()
    network = Network.of(topology)
    made = mesh_ids(case)
    return {"jax": [], **{key: _lies(network, topology, ids) for key, ids in made.items()}}


def _lies(network: Network, topology: Any, ids: np.ndarray) -> list[dict[str, Any]]:
    places = mesh_places(topology, ids)
    found: list[dict[str, Any]] = []
    for axis, size in enumerate(ids.shape):
        if size == 1:
            continue
        groups = axis_groups(places, axis)
        span = find_span(network.shape, groups)
        found.append(
            {
                "on": "no rows of chips" if span is None else str(span)[5:-1],
                "strategy": "ring in mesh order" if span is None else network.strategy(span),
                "in_rows": _in_rows(groups[0]),
            }
        )
    return found


def _in_rows(group: np.ndarray) -> bool:
    """Whether the devices of a group are counted through like digits, in some order of dims."""
    columns = [column - column.min() for column in group.T]
    active = [column for column in columns if column.max() > 0]
    # Each digit runs through its values in blocks of one length, from 0 on again and again.
    for column in active:
        changes = np.flatnonzero(np.diff(column))
        length = int(changes[0]) + 1
        values = np.unique(column)
        wanted = np.tile(np.repeat(values, length), len(column) // (length * len(values)) or 1)
        if not np.array_equal(column, wanted):
            return False
    return True
