"""The page of a runtime in docs/: what came of the calls of each op.

    python -m tests.drawn.run --runtime jax --calls all --table docs/op_table_jax.md

has a row for each op that is drawn, and the ops that are not, each group with its reason.
"""

from __future__ import annotations

import collections
import re
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["page"]

_HEAD = """# Ops on DTensors: the {runtime} runtime

Each op of PyTorch's own test table (`torch.testing`'s `op_db`, here of torch {torch}) in {dtypes}:
{calls} calls with its sample inputs, on random meshes of 8 CPU devices, under random placements,
eager or compiled, most with gradients. Plain torch in float64 is the judge. Made by

    python -m tests.drawn.run --runtime {runtime} --calls all{which} \\
        --table docs/op_table_{runtime}.md

and `--calls NAME --show` prints the calls of one op. {counts}.

*Right*: values, shapes, dtypes and gradients are plain torch's, or the noise of the inputs leaves
them open. *Refused*: an error of this project's says so, and what to do instead.

| op | right | refused | |
|---|---|---|---|
"""
_NAMES = {"unclear": "an error of another kind", "silent": "no error where torch has one"}


def page(
    runtime: str,
    rows: Sequence[Mapping[str, Any]],
    excluded: Mapping[str, Sequence[str]],
    torch_version: str,
    which: str = "",
) -> str:
    """Return the page.

    Args:
        runtime: "jax" or "torch_xla".
        rows: What `tests.drawn.run` noted of calls.
        excluded: The names of the ops that are not drawn, by reason.
        torch_version: Which torch judged.
        which: The rest of the command, " --dtypes ..." where not all calls were judged.
    """
    by_op: dict[str, list[Mapping[str, Any]]] = collections.defaultdict(list)
    for row in rows:
        if row["kind"] != "none":
            by_op[row["job"].split("/")[1]].append(row)
    kinds = collections.Counter(_kind(row) for found in by_op.values() for row in found)
    total = sum(kinds.values())
    counts = ", ".join(f"{number:,} {kind}" for kind, number in kinds.most_common())
    dtypes = (
        which.removeprefix(" --dtypes ").replace(" ", ", ")
        if which
        else ("each dtype that it takes, and each op of two tensors in each pair of dtypes")
    )
    head = _HEAD.format(
        dtypes=dtypes,
        which=which,
        runtime=runtime,
        torch=torch_version,
        calls=f"{total:,}",
        counts=counts,
    )
    lines = [_row(op, found) for op, found in sorted(by_op.items())]
    lines += ["", "## Not drawn", "", "| reason | ops |", "|---|---|"]
    lines += [f"| {reason} | {', '.join(sorted(names))} |" for reason, names in excluded.items()]
    return head + "\n".join(lines) + "\n"


def _kind(row: Mapping[str, Any]) -> str:
    kind = "right" if row["kind"] == "unjudged" else row["kind"]
    return _NAMES.get(kind, kind)


def _row(op: str, rows: Sequence[Mapping[str, Any]]) -> str:
    kinds = collections.Counter(map(_kind, rows))
    others = {kind: n for kind, n in kinds.items() if kind not in ("right", "refused")}
    notes = [f"{n} {kind}" for kind, n in others.items()]
    first = next((row for row in rows if _kind(row) != "right"), None)
    if first is not None:
        dtypes = " and ".join(text for text in first["job"].split("/")[2:4] if text != "-")
        notes.append(f"{dtypes}: {_sentence(first['note'])}")
    text = "; ".join(notes).replace("|", "\\|").replace("<", "&lt;")
    return f"| {op} | {kinds['right'] or ''} | {kinds['refused'] or ''} | {text} |"


def _sentence(note: str) -> str:
    """A note without its place in the code, to the end of its first sentence."""
    note = re.sub(r" at \w+\.py:\d+$", "", note)
    return re.split(r"(?<=[^.])\. ", note)[0][:160]
