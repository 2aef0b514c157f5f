"""The README's code runs and prints what the README says; its commands and files exist."""

from __future__ import annotations

import re
import subprocess
from configparser import ConfigParser

import pytest

from tests.documents import ROOT, blocks, run, run_session

TEXT = (ROOT / "README.md").read_text()


def diff_sides(diff: str) -> tuple[str, str]:
    """The program before the change and after it."""
    lines = diff.splitlines()
    assert all(line[:1] in (" ", "+", "-") for line in lines if line)
    before = [line[1:] for line in lines if not line.startswith("+")]
    after = [line[1:] for line in lines if not line.startswith("-")]
    return "\n".join(before), "\n".join(after)


@pytest.mark.thorough
@pytest.mark.on_runtime
def test_both_sides_of_the_diff_run_and_print_the_same_losses(
    request: pytest.FixtureRequest,
) -> None:
    (diff,) = blocks(TEXT, "diff")
    before, after = diff_sides(diff)
    assert "xla_dtensor" not in before
    runtime = str(request.config.getoption("--runtime"))
    plain = [float(line) for line in run(before, runtime).split()]
    sharded = [float(line) for line in run(after, runtime).split()]
    assert len(plain) == 5
    assert plain[-1] < plain[0]
    assert sharded == pytest.approx(plain, abs=2e-4)


@pytest.mark.on_runtime
def test_the_sessions_print_what_the_readme_shows(request: pytest.FixtureRequest) -> None:
    session = "".join(blocks(TEXT, "pycon"))
    run_session(session, str(request.config.getoption("--runtime")))


def test_a_wrong_output_would_be_noticed() -> None:
    with pytest.raises(AssertionError, match="Expected:"):
        run_session(">>> 1 + 1\n3\n", "jax")


def test_the_make_commands_exist() -> None:
    (commands,) = blocks(TEXT, "sh")
    for command in re.findall(r"^make [^#\n]*", commands, re.MULTILINE):
        done = subprocess.run(
            ["make", "--dry-run", *command.split()[1:]],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert "examples.train_lm" in done.stdout


def test_the_extras_named_exist() -> None:
    parser = ConfigParser()
    parser.read(ROOT / "setup.cfg")
    named = set(re.findall(r"xla-dtensor\[([\w,-]+)\]", TEXT))
    assert named
    assert named <= set(parser["options.extras_require"])


def test_the_files_linked_exist() -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", TEXT)
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []
