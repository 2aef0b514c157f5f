"""Tell programs apart that torch_xla takes for equal.

torch_xla keeps compiled programs under a hash of their graph. A node's hash is made of its op and
its operands' hashes, an input's of its shape, so that which of two alike inputs stands where is
lost (pytorch/xla#8353). torch_xla 2.9 answers both of these lines with the first one's program::

    (x + x * y).cpu()
    (y + x * y).cpu()            x + x * y, in silence

So before a program is looked up, its HLO is written, which takes 10 us per node, and a digest of
it becomes part of the key. torch_xla mixes the value of ``XLA_AUTO_SPMD_MESH`` into each hash; what
the value says matters with its automatic sharding only. Programs run in three places:

* A read (``torch_xla_reads``), of plain XLA tensors too. The digest is that of the tensors read.
* A sync, of every tensor that lives. torch_xla does not say which those are; the digest is that of
  the payloads that this library has made (:func:`remember`).
* A compiled step. By what :meth:`Runtime.compile` promises, its program depends on what kinds its
  arguments are of, and which of them are one tensor: the first call's digest is good for all such
  calls (:func:`synced_as`), and costs nothing after that.

Invariants:

* Programs that differ in HLO differ in their key; at a sync, as far as payloads are concerned.
* Equal programs have equal keys, in each process and on each host: a digest depends on nothing but
  the HLO. Nothing is compiled twice for it, and programs kept on disk stay good.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from xla_dtensor.runtimes.torch_xla_sharding import xlac

__all__ = ["correct_program_keys", "digest_of_all", "keyed", "remember", "synced_as"]

_VARIABLE = "XLA_AUTO_SPMD_MESH"
_OF_THEIR_TENSORS = (
    "_get_graph_hash",
    "_get_local_shards",
    "_xla_get_cpu_tensors",
    "_xla_sync_multi",
    "_xla_warm_up_cache",
)
_OF_ALL_TENSORS = ("_xla_step_marker", "_xla_sync_live_tensors")

_alive: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()
_lock = threading.RLock()
_keyed_by: int | None = None
_here = threading.local()


def correct_program_keys() -> None:
    """Correct torch_xla's keys; calling it again does nothing."""
    library = xlac()
    if hasattr(library._xla_step_marker, "__wrapped__"):
        return
    for name in _OF_THEIR_TENSORS:
        setattr(library, name, _running(getattr(library, name), _digest))
    for name in _OF_ALL_TENSORS:
        setattr(library, name, _running(getattr(library, name), _digest_of_sync))


def remember(payload: torch.Tensor) -> None:
    """Let the program of a sync be told apart by this payload too, for as long as it lives."""
    _alive[id(payload)] = payload


def digest_of_all(others: Iterable[torch.Tensor] = ()) -> str:
    """Return the digest of the program that a sync would run now.

    Args:
        others: Tensors that live as well, beside the payloads that were remembered.
    """
    living = [tensor for tensor in (ref() for ref in _alive.valuerefs()) if tensor is not None]
    for tensor in living:
        # Only C++ may have held it; without this it would go down with what is returned here.
        tensor._fix_weakref()  # pyright: ignore[reportAttributeAccessIssue]
    return _digest([*living, *others])


@contextmanager
def synced_as(digest: str) -> Iterator[None]:
    """Let the next sync in the body have this digest; what else runs there has its own."""
    _here.digest = digest
    try:
        yield
    finally:
        _here.digest = None


@contextmanager
def keyed(digest: str) -> Iterator[None]:
    """Let a digest be part of the keys of programs that this thread runs in the body."""
    global _keyed_by
    if _keyed_by == threading.get_ident() or xlac()._xla_get_auto_sharding():
        yield
        return
    with _lock:
        before = os.environ.get(_VARIABLE, "")
        os.environ[_VARIABLE], _keyed_by = digest, threading.get_ident()
        try:
            yield
        finally:
            # Not taken away again: that would move others while threads of XLA read them.
            os.environ[_VARIABLE], _keyed_by = before, None


def _digest(tensors: Sequence[torch.Tensor], *_: Any, **__: Any) -> str:
    """Return a digest of the program that computes these tensors, "" where there is none to run."""
    try:
        pending = _pending(tensors)
        if not pending:
            return ""
        with keyed(""):
            # The program of a sync may still be on its way, its results have no memory yet. To
            # write HLO over them crashes; to ask for the hash waits for them as the program will.
            xlac()._get_graph_hash(pending)
        program = xlac()._get_xla_tensors_hlo_proto(pending)
    except RuntimeError:
        return ""  # It cannot be compiled either, which torch_xla will say.
    return hashlib.blake2b(program, digest_size=8).hexdigest()


def _pending(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return those that have to be computed, each once and in the order in which a sync has them.

    An alias of a tensor may come and go, and is no result of its own.
    """
    if not tensors:
        return []
    needed = xlac()._check_tensor_need_materialization(list(tensors))
    by_id = {xlac()._xla_get_tensor_id(t): t for t in itertools.compress(tensors, needed)}
    return [by_id[number] for number in sorted(by_id)]


def _digest_of_sync(*_: Any, **__: Any) -> str:
    known, _here.digest = getattr(_here, "digest", None), None
    return digest_of_all() if known is None else known


def _running(run: Callable[..., Any], digest: Callable[..., str]) -> Callable[..., Any]:
    @functools.wraps(run)
    def with_key(*args: Any, **kwargs: Any) -> Any:
        if _keyed_by == threading.get_ident():
            return run(*args, **kwargs)
        with keyed(digest(*args, **kwargs)):
            return run(*args, **kwargs)

    return with_key
