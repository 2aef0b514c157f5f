"""When one Python value may stand where a trace found another.

A program was traced with what Python held then. On a later call a name may refer to another object;
whether the program still holds depends on what the object is:

=======================================  ===========================================================
a number, a text, a dtype, None, ...     equal, and of one type (1 and True are two things)
a function                               the same code, with what may stand for each other around it
a tensor                                 the same one, if the program reads it; any other one of its
                                         kind, if the step only replaces it
a module, a class, an optimizer          the same one
what the step read some of               all that was read of the one is the same in the other
an object with a value in C              that, and equal: a number of a class of the user's
an object that it read nothing of        any other of its class
anything else                            of the same type and equal, if it says what is equal to it
=======================================  ===========================================================
"""

from __future__ import annotations

import functools
import operator
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch

from xla_dtensor.runtimes.guards.objects import has_value_in_c, is_watched
from xla_dtensor.runtimes.guards.values import Moving, TensorLike, is_equal, is_plain

__all__ = ["Judge"]

_PROPERTY = ("fget", "fset", "fdel")
_BY_IDENTITY = (
    *(torch.Tensor, torch.nn.Module, torch.optim.Optimizer, torch.Generator),
    *(type, types.ModuleType, types.BuiltinFunctionType),
)
_BOUND = (types.BuiltinMethodType, types.MethodWrapperType)
# Whose text says all that they do.
_SHOWN = (operator.itemgetter, operator.attrgetter, operator.methodcaller)
_INEXACT = (float, complex)
_VALUES: tuple[Any, ...] = (*_INEXACT, int, str, bytes)
_DEPTH = 20


class Judge:
    """Tells whether a value may stand where a trace found another one.

    Args:
        reads: Tells whether the program reads a tensor.
        holds_the_same: Compares what two objects hold, where the step read some of the first; None
            where it did not.
    """

    def __init__(
        self,
        reads: Callable[[torch.Tensor], bool] = lambda tensor: True,
        holds_the_same: Callable[[Any, Any], bool | None] = lambda expected, actual: None,
    ) -> None:
        self._reads, self._holds_the_same = reads, holds_the_same

    def forget(self, value: Any) -> Any:
        """Return what has to be kept of a value: tensors that the program does not read go."""
        if isinstance(value, torch.Tensor) and not self._reads(value):
            return TensorLike.of(value)
        if type(value) is tuple and not is_plain(value):
            return tuple(map(self.forget, value))
        return value

    def now_expected(self, expected: Any, actual: Any) -> Any:
        """Return what a later call has to find where `actual` was accepted for `expected`."""
        return expected if isinstance(expected, TensorLike | Moving) else actual

    def accepts(self, expected: Any, actual: Any, depth: int = _DEPTH) -> bool:
        """Tell whether `actual` may stand where the trace found `expected`."""
        if expected is actual:
            return True
        if isinstance(expected, Moving):
            return expected.takes(actual)
        if isinstance(expected, TensorLike):
            return isinstance(actual, torch.Tensor) and expected == TensorLike.of(actual)
        if type(expected) is not type(actual) or depth == 0:
            return False
        if is_plain(expected):
            return is_equal(expected, actual)
        return self._accepts_object(expected, actual, depth - 1)

    def _accepts_object(self, expected: Any, actual: Any, depth: int) -> bool:
        kind = type(expected)
        if kind in _BOUND:  # a method of C, which is made anew for each look
            same_name = expected.__name__ == actual.__name__
            return same_name and self.accepts(expected.__self__, actual.__self__, depth)
        if isinstance(expected, weakref.ref):  # equal ones may refer to two objects
            return self.accepts(weakref.ref.__call__(expected), weakref.ref.__call__(actual), depth)
        if kind is types.FunctionType:
            return self._accepts_function(expected, actual)
        if isinstance(expected, staticmethod | classmethod):
            return self.accepts(expected.__func__, actual.__func__, depth)
        if isinstance(expected, property):
            return all(
                self.accepts(getattr(expected, n), getattr(actual, n), depth) for n in _PROPERTY
            )
        if isinstance(expected, _BY_IDENTITY):
            return False
        if is_watched(kind) and has_value_in_c(kind) and not _equal_values(expected, actual):
            return False
        same = self._holds_the_same(expected, actual)
        if same is not None:
            return same
        if isinstance(expected, tuple) and kind is not torch.Size:
            pairs = zip(expected, actual, strict=False)
            return len(expected) == len(actual) and all(self.accepts(a, b, depth) for a, b in pairs)
        if isinstance(expected, types.MethodType):
            same = self.accepts(expected.__func__, actual.__func__, depth)
            return same and self.accepts(expected.__self__, actual.__self__, depth)
        if isinstance(expected, functools.partial):
            return self.accepts(_parts(expected), _parts(actual), depth)
        if isinstance(expected, list | dict) or is_watched(kind):
            return True  # Nothing was read of it.
        return _equal_objects(expected, actual)

    def _accepts_function(self, expected: types.FunctionType, actual: types.FunctionType) -> bool:
        if (
            expected.__code__ is not actual.__code__
            or expected.__dict__.keys() != actual.__dict__.keys()
        ):
            return False
        parts = [(expected, actual), (expected.__dict__, actual.__dict__)]
        parts += zip(expected.__closure__ or (), actual.__closure__ or (), strict=True)
        return all(self._holds_the_same(*pair) is not False for pair in parts)


def _equal_values(expected: Any, actual: Any) -> bool:
    """Compare the values of two objects of one type, past what a class of the user's says."""
    base = next((kind for kind in _VALUES if isinstance(expected, kind)), None)
    if base is None:
        return _equal_objects(expected, actual)
    # 0.0 equals -0.0 and computes otherwise.
    is_same = base not in _INEXACT or base.__repr__(expected) == base.__repr__(actual)
    return is_same and base.__eq__(expected, actual)


def _equal_objects(expected: Any, actual: Any) -> bool:
    """Compare two objects of one type that nobody can look into."""
    if isinstance(expected, _SHOWN):
        return repr(expected) == repr(actual)
    if type(expected).__eq__ is object.__eq__:  # which says that any two are different
        return False
    try:
        return bool(expected == actual)
    except Exception:  # An equality of the user's own may raise anything.
        return False


def _parts(partial: functools.partial[Any]) -> tuple[Any, ...]:
    return partial.func, partial.args, tuple(sorted(partial.keywords.items()))
