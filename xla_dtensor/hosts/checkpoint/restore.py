"""Loading: which process reads what, and how it gets into the state.

The first process says which checkpoint it is; each then reads what its own devices need, block by
block, and at the end all say that they could. A tensor is overwritten only with values whose
checksums were right. If a load fails in the middle, what was loaded before stays loaded: load
another checkpoint before the state is used.
"""

from __future__ import annotations

import fnmatch
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from xla_dtensor.core.errors import CheckpointError
from xla_dtensor.dtensor.dcp import Index
from xla_dtensor.dtensor.dtensor import DTensor
from xla_dtensor.hosts.blocks import filled, moving, whole_block
from xla_dtensor.hosts.checkpoint.exchange import Exchange
from xla_dtensor.hosts.checkpoint.folders import folder_of, read_manifest, whole_steps
from xla_dtensor.hosts.checkpoint.manifest import Entry, Manifest, own_name
from xla_dtensor.hosts.checkpoint.pieces import Reader
from xla_dtensor.hosts.checkpoint.state import GENERATORS, Leaf, Walk, is_stored_as_tensor
from xla_dtensor.hosts.checkpoint.storage import Storage
from xla_dtensor.runtimes.registry import get_runtime

__all__ = ["Restore", "check_form", "chosen_step", "few", "set_plain"]

logger = logging.getLogger("xla_dtensor")


def chosen_step(storage: Storage, step: int | None) -> int:
    """Return the step to be loaded: the one asked for, or the newest.

    Raises:
        CheckpointError: There is none.
    """
    steps = whole_steps(storage)
    if step is None and steps:
        return steps[-1]
    if step is None or step not in steps:
        title = "The newest checkpoint" if step is None else f"The checkpoint step={step}"
        names = storage.names()
        contents = f"There are the steps {steps}" if steps else f"The folder has only {names[:8]}"
        raise CheckpointError(
            f"{title} in {storage.root} was to be loaded. {contents if names else 'It is empty'}, "
            "and only folders with a manifest are checkpoints. Pass a step that is there, or the "
            "folder that was saved to."
        )
    return step


class Restore:
    """One load.

    Args:
        storage: Where checkpoints lie.
        state: The nested state, filled in place.
        strict: Whether both have to have the same names.
        only: Patterns of names; None: all.
        convert: Whether dtypes may differ.
        exchange: How the processes agree.
        show: Whether to show progress.
    """

    def __init__(
        self,
        storage: Storage,
        state: Mapping[str, Any],
        *,
        strict: bool,
        only: Sequence[str] | None,
        convert: bool,
        exchange: Exchange,
        show: bool,
    ) -> None:
        self._storage, self._state, self._strict = storage, state, strict
        if isinstance(only, str):
            raise CheckpointError(
                f"A checkpoint was to be loaded with only={only!r}. It takes a list of patterns of "
                f"names. Pass only=[{only!r}], or [{only + '.*'!r}] for all that is below it."
            )
        self._only, self._convert = only, convert
        self._exchange, self._show = exchange, show

    def run(self, step: int | None) -> int:
        """Load, and return the step.

        Raises:
            CheckpointError: Something is missing, damaged or of another form.
        """

        def choose(_: list[Any]) -> list[Any]:
            manifest = read_manifest(self._storage, chosen_step(self._storage, step))
            return [manifest.step, manifest.save_id]

        step_to_load, save_id = self._exchange.agree("choose", lambda: None, choose)
        self._exchange.agree("load", lambda: self._load(step_to_load, save_id), lambda _: None)
        return int(step_to_load)

    def _load(self, step: int, save_id: str) -> None:
        manifest = read_manifest(self._storage, step)
        folder = folder_of(step)
        if manifest.save_id != save_id:
            raise CheckpointError(
                f"The checkpoint {self._storage.text(folder)} was to be loaded. Process 0 reads "
                "another one there. Pass a folder that all processes share, and save no other "
                "checkpoint of this step meanwhile."
            )
        entries = {n: e for n, e in manifest.entries.items() if self._is_chosen(n)}
        walk = Walk(self._state, entries, partial=not self._strict or self._only is not None)
        matches = self._matches(walk.leaves, manifest, folder)
        total = sum(manifest.entries[entry].num_bytes for _, entry in matches)
        show = self._show and not self._exchange.index
        with (
            moving("loading", total // self._exchange.count, show) as advance,
            Reader(self._storage, folder, manifest.files, advance) as reader,
            torch.no_grad(),
        ):
            for leaf, name in matches:
                self._load_leaf(reader, leaf, name, manifest.entries[name])
        walk.give_back({leaf.name for leaf, _ in matches})

    # -------------------------------------------------------------------------------- Names

    def _matches(
        self, leaves: Mapping[str, Leaf], manifest: Manifest, folder: str
    ) -> list[tuple[Leaf, str]]:
        """What is loaded from which entry."""
        in_state = {name for name in leaves if self._is_chosen(name)}
        in_checkpoint = {
            name
            for name, entry in manifest.entries.items()
            if not entry.of_process and self._is_chosen(name)
        } - ({GENERATORS} - in_state)
        in_state -= {GENERATORS} - in_checkpoint
        missing, unknown = sorted(in_state - in_checkpoint), sorted(in_checkpoint - in_state)
        for pattern in self._only or ():
            if not any(fnmatch.fnmatchcase(name, pattern) for name in (*leaves, *manifest.entries)):
                raise CheckpointError(
                    f"A state was to be loaded from {self._storage.text(folder)} with "
                    f"only={list(self._only or ())}. No name is like {pattern!r}; there are "
                    f"{few(sorted(manifest.entries))}. Pass patterns of names as these."
                )
        if self._strict and (missing or unknown):
            raise CheckpointError(
                f"A state was to be loaded from {self._storage.text(folder)}. "
                f"The checkpoint lacks {few(missing)}; the state lacks {few(unknown)}. Pass "
                "strict=False to load what both have, or only=[...] with patterns of names."
            )
        if missing or unknown:
            logger.warning("not loaded: %s; not asked for: %s", few(missing), few(unknown))
        matches: list[tuple[Leaf, str]] = []
        for name in leaves:
            if name in in_state & in_checkpoint:
                own = self._own(name, manifest, folder)
                matches += [(leaves[name], own)] if own else []
        for leaf, name in matches:
            self._check_fits(leaf, manifest.entries[name], folder)
        return matches

    def _is_chosen(self, name: str) -> bool:
        return self._only is None or any(fnmatch.fnmatchcase(name, p) for p in self._only)

    def _own(self, name: str, manifest: Manifest, folder: str) -> str | None:
        """The entry that this process loads, where each has saved its own."""
        copies = manifest.entries[name].copies
        index, count = self._exchange.index, self._exchange.count
        if copies is None or copies == count:
            return name if copies is None else own_name(name, index)
        if name == GENERATORS:
            # Those who were not there go on with theirs.
            logger.warning("the generators of %d processes are loaded in %d", copies, count)
            return own_name(name, index) if index < copies else None
        raise CheckpointError(
            f"The value {name!r} was to be loaded from {self._storage.text(folder)}. Each of "
            f"{copies} processes saved another one, and there are {count} now. Start {copies} "
            "processes, or leave it out with only=[...]."
        )

    def _check_fits(self, leaf: Leaf, entry: Entry, folder: str) -> None:
        where = self._storage.text(folder)
        check_form(leaf, entry, where)
        if not is_stored_as_tensor(leaf.value) or self._convert:
            return
        dtype = str(leaf.value.dtype).removeprefix("torch.")
        if dtype != entry.dtype:
            raise CheckpointError(
                f"{leaf.name!r} was to be loaded from {where}. It has dtype={entry.dtype} there, "
                f"and dtype={dtype} in the state. Pass convert=True to convert what is loaded."
            )

    # ------------------------------------------------------------------------------- Values

    def _load_leaf(self, reader: Reader, leaf: Leaf, name: str, entry: Entry) -> None:
        if entry.shape is None:
            set_plain(leaf, reader.value(name, entry))
        elif not isinstance(leaf.value, DTensor):
            values = torch.empty(entry.shape, dtype=leaf.value.dtype)
            reader.read(name, entry, whole_block(entry.shape), values)
            leaf.value.copy_(values)
        elif not leaf.value._local_tensor.is_meta and leaf.value.numel():
            # On the meta device is what no device of this process has.

            def read(index: Index, out: torch.Tensor) -> None:
                reader.read(name, entry, index, out)

            payload = leaf.value._local_tensor
            values = filled(leaf.value, payload.dtype, read)
            get_runtime().run_op(torch.ops.aten.copy_.default, (payload, values), {})


def check_form(leaf: Leaf, entry: Entry, where: str) -> None:
    """Refuse an entry that is no tensor of the leaf's shape, or no plain value where it is one."""
    is_tensor = is_stored_as_tensor(leaf.value)
    head = f"{leaf.name!r} was to be loaded from {where}."
    if is_tensor != (entry.shape is not None):
        kinds = ("a plain value", "a tensor")
        raise CheckpointError(
            f"{head} It is {kinds[not is_tensor]} there, and {kinds[is_tensor]} in the state. "
            "Pass a state of the same form."
        )
    if is_tensor and tuple(leaf.value.shape) != entry.shape:
        raise CheckpointError(
            f"{head} It has shape={entry.shape} there, and shape={tuple(leaf.value.shape)} in "
            "the state. Pass a tensor of the same shape."
        )


def set_plain(leaf: Leaf, value: Any) -> None:
    """Put a plain value where the leaf was found."""
    if leaf.set is None:
        raise CheckpointError(
            f"The value at {list(leaf.path)} was to be loaded. It stands in a tuple, which "
            "cannot be changed. Pass a list."
        )
    leaf.set(value)


def few(names: Sequence[str]) -> str:
    """Return names for an error, the first five."""
    if not names:
        return "nothing"
    return ", ".join(map(repr, names[:5])) + (f" and {len(names) - 5} more" * (len(names) > 5))
