"""Does PyTorch take a call? Asked of PyTorch itself, on stand-ins.

XLA takes calls that PyTorch refuses::

    x.fill_(300)        of int8; and 1j written to float32: a number that the dtype does not hold
    x ** -1             of whole numbers
    mask - x            of bools
    x.add_(wider)       whose result does not fit its destination
    maximum(x, y)       of complex numbers, and x.abs_()

In-place ops and ops with ``out=`` keep their destination: the object, its shape, dtype and
placements. PyTorch makes ``out`` another shape, with a warning, where that does not fit: here that
is an error too, because ``out`` lies on the mesh as it was told to.

Each description of arguments is asked about once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch.distributed.tensor import Shard

from xla_dtensor.core.errors import UnsupportedOpError, WriteError
from xla_dtensor.dtensor.state import GlobalState
from xla_dtensor.runtimes.nested import leaves, map_nested
from xla_dtensor.runtimes.op_meta import error_of, small
from xla_dtensor.runtimes.registry import get_runtime
from xla_dtensor.runtimes.written import refuse_overlap, written_values

__all__ = ["check_call", "is_checked", "tell_bases", "tell_known"]


# --------------------------------- Does PyTorch take a call? Asked of PyTorch itself, on stand-ins

aten = torch.ops.aten
# Ops that write to nothing, of which PyTorch refuses some bools and numbers.
_CHECKED = {
    *(aten.sub, aten.rsub, aten.neg, aten.clamp, aten.masked_fill, aten.index_fill, aten.scatter),
    *(aten.full_like, aten.heaviside, aten.new_full, aten.pow),
    *(aten.maximum, aten.minimum, aten.fmax, aten.fmin),
}
# What PyTorch raises of a destination; a stand-in may raise other things that do not matter.
_OF_RESULTS = ("can't be cast to", "doesn't match the broadcast shape")
_OF_ARGUMENTS = (
    "without overflow",
    "a bool tensor is not supported",
    "Converting complex Scalar",
    "for tensors with different dtypes",
    "negative integer powers",
)
_OF_COMPLEX = ("not implemented for complex", "not supported for complex")
_checked: set[Any] = set()
_CHECKED_LIMIT = 50_000


def is_checked(func: Any) -> bool:
    """Whether calls of an op have to be checked."""
    return func._schema.is_mutable or func.overloadpacket in _CHECKED


def check_call(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], key: Sequence[Any]
) -> None:
    """Raise where PyTorch does not take a call that XLA would.

    Args:
        func: An ``OpOverload``.
        args: Its arguments.
        kwargs: Its keyword arguments.
        key: What tells this call apart from others, shapes and dtypes included.

    Raises:
        WriteError: The result of an op that writes has another shape, or a dtype that PyTorch does
            not cast; or the destination is an expanded tensor, or does not hold a number.
        UnsupportedOpError: Another op does not take these dtypes, or this number.
    """
    try:
        whole = tuple(key)
        if whole in _checked:
            return
    except TypeError:  # an argument that has no hash
        whole = None
    _check(func, args, kwargs)
    if whole is not None:
        if len(_checked) >= _CHECKED_LIMIT:
            _checked.clear()
        _checked.add(whole)


def _check(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    if func._schema.is_mutable:
        # torch_xla adds up what is written to elements that share a place.
        refuse_overlap(func, args, kwargs, fills=get_runtime().has_strides)
    if func.namespace != "aten" or torch.Tag.nondeterministic_seeded in func.tags:
        return
    outs = {a.name: kwargs[a.name] for a in func._schema.arguments if a.is_out and a.name in kwargs}
    # PyTorch's meta kernels know of shapes, and cast where those for values refuse. An op may raise
    # anything on values that are not its own: such errors say nothing.
    for stand_in in (_on_meta, small) if func._schema.is_mutable else (small,):
        found = map_nested(stand_in, (tuple(args), dict(kwargs)))
        # An empty destination takes any shape without a warning.
        empty = map_nested(lambda v, make=stand_in: _emptied(make(v)), outs)
        error = error_of(func, found[0], {**found[1], **empty})
        text = str(error)
        if any(refusal in text for refusal in _OF_RESULTS):
            raise WriteError(
                f"{func} was called on DTensors: {error}. An op that writes keeps the shape and "
                "dtype of its destination. Use the op that returns its result, or cast first."
            )
        if error is not None and any(refusal in text for refusal in _OF_COMPLEX):
            raise error
        if any(refusal in text for refusal in _OF_ARGUMENTS):
            kind = WriteError if func._schema.is_mutable else UnsupportedOpError
            raise kind(
                f"{func} was called on DTensors of dtypes that do not go with it: "
                f"{text.rstrip('.')}. Plain PyTorch refuses it too. Convert the tensor first, or "
                "pass a number that its dtype holds."
            )
        if error is None and stand_in is _on_meta:
            for name, given in outs.items():
                _check_shapes(func, f"{name}=", given, empty[name])
            if not outs and torch.Tag.inplace_view not in func.tags:
                before, after = written_values(func, args, kwargs), written_values(func, *found)
                _check_shapes(func, "a destination", before, after)


def _check_shapes(func: Any, name: str, given: Any, after: Any) -> None:
    if isinstance(given, (list, tuple)):
        for one, other in zip(given, after, strict=True):
            _check_shapes(func, name, one, other)
    elif isinstance(given, torch.Tensor) and given.shape != after.shape:
        raise WriteError(
            f"{func} was called with {name} of shape={tuple(given.shape)}, and its result has "
            f"shape={tuple(after.shape)}. A destination lies on the mesh as it was told to, and "
            "keeps its shape. Pass one of the result's shape, or use the result without out=."
        )


def _on_meta(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def _emptied(value: Any) -> Any:
    return value.new_empty(0) if isinstance(value, torch.Tensor) else value


# ---------------------------------------------------------------- Writes through views of DTensors
#
# What the base is labelled is told to the runtime.
#
# On a runtime whose write through a view answers with a new value for the base, nothing says any
# more how that lies, and XLA may leave it replicated. The base's label says it::
#
#     y = x * 2          [Shard(0)], never annotated: XLA chose
#     y.view(-1)[3] = 1  y has a new value, of which y's label is all that is known


def tell_bases(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Tell the runtime how the bases of the views lie that an op wrote to.

    A label without a Shard is left out: it may only mean that nothing is known.

    Args:
        func: The ``OpOverload``, which is mutable.
        args: Its arguments, as the caller passed them.
        kwargs: Its keyword arguments.
    """
    given = [args[i] if i < len(args) else kwargs.get(name) for i, name in _written(func)]
    for target in leaves(given):
        base = target._base if isinstance(target, torch.Tensor) else None
        state = None if base is None else getattr(base, "_spec", None)
        if base is None or not isinstance(state, GlobalState) or not _says_something(state):
            continue
        payload, runtime = base._local_tensor, get_runtime()  # pyright: ignore
        if runtime.is_payload(payload):
            runtime.annotate_written(payload, state.span_layout)


@lru_cache(4096)
def _written(func: Any) -> tuple[tuple[int, str], ...]:
    """The places and names of the arguments that an op writes to."""
    arguments = enumerate(func._schema.arguments)
    return tuple((i, a.name) for i, a in arguments if a.alias_info and a.alias_info.is_write)


def tell_known(tensor: Any) -> None:
    """Tell the runtime how a DTensor lies of which more is known than its mesh says."""
    state, runtime = tensor._spec, get_runtime()
    if state.known and _says_something(state) and runtime.is_payload(tensor._local_tensor):
        runtime.annotate_written(tensor._local_tensor, state.span_layout)


def _says_something(state: GlobalState) -> bool:
    placements = state.placements
    sharded = bool(state.known) or any(isinstance(p, Shard) for p in placements)
    return sharded and not any(p.is_partial() for p in placements)
