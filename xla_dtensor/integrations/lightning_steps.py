"""The programs of a LightningModule: what Lightning's loop calls between two batches, compiled.

    call of Lightning's loop   program of (batch, batch_idx)
    ------------------------   ------------------------------------------------
    a batch to accumulate      training_step, zero_grad, backward
    optimizer_step             the same, clip, optimizer.step, zero_grad

Counters, schedulers and the logger's connector are outside; what the program gives to ``self.log``
comes back as results, and Lightning's own ``self.log`` is called with them.

The closure that Lightning makes calls its profiler, its counters and its collection of results,
which differ on each call. So it is not traced: Lightning's loop of automatic optimization is given
closures that run a program, which does to tensors what Lightning's closure does, in the same order.
Counters are counted beside it.

* ``self.log`` is a :class:`LogCalls` while a step runs: it keeps what it is given, the values are
  results of the program, and Lightning's own ``self.log`` is given them after the run.
* ``batch_idx`` is a plain CPU tensor of no dims. Unread it costs nothing, and ``if batch_idx % 100
  == 0`` one trace for each answer. As an int it would cost one more trace of every program.
* Hooks between ``training_step`` and the update, of the module and of callbacks, are part of the
  program: see `HOOKS`. Those that nobody overrides are not called.
* Metrics of torchmetrics count their updates, and read the count, which would be one more trace.
  So the count is 1 before each run, and what the run adds to it is added to the true one. Only a
  metric with a state that is a mean computes with its count, and keeps it. They count classes by
  ``torch.bincount``, whose result's shape depends on values, unless torch is to be deterministic:
  so it is, around a step of a module with metrics.
* Gradients are dropped at the end of an update, not at the begin of the next step: between two
  steps they would be results of the program, and take memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loops.optimization.automatic import (
    Closure,
    ClosureResult,
    _AutomaticOptimization,
)
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.distributed.tensor import Replicate
from torch.utils import _pytree as pytree
from torchmetrics import Metric, MetricCollection
from torchmetrics.utilities import dim_zero_mean

from xla_dtensor.core.errors import ArgumentTypeError, CompileError
from xla_dtensor.dtensor.api import distribute_tensor
from xla_dtensor.dtensor.mesh import DeviceMesh
from xla_dtensor.nn.compile import compile as compile_step
from xla_dtensor.runtimes.base import CompiledStep

__all__ = [
    "HOOKS",
    "MANY_TRACES",
    "LogCalls",
    "MeshClosure",
    "MetricStates",
    "Steps",
    "let_run_programs",
]

HOOKS = (
    "on_before_zero_grad",
    "optimizer_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "configure_gradient_clipping",
)
MANY_TRACES = 12


class LogCalls:
    """What stands for ``self.log`` of a module while one of its steps is traced.

    Attributes:
        kept: For each call what it was given, (name, value, args, options), and (hook,) before the
            calls of another hook.
    """

    def __init__(self) -> None:
        self.kept: list[tuple[Any, ...]] = []

    def __call__(self, name: str, value: Any, *args: Any, **options: Any) -> None:
        """Keep what one call is given."""
        value = value.detach() if isinstance(value, torch.Tensor) else value
        self.kept.append((name, value, args, options))

    def enter(self, hook: str) -> None:
        """Keep that the calls to come are another hook's."""
        self.kept.append((hook,))

    @contextlib.contextmanager
    def standing_for(self, module: pl.LightningModule) -> Iterator[None]:
        """Stand for ``module.log``."""
        vars(module)["log"] = self
        try:
            yield
        finally:
            del vars(module)["log"]


def log_all(module: pl.LightningModule, hook: str, kept: Iterable[tuple[Any, ...]]) -> None:
    """Give Lightning's own ``self.log`` what was kept, as if the hooks called it now."""
    previous_hook, module._current_fx_name = module._current_fx_name, hook
    for call in kept:
        if len(call) == 1:
            module._current_fx_name = call[0]
        else:
            name, value, args, options = call
            module.log(name, value, *args, **options)
    module._current_fx_name = previous_hook


class MetricStates:
    """The states of a module's metrics, which stay the same tensors whatever is done to them.

    A metric of torchmetrics puts new tensors in the place of its states, on each update. Programs
    that take turns would find tensors that they do not know, and be traced anew.

    Args:
        module: The module.
        mesh: Where the states are to lie.
    """

    def __init__(self, module: pl.LightningModule, mesh: DeviceMesh) -> None:
        metrics = [submodule for submodule in module.modules() if isinstance(submodule, Metric)]
        self._metrics = metrics
        for collection in module.modules():
            if isinstance(collection, MetricCollection):
                # Which of its metrics share a state it finds out by reading them.
                collection._enable_compute_groups = False
        self._counted = [m for m in metrics if dim_zero_mean not in m._reductions.values()]
        self._states: list[tuple[Metric, str, torch.Tensor]] = []
        everywhere = [Replicate()] * mesh.ndim
        for metric in metrics:
            metric.distributed_available_fn = _is_never
            for name, default in metric._defaults.items():
                if isinstance(default, torch.Tensor):
                    metric._defaults[name] = distribute_tensor(default, mesh, everywhere)
                    state = distribute_tensor(getattr(metric, name), mesh, everywhere)
                    self._states.append((metric, name, state.clone()))
        self.settle()

    def settle(self) -> None:
        """Put each state back in its place, with the value that it was given."""
        for metric, name, state in self._states:
            new_state = getattr(metric, name)
            if new_state is not state:
                with torch.no_grad():
                    state.copy_(new_state)
                setattr(metric, name, state)

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        """Let a program find what the one before it found."""
        if not self._metrics:
            yield
            return
        self.settle()
        counts = [metric._update_count for metric in self._counted]
        for metric in self._counted:
            metric._update_count = 1
        for metric in self._metrics:
            metric._forward_cache = None
        deterministic = torch.are_deterministic_algorithms_enabled()
        warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
            for metric, count in zip(self._counted, counts, strict=True):
                metric._update_count += count - 1


class Steps:
    """The compiled steps of one module.

    Args:
        module: The module, which lies on the mesh.
        mesh: The mesh.
    """

    def __init__(self, module: pl.LightningModule, mesh: DeviceMesh) -> None:
        self.module = module
        self.programs: dict[tuple[Any, ...], CompiledStep] = {}
        self._metrics = MetricStates(module, mesh)
        self._log_calls = LogCalls()
        self._batch_idx = torch.tensor(0)  # an argument would be an input of the program
        self._read: dict[str, Any] = {}
        self._warned: set[str] = set()

    def bind(self, trainer: pl.Trainer) -> None:
        """Take from a trainer what the programs read; they stay if it is what it was."""
        read: dict[str, Any] = {
            "precision": trainer.precision_plugin,
            "clip": trainer.gradient_clip_val,
            "clip_algorithm": trainer.gradient_clip_algorithm,
            **{name: _overridden(trainer, self.module, name) for name in HOOKS},
        }
        if read != self._read:
            self.programs.clear()
        self._read = read

    def train(
        self,
        kwargs: Mapping[str, Any],
        optimizer: torch.optim.Optimizer,
        *,
        zero: bool,
        update: bool,
        options: Mapping[str, Any],
    ) -> ClosureResult:
        """Run ``training_step`` and what follows it.

        Args:
            kwargs: The arguments of ``training_step``, as Lightning's loop has them.
            optimizer: The optimizer.
            zero: Whether gradients are dropped before the backward pass.
            update: Whether the optimizer makes a step.
            options: What the module's ``optimizer_step`` gave to ``optimizer.step``.

        Returns:
            What Lightning's closure returns.

        Raises:
            CompileError: The step cannot be one program.
            ArgumentTypeError: It takes an iterator, or the optimizer calls closures of its own.
        """
        self._check(kwargs, optimizer)
        trainer = self.module.trainer
        at = list(kwargs).index("batch_idx") if "batch_idx" in kwargs else None
        epoch = trainer.current_epoch if self._read["optimizer_zero_grad"] else 0
        loss, extra = self._run(
            "training_step",
            (zero, update, optimizer),
            partial(self._train, zero, update, optimizer),
            at,
            list(kwargs.values()),
            (trainer.accumulate_grad_batches, epoch, dict(options)),
        )
        closure_result = ClosureResult(None, extra=extra)
        closure_result.loss = loss
        return closure_result

    def evaluate(self, name: str, args: Sequence[Any], context: Callable[[], Any]) -> Any:
        """Run a step that has no update.

        Args:
            name: "validation_step", "test_step" or "predict_step".
            args: Its arguments: the batch, its number, and what else the loop gives.
            context: Of the precision.

        Returns:
            What the step returns.

        Raises:
            CompileError: The step cannot be one program.
        """
        at = 1 if len(args) > 1 else None
        return self._run(name, (), partial(self._evaluate, name, context), at, list(args), ())

    # ------------------------------------------------------------------------------ What is traced
    #
    # Guards look after what the module's code reads, not after what this file does: all that
    # differs between two calls is an argument, or has a program of its own.

    def _train(
        self,
        zero: bool,
        update: bool,
        optimizer: torch.optim.Optimizer,
        args: list[Any],
        num_accumulated: int,
        epoch: int,
        options: dict[str, Any],
    ) -> tuple[torch.Tensor | None, dict[str, Any]]:
        module = self.module
        with torch.enable_grad():
            with self._read["precision"].train_step_context():
                output = module.training_step(*args)
            closure_result = ClosureResult.from_training_step_output(output, num_accumulated)
            loss = closure_result.closure_loss
            if zero:
                self._call("on_before_zero_grad", optimizer)
                if not self._call("optimizer_zero_grad", epoch, self._batch_idx, optimizer):
                    optimizer.zero_grad()
            if loss is not None:
                self._call("on_before_backward", loss)
                module.backward(loss)
                self._call("on_after_backward")
        if update:
            self._update(optimizer, options)
        return (None if loss is None else loss.detach()), _detached(closure_result.extra)

    def _update(self, optimizer: torch.optim.Optimizer, options: dict[str, Any]) -> None:
        self._call("on_before_optimizer_step", optimizer)
        clip = {
            "gradient_clip_val": self._read["clip"],
            "gradient_clip_algorithm": self._read["clip_algorithm"],
        }
        own = self._call("configure_gradient_clipping", optimizer, **clip)
        if not own and self._read["clip"] is not None:
            self.module.clip_gradients(optimizer, **clip)
        optimizer.step(**options)
        optimizer.zero_grad()

    def _evaluate(self, name: str, context: Callable[[], Any], args: list[Any]) -> Any:
        with context():
            return _detached(getattr(self.module, name)(*args))

    def _call(self, hook: str, *args: Any, **options: Any) -> bool:
        """Call what overrides a hook, and tell whether anything does."""
        if self._read[hook]:
            self._log_calls.enter(hook)
        for function in self._read[hook]:
            function(*args, **options)
        return bool(self._read[hook])

    # ------------------------------------------------------------------------------ What is around

    def _run(
        self,
        hook: str,
        kind: tuple[Any, ...],
        step: Callable[..., Any],
        at: int | None,
        args: list[Any],
        settings: tuple[Any, ...],
    ) -> Any:
        """Run a program; of `args`, the arguments of the hook, the batch's number stands `at`."""
        if at is not None:
            self._batch_idx.fill_(args.pop(at))
        program = self.programs.get((hook, at, *kind))
        if program is None:
            program = self.programs[hook, at, *kind] = self._compiled(step, at)
        try:
            with self._metrics.around(), self._log_calls.standing_for(self.module):
                output, calls = program(args, *settings)
        except CompileError as error:
            error.add_note(f"This is the program of {type(self.module).__name__}.{hook}.")
            raise
        log_all(self.module, hook, calls)
        self._check_traces(hook, program)
        return output

    def _compiled(self, step: Callable[..., Any], at: int | None) -> CompiledStep:
        def step_with_logs(args: list[Any], *settings: Any) -> tuple[Any, list[tuple[Any, ...]]]:
            self._log_calls.kept = calls = []
            number = [] if at is None else [self._batch_idx]
            output = step([*args[:at], *number, *args[at:]] if number else args, *settings)
            self._metrics.settle()
            self._log_calls.kept = []
            return output, calls

        return compile_step(step_with_logs)

    def _check_traces(self, hook: str, program: CompiledStep) -> None:
        if hook in self._warned:
            return
        stats = program.stats()
        if stats["traces"] >= MANY_TRACES and stats["traces"] * 2 > stats["calls"]:
            self._warned.add(hook)
            rank_zero_warn(
                f"{type(self.module).__name__}.{hook} was traced {stats['traces']} times in "
                f"{stats['calls']} calls, the last time because {stats['reasons'][-1]}. Each trace "
                "compiles anew. Read what changes on each call outside of the step, for example in "
                "on_train_batch_start, or give it to the step as a tensor."
            )

    def _check(self, kwargs: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> None:
        name = type(self.module).__name__
        if "batch" not in kwargs:
            raise ArgumentTypeError(
                f"{name}.training_step takes dataloader_iter. It would take batches while it is "
                "traced, and a program has its batch as an input. Take batch, batch_idx."
            )
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ArgumentTypeError(
                f"{name} is optimized by LBFGS. It calls the step several times and reads the loss "
                "to decide how often, and a program reads no tensor. Use another optimizer, or "
                "automatic_optimization=False."
            )


class MeshClosure(Closure):
    """A closure that runs a program; made by `let_run_programs`."""

    def __init__(self, run: Callable[..., ClosureResult]) -> None:
        super().__init__(step_fn=partial(run, update=False, options={}))

    def closure(self, *args: Any, **kwargs: Any) -> ClosureResult:
        """Run it without the update: for accumulation, and for who updates by hand."""
        return self._step_fn()

    def update(self, options: Mapping[str, Any]) -> torch.Tensor | None:
        """Run it with the update, and return the loss."""
        assert isinstance(self._step_fn, partial)
        closure_result: ClosureResult = self._step_fn(update=True, options=options)
        self._result = closure_result
        return closure_result.loss


def let_run_programs(optimization: _AutomaticOptimization, steps: Steps) -> None:
    """Let Lightning's loop of automatic optimization make closures that run programs.

    The loop stays Lightning's own object: a step that reads ``self.global_step`` reads its
    counters, and guards do not look into objects of this package.

    Args:
        optimization: The loop.
        steps: The programs.
    """
    trainer = optimization.trainer
    zero_grad = optimization.optim_progress.optimizer.zero_grad

    def run(kwargs: Any, optimizer: Any, **how: Any) -> ClosureResult:
        closure_result = steps.train(kwargs, optimizer, **how)
        if how["zero"]:
            zero_grad.increment_ready()
            zero_grad.increment_started()
            zero_grad.increment_completed()
        return closure_result

    def make_closure(kwargs: Any, optimizer: Any, batch_idx: int) -> Closure:
        if optimization._skip_backward:  # a pass that only updates statistics
            return type(optimization)._make_closure(optimization, kwargs, optimizer, batch_idx)
        zero = batch_idx % trainer.accumulate_grad_batches == 0
        return MeshClosure(partial(run, kwargs, optimizer, zero=zero))

    optimization._make_closure = make_closure


def _is_never() -> bool:
    """Say that there are no other processes whose states a metric would add to its own."""
    return False


def _detached(tree: Any) -> Any:
    return pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, tree)


def _overridden(
    trainer: pl.Trainer, module: pl.LightningModule, name: str
) -> list[Callable[..., Any]]:
    """What overrides a hook: callbacks first, as Lightning calls them, then the module."""
    functions: list[Callable[..., Any]] = []
    for callback in trainer.callbacks:  # pyright: ignore[reportAttributeAccessIssue]
        if _is_own(callback, pl.Callback, name):
            functions.append(partial(getattr(callback, name), trainer, module))
    if _is_own(module, pl.LightningModule, name):
        functions.append(getattr(module, name))
    return functions


def _is_own(owner: Any, base: type, name: str) -> bool:
    inherited = getattr(base, name, None)
    return name in vars(owner) or getattr(type(owner), name, None) is not inherited
