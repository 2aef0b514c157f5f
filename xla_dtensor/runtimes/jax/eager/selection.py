"""What ``x[mask]`` is in a compiled step: elements of which only the program knows how many.

A program's shapes are fixed. So the elements stay where they are, and what is left out is left out
where they are reduced::

    x = [3, -1, 4]          mask = [True, False, True]
    x[mask]                 Selection([3,  3, 4], mask)
    x[mask].log()           Selection([1.1, 1.1, 1.4], mask)
    x[mask].log().mean()    sum(where(mask, [1.1, 1.1, 1.4], 0)) / sum(mask)

Invariants:

* A selection is a copy, as in PyTorch: later writes to the tensor or to the mask change nothing.
* What is left out holds a copy of the first element that is selected: a function that is not
  defined everywhere, and its gradient, is finite there if it is where PyTorch computes it.
* The first dim of a selection is all dims of the mask; the others are those of its values. So what
  meets another selection has as many dims, and what is none is broadcast over the first one.
* Selections that meet have one mask. Where these are two tensors, the program checks it.
* What PyTorch would compute of the elements in another way is refused by name.
"""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, NoReturn, cast

import torch

from xla_dtensor.runtimes.jax.arrays.trace import active_trace, is_tracer, refuse_read
from xla_dtensor.runtimes.jax.eager.checks import expect
from xla_dtensor.runtimes.state import ON_MESH

__all__ = ["Selection", "selecting"]

# What is computed with each element for itself, beside what PyTorch calls pointwise.
_CASTS = frozenset(
    [
        "to",
        "float",
        "double",
        "half",
        "bfloat16",
        "int",
        "long",
        "bool",
        "type_as",
        "clone",
        "contiguous",
    ]
)
_CASTS |= {"detach", "dropout"}
_OF_KIND = frozenset(("is_floating_point", "is_complex", "is_signed", "element_size"))
# The last dim is one of the values', and stays.
_BY_MATRIX, _NORMS = frozenset(("linear", "matmul")), frozenset(("layer_norm", "rms_norm"))
_ALONG = frozenset(("softmax", "log_softmax"))
# Losses of each element, and the arguments that are none of how they are reduced.
_OF_BITS = frozenset(("weight", "pos_weight"))
_LOSSES: dict[str, frozenset[str]] = {
    "mse_loss": frozenset(),
    "l1_loss": frozenset(),
    "smooth_l1_loss": frozenset(("beta",)),
    "huber_loss": frozenset(("delta",)),
    "binary_cross_entropy": _OF_BITS,
    "binary_cross_entropy_with_logits": _OF_BITS,
    "cross_entropy": frozenset(("ignore_index", "label_smoothing")),
    "nll_loss": frozenset(("ignore_index",)),
}
_OF_CLASSES = frozenset(("cross_entropy", "nll_loss"))
_FLOATS_OF_16 = (torch.bfloat16, torch.float16)


class Selection:
    """The elements of a tensor under a mask. See the module docstring.

    Args:
        values: All elements; those that are left out may have any value.
        mask: Its dims are the first ones of `values`.
        is_safe: Whether what is left out has the value of a selected element.

    Attributes:
        key: Which mask of the program it is: the same for masks whose elements are the same.
    """

    def __init__(self, values: Any, mask: Any, key: Any, is_safe: bool = False) -> None:
        self._all, self.mask, self.key, self._is_safe = values, mask, key, is_safe

    def _with(self, values: Any, is_safe: bool = True) -> Selection:
        return Selection(values, self.mask, self.key, is_safe)

    @property
    def values(self) -> Any:
        """All elements; those that are left out have the value of the first one that is not."""
        if not self._is_safe:
            x, mask = self._all.detach(), self.mask.reshape(-1)
            place = mask.to(torch.int8).argmax().reshape(1)
            row = x.reshape(mask.shape[0], *x.shape[self.mask.ndim :])[place][0]
            row = torch.where(mask.any(), row, 0.5 if x.is_floating_point() else 0).to(x.dtype)
            self._all, self._is_safe = torch.where(self._wide(), self._all, row), True
        return self._all

    def _wide(self) -> Any:
        return self.mask.reshape(*self.mask.shape, *[1] * (self._all.ndim - self.mask.ndim))

    def replaced(self, values: Selection) -> Any:
        """Return all elements, those of `values` where they are selected."""
        _expect_to_meet(self, values)
        if self.dtype != values.dtype:
            _refuse("a write of another dtype")
        return torch.where(self._wide(), values._all, self._all)

    # ------------------------------------------------------------------ what it tells

    dtype = property(lambda self: self._all.dtype)
    device = property(lambda self: self._all.device)
    requires_grad = property(lambda self: self._all.requires_grad)
    ndim = property(lambda self: self._all.ndim - self.mask.ndim + 1)

    @property
    def shape(self) -> tuple[Any, ...]:
        """The first one is a number that only the program knows."""
        return (self.mask.sum().item(), *self._all.shape[self.mask.ndim :])

    def size(self, dim: int | None = None) -> Any:
        """Return the shape, or one number of it."""
        return self.shape if dim is None else self.shape[dim]

    def numel(self) -> Any:
        """Return how many elements there are, as a number of the program."""
        size, *others = self.shape
        return size * torch.Size(others).numel()

    # ------------------------------------------------------------------ what is computed with it

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.removeprefix("__").removesuffix("__")
        return _computed(name, func, *args, **(kwargs or {}))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or not hasattr(ON_MESH[0], name):
            raise AttributeError(f"A tensor has no attribute {name!r}.")
        method = getattr(torch.Tensor, name, None)
        if not callable(method):
            _refuse(f"its {name}")
        return lambda *args, **kwargs: _computed(name, method, self, *args, **kwargs)

    def dim(self) -> int:
        """Return the number of dims."""
        return self.ndim

    def sum(self, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
        """Return the sum of all elements, or over some dims."""
        elements = self if dtype is None else self.to(dtype)
        return elements._reduced("sum", 0, dim, keepdim)

    def mean(self, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
        """Return the mean of all elements, or over some dims."""
        elements = self if dtype is None else self.to(dtype)
        if not elements.dtype.is_floating_point:
            _refuse("the mean of a dtype without fractions")
        dims = self._dims(dim)
        if dims[0]:
            return elements._reduced("mean", 0, dim, keepdim)
        wide = torch.float32 if elements.dtype in _FLOATS_OF_16 else elements.dtype
        total = elements.sum(dim, keepdim, dtype=wide)
        return (total / self._number(dims)).to(elements.dtype)

    def var(
        self, dim: Any = None, unbiased: bool = True, keepdim: bool = False, *, correction: Any = 1
    ) -> Any:
        """Return the variance of all elements, or over some dims."""
        if isinstance(dim, bool):
            dim, unbiased = None, dim
        less = (1 if correction is None else correction) if unbiased else 0
        dims = self._dims(dim)
        if not self.dtype.is_floating_point or dims[0] or keepdim:
            _refuse("a variance of other dtypes, of each row or with keepdim")
        wide = torch.float32 if self.dtype in _FLOATS_OF_16 else self.dtype
        number, elements = self._number(dims), self.to(wide)
        dims_of_rows = range(self.mask.ndim, self._all.ndim)
        shape = [1 if d in dims else self._all.shape[d] for d in dims_of_rows]
        squares = (elements - elements.mean(dim).reshape(shape)).square()
        return (squares.sum(dim) / (number - less).clamp(min=0)).to(self.dtype)

    def std(
        self, dim: Any = None, unbiased: bool = True, keepdim: bool = False, *, correction: Any = 1
    ) -> Any:
        """Return the standard deviation of all elements, or over some dims."""
        return self.var(dim, unbiased, keepdim, correction=correction).sqrt()

    def _number(self, dims: list[int]) -> Any:
        """Return how many elements a reduction over dims of the values takes together."""
        return self.mask.sum() * math.prod(self._all.shape[d] for d in dims[self.mask.ndim :])

    def amax(self, dim: Any = None, keepdim: bool = False) -> Any:
        """Return the largest element, or those over some dims."""
        return self._extreme("amax", _limits(self.dtype)[0], dim, keepdim)

    def amin(self, dim: Any = None, keepdim: bool = False) -> Any:
        """Return the smallest element, or those over some dims."""
        return self._extreme("amin", _limits(self.dtype)[1], dim, keepdim)

    def max(self, *args: Any) -> Any:
        """Return the largest element, or the larger ones of two."""
        return _elementwise(torch.max, self, *args) if args else self.amax()

    def min(self, *args: Any) -> Any:
        """Return the smallest element, or the smaller ones of two."""
        return _elementwise(torch.min, self, *args) if args else self.amin()

    def any(self, dim: Any = None, keepdim: bool = False) -> Any:
        """Tell whether one of the elements is true."""
        return self._truth("any", False, dim, keepdim)

    def all(self, dim: Any = None, keepdim: bool = False) -> Any:
        """Tell whether all of the elements are true."""
        return self._truth("all", True, dim, keepdim)

    def _truth(self, name: str, left_out: bool, dim: Any, keepdim: bool) -> Any:
        if dim in ((), []):  # over none, where sums are over all
            return _elementwise(lambda values: getattr(values, name)(()), self)
        return self._reduced(name, left_out, dim, keepdim)

    def _extreme(self, name: str, left_out: Any, dim: Any, keepdim: bool) -> Any:
        _expect(self.mask.any(), f"the {name} of a tensor under a mask that selects some")
        return self._reduced(name, left_out, dim, keepdim)

    def _reduced(self, name: str, left_out: Any, dim: Any, keepdim: bool) -> Any:
        """Reduce.

        Args:
            name: How.
            left_out: The value of what is left out that changes nothing.
            dim: Over what, as PyTorch takes it.
            keepdim: Whether the dims stay, which the first one does not.
        """
        dims = self._dims(dim)
        if dims[0]:
            return _elementwise(lambda values: getattr(values, name)(dims, keepdim), self)
        if keepdim:
            _refuse(f"{name} with keepdim")
        return getattr(torch.where(self._wide(), self._all, left_out), name)(dims)

    def _dims(self, dim: Any) -> list[int]:
        """Return the dims of the values for some of the selection's."""
        wanted = range(self.ndim) if dim in (None, (), []) else dim
        listed = [wanted] if isinstance(wanted, int) else wanted
        if any(not -self.ndim <= d < self.ndim for d in listed):
            raise IndexError(f"Dimension out of range: {dim} of {self.ndim}")
        if len({d % self.ndim for d in listed}) < len(listed):
            raise RuntimeError(f"A dim appears multiple times in the list of dims {dim}")
        more = self.mask.ndim - 1
        dims = sorted(d % self.ndim + more if d % self.ndim else 0 for d in listed)
        return dims if dims[0] else [*range(more + 1), *dims[1:]]

    def __bool__(self) -> bool:
        _refuse("bool")

    def __len__(self) -> int:
        _refuse("len")

    def __iter__(self) -> Any:
        _refuse("iter")

    def __reduce_ex__(self, protocol: Any) -> Any:
        """What a step returns or stores is a tensor again: after a run its size is known."""
        return operator.getitem, (self._all, self.mask)

    def __getitem__(self, index: Any) -> Any:
        """Return the same of each element, `x[mask][:, 0]`, or some, `x[mask][y[mask] > 0]`."""
        whole = slice(None)
        if isinstance(index, Selection) and index.dtype == torch.bool and index.ndim == 1:
            _expect_one_mask(self, index)
            mask = self.mask & index._all
            return Selection(self._all.clone(), mask, mask)
        if not isinstance(index, tuple) or not isinstance(index[0], slice) or index[0] != whole:
            _refuse("an index of its first dim")
        if any(isinstance(each, torch.Tensor | Selection | list) for each in index):
            _refuse("an index by other tensors")
        dims = [whole] * (self.mask.ndim - 1)
        return _elementwise(lambda values: values[(*dims, *index)], self)

    def __setitem__(self, index: Any, value: Any) -> None:
        _refuse("a write to some of them")


def _method(op: Callable[..., Any], is_turned: bool = False) -> Callable[..., Any]:
    """Return the method of an operator; turned, of one whose second operand is the selection."""

    def method(self: Selection, *other: Any) -> Any:
        if op is operator.matmul:
            return _computed("matmul", op, self, *other)
        function = (lambda mine, theirs: op(theirs, mine)) if is_turned else op
        return _elementwise(function, self, *other)

    return method


_COMPARED = ("eq", "ne", "lt", "le", "gt", "ge")
_TURNED = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and_", "or_", "xor")
for _name in (*_COMPARED, *_TURNED, "matmul", "neg", "abs", "invert"):
    _operator, _word = getattr(operator, _name), _name.removesuffix("_")
    setattr(Selection, f"__{_word}__", _method(_operator))
    if _name in _TURNED:
        setattr(Selection, f"__r{_word}__", _method(_operator, is_turned=True))
        setattr(Selection, f"__i{_word}__", _method(getattr(operator, f"i{_word}")))


def _refuse(name: str) -> NoReturn:
    refuse_read(f"used as a mask that decides how many elements there are, for {name},")


def _computed(name: str, func: Any, *args: Any, **kwargs: Any) -> Any:
    if func is torch.Tensor.__setitem__:
        return _set(*args)
    first, others = (args[0], args[1:]) if args else (None, ())
    own = getattr(Selection, name, None)
    if own is not None and _is_one(first):
        return own(*args, **kwargs)
    if name in _LOSSES:
        return _loss(name, func, *args, **kwargs)
    if name in _OF_KIND and isinstance(first, Selection):
        return func(first._all)
    rows = first if isinstance(first, Selection) and first.ndim > 1 else None
    dim = kwargs.get("dim", others[0] if others else None)
    if name in _ALONG and dim == -1 and rows is not None:
        return _elementwise(func, *args, **kwargs)
    size = kwargs.get("normalized_shape", others[0] if others else ())
    if name in _NORMS and rows is not None and len(size) < rows.ndim:
        return _elementwise(func, *args, **kwargs)
    if name in _BY_MATRIX and rows is not None:
        operands = (*others, *kwargs.values())
        if any(map(_is_one, operands)) or any(getattr(v, "ndim", 0) > 2 for v in operands):
            _refuse(f"{name} of two such tensors, or by more than a matrix")
        return rows._with(func(rows.values, *others, **kwargs))
    if name in _CASTS or _is_pointwise(name):
        return _elementwise(func, *args, **kwargs)
    _refuse(name)


def _set(x: Any, mask: Any, values: Any) -> None:
    selection = _selection(x, mask)
    if selection is None or not isinstance(values, Selection):
        _refuse("a write of them elsewhere")
    x.copy_(selection.replaced(values))


def _is_one(value: Any) -> bool:
    return isinstance(value, Selection)


@lru_cache(maxsize=1024)
def _is_pointwise(name: str) -> bool:
    packet = getattr(torch.ops.aten, name, None)
    overloads = () if packet is None else packet.overloads()
    return any(torch.Tag.pointwise in getattr(packet, each).tags for each in overloads)


def _elementwise(func: Any, *args: Any, **kwargs: Any) -> Selection:
    """Run a function that computes each element, or each row, of its own; it may write to it."""
    first, *others = (value for value in (*args, *kwargs.values()) if isinstance(value, Selection))
    for other in others:
        _expect_to_meet(first, other)

    def values(value: Any) -> Any:
        if isinstance(value, Selection):
            return value.values
        has_rows = isinstance(value, torch.Tensor) and value.ndim >= first.ndim
        if has_rows and not (value.ndim == first.ndim and value.shape[0] == 1):
            _refuse("a tensor beside it that is no row of it")
        return value

    output = func(*map(values, args), **{name: values(value) for name, value in kwargs.items()})
    dims = first.mask.ndim
    if not isinstance(output, torch.Tensor) or output.shape[:dims] != first.mask.shape:
        _refuse(getattr(func, "__name__", "an op"))  # It has made one of all elements.
    return first._with(output)


def _expect_to_meet(left: Selection, right: Selection) -> None:
    if left.ndim != right.ndim:
        _refuse("a tensor under a mask that has another number of dims")
    _expect_one_mask(left, right)


def _expect_one_mask(left: Selection, right: Selection) -> None:
    if left.mask.shape != right.mask.shape:
        _refuse("elements of tensors whose masks differ in shape")
    if left.key is not right.key:
        are_equal = (left.mask == right.mask).all()
        _expect(are_equal, "elements that two masks select meet: the masks are equal")


def _expect(is_true: Any, what: str) -> None:
    expect(is_true.full_tensor().value(), what)


def _limits(dtype: torch.dtype) -> tuple[Any, Any]:
    """Return the smallest and the largest number of a dtype."""
    if dtype == torch.bool:
        return False, True
    info = None if dtype.is_floating_point else torch.iinfo(dtype)
    return (-math.inf, math.inf) if info is None else (info.min, info.max)


def _loss(name: str, func: Any, input: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
    reduction = kwargs.pop("reduction", "mean")
    asked = {key for key, value in kwargs.items() if value is not None}
    if args or asked - _LOSSES[name] or reduction not in ("none", "mean", "sum"):
        _refuse(f"{name} with other arguments than {sorted(_LOSSES[name])} and a reduction,")
    if name in _OF_CLASSES:
        each = _loss_of_classes(func, input, target, **kwargs)
    else:
        each = _elementwise(func, input, target, reduction="none", **kwargs)
    if reduction == "none":
        return each
    if name in _OF_CLASSES and reduction == "mean":
        counted = target._with(target.values != kwargs.get("ignore_index", -100))
        return (each.sum() / counted.sum()).to(each.dtype)
    return getattr(each, reduction)()


def _loss_of_classes(func: Any, input: Any, target: Any, **kwargs: Any) -> Selection:
    if not (_is_one(input) and _is_one(target) and input.ndim == 2 and target.ndim == 1):
        _refuse("classes of more than one dim, or of one tensor that is not masked")
    _expect_one_mask(input, target)
    scores = input.values.movedim(-1, 1)
    return input._with(func(scores, target.values, reduction="none", **kwargs))


# ---------------------------------------------------------------------------- While it is traced


@contextlib.contextmanager
def selecting() -> Iterator[None]:
    """Let what a mask on the mesh selects be selections, while a step is traced.

    Not by a method for ``[]``: to Python, and to ``torch.tensor``, that would make it a sequence.
    """
    kinds: list[Any] = [*ON_MESH]
    usual = [(kind, vars(kind)["__torch_function__"]) for kind in kinds]
    for kind, _ in usual:
        kind.__torch_function__ = classmethod(_function)
    try:
        yield
    finally:
        for kind, function in usual:
            kind.__torch_function__ = function


_SELECTS = (torch.Tensor.__getitem__, torch.Tensor.masked_select, torch.masked_select)


def _function(kind: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    if not all(issubclass(each, kind) or _has_none(each) for each in types):
        return NotImplemented  # a selection's, or a LocalView's
    if func in _SELECTS and len(args) == 2:
        selection = _selection(*args, is_whole=func is not torch.Tensor.__getitem__)
        if selection is not None:
            return selection
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **(kwargs or {}))


def _has_none(kind: type) -> bool:
    """Tell whether a class leaves functions of torch as they are."""
    usual = torch.Tensor.__torch_function__.__func__, torch._C._disabled_torch_function_impl
    own = getattr(kind, "__torch_function__", None)
    return getattr(own, "__func__", own) in usual


def _selection(x: Any, mask: Any, is_whole: bool = False) -> Selection | None:
    """Return what a mask of the program selects, of whole tensors only if so; None for others."""
    if not isinstance(mask, tuple(ON_MESH)) or mask.dtype != torch.bool or not mask.ndim:
        return None
    trace, payload = active_trace(), cast(Any, mask)._local_tensor
    is_known = trace is None or (not is_tracer(payload.value()) and trace.owns(payload._storage))
    is_of_first_dims = mask.shape == (x.shape if is_whole else x.shape[: mask.ndim])
    if is_known or not is_of_first_dims:
        return None
    return Selection(x.clone(), mask.clone(), payload.value())
