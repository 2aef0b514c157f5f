"""Train the language model as a job: many processes, checkpoints, and an end at any time.

    python -m xla_dtensor launch --local 4 examples/jobs/language_model.yaml

Each process runs this program. It learns from the launcher's environment which job it is part of
and which process it is, holds its own shards only, reads its own rows of each batch only, and
saves every few steps. Killed, it goes on from the last checkpoint when it is started again; told to
end, all processes save at the same step and exit with the status 75. It may go on with other
processes, devices or axes.

absl starts it, as it starts other programs on TPU pods. So what JAX and this library log is shown
with its time and place (`--verbosity=-1`: warnings only), and absl's other options, such as
`--run_with_profiling`, are there beside those below.

Nothing here says how many processes there are or how the model is cut: that is in the job file.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from absl import app
from absl.flags import argparse_flags
from torch import Tensor, nn
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset

import xla_dtensor as xd
from examples.corpus import Corpus
from examples.language_model import LanguageModel, ModelConfig, next_token_loss
from mesh_utils.launch.variables import job_from
from xla_dtensor import checkpoint
from xla_dtensor.data import ShardedLoader, ShardedSampler

__all__ = ["Windows", "main"]

DATA_AXES = ("dp", "fsdp")
"""Axes along which the batch is cut; along the others its rows are the same."""

TrainStep = Callable[[Tensor, Tensor], Tensor]


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """A corpus, cut into windows: tokens, and the token that follows each.

    Args:
        corpus: The text.
        seq: Tokens of a window.

    Example:
        >>> windows = Windows(Corpus(torch.arange(9)), seq=4)
        >>> len(windows), windows[1]
        (2, (tensor([4, 5, 6, 7]), tensor([5, 6, 7, 8])))
    """

    def __init__(self, corpus: Corpus, seq: int) -> None:
        self.tokens, self.seq = corpus.tokens, seq

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.seq

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(index)  # which ends a loop over the windows
        start = index * self.seq
        window = self.tokens[start : start + self.seq + 1].to(torch.int64)
        return window[:-1], window[1:]


class Record:
    """What a run did, a line of JSON each, for those who compare runs; written by process 0.

    Args:
        path: The file; nothing is written when None.
        process: Which process this is.
    """

    def __init__(self, path: str | None, process: int) -> None:
        self.wanted, self._path = bool(path), path if process == 0 else None

    def add(self, **values: Any) -> None:
        """Append a line."""
        if self._path:
            with Path(self._path).open("a", encoding="utf-8") as file:
                file.write(json.dumps(values) + "\n")

    def state(self, event: str, step: int, model: nn.Module, optimizer: Any) -> None:
        """Append a checksum over parameters and moments; all processes call it."""
        if self.wanted:
            self.add(event=event, step=step, state=digest(model, optimizer))


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Return a checksum over all bits of the parameters and of the optimizer's state.

    Every tensor is read whole by every process, so this is for small models.
    """
    found = hashlib.sha256()
    for name, parameter in model.named_parameters():
        kept = optimizer.state.get(parameter, {})
        tensors = {"value": parameter, **{key: kept[key] for key in sorted(kept)}}
        for key, value in tensors.items():
            whole = value.full_tensor() if isinstance(value, xd.DTensor) else value
            found.update(f"{name} {key} {tuple(whole.shape)}".encode())
            found.update(whole.detach().cpu().numpy().tobytes())
    return found.hexdigest()[:16]


def make_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> TrainStep:
    """Return the train step: plain PyTorch."""

    def train_step(inputs: Tensor, targets: Tensor) -> Tensor:
        loss = next_token_loss(model(inputs), targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return train_step


def make_loader(mesh: xd.DeviceMesh, options: argparse.Namespace) -> ShardedLoader:
    """Return the loader of global batches, of which each process reads its own rows only."""
    cut = [axis in DATA_AXES for axis in mesh.mesh_dim_names or ()]
    placements: list[Placement] = [Shard(0) if each else Replicate() for each in cut]
    data = Windows(Corpus.from_standard_library(options.tokens), options.seq)
    sampler = ShardedSampler(data, options.batch_size, mesh, placements, seed=options.seed)
    # Read in the loop's own thread: these batches are slices of memory.
    return ShardedLoader(DataLoader(data, batch_sampler=sampler), mesh, placements, prefetch=0)


def endless(loader: ShardedLoader) -> Iterator[Any]:
    """Yield batches, epoch after epoch."""
    while True:
        yield from loader


def train(options: argparse.Namespace) -> None:
    """Join the job, take up the last checkpoint, and train to the end or until told to end."""
    job = job_from(os.environ)
    process = xd.init_distributed()
    record = Record(options.record, process.index)
    with xd.Preemption() as preemption:
        mesh = xd.job_mesh(job)
        torch.manual_seed(options.seed)
        sizes = ModelConfig(dim=options.dim, layers=options.layers, seq=options.seq)
        model = xd.shard_module(LanguageModel(sizes), mesh, job.sharding)
        optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate)
        scheduler = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5))
        loader = make_loader(mesh, options)
        state = {
            "model": model,
            "optimizer": optimizer,
            "scheduler": scheduler,
            "loader": loader,
        }
        done = 0
        if checkpoint.latest(options.folder) is not None:
            done = checkpoint.load(options.folder, state)
            say(process, f"goes on after step {done} on {mesh}")
            record.state("loaded", done, model, optimizer)
        else:
            say(process, f"begins on {mesh}")
        step = xd.compile(make_step(model, optimizer))
        for inputs, targets in islice(endless(loader), options.steps - done):
            loss = step(inputs, targets)
            scheduler.step()
            done += 1
            value = read(loss)
            say(process, f"step {done}: loss {value:.4f}")
            record.add(event="step", step=done, loss=value)
            if preemption.reached():
                checkpoint.save(options.folder, state, step=done, keep=options.keep)
                record.state("saved", done, model, optimizer)
                say(process, f"told to end: saved after step {done}")
                preemption.exit()
            if done % options.save_every == 0 or done == options.steps:
                checkpoint.async_save(options.folder, state, step=done, keep=options.keep)
                record.state("saved", done, model, optimizer)
        loader.close()


def read(loss: Tensor) -> float:
    """Return the loss as a number; waits for the step."""
    return (loss.full_tensor() if isinstance(loss, xd.DTensor) else loss).item()


def say(process: xd.ProcessInfo, text: str) -> None:
    """Print a line, once for the job."""
    if process.index == 0:
        print(text, flush=True)


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse_flags.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--steps", type=int, default=24, help="steps in all, with those before")
    parser.add_argument("--save-every", type=int, default=6, metavar="STEPS")
    parser.add_argument("--keep", type=int, default=3, help="checkpoints that stay")
    parser.add_argument(
        "--folder",
        default=os.environ.get("TRAIN_FOLDER", "runs/language-model"),
        help="of the checkpoints: a path that all processes share, or an fsspec URL",
    )
    parser.add_argument(
        "--record", default=os.environ.get("TRAIN_RECORD"), help="a file for losses and checksums"
    )
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--layers", type=int, default=ModelConfig.layers)
    parser.add_argument("--seq", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=200_000, help="tokens of the corpus")
    parser.add_argument("--batch-size", type=int, default=16, help="windows, over all devices")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(arguments)


def main(options: argparse.Namespace) -> int:
    """Run this process of the job; return its exit status."""
    torch.set_num_threads(1)  # several processes may share the cores
    train(options)
    return 0


if __name__ == "__main__":
    app.run(main, flags_parser=lambda words: parse_arguments(words[1:]))
