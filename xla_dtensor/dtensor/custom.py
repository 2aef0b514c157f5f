"""custom_shard: a function of local tensors, called with DTensors.

HyperParallel's ``custom_shard`` is PyTorch's ``local_map`` with other conventions: the mesh comes
second, placements are listed per argument and per output, and inputs are moved by default. The
function gets :class:`~xla_dtensor.LocalView` s, so whatever it computes, each device computes on
its own shards; only the collectives that it calls communicate.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch.distributed.tensor import Placement
from torch.overrides import TorchFunctionMode

from xla_dtensor.core import Layout
from xla_dtensor.core.argument_types import argument_types
from xla_dtensor.core.errors import (
    ArgumentTypeError,
    DistributeError,
    LocalViewError,
    RedistributeError,
)
from xla_dtensor.dtensor.dtensor import DTensor
from xla_dtensor.dtensor.dynamo import one_call
from xla_dtensor.dtensor.mesh import DeviceMesh, as_device_mesh, mesh_text
from xla_dtensor.dtensor.modes import current_modes, using_modes
from xla_dtensor.dtensor.redistribute import checked_placements
from xla_dtensor.runtimes.nested import map_nested
from xla_dtensor.versions import PACKAGE_FOLDER

__all__ = ["SkipDTensorDispatch", "custom_shard"]


# ------------------------------------------------------------------------------------ custom_shard


@argument_types
def custom_shard(
    func: Callable[..., Any] | None = None,
    device_mesh: Any = None,
    out_placements: Sequence[Any] | None = None,
    in_placements: Sequence[Any] | None = None,
    redistribute_inputs: bool = True,
    *,
    in_grad_placements: Sequence[Any] | None = None,
) -> Callable[..., Any]:
    """Make a function of local tensors one of DTensors.

    Args:
        func: Called with a LocalView in place of each DTensor among its positional arguments. Left
            out, what is returned is a decorator.
        device_mesh: The mesh of inputs and outputs.
        out_placements: Per output its placements, or alias placements; None for what is no tensor.
            For a single output its placements alone do too.
        in_placements: Per positional argument its placements; None for what is no DTensor.
        redistribute_inputs: Move inputs that lie otherwise; if False, these are refused.
        in_grad_placements: Per positional argument the placements of the local gradient, as in
            ``to_local(grad_placements=...)``. E.g. Partial along the axes over which an input that
            is copied has another gradient on each device.

    Returns:
        A function that takes and returns DTensors. Without a DTensor among its positional
        arguments it does what `func` does.

    Raises:
        ArgumentTypeError: An argument or output is a tensor where None is listed, or the reverse.
        DistributeError: Wrong numbers of placements, or an input that lies otherwise.
        RedistributeError: A DTensor, and no `in_placements`. A RuntimeError, as in HyperParallel.

    Example:
        >>> import torch, xla_dtensor as xd
        >>> from torch.distributed.tensor import Partial, Replicate, Shard
        >>> mesh = xd.init_device_mesh("xla", (2, 4), mesh_dim_names=("dp", "tp"))
        >>> rows = xd.custom_shard(
        ...     lambda x: x.sum(0),  # of each device's own rows
        ...     mesh,
        ...     out_placements=((Partial(), Replicate()),),
        ...     in_placements=(("dp", "None"),),
        ... )
        >>> rows(xd.distribute_tensor(torch.ones(8, 2), mesh)).tolist()
        [8.0, 8.0]
    """
    if func is None:
        return functools.partial(
            custom_shard,
            device_mesh=device_mesh,
            out_placements=out_placements,
            in_placements=in_placements,
            redistribute_inputs=redistribute_inputs,
            in_grad_placements=in_grad_placements,
        )
    mesh = as_device_mesh(device_mesh)
    outputs, inputs, grads = map(_per_item, (out_placements, in_placements, in_grad_placements))
    if outputs is None:
        raise ArgumentTypeError(
            "custom_shard was called without out_placements. What the function returns are local "
            "tensors, and how they make up a DTensor cannot be guessed. Pass one entry per output."
        )

    @functools.wraps(func)
    def of_dtensors(*args: Any, **kwargs: Any) -> Any:
        _check_number("in_placements", inputs, args)
        _check_number("in_grad_placements", grads, args)
        local_args = [
            _local(index, arg, mesh, inputs, grads, redistribute_inputs)
            for index, arg in enumerate(args)
        ]
        output = func(*local_args, **kwargs)
        if not any(isinstance(arg, DTensor) for arg in args):
            return output
        return _distributed(output, mesh, outputs)

    return of_dtensors


def _per_item(placements: Sequence[Any] | None) -> tuple[Any, ...] | None:
    """Return one entry per argument or output, also where one item's placements stand alone."""
    if placements is None:
        return None
    is_one_entry = any(isinstance(entry, (str, Placement)) for entry in placements)
    return (tuple(placements),) if is_one_entry else tuple(placements)


def _check_number(name: str, entries: tuple[Any, ...] | None, args: Sequence[Any]) -> None:
    if entries is not None and len(entries) != len(args):
        raise DistributeError(
            f"A function made by custom_shard was called with {len(args)} positional arguments, "
            f"and {name} has {len(entries)} entries. There is one entry per positional argument. "
            "List None for what is no DTensor; pass what needs no entry by keyword."
        )


def _local(
    index: int,
    arg: Any,
    mesh: DeviceMesh,
    inputs: tuple[Any, ...] | None,
    grads: tuple[Any, ...] | None,
    redistribute_inputs: bool,
) -> Any:
    """Return an argument as the function is to see it."""
    placements = None if inputs is None else inputs[index]
    if not isinstance(arg, DTensor):
        if placements is not None:
            raise ArgumentTypeError(
                f"A function made by custom_shard was called with a {type(arg).__name__} as "
                f"argument {index}, for which in_placements has {placements}. Only a DTensor has "
                "placements. Pass distribute_tensor(value, mesh, placements), or list None."
            )
        return arg
    if inputs is None:
        raise RedistributeError(
            f"A function made by custom_shard was called with {arg!r} as argument {index}, without "
            "in_placements. How its local tensors are to be cut is not said. Pass in_placements "
            "with one entry per argument."
        )
    if placements is None:
        raise ArgumentTypeError(
            f"A function made by custom_shard was called with {arg!r} as argument {index}, for "
            "which in_placements has None. None is for what is no DTensor. List the placements "
            "that its local tensors are to have."
        )
    grad_placements = None if grads is None else grads[index]
    return _local_argument(arg, index, mesh, placements, redistribute_inputs, grad_placements)


@one_call
def _local_argument(
    arg: DTensor,
    index: int,
    mesh: DeviceMesh,
    placements: Any,
    redistribute: bool,
    grad_placements: Any,
) -> torch.Tensor:
    dtensor = _redistributed(index, arg, mesh, placements, redistribute)
    return dtensor.to_local(grad_placements=grad_placements)


def _redistributed(
    index: int, arg: DTensor, mesh: DeviceMesh, placements: Any, redistribute: bool
) -> DTensor:
    canonical = checked_placements("custom_shard", placements, mesh, arg.ndim, partial=True)
    # By layout: in torch 2.9 a _StridedShard equals the Shard of its dim.
    layout = Layout.from_placements(canonical, arg.ndim, mesh.value)
    if arg.device_mesh == mesh and arg.mesh_layout == layout:
        return arg
    if not redistribute:
        raise DistributeError(
            f"A function made by custom_shard was called with {arg!r} as argument {index}, and "
            f"in_placements has {list(canonical)} on the mesh {mesh_text(mesh.value)}. With "
            "redistribute_inputs=False nothing is moved. Call redistribute on it first, or leave "
            "redistribute_inputs=True."
        )
    return arg.redistribute(mesh, canonical)


def _distributed(output: Any, mesh: DeviceMesh, outputs: tuple[Any, ...]) -> Any:
    """Return the function's outputs as DTensors."""
    is_sequence = isinstance(output, (tuple, list))
    tensors: list[Any] = list(output) if is_sequence else [output]
    if len(tensors) != len(outputs):
        raise DistributeError(
            f"A function made by custom_shard returned {len(tensors)} outputs, and out_placements "
            f"has {len(outputs)} entries. There is one entry per output. List None for what is no "
            "tensor."
        )
    dtensors = [
        _output(index, tensor, mesh, placements)
        for index, (tensor, placements) in enumerate(zip(tensors, outputs, strict=True))
    ]
    if not is_sequence:
        return dtensors[0]
    return dtensors if isinstance(output, list) else tuple(dtensors)


def _output(index: int, tensor: Any, mesh: DeviceMesh, placements: Any) -> Any:
    if isinstance(tensor, torch.Tensor) != (placements is not None):
        raise ArgumentTypeError(
            f"A function made by custom_shard returned a {type(tensor).__name__} as output "
            f"{index}, for which out_placements has {placements}. A tensor has placements, "
            "anything else has None. Change out_placements accordingly."
        )
    return tensor if placements is None else DTensor.from_local(tensor, mesh, placements)


# ----------------------------------------------------------------------------- SkipDTensorDispatch
#
# Ops on DTensors act on their local tensors, but for those that are listed.
#
# In HyperParallel one wraps an optimizer's step with it, so that element-wise ops cost no placement
# propagation. Here a DTensor's local tensor is a :class:`~xla_dtensor.LocalView`: all devices'
# shards at once. On a mesh of 8 devices::
#
#     x = distribute_tensor(torch.arange(16.0), mesh, [Shard(0)])
#     with SkipDTensorDispatch(no_skip={torch.sum}):
#         x * 2         a LocalView of shape (2,)
#         x.mul_(2)     every device doubles its shard; gives x itself, as PyTorch does
#         x.mean()      the mean of each device's two elements
#         x.sum()       listed: the sum of all, a DTensor
#
# What is no op answers for the whole tensor as ever: attributes (``shape``, ``grad``), ``size``,
# ``numel``, ``backward``, and the methods of DTensor itself (``redistribute``, ``full_tensor``,
# ``cpu``). So does all that this package runs on its own, such as the hooks of ``fully_shard``.
#
# How it works: PyTorch's function mode sees a call of the program before autograd does, and hands
# on what ``to_local()`` gives, so gradients come back by the rules of ``to_local()``.

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
_PACKAGE = os.path.join(PACKAGE_FOLDER, "")
_PASSED_ON_BY = frozenset(
    {"torch.overrides", "torch._tensor", "torch.functional", "xla_dtensor.hosts.accelerator"}
)


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

        def local(leaf: Any) -> Any:
            if not isinstance(leaf, DTensor):
                return leaf
            if id(leaf) not in stand_ins:
                _check_keeps_shape(name, leaf)
                stand_ins[id(leaf)] = leaf, leaf.to_local()
            return stand_ins[id(leaf)][1]

        local_args, local_kwargs = map_nested(local, (tuple(args), dict(kwargs)))
        output = func(*local_args, **local_kwargs)
        if not stand_ins or not _writes(name, kwargs):
            return output
        written = {id(view): tensor for tensor, view in stand_ins.values()}
        return map_nested(lambda leaf: written.get(id(leaf), leaf), output)


def _names(no_skip: Any) -> frozenset[str]:
    ops = [] if no_skip is None else no_skip
    if isinstance(ops, str) or not isinstance(ops, Iterable):
        raise ArgumentTypeError(
            f"SkipDTensorDispatch was called with no_skip={no_skip!r}. It takes a collection of "
            "functions and names. Pass a set, e.g. {torch.zeros_like, 'add_'}."
        )
    names: set[str] = set()
    for op in ops:
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
