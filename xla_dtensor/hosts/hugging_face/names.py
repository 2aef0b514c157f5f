"""Names: which tensors of Hugging Face's files a tensor of a module is made of.

    None                                                    the names are the same
    {"layers.*.wq.weight": "model.layers.*.q_proj.weight"}  renamed; * and ** are carried over
    {"**": "model.**"}                                      behind a prefix
    {"**.experts.down": "**.experts.#.w2.weight"}           tensor i of dim 0 is a tensor of its own
    {"**.gate_up.weight": ["**.gate.weight", "**.up.weight"]}        joined along the first dim
    {"**.qkv": [("**.q", 4096), ("**.k", 1024), ("**.v", 1024)]}     of these lengths
    {"score.weight": None}                                  not in the files

A pattern's ``*`` stands for a part of a name without dots, ``**`` for any, ``**.`` also for
nothing. The first pattern that fits a name counts, and a name that none fits stays as it is.

Where the files have no tensor of a name, the ways in which experts are known to be stored are
tried: transformers keeps those of a layer in one tensor, and writes one tensor for each.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from xla_dtensor.core.errors import ArgumentTypeError, WeightsError
from xla_dtensor.dtensor.dcp import Index, extents_of

__all__ = ["NameRules", "Names", "Piece"]

Names: TypeAlias = Mapping[str, Any] | Callable[[str], Any] | None
"""What is passed as `names`: see the module docstring; a function maps a name to the right side."""

_Target: TypeAlias = tuple[str, int | None]  # a key, # for the place along dim 0, and a length

_MIXTRAL = {
    "**.mlp.experts.gate_up_proj": [
        "**.block_sparse_moe.experts.#.w1.weight",
        "**.block_sparse_moe.experts.#.w3.weight",
    ],
    "**.mlp.experts.down_proj": "**.block_sparse_moe.experts.#.w2.weight",
    "**.mlp.gate.weight": "**.block_sparse_moe.gate.weight",
}
_QWEN_MOE = {
    "**.mlp.experts.gate_up_proj": [
        "**.mlp.experts.#.gate_proj.weight",
        "**.mlp.experts.#.up_proj.weight",
    ],
    "**.mlp.experts.down_proj": "**.mlp.experts.#.down_proj.weight",
}
_OF_MODEL_TYPE = {
    "mixtral": _MIXTRAL,
    "qwen2_moe": _QWEN_MOE,
    "qwen3_moe": _QWEN_MOE,
    "olmoe": _QWEN_MOE,
}


@dataclass(frozen=True, slots=True)
class Piece:
    """A tensor of the files, and which part of the module's tensor it is.

    Args:
        key: Its name in the files.
        at: The part, one slice per dim of the module's tensor.
        stacked: Whether the tensor in the files lacks dim 0, along which the part has one element.
    """

    key: str
    at: Index
    stacked: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the tensor in the files."""
        return extents_of(self.at)[1:] if self.stacked else extents_of(self.at)


class NameRules:
    """Finds the pieces of a tensor.

    Args:
        names: See the module docstring.
        model_type: As in a ``config.json``: how files of such a model store experts.

    Raises:
        ArgumentTypeError: `names` is of another kind.
        WeightsError: A pattern whose two sides have different numbers of ``*``.

    Example:
        >>> rules = NameRules({"blocks.*.w": "layers.*.weight"})
        >>> rules.pieces("blocks.3.w", (4, 2))[0].key
        'layers.3.weight'
    """

    def __init__(self, names: Names = None, model_type: str | None = None) -> None:
        if names is not None and not callable(names) and not isinstance(names, Mapping):
            raise ArgumentTypeError(
                f"names={names!r} was passed, of type={type(names).__name__}. Names are mapped by "
                "patterns or by a function. Pass a dict such as {'**': 'model.**'}, or a callable."
            )
        self._function = names if callable(names) else None
        self._patterns = _compiled(names) if isinstance(names, Mapping) else []
        known = _OF_MODEL_TYPE.get(model_type or "")
        self._stored = _compiled(known or {})
        self._other_ways = [_compiled(rules) for rules in (_MIXTRAL, _QWEN_MOE)]

    def pieces(
        self, path: str, shape: Sequence[int], keys: Container[str] | None = None
    ) -> tuple[Piece, ...]:
        """Return what a tensor is made of.

        Args:
            path: Its name in the module.
            shape: Its shape.
            keys: The names that the files have. None: the files are to be written, in the way that
                files of this type of model are.

        Returns:
            The pieces; none for a tensor that is not in the files.

        Raises:
            WeightsError: The shape cannot be cut as the rule says.
        """
        targets = self._targets(path)
        if len(targets) == 1 and "#" not in targets[0][0]:
            key = targets[0][0]
            if keys is None:
                targets = _first_match(self._stored, key) or targets
            elif key not in keys:
                for way in self._other_ways:
                    found = _first_match(way, key)
                    made = _pieces(path, shape, found) if found and _fits(found, shape) else ()
                    if any(piece.key in keys for piece in made):
                        return made
        return _pieces(path, shape, targets)

    def _targets(self, path: str) -> list[_Target]:
        if self._function is not None:
            return _right_side(self._function(path), path)
        found = _first_match(self._patterns, path)
        return [(path, None)] if found is None else found


# ---------------------------------------------------------------------- patterns


_WILD = re.compile(r"\*\*\.|\*\*|\*")
_MATCHES = {"**.": r"((?:.*\.)?)", "**": "(.*)", "*": r"([^.]+)"}
_Rules: TypeAlias = list[tuple[re.Pattern[str], list[_Target]]]


def _compiled(names: Mapping[str, Any]) -> _Rules:
    rules: _Rules = []
    for pattern, value in names.items():
        wild = _WILD.findall(pattern)
        targets = _right_side(value, pattern)
        for key, _ in targets:
            if _WILD.findall(key) != wild:
                raise WeightsError(
                    f"names has the pattern {pattern!r} for {key!r}. What a * or ** stands for is "
                    "carried over in order, so both sides need the same ones. Write as many on "
                    "both sides."
                )
        parts = _WILD.split(pattern)
        text = "".join(
            re.escape(part) + (_MATCHES[wild[i]] if i < len(wild) else "")
            for i, part in enumerate(parts)
        )
        rules.append((re.compile(text), targets))
    return rules


def _right_side(value: Any, name: str) -> list[_Target]:
    """Read what a rule says: a key, None, or a list of keys or of (key, length)."""
    if value is None:
        return []
    listed = [value] if isinstance(value, str) else value
    targets: list[_Target] = []
    for each in listed if isinstance(listed, (list, tuple)) else [listed]:
        if isinstance(each, str):
            targets.append((each, None))
        elif isinstance(each, tuple) and len(each) == 2 and isinstance(each[0], str):
            targets.append((each[0], int(each[1])))
        else:
            raise ArgumentTypeError(
                f"names gives {value!r} for {name!r}. That is no name of a tensor in the files. "
                "Pass a str, None, or a list of str or of (str, length)."
            )
    return targets


def _first_match(rules: _Rules, path: str) -> list[_Target] | None:
    for pattern, targets in rules:
        match = pattern.fullmatch(path)
        if match is not None:
            texts = match.groups()
            return [(_filled(key, texts), length) for key, length in targets]
    return None


def _filled(key: str, texts: Sequence[str]) -> str:
    left = iter(texts)
    return _WILD.sub(lambda _: next(left), key)


# ---------------------------------------------------------------------- pieces


def _fits(targets: Sequence[_Target], shape: Sequence[int]) -> bool:
    dim = int("#" in targets[0][0])
    return len(shape) > dim and shape[dim] % len(targets) == 0


def _pieces(path: str, shape: Sequence[int], targets: Sequence[_Target]) -> tuple[Piece, ...]:
    if not targets:
        return ()
    stacked = "#" in targets[0][0]
    if len(targets) == 1 and not stacked:
        return (Piece(targets[0][0], tuple(slice(0, size) for size in shape)),)
    dim = int(stacked)
    if any(("#" in key) != stacked for key, _ in targets) or len(shape) <= dim:
        raise _uncut(path, shape, targets, "It has no such dim, or only some have a #")
    lengths = _lengths(path, shape, targets, dim)
    rest = tuple(slice(0, size) for size in shape[dim + 1 :])
    pieces: list[Piece] = []
    for i in range(shape[0] if stacked else 1):
        start = 0
        for (key, _), length in zip(targets, lengths, strict=True):
            part = (slice(start, start + length), *rest)
            at = (slice(i, i + 1), *part) if stacked else part
            pieces.append(Piece(key.replace("#", str(i)), at, stacked))
            start += length
    return tuple(pieces)


def _lengths(
    path: str, shape: Sequence[int], targets: Sequence[_Target], dim: int
) -> tuple[int, ...]:
    size, given = shape[dim], [length for _, length in targets]
    if all(length is None for length in given):
        if size % len(targets):
            raise _uncut(
                path, shape, targets, f"{size} elements are not {len(targets)} equal parts"
            )
        return (size // len(targets),) * len(targets)
    lengths = tuple(length or 0 for length in given)
    if sum(lengths) != size or min(lengths) < 1:
        raise _uncut(path, shape, targets, f"The lengths are not {size} together")
    return lengths


def _uncut(path: str, shape: Sequence[int], targets: Sequence[_Target], why: str) -> WeightsError:
    keys = [key if length is None else (key, length) for key, length in targets]
    return WeightsError(
        f"names gives {keys} for {path!r} of shape={tuple(shape)}. {why}, along the dim where they "
        "are joined. Give each its length: (name, length)."
    )
