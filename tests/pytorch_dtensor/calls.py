"""Calls of ops on placed tensors, as PyTorch's own DTensor takes them and as this project's does.

A call is an op of the table below on inputs that are drawn: a mesh, for each input a placement per
axis (among them pending sums, maxima and strided shards), even and uneven sizes::

    mesh (2, 4)   sum   float64 (8, 6) S0,Psum    params (1, False)

`python -m tests.pytorch_dtensor.calls` runs them on PyTorch's side, as rank 0 of 8 in a
process group that does nothing: placements are right then, values are not. With torch 2.13 and
newer all ranks run in one process (LocalTensorMode), which `MISTAKES` need: calls of which PyTorch
gives another value than plain torch.
"""

from __future__ import annotations

import importlib
import json
import math
import random
import signal
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

__all__ = ["MISTAKES", "Call", "Side", "calls", "tokens_of"]

WORLD = 8
NUM_CALLS = 10  # of each op
LONGEST_SECONDS = 2.0  # of processor time
MESHES: tuple[tuple[int, ...], ...] = ((8,), (2, 4), (2, 2, 2))


# ------------------------------------------------------------------ ops

Shapes = tuple[tuple[int, ...], ...]
MATRIX: Shapes = ((8, 6),)
SAME: Shapes = ((8, 6), (8, 6))


def _in_place(name: str) -> Callable[..., Any]:
    return lambda a, b: getattr(a.clone(), name)(b)


# By name: the inputs' shapes, and what is called.
OPS: dict[str, tuple[Shapes, Callable[..., Any]]] = {
    "tanh": (MATRIX, torch.tanh),
    "relu": (MATRIX, torch.relu),
    "neg": (MATRIX, torch.neg),
    "abs": (MATRIX, torch.abs),
    "gelu": (MATRIX, F.gelu),
    "silu": (MATRIX, F.silu),
    "square": (MATRIX, torch.square),
    "half": (MATRIX, lambda a: a * 0.5),
    "shift": (MATRIX, lambda a: a + 0.25),
    "clamp": (MATRIX, lambda a: a.clamp(-0.5, 0.75)),
    "clone": (MATRIX, torch.clone),
    "to": (MATRIX, lambda a: a.float().double()),
    "zeros_like": (MATRIX, torch.zeros_like),
    "add": (SAME, torch.add),
    "sub": (SAME, torch.sub),
    "mul": (SAME, torch.mul),
    "div": (SAME, torch.div),
    "maximum": (SAME, torch.maximum),
    "add row": (((8, 6), (6,)), torch.add),
    "mul row": (((8, 6), (6,)), torch.mul),
    "where": (SAME, lambda a, b: torch.where(a > b, a, b)),
    "lerp": (SAME, lambda a, b: torch.lerp(a, b, 0.25)),
    "masked_fill": (MATRIX, lambda a: a.masked_fill(a > 0.1, 0.25)),
    "sum": (MATRIX, lambda a: a.sum(1)),
    "sum keepdim": (MATRIX, lambda a: a.sum(0, keepdim=True)),
    "sum of all": (MATRIX, torch.sum),
    "mean": (MATRIX, lambda a: a.mean(0)),
    "amax": (MATRIX, lambda a: a.amax(1)),
    "amin": (MATRIX, lambda a: a.amin(0)),
    "max": (MATRIX, lambda a: a.max(1).values),
    "var": (MATRIX, lambda a: a.var(1)),
    "norm": (MATRIX, lambda a: torch.linalg.vector_norm(a, dim=1)),
    "logsumexp": (MATRIX, lambda a: torch.logsumexp(a, 1)),
    "cumsum": (MATRIX, lambda a: a.cumsum(1)),
    "argmax": (MATRIX, lambda a: a.argmax(1)),
    "mm": (((8, 6), (6, 4)), torch.mm),
    "linear": (((8, 6), (4, 6)), F.linear),
    "linear bias": (((8, 6), (4, 6), (4,)), F.linear),
    "linear 3d": (((2, 8, 6), (4, 6)), F.linear),
    "bmm": (((2, 8, 6), (2, 6, 4)), torch.bmm),
    "transpose": (MATRIX, lambda a: a.transpose(0, 1)),
    "permute": (((2, 8, 6),), lambda a: a.permute(1, 2, 0)),
    "view": (MATRIX, lambda a: a.reshape(2, -1, a.shape[1])),
    "flatten": (((2, 8, 6),), lambda a: a.flatten(0, 1)),
    "unsqueeze": (MATRIX, lambda a: a.unsqueeze(1)),
    "squeeze": (((8, 1, 6),), lambda a: a.squeeze(1)),
    "expand": (((8, 1, 6),), lambda a: a.expand(-1, 4, -1)),
    "split": (MATRIX, lambda a: a.split(4, 0)[1]),
    "chunk": (MATRIX, lambda a: a.chunk(2, 1)[0]),
    "narrow": (MATRIX, lambda a: a.narrow(0, 1, 3)),
    "select": (MATRIX, lambda a: a.select(0, 2)),
    "slice": (MATRIX, lambda a: a[1::2]),
    "flip": (MATRIX, lambda a: a.flip(0)),
    "cat": (SAME, lambda a, b: torch.cat([a, b], 0)),
    "stack": (SAME, lambda a, b: torch.stack([a, b], 0)),
    "tril": (MATRIX, torch.tril),
    "softmax": (MATRIX, lambda a: a.softmax(1)),
    "log_softmax": (MATRIX, lambda a: a.log_softmax(0)),
    "layer_norm": (((8, 6), (6,), (6,)), lambda a, w, b: F.layer_norm(a, (a.shape[1],), w, b)),
    "embedding": (((5,), (8, 6)), F.embedding),
    "mse_loss": (SAME, F.mse_loss),
    "add_": (SAME, _in_place("add_")),
    "mul_": (SAME, _in_place("mul_")),
    "copy_": (SAME, _in_place("copy_")),
    "mul_ by a number": (MATRIX, lambda a: a.clone().mul_(0.5)),
}


# ------------------------------------------------------------------ calls


@dataclass(frozen=True)
class Call:
    """One call.

    Attributes:
        name: of the op.
        mesh_shape: of all 8 devices.
        shapes: of the inputs.
        placements: of each input, a word per axis: "R", "S0", "_S0:4", "Psum", "Pavg", "Pmax".
    """

    name: str
    mesh_shape: tuple[int, ...]
    shapes: Shapes
    placements: tuple[tuple[str, ...], ...]

    def __str__(self) -> str:
        inputs = zip(self.shapes, self.placements, strict=True)
        texts = [f"{shape} {','.join(words)}" for shape, words in inputs]
        return f"mesh {self.mesh_shape}  {self.name}  {'; '.join(texts)}"

    def values(self) -> list[torch.Tensor]:
        """The inputs as plain tensors."""
        generator = torch.Generator().manual_seed(0)
        made = [
            torch.randn(shape, generator=generator, dtype=torch.float64) for shape in self.shapes
        ]
        if self.name == "embedding":
            made[0] = torch.randint(0, self.shapes[1][0], self.shapes[0], generator=generator)
        return made

    def run(self, inputs: Sequence[Any]) -> Any:
        """Call the op."""
        return OPS[self.name][1](*inputs)


def calls() -> Iterator[Call]:
    """Draw calls of each op, the same ones every time."""
    for name, (shapes, _) in OPS.items():
        chance = random.Random(name)
        for _ in range(NUM_CALLS):
            mesh_shape = chance.choice(MESHES)
            # What is 6 elsewhere is 5 now and then: no number of devices divides it.
            uneven = chance.random() < 0.3
            drawn = tuple(
                tuple(5 if size == 6 and uneven else size for size in shape) for shape in shapes
            )
            placements = tuple(
                _placements(chance, shape, mesh_shape, is_integer=name == "embedding" and not i)
                for i, shape in enumerate(drawn)
            )
            yield Call(name, mesh_shape, drawn, placements)


def _placements(
    chance: random.Random, shape: Sequence[int], mesh_shape: Sequence[int], *, is_integer: bool
) -> tuple[str, ...]:
    if len(mesh_shape) == 2 and shape[0] % 8 == 0 and chance.random() < 0.08:
        return (f"_S0:{mesh_shape[1]}", "S0")
    dims = [dim for dim, size in enumerate(shape) if size > 1]
    words: list[str] = []
    kind = chance.choice(["Psum", "Psum", "Pavg", "Pmax"])  # PyTorch does not mix them
    for _ in mesh_shape:
        way = chance.random()
        if way < 0.35:
            words.append("R")
        elif way < 0.5 and not is_integer:
            words.append(kind)
        else:
            words.append(f"S{chance.choice(dims)}")
    return tuple(words)


def tokens_of(placements: Sequence[Any]) -> tuple[str, ...]:
    """Placements as words; those that only PyTorch has by the name of their class."""
    return tuple(_token(placement) for placement in placements)


def _token(placement: Any) -> str:
    name = type(placement).__name__
    if name == "_StridedShard":
        return f"_S{placement.dim}:{placement.split_factor}"
    if name in ("Shard", "Replicate"):
        return "R" if name == "Replicate" else f"S{placement.dim}"
    return f"P{placement.reduce_op}" if name == "Partial" else name


def _placement(token: str) -> Any:
    if token.startswith("_S"):
        dim, factor = token[2:].split(":")
        return _StridedShard(int(dim), split_factor=int(factor))
    if token.startswith("S"):
        return Shard(int(token[1:]))
    return Replicate() if token == "R" else Partial(token[1:])


# ------------------------------------------------------------------ the two sides


@dataclass(frozen=True)
class Side:
    """Who runs a call.

    Attributes:
        mesh_of: gives the mesh of a shape.
        distribute: PyTorch's, or this project's.
        from_local: likewise.
    """

    mesh_of: Callable[[tuple[int, ...]], Any]
    distribute: Callable[..., Any]
    from_local: Callable[..., Any]

    def put(self, value: torch.Tensor, words: Sequence[str], mesh_shape: tuple[int, ...]) -> Any:
        """Place a value; where a reduction is pending, each device has its part of it."""
        mesh = self.mesh_of(mesh_shape)
        parts = math.prod(
            size for size, word in zip(mesh_shape, words, strict=True) if word == "Psum"
        )
        whole = ["R" if word[0] == "P" else word for word in words]
        tensor = self.distribute(value, mesh, [_placement(word) for word in whole])
        if whole == list(words):
            return tensor
        return self.from_local(
            tensor.to_local() / parts,
            mesh,
            [_placement(word) for word in words],
            shape=value.shape,
            stride=value.stride(),
        )

    def run(self, call: Call) -> Any:
        """Run a call."""
        inputs = zip(call.values(), call.placements, strict=True)
        return call.run([self.put(value, words, call.mesh_shape) for value, words in inputs])


# ------------------------------------------------------------------ where PyTorch is wrong


def _gradient_of_a_mean_of_parts(side: Side) -> Any:
    x = side.put(torch.arange(8.0), ("S0",), (8,)).requires_grad_()
    side.from_local(x.to_local(), x.device_mesh, [Partial("avg")]).sum().backward()
    return x.grad


def _mean_of_uneven_shards(side: Side) -> Any:
    x = side.put(torch.arange(10.0), ("S0",), (8,))  # of which three devices have no row
    return F.mse_loss(x, x * 0)


def _gradient_of_mse_loss(side: Side) -> Any:
    x = side.put(torch.arange(8.0), ("S0",), (8,)).requires_grad_()
    F.mse_loss(x, x.detach() * 0).backward()
    return x.grad


def _number_added_to_a_pending_sum(side: Side) -> Any:
    return side.put(torch.tensor(3.0), ("Psum",), (8,)) + 1


def _argmax_of_a_sharded_dim(side: Side) -> Any:
    return side.put(torch.arange(128.0).reshape(16, 8), ("S0", "R"), (2, 4)).argmax(0)


# By its row in docs/semantics.md: a call, and what plain torch gives.
MISTAKES: dict[str, tuple[Callable[[Side], Any], torch.Tensor]] = {
    "the gradient of a max or mean of parts": (
        _gradient_of_a_mean_of_parts,
        torch.full((8,), 1 / 8),
    ),
    "a mean over uneven shards": (_mean_of_uneven_shards, torch.tensor(28.5)),
    "the gradient of mse_loss": (_gradient_of_mse_loss, torch.arange(8.0) / 4),
    "a number added to a pending sum": (_number_added_to_a_pending_sum, torch.tensor(4.0)),
    "the placements of argmax": (_argmax_of_a_sharded_dim, torch.full((8,), 15)),
}


# ------------------------------------------------------------------ PyTorch's side


def _pytorch() -> Side:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, distribute_tensor
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=WORLD, store=FakeStore())

    def from_local(tensor: Any, mesh: Any, placements: Any, **options: Any) -> Any:
        return DTensor.from_local(tensor, mesh, placements, run_check=False, **options)

    def distribute(tensor: Any, mesh: Any, placements: Any) -> Any:
        return distribute_tensor(tensor, mesh, placements, src_data_rank=None)

    meshes = {shape: DeviceMesh("cpu", torch.arange(WORLD).reshape(shape)) for shape in MESHES}
    return Side(meshes.__getitem__, distribute, from_local)


class TooLong(BaseException):
    """Raised through whatever catches exceptions."""


def _stop(*_: Any) -> None:
    raise TooLong


def _placements_or_error(side: Side, call: Call) -> list[str]:
    """The words of the result's placements; the name of the error behind "!".

    PyTorch's search of a cheap redistribution does not end in time for some: ["?"].
    """
    signal.setitimer(signal.ITIMER_VIRTUAL, LONGEST_SECONDS)
    try:
        return list(tokens_of(side.run(call).placements))
    except TooLong:
        return ["?"]
    except Exception as error:
        return ["!", type(error).__name__]
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)


def _is_wrong(side: Side, name: str) -> bool:
    """Whether a rank has another value than plain torch, or none: shards that are of no tensor."""
    run, expected = MISTAKES[name]
    try:
        found = run(side).full_tensor()
        found = getattr(found, "wait", lambda: found)()
    except RuntimeError:
        return True
    parts = getattr(found, "_local_tensors", {0: found}).values()
    return not all(torch.allclose(part.to(expected.dtype), expected) for part in parts)


def main() -> None:
    """Print what PyTorch gives, as JSON."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    signal.signal(signal.SIGVTALRM, _stop)
    side = _pytorch()
    found: dict[str, Any] = {
        "placements": [_placements_or_error(side, call) for call in calls()],
        "wrong": {},
    }
    try:
        module: Any = importlib.import_module("torch.distributed._local_tensor")
    except ImportError:  # before torch 2.13
        pass
    else:
        with module.LocalTensorMode(WORLD):
            found["wrong"] = {name: _is_wrong(side, name) for name in MISTAKES}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
