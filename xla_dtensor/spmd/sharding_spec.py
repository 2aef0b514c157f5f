"""ShardingSpec: a mesh and a partition spec, kept to be applied to tensors of one rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from xla_dtensor.argument_types import argument_types
from xla_dtensor.core import Layout
from xla_dtensor.runtimes.registry import get_runtime
from xla_dtensor.spmd.annotate import mark_sharding
from xla_dtensor.spmd.mesh import as_mesh

__all__ = ["ShardingSpec"]


@argument_types
@dataclass
class ShardingSpec:
    """How the tensors of a data loader are to lie.

    Args:
        mesh: The mesh.
        partition_spec: Per dim an axis (name or number), a tuple of axes, or None.
        minibatch: Whether each process passes its own part of the batch. In one process both mean
            the same.

    Raises:
        LayoutError: The partition spec does not fit the mesh.

    Example:
        >>> from xla_dtensor.spmd import Mesh
        >>> rows = ShardingSpec(Mesh(range(8), (4, 2), ("x", "y")), ("x", None))
        >>> rows.can_apply(torch.ones(8, 2)), rows.can_apply(torch.ones(8))
        (True, False)
    """

    mesh: Any
    partition_spec: tuple[Any, ...]
    minibatch: bool | None = False

    def __post_init__(self) -> None:
        self._layout = Layout.from_partition_spec(
            tuple(self.partition_spec), as_mesh(self.mesh, "ShardingSpec")
        )

    def can_apply(self, t: torch.Tensor) -> bool:
        """Tell whether the spec has as many entries as `t` has dims."""
        return t.ndim == len(self.partition_spec)

    def apply(self, t: torch.Tensor) -> None:
        """Annotate `t` in place; see :func:`xla_dtensor.spmd.mark_sharding`."""
        mark_sharding(t, self.mesh, self.partition_spec)

    def xla_spec(self, t: torch.Tensor) -> Any:
        """Return torch_xla's own object for `t`, as its data loaders want it.

        Args:
            t: A host tensor.

        Returns:
            A ``torch_xla._XLAC.XlaShardingSpec``, None when the spec is for another rank.

        Raises:
            UnsupportedOpError: The runtime is not torch_xla, and has no such loaders.
        """
        if not self.can_apply(t):
            return None
        runtime = get_runtime()
        sharding = self._layout.op_sharding(runtime.root(self._layout.mesh))
        return runtime.input_sharding(t, sharding, bool(self.minibatch))
