"""torch_xla's annotation API, on every runtime.

Scripts written for ``torch_xla.distributed.spmd`` change one import::

    import xla_dtensor.spmd as xs           # was: import torch_xla.distributed.spmd as xs

    mesh = xs.Mesh(range(8), (2, 4), ("dp", "tp"))
    xs.mark_sharding(model.fc.weight, mesh, ("tp", None))

Names, arguments and attributes are torch_xla's; where it is silently wrong, this is not. On the
torch_xla runtime that is all; on the JAX runtime the few calls of torch_xla that are no annotations
are replaced as docs/coming_from.md lists. XLAShardedTensors are DTensors, so ``placements``,
``redistribute``, ``xla_dtensor.compile`` and the reports work on them.
"""

import sys

from xla_dtensor.spmd.annotate import (
    EinsumLinear,
    MarkShardingFunction,
    ShardingSpec,
    XLAPatchedLinear,
    annotate_custom_sharding,
    apply_backward_optimization_barrier,
    apply_xla_patch_to_nn_linear,
    auto_policy,
    clear_sharding,
    disable_manual_sharding,
    enable_manual_sharding,
    mark_sharding,
    mark_sharding_with_gradients,
    xla_distribute_module,
    xla_distribute_tensor,
    xla_patched_nn_linear_forward,
)
from xla_dtensor.spmd.mesh import (
    HybridMesh,
    Mesh,
    ShardingType,
    convert_to_xla_mesh,
    get_1d_mesh,
    get_global_mesh,
    set_global_mesh,
)
from xla_dtensor.spmd.sharded_tensor import (
    XLAShard,
    XLAShardedTensor,
    unwrap_sharded_tensor,
    visualize_sharding,
    visualize_tensor_sharding,
    wrap_as_sharded_tensor,
    wrap_if_sharded,
)

__all__ = [
    "EinsumLinear",
    "HybridMesh",
    "MarkShardingFunction",
    "Mesh",
    "ShardingSpec",
    "ShardingType",
    "XLAPatchedLinear",
    "XLAShard",
    "XLAShardedTensor",
    "annotate_custom_sharding",
    "apply_backward_optimization_barrier",
    "apply_xla_patch_to_nn_linear",
    "auto_policy",
    "clear_sharding",
    "convert_to_xla_mesh",
    "disable_manual_sharding",
    "enable_manual_sharding",
    "get_1d_mesh",
    "get_global_mesh",
    "mark_sharding",
    "mark_sharding_with_gradients",
    "set_global_mesh",
    "unwrap_sharded_tensor",
    "visualize_sharding",
    "visualize_tensor_sharding",
    "wrap_as_sharded_tensor",
    "wrap_if_sharded",
    "xla_distribute_module",
    "xla_distribute_tensor",
    "xla_patched_nn_linear_forward",
    "xla_sharding",
]

# torch_xla has some of these names in a submodule only, which scripts reach by this name.
xla_sharding = sys.modules[__name__]
