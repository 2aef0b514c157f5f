"""redistribute: the same values, lying another way.

In global view it is one sharding constraint: XLA finds the communication. What is left to do here
is to check what was asked, to keep what is known of mesh axes that were not spoken of, and to send
the gradient back the way the source lay.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NoReturn, cast

import torch
from torch.distributed.tensor import Placement, Replicate

from xla_dtensor.core import Layout
from xla_dtensor.core.errors import DistributeError, RedistributeError, ShardDimError
from xla_dtensor.core.spanning import layout_on_span
from xla_dtensor.dtensor.dispatch import new_dtensor, state_of
from xla_dtensor.dtensor.labels import note_op, placements_on
from xla_dtensor.dtensor.mesh import DeviceMesh, as_device_mesh, empty_local, is_off_mesh, mesh_text
from xla_dtensor.report.attribution import ANY, scope_name
from xla_dtensor.runtimes import functional
from xla_dtensor.runtimes.registry import get_runtime
from xla_dtensor.runtimes.whole_ops import LinearResult

if TYPE_CHECKING:
    from xla_dtensor.dtensor.dtensor import DTensor

__all__ = [
    "as_plain",
    "checked_placements",
    "last_mesh",
    "redistribute_marker",
    "redistributed",
    "torch_placements",
]


# ----------------------------- Mark in a trace what is redistributed because somebody asked for it
#
# See :mod:`xla_dtensor.debug.explicit`, which looks for the marks.

_meshes: list[DeviceMesh] = []


def redistribute_marker(
    mesh: DeviceMesh | None = None, source: Sequence[Any] = (), target: Sequence[Any] = ()
) -> AbstractContextManager[Any]:
    """Return a context in which a constraint counts as asked for.

    Args:
        mesh: The mesh that the placements refer to; None for an annotation of a value of which it
            is not known how it lies.
        source: The placements that the value has, one per axis.
        target: Those that it is to have.
    """
    if torch.compiler.is_compiling():
        return nullcontext()  # Dynamo's graph keeps no scopes.
    if mesh is None:
        return get_runtime().scope(ANY)
    _meshes[:] = [mesh]
    changes = zip(mesh.value.axis_names, map(_letter, source), map(_letter, target), strict=True)
    return get_runtime().scope(scope_name(changes))


def last_mesh() -> DeviceMesh | None:
    """Return the mesh of the last redistribute in this process; None if there was none."""
    return _meshes[0] if _meshes else None


def _letter(placement: Any) -> str:
    if placement.is_partial():
        return "P"
    return f"S{placement.dim}" if hasattr(placement, "dim") else "R"


# --------------------------------------------------------------------------------- Placement checks
#
# Check the placements that a user passes, and make them canonical (no negative dims).


def checked_placements(
    function: str,
    placements: Sequence[Any] | None,
    mesh: DeviceMesh,
    ndim: int,
    *,
    partial: bool,
) -> tuple[Placement, ...]:
    """Return `placements` as a tuple of torch placements with non-negative dims.

    Args:
        function: The public function that was called, for messages.
        placements: One per mesh axis, None for all Replicate, or alias placements: one entry per
            tensor dim, e.g. ``("dp", None)``.
        mesh: The mesh they refer to.
        ndim: The tensor's number of dims.
        partial: Whether Partial is allowed.

    Raises:
        DistributeError: Wrong number, kind or dim.
    """
    if placements is None or (ndim == 0 and isinstance(placements, tuple) and not placements):
        return (Replicate(),) * mesh.ndim
    if isinstance(placements, (str, Placement)) or not isinstance(placements, Sequence):
        raise DistributeError(
            f"{function} was called with placements={placements!r}. Placements are a sequence with "
            f"one entry per axis of the mesh {mesh_text(mesh.value)}. Pass a list, e.g. "
            f"[{', '.join(['Replicate()'] * mesh.ndim)}]."
        )
    if {isinstance(placement, Placement) for placement in placements} == {False}:
        layout = Layout.from_aliases(tuple(placements), mesh.value)
        if len(placements) != ndim:
            raise DistributeError(
                f"{function} was called with alias placements={tuple(placements)} for a tensor "
                f"with {ndim} dims. Aliases name the mesh axes of each tensor dim, so there is one "
                f"entry per dim. Pass {ndim} entries; None leaves a dim whole."
            )
        placements = torch_placements(layout)
    if len(placements) != mesh.ndim:
        raise DistributeError(
            f"{function} was called with {len(placements)} placements={list(placements)} on the "
            f"mesh {mesh_text(mesh.value)}. There is one placement per mesh axis, {mesh.ndim} in "
            f"all, whatever the tensor's dims. Pass {mesh.ndim} placements; Replicate() leaves an "
            "axis out."
        )
    canonical: list[Placement] = []
    for axis, placement in enumerate(placements):
        dim = getattr(placement, "dim", None)
        if (
            not isinstance(placement, Placement)
            or (placement.is_partial() and not partial)
            or not (dim is None or -ndim <= dim < ndim)
        ):
            _refuse_placement(function, placement, axis, mesh, ndim)
        if dim is not None and dim < 0:
            kind = cast("Any", type(placement))
            factor = getattr(placement, "split_factor", None)
            options = {} if factor is None else {"split_factor": factor}
            placement = kind(dim + ndim, **options)
        canonical.append(placement)
    return tuple(canonical)


def _refuse_placement(
    function: str, placement: Any, axis: int, mesh: DeviceMesh, ndim: int
) -> NoReturn:
    where = f"for axis {mesh.value.axis_names[axis]!r} of the mesh {mesh_text(mesh.value)}"
    if not isinstance(placement, Placement):
        raise DistributeError(
            f"{function} was called with {placement!r} {where}. Each entry has to be a placement, "
            "and aliases and placements cannot be mixed. Pass Shard(dim), Replicate() or "
            "Partial()."
        )
    if placement.is_partial():
        raise DistributeError(
            f"{function} was called with {placement!r} {where}. Partial says that a reduction is "
            "still pending, which no annotation can bring about for a value that is already "
            "whole. Pass Shard(dim) or Replicate()."
        )
    dim = cast("Any", placement).dim
    raise ShardDimError(
        f"{function} was called with {placement!r} {where} for a tensor with {ndim} dims. The "
        f"dim {dim} does not exist. Pass a dim from {-ndim} to {ndim - 1}."
        if ndim
        else f"{function} was called with {placement!r} {where} for a tensor without dims. A "
        "scalar cannot be split. Pass Replicate()."
    )


@lru_cache(maxsize=4096)
def torch_placements(layout: Layout) -> tuple[Placement, ...]:
    """Return a layout's placements as torch's own objects."""
    from torch.distributed.tensor import Partial, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    from xla_dtensor.core import placements as records

    def convert(record: Any) -> Placement:
        if isinstance(record, records.StridedShard):
            return _StridedShard(record.dim, split_factor=record.split_factor)
        if isinstance(record, records.Shard):
            return Shard(record.dim)
        if isinstance(record, records.Partial):
            return Partial(record.reduce_op)
        return Replicate()

    return tuple(convert(record) for record in layout.to_placements())


# ------------------------------------------------------------------------------------- Redistribute


def redistributed(
    source: DTensor,
    device_mesh: Any,
    placements: Sequence[Any] | None,
    forward_dtype: torch.dtype | None,
    backward_dtype: torch.dtype | None,
) -> DTensor:
    """Return a DTensor of the same values; see ``DTensor.redistribute``."""
    mesh = source._spec.mesh if device_mesh is None else as_device_mesh(device_mesh)
    if placements is None:
        raise RedistributeError(
            "redistribute was called without placements. There is nothing to move to. Pass "
            f"placements with one entry per axis of the mesh {mesh_text(mesh.value)}."
        )
    canonical = checked_placements("redistribute", placements, mesh, source.ndim, partial=True)
    for axis, placement in zip(mesh.value.axis_names, canonical, strict=True):
        if placement.is_partial():
            raise RedistributeError(
                f"redistribute was called with {placement!r} for axis {axis!r} of the mesh "
                f"{mesh_text(mesh.value)}. Partial says that a reduction is still pending, which "
                "no annotation can bring about for a value that is already whole. Pass Shard(dim) "
                "or Replicate()."
            )
    if mesh is not source._spec.mesh:
        _check_same_devices(source._spec.mesh, mesh)
    tensor: Any = source if forward_dtype is None else source.to(forward_dtype)
    return _Redistribute.apply(  # pyright: ignore[reportReturnType]
        tensor, mesh, canonical, backward_dtype
    )


def _check_same_devices(source: DeviceMesh, target: DeviceMesh) -> None:
    if source.value.root == target.value.root:
        return
    ids = [set(mesh.value.root.device_ids.reshape(-1).tolist()) for mesh in (source, target)]
    if ids[0] != ids[1]:
        raise RedistributeError(
            f"redistribute was called with a mesh over {len(ids[1])} devices on a tensor over "
            f"{len(ids[0])} others. One XLA program runs on one set of devices. Pass a mesh over "
            "the same devices, or move the value through the host: "
            "distribute_tensor(tensor.cpu(), mesh, placements)."
        )


class _Redistribute(LinearResult):
    @staticmethod
    def forward(
        ctx: Any, source: DTensor, mesh: DeviceMesh, placements: Any, dtype: Any
    ) -> DTensor:
        ctx.source, ctx.dtype, ctx.original = source._spec, dtype, source.dtype
        outer_cuts = source._spec.outer_cuts_on(mesh)
        layout = Layout.from_placements(placements, source.ndim, mesh.value)
        ctx.layout = layout_on_span(layout, outer_cuts)
        with redistribute_marker(mesh, placements_on(source._spec, mesh), placements):
            payload = functional.constrain(source._local_tensor, ctx.layout)
        # Not before the payload is read: that ends a load, and with it a class (dcp).
        ctx.kind = type(source)
        state = state_of(payload, mesh, placements, outer_cuts)
        return new_dtensor(ctx.kind, payload, note_op(state, "redistribute", [source]))

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        # A gradient has a value, so what was pending in the forward is whole in the backward.
        placements = ctx.source.placements
        target = tuple(Replicate() if p.is_partial() else p for p in placements)
        state = ctx.source.with_placements(ctx.source.mesh, target)
        if not hasattr(grad, "_spec"):  # PyTorch makes a plain one of a view that was written to
            grad = _FromPlain.apply(grad, state, ctx.kind)
        grad = grad if ctx.dtype is None else grad.to(ctx.dtype)
        grad = _summed_up(grad, ctx.layout, state.span_layout)
        return grad.redistribute(ctx.source.mesh, target).to(ctx.original), None, None, None


def _summed_up(grad: DTensor, arrives: Layout, leaves: Layout) -> DTensor:
    """Return a gradient that a program sums up before it moves it on.

    A gradient is the sum of what the readers of a value sent. Left alone, XLA hands the layout that
    is wanted behind the move on to each summand, and moves each by itself.
    """
    open_dims = frozenset(dim for dim, cuts in enumerate(arrives.dims) if not cuts)
    if len(open_dims) == arrives.ndim or arrives.dims == leaves.dims or torch.is_grad_enabled():
        return grad  # in grad mode it is differentiated once more, and this is below autograd
    layout = Layout(arrives.mesh, arrives.dims, (), open_dims)
    payload = get_runtime().summed_up(grad._local_tensor, layout)
    return grad if payload is grad._local_tensor else new_dtensor(type(grad), payload, grad._spec)


def as_plain(tensor: DTensor, grad_placements: Sequence[Any] | None = None) -> torch.Tensor:
    """Return the runtime's plain tensor for the whole value, lying as it does; no data moves.

    Args:
        tensor: The DTensor. Gradients of the result come back to it.
        grad_placements: How these are to lie; as `tensor` is labelled when None.
    """
    if is_off_mesh(tensor._spec.mesh):
        return empty_local(tensor.shape, tensor.dtype)
    placements = tensor._spec.placements if grad_placements is None else grad_placements
    placements = tuple(Replicate() if p.is_partial() else p for p in placements)
    return _ToPlain.apply(tensor, placements)  # pyright: ignore[reportReturnType]


class _ToPlain(LinearResult):
    @staticmethod
    def forward(ctx: Any, source: DTensor, grad_placements: Any) -> torch.Tensor:
        ctx.state = source._spec.with_placements(source._spec.mesh, grad_placements)
        ctx.kind = type(source)
        return functional.to_plain(source._local_tensor)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        if hasattr(grad, "_spec"):  # of a sum of the plain tensor and a DTensor
            return grad.redistribute(ctx.state.mesh, ctx.state.placements), None
        return _FromPlain.apply(grad, ctx.state, ctx.kind), None


class _FromPlain(LinearResult):
    """The way back of `_ToPlain`: a plain tensor of the runtime as a DTensor."""

    @staticmethod
    def forward(ctx: Any, plain: torch.Tensor, state: Any, kind: Any) -> DTensor:
        ctx.placements = state.placements
        # Where no gradient arrives PyTorch makes zeros itself, on the host.
        runtime = get_runtime()
        is_host = type(plain) is torch.Tensor and not runtime.is_payload(plain)
        place = runtime.put if is_host else functional.constrain
        payload = place(plain, state.span_layout)
        state = state_of(payload, state.mesh, state.placements, state.outer_cuts)
        return new_dtensor(kind, payload, state)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return _ToPlain.apply(grad, ctx.placements), None, None
