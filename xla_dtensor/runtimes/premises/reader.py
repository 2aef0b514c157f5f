"""What a function reads, read off its syntax tree; nothing is run.

Each expression is given the chains that it may be: ``self.config`` is one, a local is what was
assigned to it, ``a if c else b`` is either. A chain's value is *used* where it meets anything that
is not followed: an operator, a function, ``return``. Control flow does not count: a local stands
for all that it is ever assigned.

    for name, head in self.heads.items():            self.heads[...], each value
        out = head(x) * self.weights.get(name, 1.0)  self.weights[...], used

Of functions and classes inside of the function, the code counts as its own.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from typing import Any

from xla_dtensor.runtimes.premises.chains import (
    ATTRIBUTE,
    EACH,
    IMPORT,
    ITEM,
    MADE,
    Chain,
    Reads,
    Values,
)
from xla_dtensor.runtimes.premises.expressions import NOTHING, Expressions, constant
from xla_dtensor.runtimes.premises.scopes import Scope, assigned_names
from xla_dtensor.runtimes.premises.sources import Function

__all__ = ["read"]

_PASSES = 3  # so that a local may be assigned below of where it is used, in a loop


def read(tree: Function, free: Iterable[str]) -> Reads:
    """Return what a function reads.

    Args:
        tree: Its syntax tree.
        free: The names of its variables that are of functions around it.
    """
    body = [tree.body] if isinstance(tree, ast.Lambda) else tree.body
    names, elsewhere = assigned_names(body)
    given = tree.args
    arguments = [each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    stars = [each.arg for each in (given.vararg, given.kwarg) if each is not None]
    scope = Scope(
        names | {*arguments, *stars},
        frozenset(free),
        arguments=tuple(arguments),
        elsewhere=elsewhere,
        stars=tuple(stars),
    )
    reader = _Reader()
    for _ in range(_PASSES):
        reader.reads = Reads()
        for statement in body:
            reader.run(statement, scope)
    return reader.reads


class _Reader(Expressions):
    """Reads statements (``run``), and expressions as they do."""

    def run(self, node: ast.AST, scope: Scope) -> None:
        """Read a statement, or an expression whose value is returned."""
        method = getattr(self, f"_run_{type(node).__name__}", None)
        if method is not None:
            method(node, scope)
        elif isinstance(node, ast.expr):
            self.use(node, scope)
        else:
            for child in ast.iter_child_nodes(node):
                self.run(child, scope)

    def _run_Assign(self, node: ast.Assign, scope: Scope) -> None:
        values = self.value(node.value, scope)
        for target in node.targets:
            self.bind(target, values, scope, node.value)

    def _run_AnnAssign(self, node: ast.AnnAssign, scope: Scope) -> None:
        if node.value is not None:
            self.bind(node.target, self.value(node.value, scope), scope, node.value)

    def _run_AugAssign(self, node: ast.AugAssign, scope: Scope) -> None:
        load = ast.copy_location(_loaded(node.target), node.target)
        self.use(load, scope)
        self.use(node.value, scope)
        self.bind(node.target, NOTHING, scope)

    def _run_Delete(self, node: ast.Delete, scope: Scope) -> None:
        for target in node.targets:
            if not isinstance(target, ast.Name):
                self.bind(target, NOTHING, scope)

    def _run_For(self, node: Any, scope: Scope) -> None:
        elements = self.stepped(self.value(node.iter, scope), EACH)
        self.bind(node.target, elements, scope)
        for statement in (*node.body, *node.orelse):
            self.run(statement, scope)

    _run_AsyncFor = _run_For

    def _run_With(self, node: Any, scope: Scope) -> None:
        for item in node.items:
            values = self.value(item.context_expr, scope)
            self.used(values)
            if item.optional_vars is not None:
                self.bind(item.optional_vars, values, scope)
        for statement in node.body:
            self.run(statement, scope)

    _run_AsyncWith = _run_With

    def _run_Import(self, node: ast.Import, scope: Scope) -> None:
        for alias in node.names:
            name = alias.name if alias.asname else alias.name.partition(".")[0]
            scope.assign(alias.asname or name, frozenset({Chain(IMPORT, name)}))

    def _run_ImportFrom(self, node: ast.ImportFrom, scope: Scope) -> None:
        if node.level == 0 and node.module is not None:
            for alias in node.names:
                found = frozenset({Chain(IMPORT, node.module).then(ATTRIBUTE, alias.name)})
                scope.assign(alias.asname or alias.name, self.looked_up(found))

    def _run_FunctionDef(self, node: Any, scope: Scope) -> None:
        for decorator in node.decorator_list:
            self.use(decorator, scope)
        inner = self.inner_scope(node.args, node.body, scope)
        for statement in node.body:
            self.run(statement, inner)

    _run_AsyncFunctionDef = _run_FunctionDef

    def _run_ClassDef(self, node: ast.ClassDef, scope: Scope) -> None:
        for each in (*node.bases, *node.decorator_list, *(k.value for k in node.keywords)):
            self.use(each, scope)
        # A class's own names are not those of its methods; its body is read as the code around it.
        for statement in node.body:
            self.run(statement, scope)

    def _run_Match(self, node: ast.Match, scope: Scope) -> None:
        subject = self.value(node.subject, scope)
        self.used(subject)
        for case in node.cases:
            self._matched(case.pattern, subject, scope)
            self.run(case.guard, scope) if case.guard is not None else None
            for statement in case.body:
                self.run(statement, scope)

    def _matched(self, pattern: ast.AST, subject: Values, scope: Scope) -> None:
        for node in ast.walk(pattern):
            if isinstance(node, ast.MatchClass):
                self.use(node.cls, scope)
                for name in node.kwd_attrs:
                    self.reads.attributes.add(name)
                    self.stepped(subject, ATTRIBUTE, name)
            elif isinstance(node, ast.MatchValue):
                self.use(node.value, scope)
            elif isinstance(node, ast.MatchAs) and node.name is not None:
                scope.assign(node.name, subject)

    # ------------------------------------------------------------------ assignments

    def bind(
        self, target: ast.expr, values: Values, scope: Scope, source: ast.expr | None = None
    ) -> None:
        """Assign to a target; `source` is the expression of the values, where it is one."""
        if isinstance(target, ast.Name):
            written = scope.assign(target.id, values)
            if written is not None:
                self.written(frozenset({written}))
        elif isinstance(target, ast.Attribute):
            owners = self.value(target.value, scope)
            self.written(frozenset(c.then(ATTRIBUTE, target.attr) for c in owners))
            self.used(values)
        elif isinstance(target, ast.Subscript):
            self._bind_item(target, values, scope)
        elif isinstance(target, ast.Starred):
            self.bind(target.value, frozenset(c.then(MADE) for c in values), scope)
        elif isinstance(target, ast.Tuple | ast.List):
            self._bind_parts(target.elts, values, scope, source)

    def _bind_item(self, target: ast.Subscript, values: Values, scope: Scope) -> None:
        owners = self.value(target.value, scope)
        known, key = constant(target.slice)
        if not known:
            self.use(target.slice, scope)
        kind = ITEM if known else EACH
        outside = frozenset(chain for chain in owners if not chain.is_made)
        self.written(frozenset(chain.then(kind, key) for chain in outside))
        self.used(values)

    def _bind_parts(
        self, parts: Sequence[ast.expr], values: Values, scope: Scope, source: ast.expr | None
    ) -> None:
        given = source.elts if isinstance(source, ast.Tuple | ast.List) else []
        starred = any(isinstance(each, ast.Starred) for each in (*parts, *given))
        if len(given) == len(parts) and not starred:
            for part, each in zip(parts, given, strict=True):
                self.bind(part, self.value(each, scope), scope, each)
            return
        elements = self.stepped(values, EACH)
        is_place = True
        for place, part in enumerate(parts):
            is_place = is_place and not isinstance(part, ast.Starred)
            found = frozenset(each.then(ITEM, place) for each in values if each.is_star)
            is_known = is_place and len(found) == len(values) == 1
            self.bind(part, self.looked_up(found) if is_known else elements, scope)


def _loaded(target: ast.expr) -> ast.expr:
    """Return the expression that reads what an assignment writes to."""
    if isinstance(target, ast.Name):
        return ast.Name(target.id, ast.Load())
    if isinstance(target, ast.Attribute):
        return ast.Attribute(target.value, target.attr, ast.Load())
    assert isinstance(target, ast.Subscript)
    return ast.Subscript(target.value, target.slice, ast.Load())
