"""Keep torch.compile out of the code that runs ops.

After a graph break, Dynamo looks into every Python function that is called while the rest of the
frame runs: a tensor's ``__torch_dispatch__``, and from there into JAX, of which it cannot make
anything. What a class marked here does, it runs as it is. In a graph nothing changes, because
there the call is recorded, or read, before any frame is made.
"""

from __future__ import annotations

from types import FunctionType
from typing import TypeVar

from torch._C._dynamo import eval_frame

__all__ = ["runs_as_it_is"]

Kind = TypeVar("Kind", bound=type)
_SKIP = eval_frame._FrameAction.SKIP
_STRATEGY = eval_frame._FrameExecStrategy(_SKIP, _SKIP)


def runs_as_it_is(kind: Kind) -> Kind:
    """Mark a class, as a decorator: Dynamo skips its functions and all that they call.

    Args:
        kind: The class. Inherited functions are not marked.

    Returns:
        The same class.
    """
    for value in vars(kind).values():
        if isinstance(value, property):
            functions = [value.fget, value.fset]
        else:
            functions = [getattr(value, "__func__", value)]
        for function in functions:
            if isinstance(function, FunctionType):
                eval_frame.set_code_exec_strategy(function.__code__, _STRATEGY)
    return kind
