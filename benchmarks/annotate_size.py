"""The other child of `benchmarks.annotate`: how large an annotation makes a program.

Run as ``python -m benchmarks.annotate_size jax --sizes 4096,262144``. Nothing is run: the program
is ``(x + 1) * 2`` with the sum annotated, lowered for that many devices. On JAX the mesh is an
abstract one. torch_xla makes its mesh while the count of devices that it checks against is
replaced, as `benchmarks.translate_child` does.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
from collections.abc import Iterator, Sequence
from functools import partial
from math import isqrt
from typing import Any
from unittest import mock

from mesh_utils import Mesh
from xla_dtensor.core import Layout

Size = tuple[int, int]  # bytes of the HLO as text, and as a protocol buffer

_NAMES = ("dp", "tp")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures every size; one JSON object per line on stdout."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("process", choices=("jax", "torch_xla"))
    parser.add_argument("--sizes", required=True)
    asked = parser.parse_args(arguments)
    measure = _on_jax if asked.process == "jax" else _on_torch_xla
    for num_devices in map(int, asked.sizes.split(",")):
        for name, (text, proto) in measure(num_devices):
            row = {"process": asked.process, "part": "size", "num_devices": num_devices}
            print(json.dumps({**row, "program": name, "text_bytes": text, "proto_bytes": proto}))


def _layout(num_devices: int) -> Layout:
    side = isqrt(num_devices)
    mesh = Mesh.arange((side, num_devices // side), _NAMES)
    return Layout.from_partition_spec(_NAMES, mesh)


def _on_jax(num_devices: int) -> Iterator[tuple[str, Size]]:
    jax: Any = importlib.import_module("jax")
    sharding: Any = importlib.import_module("xla_dtensor.runtimes.jax.arrays.sharding")
    layout = _layout(num_devices)

    def abstract(root: Mesh, sizes: tuple[int, ...], names: tuple[str, ...]) -> Any:
        auto = (jax.sharding.AxisType.Auto,) * len(names)
        return jax.sharding.AbstractMesh(sizes, names, axis_types=auto)

    with mock.patch.object(sharding, "_jax_mesh", abstract):
        named = sharding.named_sharding(layout.op_sharding(layout.mesh), layout.mesh, 2)

    def annotated(x: Any) -> Any:
        return jax.lax.with_sharding_constraint(x + 1, named) * 2

    for name, program in (("not annotated", lambda x: (x + 1) * 2), ("ours", annotated)):
        shape = jax.ShapeDtypeStruct(layout.mesh.mesh_shape, "float32")
        lowered = jax.jit(program).trace(shape).lower(lowering_platforms=("cpu",))
        proto = lowered.compiler_ir("hlo").as_serialized_hlo_module_proto()
        yield name, (len(lowered.as_text("hlo")), len(proto))


def _on_torch_xla(num_devices: int) -> Iterator[tuple[str, Size]]:
    os.environ["PJRT_DEVICE"] = "CPU"
    torch: Any = importlib.import_module("torch")
    runtime = importlib.import_module("torch_xla.runtime")
    if not runtime.is_spmd():
        runtime.use_spmd()
    spmd: Any = importlib.import_module("torch_xla.distributed.spmd")
    sharding: Any = importlib.import_module("xla_dtensor.runtimes.torch_xla.annotations")
    xlac: Any = importlib.import_module("torch_xla")._XLAC
    layout = _layout(num_devices)
    with mock.patch.object(runtime, "global_runtime_device_count", partial(int, num_devices)):
        mesh = spmd.Mesh(list(range(num_devices)), layout.mesh.mesh_shape, _NAMES)
    annotations = {
        "not annotated": None,
        "ours": sharding.to_annotation(layout.op_sharding(Mesh.arange((num_devices,), ("d",)))),
        "torch_xla's": mesh.get_op_sharding(_NAMES),
    }
    for name, annotation in annotations.items():
        total = torch.ones(8, 8).to("xla") + 1
        if annotation is not None:
            xlac._xla_annotate_custom_sharding(total, annotation)
        result = [total * 2]
        text, proto = xlac._get_xla_tensors_hlo(result), xlac._get_xla_tensors_hlo_proto(result)
        yield name, (len(text), len(proto))


if __name__ == "__main__":
    main()
