"""Reading placements, by attribute, and the records they are read into."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from mesh_utils import Mesh
from xla_dtensor.core import LayoutError, Partial, Replicate, Shard, StridedShard
from xla_dtensor.core.placements import read_placements

MESH = Mesh.arange((2, 4), ("dp", "tp"))


class TorchLike:
    """The questions of torch's Placement."""

    def is_shard(self, dim: int | None = None) -> bool:
        return isinstance(self, OldShard | NewShard)

    def is_replicate(self) -> bool:
        return isinstance(self, OtherReplicate)

    def is_partial(self, reduce_op: str | None = None) -> bool:
        return isinstance(self, OtherPartial)


@dataclass
class OldShard(TorchLike):
    dim: Any


@dataclass
class OldStrided(OldShard):
    """torch 2.9: a Shard, and is_shard() says so."""

    split_factor: Any


@dataclass
class NewShard(TorchLike):
    dim: Any


@dataclass
class NewStrided(TorchLike):
    """torch 2.13: not a Shard."""

    dim: Any
    split_factor: Any


@dataclass
class OtherReplicate(TorchLike): ...


@dataclass
class OtherPartial(TorchLike):
    reduce_op: Any


@dataclass
class Ragged(TorchLike): ...


@pytest.mark.parametrize(
    ("placement", "record"),
    [
        (OldShard(1), Shard(1)),
        (NewShard(-1), Shard(1)),
        (OldStrided(0, 4), StridedShard(0, 4)),
        (NewStrided(-2, 4), StridedShard(0, 4)),
        (OldStrided(0, 1), Shard(0)),
        (OtherReplicate(), Replicate()),
        (OtherPartial("avg"), Partial("avg")),
        (Shard(-1), Shard(1)),
        (StridedShard(0, 1), Shard(0)),
        (StridedShard(1, 2), StridedShard(1, 2)),
        (Partial("max"), Partial("max")),
    ],
    ids=repr,
)
def test_reads(placement: object, record: object) -> None:
    assert read_placements([placement, Replicate()], 2, MESH) == (record, Replicate())


def test_every_dim_of_a_high_rank() -> None:
    assert read_placements([Shard(20), Shard(-1)], 30, MESH) == (Shard(20), Shard(29))


ASKED = "placements[1] = {} was asked for on axis 'tp' (size 4), for a tensor of rank 2. "


@pytest.mark.parametrize(
    ("placement", "message"),
    [
        (Shard(2), "Its dim=2 is out of range. Pass a dim from -2 to 1."),
        (Shard(-3), "Its dim=-3 is out of range. Pass a dim from -2 to 1."),
        (StridedShard(5, 2), "Its dim=5 is out of range. Pass a dim from -2 to 1."),
        (OldShard("x"), "Its dim is no integer. Pass the tensor dim as an int."),
        (OldShard(True), "Its dim is no integer. Pass the tensor dim as an int."),
        (
            StridedShard(0, 0),
            "Its split_factor is no positive integer. "
            "Pass the number of pieces that lie outside this axis, 1 or more.",
        ),
        (
            NewStrided(0, None),
            "Its split_factor is no positive integer. "
            "Pass the number of pieces that lie outside this axis, 1 or more.",
        ),
        (OtherPartial(None), "Its reduce_op=None is no word. Pass e.g. Partial('sum')."),
        (
            "tp",
            "An object of type str is none of PyTorch's placements. "
            "Pass Shard(dim), Replicate() or Partial(reduce_op).",
        ),
        (
            Ragged(),
            "An object of type Ragged is none of PyTorch's placements. "
            "Pass Shard(dim), Replicate() or Partial(reduce_op).",
        ),
        (
            Replicate,
            "An object of type type is none of PyTorch's placements. "
            "Pass Shard(dim), Replicate() or Partial(reduce_op).",
        ),
        (
            None,
            "An object of type NoneType is none of PyTorch's placements. "
            "Pass Shard(dim), Replicate() or Partial(reduce_op).",
        ),
    ],
    ids=[
        "dim_too_large",
        "dim_too_small",
        "strided_dim_too_large",
        "dim_of_letters",
        "dim_of_type_bool",
        "split_factor_zero",
        "split_factor_none",
        "reduce_op_none",
        "text",
        "unknown_placement",
        "class_instead_of_object",
        "none",
    ],
)
def test_refuses(placement: object, message: str) -> None:
    with pytest.raises(LayoutError) as error:
        read_placements([Replicate(), placement], 2, MESH)
    assert str(error.value) == ASKED.format(repr(placement)) + message


def test_refuses_a_shard_of_a_scalar() -> None:
    with pytest.raises(LayoutError) as error:
        read_placements([Shard(0), Replicate()], 0, MESH)
    assert str(error.value) == (
        "placements[0] = Shard(dim=0) was asked for on axis 'dp' (size 2), for a tensor of rank 0. "
        "Its dim=0 is out of range. Pass Replicate()."
    )


@pytest.mark.parametrize("count", [0, 1, 3])
def test_refuses_another_number_of_placements(count: int) -> None:
    with pytest.raises(LayoutError) as error:
        read_placements([Replicate()] * count, 2, MESH)
    assert str(error.value) == (
        f"placements=[{', '.join(['Replicate()'] * count)}] were asked for on a mesh with axes "
        f"dp=2, tp=4. That is {count} placements for 2 axes. Pass one placement per mesh axis."
    )


def test_records_answer_as_torch_placements_do() -> None:
    assert Shard(1).is_shard()
    assert Shard(1).is_shard(1)
    assert not Shard(1).is_shard(0)
    assert StridedShard(1, 2).is_shard(1)
    assert Partial().is_partial("sum")
    assert not Partial().is_partial("avg")
    assert Replicate().is_replicate()
    kinds = [Shard(0), StridedShard(0, 2), Replicate(), Partial()]
    answers = [(p.is_shard(), p.is_replicate(), p.is_partial()) for p in kinds]
    assert [sum(answer) for answer in answers] == [1, 1, 1, 1]


def test_strided_is_not_shard_and_hashes_agree() -> None:
    assert StridedShard(0, 3) != Shard(0)
    assert len({Shard(0), Shard(0), StridedShard(0, 3), StridedShard(0, 3)}) == 2
