"""What a step assigns in Python (``guards``), done after each run with the run's tensors.

While the step is traced Python assigns tensors of the trace, which the first run fills. Each later
run makes tensors of its own and assigns them in the same places, as PyTorch would::

    step: self.loss = loss; self.seen.append(loss)

    call 1    traced: self.loss is t1, seen is [t1]             the run fills t1
    call 2    the run makes t2                                  self.loss is t2, seen is [t1, t2]

Whoever kept an earlier tensor keeps its values. So it is with what holds tensors: lists, dicts and
objects that the step makes are made again for each run. What was there before the trace is itself.

A number is no cell that a run could fill. Where the step leaves traced numbers behind (``scalar``),
the first run too assigns what it has made, in their place::

    step: self.last = loss.item()

    call 1    traced: self.last is a traced number              the run: self.last is 0.73
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import jax
import torch
from torch.utils._pytree import tree_flatten, tree_is_leaf, tree_unflatten

from xla_dtensor.core.errors import CompileError
from xla_dtensor.runtimes.guards.objects import attribute_of, dict_of, is_watched, slots_of
from xla_dtensor.runtimes.guards.owners import Effect
from xla_dtensor.runtimes.guards.values import ABSENT
from xla_dtensor.runtimes.host_work import HostTape
from xla_dtensor.runtimes.jax.arrays.sharding import host_value
from xla_dtensor.runtimes.jax.arrays.storage import Storage
from xla_dtensor.runtimes.jax.compile.optimizer import number_now
from xla_dtensor.runtimes.jax.compile.trace_values import inner, rewrapper_of
from xla_dtensor.runtimes.jax.eager.scalar import ScalarNode, node_of

__all__ = ["Plan", "RunEffects"]


@dataclass
class _Run:
    """What one run gives."""

    arrays: Mapping[int, jax.Array]  # of what the step makes, by its number
    leaves: Sequence[Any]  # of the call's arguments
    delivered: Mapping[int, torch.Tensor]  # by the host
    moving: Sequence[torch.Tensor]  # what was found under names that are inputs
    wraps: Mapping[int, Callable[[jax.Array], Any]]
    made: dict[int, Any] = field(default_factory=dict)
    objects: dict[int, Any] = field(default_factory=dict)  # by the ids of those that a trace made

    def tensor(self, number: int) -> Any:
        if number not in self.made:
            self.made[number] = self.wraps[number](self.arrays[number])
        return self.made[number]


_Part = Callable[[_Run], Any]


@dataclass
class RunEffects:
    """What is assigned after a run.

    Args:
        effects: Assign something each.
        wraps: Makes tensors and numbers of what the step makes, by its number.
        names: What messages call what is assigned.
        replace: Assign what the first run gives in the place of what the trace has assigned; none
            without traced numbers among it.
        tensors: Those that the trace has assigned, by number; for the first run.
    """

    effects: list[Callable[[_Run], None]]
    wraps: dict[int, Callable[[jax.Array], Any]]
    names: Sequence[str] = ()
    replace: Sequence[Callable[[_Run], None]] = ()
    tensors: Mapping[int, torch.Tensor] = field(default_factory=dict)

    def do(
        self,
        arrays: Mapping[int, jax.Array],
        leaves: Sequence[Any],
        delivered: Mapping[int, torch.Tensor],
        moving: Sequence[torch.Tensor],
        is_first: bool = False,
    ) -> Mapping[int, Any]:
        """Assign it.

        Args:
            arrays: What the run has made, by number.
            leaves: The leaves of the call's arguments.
            delivered: Tensors of the host.
            moving: The tensors that were read by name.
            is_first: Whether the trace has assigned it, but for the numbers.

        Returns:
            The tensors that were assigned, by the numbers of what the step makes.
        """
        run = _Run(arrays, leaves, delivered, moving, self.wraps)
        effects = self.effects
        if is_first:
            run.made |= self.tensors
            effects, self.replace, self.tensors = self.replace, (), {}
        for effect in effects:
            effect(run)
        return run.made


@dataclass
class Plan:
    """How to make again what a trace has made.

    Args:
        lasting: The storages that it made and left behind.
        given: The leaves of the arguments, as the step was given them.
        tape: Of the host.
        moving: The places of the tensors that are read by name, by their ids.
        gradients: The ids of the storages of gradients, which are filled anew for each run.
        older: The ids of the objects that there were before the trace.
    """

    lasting: Sequence[Storage]
    given: Sequence[Any]
    tape: HostTape
    moving: Mapping[int, int]
    gradients: Collection[int] = ()
    older: Collection[int] = ()
    wraps: dict[int, Callable[[jax.Array], Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._tensors: dict[int, torch.Tensor] = {}
        self._has_numbers = False
        numbers = ((id(storage), number) for number, storage in enumerate(self.lasting))
        self._numbers = {key: number for key, number in numbers if key not in self.gradients}
        self._parts: dict[int, _Part] = {}
        self._places = {id(leaf): place for place, leaf in enumerate(self.given)}

    def effects(self, found: Sequence[Effect], arguments: Sequence[Any]) -> RunEffects:
        """Return how to do again what a trace has assigned.

        Args:
            found: What it has assigned in Python.
            arguments: The leaves of the arguments as the caller gave them, whose gradients are
                assigned as well.
        """
        parts = [self.part(effect.value) for effect in found]
        planned = [_assigned(effect.do, part) for effect, part in zip(found, parts, strict=True)]
        replace = [_assigned(e.replace, part) for e, part in zip(found, parts, strict=True)]
        for place, (step_leaf, leaf) in enumerate(zip(self.given, arguments, strict=True)):
            if _may_have_grad(step_leaf) and step_leaf.grad is not None:
                leaf.grad = step_leaf.grad
                planned.append(_grad_assigned(place, self.part(step_leaf.grad)))
        names = [effect.name for effect in found]
        if not self._has_numbers:
            return RunEffects(planned, self.wraps, names)
        return RunEffects(planned, self.wraps, names, replace, self._tensors)

    def part(self, value: Any) -> _Part:
        """Return what makes a value again."""
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        kind, node = type(value), node_of(value)
        if node is not None:
            return self._number(value, node)
        if id(value) in self.older:
            return lambda run: value
        if id(value) not in self._parts:
            self._parts[id(value)] = lambda run: self._parts[id(value)](run)  # a cycle
            if not tree_is_leaf(value):
                self._parts[id(value)] = self._container(value)
            elif kind is set:
                elements = [self.part(member) for member in value]
                self._parts[id(value)] = lambda run: {part(run) for part in elements}
            elif _is_plain_object(value):
                self._parts[id(value)] = self._object(value)
            else:
                self._parts[id(value)] = lambda run: value
        return self._parts[id(value)]

    def _container(self, container: Any) -> _Part:
        children, tree = tree_flatten(container, is_leaf=lambda node: node is not container)
        parts = [self.part(child) for child in children]
        key = id(container)  # by which it is known; it would keep the first run's tensors alive

        def build(run: _Run) -> Any:
            if key not in run.objects:
                run.objects[key] = tree_unflatten([part(run) for part in parts], tree)
            return run.objects[key]

        return build

    def _object(self, original: Any) -> _Part:
        key, kind = id(original), cast(Any, type(original))
        own = {name: self.part(attribute) for name, attribute in (dict_of(original) or {}).items()}
        slots = {name: attribute_of(original, name) for name in slots_of(kind)}
        parts = {
            name: self.part(attribute)
            for name, attribute in slots.items()
            if attribute is not ABSENT
        }

        def build(run: _Run) -> Any:
            if key not in run.objects:
                instance = run.objects[key] = kind.__new__(kind)
                for name, part in parts.items():
                    object.__setattr__(instance, name, part(run))
                if own:
                    instance.__dict__.update({name: part(run) for name, part in own.items()})
            return run.objects[key]

        return build

    def _number(self, value: Any, node: ScalarNode) -> _Part:
        self._has_numbers = True
        if node.current is not None:
            return lambda run: number_now(value)
        number = self._numbers.get(id(node.storage))
        if number is None:
            raise CompileError(
                "A compiled step stores a number that only a part of its program knows: what "
                ".item() gave in a layer of scan_layers, say. It is another one each time that "
                "the part runs. Return the tensor from there, and store what it gives."
            )
        self.wraps[number] = lambda array: host_value(array).item()
        return lambda run: run.tensor(number)

    def _tensor(self, tensor: torch.Tensor) -> _Part:
        place, name = self._places.get(id(tensor)), self.moving.get(id(tensor))
        if place is not None:
            return lambda run: run.leaves[place]
        if name is not None:
            return lambda run: run.moving[name]
        payload = inner(tensor)
        if payload is None:
            number = self.tape.deliver(tensor)
            return (lambda run: tensor) if number is None else (lambda run: run.delivered[number])
        storage = payload._storage
        storage_number = self._numbers.get(id(storage))
        if storage_number is None or payload._steps or storage.manual is not None:
            return lambda run: tensor
        self.wraps[storage_number] = rewrapper_of(tensor, payload, storage.sharding)
        self._tensors[storage_number] = tensor
        return lambda run: run.tensor(storage_number)


def _is_plain_object(value: Any) -> bool:
    """Tell whether an object is its attributes, and nothing besides."""
    kind = type(value)
    is_known = isinstance(value, torch.nn.Module | torch.optim.Optimizer)
    is_bag = kind is SimpleNamespace
    return is_bag or (is_watched(kind) and not is_known and kind.__new__ is object.__new__)


def _assigned(do: Callable[[Any], None], part: _Part) -> Callable[[_Run], None]:
    return lambda run: do(part(run))


def _may_have_grad(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.requires_grad and leaf.is_leaf


def _grad_assigned(place: int, part: _Part) -> Callable[[_Run], None]:
    """Return what gives an argument its gradient, as the step's backward pass does."""

    def assign(run: _Run) -> None:
        leaf = run.leaves[place]
        if not leaf.requires_grad:
            leaf.requires_grad_()  # The step itself asked for its gradient.
        leaf.grad = part(run)

    return assign
