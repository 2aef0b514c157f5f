"""xla_dtensor: PyTorch's DTensor API, executed by XLA's SPMD partitioner.

Write ordinary PyTorch, say with placements how tensors lie on a mesh, and XLA does the sharded
compute and all communication, through JAX or torch_xla. Importing this package loads neither a
runtime nor torch; names are resolved on first use.

Example:
    >>> import torch
    >>> from torch.distributed.tensor import Replicate, Shard
    >>> import xla_dtensor as xd
    >>> runtime = xd.get_runtime(num_cpu_devices=8)
    >>> mesh = xd.init_device_mesh("xla", (2, 4), mesh_dim_names=("dp", "tp"))
    >>> x = xd.distribute_tensor(torch.ones(8, 6), mesh, [Shard(0), Replicate()])
    >>> x.sum().item()
    48.0
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from xla_dtensor.old_names import find_as

if TYPE_CHECKING:
    from mesh_utils import Mesh as Mesh
    from xla_dtensor.core import Layout as Layout
    from xla_dtensor.core import OpSharding as OpSharding
    from xla_dtensor.debug.explain import comm_counts as comm_counts
    from xla_dtensor.debug.explain import explain as explain
    from xla_dtensor.debug.explain import profile as profile
    from xla_dtensor.debug.explicit import (
        ExplicitRedistributionContext as ExplicitRedistributionContext,
    )
    from xla_dtensor.debug.visualize import visualize_sharding as visualize_sharding
    from xla_dtensor.dtensor.api import (
        compute_local_shape_and_global_offset as compute_local_shape_and_global_offset,
    )
    from xla_dtensor.dtensor.api import distribute_module as distribute_module
    from xla_dtensor.dtensor.api import distribute_tensor as distribute_tensor
    from xla_dtensor.dtensor.custom import SkipDTensorDispatch as SkipDTensorDispatch
    from xla_dtensor.dtensor.custom import custom_shard as custom_shard
    from xla_dtensor.dtensor.dtensor import DTensor as DTensor
    from xla_dtensor.dtensor.dtensor import empty as empty
    from xla_dtensor.dtensor.dtensor import full as full
    from xla_dtensor.dtensor.dtensor import ones as ones
    from xla_dtensor.dtensor.dtensor import rand as rand
    from xla_dtensor.dtensor.dtensor import randn as randn
    from xla_dtensor.dtensor.dtensor import zeros as zeros
    from xla_dtensor.dtensor.local import LocalView as LocalView
    from xla_dtensor.dtensor.mesh import DeviceMesh as DeviceMesh
    from xla_dtensor.dtensor.mesh import init_device_mesh as init_device_mesh
    from xla_dtensor.dtensor.modes import implicit_replication as implicit_replication
    from xla_dtensor.dtensor.modes import loss_parallel as loss_parallel
    from xla_dtensor.dtensor.modes import strict_placements as strict_placements
    from xla_dtensor.dtensor.random import is_rng_supported_mesh as is_rng_supported_mesh
    from xla_dtensor.dtensor.random import manual_seed as manual_seed
    from xla_dtensor.hosts.accelerator import install as install
    from xla_dtensor.hosts.data import MpDeviceLoader as MpDeviceLoader
    from xla_dtensor.hosts.data import PackedBatches as PackedBatches
    from xla_dtensor.hosts.data import ProcessPart as ProcessPart
    from xla_dtensor.hosts.data import ShardedLoader as ShardedLoader
    from xla_dtensor.hosts.data import ShardedSampler as ShardedSampler
    from xla_dtensor.hosts.data import pack_sequences as pack_sequences
    from xla_dtensor.hosts.data import process_part as process_part
    from xla_dtensor.hosts.data import shard_batch as shard_batch
    from xla_dtensor.hosts.hugging_face.pretrained import from_pretrained as from_pretrained
    from xla_dtensor.hosts.preemption import Preemption as Preemption
    from xla_dtensor.hosts.preemption import check_same_program as check_same_program
    from xla_dtensor.hosts.preemption import program_checks as program_checks
    from xla_dtensor.hosts.processes import ProcessInfo as ProcessInfo
    from xla_dtensor.hosts.processes import init_distributed as init_distributed
    from xla_dtensor.nn.compile import compile as compile
    from xla_dtensor.nn.fsdp import FSDPModule as FSDPModule
    from xla_dtensor.nn.fsdp import fully_shard as fully_shard
    from xla_dtensor.nn.fsdp import register_fsdp_forward_method as register_fsdp_forward_method
    from xla_dtensor.nn.install import uninstall as uninstall
    from xla_dtensor.nn.loss import linear_cross_entropy as linear_cross_entropy
    from xla_dtensor.nn.materialize import materialize as materialize
    from xla_dtensor.nn.scan import ScannedLayers as ScannedLayers
    from xla_dtensor.nn.scan import checkpoint_name as checkpoint_name
    from xla_dtensor.nn.scan import scan_layers as scan_layers
    from xla_dtensor.nn.shard_module import shard_module as shard_module
    from xla_dtensor.nn.shard_module import sharding_plan as sharding_plan
    from xla_dtensor.plan.aot import compile_for as compile_for
    from xla_dtensor.plan.job_meshes import job_mesh as job_mesh
    from xla_dtensor.plan.live import report_of as report_of
    from xla_dtensor.runtimes import get_runtime as get_runtime
    from xla_dtensor.runtimes import installed_runtimes as installed_runtimes
    from xla_dtensor.runtimes.bounds import check_values as check_values
    from xla_dtensor.runtimes.whole_ops import attention_kernel as attention_kernel
    from xla_dtensor.spmd.call_jax import call_jax as call_jax

_WHERE = {
    "DTensor": "xla_dtensor.dtensor.dtensor",
    "DeviceMesh": "xla_dtensor.dtensor.mesh",
    "ExplicitRedistributionContext": "xla_dtensor.debug.explicit",
    "FSDPModule": "xla_dtensor.nn.fsdp",
    "Layout": "xla_dtensor.core",
    "LocalView": "xla_dtensor.dtensor.local",
    "Mesh": "mesh_utils",
    "MpDeviceLoader": "xla_dtensor.hosts.data",
    "OpSharding": "xla_dtensor.core",
    "PackedBatches": "xla_dtensor.hosts.data",
    "Preemption": "xla_dtensor.hosts.preemption",
    "ProcessInfo": "xla_dtensor.hosts.processes",
    "ProcessPart": "xla_dtensor.hosts.data",
    "ScannedLayers": "xla_dtensor.nn.scan",
    "ShardedLoader": "xla_dtensor.hosts.data",
    "ShardedSampler": "xla_dtensor.hosts.data",
    "SkipDTensorDispatch": "xla_dtensor.dtensor.custom",
    "attention_kernel": "xla_dtensor.runtimes.whole_ops",
    "call_jax": "xla_dtensor.spmd.call_jax",
    "check_same_program": "xla_dtensor.hosts.preemption",
    "check_values": "xla_dtensor.runtimes.bounds",
    "checkpoint_name": "xla_dtensor.nn.scan",
    "comm_counts": "xla_dtensor.debug.explain",
    "compile": "xla_dtensor.nn.compile",
    "compile_for": "xla_dtensor.plan.aot",
    "compute_local_shape_and_global_offset": "xla_dtensor.dtensor.api",
    "custom_shard": "xla_dtensor.dtensor.custom",
    "distribute_module": "xla_dtensor.dtensor.api",
    "distribute_tensor": "xla_dtensor.dtensor.api",
    "empty": "xla_dtensor.dtensor.dtensor",
    "explain": "xla_dtensor.debug.explain",
    "full": "xla_dtensor.dtensor.dtensor",
    "from_pretrained": "xla_dtensor.hosts.hugging_face.pretrained",
    "fully_shard": "xla_dtensor.nn.fsdp",
    "get_runtime": "xla_dtensor.runtimes",
    "implicit_replication": "xla_dtensor.dtensor.modes",
    "init_device_mesh": "xla_dtensor.dtensor.mesh",
    "init_distributed": "xla_dtensor.hosts.processes",
    "install": "xla_dtensor.hosts.accelerator",
    "installed_runtimes": "xla_dtensor.runtimes",
    "is_rng_supported_mesh": "xla_dtensor.dtensor.random",
    "job_mesh": "xla_dtensor.plan.job_meshes",
    "linear_cross_entropy": "xla_dtensor.nn.loss",
    "loss_parallel": "xla_dtensor.dtensor.modes",
    "manual_seed": "xla_dtensor.dtensor.random",
    "materialize": "xla_dtensor.nn.materialize",
    "ones": "xla_dtensor.dtensor.dtensor",
    "pack_sequences": "xla_dtensor.hosts.data",
    "process_part": "xla_dtensor.hosts.data",
    "profile": "xla_dtensor.debug.explain",
    "program_checks": "xla_dtensor.hosts.preemption",
    "rand": "xla_dtensor.dtensor.dtensor",
    "randn": "xla_dtensor.dtensor.dtensor",
    "register_fsdp_forward_method": "xla_dtensor.nn.fsdp",
    "report_of": "xla_dtensor.plan.live",
    "scan_layers": "xla_dtensor.nn.scan",
    "shard_batch": "xla_dtensor.hosts.data",
    "shard_module": "xla_dtensor.nn.shard_module",
    "sharding_plan": "xla_dtensor.nn.shard_module",
    "strict_placements": "xla_dtensor.dtensor.modes",
    "uninstall": "xla_dtensor.nn.install",
    "visualize_sharding": "xla_dtensor.debug.visualize",
    "zeros": "xla_dtensor.dtensor.dtensor",
}

__all__ = [
    "DTensor",
    "DeviceMesh",
    "ExplicitRedistributionContext",
    "FSDPModule",
    "Layout",
    "LocalView",
    "Mesh",
    "MpDeviceLoader",
    "OpSharding",
    "PackedBatches",
    "Preemption",
    "ProcessInfo",
    "ProcessPart",
    "ScannedLayers",
    "ShardedLoader",
    "ShardedSampler",
    "SkipDTensorDispatch",
    "attention_kernel",
    "call_jax",
    "check_same_program",
    "check_values",
    "checkpoint_name",
    "comm_counts",
    "compile",
    "compile_for",
    "compute_local_shape_and_global_offset",
    "custom_shard",
    "distribute_module",
    "distribute_tensor",
    "empty",
    "explain",
    "from_pretrained",
    "full",
    "fully_shard",
    "get_runtime",
    "implicit_replication",
    "init_device_mesh",
    "init_distributed",
    "install",
    "installed_runtimes",
    "is_rng_supported_mesh",
    "job_mesh",
    "linear_cross_entropy",
    "loss_parallel",
    "manual_seed",
    "materialize",
    "ones",
    "pack_sequences",
    "process_part",
    "profile",
    "program_checks",
    "rand",
    "randn",
    "register_fsdp_forward_method",
    "report_of",
    "scan_layers",
    "shard_batch",
    "shard_module",
    "sharding_plan",
    "strict_placements",
    "uninstall",
    "visualize_sharding",
    "zeros",
]
__version__ = "0.1.0.dev0"

# What was pickled before these modules were merged.
find_as(
    {
        "xla_dtensor.device_mesh": "xla_dtensor.dtensor.mesh",
        "xla_dtensor.pickling": "xla_dtensor.dtensor.dtensor",
        "xla_dtensor.spmd.sharding_spec": "xla_dtensor.spmd.annotate",
    }
)


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'xla_dtensor' has no attribute {name!r}")
    attribute = getattr(importlib.import_module(_WHERE[name]), name)
    globals()[name] = attribute
    return attribute


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
