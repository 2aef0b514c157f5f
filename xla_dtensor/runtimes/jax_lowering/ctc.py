"""The CTC loss: the probability of a label sequence, over all ways to spread it over the steps.

A sequence of S labels has 2S + 1 *states*: each label, and a blank before, between and after them.
The forward sums over paths through the states from the first step on, the backward from both ends.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
import torch
from jax import lax

from xla_dtensor.runtimes.jax_counted import counted_scan
from xla_dtensor.runtimes.jax_lowering.as_one import as_one
from xla_dtensor.runtimes.jax_lowering.table import lower

__all__: list[str] = []

aten = torch.ops.aten


class _Problem(NamedTuple):
    """Log-probabilities of each state, shape (steps, batch, states), and which states there are."""

    scores: Any
    labels: Any  # (batch, states)
    skips: Any  # (batch, states): a path may come from two states before
    steps: Any  # (batch,)
    last: Any  # (batch,): the last state, the blank after the last label


def _problem(
    log_probs: Any, targets: Any, steps: Any, lengths: Any, blank: int, longest: int
) -> _Problem:
    steps, lengths = (jnp.asarray(v, jnp.int32).reshape(-1) for v in (steps, lengths))
    places = jnp.arange(longest, dtype=jnp.int32)
    if targets.ndim == 1:  # all sequences, one after the other
        places = places + (jnp.cumsum(lengths) - lengths)[:, None]
        padded = jnp.take(targets, places, mode="clip") if targets.size else places
    else:
        padded = targets[:, :longest]
    labels = jnp.full((len(lengths), 2 * longest + 1), blank, jnp.int32)
    spread = jnp.stack([padded.astype(jnp.int32), labels[:, 1::2]], 2).reshape(len(lengths), -1)
    labels = jnp.concatenate([labels[:, :1], spread], 1)
    before = jnp.pad(labels, ((0, 0), (2, 0)), constant_values=blank)[:, :-2]
    scores = jnp.take_along_axis(log_probs, labels[None], axis=2, mode="clip")
    exists = jnp.arange(labels.shape[1], dtype=jnp.int32) <= 2 * lengths[:, None]
    scores = jnp.where(exists, scores, -jnp.inf)
    return _Problem(scores, labels, (labels != blank) & (labels != before), steps, 2 * lengths)


def _log_sum(*terms: Any) -> Any:
    stacked = jnp.stack(jnp.broadcast_arrays(*terms))
    largest = jnp.max(stacked, axis=0)
    largest = jnp.where(jnp.isfinite(largest), largest, 0)
    return jnp.log(jnp.sum(jnp.exp(stacked - largest), axis=0)) + largest


def _from(states: Any, number: int) -> Any:
    """What lies `number` states before each one (behind it, if negative); nothing at the ends."""
    padding = ((0, 0), (number, 0)) if number > 0 else ((0, 0), (0, -number))
    padded = jnp.pad(states, padding, constant_values=-jnp.inf)
    return padded[:, :-number] if number > 0 else padded[:, -number:]


def _forward_sums(problem: _Problem) -> Any:
    states = jnp.arange(problem.labels.shape[1])
    begin = jnp.where((states < 2) & (states <= problem.last[:, None]), 0.0, -jnp.inf)
    first = begin + problem.scores[0]

    def step(sums: Any, scores: Any) -> Any:
        skipped = jnp.where(problem.skips, _from(sums, 2), -jnp.inf)
        sums = _log_sum(sums, _from(sums, 1), skipped) + scores
        return sums, sums

    _, rest = counted_scan(step, first, problem.scores[1:])
    return jnp.concatenate([first[None], rest])


def _backward_sums(problem: _Problem) -> Any:
    count = problem.scores.shape[0]
    states = jnp.arange(problem.labels.shape[1])
    ends = (states == problem.last[:, None]) | (states == problem.last[:, None] - 1)
    may_skip = jnp.pad(problem.skips, ((0, 0), (0, 2)))[:, 2:]

    def step(sums: Any, given: Any) -> Any:
        scores, number = given
        skipped = jnp.where(may_skip, _from(sums, -2), -jnp.inf)
        sums = _log_sum(sums, _from(sums, -1), skipped)
        at_end = (number == problem.steps - 1)[:, None]
        sums = jnp.where(at_end, jnp.where(ends, 0.0, -jnp.inf), sums) + scores
        return sums, sums

    start = jnp.full(problem.labels.shape, -jnp.inf, problem.scores.dtype)
    numbers = jnp.arange(count, dtype=jnp.int32)
    return counted_scan(step, start, (problem.scores, numbers), reverse=True)[1]


def _longest(targets: Any, lengths: Any) -> int:
    if isinstance(lengths, (list, tuple)):
        return max(lengths, default=0)
    return targets.shape[-1]


@lower(aten._ctc_loss.default, aten._ctc_loss.Tensor)
@as_one
def _ctc_loss(
    log_probs: Any,
    targets: Any,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    zero_infinity: bool = False,
) -> Any:
    batched = log_probs.ndim == 3
    probs = log_probs if batched else log_probs[:, None]
    longest = _longest(targets, target_lengths)
    if not batched and targets.ndim == 1:
        targets = targets[None]
    problem = _problem(probs, targets, input_lengths, target_lengths, blank, longest)
    sums = _forward_sums(problem)
    rows = jnp.arange(probs.shape[1])
    ending = sums[jnp.maximum(problem.steps - 1, 0), rows]
    on_label = jnp.where(problem.last > 0, ending[rows, jnp.maximum(problem.last - 1, 0)], -jnp.inf)
    loss = -_log_sum(ending[rows, problem.last], on_label)
    loss = jnp.where(problem.steps == 0, jnp.where(problem.last == 0, 0.0, jnp.inf), loss)
    sums = jnp.moveaxis(sums, 0, 1)
    return (loss, sums) if batched else (loss[0], sums[0])


@lower(aten._ctc_loss_backward.default, aten._ctc_loss_backward.Tensor)
@as_one
def _ctc_loss_backward(
    grad: Any,
    log_probs: Any,
    targets: Any,
    input_lengths: Any,
    target_lengths: Any,
    loss: Any,
    sums: Any,
    blank: int,
    zero_infinity: bool = False,
) -> Any:
    batched = log_probs.ndim == 3
    probs = log_probs if batched else log_probs[:, None]
    if not batched:
        targets = targets[None] if targets.ndim == 1 else targets
        loss, sums = loss.reshape(1), sums.reshape(1, *sums.shape[-2:])
    longest = (sums.shape[-1] - 1) // 2
    problem = _problem(probs, targets, input_lengths, target_lengths, blank, longest)
    paths = jnp.moveaxis(sums, 1, 0) + _backward_sums(problem)  # each has the state's score
    share = jnp.exp(paths - problem.scores + loss[:, None])
    share = jnp.where(jnp.isneginf(paths), 0, share)
    classes = problem.labels[..., None] == jnp.arange(probs.shape[-1], dtype=jnp.int32)
    share = jnp.einsum(
        "tns,nsc->tnc", share, classes.astype(share.dtype), precision=lax.Precision.HIGHEST
    )
    # As torch's: the gradient of what a log_softmax before the loss was given.
    found = (jnp.exp(probs) - share) * grad.reshape(-1)[:, None]
    impossible = jnp.isposinf(loss)[:, None]
    found = jnp.where(impossible, 0 if zero_infinity else jnp.nan, found)
    steps = jnp.arange(probs.shape[0], dtype=jnp.int32)[:, None, None]
    found = jnp.where(steps < problem.steps[:, None], found, 0)
    return found if batched else found[:, 0]
