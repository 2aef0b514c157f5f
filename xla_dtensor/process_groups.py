"""There are no process groups: what asks for one is told so, and what to use in its place."""

from __future__ import annotations

from typing import Any, NoReturn

from mesh_utils import Mesh
from xla_dtensor.errors import ProcessGroupError

__all__ = ["NoGroups", "refuse_collective", "refuse_group"]

# c10d has the collectives of torch.distributed, the others those of its functional collectives.
_NAMESPACES = frozenset({"c10d", "c10d_functional", "_c10d_functional"})


class NoGroups(list[str]):
    """The names of the process groups of a mesh's axes: none, and to look one up is refused.

    PyTorch looks them up by axis number, in a DeviceMesh's ``_dim_group_names``.

    Args:
        mesh: The mesh, for the message.
    """

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self._mesh = mesh

    def __getitem__(self, index: Any) -> NoReturn:
        refuse_group(self._mesh)


def refuse_group(mesh: Mesh) -> NoReturn:
    """Refuse to name the process group of an axis.

    Args:
        mesh: The mesh.

    Raises:
        ProcessGroupError: Always.
    """
    raise ProcessGroupError(
        f"The process group of an axis of the mesh ({mesh.axes_text()}) was asked for. One program "
        "runs on all its devices, and XLA makes their communication, so no axis has a group. Use "
        "redistribute, fully_shard in place of DistributedDataParallel, and collectives on "
        "x.to_local()."
    )


def refuse_collective(func: Any) -> None:
    """Refuse torch.distributed's collectives on DTensors; let all other ops pass.

    Args:
        func: An ``OpOverload``, called on a DTensor.

    Raises:
        ProcessGroupError: It is a collective among processes.
    """
    if func.namespace in _NAMESPACES and not func.__name__.startswith("wait_tensor"):
        raise ProcessGroupError(
            f"The collective {func} was called on a DTensor. Its value is whole, and processes "
            "have no parts of it to exchange. Call functional collectives on x.to_local(), or "
            "redistribute it."
        )
