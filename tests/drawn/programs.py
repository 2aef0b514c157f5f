"""A program that is drawn: lines of Python, and the tensors that it begins with.

    mesh (2, 4)
    x0  float32 (4, 6)  S0,R     requires grad
    x1  float32 (4, 6)  S1,S1
        v0 = torch.exp(x0)
        v1, v2 = tensors(torch.topk(v0, 2))
        v1.mul_(2)
        loss = total(v0, x1)
        g0, = gradients(loss, [x0])

The lines are one function of the tensors. It runs on plain tensors, in the dtypes that stand there
or in float64, and on DTensors, eagerly or as one compiled step; only what the few words below mean
differs. So what fails can be read, shortened line by line, and pasted into a table of cases.

Invariants:

* All that decides the result stands in the text and in the tensors: no clock, no random op, no
  order of a set.
* A line that only DTensors know (`redistribute`, `whole`, `parts`, `pending`) gives a copy of what
  it takes, on every side. So a later write changes the same tensors everywhere.
"""

from __future__ import annotations

import linecache
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.utils._pytree import tree_leaves

from tests.drawn.ops import function_of

__all__ = ["PLAIN_WORDS", "Leaf", "Mesh", "Program", "Result", "run", "widened"]

WIDE = {
    **dict.fromkeys((torch.float16, torch.bfloat16, torch.float32), torch.float64),
    torch.complex64: torch.complex128,
}
_FILE = "<drawn program>"


@dataclass(frozen=True)
class Mesh:
    """The mesh of a program.

    Attributes:
        shape: its sizes.
        order: the devices in row-major order of the mesh; None: 0, 1, 2 ...
        names: of its axes; None: it has none.
    """

    shape: tuple[int, ...]
    order: tuple[int, ...] | None = None
    names: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Leaf:
    """A tensor that a program begins with.

    Attributes:
        name: of the function's argument.
        value: a plain tensor.
        placements: "R" or "S<dim>" for each axis of the mesh; None: it stays a plain tensor.
        requires_grad: whether the program differentiates with respect to it.
    """

    name: str
    value: torch.Tensor
    placements: tuple[str, ...] | None
    requires_grad: bool = False


@dataclass(frozen=True)
class Program:
    """What is drawn.

    Attributes:
        mesh: where the leaves lie.
        leaves: the first arguments.
        lines: statements, in order.
        results: the names whose values are compared, as they are after the last line.
        compiled: whether DTensors run it as one compiled step; it is called twice then.
        before: statements that run eagerly, each of which makes one more argument, such as a view
            of a leaf.
    """

    mesh: Mesh
    leaves: tuple[Leaf, ...]
    lines: tuple[str, ...]
    results: tuple[str, ...]
    compiled: bool = False
    before: tuple[str, ...] = ()

    def function(self, words: Mapping[str, Any], lines: Sequence[str] | None = None) -> Any:
        """The program as a Python function of its leaves, whose source can be read.

        Args:
            words: what the program's words mean.
            lines: other lines that take the place of its own.
        """
        names = ", ".join([*(leaf.name for leaf in self.leaves), *map(target, self.before)])
        body = [*(self.lines if lines is None else lines), f"return [{', '.join(self.results)}]"]
        source = f"def program({names}):\n" + "".join(f"    {line}\n" for line in body)
        linecache.cache[_FILE] = (len(source), None, source.splitlines(keepends=True), _FILE)
        scope: dict[str, Any] = {"__name__": "drawn", **words}
        exec(compile(source, _FILE, "exec"), scope)
        return scope["program"]

    def __str__(self) -> str:
        order = "" if self.mesh.order is None else f" order {self.mesh.order}"
        names = "" if self.mesh.names is None else f" {','.join(self.mesh.names)}"
        how = "compiled" if self.compiled else "eager"
        head = [f"mesh {self.mesh.shape}{order}{names}, {how}"]
        for leaf in self.leaves:
            lying = "plain" if leaf.placements is None else ",".join(leaf.placements)
            kind = f"{_short(leaf.value.dtype)} {tuple(leaf.value.shape)} {lying}"
            values = str(leaf.value.tolist()) if leaf.value.numel() <= 12 else "..."
            head.append(f"  {leaf.name}: {kind}{' grad' if leaf.requires_grad else ''} = {values}")
        before = [f"  {line}      (before)" for line in self.before]
        return "\n".join([*head, *before, *(f"  {line}" for line in self.lines)])


@dataclass
class Result:
    """What running a program gave.

    Attributes:
        values: plain tensors and numbers, by name.
        error: what it raised.
        line: where, counted from 0.
    """

    values: dict[str, Any] = field(default_factory=dict)
    error: Exception | None = None
    line: int | None = None


def run(
    program: Program,
    arguments: Sequence[torch.Tensor],
    words: Mapping[str, Any],
    *,
    lines: Sequence[str] | None = None,
    execute: Callable[[Any], Any] = lambda function: function,
    fetch: Callable[[list[Any]], list[Any]] = lambda values: values,
) -> Result:
    """Run a program once.

    Args:
        program: What to run.
        arguments: The leaves, as this side has them. They are written to.
        words: What `redistribute` and the like mean on this side.
        lines: Other lines, such as those of `widened`.
        execute: Takes the function, gives what is called: the compiler of a step.
        fetch: Makes plain tensors of the results.
    """
    scope = {**words, **{x.name: value for x, value in zip(program.leaves, arguments, strict=True)}}
    try:
        for line in program.before:
            exec(line, scope)
        function = execute(program.function(words, lines))
        inputs = [*arguments, *(scope[target(line)] for line in program.before)]
        for _ in range(2 if program.compiled else 1):
            values = list(function(*inputs))
        values = fetch(values)
    except Exception as error:
        return Result(error=error, line=_line_of(error))
    finally:
        if forward_ad._current_level >= 0:
            forward_ad.exit_dual_level()
    return Result(dict(zip(program.results, values, strict=True)))


def target(line: str) -> str:
    """The name that a statement assigns to."""
    return line.partition(" = ")[0]


def _line_of(error: BaseException | None) -> int | None:
    while error is not None:
        trace = error.__traceback__
        while trace is not None:
            if trace.tb_frame.f_code.co_filename == _FILE:
                return trace.tb_lineno - 2
            trace = trace.tb_next
        error = error.__cause__
    return None


# ------------------------------------------------------------------ words


def tensors(value: Any) -> list[torch.Tensor]:
    """The tensors of a nested result, in order."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def total(*pairs: torch.Tensor) -> torch.Tensor:
    """The real part of a sum of products: of a * b + c * d for the tensors a, b, c, d."""
    terms = [(a * b).sum() for a, b in zip(pairs[::2], pairs[1::2], strict=True)]
    terms = [term.real if term.is_complex() else term for term in terms]
    result = terms[0]
    for term in terms[1:]:
        result = result + term
    return result


def gradients(loss: torch.Tensor, leaves: Sequence[torch.Tensor], again: bool = False) -> Any:
    """The gradients of a number; None where it does not depend on the leaf."""
    return torch.autograd.grad(loss, leaves, create_graph=again, allow_unused=True)


class _Forgetful(torch.autograd.Function):
    """A function that gives no gradient: torch calls such a gradient undefined."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value * 1

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> None:
        return None


def dual(value: torch.Tensor, tangent: torch.Tensor) -> torch.Tensor:
    """A tensor with a tangent, for forward mode. The level ends with the run."""
    if forward_ad._current_level < 0:
        forward_ad.enter_dual_level()
    return forward_ad.make_dual(value, tangent)


def tangent(value: torch.Tensor) -> torch.Tensor | None:
    """The tangent of a result."""
    return forward_ad.unpack_dual(value).tangent


def _copy(tensor: torch.Tensor, *_placements: str | int) -> torch.Tensor:
    return tensor.clone()


PLAIN_WORDS: dict[str, Any] = {
    "torch": torch,
    "inf": float("inf"),
    "nan": float("nan"),
    "op": function_of,
    "tensors": tensors,
    "total": total,
    "gradients": gradients,
    "forget": _Forgetful.apply,
    "dual": dual,
    "tangent": tangent,
    "redistribute": _copy,
    "whole": _copy,
    "parts": _copy,
    "pending": _copy,
}


# ------------------------------------------------------------------ other dtypes

_NARROW = re.compile(r"torch\.(float32|bfloat16|float16)\b")
_NARROW_COMPLEX = re.compile(r"torch\.complex64\b")
_METHODS = re.compile(r"\.(float|half|bfloat16)\(")
_DOUBLE = re.compile(r"torch\.(float64|complex128)\b|\.double\(")
_SINGLE = {torch.float64: torch.float32, torch.complex128: torch.complex64}


def widened(program: Program) -> tuple[list[str], list[torch.Tensor]]:
    """The program in float64: its lines and its leaves, all floats of which are wider."""
    lines = []
    for line in program.lines:
        line = _NARROW_COMPLEX.sub("torch.complex128", _NARROW.sub("torch.float64", line))
        lines.append(_METHODS.sub(".double(", line))
    return lines, [
        leaf.value.to(WIDE.get(leaf.value.dtype, leaf.value.dtype)) for leaf in program.leaves
    ]


def has_double(program: Program) -> bool:
    """Whether a value of it may be float64 or complex128."""
    texts = "\n".join(program.lines)
    return bool(_DOUBLE.search(texts)) or any(x.value.dtype in _SINGLE for x in program.leaves)


def narrowed(program: Program) -> tuple[list[str], list[torch.Tensor]]:
    """The program in float32 where it is float64: its lines and its leaves."""
    lines = []
    for line in program.lines:
        line = line.replace("torch.complex128", "torch.complex64").replace(".double(", ".float(")
        lines.append(line.replace("torch.float64", "torch.float32"))
    return lines, [x.value.to(_SINGLE.get(x.value.dtype, x.value.dtype)) for x in program.leaves]


def without_layout(program: Program) -> Program:
    """The same program, each leaf replicated, on the same mesh."""
    leaves = [
        replace(leaf, placements=None if leaf.placements is None else ("R",) * len(leaf.placements))
        for leaf in program.leaves
    ]
    return replace(program, leaves=tuple(leaves))


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
