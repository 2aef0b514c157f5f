"""Element by element ops.

torch decides the dtype, JAX computes: inputs are cast to torch's result dtype first (so that a
float64 scalar does not make the whole op float64), half-precision ones to float32 as torch's own
kernels do, and the result is cast back by the caller.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax
from jax.scipy import special

from xla_dtensor.core.errors import UnsupportedOpError
from xla_dtensor.runtimes.jax.arrays.sharding import host_value
from xla_dtensor.runtimes.jax.arrays.trace import is_tracer
from xla_dtensor.runtimes.jax.arrays.values import in_dtype, jax_dtype, torch_dtype
from xla_dtensor.runtimes.jax.lower.random import as_one
from xla_dtensor.runtimes.jax.lower.table import TABLE, lower

__all__ = ["log_add_exp", "lower_derivative", "pull_back", "quotient"]


# ----------------------------------------------------------------------------- torch._assert_async
#
# What a program claims of a value, checked where the value is there.

aten = torch.ops.aten


@lower(aten._assert_async.default, aten._assert_async.msg)
def _assert_async(claim: Any, message: str = "Expected Tensor with single nonzero value") -> None:
    # A compiled program has no way to raise, and torch leaves such a check out as well.
    if not is_tracer(claim) and not host_value(claim):
        raise RuntimeError(message)


# ---------------------------------------- Backward ops as JAX's derivative of the forward lowering
#
# torch's backward ops take the cotangent first, then what the forward took, under the same names,
# and sometimes what the forward returned. So the two schemas say how a backward op follows from a
# forward lowering, and one line registers it::
#
#     lower_derivative(aten.grid_sampler_2d_backward.default, forward, "input", "grid")
#
# The derivative keeps the dims apart that the forward keeps apart. Where the forward ran already,
# in the same compiled step, XLA drops the second run.


def pull_back(function: Callable[..., Any], primals: Any, grad: Any) -> tuple[Any, ...]:
    """Return the cotangents of `primals` under a function whose output has the cotangent `grad`.

    Args:
        function: Takes `primals`, returns one array.
        primals: Arrays of floats.
        grad: The output's cotangent; cast to the output's dtype.

    Example:
        >>> pull_back(lambda x: x * 3, (jax.numpy.ones(2),), jax.numpy.ones(2))
        (Array([3., 3.], dtype=float32),)
    """
    output, pull = jax.vjp(function, *primals)
    return pull(grad.astype(output.dtype))


def lower_derivative(backward: Any, forward: Any, *wrt: str) -> None:
    """Register the lowering of a backward op: the derivative of a forward op that has one.

    Args:
        backward: The op; its first argument is the cotangent of the forward's first result. A
            result that `output_mask` leaves out is None.
        forward: Its lowering has to be in the table already.
        wrt: The forward's arguments that the results of `backward` are the gradients of, in order.

    Example:
        >>> import torch
        >>> import xla_dtensor.runtimes.jax.lower.reduce
        >>> torch.ops.aten.multi_margin_loss_backward.default in TABLE
        True
    """
    lowering = TABLE[forward]
    forward_names = [argument.name for argument in forward._schema.arguments]
    defaults = {a.name: a.default_value for a in forward._schema.arguments if a.has_default_value()}
    backward_names = [argument.name for argument in backward._schema.arguments]

    def run(*args: Any, **kwargs: Any) -> Any:
        arguments = dict(zip(backward_names, args, strict=False)) | kwargs
        grad = arguments[backward_names[0]]
        mask = arguments.get("output_mask", [True] * len(wrt))
        needed = [name for name, is_needed in zip(wrt, mask, strict=True) if is_needed]

        def function(*differentiated: Any) -> Any:
            inputs = {**defaults, **arguments, **dict(zip(needed, differentiated, strict=True))}
            output = lowering(*(inputs[name] for name in forward_names))
            return output[0] if isinstance(output, tuple) else output

        primals = [arguments[name] for name in needed]
        grads = dict(zip(needed, pull_back(function, primals, grad), strict=True))
        outputs = tuple(grads.get(name) for name in wrt)
        return outputs if len(backward._schema.returns) > 1 else outputs[0]

    lower(backward)(as_one(run))


# -------------------------------------------------------------------------- Element by element ops

_HALF = (jnp.bfloat16, jnp.float16)


def _is_array(x: Any) -> bool:
    return isinstance(x, jax.Array)


def _compute_dtype(dtype: Any) -> Any:
    return jnp.dtype(jnp.float32) if dtype in _HALF else dtype


def _common(args: tuple[Any, ...]) -> Any:
    """The dtype in which torch compares: dimensioned tensors decide over 0-dim ones and numbers."""
    kinds: list[Any] = [
        torch.empty((1,) * min(a.ndim, 1), dtype=torch_dtype(a.dtype), device="meta")
        if _is_array(a)
        else a
        for a in args
    ]
    if len(kinds) == 1:
        return jax_dtype(kinds[0].dtype)
    return jax_dtype(torch.result_type(*kinds))


def _cast(x: Any, dtype: Any) -> Any:
    if _is_array(x):
        return x if x.dtype == dtype else in_dtype(x, dtype)
    if isinstance(x, int) and jnp.issubdtype(dtype, jnp.integer):
        return jnp.asarray(np.asarray(x).astype(dtype))  # -3 is 253 of uint8
    return jnp.asarray(x, dtype) if isinstance(x, (int, float, complex)) else x


def _arithmetic(function: Callable[..., Any]) -> Callable[..., Any]:
    """Inputs are computed with in the result's dtype."""

    def rule(*args: Any, meta: Any, **kwargs: Any) -> Any:
        dtype = _compute_dtype(jax_dtype(meta.dtype))
        return function(*[_cast(a, dtype) for a in args], **kwargs)

    return rule


def _comparison(function: Callable[..., Any]) -> Callable[..., Any]:
    """Inputs are computed with in their own common dtype; the result is bool."""

    def rule(*args: Any, meta: Any) -> Any:
        dtype = _compute_dtype(_common(args))
        return function(*[_cast(a, dtype) for a in args])

    return rule


def _register(kind: Callable[..., Any], table: dict[str, Callable[..., Any]]) -> None:
    for names, function in table.items():
        for name in names.split():
            packet, _, overload = name.partition(".")
            operator = getattr(getattr(aten, packet), overload or "default")
            lower(operator, wants_meta=True)(kind(function))


def _gelu(x: Any, approximate: str = "none") -> Any:
    return jax.nn.gelu(x, approximate=approximate == "tanh")


_register(
    _arithmetic,
    {
        "neg": lambda x: -x,
        "exp": jnp.exp,
        "exp2": jnp.exp2,
        "expm1": jnp.expm1,
        "log": jnp.log,
        "log2": jnp.log2,
        "log10": jnp.log10,
        "log1p": jnp.log1p,
        "sqrt": jnp.sqrt,
        "rsqrt": lax.rsqrt,
        "sin": jnp.sin,
        "cos": jnp.cos,
        "tan": jnp.tan,
        "asin": jnp.arcsin,
        "acos": jnp.arccos,
        "atan": jnp.arctan,
        "sinh": jnp.sinh,
        "cosh": jnp.cosh,
        "tanh": jnp.tanh,
        "asinh": jnp.arcsinh,
        "acosh": jnp.arccosh,
        "atanh": jnp.arctanh,
        "i0": special.i0,
        "sigmoid": jax.nn.sigmoid,
        "erf": special.erf,
        "erfc": special.erfc,
        "erfinv": special.erfinv,
        "reciprocal": lambda x: 1 / x,
        "floor": jnp.floor,
        "ceil": jnp.ceil,
        "round": jnp.round,
        "trunc": jnp.trunc,
        "frac": lambda x: x - jnp.trunc(x),
        "sign sgn": lambda x: _sign(x),
        "relu": lambda x: jnp.maximum(x, 0),
        "silu": jax.nn.silu,
        "gelu": _gelu,
        "lgamma": special.gammaln,
        "digamma": lambda x: _digamma(x),
        "special_i1": special.i1,
        "square": lambda x: x * x,
        "mul.Tensor mul.Scalar": jnp.multiply,
        "pow.Tensor_Tensor pow.Tensor_Scalar pow.Scalar": lambda x, y: _pow(x, y),
        "maximum": jnp.maximum,
        "minimum": jnp.minimum,
        "fmax": jnp.fmax,
        "fmin": jnp.fmin,
        "atan2": jnp.arctan2,
        "copysign.Tensor copysign.Scalar": jnp.copysign,
        "fmod.Tensor fmod.Scalar": jnp.fmod,
        "remainder.Tensor remainder.Scalar remainder.Scalar_Tensor": jnp.remainder,
        "hypot": jnp.hypot,
        "logaddexp": lambda x, y: log_add_exp(x, y),
        "bitwise_and.Tensor bitwise_and.Scalar bitwise_and.Scalar_Tensor": jnp.bitwise_and,
        "bitwise_or.Tensor bitwise_or.Scalar bitwise_or.Scalar_Tensor": jnp.bitwise_or,
        "bitwise_xor.Tensor bitwise_xor.Scalar bitwise_xor.Scalar_Tensor": jnp.bitwise_xor,
        "bitwise_left_shift.Tensor bitwise_left_shift.Tensor_Scalar "
        "bitwise_left_shift.Scalar_Tensor __lshift__.Tensor __lshift__.Scalar": jnp.left_shift,
        "bitwise_right_shift.Tensor bitwise_right_shift.Tensor_Scalar "
        "bitwise_right_shift.Scalar_Tensor __rshift__.Tensor __rshift__.Scalar": jnp.right_shift,
        "gcd": lambda x, y: _gcd(x, y),
        "lcm": lambda x, y: jnp.abs(_quotient(x, _gcd(x, y)) * y),
        "sigmoid_backward": lambda g, y: g * jnp.conj(y * (1 - y)),
        "tanh_backward": lambda g, y: g * jnp.conj(1 - y * y),
        "silu_backward": lambda g, x: _silu_backward(g, x),
    },
)
_register(
    _comparison,
    {
        "eq.Tensor eq.Scalar": jnp.equal,
        "ne.Tensor ne.Scalar": jnp.not_equal,
        "lt.Tensor lt.Scalar": jnp.less,
        "le.Tensor le.Scalar": jnp.less_equal,
        "gt.Tensor gt.Scalar": jnp.greater,
        "ge.Tensor ge.Scalar": jnp.greater_equal,
        "isnan": jnp.isnan,
        "isinf": jnp.isinf,
        "signbit": jnp.signbit,
        "logical_and": jnp.logical_and,
        "logical_or": jnp.logical_or,
        "logical_xor": jnp.logical_xor,
        "logical_not": jnp.logical_not,
    },
)


@lower(aten.heaviside.default)
def _heaviside(x: Any, y: Any) -> Any:
    return jnp.where(x == 0, y, (x > 0).astype(y.dtype))


def _pow(x: Any, y: Any) -> Any:
    if x.dtype.kind not in "iu":
        power = jnp.logical_or(x, ~y) if x.dtype.kind == "b" else jnp.power(x, y)
        if power.dtype.kind != "c":
            return power
        return jnp.where((x == 0) & (jnp.real(y) > 0), 0, power)  # it is exp(y * log(0)) otherwise
    # torch rounds 1 / x**n to an integer; jnp.power leaves it undefined.
    inverse = jnp.where(x == 1, 1, jnp.where(x == -1, 1 - 2 * (y & 1), 0)).astype(x.dtype)
    return jnp.where(y < 0, inverse, _int_power(x, y))


def _int_power(x: Any, n: Any) -> Any:
    """x ** n for n >= 0, wrapped on overflow; jnp.power looks at six bits of n only."""

    def square(_: Any, state: Any) -> Any:
        product, base, m = state
        return product * jnp.where(m & 1, base, 1).astype(x.dtype), base * base, m >> 1

    x, n = jnp.broadcast_arrays(x, n)
    bits = jnp.iinfo(x.dtype).bits
    return lax.fori_loop(0, bits, square, (jnp.ones_like(x), x, n))[0]


def _sign(x: Any) -> Any:
    if x.dtype.kind == "b":
        return x
    return jnp.where(x != x, 0, jnp.sign(x)) if x.dtype.kind != "c" else jnp.sign(x)


def _digamma(x: Any) -> Any:
    return jnp.where(x == 0, jnp.copysign(jnp.inf, -x), special.digamma(x))


def _gcd(x: Any, y: Any) -> Any:
    """Euclid's algorithm; without signs, for the smallest number of a dtype has no opposite."""
    dtype = x.dtype
    if jnp.issubdtype(dtype, jnp.unsignedinteger):
        return jnp.gcd(x, y)
    unsigned = jnp.dtype(f"u{dtype.name}")
    return jnp.gcd(jnp.abs(x).astype(unsigned), jnp.abs(y).astype(unsigned)).astype(dtype)


def _quotient(x: Any, divisor: Any) -> Any:
    return jnp.where(divisor == 0, 0, jax.lax.div(x, jnp.where(divisor == 0, 1, divisor)))


def _silu_backward(grad: Any, x: Any) -> Any:
    s = jax.nn.sigmoid(x)
    return grad * jnp.conj(s * (1 + x * (1 - s)))


def _is_one(alpha: Any) -> bool:
    return isinstance(alpha, (int, float)) and alpha == 1


def _scaled(x: Any, alpha: Any, dtype: Any) -> Any:
    return x if _is_one(alpha) else x * _cast(alpha, dtype)


@lower(aten.add.Tensor, aten.add.Scalar, wants_meta=True)
def _add(x: Any, y: Any, alpha: Any = 1, *, meta: Any) -> Any:
    dtype = jax_dtype(meta.dtype)
    if not all(_is_array(v) and v.dtype == dtype for v in (x, y)) or not _is_one(alpha):
        dtype = _compute_dtype(dtype)
    # else: one sum of two numbers is rounded the same in half precision. Without converts between,
    # XLA sums what is to be reduced before it reduces: backward of q, k and v sends a third.
    x, y = _cast(x, dtype), _scaled(_cast(y, dtype), alpha, dtype)
    return jnp.logical_or(x, y) if meta.dtype == torch.bool else x + y


@lower(aten.sub.Tensor, aten.sub.Scalar, wants_meta=True)
def _sub(x: Any, y: Any, alpha: Any = 1, *, meta: Any) -> Any:
    dtype = _compute_dtype(jax_dtype(meta.dtype))
    return _cast(x, dtype) - _scaled(_cast(y, dtype), alpha, dtype)


@lower(aten.rsub.Tensor, aten.rsub.Scalar, wants_meta=True)
def _rsub(x: Any, y: Any, alpha: Any = 1, *, meta: Any) -> Any:
    dtype = _compute_dtype(jax_dtype(meta.dtype))
    return _cast(y, dtype) - _scaled(_cast(x, dtype), alpha, dtype)


@lower(aten.abs.default)
def _abs(x: Any) -> Any:
    return jnp.abs(x)


@lower(aten.bitwise_not.default)
def _bitwise_not(x: Any) -> Any:
    return jnp.invert(x)


def log_add_exp(x: Any, y: Any) -> Any:
    """log(exp(x) + exp(y)); of complex numbers with the imaginary part that torch's kernel gives.

    That is near the one of the larger number, and may be beyond pi: another branch than JAX's.
    """
    if x.dtype.kind != "c":
        return jnp.logaddexp(x, y)
    low, high = jnp.where(x.real < y.real, x, y), jnp.where(x.real >= y.real, x, y)
    is_edge = ~jnp.isfinite(low.real) & (low.real == high.real)
    edge = jnp.where(low.real < 0, low, jnp.log(jnp.exp(low) + jnp.exp(high)))
    log_sum = jnp.where(is_edge, edge, high + jnp.log1p(jnp.exp(low - high)))
    return jnp.where(jnp.isnan(x) | jnp.isnan(y), complex("nan+nanj"), log_sum)


def quotient(x: Any, y: Any) -> Any:
    """Return x / y, rounded once.

    XLA does not divide by a number or by what is broadcast, here or anywhere before: it multiplies
    with 1 / y, so that 41 / 41 may be less than 1 and its floor 0. A divisor that depends on x it
    leaves alone.
    """
    if isinstance(y, (int, float)) and abs(math.frexp(y)[0]) == 0.5:
        return x / y  # a power of two, of which 1 / y is exact
    # Without jnp.where, which is a call of a function in the program: optimizers divide often.
    x, y = jnp.broadcast_arrays(x, jnp.asarray(y, x.dtype))
    return x / lax.select(jnp.isnan(x), x, y)


@lower(
    aten.div.Tensor,
    aten.div.Scalar,
    aten.div.Tensor_mode,
    aten.div.Scalar_mode,
    wants_meta=True,
)
def _div(x: Any, y: Any, *, rounding_mode: str | None = None, meta: Any) -> Any:
    dtype = _compute_dtype(jax_dtype(meta.dtype))
    # Rounding to half precision hides what multiplying with 1 / y does; cutting off does not.
    is_hidden = dtype != jax_dtype(meta.dtype) and rounding_mode is None
    divide = jnp.divide if is_hidden or dtype.kind != "f" else quotient
    x = _cast(x, dtype)
    y = y if isinstance(y, (int, float)) and divide is quotient else _cast(y, dtype)
    if rounding_mode is None:
        return divide(x, y)
    if dtype.kind in "iu":
        integer_divide = jnp.floor_divide if rounding_mode == "floor" else lax.div
        return integer_divide(*jnp.broadcast_arrays(x, y))
    if rounding_mode == "trunc":
        # torch rounds to half precision first, but by a number: 6 / 0.3 is 20 then, not 19.99.
        return jnp.trunc(
            _rounded(divide(x, y), dtype if jnp.size(y) == 1 else jax_dtype(meta.dtype))
        )
    floor = jnp.floor_divide(x, y)
    sign = jnp.copysign(1, x) * jnp.copysign(1, _cast(y, dtype))
    return jnp.where(floor == 0, jnp.copysign(0, sign), floor).astype(dtype)


def _rounded(x: Any, dtype: Any) -> Any:
    if dtype == x.dtype:
        return x
    about = jnp.finfo(dtype)  # A cast there and back may be left out by XLA.
    return lax.reduce_precision(x, about.nexp, about.nmant)


@lower(aten.nextafter.default)
def _nextafter(x: Any, y: Any) -> Any:
    return jnp.nextafter(x, y)  # in their own dtype: of half precision too


@lower(aten.floor_divide.default, wants_meta=True)
def _floor_divide(x: Any, y: Any, *, meta: Any) -> Any:
    return _div(x, y, rounding_mode="floor", meta=meta)


@lower(aten.addcmul.default, wants_meta=True)
def _addcmul(x: Any, a: Any, b: Any, *, value: Any = 1, meta: Any) -> Any:
    dtype = _compute_dtype(jax_dtype(meta.dtype))
    x, a, b = (_cast(v, dtype) for v in (x, a, b))
    return x + _scaled(a * b, value, dtype)


@lower(aten.addcdiv.default, wants_meta=True)
def _addcdiv(x: Any, a: Any, b: Any, *, value: Any = 1, meta: Any) -> Any:
    dtype = _compute_dtype(jax_dtype(meta.dtype))
    x, a, b = (_cast(v, dtype) for v in (x, a, b))
    return x + _scaled(quotient(a, b), value, dtype)


@lower(aten.lerp.Tensor, aten.lerp.Scalar, wants_meta=True)
def _lerp(a: Any, b: Any, weight: Any, *, meta: Any) -> Any:
    dtype = _compute_dtype(jax_dtype(meta.dtype))
    a, b = _cast(a, dtype), _cast(b, dtype)
    if isinstance(weight, (int, float)):  # an optimizer's: the program has one of both formulas
        w = np.asarray(weight, dtype)
        return a + w * (b - a) if abs(w) < 0.5 else b - (b - a) * (1 - w)
    w = _cast(weight, dtype)
    return jnp.where(jnp.abs(w) < 0.5, a + w * (b - a), b - (b - a) * (1 - w))


@lower(aten.clamp.default, aten.clamp.Tensor, wants_meta=True)
def _clamp(x: Any, min: Any = None, max: Any = None, *, meta: Any) -> Any:
    dtype = jax_dtype(meta.dtype)
    x, min, max = _cast(x, dtype), _limit("min", min, dtype), _limit("max", max, dtype)
    x = x if min is None else jnp.maximum(x, _cast(min, dtype))
    return x if max is None else jnp.minimum(x, _cast(max, dtype))


def _limit(name: str, number: Any, dtype: Any) -> Any:
    """Return a limit that a whole number's dtype holds; None where all of its values keep it."""
    if not isinstance(number, int) or dtype.kind not in "iu":
        return number
    least, most = jnp.iinfo(dtype).min, jnp.iinfo(dtype).max
    if least <= number <= most:
        return number
    if (number < least) == (name == "min"):
        return None
    raise UnsupportedOpError(
        f"clamp was called with {name}={number} on a tensor of dtype={dtype}. No {dtype} keeps "
        f"that limit, which PyTorch refuses as well. Pass a number from {least} to {most}, or "
        "convert the tensor first."
    )


@lower(aten.clamp_min.default, aten.clamp_min.Tensor, wants_meta=True)
def _clamp_min(x: Any, min: Any, *, meta: Any) -> Any:
    return _clamp(x, min, meta=meta)


@lower(aten.clamp_max.default, aten.clamp_max.Tensor, wants_meta=True)
def _clamp_max(x: Any, max: Any, *, meta: Any) -> Any:
    return _clamp(x, None, max, meta=meta)


@lower(
    aten.where.self,
    aten.where.ScalarSelf,
    aten.where.ScalarOther,
    aten.where.Scalar,
    wants_meta=True,
)
def _where(condition: Any, x: Any, y: Any, *, meta: Any) -> Any:
    dtype = jax_dtype(meta.dtype)
    return jnp.where(condition, _cast(x, dtype), _cast(y, dtype))


@lower(aten.masked_fill.Scalar, aten.masked_fill.Tensor)
def _masked_fill(x: Any, mask: Any, value: Any) -> Any:
    return jnp.where(mask, jnp.asarray(value).astype(x.dtype), x)


@lower(aten.threshold_backward.default)
def _threshold_backward(grad: Any, x: Any, threshold: Any) -> Any:
    return jnp.where(x <= threshold, jnp.zeros_like(grad), grad)


@lower(aten.gelu_backward.default, wants_meta=True)
def _gelu_backward(grad: Any, x: Any, *, approximate: str = "none", meta: Any) -> Any:
    dtype = _compute_dtype(jax_dtype(meta.dtype))
    _, pull = jax.vjp(lambda v: _gelu(v, approximate), x.astype(dtype))
    return pull(grad.astype(dtype))[0]


@lower(aten.nan_to_num.default)
def _nan_to_num(x: Any, nan: Any = None, posinf: Any = None, neginf: Any = None) -> Any:
    return jnp.nan_to_num(x, nan=0.0 if nan is None else nan, posinf=posinf, neginf=neginf)


_MOST_STEPS = 10_000


@lower(aten.polygamma.default, wants_meta=True)
def _polygamma(order: int, x: Any, *, meta: Any) -> Any:
    x = x.astype(_compute_dtype(jax_dtype(meta.dtype)))
    if order == 0:
        return _digamma(x)
    # In float32 the sums below are off by 8 to 16 units in the last place.
    x = x.astype(jnp.float64)
    # JAX's is right for positive numbers only. Each step to the right takes away one term of the
    # sum over 1 / (x + k)**(order + 1); there are as many steps as the least number needs.
    steps = jnp.ceil(jnp.clip(1 - jnp.min(x, initial=1.0), 0, _MOST_STEPS)).astype(jnp.int32)

    def step(_: Any, carry: Any) -> Any:
        total, at = carry
        is_low = at < 1
        term = jnp.where(is_low, jnp.where(is_low, at, 1.0) ** -(order + 1.0), 0.0)
        return total + term, jnp.where(is_low, at + 1, at)

    total, at = jax.lax.fori_loop(0, steps, step, (jnp.zeros_like(x), x))
    sign = 1.0 if order % 2 else -1.0
    return sign * math.factorial(order) * total + special.polygamma(order, at)


@lower(aten.softplus.default, wants_meta=True)
def _softplus(x: Any, beta: Any = 1, threshold: Any = 20, *, meta: Any) -> Any:
    x = x.astype(_compute_dtype(jax_dtype(meta.dtype)))
    return jnp.where(
        x * beta > threshold, x, jnp.log1p(jnp.exp(jnp.minimum(x * beta, threshold))) / beta
    )


# ---------------------------------------------------------------------------------------- Shrinking
#
# The backward of the shrinking activations, which set what is near zero to zero.


@lower(aten.hardshrink_backward.default, aten.softshrink_backward.default)
def _shrink_backward(grad: Any, x: Any, lambd: Any) -> Any:
    return jnp.where((x >= -lambd) & (x <= lambd), 0, grad)
