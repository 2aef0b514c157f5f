"""Evidence for tests of reports: stored TPU programs with state of a small model around them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from mesh_utils import Mesh, Topology
from xla_dtensor.report.report import CompilerMemory, Evidence, Held

GOLDEN = Path(__file__).parent / "golden"
GIB = 2**30

WEIGHT = Held("layers.0.w1.weight", "parameter", (1024, 4096), "bf16", (256, 1024),
              "Shard(0), Shard(1)", "Shard(0), Shard(1)", 0, 0)  # fmt: skip


def held() -> tuple[Held, ...]:
    """Two layers, their optimizer state, an embedding laid out otherwise than asked, a batch."""
    found: list[Held] = []
    for layer in range(2):
        weight = replace(WEIGHT, name=f"layers.{layer}.w1.weight")
        state = replace(weight, name=f"{weight.name} exp_avg", role="optimizer state", dtype="f32")
        found += [weight, state]
    table = Held("embed.weight", "parameter", (512, 64), "bf16", (512, 64), "Shard(0), Replicate()")
    found.append(replace(table, chosen="Replicate(), Replicate()"))
    found.append(Held("bias", "parameter", (64,), "f32", (16,), "Shard(0), Replicate()"))
    numbered = [replace(one, input=i, output=i) for i, one in enumerate(found)]
    batch = Held("args[0]", "argument", (8, 16), "s32", (2, 16), input=len(found))
    return *numbered, batch, Held("loss", "result", (), "f32", (), output=len(found))


def evidence(program: str = "tpu_v5e_train", temporaries: int = 3 * GIB) -> Evidence:
    """Evidence of a stored program: "tpu_v5e_train", or "tpu_two_slices" on two slices."""
    several = program == "tpu_two_slices"
    topology = Topology.parse("2xv5e:4x4" if several else "v5e:4x4")
    arguments = sum(one.device_bytes for one in held() if one.input is not None)
    return Evidence(
        title="two layers",
        hlo_text=(GOLDEN / f"{program}.hlo").read_text(),
        mesh=Mesh(topology.device_ids, (8 if several else 4, 4), ("dp", "tp")),
        topology=topology,
        held=held(),
        memory=CompilerMemory(arguments, arguments, arguments - 128, temporaries, 1 << 20),
        flops=1e14,
        seconds={"trace": 1.5, "compile": 70.0},
        peak_host_bytes=3 * GIB,
        versions={"jax": "0.10.2", "libtpu": "0.0.42"},
        options={"xla_flag": "true"},
        command="python -m xla_dtensor plan job.yaml",
        attributes={"batch": "8 rows"},
    )


def mlp_evidence() -> Evidence:
    """The stored program on v5e with exactly what goes in and out of it, as its first line says.

    4 layers of two matrices on dp=4, tp=4: forward, and the gradients of both.
    """
    up, down = "Shard(1), Shard(2)", "Shard(2), Shard(1)"
    w1 = Held("layers.w1", "parameter", (4, 1024, 4096), "bf16", (4, 256, 1024), up, up, 0)
    w2 = Held("layers.w2", "parameter", (4, 4096, 1024), "bf16", (4, 1024, 256), down, down, 1)
    rows = "Shard(0), Replicate()"
    batch = Held("args[0]", "argument", (1024, 1024), "bf16", (256, 1024), rows, rows, 2)
    gradients = [
        replace(one, name=f"{one.name} grad", role="gradient", input=None, output=number)
        for number, one in enumerate((w1, w2))
    ]
    return replace(
        evidence(),
        title="MLP of 4 layers, forward and backward, on v5e:4x4",
        held=(w1, w2, batch, *gradients),
        memory=None,
        # Two products a layer; the backward has two for each of the forward.
        flops=4 * 2 * 3 * 2.0 * 1024 * 1024 * 4096,
        seconds={},
        peak_host_bytes=None,
        versions={},
        options={},
        command="",
        attributes={"batch": "1,024 rows of 1,024"},
    )
