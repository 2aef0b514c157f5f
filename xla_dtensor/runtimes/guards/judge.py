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
        holds_the_same: Callable[[Any, Any], bool | None] = lambda found, now: None,
    ) -> None:
        self._reads, self._holds_the_same = reads, holds_the_same

    def forget(self, value: Any) -> Any:
        """Return what has to be kept of a value: tensors that the program does not read go."""
        if isinstance(value, torch.Tensor) and not self._reads(value):
            return TensorLike.of(value)
        if type(value) is tuple and not is_plain(value):
            return tuple(map(self.forget, value))
        return value

    def now_expected(self, found: Any, now: Any) -> Any:
        """Return what a later call has to find where `now` was accepted in place of `found`."""
        return found if isinstance(found, TensorLike | Moving) else now

    def accepts(self, found: Any, now: Any, depth: int = _DEPTH) -> bool:
        """Tell whether `now` may stand where the trace found `found`."""
        if found is now:
            return True
        if isinstance(found, Moving):
            return found.takes(now)
        if isinstance(found, TensorLike):
            return isinstance(now, torch.Tensor) and found == TensorLike.of(now)
        if type(found) is not type(now) or depth == 0:
            return False
        if is_plain(found):
            return is_equal(found, now)
        return self._accepts_object(found, now, depth - 1)

    def _accepts_object(self, found: Any, now: Any, depth: int) -> bool:
        kind = type(found)
        if kind in _BOUND:  # a method of C, which is made anew for each look
            same_name = found.__name__ == now.__name__
            return same_name and self.accepts(found.__self__, now.__self__, depth)
        if isinstance(found, weakref.ref):  # equal ones may refer to two objects
            return self.accepts(weakref.ref.__call__(found), weakref.ref.__call__(now), depth)
        if kind is types.FunctionType:
            return self._accepts_function(found, now)
        if isinstance(found, staticmethod | classmethod):
            return self.accepts(found.__func__, now.__func__, depth)
        if isinstance(found, property):
            return all(self.accepts(getattr(found, n), getattr(now, n), depth) for n in _PROPERTY)
        if isinstance(found, _BY_IDENTITY):
            return False
        if is_watched(kind) and has_value_in_c(kind) and not _equal_values(found, now):
            return False
        same = self._holds_the_same(found, now)
        if same is not None:
            return same
        if isinstance(found, tuple) and kind is not torch.Size:
            pairs = zip(found, now, strict=False)
            return len(found) == len(now) and all(self.accepts(a, b, depth) for a, b in pairs)
        if isinstance(found, types.MethodType):
            same = self.accepts(found.__func__, now.__func__, depth)
            return same and self.accepts(found.__self__, now.__self__, depth)
        if isinstance(found, functools.partial):
            return self.accepts(_parts(found), _parts(now), depth)
        if isinstance(found, list | dict) or is_watched(kind):
            return True  # Nothing was read of it.
        return _equal_objects(found, now)

    def _accepts_function(self, found: types.FunctionType, now: types.FunctionType) -> bool:
        if found.__code__ is not now.__code__ or found.__dict__.keys() != now.__dict__.keys():
            return False
        parts = [(found, now), (found.__dict__, now.__dict__)]
        parts += zip(found.__closure__ or (), now.__closure__ or (), strict=True)
        return all(self._holds_the_same(*pair) is not False for pair in parts)


def _equal_values(found: Any, now: Any) -> bool:
    """Compare the values of two objects of one type, past what a class of the user's says."""
    base = next((each for each in _VALUES if isinstance(found, each)), None)
    if base is None:
        return _equal_objects(found, now)
    # 0.0 equals -0.0 and computes otherwise.
    is_same = base not in _INEXACT or base.__repr__(found) == base.__repr__(now)
    return is_same and base.__eq__(found, now)


def _equal_objects(found: Any, now: Any) -> bool:
    """Compare two objects of one type that nobody can look into."""
    if isinstance(found, _SHOWN):
        return repr(found) == repr(now)
    if type(found).__eq__ is object.__eq__:  # which says that any two are different
        return False
    try:
        return bool(found == now)
    except Exception:  # An equality of the user's own may raise anything.
        return False


def _parts(partial: functools.partial[Any]) -> tuple[Any, ...]:
    return partial.func, partial.args, tuple(sorted(partial.keywords.items()))
