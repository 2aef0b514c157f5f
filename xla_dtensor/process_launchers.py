"""Who started this process, and which of the job's processes it is, read from the environment.

Nothing is started here and nobody is asked over the network, except torchrun's own store. The
first row whose variables are there is taken; what only JAX can find (Slurm, Open MPI, TPU pods,
GKE) comes after them, in ``runtimes/jax_processes.py``.

====================  =====================================================================
found_by              variables
====================  =====================================================================
"arguments"           none: all three arguments were given
"JAX variables"       JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES, JAX_PROCESS_ID
"torchrun"            RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT; LOCAL_RANK, LOCAL_WORLD_SIZE
====================  =====================================================================
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta

from xla_dtensor.errors import RuntimeSetupError

__all__ = ["Place", "checked_place", "free_port_here", "place_from_environment", "settled_address"]

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
        given = {"coordinator_address": address, "count": count, "index": index}
        said = {name: value for name, value in given.items() if value is not None}
        if not said:
            return self
        found_by = "arguments" if len(said) == 3 else f"arguments and {self.found_by}"
        store = None if address is not None else self.store
        return replace(self, **said, found_by=found_by, store=store)


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
    said = os.environ if environment is None else environment
    if all(said.get(name) for name in _JAX):
        return Place(
            said[_JAX[0]], _number(said, _JAX[1]), _number(said, _JAX[2]), found_by="JAX variables"
        )
    if not (said.get("RANK") and said.get("WORLD_SIZE")):
        return Place()
    count, index = _number(said, "WORLD_SIZE"), _number(said, "RANK")
    missing = [name for name in _TORCHRUN if not said.get(name)]
    if missing and count != 1:
        raise RuntimeSetupError(
            f"init_distributed found RANK={index} and WORLD_SIZE={count}, but not "
            f"{' and '.join(missing)}. The processes need an address to meet at. Start them with "
            "torchrun, which sets all four, or set them yourself."
        )
    local = [_number(said, n) if said.get(n) else None for n in ("LOCAL_RANK", "LOCAL_WORLD_SIZE")]
    if missing:
        return Place(None, count, index, *local, found_by="torchrun")
    host, port = said["MASTER_ADDR"], _number(said, "MASTER_PORT")
    if said.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return Place("", count, index, *local, found_by="torchrun", store=(host, port))
    # The port itself belongs to torch.distributed.init_process_group.
    return Place(f"{host}:{port + 1}", count, index, *local, found_by="torchrun")


def _number(said: Mapping[str, str], name: str) -> int:
    text = said[name].strip()
    if not text.isdecimal():
        raise RuntimeSetupError(
            f"init_distributed found {name}={said[name]!r} in the environment. It is to be a "
            "number, from 0 on. Correct what starts the processes, or unset the variable."
        )
    return int(text)


def checked_place(place: Place) -> Place:
    """Return a complete place as it is.

    Raises:
        RuntimeSetupError: Something is missing, or the numbers do not fit each other.
    """
    count, index = place.count, place.index
    found = (
        f"coordinator_address={place.coordinator_address!r}, num_processes={count}, "
        f"process_id={index} (found by {place.found_by})"
    )
    if count is None or index is None:
        raise RuntimeSetupError(
            f"init_distributed has {found}. A process has to know how many there are and which it "
            "is. Pass all three arguments, or start the processes with torchrun or Slurm, or set "
            f"{', '.join(_JAX)}."
        )
    if count < 1 or not 0 <= index < count:
        raise RuntimeSetupError(
            f"init_distributed has {found}. The processes are numbered from 0 to num_processes - "
            "1. Correct the numbers in what starts them."
        )
    if count > 1 and place.store is None:
        _check_address(place.coordinator_address, found)
    return place


def _check_address(address: str | None, found: str) -> None:
    host, _, port = (address or "").rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise RuntimeSetupError(
            f"init_distributed has {found}. The address at which the processes meet is a host "
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
    with socket.create_connection((host, port), timeout=10) as way:
        mine = way.getsockname()[0]
    said = host in ("localhost", "127.0.0.1", "::1")
    # A host's own name may lead to itself by its loopback, where nobody else comes.
    found = host if mine.startswith("127.") or mine == "::1" else mine
    return "127.0.0.1" if said else f"[{found}]" if ":" in found else found


def free_port_here() -> int:
    """Return a port of this machine that nobody listens on."""
    with socket.socket() as found:
        found.bind(("", 0))
        return int(found.getsockname()[1])
