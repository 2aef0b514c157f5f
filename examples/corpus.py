"""Real text that is on every machine: the source code of Python's own standard library.

Documents are the modules ``*.py`` at the top of the library, in the order of their names, as raw
bytes, each followed by a separator token. Nothing is downloaded. The text depends on the version of
Python and on nothing else, the batches on the text and the seed.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor

__all__ = ["Corpus"]

SEPARATOR = 256


class Corpus:
    """A long row of tokens to draw training batches from.

    Args:
        tokens: One-dimensional tensor of token ids.

    Example:
        >>> corpus = Corpus.from_documents([b"import this", b"import antigravity"])
        >>> inputs, targets = next(corpus.batches(batch_size=2, seq=4, seed=0))
        >>> inputs.shape, bool((inputs[:, 1:] == targets[:, :-1]).all())
        (torch.Size([2, 4]), True)
    """

    def __init__(self, tokens: Tensor) -> None:
        self.tokens = tokens

    def __len__(self) -> int:
        return self.tokens.numel()

    @classmethod
    def from_documents(cls, documents: Iterable[bytes], max_tokens: int = 2_000_000) -> Corpus:
        """Join documents, each followed by the separator, and stop at `max_tokens` tokens.

        Args:
            documents: Raw bytes. No more of them are taken than are needed.
            max_tokens: The row of tokens is cut there.

        Returns:
            The corpus. Its tokens are int16, to be a quarter of the size of int64.
        """
        pieces: list[Tensor] = []
        missing = max_tokens
        for document in documents:
            # uint8 cannot hold the separator, hence the wider type before it is appended.
            values = torch.tensor(bytearray(document), dtype=torch.uint8).to(torch.int16)
            pieces += [values[:missing], torch.tensor([SEPARATOR], dtype=torch.int16)]
            missing -= values.numel() + 1
            if missing <= 0:
                break
        return cls(torch.cat(pieces)[:max_tokens] if pieces else torch.empty(0, dtype=torch.int16))

    @classmethod
    def from_standard_library(cls, max_tokens: int = 2_000_000) -> Corpus:
        """Read the standard library of the running Python.

        Args:
            max_tokens: Where to stop; the whole has about five million bytes.

        Returns:
            The corpus.

        Raises:
            FileNotFoundError: This Python has no source files, as when its library is zipped.

        Example:
            >>> len(Corpus.from_standard_library(max_tokens=10_000))
            10000
        """
        folder = Path(sysconfig.get_paths()["stdlib"])
        paths = sorted(folder.glob("*.py"), key=lambda path: path.name)
        if not paths:
            raise FileNotFoundError(
                f"Source files of the standard library were asked for in folder={folder}. There "
                "are none, perhaps because this Python keeps its library in a zip file. Pass "
                "documents of your own to Corpus.from_documents."
            )
        return cls.from_documents((path.read_bytes() for path in paths), max_tokens)

    def batches(self, batch_size: int, seq: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield batches without end; the same seed gives the same batches.

        Args:
            batch_size: Sequences in a batch.
            seq: Tokens in a sequence.
            seed: Seed of the random starts.

        Returns:
            Pairs (inputs, targets), int64 of shape (batch_size, seq); targets are the inputs'
            successors.

        Raises:
            ValueError: The corpus is too short for one sequence and its successor.
        """
        if len(self) <= seq:
            raise ValueError(
                f"Sequences of seq={seq} tokens were asked for. The corpus has only {len(self)} "
                f"tokens, and each sequence needs {seq + 1}. Pass a shorter seq or more text."
            )
        return self._draw(batch_size, seq, torch.Generator().manual_seed(seed))

    def _draw(
        self, batch_size: int, seq: int, generator: torch.Generator
    ) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            starts = torch.randint(len(self) - seq, (batch_size, 1), generator=generator)
            windows = self.tokens[starts + torch.arange(seq + 1)].to(torch.int64)
            yield windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
