"""Initial values drawn by the devices: each draws its own part of what one device would draw.

The draws are those of the runtime's eager ops, bit by bit, on any mesh: standard numbers are drawn
where they lie, counted by their position in the whole, and scaled by one op after the other, so
that no compiler makes one rounding of two.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from mesh_utils import Mesh
from xla_dtensor.core import Layout
from xla_dtensor.dtensor.dtensor import DTensor
from xla_dtensor.dtensor.mesh import is_off_mesh
from xla_dtensor.nn.compile import compile as compile_step
from xla_dtensor.nn.deferred import blocks
from xla_dtensor.nn.deferred.blocks import sharding_of
from xla_dtensor.nn.deferred.draws import DRAWS, Maker, argument
from xla_dtensor.runtimes.registry import get_runtime

__all__ = ["DeviceMaker"]

aten = torch.ops.aten


class DeviceMaker(Maker):
    """See the module docstring."""

    def __init__(self) -> None:
        self._programs: dict[Any, Callable[..., Any]] = {}
        # Where ops are lazy, XLA sees them together; where each runs at once, on an uneven dim it
        # would have the whole on each device in between.
        self._runs_at_once = get_runtime().has_loops

    def draw(self, func: Any, target: DTensor, args: Sequence[Any], kwargs: Any) -> None:
        """Draw a tensor's values anew."""
        if func is aten.normal_.default:
            names, kind = ("mean", "std"), "normal"
        elif func is aten.uniform_.default:
            names, kind = ("from", "to"), "uniform"
        else:
            self._run(func, target, *args[1:], **kwargs)
            return
        first, second = (argument(func, args, kwargs, name) for name in names)
        layout, _ = sharding_of(target)
        wide = torch.promote_types(target.dtype, torch.float32)
        with _drawing_from(argument(func, args, kwargs, "generator")):
            payload = get_runtime().make(kind, tuple(target.shape), wide, layout)
        drawn = DTensor._wrapping(payload, target._spec.mesh, target._spec.placements)
        factor = second if kind == "normal" else second - first
        if factor != 1:
            self._run(aten.mul_.Scalar, drawn, factor)
        if first != 0:
            self._run(aten.add_.Scalar, drawn, first)
        self.assign(target, drawn._local_tensor)

    def skip(self, func: Any, target: torch.Tensor, args: Sequence[Any], kwargs: Any) -> None:
        """Leave a tensor alone, the generator where a draw leaves it."""
        if func in DRAWS and target.numel() and argument(func, args, kwargs, "generator") is None:
            own = list(get_runtime().addressable_device_ids())
            layout = Layout.replicated(Mesh(own, (len(own),), ("own",)), 1)
            get_runtime().make("uniform", (1,), torch.float32, layout)

    def change(self, func: Any, target: DTensor, args: Sequence[Any], kwargs: Any) -> None:
        """Run an in-place op that takes numbers only."""
        self._run(func, target, *args[1:], **kwargs)

    def assign(self, target: DTensor, payload: torch.Tensor) -> None:
        """Give a tensor the values of a payload."""
        if self._is_whole(target):
            Maker.assign(self, target, payload)
        else:
            source = DTensor._wrapping(payload, target._spec.mesh, target._spec.placements)
            self._run(aten.copy_.default, target, source)

    def compute(self, func: Any, args: Sequence[Any], kwargs: Any) -> Any:
        """Run an op that makes new tensors."""
        return func(*args, **kwargs)

    def between_modules(self) -> None:
        """Run what is pending."""
        # A lazy program must not grow with the model; the cut is the same on every mesh.
        if not self._runs_at_once:
            get_runtime().synchronize()

    def _run(self, func: Any, target: DTensor, *args: Any, **kwargs: Any) -> None:
        kwargs = {name: value for name, value in kwargs.items() if value is not None}
        if "generator" in kwargs or (self._is_whole(target) and func not in DRAWS):
            func(target, *args, **kwargs)
            return
        if not self._runs_at_once:
            func(target, *args, **kwargs)
            return
        numbers = tuple(a for a in args if not isinstance(a, torch.Tensor))
        tensors = [a for a in args if isinstance(a, torch.Tensor)]
        key = (func, numbers, tuple(kwargs.items()), target._spec.token())
        if key not in self._programs:

            def step(target: Any, *tensors: Any) -> None:
                func(target, *tensors, *numbers, **kwargs)

            self._programs[key] = compile_step(step)
        self._programs[key](target, *tensors)

    def _is_whole(self, target: DTensor) -> bool:
        """Tell whether ops may run one by one: tiles divide the tensor, or it is small."""
        small = target.numel() <= blocks.RUN
        if small or not self._runs_at_once or is_off_mesh(target._spec.mesh):
            return True
        _, sharding = sharding_of(target)
        if not sharding.is_tiled:
            return True
        return all(n % sharding.num_tiles(dim) == 0 for dim, n in enumerate(target.shape))


def _drawing_from(generator: torch.Generator | None) -> AbstractContextManager[None]:
    if generator is None:
        return contextlib.nullcontext()
    seed = int(torch.randint(2**63 - 1, (), device="cpu", generator=generator))
    return get_runtime().using_rng(get_runtime().new_rng(seed))
