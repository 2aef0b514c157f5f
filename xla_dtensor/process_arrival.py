"""Have all processes of a job come? Asked before JAX is, which ends a process that waits in vain.

``jax.distributed.initialize`` waits in C++, and where a process does not come in time it ends the
others with a fatal log that says neither who is missing nor why. So they meet here first, at the
address where JAX will meet after them: process 0 listens, each other one says its number, and all
are told that all are there, or who is not. It takes one connection per process.

The exchange is two lines of JSON: what a process is, and the answer of process 0. What else
connects to the port is not listened to.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any

from xla_dtensor.errors import RuntimeSetupError

__all__ = ["machine_facts", "meet"]

_MAGIC = "xla_dtensor 1"
_LONGEST_LINE = 1 << 20
_HELLO_SECONDS = 2.0  # for a line of one who has connected
_BETWEEN_TRIES = 0.1

Facts = Mapping[str, Any]


def machine_facts() -> dict[str, Any]:
    """Return what tells this process from others, for messages and to see who shares a machine."""
    boot = "/proc/sys/kernel/random/boot_id"
    try:
        with open(boot, encoding="ascii") as file:
            machine = file.read().strip()
    except OSError:
        machine = ""
    host = socket.gethostname()
    return {"host": host, "machine": f"{host} {machine}", "pid": os.getpid()}


def meet(
    address: str, count: int, index: int, facts: Facts, timeout_seconds: float
) -> Sequence[Facts]:
    """Wait until all processes have come to `address`.

    Args:
        address: "host:port", where process 0 listens until all have come.
        count: How many processes there are.
        index: Which one this is.
        facts: What the others are to know of this one; values of "must_agree" have to be equal.
        timeout_seconds: How long to wait.

    Returns:
        The facts of all, by process.

    Raises:
        RuntimeSetupError: Someone did not come, or two do not belong together. Every process that
            came is told.
    """
    hello = {"is": _MAGIC, "index": index, "count": count, "facts": dict(facts)}
    deadline = time.monotonic() + timeout_seconds
    if index == 0:
        return _gather(address, hello, deadline, timeout_seconds)
    answer = _ask(address, hello, deadline, timeout_seconds)
    if "refused" in answer:
        raise RuntimeSetupError(answer["refused"])
    return answer["facts"]


# ---------------------------------------------------------------------- process 0


def _gather(address: str, hello: Any, deadline: float, timeout: float) -> Sequence[Facts]:
    count = hello["count"]
    came: dict[int, tuple[Any, socket.socket]] = {}
    earlier: list[socket.socket] = []  # of those who came again
    with _listening(address) as server:
        refusal = None
        while refusal is None and not _all_here(came, count):
            server.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                connection, _ = server.accept()
            except TimeoutError:
                refusal = _missing(address, hello, came, timeout)
                break
            said = _line(connection, _HELLO_SECONDS)
            if not _is_hello(said):
                connection.close()
                continue
            refusal = _unfit(hello, said, came)
            if said["index"] in came:
                earlier.append(came[said["index"]][1])
            came[said["index"]] = said, connection
        facts = [hello["facts"]] + [came[i][0]["facts"] for i in sorted(came)]
        answer = {"facts": facts} if refusal is None else {"refused": refusal}
        for connection in (*earlier, *(way for _, way in came.values())):
            _tell(connection, answer)
    if refusal is not None:
        raise RuntimeSetupError(refusal)
    return facts


def _all_here(came: dict[int, tuple[Any, socket.socket]], count: int) -> bool:
    """Tell whether all others have come, and none has died since."""
    if len(came) < count - 1:
        return False
    for index in [i for i, (_, way) in came.items() if not _alive(way)]:
        came.pop(index)[1].close()
    return len(came) == count - 1


def _listening(address: str) -> socket.socket:
    port = int(address.rpartition(":")[2])
    both = socket.has_dualstack_ipv6()
    try:
        return socket.create_server(
            ("", port),
            family=socket.AF_INET6 if both else socket.AF_INET,
            backlog=1024,
            dualstack_ipv6=both,
        )
    except OSError as error:
        raise RuntimeSetupError(
            f"Process 0 was to wait for the others at {address}, and cannot listen there: {error}. "
            "Another program, or an earlier run that has not ended, has the port. Pass another "
            "one, the same in every process."
        ) from error


def _missing(address: str, hello: Any, came: Any, timeout: float) -> str:
    count = hello["count"]
    late = [i for i in range(1, count) if i not in came]
    names = ", ".join(map(str, late[:16])) + (", ..." if len(late) > 16 else "")
    present = ", ".join(
        f"{i} ({said['facts'].get('host')})" for i, (said, _) in sorted(came.items())[:8]
    )
    return (
        f"Of {count} processes, {len(late)} did not come to {address} in {timeout:.3g} s: process "
        f"{names}. Process 0 ({hello['facts'].get('host')}) waited there"
        + (f", and these came: {present}. " if came else ", and no other came. ")
        + "Check that they were started and have not failed (their logs), that each was given "
        f"num_processes={count} and this address, and that their machines reach it (names, "
        "firewalls); a longer timeout_seconds= waits for slower ones."
    )


def _is_hello(said: Any) -> bool:
    numbers = isinstance(said.get("index"), int) and isinstance(said.get("count"), int)
    facts = isinstance(said.get("facts"), dict)
    return said.get("is") == _MAGIC and numbers and facts


def _unfit(hello: Any, said: Any, came: Any) -> str | None:
    """Tell what is wrong with one who came; None where nothing is."""
    index, where = said["index"], _where(said["facts"])
    if not 0 < index < max(said["count"], 2):
        return (
            f"A process on {where} said process_id={index}. Process 0 waits here for those from 1 "
            f"to {hello['count'] - 1}. Correct what gives the processes their numbers."
        )
    if said["count"] != hello["count"]:
        return (
            f"Process {index} on {where} was told num_processes={said['count']}, and process 0 "
            f"num_processes={hello['count']}. They are not processes of one job. Give all the "
            "same number."
        )
    if index in came and _alive(came[index][1]):
        return (
            f"Two processes say process_id={index}: one on {_where(came[index][0]['facts'])} and "
            f"one on {where}. Each number from 0 to {hello['count'] - 1} is one process's. "
            "Correct what gives them their numbers."
        )
    wanted, given = (f["facts"].get("must_agree", {}) for f in (hello, said))
    for name in sorted({*wanted, *given}):
        if wanted.get(name) != given.get(name):
            return (
                f"Process {index} on {where} has {name}={given.get(name)}, and process 0 on "
                f"{_where(hello['facts'])} has {name}={wanted.get(name)}. Their programs would "
                "not be the same. Install and configure all processes alike."
            )
    return None


def _where(facts: Facts) -> str:
    return f"{facts.get('host')} (pid {facts.get('pid')})"


def _alive(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return connection.recv(1) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        with contextlib.suppress(OSError):
            connection.setblocking(True)


def _tell(connection: socket.socket, answer: Any) -> None:
    with connection, contextlib.suppress(OSError):
        connection.settimeout(10)
        connection.sendall(json.dumps(answer).encode() + b"\n")
        connection.settimeout(1)
        connection.recv(1)  # they close first, so that the port is free at once


# ---------------------------------------------------------------------- the others


def _ask(address: str, hello: Any, deadline: float, timeout: float) -> Any:
    host, _, port = address.rpartition(":")
    last = "nobody listened"
    while (left := deadline - time.monotonic()) > 0:
        try:
            with socket.create_connection((host.strip("[]"), int(port)), timeout=left) as way:
                way.sendall(json.dumps(hello).encode() + b"\n")
                # Process 0 may have begun to wait later than this one, and answers at its deadline.
                answer = _line(way, left + timeout)
        except OSError as error:
            last = str(error)
        else:
            if "facts" in answer or "refused" in answer:
                return answer
            last = "what listens there is not process 0 of such a job, or it ended"
        time.sleep(_BETWEEN_TRIES)
    raise RuntimeSetupError(
        f"Process {hello['index']} of {hello['count']} ({hello['facts'].get('host')}) did not "
        f"reach process 0 at {address} in {timeout:.3g} s: {last}. Process 0 listens there once it "
        "has called init_distributed. Check that it was started and has not failed (its log), "
        "that the address is its machine's, and that this machine reaches it (names, firewalls)."
    )


def _line(connection: socket.socket, seconds: float) -> Any:
    """Return one line of JSON; an empty dict for anything else."""
    connection.settimeout(seconds)
    data = b""
    try:
        while not data.endswith(b"\n") and len(data) < _LONGEST_LINE:
            part = connection.recv(65536)
            if not part:
                break
            data += part
        said = json.loads(data)
    except (OSError, ValueError):
        return {}
    return said if isinstance(said, dict) else {}
