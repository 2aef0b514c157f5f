"""What ops on a DTensor give a process that reaches none of its mesh's devices.

PyTorch's rule, so that one program runs in every process: None for a scalar, tensors without
values for tensors, and NotImplementedError for a list with a None in it. Such a DTensor's payload
is a meta tensor: it has the shape and dtype of the whole, and no values.

PyTorch asks the processes on the mesh for what ``torch.equal`` gives; that needs a process group.
Here such a comparison raises, because a None would count as False.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from xla_dtensor.device_mesh import DeviceMesh
from xla_dtensor.errors import UnsupportedOpError
from xla_dtensor.nested import map_nested
from xla_dtensor.runtimes.registry import get_runtime

__all__ = ["empty_local", "is_off_mesh", "off_mesh_result"]

aten = torch.ops.aten
_COMPARISONS = frozenset({aten.equal.default, aten.allclose.default})


def is_off_mesh(mesh: DeviceMesh) -> bool:
    """Tell whether the mesh's devices are all of other processes.

    Devices that no process has are a mistake in the mesh, which the runtime's own check names.
    """
    if mesh._coordinate_on_dim is not None:
        return False
    return set(mesh.value.device_ids.reshape(-1).tolist()) <= set(get_runtime().device_ids())


def empty_local(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return what such a process has of a tensor: nothing, of the right dtype.

    Args:
        shape: The shape of the whole.
        dtype: Its dtype.

    Returns:
        An empty 1-D tensor; a zero where the whole has no dims, as in PyTorch.

    Example:
        >>> empty_local((8, 4), torch.int64)
        tensor([], dtype=torch.int64)
    """
    return torch.empty(0, dtype=dtype) if len(shape) else torch.zeros((), dtype=dtype)


def off_mesh_result(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return what an op gives a process that reaches none of its devices.

    Args:
        func: The ``OpOverload``.
        args: Its arguments, meta tensors in place of DTensors.
        kwargs: Its keyword arguments.

    Returns:
        Meta tensors, or None for a scalar.

    Raises:
        UnsupportedOpError: The result is a list with a None in it, or a comparison of values. A
            NotImplementedError, as in PyTorch.

    Example:
        >>> x = torch.empty(4, device="meta")
        >>> off_mesh_result(torch.ops.aten._local_scalar_dense.default, (x,), {}) is None
        True
        >>> off_mesh_result(torch.ops.aten.neg.default, (x,), {}).shape
        torch.Size([4])
    """
    if func in _COMPARISONS:
        raise UnsupportedOpError(
            f"{func} was called on a DTensor of which this process reaches no device. It compares "
            "values, and this process has none. Call it only where mesh.get_coordinate() is not "
            "None."
        )
    if torch.Tag.nondeterministic_seeded in func.tags:
        get_runtime().skip_draw()  # the generators of all processes stay equal
    returns = [str(returned.type) for returned in func._schema.returns]
    if func is not aten.is_same_size.default and not all("Tensor" in kind for kind in returns):
        return None
    args, kwargs = map_nested(_on_meta, (tuple(args), dict(kwargs)))
    result = func(*args, **kwargs)
    if isinstance(result, (list, tuple)) and any(item is None for item in result):
        raise UnsupportedOpError(
            f"{func} was called on a DTensor of which this process reaches no device. Its results "
            f"are a {type(result).__name__} with None in it, which PyTorch's DTensor does not give "
            "such a process either. Call it only where mesh.get_coordinate() is not None."
        )
    return result


def _on_meta(value: Any) -> Any:
    plain = isinstance(value, torch.Tensor) and not value.is_meta
    return value.to("meta") if plain else value
