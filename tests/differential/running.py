"""Runs a program on one side: plain torch, PyTorch's DTensor, or xla_dtensor.

A step that raises is tried again with replicated inputs, so that the rest of the program goes on
alike on all sides; what was raised is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, Protocol

from tests.differential.op_table import OPS
from tests.differential.programs import Program, Step, leaf_values

__all__ = ["Run", "Side", "run"]


class Side(Protocol):
    """What differs between the sides."""

    def put(self, value: Any, tokens: Any) -> Any: ...
    def replicated(self, tensor: Any) -> Any: ...
    def redistribute(self, tensor: Any, tokens: Any) -> Any: ...
    def full_tensor(self, tensor: Any) -> Any: ...
    def plain_beside(self, tensor: Any) -> Any: ...
    def local(self, tensor: Any, name: str, params: Any, shape: Any) -> Any: ...
    def partial_matmul(self, a: Any, b: Any, axis: int) -> Any: ...
    def loss(self, tensor: Any, kind: str) -> Any: ...


@dataclass
class Run:
    """What a program gave: a tensor per leaf and step, None where nothing could be made."""

    tensors: list[Any] = field(default_factory=list)
    first: dict[int, Any] = field(default_factory=dict)  # results of steps that were run twice
    errors: dict[int, Exception] = field(default_factory=dict)
    lost: dict[int, Exception] = field(default_factory=dict)  # raised again, replicated
    gradients: dict[int, Any] = field(default_factory=dict)
    backward_error: Exception | None = None


def run(
    program: Program, side: Side, again: Collection[int] = (), drop: Collection[int] = ()
) -> Run:
    """Run a program. The number of a step is that of the tensor it makes.

    Args:
        program: What to run.
        side: Where.
        again: Steps to run once more with replicated inputs, as another side had to.
        drop: Steps whose result is not gone on with, as another side has none.
    """
    done = Run()
    for leaf, value in zip(program.leaves, leaf_values(program), strict=True):
        tensor = side.put(value, leaf.placements)
        done.tensors.append(tensor if leaf.rows else tensor.requires_grad_())
    for number, step in enumerate(program.steps, len(program.leaves)):
        _take(done, number, step, side, number in again, drop)
    if program.loss:
        _go_back(done, program, side)
    return done


def _take(
    done: Run, number: int, step: Step, side: Side, again: bool, drop: Collection[int]
) -> None:
    inputs = [done.tensors[i] for i in step.inputs]
    if any(tensor is None for tensor in inputs):
        done.tensors.append(None)
        return
    result, error = _tried(lambda: run_step(step, inputs, side))
    if error is not None:
        done.errors[number] = error
    elif again:
        done.first[number] = result
    if error is not None or again:
        result, lost = _tried(lambda: run_step(step, [side.replicated(t) for t in inputs], side))
        if lost is not None:
            done.lost[number] = lost
    done.tensors.append(None if number in drop else result)


def _tried(call: Callable[[], Any]) -> tuple[Any, Exception | None]:
    try:
        return call(), None
    except Exception as error:
        return None, error


def run_step(step: Step, inputs: list[Any], side: Side) -> Any:
    """The result of one step."""
    if step.kind == "op":
        return OPS[step.name](inputs, *step.params)
    if step.kind == "local":
        return side.local(inputs[0], step.name, step.params, tuple(inputs[0].shape))
    if step.kind == "partial_matmul":
        return side.partial_matmul(*inputs, *step.params)
    return getattr(side, step.kind)(inputs[0], *step.params)


def _go_back(done: Run, program: Program, side: Side) -> None:
    found = [t for t in done.tensors[len(program.leaves) :] if t is not None and t.requires_grad]
    if not found:
        return
    try:
        losses = [side.loss(tensor, program.loss) for tensor in found[-2:]]
        (losses[0] + losses[1] if len(losses) == 2 else losses[0]).backward()
    except Exception as error:
        done.backward_error = error
        return
    for number, leaf in enumerate(program.leaves):
        tensor = done.tensors[number]
        if not leaf.rows and tensor.grad is not None:
            done.gradients[number] = tensor.grad
