"""LocalViews at the border of a graph of torch.compile.

Inside a graph a LocalView is its local payload. Where one goes in or comes out, the rest (which
mesh axes, along which of them devices differ, how much of each tensor is padding) is a constant of
the graph, and guarded.

Inside of one graph a view and the DTensor that it was cut from share memory, as they do outside. At
the border that tie is cut. To write to such a view is refused, because the write would not reach
the DTensor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import torch

from xla_dtensor.errors import LocalViewError
from xla_dtensor.local_link import Memory

if TYPE_CHECKING:
    from xla_dtensor.local_view import LocalView

__all__ = ["ViewState", "coerced_tangent", "flatten", "unflatten"]


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
