"""Code blocks of Markdown files: found, and run in a process of their own."""

from __future__ import annotations

import doctest
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT_SECONDS = 240


def blocks(text: str, language: str) -> list[str]:
    """The contents of the fenced blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def run(program: str, runtime: str) -> str:
    """What a program prints that sees 8 CPU devices on `runtime`; it must end well."""
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "XLA_DTENSOR_CPU_DEVICES": "8",
        "XLA_DTENSOR_RUNTIME": runtime,
    }
    environment.pop("XLA_FLAGS", None)
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def run_session(session: str, runtime: str) -> None:
    """Run an interpreter session; it must print what it shows.

    In a process of its own: the runtime may run in this one already, with another root mesh.
    """
    assert doctest.DocTestParser().get_examples(session)
    program = (
        "import doctest, sys\n"
        f"test = doctest.DocTestParser().get_doctest({session!r}, {{}}, 'document', None, 0)\n"
        "sys.exit(doctest.DocTestRunner(verbose=False).run(test).failed)"
    )
    run(program, runtime)
