"""GlobalState: what a DTensor knows beside its payload.

Many DTensors share one state: an op's answer is kept with the state of its output, so a repeated
op makes none. Its parts are therefore never assigned to; a DTensor that changes is given another.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from mesh_utils import Axis
from xla_dtensor.core import Layout
from xla_dtensor.core.spanning import layout_on_span, spanning_mesh
from xla_dtensor.dtensor.mesh import DeviceMesh, as_device_mesh

__all__ = [
    "GlobalState",
    "Known",
    "joint_mesh",
    "known_of_layout",
    "known_placements",
    "placements_on",
    "split",
]


# ----------------------------------- What is known of the mesh axes that a tensor's own mesh lacks
#
# A tensor on ``mesh["tp"]`` is a tensor of the whole (dp, tp) mesh. Its placements say nothing of
# dp, yet its rows may well be sharded over dp: it was computed from a batch that is. A constraint
# that took "nothing said" for "replicated" would gather the batch at every redistribute of a
# tensor-parallel plan. So a tensor's state carries what is known, as (axis, dim) pairs, and ops
# pass it on: labels are propagated on the mesh of all axes of which something is known, and taken
# apart again.
#
#     x   on mesh["tp"]: [Replicate()], known dp on dim 0        a batch
#     w   on mesh["tp"]: [Shard(0)]
#     F.linear(x, w)     on mesh["tp"]: [Shard(1)], known dp on dim 0
#
# Where nothing is known the dims stay open for XLA to choose, where it can be told so.

Known: TypeAlias = tuple[tuple[Axis, int], ...]


def known_beside(mesh: DeviceMesh, states: Iterable[GlobalState]) -> Known:
    """Return what tensors of one shape know of the axes that `mesh` lacks."""
    own, found = set(mesh.value.axis_names), {}
    for state in states:
        if not _related(state.mesh, mesh):
            continue
        for axis, dim in (*_cuts(state), *state.known):
            if axis not in own:
                found.setdefault(axis, dim)
    return tuple(found.items())


def known_of_layout(layout: Layout | None, mesh: DeviceMesh) -> Known:
    """Return what a layout on the spanning mesh says of the axes that `mesh` lacks.

    Args:
        layout: A layout of whole axes, or None.
        mesh: The mesh.
    """
    if layout is None:
        return ()
    own = set(mesh.value.axis_names)
    pairs = [(axis, dim) for dim, axes in enumerate(layout.dims) for axis in axes]
    return tuple((axis, dim) for axis, dim in pairs if axis not in own)  # pyright: ignore


def _cuts(state: GlobalState) -> list[tuple[Axis, int]]:
    pairs = zip(state.mesh.value.axis_names, state.placements, strict=True)
    return [(axis, p.dim) for axis, p in pairs if type(p) is Shard]


def _related(one: DeviceMesh, other: DeviceMesh) -> bool:
    if one is other or spanning_mesh(one.value) == spanning_mesh(other.value):
        return True
    # A submesh without axes of size 1 has all devices, and so spans them by itself.
    root = one.value.root
    names = {*one.value.axis_names, *other.value.axis_names}
    return root == other.value.root and names <= {*root.axis_names}


def joint_mesh(mesh: DeviceMesh, states: Sequence[GlobalState]) -> DeviceMesh:
    """Return the mesh of the axes of `mesh` and all that `states` know of.

    `mesh` itself where there are no others, which is nearly always.
    """
    if all(state.mesh is mesh and not state.known for state in states):
        return mesh
    span = spanning_mesh(mesh.value)
    axes = set(mesh.value.axis_names)
    for state in states:
        if _related(state.mesh, mesh):
            axes |= {axis for axis, _ in (*_cuts(state), *state.known)}
    if axes == set(mesh.value.axis_names):
        return mesh
    return as_device_mesh(span[tuple(axis for axis in span.axis_names if axis in axes)])


def known_placements(known: Known, mesh: DeviceMesh) -> tuple[Any, ...]:
    """Return what is known as placements on a mesh."""
    on = dict(known)
    return tuple(Shard(on[axis]) if axis in on else Replicate() for axis in mesh.value.axis_names)


def placements_on(state: GlobalState, mesh: DeviceMesh) -> tuple[Any, ...]:
    """Return a tensor's placements on another mesh of the same devices; Replicate if unknown."""
    if state.mesh is mesh or state.mesh == mesh:
        return state.placements
    if not _related(state.mesh, mesh):
        return (Replicate(),) * mesh.ndim
    on: dict[Axis, Any] = {axis: Shard(dim) for axis, dim in state.known}
    on |= dict(zip(state.mesh.value.axis_names, state.placements, strict=True))
    return tuple(on.get(axis, Replicate()) for axis in mesh.value.axis_names)


def split(placements: Sequence[Any], joint: DeviceMesh, mesh: DeviceMesh) -> tuple[Any, Known]:
    """Take placements on a joint mesh apart: those on `mesh`, and what is known beside it."""
    on = dict(zip(joint.value.axis_names, placements, strict=True))
    own = mesh.value.axis_names
    known = tuple((axis, p.dim) for axis, p in on.items() if axis not in own and type(p) is Shard)
    return tuple(on[axis] for axis in own), known


# ------------------------------------------------------------------------------------- GlobalState

_tokens: dict[Any, object] = {}
_TOKENS_LIMIT = 50_000


class GlobalState(DTensorSpec):
    """What a DTensor knows beside its payload; torch reads mesh, placements and meta from it."""

    mesh: DeviceMesh
    # None until it is asked for.
    cached_token: object | None = None
    # (axis, dim) pairs: what is known of the axes that the mesh lacks, where it is a submesh.
    known: Known = ()
    # Which op it is the state of the output of, for `explain`; None where a caller placed it.
    made_by: Any = None
    # Whether such an output is told to lie as its label says; see `products`.
    pinned: bool = False

    @property
    def layout(self) -> Layout:
        """The placements as a Layout of the mesh value."""
        return Layout.from_placements(self.placements, len(self.shape), self.mesh.value)

    @property
    def span_layout(self) -> Layout:
        """The layout over all devices of the root, with what is known of the other axes."""
        return layout_on_span(self.layout, self.known)

    def moved(self, mesh: DeviceMesh, placements: tuple[Any, ...]) -> GlobalState:
        """Return the state of the same values on another mesh, or with other placements."""
        meta: Any = self.tensor_meta
        state = GlobalState(mesh, placements, tensor_meta=meta)
        state.known = known_beside(mesh, [self])
        return state

    def with_stride(self, stride: tuple[int, ...]) -> GlobalState:
        """Return the state of the same tensor with another stride, as torch tells views by it."""
        meta: Any = self.tensor_meta
        if stride == meta.stride:
            return self
        meta = TensorMeta(meta.shape, stride, meta.dtype)
        state = GlobalState(self.mesh, self.placements, tensor_meta=meta)
        state.known = self.known
        return state

    def token(self) -> object:
        """Return an object that is one and the same for states of the same meaning.

        Comparing states takes microseconds, comparing their tokens none.
        """
        if self.cached_token is None:
            meta: Any = self.tensor_meta
            # In torch 2.9 a _StridedShard equals the Shard of its dim, and has its hash.
            kinds = tuple(map(type, self.placements))
            key = (self.mesh, kinds, self.placements, self.known)
            key = (*key, meta.shape, meta.stride, meta.dtype)
            if len(_tokens) >= _TOKENS_LIMIT:
                _tokens.clear()
            try:
                token = _tokens.setdefault(key, object())
            except TypeError:  # a size that torch.compile has not fixed
                token = object()
            object.__setattr__(self, "cached_token", token)
        return self.cached_token

    def _check_equals(self, other: Any, skip_shapes: bool = False) -> bool:
        # Newer versions of torch guard compiled functions with this, and leave the shapes to guards
        # on the inner tensor, of which there are none for a JaxTensor.
        same = super()._check_equals(other)  # pyright: ignore[reportAttributeAccessIssue]
        return same and self.known == getattr(other, "known", ())

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, "cached_token", None)
        super().__setattr__(name, value)
