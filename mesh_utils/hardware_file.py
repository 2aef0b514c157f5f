"""Reads one file of tpu_configs/hardware.

A file has: name, title, platform; `sources`, the documents by a short key; `names`, `figures`,
`peak_flops`, `host` and `slices`, in which each entry is a mapping with `value` and `source`, or
`value: null` and `reason`; and maybe `unit`, `note`, and `others` with further such mappings.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, cast

from mesh_utils.errors import MeshError
from mesh_utils.figure import UNITS, Figure
from mesh_utils.slice_table import SliceTable

_FOLDER = ("tpu_configs", "hardware")
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


@dataclass(frozen=True)
class HardwareFile:
    """What a file says, in bytes, bytes per second and FLOP per second.

    Attributes:
        name: the chip's name here.
        title: its name for people.
        platform: "tpu" or "gpu".
        names: other names by kind; () where there is none.
        figures: the figures by name.
        peak_flops: FLOP per second by dtype.
        chips_per_host: chips of a host in x, y, z.
        slices: the real slices.
    """

    name: str
    title: str
    platform: str
    names: dict[str, tuple[str, ...]]
    figures: dict[str, Figure]
    peak_flops: dict[str, Figure]
    chips_per_host: tuple[int, int, int]
    slices: SliceTable


def hardware_names() -> tuple[str, ...]:
    """Lists the files.

    Returns:
        Their names, without ".yaml", in alphabetical order.

    Example:
        >>> "v5p" in hardware_names()
        True
    """
    folder = files(_FOLDER[0]).joinpath(_FOLDER[1])
    found = [entry.name for entry in folder.iterdir() if entry.name.endswith(".yaml")]
    return tuple(sorted(name.removesuffix(".yaml") for name in found))


def read_hardware_file(name: str) -> HardwareFile:
    """Reads a packaged file.

    Args:
        name: its name, without ".yaml".

    Returns:
        What it says.

    Raises:
        MeshError: something is missing in it or has no source.
    """
    text = files(_FOLDER[0]).joinpath(_FOLDER[1], f"{name}.yaml").read_text(encoding="utf-8")
    return read_hardware(text, f"tpu_configs/hardware/{name}.yaml")


def read_hardware(text: str, file: str) -> HardwareFile:
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
    return HardwareFile(
        name=str(entries.plain("name")),
        title=str(entries.plain("title")),
        platform=str(entries.plain("platform")),
        names={name: entries.words("names", name) for name in _NAMES},
        figures={name: entries.figure("figures", name) for name in _FIGURES},
        peak_flops={
            dtype: entries.figure("peak_flops", dtype) for dtype in entries.of("peak_flops")
        },
        chips_per_host=read_box(str(entries.entry("host", "chips")["value"])),
        slices=_read_slices(entries),
    )


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

    def __init__(self, data: Mapping[str, object], file: str) -> None:
        self._data = data
        self._file = file
        self._sources = cast("Mapping[str, str]", self.plain("sources"))

    def plain(self, key: str) -> object:
        if key not in self._data:
            raise self._fault(key, "It is not there")
        return self._data[key]

    def of(self, group: str) -> Mapping[str, Mapping[str, object]]:
        return cast("Mapping[str, Mapping[str, object]]", self.plain(group))

    def entry(self, group: str, name: str) -> Mapping[str, object]:
        entry = self.of(group).get(name)
        if entry is None:
            raise self._fault(f"{group}.{name}", "It is not there")
        known = entry.get("value", ...) is not None
        if known and "source" not in entry:
            raise self._fault(f"{group}.{name}", "It names no source")
        if not known and "reason" not in entry:
            raise self._fault(f"{group}.{name}", "It is null without a reason")
        for each in (entry, *cast("Sequence[Mapping[str, object]]", entry.get("others", ()))):
            if "source" in each and each["source"] not in self._sources:
                raise self._fault(f"{group}.{name}", f"Its source {each['source']!r} is not listed")
        return entry

    def words(self, group: str, name: str) -> tuple[str, ...]:
        value = self.entry(group, name).get("value")
        if value is None:
            return ()
        return tuple(cast("list[str]", value)) if isinstance(value, list) else (str(value),)

    def figure(self, group: str, name: str) -> Figure:
        entry = self.entry(group, name)
        others = cast("Sequence[Mapping[str, object]]", entry.get("others", ()))
        return self._figure(entry, tuple(self._figure(other) for other in others))

    def _figure(self, entry: Mapping[str, object], others: tuple[Figure, ...] = ()) -> Figure:
        value, unit = entry.get("value"), str(entry.get("unit", ""))
        if unit not in UNITS:
            raise self._fault(str(entry), f"The unit {unit!r} is not known")
        source = entry.get("source")
        return Figure(
            value=None if value is None else float(cast("float", value)) * UNITS[unit],
            source="" if source is None else self._sources[str(source)],
            note=str(entry.get("note", "")),
            reason=str(entry.get("reason", "")),
            others=others,
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
