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
from functools import lru_cache, reduce
from typing import Any, cast

import torch

from mesh_utils import Axis, Mesh
from xla_dtensor.core import Layout, ManualRegion, OpSharding
from xla_dtensor.core.errors import DistributeError, ManualRegionError, UnsupportedOpError
from xla_dtensor.runtimes.nested import leaves, map_nested
from xla_dtensor.runtimes.torch_xla.annotations import DEVICE, to_annotation, xlac
from xla_dtensor.runtimes.torch_xla.payload import (
    functionalization,
    put_host,
    run_op,
    to_payload,
    to_plain,
)

__all__ = [
    "ManualPayload",
    "ManualRegions",
    "full_to_shard",
    "mark_manual",
    "no_execution",
    "run_collective",
    "shard_to_full",
]


# ------------------------------------------------------------------------------------- Manual nodes
#
# The operators at the border of a manual region, on torch_xla's lazy tensors.
#
# Each makes new graph nodes and leaves what it was given as it is, but for the label {manual} that
# `mark_manual` puts on a node. Empty tensors are made afresh: torch_xla is of two minds about the
# annotation of an empty tensor.
#
# Manual payloads are of a class of their own, which is how they are known, and by which a debugger
# or a traceback can show them: printing one as a tensor reads it, which aborts the process.

_MANUAL = 4
_is_functional = torch._is_functional_tensor  # pyright: ignore[reportPrivateImportUsage]


class ManualPayload(torch.Tensor):
    """A torch_xla tensor, in the functional wrapper, of which each device has another value."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore[reportAssignmentType]
    _made_in_program: int

    def is_spent(self) -> bool:
        """Tell whether the program that it belongs to has been run, or it has lost its value."""
        # By count, too: what was pending for a view's base hides that its old value is computed.
        if self._made_in_program != _current_program():
            return True
        try:
            with functionalization():
                return not xlac()._check_tensor_need_materialization([self])[0]
        except RuntimeError:  # Neither value nor program, after an op that failed half way.
            return True

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"ManualPayload(shape={tuple(self.shape)}, dtype={self.dtype})"


@lru_cache(1)
def _manual_annotation() -> Any:
    return xlac().OpSharding([], [], [], _MANUAL)


def is_plain(tensor: torch.Tensor) -> bool:
    """Tell whether an XLA tensor is one that torch made by itself, without functional wrapper."""
    return not _is_functional(tensor)


def _current_program() -> int:
    """The number of syncs so far."""
    return xlac()._xla_counter_value("MarkStep") or 0


def _as_payload(tensor: torch.Tensor) -> ManualPayload:
    payload = to_payload(tensor)
    # In place: `as_subclass` would make another functional wrapper, a view of this one.
    payload.__class__ = ManualPayload
    manual = cast(ManualPayload, payload)
    manual._made_in_program = _current_program()
    return manual


def mark_manual(tensor: torch.Tensor) -> ManualPayload:
    """Label an unfinished value as manual, in place, and return it as a manual payload."""
    xlac()._mark_manual_sharding(tensor, _manual_annotation())
    return _as_payload(tensor)


def fresh(shape: tuple[int, ...], dtype: torch.dtype) -> ManualPayload:
    """Return zeros as a manual payload."""
    with functionalization():
        return mark_manual(torch.zeros(shape, dtype=dtype, device=DEVICE))


def full_to_shard(payload: torch.Tensor, sharding: OpSharding) -> ManualPayload:
    """Return the tiles of `payload` under a sharding that divides it evenly, as a manual payload.

    Args:
        payload: A global payload.
        sharding: Relative to the root.
    """
    if payload.numel() == 0:
        return fresh(sharding.shape_per_tile(payload.shape), payload.dtype)
    with functionalization():
        # A node of its own to annotate: a clone shares its source's until it is annotated.
        placed = to_plain(to_payload(payload).clone())
        xlac()._xla_annotate_custom_sharding(placed, to_annotation(sharding))
        return _as_payload(xlac()._spmd_full_to_shard_shape(placed))


def shard_to_full(manual: torch.Tensor, sharding: OpSharding) -> torch.Tensor:
    """Return the global payload of which `manual` is the tile under a sharding.

    Args:
        manual: A manual payload that no program has computed yet.
        sharding: Relative to the root.
    """
    full = [size * sharding.num_tiles(dim) for dim, size in enumerate(manual.shape)]
    with functionalization():
        if manual.numel() == 0:
            return to_payload(torch.zeros(full, dtype=manual.dtype, device=DEVICE))
        tile, annotation = to_plain(manual), to_annotation(sharding)
        xlac()._mark_manual_sharding(tile, _manual_annotation())
        tensor = xlac()._spmd_shard_to_full_shape(tile, annotation, full, manual.dtype)
        return to_payload(tensor)


# -------------------------------- Collectives between the devices of a manual region, on torch_xla
#
# all_reduce, all_gather and reduce_scatter are XLA's own ops: each has device groups, which are
# partition ids here, as is everything in torch_xla's SPMD programs.
#
# torch_xla 2.9 aborts on an all-to-all and on a permute of manual tensors. Both only move tiles, so
# they are said to GSPMD: leave the region under one sharding, enter it again under another, and the
# partitioner makes the one all-to-all or collective-permute that this takes.
#
#     all_to_all over tp (n=4), split_dim=0, tile (8, 3):
#       (1, 4, 2*3)   the blocks of split_dim
#       leave as [tp, -, -]    (4, 4, 6)    dim 0: whose blocks, dim 1: for whom
#       enter as [-, tp, -]    (4, 1, 6)    each member has its block of everyone
#
#     permute over tp by (0, 1), (1, 0), (2, 2), (3, 3), tile (8, 3):
#       leave with row i on device i       (4, 24)
#       enter with rows 0, 1 on devices 1, 0
#
# Devices that differ along other axes only do the same side by side: those axes shard one more dim.

# torch_xla gives its own all-reduces and reduce-scatters this channel too.
_CHANNEL = 1
_REDUCTIONS = ("sum", "max", "min")


def run_collective(
    name: str,
    manual: torch.Tensor,
    mesh: Mesh,
    axes: tuple[Axis, ...],
    options: Mapping[str, Any],
) -> torch.Tensor:
    """Run one of the collectives of :meth:`Runtime.manual_collective`.

    Args:
        name: Which.
        manual: A manual payload that no program has computed yet.
        mesh: The region's mesh, over all devices.
        axes: The axes along which members are numbered.
        options: As the collective takes them.

    Returns:
        A payload whose value on each device is the collective's; unlabelled.

    Raises:
        DistributeError: Wrong options.
        UnsupportedOpError: No such collective.
    """
    collective = _COLLECTIVES.get(name)
    if collective is None:
        raise UnsupportedOpError(
            f"The collective name={name!r} was asked for in a manual region. The runtime "
            f"'torch_xla' does not know it. Pass one of {sorted(_COLLECTIVES)}."
        )
    with functionalization():
        return collective(manual, mesh, axes, **options)


def _all_reduce(manual: torch.Tensor, mesh: Mesh, axes: tuple[Axis, ...], op: str) -> torch.Tensor:
    if op not in _REDUCTIONS or (manual.is_complex() and op != "sum"):
        raise UnsupportedOpError(
            f"all_reduce with op={op!r} was asked for on a tensor of dtype={manual.dtype}. It is "
            f"none of {_REDUCTIONS}, or complex numbers have no such order. Pass one that the "
            "dtype has."
        )
    groups = _groups(mesh, axes)
    if manual.numel() == 0 or len(groups[0]) == 1:
        return manual.clone()
    return to_payload(xlac()._xla_spmd_all_reduce(op, to_plain(manual), 1.0, groups))


def _all_gather(manual: torch.Tensor, mesh: Mesh, axes: tuple[Axis, ...], dim: int) -> torch.Tensor:
    dim = _dim(manual, dim, "all_gather")
    groups = _groups(mesh, axes)
    n = len(groups[0])
    if n == 1:
        return manual.clone()
    if manual.numel() == 0:
        return fresh(_resized(manual.shape, dim, n * manual.shape[dim]), manual.dtype)
    tile = to_plain(manual)
    return to_payload(xlac()._xla_all_gather(tile, dim, n, groups, False, _CHANNEL, True))


def _reduce_scatter(
    manual: torch.Tensor, mesh: Mesh, axes: tuple[Axis, ...], dim: int
) -> torch.Tensor:
    groups = _groups(mesh, axes)
    n = len(groups[0])
    dim = _divided_dim(manual, dim, n, "reduce_scatter")
    if n == 1:
        return manual.clone()
    if manual.numel() == 0:
        return fresh(_resized(manual.shape, dim, manual.shape[dim] // n), manual.dtype)
    tile = to_plain(manual)
    return to_payload(xlac()._xla_spmd_reduce_scatter("sum", tile, 1.0, dim, n, groups))


def _all_to_all(
    manual: torch.Tensor, mesh: Mesh, axes: tuple[Axis, ...], split_dim: int, concat_dim: int
) -> torch.Tensor:
    n = len(_groups(mesh, axes)[0])
    split = _divided_dim(manual, split_dim, n, "all_to_all")
    concat = _dim(manual, concat_dim, "all_to_all")
    if n == 1:
        return manual.clone()
    if manual.numel() == 0:
        shape = _resized(manual.shape, split, manual.shape[split] // n)
        return fresh(_resized(shape, concat, n * shape[concat]), manual.dtype)
    blocks = manual.unflatten(split, (n, -1)).movedim(split, 0)
    other_axes = tuple(axis for axis in mesh.axis_names if axis not in axes)
    outgoing = _sharding(mesh, other_axes, axes, (), ())
    incoming = _sharding(mesh, other_axes, (), axes, ())
    stacked = shard_to_full(blocks.reshape(1, 1, n, -1), outgoing)
    received = full_to_shard(stacked, incoming).reshape(blocks.shape)
    return received.movedim(0, concat).flatten(concat, concat + 1)


def _permute(
    manual: torch.Tensor, mesh: Mesh, axes: tuple[Axis, ...], pairs: Sequence[tuple[int, int]]
) -> torch.Tensor:
    outgoing, incoming, empty = _move(mesh, axes, tuple((of, to) for of, to in pairs))
    if manual.numel() == 0:
        return manual.clone()
    received = manual.clone()
    if outgoing != incoming:
        stacked = shard_to_full(manual.reshape(1, -1), outgoing)
        received = full_to_shard(stacked, incoming).reshape(manual.shape)
    if not empty:
        return received
    index = _axis_index(manual, mesh, axes)
    without_source = reduce(torch.logical_or, [index == member for member in empty])
    return torch.where(without_source, torch.zeros_like(received), received)


def _axis_index(manual: torch.Tensor, mesh: Mesh, axes: tuple[Axis, ...]) -> torch.Tensor:
    n = len(_groups(mesh, axes)[0])
    numbers = to_payload(torch.arange(n, device=DEVICE))
    return full_to_shard(numbers, _sharding(mesh, axes)).reshape(())


_COLLECTIVES = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "permute": _permute,
    "axis_index": _axis_index,
}


# For meshes of many devices: what follows takes time in proportion to them.


@lru_cache(1024)
def _groups(mesh: Mesh, axes: tuple[Axis, ...]) -> list[list[int]]:
    return mesh.groups(axes).tolist()


@lru_cache(1024)
def _move(
    mesh: Mesh, axes: tuple[Axis, ...], pairs: tuple[tuple[int, int], ...]
) -> tuple[OpSharding, OpSharding, list[int]]:
    """How a stack of all tiles lies before and after a permute; the members without a source."""
    groups = mesh.groups(axes)
    target, empty = _completed(pairs, groups.shape[1])
    outgoing = OpSharding.from_assignment(groups.reshape(-1, 1))
    incoming = OpSharding.from_assignment(groups[:, target].reshape(-1, 1))
    return outgoing, incoming, empty


@lru_cache(1024)
def _sharding(mesh: Mesh, *axes_per_dim: tuple[Axis, ...]) -> OpSharding:
    spec = tuple(axes or None for axes in axes_per_dim)
    root = Mesh.arange((mesh.size(),), ("device",))
    return Layout.from_partition_spec(spec, mesh).op_sharding(root)


def _completed(pairs: Sequence[tuple[int, int]], n: int) -> tuple[list[int], list[int]]:
    """Where each member sends to, those without a pair to anyone left; who had no source."""
    target = dict(pairs)
    sources, destinations = [source for source, _ in pairs], [to for _, to in pairs]
    in_range = all(0 <= member < n for member in (*sources, *destinations))
    if not in_range or len(target) < len(sources) or len(set(destinations)) < len(destinations):
        raise DistributeError(
            f"permute was asked for with pairs={list(pairs)} among {n} members. A member is a "
            f"number in 0..{n - 1}, sends to one at most and receives from one at most. Leave out "
            "the other pairs."
        )
    empty = [member for member in range(n) if member not in destinations]
    # To themselves where that is possible: it costs nothing.
    for member in [member for member in empty if member not in target]:
        target[member] = member
    spare = iter([member for member in empty if member not in target.values()])
    return [target[member] if member in target else next(spare) for member in range(n)], empty


def _dim(manual: torch.Tensor, dim: int, what: str) -> int:
    if not -manual.ndim <= dim < manual.ndim:
        raise DistributeError(
            f"{what} along dim={dim} was asked for on a manual tensor of "
            f"shape={tuple(manual.shape)}. It has {manual.ndim} dims. Pass one of them, or reshape "
            "the tensor."
        )
    return dim % manual.ndim


def _divided_dim(manual: torch.Tensor, dim: int, n: int, what: str) -> int:
    dim = _dim(manual, dim, what)
    if manual.shape[dim] % n:
        raise DistributeError(
            f"{what} over {n} devices along dim={dim} was asked for on a manual tensor of "
            f"shape={tuple(manual.shape)}. The dim of size={manual.shape[dim]} has no {n} equal "
            "blocks. Pad it first."
        )
    return dim


def _resized(shape: Sequence[int], dim: int, size: int) -> tuple[int, ...]:
    return (*shape[:dim], size, *shape[dim + 1 :])


# --------------------------------------------------------------------- Manual regions on torch_xla

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
        return full_to_shard(payload, sharding)

    def leave(
        self, manual: torch.Tensor, layout: Layout, region: ManualRegion
    ) -> tuple[torch.Tensor, OpSharding]:
        """Return the global payload of :meth:`Runtime.leave_manual`, and how it lies."""
        self._check_region(region)
        region.check_layout(layout)
        self._check_usable(manual)
        sharding = self._op_sharding_for(manual.shape, layout)
        return shard_to_full(manual, sharding), sharding

    def run_op(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """See :meth:`Runtime.run_manual_op`."""
        _check_reads_nothing(func, args, kwargs)
        _check_writes_manual(func, args, kwargs)
        args = map_nested(self._operand, _with_numbers_for_masks(func, args))
        kwargs = map_nested(self._operand, dict(kwargs))
        with no_execution(func):
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
        for tensor in values:
            if isinstance(tensor, list | tuple):
                self.check_global(*tensor)
            elif isinstance(tensor, ManualPayload):
                raise ManualRegionError(
                    f"A manual tensor of shape={tuple(tensor.shape)} was used as a global one, or "
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

    def _operand(self, argument: Any) -> Any:
        if not isinstance(argument, torch.Tensor):
            return argument
        if argument.device.type != "xla":
            return _copied(argument)
        if is_plain(argument):
            return full_to_shard(argument, OpSharding.replicated())
        self._check_usable(argument)
        return argument


def _copied(host: torch.Tensor) -> torch.Tensor:
    with functionalization():
        return full_to_shard(put_host(host, None), OpSharding.replicated())


def _as_manual(output: Any) -> Any:
    """Make a manual payload of an op's result, and leave alone what is no tensor."""
    if not isinstance(output, torch.Tensor):
        return output
    if output.device.type != "xla":  # Of a factory that was told no device.
        return _copied(output)
    with functionalization():
        payload = to_payload(output)
        if xlac()._check_tensor_need_materialization([payload])[0]:
            return mark_manual(payload)
    return full_to_shard(payload, OpSharding.replicated())


def _check_reads_nothing(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Refuse what torch_xla would begin to read, and lose the value of."""
    places = [place for place in (*args, *kwargs.values()) if isinstance(place, torch.device)]
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
        for target in leaves(args[place] if place < len(args) else kwargs.get(argument.name)):
            if not isinstance(target, torch.Tensor) or isinstance(target, ManualPayload):
                continue
            raise ManualRegionError(
                f"The op {func} was called on a manual tensor, to write into a tensor of "
                f"shape={tuple(target.shape)} that is none. Inside a manual region each device has "
                "its own values, which no tensor outside can hold. Leave the region first."
            )


@contextmanager
def no_execution(func: Any) -> Iterator[None]:
    """Make an error of an op that would run the program so far, to go on with its values."""
    allowed = xlac()._get_allow_execution()
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
        xlac()._set_allow_execution(allowed)
