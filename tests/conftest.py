"""One runtime per test process, 8 virtual CPU devices.

A process runs one runtime, so a session tests one: ``pytest --runtime jax`` (the default where JAX
is installed) or ``pytest --runtime torch_xla -m on_runtime``. Tests that need one runtime in
particular say so with ``@pytest.mark.only_on("jax")``; they, and those that use the `runtime`
fixture, get the marker ``on_runtime``.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

from tests.contract import mark_thorough
from tests.hosts import QUICK_COMPILER, Hosts

if TYPE_CHECKING:
    from xla_dtensor import DeviceMesh
    from xla_dtensor.runtimes import Runtime

ROOT = Path(__file__).parents[1]
NUM_DEVICES = 8
_MOST_BYTES = 2_500_000_000

# How many programs, meshes or texts a property is tried on: `--hypothesis-profile thorough` takes
# the larger number. A test whose examples are dear sets a number of its own.
_SETTINGS: dict[str, Any] = {
    "deadline": None,  # others may use the machine
    "suppress_health_check": [HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
}
settings.register_profile("contract", max_examples=20, **_SETTINGS)
settings.register_profile("thorough", max_examples=200, **_SETTINGS)
settings.load_profile("contract")

# Before anything can import jax. XLA:CPU can deadlock with more virtual devices than cores.
os.environ.setdefault("NPROC", "64")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("PJRT_DEVICE", "CPU")
# torch_xla compiles equal programs once, whichever test they are of. Tests that count compilations
# must not find those of tests that ran long before.
os.environ.setdefault("XLA_COMPILATION_CACHE_SIZE", "64")


def pytest_addoption(parser: pytest.Parser) -> None:
    default = "jax" if importlib.util.find_spec("jax") else "torch_xla"
    default = os.environ.get("XLA_DTENSOR_RUNTIME", default)
    parser.addoption("--runtime", default=default, help="the runtime that tests run on")
    parser.addoption("--part", help="3/8: the tests of every eighth file, from the third on")


def pytest_configure(config: pytest.Config) -> None:
    name = str(config.getoption("--runtime"))
    os.environ["XLA_DTENSOR_RUNTIME"] = name
    flags = [QUICK_COMPILER]
    if name == "jax":
        flags.append(f"--xla_force_host_platform_device_count={NUM_DEVICES}")
    given = os.environ.get("XLA_FLAGS", "").split()  # the last one of a name counts
    os.environ["XLA_FLAGS"] = " ".join([*(flag for flag in flags if flag not in given), *given])


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    chosen = config.getoption("--runtime")
    for item in items:
        if "runtime" in getattr(item, "fixturenames", ()):
            item.add_marker("on_runtime")
        if "hosts" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group("hosts"))
        only = item.get_closest_marker("only_on")
        if only is not None:
            # One that starts a runtime in processes of its own has no such fixture.
            item.add_marker("on_runtime")
            if chosen not in only.args:
                reason = f"only on {' or '.join(only.args)}, this session runs {chosen}"
                item.add_marker(pytest.mark.skip(reason=reason))
    mark_thorough(items)
    part = config.getoption("--part")
    if part:
        number, parts = map(int, str(part).split("/"))
        files = sorted({item.path for item in items} - _long_files(items))
        single = [item for item in items if item.path not in files]
        kept = {*files[number - 1 :: parts]}, {*map(id, single[number - 1 :: parts])}
        chosen_items = [item for item in items if item.path in kept[0] or id(item) in kept[1]]
        left_out = {*map(id, items)} - {*map(id, chosen_items)}
        config.hook.pytest_deselected(items=[item for item in items if id(item) in left_out])
        items[:] = chosen_items


def _long_files(items: list[pytest.Item]) -> set[Path]:
    """The files whose tests, not they themselves, are dealt to parts: each takes long."""
    names = ("test_against_pytorch.py", "test_product_order.py")
    return {item.path for item in items if item.path.name in names}


@pytest.fixture(scope="module", autouse=True)
def _bounded_memory() -> Iterator[None]:
    """Let JAX forget the programs of a test file when they take much; each test makes its own."""
    yield
    jax = sys.modules.get("jax")
    if jax is not None and _resident_bytes() > _MOST_BYTES:
        jax.clear_caches()
        gc.collect()
        with contextlib.suppress(OSError, AttributeError):  # Only glibc keeps what was freed.
            ctypes.CDLL(None).malloc_trim(0)


def _resident_bytes() -> int:
    pages = Path("/proc/self/statm")
    return int(pages.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if pages.exists() else 0


@pytest.fixture(scope="session")
def runtime(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Runtime:
    """The session's runtime, started with 8 devices."""
    from xla_dtensor.runtimes import current_runtime, get_runtime

    name = request.config.getoption("--runtime")
    running = current_runtime()
    if running is not None:
        return running
    options = {"dump_hlo": tmp_path_factory.mktemp("hlo")} if name == "torch_xla" else {}
    return get_runtime(name, num_cpu_devices=NUM_DEVICES, **options)


@pytest.fixture(scope="session")
def mesh(runtime: Runtime) -> DeviceMesh:
    """A (dp=2, tp=4) mesh over all devices."""
    from xla_dtensor import init_device_mesh

    return init_device_mesh("xla", (2, 4), mesh_dim_names=("dp", "tp"))


@pytest.fixture(scope="session")
def _host_groups() -> Iterator[dict[tuple[int, int], Hosts]]:
    groups: dict[tuple[int, int], Hosts] = {}
    yield groups
    for group in groups.values():
        group.close()


@pytest.fixture
def hosts(_host_groups: dict[tuple[int, int], Hosts]) -> Callable[..., Hosts]:
    """Return a function that gives the session's group of processes of a shape.

    ``hosts(2, 4)`` has two processes of four virtual CPU devices each, joined as one job on JAX.
    Tests that use it run in one worker, so that a group starts once. They run with JAX.
    """

    def group(processes: int, devices: int) -> Hosts:
        found = _host_groups.get((processes, devices))
        if found is None or found.closed:
            found = _host_groups[processes, devices] = Hosts(processes, devices)
        return found

    return group
