"""The devices' random number generator on the JAX runtime: every draw takes a fresh key from it.

Its state is a storage like any other, so a compiled step reads and advances it as part of its own
state. Values are counted from a key by the position in the global tensor (JAX's partitionable
generator): they do not depend on how a tensor lies.

Each draw also takes one number from torch's CPU generator, as a mark: a mark that comes again is
torch going back to where it was, and gets the key it had. So ``torch.utils.checkpoint``, which
rewinds torch's generator and knows of no other here, repeats the dropout of its forward pass. The
keys themselves do not depend on the marks, of which processes may draw different ones.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.experimental import multihost_utils

from xla_dtensor.errors import CompileError, UnsupportedOpError
from xla_dtensor.runtimes.jax_convert import x64
from xla_dtensor.runtimes.jax_tensor import Storage
from xla_dtensor.runtimes.jax_trace import active_trace, is_tracer, refuse_read

__all__ = [
    "first_process_state",
    "lent",
    "new_rng",
    "next_key",
    "next_key_data",
    "read",
    "seed",
    "span",
    "start",
    "storage",
    "using",
    "write",
]

_state: Storage | None = None
_MARKS_KEPT = 16_384
_eager_keys: OrderedDict[int, Any] = OrderedDict()
_lent: list[Any] | None = None  # the one key of the lowering that runs on a device's tile
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
    _keys().clear()
    storage, words = rng or _current(), _words(number)
    with x64():
        storage.write(jnp.asarray(words))


def read(rng: Storage | None) -> int:
    """Return the state of a generator, or of the one in use, as a number below 2**64."""
    array = (rng or _current()).array
    if is_tracer(array) or active_trace() is not None:
        refuse_read("asked for, that of the random number generator's state,")
    high, low = np.asarray(array.addressable_data(0)).tolist()
    return (high << 32) | low


@contextlib.contextmanager
def using(rng: Storage) -> Iterator[None]:
    """Let draws take from `rng` and advance it, and leave the generator in use alone."""
    global _state
    before, _state = _current(), rng
    try:
        yield
    finally:
        _state = before


def _keys() -> OrderedDict[int, Any]:
    trace = active_trace()
    return _eager_keys if trace is None else _traced_keys.setdefault(trace, OrderedDict())


def next_key(generator: torch.Generator | None = None) -> Any:
    """Return a key to use once; the one it gave before where torch's generator was rewound.

    Args:
        generator: The user's own, from which one number is drawn to be the key.
    """
    global _lent
    if generator is not None:
        return _key_from(generator)
    if _lent is not None:
        key, _lent[0] = jax.random.split(_lent[0])
        return key
    mark, keys = int(torch.randint(2**63 - 1, (), device="cpu")), _keys()
    if mark not in keys:
        keys[mark] = _fresh_key()
        if len(keys) > _MARKS_KEPT:
            keys.popitem(last=False)
    return keys[mark]


def span() -> tuple[Any, Callable[[Any], None]]:
    """Return the state to draw many times from, and a function that is given the state after.

    Where torch's generator was rewound, the state is the one it gave before, and what is drawn
    from it again moves nothing.
    """
    mark, keys = int(torch.randint(2**63 - 1, (), device="cpu")), _keys()
    if mark in keys:
        return keys[mark], lambda after: None
    keys[mark] = before = _current().read()
    return before, _current().write


def _key_from(generator: torch.Generator) -> Any:
    if _lent is not None:
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
    """Return :func:`next_key` as two integers, to be handed to :func:`lent`."""
    return jax.random.key_data(next_key())


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
    state = _current()
    following, key = jax.random.split(jax.random.wrap_key_data(state.read(), impl="threefry2x32"))
    state.write(jax.random.key_data(following))
    return key
