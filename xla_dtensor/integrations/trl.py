"""XDSFTTrainer: TRL's SFTTrainer, whose step is one program on a mesh.

    trainer = XDSFTTrainer(model, args, train_dataset=data, processing_class=tokenizer, mesh=mesh)

Data sets, chat templates, packing and collators are TRL's; the step is that of
:class:`xla_dtensor.integrations.transformers.XDTrainer`. The loss is the model's own, which equals
TRL's "nll". TRL's fused head of Triton and its metrics per batch (entropy, token accuracy), which
read tensors on the host in every step, are left out: give ``compute_metrics`` for an evaluation.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from transformers.trainer import Trainer
from trl.trainer.sft_trainer import SFTTrainer

from xla_dtensor.core.errors import ArgumentTypeError
from xla_dtensor.integrations.transformers import XDTrainer

__all__ = ["XDSFTTrainer"]


class XDSFTTrainer(XDTrainer, SFTTrainer):
    """TRL's SFTTrainer on a mesh; arguments as for it and for XDTrainer.

    Raises:
        ArgumentTypeError: Another ``loss_type`` than "nll", or ``activation_offloading``, or
            adapters that :mod:`xla_dtensor.integrations.peft` refuses.
    """

    def __init__(self, model: Any, args: Any = None, *rest: Any, **kwargs: Any) -> None:
        for name, allowed in {"loss_type": "nll", "activation_offloading": False}.items():
            option = getattr(args, name, allowed)
            if option != allowed:
                raise ArgumentTypeError(
                    f"An XDSFTTrainer was made with {name}={option!r}. It runs TRL's code op by op "
                    f"on one device. Pass {name}={allowed!r}, or override compute_loss."
                )
        with _adapters(model, kwargs.get("peft_config")):
            super().__init__(model, args, *rest, **kwargs)

    compute_loss = Trainer.compute_loss


def _adapters(model: Any, peft_config: Any) -> AbstractContextManager[None]:
    if peft_config is None:  # and peft need not be installed
        return nullcontext()
    from xla_dtensor.integrations.peft import whole_shapes

    return whole_shapes(model, peft_config)
