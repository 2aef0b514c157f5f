"""Processes meet before JAX's service starts, and who does not come is named."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tests.hosts import free_port
from xla_dtensor.errors import RuntimeSetupError
from xla_dtensor.hosts.processes import machine_facts, meet


def outcomes(*calls: Callable[[], Any]) -> list[Any]:
    """What each call returns or raises, all run at once."""
    found: list[Any] = [None] * len(calls)

    def run(place: int) -> None:
        try:
            found[place] = calls[place]()
        except RuntimeSetupError as error:
            found[place] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    return found


def arriving(
    indices: Sequence[int], count: int, seconds: float = 10, **facts: Any
) -> list[Callable[[], Any]]:
    address = f"127.0.0.1:{free_port()}"
    return [
        lambda i=i: meet(address, count, i, {"host": f"host{i}", "pid": i, **facts}, seconds)
        for i in indices
    ]


def test_all_learn_of_all() -> None:
    found = outcomes(*arriving(range(5), 5))
    for facts in found:
        assert [each["host"] for each in facts] == [f"host{i}" for i in range(5)]


def test_the_port_is_free_at_once() -> None:
    address = f"127.0.0.1:{free_port()}"
    for _ in range(3):
        found = outcomes(*(lambda i=i: meet(address, 3, i, {}, 10) for i in range(3)))
        assert [len(facts) for facts in found] == [3, 3, 3]


def test_a_missing_process_is_named_to_all() -> None:
    began = time.monotonic()
    found = outcomes(*arriving([0, 2], 4, 1.0))
    assert time.monotonic() - began < 5
    for error in found:
        assert isinstance(error, RuntimeSetupError)
        assert "Of 4 processes, 2 did not come to 127.0.0.1:" in str(error)
        assert "in 1 s: process 1, 3. Process 0 (host0) waited there" in str(error)
        assert "these came: 2 (host2)" in str(error)
        assert "num_processes=4" in str(error)


def test_a_missing_first_process_is_named() -> None:
    (error,) = outcomes(*arriving([1], 2, 0.5))
    assert "Process 1 of 2 (host1) did not reach process 0 at 127.0.0.1:" in str(error)
    assert "Connection refused" in str(error)


def test_an_unknown_name_is_said() -> None:
    with pytest.raises(
        RuntimeSetupError, match=r"did not reach process 0 at no-such-host\.invalid"
    ):
        meet("no-such-host.invalid:1234", 2, 1, {}, 0.3)


def test_a_taken_port_is_said() -> None:
    with socket.create_server(("", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(RuntimeSetupError, match="cannot listen there"):
            meet(address, 2, 0, {}, 1)


def test_two_of_one_number_are_told() -> None:
    address = f"127.0.0.1:{free_port()}"
    hosts = ("a", "b", "c")
    found = outcomes(
        *(
            lambda i=i, h=h: meet(address, 3, i, {"host": h, "pid": 7}, 5)
            for i, h in zip((0, 1, 1), hosts, strict=True)
        )
    )
    said = [str(error) for error in found]
    assert any("Two processes say process_id=1" in text for text in said)
    assert "Two processes say process_id=1" in said[0]


def test_one_who_came_again_after_it_died_is_taken() -> None:
    address = f"127.0.0.1:{free_port()}"
    hello = {"is": "xla_dtensor 1", "index": 1, "count": 3, "facts": {"host": "dead"}}

    def die_and_come() -> Any:
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline:
            with (
                contextlib.suppress(OSError),
                socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2]))) as way,
            ):
                way.sendall(json.dumps(hello).encode() + b"\n")
                break
        time.sleep(0.3)
        return meet(address, 3, 1, {"host": "alive"}, 5)

    def late() -> Any:
        time.sleep(0.8)
        return meet(address, 3, 2, {}, 5)

    found = outcomes(lambda: meet(address, 3, 0, {}, 10), die_and_come, late)
    assert [facts[1]["host"] for facts in found] == ["alive"] * 3


def test_one_who_died_has_not_come() -> None:
    address = f"127.0.0.1:{free_port()}"
    hello = {"is": "xla_dtensor 1", "index": 1, "count": 2, "facts": {}}

    def die() -> None:
        time.sleep(0.2)
        with socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2]))) as way:
            way.sendall(json.dumps(hello).encode() + b"\n")

    def first() -> Any:
        return meet(address, 3, 0, {}, 1)

    def late() -> Any:
        time.sleep(0.5)
        return meet(address, 3, 2, {}, 2)

    hello["count"] = 3
    error, _, _ = outcomes(first, die, late)
    assert "1 did not come" in str(error)
    assert "process 1." in str(error)


def test_strangers_are_not_listened_to() -> None:
    address = f"127.0.0.1:{free_port()}"

    def stranger() -> None:
        for words in (b"GET / HTTP/1.1\r\n\r\n", b'{"is": "other"}\n', b"[1]\n", b""):
            with (
                contextlib.suppress(OSError),
                socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2]))) as way,
            ):
                way.sendall(words)
                way.shutdown(socket.SHUT_WR)

    def late() -> Any:
        time.sleep(0.2)
        stranger()
        return meet(address, 2, 1, {}, 5)

    found = outcomes(lambda: meet(address, 2, 0, {}, 10), late)
    assert [len(facts) for facts in found] == [2, 2]


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ((3, 1, {}), "told num_processes=3, and process 0 num_processes=2"),
        ((2, 0, {}), "cannot listen there"),
        ((2, 1, {"must_agree": {"jax": "0.9"}}), "has jax=0.9, and process 0 on None"),
    ],
)
def test_those_of_other_jobs_are_refused(second: Any, message: str) -> None:
    address = f"127.0.0.1:{free_port()}"
    count, index, facts = second

    def late() -> Any:
        time.sleep(0.2)
        return meet(address, count, index, facts, 1)

    found = outcomes(lambda: meet(address, 2, 0, {"must_agree": {"jax": "0.10"}}, 1.5), late)
    assert message in " ".join(map(str, found))


def test_a_process_tells_where_it_is() -> None:
    facts = machine_facts()
    assert facts["host"] == socket.gethostname()
    assert facts["host"] in facts["machine"]
