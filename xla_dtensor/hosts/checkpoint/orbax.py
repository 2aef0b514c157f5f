"""DTensors in orbax's checkpoints: arguments for the CheckpointManager that a project has.

    from xla_dtensor.checkpoint import orbax

    state = {"model": model, "optimizer": optimizer}
    manager.save(step, args=orbax.DTensorSave(state))
    manager.restore(manager.latest_step(), args=orbax.DTensorRestore(state))

The state is what ``checkpoint.save`` takes; orbax decides which steps stay, writes in the
background, knows object stores. A checkpoint is a tree of arrays under the state's keys, which JAX
code reads with ``StandardRestore``, and what JAX code saved is restored into a state of such keys:

    DTensor                    a jax.Array of its shape; restored on any mesh, with any placements
    plain tensor               a NumPy array, the first process's
    str, bool, int, float      as they are, the first process's
    any other plain value      text: what torch.save makes of it, in base64

What orbax does wrong with a payload's arrays as such: it restores int64 and float64 as 32 bits,
unless JAX's 64-bit mode is on for the whole program; an uneven tensor has its padding; and what a
checkpoint lacks stays as it is, without a word. The states of the random number generators are not
saved. Weights that a module has under two names are saved under both.

Example:
    >>> import tempfile, torch, xla_dtensor as xd
    >>> from torch.distributed.tensor import Replicate, Shard
    >>> mesh = xd.init_device_mesh("xla", (2, 4))
    >>> saved = {"w": xd.distribute_tensor(torch.arange(8), mesh, [Replicate(), Shard(0)]), "n": 3}
    >>> other = xd.distribute_tensor(torch.zeros(8).long(), mesh, [Shard(0), Shard(0)])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with ocp.CheckpointManager(folder) as manager:
    ...         _ = manager.save(42, args=DTensorSave(saved))
    ...         manager.wait_until_finished()
    ...         loaded = manager.restore(42, args=DTensorRestore({"w": other, "n": 0}))
    >>> loaded["w"].tolist(), loaded["n"]
    ([0, 1, 2, 3, 4, 5, 6, 7], 3)
"""

from __future__ import annotations

import base64
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import torch

from xla_dtensor.core.errors import CheckpointError
from xla_dtensor.dtensor.dcp import layout_to_load
from xla_dtensor.dtensor.dtensor import DTensor
from xla_dtensor.hosts.checkpoint.manifest import Entry
from xla_dtensor.hosts.checkpoint.pieces import pickled, unpickled
from xla_dtensor.hosts.checkpoint.restore import check_form, few, set_plain
from xla_dtensor.hosts.checkpoint.state import Leaf, Walk, is_stored_as_tensor
from xla_dtensor.runtimes.registry import get_runtime

__all__ = ["DTensorCheckpointHandler", "DTensorRestore", "DTensorSave"]

# Restored at once, on the devices beside the state that it is restored into.
_BATCH_BYTES = 2 << 30
_PICKLED = "torch.save;base64,"


class DTensorCheckpointHandler(ocp.PyTreeCheckpointHandler):
    """What orbax calls for `DTensorSave` and `DTensorRestore`; it takes orbax's own options.

    A CheckpointManager makes one where it is given these arguments. Pass one yourself, e.g. as
    ``item_handlers={"state": DTensorCheckpointHandler(use_zarr3=True)}``, to choose options.
    """

    async def async_save(self, directory: Any, *_: Any, args: DTensorSave) -> Any:
        """Copy a state to the host, and return what waits for its files."""
        return await super().async_save(directory, args=ocp.args.PyTreeSave(_tree(args.state)))

    def save(self, directory: Any, *_: Any, args: DTensorSave) -> None:
        """Write a state."""
        super().save(directory, args=ocp.args.PyTreeSave(_tree(args.state)))

    @torch.no_grad()
    def restore(self, directory: Any, *_: Any, args: DTensorRestore) -> Mapping[str, Any]:
        """Restore into a state, and return it."""
        read, native, tree = super().restore, _native_arrays(), self.metadata(directory).tree
        flat = ocp.tree.to_flat_dict(tree)
        keys = {".".join(map(str, key)): key for key in flat}
        entries = {name: _entry(key, flat[key]) for name, key in keys.items()}
        walk = Walk(args.state, entries)
        _check_fit(walk.leaves, entries, directory, args.partial_restore)
        nothing = dict.fromkeys(flat, ocp.PLACEHOLDER)
        for batch in _batches(leaf for name, leaf in walk.leaves.items() if name in keys):
            arguments = {keys[leaf.name]: _restore_args(leaf.value, native) for leaf in batch}
            request = ocp.args.PyTreeRestore(
                item=ocp.tree.from_flat_dict(nothing | dict.fromkeys(arguments, 0), target=tree),
                restore_args=ocp.tree.from_flat_dict(nothing | arguments, target=tree),
            )
            restored = native.with_64_bits(partial(read, directory, args=request))
            arrays = ocp.tree.to_flat_dict(restored)
            for leaf in batch:
                _fill(leaf, arrays[keys[leaf.name]], native)
        walk.give_back(set(walk.leaves))
        return args.state


@ocp.args.register_with_handler(DTensorCheckpointHandler, for_save=True)
@dataclass
class DTensorSave(ocp.args.CheckpointArgs):
    """Save a state.

    Args:
        state: A nested dict of tensors, DTensors, plain values, and objects with ``state_dict`` and
            ``load_state_dict``, as for ``checkpoint.save``.

    Raises:
        CheckpointError: The state cannot be saved.
    """

    state: Mapping[str, Any]

    def __post_init__(self) -> None:
        # Here, since orbax waits for minutes at the end of a program whose last save has failed.
        _native_arrays()
        _leaves(self.state)


@ocp.args.register_with_handler(DTensorCheckpointHandler, for_restore=True)
@dataclass
class DTensorRestore(ocp.args.CheckpointArgs):
    """Restore into a state, in place; the manager's ``restore`` returns the same state.

    Args:
        state: A nested dict of the same form as the one saved. Tensors keep their mesh, placements
            and dtype. An optimizer may be new.
        partial_restore: Whether the checkpoint may have names that the state lacks.

    Raises:
        CheckpointError: The checkpoint does not fit the state; raised by the manager's
            ``restore``, before anything is restored.
    """

    state: Mapping[str, Any]
    partial_restore: bool = False


def _native_arrays() -> Any:
    runtime: Any = get_runtime()
    if not hasattr(runtime, "native_arrays"):
        raise CheckpointError(
            f"A state was given to orbax on the runtime {runtime.name!r}. orbax takes arrays of "
            "JAX. Start get_runtime('jax'), or call xla_dtensor.checkpoint.save and load."
        )
    return runtime.native_arrays()


def _tree(state: Mapping[str, Any]) -> Any:
    native = _native_arrays()
    return ocp.tree.from_flat_dict(
        {tuple(map(str, leaf.path)): _for_orbax(leaf.value, native) for leaf in _leaves(state)}
    )


def _leaves(state: Mapping[str, Any]) -> list[Leaf]:
    leaves = [leaf for leaf in Walk(state).leaves.values() if not _is_empty(leaf)]
    for leaf in leaves:
        _check_is_here(leaf)
    return leaves


def _is_empty(leaf: Leaf) -> bool:
    """Tell whether it is a tensor without elements, which orbax refuses: it is left out."""
    return is_stored_as_tensor(leaf.value) and not leaf.value.numel()


def _check_is_here(leaf: Leaf) -> None:
    if isinstance(leaf.value, DTensor) and leaf.value._local_tensor.is_meta:
        raise CheckpointError(
            f"The tensor {leaf.name!r} was given to orbax. It lies on devices of other processes, "
            "and orbax has all processes give the same. Call xla_dtensor.checkpoint.save and load."
        )


def _for_orbax(value: Any, native: Any) -> Any:
    if isinstance(value, DTensor):
        return native.array(value._local_tensor, layout_to_load(value))
    if is_stored_as_tensor(value):
        return native.numpy(value.detach().cpu())
    is_plain_text = type(value) is str and not value.startswith(_PICKLED)
    is_int64 = type(value) is int and -(2**63) <= value < 2**63
    if is_plain_text or is_int64 or type(value) in (bool, float):
        return value
    return _PICKLED + base64.b64encode(pickled(value)).decode("ascii")


def _entry(key: tuple[Any, ...], metadata: Any) -> Entry:
    """What a checkpoint has under a key, as `Walk` takes it: an optimizer's indices are ints."""
    path = tuple(int(part) if str(part).isdecimal() else part for part in key)
    if type(metadata) is not ocp.metadata.ArrayMetadata:
        return Entry(path, 0)
    layout = None if metadata.sharding is None else "a jax.Array"
    return Entry(path, 0, tuple(metadata.shape), str(metadata.dtype), layout)


def _check_fit(
    leaves: Mapping[str, Leaf], entries: Mapping[str, Entry], directory: Any, partial_restore: bool
) -> None:
    missing = sorted(name for name in leaves.keys() - entries.keys() if not _is_empty(leaves[name]))
    unknown = [] if partial_restore else sorted(entries.keys() - leaves.keys())
    if missing or unknown:
        raise CheckpointError(
            f"A state was to be restored from {directory}. The checkpoint lacks {few(missing)}; "
            f"the state lacks {few(unknown)}. Pass a state of the same form, or "
            "partial_restore=True where the checkpoint has more."
        )
    for name in sorted(leaves.keys() & entries.keys()):
        _check_is_here(leaves[name])
        check_form(leaves[name], entries[name], str(directory))


def _batches(leaves: Iterable[Leaf]) -> Iterable[list[Leaf]]:
    """The leaves that are restored at once."""
    batches: dict[int, list[Leaf]] = defaultdict(list)
    num_bytes = 0
    for leaf in leaves:
        batches[num_bytes // _BATCH_BYTES].append(leaf)
        num_bytes += leaf.value.nbytes if is_stored_as_tensor(leaf.value) else 0
    return batches.values()


def _restore_args(value: Any, native: Any) -> ocp.RestoreArgs:
    if not isinstance(value, DTensor):
        return ocp.RestoreArgs(restore_type=np.ndarray if is_stored_as_tensor(value) else None)
    struct = native.struct(tuple(value.shape), value.dtype, layout_to_load(value))
    return ocp.ArrayRestoreArgs(
        sharding=struct.sharding, global_shape=struct.shape, dtype=struct.dtype
    )


def _fill(leaf: Leaf, restored: Any, native: Any) -> None:
    value = leaf.value
    if isinstance(value, DTensor):
        payload = native.payload(restored, layout_to_load(value))
        get_runtime().run_op(torch.ops.aten.copy_.default, (value._local_tensor, payload), {})
    elif is_stored_as_tensor(value):
        value.copy_(native.host_tensor(restored))
    elif isinstance(restored, str) and restored.startswith(_PICKLED):
        record = base64.b64decode(restored.removeprefix(_PICKLED))
        set_plain(leaf, unpickled(record, f"The value {leaf.name!r}"))
    else:
        set_plain(leaf, restored)
