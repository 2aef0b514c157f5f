"""einsum of two tensors as one matmul, with no sharded dims flattened together.

torch's own kernel reshapes the operands to three dims: batch and head dims become one, and XLA
can no longer keep both sharded. Where one operand has at most one dim of its own, permuting and
broadcasting is enough::

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

from xla_dtensor.runtimes.whole_autograd import Contract

__all__ = ["einsum"]

aten = torch.ops.aten


@dataclass(frozen=True)
class _Product:
    """An einsum as a matmul: the left operand's dims, then the right one's, then the result's."""

    swapped: bool
    left: tuple[int, ...]
    right: tuple[int, ...]
    contracted: int
    batch: int
    broadcast_dims: int
    result: tuple[int, ...]


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
    a, b = a.permute(product.left), b.permute(product.right)
    if product.contracted == a.ndim - 1 > 1:
        # Several of them may be sharded; none are flattened.
        found: Any = Contract.apply(a.movedim(0, -1), b)
        return found.permute(product.result)
    if product.contracted > 1:
        a = a.flatten(-product.contracted)
        b = b.flatten(product.batch, product.batch + product.contracted - 1)
    for _ in range(product.broadcast_dims):
        b = b.unsqueeze(product.batch)
    return torch.matmul(a, b).permute(product.result)


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
    made = [*batch, *own_a, *own_b]
    return _Product(
        swapped=swapped,
        left=tuple(a.index(letter) for letter in (*batch, *own_a, *contracted)),
        right=tuple(b.index(letter) for letter in (*batch, *contracted, *own_b)),
        contracted=len(contracted),
        batch=len(batch),
        broadcast_dims=len(own_a) - 1 if batch else 0,
        result=tuple(made.index(letter) for letter in out),
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
        hidden = {ndim - len(each) + 3 for ndim, each in zip(ndims, (a, b), strict=True)}
        if not ("..." in a and "..." in b and len(hidden) == 1):
            return None
        free = [letter for letter in ascii_letters if letter not in equation]
        spelled = "".join(free[: max(hidden.pop(), 0)])
        if not arrow:
            # torch puts an ellipsis first.
            out = spelled + _implied((a + b).replace(".", ""))
        a, b, out = (each.replace("...", spelled) for each in (a, b, out))
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
