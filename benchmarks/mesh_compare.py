"""One case of `benchmarks.mesh`: the search's mesh, JAX's mesh and the optimum, by one measure.

Both meshes are read back from their devices: where each axis lies is found from the coordinates of
its groups, and Network says what it gets there. What the search says of itself is not used, but
that it holds is counted.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.mesh_optimum import optimum
from mesh_utils import Network, Topology, assign
from mesh_utils.assignment import mesh_score
from mesh_utils.devices import read_devices
from mesh_utils.jax_compat import JaxDevice, jax_mesh_utils, shown_to_jax
from mesh_utils.network import ring_links
from mesh_utils.span import axis_groups, find_span

IntArray = NDArray[np.int64]
NEAR = 1e-9
"""Scores that differ by less, relatively, are the same."""


@dataclass(frozen=True)
class Outcome:
    """What came of one case.

    Attributes:
        shape: the mesh shape.
        score: of the search's mesh, in links, read back from its devices.
        links: what each of its axes gets.
        jax_score: of JAX's mesh; None where JAX makes none.
        jax_links: what each of its axes gets.
        jax_error: the error that JAX raises although it may split dims; "" if none.
        jax_default_error: the error that it raises by default; "" if none.
        best: the highest score of all meshes; None where they were not enumerated.
        meshes: meshes that were enumerated.
        dominating: how much faster than JAX's an axis can be without a loss on another; 1 if none.
        is_exact: whether the search says that it is exact.
        faults: what is wrong with the search's mesh, in words.
        seconds: processor time of the search.
    """

    shape: tuple[int, ...]
    score: float
    links: tuple[float, ...]
    jax_score: float | None
    jax_links: tuple[float, ...]
    jax_error: str
    jax_default_error: str
    best: float | None
    meshes: int
    dominating: float
    is_exact: bool
    faults: tuple[str, ...]
    seconds: float

    @property
    def gain(self) -> float:
        """The search's score over JAX's; nan where JAX makes no mesh."""
        return math.nan if self.jax_score is None else self.score / self.jax_score

    @property
    def is_below_jax(self) -> bool:
        """Whether JAX's mesh has the higher score."""
        return self.gain < 1 - NEAR

    @property
    def is_better(self) -> bool:
        """Whether the search's mesh has the higher score."""
        return self.gain > 1 + NEAR

    @property
    def is_optimal(self) -> bool:
        """Whether no enumerated mesh has a higher score; False where none was enumerated."""
        return self.best is not None and self.score >= self.best * (1 - NEAR)


class Slice:
    """A slice, and what is looked up once for all of its shapes.

    Args:
        name: what `Topology.parse` reads.
        jax_kind: the device_kind that JAX is shown; None for that of the topology's devices.
    """

    def __init__(self, name: str, jax_kind: str | None = None) -> None:
        self.topology = Topology.parse(name)
        self.network = Network.of(self.topology)
        devices = read_devices(self.topology.devices)
        self._shown = shown_to_jax(devices)
        if jax_kind is not None:
            self._shown = [_called(device, jax_kind) for device in self._shown]
        self._mesh_utils = jax_mesh_utils("A comparison was asked for.", "leave it out")
        topology = self.topology
        self._places = np.column_stack(
            [topology.slice_index, topology.coords, topology.core_on_chip]
        ).astype(np.int64)
        order = np.argsort(topology.device_ids)
        self._ids, self._rows = topology.device_ids[order], order

    def places_of_ids(self, ids: IntArray) -> IntArray:
        """Slice, x, y, z and core of each device of a mesh, [*mesh_shape, 5]."""
        return self._places[self._rows[np.searchsorted(self._ids, ids)]]

    def jax_places(
        self, shape: Sequence[int], allow_split: bool = True
    ) -> tuple[IntArray | None, str]:
        """What JAX makes.

        Args:
            shape: the mesh shape.
            allow_split: whether it may split physical dims.

        Returns:
            The places of its mesh and "", or None and the error that it raised.
        """
        try:
            made: Any = self._mesh_utils.create_device_mesh(
                shape, self._shown, allow_split_physical_axes=allow_split
            )
        except (AssertionError, NotImplementedError, TypeError, ValueError) as error:
            return None, f"{type(error).__name__}: {_first_words(error)}"
        rows = np.fromiter((device.id for device in made.flat), np.int64, made.size)
        return self._places[rows].reshape(*made.shape, 5), ""

    def links(self, places: IntArray) -> tuple[float, ...]:
        """What an all-gather gets on each axis, in links, found from the places of its groups."""
        found: list[float] = []
        for axis in range(places.ndim - 1):
            groups = axis_groups(places, axis)
            span = find_span(self.network.shape, groups)
            if span is not None:
                found.append(self.network.links(span))
            else:  # rings of JAX that are no rows of chips: counted link by link
                found.append(ring_links(self.network, groups[..., 1:4]))
        return tuple(found)


def _called(device: JaxDevice, kind: str) -> JaxDevice:
    return JaxDevice(
        device.id, device.platform, kind, device.process_index, device.coords, device.core_on_chip
    )


def _first_words(error: Exception) -> str:
    return " ".join(str(error).split()[:8])


def compare(on: Slice, shape: tuple[int, ...], *, enumerate_all: bool = True) -> Outcome:
    """Runs one case.

    Args:
        on: the slice.
        shape: the mesh shape.
        enumerate_all: whether to look at all meshes, for the optimum.

    Returns:
        What came of it.

    Example:
        >>> found = compare(Slice("v5e:8x8"), (16, 4))
        >>> found.links, found.jax_links, found.dominating, found.is_optimal
        ((1.0, 2.0), (0.5, 1.0), 2.0, True)
    """
    start = time.process_time()
    made = assign(on.topology, shape)
    seconds = time.process_time() - start
    links = on.links(on.places_of_ids(made.device_ids))
    faults = _faults(on, made.device_ids, links, made.links)
    places, default_error = on.jax_places(shape, allow_split=False)
    error = ""
    if places is None:
        places, error = on.jax_places(shape)
    jax_links = () if places is None else on.links(places)
    best = optimum(on.network, shape, made.weights, jax_links) if enumerate_all else None
    return Outcome(
        shape=shape,
        score=mesh_score(shape, made.weights, links),
        links=links,
        jax_score=None if places is None else mesh_score(shape, made.weights, jax_links),
        jax_links=jax_links,
        jax_error=error,
        jax_default_error=default_error,
        best=None if best is None else best.score,
        meshes=0 if best is None else best.meshes,
        dominating=1.0 if best is None else best.dominating,
        is_exact=made.is_exact,
        faults=faults,
        seconds=seconds,
    )


def _faults(
    on: Slice, ids: IntArray, links: Sequence[float], said: Sequence[float]
) -> tuple[str, ...]:
    found: list[str] = []
    if not np.array_equal(np.sort(ids, axis=None), np.sort(on.topology.device_ids)):
        found.append("the mesh does not hold each device once")
    if not np.allclose(links, said, rtol=1e-9):
        found.append(f"its axes get {links}, not {said}")
    return tuple(found)
