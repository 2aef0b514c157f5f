"""quick_module: the quick estimate of a module, usually one on the meta device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from mesh_utils import Chip, Mesh
from xla_dtensor.plan.quick.estimate import QuickEstimate, quick_estimate

__all__ = ["module_parameters", "quick_module", "tied_parameters"]


def module_parameters(module: nn.Module) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """List a module's parameters as `quick_estimate` takes them.

    Args:
        module: On any device; the meta device takes no memory.

    Yields:
        Path, global shape and dtype, tied ones under each of their names.

    Example:
        >>> import torch
        >>> with torch.device("meta"):
        ...     model = nn.Linear(4, 8, bias=False)
        >>> list(module_parameters(model))
        [('weight', (8, 4), 'float32')]
    """
    for name, parameter in module.named_parameters(remove_duplicate=False):
        yield name, tuple(parameter.shape), str(parameter.dtype).removeprefix("torch.")


def tied_parameters(module: nn.Module) -> dict[str, str]:
    """Say which parameters are the same tensor as one listed before.

    Args:
        module: The module.

    Returns:
        Path -> the first path of the same tensor.
    """
    first: dict[int, str] = {}
    found: dict[str, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        seen = first.setdefault(id(parameter), name)
        if seen != name:
            found[name] = seen
    return found


def quick_module(
    module: nn.Module,
    rules: Any,
    mesh: Mesh | Mapping[str, int],
    chip: Chip | str | None = None,
    **options: Any,
) -> QuickEstimate:
    """Estimate what a module's plan takes on each device.

    Args:
        module: The module.
        rules: As for ``xla_dtensor.plan.quick.quick_estimate``.
        mesh: The mesh, or the size of each axis.
        chip: The chip, or a name of it.
        **options: More of its arguments.

    Returns:
        The estimate.

    Raises:
        RulesError: Rules that do not fit.

    Example:
        >>> import torch
        >>> with torch.device("meta"):
        ...     model = nn.Linear(4096, 4096, bias=False)
        >>> quick_module(model, {"weight": ["fsdp", None]}, {"fsdp": 4}).bytes_of("parameter")
        16777216
    """
    tied = tied_parameters(module)
    return quick_estimate(module_parameters(module), rules, mesh, chip, same_as=tied, **options)
