"""DTensors on ``mesh["tp"]`` of which each device of ``mesh["dp"]`` has a value of its own.

In a forward without a gradient sync each data-parallel device has rows and gradients of its own:
tensors are LocalViews over dp. A tensor-parallel module in it makes DTensors on ``mesh["tp"]``. So
there is a DTensor whose payload is such a LocalView, and whose placements say how each of these
lies on tp. On a (dp=2, tp=4) mesh, x of shape (16, 8)::

    x.to_local()                         a LocalView over dp, of shape (8, 8)
    from_local(that, mesh["tp"], [R])    a GroupDTensor of shape (8, 8)
    F.linear(it, weight)                 each device of dp has a product of its own, sharded on tp
    its to_local()                       over dp where nothing cuts it on tp, else over (dp, tp)

To be moved along tp it becomes a DTensor on the joint mesh for a moment, with a dim for dp in
front: (2, 8, 8) as [Shard(0), ...]. That moves nothing along dp.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from xla_dtensor.core import ManualRegion
from xla_dtensor.core.errors import LocalViewError, RedistributeError
from xla_dtensor.core.spanning import region_of, spanning_mesh
from xla_dtensor.dtensor.dispatch import state_of
from xla_dtensor.dtensor.dtensor import DTensor
from xla_dtensor.dtensor.labels import labels_of_outputs, legal_placements, propagate
from xla_dtensor.dtensor.local import LocalView
from xla_dtensor.dtensor.local_border import new_wrapper, spread_payload
from xla_dtensor.dtensor.mesh import DeviceMesh, as_device_mesh, mesh_text
from xla_dtensor.dtensor.redistribute import checked_placements
from xla_dtensor.runtimes.nested import leaves, map_nested
from xla_dtensor.runtimes.whole_ops import OneResult
from xla_dtensor.runtimes.written import makes_results, written_targets

__all__ = ["GroupDTensor", "as_view", "from_group_view", "grouped", "is_of_groups"]

aten = torch.ops.aten


class GroupDTensor(DTensor):
    """A DTensor whose payload is a LocalView over axes that its mesh lacks."""

    @property
    def region(self) -> ManualRegion:
        """The axes along which each device has a value of its own."""
        view: Any = self._local_tensor
        return view.region

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if any(getattr(t, "_is_per_device", False) for t in types):
            return NotImplemented  # a LocalView answers, and refuses
        kwargs = kwargs or {}
        groups = _groups((tuple(args), kwargs))
        mesh, region = groups[0]._spec.mesh, groups[0].region
        if func is aten._local_scalar_dense.default or torch.Tag.inplace_view in func.tags:
            _refuse(groups[0], str(func))
        views, options = map_nested(lambda v: _view_in(v, region), (tuple(args), kwargs))
        with torch._C.DisableTorchFunctionSubclass():
            output = func(*views, **options)
        if func._schema.is_mutable and not makes_results(func):
            return written_targets(func, args, kwargs)
        return _labelled(func, args, kwargs, mesh, output)

    # ------------------------------------------------------------------ moving

    def redistribute(
        self,
        device_mesh: Any = None,
        placements: Sequence[Any] | None = None,
        *,
        async_op: bool = False,
        forward_dtype: torch.dtype | None = None,
        backward_dtype: torch.dtype | None = None,
    ) -> GroupDTensor:
        """Return the same values lying as `placements` say; see ``DTensor.redistribute``."""
        mesh = self._spec.mesh
        changes_mesh = device_mesh is not None and as_device_mesh(device_mesh) != mesh
        if changes_mesh or backward_dtype is not None:
            raise RedistributeError(
                f"redistribute was called with the mesh {device_mesh} and "
                f"backward_dtype={backward_dtype} on a tensor on "
                f"{mesh_text(mesh.value)} of which each device of {self.region.axes} has a value "
                "of its own. It can be moved along its own mesh's axes only, its gradient in its "
                "own dtype. Call to_local() first."
            )
        canonical = checked_placements("redistribute", placements, mesh, self.ndim, partial=False)
        source: Any = self if forward_dtype is None else self.to(forward_dtype)
        stacked = _stacked(source, canonical)
        return grouped(_unstacked(stacked, self.region), mesh, canonical)

    def full_tensor(self, *, grad_placements: Sequence[Any] | None = None) -> Any:
        """Return each device's whole value, as a LocalView over the axes that the mesh lacks."""
        replicated = [Replicate()] * self._spec.mesh.ndim
        return as_view(self.redistribute(placements=replicated))

    def to_local(self, *, grad_placements: Sequence[Any] | None = None) -> Any:
        """Return the local tensor: a LocalView over all axes along which devices differ."""
        placements = self._spec.placements
        if grad_placements is None and all(p.is_replicate() for p in placements):
            return as_view(self)
        if any(p.is_partial() for p in placements):  # labels on values that are whole
            placements = [Replicate() if p.is_partial() else p for p in placements]
            tensor = self.redistribute(placements=placements)
            return tensor.to_local(grad_placements=grad_placements)
        of_grad = None
        if grad_placements is not None:
            of_grad = _joint_placements(self._spec.mesh, self.region, grad_placements)
        local: Any = _stacked(self, placements).to_local(grad_placements=of_grad)
        return _without_leading(local, self.region)

    # ------------------------------------------------------------------ what needs one value

    def cpu(self, *_: Any, **__: Any) -> NoReturn:
        """Refused: there are several values."""
        _refuse(self, "cpu()")

    def xla_sharding(self) -> NoReturn:
        """Refused: there are several values."""
        _refuse(self, "xla_sharding()")

    def addressable_shards(self) -> NoReturn:
        """Refused: there are several values."""
        _refuse(self, "addressable_shards()")

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        _refuse(self, "deepcopy")


def _refuse(tensor: GroupDTensor, what: str) -> NoReturn:
    raise LocalViewError(
        f"{what} was called on a DTensor on {mesh_text(tensor._spec.mesh.value)} of which each "
        f"device of {tensor.region.axes} has a value of its own: it is in a forward without a "
        "gradient sync, or was made of a local view over more axes. One value is needed. Call "
        "full_tensor(), which gives a LocalView."
    )


# ---------------------------------------------------------------------- ops


def _groups(values: Any) -> list[GroupDTensor]:
    return [leaf for leaf in leaves(values) if isinstance(leaf, GroupDTensor)]


def _view_in(leaf: Any, region: ManualRegion) -> Any:
    if isinstance(leaf, GroupDTensor):
        return leaf._local_tensor
    if isinstance(leaf, DTensor):
        if leaf.requires_grad:
            raise LocalViewError(
                f"A parameter of shape={tuple(leaf.shape)} was used that fully_shard does not "
                f"manage, in a forward without a gradient sync. Each device of {region.axes} would "
                "have a gradient of its own for it. Let fully_shard have it, or call "
                "set_requires_gradient_sync(True)."
            )
        return LocalView(spread_payload(leaf._local_tensor, region), region)
    return leaf


def _labelled(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], mesh: DeviceMesh, output: Any
) -> Any:
    placements = propagate(func, args, kwargs, mesh)
    if isinstance(output, torch.Tensor):
        return _wrapped(output, mesh, placements)
    if not isinstance(output, (list, tuple)):
        return output
    labels = labels_of_outputs(placements, len(output))
    dtensors = [
        _wrapped(x, mesh, label) if isinstance(x, torch.Tensor) else x
        for x, label in zip(output, labels, strict=True)
    ]
    return dtensors if isinstance(output, list) else tuple(dtensors)


def _made(view: torch.Tensor, mesh: DeviceMesh, placements: Any) -> GroupDTensor:
    self = new_wrapper(GroupDTensor, view)
    self._spec, self._local_tensor = state_of(view, mesh, tuple(placements)), view
    return self


def _wrapped(view: torch.Tensor, mesh: DeviceMesh, placements: Any) -> Any:
    legal = legal_placements(placements, view.ndim, mesh)
    return _made(view, mesh, legal)


# ---------------------------------------------------------------------- to and from LocalViews


class _OfView(OneResult):
    @staticmethod
    def forward(ctx: Any, view: LocalView, mesh: DeviceMesh, placements: Any) -> Any:
        return _made(view.detach(), mesh, placements)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return (as_view(grad) if isinstance(grad, GroupDTensor) else grad), None, None


class _AsView(OneResult):
    @staticmethod
    def forward(ctx: Any, tensor: GroupDTensor) -> Any:
        ctx.mesh, ctx.placements = tensor._spec.mesh, tensor._spec.placements
        return tensor._local_tensor.detach()

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        placements = tuple(Replicate() if p.is_partial() else p for p in ctx.placements)
        return _OfView.apply(grad, ctx.mesh, placements)


def as_view(tensor: Any) -> Any:
    """Return the values of a GroupDTensor as a LocalView; whole ones, however they lie."""
    return _AsView.apply(tensor)


def grouped(view: Any, mesh: DeviceMesh, placements: Sequence[Any]) -> Any:
    """Return the GroupDTensor of which each device has what it has of `view`.

    Args:
        view: A LocalView over axes that `mesh` lacks; whole along those of `mesh`.
        mesh: The mesh of the result.
        placements: How it lies there.
    """
    return _OfView.apply(view, mesh, tuple(placements))


def is_of_groups(view: LocalView, mesh: DeviceMesh) -> bool:
    """Tell whether devices along axes that `mesh` lacks have values of their own of `view`."""
    region, names = view.region, mesh.value.axis_names
    if spanning_mesh(mesh.value) != region.mesh:
        return False
    outer = [axis for axis in region.axes if axis not in names]
    return bool(outer) and len(region.axes) in (len(outer), len(outer) + len(names))


def from_group_view(view: LocalView, mesh: DeviceMesh, placements: Sequence[Any]) -> Any:
    """Return what ``from_local(view, mesh, placements)`` is where :func:`is_of_groups` holds.

    Raises:
        LocalViewError: A placement other than Replicate along axes that the view is whole along.
    """
    names = mesh.value.axis_names
    outer = tuple(axis for axis in view.region.axes if axis not in names)
    if outer == view.region.axes:
        if not all(placement.is_replicate() for placement in placements):
            raise LocalViewError(
                f"from_local was called with placements={tuple(placements)} and the mesh "
                f"{mesh_text(mesh.value)} on a local view over {outer}. The view is whole along "
                "that mesh, and the same value would be taken for a different shard on each "
                "device. Pass Replicate(), and redistribute the result."
            )
        return grouped(view, mesh, placements)
    region = region_of(view.region.mesh[outer])
    joint = _joint_mesh(mesh, region)
    stacked = DTensor.from_local(
        _with_leading(view, region), joint, _joint_placements(mesh, region, placements)
    )
    return grouped(_unstacked(stacked, region), mesh, placements)


# ---------------------------------------------------------------------- the joint mesh


def _joint_mesh(mesh: DeviceMesh, region: ManualRegion) -> DeviceMesh:
    names = {*mesh.value.axis_names, *region.axes}
    span = region.mesh
    return as_device_mesh(span[tuple(axis for axis in span.axis_names if axis in names)])


def _joint_placements(
    mesh: DeviceMesh, region: ManualRegion, placements: Sequence[Any]
) -> list[Any]:
    """Return how a tensor with a leading dim for each axis of the region lies on the joint mesh."""
    leading = len(region.axes)
    by_axis: dict[Any, Any] = {axis: Shard(place) for place, axis in enumerate(region.axes)}
    for axis, placement in zip(mesh.value.axis_names, placements, strict=True):
        by_axis[axis] = _behind(placement, leading)
    return [by_axis[axis] for axis in _joint_mesh(mesh, region).value.axis_names]


def _behind(placement: Any, leading: int) -> Any:
    if type(placement) is _StridedShard:
        return _StridedShard(placement.dim + leading, split_factor=placement.split_factor)
    return Shard(placement.dim + leading) if isinstance(placement, Shard) else placement


def _with_leading(view: Any, region: ManualRegion) -> Any:
    for _ in region.axes:
        view = view.unsqueeze(0)
    return view


def _without_leading(view: Any, region: ManualRegion) -> Any:
    for _ in region.axes:
        view = view.squeeze(0)
    return view


def _stacked(tensor: GroupDTensor, placements: Sequence[Any]) -> Any:
    """Return the DTensor on the joint mesh that has the devices' values one behind the other."""
    mesh, region = tensor._spec.mesh, tensor.region
    group_mesh = as_device_mesh(region.mesh[region.axes])
    shards = [Shard(place) for place in range(len(region.axes))]
    stacked = DTensor.from_local(_with_leading(as_view(tensor), region), group_mesh, shards)
    return stacked.redistribute(
        _joint_mesh(mesh, region), _joint_placements(mesh, region, placements)
    )


def _unstacked(stacked: Any, region: ManualRegion) -> Any:
    """Return the LocalView of the region that :func:`_stacked` was made of."""
    group_mesh = as_device_mesh(region.mesh[region.axes])
    shards = [Shard(place) for place in range(len(region.axes))]
    return _without_leading(stacked.redistribute(group_mesh, shards).to_local(), region)
