"""Which extra installs on which Python, and beside what: asks the package index, installs nothing.

    .venv/bin/python tools/dry_runs.py            every row of the table, some minutes
    .venv/bin/python tools/dry_runs.py 3.14       the rows of one Python

Needs pip 26 or newer, and no other Python than the one that it runs on: pip resolves for any
version. A row that does not come out as the table says is printed, with pip's last words, and the
exit status is 1.
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
PLATFORMS = (
    "manylinux_2_28_x86_64",
    "manylinux_2_27_x86_64",
    "manylinux2014_x86_64",
    "linux_x86_64",
)

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
    "cuda12",
    "cuda13",
    "torch-xla",
    "torch-xla-tpu",
    "plot",
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


def command(row: Row, wheel: Path, folder: Path) -> list[str]:
    """Return pip's command line for a row."""
    platforms = [f"--platform={platform}" for platform in PLATFORMS]
    requirements = [f"{wheel}[{row.extra}]", *([row.beside] if row.beside else [])]
    return [
        *(sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "-qq"),
        *("--only-binary=:all:", f"--target={folder}", f"--python-version={row.python}"),
        *platforms,
        *requirements,
    ]


def main(pythons: list[str]) -> int:
    """Try the rows; return the exit status."""
    wrong = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        build = [sys.executable, "-m", "pip", "wheel", "-qq", "--no-deps", f"--wheel-dir={name}"]
        subprocess.run([*build, str(ROOT)], check=True)
        (wheel,) = folder.glob("*.whl")
        for row in table():
            if pythons and row.python not in pythons:
                continue
            done = subprocess.run(
                command(row, wheel, folder / "target"), capture_output=True, text=True, check=False
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
