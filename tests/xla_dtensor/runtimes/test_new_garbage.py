"""Collections of what is new: what they find, and that everything is in sight again after them."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from xla_dtensor.runtimes.live_objects import live_objects
from xla_dtensor.runtimes.new_garbage import old_objects_aside, tracked_objects


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


def test_who_searches_does_not_make_old_objects_new() -> None:
    kept = Node()
    with old_objects_aside():
        before = tracked_objects()
        assert kept in live_objects(Node)
        with old_objects_aside():
            new = Node()
        found = tracked_objects() - before
        assert id(new) in found
        assert id(kept) not in found
    assert {id(kept), id(new)} < tracked_objects()
