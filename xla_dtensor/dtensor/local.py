"""LocalView: what ``to_local()`` returns, one device's shard written once for all devices.

In PyTorch each process sees its own local tensor. Here one process drives many devices, so a local
tensor is all of them at once: the shape is one device's, an op acts on every device's own tensor,
and nothing is communicated but by the collectives that the program calls. On a (dp=2, tp=4) mesh::

    w = distribute_tensor(torch.ones(8, 6), mesh, [Replicate(), Shard(0)])
    v = w.to_local()                     a LocalView of shape (2, 6)
    s = v.sum(0)                         each device sums its own two rows; shape (6,)
    psum(s, "tp")                        the sums of all rows, on every device
    DTensor.from_local(s, mesh, [Replicate(), Partial()])    the same as a global tensor

Autograd is PyTorch's own: this class wraps the runtime's local payload below autograd, as DTensor
wraps its payload.

**Which devices differ.** ``varying`` holds the mesh axes along which devices may hold different
values: those that shard or reduce what the view was cut from, in union over an op's arguments;
collectives take theirs away. It decides what may be read as one value, where a gradient has to be
summed, and whether ``from_local(view, mesh, [Replicate()])`` would pick one of several values,
which raises.

**Other tensors beside a view.** A plain tensor is the same on every device. If it requires grad,
its gradient is the sum over the devices' gradients along the axes where these differ. A DTensor
raises: one shape is a shard's, the other the whole's.

**Reading.** ``item``, ``cpu``, ``numpy``, ``tolist``, ``bool`` give the tensor of the first device
that this process reaches, as rank 0 of a PyTorch job would see it. With several processes that
value differs between them, so Python that branches on it would part: there it raises, unless no
devices differ. ``addressable_shards()`` gives all. What PyTorch itself would read, to choose a
shape or a branch for all devices, raises where they may differ: ``F.one_hot(view)`` without the
number of classes, ``x[i]`` with a number `i` that is a view.

**Uneven shards.** Where the mesh does not divide a dim, the view has the shape of the first device
(the longest shard), padded on the others. Ops that could mix padding with values raise; see
:mod:`xla_dtensor.dtensor.local_border`.

**Writing.** A view shares memory with its DTensor, as in PyTorch: writes to one are seen in the
other (:mod:`xla_dtensor.dtensor.local_border`). Where a gradient is recorded that raises. A plain
tensor cannot be written to with a view's values: make the destination with ``view.new_zeros(...)``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch
from torch.distributed.tensor import Replicate

from mesh_utils import Axis
from xla_dtensor.core import Layout, ManualRegion, layout_of_op_sharding
from xla_dtensor.core.errors import (
    ArgumentTypeError,
    DistributeError,
    LocalViewError,
    UnsupportedOpError,
)
from xla_dtensor.core.spanning import layout_on_span, region_of, spanning_mesh
from xla_dtensor.dtensor.collectives import all_gather, axis_index, pmax, pmin, psum
from xla_dtensor.dtensor.dispatch import new_dtensor, state_of, tell_outer_cuts
from xla_dtensor.dtensor.dynamo import called_in_graph, leave_to_python, one_call
from xla_dtensor.dtensor.labels import (
    OuterCuts,
    outer_cuts_of_layout,
    outer_cuts_of_outputs,
    same_placements,
)
from xla_dtensor.dtensor.local_border import (
    BACKWARD_PASSES,
    Border,
    Link,
    Memory,
    PerDeviceTensor,
    Uneven,
    asked_for,
    border_of,
    check_writes,
    first_shard,
    read_op,
    run_backward,
    run_uneven,
    same_on_all,
    shards_of,
    spread_payload,
)
from xla_dtensor.dtensor.mesh import (
    DeviceMesh,
    MemberNumber,
    as_device_mesh,
    current_mesh,
    empty_local,
    is_off_mesh,
    mesh_text,
)
from xla_dtensor.dtensor.redistribute import as_plain, checked_placements
from xla_dtensor.runtimes import functional
from xla_dtensor.runtimes.base import AddressableShard
from xla_dtensor.runtimes.functional import (
    crossed_in,
    crossed_out,
    is_traced,
    plain_like,
    run_local_op,
)
from xla_dtensor.runtimes.nested import leaves, map_nested
from xla_dtensor.runtimes.registry import get_runtime
from xla_dtensor.runtimes.torch_own import byte_for
from xla_dtensor.runtimes.whole_ops import LinearResult, OneResult, has_tangent
from xla_dtensor.runtimes.written import makes_results, written_targets, written_values

if TYPE_CHECKING:
    from xla_dtensor.dtensor.dtensor import DTensor

__all__ = ["LocalView", "make_from_local", "to_view", "view_of_shards"]

aten = torch.ops.aten


# -------------------------------------------- LocalViews at the border of a graph of torch.compile
#
# Inside a graph a LocalView is its local payload. Where one goes in or comes out, the rest (which
# mesh axes, along which of them devices differ, how much of each tensor is padding) is a constant
# of the graph, and guarded.
#
# Inside of one graph a view and the DTensor that it was cut from share memory, as they do outside.
# At the border that tie is cut. To write to such a view is refused, because the write would not
# reach the DTensor.


class CutLink:
    """What is left of the tie between a view and a DTensor at the border of a graph."""

    def pull(self) -> None:
        """Do nothing: the view has the values that the DTensor had at the border."""

    def push(self) -> None:
        """Do nothing: `check` has refused."""

    def check(self, varying: Any) -> NoReturn:
        """Refuse a write."""
        raise LocalViewError(
            "A local view that shares memory with a DTensor was written to on the other side of "
            "the border of a compiled function. The write would not reach the DTensor. Call "
            "to_local() where you write, or clone() the view first."
        )


class ViewState:
    """What a compiled graph has to know of a LocalView beside its payload."""

    def __init__(self, view: LocalView) -> None:
        self.region, self.varying, self.uneven = view._region, view._varying, view._uneven
        self.outer_cuts, self.requires_grad = view._outer_cuts, view.requires_grad
        self.linked = view._memory.link is not None
        key = (self.region, self.varying, self.uneven)
        self._key = (*key, self.outer_cuts, self.requires_grad, self.linked)

    def view_over(self, kind: type[LocalView], payload: torch.Tensor) -> LocalView:
        """Return a view over a payload, of which this is the rest."""
        link: Any = CutLink() if self.linked else None
        return kind(
            payload,
            self.region,
            uneven=self.uneven,
            memory=Memory(self.varying, link),
            outer_cuts=self.outer_cuts,
            requires_grad=self.requires_grad,
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ViewState) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __repr__(self) -> str:
        return f"ViewState(over {self.region.axes})"


def coerced_tangent(view: LocalView, state: Any, expected_type: type | None = None) -> Any:
    """Return a gradient as a compiled backward expects it; None where none is possible."""
    if expected_type is not None or not isinstance(state, ViewState):
        return None
    if (view._region, view._uneven) != (state.region, state.uneven):
        return None
    if not view._varying <= state.varying:
        return None
    return state.view_over(type(view), view._payload)


# --------------------------------------------------------------------------------------- LocalView

_RANDOM = torch.Tag.nondeterministic_seeded


class LocalView(PerDeviceTensor):
    """One device's shard, on every device at once. Made by ``DTensor.to_local``."""

    __slots__ = ("_memory", "_outer_cuts", "_own_payload", "_uneven")

    _memory: Memory
    _uneven: Uneven | None
    # What is known of the mesh axes outside of the region, as of a DTensor's.
    _outer_cuts: OuterCuts

    @staticmethod
    def __new__(
        cls,
        payload: torch.Tensor,
        region: ManualRegion,
        *,
        varying: frozenset[Axis] = frozenset(),
        uneven: Uneven | None = None,
        link: Link | None = None,
        memory: Memory | None = None,
        outer_cuts: OuterCuts = (),
        requires_grad: bool = False,
    ) -> LocalView:
        """Wrap `payload`, the runtime's local payload, of one device's shape.

        `memory` is that of another view, where the two share it; it goes before `varying`.
        """
        self = cls._wrapping(payload, region, requires_grad)
        self._memory = Memory(varying, link) if memory is None else memory
        self._uneven, self._outer_cuts = uneven, outer_cuts
        if outer_cuts:
            payload._outer_cuts = outer_cuts  # pyright: ignore[reportAttributeAccessIssue]
        return self

    @property
    def _payload(self) -> torch.Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        if self._memory.link is not None:
            self._memory.link.pull()
        return self._own_payload

    @_payload.setter
    def _payload(self, payload: torch.Tensor) -> None:
        self._own_payload = payload

    @property
    def _varying(self) -> frozenset[Axis]:
        return self._memory.varying

    def storage(self) -> torch.UntypedStorage:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return a byte whose address is the same for all views of one tensor, and no other's."""
        link = self._memory.link
        source: Any = None if link is None else link.source
        return byte_for(self._own_payload if source is None else source._local_tensor)

    # ------------------------------------------------------------------ dispatch

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in BACKWARD_PASSES:
            return run_backward(func, args, kwargs)
        if MemberNumber in types:
            return NotImplemented  # it turns itself into a view first
        tensors = [v for v in leaves((tuple(args), kwargs)) if isinstance(v, torch.Tensor)]
        region = next((t._region for t in tensors if isinstance(t, LocalView)), None)
        if region is not None and any(map(_is_plain_leaf, tensors)):
            args, kwargs = map_nested(
                lambda v: same_on_all(v, region) if _is_plain_leaf(v) else v,
                (tuple(args), kwargs),
            )
        with torch._C.DisableTorchFunctionSubclass(), asked_for(func):
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        views = [v for v in leaves((tuple(args), kwargs)) if isinstance(v, LocalView)]
        region = _one_region(func, views, (tuple(args), kwargs))
        reader = read_op(func, args, kwargs)
        if reader is not None:
            return reader()
        varying = _varying_after(func, views, args, kwargs)
        if func._schema.is_mutable:
            check_writes(func, args, kwargs, views[0], varying)
        payload_args, payload_kwargs = map_nested(
            lambda v: _payload(v, region), (tuple(args), kwargs)
        )
        run = functional.run_local_op
        uneven = None
        if any(view._uneven is not None for view in views):
            output, uneven = run_uneven(run, func, args, kwargs, payload_args, payload_kwargs)
        else:
            output = run(func, payload_args, payload_kwargs)
        return _results(func, views, args, kwargs, output, uneven, varying)

    def _like(self, payload: torch.Tensor) -> LocalView:
        return LocalView(payload, self._region, uneven=self._uneven, memory=self._memory)

    def rewrapped(self, payload: torch.Tensor) -> LocalView:
        """Return a view over another payload, with memory of its own."""
        return self.rewrapper()(payload)

    def rewrapper(self) -> Callable[[torch.Tensor], LocalView]:
        """Return a function that wraps payloads as this one is, without holding this one."""
        region, varying, uneven = self._region, self._varying, self._uneven
        outer_cuts = self._outer_cuts
        return lambda payload: LocalView(
            payload, region, varying=varying, uneven=uneven, outer_cuts=outer_cuts
        )

    def _communicated(self, name: str, axes: tuple[Axis, ...], options: Any) -> LocalView:
        if self._uneven is not None:
            self._uneven.refuse(f"The collective {name}")
        payload = functional.local_collective(name, self._payload, self._region, axes, options)
        varying = frozenset() if name == "axis_index" else self._varying - {*axes}
        if name not in {"all_reduce", "all_gather"}:
            varying = varying | {*axes}
        outer_cuts = () if name == "axis_index" else self._outer_cuts
        return LocalView(payload, self._region, varying=varying, outer_cuts=outer_cuts)

    def _labelled(self, varying: frozenset[Axis]) -> LocalView:
        """Return the same values, said to differ along more axes."""
        if varying <= self._varying:
            return self
        return _Labelled.apply(self, varying | self._varying)  # pyright: ignore[reportReturnType]

    def _varies_over(self, axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
        return tuple(axis for axis in axes if axis in self._varying)

    # ------------------------------------------------------------------ what it is

    @staticmethod
    def from_shards(shards: Any, device_mesh: Any) -> LocalView:
        """Make a view of one host tensor per device.

        Args:
            shards: Tensors of one shape and dtype: a sequence in the order of the mesh's devices,
                or a mapping by device id, which needs only the devices that this process reaches.
            device_mesh: The mesh along whose axes the tensors differ.

        Returns:
            The view.

        Raises:
            DistributeError: Too few tensors, or of different shapes.

        Example:
            >>> import torch, xla_dtensor as xd
            >>> from torch.distributed.tensor import Shard
            >>> mesh = xd.init_device_mesh("xla", (8,))
            >>> view = xd.LocalView.from_shards([torch.full((2,), i) for i in range(8)], mesh)
            >>> xd.DTensor.from_local(view, mesh, [Shard(0)]).tolist()[:5]
            [0, 0, 1, 1, 2]
        """
        return view_of_shards(shards, device_mesh)

    @property
    def varying(self) -> frozenset[Axis]:
        """The mesh axes along which devices may hold different values."""
        return self._varying

    def addressable_shards(self) -> tuple[AddressableShard, ...]:
        """Return the local tensors of this process's devices, ordered by device id."""
        return shards_of(self)

    def wait(self) -> LocalView:
        """Return the view itself: XLA schedules communication, nothing is ever pending."""
        return self

    def cpu(self, *_: Any, **__: Any) -> torch.Tensor:
        """Return the local tensor of the first device that this process reaches."""
        return first_shard(self, "cpu()")

    def numpy(self, *, force: bool = False) -> Any:
        """Return the first reachable device's local tensor as a NumPy array."""
        return first_shard(self, "numpy()").numpy(force=force)

    def tolist(self) -> Any:
        """Return the first reachable device's local tensor as nested lists."""
        return first_shard(self, "tolist()").tolist()

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        with torch._C.DisableTorchFunctionSubclass():
            dtype = str(self.dtype).removeprefix("torch.")
            grad = ", requires_grad=True" if self.requires_grad else ""
            varying = tuple(axis for axis in self._region.axes if axis in self._varying)
            return (
                f"LocalView(local_shape={tuple(self.shape)}, dtype={dtype}, varying={varying}, "
                f"mesh={mesh_text(self._region.mesh)}{grad})"
            )

    def __format__(self, format_spec: str) -> str:
        return format(self.item(), format_spec) if format_spec and not self.ndim else repr(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> LocalView:
        if id(self) not in memo:
            copied = self.detach().clone().requires_grad_(self.requires_grad)
            memo[id(self)] = copied
        return memo[id(self)]

    def __tensor_flatten__(self) -> Any:
        leave_to_python()
        return ["_payload"], ViewState(self)

    @staticmethod
    def __tensor_unflatten__(inner: Any, state: Any, size: Any, stride: Any) -> LocalView:
        return state.view_over(LocalView, inner["_payload"])

    def __coerce_tangent_metadata__(self) -> LocalView:
        return self

    def __coerce_same_metadata_as_tangent__(self, state: Any, expected_type: Any = None) -> Any:
        return coerced_tangent(self, state, expected_type)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise LocalViewError(
            f"{self!r} was to be pickled. It is what each device has, and refers to the devices of "
            "this process. Pickle the DTensor, or the tensors of addressable_shards()."
        )


def _is_plain_leaf(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and _is_plain(leaf) and leaf.requires_grad


def _payload(leaf: Any, region: ManualRegion) -> Any:
    if isinstance(leaf, LocalView):
        return leaf._payload
    if isinstance(leaf, torch.Tensor) and (get_runtime().is_payload(leaf) or is_traced(leaf)):
        return spread_payload(leaf, region)
    return leaf


def _one_region(func: Any, views: Sequence[LocalView], arguments: Any) -> ManualRegion:
    """Return the region of the views among an op's arguments; refuse what cannot be mixed."""
    region = views[0]._region
    for leaf in leaves(arguments):
        if isinstance(leaf, LocalView):
            if leaf._region != region:
                raise LocalViewError(
                    f"{func} was called on local views over the axes {region.axes} of the mesh "
                    f"{mesh_text(region.mesh)} and {leaf._region.axes} of "
                    f"{mesh_text(leaf._region.mesh)}. A device's part of one is no part of the "
                    "other. Take both from DTensors on the same mesh; redistribute(mesh, "
                    "placements) moves one to the other's."
                )
        elif isinstance(leaf, PerDeviceTensor) or hasattr(leaf, "_local_tensor"):
            raise LocalViewError(
                f"{func} was called on a local view of local shape={tuple(views[0].shape)} and a "
                f"{type(leaf).__name__} of shape={tuple(leaf.shape)}. One has a device's shape, "
                "the other not. Call to_local() on the other one, or DTensor.from_local on the "
                "view."
            )
    return region


def _varying_after(
    func: Any, views: Sequence[LocalView], args: Sequence[Any], kwargs: Any
) -> frozenset[Axis]:
    """Return the axes along which what an op computes may differ."""
    varying = frozenset().union(*(view._varying for view in views))
    if _RANDOM not in func.tags:
        return varying
    for place, argument in enumerate(func._schema.arguments):
        if argument.name == "dropout_p":  # attention draws only then
            dropout_p = args[place] if place < len(args) else kwargs.get("dropout_p", 0.0)
            return frozenset(views[0]._region.axes) if dropout_p else varying
    return frozenset(views[0]._region.axes)


def _results(
    func: Any,
    views: Sequence[LocalView],
    args: Sequence[Any],
    kwargs: Any,
    output: Any,
    uneven: Uneven | None,
    varying: frozenset[Axis],
) -> Any:
    if torch.Tag.inplace_view in func.tags:
        if is_traced(output):
            args[0]._payload = output
        return args[0]._reshaped_in_place()
    if func._schema.is_mutable:
        targets = written_targets(func, args, kwargs)
        for target in leaves(written_values(func, args, kwargs)):
            if isinstance(target, LocalView):
                target._memory.wrote(varying)
        if not makes_results(func):
            return targets
    returned = [r.alias_info for r in func._schema.returns]
    is_view = any(alias is not None and not alias.is_write for alias in returned)
    memory, region = views[0]._memory if is_view else None, views[0]._region
    options: Any = {"varying": varying, "uneven": uneven, "memory": memory}
    if not any(view._outer_cuts for view in views):
        return map_nested(
            lambda v: LocalView(v, region, **options) if isinstance(v, torch.Tensor) else v, output
        )
    outer_cuts = outer_cuts_of_outputs(
        func, args, kwargs, [v._outer_cuts for v in views], region.mesh, output
    )
    is_tensor = isinstance(output, torch.Tensor)
    outputs = [output] if is_tensor else list(output)
    views = [
        LocalView(v, region, outer_cuts=k, **options) if isinstance(v, torch.Tensor) else v
        for v, k in zip(outputs, outer_cuts, strict=True)
    ]
    return views[0] if is_tensor else type(output)(views)


class _Labelled(LinearResult):
    @staticmethod
    def forward(ctx: Any, view: Any, varying: frozenset[Axis]) -> Any:
        return LocalView(
            view._payload,
            view._region,
            varying=varying,
            uneven=view._uneven,
            outer_cuts=view._outer_cuts,
        )

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad, None


# ------------------------------------------------------------------------- to_local and from_local
#
# The border between DTensors and LocalViews, differentiable.
#
# Gradients follow PyTorch's rules, placement by placement:
#
# * ``to_local``: the gradient comes back as `grad_placements` say, else as the tensor lay. Where
#   that is Replicate, each device's gradient is taken for the whole one. Devices whose gradients
#   differ there are parts of a sum that nobody has told of: that raises, and asks for
#   ``grad_placements=[Partial()]``. (PyTorch goes on with each rank's own part.)
# * ``from_local``: each device gets its shard of the gradient. Of a sum each part gets the whole
#   gradient, of a mean its share, of a maximum those that hold it, of a product that of the others.
#   With run_check the devices whose values were not taken get zeros.


def to_view(tensor: DTensor, grad_placements: Sequence[Any] | None) -> LocalView:
    """Return the local view of a DTensor; see ``DTensor.to_local``."""
    if is_off_mesh(tensor._spec.mesh):
        empty: Any = empty_local(tensor.shape, tensor.dtype)
        return empty
    if _is_differentiated(tensor):
        return _ToLocal.apply(tensor, grad_placements)  # pyright: ignore[reportReturnType]
    return _linked(tensor)


def _is_differentiated(tensor: torch.Tensor) -> bool:
    is_recorded = tensor.requires_grad and torch.is_grad_enabled()
    return is_recorded or has_tangent(tensor)


def _linked(tensor: DTensor) -> LocalView:
    border = _border_of(tensor)
    # The link goes to the memory, which assigning x.data takes away from x.
    source: Any = tensor.detach()
    tell_outer_cuts(source)
    link = Link(
        source,
        lambda: crossed_in(source._local_tensor, border),
        lambda local: crossed_out(local, border),
        border.replicated,
    )
    # Another object on the same memory: t_() and the like change the shape of this one only.
    payload = run_local_op(aten.detach.default, (link.memory,), {})
    outer_cuts = tensor._spec.outer_cuts
    return LocalView(
        payload,
        border.region,
        varying=border.varying,
        uneven=border.uneven,
        link=link,
        outer_cuts=outer_cuts,
    )


def from_view(
    view: LocalView,
    mesh: DeviceMesh,
    placements: tuple[Any, ...],
    shape: Sequence[int] | None,
    run_check: bool,
    grad_placements: tuple[Any, ...] | None = None,
) -> DTensor:
    """Return the DTensor of which `view` is the local tensor; see ``DTensor.from_local``."""
    layout = Layout.from_placements(placements, view.ndim, mesh.value)
    border = border_of(layout, _global_shape(view, layout) if shape is None else tuple(shape))
    _check_fits(view, border, mesh)
    differ = border.replicated & view.varying
    whole_numbers = not (view.dtype.is_floating_point or view.dtype.is_complex)
    if whole_numbers and any(op == "avg" for _, op in layout.partial):
        raise DistributeError(
            f"from_local was called with placements={placements} on a local view of dtype="
            f"{view.dtype}. The mean of whole numbers is none. Pass Partial('sum'), or convert the "
            "view to a floating-point dtype."
        )
    if differ and not run_check:
        raise LocalViewError(
            f"from_local was called with placements={placements} on a local view whose values may "
            f"differ along {sorted(map(str, differ))}. Replicate says that they are equal there. "
            "Pass Partial() if they are parts of a sum, reduce them first, or pass run_check=True "
            "to take the first device's."
        )
    view = _first_along(view, differ)
    if _is_differentiated(view):
        view = _reduced_first(view, layout.partial)
    return _FromLocal.apply(view, mesh, placements, border, grad_placements)  # pyright: ignore


def _border_of(tensor: DTensor) -> Border:
    return border_of(tensor._spec.layout, tuple(map(int, tensor.shape)))


def _global_shape(view: LocalView, layout: Layout) -> tuple[int, ...]:
    """Return what the shards make up: PyTorch's rule, and the real sizes of uneven ones."""
    shape = list(layout.get_global_shape(tuple(view.shape)))
    if view._uneven is not None:
        region = view.region
        for dim, sizes in view._uneven.sizes_on(region).items():
            axes = border_of(layout, tuple(shape)).dims[dim].axes
            alike = tuple(0 if axis not in axes else slice(None) for axis in region.axes)
            shape[dim] = int(sizes[alike].sum())
    return tuple(shape)


def _check_fits(view: LocalView, border: Border, mesh: DeviceMesh) -> None:
    if view.region != border.region:
        raise LocalViewError(
            f"from_local was called with the mesh {mesh_text(mesh.value)} on a local view over the "
            f"axes {view.region.axes} of the mesh {mesh_text(view.region.mesh)}. Its devices have "
            "their parts along those axes. Pass the mesh that the view comes from."
        )
    if tuple(view.shape) != border.local_shape:
        raise LocalViewError(
            f"from_local was called with shape={border.shape} and layout {border.layout} on a "
            f"local view of local shape={tuple(view.shape)}. The first device's part of that is "
            f"{border.local_shape}. Pass the global shape that the shards make up."
        )
    if view._uneven is not None and view._uneven != border.uneven:
        raise LocalViewError(
            f"from_local was called with shape={border.shape} and layout {border.layout} on an "
            f"uneven local view with the sizes {view._uneven.sizes}. The shards of that tensor "
            f"have the sizes {border.uneven and border.uneven.sizes}. Pass the placements and the "
            "shape that the view was cut with."
        )


def _constrained(payload: torch.Tensor, layout: Layout, outer_cuts: OuterCuts) -> torch.Tensor:
    """Tell XLA how a joined payload is to lie; a reduction that was just made stays its own."""
    if layout.partial:
        Layout(layout.mesh, layout.dims).op_sharding()  # refuses gaps
        return payload
    return functional.constrain(payload, layout_on_span(layout, outer_cuts))


class _ToLocal(LinearResult):
    @staticmethod
    def forward(ctx: Any, tensor: DTensor, grad_placements: Any) -> Any:
        ctx.border, ctx.mesh = _border_of(tensor), tensor._spec.mesh
        ctx.placements = grad_placements
        ctx.forward_placements = tensor._spec.placements
        return _linked(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        placements = ctx.placements
        if placements is None:
            placements = tuple(Replicate() if p.is_partial() else p for p in ctx.forward_placements)
            # The first device had the value, the others zeros or ones that are nobody's.
            partial = ctx.border.layout.partial
            first_only = {axis for axis, op in partial if op in ("sum", "product")}
        else:
            first_only = set()
        layout = Layout.from_placements(placements, grad.ndim, ctx.mesh.value)
        border = border_of(layout, ctx.border.shape)
        if not isinstance(grad, LocalView):
            grad = same_on_all(grad, ctx.border.region)
        if tuple(grad.shape) != border.local_shape:
            raise LocalViewError(
                f"The gradient of a to_local() of shape={ctx.border.shape} has the local shape "
                f"{tuple(grad.shape)}, and under its grad_placements={placements} a shard has the "
                f"shape {border.local_shape}. Pass grad_placements of which that is a shard."
            )
        differ = border.replicated & grad.varying
        if differ - first_only:
            raise LocalViewError(
                f"The gradient of a to_local() of shape={ctx.border.shape} may differ along "
                f"{sorted(map(str, differ - first_only))}, where its placements {placements} say "
                "Replicate. Each device has only a part of it there. Pass "
                "to_local(grad_placements=...) with Partial() for these axes."
            )
        grad = _first_along(grad, differ)
        return _FromLocal.apply(grad, ctx.mesh, tuple(placements), border, None), None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        if get_runtime().name == "torch_xla":
            raise UnsupportedOpError(
                "A forward derivative (forward_ad, jvp) was asked for through to_local() on "
                "torch_xla, which runs some derivatives of local tensors on no device. Take it in "
                "reverse mode, of the DTensor, or on the JAX runtime."
            )
        tangent, placements = tangents[0], ctx.forward_placements
        if not same_placements(tangent._spec.placements, placements):
            tangent = tangent.redistribute(ctx.mesh, placements)
        return _ToLocal.apply(tangent, ctx.placements)


class _FromLocal(LinearResult):
    @staticmethod
    def forward(
        ctx: Any, view: LocalView, mesh: DeviceMesh, placements: Any, border: Border, for_grad: Any
    ) -> Any:
        from xla_dtensor.dtensor.dtensor import DTensor

        ctx.border, ctx.mesh, ctx.placements, ctx.varying = border, mesh, placements, view.varying
        ctx.for_grad = for_grad
        payload = _constrained(crossed_out(view._payload, border), border.layout, view._outer_cuts)
        return new_dtensor(DTensor, payload, state_of(payload, mesh, placements, view._outer_cuts))

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        from xla_dtensor.dtensor.api import distribute_tensor

        target = tuple(Replicate() if p.is_partial() else p for p in ctx.placements)
        target = ctx.for_grad or target
        if not hasattr(grad, "_spec"):
            grad = distribute_tensor(grad, ctx.mesh, target)
        if grad._spec.mesh != ctx.mesh or not same_placements(grad._spec.placements, target):
            grad = grad.redistribute(ctx.mesh, target)
        view: Any = _ToLocal.apply(grad, None)
        for axis, op in ctx.border.layout.partial:
            if op == "avg":
                view = view / ctx.mesh.value.size(axis)
        # Each is the gradient of the device's own part, also where all are equal.
        return view._labelled(ctx.varying), None, None, None, None


def _reduced_first(view: LocalView, partial: Sequence[tuple[Any, str]]) -> LocalView:
    """Make the reductions whose gradient is not the same for every part."""
    kinds = {"sum" if op == "avg" else op for _, op in partial}
    if len(kinds) > 1:
        raise LocalViewError(
            f"from_local was called with Partial of {sorted(kinds)} on a view that requires a "
            "gradient. What is summed and what is multiplied first decides the value, and PyTorch "
            "has none of two kinds. Reduce one of them first: psum or pmax over its axis, and pass "
            "Replicate() there."
        )
    for axis, op in partial:
        if op in ("max", "min"):
            # Each device's tensor is a part of its own: equal ones share the gradient.
            part = view._labelled(view.varying | {axis})
            view = pmax(part, axis) if op == "max" else pmin(part, axis)  # pyright: ignore
        elif op == "product":
            is_first = axis_index(view, axis) == 0
            # Not prod(0): PyTorch looks for zeros to choose how to differentiate that.
            total = reduce(torch.mul, all_gather(view.unsqueeze(0), axis).unbind(0))
            view = torch.where(is_first, total, 1.0)  # pyright: ignore
    return view


def _first_along(view: Any, axes: Any) -> Any:
    """Return the view with the first device's values on all devices along `axes`."""
    view_dtype, dtype = view.dtype, torch.uint8 if view.dtype == torch.bool else view.dtype
    view = view.to(dtype) if axes else view
    for axis in axes:
        zero = torch.zeros((), dtype=dtype)
        view = psum(torch.where(axis_index(view, axis) == 0, view, zero), axis)
    return view.to(view_dtype)


# ----------------------------------- from_local, and LocalViews made of one host tensor per device
#
# A plain tensor given to ``from_local`` is one value, where PyTorch has one per rank. As Replicate
# that is the same thing. As Shard or Partial it is not: PyTorch's ranks each pass rows of their
# own, and here the same rows would silently be repeated on every device. So that raises where a
# process has several devices along the axis, and ``same_on_every_device=True`` asks for it. With
# one device per process a plain tensor is that device's own, as in PyTorch.


@one_call
def make_from_local(
    tensor: Any,
    device_mesh: Any,
    placements: Any,
    shape_and_stride: tuple[Sequence[int] | None, Sequence[int] | None],
    grad_placements: Sequence[Any] | None,
    *,
    run_check: bool,
    same_on_every_device: bool,
) -> DTensor:
    """Make a DTensor of what each device has; see ``DTensor.from_local``."""
    if not isinstance(tensor, torch.Tensor):
        raise ArgumentTypeError(
            f"from_local was called with an object of type={type(tensor).__name__}. It takes what "
            "each device has. Pass a LocalView or a tensor."
        )
    shape, stride = shape_and_stride
    if (shape is None) != (stride is None):
        raise DistributeError(
            f"from_local was called with shape={shape} and stride={stride}. One without the other "
            "does not describe the global tensor. Pass both, or none."
        )
    mesh = current_mesh("from_local") if device_mesh is None else as_device_mesh(device_mesh)
    canonical = checked_placements("from_local", placements, mesh, tensor.ndim, partial=True)
    if is_off_mesh(mesh):
        return _without_values(tensor, mesh, canonical, shape)
    if _is_plain(tensor) and shape is None and all(p.is_replicate() for p in canonical):
        return _PlainReplicated.apply(tensor, mesh, canonical)  # pyright: ignore
    if isinstance(tensor, LocalView) and shape is None:
        from xla_dtensor.dtensor.groups import from_group_view, is_of_groups

        if is_of_groups(tensor, mesh):
            return from_group_view(tensor, mesh, canonical)
    if not isinstance(tensor, LocalView):
        tensor = _plain_as_view(tensor, mesh, canonical, same_on_every_device)
    for_grad = None
    if grad_placements is not None:
        for_grad = checked_placements(
            "from_local", grad_placements, mesh, tensor.ndim, partial=False
        )
    return from_view(tensor, mesh, canonical, shape, run_check or same_on_every_device, for_grad)


def _without_values(
    tensor: torch.Tensor, mesh: DeviceMesh, placements: tuple[Any, ...], shape: Any
) -> DTensor:
    """Return what a process has that reaches no device of the mesh: PyTorch's shape, no values."""
    from xla_dtensor.dtensor.dtensor import DTensor

    layout = Layout.from_placements(placements, tensor.ndim, mesh.value)
    shape = layout.get_global_shape(tuple(tensor.shape)) if shape is None else tuple(shape)
    payload = torch.empty(shape, dtype=tensor.dtype, device="meta")
    return DTensor._wrapping(payload, mesh, placements, requires_grad=tensor.requires_grad)


def from_local_in_graph(
    tensor: Any,
    device_mesh: Any,
    placements: Any,
    shape_and_stride: tuple[Any, Any],
    grad_placements: Any,
    **options: bool,
) -> DTensor:
    """Do what :func:`make_from_local` does, in a function that Dynamo reads."""
    fixed = [None if n is None else tuple([int(i) for i in n]) for n in shape_and_stride]
    args = (device_mesh, placements, fixed, grad_placements)
    return called_in_graph("make_from_local", tensor, args, options)


def _is_plain(tensor: torch.Tensor) -> bool:
    return not hasattr(tensor, "_local_tensor") and not getattr(tensor, "_is_per_device", False)


class _PlainReplicated(LinearResult):
    """A plain tensor, one value, as a DTensor that no axis of the mesh cuts."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, mesh: DeviceMesh, placements: Any) -> Any:
        from xla_dtensor.dtensor.dtensor import DTensor

        runtime, layout = get_runtime(), Layout.replicated(mesh.value, tensor.ndim)
        ctx.mesh, ctx.placements, ctx.on_host = mesh, placements, not runtime.is_payload(tensor)
        payload = tensor.detach()
        if is_traced(tensor):
            ctx.on_host = None
            ctx.save_for_backward(tensor)
            payload = functional.put(payload, layout)
            return new_dtensor(DTensor, payload, state_of(payload, mesh, placements))
        if ctx.on_host:
            payload = runtime.put(payload, layout)
            outer_cuts: OuterCuts = ()
        else:
            outer_cuts = _outer_cuts_of(payload, mesh)
        payload = runtime.constrain(payload, layout_on_span(layout, outer_cuts))
        return new_dtensor(DTensor, payload, state_of(payload, mesh, placements, outer_cuts))

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        grad = grad.redistribute(ctx.mesh, ctx.placements)
        if ctx.on_host is False:
            return as_plain(grad), None, None
        return _OnHost.apply(grad, *ctx.saved_tensors), None, None


class _OnHost(OneResult):
    """The gradient of a host tensor: what the devices have of it, on the host."""

    @staticmethod
    def forward(ctx: Any, tensor: Any, like: torch.Tensor | None = None) -> torch.Tensor:
        ctx.mesh, ctx.placements = tensor._spec.mesh, tensor._spec.placements
        payload = tensor._local_tensor
        return get_runtime().to_host(payload) if like is None else plain_like(payload, like)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        dtensor = _PlainReplicated.apply(grad, ctx.mesh, ctx.placements)
        return (dtensor, None)[: ctx.num_inputs]


def _outer_cuts_of(payload: torch.Tensor, mesh: DeviceMesh) -> OuterCuts:
    """Return what the runtime knows of how a plain tensor lies over axes that `mesh` lacks."""
    span, runtime = spanning_mesh(mesh.value), get_runtime()
    sharding = runtime.known_sharding(payload)
    if span == mesh.value or sharding is None or not sharding.is_tiled:
        return ()
    layout = layout_of_op_sharding(sharding, span, payload.ndim, runtime.root(span))
    return outer_cuts_of_layout(layout, mesh)


def _plain_as_view(
    tensor: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Any], same_on_every_device: bool
) -> LocalView:
    if not _is_plain(tensor):
        raise ArgumentTypeError(
            f"from_local was called with a {type(tensor).__name__} of shape={tuple(tensor.shape)}. "
            "That is not one device's tensor. Pass what to_local() gave, or use redistribute."
        )
    runtime = get_runtime()
    devices = runtime.addressable_device_ids()
    is_shard = len(devices) == 1 < len(runtime.device_ids()) and not runtime.is_payload(tensor)
    if is_shard and not same_on_every_device:
        return view_of_shards({devices[0]: tensor}, mesh)
    sizes = mesh.value.mesh_shape
    cuts = [
        (name, placement)
        for name, placement, size in zip(mesh.value.axis_names, placements, sizes, strict=True)
        if not placement.is_replicate() and size > 1
    ]
    if cuts and not same_on_every_device:
        axis, placement = cuts[0]
        raise DistributeError(
            f"from_local was called with a plain tensor of shape={tuple(tensor.shape)} and "
            f"{placement} for axis {axis!r} of the mesh {mesh_text(mesh.value)}. In PyTorch each "
            "rank passes a tensor of its own; this process has several devices along that axis, "
            "and one tensor for all of them would be repeated. Pass the global tensor to "
            "distribute_tensor, one tensor per device to LocalView.from_shards, or "
            "same_on_every_device=True."
        )
    view: Any = same_on_all(tensor, region_of(mesh.value))
    return view


def view_of_shards(shards: Any, device_mesh: Any) -> LocalView:
    """Make a LocalView of one host tensor per device; see ``LocalView.from_shards``."""
    mesh = as_device_mesh(device_mesh)
    runtime, region = get_runtime(), region_of(mesh.value)
    tensors = dict(shards) if hasattr(shards, "items") else None
    if tensors is None:
        ids = [int(i) for i in mesh.value.device_ids.reshape(-1)]
        shards = list(shards)
        if len(shards) != len(ids):
            raise DistributeError(
                f"from_shards was called with {len(shards)} tensors on the mesh "
                f"{mesh_text(mesh.value)}. Each of its {len(ids)} devices has one. Pass them in "
                "the order of the mesh, or a dict by device id."
            )
        tensors = dict(zip(ids, shards, strict=True))
    by_place = {_place(region, device): tensor for device, tensor in tensors.items()}
    devices = [i for i in runtime.addressable_device_ids() if i in region.mesh.device_ids]
    first: Any = next(iter(tensors.values()), None)
    if not isinstance(first, torch.Tensor):
        raise ArgumentTypeError(
            f"from_shards was called with {first!r} for the first device. A shard is a host "
            "tensor. Pass a torch.Tensor per device."
        )
    for device in devices:
        shard: Any = by_place.get(_place(region, device))
        fits = isinstance(shard, torch.Tensor) and shard.dtype == first.dtype
        if not fits or shard.shape != first.shape:
            description = getattr(shard, "shape", shard), getattr(shard, "dtype", None)
            description = shard if shard is None else (tuple(description[0]), description[1])
            raise DistributeError(
                f"from_shards was called on the mesh {mesh_text(mesh.value)}, and for device "
                f"{device} the tensor is {description}. Every device that this process reaches "
                f"needs one of the same shape and dtype, here {tuple(first.shape)} and "
                f"{first.dtype}. Pass tensors of one shape, padded where they are shorter."
            )
    ndim = len(region.axes)
    layout = Layout(region.mesh, (*((axis,) for axis in region.axes), *((),) * first.ndim))
    tiles = {
        device: by_place[_place(region, device)].detach()[(None,) * ndim] for device in devices
    }
    payload = runtime.from_shards(tiles, (*region.sizes, *first.shape), layout)
    local = runtime.enter_local(payload, layout, region)
    for _ in range(ndim):
        local = runtime.run_local_op(aten.squeeze.dim, (local, 0), {})
    return LocalView(local, region, varying=frozenset(region.axes))


def _place(region: Any, device: int) -> tuple[int, ...]:
    """Return a device's coordinate along the region's axes."""
    coordinate = region.mesh.coordinates(int(device))
    by_axis = dict(zip(region.mesh.axis_names, coordinate, strict=True))
    return tuple(int(np.asarray(by_axis[axis])) for axis in region.axes)
