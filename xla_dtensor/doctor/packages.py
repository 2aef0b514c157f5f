"""What is installed, read from package metadata: nothing is imported, so nothing can crash.

Example:
    >>> torch_support("2.11.0+cpu").is_supported
    False
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = [
    "PACKAGES",
    "Installed",
    "TorchSupport",
    "is_importable",
    "read_installed",
    "release",
    "satisfies",
    "torch_support",
]

PACKAGES = ("xla-dtensor", "numpy", "torch", "jax", "jaxlib", "torch_xla", "libtpu")

SUPPORTED_TORCH = "2.9, and 2.13 or newer"
_FIRST_TORCH = (2, 9)
_FIRST_TORCH_WITH_DISPATCH_AGAIN = (2, 13)


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


@dataclass(frozen=True)
class TorchSupport:
    """Whether a version of torch is supported, and why not."""

    is_supported: bool
    reason: str


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


def release(version: str) -> tuple[int, ...]:
    """The leading numbers of a version.

    Example:
        >>> release("2.13.0+cpu"), release("unknown")
        ((2, 13, 0), ())
    """
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(number) for number in found[0].split(".")) if found else ()


def satisfies(version: str, pin: str) -> bool:
    """Whether a version is one that an ``==`` pin names; other pins are taken as satisfied.

    Example:
        >>> satisfies("0.0.42.1", "==0.0.42.*"), satisfies("0.0.42.1", "==0.0.21")
        (True, False)
    """
    exact = re.fullmatch(r"==\s*([\d.]+?)(\.\*)?", pin)
    if exact is None:
        return True
    wanted, found = release(exact[1]), release(version)
    return found[: len(wanted)] == wanted if exact[2] else found == wanted


def torch_support(version: str | None) -> TorchSupport:
    """Tells whether xla_dtensor supports a version of torch."""
    if version is None:
        return TorchSupport(False, "not installed")
    found: Sequence[int] = release(version)[:2]
    if found == _FIRST_TORCH or tuple(found) >= _FIRST_TORCH_WITH_DISPATCH_AGAIN:
        return TorchSupport(True, "supported")
    if tuple(found) < _FIRST_TORCH:
        return TorchSupport(False, f"too old: supported are {SUPPORTED_TORCH}")
    return TorchSupport(
        False,
        "not supported: 2.10 to 2.12 dispatch DTensor subclasses in C++, past an override; "
        f"supported are {SUPPORTED_TORCH}",
    )
