"""Draws programs: which ops, on what, how it lies, what is written to, what is differentiated.

`generate(seed)` proposes one line after the other and runs each on plain tensors. What plain torch
refuses is taken back, but now and then it stays as the last line: then DTensors have to refuse it
too. So a line maker need not know when an op is legal; it proposes what is worth trying.

Line makers, with how often each is drawn:

| | |
|---|---|
| `_op` | an op of op_db on leaves of its own or on what the program has, in any dtype |
| `_op_in_place` | its in-place form |
| `_view` | a view, or what looks like one: of what the program has |
| `_write` | an in-place op on a view, an assignment to a slice, to rows by index, by a mask |
| `_index` | rows by index, by a mask, both with slices |
| `_mixed` | a pointwise op of two dtypes, or of a tensor and a number |
| `_cast` | another dtype |
| `_reduction` | a sum, a mean and the like, over any dims, none among them |
| `_reshard` | redistribute, full_tensor, to_local and from_local, also with a reduction pending |

Now and then an index is out of range, a dim is one that a tensor does not have, or an argument of
the program is a view of another one.
"""

from __future__ import annotations

import random
import re
import warnings
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch

from tests.drawn import ops
from tests.drawn.draw import Draw, tuple_text
from tests.drawn.programs import PLAIN_WORDS, Leaf, Mesh, Program, run

__all__ = ["generate", "generate_call", "generate_refused", "generate_selected"]

SHAPES = ((8,), (2, 4), (4, 2), (2, 2, 2), (8, 1), (2, 2, 2, 1), (1,), (2, 3), (3,))
SHAPE_WEIGHTS = (4, 8, 3, 4, 2, 2, 1, 2, 1)
DTYPE_WEIGHTS = (8, 5, 3, 1, 4, 3, 4, 3, 1, 2, 3, 3)
MOST_LINES = 8
BAD_SHARE = 0.05
VIEW_SHARE = 0.2  # of compiled programs, those that take a view of an argument beside it
FORWARD_SHARE = 0.08  # of those that are differentiated
MIXED = (
    *("add", "sub", "mul", "div", "true_divide", "floor_divide", "remainder", "fmod", "pow"),
    *("maximum", "minimum", "fmax", "fmin", "eq", "ne", "lt", "le", "gt", "ge", "atan2", "hypot"),
    *("bitwise_and", "bitwise_or", "bitwise_xor", "logical_and", "logical_or", "logical_xor"),
    *("copysign", "xlogy", "logaddexp", "nextafter", "heaviside", "float_power", "rsub", "gcd"),
    *("lcm", "bitwise_left_shift", "bitwise_right_shift", "ldexp", "isclose", "dist"),
)
IN_PLACE = (
    *("add_", "sub_", "mul_", "div_", "copy_", "pow_", "remainder_", "eq_", "maximum", "clamp_"),
    *("logical_or_", "fmod_", "lt_", "bitwise_and_", "floor_divide_"),
)
_OF_SORTED = ("bucketize", "searchsorted")
CASTS = {
    "byte": torch.uint8,
    "char": torch.int8,
    "short": torch.int16,
    "int": torch.int32,
    "long": torch.int64,
}
NUMBERS = ("2", "-3", "0", "0.5", "-1.5", "True", "1j", "1e-3", "7", "255")


# ------------------------------------------------------------------ line makers


def _call(draw: Draw, names_of_ops: Sequence[str]) -> tuple[ops.Call, dict[int, str]] | None:
    """A call of one of some ops, and a name for each of its tensors: one it has, or a new leaf.

    Of a few that are drawn, the first that takes a tensor that the program has.
    """
    chance = draw.chance
    has = {(draw.value(n).shape, draw.value(n).dtype) for n in draw.results if draw.is_tensor(n)}
    call = None
    for _ in range(5 if has else 1):
        name = chance.choice(names_of_ops)
        dtype = _dtype(draw, name)
        calls = () if dtype is None else ops.calls_of(name, dtype, chance.randrange(4))
        sampled = chance.sample(calls, min(8, len(calls)))
        fits = [c for c in sampled if any((t.shape, t.dtype) in has for t in c.tensors)]
        call = (fits or sampled or [call])[0]
        if fits:
            break
    if call is None:
        return None
    names: dict[int, str] = {}
    for tensor in call.tensors:
        is_index = not (tensor.is_floating_point() or tensor.is_complex())
        there = None
        if chance.random() < (0.3 if is_index else 0.8):
            there = draw.pick(lambda t, s=tensor: (t.shape, t.dtype) == (s.shape, s.dtype))
        is_norm = "batch_norm" in call.name or "instance_norm" in call.name
        if (is_norm or call.name == "masked_scatter") and there in names.values():
            there = None  # not one tensor as two that are written or read meanwhile: that is open
        if call.name in _OF_SORTED:
            there = None  # what a search among numbers without order finds is open
        names[id(tensor)] = there or draw.leaf(tensor, may_be_plain=tensor is not call.source)
    return call, names


def _is_written_in_no_order(target: torch.Tensor) -> bool:
    """Whether elements share a place, as in windows of unfold: the last write is open in torch."""
    places = torch.zeros(target.shape, dtype=torch.int64)
    for dim, (size, stride) in enumerate(zip(target.shape, target.stride(), strict=True)):
        steps = torch.arange(size) * stride
        places += steps.reshape([-1 if d == dim else 1 for d in range(target.dim())])
    return places.unique().numel() < target.numel()


def _dtype(draw: Draw, name: str) -> torch.dtype | None:
    """A dtype that the op takes: one that the program has, if it can."""
    takes = ops.find_op(name).dtypes
    present = [draw.value(n).dtype for n in draw.results if draw.is_tensor(n)]
    present = [dtype for dtype in present if dtype in takes]
    if present and draw.chance.random() < 0.7:
        return draw.chance.choice(present)
    pairs = [(d, w) for d, w in zip(ops.DTYPES, DTYPE_WEIGHTS, strict=True) if d in takes]
    if not pairs:
        return None
    return draw.chance.choices([d for d, _ in pairs], [w for _, w in pairs])[0]


def _op(draw: Draw) -> bool:
    found = _call(draw, ops.drawn_ops())
    if found is None:
        return False
    call, names = found
    made = CASTS.get(call.name)
    if made is not None and not _has_a_value_in(draw.value(names[id(call.source)]), made):
        return False
    text = call.text(lambda t: names[id(t)])
    if draw.chance.random() < BAD_SHARE:
        return draw.propose(_bad(draw, call, names) or text, is_bad=True)
    return draw.propose(text)


def _bad(draw: Draw, call: ops.Call, names: dict[int, str]) -> str | None:
    """The call with an index out of range, or with a dim that there is not."""
    indices = [t for t in call.tensors if t.dtype == torch.int64 and t.numel()]
    if indices and call.tensors[0].dtype != torch.int64:
        value = draw.chance.choice(indices)
        spoiled = value.clone().reshape(-1)
        spoiled[draw.chance.randrange(value.numel())] = draw.chance.choice([97, -98, 11])
        names[id(value)] = draw.leaf(spoiled.reshape(value.shape), may_be_plain=False)
        return call.text(lambda t: names[id(t)])
    text = call.text(lambda t: names[id(t)])
    spoiled_text = re.sub(r"\bdim=-?\d+", f"dim={draw.chance.choice([4, 6, -7])}", text)
    return None if spoiled_text == text else spoiled_text


def _op_in_place(draw: Draw) -> bool:
    found = _call(draw, _in_place_ops())
    if found is None or not isinstance(found[0].source, torch.Tensor):
        return False
    call, names = found
    target = names[id(call.source)]
    if _is_written_in_no_order(draw.value(target)):
        return False
    if draw.value(target).is_leaf:  # a leaf that requires grad cannot be written to
        copy = draw.name()
        draw.lines.append(f"{copy} = {target}.clone()")
        exec(draw.lines[-1], draw.scope)
        draw.results.append(copy)
        names[id(call.source)] = copy
    return draw.propose(call.text(lambda t: names[id(t)], in_place=True), is_statement=True)


def _in_place_ops() -> list[str]:
    return [n for n in ops.drawn_ops() if ops.find_op(n).inplace_variant is not None]


def _view_text(draw: Draw, name: str) -> str:
    """A view of a tensor, or what looks like one."""
    tensor, chance = draw.value(name), draw.chance
    shape, ndim = list(tensor.shape), tensor.dim()
    dim = chance.randrange(-ndim, ndim) if ndim else 0
    size = shape[dim] if ndim else 1
    start = chance.randint(0, max(size - 1, 0))
    length = (
        chance.randint(0, size - start) if chance.random() < 0.1 else max(size - start, 1) // 2 or 1
    )
    other = chance.randrange(-ndim, ndim) if ndim else 0
    low, high = sorted((dim % max(ndim, 1), other % max(ndim, 1)))
    step = chance.choice([1, 2, 2, 3])
    slices = [
        chance.choice([":", ":", f"{start}:", f"::{step}", f"{-length or ''}:", f"{start}:{start}"])
        for _ in shape
    ]
    position = chance.choice([0, -1, start]) if size else 0
    forms = [
        f"{name}.transpose({dim}, {other})",
        f"{name}.movedim({dim}, {other})",
        f"{name}.t()",
        f"{name}.mT",
        f"{name}.permute({tuple_text(chance.sample(range(ndim), ndim))})",
        f"{name}.flatten()",
        f"{name}.flatten({low}, {high})",
        f"{name}.reshape(-1)",
        f"{name}.contiguous()",
        f"{name}.t().contiguous()",
        f"{name}.unsqueeze({dim})",
        f"{name}.squeeze({dim})",
        f"{name}.squeeze()",
        f"{name}.narrow({dim}, {start}, {length})",
        f"{name}.select({dim}, {position})",
        f"{name}[{', '.join(slices)}]" if slices else f"{name}[...]",
        f"{name}[..., {position}]",
        f"{name}[{position}]",
        f"{name}[None, ..., None]",
        f"{name}[..., ::{step}]",
        f"{name}.expand({', '.join(map(str, [2, *shape]))})",
        f"{name}.expand_as({name})",
        f"{name}.diagonal({chance.choice([-1, 0, 1])}, {dim}, {other})",
        f"{name}.unfold({dim}, {max(length, 1)}, {step})",
        f"{name}.split({max(length, 1)}, {dim})",
        f"{name}.chunk(2, {dim})",
        f"{name}.unbind({dim})",
        f"{name}.unflatten({dim}, (-1, {chance.choice([1, 2, 3, size])}))",
        f"{name}.view({tuple_text([*shape[::-1]])})",
        f"{name}.reshape({tuple_text([*shape[::-1]])})",
        f"{name}.view({tuple_text([-1, *shape[1:]])})",
        f"{name}.detach()",
        f"{name}.clone()",
        f"{name}.flip({dim})",
        f"{name}.roll({start}, {dim})",
        f"{name}.as_strided({tuple_text([max(size // 2, 1), 2])}, (2, 1))",
    ]
    if tensor.is_complex():
        forms += [f"{name}.real", f"{name}.imag", f"torch.view_as_real({name})", f"{name}.conj()"]
    return chance.choice(forms)


def _view(draw: Draw) -> bool:
    name = draw.pick()
    return name is not None and draw.propose(_view_text(draw, name))


def _index_text(draw: Draw, name: str) -> str:
    """What stands in the brackets: rows by index or by a mask, beside slices."""
    tensor, chance = draw.value(name), draw.chance
    shape = list(tensor.shape)
    size = shape[0] if shape else 1
    bound = size if chance.random() < 0.9 else size + 2
    rows = [
        chance.randrange(-size, bound) if bound > -size else 0
        for _ in range(chance.choice([1, 2, 3, 5]))
    ]
    if not size:
        rows = []
    mask = [chance.random() < 0.5 for _ in range(size)]
    many = f"torch.tensor({rows}, dtype=torch.int64)"
    two = f"torch.tensor({rows[:2]}, dtype=torch.int64)"
    forms = [
        f"[{many}]",
        f"[{rows}]",
        f"[torch.tensor({rows[0] if rows else 0})]",
        f"[torch.tensor({mask})]",
        f"[..., torch.tensor({rows[:1]}, dtype=torch.int64)]",
        f"[{rows}, {chance.randint(0, size)}:]",
        f"[{two}, {two}]",
        f"[{many}[:, None], {many}]",
        f"[{name} > {name}.real.mean()]" if tensor.is_complex() else f"[{name} > 0]",
        f"[:, {many}, None]",
    ]
    return chance.choice(forms)


def _index(draw: Draw) -> bool:
    name = draw.pick(lambda t: t.dim() > 0)
    return name is not None and draw.propose(name + _index_text(draw, name))


def _write(draw: Draw) -> bool:
    """Write into a view, into a slice, or by index."""
    chance = draw.chance
    name = draw.pick()
    if name is None:
        return False
    if draw.value(name).is_leaf and draw.value(name).requires_grad:
        copy = draw.name()
        draw.lines.append(f"{copy} = {name}.clone()")
        exec(draw.lines[-1], draw.scope)
        draw.results.append(copy)
        name = copy
    is_view = chance.random() < 0.7
    target = _view_text(draw, name) if is_view else name
    try:
        shown = eval(target, draw.scope)
    except Exception:
        return False
    if not isinstance(shown, torch.Tensor):
        target, shown = f"{target}[0]", shown[0] if len(shown) else None
    if not isinstance(shown, torch.Tensor) or _is_written_in_no_order(shown):
        return False
    fits = (shown.shape, shown.shape[1:], shown.shape[-1:])
    # PyTorch gives whole numbers that are written from what has a gradient a graph, and no use.
    has_graph = shown.is_floating_point() or shown.is_complex()
    fitting = draw.pick(lambda t: t.shape in fits and (has_graph or not t.requires_grad))
    number = chance.choice(NUMBERS)
    operand = fitting if fitting is not None and chance.random() < 0.6 else number
    index = _index_text(draw, name) if draw.value(name).dim() else "[...]"
    forms = [
        f"{target}.{chance.choice([n for n in IN_PLACE if n.endswith('_')])}({operand})",
        f"{target}.{chance.choice([n for n in IN_PLACE if n.endswith('_')])}({operand})",
        f"{target}.zero_()",
        f"{target}.fill_({number})",
        f"{name}{index} = {operand}",
        f"{target}[...] = {operand}",
        f"{target}[0] = {operand}",
        f"{target}[1:] = {operand}",
        f"{target}[..., ::2] += {number}",
        f"{target}.masked_fill_({target} == {number}, {number})",
        f"{target}.fill_diagonal_({number})",
        f"{target}.t_()" if not is_view else f"{target}.neg_()",
        f"{target}.unsqueeze_(0)" if not is_view else f"{target}.abs_()",
    ]
    return draw.propose(chance.choice(forms), is_statement=True)


def _mixed(draw: Draw) -> bool:
    """A pointwise op of two dtypes, or of a tensor and a number."""
    chance = draw.chance
    left = draw.pick()
    if left is None:
        return False
    right = chance.choice(NUMBERS)
    way = chance.random()
    shape = draw.value(left).shape
    if way < 0.4:
        right = draw.pick(lambda t: t.shape in (shape, shape[-1:], ())) or right
    elif way < 0.8:
        dtype = chance.choices(ops.DTYPES, DTYPE_WEIGHTS)[0]
        value = (torch.randn(shape, generator=_torch_random(chance)) * 5).round()
        right = draw.leaf(_cast_to(value, dtype))
    name = chance.choice(MIXED)
    if name not in dir(torch):
        return False
    first, second = (left, right) if chance.random() < 0.8 else (right, left)
    if first in NUMBERS and name not in ("pow", "sub", "rsub", "add", "mul", "div"):
        first, second = second, first
    if chance.random() < 0.2:
        first = f"torch.where({left} == {left}.clone().fill_(7), {left}, {right})"
        return draw.propose(first)
    options = ""
    if name == "div" and chance.random() < 0.5:
        options = ", rounding_mode=" + chance.choice(["'trunc'", "'floor'"])
    return draw.propose(f"torch.{name}({first}, {second}{options})")


def _cast_to(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if dtype == torch.bool:
        return value > 0
    if dtype == torch.uint8:
        return value.abs().to(dtype)
    return value.to(dtype)


def _torch_random(chance: random.Random) -> torch.Generator:
    generator = torch.Generator()
    generator.manual_seed(chance.randrange(2**31))
    return generator


def _cast(draw: Draw) -> bool:
    name = draw.pick()
    if name is None:
        return False
    dtype = draw.chance.choices(ops.DTYPES, DTYPE_WEIGHTS)[0]
    return _has_a_value_in(draw.value(name), dtype) and draw.propose(f"{name}.to({dtype})")


def _has_a_value_in(value: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether C++ says what a cast gives: an integer that does not fit a float's value is open."""
    is_open = value.is_floating_point() or value.is_complex()
    if not is_open or dtype.is_floating_point or dtype.is_complex or dtype == torch.bool:
        return True
    real, limits = torch.view_as_real(value) if value.is_complex() else value, torch.iinfo(dtype)
    first, end = float(limits.min) - 1, float(limits.max) + 1  # of int64 no Python int compares
    return bool((real.isfinite() & (real > first) & (real < end)).all())


REDUCTIONS = ("sum", "mean", "any", "all", "amax", "prod", "std", "argmax", "logsumexp", "nansum")


def _reduction(draw: Draw) -> bool:
    name = draw.pick()
    if name is None:
        return False
    dims = range(-draw.value(name).dim(), draw.value(name).dim())
    one = draw.chance.choice(dims) if dims else 0
    few = tuple_text(draw.chance.sample(dims, min(2, len(dims))))
    over = draw.chance.choice(
        ["", "dim=()", f"dim={one}", f"dim={one}, keepdim=True", f"dim={few}"]
    )
    return draw.propose(f"{name}.{draw.chance.choice(REDUCTIONS)}({over})")


def _reshard(draw: Draw) -> bool:
    name = draw.pick()
    if name is None:
        return False
    way = draw.chance.random()
    if way > 0.93:
        return draw.propose(f"forget({name})")
    if way < 0.2:
        return draw.propose(f"whole({name})")
    if way < 0.35:
        return draw.propose(f"parts({name})")
    if way < 0.5:
        return _pending(draw, name)
    shape, sizes = draw.value(name).shape, draw.mesh.shape
    if len(sizes) == 2 and shape and shape[0] % 8 == 0 and draw.chance.random() < 0.2:
        return draw.propose(f"redistribute({name}, '_S0:{sizes[1]}', 'S0')")
    lying = ", ".join(map(repr, draw.placements(draw.value(name).shape)))
    return draw.propose(f"redistribute({name}, {lying})")


def _pending(draw: Draw, name: str) -> bool:
    """A tensor of which each device has a part, or a copy: a reduction is pending."""
    value = draw.value(name)
    if value.dtype == torch.bool:
        return False
    kinds = {"sum", "avg", "max", "min"}
    if value.is_complex():
        kinds -= {"max", "min"}
    elif not value.is_floating_point():
        kinds -= {"sum", "avg"}
    axis = draw.chance.randrange(len(draw.mesh.shape))
    return draw.propose(f"pending({name}, {draw.chance.choice(sorted(kinds))!r}, {axis})")


MAKERS: tuple[tuple[Callable[[Draw], bool], int], ...] = (
    (_op, 45),
    (_op_in_place, 7),
    (_view, 14),
    (_index, 6),
    (_write, 12),
    (_mixed, 14),
    (_cast, 3),
    (_reduction, 5),
    (_reshard, 9),
)


# ------------------------------------------------------------------ programs


def _mesh(chance: random.Random) -> Mesh:
    shape = chance.choices(SHAPES, SHAPE_WEIGHTS)[0]
    order = None
    if len(shape) == 2 and shape in ((2, 4), (4, 2)) and chance.random() < 0.3:
        order = tuple(torch.arange(8).reshape(shape[::-1]).T.reshape(-1).tolist())
    names = ("a", "b", "c", "d")[: len(shape)] if chance.random() < 0.5 else None
    return Mesh(shape, order, names)


def _quietly(function: Callable[..., Any]) -> Callable[..., Any]:
    """Without warnings: where they are errors, other programs would be drawn."""

    @wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return function(*args, **kwargs)

    return called


@_quietly
def generate(seed: int) -> Program:
    """Draw the program of a seed.

    Args:
        seed: Decides everything, with the version of torch: op_db's samples are its own.

    Returns:
        A program that plain torch runs, or refuses in its last line.
    """
    chance = random.Random(f"program {seed}")
    draw = Draw(chance, _mesh(chance))
    compiled = chance.random() < 0.5
    number = chance.randint(1, MOST_LINES)
    if compiled and chance.random() < VIEW_SHARE:
        _argument_and_view(draw)
    _op(draw)
    makers, weights = zip(*MAKERS, strict=True)
    tries = 0
    while len(draw.lines) < number and not draw.ended and tries < 40:
        tries += 1
        chance.choices(makers, weights)[0](draw)
    if not draw.leaves:
        draw.leaf(torch.arange(6.0))
    if not draw.ended:
        _differentiate(draw)
    _keep_what_is_used(draw)
    return Program(
        draw.mesh,
        tuple(draw.leaves),
        tuple(draw.lines),
        tuple(draw.results),
        compiled,
        tuple(draw.before),
    )


def _argument_and_view(draw: Draw) -> None:
    """Begin with a tensor and a view of it, made before: both are arguments."""
    shape = draw.chance.choice([(4,), (8,), (4, 6), (2, 3, 4)])
    values = torch.randn(shape, generator=_torch_random(draw.chance))
    draw.leaves.append(Leaf("x0", values, draw.placements(shape)))
    draw.scope["x0"] = values.clone()
    draw.results.append("x0")
    text = _view_text(draw, "x0")
    try:
        made = eval(text, draw.scope)
    except Exception:
        return
    if isinstance(made, torch.Tensor):
        name = draw.name()
        draw.before.append(f"{name} = {text}")
        draw.scope[name] = made
        draw.results.append(name)
        _write(draw)


@_quietly
def generate_call(
    name: str, dtype: torch.dtype, seed: int, second: torch.dtype | None = None
) -> Program | None:
    """Draw one call of an op in a dtype.

    Args:
        name: Of the op in op_db.
        dtype: Of its first argument.
        seed: Decides the sample, the mesh, how its tensors lie.
        second: The dtype that the second argument is cast to.

    Returns:
        A program; None where op_db has no sample, or plain torch refuses it.
    """
    chance = random.Random(f"call {name} {dtype} {second} {seed}")
    calls = ops.calls_of(name, dtype, seed)
    for call in chance.sample(calls, min(5, len(calls))):
        draw = Draw(chance, _mesh(chance))
        names = {}
        for number, tensor in enumerate(call.tensors):
            value = tensor if number != 1 or second is None else _cast_to(tensor, second)
            names[id(tensor)] = draw.leaf(value, may_be_plain=False)
        if draw.propose(call.text(lambda t, names=names: names[id(t)])) and not draw.ended:
            _differentiate(draw)
            compiled = chance.random() < 0.5
            return Program(
                draw.mesh, tuple(draw.leaves), tuple(draw.lines), tuple(draw.results), compiled
            )
    return None


@_quietly
def generate_refused(name: str, number: int, seed: int = 0) -> Program | None:
    """Draw a call that plain torch refuses.

    Args:
        name: Of the op in op_db.
        number: Which of the calls that op_db says are refused.
        seed: Decides the mesh and how the tensors lie.

    Returns:
        A program; None where op_db has no such call, or plain torch takes it.
    """
    chance = random.Random(f"refused {name} {number} {seed}")
    calls = ops.refused_calls_of(name)
    if number >= len(calls):
        return None
    draw = Draw(chance, _mesh(chance))
    names = {id(t): draw.leaf(t, may_be_plain=False) for t in calls[number].tensors}
    draw.propose(calls[number].text(lambda t: names[id(t)]), is_bad=True)
    if not draw.ended:
        return None
    compiled = chance.random() < 0.5
    return Program(draw.mesh, tuple(draw.leaves), tuple(draw.lines), tuple(draw.results), compiled)


@_quietly
def generate_selected(name: str, dtype: torch.dtype, seed: int) -> Program | None:
    """Draw a compiled step that calls an op with what a mask selects: with ``x0[m]``.

    Args:
        name: Of the op in op_db.
        dtype: Of its first argument.
        seed: Decides the sample, the mask, the mesh, what is done with the result.

    Returns:
        A program; None where op_db has no sample with rows, or plain torch refuses it.
    """
    chance = random.Random(f"selected {name} {dtype} {seed}")
    calls = [c for c in ops.calls_of(name, dtype, seed) if c.tensors and c.tensors[0].dim()]
    for call in chance.sample(calls, min(5, len(calls))):
        draw = Draw(chance, _mesh(chance))
        rows = call.tensors[0].shape[0]
        size = rows + chance.randint(1, 4)
        mask = torch.zeros(size, dtype=torch.bool)
        mask[chance.sample(range(size), rows)] = True
        shape = (2, size // 2) if size % 2 == 0 and chance.random() < 0.4 else (size,)
        draw.leaves.append(Leaf("m", mask.reshape(shape), draw.placements(shape)))
        draw.scope["m"] = mask.reshape(shape).clone()
        draw.results.append("m")
        names = {}
        for number, tensor in enumerate(call.tensors):
            has_rows = tensor.shape[:1] == (rows,) and (number == 0 or chance.random() < 0.7)
            names[id(tensor)] = (_selected if has_rows else Draw.leaf)(draw, tensor)
        differentiates = any(leaf.requires_grad for leaf in draw.leaves)
        written = [x.name for x in draw.leaves if not x.requires_grad and x.placements]
        written = [name for name in written if name != "m" or not differentiates]  # it is saved
        if written and chance.random() < 0.3:
            draw.propose(f"{chance.choice(written)}.zero_()", is_statement=True)
        if not draw.propose(call.text(lambda t, names=names: names[id(t)])) or draw.ended:
            continue
        for _ in range(chance.randrange(3)):
            if not draw.ended:
                chance.choice([_reduction, _reduction, _mixed, _cast])(draw)
        if not draw.ended:
            _differentiate_squares(draw)
        lines, results = tuple(draw.lines), tuple(draw.results)
        return Program(draw.mesh, tuple(draw.leaves), lines, results, compiled=True)
    return None


def _selected(draw: Draw, value: torch.Tensor) -> str:
    """Add a leaf of which the mask ``m`` selects a value; return the name of what it selects."""
    mask, leaf = draw.value("m"), f"x{len(draw.leaves)}"
    shape = mask.shape + value.shape[1:]
    others = torch.randn(shape, generator=_torch_random(draw.chance)) * 9
    rows = _cast_to(others, value.dtype)
    rows[mask] = value.detach()
    differentiable = value.is_floating_point() or value.is_complex()
    requires_grad = differentiable and draw.chance.random() < 0.6
    draw.leaves.append(Leaf(leaf, rows, draw.placements(shape), requires_grad))
    draw.scope[leaf] = rows.clone().requires_grad_(requires_grad)
    draw.propose(f"{leaf}[m]")
    return draw.results[-1]


def _differentiate_squares(draw: Draw) -> None:
    """Add lines for the gradients of the last result's square: it may be a selection."""
    value = draw.scope[draw.results[-1]]
    leaves = [leaf.name for leaf in draw.leaves if leaf.requires_grad]
    if not leaves or not isinstance(value, torch.Tensor) or not _has_graph(value):
        return
    names = [f"g{i}" for i in range(len(leaves))]
    lines = [f"loss = ({draw.results[-1]} ** 2).sum()"]
    lines += [f"{', '.join(names)}, = gradients(loss, [{', '.join(leaves)}])"]
    if not value.is_complex() and all(draw.propose(x, is_statement=True) for x in lines):
        draw.results += names


def _has_graph(value: torch.Tensor) -> bool:
    try:
        return value.requires_grad and not value.is_leaf
    except RuntimeError:  # one of several views, of whose base another part was written to
        return False


def _differentiate(draw: Draw) -> None:
    """Add lines for the gradients of some of the results, now and then those of second order."""
    chance = draw.chance
    results = [n for n in draw.results if draw.is_tensor(n)]
    results = [n for n in results if _has_graph(draw.value(n))]
    leaves = [leaf.name for leaf in draw.leaves if leaf.requires_grad]
    if not results or not leaves or chance.random() < 0.2:
        return
    if chance.random() < FORWARD_SHARE:
        _push_forward(draw, results[-3:], leaves)
        return
    chosen = results[-3:] if chance.random() < 0.7 else [chance.choice(results)]
    pairs: list[str] = []
    lines, results_before = len(draw.lines), len(draw.results)
    for name in chosen:
        value = draw.value(name)
        made = torch.randn(value.shape, generator=_torch_random(chance), dtype=torch.float64)
        weight = f"x{len(draw.leaves)}"
        draw.leaves.append(Leaf(weight, made.to(value.dtype), draw.placements(value.shape)))
        draw.scope[weight] = made.to(value.dtype)
        pairs += [name, weight]
    again = chance.random() < 0.2
    try:
        exec(line := f"loss = total({', '.join(pairs)})", draw.scope)
        draw.lines.append(line)
        names = [f"g{i}" for i in range(len(leaves))]
        seconds = [f"h{i}" for i in range(len(leaves))]
        asked = f"[{', '.join(leaves)}]"
        line = f"{', '.join(names)}, = gradients(loss, {asked}{', True' if again else ''})"
        exec(line, draw.scope)
        draw.lines.append(line)
        draw.results += names
        if not again:
            return
        named = [n for n in names if draw.scope[n] is not None and draw.scope[n].requires_grad]
        if not named:
            return
        line = f"loss2 = total({', '.join(f'{n}, {n}.conj()' for n in named)})"
        exec(line, draw.scope)
        line2 = f"{', '.join(seconds)}, = gradients(loss2, {asked})"
        exec(line2, draw.scope)
        draw.lines += [line, line2]
        draw.results += seconds
    except Exception:  # torch has no derivative of it
        if "gradients" not in draw.lines[-1]:
            del draw.lines[lines:], draw.results[results_before:]


def _push_forward(draw: Draw, results: Sequence[str], leaves: Sequence[str]) -> None:
    """Differentiate in forward mode: give the leaves tangents, and read those of the results."""
    first, last, made = [], [], []
    for name in leaves:
        value = draw.value(name)
        weight = f"x{len(draw.leaves) + len(made)}"
        numbers = torch.randn(
            value.shape, generator=_torch_random(draw.chance), dtype=torch.float64
        )
        made.append(Leaf(weight, numbers.to(value.dtype), draw.placements(value.shape)))
        first.append(f"d{name} = dual({name}, {weight})")
    pattern = re.compile(rf"\b({'|'.join(leaves)})\b")
    body = [pattern.sub(r"d\1", line) for line in draw.lines]
    last = [f"t{i} = tangent({name})" for i, name in enumerate(results)]
    names = [f"t{i}" for i in range(len(results))]
    program = Program(
        draw.mesh,
        (*draw.leaves, *made),
        (*first, *body, *last),
        tuple(names),
        before=tuple(draw.before),
    )
    values = [leaf.value.clone().requires_grad_(leaf.requires_grad) for leaf in program.leaves]
    if run(program, values, PLAIN_WORDS).error is not None:
        return  # torch has no forward derivative of it
    draw.leaves += made
    draw.lines[:] = program.lines
    draw.results += names


def _keep_what_is_used(draw: Draw) -> None:
    """Drop leaves that no line names: they were made for a line that was taken back."""
    words = set(re.findall(r"\w+", "\n".join([*draw.before, *draw.lines])))
    draw.leaves = [leaf for leaf in draw.leaves if leaf.name in words] or draw.leaves[:1]
    kept = {leaf.name for leaf in draw.leaves}
    draw.results = [n for n in draw.results if not n.startswith("x") or n in kept]
