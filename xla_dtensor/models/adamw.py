"""AdamW whose moments may have another dtype than the parameters: float32 beside bfloat16.

``torch.optim.AdamW`` gives the moments the parameter's dtype. Here each update is computed in
float32 and rounded to what is kept. In float32 the numbers are those of ``torch.optim.AdamW``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

__all__ = ["AdamW"]


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
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad.float(), group)

    def _update(self, parameter: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            kind = self.moment_dtype or parameter.dtype
            state["step"] = torch.zeros(())
            state["exp_avg"] = torch.zeros_like(parameter, dtype=kind)
            state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=kind)
        (beta1, beta2), rate = group["betas"], group["lr"]
        step, first, second = state["step"], state["exp_avg"], state["exp_avg_sq"]
        step += 1
        mean = beta1 * first.float() + (1 - beta1) * grad
        square = beta2 * second.float() + (1 - beta2) * grad * grad
        first.copy_(mean)
        second.copy_(square)
        root = (square / (1 - beta2**step)).sqrt() + group["eps"]
        kept = parameter.float() * (1 - rate * group["weight_decay"])
        parameter.copy_(kept - rate * (mean / (1 - beta1**step)) / root)
