"""Are these modules equal but for the values of their parameters and buffers?

Layers that run as one loop share one piece of Python: the first one's. This module finds the first
thing in which another layer would have behaved otherwise, and says where it is.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import nn

from xla_dtensor.errors import ScanError

__all__ = ["check_equal", "holding", "tensors_of"]

_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_always_called",
)
_OWN = frozenset({"_parameters", "_buffers", "_modules", *_HOOKS}) | frozenset(
    name for name in vars(nn.Module()) if "state_dict" in name
)
_DEPTH = 8
_absent = object()


def check_equal(blocks: Sequence[nn.Module], ignored: Sequence[str] = ()) -> None:
    """Raise at the first difference between the first module and another one.

    Args:
        blocks: The modules.
        ignored: Names of attributes in which they may differ.

    Raises:
        ScanError: A difference in anything but the values of parameters and buffers.
    """
    first = dict(blocks[0].named_modules(remove_duplicate=False))
    for index, block in enumerate(blocks[1:], 1):
        other = dict(block.named_modules(remove_duplicate=False))
        if list(first) != list(other):
            extra = next(iter(set(first) ^ set(other)))
            _refuse(index, extra, "a module that the other has not")
        for path, module in first.items():
            for name, mine, theirs in _differences(module, other[path], ignored):
                _refuse(index, f"{path}.{name}".strip("."), f"{theirs} where layer 0 has {mine}")
        if _ties(blocks[0]) != _ties(block):
            _refuse(index, "parameters", "other tensors in common")


def tensors_of(
    blocks: Sequence[nn.Module], chosen: Callable[[torch.Tensor], bool]
) -> tuple[list[str], list[list[torch.Tensor]]]:
    """Return names and, by layer, the parameters and buffers that a loop has to read.

    Args:
        blocks: The modules, equal ones.
        chosen: Whether a tensor is on the mesh.

    Raises:
        ScanError: A tensor that is not on the mesh and differs between the layers.
    """
    names: list[str] = []
    columns: list[list[torch.Tensor]] = []
    everything = [_tensors(block) for block in blocks]
    for name, tensor in everything[0].items():
        column = [tensors[name] for tensors in everything]
        if all(map(chosen, column)):
            names.append(name)
            columns.append(column)
        elif any(map(chosen, column)) or not all(_same_host(tensor, t) for t in column[1:]):
            raise ScanError(
                f"scan_layers has layers whose {name!r} is not on the mesh and not the same in "
                "all of them. A loop reads what differs from stacked tensors on the mesh. Place "
                "it: shard_module(model, mesh, rules), or distribute_tensor."
            )
        elif isinstance(tensor, nn.Parameter) and tensor.requires_grad:
            raise ScanError(
                f"scan_layers has layers whose parameter {name!r} is not on the mesh and requires "
                "grad. A loop differentiates tensors on the mesh. Place it: shard_module(model, "
                "mesh, rules), or distribute_tensor."
            )
    return names, [[column[i] for column in columns] for i in range(len(blocks))]


@contextlib.contextmanager
def holding(
    block: nn.Module, names: Sequence[str], tensors: Sequence[torch.Tensor]
) -> Iterator[None]:
    """Let `block` have other parameters and buffers for a while.

    Args:
        block: The module.
        names: As from :func:`tensors_of`.
        tensors: The tensors to have under these names, and wherever the same tensor is used.
    """
    own = _tensors(block)
    others = {id(own[name]): tensor for name, tensor in zip(names, tensors, strict=True)}
    held = [
        (table, name, tensor)
        for module in block.modules()
        for table in (module._parameters, module._buffers)
        for name, tensor in table.items()
        if id(tensor) in others
    ]
    try:
        for table, name, tensor in held:
            table[name] = others[id(tensor)]  # pyright: ignore[reportArgumentType]
        yield
    finally:
        for table, name, tensor in held:
            table[name] = tensor  # pyright: ignore[reportArgumentType]


def _tensors(block: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(block.named_parameters()), **dict(block.named_buffers())}


def _same_host(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a is b or (a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b))


def _ties(block: nn.Module) -> list[int]:
    """Return for each parameter the place of the first one that is the same tensor."""
    places: dict[int, int] = {}
    named = block.named_parameters(remove_duplicate=False)
    return [places.setdefault(id(p), i) for i, (_, p) in enumerate(named)]


def _refuse(index: int, where: str, what: str) -> NoReturn:
    raise ScanError(
        f"scan_layers was called with layers that differ: layer {index} has at {where!r} {what}. "
        "Its layers run as one loop over the first one's code. Make them equal, scan each run of "
        "equal layers by itself, or pass ignore=[name] for an attribute that the block never uses."
    )


# ---------------------------------------------------------------------- one pair of modules


def _differences(a: nn.Module, b: nn.Module, ignored: Sequence[str]) -> Iterator[tuple[Any, ...]]:
    if type(a) is not type(b):
        yield "", type(a).__name__, type(b).__name__
    for kind in ("_parameters", "_buffers"):
        yield from _tensor_differences(getattr(a, kind), getattr(b, kind))
    for kind in _HOOKS:
        mine, theirs = getattr(a, kind), getattr(b, kind)
        if not _same(list(mine.values()), list(theirs.values())):
            yield kind, f"{len(mine)} hooks", f"{len(theirs)} that differ"
    mine, theirs = _attributes(a), _attributes(b)
    for name in (*mine, *(n for n in theirs if n not in mine)):
        x, y = mine.get(name, _absent), theirs.get(name, _absent)
        if name not in ignored and not _same(x, y):
            yield name, _short(x), _short(y)


def _attributes(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if name not in _OWN}


def _tensor_differences(mine: Any, theirs: Any) -> Iterator[tuple[Any, ...]]:
    if list(mine) != list(theirs):
        yield "", list(mine), list(theirs)
    for name, a in mine.items():
        b = theirs[name]
        if (a is None) != (b is None):
            yield name, _short(a), _short(b)
        if a is None or b is None:
            continue
        for what, x, y in zip(_FACTS, _facts(a), _facts(b), strict=True):
            if x != y:
                yield name, f"{what}={x}", f"{what}={y}"


_FACTS = ("type", "shape", "dtype", "requires_grad", "mesh", "placements", "sharding")


def _facts(tensor: torch.Tensor) -> tuple[Any, ...]:
    spec = getattr(tensor, "_spec", None)
    payload = getattr(tensor, "_local_tensor", tensor)
    storage = getattr(payload, "_storage", None)
    return (
        type(tensor).__name__,
        tuple(tensor.shape),
        tensor.dtype,
        tensor.requires_grad,
        getattr(spec, "mesh", None),
        getattr(spec, "placements", None),
        getattr(storage, "sharding", None),
    )


# ---------------------------------------------------------------------- one pair of values


def _same(a: Any, b: Any, depth: int = _DEPTH) -> bool:
    """Tell whether code that uses `a` would do the same with `b`."""
    if a is b:
        return True
    if type(a) is not type(b) or depth == 0:
        return False
    if isinstance(a, torch.Tensor):
        plain = type(a) is torch.Tensor
        return plain and _same_host(a, b)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(_same(x, y, depth - 1) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict):
        return list(a) == list(b) and all(_same(a[k], b[k], depth - 1) for k in a)
    if isinstance(a, (types.FunctionType, types.MethodType, functools.partial)):
        return _same_function(a, b, depth)
    if isinstance(a, nn.Module):
        return not any(True for _ in _differences(a, b, ()))
    return _equal(a, b) or (_compares_by_identity(a) and _same(vars(a), vars(b), depth - 1))


def _same_function(a: Any, b: Any, depth: int) -> bool:
    if isinstance(a, functools.partial):
        mine, theirs = ((f.func, f.args, f.keywords) for f in (a, b))
        return _same(mine, theirs, depth - 1)
    if isinstance(a, types.MethodType):
        owners = isinstance(a.__self__, nn.Module)  # compared where the module itself is
        return a.__func__ is b.__func__ and (owners or _same(a.__self__, b.__self__, depth - 1))
    mine, theirs = ((f.__defaults__, f.__kwdefaults__, _closure(f)) for f in (a, b))
    return a.__code__ is b.__code__ and _same(mine, theirs, depth - 1)


def _closure(function: Any) -> list[Any]:
    return [cell.cell_contents for cell in function.__closure__ or ()]


def _equal(a: Any, b: Any) -> bool:
    # A hook of shard_module knows the path of its module, for its errors only.
    if hasattr(a, "layout") and hasattr(a, "pattern") and hasattr(a, "index"):
        return (a.layout, a.index) == (b.layout, b.index)
    try:
        return bool(a == b)
    except Exception:
        return False


def _compares_by_identity(value: Any) -> bool:
    return type(value).__eq__ is object.__eq__ and hasattr(value, "__dict__")


def _short(value: Any) -> str:
    text = "nothing" if value is _absent else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
