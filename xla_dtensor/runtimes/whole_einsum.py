"""einsum of two tensors as one matmul, with no dims flattened together.

torch's own kernel reshapes the operands to three dims: batch and head dims become one, and XLA
can no longer keep both sharded. Where each operand's dims are batch, own and one contracted dim,
permuting and broadcasting is enough::

    bhqd,bhkd->bhqk     a [b, h, q, d]  @  b [b, h, d, k]
    bsd,dhk->bshk       swapped: the operand with one dim of its own goes to the right
    bshd,de->bshe       a [b, s, h, d]  @  b [d, e]

What does not fit (several contracted dims, diagonals, sums of one operand, an ellipsis) is left to
torch's kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["einsum"]

aten = torch.ops.aten


@dataclass(frozen=True)
class _Product:
    """An einsum as a matmul: the left operand's dims, then the right one's, then the result's."""

    swapped: bool
    left: tuple[int, ...]
    right: tuple[int, ...]
    broadcast_at: int
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
    b = b.permute(product.right)
    for _ in range(product.broadcast_dims):
        b = b.unsqueeze(product.broadcast_at)
    return torch.matmul(a.permute(product.left), b).permute(product.result)


def _product(equation: str, tensors: Sequence[Any]) -> _Product | None:
    inputs, arrow, out = equation.replace(" ", "").partition("->")
    a, comma, b = inputs.partition(",")
    if not (arrow and comma) or "." in equation or not _fit(a, b, out, tensors):
        return None
    batch = [letter for letter in a if letter in b and letter in out]
    contracted = [letter for letter in a if letter in b and letter not in out]
    own_a = [letter for letter in a if letter not in b]
    own_b = [letter for letter in b if letter not in a]
    if len(contracted) != 1 or not own_a or not own_b or min(len(own_a), len(own_b)) != 1:
        return None
    swapped = len(own_b) > 1
    if swapped:
        a, b, own_a, own_b = b, a, own_b, own_a
    made = [*batch, *own_a, *own_b]
    return _Product(
        swapped=swapped,
        left=tuple(a.index(letter) for letter in (*batch, *own_a, *contracted)),
        right=tuple(b.index(letter) for letter in (*batch, *contracted, *own_b)),
        broadcast_at=len(batch),
        broadcast_dims=len(own_a) - 1 if batch else 0,
        result=tuple(made.index(letter) for letter in out),
    )


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
