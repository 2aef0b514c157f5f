"""The syntax tree of a function that runs, found by its code; None where there is no source."""

from __future__ import annotations

import ast
import dis
import inspect
import linecache
from collections.abc import Iterator
from functools import lru_cache
from types import CodeType

__all__ = ["Function", "all_names", "inner_functions", "tree_of"]

Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
_LAMBDA = "<lambda>"
_LOOKUPS = frozenset({"LOAD_ATTR", "LOAD_METHOD", "LOAD_GLOBAL", "LOAD_SUPER_ATTR"})


def tree_of(code: CodeType) -> Function | None:
    """Return the syntax tree of a function.

    Args:
        code: The function's.

    Returns:
        The tree; None where the source is not known, or is another one than that of the code (the
        file was edited since).

    Example:
        >>> type(tree_of(inspect.getsource.__code__)).__name__
        'FunctionDef'
    """
    lines = linecache.getlines(code.co_filename)
    if not 0 < code.co_firstlineno <= len(lines):
        return None
    try:
        found = _lambda(code, lines) if code.co_name == _LAMBDA else _function(code, lines)
    except (SyntaxError, ValueError, IndentationError, RecursionError):
        return None
    return found if found is not None and _arguments(found) == _names(code) else None


def _names(code: CodeType) -> list[str]:
    flags = bool(code.co_flags & inspect.CO_VARARGS) + bool(code.co_flags & inspect.CO_VARKEYWORDS)
    return list(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount + flags])


def _arguments(node: Function) -> list[str]:
    given = node.args
    named = [*given.posonlyargs, *given.args, *given.kwonlyargs]
    named += [each for each in (given.vararg, given.kwarg) if each is not None]
    return [each.arg for each in named]


def _function(code: CodeType, lines: list[str]) -> Function | None:
    block = inspect.getblock(lines[code.co_firstlineno - 1 :])
    indented = block[0][:1].isspace()
    tree = ast.parse("".join(["if 1:\n", *block] if indented else block))
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            return node if node.name == code.co_name else None
    return None


def _lambda(code: CodeType, lines: list[str]) -> Function | None:
    """Find a lambda by the place of its body."""
    whole = [place for place in code.co_positions() if None not in place]
    # What begins a function has a place without width.
    within = [(a, c) for a, b, c, d in whole if (a, c) != (b, d)]
    found = [
        node
        for node in _lambdas(code.co_filename, "".join(lines))
        if within and all(_holds(node.body, place) for place in within)
    ]
    # The innermost: what lies around it holds the same places.
    return max(found, key=lambda node: (node.lineno, node.col_offset), default=None)


@lru_cache(maxsize=256)
def _lambdas(_: str, source: str) -> list[ast.Lambda]:
    return [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Lambda)]


def _holds(node: ast.expr, place: tuple[int | None, ...]) -> bool:
    begin, end = (node.lineno, node.col_offset), (node.end_lineno or 0, node.end_col_offset or 0)
    return begin <= place <= end  # pyright: ignore[reportOperatorIssue]


def all_names(kind: type) -> frozenset[str]:
    """Return the names that a class's functions look up, and texts that could be such names.

    What makes an object (``__init__``) looks up what it has just assigned, and does not count.
    """
    found: set[str] = set()
    for name, value in vars(kind).items():
        if name == "__init__":
            continue
        function = getattr(value, "__func__", getattr(value, "fget", value))
        code = getattr(inspect.unwrap(function) if callable(function) else None, "__code__", None)
        for each in () if code is None else (code, *inner_functions(code)):
            steps = dis.get_instructions(each)
            found.update(step.argval for step in steps if step.opname in _LOOKUPS)
            found.update(c for c in each.co_consts if isinstance(c, str) and c.isidentifier())
    return frozenset(found)


def inner_functions(code: CodeType) -> Iterator[CodeType]:
    """Yield the codes of functions, comprehensions and classes inside of a function."""
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from inner_functions(constant)
