"""Random ops.

Every call takes a fresh key from the runtime's generator, a storage like any other, so a compiled
step reads and advances it as part of its state.

The values differ from torch's CPU generator; shapes, dtypes and distributions are torch's. But each
call also draws one number from that generator, as a mark: a mark that comes again is torch going
back to where it was, and gets the key it had. So ``torch.utils.checkpoint``, which rewinds torch's
generator, repeats the dropout of its forward pass, and ``torch.manual_seed`` starts anew. The keys
themselves do not depend on the marks, of which processes may draw different ones.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from xla_dtensor.runtimes.jax_convert import jax_dtype, x64
from xla_dtensor.runtimes.jax_lowering.table import Lowering, lower
from xla_dtensor.runtimes.jax_trace import active_trace

__all__ = ["draws", "lent", "next_key_data", "seed"]

aten = torch.ops.aten
_state: Any = None
_torch_seed: int | None = None  # torch's seed when the generator was started last
_MARKS_KEPT = 16_384
_eager_keys: OrderedDict[int, Any] = OrderedDict()
_lent: list[Any] | None = None  # the one key of the lowering that runs on a device's tile
_traced_keys: weakref.WeakKeyDictionary[Any, OrderedDict[int, Any]] = weakref.WeakKeyDictionary()


def seed(number: int) -> None:
    """Start the generator anew from `number`."""
    _eager_keys.clear()
    _start(number)


def _start(number: int) -> None:
    from xla_dtensor.runtimes.jax_tensor import Storage

    global _state, _torch_seed
    _torch_seed = torch.initial_seed()
    with x64():
        key = jnp.asarray(np.array([(number >> 32) & 0xFFFFFFFF, number & 0xFFFFFFFF], np.uint32))
        if _state is None:
            _state = Storage(key)
        else:
            _state.write(key)


def next_key() -> Any:
    """Return a key to use once; the one it gave before where torch's generator was rewound."""
    if _lent is not None:
        key, _lent[0] = jax.random.split(_lent[0])
        return key
    trace = active_trace()
    if _state is None or (trace is None and torch.initial_seed() != _torch_seed):
        _start(torch.initial_seed() % 2**63)
    keys = _eager_keys if trace is None else _traced_keys.setdefault(trace, OrderedDict())
    mark = int(torch.randint(2**63 - 1, (), device="cpu"))
    if mark not in keys:
        keys[mark] = _fresh_key()
        if len(keys) > _MARKS_KEPT:
            keys.popitem(last=False)
    return keys[mark]


def next_key_data() -> Any:
    """Return :func:`next_key` as two integers, to be handed to :func:`lent`."""
    return jax.random.key_data(next_key())


def draws(lowering: Lowering) -> bool:
    """Tell whether a lowering takes a key."""
    return lowering.function.__module__ == __name__


@contextlib.contextmanager
def lent(key_data: Any, device: Any) -> Iterator[None]:
    """Let lowerings draw from a key made for one device.

    On a device's own tile the generator's storage is out of reach, and with one key for all the
    devices would draw the same numbers.

    Args:
        key_data: From :func:`next_key_data`.
        device: The device's number among those that draw, a 0-dim array.
    """
    global _lent
    key = jax.random.wrap_key_data(key_data, impl="threefry2x32")
    _lent = [jax.random.fold_in(key, device)]
    try:
        yield
    finally:
        _lent = None


def _fresh_key() -> Any:
    assert _state is not None
    following, key = jax.random.split(jax.random.wrap_key_data(_state.read(), impl="threefry2x32"))
    _state.write(jax.random.key_data(following))
    return key


def _float(meta: Any) -> Any:
    return jnp.promote_types(jax_dtype(meta.dtype), jnp.float32)


@lower(aten.rand_like.default, wants_meta=True)
def _rand_like(*_: Any, meta: Any, **__: Any) -> Any:
    return jax.random.uniform(next_key(), meta.shape, _float(meta))


@lower(aten.randn_like.default, wants_meta=True)
def _randn_like(*_: Any, meta: Any, **__: Any) -> Any:
    return jax.random.normal(next_key(), meta.shape, _float(meta))


@lower(aten.normal_functional.default, wants_meta=True)
def _normal(x: Any, mean: Any = 0, std: Any = 1, *, generator: Any = None, meta: Any) -> Any:
    return mean + std * jax.random.normal(next_key(), meta.shape, _float(meta))


@lower(aten.uniform.default, wants_meta=True)
def _uniform(x: Any, low: Any = 0, high: Any = 1, *, generator: Any = None, meta: Any) -> Any:
    return low + (high - low) * jax.random.uniform(next_key(), meta.shape, _float(meta))


@lower(aten.bernoulli.default)
def _bernoulli(x: Any, *, generator: Any = None) -> Any:
    return jax.random.bernoulli(next_key(), x).astype(x.dtype)


@lower(aten.bernoulli.p)
def _bernoulli_p(x: Any, p: Any = 0.5, *, generator: Any = None) -> Any:
    return jax.random.bernoulli(next_key(), p, x.shape).astype(x.dtype)


@lower(aten.exponential.default, wants_meta=True)
def _exponential(x: Any, lambd: Any = 1, *, generator: Any = None, meta: Any) -> Any:
    return jax.random.exponential(next_key(), meta.shape, _float(meta)) / lambd


@lower(aten.native_dropout.default)
def _dropout(x: Any, p: float, train: bool | None) -> Any:
    if train is False or p == 0:
        return x, jnp.ones(x.shape, jnp.bool_)
    kept = jax.random.bernoulli(next_key(), 1 - p, x.shape)
    return jnp.where(kept, x / (1 - p), 0).astype(x.dtype), kept
