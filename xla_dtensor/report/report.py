"""What a report holds: evidence of a step, machine, tensors; all of it to JSON and back.

A step is compiled in one process (with torch, jax and perhaps libtpu); the report is written in any
other, later if need be, without them. Between the two lies this value. It holds facts only: what
the compiler printed, what went in and out of the program, and for which machine it was compiled.
What follows from them (does it fit, what talks to whom, how long does it take) is the report's.

    evidence/
        evidence.json      everything below but the program
        program.hlo.gz     the optimised, partitioned program, as the compiler prints it

Invariants:

* `held` names every parameter of the entry computation at most once, by its number (`input`), and
  every result at most once (`output`). Donated state has both.
* `device_shape` is what one device holds, padding of uneven dims included, in elements. Memory
  layouts (tiles of 8 x 128 and the like) are not in it: they are printed in the program.
* Bytes are those of one device; flops those of all devices together, in one run of the program.
"""

from __future__ import annotations

import gzip
import json
import math
import os
import types
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, Field, asdict, dataclass, field, fields, is_dataclass, replace
from functools import cache, cached_property, lru_cache
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np

from mesh_utils import Axis, Mesh, Topology
from xla_dtensor.report.finding import starred
from xla_dtensor.report.hlo import HloModule
from xla_dtensor.report.hlo_text import HloError, element_bytes
from xla_dtensor.report.reading import HloReading, read_hlo, read_module

__all__ = [
    "ROLES",
    "CompilerMemory",
    "Evidence",
    "EvidenceError",
    "Held",
    "Machine",
    "MeshAxis",
    "ReportError",
    "Role",
    "TensorLine",
    "from_plain",
    "json_schema",
    "machine_of",
    "mesh_axes",
    "tensor_lines",
    "to_plain",
]


# ------------------------------------------------------------------------------------------ Errors
#
# Each message has three short sentences: what was given, why it cannot be read, what to pass.


class EvidenceError(ValueError):
    """What a compiled step left behind cannot be read, or contradicts itself.

    Example:
        >>> from xla_dtensor.report import Evidence, EvidenceError
        >>> try:
        ...     Evidence.load("/nowhere")
        ... except EvidenceError as error:
        ...     print(str(error).split(". ")[0])
        Evidence was asked for from /nowhere
    """


class ReportError(ValueError):
    """A stored report cannot be read.

    Example:
        >>> from xla_dtensor.report import CompileReport, ReportError
        >>> try:
        ...     CompileReport.from_json("{}")
        ... except ReportError as error:
        ...     print(str(error).split(". ")[1])
        It is something else
    """


# ---------------------------------------------------------------------------------------- Evidence

Role: TypeAlias = Literal[
    "parameter",  # of a module, trained
    "frozen parameter",  # of a module, not trained
    "buffer",  # of a module
    "gradient",  # kept between steps
    "optimizer state",
    "argument",  # of the step: the batch
    "result",  # of the step: the loss
    "number",  # learning rates, counters
    "random state",
    "constant",
    "other state",
]
ROLES: tuple[Role, ...] = get_args(Role)

SCHEMA = 1
_JSON, _HLO = "evidence.json", "program.hlo.gz"


@dataclass(frozen=True, slots=True)
class Held:
    """An array that lives outside the program: an input, a result, or state, which is both.

    Attributes:
        name: what its owner calls it, "layers.0.wq.weight"; of optimizer state the parameter's name
            and the state's, "layers.0.wq.weight exp_avg".
        role: what it is for.
        shape: the global shape, in elements.
        dtype: as HLO writes it, "bf16".
        device_shape: the shape of the part on one device, the same on all of them.
        requested: the layout that was asked for, as `str(Layout)` writes it: for each dim the mesh
            axes that cut it, "[fsdp.tp, -]"; None where nobody asked.
        chosen: the layout that the compiled program gives it, in the same words; None where it
            cannot be said in them.
        input: its number among the parameters of the entry computation; None for a result only, or
            for an input that the compiler has dropped.
        output: its number among the results; None for an input only.
        layers: of how many equal layers it holds this, along a dim before those of `shape`,
            `device_shape` and the layouts, which then are one layer's; its name has a star for the
            layer's number. 1 for an array without that dim.

    Example:
        >>> weight = Held("w", "parameter", (1024, 512), "bf16", (256, 512))
        >>> weight.global_bytes, weight.device_bytes
        (1048576, 262144)
    """

    name: str
    role: Role
    shape: tuple[int, ...]
    dtype: str
    device_shape: tuple[int, ...]
    requested: str | None = None
    chosen: str | None = None
    input: int | None = None
    output: int | None = None
    layers: int = 1

    @property
    def global_bytes(self) -> int:
        """The bytes of the whole array, once."""
        return self.layers * math.prod(self.shape) * element_bytes(self.dtype)

    @property
    def device_bytes(self) -> int:
        """The bytes of one device's part, without padding of the memory layout."""
        return self.layers * math.prod(self.device_shape) * element_bytes(self.dtype)


@dataclass(frozen=True, slots=True)
class CompilerMemory:
    """What the compiler says that the program takes on one device, in bytes.

    Attributes:
        arguments: of the inputs, in their memory layouts.
        results: of the results.
        aliased: of the results that take the place of inputs; part of both above.
        temporaries: of what the program makes and drops.
        code: of the program itself.

    Example:
        >>> CompilerMemory(100, 60, 50, 30, 5).total_bytes
        145
    """

    arguments: int
    results: int
    aliased: int
    temporaries: int
    code: int = 0

    @property
    def total_bytes(self) -> int:
        """The bytes that the device must have: everything, with aliased arrays once."""
        return self.arguments + self.results - self.aliased + self.temporaries + self.code


# A report asks for it several times; the programs of a sweep would fill the memory.
@lru_cache(maxsize=1)
def _program(hlo_text: str) -> HloModule:
    return HloModule.parse(hlo_text)


@dataclass(frozen=True)
class Evidence:
    """See the module docstring.

    Attributes:
        title: what was compiled, in a few words, for people.
        hlo_text: the optimised, partitioned program.
        mesh: the axes; the numbers in the program are places in its root's `device_ids.flat`.
        topology: the machine it was compiled for; None for the devices at hand if they say nothing.
        held: what goes in and out.
        memory: what the compiler says it takes; None where it does not say.
        flops: floating-point operations of the step's products on all devices together; what the
            step computes again (rematerialization) counts again. None if they were not counted.
        compute_dtype: the dtype of the matrix products, as HLO writes it.
        seconds: how long each part took here ("trace", "lower", "compile").
        peak_host_bytes: the most memory that the compiling process held; None if unknown.
        versions: name and version of every package and compiler that had a say.
        options: the compiler's options that were set, XLA and libtpu flags included.
        command: the command that makes this again; "" if there is none.
        attributes: further facts for people, name and text.
    """

    title: str
    hlo_text: str
    mesh: Mesh
    topology: Topology | None = None
    held: tuple[Held, ...] = ()
    memory: CompilerMemory | None = None
    flops: float | None = None
    compute_dtype: str = "bf16"
    seconds: Mapping[str, float] = field(default_factory=dict[str, float])
    peak_host_bytes: int | None = None
    versions: Mapping[str, str] = field(default_factory=dict[str, str])
    options: Mapping[str, str] = field(default_factory=dict[str, str])
    command: str = ""
    attributes: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def program(self) -> HloModule:
        """The program, taken apart; HloError where it is no HLO."""
        return _program(self.hlo_text)

    @cached_property
    def reading(self) -> HloReading:
        """The program's collectives, and what of it could not be read."""
        try:
            return read_module(self.program, self.mesh, self.granules)
        except HloError:
            return read_hlo(self.hlo_text)  # which says why

    @property
    def granules(self) -> tuple[int, ...] | None:
        """The slice of each device in the order of the mesh's root; None for a single slice."""
        if self.topology is None or self.topology.num_slices == 1:
            return None
        slices = dict(
            zip(self.topology.device_ids.tolist(), self.topology.slice_index.tolist(), strict=True)
        )
        return tuple(slices[i] for i in self.mesh.root.device_ids.flat)

    def check_valid(self) -> None:
        """Raise EvidenceError when the parts contradict each other."""
        for name in ("input", "output"):
            numbers = [
                getattr(tensor, name) for tensor in self.held if getattr(tensor, name) is not None
            ]
            twice = {number for number in numbers if numbers.count(number) > 1}
            if twice:
                raise EvidenceError(
                    f"Evidence was read in which {name}={min(twice)} of the program belongs to "
                    "several arrays. Each has one owner. List every array once."
                )
        for tensor in self.held:
            if len(tensor.shape) != len(tensor.device_shape):
                raise EvidenceError(
                    f"Evidence was read with {tensor.name} of shape={tensor.shape} and "
                    f"device_shape={tensor.device_shape}. A part has as many dims as the whole. "
                    "Give both with the same number of dims."
                )

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write it to a folder, which is made if need be.

        Args:
            folder: where to.
        """
        place = Path(folder)
        place.mkdir(parents=True, exist_ok=True)
        root = self.mesh.root
        document: dict[str, Any] = {"schema": SCHEMA}
        for name in (member.name for member in fields(self) if member.name != "hlo_text"):
            value = getattr(self, name)
            document[name] = dict(value) if isinstance(value, Mapping) else value
        document |= {
            "mesh": {
                "device_ids": root.device_ids.reshape(-1).tolist(),
                "mesh_shape": list(root.mesh_shape),
                "axis_names": list(root.axis_names),
            },
            "topology": self.topology and {"name": self.topology.name, "wrap": self.topology.wrap},
            "held": [asdict(tensor) for tensor in self.held],
            "memory": None if self.memory is None else asdict(self.memory),
        }
        (place / _JSON).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        # Without a time in it, equal programs give equal files.
        (place / _HLO).write_bytes(gzip.compress(self.hlo_text.encode(), mtime=0))

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> Evidence:
        """Read what `save` wrote.

        Args:
            folder: where from.

        Returns:
            The evidence.

        Raises:
            EvidenceError: another schema, a missing file, or parts that contradict each other.
        """
        place = Path(folder)
        try:
            document = json.loads((place / _JSON).read_text(encoding="utf-8"))
            text = gzip.decompress((place / _HLO).read_bytes()).decode()
        except (OSError, ValueError, EOFError) as error:
            raise EvidenceError(
                f"Evidence was asked for from {place}. It cannot be read: {error}. Pass a folder "
                "that Evidence.save wrote."
            ) from error
        if document.pop("schema", None) != SCHEMA:
            raise EvidenceError(
                f"Evidence was asked for from {place}. It has another schema than {SCHEMA}. "
                "Compile the step again with this version."
            )
        tensors = tuple(
            Held(**tensor | {name: tuple(tensor[name]) for name in ("shape", "device_shape")})
            for tensor in document.pop("held")
        )
        memory, topology, mesh = (
            document.pop("memory"),
            document.pop("topology"),
            document.pop("mesh"),
        )
        if topology is not None:
            topology = Topology.parse(topology["name"], wrap=topology["wrap"], allow_unreal=True)
        evidence = cls(
            hlo_text=text,
            mesh=Mesh(mesh["device_ids"], mesh["mesh_shape"], mesh["axis_names"]),
            topology=topology,
            held=tensors,
            memory=None if memory is None else CompilerMemory(**memory),
            **document,
        )
        evidence.check_valid()
        return evidence


# ---------------------------------------------- Dataclasses as plain JSON values, and back exactly
#
# The one walk that all reports use.
#
#     dataclass           an object with a member for each field
#     tuple[X, ...]       an array
#     Mapping[str, X]     an object
#     X | None            X, or null
#     float               a number; the three that JSON lacks as "Infinity", "-Infinity" and "NaN"
#     str, int, bool      as they are
#
# What a value is comes from the type of its field, so nothing of Python is in the file. A field
# that is absent takes its default; a member that no field has is refused.

T = TypeVar("T")

_SPECIAL = {"Infinity": float("inf"), "-Infinity": float("-inf"), "NaN": float("nan")}
_NAMES = {str: "string", int: "integer", float: "number", bool: "boolean"}


def to_plain(value: Any) -> Any:
    """Turns a value into what the json module writes.

    Args:
        value: a dataclass, or what its fields may hold.

    Returns:
        Dictionaries, lists, strings, numbers, booleans and None.

    Example:
        >>> from xla_dtensor.report.hlo import SourceLine
        >>> to_plain((SourceLine("a.py", 7), float("inf")))
        [{'file': 'a.py', 'line': 7}, 'Infinity']
    """
    if is_dataclass(value) and not isinstance(value, type):
        return {part.name: to_plain(getattr(value, part.name)) for part in _stored(type(value))}
    if isinstance(value, Mapping):
        return {str(key): to_plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(part) for part in value]
    if isinstance(value, np.generic):
        return to_plain(value.item())
    if isinstance(value, float) and value - value != 0:
        return "NaN" if value != value else "Infinity" if value > 0 else "-Infinity"
    return value


def from_plain(kind: type[T], data: Any, where: str = "report") -> T:
    """Makes a value of what `to_plain` gave.

    Args:
        kind: the dataclass.
        data: what the json module read.
        where: its name, for messages.

    Returns:
        The value.

    Raises:
        ReportError: data that is no such value.

    Example:
        >>> from xla_dtensor.report.hlo import SourceLine
        >>> from_plain(SourceLine, {"file": "a.py", "line": 7})
        SourceLine(file='a.py', line=7)
    """
    return _read(kind, data, where)


def json_schema(kind: type[Any]) -> dict[str, Any]:
    """Describes what `to_plain` gives for a dataclass.

    Args:
        kind: the dataclass.

    Returns:
        A JSON Schema; dataclasses within are under "$defs", by name.

    Example:
        >>> from xla_dtensor.report.hlo import SourceLine
        >>> json_schema(SourceLine)["properties"]
        {'file': {'type': 'string'}, 'line': {'type': 'integer'}}
    """
    definitions: dict[str, Any] = {}
    _describe(kind, definitions)
    return definitions.pop(kind.__name__) | {"$defs": dict(sorted(definitions.items()))}


@cache
def _stored(kind: type[Any]) -> tuple[Field[Any], ...]:
    return tuple(member for member in fields(kind) if member.init)


@cache
def _hints(kind: type[Any]) -> dict[str, Any]:
    return get_type_hints(kind)


def _is_optional(field: Field[Any]) -> bool:
    return field.default is not MISSING or field.default_factory is not MISSING


def _read(hint: Any, node: Any, where: str) -> Any:
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return _read_union(parts, node, where)
    if origin is Literal:
        return (
            node if node in parts else _refuse(where, node, f"one of {', '.join(map(repr, parts))}")
        )
    if origin is tuple:
        return _read_tuple(parts, node, where)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        if not isinstance(node, dict):
            _refuse(where, node, "an object")
        return {key: _read(parts[1], part, f"{where}.{key}") for key, part in node.items()}
    if isinstance(hint, type) and is_dataclass(hint):
        return _read_dataclass(hint, node, where)
    return _read_simple(hint, node, where)


def _read_union(parts: tuple[Any, ...], node: Any, where: str) -> Any:
    if node is None and type(None) in parts:
        return None
    kinds = [part for part in parts if part is not type(None)]
    for part in kinds[:-1]:
        try:
            return _read(part, node, where)
        except ReportError:
            continue
    return _read(kinds[-1], node, where)


def _read_tuple(parts: tuple[Any, ...], node: Any, where: str) -> tuple[Any, ...]:
    if not isinstance(node, list):
        _refuse(where, node, "an array")
    if len(parts) == 2 and parts[1] is Ellipsis:
        return tuple(_read(parts[0], element, f"{where}[{i}]") for i, element in enumerate(node))
    if len(parts) != len(node):
        _refuse(where, node, f"an array of {len(parts)}")
    return tuple(
        _read(part, element, f"{where}[{i}]")
        for i, (part, element) in enumerate(zip(parts, node, strict=True))
    )


def _read_dataclass(kind: type[Any], node: Any, where: str) -> Any:
    if not isinstance(node, dict):
        _refuse(where, node, "an object")
    hints = _hints(kind)
    names = {member.name: member for member in _stored(kind)}
    for name in node:
        if name not in names:
            raise ReportError(
                f"A report was read in which {where} has {name!r}. This version knows no such "
                "member. Read it with the version that wrote it, or compile the step again."
            )
    for name, member in names.items():
        if name not in node and not _is_optional(member):
            raise ReportError(
                f"A report was read in which {where} lacks {name!r}. It cannot be made without. "
                "Pass a whole report, as CompileReport.to_json writes it."
            )
    return kind(
        **{name: _read(hints[name], member, f"{where}.{name}") for name, member in node.items()}
    )


def _read_simple(hint: Any, node: Any, where: str) -> Any:
    if hint is float and isinstance(node, str) and node in _SPECIAL:
        return _SPECIAL[node]
    accepted = (int, float) if hint is float else hint
    if not isinstance(node, accepted) or (isinstance(node, bool) and hint is not bool):
        _refuse(where, node, f"of type {_NAMES.get(hint, str(hint))}")
    return node


def _refuse(where: str, node: Any, expected: str) -> Any:
    text = repr(node)
    raise ReportError(
        f"A report was read in which {where} = {text if len(text) <= 60 else text[:57] + '...'}. "
        f"It must be {expected}. Pass a report as CompileReport.to_json writes it."
    )


def _describe(hint: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return {"anyOf": [_describe(part, definitions) for part in parts]}
    if origin is Literal:
        return {"enum": list(parts)}
    if origin is tuple:
        if len(parts) == 2 and parts[1] is Ellipsis:
            return {"type": "array", "items": _describe(parts[0], definitions)}
        return {"type": "array", "prefixItems": [_describe(part, definitions) for part in parts]}
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return {"type": "object", "additionalProperties": _describe(parts[1], definitions)}
    if is_dataclass(hint):
        return _describe_dataclass(hint, definitions)
    if hint is float:
        return {"anyOf": [{"type": "number"}, {"enum": list(_SPECIAL)}]}
    return {"type": "null" if hint is type(None) else _NAMES[hint]}


def _describe_dataclass(kind: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    if kind.__name__ not in definitions:
        definitions[kind.__name__] = {}  # So that a dataclass within itself ends.
        hints = _hints(kind)
        definitions[kind.__name__] = {
            "type": "object",
            "properties": {
                member.name: _describe(hints[member.name], definitions) for member in _stored(kind)
            },
            "required": [member.name for member in _stored(kind) if not _is_optional(member)],
            "additionalProperties": False,
        }
    return {"$ref": f"#/$defs/{kind.__name__}"}


# -------------------------------------- The machine and the mesh of a report, in words and numbers


@dataclass(frozen=True, slots=True)
class Machine:
    """What the step was compiled for.

    Attributes:
        name: of the topology, "2xv5p:8x8x8"; "" if it is not known.
        words: the same for people.
        devices: how many devices run the step.
        slices: how many slices they are on.

    Example:
        >>> machine = Machine("v5e:2x4", "TPU v5e, 8 chips (2 x 4)", 8, 1)
        >>> machine.slices
        1
    """

    name: str
    words: str
    devices: int
    slices: int


@dataclass(frozen=True, slots=True)
class MeshAxis:
    """An axis of the mesh.

    Attributes:
        name: its name.
        size: its size.
        slices: how many of that lie in other slices, over DCN; the rest is inside a slice, on ICI.

    Example:
        >>> axis = MeshAxis("fsdp", 16, 2)
        >>> axis.inside, axis.words
        (8, 'fsdp = 16 (2 over DCN x 8 on ICI)')
    """

    name: Axis
    size: int
    slices: int

    @property
    def inside(self) -> int:
        """Its size inside a slice."""
        return self.size // self.slices

    @property
    def words(self) -> str:
        """The axis for people."""
        if self.slices == 1:
            return f"{self.name} = {self.size}"
        where = "over DCN"
        if self.inside > 1:
            where = f"{self.slices} over DCN x {self.inside} on ICI"
        return f"{self.name} = {self.size} ({where})"


def machine_of(evidence: Evidence) -> Machine:
    """Describes the machine.

    Args:
        evidence: with its topology, if it is known.

    Returns:
        The machine.

    Example:
        >>> machine_of(Evidence("t", "HloModule m", Mesh.arange((2, 4)))).words
        '8 devices of a machine of which nothing is known'
    """
    size, topology = evidence.mesh.root.size(), evidence.topology
    if topology is None:
        words = f"{size} devices of a machine of which nothing is known"
        return Machine("", words, size, 1)
    return Machine(topology.name, _words(topology), size, topology.num_slices)


def _words(topology: Topology) -> str:
    chip = topology.chip
    is_gpu = chip is not None and chip.torus_rank == 0
    what = "GPUs" if is_gpu else "chips"
    rank = 3 if chip is None else chip.torus_rank
    shape = " x ".join(map(str, topology.shape[:rank]))
    words = "unknown chip" if chip is None else chip.title
    if topology.num_slices > 1:
        per_slice = topology.num_chips // topology.num_slices
        domain = "NVLink domains" if is_gpu else "slices"
        words += f", {topology.num_slices} {domain} of {per_slice:,} {what}"
    else:
        words += f", {topology.num_chips:,} {what}"
    words += f" ({shape})" if shape else ""
    words += ", twisted" if topology.twist else ""
    return f"{words}, {topology.num_hosts:,} host{'' if topology.num_hosts == 1 else 's'}"


def mesh_axes(evidence: Evidence) -> tuple[MeshAxis, ...]:
    """Lists the axes of the mesh.

    Args:
        evidence: with its mesh; without a topology all axes lie inside one slice.

    Returns:
        The axes in the order of the mesh.

    Example:
        >>> mesh = Mesh.arange((2, 4), ("dp", "tp"))
        >>> [axis.words for axis in mesh_axes(Evidence("t", "HloModule m", mesh))]
        ['dp = 2', 'tp = 4']
    """
    mesh = evidence.mesh
    mesh = mesh if mesh.size() == mesh.root.size() else mesh.root
    slices = _slices(mesh, evidence)
    sized: list[MeshAxis] = []
    for place, (name, size) in enumerate(zip(mesh.axis_names, mesh.mesh_shape, strict=True)):
        lines = np.moveaxis(slices, place, -1).reshape(-1, size)
        counts = {np.unique(line).size for line in lines}
        # Where the lines of an axis differ, or its size is no multiple, no such product is true.
        count = max(counts)
        sized.append(MeshAxis(name, size, count if size % count == 0 else size))
    return tuple(sized)


def _slices(mesh: Mesh, evidence: Evidence) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    """The slice of each device of the mesh, in its shape."""
    granules = evidence.granules
    if granules is None:
        return np.zeros(mesh.mesh_shape, np.int64)
    of_device = dict(zip(evidence.mesh.root.device_ids.flat, granules, strict=True))
    return np.vectorize(of_device.__getitem__, otypes=[np.int64])(mesh.device_ids)


# -------------------------------------------------------------------------- The arrays of a report
#
# What each device holds of them, as asked for and as compiled.


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
            -(-extent // part) for extent, part in zip(self.shape, self.device_shape, strict=True)
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
    for tensor in held:
        key = (
            *(starred(tensor.name), tensor.role, tensor.shape, tensor.dtype, tensor.device_shape),
            *(tensor.requested, tensor.chosen),
        )
        if key in lines:
            count = lines[key].count + tensor.layers
            lines[key] = replace(lines[key], name=starred(tensor.name), count=count)
            continue
        lines[key] = TensorLine(
            name=tensor.name,
            role=tensor.role,
            count=tensor.layers,
            shape=tensor.shape,
            dtype=tensor.dtype,
            device_shape=tensor.device_shape,
            requested=tensor.requested,
            chosen=tensor.chosen,
            global_bytes=tensor.global_bytes // tensor.layers,
            device_bytes=tensor.device_bytes // tensor.layers,
        )
    return tuple(sorted(lines.values(), key=lambda line: (-line.total_device_bytes, line.name)))
