"""A JAX function on each device's tiles, for ``xla_dtensor.call_jax``.

The function runs under ``jax.shard_map`` over all axes of a mesh, on a JAX mesh that has the
DeviceMesh's own axis names, so that it can call ``jax.lax.psum(x, "tp")``. That mesh lists the
devices in the root's order, as every mesh of a process has to: axes are moved, not devices. A mesh
(q=4, p=2) whose devices are those of a root (2, 4) read column by column is (p=2, q=4) to JAX. Only
an axis that takes several digits of the root's order, apart from each other, has no such form.

Results are given on the mesh of prime factors that all payloads are on (``jax_sharding``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax
from jax.sharding import AxisType, PartitionSpec

from mesh_utils import Axis, Mesh
from xla_dtensor.core import Layout
from xla_dtensor.errors import DistributeError, UnsupportedOpError
from xla_dtensor.runtimes import jax_devices
from xla_dtensor.runtimes.jax_convert import jax_dtype, torch_dtype, x64
from xla_dtensor.runtimes.jax_ops import as_array
from xla_dtensor.runtimes.jax_sharding import named_sharding
from xla_dtensor.runtimes.jax_tensor import JaxTensor, Storage
from xla_dtensor.runtimes.jax_trace import active_trace

if TYPE_CHECKING:
    from xla_dtensor.runtimes.jax_runtime import JaxRuntime

__all__ = ["JaxProgram", "named_mesh"]

_REDUCTIONS = {"sum": lax.psum, "avg": lax.pmean}


@lru_cache(maxsize=256)
def named_mesh(mesh: Mesh, root: Mesh) -> jax.sharding.Mesh:
    """Return a JAX mesh with the axis names of `mesh`, over the root's devices in its order.

    Args:
        mesh: The mesh; axes without a name are called "0", "1", ...
        root: The process's root mesh for its devices. What `mesh` leaves of it gets names that
            start with an underscore.

    Raises:
        DistributeError: An axis is no single digit of the root's order.
    """
    digits = mesh.digits(root)
    named: list[tuple[int, int, str]] = []
    ones: list[str] = []
    for axis, axis_digits in zip(mesh.axis_names, digits or (), strict=bool(digits)):
        if len(axis_digits) > 1:
            _refuse_order(mesh, axis)
        for size, stride in axis_digits:
            named.append((stride, size, str(axis)))
        if not axis_digits:
            ones.append(str(axis))
    if digits is None:
        _refuse_order(mesh, mesh.axis_names[0])
    sizes, names, left = [], [], root.size()
    for stride, size, name in [*sorted(named, reverse=True), (1, 1, "")]:
        if left > stride * size:
            sizes.append(left // (stride * size))
            names.append(f"_rest{len(names)}")
        if size > 1:
            sizes.append(size)
            names.append(name)
        left = stride
    by_id = {device.id: device for device in jax_devices.devices()}
    devices = np.array([by_id[i] for i in root.device_ids.flat], dtype=object)
    shape = (*sizes, *(1 for _ in ones))
    every = (*names, *ones)
    return jax.sharding.Mesh(
        devices.reshape(shape), every, axis_types=(AxisType.Auto,) * len(every)
    )


def _refuse_order(mesh: Mesh, axis: Axis) -> NoReturn:
    raise DistributeError(
        f"call_jax was called on a mesh {mesh!r}. Its axis {axis!r} walks through the devices in "
        "several strides of the process's device order, and JAX has no one name for that. Use a "
        "mesh each of whose axes is one axis, or some neighbouring axes, of the first mesh made."
    )


class JaxProgram:
    """A JAX function for one kind of arguments.

    Args:
        fn: The function.
        arguments: Makes its positional and keyword arguments from a list of tiles.
        mesh: The mesh.
        in_layouts: How each tensor argument lies.
        runtime: The runtime.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        arguments: Callable[[Sequence[Any]], tuple[Sequence[Any], Mapping[str, Any]]],
        mesh: Mesh,
        in_layouts: Sequence[Layout],
        runtime: JaxRuntime,
    ) -> None:
        self._fn, self._arguments = fn, arguments
        self._root = runtime.root(mesh)
        self._mesh = named_mesh(mesh, self._root)
        self._in_layouts = tuple(in_layouts)
        self._out_layouts: tuple[Layout, ...] = ()
        self._reductions: tuple[tuple[tuple[str, str], ...], ...] = ()
        self._for_grad: dict[tuple[bool, ...], Any] = {}
        self._pulls: dict[tuple[bool, ...], Any] = {}
        self.gives_one = False

    # ------------------------------------------------------------------ what it returns

    def tiles(self, payloads: Sequence[torch.Tensor]) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Return shape and dtype of what `fn` returns on one device."""

        def called(*tiles: Any) -> Any:
            result = self._call(*tiles)
            self.gives_one = not isinstance(result, (tuple, list))
            return (result,) if self.gives_one else tuple(result)

        with x64():
            arrays = [as_array(p) for p in payloads]
            shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays]
            found = jax.eval_shape(self._mapped(called, PartitionSpec()), *shapes)
        return [self._described(tile) for tile in found]

    def _described(self, tile: Any) -> tuple[tuple[int, ...], torch.dtype]:
        try:
            return tuple(tile.shape), torch_dtype(tile.dtype)
        except (AttributeError, KeyError, TypeError):
            raise UnsupportedOpError(
                f"A function in call_jax returned {tile!r}. It is no array of a dtype that torch "
                "has. Return arrays, one or a tuple of them, and convert them with astype."
            ) from None

    def set_outputs(
        self, layouts: Sequence[Layout], reductions: Sequence[Sequence[tuple[Axis, str]]]
    ) -> None:
        """Say how the outputs lie, and over which axes ("sum" or "avg") each is reduced first."""
        self._out_layouts = tuple(layouts)
        self._reductions = tuple(tuple((str(a), op) for a, op in each) for each in reductions)

    # ------------------------------------------------------------------ running

    def run(self, payloads: Sequence[torch.Tensor]) -> list[JaxTensor]:
        """Return the outputs."""
        with x64():
            arrays = [as_array(p) for p in payloads]
            results = (self._whole if active_trace() else self._jitted)(*arrays)
        return self._wrapped(results)

    def run_for_grad(
        self, payloads: Sequence[torch.Tensor], wanted: tuple[bool, ...]
    ) -> tuple[list[JaxTensor], Any]:
        """Return the outputs, and what :meth:`gradients` needs; `wanted` says for which inputs."""
        with x64():
            arrays = [as_array(p) for p in payloads]
            forward = lambda *given: self._forward(wanted, given)  # noqa: E731
            if not active_trace():
                if wanted not in self._for_grad:
                    pins = (self._pins(self._out_layouts), None)
                    self._for_grad[wanted] = jax.jit(forward, out_shardings=pins)
                forward = self._for_grad[wanted]
            results, pull = forward(*arrays)
        return self._wrapped(results), pull

    def gradients(
        self,
        pull: Any,
        wanted: tuple[bool, ...],
        outputs: Sequence[tuple[tuple[int, ...], torch.dtype]],
        grads: Sequence[torch.Tensor | None],
    ) -> list[JaxTensor | None]:
        """Return the gradient of each input, None where it is not wanted.

        Args:
            pull: From :meth:`run_for_grad`.
            wanted: As it was given there.
            outputs: Global shape and torch dtype of each output.
            grads: The gradient of each output; None is zero.
        """
        with x64():
            cotangents = tuple(
                jnp.zeros(shape, jax_dtype(dtype))
                if grad is None
                else as_array(grad).astype(jax_dtype(dtype))
                for (shape, dtype), grad in zip(outputs, grads, strict=True)
                if dtype.is_floating_point or dtype.is_complex
            )
            layouts = [layout for layout, w in zip(self._in_layouts, wanted, strict=True) if w]
            if active_trace():
                found = pull(cotangents)
            else:
                if wanted not in self._pulls:
                    pins = self._pins(layouts)
                    self._pulls[wanted] = jax.jit(lambda p, c: p(c), out_shardings=pins)
                found = self._pulls[wanted](pull, cotangents)
        made = iter(self._wrapped(found, layouts))
        return [next(made) if w else None for w in wanted]

    # ------------------------------------------------------------------ the function for JAX

    def _call(self, *tiles: Any) -> Any:
        args, kwargs = self._arguments(tiles)
        return jax.tree.map(jnp.asarray, self._fn(*args, **kwargs))

    def _mapped(self, function: Callable[..., Any], out_specs: Any) -> Callable[..., Any]:
        return jax.shard_map(
            function,
            mesh=self._mesh,
            in_specs=tuple(map(_partition_spec, self._in_layouts)),
            out_specs=out_specs,
            check_vma=False,
        )

    @cached_property
    def _whole(self) -> Callable[..., Any]:
        def called(*tiles: Any) -> Any:
            result = self._call(*tiles)
            outputs = (result,) if self.gives_one else result
            return tuple(map(_reduced, outputs, self._reductions))

        return self._mapped(called, tuple(map(_partition_spec, self._out_layouts)))

    @cached_property
    def _jitted(self) -> Callable[..., Any]:
        return jax.jit(self._whole, out_shardings=self._pins(self._out_layouts))

    def _forward(self, wanted: tuple[bool, ...], arrays: Sequence[Any]) -> Any:
        def of_wanted(*some: Any) -> Any:
            given = iter(some)
            merged = [next(given) if w else a for w, a in zip(wanted, arrays, strict=True)]
            outputs = self._whole(*merged)
            # Only these have a gradient; the others go along as they are.
            return tuple(o for o in outputs if jnp.issubdtype(o.dtype, jnp.inexact)), outputs

        some = [a for w, a in zip(wanted, arrays, strict=True) if w]
        _, pull, outputs = jax.vjp(of_wanted, *some, has_aux=True)
        return outputs, pull

    def _pins(self, layouts: Sequence[Layout]) -> tuple[Any, ...]:
        return tuple(
            named_sharding(layout.op_sharding(self._root), self._root, layout.ndim)
            for layout in layouts
        )

    def _wrapped(
        self, arrays: Sequence[Any], layouts: Sequence[Layout] | None = None
    ) -> list[JaxTensor]:
        pins = self._pins(self._out_layouts if layouts is None else layouts)
        return [JaxTensor(Storage(a, sharding=p)) for a, p in zip(arrays, pins, strict=True)]


def _partition_spec(layout: Layout) -> PartitionSpec:
    def named(entry: Any) -> Any:
        if entry is None:
            return None
        return tuple(map(str, entry)) if isinstance(entry, tuple) else str(entry)

    return PartitionSpec(*map(named, layout.to_partition_spec()))


def _reduced(output: Any, reductions: Sequence[tuple[str, str]]) -> Any:
    for axis, op in reductions:
        output = _REDUCTIONS[op](output, axis)
    return output
