"""Which aten ops write by index, and the points that each writes.

A write along a dim with an index of the tensor's rank (scatter) is wrong in torch_xla 2.9's XLA,
and so is such a read (gather), also with even sizes, where index or values are cut over axes that
cut the tensor otherwise: some points are left out, or start from the reduction's identity. So index
and values are whole on every device there, and so are the indices of other reads that may be cut
unevenly. Of the other writes, those whose indices have only sizes
that all devices divide are left to torch_xla.
"""

from __future__ import annotations

import functools
import importlib
import logging
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from xla_dtensor.core import OpSharding
from xla_dtensor.core.errors import UnsupportedOpError
from xla_dtensor.runtimes.bounds import BOUNDS, Bound
from xla_dtensor.runtimes.nested import leaves, map_nested
from xla_dtensor.runtimes.registry import get_runtime
from xla_dtensor.runtimes.torch_xla.annotations import (
    DEVICE,
    cut_unevenly,
    parse_annotation,
    to_annotation,
    xlac,
)

__all__ = [
    "annotated",
    "assign",
    "has_manual",
    "has_write_rule",
    "poison",
    "replicated",
    "run_on_host",
    "write_correction",
]


# ------------------------------------------------------------------------------------------- Points
#
# Writes by index that XLA's partitioner would abort on, or get wrong, said with even shapes.
#
# XLA may cut the indices of a scatter as it cuts the tensor that is written to. Where it cuts them
# unevenly, it pads them with a 32-bit -1, but torch_xla's are 64-bit: a failed check ends the
# process. Where it cuts only the new values unevenly, some are written in the wrong place, in
# silence.
#
# Sizes that all devices divide are never cut unevenly. So the points are flattened, if they have to
# be, and padded to such a size: by writing the last one again, or by adding zero to it.


def round_up(size: int) -> int:
    """Return the next size that all devices divide."""
    return size + -size % xlac()._xla_num_global_devices()


def evenly(shape: Sequence[int]) -> bool:
    """Tell whether XLA can only cut `shape` evenly; of a single point it may make a dim."""
    return len(shape) > 0 and all(size == round_up(size) for size in shape)


def cut_evenly(tensor: torch.Tensor) -> bool:
    """Tell whether `tensor` is known to be cut evenly: by its sizes, or by its annotation."""
    if evenly(tensor.shape):
        return True
    annotation = xlac()._get_xla_sharding_spec(tensor) if tensor.numel() else ""
    if not annotation:
        return False
    sharding = parse_annotation(annotation)
    return not (sharding.is_tiled and cut_unevenly(tensor, sharding))


def assign(to: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Copy `source` into `to`, which keeps its sharding: `copy_` alone takes that of the source."""
    sharding = xlac()._get_xla_op_sharding(to)
    to.copy_(source)
    if sharding is not None:
        xlac()._xla_annotate_custom_sharding(to, sharding)
    return to


def annotated(tensor: torch.Tensor, sharding: OpSharding) -> torch.Tensor:
    """Return `tensor`, annotated; its own node in the graph, as in the runtime's `constrain`."""
    if tensor.numel() == 0:
        return tensor
    copy = tensor.clone()
    xlac()._xla_annotate_custom_sharding(copy, to_annotation(sharding))
    return copy


def replicated(tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor`, whole on every device."""
    return annotated(tensor, OpSharding.replicated())


def put_points(
    x: torch.Tensor,
    points: Sequence[torch.Tensor],
    values: torch.Tensor,
    accumulate: bool,
    in_place: bool,
) -> torch.Tensor:
    """Write `values` at points along the first dims.

    Args:
        x: What is written to.
        points: Indices along dim 0, 1, ..., all of one shape.
        values: One for each point and place along the other dims of `x`.
        accumulate: Add instead of setting.
        in_place: Write into `x` instead of a copy.

    Returns:
        `x`, or the copy.
    """
    trailing = x.shape[len(points) :]
    shape = [size for size in points[0].shape if size > 1]
    if not evenly(shape):
        shape = [math.prod(shape)]
    points = [point.reshape(shape) for point in points]
    values = values.reshape(*shape, *trailing)
    lack = round_up(shape[0]) - shape[0]
    if lack:
        points = [_repeat_last(point, lack) for point in points]
        if accumulate:
            padding = [0, 0] * len(trailing) + [0, lack]
            values = torch.constant_pad_nd(values, padding)
        else:
            values = _repeat_last(values, lack)
    write: Callable[..., torch.Tensor] = x.index_put_ if in_place else x.index_put
    return write(tuple(points), values, accumulate)


def into_front(
    x: torch.Tensor,
    dims: Sequence[int],
    points: Sequence[torch.Tensor],
    values: torch.Tensor,
    accumulate: bool,
    in_place: bool,
) -> torch.Tensor:
    """As :func:`put_points`, with indices along any `dims`; `values` as if these came first."""
    order = [*dims, *(dim for dim in range(x.ndim) if dim not in dims)]
    written = put_points(x.permute(order), points, values, accumulate, in_place)
    return x if in_place else written.permute([order.index(dim) for dim in range(x.ndim)])


def _repeat_last(values: torch.Tensor, times: int) -> torch.Tensor:
    return torch.cat([values, values[-1:].expand(times, *values.shape[1:])])


# -------------------------------- Ops that torch_xla 2.9 can do neither rightly nor in other words
#
# PyTorch runs them on the host.
#
# torch_xla itself does so with every op that it has no kernel for. Here it is done too for ops
# whose kernels give wrong values or end the process, and for those that raise an error of
# torch_xla's own. Values go to the host and back, which is slow and is logged once per op; what
# comes back is replicated until XLA decides otherwise. Inside a compiled step there is no host to
# go to.

_log = logging.getLogger(__name__)
_logged: set[Any] = set()


def has_manual(*arguments: Any) -> bool:
    """Tell whether a manual payload is among some arguments: it cannot be read on the host."""
    from xla_dtensor.runtimes.torch_xla.manual import ManualPayload  # it imports us

    return any(isinstance(argument, ManualPayload) for argument in leaves(arguments))


def run_on_host(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run an op on the host; what it wrote into is written on the devices as well.

    Args:
        func: An ``OpOverload``.
        args: Its positional arguments, payloads in place.
        kwargs: Its keyword arguments.

    Returns:
        What the op returns, on the devices.

    Raises:
        UnsupportedOpError: A step is being compiled.
    """
    if not importlib.import_module("torch_xla")._XLAC._get_allow_execution():
        raise UnsupportedOpError(
            f"The op {func} was called inside a compiled step. torch_xla has no right kernel for "
            "it, and a compiled step cannot run it on the host. Call it outside the step, or write "
            "it with other ops."
        )
    _log_once(func)
    copies: dict[int, torch.Tensor] = {}

    def to_host(argument: Any) -> Any:
        if isinstance(argument, torch.device):
            return torch.device("cpu")
        if not isinstance(argument, torch.Tensor):
            return argument
        if id(argument) not in copies:
            runtime = get_runtime()
            copies[id(argument)] = (
                runtime.to_host(argument) if runtime.is_payload(argument) else argument.cpu()
            )
        return copies[id(argument)]

    host_args, host_kwargs = map_nested(to_host, (tuple(args), dict(kwargs)))
    output = func(*host_args, **host_kwargs)
    written = {id(copies[id(to)]): to for to in _written(func, args, kwargs)}
    for to in written.values():
        assign(to, copies[id(to)].to(DEVICE))

    def back(host: Any) -> Any:
        if isinstance(host, tuple | list):
            return [back(part) for part in host] if type(host) is list else (*map(back, host),)
        if not isinstance(host, torch.Tensor):
            return host
        return written[id(host)] if id(host) in written else host.to(DEVICE)

    return back(output)


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    names = (argument.name for argument in func._schema.arguments)
    arguments = dict(zip(names, args, strict=False)) | dict(kwargs)
    values: list[Any] = []
    for argument in func._schema.arguments:
        if argument.alias_info is not None and argument.alias_info.is_write:
            target = arguments.get(argument.name)
            values += target if isinstance(target, list | tuple) else [target]
    return [v for v in values if isinstance(v, torch.Tensor) and v.device.type == "xla"]


def _log_once(func: Any) -> None:
    if func not in _logged:
        _logged.add(func)
        _log.warning(
            "The op %s runs on the host: torch_xla has no right kernel for it. (Said once.)", func
        )


# ---------------------------------- Which aten ops write by index, and the points that each writes

aten = torch.ops.aten
Replacement = Callable[[], torch.Tensor] | None
_MASKS = (torch.bool, torch.uint8)


def has_write_rule(func: Any) -> bool:
    """Tell whether `func` is a write by index that torch_xla may get wrong."""
    return func in _RULES or func.overloadpacket in _RULES


def write_correction(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Replacement:
    """Return what to run in place of a write by index; None where torch_xla is right.

    Args:
        func: An ``OpOverload``.
        args: Its positional arguments, payloads in place.
        kwargs: Its keyword arguments.
    """
    rule = _RULES.get(func) or _RULES.get(func.overloadpacket)
    if rule is None or "out" in kwargs:
        return None
    if func.overloadpacket in _WITHOUT_FORMS:
        return rule(*args, **kwargs)
    return rule(func.overloadpacket.__name__.endswith("_"), *args, **kwargs)


def _scatter(
    in_place: bool, x: torch.Tensor, dim: int, index: torch.Tensor, src: Any, reduce: str = ""
) -> Replacement:
    names = {"": "", "add": "sum", "multiply": "prod"}
    return _scatter_points(in_place, x, dim, index, src, names[reduce])


def _scatter_value(
    in_place: bool, x: torch.Tensor, dim: int, index: torch.Tensor, value: Any, reduce: str = ""
) -> Replacement:
    return _scatter(in_place, x, dim, index, value, reduce)


def _scatter_add(
    in_place: bool, x: torch.Tensor, dim: int, index: torch.Tensor, src: torch.Tensor
) -> Replacement:
    return _scatter_points(in_place, x, dim, index, src, "sum")


def _scatter_reduce(
    in_place: bool,
    x: torch.Tensor,
    dim: int,
    index: torch.Tensor,
    src: torch.Tensor,
    reduce: str,
    include_self: bool = True,
) -> Replacement:
    return _scatter_points(in_place, x, dim, index, src, reduce, include_self)


def _scatter_points(
    in_place: bool,
    x: torch.Tensor,
    dim: int,
    index: torch.Tensor,
    src: Any,
    reduce: str,
    include_self: bool = True,
) -> Replacement:
    if x.ndim == 0 or index.ndim == 0 or index.numel() == 0 or has_manual(x, index):
        return None
    dim %= x.ndim

    def write() -> torch.Tensor:
        values = src if isinstance(src, torch.Tensor) else x.new_full((), src).expand(index.shape)
        values = values[tuple(slice(size) for size in index.shape)]
        places, values = replicated(index), replicated(values)
        if reduce not in ("", "sum") or not include_self:
            output = _scatter_with_spare(x, dim, places, values, reduce, include_self)
            return assign(x, output) if in_place else output
        points = [
            places if at == dim else _places(places, at, size)
            for at, size in enumerate(index.shape)
        ]
        return put_points(x, points, values, reduce == "sum", in_place)

    return write


def _gather(
    x: torch.Tensor, dim: int, index: torch.Tensor, sparse_grad: bool = False
) -> Replacement:
    if x.ndim == 0 or index.ndim == 0 or has_manual(x, index):
        return None
    return lambda: aten.gather(x, dim, replicated(index))


def _index(x: torch.Tensor, indices: Sequence[torch.Tensor | None]) -> Replacement:
    tensors = [index for index in indices if index is not None]
    if not tensors or any(index.dtype in _MASKS for index in tensors) or has_manual(x, *tensors):
        return None
    shapes = [index.shape for index in tensors]
    shape = shapes[0] if len(shapes) == 1 else torch.broadcast_shapes(*shapes)
    if x.numel() == 0 or 0 in shape:
        # torch_xla leaves other dims out.
        meta: Any = aten.index(x.to("meta"), [i if i is None else i.to("meta") for i in indices])
        return lambda: x.new_zeros(meta.shape)
    if evenly(shape) or all(cut_evenly(index) for index in tensors):
        return None
    return lambda: aten.index(x, [i if i is None else replicated(i) for i in indices])


def _index_select(x: torch.Tensor, dim: int, index: torch.Tensor) -> Replacement:
    if x.ndim == 0 or index.numel() == 0 or cut_evenly(index) or has_manual(x, index):
        return None
    return lambda: aten.index_select(x, dim, replicated(index))


def _embedding(weight: torch.Tensor, indices: torch.Tensor, *args: Any) -> Replacement:
    if indices.numel() == 0 or cut_evenly(indices) or has_manual(weight, indices):
        return None
    return lambda: aten.embedding(weight, replicated(indices), *args)


def _places(index: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    shape = [1] * index.ndim
    shape[dim] = size
    return torch.arange(size, device=index.device).reshape(shape).expand(index.shape)


def _scatter_with_spare(
    x: torch.Tensor,
    dim: int,
    index: torch.Tensor,
    values: torch.Tensor,
    reduce: str,
    include_self: bool,
) -> torch.Tensor:
    """Pad all to even sizes; what is too much goes to places past the end, which are cut off."""

    def pad(tensor: torch.Tensor, shape: Sequence[int], fill: int) -> torch.Tensor:
        lacks = [end - size for end, size in zip(shape, tensor.shape, strict=True)]
        return torch.constant_pad_nd(tensor, [n for lack in lacks[::-1] for n in (0, lack)], fill)

    spare = [round_up(size + (at == dim)) for at, size in enumerate(x.shape)]
    shape = [round_up(size) for size in index.shape]
    padded = torch.scatter_reduce(
        pad(x, spare, 0),
        dim,
        pad(index, shape, x.shape[dim]),
        pad(values, shape, 0),
        reduce,
        include_self=include_self,
    )
    return padded[tuple(slice(size) for size in x.shape)]


def _index_put(
    in_place: bool,
    x: torch.Tensor,
    indices: Sequence[torch.Tensor | None],
    values: torch.Tensor,
    accumulate: bool = False,
) -> Replacement:
    tensors = [index for index in indices if index is not None]
    if any(index.dtype in _MASKS for index in tensors):
        return _index_put_mask(in_place, x, indices, values, accumulate)
    shape = torch.broadcast_shapes(*(index.shape for index in tensors))
    if not tensors or 0 in shape or evenly(shape):
        return None
    dims = [dim for dim, index in enumerate(indices) if index is not None]
    slice_shape = [x.shape[dim] for dim in range(x.ndim) if dim not in dims]
    adjacent = dims[-1] - dims[0] + 1 == len(dims)
    at = dims[0] if adjacent else 0

    def write() -> torch.Tensor:
        spread = values.expand(*slice_shape[:at], *shape, *slice_shape[at:])
        spread = spread.movedim(tuple(range(at, at + len(shape))), tuple(range(len(shape))))
        points = [index.expand(shape) for index in tensors]
        return into_front(x, dims, points, spread, accumulate, in_place)

    return write


def _index_put_mask(
    in_place: bool,
    x: torch.Tensor,
    indices: Sequence[torch.Tensor | None],
    values: torch.Tensor,
    accumulate: bool,
) -> Replacement:
    """Say a mask as what it is where it can be: as indices, it has to be read first."""
    *leading, mask = indices
    fills = values.numel() == 1 and not accumulate
    is_mask = (
        mask is not None
        and mask.dtype == torch.bool
        and not any(index is not None for index in leading)
    )
    if any(index is not None and index.ndim == 0 for index in indices):
        return None
    if mask is None or not is_mask or not fills:
        return lambda: _put_read(in_place, x, indices, values, accumulate)
    if x.shape[len(leading) : len(leading) + mask.ndim] != mask.shape:
        return None
    trailing = x.ndim - len(leading) - mask.ndim
    spread = mask.reshape(*mask.shape, *[1] * trailing)
    fill = x.masked_fill_ if in_place else x.masked_fill
    return lambda: fill(spread, values.reshape(()))


def _put_read(
    in_place: bool,
    x: torch.Tensor,
    indices: Sequence[torch.Tensor | None],
    values: torch.Tensor,
    accumulate: bool,
) -> torch.Tensor:
    """Write through masks whose places are read: as many as there are cannot be cut unevenly."""
    places: list[torch.Tensor | None] = []
    for index in indices:
        is_mask = index is not None and index.dtype in _MASKS
        places += aten.nonzero(index).unbind(1) if is_mask else [index]
    write = _index_put(in_place, x, places, values, accumulate)
    put = aten.index_put_ if in_place else aten.index_put
    return put(x, places, values, accumulate) if write is None else write()


def _index_add(
    in_place: bool,
    x: torch.Tensor,
    dim: int,
    index: torch.Tensor,
    source: torch.Tensor,
    alpha: Any = 1,
) -> Replacement:
    return _along(in_place, x, dim, index, lambda: source if alpha == 1 else source * alpha, True)


def _index_copy(
    in_place: bool, x: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor
) -> Replacement:
    return _along(in_place, x, dim, index, lambda: source, False)


def _index_fill(
    in_place: bool, x: torch.Tensor, dim: int, index: torch.Tensor, value: Any
) -> Replacement:
    def source() -> torch.Tensor:
        shape = list(x.shape)
        shape[dim] = index.numel()
        is_tensor = isinstance(value, torch.Tensor)
        filling = value.to(x.dtype).reshape(()) if is_tensor else x.new_full((), value)
        return filling.expand(shape)

    return _along(in_place, x, dim, index, source, False)


def _along(
    in_place: bool,
    x: torch.Tensor,
    dim: int,
    index: torch.Tensor,
    source: Callable[[], torch.Tensor],
    accumulate: bool,
) -> Replacement:
    if x.ndim == 0 or index.numel() == 0 or evenly(index.shape):
        return None
    dim %= x.ndim

    def write() -> torch.Tensor:
        values = source()
        values = (values if values.ndim == x.ndim else values.unsqueeze(dim)).movedim(dim, 0)
        return into_front(x, [dim], [index.reshape(-1)], values, accumulate, in_place)

    return write


def _put(
    in_place: bool,
    x: torch.Tensor,
    index: torch.Tensor,
    source: torch.Tensor,
    accumulate: bool = False,
) -> Replacement:
    if index.numel() == 0 or evenly(index.shape):
        return None

    def write() -> torch.Tensor:
        flat, points = x.reshape(-1), [index.reshape(-1)]
        output = put_points(flat, points, source.reshape(-1), accumulate, False).reshape(x.shape)
        return assign(x, output) if in_place else output

    return write


def _embedding_backward(
    grad: torch.Tensor, indices: torch.Tensor, num_weights: int, padding_idx: int, by_count: bool
) -> Replacement:
    if indices.numel() == 0 or evenly(indices.shape):
        return None

    def backward() -> torch.Tensor:
        points, size = indices.reshape(-1), grad.shape[-1]
        rows = grad.reshape(-1, size)
        if by_count:
            ones = rows.new_ones(len(points))
            counts = put_points(rows.new_zeros(num_weights), [points], ones, True, False)
            rows = rows / counts[points].unsqueeze(1)
        rows = rows.masked_fill((points == padding_idx).unsqueeze(1), 0)
        return put_points(rows.new_zeros(num_weights, size), [points], rows, True, False)

    return backward


_RULES: dict[Any, Callable[..., Replacement]] = {
    aten.scatter.src: _scatter,
    aten.scatter.reduce: _scatter,
    aten.scatter_.src: _scatter,
    aten.scatter_.reduce: _scatter,
    aten.scatter.value: _scatter_value,
    aten.scatter.value_reduce: _scatter_value,
    aten.scatter_.value: _scatter_value,
    aten.scatter_.value_reduce: _scatter_value,
    aten.scatter_add: _scatter_add,
    aten.scatter_add_: _scatter_add,
    aten.scatter_reduce: _scatter_reduce,
    aten.scatter_reduce_: _scatter_reduce,
    aten.index_put: _index_put,
    aten.index_put_: _index_put,
    aten._unsafe_index_put: _index_put,
    aten.index_add: _index_add,
    aten.index_add_: _index_add,
    aten.index_copy: _index_copy,
    aten.index_copy_: _index_copy,
    aten.index_fill: _index_fill,
    aten.index_fill_: _index_fill,
    aten.put: _put,
    aten.put_: _put,
    aten.embedding_dense_backward: _embedding_backward,
    aten.embedding: _embedding,
    aten.gather: _gather,
    aten.index: _index,
    aten.index_select: _index_select,
}
_WITHOUT_FORMS = frozenset(
    {
        aten.embedding,
        aten.embedding_dense_backward,
        aten.gather,
        aten.index,
        aten.index_select,
    }
)


# ------------------------------------------------------------------------------------------- Poison
#
# An index on the devices that a tensor does not have reads or writes NaN on torch_xla.
#
# XLA has no error for it: it takes the nearest row, or writes nothing. To look at the values first
# would run all that is pending, so that what comes out tells instead::
#
#     rows[i]         i = [3, 8] of 8 rows: the second row is NaN
#     loss(x, target), rows.index_add(0, i, more): NaN altogether
#
# Invariants:
#
# * What is right stays as it is; reads are told apart element by element, without a collective.
# * Of whole numbers, which have no NaN, the smallest is read. Writes of them are left out.

_READS = (
    *(aten.index.Tensor, aten.index_select.default, aten.gather.default),
    *(aten.take.default, aten.embedding.default),
)


def poison(functional: Any, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any) -> Any:
    """Return the result of an op of ``BOUNDS``, NaN where an index was out of range.

    Args:
        functional: The op, or the form of it that writes to nothing.
        args: Its arguments, host tensors among them as they were given.
        kwargs: Its keyword arguments.
        output: What it returned: payloads. One that was written to is written to again.
    """
    if torch._C._current_graph_task_id() != -1:  # pyright: ignore[reportPrivateImportUsage]
        return output
    bounds = [
        bound
        for bound in BOUNDS[functional](*args, **kwargs)
        if bound.what == "index" and bound.index.numel() and bound.index.device.type == "xla"
    ]
    first = output[0] if isinstance(output, list | tuple) else output
    if not bounds or (functional not in _READS and not _has_nan(first)):
        return output
    is_right = functools.reduce(operator.and_, map(_in_range, bounds))
    if functional in _READS and not _has_masks(args[1]):
        is_right = _spread_over_reads(functional, args, is_right)
    else:
        is_right = is_right.all()
    is_written = first is args[0]
    poisoned = (first.masked_fill_ if is_written else first.masked_fill)(~is_right, _worst(first))
    if is_written:
        return output
    return type(output)([poisoned, *output[1:]]) if isinstance(output, list | tuple) else poisoned


def _has_nan(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _worst(tensor: torch.Tensor) -> Any:
    if _has_nan(tensor):
        return float("nan")
    return False if tensor.dtype == torch.bool else torch.iinfo(tensor.dtype).min


def _in_range(bound: Bound) -> torch.Tensor:
    is_right = (bound.index >= bound.low) & (bound.index < bound.high)
    return is_right if bound.ignored is None else is_right | (bound.index == bound.ignored)


def _has_masks(indices: Any) -> bool:
    return isinstance(indices, list | tuple) and any(
        index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices
    )


def _spread_over_reads(
    functional: Any, args: Sequence[Any], is_right: torch.Tensor
) -> torch.Tensor:
    """Return what is right of the indices as what is right of the values read by them."""
    if functional is aten.embedding.default:
        return is_right.unsqueeze(-1)
    ndim = args[0].ndim
    if functional is aten.index_select.default:
        return is_right.reshape((-1, *[1] * (ndim - 1 - args[1] % ndim)) if ndim else ())
    if functional is aten.index.Tensor:
        places = [place for place, index in enumerate(args[1]) if index is not None]
        side_by_side = places == list(range(places[0], places[-1] + 1))
        behind = ndim - len(places) - (places[0] if side_by_side else 0)
        return is_right[(..., *[None] * behind)]
    return is_right
