"""Local views on torch_xla: ops on what each device has of its own, with values that stay readable.

A local payload is a stack. An op acts on it in one of two ways:

* As one op of the stack, where :mod:`~xla_dtensor.runtimes.torch_xla.stacks` knows how.
* In a manual region of its own: in, the op on each device's tensor, out. No device can need
  anything of another there, so every op that manual regions know works, at three times the cost to
  trace. What the op writes is copied into the stack.

What depends on values for its shape, or is computed on the host, is refused.

A region may cover some of the axes. Along the others, ops of the first kind leave all to XLA; those
of the second, and collectives, give every device the whole, so XLA gathers along an axis that a
tensor was cut along. Hence the first kind is more than views and random numbers: see
``docs/decisions/local_view_torch_xla.md``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from math import prod
from typing import Any

import torch

from mesh_utils import Axis, Mesh
from xla_dtensor.core import Layout, ManualRegion, OpSharding
from xla_dtensor.core.errors import (
    DistributeError,
    LocalViewError,
    ManualRegionError,
    UnsupportedOpError,
)
from xla_dtensor.core.placements import AxisPart, Gap, entry_axis
from xla_dtensor.core.translate import layout_of_op_sharding
from xla_dtensor.runtimes.functional import functional_form
from xla_dtensor.runtimes.nested import leaves, map_nested
from xla_dtensor.runtimes.torch_xla.manual import (
    ManualRegions,
    full_to_shard,
    run_collective,
    shard_to_full,
)
from xla_dtensor.runtimes.torch_xla.payload import functionalization
from xla_dtensor.runtimes.torch_xla.stacks import (
    LocalPayload,
    OuterCuts,
    cuts_of,
    draws_numbers,
    enter_tile,
    even_cuts,
    is_batched,
    is_mask,
    is_masked_write,
    leave_tile,
    run_batched,
)
from xla_dtensor.runtimes.written import makes_results, written_arguments, written_targets

__all__ = ["LocalViews"]

aten = torch.ops.aten


# -------------------------------------------- The way into a local view and out of it on torch_xla
#
# From a global tensor to a stack, and back.
#
# In a manual region nothing moves at the border, so that is the way: in as the layout says, out
# with one row for each device. (16, 8) as [dp, tp] on (dp=2, tp=4) is the stack (8, 8, 2).
#
# A region over some axes says nothing of the others, and a tensor that is known to be cut along
# them is to stay so: (16, 8) as [(tp, dp), -] with a region over (tp,) is the stack (4, 4, 8),
# which lies as [tp, dp, -].


@lru_cache(1024)
def _cuts_within(
    annotation: OpSharding, shape: tuple[int, ...], layout: Layout, region: ManualRegion
) -> OuterCuts:
    """Along which axes a tensor is cut within the shards of a layout; none if otherwise too."""
    root = Mesh.arange((region.mesh.root.size(),), ("device",))
    present = layout_of_op_sharding(annotation, region.mesh, len(shape), root)
    if present is None:
        return ()
    cuts: list[tuple[Axis, int]] = []
    for dim, outer in enumerate(layout.dims):
        entries = present.dims[dim]
        if entries[: len(outer)] != outer or shape[dim] % annotation.num_tiles(dim):
            return ()
        for entry in entries[len(outer) :]:
            if isinstance(entry, (AxisPart, Gap)):  # a part of an axis is none that a region has
                return ()
            cuts.append((entry, dim))
    return even_cuts(region.tile_shape(layout, shape), region, tuple(cuts), frozenset())


def _cut_further(layout: Layout, cuts: OuterCuts) -> Layout:
    dims = list(layout.dims)
    for axis, dim in cuts:
        dims[dim] = (*dims[dim], axis)  # pyright: ignore
    return Layout(layout.mesh, tuple(dims))


def _joined(local: LocalPayload, layout: Layout) -> torch.Tensor:
    """The global tensor by reshapes alone: along other axes XLA chooses how it lies."""
    region = local._region
    dim_of: dict[Axis, int] = {}
    split: list[int] = []
    for size, entries in zip(local.shape, layout.dims, strict=True):
        for axis in map(entry_axis, entries):
            if axis is not None:
                dim_of[axis] = len(split)
                split.append(region.mesh.size(axis))
        split.append(size)
    front = [dim_of[axis] for axis in region.axes]
    order = [*front, *(dim for dim in range(len(split)) if dim not in front)]
    stack = local._stack.reshape(*region.sizes, *local.shape)
    joined = stack.permute(*map(order.index, range(len(split))))
    return joined.reshape(layout.get_global_shape(tuple(local.shape))).clone()


# ------------------------------------------------------------------------ Local views on torch_xla

_BROKEN = "Check failed"  # torch_xla's words for a failure of its own.
_INDEXED = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}


class LocalViews:
    """What the runtime does with local payloads.

    Args:
        op_sharding_for: Returns the OpSharding of a shape and a layout, relative to the root;
            raises what the runtime raises for wrong ones.
        annotation: :meth:`Runtime.annotation`.
        manual: The runtime's manual regions.
    """

    def __init__(
        self,
        op_sharding_for: Callable[[Sequence[int], Layout], OpSharding],
        annotation: Callable[[torch.Tensor], OpSharding | None],
        manual: ManualRegions,
    ) -> None:
        self._op_sharding_for = op_sharding_for
        self._annotation = annotation
        self._manual = manual

    def enter(self, payload: torch.Tensor, layout: Layout, region: ManualRegion) -> LocalPayload:
        """See :meth:`Runtime.enter_local`."""
        region.check_layout(layout)
        self._manual.check_global(payload)
        sharding = self._op_sharding_for(payload.shape, layout)
        if any(size % sharding.num_tiles(dim) for dim, size in enumerate(payload.shape)):
            raise DistributeError(
                f"A local view of a tensor of shape={tuple(payload.shape)} was asked for as "
                f"{layout}. The axes do not divide it evenly, and all local tensors have one "
                "shape. Pad it first."
            )
        _check_spans(region)
        annotation = None if region.is_whole else self._annotation(payload)
        cuts: OuterCuts = ()
        if annotation is not None and payload.numel():
            cuts = _cuts_within(annotation, tuple(payload.shape), layout, region)
            sharding = self._op_sharding_for(payload.shape, _cut_further(layout, cuts))
        copied = len(region.copied_axes(layout)) == len(region.axes)
        if region.is_whole or cuts or not copied:
            return leave_tile(full_to_shard(payload, sharding), region, cuts)
        with functionalization():  # The same on every device: as it lies along the other axes.
            stack = payload.unsqueeze(0).expand(prod(region.sizes), *payload.shape).clone()
            return LocalPayload(stack, region)

    def leave(
        self, local: torch.Tensor, layout: Layout, region: ManualRegion
    ) -> tuple[torch.Tensor, OpSharding | None]:
        """Return the payload of :meth:`Runtime.leave_local`, and how it lies if that is known."""
        region.check_layout(layout)
        payload = _checked(local, region)
        if not region.is_whole and not region.copied_axes(layout):
            with functionalization():
                return _joined(payload, layout), None
        cuts = cuts_of(payload)
        sharding = self._op_sharding_for(payload.shape, _cut_further(layout, cuts))
        return shard_to_full(enter_tile(payload, cuts), sharding), sharding

    def run_op(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """See :meth:`Runtime.run_local_op`."""
        if func is aten._has_compatible_shallow_copy_type.default:
            return all(isinstance(tensor, LocalPayload) for tensor in args)
        written = _written(func, args, kwargs)
        if torch.Tag.inplace_view in func.tags:
            view = functional_form(func)
            if view is None or not view.is_view:
                raise _refusal(func, args, kwargs)
            args[0].become(self.run_op(view, args, kwargs))
            return args[0]
        is_masked = is_masked_write(func, args)
        if not is_masked:
            _check_has_shape(func, args)
        region = _payloads(args, kwargs)[0]._region
        # A manual region would make copies of views, and the same numbers on all devices.
        has_one_way = func.is_view or draws_numbers(func)
        if is_masked or is_batched(func):
            try:
                return run_batched(func, args, kwargs, region)
            except RuntimeError as error:
                if is_masked:
                    raise
                # In a manual region the op says what is wrong in terms of one device's shapes.
                if has_one_way:
                    raise _refusal(func, args, kwargs) from error
        elif has_one_way:
            raise _refusal(func, args, kwargs)
        return self._run_manual(func, args, kwargs, written)

    def _run_manual(
        self,
        func: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        written: list[LocalPayload],
    ) -> Any:
        payloads = {id(payload): payload for payload in _payloads(args, kwargs)}
        tiles = {key: enter_tile(payload) for key, payload in payloads.items()}
        region = next(iter(payloads.values()))._region

        def tile(argument: Any) -> Any:
            return tiles.get(id(argument), argument)

        def local(output: Any) -> Any:
            return leave_tile(output, region) if isinstance(output, torch.Tensor) else output

        try:
            output = self._manual.run_op(
                func, map_nested(tile, tuple(args)), map_nested(tile, dict(kwargs))
            )
        except RuntimeError as error:
            refused = isinstance(error, (ManualRegionError, UnsupportedOpError))
            if refused or _BROKEN in str(error):
                raise _refusal(func, args, kwargs) from error
            raise
        for key in {id(target) for target in written}:
            with functionalization():
                payloads[key]._stack.copy_(leave_tile(tiles[key], region)._stack)
        returns_targets = func._schema.is_mutable and not makes_results(func)
        return written_targets(func, args, kwargs) if returns_targets else map_nested(local, output)

    def collective(
        self,
        name: str,
        local: torch.Tensor,
        region: ManualRegion,
        axes: tuple[Axis, ...],
        **options: Any,
    ) -> torch.Tensor:
        """See :meth:`Runtime.local_collective`.

        Those of manual regions, each in one of its own, so each is the one collective that it says.
        Of ops on the stack XLA's partitioner makes others: of ``stack.sum(0)`` cut in blocks an
        all-reduce of the whole.
        """
        payload = _checked(local, region)
        mixed = [options[key] for key in ("dim", "split_dim", "concat_dim") if key in options]
        cuts = () if name == "axis_index" else cuts_of(payload, mixed)
        tile = run_collective(name, enter_tile(payload, cuts), region.mesh, axes, options)
        return leave_tile(tile, region, cuts)


def _check_spans(region: ManualRegion) -> None:
    mesh, root = region.mesh, region.mesh.root
    if mesh.size() < root.size():
        raise UnsupportedOpError(
            f"A local view over axes={region.axes} of a mesh ({mesh.axes_text()}) was asked for on "
            f"the runtime 'torch_xla'. Its programs run on all {root.size()} devices of "
            f"({root.axes_text()}). Make the region on a mesh over all of them."
        )


def _checked(local: torch.Tensor, region: ManualRegion) -> LocalPayload:
    if isinstance(local, LocalPayload) and local._region == region:
        return local
    what = f"one over axes={local._region.axes}" if isinstance(local, LocalPayload) else "none"
    raise LocalViewError(
        f"A local payload over axes={region.axes} was asked for, and a tensor of "
        f"shape={tuple(local.shape)} given, which is {what}. The devices would be counted "
        "otherwise. Pass a result of enter_local for this region."
    )


def _payloads(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[LocalPayload]:
    arguments = leaves((tuple(args), dict(kwargs)))
    return [argument for argument in arguments if isinstance(argument, LocalPayload)]


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[LocalPayload]:
    """The local payloads that an op writes into, in the order of its arguments."""
    names = written_arguments(func) if func._schema.is_mutable else []
    if func is aten.native_batch_norm.default:
        names = ["running_mean", "running_var"]  # What its schema does not say.
    if not names:
        return []
    parameters = (parameter.name for parameter in func._schema.arguments)
    arguments = dict(zip(parameters, args, strict=False)) | dict(kwargs)
    if func is aten.native_batch_norm.default and not arguments.get("training"):
        return []
    written: list[LocalPayload] = []
    for target in leaves([arguments.get(name) for name in names]):
        if isinstance(target, LocalPayload):
            written.append(target)
        elif isinstance(target, torch.Tensor):
            raise LocalViewError(
                f"{func} was called on a local view, to write into a tensor of "
                f"shape={tuple(target.shape)} that is none. Each device has its own values, which "
                "one tensor outside cannot hold. Write into a local view."
            )
    return written


def _check_has_shape(func: Any, args: Sequence[Any]) -> None:
    if func.overloadpacket.__name__ in _INDEXED:
        depends = any(map(is_mask, args[1]))
    else:
        depends = torch.Tag.dynamic_output_shape in func.tags
    if depends:
        raise UnsupportedOpError(
            f"{func} was called on a local view, and the shape of its result depends on the "
            "values, which differ between devices. A program has one shape for all. Use "
            "torch.where, masked_fill, or topk with a fixed number."
        )


def _refusal(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> UnsupportedOpError:
    shapes = [tuple(payload.shape) for payload in _payloads(args, kwargs)]
    return UnsupportedOpError(
        f"{func} was called on a local view, with shapes={shapes}. The runtime 'torch_xla' cannot "
        "run it on each device by itself: torch_xla computes it on the host, or has no rule for "
        "it. Use other ops, or the runtime 'jax'."
    )
