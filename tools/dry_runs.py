"""Which extra installs on which Python, and beside what: asks the package index, installs nothing.

    .venv/bin/python tools/dry_runs.py            every row of the table, a few minutes
    .venv/bin/python tools/dry_runs.py 3.14       the rows of one Python

uv resolves for any version of Python, on Linux with a new glibc; pip would do so only where each
requirement has a wheel. A row that does not come out as the table says is printed, with uv's words,
and the exit status is 1.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
PLATFORM = "x86_64-manylinux_2_40"

# Extra -> why there is none, by Python. Everything else has to resolve.
REFUSED = {
    "torch-xla": {"3.14": "torch_xla 2.9 has no wheel for Python 3.14"},
    "torch-xla-tpu": {
        "3.13": "libtpu 0.0.21, which torch_xla 2.9 pins, has no wheel for Python 3.13",
        "3.14": "torch_xla 2.9 has no wheel for Python 3.14",
    },
}
EXTRAS = (
    "jax",
    "tpu",
    "preflight",
    "orbax",
    "cuda12",
    "cuda13",
    "torch-xla",
    "torch-xla-tpu",
    "docs",
    "dev",
)
# What people have beside this project.
BESIDE = {
    "flax": ("3.12", "3.13"),
    "maxtext[tpu]": ("3.12", "3.13"),
}
# What cannot be had: tpu-inference pins torch 2.10, which is refused.
NOT_BESIDE = {"tpu-inference": ("3.12",)}


@dataclass(frozen=True)
class Row:
    """One dry run.

    Attributes:
        python: the version of Python to resolve for.
        extra: the extra of this project.
        beside: another requirement, or "".
        resolves: whether it is expected to.
    """

    python: str
    extra: str
    beside: str = ""
    resolves: bool = True

    def __str__(self) -> str:
        beside = f" beside {self.beside}" if self.beside else ""
        return f"Python {self.python}  [{self.extra}]{beside}"


def table() -> Iterator[Row]:
    """Yield the rows."""
    for python in PYTHONS:
        for extra in EXTRAS:
            yield Row(python, extra, resolves=python not in REFUSED.get(extra, {}))
    for requirement, pythons in BESIDE.items():
        extra = "tpu" if "[tpu]" in requirement else "jax"
        yield from (Row(python, extra, requirement) for python in pythons)
    for requirement, pythons in NOT_BESIDE.items():
        yield from (Row(python, "tpu", requirement, resolves=False) for python in pythons)


def requirements(row: Row, wheel: Path) -> str:
    """Return what a row installs, as a file of requirements."""
    return f"xla-dtensor[{row.extra}] @ {wheel.as_uri()}\n{row.beside}\n"


COMMAND = (sys.executable, "-m", "uv", "pip", "compile", "-", "--quiet", "--no-header")


def main(pythons: list[str]) -> int:
    """Try the rows; return the exit status."""
    wrong = 0
    with tempfile.TemporaryDirectory() as name:
        build = [sys.executable, "-m", "pip", "wheel", "-qq", "--no-deps", f"--wheel-dir={name}"]
        subprocess.run([*build, str(ROOT)], check=True)
        (wheel,) = Path(name).glob("*.whl")
        for row in table():
            if pythons and row.python not in pythons:
                continue
            done = subprocess.run(
                [*COMMAND, f"--python-version={row.python}", f"--python-platform={PLATFORM}"],
                input=requirements(row, wheel),
                capture_output=True,
                text=True,
                check=False,
            )
            is_right = (done.returncode == 0) == row.resolves
            wrong += not is_right
            outcome = "resolves" if done.returncode == 0 else "is refused"
            print(f"{row}: {outcome}{'' if is_right else ', WRONG'}", flush=True)
            if not is_right:
                print("   ", "\n    ".join(done.stderr.strip().splitlines()[-6:]))
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
