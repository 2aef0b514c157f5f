"""Payloads of the torch_xla runtime, and aten ops on them.

A payload is an XLA lazy tensor inside PyTorch's functional wrapper. The wrapper keeps views right:
without it, torch_xla 2.9 silently cuts a view from its base at the first sync, and writes into one
are not seen in the other. Plain XLA tensors are left without it (see `torch_xla_start`), and are
wrapped when they meet a payload.

`__torch_dispatch__` runs with the wrapper's dispatch key excluded. Ops on payloads need it back,
or views fail with "composite op functionalization fallback expects its inputs all not to be
functional tensors".

In-place ops keep the sharding of what they write into, but for `copy_`, which takes that of the
source; `run_op` puts it back.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

from xla_dtensor.errors import DistributeError, UnsupportedOpError, XlaDTensorError
from xla_dtensor.nested import leaves
from xla_dtensor.runtimes.functional_ops import functional_form
from xla_dtensor.runtimes.index_bounds import BOUNDS, Bound, check_bounds, host_extremes
from xla_dtensor.runtimes.torch_xla_bases import annotate_bases_again, write_to_sources
from xla_dtensor.runtimes.torch_xla_corrections import correction
from xla_dtensor.runtimes.torch_xla_corrections_calls import told_in_full
from xla_dtensor.runtimes.torch_xla_corrections_dtypes import in_torchs_dtypes
from xla_dtensor.runtimes.torch_xla_corrections_recovery import recovered
from xla_dtensor.runtimes.torch_xla_poison import poison
from xla_dtensor.runtimes.torch_xla_program_keys import remember
from xla_dtensor.runtimes.torch_xla_sharding import DEVICE, xlac

__all__ = [
    "functionalization",
    "is_payload",
    "put_host",
    "refuse_unwrapped",
    "run_op",
    "to_payload",
    "to_plain",
]

_FUNCTIONALIZE = torch._C.DispatchKey.Functionalize
_PYTHON = torch._C.DispatchKey.Python
_is_functional = torch._is_functional_tensor  # pyright: ignore[reportPrivateImportUsage]
_to_functional = torch._to_functional_tensor  # pyright: ignore[reportPrivateImportUsage]
_from_functional = torch._from_functional_tensor  # pyright: ignore[reportPrivateImportUsage]
_sync_functional = torch._sync  # pyright: ignore[reportPrivateImportUsage]


def is_payload(tensor: object) -> bool:
    """Tell whether `tensor` is an XLA tensor itself, and no subclass around one."""
    return (
        isinstance(tensor, torch.Tensor)
        and tensor.device.type == "xla"
        and not torch._C._dispatch_keys(tensor).has(_PYTHON)
    )


def to_payload(tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor` inside the functional wrapper; itself if it is there already."""
    if tensor.dtype is torch.complex128:
        raise UnsupportedOpError(
            f"A tensor with dtype=torch.complex128 and shape={tuple(tensor.shape)} was asked for "
            "on torch_xla, which silently loses the imaginary part of such numbers. Use complex64, "
            "or the JAX runtime."
        )
    payload = tensor if _is_functional(tensor) else _to_functional(tensor)
    remember(payload)
    return payload


def to_plain(payload: torch.Tensor) -> torch.Tensor:
    """Return a payload's present value without the wrapper, fit to be mixed with DTensors."""
    if not _is_functional(payload):
        return payload
    _sync_functional(payload)
    return _from_functional(payload)


@contextmanager
def functionalization() -> Iterator[None]:
    """Run the body as if outside `__torch_dispatch__`, and without recording gradients."""
    excluded = torch._C._dispatch_tls_is_dispatch_key_excluded(_FUNCTIONALIZE)
    torch._C._dispatch_tls_set_dispatch_key_excluded(_FUNCTIONALIZE, False)
    try:
        with torch.no_grad():
            yield
    finally:
        torch._C._dispatch_tls_set_dispatch_key_excluded(_FUNCTIONALIZE, excluded)


def put_host(tensor: torch.Tensor, annotation: Any) -> torch.Tensor:
    """Copy a host tensor to the devices as an annotation says; on all of them without one."""
    host = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    # .to() copies, so that the caller may go on writing into the tensor.
    data = host.to(DEVICE)
    if annotation is not None:
        xlac()._xla_mark_sharding(data, annotation)
    return to_payload(data)


def refuse_unwrapped(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise where torch_xla, wrapping all tensors itself, would wrap the DTensor that comes out.

    Raises:
        DistributeError: An operand is a plain tensor that has just been unwrapped.
    """
    for value in leaves((tuple(args), dict(kwargs))):
        if is_payload(value) and not _is_functional(value):
            raise DistributeError(
                f"The op {func} was called on a DTensor and a plain XLA tensor of "
                f"shape={tuple(value.shape)}. This process called use_spmd() itself, so torch_xla "
                "wraps every plain tensor and would wrap the result into something that is no "
                "DTensor. Use the tensor that was annotated (.global_tensor), or start with "
                "xla_dtensor.get_runtime('torch_xla') in place of use_spmd()."
            )


def run_op(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run one aten op on payloads, below autograd. See :meth:`Runtime.run_op`."""
    excluded = torch._C._dispatch_tls_is_dispatch_key_excluded(_FUNCTIONALIZE)
    torch._C._dispatch_tls_set_dispatch_key_excluded(_FUNCTIONALIZE, False)
    try:
        if func is torch.ops.aten.copy_.default:
            return _copy(*args, **kwargs)
        if func is torch.ops.aten._foreach_copy_.default:
            for to, of in zip(args[0], args[1], strict=True):
                _copy(to, of)
            return None
        written = _written(func, args, kwargs)
        if written and _writes_nothing(func, written):
            return args[0]
        plain = next((value for value in written if _is_foreign(value)), None)
        if plain is not None:
            return _run_plain(func, args, kwargs, plain.device)
        _check_bounds(func, args, kwargs)
        given, given_kwargs = args, kwargs
        args = [_operand(value) for value in args]
        kwargs = {name: _operand(value) for name, value in kwargs.items()}
        result = _result(_run(func, args, kwargs))
        if _functional(func) in BOUNDS and "out" not in kwargs:
            result = poison(_functional(func), given, given_kwargs, result)
        if func is torch.ops.aten.native_batch_norm.default:
            _write_statistics(given, args)
        payloads = [value for value in written if _is_functional(value)]
        if payloads:
            annotate_bases_again(payloads, reshaped=_reshapes(func))
            write_to_sources(payloads)
        return result
    finally:
        torch._C._dispatch_tls_set_dispatch_key_excluded(_FUNCTIONALIZE, excluded)


def _check_bounds(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise where an index on the host is out of range; a payload's values are not known."""
    functional = _functional(func)
    if functional in BOUNDS:
        check_bounds(functional, args, kwargs, _extremes)


def _extremes(bound: Bound) -> tuple[float, float] | None:
    return None if bound.index.device.type == "xla" else host_extremes(bound)


@cache
def _functional(func: Any) -> Any:
    return functional_form(func) if func._schema.is_mutable else func


@cache
def _reshapes(func: Any) -> bool:
    return torch.Tag.inplace_view in func.tags


def _write_statistics(given: Sequence[Any], payloads: Sequence[Any]) -> None:
    """Write batch norm's running statistics into host tensors; its schema does not tell of them."""
    for host, payload in zip(given[3:5], payloads[3:5], strict=True):
        if not _is_foreign(host):
            continue
        if not xlac()._get_allow_execution():
            raise UnsupportedOpError(
                f"Batch norm was called inside a compiled step with running statistics of "
                f"shape={tuple(host.shape)} on the host. The program does not write to the host. "
                "Put them on the mesh first: distribute_module, or distribute_tensor for each."
            )
        host.copy_(payload.to(host.device))


def _run(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    args, kwargs = told_in_full(func, args, kwargs)
    try:
        # Operands are cast first: the ways round an error give what they are given.
        return in_torchs_dtypes(func, args, kwargs, _run_or_recover)
    except XlaDTensorError:
        raise
    except (RuntimeError, IndexError, ValueError, AssertionError) as error:
        return recovered(func, args, kwargs, error, _run_once)


def _run_or_recover(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    try:
        return _run_once(func, args, kwargs)
    except XlaDTensorError:
        raise
    except (RuntimeError, IndexError, ValueError, AssertionError) as error:
        return recovered(func, args, kwargs, error, _run_once)


def _run_once(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    corrected = correction(func, args, kwargs)
    return func(*args, **kwargs) if corrected is None else corrected()


def _run_plain(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], device: torch.device
) -> Any:
    """Run an op that writes into a tensor without the wrapper, on its device: all shed theirs."""

    def plain(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return type(value)(plain(item) for item in value)
        if not isinstance(value, torch.Tensor):
            return value
        return (to_plain(value) if value.device.type == "xla" else value).to(device)

    return func(*map(plain, args), **{name: plain(value) for name, value in kwargs.items()})


def _writes_nothing(func: Any, written: Sequence[torch.Tensor]) -> bool:
    """Tell whether an op only writes to empty tensors: XLA may divide by their sizes."""
    only_writes = len(func._schema.returns) == 1 and not _reshapes(func)
    return only_writes and all(value.numel() == 0 for value in written)


def _copy(to: torch.Tensor, of: Any, non_blocking: bool = False) -> torch.Tensor:
    of = of if isinstance(of, torch.Tensor) else torch.tensor(of)
    if to.numel() == 0:
        return to
    if to.device.type != "xla":
        return to.copy_(of, non_blocking)
    sharding = xlac()._get_xla_op_sharding(to)
    if of.device.type == "xla":
        # Expanded first: copy_ would give `to` the sharding of a source of another rank or size.
        to.copy_(to_payload(of) if of.shape == to.shape else to_payload(of).expand(to.shape))
        if sharding is not None:
            xlac()._xla_annotate_custom_sharding(to, sharding)
    else:
        host = of.to(to.dtype).expand(to.shape)
        to.copy_(to_payload(host.to(DEVICE)) if sharding is None else put_host(host, sharding))
    annotate_bases_again([to] if _is_functional(to) else [])
    write_to_sources([to] if _is_functional(to) else [])
    return to


def _is_foreign(value: object) -> bool:
    """A tensor that has to be made a payload first: on the host, or XLA's own without wrapper."""
    return isinstance(value, torch.Tensor) and not _is_functional(value)


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The tensors that the op writes into."""
    if not func._schema.is_mutable:
        return []
    written: list[Any] = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            written += value if isinstance(value, list | tuple) else [value]
    return [value for value in written if isinstance(value, torch.Tensor)]


def _operand(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(_operand(item) for item in value)
    return to_payload(value.to(DEVICE)) if _is_foreign(value) else value


def _result(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(_result(item) for item in value)
    if isinstance(value, torch.Tensor) and value.device.type == "xla":
        return to_payload(value)
    return value
