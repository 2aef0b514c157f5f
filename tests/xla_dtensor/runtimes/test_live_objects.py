"""Live objects of a class, found without getting in the way of other threads."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator

import torch

from xla_dtensor.hosts.data.prefetch import Ahead
from xla_dtensor.runtimes.live_objects import live_objects


class Thing:
    """Something to be found."""


class Better(Thing):
    """Something of a derived class."""


def test_all_of_a_class_and_of_derived_ones_are_found() -> None:
    kept: list[object] = [Thing(), Better(), object(), Thing]
    found = live_objects(Thing)
    assert {id(each) for each in found} == {id(kept[0]), id(kept[1])}
    assert live_objects(Better) == [kept[1]]
    assert gc.isenabled()


def test_what_the_user_froze_is_found_and_stays_frozen() -> None:
    """``gc.freeze()`` after the model is made is advice for servers; collections skip it then."""
    kept = Thing()
    gc.freeze()
    try:
        assert live_objects(Thing) == [kept]
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()


def test_tuples_that_a_loader_makes_stay_whole() -> None:
    """Without the lock it raises SystemError within a few turns."""
    kept = Thing()
    done = threading.Event()

    def make(stopped: Callable[[], bool]) -> Iterator[tuple[int, ...]]:
        while not done.is_set():
            yield tuple(time.sleep(0) or i for i in range(50))

    def search() -> None:
        for _ in range(20):
            assert live_objects(Thing) == [kept]
        done.set()

    searching = threading.Thread(target=search)
    searching.start()
    assert all(len(each) == 50 for each in Ahead(make, depth=2))
    searching.join()


def test_a_tensor_that_only_torch_held_stays_whole() -> None:
    """What only a graph has refers to its Python object, not the other way round."""
    leaf = torch.ones(3, requires_grad=True)
    leaf.marked = True  # type: ignore[attr-defined]
    graph = leaf * leaf
    del leaf
    (found,) = [one for one in live_objects(torch.Tensor) if "marked" in vars(one)]
    del graph
    gc.collect()
    assert found.grad is None
    assert found.tolist() == [1.0] * 3
