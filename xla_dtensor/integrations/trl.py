"""XDSFTTrainer, XDGRPOTrainer, XDRLOOTrainer: TRL's trainers, whose step is one program on a mesh.

    trainer = XDSFTTrainer(model, args, train_dataset=data, processing_class=tokenizer, mesh=mesh)

Data sets, chat templates, packing, collators, losses and metrics are TRL's; the step is that of
:class:`xla_dtensor.integrations.transformers.XDTrainer`. TRL reads its metrics per batch (entropy,
token accuracy) in each step, so each step waits for the devices.

The last two generate by :mod:`xla_dtensor.integrations.generation`: a program for the prompts, and
one for each next token. TRL scores completions on the host, and the step takes them::

    prompts                      of the host
    completions                  programs of generate()
    rewards, advantages          on the host, by TRL and the user's functions
    probabilities before         a program, where the loss asks for them
    loss, gradients, update      the step, one program
"""

from __future__ import annotations

import copy
import inspect
import itertools
import time
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from accelerate.utils import gather_object
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.rloo_config import RLOOConfig
from trl.trainer.rloo_trainer import RLOOTrainer
from trl.trainer.sft_trainer import SFTTrainer

import xla_dtensor as xd
from xla_dtensor.core.errors import ArgumentTypeError
from xla_dtensor.dtensor.mesh import as_device_mesh
from xla_dtensor.hosts.data.rows import row_group
from xla_dtensor.integrations.generation import compile_generate
from xla_dtensor.integrations.transformers import XDTrainer

__all__ = ["XDGRPOTrainer", "XDRLOOTrainer", "XDSFTTrainer"]


class XDSFTTrainer(XDTrainer, SFTTrainer):
    """TRL's SFTTrainer on a mesh; arguments as for it and for XDTrainer.

    Raises:
        ArgumentTypeError: ``activation_offloading``, or adapters that
            :mod:`xla_dtensor.integrations.peft` refuses.
    """

    def __init__(self, model: Any, args: Any = None, *rest: Any, **kwargs: Any) -> None:
        if getattr(args, "activation_offloading", False):
            raise ArgumentTypeError(
                "An XDSFTTrainer was made with activation_offloading=True. It copies activations "
                "to the host op by op. Leave it out: gradient_checkpointing=True saves memory, too."
            )
        with _adapters(model, kwargs.get("peft_config")):
            super().__init__(model, args, *rest, **kwargs)


class _TrainerByRewards(XDTrainer):
    """What the trainers that generate have in common.

    Attributes:
        theirs: TRL's trainer.
        config: Its arguments.
    """

    theirs: Any
    config: Any
    _scored: Any
    _step: int
    _metrics: dict[str, Any]

    def __init__(
        self, model: Any, reward_funcs: Any, args: Any = None, *rest: Any, mesh: Any, **kwargs: Any
    ) -> None:
        args = self.config("tmp_trainer") if args is None else copy.copy(args)
        for name in ("use_vllm", "use_transformers_continuous_batching"):
            if getattr(args, name, False):
                raise ArgumentTypeError(
                    f"An {type(self).__name__} was made with {name}=True. It generates on the "
                    "mesh, where the model lies, by generate() with a static cache. Leave it out."
                )
        args.generation_batch_size *= row_group(as_device_mesh(mesh)).devices
        args.cache_implementation = args.cache_implementation or "static"
        # Each shape is a program. TRL takes this number where it knows of that.
        self._multiple = args.pad_to_multiple_of = args.pad_to_multiple_of or 128
        self._seeds = itertools.count(args.seed)
        self._score = xd.compile(self._scored)
        with _adapters(model, kwargs.get("peft_config")):
            super().__init__(model, args, *rest, reward_funcs=reward_funcs, mesh=mesh, **kwargs)
        if self._rows.count != self.accelerator.num_processes:
            raise ArgumentTypeError(
                f"An {type(self).__name__} was made on {self.accelerator.num_processes} processes, "
                f"which have {self._rows.count} different parts of the rows. TRL takes the rewards "
                "of each for other rows. Make the mesh so that its axis tp lies in a process."
            )
        self._base = getattr(self.model, "get_base_model", lambda: self.model)()
        compile_generate(self._base)

    def training_step(
        self, model: Any, inputs: Any, num_items_in_batch: Any = None
    ) -> torch.Tensor:
        """Run forward, backward and update as one program; TRL's count and clock around it."""
        began = time.perf_counter()
        loss = XDTrainer.training_step(self, model, inputs, num_items_in_batch)
        self._step += 1
        self._current_train_step_time += time.perf_counter() - began
        if self._step % self.current_gradient_accumulation_steps == 0:
            self._metrics["train"]["step_time"].append(self._current_train_step_time)
            self._current_train_step_time = 0.0
        return loss

    def _prepare_inputs(self, inputs: Any) -> dict[str, Any]:
        if xd.get_runtime().is_tracing:
            return inputs
        hooks = self._base.get_input_embeddings()._forward_hooks
        kept = dict(hooks)
        try:
            return super()._prepare_inputs(inputs)
        finally:  # TRL turns checkpoints off and on, for which Transformers adds a hook each time.
            hooks.clear()
            hooks.update(kept)

    def _forward_and_backward(self, model: Any, inputs: Any, num_items: Any) -> torch.Tensor:
        return super(self.theirs, self).training_step(model, inputs, num_items)

    def _generate_single_turn(
        self, prompt_ids: list[list[int]], images: Any, multimodal_fields: Any, *rest: Any
    ) -> Any:
        generate = partial(self.theirs._generate_single_turn, self)
        if self._rows.count == 1:
            return generate(prompt_ids, images, multimodal_fields, *rest)
        if images is not None:
            raise ArgumentTypeError(
                f"An {type(self).__name__} was given prompts with images, on {self._rows.count} "
                "processes. Each runs the program that generates for the prompts of all, and has "
                "its own images only. Take one process."
            )
        # One program of all processes: each generates for all prompts, and draws alike.
        parts = dict(gather_object([(self._rows.index, prompt_ids)]))
        prompts = [ids for index in sorted(parts) for ids in parts[index]]
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(next(self._seeds))
            generated = generate(prompts, None, {}, *rest)
        completions = generated[0] if isinstance(generated, tuple) else generated
        longest = max(map(len, (*prompts, *completions)))
        self.pad_to_multiple_of = -(-longest // self._multiple) * self._multiple
        start = self._rows.index * len(prompt_ids)
        own = completions[start : start + len(prompt_ids)]
        return (own, *generated[1:]) if isinstance(generated, tuple) else own

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        if xd.get_runtime().is_tracing:
            return self._scored(model, input_ids, *args, **kwargs)
        if kwargs.get("batch_size") is not None:  # of one process
            kwargs["batch_size"] *= self._rows.count
        operands = self.put_batch((input_ids, args, kwargs))
        scores = self._score(model, operands[0], *operands[1], **operands[2])
        start, count = self._rows.index * len(input_ids), len(input_ids)
        return tuple(
            part[start : start + count] if isinstance(part, torch.Tensor) and part.ndim else part
            for part in self.accelerator.gather(scores)
        )


class XDGRPOTrainer(_TrainerByRewards, GRPOTrainer):
    """TRL's GRPOTrainer on a mesh; arguments as for it and for XDTrainer.

    ``num_generations`` has to divide ``per_device_train_batch_size * steps_per_generation``, as for
    one device.

    Raises:
        ArgumentTypeError: ``use_vllm``, ``use_transformers_continuous_batching``, or adapters that
            :mod:`xla_dtensor.integrations.peft` refuses.
    """

    theirs, config = GRPOTrainer, GRPOConfig
    # Without TRL's clock around them, which would run while they are traced.
    compute_loss = inspect.unwrap(GRPOTrainer.compute_loss)
    _scored = inspect.unwrap(GRPOTrainer._get_per_token_logps_and_entropies)


class XDRLOOTrainer(_TrainerByRewards, RLOOTrainer):
    """TRL's RLOOTrainer on a mesh; all else as XDGRPOTrainer."""

    theirs, config = RLOOTrainer, RLOOConfig
    compute_loss = inspect.unwrap(RLOOTrainer.compute_loss)
    _scored = inspect.unwrap(RLOOTrainer._get_per_token_logps_and_entropies)


def _adapters(model: Any, peft_config: Any) -> AbstractContextManager[None]:
    if peft_config is None:  # and peft need not be installed
        return nullcontext()
    from xla_dtensor.integrations.peft import whole_shapes

    return whole_shapes(model, peft_config)
