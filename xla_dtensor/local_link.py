"""Shared memory between a DTensor and the LocalViews cut from it.

In PyTorch ``x.to_local()`` is the very memory of x: ``x.to_local().zero_()`` empties x, and what an
optimizer does to x is seen in the local tensor. Here the two are different arrays on the devices,
so a link between them carries writes over, each time before the other side is used:

    v = x.to_local()       link: (x, v's memory)
    v[0].zero_()           the view v[0] has the same link; it pushes: x is written as v is
    x.add_(1)              x's version counter moves
    v.sum()                v pulls first: its memory is written as x is

Where a gradient is recorded, writing to a view raises, as in PyTorch; under ``no_grad`` a view that
requires grad is written to like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from mesh_utils import Axis
from xla_dtensor.errors import LocalViewError
from xla_dtensor.nested import leaves
from xla_dtensor.runtimes.functional_local import run_local_op
from xla_dtensor.runtimes.functional_ops import is_traced
from xla_dtensor.runtimes.registry import get_runtime
from xla_dtensor.written import written_values

__all__ = ["Link", "Memory", "check_writes"]


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
        self._source, self._cut, self._joined = source, cut, joined
        self._replicated = replicated
        self.memory = cut()
        self._seen = _state(source)

    def pull(self) -> None:
        """Write what the DTensor became since the last look to the view's memory."""
        version, value = _state(self._source)
        if version != self._seen[0] or value is not self._seen[1] or version < 0:
            self._seen = version, value
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
        payload: Any = self._source
        _write(payload._local_tensor, self._joined(self.memory), local=False)
        if not payload.is_inference():
            torch.autograd.graph.increment_version(payload)  # for other views of the same tensor
        self._seen = _state(self._source)


def _write(target: torch.Tensor, value: torch.Tensor, local: bool) -> None:
    run = run_local_op if local or is_traced(target) else get_runtime().run_op
    # A tensor of inference mode may be written to in inference mode only.
    with torch.inference_mode(target.is_inference() or torch.is_inference_mode_enabled()):
        run(torch.ops.aten.copy_.default, (target, value), {})


def _state(source: Any) -> tuple[int, Any]:
    """Return what changes when a DTensor is written to.

    Its version counter, which inference mode has not, and which a compiled step that only launches
    its program may not move; and what the runtime says of the value.
    """
    payload = source._local_tensor
    value = None if is_traced(payload) else get_runtime().value_token(payload)
    version = -1 if source.is_inference() else source._version
    return (version if value is None else max(version, 0)), value
