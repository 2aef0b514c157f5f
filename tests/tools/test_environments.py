"""How environments are made: which Python is taken, what is said, what a bad one is answered."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
STAND_IN = "#!/bin/sh\necho 'pyenv: command not found' >&2\nexit 127\n"


def python(path: Path, minor: int, micro: int = 0) -> Path:
    """Make a program that answers as a Python 3 of that version does."""
    path.parent.mkdir(parents=True, exist_ok=True)
    answer = (
        f'case "$2" in *"if "*) low=${{2#*if }}; low=${{low%% *}}; high=${{2#*] <= }};'
        f"high=${{high%% *}}; [ $low -le {minor} ] && [ {minor} -le $high ] || exit 0;; esac"
    )
    path.write_text(f'#!/bin/sh\n{answer}\nprintf "%03d %03d %s\\n" {minor} {micro} "$0"\n')
    path.chmod(0o755)
    return path


def found(tmp_path: Path, *arguments: str) -> str:
    environment = {
        "PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin",
        "HOME": str(tmp_path),
        "PYENV_ROOT": str(tmp_path / "pyenv"),
        "UV_PYTHON_INSTALL_DIR": str(tmp_path / "uv"),
    }
    done = subprocess.run(
        ["sh", str(ROOT / "tools" / "find_python.sh"), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def test_the_newest_and_the_oldest(tmp_path: Path) -> None:
    python(tmp_path / "bin" / "python3.11", 11, 9)
    newest = python(tmp_path / "pyenv" / "versions" / "3.13.0" / "bin" / "python3", 13)
    newer = python(tmp_path / "uv" / "cpython-3.13.5" / "bin" / "python3", 13, 5)
    python(tmp_path / "uv" / "cpython-3.15.1" / "bin" / "python3", 15, 1)
    assert found(tmp_path, "newest", "12", "14") == str(newer)
    newer.unlink()
    assert found(tmp_path, "newest", "12", "14") == str(newest)
    assert found(tmp_path, "oldest", "13", "14") == str(newest)


def test_a_stand_in_is_passed_over(tmp_path: Path) -> None:
    stand_in = tmp_path / "bin" / "python3.14"
    stand_in.parent.mkdir()
    stand_in.write_text(STAND_IN)
    stand_in.chmod(0o755)
    real = python(tmp_path / "pyenv" / "versions" / "3.12.1" / "bin" / "python3", 12, 1)
    assert found(tmp_path, "newest", "12", "14") == str(real)


def test_none_is_nothing(tmp_path: Path) -> None:
    python(tmp_path / "pyenv" / "versions" / "3.15.0" / "bin" / "python3", 15)
    assert found(tmp_path, "newest", "13", "14") == ""


def test_this_python_is_found() -> None:
    minor = str(sys.version_info[1])
    line = subprocess.run(
        ["sh", str(ROOT / "tools" / "find_python.sh"), "newest", minor, minor],
        env=os.environ | {"PATH": f"{Path(sys.base_prefix) / 'bin'}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    assert Path(line).name.startswith("python3")


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("", "PYTHON={path} is not that. Pass another path, or none: then one is looked for."),
        (None, "needs Python 3.11 to 3.14 with venv, and none was found: not on PATH, and not in"),
    ],
)
def test_a_python_without_venv_is_refused(tmp_path: Path, program: str | None, said: str) -> None:
    path = tmp_path / "python3"
    if program is not None:
        path.write_text("#!/bin/sh\necho \"No module named 'ensurepip'\" >&2\nexit 1\n")
        path.chmod(0o755)
    environment = {
        "PATH": f"{tmp_path}:/usr/bin:/bin" if program is not None else "/nowhere:/bin",
        "PYTHON": "" if program is None else str(path),
        "HOME": str(tmp_path),
    }
    script = ROOT / "tools" / "make_environment.sh"
    if program is None:  # a machine without any Python
        tools = tmp_path / "tools"
        tools.mkdir()
        (tools / "make_environment.sh").write_text(script.read_text())
        (tools / "find_python.sh").write_text("#!/bin/sh\n")
        (tools / "find_python.sh").chmod(0o755)
        script = tools / "make_environment.sh"
    done = subprocess.run(
        ["/bin/sh", str(script), str(tmp_path / "venv"), "newest", "11", "14", "numpy"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert said.format(path=path) in done.stderr
    assert not (tmp_path / "venv").exists()


def test_what_an_environment_holds() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "show_environment.py"), ".venv"],
        capture_output=True,
        text=True,
        check=True,
    )
    first, *rest = done.stdout.splitlines()
    assert first.startswith(f".venv: Python {sys.version_info[0]}.{sys.version_info[1]}.")
    assert ", torch " in first
    is_old = sys.version_info < (3, 12) and "torch_xla" not in first
    assert [line.partition(":")[0] for line in rest] == (
        ["Python 3.11 is the newest that was found here"] if is_old else []
    )
