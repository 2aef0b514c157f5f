"""The arrays of a report: what each device holds of them, as asked for and as compiled."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from xla_dtensor.report.collective_lines import starred
from xla_dtensor.report.evidence import Held, Role

__all__ = ["TensorLine", "tensor_lines"]


@dataclass(frozen=True, slots=True)
class TensorLine:
    """An array outside the program, or several that differ in the number of their layer only.

    Attributes:
        name: as of `Held`; of several "layers.*.wq.weight".
        role: what it is for.
        count: how many there are.
        shape: the global shape of one.
        dtype: as HLO writes it.
        device_shape: the part of one on one device.
        requested: the layout that was asked for; None where nobody asked.
        chosen: the layout that the compiled program gives it; None where it cannot be said.
        global_bytes: of one, once.
        device_bytes: of the part of one on one device.

    Example:
        >>> weight = Held("layers.0.w", "parameter", (8, 4), "f32", (2, 4), "Shard(0)", "Shard(0)")
        >>> (line,) = tensor_lines([weight, replace(weight, name="layers.1.w")])
        >>> line.name, line.count, line.total_device_bytes, line.differs
        ('layers.*.w', 2, 64, False)
    """

    name: str
    role: Role
    count: int
    shape: tuple[int, ...]
    dtype: str
    device_shape: tuple[int, ...]
    requested: str | None
    chosen: str | None
    global_bytes: int
    device_bytes: int

    @property
    def total_device_bytes(self) -> int:
        """The bytes of all of them on one device."""
        return self.count * self.device_bytes

    @property
    def differs(self) -> bool:
        """Whether the program gives it another layout than was asked for."""
        both = self.requested is not None and self.chosen is not None
        return both and self.requested != self.chosen

    @property
    def layout(self) -> str | None:
        """The layout as compiled, or as asked for where that cannot be said."""
        return self.requested if self.chosen is None else self.chosen

    @property
    def layout_words(self) -> str:
        """The layout for people: both where they differ."""
        if self.differs:
            return f"({self.chosen}), asked for ({self.requested})"
        return self.layout or "-"

    @property
    def parts(self) -> int:
        """Into how many parts it is split; padding of uneven dims not counted."""
        if not math.prod(self.device_shape):
            return 1
        return math.prod(
            -(-whole // part) for whole, part in zip(self.shape, self.device_shape, strict=True)
        )


def tensor_lines(held: Iterable[Held]) -> tuple[TensorLine, ...]:
    """Lists arrays, those of equal layers as one.

    Args:
        held: of the evidence.

    Returns:
        The lines, the most bytes on a device first.

    Example:
        >>> tensor_lines([])
        ()
    """
    lines: dict[tuple[object, ...], TensorLine] = {}
    for one in held:
        key = (
            *(starred(one.name), one.role, one.shape, one.dtype, one.device_shape),
            *(one.requested, one.chosen),
        )
        if key in lines:
            count = lines[key].count + one.layers
            lines[key] = replace(lines[key], name=starred(one.name), count=count)
            continue
        lines[key] = TensorLine(
            name=one.name,
            role=one.role,
            count=one.layers,
            shape=one.shape,
            dtype=one.dtype,
            device_shape=one.device_shape,
            requested=one.requested,
            chosen=one.chosen,
            global_bytes=one.global_bytes // one.layers,
            device_bytes=one.device_bytes // one.layers,
        )
    return tuple(sorted(lines.values(), key=lambda line: (-line.total_device_bytes, line.name)))
