"""The example model is an ordinary causal language model: shapes, causality, gradients, loss."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from examples.language_model import (
    VOCABULARY_SIZE,
    LanguageModel,
    ModelConfig,
    RMSNorm,
    RotaryEmbedding,
    next_token_loss,
)

CONFIG = ModelConfig(dim=32, layers=2, heads=4, seq=16)


def make_model() -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(CONFIG)


def make_tokens(batch: int = 3, seq: int = CONFIG.seq, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCABULARY_SIZE, (batch, seq), generator=generator)


@pytest.mark.parametrize("seq", [1, 5, CONFIG.seq])
def test_logits_have_one_row_per_token(seq: int) -> None:
    logits = make_model()(make_tokens(seq=seq))
    assert logits.shape == (3, seq, VOCABULARY_SIZE)
    assert logits.dtype == torch.float32


def test_shorter_sequence_gives_the_same_logits() -> None:
    model, tokens = make_model(), make_tokens()
    torch.testing.assert_close(model(tokens[:, :7]), model(tokens)[:, :7])


@pytest.mark.parametrize("position", [1, 8, CONFIG.seq - 1])
def test_changing_a_token_leaves_earlier_logits_unchanged(position: int) -> None:
    model, tokens = make_model(), make_tokens()
    changed = tokens.clone()
    changed[:, position] = (changed[:, position] + 1) % VOCABULARY_SIZE
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :position], after[:, :position], rtol=0, atol=1e-6)
    moved = (before - after).abs().amax(-1)
    assert bool((moved[:, position:] > 1e-5).all()), "later positions have to see the change"


def test_rows_of_a_batch_do_not_mix() -> None:
    model, tokens = make_model(), make_tokens()
    torch.testing.assert_close(model(tokens)[1:2], model(tokens[1:2]))


def test_gradient_reaches_every_parameter() -> None:
    model, tokens = make_model(), make_tokens()
    next_token_loss(model(tokens[:, :-1]), tokens[:, 1:]).backward()
    without = [
        name
        for name, parameter in model.named_parameters()
        if parameter.grad is None or not bool(parameter.grad.abs().sum() > 0)
    ]
    assert without == []


def test_first_loss_is_that_of_a_blind_guess() -> None:
    model, tokens = make_model(), make_tokens(batch=16)
    loss = next_token_loss(model(tokens[:, :-1]), tokens[:, 1:])
    assert loss.item() == pytest.approx(math.log(VOCABULARY_SIZE), abs=0.1)


def test_loss_falls_when_one_batch_is_repeated() -> None:
    model, tokens = make_model(), make_tokens()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses: list[float] = []
    for _ in range(15):
        optimizer.zero_grad()
        loss = next_token_loss(model(tokens[:, :-1]), tokens[:, 1:])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


def test_loss_is_the_mean_over_all_tokens() -> None:
    logits, targets = torch.randn(2, 5, VOCABULARY_SIZE), make_tokens(batch=2, seq=5)
    expected = F.cross_entropy(logits.transpose(1, 2), targets)
    torch.testing.assert_close(next_token_loss(logits, targets), expected)


def test_norm_equals_pytorchs() -> None:
    norm = RMSNorm(32, eps=1e-5)
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(2, 3, 32)
    torch.testing.assert_close(norm(x), F.rms_norm(x, (32,), norm.weight, eps=1e-5))


def test_norm_computes_in_float32_and_keeps_the_dtype() -> None:
    norm = RMSNorm(32, eps=1e-5).half()
    x = torch.full((1, 32), 300.0, dtype=torch.float16)  # its square is no float16
    torch.testing.assert_close(norm(x), torch.ones_like(x))


def test_rotary_scores_depend_on_distance_only() -> None:
    rotary = RotaryEmbedding(head_dim=8, seq=16, base=10_000.0)
    query, key = torch.randn(8), torch.randn(8)
    rotated_query = rotary(query.expand(1, 1, 16, 8))[0, 0]
    rotated_key = rotary(key.expand(1, 1, 16, 8))[0, 0]
    scores = rotated_query @ rotated_key.T
    torch.testing.assert_close(scores[5, 3], scores[12, 10])
    torch.testing.assert_close(scores[9, 2], scores[15, 8])
    assert not torch.isclose(scores[5, 3], scores[5, 4])


def test_rotary_buffers_are_real_and_not_saved() -> None:
    model = make_model()
    assert all(not buffer.is_complex() for buffer in model.buffers())
    assert not any("rotary" in name for name in model.state_dict())


def test_embedding_and_head_are_untied() -> None:
    model = make_model()
    assert model.embedding.weight is not model.lm_head.weight
    assert model.embedding.weight.shape == model.lm_head.weight.shape == (257, 32)


def test_same_seed_gives_the_same_weights() -> None:
    for first, second in zip(make_model().parameters(), make_model().parameters(), strict=True):
        torch.testing.assert_close(first, second, rtol=0, atol=0)


@pytest.mark.parametrize(("dim", "heads"), [(30, 4), (12, 4)])
def test_head_of_odd_width_is_refused(dim: int, heads: int) -> None:
    with pytest.raises(ValueError, match=f"dim={dim} and heads={heads}.*multiple of {2 * heads}"):
        ModelConfig(dim=dim, heads=heads)
