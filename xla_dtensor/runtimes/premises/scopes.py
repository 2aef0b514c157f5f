"""What names in a piece of code stand for: locals, variables of functions around, globals."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from xla_dtensor.runtimes.premises.chains import (
    ARGUMENT,
    CELL,
    GLOBAL,
    MADE,
    STAR,
    Chain,
    Values,
)

__all__ = ["Scope", "assigned_names"]

_NOTHING: Values = frozenset()
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


@dataclass
class Scope:
    """One scope of a function.

    Args:
        names: The names that are assigned in it.
        free: Of the outermost function, the variables of functions around it.
        outer: The scope around; None for the outermost function.
        arguments: The arguments of the outermost function.
        elsewhere: Names that it says are of a scope further out, by ``global`` or ``nonlocal``.
        stars: Its arguments that hold others, ``*args`` and ``**kwargs``.
        values: What names may stand for, whatever the control flow.
    """

    names: frozenset[str]
    free: frozenset[str] = frozenset()
    outer: Scope | None = None
    arguments: tuple[str, ...] = ()
    elsewhere: dict[str, str] = field(default_factory=dict)
    stars: tuple[str, ...] = ()
    values: dict[str, set[Chain]] = field(default_factory=dict)

    def look_up(self, name: str) -> Values:
        """Return what a name may stand for."""
        own = frozenset(self.values.get(name, ()))
        if name in self.elsewhere or name not in self.names:
            return own | self._further_out(name)
        if name in self.stars:
            return own | {Chain(ARGUMENT, name).then(MADE, STAR)}
        return own | {Chain(ARGUMENT, name)} if name in self.arguments else own

    def _further_out(self, name: str) -> Values:
        if self.elsewhere.get(name) == GLOBAL:
            return frozenset({Chain(GLOBAL, name)})
        if self.outer is not None:
            return self.outer.look_up(name)
        if name == "__class__":
            return _NOTHING
        return frozenset({Chain(CELL if name in self.free else GLOBAL, name)})

    def assign(self, name: str, values: Values) -> Chain | None:
        """Let a name stand for more.

        Returns:
            What is written further out, if the name is of there.
        """
        self.values.setdefault(name, set()).update(values)
        if name not in self.elsewhere:
            return None
        root = next(iter(self._further_out(name)), None)
        return root if root is not None and not root.steps and root.root != ARGUMENT else None

    @property
    def first(self) -> str | None:
        """The first argument of the outermost function."""
        outermost = self
        while outermost.outer is not None:
            outermost = outermost.outer
        return outermost.arguments[0] if outermost.arguments else None


def assigned_names(body: Iterable[ast.AST]) -> tuple[frozenset[str], dict[str, str]]:
    """Return the names that are assigned in a scope, and those that it says are of another one."""
    names: set[str] = set()
    elsewhere: dict[str, str] = {}
    for node in _own_nodes(body):
        if isinstance(node, ast.Global):
            elsewhere.update(dict.fromkeys(node.names, GLOBAL))
        elif isinstance(node, ast.Nonlocal):
            elsewhere.update(dict.fromkeys(node.names, CELL))
        else:
            names.update(_assigned_names(node))
    return frozenset(names), elsewhere


def _assigned_names(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store | ast.Del):
        yield node.id
    elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.Import | ast.ImportFrom):
        for alias in node.names:
            yield (alias.asname or alias.name).partition(".")[0]
    elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name:
        yield node.name
    elif isinstance(node, ast.MatchMapping) and node.rest:
        yield node.rest


def _own_nodes(body: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Yield the nodes of a scope; of scopes inside of it those that are evaluated in this one."""
    waiting = list(body)
    while waiting:
        node = waiting.pop()
        yield node
        if isinstance(node, _COMPREHENSIONS):
            waiting += _walrus_targets(node)
        elif not isinstance(node, _SCOPES):
            waiting += ast.iter_child_nodes(node)


def _walrus_targets(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the targets of ``:=`` in a comprehension, which are of the scope around it."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.NamedExpr):
            yield inner.target
