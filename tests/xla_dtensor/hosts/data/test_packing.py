"""Sequences packed into batches of one shape: nothing is lost, and it resumes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from xla_dtensor import PackedBatches, pack_sequences
from xla_dtensor.errors import DataError


def unpacked(batch: dict[str, torch.Tensor]) -> list[list[int]]:
    """The sequences of a batch, read by its segment ids."""
    found: list[list[int]] = []
    for tokens, segments in zip(batch["tokens"], batch["segment_ids"], strict=True):
        for number in range(1, int(segments.max()) + 1):
            found.append(tokens[segments == number].tolist())
    return found


def sequences(lengths: list[int]) -> list[torch.Tensor]:
    starts = torch.tensor([0, *lengths]).cumsum(0).tolist()
    return [torch.arange(a, a + n) for a, n in zip(starts, lengths, strict=False)]


def test_one_batch() -> None:
    batch, left = pack_sequences(sequences([3, 4, 2, 1, 4]), 2, 6, pad_value=-1)
    assert batch["tokens"].tolist() == [[0, 1, 2, 7, 8, 9], [3, 4, 5, 6, -1, -1]]
    assert batch["segment_ids"].tolist() == [[1, 1, 1, 2, 2, 3], [1, 1, 1, 1, 0, 0]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 0, 0]]
    assert [each.tolist() for each in left] == [[10, 11, 12, 13]]


def test_fields_of_several_dtypes_and_dims() -> None:
    one = {"ids": torch.arange(3), "image": torch.ones(3, 2), "labels": torch.zeros(3).long()}
    batch, left = pack_sequences([one, one], 1, 4, pad_value={"labels": -100})
    assert batch["image"].shape == (1, 4, 2)
    assert batch["labels"].tolist() == [[0, 0, 0, -100]]
    assert left[0].keys() == one.keys()


lengths = st.lists(st.integers(0, 7), max_size=30)


@settings(deadline=None)
@given(lengths, st.integers(1, 3), st.integers(0, 4), st.integers(1, 5))
def test_nothing_is_lost(drawn: list[int], rows: int, lookahead: int, group: int) -> None:
    given_ = sequences(drawn)
    lists = [given_[i : i + group] for i in range(0, len(given_), group)]
    for source in (given_, lists):
        batches = list(PackedBatches(source, rows, 7, lookahead=lookahead))
        found = sorted(s for batch in batches for s in unpacked(batch) if s)
        assert found == sorted(s.tolist() for s in given_ if len(s))
        assert {batch["tokens"].shape for batch in batches} <= {(rows, 7)}
        for batch in batches:
            real = batch["segment_ids"] > 0
            assert not batch["position_ids"][~real].any()


@settings(deadline=None)
@given(lengths.filter(any), st.integers(0, 4))
def test_it_goes_on_where_it_was(drawn: list[int], taken: int) -> None:
    def packed() -> PackedBatches:
        return PackedBatches(sequences(drawn), 2, 7, lookahead=2)

    everything = [batch["tokens"].tolist() for batch in packed()]
    begun = packed()
    epoch = iter(begun)
    first = [batch["tokens"].tolist() for _, batch in zip(range(taken), epoch, strict=False)]
    rest = packed()
    rest.load_state_dict(begun.state_dict())
    assert first + [batch["tokens"].tolist() for batch in rest] == everything


def test_long_sequences() -> None:
    (long,) = sequences([9])
    with pytest.raises(
        DataError, match=r"of 9 tokens was to be packed into rows of 4\. It does no"
    ):
        pack_sequences([long], 2, 4)
    cut, _ = pack_sequences([long], 3, 4, too_long="cut")
    assert unpacked(cut) == [[0, 1, 2, 3]]
    split, _ = pack_sequences([long], 3, 4, too_long="split")
    assert sorted(unpacked(split)) == [[0, 1, 2, 3], [4, 5, 6, 7], [8]]


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ([], "called without a sequence for 1 rows of 4"),
        ([{"a": torch.ones(2), "b": torch.ones(3)}], "with the lengths {'a': (2,), 'b': (3,)} was"),
        ([{"segment_ids": torch.ones(2)}], "segment_ids and position_ids are made here"),
        ([torch.ones(2), torch.ones(2).int()], "A batch has one set of fields, with one dtype"),
        ([torch.tensor(1)], "with the lengths {'tokens': ()} was to be packed"),
    ],
)
def test_refused(wrong: Any, text: str) -> None:
    with pytest.raises(DataError) as raised:
        pack_sequences(wrong, 1, 4)
    assert text in str(raised.value)
