"""ShardingSpecs of torch_xla's loaders, read as placements.

``ShardingSpec(mesh, ("data", None), minibatch=True)`` says that each process passes its own rows,
whole along the other dims; ``minibatch=False`` that each passes the whole batch. Tensors of another
rank than the spec's are replicated, as torch_xla does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from xla_dtensor.core import Layout
from xla_dtensor.core.errors import ArgumentTypeError, DataError
from xla_dtensor.dtensor.mesh import DeviceMesh, as_device_mesh
from xla_dtensor.dtensor.redistribute import torch_placements
from xla_dtensor.hosts.data.exchange import feeding_processes

__all__ = ["placements_for", "read_sharding_specs"]

_MANY_DIMS = 64


def read_sharding_specs(asked: Any) -> tuple[DeviceMesh, bool | range]:
    """Read what ``input_sharding=`` says: one spec, or specs in the batch's structure.

    Returns:
        The mesh, and what each process passes whole: True, or all dims but the rows.

    Raises:
        ArgumentTypeError: Something else than specs.
        DataError: Specs of several meshes, or of both kinds of minibatch.
    """
    specs = list(_specs(asked))
    meshes = {as_device_mesh(spec.mesh) for spec in specs}
    kinds = {bool(spec.minibatch) for spec in specs}
    if len(meshes) != 1 or len(kinds) != 1:
        raise DataError(
            f"input_sharding has {len(specs)} specs on {len(meshes)} meshes with "
            f"minibatch={sorted(kinds)}. A batch lies on one mesh, and a process passes its own "
            "rows or the whole batch. Pass specs that agree on both."
        )
    return meshes.pop(), range(1, _MANY_DIMS) if kinds.pop() else True


def _specs(asked: Any) -> Iterator[Any]:
    if hasattr(asked, "partition_spec") and hasattr(asked, "mesh"):
        yield asked
    elif isinstance(asked, (Mapping, list, tuple)):
        for each in asked.values() if isinstance(asked, Mapping) else asked:
            if each is not None:
                yield from _specs(each)
    else:
        raise ArgumentTypeError(
            f"input_sharding holds an object of type={type(asked).__name__}. It takes what "
            "torch_xla's loaders take. Pass a ShardingSpec, or ShardingSpecs in the structure of "
            "the batch."
        )


def placements_for(asked: Any, ndim: int, path: tuple[Any, ...]) -> Any:
    """Return the placements that a spec means for a tensor; anything else as it is."""
    if not hasattr(asked, "partition_spec"):
        return asked
    spec, mesh = tuple(asked.partition_spec), as_device_mesh(asked.mesh).value
    if len(spec) == ndim:
        return torch_placements(Layout.from_partition_spec(spec, mesh))
    if ndim and asked.minibatch and len(feeding_processes(mesh)) > 1:
        raise DataError(
            f"A ShardingSpec with partition_spec={spec} and minibatch=True was given for a tensor "
            f"of {ndim} dims, at {path!r}. It is for {len(spec)} dims, and a tensor of each "
            "process's own rows cannot be replicated. Pass specs in the structure of the batch."
        )
    return None
