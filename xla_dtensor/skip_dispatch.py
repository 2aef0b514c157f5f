"""SkipDTensorDispatch: ops on DTensors act on their local tensors, but for those that are listed.

In HyperParallel one wraps an optimizer's step with it, so that element-wise ops cost no placement
propagation. Here a DTensor's local tensor is a :class:`~xla_dtensor.LocalView`: all devices' shards
at once. On a mesh of 8 devices::

    x = distribute_tensor(torch.arange(16.0), mesh, [Shard(0)])
    with SkipDTensorDispatch(no_skip={torch.sum}):
        x * 2         a LocalView of shape (2,)
        x.mul_(2)     every device doubles its shard; gives x itself, as PyTorch does
        x.mean()      the mean of each device's two elements
        x.sum()       listed: the sum of all, a DTensor

What is no op answers for the whole tensor as ever: attributes (``shape``, ``grad``), ``size``,
``numel``, ``backward``, and the methods of DTensor itself (``redistribute``, ``full_tensor``,
``cpu``). So does all that this package runs on its own, such as the hooks of ``fully_shard``.

How it works: PyTorch's function mode sees a call of the program before autograd does, and hands on
what ``to_local()`` gives, so gradients come back by the rules of ``to_local()``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any

from torch.overrides import TorchFunctionMode

from xla_dtensor.dtensor import DTensor
from xla_dtensor.errors import ArgumentTypeError, LocalViewError
from xla_dtensor.modes import current_modes, using_modes
from xla_dtensor.nested import map_nested

__all__ = ["SkipDTensorDispatch"]

_COMPUTED_ATTRIBUTES = frozenset({"T", "mT", "H", "mH", "real", "imag"})
# They ask or tell something about the tensor as an object, or about its history.
_NO_OPS = frozenset(
    {
        *("__get__", "__set__", "__delete__", "__len__", "__hash__", "__repr__", "__format__"),
        *("__deepcopy__", "__reduce_ex__", "is_tensor", "has_names", "result_type", "can_cast"),
        *("backward", "grad", "requires_grad_", "retain_grad", "detach_", "register_hook"),
        *("register_post_accumulate_grad_hook", "is_complex", "is_floating_point", "is_signed"),
        *("is_contiguous", "is_inference", "dim", "ndimension", "size", "stride", "numel"),
        *("nelement", "element_size", "storage_offset", "get_device", "data_ptr"),
    }
)
# A DTensor's shape and placements would part.
_RESHAPING = frozenset(
    {
        *("t_", "transpose_", "squeeze_", "unsqueeze_", "swapaxes_", "swapdims_", "as_strided_"),
        *("resize_", "resize_as_", "set_", "rename_"),
    }
)
_PACKAGE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "")
_PASSED_ON_BY = frozenset({"torch.overrides", "torch._tensor", "torch.functional"})


class SkipDTensorDispatch(TorchFunctionMode):
    """Let ops act on the local tensors of DTensors, in this thread and block.

    Results are LocalViews. In-place ops write to the DTensor, and give it back. Blocks nest, and
    inside of the inner one the lists of both hold.

    Args:
        no_skip: The ops that go on acting on whole DTensors: functions, methods or their names. An
            op is known by its name, so ``torch.sum``, ``torch.Tensor.sum`` and ``"sum"`` say the
            same; ``"add_"`` is not ``"add"``, and ``1 - x`` is ``"__rsub__"``. It
            is the op that the program calls, not one that PyTorch calls inside of it.

    Raises:
        ArgumentTypeError: `no_skip` is no collection of functions and names.
        LocalViewError: From an op in the block: an in-place op that changes the shape, or what a
            LocalView refuses.

    Example:
        >>> import torch, xla_dtensor as xd
        >>> from torch.distributed.tensor import Shard
        >>> mesh = xd.init_device_mesh("xla", (8,))
        >>> x = xd.distribute_tensor(torch.arange(16.0), mesh, [Shard(0)])
        >>> with xd.SkipDTensorDispatch(no_skip={torch.sum}):
        ...     x.mul_(2) is x, (x + 1).shape, x.sum().item()
        (True, torch.Size([2]), 240.0)
    """

    def __init__(self, no_skip: Iterable[Callable[..., Any] | str] | None = None) -> None:
        super().__init__()
        self._names = _names(no_skip)
        self._open: list[ExitStack] = []

    def __enter__(self) -> SkipDTensorDispatch:
        modes, block = current_modes(), ExitStack()
        listed = self._names | (modes.no_skip or frozenset())
        block.enter_context(using_modes(modes._replace(no_skip=listed)))
        self._open.append(block)
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self._open.pop().close()

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = _name(func)
        no_op = name in _NO_OPS or name in (current_modes().no_skip or ())
        if no_op or _is_internal_call():
            return func(*args, **kwargs)
        stand_ins: dict[int, tuple[Any, Any]] = {}

        def local(value: Any) -> Any:
            if not isinstance(value, DTensor):
                return value
            if id(value) not in stand_ins:
                _check_keeps_shape(name, value)
                stand_ins[id(value)] = value, value.to_local()
            return stand_ins[id(value)][1]

        local_args, local_kwargs = map_nested(local, (tuple(args), dict(kwargs)))
        result = func(*local_args, **local_kwargs)
        if not stand_ins or not _writes(name, kwargs):
            return result
        written = {id(view): tensor for tensor, view in stand_ins.values()}
        return map_nested(lambda value: written.get(id(value), value), result)


def _names(no_skip: Any) -> frozenset[str]:
    listed = [] if no_skip is None else no_skip
    if isinstance(listed, str) or not isinstance(listed, Iterable):
        raise ArgumentTypeError(
            f"SkipDTensorDispatch was called with no_skip={no_skip!r}. It takes a collection of "
            "functions and names. Pass a set, e.g. {torch.zeros_like, 'add_'}."
        )
    names: set[str] = set()
    for op in listed:
        name = op if isinstance(op, str) else _name(op) if callable(op) else None
        if not name:
            raise ArgumentTypeError(
                f"SkipDTensorDispatch was called with {op!r} in no_skip. An op is known by the "
                "name of a function. Pass a function such as torch.zeros_like, or its name."
            )
        names.add(name)
    return frozenset(names)


def _name(func: Any) -> str:
    """Return what an op is called: "sub" for ``x - y`` and torch.sub, "__rsub__" for ``1 - x``.

    Overloads of torch.ops have the name of their op, and attributes that compute their own.
    """
    name = str(getattr(func, "__name__", ""))
    if name == "__get__":
        attribute = str(getattr(getattr(func, "__self__", None), "__name__", ""))
        return attribute if attribute in _COMPUTED_ATTRIBUTES else name
    return name.partition(".")[0]


def _check_keeps_shape(name: str, tensor: DTensor) -> None:
    if name in _RESHAPING:
        raise LocalViewError(
            f"{name} was called on {tensor!r} inside SkipDTensorDispatch. It would change the "
            "shape of the local tensor, and the DTensor's placements would no longer fit. Pass "
            f"no_skip={{{name!r}}}, or use {name.removesuffix('_')}, which returns a local view."
        )


def _writes(name: str, kwargs: Any) -> bool:
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or name.startswith("__i") or kwargs.get("out") is not None


def _is_internal_call() -> bool:
    """Tell whether it is not the program that calls the op, but this package or PyTorch."""
    frame = sys._getframe(2)
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        # To make a parameter of a DTensor is no op, nor is the first gradient of a backward pass.
        if module == "torch.nn.parameter" or module.startswith("torch.autograd"):
            return True
        if module not in _PASSED_ON_BY and frame.f_code is not DTensor.to.__code__:
            return frame.f_code.co_filename.startswith(_PACKAGE)
        frame = frame.f_back
    return False
