"""Drawn trainings are the same for a seed, run on plain tensors, and a wrong step is found."""

from __future__ import annotations

from dataclasses import replace

import torch

from tests.drawn.judge import expected_of, judge
from tests.drawn.programs import PLAIN_WORDS, Program, Result, run
from tests.drawn.training import PLAIN_TRAINING_WORDS, generate_training

SEEDS = range(80)


def plainly(drawn: Program) -> Result:
    values = [leaf.value.clone() for leaf in drawn.leaves]
    return run(drawn, values, {**PLAIN_WORDS, **PLAIN_TRAINING_WORDS})


def test_a_seed_is_a_training() -> None:
    first, again = generate_training(3), generate_training(3)
    assert first.lines == again.lines
    assert all(
        torch.equal(a.value, b.value) for a, b in zip(first.leaves, again.leaves, strict=True)
    )


def test_all_that_is_drawn_occurs() -> None:
    text = "\n".join(line for seed in SEEDS for line in generate_training(seed).lines)
    for word in ("annotated", "fully_shard", "tensor", "both", "scan"):
        assert f"'{word}'" in text
    for word in ("checkpoint=True", "narrow", "loaded(", "fused=True", "'accumulate': 2", "StepLR"):
        assert word in text
    assert "step = step_of(" in text  # eagerly


def test_plain_torch_runs_them() -> None:
    for seed in range(12):
        result = plainly(generate_training(seed))
        assert result.error is None, (seed, result.error)
        assert result.values["p"].numel() == generate_training(seed).leaves[0].value.numel()
        assert torch.isfinite(result.values["p"]).all()


def test_a_forgotten_change_is_wrong() -> None:
    """A step that goes on with the old learning rate is no rounding."""
    seed = next(
        s for s in SEEDS if any("['lr'] = 0.003" in line for line in generate_training(s).lines)
    )
    drawn = generate_training(seed)
    expected = expected_of(drawn)
    assert judge(drawn, expected, plainly(drawn)).kind == "right"
    stale = tuple(line for line in drawn.lines if "['lr'] = 0.003" not in line)
    assert judge(drawn, expected, plainly(replace(drawn, lines=stale))).kind == "wrong"
