"""The parts of the training example that need no device: placements, schedule, verdicts."""

from __future__ import annotations

import math

import pytest
from torch.distributed.tensor import Replicate, Shard

from examples import train_lm
from examples.language_model import LanguageModel, ModelConfig

MODEL = LanguageModel(ModelConfig(dim=32, layers=2, heads=4, seq=16))


def test_every_parameter_has_a_place_and_every_line_a_parameter() -> None:
    used = {id(train_lm.placements_of(name)) for name, _ in MODEL.named_parameters()}
    assert used == {id(placements) for placements in train_lm.SHARDING.values()}


def test_matrices_are_cut_over_both_axes_and_norms_over_none() -> None:
    for name, parameter in MODEL.named_parameters():
        dims = {p.dim for p in train_lm.placements_of(name) if isinstance(p, Shard)}
        assert dims == ({0, 1} if parameter.ndim == 2 else set()), name


def test_pairs_of_matmuls_are_cut_along_the_dim_they_share() -> None:
    layer = "layers.1."
    columns = ("attention.wq", "attention.wk", "attention.wv", "mlp.w1", "mlp.w3")
    assert {train_lm.placements_of(f"{layer}{name}.weight")[1] for name in columns} == {Shard(0)}
    rows = ("attention.wo", "mlp.w2")
    assert {train_lm.placements_of(f"{layer}{name}.weight")[1] for name in rows} == {Shard(1)}
    assert train_lm.placements_of("norm.weight") == (Replicate(), Replicate())


def test_unknown_parameter_is_refused() -> None:
    with pytest.raises(LookupError, match=r"name='layers\.0\.mlp\.bias'.*Add a line"):
        train_lm.placements_of("layers.0.mlp.bias")


def test_learning_rate_rises_then_falls() -> None:
    factors = [train_lm.learning_rate_factor(step, 60) for step in range(61)]
    assert factors[0] == pytest.approx(0.2)
    assert max(factors) <= 1
    assert factors.index(max(factors)) == 4
    assert factors[4:] == sorted(factors[4:], reverse=True)
    assert factors[60] == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ([5.0, 4.0, 3.0], True),
        ([5.0, 4.00009, 3.0], True),
        ([5.0, 4.0002, 3.0], False),
        ([5.0, math.nan, 3.0], False),
        ([math.nan, 4.0, 3.0], False),
        ([5.0, math.inf, 3.0], False),
    ],
)
def test_losses_are_judged_one_by_one(losses: list[float], expected: bool) -> None:
    assert train_lm.report_losses(losses, [5.0, 4.0]) is expected


@pytest.mark.parametrize("arguments", [["--dp", "3"], ["--devices", "4"], ["--steps", "0"]])
def test_bad_arguments_are_refused(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as refusal:
        train_lm.parse_arguments(arguments)
    assert refusal.value.code == 2
    assert arguments[0] in capsys.readouterr().err


def test_defaults_fit_together() -> None:
    options = train_lm.parse_arguments([])
    assert options.dp * options.tp == options.devices == 8
    assert options.steps > train_lm.COMPARED_STEPS
