"""Errors for arguments of the wrong type, from the types that a function declares.

A function of the public API is decorated with :func:`argument_types`. A call that succeeds is not
looked at, and an error of this project's own goes through. Where anything else comes out, such as
"'int' object is not iterable" from some line below, the arguments are compared with their
annotations, and the first one that does not fit is named::

    init_device_mesh("xla", (2, 4), mesh_dim_names=3)

    ArgumentTypeError: init_device_mesh was called with mesh_dim_names=3, of type int. It is
    declared as Sequence[str] | None. Pass that.

So an annotation is all that a message needs; ``Any`` says nothing, and the error stays as it is.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from types import GenericAlias, UnionType
from typing import Any, TypeVar, get_args, get_origin

from mesh_utils.errors import ArgumentTypeError

__all__ = ["RAW_ERRORS", "argument_types", "explain"]

_Public = TypeVar("_Public", bound=Callable[..., Any])
_OURS = ("mesh_utils", "xla_dtensor")
_LONGEST = 60

RAW_ERRORS = (
    *(ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError),
    ValueError,
)


def argument_types(public: _Public) -> _Public:
    """Let a function name the argument of the wrong type that it failed for.

    Args:
        public: A function, or a class, of which the constructor is meant.

    Returns:
        The function, wrapped; or the class itself.

    Example:
        >>> @argument_types
        ... def halves(sizes: list[int]) -> list[int]:
        ...     return [size // 2 for size in sizes]
        >>> halves([4, "a"])
        Traceback (most recent call last):
        mesh_utils.errors.ArgumentTypeError: halves was called with sizes=[4, 'a'], of type list. It
        is declared as list[int]. Pass that.
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


def explain(
    error: Exception,
    function: Callable[..., Any],
    name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    error_type: type[Exception],
) -> None:
    """Raise for the first argument that is not what its annotation says; return if there is none.

    Args:
        error: What the call raised.
        function: What was called.
        name: Its name, for the message.
        args: By position.
        kwargs: By name.
        error_type: What to raise.
    """
    if type(error).__module__.partition(".")[0] in _OURS:
        return
    try:
        bound = inspect.signature(function).bind(*args, **kwargs)
    except TypeError:  # Python's own text names what is missing, or is too much
        return
    for parameter in bound.signature.parameters.values():
        value, text = bound.arguments.get(parameter.name, parameter.default), parameter.annotation
        several = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if several or value is parameter.default or text is parameter.empty:
            continue
        try:
            declared = eval(text, function.__globals__) if isinstance(text, str) else text
        except Exception:  # a name that only a type checker imports
            continue
        if not _fits(value, declared):
            names = function.__globals__
            raise error_type(
                f"{name} was called with {parameter.name}={_short(value)}of type "
                f"{type(value).__name__}. It is declared as {_type_text(text, names)}. Pass that."
            ) from error


def _fits(value: Any, declared: Any) -> bool:
    from typeguard import CollectionCheckStrategy, TypeCheckError, check_type

    origin = get_origin(declared)
    if hasattr(origin, "__value__"):  # a type statement, such as NDArray from numpy 2.5 on
        origin = get_origin(origin.__value__)
    is_class = isinstance(origin, type) and origin is not UnionType
    if is_class and not isinstance(value, origin):
        return False  # of a class that typeguard does not know, such as an array
    if origin is Iterable and isinstance(value, Collection):
        items: list[Any] = list(value)  # pyright: ignore[reportUnknownArgumentType]
        value, declared = items, list[get_args(declared)]
    try:
        check_type(value, declared, collection_check_strategy=CollectionCheckStrategy.ALL_ITEMS)
    except TypeCheckError:
        return False
    return True


def _type_text(text: Any, names: Mapping[str, Any]) -> str:
    """A type as it is written, with what is behind an alias of ours."""

    def spelled(match: re.Match[str]) -> str:
        alias = names.get(match[0])
        is_alias = isinstance(alias, UnionType | GenericAlias)
        return _without_modules(inspect.formatannotation(alias)) if is_alias else match[0]

    if not isinstance(text, str):
        return _without_modules(inspect.formatannotation(text))
    return re.sub(r"(?<![\w.])[A-Z]\w*", spelled, text)


def _without_modules(text: str) -> str:
    return re.sub(
        r"\b(?:typing|collections\.abc|(?:mesh_utils|xla_dtensor)[\w.]*)\.(?=\w)", "", text
    )


def _short(value: Any) -> str:
    text = repr(value)
    fits = len(text) <= _LONGEST and "\n" not in text and " at 0x" not in text
    return f"{text}, " if fits else "something "
