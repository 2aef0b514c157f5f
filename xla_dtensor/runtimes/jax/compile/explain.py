"""What a compiled step has in its program, and why it was traced, as text for people.

::

    step.explain()

    train_step: 120 calls, 2 traces

    Inputs of the program
                                 number       size
     read and written, donated   291 tensors  1.12 GiB
     read                        12 tensors   4.10 MiB
     ...
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import torch

from xla_dtensor.report.render import Table, table_lines
from xla_dtensor.report.texts import bytes_text
from xla_dtensor.runtimes.guards import objects, owners
from xla_dtensor.runtimes.jax.compile.program import Program

__all__ = ["Spent", "explanation"]

_WIDTH = 100
_MOST_ROWS = 20
_MOST_KEYS = 6
# What every module has, and every call of one reads.
_OF_MODULES = frozenset({*vars(torch.nn.Module()), *vars(torch.nn.Module)})
_KINDS: dict[type, str] = {
    objects.Object: "object",
    objects.Answers: "object",
    objects.ClassNames: "class",
    owners.Globals: "globals",
    owners.Names: "attributes",
    owners.Items: "dict",
    owners.Elements: "list",
    objects.Fields: "function",
}


@dataclass
class Spent:
    """Where time went, in seconds.

    Attributes:
        compiling: Of each trace its parts: trace, lower, compile.
        call: Of the last call its parts: guards, launch.
    """

    compiling: list[dict[str, float]] = field(default_factory=list)
    call: dict[str, float] = field(default_factory=dict)


def explanation(
    head: str,
    traces: Sequence[tuple[int, str]],
    program: Program,
    spent: Spent,
) -> str:
    """Return what there is to say of a step.

    Args:
        head: The first line.
        traces: The number of the call and the reason of each trace.
        program: The program that was used last.
        spent: Where time went.
    """
    sections = [
        _table("Inputs of the program", ("", "number", "size"), _inputs(program)),
        _table("Guards, by what holds them", ("", "kind", "read of it"), _guards(program)),
        _table("Branches on tensors", ("", "of line"), _branches(program)),
        _table("Done after each run", ("",), [(text,) for text in program.effects.names]),
        _table("Traces", ("call", "because"), [(str(at), why) for at, why in traces]),
        _table("Seconds", ("", "trace", "lower", "compile"), _compiling(spent)),
        _table("Milliseconds of the last call", ("", ""), _call(spent)),
    ]
    return "\n".join([head, *filter(None, sections)])


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return ""
    shown = [tuple(row) for row in rows[:_MOST_ROWS]]
    if len(rows) > _MOST_ROWS:
        shown.append((f"and {len(rows) - _MOST_ROWS} more", *[""] * (len(columns) - 1)))
    lines = table_lines(Table(tuple(columns), tuple(shown)), indent=" ", width=_WIDTH)
    return "\n".join(["", title, *lines])


def _inputs(program: Program) -> list[tuple[str, str, str]]:
    state, read, constants, arguments, donated = program.blueprint.inputs
    rows = [
        ("read and written, donated", len(program.state), state),
        ("read", len(program.read), read),
        ("arguments", len(arguments), arguments),
        ("arguments written to, donated", len(donated), donated),
        ("constants", len(constants), constants),
    ]
    parts = (("of these, Python's numbers", program.numbers), ("read by name", program.moving))
    table = [(what, f"{count} tensors", _size(arrays)) for what, count, arrays in rows if count]
    table += [(what, str(len(entries)), "") for what, entries in parts if entries]
    host = program.host_storages()
    return table + ([("computed on the host", str(len(host)), "")] if host else [])


def _guards(program: Program) -> list[tuple[str, str, str]]:
    """Return the guards of objects that are called alike in one row; those of the user's first."""
    names: dict[tuple[str, str], dict[str, None]] = {}
    for owner in program.watch.guards.owners:
        own = [str(key) for key in owner.reads if key is not None and str(key) not in _OF_MODULES]
        if own and owner.label.rpartition(".")[2] not in _OF_MODULES:
            kind = _KINDS.get(type(owner), "other")
            names.setdefault((owner.label, kind), {}).update(dict.fromkeys(own))
    rows: list[tuple[str, str, str]] = []
    for (label, kind), keys in names.items():
        shown = list(keys)[:_MOST_KEYS]
        rows.append((label, kind, ", ".join(shown) + (" ..." if len(keys) > len(shown) else "")))
    return rows


def _branches(program: Program) -> list[tuple[str, str]]:
    return [(f"taken as {branch.answer}", str(branch)) for branch in program.branches]


def _compiling(spent: Spent) -> list[tuple[str, ...]]:
    names = ("trace", "lower", "compile")
    return [
        (f"trace {number}", *(f"{parts.get(name, 0):.2f}" for name in names))
        for number, parts in enumerate(spent.compiling, 1)
    ]


def _call(spent: Spent) -> list[tuple[str, str]]:
    return [(name, f"{1000 * seconds:.3f}") for name, seconds in spent.call.items()]


def _size(arrays: Iterable[Any]) -> str:
    return bytes_text(sum(array.size * array.dtype.itemsize for array in jax.tree.leaves(arrays)))
