"""What a step assigns in Python (``guards``), done after each run with the run's tensors.

While the step is traced Python assigns tensors of the trace, which the first run fills. Each later
run makes tensors of its own and assigns them in the same places, as PyTorch would::

    step: self.loss = loss; self.seen.append(loss)

    call 1    traced: self.loss is t1, seen is [t1]             the run fills t1
    call 2    the run makes t2                                  self.loss is t2, seen is [t1, t2]

Whoever kept an earlier tensor keeps its values. So it is with what holds tensors: objects that the
step makes, and stores or returns, are made again for each run, as ``copy.copy`` makes them where
they are no plain ones. What was there before the trace is itself. Tensors that share memory, a view
and its base or an argument, share it after each run.

A number is no cell that a run could fill, and no view of an argument's base is in the trace. Where
the step leaves such behind, the first run too assigns what it has made, in their place::

    step: self.last = loss.item()

    call 1    traced: self.last is a traced number              the run: self.last is 0.73
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from types import CellType, FunctionType, SimpleNamespace
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
from xla_dtensor.runtimes.jax.compile.gradients import GradientEffects, LeftGradient
from xla_dtensor.runtimes.jax.compile.optimizer import number_now
from xla_dtensor.runtimes.jax.compile.trace_values import Static, inner, maker_of
from xla_dtensor.runtimes.jax.eager.scalar import ScalarNode, node_of
from xla_dtensor.runtimes.jax.eager.selection import Selection
from xla_dtensor.runtimes.jax.eager.tensor import JaxTensor, ViewStep

__all__ = ["Given", "Made", "Plan", "Run", "RunEffects"]


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
class Run:
    """What was made for one run.

    Args:
        given: What the run gives.
        forms: See `RunEffects`.
        storages: Those of what the step makes, by number.
        made: Tensors and objects, by the ids of those of the trace.
    """

    given: Given
    forms: Mapping[int, _Form | None]
    storages: dict[int, Storage] = field(default_factory=dict)
    made: dict[int, Any] = field(default_factory=dict)

    def storage(self, number: int) -> Storage:
        if number not in self.storages:
            form: Any = self.forms[number]
            self.storages[number] = Storage(self.given.arrays[number], *form)
        return self.storages[number]


# The attributes that tensors of this library and Parameters have themselves.
_OWN = frozenset(
    (
        *("_cached", "_host_copy", "_is_param", "_steps", "_storage"),
        *("_memory", "_outer_cuts", "_own_payload", "_payload", "_region", "_uneven", "_varying"),
    )
)


@dataclass(frozen=True)
class Made:
    """A result that is made for each run.

    Args:
        part: Makes it.
        constants: What it holds of numbers and texts.
    """

    part: _Part
    constants: list[Any]


_Part = Callable[[Run], Any]
_Base = Callable[[Run], tuple[Storage, tuple[ViewStep, ...]]]


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
        storages: Theirs, by number.
    """

    effects: list[Callable[[Run], None]]
    forms: dict[int, _Form | None]
    names: Sequence[str] = ()
    replace: Sequence[Callable[[Run], None]] = ()
    tensors: Mapping[int, torch.Tensor] = field(default_factory=dict)
    storages: Mapping[int, Storage] = field(default_factory=dict)

    def do(self, given: Given, is_first: bool = False) -> Run:
        """Assign it.

        Args:
            given: What the run gives.
            is_first: Whether the trace has assigned it, but for the numbers.

        Returns:
            What was made.
        """
        run = Run(given, self.forms)
        effects = self.effects
        if is_first:
            run.made |= self.tensors
            run.storages |= self.storages
            effects, self.replace, self.tensors, self.storages = self.replace, (), {}, {}
        for effect in effects:
            effect(run)
        return run


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
        gradients: Those that the step leaves.
        is_older: Tells whether there was an object before the trace.
        capture: Makes the program depend on an older storage.
    """

    lasting: Sequence[Storage]
    leaves: Sequence[Any]
    given: Sequence[Any]
    tensors: Sequence[JaxTensor | None]
    views: Container[int]
    tape: HostTape
    moving: Sequence[torch.Tensor]
    gradients: GradientEffects
    is_older: Callable[[Any], bool]
    capture: Callable[[Storage], None]

    def __post_init__(self) -> None:
        self._gradients = {id(entry.grad): entry for entry in self.gradients.left}
        payloads = [(inner(entry.grad), entry) for entry in self.gradients.left]
        self._graded = {id(p._storage): entry for p, entry in payloads if p is not None}
        numbers = ((id(storage), number) for number, storage in enumerate(self.lasting))
        self._numbers = {key: number for key, number in numbers if key not in self._graded}
        self._forms: dict[int, _Form | None] = {}
        self._parts: dict[int, _Part] = {}
        self._made: dict[int, torch.Tensor] = {}
        self._constants: list[Any] = []
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
        parts = [
            self._container(effect.value) if effect.is_contents else self.part(effect.value)
            for effect in found
        ]
        planned = [_assigned(effect.do, part) for effect, part in zip(found, parts, strict=True)]
        replace = [_assigned(e.replace, part) for e, part in zip(found, parts, strict=True)]
        for place, (step_leaf, leaf) in enumerate(zip(self.given, self.leaves, strict=True)):
            if _may_have_grad(step_leaf) and step_leaf.grad is not None:
                leaf.grad = step_leaf.grad
                planned.append(_grad_assigned(place, self.part(step_leaf.grad)))
        names = [effect.name for effect in found]
        storages = {number: self.lasting[number] for number in self._forms}
        replace = replace if self._is_replaced else ()
        return RunEffects(planned, self._forms, names, replace, self._made, storages)

    def result(self, static: Any) -> Any:
        """Return a result that is no tensor, or what makes it for each run."""
        value = static.value if isinstance(static, Static) else None
        if not gc.is_tracked(value) or self.is_older(value):
            return static
        self._constants = []
        return Made(self.part(value), self._constants)

    def part(self, value: Any) -> _Part:
        """Return what makes a value again."""
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        kind, node = type(value), node_of(value)
        if node is not None:
            return self._number(value, node)
        if self.is_older(value):
            return lambda run: value
        if id(value) not in self._parts:
            self._parts[id(value)] = lambda run: self._parts[id(value)](run)  # a cycle
            if not tree_is_leaf(value):
                self._parts[id(value)] = self._container(value)
            elif kind in (set, frozenset):
                elements = [self.part(member) for member in value]
                self._parts[id(value)] = _once(value, lambda run: kind(p(run) for p in elements))
            elif _is_plain_object(value):
                self._parts[id(value)] = self._object(value)
            elif kind is FunctionType:
                self._parts[id(value)] = self._function(value)
            elif kind is CellType:
                self._parts[id(value)] = self._cell(value)
            elif gc.is_tracked(value):
                self._parts[id(value)] = self._copied(value)
            else:
                self._constants.append(value)
                self._parts[id(value)] = lambda run: value
        return self._parts[id(value)]

    def _contents(self, value: Any) -> _Part:
        """Return what makes a value, the containers of which are as young as the question."""
        if type(value) is tuple:
            parts = [self._contents(each) for each in value]
            return lambda run: tuple(part(run) for part in parts)
        return self._container(value) if type(value) is dict else self.part(value)

    def _container(self, container: Any) -> _Part:
        children, tree = tree_flatten(container, is_leaf=lambda node: node is not container)
        parts = [self.part(child) for child in children]
        return _once(container, lambda run: tree_unflatten([part(run) for part in parts], tree))

    def _object(self, original: Any) -> _Part:
        key, kind = id(original), cast(Any, type(original))
        own = {name: self.part(attribute) for name, attribute in (dict_of(original) or {}).items()}
        slots = {name: attribute_of(original, name) for name in slots_of(kind)}
        parts = {
            name: self.part(attribute)
            for name, attribute in slots.items()
            if attribute is not ABSENT
        }

        def build(run: Run) -> Any:
            if key not in run.made:
                instance = run.made[key] = kind.__new__(kind)
                for name, part in parts.items():
                    object.__setattr__(instance, name, part(run))
                if own:
                    instance.__dict__.update({name: part(run) for name, part in own.items()})
            return run.made[key]

        return build

    def _function(self, function: FunctionType) -> _Part:
        key, code, names = id(function), function.__code__, function.__globals__
        cells = [self.part(cell) for cell in function.__closure__ or ()]
        attributes = {name: self.part(getattr(function, name)) for name in _OF_FUNCTIONS}
        attributes |= {name: self.part(value) for name, value in vars(function).items()}

        def build(run: Run) -> Any:
            closure = tuple(part(run) for part in cells)
            if key in run.made:  # made for one of them, which it calls itself by
                return run.made[key]
            made = FunctionType(code, names, closure=closure)
            for name, part in attributes.items():
                setattr(made, name, part(run))
            return made

        return _once(function, build)

    def _cell(self, cell: CellType) -> _Part:
        """Return what makes a variable around functions again, which they share."""
        key = id(cell)
        try:
            contents = self.part(cell.cell_contents)
        except ValueError:  # deleted, or not assigned yet
            return _once(cell, lambda run: CellType())

        def build(run: Run) -> Any:
            if key not in run.made:
                run.made[key] = made = CellType()
                made.cell_contents = contents(run)  # which may be a function that is around it
            return run.made[key]

        return build

    def _copied(self, original: Any) -> _Part:
        """Return what makes an object again by the protocol of copy and pickle."""
        try:
            reduced = original.__reduce_ex__(4)
        except Exception:  # it says in its own words that it cannot be copied
            reduced = ""
        if isinstance(reduced, str):
            self._refuse_tensors_of(original)
            return lambda run: original
        self._is_replaced |= type(original) is Selection  # It is a tensor again.
        function, args, state, elements, items = cast(Any, (*reduced, None, None, None)[:5])
        arguments, of_state = self._contents(args), self._contents(state)
        added = [self.part(element) for element in elements or ()]
        assigned = [(self.part(name), self.part(value)) for name, value in items or ()]
        key = id(original)

        def build(run: Run) -> Any:
            if key in run.made:
                return run.made[key]
            made = run.made[key] = function(*arguments(run))
            state = of_state(run)
            if state is not None and hasattr(type(made), "__setstate__"):
                made.__setstate__(state)
            else:
                of_dict, of_slots = state if isinstance(state, tuple) else (state, None)
                if of_dict:
                    vars(made).update(of_dict)
                for name, value in (of_slots or {}).items():
                    setattr(made, name, value)
            for part in added:
                made.append(part(run))
            for name, value in assigned:
                made[name(run)] = value(run)
            return made

        return build

    def _refuse_tensors_of(self, original: Any) -> None:
        """Raise where an object that nobody can copy holds tensors or numbers of the trace."""
        seen, waiting = set[int](), [original]
        while waiting:
            value = waiting.pop()
            payload = inner(value)
            number = None if payload is None else self._numbers.get(id(payload._storage))
            if number is not None or node_of(value) is not None:
                raise CompileError(
                    f"A compiled step stores or returns a {type(original).__name__} that holds "
                    "tensors, and that Python cannot copy. Its Python runs once, and later calls "
                    "would give tensors of their own to it. Store the tensors, or a list, a dict "
                    "or an object of a class of yours."
                )
            if id(value) not in seen and not issubclass(type(value), torch.Tensor):
                seen.add(id(value))
                waiting += [v for v in gc.get_referents(value) if not self.is_older(v)]

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
        entry = self._gradients.get(id(tensor))
        if entry is not None:
            entry.is_stored = True
            return lambda run: entry.grad
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
            self.capture(payload._storage)
            return lambda run: tensor
        make = maker_of(tensor, payload, payload._steps)
        if id(payload._storage) in self._cut or tensor.grad_fn is not None:
            self._is_replaced = True  # A graph of the trace is of no use.
        else:
            self._made[id(tensor)] = tensor
        names = [name for name in vars(tensor) if name not in _OWN]
        attributes = [(name, self.part(getattr(tensor, name))) for name in names]

        def build(run: Run) -> Any:
            made = make(*base(run))
            for name, part in attributes:
                setattr(made, name, part(run))
            return made

        return _once(tensor, build)

    def _base(self, storage: Storage) -> _Base | None:
        """Return what gives the memory that a tensor has in each run; None: the same one."""
        entry = self._graded.get(id(storage))
        if entry is not None:
            entry.is_stored = True
            return _of_gradient(entry)
        number = self._numbers.get(id(storage))
        if number is None:
            return self._bases.get(id(storage))
        self._forms[number] = storage.shape, storage.sharding, storage.manual
        return lambda run: (run.storage(number), ())


def _once(original: Any, build: _Part) -> _Part:
    """Return what makes an object once for each run."""
    key = id(original)  # by which it is known; it would keep the first run's tensors alive

    def part(run: Run) -> Any:
        if key not in run.made:
            run.made[key] = build(run)
        return run.made[key]

    return part


_OF_FUNCTIONS = (
    *("__defaults__", "__kwdefaults__", "__annotations__"),
    *("__doc__", "__module__", "__name__", "__qualname__"),
)


def _of_gradient(entry: LeftGradient) -> _Base:
    def base(run: Run) -> tuple[Storage, tuple[ViewStep, ...]]:
        payload: Any = inner(entry.grad)
        return payload._storage, ()

    return base


def _of_name(place: int) -> _Base:
    def base(run: Run) -> tuple[Storage, tuple[ViewStep, ...]]:
        payload: Any = inner(run.given.moving[place])
        return payload._storage, ()

    return base


def _of_argument(place: int, position: int, is_view: bool) -> _Base:
    def base(run: Run) -> tuple[Storage, tuple[ViewStep, ...]]:
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
    is_known |= kind is Selection
    return is_bag or (is_watched(kind) and not is_known and kind.__new__ is object.__new__)


def _assigned(do: Callable[[Any], None], part: _Part) -> Callable[[Run], None]:
    return lambda run: do(part(run))


def _may_have_grad(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.requires_grad and leaf.is_leaf


def _grad_assigned(place: int, part: _Part) -> Callable[[Run], None]:
    """Return what gives an argument its gradient, as the step's backward pass does."""

    def assign(run: Run) -> None:
        leaf = run.given.leaves[place]
        if not leaf.requires_grad:
            leaf.requires_grad_()  # The step itself asked for its gradient.
        leaf.grad = part(run)

    return assign
