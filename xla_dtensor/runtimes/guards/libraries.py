"""Whose code is it: the user's, or that of a library which is not gone into?"""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch

from xla_dtensor.versions import PACKAGE_FOLDER

__all__ = ["guarded", "guarded_names", "is_library_file", "is_module_of_users", "is_of_library"]

Kind = TypeVar("Kind")
_GUARDED: dict[type, frozenset[str]] = {}
_OURS = ("xla_dtensor", "mesh_utils", "tpu_configs")
_LIBRARIES = ("torch", "torch_xla", "jax", "jaxlib", "numpy", "functorch", *_OURS)
# Models, and trainers, which hold what the user has given them. What works behind a trainer, such
# as integrations.lightning_steps, is ours.
_CLIENTS = ("accelerate", "lightning", "transformers", "trl")
_OF_USERS = ("models", *(f"integrations.{name}" for name in _CLIENTS))
_PATHS = tuple(str(PACKAGE_FOLDER.joinpath(*name.split("."))) for name in _OF_USERS)
_FILES_OF_USERS = tuple(f"{path}{end}" for path in _PATHS for end in (os.sep, ".py"))
_MODULES_OF_USERS = tuple(f"xla_dtensor.{name}." for name in _OF_USERS)


def is_library_file(name: str | None) -> bool:
    """Tell whether a file is one of Python's, torch's, JAX's, NumPy's or this project's.

    Args:
        name: Its path; None for a module without one, which is built in.

    Example:
        >>> is_library_file(torch.__file__), is_library_file("/home/me/train.py")
        (True, False)
    """
    if name is None or name.startswith("<frozen"):
        return True
    if name.startswith(_FILES_OF_USERS):
        return False
    in_packages = "site-packages" in name  # which lie in the standard library's folder
    return name.startswith(_folders()) or (name.startswith(_stdlib()) and not in_packages)


def is_of_library(kind: type) -> bool:
    """Tell whether a class is one of these libraries', of Python's own, or built in."""
    module = str(kind.__module__)
    if is_module_of_users(module):
        return False
    name = module.partition(".")[0]
    return name in _LIBRARIES or (name in sys.stdlib_module_names and name != "__main__")


def guarded(*names: str) -> Callable[[type[Kind]], type[Kind]]:
    """Let compiled steps look after attributes of a class, though it is ours: users set them.

    Args:
        names: The attributes.
    """

    def register(kind: type[Kind]) -> type[Kind]:
        _GUARDED[kind] = frozenset(names)
        return kind

    return register


def guarded_names(kind: type) -> frozenset[str] | None:
    """Return the attributes of a class of ours that are looked after; None for all of another's."""
    return _GUARDED.get(kind)


def is_module_of_users(module: str) -> bool:
    """Tell whether a module of this project is code that a user could have written.

    Example:
        >>> is_module_of_users("xla_dtensor.models.llama"), is_module_of_users("xla_dtensor.nn")
        (True, False)
    """
    return f"{module}.".startswith(_MODULES_OF_USERS)


@functools.lru_cache(maxsize=1)
def _folders() -> tuple[str, ...]:
    folders = {PACKAGE_FOLDER, *(Path(str(package.__file__)).parent for package in (torch, np))}
    packages = {folder.parent for folder in folders} - {PACKAGE_FOLDER.parent}
    folders |= {parent / name for parent in packages for name in _LIBRARIES}
    folders |= {PACKAGE_FOLDER.parent / name for name in _OURS}
    files = [str(parent / "typing_extensions.py") for parent in packages]
    return (*(f"{folder}{os.sep}" for folder in folders), *files)


@functools.lru_cache(maxsize=1)
def _stdlib() -> str:
    return sysconfig.get_paths()["stdlib"]
