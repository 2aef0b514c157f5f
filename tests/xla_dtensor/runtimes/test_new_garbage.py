"""Collections of what is new: what they find, and that everything is in sight again after them."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from xla_dtensor.runtimes.live_objects import live_objects
from xla_dtensor.runtimes.new_garbage import (
    KnownObjects,
    old_objects_aside,
    show_all_objects,
    tracked_objects,
)


class Node:
    """An object that holds itself."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def _nothing_aside() -> Iterator[None]:
    assert gc.get_freeze_count() == 0
    yield
    assert gc.get_freeze_count() == 0


def dropped_node() -> weakref.ref[Node]:
    return weakref.ref(Node())


def test_only_what_is_new_is_collected() -> None:
    gc.disable()  # of its own accord it might collect the old one before
    try:
        old = dropped_node()
        with old_objects_aside():
            new = dropped_node()
            gc.collect()
            assert new() is None
            assert old() is not None
        gc.collect()
        assert old() is None
    finally:
        gc.enable()


def test_after_an_error_everything_is_in_sight() -> None:
    with pytest.raises(ValueError, match="inside"), old_objects_aside():
        raise ValueError("inside")


def test_who_searches_finds_old_objects_and_the_end_still_collects() -> None:
    kept = Node()
    with old_objects_aside(), old_objects_aside():
        new = dropped_node()
        assert kept in live_objects(Node)
        gc.collect()
        assert new() is None


def test_what_the_user_froze_stays_frozen() -> None:
    gc.freeze()
    try:
        with old_objects_aside():
            pass
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()


def ids(objects: list[Any]) -> set[int]:
    return set(map(id, objects))


def test_who_searches_does_not_make_old_objects_new() -> None:
    kept = Node()
    with old_objects_aside():
        before = KnownObjects.of(tracked_objects())
        assert kept in live_objects(Node)
        with old_objects_aside():
            new = Node()
        found = ids(tracked_objects(before))
        assert id(new) in found
        assert id(kept) not in found
    assert {id(kept), id(new)} < ids(tracked_objects())


def test_what_takes_the_place_of_an_old_object_is_new() -> None:
    """Its address would be that of the old one, were that not kept."""
    old = [[i] for i in range(10_000)]
    with old_objects_aside():
        before = KnownObjects.of(tracked_objects())
        show_all_objects()
        del old[:]
        new = [[i] for i in range(10_000)]
        assert ids(new) <= ids(tracked_objects(before))


def test_so_is_what_takes_the_place_of_one_that_was_taken_down() -> None:
    old = [[i] for i in range(10_000)]
    before = KnownObjects.of(tracked_objects())
    del old[:]
    new = [[i] for i in range(10_000)]
    assert ids(new) <= ids(tracked_objects(before))
