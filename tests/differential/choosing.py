"""Which step comes next: choices among what fits the shapes of the pool.

Each choice takes a `Pool` and returns a step, or None where nothing fits. Shapes are found by
running the op on meta tensors, so a program is well-formed before any side runs it.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from tests.differential.op_table import UNARY
from tests.differential.programs import Step

__all__ = ["CHOICES", "Pool", "random_placements"]

IN_PLACE = ("add_", "mul_", "copy_", "sub_")
VIEWS = (
    *("transpose", "permute", "view", "flatten", "unsqueeze", "squeeze", "expand", "split"),
    *("chunk", "narrow", "select", "slice_step", "flip", "cat", "stack", "tril", "cumsum"),
)
LOCAL = (
    *("tanh", "double", "relu", "in_place", "sum", "sum", "mean", "amax", "flip", "softmax"),
    *("transpose", "parts"),
)


class Pool:
    """The tensors made so far, as meta tensors; later ones are chosen more often."""

    def __init__(self, chance: random.Random, mesh_shape: tuple[int, ...]) -> None:
        self.chance, self.mesh_shape, self.tensors = chance, mesh_shape, []

    def pick(self, fits: Callable[[Any], bool] = lambda t: True) -> int | None:
        found = [i for i, t in enumerate(self.tensors) if t.is_floating_point() and fits(t)]
        if not found:
            return None
        return max(self.chance.choice(found), self.chance.choice(found))

    def shape(self, index: int) -> tuple[int, ...]:
        return tuple(self.tensors[index].shape)


def random_placements(
    pool: Pool, shape: tuple[int, ...], replicate: float = 0.3
) -> tuple[str, ...]:
    """One placement per mesh axis; dims of size 1 are not sharded."""
    dims = [d for d, size in enumerate(shape) if size > 1]
    chance, chosen = pool.chance, []
    for _ in pool.mesh_shape:
        whole = not dims or chance.random() < replicate
        chosen.append("R" if whole else f"S{chance.choice(dims)}")
    return tuple(chosen)


def _unary(pool: Pool) -> Step | None:
    index = pool.pick()
    if index is None:
        return None
    return Step("op", pool.chance.choice(sorted(UNARY)), (index,))


def _binary(pool: Pool) -> Step | None:
    a = pool.pick(lambda t: t.ndim > 0)
    if a is None:
        return None
    shape = pool.shape(a)
    b = pool.pick(lambda t: t.shape == shape or t.shape == shape[-1:])
    if b is None:
        return None
    names = ["add", "sub", "mul", "div", "maximum", "where", "lerp"]
    names += ["mse"] if pool.shape(b) == shape else []
    return Step("op", pool.chance.choice(names), (a, b))


def _reduction(pool: Pool) -> Step | None:
    a = pool.pick(lambda t: t.ndim > 0)
    if a is None:
        return None
    ndim, chance = len(pool.shape(a)), pool.chance
    dim, keep = chance.randrange(ndim), chance.random() < 0.5
    name = chance.choice(
        ["sum", "sum", "mean", "amax", "amin", "var", "max_values", "norm", "logsumexp", "argmax"]
    )
    if name in ("sum", "mean", "amax", "amin"):
        dims = tuple(sorted(chance.sample(range(ndim), chance.choice([1, 1, min(2, ndim)]))))
        return Step("op", name, (a,), (dims, keep))
    if name == "var":
        return Step("op", name, (a,), (dim, keep)) if pool.shape(a)[dim] > 1 else None
    return Step("op", name, (a,), (dim,))


def _matmul(pool: Pool) -> Step | None:
    a = pool.pick(lambda t: t.ndim >= 2)
    if a is None:
        return None
    shape, chance = pool.shape(a), pool.chance
    name = chance.choice(["mm", "mm", "linear", "linear_bias", "bmm", "einsum", "partial_matmul"])
    if name in ("mm", "bmm"):
        ndim = 2 if name == "mm" else 3
        b = pool.pick(lambda t: t.ndim == ndim and t.shape[-2] == shape[-1])
        alike = b is not None and (ndim == 2 or pool.shape(b)[0] == shape[0])
        right = name == "mm" or len(shape) == 3
        return Step("op", name, (a, b)) if b is not None and alike and right else None
    if name == "partial_matmul":
        b = pool.pick(lambda t: t.ndim == 2 and t.shape[0] == shape[-1])
        axis = chance.randrange(len(pool.mesh_shape))
        if b is None or len(shape) != 2 or shape[-1] % pool.mesh_shape[axis]:
            return None
        return Step("partial_matmul", "half", (a, b), (axis,))
    b = pool.pick(lambda t: t.ndim == 2 and t.shape[-1] == shape[-1])
    if b is None:
        return None
    if name == "linear_bias":
        rows = pool.shape(b)[0]
        bias = pool.pick(lambda t: t.shape == (rows,))
        return None if bias is None else Step("op", name, (a, b, bias))
    return Step("op", name, (a, b))


def _view(pool: Pool) -> Step | None:
    a = pool.pick(lambda t: t.ndim > 0)
    if a is None:
        return None
    shape, chance = pool.shape(a), pool.chance
    ndim, dim = len(shape), chance.randrange(len(shape))
    size = shape[dim]
    name = chance.choice(VIEWS)
    if name == "transpose" and ndim > 1:
        return Step("op", name, (a,), tuple(chance.sample(range(ndim), 2)))
    if name == "permute" and ndim > 1:
        return Step("op", name, (a,), (tuple(chance.sample(range(ndim), ndim)),))
    if name == "view" and size % 2 == 0:
        cut = (2, size // 2) if chance.random() < 0.5 else (size // 2, 2)
        return Step("op", name, (a,), ((*shape[:dim], *cut, *shape[dim + 1 :]),))
    if (name == "flatten" and ndim > 1) or (name == "slice_step" and shape[0] > 1):
        return Step("op", name, (a,))
    if name == "unsqueeze" or name == "cumsum":
        return Step("op", name, (a,), (dim,))
    if name in ("squeeze", "expand"):
        ones = [d for d, s in enumerate(shape) if s == 1]
        if not ones:
            return None
        if name == "squeeze":
            return Step("op", name, (a,), (ones[0],))
        return Step(
            "op", name, (a,), (tuple(4 if d == ones[0] else s for d, s in enumerate(shape)),)
        )
    if name in ("split", "chunk") and size % 2 == 0:
        given = size // 2 if name == "split" else 2
        return Step("op", name, (a,), (given, dim, chance.randrange(2)))
    if name == "narrow" and size > 2:
        return Step("op", name, (a,), (dim, 1, size // 2))
    if name == "select":
        return Step("op", name, (a,), (dim, size // 2))
    if name == "flip":
        return Step("op", name, (a,), (dim,))
    if name in ("cat", "stack"):
        b = pool.pick(lambda t: t.shape == shape)
        return None if b is None else Step("op", name, (a, b), (dim,))
    return Step("op", name, (a,)) if name == "tril" and ndim >= 2 else None


def _network(pool: Pool) -> Step | None:
    chance = pool.chance
    name = chance.choice(["softmax", "log_softmax", "layer_norm", "embedding", "masked_fill"])
    if name == "embedding":
        rows = [i for i, t in enumerate(pool.tensors) if not t.is_floating_point() and i < 6]
        if not rows:
            return None
        table = pool.pick(lambda t: t.ndim == 2 and t.shape[0] >= 6)
        return None if table is None else Step("op", name, (rows[0], table))
    a = pool.pick(lambda t: t.ndim > 0)
    if a is None:
        return None
    if name == "layer_norm":
        last = pool.shape(a)[-1]
        weight = pool.pick(lambda t: t.shape == (last,))
        return None if weight is None else Step("op", name, (a, weight, weight))
    if name == "masked_fill":
        return Step("op", name, (a,), (0.25,))
    return Step("op", name, (a,), (chance.randrange(len(pool.shape(a))),))


def _other(pool: Pool) -> Step | None:
    a = pool.pick(lambda t: t.ndim > 0)
    if a is None:
        return None
    name = pool.chance.choice(["in_place_scale", "in_place_zero_row", "dtype", "zeros_like"])
    return Step("op", name, (a,))


def _in_place(pool: Pool) -> Step | None:
    a = pool.pick(lambda t: t.ndim > 0)
    if a is None:
        return None
    shape = pool.shape(a)
    b = pool.pick(lambda t: t.shape == shape)
    return None if b is None else Step("op", "in_place", (a, b), (pool.chance.choice(IN_PLACE),))


def _redistribute(pool: Pool) -> Step | None:
    a = pool.pick()
    if a is None:
        return None
    return Step("redistribute", "", (a,), (random_placements(pool, pool.shape(a)),))


def _strided(pool: Pool) -> Step | None:
    if len(pool.mesh_shape) != 2:
        return None
    a = pool.pick(lambda t: t.ndim > 0 and t.shape[0] % 8 == 0)
    if a is None:
        return None
    return Step("redistribute", "", (a,), ((f"_S0:{pool.mesh_shape[1]}", "S0"),))


def _whole(pool: Pool) -> Step | None:
    a = pool.pick()
    if a is None:
        return None
    return Step(pool.chance.choice(["full_tensor", "full_tensor", "plain_beside"]), "", (a,))


def _local(pool: Pool) -> Step | None:
    a = pool.pick(lambda t: t.ndim > 0)
    if a is None:
        return None
    shape, chance = pool.shape(a), pool.chance
    lying = random_placements(pool, shape)
    name = chance.choice(LOCAL)
    if name in ("tanh", "double", "relu", "in_place"):
        return Step("local", name, (a,), (lying, lying, ()))
    sizes = list(shape)
    for size, token in zip(pool.mesh_shape, lying, strict=True):
        if token != "R":
            if sizes[int(token[1:])] % size:
                return None
            sizes[int(token[1:])] //= size
    if name == "parts":
        if "R" not in lying:
            return None
        kind = chance.choice(["sum", "sum", "avg", "max"])
        return Step(
            "local", "double", (a,), (lying, tuple(t.replace("R", f"P{kind}") for t in lying), ())
        )
    dim = chance.randrange(len(shape))
    if name in ("flip", "softmax"):
        return Step("local", name, (a,), (lying, lying, (dim,)))
    if name == "transpose":
        swapped = {"S0": "S1", "S1": "S0"}
        after = tuple(swapped.get(t, t) for t in lying)
        return Step("local", name, (a,), (lying, after, ())) if len(shape) > 1 else None
    kind = {"sum": "Psum", "mean": "Pavg", "amax": "Pmax"}[name]
    after = tuple(
        kind if t == f"S{dim}" else t if t == "R" else f"S{int(t[1:]) - (int(t[1:]) > dim)}"
        for t in lying
    )
    return Step("local", name, (a,), (lying, after, (dim,)))


CHOICES: tuple[tuple[Callable[[Pool], Step | None], int], ...] = (
    (_unary, 12),
    (_binary, 14),
    (_reduction, 12),
    (_matmul, 12),
    (_view, 16),
    (_network, 9),
    (_other, 3),
    (_in_place, 5),
    (_redistribute, 14),
    (_strided, 1),
    (_whole, 4),
    (_local, 12),
)
