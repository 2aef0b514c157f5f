"""quick_estimate: what a plan takes on each device, without compiling it and without torch.

Of every parameter the rules say how it lies; from that follow, exactly, the bytes of parameters,
gradients and optimizer state on one device, uneven dims padded as XLA pads them. What activations
take is a lower bound (`activations`). A plan whose exact part alone is more than a device has
cannot fit, and `proof` says so as a sum. A plan that is not refused may still not fit.

    held between steps       parameters + optimizer state
    end of the backward      held + all gradients        clipping by their norm needs all of them
    in the loop backward     held + gradients of the layers + activations

The last line is how ``scan_layers`` runs: both loops hold their stacks whole while they turn.

Example:
    >>> weights = [("w", (8192, 8192), "bf16"), ("norm", (8192,), "bf16")]
    >>> rules = {"w": ["fsdp", None], "norm": [None]}
    >>> found = quick_estimate(weights, rules, {"fsdp": 4}, "v5e")
    >>> found.bytes_of("parameter"), found.exact_bytes, found.cannot_fit
    (33570816, 201424904, False)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal, TypeAlias

from mesh_utils import Chip, Mesh, find_chip
from mesh_utils.errors import JobError
from xla_dtensor.core.dtypes import itemsize_bytes
from xla_dtensor.core.rules import ShardingPlan, TensorFacts, read_rules
from xla_dtensor.plan.quick.activations import ActivationBound
from xla_dtensor.plan.quick.optimizer import ADAMW, OptimizerState

__all__ = ["Gradients", "QuickEstimate", "QuickPart", "QuickTensor", "quick_estimate", "quick_plan"]

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
        backward = self.held_bytes + in_loop + self.activations.device_bytes
        return max(self.exact_bytes, backward)

    @property
    def capacity_bytes(self) -> int | None:
        """Bytes that a device has: usable HBM, or all of it where no source says what is usable."""
        if self.chip is None:
            return None
        if self.chip.usable_hbm_bytes is not None:
            return self.chip.usable_hbm_bytes
        whole = self.chip.hbm_bytes
        return None if whole is None else whole // self.chip.devices_per_chip

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
        if not self.cannot_fit or self.capacity_bytes is None:
            return None
        gradient = "gradients" if self.gradients == "together" else "the largest gradient"
        return (
            f"{self.bytes_of('parameter'):,} of parameters + "
            f"{self.bytes_of('optimizer state'):,} of optimizer state + "
            f"{self.gradient_bytes:,} of {gradient} = {self.exact_bytes:,} bytes per device "
            f"> {self.capacity_bytes:,}"
        )

    def largest(self, count: int = 5) -> tuple[QuickTensor, ...]:
        """The parameters that take most of a device.

        Args:
            count: How many.

        Returns:
            The largest first.
        """
        ordered = sorted(self.tensors, key=lambda tensor: (-tensor.device_bytes, tensor.name))
        return tuple(ordered[:count])

    @property
    def replicated(self) -> tuple[QuickTensor, ...]:
        """Parameters of which every device holds all, the largest first; none on one device."""
        found = [tensor for tensor in self.tensors if tensor.is_replicated]
        if prod(size for _, size in self.axes) == 1:
            return ()
        return tuple(sorted(found, key=lambda tensor: (-tensor.device_bytes, tensor.name)))


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
    """Estimate what a plan takes on each device.

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
    listed = [(name, tuple(shape), dtype) for name, shape, dtype in parameters]
    sizes = {name: itemsize_bytes(dtype) for name, _, dtype in listed}
    plan = quick_plan(listed, rules, mesh, same_as=same_as, unmatched=unmatched)
    dtypes = {name: dtype for name, _, dtype in listed}
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
        for tensor in plan.tensors
        if tensor.facts.same_as is None
    )
    once = [tensor for tensor in plan.tensors if tensor.facts.same_as is None]
    device, total, padding = (
        [getattr(tensor, name) for tensor in once]
        for name in ("device_bytes", "total_bytes", "padding_bytes")
    )
    state = [optimizer.per_element_bytes(dtypes[tensor.path]) for tensor in once]
    element = [sizes[tensor.path] for tensor in once]
    fixed = optimizer.counter_bytes * len(once)

    def kept(of: list[int]) -> int:
        return sum(n // size * per for n, size, per in zip(of, element, state, strict=True))

    count = optimizer.arrays_per_parameter * len(once)
    parts = (
        QuickPart("parameter", len(once), sum(device), sum(total), sum(padding)),
        QuickPart("gradient", len(once), sum(device), sum(total), sum(padding)),
        QuickPart(
            "optimizer state", count, kept(device) + fixed, kept(total) + fixed, kept(padding)
        ),
    )
    names = plan.mesh.axis_names
    return QuickEstimate(
        axes=tuple(zip(map(str, names), plan.mesh.mesh_shape, strict=True)),
        chip=find_chip(chip) if isinstance(chip, str) else chip,
        parts=parts,
        tensors=tensors,
        optimizer=optimizer,
        gradients=gradients,
        largest_gradient_bytes=max(device, default=0),
        layer_gradient_bytes=sum(
            tensor.device_bytes for tensor in tensors if ".layers." in f".{tensor.name}"
        ),
        activations=activations,
    )


def quick_plan(
    parameters: Iterable[tuple[str, Sequence[int], str]],
    rules: Any,
    mesh: Mesh | Mapping[str, int],
    *,
    same_as: Mapping[str, str] | None = None,
    unmatched: Literal["error", "replicate"] = "error",
) -> ShardingPlan:
    """Say how each parameter lies.

    Args:
        parameters: As for :func:`quick_estimate`.
        rules: As for :func:`quick_estimate`.
        mesh: As for :func:`quick_estimate`.
        same_as: As for :func:`quick_estimate`.
        unmatched: As for :func:`quick_estimate`.

    Returns:
        The plan. Its outputs are left out: what modules there are is not known here.

    Raises:
        RulesError: As :func:`quick_estimate`.
        JobError: An unknown dtype, or a path that is there twice.
    """
    found = mesh if isinstance(mesh, Mesh) else Mesh.arange(tuple(mesh.values()), tuple(mesh))
    ties = same_as or {}
    facts: dict[str, TensorFacts] = {}
    for name, shape, dtype in parameters:
        if name in facts:
            raise JobError(
                f"An estimate was asked for with the parameter {name!r} twice. Each path is one "
                "tensor. Pass each once; say of tied ones what they are tied to with same_as."
            )
        facts[name] = TensorFacts(tuple(shape), itemsize_bytes(dtype), same_as=ties.get(name))
    return read_rules(rules or {}).resolve(facts, found, unmatched=unmatched)
