"""XLA's text for an OpSharding, both ways.

    {devices=[4,1,2]<=[2,4]T(1,0) last_tile_dim_replicate}

Grammar, white space free between the words:

    sharding := "{" word* "}"
    word     := kind | "device=" int | "devices=" ints ( "<=" ints ["T(" int,... ")"] | int,... )
              | "last_tile_dim_replicate" | "last_tile_dims={" type,... "}" | "metadata={" anything
              "}"
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from xla_dtensor.core.errors import OpShardingError

if TYPE_CHECKING:
    from xla_dtensor.core.op_sharding import OpSharding

_INTS = r"\d+(?:\s*,\s*\d+)*"
_KIND = re.compile(r"(replicated|maximal|manual|unreduced|unknown)\b")
_DEVICE = re.compile(r"device\s*=\s*(\d+)")
_IOTA = re.compile(
    rf"devices\s*=\s*\[\s*({_INTS})\s*\]\s*<=\s*\[\s*({_INTS})\s*\](?:\s*T\s*\(\s*({_INTS})\s*\))?"
)
_LIST = re.compile(rf"devices\s*=\s*\[\s*({_INTS})\s*\]\s*({_INTS})")
_REPLICATE_LAST = re.compile(r"last_tile_dim_replicate\b")
_LAST_DIMS = re.compile(r"last_tile_dims\s*=\s*\{([^{}]*)\}")
_METADATA = re.compile(r"metadata\s*=\s*\{")
_BLANK = re.compile(r"[\s,]*")


def to_text(op: OpSharding) -> str:
    """XLA's text of an OpSharding, in its own spelling."""
    if op.kind == "maximal":
        return f"{{maximal device={op.device}}}"
    if op.kind != "tiled":
        return f"{{{op.kind}}}"
    text = f"{{devices=[{_join(op.tile_dims)}]"
    if op.devices is not None:
        text += _join(op.devices)
    else:
        text += f"<=[{_join(op.reshape_dims)}]"
        if len(op.transpose_perm) > 1:  # XLA reads no shorter form
            text += f"T({_join(op.transpose_perm)})"
    if op.subgroup_types == ("replicated",):
        text += " last_tile_dim_replicate"
    elif op.subgroup_types:
        text += f" last_tile_dims={{{', '.join(op.subgroup_types)}}}"
    return text + "}"


def parse_text(text: str) -> dict[str, Any]:
    """Reads a text into the fields of an OpSharding (which then checks them).

    Raises:
        OpShardingError: The text does not follow the grammar.
    """
    body = text.strip()
    if not (body.startswith("{") and body.endswith("}")) or not _is_balanced(body):
        raise _refusal(text, "Its braces are missing or not balanced")
    body = body[1:-1]
    fields: dict[str, Any] = {}
    position = _skip_blank(body, 0)
    while position < len(body):
        position = _skip_blank(body, _read_word(text, body, position, fields))
    if "kind" not in fields:
        raise _refusal(text, "It names no kind of sharding and no devices")
    return fields


def _read_word(text: str, body: str, position: int, fields: dict[str, Any]) -> int:
    """Reads the word at a position into the fields; returns the position behind it."""
    metadata = _METADATA.match(body, position)
    if metadata:
        return _closing_brace(body, metadata.end() - 1) + 1
    for pattern, read in _WORDS:
        match = pattern.match(body, position)
        if match:
            found = read(match)
            for name in found.keys() & fields.keys():
                raise _refusal(text, f"It says twice what its {name} is")
            fields.update(found)
            return match.end()
    word = re.match(r"\S+", body[position:])
    raise _refusal(text, f"{word.group() if word else ''!r} is unknown there")


def _read_kind(match: re.Match[str]) -> dict[str, Any]:
    return {"kind": match[1]}


def _read_device(match: re.Match[str]) -> dict[str, Any]:
    return {"device": int(match[1])}


def _read_iota(match: re.Match[str]) -> dict[str, Any]:
    reshape_dims = _ints(match[2])
    perm = _ints(match[3]) if match[3] else tuple(range(len(reshape_dims)))
    return {
        "kind": "tiled",
        "tile_dims": _ints(match[1]),
        "reshape_dims": reshape_dims,
        "transpose_perm": perm,
    }


def _read_list(match: re.Match[str]) -> dict[str, Any]:
    return {"kind": "tiled", "tile_dims": _ints(match[1]), "devices": _ints(match[2])}


def _read_replicate_last(match: re.Match[str]) -> dict[str, Any]:
    del match
    return {"subgroup_types": ("replicated",)}


def _read_last_dims(match: re.Match[str]) -> dict[str, Any]:
    types = (kind.strip() for kind in match[1].split(","))
    return {"subgroup_types": tuple(kind for kind in types if kind)}


_WORDS: tuple[tuple[re.Pattern[str], Callable[[re.Match[str]], dict[str, Any]]], ...] = (
    (_IOTA, _read_iota),
    (_LIST, _read_list),
    (_REPLICATE_LAST, _read_replicate_last),
    (_LAST_DIMS, _read_last_dims),
    (_KIND, _read_kind),
    (_DEVICE, _read_device),
)


def _refusal(text: str, reason: str) -> OpShardingError:
    return OpShardingError(
        f"The sharding text {text!r} was to be read. {reason}. "
        "Pass XLA's text of one tensor, e.g. '{devices=[2,1,4]<=[8] last_tile_dim_replicate}'."
    )


def _closing_brace(text: str, opening: int) -> int:
    """Position of the brace that closes the one at `opening`, or -1; those in strings do not."""
    depth, quoted, position = 0, False, opening
    while position < len(text):
        character = text[position]
        if character == "\\" and quoted:
            position += 1
        elif character == '"':
            quoted = not quoted
        elif not quoted and character in "{}":
            depth += 1 if character == "{" else -1
            if depth == 0:
                return position
        position += 1
    return -1


def _is_balanced(text: str) -> bool:
    return _closing_brace(text, 0) == len(text) - 1


def _skip_blank(text: str, position: int) -> int:
    match = _BLANK.match(text, position)
    return match.end() if match else position


def _join(values: tuple[int, ...]) -> str:
    return ",".join(map(str, values))


def _ints(text: str) -> tuple[int, ...]:
    return tuple(int(value) for value in text.split(","))
