"""One op on DTensors: is it right, refused, raised or wrong, forward and backward."""

from __future__ import annotations

import re
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any
from unittest import mock

import torch
from torch.utils._pytree import tree_flatten

from tools.op_sweep.compare import differences
from tools.op_sweep.samples import Call, calls_of, op_random, put_on
from xla_dtensor.core import LayoutError
from xla_dtensor.errors import XlaDTensorError

__all__ = ["KINDS", "Outcome", "Row", "judge_op", "worst"]

# From worst to best. "crash" and "hang" are noted by the parent process.
KINDS = ("crash", "hang", "wrong", "raised", "refused", "right", "skipped")
_NOTE_LENGTH = 160
_REFUSALS = (XlaDTensorError, LayoutError)


@dataclass(frozen=True)
class Outcome:
    """What became of one call, or of its gradients: one of `KINDS`, and why."""

    kind: str
    note: str = ""


@dataclass
class Row:
    """What became of one op: how many calls of each kind, and the worst one's story."""

    op: str
    seed: int
    samples: int
    forward: dict[str, int] = field(default_factory=dict)
    backward: dict[str, int] = field(default_factory=dict)
    note: str = ""
    seconds: float = 0.0

    def as_json(self) -> dict[str, Any]:
        """The row as JSON has it."""
        return asdict(self)


def worst(counts: dict[str, int]) -> str:
    """Return the worst kind that occurs; "skipped" where nothing does."""
    return next((kind for kind in KINDS if counts.get(kind)), "skipped")


def judge_op(op: Any, distribute: Callable[..., torch.Tensor], number: int, seed: int) -> Row:
    """Call an op with random inputs and placements, and compare with plain torch.

    Args:
        op: An entry of ``op_db``.
        distribute: Takes a plain tensor and placements, returns a DTensor.
        number: How many sample inputs.
        seed: Decides inputs and placements.
    """
    start = time.perf_counter()
    chooser = op_random(op, seed + 1)
    forward: Counter[str] = Counter()
    backward: Counter[str] = Counter()
    notes: list[tuple[int, str]] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for call in calls_of(op, number, seed):
            outcomes = _judge_call(op, call, distribute, chooser)
            for part, counts, outcome in zip(
                ("", "backward: "), (forward, backward), outcomes, strict=True
            ):
                if outcome is not None:
                    counts[outcome.kind] += 1
                    notes.append((KINDS.index(outcome.kind), part + outcome.note))
    if not forward:
        forward["skipped"] += 1
        notes.append((KINDS.index("skipped"), "no sample in float32, int64 or bool"))
    note = min(notes, key=lambda noted: noted[0])[1]
    seconds = round(time.perf_counter() - start, 2)
    return Row(op.full_name, seed, number, dict(forward), dict(backward), note, seconds)


def _judge_call(
    op: Any, call: Call, distribute: Callable[..., torch.Tensor], chooser: Any
) -> tuple[Outcome, Outcome | None]:
    reason = _why_not(call)
    if reason:
        return Outcome("skipped", reason), None
    plain = call.mapped(_copy)
    try:
        expected = plain.run()
        is_random = "empty" in op.name or _is_random(call)
    except Exception as error:
        return Outcome("skipped", f"plain torch raises {_error_text(error)}"), None
    texts: list[str] = []
    try:
        ours, texts = put_on(call, distribute, chooser)
        ours = ours.with_device(ours.tensors()[0].device)
        found = ours.run()
        wide = _wide(call)
        exact = None if is_random else _or_none(wide.run)
        told = differences(found, expected, exact, only_kind=is_random)
        told = told or _difference_of_written(call, plain, ours, is_random)
    except Exception as error:
        return _failed(error, call, texts), None
    if told:
        return Outcome("wrong", f"{told} ({_described(call, texts)})"), None
    if is_random:
        return Outcome("right", "random: shape and dtype compared"), None
    return Outcome("right"), _judge_gradients(
        call, plain, ours, wide, (found, expected, exact), texts
    )


def _difference_of_written(call: Call, plain: Call, ours: Call, is_random: bool) -> str | None:
    """Compare the arguments that the op has written into, such as running statistics."""
    each = zip(call.tensors(), plain.tensors(), ours.tensors(), strict=True)
    for before, theirs, mine in each:
        if differences(theirs, before, None) and not is_random:
            told = differences(mine, theirs, None)
            if told:
                return f"written: {told}"
    return None


def _is_random(call: Call) -> bool:
    """Tell whether the seed decides the values. Some entries of op_db set one themselves."""
    results = []
    for seed in range(4):
        torch.manual_seed(seed)
        with mock.patch("torch.manual_seed"):
            results.append(call.mapped(_copy).run())
    return any(differences(result, results[0], None) for result in results[1:])


def _judge_gradients(
    call: Call, plain: Call, ours: Call, wide: Call, results: Sequence[Any], texts: list[str]
) -> Outcome | None:
    try:
        theirs = _gradients(plain, results[1], None)
    except Exception:
        return None  # torch itself cannot differentiate it
    if theirs is None:
        return None
    try:
        found = _gradients(ours, results[0], results[1])
        exact = _or_none(lambda: _gradients(wide, results[2], results[1]))
        told = differences(found, theirs, exact)
    except Exception as error:
        return _failed(error, call, texts)
    return Outcome("wrong", f"{told} ({_described(call, texts)})") if told else Outcome("right")


def _gradients(call: Call, output: Any, like: Any) -> Any:
    """Send a fixed cotangent back through the outputs that plain torch can differentiate."""
    leaves = [tensor for tensor in call.tensors() if tensor.requires_grad]
    output = call.finish(output)
    reference = output if like is None else call.finish(like)
    pairs = zip(tree_flatten(output)[0], tree_flatten(reference)[0], strict=True)
    outputs = [
        mine for mine, plain in pairs if isinstance(plain, torch.Tensor) and plain.requires_grad
    ]
    if not leaves or not any(out.numel() for out in outputs):
        return None
    torch.manual_seed(2)
    cotangents = [torch.randn(out.shape).to(out.dtype) for out in outputs]
    products = zip(outputs, cotangents, strict=True)
    total = torch.stack([(out * c.to(out.device)).sum().real for out, c in products]).sum()
    return torch.autograd.grad(total, leaves, allow_unused=True)


def _why_not(call: Call) -> str:
    tensors = call.tensors()
    if not tensors:
        return "no tensor among the arguments"
    if any(tensor.layout != torch.strided for tensor in tensors):
        return "sparse"
    if any(tensor.is_complex() for tensor in tensors):
        return "complex"
    return ""


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _wide(call: Call) -> Call:
    def widened(tensor: torch.Tensor) -> torch.Tensor:
        copy = tensor.detach().clone()
        copy = copy.double() if copy.dtype == torch.float32 else copy
        return copy.requires_grad_(tensor.requires_grad)

    return call.mapped(widened)


def _or_none(function: Callable[[], Any]) -> Any:
    try:
        return function()
    except Exception:
        return None


def _failed(error: Exception, call: Call, texts: list[str]) -> Outcome:
    causes: list[BaseException] = [error]
    while causes[-1].__cause__ is not None:
        causes.append(causes[-1].__cause__)
    refused = any(isinstance(cause, _REFUSALS) for cause in causes)
    if refused:
        return Outcome("refused", _error_text(error))
    frames = traceback.extract_tb(error.__traceback__)
    place = f" at {frames[-1].filename.rpartition('/')[2]}:{frames[-1].lineno}" if frames else ""
    return Outcome("raised", f"{_error_text(error)}{place} ({_described(call, texts)})")


def _error_text(error: BaseException) -> str:
    text = re.sub(r"\s+", " ", str(error)).split(". ")[0]
    return f"{type(error).__name__}: {text}"[:_NOTE_LENGTH]


def _described(call: Call, texts: Sequence[str]) -> str:
    tensors = call.tensors()
    texts = [*texts, *["?"] * (len(tensors) - len(texts))]
    each = [f"{tuple(t.shape)} {text}" for t, text in zip(tensors, texts, strict=True)]
    _, args, kwargs = call.arguments
    rest = [repr(v) for v in args if not isinstance(v, torch.Tensor | list | tuple)]
    rest += [f"{k}={v!r}" for k, v in kwargs.items() if not isinstance(v, torch.Tensor)]
    return "; ".join([*each[:4], ", ".join(rest)])[:_NOTE_LENGTH]
