"""Finding: something about a compiled step that its author will want to look at."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import numpy as np

from mesh_utils import Axis
from xla_dtensor.core.argument_types import argument_types
from xla_dtensor.report.collective import (
    DCN_TARGET,
    TRANSFER_TYPE,
    Collective,
    axis_names,
    device_groups,
)
from xla_dtensor.report.hlo import RENDEZVOUS, SourceLine
from xla_dtensor.report.hlo_text import split_outside

__all__ = [
    "PHASES",
    "SEVERITIES",
    "CollectiveLine",
    "Finding",
    "Origin",
    "Phase",
    "Severity",
    "collective_lines",
    "origin_of",
    "starred",
    "user_line",
]


# ------------------------------------------------------------------------- Whose an instruction is
#
# Its module, its phase of the step, its op, and the user's line.
#
# The compiler carries two things through from the traced step: a name, in which every scope that
# was open is a part, and the lines of source that led there. Both say more than a user wants to
# read:
#
#     jit(step)/Llama/layers.0/attention/dot_general                        layers.0.attention
#     jit(step)/backward/Llama/layers.0/attention/dot_general               the same, backward
#     jit(step)/Llama/layers/while/body/closed_call/0/attention/add         layers.*.attention
#     jit(step)/transpose(jvp())/while/body/closed_call/dot_general         no module, backward
#     jit(step)/optimizer/mul                                               no module, optimizer
#
# The name of the class with which a path begins is that of the whole model; paths are told as
# ``named_modules()`` tells them, without it. Inside a loop a number is every layer's: "*".
#
# Names may be anything: what cannot be understood gives an Origin that says less, never an error.

Phase: TypeAlias = Literal["forward", "backward", "optimizer", "other"]
PHASES: tuple[Phase, ...] = ("forward", "backward", "optimizer", "other")

_PHASE_SCOPES: dict[str, Phase] = {"backward": "backward", "optimizer": "optimizer"}
_WRAPPED = re.compile(r"(\w+)\((.*)\)", re.DOTALL)
_TRANSFORMS = frozenset({"jvp", "vmap", "transpose", "remat", "checkpoint", "custom_jvp"})
_CLASS = re.compile(r"_*[A-Z]\w*")
_MODULE = re.compile(r"\w+(?:\.\w+)*")
_NUMBER = re.compile(r"\d+", re.ASCII)
_MAX_DEPTH = 8

_STRUCTURE = frozenset(
    {
        *("while", "body", "cond", "scan", "closed_call", "core_call", "checkpoint", "remat"),
        *("remat2", "rematted_computation", "shard_map", "custom_vjp_call", "custom_jvp_call"),
        *("custom_vjp_call_jaxpr", "body_fun", "cond_fun", "pjit", "custom_partitioning"),
    }
)
"""Parts of a name that are no module's: what JAX puts there for loops and calls."""

_KERNELS = frozenset(
    {
        *("blockwise_attention", "blockwise_attention_backward", "cudnn_attention"),
        *("splash_attention", "splash_attention_backward"),
    }
)
"""The scopes of this package's attention kernels; what comes after one is the kernel's own."""
_BRANCH = re.compile(r"branch_\d+_fun", re.ASCII)

_FRAMEWORKS = frozenset(
    {"torch", "torch_xla", "torchax", "functorch", "jax", "jaxlib", "flax", "xla_dtensor"}
)
_MODELS = ["xla_dtensor", "models"]
"""The reference models lie in this package, and stand for a user's."""

_STANDARD_LIBRARY = re.compile(r"(?:^|/)lib(?:64)?/python3(?:\.\d+)?/(?!site-packages/|dist-)")


@dataclass(frozen=True, slots=True)
class Origin:
    """Where an instruction comes from.

    Attributes:
        module: the path of the module that computes it, as ``named_modules()`` gives it; "*" for
            each layer of a scan. Of the whole model the name of its class. None if unknown.
        phase: "forward", "backward", "optimizer"; "other" where the compiler made it.
        op: the op as the framework named it, "dot_general"; None if unknown.
        source: the user's line; None if unknown. Lines of torch, JAX and this package are skipped.

    Example:
        >>> str(Origin("layers.0.mlp", "backward", "dot_general", SourceLine("a.py", 7)))
        'layers.0.mlp (backward), dot_general, a.py:7'
    """

    module: str | None = None
    phase: Phase = "other"
    op: str | None = None
    source: SourceLine | None = None

    def __str__(self) -> str:
        where = f"{self.module or 'no module'} ({self.phase})"
        words = [where, self.op or "", "" if self.source is None else str(self.source)]
        return ", ".join(part for part in words if part)


@argument_types
def origin_of(op_name: str | None, source: Sequence[SourceLine] = ()) -> Origin:
    """Reads whose an instruction is.

    Args:
        op_name: its name in the compiler's metadata; None if it has none.
        source: the lines of source that led to it, innermost first.

    Returns:
        Its origin.

    Example:
        >>> origin_of("jit(step)/backward/Llama/layers.0/attention/dot_general")
        Origin(module='layers.0.attention', phase='backward', op='dot_general', source=None)
        >>> origin_of("jit(f)/Llama/layers/while/body/closed_call/3/mlp/add").module
        'layers.*.mlp'
    """
    line = user_line(source)
    path = _Path()
    path.read(op_name or "", 0)
    phase = path.phase
    if any("/torch/optim/" in _plain(source_line.file) for source_line in source):
        # The optimizer's own lines tell it apart from a backward whose scope was still open.
        return Origin(None, "optimizer", path.op, line)
    if phase == "other" and op_name and "/" in op_name:
        phase = "forward"
    return Origin(path.module, phase, path.op, line)


def user_line(source: Iterable[SourceLine]) -> SourceLine | None:
    """Finds the innermost line that is the user's.

    Args:
        source: the lines that led to an instruction, innermost first.

    Returns:
        The first that is in no file of torch, torch_xla, JAX, Python or this package; None if
        there is none.

    Example:
        >>> lines = [SourceLine("/venv/lib/python3.11/site-packages/torch/nn/functional.py", 3)]
        >>> user_line([*lines, SourceLine("/home/me/train.py", 12)])
        SourceLine(file='/home/me/train.py', line=12)
    """
    return next((line for line in source if not _is_framework(line.file)), None)


def _is_framework(file: str) -> bool:
    path = _plain(file)
    if path.startswith("<") or not path:
        return True
    parts = path.split("/")
    for packages in ("site-packages", "dist-packages"):
        if packages in parts:
            inside = parts[len(parts) - parts[::-1].index(packages) :]
            return bool(inside) and inside[0] in _FRAMEWORKS and inside[:2] != _MODELS
    if "xla_dtensor" in parts[:-1]:  # A checkout, wherever it was; its tests are users.
        return "tests" not in parts and parts[-3:-1] != _MODELS
    return _STANDARD_LIBRARY.search(path) is not None


def _plain(file: str) -> str:
    return file.replace("\\", "/")


class _Path:
    """What the parts of a name say, read from the outermost to the innermost."""

    def __init__(self) -> None:
        self.phase: Phase = "other"
        self._parts: list[str] = []
        self._op: str | None = None
        self._in_loop = False
        self._begins = False
        self._in_kernel = False

    @property
    def op(self) -> str | None:
        return self._op or None

    @property
    def module(self) -> str | None:
        parts = [] if self._begins and not self._in_loop else self._parts
        if len(parts) > 1 and _CLASS.fullmatch(parts[0]):
            parts = parts[1:]
        return ".".join(parts) or None

    def read(self, name: str, depth: int) -> None:
        parts = split_outside(name, "/") or [""]
        for place, part in enumerate(parts):
            is_last = place == len(parts) - 1
            wrapped = _WRAPPED.fullmatch(part)
            if part in _PHASE_SCOPES:
                self._begin(_PHASE_SCOPES[part])
            elif part.startswith("(") and part.endswith(")") and depth < _MAX_DEPTH:
                # XLA made one op of several: "(a/b:c/d)". The first of them speaks for all.
                self.read("".join(split_outside(part[1:-1], ":")[:1]), depth + 1)
            elif wrapped is not None:
                self._read_transform(wrapped[1], wrapped[2], depth)
            elif is_last:
                self._op = None if part in _STRUCTURE or part in _KERNELS else part
            else:
                self._enter(part)

    def _begin(self, phase: Phase) -> None:
        """A scope of a phase begins the path anew, unless a layer's number follows it in a loop."""
        self.phase = phase
        self._begins = True
        self._in_kernel = False

    def _enter(self, part: str) -> None:
        self._in_loop = self._in_loop or part in ("while", "scan")
        if part in _KERNELS:
            self._in_kernel = True
            if part.endswith("_backward"):
                self.phase = "backward"
        elif part in _STRUCTURE or self._in_kernel or _BRANCH.fullmatch(part):
            return
        elif _MODULE.fullmatch(part):
            if self._begins and not (self._in_loop and _NUMBER.fullmatch(part)):
                self._parts.clear()
            self._begins = False
            self._parts.append("*" if self._in_loop and _NUMBER.fullmatch(part) else part)

    def _read_transform(self, name: str, inner: str, depth: int) -> None:
        """`jvp(Llama)` and `transpose(jvp(Llama))` hold scopes; `jit(f)` names a function."""
        if name not in _TRANSFORMS or depth >= _MAX_DEPTH:
            return
        if name == "transpose":
            self.phase = "backward"
        for part in split_outside(inner, "/"):
            wrapped = _WRAPPED.fullmatch(part)
            if wrapped is not None:
                self._read_transform(wrapped[1], wrapped[2], depth + 1)
            else:
                self._enter(part)


# ---------------------------------------------------------------- Collectives as lines of a report
#
# Equal ones summed, each with its network and its origin.
#
# Two collectives are equal if they do the same over the same axes with as many bytes, for the same
# line of source in the same phase. Layers that differ in nothing but their number are one line:
# "layers.0/attention" and "layers.1/attention" become "layers.*/attention".
#
# What XLA for TPU sends between slices is printed as a send and a recv of one rendezvous. Together
# they are one collective over DCN, whose kind the compiler gives as the type of the transfer.

NetworkName: TypeAlias = Literal["ICI", "DCN", "-"]
"""Which wires carry it: inside a slice, between slices, or none (or nobody knows)."""

_COUNTER = re.compile(r"(?<=[./])\d+(?=[./ ]|$)")


@dataclass(frozen=True, slots=True)
class CollectiveLine:
    """Equal collectives of a program, as one line.

    Attributes:
        kind: what they do, "all-gather"; "send" and "recv" only where they are no pair.
        axes: the mesh axes, as of `Collective`; None where the groups follow none.
        network: "ICI" inside a slice, "DCN" between slices; "-" where nothing is sent, or where
            nobody knows.
        bytes_each: the payload of one of them on one device: the larger of what goes in and out.
        count: how many of them are in the program.
        executions: how often they run in one step, all of them together.
        at_least: whether a loop of unknown trip count makes `executions` a lower bound.
        origin: the module, the phase and the line of source they were made for.

    Example:
        >>> origin = Origin("Llama/layers.*/attention", "forward", "dot_general", None)
        >>> line = CollectiveLine("all-gather", ("fsdp",), "ICI", 1 << 20, 2, 64, False, origin)
        >>> line.bytes_per_device, line.is_attributed
        (67108864, False)
    """

    kind: str
    axes: tuple[Axis, ...] | None
    network: NetworkName
    bytes_each: int
    count: int
    executions: int
    at_least: bool
    origin: Origin

    @property
    def bytes_per_device(self) -> int:
        """The payload on one device in one step. Bytes on the wire depend on the algorithm."""
        return self.bytes_each * self.executions

    @property
    def moves(self) -> bool:
        """Whether devices talk to each other: not if each is alone in its group."""
        return self.axes != ()

    @property
    def is_attributed(self) -> bool:
        """Whether it has a mesh axis and a line of source."""
        return bool(self.axes) and self.origin.source is not None


def collective_lines(
    collectives: Iterable[Collective],
    slice_of: Sequence[int] | None = None,
    program_size: int | None = None,
    fast: NetworkName = "ICI",
) -> tuple[CollectiveLine, ...]:
    """Makes the lines of a report.

    Args:
        collectives: as `collectives()` lists them.
        slice_of: the slice of each device, in the order of the mesh's root; None if there is only
            one, or if nobody knows.
        program_size: how many devices run the program together: of several slices often those of
            one. By default all.
        fast: the network inside a slice; "-" where it is not known.

    Returns:
        The lines, the most bytes first.

    Example:
        >>> collective_lines([])
        ()
    """
    slices = None if slice_of is None else np.asarray(slice_of)
    lines: dict[tuple[object, ...], CollectiveLine] = {}
    for collective, kind, size in _paired(collectives):
        line = CollectiveLine(
            kind=kind,
            axes=collective.axes,
            network=_network(collective, slices, program_size, fast),
            bytes_each=size,
            count=1,
            executions=1 if collective.executions is None else collective.executions,
            at_least=collective.executions is None,
            origin=origin_of(collective.op_name, collective.source),
        )
        key = (
            *(line.kind, line.axes, line.network, line.bytes_each),
            *(line.origin.phase, line.origin.op, line.origin.source),
            starred(line.origin.module or ""),
        )
        lines[key] = _sum(lines[key], line) if key in lines else line
    return tuple(sorted(lines.values(), key=_order))


def starred(name: str) -> str:
    """Writes a star for each number that is a part of a name.

    Args:
        name: the path of a module, or the name of a parameter.

    Returns:
        The same for each of the layers of a list.

    Example:
        >>> starred("layers.12.wq.weight exp_avg"), starred("Llama/layers.0/attention")
        ('layers.*.wq.weight exp_avg', 'Llama/layers.*/attention')
    """
    return _COUNTER.sub("*", name)


def _paired(collectives: Iterable[Collective]) -> list[tuple[Collective, str, int]]:
    """Each collective with its kind and payload; a send and a recv that belong together are one."""
    pairs: list[tuple[Collective, str, int]] = []
    places: dict[tuple[str, str, str], int] = {}
    for collective in collectives:
        attributes = dict(collective.frontend_attributes)
        meeting, transfer = attributes.get(RENDEZVOUS), attributes.get(TRANSFER_TYPE)
        if meeting is None or transfer is None or collective.kind not in ("send", "recv"):
            pairs.append((collective, collective.kind, collective.payload_bytes))
            continue
        key = collective.computation, meeting, transfer
        if key not in places:
            places[key] = len(pairs)
            pairs.append((collective, transfer.lower().replace("_", "-"), collective.payload_bytes))
            continue
        first, kind, size = pairs[places[key]]
        named = first if first.op_name is not None or collective.op_name is None else collective
        pairs[places[key]] = named, kind, max(size, collective.payload_bytes)
    return pairs


def _network(
    collective: Collective,
    slices: np.ndarray[tuple[int], np.dtype[np.int64]] | None,
    program_size: int | None,
    fast: NetworkName,
) -> NetworkName:
    if DCN_TARGET in dict(collective.frontend_attributes):
        return "DCN"
    if collective.axes == ():
        return "-"
    if slices is None or (program_size is not None and program_size < slices.size):
        return fast  # A program of one slice talks inside of it, but for its DCN transfers.
    if collective.source_target_pairs:
        members = np.array(collective.source_target_pairs)
    else:
        members = device_groups(collective, 1, slices.size)
    if members is None or members.max(initial=0) >= slices.size:
        return "-"
    places = slices[members]
    return "DCN" if (places != places[:, :1]).any() else fast


def _sum(line: CollectiveLine, more: CollectiveLine) -> CollectiveLine:
    same = line.origin.module == more.origin.module
    origin = line.origin
    if not same and origin.module is not None:
        origin = replace(origin, module=starred(origin.module))
    return replace(
        line,
        count=line.count + more.count,
        executions=line.executions + more.executions,
        at_least=line.at_least or more.at_least,
        origin=origin,
    )


def _order(line: CollectiveLine) -> tuple[object, ...]:
    origin = line.origin
    return (
        -line.bytes_per_device,
        line.kind,
        axis_names(line.axes),
        origin.module or "",
        origin.phase,
        origin.op or "",
    )


# ----------------------------------------------------------------------------------------- Finding

Severity: TypeAlias = Literal["error", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")
"""An error: it cannot run. A warning: it runs, but likely not as meant. A note: good to know."""

SMALL_GATHER_BYTES = 1 << 20
"""What is gathered and is smaller costs little: tables of positions, masks, indices, scalars, the
statistics of a softmax."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Something to look at.

    Attributes:
        severity: "error", "warning" or "note".
        code: its kind, the same in every version, "does-not-fit".
        title: what is the matter, in a few words.
        detail: the numbers; "modelled" where a model says them.
        fix: what to try.
        origin: whose it is; None where it is nobody's.

    Example:
        >>> str(Finding("note", "axis-of-size-1", "Axis 'pp' has size 1", "", "Leave it out."))
        "note: Axis 'pp' has size 1. Leave it out. [axis-of-size-1]"
    """

    severity: Severity
    code: str
    title: str
    detail: str
    fix: str
    origin: Origin | None = None

    def __str__(self) -> str:
        words = [f"{self.severity}: {self.title}.", self.detail, self.fix, f"[{self.code}]"]
        return " ".join(part for part in words if part)
