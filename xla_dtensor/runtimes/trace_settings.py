"""Settings that a traced step depends on besides its arguments.

A program traced under one setting must not serve a call under another. The layers above the
runtimes register how to read theirs; a runtime makes them part of what it finds programs by.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

__all__ = ["register_setting", "trace_settings"]

_readers: dict[str, Callable[[], Hashable]] = {}


def register_setting(name: str, read: Callable[[], Hashable]) -> None:
    """Make what `read` returns part of what tells programs apart.

    Args:
        name: What the setting is called; a second one of the same name replaces the first.
        read: Called on every call of a compiled step, in the thread of the call.
    """
    _readers[name] = read


def trace_settings() -> tuple[tuple[str, Hashable], ...]:
    """Return the present value of every registered setting, by name."""
    return tuple((name, read()) for name, read in _readers.items())
