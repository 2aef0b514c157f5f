"""custom_shard: a function of local tensors, called with DTensors.

HyperParallel's ``custom_shard`` is PyTorch's ``local_map`` with other conventions: the mesh comes
second, placements are listed per argument and per output, and inputs are moved by default. The
function gets :class:`~xla_dtensor.LocalView` s, so whatever it computes, each device computes on
its own shards; only the collectives that it calls communicate.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import Placement

from xla_dtensor.argument_types import argument_types
from xla_dtensor.core import Layout
from xla_dtensor.device_mesh import DeviceMesh, as_device_mesh, mesh_text
from xla_dtensor.dtensor import DTensor
from xla_dtensor.dynamo_calls import one_call
from xla_dtensor.errors import ArgumentTypeError, DistributeError, RedistributeError
from xla_dtensor.placement_checks import checked_placements

__all__ = ["custom_shard"]


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
        result = func(*local_args, **kwargs)
        if not any(isinstance(arg, DTensor) for arg in args):
            return result
        return _distributed(result, mesh, outputs)

    return of_dtensors


def _per_item(placements: Sequence[Any] | None) -> tuple[Any, ...] | None:
    """Return one entry per argument or output, also where one item's placements stand alone."""
    if placements is None:
        return None
    alone = any(isinstance(entry, (str, Placement)) for entry in placements)
    return (tuple(placements),) if alone else tuple(placements)


def _check_number(name: str, listed: tuple[Any, ...] | None, args: Sequence[Any]) -> None:
    if listed is not None and len(listed) != len(args):
        raise DistributeError(
            f"A function made by custom_shard was called with {len(args)} positional arguments, "
            f"and {name} has {len(listed)} entries. There is one entry per positional argument. "
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
    asked = None if inputs is None else inputs[index]
    if not isinstance(arg, DTensor):
        if asked is not None:
            raise ArgumentTypeError(
                f"A function made by custom_shard was called with a {type(arg).__name__} as "
                f"argument {index}, for which in_placements has {asked}. Only a DTensor has "
                "placements. Pass distribute_tensor(value, mesh, placements), or list None."
            )
        return arg
    if inputs is None:
        raise RedistributeError(
            f"A function made by custom_shard was called with {arg!r} as argument {index}, without "
            "in_placements. How its local tensors are to be cut is not said. Pass in_placements "
            "with one entry per argument."
        )
    if asked is None:
        raise ArgumentTypeError(
            f"A function made by custom_shard was called with {arg!r} as argument {index}, for "
            "which in_placements has None. None is for what is no DTensor. List the placements "
            "that its local tensors are to have."
        )
    given = None if grads is None else grads[index]
    return _moved_to_local(arg, index, mesh, asked, redistribute_inputs, given)


@one_call
def _moved_to_local(
    arg: DTensor, index: int, mesh: DeviceMesh, asked: Any, move: bool, given: Any
) -> torch.Tensor:
    return _moved(index, arg, mesh, asked, move).to_local(grad_placements=given)


def _moved(index: int, arg: DTensor, mesh: DeviceMesh, asked: Any, move: bool) -> DTensor:
    wanted = checked_placements("custom_shard", asked, mesh, arg.ndim, partial=True)
    # By layout: in torch 2.9 a _StridedShard equals the Shard of its dim.
    layout = Layout.from_placements(wanted, arg.ndim, mesh.value)
    if arg.device_mesh == mesh and arg.mesh_layout == layout:
        return arg
    if not move:
        raise DistributeError(
            f"A function made by custom_shard was called with {arg!r} as argument {index}, and "
            f"in_placements has {list(wanted)} on the mesh {mesh_text(mesh.value)}. With "
            "redistribute_inputs=False nothing is moved. Call redistribute on it first, or leave "
            "redistribute_inputs=True."
        )
    return arg.redistribute(mesh, wanted)


def _distributed(result: Any, mesh: DeviceMesh, outputs: tuple[Any, ...]) -> Any:
    """Return the function's outputs as DTensors."""
    several = isinstance(result, (tuple, list))
    items: list[Any] = list(result) if several else [result]
    if len(items) != len(outputs):
        raise DistributeError(
            f"A function made by custom_shard returned {len(items)} outputs, and out_placements "
            f"has {len(outputs)} entries. There is one entry per output. List None for what is no "
            "tensor."
        )
    made = [
        _output(index, item, mesh, placements)
        for index, (item, placements) in enumerate(zip(items, outputs, strict=True))
    ]
    if not several:
        return made[0]
    return made if isinstance(result, list) else tuple(made)


def _output(index: int, item: Any, mesh: DeviceMesh, placements: Any) -> Any:
    if isinstance(item, torch.Tensor) != (placements is not None):
        raise ArgumentTypeError(
            f"A function made by custom_shard returned a {type(item).__name__} as output {index}, "
            f"for which out_placements has {placements}. A tensor has placements, anything else "
            "has None. Change out_placements accordingly."
        )
    return item if placements is None else DTensor.from_local(item, mesh, placements)
