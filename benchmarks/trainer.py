"""What a step costs: Transformers' Trainer on a mesh, beside a loop by hand of the same program.

    NPROC=64 python -m benchmarks.trainer
    NPROC=64 python -m benchmarks.trainer --steps 10 --rounds 2

| way | what it does |
|---|---|
| hand | a ``for`` over a DataLoader; batch to the mesh, one compiled step: backward, clip, AdamW |
| XDTrainer | ``XDTrainer.train()`` of the same model, data, batch and optimizer |
| plain | Transformers' own ``Trainer.train()`` on this host's CPU, by PyTorch's kernels |

Llama of 4 layers, hidden size 256, vocabulary 1024, float32, 16 rows of 128 tokens; a mesh
(fsdp=4, tp=2) of 8 virtual CPU devices. The ways train in turns within one process. A step's time
is that between the end of the first step, which compiles, and the end of the last; losses are
logged each 10 steps. The mean losses agree, which is checked. Nothing else is asserted.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.timing import RESULTS, store

SIZES: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
}
_ROWS, _LENGTH, _LOGGED = 16, 128, 10
_RATE = 1e-3


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark, prints its table and stores its figures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.trainer", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--steps", type=int, default=20, help="that are timed (default: 20)")
    parser.add_argument("--rounds", type=int, default=5, help="per way (default: 5)")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for the JSON file")
    asked = parser.parse_args(arguments)
    import xla_dtensor as xd

    xd.get_runtime("jax", num_cpu_devices=8)
    ways = {"hand": by_hand, "XDTrainer": by_our_trainer, "plain": by_plain_trainer}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    losses: dict[str, float] = {}
    for _ in range(asked.rounds):
        for name, way in ways.items():
            losses[name], taken = way(asked.steps)
            seconds[name].append(taken / asked.steps)
    for name, loss in losses.items():
        if abs(loss - losses["plain"]) > 1e-4 * losses["plain"]:
            raise SystemExit(f"The way {name} trains to another loss: {losses}.")
    rows = [
        {"way": name, "ms_min": 1e3 * min(times), "ms_median": 1e3 * statistics.median(times)}
        for name, times in seconds.items()
    ]
    print(f"{'way':10}{'ms/step':>10}{'median':>10}")
    for row in rows:
        print(f"{row['way']:10}{row['ms_min']:10.2f}{row['ms_median']:10.2f}")
    print(f"Stored in {store('trainer', {'rows': rows}, asked.results)}")
    return 0


def _model() -> Any:
    import transformers

    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))


def _data(steps: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    shape = ((steps + 1) * _ROWS, _LENGTH)
    ids = torch.randint(0, SIZES["vocab_size"], shape, generator=generator)
    return [{"input_ids": row, "labels": row} for row in ids]


def _mesh() -> Any:
    import xla_dtensor as xd

    return xd.init_device_mesh("xla", (4, 2), mesh_dim_names=("fsdp", "tp"))


def by_hand(steps: int) -> tuple[float, float]:
    """Return the mean loss of all steps, and how many seconds `steps` took.

    Args:
        steps: How many are timed.
    """
    import xla_dtensor as xd
    from xla_dtensor.hosts.data.rows import put_batch
    from xla_dtensor.nn.model_plan import put_model

    mesh = _mesh()
    model: Any = put_model(_model(), mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_RATE, weight_decay=0.0)

    @xd.compile
    def step(batch: Any) -> torch.Tensor:
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    model.train()
    loader: Any = torch.utils.data.DataLoader(_data(steps), batch_size=_ROWS)  # pyright: ignore
    found: list[Any] = []
    began = 0.0
    for number, batch in enumerate(loader):
        found.append(step(put_batch(batch, mesh)))
        if number % _LOGGED == 0 or number == steps:
            found = [loss.item() if not isinstance(loss, float) else loss for loss in found]
        if number == 0:
            began = time.perf_counter()
    return statistics.mean(found), time.perf_counter() - began


def by_our_trainer(steps: int) -> tuple[float, float]:
    """As :func:`by_hand`, by XDTrainer.

    Args:
        steps: How many are timed.
    """
    from xla_dtensor.integrations.transformers import XDTrainer

    mesh = _mesh()
    make = functools.partial(XDTrainer, mesh=mesh)
    return _trained(make, _ROWS // 4, steps)


def by_plain_trainer(steps: int) -> tuple[float, float]:
    """As :func:`by_hand`, by Transformers' Trainer.

    Args:
        steps: How many are timed.
    """
    import transformers

    return _trained(transformers.Trainer, _ROWS, steps)


def _trained(make: Callable[..., Any], rows: int, steps: int) -> tuple[float, float]:
    import transformers

    import xla_dtensor as xd

    class Clock(transformers.TrainerCallback):
        def __init__(self) -> None:
            self.times: list[float] = []

        def on_log(self, *args: Any, **kwargs: Any) -> None:
            self.times.append(time.perf_counter())

        def on_train_end(self, *args: Any, **kwargs: Any) -> None:
            xd.get_runtime().synchronize()
            self.times.append(time.perf_counter())

    with tempfile.TemporaryDirectory() as folder:
        args = transformers.TrainingArguments(
            folder,
            max_steps=steps + 1,
            per_device_train_batch_size=rows,
            learning_rate=_RATE,
            lr_scheduler_type="constant",
            logging_steps=_LOGGED,
            logging_first_step=True,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
            dataloader_pin_memory=False,
            train_sampling_strategy="sequential",
        )
        clock = Clock()
        trainer = make(_model(), args, train_dataset=_data(steps), callbacks=[clock])
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
    return trainer.state.log_history[-1]["train_loss"], clock.times[-1] - clock.times[0]


if __name__ == "__main__":
    raise SystemExit(main())
