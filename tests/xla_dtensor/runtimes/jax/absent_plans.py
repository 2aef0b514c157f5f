"""Training plans that are compiled twice: on real CPU devices, and on the same without values.

Run as a program it prints, as JSON, what becomes of each on devices that count as absent.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard

import xla_dtensor as xd
from xla_dtensor.dtensor.mesh import DeviceMesh

SHAPE, AXES = (2, 4), ("dp", "tp")


def _placed(model: nn.Module, mesh: DeviceMesh, device: str) -> nn.Module:
    """Cut each weight's rows over tp, and its columns over dp."""
    for name, parameter in list(model.named_parameters()):
        owner, _, leaf = name.rpartition(".")
        lies = [Shard(1), Shard(0)] if parameter.ndim == 2 else [Replicate(), Shard(0)]
        with torch.device(device):
            value = torch.zeros(parameter.shape, dtype=parameter.dtype)
        placed = nn.Parameter(xd.distribute_tensor(value, mesh, lies))
        setattr(model.get_submodule(owner), leaf, placed)
    for name, buffer in list(model.named_buffers()):
        model.register_buffer(name, torch.zeros(buffer.shape, device=device))
    return model


def _training(
    model: nn.Module, optimizer: Callable[..., torch.optim.Optimizer], clip: bool = False
) -> Callable[..., torch.Tensor]:
    made = optimizer(model.parameters())

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = (model(x) - y).square().mean()
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        made.step()
        made.zero_grad()
        return loss

    return step


def _of(model: Callable[[], nn.Module], width: int = 16, **options: Any) -> Any:
    def plan(mesh: DeviceMesh, device: str) -> Any:
        with torch.device("meta"):
            built = model()
        built = _placed(built, mesh, device)
        optimizer = options.get("optimizer", lambda p: torch.optim.AdamW(p, lr=1e-3))
        step = _training(built, optimizer, options.get("clip", False))
        batch = torch.zeros(8, width, device=device)
        return built, step, (batch, batch), ([Shard(0), Replicate()],) * 2

    return plan


class WithBuffer(nn.Module):
    """A weight, and a count that each call raises."""

    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.register_buffer("calls", torch.zeros(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        return self.linear(x) + self.calls


PLANS: dict[str, Any] = {
    "adamw": _of(lambda: nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)), clip=True),
    "sgd": _of(lambda: nn.Linear(16, 16), optimizer=lambda p: torch.optim.SGD(p, lr=0.1)),
    "dropout": _of(lambda: nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5))),
    "uneven": _of(lambda: nn.Linear(13, 13), width=13),
    "buffer": _of(WithBuffer),
}


def main() -> None:
    """Compile every plan for eight CPU devices that count as absent."""
    import jax

    from mesh_utils import Mesh
    from xla_dtensor.dtensor.mesh import as_device_mesh
    from xla_dtensor.plan.training_plan import TrainingPlan
    from xla_dtensor.runtimes.registry import compile_only_runtime

    jax.config.update("jax_num_cpu_devices", 8)
    runtime = compile_only_runtime(jax.devices())
    mesh = as_device_mesh(Mesh.arange(SHAPE, AXES))
    for name, function in PLANS.items():
        plan = partial(TrainingPlan.of, function, mesh, {"device": "meta"})
        traced = runtime.traced(plan, runtime.root(mesh.value))
        evidence = traced.evidence(traced.compiled(traced.lowered()), title=name)
        held = [[h.name, h.role, list(h.device_shape), h.chosen] for h in evidence.held]
        made = sum(array.nbytes for array in jax.live_arrays())
        row = {"name": name, "hlo": evidence.hlo_text, "held": held, "bytes": made}
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
