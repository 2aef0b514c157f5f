"""How much host memory a process has, from what Linux says of it."""

from __future__ import annotations

from pathlib import Path

__all__ = ["host_bytes"]


def host_bytes(name: str, process: int | str = "self") -> int | None:
    """Return a figure of a process in bytes; None where the system does not say, or it has ended.

    Args:
        name: "VmRSS", what it holds now, or "VmHWM", the most it ever held. The latter is its own,
            unlike ``ru_maxrss``, which a process inherits from the one that started it.
        process: Its id, or "self".

    Example:
        >>> held = host_bytes("VmRSS")
        >>> held is None or held > 1_000_000
        True
    """
    try:
        status = Path(f"/proc/{process}/status").read_text()
    except OSError:
        return None
    found = [line.split()[1] for line in status.splitlines() if line.startswith(f"{name}:")]
    return int(found[0]) * 1024 if found else None
