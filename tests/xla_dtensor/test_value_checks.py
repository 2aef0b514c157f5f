"""Compiled steps with an index out of range: NaN, and under `check_values` an error of the call."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import xla_dtensor as xd
from tests.xla_dtensor.test_index_range import CALLS, VALUES, on_mesh, table
from xla_dtensor.errors import IndexRangeError

pytestmark = pytest.mark.only_on("jax")
ENDS = {name: torch.tensor(ends) for name, (_, ends) in CALLS.items()}


def every_call(x: Any, indices: Any) -> Any:
    return {name: CALLS[name][0](x, index) for name, index in indices.items()}


def every_value(x: Any, values: Any) -> Any:
    return {name: VALUES[name][0](x, values[name]) for name in VALUES}


def given(indices: Any, mesh: xd.DeviceMesh) -> Any:
    return {name: on_mesh(index, mesh) for name, index in indices.items()}


def wrong_ones(name: str) -> list[int]:
    low, high = CALLS[name][1]
    return [low - 1, high + 1]


def test_what_is_written_and_read_is_nan(mesh: xd.DeviceMesh) -> None:
    step: Any = xd.compile(every_call)
    found, expected = step(table(mesh), given(ENDS, mesh)), every_call(table(None), ENDS)
    for name, value in found.items():
        torch.testing.assert_close(value.full_tensor().cpu(), expected[name])
    for which in (0, 1):
        wrong = {
            name: torch.tensor([ends[0], wrong_ones(name)[which]]) for name, ends in ENDS.items()
        }
        for name, value in step(table(mesh), given(wrong, mesh)).items():
            is_nan = value.full_tensor().cpu().isnan()
            assert is_nan.any(), name
            assert value.ndim == 0 or not is_nan.all(), name
    assert step.stats()["traces"] == 1


def test_each_op_is_checked(mesh: xd.DeviceMesh) -> None:
    step: Any = xd.compile(every_call)
    with xd.check_values():
        found, expected = step(table(mesh), given(ENDS, mesh)), every_call(table(None), ENDS)
        for name, value in found.items():
            torch.testing.assert_close(value.full_tensor().cpu(), expected[name])
        for name, (low, _) in ENDS.items():
            for wrong in wrong_ones(name):
                indices = {**ENDS, name: torch.tensor([int(low), wrong])}
                with pytest.raises(IndexRangeError, match=f"the index {wrong} for ") as error:
                    step(table(mesh), given(indices, mesh))
                assert "tests/xla_dtensor/test_index_range.py:" in str(error.value)
    assert step.stats()["traces"] == 1


def test_each_value_is_checked(mesh: xd.DeviceMesh) -> None:
    """Whole numbers too, which have no NaN."""
    step: Any = xd.compile(every_value)
    right = {name: torch.tensor(case[1]) for name, case in VALUES.items()}
    with xd.check_values():
        found, expected = step(table(mesh), given(right, mesh)), every_value(table(None), right)
        for name, value in found.items():
            torch.testing.assert_close(value.full_tensor().cpu(), expected[name])
        for name, (_, _, wrong, text) in VALUES.items():
            values = {**right, name: torch.tensor(wrong)}
            with pytest.raises(IndexRangeError, match=text):
                step(table(mesh), given(values, mesh))


class Lookup(nn.Module):
    """A layer that reads a row of a table."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.ones(5, 4))

    def forward(self, x: Any, index: Any) -> Any:
        return x * F.embedding(index, self.rows)


@pytest.mark.parametrize("how", ["scanned", "checkpointed"])
def test_a_layer_that_trains(mesh: xd.DeviceMesh, how: str) -> None:
    model: Any = xd.distribute_module(nn.ModuleList(Lookup() for _ in range(3)), mesh)
    layers: Any = xd.scan_layers(model) if how == "scanned" else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)

    @xd.compile
    def step(x: Any, index: Any) -> Any:
        optimizer.zero_grad()
        if how == "scanned":
            out = layers(x, index)
        else:
            out = x
            for layer in layers:
                out = checkpoint(layer, out, index, use_reentrant=False)
        out.sum().backward()
        optimizer.step()
        return out

    x, index = on_mesh(torch.ones(2, 4), mesh), torch.tensor([0, 4])
    with xd.check_values():
        for _ in range(3):
            step(x, on_mesh(index, mesh))
        traces = step.stats()["traces"]
        with pytest.raises(IndexRangeError, match="the index 5 for an embedding of 5 rows"):
            step(x, on_mesh(index + 1, mesh))
    assert step.stats()["traces"] == traces


def test_the_local_tensors_of_devices(mesh: xd.DeviceMesh) -> None:
    """Two rows on each of four devices, and the whole index on all."""

    @xd.compile
    def step(x: Any, index: Any) -> Any:
        return xd.DTensor.from_local(x.to_local()[index.to_local()], mesh, x.placements)

    x = xd.distribute_tensor(torch.arange(8.0), mesh, ("tp",))
    with xd.check_values():
        found = step(x, on_mesh(torch.tensor([1, 0]), mesh)).full_tensor().cpu()
        assert found.tolist() == [1, 0, 3, 2, 5, 4, 7, 6]
        with pytest.raises(
            IndexRangeError, match=r"^aten::index was called .* the index 2 for"
        ) as e:
            step(x, on_mesh(torch.tensor([1, 2]), mesh))
        assert re.search(rf"{re.escape(__file__)}:\d+\.$", str(e.value))


def test_programs_with_checks_serve_no_other_call(mesh: xd.DeviceMesh) -> None:
    step: Any = xd.compile(lambda x, i: x[i])
    index = on_mesh(torch.tensor([1, 8]), mesh)
    with xd.check_values():
        with pytest.raises(IndexRangeError):
            step(table(mesh), index)
        checked = step.hlo()
    step(table(mesh), index)
    assert step.stats()["traces"] == 2
    assert checked.count("pred[] ") > step.hlo().count("pred[] ") == 0
