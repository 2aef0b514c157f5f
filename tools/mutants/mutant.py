"""One mutant, read from `mutants.yaml` and checked.

Example of an entry::

    - id: two_axes_on_one_dim
      what: Two axes on one dim cut it in four pieces, not in eight. Each device held twice as much.
      kind: silent_layout
      area: core
      runtime: jax
      suite: contract
      tests:
        - tests/xla_dtensor/test_silent_errors.py::test_two_axes_on_one_dim_is_eight_ways_not_four
      old: |
        the lines as they are
      new: |
        the lines with the fault

`old` and `new` are whole lines. `new` may be empty: the lines are taken away. One more field may be
there: ``needs: jax<0.12``, where later versions of a package cannot show the fault.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

__all__ = ["AREAS", "KINDS", "RUNTIMES", "SUITES", "Mutant", "MutantError", "read_mutants"]

KINDS = ("silent_value", "silent_layout", "error")
RUNTIMES = ("jax", "torch_xla", "none")
SUITES = ("contract", "all")
AREAS = (
    "core",
    "mesh_utils",
    "report",
    "jax_lowering",
    "jax_eager",
    "jax_compile",
    "torch_xla",
    "dtensor",
    "local_view",
    "fully_shard",
    "checkpoint",
    "hosts",
    "spmd",
    "aot",
)
_FIELDS = ("id", "what", "kind", "area", "runtime", "suite", "tests", "old", "new")
_OPTIONAL = "needs"
_NEED = re.compile(r"[a-z_-]+(?:[<>]=?|==)[0-9][0-9.]*")


class MutantError(ValueError):
    """The list, or a text of it, is not what it has to be."""


@dataclass(frozen=True)
class Mutant:
    """One old fault.

    Args:
        id: A short name in lower case.
        what: One or two sentences: what a user saw, or what must be noticed.
        kind: `silent_value` (wrong numbers, no error), `silent_layout` (wrong shardings,
            placements, collectives or counts, no error), or `error` (an error or a warning).
        area: The part of the library that it is in, one of `AREAS`.
        runtime: The runtime that the tests run on; "none" where they need no runtime.
        suite: `contract` where the contract suite must find it, `all` where the whole tests do.
        tests: The tests that must fail, as pytest names them.
        old: The lines as they are.
        new: The lines that bring the fault back.
        needs: A package and its version, "jax<0.12", without which nothing can be seen; "" for
            nothing.
    """

    id: str
    what: str
    kind: str
    area: str
    runtime: str
    suite: str
    tests: tuple[str, ...]
    old: str
    new: str
    needs: str = ""


def read_mutants(file: Path) -> tuple[Mutant, ...]:
    """Read the list.

    Args:
        file: The YAML file.

    Returns:
        The mutants in the order of the file.

    Raises:
        MutantError: An entry lacks something, has something unknown, or is there twice.
    """
    mutants = tuple(_of_entry(entry, file) for entry in yaml.safe_load(file.read_text("utf-8")))
    names = [mutant.id for mutant in mutants]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise MutantError(f"{file.name}: {', '.join(twice)} is there twice. Give each its own id.")
    return mutants


def _of_entry(entry: dict[str, Any], file: Path) -> Mutant:
    name = str(entry.get("id"))
    wrong = ", ".join(sorted(({*entry} - {_OPTIONAL}) ^ {*_FIELDS}))
    if wrong:
        raise MutantError(
            f"{file.name}: the entry {name!r} lacks fields, or has unknown ones: {wrong}. "
            f"Pass {', '.join(_FIELDS)}."
        )
    choices = {"kind": KINDS, "area": AREAS, "runtime": RUNTIMES, "suite": SUITES}
    for field, known in choices.items():
        if entry[field] not in known:
            raise MutantError(
                f"{file.name}: {field} of {name!r} is {entry[field]!r}. "
                f"Pass one of {', '.join(known)}."
            )
    if not re.fullmatch(r"[a-z0-9_]+", name):
        raise MutantError(f"{file.name}: the id {name!r} is no name. Pass a-z, 0-9 and _.")
    if not entry["tests"] or not str(entry["old"]).strip() or entry["old"] == entry["new"]:
        raise MutantError(
            f"{file.name}: {name!r} has no test, no old text, or a new text equal to the old one. "
            "A mutant changes lines, and a test finds it."
        )
    texts = {field: str(value or "") for field, value in entry.items() if field != "tests"}
    if texts.get(_OPTIONAL) and not _NEED.fullmatch(texts[_OPTIONAL]):
        raise MutantError(
            f"{file.name}: {name!r} needs {texts[_OPTIONAL]!r}. That is no package with a version. "
            "Pass one like jax<0.12."
        )
    texts["what"] = " ".join(texts["what"].split())
    return Mutant(**texts, tests=tuple(entry["tests"]))
