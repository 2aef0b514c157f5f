"""A ShardedLoader's state, written and read.

version, epoch, batches, read, batch_size     numbers
sampler     of a ShardedSampler, which is all that is needed; else None
parts       ["0:32", "32:64"], the rows of the processes that fed; ["whole"] where each fed all
inner       {"0:32": {"state": ..., "since": 0}, ...}, what the loader of each part said
"""

from __future__ import annotations

import itertools
import logging
import pickle
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from xla_dtensor.core.errors import DataError
from xla_dtensor.hosts.data.exchange import Exchange, exchange_name, feeding_processes
from xla_dtensor.hosts.data.rows import rows_part
from xla_dtensor.hosts.data.state import has_state

if TYPE_CHECKING:
    from xla_dtensor.hosts.data.feed import Feed, Position

__all__ = ["read_state", "written_state"]

logger = logging.getLogger("xla_dtensor")
_VERSION = 1
_turns: dict[Any, itertools.count[int]] = {}


def _own_part(feed: Feed, batch_size: int) -> str:
    if feed.rows_are_whole:
        return "whole"
    return rows_part(batch_size, feed.mesh, feed.rows).text()


def _parts(feed: Feed, batch_size: int) -> list[str]:
    if feed.rows_are_whole:
        return ["whole"]
    processes = feeding_processes(feed.mesh.value)
    found = {rows_part(batch_size, feed.mesh, feed.rows, process).text() for process in processes}
    return sorted(found, key=lambda text: [int(n) for n in text.replace(":", ",").split(",") if n])


def written_state(feed: Feed, position: Position) -> dict[str, Any]:
    """Return the state at a position; all processes call it alike where each has its own rows."""
    size = position.batch_size
    state: dict[str, Any] = {
        "version": _VERSION,
        "epoch": position.epoch,
        "batches": position.batches,
        "read": position.read,
        "batch_size": size,
        "sampler": None,
        "parts": None,
        "inner": None,
    }
    if feed.sampler is not None:
        place = {"epoch": position.epoch, "batch": position.read}
        return state | {"sampler": feed.sampler.state_dict() | place}
    if size is None or position.read == 0:
        return state
    state["parts"] = _parts(feed, size)
    own = {_own_part(feed, size): {"state": position.inner, "since": position.since}}
    if len(state["parts"]) == 1 or position.inner is None:
        return state | {"inner": own}
    turn = next(_turns.setdefault(feed.mesh.value, itertools.count()))
    name = f"state/{exchange_name(feed.mesh.value)}/{turn}"
    exchange = Exchange(name, feed.mesh.value, feed.timeout_seconds)
    said = exchange.all(pickle.dumps((position.read, own)), "the state of its loader")
    heard = {process: pickle.loads(text) for process, text in said.items()}
    _check_counts({process: read for process, (read, _) in heard.items()})
    return state | {"inner": {part: s for _, each in heard.values() for part, s in each.items()}}


def _check_counts(read: Mapping[int, int]) -> None:
    if len(set(read.values())) > 1:
        raise DataError(
            f"The state of a ShardedLoader was asked for after different batches, by process "
            f"{dict(read)}. A job that resumes there would mix rows of several batches. Call "
            "state_dict after the same batch in all processes."
        )


def read_state(feed: Feed, state: Mapping[str, Any]) -> Position:
    """Return the position that a state stands for."""
    from xla_dtensor.hosts.data.feed import Position

    if state.get("version") != _VERSION:
        raise DataError(
            f"A ShardedLoader was given a state of version={state.get('version')!r}. It reads "
            f"version={_VERSION}. Pass what ShardedLoader.state_dict returned."
        )
    size, wanted = state["batch_size"], feed.batch_size
    if wanted is not None and size is not None and wanted != size:
        raise DataError(
            f"A ShardedLoader with batch_size={wanted} was given the state of one with "
            f"batch_size={size}. Its batches are others, so that rows would be repeated or left "
            "out. Make the loader as it was, or begin a new epoch with set_epoch."
        )
    position = Position(int(state["epoch"]), int(state["batches"]), int(state["read"]), size)
    if (state["sampler"] is None) != (feed.sampler is None) and position.read:
        raise DataError(
            f"A ShardedLoader {'with' if feed.sampler is not None else 'without'} a ShardedSampler "
            "was given the state of one of the other kind. Their batches come in different "
            "orders. Make the loader as it was."
        )
    if feed.sampler is not None:
        if state["sampler"] is not None:
            feed.sampler.load_state_dict(state["sampler"])
        return position
    if position.read == 0:
        return position
    return _with_inner(feed, state, position)


def _with_inner(feed: Feed, state: Mapping[str, Any], position: Position) -> Position:
    from dataclasses import replace

    parts, size = state["parts"], state["batch_size"]
    own, mine = _own_part(feed, size), _parts(feed, size)
    if mine != parts:
        raise DataError(
            f"A ShardedLoader whose processes read the rows {mine} was given the state of one with "
            f"{parts}. Each has a loader of its own rows, whose state says nothing of others. Use "
            "a ShardedSampler, or whole=True, to resume on other processes."
        )
    found = state["inner"].get(own, {"state": None, "since": position.read})
    if found["state"] is None:
        if not has_state(feed.loader):
            logger.warning(
                "A %s has no state of its own: its first %d batches are read again and left out. "
                "That is the right place only if it gives the same batches in the same order.",
                type(feed.loader).__name__,
                position.read,
            )
        return replace(position, inner=None, since=position.read)
    return replace(position, inner=found["state"], since=int(found["since"]))
