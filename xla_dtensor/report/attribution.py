"""Whose an instruction is: its module, its phase of the step, its op, and the user's line.

The compiler carries two things through from the traced step: a name, in which every scope that was
open is a part, and the lines of source that led there. Both say more than a user wants to read:

    jit(step)/Llama/layers.0/attention/dot_general                        layers.0.attention
    jit(step)/backward/Llama/layers.0/attention/dot_general               the same, backward
    jit(step)/Llama/layers/while/body/closed_call/0/attention/add         layers.*.attention
    jit(step)/transpose(jvp())/while/body/closed_call/dot_general         no module, backward
    jit(step)/optimizer/mul                                               no module, optimizer

The name of the class with which a path begins is that of the whole model; paths are told as
``named_modules()`` tells them, without it. Inside a loop a number is every layer's: "*".

Names may be anything: what cannot be understood gives an Origin that says less, never an error.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from xla_dtensor.argument_types import argument_types
from xla_dtensor.report.stack_frames import SourceLine

__all__ = ["PHASES", "Origin", "Phase", "origin_of", "user_line"]

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
        told = [where, self.op or "", "" if self.source is None else str(self.source)]
        return ", ".join(part for part in told if part)


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
    if any("/torch/optim/" in _plain(one.file) for one in source):
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
        parts = _split(name, "/")
        for place, part in enumerate(parts):
            is_last = place == len(parts) - 1
            wrapped = _WRAPPED.fullmatch(part)
            if part in _PHASE_SCOPES:
                self._begin(_PHASE_SCOPES[part])
            elif part.startswith("(") and part.endswith(")") and depth < _MAX_DEPTH:
                # XLA made one op of several: "(a/b:c/d)". The first of them speaks for all.
                self.read(_split(part[1:-1], ":")[0], depth + 1)
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
        for part in _split(inner, "/"):
            wrapped = _WRAPPED.fullmatch(part)
            if wrapped is not None:
                self._read_transform(wrapped[1], wrapped[2], depth + 1)
            else:
                self._enter(part)


def _split(text: str, separator: str) -> list[str]:
    """Splits where no bracket is open."""
    parts, depth = [""], 0
    for letter in text:
        depth = max(0, depth + (letter == "(") - (letter == ")"))
        if letter == separator and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part for part in parts if part] or [""]
