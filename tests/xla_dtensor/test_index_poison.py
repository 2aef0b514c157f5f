"""On torch_xla an index out of range, on the mesh, reads and writes NaN, eagerly too."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import xla_dtensor as xd
from tests.xla_dtensor.test_index_range import on_mesh, table
from tests.xla_dtensor.test_value_checks import ENDS, every_call, given, wrong_ones

pytestmark = pytest.mark.only_on("torch_xla")
# These run on the host, which no compiled step does, and raise there.
ON_HOST = ("max_unpool2d", "multi_margin_loss", "multilabel_margin_loss")
READS = ("x[i]", "x[:, i]", "index_select", "gather", "take", "embedding")


@pytest.mark.parametrize(
    "compiled",
    [
        pytest.param(False, marks=pytest.mark.thorough, id="eager"),
        pytest.param(True, id="compiled"),
    ],
)
def test_every_op(compiled: bool, mesh: xd.DeviceMesh) -> None:
    call: Any = xd.compile(every_call) if compiled else every_call
    ends_of = {name: ends for name, ends in ENDS.items() if name not in ON_HOST}
    expected = every_call(table(None), ends_of)
    for name, value in call(table(mesh), given(ends_of, mesh)).items():
        torch.testing.assert_close(value.full_tensor().cpu(), expected[name], msg=name)
    for which in (0, 1):
        wrong = {
            name: torch.tensor([ends[0], wrong_ones(name)[which]]) for name, ends in ends_of.items()
        }
        for name, value in call(table(mesh), given(wrong, mesh)).items():
            is_nan = value.full_tensor().cpu().isnan()
            assert is_nan.any(), name
            assert is_nan.all() == (name not in READS), name
            assert name not in READS or is_nan.sum() * 2 == is_nan.numel(), name


def test_in_place_and_whole_numbers(mesh: xd.DeviceMesh) -> None:
    x, index = table(mesh), on_mesh(torch.tensor([7, 8]), mesh)
    x[index] = 1.0
    assert x.full_tensor().cpu().isnan().all()
    numbers: Any = xd.distribute_tensor(torch.arange(8), mesh, ("dp",))
    assert numbers[index].full_tensor().cpu().tolist() == [7, torch.iinfo(torch.int64).min]
    assert (numbers > 2)[index].full_tensor().cpu().tolist() == [True, False]
    assert numbers.index_fill(0, index, 9).full_tensor().cpu().tolist() == [*range(7), 9]


@pytest.mark.parametrize("dims", [(0,), (1,), (2,), (0, 1), (1, 2), (0, 2)])
def test_where_the_indexed_dims_stand(dims: tuple[int, ...], mesh: xd.DeviceMesh) -> None:
    x = torch.sin(torch.arange(24.0)).reshape(2, 3, 4)
    indices: list[Any] = [slice(None)] * 3
    # To what PyTorch reads there are NaN beyond the indexed dims.
    beyond = x
    for dim, index in zip(
        dims, (torch.tensor([[1, 5], [0, 1]]), torch.tensor([1, 0])), strict=False
    ):
        indices[dim] = index
        more = [6 if d == dim else size for d, size in enumerate(beyond.shape)]
        wider = torch.full(more, torch.nan)
        wider[tuple(map(slice, beyond.shape))] = beyond
        beyond = wider
    put = [on_mesh(i, mesh) if isinstance(i, torch.Tensor) else i for i in indices]
    found: Any = xd.distribute_tensor(x, mesh, ("dp", None, None))[tuple(put)]
    torch.testing.assert_close(found.full_tensor().cpu(), beyond[tuple(indices)], equal_nan=True)
