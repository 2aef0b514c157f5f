"""Make what an optimizer changes between steps an input of the compiled program.

Two things in a ``torch.optim`` optimizer are not tensors on the device, yet change: the learning
rate in ``param_groups`` (a float that a scheduler writes) and counters such as AdamW's ``step`` (a
plain CPU scalar). Baked into a program both are silently wrong from the second step on. While a
step is traced, torch's own optimizer hooks call :class:`OptimizerInputs`, which puts counters on
the device for good and lends the optimizer a traced number in place of the rate.

All other hyperparameters are baked; :meth:`OptimizerInputs.settings` lets the program notice when
one was changed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.optim.optimizer as torch_optimizer

from xla_dtensor.errors import CompileError

__all__ = ["OptimizerInputs"]

_RATE = "lr"


class OptimizerInputs:
    """The optimizers that a step calls, and the numbers lent to them.

    Args:
        lift_tensor: Turns a plain CPU tensor of optimizer state into a payload.
        lend_number: Turns a float into a traced number, which the program reads anew per call.
    """

    def __init__(
        self,
        lift_tensor: Callable[[torch.Tensor], torch.Tensor],
        lend_number: Callable[[float, Callable[[], float]], Any],
    ) -> None:
        self._lift_tensor = lift_tensor
        self._lend_number = lend_number
        self._lent: list[tuple[dict[str, Any], float, Any]] = []
        self._seen: dict[int, tuple[dict[str, Any], float]] = {}
        self._numbers: dict[int, Any] = {}
        self.optimizers: dict[int, torch.optim.Optimizer] = {}

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Watch every optimizer step; give all rates back at the end, whatever happens."""
        handles = [
            torch_optimizer.register_optimizer_step_pre_hook(self._before),
            torch_optimizer.register_optimizer_step_post_hook(self._after),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            self._give_back()

    def settings(self) -> tuple[Any, ...]:
        """Return every baked hyperparameter, to compare on later calls."""
        return tuple(
            (key, value)
            for optimizer in self.optimizers.values()
            for group in optimizer.param_groups
            for key, value in group.items()
            if key not in ("params", _RATE) and not isinstance(value, torch.Tensor)
        ) + tuple(
            len(group["params"])
            for optimizer in self.optimizers.values()
            for group in optimizer.param_groups
        )

    def parameters(self) -> list[torch.Tensor]:
        """Return the parameters of all optimizers seen."""
        return [
            p for o in self.optimizers.values() for group in o.param_groups for p in group["params"]
        ]

    def _before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self.optimizers[id(optimizer)] = optimizer
        for state in optimizer.state.values():
            for name, value in state.items():
                if type(value) is torch.Tensor:
                    state[name] = self._lift_tensor(value)
        for group in optimizer.param_groups:
            rate = group.get(_RATE)
            if isinstance(rate, float):
                number = self._number(group, rate)
                self._lent.append((group, rate, number))
                self._seen.setdefault(id(group), (group, rate))
                group[_RATE] = number

    def _number(self, group: dict[str, Any], rate: float) -> Any:
        if id(group) not in self._numbers:
            self._numbers[id(group)] = self._lend_number(rate, lambda: float(group[_RATE]))
        return self._numbers[id(group)]

    def _after(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._give_back()

    def _give_back(self) -> None:
        for group, rate, number in self._lent:
            if group[_RATE] is number:
                group[_RATE] = rate
        self._lent.clear()

    def check_rates_unchanged(self) -> None:
        """Raise when the traced step itself changed a learning rate (a scheduler in the step)."""
        for group, rate in self._seen.values():
            if group.get(_RATE) != rate:
                raise CompileError(
                    f"The learning rate changed from {rate} to {group.get(_RATE)} inside a "
                    "compiled step. Python runs only while the step is traced, so a scheduler in "
                    "it would act once and then never again. Call scheduler.step() after the "
                    "compiled step; the rate is read anew on every call."
                )
