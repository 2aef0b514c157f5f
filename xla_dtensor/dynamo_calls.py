"""Functions of one tensor that Dynamo records whole: one call in its graph, of a tensor and a text.

Dynamo cannot read what most of our functions do with meshes and placements. Marked here, a function
is a single call in the graph; everything but the tensor is a constant that the text names, and is
guarded: a call with another mesh compiles anew. The function itself runs when AOTAutograd traces
the graph::

    @one_call
    def psum(x, axis): ...

    graph:  %psum = call(%view, "psum #0")
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

import torch

from xla_dtensor.runtimes.layout_names import Names

__all__ = ["called_in_graph", "one_call", "real_mesh"]

P = ParamSpec("P")
T = TypeVar("T")
_functions: dict[str, Callable[..., Any]] = {}
_calls = Names("call")


def one_call(function: Callable[P, T]) -> Callable[P, T]:
    """Mark a function, as a decorator. Its first argument is the tensor.

    Args:
        function: Takes constants (numbers, texts, meshes, placements) besides.

    Returns:
        A function that does the same, and can be called in compiled code.
    """
    name, first = function.__name__, next(iter(inspect.signature(function).parameters))
    _functions[name] = function

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        if not torch.compiler.is_dynamo_compiling():
            return function(*args, **kwargs)
        if args:
            return called_in_graph(name, args[0], args[1:], kwargs)
        rest = {key: value for key, value in kwargs.items() if key != first}
        return called_in_graph(name, kwargs[first], (), rest)

    return called


def called_in_graph(name: str, tensor: Any, args: Any, kwargs: Any) -> Any:
    """Call a marked function in code that Dynamo reads.

    Args:
        name: The function's name.
        tensor: Its first argument.
        args: The other positional arguments.
        kwargs: The keyword arguments.
    """
    return _call(tensor, _named(name, args, kwargs))


def _named(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Run, not traced, by Dynamo, which guards on the arguments."""
    torch.compiler.allow_in_graph(_call)
    given = _real((name, tuple(args), dict(kwargs)))
    return _calls.name(given, name, _key(given))


# What torch.compiler.assume_constant_result does, without importing Dynamo for it.
_named._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


def _call(tensor: Any, call: str) -> Any:
    name, args, kwargs = _calls.value(call)
    return _functions[name](tensor, *args, **kwargs)


def real_mesh(mesh: Any) -> Any:
    """Return the mesh behind the stand-in that newer versions of torch trace with."""
    return getattr(mesh, "real_obj", mesh)


def _real(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _real(each) for key, each in value.items()}
    if type(value) in (tuple, list):
        return type(value)(map(_real, value))
    return real_mesh(value)


def _key(value: Any) -> Hashable:
    """Return what tells constants apart: 1 and 1.0, and in torch 2.9 kinds of Shard, are equal."""
    if isinstance(value, Mapping):
        return (dict, tuple((key, _key(each)) for key, each in value.items()))
    if type(value) in (tuple, list):
        return (type(value), tuple(map(_key, value)))
    return (type(value), value)
