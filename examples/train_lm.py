"""Train a language model on a (dp, tp) mesh: PyTorch's own code, XLA's partitioner, and the proof.

    python -m examples.train_lm --runtime jax          # on 8 virtual CPU devices
    python -m examples.train_lm --runtime torch_xla    # the same program through torch_xla
    python -m examples.train_lm --dp 8 --tp 1          # the same model, laid out otherwise

The model (``language_model.py``) knows nothing of sharding. ``SHARDING`` below says where each
parameter lies; that, the mesh, and one call of ``compile`` are all that differs from training on
one CPU. At the end the run is checked against exactly that: the first losses against the same
model in plain PyTorch, and what XLA reports of each parameter and each moment of the optimizer
against what was asked. The exit status is 1 if any check fails.
"""

from __future__ import annotations

import argparse
import copy
import math
import time
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from itertools import islice
from tempfile import TemporaryDirectory
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.optim.lr_scheduler import LambdaLR
from tqdm import tqdm

import xla_dtensor
from examples.corpus import Corpus
from examples.language_model import LanguageModel, ModelConfig, next_token_loss
from examples.placement_audit import Audit, audit, render_audits
from xla_dtensor import DTensor, distribute_module, distribute_tensor, init_device_mesh
from xla_dtensor.report import collectives, render_collectives, summarize

TrainStep = Callable[[Tensor, Tensor], Tensor]
Batch = tuple[Tensor, Tensor]

# Megatron's cut over tp (columns of the first matmul, rows of the second, the vocabulary), and the
# other dim of each matrix over dp, as FSDP does, so that no device holds a whole one.
SHARDING: dict[str, tuple[Placement, Placement]] = {
    # parameters                        dp        tp
    "embedding.weight":                (Shard(1), Shard(0)),  # 257 rows over tp: uneven
    "layers.*.attention.w[qkv].weight": (Shard(1), Shard(0)),
    "layers.*.attention.wo.weight":    (Shard(0), Shard(1)),
    "layers.*.mlp.w[13].weight":       (Shard(1), Shard(0)),
    "layers.*.mlp.w2.weight":          (Shard(0), Shard(1)),
    "lm_head.weight":                  (Shard(1), Shard(0)),  # 257 columns of logits: uneven
    "*norm.weight":                    (Replicate(), Replicate()),
}  # fmt: skip
BATCH_PLACEMENTS = (Shard(0), Replicate())

COMPARED_STEPS = 20
LOSS_TOLERANCE = 1e-4


def placements_of(name: str) -> tuple[Placement, Placement]:
    """Return where the parameter `name` lies on (dp, tp), the first pattern that fits.

    Raises:
        LookupError: No pattern fits. Every parameter is placed on purpose.
    """
    for pattern, placements in SHARDING.items():
        if fnmatchcase(name, pattern):
            return placements
    raise LookupError(
        f"Placements of parameter name={name!r} were asked for. No pattern of SHARDING fits it. "
        "Add a line for it."
    )


def shard_parameters(module_name: str, module: nn.Module, mesh: DeviceMesh) -> None:
    """Replace the module's own parameters by DTensors; the `partition_fn` of distribute_module."""
    for name, parameter in list(module.named_parameters(recurse=False)):
        placements = placements_of(f"{module_name}.{name}")
        module.register_parameter(
            name, nn.Parameter(distribute_tensor(parameter, mesh, placements))
        )


def learning_rate_factor(step: int, steps: int, warmup_steps: int = 5) -> float:
    """Rise linearly over the warm-up, then fall along a cosine to a tenth."""
    cosine = 0.1 + 0.45 * (1 + math.cos(math.pi * step / steps))
    return min((step + 1) / warmup_steps, cosine)


def make_training(
    model: nn.Module, learning_rate: float, steps: int
) -> tuple[TrainStep, torch.optim.Optimizer, LambdaLR]:
    """Return the train step, its optimizer and its scheduler: plain PyTorch, sharded or not."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.1
    )
    scheduler = LambdaLR(optimizer, lambda step: learning_rate_factor(step, steps))

    def train_step(inputs: Tensor, targets: Tensor) -> Tensor:
        loss = next_token_loss(model(inputs), targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()  # last, so that no gradient takes memory between two steps
        return loss.detach()

    return train_step, optimizer, scheduler


def train(
    step: TrainStep, scheduler: LambdaLR, batches: Iterable[Batch], mesh: DeviceMesh, steps: int
) -> list[float]:
    """Run the compiled step over sharded batches, show progress, and return the losses."""
    losses: list[float] = []
    progress = tqdm(islice(batches, steps), total=steps, unit="step", mininterval=1.0)
    start = last = time.perf_counter()
    for inputs, targets in progress:
        loss = step(
            distribute_tensor(inputs, mesh, BATCH_PLACEMENTS),
            distribute_tensor(targets, mesh, BATCH_PLACEMENTS),
        )
        scheduler.step()
        losses.append(_value(loss))
        now = time.perf_counter()
        if len(losses) == 1:
            progress.write(f"first loss {losses[0]:.4f} after {now - start:.1f} s with compilation")
        progress.set_postfix_str(
            f"loss {losses[-1]:.4f}, {inputs.numel() / (now - last):,.0f} tokens/s", refresh=False
        )
        last = now
    return losses


def _value(loss: Tensor) -> float:
    return (loss.full_tensor() if isinstance(loss, DTensor) else loss).item()


def reference_losses(
    model: nn.Module, batches: Iterable[Batch], learning_rate: float, steps: int
) -> list[float]:
    """Train `model` in plain PyTorch on the CPU, for as many steps as will be compared."""
    step, _, scheduler = make_training(model, learning_rate, steps)
    losses: list[float] = []
    for inputs, targets in islice(batches, min(steps, COMPARED_STEPS)):
        losses.append(_value(step(inputs, targets)))
        scheduler.step()
    return losses


def audit_all(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[list[Audit], list[Audit]]:
    """Audit each parameter, and both moments that AdamW keeps of it."""
    parameters: list[Audit] = []
    moments: list[Audit] = []
    for name, parameter in model.named_parameters():
        asked = placements_of(name)
        parameters.append(audit(name, cast("DTensor", parameter), asked))
        for moment in ("exp_avg", "exp_avg_sq"):
            moments.append(audit(f"{name} {moment}", optimizer.state[parameter][moment], asked))
    return parameters, moments


def report_losses(losses: Sequence[float], reference: Sequence[float]) -> bool:
    """Print how the losses fell and differ from the reference's; return whether both are well."""
    compared = zip(losses[: len(reference)], reference, strict=True)
    differences = [abs(ours - theirs) for ours, theirs in compared]
    # max() may pass over what is not a number, so each difference is judged alone.
    is_close = all(difference <= LOSS_TOLERANCE for difference in differences)
    worst = max(differences, key=lambda value: math.inf if math.isnan(value) else value)
    print(f"\nloss: {losses[0]:.4f} -> {losses[-1]:.4f} in {len(losses)} steps")
    print(
        f"{_verdict(is_close)} the first {len(reference)} losses equal those of plain PyTorch on "
        f"one CPU: max |difference| = {worst:.1e} (limit {LOSS_TOLERANCE:.0e})"
    )
    return is_close


def report_audits(parameters: Sequence[Audit], moments: Sequence[Audit]) -> bool:
    """Print where the parameters lie; return whether XLA reports all that was asked."""
    print(f"\n{render_audits(parameters)}\n")
    problems = [problem for row in (*parameters, *moments) for problem in row.problems]
    print(
        f"{_verdict(not problems)} {len(parameters)} parameters and {len(moments)} moments of the "
        "optimizer lie as asked: sharding and bytes on each device"
    )
    for problem in problems:
        print(f"     {problem}")
    return not problems


def _verdict(is_well: bool) -> str:
    return "PASS" if is_well else "FAIL"


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--runtime", help="jax or torch_xla; if not given, what is installed")
    parser.add_argument("--devices", type=int, default=8, help="virtual devices, on a CPU")
    parser.add_argument("--dp", type=int, default=2, help="size of the data parallel axis")
    parser.add_argument("--tp", type=int, default=4, help="size of the tensor parallel axis")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--layers", type=int, default=ModelConfig.layers)
    parser.add_argument("--batch-size", type=int, default=16, help="sequences, over all devices")
    parser.add_argument("--learning-rate", type=float, default=6e-3)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    if options.dp * options.tp != options.devices:
        parser.error(f"--dp {options.dp} x --tp {options.tp} is not --devices {options.devices}")
    if options.steps < 1:
        parser.error(f"--steps {options.steps} leaves nothing to train; pass 1 or more")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Start the runtime and run on it; return the exit status."""
    options = parse_arguments(arguments)
    with TemporaryDirectory() as hlo_folder:
        xla_dtensor.get_runtime(
            options.runtime, num_cpu_devices=options.devices, dump_hlo=hlo_folder
        )
        return run(options)


def run(options: argparse.Namespace) -> int:
    """Train, report and check on the runtime that was started; return the exit status."""
    mesh = init_device_mesh("xla", (options.dp, options.tp), mesh_dim_names=("dp", "tp"))

    # For the plain model. On cores that others use too, a second thread mostly spins and waits.
    torch.set_num_threads(1)
    config = ModelConfig(layers=options.layers)
    corpus = Corpus.from_standard_library()
    torch.manual_seed(options.seed)
    plain_model = LanguageModel(config)
    model = distribute_module(copy.deepcopy(plain_model), mesh, shard_parameters)

    train_step, optimizer, scheduler = make_training(model, options.learning_rate, options.steps)
    step = xla_dtensor.compile(train_step)
    batches = corpus.batches(options.batch_size, config.seq, options.seed)
    losses = train(step, scheduler, batches, mesh, options.steps)

    parameters, moments = audit_all(model, optimizer)
    is_as_asked = report_audits(parameters, moments)
    print("\ncommunication in one step, per device:")
    print(render_collectives(summarize(collectives(step.hlo(), parameters[0].mesh))))

    batches = corpus.batches(options.batch_size, config.seq, options.seed)
    reference = reference_losses(plain_model, batches, options.learning_rate, options.steps)
    is_equal = report_losses(losses, reference)
    return 0 if is_as_asked and is_equal else 1


if __name__ == "__main__":
    raise SystemExit(main())
