"""What tests of Hugging Face weights run in processes of their own."""

from __future__ import annotations

import errno
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

import xla_dtensor as xd
from xla_dtensor import errors as xd_errors
from xla_dtensor.core.dtypes import host_bytes
from xla_dtensor.hosts.hugging_face import load_hf, save, save_hf
from xla_dtensor.models.decoder import Llama, Mixtral
from xla_dtensor.plan.model_sizes import ModelSizes

__all__ = [
    "RULES",
    "convert_without_devices",
    "count_bytes",
    "load_and_save",
    "save_with_a_fault",
    "sparse_weights",
    "wide",
]

EXPERT_RULES: dict[str, Any] = {
    "**.experts.gate_up_proj": ["dp", "tp", None],
    "**.experts.down_proj": ["tp", None, "dp"],
}
RULES: dict[str, Any] = {
    "**.embed_tokens.weight": [("dp", "tp"), None],
    "lm_head.weight": [None, ("dp", "tp")],
    "**.o_proj.weight": ["dp", "tp"],
    "**.*_proj.weight": ["tp", "dp"],
    "**": None,
}


def load_and_save(source: str, target: str, model: str) -> dict[str, Any]:
    """Load a model that no process has the weights of, check what is here, and save it again."""
    module, sizes = _sharded(model)
    result = load_hf(source, module)
    held: dict[str, list[Any]] = {}
    for name, tensor in module.named_parameters():
        shards = {tuple(map(_bounds, s.index)): s.data for s in tensor.addressable_shards()}
        held[name] = [(index, data.detach()) for index, data in shards.items()]
    files = save_hf(target, module, max_shard_bytes="40KB", config=sizes)
    return {"held": held, "read": result.bytes_read, "files": files}


def count_bytes(source: str, names: dict[str, Any], rules: dict[str, Any]) -> tuple[int, int]:
    """Load a module of wide tensors; return bytes that are read, and that are held here."""
    mesh = xd.init_device_mesh("xla", (2, 4), mesh_dim_names=("dp", "tp"))
    module: Any = xd.shard_module(wide("meta"), mesh, rules)
    read = load_hf(source, module, names=names).bytes_read
    blocks = [
        {tuple(map(_bounds, s.index)): s.data.nbytes for s in tensor.addressable_shards()}
        for tensor in module.parameters()
    ]
    return read, sum(sum(each.values()) for each in blocks)


def wide(device: str) -> torch.nn.Module:
    """A module whose rows are many pages long."""
    module = torch.nn.Module()
    with torch.device(device):
        module.experts = torch.nn.Parameter(torch.randn(8, 4, 16384))
        module.lone = torch.nn.Parameter(torch.randn(16, 16384))
    return module


def _sharded(model: str) -> tuple[Any, ModelSizes]:
    sizes = ModelSizes.load(model)
    mesh = xd.init_device_mesh("xla", (2, 4), mesh_dim_names=("dp", "tp"))
    with torch.device("meta"):
        module = Mixtral(sizes) if sizes.num_local_experts else Llama(sizes)
    rules = (EXPERT_RULES if sizes.num_local_experts else {}) | RULES
    return xd.shard_module(module, mesh, rules), sizes


def _bounds(part: slice) -> tuple[int, int]:
    return part.start, part.stop


def save_with_a_fault(source: str, target: str, fault: str) -> str:
    """Save while process 1 cannot write, or is called with other names; return what is raised."""
    module, _ = _sharded("llama-tiny")
    load_hf(source, module)
    second = jax_process_index() == 1

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    names = {"lm_head.weight": "head"} if fault == "names" and second else None
    sync = os.fsync
    try:
        if fault == "disk" and second:
            os.fsync = full
        save_hf(target, module, max_shard_bytes="40KB", names=names)
    except xd_errors.WeightsError as error:
        return str(error)
    finally:
        os.fsync = sync
    return "saved"


def jax_process_index() -> int:
    """Which process of the job this is."""
    runtime: Any = xd.get_runtime()
    mine = runtime.addressable_device_ids()[0]
    order = sorted(runtime.device_ids())
    return runtime.device_attributes()[order.index(mine)]["process_index"]


def sparse_weights(folder: Path, sizes: ModelSizes, files: int) -> int:
    """Write weights in bfloat16 that are zeros and take no room on the disk; return their bytes."""
    listed = list(sizes.parameters())
    places: dict[str, str] = {}
    total = 0
    for i in range(files):
        name = f"model-{i + 1:05d}-of-{files:05d}.safetensors"
        group = listed[i * len(listed) // files : (i + 1) * len(listed) // files]
        header = _header(group)
        (folder / name).write_bytes(header)
        count = sum(2 * torch.Size(shape).numel() for _, shape in group)
        os.truncate(folder / name, len(header) + count)
        places |= {key: name for key, _ in group}
        total += count
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return total


def _header(tensors: list[Any]) -> bytes:
    entries: dict[str, Any] = {}
    place = 0
    for name, shape in tensors:
        end = place + 2 * torch.Size(shape).numel()
        entries[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [place, end]}
        place = end
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text


def convert_without_devices(
    source: str, target: str, model: str, dtype: str
) -> dict[str, int | None]:
    """Load and save a model whose devices' memory is not there, and say what this process took.

    Every tile is read, padded and handed over as the runtime does it, then dropped; and every part
    that is saved is made anew. All else is what a job does.
    """
    runtime: Any = xd.get_runtime("jax", num_cpu_devices=8)
    mesh = xd.init_device_mesh("xla", (2, 4), mesh_dim_names=("dp", "tp"))
    with torch.device("meta"):
        module = Llama(ModelSizes.load(model)).to(getattr(torch, dtype))
    xd.shard_module(module, mesh, RULES)
    handed_over = 0

    def from_shards(shards: Any, shape: Any, layout: Any) -> torch.Tensor:
        nonlocal handed_over
        kind = torch.bfloat16
        for _, tile in shards.items():
            data = tile.view(torch.uint8).numpy()
            padded = np.pad(data, [(0, 0)] * data.ndim)
            handed_over, kind = handed_over + padded.nbytes, tile.dtype
        return torch.empty(tuple(shape), dtype=kind, device="meta")

    def part_of(tensor: torch.Tensor, part: Any, wanted: bool) -> torch.Tensor:
        return torch.zeros([cut.stop - cut.start for cut in part], dtype=tensor.dtype)

    def with_holes(sink: Any, data: memoryview) -> None:
        if len(data) > 1 << 20:  # zeros: leave a hole, the disk need not hold 16 GB
            os.ftruncate(sink._fd, os.lseek(sink._fd, len(data), os.SEEK_CUR))
        else:
            os.write(sink._fd, data)

    before = host_bytes("VmHWM")
    runtime.from_shards = from_shards
    read = load_hf(source, module).bytes_read
    after_load = host_bytes("VmHWM")
    save.part_of = part_of
    save._has_values = lambda tensor: True
    save._Sink._write = with_holes  # pyright: ignore[reportAttributeAccessIssue]
    save_hf(target, module, config=ModelSizes.load(model))
    after = host_bytes("VmHWM")
    peaks = {"before": before, "after_load": after_load, "after": after}
    return {"read": read, "handed_over": handed_over, **peaks}


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]](*sys.argv[2:])))
