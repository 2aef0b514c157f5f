"""ShardedLoader on one process: order, last batches, reading ahead, state."""

from __future__ import annotations

import gc
import importlib
import json
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard
from torch.utils.data import DataLoader, IterableDataset

import xla_dtensor as xd
from xla_dtensor.errors import DataError

ROWS = [Shard(0), Replicate()]


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


class Numbers:
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(index)


class WithStateDict:
    """torchdata's protocol: the state is on the loader, of the batch given last."""

    def __init__(self, count: int) -> None:
        self.count, self.place, self.begun, self.read = count, 0, 0, 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        self.place, self.begun = self.begun, 0
        while self.place < self.count:
            self.place, self.read = self.place + 1, self.read + 1
            yield torch.full((8,), self.place - 1)

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.begun = state["place"]


class WithGetState:
    """grain's protocol: the state is on the iterator, as bytes."""

    def __init__(self, count: int) -> None:
        self.count, self.read = count, 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        return _WithGetState(self)


class _WithGetState(Iterator[torch.Tensor]):
    def __init__(self, loader: WithGetState) -> None:
        self.loader, self.place = loader, 0

    def __next__(self) -> torch.Tensor:
        if self.place == self.loader.count:
            raise StopIteration
        self.place, self.loader.read = self.place + 1, self.loader.read + 1
        return torch.full((8,), self.place - 1)

    def get_state(self) -> bytes:
        return json.dumps({"place": self.place}).encode()

    def set_state(self, state: bytes) -> None:
        self.place = json.loads(state)["place"]


class Plain:
    """No state: read again from its beginning."""

    def __init__(self, count: int) -> None:
        self.count, self.read = count, 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        for place in range(self.count):
            self.read += 1
            yield torch.full((8,), place)


def values(loader: Any) -> list[Any]:
    return [batch.full_tensor().tolist() for batch in loader]


def firsts(loader: Any) -> list[int]:
    return [batch.full_tensor()[0].item() for batch in loader]


def loaders() -> set[threading.Thread]:
    return {t for t in threading.enumerate() if t.name == "xla_dtensor loader"}


def test_any_iterable_and_epochs(mesh: xd.DeviceMesh) -> None:
    data = Numbers(20)
    sampler = xd.ShardedSampler(data, 8, mesh, ROWS, seed=1)
    loader = xd.ShardedLoader(DataLoader(data, batch_sampler=sampler), mesh, ROWS)  # pyright: ignore[reportArgumentType]
    assert len(loader) == 2
    first, second = values(loader), values(loader)
    assert first != second
    assert loader.epoch == 2
    loader.set_epoch(0)
    assert values(loader) == first
    next(iter(loader))
    assert loader.state_dict()["epoch"] == 1
    assert values(loader) == second


def test_an_iterable_data_set_with_a_short_batch(mesh: xd.DeviceMesh) -> None:
    class Items(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(10))

    def batches(**options: Any) -> list[Any]:
        return values(xd.ShardedLoader(DataLoader(Items(), batch_size=4), mesh, ROWS, **options))

    assert batches() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert batches(last="pad", pad_value=-7)[2] == [8, 9, -7, -7]
    with pytest.raises(DataError, match=r"last='error', and batch 3 has too few rows in a process"):
        batches(last="error")
    with pytest.raises(DataError, match=r"gave 3 batches, and each had too few rows for batch_si"):
        batches(batch_size=6)


def test_masks(mesh: xd.DeviceMesh) -> None:
    def masked(*batches: Any, **options: Any) -> Any:
        loader = xd.ShardedLoader(batches, mesh, ROWS, last="pad", mask="real", **options)
        return list(loader)[-1]

    x, short = torch.arange(4), torch.arange(3)
    found = masked({"x": x}, {"x": short, "y": "text"})
    assert found["real"].tolist() == [True, True, True, False]
    assert found["real"].placements == tuple(ROWS)
    assert found["x"].tolist() == [0, 1, 2, 0]
    assert masked((x, x), (short, short), pad_value=[1, 2])[1].tolist() == [0, 1, 2, 2]
    assert isinstance(masked((x, x)), tuple)
    assert masked([x, x])[2].tolist() == [True] * 4
    assert masked(x, short)[1].tolist() == [True, True, True, False]
    with pytest.raises(DataError, match=r"mask='real', and the loader's batches have that key"):
        masked({"real": x})
    with pytest.raises(DataError, match=r"for batches of type Pair\. A named tuple has no place"):
        masked(Pair(x, x))


def test_reading_ahead_is_bounded_and_ends(mesh: xd.DeviceMesh) -> None:
    before = loaders()
    source = Plain(50)
    loader = xd.ShardedLoader(source, mesh, ROWS, prefetch=2)
    for batch in loader:
        assert batch.full_tensor()[0].item() == 0
        time.sleep(0.3)
        assert source.read <= 4  # taken, two that wait, one in the making
        break
    del batch
    gc.collect()
    assert loaders() == before
    with xd.ShardedLoader(source, mesh, ROWS, prefetch=2) as loader:
        taken = iter(loader)
        next(taken)
        assert loaders() != before
    assert loaders() == before
    with pytest.raises(StopIteration):
        next(taken)
    assert firsts(xd.ShardedLoader(Plain(3), mesh, ROWS, prefetch=0)) == [0, 1, 2]
    assert loaders() == before


@pytest.mark.parametrize("prefetch", [0, 2])
def test_an_error_comes_with_its_traceback(mesh: xd.DeviceMesh, prefetch: int) -> None:
    def failing() -> Iterator[torch.Tensor]:
        yield torch.ones(8)
        raise KeyError("a file")

    taken = iter(xd.ShardedLoader(failing(), mesh, ROWS, prefetch=prefetch))
    next(taken)
    with pytest.raises(KeyError, match="a file") as raised:
        next(taken)
    assert "in failing" in "".join(traceback.format_exception(raised.value))
    with pytest.raises(StopIteration):
        next(taken)


@pytest.mark.parametrize("make", [WithStateDict, WithGetState, Plain])
@pytest.mark.parametrize("every", [1, 2])
def test_state_is_that_of_the_batch_taken(
    mesh: xd.DeviceMesh, make: Callable[[int], Any], every: int
) -> None:
    for taken in (0, 1, 3, 5):
        begun = xd.ShardedLoader(make(5), mesh, ROWS, prefetch=3, snapshot_every=every)
        seen: list[int] = []
        epoch = iter(begun)
        for _ in range(taken):
            seen.append(next(epoch).full_tensor()[0].item())
            time.sleep(0.02)
        state = begun.state_dict()
        assert (state["epoch"], state["batches"]) == (0, taken)
        source = make(5)
        rest = xd.ShardedLoader(source, mesh, ROWS, prefetch=3, snapshot_every=every)
        rest.load_state_dict(state)
        assert seen + firsts(rest) == list(range(5))
        skipped = taken if make is Plain else taken % every
        assert source.read == 5 - taken + skipped
        assert rest.epoch == 1
        assert firsts(rest) == list(range(5))
        begun.close()


def test_states_that_do_not_fit(mesh: xd.DeviceMesh) -> None:
    def loader(length: int = 20, size: int = 4, seed: int = 0) -> xd.ShardedLoader:
        sampler = xd.ShardedSampler(length, size, mesh, ROWS, seed=seed)
        source = DataLoader(Numbers(length), batch_sampler=sampler)  # pyright: ignore[reportArgumentType]
        return xd.ShardedLoader(source, mesh, ROWS)

    begun = loader()
    next(iter(begun))
    state = begun.state_dict()
    with pytest.raises(
        DataError, match=r"batch_size=8 was given the state of one with batch_size="
    ):
        loader(size=8).load_state_dict(state)
    with pytest.raises(
        DataError, match=r"with seed=3 was given the state of one with seed=0\. Its"
    ):
        loader(seed=3).load_state_dict(state)
    with pytest.raises(DataError, match=r"length=24 was given the state of one with length=20\. I"):
        loader(length=24).load_state_dict(state)
    with pytest.raises(DataError, match=r"without a ShardedSampler was given the state of one of"):
        xd.ShardedLoader(Plain(3), mesh, ROWS).load_state_dict(state)
    with pytest.raises(DataError, match=r"was given a state of version=None\. It reads version=1"):
        loader().load_state_dict({})


def test_arguments_that_do_not_fit(mesh: xd.DeviceMesh) -> None:
    for wrong in ({"check": "now"}, {"prefetch": -1}, {"snapshot_every": 0}):
        with pytest.raises(DataError, match="One of them is out of range"):
            xd.ShardedLoader([], mesh, ROWS, **wrong)  # pyright: ignore[reportArgumentType]
    with pytest.raises(
        DataError, match=r"called with last='keep'\. It says what becomes of a batc"
    ):
        xd.ShardedLoader([], mesh, ROWS, last="keep")  # pyright: ignore[reportArgumentType]
    with pytest.raises(DataError, match=r"gave a batch of type=str without a tensor that has rows"):
        list(xd.ShardedLoader(["text"], mesh, ROWS))


@pytest.mark.only_on("jax")
def test_a_thread_that_loads_takes_no_part_in_a_trace(
    mesh: xd.DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = importlib.import_module("xla_dtensor.runtimes.jax.arrays.trace").Trace
    adopt, adopting = trace.adopt, set[str]()

    def noted(self: Any, storage: Any) -> None:
        adopting.add(threading.current_thread().name)
        adopt(self, storage)

    monkeypatch.setattr(trace, "adopt", noted)
    # The step's trace waits for the thread, which makes a batch, and this one waits for the trace.
    monkeypatch.setattr("xla_dtensor.runtimes.live_objects._WAIT_SECONDS", 0.1)
    go, made = threading.Event(), threading.Event()
    weight = xd.distribute_tensor(torch.ones(8), mesh, ROWS)

    def batches() -> Iterator[torch.Tensor]:
        yield torch.full((8,), 1.0)
        go.wait(30)
        yield torch.full((8,), 2.0)
        made.set()
        yield torch.full((8,), 3.0)

    loader = iter(xd.ShardedLoader(batches(), mesh, ROWS, prefetch=2))

    @xd.compile
    def step(x: Any) -> Any:
        go.set()  # while the step is traced, the second batch is put on the devices
        made.wait(2)  # it may also have to wait until the trace has ended
        return x * weight

    found = [step(next(loader)).full_tensor()[0].item()]
    second, third = loader
    second.add_(10)
    found += [step(batch).full_tensor()[0].item() for batch in (third, second)]
    assert adopting == {threading.current_thread().name}
    assert found == [1.0, 3.0, 12.0]  # the step does not write to what came while it was traced


def test_training_goes_on(mesh: xd.DeviceMesh) -> None:
    data = Numbers(32)
    sampler = xd.ShardedSampler(data, 8, mesh, ROWS)
    weight = xd.distribute_tensor(torch.zeros(1), mesh).requires_grad_()
    for batch in xd.ShardedLoader(DataLoader(data, batch_sampler=sampler), mesh, ROWS):  # pyright: ignore[reportArgumentType]
        loss: Any = (weight * batch).sum()
        loss.backward()
    gradient: Any = weight.grad
    assert gradient.full_tensor().item() == sum(range(32))
