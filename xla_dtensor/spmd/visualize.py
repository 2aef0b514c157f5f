"""Pictures of shardings: which devices hold which tile.

Each cell of a picture is a tile with its devices; rows are the tiles of one dim, columns those of
the next. A tensor of more than two dims gives one picture per tile of the dims before. With rich
installed the picture is a rich table, else plain text::

    >>> _ = visualize_sharding("{devices=[2,1,4]<=[8] last_tile_dim_replicate}", use_color=False)
    ... # doctest: +SKIP
    +------------------+
    | CPU [0, 1, 2, 3] |
    +------------------+
    | CPU [4, 5, 6, 7] |
    +------------------+
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from xla_dtensor.argument_types import argument_types
from xla_dtensor.core import OpSharding
from xla_dtensor.dtensor import DTensor
from xla_dtensor.errors import ArgumentTypeError
from xla_dtensor.runtimes.registry import get_runtime

__all__ = ["visualize_sharding", "visualize_tensor_sharding"]

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
        The rich table of the last picture, or its text where rich is not installed.

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
    lines = max(int(3 * scale), 1)
    try:
        import rich.box
        import rich.console
        import rich.table
    except ImportError:
        text = "\n".join([*([title] if title else []), _plain(texts, min_width)])
        print(text, end="\n\n")
        return text
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


def _plain(texts: list[list[str]], min_width: int) -> str:
    width = max(min_width, *(len(text) + 2 for row in texts for text in row))
    line = "+" + ("-" * width + "+") * len(texts[0])
    rows = ["|" + "".join(f"{text:^{width}}|" for text in row) for row in texts]
    return "\n".join([line, *(part for row in rows for part in (row, line))])
