"""How often each primitive stands in a traced step, by optimizer and number of layers.

    python -m tests.xla_dtensor.equation_counts      prints {optimizer: [{primitive: count}, ...]}

In a process of its own: what a test before has left behind is no part of the question.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable
from typing import Any

os.environ.setdefault("NPROC", "64")

import torch

import xla_dtensor as xd
from tests.xla_dtensor.scanned_blocks import batch, model, on, placed, scanned, trainer

DEPTHS = (3, 6)
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "one by one": lambda p: torch.optim.AdamW(p, foreach=False),
    "adamw": torch.optim.AdamW,
    "amsgrad": lambda p: torch.optim.Adam(p, amsgrad=True, weight_decay=0.1, maximize=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "nadam": torch.optim.NAdam,
    "adagrad": lambda p: torch.optim.Adagrad(p, lr_decay=0.1),
}


def equations(mesh: xd.DeviceMesh, count: int, name: str) -> Counter[str]:
    """How often each primitive stands in the second trace of a step over `count` layers."""
    net = placed(scanned(model(count=count)), mesh)
    step: Any = xd.compile(trainer(net, OPTIMIZERS[name](net.parameters())))
    step(on(mesh, batch()))
    step(on(mesh, batch()))
    return Counter(equation.primitive.name for equation in step._called().blueprint.jaxpr.eqns)


def main() -> None:
    """Print the counts."""
    xd.get_runtime("jax", num_cpu_devices=8)
    mesh = xd.init_device_mesh("xla", (2, 4), mesh_dim_names=("dp", "tp"))
    found = {name: [equations(mesh, count, name) for count in DEPTHS] for name in OPTIMIZERS}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
