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
    GLOBAL,
    IMPORT,
    ITEM,
    MADE,
    OVERRIDDEN,
    CallRead,
    Chain,
    Reads,
    Values,
)
from xla_dtensor.runtimes.premises.scopes import Scope, assigned_names
from xla_dtensor.runtimes.premises.sources import Function

__all__ = ["read"]

_NOTHING: Values = frozenset()
_PASSES = 3  # so that a local may be assigned below of where it is used, in a loop
# Functions that hand on what they are given, or its elements.
_SAME = frozenset({"list", "tuple", "set", "sorted", "reversed", "iter", "frozenset"})
_PAIRS = frozenset({"zip", "enumerate"})
_SEARCHES = frozenset({"vars", "dir", "asdict", "astuple", "deepcopy", "copy", "replace", "fields"})
_ELEMENTS = {"values": 1, "items": 2, "keys": 0, "get": 0, "pop": 0, "setdefault": 0, "copy": -1}


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
    scope = Scope(names | {*arguments, *stars}, frozenset(free), None, tuple(arguments), elsewhere)
    reader = _Reader()
    for _ in range(_PASSES):
        reader.reads = Reads()
        for statement in body:
            reader.run(statement, scope)
    return reader.reads


class _Reader:
    """Reads expressions (``value``, ``use``) and statements (``run``)."""

    reads: Reads

    # ------------------------------------------------------------------ expressions

    def use(self, node: ast.AST | None, scope: Scope) -> None:
        """Read an expression whose value goes where it is not followed."""
        if node is not None:
            self._used(self.value(node, scope))

    def _used(self, values: Values) -> None:
        self.reads.used.update(dict.fromkeys(chain.bare() for chain in _sorted(values)))

    def value(self, node: ast.AST, scope: Scope) -> Values:
        """Return what an expression may be."""
        method = getattr(self, f"_{type(node).__name__}", None)
        if method is not None:
            return method(node, scope)
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                self.use(child, scope)
            elif isinstance(child, ast.keyword | ast.FormattedValue | ast.Slice):
                self.value(child, scope)
        return _NOTHING

    def _Name(self, node: ast.Name, scope: Scope) -> Values:
        found = scope.look_up(node.id)
        return self._looked_up(found)

    def _looked_up(self, values: Values) -> Values:
        self.reads.looked_up.update(dict.fromkeys(_sorted(values)))
        return values

    def _Constant(self, node: ast.Constant, scope: Scope) -> Values:
        if isinstance(node.value, str) and node.value.isidentifier():
            self.reads.attributes.add(node.value)
        return _NOTHING

    def _Attribute(self, node: ast.Attribute, scope: Scope) -> Values:
        self.reads.attributes.add(node.attr)
        if _is_call_of(node.value, "super") and scope.first is not None:
            of = Chain("argument", scope.first).then(OVERRIDDEN, node.attr)
            return self._looked_up(frozenset({of}))
        return self._stepped(self.value(node.value, scope), ATTRIBUTE, node.attr)

    def _stepped(self, values: Values, kind: str, key: Any = None) -> Values:
        return self._looked_up(frozenset(chain.then(kind, key) for chain in values))

    def _Subscript(self, node: ast.Subscript, scope: Scope) -> Values:
        known, key = _constant(node.slice)
        if known and _is_call_of(node.value, "globals"):
            return self._looked_up(frozenset({Chain(GLOBAL, str(key))}))
        if known and _is_call_of(node.value, "vars"):
            owners = self.value(node.value.args[0], scope)  # pyright: ignore
            return self._stepped(owners, ATTRIBUTE, key)
        owners = self.value(node.value, scope)
        if known:
            if isinstance(key, str):
                self.reads.attributes.add(key)
            return self._stepped(owners, ITEM, key)
        self.use(node.slice, scope)
        if isinstance(node.slice, ast.Slice):
            self._stepped(owners, EACH)
            return owners
        return self._stepped(owners, EACH)

    def _IfExp(self, node: ast.IfExp, scope: Scope) -> Values:
        self.use(node.test, scope)
        return self.value(node.body, scope) | self.value(node.orelse, scope)

    def _BoolOp(self, node: ast.BoolOp, scope: Scope) -> Values:
        found = frozenset().union(*(self.value(each, scope) for each in node.values))
        self._used(found)
        return found

    def _NamedExpr(self, node: ast.NamedExpr, scope: Scope) -> Values:
        found = self.value(node.value, scope)
        self._bind(node.target, found, scope)
        return found

    def _Starred(self, node: ast.Starred, scope: Scope) -> Values:
        return self._stepped(self.value(node.value, scope), EACH)

    def _Await(self, node: ast.Await, scope: Scope) -> Values:
        return self.value(node.value, scope)

    def _made_of(self, nodes: Iterable[ast.expr | None], scope: Scope) -> Values:
        parts = [self.value(each, scope) for each in nodes if each is not None]
        return frozenset(chain.then(MADE) for part in parts for chain in part)

    def _Tuple(self, node: Any, scope: Scope) -> Values:
        return self._made_of(node.elts, scope)

    _List = _Set = _Tuple

    def _Dict(self, node: ast.Dict, scope: Scope) -> Values:
        for key in node.keys:
            self.use(key, scope)
        return self._made_of(node.values, scope)

    def _comprehended(self, node: Any, parts: Sequence[ast.expr], scope: Scope) -> Values:
        targets = [each.target for each in node.generators]
        inner = Scope(assigned_names(targets)[0], outer=scope)
        for each in node.generators:
            self._bind(each.target, self._stepped(self.value(each.iter, inner), EACH), inner)
            for test in each.ifs:
                self.use(test, inner)
        return self._made_of(parts, inner)

    def _ListComp(self, node: Any, scope: Scope) -> Values:
        return self._comprehended(node, [node.elt], scope)

    _SetComp = _GeneratorExp = _ListComp

    def _DictComp(self, node: ast.DictComp, scope: Scope) -> Values:
        found = self._comprehended(node, [node.key, node.value], scope)
        return found

    def _Lambda(self, node: ast.Lambda, scope: Scope) -> Values:
        inner = self._inner_scope(node.args, [node.body], scope)
        self.use(node.body, inner)
        return _NOTHING

    def _inner_scope(self, args: ast.arguments, body: Sequence[ast.AST], scope: Scope) -> Scope:
        for default in (*args.defaults, *args.kw_defaults):
            self.use(default, scope)
        names, elsewhere = assigned_names(body)
        given = [*args.posonlyargs, *args.args, *args.kwonlyargs, args.vararg, args.kwarg]
        own = {each.arg for each in given if each is not None}
        return Scope(names | own, outer=scope, elsewhere=elsewhere)

    # ------------------------------------------------------------------ calls

    def _Call(self, node: ast.Call, scope: Scope) -> Values:
        name = _name_of(node.func)
        special = getattr(self, f"_call_{name}", None) if name is not None else None
        if special is not None and isinstance(node.func, ast.Name) and node.args:
            return special(node, scope)
        if name in _SEARCHES and node.args:
            self._searched(self.value(node.args[0], scope))
        getter = node.func
        if isinstance(getter, ast.Call) and _name_of(getter.func) == "attrgetter" and node.args:
            return self._got(getter, self.value(node.args[0], scope))
        function = self.value(node.func, scope)
        args = tuple(self._argument(each, scope) for each in node.args)
        kwargs = {each.arg: self._argument(each.value, scope) for each in node.keywords}
        is_known = None not in kwargs and not any(isinstance(a, ast.Starred) for a in node.args)
        named = {key: value for key, value in kwargs.items() if key is not None}
        self.reads.calls.append(CallRead(function, args, named, is_known))
        if not is_known:
            for each in (*args, *kwargs.values()):
                self._used(each)
        return self._result(node, name, args, scope)

    def _argument(self, node: ast.expr, scope: Scope) -> Values:
        return self.value(node, scope)

    def _result(
        self, node: ast.Call, name: str | None, args: tuple[Values, ...], scope: Scope
    ) -> Values:
        """Return what a call may give, of functions that hand on what they get."""
        if isinstance(node.func, ast.Name):
            if name in _SAME and args:
                return args[0]
            if name in _PAIRS:
                each = frozenset().union(*(self._stepped(arg, EACH) for arg in args))
                return frozenset(chain.then(MADE).then(MADE) for chain in each)
            return _NOTHING
        if name not in _ELEMENTS or not isinstance(node.func, ast.Attribute):
            return _NOTHING
        owners = self.value(node.func.value, scope)
        depth = _ELEMENTS[name]
        if depth < 0:
            return owners
        known, key = _constant(node.args[0]) if node.args else (False, None)
        if name in ("get", "pop", "setdefault") and known:
            found = self._stepped(owners, ITEM, key)
            return found.union(*args[1:]) if len(args) > 1 else found
        found = self._stepped(owners, EACH)
        for _ in range(depth):
            found = frozenset(chain.then(MADE) for chain in found)
        return found

    def _call_getattr(self, node: ast.Call, scope: Scope) -> Values:
        owners = self.value(node.args[0], scope)
        known, key = _constant(node.args[1]) if len(node.args) > 1 else (False, None)
        others = [self.value(each, scope) for each in node.args[2:]]
        if known and isinstance(key, str):
            self.reads.attributes.add(key)
            return self._stepped(owners, ATTRIBUTE, key).union(*others)
        for each in node.args[1:]:
            self.use(each, scope)
        self._searched(owners)
        return _NOTHING

    _call_hasattr = _call_getattr

    def _call_setattr(self, node: ast.Call, scope: Scope) -> Values:
        owners = self.value(node.args[0], scope)
        known, key = _constant(node.args[1]) if len(node.args) > 1 else (False, None)
        for each in node.args[1:]:
            self.use(each, scope)
        if known:
            self._written(frozenset(chain.then(ATTRIBUTE, key) for chain in owners))
        return _NOTHING

    def _got(self, getter: ast.Call, owners: Values) -> Values:
        found = _NOTHING
        for each in getter.args:
            known, path = _constant(each)
            steps = owners
            for name in str(path).split(".") if known else ():
                self.reads.attributes.add(name)
                steps = self._stepped(steps, ATTRIBUTE, name)
            found |= steps
        return found

    def _searched(self, values: Values) -> None:
        self.reads.searched.update(dict.fromkeys(chain.bare() for chain in _sorted(values)))

    def _written(self, values: Values) -> None:
        self.reads.written.update(dict.fromkeys(_sorted(values)))

    # ------------------------------------------------------------------ statements

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
            self._bind(target, values, scope, node.value)

    def _run_AnnAssign(self, node: ast.AnnAssign, scope: Scope) -> None:
        if node.value is not None:
            self._bind(node.target, self.value(node.value, scope), scope, node.value)

    def _run_AugAssign(self, node: ast.AugAssign, scope: Scope) -> None:
        load = ast.copy_location(_loaded(node.target), node.target)
        self.use(load, scope)
        self.use(node.value, scope)
        self._bind(node.target, _NOTHING, scope)

    def _run_Delete(self, node: ast.Delete, scope: Scope) -> None:
        for target in node.targets:
            if not isinstance(target, ast.Name):
                self._bind(target, _NOTHING, scope)

    def _run_For(self, node: Any, scope: Scope) -> None:
        elements = self._stepped(self.value(node.iter, scope), EACH)
        self._bind(node.target, elements, scope)
        for statement in (*node.body, *node.orelse):
            self.run(statement, scope)

    _run_AsyncFor = _run_For

    def _run_With(self, node: Any, scope: Scope) -> None:
        for item in node.items:
            values = self.value(item.context_expr, scope)
            self._used(values)
            if item.optional_vars is not None:
                self._bind(item.optional_vars, values, scope)
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
                scope.assign(alias.asname or alias.name, self._looked_up(found))

    def _run_FunctionDef(self, node: Any, scope: Scope) -> None:
        for decorator in node.decorator_list:
            self.use(decorator, scope)
        inner = self._inner_scope(node.args, node.body, scope)
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
        self._used(subject)
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
                    self._stepped(subject, ATTRIBUTE, name)
            elif isinstance(node, ast.MatchValue):
                self.use(node.value, scope)
            elif isinstance(node, ast.MatchAs) and node.name is not None:
                scope.assign(node.name, subject)

    # ------------------------------------------------------------------ assignments

    def _bind(
        self, target: ast.expr, values: Values, scope: Scope, source: ast.expr | None = None
    ) -> None:
        """Assign to a target; `source` is the expression of the values, where it is one."""
        if isinstance(target, ast.Name):
            written = scope.assign(target.id, values)
            if written is not None:
                self._written(frozenset({written}))
        elif isinstance(target, ast.Attribute):
            owners = self.value(target.value, scope)
            self._written(frozenset(c.then(ATTRIBUTE, target.attr) for c in owners))
            self._used(values)
        elif isinstance(target, ast.Subscript):
            self._bind_item(target, values, scope)
        elif isinstance(target, ast.Starred):
            self._bind(target.value, frozenset(c.then(MADE) for c in values), scope)
        elif isinstance(target, ast.Tuple | ast.List):
            self._bind_parts(target.elts, values, scope, source)

    def _bind_item(self, target: ast.Subscript, values: Values, scope: Scope) -> None:
        owners = self.value(target.value, scope)
        known, key = _constant(target.slice)
        if not known:
            self.use(target.slice, scope)
        kind = ITEM if known else EACH
        self._written(frozenset(chain.then(kind, key) for chain in owners))
        self._used(values)

    def _bind_parts(
        self, parts: Sequence[ast.expr], values: Values, scope: Scope, source: ast.expr | None
    ) -> None:
        given = source.elts if isinstance(source, ast.Tuple | ast.List) else []
        starred = any(isinstance(each, ast.Starred) for each in (*parts, *given))
        if len(given) == len(parts) and not starred:
            for part, each in zip(parts, given, strict=True):
                self._bind(part, self.value(each, scope), scope, each)
            return
        elements = self._stepped(values, EACH)
        for part in parts:
            self._bind(part, elements, scope)


def _sorted(values: Values) -> list[Chain]:
    return sorted(values, key=str)  # the same order in every process


def _name_of(node: ast.AST) -> str | None:
    if isinstance(node, ast.Name):
        return node.id
    return node.attr if isinstance(node, ast.Attribute) else None


def _is_call_of(node: ast.AST, name: str) -> bool:
    is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    return is_call and node.func.id == name  # pyright: ignore[reportAttributeAccessIssue]


def _constant(node: ast.AST) -> tuple[bool, Any]:
    """Return whether an expression is a constant, and which."""
    if isinstance(node, ast.Constant):
        return True, node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        known, value = _constant(node.operand)
        return (True, -value) if known and type(value) is int else (False, None)
    return False, None


def _loaded(target: ast.expr) -> ast.expr:
    """Return the expression that reads what an assignment writes to."""
    if isinstance(target, ast.Name):
        return ast.Name(target.id, ast.Load())
    if isinstance(target, ast.Attribute):
        return ast.Attribute(target.value, target.attr, ast.Load())
    assert isinstance(target, ast.Subscript)
    return ast.Subscript(target.value, target.slice, ast.Load())
