"""torchtitan's debug models, text to train on, and a plain loop on one CPU."""

# torchtitan is installed for the newest torch only.
# pyright: reportMissingImports=false

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import xla_dtensor as xd

__all__ = ["RATE", "Plain", "Seen", "config", "flags", "whole", "write_text"]

RATE = 2e-3


def write_text(folder: Path) -> Path:
    """Write a tokenizer and documents, some longer than a sequence and most of them shorter."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    draw = random.Random(0)
    words = [f"w{number}" for number in range(300)]
    texts = [" ".join(draw.choices(words, k=draw.randint(2, 20))) for _ in range(400)]
    tokenizer: Any = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    special = ["<bos>", "<eos>"]
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    named = json.dumps({"bos_token": "<bos>", "eos_token": "<eos>"})
    (folder / "tokenizer_config.json").write_text(named)
    (folder / "rows").mkdir()
    (folder / "rows" / "rows.json").write_text("\n".join(json.dumps({"text": t}) for t in texts))
    return folder


def flags(
    text: Path, out: Path, module: str = "llama3", name: str = "", **options: Any
) -> list[str]:
    """What is written on torchtitan's command line; `options` have __ for dots."""
    asked = {
        "module": module,
        "config": name or f"{module}_debugmodel",
        "hf_assets_path": text,
        "dataloader.dataset_path": text / "rows",
        "dump_folder": out,
        "training.seq_len": 32,
        "training.local_batch_size": 2,
        "training.steps": 5,
        "training.mixed_precision_param": "float32",
        "parallelism.spmd_backend": "full_dtensor",
        "parallelism.data_parallel_shard_degree": 4,
        "parallelism.tensor_parallel_degree": 2,
        "lr_scheduler.warmup_steps": 1,
        "debug.seed": 1,
        **{option.replace("__", "."): value for option, value in options.items()},
    }
    named = {f"--{option}": value for option, value in asked.items()}
    written = [[flag] if value is True else [flag, str(value)] for flag, value in named.items()]
    return [word for words in written for word in words]


def config(*args: Any, layers: int = 1, recompute: bool = False, **options: Any) -> Any:
    """A config of the debug model, with fewer layers and a larger rate."""
    from torchtitan.config import ConfigManager

    made: Any = ConfigManager().parse_args(flags(*args, **options))
    made.model_spec.model.layers = made.model_spec.model.layers[-layers:]
    if not recompute:
        made.activation_checkpoint = None
    for group in made.optimizer.param_groups:
        # Where a gradient is nothing but rounding, a smaller eps would make a step of the rate.
        group.optimizer_kwargs |= {"lr": RATE, "eps": 1e-5}
    return made


class Seen:
    """A logger of torchtitan's, which keeps what is logged."""

    def __init__(self, trainer: Any) -> None:
        self.logged: dict[int, dict[str, float]] = {}
        trainer.metrics_processor.logger = self

    def log(self, metrics: dict[str, float], step: int) -> None:
        self.logged[step] = self.logged.get(step, {}) | metrics

    def close(self) -> None:
        """Nothing is open."""

    def column(self, name: str) -> list[float]:
        return [metrics[name] for _, metrics in sorted(self.logged.items()) if name in metrics]


def whole(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Copies on the host."""
    return {
        name: (value.full_tensor() if isinstance(value, xd.DTensor) else value)
        .detach()
        .cpu()
        .clone()
        for name, value in state.items()
        if isinstance(value, torch.Tensor)
    }


class _Attention(nn.Module):
    """Attention by its formula."""

    def __init__(self, window: int | None) -> None:
        super().__init__()
        self.window = window

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        attention_masks: torch.Tensor,
        scale: float | None = None,
        out_transform: Any = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        if self.window is not None:
            attention_masks = attention_masks.triu(1 - self.window)
        repeats = q.shape[2] // k.shape[2]
        k, v = (x.repeat_interleave(repeats, 2) for x in (k, v))
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * (scale or q.shape[-1] ** -0.5)
        scores = scores.masked_fill(~attention_masks, float("-inf"))
        out = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v)
        sums = scores.logsumexp(-1).transpose(1, 2)
        return out if out_transform is None else out_transform(out, sums)


class Plain:
    """The same model, optimizer, schedule and rows, in a loop of plain PyTorch on one CPU.

    Args:
        config: torchtitan's config, as it is given to the trainer.
        state: The values that the model begins with.
    """

    def __init__(self, config: Any, state: dict[str, torch.Tensor]) -> None:
        spec = config.model_spec
        spec.model.update_from_config(config=config)
        self.config, self.model = config, spec.model.build()
        self.model.init_states()
        for layer, made in zip(self.model.layers.values(), spec.model.layers, strict=True):
            window = getattr(made.attention, "sliding_window_size", None)
            layer.attention.inner_attention = _Attention(window)
        self.model.load_state_dict(state)
        config.optimizer.implementation = "for-loop"
        self.optimizers = config.optimizer.build(model_parts=[self.model])
        if spec.post_optimizer_build_fn is not None:
            alone = SimpleNamespace(get_optional_mesh=lambda axis: None, ep_enabled=False, tp=1)
            spec.post_optimizer_build_fn(self.optimizers, [self.model], alone)
        self.schedule = config.lr_scheduler.build(
            optimizers=self.optimizers, training_steps=config.training.steps
        )
        self.batches = self._batches(config.dataloader)

    def _batches(self, loader: Any, **options: Any) -> Any:
        given = {
            "tokenizer": self.config.tokenizer.build(tokenizer_path=self.config.hf_assets_path),
            "seq_len": self.config.training.seq_len,
            "local_batch_size": self.config.training.local_batch_size,
        }
        degree = self.config.parallelism.data_parallel_shard_degree
        ranks = [loader.build(dp_world_size=degree, dp_rank=r, **given) for r in range(degree)]
        for rows in zip(*ranks, strict=False):
            parts = [(row["input"], row["positions"], labels) for row, labels in rows]
            yield [torch.cat(part) for part in zip(*parts, strict=True)]

    def loss(self, batch: Any) -> torch.Tensor:
        """The sum over all tokens."""
        tokens, positions, labels = batch
        document = (positions == 0).cumsum(1)
        mask = (document[:, None, :, None] == document[:, None, None, :]).tril()
        pred = self.model(tokens, positions=positions, attention_masks=mask)
        return F.cross_entropy(pred.flatten(0, 1).float(), labels.flatten(), reduction="sum")

    def step(self, accumulated: int = 1) -> tuple[float, float]:
        """Make a step; return its loss and the norm of its gradient."""
        batches = [next(self.batches) for _ in range(accumulated)]
        valid = sum((batch[2] != -100).sum() for batch in batches)
        total = 0.0
        for batch in batches:
            loss = self.loss(batch) / valid
            loss.backward()
            total += loss.item()
        # torch sums up a large tensor's squares with less than 5 digits in float32.
        gradients = [p.grad.double() for p in self.model.parameters()]
        norm = nn.utils.get_total_norm(gradients).float()
        limit = self.config.training.max_norm
        nn.utils.clip_grads_with_norm_(self.model.parameters(), limit, norm)
        self.optimizers.step()
        self.schedule.step()
        self.optimizers.zero_grad()
        return total, norm.item()

    @torch.no_grad()
    def validation_loss(self) -> float:
        """The mean loss of the validation rows, as torchtitan's Validator has it."""
        loader = self._batches(self.config.validator.dataloader)
        batches = [next(loader) for _ in range(self.config.validator.steps)]
        tokens = sum((batch[2] != -100).sum().item() for batch in batches)
        return sum(self.loss(batch).item() for batch in batches) / tokens
