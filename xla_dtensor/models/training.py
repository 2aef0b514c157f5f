"""What a job compiles: a reference model, its training step, and what the step is given.

    job = JobConfig.load("llama3_8b_v5e")
    training = make(job.model, job)            the model is on the meta device: it takes no memory
    model, make_step, inputs, placements, rules = training

The contract, which a function of your own may fulfil as well (``own_model.py`` is a template). It
is called with the job, and returns

==============  ===================================================================================
``model``       An ``nn.Module``, on the meta device for a plan; not yet sharded.
``make_step``   Called as ``make_step(model, mesh)`` once the model lies on the mesh as the job's
                rules say. Returns the step: a function of the inputs that trains and returns the
                loss. It makes the optimizer, so that this holds the sharded parameters. A job
                without rules may shard the model here.
``inputs``      What the step is given: tensors of the global shapes, on the meta device.
``placements``  How each input lies: an entry per dim, the axis or axes that cut it, or None.
``rules``       May be left out. Sharding rules in place of the job's.
==============  ===================================================================================

Everything here is ordinary PyTorch but two calls: ``scan_layers`` runs the layers as a loop that
keeps a layer's input only, and ``linear_cross_entropy`` never holds the logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mesh_utils import JobConfig
from xla_dtensor.core.rules import ShardingRules, read_rules
from xla_dtensor.models.decoder import DecoderForCausalLM, Llama, Mixtral
from xla_dtensor.nn.loss import linear_cross_entropy
from xla_dtensor.nn.scan import checkpoint_name, scan_layers
from xla_dtensor.plan.estimate import LAYER_INPUT, Batch, batch_of
from xla_dtensor.plan.model_sizes import ModelSizes

__all__ = ["AdamW", "Training", "make", "rules_of"]


# ---------------------------------- AdamW whose moments may have another dtype than the parameters
#
# float32 beside bfloat16.
#
# ``torch.optim.AdamW`` gives the moments the parameter's dtype. Here each update is computed in
# float32 and rounded to what is kept. In float32 the numbers are those of ``torch.optim.AdamW``.
#
# It works on lists, so that a traced step updates the layers of a loop as one. Run eagerly, it
# holds two float32 values beside each parameter.


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


# ----------------------------------------------------------------------------- What a job compiles

Step = Callable[[Tensor, Tensor], Tensor]
CLIP = 1.0
"""Largest norm of all gradients together, as in most published recipes."""


class Training(NamedTuple):
    """See the module docstring."""

    model: nn.Module
    make_step: Callable[[nn.Module, Any], Step]
    inputs: tuple[Tensor, ...]
    placements: tuple[tuple[Any, ...], ...]
    rules: ShardingRules | None = None


def make(
    model: str | ModelSizes,
    job: JobConfig,
    *,
    sequence: int = 8192,
    per_group: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    moment_dtype: torch.dtype | None = torch.float32,
    remat: Any = "full",
    learning_rate: float = 3e-4,
    device: str = "meta",
) -> Training:
    """Make the training of a reference model.

    Args:
        model: A reference model, the path of a config.json, or sizes.
        job: Says the axes and how the activations lie, and with them the batch.
        sequence: Tokens of a sequence.
        per_group: Sequences per group of devices that share them, which is one device where only
            the batch is cut. The global batch is this times the size of the axes that cut it.
        dtype: Of parameters, gradients and activations.
        moment_dtype: Of both moments of AdamW; None for `dtype`.
        remat: What the backward pass keeps of a layer: see ``xla_dtensor.scan_layers``. Its input
            is called "layer_input". None runs the layers one by one, without a loop.
        learning_rate: Of AdamW.
        device: "meta" for a plan, "cpu" for a model with weights.

    Returns:
        Model, step, inputs, placements and rules.

    Raises:
        JobError: No such model, or a batch that the axes do not divide.

    Example:
        >>> training = make("llama3-405b", JobConfig.load("llama3_405b_v5p_4slices"))
        >>> tuple(training.inputs[0].shape), training.placements[0]
        ((2048, 8192), (('dp', 'fsdp'), None))
    """
    sizes = model if isinstance(model, ModelSizes) else ModelSizes.load(model)
    batch = batch_of(job, sequence=sequence, per_group=per_group)
    module = make_model(sizes, dtype=dtype, remat=remat, device=device)

    def make_step(model: nn.Module, mesh: Any = None) -> Step:
        optimizer = AdamW(model.parameters(), learning_rate, moment_dtype=moment_dtype)
        return step_of(model, optimizer, _loss)

    shape = (batch.sequences, batch.length)
    inputs = tuple(torch.empty(shape, dtype=torch.int64, device=device) for _ in range(2))
    if device != "meta":
        inputs = tuple(torch.randint_like(tokens, sizes.vocab_size) for tokens in inputs)
    placements = (batch.placement, batch.placement)
    return Training(module, make_step, inputs, placements, rules_of(job, sizes, batch))


def make_model(
    sizes: ModelSizes,
    *,
    dtype: torch.dtype = torch.bfloat16,
    remat: Any = "full",
    device: str = "meta",
) -> DecoderForCausalLM:
    """Make a reference model with its layers as a loop.

    Args:
        sizes: Of the model.
        dtype: Of its parameters.
        remat: As for :func:`make`.
        device: Where to make it.

    Returns:
        The model.
    """
    with torch.device(device):
        model = (Mixtral if sizes.num_local_experts else Llama)(sizes).to(dtype)
    if isinstance(remat, str) and LAYER_INPUT in remat:
        for layer in model.model.layers:
            layer.register_forward_pre_hook(_name_input)
    if remat is not None:
        model.model.layers = scan_layers(model.model.layers, remat=remat)
    return model


def _name_input(layer: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    return (checkpoint_name(arguments[0], LAYER_INPUT), *arguments[1:])


def rules_of(job: JobConfig, sizes: ModelSizes, batch: Batch) -> ShardingRules | None:
    """Return the job's rules, and what follows from them for the values inside a layer.

    Between two values that are told how they lie, XLA decides; left alone, it takes the side of the
    weights and moves the tokens. So tokens stay where they are, inner values are cut as the weights
    that make them, and those that arrive at experts as these are: on axes that cut both the batch
    and the experts that is an all-to-all.

    Args:
        job: Whose rules.
        sizes: Of the model.
        batch: How the batch lies.

    Returns:
        The rules, the job's first; None where the job has none.
    """
    if job.sharding is None:
        return None
    rules = read_rules(job.sharding)
    batch_axes, sequence = batch.batch_axes, batch.sequence_axes
    batch_cut = batch_axes or None
    rows: list[tuple[str, tuple[Any, ...]]] = [
        (pattern, (batch_cut, sequence or None, None)) for pattern in _WHOLE_TOKENS
    ]
    residual = (batch_cut, sequence or None, batch.hidden_axes or None)
    rows += [(pattern, residual) for pattern in _RESIDUAL]
    inner = ("q_proj", "k_proj", "v_proj")
    parts = {name: f"self_attn.{name}" for name in inner}
    if not sizes.num_local_experts:
        parts |= {name: f"mlp.{name}" for name in ("gate_proj", "up_proj")}
        rows.append(("**.down_proj", residual))
    for name, path in parts.items():
        cut = _cut_first(rules, f"model.layers.0.{path}.weight", 2)
        hidden = tuple(axis for axis in cut if axis not in (*batch_axes, *sequence))
        rows.append((f"**.{name}", (batch_cut, sequence or None, hidden or None)))
    if sizes.num_local_experts:
        experts = _cut_first(rules, "model.layers.0.mlp.experts.down_proj", 3)
        outer = tuple(axis for axis in batch_axes if axis not in experts)
        on_experts = (experts or None, outer or None, sequence or None, None, None)
        rows += [(f"**.experts.{name}", on_experts) for name in ("arrivals", "departures")]
        home = (None, batch_cut, sequence or None, None, None)
        rows += [(f"**.experts.{name}", home) for name in ("packed", "unpacked")]
        rows.append(("**.mlp.gate", (batch_cut, sequence or None, None, None)))
    return ShardingRules(rules.rules, [*rules.activations, *rows], rules.tp_axis)


_WHOLE_TOKENS = ("model.norm", "**.input_layernorm", "**.post_attention_layernorm")
_RESIDUAL = ("model.embed_tokens", "**.self_attn", "**.self_attn.o_proj", "**.mlp")
"""What is added up from layer to layer lies as the job says that layers return it."""


def _cut_first(rules: ShardingRules, path: str, ndim: int) -> tuple[str, ...]:
    """Return the axes that cut the first dim of a parameter."""
    rule = next((rule for rule in rules.rules if rule.matches(path)), None)
    entries = None if rule is None else rule.entries_for(path, ndim, rules.tp_axis)
    first: Any = entries[0] if isinstance(entries, tuple) else None
    return () if first is None else (first,) if isinstance(first, str) else tuple(first)


def _loss(model: Any, tokens: Tensor, targets: Tensor) -> Tensor:
    return linear_cross_entropy(model.hidden(tokens), model.lm_head.weight, targets)


def step_of(
    model: nn.Module, optimizer: torch.optim.Optimizer, loss_of: Callable[..., Tensor]
) -> Step:
    """Return a step of backward, clipping and update; `loss_of` takes model, tokens and targets."""
    parameters: Sequence[Tensor] = list(model.parameters())

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        loss = loss_of(model, tokens, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step
