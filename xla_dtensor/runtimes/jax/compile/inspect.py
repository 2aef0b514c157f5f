"""What a traced step's inputs and results are called, and what they are for.

A step's program numbers its inputs; its owner has names for them: parameters and buffers by their
paths in the model, optimizer state by the parameter that it belongs to, arguments by their places.
Both meet in the storages that the trace has found.
"""

from __future__ import annotations

import gc
import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import torch
from jax.extend.core import Literal
from torch.utils._pytree import keystr, tree_flatten_with_path

from mesh_utils import Mesh
from xla_dtensor.core import Layout
from xla_dtensor.core.op_sharding import OpSharding
from xla_dtensor.core.translate import layout_of_op_sharding
from xla_dtensor.report.attribution import AskedFor, changes_in
from xla_dtensor.report.report import CompilerMemory, Evidence, Held, Role
from xla_dtensor.runtimes.jax.arrays.private import (
    executable_inputs,
    hlo_sharding_text,
    is_jaxpr,
    open_jaxpr,
)
from xla_dtensor.runtimes.jax.arrays.storage import Storage
from xla_dtensor.runtimes.jax.arrays.values import x64
from xla_dtensor.runtimes.jax.compile.layers.slots import row_type
from xla_dtensor.runtimes.jax.compile.program import Program
from xla_dtensor.runtimes.jax.compile.store import Executables
from xla_dtensor.runtimes.jax.compile.trace_values import inner
from xla_dtensor.runtimes.jax.lower import random
from xla_dtensor.runtimes.live_objects import live_objects

__all__ = ["Names", "Traced", "asked_for", "flops_of"]


# -------------------------------------------------------------------------------------------- Asked
#
# The redistributes of a traced step, with the names that their communication may have.
#
# See :mod:`xla_dtensor.report.attribution`. The trace is a jaxpr: each op has the scopes that were
# open around it, and the ops whose results it takes.

_BETWEEN = frozenset(
    {
        *("add", "add_any", "sub", "mul", "div", "neg", "max", "min", "pow", "integer_pow", "exp"),
        *("tanh", "logistic", "select_n", "sqrt", "rsqrt", "erf", "abs", "sign", "square", "log"),
        *("pad", "slice", "copy", "copy_p", "convert_element_type", "reshape", "transpose"),
        *("squeeze", "broadcast_in_dim", "expand_dims", "sharding_constraint", "jit", "pjit"),
        *("custom_jvp_call", "custom_vjp_call", "optimization_barrier", "reduce_precision", "name"),
    }
)
"""Ops through which XLA carries a sharding backwards: elementwise ones, and changes of shape."""

_REACH = 64
_AN_INPUT = ("", "]")
"""What the name of an input ends with, ``arguments_in[0]``; no op's does."""
_MARK = "redistribute["


def asked_for(jaxpr: Any) -> tuple[AskedFor, ...]:
    """List what a trace redistributes.

    Args:
        jaxpr: ``jax.core.Jaxpr``, of the whole step.
    """
    return tuple(_asked(jaxpr, None))


def _asked(jaxpr: Any, around: str | None) -> Iterator[AskedFor]:
    flow = _Flow(jaxpr, around)
    for eqn in jaxpr.eqns:
        stack = str(eqn.source_info.name_stack)
        for sharding in _constraints(eqn) if _MARK in stack else ():
            aval = eqn.outvars[0].aval
            yield AskedFor(
                names=tuple(dict.fromkeys(flow.names(eqn))),
                changes=changes_in(stack),
                elements=_elements(sharding, tuple(aval.shape)),
                element_bytes=aval.dtype.itemsize,
            )
        for body in _inner(eqn):
            yield from _asked(body, stack if around is None else around)


def _constraints(eqn: Any) -> Iterator[Any]:
    """Yield the shardings that an op tells its result. Of a concrete array JAX does so by a jit."""
    if eqn.primitive.name == "sharding_constraint":
        yield eqn.params["sharding"]
    elif eqn.primitive.name in ("jit", "pjit"):
        yield from (
            sharding for sharding in eqn.params["out_shardings"] if hasattr(sharding, "shard_shape")
        )


class _Flow:
    """Which ops of a jaxpr make a value, and which take it.

    Args:
        jaxpr: The jaxpr.
        around: The scopes around it, where it is inside of another one.
    """

    def __init__(self, jaxpr: Any, around: str | None) -> None:
        self._around = around
        self._makers = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
        self._inputs = {*jaxpr.invars, *jaxpr.constvars}
        self._users: dict[Any, list[Any]] = {}
        for eqn in jaxpr.eqns:
            for var in filter(_is_variable, eqn.invars):
                self._users.setdefault(var, []).append(eqn)

    def names(self, eqn: Any) -> Iterator[tuple[str, str]]:
        """Yield the names of an op and of those before it, back to the first not elementwise.

        XLA names what moves an input of the program by that input alone. It is told by who uses it
        (``hlo``), so there the names of those behind are among them.
        """
        sources = list(self._near([eqn], self._sources))
        yield from map(self._name, sources)
        if any(
            var in self._inputs for source in sources for var in filter(_is_variable, source.invars)
        ):
            yield from map(self._name, self._near(self._followers(eqn), self._followers))
            yield _AN_INPUT

    def _near(self, first: list[Any], follow: Callable[[Any], list[Any]]) -> Iterator[Any]:
        waiting, seen = [*first], {*map(id, first)}
        while waiting and len(seen) <= _REACH:
            eqn = waiting.pop(0)
            yield eqn
            new = follow(eqn) if eqn.primitive.name in _BETWEEN else []
            waiting += [neighbour for neighbour in new if id(neighbour) not in seen]
            seen.update(map(id, new))

    def _sources(self, eqn: Any) -> list[Any]:
        return [self._makers[v] for v in filter(_is_variable, eqn.invars) if v in self._makers]

    def _followers(self, eqn: Any) -> list[Any]:
        return [user for var in eqn.outvars for user in self._users.get(var, ())]

    def _name(self, eqn: Any) -> tuple[str, str]:
        stack, op = str(eqn.source_info.name_stack), eqn.primitive.name
        name = f"{stack}/{op}" if stack else op
        if self._around is not None:
            return self._around, f"/{name}"
        # What a function of JAX's own does stands behind the name of the call.
        return (stack, "") if op in ("jit", "pjit") else (name, name)


def _is_variable(atom: Any) -> bool:
    return not hasattr(atom, "val")


def _inner(eqn: Any) -> Iterator[Any]:
    for param in eqn.params.values():
        for entry in param if isinstance(param, tuple | list) else (param,):
            jaxpr = getattr(entry, "jaxpr", entry)
            if hasattr(jaxpr, "eqns"):
                yield jaxpr


def _elements(sharding: Any, shape: tuple[int, ...]) -> int:
    """What one device has of an array; all of it where the compiler may choose."""
    try:
        return math.prod(sharding.shard_shape(shape))
    except (TypeError, ValueError):
        return math.prod(shape)


# -------------------------------------------------------------------------------------------- Flops
#
# How many floating-point operations a traced program asks for, counted in its products.
#
# XLA's own count is one device's and takes a loop's body once. Here the whole program over all
# devices is counted, loops as often as they run: a multiplication and an addition each for every
# term of a matrix product or a convolution, nothing for the rest. That is the count behind "model
# FLOPs utilisation" (PaLM, arXiv:2204.02311, appendix B), recomputation included where the step
# asks for it.


def flops_of(jaxpr: Any) -> int:
    """Return the floating-point operations of a jaxpr's products.

    Args:
        jaxpr: Open or closed. Of a conditional the dearest branch counts; a while loop whose length
            nobody knows counts once.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> product = jax.make_jaxpr(jnp.matmul)(jnp.ones((2, 3)), jnp.ones((3, 5)))
        >>> flops_of(product) == 2 * 2 * 3 * 5
        True
    """
    return sum(_of_equation(equation) for equation in open_jaxpr(jaxpr).eqns)


def product_dtypes(jaxpr: Any) -> frozenset[str]:
    """Return the dtypes of what a jaxpr's products multiply, by NumPy's names.

    Args:
        jaxpr: Open or closed.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> ones = jnp.ones((2, 2), jnp.bfloat16)
        >>> sorted(product_dtypes(jax.make_jaxpr(jnp.matmul)(ones, ones)))
        ['bfloat16']
    """
    dtypes: set[str] = set()
    for equation in open_jaxpr(jaxpr).eqns:
        if equation.primitive.name in _PRODUCTS:
            dtypes.add(str(equation.invars[0].aval.dtype))
        for body in _jaxprs(equation.params):
            dtypes |= product_dtypes(body)
    return frozenset(dtypes)


def _of_equation(equation: Any) -> int:
    name = equation.primitive.name
    if name in _PRODUCTS:
        return _PRODUCTS[name](equation)
    counts = [flops_of(jaxpr) for jaxpr in _jaxprs(equation.params)]
    if not counts:
        return 0
    if name == "cond":
        return max(counts)
    return sum(counts) * _times(name, equation.params)


def _times(name: str, params: dict[str, Any]) -> int:
    if name == "scan":
        return params["length"]
    if name == "shard_map":
        return math.prod(params["mesh"].shape.values())
    return _turns(params) if name == "while" else 1


def _turns(params: dict[str, Any]) -> int:
    """How often a loop of ``values`` runs: its condition is "counter < literal", no more."""
    condition = open_jaxpr(params["cond_jaxpr"]).eqns
    if len(condition) != 1 or condition[0].primitive.name != "lt":
        return 1
    limit = condition[0].invars[1]
    return int(limit.val) if isinstance(limit, Literal) else 1


def _jaxprs(params: dict[str, Any]) -> Iterator[Any]:
    for param in params.values():
        for entry in param if isinstance(param, tuple | list) else (param,):
            if is_jaxpr(entry):
                yield entry


def _dot_general(equation: Any) -> int:
    (contracted, _), _ = equation.params["dimension_numbers"]
    lhs_shape = equation.invars[0].aval.shape
    return 2 * equation.outvars[0].aval.size * math.prod(lhs_shape[d] for d in contracted)


def _ragged_dot(equation: Any) -> int:
    left, right = (v.aval.shape for v in equation.invars[:2])
    numbers = equation.params["ragged_dot_dimension_numbers"]
    (contracted, _), _ = numbers.dot_dimension_numbers
    if numbers.lhs_ragged_dimensions[0] in contracted:  # Each term belongs to one group alone.
        return 2 * math.prod(left) * right[-1]
    return 2 * equation.outvars[0].aval.size * math.prod(left[d] for d in contracted)


def _convolution(equation: Any) -> int:
    kernel = equation.invars[1].aval.shape
    outputs = kernel[equation.params["dimension_numbers"].rhs_spec[0]]
    return 2 * equation.outvars[0].aval.size * math.prod(kernel) // outputs


_PRODUCTS: dict[str, Callable[[Any], int]] = {
    "dot_general": _dot_general,
    "ragged_dot_general": _ragged_dot,
    "conv_general_dilated": _convolution,
}


# ---------------------------------------------------------------------------------------- Inventory

_NUMBERS = re.compile(r"(\d+)")
_HLO_DTYPES = {"bool": "pred", "bfloat16": "bf16", "complex64": "c64", "complex128": "c128"}


class Names:
    """Name and role of each storage that somebody owns.

    Args:
        models: The modules whose tensors are known by their paths.
        arguments: The step's arguments, as it was called.
    """

    def __init__(self, models: Sequence[torch.nn.Module], arguments: Any) -> None:
        self._known: dict[int, tuple[str, Role, str | None]] = {}
        self._parameters: dict[int, str] = {}
        for path, leaf in tree_flatten_with_path(arguments)[0]:
            self._note(leaf, f"arguments{keystr(path)}", "argument")
        for model in models:
            self._of_model(model)
        for optimizer in _optimizers():
            self._of_optimizer(optimizer)
        if random.storage() is not None:
            self._known[id(random.storage())] = ("random state", "random state", None)

    def of(self, storage: Storage) -> tuple[str, Role, str | None]:
        """Return the name, the role and the layout asked for; of an unknown one "other state"."""
        return self._known.get(id(storage), ("", "other state", None))

    def note(self, storage: Storage, name: str, role: Role) -> None:
        """Name a storage that nobody else has named."""
        self._known.setdefault(id(storage), (name, role, None))

    def _note(self, value: Any, name: str, role: Role) -> None:
        tensor = inner(value)
        if tensor is None:
            return
        layout = getattr(getattr(value, "_spec", None), "layout", None)
        text = None if layout is None else str(layout)
        self._known.setdefault(id(tensor._storage), (name, role, text))

    def _of_model(self, model: torch.nn.Module) -> None:
        for name, parameter in model.named_parameters():
            self._parameters[id(parameter)] = name
            self._note(
                parameter, name, "parameter" if parameter.requires_grad else "frozen parameter"
            )
            if parameter.grad is not None:
                self._note(parameter.grad, f"{name} gradient", "gradient")
        for name, buffer in model.named_buffers():
            self._note(buffer, name, "buffer")

    def _of_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        for number, parameter in enumerate(p for g in optimizer.param_groups for p in g["params"]):
            name = self._parameters.get(id(parameter), f"parameter {number}")
            self._note(parameter, name, "parameter")
            for key, value in optimizer.state.get(parameter, {}).items():
                is_count = isinstance(value, torch.Tensor) and value.ndim == 0
                self._note(value, f"{name} {key}", "number" if is_count else "optimizer state")


def inventory(
    program: Program,
    executable: Any,
    names: Names,
    arguments: Sequence[Storage | None],
    root: Mesh,
) -> tuple[Held, ...]:
    """List what goes into a program and comes out of it.

    Args:
        program: The traced step.
        executable: What XLA made of it; ``jax.stages.Compiled``.
        names: Who owns what.
        arguments: The storages of the step's tensor arguments, in order; None for forgotten ones.
        root: The mesh that layouts are said on.

    Returns:
        Inputs in the order of the program, state with the number of its result too; then results.
    """
    for storage, _ in program.numbers:
        names.note(storage, "learning rate", "number")
    results, _, lasting, _ = executable.output_shardings
    blueprint = program.blueprint
    with x64():
        out_types = jax.eval_shape(blueprint.program_of(blueprint.jaxpr), *blueprint.inputs)
    first_lasting = len(results) + len(program.slots.state)
    outputs = zip((*results, *lasting), (*out_types[0], *out_types[2]), strict=True)
    entries = [*_inputs(program, executable, names, arguments, root, len(results))]
    for place, (sharding, kind) in enumerate(outputs):
        is_result = place < len(results)
        number = place if is_result else first_lasting + place - len(results)
        entries.append(
            Held(
                name=f"{'result' if is_result else 'state made'} {number}",
                role="result" if is_result else "other state",
                shape=tuple(kind.shape),
                dtype=hlo_dtype(kind.dtype),
                device_shape=_device_shape(kind.shape, sharding),
                chosen=_layout_text(sharding, len(kind.shape), root),
                output=number,
            )
        )
    return tuple(entries)


def _inputs(
    program: Program,
    executable: Any,
    names: Names,
    arguments: Sequence[Storage | None],
    root: Mesh,
    num_results: int,
) -> Iterator[Held]:
    state, read, constants, argument_types, donated = program.blueprint.inputs
    owners: list[Sequence[Storage | None]] = [
        *([program.state[place] for place in slot] for slot in program.slots.state),
        *([program.read[place] for place in slot] for slot in program.slots.read),
        *([None] for _ in constants),
        *([argument] for part in program.holding.divided(arguments) for argument in part),
    ]
    first_argument = len(owners) - len(arguments)
    types = [*state, *read, *constants, *argument_types, *donated]
    input_numbers = _kept(executable, len(types))
    positions = [p for part in program.holding.divided(range(len(arguments))) for p in part]
    first_written = num_results + len(state) + len(program.slots.lasting)
    outputs = {place: num_results + place for place in range(len(state))}
    for number, position in enumerate(program.written):
        outputs[first_argument + positions.index(position)] = first_written + number
    for place, (storages, kind) in enumerate(zip(owners, types, strict=True)):
        usual: Role = "constant" if place < first_argument else "argument"
        descriptions = [names.of(storage) for storage in storages if storage is not None]
        name, role, requested = descriptions[0] if descriptions else ("", usual, None)
        if len(storages) > 1:
            name, kind = _starred([description[0] for description in descriptions]), row_type(kind)
        yield Held(
            name=name or f"{role} {place}",
            role=role,
            shape=tuple(kind.shape if storages[0] is None else storages[0].shape),
            dtype=hlo_dtype(kind.dtype),
            device_shape=_device_shape(kind.shape, kind.sharding),
            requested=requested,
            chosen=_layout_text(kind.sharding, len(kind.shape), root),
            input=input_numbers.get(place),
            output=outputs.get(place),
            layers=len(storages),
        )


def _starred(names: Sequence[str]) -> str:
    """Return the name of layers' arrays together.

    Example:
        >>> _starred(["layers.0.w1.weight", "layers.1.w1.weight"])
        'layers.*.w1.weight'
    """
    first, last = _NUMBERS.split(names[0]), _NUMBERS.split(names[-1])
    if len(first) != len(last):
        return names[0]
    return "".join(a if a == b else "*" for a, b in zip(first, last, strict=True))


def _kept(executable: Any, count: int) -> dict[int, int]:
    """The number in the program of each input; the compiler drops those that nothing reads."""
    return {place: number for number, place in enumerate(executable_inputs(executable, count))}


# What nobody has placed, which has no sharding here, every device gets whole.


def _device_shape(shape: Sequence[int], sharding: Any) -> tuple[int, ...]:
    return tuple(shape if sharding is None else sharding.shard_shape(tuple(shape)))


def _layout_text(sharding: Any, ndim: int, root: Mesh) -> str | None:
    if sharding is None:
        return str(Layout.replicated(root, ndim))
    parsed = OpSharding.parse(hlo_sharding_text(sharding, ndim))
    layout = layout_of_op_sharding(parsed.canonical(), root, ndim)
    return None if layout is None else str(layout)


def hlo_dtype(dtype: Any) -> str:
    """Return a NumPy dtype, or its name, as HLO writes it."""
    name = str(dtype)
    if name in _HLO_DTYPES:
        return _HLO_DTYPES[name]
    for kind, letter in (("uint", "u"), ("int", "s"), ("float8_", "f8"), ("float", "f")):
        if name.startswith(kind):
            return letter + name.removeprefix(kind)
    return name


def _optimizers() -> list[torch.optim.Optimizer]:
    gc.collect()
    return live_objects(torch.optim.Optimizer)


# ----------------------------------------------------------------------------------------- Evidence
#
# Evidence of a step on the JAX runtime, whether its machine is here or not.


@dataclass(frozen=True, eq=False)
class Traced:
    """A traced step and the names of what it holds.

    Attributes:
        program: The trace.
        names: Who owns what.
        arguments: The storages of the step's tensor arguments; None for those that are forgotten.
        root: The mesh that layouts are said on.
    """

    program: Program
    names: Names
    arguments: Sequence[Storage | None]
    root: Mesh

    def lowered(self) -> Any:
        """Return the program as XLA is given it: ``jax.stages.Lowered``."""
        with x64():
            return self.program.blueprint.lowered(*self.program.blueprint.inputs)

    def compiled(self, lowered: Any) -> Any:
        """Return what the devices' compiler makes of it: ``jax.stages.Compiled``."""
        with x64():
            return lowered.compile()

    def evidence(self, compiled: Any, **facts: Any) -> Evidence:
        """Return what is left of the step once it is compiled.

        Args:
            compiled: ``jax.stages.Compiled``.
            **facts: What else the evidence says: title, topology, seconds, versions, ...
        """
        jaxpr = self.program.blueprint.jaxpr
        return Evidence(
            hlo_text=compiled.as_text(),
            mesh=self.root,
            held=self.held(compiled),
            memory=memory_of(compiled),
            flops=float(flops_of(jaxpr)),
            compute_dtype=_narrowest(product_dtypes(jaxpr)),
            **facts,
        )

    def save(self, lowered: Any, compiled: Any, path: str | os.PathLike[str]) -> None:
        """Write the compiled program to a file that ``CompiledStep.load`` takes."""
        keep = Executables()
        keep.add(lowered, compiled)
        keep.save(path)

    def held(self, executable: Any) -> tuple[Held, ...]:
        """Return what goes in and comes out."""
        return inventory(self.program, executable, self.names, self.arguments, self.root)


def memory_of(executable: Any) -> CompilerMemory | None:
    """Return what the compiler says that a program takes on one device; None if it does not."""
    said = executable.memory_analysis()
    if said is None:
        return None
    return CompilerMemory(
        arguments=said.argument_size_in_bytes,
        results=said.output_size_in_bytes,
        aliased=said.alias_size_in_bytes,
        temporaries=said.temp_size_in_bytes,
        code=said.generated_code_size_in_bytes,
    )


def _narrowest(dtypes: frozenset[str]) -> str:
    """The dtype whose peak a step is held to: the one with the highest."""
    widths = {name: int("".join(filter(str.isdigit, name.split("_")[0])) or 64) for name in dtypes}
    return hlo_dtype(min(widths, key=lambda name: (widths[name], name), default="float32"))
