"""On the GPUs of this machine: what `test_jax_gpu` reads, as one JSON object on the last line.

A session of tests has JAX on virtual CPU devices, so this is a process of its own::

    JAX_PLATFORMS=cuda python -m tests.xla_dtensor.runtimes.jax.gpu_child
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.tensor import Shard

import xla_dtensor as xd

__all__: list[str] = []


def main() -> None:
    devices = len(xd.get_runtime("jax").device_ids())
    mesh = xd.init_device_mesh("xla", (devices,), mesh_dim_names=("dp",))
    print(json.dumps({"devices": devices, **_product(mesh), **_attention(mesh)}))


def _product(mesh: xd.DeviceMesh) -> dict[str, float]:
    """How far a float32 product is off, which PyTorch computes in full precision by default."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(512, 512, generator=generator) for _ in range(2))
    product: Any = xd.distribute_tensor(a, mesh) @ xd.distribute_tensor(b, mesh)
    return {"product_error": _error(product.full_tensor(), a.double() @ b.double())}


def _attention(mesh: xd.DeviceMesh) -> dict[str, object]:
    """Causal attention in bfloat16, compiled, with gradients: how far off, and by which kernels."""
    generator = torch.Generator().manual_seed(1)
    plain = [
        torch.randn(2 * mesh.size(), 4, 256, 64, generator=generator).bfloat16() for _ in "qkv"
    ]

    @xd.compile
    def step(*leaves: torch.Tensor) -> list[torch.Tensor]:
        return _gradients(leaves)

    ours = [xd.distribute_tensor(t, mesh, [Shard(0)]).requires_grad_() for t in plain]
    exact = [t.double().requires_grad_() for t in plain]
    errors = [
        _error(ours.full_tensor(), exact)
        for ours, exact in zip(step(*ours), _gradients(exact), strict=True)
    ]
    return {"attention_error": max(errors), "attention_kernels": step.hlo().count("__cudnn$fmha")}


def _gradients(leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    q, k, v = leaves
    output = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return [output, *torch.autograd.grad(output.float().square().sum(), [q, k, v])]


def _error(value: torch.Tensor, exact: torch.Tensor) -> float:
    return float((value.double() - exact).norm() / exact.norm())


if __name__ == "__main__":
    main()
