"""Products of groups of rows: all four forms, values and gradients, against PyTorch on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

import xla_dtensor as xd

pytestmark = pytest.mark.only_on("jax")

# Sizes of 8: PyTorch wants rows that are a multiple of 16 bytes long.
FORMS: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "groups of rows": ((32, 8), (4, 8, 16)),
    "groups of columns": ((4, 16, 8), (8, 32)),
    "groups of the contracted dim": ((8, 32), (32, 16)),
    "no groups": ((4, 16, 8), (4, 8, 24)),
}


def product(a: Any, b: Any, offs: torch.Tensor | None) -> Any:
    return torch.ops.aten._grouped_mm(a, b, offs)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("placements", [(Shard(0), Replicate()), (Replicate(), Shard(1))], ids=str)
def test_equals_plain_pytorch(mesh: xd.DeviceMesh, form: str, placements: Any) -> None:
    torch.manual_seed(0)
    shapes = FORMS[form]
    ends = None if form == "no groups" else torch.tensor([8, 8, 24, 32], dtype=torch.int32)
    plain: list[Any] = [torch.randn(shape).requires_grad_() for shape in shapes]
    wanted = _by_hand(plain[0], plain[1], ends)
    wanted.square().sum().backward()
    given: list[Any] = [
        xd.distribute_tensor(t.detach(), mesh, list(placements)).requires_grad_() for t in plain
    ]
    found = product(given[0], given[1], ends)
    torch.testing.assert_close(found.full_tensor().cpu(), wanted.detach())
    if form in ("groups of rows", "no groups"):  # PyTorch has gradients of these two.
        found.square().sum().backward()
        for ours, theirs in zip(given, plain, strict=True):
            torch.testing.assert_close(ours.grad.full_tensor().cpu(), theirs.grad)


def _by_hand(a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor | None) -> torch.Tensor:
    if ends is None:
        return torch.bmm(a, b)
    starts = [0, *ends.tolist()[:-1]]
    groups = [slice(start, end) for start, end in zip(starts, ends.tolist(), strict=True)]
    if a.ndim == 2 and b.ndim == 3:
        return torch.cat([a[rows] @ b[i] for i, rows in enumerate(groups)])
    if a.ndim == 3:
        return torch.cat([a[i] @ b[:, columns] for i, columns in enumerate(groups)], dim=1)
    return torch.stack([a[:, terms] @ b[terms] for terms in groups])


def test_rows_behind_the_last_group_are_zero(mesh: xd.DeviceMesh) -> None:
    a, b = torch.ones(32, 8), torch.ones(2, 8, 8)
    ends = torch.tensor([8, 16], dtype=torch.int32)
    given = [xd.distribute_tensor(t, mesh) for t in (a, b)]
    found = product(given[0], given[1], ends).full_tensor().cpu()
    assert found[:16].eq(8).all()
    assert found[16:].eq(0).all()
