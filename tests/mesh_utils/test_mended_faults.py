"""Faults that meshes once had, or that were found while they were built: a row for each.

A row returns what is found and what it has to be. See tools/mutants/mutants.yaml.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import yaml

from mesh_utils import (
    HybridMesh,
    JobConfig,
    Network,
    Span,
    Topology,
    assign,
    mixed_radix,
    synthetic_devices,
)
from mesh_utils.launch import render

ROWS: list[Callable[[], tuple[Any, Any]]] = []


def row(function: Callable[[], tuple[Any, Any]]) -> Callable[[], tuple[Any, Any]]:
    """Register a row."""
    ROWS.append(function)
    return function


@pytest.mark.parametrize("function", ROWS, ids=lambda function: function.__name__)
def test_row(function: Callable[[], tuple[Any, Any]]) -> None:
    found, expected = function()
    assert found == expected


@row
def the_slow_network_is_the_outer_part_of_an_axis() -> tuple[Any, Any]:
    devices = synthetic_devices((2, 2), num_slices=2, kind="TPU v4")
    shapes: dict[str, Any] = {"ici_mesh_shape": (2, 2), "dcn_mesh_shape": (2, 1)}
    mesh = HybridMesh(devices, axis_names=("dp", "tp"), order="row-major", **shapes)
    return (
        [mesh["dp"].device_ids.tolist(), mesh["tp"].device_ids.tolist()],
        [[100000, 100002, 200000, 200002], [100000, 100001]],
    )


@row
def a_walk_whose_digits_overlap_is_no_order() -> tuple[Any, Any]:
    walk = np.array([0, 1, 2, 2, 3, 4])  # steps of 1, three of them, then steps of 2
    return mixed_radix(walk), None


@row
def a_short_dim_of_a_twisted_torus_is_a_line() -> tuple[Any, Any]:
    network = Network.of(Topology.parse("v5p:4x4x8_twisted"))
    plain = Network.of(Topology.parse("v5p:4x4x8"))
    spans = [Span((4, 1, 1)), Span((1, 1, 8))]
    return (
        [[each.strategy(span) for span in spans] for each in (network, plain)],
        [["line", "ring"], ["ring", "ring"]],
    )


@row
def an_axis_that_xla_gathers_over_all_dims_at_once_is_in_rows() -> tuple[Any, Any]:
    made = assign(Topology.parse("v5p:4x4x8"), (16, 8), weights=(2, 1))
    first = made.mesh[made.mesh.axis_names[0]].device_ids.tolist()
    return first == sorted(first), True


@row
def a_job_whose_name_is_a_word_of_yaml() -> tuple[Any, Any]:
    names = []
    for name in ("no", "null", "llama"):
        axes = {"dp": {"ici": -1}}
        job = JobConfig.parse({"name": name, "accelerator": "v5e:4x4", "axes": axes})
        text = render(job, "jobset", command=["python", "train.py"], image="repository/train:1")
        names.append(yaml.safe_load(text)["metadata"]["name"])
    return names, ["no", "null", "llama"]
