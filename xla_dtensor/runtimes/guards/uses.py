"""How code uses a value that it loads: whether only an item of it, read off the next instructions.

A dict that a step reads counts as read whole, for Python's own containers cannot be watched. Most
code says at once which item it wants, and then only that item counts::

    TABLE["bias"]               LOAD_GLOBAL TABLE, LOAD_CONST 'bias', BINARY_SUBSCR       one item
    self.table[name]            LOAD_ATTR table, LOAD_FAST name, BINARY_SUBSCR            one item
    self.history.append(x)      LOAD_ATTR history, LOAD_ATTR append                       none
    name in self.table          LOAD_ATTR table, CONTAINS_OP                              its keys
    LOGS["loss"].append(x)      LOAD_GLOBAL LOGS, LOAD_CONST 'loss', BINARY_SUBSCR, ...   none
    LOGS.setdefault("loss", []).append(x)                                                 none
    table = self.table          LOAD_ATTR table, STORE_FAST table                         all of it
"""

from __future__ import annotations

import dis
from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from functools import lru_cache
from types import CodeType
from typing import Any, NamedTuple

__all__ = [
    "ADDS",
    "Loads",
    "Use",
    "instructions_of",
    "loads_of",
    "only_of_super",
    "takes_only_parameters",
    "use_behind",
]

ADDS = frozenset({"append", "appendleft", "extend", "add", "update"})
_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD")
_LOCALS = ("LOAD_FAST", "LOAD_FAST_BORROW", "LOAD_FAST_CHECK")
_COMPARES = ("IS_OP", "COMPARE_OP", "CONTAINS_OP")
_OF_CLASSES = ("__name__", "__qualname__", "__module__", "__doc__")
_CONSTANTS = ("LOAD_CONST", "LOAD_SMALL_INT")
_GLOBALS = ("LOAD_GLOBAL", "LOAD_NAME")
_IS_CALLED = 1  # a bit of LOAD_GLOBAL's argument
_STORES = ("STORE_GLOBAL", "DELETE_GLOBAL", "STORE_NAME", "DELETE_NAME", "STORE_DEREF")
_DELETES = ("DELETE_GLOBAL", "DELETE_NAME")
_CELLS = ("LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF", "DELETE_DEREF")


class Use(NamedTuple):
    """What code does with a value.

    Attributes:
        kind: "item" reads one, "local" reads the one whose key a local variable holds, "get" may
            read one, "attribute" reads one; "search" compares the keys of a dict, the elements of
            another one; "write" and "write local" an item, "assign" an attribute, read nothing.
        key: Of the item; the local's or the attribute's name.
        then: The use of what is read.
    """

    kind: str
    key: Any = None
    then: Use | None = None


class Loads(NamedTuple):
    """What a function's code loads, with each use of it; None is a use that may read all.

    Attributes:
        names: Globals, by name.
        cells: Variables of the functions around.
        supers: Attributes of ``super()``.
        stores: Globals and variables of the functions around that it assigns to or deletes.
        imports: Modules that it imports, with the levels of relative ones.
        is_of_class: Whether it takes an object's class, and may read or assign attributes of it.
        asks_for_type: Whether what it does next may depend on ``type(...)`` of a number: "called"
            where it calls that itself, "taken" where it hands it on, as ``map(type, numbers)``.
    """

    names: Mapping[str, Sequence[Use | None]]
    cells: Mapping[str, Sequence[Use | None]]
    supers: Sequence[str]
    stores: Set[str]
    imports: Sequence[tuple[str, int]]
    is_of_class: bool
    asks_for_type: frozenset[str]


@lru_cache(maxsize=20_000)
def loads_of(code: CodeType) -> Loads:
    """Return what a code loads; the functions that are defined in it count with it."""
    names: dict[str, list[Use | None]] = defaultdict(list)
    cells: dict[str, list[Use | None]] = defaultdict(list)
    supers: list[str] = []
    stores: set[str] = set()
    imports: list[tuple[str, int]] = []
    listed, _ = instructions_of(code)
    is_of_class = any(_is_of_class(listed, place) for place in range(len(listed)))
    asks = (_asks_for_type(listed, place) for place in range(len(listed)))
    asks_for_type = frozenset(way for way in asks if way is not None)
    for place, instruction in enumerate(listed):
        if instruction.opname in _GLOBALS:
            names[instruction.argval].append(_use(listed, place))
        elif instruction.opname in _CELLS:
            cells[instruction.argval].append(_use(listed, place))
        elif instruction.opname == "LOAD_SUPER_ATTR":
            supers.append(instruction.argval)
        elif instruction.opname in _STORES:
            stores.add(instruction.argval)
            if instruction.opname in _DELETES:  # which fails where there is nothing
                names[instruction.argval].append(None)
        elif instruction.opname == "IMPORT_NAME":
            imports.append((instruction.argval, listed[place - 2].argval))
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            below = loads_of(inner)
            for here, there in ((names, below.names), (cells, below.cells)):
                for name, uses in there.items():
                    here[name] += uses
            supers += below.supers
            stores |= below.stores
            imports += below.imports
            is_of_class |= below.is_of_class
            asks_for_type |= below.asks_for_type
    return Loads(names, cells, supers, stores, imports, is_of_class, asks_for_type)


def only_of_super(code: CodeType, name: str) -> bool:
    """Tell whether an attribute that code loads is one of ``super()``, without arguments."""
    loads = [instruction for instruction in instructions_of(code)[0] if instruction.argval == name]
    has_arguments = 2  # a bit of the instruction's argument
    return all(i.opname == "LOAD_SUPER_ATTR" and not (i.arg or 0) & has_arguments for i in loads)


def use_behind(code: CodeType, offset: int, name: str) -> Use | None:
    """Return the use of the attribute that the instruction at `offset` loads.

    Args:
        code: The code that runs.
        offset: Of the instruction, in bytes.
        name: The attribute that is being looked up.
    """
    listed, places = instructions_of(code)
    place = places.get(offset)
    if place is None:
        return None
    # Another instruction may hand the value to code of C, which puts it anywhere.
    is_direct = listed[place].opname in _ATTRIBUTES and listed[place].argval == name
    return _use(listed, place) if is_direct else None


@lru_cache(maxsize=20_000)
def instructions_of(code: CodeType) -> tuple[list[dis.Instruction], dict[int, int]]:
    """Return a code's instructions, and the place among them of each offset in bytes.

    A jump goes to the EXTENDED_ARG before an instruction, where there is one.
    """
    listed: list[dis.Instruction] = []
    places: dict[int, int] = {}
    for instruction in dis.get_instructions(code):
        if instruction.opname != "CACHE":
            places[instruction.offset] = len(listed)
            if instruction.opname != "EXTENDED_ARG":
                listed.append(instruction)
    return listed, places


@lru_cache(maxsize=1024)
def takes_only_parameters(code: CodeType) -> bool:
    """Tell whether code takes nothing of an optimizer's groups but their parameters.

    Example:
        >>> def parameters(optimizer):
        ...     for group in optimizer.param_groups:
        ...         yield from group["params"]
        >>> takes_only_parameters(parameters.__code__)
        True
        >>> takes_only_parameters((lambda optimizer: optimizer.param_groups[0]["lr"]).__code__)
        False
    """
    listed, _ = instructions_of(code)
    groups: set[str] = set()
    for place, instruction in enumerate(listed):
        if instruction.argval == "param_groups":
            names = [step.opname for step in listed[place + 1 : place + 4]]
            if names[:2] != ["GET_ITER", "FOR_ITER"] or not names[2].startswith("STORE_FAST"):
                return False
            groups.add(_locals_of(listed[place + 3])[0])
    for place, instruction in enumerate(listed):
        if "LOAD_" in instruction.opname and groups & {*_locals_of(instruction)}:
            of_group, subscript = listed[place + 1 : place + 3]
            if of_group.argval != "params" or not _is_subscript(subscript):
                return False
    return bool(groups)


def _locals_of(instruction: dis.Instruction) -> tuple[Any, ...]:
    """Return the variables that an instruction stores, then those that it loads."""
    names = instruction.argval
    return names if isinstance(names, tuple) else (names,)


def _use(listed: Sequence[dis.Instruction], place: int) -> Use | None:
    following = listed[place + 1 : place + 5]
    if len(following) < 2:
        return None
    first, second = following[:2]
    if first.opname == "CONTAINS_OP":
        return Use("search")
    if first.opname == "STORE_ATTR":
        return Use("assign")
    if first.opname == "COPY" and second.opname in _ATTRIBUTES:  # an augmented assignment
        return Use("attribute", second.argval)
    if first.opname in _ATTRIBUTES:
        if first.argval in ADDS:
            return Use("write")
        is_get = first.argval == "get" and second.opname in _CONSTANTS
        if is_get:
            return Use("get", second.argval)
        if first.argval == "setdefault" and second.opname in _CONSTANTS:
            called = _call_of(listed, place + 1)
            return Use("get", second.argval, _use(listed, called) if called > place + 1 else None)
        return Use("attribute", first.argval, _use(listed, place + 1))
    if first.opname in _CONSTANTS:
        use = Use("item", first.argval)
    elif first.opname in _LOCALS:
        use = Use("local", first.argval)
    else:
        return None
    if _is_subscript(second):
        return use._replace(then=_use(listed, place + 2))
    if second.opname == "STORE_SUBSCR":
        return Use("write" if use.kind == "item" else "write local", use.key)
    # An augmented assignment: COPY, COPY, BINARY_SUBSCR
    copies = [instruction.opname for instruction in following[1:3]] == ["COPY", "COPY"]
    return use if copies and len(following) == 4 and _is_subscript(following[3]) else None


def _is_of_class(listed: Sequence[dis.Instruction], place: int) -> bool:
    """Tell whether an instruction takes an object's class for more than its name or identity."""
    instruction = listed[place]
    if instruction.opname in _GLOBALS and instruction.argval == "type":
        place = _call_of(listed, place)
    elif instruction.opname not in _ATTRIBUTES or instruction.argval != "__class__":
        return False
    following = listed[place + 1 : place + 3]
    if any(successor.opname in _COMPARES for successor in following):
        return False
    return not any(o.opname in _ATTRIBUTES and o.argval in _OF_CLASSES for o in following[:1])


def _asks_for_type(listed: Sequence[dis.Instruction], place: int) -> str | None:
    """Tell how an instruction asks for a class, and not for its name only; None: not at all.

    Returns:
        As `Loads.asks_for_type`.
    """
    instruction = listed[place]
    if instruction.opname not in _GLOBALS or instruction.argval != "type":
        return None
    if instruction.opname != "LOAD_GLOBAL" or not (instruction.arg or 0) & _IS_CALLED:
        return "taken"
    following = listed[_call_of(listed, place) + 1 :][:1]
    is_named = any(o.opname in _ATTRIBUTES and o.argval in _OF_CLASSES for o in following)
    return None if is_named else "called"


def _call_of(listed: Sequence[dis.Instruction], place: int) -> int:
    """Return where what an instruction loads is called."""
    depth = 0
    for n in range(place, len(listed)):
        depth += dis.stack_effect(listed[n].opcode, listed[n].arg, jump=False)
        if depth <= 1 and listed[n].opname.startswith("CALL"):
            return n
    return place


def _is_subscript(instruction: dis.Instruction) -> bool:
    if instruction.opname == "BINARY_SUBSCR":
        return True
    return instruction.opname == "BINARY_OP" and instruction.argrepr == "[]"
