"""Objects that hold tensors and are no pytrees to torch: dataclasses, and what is like a container.

A batch is often such an object: Hugging Face's ``BatchEncoding`` is a ``UserDict``, other code has
dataclasses, or a class derived from dict whose items are attributes too. To a compiled step its
tensors are inputs, and its other fields Python values, as if they had been passed in a dict::

    step(Batch(x=x, y=y, split="train"))       x and y are inputs; "train" is part of the program

Objects without tensors, configurations say, are not opened: what the step reads of them is found by
name (``guards``).
"""

from __future__ import annotations

import copy
import dataclasses
from collections import UserDict
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._pytree import (
    MappingKey,
    register_pytree_node,
    tree_leaves,
    tree_map,
)

__all__ = ["close_all", "open_all"]


@dataclasses.dataclass
class _Opened:
    """An object, taken apart.

    Args:
        template: A copy of it, without its values.
        names: What its values are called.
        values: Its values, opened as well.
    """

    template: Any
    names: tuple[Any, ...]
    values: Sequence[Any]


@dataclasses.dataclass(frozen=True)
class _Kind:
    """What two objects have in common that are taken apart alike; the template is either's."""

    kind: type
    names: tuple[Any, ...]
    template: Any = dataclasses.field(compare=False)


def _flatten(opened: _Opened) -> tuple[list[Any], _Kind]:
    return list(opened.values), _Kind(type(opened.template), opened.names, opened.template)


def _flatten_with_keys(opened: _Opened) -> tuple[list[tuple[Any, Any]], _Kind]:
    values, kind = _flatten(opened)
    return [(MappingKey(name), child) for name, child in zip(kind.names, values, strict=True)], kind


def _unflatten(values: Any, kind: _Kind) -> _Opened:
    return _Opened(kind.template, kind.names, list(values))


register_pytree_node(
    _Opened,
    _flatten,
    _unflatten,
    serialized_type_name="xla_dtensor.runtimes.opened",
    flatten_with_keys_fn=_flatten_with_keys,
)


def open_all(tree: Any) -> Any:
    """Return a pytree in which objects that hold tensors are nodes.

    Example:
        >>> Batch = dataclasses.make_dataclass("Batch", ["x", "split"])
        >>> opened = open_all([Batch(torch.ones(2), "train")])
        >>> [type(leaf).__name__ for leaf in tree_leaves(opened)]
        ['Tensor', 'str']
        >>> close_all(opened)[0].split
        'train'
    """
    return tree_map(_opened, tree)


def close_all(tree: Any) -> Any:
    """Return a pytree with the objects again, each a new one."""
    return tree_map(_closed, tree, is_leaf=lambda node: isinstance(node, _Opened))


def _opened(value: Any) -> Any:
    if not _may_be_opened(value):
        return value
    fields = _fields(value)
    inside = open_all(fields)
    if not any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(inside)):
        return value
    return _Opened(_filled(value, dict.fromkeys(fields)), tuple(fields), list(inside.values()))


def _closed(value: Any) -> Any:
    if not isinstance(value, _Opened):
        return value
    values = [close_all(child) for child in value.values]
    return _filled(value.template, dict(zip(value.names, values, strict=True)))


def _may_be_opened(value: Any) -> bool:
    is_instance = dataclasses.is_dataclass(value) and not isinstance(value, type)
    return is_instance or isinstance(value, UserDict | dict | list | tuple)


def _fields(value: Any) -> dict[Any, Any]:
    if isinstance(value, UserDict):
        return dict(value.data)
    if isinstance(value, dict):
        return dict(dict.items(value))
    if isinstance(value, list | tuple):
        return dict(enumerate(value))
    names = [field.name for field in dataclasses.fields(value)]
    return {name: getattr(value, name) for name in names if hasattr(value, name)}


def _filled(value: Any, fields: dict[Any, Any]) -> Any:
    if isinstance(value, tuple):
        clone = tuple.__new__(type(value), fields.values())
        if hasattr(value, "__dict__"):
            vars(clone).update(vars(value))
        return clone
    clone = copy.copy(value)
    if isinstance(clone, UserDict):
        clone.data = dict(fields)
    elif isinstance(clone, dict):
        dict.clear(clone)
        dict.update(clone, fields)
    elif isinstance(clone, list):
        list.__setitem__(clone, slice(None), fields.values())
    else:
        for name, field_value in fields.items():
            object.__setattr__(clone, name, field_value)
    return clone
