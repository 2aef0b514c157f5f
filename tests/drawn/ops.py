"""Which ops of torch are drawn, how a call of one is written, and what it is called with.

PyTorch's own table of ops, ``op_db``, has for each op the dtypes that it takes and sample inputs.
`ops.yaml` beside this file lists them: those that are drawn, and those that are not, each with its
reason. A call is written as a user writes it, ``torch.linalg.norm(x0, 2)``; as a method where torch
has it as a method only; by ``op("name")`` where op_db has a function of its own.
"""

from __future__ import annotations

import itertools
import math
import random
import warnings
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from torch.utils._pytree import tree_leaves

__all__ = [
    "DTYPES",
    "Call",
    "NotWritable",
    "calls_of",
    "drawn_ops",
    "find_op",
    "function_of",
    "refused_calls_of",
    "written",
]

DTYPES = (
    *(torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64),
    *(torch.complex128, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)
_MOST_SAMPLES = 150
_MOST_NUMBERS = 8000
_VARIANTS = 4


@cache
def _op_db() -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import op_db
    return {op.full_name: op for op in op_db}


def all_names() -> list[str]:
    """The names of all ops of op_db."""
    return list(_op_db())


@cache
def listed() -> dict[str, Any]:
    """What ops.yaml says."""
    return yaml.safe_load((Path(__file__).parent / "ops.yaml").read_text(encoding="utf-8"))


@cache
def drawn_ops() -> tuple[str, ...]:
    """The names of the ops that are drawn, of those that this torch has."""
    return tuple(name for name in listed()["drawn"] if name in _op_db())


def find_op(name: str) -> Any:
    """The entry of op_db."""
    return _op_db()[name]


# ------------------------------------------------------------------ results that are one of many


def _product(u: torch.Tensor, s: torch.Tensor, vh: torch.Tensor) -> torch.Tensor:
    rank = s.shape[-1]
    return (u[..., :rank] * s.unsqueeze(-2).to(u.dtype)) @ vh[..., :rank, :]


# Where the result is one of many right ones: what is the same for all of them.
_SAME_FOR_ALL: dict[str, Callable[[Any], Any]] = {
    "linalg.eigh": lambda r: (r[0], (r[1] * r[0].unsqueeze(-2)) @ r[1].mH),
    "linalg.eig": lambda r: (r[0], (r[1] * r[0].unsqueeze(-2)) @ torch.linalg.inv(r[1])),
    "linalg.svd": lambda r: (r[1], _product(r[0], r[1], r[2])),
    "svd": lambda r: (r[1], _product(r[0], r[1], r[2].mH)),
    "linalg.qr": lambda r: r[0] @ r[1] if r[0].numel() else r[1].abs(),
    "qr": lambda r: r[0] @ r[1],
    "geqrf": lambda r: r[0].triu().abs(),
    # What is left where the matrix has no factor, or no inverse.
    **dict.fromkeys(
        ("linalg.cholesky_ex", "linalg.inv_ex"),
        lambda r: (r[0].detach().masked_fill((r[1] != 0)[..., None, None], 0), r[1]),
    ),
    # The statistics' dtype is the CPU kernel's own; CUDA's is another.
    "native_layer_norm": lambda r: r[0],
    "native_batch_norm": lambda r: r[0],
    "_native_batch_norm_legit": lambda r: r[0],
    "_batch_norm_with_update": lambda r: r[0],
    # Which of equal numbers an index means is left open.
    "mode": lambda r: r[0],
    "topk": lambda r: r[0],
    "kthvalue": lambda r: r[0],
    "median": lambda r: r if isinstance(r, torch.Tensor) else r[0],
    "nanmedian": lambda r: r if isinstance(r, torch.Tensor) else r[0],
}


@cache
def function_of(name: str) -> Callable[..., Any]:
    """The function that ``op("name")`` stands for in a program."""
    entry = find_op(name)
    same = _SAME_FOR_ALL.get(entry.name)
    if same is None:
        return entry.op
    return lambda *args, **kwargs: same(entry.op(*args, **kwargs))


# ------------------------------------------------------------------ how a call is written


class NotWritable(Exception):
    """An argument that no program has: a generator, a function, a storage."""


def written(value: Any, name_of: Callable[[torch.Tensor], str]) -> str:
    """Write an argument as Python.

    Args:
        value: Anything that a sample of op_db has.
        name_of: Gives the name of a tensor.

    Raises:
        NotWritable: It has no short text.
    """
    if isinstance(value, torch.Tensor):
        return name_of(value)
    if isinstance(value, bool | str | int | float | complex | torch.dtype | type(None)):
        return repr(value)
    if isinstance(value, np.number | np.bool_):
        return repr(value.item())
    if isinstance(value, torch.memory_format | torch.layout):
        return repr(value)
    if value is Ellipsis:
        return "..."
    if isinstance(value, slice):
        return f"slice({value.start}, {value.stop}, {value.step})"
    if isinstance(value, list | tuple):
        inner = ", ".join(written(item, name_of) for item in value)
        if isinstance(value, list):
            return f"[{inner}]"
        return f"({inner},)" if len(value) == 1 else f"({inner})"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k!r}: {written(v, name_of)}" for k, v in value.items()) + "}"
    raise NotWritable(type(value).__name__)


@dataclass(frozen=True)
class Call:
    """One sample of op_db: a call of an op.

    Attributes:
        name: the op's full name in op_db.
        source: its first argument, a tensor or a list of tensors.
        args: the others, by position.
        kwargs: the others, by name.
    """

    name: str
    source: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The distinct tensors among the arguments."""
        found = tree_leaves((self.source, self.args, self.kwargs))
        return list({id(v): v for v in found if isinstance(v, torch.Tensor)}.values())

    def text(self, name_of: Callable[[torch.Tensor], str], *, in_place: bool = False) -> str:
        """The call as Python.

        Args:
            name_of: Gives the name of a tensor.
            in_place: Write the op's in-place form.
        """
        args = [written(value, name_of) for value in self.args]
        args += [f"{key}={written(value, name_of)}" for key, value in self.kwargs.items()]
        source = written(self.source, name_of)
        entry = find_op(self.name)
        if in_place:
            method = getattr(entry.inplace_variant, "__name__", f"{entry.name}_")
            return f"{source}.{method}({', '.join(args)})"
        path = _path(entry)
        is_method = path is None and entry.name not in _SAME_FOR_ALL and "." not in self.name
        if is_method and hasattr(torch.Tensor, entry.name):
            member = getattr(torch.Tensor, entry.name)
            if not callable(member):
                return f"{source}.{entry.name}"
            return f"{source}.{entry.name}({', '.join(args)})"
        return f"{path or f'op({self.name!r})'}({', '.join([source, *args])})"


def _path(entry: Any) -> str | None:
    if entry.name in _SAME_FOR_ALL:
        return None
    found: Any = torch
    for part in entry.name.split("."):
        found = getattr(found, part, None)
    return f"torch.{entry.name}" if found is entry.op else None


# ------------------------------------------------------------------ samples


@lru_cache(4000)
def calls_of(name: str, dtype: torch.dtype, variant: int = 0) -> tuple[Call, ...]:
    """The samples of an op, with values that `variant` decides.

    Args:
        name: Of the op in op_db.
        dtype: Of its first argument.
        variant: 0 to 3.

    Returns:
        At most 150; none with sparse tensors, with more than 8,000 numbers, or with arguments that
        cannot be written.
    """
    entry = find_op(name)
    if dtype == torch.uint8 and name in listed()["no_bytes"]:
        return ()
    if dtype not in entry.dtypes:
        return ()
    seed = zlib.crc32(f"{name}:{dtype}:{variant % _VARIANTS}".encode())
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)
    found: list[Call] = []
    try:
        samples = entry.sample_inputs_func(entry, "cpu", dtype, False)  # sets no seed of its own
        for sample in itertools.islice(samples, _MOST_SAMPLES):
            call = Call(name, sample.input, tuple(sample.args), dict(sample.kwargs))
            if _is_suitable(call):
                found.append(call)
    except Exception:  # some entries cannot make samples of every dtype that they claim
        pass
    return tuple(found)


@lru_cache(200)
def refused_calls_of(name: str) -> tuple[Call, ...]:
    """The calls of an op that PyTorch's table says are refused: wrong shapes, dtypes, dims.

    Args:
        name: Of the op in op_db.
    """
    entry = find_op(name)
    if entry.error_inputs_func is None:
        return ()
    torch.manual_seed(0)
    found: list[Call] = []
    try:
        for wrong in entry.error_inputs("cpu"):
            sample = wrong.sample_input
            call = Call(name, sample.input, tuple(sample.args), dict(sample.kwargs))
            if _is_suitable(call):
                found.append(call)
    except Exception:  # some need a GPU for one of them
        pass
    return tuple(found)


def _is_suitable(call: Call) -> bool:
    tensors = call.tensors
    if not tensors or any(
        not isinstance(t, torch.Tensor) or t.layout != torch.strided for t in tensors
    ):
        return False
    if sum(t.numel() for t in tensors) > _MOST_NUMBERS or any(
        t.dtype not in DTYPES for t in tensors
    ):
        return False
    try:
        call.text(lambda t: "x")
    except NotWritable:
        return False
    is_random = bool(call.kwargs.get("dropout_p"))
    return "device" not in call.kwargs and not is_random


def is_whole(values: Sequence[torch.Tensor]) -> bool:
    """Whether all numbers are finite and of ordinary size."""
    for value in values:
        if not (value.is_floating_point() or value.is_complex()) or not value.numel():
            continue
        largest = value.detach().abs().max().item()
        if not math.isfinite(largest) or largest > 1e6:
            return False
    return True
