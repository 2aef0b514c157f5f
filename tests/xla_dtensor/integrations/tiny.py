"""A tiny language model, its rows, and arguments for Transformers' trainers."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import torch
from torch import nn

import xla_dtensor as xd

__all__ = ["arguments", "difference", "llama", "losses", "rows"]

VOCABULARY = 64


def llama(**changed: Any) -> Any:
    """A Llama of two layers, always with the same values."""
    import transformers

    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 32,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**sizes, **changed}))


def rows(count: int, length: int = 12) -> list[dict[str, torch.Tensor]]:
    """Rows as collators make them: every third one is padded."""
    generator = torch.Generator().manual_seed(1)
    made: list[dict[str, torch.Tensor]] = []
    for number in range(count):
        ids = torch.randint(0, VOCABULARY, (length,), generator=generator)
        used = torch.arange(length) < (length // 2 if number % 3 == 0 else length)
        made.append(
            {"input_ids": ids, "labels": ids.where(used, -100), "attention_mask": used.long()}
        )
    return made


_folders = itertools.count()


def arguments(folder: Path, batch_size: int, **changed: Any) -> Any:
    """TrainingArguments that log each step and report to nobody."""
    import transformers

    options: dict[str, Any] = {
        "output_dir": str(folder / str(next(_folders))),
        "per_device_train_batch_size": batch_size,
        "per_device_eval_batch_size": batch_size,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "report_to": "none",
        "disable_tqdm": True,
        "save_strategy": "no",
        "dataloader_pin_memory": False,
        "seed": 1,
        **changed,
    }
    return transformers.TrainingArguments(**options)


def losses(trainer: Any) -> list[float]:
    """What a trainer has logged, step by step, and of evaluations."""
    return [
        log[name]
        for log in trainer.state.log_history
        for name in ("loss", "grad_norm", "eval_loss")
        if name in log
    ]


def difference(one: nn.Module, other: nn.Module) -> float:
    """The largest difference between two models' parameters."""
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max((_whole(a) - _whole(b)).abs().max().item() for a, b in pairs)


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.full_tensor().cpu() if isinstance(tensor, xd.DTensor) else tensor
