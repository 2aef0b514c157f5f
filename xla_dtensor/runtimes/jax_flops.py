"""How many floating-point operations a traced program asks for, counted in its products.

XLA's own count is one device's and takes a loop's body once. Here the whole program over all
devices is counted, loops as often as they run: a multiplication and an addition each for every
term of a matrix product or a convolution, nothing for the rest. That is the count behind "model
FLOPs utilisation" (PaLM, arXiv:2204.02311, appendix B), recomputation included where the step asks
for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from jax.extend.core import Literal

from xla_dtensor.runtimes.jax_private import is_jaxpr, open_jaxpr

__all__ = ["flops_of", "product_dtypes"]


def flops_of(jaxpr: Any) -> int:
    """Return the floating-point operations of a jaxpr's products.

    Args:
        jaxpr: Open or closed. Of a conditional the dearest branch counts; a while loop whose length
            nobody knows counts once.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> product = jax.make_jaxpr(jnp.matmul)(jnp.ones((2, 3)), jnp.ones((3, 5)))
        >>> flops_of(product) == 2 * 2 * 3 * 5
        True
    """
    return sum(_of_equation(equation) for equation in open_jaxpr(jaxpr).eqns)


def product_dtypes(jaxpr: Any) -> frozenset[str]:
    """Return the dtypes of what a jaxpr's products multiply, by NumPy's names.

    Args:
        jaxpr: Open or closed.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> ones = jnp.ones((2, 2), jnp.bfloat16)
        >>> sorted(product_dtypes(jax.make_jaxpr(jnp.matmul)(ones, ones)))
        ['bfloat16']
    """
    found: set[str] = set()
    for equation in open_jaxpr(jaxpr).eqns:
        if equation.primitive.name in _PRODUCTS:
            found.add(str(equation.invars[0].aval.dtype))
        for body in _jaxprs(equation.params):
            found |= product_dtypes(body)
    return frozenset(found)


def _of_equation(equation: Any) -> int:
    name = equation.primitive.name
    if name in _PRODUCTS:
        return _PRODUCTS[name](equation)
    counts = [flops_of(jaxpr) for jaxpr in _jaxprs(equation.params)]
    if not counts:
        return 0
    if name == "cond":
        return max(counts)
    return sum(counts) * _times(name, equation.params)


def _times(name: str, params: dict[str, Any]) -> int:
    if name == "scan":
        return params["length"]
    if name == "shard_map":
        return math.prod(params["mesh"].shape.values())
    return _turns(params) if name == "while" else 1


def _turns(params: dict[str, Any]) -> int:
    """How often a loop of ``jax_counted`` runs: its condition is "counter < literal", no more."""
    condition = open_jaxpr(params["cond_jaxpr"]).eqns
    if len(condition) != 1 or condition[0].primitive.name != "lt":
        return 1
    limit = condition[0].invars[1]
    return int(limit.val) if isinstance(limit, Literal) else 1


def _jaxprs(params: dict[str, Any]) -> Iterator[Any]:
    for value in params.values():
        for one in value if isinstance(value, tuple | list) else (value,):
            if is_jaxpr(one):
                yield one


def _dot_general(equation: Any) -> int:
    (contracted, _), _ = equation.params["dimension_numbers"]
    left = equation.invars[0].aval.shape
    return 2 * equation.outvars[0].aval.size * math.prod(left[d] for d in contracted)


def _ragged_dot(equation: Any) -> int:
    left, right = (v.aval.shape for v in equation.invars[:2])
    numbers = equation.params["ragged_dot_dimension_numbers"]
    (contracted, _), _ = numbers.dot_dimension_numbers
    if numbers.lhs_ragged_dimensions[0] in contracted:  # Each term belongs to one group alone.
        return 2 * math.prod(left) * right[-1]
    return 2 * equation.outvars[0].aval.size * math.prod(left[d] for d in contracted)


def _convolution(equation: Any) -> int:
    kernel = equation.invars[1].aval.shape
    outputs = kernel[equation.params["dimension_numbers"].rhs_spec[0]]
    return 2 * equation.outvars[0].aval.size * math.prod(kernel) // outputs


_PRODUCTS: dict[str, Callable[[Any], int]] = {
    "dot_general": _dot_general,
    "ragged_dot_general": _ragged_dot,
    "conv_general_dilated": _convolution,
}
