"""Modules under the names that they had before: what was pickled names them.

A file of ``torch.save`` holds ``xla_dtensor.pickling.load_dtensor`` by name. A module that moved is
found under its old name where that is in a table; nothing is imported before it is asked for.

Example:
    >>> find_as({"xla_dtensor.pickling": "xla_dtensor.dtensor.dtensor"})
    >>> import importlib
    >>> importlib.import_module("xla_dtensor.pickling").load_dtensor.__module__
    'xla_dtensor.dtensor.dtensor'
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from functools import partial
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

__all__ = ["find_as"]


class _OldNames(MetaPathFinder, Loader):
    """Finds modules by their old names, after all other finders."""

    def __init__(self) -> None:
        self.names: dict[str, str] = {}

    def find_spec(self, fullname: str, path: object = None, target: object = None):
        """Return a spec for an old name; see :class:`importlib.abc.MetaPathFinder`."""
        return ModuleSpec(fullname, self) if fullname in self.names else None

    def exec_module(self, module: ModuleType) -> None:
        """Let `module` answer with what the module of the new name has."""
        new_module = importlib.import_module(self.names[module.__name__])
        module.__dict__["__getattr__"] = partial(getattr, new_module)


_finder = _OldNames()


def find_as(names: Mapping[str, str]) -> None:
    """Find modules under their old names as well.

    Args:
        names: New names, by old ones.
    """
    _finder.names.update(names)
    if _finder not in sys.meta_path:
        sys.meta_path.append(_finder)
