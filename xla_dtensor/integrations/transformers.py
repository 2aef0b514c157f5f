"""XDTrainer: Hugging Face Transformers' Trainer, whose step is one program on a mesh.

    trainer = XDTrainer(model=model, args=args, train_dataset=data, mesh=mesh)     was: Trainer(...)
    trainer.train(resume_from_checkpoint=True)

The loop is the Trainer's own: epochs, accumulation, callbacks, logging, evaluation, saving. It
calls ``training_step`` for each micro-batch, and then clips, steps and schedules. Here

==================  ================================================================================
call of the loop    what it does
==================  ================================================================================
training_step       runs a program: forward and backward; where gradients are complete, also the
                    clipping, the optimizer's step and the end of the gradients
_clip_grad_norm     returns the norm that the program found
optimizer.step      nothing, the program has stepped
lr_scheduler.step   as ever: Python numbers; the rate is an input of the program
prediction_step     runs a program: forward, loss, what `compute_metrics` is given
==================  ================================================================================

So there are two programs, one for micro-batches that only accumulate. A last short accumulation
needs none of its own, a last short batch one more of each kind. Where a callback has
``on_pre_optimizer_step`` or ``on_optimizer_step``, it wants to see gradients: clipping is a program
of its own then, and the optimizer's step runs op by op.

* ``per_device_*_batch_size`` counts devices that have rows of their own: with ``dp=2, tp=4`` two.
  The trainer's own copy of the arguments has the product, since to Transformers this process is one
  CPU device.
* The loss stays on the mesh until it is logged; ``logging_nan_inf_filter`` is part of the program.
* Saving writes what Transformers reads (safetensors, config), without gathering the model on one
  host, and the optimizer as a checkpoint of :mod:`xla_dtensor.checkpoint`, for any mesh.

What the Trainer has in `compute_loss` of subclasses is traced; reading a tensor there (``.item()``)
is an error that says so.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from torch.distributed.tensor import Replicate
from transformers.trainer import (
    OPTIMIZER_NAME,
    SCHEDULER_NAME,
    TRAINING_ARGS_NAME,
    Trainer,
)
from transformers.trainer_callback import TrainerCallback
from transformers.utils.output_capturing import maybe_install_capturing_hooks

import xla_dtensor as xd
from mesh_utils.errors import MeshError
from mesh_utils.hardware import find_chip
from xla_dtensor import checkpoint
from xla_dtensor.core.errors import ArgumentTypeError
from xla_dtensor.dtensor.dtensor import DTensor
from xla_dtensor.dtensor.mesh import DeviceMesh, as_device_mesh
from xla_dtensor.hosts.data.rows import row_group
from xla_dtensor.integrations.accelerate import XDAccelerator
from xla_dtensor.nn.model_plan import put_model
from xla_dtensor.runtimes.base import CompiledStep

__all__ = ["XDTrainer"]

_OPTIMIZER_FOLDER = "xla_dtensor_optimizer"

# Arguments that ask for another way of running, and what takes their place.
_REFUSED = {
    "fsdp": "an axis 'fsdp' of the mesh cuts all parameters",
    "deepspeed": "an axis 'fsdp' of the mesh cuts all parameters and the optimizer's state",
    "parallelism_config": "the mesh has an axis for each kind of parallelism",
    "torch_compile": "the step is compiled by XLA as a whole",
    "fp16": "there is no loss scaling here, use bf16=True",
    "use_liger_kernel": "its kernels are Triton's, for GPUs under PyTorch",
    "predict_with_generate": "an evaluation is one program, in which generate() reads no tokens; "
    "call generate() after it",
    "auto_find_batch_size": "memory is known before the first step, see `xla_dtensor preflight`",
}
# What they are trained for is said by the config, or by the first labels.
_CLASSIFIERS = tuple(f"For{kind}Classification" for kind in ("Sequence", "Image", "Audio", "Video"))
_REFUSED_OPTIMIZERS = ("adafactor", "lomo", "galore", "apollo", "bit", "paged", "grokadamw")


class XDTrainer(Trainer):
    """Transformers' Trainer on a mesh.

    With a trainer of another package that is made of Transformers' own, such as TRL's, make
    ``class MyTrainer(XDTrainer, TheirTrainer): ...``.

    Args:
        model: The model, on the host or on the mesh; or None, with `model_init`.
        args: The TrainingArguments. They are copied.
        *rest: As for ``transformers.Trainer``.
        mesh: The mesh. Axes "tp" and "fsdp" cut parameters; all but "tp" cut rows, see
            :mod:`xla_dtensor.nn.model_plan`.
        plan: How parameters lie, as :func:`xla_dtensor.shard_module` takes it. None: as the model's
            own plan and the axes say.
        **kwargs: As for ``transformers.Trainer``.

    Raises:
        ArgumentTypeError: An argument asks for another way of running than the mesh.
        RulesError: A plan that does not fit the model.

    Example:
        >>> import tempfile, transformers, xla_dtensor as xd
        >>> mesh = xd.init_device_mesh("xla", (4, 2), mesh_dim_names=("fsdp", "tp"))
        >>> config = transformers.LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=32,
        ...     num_hidden_layers=1, num_attention_heads=2)
        >>> rows = [{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * 16
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     args = transformers.TrainingArguments(folder, max_steps=2, report_to="none",
        ...         per_device_train_batch_size=2, save_strategy="no", disable_tqdm=True)
        ...     trainer = XDTrainer(transformers.LlamaForCausalLM(config), args,
        ...                         train_dataset=rows, mesh=mesh)
        ...     trainer.remove_callback(transformers.PrinterCallback)
        ...     _ = trainer.train()
        >>> trainer.model.model.layers[0].mlp.up_proj.weight.mesh_layout.text()
        '[tp, fsdp]'
    """

    mesh: DeviceMesh
    model: Any
    optimizer: Any
    lr_scheduler: Any

    def __init__(
        self,
        model: nn.Module | None = None,
        args: transformers.TrainingArguments | None = None,
        *rest: Any,
        mesh: Any,
        plan: Any = None,
        **kwargs: Any,
    ) -> None:
        self.mesh, self.plan = as_device_mesh(mesh), plan
        self._rows = row_group(self.mesh)
        args = transformers.TrainingArguments("tmp_trainer") if args is None else args
        _check_arguments(args)
        self._is_loss_filtered = args.logging_nan_inf_filter
        self._grad_norm: Any = None
        self._speed = _Speed()
        self._backward = xd.compile(self._backward_step)
        self._whole_step = xd.compile(self._backward_and_update)
        self._clip = xd.compile(self._clipped)
        self._predict = xd.compile(super().prediction_step)
        self._preemption: xd.Preemption | None = None
        # By name: TRL's trainers have others before `args`.
        names = list(inspect.signature(super().__init__).parameters)
        kwargs |= zip(names[names.index("args") + 1 :], rest, strict=False)
        args_on_mesh = _arguments_on_mesh(args, self._rows.devices)
        super().__init__(model=model, args=args_on_mesh, **kwargs)
        self.args.enable_jit_checkpoint = args.enable_jit_checkpoint

    # --------------------------------------------------------------------------- what it is made of

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        self._accelerator_arguments = super()._build_accelerator_args(**kwargs)
        return self._accelerator_arguments

    def create_accelerator_and_postprocess(self) -> None:
        """Make the accelerator, which puts models on the mesh and batches not."""
        super().create_accelerator_and_postprocess()
        self.accelerator = XDAccelerator(
            mesh=self.mesh, plan=self.plan, put_batches=False, **self._accelerator_arguments
        )
        self.gather_function = self.accelerator.gather_for_metrics

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        put_model(model, self.mesh, self.plan)  # An optimizer follows when it is prepared.

    @property
    def programs(self) -> tuple[CompiledStep, CompiledStep, CompiledStep]:
        """The programs: that of accumulation, of an update, and of a prediction."""
        return self._backward, self._whole_step, self._predict

    def put_batch(self, batch: Any) -> Any:
        """Put this process's rows on the mesh; override it where dim 0 is not that of the rows."""
        return self.accelerator.put_batch(batch)

    # ------------------------------------------------------------------------------------- training

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train; where ``enable_jit_checkpoint`` is set, a signal to end saves and returns."""
        if not self.args.enable_jit_checkpoint:
            return super().train(*args, **kwargs)
        with xd.Preemption() as self._preemption:
            return super().train(*args, **kwargs)

    def _run_epoch(self, **kwargs: Any) -> None:
        self._tr_loss = self._replicated(self._tr_loss)
        super()._run_epoch(**kwargs)

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Any]:
        """Take the micro-batches of an update, onto the mesh, and count the tokens of all rows."""
        batches, count = super().get_batch_samples(epoch_iterator, num_batches, device)
        on_mesh = [self.put_batch(batch) for batch in batches]
        if count is not None and self._rows.count > 1:  # the host counts its own rows
            count = self._get_num_items_in_batch(on_mesh, device)
        return on_mesh, count

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None
    ) -> torch.Tensor:
        """Run forward and backward, and the update where gradients are complete.

        Args:
            model: The model.
            inputs: A micro-batch; tensors of the host are put on the mesh.
            num_items_in_batch: How many tokens the loss is divided by; None where the loss is a
                mean.

        Returns:
            The micro-batch's loss, a DTensor of shape ().
        """
        model.train()
        self.optimizer.train()
        inputs = self._prepare_inputs(inputs)
        _settle(model, inputs.get("labels"))
        self._speed.add(inputs.get(getattr(model, "main_input_name", "input_ids")))
        steps = 1.0 + self.state.global_step - self._globalstep_last_logged
        arguments = (model, inputs, num_items_in_batch, self._tr_loss, torch.tensor(steps))
        is_update = self.accelerator.sync_gradients
        if is_update and not self._is_watched():
            loss, self._grad_norm = self._whole_step(*arguments)
            self.optimizer.has_stepped = True
            return loss
        return self._backward(*arguments)

    def _prepare_inputs(self, inputs: Any) -> dict[str, Any]:
        # On the host, where trainers also generate and score; what a program gets is prepared.
        if xd.get_runtime().is_tracing:
            return inputs
        return self.put_batch(dict(super()._prepare_inputs(inputs)))

    def _prepare_input(self, data: Any) -> Any:
        return data if isinstance(data, DTensor) else super()._prepare_input(data)

    def _is_watched(self) -> bool:
        """Whether a callback looks at gradients between backward and the update, or after it."""
        events = ("on_pre_optimizer_step", "on_optimizer_step")
        return any(
            getattr(type(callback), event) is not getattr(TrainerCallback, event)
            for callback in self.callback_handler.callbacks
            for event in events
        )

    def _backward_step(
        self, model: nn.Module, inputs: Any, num_items: Any, logged: torch.Tensor, steps: Any
    ) -> torch.Tensor:
        loss = self._forward_and_backward(model, inputs, num_items)
        if not self._is_loss_filtered:
            return loss
        # As the Trainer: instead of NaN the mean of what was added up since the last log.
        return torch.where(torch.isfinite(loss), loss, logged / steps)

    def _forward_and_backward(self, model: nn.Module, inputs: Any, num_items: Any) -> torch.Tensor:
        return super().training_step(model, inputs, num_items)

    def _backward_and_update(self, model: nn.Module, *arguments: Any) -> tuple[Any, Any]:
        loss = self._backward_step(model, *arguments)
        norm = self._clipped(model)
        self.optimizer.optimizer.step()
        model.zero_grad()
        return loss, norm

    def _clipped(self, model: nn.Module) -> torch.Tensor:
        limit = self.args.max_grad_norm or float("inf")
        return torch.nn.utils.clip_grad_norm_(model.parameters(), limit)

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        return self._grad_norm if self.optimizer.has_stepped else self._clip(model)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        return self._clip_grad_norm(model) if grad_norm is None else grad_norm

    def _replicated(self, tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, DTensor):
            return tensor
        return xd.distribute_tensor(tensor, self.mesh, [Replicate()] * self.mesh.ndim)

    # -------------------------------------------------------------------------------------- logging

    def _maybe_log_save_evaluate(self, tr_loss: Any, *args: Any, **kwargs: Any) -> None:
        # Called once per update, and at the end of an epoch, by each process.
        is_told = self._preemption is not None and self._preemption.reached()
        if is_told and not self.control.should_training_stop:
            self.control.should_save = self.control.should_training_stop = True
        # The Trainer gathers a plain loss over processes, and sets it to zero once it is logged.
        logs = self.control.should_log and self.state.global_step > self._globalstep_last_logged
        on_host = self.accelerator.gather(tr_loss) if logs else tr_loss
        super()._maybe_log_save_evaluate(on_host, *args, **kwargs)
        if logs:
            self._tr_loss = self._replicated(torch.zeros_like(on_host))

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log, with tokens per second and, where the chip's peak is known, the share used of it."""
        if "loss" in logs:
            logs |= self._speed.logs(self.model, self.mesh)
        super().log(logs, *args, **kwargs)

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Count this process's share: the batch is that of all."""
        return super().floating_point_ops(inputs) // self.args.world_size

    # ----------------------------------------------------------------------------------- evaluation

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate; losses that are no numbers are left out as the arguments say."""
        self.args.logging_nan_inf_filter = self._is_loss_filtered
        try:
            return super().evaluation_loop(*args, **kwargs)
        finally:
            self.args.logging_nan_inf_filter = False

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Any, Any, Any]:
        """Run the forward of one batch, as one program."""
        inputs = self._prepare_inputs(inputs)
        _settle(model, inputs.get("labels"))
        loss, logits, labels = self._predict(model, inputs, prediction_loss_only, ignore_keys)
        # It is repeated for each row of this process, and is that of the rows of all.
        loss = loss if loss is None else loss.reshape(1).expand(self._rows.count)
        return loss, logits, labels

    # --------------------------------------------------------------------------- saving and loading

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        folder = Path(output_dir or str(self.args.output_dir))
        if not isinstance(self.model, transformers.PreTrainedModel):
            return super()._save(str(folder), state_dict or self._whole_state())
        checkpoint.save_hf(folder, self.model, progress=False)
        if self.args.should_save:
            self.model.config.save_pretrained(folder)
            if self.model.can_generate():
                self.model.generation_config.save_pretrained(folder)
            tokenizer = self.processing_class or getattr(self.data_collator, "tokenizer", None)
            if tokenizer is not None:
                tokenizer.save_pretrained(folder)
            torch.save(self.args, folder / TRAINING_ARGS_NAME)
        return None

    def _whole_state(self) -> dict[str, Any]:
        """What peft's and other models save: of an adapted model the adapters alone."""
        model: nn.Module = self.model
        state = dict(model.state_dict())
        if hasattr(model, "peft_config"):
            trained = {name for name, tensor in model.named_parameters() if tensor.requires_grad}
            state = {name: tensor for name, tensor in state.items() if name in trained}
        return self.accelerator.gather(state)

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, model: nn.Module | None = None
    ) -> None:
        model = self.model if model is None else model
        if isinstance(model, transformers.PreTrainedModel):
            checkpoint.load_hf(resume_from_checkpoint, model, progress=False)
        elif hasattr(model, "peft_config"):
            self._load_adapter(Path(resume_from_checkpoint), model)
        else:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_adapter(self, folder: Path, model: Any) -> None:
        """Load peft's active adapter; peft's own function cuts tensors for one device's part."""
        from peft import load_peft_weights, set_peft_model_state_dict

        (name, *extra_adapters) = model.active_adapters
        if extra_adapters:
            raise ArgumentTypeError(
                f"Adapters were to be loaded from {str(folder)!r} into a model with "
                f"active_adapters={model.active_adapters}. Which of them the files are for is not "
                "said there. Make one active with set_adapter()."
            )
        folder = folder / name if (folder / name).is_dir() else folder
        weights = load_peft_weights(str(folder), device="cpu")
        on_mesh = {key: self._replicated(tensor) for key, tensor in weights.items()}
        set_peft_model_state_dict(model, on_mesh, adapter_name=name)

    def _load_best_model(self) -> None:
        if isinstance(self.model, transformers.PreTrainedModel) or hasattr(
            self.model, "peft_config"
        ):
            self._load_from_checkpoint(str(self.state.best_model_checkpoint))
        else:
            super()._load_best_model()

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        state = {"optimizer": self.optimizer.optimizer}
        checkpoint.save(Path(output_dir) / _OPTIMIZER_FOLDER, state, step=0)
        if self.args.should_save:
            # Schedulers warn on each state_dict() that the optimizer's has to be saved, too.
            with warnings.catch_warnings(action="ignore"):
                torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER_NAME)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        folder = Path(checkpoint)
        if (folder / OPTIMIZER_NAME).exists():
            raise ArgumentTypeError(
                f"Training was to go on from {str(folder)!r}, whose optimizer a plain Trainer has "
                f"saved ({OPTIMIZER_NAME}). Its state has no layout on a mesh. Load the weights "
                "alone with from_pretrained, and begin a new run."
            )
        if (folder / _OPTIMIZER_FOLDER).exists():
            state = {"optimizer": self.optimizer.optimizer}
            xd.checkpoint.load(folder / _OPTIMIZER_FOLDER, state, step=0)
        if (folder / SCHEDULER_NAME).exists():
            scheduler = torch.load(folder / SCHEDULER_NAME, weights_only=True)
            self.lr_scheduler.load_state_dict(scheduler)


class _Speed:
    """Tokens of a process since the last log, and how long they took."""

    def __init__(self) -> None:
        self.tokens, self.start = 0, time.perf_counter()

    def add(self, tensor: Any) -> None:
        self.tokens += tensor.numel() if isinstance(tensor, torch.Tensor) else 0

    def logs(self, model: nn.Module, mesh: DeviceMesh) -> dict[str, float]:
        now = time.perf_counter()
        rate = self.tokens / (now - self.start)
        self.tokens, self.start = 0, now
        if not rate:
            return {}
        logs = {"tokens_per_second": rate}
        try:
            chip = find_chip(xd.get_runtime().device_attributes()[0].get("device_kind", ""))
        except MeshError:
            return logs
        peak = chip.peak("bf16")
        if peak:
            # 6 FLOP per parameter and token, as Transformers counts.
            parameters = sum(tensor.numel() for tensor in model.parameters())
            logs["mfu"] = 6 * parameters * rate * chip.devices_per_chip / (peak * mesh.size())
        return logs


def _settle(model: nn.Module, labels: Any) -> None:
    """Do what models do once, in their first call, so that the second has no other trace."""
    parts = (
        submodule
        for submodule in model.modules()
        if isinstance(submodule, transformers.PreTrainedModel)
    )
    for part in itertools.islice(parts, 1):  # with all parts of it
        maybe_install_capturing_hooks(part)
    config: Any = getattr(model, "config", None)
    is_open = getattr(config, "problem_type", "") is None and isinstance(labels, torch.Tensor)
    if is_open and type(model).__name__.endswith(_CLASSIFIERS):
        kind = "single" if labels.dtype in (torch.long, torch.int) else "multi"
        is_number = config.num_labels == 1
        config.problem_type = "regression" if is_number else f"{kind}_label_classification"


def _check_arguments(args: transformers.TrainingArguments) -> None:
    refused_names = [name for name in _REFUSED if getattr(args, name, None)]
    optimizer = str(getattr(args.optim, "value", args.optim))
    if refused_names:
        name = refused_names[0]
        reason, instead = _REFUSED[name], "Leave it out"
    elif any(kind in optimizer for kind in _REFUSED_OPTIMIZERS):
        name, reason = "optim", "this optimizer keeps state that does not lie on the mesh"
        instead = (
            'Pass optim="adamw_torch", or one of torch.optim as optimizer_cls_and_kwargs=, for '
            'example (torch.optim.Adafactor, {"lr": 1e-3})'
        )
    else:
        return
    raise ArgumentTypeError(
        f"An XDTrainer was made with {name}={getattr(args, name)!r}. It asks for another way of "
        f"running: {reason}. {instead}."
    )


def _arguments_on_mesh(
    args: transformers.TrainingArguments, devices: int
) -> transformers.TrainingArguments:
    """Return a copy for one device of the host, which has the rows of `devices` of the mesh."""
    args = copy.copy(args)
    args.use_cpu = True
    args.enable_jit_checkpoint = False  # its callback wants gradients; `train` takes its place
    args.dataloader_pin_memory = False
    args.per_device_train_batch_size *= devices
    args.per_device_eval_batch_size *= devices
    # The loss is one over all rows, and so is the number of tokens that it is divided by.
    args.average_tokens_across_devices = False
    args.logging_nan_inf_filter = False
    # It is cached. To find it anew resets Accelerate's state, so before an accelerator is made.
    vars(args).pop("_setup_devices", None)
    assert args.device.type == "cpu"
    return args
