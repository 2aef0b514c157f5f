"""Payloads of the torch_xla runtime, and aten ops on them.

A payload is an XLA lazy tensor inside PyTorch's functional wrapper. The wrapper keeps views right:
without it, torch_xla 2.9 silently cuts a view from its base at the first sync, and writes into one
are not seen in the other. Plain XLA tensors are left without it (see `annotations`), and are
wrapped when they meet a payload.

`__torch_dispatch__` runs with the wrapper's dispatch key excluded. Ops on payloads need it back,
or views fail with "composite op functionalization fallback expects its inputs all not to be
functional tensors".

In-place ops keep the sharding of what they write into, but for `copy_`, which takes that of the
source; `run_op` puts it back.
"""

from __future__ import annotations

import importlib
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, wraps
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from xla_dtensor.core import OpSharding
from xla_dtensor.core.errors import DistributeError, UnsupportedOpError, XlaDTensorError
from xla_dtensor.runtimes.base import AddressableShard
from xla_dtensor.runtimes.bounds import BOUNDS, Bound, check_bounds, host_extremes
from xla_dtensor.runtimes.functional import functional_form
from xla_dtensor.runtimes.nested import leaves
from xla_dtensor.runtimes.torch_xla.annotations import (
    DEVICE,
    cut_unevenly,
    parse_annotation,
    to_annotation,
    xlac,
)
from xla_dtensor.runtimes.torch_xla.correct_values import in_torchs_dtypes
from xla_dtensor.runtimes.torch_xla.correct_writes import poison
from xla_dtensor.runtimes.torch_xla.corrections import correction, full_arguments, recovered
from xla_dtensor.runtimes.torch_xla.step import remember

__all__ = [
    "Annotations",
    "UnevenPayloads",
    "check_shards",
    "functionalization",
    "is_payload",
    "padded_shard",
    "put_host",
    "refuse_unwrapped",
    "run_op",
    "shard_of",
    "to_payload",
    "to_plain",
]


# -------------------------------------------------------------------------------------------- Bases
#
# What a write into a payload, or into a view of it, has to reach besides the payload.
#
# The functional wrapper answers a write into a view with a new value for the base, which torch_xla
# does not annotate: XLA would then lay the base out as whatever reads it next likes best. So each
# annotated payload is known by its storage, which its views share, and is annotated again.
#
# A payload may also be another face of a plain XLA tensor, one without the wrapper (a parameter
# that was annotated in place and is written through what mark_sharding returned). After each write
# the plain tensor is given the payload's new value.

# Of each storage the living payloads over it, by their id, and what each was told last.
_bases: dict[int, dict[int, tuple[weakref.ref[torch.Tensor], Any]]] = {}


def _storage(payload: torch.Tensor) -> int:
    return payload.untyped_storage()._cdata


class _Reference(weakref.ref):  # pyright: ignore[reportMissingTypeArgument]
    """A reference to a payload that knows under which keys it is kept."""

    __slots__ = ("name", "storage")


def _forget(dead: Any) -> None:
    noted = _bases.get(dead.storage)
    if noted is None or dead.name not in noted or noted[dead.name][0] is not dead:
        return
    del noted[dead.name]
    if not noted:
        del _bases[dead.storage]


def note_base(payload: torch.Tensor, annotation: Any) -> None:
    """Remember that `payload` was told to lie as `annotation` says."""
    reference: Any = _Reference(payload, _forget)
    reference.storage, reference.name = _storage(payload), id(payload)
    _bases.setdefault(reference.storage, {})[reference.name] = reference, annotation


def note_alias(source: torch.Tensor, alias: torch.Tensor) -> None:
    """Remember of an alias what its source was told."""
    noted = _bases.get(_storage(source), {}).get(id(source))
    if noted is not None and noted[0]() is source:
        note_base(alias, noted[1])


def annotate_bases_again(written: Iterable[torch.Tensor], *, reshaped: bool = False) -> None:
    """Annotate what an op has written to, or the base of the view that it has written to.

    Some ops in place, such as index_put_, answer with a value that is not annotated.

    Args:
        written: What the op has written to.
        reshaped: The op has changed its shape, so that its annotation no longer fits.
    """
    for view in written:
        for reference, annotation in tuple(_bases.get(_storage(view), {}).values()):
            base = reference()
            if (
                base is None
                or (base is view and reshaped)
                or xlac()._get_xla_op_sharding(base) is not None
            ):
                continue
            xlac()._xla_annotate_custom_sharding(base, annotation)


_sources: dict[int, tuple[torch.Tensor, weakref.ref[torch.Tensor], Any]] = {}


def note_source(payload: torch.Tensor, base: torch.Tensor, source: torch.Tensor) -> None:
    """Remember that a payload is another face of the plain XLA tensor `source`.

    Args:
        payload: An alias of `base`, for users: its shape may be changed in place.
        base: The wrapped tensor itself, of which nobody else knows.
        source: The plain tensor.
    """
    key = _storage(base)

    def forget(dead: weakref.ref[torch.Tensor]) -> None:
        if key in _sources and dead in _sources[key]:
            del _sources[key]

    _sources[key] = (base, weakref.ref(source, forget), weakref.ref(payload, forget))


def write_to_sources(written: Iterable[torch.Tensor]) -> None:
    """Give plain tensors the new values of the payloads, or their views, that were written to."""
    for view in written if _sources else ():
        base, source, _ = _sources.get(_storage(view), (None, None, None))
        plain = None if source is None else source()
        if base is not None and plain is not None:
            torch._sync(base)  # pyright: ignore[reportPrivateImportUsage]
            contents = torch._from_functional_tensor(base)  # pyright: ignore
            xlac()._replace_xla_tensor(plain, contents)


# ----------------------------------------- Payloads of the torch_xla runtime, and aten ops on them

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
    device_tensor = host.to(DEVICE)
    if annotation is not None:
        xlac()._xla_mark_sharding(device_tensor, annotation)
    return to_payload(device_tensor)


def refuse_unwrapped(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise where torch_xla, wrapping all tensors itself, would wrap the DTensor that comes out.

    Raises:
        DistributeError: An operand is a plain tensor that has just been unwrapped.
    """
    for tensor in leaves((tuple(args), dict(kwargs))):
        if is_payload(tensor) and not _is_functional(tensor):
            raise DistributeError(
                f"The op {func} was called on a DTensor and a plain XLA tensor of "
                f"shape={tuple(tensor.shape)}. This process called use_spmd() itself, so torch_xla "
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
        plain = next((argument for argument in written if _is_foreign(argument)), None)
        if plain is not None:
            return _run_plain(func, args, kwargs, plain.device)
        functional = _functional(func)
        if functional in BOUNDS:
            check_bounds(functional, args, kwargs, _extremes)
        call_args, call_kwargs = args, kwargs
        args = [_operand(argument) for argument in args]
        kwargs = {name: _operand(argument) for name, argument in kwargs.items()}
        output = _result(_run(func, args, kwargs))
        if functional in BOUNDS and "out" not in kwargs:
            output = poison(functional, call_args, call_kwargs, output)
        if func is torch.ops.aten.native_batch_norm.default:
            _write_statistics(call_args, args)
        payloads = [argument for argument in written if _is_functional(argument)]
        if payloads:
            annotate_bases_again(payloads, reshaped=_reshapes(func))
            write_to_sources(payloads)
        return output
    finally:
        torch._C._dispatch_tls_set_dispatch_key_excluded(_FUNCTIONALIZE, excluded)


def _extremes(bound: Bound) -> tuple[float, float] | None:
    """The least and the largest index on the host; a payload's values are not known."""
    return None if bound.index.device.type == "xla" else host_extremes(bound)


@cache
def _functional(func: Any) -> Any:
    return functional_form(func) if func._schema.is_mutable else func


@cache
def _reshapes(func: Any) -> bool:
    return torch.Tag.inplace_view in func.tags


def _write_statistics(host_args: Sequence[Any], payloads: Sequence[Any]) -> None:
    """Write batch norm's running statistics into host tensors; its schema does not tell of them."""
    for host, payload in zip(host_args[3:5], payloads[3:5], strict=True):
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
    args, kwargs = full_arguments(func, args, kwargs)
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

    def plain(argument: Any) -> Any:
        if isinstance(argument, list | tuple):
            return type(argument)(plain(part) for part in argument)
        if not isinstance(argument, torch.Tensor):
            return argument
        return (to_plain(argument) if argument.device.type == "xla" else argument).to(device)

    return func(*map(plain, args), **{name: plain(argument) for name, argument in kwargs.items()})


def _writes_nothing(func: Any, written: Sequence[torch.Tensor]) -> bool:
    """Tell whether an op only writes to empty tensors: XLA may divide by their sizes."""
    only_writes = len(func._schema.returns) == 1 and not _reshapes(func)
    return only_writes and all(target.numel() == 0 for target in written)


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


def _is_foreign(argument: object) -> bool:
    """A tensor that has to be made a payload first: on the host, or XLA's own without wrapper."""
    return isinstance(argument, torch.Tensor) and not _is_functional(argument)


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The tensors that the op writes into."""
    if not func._schema.is_mutable:
        return []
    written: list[Any] = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            target = args[place] if place < len(args) else kwargs.get(argument.name)
            written += target if isinstance(target, list | tuple) else [target]
    return [target for target in written if isinstance(target, torch.Tensor)]


def _operand(argument: Any) -> Any:
    if isinstance(argument, list | tuple):
        return type(argument)(_operand(part) for part in argument)
    return to_payload(argument.to(DEVICE)) if _is_foreign(argument) else argument


def _result(output: Any) -> Any:
    if isinstance(output, list | tuple):
        return type(output)(_result(part) for part in output)
    if isinstance(output, torch.Tensor) and output.device.type == "xla":
        return to_payload(output)
    return output


# -------------------------------------------------------------------- Shards of torch_xla payloads
#
# Those given to make a tensor of, and those read from one.


def check_shards(
    shards: Mapping[int, torch.Tensor],
    shape: Sequence[int],
    sharding: OpSharding,
    addressable: Sequence[int],
) -> None:
    """Raise when host tensors cannot be the shards of one tensor.

    Args:
        shards: One per addressable device, by device id.
        shape: Of the whole tensor.
        sharding: Of the whole tensor, relative to the root.
        addressable: The ids of the devices of this process.

    Raises:
        DistributeError: Other devices, several dtypes, or wrong shapes.
    """
    if set(shards) != set(addressable):
        raise DistributeError(
            f"A tensor was asked for from shards of the devices {sorted(shards)}. This process has "
            f"the devices {sorted(addressable)}. Pass one shard for each of these."
        )
    dtypes = {str(shard.dtype) for shard in shards.values()}
    if len(dtypes) > 1:
        raise DistributeError(
            f"A tensor was asked for from shards of dtypes={sorted(dtypes)}. A tensor has one "
            "dtype. Convert the shards to one first."
        )
    for device, shard in shards.items():
        expected = _extents(sharding.shard_index(device, shape))
        if tuple(shard.shape) != expected:
            raise DistributeError(
                f"The shard of device={device} has shape={tuple(shard.shape)}. For a tensor of "
                f"shape={tuple(shape)} under {sharding} it has {expected}. Pass that shape."
            )


def _extents(index: Sequence[slice]) -> tuple[int, ...]:
    return tuple(part.stop - part.start for part in index)


def padded_shard(shard: torch.Tensor, tile: Sequence[int]) -> torch.Tensor:
    """Return a shard on the host, with zeros at its ends up to the shape `tile`."""
    host = shard.detach().cpu().contiguous()
    if host.shape == torch.Size(tile):
        return host
    padded = host.new_zeros(tile)
    padded[tuple(map(slice, host.shape))] = host
    return padded


def shard_of(
    device_id: int, tile: torch.Tensor, payload: torch.Tensor, sharding: OpSharding
) -> AddressableShard:
    """Return what a device holds of a payload: `tile`, of which the padding is cut off."""
    index = sharding.shard_index(device_id, payload.shape)
    values = tile[tuple(slice(0, extent) for extent in _extents(index))].contiguous()
    num_bytes = tile.numel() * tile.element_size()
    return AddressableShard(device_id, index, values.to(payload.dtype), num_bytes)


# --------------------------------------------------------------------------- Payloads cut unevenly
#
# torch_xla's programs return them replicated, this puts them back.
#
# XLA, as torch_xla 2.9 calls it, replicates each result of a program that its sharding does not cut
# evenly, whatever was annotated. An embedding of 50,257 rows over 4 devices would thus be whole on
# every device after the first optimizer step. There is no way to tell it otherwise, and no way to
# move a finished value but through the host. So that is what happens, once per program and payload,
# with one warning: values and shards are right, time is lost. Even dims cost nothing.

_log = logging.getLogger(__name__)


class UnevenPayloads:
    """The living payloads that were asked to be cut unevenly, and how."""

    def __init__(self) -> None:
        self._shardings: Any = WeakIdKeyDictionary()
        self._warned = False

    def note(self, payload: torch.Tensor, sharding: OpSharding) -> torch.Tensor:
        """Remember `payload` if `sharding` cuts a dim of it unevenly, else forget it; return it."""
        if payload.numel() and sharding.is_tiled and cut_unevenly(payload, sharding):
            self._shardings[payload] = sharding
        else:
            self._shardings.pop(payload, None)
        return payload

    def __contains__(self, payload: object) -> bool:
        return bool(self._shardings) and payload in self._shardings

    def of(self, payload: torch.Tensor) -> OpSharding:
        """Return how a payload that is noted was asked to be cut."""
        return self._shardings[payload]

    def follow(self, source: object, alias: object) -> None:
        """Remember `alias` as lying like `source`, of which it is an alias."""
        sharding = self._shardings.get(source) if self._shardings else None
        if sharding is not None:
            self._shardings[alias] = sharding

    def restore(self) -> None:
        """Cut again what finished programs returned replicated."""
        for payload, sharding in list(self._shardings.items()):
            if xlac()._check_tensor_need_materialization([payload])[0]:
                continue
            actual = parse_annotation(xlac()._get_xla_sharding_spec(payload))
            if actual != sharding and actual == OpSharding.replicated():
                self._warn(payload, sharding)
                xlac()._xla_wait_device_ops([])
                xlac()._xla_mark_sharding(payload, to_annotation(sharding))

    def _warn(self, payload: torch.Tensor, sharding: OpSharding) -> None:
        if not self._warned:
            self._warned = True
            tile = sharding.shape_per_tile(payload.shape)
            even = [full * sharding.num_tiles(dim) for dim, full in enumerate(tile)]
            _log.warning(
                "A tensor of shape=%s is cut unevenly by %s. torch_xla returns it replicated from "
                "each program, and it is cut again through the host, which is slow. Pad it, for "
                "example to shape=%s. (Said once.)",
                tuple(payload.shape),
                sharding,
                tuple(even),
            )


# --------------------------------------------- What payloads were told of how to lie, on torch_xla
#
# In place, remembered, put back after writes.
#
# torch_xla keeps an annotation with the value, not with the tensor: an op in place may answer with
# a value that has none. What payloads were asked to lie like is therefore kept here, beside them.


class Annotations:
    """The annotations of living payloads.

    Args:
        uneven: Where payloads are noted that are to be cut unevenly.
        check_global: Raises for what is no global payload.
        wraps_all: Whether torch_xla wraps all tensors for functionalization itself.
    """

    def __init__(
        self,
        uneven: UnevenPayloads,
        check_global: Callable[[torch.Tensor], None],
        wraps_all: bool,
    ) -> None:
        self._uneven, self._check_global, self._wraps_all = uneven, check_global, wraps_all
        self._of: Any = WeakIdKeyDictionary()
        self._empty: Any = WeakIdKeyDictionary()

    def of(self, payload: torch.Tensor) -> OpSharding | None:
        """Return what a payload was told; None when it was told nothing."""
        return self._of.get(payload)

    def of_empty(self, payload: torch.Tensor) -> OpSharding:
        """Return how a payload without elements is said to lie."""
        return self._empty.get(payload, OpSharding.replicated())

    def note(self, payload: torch.Tensor, sharding: OpSharding) -> torch.Tensor:
        """Remember that a payload was told to lie as `sharding` says; return it."""
        self._of[payload] = sharding.canonical()
        remember(payload)
        if payload.numel() == 0:
            self._empty[payload] = sharding.canonical()
            return payload
        note_base(payload, to_annotation(sharding))
        return self._uneven.note(payload, sharding)

    def follow(self, source: Any, alias: torch.Tensor) -> None:
        """Remember of an alias what is known of its source."""
        self._uneven.follow(source, alias)
        sharding = self._of.get(source)
        if sharding is not None:
            self._of[alias] = sharding
            note_alias(source, alias)

    def annotate(self, payload: torch.Tensor, sharding: OpSharding) -> None:
        """Tell XLA in place how a payload is to lie, and remember it."""
        self.annotate_view(payload, sharding)
        self.note(payload, sharding)

    def annotate_view(self, payload: torch.Tensor, sharding: OpSharding) -> None:
        """Tell XLA in place how a payload is to lie."""
        self._check_global(payload)
        if payload.numel() == 0:
            return
        with functionalization():
            finished = not xlac()._check_tensor_need_materialization([payload])[0]
            present = xlac()._get_xla_sharding_spec(payload) if finished else None
            if present and parse_annotation(present) == sharding:
                return
            if present == "":
                # Straight from the host: cut now, so that the whole need not fit on each device.
                xlac()._xla_mark_sharding(payload, to_annotation(sharding))
            else:
                if not finished:
                    # A pending value does not take a second one, such as after a clearing.
                    xlac()._xla_clear_sharding(payload)
                # A node of its own. mark_sharding would annotate what this is a clone of as well.
                xlac()._xla_annotate_custom_sharding(payload, to_annotation(sharding))

    def annotate_written(self, base: torch.Tensor, sharding: OpSharding) -> None:
        """Tell XLA how a payload is to lie that was written to through a view, if nothing does."""
        with functionalization():
            has_annotation = base.numel() == 0 or xlac()._get_xla_op_sharding(base) is not None
        if not has_annotation:
            self.annotate_view(base, sharding)

    def has_annotation(self, payload: torch.Tensor) -> bool:
        """Tell whether a payload, or its value, carries an annotation."""
        with functionalization():
            has_annotation = xlac()._get_xla_op_sharding(payload) is not None
        return has_annotation or payload in self._of

    def clear(self, payload: torch.Tensor) -> None:
        """Take back what a payload was told; it is replicated then."""
        # torch_xla's own clearing leaves finished data cut as it was, and a pending value without
        # the attribute that its partitioner insists on.
        self.annotate(payload, OpSharding.replicated())
        self._of.pop(payload, None)

    def correct_fsdp_v2(self) -> None:
        """Let torch_xla's FSDPv2 shard parameters that nobody marked.

        It leaves out those that say how they lie, and one that a `sync()` or a second `.to("xla")`
        has met says "{replicated}".
        """
        name = "torch_xla.experimental.spmd_fully_sharded_data_parallel"
        wrapper = importlib.import_module(name).SpmdFullyShardedDataParallel
        its_own = wrapper.__init__

        @wraps(its_own)
        def init(self_: Any, module: Any, *args: Any, **kwargs: Any) -> None:
            if isinstance(module, torch.nn.Module):
                for parameter in module.to("xla").parameters():
                    text = xlac()._get_xla_sharding_spec(parameter)
                    if text == "{replicated}" and parameter not in self._of:
                        xlac()._xla_clear_sharding(parameter)
            its_own(self_, module, *args, **kwargs)

        wrapper.__init__ = init

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a payload over the storage of a plain device tensor: writes to one reach both."""
        with functionalization():
            base = to_payload(tensor.detach())
            payload = base.detach()
        if not self._wraps_all:
            note_source(payload, base, tensor)
        if tensor in self._of:
            self._of[payload] = self._of[tensor]
            note_base(payload, to_annotation(self._of[payload]))
        return payload
