"""What an expression may be, in chains; the reader's part that knows Python's expressions.

A value is *used* where it meets anything that is not followed: an operator, a function, ``return``.
"""

from __future__ import annotations

import ast
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

from xla_dtensor.runtimes.premises.chains import (
    ATTRIBUTE,
    EACH,
    GLOBAL,
    ITEM,
    MADE,
    OVERRIDDEN,
    CallRead,
    Chain,
    Reads,
    Values,
)
from xla_dtensor.runtimes.premises.scopes import Scope, assigned_names

__all__ = ["NOTHING", "Expressions", "constant"]

NOTHING: Values = frozenset()
# Functions that hand on what they are given, or its elements.
_SAME = frozenset({"list", "tuple", "set", "sorted", "reversed", "iter", "frozenset"})
_PAIRS = frozenset({"zip", "enumerate"})
_SEARCHES = frozenset({"vars", "dir", "asdict", "astuple", "deepcopy", "copy", "replace", "fields"})
_ELEMENTS = {"values": 1, "items": 2, "keys": 0, "get": 0, "pop": 0, "setdefault": 0, "copy": -1}


class Expressions(ABC):
    """Reads expressions (``value``, ``use``) and notes what they read.

    Attributes:
        reads: What has been read.
    """

    reads: Reads

    @abstractmethod
    def bind(
        self, target: ast.expr, values: Values, scope: Scope, source: ast.expr | None = None
    ) -> None:
        """Assign to a target; `source` is the expression of the values, where it is one."""

    def use(self, node: ast.AST | None, scope: Scope) -> None:
        """Read an expression whose value goes where it is not followed."""
        if node is not None:
            self.used(self.value(node, scope))

    def used(self, values: Values) -> None:
        """Note that values go where they are not followed."""
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
        return NOTHING

    def _Name(self, node: ast.Name, scope: Scope) -> Values:
        found = scope.look_up(node.id)
        return self.looked_up(found)

    def looked_up(self, values: Values) -> Values:
        """Note that values are looked up, and return them."""
        self.reads.looked_up.update(dict.fromkeys(_sorted(values)))
        return values

    def _Constant(self, node: ast.Constant, scope: Scope) -> Values:
        if isinstance(node.value, str) and node.value.isidentifier():
            self.reads.attributes.add(node.value)
        return NOTHING

    def _Attribute(self, node: ast.Attribute, scope: Scope) -> Values:
        self.reads.attributes.add(node.attr)
        if _is_call_of(node.value, "super") and scope.first is not None:
            of = Chain("argument", scope.first).then(OVERRIDDEN, node.attr)
            return self.looked_up(frozenset({of}))
        return self.stepped(self.value(node.value, scope), ATTRIBUTE, node.attr)

    def stepped(self, values: Values, kind: str, key: Any = None) -> Values:
        """Return what one step leads to from each of some values."""
        return self.looked_up(frozenset(chain.then(kind, key) for chain in values))

    def _Subscript(self, node: ast.Subscript, scope: Scope) -> Values:
        known, key = constant(node.slice)
        if known and _is_call_of(node.value, "globals"):
            return self.looked_up(frozenset({Chain(GLOBAL, str(key))}))
        if known and _is_call_of(node.value, "vars"):
            owners = self.value(node.value.args[0], scope)  # pyright: ignore
            return self.stepped(owners, ATTRIBUTE, key)
        owners = self.value(node.value, scope)
        if known:
            if isinstance(key, str):
                self.reads.attributes.add(key)
            return self.stepped(owners, ITEM, key)
        self.use(node.slice, scope)
        if isinstance(node.slice, ast.Slice):
            return frozenset(each.then(MADE) for each in self.stepped(owners, EACH))
        return self.stepped(owners, EACH)

    def _IfExp(self, node: ast.IfExp, scope: Scope) -> Values:
        self.use(node.test, scope)
        return self.value(node.body, scope) | self.value(node.orelse, scope)

    def _BoolOp(self, node: ast.BoolOp, scope: Scope) -> Values:
        found = frozenset().union(*(self.value(each, scope) for each in node.values))
        self.used(found)
        return found

    def _NamedExpr(self, node: ast.NamedExpr, scope: Scope) -> Values:
        found = self.value(node.value, scope)
        self.bind(node.target, found, scope)
        return found

    def _Starred(self, node: ast.Starred, scope: Scope) -> Values:
        return self.stepped(self.value(node.value, scope), EACH)

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
        pairs = list(zip(node.keys, node.values, strict=True))
        merged = (self.value(each, scope) for key, each in pairs if key is None)
        parts = (self.stepped(each, EACH) for each in merged)
        others = frozenset(chain.then(MADE) for part in parts for chain in part)
        return others | self._made_of([each for key, each in pairs if key is not None], scope)

    def _comprehended(self, node: Any, parts: Sequence[ast.expr], scope: Scope) -> Values:
        targets = [each.target for each in node.generators]
        inner = Scope(assigned_names(targets)[0], outer=scope)
        for each in node.generators:
            self.bind(each.target, self.stepped(self.value(each.iter, inner), EACH), inner)
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
        inner = self.inner_scope(node.args, [node.body], scope)
        self.use(node.body, inner)
        return NOTHING

    def inner_scope(self, args: ast.arguments, body: Sequence[ast.AST], scope: Scope) -> Scope:
        """Return the scope of a function inside; its defaults are read in the one around."""
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
        stars = {place for place, each in enumerate(node.args) if isinstance(each, ast.Starred)}
        inside = [each.value if isinstance(each, ast.Starred) else each for each in node.args]
        args = [self.value(each, scope) for each in inside]
        kwargs = [(each.arg, self.value(each.value, scope)) for each in node.keywords]
        named = {name: value for name, value in kwargs if name is not None}
        doubles = tuple(value for name, value in kwargs if name is None)
        call = CallRead(function, tuple(args), named, frozenset(stars), doubles)
        self.reads.calls.append(call)
        return self._result(node, name, call, scope)

    def _result(self, node: ast.Call, name: str | None, call: CallRead, scope: Scope) -> Values:
        """Return what a call may give, of functions that hand on what they get."""
        starred = {place: self.stepped(call.args[place], EACH) for place in call.stars}
        args = [starred.get(place, each) for place, each in enumerate(call.args)]
        if isinstance(node.func, ast.Name):
            if name in _SAME and args:
                return args[0]
            if name in _PAIRS:
                each = frozenset().union(*(self.stepped(arg, EACH) for arg in args))
                return frozenset(chain.then(MADE).then(MADE) for chain in each)
            return NOTHING
        if name not in _ELEMENTS or not isinstance(node.func, ast.Attribute):
            return NOTHING
        owners = self.value(node.func.value, scope)
        depth = _ELEMENTS[name]
        if depth < 0:
            return owners
        known, key = constant(node.args[0]) if node.args else (False, None)
        if name in ("get", "pop", "setdefault") and known:
            found = self.stepped(owners, ITEM, key)
            return found.union(*args[1:]) if len(args) > 1 else found
        found = self.stepped(owners, EACH)
        for _ in range(depth):
            found = frozenset(chain.then(MADE) for chain in found)
        return found

    def _call_getattr(self, node: ast.Call, scope: Scope) -> Values:
        owners = self.value(node.args[0], scope)
        known, key = constant(node.args[1]) if len(node.args) > 1 else (False, None)
        others = [self.value(each, scope) for each in node.args[2:]]
        if known and isinstance(key, str):
            self.reads.attributes.add(key)
            return self.stepped(owners, ATTRIBUTE, key).union(*others)
        for each in node.args[1:]:
            self.use(each, scope)
        self._searched(owners)
        return NOTHING

    _call_hasattr = _call_getattr

    def _call_len(self, node: ast.Call, scope: Scope) -> Values:
        """Of a container that the code has made, nothing is read."""
        self.used(frozenset(c for c in self.value(node.args[0], scope) if not c.is_made))
        return NOTHING

    def _Compare(self, node: ast.Compare, scope: Scope) -> Values:
        """Of ``"name" in kwargs``, nothing is read."""
        self.use(node.left, scope)
        for operator, each in zip(node.ops, node.comparators, strict=True):
            is_in = isinstance(operator, ast.In | ast.NotIn) and isinstance(node.left, ast.Constant)
            found = self.value(each, scope)
            self.used(frozenset(c for c in found if not (is_in and c.is_star)))
        return NOTHING

    def _call_setattr(self, node: ast.Call, scope: Scope) -> Values:
        owners = self.value(node.args[0], scope)
        known, key = constant(node.args[1]) if len(node.args) > 1 else (False, None)
        for each in node.args[1:]:
            self.use(each, scope)
        if known:
            self.written(frozenset(chain.then(ATTRIBUTE, key) for chain in owners))
        return NOTHING

    def _got(self, getter: ast.Call, owners: Values) -> Values:
        found = NOTHING
        for each in getter.args:
            known, path = constant(each)
            steps = owners
            for name in str(path).split(".") if known else ():
                self.reads.attributes.add(name)
                steps = self.stepped(steps, ATTRIBUTE, name)
            found |= steps
        return found

    def _searched(self, values: Values) -> None:
        self.reads.searched.update(dict.fromkeys(chain.bare() for chain in _sorted(values)))

    def written(self, values: Values) -> None:
        """Note that the last steps of chains are assigned to."""
        self.reads.written.update(dict.fromkeys(_sorted(values)))


def _sorted(values: Values) -> list[Chain]:
    return sorted(values, key=str)  # the same order in every process


def _name_of(node: ast.AST) -> str | None:
    if isinstance(node, ast.Name):
        return node.id
    return node.attr if isinstance(node, ast.Attribute) else None


def _is_call_of(node: ast.AST, name: str) -> bool:
    is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    return is_call and node.func.id == name  # pyright: ignore[reportAttributeAccessIssue]


def constant(node: ast.AST) -> tuple[bool, Any]:
    """Return whether an expression is a constant, and which."""
    if isinstance(node, ast.Constant):
        return True, node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        known, value = constant(node.operand)
        return (True, -value) if known and type(value) is int else (False, None)
    return False, None
