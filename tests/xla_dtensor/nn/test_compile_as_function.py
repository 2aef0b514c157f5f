"""A compiled step in the place of a function: as a method, copied, called by several threads."""

from __future__ import annotations

import copy
import gc
import inspect
import itertools
import pickle
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import xla_dtensor as xd
from xla_dtensor.errors import CompileError

SCALE = 3.0


def scaled(x: torch.Tensor) -> torch.Tensor:
    return x * SCALE


class Settings:
    """What a step reads."""

    def __init__(self, scale: float) -> None:
        self.scale = scale


def ones(mesh: xd.DeviceMesh) -> Any:
    return xd.distribute_tensor(torch.ones(8, 4), mesh)


def test_a_method_that_is_compiled_in_its_class(mesh: xd.DeviceMesh) -> None:
    class Trainer:
        def __init__(self, scale: float) -> None:
            self.scale = scale

        @xd.compile
        def step(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.scale

    first, second = Trainer(2.0), Trainer(5.0)
    for trainer in (first, second, first):
        assert trainer.step(ones(mesh)).cpu()[0, 0] == trainer.scale
    first.scale = 7.0
    assert first.step(ones(mesh)).cpu()[0, 0] == 7
    assert Trainer.step(second, ones(mesh)).cpu()[0, 0] == 5
    assert Trainer.step.stats()["calls"] == 5


def test_a_copy_has_programs_of_its_own(mesh: xd.DeviceMesh) -> None:
    step = xd.compile(scaled)
    step(ones(mesh))
    for other in (copy.deepcopy(step), copy.copy(step), pickle.loads(pickle.dumps(step))):
        assert other is not step
        assert other.stats()["calls"] == 0
        assert other(ones(mesh)).cpu()[0, 0] == SCALE


def test_what_holds_a_step_can_be_copied(mesh: xd.DeviceMesh) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(xd.distribute_tensor(torch.ones(4), mesh))
            self.run = xd.compile(torch.square)

        def forward(self, x: torch.Tensor) -> Any:
            return self.run(x * self.weight)

    model = Model()
    average = copy.deepcopy(model)
    with torch.no_grad():
        model.weight.add_(1)
        assert model(ones(mesh)).cpu()[0, 0] == 4
        assert average(ones(mesh)).cpu()[0, 0] == 1


@pytest.mark.only_on("jax")
def test_threads_wait_for_each_other(mesh: xd.DeviceMesh) -> None:
    """Without a lock one thread's trace would see the other's tensors."""
    total = xd.distribute_tensor(torch.zeros(4), mesh)

    def add(x: torch.Tensor, number: int) -> torch.Tensor:
        total.add_(x.sum() * number)
        return x * number

    steps = [xd.compile(add), xd.compile(lambda x, number: add(x, number))]
    found: list[Any] = []
    batch = ones(mesh)

    def work(step: Any, numbers: range) -> None:
        found.extend((number, step(batch, number)) for number in numbers)

    threads = [
        threading.Thread(target=work, args=(step, range(start, start + 4)))
        for step, start in zip(steps, (1, 5), strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(number for number, _ in found) == [*range(1, 9)]
    assert all(torch.equal(y.cpu(), torch.full((8, 4), float(n))) for n, y in found)
    assert total.cpu().tolist() == [32.0 * sum(range(1, 9))] * 4


# ---------------------------------------------------------------------- iterators


def numbers() -> Iterator[float]:
    while True:
        yield 1.0


def loader() -> Iterator[Any]:
    return iter(DataLoader(TensorDataset(torch.ones(8, 4)), batch_size=2))


ITERATORS: dict[str, Callable[[], Iterator[Any]]] = {
    "list_iterator": lambda: iter([1.0, 2.0]),
    "generator": numbers,
    "count": lambda: itertools.count(1),
    "zip": lambda: zip([1.0], [2.0], strict=True),
    "_SingleProcessDataLoaderIter": loader,
}


def value(element: Any) -> Any:
    while isinstance(element, list | tuple):
        element = element[0]
    return element.sum() if isinstance(element, torch.Tensor) else element


@pytest.mark.only_on("jax")
@pytest.mark.parametrize("how", ["next", "for", "library"])
@pytest.mark.parametrize("name", ITERATORS)
def test_taking_from_an_older_iterator_is_refused(mesh: xd.DeviceMesh, name: str, how: str) -> None:
    iterator = ITERATORS[name]()

    def taking(x: torch.Tensor) -> torch.Tensor:
        if how == "next":
            return x * value(next(iterator))
        if how == "library":
            return x * value(list(itertools.islice(iterator, 1)))
        for element in iterator:
            return x * value(element)
        return x

    with pytest.raises(CompileError, match=f"made before the call, a {name}"):
        xd.compile(taking)(ones(mesh))


@pytest.mark.only_on("jax")
def test_an_argument_that_is_an_iterator_is_refused(mesh: xd.DeviceMesh) -> None:
    step = xd.compile(lambda x, scales: x * sum(scales))
    with pytest.raises(CompileError, match="pass a list"):
        step(ones(mesh), iter([1.0, 2.0]))
    assert step(ones(mesh), [1.0, 2.0]).cpu()[0, 0] == 3


def test_iterators_of_the_step_itself(mesh: xd.DeviceMesh) -> None:
    scales, unused = [1.0, 2.0, 3.0], iter([5.0])

    def step(x: torch.Tensor, other: Any = None) -> torch.Tensor:
        mine = iter(scales)
        other = next(unused) if other is None else other
        return x * next(mine) * next(mine) + sum(mine) + other

    compiled = xd.compile(step)
    assert compiled(ones(mesh), 1.0).cpu()[0, 0] == 6
    scales[1] = 4.0
    assert compiled(ones(mesh), 1.0).cpu()[0, 0] == 8


class Counted:
    """An iterator of the user's own."""

    def __init__(self) -> None:
        self.count = 0.0

    def __iter__(self) -> Counted:
        return self

    def __next__(self) -> float:
        self.count += 1
        return self.count


def test_an_iterator_of_the_users_own(mesh: xd.DeviceMesh) -> None:
    counted = Counted()
    step = xd.compile(lambda x: x * next(counted))
    assert [step(ones(mesh)).cpu()[0, 0].item() for _ in range(3)] == [1, 2, 3]


# ---------------------------------------------------------------------- memory


@pytest.mark.only_on("jax")
def test_what_a_replaced_program_held_is_let_go(mesh: xd.DeviceMesh) -> None:
    step = xd.compile(lambda x, settings: x * settings.scale)
    references = []
    for call in range(3):
        settings = Settings(float(call))
        references.append(weakref.ref(settings))
        assert step(ones(mesh), settings).cpu()[0, 0] == call
    owner = Settings(2.0)
    compiled = xd.compile(lambda x: x * owner.scale)
    assert compiled(ones(mesh)).cpu()[0, 0] == 2
    reference = weakref.ref(owner)
    owner = Settings(4.0)
    assert compiled(ones(mesh)).cpu()[0, 0] == 4
    gc.collect()
    assert reference() is None


@pytest.mark.only_on("jax")
def test_an_argument_that_is_written_to_gives_up_its_memory(mesh: xd.DeviceMesh) -> None:
    @xd.compile
    def step(cache: torch.Tensor, other: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        cache.add_(x)
        other.mul_(2)
        return cache.sum()

    cache, other, x = (xd.distribute_tensor(torch.ones(8, 4), mesh) for _ in range(3))
    kept = cache.detach()
    for number in range(1, 4):
        assert float(step(cache, other, x)) == 32 * (1 + number)
    assert torch.equal(cache.cpu(), torch.full((8, 4), 4.0))
    assert torch.equal(kept.cpu(), cache.cpu())
    assert torch.equal(other.cpu(), torch.full((8, 4), 8.0))
    assert step.hlo().count("-alias") == 2
    assert float(step(cache, cache, x)) == 32 * 10  # one tensor: (4 + 1) * 2
    assert torch.equal(cache.cpu(), torch.full((8, 4), 10.0))
    assert torch.equal(x.cpu(), torch.ones(8, 4))


def test_a_step_has_the_signature_of_its_function() -> None:
    def step(x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        """Scale."""
        return x * scale

    compiled = xd.compile(step)
    assert inspect.signature(compiled) == inspect.signature(step)
    assert (compiled.__name__, compiled.__doc__) == ("step", "Scale.")
