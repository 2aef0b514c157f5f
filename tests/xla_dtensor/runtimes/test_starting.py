"""Choosing and starting a runtime: late, twice, without its package, with the wrong options.

Each case is a process of its own, because a process starts one runtime once.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
TIMEOUT_SECONDS = 120
HAS_TORCH_XLA = importlib.util.find_spec("torch_xla") is not None
HAS_JAX = importlib.util.find_spec("jax") is not None

needs_jax = pytest.mark.skipif(not HAS_JAX, reason="jax is not installed here")
needs_both = pytest.mark.skipif(
    not (HAS_JAX and HAS_TORCH_XLA), reason="jax and torch_xla are not both installed here"
)


def run(program: str, **environment: str) -> tuple[int, str]:
    """Run a program; return its exit status and the last line of what it printed."""
    # Of XLA_DTENSOR_ANY_JAX, too, which `make test-newest` sets.
    clean = {
        k: v
        for k, v in os.environ.items()
        if k not in ("XLA_FLAGS", "NPROC") and not k.startswith("XLA_DTENSOR_")
    }
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=clean | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"} | environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )
    lines = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
    return done.returncode, lines[-1] if lines else ""


def refusal(program: str, **environment: str) -> str:
    """Run a program that has to end in a RuntimeSetupError; return the message."""
    status, line = run(program, **environment)
    assert status == 1, line
    name, _, message = line.partition(": ")
    assert name == "xla_dtensor.core.errors.RuntimeSetupError"
    return message


START = "import xla_dtensor as xd; runtime = xd.get_runtime({}); "
HIDE = (
    "import importlib.util as u; find = u.find_spec; "
    "u.find_spec = lambda n, *a: None if n in {!r} else find(n, *a); "
)


@needs_jax
def test_the_argument_comes_before_the_environment() -> None:
    program = START.format("'jax'") + "print(runtime.name)"
    assert run(program, XLA_DTENSOR_RUNTIME="torch_xla") == (0, "jax")


@needs_jax
def test_without_a_choice_jax_comes_first() -> None:
    assert run(START.format("") + "print(runtime.name)") == (0, "jax")


@pytest.mark.thorough
@needs_both
def test_the_environment_chooses() -> None:
    status, name = run(
        START.format("num_cpu_devices=2") + "print(runtime.name)", XLA_DTENSOR_RUNTIME="torch_xla"
    )
    assert (status, name) == (0, "torch_xla")


@pytest.mark.thorough
def test_nothing_installed_names_both_extras() -> None:
    message = refusal(HIDE.format(["jax", "torch_xla"]) + START.format(""))
    assert "none is installed" in message
    assert "xla-dtensor[jax]" in message
    assert "xla-dtensor[torch-xla]" in message


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "package", "extra"),
    [("jax", "jax", "[jax]"), ("torch_xla", "torch_xla", "[torch-xla]")],
)
def test_a_runtime_without_its_package_names_the_extra(name: str, package: str, extra: str) -> None:
    message = refusal(HIDE.format([package]) + START.format(repr(name)))
    assert f"Runtime name={name!r} was asked for, but it is not installed." in message
    assert extra in message


@pytest.mark.thorough
def test_an_unknown_runtime_lists_those_there_are() -> None:
    assert "Pass one of: jax, torch_xla." in refusal(START.format("'tensorflow'"))


@pytest.mark.thorough
@needs_jax
def test_asking_again_gives_the_same_runtime() -> None:
    program = START.format("'jax'") + "print(xd.get_runtime() is runtime is xd.get_runtime('jax'))"
    assert run(program) == (0, "True")


@pytest.mark.thorough
@needs_jax
def test_another_runtime_in_the_same_process_is_refused() -> None:
    message = refusal(START.format("'jax'") + "xd.get_runtime('torch_xla')")
    assert "runtime='jax' already runs in this process" in message
    assert "get_runtime('torch_xla') before the first tensor or mesh" in message


@pytest.mark.thorough
@needs_jax
def test_options_after_the_start_are_refused() -> None:
    message = refusal(START.format("'jax'") + "xd.get_runtime('jax', num_cpu_devices=4)")
    assert "it already runs" in message
    assert "first call of get_runtime" in message


AS_JAX = (
    "import importlib.metadata as m; version = m.version; "
    "m.version = lambda name: {!r} if name == 'jax' else version(name); "
)


@needs_jax
@pytest.mark.parametrize(
    ("version", "age", "cure"),
    [
        ("0.9.2", "too old", "`pip install 'jax>=0.10,<0.13'`."),
        (
            "0.13.0",
            "too new",
            "`pip install 'jax>=0.10,<0.13'`, or set XLA_DTENSOR_ANY_JAX=1 to try this one.",
        ),
    ],
)
def test_a_jax_that_is_not_supported_is_refused(version: str, age: str, cure: str) -> None:
    message = refusal(AS_JAX.format(version) + START.format("'jax'"))
    assert message == (
        f"Runtime 'jax' was asked for, and jax {version} is {age}: supported are 0.10 to 0.12. It "
        "uses private parts of JAX, which differ between releases. Install one that is supported: "
        f"{cure}"
    )


@pytest.mark.thorough
@needs_jax
def test_a_newer_jax_may_be_tried() -> None:
    program = AS_JAX.format("0.13.0") + START.format("'jax'") + "print(runtime.name)"
    assert run(program, XLA_DTENSOR_ANY_JAX="1") == (0, "jax")


@pytest.mark.thorough
@needs_jax
def test_an_older_jax_may_not_be_tried() -> None:
    assert "too old" in refusal(
        AS_JAX.format("0.9.2") + START.format("'jax'"), XLA_DTENSOR_ANY_JAX="1"
    )


@needs_jax
def test_jax_started_before_with_fewer_devices_is_refused() -> None:
    message = refusal("import jax; jax.devices(); " + START.format("'jax', num_cpu_devices=8"))
    assert "num_cpu_devices=8 was asked for, but JAX already runs with 1 CPU devices" in message
    assert "XLA_DTENSOR_CPU_DEVICES" in message


@pytest.mark.thorough
@needs_jax
def test_jax_started_before_with_as_many_devices_is_fine() -> None:
    program = (
        "import jax; jax.config.update('jax_num_cpu_devices', 8); jax.devices(); "
        + START.format("'jax', num_cpu_devices=8")
        + "print(len(runtime.device_ids()))"
    )
    assert run(program) == (0, "8")


@pytest.mark.thorough
@needs_jax
def test_the_environment_sets_the_number_of_devices() -> None:
    program = START.format("'jax'") + "print(len(runtime.device_ids()))"
    assert run(program, XLA_DTENSOR_CPU_DEVICES="6") == (0, "6")


@pytest.mark.thorough
@needs_jax
def test_a_number_of_devices_that_is_none_is_refused() -> None:
    message = refusal(START.format("'jax'"), XLA_DTENSOR_CPU_DEVICES="many")
    assert "XLA_DTENSOR_CPU_DEVICES='many'" in message


@pytest.mark.thorough
@needs_jax
def test_the_thread_setting_does_not_reach_child_processes() -> None:
    program = START.format("'jax', num_cpu_devices=8") + "import os; print('NPROC' in os.environ)"
    assert run(program) == (0, "False")


@pytest.mark.thorough
@needs_jax
def test_the_users_thread_setting_stays() -> None:
    program = START.format("'jax'") + "import os; print(os.environ['NPROC'])"
    assert run(program, NPROC="7") == (0, "7")


@needs_jax
def test_the_users_own_jax_keeps_its_dtypes() -> None:
    program = (
        START.format("'jax'")
        + "import torch, jax.numpy as jnp; m = xd.init_device_mesh('xla', (1,)); "
        "d = xd.distribute_tensor(torch.tensor([2**40]), m) + 1; "
        "print(d.tolist(), jnp.arange(3).dtype)"
    )
    assert run(program) == (0, "[1099511627777] int32")


@pytest.mark.thorough
@needs_both
def test_the_jax_runtime_never_imports_torch_xla() -> None:
    program = (
        START.format("'jax', num_cpu_devices=4")
        + "import sys, torch; m = xd.init_device_mesh('xla', (2, 2)); "
        "d = xd.distribute_tensor(torch.ones(4, 4), m); "
        "xd.compile(lambda x: x @ x)(d).full_tensor().cpu(); "
        "print([n for n in sys.modules if n.split('.')[0] in ('torch_xla', 'torchax')])"
    )
    assert run(program) == (0, "[]")


@pytest.mark.thorough
@needs_both
def test_the_torch_xla_runtime_never_imports_jax() -> None:
    program = (
        START.format("'torch_xla', num_cpu_devices=4")
        + "import sys, torch; m = xd.init_device_mesh('xla', (2, 2)); "
        "d = xd.distribute_tensor(torch.ones(4, 4), m); "
        "xd.compile(lambda x: x @ x)(d).full_tensor().cpu(); "
        "print([n for n in sys.modules if n.split('.')[0] in ('jax', 'jaxlib', 'torchax')])"
    )
    assert run(program) == (0, "[]")


@needs_both
def test_torch_xla_with_a_tensor_already_made_is_refused_and_not_a_crash() -> None:
    message = refusal(
        "import torch, torch_xla; x = torch.ones(2, device=torch_xla.device()); "
        + START.format("'torch_xla'"),
        PJRT_DEVICE="CPU",
    )
    assert "use_spmd" in message
