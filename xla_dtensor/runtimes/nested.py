"""Map over the arguments of an op: tensors in tuples, lists and dicts, nothing else.

Every op of every DTensor passes through here several times, and torch's general pytrees cost ten
microseconds a time where these few lines cost half of one.
"""

from __future__ import annotations

from collections import UserDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, is_dataclass
from types import FunctionType
from typing import Any, TypeVar

from torch._C._dynamo import eval_frame

__all__ = ["Containers", "Writes", "leaves", "map_nested", "runs_as_it_is"]


# ----------------------------------------------------------------- Map over the arguments of an op

_CONTAINERS = frozenset({tuple, list, dict})


def map_nested(function: Callable[[Any], Any], arguments: Any) -> Any:
    """Return `arguments` with `function` applied to everything that is no tuple, list or dict.

    Args:
        function: Called once per leaf.
        arguments: Arguments of an op. Subclasses, such as torch.Size, are leaves.

    Returns:
        The same structure.

    Example:
        >>> map_nested(lambda v: v + 1, (1, [2, 3], {"a": 4}))
        (2, [3, 4], {'a': 5})
    """
    kind = type(arguments)
    if kind is tuple or kind is list:
        mapped = [
            map_nested(function, v) if type(v) in _CONTAINERS else function(v) for v in arguments
        ]
        return mapped if kind is list else tuple(mapped)
    if kind is dict:
        return {k: map_nested(function, v) for k, v in arguments.items()}
    return function(arguments)


def leaves(arguments: Any) -> list[Any]:
    """Return everything in `arguments` that is no tuple, list or dict.

    Example:
        >>> leaves((1, [2, {"a": 3}]))
        [1, 2, 3]
    """
    # A loop and no recursion: every op comes here, and a generator in a generator costs a call
    # for each leaf and level.
    plain: list[Any] = []
    pending = [arguments]
    while pending:
        arguments = pending.pop()
        kind = type(arguments)
        if kind is tuple or kind is list:
            pending.extend(reversed(arguments))
        elif kind is dict:
            pending.extend(reversed(arguments.values()))
        else:
            plain.append(arguments)
    return plain


# --------------------------------------- Dicts and lists among the arguments that a step writes to
#
# They are written to on every call.
#
# A step is traced with copies of the containers that it is given, with other tensors in them. What
# it does to a copy is found by comparing, and done to the caller's own after each run of the
# program::
#
#     def step(batch):
#         labels = batch.pop("labels")                  the caller's batch has no labels afterwards,
#         batch["loss"] = loss_of(batch["x"], labels)   a loss, and x as it was
#
# New values leave the program beside the step's results. What was there before stays the object
# that it was.
#
# Invariant: a step that writes to no container has the program that it would have without this.

Path = tuple[Any, ...]


@dataclass(frozen=True)
class _OldElement:
    """An element that a container had before, under a key or at a place."""

    key: Any


@dataclass(frozen=True)
class Writes:
    """The containers that a step writes to.

    Args:
        paths: Where each stands among the arguments and keyword arguments.
    """

    paths: tuple[Path, ...] = ()

    def do(self, arguments: Any, contents: Sequence[Any]) -> None:
        """Write to the containers of a call.

        Args:
            arguments: Its arguments and keyword arguments.
            contents: What each container holds from now on, as `Containers.written` returns it.
        """
        # All are looked up before one is changed.
        stores = [_store_at(arguments, path) for path in self.paths]
        for store, new in zip(stores, contents, strict=True):
            _fill(store, new)


@dataclass
class Containers:
    """The copies that a step is traced with, and what they hold before.

    Args:
        before: Of each the path, what holds its elements, and these.
    """

    before: list[tuple[Path, Any, Any]] = field(default_factory=list)

    @classmethod
    def of(cls, copies: Any, arguments: Any) -> Containers:
        """Take down what the containers among the arguments hold.

        Args:
            copies: The arguments and keyword arguments that the step is traced with.
            arguments: Those of the call. What is the same object in both is no copy.
        """
        containers = cls()
        for number in (0, 1):  # The tuple and the dict themselves are nobody's.
            for key, copy in _elements(copies[number]):
                containers._add((number, key), copy, _store(arguments[number])[key])
        return containers

    def _add(self, path: Path, copy: Any, original: Any) -> None:
        store = None if copy is original else _store(copy)
        if store is None:
            return
        if not isinstance(store, tuple):
            self.before.append((path, store, _copied(store)))
        for key, element in _elements(store):
            self._add((*path, key), element, _store(original)[key])

    def written(self) -> tuple[Writes, list[Any]]:
        """Return the containers that hold something else now, and what they hold."""
        pairs = [(path, _new_contents(store, elements)) for path, store, elements in self.before]
        writes = [(path, new) for path, new in pairs if new is not None]
        return Writes(tuple(path for path, _ in writes)), [new for _, new in writes]


def _store(container: Any) -> Any:
    """Return what holds the elements of a container; None where it is none."""
    if isinstance(container, dict | list | deque | tuple):
        return container
    if isinstance(container, UserDict):
        return container.data
    is_object = is_dataclass(container) and not isinstance(container, type)
    return getattr(container, "__dict__", None) if is_object else None


def _copied(store: Any) -> Any:
    return dict(store) if isinstance(store, dict) else list(store)


def _elements(store: Any) -> Iterator[tuple[Any, Any]]:
    yield from list(store.items() if isinstance(store, dict) else enumerate(store))


def _store_at(container: Any, path: Path) -> Any:
    for key in path:
        container = _store(container)[key]
    return _store(container)


def _new_contents(store: Any, elements: Any) -> Any:
    """Return the new contents of a container, None where they are the old ones."""
    keys = [key for key, _ in _elements(store)]
    if keys == [key for key, _ in _elements(elements)] and all(
        store[k] is elements[k] for k in keys
    ):
        return None
    if isinstance(store, dict):
        return {
            k: _OldElement(k) if k in elements and elements[k] is v else v for k, v in store.items()
        }
    places = {id(element): place for place, element in enumerate(elements)}
    return [
        _OldElement(places[id(element)]) if id(element) in places else element for element in store
    ]


def _fill(store: Any, new: Any) -> None:
    old = _copied(store)
    contents = [
        (k, old[element.key] if isinstance(element, _OldElement) else element)
        for k, element in _elements(new)
    ]
    store.clear()
    if isinstance(store, dict):
        store.update(contents)
    else:
        store.extend(element for _, element in contents)


# ------------------------------------------------ Keep torch.compile out of the code that runs ops
#
# After a graph break, Dynamo looks into every Python function that is called while the rest of the
# frame runs: a tensor's ``__torch_dispatch__``, and from there into JAX, of which it cannot make
# anything. What a class marked here does, it runs as it is. In a graph nothing changes, because
# there the call is recorded, or read, before any frame is made.

Kind = TypeVar("Kind", bound=type)
_SKIP = eval_frame._FrameAction.SKIP
_STRATEGY = eval_frame._FrameExecStrategy(_SKIP, _SKIP)


def runs_as_it_is(kind: Kind) -> Kind:
    """Mark a class, as a decorator: Dynamo skips its functions and all that they call.

    Args:
        kind: The class. Inherited functions are not marked.

    Returns:
        The same class.
    """
    for member in vars(kind).values():
        if isinstance(member, property):
            functions = [member.fget, member.fset]
        else:
            functions = [getattr(member, "__func__", member)]
        for function in functions:
            if isinstance(function, FunctionType):
                eval_frame.set_code_exec_strategy(function.__code__, _STRATEGY)
    return kind
