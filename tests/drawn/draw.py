"""A program while it is drawn: the names that it has, and what plain torch has for each.

A line is proposed as text, run on plain tensors, and added if plain torch takes it. So `Draw` knows
at any time which tensors a further line can name, with their shapes, dtypes and values.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tests.drawn import ops
from tests.drawn.programs import PLAIN_WORDS, Leaf, Mesh

__all__ = ["Draw", "tuple_text"]

MOST_NUMBERS = 4000
REFUSED_SHARE = 0.08  # of lines that plain torch refuses, those that stay
# Errors of plain torch that DTensors have to raise too.
_CLASSES = (IndexError, RuntimeError, ValueError, TypeError)


def tuple_text(values: Sequence[Any]) -> str:
    """The values as a tuple of Python."""
    return f"({', '.join(map(str, values))}{',' if len(values) == 1 else ''})"


@dataclass
class Draw:
    """A program while it is drawn.

    Attributes:
        chance: decides everything.
        mesh: of the program.
        leaves: so far.
        lines: so far.
        scope: what the names stand for on plain tensors.
        results: the names that are compared.
    """

    chance: random.Random
    mesh: Mesh
    leaves: list[Leaf] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    scope: dict[str, Any] = field(default_factory=lambda: dict(PLAIN_WORDS))
    results: list[str] = field(default_factory=list)
    before: list[str] = field(default_factory=list)
    ended: bool = False
    _number: int = 0

    # -------------------------------------------------------------- names

    def name(self) -> str:
        """A new name."""
        self._number += 1
        return f"v{self._number - 1}"

    def value(self, name: str) -> torch.Tensor:
        """What a name stands for on plain tensors."""
        return self.scope[name]

    def pick(self, fits: Callable[[torch.Tensor], bool] = lambda t: True) -> str | None:
        """A name whose tensor fits; late ones are likelier."""
        names = [n for n in self.results if self.is_tensor(n) and fits(self.value(n))]
        if not names:
            return None
        return max(self.chance.choice(names), self.chance.choice(names), key=self.results.index)

    def is_tensor(self, name: str) -> bool:
        """Whether a name stands for a tensor."""
        return isinstance(self.scope[name], torch.Tensor)

    # -------------------------------------------------------------- leaves

    def placements(self, shape: Sequence[int]) -> tuple[str, ...]:
        """How a new leaf, or a redistributed tensor, lies."""
        dims = range(len(shape))
        whole = self.chance.choice([0.15, 0.5])
        return tuple(
            f"S{self.chance.choice(dims)}" if dims and self.chance.random() > whole else "R"
            for _ in self.mesh.shape
        )

    def leaf(self, value: torch.Tensor, *, may_be_plain: bool = True) -> str:
        """Add a leaf with these values, now and then a view of a larger one; return its name."""
        chance, text = self.chance, "{}"
        value = value.detach().clone(memory_format=torch.contiguous_format)
        if value.dim() and chance.random() < 0.2:
            value, text = self._larger(value)
        name = f"x{len(self.leaves)}"
        is_plain = may_be_plain and bool(self.leaves) and chance.random() < 0.08
        differentiable = value.is_floating_point() or value.is_complex()
        requires_grad = differentiable and not is_plain and chance.random() < 0.5
        placements = None if is_plain else self.placements(value.shape)
        self.leaves.append(Leaf(name, value, placements, requires_grad))
        self.scope[name] = value.clone().requires_grad_(requires_grad)
        self.results.append(name)
        if text == "{}":
            return name
        made = self.name()
        self.lines.append(f"{made} = {text.format(name)}")
        exec(self.lines[-1], self.scope)
        self.results.append(made)
        return made

    def _larger(self, value: torch.Tensor) -> tuple[torch.Tensor, str]:
        """A tensor, and the view of it that has these values."""
        way = self.chance.choice(["transpose", "step", "slice", "row"])
        if way == "transpose" and value.dim() > 1:
            return value.transpose(0, -1).contiguous(), "{}.transpose(0, -1)"
        if way == "step":
            base = value.repeat_interleave(2, -1)
            return base, "{}[..., ::2]"
        if way == "slice" and value.shape[0]:
            return torch.cat([value[:1], value, value[-1:]]), "{}[1:-1]"
        return torch.stack([value, value]), "{}[1]"

    # -------------------------------------------------------------- lines

    def propose(self, text: str, *, is_statement: bool = False, is_bad: bool = False) -> bool:
        """Add a line if plain torch takes it; tell whether it did.

        Args:
            text: An expression, whose tensors get names; a statement, if `is_statement`.
            is_statement: It changes something, and gives nothing.
            is_bad: It is meant to be refused: keep it if it is.
        """
        line = text
        try:
            if is_statement:
                exec(text, self.scope)
            else:
                value = eval(text, self.scope)
                line = self._assigned(text, value)
                if line is None:
                    return False
        except NotImplementedError:
            return False
        except Exception as error:
            keep = is_bad or self.chance.random() < REFUSED_SHARE
            if type(error) in _CLASSES and keep:
                name = "" if is_statement else self.name()
                self.lines.append(text if is_statement else f"{name} = {text}")
                self.results += [name] if name else []  # here it has a value: poison
                self.ended = True
                return True
            return False
        self.lines.append(line)
        return True

    def _assigned(self, text: str, value: Any) -> str | None:
        found = PLAIN_WORDS["tensors"](value)
        if isinstance(value, bool | int | float | complex):
            name = self.name()
            self.scope[name] = value
            self.results.append(name)
            return f"{name} = {text}"
        if not found or any(t.layout != torch.strided or t.dtype not in ops.DTYPES for t in found):
            return None
        if sum(t.numel() for t in found) > MOST_NUMBERS or not ops.is_whole(found):
            return None
        if any(map(_has_denormals, found)):
            return None
        names = [self.name() for _ in found]
        for name, tensor in zip(names, found, strict=True):
            self.scope[name] = tensor
            self.results.append(name)
        if isinstance(value, torch.Tensor):
            return f"{names[0]} = {text}"
        return f"{', '.join(names)}{',' if len(names) == 1 else ''} = tensors({text})"


def _has_denormals(value: torch.Tensor) -> bool:
    """Whether some numbers are below the smallest normal one: XLA takes these for zero."""
    if not (value.is_floating_point() or value.is_complex()):
        return False
    sizes = (torch.view_as_real(value) if value.is_complex() else value).detach().abs()
    return bool(((sizes > 0) & (sizes < torch.finfo(sizes.dtype).tiny)).any())
