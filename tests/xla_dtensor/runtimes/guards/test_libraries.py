"""Whose code is gone into, and whose is a library's."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import jax
import numpy as np
import pytest
import torch

import mesh_utils
import tpu_configs
import xla_dtensor
from mesh_utils import Mesh
from tests.xla_dtensor.runtimes.guards.recorded import guards_of
from xla_dtensor.runtimes.guards.libraries import is_library_file, is_module_of_users
from xla_dtensor.runtimes.guards.owners import Globals


@pytest.mark.parametrize("package", [torch, jax, np, xla_dtensor, mesh_utils, tpu_configs])
def test_a_package_that_is_not_gone_into(package: ModuleType) -> None:
    assert is_library_file(package.__file__)


def test_models_of_this_project_are_gone_into_as_the_users_are() -> None:
    from xla_dtensor.models import decoder

    assert not is_library_file(decoder.__file__)


@pytest.mark.parametrize(
    ("name", "is_like_the_users"),
    [
        ("accelerate", True),
        ("transformers", True),
        ("lightning_steps", False),
        ("generation", False),
    ],
)
def test_trainers_are_gone_into_and_what_works_behind_them_is_not(
    name: str, is_like_the_users: bool
) -> None:
    """A trainer holds what the user has given it: a change there was not seen once."""
    file = Path(xla_dtensor.__file__).parent / "integrations" / f"{name}.py"
    assert file.exists()
    assert is_library_file(str(file)) != is_like_the_users
    assert is_module_of_users(f"xla_dtensor.integrations.{name}") == is_like_the_users


def test_the_code_of_meshes_guards_nothing() -> None:
    # Some of it is in closures, to find which all objects of the process had to be looked at.
    guards = guards_of(lambda x: x * Mesh.arange((2, 4), ("dp", "tp")).size("tp"), 1.0)
    owners = [each for each in guards.owners if isinstance(each, Globals)]
    assert {each.label for each in owners} <= {__name__, "builtins"}
