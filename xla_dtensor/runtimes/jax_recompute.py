"""``torch.utils.checkpoint`` in a compiled step: the second forward has to stay a second one.

In a step that is traced, a checkpointed region and its recomputation are the same equations of the
same values. XLA merges them, keeps the first ones' results until the backward pass, and nothing is
saved, without a word. So while PyTorch recomputes, what is read from outside of the region (the
saved inputs, the parameters) is read through an ``optimization_barrier``, together with the
gradient that has just been computed::

    x, w, gradient  ->  barrier  ->  x', w'        the same values, not before that gradient
    x', w'          ->  the region once more

The barrier's outputs are other values to XLA, so the recomputation stays; and they depend on the
gradient, so it is not scheduled before the backward pass comes to it.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch.utils.checkpoint as torch_checkpoint

if TYPE_CHECKING:
    from xla_dtensor.runtimes.jax_tensor import Storage

__all__ = ["Recomputation", "honouring_checkpoints"]


class Recomputation:
    """What is read while a region is computed a second time.

    Args:
        after: The value that it is not to begin before; None where there is none yet.
    """

    def __init__(self, after: Any) -> None:
        self._after = after
        self._own: weakref.WeakSet[Storage] = weakref.WeakSet()
        self._late: dict[int, tuple[Any, Any]] = {}

    def adopt(self, storage: Storage) -> None:
        """Note a storage that the recomputation itself makes."""
        self._own.add(storage)

    def array_of(self, storage: Storage) -> Any:
        """Return the storage's array, behind the barrier unless it is of this recomputation."""
        array = storage.array
        if storage in self._own or self._after is None:
            return array
        if id(array) not in self._late:
            import jax

            late, _ = jax.lax.optimization_barrier((array, self._after))
            # The array goes along: while it lives, nothing else has its id.
            self._late[id(array)] = (array, late)
        return self._late[id(array)][1]


_honoured = False


@contextlib.contextmanager
def _recomputing() -> Iterator[None]:
    from xla_dtensor.runtimes.jax_trace import active_trace

    trace = active_trace()
    if trace is None:
        yield
        return
    before, trace.recomputation = trace.recomputation, Recomputation(trace.latest)
    try:
        yield
    finally:
        trace.recomputation = before


@contextlib.contextmanager
def honouring_checkpoints() -> Iterator[None]:
    """Let torch's checkpoint tell the trace in progress when it computes a region again."""
    global _honoured
    if _honoured:  # a trace in a trace
        yield
        return
    hooks, function = torch_checkpoint._recomputation_hook, torch_checkpoint.CheckpointFunction
    backward = function.backward

    class Hooks(hooks):
        def __enter__(self) -> None:
            self._scope = _recomputing()
            self._scope.__enter__()
            super().__enter__()

        def __exit__(self, *error: Any) -> None:
            super().__exit__(*error)
            self._scope.__exit__(None, None, None)

    def reentrant(ctx: Any, *grads: Any) -> Any:
        run = ctx.run_function

        def recomputed(*args: Any) -> Any:
            with _recomputing():
                return run(*args)

        ctx.run_function = recomputed
        try:
            return backward(ctx, *grads)
        finally:
            ctx.run_function = run

    torch_checkpoint._recomputation_hook = Hooks
    function.backward = staticmethod(reentrant)
    _honoured = True
    try:
        yield
    finally:
        _honoured = False
        torch_checkpoint._recomputation_hook = hooks
        function.backward = staticmethod(backward)
