"""AdamW whose moments may have another dtype than the parameters: float32 beside bfloat16.

``torch.optim.AdamW`` gives the moments the parameter's dtype. Here each update is computed in
float32 and rounded to what is kept. In float32 the numbers are those of ``torch.optim.AdamW``.

It works on lists, so that a traced step updates the layers of a loop as one. Run eagerly, it holds
two float32 values beside each parameter.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

__all__ = ["AdamW"]


class _Foreach:
    """``torch._foreach_<name>`` as ``foreach.<name>``."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, f"_foreach_{name}")


foreach = _Foreach()


class AdamW(torch.optim.Optimizer):
    """Adam with decoupled weight decay (arXiv:1711.05101).

    Args:
        params: What to train.
        lr: Learning rate.
        betas: How much of each moment is kept per step.
        eps: Added to the root of the second moment.
        weight_decay: Share of a parameter that is taken off per step, times `lr`.
        moment_dtype: Dtype of both moments; None for the parameter's.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
        >>> optimizer = AdamW([weight], moment_dtype=torch.float32)
        >>> weight.sum().backward()
        >>> optimizer.step()
        >>> optimizer.state[weight]["exp_avg"].dtype
        torch.float32
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float = 3e-4,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        moment_dtype: torch.dtype | None = None,
    ) -> None:
        self.moment_dtype = moment_dtype
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            trained = [parameter for parameter in group["params"] if parameter.grad is not None]
            if trained:
                self._update(trained, group)

    def _update(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        states = [self._state_of(parameter) for parameter in parameters]
        steps, firsts, seconds = (
            [state[name] for state in states] for name in ("step", "exp_avg", "exp_avg_sq")
        )
        grads = [parameter.grad for parameter in parameters]
        (beta1, beta2), rate = group["betas"], group["lr"]
        foreach.add_(steps, 1)
        # What is added to float32 is converted first, so neither gradients nor parameters are here.
        means = foreach.mul(_in_float32(firsts), beta1)
        foreach.add_(means, grads, alpha=1 - beta1)
        squares = foreach.mul(_in_float32(seconds), beta2)
        foreach.addcmul_(squares, grads, grads, 1 - beta2)
        foreach.copy_(firsts, means)
        foreach.copy_(seconds, squares)
        foreach.div_(squares, _bias_corrections(beta2, steps))
        foreach.sqrt_(squares)
        foreach.add_(squares, group["eps"])
        foreach.div_(means, _bias_corrections(beta1, steps))
        foreach.div_(means, squares)
        foreach.mul_(means, -rate)
        foreach.add_(means, parameters, alpha=1 - rate * group["weight_decay"])
        foreach.copy_(parameters, means)

    def _state_of(self, parameter: Tensor) -> dict[str, Tensor]:
        state = self.state[parameter]
        if not state:
            kind = self.moment_dtype or parameter.dtype
            state["step"] = torch.zeros(())
            state["exp_avg"] = torch.zeros_like(parameter, dtype=kind)
            state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=kind)
        return state


def _in_float32(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor.float() for tensor in tensors]


def _bias_corrections(beta: Any, steps: list[Tensor]) -> Any:
    powers = foreach.pow(beta, steps)
    foreach.sub_(powers, 1)
    foreach.neg_(powers)
    return powers
