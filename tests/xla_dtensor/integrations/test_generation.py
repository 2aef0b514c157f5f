"""generate() of Transformers on a mesh: the tokens of a plain model, by two programs."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import xla_dtensor as xd
from tests.xla_dtensor.integrations.tiny import VOCABULARY, llama, rows
from xla_dtensor.errors import ArgumentTypeError
from xla_dtensor.runtimes import Runtime

pytestmark = [pytest.mark.usefixtures("runtime"), pytest.mark.only_on("jax")]


@pytest.fixture
def mesh(runtime: Runtime) -> xd.DeviceMesh:
    return xd.init_device_mesh("xla", (4, 2), mesh_dim_names=("fsdp", "tp"))


class Pair:
    """A plain model, and the same on a mesh."""

    def __init__(self, model: Any, mesh: Any) -> None:
        from xla_dtensor.integrations.generation import compile_generate
        from xla_dtensor.nn.model_plan import put_model

        self.plain: Any = wide(model).eval()
        self.ours: Any = put_model(copy.deepcopy(self.plain), mesh)
        self.program = compile_generate(self.ours)

    def generate(self, ids: Any, **options: Any) -> tuple[Any, Any]:
        """What both generate, from one seed."""
        given = {
            "max_new_tokens": 12,
            "do_sample": False,
            "pad_token_id": 0,
            "eos_token_id": None,
            "output_logits": True,
            "return_dict_in_generate": True,
            **options,
        }
        torch.manual_seed(1)
        plain = self.plain.generate(ids, **given)
        torch.manual_seed(1)
        return plain, self.ours.generate(ids, cache_implementation="static", **given)

    @property
    def traces(self) -> int:
        return self.program.stats()["traces"]


def wide(model: Any) -> Any:
    """A model whose tokens differ: as it begins, one follows itself for ever."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.2, generator=generator)
    return model


def assert_same(plain: Any, ours: Any, error: float = 1e-5) -> None:
    """The same tokens, and logits that differ by rounding."""
    assert torch.equal(ours.sequences, plain.sequences)
    for a, b in zip(ours.logits, plain.logits, strict=True):
        assert (a - b).abs().max() <= error * max(1.0, b.abs().max())


def prompt(count: int = 4, length: int = 7) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (count, length), generator=torch.Generator().manual_seed(3))


@pytest.fixture
def num_compiled() -> Any:
    """Counts all that XLA compiles, op by op as well."""
    from jax import monitoring

    names: list[str] = []

    def note(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if "backend_compile" in event:
            names.append(event)

    monitoring.register_event_duration_secs_listener(note)
    yield lambda: len(names)
    monitoring.unregister_event_duration_listener(note)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"do_sample": True, "top_p": 0.9, "temperature": 0.7},
        {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
    ],
    ids=["greedy", "drawn", "penalties"],
)
def test_64_tokens_are_the_plain_models_and_take_two_programs(
    mesh: xd.DeviceMesh, options: dict[str, Any], num_compiled: Any
) -> None:
    pair = Pair(llama(max_position_embeddings=128), mesh)
    pair.generate(prompt(), max_new_tokens=2)
    before = num_compiled()
    plain, ours = pair.generate(prompt(), max_new_tokens=64, **options)
    assert_same(plain, ours)
    assert len(plain.sequences.unique()) >= 20
    assert pair.traces == 4  # the prompt and the next token, for the longer cache anew
    assert num_compiled() - before == 2


def test_beams_are_the_plain_models(mesh: xd.DeviceMesh, num_compiled: Any) -> None:
    pair = Pair(llama(), mesh)
    pair.generate(prompt(), max_new_tokens=2)
    before = num_compiled()
    plain, ours = pair.generate(prompt(), num_beams=3)
    assert_same(plain, ours)
    # The prompt, the next token, beams that change rows; and once a placement.
    assert num_compiled() - before <= 4
    assert ours.cache.layers[0].keys.mesh_layout.text() == "[fsdp, tp, -, -]"


def test_a_window_and_padded_prompts_take_two_programs(mesh: xd.DeviceMesh) -> None:
    import transformers

    config = transformers.Gemma3TextConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        sliding_window=10,
        layer_types=["sliding_attention", "full_attention"],
    )
    pair = Pair(transformers.Gemma3ForCausalLM(config), mesh)
    mask = torch.ones(4, 7, dtype=torch.long)
    mask[0, :3] = 0
    for length in (7, 7):
        assert_same(*pair.generate(prompt(4, length), max_new_tokens=20, attention_mask=mask))
    assert pair.traces == 2
    long = prompt(4, 13)  # longer than the window
    assert_same(*pair.generate(long, max_new_tokens=14, attention_mask=torch.ones_like(long)))


def test_rows_that_the_mesh_does_not_divide(mesh: xd.DeviceMesh) -> None:
    assert_same(*Pair(llama(), mesh).generate(prompt(3)))


def test_a_model_may_be_prepared_again(mesh: xd.DeviceMesh) -> None:
    from xla_dtensor.integrations.generation import compile_generate

    pair = Pair(llama(), mesh)
    assert compile_generate(pair.ours) is pair.program
    assert_same(*pair.generate(prompt(), max_new_tokens=3))


def test_one_device(runtime: Runtime) -> None:
    mesh = xd.init_device_mesh("xla", (1,), mesh_dim_names=("fsdp",))
    assert_same(*Pair(llama(), mesh).generate(prompt()))


def test_the_cache_is_cut_and_its_memory_is_taken_over(mesh: xd.DeviceMesh) -> None:
    pair = Pair(llama(), mesh)
    cache = pair.generate(prompt())[1].cache
    layer = cache.layers[0]
    assert layer.keys.mesh_layout.text() == "[fsdp, tp, -, -]"
    assert layer.keys.to_local().shape[:2] == (1, 2)
    assert type(layer.cumulative_length) is torch.Tensor
    aliases = pair.program.hlo().partition("input_output_alias={")[2].partition(" }")[0]
    assert aliases.count("-alias") == 4  # keys and values of two layers
    assert "4 tensors" in pair.program.explain().partition("written to, donated")[2]


def test_a_cache_goes_on_where_it_was_left(mesh: xd.DeviceMesh) -> None:
    """Two turns of a chat, and another one between them."""
    from transformers import DynamicCache, StaticCache

    pair = Pair(llama(), mesh)
    given = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    caches = [
        DynamicCache(config=pair.plain.config),
        StaticCache(config=pair.ours.config, max_cache_len=24),
    ]
    turns: list[list[torch.Tensor]] = []
    for model, cache in zip((pair.plain, pair.ours), caches, strict=True):
        said = model.generate(prompt(), cache=cache, **given)
        more = torch.cat([said, prompt(4, 3)], dim=1)
        pair.ours.generate(prompt(4, 5), cache_implementation="static", **given)
        turns.append([said, model.generate(more, cache=cache, **given)])
    assert all(map(torch.equal, *turns))


def test_an_encoder_is_a_program_too(mesh: xd.DeviceMesh, num_compiled: Any) -> None:
    import transformers

    config: Any = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4
    )
    config.decoder_start_token_id = 0
    mesh = xd.init_device_mesh("xla", (8,), mesh_dim_names=("fsdp",))
    pair = Pair(transformers.T5ForConditionalGeneration(config), mesh)
    pair.generate(prompt(8), max_new_tokens=2)
    before = num_compiled()
    assert_same(*pair.generate(prompt(8, 9)))
    assert pair.traces == 4
    assert num_compiled() - before == 3


def test_the_model_still_trains(mesh: xd.DeviceMesh) -> None:
    pair = Pair(llama(), mesh)
    assert_same(*pair.generate(prompt()))
    batch = torch.utils.data.default_collate(rows(4))
    losses = []
    for model in (pair.plain.train(), pair.ours.train()):
        loss = model(**batch, use_cache=False).loss
        loss.backward()
        losses.append(float(loss.detach()))
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    ours = pair.ours.model.layers[0].mlp.up_proj.weight.grad.full_tensor().cpu()
    theirs = pair.plain.model.layers[0].mlp.up_proj.weight.grad
    assert (ours - theirs).abs().max() < 1e-5


def test_bfloat16(mesh: xd.DeviceMesh) -> None:
    pair = Pair(llama().bfloat16(), mesh)
    plain, ours = pair.generate(prompt(), max_new_tokens=1)
    assert ours.cache.layers[0].keys.dtype is torch.bfloat16
    assert (ours.logits[0] - plain.logits[0]).abs().max() < 0.1 * plain.logits[0].abs().max()
    assert "bf16" in pair.program.hlo()


HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
# What differs from the sizes of all, and the names of the classes.
FAMILIES: dict[str, dict[str, Any]] = {
    "Mistral": {"sliding_window": 16},
    "Qwen3": {},
    "Gemma2": {"sliding_window": 16},
    "Phi3": {"head_dim": None, "eos_token_id": None},
    "Mixtral": {"num_local_experts": 4},
    "Qwen3Moe": {"num_experts": 4, **EXPERTS},
    "GptOss": {"num_local_experts": 4, "sliding_window": 16},
    "DeepseekV3": {"n_routed_experts": 4, "head_dim": None, **EXPERTS, **LATENT},
    "Olmo2": {"eos_token_id": None},
    "GPT2": GPT2,
    "Mamba": {"state_size": 8},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_families_generate_what_plain_ones_do(mesh: xd.DeviceMesh, family: str) -> None:
    import transformers

    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "max_position_embeddings": 128,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **HEADS,
        **FAMILIES[family],
    }
    if family in ("GPT2", "Mamba"):  # which call them otherwise, and have no plan
        sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, **FAMILIES[family]}
        mesh = xd.init_device_mesh("xla", (8,), mesh_dim_names=("fsdp",))
    config = getattr(transformers, f"{family}Config")(
        **{name: size for name, size in sizes.items() if size is not None}
    )
    named = getattr(transformers, f"{family}ForCausalLM", None)
    kind = named or getattr(transformers, f"{family}LMHeadModel")
    pair = Pair(kind(config), mesh)
    plain, ours = pair.generate(prompt(8), max_new_tokens=64)
    assert_same(plain, ours)
    assert plain.sequences.shape == (8, 71)
    assert len(plain.sequences.unique()) >= 20
    assert pair.traces == 2


def test_a_cache_that_grows_and_a_plain_model_are_refused(mesh: xd.DeviceMesh) -> None:
    from xla_dtensor.integrations.generation import compile_generate

    pair = Pair(llama(), mesh)
    with pytest.raises(ArgumentTypeError, match="cache_implementation='static'"):
        pair.ours.generate(prompt(), max_new_tokens=2)
    with pytest.raises(ArgumentTypeError, match="lies on no mesh"):
        compile_generate(pair.plain)
