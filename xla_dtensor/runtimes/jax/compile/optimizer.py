"""Make what an optimizer changes between steps an input of the compiled program.

Two things in a ``torch.optim`` optimizer are not tensors on the device, yet change: numbers in
``param_groups`` (the learning rate, which a scheduler writes) and counters such as AdamW's ``step``
(a plain CPU scalar). Baked into a program both are silently wrong from the second step on. While a
step is traced, torch's own optimizer hooks call :class:`OptimizerInputs`, which puts counters on
the device for good and lends the optimizer traced numbers in place of its own.

The learning rate is lent from the start. All other numbers are baked, until one was seen to change
(``OneCycleLR`` moves the momentum on every step, an optimizer counts its steps in
``group["step"] += 1``): the step is traced once more, and from then on that number is lent too. An
optimizer may branch on a lent number, ``if weight_decay != 0``; see
:class:`~xla_dtensor.runtimes.jax.eager.scalar.ScalarNode`. What the step's own code reads outside
of ``optimizer.step()`` is not lent to it: it is baked, the learning rate too.

What an optimizer's ``step()`` writes is done after each run (:class:`_Table`).

Of its forms an optimizer is lent the one that suits the trace: lists (``foreach``) where nobody has
chosen, which is one call of an op for all parameters, and counters on the host or on the devices
(``capturable``), wherever they are.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import torch
import torch.optim.optimizer as torch_optimizer
from torch.utils._python_dispatch import _disable_current_modes

from xla_dtensor.core.errors import CompileError
from xla_dtensor.runtimes import scalars
from xla_dtensor.runtimes.guards.values import ABSENT, Moving
from xla_dtensor.runtimes.host_work.mode import HostOps
from xla_dtensor.runtimes.host_work.tape import HostTape
from xla_dtensor.runtimes.jax.arrays import trace as jax_trace
from xla_dtensor.runtimes.jax.arrays.storage import Storage
from xla_dtensor.runtimes.jax.arrays.values import numpy_from_torch
from xla_dtensor.runtimes.jax.compile.trace_values import Same, inner
from xla_dtensor.runtimes.jax.eager.scalar import ScalarNode, sym_number, sym_of_node
from xla_dtensor.runtimes.jax.eager.tensor import JaxTensor
from xla_dtensor.runtimes.jax.lower.index import filling_on_host

__all__ = [
    "RATE",
    "NumbersMeetTensors",
    "OptimizerInputs",
    "input_of",
    "knows_number",
    "lent",
    "lent_tensor",
    "lifted",
    "number_now",
]


# ------------------------------------------------------------------------------------------ Lending
#
# Python's numbers, and an optimizer's CPU tensors, as inputs of a step's program.


def lifted(tensor: torch.Tensor) -> JaxTensor:
    """Return a plain CPU tensor as one of the runtime's, which counts as older than the trace."""
    with jax.ensure_compile_time_eval():
        array = jnp.array(numpy_from_torch(tensor))
    return _outside_trace(array)


def lent(
    numbers: list[tuple[Storage, Callable[[], float]]],
    number: float,
    current: Callable[[], float],
) -> Any:
    """Return a number that stands for an input of the program, which each call reads anew.

    Args:
        numbers: The inputs of this kind; this one is added, with where to read it.
        number: What it is now.
        current: Returns what it is at the time.
    """
    return sym_number(input_of(numbers, number, current).value(), current)


def input_of(
    numbers: list[tuple[Storage, Callable[[], float]]],
    number: float,
    current: Callable[[], float],
) -> JaxTensor:
    """Return the tensor of one number that is an input of the program; see `lent`."""
    with jax.ensure_compile_time_eval():
        array = jnp.asarray(number, jnp.int64 if isinstance(number, int) else jnp.float64)
    tensor = _outside_trace(array)
    numbers.append((tensor._storage, current))
    return tensor


def lent_tensor(
    numbers: list[tuple[Storage, Callable[[], float]]],
    tensor: torch.Tensor,
    current: Callable[[], float],
) -> JaxTensor:
    """Return a tensor of one number that stands for an input of the program, as `lent` does.

    Args:
        numbers: As in `lent`.
        tensor: What it is now, on the host.
        current: Returns the number that it is at the time.
    """
    payload = lifted(tensor)
    numbers.append((payload._storage, current))
    return payload


def _outside_trace(array: jax.Array) -> JaxTensor:
    trace, jax_trace._active = jax_trace._active, None
    try:
        return JaxTensor(Storage(array))
    finally:
        jax_trace._active = trace


# --------------------------------------------------------------------------------- Optimizer inputs

Gather = Callable[[Sequence[torch.Tensor], Sequence[Mapping[str, Any]]], None]

RATE = "lr"
_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_DEVICES = "_get_capturable_supported_devices"
# Whose default form branches on the number of steps done, or indexes with a mask, which for a
# parameter of one number is a branch; the capturable one computes both ways.
_BRANCH_ON_VALUES = (torch.optim.RAdam, torch.optim.ASGD, torch.optim.Rprop)
# Whose capturable form computes a small difference of its counters, which default forms do in
# Python's numbers.
_COUNT_EXACTLY = (torch.optim.RAdam,)
# Which make a tensor of the rate at their first step, on the host, beside their counters.
_KEEP_THE_RATE = (torch.optim.ASGD,)


class OptimizerInputs:
    """The optimizers that a step calls, and the numbers lent to them.

    Args:
        lift_tensor: Turns a plain CPU tensor of optimizer state into a payload.
        lend_number: Turns a float into a traced number, which the program reads anew per call.
        lend_tensor: The same, of a number in a plain CPU tensor, into a payload.
        lent_names: The settings that are lent, as their optimizers' param_groups call them.
        before: Param groups and states of optimizers, with what they held before the trace.
        gather: Is given parameters and the state of each: what is the same thing in several layers
            it lays together, for one op to treat all of it.
    """

    def __init__(
        self,
        lift_tensor: Callable[[torch.Tensor], torch.Tensor],
        lend_number: Callable[[float, Callable[[], float]], Any],
        lend_tensor: Callable[[torch.Tensor, Callable[[], float]], torch.Tensor],
        lent_names: Collection[str] = (RATE,),
        gather: Gather = lambda parameters, states: None,
        before: Sequence[tuple[dict[Any, Any], dict[Any, Any]]] = (),
    ) -> None:
        self._lift_tensor = lift_tensor
        self._lend_number = lend_number
        self._lend_tensor = lend_tensor
        self._gather = gather
        self._lent_names = frozenset(lent_names)
        self._before_trace = {id(table): entries for table, entries in before}
        self._running: list[_Running] = []
        self._read_outside: set[int] = set()
        self._tables: list[_Table] = []
        self._is_settled = False
        self._seen: dict[tuple[int, str], tuple[dict[str, Any], Any]] = {}
        self._numbers: dict[tuple[int, str], Any] = {}
        self._owned: dict[int, list[list[int]]] = {}
        self._hooks: dict[int, tuple[Any, ...]] = {}
        self._state: list[tuple[torch.optim.Optimizer, Any, Any, list[Any]]] = []
        self._moving: list[tuple[dict[Any, Any], Any, Moving]] = []
        self._replaced: list[tuple[dict[Any, Any], Any, torch.Tensor]] = []
        self._data: list[tuple[Any, Any, Callable[[Any], bool]]] = []
        self.optimizers: dict[int, torch.optim.Optimizer] = {}
        self._lifted: list[tuple[torch.Tensor, torch.Tensor]] = []

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Watch every optimizer step; give all numbers back at the end, whatever happens."""
        handles = [
            torch_optimizer.register_optimizer_step_pre_hook(self._before),
            torch_optimizer.register_optimizer_step_post_hook(self._after),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            while self._running:
                self._give_back(self._running.pop())

    def read(self, optimizer: torch.optim.Optimizer) -> None:
        """Note that the user's code reads an optimizer's settings or state."""
        if not any(entry.optimizer is optimizer for entry in self._running):
            self.optimizers[id(optimizer)] = optimizer
            self._read_outside.add(id(optimizer))

    def replaced(self) -> Iterator[tuple[dict[Any, Any], Any, torch.Tensor, torch.Tensor]]:
        """Yield the tensors of state that the step has replaced by others; before `settle`.

        ``state["m"] = 0.9 * state["m"] + grad``, say. Each with its table, its name, and the other.
        """
        self._replaced.clear()
        for optimizer in self.optimizers.values():
            for _, of in _states_of(optimizer):
                before = self._before_trace.get(id(of), {})
                for name, new in of.items():
                    old, kind = before.get(name), torch.Tensor
                    is_new = old is not new and isinstance(old, kind) and isinstance(new, kind)
                    if is_new and inner(old) is not None and inner(new) is not None:
                        self._replaced.append((of, name, cast(Any, old)))
        yield from ((of, name, old, of[name]) for of, name, old in self._replaced)

    def let_move(self, moving: Mapping[int, Moving], is_read: Callable[[Any], bool]) -> None:
        """Take what the step replaces for read by name, where it is so, or for not read at all.

        Args:
            moving: What is read by name, by the ids of what the trace has left there.
            is_read: Tells whether the program reads a tensor.
        """
        for of, name, old in self._replaced:
            by_name = moving.get(id(of[name]))
            if by_name is not None:
                self._moving.append((of, name, by_name))
            elif not is_read(old):
                self._moving.append((of, name, Moving(of[name], _is_tensor)))
        self._replaced = []
        moved = {(id(of), name) for of, name, _ in self._moving}
        for _, _, of, tensors in self._state:
            tensors[:] = [(name, t) for name, t in tensors if (id(of), name) not in moved]

    def settle(self) -> None:
        """Remember every baked setting and all state; call it when the trace is done."""
        self._tables = [table for o in self.optimizers.values() for table in self._tables_of(o)]
        self._is_settled = True
        for table in self._tables:
            table.put_back()
        self._before_trace = {}  # It holds what other optimizers had.
        self._state = [
            (optimizer, parameter, of, [(n, t) for n, t in of.items() if not _is_plain(t)])
            for optimizer in self.optimizers.values()
            for parameter, of in _states_of(optimizer)
        ]
        self._owned, self._hooks = self._parameters_owned(), self._all_hooks()

    def changed(self, *, may_be_lent: bool = False) -> list[str]:
        """Return the names of baked settings that are no longer what they were.

        Args:
            may_be_lent: Leave out those of optimizers whose settings the step itself reads.
        """
        tables = (t for t in self._tables if not (may_be_lent and t.is_read_outside))
        return list(dict.fromkeys(name for table in tables for name in table.changed()))

    def after_run(self) -> Callable[[], None]:
        """Return what writes to settings and state as the step does; ask before the run."""
        writes = [write for table in self._tables for write in table.writes()]

        def assign() -> None:
            for table, name, value in writes:
                if value is ABSENT:
                    table.pop(name, None)
                else:
                    table[name] = value

        return assign

    def state_replaced(self) -> bool:
        """Tell whether an optimizer's state is other tensors now, as after ``load_state_dict``."""
        return any(
            optimizer.state.get(parameter) is not of
            or any(of.get(name) is not tensor for name, tensor in tensors)
            for optimizer, parameter, of, tensors in self._state
        ) or any(not moving.takes(of.get(name)) for of, name, moving in self._moving)

    def let_data_move(self, fits: Mapping[int, Callable[[Any], bool]]) -> None:
        """Take other data of tensors for the same, of which the program reads the values.

        Args:
            fits: What tells whether a tensor's data may be others, by the id of the tensor.
        """
        kept = (t for _, _, _, tensors in self._state for _, t in tensors)
        self._data = [
            (t, _data_of(t), fits.get(id(t), _fits_none)) for t in (*self.parameters(), *kept)
        ]

    def data_replaced(self) -> list[torch.Tensor]:
        """Return the parameters and the tensors of state that were given other data."""
        return [
            tensor
            for tensor, data, fits in self._data
            if _data_of(tensor) is not data and not fits(tensor)
        ]

    def parameters_changed(self) -> bool:
        """Tell whether an optimizer has been given other parameters."""
        return self._parameters_owned() != self._owned

    def hooks_changed(self) -> bool:
        """Tell whether a hook was added to an optimizer or taken away."""
        return self._all_hooks() != self._hooks

    def parameters(self) -> list[torch.Tensor]:
        """Return the parameters of all optimizers seen."""
        return [
            p for o in self.optimizers.values() for group in o.param_groups for p in group["params"]
        ]

    def moments(self) -> list[torch.Tensor]:
        """Return the tensors of all optimizers' state."""
        states = (of for o in self.optimizers.values() for _, of in _states_of(o))
        return [v for of in states for v in of.values() if isinstance(v, torch.Tensor)]

    def lifted(self) -> dict[int, torch.Tensor]:
        """Return what state was put on the device, by the ids of the host's tensors."""
        return {id(old): new for old, new in self._lifted}

    def check_settings_unchanged(self) -> None:
        """Raise when the traced step itself changed a lent number (a scheduler in the step)."""
        for (_, name), (group, value) in self._seen.items():
            if group.get(name) != value:
                what = "The learning rate" if name == RATE else f"The setting {name!r}"
                raise CompileError(
                    f"{what} changed from {value} to {group.get(name)} inside a "
                    "compiled step. Python runs only while the step is traced, so a scheduler in "
                    "it would act once and then never again. Call scheduler.step() after the "
                    "compiled step; the number is read anew on every call."
                )

    def _tables_of(self, optimizer: torch.optim.Optimizer) -> Iterator[_Table]:
        is_read = id(optimizer) in self._read_outside
        if any(not isinstance(key, torch.Tensor) for key in optimizer.state):
            yield self._table(lambda: optimizer.state, {}, is_read)
        for position, group in enumerate(optimizer.param_groups):
            yield from self._with_inner(_at(optimizer, position), dict(group), is_read)
        for parameter, of in _states_of(optimizer):
            before = self._before_trace.get(id(of), {})
            if any(map(_is_plain, (*of.values(), *before.values()))):
                yield from self._with_inner(_of_parameter(optimizer, parameter), {}, is_read)

    def _with_inner(
        self,
        find: Callable[[], Any],
        new: dict[Any, Any],
        is_read: bool,
        outer: frozenset[int] = frozenset(),
    ) -> Iterator[_Table]:
        """Yield what is known of a table, and of the dicts in it."""
        yield self._table(find, new, is_read)
        outer |= {id(find())}
        for name, value in find().items():
            if isinstance(value, dict) and id(value) not in outer:
                yield from self._with_inner(_under(find, name), {}, is_read, outer)

    def _table(self, find: Callable[[], Any], new: dict[Any, Any], is_read: bool) -> _Table:
        """Return what is known of a table, which held `new` if the trace has made it."""
        table = find()
        before = self._before_trace.get(id(table))
        entries = new if before is None else before
        lent = {n: type(v) for n, v in entries.items() if (id(table), n) in self._numbers}
        return _Table(find, table, entries, {} if is_read else lent, before is not None, is_read)

    def _parameters_owned(self) -> dict[int, list[list[int]]]:
        groups = ((key, o.param_groups) for key, o in self.optimizers.items())
        return {
            key: [[id(p) for p in group["params"]] for group in param_groups]
            for key, param_groups in groups
        }

    def _all_hooks(self) -> dict[int, tuple[Any, ...]]:
        return {
            key: tuple(tuple(getattr(optimizer, name, ())) for name in _HOOKS)
            for key, optimizer in self.optimizers.items()
        }

    def _before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        is_nested = any(entry.optimizer is optimizer for entry in self._running)
        self._running.append(_Running(optimizer))
        if is_nested:  # A step() that calls its class's.
            return
        self.optimizers[id(optimizer)] = optimizer
        _make_state(optimizer)
        self._stand_in(inspect.unwrap(type(optimizer).step).__globals__)
        for _, state in _states_of(optimizer):
            for name, value in state.items():
                if type(value) is torch.Tensor:
                    state[name] = self._lift_tensor(value)
                    self._lifted.append((value, state[name]))
            for name in (self._lent_names & state.keys()) - {RATE}:
                if self._may_lend(state, name):
                    self._lend(state, name, self._number(state, name))
        for group in optimizer.param_groups:
            for name, value in list(group.items()):
                if type(value) is torch.Tensor and value.numel() == 1:  # Schedulers fill it.
                    self._lend(group, name, self._tensor(group, name))
            for name in sorted(self._lent_names & group.keys()):
                is_kept = name == RATE and _keeps_rate(optimizer, group)
                if self._may_lend(group, name) and not is_kept:
                    self._seen.setdefault((id(group), name), (group, group[name]))
                    self._lend(group, name, self._number(group, name))
            self._choose_form(optimizer, group)
        if isinstance(optimizer, _COUNT_EXACTLY):
            self._widen_counters(optimizer)

    def _widen_counters(self, optimizer: torch.optim.Optimizer) -> None:
        """Lend an optimizer counters of Python's precision; `_after` gives theirs their values."""
        for _, state in _states_of(optimizer):
            counter = state.get("step")
            if isinstance(counter, torch.Tensor):
                self._lend(state, "step", counter.double())
                self._running[-1].counters.append((counter, state["step"]))

    def _choose_form(self, optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> None:
        states = [optimizer.state.get(p, {}) for p in group["params"]]
        if group.get("fused"):  # XLA fuses what the other forms do
            self._lend(group, "fused", False)
        if not any(states):
            # It makes its counters on the host now, where they are Python's numbers. The form for
            # counters on a device would write the lent rate to them.
            if group.get("capturable"):
                self._lend(group, "capturable", False)
        elif isinstance(optimizer, _BRANCH_ON_VALUES):
            self._lend(group, "capturable", True)
        if group.get("capturable") and group.get("foreach") and not all(states):
            self._lend(group, "foreach", False)  # for the same reason, for some of them
            return
        self._gather(group["params"], states)
        # What another library's does with `foreach` is its own.
        if _is_torchs(inspect.unwrap(type(optimizer).step)) and _may_take_lists(group, states):
            self._lend(group, "foreach", True)

    def _may_lend(self, table: dict[str, Any], name: str) -> bool:
        """Tell whether a setting is a number that the step has not written itself."""
        before = self._before_trace.get(id(table), table)
        return _is_lendable(table[name]) and before.get(name) is table[name]

    def _lend(self, group: dict[str, Any], name: str, value: Any) -> None:
        self._running[-1].lent.append((group, name, group[name], value))
        group[name] = value

    def _stand_in(self, names: dict[str, Any]) -> None:
        """Let an optimizer's module find functions that take traced numbers and our device.

        Adafactor takes ``min(lr, ...)``: Python's own asks which is less, and bakes the answer in.
        ``math.sqrt`` would bake in the number itself.
        Capturable optimizers ask whether the device's counters may stay there.
        """
        supported = names.get(_DEVICES)

        def with_ours(*args: Any, **options: Any) -> list[str]:
            return [*supported(*args, **options), "cpu"]  # pyright: ignore[reportOptionalCall]

        devices = {} if supported is None else {_DEVICES: with_ours}
        maths = {n: _MATHS[id(v)] for n, v in names.items() if id(v) in _MATHS}
        for name, function in {"min": _least, "max": _most, **devices, **maths}.items():
            self._running[-1].replaced.append((names, name, names.get(name)))
            names[name] = function

    def _tensor(self, group: dict[str, Any], name: str) -> torch.Tensor:
        """Return what stands for a number that is a tensor on the host, whichever is there."""
        key = (id(group), name)
        if key not in self._numbers:
            tensor = group[name]

            def current() -> float:
                setting = group[name]
                return float(tensor if setting is self._numbers.get(key) else setting)

            self._numbers[key] = self._lend_tensor(tensor, current)
        return self._numbers[key]

    def _number(self, group: dict[str, Any], name: str) -> Any:
        key = (id(group), name)
        if key not in self._numbers:
            value = group[name]

            def current() -> Any:  # While the step is traced, the number there is a traced one.
                return group[name] if self._is_settled else value

            if isinstance(value, tuple):
                self._numbers[key] = tuple(
                    self._lend_number(number, lambda i=i: float(current()[i]))
                    for i, number in enumerate(value)
                )
            else:
                kind = type(value)
                self._numbers[key] = self._lend_number(value, lambda: kind(current()))
        return self._numbers[key]

    def _after(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        while self._running:
            entry = self._running.pop()
            for counter, wide in entry.counters:
                counter.copy_(wide)
            self._give_back(entry)
            if entry.optimizer is optimizer:
                return

    def _give_back(self, entry: _Running) -> None:
        for group, name, value, number in entry.lent:
            if group.get(name) is number:
                group[name] = value
            else:  # The optimizer's own step writes to it.
                self._seen.pop((id(group), name), None)
        for names, name, original in reversed(entry.replaced):
            if original is None:
                del names[name]
            else:
                names[name] = original


@dataclass
class _Running:
    """A call of an optimizer's step, with what it was lent: where, by which name, for what.

    `counters` are its own, each with the wider one that counts in its place meanwhile.
    """

    optimizer: torch.optim.Optimizer
    lent: list[tuple[dict[str, Any], str, Any, Any]] = field(default_factory=list)
    replaced: list[tuple[dict[str, Any], str, Any]] = field(default_factory=list)
    counters: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)


# -------------------------------------------------------------------------- Plain values of a table


class _Table:
    """The plain values of a param group, or of a parameter's state: the baked, and the written.

    ::

        before the trace    {"lr": 0.1, "step": 3, "eps": 1e-8}     lr and step are lent
        after it            {"lr": 0.1, "step": traced number ...}  step = 3 + 1
        baked               eps
        written             step, after each run: what it was before the run, and 1

    Args:
        find: Returns the table that is there at the time; None for none.
        table: The one that the trace saw.
        before: What it held before.
        lent: The names of the values that were lent, with their types.
        is_old: Whether it was there before the trace.
        is_read_outside: Whether the step reads it outside of the optimizer's own.

    Invariant: a table that was there holds after the trace what it did before, until the run.
    """

    def __init__(
        self,
        find: Callable[[], Any],
        table: dict[Any, Any],
        before: Mapping[Any, Any],
        lent: Mapping[str, type],
        is_old: bool,
        is_read_outside: bool,
    ) -> None:
        self.is_read_outside, self._is_old = is_read_outside, is_old
        self._find, self._table, self._lent = find, table, lent
        self._before = {name: value for name, value in before.items() if _is_plain(value)}
        self._baked = self._described(before)
        self._written = {
            name: table.get(name, ABSENT)
            for name in {**before, **table}
            if name != "params" and _is_written(before.get(name, ABSENT), table.get(name, ABSENT))
        }
        for name, value in self._written.items():
            if _is_traced_number(value) and not knows_number(value):
                raise CompileError(
                    f"An optimizer stores a number under {name!r} that only the compiled program "
                    "knows, such as what .item() returns. Python runs only while the step is "
                    "traced, and would keep the number of that time. Store the tensor instead."
                )

    def put_back(self) -> None:
        """Let the table hold what it did before the trace; a new one keeps what is written."""
        if not self._is_old:
            self._table.update({name: number_now(v) for name, v in self._written.items()})
            self._written = {}
        for name in self._written:
            if name in self._before:
                self._table[name] = self._before[name]
            else:
                self._table.pop(name, None)

    def writes(self) -> list[tuple[dict[Any, Any], str, Any]]:
        """Return what a run that begins now writes: where, under which name, and the value."""
        return [(self._table, name, number_now(v)) for name, v in self._written.items()]

    def changed(self) -> Iterator[str]:
        """Yield the names of baked values that are not there any more, or are others."""
        table = self._find()
        if table is not self._table:
            yield "state" if table is None else "settings"
        elif isinstance(table, dict):
            yield from (name for name in self._lent if name not in table)
            described = self._described(table)
            if described != self._baked:
                for name in {**self._baked, **described}:
                    if described.get(name, ABSENT) != self._baked.get(name, ABSENT):
                        yield name

    def _described(self, table: Mapping[Any, Any]) -> dict[str, Any]:
        return {
            name: _description(value)
            for name, value in table.items()
            if not isinstance(value, torch.Tensor)
            and name != "params"
            and not isinstance(name, torch.Tensor)
            and not (name in self._lent and type(value) is self._lent[name])
        }


def _description(value: Any) -> Any:
    """Return something that is equal for values that a step cannot tell apart."""
    kind = type(value)
    if isinstance(value, tuple | list):
        return kind, *map(_description, value)
    is_number = isinstance(value, int | float | complex)
    return (kind, repr(value)) if is_number else value if kind is str else Same(value)


def _is_written(old: Any, new: Any) -> bool:
    if old is new or isinstance(old, torch.Tensor) or isinstance(new, torch.Tensor):
        return False
    return _is_traced_number(new) or _description(old) != _description(new)


def _is_traced_number(value: Any) -> bool:
    return isinstance(value, torch.SymFloat | torch.SymInt) and isinstance(value.node, ScalarNode)


def knows_number(value: Any) -> bool:
    """Tell whether a traced number is one that Python can compute for each run."""
    return _is_traced_number(value) and value.node.current is not None


def number_now(value: Any) -> Any:
    """Return a written value, as Python would compute it now."""
    return np.asarray(value.node.current()).item() if _is_traced_number(value) else value


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _states_of(optimizer: torch.optim.Optimizer) -> list[tuple[Any, dict[Any, Any]]]:
    """Return what an optimizer keeps for its parameters; it may keep other things beside."""
    return [(key, of) for key, of in optimizer.state.items() if isinstance(of, dict)]


def _at(optimizer: torch.optim.Optimizer, position: int) -> Callable[[], Any]:
    def find() -> Any:
        groups = optimizer.param_groups
        return groups[position] if position < len(groups) else None

    return find


def _under(find: Callable[[], Any], name: Any) -> Callable[[], Any]:
    def inner() -> Any:
        outer = find()
        return outer.get(name) if isinstance(outer, dict) else None

    return inner


def _of_parameter(optimizer: torch.optim.Optimizer, parameter: Any) -> Callable[[], Any]:
    return lambda: optimizer.state.get(parameter)


def _data_of(tensor: Any) -> Any:
    return getattr(tensor, "_local_tensor", None)


def _fits_none(tensor: Any) -> bool:
    return False


def _make_state(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer make what state it makes of constants, as if it were older than the trace.

    torch's optimizers do that in a function of its own, before they compute. What comes of the
    gradients is made by the step. SGD's momentum begins with the first gradient, which without
    dampening is what comes of zeros: 0.9 * 0 + g.
    """
    make: Any = getattr(optimizer, "_init_group", None)
    for group in optimizer.param_groups if _is_torchs(make) else ():
        graded = [p for p in group["params"] if p.grad is not None and not optimizer.state.get(p)]
        if not graded or any(map(_is_traced_value, graded)) or _has_twice(group):
            continue
        lists = [[] for _ in inspect.signature(make).parameters][1:]
        with _stand_ins(graded), _before_trace(), torch.no_grad():
            make({**group, "fused": False, "capturable": False}, *lists)
            is_plain_sgd = isinstance(optimizer, torch.optim.SGD) and not group["dampening"]
            for parameter in graded if is_plain_sgd and group["momentum"] else ():
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def _is_torchs(function: Any) -> bool:
    return str(getattr(function, "__module__", "")).startswith("torch.optim.")


def _is_traced_value(parameter: torch.Tensor) -> bool:
    payload = getattr(parameter, "_local_tensor", parameter)
    return isinstance(payload, JaxTensor) and jax_trace.is_tracer(payload._storage._array)


@contextlib.contextmanager
def _stand_ins(parameters: Sequence[torch.Tensor]) -> Iterator[None]:
    """Let parameters have themselves for gradients, which are like them."""
    grads = [parameter.grad for parameter in parameters]
    try:
        for parameter in parameters:
            parameter.grad = parameter.detach()
        yield
    finally:
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.grad = grad


@contextlib.contextmanager
def _before_trace() -> Iterator[None]:
    """Compute as if no step were traced."""
    trace, jax_trace._active = jax_trace._active, None
    try:
        with jax.ensure_compile_time_eval(), _disable_current_modes(), filling_on_host():
            yield
    finally:
        jax_trace._active = trace


def _may_take_lists(group: Mapping[str, Any], states: Sequence[Mapping[str, Any]]) -> bool:
    """Tell whether torch is free to choose the form of an optimizer that takes lists."""
    chosen = group.get("foreach", False) is not None or group.get("fused")
    tensors = any(isinstance(v, torch.Tensor) for v in group.values())
    first_on_device = group.get("capturable") and not all(states)
    form_matters = group.get("differentiable") or tensors or first_on_device or _has_twice(group)
    return not (chosen or form_matters)


def _has_twice(group: Mapping[str, Any]) -> bool:
    """Tell whether a parameter is there twice: its second update begins where the first ended."""
    return len({*map(id, group["params"])}) < len(group["params"])


def _keeps_rate(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> bool:
    """Tell whether an optimizer is about to make state of its rate: this trace is of that one."""
    states = [optimizer.state.get(p) for p in group["params"]]
    return isinstance(optimizer, _KEEP_THE_RATE) and not all(states)


def _is_lendable(value: Any) -> bool:
    """Tell whether a setting is a number or a tuple of floats. A bool is a choice."""
    if isinstance(value, tuple):
        return bool(value) and all(isinstance(number, float) for number in value)
    return isinstance(value, float | int) and not isinstance(value, bool)


def _least(*values: Any, **options: Any) -> Any:
    return (
        functools.reduce(torch.sym_min, values) if _is_traced(values) else min(*values, **options)
    )


def _most(*values: Any, **options: Any) -> Any:
    return (
        functools.reduce(torch.sym_max, values) if _is_traced(values) else max(*values, **options)
    )


def _is_traced(values: tuple[Any, ...]) -> bool:
    return len(values) > 1 and any(isinstance(v, torch.SymFloat | torch.SymInt) for v in values)


def _of_numbers(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of Python's ``math`` that takes traced numbers too."""

    def taking_traced(*numbers: Any) -> Any:
        if _is_traced_number(numbers[0]):
            return sym_of_node(getattr(numbers[0].node, f"sym_{name}")())
        return function(*numbers)

    return taking_traced


_MATHS: dict[int, Any] = {
    id(function): _of_numbers(name, function)
    for name, function in (("sqrt", math.sqrt), ("exp", math.exp), ("log", math.log))
}
_MATHS[id(math)] = SimpleNamespace(
    **{**vars(math), **{name: _MATHS[id(getattr(math, name))] for name in ("sqrt", "exp", "log")}}
)


def _is_plain(value: Any) -> bool:
    return not isinstance(value, torch.Tensor)


# ---------------------------------------------------------------- Traced numbers beside CPU tensors
#
# Where Python writes ``number * tensor``, torch makes a tensor of the number. Of a number that
# exists only in the program (a SymFloat) it makes a NaN, whatever follows is NaN, and nobody hears
# of it. While a step is traced, :class:`NumbersMeetTensors` computes such ops in the program::
#
#     step = torch.ones(())        # a counter that a capturable optimizer has just made
#     lr / (1 - beta**step)        # lr is a traced number: the quotient is the program's


class NumbersMeetTensors(HostOps):
    """Send ops of ordinary tensors and traced numbers to the program; others are the host's."""

    def on_host(self, tape: HostTape, func: Any, args: Any, kwargs: Any) -> Any:
        if scalars.in_use:
            args, kwargs = scalars.settled(func, args, kwargs)
        if not any(map(_is_of_program, (*args, *kwargs.values()))):
            return tape.call(func, args, kwargs)
        from xla_dtensor.runtimes.jax.eager.ops import run_op

        if func._schema.is_mutable:
            raise CompileError(
                f"The op {func} writes a number that exists only in the program to an ordinary CPU "
                "tensor, while a step is traced. The tensor would keep the value of this one "
                "trace. Make it with distribute_tensor, or write the op without '_' at the end."
            )
        return run_op(func, args, kwargs)


def _is_of_program(argument: Any) -> bool:
    return _is_traced_number(argument) and not scalars.stands_for(argument)
