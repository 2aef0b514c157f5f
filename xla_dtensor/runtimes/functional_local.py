"""What local views ask of the runtime, as functional ops that torch.compile can record.

As in :mod:`xla_dtensor.runtimes.functional_ops`: on payloads each function is what the runtime
does, on the stand-ins of torch.compile it is a call in the graph, of tensors and of a text that
names everything else. A stand-in for a local payload has the local shape, as the payload has, so
between the borders a graph has plain aten ops, which the payloads dispatch themselves::

    %to_local = torch.ops.xla_dtensor.to_local(%x, "(8, 4) as [tp, -] on (dp=2, tp=4) #0")
    %mul = torch.ops.aten.mul.Tensor(%to_local, 2)
    %psum = torch.ops.xla_dtensor.local_collective(%mul, "all_reduce over ('tp',) #0")
    %from_local = torch.ops.xla_dtensor.from_local(%psum, "(2, 4) as [-, -] on (dp=2, tp=4) #1")
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from mesh_utils import Axis
from xla_dtensor.core import Layout, ManualRegion
from xla_dtensor.nested import leaves
from xla_dtensor.runtimes.functional_ops import define, is_traced, run_traced
from xla_dtensor.runtimes.layout_names import Names
from xla_dtensor.runtimes.registry import get_runtime

__all__ = [
    "Crossing",
    "crossed_in",
    "crossed_out",
    "enter_everywhere",
    "gather_everywhere",
    "local_collective",
    "operand_everywhere",
    "plain_like",
    "real_sizes",
    "run_local_op",
]


class Crossing(Protocol):
    """A border between global and local tensors: :class:`xla_dtensor.local_border.Border`."""

    layout: Layout
    shape: tuple[int, ...]

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of a local tensor."""
        ...

    def cut(self, payload: torch.Tensor) -> torch.Tensor:
        """Return the local payload of a global one."""
        ...

    def joined(self, local: torch.Tensor) -> torch.Tensor:
        """Return the global payload of a local one."""
        ...


_borders = Names("border of local tensors")
_regions = Names("region of local tensors")
_collectives = Names("collective")
_sizes = Names("table of sizes")


def _on(layout: Layout) -> str:
    axes = zip(layout.mesh.axis_names, layout.mesh.mesh_shape, strict=True)
    return ", ".join(f"{name}={size}" for name, size in axes)


def _border_name(border: Crossing) -> str:
    text = f"{border.shape} as {border.layout} on ({_on(border.layout)})"
    return _borders.name(border, text, (border.layout, border.shape))


def _region_name(region: ManualRegion) -> str:
    return _regions.name(region, f"over {region.axes}")


# ---------------------------------------------------------------------- what local views call


def crossed_in(payload: torch.Tensor, border: Crossing) -> torch.Tensor:
    """Return the local payload of a global one, or record that."""
    if is_traced(payload):
        return torch.ops.xla_dtensor.to_local.default(payload, _border_name(border))
    return border.cut(payload)


def crossed_out(local: torch.Tensor, border: Crossing) -> torch.Tensor:
    """Return the global payload of a local one, reductions made, or record that."""
    if is_traced(local):
        return torch.ops.xla_dtensor.from_local.default(local, _border_name(border))
    return border.joined(local)


def run_local_op(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run an aten op on every device's own tensor, or record it."""
    tensors = [v for v in leaves((tuple(args), dict(kwargs))) if isinstance(v, torch.Tensor)]
    if any(map(is_traced, tensors)):
        return run_traced(func, args, kwargs)
    return get_runtime().run_local_op(func, args, kwargs)


def local_collective(
    name: str,
    local: torch.Tensor,
    region: ManualRegion,
    axes: tuple[Axis, ...],
    options: Mapping[str, Any],
) -> torch.Tensor:
    """Run a collective on a local payload, or record it."""
    if not is_traced(local):
        return get_runtime().local_collective(name, local, region, axes, **options)
    key = (name, region, axes, tuple(options.items()))
    text = _collectives.name((name, region, axes, dict(options)), f"{name} over {axes}", key)
    return torch.ops.xla_dtensor.local_collective.default(local, text)


def enter_everywhere(tensor: torch.Tensor, region: ManualRegion) -> torch.Tensor:
    """Record a stand-in for a plain tensor as a local payload, equal on all devices."""
    return torch.ops.xla_dtensor.enter_everywhere.default(tensor, _region_name(region))


def operand_everywhere(tensor: torch.Tensor, region: ManualRegion) -> torch.Tensor:
    """Record a stand-in for a plain tensor as an operand beside local payloads."""
    return torch.ops.xla_dtensor.operand_everywhere.default(tensor, _region_name(region))


def gather_everywhere(local: torch.Tensor, like: torch.Tensor, region: ManualRegion) -> Any:
    """Record a stand-in for a local payload, equal on all devices, as a plain tensor.

    Args:
        local: The stand-in.
        like: One for a tensor that is where the result is to be: on the host or not.
        region: The region of `local`.
    """
    return torch.ops.xla_dtensor.gather_everywhere.default(local, like, _region_name(region))


def plain_like(payload: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Record a stand-in for a global payload as a plain tensor, on the host if `like` is."""
    return torch.ops.xla_dtensor.plain_like.default(payload, like)


def real_sizes(local: torch.Tensor, sizes: Any, region: ManualRegion) -> torch.Tensor:
    """Return each device's own number of a table, as a local payload, or record that.

    Args:
        local: Tells whether there is something to record.
        sizes: An array of integers, of the shape of the region.
        region: The region.
    """
    if not is_traced(local):
        return _numbers(sizes, region)
    table = tuple(map(int, sizes.reshape(-1)))
    text = _sizes.name((sizes, region), f"{table} over {region.axes}", (table, region))
    return torch.ops.xla_dtensor.real_sizes.default(local, text)


# ---------------------------------------------------------------------- the ops


def _numbers(sizes: Any, region: ManualRegion) -> torch.Tensor:
    runtime = get_runtime()
    layout = Layout(region.mesh, tuple((axis,) for axis in region.axes))
    return runtime.enter_local(runtime.put(torch.from_numpy(sizes), layout), layout, region)


def _whole(region: ManualRegion, ndim: int) -> Layout:
    open_dims = frozenset() if region.is_whole else frozenset(range(ndim))
    return Layout(region.mesh, ((),) * ndim, (), open_dims)


def _spread(tensor: torch.Tensor, region: str) -> torch.Tensor:
    runtime, over = get_runtime(), _regions.value(region)
    if not runtime.is_payload(tensor):
        tensor = runtime.put(tensor.detach(), Layout.replicated(over.mesh, tensor.ndim))
    return runtime.enter_local(tensor, _whole(over, tensor.ndim), over)


def _operand(tensor: torch.Tensor, region: str) -> torch.Tensor:
    # Beside local payloads a host tensor is the same on every device.
    return _spread(tensor, region) if get_runtime().is_payload(tensor) else tensor.clone()


def _gather(local: torch.Tensor, like: torch.Tensor, region: str) -> torch.Tensor:
    over = _regions.value(region)
    return _plain(get_runtime().leave_local(local, _whole(over, local.ndim), over), like)


def _plain(payload: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    runtime = get_runtime()
    return runtime.to_plain(payload) if runtime.is_payload(like) else runtime.to_host(payload)


def _communicate(local: torch.Tensor, collective: str) -> torch.Tensor:
    name, region, axes, options = _collectives.value(collective)
    return get_runtime().local_collective(name, local, region, axes, **options)


def _shape_after(
    name: str, shape: Sequence[int], members: int, options: Mapping[str, Any]
) -> list[int]:
    after = list(shape)
    grows = {"all_gather": "dim", "all_to_all": "concat_dim"}
    shrinks = {"reduce_scatter": "dim", "all_to_all": "split_dim"}
    if name in shrinks:
        after[options[shrinks[name]]] //= members
    if name in grows:
        after[options[grows[name]]] *= members
    return [] if name == "axis_index" else after


def _empty(shape: Sequence[int], dtype: torch.dtype, device: Any = None) -> torch.Tensor:
    device = get_runtime().torch_device if device is None else device
    return torch.empty(tuple(shape), dtype=dtype, device=device)


def _after_collective(local: torch.Tensor, collective: str) -> torch.Tensor:
    name, region, axes, options = _collectives.value(collective)
    members = 1
    for axis in axes:
        members *= region.mesh.size(axis)
    dtype = torch.int64 if name == "axis_index" else local.dtype
    return _empty(_shape_after(name, local.shape, members, options), dtype)


def _as_operand(tensor: torch.Tensor, _: str) -> torch.Tensor:
    return _empty(tensor.shape, tensor.dtype, tensor.device)


def _placed_like(tensor: torch.Tensor, like: torch.Tensor, *_: Any) -> torch.Tensor:
    return _empty(tensor.shape, tensor.dtype, like.device)


def _of_border(shape: Callable[[Any], Sequence[int]]) -> Callable[..., torch.Tensor]:
    return lambda tensor, border: _empty(shape(_borders.value(border)), tensor.dtype)


_Run = Callable[..., torch.Tensor]
_OPS: tuple[tuple[str, _Run, _Run], ...] = (
    (
        "to_local(Tensor payload, str border) -> Tensor",
        lambda payload, border: _borders.value(border).cut(payload),
        _of_border(lambda border: border.local_shape),
    ),
    (
        "from_local(Tensor local, str border) -> Tensor",
        lambda local, border: _borders.value(border).joined(local),
        _of_border(lambda border: border.shape),
    ),
    (
        "local_collective(Tensor local, str collective) -> Tensor",
        _communicate,
        _after_collective,
    ),
    (
        "enter_everywhere(Tensor tensor, str region) -> Tensor",
        _spread,
        lambda tensor, _: _empty(tensor.shape, tensor.dtype),
    ),
    ("operand_everywhere(Tensor tensor, str region) -> Tensor", _operand, _as_operand),
    (
        "gather_everywhere(Tensor local, Tensor like, str region) -> Tensor",
        _gather,
        _placed_like,
    ),
    ("plain_like(Tensor payload, Tensor like) -> Tensor", _plain, _placed_like),
    (
        "real_sizes(Tensor local, str sizes) -> Tensor",
        lambda local, sizes: _numbers(*_sizes.value(sizes)),
        lambda local, sizes: _empty((), torch.int64),
    ),
)
for _schema, _run, _fake in _OPS:
    define(_schema, _run, _fake)
