"""The commands in the README and docs/topology.md print what they show, and draw its picture."""

from __future__ import annotations

import doctest
import shlex
from pathlib import Path

import pytest

from tests.documents import ROOT, blocks
from xla_dtensor import cli

TEXT = (ROOT / "docs" / "topology.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")
SESSIONS = [*blocks(README, "console"), *blocks(TEXT, "console")]


def same(shown: str, printed: str) -> bool:
    """Whether a text is what was shown; "..." stands for anything."""
    return doctest.OutputChecker().check_output(shown, printed, doctest.ELLIPSIS)


@pytest.mark.parametrize("session", SESSIONS, ids=lambda text: text.splitlines()[0])
def test_a_command_prints_what_is_shown(
    session: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    command, _, shown = session.partition("\n")
    words = shlex.split(command.removeprefix("$ python -m xla_dtensor "))
    if words[0] == "mesh":
        pytest.importorskip("jax")
    (tmp_path / "docs" / "figures").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    status = cli.main(words)
    out, err = capsys.readouterr()
    assert status == (2 if err else 0)
    printed = out + err
    assert same(shown, printed), printed
    for drawn in (tmp_path / "docs" / "figures").iterdir():
        committed = ROOT / "docs" / "figures" / drawn.name
        assert drawn.read_text(encoding="utf-8") == committed.read_text(encoding="utf-8")


def test_sessions_are_found_and_can_fail() -> None:
    assert len(SESSIONS) >= 5
    assert any("--draw docs/figures/" in session for session in SESSIONS)
    assert same("a\n...\nd\n", "a\nb\nc\nd\n")
    assert not same("a\n...\nd\n", "a\nb\nc\n")


def test_the_pictures_shown_exist() -> None:
    shown = [part.partition(")")[0] for part in TEXT.split("](figures/")[1:]]
    assert shown
    assert all((ROOT / "docs" / "figures" / name).exists() for name in shown)
