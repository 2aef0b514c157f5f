"""Starting a runtime in a child process that works, fails, crashes, hangs."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from xla_dtensor.cli.env import probe

ROOT = Path(__file__).resolve().parents[3]
FAKE_TORCH = """
class Values(list):
    def tolist(self): return list(self)
def arange(n): return Values(range(n))
def equal(a, b): return a == b
"""
FAKE_RUNTIME = """
class Fake:
    def device_ids(self): return (0, 1)
    def addressable_device_ids(self): return (0, 1)
    def describe(self): return {"platform": "fake", "setting": 7}
    def put(self, tensor, layout): return tensor
    def to_host(self, payload): return payload
"""


@pytest.fixture
def fake_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Gives probes a torch of our own, and a runtime named "fake"."""

    def install(torch: str = FAKE_TORCH, runtime: str = FAKE_RUNTIME) -> None:
        (tmp_path / "torch.py").write_text(torch)
        (tmp_path / "fake_runtime.py").write_text(runtime)
        info = tmp_path / "fake-1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fake\nVersion: 1\n")
        entry_points = "[xla_dtensor.runtimes]\nfake = fake_runtime:Fake\n"
        (info / "entry_points.txt").write_text(entry_points)
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(tmp_path), str(ROOT))))

    return install


def test_probe_works(fake_child: Callable[..., None]) -> None:
    fake_child(runtime=f"print('noise')\n{FAKE_RUNTIME}")
    found = probe("fake", 60)
    assert found.works, found
    assert (found.num_devices, found.num_addressable_devices) == (2, 2)
    assert found.description == {"platform": "fake", "setting": "7"}


def test_probe_of_wrong_values(fake_child: Callable[..., None]) -> None:
    fake_child(runtime=FAKE_RUNTIME.replace("return payload", "return payload.__class__([9])"))
    found = probe("fake", 60)
    assert found.status == "failed"
    assert found.detail == "Sent [0, 1] to its devices, [9] came back."


def test_probe_of_an_exception(fake_child: Callable[..., None]) -> None:
    fake_child(torch="raise OSError('libc10.so: undefined symbol')")
    found = probe("jax", 60)
    assert found.status == "failed"
    assert found.detail == "OSError: libc10.so: undefined symbol"


def test_probe_of_an_unknown_runtime(fake_child: Callable[..., None]) -> None:
    fake_child()
    found = probe("no_such_runtime", 60)
    assert found.status == "failed"
    assert "RuntimeSetupError" in found.detail


def test_probe_of_a_crash(fake_child: Callable[..., None]) -> None:
    fake_child(torch="import os, sys\nprint('last words', file=sys.stderr, flush=True)\nos.abort()")
    found = probe("jax", 60)
    assert found.status == "crashed"
    assert "SIGABRT" in found.detail
    assert "last words" in found.detail
    assert "torch.py" in found.detail


def test_probe_of_an_exit(fake_child: Callable[..., None]) -> None:
    fake_child(torch="import os\nos._exit(3)")
    found = probe("jax", 60)
    assert found.status == "crashed"
    assert "status 3" in found.detail


def test_probe_of_a_hang(fake_child: Callable[..., None], tmp_path: Path) -> None:
    # The grandchild holds the output open and would outlive a child that alone is killed.
    grandchild = tmp_path / "grandchild"
    fake_child(
        torch="import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"open({str(grandchild)!r}, 'w').write(str(child.pid))\n"
        "def stands_here(): time.sleep(600)\n"
        "stands_here()\n"
    )
    start = time.monotonic()
    found = probe("jax", 3)
    assert found.status == "timed out"
    assert time.monotonic() - start < 60
    assert "stands_here" in found.detail
    assert not is_running(int(grandchild.read_text()))


def is_running(pid: int) -> bool:
    for _ in range(50):
        try:
            os.kill(pid, 0)
            state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True)
        except ProcessLookupError:
            return False
        if state.stdout.strip() in (b"", b"Z"):
            return False
        time.sleep(0.1)
    return True
