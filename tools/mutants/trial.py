"""Runs named tests in a copy of the tree, with or without a mutant.

Invariant: a copy is the tree as git lists it, but for the mutant that it holds just now. The
working tree is never written to.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tools.mutants.place import Place

__all__ = ["Copy", "Ending", "Run"]

_ASKS_FOR_VERSION = """
import importlib.metadata, sys
from packaging.requirements import Requirement
need = Requirement(sys.argv[1])
version = importlib.metadata.version(need.name)
if version not in need.specifier:
    print(f"needs {need}, there is {need.name} {version}")
"""


@dataclass(frozen=True)
class Ending:
    """How one test ended; see `recorder`."""

    test: str
    outcome: str
    error: str
    text: str


@dataclass(frozen=True)
class Run:
    """One call of pytest.

    Args:
        endings: Of the tests that ran, in their order.
        status: Pytest's exit status; negative where a signal ended it; None where time was up.
        seconds: Wall time.
        tail: The end of what it printed.
    """

    endings: tuple[Ending, ...]
    status: int | None
    seconds: float
    tail: str


class Copy:
    """A copy of the tree's files.

    Args:
        root: The working tree.
        folder: Where the copy goes; it must not exist.
        pythons: The interpreter of each runtime; "none" takes that of jax.
    """

    def __init__(self, root: Path, folder: Path, pythons: Mapping[str, Path]) -> None:
        self._folder, self._pythons = folder, pythons
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=root,
            capture_output=True,
            text=True,
            check=True,
        )
        for name in filter(None, listed.stdout.split("\0")):
            if (root / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(root / name, folder / name)

    def lacks(self, need: str, runtime: str) -> str:
        """Return what is wrong with a runtime's packages for a need; "" where it is met.

        Args:
            need: A package and its version, "jax<0.12"; "" for none.
            runtime: "jax", "torch_xla" or "none".
        """
        if not need:
            return ""
        command = [str(self._python(runtime)), "-c", _ASKS_FOR_VERSION, need]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    def _python(self, runtime: str) -> Path:
        return self._pythons["jax" if runtime == "none" else runtime]

    @contextmanager
    def holding(self, place: Place) -> Iterator[None]:
        """Hold a mutant meanwhile."""
        try:
            self._write(place.file, place.after)
            yield
        finally:
            self._write(place.file, place.before)

    def _write(self, name: Path, text: str) -> None:
        file = self._folder / name
        file.write_text(text, "utf-8")
        # Python takes a compiled file for current by the second and the size of its source.
        for compiled in (file.parent / "__pycache__").glob(f"{file.stem}.*.pyc"):
            compiled.unlink()

    def run(
        self,
        tests: Sequence[str],
        runtime: str,
        *,
        timeout: float,
        stop_at_first: bool,
        suite: str = "all",
    ) -> Run:
        """Run tests.

        Args:
            tests: As pytest names them.
            runtime: "jax", "torch_xla" or "none".
            timeout: Seconds.
            stop_at_first: Whether the first failure ends the run.
            suite: "contract" leaves out those of the tests that are no part of the contract.
        """
        record = self._folder.with_suffix(".json")
        record.unlink(missing_ok=True)
        command = [str(self._python(runtime)), "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        command += ["-p", "tools.mutants.recorder", *(["-x"] if stop_at_first else [])]
        command += ["--runtime", "torch_xla"] if runtime == "torch_xla" else []
        command += ["-m", "not thorough"] if suite == "contract" else []
        environment = {**os.environ, "MUTANT_RECORD": str(record)}
        environment.pop("PYTHONPATH", None)
        start = time.monotonic()
        status, printed = _call([*command, *tests], self._folder, environment, timeout)
        endings = json.loads(record.read_text("utf-8")) if record.exists() else []
        seconds = time.monotonic() - start
        return Run(tuple(Ending(**ending) for ending in endings), status, seconds, printed[-3000:])


def _call(
    command: Sequence[str], folder: Path, environment: Mapping[str, str], timeout: float
) -> tuple[int | None, str]:
    """Run a command in a process group of its own, which ends with it."""
    with subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            printed, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            return None, process.communicate()[0]
        return process.returncode, printed
