"""Inputs by name: where a program reads whatever tensor a name has at the time of the call.

A tensor that a step finds under a name is an input of its program, and as a rule it stays the same
object, written to in place. Two kinds of names are given other tensors all the time::

    self.hidden = (hidden @ w).detach()        the step itself assigns them: a state, an average
    model.set_input(batch)                     or somebody does between the calls

    call 1    finds t0                         traced: t0 is an input                    program A
    call 2    finds t1                         the name was seen to change: traced anew,
                                               with the name as the input                program B
    call 3    finds t2                         program B reads t2

So are the data of a tensor, which ``p.data = average`` replaces, while `p` stays the tensor.

A name is taken for the input only when it was seen to change, and where its tensor has no other
name that is known: a tensor that has two is one input, and they may part ways.

Invariant: the values that a run reads are those that PyTorch would find under the same names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from xla_dtensor.runtimes.guards.owners import DATA
from xla_dtensor.runtimes.guards.values import Moving, Sighting
from xla_dtensor.runtimes.host_work import HostTape, HostWork
from xla_dtensor.runtimes.host_work.tape import is_host
from xla_dtensor.runtimes.jax.arrays.storage import Storage
from xla_dtensor.runtimes.jax.arrays.trace import Trace
from xla_dtensor.runtimes.jax.compile.trace_values import inner

__all__ = ["Aliases", "MovingData", "MovingTensor", "moving_data", "moving_tensors"]


@dataclass
class MovingTensor:
    """A tensor that is read by name.

    Args:
        found: The one that the trace found.
        left: The one that the trace left under the name.
        moving: The one that is there, as guards know it.
        slot: Of a host tensor, its slot on the tape.
        lies: Of one on the mesh, how it has to lie.
        is_alike: Whether the one that the trace left could take the place of the one it found.
    """

    found: torch.Tensor
    left: torch.Tensor
    moving: Moving
    slot: Any = None
    lies: Any = None
    is_alike: bool = True

    def bind(self, read: list[Storage], state: list[Storage], work: HostWork | None) -> None:
        """Let the program read, and write to, the tensor that is there.

        Args:
            read: The storages that the program only reads.
            state: Those that it writes to as well.
            work: What is done on the host.
        """
        payload = inner(self.moving.there)
        if payload is not None:
            (state if self.is_written else read)[self.place] = payload._storage
        elif work is not None:
            work.rebind(self.slot, self.moving.there)

    def forget(self) -> None:
        """Keep the tensors of the trace alive no longer, once the program is made."""
        del self.found, self.left

    place: int = -1  # of its storage among those that the program reads, or writes to
    is_written: bool = False
    number: int | None = None  # of the tensor that the step leaves, among those that it makes
    key: int = 0  # by which effects know that tensor

    @property
    def storages(self) -> tuple[Storage | None, Storage | None]:
        """The storages of the tensors found and left; None for host tensors."""
        old, new = inner(self.found), inner(self.left)
        return (
            None if old is None else old._storage,
            None if new is None else new._storage,
        )


def moving_tensors(
    seen: Sequence[Sighting],
    trace: Trace,
    tape: HostTape,
    made: Container[Storage],
    names: Collection[Any],
    arguments: Collection[Storage],
) -> list[MovingTensor]:
    """Return the tensors that a program reads by name.

    Args:
        seen: Each name with the tensor that the trace found there, and what is there now.
        trace: The trace; its tensors have their values of before again.
        tape: Of the host.
        made: The storages that earlier programs of the step made.
        names: The names that were seen to change.
        arguments: The storages of the call's arguments.
    """
    counts = Counter(_memory(entry.found) for entry in seen)
    tensors: list[MovingTensor] = []
    for name, found, there in seen:
        # Or what holds it, a tuple, say: its name is how the names of what is in it begin.
        has_changed = any(name[:length] in names for length in range(2, len(name) + 1))
        # Where the step itself takes it away, the next call finds what somebody puts there.
        now = found if has_changed and not isinstance(there, torch.Tensor) else there
        if counts[_memory(found)] > 1 or not isinstance(now, torch.Tensor):
            continue
        payload = inner(found)
        if payload is None:
            if has_changed and is_host(found) and found.is_leaf:
                tensors += _on_host(found, now, tape)
            continue
        storage = payload._storage
        is_known = has_changed or (now is not found and storage in made)
        is_read = has_changed or storage in trace.captured
        if is_known and is_read and storage not in arguments and _may_move(found):
            trace.depend_on(storage)  # also where it only moves on, to another name
            sharding = storage.lies
            is_alike = _kind(now) == _kind(found)
            # One of another shape, a cache that grows, say, is asked whether it fits.
            moving = Moving(now if is_alike else found, _fitting(found, sharding))
            lies = sharding if is_alike else None
            tensors.append(MovingTensor(found, now, moving, lies=lies, is_alike=is_alike))
    return tensors


@dataclass
class MovingData:
    """A tensor whose data are looked up in each call, because they were seen to be replaced.

    Args:
        tensor: The tensor.
        fits: Tells whether it may have the data that it has.
        place: Of its memory among what the program reads, or writes to.
        is_written: Whether the program writes to it.
    """

    tensor: torch.Tensor
    fits: Callable[[Any], bool]
    place: int = -1
    is_written: bool = False

    @property
    def storage(self) -> Storage:
        """The memory that the tensor has now."""
        payload = inner(self.tensor)
        assert payload is not None
        return payload._storage

    def bind(self, read: list[Storage], state: list[Storage]) -> None:
        """Let the program read, and write to, the memory that the tensor has now."""
        (state if self.is_written else read)[self.place] = self.storage


def moving_data(
    seen: Sequence[Sighting],
    others: Iterable[torch.Tensor],
    trace: Trace,
    names: Collection[Any],
    left_out: Collection[Storage | None],
) -> list[MovingData]:
    """Return the tensors whose data a program looks up.

    Args:
        seen: Each name with the tensor that the trace found there.
        others: Further tensors that the program knows.
        trace: The trace; its tensors have their values of before again.
        names: The names that were seen to change.
        left_out: The storages of arguments, and of what is read by name.
    """
    tensors = {id(each): each for each in (*(entry.found for entry in seen), *others)}
    counts = Counter(map(_memory, tensors.values()))
    found: list[MovingData] = []
    for tensor in tensors.values():
        payload = inner(tensor)
        if payload is None or DATA.of(tensor) not in names or counts[_memory(tensor)] > 1:
            continue
        storage = payload._storage
        is_input = storage in trace.captured and storage not in left_out
        if is_input and storage.row is None and id(tensor) not in trace.new_data:
            found.append(MovingData(tensor, _fitting_data(tensor, storage.lies)))
    return found


def _fitting_data(original: torch.Tensor, sharding: Any) -> Callable[[Any], bool]:
    kind = _kind(original)

    def fits(tensor: Any) -> bool:
        payload = inner(tensor)
        if payload is None or payload._storage.row is not None:
            return False
        return _kind(tensor) == kind and payload._storage.lies == sharding

    return fits


def _on_host(found: torch.Tensor, now: torch.Tensor, tape: HostTape) -> list[MovingTensor]:
    slot = tape.only_slot(found)
    if slot is None:
        return []
    return [MovingTensor(found, now, Moving(now, _fitting_on_host(found)), slot=slot)]


def _memory(tensor: torch.Tensor) -> int:
    payload = inner(tensor)
    return id(tensor) if payload is None else id(payload._storage)


def _may_move(tensor: torch.Tensor) -> bool:
    payload = inner(tensor)
    if payload is None or tensor.requires_grad or not tensor.is_leaf:
        return False
    return payload._storage.row is None


def _fitting(original: torch.Tensor, sharding: Any) -> Callable[[Any], bool]:
    kind = _kind(original)

    def fits(tensor: Any) -> bool:
        payload = inner(tensor)
        if payload is None or not isinstance(tensor, torch.Tensor):
            return False
        return _may_move(tensor) and _kind(tensor) == kind and payload._storage.lies == sharding

    return fits


def _kind(tensor: torch.Tensor) -> tuple[Any, ...]:
    spec = getattr(tensor, "_spec", None)
    labels = None if spec is None else (spec.mesh, spec.placements, spec.outer_cuts)
    if getattr(tensor, "_is_per_device", False):
        labels = tensor._region, tensor._varying, tensor._uneven, tensor._outer_cuts  # pyright: ignore
    return type(tensor), tensor.shape, tensor.stride(), tensor.dtype, labels, _view(tensor)


def _view(tensor: torch.Tensor) -> Any:
    """Return what tells a view from others, with its memory's shape; None for a host tensor."""
    payload = inner(tensor)
    if payload is None:
        return None
    kinds = tuple(step.read.__code__ for step in payload._steps)
    return payload._storage.shape, payload.stride(), payload.storage_offset(), kinds


def _fitting_on_host(original: torch.Tensor) -> Callable[[Any], bool]:
    kind = _kind(original)

    def fits(tensor: Any) -> bool:
        return is_host(tensor) and _kind(tensor) == kind and not tensor.requires_grad

    return fits


# ------------------------------------------------------------ Arguments that are found by name, too
#
# Arguments that are tensors which the step also finds by name.
#
# A program knows a tensor by its name, or by its place among the arguments. Where a call is given a
# tensor under both, they are one input, as they are one tensor to PyTorch::
#
#     step = xd.compile(lambda x: state.add_(1) * x)
#
#     step(other)        x and state are two tensors         program A
#     step(state)        x is state, and sees the write      program B
#
# Invariant: the buffers that a program donates are none of its other inputs.


@dataclass(frozen=True)
class Aliases:
    """What a trace found of this.

    Args:
        found: Of each argument the storage, if the step finds it by name as well; else None.
    """

    found: tuple[Storage | None, ...] = ()

    @classmethod
    def of(cls, named: Iterable[torch.Tensor], arguments: Sequence[Storage]) -> Aliases:
        """Compare the tensors that were found by name with the arguments."""
        payloads = (inner(tensor) for tensor in named)
        storages = {payload._storage for payload in payloads if payload is not None}
        return cls(tuple(storage if storage in storages else None for storage in arguments))

    def __contains__(self, storage: Storage) -> bool:
        """Tell whether a storage is that of such an argument."""
        return any(alias is storage for alias in self.found)

    def hold(self, known: Container[Storage], arguments: Sequence[Storage]) -> bool:
        """Tell whether a call's arguments are told apart from what the step finds by name.

        Args:
            known: The storages that the program reads or writes.
            arguments: Those of the call's arguments.
        """
        pairs = zip(self.found, arguments, strict=True)
        return all(
            argument is was if was is not None else argument not in known for was, argument in pairs
        )
