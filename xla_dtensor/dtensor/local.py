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
from typing import Any, NoReturn

import torch

from mesh_utils import Axis
from xla_dtensor.core import ManualRegion
from xla_dtensor.core.errors import LocalViewError
from xla_dtensor.dtensor.labels import known_of_results
from xla_dtensor.dtensor.local_border import (
    BACKWARD_PASSES,
    Link,
    Memory,
    PerDeviceTensor,
    Uneven,
    asked_for,
    check_writes,
    first_shard,
    read_op,
    run_backward,
    run_uneven,
    same_on_all,
    shards_of,
    spread_payload,
)
from xla_dtensor.dtensor.mesh import MemberNumber, mesh_text
from xla_dtensor.dtensor.state import Known
from xla_dtensor.runtimes import functional
from xla_dtensor.runtimes.base import AddressableShard
from xla_dtensor.runtimes.functional import is_traced
from xla_dtensor.runtimes.nested import leaves, map_nested
from xla_dtensor.runtimes.registry import get_runtime
from xla_dtensor.runtimes.whole_ops import LinearResult
from xla_dtensor.runtimes.written import makes_results, written_targets, written_values

__all__ = ["LocalView"]


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
        self.known, self.requires_grad = view._known, view.requires_grad
        self.linked = view._memory.link is not None
        own = (self.region, self.varying, self.uneven)
        self._key = (*own, self.known, self.requires_grad, self.linked)

    def view_over(self, kind: type[LocalView], payload: torch.Tensor) -> LocalView:
        """Return a view over a payload, of which this is the rest."""
        link: Any = CutLink() if self.linked else None
        return kind(
            payload,
            self.region,
            uneven=self.uneven,
            memory=Memory(self.varying, link),
            known=self.known,
            requires_grad=self.requires_grad,
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ViewState) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __repr__(self) -> str:
        return f"ViewState(over {self.region.axes})"


def flatten(view: LocalView) -> tuple[list[str], ViewState]:
    """Return the names of the inner tensors, and what else is needed to put them together."""
    return ["_payload"], ViewState(view)


def unflatten(kind: type[LocalView], inner: dict[str, Any], state: ViewState) -> LocalView:
    """Put together what :func:`flatten` took apart."""
    return state.view_over(kind, inner["_payload"])


def coerced_tangent(view: LocalView, state: Any, expected_type: type | None = None) -> Any:
    """Return an incoming gradient as a compiled backward expects it; None where none is possible.

    Args:
        view: The gradient.
        state: What :func:`flatten` gave for the expected one.
        expected_type: Its type, where that is not the gradient's.
    """
    if expected_type is not None or not isinstance(state, ViewState):
        return None
    same = (view._region, view._uneven) == (state.region, state.uneven)
    if not same or not view._varying <= state.varying:
        return None
    return state.view_over(type(view), view._payload)


# --------------------------------------------------------------------------------------- LocalView

_RANDOM = torch.Tag.nondeterministic_seeded


class LocalView(PerDeviceTensor):
    """One device's shard, on every device at once. Made by ``DTensor.to_local``."""

    _memory: Memory
    _uneven: Uneven | None
    # What is known of the mesh axes outside of the region, as of a DTensor's.
    _known: Known

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
        known: Known = (),
        requires_grad: bool = False,
    ) -> LocalView:
        """Wrap `payload`, the runtime's local payload, of one device's shape.

        `memory` is that of another view, where the two share it; it goes before `varying`.
        """
        self = cls._wrapping(payload, region, requires_grad)
        self._memory = Memory(varying, link) if memory is None else memory
        self._uneven, self._known = uneven, known
        if known:
            payload._known = known  # pyright: ignore[reportAttributeAccessIssue]
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
        given = [v for v in leaves((tuple(args), kwargs)) if isinstance(v, torch.Tensor)]
        region = next((t._region for t in given if isinstance(t, LocalView)), None)
        if region is not None and any(map(_is_plain_leaf, given)):
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
        read = read_op(func, args, kwargs)
        if read is not None:
            return read()
        varying = _varying_after(func, views, args, kwargs)
        if func._schema.is_mutable:
            check_writes(func, args, kwargs, views[0], varying)
        payload_args, payload_kwargs = map_nested(
            lambda v: _payload(v, region), (tuple(args), kwargs)
        )
        run = functional.run_local_op
        uneven = None
        if any(view._uneven is not None for view in views):
            result, uneven = run_uneven(run, func, args, kwargs, payload_args, payload_kwargs)
        else:
            result = run(func, payload_args, payload_kwargs)
        return _results(func, views, args, kwargs, result, uneven, varying)

    def _like(self, payload: torch.Tensor) -> LocalView:
        return LocalView(payload, self._region, uneven=self._uneven, memory=self._memory)

    def rewrapped(self, payload: torch.Tensor) -> LocalView:
        """Return a view over another payload, with memory of its own."""
        return self.rewrapper()(payload)

    def rewrapper(self) -> Callable[[torch.Tensor], LocalView]:
        """Return a function that wraps payloads as this one is, without holding this one."""
        region, varying, uneven = self._region, self._varying, self._uneven
        known = self._known
        return lambda payload: LocalView(
            payload, region, varying=varying, uneven=uneven, known=known
        )

    def _communicated(self, name: str, axes: tuple[Axis, ...], options: Any) -> LocalView:
        if self._uneven is not None:
            self._uneven.refuse(f"The collective {name}")
        payload = functional.local_collective(name, self._payload, self._region, axes, options)
        varying = frozenset() if name == "axis_index" else self._varying - {*axes}
        if name not in {"all_reduce", "all_gather"}:
            varying = varying | {*axes}
        known = () if name == "axis_index" else self._known
        return LocalView(payload, self._region, varying=varying, known=known)

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
        from xla_dtensor.dtensor.local_building import view_of_shards

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
        return flatten(self)

    @staticmethod
    def __tensor_unflatten__(inner: Any, state: Any, size: Any, stride: Any) -> LocalView:
        return unflatten(LocalView, inner, state)

    def __coerce_tangent_metadata__(self) -> LocalView:
        return self

    def __coerce_same_metadata_as_tangent__(self, state: Any, expected_type: Any = None) -> Any:
        return coerced_tangent(self, state, expected_type)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise LocalViewError(
            f"{self!r} was to be pickled. It is what each device has, and refers to the devices of "
            "this process. Pickle the DTensor, or the tensors of addressable_shards()."
        )


def _answers(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, PerDeviceTensor) or hasattr(tensor, "_local_tensor")


def _is_plain_leaf(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not _answers(value) and value.requires_grad


def _payload(value: Any, region: ManualRegion) -> Any:
    if isinstance(value, LocalView):
        return value._payload
    if isinstance(value, torch.Tensor) and (get_runtime().is_payload(value) or is_traced(value)):
        return spread_payload(value, region)
    return value


def _one_region(func: Any, views: Sequence[LocalView], given: Any) -> ManualRegion:
    """Return the region of the views among an op's arguments; refuse what cannot be mixed."""
    region = views[0]._region
    for value in leaves(given):
        if isinstance(value, LocalView):
            if value._region != region:
                raise LocalViewError(
                    f"{func} was called on local views over the axes {region.axes} of the mesh "
                    f"{mesh_text(region.mesh)} and {value._region.axes} of "
                    f"{mesh_text(value._region.mesh)}. A device's part of one is no part of the "
                    "other. Take both from DTensors on the same mesh; redistribute(mesh, "
                    "placements) moves one to the other's."
                )
        elif isinstance(value, PerDeviceTensor) or hasattr(value, "_local_tensor"):
            raise LocalViewError(
                f"{func} was called on a local view of local shape={tuple(views[0].shape)} and a "
                f"{type(value).__name__} of shape={tuple(value.shape)}. One has a device's shape, "
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
            given = args[place] if place < len(args) else kwargs.get("dropout_p", 0.0)
            return frozenset(views[0]._region.axes) if given else varying
    return frozenset(views[0]._region.axes)


def _results(
    func: Any,
    views: Sequence[LocalView],
    args: Sequence[Any],
    kwargs: Any,
    result: Any,
    uneven: Uneven | None,
    varying: frozenset[Axis],
) -> Any:
    if torch.Tag.inplace_view in func.tags:
        if is_traced(result):
            args[0]._payload = result
        return args[0]._reshaped_in_place()
    if func._schema.is_mutable:
        targets = written_targets(func, args, kwargs)
        for target in leaves(written_values(func, args, kwargs)):
            if isinstance(target, LocalView):
                target._memory.wrote(varying)
        if not makes_results(func):
            return targets
    memory = views[0]._memory if _is_view(func) else None
    region = views[0]._region

    options: Any = {"varying": varying, "uneven": uneven, "memory": memory}
    if not any(view._known for view in views):
        return map_nested(
            lambda v: LocalView(v, region, **options) if isinstance(v, torch.Tensor) else v, result
        )
    known = known_of_results(func, args, kwargs, [v._known for v in views], region.mesh, result)
    each = [result] if isinstance(result, torch.Tensor) else list(result)
    made = [
        LocalView(v, region, known=k, **options) if isinstance(v, torch.Tensor) else v
        for v, k in zip(each, known, strict=True)
    ]
    return made[0] if isinstance(result, torch.Tensor) else type(result)(made)


def _is_view(func: Any) -> bool:
    return any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)


class _Labelled(LinearResult):
    @staticmethod
    def forward(ctx: Any, view: Any, varying: frozenset[Axis]) -> Any:
        return LocalView(
            view._payload, view._region, varying=varying, uneven=view._uneven, known=view._known
        )

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad, None
