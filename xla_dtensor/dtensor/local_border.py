"""Border: how a global tensor is cut into local views, and how they are put together.

Below autograd, on payloads. A worked example, 10 rows as [Partial(), Shard(0)] on (dp=2, tp=4)::

    (10,)        the payload: already the sum over dp
    (2, 10)      one row per device of dp: [the value, zeros], whose sum is the value
    (2, 12)      padded, because 4 does not divide 10
    local (3,)   entered with the layout [dp, tp], the leading dim dropped; sizes 3, 3, 3, 1 on tp

and back the same way: leave as (2, 12), sum over the leading dim, drop two rows.

`border_of` says how a tensor's border is, `Border.cut` goes in and `Border.joined` back. The other
sections are what stands at the border: uneven dims, a tensor that each device has for itself,
memory that a view shares with its source, reading a view from Python.

Which rows a device has is PyTorch's rule: `torch.chunk` once per mesh axis. Where these are no
tiles of XLA's (several axes on one uneven dim, strided shards with a gap) the rows are first put in
the order of the devices, which moves data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import numpy as np
import torch
from torch.autograd.graph import get_gradient_edge

from mesh_utils import Axis
from xla_dtensor.core import Layout, ManualRegion
from xla_dtensor.core.errors import LocalViewError
from xla_dtensor.core.local_shape import local_shape, torch_indices
from xla_dtensor.core.placements import entry_axis
from xla_dtensor.core.spanning import region_of
from xla_dtensor.runtimes.base import AddressableShard
from xla_dtensor.runtimes.functional import (
    enter_everywhere,
    gather_everywhere,
    is_traced,
    operand_everywhere,
    real_sizes,
    run_local_op,
)
from xla_dtensor.runtimes.nested import leaves, map_nested
from xla_dtensor.runtimes.registry import get_runtime
from xla_dtensor.runtimes.torch_own import ReadOnHost, make_wrapper
from xla_dtensor.runtimes.whole_ops import LinearResult, refuse_second
from xla_dtensor.runtimes.written import written_values

if TYPE_CHECKING:
    from xla_dtensor.dtensor.local import LocalView

__all__ = [
    "BACKWARD_PASSES",
    "Border",
    "Link",
    "Memory",
    "PerDeviceTensor",
    "Uneven",
    "asked_for",
    "border_of",
    "check_writes",
    "first_shard",
    "new_wrapper",
    "read_op",
    "run_backward",
    "run_uneven",
    "same_on_all",
    "shards_of",
    "spread_payload",
]

aten = torch.ops.aten


# ------------------------------------------------------------------------------------------ Border

_REDUCTIONS: dict[str, Any] = {
    "sum": aten.sum.dim_IntList,
    "avg": aten.mean.dim,
    "max": aten.amax.default,
    "min": aten.amin.default,
}
_NEUTRAL = {"sum": 0.0, "product": 1.0}


@dataclass(frozen=True)
class _Dim:
    """How one dim is cut.

    Args:
        axes: The axes that cut it, outermost first.
        pieces: Into how many they cut it.
        tile: Its size on the first device.
        rows: The global positions in the order of the devices, -1 for padding; None where XLA's
            tiles are the shards.
    """

    axes: tuple[Axis, ...]
    pieces: int
    tile: int
    rows: np.ndarray[Any, Any] | None


class Border:
    """What lies between the global tensors of one layout and shape, and their local views.

    Args:
        layout: Of the global tensor, on the mesh that ``to_local`` refers to.
        shape: The global shape.
    """

    def __init__(self, layout: Layout, shape: tuple[int, ...]) -> None:
        self.layout, self.shape = layout, shape
        self.region: ManualRegion = region_of(layout.mesh)
        first = local_shape(layout, shape, (0,) * layout.mesh.ndim, rule="torch").shape
        self.dims = [_dim(layout, shape, dim, tile) for dim, tile in enumerate(first)]
        axes = (*[(axis,) for axis, _ in layout.partial], *[dim.axes for dim in self.dims])
        self._inside = Layout(self.region.mesh, axes)

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of the first device's shard, which is the longest.

        Not always with a gap, where a strided shard has no axis for its outer cut; but nothing that
        has one comes here, since no DTensor lies so and ``from_local`` refuses it.
        """
        return tuple(dim.tile for dim in self.dims)

    @cached_property
    def uneven(self) -> Uneven | None:
        """How much of each device's array is real."""
        if self.shape == tuple([dim.tile * dim.pieces for dim in self.dims]):
            return None
        mesh, region = self.layout.mesh, self.region
        names = tuple(mesh.axis_names)
        tables: dict[int, list[int]] = {dim: [] for dim in range(len(self.shape))}
        for place in product(*map(range, region.sizes)):
            by_axis = dict(zip(region.axes, place, strict=True))
            coordinate = tuple(by_axis[name] for name in names)
            sizes = local_shape(self.layout, self.shape, coordinate, rule="torch").shape
            for dim, size in enumerate(sizes):
                tables[dim].append(size)
        return Uneven.of({dim: tuple(table) for dim, table in tables.items()})

    @property
    def varying(self) -> frozenset[Axis]:
        """The axes along which the shards differ."""
        cut = {axis for dim in self.dims for axis in dim.axes}
        return frozenset(cut | {axis for axis, op in self.layout.partial if op in _NEUTRAL})

    @property
    def replicated(self) -> frozenset[Axis]:
        """The axes along which all devices hold the same."""
        used = {axis for dim in self.dims for axis in dim.axes}
        return frozenset(self.region.axes) - used - {axis for axis, _ in self.layout.partial}

    def cut(self, payload: torch.Tensor) -> torch.Tensor:
        """Return the local payload of a global one."""
        runtime = get_runtime()
        run = runtime.run_op
        for number, dim in enumerate(self.dims):
            if dim.rows is not None:
                rows = torch.from_numpy(np.maximum(dim.rows, 0))
                payload = run(aten.index_select.default, (payload, number, rows), {})
        padding = [
            dim.tile * dim.pieces - payload.shape[number] for number, dim in enumerate(self.dims)
        ]
        if any(padding):
            behind = [pad for amount in reversed(padding) for pad in (0, amount)]
            payload = run(aten.constant_pad_nd.default, (payload, behind), {})
        for axis, op in reversed(self.layout.partial):
            payload = _parts(run, payload, self.region.mesh.size(axis), op)
        local = runtime.enter_local(payload, self._inside, self.region)
        for _ in self.layout.partial:
            local = runtime.run_local_op(aten.squeeze.dim, (local, 0), {})
        return local

    def joined(self, local: torch.Tensor) -> torch.Tensor:
        """Return the global payload of a local one; reductions are made."""
        runtime = get_runtime()
        run = runtime.run_op
        for _ in self.layout.partial:
            local = runtime.run_local_op(aten.unsqueeze.default, (local, 0), {})
        payload = runtime.leave_local(local, self._inside, self.region)
        for _, op in self.layout.partial:
            # PyTorch would make int64 of the sum of int32.
            options = {"dtype": payload.dtype} if op in _NEUTRAL else {}
            payload = (
                run(aten.prod.dim_int, (payload, 0), options)
                if op == "product"
                else run(_REDUCTIONS[op], (payload, [0]), options)
            )
        for number, dim in enumerate(self.dims):
            if dim.rows is not None:
                order = np.argsort(np.where(dim.rows < 0, dim.rows.size, dim.rows), kind="stable")
                order = torch.from_numpy(order[: self.shape[number]])
                payload = run(aten.index_select.default, (payload, number, order), {})
            elif payload.shape[number] != self.shape[number]:
                cut = (payload, number, 0, self.shape[number])
                payload = run(aten.slice.Tensor, cut, {})
        return payload


@lru_cache(maxsize=4096)
def border_of(layout: Layout, shape: tuple[int, ...]) -> Border:
    """Return the border of a layout and a global shape; the same object each time."""
    return Border(layout, shape)


def _dim(layout: Layout, shape: tuple[int, ...], dim: int, tile: int) -> _Dim:
    mesh = layout.mesh
    entries = [entry_axis(entry) for entry in layout.dims[dim]]
    cutting = [axis for axis in mesh.axis_names if axis in entries]
    pieces = prod([mesh.size(axis) for axis in cutting])
    axes = tuple([axis for axis in entries if axis is not None])
    are_tiles = len(axes) == len(entries) == len(cutting)
    if are_tiles and (len(cutting) < 2 or shape[dim] % max(pieces, 1) == 0):
        return _Dim(axes, pieces, tile, None)
    rows: list[Any] = []
    for place in product(*(range(mesh.size(axis)) for axis in cutting)):
        by_axis = dict(zip(cutting, place, strict=True))
        coordinate = tuple(by_axis.get(axis, 0) for axis in mesh.axis_names)
        shard = torch_indices(layout, shape, coordinate)[dim]
        rows.append(np.pad(shard, (0, tile - len(shard)), constant_values=-1))
    return _Dim(tuple(cutting), pieces, tile, np.concatenate(rows))


def _parts(run: Any, payload: torch.Tensor, count: int, op: str) -> torch.Tensor:
    """Return [count, *shape]: parts of which the reduction is `payload`."""
    row = run(aten.unsqueeze.default, (payload, 0), {})
    if op not in _NEUTRAL:
        return run(aten.expand.default, (row, [count, *payload.shape]), {})
    behind = [*(0 for _ in range(2 * payload.ndim)), 0, count - 1]
    return run(aten.constant_pad_nd.default, (row, behind, _NEUTRAL[op]), {})


# ------------------------------------------------ LocalViews of dims that the mesh does not divide
#
# Padding that must not be mistaken for values.
#
# 10 rows over 4 devices are 3, 3, 3 and 1. All devices' arrays have one shape, so the last one has
# a row of its own and two of padding, whose values are whatever the ops before made of them. An
# :class:`Uneven` remembers, per dim, how much of each device's array is real.
#
# What keeps real and padding apart is allowed: pointwise ops, sum (with the padding taken as zero),
# and views that keep the padded dim. Everything else raises: a mean over the padded dim, a maximum,
# a sort would be wrong in silence.

Table = tuple[int, ...]


_PADDING = (
    "Their arrays are padded to one shape, and padding could get into the result. Pad the global "
    "tensor so that the mesh divides it, or use pointwise ops, sum and views that keep the dim."
)
_COUNTING = "Python runs once for all of them. Count with tensors: torch.ones_like(view).sum()."


@dataclass(frozen=True)
class Uneven:
    """How much of each device's array is real.

    Args:
        sizes: Per padded dim (dim, table): the real size on each device, the region's coordinates
            in row-major order.
    """

    sizes: tuple[tuple[int, Table], ...]

    @classmethod
    def of(cls, sizes: Mapping[int, Table]) -> Uneven | None:
        """Make one from dim -> table; None where nothing is padded."""
        padded = {dim: table for dim, table in sizes.items() if min(table) < max(table)}
        return cls(tuple(sorted(padded.items()))) if padded else None

    def sizes_on(self, region: ManualRegion) -> dict[int, np.ndarray[Any, Any]]:
        """Return dim -> real sizes by coordinate of the region."""
        return {dim: np.array(table).reshape(region.sizes) for dim, table in self.sizes}

    def refuse(self, what: str, why: str = _PADDING) -> NoReturn:
        """Raise the error for what could mix padding with values, or is one number for all."""
        dims = {dim: f"{max(table)} to {min(table)}" for dim, table in self.sizes}
        raise LocalViewError(
            f"{what} was called on an uneven local view, whose sizes by dim are {dims} on the "
            f"devices. {why}"
        )


_SAME_SHAPE = frozenset(
    {
        aten.detach.default,
        aten.alias.default,
        aten.clone.default,
        aten._to_copy.default,
        aten.copy_.default,
        aten.zero_.default,
        aten.fill_.Scalar,
        aten.fill_.Tensor,
        aten.zeros_like.default,
        aten.ones_like.default,
        aten.full_like.default,
        aten.empty_like.default,
        aten.rand_like.default,
        aten.randn_like.default,
        aten.lift_fresh.default,
        aten.masked_fill_.Scalar,
        aten.masked_fill_.Tensor,
        aten.bernoulli_.float,
        aten.uniform_.default,
        aten.normal_.default,
        aten.native_dropout.default,
    }
)
_FRESH = frozenset(
    {
        aten.new_empty.default,
        aten.new_zeros.default,
        aten.new_ones.default,
        aten.new_full.default,
    }
)
_SUMS = frozenset({aten.sum.default, aten.sum.dim_IntList})
_SQUEEZES = frozenset({aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims})
_CUTS = frozenset({aten.slice.Tensor, aten.slice_backward.default})
_MOVED = frozenset({aten.t.default, aten.transpose.int, aten.permute.default})
_VIEWS = (
    frozenset(
        {
            aten.view.default,
            aten._unsafe_view.default,
            aten.unsqueeze.default,
            aten.expand.default,
            aten.select.int,
            aten.select_backward.default,
        }
    )
    | _SQUEEZES
    | _CUTS
    | _MOVED
)


def run_uneven(
    run: Callable[..., Any],
    func: Any,
    args: Sequence[Any],
    kwargs: Any,
    payload_args: Any,
    payload_kwargs: Any,
) -> tuple[Any, Uneven | None]:
    """Run an op of which some arguments are uneven.

    Args:
        run: Runs an op on payloads.
        func: The op.
        args: Its arguments.
        kwargs: Its keyword arguments.
        payload_args: The arguments with payloads in place of views.
        payload_kwargs: The same for the keyword arguments.

    Returns:
        The result, of payloads, and how uneven it is.

    Raises:
        LocalViewError: The op could mix padding with values.
    """
    view = next(v for v in leaves((args, kwargs)) if getattr(v, "_uneven", None) is not None)
    if torch.Tag.pointwise in func.tags or func in _SAME_SHAPE:
        uneven = _broadcast(func, args, kwargs)
        return run(func, payload_args, payload_kwargs), uneven
    if func in _SUMS:
        masked = _zeros_for_padding(run, view)
        output = run(func, (masked, *payload_args[1:]), payload_kwargs)
        return output, _after_sum(view, args, kwargs)
    if func in _VIEWS:
        output = run(func, payload_args, payload_kwargs)
        return output, _after_view(func, view, args, output)
    if func in _FRESH:
        return run(func, payload_args, payload_kwargs), None
    return view._uneven.refuse(str(func))


def _broadcast(func: Any, args: Any, kwargs: Any) -> Uneven | None:
    tensors = [v for v in leaves((args, kwargs)) if isinstance(v, torch.Tensor)]
    ndim = max(t.ndim for t in tensors)
    tables: dict[int, Table] = {}
    for tensor in tensors:
        uneven_view: Any = getattr(tensor, "_uneven", None)
        if uneven_view is None:
            continue
        for dim, table in uneven_view.sizes:
            place = ndim - tensor.ndim + dim
            if tables.setdefault(place, table) != table:
                uneven_view.refuse(f"{func}, with another one that is uneven in another way,")
    uneven = Uneven.of(tables)
    assert uneven is not None
    if torch._C._current_graph_task_id() >= 0:
        return uneven  # the backward pass of sum expands one number, which is even
    for tensor in tensors:
        tensor_tables = dict(u.sizes) if (u := getattr(tensor, "_uneven", None)) is not None else {}
        for place in tables:
            dim = place - (ndim - tensor.ndim)
            if dim >= 0 and tensor.shape[dim] != 1 and dim not in tensor_tables:
                uneven.refuse(f"{func}, with an even tensor of shape={tuple(tensor.shape)},")
    return uneven


def _zeros_for_padding(run: Callable[..., Any], view: Any) -> torch.Tensor:
    payload, region = view._payload, view._region
    for dim, sizes in view._uneven.sizes_on(region).items():
        size = real_sizes(payload, sizes, region)
        count = payload.shape[dim]
        shape = [1] * payload.ndim
        shape[dim] = count
        size = run(aten.view.default, (size, [1] * payload.ndim), {})
        real = run(aten.gt.Tensor, (size, torch.arange(count).reshape(shape)), {})
        zero = torch.zeros((), dtype=payload.dtype)
        payload = run(aten.where.self, (real, payload, zero), {})
    return payload


def _after_sum(view: Any, args: Sequence[Any], kwargs: Any) -> Uneven | None:
    dims = args[1] if len(args) > 1 else kwargs.get("dim")
    keepdim = args[2] if len(args) > 2 else kwargs.get("keepdim", False)
    summed = {dim % view.ndim for dim in dims} if dims else set(range(view.ndim))
    tables = {
        dim if keepdim else dim - sum(s < dim for s in summed): table
        for dim, table in view._uneven.sizes
        if dim not in summed
    }
    return Uneven.of(tables)


def _after_view(func: Any, view: Any, args: Sequence[Any], output: torch.Tensor) -> Uneven | None:
    places = _places(func, view, args, output)
    for dim, _ in view._uneven.sizes:
        place = places.get(dim)
        if place is None or output.shape[place] != view.shape[dim]:
            view._uneven.refuse(str(func))
    return Uneven.of({places[dim]: table for dim, table in view._uneven.sizes})


def _places(func: Any, view: Any, args: Sequence[Any], output: torch.Tensor) -> dict[int, int]:
    """Return where a view op puts each dim that it keeps."""
    ndim = view.ndim
    if func in _MOVED:
        # A tensor of distinct sizes shows where each dim went.
        probe = func(torch.empty(list(range(2, ndim + 2)), device="meta"), *args[1:])
        return {size - 2: place for place, size in enumerate(probe.shape)}
    if func in _CUTS:
        return {dim: dim for dim in range(ndim)}
    if func is aten.select.int:
        dropped = {args[1] % ndim}
    elif func in _SQUEEZES:
        dims = args[1] if len(args) > 1 else range(ndim)
        dims = [dims] if isinstance(dims, int) else dims
        dropped = {dim % ndim for dim in dims if view.shape[dim] == 1}
    elif func is aten.unsqueeze.default or func is aten.select_backward.default:
        new = args[1 if func is aten.unsqueeze.default else 2] % (ndim + 1)
        return {dim: dim + (new <= dim) for dim in range(ndim)}
    elif func is aten.expand.default:
        return {dim: output.ndim - ndim + dim for dim in range(ndim)}
    else:
        return _places_after_view(tuple(view.shape), tuple(output.shape))
    dims = [dim for dim in range(ndim) if dim not in dropped]
    return {dim: place for place, dim in enumerate(dims)}


def _places_after_view(shape: tuple[int, ...], new_shape: tuple[int, ...]) -> dict[int, int]:
    """Return where a reshape leaves the dims that it neither joins nor cuts."""
    if shape == new_shape:
        return {dim: dim for dim in range(len(shape))}
    places: dict[int, int] = {}
    for dim, size in enumerate(shape):
        matches = [
            place
            for place in range(len(new_shape))
            if new_shape[place] == size and prod(new_shape[:place]) == prod(shape[:dim])
        ]
        if len(matches) == 1 and shape.count(0) == 0:
            places[dim] = matches[0]
    return places


# --------------------------------------------------------------------------------- PerDeviceTensor
#
# A tensor that has one value on each device, all of one shape.
#
# The base of :class:`~xla_dtensor.dtensor.local.LocalView` (what ``to_local()`` gives) and
# :class:`~xla_dtensor.dtensor.manual.ManualTensor` (what ``enable_manual_sharding`` gives). Both
# wrap a runtime's payload for all devices' values, below autograd, as DTensor wraps its payload;
# they differ in what may be mixed with them and read of them.

Self = TypeVar("Self", bound="PerDeviceTensor")


def new_wrapper(cls: type[Any], tensor: torch.Tensor, requires_grad: bool = False) -> Any:
    """Return a tensor of a class of ours with the form of `tensor`, which runs on stacks."""
    runtime = get_runtime()
    # On a device of its own an op on local tensors is not kept whole: it runs on a stack.
    on_cpu = torch.device(runtime.torch_device).type == "cpu"
    keys = {"_extra_dispatch_keys": runtime.extra_dispatch_keys} if on_cpu else {}
    return make_wrapper(
        cls,
        tensor.shape,
        strides=tensor.stride(),
        storage_offset=tensor.storage_offset(),
        dtype=tensor.dtype,
        device=tensor.device,
        requires_grad=requires_grad,
        **keys,
    )


class PerDeviceTensor(torch.Tensor):
    """What each device has of something: the shape is one device's."""

    __slots__ = ("_payload", "_region")  # not among what users put on a tensor

    # Seen by modules that cannot import this class.
    _is_per_device = True

    _payload: torch.Tensor
    _region: ManualRegion

    @classmethod
    def _wrapping(
        cls: type[Self], payload: torch.Tensor, region: ManualRegion, requires_grad: bool = False
    ) -> Self:
        """Wrap `payload`, the runtime's tensor for all devices, of one device's shape."""
        self = new_wrapper(cls, payload, requires_grad)
        self._payload = payload
        self._region = region
        return self  # pyright: ignore[reportReturnType]

    if TYPE_CHECKING:

        def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    new = ReadOnHost.new  # pyright: ignore[reportAssignmentType]
    new_tensor = ReadOnHost.new_tensor  # pyright: ignore[reportAssignmentType]

    def numel(self) -> int:
        """Return the number of elements of one device's tensor, where all have as many."""
        if (uneven := getattr(self, "_uneven", None)) is not None:
            uneven.refuse("numel()", _COUNTING)
        return super().numel()

    def __len__(self) -> int:
        if (uneven := getattr(self, "_uneven", None)) is not None and 0 in dict(uneven.sizes):
            uneven.refuse("len()", _COUNTING)
        return super().__len__()

    @property
    def region(self) -> ManualRegion:
        """The mesh axes along which the tensor is per device."""
        return self._region

    def _like(self: Self, payload: torch.Tensor) -> Self:
        """Return another tensor of this class and region."""
        return self._wrapping(payload, self._region)

    def _communicated(self: Self, name: str, axes: tuple[Axis, ...], options: Any) -> Self:
        """Run a collective, below autograd."""
        raise NotImplementedError

    def _varies_over(self, axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
        """Return those of `axes` along which devices may hold different values."""
        return axes

    def _labelled(self: Self, varying: frozenset[Axis]) -> Self:
        """Return the same values, said to differ along these axes too."""
        return self

    def _reshaped_in_place(self) -> Any:
        """Follow the payload, whose shape ``t_``, ``squeeze_`` and the like have changed."""
        with torch._C.DisableTorchFunctionSubclass():
            torch.Tensor.data.__set__(self, self._like(self._payload))  # pyright: ignore
        return self


# ---------------------------------- Shared memory between a DTensor and the LocalViews cut from it
#
# In PyTorch ``x.to_local()`` is the very memory of x: ``x.to_local().zero_()`` empties x, and what
# an optimizer does to x is seen in the local tensor. Here the two are different arrays on the
# devices, so a link between them carries writes over, each time before the other side is used:
#
#     v = x.to_local()       link: (x, v's memory)
#     v[0].zero_()           the view v[0] has the same link; it pushes: x is written as v is
#     x.add_(1)              x's version counter moves
#     v.sum()                v pulls first: its memory is written as x is
#
# Where a gradient is recorded, writing to a view raises, as in PyTorch; under ``no_grad`` a view
# that requires grad is written to like any other.


class Memory:
    """What a view and all views of it share.

    Args:
        varying: The mesh axes along which devices may hold different values.
        link: Ties the memory to a DTensor's.
        stands_for_plain: Whether it is a copy of a plain tensor, which writes would not reach.
    """

    __slots__ = ("link", "stands_for_plain", "varying")

    def __init__(
        self, varying: frozenset[Axis], link: Link | None = None, stands_for_plain: bool = False
    ) -> None:
        self.varying, self.link, self.stands_for_plain = varying, link, stands_for_plain

    def wrote(self, varying: frozenset[Axis]) -> None:
        """Hear that values were written that differ along some axes."""
        self.varying = self.varying | varying
        if self.link is not None:
            self.link.push()


def check_writes(
    func: Any, args: Sequence[Any], kwargs: Any, view: Any, varying: frozenset[Axis]
) -> None:
    """Raise, before anything is written, where a mutating op would write values that get lost.

    Args:
        func: The op.
        args: Its arguments.
        kwargs: Its keyword arguments.
        view: A LocalView among them.
        varying: The axes along which the values to write may differ.

    Raises:
        LocalViewError: A plain tensor, a recorded view or equal shards would be written to.
    """
    for target in leaves(written_values(func, args, kwargs)):
        if not isinstance(target, torch.Tensor):
            continue
        memory = getattr(target, "_memory", None)
        if memory is None or memory.stands_for_plain:
            raise LocalViewError(
                f"{func} was called to write to a plain tensor of shape={tuple(target.shape)}, "
                f"with a local view of local shape={tuple(view.shape)} among its arguments. Each "
                "device has values of its own, and a plain tensor has one for all. Make the "
                "destination with view.new_zeros(shape) or torch.zeros_like(view)."
            )
        if memory.link is None:
            continue
        if target.requires_grad and torch.is_grad_enabled():
            raise LocalViewError(
                f"{func} was called to write to {target!r}, the memory of a DTensor, while "
                "gradients are recorded. The write would override the gradient of to_local(). "
                "Call clone() on it first, or write under torch.no_grad()."
            )
        memory.link.check(varying)


class Link:
    """Ties a DTensor to the memory of the view that was cut from it.

    Args:
        source: The DTensor, detached.
        cut: Cuts the DTensor's present value: a local payload.
        joined: Puts the local payload together again: a payload like the DTensor's.
        replicated: The axes along which all devices must hold the same values.
    """

    def __init__(
        self,
        source: torch.Tensor,
        cut: Callable[[], torch.Tensor],
        joined: Callable[[torch.Tensor], torch.Tensor],
        replicated: frozenset[Axis],
    ) -> None:
        self.source, self._cut, self._joined = source, cut, joined
        self._replicated = replicated
        self.memory = cut()
        self._version = _version(source)

    def pull(self) -> None:
        """Write what the DTensor became since the last look to the view's memory."""
        count, token = _version(self.source)
        if count != self._version[0] or token is not self._version[1] or count < 0:
            self._version = count, token
            _write(self.memory, self._cut(), local=True)

    def check(self, varying: frozenset[Axis]) -> None:
        """Raise where the DTensor cannot hold values that differ along some axes."""
        differ = sorted(map(str, self._replicated & varying))
        if differ:
            raise LocalViewError(
                f"A local view was written in place with values that differ along the axes "
                f"{differ}, where its DTensor is Replicate. The DTensor has one value there. Write "
                "values that are equal on these devices, or use clone() first."
            )

    def push(self) -> None:
        """Write the view's memory to the DTensor."""
        payload: Any = self.source
        _write(payload._local_tensor, self._joined(self.memory), local=False)
        if not payload.is_inference():
            torch.autograd.graph.increment_version(payload)  # for other views of the same tensor
        self._version = _version(self.source)


def _write(target: torch.Tensor, source: torch.Tensor, local: bool) -> None:
    run = run_local_op if local or is_traced(target) else get_runtime().run_op
    # A tensor of inference mode may be written to in inference mode only.
    with torch.inference_mode(target.is_inference() or torch.is_inference_mode_enabled()):
        run(torch.ops.aten.copy_.default, (target, source), {})


def _version(source: Any) -> tuple[int, Any]:
    """Return what changes when a DTensor is written to.

    Its version counter, which inference mode has not, and which a compiled step that only launches
    its program may not move; and what the runtime says of the value.
    """
    payload = source._local_tensor
    token = None if is_traced(payload) else get_runtime().value_token(payload)
    version = -1 if source.is_inference() else source._version
    return (version if token is None else max(version, 0)), token


# ----------------------------------------------------------------- Reading a LocalView from Python
#
# The first reachable device's tensor, or all of them.

_METHODS = "item __bool__ __int__ __float__ __complex__ __index__ __contains__ is_nonzero"
_ASKING = frozenset({torch.is_nonzero, *(getattr(torch.Tensor, n) for n in _METHODS.split())})
_asked: ContextVar[bool] = ContextVar("_asked", default=False)
_READS = frozenset({aten._local_scalar_dense.default, aten.equal.default, aten.allclose.default})


@contextmanager
def asked_for(func: Any) -> Iterator[None]:
    """Note, for the time of a call, whether the program itself asks for a value.

    Args:
        func: What is called: ``torch.Tensor.item`` asks, ``torch.nn.functional.one_hot`` does not.
    """
    token = _asked.set(func in _ASKING)
    try:
        yield
    finally:
        _asked.reset(token)


def read_op(func: Any, args: Sequence[Any], kwargs: Any) -> Callable[[], Any] | None:
    """Return what runs an op that reads values, on the first reachable device's; None if it none.

    Args:
        func: The op.
        args: Its arguments, LocalViews among them.
        kwargs: Its keyword arguments.
    """
    device = kwargs.get("device") if func is aten._to_copy.default else None
    leaves_device = (
        device is not None
        and torch.device(device).type == "cpu"
        and torch.device(get_runtime().torch_device).type != "cpu"
    )
    if func not in _READS and not leaves_device:
        return None
    if func is aten._local_scalar_dense.default and args[0]._varying and not _asked.get():
        raise LocalViewError(
            f"A value of {args[0]!r} was asked for inside of PyTorch, to choose a shape, a number "
            "or a branch for all devices. They may hold different values. Say it in numbers, such "
            "as num_classes=, use ops such as torch.where and index_select, or read item() first, "
            "which gives the first device's."
        )

    def read() -> Any:
        host_args, host_kwargs = map_nested(
            lambda v: _first(v, str(func)) if hasattr(v, "_varying") else v,
            (tuple(args), kwargs),
        )
        return func(*host_args, **host_kwargs)

    return read


def _first(view: LocalView, what: str) -> torch.Tensor:
    if get_runtime().is_tracing and view._uneven is None:
        return _stacked(view)[(0,) * len(view._region.axes)]  # a value of the program
    return first_shard(view, what)


def first_shard(view: LocalView, what: str) -> torch.Tensor:
    """Return the local tensor of the first device that this process reaches, on the host.

    Args:
        view: The view.
        what: What reads it, for messages.

    Raises:
        LocalViewError: Each of several processes would read another value.
    """
    runtime = get_runtime()
    if view._varying and len(runtime.addressable_device_ids()) < len(runtime.device_ids()):
        raise LocalViewError(
            f"{what} was called on {view!r} in a job of several processes. Each would read another "
            "device's value, and their programs would part. Use addressable_shards(), or reduce "
            f"over the axes {sorted(map(str, view._varying))} first."
        )
    order = {int(device): place for place, device in enumerate(view._region.mesh.device_ids.flat)}
    return min(shards_of(view), key=lambda shard: order[shard.device_id]).data


def shards_of(view: LocalView) -> tuple[AddressableShard, ...]:
    """Return the local tensors of this process's devices, ordered by device id."""
    region = view._region
    shards = get_runtime().addressable_shards(_stacked(view))
    sizes = None if view._uneven is None else view._uneven.sizes_on(region)
    return tuple(_unstacked(shard, region, sizes) for shard in shards)


def _stacked(view: LocalView) -> torch.Tensor:
    """Return all local tensors as one global one, with a dim for each axis of the region first."""
    runtime, region, stacked = get_runtime(), view._region, view._payload
    for _ in region.axes:
        stacked = runtime.run_local_op(aten.unsqueeze.default, (stacked, 0), {})
    layout = Layout(region.mesh, (*((axis,) for axis in region.axes), *((),) * view.ndim))
    return runtime.leave_local(stacked, layout, region)


def _unstacked(shard: AddressableShard, region: ManualRegion, sizes: Any) -> AddressableShard:
    ndim, place = len(region.axes), region.mesh.coordinates
    tensor = shard.data[(0,) * ndim]
    if sizes is not None:
        by_axis = dict(zip(region.mesh.axis_names, map(int, place(shard.device_id)), strict=True))
        coordinate = tuple(by_axis[axis] for axis in region.axes)
        for dim, table in sizes.items():
            tensor = tensor.narrow(dim, 0, int(table[coordinate]))
    return replace(shard, index=tuple(slice(0, n) for n in tensor.shape), data=tensor)


# ---------------------------------------------------------------- A plain tensor beside LocalViews
#
# The same on every device, its gradient gathered from all.
#
# ``F.linear(view, weight)`` with a plain `weight` uses it on every device. What each device sends
# back is its own part of the gradient: along mesh axes where these parts differ they are summed, as
# they are parts of one derivative; along the others all devices hold the same gradient already.


def spread_payload(payload: torch.Tensor, region: ManualRegion) -> torch.Tensor:
    """Return a local payload with a copy of `payload` on each device."""
    if is_traced(payload):
        return operand_everywhere(payload, region)
    return get_runtime().enter_local(payload, uncut_layout(region, payload.ndim), region)


@lru_cache(maxsize=4096)
def uncut_layout(region: ManualRegion, ndim: int) -> Layout:
    """Return the layout of a tensor that the region's axes do not cut."""
    open_dims = frozenset() if region.is_whole else frozenset(range(ndim))
    return Layout(region.mesh, ((),) * ndim, (), open_dims)


def as_gradient(grad: Any, output: Any) -> Any:
    """Return a plain gradient given for a LocalView as a view; anything else as it is.

    It differs where `output` does: each device's is the gradient of its own value.
    """
    plain = isinstance(grad, torch.Tensor) and not hasattr(grad, "_local_tensor")
    if not plain or getattr(grad, "_is_per_device", False) or not hasattr(output, "_varying"):
        return grad
    view: Any = same_on_all(grad, output.region)
    return view._labelled(output._varying)


def gathered(grad: Any, on_host: bool) -> torch.Tensor:
    """Return the gradient of a plain tensor of which each device had a copy."""
    region, runtime = grad.region, get_runtime()
    total = _summed_gradient(grad)
    payload = runtime.leave_local(total._payload, uncut_layout(region, grad.ndim), region)
    return runtime.to_host(payload) if on_host else runtime.to_plain(payload)


def _summed_gradient(grad: Any) -> Any:
    from xla_dtensor.dtensor.collectives import psum

    over = grad._varies_over(grad.region.axes)
    return psum(grad, over) if over else grad


def same_on_all(tensor: torch.Tensor, region: ManualRegion) -> torch.Tensor:
    """Return a plain tensor as a LocalView that differs nowhere, differentiably.

    Args:
        tensor: A CPU tensor or a plain tensor of the runtime.
        region: The region of the view.
    """
    return _SameOnAll.apply(tensor, region)  # pyright: ignore[reportReturnType]


class _SameOnAll(LinearResult):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, region: ManualRegion) -> Any:
        from xla_dtensor.dtensor.local import LocalView

        runtime = get_runtime()
        ctx.inputs = [tensor]
        if is_traced(tensor):
            ctx.on_host, ctx.region = None, region
            ctx.save_for_backward(tensor)
            memory = Memory(frozenset(), stands_for_plain=True)
            return LocalView(enter_everywhere(tensor, region), region, memory=memory)
        ctx.on_host = not runtime.is_payload(tensor)
        payload = tensor.detach()
        if ctx.on_host:
            payload = runtime.put(payload, Layout.replicated(region.mesh, tensor.ndim))
        memory = Memory(frozenset(), stands_for_plain=True)
        return LocalView(spread_payload(payload, region), region, memory=memory)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        if ctx.on_host is None:
            total, (like,) = _summed_gradient(grad), ctx.saved_tensors
            gradient = gather_everywhere(total._payload, like, ctx.region)
        else:
            gradient = gathered(grad, ctx.on_host)
        return (*refuse_second("a plain tensor beside local tensors", ctx.inputs, gradient), None)


# -------------------------------------------------------- Backward passes that start at LocalViews
#
# ``backward()`` and ``torch.autograd.grad`` take tensors to find them in the graph, where stand-ins
# for them are not. And what a checkpoint computes again inside of them has to meet LocalView's
# ``__torch_function__``, so they are not called below it: LocalViews are named by their places in
# the graph.

# Their arguments, the outputs first.
BACKWARD_PASSES: Mapping[Any, tuple[str, ...]] = {
    torch.Tensor.backward: ("self", "gradient", "retain_graph", "create_graph", "inputs"),
    torch.autograd.grad: (
        *("outputs", "inputs", "grad_outputs", "retain_graph", "create_graph"),
        *("only_inputs", "allow_unused", "is_grads_batched", "materialize_grads"),
    ),
}


def run_backward(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run ``Tensor.backward`` or ``torch.autograd.grad`` with LocalViews among the arguments.

    Args:
        func: Which of them.
        args: Its arguments. Plain gradients of views are equal on all devices.
        kwargs: Its keyword arguments.
    """
    options: dict[str, Any] = dict(zip(BACKWARD_PASSES[func], args, strict=False)) | dict(kwargs)
    if func is torch.Tensor.backward:
        output, grad = options.pop("self"), options.pop("gradient", None)
        grad = None if grad is None else as_gradient(grad, output)
        return torch.autograd.backward(output, grad, **options)
    outputs, inputs = _sequence(options.pop("outputs")), _sequence(options.pop("inputs"))
    grads: Any = options.pop("grad_outputs", None)
    grads = [None] * len(outputs) if grads is None else _sequence(grads)
    if options.pop("materialize_grads", False):
        options["allow_unused"] = True
        pairs = zip(_grad(outputs, inputs, grads, options), inputs, strict=True)
        return tuple(torch.zeros_like(i) if g is None else g for g, i in pairs)
    return _grad(outputs, inputs, grads, options)


def _grad(outputs: Sequence[Any], inputs: Sequence[Any], grads: Sequence[Any], options: Any) -> Any:
    pairs = list(zip(grads, outputs, strict=True))
    grads = [None if grad is None else as_gradient(grad, output) for grad, output in pairs]
    # torch makes the gradient of a scalar only where it is given the tensor.
    grads = [
        torch.ones_like(output) if grad is None and output.numel() == 1 else grad
        for grad, (_, output) in zip(grads, pairs, strict=True)
    ]
    return torch.autograd.grad(
        [_edge(output) for output in outputs],
        [_edge(tensor) for tensor in inputs],
        grads,
        **options,
    )


def _edge(tensor: Any) -> Any:
    if not isinstance(tensor, PerDeviceTensor) or not tensor.requires_grad:
        return tensor
    with torch._C.DisableTorchFunctionSubclass():
        return get_gradient_edge(tensor)


def _sequence(tensors: Any) -> Sequence[Any]:
    return (tensors,) if isinstance(tensors, torch.Tensor) else tuple(tensors)
