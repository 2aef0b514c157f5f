"""The classes of differences that are known. docs/semantics.md says of each why it is right.

A difference that no class explains fails the test, and so does a class whose own examples do not
show it any more. Values of ours that are not plain torch's have no class, and never will.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.differential.differences import Difference

__all__ = ["EXPLAINED", "Explanation", "explain"]

MATMULS = ("mm", "linear", "linear_bias", "einsum", "bmm")
PENDING = ("_NormPartial", "_MaskPartial", "MaskPartial")


@dataclass(frozen=True)
class Explanation:
    """A class of differences: its row in docs/semantics.md, and what belongs to it.

    Args:
        name: The first cell of the row.
        applies: Tells whether a difference belongs to the class.
        where: The runtimes and torch versions on which it is looked for.
    """

    name: str
    applies: Callable[[Difference], bool]
    where: tuple[str, ...] = ("jax 2.9", "torch_xla 2.9", "jax 2.15")


def _on(d: Difference, *names: str) -> bool:
    return d.step is not None and (d.step.name in names or d.step.kind in names)


def _ops(d: Difference) -> set[str]:
    return {step.name for step in d.program.steps}


def _raises(d: Difference, *errors: str) -> bool:
    return d.kind == "PyTorch raises" and d.detail in errors


def _of_embedding(d: Difference) -> bool:
    """Whether an input is an embedding's result, whose pending mask the store has no word for."""
    first, steps = len(d.program.leaves), d.program.steps
    inputs = () if d.step is None else d.step.inputs
    return any(n >= first and steps[n - first].name == "embedding" for n in inputs)


def _has_parts(d: Difference) -> bool:
    local = [step for step in d.program.steps if step.kind == "local"]
    return any(token in ("Pmax", "Pavg") for step in local for token in step.params[1])


def _uneven(d: Difference) -> bool:
    sizes = [size for leaf in d.program.leaves if not leaf.rows for size in leaf.shape]
    return any(size % 4 for size in sizes)


def _theirs(d: Difference) -> bool:
    return d.kind == "PyTorch's value"


EXPLAINED: tuple[Explanation, ...] = (
    Explanation("a plain tensor beside a DTensor", lambda d: _on(d, "plain_beside")),
    Explanation(
        "an op without a rule",
        lambda d: _raises(d, "NotImplementedError"),
        ("jax 2.9", "torch_xla 2.9"),
    ),
    Explanation(
        "a reduction over an empty shard",
        lambda d: _raises(d, "IndexError") and _on(d, "amax", "amin", "argmax", "max_values"),
        ("jax 2.15",),
    ),
    Explanation(
        "placements that PyTorch refuses",
        lambda d: _raises(d, "RuntimeError", "AssertionError", "IndexError", "TypeError"),
    ),
    Explanation(
        "a label with a mask or a norm pending",
        lambda d: (
            d.kind == "label" and (any(name in d.detail for name in PENDING) or _of_embedding(d))
        ),
    ),
    Explanation(
        "a strided label that no tiling has",
        lambda d: d.kind == "label" and "_S" in d.detail,
    ),
    Explanation(
        "the label of a matmul",
        lambda d: d.kind == "label" and not d.follows and _on(d, *MATMULS),
        ("jax 2.15",),
    ),
    Explanation(
        "a label after one that differs",
        lambda d: d.kind == "label" and d.follows,
        ("torch_xla 2.9", "jax 2.15"),
    ),
    Explanation(
        "the label of a gradient",
        lambda d: d.kind == "label" and d.gradient,
        ("jax 2.15",),
    ),
    Explanation(
        "the gradient of a max or mean of parts",
        lambda d: _theirs(d) and d.gradient and _has_parts(d),
    ),
    Explanation(
        "a mean over uneven shards",
        lambda d: _theirs(d) and _uneven(d) and bool(_ops(d) & {"mse", "mean", "var"}),
        ("jax 2.15",),
    ),
    Explanation(
        "the gradient of mse_loss",
        lambda d: _theirs(d) and d.gradient and "mse" in _ops(d),
        ("jax 2.15",),
    ),
    Explanation(
        "a write of a sharded tensor into a replicated one",
        lambda d: _theirs(d) and "in_place" in _ops(d),
    ),
    Explanation(
        "a number added to a pending sum",
        lambda d: (
            (_theirs(d) and bool(_ops(d) & {"rsqrt", "div", "shift"}))
            or (d.kind == "label" and _on(d, "rsqrt", "div", "shift") and "Pavg" in d.detail)
        ),
        ("jax 2.15",),
    ),
    Explanation(
        "the placements of argmax",
        lambda d: d.kind == "local shape" and _on(d, "argmax"),
        ("jax 2.15",),
    ),
)


def explain(difference: Difference) -> Explanation | None:
    """The first class that a difference belongs to."""
    return next((e for e in EXPLAINED if e.applies(difference)), None)
