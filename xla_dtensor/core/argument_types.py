"""Errors for arguments of the wrong type; see :mod:`mesh_utils.argument_types`.

The wrapper is written again: whose code is whose is told by the folder of its file.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from mesh_utils.argument_types import RAW_ERRORS, explain
from xla_dtensor.core.errors import ArgumentTypeError

__all__ = ["argument_types"]

_Public = TypeVar("_Public", bound=Callable[..., Any])


def argument_types(public: _Public) -> _Public:
    """Let a function of this package name the argument of the wrong type that it failed for.

    Args:
        public: A function, or a class, of which the constructor is meant.
    """
    named: Any = public
    function: Callable[..., Any] = named.__init__ if isinstance(public, type) else public

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except RAW_ERRORS as error:
            explain(error, function, named.__qualname__, args, kwargs, ArgumentTypeError)
            raise

    if isinstance(public, type):
        named.__init__ = call
        return named
    wrapped: Any = call
    return wrapped
