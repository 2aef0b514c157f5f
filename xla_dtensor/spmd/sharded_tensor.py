"""XLAShardedTensor: a DTensor with the attributes that torch_xla's scripts use.

It is a :class:`~xla_dtensor.DTensor` in everything else: ops on it give XLAShardedTensors, autograd
passes through it, ``placements`` are always known. ``global_tensor`` is the runtime's plain tensor
behind it; ``local_shards`` are copies of this process's shards, padding included, as torch_xla
gives them.

Pictures of shardings: which devices hold which tile.

Each cell of a picture is a tile with its devices; rows are the tiles of one dim, columns those of
the next. A tensor of more than two dims gives one picture per tile of the dims before. A picture is
a table of rich::

    >>> _ = visualize_sharding("{devices=[2,1,4]<=[8] last_tile_dim_replicate}", use_color=False)
    ... # doctest: +SKIP
    ┌──────────────────┐
    │ CPU [0, 1, 2, 3] │
    ├──────────────────┤
    │ CPU [4, 5, 6, 7] │
    └──────────────────┘
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from types import EllipsisType
from typing import Any

import numpy as np
import torch

from mesh_utils import Mesh as MeshValue
from xla_dtensor.core import Layout, OpSharding, layout_of_op_sharding
from xla_dtensor.core.argument_types import argument_types
from xla_dtensor.core.errors import ArgumentTypeError, DistributeError
from xla_dtensor.dtensor import dynamo
from xla_dtensor.dtensor.dtensor import DTensor, load_dtensor, reduce_dtensor
from xla_dtensor.dtensor.mesh import DeviceMesh, as_device_mesh
from xla_dtensor.dtensor.redistribute import as_plain, torch_placements
from xla_dtensor.runtimes.base import AddressableShard
from xla_dtensor.runtimes.nested import map_nested
from xla_dtensor.runtimes.registry import get_runtime
from xla_dtensor.runtimes.whole_ops import LinearResult
from xla_dtensor.spmd.mesh import ShardingType, candidate_meshes, sharding_type_of

__all__ = [
    "XLAShard",
    "XLAShardedTensor",
    "take_plain_tensors",
    "unwrap_sharded_tensor",
    "visualize_sharding",
    "visualize_tensor_sharding",
    "wrap_as_sharded_tensor",
    "wrap_if_sharded",
    "wrap_plain",
    "wrapped_tensor",
]


# -------------------------------------------------------------------------------- XLAShardedTensor


@dataclass
class XLAShard:
    """A copy of one device's shard.

    Args:
        data: The values on the host, padded with zeros to the tile's shape.
        indices: One slice per dim into the global tensor, or Ellipsis when it is replicated.
        shard_device: The device, e.g. "CPU:3".
        replica_id: Which of the copies of this part it is: 0 where there are none, the device's
            number where all devices hold the whole.
    """

    data: torch.Tensor
    indices: EllipsisType | list[slice]
    shard_device: str
    replica_id: int

    @property
    def unpadded_data(self) -> torch.Tensor:
        """The values without padding; assigning writes them into `data`."""
        return self.data[self._inside()]

    @unpadded_data.setter
    def unpadded_data(self, t: torch.Tensor) -> None:
        self.data[self._inside()] = t

    def _inside(self) -> Any:
        if isinstance(self.indices, EllipsisType):
            return ...
        return tuple(slice(0, part.stop - part.start) for part in self.indices)


class XLAShardedTensor(DTensor):
    """A tensor that XLA shards."""

    @staticmethod
    def __new__(  # noqa: D417  cls is no argument
        cls,
        elem: torch.Tensor,
        mesh_shape: Any = None,
        partition_spec: Any = None,
        *,
        requires_grad: bool = False,
    ) -> XLAShardedTensor:
        """Wrap a tensor; how DTensor makes its results, with a mesh and placements, is taken too.

        Args:
            elem: A plain tensor of the runtime, or an XLAShardedTensor. It is not annotated: use
                :func:`xla_dtensor.spmd.mark_sharding` for that.
            mesh_shape: The shape of the mesh that `partition_spec` refers to.
            partition_spec: What is known of how it lies; None when nothing is.
            requires_grad: Whether autograd records what is done with it.
        """
        if isinstance(elem, DTensor) and mesh_shape is None:
            mesh_shape, partition_spec = elem._spec.mesh, elem._spec.placements
        elem = elem._local_tensor if isinstance(elem, DTensor) else elem
        if not isinstance(mesh_shape, DeviceMesh):
            _check_on_devices("XLAShardedTensor", elem)
            layout = _label(elem, mesh_shape, partition_spec)
            mesh_shape = as_device_mesh(layout.mesh)
            partition_spec = torch_placements(layout)
        return cls._wrapping(elem, mesh_shape, partition_spec, requires_grad)  # pyright: ignore

    @property
    def global_tensor(self) -> torch.Tensor:
        """The runtime's plain tensor of the whole value; nothing is moved or gathered."""
        wrapped = wrapped_tensor(self)
        return as_plain(self) if wrapped is None else wrapped

    @property
    def mesh_shape(self) -> tuple[int, ...]:
        """The shape of the mesh."""
        return self._spec.mesh.value.mesh_shape

    @property
    def partition_spec(self) -> tuple[Any, ...]:
        """What is known of how the tensor lies, per dim."""
        return self._spec.layout.to_partition_spec()

    @property
    def sharding_spec(self) -> str:
        """How the tensor lies, in XLA's words, read from the runtime."""
        return str(self.xla_sharding())

    @property
    def sharding_type(self) -> ShardingType:
        """The kind of `annotate`."""
        return sharding_type_of(self.xla_sharding(), _num_devices(self))

    @property
    def local_shards(self) -> list[XLAShard]:
        """Copies of this process's shards, ordered by device."""
        sharding, names = self.xla_sharding(), _device_names()
        root = get_runtime().root(self._spec.mesh.value)
        return [
            _xla_shard(shard, sharding, root, tuple(self.shape), names[shard.device_id])
            for shard in self.addressable_shards()
        ]

    def load_local_shards_(self, shards: Sequence[XLAShard]) -> None:
        """Overwrite this process's shards, in place.

        Args:
            shards: One per addressable device, as `local_shards` gives them.

        Raises:
            DistributeError: A device without a shard or with two, a shard of another shape, or a
                tensor that lies otherwise than it is labelled.
        """
        runtime, numbers = get_runtime(), {name: i for i, name in _device_names().items()}
        devices = [numbers.get(shard.shard_device, shard.shard_device) for shard in shards]
        reached = sorted(runtime.addressable_device_ids())
        if sorted(map(str, devices)) != sorted(map(str, reached)):
            raise DistributeError(
                f"load_local_shards_ was called with shards of the devices {devices}. This process "
                f"has the devices {reached}. Pass one shard for each of these."
            )
        layout = self._spec.layout
        label, sharding = layout.op_sharding(runtime.root(layout.mesh)), self.xla_sharding()
        if label != sharding:
            raise DistributeError(
                f"load_local_shards_ was called on a tensor labelled {label} that XLA laid out as "
                f"{sharding}. The shards would go to wrong places. Call mark_sharding on it first."
            )
        parts = {int(i): s.unpadded_data for i, s in zip(devices, shards, strict=True)}
        root, shape = runtime.root(layout.mesh), tuple(self.shape)
        for device, part in parts.items():
            index = label.shard_index(_partition(root, device), shape)
            shard_shape = tuple(places.stop - places.start for places in index)
            if tuple(part.shape) != shard_shape:
                raise DistributeError(
                    f"load_local_shards_ was called with a shard of shape={tuple(part.shape)} for "
                    f"device={device}. That device has shape={shard_shape} of the tensor of "
                    f"shape={shape}. Pass shards whose unpadded_data has the shape that "
                    "local_shards gives."
                )
        payload = runtime.from_shards(parts, tuple(self.shape), layout)
        with torch.no_grad():
            runtime.run_op(torch.ops.aten.copy_.default, (self._local_tensor, payload), {})

    def redistribute(self, *args: Any, **kwargs: Any) -> XLAShardedTensor:
        """Return the same values lying otherwise; see :meth:`xla_dtensor.DTensor.redistribute`."""
        tensor: Any = super().redistribute(*args, **kwargs)
        tensor.__class__ = XLAShardedTensor
        return tensor

    @staticmethod
    def __tensor_unflatten__(inner: Any, state: Any, size: Any, stride: Any) -> DTensor:
        return dynamo.unflatten(XLAShardedTensor, inner, state, stride)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        text = super().__repr__(tensor_contents=tensor_contents)
        return type(self).__name__ + text.removeprefix("DTensor")

    def __reduce_ex__(self, protocol: Any) -> Any:
        _, (record,) = reduce_dtensor(self)
        return (load_sharded_tensor, (record,))


def load_sharded_tensor(record: dict[str, Any]) -> XLAShardedTensor:
    """Return the tensor of a pickle record; see :mod:`xla_dtensor.dtensor.dtensor`."""
    tensor: Any = load_dtensor(record)
    tensor.__class__ = XLAShardedTensor
    return tensor


torch.serialization.add_safe_globals([load_sharded_tensor])


def wrapped_tensor(tensor: DTensor) -> torch.Tensor | None:
    """Return the plain tensor around which `tensor` was made, while it still is what it was."""
    payload, plain = tensor.__dict__.get("_wrapped", (None, None))
    if payload is not tensor._local_tensor or plain is None or plain.shape != tensor.shape:
        return None
    return plain


def _num_devices(tensor: DTensor) -> int:
    return get_runtime().root(tensor._spec.mesh.value).size()


def _device_names() -> dict[int, str]:
    """The devices as torch_xla writes them, by id: {0: "CPU:0", ...}."""
    names = [str(attributes["name"]) for attributes in get_runtime().device_attributes()]
    return {int(name.rpartition(":")[2]): name for name in names}


def _xla_shard(
    shard: AddressableShard,
    sharding: OpSharding,
    root: MeshValue,
    shape: tuple[int, ...],
    name: str,
) -> XLAShard:
    if not sharding.is_tiled:
        return XLAShard(shard.data, ..., name, shard.device_id)
    tile = shard.data.new_zeros(sharding.shape_per_tile(shape))
    tile[tuple(slice(0, size) for size in shard.data.shape)] = shard.data
    place = sharding.place_of(_partition(root, shard.device_id)) or 0
    copies = 1
    for size in sharding.tile_dims[len(shape) :]:
        copies *= size
    indices = [slice(part.start, part.stop, 1) for part in shard.index]
    return XLAShard(tile, indices, name, place % copies)


def _partition(root: MeshValue, device_id: int) -> int:
    return int(root.positions().reshape(-1)[(root.device_ids == device_id).argmax()])


def _label(payload: torch.Tensor, mesh_shape: Any, partition_spec: Any) -> Layout:
    """What is known of a plain tensor: by the caller, else by what it was told, else nothing."""
    runtime = get_runtime()
    if mesh_shape is not None:
        mesh = MeshValue(runtime.device_ids(), mesh_shape)
        if partition_spec is not None:
            return Layout.from_partition_spec(partition_spec, mesh)
        meshes = [mesh]
    else:
        meshes = candidate_meshes()
    sharding = runtime.known_sharding(payload)
    for mesh in meshes if sharding is not None else ():
        layout = layout_of_op_sharding(sharding, mesh, payload.ndim, runtime.root(mesh))
        if layout is not None:
            return layout
    return Layout.replicated(meshes[0], payload.ndim)


def _check_on_devices(function: str, t: torch.Tensor) -> None:
    if not get_runtime().is_payload(t):
        raise DistributeError(
            f"{function} was called with a host tensor of shape={tuple(t.shape)}. Only tensors on "
            "the devices are sharded. Call mark_sharding or xla_distribute_tensor."
        )


def wrap_plain(tensor: torch.Tensor, layout: Layout) -> XLAShardedTensor:
    """Wrap a plain tensor of the runtime, whose history the wrapper shares; no op is run."""
    take_plain_tensors()
    mesh, placements = as_device_mesh(layout.mesh), torch_placements(layout)
    if tensor.requires_grad and torch.is_grad_enabled():
        wrapped: Any = _Wrap.apply(tensor, mesh, placements)
    else:
        wrapped = XLAShardedTensor(get_runtime().alias(tensor), mesh, placements)
    wrapped._wrapped = (wrapped._local_tensor, tensor)
    return wrapped


@argument_types
def wrap_as_sharded_tensor(
    t: torch.Tensor, mesh_shape: Any = None, partition_spec: Any = None
) -> XLAShardedTensor:
    """Return `t` as an XLAShardedTensor, with what the caller knows of how it lies.

    Args:
        t: A DTensor (the same object is returned) or a plain tensor of the runtime.
        mesh_shape: The shape of the mesh; None keeps what is known.
        partition_spec: Per dim an axis number, a tuple of them, or None.

    Raises:
        DistributeError: A host tensor.
    """
    if isinstance(t, DTensor):
        t.__class__ = XLAShardedTensor
        if mesh_shape is not None and partition_spec is not None:
            layout = _label(t._local_tensor, mesh_shape, partition_spec)
            t._spec = DTensor._wrapping(
                t._local_tensor, as_device_mesh(layout.mesh), torch_placements(layout)
            )._spec
        return t  # pyright: ignore[reportReturnType]
    _check_on_devices("wrap_as_sharded_tensor", t)
    return wrap_plain(t, _label(t, mesh_shape, partition_spec))


def unwrap_sharded_tensor(t: torch.Tensor) -> torch.Tensor:
    """Return the plain tensor behind an XLAShardedTensor; anything else as it is."""
    return t.global_tensor if isinstance(t, XLAShardedTensor) else t


def wrap_if_sharded(x: Any) -> Any:
    """Return a plain tensor as an XLAShardedTensor if it is known how it lies, all else as is."""
    if not isinstance(x, torch.Tensor) or isinstance(x, DTensor):
        return x
    runtime = get_runtime()
    if not runtime.is_payload(x) or runtime.known_sharding(x) is None:
        return x
    return wrap_as_sharded_tensor(x)


@cache
def take_plain_tensors() -> None:
    """Let ops take a plain tensor beside a sharded one where the process called use_spmd() itself.

    torch_xla wraps each plain tensor there, and would wrap what an op with one of them returns. So
    the plain one becomes an XLAShardedTensor before the op, which its gradient passes through. A
    plain tensor that is written to stays one, and the op is refused.
    """
    if get_runtime().wraps_plain_tensors:
        method: Any = classmethod(_beside_plain_tensors)
        XLAShardedTensor.__torch_function__ = method


def _beside_plain_tensors(
    cls: Any, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
) -> Any:
    name, kwargs = getattr(func, "__name__", ""), dict(kwargs or {})
    # __setitem__, __iadd__ and the like write to their first argument too.
    writes = name.endswith("_") if name[-2:] != "__" else name.startswith(("__set", "__i"))
    with torch._C.DisableTorchFunctionSubclass():
        if name in ("backward", "grad"):  # with respect to the very tensors
            return func(*args, **kwargs)
        written = args[:1] if writes else ()
        read = map_nested(_wrapped_if_plain, tuple(args[len(written) :]))
        out = {"out": kwargs.pop("out")} if "out" in kwargs else {}
        return func(*written, *read, **map_nested(_wrapped_if_plain, kwargs), **out)


def _wrapped_if_plain(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor) or isinstance(leaf, DTensor):
        return leaf
    return wrap_as_sharded_tensor(leaf) if get_runtime().is_payload(leaf) else leaf


class _Wrap(LinearResult):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, mesh: DeviceMesh, placements: Any) -> Any:
        return XLAShardedTensor(get_runtime().alias(tensor), mesh, placements)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return (as_plain(grad) if isinstance(grad, DTensor) else grad), None, None


# --------------------------------------------------------------------------- Pictures of shardings

_COLORS = ("blue", "green", "magenta", "cyan", "yellow", "red", "white", "bright_black")
_LONG_RUN = 8


@argument_types
def visualize_sharding(
    sharding: str,
    use_color: bool = True,
    scale: float = 1.0,
    min_width: int = 9,
    max_width: int = 80,
) -> Any:
    """Print a picture of a sharding.

    Args:
        sharding: XLA's text, with an iota or a list of devices; "" is replicated.
        use_color: Whether cells are coloured, where the terminal can.
        scale: Height of a cell, in units of three lines.
        min_width: Least width of a cell, in characters, where the picture is not too wide then.
        max_width: Width of the whole picture, in characters.

    Returns:
        The rich table of the last picture.

    Raises:
        OpShardingError: `sharding` is no sharding.
    """
    parsed = OpSharding.parse(sharding or "{replicated}")
    platform, shown = _platform(), None
    for title, cells in _pictures(parsed):
        is_shared = parsed.device is None and (not parsed.is_tiled or len(cells[0][0]) > 1)
        texts = [[_cell(platform, tile, is_shared=is_shared) for tile in row] for row in cells]
        columns = len(texts[0])
        width = min_width if columns * (min_width + 1) < max_width else 0
        shown = _print(title, texts, use_color, scale, width, max_width)
    return shown


@argument_types
def visualize_tensor_sharding(t: torch.Tensor, **kwargs: Any) -> Any:
    """Print a picture of how a tensor lies, read from the runtime.

    Args:
        t: A DTensor or a plain tensor of the runtime.
        **kwargs: As for :func:`visualize_sharding`.

    Returns:
        As :func:`visualize_sharding`.
    """
    payload = t._local_tensor if isinstance(t, DTensor) else t
    if not get_runtime().is_payload(payload):
        raise ArgumentTypeError(
            f"visualize_tensor_sharding was called with a tensor of shape={tuple(t.shape)} on the "
            "host. It lies on no mesh. Pass what mark_sharding or distribute_tensor returned."
        )
    return visualize_sharding(str(get_runtime().op_sharding(payload)), **kwargs)


def _platform() -> str:
    return str(get_runtime().device_attributes()[0]["name"]).partition(":")[0]


def _pictures(sharding: OpSharding) -> Iterator[tuple[str, list[list[list[int]]]]]:
    """Yield a title and a grid of device lists for each pair of last dims."""
    if not sharding.is_tiled:
        everywhere = list(get_runtime().device_ids())
        yield "", [[everywhere if sharding.device is None else [sharding.device]]]
        return
    ndim = sharding.tensor_ndim or 0
    tiles = sharding.tile_assignment.reshape(*sharding.tile_dims[:ndim], -1)
    tiles = tiles.reshape((*tiles.shape[:ndim], *(1,) * max(2 - ndim, 0), tiles.shape[-1]))
    outer = tiles.shape[:-3]
    for place in np.ndindex(*outer):
        at = ", ".join(f"dim {dim}: tile {i} of {outer[dim]}" for dim, i in enumerate(place))
        yield at if tiles[place].size < tiles.size else "", tiles[place].tolist()


def _cell(platform: str, devices: list[int], *, is_shared: bool) -> str:
    """The text of a tile, as torch_xla words it; but for long runs of devices."""
    if not is_shared:
        return f"{platform} {devices[0]}"
    runs = np.split(devices, np.flatnonzero(np.diff(devices) != 1) + 1)
    texts = (
        f"{run[0]}-{run[-1]}" if len(run) > _LONG_RUN else ", ".join(map(str, run)) for run in runs
    )
    return f"{platform} [{', '.join(texts)}]"


def _print(
    title: str,
    texts: list[list[str]],
    use_color: bool,
    scale: float,
    min_width: int,
    max_width: int,
) -> Any:
    import rich.box
    import rich.console
    import rich.table

    lines = max(int(3 * scale), 1)
    console = rich.console.Console(width=max_width)
    use_color = use_color and console.color_system is not None
    table = rich.table.Table(
        title=title or None,
        show_header=False,
        show_lines=not use_color,
        padding=0,
        pad_edge=False,
        box=None if use_color else rich.box.SQUARE,
    )
    for _ in texts[0]:
        table.add_column(min_width=min_width, justify="center")
    for i, row in enumerate(texts):
        above = "\n" * ((lines - 1) // 2)
        cells = [f"{above} {text} {above}" for text in row]
        if use_color:
            colors = (_COLORS[(i * len(row) + j) % len(_COLORS)] for j in range(len(row)))
            cells = [f"[on {c}]{t}[/]" for c, t in zip(colors, cells, strict=True)]
        table.add_row(*cells)
    console.print(table, end="\n\n")
    return table
