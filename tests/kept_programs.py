"""Programs that XLA has compiled for a test are kept for the next run of the tests.

Half of the time of the tests was spent in compilers, and the same programs are compiled for every
version of torch. JAX keeps them by what they compute, by its own version and by XLA's flags. JAX
writes its files in place, so each worker has a folder of its own: links to the files that all
share, to which it adds what is new when it ends.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

__all__ = ["KeptPrograms"]

_MOST_FILES = 100_000


class KeptPrograms:
    """One worker's folder of compiled programs.

    Args:
        folder: Of all workers.
    """

    def __init__(self, folder: Path) -> None:
        self._shared = folder / "shared"
        self._own = folder / f"worker-{os.getpid()}"

    def start(self) -> None:
        """Take what there is, and tell JAX; what the caller's environment says comes first."""
        if "JAX_COMPILATION_CACHE_DIR" in os.environ:
            return
        self._shared.mkdir(parents=True, exist_ok=True)
        for other in self._shared.parent.glob("worker-*"):
            if not _runs(int(other.name.removeprefix("worker-"))):  # it was killed
                shutil.rmtree(other, ignore_errors=True)
        shutil.rmtree(self._own, ignore_errors=True)
        self._own.mkdir()
        kept = list(self._shared.iterdir())
        if len(kept) > _MOST_FILES:
            shutil.rmtree(self._shared, ignore_errors=True)
        for file in kept:
            with contextlib.suppress(OSError):  # another worker has thrown all away
                os.link(file, self._own / file.name)
        os.environ["JAX_COMPILATION_CACHE_DIR"] = str(self._own)
        os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

    def end(self) -> None:
        """Give what is new to all."""
        if not self._own.exists():
            return
        self._shared.mkdir(parents=True, exist_ok=True)
        for file in self._own.iterdir():
            with contextlib.suppress(OSError):  # there already, or of another file system
                os.link(file, self._shared / file.name)
        shutil.rmtree(self._own, ignore_errors=True)


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
