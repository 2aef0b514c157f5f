"""TRL's SFTTrainer and peft's adapters on a mesh, beside the plain ones."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import xla_dtensor as xd
from tests.xla_dtensor.integrations.tiny import arguments, difference, llama, losses, rows
from xla_dtensor.errors import ArgumentTypeError
from xla_dtensor.runtimes import Runtime

pytestmark = [
    pytest.mark.usefixtures("runtime"),
    pytest.mark.only_on("jax"),
    pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed in v6:FutureWarning"),
]


@pytest.fixture
def mesh(runtime: Runtime) -> xd.DeviceMesh:
    return xd.init_device_mesh("xla", (4, 2), mesh_dim_names=("fsdp", "tp"))


def adapted() -> Any:
    """A Llama with LoRA on two of its products; the adapters' second factor is not zero."""
    import peft

    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], lora_dropout=0.0)
    model = peft.get_peft_model(llama(), config)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora" in name:
                parameter.normal_(0, 0.1, generator=generator)
    return model


def test_only_adapters_train_and_they_are_saved_and_go_on(
    tmp_path: Path, mesh: xd.DeviceMesh
) -> None:
    import peft
    from transformers import Trainer

    from xla_dtensor.integrations.transformers import XDTrainer

    options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    data: Any = rows(32)
    plain: Any = Trainer(adapted(), arguments(tmp_path, 8, **options), train_dataset=data)
    ours: Any = XDTrainer(
        adapted(), arguments(tmp_path, 2, **options), train_dataset=data, mesh=mesh
    )
    ours.train()
    plain.train()
    torch.testing.assert_close(losses(ours), losses(plain), rtol=0, atol=1e-5)
    assert difference(ours.model, plain.model) < 1e-5
    assert ours.programs[1].stats()["reasons"] == ("first call",)
    projection = ours.model.base_model.model.model.layers[0].self_attn.q_proj
    assert not projection.base_layer.weight.requires_grad
    assert projection.base_layer.weight.mesh_layout.text() == "[tp, fsdp]"
    assert difference(projection.base_layer, llama().model.layers[0].self_attn.q_proj) == 0.0

    folder = Path(ours.args.output_dir)
    loaded = peft.PeftModel.from_pretrained(llama(), folder / "checkpoint-4")
    saved = dict(loaded.named_parameters())
    trained = dict(ours.model.named_parameters())
    for name in (name for name in saved if "lora" in name):
        assert torch.equal(saved[name], trained[name].full_tensor().cpu()), name

    changed = arguments(tmp_path, 2, **options)
    changed.output_dir = str(folder)
    later = XDTrainer(adapted(), changed, train_dataset=data, mesh=mesh)
    later.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    assert difference(later.model, ours.model) < 1e-7


def text(start: int, length: int) -> str:
    return " ".join(f"w{(start + 3 * place) % 62}" for place in range(length))


def supervised(
    kind: Any,
    folder: Path | str,
    batch_size: int,
    change: Callable[[Any], Any] = lambda model: model,
    data: dict[str, list[str]] | None = None,
    config: Any = None,
    **given: Any,
) -> Any:
    """A trainer of TRL's, or ours, of a changed model; with texts of its own and a config of it."""
    import datasets
    import tokenizers
    import transformers
    from trl.trainer.sft_config import SFTConfig

    words = {"<pad>": 0, "<eos>": 1} | {f"w{i}": i + 2 for i in range(62)}
    model = tokenizers.models.WordLevel(words, unk_token="<pad>")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>"
    )
    texts = [text(7 * i, 5 + i % 5) for i in range(32)]
    make = SFTConfig if config is None else config
    arguments = make(
        str(folder),
        max_steps=4,
        per_device_train_batch_size=batch_size,
        learning_rate=1e-3,
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
        save_strategy="no",
        dataloader_pin_memory=False,
        gradient_checkpointing=False,
        seed=1,
        bf16=False,
        use_cpu=True,
        max_length=12,
        pad_to_multiple_of=12,
    )
    rows = datasets.Dataset.from_dict(data or {"text": texts})
    given |= {"train_dataset": rows, "processing_class": fast}
    return kind(change(llama()), args=arguments, **given)


def logged(trainer: Any, name: str) -> list[float]:
    return [log[name] for log in trainer.state.log_history if name in log]


@pytest.mark.parametrize("loss", ["nll", pytest.param("dft", marks=pytest.mark.thorough)])
def test_supervised_tuning_is_trls(tmp_path: Path, mesh: xd.DeviceMesh, loss: str) -> None:
    from trl.trainer.sft_config import SFTConfig
    from trl.trainer.sft_trainer import SFTTrainer

    from xla_dtensor.integrations.trl import XDSFTTrainer

    config = partial(SFTConfig, loss_type=loss)
    plain = supervised(SFTTrainer, tmp_path, 8, config=config)
    ours = supervised(XDSFTTrainer, tmp_path, 2, config=config, mesh=mesh)
    plain.train()
    ours.train()
    assert difference(ours.model, plain.model) < 1e-5
    # The metrics of the last batch of an epoch have a program of their own.
    assert [step.stats()["traces"] for step in ours.programs] == [0, 2, 0]
    for name in ("loss", "entropy", "mean_token_accuracy", "num_tokens"):
        found, expected = logged(ours, name), logged(plain, name)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        assert len(found) == 4
    with pytest.raises(ArgumentTypeError, match="activation_offloading=True"):
        XDSFTTrainer(
            llama(), config(str(tmp_path), activation_offloading=True, bf16=False), mesh=mesh
        )


@pytest.mark.thorough
@pytest.mark.parametrize("loss", ["sigmoid", "ipo"])
def test_preference_tuning_is_trls(tmp_path: Path, mesh: xd.DeviceMesh, loss: str) -> None:
    import peft
    from trl.trainer.dpo_config import DPOConfig
    from trl.trainer.dpo_trainer import DPOTrainer

    from xla_dtensor.integrations.transformers import XDTrainer

    class Ours(XDTrainer, DPOTrainer):
        pass

    numbers = range(32)
    data = {
        "prompt": [text(7 * i, 3) for i in numbers],
        "chosen": [f" {text(5 * i, 4)}" for i in numbers],
        "rejected": [f" {text(11 * i, 4 + i % 3)}" for i in numbers],
    }
    config = partial(DPOConfig, loss_type=[loss])
    adapters = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"])
    made = partial(supervised, data=data, config=config, peft_config=adapters)
    torch.manual_seed(0)
    plain = made(DPOTrainer, tmp_path, 8)
    torch.manual_seed(0)
    ours = made(Ours, tmp_path, 2, mesh=mesh)
    plain.train()
    ours.train()
    assert difference(ours.model, plain.model) < 1e-5
    for name in ("loss", "entropy", "rewards/margins", "logits/chosen", "logps/rejected"):
        found, expected = logged(ours, name), logged(plain, name)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def reward(completions: list[str], **_: Any) -> list[float]:
    return [float(sum(map(ord, text)) % 7) for text in completions]


def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """Completions that nobody draws: each of a prompt's is another one."""
    words = [[int(word[1:]) + 2 for word in prompt.split()] for prompt in prompts]
    completions = [
        [2 + (5 * number + 3 * ids[0] + place) % 62 for place in range(1 + number)]
        for number, ids in ((number % 4, ids) for number, ids in enumerate(words))
    ]
    return {"prompt_ids": words, "completion_ids": completions, "logprobs": None}


def rewarded(kind: Any, folder: Any, batch_size: int, *, change: Any = None, **given: Any) -> Any:
    """A trainer of TRL's that generates, or ours, and what is given to its config."""
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.rloo_config import RLOOConfig

    made: Any = GRPOConfig if "GRPO" in kind.__name__ else RLOOConfig
    options = {key: given.pop(key) for key in tuple(given) if hasattr(made, key)}
    options = {"num_generations": 4, "max_completion_length": 6, "adam_epsilon": 1e-5} | options

    def config(folder: str, max_length: int, **others: Any) -> Any:
        return made(folder, **{**others, **options})

    return supervised(
        kind,
        folder,
        batch_size,
        change=change or (lambda model: model.double()),
        data={"prompt": [text(7 * i, 3) for i in range(32)]},
        config=config,
        reward_funcs=reward,
        **given,
    )


NUMBERS_OF_REWARDS = ("loss", "reward", "reward_std", "entropy", "completions/mean_length")


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("algorithm", "adapts", "numbers"),
    [("GRPO", False, ["clip_ratio/region_mean"]), ("GRPO", True, ["kl"]), ("RLOO", False, [])],
)
def test_tuning_by_rewards_is_trls(
    tmp_path: Path, mesh: xd.DeviceMesh, algorithm: str, adapts: bool, numbers: list[str]
) -> None:
    import peft

    theirs = importlib.import_module(f"trl.trainer.{algorithm.lower()}_trainer")
    mine = importlib.import_module("xla_dtensor.integrations.trl")
    their_kind = getattr(theirs, f"{algorithm}Trainer")
    my_kind = getattr(mine, f"XD{algorithm}Trainer")

    def trained(kind: Any, batch_size: int, **given: Any) -> Any:
        torch.manual_seed(0)
        if adapts:
            lora = peft.LoraConfig(target_modules=["q_proj"], r=4, init_lora_weights=False)
            given |= {"peft_config": lora, "beta": 0.1, "gradient_checkpointing": True}
        given |= {"beta": 0.0} if algorithm == "RLOO" else {}  # a tiny model has no name
        trainer = rewarded(kind, tmp_path, batch_size, max_steps=3, **given)
        torch.manual_seed(1)
        trainer.train()
        return trainer

    plain, ours = trained(their_kind, 16), trained(my_kind, 4, mesh=mesh)
    assert difference(ours.model, plain.model) < 1e-6
    assert ours.programs[1].stats()["traces"] == 2  # its first guess at a branch is wrong
    for name in (*NUMBERS_OF_REWARDS, *numbers):
        found, expected = logged(ours, name), logged(plain, name)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        assert len(found) == 3
    with pytest.raises(ArgumentTypeError, match="use_vllm=True"):
        rewarded(my_kind, tmp_path, 4, mesh=mesh, use_vllm=True)


def small_program(model: Any) -> tuple[list[float], Any]:
    """Losses of 4 steps that train what requires a gradient, and the step."""
    ids = torch.arange(64).reshape(8, 8)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1)

    def step() -> torch.Tensor:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    run = xd.compile(step) if hasattr(trained[0], "device_mesh") else step
    return [run().item() for _ in range(4)], run


ADAPTERS: dict[str, Any] = {
    "lora": ("LoraConfig", {"target_modules": ["q_proj", "down_proj"], "r": 4}),
    "dora": ("LoraConfig", {"target_modules": ["o_proj"], "r": 4, "use_dora": True}),
    "head": ("LoraConfig", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}),
    "embedding": ("LoraConfig", {"target_modules": ["embed_tokens"], "r": 4}),
    "ia3": (
        "IA3Config",
        {"target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]},
    ),
    "prompt": ("PromptTuningConfig", {"num_virtual_tokens": 4, "task_type": "CAUSAL_LM"}),
}


@pytest.mark.parametrize("kind", ADAPTERS)
@pytest.mark.parametrize("order", ["before", "after"])
def test_adapters_of_a_model_on_a_mesh(
    tmp_path: Path, mesh: xd.DeviceMesh, kind: str, order: str
) -> None:
    import peft

    from xla_dtensor.integrations.peft import from_pretrained, get_peft_model
    from xla_dtensor.nn.model_plan import put_model

    name, options = ADAPTERS[kind]

    def adapt(model: Any) -> Any:
        torch.manual_seed(3)
        return get_peft_model(model, getattr(peft, name)(**options))

    plain = adapt(llama())
    on_mesh: Any = (
        put_model(adapt(llama()), mesh) if order == "before" else adapt(put_model(llama(), mesh))
    )
    over_tp = {path for path, p in on_mesh.named_parameters() if "tp" in p.mesh_layout.text()}
    assert any("mlp.up_proj" in path for path in over_tp)
    assert kind != "head" or any("modules_to_save" in path for path in over_tp)
    expected, _ = small_program(plain)
    found, step = small_program(on_mesh)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert step.stats()["traces"] == 1
    assert difference(on_mesh, plain) < 1e-5

    on_mesh.save_pretrained(tmp_path, save_embedding_layers=False)
    again = from_pretrained(put_model(llama(), mesh), tmp_path)
    assert difference(again, plain) < 1e-5
    if kind != "prompt":
        assert difference(on_mesh.merge_and_unload(), plain.merge_and_unload()) < 1e-5


def test_adapters_that_are_computed_from_weights_are_refused(mesh: xd.DeviceMesh) -> None:
    import peft

    from xla_dtensor.integrations.peft import get_peft_model
    from xla_dtensor.nn.model_plan import put_model

    config = peft.LoraConfig(target_modules=["q_proj"], init_lora_weights="pissa")
    with pytest.raises(ArgumentTypeError, match="Make them before the model is put on the mesh"):
        get_peft_model(put_model(llama(), mesh), config)


def test_supervised_tuning_adapts_a_model_on_a_mesh(tmp_path: Path, mesh: xd.DeviceMesh) -> None:
    import peft
    from trl.trainer.sft_trainer import SFTTrainer

    from xla_dtensor.integrations.trl import XDSFTTrainer
    from xla_dtensor.nn.model_plan import put_model

    def trained(kind: Any, batch_size: int, change: Any, **given: Any) -> Any:
        torch.manual_seed(3)
        config = peft.LoraConfig(target_modules=["q_proj"], r=4)
        trainer = supervised(kind, tmp_path, batch_size, peft_config=config, change=change, **given)
        trainer.train()
        return trainer.model

    plain = trained(SFTTrainer, 8, lambda model: model)
    ours = trained(XDSFTTrainer, 2, lambda model: put_model(model, mesh), mesh=mesh)
    assert ours.base_model.model.model.layers[0].self_attn.q_proj.lora_A.default.in_features == 32
    assert difference(ours, plain) < 1e-5
