"""The redistributes of a traced step, with the names that their communication may have.

See :mod:`xla_dtensor.report.asked_communication`. The trace is a jaxpr: each op has the scopes that
were open around it, and the ops whose results it takes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from xla_dtensor.report.asked_communication import AskedFor, changes_in

__all__ = ["asked_for"]

_BETWEEN = frozenset(
    {
        *("add", "add_any", "sub", "mul", "div", "neg", "max", "min", "pow", "integer_pow", "exp"),
        *("tanh", "logistic", "select_n", "sqrt", "rsqrt", "erf", "abs", "sign", "square", "log"),
        *("pad", "slice", "copy", "copy_p", "convert_element_type", "reshape", "transpose"),
        *("squeeze", "broadcast_in_dim", "expand_dims", "sharding_constraint", "jit", "pjit"),
        *("custom_jvp_call", "custom_vjp_call", "optimization_barrier", "reduce_precision", "name"),
    }
)
"""Ops through which XLA carries a sharding backwards: elementwise ones, and changes of shape."""

_REACH = 64
_AN_INPUT = ("", "]")
"""What the name of an input ends with, ``arguments_in[0]``; no op's does."""
_MARK = "redistribute["


def asked_for(jaxpr: Any) -> tuple[AskedFor, ...]:
    """List what a trace redistributes.

    Args:
        jaxpr: ``jax.core.Jaxpr``, of the whole step.
    """
    return tuple(_asked(jaxpr, None))


def _asked(jaxpr: Any, around: str | None) -> Iterator[AskedFor]:
    flow = _Flow(jaxpr, around)
    for eqn in jaxpr.eqns:
        stack = str(eqn.source_info.name_stack)
        for sharding in _constraints(eqn) if _MARK in stack else ():
            aval = eqn.outvars[0].aval
            yield AskedFor(
                names=tuple(dict.fromkeys(flow.names(eqn))),
                changes=changes_in(stack),
                elements=_elements(sharding, tuple(aval.shape)),
                element_bytes=aval.dtype.itemsize,
            )
        for body in _inner(eqn):
            yield from _asked(body, stack if around is None else around)


def _constraints(eqn: Any) -> Iterator[Any]:
    """Yield the shardings that an op tells its result. Of a concrete array JAX does so by a jit."""
    if eqn.primitive.name == "sharding_constraint":
        yield eqn.params["sharding"]
    elif eqn.primitive.name in ("jit", "pjit"):
        yield from (each for each in eqn.params["out_shardings"] if hasattr(each, "shard_shape"))


class _Flow:
    """Which ops of a jaxpr make a value, and which take it.

    Args:
        jaxpr: The jaxpr.
        around: The scopes around it, where it is inside of another one.
    """

    def __init__(self, jaxpr: Any, around: str | None) -> None:
        self._around = around
        self._makers = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
        self._inputs = {*jaxpr.invars, *jaxpr.constvars}
        self._users: dict[Any, list[Any]] = {}
        for eqn in jaxpr.eqns:
            for var in filter(_is_variable, eqn.invars):
                self._users.setdefault(var, []).append(eqn)

    def names(self, eqn: Any) -> Iterator[tuple[str, str]]:
        """Yield the names of an op and of those before it, back to the first not elementwise.

        XLA names what moves an input of the program by that input alone. It is told by who uses it
        (``inherited_metadata``), so there the names of those behind are among them.
        """
        before = list(self._near([eqn], self._sources))
        yield from map(self._name, before)
        if any(var in self._inputs for one in before for var in filter(_is_variable, one.invars)):
            yield from map(self._name, self._near(self._followers(eqn), self._followers))
            yield _AN_INPUT

    def _near(self, first: list[Any], follow: Callable[[Any], list[Any]]) -> Iterator[Any]:
        waiting, seen = [*first], {*map(id, first)}
        while waiting and len(seen) <= _REACH:
            one = waiting.pop(0)
            yield one
            new = follow(one) if one.primitive.name in _BETWEEN else []
            waiting += [each for each in new if id(each) not in seen]
            seen.update(map(id, new))

    def _sources(self, eqn: Any) -> list[Any]:
        return [self._makers[v] for v in filter(_is_variable, eqn.invars) if v in self._makers]

    def _followers(self, eqn: Any) -> list[Any]:
        return [user for var in eqn.outvars for user in self._users.get(var, ())]

    def _name(self, eqn: Any) -> tuple[str, str]:
        stack, op = str(eqn.source_info.name_stack), eqn.primitive.name
        name = f"{stack}/{op}" if stack else op
        if self._around is not None:
            return self._around, f"/{name}"
        # What a function of JAX's own does stands behind the name of the call.
        return (stack, "") if op in ("jit", "pjit") else (name, name)


def _is_variable(value: Any) -> bool:
    return not hasattr(value, "val")


def _inner(eqn: Any) -> Iterator[Any]:
    for value in eqn.params.values():
        for one in value if isinstance(value, tuple | list) else (value,):
            jaxpr = getattr(one, "jaxpr", one)
            if hasattr(jaxpr, "eqns"):
                yield jaxpr


def _elements(sharding: Any, shape: tuple[int, ...]) -> int:
    """What one device has of an array; all of it where the compiler may choose."""
    try:
        return math.prod(sharding.shard_shape(shape))
    except (TypeError, ValueError):
        return math.prod(shape)
