"""Manual regions on torch_xla: a tensor is what one device has, and XLA shards nothing.

GSPMD has two operators for the border. "Full to shard shape" turns a tiled tensor into its tile
and labels it {manual}; "shard to full shape" is the inverse. In between, the label passes from
operands to results, and the partitioner leaves each labelled op as it is: every device runs it on
its own tile. Neither operator moves data.

    x of shape (16, 8) as [dp, tp]     mesh (dp=2, tp=4)
      enter    (8, 2)  {manual}        each device its tile
      x * 2    (8, 2)  {manual}
      leave    (16, 8) [dp, tp]        nothing was communicated

What the partitioner does with an op on a manual and a global tensor is wrong in silence, or aborts
the process; so does reading a manual tensor. Hence the invariants:

* Manual payloads are of a class of their own. The runtime's other methods refuse them; `run_op`
  here refuses global payloads.
* Whatever comes in is made manual first. Host tensors, and the plain XLA tensors that torch itself
  makes (for `x[0] = 1.0`, for missing gradients), become copies on every device. Every result is
  labelled, also that of `zeros_like`, whose program has no manual operand.
* A manual payload is an unfinished program. A sync computes it, after which torch_xla can neither
  read nor use it: that is an error of ours. So is an op that computes on the host, which would
  read: torch_xla is told not to execute while an op is run.
* Regions are over all axes: GSPMD's label is of whole tensors here, there is none for some axes.
* Random numbers come from one seed that all devices share: each draws the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from mesh_utils import Axis, Mesh
from xla_dtensor.core import Layout, ManualRegion, OpSharding
from xla_dtensor.errors import DistributeError, ManualRegionError, UnsupportedOpError
from xla_dtensor.nested import leaves, map_nested
from xla_dtensor.runtimes.torch_xla_manual_collectives import run_collective
from xla_dtensor.runtimes.torch_xla_manual_nodes import (
    ManualPayload,
    entered,
    is_plain,
    left,
    marked,
)
from xla_dtensor.runtimes.torch_xla_payload import functionalization, put_host, run_op, to_payload
from xla_dtensor.runtimes.torch_xla_sharding import xlac

__all__ = ["ManualRegions"]

_EXECUTED = "Unexpected execution"
_aten = torch.ops.aten
_INDEXING = {_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default}


class ManualRegions:
    """What the runtime does with manual payloads.

    Args:
        root: See :meth:`Runtime.root`.
        op_sharding_for: Returns the OpSharding of a shape and a layout, relative to the root;
            raises what the runtime raises for wrong ones.
    """

    def __init__(
        self,
        root: Callable[[Mesh], Mesh],
        op_sharding_for: Callable[[Sequence[int], Layout], OpSharding],
    ) -> None:
        self._root = root
        self._op_sharding_for = op_sharding_for

    def enter(self, payload: torch.Tensor, layout: Layout, region: ManualRegion) -> torch.Tensor:
        """See :meth:`Runtime.enter_manual`."""
        self._check_region(region)
        region.check_layout(layout)
        self.check_global(payload)
        sharding = self._op_sharding_for(payload.shape, layout)
        extents = enumerate(payload.shape)
        uneven = [dim for dim, size in extents if size % sharding.num_tiles(dim)]
        if uneven:
            raise DistributeError(
                f"A tensor of shape={tuple(payload.shape)} was brought into a manual region as "
                f"{layout}. Its dims {uneven} are not divided evenly, and all tiles of a manual "
                "tensor have one shape. Pad them first."
            )
        return entered(payload, sharding)

    def leave(
        self, manual: torch.Tensor, layout: Layout, region: ManualRegion
    ) -> tuple[torch.Tensor, OpSharding]:
        """Return the global payload of :meth:`Runtime.leave_manual`, and how it lies."""
        self._check_region(region)
        region.check_layout(layout)
        self._check_usable(manual)
        sharding = self._op_sharding_for(manual.shape, layout)
        return left(manual, sharding), sharding

    def run_op(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """See :meth:`Runtime.run_manual_op`."""
        _check_reads_nothing(func, args, kwargs)
        _check_writes_manual(func, args, kwargs)
        args = map_nested(self._operand, _with_numbers_for_masks(func, args))
        kwargs = map_nested(self._operand, dict(kwargs))
        with _no_execution(func):
            return map_nested(_as_manual, run_op(func, args, kwargs))

    def collective(
        self,
        name: str,
        manual: torch.Tensor,
        region: ManualRegion,
        axes: tuple[Axis, ...],
        **options: Any,
    ) -> torch.Tensor:
        """See :meth:`Runtime.manual_collective`."""
        self._check_region(region)
        self._check_usable(manual)
        return _as_manual(run_collective(name, manual, region.mesh, axes, options))

    def check_global(self, *values: Any) -> None:
        """Raise when a manual payload is among some values, or in a list among them.

        Raises:
            ManualRegionError: There is one.
        """
        for value in values:
            if isinstance(value, list | tuple):
                self.check_global(*value)
            elif isinstance(value, ManualPayload):
                raise ManualRegionError(
                    f"A manual tensor of shape={tuple(value.shape)} was used as a global one, or "
                    "read. Inside its region it is another on each device, and torch_xla would "
                    "abort the process or mix the devices' values. Leave the region first."
                )

    def _check_region(self, region: ManualRegion) -> None:
        root = region.mesh.root
        self._root(root)
        if region.is_whole and region.mesh.size() == root.size():
            return
        raise UnsupportedOpError(
            f"A manual region over axes={region.axes} of a mesh ({root.axes_text()}) was asked for "
            "on the runtime 'torch_xla'. Its partitioner knows manual tensors only, none that are "
            "manual along some axes. Make the region over all axes, or use the runtime 'jax'."
        )

    def _check_usable(self, manual: torch.Tensor) -> None:
        if not isinstance(manual, ManualPayload):
            raise ManualRegionError(
                f"A global tensor of shape={tuple(manual.shape)} was used as a manual one. Inside "
                "a manual region tensors are tiles, and torch_xla would mix the devices' values. "
                "Bring it into the region first."
            )
        if manual.is_spent():
            raise ManualRegionError(
                f"A manual tensor of shape={tuple(manual.shape)} was used after the program that "
                "it belonged to had been run. torch_xla can neither read nor go on with it. Enter, "
                "work and leave within one step, with nothing read, synchronized or compiled in "
                "between."
            )

    def _operand(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if value.device.type != "xla":
            return _copied(value)
        if is_plain(value):
            return entered(value, OpSharding.replicated())
        self._check_usable(value)
        return value


def _copied(host: torch.Tensor) -> torch.Tensor:
    with functionalization():
        return entered(put_host(host, None), OpSharding.replicated())


def _as_manual(value: Any) -> Any:
    """Make a manual payload of an op's result, and leave alone what is no tensor."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.device.type != "xla":  # Of a factory that was told no device.
        return _copied(value)
    with functionalization():
        payload = to_payload(value)
        if xlac()._check_tensor_need_materialization([payload])[0]:
            return marked(payload)
    return entered(payload, OpSharding.replicated())


def _check_reads_nothing(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Refuse what torch_xla would begin to read, and lose the value of."""
    places = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.device)]
    reads = torch.Tag.data_dependent_output in func.tags
    if reads or any(place.type != "xla" for place in places):
        raise ManualRegionError(
            f"The op {func} was called on a manual tensor, and needs its values on the host. "
            "Inside a manual region each device has its own, so there is no one value to read. "
            "Leave the region first."
        )


def _with_numbers_for_masks(func: Any, args: Sequence[Any]) -> tuple[Any, ...]:
    """Turn host masks used as indices to positions, while their values can be read."""
    if func not in _INDEXING:
        return tuple(args)
    indices: list[Any] = []
    for index in args[1]:
        is_mask = isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)
        on_host = is_mask and index.device.type == "cpu"
        indices += index.nonzero().unbind(1) if on_host else [index]
    return (args[0], indices, *args[2:])


def _check_writes_manual(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    if not func._schema.is_mutable:
        return
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        for value in leaves(args[place] if place < len(args) else kwargs.get(argument.name)):
            if not isinstance(value, torch.Tensor) or isinstance(value, ManualPayload):
                continue
            raise ManualRegionError(
                f"The op {func} was called on a manual tensor, to write into a tensor of "
                f"shape={tuple(value.shape)} that is none. Inside a manual region each device has "
                "its own values, which no tensor outside can hold. Leave the region first."
            )


@contextmanager
def _no_execution(func: Any) -> Iterator[None]:
    """Make an error of an op that would run the program so far, to go on with its values."""
    before = xlac()._get_allow_execution()
    xlac()._set_allow_execution(False)
    try:
        yield
    except RuntimeError as error:
        if _EXECUTED not in str(error):
            raise
        raise UnsupportedOpError(
            f"The op {func} was called on a manual tensor. torch_xla 2.9 computes it on the host, "
            "or gives it a shape that depends on values, and manual tensors cannot be read. Leave "
            "the region first, or use other ops."
        ) from error
    finally:
        xlac()._set_allow_execution(before)
