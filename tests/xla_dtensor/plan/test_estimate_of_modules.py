"""The quick estimate of a module equals what devices hold of it once it is really distributed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from xla_dtensor.plan.estimate import (
    OptimizerState,
    module_parameters,
    quick_estimate,
    tied_parameters,
)

if TYPE_CHECKING:
    from xla_dtensor import DeviceMesh
    from xla_dtensor.runtimes import Runtime

RULES = {
    "0.weight": ["tp", "dp"],
    "0.bias": ["tp"],
    "2.weight": [None, ["dp", "tp"]],
    "2.bias": [None],
}


def made() -> nn.Module:
    # 10 rows over tp=4 and 7 columns over dp=2: uneven.
    return nn.Sequential(nn.Linear(7, 10), nn.ReLU(), nn.Linear(10, 3))


def bytes_on_first_device(tensors: Any) -> int:
    return sum(tensor.addressable_shards()[0].num_bytes_on_device for tensor in tensors)


def test_bytes_are_what_devices_hold(runtime: Runtime, mesh: DeviceMesh) -> None:
    import xla_dtensor as xd

    expected = quick_estimate(
        module_parameters(made()), RULES, mesh.value, optimizer=OptimizerState("Adam", ("", ""))
    )
    model = xd.shard_module(made(), mesh, RULES)
    assert bytes_on_first_device(model.parameters()) == expected.bytes_of("parameter")
    # As torch.optim makes them.
    moments = [torch.zeros_like(value) for value in model.parameters() for _ in range(2)]
    assert bytes_on_first_device(moments) == expected.bytes_of("optimizer state")


def test_tied_parameters() -> None:
    with torch.device("meta"):
        model: Any = nn.ModuleDict(
            {"a": nn.Linear(4, 4, bias=False), "b": nn.Linear(4, 4, bias=False)}
        )
    model["b"].weight = model["a"].weight
    assert tied_parameters(model) == {"b.weight": "a.weight"}
    assert [name for name, *_ in module_parameters(model)] == ["a.weight", "b.weight"]
    rules, ties = {"a.weight": ["x", None]}, tied_parameters(model)
    found = quick_estimate(module_parameters(model), rules, {"x": 2}, same_as=ties)
    assert found.bytes_of("parameter") == 32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_dtypes(dtype: torch.dtype) -> None:
    model = nn.Linear(4, 4, bias=False, dtype=dtype, device="meta")
    found = quick_estimate(module_parameters(model), {"weight": [None, None]}, {"x": 2})
    assert found.bytes_of("parameter") == 16 * dtype.itemsize
