"""Indices and other numbers out of range raise, as in PyTorch, wherever their values are known.

XLA has no error for an index that a tensor does not have: it takes the nearest row, or writes
nothing. So the ops that take indices are listed here with the range of each::

    x[torch.tensor([8])]     of 8 rows: IndexError, from the host tensor's values
    x[indices]               on the mesh, eagerly: one reduction on the devices, then the same
    x // y                   whole numbers, with a zero in y: the same
    xd.compile(...)          there are no values yet: what is read or written is NaN, and the call
                             raises under xd.check_values() (below)

On torch_xla only what is on the host is looked at: to read a value there runs all that is pending.

Invariants:

* What PyTorch takes is taken: negative indices where it does, `ignore_index`, empty indices.
* Backward ops are not looked at: their indices are those of the forward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch

from xla_dtensor.core.errors import IndexRangeError, UnsupportedOpError, WriteError
from xla_dtensor.runtimes.state import register_setting
from xla_dtensor.runtimes.whole_ops import linear_loss

__all__ = [
    "BOUNDS",
    "Bound",
    "are_checked",
    "are_left_out",
    "check_bounds",
    "check_values",
    "host_extremes",
    "name_of",
    "refuse_part",
]


# ------------------------------------------------------------------------------------- Index bounds

aten = torch.ops.aten
_MASKS = (torch.bool, torch.uint8)


@dataclass(frozen=True)
class Bound:
    """The range of one tensor of indices, or of other numbers.

    Attributes:
        index: the tensor.
        low: the smallest index that is allowed.
        high: the first one that is not.
        where: what is indexed, for the message.
        ignored: a value that means no index.
        what: what the numbers are, for the message.
        rule: what to pass, for the message; None: the range.
        of: what is computed of the tensor and looked at, where its values are known.
    """

    index: Any
    low: float
    high: float
    where: str
    ignored: int | None = None
    what: str = "index"
    rule: str | None = None
    of: Callable[[Any], Any] | None = None

    def complaint(self, op: str, number: Any) -> str:
        """Return the message for a number that is out of range.

        Args:
            op: The op's name.
            number: The number.
        """
        limits = f"It goes from {self.low} to {self.high - 1} there. Pass what is in this range"
        called = f"{op} was called with the {self.what} {number} for {self.where}."
        return f"{called} {self.rule or limits}."


def _of_dims(x: Any, indices: Any, *_: Any, **__: Any) -> Iterator[Bound]:
    """x[i, j]: one tensor per dim; a mask stands for as many dims as it has."""
    dim = 0
    for index in indices:
        if index is None:
            dim += 1
        elif index.dtype in _MASKS:
            dim += index.ndim
        elif index.is_floating_point() or index.is_complex():
            raise IndexRangeError(
                f"A tensor was indexed with one of dtype={index.dtype}. An index is a whole "
                "number, or a mask of bools. Pass index.long()."
            )
        else:
            size = x.shape[dim]
            yield Bound(index, -size, size, f"dim {dim} of size {size}")
            dim += 1


def _of_written(x: Any, indices: Any, values: Any, *_: Any, **__: Any) -> Iterator[Bound]:
    """x[i, j] = values: they are of the shape that x[i, j] has, or are expanded to it."""
    yield from _of_dims(x, indices)
    places = [place for place, index in enumerate(indices) if index is not None]
    if not any(indices[place].dtype in _MASKS for place in places):
        points = torch.broadcast_shapes(*(indices[place].shape for place in places))
        shape = [size for dim, size in enumerate(x.shape) if dim not in places]
        # The points' dims stand where the indices do, or first where these are apart.
        position = places[0] if places[-1] - places[0] + 1 == len(places) else 0
        shape[position:position] = points
        ends = zip(reversed(values.shape), reversed(shape), strict=False)
        if values.ndim > len(shape) or any(size not in (1, expanded) for size, expanded in ends):
            raise WriteError(
                f"Values of shape={tuple(values.shape)} were written to x[indices], which has "
                f"shape={tuple(shape)}. Pass values of that shape, or ones that expand to it."
            )
    elif len(places) == 1:
        mask = indices[places[0]]
        behind = x.ndim - mask.ndim - places[0]
        number = values.shape[-1 - behind] if values.ndim > behind else 1
        if number != 1:
            rule, subject = "Pass as many values as the mask has True", "number of places"
            where = f"values of shape={tuple(values.shape)}"
            yield Bound(mask, number, number + 1, where, what=subject, rule=rule, of=_count)


def _count(mask: Any) -> Any:
    return (mask != 0).sum()


def _along(from_the_end: bool = False) -> Callable[..., Iterator[Bound]]:
    def bounds(x: Any, dim: int, index: Any, *_: Any, **__: Any) -> Iterator[Bound]:
        size = x.shape[dim] if x.ndim else 1
        yield Bound(index, -size if from_the_end else 0, size, f"dim {dim} of size {size}")

    return bounds


def _flat(x: Any, index: Any, *_: Any, **__: Any) -> Iterator[Bound]:
    yield Bound(index, -x.numel(), x.numel(), f"a tensor of {x.numel()} elements")


def _rows(weight: Any, indices: Any, *_: Any, **__: Any) -> Iterator[Bound]:
    yield Bound(indices, 0, weight.shape[0], f"an embedding of {weight.shape[0]} rows")


def _classes(
    log_probs: Any, target: Any, weight: Any, reduction: int, ignore_index: int
) -> Iterator[Bound]:
    number = log_probs.shape[1 if log_probs.ndim > 1 else 0]
    yield Bound(target, 0, number, f"{number} classes", ignore_index)


def _classes_of_margins(least: int) -> Callable[..., Iterator[Bound]]:
    def bounds(x: Any, target: Any, *_: Any, **__: Any) -> Iterator[Bound]:
        number = x.shape[-1] if x.ndim else 1
        yield Bound(target, least, number, f"{number} classes")

    return bounds


def _one_hot(x: Any, num_classes: int = -1) -> Iterator[Bound]:
    if num_classes >= 0:
        yield Bound(x, 0, num_classes, f"num_classes={num_classes}")


def _linear_loss(
    x: Any, weight: Any, target: Any, bias: Any, ignore_index: int, *_: Any
) -> Iterator[Bound]:
    number = weight.shape[0]
    yield Bound(target, 0, number, f"{number} classes", ignore_index)


def _volume(x: Any, indices: Any, output_size: Any, *_: Any) -> Iterator[Bound]:
    size = math.prod(output_size)
    yield Bound(indices, 0, size, f"output_size={tuple(output_size)} of {size} elements")


def _kth(x: Any, k: int, dim: int = -1, *_: Any, **__: Any) -> Iterator[Bound]:
    size = x.shape[dim] if x.ndim else 1
    where = f"dim {dim} of size {size}"
    yield Bound(torch.tensor(int(k), device="cpu"), 1, size + 1, where, what="number k")


def _masked(x: Any, mask: Any, source: Any) -> Iterator[Bound]:
    shape = torch.broadcast_shapes(x.shape, mask.shape)
    rule = "Pass as many values as the mask has True, or more"
    where, subject = f"a source of {source.numel()} values", "number of places"

    def count(mask: Any) -> Any:
        return mask.expand(shape).sum()

    yield Bound(mask, 0, source.numel() + 1, where, what=subject, rule=rule, of=count)


def _weights(x: Any, *_: Any, **__: Any) -> Iterator[Bound]:
    rule = "Pass weights that are finite and not negative"
    yield Bound(x, 0, math.inf, "a draw", what="weight", rule=rule)


def _bags(weight: Any, indices: Any, offsets: Any, *_: Any, **__: Any) -> Iterator[Bound]:
    yield from _rows(weight, indices)
    count = indices.shape[0]
    yield Bound(offsets, 0, count + 1, f"an input of {count} indices", what="offset")


def _probabilities(where: str, tensors: int = 1) -> Callable[..., Iterator[Bound]]:
    def bounds(*args: Any, **_: Any) -> Iterator[Bound]:
        rule = "Pass probabilities from 0 to 1"
        for x in args[:tensors]:
            yield Bound(x, 0, math.nextafter(1, 2), where, what="probability", rule=rule)

    return bounds


def _divisor(x: Any, y: Any, *_: Any, rounding_mode: str | None = "floor") -> Iterator[Bound]:
    """Floats are divided by 0; whole numbers are not, but by what gives a float (``x / y``)."""
    if rounding_mode is not None and _is_whole(x) and _is_whole(y):
        divisor = y if isinstance(y, torch.Tensor) else torch.tensor(y, device="cpu")
        rule, subject = "Whole numbers cannot be divided by 0: divide floats", "number of zeros"
        yield Bound(divisor, 0, 1, "whole numbers", what=subject, rule=rule, of=_zeros)


def _repeats(repeats: Any, output_size: int | None = None) -> Iterator[Bound]:
    if output_size is not None:
        rule, subject = "Pass their sum as output_size", "sum of repeats"
        where = f"output_size={output_size}"
        yield Bound(repeats, output_size, output_size + 1, where, what=subject, rule=rule, of=_sum)


def _lengths(
    data: Any, *_: Any, lengths: Any = None, axis: int = 0, unsafe: bool = False, **__: Any
) -> Iterator[Bound]:
    if lengths is not None and not unsafe:
        size = data.shape[axis]
        rule, subject = "Pass lengths that sum up to the dim's size", "sum of lengths"
        where = f"dim {axis} of size {size}"
        yield Bound(lengths, size, size + 1, where, what=subject, rule=rule, of=_sum_of_last)


def _sorter(boundaries: Any, *_: Any, sorter: Any = None, **__: Any) -> Iterator[Bound]:
    if sorter is not None:
        size = boundaries.shape[-1]
        yield Bound(sorter, 0, size, f"boundaries of size {size}", what="place in sorter")


def _sum(numbers: Any) -> Any:
    return numbers.sum()


def _sum_of_last(numbers: Any) -> Any:
    return numbers.sum(-1)


def _is_whole(number: Any) -> bool:
    if isinstance(number, torch.Tensor):
        return not (number.is_floating_point() or number.is_complex())
    return not isinstance(number, float | complex)


def _zeros(numbers: Any) -> Any:
    return (numbers == 0).to(torch.int8)


BOUNDS: dict[Any, Callable[..., Iterator[Bound]]] = {
    aten.index.Tensor: _of_dims,
    aten.index_put.default: _of_written,
    aten.embedding.default: _rows,
    aten._embedding_bag.default: _bags,
    aten._embedding_bag_forward_only.default: _bags,
    aten.take.default: _flat,
    aten.put.default: _flat,
    aten.nll_loss_forward.default: _classes,
    aten.nll_loss2d_forward.default: _classes,
    aten.multi_margin_loss.default: _classes_of_margins(0),
    aten.multilabel_margin_loss_forward.default: _classes_of_margins(-1),
    aten.one_hot.default: _one_hot,
    linear_loss: _linear_loss,
    aten.max_unpool2d.default: _volume,
    aten.max_unpool3d.default: _volume,
    aten.kthvalue.default: _kth,
    aten.masked_scatter.default: _masked,
    aten.repeat_interleave.Tensor: _repeats,
    aten.segment_reduce.default: _lengths,
    aten.searchsorted.Tensor: _sorter,
    aten.searchsorted.Scalar: _sorter,
    aten.multinomial.default: _weights,
    aten.bernoulli.default: _probabilities("a draw"),
    aten.binary_cross_entropy.default: _probabilities("a loss", tensors=2),
    **dict.fromkeys(
        (
            aten.floor_divide.default,
            aten.remainder.Tensor,
            aten.remainder.Scalar,
            aten.remainder.Scalar_Tensor,
            aten.fmod.Tensor,
            aten.fmod.Scalar,
        ),
        _divisor,
    ),
    aten.div.Tensor_mode: _divisor,
    aten.div.Scalar_mode: _divisor,
    aten.index_fill.int_Scalar: _along(from_the_end=True),
    aten.index_fill.int_Tensor: _along(from_the_end=True),
    **dict.fromkeys(
        (
            aten.index_select.default,
            aten.gather.default,
            aten.scatter.src,
            aten.scatter.value,
            aten.scatter.reduce,
            aten.scatter.value_reduce,
            aten.scatter_add.default,
            aten.scatter_reduce.two,
            aten.index_add.default,
            aten.index_copy.default,
            aten.index_reduce.default,
        ),
        _along(),
    ),
}


def host_extremes(bound: Bound) -> tuple[float, float] | None:
    """Return the smallest and the largest number of a host tensor, without what is ignored."""
    values = bound.index if bound.of is None else bound.of(bound.index)
    values = values if bound.ignored is None else values[values != bound.ignored]
    return (values.min().item(), values.max().item()) if values.numel() else None


def check_bounds(
    func: Any,
    args: Any,
    kwargs: Any,
    extremes: Callable[[Bound], tuple[float, float] | None],
) -> None:
    """Raise where an op of `BOUNDS` has an index out of range.

    Args:
        func: The op.
        args: Its arguments.
        kwargs: Its keyword arguments.
        extremes: Gives the smallest and the largest number of a bound's tensor, without those that
            are ignored; None where there is none, or where it is not known yet.

    Raises:
        IndexRangeError: An IndexError and a RuntimeError: torch raises either, by op.
    """
    if torch._C._current_graph_task_id() != -1:  # pyright: ignore[reportPrivateImportUsage]
        return
    for bound in BOUNDS[func](*args, **kwargs):
        limits = extremes(bound) if bound.index.numel() else None
        if limits is None or (bound.low <= limits[0] and limits[1] < bound.high):
            continue
        number = limits[1] if limits[0] >= bound.low else limits[0]
        raise IndexRangeError(bound.complaint(name_of(func), number))


def name_of(func: Any) -> str:
    """Return an op's name without its overload, as in ``aten::index``."""
    return func.name().partition(".")[0]


def refuse_part(tensor: torch.Tensor) -> None:
    """Raise where ``as_strided`` would have to read the storage around a part of a tensor.

    A runtime whose tensors have no strides has no such storage.

    Raises:
        UnsupportedOpError: `tensor` is not the whole of what it is a view of, row by row.
    """
    base = tensor._base
    if tensor.is_contiguous() and (base is None or base.numel() == tensor.numel()):
        return
    raise UnsupportedOpError(
        f"as_strided was called on a view of shape={tuple(tensor.shape)}, "
        f"stride={tensor.stride()}. This runtime has no storage to read beyond the view. Call it "
        "on the tensor that the view is of, or on view.contiguous(), or write it with slices."
    )


# ------------------------------------------------------------------------------------- Value checks
#
# Whether compiled steps check the values that decide what they compute, as eager ops do.
#
# An eager op raises for an index that a tensor does not have. A compiled step has no values while
# it is traced, and runs to its end whatever they are: what it reads or writes there is NaN, and
# whole numbers have no NaN. Here each op of the table above gets a flag, an output of the program,
# and the call raises once the step has run::
#
#   with xd.check_values():
#       step(x, i)    IndexRangeError: aten::index was called with the index 8 for dim 0 of size 8.
#
# A check that the step's own Python makes (``assert (x > 0).all()``) has its flag in any case,
# unless ``check_values(False)`` leaves it out.
#
# Invariants:
#
# * A program traced with checks serves no call without, and the other way round.
# * No host callback is made: flags are outputs, small ones.
# * A program whose flags are up returns the values of before for all that it writes to.

_checked: ContextVar[bool | None] = ContextVar("check_values", default=None)
register_setting("check_values", _checked.get)


def are_checked() -> bool:
    """Tell whether ops of compiled steps check their numbers."""
    return _checked.get() is True


def are_left_out() -> bool:
    """Tell whether the checks that a step's own Python makes are left out."""
    return _checked.get() is False


@contextmanager
def check_values(enabled: bool = True) -> Iterator[None]:
    """Let compiled steps raise where an index or another number is out of range.

    Eager ops do so anyhow. Each call of a step waits for its flags, and each check of an index that
    is sharded costs a reduction over the devices; so this is for finding a fault. On the JAX
    runtime; on torch_xla nothing changes.

    The checks that a step's own Python makes (``assert``, an ``if`` that raises, those of
    ``torch.distributions``) need no ``check_values()``: a step that has some waits for their flags.

    Args:
        enabled: False switches an outer ``check_values()`` off, and leaves out those checks too.

    Yields:
        None. What was before is back afterwards.

    Raises:
        IndexRangeError: By the call of a step, with the op, the value, its range and the line of
            the first op that was out of range. Model, optimizer and gradients are as they were.

    Example:
        >>> import torch, xla_dtensor as xd
        >>> mesh = xd.init_device_mesh("xla", (2, 4), mesh_dim_names=("dp", "tp"))
        >>> rows = xd.distribute_tensor(torch.arange(8), mesh, ("dp",))
        >>> step = xd.compile(lambda rows, i: rows[i])
        >>> with xd.check_values():
        ...     step(rows, xd.distribute_tensor(torch.tensor([3, 7]), mesh)).tolist()
        [3, 7]
    """
    token = _checked.set(enabled)
    try:
        yield
    finally:
        _checked.reset(token)
