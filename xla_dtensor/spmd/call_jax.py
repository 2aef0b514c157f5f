"""call_jax: a JAX function or a Pallas kernel in the middle of a PyTorch program.

The function gets each device's tile and returns each device's tile. A row-parallel matmul, with the
sum over tp written in JAX::

    def rows(x, w):                                    x (4, 2), w (2, 5) on each device
        return jax.lax.psum(x @ w, "tp")               the mesh's own axis names

    matmul = call_jax(rows, [("dp", "tp"), ("tp", None)], ("dp", None))
    y = matmul(x, w)                                   DTensors in, a DTensor out, with gradients

Placements
----------
Each tensor argument and each output has an *entry*: placements per mesh axis
(``[Shard(0), Replicate()]``), axis names per dim as a tuple (``("dp", None)``), or None for a copy
on every device.

* An argument that lies otherwise is moved first, as ``redistribute`` does.
* Every tile has to be of the same size: a shape that the mesh does not divide is refused, because
  the function would compute on padding.
* ``Partial()`` and ``Partial("avg")`` of an output say that the function returns each device's term
  of a sum or mean over that axis. It is reduced (``psum``, ``pmean``), and the result, of which
  every device along the axis then has a copy, is ``Replicate()`` there.

Gradients
---------
They are ``jax.vjp``'s, with a function's own ``jax.custom_vjp`` where it has one, and obey the
rules of ``jax.shard_map(check_vma=False)``: the gradients of an argument that is copied along an
axis are summed over it; the gradient of an output that is copied along an axis is shared out, one
n-th to each copy. So a function written with ``psum`` has the gradient of the global function. What
jax.vjp keeps for the backward pass lives as long as autograd's graph, under ``checkpoint`` too.

Types
-----
The function sees torch's dtypes, 64-bit ones included: it runs in JAX's 64-bit mode, in which
``jnp.arange(3)`` is int64. A kernel that must not see that wraps itself in
``with jax.enable_x64(False):``.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import Placement, Replicate
from torch.utils._pytree import tree_flatten, tree_unflatten

from xla_dtensor.core import Layout
from xla_dtensor.core.errors import (
    ArgumentTypeError,
    DistributeError,
    ManualRegionError,
    UnsupportedOpError,
)
from xla_dtensor.dtensor.api import distribute_tensor
from xla_dtensor.dtensor.dtensor import DTensor
from xla_dtensor.dtensor.mesh import DeviceMesh, as_device_mesh, current_mesh, mesh_text
from xla_dtensor.dtensor.redistribute import checked_placements
from xla_dtensor.runtimes.registry import get_runtime
from xla_dtensor.runtimes.whole_ops import refuse_second

__all__ = ["call_jax"]

Entry = Sequence[Any] | None


def call_jax(
    fn: Callable[..., Any],
    in_placements: Sequence[Entry],
    out_placements: Any,
    device_mesh: Any = None,
) -> Callable[..., Any]:
    """Return a function on DTensors that runs a JAX function on each device's tiles.

    Args:
        fn: Takes and returns JAX arrays, tiles of one device; it may call collectives over the
            mesh's axis names ("0", "1", ... where they have none). It runs when it is traced, once
            per kind of arguments, so it must not depend on anything that changes. It returns one
            array, or a tuple of them.
        in_placements: One entry per tensor argument, in the order of the call (see the module).
        out_placements: One entry for one output; a list of entries for a tuple of outputs. A tuple
            of names is one entry.
        device_mesh: The mesh; that of the first DTensor argument when None.

    Returns:
        A function with the arguments of `fn`: DTensors, CPU tensors (every device gets its tile of
        the same values), and anything hashable, which `fn` gets as it is. It works eagerly and
        inside :func:`xla_dtensor.compile`, where `fn` becomes part of the one program.

    Raises:
        DistributeError: Another number of tensors or outputs than placements, a shape that the mesh
            does not divide, or a mesh that JAX cannot name. Raised by the returned function, as are
            the others.
        ArgumentTypeError: An argument that is no tensor and not hashable.
        ManualRegionError: A manual tensor.
        UnsupportedOpError: The runtime is not JAX's.

    Example:
        >>> import jax, torch, xla_dtensor as xd
        >>> from xla_dtensor.spmd.call_jax import call_jax
        >>> mesh = xd.init_device_mesh("xla", (2, 4), mesh_dim_names=("dp", "tp"))
        >>> x = xd.distribute_tensor(torch.arange(8.0), mesh, ("tp",))
        >>> total = call_jax(lambda x: jax.lax.psum(x.sum(), "tp"), [("tp",)], None)
        >>> total(x).item()
        28.0
    """
    return _Call(fn, in_placements, out_placements, device_mesh)


class _Call:
    """What :func:`call_jax` returns."""

    def __init__(self, fn: Callable[..., Any], inputs: Any, outputs: Any, mesh: Any) -> None:
        if not isinstance(inputs, (list, tuple)):
            raise DistributeError(
                f"call_jax was called with in_placements={inputs!r}. There is one entry per tensor "
                "argument of the function. Pass a list of entries, e.g. [('dp', None), None]."
            )
        self._fn, self._inputs = fn, tuple(inputs)
        self._outputs, self._gives_one = _entries(outputs)
        self._mesh = None if mesh is None else as_device_mesh(mesh)
        self._programs: dict[Hashable, _Program] = {}
        self.__name__ = getattr(fn, "__name__", type(fn).__name__)
        self.__doc__ = fn.__doc__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        runtime = get_runtime()
        if not hasattr(runtime, "jax_program"):
            raise UnsupportedOpError(
                f"call_jax was called for {self.__name__} on the runtime {runtime.name!r}. Only "
                "JAX's own runtime can run JAX functions in its programs. Start it with "
                "get_runtime('jax'), or set XLA_DTENSOR_RUNTIME=jax."
            )
        leaves, tree = tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        self._check_tensors(tensors)
        mesh = self._mesh or next((t.device_mesh for t in tensors if isinstance(t, DTensor)), None)
        mesh = current_mesh("call_jax") if mesh is None else mesh
        assert isinstance(mesh, DeviceMesh)
        inputs = [
            self._input(i, tensor, entry, mesh)
            for i, (tensor, entry) in enumerate(zip(tensors, self._inputs, strict=True))
        ]
        program = self._program(leaves, tree, inputs, mesh, runtime)
        needs_grad = torch.is_grad_enabled() and any(t.requires_grad for t in inputs)
        outputs: Any = _Run.apply(program, needs_grad, *inputs)
        return outputs[0] if self._gives_one else outputs

    def _check_tensors(self, tensors: Sequence[torch.Tensor]) -> None:
        if len(tensors) != len(self._inputs):
            raise DistributeError(
                f"{self.__name__} was called through call_jax with {len(tensors)} tensors. Its "
                f"in_placements have {len(self._inputs)} entries, and each tensor needs one. Pass "
                "one entry per tensor argument; None is a copy on every device."
            )
        for tensor in tensors:
            if getattr(tensor, "_is_per_device", False):
                raise ManualRegionError(
                    f"{self.__name__} was called through call_jax with {tensor!r}. call_jax cuts "
                    "global tensors into tiles itself. Call disable_manual_sharding first."
                )

    def _input(self, index: int, tensor: torch.Tensor, entry: Entry, mesh: DeviceMesh) -> DTensor:
        placements = checked_placements("call_jax", entry, mesh, tensor.ndim, partial=False)
        layout = Layout.from_placements(placements, tensor.ndim, mesh.value)
        self._check_even(index, tensor, layout, mesh)
        if not isinstance(tensor, DTensor):
            if tensor.requires_grad:
                raise DistributeError(
                    f"{self.__name__} was called through call_jax with a plain tensor of shape="
                    f"{tuple(tensor.shape)} that requires grad. Its gradient would end at the "
                    "copy on the devices. Pass distribute_tensor(tensor, mesh, placements)."
                )
            return distribute_tensor(tensor.detach(), mesh, placements)
        if tensor.device_mesh == mesh and tensor.mesh_layout == layout:
            return tensor
        return tensor.redistribute(mesh, placements)

    def _check_even(
        self, index: int, tensor: torch.Tensor, layout: Layout, mesh: DeviceMesh
    ) -> None:
        for dim, size in enumerate(tensor.shape):
            if size % layout.num_shards(dim):
                axes, tiles = ", ".join(map(repr, layout.dims[dim])), layout.num_shards(dim)
                raise DistributeError(
                    f"{self.__name__} was called through call_jax with tensor {index} of shape="
                    f"{tuple(tensor.shape)}, its dim {dim} cut by {axes} of the mesh "
                    f"{mesh_text(mesh.value)}. {tiles} tiles do not divide {size}, and "
                    "the function would compute on padding. Pad the tensor yourself, or leave "
                    "the dim whole."
                )

    # ------------------------------------------------------------------ programs

    def _program(
        self,
        leaves: Sequence[Any],
        tree: Any,
        inputs: Sequence[DTensor],
        mesh: DeviceMesh,
        runtime: Any,
    ) -> _Program:
        static = tuple(
            _Tile if isinstance(leaf, torch.Tensor) else self._static(leaf) for leaf in leaves
        )
        kinds = tuple((tuple(t.shape), t.dtype, t.mesh_layout) for t in inputs)
        key = (tree, static, kinds, mesh)
        if key not in self._programs:
            template = [_Tile if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]

            def arguments(tiles: Sequence[Any]) -> Any:
                tile = iter(tiles)
                return tree_unflatten([next(tile) if x is _Tile else x for x in template], tree)

            layouts = [t.mesh_layout for t in inputs]
            program = runtime.jax_program(self._fn, arguments, mesh.value, layouts)
            self._programs[key] = self._with_outputs(program, inputs, mesh)
        return self._programs[key]

    def _static(self, leaf: Any) -> Hashable:
        try:
            hash(leaf)
        except TypeError:
            raise ArgumentTypeError(
                f"{self.__name__} was called through call_jax with an argument of type="
                f"{type(leaf).__name__}. What is no tensor is a constant of the program, which is "
                "found again by its hash. Pass numbers, strings and tuples of them, or a tensor."
            ) from None
        return type(leaf), leaf

    def _with_outputs(self, program: Any, inputs: Sequence[DTensor], mesh: DeviceMesh) -> _Program:
        tiles = program.tiles([t._local_tensor for t in inputs])
        if len(tiles) != len(self._outputs) or program.gives_one != self._gives_one:
            outputs = "one array" if program.gives_one else f"a tuple of {len(tiles)} arrays"
            entries = "one entry" if self._gives_one else f"a list of {len(self._outputs)} entries"
            raise DistributeError(
                f"{self.__name__} in call_jax returned {outputs}. Its out_placements are "
                f"{entries}. Pass one entry for one array, and a list of as many entries as arrays "
                "for a tuple."
            )
        labels, layouts, reductions, shapes = [], [], [], []
        for (tile, dtype), entry in zip(tiles, self._outputs, strict=True):
            placements = checked_placements("call_jax", entry, mesh, len(tile), partial=True)
            reductions.append(self._reductions(placements, mesh))
            label = tuple(Replicate() if p.is_partial() else p for p in placements)
            layout = Layout.from_placements(label, len(tile), mesh.value)
            labels.append(label)
            layouts.append(layout)
            shapes.append((layout.get_global_shape(tile), dtype))
        program.set_outputs(layouts, reductions)
        return _Program(program, mesh, labels, shapes, inputs)

    def _reductions(
        self, placements: Sequence[Placement], mesh: DeviceMesh
    ) -> list[tuple[Any, str]]:
        reductions: list[tuple[Any, str]] = []
        for axis, placement in zip(mesh.value.axis_names, placements, strict=True):
            if placement.is_partial():
                op = getattr(placement, "reduce_op", None)
                if op not in ("sum", "avg"):
                    raise DistributeError(
                        f"call_jax was called with out_placements with {placement!r} for axis "
                        f"{axis!r}. Only sums and means have a gradient there. Pass Partial() or "
                        "Partial('avg'), or reduce in the function and pass Replicate()."
                    )
                reductions.append((axis, op))
        return reductions


class _Tile:
    """Stands for a tensor among the arguments."""


def _entries(outputs: Any) -> tuple[tuple[Entry, ...], bool]:
    """Return the entries of the outputs, and whether the function returns one bare array."""
    if isinstance(outputs, (list, tuple)) and outputs:
        placements = [isinstance(o, Placement) for o in outputs]
        if any(placements):
            return (outputs,), True
        if isinstance(outputs, list) or any(map(_is_entry, outputs)):
            return tuple(outputs), False
    return (outputs,), True


def _is_entry(output: Any) -> bool:
    """Tell an entry of an output from an element of a tuple of axis names."""
    is_placements = isinstance(output, tuple) and any(isinstance(p, Placement) for p in output)
    return isinstance(output, list) or is_placements


class _Program:
    """A runtime's program with what torch has to know of it."""

    def __init__(
        self,
        program: Any,
        mesh: DeviceMesh,
        labels: Sequence[tuple[Placement, ...]],
        outputs: Sequence[tuple[tuple[int, ...], torch.dtype]],
        inputs: Sequence[DTensor],
    ) -> None:
        self.program, self.mesh, self.labels, self.outputs = program, mesh, labels, outputs
        self.in_labels = [tuple(t.placements) for t in inputs]

    def wrapped(self, payloads: Sequence[torch.Tensor]) -> tuple[DTensor, ...]:
        pairs = zip(payloads, self.labels, strict=True)
        return tuple(DTensor._wrapping(payload, self.mesh, labels) for payload, labels in pairs)


class _Run(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, program: _Program, needs_grad: bool, *inputs: DTensor) -> Any:
        payloads = [t._local_tensor for t in inputs]
        if not needs_grad:
            return program.wrapped(program.program.run(payloads))
        ctx.set_materialize_grads(False)
        ctx.program = program
        ctx.differentiated = tuple(
            is_needed and (t.is_floating_point() or t.is_complex())
            for is_needed, t in zip(ctx.needs_input_grad[2:], inputs, strict=True)
        )
        ctx.inputs = [
            t for t, is_needed in zip(inputs, ctx.needs_input_grad[2:], strict=True) if is_needed
        ]
        results, ctx.pull = program.program.run_for_grad(payloads, ctx.differentiated)
        outputs = program.wrapped(results)
        ctx.mark_non_differentiable(
            *(o for o in outputs if not (o.is_floating_point() or o.is_complex()))
        )
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        program: _Program = ctx.program
        payloads = [None if g is None else getattr(g, "_local_tensor", g) for g in grads]
        payloads = program.program.gradients(
            ctx.pull, ctx.differentiated, program.outputs, payloads
        )
        gradients = [
            None if payload is None else DTensor._wrapping(payload, program.mesh, labels)
            for payload, labels in zip(payloads, program.in_labels, strict=True)
        ]
        return (None, None, *refuse_second("call_jax", ctx.inputs, *gradients))
