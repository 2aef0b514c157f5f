"""Everything in which a program differs between PyTorch's DTensor, xla_dtensor and plain torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from tests.differential.comparing import agree, parts_of, sums_agree
from tests.differential.generating import make_program
from tests.differential.plain_torch import PlainTorch
from tests.differential.programs import Program, Step
from tests.differential.running import Run, run
from tests.differential.stored import StoredRun, load, load_labels
from tests.differential.xla_run import Found, XlaRun, run_on_xla

__all__ = ["Difference", "Labels", "against_plain_torch", "differences", "labels_for"]


@dataclass(frozen=True)
class Difference:
    """One difference. `kind` says what differs; `gradient` that it is one of a gradient.

    The kinds are "value" (ours is not plain torch's), "PyTorch's value", "label", "local shape",
    "shards" (to_local gives something else), "PyTorch raises" and "we raise".
    """

    program: Program
    kind: str
    number: int
    gradient: bool
    detail: str
    follows: bool = False  # of a label: an input's label differed before

    @property
    def step(self) -> Step | None:
        """The step whose result differs; None for gradients and the backward."""
        first = len(self.program.leaves)
        return None if self.gradient else self.program.steps[self.number - first]

    def __str__(self) -> str:
        what = f"gradient of tensor {self.number}" if self.gradient else f"step {self.step}"
        return f"seed {self.program.seed}, {what}: {self.kind}: {self.detail}"


@dataclass
class Labels:
    """What PyTorch of this version says of placements and errors, for one program."""

    tokens: dict[int, tuple[str, ...]]
    gradients: dict[int, tuple[str, ...]]
    errors: dict[int, str]
    lost: set[int]
    backward_error: str


def labels_for(seed: int, version: str) -> Labels | None:
    """The placements of a torch version ("2.9"); None if none were stored for it."""
    made_by, runs = load()
    if version == made_by:
        stored = runs[seed]
        tokens, gradients = (
            {n: t.tokens for n, t in group.items()} for group in (stored.tensors, stored.gradients)
        )
        return Labels(tokens, gradients, stored.errors, set(stored.lost), stored.backward_error)
    rows = load_labels(version)
    if rows is None:
        return None
    tensors, of_gradients, errors, failed = rows[seed]
    tokens, gradients = (
        {n: tuple(text.split()) for n, text, _ in group} for group in (tensors, of_gradients)
    )
    errors = {int(number): name for number, name in errors.items()}
    return Labels(tokens, gradients, errors, {n for n in errors if n not in tokens}, failed)


def differences(seed: int, mesh: Any) -> list[Difference]:
    """Run a program on ours and in plain torch, and compare both with what PyTorch gave."""
    program, (_, runs) = make_program(seed), load()
    stored = runs[seed]
    version = ".".join(torch.__version__.split(".")[:2])
    labels = labels_for(seed, version) or _without_labels(stored)
    again, drop = set(labels.errors), labels.lost
    plain = run(program, PlainTorch(program.mesh_shape), again, drop)
    ours = run_on_xla(program, mesh, again, drop)
    return [
        *_raised(program, labels, ours),
        *_ours_against_plain(program, plain, ours),
        *_ours_against_labels(program, labels, ours),
        *_stored_against(program, stored, plain, ours, same_loss=set(stored.lost) == drop),
    ]


def against_plain_torch(program: Program, mesh: Any) -> list[Difference]:
    """Run a program on ours and in plain torch, and compare the values."""
    plain, ours = run(program, PlainTorch(program.mesh_shape)), run_on_xla(program, mesh)
    nothing = Labels({}, {}, {}, set(), "")
    return [*_raised(program, nothing, ours), *_ours_against_plain(program, plain, ours)]


def _without_labels(stored: StoredRun) -> Labels:
    return Labels({}, {}, stored.errors, set(stored.lost), stored.backward_error)


def _raised(program: Program, labels: Labels, ours: XlaRun) -> Iterator[Difference]:
    for number, name in labels.errors.items():
        if number in ours.first:
            yield Difference(program, "PyTorch raises", number, False, name)
    for number, error in ours.errors.items():
        if number not in labels.errors:
            yield Difference(program, "we raise", number, False, f"{type(error).__name__}: {error}")
    if labels.backward_error and ours.backward_error is None and ours.gradients:
        yield Difference(program, "PyTorch raises", 0, True, labels.backward_error)
    if ours.backward_error is not None and not labels.backward_error:
        error = ours.backward_error
        yield Difference(program, "we raise", 0, True, f"{type(error).__name__}: {error}")


def _ours_against_plain(program: Program, plain: Run, ours: XlaRun) -> Iterator[Difference]:
    first = len(program.leaves)
    for group, expected in ((ours.tensors, plain.tensors), (ours.first, plain.first)):
        for number, found in group.items():
            if number >= first and not agree(found.value, expected[number]):
                yield _value(program, number, False, found, expected[number])
    for number in sorted(set(ours.gradients) | set(plain.gradients)):
        if ours.backward_error is not None:
            break
        found, expected = ours.gradients.get(number), plain.gradients.get(number)
        if found is None or expected is None or not agree(found.value, expected):
            yield _value(program, number, True, found, expected)
    parts = parts_of(
        ours.tensors[ours.last].value, ours.tensors[ours.last].tokens, program.mesh_shape
    )
    alike = len(parts) == len(ours.shards) and all(map(agree, ours.shards, parts))
    if not alike and ours.last >= first:
        yield Difference(program, "shards", ours.last, False, str(ours.shards)[:300])


def _value(
    program: Program, number: int, gradient: bool, found: Found | None, expected: Any
) -> Difference:
    if found is None or expected is None:
        detail = f"ours is {found}, plain torch's {expected}"
    elif found.value.shape != expected.shape or found.value.dtype != expected.dtype:
        detail = f"{found.value.shape} {found.value.dtype}, {expected.shape} {expected.dtype}"
    else:
        off = (found.value.double() - expected.double()).abs().max() if expected.numel() else 0
        detail = f"off by {float(off):.3g}"
    return Difference(program, "value", number, gradient, detail)


def _ours_against_labels(program: Program, labels: Labels, ours: XlaRun) -> Iterator[Difference]:
    first, differing = len(program.leaves), set()
    for number, tokens in sorted(labels.tokens.items()):
        if number not in ours.tensors:
            continue
        follows = bool(differing & set(program.steps[number - first].inputs))
        if ours.tensors[number].tokens != tokens:
            differing.add(number)
            yield _label(program, number, False, ours.tensors[number], tokens, follows)
    for number, tokens in labels.gradients.items():
        found = ours.gradients.get(number)
        if found is not None and found.tokens != tokens:
            yield _label(program, number, True, found, tokens, bool(differing))


def _label(
    program: Program, number: int, gradient: bool, found: Found, tokens: Any, follows: bool
) -> Difference:
    detail = f"ours {' '.join(found.tokens)}, PyTorch's {' '.join(tokens)}"
    return Difference(program, "label", number, gradient, detail, follows)


def _stored_against(
    program: Program, stored: StoredRun, plain: Run, ours: XlaRun, same_loss: bool
) -> Iterator[Difference]:
    for gradient, group in ((False, stored.tensors), (True, stored.gradients)):
        if gradient and not same_loss:
            continue
        for number, tensor in group.items():
            found = (ours.gradients if gradient else ours.tensors).get(number)
            if found is None:
                continue
            parts = parts_of(found.value, tensor.tokens, program.mesh_shape)
            if [tuple(part.shape) for part in parts] != tensor.shapes:
                yield Difference(program, "local shape", number, gradient, str(tensor.shapes))
            elif found.tokens == tensor.tokens and found.shapes != tensor.shapes:
                yield Difference(program, "local shape", number, gradient, str(found.shapes))
            elif not sums_agree(tensor.sums, parts):
                yield Difference(program, "PyTorch's value", number, gradient, str(tensor.tokens))
