"""Small programs whose collectives are known, compiled for TPU slices by libtpu.

The texts are in golden/ next to this file, as ``plan_<name>.hlo``; nothing is compiled in tests. To
make them again, with ``pip install xla-dtensor[preflight]`` and no TPU:

    python -m tests.xla_dtensor.report.golden_programs [FOLDER/] [NAME ...]

jax 0.10.2 with libtpu 0.0.42.1 made those that are stored there; the folders jax_0_6_2 and
jax_0_8_1 have those of older versions, with libtpu 0.0.17.1 and 0.0.30. Of lines that are neither
collectives nor loops the backend's settings were cut out.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mesh_utils import Mesh, Topology, assign
from xla_dtensor.plan.aot import LIBTPU_ENVIRONMENT

__all__ = ["GOLDEN", "PROGRAMS", "Program"]

GOLDEN = Path(__file__).parent / "golden"
_ENVIRONMENT = {**LIBTPU_ENVIRONMENT, "NPROC": "64"}


@dataclass(frozen=True)
class Program:
    """One program and what it runs on.

    Attributes:
        topology: the slices.
        axes: the name of each axis.
        ici: its size inside a slice.
        dcn: its size across slices.
        build: given jax, the JAX mesh and PartitionSpec, the function and its arguments: shape,
            partition spec and dtype of each.
    """

    topology: str
    axes: tuple[str, ...]
    ici: tuple[int, ...]
    dcn: tuple[int, ...]
    build: Callable[[Any, Any, Any], tuple[Any, list[tuple[tuple[int, ...], Any, str]]]]

    @property
    def parsed(self) -> Topology:
        return Topology.parse(self.topology)

    @property
    def mesh(self) -> Mesh:
        return assign(self.parsed, self.ici, self.dcn, axis_names=self.axes).mesh


def _linear_step(jax: Any, mesh: Any, result: Any) -> Any:
    from jax.sharding import NamedSharding

    def step(w: Any, x: Any) -> Any:
        grad = jax.grad(lambda w: jax.numpy.sum(jax.numpy.sin(x @ w).astype("float32")))(w)
        with jax.named_scope("optimizer"):
            return jax.lax.with_sharding_constraint(w - grad, NamedSharding(mesh, result))

    return step


def _fsdp_linear(jax: Any, mesh: Any, P: Any) -> Any:
    return _linear_step(jax, mesh, P("fsdp")), [
        ((1024, 512), P("fsdp"), "bfloat16"),
        ((2048, 1024), P("fsdp"), "bfloat16"),
    ]


def _megatron(jax: Any, mesh: Any, P: Any) -> Any:
    """Column, row: one all-reduce over tp for each layer of a scan."""

    def step(x: Any, w1: Any, w2: Any) -> Any:
        def layer(x: Any, weights: Any) -> Any:
            with jax.named_scope("Model/layers/0/mlp"):
                up, down = weights
                return x + jax.numpy.tanh(x @ up) @ down, None

        return jax.lax.scan(layer, x, (w1, w2))[0]

    return step, [
        ((512, 1024), P("dp"), "bfloat16"),
        ((3, 1024, 2048), P(None, None, "tp"), "bfloat16"),
        ((3, 2048, 1024), P(None, "tp"), "bfloat16"),
    ]


def _ring(jax: Any, mesh: Any, P: Any) -> Any:
    def local(x: Any) -> Any:
        def hop(carry: Any, _: Any) -> Any:
            kept, moving = carry
            moving = jax.lax.ppermute(moving, "sp", [(i, (i + 1) % 4) for i in range(4)])
            return (kept + jax.numpy.sin(moving), moving), None

        return jax.lax.scan(hop, (x, x), None, length=3)[0][0]

    step = jax.shard_map(local, mesh=mesh, in_specs=P("dp", "sp"), out_specs=P("dp", "sp"))
    return step, [((512, 512), P("dp", "sp"), "float32")]


def _moe(jax: Any, mesh: Any, P: Any) -> Any:
    """Each device has tokens for all 4 experts; they go there and come back."""

    def local(x: Any, w: Any) -> Any:
        there = jax.lax.all_to_all(x, "ep", 1, 1, tiled=True)
        done = jax.numpy.tanh(there @ w[0])
        return jax.lax.all_to_all(done, "ep", 1, 1, tiled=True)

    spec = P(("dp", "ep"))
    step = jax.shard_map(local, mesh=mesh, in_specs=(spec, P("ep")), out_specs=spec)
    return step, [
        ((16, 256, 512), spec, "bfloat16"),
        ((4, 512, 512), P("ep"), "bfloat16"),
    ]


def _dcn_gradient(jax: Any, mesh: Any, P: Any) -> Any:
    return _linear_step(jax, mesh, P()), [
        ((1024, 512), P(), "bfloat16"),
        ((2048, 1024), P("dp"), "bfloat16"),
    ]


def _vocabulary(jax: Any, mesh: Any, P: Any) -> Any:
    def step(table: Any, w: Any, ids: Any) -> Any:
        with jax.named_scope("Model/embed"):
            x = table[ids]
        with jax.named_scope("Model/head"):
            return x @ w

    return step, [
        ((32768, 512), P(), "bfloat16"),
        ((512, 512), P("fsdp"), "bfloat16"),
        ((64, 128), P("fsdp"), "int32"),
    ]


def _sequence(jax: Any, mesh: Any, P: Any) -> Any:
    """The sequence is sharded, the weights are not; then somebody asks for the whole of it."""
    from jax.sharding import NamedSharding

    def step(x: Any, w1: Any, w2: Any) -> Any:
        with jax.named_scope("Model/layers.0/mlp"):
            whole = jax.lax.with_sharding_constraint(
                jax.numpy.sin(x), NamedSharding(mesh, P("dp", None, None))
            )
            return jax.numpy.tanh(whole @ w1) @ w2

    return step, [
        ((8, 8192, 512), P("dp", "sp"), "bfloat16"),
        ((512, 1024), P(), "bfloat16"),
        ((1024, 512), P(), "bfloat16"),
    ]


def _rematerialization(jax: Any, mesh: Any, P: Any) -> Any:
    """What XLA does when it knows no way from one sharding to another."""

    def local(x: Any) -> Any:
        with jax.named_scope("Model/head"):
            whole = jax.lax.all_gather(jax.numpy.sin(x), "dp", tiled=True)
            start = jax.lax.axis_index("tp") * 128
            return jax.lax.dynamic_slice_in_dim(whole, start, 128, axis=1)

    step = jax.shard_map(
        local, mesh=mesh, in_specs=P("dp"), out_specs=P(None, "tp"), check_vma=False
    )
    return step, [((4096, 512), P("dp"), "bfloat16")]


def _attention(lies: dict[str, tuple[Any, ...]], weights: tuple[Any, ...]) -> Any:
    """Attention whose queries, keys and values lie as told: (batch, heads, length, dim)."""

    def build(jax: Any, mesh: Any, P: Any) -> Any:
        from jax.sharding import NamedSharding

        def step(x: Any, wq: Any, wk: Any, wv: Any) -> Any:
            with jax.named_scope("Model/layers.0/self_attn"):
                made = {}
                for name, weight in (("q", wq), ("k", wk), ("v", wv)):
                    value = (x @ weight).reshape(*x.shape[:2], 8, 64).transpose(0, 2, 1, 3)
                    spec = P(*lies[name])
                    made[name] = jax.lax.with_sharding_constraint(value, NamedSharding(mesh, spec))
                scores = jax.nn.softmax(made["q"] @ made["k"].swapaxes(2, 3))
                return scores @ made["v"]

        spec, (tokens, weight) = P(*lies["x"]), ((8, 4096, 512), (512, 512))
        given = [(weight, P(*weights), "bfloat16")] * 3
        return step, [(tokens, spec, "bfloat16"), *given]

    return build


_SEQUENCE = ("dp", None, "sp", None)
_HEADS = ("dp", "tp", None, None)
_WHOLE = ("dp", None, None, None)
_context = _attention({"x": ("dp", "sp"), "q": _SEQUENCE, "k": _WHOLE, "v": _WHOLE}, ())
_queries = _attention({"x": ("dp", "sp"), "q": _WHOLE, "k": _WHOLE, "v": _WHOLE}, ())
_heads = _attention({"x": ("dp",), "q": _HEADS, "k": _HEADS, "v": _HEADS}, (None, "tp"))
_joined = _attention({"x": ("dp",), "q": _WHOLE, "k": _WHOLE, "v": _WHOLE}, (None, "tp"))


def _gathered_experts(jax: Any, mesh: Any, P: Any) -> Any:
    """Each device gathers the experts for its tokens, where tokens should go to the experts."""
    from jax.sharding import NamedSharding

    def step(x: Any, w: Any) -> Any:
        with jax.named_scope("Model/layers.0/mlp/experts"):
            whole = jax.lax.with_sharding_constraint(jax.numpy.sin(w), NamedSharding(mesh, P()))
            return jax.numpy.einsum("xeh,ehf->xef", x, whole)

    return step, [
        ((4096, 4, 512), P(("dp", "ep")), "bfloat16"),
        ((4, 512, 1024), P("ep"), "bfloat16"),
    ]


PROGRAMS = {
    "fsdp_linear": Program("v5e:4x4", ("fsdp",), (16,), (1,), _fsdp_linear),
    "megatron_mlp": Program("v5e:4x4", ("dp", "tp"), (4, 4), (1, 1), _megatron),
    "ring_permute": Program("v5e:4x4", ("dp", "sp"), (4, 4), (1, 1), _ring),
    "moe_all_to_all": Program("v5e:4x4", ("dp", "ep"), (4, 4), (1, 1), _moe),
    "dcn_gradient": Program("2xv5e:2x2", ("dp",), (4,), (2,), _dcn_gradient),
    "wrong_tp_over_dcn": Program("2xv5e:2x2", ("dp", "tp"), (4, 1), (1, 2), _megatron),
    "wrong_vocabulary": Program("v5e:4x4", ("fsdp",), (16,), (1,), _vocabulary),
    "wrong_sequence": Program("v5e:4x4", ("dp", "sp"), (4, 4), (1, 1), _sequence),
    "context_parallel": Program("v5e:4x4", ("dp", "sp"), (4, 4), (1, 1), _context),
    "heads": Program("v5e:4x4", ("dp", "tp"), (4, 4), (1, 1), _heads),
    "wrong_queries": Program("v5e:4x4", ("dp", "sp"), (4, 4), (1, 1), _queries),
    "wrong_heads": Program("v5e:4x4", ("dp", "tp"), (4, 4), (1, 1), _joined),
    "wrong_experts": Program("v5e:4x4", ("dp", "ep"), (4, 4), (1, 1), _gathered_experts),
    "wrong_rematerialization": Program("v5e:4x4", ("dp", "tp"), (4, 4), (1, 1), _rematerialization),
}


def _compiled(program: Program) -> str:
    import jax
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import NamedSharding, PartitionSpec

    topology = program.parsed
    made: dict[str, Any] = {} if topology.num_slices == 1 else {"num_slices": topology.num_slices}
    described = topologies.get_topology_desc(
        program.topology.split("x", 1)[-1] if made else program.topology, "tpu", **made
    )
    by_id = {device.id: device for device in described.devices}
    devices = np.vectorize(by_id.__getitem__, otypes=[object])(program.mesh.device_ids)
    mesh = jax.sharding.Mesh(devices, program.axes)
    step, arguments = program.build(jax, mesh, PartitionSpec)
    lowered = jax.jit(step).lower(
        *(
            jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
            for shape, spec, dtype in arguments
        )
    )
    return lowered.compile().as_text() or ""


def _shortened(text: str) -> str:
    kept: list[str] = []
    for line in text.splitlines():
        if not re.search(r" (?:while|send|recv|all-|reduce-scatter|collective-|async)", line):
            line = re.sub(r", backend_config=\{.*\}$", "", line)
        kept.append(re.sub(r'"/[^"]*/([^"/]+)"', r'"\1"', line))
    return "\n".join(kept) + "\n"


def main(names: list[str]) -> None:
    os.environ.update(_ENVIRONMENT)
    folders = [GOLDEN / name for name in names if name.endswith("/")] or [GOLDEN]
    folders[0].mkdir(exist_ok=True)
    for name in [name for name in names if not name.endswith("/")] or PROGRAMS:
        text = _shortened(_compiled(PROGRAMS[name]))
        (folders[0] / f"plan_{name}.hlo").write_text(text, encoding="utf-8")
        print(f"{name}: {len(text)} characters")


if __name__ == "__main__":
    main(sys.argv[1:])
