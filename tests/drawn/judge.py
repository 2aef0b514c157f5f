"""Whether a program on DTensors gives what it has to: plain torch in float64 is the judge.

What is allowed is measured, not chosen. The program runs on plain tensors as it is, in float64,
and in float64 with inputs that are off by one unit in the last place of their own dtype. A value
of ours may be off by four times the larger of what torch's own rounding changes (the first against
the second) and what noise changes (the third against the second)::

    exact 1.00000, torch in bfloat16 1.0078, with noise 0.9990   ->   within 4 * 0.0078 of exact

Two things these runs do not show, so two more are made (`tests.drawn.noise`). What an op rounds
inside of a program may cancel: 1 - cos(x, x) is exactly 0 in torch by luck, so the program also
runs as it is with noise on the result of each op. And float64 has no wider dtype to measure torch's
own rounding by: it is taken from float32, in units of the last place.

Integers and bools have to be equal to plain torch's, but for elements that noise changes: where
`round` or `argmax` stands on an edge, any of the values seen is right. An error has to be of the
class that torch raises, or one of this project's (refused). An index out of range may give NaN;
what has no NaN is judged in another way (`tests.drawn.ours`).

| verdict | |
|---|---|
| right | |
| refused | an error of this project's says that it cannot be done |
| wrong | another value, shape, dtype, or whether it has a gradient |
| silent | plain torch raises, and this does not |
| unclear | an error that is not this project's; or of another class than plain torch's |
| unjudged | noise changes everything: no value would be wrong |
| abort, hang | the process ended, or did not come back (`tests.drawn.run` sees those) |
"""

from __future__ import annotations

import re
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tests.drawn import ops
from tests.drawn.noise import NoiseOfOps, noise_on
from tests.drawn.programs import (
    PLAIN_WORDS,
    WIDE,
    Program,
    Result,
    has_double,
    narrowed,
    run,
    widened,
)
from tests.drawn.training import PLAIN_TRAINING_WORDS

__all__ = [
    "KINDS",
    "Expected",
    "Verdict",
    "difference",
    "expected_of",
    "has_nan",
    "is_of_index",
    "judge",
]

# From worst to best.
KINDS = ("abort", "hang", "wrong", "silent", "unclear", "refused", "unjudged", "right")
TIMES = 4.0
_NUM_NOISES = 5
_DOUBLE_UNIT = torch.finfo(torch.float64).eps
_LENGTH = 200
_TOO_NOISY = 0.2
_OUT_OF_RANGE = re.compile(
    "out of (bounds|range)|invalid max index|must be non-negative|between 0 and 1|ZeroDivision"
    "|but found idx to be|allocated size does not match|lengths along axis to sum"
)
# XLA has values, and no memory: they are read before one is written, whatever lies where. Whether
# a factor of a singular matrix has a zero or a tiny number is a matter of rounding.
_LEFT_OPEN = re.compile(r"refer to a single memory location|lu_factor: U\[\d+,\d+\] is zero")


@dataclass(frozen=True)
class Verdict:
    """What became of a program.

    Attributes:
        kind: one of `KINDS`.
        note: the first difference, or the error.
        line: the line of the program that it is about, if one is known.
    """

    kind: str
    note: str = ""
    line: int | None = None


@dataclass(frozen=True)
class Expected:
    """What plain torch gives.

    Attributes:
        plain: in the dtypes that stand there.
        wide: in float64; the first exactly, the others each with other noise on the inputs.
        noisy: in the dtypes that stand there, with noise on the result of each op.
        single: float64's values in float32, and the same inputs' in float64; empty where the
            program has no float64.
    """

    plain: Result
    wide: tuple[Result, ...] = ()
    noisy: tuple[Result, ...] = ()
    single: tuple[Result, ...] = ()


def expected_of(program: Program) -> Expected:
    """Run a program on plain tensors."""
    inputs = [leaf.value for leaf in program.leaves]
    plain = _on_plain(program, inputs)
    if plain.error is not None:
        return Expected(plain)
    lines, values = widened(program)
    least = torch.finfo(torch.bfloat16).eps if _is_narrow(program) else 0.0
    wide = [_on_plain(program, values, lines, torch.float64)]
    for seed in range(_NUM_NOISES):
        off = noise_on(program.leaves, values, seed, least)
        wide.append(_on_plain(program, off, lines, torch.float64))
    noisy = []
    for seed in range(_NUM_NOISES):
        with NoiseOfOps(seed):
            noisy.append(_on_plain(program, inputs))
    single: list[Result] = []
    if has_double(program):
        short_lines, short = narrowed(program)
        again = [v.to(w.dtype) for v, w in zip(short, values, strict=True)]
        single = [
            _on_plain(program, short, short_lines),
            _on_plain(program, again, lines, torch.float64),
        ]
    can_tell = all(result.error is None for result in single)
    return Expected(plain, _sound(wide), _sound(noisy), tuple(single) if can_tell else ())


def _sound(results: Sequence[Result]) -> tuple[Result, ...]:
    return tuple(result for result in results if result.error is None)


def _on_plain(
    program: Program,
    values: Sequence[torch.Tensor],
    lines: Sequence[str] | None = None,
    default: torch.dtype = torch.float32,
) -> Result:
    """Run it; `default` is what integers become."""
    arguments = [
        value.clone().requires_grad_(leaf.requires_grad)
        for leaf, value in zip(program.leaves, values, strict=True)
    ]
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return run(program, arguments, {**PLAIN_WORDS, **PLAIN_TRAINING_WORDS}, lines=lines)
    finally:
        torch.set_default_dtype(before)


def _is_narrow(program: Program) -> bool:
    """Whether a training casts to bfloat16 inside: its own noise is as large as that."""
    return any("'context': narrow" in line for line in program.lines)


def judge(program: Program, expected: Expected, found: Result) -> Verdict:
    """Compare what DTensors gave with what plain torch gives.

    Args:
        program: What was run.
        expected: Of `expected_of`.
        found: What DTensors gave, fetched to the host.
    """
    if expected.plain.error is not None:
        return _judge_error(expected.plain, found)
    if found.error is not None:
        kind = "refused" if _is_refusal(found.error) else "unclear"
        return Verdict(kind, error_text(found.error), found.line)
    noisy, floor = False, _floor(program)
    for name in program.results:
        told = difference(
            found.values[name],
            expected.plain.values[name],
            [result.values[name] for result in expected.wide],
            [result.values[name] for result in expected.noisy],
            [result.values[name] for result in expected.single],
            requires_grad=not program.compiled,
            floor=floor,
        )
        if told == "noise":
            noisy = True
        elif told:
            return Verdict("wrong", f"{name}: {told}", _line_of(program, name))
    return Verdict("unjudged" if noisy else "right")


def _judge_error(plain: Result, found: Result) -> Verdict:
    assert plain.error is not None
    expected = f"plain torch: {error_text(plain.error)}"
    if found.error is None and _LEFT_OPEN.search(expected):
        return Verdict("unjudged", expected, plain.line)
    if found.error is not None:
        if isinstance(found.error, type(plain.error)):
            return Verdict("right")
        kind = "refused" if _is_refusal(found.error) else "unclear"
        return Verdict(kind, f"{error_text(found.error)}; {expected}", plain.line)
    is_poison = is_of_index(plain.error) and any(bool(v.isnan().any()) for v in _inexact(found))
    return Verdict("right") if is_poison else Verdict("silent", expected, plain.line)


def is_of_index(error: BaseException | None) -> bool:
    """Whether plain torch's error is about an index out of range."""
    return isinstance(error, IndexError) or bool(_OUT_OF_RANGE.search(str(error)))


def has_nan(found: Result, line: str = "") -> bool:
    """Whether what a line assigns, or else any result, is of a dtype that has NaN."""
    targets = re.findall(r"\w+", line.partition(" = ")[0]) if " = " in line else []
    own = {name: value for name, value in found.values.items() if name in targets}
    return bool(_inexact(Result(own) if own else found))


def _inexact(found: Result) -> list[torch.Tensor]:
    tensors = [value for value in found.values.values() if isinstance(value, torch.Tensor)]
    return [value for value in tensors if value.is_floating_point() or value.is_complex()]


def _is_refusal(error: BaseException | None) -> bool:
    """Whether an error, or one behind it, is this project's."""
    from xla_dtensor.core import LayoutError
    from xla_dtensor.errors import XlaDTensorError

    while error is not None:
        if isinstance(error, XlaDTensorError | LayoutError):
            return True
        error = error.__cause__
    return False


def error_text(error: BaseException) -> str:
    """Class and first sentence of an error, and where in this project it was raised."""
    text = re.sub(r"\s+", " ", str(error))[:_LENGTH]
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "xla_dtensor" in f.filename]
    place = f" at {frames[-1].filename.rpartition('/')[2]}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}: {text}{place}"


def _line_of(program: Program, name: str) -> int | None:
    for number, line in enumerate(program.lines):
        targets = line.partition(" = ")[0]
        if name in re.findall(r"\w+", targets) and " = " in line:
            return number
    return None


# ------------------------------------------------------------------ one value


def _floor(program: Program) -> float:
    """How far off torch's own float64 is for the ops of a program, relative to the value."""
    text = "\n".join(program.lines)
    return max([0.0, *(size for name, size in ops.listed()["inexact"].items() if name in text)])


def difference(
    found: Any,
    plain: Any,
    others: Sequence[Any],
    noisy: Sequence[Any] = (),
    single: Sequence[Any] = (),
    *,
    requires_grad: bool = True,
    floor: float = 0.0,
) -> str | None:
    """Compare one result.

    Args:
        found: Ours.
        plain: Plain torch's.
        others: Plain torch's in float64, the first without noise. Empty: float64 says nothing.
        noisy: Plain torch's, with noise on the result of each op.
        single: Plain torch's in float32 and, for the same inputs, in float64.
        requires_grad: Compare whether it has a gradient. What a compiled step gives has none.
        floor: A relative error that is always allowed: that of plain torch's own float64.

    Returns:
        What differs; "noise" where everything would be right; None where it is right.

    Example:
        >>> difference(torch.tensor([1, 2]), torch.tensor([1, 3]), [])
        '1 of 2 values, such as 2, not 3'
    """
    if found is None and isinstance(plain, torch.Tensor) and not plain.any():
        return None  # no gradient is one of zeros
    if plain is None and isinstance(found, torch.Tensor) and not found.any():
        return None
    if not isinstance(plain, torch.Tensor) or not isinstance(found, torch.Tensor):
        return _difference_of_numbers(found, plain, others)
    if found.shape != plain.shape:
        return f"shape {tuple(found.shape)}, not {tuple(plain.shape)}"
    if found.dtype != plain.dtype:
        return f"{found.dtype}, not {plain.dtype}"
    if requires_grad and found.requires_grad != plain.requires_grad:
        return f"requires_grad={found.requires_grad}, not {plain.requires_grad}"
    if not plain.numel():
        return None
    mine, theirs = _wide(found), _wide(plain)
    wide = (plain.shape, WIDE.get(plain.dtype, plain.dtype))  # else float64 takes another way
    seen = [_wide(o) for o in others if isinstance(o, torch.Tensor) and (o.shape, o.dtype) == wide]
    alike = [_wide(o) for o in noisy if isinstance(o, torch.Tensor) and o.shape == plain.shape]
    if not (plain.is_floating_point() or plain.is_complex()):
        right = mine == theirs
        for other in (*seen, *alike):
            right |= mine == other
        return None if bool(right.all()) else _first(mine, theirs, right)
    errors = [(theirs - exact).abs() for exact in seen[:1]]
    errors += [(other - seen[0]).abs() for other in seen[1:]]
    errors += [(other - theirs).abs() for other in alike]
    if torch.finfo(plain.dtype).eps == _DOUBLE_UNIT and len(single) == 2:
        short, exact = single
        are_tensors = isinstance(short, torch.Tensor) and isinstance(exact, torch.Tensor)
        if are_tensors and short.shape == plain.shape == exact.shape:
            units = (_wide(short) - _wide(exact)).abs() / torch.finfo(torch.float32).eps
            errors += [units * _DOUBLE_UNIT]
    allowed = _allowed(theirs, errors, max(2 * torch.finfo(plain.dtype).eps, floor))
    right = _near(mine, theirs, allowed)
    for other in (*seen, *alike):
        right |= _near(mine, other, allowed)
    if not bool(right.all()):
        return _first(mine, theirs, right) + _how_far(mine, theirs, right, allowed, plain.dtype)
    sizes = theirs.abs().nan_to_num(0, 0, 0)
    is_noise = bool((allowed > TIMES * _TOO_NOISY * sizes.clamp_min(1e-30)).all())
    return "noise" if is_noise and bool(sizes.any()) else None


def _allowed(plain: torch.Tensor, errors: Sequence[torch.Tensor], least: float) -> torch.Tensor:
    """How far each element may be off: four times what rounding, noise, or both are seen to change.

    What one element shows may be luck: nine of ten elements speak for all of them, and two units in
    the last place are always taken for noise.
    """
    rounding = least * plain.abs().nan_to_num(0, 0, 0)
    if not errors:
        return TIMES * rounding
    error = torch.stack([e.nan_to_num(0, 0, 0) for e in errors]).amax(0)
    usual = torch.quantile(error.reshape(-1)[: 1 << 20], 0.9)
    return TIMES * torch.maximum(torch.maximum(error, usual), rounding)


def _near(found: torch.Tensor, expected: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
    same = (found == expected) | (found.isnan() & expected.isnan())
    if found.is_complex():
        # Which of the two parts of an infinite or undefined number is nan, C leaves open.
        same |= ~found.isfinite() & ~expected.isfinite()
    return same | ((found - expected).abs() <= allowed)


def _wide(value: torch.Tensor) -> torch.Tensor:
    value = value.detach().resolve_conj().resolve_neg()
    if value.is_complex():
        return value.to(torch.complex128)
    return value.to(torch.float64) if value.is_floating_point() else value


def _difference_of_numbers(found: Any, plain: Any, others: Sequence[Any]) -> str | None:
    if isinstance(found, torch.Tensor) or isinstance(plain, torch.Tensor):
        kinds = [type(value).__name__ for value in (found, plain)]
        return f"a {kinds[0]}, not a {kinds[1]}"
    if type(found) is not type(plain):
        return f"{found!r}, not {plain!r}"
    if isinstance(plain, bool | int):
        return None if found in (plain, *others) else f"{found!r}, not {plain!r}"
    if plain is None:
        return None
    dtype = torch.complex64 if isinstance(plain, complex) else torch.float32
    tensors = [torch.tensor(value, dtype=dtype) for value in (found, plain, *others)]
    return difference(tensors[0], tensors[1], tensors[2:])


def _first(found: torch.Tensor, plain: torch.Tensor, right: torch.Tensor) -> str:
    off = (~right).reshape(-1).nonzero().reshape(-1)
    mine, theirs = (value.reshape(-1)[off[0]].item() for value in (found, plain))
    return f"{len(off)} of {found.numel()} values, such as {_number(mine)}, not {_number(theirs)}"


def _how_far(
    found: torch.Tensor,
    plain: torch.Tensor,
    right: torch.Tensor,
    allowed: torch.Tensor,
    dtype: torch.dtype,
) -> str:
    """The largest error in units of the last place, and what is allowed there."""
    size = plain.abs().clamp_min(torch.finfo(dtype).tiny) * torch.finfo(dtype).eps
    error = (
        ((found - plain).abs() / size)
        .masked_fill(right, 0)
        .nan_to_num(inf := float("inf"), inf, inf)
    )
    at = int(error.reshape(-1).argmax())
    return f" ({error.reshape(-1)[at]:.3g} ulp, {(allowed / size).reshape(-1)[at]:.3g} allowed)"


def _number(value: Any) -> str:
    return f"{value:.7g}" if isinstance(value, float) else str(value)


def worst(verdicts: Sequence[Verdict], kind: Callable[[Verdict], str] = lambda v: v.kind) -> str:
    """The worst kind that occurs."""
    kinds = {kind(verdict) for verdict in verdicts}
    return next((k for k in KINDS if k in kinds), "right")
