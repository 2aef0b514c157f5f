"""A progress bar in bytes, by tqdm where it is asked for."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from xla_dtensor.core.errors import CheckpointError

__all__ = ["progress_bar"]


@contextlib.contextmanager
def progress_bar(show: bool, what: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
    """Give a function that is told how many bytes more are done.

    Args:
        show: Whether to show a bar; without one, nothing is imported.
        what: What is done: "saving", "loading".
        total_bytes: How much there is to do, about.

    Raises:
        CheckpointError: tqdm is not installed.
    """
    if not show:
        yield lambda _: None
        return
    try:
        from tqdm import tqdm
    except ImportError as error:
        raise CheckpointError(
            "A checkpoint was asked for with progress=True. tqdm, which shows it, is not "
            "installed. Install tqdm, or pass progress=False."
        ) from error
    with tqdm(total=total_bytes, desc=what, unit="B", unit_scale=True) as bar:

        def done(num_bytes: int) -> None:
            bar.update(num_bytes)

        yield done
