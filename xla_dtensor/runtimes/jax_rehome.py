"""The same traced program for other devices: what XLA makes of a step on hardware that is not here.

A step is traced on the devices of this process, and its program names them everywhere: in the
constraints, in the types of all values (an array's type holds an abstract mesh, which knows the
kind of device), in the meshes of manual regions and in the context of every equation. Tracing it
anew for absent devices is not possible, because its parameters lie on those that are here. So the
traced program is written anew, equation by equation, with each mesh put on other devices::

    traced on   Mesh(f0=2, f1=2, f2=2)  over  CPU 0 .. CPU 7
    rehomed     Mesh(f0=2, f1=2, f2=2)  over  TPU 0 .. TPU 7    place for place, the same axis names

    a = sharding_constraint b   with P(f0) on the first          the same with P(f0) on the second
    c = scan(jaxpr={...})                                        the same, its jaxpr rehomed as well

Such a program can be lowered and compiled by the new devices' compiler, libtpu for a topology that
nobody has booked, and run where the devices exist.

Invariants:

* Only devices change: names, sizes and kinds of axes, shapes, dtypes and the order of equations
  stay.
* All meshes of a program list the same number of devices in one order (JAX sees to that), so a
  place in that order says everything. Meshes without axes ("none in use") stay what they are.
* A jaxpr that is called from several places stays one jaxpr, so XLA's input grows by nothing.
* A custom gradient rule survives as its forward program alone. A step's gradients are in the
  program by then, and nobody differentiates it again.
* Where a value lives on its device (host memory, say) is left to the new device's default.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import DropVar, Jaxpr, Literal, Var
from jax.sharding import AbstractMesh, Mesh, NamedSharding, SingleDeviceSharding

from xla_dtensor.errors import CompileError
from xla_dtensor.runtimes.jax_private import (
    constants_of,
    context_on_mesh,
    is_jaxpr,
    open_jaxpr,
    with_constants,
)
from xla_dtensor.runtimes.jax_product_order import keep_product_orders

__all__ = ["Blueprint", "rehomed", "rehomed_sharding"]

# What makes the function that is lowered out of a jaxpr.
ProgramOf = Callable[[Any], Callable[..., Any]]


def rehomed(closed: Any, devices: Sequence[Any]) -> Any:
    """Return a closed jaxpr in which every mesh lies on other devices.

    Args:
        closed: What ``jax.make_jaxpr`` returned; meshes over N devices in one order.
        devices: N devices, those that take their places.

    Returns:
        A closed jaxpr. Its arrays (``consts``) are host arrays.

    Raises:
        CompileError: A mesh of the program has another size.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> double = jax.make_jaxpr(lambda x: x * 2)(jnp.ones(4))
        >>> jax.core.eval_jaxpr(rehomed(double, jax.devices()[:1]).jaxpr, [], jnp.ones(4))[0].sum()
        Array(8., dtype=float32)
    """
    return _Rehoming(devices).value(closed)


def rehomed_sharding(sharding: Any, devices: Sequence[Any]) -> Any:
    """Return a sharding over other devices; None, and what names no device, as it is.

    Args:
        sharding: A sharding of JAX, or None.
        devices: The devices that take the places of those that it names.
    """
    return _Rehoming(devices).value(sharding)


class _Rehoming:
    """One rewriting; remembers the jaxprs and meshes that it has seen."""

    def __init__(self, devices: Sequence[Any]) -> None:
        self._devices = np.empty(len(devices), dtype=object)
        self._devices[:] = devices
        # The originals are kept along: an id is a name only as long as its object lives.
        self._jaxprs: dict[int, tuple[Any, Any]] = {}
        self._meshes: dict[Any, Any] = {}

    def value(self, value: Any) -> Any:
        """Return any parameter of an equation, rehomed."""
        if is_jaxpr(value):
            return self._once(value, self._jaxpr)
        if isinstance(value, NamedSharding):
            return NamedSharding(self._mesh(value.mesh), value.spec)
        if isinstance(value, SingleDeviceSharding):
            return SingleDeviceSharding(self._devices[0])
        if isinstance(value, Mesh | AbstractMesh):
            return self._mesh(value)
        if isinstance(value, ShapedArray):
            return self._type(value)
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*map(self.value, value))
        if type(value) in (tuple, list):
            return type(value)(map(self.value, value))
        if type(value) is dict:
            return {name: self.value(item) for name, item in value.items()}
        return value

    def _once(self, old: Any, rewrite: Callable[[Any], Any]) -> Any:
        if id(old) not in self._jaxprs:
            self._jaxprs[id(old)] = (old, rewrite(old))
        return self._jaxprs[id(old)][1]

    def _mesh(self, mesh: Any) -> Any:
        if not mesh.axis_names:
            return mesh
        if mesh not in self._meshes:
            self._meshes[mesh] = self._moved(mesh)
        return self._meshes[mesh]

    def _moved(self, mesh: Any) -> Any:
        if mesh.size != len(self._devices):
            raise CompileError(
                f"A program over {mesh.size} devices was asked for over {len(self._devices)} "
                "others. Each device of the program needs one that takes its place. Pass as many "
                f"devices as the mesh {dict(mesh.shape)} has."
            )
        sizes = tuple(mesh.shape.values())
        moved = Mesh(self._devices.reshape(sizes), mesh.axis_names, axis_types=mesh.axis_types)
        return moved.abstract_mesh if isinstance(mesh, AbstractMesh) else moved

    def _type(self, aval: Any) -> Any:
        sharding = getattr(aval, "sharding", None)
        if sharding is None or not sharding.mesh.axis_names:
            return aval
        return aval.update(sharding=self.value(sharding))

    def _jaxpr(self, jaxpr: Any) -> Any:
        if not isinstance(jaxpr, Jaxpr):
            return with_constants(self.value(open_jaxpr(jaxpr)), map(_on_host, constants_of(jaxpr)))
        constants = constants_of(jaxpr)
        variables: dict[Any, Any] = {}

        def atom(old: Any) -> Any:
            if isinstance(old, Literal):
                return Literal(_on_host(old.val), self.value(old.aval))
            if isinstance(old, DropVar):
                return DropVar(self.value(old.aval))
            if old not in variables:
                variables[old] = Var(self.value(old.aval))
            return variables[old]

        def atoms(old: Sequence[Any]) -> list[Any]:
            return [atom(one) for one in old]

        def equation(old: Any) -> Any:
            return old.replace(
                invars=atoms(old.invars),
                outvars=atoms(old.outvars),
                params={name: self.value(value) for name, value in old.params.items()},
                ctx=self._context(old.ctx),
            )

        moved = jaxpr.replace(
            constvars=atoms(jaxpr.constvars),
            invars=atoms(jaxpr.invars),
            eqns=[equation(old) for old in jaxpr.eqns],
            outvars=atoms(jaxpr.outvars),
        )
        return with_constants(moved, map(_on_host, constants)) if constants else moved

    def _context(self, context: Any) -> Any:
        mesh = context.cur_abstract_mesh
        if mesh is None or not mesh.axis_names:
            return context
        return context_on_mesh(context, self._mesh(mesh))


@dataclass(frozen=True)
class Blueprint:
    """A traced program with all that lowering it takes, for these devices or for others.

    Args:
        jaxpr: The trace; its constants are inputs.
        program_of: Makes the function that is lowered out of a jaxpr.
        inputs: The types of that function's arguments, as ``jax.ShapeDtypeStruct``, in any nesting.
            Those of arrays that nobody has placed have no sharding.
        out_shardings: How its results are to lie.
        donated: The positions of the arguments whose memory the results take over.
    """

    jaxpr: Any
    program_of: ProgramOf
    inputs: tuple[Any, ...]
    out_shardings: Any
    donated: tuple[int, ...]

    @classmethod
    def of(
        cls,
        jaxpr: Any,
        program_of: ProgramOf,
        inputs: tuple[Any, ...],
        out_shardings: Any,
        donated: tuple[int, ...],
    ) -> Blueprint:
        """Make one from the arrays that the program will be given; they are not kept."""
        types = jax.tree.map(_type_of, inputs)
        return cls(jaxpr, program_of, types, out_shardings, donated)

    def lowered(self, *inputs: Any) -> Any:
        """Lower the program for the devices that it was traced on, and for these inputs."""
        return self._lower(self.jaxpr, self.out_shardings, inputs)

    def lowered_for(self, devices: Sequence[Any]) -> Any:
        """Lower the program for other devices.

        Args:
            devices: As many as the program runs on, in the order of the root mesh: the first takes
                the place of the first.

        Returns:
            ``jax.stages.Lowered``. ``compile()`` runs those devices' compiler.

        Raises:
            CompileError: The program runs on another number of devices, or on one only.
        """
        rehoming = _Rehoming(devices)
        if not any(isinstance(s, NamedSharding) for s in self._shardings()):
            raise CompileError(
                f"A step was asked for over {len(devices)} other devices. None of its tensors lies "
                "on a mesh, so its program is one device's. Make its parameters or its arguments "
                "with distribute_tensor, then call it and ask again."
            )

        def retyped(old: Any) -> Any:
            sharding = rehoming.value(old.sharding)
            return jax.ShapeDtypeStruct(old.shape, old.dtype, sharding=sharding)

        inputs = jax.tree.map(retyped, self.inputs)
        outs = jax.tree.map(rehoming.value, self.out_shardings)
        return self._lower(rehoming.value(self.jaxpr), outs, inputs)

    def _lower(self, jaxpr: Any, out_shardings: Any, inputs: Any) -> Any:
        program = self.program_of(jaxpr)
        jitted = jax.jit(program, donate_argnums=self.donated, out_shardings=out_shardings)
        lowered = jitted.lower(*inputs)
        keep_product_orders(lowered)
        return lowered

    def _shardings(self) -> list[Any]:
        return [given.sharding for given in jax.tree.leaves(self.inputs)]


def _on_host(constant: Any) -> Any:
    """Return a constant without its device, which JAX's own host arrays have in their type too."""
    return np.asarray(constant) if hasattr(constant, "dtype") else constant


def _type_of(array: Any) -> Any:
    if isinstance(array, jax.ShapeDtypeStruct):
        return array
    placed = array.sharding if getattr(array, "committed", False) else None
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=placed)
