"""Traced numbers: what ``.item()`` returns while a step is traced.

PyTorch's default optimizers compute in Python floats: ``step.item()``, ``beta1 ** step``,
``lr / bias_correction1``. Baked into a program these are silently wrong from the second step on.
So ``.item()`` of a traced tensor gives a :class:`torch.SymFloat` or :class:`torch.SymInt` whose
node is a :class:`ScalarNode`: arithmetic on it becomes part of the program, in float64 as Python
does it, and asking for its truth value or an int is a clear error.

A number that Python knows now, though it may be another one on the next call (a learning rate, a
momentum), carries a way to ask for it. Python may then branch on it, ``if momentum != 0``, or need
it as its own, ``range(steps)``: the answer is baked in, and noted with the trace, so that the
program is traced anew when it changes.

The node follows torch's private SymNode protocol by duck typing; ``tests`` run it on each
supported torch.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
import torch

from xla_dtensor.runtimes.jax.arrays.storage import Storage
from xla_dtensor.runtimes.jax.arrays.trace import Trace, active_trace, refuse_read
from xla_dtensor.runtimes.jax.arrays.values import x64
from xla_dtensor.runtimes.jax.eager.checks import truth
from xla_dtensor.runtimes.jax.eager.inline import inlined

__all__ = [
    "LentNode",
    "ScalarNode",
    "node_of",
    "note_answer",
    "store_items",
    "sym_number",
    "sym_of_node",
    "unwrap_number",
]

_BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "truediv": lambda a, b: a / b,
    "float_truediv": lambda a, b: a / b,
    "int_truediv": lambda a, b: a / b,
    "floordiv": lambda a, b: a // b,
    "int_floordiv": lambda a, b: a // b,
    "mod": lambda a, b: a % b,
    "pow": lambda a, b: a**b,
    "float_pow": lambda a, b: a**b,
    "pow_by_natural": lambda a, b: a**b,
    "lshift": lambda a, b: a << b,
    "rshift": lambda a, b: a >> b,
    "and_": lambda a, b: a & b,
    "or_": lambda a, b: a | b,
    "sym_and": lambda a, b: a & b,
    "sym_or": lambda a, b: a | b,
    "bitwise_and": lambda a, b: a & b,
    "bitwise_or": lambda a, b: a | b,
    "bitwise_xor": lambda a, b: a ^ b,
    "sym_min": jnp.minimum,
    "sym_max": jnp.maximum,
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
}
_UNARY: dict[str, Callable[[Any], Any]] = {
    "neg": lambda a: -a,
    "pos": lambda a: a,
    "abs": jnp.abs,
    "floor": lambda a: _integral(jnp.floor, a),
    "ceil": lambda a: _integral(jnp.ceil, a),
    "trunc": lambda a: _integral(jnp.trunc, a),
    "sym_sqrt": jnp.sqrt,
    "sym_exp": jnp.exp,
    "sym_log": jnp.log,
    "sym_log2": jnp.log2,
    "sym_sin": jnp.sin,
    "sym_cos": jnp.cos,
    "sym_tan": jnp.tan,
    "sym_sinh": jnp.sinh,
    "sym_cosh": jnp.cosh,
    "sym_tanh": jnp.tanh,
    "sym_asin": jnp.arcsin,
    "sym_acos": jnp.arccos,
    "sym_atan": jnp.arctan,
    "is_integer": lambda a: a == jnp.floor(a),
    "sym_float": lambda a: jnp.asarray(a, jnp.float64),
    "sym_not": jnp.logical_not,
    "clone": lambda a: a,
}


def _integral(function: Callable[[Any], Any], number: Any) -> Any:
    """Python's floor and its like give integers."""
    return number if number.dtype.kind == "i" else function(number).astype(jnp.int64)


class ScalarNode:
    """A 0-dim JAX value under torch's SymNode protocol.

    Args:
        value: The value in the program.
        current: Returns the value as Python knows it at the time; None if only the program does.

    Attributes:
        storage: Holds the value as a result of the program, where the step has left the number
            behind.
    """

    constant = None

    def __init__(self, value: Any, current: Callable[[], Any] | None = None) -> None:
        self.value = value
        self.current = current
        self.storage: Storage | None = None
        trace = active_trace() if current is None else None
        if trace is not None:
            trace.items[self] = None

    def __getattr__(self, name: str) -> Any:
        if name in _BINARY:
            return lambda operand: self._apply(_BINARY[name], self, operand)
        if name in _UNARY:
            return lambda: self._apply(_UNARY[name], self)
        raise AttributeError(name)

    @staticmethod
    def _apply(function: Callable[..., Any], *nodes: ScalarNode) -> ScalarNode:
        for node in nodes:
            output = node.applied(function, nodes)
            if output is not None:
                return output
        currents = [node.current for node in nodes if node.current is not None]
        if len(currents) < len(nodes):
            with x64():
                return ScalarNode(inlined(function)(*(node.value for node in nodes)))
        trace = active_trace()
        numbers = {} if trace is None else trace.numbers
        key = (function, *(node.key() for node in nodes))
        if key not in numbers:
            with x64():
                number = inlined(function)(*(node.value for node in nodes))
                node_of_number = ScalarNode(
                    number, lambda: function(*(np.asarray(c()) for c in currents))
                )
            numbers[key] = node_of_number, nodes  # while these live, nothing else has their ids
        return numbers[key][0]

    def applied(self, function: Callable[..., Any], nodes: Sequence[ScalarNode]) -> Any:
        """Return what `function` makes of `nodes`, of which this is one; None: as usual."""
        return None

    def key(self) -> Hashable:
        """Return something equal for nodes of equal value; while the node lives, nothing else's."""
        return id(self)

    def _kind(self) -> str:
        return jnp.result_type(self.value).kind

    def is_int(self) -> bool:
        return self._kind() in "iu"

    def is_float(self) -> bool:
        return self._kind() == "f"

    def is_bool(self) -> bool:
        return self._kind() == "b"

    def is_nested_int(self) -> bool:
        return False

    def is_constant(self) -> bool:
        return False

    def is_symbolic(self) -> bool:
        return True

    def has_hint(self) -> bool:
        return False

    def maybe_as_int(self) -> None:
        return None

    def maybe_as_float(self) -> None:
        return None

    def maybe_as_bool(self) -> None:
        return None

    def wrap_int(self, number: int) -> ScalarNode:
        return _Constant(number, jnp.int64)

    def wrap_float(self, number: float) -> ScalarNode:
        return _Constant(number, jnp.float64)

    def wrap_bool(self, flag: bool) -> ScalarNode:
        return _Constant(flag, jnp.bool_)

    def round(self, ndigits: int | None = None) -> ScalarNode:
        if ndigits is None:
            return self._apply(lambda a: _integral(jnp.round, a), self)
        return self._apply(lambda a: jnp.round(a, ndigits), self)

    def sym_ite(self, then: ScalarNode, other: ScalarNode) -> ScalarNode:
        return self._apply(jnp.where, self, then, other)

    def guard_bool(self, *_: Any) -> bool:
        if active_trace() is not None and self.current is None:
            return truth(self.value)
        return self._answer(bool)

    def guard_int(self, *_: Any) -> int:
        return self._answer(int)

    def guard_float(self, *_: Any) -> float:
        return self._answer(float)

    def _answer(self, kind: Callable[[Any], Any]) -> Any:
        """Return the number as Python knows it now, which the trace takes for granted."""
        trace, current = active_trace(), self.current
        if trace is None or current is None:
            self._refuse()
        with jax.ensure_compile_time_eval():
            answer = kind(current())
        trace.answers.append((lambda: kind(current()), answer))
        return answer

    def _refuse(self, *_: Any) -> NoReturn:
        refuse_read("turned into a Python number or truth value")

    def expect_true(self, *_: Any) -> bool:
        """Take torch's own sanity checks (a bias correction is not negative) as met."""
        return True

    bool_ = guard_size_oblivious = guard_or_false = guard_or_true = guard_bool
    int_, float_, expect_size = guard_int, guard_float, _refuse

    def __str__(self) -> str:
        return "traced number"

    __repr__ = _graph_repr = __str__


class _Constant(ScalarNode):
    """A number that the step's own Python has written, which becomes a value if it is used."""

    def __init__(self, number: Any, dtype: Any) -> None:
        self._number, self._dtype = number, jnp.dtype(dtype)
        self.current = lambda: number

    @property
    def value(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        with x64():
            return np.asarray(self._number, self._dtype)

    def key(self) -> Hashable:
        return self._dtype, repr(self._number)  # 0.0 and -0.0 are equal

    def _kind(self) -> str:
        return self._dtype.kind


_MAKES_TENSORS = "tensor_new.cpp"
_INT32 = -(2**31), 2**31 - 1


class LentNode(ScalarNode):
    """A number that Python computes for each call (``guards.lent``), an input where it is used.

    Args:
        now: Returns what it is in this call.
        input_of: Makes a tensor that is an input, given the number and what returns it.
    """

    is_lent = True

    def __init__(self, now: Callable[[], Any], input_of: Callable[..., Any]) -> None:
        self.current = self._now = now
        self._input_of, self._input = input_of, None
        self._lies: dict[tuple[int, int], bool] = {}

    @property
    def value(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        if self._input is None:
            self._input = self._input_of(self._now(), self._now)
        return self._input.value()

    def _kind(self) -> str:
        return "i" if type(self._now()) is int else "f"

    def lies_within(self, low: int, high: int) -> bool:
        """Tell whether the number is in a range now, which the trace takes for granted."""
        if (low, high) not in self._lies:
            answer = self._lies[low, high] = low <= self._now() <= high
            note_answer(lambda: low <= self._now() <= high, answer)
        return self._lies[low, high]

    def guard_int(self, file: str = "", *_: Any) -> int:
        if file.endswith(_MAKES_TENSORS) and not self.lies_within(*_INT32):
            raise TypeError("torch.tensor() cuts a number that is lent to 32 bits")
        return super().guard_int()

    int_ = guard_int


def note_answer(question: Callable[[], Any], answer: Any) -> None:
    """Note what the trace at hand takes for granted; outside of one a lent number has no value."""
    trace = active_trace()
    if trace is None:
        refuse_read("turned into a Python number or truth value")
    trace.answers.append((question, answer))


def sym_number(number: jax.Array, current: Callable[[], Any] | None = None) -> Any:
    """Return a traced 0-dim value as the SymFloat or SymInt that torch code can compute with.

    Args:
        number: The value in the program.
        current: Returns the number as Python knows it, where it does.
    """
    with x64():
        if jnp.issubdtype(number.dtype, jnp.floating):
            return sym_of_node(ScalarNode(number.astype(jnp.float64), current))
        if jnp.issubdtype(number.dtype, jnp.integer):
            return sym_of_node(ScalarNode(number.astype(jnp.int64), current))
    kind = "complex number" if number.dtype.kind == "c" else "bool"
    refuse_read(f"turned into a Python {kind}")


def sym_of_node(node: ScalarNode) -> Any:
    """Return the SymFloat or SymInt of a number."""
    kind: Any = torch.SymFloat if node.is_float() else torch.SymInt
    return kind(node)


def node_of(number: Any) -> ScalarNode | None:
    """Return the node of a traced number; None for anything else."""
    if isinstance(number, (torch.SymFloat, torch.SymInt, torch.SymBool)):
        return number.node if isinstance(number.node, ScalarNode) else None
    return None


def unwrap_number(number: Any) -> Any:
    """Return the JAX value behind a traced number; anything else as it is."""
    node = node_of(number)
    return number if node is None else node.value


def store_items(trace: Trace) -> None:
    """Make results of a program of the numbers that only it knows, and that somebody still has."""
    for node in list(trace.items):
        node.storage = Storage(jnp.asarray(node.value))
