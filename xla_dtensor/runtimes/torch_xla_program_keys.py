"""Tell programs apart that torch_xla takes for equal.

torch_xla keeps compiled programs under a hash of their graph. A node's hash is made of its op and
its operands' hashes, an input's of its shape, so that which of two alike inputs stands where is
lost (pytorch/xla#8353). torch_xla 2.9 answers both of these lines with the first one's program::

    (x + x * y).cpu()
    (y + x * y).cpu()            x + x * y, in silence

So before a program is looked up, its HLO is written, which takes 10 us per node, and a digest of
it becomes part of the key. torch_xla mixes the value of ``XLA_AUTO_SPMD_MESH`` into each hash; what
the value says matters with its automatic sharding only. Programs run in three places:

* Ops that read a tensor (``_READS``). They are overridden at XLA's dispatch key, where tensors of
  users arrive as well, and through which torch_xla's own kernels for the host read. The digest is
  that of the tensors read.
* A sync, of every tensor that lives. torch_xla does not say which those are; the digest is that of
  the payloads that this library has made (:func:`remember`).
* A compiled step. By what :meth:`Runtime.compile` promises, its program depends on its arguments'
  kinds: the first call's digest is good for all calls of a kind (:func:`digest_of_all`, then
  :func:`keyed`), and costs nothing after that.

Invariants:

* Programs that differ in HLO differ in their key; at a sync, as far as payloads are concerned.
* Equal programs have equal keys, in each process and on each host: a digest depends on nothing but
  the HLO. Nothing is compiled twice for it, and programs kept on disk stay good.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import itertools
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from xla_dtensor.nested import leaves

__all__ = ["correct_program_keys", "digest_of_all", "keyed", "remember"]

_VARIABLE = "XLA_AUTO_SPMD_MESH"
_AUTOMATIC_SHARDING = "XLA_AUTO_SPMD"
_OF_THEIR_TENSORS = (
    "_get_graph_hash",
    "_get_local_shards",
    "_xla_get_cpu_tensors",
    "_xla_sync_multi",
    "_xla_warm_up_cache",
)
_OF_ALL_TENSORS = ("_xla_step_marker", "_xla_sync_live_tensors")

_alive: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()
_numbers = itertools.count()
_lock = threading.RLock()
_keyed_by: int | None = None
_overrides: list[torch.library.Library] = []


def correct_program_keys() -> None:
    """Correct torch_xla's keys; calling it again does nothing."""
    if _overrides:
        return
    library = torch.library.Library("aten", "IMPL")
    _overrides.append(library)
    for name, tensors_read in _READS.items():
        kernel = torch.library.get_kernel(f"aten::{name}", "XLA")
        read = _reading(kernel, tensors_read)
        with warnings.catch_warnings():  # that a kernel is overridden
            warnings.simplefilter("ignore", UserWarning)
            library.impl(name, read, "XLA", with_keyset=True, allow_override=True)
    xlac = _xlac()
    for name in _OF_THEIR_TENSORS:
        setattr(xlac, name, _running(getattr(xlac, name), _digest_of_first))
    for name in _OF_ALL_TENSORS:
        setattr(xlac, name, _running(getattr(xlac, name), _digest_of_living))


def remember(payload: torch.Tensor) -> None:
    """Let the program of a sync be told apart by this payload too, for as long as it lives."""
    _alive[next(_numbers)] = payload


def digest_of_all() -> str:
    """Return the digest of the program that a sync would run now."""
    found = {id(t): t for t in (ref() for ref in _alive.valuerefs()) if t is not None}
    return _digest(list(found.values()))


@contextmanager
def keyed(digest: str) -> Iterator[None]:
    """Let a digest be part of the keys of programs that run in the body."""
    global _keyed_by
    automatic = os.environ.get(_AUTOMATIC_SHARDING, "0") not in ("", "0", "false")
    if automatic or _keyed_by == threading.get_ident():
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


def _xlac() -> Any:
    return importlib.import_module("torch_xla")._XLAC


def _digest(tensors: Sequence[torch.Tensor]) -> str:
    """Return a digest of the program that computes these tensors, "" where there is none to run."""
    if not tensors:
        return ""
    needed = _xlac()._check_tensor_need_materialization(list(tensors))
    pending = list(itertools.compress(tensors, needed))
    if not pending:
        return ""
    try:
        with keyed(""):
            # The program of a sync may still be on its way, its results have no memory yet. To
            # write HLO over them crashes; to ask for the hash waits for them as the program will.
            _xlac()._get_graph_hash(pending)
        program = _xlac()._get_xla_tensors_hlo_proto(pending)
    except RuntimeError:
        return ""  # It cannot be compiled either, which torch_xla will say.
    return hashlib.blake2b(program, digest_size=8).hexdigest()


def _digest_of_first(tensors: Any, *_: Any, **__: Any) -> str:
    return _digest([value for value in leaves(tensors) if _is_on_devices(value)])


def _digest_of_living(*_: Any, **__: Any) -> str:
    return digest_of_all()


def _running(run: Callable[..., Any], digest: Callable[..., str]) -> Callable[..., Any]:
    @functools.wraps(run)
    def with_key(*args: Any, **kwargs: Any) -> Any:
        if _keyed_by == threading.get_ident():
            return run(*args, **kwargs)
        with keyed(digest(*args, **kwargs)):
            return run(*args, **kwargs)

    return with_key


def _reading(kernel: Any, tensors_read: Callable[..., Sequence[torch.Tensor]]) -> Any:
    def read(keys: Any, *args: Any, **kwargs: Any) -> Any:
        tensors = tensors_read(*args, **kwargs)
        if not tensors or _keyed_by == threading.get_ident():
            return kernel.call_boxed(keys, *args, **kwargs)
        with keyed(_digest(tensors)):
            return kernel.call_boxed(keys, *args, **kwargs)

    return read


# ---------------------------------------------------------------------- what an op reads


def _is_on_devices(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "xla"


def _moved(of: torch.Tensor, *, device: torch.device | None = None, **_: Any) -> Any:
    return () if device is None or device.type == "xla" else (of,)


def _written(to: torch.Tensor, of: torch.Tensor, *_: Any, **__: Any) -> Any:
    return (of,) if _is_on_devices(of) and not _is_on_devices(to) else ()


def _read_into(of: torch.Tensor, to: torch.Tensor, *_: Any, **__: Any) -> Any:
    return _written(to, of)


_READS: dict[str, Callable[..., Sequence[torch.Tensor]]] = {
    "_to_copy": _moved,
    "_to_cpu": list,
    "copy_": _written,
    "_copy_from": _read_into,
    "_copy_from_and_resize": _read_into,
}
