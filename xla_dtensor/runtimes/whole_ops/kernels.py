"""Which ops have a kernel that torch runs before it takes them apart.

A tensor that carries the dispatch key ``AutogradPrivateUse3`` meets these kernels first. Ordinary
CPU tensors do not carry it and are not affected; checkpoint, autocast and hooks all work, because
this is torch's own dispatcher and no mode.

Linear, matmul, einsum and attention stay whole (:mod:`~xla_dtensor.runtimes.whole_ops.products`,
:mod:`~xla_dtensor.runtimes.whole_ops.attention`). The other kernels are of ops that torch would
compute on the host: of a tensor's memory, or in a plain tensor that it writes to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch

from xla_dtensor.core.errors import ArgumentTypeError, ScanError
from xla_dtensor.runtimes.whole_ops.attention import attention, attention_grad, lean, lean_grad
from xla_dtensor.runtimes.whole_ops.autograd import below, has_tangent
from xla_dtensor.runtimes.whole_ops.products import einsum, linear, matmul, weight_grad

__all__ = [
    "AS_SEEN",
    "WHOLE_OPS",
    "Remat",
    "is_foreach",
    "linear_loss",
    "linear_loss_backward",
    "num_places",
    "register",
    "run_foreach",
    "writes_to_a_list",
]

aten: Any = torch.ops.aten


_KEY = "AutogradPrivateUse3"
_registrations: list[torch.library.Library] = []


def register() -> None:
    """Install the kernels; calling it again does nothing."""
    if _registrations:
        return
    # Ops of other libraries have no kernel for this key; they pass through to the next one.
    fallback = torch.library.Library("_", "IMPL")
    fallback.fallback(torch.library.fallthrough_kernel, _KEY)
    kernels = torch.library.Library("aten", "IMPL")
    _registrations.extend((fallback, kernels))
    for name, kernel in (
        ("linear", linear),
        ("matmul", matmul),
        ("scaled_dot_product_attention", attention),
        ("einsum", einsum),
        ("lstm.input", _lstm),
        ("pad_sequence", _pad_sequence),
        ("_pack_padded_sequence", _pack),
        ("_pad_packed_sequence", _unpack),
        ("one_hot", _one_hot),
        ("vander", _vander),
        ("_nested_tensor_from_mask_left_aligned", lambda x, mask: False),  # else it gets nested
        ("tensor_split.tensor_indices_or_sections", _tensor_split),
        ("copysign.Tensor", _copysign),
        ("sgn", _sgn),
        ("sgn_", _sgn_in_place),
    ):
        kernels.impl(name, kernel, _KEY)
    kernels.impl("_local_scalar_dense", _scalar, "PrivateUse3")


def _scalar(x: torch.Tensor) -> Any:
    """``torch.tensor([loss, 2.0])`` reads each tensor in its list with Python's key left out."""
    included = torch._C._dispatch_tls_local_include_set()
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in (torch._C.DispatchKey.Python, torch._C.DispatchKey.PythonTLSSnapshot):
        excluded = excluded.remove(key)
    with torch._C._ForceDispatchKeyGuard(included, excluded):
        return aten._local_scalar_dense(x)


def _tensor_split(x: torch.Tensor, places: torch.Tensor, dim: int = 0) -> Any:
    """torch reads the memory of the tensor that says where to split."""
    return torch.tensor_split(x, places.tolist(), dim)


# Gradients that are zero everywhere torch makes of a size alone for these two: plain CPU tensors,
# as the gradients of DTensors.


def _sgn(x: torch.Tensor) -> torch.Tensor:
    if not x.is_complex():
        return torch.sign(x)
    if not (x.requires_grad or has_tangent(x)):
        return below(aten.sgn.default, x)
    not_zero = torch.where(x == 0, 1, x)
    return torch.where(x == 0, 0, not_zero / not_zero.abs())


def _sgn_in_place(x: torch.Tensor) -> torch.Tensor:
    return x.copy_(_sgn(x.clone()))


def _copysign(x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    output = below(aten.copysign.Tensor, x.detach(), other.detach())
    if not (x.requires_grad or other.requires_grad or has_tangent(x, other)):
        return output
    factor = below(aten.copysign.Tensor, torch.ones_like(output), output)
    factor = factor * below(aten.copysign.Tensor, torch.ones_like(output), x.detach())
    output = torch.where(x == 0, output, x * factor)
    # A gradient for `other`, too: zeros.
    return torch.where(torch.zeros_like(output, dtype=torch.bool), other.to(output.dtype), output)


def _lstm(*args: Any) -> Any:
    """torch's LSTM of its own ops, not of oneDNN, which reads the memory of CPU tensors."""
    was_enabled = torch.backends.mkldnn.is_available() and torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        return aten.lstm.input.decompose(*args)
    finally:
        torch._C._set_mkldnn_enabled(was_enabled)


# Sequences of several lengths: torch writes them into plain tensors of the host. Packed, the rows
# of one step stand together: steps with as many sequences are one block of the padded tensor.


def _padded(x: torch.Tensor, dim: int, room: int, value: float, side: str = "right") -> Any:
    if not room:
        return x
    sides = (room, 0) if side == "left" else (0, room)
    return torch.nn.functional.pad(x, (*(0, 0) * (x.ndim - 1 - dim), *sides), value=value)


def _pad_sequence(
    sequences: Sequence[torch.Tensor],
    batch_first: bool = False,
    padding_value: float = 0.0,
    padding_side: str = "right",
) -> torch.Tensor:
    length = max(x.shape[0] for x in sequences)
    padded = [_padded(x, 0, length - x.shape[0], padding_value, padding_side) for x in sequences]
    return torch.stack(padded, 0 if batch_first else 1)


def _blocks(batch_sizes: list[int]) -> Iterator[tuple[int, int]]:
    """Yield how many steps with as many sequences there are, and how many sequences."""
    for size, steps in groupby(batch_sizes):
        yield len([*steps]), size


def _pack(x: torch.Tensor, lengths: torch.Tensor, batch_first: bool) -> Any:
    x = x.transpose(0, 1) if batch_first else x
    longest_first = _lengths(lengths, x)
    batch_sizes = [
        sum(length > step for length in longest_first) for step in range(longest_first[0])
    ]
    blocks, step = [], 0
    for steps, size in _blocks(batch_sizes):
        blocks.append(x[step : step + steps, :size].flatten(0, 1))
        step += steps
    return torch.cat(blocks), torch.tensor(batch_sizes)


def _lengths(lengths: torch.Tensor, x: torch.Tensor) -> list[int]:
    """Return the lengths where they fit; the messages are torch's."""
    numbers = [int(length) for length in lengths.tolist()]
    if len(numbers) != x.shape[1]:
        raise RuntimeError(
            f"Expected `len(lengths)` to be equal to batch_size, but got {len(numbers)} "
            f"(batch_size={x.shape[1]})"
        )
    if numbers[-1] <= 0:
        raise RuntimeError(
            "Length of all samples has to be greater than 0, but found an element in 'lengths' "
            "that is <= 0"
        )
    if numbers != sorted(numbers, reverse=True):
        raise RuntimeError(
            "`lengths` array must be sorted in decreasing order when `enforce_sorted` is True. You "
            "can pass `enforce_sorted=False` to pack_padded_sequence and/or pack_sequence to "
            "sidestep this requirement if you do not need ONNX exportability."
        )
    return numbers


def _unpack(
    data: torch.Tensor, batch_sizes: torch.Tensor, batch_first: bool, value: Any, total_length: int
) -> Any:
    sizes = batch_sizes.tolist()
    if 0 < total_length < len(sizes):
        raise RuntimeError(
            "Expected total_length to be at least the length of the longest sequence in input, but "
            f"got total_length={total_length} and max sequence length being {len(sizes)}"
        )
    blocks, row = [], 0
    for steps, size in _blocks(sizes):
        block = data[row : row + steps * size].unflatten(0, (steps, size))
        blocks.append(_padded(block, 1, sizes[0] - size, value))
        row += steps * size
    output = _padded(torch.cat(blocks), 0, max(total_length - len(sizes), 0), value)
    lengths = [sum(size > i for size in sizes) for i in range(sizes[0])]
    return output.transpose(0, 1) if batch_first else output, torch.tensor(lengths)


def _vander(x: torch.Tensor, N: int | None = None, increasing: bool = False) -> torch.Tensor:
    """torch writes the powers into a plain tensor of the host."""
    if x.ndim != 1:
        raise RuntimeError("x must be a one-dimensional tensor.")
    exponents = torch.arange(x.shape[0] if N is None else N, device=x.device)
    return x.unsqueeze(-1) ** (exponents if increasing else exponents.flip(0))


def _one_hot(index: Any, num_classes: int = -1) -> Any:
    """As one op, whose range is looked at; torch compares with all classes instead."""
    if num_classes == -1:
        num_classes = int(index.max().item()) + 1
    return below(aten.one_hot.default, index, num_classes)


WHOLE_OPS = frozenset(
    {
        aten.linear.default,
        aten.matmul.default,
        aten.scaled_dot_product_attention.default,
        weight_grad,
        attention_grad,
        lean,
        lean_grad,
    }
)


# ---------------------------------------------------------------------------------- _foreach_* ops
#
# The ordinary op, once per tensor of the lists.
#
# torch's optimizers call these with lists of parameters. Lists are dealt out one element per call,
# everything else is the same in each call.

_PREFIX = "aten::_foreach_"
# torch.<name> where it is not the op's own name.
_NAMES: dict[str, Callable[..., Any]] = {
    "norm": lambda x, ord=2, dtype=None: torch.linalg.vector_norm(x, ord, dtype=dtype),
    "copy": lambda x, source, *_: source.to(x.dtype),
    "zero": torch.zeros_like,
    "maximum": lambda x, bound: _bounded(torch.maximum, torch.clamp_min, x, bound),
    "minimum": lambda x, bound: _bounded(torch.minimum, torch.clamp_max, x, bound),
}


def _bounded(by_tensor: Any, by_number: Any, x: torch.Tensor, bound: Any) -> torch.Tensor:
    return (by_tensor if isinstance(bound, torch.Tensor) else by_number)(x, bound)


def is_foreach(func: Any) -> bool:
    """Tell whether `func` is a functional foreach op."""
    return func._schema.name.startswith(_PREFIX) and not func._schema.is_mutable


def writes_to_a_list(func: Any) -> bool:
    """Tell whether `func` is a foreach op that writes to its first argument."""
    name = func._schema.name
    return func._schema.is_mutable and name.startswith(_PREFIX) and name.endswith("_")


def num_places(args: Sequence[Any]) -> int:
    """Return how long the lists are that a foreach op is given; its first argument may be none."""
    return next(len(argument) for argument in args if isinstance(argument, (list, tuple)))


def run_foreach(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Run a functional foreach op tensor by tensor.

    Args:
        func: An ``OpOverload`` of the ``_foreach_`` family.
        args: Its positional arguments.
        kwargs: Its keyword arguments.

    Returns:
        One result per tensor.
    """
    name = func._schema.name.removeprefix(_PREFIX)
    single = _NAMES.get(name) or getattr(torch, name)
    if name in ("addcmul", "addcdiv") and len(args) > 3:
        args, kwargs = args[:3], {**kwargs, "value": args[3]}
    values = kwargs.get("value")
    if isinstance(values, torch.Tensor):
        kwargs = {**kwargs, "value": values.tolist()}

    def dealt(argument: Any, i: int) -> Any:
        return argument[i] if isinstance(argument, (list, tuple)) else argument

    keyword = {"scalars": "value", "scalar": "value"} if name in ("addcmul", "addcdiv") else {}
    return [
        single(
            *(dealt(a, i) for a in args),
            **{keyword.get(k, k): dealt(v, i) for k, v in kwargs.items()},
        )
        for i in range(num_places(args))
    ]


# ------------------------------------------------------------- The ops behind linear_cross_entropy
#
# A loss for each token, and its gradients.
#
# ``log_sum`` is the logarithm of the sum of the exponentials of a token's logits. It and the inputs
# are all that the backward needs; the logits themselves are computed again, chunk by chunk.

_linear_loss = torch.library.Library("xla_dtensor", "FRAGMENT")
_linear_loss.define(
    "linear_loss(Tensor input, Tensor weight, Tensor target, Tensor? bias, int ignore_index, "
    "float label_smoothing, int chunks) -> (Tensor, Tensor)"
)
_linear_loss.define(
    "linear_loss_backward(Tensor grad, Tensor input, Tensor weight, Tensor target, Tensor? bias, "
    "Tensor log_sum, int ignore_index, float label_smoothing, int chunks) "
    "-> (Tensor, Tensor, Tensor)"
)


@torch.library.impl(_linear_loss, "linear_loss", "Meta")
def _(input: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    wide = torch.promote_types(input.dtype, torch.float32)
    loss, log_sum = (torch.empty(input.shape[:-1], dtype=wide, device="meta") for _ in range(2))
    return loss, log_sum


@torch.library.impl(_linear_loss, "linear_loss_backward", "Meta")
def _(_: Any, input: Any, weight: Any, *__: Any) -> tuple[torch.Tensor, ...]:
    shapes = (input.shape, weight.shape, weight.shape[:1])
    dtypes = (input.dtype, weight.dtype, weight.dtype)
    return tuple(
        torch.empty(shape, dtype=dtype, device="meta")
        for shape, dtype in zip(shapes, dtypes, strict=True)
    )


linear_loss = torch.ops.xla_dtensor.linear_loss.default
linear_loss_backward = torch.ops.xla_dtensor.linear_loss_backward.default


# -------------------------------------------------------------------------------------------- Remat
#
# What a backward pass keeps of the forward pass, and what it computes again.

KINDS = ("none", "full", "dots", "dots_no_batch")
_WITH_NAMES = ("save", "offload")

# Ops that stay whole on a mesh, and what torch makes of them elsewhere: policies that list ops
# name those.
_ATTENTION = (
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
)
AS_SEEN: dict[Any, tuple[Any, ...]] = {
    aten.linear.default: (aten.mm.default, aten.addmm.default),
    aten.matmul.default: (aten.mm.default, aten.bmm.default),
    aten.scaled_dot_product_attention.default: _ATTENTION,
    torch.ops.xla_dtensor.sdpa_lean.default: (
        aten.scaled_dot_product_attention.default,
        *_ATTENTION,
    ),
}


@dataclass(frozen=True)
class Remat:
    """A choice of what to keep.

    Args:
        kind: One of :data:`KINDS`, "save", "offload" or "selective".
        names: The names behind "save:" and "offload:".
        contexts: A ``context_fn`` as ``torch.utils.checkpoint.checkpoint`` takes it.
        text: How the user wrote it.
    """

    kind: str
    names: tuple[str, ...] = ()
    contexts: Callable[[], Any] | None = None
    text: str = ""

    @classmethod
    def of(cls, value: Any) -> Remat:
        """Read what a user wrote.

        Raises:
            ScanError: Not a known text.
            ArgumentTypeError: Neither a text nor a function.

        Example:
            >>> Remat.of("save:scores, mlp").names
            ('scores', 'mlp')
        """
        if callable(value):
            return cls("selective", contexts=value, text=getattr(value, "__name__", repr(value)))
        if not isinstance(value, str):
            raise ArgumentTypeError(
                f"remat={value!r} is of type={type(value).__name__}. What to keep is said by a "
                "name, or by a context_fn of torch.utils.checkpoint. Pass 'none', 'full', 'dots', "
                "'save:NAME', 'offload:NAME' or such a function."
            )
        kind, colon, names_text = value.partition(":")
        names = tuple(name.strip() for name in names_text.split(",") if name.strip())
        if (kind in KINDS and not colon) or (kind in _WITH_NAMES and names):
            return cls(kind, names, text=value)
        raise ScanError(
            f"remat={value!r} was passed. It is none of {', '.join(map(repr, KINDS))}, nor 'save:' "
            "or 'offload:' with names. Pass one of these; names are those that the block gives "
            "with xd.checkpoint_name."
        )
