"""What is installed, read from package metadata: nothing is imported, so nothing can crash."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["PACKAGES", "Installed", "is_importable", "read_installed"]

PACKAGES = ("xla-dtensor", "numpy", "torch", "jax", "jaxlib", "torch_xla", "libtpu")


@dataclass(frozen=True)
class Installed:
    """Versions, and what the installed packages ask for.

    Args:
        versions: Package to version; None where it is not installed.
        libtpu_pins: "jax" and "torch_xla" to the libtpu that their TPU extra asks for, such as
            "==0.0.42.*", as far as they are installed and say so.
    """

    versions: Mapping[str, str | None]
    libtpu_pins: Mapping[str, str]

    def version(self, package: str) -> str | None:
        """The version of a package; None where it is not installed."""
        return self.versions.get(package)


def read_installed() -> Installed:
    """Reads the metadata of `PACKAGES`. Unreadable metadata counts as not installed."""
    pins = {package: _libtpu_pin(package) for package in ("jax", "torch_xla")}
    return Installed(
        {package: _version(package) for package in PACKAGES},
        {package: pin for package, pin in pins.items() if pin},
    )


def _version(package: str) -> str | None:
    try:
        # A damaged installation can lack the line: the version is then None, whatever its type.
        return importlib.metadata.version(package) or None
    except Exception:
        return None


def _libtpu_pin(package: str) -> str | None:
    try:
        requirements = importlib.metadata.requires(package) or []
    except Exception:
        return None
    for requirement in requirements:
        name, _, marker = requirement.partition(";")
        if re.match(r"libtpu\b", name) and re.search(r"""extra\s*==\s*['"]tpu['"]""", marker):
            return name.removeprefix("libtpu").strip(" ()")
    return None


def is_importable(module: str) -> bool:
    """Whether Python finds a top-level module, without importing it."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False
