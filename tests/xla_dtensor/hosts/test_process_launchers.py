"""Who started this process: read from the environment."""

from __future__ import annotations

import pytest

from xla_dtensor.errors import RuntimeSetupError
from xla_dtensor.hosts.processes import Place, checked_place, place_from_environment

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "host0",
    "MASTER_PORT": "29500",
}
JAX = {
    "JAX_COORDINATOR_ADDRESS": "host0:8476",
    "JAX_NUM_PROCESSES": "4",
    "JAX_PROCESS_ID": "3",
}


def test_nothing_is_said() -> None:
    assert place_from_environment({"RANK": "0", "SLURM_NTASKS": "4"}) == Place()


def test_variables_of_jax_come_first() -> None:
    place = place_from_environment(JAX | TORCHRUN)
    assert (place.coordinator_address, place.count, place.index) == ("host0:8476", 4, 3)
    assert place.found_by == "JAX variables"


def test_torchrun_has_its_own_store_at_its_port() -> None:
    place = place_from_environment(TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "True"})
    assert (place.count, place.index, place.local_index, place.local_count) == (8, 5, 1, 4)
    assert place.store == ("host0", 29500)
    assert checked_place(place).found_by == "torchrun"


def test_without_a_store_the_port_is_left_to_torch() -> None:
    place = place_from_environment(TORCHRUN)
    assert (place.coordinator_address, place.store) == ("host0:29501", None)


def test_one_process_of_torchrun_needs_no_address() -> None:
    assert checked_place(place_from_environment({"RANK": "0", "WORLD_SIZE": "1"})).count == 1


def test_arguments_stand_above_what_is_found() -> None:
    place = place_from_environment(TORCHRUN).with_arguments("here:1", None, 2)
    assert (place.coordinator_address, place.count, place.index) == ("here:1", 8, 2)
    assert place.found_by == "arguments and torchrun"
    assert Place().with_arguments("here:1", 8, 2).found_by == "arguments"


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (TORCHRUN | {"RANK": "one"}, "found RANK='one' in the environment"),
        (JAX | {"JAX_PROCESS_ID": "-1"}, "found JAX_PROCESS_ID='-1'"),
        ({"RANK": "1", "WORLD_SIZE": "2"}, "but not MASTER_ADDR and MASTER_PORT"),
    ],
)
def test_a_wrong_environment_is_refused(environment: dict[str, str], message: str) -> None:
    with pytest.raises(RuntimeSetupError, match=message):
        place_from_environment(environment)


@pytest.mark.parametrize(
    ("place", "message"),
    [
        (Place("a:1", None, 0), "num_processes=None, process_id=0 .* Pass all three"),
        (Place("a:1", 2, 2), "numbered from 0 to num_processes - 1"),
        (Place("a:1", 0, 0), "numbered from 0"),
        (Place(None, 2, 0), "coordinator_address=None.* 'HOST:PORT'|coordinator_address='HOST"),
        (Place("host0", 2, 0), "a host and a port"),
        (Place("host0:0", 2, 0), "a host and a port"),
    ],
)
def test_an_incomplete_place_is_refused(place: Place, message: str) -> None:
    with pytest.raises(RuntimeSetupError, match=message):
        checked_place(place)
