"""The example corpus is deterministic, and targets are the inputs shifted by one."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from examples.corpus import SEPARATOR, Corpus
from examples.language_model import SEPARATOR as MODEL_SEPARATOR
from examples.language_model import VOCABULARY_SIZE


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return Corpus.from_standard_library(max_tokens=50_000)


def test_documents_are_joined_by_the_separator() -> None:
    corpus = Corpus.from_documents([b"ab", b"", b"\xff"])
    assert corpus.tokens.tolist() == [97, 98, SEPARATOR, SEPARATOR, 255, SEPARATOR]


def test_separator_is_the_models() -> None:
    assert SEPARATOR == MODEL_SEPARATOR == VOCABULARY_SIZE - 1


@pytest.mark.parametrize("limit", range(8))
def test_limit_cuts_anywhere(limit: int) -> None:
    corpus = Corpus.from_documents([b"ab", b"cde"], max_tokens=limit)
    assert corpus.tokens.tolist() == [97, 98, 256, 99, 100, 101, 256][:limit]


def test_no_more_documents_are_read_than_needed() -> None:
    def documents() -> Iterator[bytes]:
        yield b"abcd"
        yield b"efgh"
        raise AssertionError("a third document was read")

    assert len(Corpus.from_documents(documents(), max_tokens=10)) == 10


def test_standard_library_is_text_with_separators(corpus: Corpus) -> None:
    assert len(corpus) == 50_000
    assert int(corpus.tokens.min()) >= 0
    assert int((corpus.tokens == SEPARATOR).sum()) >= 3
    text = bytes(corpus.tokens[corpus.tokens < SEPARATOR].to(torch.uint8).tolist())
    assert text.count(b"import ") > 10


def test_standard_library_is_read_alike_twice(corpus: Corpus) -> None:
    again = Corpus.from_standard_library(max_tokens=50_000)
    assert torch.equal(corpus.tokens, again.tokens)


def test_missing_sources_are_a_clear_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(FileNotFoundError, match="zip file"):
        Corpus.from_standard_library()


def test_targets_are_inputs_shifted_by_one(corpus: Corpus) -> None:
    for inputs, targets in itertools.islice(corpus.batches(4, 32, seed=0), 5):
        assert inputs.shape == targets.shape == (4, 32)
        assert inputs.dtype == targets.dtype == torch.int64
        assert inputs.is_contiguous()
        assert targets.is_contiguous()
        assert torch.equal(inputs[:, 1:], targets[:, :-1])
        assert int(targets.max()) < VOCABULARY_SIZE


def test_batches_are_pieces_of_the_text() -> None:
    corpus = Corpus(torch.arange(20, dtype=torch.int16))
    for inputs, targets in itertools.islice(corpus.batches(8, 19, seed=0), 3):
        assert torch.equal(inputs, torch.arange(19).expand(8, 19))
        assert torch.equal(targets, torch.arange(1, 20).expand(8, 19))


def test_every_start_is_drawn() -> None:
    corpus = Corpus(torch.arange(8, dtype=torch.int16))
    inputs, _ = next(corpus.batches(200, 5, seed=0))
    assert set(inputs[:, 0].tolist()) == {0, 1, 2}


def test_same_seed_same_batches_other_seed_others(corpus: Corpus) -> None:
    def first(seed: int) -> torch.Tensor:
        return torch.stack([x for x, _ in itertools.islice(corpus.batches(4, 32, seed), 3)])

    assert torch.equal(first(0), first(0))
    assert not torch.equal(first(0), first(1))


def test_batches_do_not_disturb_the_global_generator(corpus: Corpus) -> None:
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    next(corpus.batches(2, 8, seed=0))
    assert torch.equal(torch.rand(2), expected)


def test_short_corpus_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match=r"seq=8.*only 8 tokens.*needs 9"):
        Corpus.from_documents([b"import "]).batches(1, 8, seed=0)
