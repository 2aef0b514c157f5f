"""Rows of words with their columns aligned, and numbers with units, as the commands print them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

__all__ = ["gigabytes_per_second", "json_number", "table"]


def table(rows: Sequence[Sequence[str]], indent: str = "  ") -> Iterator[str]:
    r"""Aligns rows.

    Args:
        rows: Cells, equally many in each row.
        indent: What each line begins with.

    Yields:
        A line for each row; cells are two spaces apart, and nothing follows the last word.

    Example:
        >>> print("\n".join(table([("a", "1"), ("bcd", "2")], indent="")))
        a    1
        bcd  2
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        yield (indent + "  ".join(cells)).rstrip()


def gigabytes_per_second(value: float) -> str:
    """Writes a bandwidth.

    Args:
        value: Bytes per second.

    Returns:
        GB/s, of 10^9 bytes; TB/s from 10 000 GB/s on.

    Example:
        >>> gigabytes_per_second(6.25e9), gigabytes_per_second(51.2e12)
        ('6.25 GB/s', '51.2 TB/s')
    """
    return f"{value / 1e12:.4g} TB/s" if value >= 1e13 else f"{value / 1e9:.4g} GB/s"


def json_number(value: float | None) -> float | None:
    """Makes a number fit for JSON, which knows no infinity.

    Args:
        value: A number.

    Returns:
        The number; None for inf, nan and None.

    Example:
        >>> json_number(1.5), json_number(float("inf"))
        (1.5, None)
    """
    return value if value is not None and math.isfinite(value) else None
