"""What a compiled step is called with: what of it tells programs apart, and why a call has none.

Of a tensor a program takes the values; its shape, dtype, sharding and labels are part of the
program. Anything else is a Python value, and part of the program as it is, except that a float that
was seen to change is an input from then on, as a learning rate is::

    step(x, 0.1)       traced for 0.1                                             program A
    step(x, 0.2)       "args[1] changed from 0.1 to 0.2": traced with an input    program B
    step(x, 0.3)       program B

A step that needs such a float as a Python number (``math.exp(beta)``) gets it as one, and a program
for each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import torch
from torch.utils._pytree import TreeSpec, keystr, tree_flatten, tree_flatten_with_path

from xla_dtensor.errors import ArgumentTypeError
from xla_dtensor.runtimes.jax_convert import numpy_from_torch
from xla_dtensor.runtimes.jax_step_values import inner, refuse_manual
from xla_dtensor.runtimes.jax_tensor import JaxTensor, Storage
from xla_dtensor.runtimes.trace_settings import trace_settings

__all__ = ["Call", "FloatInputs", "Key"]

INPUT = "an input"  # in a key, the value of a float that is one


class Key(NamedTuple):
    """What tells programs apart.

    Attributes:
        leaves: Of each leaf of the arguments what is part of the program.
        tree: How they nest.
        settings: What else tracing depends on, by name.
    """

    leaves: tuple[Any, ...]
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
        self.leaves, self.tree = tree_flatten((args, kwargs))
        self.tensors: list[JaxTensor | None] = []

    def bind(self) -> None:
        """Find the payloads; plain tensors are put on the devices."""
        self.tensors = [_payload(leaf) for leaf in self.leaves]

    def key(self, inputs: frozenset[int] = frozenset()) -> Key:
        """Return what tells this call's program from others.

        Args:
            inputs: The places of the floats that are inputs.
        """
        leaves = tuple(
            self._described(i, leaf, tensor, i in inputs)
            for i, (leaf, tensor) in enumerate(zip(self.leaves, self.tensors, strict=True))
        )
        return Key(leaves, self.tree, trace_settings())

    def name(self, place: int) -> str:
        """Return how errors call a leaf: ``args[1]['mask']``."""
        path: Any = tree_flatten_with_path(self.given)[0][place][0]
        return f"{('args', 'kwargs')[path[0].idx]}{keystr(path[1:])}"

    def difference(self, key: Key, other: Key) -> str:
        """Return what a program that was made for `other` does not fit this call for."""
        if key.tree != other.tree:
            return "arguments that nest in another way"
        for place, (mine, theirs) in enumerate(zip(key.leaves, other.leaves, strict=True)):
            if mine != theirs:
                return f"{self.name(place)} changed from {_text(theirs)} to {_text(mine)}"
        before = dict(other.settings)
        for name, value in key.settings:
            if before.get(name) != value:
                return f"{name} changed from {before.get(name)} to {value}"
        return "another setting"

    def floats_that_differ(self, key: Key, other: Key) -> frozenset[int]:
        """Return the places of floats, if two calls differ in nothing else."""
        if key.tree != other.tree or key.settings != other.settings:
            return frozenset()
        pairs = enumerate(zip(key.leaves, other.leaves, strict=True))
        places = {place for place, (mine, theirs) in pairs if mine != theirs}
        if all(isinstance(self.leaves[place], float) for place in places):
            return frozenset(places)
        return frozenset()

    def _described(self, place: int, leaf: Any, tensor: JaxTensor | None, is_input: bool) -> Any:
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
            )
        if isinstance(leaf, np.ndarray):
            raise ArgumentTypeError(
                f"A compiled step was called with {self.name(place)}, a NumPy array of "
                f"shape={leaf.shape}. Its elements would be part of the program, which is made "
                "for one call's. Pass torch.from_numpy(array)."
            )
        # 0.0 and -0.0 are equal, and so are 1, 1.0 and True.
        value = INPUT if is_input else repr(leaf) if isinstance(leaf, float | complex) else leaf
        return type(leaf), value if _has_hash(value) else _Same(value)


class FloatInputs:
    """The floats among a step's arguments that are inputs of its programs: those that changed."""

    def __init__(self) -> None:
        self._places: dict[TreeSpec, frozenset[int]] = {}
        self._never: set[tuple[TreeSpec, int]] = set()  # needed as Python's numbers
        self._values: dict[int, float] = {}

    def inputs(self, call: Call) -> frozenset[int]:
        """Return the places of the floats that are inputs."""
        return self._places.get(call.tree, frozenset())

    def take(self, call: Call) -> None:
        """Take the values of a call."""
        self._values = {place: call.leaves[place] for place in self.inputs(call)}

    def make_inputs(self, call: Call, key: Key, others: Iterable[Key]) -> bool:
        """Make inputs of the floats in which a call differs from an earlier one.

        Returns:
            Whether there are any; the two must differ in nothing else.
        """
        for other in others:
            places = call.floats_that_differ(key, other)
            if places and not any((call.tree, place) in self._never for place in places):
                self._places[call.tree] = self.inputs(call) | places
                self.take(call)
                return True
        return False

    def give_up(self, call: Call) -> bool:
        """Make Python's numbers of all inputs again; returns whether there were any."""
        places = self._places.pop(call.tree, frozenset())
        self._never |= {(call.tree, place) for place in places}
        return bool(places)

    def lent(self, call: Call, lend: Callable[[float, Callable[[], float]], Any]) -> list[Any]:
        """Return a call's leaves, with a traced number in the place of each input."""
        places = self.inputs(call)
        return [
            lend(leaf, lambda place=place: self._values[place]) if place in places else leaf
            for place, leaf in enumerate(call.leaves)
        ]


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


def _payload(leaf: Any) -> JaxTensor | None:
    refuse_manual(leaf, "called with", "before the call")
    tensor = inner(leaf)
    if tensor is not None:
        if tensor._steps:
            made = Storage(tensor.raw(), manual=tensor._storage.manual)
            return JaxTensor(made, shape=tuple(tensor.shape), stride=tensor.stride())
        return tensor
    if isinstance(leaf, torch.Tensor):
        return JaxTensor(Storage(jnp.array(numpy_from_torch(leaf))))
    return None


_TENSOR_FACTS = ("shape", "dtype", "sharding", "placements", "axes", "sizes", "requires_grad")


def _text(described: Sequence[Any]) -> str:
    kind, *facts = described
    if len(facts) == 1:
        return str(facts[0]) if isinstance(facts[0], str) else repr(facts[0])
    named = dict(zip(_TENSOR_FACTS, facts, strict=True))
    shown = ("shape", "dtype", "placements", "requires_grad")
    listed = ", ".join(f"{name}={named[name]}" for name in shown if named[name] is not None)
    return f"a {kind.__name__} of {listed}"
