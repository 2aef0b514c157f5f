"""Layout: how a tensor lies on a mesh, per tensor dim. The one internal truth.

The idea
--------
PyTorch says per mesh AXIS what it does to the tensor (placements). XLA asks per tensor DIM how it
is cut. A Layout is the second, in terms of the mesh: for each dim, the axes that cut it, from the
outermost cut to the innermost. Placements, partition specs, alias tuples and a short text are all
read into a Layout and written from it, so they are compared, cached and translated in one form
only.

Worked example
--------------
Mesh (dp=2, tp=4), an 8 x 6 matrix, FSDP over tensor parallelism. PyTorch writes tp's cut of the
rows outside and dp's inside, though dp is the first mesh axis, with a strided placement:

    placements      [_StridedShard(0, split_factor=4), Shard(0)]
    dims            (("tp", "dp"), ())             rows: 4 pieces by tp, each in 2 by dp
    text            [tp.dp, -]
    partition spec  (("tp", "dp"), None)
    OpSharding      {devices=[8,1]<=[2,4]T(1,0)}   device (dp=1, tp=2) has row 2 * 2 + 1

    >>> from xla_dtensor.core.placements import Shard, StridedShard
    >>> mesh = Mesh.arange((2, 4), ("dp", "tp"))
    >>> rows = Layout.from_placements([StridedShard(0, 4), Shard(0)], 2, mesh)
    >>> str(rows), str(rows.op_sharding())
    ('[tp.dp, -]', '{devices=[8,1]<=[2,4]T(1,0)}')
    >>> rows.to_placements()
    (StridedShard(dim=0, split_factor=4), Shard(dim=0))

Without the strided placement, [Shard(0), Shard(0)] is [dp.tp, -]: dp outside.

How placements are read
-----------------------
Axis by axis, from the first to the last; see `cut_order`. A Shard takes the outermost cut that is
still free, a StridedShard leaves a cut of split_factor pieces free outside it, and takes the next.
If a later axis takes all of that free cut, whole axes are left, as above. Otherwise there is

* a `Gap`: [_StridedShard(0, 4), Replicate()] is [~4.dp, -]. Each device has every second block of
  rows. That is legal here and for local tensors, but no tiling: `op_sharding()` refuses it.
* an `AxisPart`: [_StridedShard(0, 2), Shard(0)] is [tp/2%2.dp.tp%2, -]. tp's coordinate has an
  outer digit outside dp and an inner one inside it. Still a tiling, and exact.

Invariants (`check_valid`)
--------------------------
* Each mesh axis occurs once: whole in one dim, or as parts that make it up, outermost first, in one
  dim, or in `partial`, or nowhere (the tensor is copied along it).
* Axes of size 1 are kept where they were put, so that placements come back as they went in. They
  cut nothing.
* Spelling is normal: no neighbouring gaps, no trailing gap, no part that is a whole axis; `partial`
  in mesh order.
* `from_placements(x).to_placements() == x` up to dims counted from the front, and a split factor of
  1. (The one other exception: the split factor of an axis of size 1 where it does not fit the cuts
  of the other axes.)
* `open_dims` and `partial` are no part of the OpSharding: XLA's tile form has no word for them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from typing import Final, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from mesh_utils import Axis, AxisError, Digit, Mesh, mixed_radix_positions
from mesh_utils.argument_types import argument_types
from xla_dtensor.core.errors import LayoutError
from xla_dtensor.core.op_sharding import OpSharding, remaining_walk, walk_part
from xla_dtensor.core.placements import (
    AxisPart,
    Dim,
    Entry,
    Gap,
    PlacementRecord,
    axis_sizes,
    check_entries,
    cuts,
    cuts_of_placements,
    describe_axes,
    entry_axis,
    entry_size,
    normal_dim,
    placements_of_cuts,
    read_placements,
    with_whole_axes,
)

__all__ = []


# ---------------------------------------------------------------- Partition specs and alias tuples
#
# The axis names of each tensor dim.
#
#     partition spec    ("dp", None, ("ep", "tp"))    torch_xla also takes axis positions: (0, None,
#     (1, 2)) aliases           ("dp", "None", ("ep", "tp"))  names only
#
# Both list axes from the outermost cut to the innermost one. A spec may leave a dim open (JAX's
# UNCONSTRAINED): the compiler then chooses.


class _Open:
    """Marks a dim that the compiler may cut as it likes; one object, prints as JAX's does."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "UNCONSTRAINED"

    def __reduce__(self) -> str:
        return "OPEN"


OPEN: Final = _Open()

SpecEntry: TypeAlias = Axis | tuple[Axis, ...] | _Open | None
AliasEntry: TypeAlias = str | int | tuple[Axis, ...]


def read_partition_spec(
    spec: Iterable[object], mesh: Mesh, tensor_ndim: int | None
) -> tuple[tuple[Dim, ...], frozenset[int]]:
    """Reads a partition spec.

    Args:
        spec: Per dim None, an axis, a tuple of axes, or a marker that prints as UNCONSTRAINED.
        mesh: The mesh; its axes may be given by name or position.
        tensor_ndim: Rank of the tensor, or None: the spec's length. Missing trailing dims are not
            cut.

    Returns:
        (entries per dim, open dims).

    Raises:
        LayoutError: An entry of another kind, an unknown axis, or more entries than dims.
    """
    if isinstance(spec, str):
        raise _spec_error(
            spec, "A string is one entry, not a spec", "a tuple with one entry per dim"
        )
    if getattr(spec, "unreduced", None):
        raise _spec_error(spec, "Its unreduced axes are pending sums", "placements with Partial")
    entries = tuple(spec)
    if tensor_ndim is not None and len(entries) > tensor_ndim:
        raise _spec_error(
            spec,
            f"It has {len(entries)} entries for a tensor of rank {tensor_ndim}",
            "at most one entry per dim",
        )
    dims = [_read_spec_entry(entry, dim, spec, mesh) for dim, entry in enumerate(entries)]
    uncut = 0 if tensor_ndim is None else tensor_ndim - len(entries)
    open_dims = frozenset(
        dim for dim, entry in enumerate(entries) if repr(entry) == "UNCONSTRAINED"
    )
    return (*dims, *((),) * uncut), open_dims


def _read_spec_entry(entry: object, dim: int, spec: object, mesh: Mesh) -> Dim:
    if entry is None or repr(entry) == "UNCONSTRAINED":
        return ()
    axes = cast(Sequence[object], entry) if isinstance(entry, (tuple, list)) else (entry,)
    return tuple([_read_axis(axis, dim, spec, mesh) for axis in axes])


def _read_axis(axis: object, dim: int, spec: object, mesh: Mesh) -> Axis:
    try:
        return mesh.axis_names[mesh.axis_index(cast(Axis, axis))]
    except AxisError:
        raise _spec_error(
            spec,
            f"Entry {axis!r} for dim {dim} is no axis of the mesh with {describe_axes(mesh)}",
            f"None, one of {', '.join(map(repr, mesh.axis_names))}, or a tuple of them",
        ) from None


def _spec_error(spec: object, reason: str, instead: str) -> LayoutError:
    return LayoutError(f"partition_spec={spec!r} was asked for. {reason}. Pass {instead}.")


def spec_of_dims(dims: Sequence[Dim], open_dims: frozenset[int]) -> tuple[SpecEntry, ...]:
    """The partition spec of a layout's dims.

    Raises:
        LayoutError: A dim is cut by part of an axis or has a gap, or is cut and open.
    """
    return tuple(_spec_entry(dim, entries, dim in open_dims) for dim, entries in enumerate(dims))


def _spec_entry(dim: int, entries: Dim, is_open: bool) -> SpecEntry:
    if is_open and entries:
        raise LayoutError(
            f"The partition spec of a layout was asked for whose dim {dim} is cut by {entries!r} "
            "and open. "
            "A spec leaves a whole dim open or none of it. Read dims and open_dims instead."
        )
    if is_open:
        return OPEN
    axes = _axes(dim, entries, "The partition spec")
    return None if axes == () else axes  # axis number 0 is false


def _axes(dim: int, entries: Dim, form: str) -> Axis | tuple[Axis, ...]:
    """The axes of a dim: one bare, several as a tuple."""
    axes: list[Axis] = []
    for entry in entries:
        if isinstance(entry, (AxisPart, Gap)):
            raise LayoutError(
                f"{form} of a layout was asked for whose dim {dim} is cut by {entries!r}. "
                "It can name whole axes only. Use placements, or Layout.factored() where only "
                "parts are in the way."
            )
        axes.append(entry)
    return axes[0] if len(axes) == 1 else tuple(axes)


def read_aliases(aliases: Sequence[object], mesh: Mesh, tensor_ndim: int | None) -> tuple[Dim, ...]:
    """Reads alias placements: per tensor dim "None", None, an axis name, or a tuple of names.

    Raises:
        LayoutError: Not a tuple, one entry per dim, of names of axes.
    """
    if not isinstance(aliases, tuple):
        raise _alias_error(aliases, f"A {type(aliases).__name__} is not read as aliases", mesh)
    if tensor_ndim is not None and len(aliases) != tensor_ndim:
        raise _alias_error(
            aliases, f"It has {len(aliases)} entries for a tensor of rank {tensor_ndim}", mesh
        )
    return tuple(_read_alias(entry, aliases, mesh) for entry in aliases)


def _read_alias(entry: object, aliases: object, mesh: Mesh) -> Dim:
    if entry is None or entry == "None":
        return ()
    names = cast(tuple[object, ...], entry) if isinstance(entry, tuple) else (entry,)
    for name in names:
        if not isinstance(name, str):
            raise _alias_error(
                aliases,
                f"{name!r}, of type {type(name).__name__}, is not the name of an axis",
                mesh,
            )
        if name not in mesh.axis_names:
            raise _alias_error(
                aliases, f"{name!r} is no axis of the mesh with {describe_axes(mesh)}", mesh
            )
    return tuple(name for name in names if isinstance(name, str))


def _alias_error(aliases: object, reason: str, mesh: Mesh) -> LayoutError:
    names = ", ".join(map(repr, mesh.axis_names))
    return LayoutError(
        f"placements={aliases!r} were asked for as aliases. {reason}. "
        f'Pass a tuple with one entry per tensor dim: "None", one of {names}, or a tuple of them.'
    )


def aliases_of_dims(dims: Sequence[Dim]) -> tuple[AliasEntry, ...]:
    """The aliases of a layout's dims.

    Raises:
        LayoutError: A dim is cut by part of an axis, or has a gap.
    """
    axes_of_dims = (_axes(dim, entries, "The alias tuple") for dim, entries in enumerate(dims))
    return tuple("None" if axes == () else axes for axes in axes_of_dims)


# ---------------------------------------------------------------------------- Layout -> OpSharding
#
# From cuts by mesh axes to tiles of the root's partitions.
#
# A mesh knows how each of its axes walks through the root's flat order (`Mesh.digits`). Where that
# walk has digits, so has each dim, and the OpSharding is written from them in O(rank). Where the
# mesh's order, or a part of an axis, has none, the tile assignment is worked out as an array and
# listed.


def op_sharding_of_dims(dims: Sequence[Dim], mesh: Mesh, root: Mesh) -> OpSharding:
    """The OpSharding of a layout's dims, relative to a root mesh.

    Args:
        dims: Entries per tensor dim.
        mesh: Their mesh.
        root: The mesh whose flat order numbers the partitions.

    Returns:
        The canonical OpSharding over all of `root`; axes of the root that cut nothing hold copies.

    Raises:
        LayoutError: A gap lies outside a cut, or the mesh has only some of the root's devices.
        MeshError: The mesh has devices that the root lacks.
    """
    sizes = axis_sizes(mesh)
    dims = tuple([cuts(dim, sizes) for dim in dims])
    _refuse_gaps(dims, mesh)
    if not any(dims):
        return OpSharding.replicated()
    walks = mesh.digits(root)
    if walks is not None:
        tiles = _dim_digits(dims, dict(zip(mesh.axis_names, walks, strict=True)))
        if tiles is not None:
            return OpSharding.from_digits(tiles, root.size())
    return _listed(dims, mesh, root)


def _refuse_gaps(dims: Sequence[Dim], mesh: Mesh) -> None:
    for dim, entries in enumerate(dims):
        for entry in entries:
            if isinstance(entry, Gap):
                raise LayoutError(
                    f"The OpSharding of a layout was asked for whose dim {dim} is cut by "
                    f"{entries!r} on {mesh!r}. "
                    f"No mesh axis makes the {entry.size}-fold cut outside, so its shards are no "
                    "tiles. "
                    "Pass a split_factor that is the product of the sizes of later axes on that "
                    "dim."
                )


def _dim_digits(
    dims: Sequence[Dim], walks: dict[Axis, tuple[Digit, ...]]
) -> list[list[Digit]] | None:
    """The root's digits that each dim takes; None where part of an axis is no whole digits."""
    digits: list[list[Digit]] = []
    for entries in dims:
        dim_digits: list[Digit] = []
        for entry in entries:
            if isinstance(entry, AxisPart):
                part = walk_part(walks[entry.axis], entry.size, entry.inner)
                if part is None:
                    return None
                dim_digits += part
            elif not isinstance(entry, Gap):
                dim_digits += walks[entry]
        digits.append(dim_digits)
    return digits


def _listed(dims: Sequence[Dim], mesh: Mesh, root: Mesh) -> OpSharding:
    """The OpSharding with the tile assignment worked out, device by device."""
    finest, order = _finest_axes(dims, mesh)
    cutting = {place for places in order for place in places}
    copies = [place for place in range(len(finest)) if place not in cutting]
    positions = _positions_in_root(mesh, root)
    by_axis = positions.reshape(*finest, -1)
    walked = by_axis.transpose(
        *(place for places in order for place in places), *copies, len(finest)
    )
    tiles = tuple(prod(finest[place] for place in places) for places in order)
    return OpSharding.from_assignment(walked.reshape(*tiles, -1), ("replicated",))


def _finest_axes(dims: Sequence[Dim], mesh: Mesh) -> tuple[list[int], list[list[int]]]:
    """The mesh with each axis split where it is cut: (sizes, per dim the places of its cuts)."""
    sizes = axis_sizes(mesh)
    finest: list[int] = []
    first: dict[Axis, int] = {}
    parts = {
        axis: [e for entries in dims for e in entries if isinstance(e, AxisPart) and e.axis == axis]
        for axis in sizes
    }
    for axis, size in sizes.items():
        first[axis] = len(finest)
        finest += [part.size for part in parts[axis]] or [size]
    order: list[list[int]] = []
    for entries in dims:
        places: list[int] = []
        for entry in entries:
            if isinstance(entry, AxisPart):
                places.append(first[entry.axis] + parts[entry.axis].index(entry))
            elif not isinstance(entry, Gap):
                places.append(first[entry])
        order.append(places)
    return finest, order


def _positions_in_root(mesh: Mesh, root: Mesh) -> NDArray[np.int64]:
    """Positions in the root: shape (mesh shape..., copies), each of the root's once.

    A submesh stands for all the submeshes beside it: the copies are the rest of its own root.
    """
    if mesh.size() == root.size():
        return mesh.positions(root)[..., None]
    own_root = mesh.root
    walks = mesh.digits()
    if own_root.size() == root.size() and walks is not None:
        walk = [digit for walk in walks for digit in walk]
        copies = remaining_walk(walk, own_root.size())
        if copies is not None:
            places = mixed_radix_positions([*walk, *copies])
            return own_root.positions(root).reshape(-1)[places].reshape(*mesh.mesh_shape, -1)
    raise LayoutError(
        f"An OpSharding on {mesh!r} was asked for, in a program over {root!r}. "
        f"The mesh has {mesh.size()} of the program's {root.size()} devices, and is no submesh of "
        "all of them. "
        "Pass a mesh over all devices, or one cut out of it by axis names."
    )


# ----------------------------------------------------------- The short text of a layout, both ways
#
# `[dp.tp, -, -?] sum(ep)`.
#
#     dp.tp       cut by dp, and inside that by tp
#     -           not cut
#     ?           open: the compiler may cut it further
#     tp/2%2      part of an axis: the digit coordinate // 2 % 2
#     ~4          a gap: a 4-fold cut that no axis has made
#     sum(ep)     pending reduction over ep
#
# Names that are no words stand in double quotes.

_TEXT = re.compile(
    r"\s*\[(?P<dims>(?:[^\]\"]|\"(?:[^\"\\]|\\.)*\")*)\]\s*(?P<partial>.*)", re.DOTALL
)
_NAME = r"(?P<name>\w+|\"(?:[^\"\\]|\\.)*\")"
_ENTRY = re.compile(rf"~(?P<gap>\d+)|{_NAME}(?:(?:/(?P<inner>\d+))?%(?P<size>\d+))?")
_PARTIAL = re.compile(rf"\s*(?P<op>\w+)\({_NAME}\)\s*")


def to_text(
    dims: Sequence[Dim], partial: Sequence[tuple[Axis, str]], open_dims: frozenset[int]
) -> str:
    """The text of a layout's parts."""
    dims_text = ", ".join(
        (".".join(map(_entry_text, entries)) or "-") + ("?" if dim in open_dims else "")
        for dim, entries in enumerate(dims)
    )
    return " ".join([f"[{dims_text}]", *(f"{op}({_name_text(axis)})" for axis, op in partial)])


def _name_text(axis: Axis) -> str:
    name = str(axis)
    return name if re.fullmatch(r"\w+", name) else json.dumps(name, ensure_ascii=False)


def _entry_text(entry: Entry) -> str:
    if isinstance(entry, Gap):
        return f"~{entry.size}"
    if isinstance(entry, AxisPart):
        inner = f"/{entry.inner}" if entry.inner > 1 else ""
        return f"{_name_text(entry.axis)}{inner}%{entry.size}"
    return _name_text(entry)


def parse_text(
    text: str, mesh: Mesh
) -> tuple[tuple[Dim, ...], tuple[tuple[Axis, str], ...], frozenset[int]]:
    """Reads the text of a layout on a mesh.

    Returns:
        (entries per dim, (axis, reduce op) pairs, open dims).

    Raises:
        LayoutError: The text has another form, or names an axis that the mesh lacks.
    """
    match = _TEXT.fullmatch(text)
    if match is None:
        raise _refusal(text, "It has no [...] with one entry per tensor dim", mesh)
    dims: list[Dim] = []
    open_dims: set[int] = set()
    for dim, piece in enumerate(_split(match["dims"], ",")):
        entries = piece.strip()
        if entries.endswith("?"):
            open_dims.add(dim)
            entries = entries[:-1].rstrip()
        names = [] if entries == "-" else _split(entries, ".") or [""]
        dims.append(tuple(_read_entry(name.strip(), text, mesh) for name in names))
    return tuple(dims), _read_partial(match["partial"], text, mesh), frozenset(open_dims)


def _read_entry(entry: str, text: str, mesh: Mesh) -> Entry:
    match = _ENTRY.fullmatch(entry)
    if match is None:
        raise _refusal(text, f"{entry!r} is no axis, part of an axis, gap or '-'", mesh)
    if match["gap"]:
        return Gap(int(match["gap"]))
    axis = _read_name(match["name"], text, mesh)
    if match["size"] is None:
        return axis
    return AxisPart(axis, int(match["size"]), int(match["inner"] or 1))


def _read_partial(reductions: str, text: str, mesh: Mesh) -> tuple[tuple[Axis, str], ...]:
    partial: list[tuple[Axis, str]] = []
    position = 0
    while position < len(reductions):
        match = _PARTIAL.match(reductions, position)
        if match is None:
            raise _refusal(
                text, f"{reductions[position:]!r} is no reduction such as sum(axis)", mesh
            )
        partial.append((_read_name(match["name"], text, mesh), match["op"]))
        position = match.end()
    return tuple(partial)


def _read_name(name: str, text: str, mesh: Mesh) -> Axis:
    axis_name = json.loads(name) if name.startswith('"') else name
    for axis in mesh.axis_names:
        if str(axis) == axis_name:
            return axis
    raise _refusal(text, f"{axis_name!r} is no axis of the mesh with {describe_axes(mesh)}", mesh)


def _split(text: str, separator: str) -> list[str]:
    """Splits at a separator outside of double quotes; an empty text has no pieces."""
    if not text.strip():
        return []
    pieces = re.split(rf"({re.escape(separator)}|\"(?:[^\"\\]|\\.)*\")", text)
    fields = [""]
    for piece in pieces:
        if piece == separator:
            fields.append("")
        else:
            fields[-1] += piece
    return fields


def _refusal(text: str, reason: str, mesh: Mesh) -> LayoutError:
    example = ", ".join(_name_text(axis) for axis in mesh.axis_names[:2])
    return LayoutError(
        f"The layout text {text!r} was to be read. {reason}. "
        f"Pass one entry per tensor dim, e.g. '[{example}, -]'."
    )


# ------------------------------------------------------------------------------------------ Layout

_CACHE_SIZE = 4096
_NONE_OPEN: frozenset[int] = frozenset()


@argument_types
@dataclass(frozen=True, eq=False, repr=False, slots=True)
class Layout:
    """How a tensor lies on a mesh. Frozen, hashable; normalised when it is made.

    Args:
        mesh: The mesh.
        dims: Per tensor dim its axes (or parts, or gaps), outermost cut first.
        partial: (axis, reduce op) pairs: reductions that are still to be made.
        open_dims: Dims that the compiler may cut further.

    Raises:
        LayoutError: An axis is unknown or used twice, or open_dims is out of range.

    Example:
        >>> print(Layout(Mesh.arange((2, 4), ("dp", "tp")), (("dp",), ()), (("tp", "sum"),)))
        [dp, -] sum(tp)
    """

    mesh: Mesh
    dims: tuple[Dim, ...]
    partial: tuple[tuple[Axis, str], ...] = ()
    open_dims: frozenset[int] = _NONE_OPEN
    _hash: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        sizes = axis_sizes(self.mesh)
        turn = {axis: index for index, axis in enumerate(sizes)}
        dims = tuple([normal_dim(dim, sizes) for dim in self.dims])
        partial = tuple(sorted(self.partial, key=lambda pair: turn.get(pair[0], 0)))
        object.__setattr__(self, "dims", dims)
        object.__setattr__(self, "partial", partial)
        object.__setattr__(self, "open_dims", frozenset(self.open_dims))
        self.check_valid()
        object.__setattr__(self, "_hash", hash(self._key()))

    @classmethod
    def replicated(cls, mesh: Mesh, tensor_ndim: int) -> Layout:
        """The layout with a full copy on every device.

        Example:
            >>> print(Layout.replicated(Mesh.arange((8,)), 2))
            [-, -]
        """
        return _interned(mesh, ((),) * tensor_ndim, (), _NONE_OPEN)

    @classmethod
    def from_placements(cls, placements: Sequence[object], tensor_ndim: int, mesh: Mesh) -> Layout:
        """Reads placements. Cached.

        Args:
            placements: One per mesh axis: PyTorch's objects, or this package's records.
            tensor_ndim: Rank of the tensor.
            mesh: The mesh.

        Returns:
            The layout.

        Raises:
            LayoutError: Wrong number of placements, a dim out of range, an unknown object, or a
                strided placement that cuts across another.

        Example:
            >>> from xla_dtensor.core.placements import Replicate, Shard
            >>> mesh = Mesh.arange((2, 4), ("dp", "tp"))
            >>> print(Layout.from_placements([Replicate(), Shard(-1)], 3, mesh))
            [-, -, tp]
        """
        records = read_placements(placements, tensor_ndim, mesh)
        return _layout_of_records(records, tensor_ndim, mesh)

    @classmethod
    def from_partition_spec(
        cls, spec: Iterable[object], mesh: Mesh, *, tensor_ndim: int | None = None
    ) -> Layout:
        """Reads a partition spec as JAX and torch_xla write it. Cached.

        Args:
            spec: Per dim None, an axis (name or position), a tuple of axes, outermost first, or an
                object that prints as UNCONSTRAINED (`OPEN` here).
            mesh: The mesh.
            tensor_ndim: Rank of the tensor, where the spec may be shorter.

        Returns:
            The layout.

        Raises:
            LayoutError: An entry of another kind, an unknown axis, an axis twice, or too many
                entries.

        Example:
            >>> mesh = Mesh.arange((2, 4), ("dp", "tp"))
            >>> print(Layout.from_partition_spec((("tp", "dp"), None), mesh))
            [tp.dp, -]
        """
        dims, open_dims = read_partition_spec(spec, mesh, tensor_ndim)
        return _interned(mesh, dims, (), open_dims)

    @classmethod
    def from_aliases(
        cls, aliases: tuple[object, ...], mesh: Mesh, *, tensor_ndim: int | None = None
    ) -> Layout:
        """Reads alias placements: names per tensor dim. Cached.

        Args:
            aliases: Per tensor dim "None", None, an axis name, or a tuple of names, outermost
                first.
            mesh: The mesh.
            tensor_ndim: Rank of the tensor, to check the length against.

        Returns:
            The layout.

        Raises:
            LayoutError: Not a tuple, another length, an entry that is no name, an unknown axis, an
                axis twice.

        Example:
            >>> mesh = Mesh.arange((2, 4), ("dp", "tp"))
            >>> print(Layout.from_aliases((("dp", "tp"), "None"), mesh))
            [dp.tp, -]
        """
        return _interned(mesh, read_aliases(aliases, mesh, tensor_ndim), (), _NONE_OPEN)

    @classmethod
    def parse(cls, text: str, mesh: Mesh) -> Layout:
        """Reads the text of a layout; the inverse of `text`.

        Example:
            >>> Layout.parse("[dp.tp, -?]", Mesh.arange((2, 4), ("dp", "tp"))).open_dims
            frozenset({1})
        """
        return _interned(mesh, *parse_text(text, mesh))

    @property
    def ndim(self) -> int:
        """Rank of the tensor."""
        return len(self.dims)

    @property
    def sharded_axes(self) -> tuple[Axis, ...]:
        """The axes that cut a dim (of size 1 too), in mesh order."""
        cutting = {entry_axis(entry) for entries in self.dims for entry in entries}
        return tuple(axis for axis in self.mesh.axis_names if axis in cutting)

    def is_partial(self) -> bool:
        """Whether a reduction is still to be made."""
        return bool(self.partial)

    @property
    def alias_placements(self) -> tuple[AliasEntry, ...]:
        """Per tensor dim "None", an axis, or a tuple of axes.

        Says nothing of `partial` and `open_dims`.

        Raises:
            LayoutError: A dim has a gap or part of an axis.
        """
        return aliases_of_dims(self.dims)

    def to_placements(self) -> tuple[PlacementRecord, ...]:
        """The placements that give this layout, one record per mesh axis. Cached.

        Raises:
            LayoutError: No placements give it: parts of axes stand in an order that PyTorch cannot
                write.
        """
        return _placements_of(self)

    def to_partition_spec(self) -> tuple[SpecEntry, ...]:
        """The partition spec: per dim None, an axis, a tuple of axes, or `OPEN`.

        Says nothing of `partial`.

        Raises:
            LayoutError: A dim has a gap or part of an axis, or is both cut and open.
        """
        return spec_of_dims(self.dims, self.open_dims)

    def op_sharding(self, root: Mesh | None = None) -> OpSharding:
        """The sharding in XLA's terms, canonical. Cached.

        Partial axes count as copies, and open dims as cut no further.

        Args:
            root: The mesh whose flat order numbers the partitions; None: the layout's mesh's own
                root.

        Returns:
            The OpSharding over all of `root`.

        Raises:
            LayoutError: A gap, or a mesh that has some of the root's devices and is no submesh of
                it.
            MeshError: The mesh has devices that `root` lacks.
        """
        return _op_sharding_of(self, self.mesh.root if root is None else root)

    def num_shards(self, dim: int) -> int:
        """Into how many pieces the mesh cuts tensor dim `dim`."""
        if not -self.ndim <= dim < self.ndim:
            raise LayoutError(
                f"The shards of dim={dim} of layout {self} were asked for. The layout has "
                f"{self.ndim} dims. "
                f"Pass a dim from {-self.ndim} to {self.ndim - 1}."
            )
        sizes = axis_sizes(self.mesh)
        return prod(entry_size(e, sizes) for e in self.dims[dim] if not isinstance(e, Gap))

    def get_global_shape(self, local_shape: Sequence[int]) -> tuple[int, ...]:
        """The global shape of which every device has a part of `local_shape`.

        Raises:
            LayoutError: A shape of another rank.
        """
        if len(local_shape) != self.ndim:
            raise LayoutError(
                f"The global shape of local_shape={tuple(local_shape)} under layout {self} was "
                "asked for. "
                f"The shape has {len(local_shape)} dims, the layout {self.ndim}. "
                "Pass a shape of the layout's rank."
            )
        return tuple(extent * self.num_shards(dim) for dim, extent in enumerate(local_shape))

    def factored(self) -> Layout:
        """The same layout with every part of an axis as an axis, on a mesh factored for it.

        Returns:
            A layout without parts (itself if it has none); its mesh has the same device order.

        Example:
            >>> mesh = Mesh.arange((2, 4), ("dp", "tp"))
            >>> print(Layout.parse("[tp/2%2.dp.tp%2]", mesh).factored())
            [tp_0.dp.tp_1]
        """
        mesh, dims = with_whole_axes(self.dims, self.mesh)
        return _interned(mesh, dims, self.partial, self.open_dims)

    def text(self) -> str:
        """Short text, e.g. "[dp.tp, -, -?] sum(ep)"; :meth:`parse` reads it."""
        return to_text(self.dims, self.partial, self.open_dims)

    def check_valid(self) -> None:
        """Checks the invariants of the module docstring.

        Raises:
            LayoutError: One does not hold.
        """
        check_entries(self.dims, [axis for axis, _ in self.partial], self.mesh)
        if not all(0 <= dim < self.ndim for dim in self.open_dims):
            raise LayoutError(
                f"open_dims={sorted(self.open_dims)} were asked for in a layout of {self.ndim} "
                "dims. "
                "One of them is out of range. Pass dims counted from 0."
            )

    def _key(self) -> tuple[object, ...]:
        return self.mesh, self.dims, self.partial, self.open_dims

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Layout):
            return NotImplemented
        return self._hash == other._hash and self._key() == other._key()

    def __hash__(self) -> int:
        return self._hash

    def __str__(self) -> str:
        return self.text()

    def __repr__(self) -> str:
        return f"Layout({self.text()!r}, {self.mesh!r})"

    def __reduce__(self) -> tuple[object, ...]:
        # Not the slots: a hash kept in them would be wrong in a process with another hash seed.
        return Layout, self._key()


@lru_cache(_CACHE_SIZE)
def _interned(
    mesh: Mesh,
    dims: tuple[Dim, ...],
    partial: tuple[tuple[Axis, str], ...],
    open_dims: frozenset[int],
) -> Layout:
    """The one object for equal arguments: what is cached by layout compares by identity first."""
    return Layout(mesh, dims, partial, open_dims)


@lru_cache(_CACHE_SIZE)
def _layout_of_records(
    records: tuple[PlacementRecord, ...], tensor_ndim: int, mesh: Mesh
) -> Layout:
    return _interned(mesh, *cuts_of_placements(records, tensor_ndim, mesh), _NONE_OPEN)


@lru_cache(_CACHE_SIZE)
def _placements_of(layout: Layout) -> tuple[PlacementRecord, ...]:
    return placements_of_cuts(layout.dims, layout.partial, layout.mesh)


@lru_cache(_CACHE_SIZE)
def _op_sharding_of(layout: Layout, root: Mesh) -> OpSharding:
    return op_sharding_of_dims(layout.dims, layout.mesh, root)
