"""Small steps for the rows of docs/compiled_step.md, and what changes between their calls.

A case is of a table and a row of the page. It makes its step for plain PyTorch, and once more for a
mesh; test_compiled_step_page calls both, and counts the traces.
"""

from __future__ import annotations

import math
import os
from collections import UserDict, deque
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import FunctionType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard

import xla_dtensor as xd

VARIABLE = "XLA_DTENSOR_TEST_OF_A_PAGE"
MODE: ContextVar[str] = ContextVar("MODE", default="sum")
FACTOR, LATEST = 2.0, None


@dataclass
class Put:
    """Places tensors on a mesh; without one it leaves them alone."""

    mesh: xd.DeviceMesh | None = None

    def __call__(self, tensor: torch.Tensor, *placements: Any) -> torch.Tensor:
        if self.mesh is None:
            return tensor
        return xd.distribute_tensor(tensor, self.mesh, list(placements) or None)

    def seed(self, number: int) -> None:
        if self.mesh is None:
            torch.manual_seed(number)
        else:
            xd.manual_seed(number, self.mesh)


@dataclass
class Run:
    """What a case makes for PyTorch, and once more for the mesh.

    Args:
        step: The step.
        change: What is done before the call of a number.
        args: The arguments of a call, made of its batch and its number.
        state: What to compare afterwards, beside the results.
    """

    step: Callable[..., Any]
    change: Callable[[int], Any] = lambda call: None
    args: Callable[[torch.Tensor, int], tuple[Any, ...]] = lambda x, call: (x,)
    state: Callable[[], Any] = lambda: None


@dataclass
class Case:
    """A test of a row: what it makes of `put`, how many traces there were after each call."""

    row: str
    make: Callable[[Put], Run]
    traces: tuple[int, ...]
    reason: str = ""


CASES: dict[str, list[Case]] = {"Inputs": [], "Guards": [], "no guard": [], "effect": []}
CASES["walked through"] = []  # no row: the sentence below a table
NEVER, ONCE_MORE, AFTER_CHANGE = (1, 1, 1, 1), (1, 2, 2, 2), (1, 1, 2, 2)


def case(
    table: str, row: str, traces: tuple[int, ...] = NEVER, reason: str = ""
) -> Callable[[Callable[[Put], Run]], Callable[[Put], Run]]:
    """Register a case of a row."""

    def register(make: Callable[[Put], Run]) -> Callable[[Put], Run]:
        CASES[table].append(Case(row, make, traces, reason))
        return make

    return register


def guard(row: str, reason: str, traces: tuple[int, ...] = AFTER_CHANGE) -> Any:
    return case("Guards", row, traces, reason)


def once(change: Callable[[], Any]) -> Callable[[int], Any]:
    """Do something before the third call."""
    return lambda call: change() if call == 2 else None


def setting(target: Any, name: str, value: Any) -> Callable[[int], Any]:
    return once(lambda: setattr(target, name, value))


def placed(module: nn.Module, put: Put) -> Any:
    """Fill a module's parameters with ones that are placed."""
    for owner in module.modules():
        for name, parameter in list(owner.named_parameters(recurse=False)):
            setattr(owner, name, nn.Parameter(put(torch.ones_like(parameter))))
    return module


# ---------------------------------------------------------------------- inputs


@dataclass
class Batch:
    x: torch.Tensor
    loss: Any = None
    parts: list[Any] = field(default_factory=list)


@case("Inputs", "the values of a tensor among the arguments")
def _(put: Put) -> Run:
    def step(a: Any, b: Any, c: Any, d: Any) -> torch.Tensor:
        return a["x"] + b[0] * c.x - d["x"].square()

    return Run(step, args=lambda x, call: ({"x": x}, [x + 1], Batch(x * 2), UserDict(x=x)))


@case(
    "Inputs",
    "the values of a parameter, a buffer, any tensor of the mesh that the step finds by a name",
)
def _(put: Put) -> Run:
    layer, named = placed(nn.Linear(4, 4), put), put(torch.ones(4))
    layer.register_buffer("scale", put(torch.ones(4)))

    @torch.no_grad()
    def change(call: int) -> None:
        for tensor in (layer.weight, layer.scale, named):
            tensor.add_(call)

    return Run(lambda x: layer(x).detach() * layer.scale + named, change)


@case("Inputs", "the values of a plain CPU tensor, and NumPy's memory behind `torch.from_numpy`")
def _(put: Put) -> Run:
    host, memory = torch.arange(4.0), np.ones(4, np.float32)

    def change(call: int) -> None:
        host.add_(1)
        memory[:] = call

    return Run(lambda x: x * host.cumsum(0).softmax(0) + torch.from_numpy(memory), change)


class Counting(torch.optim.SGD):
    """Counts its steps as optimizers of other libraries do."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
            for parameter in group["params"]:
                parameter.grad.mul_(1 - 0.5 ** group["steps"])
        return super().step(closure)


def trained(
    put: Put, change: Callable[[Any, int], None], of: type[torch.optim.SGD] = torch.optim.SGD
) -> Run:
    layer = placed(nn.Linear(4, 4), put)
    optimizer = of(layer.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = layer(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    group = optimizer.param_groups[0]
    return Run(step, lambda call: change(group, call), state=lambda: [*layer.parameters()])


@case("Inputs", "an optimizer's learning rate")
def _(put: Put) -> Run:
    return trained(put, lambda group, call: group.update(lr=0.1 / (call + 1)))


@case("Inputs", "an optimizer's learning rate", ONCE_MORE)
def _(put: Put) -> Run:
    return trained(put, lambda group, call: group.update(weight_decay=0.1 * (call + 1)))


@case("Inputs", "an optimizer's learning rate", ONCE_MORE)
def _(put: Put) -> Run:
    return trained(put, lambda group, call: None, Counting)


ROW = "a number that was seen to change"


@case("Inputs", ROW, ONCE_MORE)
def _(put: Put) -> Run:
    owner: Any = SimpleNamespace(weight=0.5)
    return Run(
        lambda x: x * owner.weight, lambda call: vars(owner).update(weight=call + owner.weight)
    )


@case("Inputs", ROW, ONCE_MORE)
def _(put: Put) -> Run:
    return Run(lambda x, share: x * share, args=lambda x, call: (x, call / 4))


@case("Inputs", ROW)  # One that the step itself changes is lent from the first trace on.
def _(put: Put) -> Run:
    counts = {"calls": 0}

    def step(x: torch.Tensor) -> torch.Tensor:
        counts["calls"] += 1
        return x * min(1000.0, counts["calls"] / 3) + math.cos(counts["calls"])

    return Run(step, state=lambda: counts)


@case("Inputs", "the random state")
def _(put: Put) -> Run:
    drawn: list[torch.Tensor] = []

    def step(x: torch.Tensor) -> torch.Tensor:
        of_host = torch.rand(4)
        drawn.append(torch.rand_like(x))  # other numbers than PyTorch's, from the same seed
        return x + of_host

    def change(call: int) -> None:
        torch.manual_seed(call % 2)
        if call == 3:
            put.seed(0)

    def state() -> list[bool]:
        put.seed(0)  # PyTorch has drawn more on the host.
        return [torch.equal(drawn[0], each) for each in drawn]

    return Run(step, change, state=state)


@case("Inputs", "which tensor a name has, where it is given others", ONCE_MORE)
def _(put: Put) -> Run:
    owner = SimpleNamespace(hidden=put(torch.zeros(4)))

    def step(x: torch.Tensor) -> torch.Tensor:
        owner.hidden = owner.hidden * 0.5 + x
        return owner.hidden * 2

    return Run(step, state=lambda: owner.hidden)


@case("Inputs", "which tensor a name has, where it is given others", ONCE_MORE)
def _(put: Put) -> Run:
    owner = SimpleNamespace(batch=None)

    def change(call: int) -> None:
        owner.batch = put(torch.full((4,), float(call)))

    return Run(lambda x: x * owner.batch, change)


# ---------------------------------------------------------------------- guards

ROW = "the shape, dtype and placements of a tensor among the arguments"


@guard(ROW, "args[0] changed from")
def _(put: Put) -> Run:
    return Run(lambda x: x.sum(), args=lambda x, call: (x[:2] if call > 1 else x,))


@guard(ROW, "args[0] changed from")
def _(put: Put) -> Run:
    return Run(lambda x: x * 2, args=lambda x, call: (x.double() if call > 1 else x,))


@guard(ROW, "args[0] changed from")
def _(put: Put) -> Run:
    def args(x: torch.Tensor, call: int) -> tuple[torch.Tensor]:
        whole = torch.arange(4.0)
        return (put(whole, Replicate(), Shard(0)) if call > 1 else put(whole),)

    return Run(lambda x: x.cumsum(0), args=args)


ROW = "any other value among the arguments"


@guard(ROW, "training")
def _(put: Put) -> Run:
    def step(x: torch.Tensor, flags: dict[str, bool]) -> torch.Tensor:
        return x * 2 if flags["training"] else x

    return Run(step, args=lambda x, call: (x, {"training": call > 1}))


@guard(ROW, "from 0.5 to 1.5")
def _(put: Put) -> Run:
    return Run(lambda x, scale: x * scale, args=lambda x, call: (x, 1.5 if call > 1 else 0.5))


@guard("which of the arguments are one tensor", "arguments")
def _(put: Put) -> Run:
    def step(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        a.add_(1)
        return a * b

    return Run(step, args=lambda x, call: (x, x * 1 if call > 1 else x))


ROW = "a variable around the step, a global, an attribute, an item that the step reads"


@guard(ROW, "'scale'")
def _(put: Put) -> Run:
    scale = 2.0

    def change() -> None:
        nonlocal scale
        scale = 3.0

    return Run(lambda x: x * scale, once(change))


@guard(ROW, "the global 'FACTOR'")
def _(put: Put) -> Run:
    globals()["FACTOR"] = 2.0
    return Run(lambda x: x * FACTOR, once(lambda: globals().update(FACTOR=3.0)))


@guard(ROW, "the attribute 'scale' of the attribute 'inner'")
def _(put: Put) -> Run:
    config = SimpleNamespace(inner=SimpleNamespace(scale=2.0), calls=0)
    return Run(lambda x: x * config.inner.scale, setting(config.inner, "scale", 3.0))


@guard(ROW, "the item 'bias'")
def _(put: Put) -> Run:
    table = {"bias": 1.0, "other": [1.0]}
    return Run(lambda x: x + table["bias"], once(lambda: table.update(bias=2.0)))


ROW = "a function that it calls: its code, its defaults, the variables around it"


def function(factor: float = 2.0) -> Any:
    power = 2.0

    def called(x: torch.Tensor, factor: float = factor) -> torch.Tensor:
        return x.abs() ** power * factor

    return called


def halved(x: torch.Tensor, factor: float = 2.0) -> torch.Tensor:
    return x / 2 - factor


@guard(ROW, "halved.__code__")
def _(put: Put) -> Run:
    called = FunctionType(halved.__code__, globals(), "called", (2.0,))
    other = (lambda x, factor=2.0: x + factor).__code__
    return Run(lambda x: called(x) + 1, setting(called, "__code__", other))


@guard(ROW, "called")
def _(put: Put) -> Run:
    called = function()
    return Run(lambda x: called(x) + 1, setting(called, "__defaults__", (3.0,)))


@guard(ROW, "'power'")
def _(put: Put) -> Run:
    called = function()
    return Run(lambda x: called(x) + 1, setting(called.__closure__[0], "cell_contents", 3.0))


ROW = "a class: what is looked up of it, a method that is replaced"


def of_a_class(name: str, value: Any) -> Callable[[Put], Run]:
    def make(put: Put) -> Run:
        class Scaled:
            scale = 2.0

            def scaled(self, x: torch.Tensor) -> torch.Tensor:
                return x * self.scale

        scaled = Scaled()
        return Run(lambda x: scaled.scaled(x), setting(Scaled, name, value))

    return make


guard(ROW, "scale")(of_a_class("scale", 3.0))
guard(ROW, "scaled")(of_a_class("scaled", lambda self, x: x - self.scale))


@guard(
    "settings of an optimizer that the step reads outside of `optimizer.step()`, the learning rate "
    "too",
    "an optimizer's lr changed",
)
def _(put: Put) -> Run:
    weight = nn.Parameter(put(torch.ones(4)))
    optimizer = torch.optim.SGD([weight], lr=0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        for group in optimizer.param_groups:
            weight.data.sub_(x.detach() * group["lr"])
        return weight.detach() * 1

    return Run(step, once(lambda: optimizer.param_groups[0].update(lr=0.5)))


ROW = "a layer that is added or replaced, the mode of a module, a hook"


def of_layers(change: Callable[[Any, Put], Any]) -> Callable[[Put], Run]:
    def make(put: Put) -> Run:
        layers = placed(nn.Sequential(nn.Linear(4, 4), nn.Dropout(1.0)), put).eval()
        return Run(lambda x: layers(x).detach(), once(lambda: change(layers, put)))

    return make


def doubled(module: nn.Module, args: Any, out: torch.Tensor) -> torch.Tensor:
    return out * 2


guard(ROW, "")(of_layers(lambda layers, put: layers.append(placed(nn.Linear(4, 2), put))))
guard(ROW, "")(of_layers(lambda layers, put: layers.__setitem__(0, nn.Tanh())))
guard(ROW, "training changed from False to True")(of_layers(lambda layers, put: layers.train()))
guard(ROW, "a hook of Linear")(
    of_layers(lambda layers, put: layers[0].register_forward_hook(doubled))
)


@guard("`requires_grad` of a tensor", "requires_grad changed to False")
def _(put: Put) -> Run:
    layer = placed(nn.Linear(4, 4), put)

    def step(x: torch.Tensor) -> Any:
        layer.zero_grad()
        layer(x).square().sum().backward()
        return [None if p.grad is None else p.grad * 1 for p in layer.parameters()]

    return Run(step, once(lambda: layer.weight.requires_grad_(False)))


@guard("whether a parameter has a gradient", "grad", ONCE_MORE)
def _(put: Put) -> Run:
    weight = nn.Parameter(put(torch.ones(4)))

    def step(x: torch.Tensor) -> torch.Tensor:
        (x * weight).square().sum().backward()
        assert weight.grad is not None
        return weight.grad * 1

    return Run(step, lambda call: setattr(weight, "grad", None) if call == 3 else None)


ROW = "an environment variable and a context variable that it reads"


@guard(ROW, VARIABLE)
def _(put: Put) -> Run:
    os.environ[VARIABLE] = "2"
    change = once(lambda: os.environ.update({VARIABLE: "3"}))
    return Run(lambda x: x * float(os.environ[VARIABLE]), change)


@guard(ROW, "MODE")
def _(put: Put) -> Run:
    MODE.set("sum")
    change = once(lambda: MODE.set("mean"))
    return Run(lambda x: x.sum() if MODE.get() == "sum" else x.mean(), change)


@guard("the elements of a NumPy array that Python itself reads", "")
def _(put: Put) -> Run:
    weights = np.ones(3)
    return Run(lambda x: x * float(weights[1]), once(lambda: weights.__setitem__(1, 4.0)))


ROW = "a number or a shape that Python reads of a plain CPU tensor"


@guard(ROW, "a number that the step reads of a host tensor changed")
def _(put: Put) -> Run:
    done = torch.zeros(())
    return Run(lambda x: -x if done.item() > 100 else x, once(lambda: done.fill_(200)))


@guard(ROW, "")
def _(put: Put) -> Run:
    chosen = torch.tensor([True, False, True, False])
    return Run(lambda x: x * chosen.nonzero().shape[0], once(lambda: chosen.fill_(True)))


ROW = "torch's settings"


@guard(ROW, "hooks of saved tensors", (1, 2))
def _(put: Put) -> Run:
    """Around the second call: the backward pass reads three times what was saved."""
    weight = nn.Parameter(put(torch.ones(4)))

    def step(x: torch.Tensor) -> torch.Tensor:
        (weight * x).square().sum().backward()
        return x * 2

    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t * 3)

    def change(call: int) -> None:
        (hooks.__enter__ if call == 1 else lambda: None)()

    def state() -> Any:
        hooks.__exit__(None, None, None)
        return weight.grad

    return Run(step, change, state=state)


@guard(ROW, "")
def _(put: Put) -> Run:
    weight = nn.Parameter(put(torch.ones(4)))
    state = SimpleNamespace(found=None)

    def step(x: torch.Tensor) -> torch.Tensor:
        state.found = (x * weight).requires_grad
        return x * 2

    return Run(step, once(lambda: torch.set_grad_enabled(False)), state=lambda: state.found)


@guard(ROW, "")
def _(put: Put) -> Run:
    device = "cpu" if put.mesh is None else put.mesh.device_type

    def change() -> None:
        torch.set_autocast_enabled("cpu", True)
        torch.set_autocast_enabled(device, True)

    return Run(lambda x: x[:, None] @ x[None], once(change))


@guard(ROW, "")
def _(put: Put) -> Run:
    change = once(lambda: torch.set_default_dtype(torch.float64))
    return Run(lambda x: x * torch.full((4,), 0.1), change)


# ---------------------------------------------------------------------- what is no guard


@case("no guard", "a counter that nobody reads")
def _(put: Put) -> Run:
    config = SimpleNamespace(calls=0, scale=2.0, step_number=0)

    def change(call: int) -> None:
        config.calls += 1

    def step(x: torch.Tensor, call: torch.Tensor) -> torch.Tensor:
        config.step_number = 7
        return x * config.scale + call

    args: Any = lambda x, call: (x, torch.tensor(float(call)))  # noqa: E731
    return Run(step, change, args, lambda: (config.calls, config.step_number))


@case("no guard", "a list that grows, a log")
def _(put: Put) -> Run:
    history, lines = [], []

    def step(x: torch.Tensor) -> torch.Tensor:
        history.append(x.square().mean())
        return x * 2

    return Run(step, lambda call: lines.append(f"call {call}"), state=lambda: (history, lines))


@case("no guard", "an attribute beside one that is read")
def _(put: Put) -> Run:
    config = SimpleNamespace(scale=2.0, other=0, last=None)
    return Run(lambda x: x * config.scale, lambda call: setattr(config, "other", call))


@case("walked through", "", AFTER_CHANGE)
def _(put: Put) -> Run:
    config = {"scale": 2.0, "other": 1.0}

    def step(x: torch.Tensor) -> torch.Tensor:
        for name in config:
            x = x * config[name]
        return x

    return Run(step, once(lambda: config.update(other=3.0)))


# ---------------------------------------------------------------------- effects


def effect(row: str, traces: tuple[int, ...] = (1, 1, 1)) -> Any:
    return case("effect", row, traces)


@effect("writes in place to tensors, also among the arguments")
def _(put: Put) -> Run:
    weight, given = put(torch.ones(4)), put(torch.ones(4))

    def step(x: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        given.mul_(2)
        weight[1:3].add_(given[:2])
        return x * weight

    return Run(step, args=lambda x, call: (x, given), state=lambda: (weight, given))


@effect("gradients, an optimizer's state")
def _(put: Put) -> Run:
    layer = placed(nn.Linear(4, 4), put)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = layer(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    def state() -> Any:
        return optimizer.state_dict()["state"], [(p, p.grad) for p in layer.parameters()]

    return Run(step, state=state)


@effect("gradients, an optimizer's state", ONCE_MORE)
def _(put: Put) -> Run:
    weight = nn.Parameter(put(torch.ones(4)))
    optimizer = Counting([weight], lr=0.1)

    def step(x: torch.Tensor) -> None:
        weight.grad = x.detach()
        optimizer.step()
        optimizer.zero_grad()

    return Run(step, state=lambda: (optimizer.param_groups[0]["steps"], weight))


ROW = "attributes, items, globals and variables around that are assigned or deleted"


@effect(ROW, (1, 1, 1))
def _(put: Put) -> Run:
    around = None

    def step(x: torch.Tensor) -> torch.Tensor:
        nonlocal around
        around = x + 2
        return x * 2

    return Run(step, state=lambda: around)


@effect(ROW)
def _(put: Put) -> Run:
    owner: Any = SimpleNamespace(loss=None)
    holder: Any = SimpleNamespace()
    latest, shrinks = dict[str, Any](), {"old": 1}
    seen = []

    def step(x: torch.Tensor) -> torch.Tensor:
        global LATEST
        owner.loss = latest["loss"] = x.square().mean()
        LATEST = x + 1
        del holder.old
        del shrinks["old"]
        return x * 2

    def change(call: int) -> None:
        seen.append((owner.loss, dict(latest), LATEST))
        holder.old = shrinks["old"] = 1

    globals()["LATEST"] = None
    return Run(
        step, change, state=lambda: (seen, owner.loss, vars(holder), shrinks, latest, LATEST)
    )


ROW = "elements that are added to lists, deques and sets"


@effect(ROW, (1, 2, 2))  # What is in a set already is not added.
def _(put: Put) -> Run:
    names = set[str]()

    def step(x: torch.Tensor) -> torch.Tensor:
        names.add("loss")
        return x * 2

    return Run(step, state=lambda: sorted(names))


@effect(ROW)
def _(put: Put) -> Run:
    history, recent, losses = [], deque(maxlen=2), set[Any]()

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = x.square().mean()
        history.append(loss)
        recent.append(loss * 2)
        losses.add(loss)
        return loss

    return Run(step, state=lambda: (history, list(recent), sorted(losses, key=float)))


@effect("objects, lists and dicts that it makes and stores")
def _(put: Put) -> Run:
    owner: Any = SimpleNamespace(last=None)
    seen = []

    def step(x: torch.Tensor) -> torch.Tensor:
        owner.last = Batch(x + 1, {"mean": x.mean()}, [x.sum(), "sum"])
        return x * 2

    def state() -> Any:
        kept = [each for each in (*seen, owner.last) if each is not None]
        assert len({*map(id, kept)}) == 3
        return [(each.x, each.loss, each.parts) for each in kept]

    return Run(step, lambda call: seen.append(owner.last), state=state)


ROW = "numbers of the program, in any of those"


@effect(ROW)
def _(put: Put) -> Run:
    owner: Any = SimpleNamespace(last=None)
    history, recent, logs, latest = [], deque(maxlen=2), list[Any](), dict[str, Any]()
    seen = []

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = x.square().sum()
        last = owner.last = latest["loss"] = loss.item()
        history.append(loss.item())
        recent.append(last * 2)
        batch = owner.batch = Batch(x + 1, last, [(x > 0).sum().item(), loss])
        logs.append({"loss": last, "batch": batch, "is_large": loss.item() > 20})
        return loss

    def state() -> Any:
        assert all(each["batch"] is batch for each, batch in zip(logs, seen, strict=False))
        parts = [(each["loss"], each["is_large"], vars(each["batch"])) for each in logs]
        return owner.last, history, list(recent), latest, parts, seen and vars(seen[-1])

    return Run(step, lambda call: seen.append(owner.batch) if call else None, state=state)


@effect(ROW)  # What it reads and writes, it is lent.
def _(put: Put) -> Run:
    meter: Any = SimpleNamespace(total=0.0, count=0)

    def step(x: torch.Tensor) -> torch.Tensor:
        meter.total += x.sum().item()
        meter.count += 1
        meter.mean = meter.total / meter.count
        return x * 2

    return Run(step, state=lambda: vars(meter))


@effect("lists and dicts among the arguments")
def _(put: Put) -> Run:
    given = []

    def step(batch: dict[str, Any], log: list[Any]) -> torch.Tensor:
        batch["loss"] = batch["x"].mean()
        log.append(batch.pop("x") * 2)
        return batch["loss"]

    def args(x: torch.Tensor, call: int) -> tuple[Any, ...]:
        given.append(({"x": x}, [call > 5]))
        return given[-1]

    return Run(step, args=args, state=lambda: given)


@effect("`requires_grad` that it sets")
def _(put: Put) -> Run:
    weight, other = nn.Parameter(put(torch.ones(4))), put(torch.ones(4))

    def step(x: torch.Tensor) -> torch.Tensor:
        weight.requires_grad_(False)
        other.requires_grad = True
        return x * 2

    return Run(step, state=lambda: (weight.requires_grad, other.requires_grad))


@effect("draws of plain CPU tensors")
def _(put: Put) -> Run:
    mine, drawn = torch.Generator().manual_seed(3), []

    def step(x: torch.Tensor) -> torch.Tensor:
        drawn.append(torch.rand(4, generator=mine))
        return x[torch.randperm(4)] * torch.bernoulli(torch.full((4,), 0.5)) + torch.randn(4)

    return Run(step, state=lambda: (drawn, mine.get_state()))


@effect("draws on `x.device`, where `x` is a tensor of the mesh")
def _(put: Put) -> Run:
    return Run(lambda x: x * torch.randn(4, device=x.device))
