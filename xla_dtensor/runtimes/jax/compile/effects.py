"""What a step assigns in Python (``guards``), done after each run with the run's tensors.

While the step is traced Python assigns tensors of the trace, which the first run fills. Each later
run makes tensors of its own and assigns them in the same places, as PyTorch would::

    step: self.loss = loss; self.seen.append(loss)

    call 1    traced: self.loss is t1, seen is [t1]             the run fills t1
    call 2    the run makes t2                                  self.loss is t2, seen is [t1, t2]

Whoever kept an earlier tensor keeps its values. So it is with what holds tensors: lists, dicts and
objects that the step makes are made again for each run. What was there before the trace is itself.
Tensors that share memory, a view and its base or an argument, share it after each run.

A number is no cell that a run could fill, and no view of an argument's base is in the trace. Where
the step leaves such behind, the first run too assigns what it has made, in their place::

    step: self.last = loss.item()

    call 1    traced: self.last is a traced number              the run: self.last is 0.73
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Mapping, Sequence
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
from xla_dtensor.runtimes.jax.compile.trace_values import inner, maker_of
from xla_dtensor.runtimes.jax.eager.scalar import ScalarNode, node_of
from xla_dtensor.runtimes.jax.eager.tensor import JaxTensor, ViewStep

__all__ = ["Given", "Plan", "RunEffects"]


# What a storage is made of beside its array.
_Form = tuple[tuple[int, ...], Any, Any]


@dataclass
class Given:
    """What one run gives to its effects.

    Args:
        arrays: What the run has made, by number.
        arguments: The storages of the call's tensors.
        leaves: The leaves of its arguments.
        delivered: Tensors of the host.
        moving: The tensors that were read by name.
    """

    arrays: Mapping[int, jax.Array]
    arguments: Sequence[Storage]
    leaves: Sequence[Any]
    delivered: Mapping[int, torch.Tensor]
    moving: Sequence[torch.Tensor]


@dataclass
class _Run:
    given: Given
    forms: Mapping[int, _Form | None]
    storages: dict[int, Storage] = field(default_factory=dict)  # by number
    made: dict[int, Any] = field(default_factory=dict)  # by the ids of tensors and objects of ours

    def storage(self, number: int) -> Storage:
        if number not in self.storages:
            form: Any = self.forms[number]
            self.storages[number] = Storage(self.given.arrays[number], *form)
        return self.storages[number]


_Part = Callable[[_Run], Any]
_Base = Callable[[_Run], tuple[Storage, tuple[ViewStep, ...]]]


@dataclass
class RunEffects:
    """What is assigned after a run.

    Args:
        effects: Assign something each.
        forms: The numbers of what the step makes and these assign, with what a storage is made of
            beside its array; None for a number of Python's.
        names: What messages call what is assigned.
        replace: Assign what the first run gives in the place of what the trace has assigned; none
            where the trace's tensors will do.
        tensors: Those that the trace has assigned, by their ids; for the first run.
    """

    effects: list[Callable[[_Run], None]]
    forms: dict[int, _Form | None]
    names: Sequence[str] = ()
    replace: Sequence[Callable[[_Run], None]] = ()
    tensors: Mapping[int, torch.Tensor] = field(default_factory=dict)

    def do(self, given: Given, is_first: bool = False) -> Mapping[int, Any]:
        """Assign it.

        Args:
            given: What the run gives.
            is_first: Whether the trace has assigned it, but for the numbers.

        Returns:
            What was assigned, by the ids of what the trace has assigned.
        """
        run = _Run(given, self.forms)
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
        leaves: The leaves of the arguments, as the caller gave them.
        given: The same, as the step was given them.
        tensors: The payload of each leaf that is a tensor; None for others.
        views: The places of those that are views of their base, as they are.
        tape: Of the host.
        moving: The tensors that are read by name.
        gradients: The ids of the storages of gradients, which are filled anew for each run.
        older: The ids of the objects that there were before the trace.
    """

    lasting: Sequence[Storage]
    leaves: Sequence[Any]
    given: Sequence[Any]
    tensors: Sequence[JaxTensor | None]
    views: Container[int]
    tape: HostTape
    moving: Sequence[torch.Tensor]
    gradients: Collection[int] = ()
    older: Collection[int] = ()

    def __post_init__(self) -> None:
        numbers = ((id(storage), number) for number, storage in enumerate(self.lasting))
        self._numbers = {key: number for key, number in numbers if key not in self.gradients}
        self._forms: dict[int, _Form | None] = {}
        self._parts: dict[int, _Part] = {}
        self._made: dict[int, torch.Tensor] = {}
        self._is_replaced = False
        self._places = {id(leaf): place for place, leaf in enumerate(self.given)}
        self._names = {id(tensor): place for place, tensor in enumerate(self.moving)}
        self._bases: dict[int, _Base] = {}
        for place, tensor in enumerate(self.moving):
            payload = inner(tensor)
            if payload is not None:
                self._bases[id(payload._storage)] = _of_name(place)
        arguments = [(place, t) for place, t in enumerate(self.tensors) if t is not None]
        self._cut: set[int] = set()  # the ids of storages of arguments, cut out of their bases
        for position, (place, payload) in reversed([*enumerate(arguments)]):
            key, own = id(payload._storage), inner(self.leaves[place])
            self._bases[key] = _of_argument(place, position, place in self.views)
            if own is not None and own._storage is not payload._storage:
                self._cut.add(key)

    def effects(self, found: Sequence[Effect]) -> RunEffects:
        """Return how to do again what a trace has assigned.

        Args:
            found: What it has assigned in Python; the gradients of arguments are assigned as well.
        """
        parts = [self.part(effect.value) for effect in found]
        planned = [_assigned(effect.do, part) for effect, part in zip(found, parts, strict=True)]
        replace = [_assigned(e.replace, part) for e, part in zip(found, parts, strict=True)]
        for place, (step_leaf, leaf) in enumerate(zip(self.given, self.leaves, strict=True)):
            if _may_have_grad(step_leaf) and step_leaf.grad is not None:
                leaf.grad = step_leaf.grad
                planned.append(_grad_assigned(place, self.part(step_leaf.grad)))
        names = [effect.name for effect in found]
        if not self._is_replaced:
            return RunEffects(planned, self._forms, names)
        return RunEffects(planned, self._forms, names, replace, self._made)

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
            if key not in run.made:
                run.made[key] = tree_unflatten([part(run) for part in parts], tree)
            return run.made[key]

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
            if key not in run.made:
                instance = run.made[key] = kind.__new__(kind)
                for name, part in parts.items():
                    object.__setattr__(instance, name, part(run))
                if own:
                    instance.__dict__.update({name: part(run) for name, part in own.items()})
            return run.made[key]

        return build

    def _number(self, value: Any, node: ScalarNode) -> _Part:
        self._is_replaced = True
        if node.current is not None:
            return lambda run: number_now(value)
        number = self._numbers.get(id(node.storage))
        if number is None:
            raise CompileError(
                "A compiled step stores a number that only a part of its program knows: what "
                ".item() gave in a layer of scan_layers, say. It is another one each time that "
                "the part runs. Return the tensor from there, and store what it gives."
            )
        self._forms[number] = None
        return lambda run: host_value(run.given.arrays[number]).item()

    def _tensor(self, tensor: torch.Tensor) -> _Part:
        place, name = self._places.get(id(tensor)), self._names.get(id(tensor))
        if place is not None:
            return lambda run: run.given.leaves[place]
        if name is not None:
            return lambda run: run.given.moving[name]
        payload = inner(tensor)
        if payload is None:
            number = self.tape.deliver(tensor)
            if number is None:
                return lambda run: tensor
            return lambda run: run.given.delivered[number]
        base = self._base(payload._storage)
        if base is None:
            return lambda run: tensor
        key, make = id(tensor), maker_of(tensor, payload, payload._steps)
        if id(payload._storage) in self._cut:
            self._is_replaced = True
        else:
            self._made[key] = tensor

        def build(run: _Run) -> Any:
            if key not in run.made:
                run.made[key] = make(*base(run))
            return run.made[key]

        return build

    def _base(self, storage: Storage) -> _Base | None:
        """Return what gives the memory that a tensor has in each run; None: the same one."""
        number = self._numbers.get(id(storage))
        if number is None:
            return self._bases.get(id(storage))
        self._forms[number] = storage.shape, storage.sharding, storage.manual
        return lambda run: (run.storage(number), ())


def _of_name(place: int) -> _Base:
    def base(run: _Run) -> tuple[Storage, tuple[ViewStep, ...]]:
        payload: Any = inner(run.given.moving[place])
        return payload._storage, ()

    return base


def _of_argument(place: int, position: int, is_view: bool) -> _Base:
    def base(run: _Run) -> tuple[Storage, tuple[ViewStep, ...]]:
        payload = inner(run.given.leaves[place])
        if payload is None:  # of a plain tensor, which was put on the devices
            return run.given.arguments[position], ()
        return payload._storage, () if is_view else payload._steps

    return base


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
        leaf = run.given.leaves[place]
        if not leaf.requires_grad:
            leaf.requires_grad_()  # The step itself asked for its gradient.
        leaf.grad = part(run)

    return assign
