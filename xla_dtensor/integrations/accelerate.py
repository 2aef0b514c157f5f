"""XDAccelerator: Hugging Face Accelerate's loop, on a mesh.

    accelerator = XDAccelerator(mesh=mesh, gradient_accumulation_steps=2)     the one changed line
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

    @xd.compile                                            one program; without it, op by op
    def train(batch):
        loss = model(**batch).loss
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    for batch in loader:
        with accelerator.accumulate(model):                counts batches: outside of the program
            loss = train(batch)
            scheduler.step()                               Python numbers: outside of the program

To Accelerate a process is one CPU device, whatever the mesh holds: `prepare` puts the model on the
mesh (:mod:`xla_dtensor.nn.model_plan`), and what the loader yields. A loader's
``batch_size`` is what one process loads; the mesh cuts it. Losses and gradients are global, so
nothing is left to reduce: `gather` and `reduce` give a DTensor's whole value.

Invariants:

* A compiled body has one trace for the batches that only accumulate and one for those that update:
  it reads ``sync_gradients``, and the counter behind it stays outside.
* What `save_state` writes of models and optimizers is a checkpoint of
  :mod:`xla_dtensor.checkpoint`; the rest is Accelerate's. It loads on any mesh.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import accelerate
import torch
from accelerate.data_loader import prepare_data_loader, skip_first_batches
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn
from torch.utils import _pytree as pytree

from xla_dtensor import checkpoint
from xla_dtensor.core.errors import ArgumentTypeError
from xla_dtensor.dtensor.api import follow_parameters
from xla_dtensor.dtensor.dtensor import DTensor
from xla_dtensor.dtensor.mesh import DeviceMesh, as_device_mesh
from xla_dtensor.hosts.data.rows import MeshLoader, put_batch, row_group
from xla_dtensor.nn.model_plan import put_model
from xla_dtensor.runtimes.registry import get_runtime

__all__ = ["MeshOptimizer", "XDAccelerator"]

_FOLDER = "xla_dtensor"


class XDAccelerator(accelerate.Accelerator):
    """Accelerate's Accelerator, whose models and batches lie on a mesh.

    Args:
        *args: As for ``accelerate.Accelerator``.
        mesh: The mesh.
        plan: How the models' parameters lie, as :func:`xla_dtensor.shard_module` takes it. None: by
            their own plans and the names of the mesh's axes, see
            :func:`~xla_dtensor.nn.model_plan.model_plan`.
        put_batches: Whether prepared loaders put batches on the mesh.
        **kwargs: As for ``accelerate.Accelerator``.

    Raises:
        ArgumentTypeError: Another device than the mesh was asked for, or FSDP, DeepSpeed or
            Megatron: the mesh takes their place.

    Example:
        >>> import xla_dtensor as xd
        >>> mesh = xd.init_device_mesh("xla", (8,), mesh_dim_names=("fsdp",))
        >>> accelerator = XDAccelerator(mesh=mesh)
        >>> model = accelerator.prepare(nn.Linear(8, 16))
        >>> model.weight.mesh_layout.text()
        '[fsdp, -]'
    """

    mesh: DeviceMesh

    def __init__(
        self, *args: Any, mesh: Any, plan: Any = None, put_batches: bool = True, **kwargs: Any
    ) -> None:
        self.mesh, self.plan, self.put_batches = as_device_mesh(mesh), plan, put_batches
        kwargs["cpu"] = True
        super().__init__(*args, **kwargs)
        self._accumulation_steps = self.gradient_state.num_steps
        if self.device.type != "cpu" or self.distributed_type not in _CPU_TYPES:
            raise ArgumentTypeError(
                f"An XDAccelerator was made where Accelerate has device={str(self.device)!r}, "
                f"distributed_type={self.distributed_type.value!r}. The mesh is its device, and "
                "cuts models in place of FSDP, DeepSpeed and DDP. Leave their plugins and "
                "variables out, and make the XDAccelerator before any other Accelerator."
            )

    @property
    def gradient_accumulation_steps(self) -> int:
        """By how much `backward` divides a loss."""
        # Accelerate keeps it in a dict that also has the loaders which run: with each epoch another
        # one, and so another trace.
        return self._accumulation_steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, gradient_accumulation_steps: int) -> None:
        self._accumulation_steps = gradient_accumulation_steps
        self.gradient_state.plugin_kwargs.update({"num_steps": gradient_accumulation_steps})

    @property
    def num_processes(self) -> int:
        """How many processes there are; 1 in a compiled step, whose tensors are those of all."""
        return 1 if get_runtime().is_tracing else super().num_processes

    # ------------------------------------------------------------------------------------- prepare

    def prepare_model(
        self,
        model: nn.Module,
        device_placement: bool | None = None,
        evaluation_mode: bool = False,
    ) -> nn.Module:
        """Put a model on the mesh, with Accelerate's mixed precision around its forward."""
        put_model(model, self.mesh, self.plan, optimizers=self._optimizers)
        # In evaluation mode nothing is wrapped in DDP.
        return super().prepare_model(model, device_placement=False, evaluation_mode=True)

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> Any:
        """Prepare an optimizer; its state is made on the mesh, where its model's parameters lie."""
        follow_parameters(optimizer)
        if not isinstance(optimizer, AcceleratedOptimizer):
            optimizer = MeshOptimizer(optimizer, device_placement=False, scaler=self.scaler)
        if optimizer not in self._optimizers:
            self._optimizers.append(optimizer)
        return optimizer

    def prepare_data_loader(
        self,
        data_loader: Any,
        device_placement: bool | None = None,
        slice_fn_for_dispatch: Any = None,
    ) -> Any:
        """Prepare a loader: each process loads its own rows, and puts them on the mesh."""
        if getattr(data_loader, "_is_accelerate_prepared", False):
            return super().prepare_data_loader(data_loader)
        group = row_group(self.mesh)
        loader: Any = prepare_data_loader(
            data_loader,
            self.device,
            num_processes=group.count,
            process_index=group.index,
            split_batches=self.split_batches,
            put_on_device=False,
            rng_types=list(self.rng_types or ()) or None,
            dispatch_batches=self.dispatch_batches,
            even_batches=self.even_batches,
            slice_fn_for_dispatch=slice_fn_for_dispatch,
            use_seedable_sampler=self.use_seedable_sampler,
            data_seed=self.dataloader_config.data_seed,
            non_blocking=self.non_blocking,
            use_stateful_dataloader=self.use_stateful_dataloader,
        )
        loader = MeshLoader(loader, self.put_batch) if self.put_batches else loader
        self._dataloaders.append(loader)
        return loader

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """Return a loader without its first batches."""
        if isinstance(dataloader, MeshLoader):
            return MeshLoader(skip_first_batches(dataloader.loader, num_batches), self.put_batch)
        return skip_first_batches(dataloader, num_batches)

    def put_batch(self, batch: Any) -> Any:
        """Put a batch on the mesh; override it where the first dim is not that of the rows."""
        return put_batch(batch, self.mesh)

    # ---------------------------------------------------------------------------- values and states

    def gather(self, tensor: Any) -> Any:
        """Return the whole of each DTensor, on the host; plain tensors of all processes.

        In a compiled step, where tensors have no values, a DTensor is whole as it is.
        """
        return pytree.tree_map(self._gathered, tensor)

    def _gathered(self, leaf: Any) -> Any:
        if isinstance(leaf, DTensor):
            return leaf.detach() if get_runtime().is_tracing else leaf.full_tensor().detach().cpu()
        return super().gather(leaf) if isinstance(leaf, torch.Tensor) else leaf

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Return each DTensor times `scale`: it is global. Plain tensors are reduced."""
        return pytree.tree_map(
            lambda leaf: (
                self._gathered(leaf) * scale
                if isinstance(leaf, DTensor)
                else accelerate.Accelerator.reduce(self, leaf, reduction, scale)
            ),
            tensor,
        )

    def pad_across_processes(
        self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False
    ) -> Any:
        """Return DTensors as they are: all processes see the same shape. Plain ones are padded."""
        return pytree.tree_map(
            lambda leaf: (
                leaf
                if isinstance(leaf, DTensor) or not isinstance(leaf, torch.Tensor)
                else accelerate.Accelerator.pad_across_processes(
                    self, leaf, dim, pad_index, pad_first
                )
            ),
            tensor,
        )

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Return a model's state with whole tensors, on the host."""
        return self.gather(dict(super().get_state_dict(model, unwrap)))

    def save_state(
        self, output_dir: str | None = None, safe_serialization: bool = True, **kwargs: Any
    ) -> Any:
        """Save models and optimizers by :mod:`xla_dtensor.checkpoint`, the rest by Accelerate."""
        with self._without_tensors() as state:
            location = super().save_state(output_dir, safe_serialization, **kwargs)
            self.wait_for_everyone()
            checkpoint.save(Path(location) / _FOLDER, state, step=0)
        return location

    def load_state(
        self, input_dir: str | None = None, load_kwargs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """Load what `save_state` saved, onto any mesh."""
        folder = input_dir
        if folder is None and self.project_configuration.automatic_checkpoint_naming:
            saved = Path(self.project_dir or ".") / "checkpoints"
            folder = str(max(saved.iterdir(), key=lambda path: int(path.name.rpartition("_")[2])))
        with self._without_tensors() as state:
            super().load_state(folder, load_kwargs, **kwargs)
        checkpoint.load(Path(os.path.expanduser(str(folder))) / _FOLDER, state, step=0)

    @contextlib.contextmanager
    def _without_tensors(self) -> Iterator[dict[str, Any]]:
        """Yield the state that lies on the mesh, which Accelerate does not see meanwhile."""
        models, optimizers = self._models, self._optimizers
        state = {
            "models": {str(index): model for index, model in enumerate(models)},
            "optimizers": {
                str(index): wrapper.optimizer for index, wrapper in enumerate(optimizers)
            },
        }
        self._models, self._optimizers = [], []
        try:
            yield state
        finally:
            self._models, self._optimizers = models, optimizers


class MeshOptimizer(AcceleratedOptimizer):
    """Accelerate's optimizer; a step that a program has made already is not made again.

    Attributes:
        has_stepped: Whether the next `step` is one that was made already.
    """

    has_stepped = False

    def step(self, closure: Any = None) -> None:
        """Make a step where gradients are complete."""
        if self.has_stepped:
            self.has_stepped = False
        else:
            super().step(closure)


_CPU_TYPES = (accelerate.DistributedType.NO, accelerate.DistributedType.MULTI_CPU)
