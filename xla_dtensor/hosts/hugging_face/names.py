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

A model of transformers is stored as transformers itself would store it, which often is another way
than its modules have it: experts of a layer are one tensor there, and one each in the files. What
becomes of each tensor is asked of transformers' own conversions, see `stored_by_transformers`. Only
for the models of ``xla_dtensor/models`` this module has a table.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from xla_dtensor.core.errors import ArgumentTypeError, WeightsError
from xla_dtensor.dtensor.dcp import Index, extents_of
from xla_dtensor.hosts.hugging_face.module import slots_of

__all__ = ["NameRules", "Names", "Piece", "stored_by_transformers"]

Names: TypeAlias = Mapping[str, Any] | Callable[[str], Any] | None
"""What is passed as `names`: see the module docstring; a function maps a name to the right side."""

_Target: TypeAlias = tuple[str, int | None]  # a key, # for the place along dim 0, and a length

# How files have the experts of a layer, for models of xla_dtensor/models, by model_type.
_OWN_MODELS = {
    "mixtral": {
        "**.mlp.experts.gate_up_proj": [
            "**.block_sparse_moe.experts.#.w1.weight",
            "**.block_sparse_moe.experts.#.w3.weight",
        ],
        "**.mlp.experts.down_proj": "**.block_sparse_moe.experts.#.w2.weight",
        "**.mlp.gate.weight": "**.block_sparse_moe.gate.weight",
    }
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
        model_type: As in a ``config.json``: of models of this library, how files have experts.
        stored: Pieces by name, as `stored_by_transformers` found them.

    Raises:
        ArgumentTypeError: `names` is of another kind.
        WeightsError: A pattern whose two sides have different numbers of ``*``.

    Example:
        >>> rules = NameRules({"blocks.*.w": "layers.*.weight"})
        >>> rules.pieces("blocks.3.w", (4, 2))[0].key
        'layers.3.weight'
    """

    def __init__(
        self,
        names: Names = None,
        model_type: str | None = None,
        stored: Mapping[str, tuple[Piece, ...]] | None = None,
    ) -> None:
        if names is not None and not callable(names) and not isinstance(names, Mapping):
            raise ArgumentTypeError(
                f"names={names!r} was passed, of type={type(names).__name__}. Names are mapped by "
                "patterns or by a function. Pass a dict such as {'**': 'model.**'}, or a callable."
            )
        self._function = names if callable(names) else None
        self._patterns = _compiled(names) if isinstance(names, Mapping) else []
        tables = {kind: _compiled(table) for kind, table in _OWN_MODELS.items()}
        self._to_write = tables.get(str(model_type), [])
        self._to_read = [rule for rules in tables.values() for rule in rules]
        self._stored = stored or {}

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
            if keys is None or key not in keys:
                rule_targets = _first_match(self._to_write if keys is None else self._to_read, key)
                pieces = self._stored.get(key, ())
                if not pieces and rule_targets and _fits(rule_targets, shape):
                    pieces = _pieces(path, shape, rule_targets)
                if pieces and (keys is None or any(piece.key in keys for piece in pieces)):
                    return pieces
        return _pieces(path, shape, targets)

    def _targets(self, path: str) -> list[_Target]:
        if self._function is not None:
            return _right_side(self._function(path), path)
        targets = _first_match(self._patterns, path)
        return [(path, None)] if targets is None else targets


# ----------------------------------------------------------------------------------------- Patterns


_WILD = re.compile(r"\*\*\.|\*\*|\*")
_MATCHES = {"**.": r"((?:.*\.)?)", "**": "(.*)", "*": r"([^.]+)"}
_Rules: TypeAlias = list[tuple[re.Pattern[str], list[_Target]]]


def _compiled(names: Mapping[str, Any]) -> _Rules:
    rules: _Rules = []
    for pattern, rule in names.items():
        wild = _WILD.findall(pattern)
        targets = _right_side(rule, pattern)
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


def _right_side(rule: Any, name: str) -> list[_Target]:
    """Read what a rule says: a key, None, or a list of keys or of (key, length)."""
    if rule is None:
        return []
    entries = [rule] if isinstance(rule, str) else rule
    targets: list[_Target] = []
    for target in entries if isinstance(entries, (list, tuple)) else [entries]:
        if isinstance(target, str):
            targets.append((target, None))
        elif isinstance(target, tuple) and len(target) == 2 and isinstance(target[0], str):
            targets.append((target[0], int(target[1])))
        else:
            raise ArgumentTypeError(
                f"names gives {rule!r} for {name!r}. That is no name of a tensor in the files. "
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
    unused = iter(texts)
    return _WILD.sub(lambda _: next(unused), key)


# ------------------------------------------------------------------------------------------- Pieces


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
    inner = tuple(slice(0, size) for size in shape[dim + 1 :])
    pieces: list[Piece] = []
    for i in range(shape[0] if stacked else 1):
        start = 0
        for (key, _), length in zip(targets, lengths, strict=True):
            part = (slice(start, start + length), *inner)
            at = (slice(i, i + 1), *part) if stacked else part
            pieces.append(Piece(key.replace("#", str(i)), at, stacked))
            start += length
    return tuple(pieces)


def _lengths(
    path: str, shape: Sequence[int], targets: Sequence[_Target], dim: int
) -> tuple[int, ...]:
    size, lengths = shape[dim], [length or 0 for _, length in targets]
    if all(length is None for _, length in targets):
        if size % len(targets):
            raise _uncut(
                path, shape, targets, f"{size} elements are not {len(targets)} equal parts"
            )
        return (size // len(targets),) * len(targets)
    if sum(lengths) != size or min(lengths) < 1:
        raise _uncut(path, shape, targets, f"The lengths are not {size} together")
    return tuple(lengths)


def _uncut(path: str, shape: Sequence[int], targets: Sequence[_Target], why: str) -> WeightsError:
    keys = [key if length is None else (key, length) for key, length in targets]
    return WeightsError(
        f"names gives {keys} for {path!r} of shape={tuple(shape)}. {why}, along the dim where they "
        "are joined. Give each its length: (name, length)."
    )


# ------------------------------------------------------------------- As transformers stores a model


class _ViewsStay(TorchDispatchMode):
    """Copies of meta tensors are the tensors: what was cut stays a view of what it was cut from."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        is_copy = func is torch.ops.aten.clone.default
        return args[0] if is_copy else func(*args, **(kwargs or {}))


def stored_by_transformers(module: nn.Module) -> dict[str, tuple[Piece, ...]]:
    """Return how transformers stores the tensors of its models: a name in the module -> pieces.

    transformers converts what it saves, by rules that each release adds models to. They are run
    here on meta tensors, and a result that is a view tells which part of which tensor it is. A
    tensor that is stored as no part of one (transposed, joined with others) is left out.

    Args:
        module: A model of transformers, or a module that holds some.
    """
    transformers: Any = sys.modules.get("transformers")
    if transformers is None:  # then no module is a model of it
        return {}
    try:
        loading: Any = importlib.import_module("transformers.core_model_loading")
        revert = loading.revert_weight_conversion
    except (ImportError, AttributeError):  # transformers before 5 stores what its modules have
        return {}
    pieces: dict[str, tuple[Piece, ...]] = {}
    prefixes: list[str] = []
    for prefix, part in module.named_modules():
        inside = any(prefix == outer or prefix.startswith(f"{outer}.") for outer in prefixes)
        if isinstance(part, transformers.PreTrainedModel) and not inside and "" not in prefixes:
            prefixes.append(prefix)
            pieces |= _converted(part, f"{prefix}." if prefix else "", revert)
    return pieces


def _converted(model: Any, prefix: str, revert: Any) -> dict[str, tuple[Piece, ...]]:
    tensors = {
        name: torch.empty(slot.tensor.shape, device="meta")
        for slot in slots_of(model)
        for name in slot.names
    }
    names = {id(tensor): name for name, tensor in tensors.items()}
    pieces: dict[str, list[Piece]] = {}
    with _ViewsStay():
        stored: dict[str, torch.Tensor] = revert(model, dict(tensors))
    for key, view in stored.items():
        name = names.get(id(view if view._base is None else view._base))
        at = None if name is None else _part(view, tensors[name])
        if name is not None and at is not None:
            stacked = view.ndim < len(at)
            pieces.setdefault(name, []).append(Piece(prefix + key, at, stacked))
    return {
        prefix + name: tuple(parts)
        for name, parts in pieces.items()
        if sum(prod(piece.shape) for piece in parts) == tensors[name].numel()
    }


def _part(view: torch.Tensor, tensor: torch.Tensor) -> Index | None:
    """Which block of a contiguous tensor a view of it is; the view may lack dim 0."""
    sizes = tuple(view.shape)
    if view.stride() == tensor.stride()[1:] and view.ndim == tensor.ndim - 1:
        sizes = (1, *sizes)
    elif view.stride() != tensor.stride():
        return None
    starts: list[int] = []
    offset = int(view.storage_offset())
    for stride in tensor.stride():
        starts.append(offset // stride)
        offset %= stride
    return tuple(slice(start, start + n) for start, n in zip(starts, sizes, strict=True))
