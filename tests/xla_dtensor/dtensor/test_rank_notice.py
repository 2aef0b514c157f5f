"""get_local_rank() says that it has one answer for several devices."""

from __future__ import annotations

import pytest

import xla_dtensor as xd
from xla_dtensor.dtensor.mesh import warn_of_one_rank
from xla_dtensor.runtimes import Runtime


def test_once_per_mesh(runtime: Runtime, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("ranks", "others"):
        mesh = xd.init_device_mesh("xla", (8,), mesh_dim_names=(name,))
        assert (mesh.get_local_rank(), mesh.get_local_rank(name)) == (0, 0)
        (record,) = caplog.records
        assert record.levelname == "WARNING"
        assert record.getMessage().startswith(
            f"get_local_rank() was called for axis '{name}' of the mesh ({name}=8), of which this "
            "process has 8 devices. It is the first one's number, in all of the program"
        )
        caplog.clear()


def test_not_where_the_answer_is_the_processs_own(
    runtime: Runtime, caplog: pytest.LogCaptureFixture
) -> None:
    mesh = xd.init_device_mesh("xla", (8, 1), mesh_dim_names=("data", "alone"))
    assert mesh.get_local_rank("alone") == 0
    warn_of_one_rank(mesh.value, 0, (3,), "")  # a process with one of the devices
    assert caplog.records == []
    assert mesh.get_local_rank("data") == 0
    assert len(caplog.records) == 1


def test_not_where_torch_asks(runtime: Runtime, caplog: pytest.LogCaptureFixture) -> None:
    mesh = xd.init_device_mesh("xla", (8,), mesh_dim_names=("asked",))
    question = compile("mesh.get_local_rank()", "torch's", "eval")
    assert eval(question, {"__name__": "torch.distributed.tensor._ops", "mesh": mesh}) == 0
    assert caplog.records == []
