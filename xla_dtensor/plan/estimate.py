"""What a plan takes on each device, in seconds and on any machine: no torch, no jax, no compiler.

Of every parameter the rules say how it lies; from that follow, exactly, the bytes of parameters,
gradients and optimizer state on one device, uneven dims padded as XLA pads them. A plan whose exact
part alone is more than a device has cannot fit, and `proof` says so as a sum. A plan that is not
refused may still not fit.

    held between steps       parameters + optimizer state
    end of the backward      held + all gradients        clipping by their norm needs all of them
    in the loop backward     held + gradients of the layers + activations

The last line is how ``scan_layers`` runs: both loops hold their stacks whole while they turn.

Of activations there is a lower bound: what must be alive when the backward pass of the last layer
begins, whatever the compiler does, if activations lie as the rules say:

* the input of each layer. Rematerialisation ("full") keeps nothing else of a layer, every other
  policy keeps more; "offload:layer_input" keeps them in the host's memory;
* what the last layer returned: the norm and the loss need it in their backward;
* of the layer that is computed again, both inner values of its feed-forward part: the gradient of
  each of the two is made from the other.

Scores and logits are not in it: memory-lean attention and ``linear_cross_entropy`` hold parts only.
What a program really takes is more: gathered weights, attention, buffers of collectives.

Example:
    >>> weights = [("w", (8192, 8192), "bf16"), ("norm", (8192,), "bf16")]
    >>> rules = {"w": ["fsdp", None], "norm": [None]}
    >>> estimate = quick_estimate(weights, rules, {"fsdp": 4}, "v5e")
    >>> estimate.bytes_of("parameter"), estimate.exact_bytes, estimate.cannot_fit
    (33570816, 201424904, False)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, prod
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from mesh_utils import Chip, Mesh, find_chip
from mesh_utils.errors import JobError
from xla_dtensor.core.dtypes import itemsize_bytes
from xla_dtensor.core.rules import ShardingPlan, ShardingRules, TensorFacts, read_rules

if TYPE_CHECKING:
    from torch import nn

    from mesh_utils import JobConfig
    from xla_dtensor.plan.model_sizes import ModelSizes

__all__ = [
    "ADAMW",
    "LAYER_INPUT",
    "OPTIMIZERS",
    "ActivationBound",
    "ActivationPart",
    "Batch",
    "Gradients",
    "OptimizerState",
    "QuickEstimate",
    "QuickPart",
    "QuickTensor",
    "axes_of_tokens",
    "batch_of",
    "decoder_activations",
    "module_parameters",
    "optimizer_state",
    "quick_estimate",
    "quick_plan",
    "tied_parameters",
]


# ------------------------------------------------------------ What an optimizer keeps between steps


@dataclass(frozen=True)
class OptimizerState:
    """Arrays of the parameter's shape, sharded like it, and counters.

    Args:
        name: What it is called.
        moments: The dtype of each array that it keeps per parameter; "" is the parameter's own.
        counters: The dtype of each single number that it keeps per parameter, on every device.

    Example:
        >>> ADAMW.per_element_bytes("bf16"), ADAMW.counter_bytes
        (8, 4)
    """

    name: str
    moments: tuple[str, ...] = ()
    counters: tuple[str, ...] = ()

    def per_element_bytes(self, dtype: str) -> int:
        """Bytes of state for each element of a parameter of a dtype."""
        return sum(itemsize_bytes(moment or dtype) for moment in self.moments)

    @property
    def counter_bytes(self) -> int:
        """Bytes of the single numbers of one parameter."""
        return sum(map(itemsize_bytes, self.counters))


ADAMW = OptimizerState("AdamW", ("float32", "float32"), ("float32",))
"""AdamW with float32 moments, and a float32 counter of steps per parameter, as torch keeps it."""

OPTIMIZERS: Mapping[str, OptimizerState] = {
    "adamw": ADAMW,
    "adamw-bf16": OptimizerState("AdamW", ("bfloat16", "bfloat16"), ("float32",)),
    "adamw-master": OptimizerState("AdamW, float32 weights", ("float32",) * 3, ("float32",)),
    "sgd": OptimizerState("SGD"),
    "sgd-momentum": OptimizerState("SGD with momentum", ("",)),
}


def optimizer_state(name: str) -> OptimizerState:
    """Looks an optimizer up; raises JobError where there is none of that name."""
    if name not in OPTIMIZERS:
        raise JobError(
            f"The optimizer {name!r} was asked for. What it keeps is not known here. "
            f"Pass one of {', '.join(OPTIMIZERS)}."
        )
    return OPTIMIZERS[name]


# ---------------------------------------------------------------------------- The batch of a job
#
# How large it is and how it lies, read from the rule for what layers return:
#
#     activations:
#       "model.layers.*": [[dp, fsdp], cp, null]        batch over dp and fsdp, sequence over cp

_LAYER = "model.layers.0"  # The module whose output says how tokens lie.


@dataclass(frozen=True)
class Batch:
    """Sequences of tokens on a mesh.

    Args:
        sequences: Of the whole batch.
        length: Tokens of a sequence.
        batch_axes: The axes that cut the batch.
        sequence_axes: The axes that cut sequences.
        sizes: The size of each axis of the mesh.
        hidden_axes: The axes that cut the hidden dim of what goes from layer to layer.
    """

    sequences: int
    length: int
    batch_axes: tuple[str, ...]
    sequence_axes: tuple[str, ...]
    sizes: Mapping[str, int]
    hidden_axes: tuple[str, ...] = ()

    @property
    def placement(self) -> tuple[tuple[str, ...] | None, tuple[str, ...] | None]:
        """How (sequences, length) lies: axes per dim, or None."""
        return (self.batch_axes or None, self.sequence_axes or None)

    @property
    def groups(self) -> int:
        """Into how many parts the batch is cut."""
        return prod(self.sizes[axis] for axis in self.batch_axes)

    @property
    def tokens(self) -> int:
        """Tokens of the whole batch."""
        return self.sequences * self.length

    @property
    def device_tokens(self) -> int:
        """Tokens on one device."""
        parts = prod(self.sizes[axis] for axis in self.sequence_axes)
        return -(-self.sequences // self.groups) * -(-self.length // parts)


def axes_of_tokens(
    rules: ShardingRules | None, sizes: Mapping[str, int]
) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """Says which axes cut the batch, which cut sequences, and which the hidden dim.

    Args:
        rules: The first one for what "model.layers.0" returns counts.
        sizes: The axes of the mesh.

    Returns:
        All three; without such a rule, all axes but the tensor-parallel one cut the batch.

    Example:
        >>> rules = read_rules({"activations": {"model.layers.*": [["dp", "fsdp"], None, None]}})
        >>> axes_of_tokens(rules, {"dp": 2, "fsdp": 4, "tp": 4})
        (('dp', 'fsdp'), (), ())
    """
    for rule in rules.activations if rules is not None else ():
        if rule.matches_module(_LAYER) and rule.entries is not None and len(rule.entries) == 3:
            batch, sequence, hidden = map(_axes, rule.entries)
            return batch, sequence, hidden
    tp_axis = "tp" if rules is None else rules.tp_axis
    return tuple(axis for axis in sizes if axis != tp_axis), (), ()


def _axes(entry: object) -> tuple[str, ...]:
    several = entry if isinstance(entry, (tuple, list)) else (entry,)
    return tuple(str(axis) for axis in several if axis not in (None, "None"))


def batch_of(
    job: JobConfig, *, sequence: int = 8192, per_group: int = 1, sequences: int | None = None
) -> Batch:
    """Says what batch a job's mesh takes.

    Args:
        job: The job.
        sequence: Tokens of a sequence.
        per_group: Sequences per part of the batch; each group of devices between which the batch
            is cut has one part.
        sequences: Of the whole batch, in place of `per_group`.

    Returns:
        The batch.

    Raises:
        JobError: Sizes that are not positive, or that the axes do not divide.

    Example:
        >>> from mesh_utils import JobConfig
        >>> batch_of(JobConfig.load("llama3_70b_v5p_2slices")).sequences
        256
    """
    sizes = {axis.name: axis.size for axis in job.axes}
    rules = None if job.sharding is None else read_rules(job.sharding)
    batch_axes, sequence_axes, hidden_axes = axes_of_tokens(rules, sizes)
    groups = prod(sizes[axis] for axis in batch_axes)
    parts = prod(sizes[axis] for axis in sequence_axes)
    count = per_group * groups if sequences is None else sequences
    if min(sequence, count) < 1 or count % groups or sequence % parts:
        raise JobError(
            f"Job {job.name!r} was given sequences={count} of length={sequence}. Its axes cut them "
            f"into {groups} and {parts} parts. Pass positive multiples of these."
        )
    return Batch(count, sequence, batch_axes, sequence_axes, sizes, hidden_axes)


# ---------------------------------------------------------------- The lower bound of activations

LAYER_INPUT = "layer_input"
"""What the reference models call the input of a layer, for remat="offload:layer_input"."""


@dataclass(frozen=True, slots=True)
class ActivationPart:
    """Equal activations that are alive at the same time.

    Args:
        name: What they are.
        count: How many.
        each_bytes: Of one, on one device.
        why: Why they must be alive.
    """

    name: str
    count: int
    each_bytes: int
    why: str

    @property
    def device_bytes(self) -> int:
        """Bytes of all of them on one device."""
        return self.count * self.each_bytes


@dataclass(frozen=True)
class ActivationBound:
    """A lower bound: the sum of its parts."""

    parts: tuple[ActivationPart, ...]

    @property
    def device_bytes(self) -> int:
        """Bytes on one device, at least."""
        return sum(part.device_bytes for part in self.parts)


def decoder_activations(
    sizes: ModelSizes,
    batch: Batch,
    rules: ShardingRules | None,
    dtype: str = "bfloat16",
    *,
    remat: str = "full",
) -> ActivationBound:
    """Bounds what the activations of a reference model take on one device.

    Args:
        sizes: Of the model.
        batch: What it is given, and how that lies.
        rules: Those of the parameters; they say over which axes the feed-forward part is cut.
        dtype: Of activations.
        remat: What the backward keeps of a layer. Inputs of layers that are offloaded lie in the
            host's memory, but for the one that is worked on.

    Returns:
        The bound.

    Example:
        >>> from mesh_utils import JobConfig
        >>> from xla_dtensor.plan.model_sizes import ModelSizes
        >>> job, sizes = JobConfig.load("llama3_8b_v5e"), ModelSizes.load("llama3-8b")
        >>> for part in decoder_activations(sizes, batch_of(job), None).parts:
        ...     print(part.count, part.name, part.each_bytes)
        32 inputs of layers 67108864
        1 the last layer's output 67108864
        2 inner values of a feed-forward part 234881024
    """
    width = itemsize_bytes(dtype)
    parts = prod(batch.sizes[axis] for axis in batch.hidden_axes)
    carry = batch.device_tokens * ceil(sizes.hidden_size / parts) * width
    inner = _inner_elements(sizes, batch, rules) * width
    kind, _, names = remat.partition(":")
    count = sizes.num_hidden_layers
    why = "rematerialisation keeps the input of each layer until its backward"
    if kind == "offload" and LAYER_INPUT in (name.strip() for name in names.split(",")):
        count, why = 1, "the layer that is computed again needs its input"
    both = "the layer that is computed again needs both for the gradient of each"
    return ActivationBound(
        (
            ActivationPart("inputs of layers", count, carry, why),
            ActivationPart("the last layer's output", 1, carry, "the norm and the loss need it"),
            ActivationPart("inner values of a feed-forward part", 2, inner, both),
        )
    )


def _inner_elements(sizes: ModelSizes, batch: Batch, rules: ShardingRules | None) -> int:
    """Elements on one device of one inner value of a feed-forward part.

    All axes that cut the tokens, and all that cut what experts or inner channels there are, cut it;
    those that cut the weights along the dim that is summed do not.
    """
    experts = sizes.num_local_experts
    path = "model.layers.0.mlp." + ("experts.gate_up_proj" if experts else "up_proj.weight")
    cut = {*batch.batch_axes, *batch.sequence_axes}
    if rules is not None:
        rule = next((rule for rule in rules.rules if rule.matches(path)), None)
        entries = rule and rule.entries_for(path, 3 if experts else 2, rules.tp_axis)
        if entries is not None and not isinstance(entries, str):
            for entry in entries[: 2 if experts else 1]:
                cut |= {entry} if isinstance(entry, str) else set(entry or ())
    parts = prod(batch.sizes[axis] for axis in cut if axis in batch.sizes)
    # An expert has at least the places that its tokens need if all are chosen alike.
    tokens = batch.tokens * (sizes.num_experts_per_tok if experts else 1)
    return ceil(tokens * sizes.intermediate_size / parts)


# ----------------------------------------------------------------------------------- The estimate

Gradients: TypeAlias = Literal["together", "one by one"]


@dataclass(frozen=True, slots=True)
class QuickPart:
    """What all tensors of one role take on one device.

    Args:
        role: "parameter", "gradient" or "optimizer state".
        count: How many tensors.
        device_bytes: On one device, padding counted.
        total_bytes: Of the whole tensors, once.
        padding_bytes: Bytes that uneven dims add to one whole copy.
    """

    role: str
    count: int
    device_bytes: int
    total_bytes: int
    padding_bytes: int


@dataclass(frozen=True, slots=True)
class QuickTensor:
    """One parameter of a plan.

    Args:
        name: Its path.
        shape: Its global shape.
        dtype: Its dtype, as it was given.
        lies: Its layout, such as "[tp, fsdp]".
        device_bytes: On one device.
        total_bytes: Of the whole tensor.
        is_replicated: Whether every device holds all of it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    lies: str
    device_bytes: int
    total_bytes: int
    is_replicated: bool


@dataclass(frozen=True)
class QuickEstimate:
    """What `quick_estimate` found. Bytes are those of one device.

    Args:
        axes: The mesh: each axis and its size.
        chip: What is known of the chip; None where none was named.
        parts: Parameters, gradients, optimizer state.
        tensors: Every parameter, a tied one once.
        optimizer: What the optimizer keeps.
        gradients: Whether all of them are alive at once.
        largest_gradient_bytes: Of a single one.
        layer_gradient_bytes: Of the parameters of layers together.
        activations: A lower bound; None where nothing is known of them.
    """

    axes: tuple[tuple[str, int], ...]
    chip: Chip | None
    parts: tuple[QuickPart, ...]
    tensors: tuple[QuickTensor, ...]
    optimizer: OptimizerState
    gradients: Gradients
    largest_gradient_bytes: int
    layer_gradient_bytes: int
    activations: ActivationBound | None = None

    def bytes_of(self, role: str) -> int:
        """The bytes of all tensors of a role on one device."""
        return sum(part.device_bytes for part in self.parts if part.role == role)

    @property
    def held_bytes(self) -> int:
        """Bytes that stay from step to step: parameters and optimizer state."""
        return self.bytes_of("parameter") + self.bytes_of("optimizer state")

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the gradients that are alive at once for certain."""
        if self.gradients == "one by one":
            return self.largest_gradient_bytes
        return self.bytes_of("gradient")

    @property
    def exact_bytes(self) -> int:
        """Bytes that a step needs whatever its activations are."""
        return self.held_bytes + self.gradient_bytes

    @property
    def lower_bound_bytes(self) -> int:
        """Bytes that a step needs at least, activations included."""
        if self.activations is None:
            return self.exact_bytes
        in_loop = self.layer_gradient_bytes if self.gradients == "together" else 0
        return max(self.exact_bytes, self.held_bytes + in_loop + self.activations.device_bytes)

    @property
    def capacity_bytes(self) -> int | None:
        """Bytes that a device has: usable HBM, or all of it where no source says what is usable."""
        if self.chip is None or self.chip.usable_hbm_bytes is not None:
            return None if self.chip is None else self.chip.usable_hbm_bytes
        hbm = self.chip.hbm_bytes
        return None if hbm is None else hbm // self.chip.devices_per_chip

    @property
    def cannot_fit(self) -> bool:
        """Whether the exact part alone is more than a device has."""
        return self.capacity_bytes is not None and self.exact_bytes > self.capacity_bytes

    @property
    def batch_cannot_fit(self) -> bool:
        """Whether the exact part and the lower bound of the activations are more than it has."""
        return self.capacity_bytes is not None and self.lower_bound_bytes > self.capacity_bytes

    @property
    def spare_bytes(self) -> int | None:
        """What the lower bound leaves of the device; negative if it does not fit."""
        return None if self.capacity_bytes is None else self.capacity_bytes - self.lower_bound_bytes

    @property
    def proof(self) -> str | None:
        """Why the plan cannot fit, as a sum of exact parts; None if that is not proven."""
        if not self.cannot_fit:
            return None
        gradient = "gradients" if self.gradients == "together" else "the largest gradient"
        return (
            f"{self.bytes_of('parameter'):,} of parameters + "
            f"{self.bytes_of('optimizer state'):,} of optimizer state + "
            f"{self.gradient_bytes:,} of {gradient} = {self.exact_bytes:,} bytes per device "
            f"> {self.capacity_bytes:,}"
        )

    def largest(self, count: int = 5) -> tuple[QuickTensor, ...]:
        """The parameters that take most of a device, the largest first."""
        return _by_size(self.tensors)[:count]

    @property
    def replicated(self) -> tuple[QuickTensor, ...]:
        """Parameters of which every device holds all, the largest first; none on one device."""
        if prod(size for _, size in self.axes) == 1:
            return ()
        return _by_size(tensor for tensor in self.tensors if tensor.is_replicated)


def _by_size(tensors: Iterable[QuickTensor]) -> tuple[QuickTensor, ...]:
    return tuple(sorted(tensors, key=lambda tensor: (-tensor.device_bytes, tensor.name)))


def quick_estimate(
    parameters: Iterable[tuple[str, Sequence[int], str]],
    rules: Any,
    mesh: Mesh | Mapping[str, int],
    chip: Chip | str | None = None,
    *,
    optimizer: OptimizerState = ADAMW,
    gradients: Gradients = "together",
    activations: ActivationBound | None = None,
    same_as: Mapping[str, str] | None = None,
    unmatched: Literal["error", "replicate"] = "error",
) -> QuickEstimate:
    """Estimates what a plan takes on each device.

    Args:
        parameters: Path, global shape and dtype of each; the dtype as torch or as HLO names it.
        rules: What `read_rules` reads: a job's rules, a mapping, a list of pairs.
        mesh: The mesh, or the size of each axis.
        chip: The chip, or a name of it; None for no verdict.
        optimizer: What it keeps per parameter.
        gradients: "together" if all are alive at once, as where their norm is clipped; then all
            count in the exact part, else the largest.
        activations: A lower bound of what they take.
        same_as: Of tied parameters: path -> the path that was listed before.
        unmatched: What becomes of a parameter that no rule matches: "error", or "replicate".

    Returns:
        The estimate.

    Raises:
        RulesError: Rules that do not fit the parameters or the mesh.
        JobError: An unknown dtype.
        MeshError: An unknown chip, or sizes that are none.
    """
    parameters = list(parameters)
    plan = quick_plan(parameters, rules, mesh, same_as=same_as, unmatched=unmatched)
    dtypes = {name: dtype for name, _, dtype in parameters}
    planned = [tensor for tensor in plan.tensors if tensor.facts.same_as is None]
    tensors = tuple(
        QuickTensor(
            tensor.path,
            tensor.facts.shape,
            dtypes[tensor.path],
            str(tensor.layout),
            tensor.device_bytes,
            tensor.total_bytes,
            tensor.device_bytes == tensor.total_bytes,
        )
        for tensor in planned
    )
    sizes = [(t.device_bytes, t.total_bytes, t.padding_bytes) for t in planned]
    # Arrays of the optimizer are cut like their parameter, and have dtypes of their own.
    state = [
        tuple(n // t.facts.itemsize_bytes * optimizer.per_element_bytes(dtypes[t.path]) for n in of)
        for t, of in zip(planned, sizes, strict=True)
    ]
    state += [(optimizer.counter_bytes, optimizer.counter_bytes, 0)] * len(planned)
    count = (len(optimizer.moments) + len(optimizer.counters)) * len(planned)
    return QuickEstimate(
        axes=tuple(zip(map(str, plan.mesh.axis_names), plan.mesh.mesh_shape, strict=True)),
        chip=find_chip(chip) if isinstance(chip, str) else chip,
        parts=(
            _part("parameter", len(planned), sizes),
            _part("gradient", len(planned), sizes),
            _part("optimizer state", count, state),
        ),
        tensors=tensors,
        optimizer=optimizer,
        gradients=gradients,
        largest_gradient_bytes=max((tensor.device_bytes for tensor in tensors), default=0),
        layer_gradient_bytes=sum(
            tensor.device_bytes for tensor in tensors if ".layers." in f".{tensor.name}"
        ),
        activations=activations,
    )


def _part(role: str, count: int, sizes: Sequence[tuple[int, ...]]) -> QuickPart:
    """Sums bytes on a device, of whole tensors, and of padding."""
    device, total, padding = (sum(size[i] for size in sizes) for i in range(3))
    return QuickPart(role, count, device, total, padding)


def quick_plan(
    parameters: Iterable[tuple[str, Sequence[int], str]],
    rules: Any,
    mesh: Mesh | Mapping[str, int],
    *,
    same_as: Mapping[str, str] | None = None,
    unmatched: Literal["error", "replicate"] = "error",
) -> ShardingPlan:
    """Says how each parameter lies; arguments and refusals are those of :func:`quick_estimate`.

    Returns:
        The plan. Its outputs are left out: what modules there are is not known here.

    Raises:
        JobError: A path that is there twice, too.
    """
    ties, facts = same_as or {}, dict[str, TensorFacts]()
    for name, shape, dtype in parameters:
        if name in facts:
            raise JobError(
                f"An estimate was asked for with the parameter {name!r} twice. Each path is one "
                "tensor. Pass each once; say of tied ones what they are tied to with same_as."
            )
        facts[name] = TensorFacts(tuple(shape), itemsize_bytes(dtype), same_as=ties.get(name))
    if not isinstance(mesh, Mesh):
        mesh = Mesh.arange(tuple(mesh.values()), tuple(mesh))
    return read_rules(rules or {}).resolve(facts, mesh, unmatched=unmatched)


def module_parameters(module: nn.Module) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """Lists a module's parameters as `quick_estimate` takes them.

    Args:
        module: On any device; the meta device takes no memory.

    Yields:
        Path, global shape and dtype, tied ones under each of their names.

    Example:
        >>> import torch
        >>> with torch.device("meta"):
        ...     model = torch.nn.Linear(4, 8, bias=False)
        >>> list(module_parameters(model))
        [('weight', (8, 4), 'float32')]
    """
    for name, parameter in module.named_parameters(remove_duplicate=False):
        yield name, tuple(parameter.shape), str(parameter.dtype).removeprefix("torch.")


def tied_parameters(module: nn.Module) -> dict[str, str]:
    """Says which parameters of a module are the same tensor as one before: path -> that path."""
    paths: dict[int, str] = {}
    ties: dict[str, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        first = paths.setdefault(id(parameter), name)
        if first != name:
            ties[name] = first
    return ties
