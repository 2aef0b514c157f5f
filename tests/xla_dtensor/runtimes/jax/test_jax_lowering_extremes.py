"""A NaN that one device has is a NaN everywhere, as in PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

import xla_dtensor as xd

pytestmark = pytest.mark.only_on("jax")

OPS: dict[str, Callable[[Any], Any]] = {
    "amax": lambda x: x.amax(0),
    "amin": lambda x: x.amin(0),
    "max": lambda x: x.max(),
    "min": lambda x: x.min(),
    "max over a dim": lambda x: x.max(0).values,
    "argmax": lambda x: x.argmax(),
    "inf norm": lambda x: torch.linalg.vector_norm(x, float("inf")),
    "logsumexp": lambda x: x.logsumexp(0),
    "softmax": lambda x: x.softmax(0),
}
NAN = float("nan")
DATA = ([2.0, 6.0, 10.0, NAN], [NAN, -1.0, 3.0, 2.0], [-0.5, -7.0, float("-inf"), -2.0])


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_over_a_sharded_dim(mesh: xd.DeviceMesh, name: str, dtype: torch.dtype) -> None:
    for data in DATA:
        x = torch.tensor(data, dtype=dtype)
        found = OPS[name](xd.distribute_tensor(x, mesh, [Replicate(), Shard(0)]))
        torch.testing.assert_close(found.full_tensor().cpu(), OPS[name](x), equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_in_half_precision_are_torchs_bit_by_bit(mesh: xd.DeviceMesh, dtype: Any) -> None:
    """Any two numbers there are, and what lies near a tie of the rounding."""
    draw = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**15), 2**15, (2, 1 << 18), generator=draw, dtype=torch.int16)
    near = bits[0] ^ torch.randint(0, 64, bits[0].shape, generator=draw, dtype=torch.int16)
    x = torch.cat([bits[0], bits[0]]).view(dtype)
    y = torch.cat([bits[1], near]).view(dtype)
    # XLA on CPU takes what is smaller than float32's normal numbers for 0, whatever the dtype.
    normal = torch.stack([x, y, x + y]).abs().double() >= 2.0**-125
    x, y = (torch.where(normal.all(0), one, torch.ones_like(one)) for one in (x, y))
    rows = [Shard(0), Replicate()]
    on_mesh = [xd.distribute_tensor(one, mesh, rows) for one in (x, y)]
    for found in (on_mesh[0] + on_mesh[1], xd.compile(torch.add)(*on_mesh)):
        torch.testing.assert_close(found.full_tensor(), x + y, rtol=0, atol=0, equal_nan=True)
