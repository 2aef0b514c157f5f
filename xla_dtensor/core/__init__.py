"""The core: placements, layouts, and XLA's shardings. Standard library, numpy and mesh_utils only.

    placements -> Layout -> OpSharding

See `layout` and `op_sharding` for the two ideas, `local_shape` for what one device holds.

Example:
    >>> from mesh_utils import Mesh
    >>> mesh = Mesh.arange((2, 4), ("dp", "tp"))
    >>> str(Layout.from_placements([Shard(0), Shard(1)], 2, mesh).op_sharding())
    '{devices=[2,4]<=[8]}'
"""

from xla_dtensor.core.errors import LayoutError, OpShardingError
from xla_dtensor.core.layout import OPEN, Layout
from xla_dtensor.core.local_shape import LocalShape, local_shape, torch_indices
from xla_dtensor.core.op_sharding import OpSharding
from xla_dtensor.core.placements import (
    AxisPart,
    Gap,
    Partial,
    PlacementRecord,
    Replicate,
    Shard,
    StridedShard,
)
from xla_dtensor.core.spanning import ManualRegion
from xla_dtensor.core.translate import layout_of_op_sharding

__all__ = [
    "OPEN",
    "AxisPart",
    "Gap",
    "Layout",
    "LayoutError",
    "LocalShape",
    "ManualRegion",
    "OpSharding",
    "OpShardingError",
    "Partial",
    "PlacementRecord",
    "Replicate",
    "Shard",
    "StridedShard",
    "layout_of_op_sharding",
    "local_shape",
    "torch_indices",
]
