"""Checkpoints of a job over any number of processes: whole or not there, checked, on any mesh.

    from xla_dtensor import checkpoint

    state = {"model": model, "optimizer": optimizer, "loader": loader, "scheduler": scheduler}
    if checkpoint.latest(folder) is not None:
        step = checkpoint.load(folder, state)
    ...
    saving = checkpoint.async_save(folder, state, step=step, keep=3)

* **Whole or not there.** Whoever looks sees a checkpoint with all its files, or the one before: see
  :mod:`xla_dtensor.hosts.checkpoint.folders`.
* **Checked.** A manifest names every tensor with shape, dtype, layout, bytes and checksums. No
  value reaches a tensor whose checksum was not right, and every refusal names the file.
* **Once.** Each distinct shard is written by one process, whatever the number of its replicas, and
  what the processes wrote is proved to be the whole of every tensor before it counts.
* **On any mesh.** A tensor is loaded as it lies in the state given, on any mesh, with any
  placements, by any number of processes.

``state`` is a nested dict of tensors, DTensors, plain values, and objects with ``state_dict`` and
``load_state_dict``; see :mod:`xla_dtensor.hosts.checkpoint.state`. The states of the random number
generators are saved beside it. In a job of several processes all of them make the same calls, with
a folder that all of them share: a path, or any URL that fsspec knows. Each checkpoint can be read
by ``torch.distributed.checkpoint.load`` as well.

    begin                    Save takes all from the state, the processes agree, a folder is made
    pieces, files            each process writes its pieces, with checksums, and syncs its file
    manifest, folders        what was written is proved to be the whole; the folder gets its name

Example:
    >>> import tempfile, torch, xla_dtensor as xd
    >>> from torch.distributed.tensor import Replicate, Shard
    >>> mesh = xd.init_device_mesh("xla", (2, 4))
    >>> saved = {"w": xd.distribute_tensor(torch.arange(8), mesh, [Replicate(), Shard(0)]), "n": 3}
    >>> other = xd.distribute_tensor(torch.zeros(8).long(), mesh, [Shard(0), Shard(0)])
    >>> loaded = {"w": other, "n": 0}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = save(folder, saved, step=42)
    ...     load(folder, loaded)
    42
    >>> loaded["w"].tolist(), loaded["n"]
    ([0, 1, 2, 3, 4, 5, 6, 7], 3)
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from xla_dtensor.core.argument_types import argument_types
from xla_dtensor.core.errors import CheckpointError
from xla_dtensor.hosts.blocks import moving
from xla_dtensor.hosts.checkpoint.exchange import Exchange
from xla_dtensor.hosts.checkpoint.folders import folder_of, read_manifest, whole_steps
from xla_dtensor.hosts.checkpoint.pieces import Reader
from xla_dtensor.hosts.checkpoint.restore import Restore, chosen_step
from xla_dtensor.hosts.checkpoint.saving import Save
from xla_dtensor.hosts.checkpoint.state import GENERATORS, Generators
from xla_dtensor.hosts.checkpoint.storage import open_storage
from xla_dtensor.hosts.hugging_face import load_hf, save_hf

__all__ = [
    "CheckpointError",
    "Pending",
    "async_save",
    "latest",
    "load",
    "load_hf",
    "save",
    "save_hf",
    "steps",
    "verify",
]

logger = logging.getLogger("xla_dtensor")


@argument_types
def save(
    folder: str | os.PathLike[str],
    state: Mapping[str, Any],
    *,
    step: int,
    keep: int | None = None,
    rng: bool = True,
    progress: bool = False,
    timeout_seconds: float = 1800,
) -> str:
    """Save a state, and return when its checkpoint is whole.

    A checkpoint of the same step is replaced. One that `async_save` still writes is waited for. A
    host holds no more than one shard and a piece of 64 MiB of it at a time.

    Args:
        folder: The folder of the job's checkpoints, or an fsspec URL.
        state: A nested dict; "rng" is the generators' name in it.
        step: The training step, from 0.
        keep: How many checkpoints stay, this one included; older ones are removed once this one is
            whole. None: all.
        rng: Whether to save the states of the random number generators.
        progress: Whether to show progress in process 0, with tqdm.
        timeout_seconds: How long to wait for the slowest process.

    Returns:
        The folder of the checkpoint, such as "runs/a/step_00000042".

    Raises:
        CheckpointError: It cannot be written, in this process or another; or the checkpoint that
            was written in the background before failed, and nobody has waited for it.
    """
    return _prepared(folder, state, step, keep, rng, progress, timeout_seconds, copied=False).run()


@argument_types
def async_save(
    folder: str | os.PathLike[str],
    state: Mapping[str, Any],
    *,
    step: int,
    keep: int | None = None,
    rng: bool = True,
    timeout_seconds: float = 1800,
) -> Pending:
    """Copy a state to the host, and write its checkpoint in a thread.

    When this returns the state may change. One checkpoint is written at a time: a second call waits
    for the first. The end of the program waits for it, too.

    Args:
        folder: See `save`.
        state: See `save`. This process's distinct shards are copied to the host.
        step: See `save`.
        keep: See `save`.
        rng: See `save`.
        timeout_seconds: See `save`.

    Returns:
        What to wait for. An error is raised by its `wait`, or else by the next save.

    Raises:
        CheckpointError: The state cannot be saved, or the checkpoint before failed.

    Example:
        >>> import tempfile, torch
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = async_save(folder, {"w": torch.ones(3)}, step=1).wait()
        ...     steps(folder)
        [1]
    """
    prepared = _prepared(folder, state, step, keep, rng, False, timeout_seconds, copied=True)
    global _pending
    _pending = Pending(prepared.run)
    return _pending


@argument_types
def load(
    folder: str | os.PathLike[str],
    state: Mapping[str, Any],
    *,
    step: int | None = None,
    strict: bool = True,
    only: Sequence[str] | None = None,
    convert: bool = False,
    rng: bool = True,
    progress: bool = False,
    timeout_seconds: float = 1800,
) -> int:
    """Load a checkpoint into a state, in place.

    Tensors keep their mesh, placements and dtype. Each process reads only what its devices need,
    and holds no more of it on the host than a shard of the largest tensor and 128 MiB.

    Args:
        folder: The folder of the job's checkpoints, or an fsspec URL.
        state: A nested dict of the same form as the one saved. An optimizer may be new.
        step: The step. None: the newest.
        strict: Whether the checkpoint and the state must have the same names. If not, what both
            have is loaded, and one warning is logged.
        only: Patterns such as "model.*", as of `fnmatch`; other names are left out on both sides.
        convert: Whether values may be converted to another dtype.
        rng: Whether to load the states of the random number generators, if they were saved.
        progress: Whether to show progress in process 0, with tqdm.
        timeout_seconds: How long to wait for the slowest process.

    Returns:
        The step.

    Raises:
        CheckpointError: There is no such checkpoint, it is damaged, or it does not fit the state.
            The message names the file. What was loaded before stays loaded: load another
            checkpoint before you use the state.
    """
    exchange = Exchange(timeout_seconds)
    return Restore(
        open_storage(folder),
        _with_generators(state, rng),
        strict=strict,
        only=only,
        convert=convert,
        exchange=exchange,
        show=progress,
    ).run(step)


@argument_types
def steps(folder: str | os.PathLike[str]) -> list[int]:
    """Return the steps of which there is a whole checkpoint, in ascending order.

    Args:
        folder: The folder of the job's checkpoints, or an fsspec URL.

    Returns:
        The steps; none where there is no such folder.
    """
    return whole_steps(open_storage(folder))


@argument_types
def latest(folder: str | os.PathLike[str]) -> int | None:
    """Return the newest step of which there is a whole checkpoint.

    Args:
        folder: The folder of the job's checkpoints, or an fsspec URL.

    Returns:
        The step, or None where there is none.
    """
    return max(steps(folder), default=None)


@argument_types
def verify(
    folder: str | os.PathLike[str], *, step: int | None = None, progress: bool = False
) -> int:
    """Read a whole checkpoint and compare all its checksums; no state and no devices are needed.

    Args:
        folder: The folder of the job's checkpoints, or an fsspec URL.
        step: The step. None: the newest.
        progress: Whether to show progress, with tqdm.

    Returns:
        The step.

    Raises:
        CheckpointError: There is no such checkpoint, or it is damaged. The message names the file.
    """
    storage = open_storage(folder)
    manifest = read_manifest(storage, chosen_step(storage, step))
    total = sum(entry.num_bytes for entry in manifest.entries.values())
    with (
        moving("verifying", total, progress) as advance,
        Reader(storage, folder_of(manifest.step), manifest.files, advance) as reader,
    ):
        for name, entry in manifest.entries.items():
            reader.check(name, entry)
    return manifest.step


def _prepared(
    folder: str | os.PathLike[str],
    state: Mapping[str, Any],
    step: int,
    keep: int | None,
    rng: bool,
    show: bool,
    timeout_seconds: float,
    *,
    copied: bool,
) -> Save:
    exchange = Exchange(timeout_seconds)
    _finish_pending()
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        raise CheckpointError(
            f"A checkpoint was to be saved with step={step!r}. It names the folder. Pass an int "
            "from 0."
        )
    if keep is not None and keep < 1:
        raise CheckpointError(
            f"A checkpoint was to be saved with keep={keep}. The one being saved is kept in any "
            "case. Pass 1 or more, or None to keep all."
        )
    return Save(
        open_storage(folder),
        _with_generators(state, rng),
        step=step,
        keep=keep,
        exchange=exchange,
        copied=copied,
        show=show,
    )


def _with_generators(state: Mapping[str, Any], rng: bool) -> dict[str, Any] | Mapping[str, Any]:
    if GENERATORS in state:
        raise CheckpointError(
            f"A state with the key {GENERATORS!r} was given. The generators have this name in a "
            "checkpoint. Rename yours."
        )
    return _Beside(state, {GENERATORS: Generators()} if rng else {})


class _Beside(dict[str, Any]):
    """A state with the generators beside it; what is set is set in the state."""

    def __init__(self, state: Mapping[str, Any], generators: Mapping[str, Any]) -> None:
        super().__init__({**state, **generators})
        self._state = state

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        self._state[key] = value  # pyright: ignore[reportIndexIssue]


# -------------------------------------------------------------------------------- In the background


class Pending:
    """A checkpoint being written; made by ``checkpoint.async_save``."""

    def __init__(self, write: Callable[[], str]) -> None:
        self._write = write
        self._folder: str | None = None
        self._error: BaseException | None = None
        self.is_awaited = False
        # Not a daemon: Python waits for it at the end of the program.
        self._thread = threading.Thread(target=self._run, name="xla_dtensor checkpoint")
        self._thread.start()

    def wait(self, timeout_seconds: float | None = None) -> str:
        """Wait until the checkpoint is whole, and return its folder.

        Args:
            timeout_seconds: How long to wait. None: until it is done.

        Raises:
            CheckpointError: It could not be written.
            TimeoutError: It is not done yet.
        """
        self._thread.join(timeout_seconds)
        if self._thread.is_alive():
            raise TimeoutError(
                f"A checkpoint was waited for with timeout_seconds={timeout_seconds}. It is not "
                "written yet. Wait again, or longer."
            )
        self.is_awaited = True
        if self._error is not None:
            raise self._error
        assert self._folder is not None
        return self._folder

    def done(self) -> bool:
        """Tell whether it is written, or has failed: then `wait` raises at once."""
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._folder = self._write()
        except BaseException as error:
            self._error = error
            logger.error("a checkpoint could not be written: %s", error)
        finally:
            del self._write  # with the copies it holds


_pending: Pending | None = None


def _finish_pending() -> None:
    """Wait for the checkpoint in the background, and raise its error if nobody has seen it."""
    global _pending
    pending, _pending = _pending, None
    if pending is not None and not pending.is_awaited:
        pending.wait()
