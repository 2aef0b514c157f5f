"""Which versions are supported."""

from __future__ import annotations

import pytest

from xla_dtensor.versions import jax_support, torch_support


@pytest.mark.parametrize("version", ["0.10.0", "0.10.2", "0.11.2", "0.12.0.1", "0.12.5.dev1"])
def test_supported_jax(version: str) -> None:
    assert jax_support(version).is_supported


@pytest.mark.parametrize(
    ("version", "reason", "is_too_new"),
    [
        ("0.9.2", "too old: supported are 0.10 to 0.12", False),
        ("0.13.0", "too new: supported are 0.10 to 0.12", True),
        ("1.0", "too new: supported are 0.10 to 0.12", True),
    ],
)
def test_refused_jax(version: str, reason: str, is_too_new: bool) -> None:
    support = jax_support(version)
    assert (support.is_supported, support.reason, support.is_too_new) == (False, reason, is_too_new)


@pytest.mark.parametrize(
    ("version", "reason"),
    [
        ("2.9.1", "supported"),
        ("2.15.0+cpu", "supported"),
        ("2.8.0", "too old: supported are 2.9, and 2.13 or newer"),
        (None, "not installed"),
    ],
)
def test_torch(version: str | None, reason: str) -> None:
    assert torch_support(version).reason == reason


def test_refused_torch() -> None:
    assert "2.10 to 2.12 dispatch DTensor subclasses in C++" in torch_support("2.10.0").reason
