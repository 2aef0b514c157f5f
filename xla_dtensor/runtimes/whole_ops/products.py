"""Linear, matmul and einsum of two tensors, whole: no sharded dims are flattened together.

torch's own kernels reshape batch and sequence together before anything below autograd can see the
op. The backward formulas here are written with ops that are themselves whole; the gradient of a
weight has no name in aten and is ``xla_dtensor::linear_weight_grad``.

An einsum is one matmul. torch's own kernel reshapes the operands to three dims: batch and head
dims become one, and XLA can no longer keep both sharded. Where one operand has at most one dim of
its own, permuting and broadcasting is enough::

    bhqd,bhkd->bhqk     a [b, h, q, d]    @  b [b, h, d, k]
    bsd,dhk->bshk       swapped: the operand with one dim of its own goes to the right
    bshd,de->bshe       a [b, s, h, d]    @  b [d, e]
    bshk,hkd->bsd       a [b, s, (h k)]   @  b [(h k), d]     contracted dims become one
    bsm,bsn->mn         a gradient of a weight: nothing but the contracted dims is there

What does not fit (diagonals, sums of one operand, no dim to contract) is left to torch's kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from string import ascii_letters
from typing import Any

import torch

from xla_dtensor.runtimes.whole_ops.autograd import (
    OneResult,
    below,
    has_tangent,
    save,
    saved,
)

__all__ = ["contract", "einsum", "linear", "matmul", "weight_grad"]

aten: Any = torch.ops.aten


_definitions = torch.library.Library("xla_dtensor", "FRAGMENT")
_definitions.define("linear_weight_grad(Tensor grad, Tensor input) -> Tensor")


@torch.library.impl(_definitions, "linear_weight_grad", "Meta")
def _(grad: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
    return grad.new_empty((grad.shape[-1], input.shape[-1]))


weight_grad = torch.ops.xla_dtensor.linear_weight_grad.default


class Contract(OneResult):
    """``...m,...n->mn``: the product of two tensors over all of their dims but the last."""

    @staticmethod
    def forward(ctx: Any, a: Any, b: Any) -> Any:
        """Compute the product."""
        save(ctx, a, b)
        return below(weight_grad, a, b)

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
    return below(weight_grad, a, b)


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
    """Run one einsum; the kernel that is registered for it.

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


def linear(x: Any, weight: Any, bias: Any = None) -> Any:
    """Run aten's linear; the kernel that is registered for it."""
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


def matmul(a: Any, b: Any) -> Any:
    """Run aten's matmul; the kernel that is registered for it."""
    if has_tangent(a, b):
        return aten.matmul.default.decompose(a, b)
    return _Matmul.apply(a, b)
