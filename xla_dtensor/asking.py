"""Mark in a trace what is redistributed because somebody asked for it.

See :mod:`xla_dtensor.explicit_redistribution`, which looks for the marks.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from xla_dtensor.device_mesh import DeviceMesh
from xla_dtensor.report.asked_communication import ANY, scope_name
from xla_dtensor.runtimes.registry import get_runtime

__all__ = ["asking", "last_mesh"]

_meshes: list[DeviceMesh] = []


def asking(
    mesh: DeviceMesh | None = None, before: Sequence[Any] = (), after: Sequence[Any] = ()
) -> AbstractContextManager[Any]:
    """Return a context in which a constraint counts as asked for.

    Args:
        mesh: The mesh that the placements refer to; None for an annotation of a value of which it
            is not known how it lies.
        before: The placements that the value has, one per axis.
        after: Those that it is to have.
    """
    if torch.compiler.is_compiling():
        return nullcontext()  # Dynamo's graph keeps no scopes.
    if mesh is None:
        return get_runtime().scope(ANY)
    _meshes[:] = [mesh]
    changes = zip(mesh.value.axis_names, map(_letter, before), map(_letter, after), strict=True)
    return get_runtime().scope(scope_name(changes))


def last_mesh() -> DeviceMesh | None:
    """Return the mesh of the last redistribute in this process; None if there was none."""
    return _meshes[0] if _meshes else None


def _letter(placement: Any) -> str:
    if placement.is_partial():
        return "P"
    return f"S{placement.dim}" if hasattr(placement, "dim") else "R"
