"""Steps that assign, that are given what they also find by name, and whose objects are replaced."""

from __future__ import annotations

import collections
import dataclasses
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from tests.xla_dtensor.python_changes import (
    NUM_CALLS,
    Given,
    Put,
    adding,
    case,
    nothing,
    once,
    placed,
)

# ---------------------------------------------------------------------- what a step assigns


@case(traces=2)
def two_names_change_places(put: Put) -> Any:
    slow, fast = put(torch.ones(4)), put(torch.full((4,), 3.0))

    def step(x: torch.Tensor) -> torch.Tensor:
        nonlocal slow, fast
        slow, fast = fast, slow
        return x * slow + fast.square()

    return step, nothing


@case(traces=2)
def an_object_that_is_assigned_to_is_replaced(put: Put) -> Any:
    owner = SimpleNamespace(state=SimpleNamespace(mean=put(torch.zeros(4)), seen=0))

    def step(x: torch.Tensor) -> torch.Tensor:
        owner.state.mean = 0.9 * owner.state.mean + x.mean(0)
        return owner.state.mean + x

    def change() -> None:
        owner.state = SimpleNamespace(mean=put(torch.ones(4)), seen=0)

    return step, once(change)


@case(traces=1)
def results_are_added_to_containers(put: Put) -> Any:
    latest: dict[str, torch.Tensor] = {}
    history: collections.deque[torch.Tensor] = collections.deque(maxlen=2)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = x.square().mean()
        latest.update(loss=loss)
        history.append(loss)
        return loss

    return step, nothing


@case(traces=NUM_CALLS)
def results_in_containers_are_read(put: Put) -> Any:
    latest: dict[str, torch.Tensor] = {}
    history: collections.deque[torch.Tensor] = collections.deque(maxlen=2)

    def step(x: torch.Tensor) -> torch.Tensor:
        latest["loss"] = x.square().mean()
        history.append(latest["loss"])
        return latest["loss"] + sum(history)

    return step, nothing


@case(traces=3)
def a_name_beside_the_step(put: Put) -> Any:
    last = SimpleNamespace(loss=None, mode="first")

    def step(x: torch.Tensor) -> Any:
        last.loss = x.sum()
        return x * 2, last.loss

    return step, once(lambda: setattr(last, "loss", "forgotten"))


@case(traces=2)
def gradients_are_assigned(put: Put) -> Any:
    weight = nn.Parameter(put(torch.ones(4)))
    last = SimpleNamespace(grad=None)

    def step(x: torch.Tensor) -> None:
        weight.grad = None
        (x * weight).square().mean().backward()
        last.grad = weight.grad

    def read(x: torch.Tensor) -> Any:
        step(x)
        return x * 1

    def change(call: int) -> None:
        assert weight.grad is not None
        assert last.grad is weight.grad
        with torch.no_grad():
            weight.sub_(weight.grad)

    return read, change


@case(traces=3)
def a_flag_that_the_step_clears(put: Put) -> Any:
    owner = SimpleNamespace(is_first=True)

    def step(x: torch.Tensor) -> torch.Tensor:
        if owner.is_first:
            owner.is_first = False
            return x * 10
        return x + 1

    return step, once(lambda: setattr(owner, "is_first", True))


# ---------------------------------------------------------------------- arguments


@case(traces=2)
def an_argument_that_has_a_name_too(put: Put) -> Any:
    weight = put(torch.ones(4))

    def step(x: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        given.add_(1)
        return x * weight + given

    return Given(step, weight), nothing


@case(traces=1)
def an_argument_is_given_twice(put: Put) -> Any:
    weight = put(torch.ones(4))

    def step(x: torch.Tensor, one: torch.Tensor, two: torch.Tensor) -> torch.Tensor:
        one.add_(1)
        return x * two

    return Given(step, weight, weight), nothing


@case(traces=3)
def gradients_of_arguments(put: Put) -> Any:
    weight = put(torch.ones(4)).requires_grad_()

    def step(x: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        (x * given.square()).sum().backward()
        assert given.grad is not None
        return given.grad * 1

    def forget() -> None:
        weight.grad = None

    return Given(step, weight), once(forget)


@dataclasses.dataclass
class Batch:
    """An object that a step is given."""

    x: torch.Tensor
    scale: float = 1.0


@case(traces=2)
def a_dataclass_with_tensors(put: Put) -> Any:
    batch = Batch(put(torch.ones(4)))

    def step(x: torch.Tensor, given: Batch) -> torch.Tensor:
        return x * given.x * given.scale

    def change(call: int) -> None:
        batch.x = put(torch.full((4,), float(call)))
        if call == 1:
            batch.scale = 3.0

    return Given(step, batch), change


@case(traces=2)
def a_user_dict_with_tensors(put: Put) -> Any:
    batch: Any = collections.UserDict(weight=put(torch.ones(4)), kind="a")

    def step(x: torch.Tensor, given: Any) -> torch.Tensor:
        y = x * given["weight"]
        return y if given["kind"] == "a" else -y

    def change(call: int) -> None:
        batch["weight"] = put(torch.full((4,), float(call)))
        if call == 2:
            batch["kind"] = "b"

    return Given(step, batch), change


# ---------------------------------------------------------------------- hooks and optimizers


class Scaled(torch.autograd.Function):
    """An operation of the user's own."""

    factor = 2.0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * Scaled.factor

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * Scaled.factor * 10


@case(traces=3)
def an_operation_of_the_users_own(put: Put) -> Any:
    weight = nn.Parameter(put(torch.ones(4)))
    Scaled.factor = 2.0

    def step(x: torch.Tensor) -> torch.Tensor:
        weight.grad = None
        y: Any = Scaled.apply(x * weight)
        y.sum().backward()
        assert weight.grad is not None
        return weight.grad + y.detach().sum()

    return step, once(lambda: setattr(Scaled, "factor", 3.0))


@case(traces=3)
def a_hook_of_a_tensor(put: Put) -> Any:
    weight = nn.Parameter(put(torch.ones(4)))

    def step(x: torch.Tensor) -> torch.Tensor:
        weight.grad = None
        (x * weight).sum().backward()
        assert weight.grad is not None
        return weight.grad * 1

    def hook(grad: torch.Tensor) -> torch.Tensor:
        return grad * 2

    return step, once(lambda: weight.register_hook(hook))


@case(traces=2)
def a_hook_of_a_module(put: Put) -> Any:
    layer = placed(nn.Linear(4, 4), put)

    def hook(module: nn.Module, args: Any, out: torch.Tensor) -> torch.Tensor:
        return out * 2

    return lambda x: layer(x).detach(), once(lambda: layer.register_forward_hook(hook))


@case(traces=4)
def a_group_is_added_to_an_optimizer(put: Put) -> Any:
    first, second = (nn.Parameter(put(torch.full((4,), value))) for value in (1.0, 2.0))
    optimizer = torch.optim.SGD([first], lr=0.1, momentum=0.9)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = (x * first * second).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach() + first.detach().sum() + second.detach().sum()

    return step, once(lambda: optimizer.add_param_group({"params": [second], "lr": 0.01}))


@case(traces=4)
def the_optimizer_is_another_one(put: Put) -> Any:
    weight = nn.Parameter(put(torch.ones(4)))
    owner = SimpleNamespace(optimizer=torch.optim.SGD([weight], lr=0.1, momentum=0.9))

    def step(x: torch.Tensor) -> torch.Tensor:
        owner.optimizer.zero_grad()
        loss = (x * weight).square().mean()
        loss.backward()
        owner.optimizer.step()
        return weight.detach() * 1

    def change() -> None:
        owner.optimizer = torch.optim.AdamW([weight], lr=0.05)

    return step, once(change)


@case(traces=3)
def the_settings_of_an_optimizer(put: Put) -> Any:
    weight = nn.Parameter(put(torch.ones(4)))
    optimizer = torch.optim.AdamW([weight], lr=0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        (x * weight).square().mean().backward()
        optimizer.step()
        return weight.detach() * 1

    def change(call: int) -> None:
        group = optimizer.param_groups[0]
        group.update(lr=0.1 / (call + 1), betas=(0.8, 0.99), weight_decay=0.1 * call)

    return step, change


# ---------------------------------------------------------------------- the host


@case(traces=2)
def a_mask_that_decides_a_shape(put: Put) -> Any:
    chosen = torch.tensor([True, False, True, False])
    return lambda x: x[:, chosen], once(lambda: chosen.fill_(True))


@case(traces=1)
def a_mask_that_decides_no_shape(put: Put) -> Any:
    chosen = torch.tensor([True, False, True, False])
    return lambda x: x.masked_fill(chosen, 0.0), once(lambda: chosen.fill_(True))


@case(traces=2)
def a_buffer_that_a_module_is_given_anew(put: Put) -> Any:
    layer = nn.Module()
    layer.register_buffer("scale", put(torch.ones(4)))

    def change(call: int) -> None:
        layer.scale = put(torch.full((4,), float(call)))

    return lambda x: x * layer.scale, change


@case(traces=1)
def a_view_of_a_tensor_of_the_mesh_is_written(put: Put) -> Any:
    weight = put(torch.ones(4))
    return lambda x: x * weight, adding(weight[1:3])
