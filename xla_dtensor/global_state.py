"""GlobalState: what a DTensor knows beside its payload.

Many DTensors share one state: an op's answer is kept with the state of its output, so a repeated
op makes none. Its parts are therefore never assigned to; a DTensor that changes is given another.
"""

from __future__ import annotations

from typing import Any

from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from xla_dtensor.core import Layout
from xla_dtensor.core.spanning import layout_on_span
from xla_dtensor.device_mesh import DeviceMesh
from xla_dtensor.known_axes import Known, known_beside

__all__ = ["GlobalState"]

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
    # Whether such an output is told to lie as its label says; see `product_pins`.
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
