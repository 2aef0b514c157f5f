"""Make what an optimizer changes between steps an input of the compiled program.

Two things in a ``torch.optim`` optimizer are not tensors on the device, yet change: numbers in
``param_groups`` (the learning rate, which a scheduler writes) and counters such as AdamW's ``step``
(a plain CPU scalar). Baked into a program both are silently wrong from the second step on. While a
step is traced, torch's own optimizer hooks call :class:`OptimizerInputs`, which puts counters on
the device for good and lends the optimizer traced numbers in place of its own.

The learning rate is lent from the start. All other numbers are baked, until one was seen to change
(``OneCycleLR`` moves the momentum on every step): the step is traced once more, and from then on
that number is lent too. An optimizer may branch on a lent number, ``if weight_decay != 0``; see
:class:`~xla_dtensor.runtimes.jax.eager.scalar.ScalarNode`.

Of its forms an optimizer is lent the one that suits the trace: lists (``foreach``) where nobody has
chosen, which is one call of an op for all parameters, and counters on the host or on the devices
(``capturable``), wherever they are.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch
import torch.optim.optimizer as torch_optimizer
from torch.utils._python_dispatch import _disable_current_modes

from xla_dtensor.core.errors import CompileError
from xla_dtensor.runtimes.host_work.mode import HostOps
from xla_dtensor.runtimes.host_work.tape import HostTape
from xla_dtensor.runtimes.jax.arrays import trace as jax_trace
from xla_dtensor.runtimes.jax.arrays.storage import Storage
from xla_dtensor.runtimes.jax.arrays.values import numpy_from_torch
from xla_dtensor.runtimes.jax.eager.scalar import ScalarNode, sym_number
from xla_dtensor.runtimes.jax.eager.tensor import JaxTensor
from xla_dtensor.runtimes.jax.lower.index import filling_on_host

__all__ = ["RATE", "NumbersMeetTensors", "OptimizerInputs", "lent", "lent_tensor", "lifted"]


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
    with jax.ensure_compile_time_eval():
        array = jnp.asarray(number, jnp.float64)
    tensor = _outside_trace(array)
    numbers.append((tensor._storage, current))
    return sym_number(tensor.value(), current)


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
# Which make a tensor of the rate at their first step, on the host, beside their counters.
_KEEP_THE_RATE = (torch.optim.ASGD,)


class OptimizerInputs:
    """The optimizers that a step calls, and the numbers lent to them.

    Args:
        lift_tensor: Turns a plain CPU tensor of optimizer state into a payload.
        lend_number: Turns a float into a traced number, which the program reads anew per call.
        lend_tensor: The same, of a number in a plain CPU tensor, into a payload.
        lent_names: The settings that are lent, as their optimizers' param_groups call them.
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
    ) -> None:
        self._lift_tensor = lift_tensor
        self._lend_number = lend_number
        self._lend_tensor = lend_tensor
        self._gather = gather
        self._lent_names = frozenset(lent_names)
        self._lent: list[tuple[dict[str, Any], str, Any, Any]] = []
        self._seen: dict[tuple[int, str], tuple[dict[str, Any], Any]] = {}
        self._numbers: dict[tuple[int, str], Any] = {}
        self._baked: dict[tuple[int, int, str], Any] = {}
        self._owned: dict[int, list[list[int]]] = {}
        self._hooks: dict[int, tuple[Any, ...]] = {}
        self._state: list[tuple[torch.optim.Optimizer, Any, Any, list[Any]]] = []
        self._replaced: list[tuple[dict[str, Any], str, Any]] = []
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
            self._give_back()

    def settle(self) -> None:
        """Remember every baked setting and all state; call it when the trace is done."""
        self._baked = self._settings()
        self._state = [
            (optimizer, parameter, of, [(n, t) for n, t in of.items() if not _is_plain(t)])
            for optimizer in self.optimizers.values()
            for parameter, of in optimizer.state.items()
        ]
        self._owned, self._hooks = self._parameters_owned(), self._all_hooks()

    def changed(self) -> list[str]:
        """Return the names of baked settings that are no longer what they were."""
        settings = self._settings()
        names = [
            key[-1]
            for key in {**self._baked, **settings}
            if self._baked.get(key) != settings.get(key)
        ]
        return list(dict.fromkeys(names))

    def state_replaced(self) -> bool:
        """Tell whether an optimizer's state is other tensors now, as after ``load_state_dict``."""
        return any(
            optimizer.state.get(parameter) is not of
            or any(of.get(name) is not tensor for name, tensor in tensors)
            for optimizer, parameter, of, tensors in self._state
        )

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
        states = (of for o in self.optimizers.values() for of in o.state.values())
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

    def _settings(self) -> dict[tuple[int, int, str], Any]:
        return {
            (key, position, name): value
            for key, optimizer in self.optimizers.items()
            for position, group in enumerate(optimizer.param_groups)
            for name, value in group.items()
            if name != "params" and not self._is_lent(name, value) and _is_plain(value)
        }

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

    def _is_lent(self, name: str, value: Any) -> bool:
        return name in self._lent_names and _is_lendable(value)

    def _before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self.optimizers[id(optimizer)] = optimizer
        _make_state(optimizer)
        self._stand_in(inspect.unwrap(type(optimizer).step).__globals__)
        for state in optimizer.state.values():
            for name, value in state.items():
                if type(value) is torch.Tensor:
                    state[name] = self._lift_tensor(value)
                    self._lifted.append((value, state[name]))
        for group in optimizer.param_groups:
            for name, value in list(group.items()):
                if type(value) is torch.Tensor and value.numel() == 1:  # Schedulers fill it.
                    self._lend(group, name, self._tensor(group, name))
            for name in sorted(self._lent_names & group.keys()):
                value = group[name]
                if _is_lendable(value) and not (name == RATE and _keeps_rate(optimizer, group)):
                    number = self._number(group, name)
                    self._seen.setdefault((id(group), name), (group, value))
                    self._lend(group, name, number)
            self._choose_form(optimizer, group)

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

    def _lend(self, group: dict[str, Any], name: str, value: Any) -> None:
        self._lent.append((group, name, group[name], value))
        group[name] = value

    def _stand_in(self, names: dict[str, Any]) -> None:
        """Let an optimizer's module find functions that take traced numbers and our device.

        Adafactor takes ``min(lr, ...)``: Python's own asks which is less, and bakes the answer in.
        Capturable optimizers ask whether the device's counters may stay there.
        """
        supported = names.get(_DEVICES)

        def with_ours(*args: Any, **options: Any) -> list[str]:
            return [*supported(*args, **options), "cpu"]  # pyright: ignore[reportOptionalCall]

        devices = {} if supported is None else {_DEVICES: with_ours}
        for name, function in {"min": _least, "max": _most, **devices}.items():
            self._replaced.append((names, name, names.get(name)))
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

            def current() -> Any:
                setting = group[name]
                return value if setting is self._numbers.get(key) else setting

            if isinstance(value, tuple):
                self._numbers[key] = tuple(
                    self._lend_number(number, lambda i=i: float(current()[i]))
                    for i, number in enumerate(value)
                )
            else:
                self._numbers[key] = self._lend_number(value, lambda: float(current()))
        return self._numbers[key]

    def _after(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._give_back()

    def _give_back(self) -> None:
        for group, name, value, number in self._lent:
            if group[name] is number:
                group[name] = value
        self._lent.clear()
        for names, name, original in reversed(self._replaced):
            if original is None:
                del names[name]
            else:
                names[name] = original
        self._replaced.clear()


def _make_state(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer make what state it makes of constants, as if it were older than the trace.

    torch's optimizers do that in a function of its own, before they compute. What comes of the
    gradients is made by the step. SGD's momentum begins with the first gradient, which without
    dampening is what comes of zeros: 0.9 * 0 + g.
    """
    make: Any = getattr(optimizer, "_init_group", None)
    for group in optimizer.param_groups if _is_torchs(make) else ():
        graded = [p for p in group["params"] if p.grad is not None and not optimizer.state.get(p)]
        if not graded or any(map(_is_traced_value, graded)):
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
    return not (chosen or group.get("differentiable") or tensors or first_on_device)


def _keeps_rate(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> bool:
    """Tell whether an optimizer is about to make state of its rate: this trace is of that one."""
    states = [optimizer.state.get(p) for p in group["params"]]
    return isinstance(optimizer, _KEEP_THE_RATE) and not all(states)


def _is_lendable(value: Any) -> bool:
    """Tell whether a setting is a float or a tuple of them. A bool or an int is a choice."""
    if isinstance(value, tuple):
        return bool(value) and all(isinstance(number, float) for number in value)
    return isinstance(value, float)


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
    return isinstance(argument, torch.SymFloat | torch.SymInt) and isinstance(
        argument.node, ScalarNode
    )
