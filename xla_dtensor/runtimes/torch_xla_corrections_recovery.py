"""What is done when torch_xla raises an error that PyTorch would not raise.

torch_xla 2.9 refuses calls that are right: reductions over the one dim that PyTorch lends to a
number, negative padding, operands of different ranks, ops that it has only under its own
functionalization. PyTorch's meta device tells such a call from one that is wrong. What it accepts
is said in other words (a number as a tensor of one dim, PyTorch's own decomposition of the op), or
else run on the host.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map

from xla_dtensor.errors import UnsupportedOpError
from xla_dtensor.nested import map_nested
from xla_dtensor.runtimes.op_meta import hosts_error
from xla_dtensor.runtimes.torch_xla_corrections_host import has_manual, run_on_host

__all__ = ["decomposed", "recovered"]

# What torch_xla says where a compiled step reads a value: there is no way around that.
_READ_IN_STEP = "Unexpected execution happens inside the compiled function"
Run = Callable[[Any, Sequence[Any], Mapping[str, Any]], Any]


def recovered(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], error: Exception, run: Run
) -> Any:
    """Return the result of an op that torch_xla has refused.

    Args:
        func: An ``OpOverload``.
        args: Its positional arguments, payloads in place.
        kwargs: Its keyword arguments.
        error: What torch_xla raised.
        run: Runs an op, corrected where torch_xla is wrong.

    Raises:
        Exception: `error`, where PyTorch refuses the call as well, and in a manual region.
        UnsupportedOpError: PyTorch accepts it, and the host cannot run it either, or must not,
            because a step is being compiled.
    """
    if has_manual(args, kwargs) or _READ_IN_STEP in str(error):
        raise error
    try:
        meta = _on_meta(func, args, kwargs)
    except NotImplementedError:
        meta = None
    except Exception as torchs:
        # Some of what PyTorch checks is asserted there; and torch_xla's classes are often others.
        kind = RuntimeError if isinstance(torchs, AssertionError) else type(torchs)
        of_host = hosts_error(func, args, kwargs)
        if isinstance(of_host, IndexError):
            raise of_host from None
        raise (error if isinstance(error, kind | IndexError) else kind(str(torchs))) from None
    if not func._schema.is_mutable:
        # torch_xla's errors are of many types.
        with contextlib.suppress(Exception):
            return _with_a_dim(func, args, kwargs, meta, run)
        with contextlib.suppress(Exception):
            return decomposed(func, args, kwargs)
    try:
        return run_on_host(func, args, kwargs)
    except (UnsupportedOpError, IndexError):
        raise
    except Exception:
        raise UnsupportedOpError(
            f"The op {func} was called on tensors of the torch_xla runtime. torch_xla refuses it "
            f"({_first_words(error)}), and its result cannot be brought back from the host. Write "
            "it with other ops, or move the tensor to the host with .full_tensor().cpu()."
        ) from error


def _first_words(error: BaseException) -> str:
    return str(error).strip().split("\n")[0][:80]


def decomposed(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run PyTorch's own decomposition of an op.

    Raises:
        NotImplementedError: There is none.
    """
    from torch._decomp import decomposition_table

    decomposition = decomposition_table.get(func)
    if decomposition is None:
        raise NotImplementedError(str(func))
    result = decomposition(*args, **kwargs)
    # Some are named tuples, which cannot be made from a list of their items.
    return tuple(result) if isinstance(result, tuple) else result


def _with_a_dim(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], meta: Any, run: Run
) -> Any:
    first = args[0] if args else None
    if meta is None or not isinstance(first, torch.Tensor) or first.ndim:
        raise NotImplementedError(str(func))

    def raised(value: Any) -> Any:
        is_number = isinstance(value, torch.Tensor) and value.ndim == 0
        return value.reshape(1) if is_number else value

    result = run(func, map_nested(raised, tuple(args)), map_nested(raised, dict(kwargs)))
    return tree_map(
        lambda value, like: value.reshape(like.shape) if isinstance(like, torch.Tensor) else value,
        result,
        meta,
    )


def _on_meta(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    def stand_in(value: Any) -> Any:
        if isinstance(value, torch.device):
            return torch.device("meta")
        if not isinstance(value, torch.Tensor):
            return value
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")

    meta_args, meta_kwargs = map_nested(stand_in, (tuple(args), dict(kwargs)))
    return func(*meta_args, **meta_kwargs)
