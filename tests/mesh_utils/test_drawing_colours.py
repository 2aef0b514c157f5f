"""The colours of drawings: they stand out from both papers, and differ for every kind of eye."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from mesh_utils.draw import AXIS_COLOURS, DARK, LIGHT, UNUSED_COLOUR

_SIGHTS = {  # Machado, Oliveira and Fernandes 2009, severity 1: protan, deutan, tritan
    "full": "1 0 0 0 1 0 0 0 1",
    "protan": "0.152286 1.052583 -0.204868 0.114503 0.786281 0.099216 -0.003882 -0.048116 1.051998",
    "deutan": "0.367322 0.860646 -0.227968 0.280085 0.672501 0.047413 -0.011820 0.042940 0.968881",
    "tritan": "1.255528 -0.076749 -0.178779 -0.078411 0.930809 0.147602 0.004733 0.691367 0.303900",
}


def linear(colour: str) -> np.ndarray:
    parts = np.array([int(colour[at : at + 2], 16) for at in (1, 3, 5)]) / 255
    return np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)


def lab(light: np.ndarray) -> np.ndarray:
    to_xyz = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    scaled = np.array(to_xyz) @ np.clip(light, 0, 1) / np.array([0.9505, 1, 1.089])
    f = np.where(scaled > 0.008856, np.cbrt(scaled), 7.787 * scaled + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def contrast(one: str, other: str) -> float:
    weights = np.array([0.2126, 0.7152, 0.0722])
    low, high = sorted([float(linear(one) @ weights), float(linear(other) @ weights)])
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("paper", [LIGHT["paper"], DARK["paper"]])
def test_colours_stand_out(paper: str) -> None:
    assert all(contrast(colour, paper) >= 3 for colour in AXIS_COLOURS)
    assert contrast(UNUSED_COLOUR, paper) > 2
    screen = LIGHT if paper == LIGHT["paper"] else DARK
    assert contrast(screen["ink"], paper) > 7
    assert contrast(screen["ink"], screen["chip"]) > 7


@pytest.mark.parametrize("sight", _SIGHTS)
def test_colours_differ_for_every_eye(sight: str) -> None:
    matrix = np.array(_SIGHTS[sight].split(), float).reshape(3, 3)
    seen = [lab(matrix @ linear(colour)) for colour in AXIS_COLOURS]
    for (a, first), (b, second) in itertools.combinations(enumerate(seen), 2):
        needed = 40 if max(a, b) < 4 else 20
        assert np.linalg.norm(first - second) > needed, (AXIS_COLOURS[a], AXIS_COLOURS[b])
