"""Prints what an environment holds: `.venv/bin/python tools/show_environment.py [NAME]`.

    .venv: Python 3.13.0, torch 2.15.0, jax 0.12.0.1, libtpu 0.0.50.1

With Python 3.11 the newest JAX cannot be installed; a second line says so.
"""

from __future__ import annotations

import platform
import sys
from importlib.metadata import PackageNotFoundError, version

PACKAGES = ("torch", "torch_xla", "jax", "libtpu")
OLD = (
    "Python 3.11 is the newest that was found here: what is tested is JAX 0.10, the oldest that is "
    "supported. Install Python 3.12, 3.13 or 3.14 to test the newest."
)


def lines(name: str) -> list[str]:
    """Return what there is to say of this Python's environment."""
    parts = [f"Python {platform.python_version()}"]
    for package in PACKAGES:
        try:
            parts.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    has_torch_xla = any(part.startswith("torch_xla") for part in parts)
    note = [OLD] if sys.version_info < (3, 12) and not has_torch_xla else []
    return [f"{name}: {', '.join(parts)}", *note]


if __name__ == "__main__":
    print("\n".join(lines(sys.argv[1] if len(sys.argv) > 1 else sys.prefix)))
