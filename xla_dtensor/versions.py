"""Which versions of torch and JAX are supported. Versions are texts; nothing is imported.

    >>> torch_support("2.11.0+cpu").is_supported, jax_support("0.12.0.1").is_supported
    (False, True)

torch 2.9 is the last one of torch_xla; 2.10 to 2.12 dispatch subclasses of DTensor in C++, past an
override. JAX is bounded on both sides: parts of it that are used here are private, and each minor
release has changed some of them. ``XLA_DTENSOR_ANY_JAX=1`` lets a newer one through, for trying it.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

__all__ = [
    "ANY_JAX",
    "PACKAGE_FOLDER",
    "Installed",
    "is_importable",
    "jax_support",
    "read_installed",
    "release",
    "satisfies",
    "torch_support",
]

# Where this package is installed.
PACKAGE_FOLDER = Path(__file__).parent


# --------------------------------------------------- What is installed, read from package metadata
#
# Nothing is imported, so nothing can crash.

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


# --------------------------------------------------- Which versions of torch and JAX are supported

ANY_JAX = "XLA_DTENSOR_ANY_JAX"
"""The environment variable that turns "this JAX is too new" from an error into a note."""

SUPPORTED_TORCH = "2.9, and 2.13 or newer"
SUPPORTED_JAX = "0.10 to 0.12"
_FIRST_TORCH = (2, 9)
_FIRST_TORCH_WITH_DISPATCH_AGAIN = (2, 13)
_FIRST_JAX, _LAST_JAX = (0, 10), (0, 12)


@dataclass(frozen=True)
class Support:
    """Whether a version is supported, and why not.

    Attributes:
        is_supported: whether it is.
        reason: a text that fits behind "torch 2.11 is ...".
        is_too_new: it came out after the last one that is supported.
    """

    is_supported: bool
    reason: str
    is_too_new: bool = False


def release(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version.

    Example:
        >>> release("2.13.0+cpu"), release("unknown")
        ((2, 13, 0), ())
    """
    numbers = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(number) for number in numbers[0].split(".")) if numbers else ()


def satisfies(version: str, pin: str) -> bool:
    """Tell whether a version is one that an ``==`` pin names; other pins count as satisfied.

    Example:
        >>> satisfies("0.0.42.1", "==0.0.42.*"), satisfies("0.0.42.1", "==0.0.21")
        (True, False)
    """
    exact = re.fullmatch(r"==\s*([\d.]+?)(\.\*)?", pin)
    if exact is None:
        return True
    pin_release, have = release(exact[1]), release(version)
    return have[: len(pin_release)] == pin_release if exact[2] else have == pin_release


def torch_support(version: str | None) -> Support:
    """Tell whether a version of torch is supported; None is one that is not installed."""
    if version is None:
        return Support(False, "not installed")
    minor = release(version)[:2]
    if minor == _FIRST_TORCH or minor >= _FIRST_TORCH_WITH_DISPATCH_AGAIN:
        return Support(True, "supported")
    if minor < _FIRST_TORCH:
        return Support(False, f"too old: supported are {SUPPORTED_TORCH}")
    return Support(
        False,
        "not supported: 2.10 to 2.12 dispatch DTensor subclasses in C++, past an override; "
        f"supported are {SUPPORTED_TORCH}",
    )


def jax_support(version: str) -> Support:
    """Tell whether a version of JAX is supported.

    Example:
        >>> jax_support("0.9.2").reason
        'too old: supported are 0.10 to 0.12'
    """
    minor = release(version)[:2]
    if _FIRST_JAX <= minor <= _LAST_JAX:
        return Support(True, "supported")
    is_too_new = minor > _LAST_JAX
    age = "too new" if is_too_new else "too old"
    return Support(False, f"{age}: supported are {SUPPORTED_JAX}", is_too_new)
