"""torch's functional collectives on LocalViews.

``torch.distributed._functional_collectives`` names a group of ranks by a DeviceMesh and a dim. On a
LocalView that is a mesh axis, and no process group is needed::

    funcol.all_reduce(view, "sum", (mesh, 1))          psum(view, "tp")
    funcol.all_gather_tensor(view, 0, mesh["tp"])      all_gather(view, "tp", 0)

:func:`~xla_dtensor.install` lets torch's own functions come here when they get a LocalView. The
results are LocalViews; their ``wait()`` has nothing to wait for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh as TorchDeviceMesh

from mesh_utils import Axis
from xla_dtensor import collectives
from xla_dtensor.axis_groups import AxisGroup
from xla_dtensor.device_mesh import as_device_mesh
from xla_dtensor.dynamo_calls import one_call
from xla_dtensor.errors import LocalViewError
from xla_dtensor.local_view import LocalView

__all__ = ["BY_NAME"]


@one_call
def _all_reduce(self: LocalView, reduceOp: str, group: Any, tag: str = "") -> torch.Tensor:
    return _reduced("all_reduce", self, reduceOp, _axes("all_reduce", group))


def _reduced(function: str, view: LocalView, op: str, axes: tuple[Axis, ...]) -> torch.Tensor:
    reduce = {
        "sum": collectives.psum,
        "avg": collectives.pmean,
        "max": collectives.pmax,
        "min": collectives.pmin,
    }.get(op.lower())
    if reduce is not None:
        return reduce(view, axes)
    if op.lower() in {"product", "prod"}:
        return collectives.all_gather(view.unsqueeze(0), axes, 0).prod(0)
    raise LocalViewError(
        f"{function} was called with reduceOp={op!r} on a local view. There is no such reduction "
        "here. Pass 'sum', 'avg', 'max', 'min' or 'product'."
    )


@one_call
def _all_gather_tensor(self: LocalView, gather_dim: int, group: Any, tag: str = "") -> torch.Tensor:
    return collectives.all_gather(self, _axes("all_gather_tensor", group), gather_dim)


@one_call
def _reduce_scatter_tensor(
    self: LocalView, reduceOp: str, scatter_dim: int, group: Any, tag: str = ""
) -> torch.Tensor:
    axes = _axes("reduce_scatter_tensor", group)
    op = reduceOp.lower()
    if op in {"sum", "avg"}:
        scattered = collectives.reduce_scatter(self, axes, scatter_dim)
        return scattered if op == "sum" else scattered / _size(self, axes)
    # Each member gets all the blocks with its number, and reduces them.
    blocks = collectives.all_to_all(self, axes, scatter_dim, scatter_dim)
    parts = blocks.unflatten(scatter_dim, (_size(self, axes), -1))
    reduce: dict[str, Callable[..., Any]] = {
        "max": torch.amax,
        "min": torch.amin,
        "product": torch.prod,
        "prod": torch.prod,
    }
    if op not in reduce:
        _reduced("reduce_scatter_tensor", self, reduceOp, axes)
    return reduce[op](parts, scatter_dim)


@one_call
def _all_to_all_single(
    self: LocalView,
    output_split_sizes: Sequence[int] | None,
    input_split_sizes: Sequence[int] | None,
    group: Any,
    tag: str = "",
) -> torch.Tensor:
    axes = _axes("all_to_all_single", group)
    equal = [self.shape[0] // _size(self, axes)] * _size(self, axes)
    for name, sizes in (
        ("output_split_sizes", output_split_sizes),
        ("input_split_sizes", input_split_sizes),
    ):
        if sizes is not None and [int(size) for size in sizes] != equal:
            raise LocalViewError(
                f"all_to_all_single was called with {name}={list(sizes)} on a local view of "
                f"shape={tuple(self.shape)}. All devices run one program, so their blocks have one "
                f"size. Pass None, or {equal}; pad blocks that are shorter."
            )
    return collectives.all_to_all(self, axes, 0, 0)


@one_call
def _broadcast(self: LocalView, src: int, group: Any, tag: str = "") -> torch.Tensor:
    axes = _axes("broadcast", group)
    if not 0 <= src < _size(self, axes):
        raise LocalViewError(
            f"broadcast was called with src={src} over the axes {axes}. They have "
            f"{_size(self, axes)} members, numbered from 0. Pass the member's number."
        )
    is_source = collectives.axis_index(self, axes) == src
    return collectives.psum(torch.where(is_source, self, torch.zeros_like(self)), axes)


@one_call
def _permute_tensor(
    self: LocalView, src_dst: Sequence[int], group: Any, tag: str = ""
) -> torch.Tensor:
    pairs = list(enumerate(int(target) for target in src_dst))
    return collectives.permute(self, _axes("permute_tensor", group), pairs)


def _wait_tensor(tensor: LocalView) -> torch.Tensor:
    return tensor


def _axes(function: str, group: Any) -> tuple[Axis, ...]:
    """Return the mesh axes that a group of torch's stands for."""
    if isinstance(group, AxisGroup):
        return (group.axis,)
    mesh, dim = group if isinstance(group, tuple) and len(group) == 2 else (group, None)
    if not isinstance(mesh, TorchDeviceMesh):
        raise LocalViewError(
            f"{function} was called with a group of type={type(group).__name__} on a local view. "
            "Its members are along mesh axes; there is no process group. Pass a DeviceMesh, or "
            "(DeviceMesh, dim)."
        )
    names = as_device_mesh(mesh).value.axis_names
    return tuple(names) if dim is None else (names[dim],)


def _size(view: LocalView, axes: tuple[Axis, ...]) -> int:
    size = 1
    for axis in axes:
        size *= view.region.mesh.size(axis)
    return size


BY_NAME: dict[str, Callable[..., Any]] = {
    "all_gather_tensor": _all_gather_tensor,
    "all_gather_tensor_autograd": _all_gather_tensor,
    "all_reduce": _all_reduce,
    "all_to_all_single": _all_to_all_single,
    "all_to_all_single_autograd": _all_to_all_single,
    "broadcast": _broadcast,
    "permute_tensor": _permute_tensor,
    "reduce_scatter_tensor": _reduce_scatter_tensor,
    "reduce_scatter_tensor_autograd": _reduce_scatter_tensor,
    "wait_tensor": _wait_tensor,
}
"""torch's function names and what they do on a LocalView."""
