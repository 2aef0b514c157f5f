"""Batch norms that write their running statistics; ``native_batch_norm`` does so unsaid."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["RULES"]

aten = torch.ops.aten


def _native_batch_norm(
    x: Any,
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_var: Any,
    training: bool,
    momentum: float,
    eps: float,
) -> Any:
    from xla_dtensor.runtimes.jax_ops import run_op, write

    given = [t for t in (running_mean, running_var) if t is not None]
    if not given:
        options = (training, momentum, eps)
        return run_op(aten._native_batch_norm_legit.no_stats, (x, weight, bias, *options), {})
    # The functional op takes both; one that is missing is not written, whatever it holds.
    means = given[0] if running_mean is None else running_mean
    variances = given[0] if running_var is None else running_var
    *results, new_mean, new_var = run_op(
        aten._native_batch_norm_legit_functional.default,
        (x, weight, bias, means, variances, training, momentum, eps),
        {},
    )
    if training:
        for target, value in ((running_mean, new_mean), (running_var, new_var)):
            if target is not None:
                write(target, value)
    else:  # as torch on the CPU: nothing to save
        results[1:] = [run_op(aten.new_zeros.default, (x, [0]), {}) for _ in results[1:]]
    return tuple(results)


# Rules that take tensors, as those of ``jax_special`` do.
RULES = {
    aten.native_batch_norm.default: _native_batch_norm,
    aten._native_batch_norm_legit.default: _native_batch_norm,
}
