"""A bar that shows how far weights are moved, where tqdm is installed and somebody looks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

__all__ = ["progress_bar"]


@contextlib.contextmanager
def progress_bar(what: str, total: int, shown: bool) -> Iterator[Callable[[int], object]]:
    """Show a bar.

    Args:
        what: What is done.
        total: How many bytes there are to move.
        shown: False for no bar. There is none either where stderr is no terminal, or tqdm is not
            installed.

    Yields:
        A function that is told how many bytes more were moved.

    Example:
        >>> with progress_bar("load", 10, shown=False) as advance:
        ...     advance(10)
    """
    try:
        from tqdm import tqdm
    except ImportError:
        shown = False
    if not shown:
        yield lambda count: None
        return
    # disable=None: none where stderr is no terminal.
    with tqdm(total=total, unit="B", unit_scale=True, desc=what, disable=None) as bar:
        yield bar.update
