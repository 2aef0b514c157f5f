"""Dataclasses as plain JSON values, and back exactly: the one walk that all reports use.

    dataclass           an object with a member for each field
    tuple[X, ...]       an array
    Mapping[str, X]     an object
    X | None            X, or null
    float               a number; the three that JSON lacks as "Infinity", "-Infinity" and "NaN"
    str, int, bool      as they are

What a value is comes from the type of its field, so nothing of Python is in the file. A field that
is absent takes its default; a member that no field has is refused.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np

from xla_dtensor.report.errors import ReportError

__all__ = ["from_plain", "json_schema", "to_plain"]

T = TypeVar("T")

_SPECIAL = {"Infinity": float("inf"), "-Infinity": float("-inf"), "NaN": float("nan")}
_NAMES = {str: "string", int: "integer", float: "number", bool: "boolean"}


def to_plain(value: Any) -> Any:
    """Turns a value into what the json module writes.

    Args:
        value: a dataclass, or what its fields may hold.

    Returns:
        Dictionaries, lists, strings, numbers, booleans and None.

    Example:
        >>> from xla_dtensor.report.stack_frames import SourceLine
        >>> to_plain((SourceLine("a.py", 7), float("inf")))
        [{'file': 'a.py', 'line': 7}, 'Infinity']
    """
    if is_dataclass(value) and not isinstance(value, type):
        return {each.name: to_plain(getattr(value, each.name)) for each in _stored(type(value))}
    if isinstance(value, Mapping):
        return {str(key): to_plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(each) for each in value]
    if isinstance(value, np.generic):
        return to_plain(value.item())
    if isinstance(value, float) and value - value != 0:
        return "NaN" if value != value else "Infinity" if value > 0 else "-Infinity"
    return value


def from_plain(kind: type[T], data: Any, where: str = "report") -> T:
    """Makes a value of what `to_plain` gave.

    Args:
        kind: the dataclass.
        data: what the json module read.
        where: its name, for messages.

    Returns:
        The value.

    Raises:
        ReportError: data that is no such value.

    Example:
        >>> from xla_dtensor.report.stack_frames import SourceLine
        >>> from_plain(SourceLine, {"file": "a.py", "line": 7})
        SourceLine(file='a.py', line=7)
    """
    return _read(kind, data, where)


def json_schema(kind: type[Any]) -> dict[str, Any]:
    """Describes what `to_plain` gives for a dataclass.

    Args:
        kind: the dataclass.

    Returns:
        A JSON Schema; dataclasses within are under "$defs", by name.

    Example:
        >>> from xla_dtensor.report.stack_frames import SourceLine
        >>> json_schema(SourceLine)["properties"]
        {'file': {'type': 'string'}, 'line': {'type': 'integer'}}
    """
    definitions: dict[str, Any] = {}
    _describe(kind, definitions)
    return definitions.pop(kind.__name__) | {"$defs": dict(sorted(definitions.items()))}


@cache
def _stored(kind: type[Any]) -> tuple[Field[Any], ...]:
    return tuple(each for each in fields(kind) if each.init)


@cache
def _hints(kind: type[Any]) -> dict[str, Any]:
    return get_type_hints(kind)


def _is_optional(field: Field[Any]) -> bool:
    return field.default is not MISSING or field.default_factory is not MISSING


def _read(hint: Any, data: Any, where: str) -> Any:
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return _read_union(parts, data, where)
    if origin is Literal:
        return (
            data if data in parts else _refuse(where, data, f"one of {', '.join(map(repr, parts))}")
        )
    if origin is tuple:
        return _read_tuple(parts, data, where)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        if not isinstance(data, dict):
            _refuse(where, data, "an object")
        return {key: _read(parts[1], each, f"{where}.{key}") for key, each in data.items()}
    if isinstance(hint, type) and is_dataclass(hint):
        return _read_dataclass(hint, data, where)
    return _read_simple(hint, data, where)


def _read_union(parts: tuple[Any, ...], data: Any, where: str) -> Any:
    if data is None and type(None) in parts:
        return None
    others = [part for part in parts if part is not type(None)]
    for part in others[:-1]:
        try:
            return _read(part, data, where)
        except ReportError:
            continue
    return _read(others[-1], data, where)


def _read_tuple(parts: tuple[Any, ...], data: Any, where: str) -> tuple[Any, ...]:
    if not isinstance(data, list):
        _refuse(where, data, "an array")
    if len(parts) == 2 and parts[1] is Ellipsis:
        return tuple(_read(parts[0], each, f"{where}[{i}]") for i, each in enumerate(data))
    if len(parts) != len(data):
        _refuse(where, data, f"an array of {len(parts)}")
    return tuple(
        _read(part, each, f"{where}[{i}]")
        for i, (part, each) in enumerate(zip(parts, data, strict=True))
    )


def _read_dataclass(kind: type[Any], data: Any, where: str) -> Any:
    if not isinstance(data, dict):
        _refuse(where, data, "an object")
    hints = _hints(kind)
    names = {each.name: each for each in _stored(kind)}
    for name in data:
        if name not in names:
            raise ReportError(
                f"A report was read in which {where} has {name!r}. This version knows no such "
                "member. Read it with the version that wrote it, or compile the step again."
            )
    for name, member in names.items():
        if name not in data and not _is_optional(member):
            raise ReportError(
                f"A report was read in which {where} lacks {name!r}. It cannot be made without. "
                "Pass a whole report, as CompileReport.to_json writes it."
            )
    return kind(
        **{name: _read(hints[name], each, f"{where}.{name}") for name, each in data.items()}
    )


def _read_simple(hint: Any, data: Any, where: str) -> Any:
    if hint is float and isinstance(data, str) and data in _SPECIAL:
        return _SPECIAL[data]
    accepted = (int, float) if hint is float else hint
    if not isinstance(data, accepted) or (isinstance(data, bool) and hint is not bool):
        _refuse(where, data, f"of type {_NAMES.get(hint, str(hint))}")
    return data


def _refuse(where: str, data: Any, expected: str) -> Any:
    text = repr(data)
    raise ReportError(
        f"A report was read in which {where} = {text if len(text) <= 60 else text[:57] + '...'}. "
        f"It must be {expected}. Pass a report as CompileReport.to_json writes it."
    )


def _describe(hint: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return {"anyOf": [_describe(part, definitions) for part in parts]}
    if origin is Literal:
        return {"enum": list(parts)}
    if origin is tuple:
        if len(parts) == 2 and parts[1] is Ellipsis:
            return {"type": "array", "items": _describe(parts[0], definitions)}
        return {"type": "array", "prefixItems": [_describe(part, definitions) for part in parts]}
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return {"type": "object", "additionalProperties": _describe(parts[1], definitions)}
    if is_dataclass(hint):
        return _describe_dataclass(hint, definitions)
    if hint is float:
        return {"anyOf": [{"type": "number"}, {"enum": list(_SPECIAL)}]}
    return {"type": "null" if hint is type(None) else _NAMES[hint]}


def _describe_dataclass(kind: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    if kind.__name__ not in definitions:
        definitions[kind.__name__] = {}  # So that a dataclass within itself ends.
        hints = _hints(kind)
        definitions[kind.__name__] = {
            "type": "object",
            "properties": {
                each.name: _describe(hints[each.name], definitions) for each in _stored(kind)
            },
            "required": [each.name for each in _stored(kind) if not _is_optional(each)],
            "additionalProperties": False,
        }
    return {"$ref": f"#/$defs/{kind.__name__}"}
