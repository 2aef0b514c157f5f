"""Evidence: all that a compiled step leaves behind, and all that a report is made from.

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
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from mesh_utils import Axis, Mesh, Topology
from xla_dtensor.report.errors import EvidenceError
from xla_dtensor.report.hlo_shape import element_bytes

__all__ = ["ROLES", "CompilerMemory", "Evidence", "Held", "Role"]

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
            numbers = [getattr(one, name) for one in self.held if getattr(one, name) is not None]
            twice = {number for number in numbers if numbers.count(number) > 1}
            if twice:
                raise EvidenceError(
                    f"Evidence was read in which {name}={min(twice)} of the program belongs to "
                    "several arrays. Each has one owner. List every array once."
                )
        for one in self.held:
            if len(one.shape) != len(one.device_shape):
                raise EvidenceError(
                    f"Evidence was read with {one.name} of shape={one.shape} and "
                    f"device_shape={one.device_shape}. A part has as many dims as the whole. "
                    "Give both with the same number of dims."
                )

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write it to a folder, which is made if need be.

        Args:
            folder: where to.
        """
        place = Path(folder)
        place.mkdir(parents=True, exist_ok=True)
        data: dict[str, Any] = {
            "schema": SCHEMA,
            "title": self.title,
            "mesh": _mesh_data(self.mesh.root),
            "topology": None if self.topology is None else _topology_data(self.topology),
            "held": [asdict(one) for one in self.held],
            "memory": None if self.memory is None else asdict(self.memory),
            "flops": self.flops,
            "compute_dtype": self.compute_dtype,
            "seconds": dict(self.seconds),
            "peak_host_bytes": self.peak_host_bytes,
            "versions": dict(self.versions),
            "options": dict(self.options),
            "command": self.command,
            "attributes": dict(self.attributes),
        }
        (place / _JSON).write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
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
            data = json.loads((place / _JSON).read_text(encoding="utf-8"))
            text = gzip.decompress((place / _HLO).read_bytes()).decode()
        except (OSError, ValueError, EOFError) as error:
            raise EvidenceError(
                f"Evidence was asked for from {place}. It cannot be read: {error}. Pass a folder "
                "that Evidence.save wrote."
            ) from error
        if data.pop("schema", None) != SCHEMA:
            raise EvidenceError(
                f"Evidence was asked for from {place}. It has another schema than {SCHEMA}. "
                "Compile the step again with this version."
            )
        held = tuple(
            Held(**one | {name: tuple(one[name]) for name in ("shape", "device_shape")})
            for one in data.pop("held")
        )
        memory, topology = data.pop("memory"), data.pop("topology")
        found = cls(
            hlo_text=text,
            mesh=_mesh(data.pop("mesh")),
            topology=None if topology is None else _topology(topology),
            held=held,
            memory=None if memory is None else CompilerMemory(**memory),
            **data,
        )
        found.check_valid()
        return found


def _mesh_data(mesh: Mesh) -> dict[str, Any]:
    names: list[Axis] = list(mesh.axis_names)
    return {
        "device_ids": mesh.device_ids.reshape(-1).tolist(),
        "mesh_shape": list(mesh.mesh_shape),
        "axis_names": names,
    }


def _mesh(data: dict[str, Any]) -> Mesh:
    return Mesh(data["device_ids"], data["mesh_shape"], data["axis_names"])


def _topology_data(topology: Topology) -> dict[str, Any]:
    wrap = None if topology.wrap is None else list(topology.wrap)
    return {"name": topology.name, "wrap": wrap}


def _topology(data: dict[str, Any]) -> Topology:
    return Topology.parse(data["name"], wrap=data["wrap"], allow_unreal=True)
