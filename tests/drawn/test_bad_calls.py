"""Bad calls of public functions are refused in three parts: 300 by text, all others by class."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from tests.drawn.bad_calls import REFUSED, bad_calls, outcome

pytestmark = pytest.mark.only_on("jax")


def test_the_texts_of_300(runtime: Any) -> None:
    texts = yaml.safe_load(REFUSED.read_text(encoding="utf-8"))
    calls = {str(call): call for call in bad_calls()}
    assert len(texts) == 300
    assert {name: outcome(calls[name]) for name in texts} == texts


@pytest.mark.thorough
def test_none_is_unclear(runtime: Any) -> None:
    found = {str(call): outcome(call) for call in bad_calls()}
    assert [(call, text) for call, text in found.items() if text.startswith("unclear")] == []
    assert sum(text != "taken" for text in found.values()) > 7000


def test_each_has_three_parts() -> None:
    """What was asked, why it is refused, what to pass instead."""
    texts = yaml.safe_load(REFUSED.read_text(encoding="utf-8"))
    short = {call: text for call, text in texts.items() if text.count(". ") + text.count(".\n") < 2}
    assert short == {}
