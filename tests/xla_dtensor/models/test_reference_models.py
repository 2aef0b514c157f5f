"""The reference models have the published sizes, and the numbers of Hugging Face Transformers."""

from __future__ import annotations

import ast
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from xla_dtensor.models import decoder
from xla_dtensor.models.decoder import Llama, Mixtral, SparseMoE, balance, frequencies
from xla_dtensor.plan.model_sizes import ModelSizes, model_names

# What Hugging Face shows for the published weights.
PUBLISHED = {
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "mixtral-8x7b": 46_702_792_704,
}


def made(name: str, **options: Any) -> nn.Module:
    sizes = ModelSizes.load(name)
    return (Mixtral if sizes.num_local_experts else Llama)(sizes, **options)


@pytest.mark.parametrize("name", model_names())
def test_the_module_has_the_parameters_that_are_listed(name: str) -> None:
    with torch.device("meta"):
        model = made(name)
    found = [(path, tuple(value.shape)) for path, value in model.named_parameters()]
    assert found == list(ModelSizes.load(name).parameters())
    count = sum(value.numel() for value in model.parameters())
    assert count == ModelSizes.load(name).num_parameters
    assert count == PUBLISHED.get(name, count)


def hugging_face(sizes: ModelSizes) -> Any:
    transformers = pytest.importorskip("transformers")
    given = {
        key: value for key, value in asdict(sizes).items() if key not in ("name", "model_type")
    }
    scaling = given.pop("rope_scaling") or {}
    given["rope_parameters"] = {
        **scaling,
        "rope_theta": given.pop("rope_theta"),
        "rope_type": "llama3" if scaling else "default",
    }
    moe = sizes.num_local_experts > 0
    config = transformers.MixtralConfig if moe else transformers.LlamaConfig
    model = transformers.MixtralForCausalLM if moe else transformers.LlamaForCausalLM
    torch.manual_seed(0)
    return model(config(**given, attn_implementation="eager"))


@pytest.mark.parametrize("name", ["llama-tiny", "mixtral-tiny"])
def test_same_numbers_as_transformers(name: str) -> None:
    sizes = ModelSizes.load(name)
    theirs = hugging_face(sizes)
    ours = made(name, **({"capacity": None} if sizes.num_local_experts else {}))
    with torch.no_grad():
        for value in theirs.parameters():
            # Far from their first values, so that routers and norms have something to say.
            value.add_(torch.randn_like(value), alpha=0.2)
    ours.load_state_dict(theirs.state_dict())
    tokens = torch.randint(0, sizes.vocab_size, (3, 64))
    # Without the balancing loss, which the two define otherwise.
    ours.eval()
    expected, found = theirs(tokens).logits, ours(tokens)
    scale = float(expected.detach().abs().max())
    torch.testing.assert_close(found / scale, expected / scale, rtol=0, atol=1e-5)
    expected.square().mean().backward()
    found.square().mean().backward()
    grads = dict(theirs.named_parameters())
    for path, value in ours.named_parameters():
        assert value.grad is not None
        wanted = grads[path].grad
        size = float(wanted.abs().max())
        assert size > 0
        torch.testing.assert_close(value.grad / size, wanted / size, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["llama3-8b", "llama3-405b", "llama-tiny", "mixtral-8x7b"])
def test_frequencies_are_those_of_transformers(name: str) -> None:
    sizes = ModelSizes.load(name)
    small = replace(
        sizes,
        vocab_size=8,
        num_hidden_layers=1,
        intermediate_size=8,
        hidden_size=2 * sizes.head_dim,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    theirs = hugging_face(small).model.rotary_emb.inv_freq
    torch.testing.assert_close(torch.tensor(frequencies(sizes)), theirs, rtol=2e-6, atol=0)


def test_a_full_expert_drops_the_last_tokens() -> None:
    """All tokens like expert 0 best and 1 second: the first ones have the places, in this order."""
    block = SparseMoE(ModelSizes.load("mixtral-tiny"), capacity=1.0)
    assert block.places(64, 8) == 16
    liked = torch.tensor([0.5, 0.3, 0.2 / 6]).repeat_interleave(torch.tensor([1, 1, 6]))
    dispatch, combine, chosen = block._routes(liked.expand(1, 1, 64, 8))
    held = dispatch.sum((0, 1, 4))
    assert held[:16, 0].tolist() == [1.0] * 16
    assert held[16:].sum() == 0
    assert chosen.sum() == 2 * 64
    # Each place has one token at most, and weights are those of the choices.
    assert float(dispatch.sum(2).max()) == 1.0
    torch.testing.assert_close(combine[0, 0, 0].sum(-1)[:2], torch.tensor([0.625, 0.375]))


def test_first_choices_have_their_place_before_second_ones() -> None:
    block = SparseMoE(ModelSizes.load("mixtral-tiny"), capacity=0.25)
    first = torch.tensor([0.6, 0.3, *[0.1 / 6] * 6])
    other = torch.tensor([0.3, 0.6, *[0.1 / 6] * 6])
    # 32 tokens, 2 places: tokens 0 and 1 like expert 1 second, the last two like it first.
    given = torch.stack([first] * 30 + [other] * 2).expand(1, 1, 32, 8)
    dispatch, _, _ = block._routes(given)
    assert dispatch[0, 0, :, 1].sum(-1).nonzero().flatten().tolist() == [30, 31]


def test_balance() -> None:
    even = torch.full((6, 4), 0.25)
    chosen = torch.eye(4).repeat(2, 1)[:4]
    assert balance(even[:4], chosen).item() == pytest.approx(1.0)
    alone = torch.tensor([[1.0, 0, 0, 0]] * 4)
    assert balance(alone, alone).item() == pytest.approx(4.0)


def test_gradients_have_the_balancing_loss() -> None:
    """They are those of loss + coefficient * mean of the layers' balance, written out."""
    model: Any = made("mixtral-tiny", capacity=None)
    weight = model.model.sizes.router_aux_loss_coef
    tokens = torch.randint(0, 256, (2, 16))
    seen: list[torch.Tensor] = []

    def watch(router: Any, _given: Any, probabilities: torch.Tensor) -> None:
        chosen = torch.zeros_like(probabilities)
        chosen.scatter_(-1, probabilities.topk(2).indices, 1.0)
        seen.append(balance(probabilities, chosen))

    routers = [layer.mlp.gate for layer in model.model.layers]
    with_it = torch.autograd.grad(model(tokens).square().mean(), model.parameters())
    hooks = [router.register_forward_hook(watch) for router in routers]
    model.eval()
    plain = model(tokens).square().mean()
    without = torch.autograd.grad(plain, model.parameters(), retain_graph=True)
    total = plain + weight * torch.stack(seen).mean()
    expected = torch.autograd.grad(total, model.parameters())
    for hook in hooks:
        hook.remove()
    assert len(seen) == 2
    for found, wanted in zip(with_it, expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-7)
    index = [path for path, _ in model.named_parameters()].index("model.layers.1.mlp.gate.weight")
    assert not torch.allclose(with_it[index], without[index], rtol=1e-3)


def test_tied_embeddings() -> None:
    sizes = replace(ModelSizes.load("llama-tiny"), tie_word_embeddings=True)
    model = Llama(sizes)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert sum(value.numel() for value in model.parameters()) == sizes.num_parameters


def test_models_know_nothing_of_meshes() -> None:
    tree = ast.parse(Path(decoder.__file__).read_text(encoding="utf-8"))
    modules = {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    modules |= {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    tops = {module.partition(".")[0] for module in modules - {"xla_dtensor.plan.model_sizes"}}
    assert tops <= {"__future__", "collections", "math", "torch", "typing"}
