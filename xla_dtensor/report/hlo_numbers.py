"""Numbers in HLO text, read so that no text can harm: not too long, and not too large."""

from __future__ import annotations

import re

from xla_dtensor.report.errors import HloError

__all__ = ["MOST_DEVICES", "checked_devices", "read_number"]

MOST_DEVICES = 1 << 22
"""Devices of a program. The largest machine that libtpu takes has 2^18; a number beyond this is no
program's, and making its groups would take the memory of the machine that reads the report."""

_SIGNED_NUMBER = re.compile(r"-?[0-9]{1,18}")


def read_number(text: str | None, otherwise: int = 0) -> int:
    """Reads a number.

    Args:
        text: what should be one.
        otherwise: what to take where it is none.

    Returns:
        The number.

    Example:
        >>> read_number("12"), read_number("twelve"), read_number(None)
        (12, 0, 0)
    """
    found = None if text is None else _SIGNED_NUMBER.fullmatch(text.strip())
    return otherwise if found is None else int(found[0])


def checked_devices(count: int, text: str) -> int:
    """Refuses numbers of devices that no program has.

    Args:
        count: how many.
        text: where that was read.

    Returns:
        The number.

    Raises:
        HloError: it is more than MOST_DEVICES.
    """
    if count > MOST_DEVICES:
        raise HloError(
            f"{text[:80]!r} was given. It has {count:.3g} devices, more than any machine. "
            "Pass HLO text as XLA prints it."
        )
    return count
