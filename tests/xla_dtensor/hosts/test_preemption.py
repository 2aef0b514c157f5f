"""A job that is told to end: by which signals, at which step, with which status."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.hosts import Hosts
from xla_dtensor.errors import RuntimeSetupError
from xla_dtensor.hosts import preemption
from xla_dtensor.hosts.preemption import Preemption

ROOT = Path(__file__).resolve().parents[3]


class Service:
    """Stands in for JAX's part: processes settle on the third question after a signal."""

    def __init__(self) -> None:
        self.questions = 0
        self.told: list[int] = []
        self.met = 0
        self.comes = True
        self.before = signal.signal(signal.SIGTERM, lambda number, frame: self.told.append(number))

    def reached(self) -> bool:
        self.questions += bool(self.told)
        return self.questions == 3

    def meet(self, seconds: float) -> None:
        self.met += 1
        if not self.comes:
            raise RuntimeError("DEADLINE_EXCEEDED: barrier\nmore")


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    found = Service()
    monkeypatch.setattr(preemption, "_service", lambda: found)
    yield found
    signal.signal(signal.SIGTERM, found.before)


@pytest.fixture(autouse=True)
def _handlers_stay() -> Iterator[None]:
    numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preemption, "_service", lambda: None)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_one_process(name: str) -> None:
    before = signal.getsignal(signal.Signals[name])
    with Preemption() as found:
        assert not found.reached()
        os.kill(os.getpid(), signal.Signals[name])
        assert found.reached()
        assert found.reached()
    assert signal.getsignal(signal.Signals[name]) is before


@pytest.mark.usefixtures("alone")
def test_chosen_signals() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with Preemption(signals=[signal.SIGUSR2, "SIGUSR2"]) as found:
        assert signal.getsignal(signal.SIGTERM) is before
        os.kill(os.getpid(), signal.SIGUSR2)
        assert found.reached()


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_several_processes_agree(service: Service, name: str) -> None:
    """Any signal becomes the one that JAX's service waits for, and all end when it says so."""
    with Preemption() as found:
        assert not found.reached()
        os.kill(os.getpid(), signal.Signals[name])
        assert service.told == [signal.SIGTERM]
        assert [found.reached() for _ in range(4)] == [False, False, True, True]


def test_exit_waits_for_the_others(service: Service) -> None:
    with pytest.raises(SystemExit) as ended, Preemption() as found:
        found.exit()
    assert (ended.value.code, service.met) == (75, 1)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN  # a second one changes nothing


def test_exit_when_not_all_come(service: Service) -> None:
    service.comes = False
    with pytest.warns(RuntimeWarning, match=r"not all came: DEADLINE_EXCEEDED: barrier. This one"):
        pass_on(service)


def pass_on(service: Service) -> None:
    with pytest.raises(SystemExit) as ended, Preemption(exit_status=9) as found:
        found.exit(timeout_seconds=3)
    assert ended.value.code == 9


def test_joined_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preemption, "_service", lambda: None)
    with Preemption() as found:
        monkeypatch.setattr(preemption, "_service", lambda: object())
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(RuntimeSetupError, match=r"before init_distributed was called. The oth"):
            found.reached()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("signals", "message"),
    [
        (["SIGNONE"], r"the signal 'SIGNONE'. This system has no such signal. Pass a name"),
        ([999], r"the signal 999. This system has no such"),
        (["SIGUSR1", "SIGKILL"], r"signals=\['SIGUSR1', 'SIGKILL'\]. The system lets nobody catch"),
    ],
)
def test_refusals(signals: list[str | int], message: str) -> None:
    before = signal.getsignal(signal.SIGUSR1)
    with pytest.raises(RuntimeSetupError, match=message):
        Preemption(signals=signals)
    assert signal.getsignal(signal.SIGUSR1) is before


@pytest.mark.usefixtures("alone")
def test_other_threads() -> None:
    said: list[str] = []

    def make() -> None:
        try:
            Preemption()
        except RuntimeSetupError as error:
            said.append(str(error))

    thread = threading.Thread(target=make, name="worker")
    thread.start()
    thread.join()
    assert len(said) == 1
    assert "made in thread='worker'. Python catches signals in the main thread only" in said[0]


def test_status_of_a_process() -> None:
    program = (
        "import os, signal, sys\n"
        "from xla_dtensor.hosts.preemption import Preemption\n"
        "with Preemption() as preemption:\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    try:\n"
        "        if preemption.reached():\n"
        "            preemption.exit()\n"
        "    finally:\n"
        "        os.kill(os.getpid(), signal.SIGTERM)\n"
        "        print('cleaned up')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (75, "cleaned up\n"), done.stderr


def test_processes_agree_on_a_step(hosts: Callable[..., Hosts]) -> None:
    """JAX's own service: the second process gets SIGUSR1, and is twice as fast."""
    task = "tests.xla_dtensor.host_tasks_preemption:agree"
    told = {"sender": 1, "at": 20, "number": int(signal.SIGUSR1), "seconds": [0.04, 0.02]}
    (first, stays), (second, _) = hosts(2, 4).run(task, **told)
    assert first == second > 20
    assert stays
