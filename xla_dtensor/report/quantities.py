"""Bytes, seconds and shares as people read them."""

from __future__ import annotations

import math

__all__ = ["bytes_text", "seconds_text", "share_text"]

_BYTES = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
_SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"))


def bytes_text(value: float | None) -> str:
    """Writes a number of bytes.

    Args:
        value: bytes, of either sign; None if not known.

    Returns:
        Three digits and a unit of powers of 1024.

    Example:
        >>> bytes_text(1 << 20), bytes_text(95.7 * 2**30), bytes_text(0), bytes_text(None)
        ('1.00 MiB', '95.7 GiB', '0 B', '-')
    """
    if value is None:
        return "-"
    size, unit = abs(float(value)), 0
    # 999.5 would be written with four digits: the next unit is easier to read.
    while size >= 999.5 and unit < len(_BYTES) - 1:
        size, unit = size / 1024, unit + 1
    sign = "-" if value < 0 else ""
    return f"{sign}{f'{size:.0f}' if unit == 0 else _digits(size)} {_BYTES[unit]}"


def seconds_text(value: float | None) -> str:
    """Writes a time.

    Args:
        value: seconds, of either sign; None if not known.

    Returns:
        Three digits and a unit; minutes and hours from 120 s on.

    Example:
        >>> seconds_text(0.0123), seconds_text(300), seconds_text(0), seconds_text(None)
        ('12.3 ms', '5 min 0 s', '0 s', '-')
    """
    if value is None or not math.isfinite(value):
        return "-" if value is None or math.isnan(value) else f"{value:+.0f}"
    if value == 0:
        return "0 s"
    size, sign = abs(value), "-" if value < 0 else ""
    if size >= 7200:
        return f"{sign}{size // 3600:.0f} h {size % 3600 // 60:.0f} min"
    if size >= 120:
        return f"{sign}{size // 60:.0f} min {math.floor(size % 60):.0f} s"
    for scale, unit in _SECONDS:
        if size >= 0.9995 * scale:
            return f"{sign}{_digits(size / scale)} {unit}"
    return f"{sign}{size:.2g} s"


def share_text(value: float | None) -> str:
    """Writes a share.

    Args:
        value: 1 is all; None if not known.

    Returns:
        Percent.

    Example:
        >>> share_text(0.4567), share_text(1), share_text(None)
        ('45.7 %', '100 %', '-')
    """
    if value is None:
        return "-"
    # What is not all must not read as all.
    percent = 100 * value
    return f"{percent:.0f} %" if percent in (0, 100) else f"{min(percent, 99.9):.1f} %"


def _digits(size: float) -> str:
    if size < 9.995:
        return f"{size:.2f}"
    return f"{size:.1f}" if size < 99.95 else f"{size:,.0f}"
