"""The meshes that `benchmarks.mesh_libtpu` compiles for: a fixed sample over all generations.

The sample is drawn with a seed from all shapes of 1 to 4 axes on the slices below, a number of them
for each group, and the same ones every time.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.mesh_cases import shapes
from mesh_utils import Topology

SEED = 20261122

_SLICES: dict[str, tuple[int, tuple[str, ...]]] = {
    "v2": (20, ("v2:2x2", "v2:4x4", "v2:8x8", "v2:16x16")),
    "v3": (20, ("v3:2x2", "v3:4x4", "v3:8x8", "v3:16x16", "v3:32x32")),
    "v4": (42, ("v4:2x2x1", "v4:2x2x4", "v4:4x4x4", "v4:4x4x8", "v4:8x8x8", "v4:4x4x8_twisted")),
    "v5e": (50, ("v5e:2x2", "v5e:2x4", "v5e:4x4", "v5e:4x8", "v5e:8x8", "v5e:8x16", "v5e:16x16")),
    "v5p": (
        64,
        (
            *("v5p:2x2x1", "v5p:2x2x2", "v5p:2x4x4", "v5p:4x4x4", "v5p:4x4x8", "v5p:4x8x8"),
            *("v5p:8x8x8", "v5p:8x8x16", "v5p:4x4x8_twisted", "v5p:4x8x8_twisted"),
            *("v5p:4x4x12", "v5p:4x8x12", "v5p:4x4x20"),
        ),
    ),
    "v6e": (40, ("v6e:2x2", "v6e:2x4", "v6e:4x4", "v6e:4x8", "v6e:8x8", "v6e:8x16", "v6e:16x16")),
    "tpu7x": (20, ("tpu7x:2x2x1", "tpu7x:2x2x2", "tpu7x:2x2x4", "tpu7x:4x4x4")),
    "several slices": (
        48,
        (
            *("2xv5e:4x4", "4xv5e:4x4", "4xv5e:8x8", "2xv5e:16x16", "2xv6e:8x8", "4xv6e:4x4"),
            *("2xv5p:4x4x4", "4xv5p:2x2x4", "2xv4:4x4x4", "2xv3:4x4"),
        ),
    ),
}
"""For each group how many meshes, and the slices that they are drawn from."""


@dataclass(frozen=True)
class LibtpuCase:
    """One mesh to compile for.

    Attributes:
        group: what it is counted under.
        topology: what `Topology.parse` reads.
        libtpu: what libtpu calls a slice of it.
        options: what libtpu is told besides the name.
        wrap: what `Topology.parse` is told where its table does not know; None where it does.
        shape: the size of each axis inside a slice.
        dcn: the size of each axis across slices; None for one slice.
    """

    group: str
    topology: str
    libtpu: str
    options: dict[str, Any]
    wrap: tuple[bool, ...] | None
    shape: tuple[int, ...]
    dcn: tuple[int, ...] | None

    def parsed(self) -> Topology:
        """Its topology."""
        return Topology.parse(self.topology, wrap=self.wrap)

    def as_json(self) -> dict[str, Any]:
        """What the child process reads."""
        return asdict(self)


def libtpu_cases() -> list[LibtpuCase]:
    """The sample: the same meshes every time.

    Example:
        >>> len(libtpu_cases()) >= 300, libtpu_cases()[0].group
        (True, 'v2')
    """
    found: list[LibtpuCase] = []
    for group, (count, names) in _SLICES.items():
        every = [case for name in names for case in _of_slice(group, name)]
        # Each slice gets its share, so that small ones with few shapes are there too.
        drawn = random.Random(f"{SEED} {group}")
        per_slice = -(-count // len(names))
        kept: list[LibtpuCase] = []
        for name in names:
            own = [case for case in every if case.topology == name]
            kept += drawn.sample(own, min(per_slice, len(own)))
        rest = [case for case in every if case not in kept]
        missing = max(0, count - len(kept))
        found += kept + drawn.sample(rest, min(missing, len(rest)))
    return found


def _of_slice(group: str, name: str) -> Iterator[LibtpuCase]:
    wrap = _told_wrap(name)
    topology = Topology.parse(name, wrap=wrap)
    options: dict[str, Any] = {}
    if topology.wrap is not None and any(topology.wrap):
        options["wrap"] = topology.wrap
    if topology.chip is not None and topology.chip.name == "v4":
        options["chip_config_name"] = "megacore"  # one device per chip
    if topology.num_slices > 1:
        options["num_slices"] = topology.num_slices
    libtpu = name.split("x", 1)[1] if topology.num_slices > 1 else name
    most = 4 if topology.num_slices == 1 else 3
    for axes in range(1, most + 1):
        for shape in shapes(topology.devices_per_slice, axes):
            for dcn in _dcn_shapes(topology.num_slices, axes):
                yield LibtpuCase(group, name, libtpu, options, wrap, shape, dcn)


def _told_wrap(name: str) -> tuple[bool, ...] | None:
    """No wrap for slices of v2 and v3 of which it is not known."""
    return (False, False) if Topology.parse(name).wrap is None else None


def _dcn_shapes(num_slices: int, axes: int) -> list[tuple[int, ...] | None]:
    """All slices on one of the first two axes, or shared by them."""
    if num_slices == 1:
        return [None]
    alone = [tuple(num_slices if a == axis else 1 for a in range(axes)) for axis in range(axes)]
    both = [(2, num_slices // 2, *[1] * (axes - 2))] if axes > 1 and num_slices > 2 else []
    return [*alone[:2], *both]
