"""Collectives over mesh axes, inside a manual region or on local views.

Each takes a :class:`~xla_dtensor.dtensor.manual.ManualTensor` or a
:class:`~xla_dtensor.dtensor.local.LocalView` and an axis of its region, or a tuple of axes, the
first being the outermost: the members of a group are numbered in that order. All are
differentiable, twice as well. In the backward pass each becomes its transpose:

=================  =========================================================
psum               psum
pmean              pmean
pmax, pmin         psum, to the members that hold the extreme, in equal parts
all_gather         reduce_scatter, and the reverse
all_to_all         all_to_all back
permute            permute back
=================  =========================================================

On a LocalView a gradient that is known to be equal on all members is the whole gradient already:
it is not summed again. So what comes back to a view that differs along an axis is said to differ
there too, even where the numbers are equal: each is the gradient of a value of its own.

On 4 devices along "tp", holding [0, 1], [2, 3], [4, 5], [6, 7]::

    psum(x, "tp")               [12, 16] on each
    all_gather(x, "tp")         [0, 1, 2, 3, 4, 5, 6, 7] on each
    permute(x, "tp", [(0, 1)])  [0, 0], [0, 1], [0, 0], [0, 0]
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.device_mesh import DeviceMesh as TorchDeviceMesh

from mesh_utils import Axis
from xla_dtensor.core.errors import LocalViewError, ManualRegionError
from xla_dtensor.dtensor.dynamo import one_call
from xla_dtensor.dtensor.local_border import PerDeviceTensor
from xla_dtensor.dtensor.mesh import AxisGroup, as_device_mesh, mesh_text
from xla_dtensor.runtimes.whole_ops import LinearResult, OneResult

if TYPE_CHECKING:
    from xla_dtensor.dtensor.local import LocalView

__all__ = ["BY_NAME", "all_gather", "axis_index", "pmax", "pmin", "psum"]


# ---------------------------- Collectives over mesh axes, inside a manual region or on local views

Axes = Axis | tuple[Axis, ...]


@one_call
def psum(x: torch.Tensor, axis: Axes) -> PerDeviceTensor:
    """Sum over the members of each group.

    Args:
        x: A manual tensor or local view.
        axis: An axis of its region, or a tuple of axes.

    Returns:
        The sum, of x's shape, equal on all members.

    Raises:
        ManualRegionError: x is not manual, or not along that axis.
    """
    tensor, axes, _ = _read("psum", x, axis)
    return _Sum.apply(tensor, axes)  # pyright: ignore[reportReturnType]


@one_call
def pmean(x: torch.Tensor, axis: Axes) -> PerDeviceTensor:
    """Average over the members of each group; see :func:`psum`."""
    tensor, axes, size = _read("pmean", x, axis)
    return _Sum.apply(tensor, axes) / size  # pyright: ignore


@one_call
def pmax(x: torch.Tensor, axis: Axes) -> PerDeviceTensor:
    """Take the largest value over the members of each group, per element; see :func:`psum`."""
    tensor, axes, _ = _read("pmax", x, axis)
    return _Extreme.apply(tensor, axes, "max")  # pyright: ignore[reportReturnType]


@one_call
def pmin(x: torch.Tensor, axis: Axes) -> PerDeviceTensor:
    """Take the smallest value over the members of each group, per element; see :func:`psum`."""
    tensor, axes, _ = _read("pmin", x, axis)
    return _Extreme.apply(tensor, axes, "min")  # pyright: ignore[reportReturnType]


@one_call
def all_gather(x: torch.Tensor, axis: Axes, dim: int = 0) -> PerDeviceTensor:
    """Join the tensors of all members along a dim, in the members' order.

    Args:
        x: A manual tensor or local view with at least one dim.
        axis: An axis of its region, or a tuple of axes.
        dim: The dim to join along; it becomes longer by the number of members.

    Returns:
        The joined tensor, equal on all members.

    Raises:
        ManualRegionError: x is not manual, not along that axis, or has no such dim.
    """
    tensor, axes, _ = _read("all_gather", x, axis)
    return _Gather.apply(tensor, axes, _dim("all_gather", tensor, dim))  # pyright: ignore


@one_call
def reduce_scatter(x: torch.Tensor, axis: Axes, dim: int = 0) -> PerDeviceTensor:
    """Sum over the members and leave each its block of the sum.

    Args:
        x: A manual tensor or local view.
        axis: An axis of its region, or a tuple of axes.
        dim: The dim that is cut into one block per member; they must divide it.

    Returns:
        The member's block.

    Raises:
        ManualRegionError: x is not manual, not along that axis, or does not divide.
    """
    tensor, axes, size = _read("reduce_scatter", x, axis)
    dim = _dim("reduce_scatter", tensor, dim, size)
    return _Scatter.apply(tensor, axes, dim)  # pyright: ignore[reportReturnType]


@one_call
def all_to_all(x: torch.Tensor, axis: Axes, split_dim: int, concat_dim: int) -> PerDeviceTensor:
    """Send block i of each member's tensor to member i, which joins what it gets.

    Args:
        x: A manual tensor or local view.
        axis: An axis of its region, or a tuple of axes.
        split_dim: The dim that is cut into one block per member; they must divide it.
        concat_dim: The dim along which the received blocks are joined, in the members' order.

    Returns:
        The joined blocks.

    Raises:
        ManualRegionError: x is not manual, not along that axis, or does not divide.
    """
    tensor, axes, size = _read("all_to_all", x, axis)
    split = _dim("all_to_all", tensor, split_dim, size)
    return _AllToAll.apply(tensor, axes, split, _dim("all_to_all", tensor, concat_dim))  # pyright: ignore


@one_call
def permute(x: torch.Tensor, axis: Axes, pairs: Iterable[tuple[int, int]]) -> PerDeviceTensor:
    """Send each source member's tensor to its destination; who receives nothing gets zeros.

    Args:
        x: A manual tensor or local view.
        axis: An axis of its region, or a tuple of axes.
        pairs: (source, destination) member numbers, each number once as source and once as
            destination at most.

    Returns:
        What the member received.

    Raises:
        ManualRegionError: x is not manual, not along that axis, or the pairs are no permutation.

    Example:
        ``permute(x, "tp", [(i, (i + 1) % 4) for i in range(4)])`` shifts by one around a ring of 4.
    """
    tensor, axes, size = _read("permute", x, axis)
    moves = tuple((int(source), int(destination)) for source, destination in pairs)
    sources, destinations = ([move[side] for move in moves] for side in (0, 1))
    members = set(range(size))
    if len(set(sources)) < len(moves) or len(set(destinations)) < len(moves):
        problem = "A member sends or receives twice"
    elif not {*sources, *destinations} <= members:
        problem = f"The members are numbered from 0 to {size - 1}"
    else:
        return _Permute.apply(tensor, axes, moves)  # pyright: ignore[reportReturnType]
    raise ManualRegionError(
        f"permute was called with pairs={moves} over {axes}, of {size} members. {problem}. Pass "
        "(source, destination) pairs, each member once on each side at most."
    )


@one_call
def axis_index(x: torch.Tensor, axis: Axes) -> PerDeviceTensor:
    """Return each device's number in its group, an int64 scalar.

    Args:
        x: Any manual tensor or local view of the region; its values do not matter.
        axis: An axis of its region, or a tuple of axes.

    Raises:
        ManualRegionError: x is not manual, or not along that axis.
    """
    tensor, axes, _ = _read("axis_index", x, axis)
    return _collective("axis_index", tensor, axes)


def _read(function: str, x: Any, axis: Axes) -> tuple[PerDeviceTensor, tuple[Axis, ...], int]:
    if not isinstance(x, PerDeviceTensor):
        raise ManualRegionError(
            f"{function} was called on a {type(x).__name__}. Collectives work on what each device "
            "has. Call enable_manual_sharding or to_local first; on a global tensor use the "
            "ordinary op, and XLA communicates."
        )
    names = axis if isinstance(axis, tuple) else (axis,)
    mesh = x.region.mesh
    axes = tuple(mesh.axis_names[mesh.axis_index(name)] for name in names)
    if not set(axes) <= set(x.region.axes) or len(set(axes)) < len(axes) or not axes:
        raise ManualRegionError(
            f"{function} was called over axis={axis!r} on a tensor that is manual over "
            f"{x.region.axes} of the mesh {mesh_text(mesh)}. Only manual axes have members that "
            "can be told apart, each once. Pass one of them or a tuple, or enable manual sharding "
            "for that axis too."
        )
    return x, axes, prod(mesh.size(name) for name in axes)


def _dim(function: str, tensor: PerDeviceTensor, dim: int, divided_by: int = 1) -> int:
    if not -tensor.ndim <= dim < tensor.ndim or tensor.shape[dim] % divided_by:
        raise ManualRegionError(
            f"{function} was called along dim={dim} of a manual tensor of local "
            f"shape={tuple(tensor.shape)} with {divided_by} members. It has no such dim, or the "
            "members do not divide it. Pass a dim that they divide, or pad it."
        )
    return dim % tensor.ndim


def _collective(name: str, x: Any, axes: tuple[Axis, ...], **options: Any) -> Any:
    return x._communicated(name, axes, options)


def _same_over(x: Any, axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
    """Return those of `axes` along which x is known to be equal on all members."""
    varies = x._varies_over(axes)
    return tuple(axis for axis in axes if axis not in varies)


def _members(x: Any, axes: tuple[Axis, ...]) -> int:
    return prod(x.region.mesh.size(axis) for axis in axes)


def _summed(grad: Any, axes: tuple[Axis, ...]) -> Any:
    """Sum a gradient over the members whose parts of it differ; equal ones are whole already."""
    over = grad._varies_over(axes)
    return _Sum.apply(grad, over) if over else grad


class _Sum(LinearResult):
    @staticmethod
    def forward(ctx: Any, x: Any, axes: Any) -> Any:
        # Of n equal members each contributes the whole gradient.
        ctx.axes, ctx.factor = axes, _members(x, _same_over(x, axes))
        ctx.differ = frozenset(x._varies_over(axes))
        return _collective("all_reduce", x, axes, op="sum")

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        total = _summed(grad, ctx.axes)
        total = total if ctx.factor == 1 else total * ctx.factor
        return total._labelled(ctx.differ), None


class _Extreme(OneResult):
    @staticmethod
    def forward(ctx: Any, x: Any, axes: Any, op: str) -> Any:
        extreme = _collective("all_reduce", x, axes, op=op)
        ctx.axes, ctx.differ = axes, x._varies_over(axes)
        ctx.save_for_backward(x, extreme)
        return extreme

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        x, extreme = ctx.saved_tensors
        holds = (x == extreme).to(grad.dtype)
        share = holds / psum(holds, ctx.differ) if ctx.differ else holds
        return _summed(grad, ctx.axes) * share, None, None


class _Gather(LinearResult):
    @staticmethod
    def forward(ctx: Any, x: Any, axes: Any, dim: int) -> Any:
        ctx.options = (axes, dim)
        return _collective("all_gather", x, axes, dim=dim)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        axes, dim = ctx.options
        if len(grad._varies_over(axes)) == len(axes):
            return _Scatter.apply(grad, axes, dim), None, None
        return _own_block(_summed(grad, axes), axes, dim), None, None


def _own_block(x: Any, axes: tuple[Axis, ...], dim: int) -> Any:
    """Return the member's block along a dim of a tensor that all members have whole."""
    size = x.shape[dim] // _members(x, axes)
    start = _collective("axis_index", x, axes) * size
    return x.index_select(dim, start + torch.arange(size))


class _Scatter(LinearResult):
    @staticmethod
    def forward(ctx: Any, x: Any, axes: Any, dim: int) -> Any:
        ctx.options = (axes, dim)
        ctx.factor = _members(x, _same_over(x, axes))
        ctx.differ = frozenset(x._varies_over(axes))
        return _collective("reduce_scatter", x, axes, dim=dim)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        gathered = _Gather.apply(grad, *ctx.options)
        gathered: Any = gathered if ctx.factor == 1 else gathered * ctx.factor  # pyright: ignore
        return gathered._labelled(ctx.differ), None, None


class _AllToAll(LinearResult):
    @staticmethod
    def forward(ctx: Any, x: Any, axes: Any, split_dim: int, concat_dim: int) -> Any:
        ctx.options = (axes, concat_dim, split_dim)
        return _collective("all_to_all", x, axes, split_dim=split_dim, concat_dim=concat_dim)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return _AllToAll.apply(grad, *ctx.options), None, None, None


class _Permute(LinearResult):
    @staticmethod
    def forward(ctx: Any, x: Any, axes: Any, pairs: tuple[tuple[int, int], ...]) -> Any:
        ctx.options = (axes, tuple((to, of) for of, to in pairs))
        return _collective("permute", x, axes, pairs=pairs)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return _Permute.apply(grad, *ctx.options), None, None


# ---------------------------------------------------- torch's functional collectives on LocalViews
#
# ``torch.distributed._functional_collectives`` names a group of ranks by a DeviceMesh and a dim. On
# a LocalView that is a mesh axis, and no process group is needed::
#
#     funcol.all_reduce(view, "sum", (mesh, 1))          psum(view, "tp")
#     funcol.all_gather_tensor(view, 0, mesh["tp"])      all_gather(view, "tp", 0)
#
# :func:`~xla_dtensor.install` lets torch's own functions come here when they get a LocalView. The
# results are LocalViews; their ``wait()`` has nothing to wait for.


@one_call
def _all_reduce(self: LocalView, reduceOp: str, group: Any, tag: str = "") -> torch.Tensor:
    reduced = _reduced("all_reduce", _as_number(self), reduceOp, _axes("all_reduce", group))
    return reduced.to(self.dtype)


def _as_number(view: Any) -> Any:
    """Return what has no sum in its own dtype in one that has: a sum of bools is whether any is."""
    return view.to(torch.int32) if view.dtype == torch.bool else view


def _reduced(function: str, view: LocalView, op: str, axes: tuple[Axis, ...]) -> torch.Tensor:
    reduce = {
        "sum": psum,
        "avg": pmean,
        "max": pmax,
        "min": pmin,
    }.get(op.lower())
    if reduce is not None:
        return reduce(view, axes)
    if op.lower() in {"product", "prod"}:
        return all_gather(view.unsqueeze(0), axes, 0).prod(0, dtype=view.dtype)
    raise LocalViewError(
        f"{function} was called with reduceOp={op!r} on a local view. There is no such reduction "
        "here. Pass 'sum', 'avg', 'max', 'min' or 'product'."
    )


@one_call
def _all_gather_tensor(self: LocalView, gather_dim: int, group: Any, tag: str = "") -> torch.Tensor:
    return all_gather(self, _axes("all_gather_tensor", group), gather_dim)


@one_call
def _reduce_scatter_tensor(
    self: LocalView, reduceOp: str, scatter_dim: int, group: Any, tag: str = ""
) -> torch.Tensor:
    axes = _axes("reduce_scatter_tensor", group)
    op = reduceOp.lower()
    if op in {"sum", "avg"}:
        scattered: Any = reduce_scatter(_as_number(self), axes, scatter_dim)
        return scattered.to(self.dtype) if op == "sum" else scattered / _size(self, axes)
    # Each member gets all the blocks with its number, and reduces them.
    blocks = all_to_all(self, axes, scatter_dim, scatter_dim)
    parts = blocks.unflatten(scatter_dim, (_size(self, axes), -1))
    reduce: dict[str, Callable[..., Any]] = {
        "max": torch.amax,
        "min": torch.amin,
        "product": partial(torch.prod, dtype=self.dtype),
        "prod": partial(torch.prod, dtype=self.dtype),
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
    return all_to_all(self, axes, 0, 0)


@one_call
def _broadcast(self: LocalView, src: int, group: Any, tag: str = "") -> torch.Tensor:
    axes = _axes("broadcast", group)
    if not 0 <= src < _size(self, axes):
        raise LocalViewError(
            f"broadcast was called with src={src} over the axes {axes}. They have "
            f"{_size(self, axes)} members, numbered from 0. Pass the member's number."
        )
    is_source = axis_index(self, axes) == src
    source = _as_number(torch.where(is_source, self, torch.zeros_like(self)))
    return psum(source, axes).to(self.dtype)


@one_call
def _permute_tensor(
    self: LocalView, src_dst: Sequence[int], group: Any, tag: str = ""
) -> torch.Tensor:
    pairs = list(enumerate(int(target) for target in src_dst))
    return permute(self, _axes("permute_tensor", group), pairs)


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
