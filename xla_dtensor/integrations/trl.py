"""XDSFTTrainer: TRL's SFTTrainer, whose step is one program on a mesh.

    trainer = XDSFTTrainer(model, args, train_dataset=data, processing_class=tokenizer, mesh=mesh)

Data sets, chat templates, packing, collators, losses and metrics are TRL's; the step is that of
:class:`xla_dtensor.integrations.transformers.XDTrainer`. TRL reads its metrics per batch (entropy,
token accuracy) in each step, so each step waits for the devices.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from trl.trainer.sft_trainer import SFTTrainer

from xla_dtensor.core.errors import ArgumentTypeError
from xla_dtensor.integrations.transformers import XDTrainer

__all__ = ["XDSFTTrainer"]


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


def _adapters(model: Any, peft_config: Any) -> AbstractContextManager[None]:
    if peft_config is None:  # and peft need not be installed
        return nullcontext()
    from xla_dtensor.integrations.peft import whole_shapes

    return whole_shapes(model, peft_config)
