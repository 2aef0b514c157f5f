"""Ops by the dozen: one compiled step computes a batch of calls, each is compared by itself.

Nearly all the time of a small test goes into compiling a program for 8 devices, and a program of 32
ops takes little longer to compile than a program of one. So a table of calls becomes batches, and a
batch one step, whose inputs are arguments: XLA cannot fold what it does not know::

    batch = [Program("exp", torch.exp, (x,)), Program("add", torch.add, (x, y)), ...]
    check_all(batch, put, xd.compile)       one program: exp(x), the gradient of x, x + y, ...
    check_values(batch, put, xd.compile)    one program: exp(x), x + y, ...
    check_values(batch, put, eagerly)       op by op, each compiled by itself

Invariants:

* A failure names the calls that fail, and no other: every output is compared by itself, and a batch
  that cannot be traced, compiled or run is halved until calls fail alone.
* What is expected is plain PyTorch on the CPU, in float64 where the inputs are float32, in the
  dtypes that it has for the inputs as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from xla_dtensor import DTensor

__all__ = [
    "NO_GRADIENTS",
    "Program",
    "Put",
    "Tolerance",
    "by_batches",
    "check_all",
    "check_values",
    "eagerly",
    "has_gradients",
    "is_differentiable",
    "leaf",
    "program_of",
    "wide",
    "within",
]

Put = Callable[[torch.Tensor], torch.Tensor]
Step = Callable[..., list[Any]]
# Gives a step that computes the same: `xla_dtensor.compile`, or `eagerly`.
Execute = Callable[[Step], Callable[..., Any]]
# (rtol, atol), both of float32; None: what torch.testing has for the dtype.
Tolerance = tuple[float, float] | None
BFLOAT16: Tolerance = (2e-2, 1e-2)
# Cotangents are the first of these, which are distinct and of both signs among any few.
LINE = torch.cos(torch.arange(1 << 16, dtype=torch.float64)) * 1.3
NO_GRADIENTS: Tolerance = (-1.0, -1.0)  # those of the call are not determined


@dataclass(frozen=True)
class Program:
    """One call of an op, or of a function of a few ops.

    Args:
        name: Says in a failure which one it is.
        call: Takes the inputs, in their order. Gives tensors, nested as it likes.
        inputs: Plain tensors. One that several programs have is one input of their step.
        values: The tolerance of results in float32.
        gradients: The tolerance of gradients.
        check: Raises AssertionError where results, given with the program, are wrong.
        kind: Equal for calls of one op in one mode, "floor" or "trunc", say.
    """

    name: str
    call: Callable[..., Any]
    inputs: tuple[torch.Tensor, ...]
    values: Tolerance = (2e-5, 2e-6)
    gradients: Tolerance = (1e-4, 2e-5)
    check: Callable[[Program, Any], None] | None = None
    kind: Any = None


def program_of(name: str, op: Callable[..., Any], *args: Any, **kwargs: Any) -> Program:
    """The program that calls `op` so: all tensors of its arguments are inputs."""
    leaves, spec = tree_flatten((args, kwargs))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    tensors = tuple(leaves[i] for i in places)
    rest = [None if i in places else leaf for i, leaf in enumerate(leaves)]

    def call(*inputs: torch.Tensor) -> Any:
        filled = list(rest)
        for i, tensor in zip(places, inputs, strict=True):
            filled[i] = tensor
        positional, named = tree_unflatten(filled, spec)
        return op(*positional, **named)

    modes = tuple(leaf for leaf in leaves if isinstance(leaf, str))
    return Program(name, call, tensors, kind=(op, *modes))


def by_batches(programs: Iterable[Program], size: int = 32) -> Any:
    """Parametrize a test with `batch`: lists of at most `size` programs, named after their ends."""
    rows = list(programs)
    batches = [rows[i : i + size] for i in range(0, len(rows), size)]
    names = [f"{batch[0].name} to {batch[-1].name}".replace("::", ":") for batch in batches]
    return pytest.mark.parametrize("batch", batches, ids=names)


def eagerly(step: Step) -> Callable[..., Any]:
    """Run a step as it is written, op by op."""
    return step


def wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.double() if tensor.dtype == torch.float32 else tensor


def leaf(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().requires_grad_(is_differentiable(tensor))


def is_differentiable(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


# ------------------------------------------------------------------ checks


def check_values(batch: Sequence[Program], put: Put, execute: Execute) -> None:
    """Compare the results of all calls, computed in one step, with what they have to be.

    Args:
        batch: The programs.
        put: Places a plain tensor on the mesh.
        execute: Makes the step run: `xla_dtensor.compile` or `eagerly`.

    Raises:
        AssertionError: It names each program that raises or gives wrong values.
    """

    def run(programs: Sequence[Program]) -> list[Any]:
        inputs, places = _shared(programs)
        given = [put(tensor) for tensor in inputs]
        return list(execute(_values_step(programs, places))(given))

    _check(batch, run, _check_values)


def check_all(batch: Sequence[Program], put: Put, execute: Execute) -> None:
    """Compare results and all inputs' gradients, computed in one step, with torch's.

    Of a call that torch itself cannot differentiate, or of no elements, only the results are.

    Args:
        batch: The programs.
        put: Places a plain tensor on the mesh.
        execute: Makes the step run: `xla_dtensor.compile` or `eagerly`.

    Raises:
        AssertionError: It names each program that raises or gives wrong values or gradients.
    """
    references = {id(program): _reference(program) for program in batch}
    put_line = put(LINE)

    def run(programs: Sequence[Program]) -> list[Any]:
        inputs, places = _shared(programs)
        given = [put(t).requires_grad_(is_differentiable(t)) for t in inputs]
        calls = [program.call for program in programs]
        pulls = [references[id(program)].exact is not None for program in programs]
        values_of = _values_step(programs, places)

        def step(tensors: list[torch.Tensor], line: torch.Tensor) -> list[Any]:
            gradients = [
                pulled(call, [tensors[i] for i in mine], line) if pull else None
                for call, mine, pull in zip(calls, places, pulls, strict=True)
            ]
            return list(zip(values_of(tensors), gradients, strict=True))

        return list(execute(step)(given, put_line))

    def check(program: Program, found: Any) -> None:
        values, gradients = found
        _check_values(program, values)
        _check_gradients(program, gradients, references[id(program)])

    _check(batch, run, check)


def _values_step(programs: Sequence[Program], places: list[list[int]]) -> Step:
    calls = [program.call for program in programs]

    def step(tensors: list[torch.Tensor]) -> list[Any]:
        with torch.no_grad():
            return [
                call(*(tensors[i] for i in mine)) for call, mine in zip(calls, places, strict=True)
            ]

    return step


def _check_values(program: Program, found: Any) -> None:
    (program.check or equals_torch)(program, found)


def equals_torch(program: Program, found: Any) -> None:
    """Compare with torch's values in float64, in torch's dtypes and shapes."""
    expected = program.call(*(tensor.clone() for tensor in program.inputs))
    exact = program.call(*(wide(tensor.clone()) for tensor in program.inputs))
    for ours, plain, value in zip(
        *(tree_flatten(v)[0] for v in (found, expected, exact)), strict=True
    ):
        if isinstance(plain, torch.Tensor):
            _assert_alike(ours, plain)
            _assert_close(ours.cpu(), value.detach().to(plain.dtype), program.values)
        else:
            assert ours == plain, f"{ours}, in torch {plain}"


def within(low: float, high: float) -> Callable[[Program, Any], None]:
    """Return a check of random or undefined values: dtype, shape and range are all there is."""

    def check(program: Program, found: Any) -> None:
        expected = program.call(*program.inputs)
        for ours, plain in zip(tree_flatten(found)[0], tree_flatten(expected)[0], strict=True):
            _assert_alike(ours, plain)
            assert ours.stride() == plain.stride(), f"{ours.stride()}, in torch {plain.stride()}"
            values = ours.cpu()
            assert low <= values.min(), f"{values.min()} is below {low}"
            assert values.max() <= high, f"{values.max()} is above {high}"

    return check


def _check_gradients(program: Program, found: Any, reference: _Reference) -> None:
    if reference.exact is None:
        return
    count = len(reference.exact)
    assert len(found) == count, f"gradients: {len(found)}, in torch {count}"
    for mine, theirs, narrow in zip(found, reference.exact, reference.single, strict=True):
        assert (mine is None) == (theirs is None), f"gradients: {mine}, in torch {theirs}"
        if mine is not None and theirs is not None and narrow is not None:
            # Where float32 overflows on the way, it does so in torch as well.
            expected = torch.where(narrow.isfinite(), theirs, narrow).to(mine.dtype)
            try:
                _assert_close(mine.cpu(), expected, program.gradients)
            except AssertionError as error:
                raise AssertionError(f"gradients: {error}") from None


def _assert_alike(ours: Any, plain: torch.Tensor) -> None:
    assert isinstance(ours, DTensor), f"{type(ours).__name__}, not a DTensor"
    found, expected = (ours.dtype, *ours.shape), (plain.dtype, *plain.shape)
    assert found == expected, f"{found}, in torch {expected}"


def _assert_close(found: torch.Tensor, expected: torch.Tensor, tolerance: Tolerance) -> None:
    if tolerance is not None and expected.dtype == torch.bfloat16:
        tolerance = BFLOAT16
    rtol, atol = tolerance or (None, None)
    torch.testing.assert_close(found, expected, rtol=rtol, atol=atol, equal_nan=True)


# ------------------------------------------------------------------ gradients


def pulled(
    call: Callable[..., Any],
    inputs: Sequence[torch.Tensor],
    line: torch.Tensor,
) -> list[torch.Tensor | None]:
    """The gradients of the inputs that require some, none if no output depends on one.

    Args:
        call: Takes the inputs.
        inputs: Leaves of autograd.
        line: Numbers: an output's cotangent is as many of these as it has elements.
    """
    leaves = tree_flatten(call(*inputs))[0]
    outputs = [v for v in leaves if isinstance(v, torch.Tensor) and v.requires_grad]
    wanted = [tensor for tensor in inputs if tensor.requires_grad]
    if not outputs or not wanted:
        return []
    if any(out.numel() > line.numel() for out in outputs):
        raise ValueError(f"an output has more than {line.numel()} elements: lengthen LINE")
    cotangents = [line[: out.numel()].reshape(out.shape).to(out.dtype) for out in outputs]
    return list(torch.autograd.grad(outputs, wanted, cotangents, allow_unused=True))


def has_gradients(program: Program) -> bool:
    """Tell whether torch can differentiate the call, and some output depends on an input."""
    return bool(_reference(program).exact)


@dataclass(frozen=True)
class _Reference:
    """The inputs' gradients in float64 and in float32; None if torch has none of this call."""

    exact: list[torch.Tensor | None] | None
    single: list[torch.Tensor | None]


def _reference(program: Program) -> _Reference:
    if program.gradients == NO_GRADIENTS or not all(t.numel() for t in program.inputs):
        return _Reference(None, [])
    exact = [leaf(wide(tensor)) for tensor in program.inputs]
    single = [leaf(tensor) for tensor in program.inputs]
    try:
        return _Reference(*(pulled(program.call, leaves, LINE) for leaves in (exact, single)))
    except RuntimeError:
        return _Reference(None, [])


# ------------------------------------------------------------------ batches


def _shared(programs: Sequence[Program]) -> tuple[list[torch.Tensor], list[list[int]]]:
    """All inputs without repetition, and where each program has its own.

    What a program has twice is two inputs, as it would be without the others.
    """
    inputs: list[torch.Tensor] = []
    places: list[list[int]] = []
    found: dict[tuple[int, int], int] = {}
    for program in programs:
        mine: list[int] = []
        for tensor in program.inputs:
            times = sum(inputs[i] is tensor for i in mine)
            place = found.setdefault((id(tensor), times), len(inputs))
            if place == len(inputs):
                inputs.append(tensor)
            mine.append(place)
        places.append(mine)
    return inputs, places


def _check(
    batch: Sequence[Program],
    run: Callable[[Sequence[Program]], list[Any]],
    check: Callable[[Program, Any], None],
) -> None:
    faults: list[str] = []
    for program, found in _results(batch, run, faults):
        try:
            check(program, found)
        except AssertionError as error:
            faults.append(f"{program.name}: {error}")
    assert not faults, f"{len(faults)} of {len(batch)} programs fail\n" + "\n\n".join(faults)


def _results(
    batch: Sequence[Program],
    run: Callable[[Sequence[Program]], list[Any]],
    faults: list[str],
) -> Iterator[tuple[Program, Any]]:
    """Run all, by halves where that fails; faults get those that fail alone, or only jointly."""
    try:
        results = run(batch)
    except Exception as error:
        if len(batch) == 1:
            faults.append(f"{batch[0].name}: raises {type(error).__name__}: {error}")
            return
        before, half = len(faults), len(batch) // 2
        yield from _results(batch[:half], run, faults)
        yield from _results(batch[half:], run, faults)
        if len(faults) == before:
            names = ", ".join(program.name for program in batch)
            faults.append(f"only in one step: {names}: raise {type(error).__name__}: {error}")
        return
    yield from zip(batch, results, strict=True)
