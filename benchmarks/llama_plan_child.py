"""The child of `benchmarks.llama_plan`: one runtime's Llama steps, as JSON lines.

Run as ``python -m benchmarks.llama_plan_child jax --topology v5e:2x4``. Each row is one way of
saying how the model lies, and one compiler: what loss and gradients differ by from the same model
on one device in float64, and the collectives of the partitioned program.
"""

from __future__ import annotations

import argparse
import importlib
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import loss_parallel

from benchmarks.llama_model import Llama, Sizes, annotate_by_hand, apply_plan

MESH_SHAPE = (2, 4)
AXES = ("dp", "tp")
# name: whether torchtitan's plan says it, whether the loss is parallel
VARIANTS = {
    "plan": (True, False),
    "by hand": (False, False),
    "plan, loss parallel": (True, True),
    "by hand, loss parallel": (False, True),
}


@dataclass(frozen=True)
class Found:
    """A step that ran.

    Args:
        step: What was compiled.
        loss_error: How far its loss is from one device's, relative to it.
        gradient_error: The same of the gradients: the largest difference of a parameter's gradient,
            relative to its largest number; the worst parameter counts.
    """

    step: Any
    loss_error: float
    gradient_error: float


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs every variant; one JSON object per line on stdout."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runtime", choices=("jax", "torch_xla"))
    parser.add_argument("--topology", help="compile for this TPU topology as well (jax only)")
    asked = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        # torch_xla can only write its programs to a folder.
        dumped = {} if asked.runtime == "jax" else {"dump_hlo": folder}
        _measure(asked.runtime, asked.topology, dumped)


def _measure(runtime: str, topology: str | None, options: Mapping[str, Any]) -> None:
    import xla_dtensor as xd

    xd.get_runtime(runtime, num_cpu_devices=MESH_SHAPE[0] * MESH_SHAPE[1], **options)
    xd.install()
    mesh = xd.init_device_mesh("xla", MESH_SHAPE, mesh_dim_names=AXES)
    for variant in VARIANTS:
        found = run(variant, mesh, Sizes())
        for compiler, text in _programs(found.step, topology):
            row = {
                "runtime": runtime,
                "variant": variant,
                "compiler": compiler,
                "loss_error": found.loss_error,
                "gradient_error": found.gradient_error,
                "collectives": _collectives(text, mesh.value),
            }
            print(json.dumps(row), flush=True)


def run(variant: str, mesh: Any, sizes: Sizes) -> Found:
    """Runs one compiled step of a variant, forward and backward, and compares it.

    Args:
        variant: One of `VARIANTS`.
        mesh: The (dp, tp) mesh; xla_dtensor is installed.
        sizes: The model's.
    """
    import xla_dtensor as xd
    from xla_dtensor.dtensor.redistribute import as_plain

    by_plan, parallel_loss = VARIANTS[variant]
    expected = _on_one_device(sizes)
    model, tokens, targets = _made(sizes)
    # A loader's batch: plain tensors, their rows over dp.
    batch: Any = [xd.distribute_tensor(t, mesh, [Shard(0), Replicate()]) for t in (tokens, targets)]
    if by_plan:
        apply_plan(model, mesh["tp"], loss_parallel=parallel_loss)
        batch = [as_plain(tensor) for tensor in batch]
    else:
        annotate_by_hand(model, mesh, loss_parallel=parallel_loss)

    def forward_and_backward(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        model.zero_grad()
        with loss_parallel() if parallel_loss else nullcontext():
            value = loss(model, tokens, targets)
            value.backward()
        return value

    step = xd.compile(forward_and_backward)
    value: Any = step(*batch)
    errors = [
        _error(given.grad, wanted.grad)
        for given, wanted in zip(model.parameters(), expected[0].parameters(), strict=True)
    ]
    off = abs(value.item() - expected[1].item()) / abs(expected[1].item())
    return Found(step, off, max(errors))


def loss(model: Any, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """torchtitan's loss."""
    return F.cross_entropy(model(tokens).flatten(0, 1).float(), targets.flatten(0, 1))


def _made(sizes: Sizes) -> tuple[Any, torch.Tensor, torch.Tensor]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        shape = (sizes.batch, sizes.length)
        tokens, targets = (torch.randint(0, sizes.vocabulary, shape) for _ in range(2))
        return Llama(sizes), tokens, targets


def _on_one_device(sizes: Sizes) -> tuple[Any, torch.Tensor]:
    """The same model in float64, with its gradients, and its loss."""
    model, tokens, targets = _made(sizes)
    model = model.double()
    logits = model(tokens).flatten(0, 1)
    value = F.cross_entropy(logits, targets.flatten(0, 1))
    value.backward()
    return model, value


def _error(given: Any, wanted: Any) -> float:
    whole = given.full_tensor().cpu().double()
    return ((whole - wanted).abs().max() / wanted.abs().max()).item()


def _programs(step: Any, topology: str | None) -> Iterator[tuple[str, str]]:
    yield "XLA:CPU", step.hlo()
    if topology is not None:
        yield "libtpu", step.hlo_for(topology_devices(topology))


def topology_devices(name: str) -> list[Any]:
    """The devices of a TPU topology that is not here, by id."""
    topologies: Any = importlib.import_module("jax.experimental.topologies")
    described = topologies.get_topology_desc(name, "tpu")
    return sorted(described.devices, key=lambda device: device.id)


def _collectives(text: str, mesh: Any) -> list[dict[str, Any]]:
    from xla_dtensor.report import collectives, summarize

    return [
        {
            "kind": row.kind,
            "axes": None if row.axes is None else [str(axis) for axis in row.axes],
            "count": row.count,
            "bytes": row.bytes_per_device,
        }
        for row in summarize(collectives(text, mesh))
    ]


if __name__ == "__main__":
    main()
