"""Reading a LocalView from Python: the first reachable device's tensor, or all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from xla_dtensor.core import Layout, ManualRegion
from xla_dtensor.errors import LocalViewError
from xla_dtensor.nested import map_nested
from xla_dtensor.runtimes.base import AddressableShard
from xla_dtensor.runtimes.registry import get_runtime

if TYPE_CHECKING:
    from xla_dtensor.local_view import LocalView

__all__ = ["asked_for", "first_shard", "read_op", "shards_of"]

aten = torch.ops.aten
_ASKING = frozenset(
    {
        torch.Tensor.item,
        torch.Tensor.__bool__,
        torch.Tensor.__int__,
        torch.Tensor.__float__,
        torch.Tensor.__complex__,
        torch.Tensor.__index__,
        torch.Tensor.__contains__,
        torch.Tensor.is_nonzero,
        torch.is_nonzero,
    }
)
_asked: ContextVar[bool] = ContextVar("_asked", default=False)
_READS = frozenset({aten._local_scalar_dense.default, aten.equal.default, aten.allclose.default})


@contextmanager
def asked_for(func: Any) -> Iterator[None]:
    """Note, for the time of a call, whether the program itself asks for a value.

    Args:
        func: What is called: ``torch.Tensor.item`` asks, ``torch.nn.functional.one_hot`` does not.
    """
    token = _asked.set(func in _ASKING)
    try:
        yield
    finally:
        _asked.reset(token)


def read_op(func: Any, args: Sequence[Any], kwargs: Any) -> Callable[[], Any] | None:
    """Return what runs an op that reads values, on the first reachable device's; None if it none.

    Args:
        func: The op.
        args: Its arguments, LocalViews among them.
        kwargs: Its keyword arguments.
    """
    device = kwargs.get("device") if func is aten._to_copy.default else None
    leaves_device = (
        device is not None
        and torch.device(device).type == "cpu"
        and torch.device(get_runtime().torch_device).type != "cpu"
    )
    if func not in _READS and not leaves_device:
        return None
    if func is aten._local_scalar_dense.default and args[0]._varying and not _asked.get():
        raise LocalViewError(
            f"A value of {args[0]!r} was asked for inside of PyTorch, to choose a shape, a number "
            "or a branch for all devices. They may hold different values. Say it in numbers, such "
            "as num_classes=, use ops such as torch.where and index_select, or read item() first, "
            "which gives the first device's."
        )

    def read() -> Any:
        host_args, host_kwargs = map_nested(
            lambda v: first_shard(v, str(func)) if hasattr(v, "_varying") else v,
            (tuple(args), kwargs),
        )
        return func(*host_args, **host_kwargs)

    return read


def first_shard(view: LocalView, what: str) -> torch.Tensor:
    """Return the local tensor of the first device that this process reaches, on the host.

    Args:
        view: The view.
        what: What reads it, for messages.

    Raises:
        LocalViewError: Each of several processes would read another value.
    """
    runtime = get_runtime()
    if view._varying and len(runtime.addressable_device_ids()) < len(runtime.device_ids()):
        raise LocalViewError(
            f"{what} was called on {view!r} in a job of several processes. Each would read another "
            "device's value, and their programs would part. Use addressable_shards(), or reduce "
            f"over the axes {sorted(map(str, view._varying))} first."
        )
    order = {int(device): place for place, device in enumerate(view._region.mesh.device_ids.flat)}
    return min(shards_of(view), key=lambda shard: order[shard.device_id]).data


def shards_of(view: LocalView) -> tuple[AddressableShard, ...]:
    """Return the local tensors of this process's devices, ordered by device id."""
    runtime, region = get_runtime(), view._region
    stacked = view._payload
    for _ in region.axes:
        stacked = runtime.run_local_op(aten.unsqueeze.default, (stacked, 0), {})
    layout = Layout(region.mesh, (*((axis,) for axis in region.axes), *((),) * view.ndim))
    shards = runtime.addressable_shards(runtime.leave_local(stacked, layout, region))
    sizes = None if view._uneven is None else view._uneven.sizes_on(region)
    return tuple(_unstacked(shard, region, sizes) for shard in shards)


def _unstacked(shard: AddressableShard, region: ManualRegion, sizes: Any) -> AddressableShard:
    ndim, place = len(region.axes), region.mesh.coordinates
    data = shard.data[(0,) * ndim]
    if sizes is not None:
        at = dict(zip(region.mesh.axis_names, map(int, place(shard.device_id)), strict=True))
        coordinate = tuple(at[axis] for axis in region.axes)
        for dim, table in sizes.items():
            data = data.narrow(dim, 0, int(table[coordinate]))
    return replace(shard, index=tuple(slice(0, n) for n in data.shape), data=data)
