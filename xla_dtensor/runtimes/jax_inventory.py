"""What a traced step's inputs and results are called, and what they are for.

A step's program numbers its inputs; its owner has names for them: parameters and buffers by their
paths in the model, optimizer state by the parameter that it belongs to, arguments by their places.
Both meet in the storages that the trace has found.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import torch
from torch.utils._pytree import keystr, tree_flatten_with_path

from mesh_utils import Mesh
from xla_dtensor.core import Layout
from xla_dtensor.core.decode import layout_of_op_sharding
from xla_dtensor.core.op_sharding import OpSharding
from xla_dtensor.report.evidence import Held, Role
from xla_dtensor.runtimes import jax_generator
from xla_dtensor.runtimes.jax_convert import x64
from xla_dtensor.runtimes.jax_private import executable_inputs, hlo_sharding_text
from xla_dtensor.runtimes.jax_program import Program
from xla_dtensor.runtimes.jax_slots import row_type
from xla_dtensor.runtimes.jax_step_values import inner
from xla_dtensor.runtimes.jax_tensor import Storage
from xla_dtensor.runtimes.live_objects import live_objects

__all__ = ["Names", "hlo_dtype", "inventory"]

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
        for path, value in tree_flatten_with_path(arguments)[0]:
            self._note(value, f"arguments{keystr(path)}", "argument")
        for model in models:
            self._of_model(model)
        for optimizer in _optimizers():
            self._of_optimizer(optimizer)
        if jax_generator.storage() is not None:
            self._known[id(jax_generator.storage())] = ("random state", "random state", None)

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
    made = zip((*results, *lasting), (*out_types[0], *out_types[2]), strict=True)
    found = [*_inputs(program, executable, names, arguments, root, len(results))]
    for place, (sharding, kind) in enumerate(made):
        is_result = place < len(results)
        number = place if is_result else first_lasting + place - len(results)
        found.append(
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
    return tuple(found)


def _inputs(
    program: Program,
    executable: Any,
    names: Names,
    arguments: Sequence[Storage | None],
    root: Mesh,
    num_results: int,
) -> Iterator[Held]:
    state, read, constants, given = program.blueprint.inputs
    owners: list[Sequence[Storage | None]] = [
        *([program.state[place] for place in slot] for slot in program.slots.state),
        *([program.read[place] for place in slot] for slot in program.slots.read),
        *([None] for _ in constants),
        *([argument] for argument in arguments),
    ]
    first_argument = len(owners) - len(arguments)
    types = [*state, *read, *constants, *given]
    kept = _kept(executable, len(types))
    for place, (storages, kind) in enumerate(zip(owners, types, strict=True)):
        usual: Role = "constant" if place < first_argument else "argument"
        known = [names.of(storage) for storage in storages if storage is not None]
        name, role, requested = known[0] if known else ("", usual, None)
        if len(storages) > 1:
            name, kind = _starred([each[0] for each in known]), row_type(kind)
        yield Held(
            name=name or f"{role} {place}",
            role=role,
            shape=tuple(kind.shape if storages[0] is None else storages[0].shape),
            dtype=hlo_dtype(kind.dtype),
            device_shape=_device_shape(kind.shape, kind.sharding),
            requested=requested,
            chosen=_layout_text(kind.sharding, len(kind.shape), root),
            input=kept.get(place),
            output=num_results + place if place < len(state) else None,
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
