"""Bytes, seconds and shares in words."""

from __future__ import annotations

import pytest

from xla_dtensor.report.texts import bytes_text, seconds_text, share_text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (0, "0 B"),
        (999, "999 B"),
        (1000, "0.98 KiB"),
        (1024, "1.00 KiB"),
        (10 * 1024, "10.0 KiB"),
        (-3 * 2**30, "-3.00 GiB"),
        (15.75 * 2**30, "15.8 GiB"),
        (999.6 * 2**30, "0.98 TiB"),
        (2.0**80, "1,048,576 EiB"),
    ],
)
def test_bytes(value: float | None, text: str) -> None:
    assert bytes_text(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (0, "0 s"),
        (1e-7, "100 ns"),
        (1e-6, "1.00 us"),
        (0.0123, "12.3 ms"),
        (0.99999, "1.00 s"),
        (-2.5, "-2.50 s"),
        (119.4, "119 s"),
        (121.9, "2 min 1 s"),
        (9000, "2 h 30 min"),
        (float("inf"), "+inf"),
        (float("nan"), "-"),
    ],
)
def test_seconds(value: float | None, text: str) -> None:
    assert seconds_text(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (0, "0 %"), (1, "100 %"), (0.99999, "99.9 %"), (0.5, "50.0 %"), (0.001, "0.1 %")],
)
def test_shares(value: float | None, text: str) -> None:
    assert share_text(value) == text
