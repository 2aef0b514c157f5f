"""Bad calls of the public functions: a call that is right, with one argument that is not.

`bad_calls.yaml` beside this file has the right calls and the values that are put in. Each pair is a
bad call; whatever comes out of it is one of these::

    distribute_tensor(3, mesh, ...)         ArgumentTypeError: distribute_tensor was called with ...
    zeros((8, 4), mesh, placements=None)    taken
    scan_layers([None])                     unclear: AttributeError: 'NoneType' object has no ...

None may be unclear. Of what is refused 300 are drawn; `bad_calls_refused.yaml` has their texts::

    python -m tests.drawn.bad_calls            what is unclear
    python -m tests.drawn.bad_calls --write    and the texts written anew
"""

from __future__ import annotations

import argparse
import itertools
import random
import re
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, chdir, redirect_stdout
from dataclasses import dataclass
from functools import cache
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard

__all__ = ["REFUSED", "BadCall", "bad_calls", "outcome"]

HERE = Path(__file__).parent
REFUSED = HERE / "bad_calls_refused.yaml"
NUM_DRAWN = 300
# What PyTorch says of a callback of the user's is the user's to read.
_CALLED = ("partition_fn", "shard_placement_fn", "granule", "order", "names")
_ARRAYS = ("torch.ones(", "np.ones(", "xd.distribute_tensor(")


@dataclass(frozen=True)
class BadCall:
    """A call with one wrong argument, as Python.

    Attributes:
        function: What is called.
        arguments: By name.
        name: The argument that is wrong.
    """

    function: str
    arguments: dict[str, str]
    name: str

    def __str__(self) -> str:
        return f"{self.function}: {self.name}={self.arguments[self.name]}"


def bad_calls() -> Iterator[BadCall]:
    """Every right call with each of its arguments replaced by each value."""
    for function, arguments in _table()["calls"].items():
        for name, value in itertools.product(arguments, _table()["values"]):
            right = arguments[name]
            # A flag or a word is not given an array by anyone.
            is_word = right[:1] == "'" or right in ("True", "False")
            is_callback = name in _CALLED and value.startswith("nn.")
            if not is_callback and not (is_word and value.startswith(_ARRAYS)):
                yield BadCall(function, {**arguments, name: value}, name)


def outcome(call: BadCall) -> str:
    """What comes of a call: "taken", "unclear: ..." or an error of ours, as "Class: text"."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run(call.function, call.arguments)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        for name in ("folder", "other"):
            text = text.replace(_names()[name], name.upper())
        text = re.sub("0x[0-9a-f]+", "ADDRESS", text)
        is_ours = type(error).__module__.startswith(("mesh_utils", "xla_dtensor"))
        return text if is_ours else f"unclear: {text}"
    return "taken"


def run(function: str, arguments: dict[str, str]) -> None:
    """Call a function; what is to be entered is entered."""
    given = {name: eval(text, _names()) for name, text in arguments.items()}
    first = [given.pop("size")] if "size" in given else []
    # Pictures are printed, and a folder named 'x' is one in the current folder.
    with redirect_stdout(StringIO()), chdir(_names()["other"]):
        found = eval(function, _names())(*first, **given)
        if isinstance(found, AbstractContextManager):
            with found:
                pass


@cache
def _table() -> Any:
    return yaml.safe_load((HERE / "bad_calls.yaml").read_text(encoding="utf-8"))


@cache
def _names() -> dict[str, Any]:
    """What the calls' text may name."""
    import mesh_utils
    import xla_dtensor as xd
    from xla_dtensor import checkpoint, report, spmd

    folder, other = tempfile.mkdtemp(), tempfile.mkdtemp()
    checkpoint.save(folder, {"a": torch.ones(3)}, step=1)
    names: dict[str, Any] = {"torch": torch, "nn": nn, "np": np, "xd": xd, "xs": spmd}
    names |= {"mesh_utils": mesh_utils, "cp": checkpoint, "rep": report, "folder": folder}
    names["other"] = other
    names |= {"Shard": Shard, "Partial": Partial, "R": Replicate(), "step": itertools.count(2)}
    names["mesh"] = xd.init_device_mesh("xla", (2, 4), mesh_dim_names=("dp", "tp"))
    return names


def _drawn(refused: dict[str, str]) -> dict[str, str]:
    """One refusal for each argument of each function, and others up to 300."""
    keys = list(refused)
    random.Random(0).shuffle(keys)
    firsts = {key.partition("=")[0]: key for key in reversed(keys)}.values()
    rest = [key for key in keys if key not in set(firsts)]
    chosen = [*firsts, *rest][:NUM_DRAWN]
    return {key: refused[key] for key in sorted(chosen)}


def main() -> None:
    """Make all bad calls and print what is unclear."""
    parser = argparse.ArgumentParser(description="Bad calls of the public functions.")
    parser.add_argument("--write", action="store_true", help="write the texts of 300 of them")
    asked = parser.parse_args()
    for function, arguments in _table()["calls"].items():
        run(function, arguments)
    found = {str(call): outcome(call) for call in bad_calls()}
    for call, text in found.items():
        if text.startswith("unclear"):
            print(call, "->", text[:150])
    refused = {
        call: text
        for call, text in found.items()
        if text != "taken" and not text.startswith("unclear")
    }
    taken = sum(text == "taken" for text in found.values())
    print(f"{len(found)} calls: {taken} taken, {len(refused)} refused")
    if asked.write:
        texts = yaml.safe_dump(_drawn(refused), width=96, allow_unicode=True)
        REFUSED.write_text(f"# Written by tests/drawn/bad_calls.py.\n{texts}", encoding="utf-8")


if __name__ == "__main__":
    main()
