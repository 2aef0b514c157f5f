"""Keep linear, matmul and attention whole: one op forward, one backward, no flattening.

torch runs these three as composites: their kernels reshape batch, sequence or head dims together
before anything below autograd can see the op. A tensor that carries the dispatch key
``AutogradPrivateUse3`` meets the kernels of this module first. Ordinary CPU tensors do not carry
it and are not affected; checkpoint, autocast and hooks all work, because this is torch's own
dispatcher and no mode.

The backward formulas are written with ops that are themselves whole. Two have no name in
aten and are defined here: ``xla_dtensor::linear_weight_grad`` and ``xla_dtensor::sdpa_backward``.
Attention over long sequences is a pair of ops of its own, ``xla_dtensor::sdpa_lean`` and its
backward, which hands on the logarithm of the softmax's sums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import wraps
from string import ascii_letters
from typing import Any, Literal, get_args

import torch
from torch.autograd import forward_ad

from xla_dtensor.core import Layout
from xla_dtensor.core.errors import ArgumentTypeError, ScanError, UnsupportedOpError
from xla_dtensor.core.spanning import layout_on_span
from xla_dtensor.runtimes.functional import name_of
from xla_dtensor.runtimes.registry import current_runtime
from xla_dtensor.runtimes.state import register_setting

__all__ = [
    "AS_SEEN",
    "WHOLE_OPS",
    "LinearResult",
    "OneResult",
    "Remat",
    "attention_kernel",
    "below",
    "has_tangent",
    "is_foreach",
    "is_lean",
    "linear_loss",
    "linear_loss_backward",
    "num_places",
    "refuse_second",
    "register",
    "run_foreach",
    "save",
    "saved",
    "where_heads_lie",
    "writes_to_a_list",
]


# ------------------------------------------------------------------------ Which attention is taken
#
# All scores at once, or a kernel that never holds them.
#
# All scores of one head are queries x keys numbers, in float32: 4 MiB at length 1024, 256 MiB at
# 8192, for every head and sequence on the device. From length 1024 on they are left out
# (``attention``); below, two matrix products and a softmax are faster, except where the device has
# a kernel of its own: cuDNN's took a ViT of length 256 on an H200 from 61 to 51 ms a step.

AttentionKernel = Literal["auto", "plain", "lean"]
_LEAN_FROM = 1024 * 1024
_chosen: ContextVar[AttentionKernel] = ContextVar("attention_kernel", default="auto")
register_setting("attention_kernel", _chosen.get)


@contextmanager
def attention_kernel(name: AttentionKernel) -> Iterator[None]:
    """Choose how ``scaled_dot_product_attention`` is computed, on the JAX runtime.

    Args:
        name: "lean": never hold the scores of all queries and keys (TPU: Pallas splash attention;
            NVIDIA GPU: cuDNN; elsewhere, and where those do not fit: blocks of 512 keys). "plain":
            hold them. "auto", as it is outside: "lean" where queries x keys are at least 1024 x
            1024. A compiled step is traced anew under another choice. With dropout, and with a
            mask that needs a gradient, it is "plain" whatever is chosen; so it is on torch_xla.

    Yields:
        None. The choice before it is back afterwards.

    Raises:
        ArgumentTypeError: Another name.

    Example:
        >>> import torch, xla_dtensor as xd
        >>> mesh = xd.init_device_mesh("xla", (2, 4), mesh_dim_names=("dp", "tp"))
        >>> q = xd.distribute_tensor(torch.randn(2, 4, 16, 8), mesh, ("dp", "tp", None, None))
        >>> with xd.attention_kernel("lean"):
        ...     out = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
        >>> out.shape
        torch.Size([2, 4, 16, 8])
    """
    if name not in get_args(AttentionKernel):
        raise ArgumentTypeError(
            f"attention_kernel was called with name={name!r}. It chooses whether all scores are "
            "held at once. Pass 'auto', 'plain' or 'lean'."
        )
    token = _chosen.set(name)
    try:
        yield
    finally:
        _chosen.reset(token)


def is_lean(q: Any, k: Any, v: Any, mask: Any = None, is_causal: bool = False) -> bool:
    """Tell whether this attention is computed without holding all scores.

    Args:
        q: (..., query heads, queries, dim), anything with a shape and a dtype.
        k: (..., key heads, keys, dim).
        v: (..., key heads, keys, value dim).
        mask: What is added to the scores, or None.
        is_causal: Whether a query sees no key behind it.
    """
    chosen = _chosen.get()
    runtime = current_runtime()
    if chosen == "plain" or runtime is None or not runtime.has_loops:
        return False
    if not (len(q.shape) == len(k.shape) == len(v.shape) >= 2 and k.shape[:-1] == v.shape[:-1]):
        return False
    if tuple(q.shape[:-3]) != tuple(k.shape[:-3]):
        return False
    if 0 in (*q.shape, *k.shape) or (len(q.shape) > 2 and q.shape[-3] % k.shape[-3]):
        return False
    if chosen == "lean" or q.shape[-2] * k.shape[-2] >= _LEAN_FROM:
        return True
    return mask is None and runtime.has_attention_kernel(q, k, v, is_causal)


def where_heads_lie(q: Any, k: Any, v: Any) -> str:
    """Return the name of a layout that cuts batch and heads as all three labels do.

    Args:
        q: (batch, query heads, queries, dim).
        k: (batch, key heads, keys, dim).
        v: (batch, key heads, keys, value dim).

    Returns:
        A name of ``functional``, or "" where the labels say nothing: no DTensors, other ranks,
        different meshes, or no dim that all three have cut evenly by the same axes.
    """
    layouts = [_layout(tensor) for tensor in (q, k, v)]
    first = layouts[0]
    if first is None or any(layout is None or layout.mesh != first.mesh for layout in layouts):
        return ""
    dims: list[Any] = [(), (), (), ()]
    for dim in (0, 1):
        alike = all(
            layout is not None and layout.dims[dim] == first.dims[dim] for layout in layouts
        )
        if alike and all(tensor.shape[dim] % first.num_shards(dim) == 0 for tensor in (q, k, v)):
            dims[dim] = first.dims[dim]
    if not any(dims) and first.mesh.size() > 1:
        return ""
    return name_of(Layout(first.mesh, tuple(dims)))


def _layout(tensor: Any) -> Layout | None:
    spec = getattr(tensor, "_spec", None)
    if spec is None or tensor.ndim != 4:
        return None
    layout = Layout.from_placements(spec.placements, 4, spec.mesh.value)
    return layout_on_span(layout, spec.outer_cuts)


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


# ----------------------------------------------------------------------------------- Whole autograd
#
# What the differentiable kernels of whole ops share, and one that has no name in aten.
#
# A backward that is differentiated once more (``create_graph=True``) runs in grad mode, and has to
# be written in ops that torch can differentiate. Kernels below autograd cannot be. So a backward
# asks::
#
#     torch.is_grad_enabled()    False, as a rule: the fused kernel, below autograd
#                                True: the same formula in differentiable ops
#
# What has no such formula says so where the second derivative is asked for (`refuse_second`).
# torch's ``once_differentiable`` does not, if the gradient that comes in is a constant: it loses
# the rest.
#
# In forward mode a Function that is linear in its first argument (`LinearResult`) moves the tangent
# as it moves the value. The others ask `has_tangent` before, and take ops of torch that know their
# derivative.


class OneResult(torch.autograd.Function):
    """A Function with one result. If the gradient of that is undefined, so are those of its inputs.

    torch calls a gradient undefined that a Function gave as None; it stands for zeros. By default
    torch makes zeros of it before it calls a backward, and these are plain ones on no mesh.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "forward" not in cls.__dict__:
            return
        forward, backward = cls.forward, cls.backward

        @wraps(forward)
        def keep_undefined(ctx: Any, *args: Any) -> Any:
            ctx.set_materialize_grads(False)
            ctx.num_inputs = len(args)
            if issubclass(ctx._forward_cls, LinearResult):
                ctx.constants = args[1:]
            return forward(ctx, *args)

        @wraps(backward)
        def pass_undefined(ctx: Any, grad: Any) -> Any:
            # Of a view that was written to PyTorch makes zeros without memory: plain tensors.
            is_undefined = grad is None or grad._is_zerotensor()
            return (None,) * ctx.num_inputs if is_undefined else backward(ctx, grad)

        function: Any = cls
        function.forward = staticmethod(keep_undefined)
        function.backward = staticmethod(pass_undefined)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        """Refuse: the tangent of the result is not known."""
        raise UnsupportedOpError(
            f"A forward derivative (forward_ad, jvp) was asked for through "
            f"{ctx._forward_cls.__name__}, which knows its gradient alone. Take the derivative in "
            "reverse mode (torch.autograd.grad, backward), or write this part with ops of torch."
        )


class LinearResult(OneResult):
    """A Function that is linear in its first argument, and takes no other tensor."""

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        """Return the tangent of the result."""
        return ctx._forward_cls.apply(tangents[0], *ctx.constants)


def has_tangent(*tensors: Any) -> bool:
    """Whether forward mode is on, and one of the tensors carries a tangent."""
    return forward_ad._current_level >= 0 and any(
        tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None
        for tensor in tensors
    )


def below(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Call an op below autograd."""
    with torch._C._AutoDispatchBelowAutograd():
        return func(*args, **kwargs)


def save(ctx: Any, *tensors: Any) -> None:
    """Save tensors for the backward, which reads them by `saved`."""
    # Under saved-tensor hooks (checkpoint), torch 2.9 loses the gradient hooks of a leaf that a
    # Function saves. A detached alias does, unless the backward is differentiated itself.
    hooks = torch._C._autograd  # pyright: ignore[reportAttributeAccessIssue]
    ctx.is_detached = False
    if hooks._top_saved_tensors_default_hooks(True) is not None:
        ctx.is_detached = any(t is not None and t.is_leaf and t.requires_grad for t in tensors)
        tensors = tuple(t.detach() if t is not None and t.is_leaf else t for t in tensors)
    ctx.save_for_backward(*tensors)


def saved(ctx: Any) -> Any:
    """The tensors that `save` has saved."""
    if torch.is_grad_enabled() and ctx.is_detached:
        raise UnsupportedOpError(
            "A second derivative was asked for (create_graph=True) of an op on a parameter inside "
            "of torch.utils.checkpoint. The parameter is saved there without its graph. Take the "
            "gradients of this part without checkpoint."
        )
    return ctx.saved_tensors


class _NoSecond(torch.autograd.Function):
    """Tensors as they are, whose derivative with respect to the inputs is refused."""

    @staticmethod
    def forward(ctx: Any, what: str, number: int, *tensors: Any) -> Any:
        ctx.what = what
        return tuple(tensor.view_as(tensor) for tensor in tensors[number:])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise UnsupportedOpError(
            f"A second derivative of {ctx.what} was asked for. Its backward is a program of its "
            "own that is not differentiated. Leave create_graph=True away, or write this part with "
            "ops of torch."
        )


def refuse_second(what: str, inputs: Sequence[Any], *gradients: Any) -> Any:
    """Return gradients that raise when they are differentiated: their derivative is not known.

    Args:
        what: What the backward is of, for the message.
        inputs: What the gradients depend on: the inputs of the forward.
        *gradients: What the backward has computed; None where it is not needed.
    """
    if not torch.is_grad_enabled():
        return gradients
    places = [i for i, gradient in enumerate(gradients) if gradient is not None]
    differentiable = [tensor for tensor in inputs if tensor is not None and tensor.requires_grad]
    refusing = _NoSecond.apply(
        what, len(differentiable), *differentiable, *(gradients[i] for i in places)
    )
    results = [None] * len(gradients)
    for i, gradient in zip(places, refusing, strict=True):  # pyright: ignore[reportArgumentType]
        results[i] = gradient
    return tuple(results)


class Contract(OneResult):
    """``...m,...n->mn``: the product of two tensors over all of their dims but the last."""

    @staticmethod
    def forward(ctx: Any, a: Any, b: Any) -> Any:
        """Compute the product."""
        save(ctx, a, b)
        return below(torch.ops.xla_dtensor.linear_weight_grad.default, a, b)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        """Compute the gradients that are needed."""
        a, b = saved(ctx)
        to_a, to_b = ctx.needs_input_grad
        grad_a = torch.matmul(b.conj(), grad.mT) if to_a else None
        grad_b = torch.matmul(a.conj(), grad) if to_b else None
        return grad_a, grad_b


def contract(a: Any, b: Any) -> Any:
    """`Contract`, recorded only where it is differentiated."""
    if has_tangent(a, b):
        return torch.matmul(a.flatten(0, -2).mT, b.flatten(0, -2))
    if torch.is_grad_enabled():
        return Contract.apply(a, b)
    return below(torch.ops.xla_dtensor.linear_weight_grad.default, a, b)


# ------------------------------------------------------------------------------------- Whole einsum
#
# Einsum of two tensors as one matmul, with no sharded dims flattened together.
#
# torch's own kernel reshapes the operands to three dims: batch and head dims become one, and XLA
# can no longer keep both sharded. Where one operand has at most one dim of its own, permuting and
# broadcasting is enough::
#
#     bhqd,bhkd->bhqk     a [b, h, q, d]    @  b [b, h, d, k]
#     bsd,dhk->bshk       swapped: the operand with one dim of its own goes to the right
#     bshd,de->bshe       a [b, s, h, d]    @  b [d, e]
#     bshk,hkd->bsd       a [b, s, (h k)]   @  b [(h k), d]     contracted dims become one
#     bsm,bsn->mn         a gradient of a weight: nothing but the contracted dims is there
#
# What does not fit (diagonals, sums of one operand, no dim to contract) is left to torch's kernel.

aten = torch.ops.aten


@dataclass(frozen=True)
class _Product:
    """An einsum as a matmul: the left operand's dims, then the right one's, then the result's."""

    swapped: bool
    lhs_dims: tuple[int, ...]
    rhs_dims: tuple[int, ...]
    contracted: int
    batch: int
    broadcast_dims: int
    output_dims: tuple[int, ...]


def einsum(equation: str, tensors: Sequence[Any], *, path: Any = None) -> Any:
    """Run one einsum; the kernel that :mod:`xla_dtensor.runtimes.whole_ops` registers.

    Args:
        equation: As in ``torch.einsum``.
        tensors: The operands.
        path: The order of contractions of more than two.

    Returns:
        The result, with its autograd history.
    """
    product = _product(equation, tensors) if len(tensors) == 2 else None
    if product is None:
        return aten.einsum.default.decompose(equation, tensors, path=path)
    a, b = reversed(tensors) if product.swapped else tensors
    a, b = a.permute(product.lhs_dims), b.permute(product.rhs_dims)
    if product.contracted == a.ndim - 1 > 1:
        # Several of them may be sharded; none are flattened.
        contraction: Any = Contract.apply(a.movedim(0, -1), b)
        return contraction.permute(product.output_dims)
    if product.contracted > 1:
        a = a.flatten(-product.contracted)
        b = b.flatten(product.batch, product.batch + product.contracted - 1)
    for _ in range(product.broadcast_dims):
        b = b.unsqueeze(product.batch)
    return torch.matmul(a, b).permute(product.output_dims)


def _product(equation: str, tensors: Sequence[Any]) -> _Product | None:
    terms = _terms(equation.replace(" ", ""), [tensor.ndim for tensor in tensors])
    if terms is None or not _fit(*terms, tensors):
        return None
    a, b, out = terms
    batch = [letter for letter in a if letter in b and letter in out]
    contracted = [letter for letter in a if letter in b and letter not in out]
    own_a = [letter for letter in a if letter not in b]
    own_b = [letter for letter in b if letter not in a]
    if not contracted or not own_a or not own_b or min(len(own_a), len(own_b)) != 1:
        return None
    swapped = len(own_b) > 1
    if swapped:
        a, b, own_a, own_b = b, a, own_b, own_a
    letters = [*batch, *own_a, *own_b]
    return _Product(
        swapped=swapped,
        lhs_dims=tuple(a.index(letter) for letter in (*batch, *own_a, *contracted)),
        rhs_dims=tuple(b.index(letter) for letter in (*batch, *contracted, *own_b)),
        contracted=len(contracted),
        batch=len(batch),
        broadcast_dims=len(own_a) - 1 if batch else 0,
        output_dims=tuple(letters.index(letter) for letter in out),
    )


def _terms(equation: str, ndims: Sequence[int]) -> tuple[str, str, str] | None:
    """The letters of both operands and of the result, an ellipsis and a missing result written out.

    An ellipsis has to stand for as many dims in both operands.
    """
    inputs, arrow, out = equation.partition("->")
    a, comma, b = inputs.partition(",")
    if not comma or "," in b:
        return None
    if "..." in equation:
        hidden = {ndim - len(term) + 3 for ndim, term in zip(ndims, (a, b), strict=True)}
        if not ("..." in a and "..." in b and len(hidden) == 1):
            return None
        free = [letter for letter in ascii_letters if letter not in equation]
        spelled = "".join(free[: max(hidden.pop(), 0)])
        if not arrow:
            # torch puts an ellipsis first.
            out = spelled + _implied((a + b).replace(".", ""))
        a, b, out = (term.replace("...", spelled) for term in (a, b, out))
    elif not arrow:
        out = _implied(a + b)
    return (a, b, out) if (a + b + out).isalpha() else None


def _implied(letters: str) -> str:
    """torch's result where none is written: the letters that occur once, capitals first."""
    return "".join(sorted(letter for letter in set(letters) if letters.count(letter) == 1))


def _fit(a: str, b: str, out: str, tensors: Sequence[Any]) -> bool:
    """Whether each letter stands for one dim, of one size, and none is summed in one operand."""
    if any(len(set(letters)) != len(letters) for letters in (a, b, out)):
        return False
    if [len(a), len(b)] != [tensor.ndim for tensor in tensors]:
        return False
    sizes = dict(zip(a, tensors[0].shape, strict=True))
    same = all(
        sizes.get(letter, size) == size for letter, size in zip(b, tensors[1].shape, strict=True)
    )
    return same and set(a) ^ set(b) <= set(out) <= set(a) | set(b)


# --------------------------------------------------------- Keep linear, matmul and attention whole

_KEY = "AutogradPrivateUse3"
_definitions = torch.library.Library("xla_dtensor", "DEF")
_definitions.define("linear_weight_grad(Tensor grad, Tensor input) -> Tensor")
_definitions.define(
    "sdpa_backward(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor? attn_mask, "
    "bool is_causal, float? scale, bool enable_gqa) -> (Tensor, Tensor, Tensor)"
)
_definitions.define(
    "sdpa_lean(Tensor query, Tensor key, Tensor value, Tensor? attn_mask, bool is_causal, "
    "float? scale, str layout) -> (Tensor, Tensor)"
)
_definitions.define(
    "sdpa_lean_backward(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor? attn_mask, "
    "Tensor output, Tensor log_sum, bool is_causal, float? scale, str layout) "
    "-> (Tensor, Tensor, Tensor)"
)


@torch.library.impl(_definitions, "linear_weight_grad", "Meta")
def _(grad: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
    return grad.new_empty((grad.shape[-1], input.shape[-1]))


@torch.library.impl(_definitions, "sdpa_lean", "Meta")
def _(query: Any, key: Any, value: Any, *_: Any) -> Any:
    wide = torch.promote_types(query.dtype, torch.float32)
    output = torch.empty((*query.shape[:-1], value.shape[-1]), dtype=value.dtype, device="meta")
    return output, torch.empty(query.shape[:-1], dtype=wide, device="meta")


@torch.library.impl(_definitions, "sdpa_lean_backward", "Meta")
@torch.library.impl(_definitions, "sdpa_backward", "Meta")
def _(grad: Any, query: Any, key: Any, value: Any, *_: Any) -> Any:
    return tuple(torch.empty(t.shape, dtype=t.dtype, device="meta") for t in (query, key, value))


_registrations: list[torch.library.Library] = []
_weight_grad = torch.ops.xla_dtensor.linear_weight_grad.default
_attention_grad = torch.ops.xla_dtensor.sdpa_backward.default
_lean = torch.ops.xla_dtensor.sdpa_lean.default
_lean_grad = torch.ops.xla_dtensor.sdpa_lean_backward.default


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
        ("linear", _linear),
        ("matmul", _matmul),
        ("scaled_dot_product_attention", _attention),
        ("einsum", einsum),
        ("lstm.input", _lstm),
        ("one_hot", _one_hot),
        ("tensor_split.tensor_indices_or_sections", _tensor_split),
        ("copysign.Tensor", _copysign),
        ("sgn", _sgn),
        ("sgn_", _sgn_in_place),
    ):
        kernels.impl(name, kernel, _KEY)


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


def _one_hot(index: Any, num_classes: int = -1) -> Any:
    """As one op, whose range is looked at; torch compares with all classes instead."""
    if num_classes == -1:
        num_classes = int(index.max().item()) + 1
    return below(aten.one_hot.default, index, num_classes)


class _Linear(OneResult):
    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, bias: Any) -> Any:
        save(ctx, x, weight)
        return below(aten.linear.default, x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        x, weight = saved(ctx)
        to_x, to_weight, to_bias = ctx.needs_input_grad
        if weight.ndim == 1:
            grad_x = grad.unsqueeze(-1) * weight.conj() if to_x else None
            products = grad.unsqueeze(-1) * x.conj()
            leading = list(range(x.ndim - 1))  # sum over no dims is one over all
            grad_weight = (products.sum(leading) if leading else products) if to_weight else None
        else:
            grad_x = torch.matmul(grad, weight.conj()) if to_x else None
            grad_weight = contract(grad, x.conj()) if to_weight else None
        grad_bias = grad.sum(list(range(x.ndim - 1))) if to_bias and x.ndim > 1 else None
        if to_bias and x.ndim == 1:
            grad_bias = grad
        return grad_x, grad_weight, grad_bias


def _linear(x: Any, weight: Any, bias: Any = None) -> Any:
    if has_tangent(x, weight, bias):
        return aten.linear.default.decompose(x, weight, bias)
    return _Linear.apply(x, weight, bias)


class _Matmul(OneResult):
    @staticmethod
    def forward(ctx: Any, a: Any, b: Any) -> Any:
        save(ctx, a, b)
        return below(aten.matmul.default, a, b)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        a, b = saved(ctx)
        # Vectors are matrices with one row or column; matmul only hides it.
        matrix_a = a.unsqueeze(0) if a.ndim == 1 else a
        matrix_b = b.unsqueeze(1) if b.ndim == 1 else b
        grad = grad.unsqueeze(-1) if b.ndim == 1 else grad
        grad = grad.unsqueeze(-2) if a.ndim == 1 else grad
        grad_a = grad_b = None
        if ctx.needs_input_grad[0]:
            grad_a = torch.matmul(grad, matrix_b.mH).sum_to_size(matrix_a.shape).view(a.shape)
        if ctx.needs_input_grad[1]:
            if matrix_b.ndim == 2 and matrix_a.ndim > 2:
                grad_b = contract(matrix_a.conj(), grad).view(b.shape)
            else:
                product = torch.matmul(matrix_a.mH, grad)
                grad_b = product.sum_to_size(matrix_b.shape).view(b.shape)
        return grad_a, grad_b


def _matmul(a: Any, b: Any) -> Any:
    if has_tangent(a, b):
        return aten.matmul.default.decompose(a, b)
    return _Matmul.apply(a, b)


class _Attention(OneResult):
    @staticmethod
    def forward(
        ctx: Any, q: Any, k: Any, v: Any, mask: Any, is_causal: bool, scale: Any, gqa: bool
    ) -> Any:
        save(ctx, q, k, v, mask)
        ctx.options = (is_causal, scale, gqa)
        return below(
            aten.scaled_dot_product_attention.default,
            q,
            k,
            v,
            mask,
            0.0,
            is_causal,
            scale=scale,
            enable_gqa=gqa,
        )

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        q, k, v, mask = saved(ctx)
        if torch.is_grad_enabled():
            grads = _attention_grad_by_parts(grad, q, k, v, mask, *ctx.options)
        else:
            grads = below(_attention_grad, grad, q, k, v, mask, *ctx.options)
        needed = [g if n else None for g, n in zip(grads, ctx.needs_input_grad, strict=False)]
        return (*needed, None, None, None, None)


class _LeanAttention(OneResult):
    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, mask: Any, is_causal: bool, scale: Any) -> Any:
        ctx.options = (is_causal, scale, where_heads_lie(q, k, v))
        ctx.gqa = q.shape[:-2] != k.shape[:-2]
        output, log_sum = below(_lean, q, k, v, mask, *ctx.options)
        save(ctx, q, k, v, mask, output, log_sum)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        q, k, v, mask, output, log_sum = saved(ctx)
        if torch.is_grad_enabled():
            is_causal, scale, _ = ctx.options
            grads = _attention_grad_by_parts(grad, q, k, v, mask, is_causal, scale, ctx.gqa)
        else:
            grads = below(_lean_grad, grad, q, k, v, mask, output, log_sum, *ctx.options)
        needed = [g if n else None for g, n in zip(grads, ctx.needs_input_grad, strict=False)]
        return (*needed, None, None, None)


def _attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    kind = query.device.type
    if torch.is_autocast_enabled(kind):  # On a device for which torch has no autocast kernel.
        dtype = torch.get_autocast_dtype(kind)
        q, k, v, mask = (_cast(tensor, dtype) for tensor in (query, key, value, attn_mask))
        with torch.autocast(kind, enabled=False):
            return _attention(
                q, k, v, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
    if attn_mask is not None and is_causal and _REFUSAL is not None:
        raise RuntimeError(_REFUSAL)
    is_mask_needed = attn_mask is not None and attn_mask.requires_grad
    if dropout_p > 0.0 or is_mask_needed or has_tangent(query, key, value, attn_mask):
        return _attention_by_parts(
            query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
        )
    if (enable_gqa or query.shape[:-2] == key.shape[:-2]) and is_lean(
        query, key, value, attn_mask, is_causal
    ):
        return _LeanAttention.apply(query, key, value, attn_mask, is_causal, scale)
    return _Attention.apply(query, key, value, attn_mask, is_causal, scale, enable_gqa)


def _refusal_of_a_mask_and_causal() -> str | None:
    """Return how torch refuses a mask beside ``is_causal``: 2.15 does, 2.9 takes both on a CPU."""
    q, mask = torch.ones(1, 1, 1, 1, device="cpu"), torch.ones(1, 1, device="cpu")
    try:
        aten.scaled_dot_product_attention.default(q, q, q, mask, is_causal=True)
    except RuntimeError as error:
        return str(error)
    return None


_REFUSAL = _refusal_of_a_mask_and_causal()


def _cast(tensor: Any, dtype: torch.dtype) -> Any:
    """What autocast makes of an argument; it leaves float64 alone."""
    if tensor is None or not tensor.is_floating_point() or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(dtype)


def _attention_by_parts(
    q: Any, k: Any, v: Any, mask: Any, dropout_p: float, is_causal: bool, scale: Any, gqa: bool
) -> Any:
    """The definition in torch's documentation, for dropout and for masks that need gradients."""
    if gqa:
        k = k.repeat_interleave(q.shape[-3] // k.shape[-3], -3)
        v = v.repeat_interleave(q.shape[-3] // v.shape[-3], -3)
    scores = torch.matmul(q, k.mT) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril()
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(mask.logical_not(), float("-inf"))
    elif mask is not None:
        scores = scores + mask
    weights = torch.dropout(torch.softmax(scores, -1), dropout_p, True)
    return torch.matmul(weights, v)


def _attention_grad_by_parts(
    grad: Any, q: Any, k: Any, v: Any, mask: Any, is_causal: bool, scale: Any, gqa: bool
) -> Any:
    """The gradients of attention, in ops that can be differentiated again."""
    q, k, v = (tensor.view_as(tensor).requires_grad_() for tensor in (q, k, v))
    output = _attention_by_parts(q, k, v, mask, 0.0, is_causal, scale, gqa)
    return torch.autograd.grad(output, (q, k, v), grad, create_graph=True)


WHOLE_OPS = frozenset(
    {
        aten.linear.default,
        aten.matmul.default,
        aten.scaled_dot_product_attention.default,
        _weight_grad,
        _attention_grad,
        _lean,
        _lean_grad,
    }
)


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
