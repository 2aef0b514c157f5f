"""Makes a program that fails smaller, as long as it fails in the same way.

    mesh (2, 4) a,b, compiled                     mesh (8,), eager
      x0: float32 (5, 5) S0,R                       x0: float32 (5, 5) R
      x1: float32 (5, 5) S1,S1            ->
      v0 = torch.exp(x0)
      v1 = torch.std(x0, True)                      v1 = torch.std(x0, True)
      v2 = v0 + x1

Each step makes the program a little simpler: a line less, with all that needs it; a value of plain
torch in place of the lines that make it; no compiler; replicated leaves; a mesh of one axis; no
gradients. A step is kept if the verdict is of the same kind and about the same line of text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from tests.drawn.judge import Verdict
from tests.drawn.programs import PLAIN_WORDS, Leaf, Mesh, Program, without_layout

__all__ = ["minimized", "simpler"]


def minimized(
    program: Program, verdict_of: Callable[[Program], Verdict], most: int = 60
) -> Program:
    """Make a program smaller.

    Args:
        program: One that fails.
        verdict_of: Runs and judges a program.
        most: How many programs are tried.
    """
    verdict = verdict_of(program)
    wanted = (verdict.kind, _text_of(program, verdict))
    found = True
    while found and most > 0:
        found = False
        for candidate in simpler(program):
            most -= 1
            told = verdict_of(candidate)
            if (told.kind, _text_of(candidate, told)) == wanted:
                program, found = candidate, True
                break
            if most <= 0:
                break
    return program


def _text_of(program: Program, verdict: Verdict) -> str:
    """The op of the line that a verdict is about: names and layouts may change."""
    if verdict.line is None or verdict.line >= len(program.lines):
        return verdict.note[:20]
    text = program.lines[verdict.line].rpartition(" = ")[2]
    return re.sub(r"\b[xvgh]\d+\b", "x", text)


def simpler(program: Program) -> Iterator[Program]:
    """Programs that are a little simpler than this one, the boldest first."""
    for line in reversed(range(len(program.lines))):
        yield without_line(program, line)
    if program.compiled:
        yield replace(program, compiled=False)
    plain = without_layout(program)
    if [x.placements for x in plain.leaves] != [x.placements for x in program.leaves]:
        yield plain
    for number, leaf in enumerate(program.leaves):
        for other in _simpler_leaves(leaf):
            leaves = [*program.leaves]
            leaves[number] = other
            yield replace(program, leaves=tuple(leaves))
    if program.mesh != Mesh((8,)):
        leaves = [replace(x, placements=x.placements and x.placements[:1]) for x in program.leaves]
        is_compatible = not any("redistribute" in line for line in program.lines)
        if is_compatible:
            yield replace(program, mesh=Mesh((8,)), leaves=tuple(leaves))
    for line in range(len(program.lines)):
        cut = with_value(program, line)
        if cut is not None:
            yield cut


def _simpler_leaves(leaf: Leaf) -> Iterator[Leaf]:
    if leaf.requires_grad:
        yield replace(leaf, requires_grad=False)
    if leaf.placements and set(leaf.placements) != {"R"}:
        yield replace(leaf, placements=("R",) * len(leaf.placements))


def _names(text: str) -> set[str]:
    return set(re.findall(r"\b(?:d?[xvght]\d+|loss2?)\b", text))


def _targets(line: str) -> set[str]:
    left, equals, _ = line.partition(" = ")
    return _names(left) if equals and "[" not in left and "(" not in left else set()


def without_line(program: Program, number: int) -> Program:
    """The program without a line and without all that needs it."""
    gone = _targets(program.lines[number])
    lines = []
    for at, line in enumerate(program.lines):
        if at == number:
            continue
        if at > number and _names(line) & gone:
            gone |= _targets(line)
        else:
            lines.append(line)
    return _with_lines(program, lines, program.leaves)


def with_value(program: Program, number: int) -> Program | None:
    """The program with a leaf in place of the lines before one: what plain torch has there."""
    used = _names(program.lines[number]) - _targets(program.lines[number])
    used = {name for name in used if name.startswith("v")}
    if len(used) != 1 or any("gradients" in line for line in program.lines):
        return None
    name = used.pop()
    scope = dict(PLAIN_WORDS)
    for leaf in program.leaves:
        scope[leaf.name] = leaf.value.clone().requires_grad_(leaf.requires_grad)
    try:
        for line in (*program.before, *program.lines[:number]):
            exec(line, scope)
    except Exception:
        return None
    value = scope[name]
    if not isinstance(value, torch.Tensor):
        return None
    made = Leaf(name, value.detach().clone(), ("R",) * len(program.mesh.shape))
    return _with_lines(program, list(program.lines[number:]), (*program.leaves, made))


def _with_lines(program: Program, lines: list[str], leaves: tuple[Leaf, ...]) -> Program:
    there = {n for line in (*program.before, *lines) for n in _targets(line)}
    there |= {leaf.name for leaf in leaves}
    usable = []
    for line in lines:  # drop what names something that is gone
        if _names(line) <= there:
            usable.append(line)
    used = {name for line in (*program.before, *usable) for name in _names(line)}
    kept = tuple(leaf for leaf in leaves if leaf.name in used) or leaves[:1]
    names = {leaf.name for leaf in kept}
    names |= {n for line in (*program.before, *usable) for n in _targets(line)}
    results = [name for name in program.results if name in names]
    results += [leaf.name for leaf in kept if leaf.name not in results]
    return replace(program, leaves=kept, lines=tuple(usable), results=tuple(results))
