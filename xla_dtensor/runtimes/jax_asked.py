"""The redistributes of a traced step, with the names that their communication may have.

See :mod:`xla_dtensor.report.asked_communication`. The trace is a jaxpr: each op has the scopes that
were open around it, and the ops whose results it takes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
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
_MARK = "redistribute["


def asked_for(jaxpr: Any) -> tuple[AskedFor, ...]:
    """List what a trace redistributes.

    Args:
        jaxpr: ``jax.core.Jaxpr``, of the whole step.
    """
    return tuple(_asked(jaxpr, None))


def _asked(jaxpr: Any, around: str | None) -> Iterator[AskedFor]:
    makers = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
    for eqn in jaxpr.eqns:
        stack = str(eqn.source_info.name_stack)
        if eqn.primitive.name == "sharding_constraint" and _MARK in stack:
            aval = eqn.outvars[0].aval
            yield AskedFor(
                names=tuple(dict.fromkeys(_names(eqn, makers, around))),
                changes=changes_in(stack),
                elements=_elements(eqn.params["sharding"], tuple(aval.shape)),
                element_bytes=aval.dtype.itemsize,
            )
        for inner in _inner(eqn):
            yield from _asked(inner, stack if around is None else around)


def _names(eqn: Any, makers: dict[Any, Any], around: str | None) -> Iterator[tuple[str, str]]:
    """The names of an op and of those before it, back to the first that is not elementwise."""
    waiting, seen = [eqn], {id(eqn)}
    while waiting and len(seen) <= _REACH:
        one = waiting.pop(0)
        stack, op = str(one.source_info.name_stack), one.primitive.name
        name = f"{stack}/{op}" if stack else op
        if around is None:
            # What a function of JAX's own does stands behind the name of the call.
            yield (name, name) if op not in ("jit", "pjit") else (stack, "")
        else:
            yield around, f"/{name}"
        if one.primitive.name not in _BETWEEN:
            continue
        for var in one.invars:
            maker = makers.get(var) if not hasattr(var, "val") else None
            if maker is not None and id(maker) not in seen:
                seen.add(id(maker))
                waiting.append(maker)


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
