"""What a compiled step is called with: what of it tells programs apart, and why a call has none.

Of a tensor a program takes the values; its shape, dtype, sharding and labels are part of the
program, and so is which of the tensors are one and the same. Anything else is a Python value, and
part of the program as it is. An argument that the step's code never names is nobody's.

A float that became an input of the program by itself would be no float any more: ``isinstance`` and
texts of it would differ. A number that is to change is passed as a tensor.
"""

from __future__ import annotations

import dis
from collections.abc import Callable, Container, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import torch
from torch.utils._pytree import TreeSpec, keystr, tree_flatten, tree_flatten_with_path

from xla_dtensor.errors import ArgumentTypeError
from xla_dtensor.runtimes.jax_convert import numpy_from_torch
from xla_dtensor.runtimes.jax_step_values import inner, refuse_manual
from xla_dtensor.runtimes.jax_tensor import JaxTensor, Storage
from xla_dtensor.runtimes.opened import open_all
from xla_dtensor.runtimes.premises.sources import inner_functions
from xla_dtensor.runtimes.trace_settings import trace_settings

__all__ = ["Call", "Key", "unread_arguments"]


_ADVICE = " (a tensor would be an input of one program)"


class Key(NamedTuple):
    """What tells programs apart.

    Attributes:
        leaves: Of each leaf of the arguments what is part of the program.
        same: Of each leaf the place of the first one that is the same tensor.
        tree: How they nest.
        settings: What else tracing depends on, by name.
    """

    leaves: tuple[Any, ...]
    same: tuple[int, ...]
    tree: TreeSpec
    settings: tuple[tuple[str, Any], ...]


class Call:
    """One call of a step.

    Args:
        args: Its arguments.
        kwargs: Its keyword arguments.

    Attributes:
        given: Both.
        leaves: The leaves of both.
        tree: How they nest.
        tensors: The payload of each leaf that is a tensor; None for others.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.given = (args, kwargs)
        self.leaves, self.tree = tree_flatten(open_all((args, kwargs)))
        self.tensors: list[JaxTensor | None] = []
        self.views: Container[int] = ()

    @classmethod
    def of(
        cls, args: tuple[Any, ...], kwargs: dict[str, Any], unread: Container[int | str]
    ) -> Call:
        """Return a call without the arguments that the step does not read.

        Args:
            args: Its arguments.
            kwargs: Its keyword arguments.
            unread: Places and names of the arguments that no code reads.
        """
        if not unread:
            return cls(args, kwargs)
        kept = tuple(None if i in unread else each for i, each in enumerate(args))
        return cls(kept, {name: None if name in unread else v for name, v in kwargs.items()})

    def bind(self, views: Container[int] = ()) -> None:
        """Find the payloads; plain tensors are put on the devices.

        Args:
            views: The places of arguments that stay views of their base, which the program takes
                in their stead. Other views are cut out first, so that a program fits any row.
        """
        self.views = views
        self.tensors = [_payload(leaf, i in views) for i, leaf in enumerate(self.leaves)]

    def storages(self) -> list[Storage]:
        """Return the storages of the tensors among the leaves."""
        return [tensor._storage for tensor in self.tensors if tensor is not None]

    def has(self, tensor: torch.Tensor) -> bool:
        """Tell whether a tensor is one of the leaves."""
        return any(leaf is tensor for leaf in self.leaves)

    def key(self) -> Key:
        """Return what tells this call's program from others."""
        pairs = zip(self.leaves, self.tensors, strict=True)
        leaves = tuple(self._described(i, leaf, t) for i, (leaf, t) in enumerate(pairs))
        first: dict[int, int] = {}
        storages = [None if t is None else id(t._storage) for t in self.tensors]
        same = tuple(i if s is None else first.setdefault(s, i) for i, s in enumerate(storages))
        return Key(leaves, same, self.tree, trace_settings())

    def name(self, place: int) -> str:
        """Return how errors call a leaf: ``args[1]['mask']``."""
        path: Any = tree_flatten_with_path(open_all(self.given))[0][place][0]
        return f"{('args', 'kwargs')[path[0].idx]}{keystr(path[1:])}"

    def difference(self, key: Key, other: Key) -> str:
        """Return what a program that was made for `other` does not fit this call for."""
        if key.tree != other.tree:
            return "arguments that nest in another way"
        for place, (mine, theirs) in enumerate(zip(key.leaves, other.leaves, strict=True)):
            if mine != theirs:
                advice = "" if self.tensors[place] is not None else _ADVICE
                return f"{self.name(place)} changed from {_text(theirs)} to {_text(mine)}{advice}"
        if key.same != other.same:
            return "other ones of the arguments are the same tensor"
        before = dict(other.settings)
        for name, value in key.settings:
            if before.get(name) != value:
                return f"{name} changed from {before.get(name)} to {value}"
        return "another setting"

    def _described(self, place: int, leaf: Any, tensor: JaxTensor | None) -> Any:
        if tensor is not None:
            spec = getattr(leaf, "_spec", None)
            return (
                type(leaf),
                tuple(tensor.shape),
                tensor.dtype,
                tensor._storage.lies,
                spec and spec.placements,
                getattr(leaf, "_varying", None),
                getattr(leaf, "_uneven", None),
                leaf.requires_grad,
                _grad(leaf),
                _geometry(tensor) if place in self.views else None,
            )
        if isinstance(leaf, np.ndarray):
            raise ArgumentTypeError(
                f"A compiled step was called with {self.name(place)}, a NumPy array of "
                f"shape={leaf.shape}. Its elements would be part of the program, which is made "
                "for one call's. Pass torch.from_numpy(array)."
            )
        # 0.0 and -0.0 are equal, and so are 1, 1.0 and True.
        value = repr(leaf) if isinstance(leaf, float | complex) else leaf
        return type(leaf), value if _has_hash(value) else _Same(value)


def unread_arguments(step: Callable[..., Any]) -> frozenset[int | str]:
    """Return the places and names of a step's arguments that its code never reads.

    Example:
        >>> sorted(unread_arguments(lambda batch, batch_index: batch), key=str)
        [1, 'batch_index']
    """
    function = getattr(step, "__func__", step)
    code = getattr(function, "__code__", None)
    if code is None or hasattr(function, "__wrapped__"):
        return frozenset()
    codes = [code, *inner_functions(code)]
    if any(_SEE_LOCALS & {*each.co_names} for each in codes):
        return frozenset()
    steps = [each for one in codes for each in dis.get_instructions(one)]
    read = {name for each in steps if _LOADS in each.opname for name in _several(each.argval)}
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    bound = int(hasattr(step, "__self__"))
    places = {
        name: place - bound for place, name in enumerate(code.co_varnames[: code.co_argcount])
    }
    unread = [name for name in names[bound:] if name not in read]
    return frozenset([*unread, *(places[name] for name in unread if name in places)])


_SEE_LOCALS = frozenset({"locals", "eval", "exec", "vars", "dir"})
_LOADS = "LOAD_"


def _several(names: Any) -> tuple[Any, ...]:
    return names if isinstance(names, tuple) else (names,)


class _Same:
    """Equal to what stands for the same object; what the object holds, premises look after."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other._value is self._value

    def __hash__(self) -> int:
        return id(self._value)

    def __repr__(self) -> str:
        return f"a {type(self._value).__name__}"


def _has_hash(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def _geometry(tensor: JaxTensor) -> Any:
    """Return what tells a view from other views of one base."""
    kinds = tuple(step.read.__code__ for step in tensor._steps)
    return tensor.stride(), tensor.storage_offset(), kinds


def _payload(leaf: Any, stays_view: bool) -> JaxTensor | None:
    refuse_manual(leaf, "called with", "before the call")
    tensor = inner(leaf)
    if tensor is not None:
        if tensor._steps and not (stays_view and tensor._storage.manual is None):
            made = Storage(tensor.raw(), manual=tensor._storage.manual)
            return JaxTensor(made, shape=tuple(tensor.shape), stride=tensor.stride())
        return tensor
    if isinstance(leaf, torch.Tensor):
        return JaxTensor(Storage(jnp.array(numpy_from_torch(leaf))))
    return None


def _grad(leaf: torch.Tensor) -> _Same | None:
    """Return what tells an argument's gradient from others, which a program would add to."""
    has_one = leaf.requires_grad and leaf.is_leaf and leaf.grad is not None
    return _Same(leaf.grad) if has_one else None


_TENSOR_FACTS = (
    "shape",
    "dtype",
    "sharding",
    "placements",
    "axes",
    "sizes",
    "requires_grad",
    "grad",
    "view",
)


def _text(described: Sequence[Any]) -> str:
    kind, *facts = described
    if len(facts) == 1:
        return str(facts[0]) if isinstance(facts[0], str) else repr(facts[0])
    named = dict(zip(_TENSOR_FACTS, facts, strict=True))
    shown = ("shape", "dtype", "placements", "requires_grad", "grad")
    listed = ", ".join(f"{name}={named[name]}" for name in shown if named[name] is not None)
    return f"a {kind.__name__} of {listed}"
