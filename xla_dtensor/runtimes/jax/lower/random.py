"""Random ops.

Shapes, dtypes and distributions are torch's; the values are another generator's
(:mod:`xla_dtensor.runtimes.jax.lower.random`) and do not depend on how the tensor lies.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.core import Tracer
from jax.experimental import multihost_utils

from xla_dtensor.core.errors import CompileError, UnsupportedOpError
from xla_dtensor.runtimes.host_work.generators import draw_mark
from xla_dtensor.runtimes.jax.arrays.sharding import sharding_of_new
from xla_dtensor.runtimes.jax.arrays.storage import Storage
from xla_dtensor.runtimes.jax.arrays.trace import active_trace, is_tracer, refuse_read
from xla_dtensor.runtimes.jax.arrays.values import jax_dtype, x64
from xla_dtensor.runtimes.jax.lower.table import Lowering, lower
from xla_dtensor.runtimes.nested import leaves, map_nested

__all__ = [
    "as_one",
    "drawing_from",
    "draws",
    "first_process_state",
    "keep_beside",
    "new_rng",
    "next_key",
    "next_key_data",
    "put_back_beside",
    "read",
    "seed",
    "span",
    "start",
    "storage",
    "using",
    "write",
]


# ----------------------------------------- The devices' random number generator on the JAX runtime
#
# Every draw takes a fresh key from it.
#
# Its state is a storage like any other, so a compiled step reads and advances it as part of its own
# state. Values are counted from a key by the position in the global tensor (JAX's partitionable
# generator): they do not depend on how a tensor lies.
#
# Each draw also takes one number from torch's CPU generator, as a mark: a mark that comes again is
# torch going back to where it was, and gets the key it had. So ``torch.utils.checkpoint``, which
# rewinds torch's generator and knows of no other here, repeats the dropout of its forward pass. The
# keys themselves do not depend on the marks, of which processes may draw different ones.

#
# Where torch's state was asked for, this one's is kept beside it, and is in use again when torch's
# is set again: ``torch.random.fork_rng()`` puts both back.

_state: Storage | None = None
_is_other = False  # whether it is one that `using` has put there
_STATES_KEPT = 256
_eager_states: OrderedDict[bytes, Any] = OrderedDict()
_traced_states: weakref.WeakKeyDictionary[Any, OrderedDict[bytes, Any]] = (
    weakref.WeakKeyDictionary()
)
_MARKS_KEPT = 16_384
_eager_keys: weakref.WeakKeyDictionary[Storage, OrderedDict[int, Any]] = weakref.WeakKeyDictionary()
_device_key: list[Any] | None = None  # the one key of the lowering that runs on a device's tile
_traced_keys: weakref.WeakKeyDictionary[Any, OrderedDict[int, Any]] = weakref.WeakKeyDictionary()


def _words(number: int) -> np.ndarray[Any, Any]:
    return np.array([(number >> 32) & 0xFFFFFFFF, number & 0xFFFFFFFF], np.uint32)


def new_rng(number: int) -> Storage:
    """Return a generator beside the one in use, started from `number`."""
    with x64():
        return Storage(jnp.asarray(_words(number)))


def start() -> None:
    """Make the generator in use from torch's seed.

    Of several processes the first one's: if nobody set them, torch's seeds differ.
    """
    global _state
    if _state is None:
        number = torch.initial_seed()
        _state = new_rng(_of_first_process(number) if jax.process_count() > 1 else number)


def _of_first_process(number: int) -> int:
    high, low = multihost_utils.broadcast_one_to_all(_words(number)).tolist()
    return (high << 32) | low


def first_process_state() -> int:
    """Return what :func:`read` returns in the first process. All processes call this alike."""
    number = read(None)
    return _of_first_process(number) if jax.process_count() > 1 else number


def _current() -> Storage:
    if _state is None:
        start()
    assert _state is not None
    return _state


def storage() -> Storage | None:
    """Return where the state of the generator in use lies; None before it is started."""
    return _state


def seed(number: int) -> None:
    """Start the generator in use anew from `number`."""
    write(number, None)


def write(number: int, rng: Storage | None) -> None:
    """Put a generator, or the one in use, into a state that :func:`read` returned."""
    # Who sets the state wants what follows from it, not what an old mark would repeat.
    storage, words = rng or _current(), _words(number)
    (_eager_keys if active_trace() is None else _keys(storage)).clear()
    with x64():
        storage.write(jnp.asarray(words))


def read(rng: Storage | None) -> int:
    """Return the state of a generator, or of the one in use, as a number below 2**64."""
    array = (rng or _current()).array
    if is_tracer(array) or active_trace() is not None:
        refuse_read("asked for, that of the random number generator's state,")
    high, low = np.asarray(array.addressable_data(0)).tolist()
    return (high << 32) | low


def _states() -> OrderedDict[bytes, Any]:
    trace = active_trace()
    return _eager_states if trace is None else _traced_states.setdefault(trace, OrderedDict())


def _is_of_a_block() -> bool:
    """Tell whether draws are a scanned block's, or a tile's: only marks repeat what they draw."""
    return _device_key is not None or (_is_other and active_trace() is not None)


def keep_beside(torch_state: bytes) -> None:
    """Keep the state of the generator in use for when torch's is set to what it is now."""
    if _state is None or _is_of_a_block():
        return
    array, states = _state.read(), _states()
    with x64():
        # A program that runs next takes the array over.
        states[torch_state] = jnp.array(array, copy=True) if active_trace() is None else array
    if len(states) > _STATES_KEPT:
        states.popitem(last=False)


def put_back_beside(torch_state: bytes) -> None:
    """Go back to the state that was kept beside one of torch's, if there is one."""
    kept = _states().get(torch_state)
    if kept is None or _is_of_a_block() or _current().read() is kept:
        return  # or nothing was drawn since
    with x64():
        if active_trace() is None:
            _keys(_current()).clear()  # The state itself gives them again.
            kept = jnp.array(kept, copy=True)
        _current().write(kept)


@contextlib.contextmanager
def using(rng: Storage) -> Iterator[None]:
    """Let draws take from `rng` and advance it, and leave the generator in use alone."""
    global _state, _is_other
    outer, _state, was_other, _is_other = _current(), rng, _is_other, True
    try:
        yield
    finally:
        _state, _is_other = outer, was_other


def _keys(rng: Storage) -> OrderedDict[int, Any]:
    """Return the keys that draws from a generator were given, by their marks."""
    trace = active_trace()
    if trace is None:
        return _eager_keys.setdefault(rng, OrderedDict())
    return _traced_keys.setdefault(trace, OrderedDict())


def next_key(generator: torch.Generator | None = None) -> Any:
    """Return a key to use once; the one it gave before where torch's generator was rewound.

    Args:
        generator: The user's own, from which one number is drawn to be the key.
    """
    global _device_key
    if generator is not None:
        return _key_from(generator)
    if _device_key is not None:
        key, _device_key[0] = jax.random.split(_device_key[0])
        return key
    mark, rng = _mark(), _current()
    keys = _keys(rng)
    if mark in keys:
        key, before, after = keys[mark]
        if rng.read() is before:  # It was put back as well, and moves on as it did.
            rng.write(after)
        return key
    before = rng.read() if active_trace() is not None else None
    key = _fresh_key()
    keys[mark] = key, before, None if before is None else rng.read()
    if len(keys) > _MARKS_KEPT:
        keys.popitem(last=False)
    return key


def span() -> tuple[Any, Callable[[Any], None]]:
    """Return the state to draw many times from, and a function that is given the state after.

    Where torch's generator was rewound, the state is the one it gave before, and what is drawn
    from it again moves nothing.
    """
    mark, rng = _mark(), _current()
    keys = _keys(rng)
    if mark in keys:
        return keys[mark], rng.write if rng.read() is keys[mark] else lambda new_state: None
    keys[mark] = state = rng.read()
    return state, rng.write


def _mark() -> int:
    """Draw a mark, past what notes the draws that a step makes on the host."""
    trace = active_trace()
    if trace is not None and trace.host is not None:
        return trace.host.tape.mark()
    return draw_mark()


def _key_from(generator: torch.Generator) -> Any:
    if _device_key is not None:
        raise UnsupportedOpError(
            f"A random op was given generator={generator} on tensors that differ by device. One "
            "generator would give all devices the same numbers. Leave it out, and seed by "
            "xla_dtensor.manual_seed."
        )
    if active_trace() is not None:
        raise CompileError(
            f"A random op was given generator={generator} in a compiled step. The generator lives "
            "in Python, and every call of the program would repeat the numbers of the first. "
            "Leave it out, or draw outside and pass the tensor."
        )
    number = int(torch.randint(2**63 - 1, (), device="cpu", generator=generator))
    with x64():
        return jax.random.wrap_key_data(jnp.asarray(_words(number)), impl="threefry2x32")


def next_key_data() -> Any:
    """Return :func:`next_key` as two integers, to be handed to :func:`drawing_from`."""
    return jax.random.key_data(next_key())


@contextlib.contextmanager
def drawing_from(key_data: Any, device: Any) -> Iterator[None]:
    """Let lowerings draw from a key made for one device.

    On a device's own tile the generator's storage is out of reach, and with one key for all the
    devices would draw the same numbers.

    Args:
        key_data: From :func:`next_key_data`.
        device: The device's number among those that draw, a 0-dim array.
    """
    global _device_key
    key = jax.random.wrap_key_data(key_data, impl="threefry2x32")
    _device_key = [jax.random.fold_in(key, device)]
    try:
        yield
    finally:
        _device_key = None


def _fresh_key() -> Any:
    state = _current()
    following, key = jax.random.split(jax.random.wrap_key_data(state.read(), impl="threefry2x32"))
    state.write(jax.random.key_data(following))
    return key


# ------------------------- Run a lowering of many steps as one program, when it is called op by op
#
# Outside a compiled step every JAX function is a program of its own, and a loop is compiled anew at
# each call. A lowering with this decorator is one program per kind of arguments, and is kept.

_Programs = dict[Hashable, Callable[..., Any]]
_LIMIT = 1024


class _Place:
    """Stands for an array among the arguments."""


_PLACE = _Place()


def as_one(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a lowering that runs as one program; inside another program it changes nothing.

    Args:
        function: Takes arrays, and other values that may be hashed when lists become tuples.

    Example:
        >>> double_all = as_one(lambda x, times: x * times)
        >>> double_all(np.ones(2, np.float32), 2)
        Array([2., 2.], dtype=float32)
    """
    programs: _Programs = {}

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        arguments = (args, kwargs)
        arrays = [v for v in leaves(arguments) if _place_of_array(v) is _PLACE]
        if any(isinstance(array, Tracer) for array in arrays):
            return function(*args, **kwargs)
        template = map_nested(_place_of_array, arguments)
        # 1, 1.0 and True are equal, and None of them means the same.
        kinds = tuple(type(v) for v in leaves(template))
        key = (_hashable(template), kinds, torch.get_float32_matmul_precision())
        if key not in programs:
            if len(programs) >= _LIMIT:
                programs.clear()
            programs[key] = jax.jit(functools.partial(_filled, function, template))
        return programs[key](*arrays)

    return run


def _place_of_array(argument: Any) -> Any:
    return _PLACE if isinstance(argument, (jax.Array, np.ndarray)) else argument


def _filled(function: Callable[..., Any], template: Any, *arrays: Any) -> Any:
    following = iter(arrays)
    args, kwargs = map_nested(lambda v: next(following) if v is _PLACE else v, template)
    return function(*args, **kwargs)


def _hashable(structure: Any) -> Hashable:
    if isinstance(structure, (tuple, list)):
        return (type(structure), *map(_hashable, structure))
    if isinstance(structure, dict):
        return tuple((name, _hashable(v)) for name, v in structure.items())
    return structure


# -------------------------------------------------------------------------------------- Random ops

aten = torch.ops.aten


def draws(lowering: Lowering) -> bool:
    """Tell whether a lowering takes a key."""
    return lowering.function.__module__ == __name__


def _float(meta: Any) -> Any:
    return jnp.promote_types(jax_dtype(meta.dtype), jnp.float32)


@functools.lru_cache(maxsize=512)
def _sampler(sample: Any, sharding: Any, *facts: Any) -> Callable[[Any], Any]:
    return jax.jit(lambda key: sample(key, *facts), out_shardings=sharding)


def _drawn(shape: Any, sample: Callable[..., Any], key: Any, *facts: Any) -> Any:
    """Return what a function of JAX draws, each device its part; the numbers are the same.

    Args:
        shape: Of what is drawn.
        sample: Takes a key, and `facts`.
        key: The key.
        facts: The shape, a dtype, numbers.
    """
    sharding = sharding_of_new(shape)
    if sharding is None or any(isinstance(fact, jax.Array) for fact in facts):
        return sample(key, *facts)
    return _sampler(sample, sharding, *facts)(key)


# ------------------------------------------------------------------ continuous


@lower(aten.rand_like.default, wants_meta=True)
def _rand_like(*_: Any, meta: Any, **__: Any) -> Any:
    return _drawn(meta.shape, jax.random.uniform, next_key(), meta.shape, _float(meta))


@lower(aten.randn_like.default, wants_meta=True)
def _randn_like(*_: Any, meta: Any, **__: Any) -> Any:
    return _drawn(meta.shape, jax.random.normal, next_key(), meta.shape, _float(meta))


@lower(aten.normal_functional.default, wants_meta=True)
def _normal(x: Any, mean: Any = 0, std: Any = 1, *, generator: Any = None, meta: Any) -> Any:
    key, dtype = next_key(generator), _float(meta)
    return mean + std * _drawn(meta.shape, jax.random.normal, key, meta.shape, dtype)


@lower(aten.normal.Tensor_float, aten.normal.float_Tensor, aten.normal.Tensor_Tensor)
def _normal_of(mean: Any, std: Any = 1, *, generator: Any = None) -> Any:
    shape = jnp.broadcast_shapes(jnp.shape(mean), jnp.shape(std))
    dtype = jnp.result_type(mean, std)
    wide = jnp.promote_types(dtype, jnp.float32)
    return (mean + std * jax.random.normal(next_key(generator), shape, wide)).astype(dtype)


@lower(aten.log_normal.default, wants_meta=True)
def _log_normal(x: Any, mean: Any = 1, std: Any = 2, *, generator: Any = None, meta: Any) -> Any:
    key, dtype = next_key(generator), _float(meta)
    return jnp.exp(mean + std * _drawn(meta.shape, jax.random.normal, key, meta.shape, dtype))


@lower(aten.cauchy.default, wants_meta=True)
def _cauchy(x: Any, median: Any = 0, sigma: Any = 1, *, generator: Any = None, meta: Any) -> Any:
    key, dtype = next_key(generator), _float(meta)
    return median + sigma * _drawn(meta.shape, jax.random.cauchy, key, meta.shape, dtype)


@lower(aten.uniform.default, wants_meta=True)
def _uniform(x: Any, low: Any = 0, high: Any = 1, *, generator: Any = None, meta: Any) -> Any:
    key, dtype = next_key(generator), _float(meta)
    return low + (high - low) * _drawn(meta.shape, jax.random.uniform, key, meta.shape, dtype)


@lower(aten.exponential.default, wants_meta=True)
def _exponential(x: Any, lambd: Any = 1, *, generator: Any = None, meta: Any) -> Any:
    key, dtype = next_key(generator), _float(meta)
    return _drawn(meta.shape, jax.random.exponential, key, meta.shape, dtype) / lambd


@lower(aten._standard_gamma.default)
def _standard_gamma(x: Any, generator: Any = None) -> Any:
    return jax.random.gamma(next_key(generator), x, dtype=x.dtype)


@lower(aten._sample_dirichlet.default)
def _sample_dirichlet(x: Any, generator: Any = None) -> Any:
    drawn = jax.random.gamma(next_key(generator), x, dtype=x.dtype)
    return drawn / drawn.sum(-1, keepdims=True)


# ------------------------------------------------------------------ discrete


@lower(aten.bernoulli.default)
def _bernoulli(x: Any, *, generator: Any = None) -> Any:
    drawn = jax.random.bernoulli(next_key(generator), x).astype(x.dtype)
    return jnp.where((x >= 0) & (x <= 1), drawn, jnp.nan)


@lower(aten.bernoulli.p, aten.bernoulli.Tensor)
def _bernoulli_p(x: Any, p: Any = 0.5, *, generator: Any = None) -> Any:
    return _drawn(x.shape, jax.random.bernoulli, next_key(generator), p, x.shape).astype(x.dtype)


@lower(aten.randint_like.default, wants_meta=True)
def _randint_like(x: Any, high: Any, *, meta: Any, **_: Any) -> Any:
    return _drawn(meta.shape, jax.random.randint, next_key(), meta.shape, 0, high, jnp.int64)


@lower(aten.randint_like.low_dtype, wants_meta=True)
def _randint_like_from(x: Any, low: Any, high: Any, *, meta: Any, **_: Any) -> Any:
    return _drawn(meta.shape, jax.random.randint, next_key(), meta.shape, low, high, jnp.int64)


@lower(aten.random.default, aten.random.to)
def _random(x: Any, to: Any = None, *, generator: Any = None) -> Any:
    return _random_from(x, 0, to, generator=generator)


@lower(getattr(aten.random, "from"))
def _random_from(x: Any, low: Any, to: Any = None, *, generator: Any = None) -> Any:
    key = next_key(generator)
    if to is None and jnp.issubdtype(x.dtype, jnp.floating):
        to = 2 ** (jnp.finfo(x.dtype).nmant + 1) + 1  # integers that the dtype holds exactly
    elif to is None and x.dtype == jnp.int64:
        if low == 0:
            return (_drawn(x.shape, jax.random.bits, key, x.shape, jnp.uint64) >> 1).astype(x.dtype)
        to = 2**63 - 1
    elif to is None:
        to = 2 if x.dtype == jnp.bool_ else jnp.iinfo(x.dtype).max + 1
    return _drawn(x.shape, jax.random.randint, key, x.shape, low, to, jnp.int64).astype(x.dtype)


@lower(aten.geometric.default, wants_meta=True)
def _geometric(x: Any, p: Any, *, generator: Any = None, meta: Any) -> Any:
    key, dtype = next_key(generator), _float(meta)
    drawn = _drawn(meta.shape, jax.random.uniform, key, meta.shape, dtype)
    return jnp.ceil(jnp.log1p(-drawn) / jnp.log1p(-p)).clip(1)


@lower(aten.poisson.default)
def _poisson(x: Any, generator: Any = None) -> Any:
    return jax.random.poisson(next_key(generator), x, dtype=jnp.int64).astype(x.dtype)


@lower(aten.binomial.default)
def _binomial(count: Any, prob: Any, generator: Any = None) -> Any:
    wide = jnp.promote_types(count.dtype, jnp.float32)
    drawn = jax.random.binomial(next_key(generator), count, prob, dtype=wide)
    return drawn.astype(count.dtype)


@lower(aten.multinomial.default)
def _multinomial(
    x: Any, num_samples: Any, replacement: Any = False, *, generator: Any = None
) -> Any:
    logits = jnp.log(x.astype(jnp.promote_types(x.dtype, jnp.float32)))
    key = next_key(generator)
    if replacement:
        shape = (num_samples, *x.shape[:-1])
        return jnp.moveaxis(jax.random.categorical(key, logits, shape=shape), 0, -1)
    return jax.lax.top_k(logits + jax.random.gumbel(key, x.shape, logits.dtype), num_samples)[1]


# ------------------------------------------------------------------ in networks


@lower(aten.native_dropout.default)
def _dropout(x: Any, p: float, train: bool | None) -> Any:
    if train is False or p == 0:
        return x, jnp.ones(x.shape, jnp.bool_)
    mask = _drawn(x.shape, jax.random.bernoulli, next_key(), 1 - p, x.shape)
    return jnp.where(mask, x / (1 - p), 0).astype(x.dtype), mask


@lower(aten.rrelu_with_noise_functional.default)
def _rrelu(
    x: Any,
    noise: Any,
    lower: Any = 1 / 8,
    upper: Any = 1 / 3,
    training: Any = False,
    generator: Any = None,
) -> Any:
    if not training:
        return jnp.where(x <= 0, x * ((lower + upper) / 2), x).astype(x.dtype), noise
    key, shape = next_key(generator), x.shape
    drawn = _drawn(shape, jax.random.uniform, key, shape, jnp.float32, lower, upper)
    slope = jnp.where(x <= 0, drawn.astype(x.dtype), 1).astype(x.dtype)
    return x * slope, slope
