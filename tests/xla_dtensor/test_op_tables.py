"""All ops of the tables against plain PyTorch: values and gradients in compiled steps, and eager.

A test is a batch of calls, see op_batches; a failure names those that are wrong. The contract has
the first call of each kind, in a compiled step; further calls, and eager ones, are thorough.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

import xla_dtensor as xd
from tests.xla_dtensor.op_batches import (
    NO_GRADIENTS,
    Program,
    Put,
    Tolerance,
    by_batches,
    check_all,
    check_values,
    eagerly,
    has_gradients,
    is_differentiable,
    program_of,
    within,
)
from tests.xla_dtensor.runtimes.layer_cases_images import LAYERS
from tests.xla_dtensor.runtimes.lowering_cases import CASES, POINTWISE, RANGES, Case
from tests.xla_dtensor.runtimes.lowering_cases_counting import BY_VALUES, STATIC
from tests.xla_dtensor.runtimes.lowering_cases_linalg import FUNCTIONS, LINALG
from tests.xla_dtensor.runtimes.lowering_cases_special import FOURIER, SPECIAL

pytestmark = pytest.mark.only_on("jax")


@pytest.fixture(scope="module")
def cut(mesh: xd.DeviceMesh) -> Put:
    """Dims 0 and 1 on dp and tp; sizes such as 5 and 6 leave the last shards short."""

    def put(tensor: torch.Tensor) -> torch.Tensor:
        dims = ("dp", "tp", *(None,) * (tensor.ndim - 2))[: tensor.ndim]
        return xd.distribute_tensor(tensor, mesh, dims or None)

    return put


@pytest.fixture(scope="module")
def replicated(mesh: xd.DeviceMesh) -> Put:
    return lambda tensor: xd.distribute_tensor(tensor, mesh)


def programs(table: dict[Any, list[Case]], **options: Any) -> list[Program]:
    """The calls of a table."""
    return [
        replace(program_of(_name(op, i), op, *case.args, **case.kwargs), **options)
        for op, cases in table.items()
        for i, case in enumerate(cases)
    ]


def _name(op: Any, number: int) -> str:
    return f"{str(op).removeprefix('aten.').removesuffix('.default')} {number}"


def first_of_each(table: dict[Any, list[Case]]) -> dict[Any, list[Case]]:
    """The first call of each op, and all of the ops that arrive whole in inference mode only."""

    def whole(op: Any) -> bool:
        return torch._C._dispatch_has_kernel_for_dispatch_key(
            op.name(), "CompositeImplicitAutograd"
        )

    return {op: cases if whole(op) else cases[:1] for op, cases in table.items()}


CLOSE: Tolerance = (2e-5, 5e-6)
# The transforms' values are sums of up to 390 terms: 4e-6 is half a unit in the last place of 64.
OF_SUMS: Tolerance = (2e-5, 4e-6)
OF_OPS = [
    *programs(CASES, gradients=CLOSE),
    *programs(STATIC),
    *programs(SPECIAL),
    *programs(FOURIER, values=OF_SUMS),
]
OF_LAYERS = [
    Program(name, layer.call, layer.inputs, (3e-5, 1e-5), (3e-5, 1e-5), kind=layer.ops)
    for name, layer in LAYERS.items()
]
OF_LINALG = programs(LINALG)
OF_FUNCTIONS = [
    Program(name, call, inputs, (1e-4, 1e-5), (1e-3, 1e-4), kind=name)
    for name, (call, inputs) in FUNCTIONS.items()
]
OF_RANGES = [
    replace(program_of(_name(op, 0), op, *case.args, **case.kwargs), check=within(low, high))
    for op, (case, low, high) in RANGES.items()
]
# Results whose shape depends on values, as those indices do that torch's derivative of index_fill
# counts once, or that begin with random numbers.
ONLY_EAGER = ("index_fill.int_Tensor 0", "linalg_lstsq 3", "linalg_lstsq 4", "lowrank")
# All of U and V have many right values, some of them free to turn.
WITHOUT_GRADIENTS = ("all of svd",)


# The first of their kind that torch can differentiate: the first of all it cannot.
DIFFERENTIABLE = ("scatter.src 1", "scatter_reduce.two 18")


def in_steps(given: Iterable[Program]) -> list[Program]:
    """What can be compiled, with the gradients of the first call of each kind."""
    seen: set[Any] = set()

    def narrowed(program: Program) -> Program:
        if program.name in DIFFERENTIABLE:
            return program
        repeats = program.kind in seen or not any(map(is_differentiable, program.inputs))
        if repeats or program.name in WITHOUT_GRADIENTS:
            return replace(program, gradients=NO_GRADIENTS)
        seen.add(program.kind)
        return program

    left_out = ONLY_EAGER
    return [narrowed(program) for program in given if program.name not in left_out]


def first_of_each_kind(given: Iterable[Program]) -> list[Program]:
    """The first call of each kind, and the first that torch can differentiate."""
    kinds: set[Any] = set()
    firsts: list[Program] = []
    for program in given:
        if program.kind not in kinds or program.name in DIFFERENTIABLE:
            firsts.append(program)
        kinds.add(program.kind)
    return firsts


STEPS = [*in_steps(OF_OPS), *in_steps([*OF_LINALG, *OF_FUNCTIONS]), *in_steps(OF_LAYERS)]
FIRST_CALLS = first_of_each_kind(STEPS)
FURTHER_CALLS = [program for program in STEPS if program not in FIRST_CALLS]


@by_batches(FIRST_CALLS, 72)
def test_the_first_call_of_each_kind(cut: Put, batch: list[Program]) -> None:
    check_all(batch, cut, xd.compile)


@pytest.mark.thorough
@by_batches(FURTHER_CALLS, 128)
def test_further_calls(cut: Put, batch: list[Program]) -> None:
    check_all(batch, cut, xd.compile)


EVERY = [*OF_OPS, *OF_LINALG, *OF_FUNCTIONS, *OF_LAYERS]


def gradients_left_out() -> list[Program]:
    chosen = {p.name for p in in_steps(EVERY) if p.gradients != NO_GRADIENTS}
    left_out = (*chosen, *ONLY_EAGER, *WITHOUT_GRADIENTS)
    return [program for program in EVERY if program.name not in left_out]


@pytest.mark.thorough
@by_batches(gradients_left_out(), 128)
def test_gradients_of_more_calls(cut: Put, batch: list[Program]) -> None:
    check_all(batch, cut, xd.compile)


def test_every_kind_that_torch_differentiates_is_in_a_step() -> None:
    steps = [p for p in in_steps(EVERY) if p.gradients != NO_GRADIENTS]
    compared = {program.kind for program in steps if has_gradients(program)}
    more = [program for program in gradients_left_out() if program.kind not in compared]
    assert [program.name for program in more if has_gradients(program)] == []


@by_batches(OF_RANGES, 128)
def test_random_numbers(cut: Put, batch: list[Program]) -> None:
    check_values(batch, cut, xd.compile)


EAGER = [
    *programs(first_of_each({**CASES, **STATIC, **LINALG, **SPECIAL})),
    *programs(first_of_each(FOURIER), values=OF_SUMS),
    *OF_RANGES,
    *[p for p in OF_FUNCTIONS if p.name in ("svd", "eigh", "eig", "eigvals")],
    *{program.kind: program for program in OF_LAYERS}.values(),
]


@pytest.mark.thorough
@by_batches(EAGER, 40)
def test_eager(cut: Put, batch: list[Program]) -> None:
    with torch.inference_mode():
        check_values(batch, cut, eagerly)


BY_NAME = {program.name: program for program in EVERY}
OF_VALUES = [*programs(BY_VALUES), *(BY_NAME[name] for name in ONLY_EAGER)]


@by_batches(OF_VALUES, 128)
def test_what_only_runs_eagerly(cut: Put, batch: list[Program]) -> None:
    check_all(batch, cut, eagerly)


# ------------------------------------------------------------------ dtypes

OTHERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "bfloat16": lambda t: t.bfloat16() if t.is_floating_point() else t,
    "int64": lambda t: torch.where(t.trunc() == 0, 1, t).long() if t.is_floating_point() else t,
    "bool": lambda t: t > 0 if t.is_floating_point() else t,
    "0-dim": lambda t: t.reshape(-1)[0].clone(),
    "empty": lambda t: t.new_empty((0, *t.shape[1:])) if t.ndim == 2 else t,
}


def accepted(given: Sequence[Program]) -> list[Program]:
    """Those that are calls of torch's: not every op has every dtype."""

    def is_accepted(program: Program) -> bool:
        try:
            program.call(*program.inputs)
        except (RuntimeError, TypeError):
            return False
        return True

    return [program for program in given if is_accepted(program)]


def changed(change: Callable[[torch.Tensor], torch.Tensor]) -> list[Program]:
    shared: dict[int, torch.Tensor] = {}  # what was one input stays one

    def once(tensor: torch.Tensor) -> torch.Tensor:
        return shared.setdefault(id(tensor), change(tensor))

    return accepted(programs({op: [cases[0].mapped(once)] for op, cases in POINTWISE.items()}))


@pytest.mark.parametrize("change", OTHERS)
def test_other_inputs(replicated: Put, change: str) -> None:
    check_values(changed(OTHERS[change]), replicated, xd.compile)


VALUES = {
    "bool": torch.tensor([True, False, True]),
    "uint8": torch.tensor([1, 2, 255], dtype=torch.uint8),
    "int32": torch.tensor([-7, 2, 3], dtype=torch.int32),
    "int64": torch.tensor([-7, 2, 3]),
    "bfloat16": torch.tensor([-1.5, 0.5, 2.25]).bfloat16(),
    "float32": torch.tensor([-1.5, 0.5, 2.25]),
}
SECOND = {
    **VALUES,
    "True": True,
    "3": 3,
    "1.5": 1.5,
    "0-dim int64": torch.tensor(3),
    "0-dim float32": torch.tensor(1.5),
    "0-dim float64": torch.tensor(1.5, dtype=torch.float64),
}
PROMOTING: dict[str, Callable[[Any, Any], torch.Tensor]] = {
    "add": torch.add,
    "mul": torch.mul,
    "div": torch.div,
    "eq": torch.eq,
    "lt": torch.lt,
    "where": lambda a, b: torch.where(a > 0, a, b),
    "pow": lambda a, b: torch.pow(a.abs() if a.dtype != torch.bool else a, b),
    "scalar first": lambda a, b: b - a,
}


@pytest.mark.parametrize("name", PROMOTING)
def test_dtypes_are_promoted_as_torch_does(replicated: Put, name: str) -> None:
    pairs = itertools.product(VALUES.items(), SECOND.items())
    batch = [
        replace(program_of(f"{name} {dtype}, {kind}", PROMOTING[name], a, b), values=None)
        for (dtype, a), (kind, b) in pairs
        # bool on torch's CPU, int64 on its meta device, which is asked here
        if (name, dtype, kind) != ("pow", "bool", "True")
    ]
    check_values(accepted(batch), replicated, xd.compile)
