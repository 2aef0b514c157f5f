"""Ops that sort, count, scatter and reduce segments against plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.xla_dtensor.runtimes.jax.lowering_checks import (
    check_gradients,
    check_values,
    per_op,
    sharded,
)
from tests.xla_dtensor.runtimes.lowering_cases_counting import (
    ALL,
    BY_VALUES,
)
from xla_dtensor import DeviceMesh
from xla_dtensor import compile as xla_compile
from xla_dtensor.errors import CompileError, UnsupportedOpError

pytestmark = [pytest.mark.only_on("jax"), pytest.mark.usefixtures("runtime")]


@pytest.mark.thorough
@per_op(ALL)
def test_values(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch, op: Any) -> None:
    check_values(mesh, monkeypatch, op, ALL[op])


@pytest.mark.thorough
@per_op(ALL)
def test_gradients(mesh: DeviceMesh, op: Any) -> None:
    check_gradients(mesh, op, ALL[op])


@per_op(BY_VALUES)
def test_a_step_refuses_shapes_that_depend_on_values(mesh: DeviceMesh, op: Any) -> None:
    given = BY_VALUES[op][0].mapped(sharded(mesh))
    with pytest.raises(CompileError, match="the shape of whose result depends on it"):
        xla_compile(lambda: given.run(op))()


def test_repeats_of_a_known_total_are_compiled(mesh: DeviceMesh) -> None:
    x, repeats = torch.arange(4.0), torch.tensor([2, 0, 3, 1])
    ours, counts = sharded(mesh)(x), sharded(mesh)(repeats)
    step = xla_compile(lambda: ours.repeat_interleave(counts, output_size=6))
    assert step().cpu().tolist() == x.repeat_interleave(repeats).tolist()


def test_boolean_masks_choose_elements(mesh: DeviceMesh) -> None:
    x = torch.arange(30.0).reshape(5, 6) - 15
    ours = sharded(mesh)(x).requires_grad_()
    found = ours[ours > 0]
    assert found.cpu().tolist() == x[x > 0].tolist()
    found.sum().backward()
    assert ours.grad is not None
    assert torch.equal(ours.grad.cpu(), (x > 0).float())
    assert torch.equal(ours[sharded(mesh)(x[:, 0] > -9)].cpu(), x[x[:, 0] > -9])
    assert torch.equal(ours[:, torch.tensor([1, 0, 1, 1, 0, 1]).bool()].cpu(), x[:, [0, 2, 3, 5]])


def test_elements_under_a_mask_of_a_step_and_bytes_are_masks(mesh: DeviceMesh) -> None:
    x, mask = sharded(mesh)(torch.arange(4)), sharded(mesh)(torch.arange(4) > 1)
    assert xla_compile(lambda: x[mask])().cpu().tolist() == [2, 3]
    with pytest.raises(CompileError, match="used as a mask"):
        xla_compile(lambda: x[mask.to(torch.uint8)])()
    assert x[mask.to(torch.uint8)].cpu().tolist() == [2, 3]


def test_elements_by_values_are_replicated(mesh: DeviceMesh) -> None:
    x = sharded(mesh)(torch.arange(24).reshape(4, 6) % 5)
    made: list[Any] = [x.nonzero(), torch.masked_select(x, x > 1), x.unique(), torch.argwhere(x)]
    for found in made:
        assert all(p.is_replicate() for p in found.placements)
        assert len({shard.device_id for shard in found.addressable_shards()}) == 8


@pytest.mark.parametrize(
    ("shape", "order"), [((5, 6), (0, 1)), ((5, 6), (1, 0)), ((4, 3, 2), (2, 0, 1))]
)
def test_resizing_keeps_the_elements(
    mesh: DeviceMesh, shape: tuple[int, ...], order: tuple[int, ...]
) -> None:
    def made() -> torch.Tensor:
        return torch.arange(torch.Size(shape).numel()).reshape(shape)

    ours, plain = sharded(mesh)(made()).permute(order).clone(), made().permute(order).clone()
    assert ours.stride() == plain.stride()
    assert ours.resize_(2, plain.numel() // 2) is ours
    plain.resize_(2, plain.numel() // 2)
    assert ours.shape == plain.shape
    assert torch.equal(ours.cpu(), plain)
    assert torch.equal(ours.resize_as_(sharded(mesh)(made())).cpu(), plain.resize_(shape))


def test_resizing_to_another_number_of_elements_is_refused(mesh: DeviceMesh) -> None:
    with pytest.raises(UnsupportedOpError, match=r"size=\(7,\).*shape=\(2, 3\)"):
        sharded(mesh)(torch.ones(2, 3)).resize_(7)


@pytest.mark.parametrize("offset", [0, 1])
def test_strided_scatter(mesh: DeviceMesh, offset: int) -> None:
    x, new = torch.zeros(5, 6), torch.arange(6.0).reshape(2, 3)
    expected = x.as_strided_scatter(new, (2, 3), (7, 2), offset)
    found = sharded(mesh)(x).as_strided_scatter(sharded(mesh)(new), (2, 3), (7, 2), offset)
    assert torch.equal(found.cpu(), expected)
