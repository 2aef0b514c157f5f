"""Trainings that are drawn: a small network, how it is sharded, what happens between steps.

A training is a `Program` like any other: its text runs on plain tensors, in float64, and on
DTensors, and its losses, parameters and optimizer state are compared::

    model = net(weights, width=8, hidden=12, layers=2, norm='rms', gated=True)
    model, put = sharded(model, 'fully_shard', checkpoint=True, seed=17)
    settings = {'loss': 'mse', 'scale': 1.0, 'accumulate': 2, 'clip': 0.5, 'most': 1.0}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    step = compiled(step_of(model, optimizer, settings))
    l0 = step(put(x0), put(y0))
    optimizer.param_groups[0]['lr'] = 0.003
    l1 = step(put(x0), put(y0))
    p = flat(model.parameters())
    s = flat_state(optimizer)

All parameters are cut out of one leaf, so that noise of one unit in the last place reaches them.
The words of both sides are here and in :mod:`tests.drawn.ours_training`.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.drawn.programs import Leaf, Mesh, Program

__all__ = ["PLAIN_TRAINING_WORDS", "TRAINING_WORDS", "Net", "generate_training"]

CLASSES = 6
LOSSES: dict[str, Callable[[Any, Any], Any]] = {
    "mse": lambda out, y: F.mse_loss(out, y),
    "sum": lambda out, y: (out * y).sum() / 16,
    "smooth": lambda out, y: F.smooth_l1_loss(out, y, beta=0.5),
    "cross": lambda out, y: F.cross_entropy(out[..., :CLASSES].flatten(0, -2), y.flatten()),
}
# A large eps: else what is nearly no gradient is made a step of full size, of either sign.
OPTIMIZERS = (
    "torch.optim.SGD({}, lr=0.05)",
    "torch.optim.SGD({}, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01)",
    "torch.optim.Adam({}, lr=0.01, eps=1e-2, foreach=True)",
    "torch.optim.AdamW({}, lr=0.01, eps=1e-2)",
    "torch.optim.AdamW({}, lr=0.01, eps=1e-2, fused=True)",
    "torch.optim.AdamW({}, lr=0.01, eps=1e-2, amsgrad=True, foreach=False)",
    "torch.optim.Adagrad({}, lr=0.05, eps=1e-2)",
    "torch.optim.RMSprop({}, lr=0.01, eps=1e-2, momentum=0.5, centered=True)",
    "torch.optim.NAdam({}, lr=0.01, eps=1e-2)",
    "torch.optim.RAdam({}, lr=0.01, eps=1e-2)",
    "torch.optim.Adamax({}, lr=0.01, eps=1e-2)",
    "torch.optim.Adadelta({}, lr=0.5, eps=1e-2)",
    "torch.optim.ASGD({}, lr=0.01)",
)


# ------------------------------------------------------------------ the network


class Block(nn.Module):
    """A residual layer."""

    def __init__(self, width: int, hidden: int, norm: str, gated: bool) -> None:
        super().__init__()
        norms = {"layer": nn.LayerNorm, "rms": nn.RMSNorm, "none": lambda _: nn.Identity()}
        self.norm = norms[norm](width)
        self.up = nn.Linear(width, hidden)
        self.gate = nn.Linear(width, hidden, bias=False) if gated else None
        self.down = nn.Linear(hidden, width)
        self.slope = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add what the layer computes to x."""
        h = self.norm(x)
        up = self.up(h)
        h = F.gelu(up) if self.gate is None else F.silu(self.gate(h)) * up
        return x + self.slope * self.down(h)


class Net(nn.Module):
    """Layers between an input and an output that may share a weight."""

    def __init__(
        self, width: int, hidden: int, layers: int, norm: str, gated: bool, tied: bool
    ) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width, bias=False)
        self.layers: Any = nn.Sequential(
            *(Block(width, hidden, norm, gated) for _ in range(layers))
        )
        self.outer = nn.Linear(width, width, bias=False)
        if tied:
            self.outer.weight = self.inner.weight
        self.seen: Any
        self.register_buffer("seen", torch.zeros(()))
        self.checkpoints = False
        self.skips: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Values of shape (rows, places, width)."""
        x = self.inner(x)
        if self.training:
            self.seen.mul_(0.9).add_(x.detach().mean(), alpha=0.1)
        if self.checkpoints or self.skips:
            for i, layer in enumerate(self.layers):
                if i in self.skips:
                    continue
                x = checkpoint(layer, x, use_reentrant=False) if self.checkpoints else layer(x)
        else:
            x = self.layers(x)
        return self.outer(x)


def net(weights: torch.Tensor, **sizes: Any) -> Net:
    """A network whose parameters are cut out of a leaf, in the default dtype."""
    model, start = Net(**sizes), 0
    for parameter in model.parameters():
        part = weights.detach()[start : start + parameter.numel()].reshape(parameter.shape)
        parameter.data = part.to(torch.get_default_dtype()).clone()
        start += parameter.numel()
    return model.to(torch.get_default_dtype())


def num_weights(**sizes: Any) -> int:
    """How long that leaf is."""
    return sum(parameter.numel() for parameter in Net(**sizes).parameters())


# ------------------------------------------------------------------ words


def step_of(model: Net, optimizer: Any, settings: dict[str, Any]) -> Callable[..., Any]:
    """A training step over some microbatches, as trainers write it."""

    def step(x: Any, y: Any) -> Any:
        number = settings["accumulate"]
        total = 0.0
        for part, target in zip(x.chunk(number), y.chunk(number), strict=True):
            with settings["context"]():
                loss = LOSSES[settings["loss"]](model(part), target) * (settings["scale"] / number)
            loss.backward()
            total = total + loss.detach()
        norm = 0.0
        if settings["clip"] is not None:
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), settings["clip"])
        if norm > settings["most"]:
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(0.5)
        optimizer.step()
        optimizer.zero_grad(set_to_none=settings["to_none"])
        return total

    return step


def flat(tensors: Iterable[Any]) -> torch.Tensor:
    """All values of some tensors, one after the other, on the host."""
    whole = [t.full_tensor() if hasattr(t, "full_tensor") else t for t in tensors]
    return torch.cat([t.detach().cpu().reshape(-1).clone() for t in whole])


def flat_gradients(model: nn.Module) -> torch.Tensor:
    """All gradients; zeros for a parameter that has none."""
    return flat([torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()])


def flat_state(optimizer: Any) -> torch.Tensor:
    """All tensors that an optimizer keeps, by parameter and name; its counts of steps too."""
    rows = [optimizer.state.get(p, {}) for g in optimizer.param_groups for p in g["params"]]
    kept = [row[name] for row in rows for name in sorted(row)]
    values = [v for v in kept if isinstance(v, torch.Tensor)]
    return flat([v.to(torch.get_default_dtype()) for v in values] or [torch.zeros(0)])


def saved(model: Net, optimizer: Any) -> Any:
    """What a checkpoint has of a training."""
    kept = {name: v.detach().clone() for name, v in model.state_dict().items()}
    state = optimizer.state_dict()
    copied = {
        i: {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in row.items()}
        for i, row in state["state"].items()
    }
    return kept, {**state, "state": copied}


def loaded(model: Net, optimizer: Any, state: Any) -> None:
    """Go back to what was saved."""
    model.load_state_dict(state[0])
    optimizer.load_state_dict(state[1])


def groups(model: Net, decay: float) -> list[dict[str, Any]]:
    """Parameters in two groups, as for weight decay."""
    wide = [p for p in model.parameters() if p.ndim > 1]
    return [
        {"params": wide, "weight_decay": decay},
        {"params": [p for p in model.parameters() if p.ndim <= 1], "weight_decay": 0.0},
    ]


def scaled(model: Net, factor: float) -> None:
    """Write into the first parameter, outside of any step."""
    with torch.no_grad():
        next(iter(model.parameters())).mul_(factor)


@contextlib.contextmanager
def _narrow() -> Any:
    """torch's own autocast, where there is something to cast."""
    if torch.get_default_dtype() != torch.float32:
        yield
        return
    with torch.autocast("cpu", torch.bfloat16):
        yield


def _plainly_sharded(model: Net, _how: str, *, checkpoint: bool, seed: int) -> tuple[Net, Any]:
    model.checkpoints = checkpoint
    return model, _put


def _put(value: torch.Tensor) -> torch.Tensor:
    if value.is_floating_point():
        return value.to(torch.get_default_dtype())
    return value


TRAINING_WORDS: dict[str, Any] = {
    "net": net,
    "step_of": step_of,
    "flat": flat,
    "flat_gradients": flat_gradients,
    "flat_state": flat_state,
    "saved": saved,
    "loaded": loaded,
    "groups": groups,
    "scaled": scaled,
    "nothing": contextlib.nullcontext,
}
PLAIN_TRAINING_WORDS: dict[str, Any] = {
    **TRAINING_WORDS,
    "sharded": _plainly_sharded,
    "compiled": lambda function: function,
    "narrow": _narrow,
}


# ------------------------------------------------------------------ drawing


def generate_training(seed: int) -> Program:
    """Draw a training; the same one for the same seed."""
    chance = random.Random(seed)
    how = chance.choice(("annotated", "annotated", "fully_shard", "tensor", "both", "scan"))
    mesh = _mesh(chance, how)
    sizes: dict[str, Any] = {
        "width": chance.choice((8, 8, 16)),
        "hidden": chance.choice((12, 16, 20)),
        "layers": chance.choice((1, 2, 3)),
        "norm": chance.choice(("layer", "rms", "none")),
        "gated": chance.random() < 0.5,
        "tied": how in ("annotated", "scan") and chance.random() < 0.3,
    }
    loss = chance.choice(tuple(LOSSES))
    settings = {
        "loss": loss,
        "scale": 1.0,
        "accumulate": chance.choice((1, 1, 2)),
        "clip": chance.choice((None, None, 1.0, 0.1)),
        "to_none": chance.random() < 0.8,
        # The largest norm of gradients with which a whole step is taken: a branch on a tensor.
        "most": random.Random(seed).choice((1e9, 1e9, 1.0, 0.3)),
    }
    context = "narrow" if chance.random() < 0.2 else "nothing"
    optimizer = chance.choice(OPTIMIZERS)
    of = "groups(model, 0.1)" if chance.random() < 0.2 else "model.parameters()"
    checkpoint = how != "scan" and chance.random() < 0.3
    lines = [
        f"model = net(weights, {', '.join(f'{k}={v!r}' for k, v in sizes.items())})",
        f"model, put = sharded(model, {how!r}, checkpoint={checkpoint}, seed={seed})",
        f"settings = {{**{settings!r}, 'context': {context}}}",
        f"optimizer = {optimizer.format(of)}",
        "step = compiled(step_of(model, optimizer, settings))",
    ]
    if chance.random() < 0.3:
        lines.append("scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)")
    results, rows = [], chance.choice((8, 8, 16))
    for i in range(chance.randint(2, 5)):
        if i:
            lines += _changes(chance, how, lines)
        few = "[:4]" if rows == 8 and i > 1 and chance.random() < 0.15 else ""
        lines.append(f"l{i} = step(put(x{i % 2}{few}), put(y{i % 2}{few}))")
        results.append(f"l{i}")
        if any(line.startswith("scheduler =") for line in lines):
            lines.append("scheduler.step()")
    lines += ["p = flat(model.parameters())", "b = flat(model.buffers())"]
    lines += ["g = flat_gradients(model)", "s = flat_state(optimizer)"]
    compiled_ = chance.random() < 0.75
    if not compiled_:
        lines[4] = "step = step_of(model, optimizer, settings)"
    return Program(
        mesh, _leaves(seed, sizes, rows, loss), tuple(lines), (*results, "p", "b", "g", "s"), False
    )


def _mesh(chance: random.Random, how: str) -> Mesh:
    if how == "tensor":
        return Mesh((8,), names=("tp",))
    if how == "fully_shard" and chance.random() < 0.5:
        return Mesh((8,), names=("dp",))
    return Mesh((2, 4), names=("dp", "fsdp" if how == "fully_shard" else "tp"))


def _leaves(seed: int, sizes: dict[str, Any], rows: int, loss: str) -> tuple[Leaf, ...]:
    generator = torch.Generator().manual_seed(seed)
    width = sizes["width"]

    def batch() -> torch.Tensor:
        return torch.randn(rows, 3, width, generator=generator)

    def target() -> torch.Tensor:
        if loss == "cross":
            return torch.randint(0, CLASSES, (rows, 3), generator=generator)
        return batch()

    weights = torch.randn(num_weights(**sizes), generator=generator) * 0.3
    values = {"weights": weights, "x0": batch(), "y0": target(), "x1": batch(), "y1": target()}
    return tuple(Leaf(name, value, None) for name, value in values.items())


def _changes(chance: random.Random, how: str, lines: list[str]) -> list[str]:
    """What happens between two steps: mostly nothing."""
    whole = how != "scan"
    choices: list[list[str]] = [
        ["optimizer.param_groups[0]['lr'] = 0.003"],
        [f"settings['scale'] = {chance.choice((0.5, 2.0))}"],
        [f"settings['clip'] = {chance.choice((None, 0.2))}"],
        ["settings['to_none'] = not settings['to_none']"],
        [f"settings['accumulate'] = {chance.choice((1, 2))}"],
        [f"settings['most'] = {chance.choice((0.3, 1e9))}"],
        ["scaled(model, 0.9)"],
        ["step = compiled(step_of(model, optimizer, settings))"],
        ["model.eval()"],
    ]
    if whole:
        choices += [
            ["model.layers[0].slope = 0.5"],
            ["model.skips.append(0)"],
            ["w = model.layers[0].up.weight", "w.requires_grad_(not w.requires_grad)"],
            ["model.checkpoints = not model.checkpoints"],
        ]
    if any(line == "kept = saved(model, optimizer)" for line in lines):
        choices += [["loaded(model, optimizer, kept)"]] * 4
    else:
        choices += [["kept = saved(model, optimizer)"]] * 3
    number = chance.choice((0, 0, 1, 1, 2))
    return [line for change in chance.sample(choices, number) for line in change]
