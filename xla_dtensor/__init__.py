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

if TYPE_CHECKING:
    from mesh_utils import Mesh as Mesh
    from xla_dtensor.aot import compile_for as compile_for
    from xla_dtensor.api import distribute_module as distribute_module
    from xla_dtensor.api import distribute_tensor as distribute_tensor
    from xla_dtensor.calling_jax import call_jax as call_jax
    from xla_dtensor.compiled_step import compile as compile
    from xla_dtensor.core import Layout as Layout
    from xla_dtensor.core import OpSharding as OpSharding
    from xla_dtensor.custom_sharding import custom_shard as custom_shard
    from xla_dtensor.data import MpDeviceLoader as MpDeviceLoader
    from xla_dtensor.data import PackedBatches as PackedBatches
    from xla_dtensor.data import ProcessPart as ProcessPart
    from xla_dtensor.data import ShardedLoader as ShardedLoader
    from xla_dtensor.data import ShardedSampler as ShardedSampler
    from xla_dtensor.data import pack_sequences as pack_sequences
    from xla_dtensor.data import process_part as process_part
    from xla_dtensor.data import shard_batch as shard_batch
    from xla_dtensor.deferred.materialization import materialize as materialize
    from xla_dtensor.device_mesh import DeviceMesh as DeviceMesh
    from xla_dtensor.device_mesh import init_device_mesh as init_device_mesh
    from xla_dtensor.dtensor import DTensor as DTensor
    from xla_dtensor.explaining import explain as explain
    from xla_dtensor.explicit_redistribution import (
        ExplicitRedistributionContext as ExplicitRedistributionContext,
    )
    from xla_dtensor.factories import empty as empty
    from xla_dtensor.factories import full as full
    from xla_dtensor.factories import ones as ones
    from xla_dtensor.factories import rand as rand
    from xla_dtensor.factories import randn as randn
    from xla_dtensor.factories import zeros as zeros
    from xla_dtensor.fsdp_module import FSDPModule as FSDPModule
    from xla_dtensor.fsdp_module import fully_shard as fully_shard
    from xla_dtensor.installation import install as install
    from xla_dtensor.installation import uninstall as uninstall
    from xla_dtensor.job_meshes import job_mesh as job_mesh
    from xla_dtensor.linear_loss import linear_cross_entropy as linear_cross_entropy
    from xla_dtensor.live_counts import comm_counts as comm_counts
    from xla_dtensor.live_report import report_of as report_of
    from xla_dtensor.local_view import LocalView as LocalView
    from xla_dtensor.modes import implicit_replication as implicit_replication
    from xla_dtensor.modes import loss_parallel as loss_parallel
    from xla_dtensor.modes import strict_placements as strict_placements
    from xla_dtensor.module_sharding import shard_module as shard_module
    from xla_dtensor.module_sharding import sharding_plan as sharding_plan
    from xla_dtensor.preemption import Preemption as Preemption
    from xla_dtensor.processes import ProcessInfo as ProcessInfo
    from xla_dtensor.processes import init_distributed as init_distributed
    from xla_dtensor.profiling import profile as profile
    from xla_dtensor.program_check import check_same_program as check_same_program
    from xla_dtensor.program_check import program_checks as program_checks
    from xla_dtensor.remat import checkpoint_name as checkpoint_name
    from xla_dtensor.rng import is_rng_supported_mesh as is_rng_supported_mesh
    from xla_dtensor.rng import manual_seed as manual_seed
    from xla_dtensor.runtimes import get_runtime as get_runtime
    from xla_dtensor.runtimes import installed_runtimes as installed_runtimes
    from xla_dtensor.runtimes.attention_choice import attention_kernel as attention_kernel
    from xla_dtensor.runtimes.value_checks import check_values as check_values
    from xla_dtensor.scanned_layers import ScannedLayers as ScannedLayers
    from xla_dtensor.scanned_layers import scan_layers as scan_layers
    from xla_dtensor.shard_position import (
        compute_local_shape_and_global_offset as compute_local_shape_and_global_offset,
    )
    from xla_dtensor.skip_dispatch import SkipDTensorDispatch as SkipDTensorDispatch
    from xla_dtensor.visualizing import visualize_sharding as visualize_sharding

_WHERE = {
    "DTensor": "xla_dtensor.dtensor",
    "DeviceMesh": "xla_dtensor.device_mesh",
    "ExplicitRedistributionContext": "xla_dtensor.explicit_redistribution",
    "FSDPModule": "xla_dtensor.fsdp_module",
    "Layout": "xla_dtensor.core",
    "LocalView": "xla_dtensor.local_view",
    "Mesh": "mesh_utils",
    "MpDeviceLoader": "xla_dtensor.data",
    "OpSharding": "xla_dtensor.core",
    "PackedBatches": "xla_dtensor.data",
    "Preemption": "xla_dtensor.preemption",
    "ProcessInfo": "xla_dtensor.processes",
    "ProcessPart": "xla_dtensor.data",
    "ScannedLayers": "xla_dtensor.scanned_layers",
    "ShardedLoader": "xla_dtensor.data",
    "ShardedSampler": "xla_dtensor.data",
    "SkipDTensorDispatch": "xla_dtensor.skip_dispatch",
    "attention_kernel": "xla_dtensor.runtimes.attention_choice",
    "call_jax": "xla_dtensor.calling_jax",
    "check_same_program": "xla_dtensor.program_check",
    "check_values": "xla_dtensor.runtimes.value_checks",
    "checkpoint_name": "xla_dtensor.remat",
    "comm_counts": "xla_dtensor.live_counts",
    "compile": "xla_dtensor.compiled_step",
    "compile_for": "xla_dtensor.aot",
    "compute_local_shape_and_global_offset": "xla_dtensor.shard_position",
    "custom_shard": "xla_dtensor.custom_sharding",
    "distribute_module": "xla_dtensor.api",
    "distribute_tensor": "xla_dtensor.api",
    "empty": "xla_dtensor.factories",
    "explain": "xla_dtensor.explaining",
    "full": "xla_dtensor.factories",
    "fully_shard": "xla_dtensor.fsdp_module",
    "get_runtime": "xla_dtensor.runtimes",
    "implicit_replication": "xla_dtensor.modes",
    "init_device_mesh": "xla_dtensor.device_mesh",
    "init_distributed": "xla_dtensor.processes",
    "install": "xla_dtensor.installation",
    "installed_runtimes": "xla_dtensor.runtimes",
    "is_rng_supported_mesh": "xla_dtensor.rng",
    "job_mesh": "xla_dtensor.job_meshes",
    "linear_cross_entropy": "xla_dtensor.linear_loss",
    "loss_parallel": "xla_dtensor.modes",
    "manual_seed": "xla_dtensor.rng",
    "materialize": "xla_dtensor.deferred",
    "ones": "xla_dtensor.factories",
    "pack_sequences": "xla_dtensor.data",
    "process_part": "xla_dtensor.data",
    "profile": "xla_dtensor.profiling",
    "program_checks": "xla_dtensor.program_check",
    "rand": "xla_dtensor.factories",
    "randn": "xla_dtensor.factories",
    "report_of": "xla_dtensor.live_report",
    "scan_layers": "xla_dtensor.scanned_layers",
    "shard_batch": "xla_dtensor.data",
    "shard_module": "xla_dtensor.module_sharding",
    "sharding_plan": "xla_dtensor.module_sharding",
    "strict_placements": "xla_dtensor.modes",
    "uninstall": "xla_dtensor.installation",
    "visualize_sharding": "xla_dtensor.visualizing",
    "zeros": "xla_dtensor.factories",
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


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'xla_dtensor' has no attribute {name!r}")
    value = getattr(importlib.import_module(_WHERE[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
