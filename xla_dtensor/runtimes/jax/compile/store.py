"""Compiled programs that outlive the process: saved to a file, found again by what they compute.

A saved program is found by a digest of its lowered text, of how its arguments and results nest and
which arguments it uses, of the devices and of JAX's version. A
step that loads a file is still traced, which binds its parameters and optimizer state to the
program's inputs, and costs seconds; XLA's compilation, which costs minutes, is left out when the
trace comes out as the saved one did. So a file can never run a program that is not the step's.

XLA for CPU writes a program that it read before without its functions: such a file is taken, and
fails when it runs. So what came from a file is written as it came, and what may have come from
XLA's cache is compiled once more for the file.

The file is a zip archive: ``index.json`` and one entry per program. What XLA serializes contains
pickles, so load only files that you trust.
"""

from __future__ import annotations

import hashlib
import json
import os
import zipfile
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
from jax.experimental import serialize_executable
from jax.experimental.compilation_cache import compilation_cache

from xla_dtensor.core.errors import CompileError
from xla_dtensor.runtimes.jax.arrays import values
from xla_dtensor.runtimes.jax.arrays.private import lowered_inputs

__all__ = ["Executables"]

_INDEX = "index.json"
_FORMAT = 1
_MOST_UNUSED = 4


class Executables:
    """The compiled programs of a step, by digest, and those that a file had of it."""

    def __init__(self) -> None:
        self._compiled: dict[str, Any] = {}
        self._loaded: dict[str, bytes] = {}
        self._maybe_cached: dict[str, Any] = {}
        self.taken = 0

    def compiled(self, lowered: Any, compare: Callable[[str], None]) -> Any:
        """Compile a lowered program, or take it from a file that was loaded.

        `compare` is called with its digest before.
        """
        digest = _digest(lowered)
        compare(digest)
        if digest in self._compiled:  # The step was traced anew, and does the same.
            return self._compiled[digest]
        payload = self._loaded.get(digest)
        if payload is None:
            executable = lowered.compile()
            if jax.default_backend() == "cpu" and _cache_folder():
                self._maybe_cached[digest] = lowered
        else:
            executable = serialize_executable.deserialize_and_load(
                payload, lowered.in_tree, lowered.out_tree
            )
            self.taken += 1
        self._compiled[digest] = executable
        return executable

    def keep(self, used: Iterable[Any]) -> None:
        """Let go of programs that are not among `used`, but for the last few.

        A trace that is made anew often gives the program of the trace before, so those stay.
        """
        ids = {id(executable) for executable in used}
        for digest in list(self._compiled)[:-_MOST_UNUSED]:
            if id(self._compiled[digest]) not in ids:
                del self._compiled[digest]
                self._maybe_cached.pop(digest, None)

    def add(self, lowered: Any, executable: Any) -> None:
        """Take in a program that was compiled elsewhere."""
        self._compiled[_digest(lowered)] = executable

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the programs that the step keeps.

        Raises:
            CompileError: There is none yet, or the devices' compiler cannot write its programs.
        """
        if not self._compiled:
            raise CompileError(
                f"A compiled step was asked to save its programs to path={os.fspath(path)!r} "
                "before its first call. There is no program yet. Call the step first."
            )
        payloads = {digest: self._payload(digest) for digest in self._compiled}
        partial = f"{os.fspath(path)}.partial"
        with zipfile.ZipFile(partial, "w") as archive:
            archive.writestr(_INDEX, json.dumps({"format": _FORMAT, **_machine()}))
            for digest, payload in payloads.items():
                archive.writestr(digest, payload)
        os.replace(partial, path)

    def _payload(self, digest: str) -> bytes:
        if digest in self._loaded:
            return self._loaded[digest]
        lowered = self._maybe_cached.get(digest)
        return _serialized(self._compiled[digest] if lowered is None else _compiled_anew(lowered))

    def load(self, path: str | os.PathLike[str]) -> None:
        """Read programs that `save` wrote.

        Raises:
            CompileError: The file is no such file, or is one of other devices or another JAX.
        """
        try:
            with zipfile.ZipFile(path) as archive:
                index = json.loads(archive.read(_INDEX))
                payloads = {n: archive.read(n) for n in archive.namelist() if n != _INDEX}
                if not isinstance(index, dict):
                    raise zipfile.BadZipFile("the index is no table")
        except (zipfile.BadZipFile, KeyError, ValueError) as error:
            raise CompileError(
                f"Programs were to be loaded from path={os.fspath(path)!r}. The file was not "
                "written by a compiled step's save(), or not completely. Pass one that was."
            ) from error
        _check_machine(index, path)
        self._loaded |= payloads


def _cache_folder() -> str | None:
    return jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]


def _compiled_anew(lowered: Any) -> Any:
    """Compile past XLA's cache, which holds what it has found for the rest of a process."""
    folder = _cache_folder()
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()
    try:
        # With an option, for else the program that there is would be given back; with its default.
        return lowered.compile({"xla_backend_optimization_level": "3"})
    finally:
        jax.config.update("jax_compilation_cache_dir", folder)
        compilation_cache.reset_cache()


def _serialized(executable: Any) -> bytes:
    try:
        return serialize_executable.serialize(executable)[0]
    except (ValueError, NotImplementedError, jax.errors.JaxRuntimeError) as error:
        kind = values.devices()[0].device_kind
        raise CompileError(
            "A compiled step was asked to save its programs. The compiler of these devices, "
            f"{kind!r}, cannot write them: {error}. Use the compile cache "
            "of get_runtime('jax', compile_cache=...), where the platform has one."
        ) from error


def _digest(lowered: Any) -> str:
    # The text has no argument that the program does not use, so that two programs that use
    # different ones of theirs may have one text, or that are given other types for the rest.
    used = lowered_inputs(lowered)
    types = [f"{info.dtype}{info.shape}" for info in jax.tree.leaves(lowered.args_info)]
    bound = f"{lowered.in_tree} {types} {used} {lowered.out_tree}"
    text = json.dumps(_machine()) + bound + lowered.as_text()
    return hashlib.sha256(text.encode()).hexdigest()


def _machine() -> dict[str, Any]:
    devices = values.devices()
    return {"jax": jax.__version__, "device": devices[0].device_kind, "devices": len(devices)}


def _check_machine(index: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    own_index = {"format": _FORMAT, **_machine()}
    differing = {
        name: (index.get(name), ours) for name, ours in own_index.items() if index.get(name) != ours
    }
    if differing:
        said = ", ".join(
            f"{name}={there!r} (here {here!r})" for name, (there, here) in differing.items()
        )
        raise CompileError(
            f"Programs were to be loaded from path={os.fspath(path)!r}. They were compiled for "
            f"{said}. Call the step without loading, and save its programs here."
        )
