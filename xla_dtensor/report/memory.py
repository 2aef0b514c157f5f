"""The memory of one device: what a step takes, of what, and whether the device has it.

The total is the compiler's own figure (`CompilerMemory`); the parts are added up from what the
evidence names and from the layouts that the program prints, and compared with it. What is left
over is in `unexplained_bytes`, not spread over the parts.

    parts + temporaries + code + unexplained = total

Of the temporaries the compiler gives only the sum. Which arrays they are is an ESTIMATE from the
schedule (see liveness.py). How near it comes, for programs compiled by libtpu
0.0.42.1 for 2x2 chips (in MiB; "compiler" is temp_size_in_bytes of memory_analysis):

    program                                      estimate   compiler   estimate / compiler
    4 matmuls, v5e, large                           384.5      384.7   1.00
    4 matmuls and gradient, v5e, large             1664.0     1920.9   0.87
    4 matmuls, gradient, momentum, v5e, large      1920.0     1925.3   1.00
    6 matmuls, v5p                                    7.0        7.2   0.97
    6 matmuls and gradient, v5p                      18.0       18.7   0.96
    6 matmuls, gradient, momentum, v5p               32.5       36.4   0.89
    scan of 8 layers and gradient, v5e              160.0      160.5   1.00
    scan of 8 layers and gradient, v5p              239.0      252.3   0.95
    the same, layers recomputed, v5p                 54.0       68.4   0.79
    transformer step of 4 layers, v5p                95.0      106.0   0.90
    transformer step of 4 layers, v5e                 0.1        4.8   0.01 (its arrays are in VMEM)

Four smaller programs for v5e keep everything in VMEM: the compiler says 0, the estimate is at most
2.5 KiB. Of the first three above the compiler's own buffer assignment was dumped too: 384.6, 1664.4
and 1922.7 MiB in one allocation of temporaries. What its statistics add to that is not known.

So the estimate tells which arrays are large, not whether a step fits: it was never above the
compiler's figure where that is 4 MiB or more, and up to 21 % below where the arrays are in HBM.
Both are in the report.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from mesh_utils import Mesh
from xla_dtensor.report.finding import Origin, origin_of, starred
from xla_dtensor.report.hlo import told_metadata
from xla_dtensor.report.hlo_text import (
    HOST_SPACE,
    HloError,
    LaidArray,
    entry_aliases,
    entry_layouts,
    laid_arrays,
)
from xla_dtensor.report.liveness import LivePeak, live_peak
from xla_dtensor.report.report import ROLES, Evidence, Held, MeshAxis
from xla_dtensor.report.texts import axis_uses, bytes_text

__all__ = [
    "MemoryPart",
    "MemoryReport",
    "axis_dims",
    "free_axes",
    "is_sharded_over",
    "is_vocabulary",
    "memory_report",
    "shards",
]


# ------------------------------------------------------------ How the arrays of a step are sharded
#
# Into how many parts, and over which axes.

VOCABULARY_ROWS = 16_384
VOCABULARY_RATIO = 4
"""A matrix is a vocabulary's if its longer dim has so many rows, and so many times the other: no
vocabulary in use is smaller, and no MLP of a language model is so much wider than its model."""


def shards(held: Held) -> int:
    """Counts the different parts of an array.

    Args:
        held: the array.

    Returns:
        Their number; 1 if every device has the whole.

    Example:
        >>> shards(Held("w", "parameter", (8, 4), "f32", (2, 4)))
        4
    """
    parts = zip(held.shape, held.device_shape, strict=True)
    return math.prod(-(-extent // part) for extent, part in parts if part)


def is_sharded_over(held: Held, axis: str, mesh: Mesh) -> bool:
    """Whether an axis splits an array.

    Args:
        held: the array.
        axis: an axis of the mesh, as text.
        mesh: the mesh.

    Returns:
        What its layout says; where that is not known, whether its number of parts allows it.

    Example:
        >>> weight = Held("w", "parameter", (8, 4), "f32", (2, 4), "Replicate(), Shard(0)")
        >>> mesh = Mesh.arange((2, 4), ("dp", "tp"))
        >>> is_sharded_over(weight, "dp", mesh), is_sharded_over(weight, "tp", mesh)
        (False, True)
    """
    dims = axis_dims(held, mesh)
    if dims is not None:
        return dims.get(axis) is not None
    sizes = {str(n): size for n, size in zip(mesh.axis_names, mesh.mesh_shape, strict=True)}
    size = sizes.get(axis, 1)
    return size > 1 and shards(held) % size == 0


def free_axes(held: Held, mesh: Mesh) -> tuple[str, ...]:
    """Lists the axes over which an array could be sharded further.

    Args:
        held: the array.
        mesh: the mesh.

    Returns:
        Axes that do not split it, and whose size divides a dim of a device's part.

    Example:
        >>> weight = Held("w", "parameter", (8, 4), "f32", (2, 4), "Replicate(), Shard(0)")
        >>> free_axes(weight, Mesh.arange((2, 4), ("dp", "tp")))
        ('dp',)
    """
    dims = axis_dims(held, mesh) or {}
    return tuple(
        str(axis)
        for axis, size in zip(mesh.axis_names, mesh.mesh_shape, strict=True)
        if size > 1
        and dims.get(str(axis)) is None
        and any(dim and dim % size == 0 for dim in held.device_shape)
    )


def is_vocabulary(held: Held) -> bool:
    """Whether an array has the shape of a vocabulary matrix: an embedding, or the head.

    Args:
        held: the array.

    Returns:
        Whether it is a matrix with one dim as long as vocabularies are.

    Example:
        >>> is_vocabulary(Held("embed", "parameter", (128256, 4096), "bf16", (128256, 4096)))
        True
    """
    if len(held.shape) != 2:
        return False
    short, long = sorted(held.shape)
    return long >= VOCABULARY_ROWS and long >= VOCABULARY_RATIO * short


def axis_dims(held: Held, mesh: Mesh) -> dict[str, int | None] | None:
    """Says which dim each axis splits.

    Args:
        held: the array.
        mesh: the mesh.

    Returns:
        For each axis the dim, or None; None at all where the layout is not known.

    Example:
        >>> weight = Held("w", "parameter", (8, 4), "f32", (2, 4), "[tp, -]")
        >>> axis_dims(weight, Mesh.arange((2, 4), ("dp", "tp")))
        {'dp': None, 'tp': 0}
    """
    named = zip(mesh.axis_names, mesh.mesh_shape, strict=True)
    axes = [MeshAxis(axis, size, 1) for axis, size in named]
    uses = axis_uses(held.chosen or held.requested, axes, len(held.shape))
    return None if uses is None else {use.axis: use.dim for use in uses}


# ------------------------------ What the arrays of a step take on one device, by what they are for
#
# Two figures are kept apart: what the elements take (`Held.device_bytes`, from the shape of the
# shard alone), and what the layout of the compiled program adds (tiles that are filled up).

COPIES = "state not updated in place"
TABLE, TABLE_OF_INPUTS = "table of results", "table of inputs"
UNNAMED = "unnamed"


@dataclass(frozen=True, slots=True)
class MemoryPart:
    """The arrays of one role on one device.

    Attributes:
        role: a role of the evidence; or "state not updated in place", which is there a second time
            as a result; "table of results", the addresses that the program gives back, and "table
            of inputs", those that it takes; "unnamed", what the program takes or gives and the
            evidence does not name.
        count: how many arrays.
        device_bytes: what their elements take.
        padding_bytes: what the memory layout adds. Negative where it packs elements of 4 bits.
        elsewhere_bytes: of both, what takes no memory of the device: it lies in the host's memory,
            or takes the place of an array of another role.
    """

    role: str
    count: int
    device_bytes: int
    padding_bytes: int = 0
    elsewhere_bytes: int = 0

    @property
    def memory_bytes(self) -> int:
        """What they take of the device's memory."""
        return self.device_bytes + self.padding_bytes - self.elsewhere_bytes


@dataclass(frozen=True)
class EntryBytes:
    """What goes in and out of the program, by its own layouts, in bytes of the device's memory.

    Attributes:
        inputs: the arrays by number.
        outputs: the results by number.
        aliased: the numbers of the results that take the place of inputs.
        is_tuple: whether the results come as a tuple, for which there is a table of addresses.
        is_tupled: whether the inputs do.
    """

    inputs: tuple[LaidArray, ...] = ()
    outputs: tuple[LaidArray, ...] = ()
    aliased: frozenset[int] = frozenset()
    is_tuple: bool = False
    is_tupled: bool = False

    @classmethod
    def of(cls, hlo_text: str) -> EntryBytes:
        """Reads the first line of a program; nothing at all if it has no layouts."""
        layouts = entry_layouts(hlo_text)
        if layouts is None:
            return cls()
        outputs = laid_arrays(layouts.result)
        aliased = frozenset(entry_aliases(hlo_text)) & set(range(len(outputs)))
        is_tuple = isinstance(layouts.result, tuple)
        return cls(layouts.inputs, outputs, aliased, is_tuple, layouts.is_tupled)

    @property
    def argument_bytes(self) -> int:
        """What the inputs take."""
        return sum(_device_bytes(array) for array in self.inputs)

    @property
    def result_bytes(self) -> int:
        """What the results take, without their table."""
        return sum(_device_bytes(array) for array in self.outputs)

    @property
    def aliased_bytes(self) -> int:
        """What those results take that take the place of inputs."""
        return sum(_device_bytes(self.outputs[number]) for number in self.aliased)


def _memory_parts(evidence: Evidence, entry: EntryBytes) -> tuple[MemoryPart, ...]:
    """Sums the arrays of a step by role, in the order of the roles; then comes what has none.

    The sum of `device_bytes` of a role is that of its arrays' `device_bytes`, exactly.
    """
    parts: dict[str, list[MemoryPart]] = {}
    for part in (*_held_parts(evidence.held, entry), *_unnamed_parts(evidence.held, entry)):
        parts.setdefault(part.role, []).append(part)
    return tuple(
        MemoryPart(
            role,
            len(parts[role]),
            sum(part.device_bytes for part in parts[role]),
            sum(part.padding_bytes for part in parts[role]),
            sum(part.elsewhere_bytes for part in parts[role]),
        )
        for role in (*ROLES, COPIES, UNNAMED)
        if role in parts
    )


def _held_parts(tensors: Iterable[Held], entry: EntryBytes) -> Iterator[MemoryPart]:
    for tensor in tensors:
        argument = _at(entry.inputs, tensor.input)
        output = _at(entry.outputs, tensor.output)
        in_place = tensor.output in entry.aliased
        if tensor.input is not None or tensor.output is None:
            yield _part(tensor.role, tensor.device_bytes, argument)
            if tensor.output is not None and not in_place:
                yield _part(COPIES, tensor.device_bytes, output)
        else:
            yield _part(tensor.role, tensor.device_bytes, output, elsewhere=in_place)


def _unnamed_parts(tensors: Sequence[Held], entry: EntryBytes) -> Iterator[MemoryPart]:
    inputs, outputs = {tensor.input for tensor in tensors}, {tensor.output for tensor in tensors}
    for number, array in enumerate(entry.inputs):
        if number not in inputs:
            yield _part(UNNAMED, array.bytes, array)
    for number, array in enumerate(entry.outputs):
        if number not in outputs and number not in entry.aliased:
            yield _part(UNNAMED, array.bytes, array)


def _part(role: str, logical: int, array: LaidArray | None, elsewhere: bool = False) -> MemoryPart:
    """One array, whose elements take `logical` bytes."""
    physical = logical if array is None else array.padded_bytes
    elsewhere = elsewhere or (array is not None and array.space == HOST_SPACE)
    return MemoryPart(role, 1, logical, physical - logical, physical if elsewhere else 0)


def _are_addresses(count: int, size: int) -> bool:
    """Whether so many bytes can be a table: 4 or 8 for each array, filled up to at most 512."""
    return 4 * count <= size <= -(-8 * count // 512) * 512 and size % 4 == 0


def _device_bytes(array: LaidArray) -> int:
    return 0 if array.space == HOST_SPACE else array.padded_bytes


def _at(arrays: tuple[LaidArray, ...], number: int | None) -> LaidArray | None:
    return arrays[number] if number is not None and 0 <= number < len(arrays) else None


# ------------------------------------------------------------------------ The memory of one device

TEMPORARY = "temporary"
_MANY = 20
"""Groups of equal arrays among the largest."""

_LEAST_TEMPORARIES = 5
_LOOKED_AT = 400
_CAUSES = 3


@dataclass(frozen=True, slots=True)
class LargeBuffer:
    """One large array on one device.

    Attributes:
        bytes: what it takes in memory, padding of the layout included.
        shape: of the part on one device, as HLO writes it, "bf16[256,512]".
        name: what its owner calls it; of a temporary the instruction that makes it.
        kind: the role; "temporary" for one that the program makes and drops.
        origin: where the instruction comes from; None for what goes in and out.
    """

    bytes: int
    shape: str
    name: str
    kind: str
    origin: Origin | None = None


@dataclass(frozen=True, slots=True)
class Cause:
    """One reason why a step does not fit.

    Attributes:
        bytes: what it takes.
        kind: the role, "temporaries", "padding of layouts" or "program".
        text: a sentence about it.
    """

    bytes: int
    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class Differences:
    """What the compiler says, less what the layouts say, in bytes.

    Attributes:
        arguments: of the inputs, their table counted as known.
        results: of the results, their table counted as known.
        aliased: of the results that take the place of inputs.
    """

    arguments: int = 0
    results: int = 0
    aliased: int = 0

    @property
    def total(self) -> int:
        """What of the compiler's total is not explained."""
        return self.arguments + self.results - self.aliased


@dataclass(frozen=True)
class MemoryReport:
    """See the module docstring.

    Attributes:
        parts: what goes in and out, by role.
        temporaries_bytes: what the program makes and drops; the estimate if the compiler is silent.
        code_bytes: the program itself.
        total_bytes: everything: what the compiler says, and what is held without being an input.
        capacity_bytes: what a program can have on one device; None if unknown.
        largest: the largest arrays: all that go in and out, and the temporaries at the estimated
            peak; the largest first.
        causes: of a step that does not fit, the three largest causes.
        differences: where the compiler and the layouts disagree.
        outside_bytes: of the total, arrays that the compiler has dropped as inputs but that stay.
        estimated_temporaries_bytes: the estimated peak of the temporaries; None if the program's
            text has no schedule, or cannot be followed.
        from_compiler: whether the total is the compiler's, and not added up here.
        not_read: what of the program could not be read, and why; "" if all could.
    """

    parts: tuple[MemoryPart, ...]
    temporaries_bytes: int
    code_bytes: int
    total_bytes: int
    capacity_bytes: int | None
    largest: tuple[LargeBuffer, ...] = ()
    causes: tuple[Cause, ...] = ()
    differences: Differences = Differences()
    outside_bytes: int = 0
    estimated_temporaries_bytes: int | None = None
    from_compiler: bool = True
    not_read: str = ""

    @property
    def unexplained_bytes(self) -> int:
        """What of the total neither a part nor the temporaries nor the program explain."""
        named = sum(part.memory_bytes for part in self.parts)
        return self.total_bytes - named - self.temporaries_bytes - self.code_bytes

    @property
    def padding_bytes(self) -> int:
        """What the layouts of all parts add."""
        return sum(part.padding_bytes for part in self.parts)

    @property
    def spare_bytes(self) -> int | None:
        """What is left of the device's memory; negative if it does not fit; None if unknown."""
        return None if self.capacity_bytes is None else self.capacity_bytes - self.total_bytes

    @property
    def fits(self) -> bool | None:
        """Whether the device has the memory; None if that is unknown."""
        return None if self.spare_bytes is None else self.spare_bytes >= 0


def memory_report(evidence: Evidence) -> MemoryReport:
    """Says what a compiled step takes of a device's memory.

    Args:
        evidence: the compiled step.

    Returns:
        The report, in bytes of one device. What of the program could not be read is named in it.

    Example:
        >>> from mesh_utils import Mesh
        >>> held = (Held("w", "parameter", (8, 8), "f32", (4, 8)),)
        >>> report = memory_report(Evidence("t", "HloModule m", Mesh([0, 1], (2,), ("dp",)),
        ...                                 held=held))
        >>> report.total_bytes, report.fits
        (128, None)
    """
    entry, no_layouts = _entry(evidence.hlo_text)
    parts = _memory_parts(evidence, entry)
    peak, no_schedule = _peak(evidence)
    outside = sum(tensor.device_bytes for tensor in evidence.held if _is_outside(tensor))
    compiler = evidence.memory
    differences = Differences()
    if compiler is None:
        temporaries, code = (0 if peak is None else peak.bytes), 0
        program = entry.argument_bytes + entry.result_bytes - entry.aliased_bytes + temporaries
    else:
        temporaries, code, program = compiler.temporaries, compiler.code, compiler.total_bytes
        results = compiler.results - entry.result_bytes
        if entry.is_tuple and _are_addresses(len(entry.outputs), results):
            parts = (*parts, MemoryPart(TABLE, 1, results))
            results = 0
        arguments = compiler.arguments - entry.argument_bytes
        if entry.is_tupled and _are_addresses(len(entry.inputs), arguments):
            parts = (*parts, MemoryPart(TABLE_OF_INPUTS, 1, arguments))
            arguments = 0
        differences = Differences(arguments, results, compiler.aliased - entry.aliased_bytes)
    total, capacity = program + outside, capacity_bytes(evidence)
    buffers = [*_held_buffers(evidence, entry), *_temporary_buffers(peak, evidence)]
    buffers.sort(key=lambda buffer: (-buffer.bytes, buffer.name))
    report = MemoryReport(
        parts=parts,
        temporaries_bytes=temporaries,
        code_bytes=code,
        total_bytes=total,
        capacity_bytes=capacity,
        largest=_largest(buffers),
        causes=(),
        differences=differences,
        outside_bytes=outside,
        estimated_temporaries_bytes=None if peak is None else peak.bytes,
        from_compiler=compiler is not None,
        not_read=" ".join(reason for reason in (no_layouts, no_schedule) if reason),
    )
    return report if report.fits is not False else replace(report, causes=_causes(report, buffers))


def capacity_bytes(evidence: Evidence) -> int | None:
    """Says how much memory a program can have on one device of the evidence's machine.

    Args:
        evidence: the compiled step.

    Returns:
        Bytes; None if no source gives them. The table of chips has them for the devices that a chip
        usually has: they are divided anew where the machine counts its cores as devices (v4).
    """
    topology = evidence.topology
    if topology is None or topology.chip is None or topology.chip.usable_hbm_bytes is None:
        return None
    of_chip = topology.chip.usable_hbm_bytes * topology.chip.devices_per_chip
    return of_chip // max(1, topology.devices_per_chip)


def _is_outside(tensor: Held) -> bool:
    return tensor.input is None and tensor.output is None


def _entry(hlo_text: str) -> tuple[EntryBytes, str]:
    try:
        return EntryBytes.of(hlo_text), ""
    except HloError as error:
        return EntryBytes(), str(error)


def _peak(evidence: Evidence) -> tuple[LivePeak | None, str]:
    if "is_scheduled=true" not in evidence.hlo_text.lstrip().partition("\n")[0]:
        return None, "The program's text has no schedule."
    try:
        return live_peak(evidence.program), ""
    except HloError as error:
        return None, str(error)


def _held_buffers(evidence: Evidence, entry: EntryBytes) -> Iterator[LargeBuffer]:
    for tensor in evidence.held:
        arrays, number = entry.inputs, tensor.input
        if number is None:
            arrays, number = entry.outputs, tensor.output
        array = _at(arrays, number)
        size = tensor.device_bytes if array is None else array.padded_bytes
        dims = (tensor.layers, *tensor.device_shape) if tensor.layers > 1 else tensor.device_shape
        shape = f"{tensor.dtype}[{','.join(map(str, dims))}]"
        yield LargeBuffer(size, shape, tensor.name, tensor.role)


def _temporary_buffers(peak: LivePeak | None, evidence: Evidence) -> Iterator[LargeBuffer]:
    if peak is None:
        return
    module = evidence.program
    place = {
        name: computation
        for computation in module.computations.values()
        for name in computation.instructions
    }
    for buffer in peak.buffers[:_LOOKED_AT]:
        computation = place[buffer.instruction.name]
        fields = told_metadata(module, computation, buffer.instruction)
        origin = origin_of(fields.get("op_name"), module.frames.source(fields))
        yield LargeBuffer(
            buffer.bytes, str(buffer.shape), buffer.instruction.name, TEMPORARY, origin
        )


def _largest(buffers: list[LargeBuffer]) -> tuple[LargeBuffer, ...]:
    """The members of the groups of which one array is largest.

    Arrays of equal layers are one group, so that moments of a hundred layers do not crowd out all
    that the program makes; of a large group all are there, since readers count them.
    """
    groups: dict[tuple[object, ...], list[LargeBuffer]] = {}
    for buffer in buffers:
        origin = buffer.origin
        name = starred(buffer.name)
        if origin is not None:
            name = f"{starred(origin.module or buffer.name)} {origin.phase} {origin.op}"
        groups.setdefault((buffer.bytes, buffer.shape, buffer.kind, name), []).append(buffer)
    ranked = list(groups.values())
    first = ranked[:_MANY]
    shown = sum(group[0].kind == TEMPORARY for group in first)
    more = [group for group in ranked[_MANY:] if group[0].kind == TEMPORARY]
    first += more[: max(0, _LEAST_TEMPORARIES - shown)]
    return tuple(buffer for group in first for buffer in group)


def _causes(report: MemoryReport, buffers: list[LargeBuffer]) -> tuple[Cause, ...]:
    causes = [
        _cause(part.device_bytes - part.elsewhere_bytes, part.role, part.count, buffers)
        for part in report.parts
    ]
    live = sum(buffer.kind == TEMPORARY for buffer in buffers)
    causes.append(_cause(report.temporaries_bytes, "temporaries", live, buffers))
    padding, code = report.padding_bytes, report.code_bytes
    text = f"Tiles of the memory layouts add {bytes_text(padding)} to what goes in and out."
    causes.append(Cause(padding, "padding of layouts", text))
    causes.append(Cause(code, "program", f"The program itself takes {bytes_text(code)}."))
    causes.sort(key=lambda cause: -cause.bytes)
    return tuple(cause for cause in causes[:_CAUSES] if cause.bytes > 0)


def _cause(size: int, kind: str, count: int, buffers: list[LargeBuffer]) -> Cause:
    role = TEMPORARY if kind == "temporaries" else kind
    first = next((buffer for buffer in buffers if buffer.kind == role), None)
    text = f"{kind[:1].upper()}{kind[1:]}: {bytes_text(size)}"
    if count and role != TEMPORARY:
        text += f" in {count:,} {'array' if count == 1 else 'arrays'}"
    if first is not None:
        origin = f", {first.origin}" if first.origin else ""
        text += f"; the largest is {first.name} {first.shape}, {bytes_text(first.bytes)}{origin}"
    return Cause(size, kind, text + ".")
