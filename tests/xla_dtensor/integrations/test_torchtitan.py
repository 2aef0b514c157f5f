"""XDTrainer beside a plain loop: the same losses, norms and parameters, and torchtitan's files."""

# torchtitan is installed for the newest torch only.
# pyright: reportMissingImports=false

from __future__ import annotations

import copy
import gc
import importlib
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

import xla_dtensor as xd
from tests.documents import ROOT, blocks, run, run_session
from tests.xla_dtensor.integrations.titan import Plain, Seen, config, flags, whole, write_text
from xla_dtensor.errors import ArgumentTypeError
from xla_dtensor.runtimes import Runtime

pytestmark = [
    pytest.mark.only_on("jax"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),
    # What torchtitan makes torch say.
    pytest.mark.filterwarnings("ignore:To get the last learning rate:UserWarning"),
    pytest.mark.filterwarnings("ignore:In CPU autocast, but the target dtype:UserWarning"),
]

Make = Callable[..., Any]
PAGE = (ROOT / "docs" / "trainers" / "torchtitan.md").read_text(encoding="utf-8")


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text"))


@pytest.fixture
def make(
    runtime: Runtime, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Make]:
    """Makes a config; what torchtitan and the trainer change in the process is put back."""
    as_torch_made_it = FakeTensorMode.__init__
    utils: Any = importlib.import_module("torchtitan.distributed.utils")
    FakeTensorMode.__init__ = as_torch_made_it
    trainer: Any = importlib.import_module("torchtitan.trainer")
    monkeypatch.setattr(trainer.time, "sleep", lambda seconds: None)
    monkeypatch.setenv("PYTHONHASHSEED", "0")  # torchtitan sets it, and it is put back
    datasets: Any = importlib.import_module("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    backend = utils.get_spmd_backend()
    yield lambda *names, **options: config(text, tmp_path / "out", *names, **options)
    xd.uninstall()
    gc.enable()
    utils.set_spmd_backend(backend)


def trained(asked: Any) -> tuple[Any, Seen, dict[str, torch.Tensor]]:
    """A trainer that has trained, what it has logged, and the values it began with."""
    from xla_dtensor.integrations.torchtitan import XDTrainer

    trainer = XDTrainer(asked)
    seen, before = Seen(trainer), whole(trainer.model_parts[0].state_dict())
    trainer.train()
    trainer.close()
    return trainer, seen, before


def difference(trainer: Any, state: dict[str, torch.Tensor]) -> float:
    found = whole(trainer.model_parts[0].state_dict())
    assert found.keys() == state.keys()
    return max((found[name] - value).abs().max().item() for name, value in state.items())


def beside_a_plain_loop(asked: Any) -> tuple[Any, Plain, Seen, list[float], list[float]]:
    """The trainer, a plain loop that has made as many steps, and their losses and norms."""
    plain = copy.deepcopy(asked)
    trainer, seen, before = trained(asked)
    reference = Plain(plain, before)
    losses, norms = zip(*[reference.step() for _ in range(5)], strict=True)
    return trainer, reference, seen, [*losses], [*norms]


def test_a_run_is_that_of_a_plain_loop(make: Make, text: Path) -> None:
    """With accumulation, chunks of the loss, packed documents, recomputation and validation."""
    validator = {"enable": True, "freq": 3, "steps": 2, "dataloader__dataset": "c4_test"}
    validator["dataloader__dataset_path"] = text / "rows"
    options = {f"validator__{name}": value for name, value in validator.items()}
    asked = make(training__global_batch_size=16, recompute=True, **options)
    plain = copy.deepcopy(asked)
    trainer, seen, before = trained(asked)
    reference = Plain(plain, before)
    expected = [reference.step(accumulated=2) for _ in range(3)]
    validation = reference.validation_loss()
    expected += [reference.step(accumulated=2) for _ in range(2)]
    losses, norms = zip(*expected, strict=True)
    assert seen.column("loss_metrics/global_avg_loss") == pytest.approx(losses, abs=1e-5)
    assert seen.column("grad_norm") == pytest.approx(norms, abs=1e-5)
    assert seen.column("validation_metrics/loss")[1] == pytest.approx(validation, abs=1e-5)
    assert difference(trainer, whole(reference.model.state_dict())) < 1e-5
    assert losses[4] < losses[0] - 1
    assert seen.column("n_tokens_seen") == [512.0 * step for step in range(1, 6)]
    assert [program.stats()["traces"] for program in trainer.programs] == [1, 1]
    assert [program.stats()["calls"] for program in trainer.programs] == [5, 5]
    weight = trainer.model_parts[0].layers["0"].attention.wo.weight
    assert weight.mesh_layout.text() == "[dp_shard, tp]"


@pytest.mark.thorough
def test_qwen3_with_dtensors_for_parameters_only(make: Make) -> None:
    asked = make("qwen3", parallelism__spmd_backend="partial_dtensor")
    trainer, reference, seen, losses, norms = beside_a_plain_loop(asked)
    assert seen.column("loss_metrics/global_avg_loss") == pytest.approx(losses, abs=1e-5)
    assert seen.column("grad_norm") == pytest.approx(norms, abs=1e-5)
    assert difference(trainer, whole(reference.model.state_dict())) < 1e-5
    assert trainer.programs[1].stats()["reasons"] == ("first call",)


@pytest.mark.thorough
def test_experts_of_deepseek(make: Make) -> None:
    """They multiply in bfloat16, and a token near a tie may go to another one."""
    trainer, reference, seen, losses, norms = beside_a_plain_loop(make("deepseek_v3"))
    assert seen.column("loss_metrics/global_avg_loss") == pytest.approx(losses, abs=1e-4)
    assert seen.column("grad_norm") == pytest.approx(norms, abs=1e-3)
    assert difference(trainer, whole(reference.model.state_dict())) < 2e-3
    moe = trainer.model_parts[0].layers["0"].moe
    assert whole({"": moe.expert_bias_E})[""].abs().max() > 1e-3
    assert trainer.programs[1].stats()["reasons"] == ("first call",)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "backend"),
    [("gpt_oss_debugmodel", "full_dtensor"), ("gpt_oss_debugmodel_flex", "partial_dtensor")],
)
def test_sinks_windows_and_biases_of_gpt_oss(
    make: Make, name: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its experts multiply in float32 here, in both loops: their biases' gradients are exact."""
    from torchtitan.models.common.attention import VarlenAttention

    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.float)
    asked = make("gpt_oss", name=name, layers=2, parallelism__spmd_backend=backend)
    asked.model_spec.model.layers[0].attention.sliding_window_size = 4
    for layer in asked.model_spec.model.layers:
        layer.moe.routed_experts.inner_experts.hidden_dim = 64
        inner = layer.attention.inner_attention
        if isinstance(inner, VarlenAttention.Config) and inner.window_size[0] > 0:
            inner.window_size = (3, 0)
    trainer, reference, seen, losses, norms = beside_a_plain_loop(asked)
    assert seen.column("loss_metrics/global_avg_loss") == pytest.approx(losses, abs=1e-5)
    assert seen.column("grad_norm") == pytest.approx(norms, rel=1e-5)  # up to 73
    assert difference(trainer, whole(reference.model.state_dict())) < 1e-5
    assert trainer.programs[1].stats()["reasons"] == ("first call",)


def test_a_window_of_varlen_attention_is_cut_here() -> None:
    """Also where a model's mask has none of it, and where something is made of the result."""
    from torchtitan.models.common.attention import VarlenAttention

    from xla_dtensor.integrations.torchtitan_parts import varlen_on_mesh

    attention: Any = varlen_on_mesh(VarlenAttention.Config(window_size=(2, 0))).build()
    q, k, v = torch.randn(3, 2, 6, 2, 4).unbind()
    mask = torch.ones(6, 6, dtype=torch.bool).tril()
    by_head = (tensor.transpose(1, 2) for tensor in (q, k, v))
    window = mask.triu(-2)
    expected = F.scaled_dot_product_attention(*by_head, attn_mask=window).transpose(1, 2)
    assert torch.equal(attention(q, k, v, attention_masks=mask), expected)
    twice = attention(q, k, v, attention_masks=mask, out_transform=lambda out, sums: out * 2)
    torch.testing.assert_close(twice, expected * 2)


def test_a_run_goes_on_where_it_was_with_other_parallelism(make: Make, tmp_path: Path) -> None:
    options = {"training__steps": 4, "checkpoint__enable": True, "checkpoint__interval": 2}
    options["metrics__enable_tensorboard"] = True
    whole_run, seen, _ = trained(make(**options))
    folder = tmp_path / "out" / "checkpoint"
    assert sorted(path.name for path in folder.iterdir()) == ["step-2", "step-4"]
    shutil.rmtree(folder / "step-4")
    later = make(**options, parallelism__spmd_backend="partial_dtensor")
    trainer, logged, _ = trained(later)
    assert [*logged.logged] == [3, 4]
    name = "loss_metrics/global_avg_loss"
    assert logged.column(name) == pytest.approx(seen.column(name)[2:], abs=1e-5)
    assert logged.column("n_tokens_seen") == seen.column("n_tokens_seen")[2:]
    assert difference(trainer, whole(whole_run.model_parts[0].state_dict())) < 1e-5


REFUSED = [
    ({"parallelism__spmd_backend": "spmd_types"}, "spmd_types. .* Pass full_dtensor"),
    ({"parallelism__pipeline_parallel_degree": 2}, "degree 2. .* the step is one program"),
    ({"parallelism__context_parallel_degree": 2}, "degree 2. .* cuts sequences"),
    ({"parallelism__expert_parallel_degree": 2}, "degree 2. .* as many tokens as a host reads"),
    ({"training__enable_cpu_offload": True}, "offload True. .* keep parameters on the devices"),
    ({"compile__enable": True}, "compile.enable True. .* compiled by XLA as a whole"),
    ({"comm__mode": "fake_backend"}, "comm.mode fake_backend. .* XLA communicates"),
    ({"checkpoint__async_mode": "async_with_pinned_mem"}, "pinned_mem. .* Pass async"),
    ({"checkpoint__create_seed_checkpoint": True}, "seed_checkpoint True. .* --debug.seed"),
]


@pytest.mark.parametrize(("options", "words"), REFUSED)
def test_what_is_refused(make: Make, options: dict[str, Any], words: str) -> None:
    from xla_dtensor.integrations.torchtitan import XDTrainer

    asked = make(training__disable_cuda_graphs=True, **options)
    with pytest.raises(ArgumentTypeError, match=f"An XDTrainer was made with --.*{words}"):
        XDTrainer(asked)
    option = next(iter(options)).replace("__", ".")
    assert option.rpartition(".")[2] in PAGE or option.startswith("checkpoint.")


def test_other_loops_and_parts_are_refused(make: Make) -> None:
    from torchtitan.components.checkpointer import BaseCheckpointManager
    from torchtitan.models.common.attention import VarlenAttention
    from torchtitan.trainer import Trainer

    from xla_dtensor.integrations.torchtitan import XDTrainer
    from xla_dtensor.integrations.torchtitan_parts import varlen_on_mesh

    class Other(Trainer):
        @dataclass(kw_only=True, slots=True)
        class Config(Trainer.Config):
            pass

    with pytest.raises(ArgumentTypeError, match="a config of Other, which has a loop"):
        XDTrainer(Other.Config())
    asked = make()
    asked.checkpoint = BaseCheckpointManager.Config()
    with pytest.raises(ArgumentTypeError, match=r"checkpoint=BaseCheckpointManager\.Config"):
        XDTrainer(asked)
    asked = make()
    asked.optimizer.param_groups[0].optimizer_name = "DistMuon"
    with pytest.raises(ArgumentTypeError, match="the optimizer DistMuon"):
        XDTrainer(asked)
    with pytest.raises(ArgumentTypeError, match=r"window_size=\(-1, -1\)"):
        varlen_on_mesh(VarlenAttention.Config(window_size=(-1, -1)))


def test_the_session_of_the_page() -> None:
    run_session("".join(blocks(PAGE, "pycon")), "jax")


@pytest.mark.thorough
def test_the_command_line(text: Path, tmp_path: Path) -> None:
    written = flags(text, tmp_path, training__steps=1, metrics__enable_tensorboard=True)
    program = (
        "import runpy, sys\n"
        f"sys.argv = {['torchtitan', *written]!r}\n"
        "runpy.run_module('xla_dtensor.integrations.torchtitan', run_name='__main__')"
    )
    run(program, "jax")
    assert list((tmp_path / "tb").glob("*/events*"))
