"""ShardingPlan: what sharding rules come to for one model on one mesh, and its table.

Example:
    >>> from xla_dtensor.core.rules import ShardingRules
    >>> mesh = Mesh.arange((2, 4), ("fsdp", "tp"))
    >>> rules = ShardingRules([("layers.*.w", ("fsdp", "tp")), ("**", None)])
    >>> plan = rules.resolve({"layers.0.w": (6, 8), "layers.1.w": (6, 8), "scale": (8,)}, mesh)
    >>> print(table(plan))
    tensor         shape   placements  bytes/device  bytes  padding  rule
    layers.*.w x2  (6, 8)  [fsdp, tp]            48    384        0  layers.*.w
    scale          (8,)    [-]                   32     32        0  **
    total x3                                     80    416        0
    shadowed: ** by layers.*.w (2 tensors)
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

from mesh_utils import Mesh
from xla_dtensor.core.layout import Layout


@dataclass(frozen=True)
class TensorFacts:
    """What rules are resolved against, of one tensor.

    Args:
        shape: Its global shape.
        itemsize_bytes: Bytes per element.
        is_buffer: A buffer that no rule matches is copied to every device, without an error.
        same_as: The path under which the same tensor was listed before: tied weights.
    """

    shape: tuple[int, ...]
    itemsize_bytes: int = 4
    is_buffer: bool = False
    same_as: str | None = None


@dataclass(frozen=True)
class PlannedTensor:
    """How one tensor will lie, and by which rule.

    Args:
        path: Its path in the model.
        facts: Its shape and size.
        layout: How it will lie.
        pattern: The pattern that won; None where it is copied because none matched.
        shadowed: Later patterns that match it as well.
    """

    path: str
    facts: TensorFacts
    layout: Layout
    pattern: str | None
    shadowed: tuple[str, ...] = ()

    @property
    def device_bytes(self) -> int:
        """Bytes on each device, the padding of an uneven dim counted; 0 for a second name."""
        dims = enumerate(self.facts.shape)
        tile = (-(-extent // self.layout.num_shards(dim)) for dim, extent in dims)
        return 0 if self.facts.same_as else prod(tile) * self.facts.itemsize_bytes

    @property
    def total_bytes(self) -> int:
        """Bytes of the tensor itself, once; 0 for a second name of a tensor."""
        return 0 if self.facts.same_as else prod(self.facts.shape) * self.facts.itemsize_bytes

    @property
    def padding_bytes(self) -> int:
        """Bytes that uneven dims add to one whole copy."""
        shards = prod(self.layout.num_shards(dim) for dim in range(self.layout.ndim))
        return self.device_bytes * shards - self.total_bytes


@dataclass(frozen=True)
class PlannedOutput:
    """How what a module returns will lie.

    Args:
        path: The module's path; "" is the model itself.
        index: Which of its outputs; None: the only one.
        layout: How it will lie. Whether its rank fits is known when the module runs.
        pattern: The pattern that won.
        shadowed: Later patterns that match it as well.
    """

    path: str
    index: int | None
    layout: Layout
    pattern: str
    shadowed: tuple[str, ...] = ()


@dataclass(frozen=True)
class ShardingPlan(Mapping[str, Layout]):
    """Path -> Layout of a model's tensors; `tensors` and `outputs` say by which rule.

    ``str(plan)`` is its table.

    Args:
        mesh: The mesh.
        tensors: Every parameter and buffer, in the model's order.
        outputs: The modules whose outputs are placed.
    """

    mesh: Mesh
    tensors: tuple[PlannedTensor, ...]
    outputs: tuple[PlannedOutput, ...] = ()

    @cached_property
    def _layouts(self) -> dict[str, Layout]:
        return {tensor.path: tensor.layout for tensor in self.tensors}

    def __getitem__(self, path: str) -> Layout:
        return self._layouts[path]

    def __iter__(self) -> Iterator[str]:
        return iter(self._layouts)

    def __len__(self) -> int:
        return len(self.tensors)

    def __str__(self) -> str:
        return table(self)


def folded(path: str) -> str:
    """The path with every number between dots as ``*``.

    Example:
        >>> folded("layers.12.w1")
        'layers.*.w1'
    """
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", path)


def table(plan: ShardingPlan) -> str:
    """The plan as text, one line per tensor; equal ones of numbered layers share a line.

    Columns: path (``x4``: four of them), shape of each, placements per dim, bytes on one device and
    of the whole tensors (of all on the line together), bytes that uneven dims add to a whole copy,
    and the pattern that matched. Tied weights are counted once. Below: what modules return, and
    patterns that lost to earlier ones.

    Args:
        plan: What `ShardingRules.resolve` returned.

    Returns:
        Lines of text, without a newline at the end.
    """
    header = ("tensor", "shape", "placements", "bytes/device", "bytes", "padding", "rule")
    groups: dict[tuple[object, ...], list[PlannedTensor]] = {}
    for tensor in plan.tensors:
        facts = tensor.facts
        tied = None if facts.same_as is None else folded(facts.same_as)
        key = (folded(tensor.path), facts.shape, facts.itemsize_bytes, tied)
        groups.setdefault((*key, tensor.layout, tensor.pattern), []).append(tensor)
    rows = [header, *map(_row, groups.values())]
    sums = _sums(plan.tensors)
    rows.append((f"total x{len(plan.tensors)}", "", "", *sums, ""))
    return "\n".join([*_aligned(rows, (3, 4, 5)), *_output_lines(plan), *_shadowed_lines(plan)])


def _row(tensors: Sequence[PlannedTensor]) -> tuple[str, ...]:
    first = tensors[0]
    path = first.path if len(tensors) == 1 else f"{folded(first.path)} x{len(tensors)}"
    rule = "(no rule)" if first.pattern is None else first.pattern
    if first.facts.same_as is not None:
        rule += f" (tied to {first.facts.same_as})"
    return path, str(first.facts.shape), str(first.layout), *_sums(tensors), rule


def _sums(tensors: Sequence[PlannedTensor]) -> tuple[str, str, str]:
    return (
        f"{sum(tensor.device_bytes for tensor in tensors):,}",
        f"{sum(tensor.total_bytes for tensor in tensors):,}",
        f"{sum(tensor.padding_bytes for tensor in tensors):,}",
    )


def _aligned(rows: Sequence[tuple[str, ...]], right: tuple[int, ...]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if index in right else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _output_lines(plan: ShardingPlan) -> list[str]:
    found: dict[tuple[str, ...], list[str]] = {}
    for output in plan.outputs:
        ending = "()" if output.index is None else f"()[{output.index}]"
        key = (folded(output.path) + ending, str(output.layout), output.pattern)
        found.setdefault(key, []).append(output.path + ending)
    rows = [
        (paths[0] if len(paths) == 1 else f"{path} x{len(paths)}", placed, pattern)
        for (path, placed, pattern), paths in found.items()
    ]
    return _aligned([("output", "placements", "rule"), *rows], ()) if rows else []


def _shadowed_lines(plan: ShardingPlan) -> list[str]:
    counts: Counter[tuple[str, str, str]] = Counter()
    for what, entries in (("tensor", plan.tensors), ("output", plan.outputs)):
        for entry in entries:
            counts.update((pattern, str(entry.pattern), what) for pattern in entry.shadowed)
    return [
        f"shadowed: {pattern} by {winner} ({count} {what}{'s' if count > 1 else ''})"
        for (pattern, winner, what), count in counts.items()
    ]
