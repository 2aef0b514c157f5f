"""Whether what a step read of Python still holds.

On each call everything that was read has to be the very object that it was. That is one pass: all
keys of one dict are looked up by one call of C, and the results compared by identity. Where one is
another object, a `Judge` says whether it may stand there; an object that took another one's place
may, if all that was read of the one is the same in the other. What was replaced once (a config that
is made for each call, a closure) is looked at by itself from then on, beside the pass over the
rest.

Invariant: guards that hold lead to the values that the step read, by the ways it read them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from itertools import chain, repeat
from operator import attrgetter, is_, itemgetter
from types import FunctionType, MappingProxyType
from typing import Any

import torch
from torch.nn.modules import module as torch_module

from xla_dtensor.runtimes.guards.judge import Judge
from xla_dtensor.runtimes.guards.objects import Answers, ClassNames, Object, dict_of
from xla_dtensor.runtimes.guards.owners import (
    TRAITS,
    Cell,
    Elements,
    Items,
    Memory,
    Names,
    Owner,
    Traits,
)
from xla_dtensor.runtimes.guards.values import ABSENT, Change, Moving

__all__ = ["Guards"]

_look_up = object.__getattribute__
_FUNCTION_PARTS = attrgetter("__code__", "__defaults__", "__kwdefaults__")
_HOOKS = (
    "_global_forward_hooks",
    "_global_forward_pre_hooks",
    "_global_backward_hooks",
    "_global_backward_pre_hooks",
)


class Guards:
    """What a step read.

    Args:
        owners: What it read of.
        stored: The ids of what it stored, in whose place no equal object may be.
    """

    def __init__(self, owners: Sequence[Owner], stored: Set[int] = frozenset()) -> None:
        self._owners, self._stored = list(owners), stored
        self._by_id = _by_holder(self._owners)
        for owner in self._owners:
            owner.snapshot = {key: owner.snapshot.get(key, ABSENT) for key in owner.reads}
        self._hooks = _global_hooks()
        self._judge = Judge(holds_the_same=self._holds_the_same)
        self._pairs: set[tuple[int, int]] = set()
        self._pass: _Pass | None = None
        self._replaced: dict[int, Owner] = {}  # whose holders or values have been others
        self._held: set[int] = set()  # the ids of what the rest holds
        self._moves: dict[int, tuple[Owner, Any]] = {}
        self._values: dict[tuple[int, Any], tuple[Owner, Any, Any]] = {}

    @property
    def owners(self) -> Sequence[Owner]:
        """What it was read of."""
        return self._owners

    def settle(
        self,
        reads: Callable[[Any], bool],
        instead: Mapping[int, Moving | torch.Tensor] = MappingProxyType({}),
        data: Mapping[int, Callable[[Any], bool]] = MappingProxyType({}),
    ) -> None:
        """End the trace.

        Args:
            reads: Tells whether the program reads a tensor that is older than the trace; of a NumPy
                array, whether it reads its elements anew on every call.
            instead: What is read by name, by the ids of the tensors that were there.
            data: What tells whether a tensor's data may be others, by the id of the tensor.
        """
        tables = {id(o.holder) for o in self._owners if isinstance(o, Names) and o.keys}
        # A tensor with attributes of the user's is itself read with them.
        self._judge = Judge(
            lambda tensor: reads(tensor) or id(dict_of(tensor)) in tables, self._holds_the_same
        )
        # The elements of these arrays are inputs of the program; of these tensors it reads nothing.
        left_out = [o for o in self._owners if isinstance(o, Memory) and reads(o.holder)]
        traits = [o for o in self._owners if isinstance(o, Traits)]
        left_out += [o for o in traits if not reads(o.holder) or id(o.holder) in instead]
        ids = set(map(id, left_out))
        self._owners = [owner for owner in self._owners if id(owner) not in ids]
        for owner in traits:
            if id(owner.holder) in data:
                owner.let_data_move(data[id(owner.holder)])
        self._by_id = _by_holder(self._owners)
        for owner in self._owners:
            for key, value in owner.snapshot.items():
                is_owner = isinstance(value, tuple) and id(value) in self._by_id
                if id(value) in instead:
                    owner.snapshot[key] = instead[id(value)]
                elif not is_owner and id(value) not in self._stored:
                    # What a tuple holds, its own owner keeps.
                    owner.snapshot[key] = self._judge.forget(value)
        self._pass = None

    def broken(self) -> Change | None:
        """Return what has changed since the step read it; None if nothing has."""
        if _global_hooks() != self._hooks:
            return Change("the hooks of all modules changed")
        if self._pass is None:
            owners = [owner for owner in self._owners if id(owner) not in self._replaced]
            self._pass = _Pass(owners, self._judge)
            self._held = {id(value) for owner in owners for value in owner.snapshot.values()}
        holds = self._pass.holds()
        if holds and not self._replaced:
            return None
        self._moves, self._values = {}, {}
        for owner in self._replaced.values() if holds else self._owners:
            # Of an object whose place another one takes, nothing more is asked.
            change = None if id(owner) in self._moves else self._difference(owner, owner)
            if change is not None:
                return change
        change = self._parted(holds)
        if change is None:
            self._move()
            if not holds:  # What stands there now for the same is what the next look compares.
                self._pass = None
        return change

    def replaced(self) -> Iterator[Any]:
        """Yield the names of all that another value of its kind has taken the place of."""
        for owner in self._owners:
            for key, expected in owner.snapshot.items():
                value = owner.look_up(key) if type(owner.holder) is owner.kind else expected
                if not self._judge.accepts(expected, value):
                    change = owner.change(key, expected, value)
                    if change.name is not None:
                        yield change.name

    def _parted(self, holds: bool) -> Change | None:
        """Return where an object is still read that another one took the place of elsewhere."""
        gone = {id(owner.holder) for owner, _ in self._moves.values()}
        is_elsewhere = bool(gone) and not (holds and self._held.isdisjoint(gone))
        for owner in self._owners if is_elsewhere else self._replaced.values():
            for key, expected in owner.snapshot.items():
                if id(expected) in gone and (id(owner), key) not in self._values:
                    return Change(f"{owner.named(key)} is no longer what it is elsewhere")
        return None

    def _move(self) -> None:
        """Let what was read of one object be looked up in the one that took its place."""
        for owner, key, value in self._values.values():
            owner.snapshot[key] = value
        for owner, _ in self._moves.values():
            self._by_id.pop(id(owner.holder), None)
        for owner, holder in self._moves.values():
            owner.holder = holder
            self._by_id.setdefault(id(holder), []).append(owner)
        entries = (*self._values.values(), *self._moves.values())
        replaced = {*self._replaced, *(id(owner) for owner, *_ in entries)}
        if len(replaced) > len(self._replaced):
            # In their order: what holds an object comes before it.
            self._replaced = {id(o): o for o in self._owners if id(o) in replaced}
            self._pass = None

    def _difference(self, owner: Owner, there: Owner) -> Change | None:
        """Return what of an owner is not the same in another object of its kind."""
        if type(there.holder) is not owner.kind:
            return Change(f"the class of a {owner.label} changed", for_good=True)
        for key, expected in owner.snapshot.items():
            value = there.look_up(key)
            if not self._judge.accepts(expected, value):
                return owner.change(key, expected, value)
            if value is not expected:
                replacement = self._judge.now_expected(expected, value)
                self._values[id(owner), key] = owner, key, replacement
        keys = list(there.keys_now()) if owner.is_whole else owner.keys
        return None if _same_keys(keys, owner.keys) else _other_keys(owner, keys)

    def _holds_the_same(self, expected: Any, value: Any) -> bool | None:
        """Compare what was read of an object with what another one holds; None for nothing read."""
        if id(expected) in self._stored:
            return False
        owners = self._by_id.get(id(expected))
        if owners is None:
            return None
        pair = id(expected), id(value)
        if pair in self._pairs:  # a cycle
            return True
        self._pairs.add(pair)
        try:
            if any(self._difference(o, o.beside(value)) is not None for o in owners):
                return False
            self._moves |= {id(owner): (owner, value) for owner in owners}
            return True
        finally:
            self._pairs.discard(pair)


class _Pass:
    """One look at everything that was read.

    Args:
        owners: What was read of.
        judge: Asked about what is made anew for each look.
    """

    def __init__(self, owners: Sequence[Owner], judge: Judge) -> None:
        self._judge = judge
        self._objects = [o.holder for o in owners if isinstance(o, Object)]
        self._kinds = [o.kind for o in owners if isinstance(o, Object)]
        pairs = [(holder, dict_of(holder)) for holder in self._objects]
        self._with_dict = [holder for holder, own in pairs if own is not None]
        self._dicts = [own for _, own in pairs if own is not None]
        self._empty: list[Any] = []  # containers that held nothing
        self._sizes: list[tuple[Any, int]] = []  # of tables that were read whole
        self._orders: list[tuple[Any, list[Any]]] = []
        self._tables: dict[int, tuple[Mapping[Any, Any], dict[Any, Any]]] = {}
        self._absent: dict[int, tuple[Mapping[Any, Any], set[Any]]] = {}
        self._lists: list[tuple[Callable[[], Any], list[Any]]] = []
        self._cells: list[tuple[Any, Any]] = []
        self._functions: list[tuple[Any, tuple[Any, ...]]] = []
        self._tensors: dict[tuple[str, ...], list[torch.Tensor]] = {}
        self._hooked: list[tuple[Owner, Any]] = []
        self._single: list[tuple[Owner, Any, Any]] = []
        for owner in owners:
            self._add(owner)
        tables = self._tables.values()
        many = [(table, names) for table, names in tables if len(names) > 1]
        ones = [
            (table, *pair) for table, names in tables if len(names) == 1 for pair in names.items()
        ]
        self._getters = [(itemgetter(*names), table) for table, names in many]
        self._ones = [(table, name) for table, name, _ in ones]
        self._expected = list(chain.from_iterable(names.values() for _, names in many))
        self._expected += [value for _, _, value in ones]
        self._expected += [value for _, value in self._cells]
        self._expected += list(chain.from_iterable(parts for _, parts in self._functions))
        self._traits = [(attrgetter(*names), tensors) for names, tensors in self._tensors.items()]
        traits = [map(getter, tensors) for getter, tensors in self._traits]
        self._expected_traits = list(chain.from_iterable(chain(*traits)))
        self._missing = [(table.keys(), names) for table, names in self._absent.values()]

    def _add(self, owner: Owner) -> None:
        holder = owner.holder
        if owner.is_whole and isinstance(owner, Names | Elements) and not owner.keys:
            self._empty.append(holder)
        elif isinstance(owner, Elements) and owner.is_whole:
            self._lists.append((owner.elements, list(owner.snapshot.values())))
        elif owner.kind is FunctionType and owner.is_whole:
            self._functions.append((holder, tuple(owner.snapshot.values())))
        elif isinstance(owner, Traits):
            self._add_tensor(owner)
        else:
            self._add_keys(owner)

    def _add_tensor(self, owner: Traits) -> None:
        traits = owner.snapshot[None]
        names = tuple(name for name in TRAITS if hasattr(owner.holder, name))
        if owner.fits or any(traits[1:-1]) or owner.look_up(None) != traits:
            self._hooked.append((owner, traits))
        else:
            self._tensors.setdefault(names, []).append(owner.holder)

    def _add_keys(self, owner: Owner) -> None:
        if owner.is_whole and isinstance(owner, Items) and owner.kind is not MappingProxyType:
            self._orders.append((owner, owner.keys))
        elif owner.is_whole and isinstance(owner, Names | ClassNames):
            table: Any = owner.table(None)
            table = owner.holder if table is None else table  # a mapping's proxy
            self._sizes.append((table, len(owner.keys) + len(table) - owner.size()))
        elif owner.is_whole and isinstance(owner, Object):
            self._orders.append((owner, owner.keys))
        for key, expected in owner.snapshot.items():
            table = owner.table(key)
            if isinstance(owner, Cell) and expected is not ABSENT:
                self._cells.append((owner.holder, expected))
            elif table is None:
                self._single.append((owner, key, expected))
            elif expected is ABSENT:
                self._absent.setdefault(id(table), (table, set()))[1].add(key)
            else:
                self._tables.setdefault(id(table), (table, {}))[1][key] = expected
                own = dict_of(owner.holder) if isinstance(owner, Object) else None
                if own is not None and own is not table:  # one of a Module's registries
                    self._absent.setdefault(id(own), (own, set()))[1].add(key)
                    name = next(name for name in own if own[name] is table)
                    self._tables.setdefault(id(own), (own, {}))[1][name] = table

    def holds(self) -> bool:
        """Tell whether everything is the very object that it was."""
        if any(self._empty) or not all(map(is_, map(type, self._objects), self._kinds)):
            return False
        if not all(map(is_, map(_look_up, self._with_dict, repeat("__dict__")), self._dicts)):
            return False
        try:
            values = list(chain.from_iterable([get(table) for get, table in self._getters]))
            values += [table[name] for table, name in self._ones]
            values += [cell.cell_contents for cell, _ in self._cells]
        except (KeyError, ValueError):
            return False
        functions = [holder for holder, _ in self._functions]
        values += chain.from_iterable(map(_FUNCTION_PARTS, functions))
        if not all(map(is_, values, self._expected)):
            return False
        if not all(keys.isdisjoint(names) for keys, names in self._missing):
            return False
        return self._holds_beside()

    def _holds_beside(self) -> bool:
        if any(len(table) != size for table, size in self._sizes):
            return False
        traits = [map(getter, tensors) for getter, tensors in self._traits]
        if not all(map(is_, chain.from_iterable(chain(*traits)), self._expected_traits)):
            return False
        if any(owner.look_up(None) != expected for owner, expected in self._hooked):
            return False
        for elements, expected in self._lists:
            contents = elements()
            if len(contents) != len(expected) or not all(map(is_, contents, expected)):
                return False
        if not all(_same_keys(list(owner.keys_now()), keys) for owner, keys in self._orders):
            return False
        return all(self._is_same(owner, owner.look_up(key), v) for owner, key, v in self._single)

    def _is_same(self, owner: Owner, value: Any, expected: Any) -> bool:
        if isinstance(owner, Answers):  # which may make what it gives anew for each look
            return self._judge.accepts(expected, value)
        return value is expected or (isinstance(owner, Memory) and value == expected)


def _global_hooks() -> list[tuple[Any, ...]]:
    """Return the hooks that torch calls for every module."""
    return [tuple(getattr(torch_module, name)) for name in _HOOKS]


def _by_holder(owners: Sequence[Owner]) -> dict[int, list[Owner]]:
    by_id: dict[int, list[Owner]] = {}
    for owner in owners:
        by_id.setdefault(id(owner.holder), []).append(owner)
    return by_id


def _other_keys(owner: Owner, keys: Sequence[Any]) -> Change:
    if isinstance(owner, Elements):
        return Change(f"{owner.label} has {len(keys)} elements and had {len(owner.keys)}")
    if owner.label.endswith("_hooks") and len(keys) > len(owner.keys):
        return Change(f"a hook of {owner.label.rpartition('.')[0]} was added")
    for key in keys:
        if not any(_same_keys([key], [old_key]) for old_key in owner.keys):
            return Change(f"{owner.named(key)} is new")
    return Change(f"the order of what {owner.label} holds changed")


def _same_keys(keys: Sequence[Any], expected: Sequence[Any]) -> bool:
    # By identity first, for keys may be tensors, whose equality is a tensor.
    if len(keys) != len(expected):
        return False
    return all(map(is_, keys, expected)) or all(
        a is b or (type(a) is type(b) and not isinstance(a, torch.Tensor) and a == b)
        for a, b in zip(keys, expected, strict=True)
    )
