"""The folders of checkpoints: which are whole, and how one becomes so.

    step_00000040/                    whole: it has a manifest
    step_00000042.partial-5f0c1a2b/   being written, or left by a job that was killed
    step_00000020.removed-77ab10c3/   being removed

On a file system a checkpoint is written beside its place, synced, and renamed into it. Where no
folder can be renamed, and where a step is saved again, the files are written in place, under names
of their own, and the manifest is replaced in one step. Either way there is at every moment the new
checkpoint, whole, or the one before.
"""

from __future__ import annotations

import contextlib
import re

from xla_dtensor.core.errors import CheckpointError
from xla_dtensor.hosts.checkpoint.manifest import MANIFEST, Manifest
from xla_dtensor.hosts.checkpoint.storage import Storage

__all__ = [
    "METADATA",
    "begin",
    "commit",
    "discard",
    "folder_of",
    "prune",
    "read_manifest",
    "whole_steps",
]

METADATA = ".metadata"  # torch.distributed.checkpoint's name for its own
_STEP = re.compile(r"step_(\d{8,})")
_REMNANT = re.compile(r"step_\d{8,}\.(?:partial|removed)-([0-9a-f]+)")


def folder_of(step: int) -> str:
    """Return the name of a step's folder.

    Example:
        >>> folder_of(42)
        'step_00000042'
    """
    return f"step_{step:08d}"


def whole_steps(storage: Storage) -> list[int]:
    """Return the steps of which there is a whole checkpoint, in ascending order."""
    matches = [match for name in storage.names() if (match := _STEP.fullmatch(name))]
    return sorted(int(m[1]) for m in matches if storage.size(f"{m[0]}/{MANIFEST}") is not None)


def read_manifest(storage: Storage, step: int) -> Manifest:
    """Read and check a manifest.

    Raises:
        CheckpointError: There is none, or it is damaged.
    """
    name = f"{folder_of(step)}/{MANIFEST}"
    manifest = Manifest.from_bytes(storage.read_all(name), storage.text(name))
    if manifest.step != step:
        raise CheckpointError(
            f"The manifest {storage.text(name)} was to be read. It is that of "
            f"step={manifest.step}. Give the folder its name back, or load another step."
        )
    return manifest


def begin(storage: Storage, step: int, save_id: str) -> str:
    """Make the folder that a checkpoint is written to, and return its name."""
    place = folder_of(step)
    if storage.can_rename and storage.size(f"{place}/{MANIFEST}") is None:
        place = f"{place}.partial-{save_id}"
    storage.make_folder(place)
    return place


def commit(storage: Storage, place: str, manifest: Manifest, metadata: bytes) -> str:
    """Make a checkpoint of which all files are written a whole one.

    Args:
        storage: Where checkpoints lie.
        place: The folder that `begin` returned.
        manifest: What it holds.
        metadata: The same for torch.distributed.checkpoint.

    Returns:
        The name of its folder.

    Raises:
        CheckpointError: A file is missing or has another size, or something cannot be written.
    """
    for file, size in manifest.files.items():
        _check_size(storage, f"{place}/{file}", size)
    final = folder_of(manifest.step)
    storage.put(f"{place}/{METADATA}", metadata)
    storage.put(f"{place}/{MANIFEST}", manifest.to_bytes())
    if place != final:
        _clear(storage, final)
        storage.rename(place, final)
    # Files of the checkpoint of this step that this one replaces.
    own = {*manifest.files, METADATA, MANIFEST}
    for name in storage.names(final):
        if name not in own:
            with contextlib.suppress(CheckpointError):
                storage.remove_file(f"{final}/{name}")
    return final


def _check_size(storage: Storage, name: str, size: int) -> None:
    actual = storage.size(name)
    if actual != size:
        has = "It is not there" if actual is None else f"It has {actual} bytes there"
        raise CheckpointError(
            f"The file {storage.text(name)} was written with {size} bytes. {has}, as process 0 "
            "sees it. Save to a folder that all processes share."
        )


def _clear(storage: Storage, final: str) -> None:
    """Make way: a folder without a manifest in the place of a checkpoint is no checkpoint."""
    if storage.names(final):
        if storage.size(f"{final}/{MANIFEST}") is not None:
            raise CheckpointError(
                f"The checkpoint {storage.text(final)} was to be written. Another job has written "
                "one there meanwhile. Give each job a folder of its own."
            )
        storage.remove_folder(final)


def discard(storage: Storage, place: str, save_id: str) -> None:
    """Remove what was written of a checkpoint that failed; what cannot be removed stays."""
    with contextlib.suppress(CheckpointError):
        if place.endswith(save_id):
            storage.remove_folder(place)
            return
        # The manifest may be in its place, though putting it there has failed: then all is needed.
        if storage.size(f"{place}/{MANIFEST}") is not None:
            content = storage.read_all(f"{place}/{MANIFEST}")
            if Manifest.from_bytes(content, place).save_id == save_id:
                return
        for name in storage.names(place):
            if name.startswith(save_id):
                storage.remove_file(f"{place}/{name}")


def prune(storage: Storage, step: int, keep: int | None, save_id: str) -> None:
    """Remove the oldest checkpoints and what killed jobs have left.

    Args:
        storage: Where checkpoints lie.
        step: The checkpoint just written; it stays.
        keep: How many checkpoints may stay, this one included. None: all.
        save_id: That of this save.
    """
    complete = whole_steps(storage)
    for name in storage.names():
        remnant, place = _REMNANT.fullmatch(name), _STEP.fullmatch(name)
        broken = place and not storage.can_rename and int(place[1]) not in (step, *complete)
        if broken or (remnant and remnant[1] != save_id):
            with contextlib.suppress(CheckpointError):
                storage.remove_folder(name)
    older = [s for s in complete if s != step]
    for old in [] if keep is None else older[: max(0, len(older) - keep + 1)]:
        with contextlib.suppress(CheckpointError):
            _remove(storage, folder_of(old), save_id)


def _remove(storage: Storage, folder: str, save_id: str) -> None:
    # Whoever looks for checkpoints no longer sees it before its first file goes.
    if storage.can_rename:
        removal = f"{folder}.removed-{save_id}"
        storage.rename(folder, removal)
        storage.remove_folder(removal)
    else:
        storage.remove_file(f"{folder}/{MANIFEST}")
        storage.remove_folder(folder)
