"""The examples in the docstrings of the core run as written."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import xla_dtensor.core

MODULES = [xla_dtensor.core.__name__] + [
    f"{xla_dtensor.core.__name__}.{module.name}"
    for module in pkgutil.iter_modules(xla_dtensor.core.__path__)
]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str) -> None:
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_there_are_examples() -> None:
    found = [doctest.testmod(importlib.import_module(name)).attempted for name in MODULES]
    assert sum(found) > 30
