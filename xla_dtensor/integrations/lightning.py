"""XDStrategy and XDFabricStrategy: Lightning's Trainer and Fabric, on a mesh.

    trainer = Trainer(strategy=XDStrategy(mesh), ...)                    the one changed line
    trainer.fit(module, loader)

    fabric = Fabric(strategy=XDFabricStrategy(mesh))                     the one changed line
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(loader)

    @xd.compile                                          one program; without it, op by op
    def train(batch):
        loss = model(batch)
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

To Lightning a process is one CPU device, whatever the mesh holds. Its classes of strategies for the
Trainer and for Fabric are unrelated, and so are the two here: what they share are
:mod:`~xla_dtensor.nn.model_plan`, how models and batches lie, and
:mod:`~xla_dtensor.integrations.lightning_checkpoint`. The Trainer calls ``training_step`` itself,
so its strategy compiles it, see :mod:`~xla_dtensor.integrations.lightning_steps`; in Fabric the
loop is the user's, and so is ``xd.compile``.

Invariants:

* A module's parameters are DTensors from `setup` on, and stay so: Lightning's teardown would copy
  them to the CPU. Optimizers are made after that by Lightning; Fabric's are given the new ones.
* The strategy brings its accelerator, so ``accelerator=`` and ``devices=`` are left out.
* Manual optimization runs op by op: between two of its updates Lightning counts.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.accelerators.cpu import CPUAccelerator as FabricCPUAccelerator
from lightning.fabric.plugins import HalfPrecision as FabricHalfPrecision
from lightning.fabric.plugins import MixedPrecision as FabricMixedPrecision
from lightning.fabric.plugins import Precision as FabricPrecision
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.fabric.strategies.single_device import (
    SingleDeviceStrategy as FabricSingleDeviceStrategy,
)
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.overrides.distributed import UnrepeatedDistributedSampler
from lightning.pytorch.plugins import HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.strategies import ParallelStrategy
from torch import nn
from torch.utils import _pytree as pytree

from xla_dtensor.core.errors import ArgumentTypeError, CompileError
from xla_dtensor.dtensor.mesh import as_device_mesh
from xla_dtensor.hosts.data.rows import MeshLoader, put_batch
from xla_dtensor.integrations.lightning_checkpoint import (
    is_folder,
    load_optimizers,
    load_rest,
    load_state,
    load_weights,
    read_checkpoint,
    save_state,
    save_trainer,
)
from xla_dtensor.integrations.lightning_processes import ProcessOfJob
from xla_dtensor.integrations.lightning_steps import MeshClosure, Steps, let_run_programs
from xla_dtensor.nn.model_plan import put_model
from xla_dtensor.runtimes.registry import get_runtime

__all__ = ["XDFabricStrategy", "XDStrategy", "read_checkpoint"]

_PRECISIONS = (Precision, MixedPrecision, HalfPrecision)
_FABRIC_PRECISIONS = (FabricPrecision, FabricMixedPrecision, FabricHalfPrecision)
_DTYPES = ("32-true", "bf16-mixed", "bf16-true")


class XDStrategy(ProcessOfJob, ParallelStrategy):
    """Lightning's Trainer on a mesh: ``Trainer(strategy=XDStrategy(mesh))``.

    Args:
        mesh: The mesh.
        plan: How the module's parameters lie, as :func:`xla_dtensor.shard_module` takes it. None:
            by the names of the mesh's axes, see
            :func:`~xla_dtensor.nn.model_plan.model_plan`.
        compile_evaluation: Whether ``validation_step``, ``test_step`` and ``predict_step`` are
            programs too. False lets them read tensors, op by op.

    Example:
        >>> import xla_dtensor as xd
        >>> mesh = xd.init_device_mesh("xla", (8,), mesh_dim_names=("fsdp",))
        >>> trainer = pl.Trainer(strategy=XDStrategy(mesh), logger=False)
        >>> trainer.strategy.mesh.mesh_dim_names
        ('fsdp',)
    """

    strategy_name = "xla_dtensor"

    def __init__(self, mesh: Any, plan: Any = None, *, compile_evaluation: bool = True) -> None:
        super().__init__(accelerator=CPUAccelerator())
        self.mesh, self.plan = as_device_mesh(mesh), plan
        self.join()
        self.compile_evaluation = compile_evaluation
        self.steps: Steps | None = None

    # --------------------------------------------------------------------------------------- setup

    @property
    def root_device(self) -> torch.device:
        """The device of batches before they are put on the mesh."""
        return torch.device("cpu")

    def setup(self, trainer: pl.Trainer) -> None:
        """Put the module on the mesh, and let Lightning's loops run programs."""
        _check_precision(self.precision_plugin, _PRECISIONS)
        _check_checkpoint_io(self)
        super().setup(trainer)
        module = self.lightning_module
        assert module is not None
        if self.steps is None or self.steps.module is not module:
            self.steps = Steps(module, self.mesh)
        self.steps.bind(trainer)
        let_run_programs(trainer.fit_loop.epoch_loop.automatic_optimization, self.steps)

    def model_to_device(self) -> None:
        """Put the module on the mesh."""
        assert self.lightning_module is not None
        put_model(self.lightning_module, self.mesh, self.plan)

    def batch_to_device(
        self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0
    ) -> Any:
        """Put a batch on the mesh, between the module's two hooks around its transfer."""
        module = self.lightning_module
        if module is None:
            return put_batch(batch, self.mesh)
        device = device or self.root_device
        batch = module._call_batch_hook("transfer_batch_to_device", batch, device, dataloader_idx)
        batch = put_batch(batch, self.mesh, is_whole=self._loads_all_rows(dataloader_idx))
        return module._call_batch_hook("on_after_batch_transfer", batch, dataloader_idx)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any] | None:
        """Which rows this process loads. To predict it loads all, in their order.

        The results are of all rows too. So they belong to the indices that Lightning hands to a
        writer of predictions, and the processes make as many batches, whatever the number of rows.
        """
        module = self.lightning_module
        if self.is_distributed and module is not None and module.trainer.predicting:
            return {"num_replicas": 1, "rank": 0}
        return super().distributed_sampler_kwargs

    def _loads_all_rows(self, dataloader_idx: int) -> bool:
        """Whether a loader is one that Lightning has given a sampler to predict with."""
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        if not trainer.predicting:
            return False
        loaders: Any = trainer.predict_loop._combined_loader
        loader = loaders.flattened[dataloader_idx]
        owner = getattr(loader, "batch_sampler", None) or loader
        return isinstance(getattr(owner, "sampler", None), UnrepeatedDistributedSampler)

    def teardown(self) -> None:
        """Let the module stay on the mesh."""
        self.precision_plugin.teardown()
        assert self.accelerator is not None
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    # --------------------------------------------------------------------------------------- steps

    def optimizer_step(
        self,
        optimizer: torch.optim.Optimizer,
        closure: Callable[[], Any],
        model: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Run the program of a whole step; an update without a closure of ours op by op."""
        if isinstance(closure, MeshClosure):
            return closure.update(kwargs)
        return super().optimizer_step(optimizer, closure, model, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's step, as a program or op by op."""
        if not self.compile_evaluation:
            return super().validation_step(*args, **kwargs)
        return self._evaluate("validation_step", args, self.precision_plugin.val_step_context)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's step, as a program or op by op."""
        if not self.compile_evaluation:
            return super().test_step(*args, **kwargs)
        return self._evaluate("test_step", args, self.precision_plugin.test_step_context)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's step; Lightning has predictions on the CPU."""
        if not self.compile_evaluation:
            return _on_cpu(super().predict_step(*args, **kwargs))
        context = self.precision_plugin.predict_step_context
        return _on_cpu(self._evaluate("predict_step", args, context))

    def _evaluate(self, name: str, args: tuple[Any, ...], context: Callable[[], Any]) -> Any:
        assert self.steps is not None
        try:
            return self.steps.evaluate(name, args, context)
        except CompileError as error:
            error.add_note("XDStrategy(..., compile_evaluation=False) runs it op by op.")
            raise

    # --------------------------------------------------------------------------------- checkpoints

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """True: weights are loaded into what lies on the mesh."""
        return True

    def save_checkpoint(
        self,
        checkpoint: dict[str, Any],
        filepath: str | os.PathLike[str],
        storage_options: Any = None,
    ) -> None:
        """Save Lightning's checkpoint as a folder; all processes call this."""
        save_trainer(filepath, checkpoint, self.optimizers)

    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load what a checkpoint has beside tensors; of a file of Lightning's own, all of it."""
        if is_folder(checkpoint_path):
            return load_rest(checkpoint_path)
        return super().load_checkpoint(checkpoint_path, weights_only=weights_only)

    def load_model_state_dict(self, checkpoint: Any, strict: bool = True) -> None:
        """Load the weights into the module, where it lies."""
        assert self.lightning_module is not None
        load_weights(self.lightning_module, checkpoint, strict)

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        """Load the optimizers' states, which lie as the parameters do."""
        load_optimizers(self.optimizers, checkpoint)


class XDFabricStrategy(ProcessOfJob, FabricSingleDeviceStrategy):
    """Lightning's Fabric on a mesh: ``Fabric(strategy=XDFabricStrategy(mesh))``.

    Args:
        mesh: The mesh.
        plan: See `XDStrategy`.

    Example:
        >>> import xla_dtensor as xd
        >>> from lightning.fabric import Fabric
        >>> mesh = xd.init_device_mesh("xla", (8,), mesh_dim_names=("fsdp",))
        >>> fabric = Fabric(strategy=XDFabricStrategy(mesh))
        >>> fabric.setup(nn.Linear(8, 16)).weight.mesh_layout.text()
        '[fsdp, -]'
    """

    def __init__(self, mesh: Any, plan: Any = None) -> None:
        super().__init__("cpu", accelerator=FabricCPUAccelerator())
        self.mesh, self.plan = as_device_mesh(mesh), plan
        self.join()

    def setup_environment(self) -> None:
        """Refuse what has no meaning on a mesh, before anything is set up."""
        _check_checkpoint_io(self)
        super().setup_environment()

    def module_to_device(self, module: nn.Module) -> None:
        """Leave a module where it is: `setup_module` puts it on the mesh."""

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Put a module on the mesh."""
        _check_precision(self.precision, _FABRIC_PRECISIONS)
        return put_model(module, self.mesh, self.plan)

    def setup_module_and_optimizers(
        self,
        module: nn.Module,
        optimizers: list[torch.optim.Optimizer],
        scheduler: Any = None,
    ) -> tuple[nn.Module, list[torch.optim.Optimizer], Any]:
        """Put a module on the mesh, and give its optimizers the parameters there."""
        _check_precision(self.precision, _FABRIC_PRECISIONS)
        put_model(module, self.mesh, self.plan, optimizers=optimizers)
        return module, optimizers, scheduler

    def process_dataloader(self, dataloader: Any) -> Any:
        """Let a loader yield batches on the mesh."""
        return MeshLoader(dataloader, functools.partial(put_batch, mesh=self.mesh))

    def batch_to_device(self, batch: Any, device: torch.device | None = None) -> Any:
        """Put a batch on the mesh."""
        return put_batch(batch, self.mesh)

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> torch.Tensor:
        """Clip gradients by their norm, and return it.

        A program reads no tensor, so there ``error_if_nonfinite`` raises nothing: look at the norm
        that the step returns.
        """
        gradients = [p.grad for p in self.precision.main_params(optimizer) if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients, norm_type)
        if error_if_nonfinite and _is_known_nonfinite(norm):
            raise RuntimeError(
                f"The norm of order {norm_type} of the gradients is {norm.item()}, so they cannot "
                "be clipped. A loss is not finite. Pass error_if_nonfinite=False to clip them all "
                "the same."
            )
        parameters = list(self.precision.main_params(optimizer))
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
        return norm

    def save_checkpoint(
        self,
        path: str | os.PathLike[str],
        state: dict[str, Any],
        storage_options: Any = None,
        filter: dict[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        """Save a state as a folder; all processes call this."""
        save_state(path, state, filter or {})

    def load_checkpoint(
        self,
        path: str | Path,
        state: Any = None,
        strict: bool = True,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Load a state in place, and return what the checkpoint has besides."""
        if not is_folder(path):
            return super().load_checkpoint(path, state, strict, weights_only)
        if not state:
            return read_checkpoint(path)
        if not isinstance(state, dict):
            raise ArgumentTypeError(
                f"fabric.load_raw was called with the folder {os.fspath(path)!r}. It takes a file "
                "that holds one state dict, and the folder is a checkpoint of several states. Call "
                "fabric.load with a dict of the names they were saved under."
            )
        return load_state(path, state, strict)


def _on_cpu(tree: Any) -> Any:
    return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.cpu(), tree)


def _is_known_nonfinite(norm: torch.Tensor) -> bool:
    """Whether a norm is NaN or infinite; a program does not wait to know."""
    return not get_runtime().is_tracing and not bool(torch.isfinite(norm))


def _check_precision(plugin: Any, plugin_types: tuple[type, ...]) -> None:
    if type(plugin) in plugin_types and str(plugin.precision) in _DTYPES:
        if hasattr(plugin, "device"):
            plugin.device = "cpu"  # Lightning takes an accelerator that is an object for CUDA.
        return
    raise ArgumentTypeError(
        f"precision={str(plugin.precision)!r} ({type(plugin).__name__}) was asked for on a mesh. "
        f"What is known to be right there is {', '.join(_DTYPES)}. Pass one of these."
    )


def _check_checkpoint_io(strategy: Any) -> None:
    if not isinstance(strategy._checkpoint_io, (type(None), TorchCheckpointIO)):
        name = type(strategy._checkpoint_io).__name__
        raise ArgumentTypeError(
            f"The plugin {name} was given beside a {type(strategy).__name__}. The strategy saves "
            "and loads checkpoints itself, shard by shard. Leave the plugin out."
        )
