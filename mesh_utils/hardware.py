"""Hardware: what is known of each TPU generation and GPU node, and who says so.

The figures are in tpu_configs/hardware/*.yaml, one file per chip, each figure beside its source.
None is written in Python. A figure that no source gives is None, with the reason.

    chip = find_chip("v5p")             also "v5litepod", "TPU v5 lite", "h100", "NVIDIA H200", ...
    chip.hbm_bytes                      102005473280
    chip.figure("hbm").source           "Cloud TPU documentation, TPU v5p, https://docs.cloud..."
    chip.figure("hbm").others           what other sources say: (96 GB, scaling book)
    chip.slices                         the table of real slices: see `SliceTable`

Units are bytes, bytes per second, FLOP per second. "GB" is 10^9 bytes, "GiB" 2^30; "Gbit/s" is
10^9 bits per second. Link bandwidths are one-way: a link carries as much the other way.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from types import MappingProxyType
from typing import Any, cast

from mesh_utils.argument_types import argument_types
from mesh_utils.errors import MeshError

__all__ = []


# ------------------------------------------------------------------------------------------ Figure
#
# A number and who says it.

UNITS = {
    "": 1.0,
    "GB": 1e9,
    "GiB": 2.0**30,
    "GB/s": 1e9,
    "GiB/s": 2.0**30,
    "Gbit/s": 1e9 / 8,
    "TFLOP/s": 1e12,
}
"""What a unit of the files is in bytes, bytes per second or FLOP per second."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure of a hardware file.

    Attributes:
        value: in bytes, bytes per second, FLOP per second, or a count; None where not known.
        source: who says so; "" where it is not known.
        note: how the figure follows from what the source says.
        reason: why it is not known; "" where it is.
        others: the same figure from other sources, where there are any.

    Example:
        >>> Figure(95 * 2**30, "Cloud").whole
        102005473280
    """

    value: float | None
    source: str
    note: str = ""
    reason: str = ""
    others: tuple[Figure, ...] = ()

    @property
    def whole(self) -> int | None:
        """The value as an integer: bytes, or a count."""
        return None if self.value is None else round(self.value)

    @property
    def is_disputed(self) -> bool:
        """Whether another source gives another value, by more than 1 %."""
        if self.value is None:
            return False
        numbers = [figure.value for figure in self.others if figure.value is not None]
        return any(abs(number - self.value) > 0.01 * abs(self.value) for number in numbers)

    def needed(self, what: str) -> float:
        """The value, where one cannot go on without it.

        Args:
            what: what it is of, for the message.

        Returns:
            The value.

        Raises:
            MeshError: it is not known.
        """
        if self.value is None:
            raise MeshError(
                f"{what} was asked for. It is not known: {self.reason or 'no source gives it'}. "
                "Pass the figure yourself, or ask for what needs none."
            )
        return self.value


# -------------------------------------------------------------------------------------- SliceTable
#
# Which slices of a chip there are, which dims of them wrap, which can be twisted.
#
# A slice is a box of chips joined by ICI. Not every box can be had: Cloud sells a list of shapes.
# In a shape, a dim either ends at its last chip (a mesh) or a link leads from there to the first
# (it wraps: a torus). libtpu accepts any box with any wrap, and devices do not tell their wrap, so
# both are looked up here:
#
#     table = find_chip("v5p").slices
#     table.is_real((4, 4, 8)), table.is_real((4, 4, 6))      True, False
#     table.wrap((4, 4, 8))                                   (True, True, True)
#     table.wrap((2, 2, 4))                                   (False, False, False)
#     table.nearest((4, 4, 6))                                (4, 4, 4), (4, 4, 8), ...
#
# Wrap rules (wrap_rule):
#
#   all_if_multiples_of     every dim wraps if every dim is a multiple of wrap_size, else none does:
#                           v4, v5p and tpu7x, whose wrap links are switches between cubes
#   dims_of                 the dims of exactly wrap_size chips wrap: v5e and v6e, 16 of them
#   whole_pod               the pod wraps; of smaller slices it is not known: v2 and v3
#   switched                there is no torus: GPUs

Shape3 = tuple[int, int, int]
Wrap3 = tuple[bool, bool, bool]

CUBE = 4
"""Chips of a cube along each dim: what optical switches join to larger slices."""


@dataclass(frozen=True)
class SliceTable:
    """The real slices of one chip.

    Attributes:
        shapes: the slices that a count of chips names, in ascending order of chips.
        max_cubes: shapes of up to so many whole cubes of 4x4x4 are real too; 0 for none.
        cubes_ascend: whether those have their dims in ascending order only.
        wrap_rule: which dims wrap: see above.
        wrap_size: the number in that rule.
        pod: the shape of the pod, for "whole_pod".
        wrap_reason: why the wrap of some slices is not known.
        can_twist: whether slices of k x k x 2k and k x 2k x 2k chips can be twisted tori.
        twist_reason: why one cannot say whether such a slice is twisted.
        source: who lists the shapes.

    Example:
        >>> table = SliceTable(((2, 2, 1), (16, 16, 1)), 0, True, "dims_of", 16, source="me")
        >>> table.is_real((16, 16, 1)), table.wrap((16, 16, 1))
        (True, (True, True, False))
    """

    shapes: tuple[Shape3, ...]
    max_cubes: int
    cubes_ascend: bool
    wrap_rule: str
    wrap_size: int
    pod: Shape3 | None = None
    wrap_reason: str = ""
    can_twist: bool = False
    twist_reason: str = ""
    source: str = ""

    def is_real(self, shape: Shape3) -> bool:
        """Whether there is such a slice.

        Args:
            shape: chips in x, y and z.

        Returns:
            True if it is listed, or made of whole cubes as the chip allows.
        """
        if self.wrap_rule == "switched":
            return shape[1:] == (1, 1) and shape[0] <= self.shapes[0][0]
        if shape in self.shapes:
            return True
        in_order = not self.cubes_ascend or tuple(sorted(shape)) == shape
        cubes = math.prod(size // CUBE for size in shape)
        in_cubes = all(size % CUBE == 0 for size in shape)
        return in_cubes and in_order and cubes <= self.max_cubes

    def wrap(self, shape: Shape3) -> Wrap3 | None:
        """Which dims of a real slice wrap.

        Args:
            shape: chips in x, y and z.

        Returns:
            A flag per dim; None where it is not known: for some slices of v2 and v3, and for most
            boxes that are no real slice. A dim of one or two chips never wraps.
        """
        if not self.is_real(shape):
            return self.part_wrap(shape)
        if self.wrap_rule == "all_if_multiples_of":
            every = all(size % self.wrap_size == 0 for size in shape)
            return (every, every, every)
        if self.wrap_rule == "whole_pod" and max(shape) > 2:
            return (True, True, False) if shape == self.pod else None
        return self.part_wrap(shape) or (False, False, False)

    def part_wrap(self, shape: Shape3) -> Wrap3 | None:
        """Which dims of a box wrap, whatever slice it is part of.

        Args:
            shape: chips in x, y and z.

        Returns:
            A flag per dim, where the dims of a chip wrap by their own length (v5e, v6e) or the box
            is too small to wrap; else None.

        Example:
            >>> table = SliceTable(((16, 16, 1),), 0, True, "dims_of", 16)
            >>> table.part_wrap((16, 4, 1))
            (True, False, False)
        """
        size = self.wrap_size
        if self.wrap_rule == "dims_of" and max(shape) <= size and shape[2] == 1:
            return (shape[0] == size, shape[1] == size, False)
        return (False, False, False) if max(shape) <= 2 else None

    def twists(self, shape: Shape3) -> bool:
        """Whether a slice of that shape can be a twisted torus.

        Args:
            shape: chips in x, y and z.

        Returns:
            True for k x k x 2k and k x 2k x 2k, in any order, where the chip has twisted tori.
        """
        low, middle, high = sorted(shape)
        fits = high == 2 * low and middle in (low, high)
        return self.can_twist and fits and self.wrap(shape) == (True, True, True)

    def of_chips(self, count: int) -> Shape3 | None:
        """The slice that a number of chips stands for in Cloud's accelerator types.

        Args:
            count: chips.

        Returns:
            Its shape; None where no listed slice has so many chips.
        """
        shapes = (shape for shape in self.shapes if math.prod(shape) == count)
        return next(shapes, None)

    def nearest(self, shape: Shape3, count: int = 3) -> tuple[Shape3, ...]:
        """The real slices most like a box.

        Args:
            shape: chips in x, y and z.
            count: how many to return.

        Returns:
            Real shapes, the most alike first: the same dims in another order, then by the ratios of
            their dims, all in ascending order.
        """
        ordered = sorted(shape)

        def unlikeness(real: Shape3) -> tuple[float, float, Shape3]:
            ratios = [abs(math.log2(a / b)) for a, b in zip(sorted(real), ordered, strict=True)]
            return (sum(ratios), abs(math.log2(math.prod(real) / math.prod(shape))), real)

        return tuple(sorted(_all_shapes(self), key=unlikeness)[:count])

    def nearest_twisted(self, shape: Shape3) -> Shape3 | None:
        """The slice most like a box that can be twisted.

        Args:
            shape: chips in x, y and z.

        Returns:
            Its shape; None if the chip has no twisted tori.
        """
        near = self.nearest(shape, len(_all_shapes(self)))
        return next((real for real in near if self.twists(real)), None)

    def nearest_counts(self, count: float) -> tuple[int, ...]:
        """The numbers of chips next to a number that no listed slice has.

        Args:
            count: chips; not a whole number where half of one was asked for.

        Returns:
            The next smaller and the next larger, where there are such.
        """
        counts = sorted(math.prod(shape) for shape in self.shapes)
        lower = [n for n in counts if n < count][-1:]
        higher = [n for n in counts if n > count][:1]
        return (*lower, *higher)


@cache
def _all_shapes(table: SliceTable) -> tuple[Shape3, ...]:
    """The listed shapes, and those of whole cubes with their dims in ascending order."""
    top = table.max_cubes
    cubes = [
        (CUBE * a, CUBE * b, CUBE * c)
        for a in range(1, top + 1)
        for b in range(a, top // a + 1)
        for c in range(b, top // (a * b) + 1)
    ]
    return tuple(dict.fromkeys((*table.shapes, *cubes)))


# ---------------------------------------------------------- Reads one file of tpu_configs/hardware
#
# A file has: name, title, platform; `sources`, the documents by a short key; `names`, `figures`,
# `peak_flops`, `host` and `slices`, in which each entry is a mapping with `value` and `source`, or
# `value: null` and `reason`; and maybe `unit`, `note`, and `others` with further such mappings.

_FIGURES = (
    "cores_per_chip",
    "devices_per_chip",
    "hbm",
    "usable_hbm_per_device",
    "hbm_bandwidth",
    "ici_links",
    "ici_link_bandwidth",
    "core_link_bandwidth",
    "dcn_bandwidth_per_chip",
    "torus_rank",
    "pod_chips",
)
_NAMES = ("aliases", "libtpu", "device_kinds", "cloud", "cloud_counts", "gke", "machine_types")


def yaml_names(folder: str) -> tuple[str, ...]:
    """Lists the files of a folder of tpu_configs.

    Args:
        folder: "hardware" or "jobs".

    Returns:
        Their names, without ".yaml", in alphabetical order.

    Example:
        >>> "v5p" in yaml_names("hardware")
        True
    """
    entries = files("tpu_configs").joinpath(folder).iterdir()
    file_names = [entry.name for entry in entries if entry.name.endswith(".yaml")]
    return tuple(sorted(name.removesuffix(".yaml") for name in file_names))


def read_box(text: str) -> tuple[int, int, int]:
    """Reads "2x2x1", "4x4" or "8".

    Args:
        text: up to three positive integers with "x" between them.

    Returns:
        Them, with 1 for what is missing.

    Raises:
        MeshError: it is no such text.

    Example:
        >>> read_box("16x16")
        (16, 16, 1)
    """
    parts = text.lower().split("x")
    if len(parts) > 3 or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise MeshError(
            f"The shape {text!r} was given. It is no box of chips. "
            "Pass up to three positive integers with 'x' between them, such as 4x4x8."
        )
    sizes = [int(part) for part in parts] + [1, 1]
    return sizes[0], sizes[1], sizes[2]


class _Entries:
    """The entries of one file."""

    def __init__(self, document: Mapping[str, object], file: str) -> None:
        self._document = document
        self._file = file
        self._sources = cast("Mapping[str, str]", self.plain("sources"))

    def plain(self, key: str) -> object:
        if key not in self._document:
            raise self._fault(key, "It is not there")
        return self._document[key]

    def of(self, group: str) -> Mapping[str, Mapping[str, object]]:
        return cast("Mapping[str, Mapping[str, object]]", self.plain(group))

    def entry(self, group: str, name: str) -> Mapping[str, object]:
        entry = self.of(group).get(name)
        if entry is None:
            raise self._fault(f"{group}.{name}", "It is not there")
        has_value = entry.get("value", ...) is not None
        if has_value and "source" not in entry:
            raise self._fault(f"{group}.{name}", "It names no source")
        if not has_value and "reason" not in entry:
            raise self._fault(f"{group}.{name}", "It is null without a reason")
        for figure in (entry, *cast("Sequence[Mapping[str, object]]", entry.get("others", ()))):
            if "source" in figure and figure["source"] not in self._sources:
                raise self._fault(
                    f"{group}.{name}", f"Its source {figure['source']!r} is not listed"
                )
        return entry

    def words(self, group: str, name: str) -> tuple[str, ...]:
        words = self.entry(group, name).get("value")
        if words is None:
            return ()
        return tuple(cast("list[str]", words)) if isinstance(words, list) else (str(words),)

    def figure(self, group: str, name: str) -> Figure:
        entry = self.entry(group, name)
        disputes = cast("Sequence[Mapping[str, object]]", entry.get("others", ()))
        return self._figure(entry, tuple(self._figure(dispute) for dispute in disputes))

    def _figure(self, entry: Mapping[str, object], disputes: tuple[Figure, ...] = ()) -> Figure:
        number, unit = entry.get("value"), str(entry.get("unit", ""))
        if unit not in UNITS:
            raise self._fault(str(entry), f"The unit {unit!r} is not known")
        source = entry.get("source")
        return Figure(
            value=None if number is None else float(cast("float", number)) * UNITS[unit],
            source="" if source is None else self._sources[str(source)],
            note=str(entry.get("note", "")),
            reason=str(entry.get("reason", "")),
            others=disputes,
        )

    def source(self, entry: Mapping[str, object]) -> str:
        return self._sources[str(entry["source"])]

    def _fault(self, what: str, why: str) -> MeshError:
        return MeshError(
            f"{what} of {self._file} was read. {why}. "
            "Write it with a value and a listed source, or with null and a reason."
        )


def _read_slices(entries: _Entries) -> SliceTable:
    shapes = entries.entry("slices", "shapes")
    wrap, twist = entries.entry("slices", "wrap"), entries.entry("slices", "twist")
    has_cubes = "cubes" in entries.of("slices")
    cubes: Mapping[str, object] = entries.entry("slices", "cubes") if has_cubes else {}
    pod = wrap.get("pod")
    return SliceTable(
        shapes=tuple(read_box(str(shape)) for shape in cast("list[str]", shapes["value"])),
        max_cubes=cast("int", cubes.get("max", 0)),
        cubes_ascend=bool(cubes.get("ascending", True)),
        wrap_rule=str(wrap["rule"]),
        wrap_size=cast("int", wrap.get("of", wrap.get("size", 0))),
        pod=None if pod is None else read_box(str(pod)),
        wrap_reason=str(wrap.get("reason", "")),
        can_twist=twist["rule"] == "k_k_2k",
        twist_reason=str(twist.get("reason", "")),
        source=entries.source(shapes),
    )


# ---------------------------------------------------------------------------------------- Hardware


@dataclass(frozen=True)
class Chip:
    """One TPU generation, or one kind of GPU in its node.

    Attributes:
        name: the name by which it is known here, such as "v5p".
        title: the name for people.
        platform: "tpu" or "gpu".
        aliases: other names, as libtpu, Cloud and people write them.
        device_kinds: what JAX calls a device of it.
        cloud_names: prefixes of Cloud's accelerator types, the one to write first.
        cloud_counts: what the number of an accelerator type counts: "cores" or "chips".
        libtpu_name: its name in a topology name of libtpu; None for GPUs.
        gke_name: its accelerator label in GKE; None where not known.
        machine_types: its machine types in GKE.
        cores_per_chip: TensorCores per chip; 1 for a GPU.
        devices_per_chip: devices per chip, as JAX counts them on a TPU VM.
        torus_rank: 2 or 3; 0 where a switch joins the chips (NVLink).
        chips_per_host: the chips of one host (VM) in x, y and z.
        slices: which slices there are, and which of their dims wrap.
        figures: every figure by name, with source, note and what other sources say.
        peak_flops: peak FLOP/s by dtype ("bf16", "int8", "fp8", ...), dense.

    Example:
        >>> find_chip("v5litepod").name, find_chip("TPU v6 lite").title
        ('v5e', 'TPU v6e (Trillium)')
    """

    name: str
    title: str
    platform: str
    aliases: tuple[str, ...]
    device_kinds: tuple[str, ...]
    cloud_names: tuple[str, ...]
    cloud_counts: str
    libtpu_name: str | None
    gke_name: str | None
    machine_types: tuple[str, ...]
    cores_per_chip: int
    devices_per_chip: int
    torus_rank: int
    chips_per_host: tuple[int, int, int]
    slices: SliceTable = field(repr=False)
    figures: Mapping[str, Figure] = field(repr=False, hash=False)
    peak_flops: Mapping[str, Figure] = field(repr=False, hash=False)

    def figure(self, name: str) -> Figure:
        """Looks a figure up, with its source.

        Args:
            name: such as "hbm", "ici_link_bandwidth"; "peak_flops.bf16" for a peak.

        Returns:
            The figure.

        Raises:
            MeshError: there is none of that name.

        Example:
            >>> find_chip("v5e").figure("ici_link_bandwidth").note
            '400 GB/s in both directions per chip / 4 ports / 2'
        """
        group, _, dtype = name.rpartition(".")
        figures = self.peak_flops if group == "peak_flops" else self.figures
        if (dtype if group else name) not in figures:
            raise MeshError(
                f"Figure {name!r} of {self.title} was asked for. There is no such figure. "
                f"Pass one of: {', '.join(self._figure_names())}."
            )
        return figures[dtype if group else name]

    def _figure_names(self) -> list[str]:
        return [*self.figures, *(f"peak_flops.{dtype}" for dtype in self.peak_flops)]

    @property
    def hbm_bytes(self) -> int | None:
        """Bytes of HBM per chip."""
        return self.figures["hbm"].whole

    @property
    def usable_hbm_bytes(self) -> int | None:
        """Bytes of HBM that a program can have, per DEVICE."""
        return self.figures["usable_hbm_per_device"].whole

    @property
    def hbm_bytes_per_second(self) -> float | None:
        """HBM bandwidth per chip."""
        return self.figures["hbm_bandwidth"].value

    @property
    def link_bytes_per_second(self) -> float | None:
        """One-way bandwidth of one ICI link; for a GPU, of all its NVLink ports together."""
        link = self.figures["ici_link_bandwidth"].value
        if link is None or self.torus_rank:
            return link
        return link * (self.figures["ici_links"].whole or 1)

    @property
    def dcn_bytes_per_second(self) -> float | None:
        """One-way bandwidth between slices (DCN, InfiniBand) per chip."""
        return self.figures["dcn_bandwidth_per_chip"].value

    def peak(self, dtype: str) -> float | None:
        """The peak of dense matrix products.

        Args:
            dtype: "bf16", "int8", "fp8", ...

        Returns:
            FLOP/s per chip; None where no source gives it.

        Example:
            >>> find_chip("v5p").peak("bf16"), find_chip("v2").peak("fp8")
            (459000000000000.0, None)
        """
        figure = self.peak_flops.get(dtype)
        return None if figure is None else figure.value

    def __reduce__(self) -> tuple[object, ...]:
        values = {attribute.name: getattr(self, attribute.name) for attribute in fields(self)}
        values |= {"figures": dict(self.figures), "peak_flops": dict(self.peak_flops)}
        return _restored, (values,)

    def check_valid(self) -> None:
        """States the invariants of a chip.

        Raises:
            MeshError: one of them does not hold: a fault of its file in tpu_configs/hardware.
        """
        faults = [
            f"{name} is {figure.value}"
            for name, figure in [*self.figures.items(), *self.peak_flops.items()]
            if figure.value is not None and figure.value < 0
        ]
        usable, hbm = self.usable_hbm_bytes, self.hbm_bytes
        # 95 GiB of Cloud against libtpu's 95.73: the two round differently, by less than 2 %.
        if usable and hbm and usable * self.devices_per_chip > 1.02 * hbm:
            faults.append(f"usable HBM of {self.devices_per_chip} x {usable} is more than {hbm}")
        if self.torus_rank not in (0, 2, 3) or self.platform not in ("tpu", "gpu"):
            faults.append(f"torus_rank={self.torus_rank} on platform={self.platform!r}")
        if self.cloud_counts not in ("cores", "chips"):
            faults.append(f"cloud_counts={self.cloud_counts!r}")
        if faults:
            raise MeshError(
                f"{self.title} was checked. Its figures cannot be: {'; '.join(faults)}. "
                f"Correct tpu_configs/hardware/{self.name}.yaml."
            )


def _restored(values: dict[str, Any]) -> Chip:
    """The chip of the fields of a pickled one: a read-only mapping cannot be pickled."""
    mappings = ("figures", "peak_flops")
    frozen: dict[str, Any] = {name: MappingProxyType(values[name]) for name in mappings}
    return Chip(**{**values, **frozen})


@cache
def chips() -> tuple[Chip, ...]:
    """Reads every chip that is known.

    Returns:
        The chips: TPUs from old to new, then GPUs.

    Example:
        >>> [chip.name for chip in chips()][:3]
        ['v2', 'v3', 'v4']
    """
    every_chip: list[Chip] = []
    for name in yaml_names("hardware"):
        text = files("tpu_configs").joinpath("hardware", f"{name}.yaml").read_text("utf-8")
        every_chip.append(read_hardware(text, f"tpu_configs/hardware/{name}.yaml"))
    return tuple(sorted(every_chip, key=_age))


@argument_types
def find_chip(name: str) -> Chip:
    """Finds a chip by any of its names.

    Args:
        name: its name here, an alias ("v5litepod", "trillium"), a prefix of Cloud's accelerator
            types, a device kind of JAX ("TPU v5 lite") or GKE's label; case does not matter.

    Returns:
        The chip.

    Raises:
        MeshError: a name that none has.

    Example:
        >>> find_chip("tpu-v5p-slice").name
        'v5p'
        >>> find_chip("v5q")
        Traceback (most recent call last):
        ...
        mesh_utils.errors.MeshError: Chip 'v5q' was asked for. ... Pass 'v5p', or one of ...
    """
    by_name = _names()
    match = by_name.get(_plain(name))
    if match is None:
        # Names of one letter less or more, first; then whatever begins alike.
        near = get_close_matches(_plain(name), by_name, n=1, cutoff=0.4)
        nearest = f"{by_name[near[0]].name!r}, or one of " if near else ""
        raise MeshError(
            f"Chip {name!r} was asked for. No chip has that name. "
            f"Pass {nearest}{', '.join(chip.name for chip in chips())}."
        )
    return match


@cache
def _names() -> dict[str, Chip]:
    names: dict[str, Chip] = {}
    for chip in chips():
        chip_names = (chip.name, *chip.aliases, *chip.cloud_names, *chip.device_kinds)
        for name in (*chip_names, *([chip.gke_name] if chip.gke_name else [])):
            names[_plain(name)] = chip
    return names


def _plain(name: str) -> str:
    return name.strip().lower()


def _age(chip: Chip) -> tuple[bool, int, str]:
    # v4 < v5e < v5p < v6e < tpu7x: by the first digits of the name; GPUs after TPUs.
    digits = "".join(letter for letter in chip.name if letter.isdigit())
    return chip.platform == "gpu", int(digits or 0), chip.name


def read_hardware(text: str, file: str) -> Chip:
    """Reads the text of a hardware file.

    Args:
        text: YAML.
        file: its path, for messages.

    Returns:
        What it says.

    Raises:
        MeshError: something is missing in it or has no source.
    """
    import yaml  # it takes longer to import than all of mesh_utils

    loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    entries = _Entries(cast("Mapping[str, object]", yaml.load(text, loader)), file)
    names = {name: entries.words("names", name) for name in _NAMES}
    figures = {name: entries.figure("figures", name) for name in _FIGURES}
    peaks = {dtype: entries.figure("peak_flops", dtype) for dtype in entries.of("peak_flops")}
    chip = Chip(
        name=str(entries.plain("name")),
        title=str(entries.plain("title")),
        platform=str(entries.plain("platform")),
        aliases=names["aliases"],
        device_kinds=names["device_kinds"],
        cloud_names=names["cloud"],
        cloud_counts=names["cloud_counts"][0],
        libtpu_name=next(iter(names["libtpu"]), None),
        gke_name=next(iter(names["gke"]), None),
        machine_types=names["machine_types"],
        cores_per_chip=figures["cores_per_chip"].whole or 1,
        devices_per_chip=figures["devices_per_chip"].whole or 1,
        torus_rank=figures["torus_rank"].whole or 0,
        chips_per_host=read_box(str(entries.entry("host", "chips")["value"])),
        slices=_read_slices(entries),
        figures=MappingProxyType(figures),
        peak_flops=MappingProxyType(peaks),
    )
    chip.check_valid()
    return chip
