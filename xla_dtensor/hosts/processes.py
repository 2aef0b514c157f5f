"""The processes of a job: who they are, and how this one joins them.

    info = xd.init_distributed()          first of all, in every process
    mesh = xd.init_device_mesh(...)       over the devices of all of them

What started the processes is found out, all meet, and the runtime's own service takes over.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

from xla_dtensor.core.errors import RuntimeSetupError
from xla_dtensor.hosts.torch_group import join_torch_group
from xla_dtensor.runtimes.registry import (
    ENVIRONMENT_VARIABLE,
    current_runtime,
    get_runtime,
    installed_runtimes,
)

__all__ = [
    "Place",
    "ProcessInfo",
    "checked_place",
    "chosen_runtime",
    "init_distributed",
    "machine_facts",
    "meet",
    "place_from_environment",
]


# ---------------------------------------------------------------------------------- Process arrival
#
# Have all processes of a job come? Asked before JAX is, which ends a process that waits in vain.
#
# ``jax.distributed.initialize`` waits in C++, and where a process does not come in time it ends the
# others with a fatal log that says neither who is missing nor why. So they meet here first, at the
# address where JAX will meet after them: process 0 listens, each other one says its number, and all
# are told that all are there, or who is not. It takes one connection per process.
#
# The exchange is two lines of JSON: what a process is, and the answer of process 0. What else
# connects to the port is not listened to.

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
    arrivals: dict[int, tuple[Any, socket.socket]] = {}
    stale_connections: list[socket.socket] = []  # of those who came again
    with _listening(address) as server:
        refusal = None
        while refusal is None and not _all_here(arrivals, count):
            server.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                connection, _ = server.accept()
            except TimeoutError:
                refusal = _missing(address, hello, arrivals, timeout)
                break
            peer_hello = _line(connection, _HELLO_SECONDS)
            if not _is_hello(peer_hello):
                connection.close()
                continue
            refusal = _unfit(hello, peer_hello, arrivals)
            if peer_hello["index"] in arrivals:
                stale_connections.append(arrivals[peer_hello["index"]][1])
            arrivals[peer_hello["index"]] = peer_hello, connection
        facts = [hello["facts"]] + [arrivals[i][0]["facts"] for i in sorted(arrivals)]
        answer = {"facts": facts} if refusal is None else {"refused": refusal}
        for connection in (*stale_connections, *(peer for _, peer in arrivals.values())):
            _tell(connection, answer)
    if refusal is not None:
        raise RuntimeSetupError(refusal)
    return facts


def _all_here(arrivals: dict[int, tuple[Any, socket.socket]], count: int) -> bool:
    """Tell whether all others have come, and none has died since."""
    if len(arrivals) < count - 1:
        return False
    for index in [i for i, (_, connection) in arrivals.items() if not _alive(connection)]:
        arrivals.pop(index)[1].close()
    return len(arrivals) == count - 1


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


def _missing(address: str, hello: Any, arrivals: Any, timeout: float) -> str:
    count = hello["count"]
    late = [i for i in range(1, count) if i not in arrivals]
    names = ", ".join(map(str, late[:16])) + (", ..." if len(late) > 16 else "")
    present = ", ".join(
        f"{i} ({peer_hello['facts'].get('host')})"
        for i, (peer_hello, _) in sorted(arrivals.items())[:8]
    )
    return (
        f"Of {count} processes, {len(late)} did not come to {address} in {timeout:.3g} s: process "
        f"{names}. Process 0 ({hello['facts'].get('host')}) waited there"
        + (f", and these came: {present}. " if arrivals else ", and no other came. ")
        + "Check that they were started and have not failed (their logs), that each was given "
        f"num_processes={count} and this address, and that their machines reach it (names, "
        "firewalls); a longer timeout_seconds= waits for slower ones."
    )


def _is_hello(message: Any) -> bool:
    numbers = isinstance(message.get("index"), int) and isinstance(message.get("count"), int)
    facts = isinstance(message.get("facts"), dict)
    return message.get("is") == _MAGIC and numbers and facts


def _unfit(hello: Any, peer_hello: Any, arrivals: Any) -> str | None:
    """Tell what is wrong with one who came; None where nothing is."""
    index, where = peer_hello["index"], _where(peer_hello["facts"])
    if not 0 < index < max(peer_hello["count"], 2):
        return (
            f"A process on {where} said process_id={index}. Process 0 waits here for those from 1 "
            f"to {hello['count'] - 1}. Correct what gives the processes their numbers."
        )
    if peer_hello["count"] != hello["count"]:
        return (
            f"Process {index} on {where} was told num_processes={peer_hello['count']}, and process "
            f"0 num_processes={hello['count']}. They are not processes of one job. Give all the "
            "same number."
        )
    if index in arrivals and _alive(arrivals[index][1]):
        return (
            f"Two processes say process_id={index}: one on {_where(arrivals[index][0]['facts'])} "
            f"and one on {where}. Each number from 0 to {hello['count'] - 1} is one process's. "
            "Correct what gives them their numbers."
        )
    own_settings, peer_settings = (f["facts"].get("must_agree", {}) for f in (hello, peer_hello))
    for name in sorted({*own_settings, *peer_settings}):
        if own_settings.get(name) != peer_settings.get(name):
            return (
                f"Process {index} on {where} has {name}={peer_settings.get(name)}, and process 0 "
                f"on {_where(hello['facts'])} has {name}={own_settings.get(name)}. Their programs "
                "would not be the same. Install and configure all processes alike."
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
    while (seconds_left := deadline - time.monotonic()) > 0:
        try:
            with socket.create_connection(
                (host.strip("[]"), int(port)), timeout=seconds_left
            ) as connection:
                connection.sendall(json.dumps(hello).encode() + b"\n")
                # Process 0 may have begun to wait later than this one, and answers at its deadline.
                answer = _line(connection, seconds_left + timeout)
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
    buffer = b""
    try:
        while not buffer.endswith(b"\n") and len(buffer) < _LONGEST_LINE:
            part = connection.recv(65536)
            if not part:
                break
            buffer += part
        message = json.loads(buffer)
    except (OSError, ValueError):
        return {}
    return message if isinstance(message, dict) else {}


# -------------------------------------------------------------------------------- Process launchers
#
# Who started this process, and which of the job's processes it is, read from the environment.
#
# Nothing is started here and nobody is asked over the network, except torchrun's own store. The
# first row whose variables are there is taken; what only JAX can find (Slurm, Open MPI, TPU pods,
# GKE) comes after them, in ``runtimes/jax/processes.py``.
#
# ====================  =====================================================================
# found_by              variables
# ====================  =====================================================================
# "arguments"           none: all three arguments were given
# "JAX variables"       JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES, JAX_PROCESS_ID
# "torchrun"            RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT; LOCAL_RANK, LOCAL_WORLD_SIZE
# ====================  =====================================================================

_JAX = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, slots=True)
class Place:
    """Which of a job's processes this is, as far as it is known.

    Args:
        coordinator_address: "host:port" where the processes meet; "" where torchrun's store is to
            say it, see `settled_address`.
        count: How many processes there are.
        index: Which of them this is, from 0.
        local_index: Which of those on its machine; None where nobody says.
        local_count: How many are on its machine; None where nobody says.
        found_by: Who said so.
        store: Host and port of torchrun's store.
    """

    coordinator_address: str | None = None
    count: int | None = None
    index: int | None = None
    local_index: int | None = None
    local_count: int | None = None
    found_by: str = "nobody"
    store: tuple[str, int] | None = None

    def with_arguments(self, address: str | None, count: int | None, index: int | None) -> Place:
        """Return the place with what the user said in place of what was found."""
        arguments = {"coordinator_address": address, "count": count, "index": index}
        overrides = {name: argument for name, argument in arguments.items() if argument is not None}
        if not overrides:
            return self
        found_by = "arguments" if len(overrides) == 3 else f"arguments and {self.found_by}"
        store = None if address is not None else self.store
        return replace(self, **overrides, found_by=found_by, store=store)


def place_from_environment(environment: Mapping[str, str] | None = None) -> Place:
    """Return what the environment says; an empty place where it says nothing.

    Args:
        environment: Variables; this process's when None.

    Raises:
        RuntimeSetupError: A variable is no number, or the group of torchrun's is incomplete.

    Example:
        >>> place_from_environment({"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "host0",
        ...                         "MASTER_PORT": "29500", "LOCAL_RANK": "1"}).index
        1
    """
    variables = os.environ if environment is None else environment
    if all(variables.get(name) for name in _JAX):
        return Place(
            variables[_JAX[0]],
            _number(variables, _JAX[1]),
            _number(variables, _JAX[2]),
            found_by="JAX variables",
        )
    if not (variables.get("RANK") and variables.get("WORLD_SIZE")):
        return Place()
    count, index = _number(variables, "WORLD_SIZE"), _number(variables, "RANK")
    unset = [name for name in _TORCHRUN if not variables.get(name)]
    if unset and count != 1:
        raise RuntimeSetupError(
            f"init_distributed found RANK={index} and WORLD_SIZE={count}, but not "
            f"{' and '.join(unset)}. The processes need an address to meet at. Start them with "
            "torchrun, which sets all four, or set them yourself."
        )
    local = [
        _number(variables, n) if variables.get(n) else None
        for n in ("LOCAL_RANK", "LOCAL_WORLD_SIZE")
    ]
    if unset:
        return Place(None, count, index, *local, found_by="torchrun")
    host, port = variables["MASTER_ADDR"], _number(variables, "MASTER_PORT")
    if variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return Place("", count, index, *local, found_by="torchrun", store=(host, port))
    # The port itself belongs to torch.distributed.init_process_group.
    return Place(f"{host}:{port + 1}", count, index, *local, found_by="torchrun")


def _number(variables: Mapping[str, str], name: str) -> int:
    text = variables[name].strip()
    if not text.isdecimal():
        raise RuntimeSetupError(
            f"init_distributed found {name}={variables[name]!r} in the environment. It is to be a "
            "number, from 0 on. Correct what starts the processes, or unset the variable."
        )
    return int(text)


def checked_place(place: Place) -> Place:
    """Return a complete place as it is.

    Raises:
        RuntimeSetupError: Something is missing, or the numbers do not fit each other.
    """
    count, index = place.count, place.index
    summary = (
        f"coordinator_address={place.coordinator_address!r}, num_processes={count}, "
        f"process_id={index} (found by {place.found_by})"
    )
    if count is None or index is None:
        raise RuntimeSetupError(
            f"init_distributed has {summary}. A process has to know how many there are and which "
            "it is. Pass all three arguments, or start the processes with torchrun or Slurm, or "
            f"set {', '.join(_JAX)}."
        )
    if count < 1 or not 0 <= index < count:
        raise RuntimeSetupError(
            f"init_distributed has {summary}. The processes are numbered from 0 to num_processes - "
            "1. Correct the numbers in what starts them."
        )
    if count > 1 and place.store is None:
        _check_address(place.coordinator_address, summary)
    return place


def _check_address(address: str | None, summary: str) -> None:
    host, _, port = (address or "").rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise RuntimeSetupError(
            f"init_distributed has {summary}. The address at which the processes meet is a host "
            "and a port of process 0's machine. Pass coordinator_address='HOST:PORT', with a port "
            "that nobody listens on there."
        )


def settled_address(place: Place, timeout_seconds: float) -> str:
    """Return where the processes meet; under torchrun process 0 tells the others by its store.

    Args:
        place: A complete place.
        timeout_seconds: How long to wait for process 0.

    Raises:
        RuntimeSetupError: The store, or process 0, did not answer.
    """
    if place.store is None:
        return str(place.coordinator_address)
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

    host, port = place.store
    run = os.environ.get("TORCHELASTIC_RUN_ID"), os.environ.get("TORCHELASTIC_RESTART_COUNT")
    key = f"xla_dtensor/coordinator/{run[0]}/{run[1]}"
    try:
        store = TCPStore(
            host, port, is_master=False, timeout=timedelta(seconds=max(1.0, timeout_seconds))
        )
        if place.index == 0:
            store.set(key, f"{_own_address(host, port)}:{free_port_here()}")
        return store.get(key).decode()
    except RuntimeError as error:
        reason = str(error).splitlines()[0][:200]
        raise RuntimeSetupError(
            f"Process {place.index} of {place.count} asked torchrun's store at {host}:{port} where "
            f"process 0 is, and had no answer in {timeout_seconds:g} s: {reason}. Check that "
            "torchrun still runs, and that process 0 has called init_distributed."
        ) from error


def _own_address(host: str, port: int) -> str:
    """Return how others reach this machine, the way that leads to `host`."""
    with socket.create_connection((host, port), timeout=10) as connection:
        own_ip = connection.getsockname()[0]
    is_local = host in ("localhost", "127.0.0.1", "::1")
    # A host's own name may lead to itself by its loopback, where nobody else comes.
    address = host if own_ip.startswith("127.") or own_ip == "::1" else own_ip
    return "127.0.0.1" if is_local else f"[{address}]" if ":" in address else address


def free_port_here() -> int:
    """Return a port of this machine that nobody listens on."""
    with socket.socket() as server:
        server.bind(("", 0))
        return int(server.getsockname()[1])


# -------------------------------------------------------------------------- The processes of a job


@dataclass(frozen=True, slots=True)
class ProcessInfo:
    """This process among those of its job.

    Attributes:
        index: Its place, from 0.
        count: How many there are.
        device_ids: The devices that this process holds.
        found_by: Who said so: "arguments", "JAX variables", "torchrun", "JAX's detection of
            'slurm'" (or another cluster), "jax.distributed", "torch_xla", or "nobody" for a
            process alone.
        coordinator_address: Where the processes met; None for a process alone.
        local_index: Its place among those on its machine.
        local_count: How many are on its machine.
    """

    index: int
    count: int
    device_ids: tuple[int, ...]
    found_by: str = "nobody"
    coordinator_address: str | None = None
    local_index: int = 0
    local_count: int = 1


_joined: tuple[tuple[Any, ...], ProcessInfo] | None = None


def init_distributed(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    local_device_ids: Sequence[int] | None = None,
    num_cpu_devices: int | None = None,
    memory_fraction: float | None = None,
    timeout_seconds: float = 300,
    heartbeat_seconds: int = 100,
) -> ProcessInfo:
    """Join the processes of a job, before anything else is done with this library.

    Without arguments it finds out itself: from ``JAX_COORDINATOR_ADDRESS``, ``JAX_NUM_PROCESSES``
    and ``JAX_PROCESS_ID``, from torchrun's variables, or by JAX's detection of Slurm, Open MPI and
    TPU pods. A process that nobody says to be one of several is alone: the runtime starts, and no
    service does. On torch_xla that runtime finds the others itself.

    torch.distributed has a group of the processes then, see :mod:`xla_dtensor.hosts.torch_group`.

    Args:
        coordinator_address: "host:port" of process 0, a port that nobody listens on there.
        num_processes: How many processes there are.
        process_id: Which of them this is, from 0.
        local_device_ids: Which of this machine's GPUs are this process's. None: an equal part
            where several processes of the job share a machine and its GPUs, else all.
        num_cpu_devices: Virtual devices of this process, on CPU.
        memory_fraction: The part of a GPU's memory that XLA takes at the start, unless
            ``XLA_PYTHON_CLIENT_MEM_FRACTION`` says another.
        timeout_seconds: How long to wait for the others.
        heartbeat_seconds: After this long without a sign of a process JAX ends the others.

    Returns:
        This process among them. A second call with the same arguments returns the same.

    Raises:
        RuntimeSetupError: What is known of the processes is incomplete or contradicts itself; one
            did not come in time, which is named; the runtime has started before; or the job was
            joined with other arguments.

    Example:
        >>> info = init_distributed("host0:8476", 2, 1)  # doctest: +SKIP
    """
    global _joined
    local = None if local_device_ids is None else tuple(local_device_ids)
    arguments = (coordinator_address, num_processes, process_id, local, num_cpu_devices)
    if _joined is not None:
        process = _again(arguments, *_joined)
        _make_torch_group(process, timeout_seconds)
        return process
    if chosen_runtime() != "jax":
        process = _found_by_torch_xla(arguments)
    else:
        jax_processes = importlib.import_module("xla_dtensor.runtimes.jax.processes")
        jax_processes.set_memory_fraction(memory_fraction)
        waits = timeout_seconds, heartbeat_seconds
        process = _joined_jax(jax_processes, arguments, waits)
    _joined = arguments, process
    _make_torch_group(process, timeout_seconds)
    return process


def _make_torch_group(process: ProcessInfo, timeout_seconds: float) -> None:
    local = process.local_index, process.local_count
    join_torch_group(
        process.coordinator_address, process.index, process.count, local, timeout_seconds
    )


def chosen_runtime() -> str:
    """Return the name of the runtime that runs, or will."""
    running = current_runtime()
    if running is not None:
        return running.name
    return os.environ.get(ENVIRONMENT_VARIABLE) or next(iter(installed_runtimes()), "jax")


def _again(
    arguments: tuple[Any, ...], first_arguments: tuple[Any, ...], process: ProcessInfo
) -> ProcessInfo:
    if any(
        argument is not None and argument != first
        for argument, first in zip(arguments, first_arguments, strict=True)
    ):
        raise RuntimeSetupError(
            f"init_distributed was called again, with {_named(arguments)}; the first call had "
            f"{_named(first_arguments)}. A process joins one job, once. Call it once, or with the "
            "same arguments."
        )
    return process


def _named(arguments: tuple[Any, ...]) -> str:
    names = (
        "coordinator_address",
        "num_processes",
        "process_id",
        "local_device_ids",
        "num_cpu_devices",
    )
    texts = [f"{n}={v!r}" for n, v in zip(names, arguments, strict=True) if v is not None]
    return ", ".join(texts) or "no arguments"


# ---------------------------------------------------------------------- JAX


def _joined_jax(jax: Any, arguments: tuple[Any, ...], waits: tuple[float, int]) -> ProcessInfo:
    """Join under JAX; `jax` is the module ``runtimes/jax/processes.py``."""
    joined_as = jax.joined()
    if joined_as is not None:  # the program has called jax.distributed.initialize itself
        address, count, index = joined_as
        agrees = all(a in (None, k) for a, k in zip(arguments[:3], joined_as, strict=True))
        if not agrees:
            raise RuntimeSetupError(
                f"init_distributed was called with {_named(arguments)}, but jax.distributed runs "
                f"with coordinator_address={address!r}, num_processes={count}, process_id={index}. "
                "A process joins one job, once. Leave one of the two calls out."
            )
        place = Place(address, count, index, found_by="jax.distributed")
    else:
        place = _place(jax, arguments, waits[0])
        if place.count != 1:
            place = _met_and_joined(jax, place, arguments[3], waits)
    runtime = get_runtime("jax", **_options(arguments[4]))
    is_single = place.count == 1
    return ProcessInfo(
        place.index or 0,
        place.count or 1,
        tuple(runtime.addressable_device_ids()),
        place.found_by,
        None if is_single else place.coordinator_address,
        place.local_index or 0,
        place.local_count or 1,
    )


def _options(num_cpu_devices: int | None) -> dict[str, Any]:
    return {} if num_cpu_devices is None else {"num_cpu_devices": num_cpu_devices}


def _place(jax: Any, arguments: tuple[Any, ...], timeout_seconds: float) -> Place:
    place = place_from_environment()
    if place.found_by == "nobody" and None in arguments[:3]:
        place = Place(**jax.detected(timeout_seconds))
    place = place.with_arguments(*arguments[:3])
    if place == Place():
        return Place(count=1, index=0)
    place = checked_place(place)
    if place.count != 1 and (jax.has_started() or current_runtime() is not None):
        raise RuntimeSetupError(
            f"init_distributed was to join {place.count} processes (found by {place.found_by}), "
            "but JAX has started in this process. It knows its own devices only, and learns of no "
            "others any more. Call init_distributed before anything else: before the first tensor, "
            "mesh, get_runtime() and call of JAX."
        )
    return place


def _met_and_joined(
    jax: Any, place: Place, local_device_ids: Any, waits: tuple[float, int]
) -> Place:
    timeout, heartbeat = waits
    assert place.count is not None
    assert place.index is not None
    deadline = time.monotonic() + timeout
    address = settled_address(place, timeout)
    own_facts = machine_facts() | jax.facts()
    seconds_left = max(1.0, deadline - time.monotonic())
    facts = meet(address, place.count, place.index, own_facts, seconds_left)
    machines = [peer["machine"] for peer in facts]
    neighbours = [i for i, machine in enumerate(machines) if machine == own_facts["machine"]]
    own_place = neighbours.index(place.index)
    place = replace(place, local_index=own_place, local_count=len(neighbours))
    assert place.index is not None
    if local_device_ids is None:
        # Only those share GPUs that see the same ones: a container or a variable may differ.
        same_machine = [
            i
            for i, peer in enumerate(facts)
            if (peer["machine"], peer["gpus"]) == (own_facts["machine"], own_facts["gpus"])
        ]
        local_device_ids = jax.own_gpus(
            own_facts["gpus"], same_machine.index(place.index), len(same_machine)
        )
    jax.join(
        address,
        place.count,
        place.index,
        local_device_ids=local_device_ids,
        timeout_seconds=max(10.0, deadline - time.monotonic()),
        heartbeat_seconds=heartbeat,
    )
    return replace(place, coordinator_address=address)


# ---------------------------------------------------------------------- torch_xla


def _found_by_torch_xla(arguments: tuple[Any, ...]) -> ProcessInfo:
    runtime = get_runtime(**({} if current_runtime() is not None else _options(arguments[4])))
    module = f"xla_dtensor.runtimes.{runtime.name}.processes"
    has_its_own = importlib.util.find_spec(module) is not None
    index, count = importlib.import_module(module).index_and_count() if has_its_own else (0, 1)
    stated = place_from_environment().with_arguments(*arguments[:3])
    if stated.count not in (None, count) or (stated.index not in (None, index) and count > 1):
        raise RuntimeSetupError(
            f"init_distributed was told num_processes={stated.count}, process_id={stated.index} "
            f"(by {stated.found_by}), but the runtime {runtime.name!r} found "
            f"num_processes={count}, process_id={index}. It finds the hosts of a TPU slice itself, "
            "and takes no address; on CPU it is one process. Start one process per TPU host, or "
            "use the runtime 'jax'."
        )
    return ProcessInfo(index, count, tuple(runtime.addressable_device_ids()), runtime.name)
