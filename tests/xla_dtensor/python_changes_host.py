"""Steps that compute, draw and read on the host, on plain CPU tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.xla_dtensor.python_changes import Put, adding, case, nothing, once


@case(traces=1)
def a_host_tensor_is_written(put: Put) -> Any:
    weight = torch.ones(4)
    return lambda x: x * (weight[1:3].sum() + 1) + weight, adding(weight)


@case(traces=1)
def memory_of_numpy(put: Put) -> Any:
    weight = np.ones(4)

    def change(call: int) -> None:
        weight[:] = call

    return lambda x: x * torch.from_numpy(weight) + torch.tensor(weight), change


@case(traces=2)
def elements_of_numpy(put: Put) -> Any:
    weights = np.ones(3)

    def change() -> None:
        weights[1] = 4.0

    return lambda x: x * weights[1] + weights.sum(), once(change)


@case(traces=1)
def draws_of_a_diffusion(put: Put) -> Any:
    alphas = torch.linspace(1, 0.01, 10)

    def step(x: torch.Tensor) -> torch.Tensor:
        t = torch.randint(0, 10, (x.shape[0],))
        noise = torch.randn(tuple(x.shape))
        a = alphas[t][:, None]
        return (a.sqrt() * x + (1 - a).sqrt() * noise - noise).square().mean()

    return step, nothing


@case(traces=1)
def draws_of_all_kinds(put: Put) -> Any:
    def step(x: torch.Tensor) -> torch.Tensor:
        order = torch.randperm(4)
        kept = torch.bernoulli(torch.full((4,), 0.5))
        drawn = torch.empty(4).uniform_() + torch.normal(torch.zeros(4), torch.ones(4))
        mixed = torch.distributions.Beta(torch.ones(1), torch.ones(1)).sample()
        dropped = functional.dropout(torch.ones(4), 0.5)
        return x[:, order] * kept + drawn * mixed + dropped + torch.rand_like(torch.ones(4))

    return step, nothing


@case(traces=1)
def generators(put: Put) -> Any:
    mine = torch.Generator().manual_seed(5)

    def step(x: torch.Tensor) -> torch.Tensor:
        fresh = torch.Generator().manual_seed(1)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            same = torch.rand(4)
        return x + torch.rand(4, generator=mine) + torch.rand(4, generator=fresh) + same

    return step, nothing


@case(traces=2)
def draws_in_a_checkpoint(put: Put) -> Any:
    weight = nn.Parameter(put(torch.ones(4)))
    optimizer = torch.optim.SGD([weight], lr=0.1)

    def block(x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x * weight + torch.rand(4)) * torch.rand(4)

    def step(x: torch.Tensor) -> torch.Tensor:
        out: Any = checkpoint(block, x, use_reentrant=False)
        loss = out.sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach() + torch.rand(())

    return step, nothing


class Counting(nn.Module):
    """Counts its calls in a buffer that stays on the host."""

    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x / self.calls


@case(traces=1)
def a_buffer_of_the_host_is_counted(put: Put) -> Any:
    layer = Counting()
    return lambda x: layer(x), nothing


@case(traces=4)
def a_number_of_a_host_tensor(put: Put) -> Any:
    weight = torch.ones(4)

    def step(x: torch.Tensor) -> torch.Tensor:
        return x * weight[0].item() if weight.sum() < 6 else x * sum(weight.tolist())

    return step, adding(weight, 2, 4)


@case(traces=2)
def a_shape_of_a_host_tensor(put: Put) -> Any:
    chosen = torch.tensor([True, False, True, False])
    return (
        lambda x: x[:, torch.arange(4)[chosen]] * chosen.nonzero().shape[0],
        once(lambda: chosen.fill_(True)),
    )


@case(traces=1)
def host_tensors_are_returned(put: Put) -> Any:
    weight = torch.ones(4)

    def step(x: torch.Tensor) -> Any:
        return x * weight, weight * 2, torch.rand(2), torch.ones(2)

    return step, adding(weight)


@case(traces=1)
def a_gradient_of_the_host(put: Put) -> Any:
    weight = torch.ones(4, requires_grad=True)

    def step(x: torch.Tensor) -> torch.Tensor:
        (grad,) = torch.autograd.grad((weight.exp() * torch.arange(4.0)).sum(), weight)
        return x * grad

    def change(call: int) -> None:
        with torch.no_grad():
            weight.add_(0.1)

    return step, change


@case(traces=1)
def constants_of_the_host(put: Put) -> Any:
    def step(x: torch.Tensor) -> torch.Tensor:
        mask = torch.ones(4, 4).tril()
        mask[0, 1] = torch.tensor(5.0)
        return x @ mask + torch.arange(4) + torch.tensor([1.0, 2.0, 3.0, 4.0])

    return step, nothing
