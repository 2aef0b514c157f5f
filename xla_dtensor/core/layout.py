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

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod

from mesh_utils import Axis, Mesh
from mesh_utils.argument_types import argument_types
from xla_dtensor.core.axis_names import (
    AliasEntry,
    SpecEntry,
    aliases_of_dims,
    read_aliases,
    read_partition_spec,
    spec_of_dims,
)
from xla_dtensor.core.cut_order import cuts_of_placements, placements_of_cuts
from xla_dtensor.core.encode import op_sharding_of_dims
from xla_dtensor.core.entries import (
    Dim,
    Gap,
    axis_sizes,
    check_entries,
    entry_axis,
    entry_size,
    normal_dim,
    with_whole_axes,
)
from xla_dtensor.core.errors import LayoutError
from xla_dtensor.core.layout_text import parse_text, to_text
from xla_dtensor.core.op_sharding import OpSharding
from xla_dtensor.core.placements import PlacementRecord, read_placements

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
        dims = tuple(normal_dim(dim, sizes) for dim in self.dims)
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
        return _made(mesh, ((),) * tensor_ndim, (), _NONE_OPEN)

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
            strided
                placement that cuts across another.

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
        return _made(mesh, dims, (), open_dims)

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
        return _made(mesh, read_aliases(aliases, mesh, tensor_ndim), (), _NONE_OPEN)

    @classmethod
    def parse(cls, text: str, mesh: Mesh) -> Layout:
        """Reads the text of a layout; the inverse of `text`.

        Example:
            >>> Layout.parse("[dp.tp, -?]", Mesh.arange((2, 4), ("dp", "tp"))).open_dims
            frozenset({1})
        """
        return _made(mesh, *parse_text(text, mesh))

    @property
    def ndim(self) -> int:
        """Rank of the tensor."""
        return len(self.dims)

    @property
    def sharded_axes(self) -> tuple[Axis, ...]:
        """The axes that cut a dim (of size 1 too), in mesh order."""
        used = {entry_axis(entry) for entries in self.dims for entry in entries}
        return tuple(axis for axis in self.mesh.axis_names if axis in used)

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
            it. MeshError: The mesh has devices that `root` lacks.
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
        return _made(mesh, dims, self.partial, self.open_dims)

    def text(self) -> str:
        """Short text, e.g. "[dp.tp, -, -?] sum(ep)"; see `layout_text`."""
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
def _made(
    mesh: Mesh,
    dims: tuple[Dim, ...],
    partial: tuple[tuple[Axis, str], ...],
    open_dims: frozenset[int],
) -> Layout:
    return Layout(mesh, dims, partial, open_dims)


@lru_cache(_CACHE_SIZE)
def _layout_of_records(
    records: tuple[PlacementRecord, ...], tensor_ndim: int, mesh: Mesh
) -> Layout:
    return _made(mesh, *cuts_of_placements(records, tensor_ndim, mesh), _NONE_OPEN)


@lru_cache(_CACHE_SIZE)
def _placements_of(layout: Layout) -> tuple[PlacementRecord, ...]:
    return placements_of_cuts(layout.dims, layout.partial, layout.mesh)


@lru_cache(_CACHE_SIZE)
def _op_sharding_of(layout: Layout, root: Mesh) -> OpSharding:
    return op_sharding_of_dims(layout.dims, layout.mesh, root)
