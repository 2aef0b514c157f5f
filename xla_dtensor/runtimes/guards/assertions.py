"""The truth value that a check takes for granted: with the other one, Python only raises.

A step that is traced has no values, so Python is told which way to go. A check is no branch, for
one of its sides does nothing but raise::

    assert (x > 0).all(), "x is to be positive"              goes on where it is True
    if torch.isnan(loss): raise ValueError("NaN")            goes on where it is False
    torch.distributions.Normal(mean, deviation)              looks at its arguments likewise

So the trace goes on where Python would, and the program tells afterwards whether it was right. What
decides is the code behind the instruction that asked: a jump, and on one of its sides no way but to
``raise``. Where both sides go on, or a jump is elsewhere (``ok = bool(x)``), it is a branch.
"""

from __future__ import annotations

import linecache
import sys
from pathlib import Path
from types import CodeType, FrameType
from typing import NamedTuple

import torch

from xla_dtensor.runtimes.guards.uses import instructions_of
from xla_dtensor.versions import PACKAGE_FOLDER

__all__ = ["Question", "question_here"]

_TORCH = Path(torch.__file__).parent
# Between the code that asks for a truth value and ours, there is some of torch's Python.
_PASSED = (
    str(PACKAGE_FOLDER),
    *(str(_TORCH / name) for name in ("__init__.py", "_compile.py", "_ops.py", "_tensor.py")),
    *(str(_TORCH / name) for name in ("_dynamo", "autograd", "overrides.py", "utils")),
)
# What raises is a function that they call, or that called them: with the other value.
_OF_TORCH = {
    "_check_tensor_all_with": True,
    "_all_true_or_runtime_assert": True,
    "_engine_run_backward": False,  # Is a gradient NaN? Under torch.autograd.detect_anomaly().
}
_BEFORE_JUMP = (
    "COMPARE_OP",
    "CALL",
    "PRECALL",
    "TO_BOOL",
    "UNARY_NOT",
    "LOAD_FAST",
    "STORE_FAST_LOAD_FAST",
    "NOP",
)
# A message may be put in a local variable first.
_WAYS_OUT = ("RETURN", "YIELD", "FOR_ITER", "SEND", "RERAISE", "STORE_")


class Question(NamedTuple):
    """Python asks for a truth value.

    Attributes:
        expected: That with which a check goes on; None for a branch.
        line: The line of source that asks for it.
        place: Where it stands: the file and the number of the line.
        frame: The id of the frame that runs: a loop asks from one again and again.
    """

    expected: bool | None
    line: str
    place: str
    frame: int


def question_here() -> Question | None:
    """Return for what the code that runs asks for a truth value; None where no user's does."""
    frame: FrameType | None = sys._getframe(1)
    expected: bool | None = None
    while frame is not None:
        code = frame.f_code
        if code.co_name in _OF_TORCH and code.co_filename.startswith(str(_TORCH)):
            is_backward = code.co_name == "_engine_run_backward"  # which asks other things, too
            looks_for_nan = torch.is_anomaly_enabled()
            expected = None if is_backward and not looks_for_nan else _OF_TORCH[code.co_name]
        elif not code.co_filename.startswith(_PASSED):
            break
        frame = frame.f_back
    if frame is None:
        return None
    if expected is None:
        expected = _expected(frame.f_code, frame.f_lasti)
    file, number = frame.f_code.co_filename, frame.f_lineno
    line = linecache.getline(file, number).strip()
    return Question(expected, line, f"{file}:{number}", id(frame))


def _expected(code: CodeType, offset: int) -> bool | None:
    """Return the truth value with which code does not raise that asks for one at an instruction."""
    listed, places = instructions_of(code)
    place = places.get(offset)
    if place is None:
        return None
    is_not = False
    # The call of item(), say, a variable that is read at once, and what makes a truth value of it.
    while not listed[place].opname.startswith("POP_JUMP"):
        name = listed[place].opname
        is_not ^= name == "UNARY_NOT"
        is_kept = name == "STORE_FAST" and listed[place + 1].argval == listed[place].argval
        if not (is_kept or name.startswith(_BEFORE_JUMP)):
            return None
        place += 1
    jump = listed[place]
    target = places.get(jump.argval)
    if target is None or not jump.opname.endswith(("IF_TRUE", "IF_FALSE")):
        return None
    raises_there, raises_here = (_only_raises(code, side) for side in (target, place + 1))
    if raises_there == raises_here:
        return None
    is_jump_on_true = jump.opname.endswith("IF_TRUE")
    return (raises_here == is_jump_on_true) ^ is_not


def _only_raises(code: CodeType, place: int) -> bool:
    """Tell whether every way through the code from a place on ends with ``raise``."""
    listed, places = instructions_of(code)
    seen: set[int] = set()
    starts = [place]
    while starts:
        place = starts.pop()
        while place not in seen:
            seen.add(place)
            name = listed[place].opname
            if name == "RAISE_VARARGS":
                break
            if name.startswith(_WAYS_OUT) and name != "STORE_FAST":
                return False
            if "JUMP" in name:  # within a message, say
                starts.append(places[listed[place].argval])
                if not name.startswith("POP_JUMP"):
                    break
            place += 1
    return True
