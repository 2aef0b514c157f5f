"""Where compiled programs are kept between processes, and whether they are.

Compiling a pod's step takes minutes, and every restart of a job repeats it. XLA can write what it
compiled to a folder and find it again by the program, the compiler's version and its options. That
is on by default on TPUs and GPUs. It is off on CPUs, where a program is compiled for the very
processor: a folder on a shared disk would hand it to machines that lack its instructions.

=====================================  =======================================================
``get_runtime(..., compile_cache=x)``  meaning
=====================================  =======================================================
a folder                               kept there
True                                   kept in the default folder, on any device
False                                  not kept
None (default)                         as ``XLA_DTENSOR_COMPILE_CACHE`` says (a folder, 1 or
                                       0), else True on TPUs and GPUs, False on CPUs
=====================================  =======================================================

The default folder is ``~/.cache/xla_dtensor``, or ``$XDG_CACHE_HOME/xla_dtensor``.
"""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["CACHE_VARIABLE", "cache_folder"]

CACHE_VARIABLE = "XLA_DTENSOR_COMPILE_CACHE"


def cache_folder(asked: str | os.PathLike[str] | bool | None, *, on_cpu: bool) -> Path | None:
    """Return the folder for compiled programs; None where they are not to be kept.

    Args:
        asked: The argument `compile_cache`.
        on_cpu: Whether the devices are CPUs.

    Example:
        >>> cache_folder("/tmp/programs", on_cpu=True).name
        'programs'
    """
    if asked is None:
        asked = os.environ.get(CACHE_VARIABLE) or None
    if asked in (None, "0", "1"):
        asked = (not on_cpu) if asked is None else asked == "1"
    if isinstance(asked, bool):
        return _default_folder() if asked else None
    return Path(asked).expanduser()  # pyright: ignore[reportArgumentType]


def _default_folder() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(home).expanduser() / "xla_dtensor"
