"""Hardware: what is known of each TPU generation and GPU node, and who says so.

The figures are in tpu_configs/hardware/*.yaml, one file per chip, each figure beside its source.
None is written in Python. A figure that no source gives is None, with the reason.

    chip = find_chip("v5p")             also "v5litepod", "TPU v5 lite", "h100", "NVIDIA H200", ...
    chip.hbm_bytes                      102005473280
    chip.figure("hbm").source           "Cloud TPU documentation, TPU v5p, https://docs.cloud..."
    chip.figure("hbm").others           what other sources say: (96 GB, scaling book)
    chip.slices                         the table of real slices: see slice_table.py

Units are bytes, bytes per second, FLOP per second. "GB" is 10^9 bytes, "GiB" 2^30; "Gbit/s" is
10^9 bits per second. Link bandwidths are one-way: a link carries as much the other way.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from functools import cache
from types import MappingProxyType
from typing import Any

from mesh_utils.argument_types import argument_types
from mesh_utils.errors import MeshError
from mesh_utils.figure import Figure
from mesh_utils.hardware_file import hardware_names, read_hardware_file
from mesh_utils.slice_table import SliceTable


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
        known = self.peak_flops if group == "peak_flops" else self.figures
        if (dtype if group else name) not in known:
            raise MeshError(
                f"Figure {name!r} of {self.title} was asked for. There is no such figure. "
                f"Pass one of: {', '.join(self._figure_names())}."
            )
        return known[dtype if group else name]

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
        value = self.figures["ici_link_bandwidth"].value
        if value is None or self.torus_rank:
            return value
        return value * (self.figures["ici_links"].whole or 1)

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
        found = self.peak_flops.get(dtype)
        return None if found is None else found.value

    def __reduce__(self) -> tuple[object, ...]:
        values = {each.name: getattr(self, each.name) for each in fields(self)}
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
    found = [_read_chip(name) for name in hardware_names()]
    return tuple(sorted(found, key=_age))


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
    known = _names()
    found = known.get(_plain(name))
    if found is None:
        # Names of one letter less or more, first; then whatever begins alike.
        near = get_close_matches(_plain(name), known, n=1, cutoff=0.4)
        nearest = f"{known[near[0]].name!r}, or one of " if near else ""
        raise MeshError(
            f"Chip {name!r} was asked for. No chip has that name. "
            f"Pass {nearest}{', '.join(chip.name for chip in chips())}."
        )
    return found


@cache
def _names() -> dict[str, Chip]:
    names: dict[str, Chip] = {}
    for chip in chips():
        own = (chip.name, *chip.aliases, *chip.cloud_names, *chip.device_kinds)
        for name in (*own, *([chip.gke_name] if chip.gke_name else [])):
            names[_plain(name)] = chip
    return names


def _plain(name: str) -> str:
    return name.strip().lower()


def _age(chip: Chip) -> tuple[bool, int, str]:
    # v4 < v5e < v5p < v6e < tpu7x: by the first digits of the name; GPUs after TPUs.
    digits = "".join(letter for letter in chip.name if letter.isdigit())
    return chip.platform == "gpu", int(digits or 0), chip.name


def _read_chip(name: str) -> Chip:
    file = read_hardware_file(name)
    figures, names = file.figures, file.names
    chip = Chip(
        name=file.name,
        title=file.title,
        platform=file.platform,
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
        chips_per_host=file.chips_per_host,
        slices=file.slices,
        figures=MappingProxyType(figures),
        peak_flops=MappingProxyType(file.peak_flops),
    )
    chip.check_valid()
    return chip
