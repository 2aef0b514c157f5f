"""Local views on torch_xla: ops on what each device has of its own, with values that stay readable.

A local payload is a stack (`torch_xla_local_payload`). An op acts on it in one of two ways:

* Through torch's batching rules, as one op of the stack (`torch_xla_local_batched`): views, which
  so alias their base, pointwise ops, matrix products, reductions and what draws random numbers.
* In a manual region of its own: in, the op on each device's tensor, out. No device can need
  anything of another there, so every op that manual regions know works, at four times the cost to
  trace. What the op writes is copied into the stack.

What depends on values for its shape, or is computed on the host, is refused.

A region may cover some of the axes. Along the others, ops of the first kind leave all to XLA; those
of the second, and collectives, give every device the whole, so XLA gathers along an axis that a
tensor was cut along.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from mesh_utils import Axis
from xla_dtensor.core import Layout, ManualRegion, OpSharding
from xla_dtensor.errors import (
    DistributeError,
    LocalViewError,
    ManualRegionError,
    UnsupportedOpError,
)
from xla_dtensor.nested import leaves, map_nested
from xla_dtensor.runtimes.functional_ops import functional_form
from xla_dtensor.runtimes.torch_xla_local_batched import draws_numbers, is_batched, run_batched
from xla_dtensor.runtimes.torch_xla_local_border import enter, leave
from xla_dtensor.runtimes.torch_xla_local_collectives import run_local_collective
from xla_dtensor.runtimes.torch_xla_local_masks import is_mask, is_masked_write, masked_write
from xla_dtensor.runtimes.torch_xla_local_payload import (
    LocalPayload,
    cuts_of,
    enter_tile,
    leave_tile,
)
from xla_dtensor.runtimes.torch_xla_manual import ManualRegions
from xla_dtensor.runtimes.torch_xla_payload import functionalization

__all__ = ["LocalViews"]

aten = torch.ops.aten
# Their rules do not keep a tensor apart from its neighbours in the stack.
_REFUSED_VIEWS = {aten.as_strided.default}
# What their schemas do not say.
_HIDDEN_WRITES = {aten.native_batch_norm.default: ("running_mean", "running_var")}
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
        return enter(payload, layout, region, sharding, self._annotation(payload))

    def leave(
        self, local: torch.Tensor, layout: Layout, region: ManualRegion
    ) -> tuple[torch.Tensor, OpSharding | None]:
        """Return the payload of :meth:`Runtime.leave_local`, and how it lies if that is known."""
        region.check_layout(layout)
        given = _checked(local, region)
        # Cut within the shards of the layout.
        dims, cuts = list(layout.dims), cuts_of(given)
        for axis, dim in cuts:
            dims[dim] = (*dims[dim], axis)  # pyright: ignore
        cut = Layout(layout.mesh, tuple(dims))
        return leave(given, layout, self._op_sharding_for(given.shape, cut), cuts)

    def run_op(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """See :meth:`Runtime.run_local_op`."""
        values = leaves((tuple(args), dict(kwargs)))
        like = next(value for value in values if isinstance(value, LocalPayload))
        written = _written(func, args, kwargs)
        if func is aten._has_compatible_shallow_copy_type.default:
            return all(isinstance(value, LocalPayload) for value in args)
        if torch.Tag.inplace_view in func.tags:
            return self._reshape_in_place(func, args, kwargs)
        if is_masked_write(func, args):
            accumulate = args[3] if len(args) > 3 else kwargs.get("accumulate", False)
            return masked_write(self._run, func, args, accumulate)
        _check_has_shape(func, args)
        if is_batched(func, like._region.is_whole) and func not in _REFUSED_VIEWS:
            try:
                found = run_batched(func, args, kwargs, like)
            except RuntimeError as error:
                # In a manual region the op says what is wrong in terms of one device's shapes.
                if func.is_view or draws_numbers(func):
                    raise _refusal(func, args, kwargs) from error
            else:
                return _returned(func, written) if func._schema.is_mutable else found
        elif func.is_view or draws_numbers(func):
            raise _refusal(func, args, kwargs)
        return self._run_manual(func, args, kwargs, written, like._region)

    def _run(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        return self.run_op(func, args, kwargs)

    def _run_manual(
        self,
        func: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        written: list[LocalPayload],
        region: ManualRegion,
    ) -> Any:
        tiles: dict[int, torch.Tensor] = {}

        def tile(value: Any) -> Any:
            if not isinstance(value, LocalPayload):
                return value
            if id(value) not in tiles:
                tiles[id(value)] = enter_tile(value)
            return tiles[id(value)]

        def local(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            return LocalPayload(leave_tile(value, region), region)

        try:
            result = self._manual.run_op(
                func, map_nested(tile, tuple(args)), map_nested(tile, dict(kwargs))
            )
        except (ManualRegionError, UnsupportedOpError) as error:
            raise _refusal(func, args, kwargs) from error
        except RuntimeError as error:
            if _BROKEN not in str(error):
                raise
            raise _refusal(func, args, kwargs) from error
        for target in {id(target): target for target in written}.values():
            stack = leave_tile(tiles[id(target)], region)
            with functionalization():
                target._stack.copy_(stack)
        makes_results = any(returned.alias_info is None for returned in func._schema.returns)
        return map_nested(local, result) if makes_results else _returned(func, written)

    def _reshape_in_place(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> LocalPayload:
        """Run ``t_``, ``squeeze_`` and the like: the payload becomes a view of what it was."""
        view = functional_form(func)
        if view is None or not view.is_view:
            raise _refusal(func, args, kwargs)
        args[0].become(self.run_op(view, args, kwargs))
        return args[0]

    def collective(
        self,
        name: str,
        local: torch.Tensor,
        region: ManualRegion,
        axes: tuple[Axis, ...],
        **options: Any,
    ) -> torch.Tensor:
        """See :meth:`Runtime.local_collective`."""
        return run_local_collective(name, _checked(local, region), axes, options)


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


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[LocalPayload]:
    """The local payloads that an op writes into, in the order of its arguments."""
    names = list(_HIDDEN_WRITES.get(func, ()))
    if func._schema.is_mutable:
        infos = [(a.name, a.alias_info) for a in func._schema.arguments]
        names += [name for name, info in infos if info is not None and info.is_write]
    if not names:
        return []
    given = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | dict(kwargs)
    if func in _HIDDEN_WRITES and not given.get("training"):
        return []
    written: list[LocalPayload] = []
    for value in leaves([given.get(name) for name in names]):
        if isinstance(value, LocalPayload):
            written.append(value)
        elif isinstance(value, torch.Tensor):
            raise LocalViewError(
                f"{func} was called on a local view, to write into a tensor of "
                f"shape={tuple(value.shape)} that is none. Each device has its own values, which "
                "one tensor outside cannot hold. Write into a local view."
            )
    return written


def _returned(func: Any, written: list[LocalPayload]) -> Any:
    """What an op that makes no tensors of its own returns."""
    if not func._schema.returns:
        return None
    return written[0] if len(written) == 1 else tuple(written)


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
    shapes = [
        tuple(value.shape)
        for value in leaves((tuple(args), dict(kwargs)))
        if isinstance(value, LocalPayload)
    ]
    return UnsupportedOpError(
        f"{func} was called on a local view, with shapes={shapes}. The runtime 'torch_xla' cannot "
        "run it on each device by itself: torch_xla computes it on the host, or has no rule for "
        "it. Use other ops, or the runtime 'jax'."
    )
