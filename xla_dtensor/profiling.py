"""Record what host and devices do while compiled steps run."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager

from xla_dtensor.argument_types import argument_types
from xla_dtensor.runtimes.registry import get_runtime

__all__ = ["profile"]


@argument_types
def profile(folder: str | os.PathLike[str]) -> AbstractContextManager[None]:
    """Return a context that records what runs inside, for TensorBoard, XProf or Perfetto.

    A compiled step's ops carry the names of the modules that they come from:
    ``Llama/layers.0/attention/...`` and, for their gradients, ``backward/Llama/layers.0/...``.

    Args:
        folder: Where the recording is written to; it is made if it is not there.

    Raises:
        UnsupportedOpError: The runtime records no profiles.

    Example:
        >>> import tempfile, torch, xla_dtensor as xd
        >>> step = xd.compile(lambda x: x * 2)
        >>> with tempfile.TemporaryDirectory() as folder, xd.profile(folder):
        ...     step(torch.ones(2)).tolist()
        [2.0, 2.0]
    """
    return get_runtime().profile(folder)
