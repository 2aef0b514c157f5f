"""Programs that differ only in which of two alike tensors stands where are not taken for equal."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard

import xla_dtensor as xd
from xla_dtensor.runtimes.torch_xla import step as torch_xla_program_keys
from xla_dtensor.runtimes.torch_xla.step import keyed

torch_xla = pytest.importorskip("torch_xla")
pytestmark = pytest.mark.only_on("torch_xla")

SIZE = 8
NAMES = ("x", "y", "z")
BINARY: dict[str, Callable[..., Any]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "matmul": lambda a, b: a @ b / SIZE,
    "scaled": lambda a, b: a * b.mean(),
}
UNARY: dict[str, Callable[..., Any]] = {
    "tanh": torch.tanh,
    "transposed": lambda a: a.mT,
    "constrained": lambda a: (
        a.redistribute(placements=[Shard(1), Shard(0)]) if isinstance(a, xd.DTensor) else a
    ),
}


def host_copy(value: Any) -> torch.Tensor:
    copied = torch.empty(value.shape, dtype=value.dtype)
    return copied.copy_(plain(value))


def plain(value: Any) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, xd.DTensor) else value


def synced(value: Any) -> torch.Tensor:
    torch_xla.sync()
    return plain(value).cpu()


def listed(value: Any) -> torch.Tensor:
    rows = [[float(number.item()) for number in row] for row in plain(value)[:2, :2]]
    return torch.tensor(rows, dtype=value.dtype)


READS: dict[str, Callable[[Any], torch.Tensor]] = {
    "cpu": lambda value: plain(value).cpu(),
    "copy_": host_copy,
    "out": lambda value: torch.add(plain(value), 0, out=torch.empty(SIZE, SIZE)),
    "item": listed,
    "sync": synced,
    "shards": lambda value: (
        value.addressable_shards()[0].data if isinstance(value, xd.DTensor) else value.cpu()
    )[0, 0],
    "kernel for the host": lambda value: torch.linalg.svdvals(plain(value)).cpu(),
}


@pytest.fixture(scope="module")
def hosts() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(SIZE, SIZE, generator=generator) for name in NAMES}


@pytest.fixture
def given_tensors(mesh: xd.DeviceMesh, hosts: dict[str, torch.Tensor]) -> dict[str, Any]:
    placements = [Shard(0), Replicate()]
    return {name: xd.distribute_tensor(host, mesh, placements) for name, host in hosts.items()}


Steps = list[tuple[str, int, int]]


def value_of(steps: Steps, tensors: list[Any]) -> Any:
    """Run steps, each of which takes two values that are there and adds one."""
    values = list(tensors)
    for op, one, other in steps:
        a, b = values[one % len(values)], values[other % len(values)]
        values.append(UNARY[op](a) if op in UNARY else BINARY[op](a, b))
    return values[-1]


STEPS = st.lists(
    st.tuples(st.sampled_from([*BINARY, *UNARY]), st.integers(0, 20), st.integers(0, 20)),
    min_size=2,
    max_size=5,
)


@st.composite
def alike(draw: st.DrawFn) -> list[Steps]:
    """Programs of the same ops, which mostly have the same tree and differ in what is shared."""
    first = draw(STEPS)
    wirings = st.lists(
        st.tuples(st.integers(0, 20), st.integers(0, 20)),
        min_size=len(first),
        max_size=len(first),
    )
    others = draw(st.lists(wirings, min_size=1, max_size=3))
    rewired = [[(op, *w) for (op, _, _), w in zip(first, wiring, strict=True)] for wiring in others]
    return [first, *rewired]


@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(alike(), st.sampled_from(sorted(READS)), st.booleans())
def test_any_programs_give_torchs_values(
    given_tensors: dict[str, Any],
    hosts: dict[str, torch.Tensor],
    programs: list[Steps],
    read: str,
    of_users: bool,
) -> None:
    # A sync runs what it does not say; which of users' own tensors live, nobody can ask
    # (docs/decisions/program_keys.md, "Limits"): two of these programs may be taken for one.
    assume(not (of_users and read == "sync"))
    tensors = [plain(t) if of_users else t for t in given_tensors.values()]
    for steps in programs:
        expected = value_of(steps, [host.double() for host in hosts.values()])
        narrow = value_of(steps, list(hosts.values()))
        off = (narrow - expected).abs().max().item()  # where large values cancel out
        found = READS[read](value_of(steps, tensors))
        torch.testing.assert_close(
            found, READS[read](expected.float()), rtol=1e-4, atol=1e-4 + 10 * off
        )


def test_without_keys_torch_xla_takes_them_for_equal(given_tensors: dict[str, Any]) -> None:
    x, y = (plain(given_tensors[name]) for name in "xy")
    with keyed("one key for all"):
        first, second = (x + x * y).cpu(), (y + x * y).cpu()
    assert torch.equal(first, second)
    assert not torch.equal((x + x * y).cpu(), (y + x * y).cpu())


@pytest.mark.parametrize("read", sorted(READS))
def test_equal_programs_are_compiled_once(given_tensors: dict[str, Any], read: str) -> None:
    def once() -> None:
        x, y, z = given_tensors.values()
        READS[read](x * y @ z + x)
        READS[read](plain(x) * plain(z) @ plain(y) + plain(x))

    once()
    once()  # the first one's programs also made what the test was given
    before = compiled()
    for _ in range(3):
        once()
    assert compiled() == before


def compiled() -> int:
    return torch_xla._XLAC._xla_counter_value("UncachedCompile") or 0


def test_a_compiled_step_is_written_down_once(
    given_tensors: dict[str, Any], hosts: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[int] = []
    write = torch_xla_program_keys._digest

    def counted(tensors: Any) -> str:
        digest = write(tensors)
        written.extend([1] if digest else [])
        return digest

    monkeypatch.setattr(torch_xla_program_keys, "_digest", counted)
    steps = [xd.compile(lambda x, y: x @ y + x), xd.compile(lambda x, y: x @ y + y)]
    found = [[step(given_tensors["x"], given_tensors["y"]) for _ in range(4)] for step in steps]
    assert len(written) == len(steps)
    x, y = hosts["x"], hosts["y"]
    for results, expected in zip(found, (x @ y + x, x @ y + y), strict=True):
        for result in results:
            torch.testing.assert_close(result.full_tensor().cpu(), expected)


def test_a_program_that_takes_what_another_is_still_computing(
    given_tensors: dict[str, Any], hosts: dict[str, torch.Tensor]
) -> None:
    state: Any = given_tensors["x"]
    expected = hosts["x"].double()
    for _ in range(100):
        state, expected = torch.tanh(state @ state), torch.tanh(expected @ expected)
        torch_xla.sync()
        read = (state * state + state).full_tensor().cpu()
        wanted = (expected * expected + expected).float()
        torch.testing.assert_close(read, wanted, rtol=1e-4, atol=1e-4)


def test_threads_do_not_take_each_others_key(
    given_tensors: dict[str, Any], hosts: dict[str, torch.Tensor]
) -> None:
    x, y = (plain(given_tensors[name]) for name in "xy")
    wrong: list[str] = []

    def read(name: str, number: int) -> None:
        for turn in range(20):
            own = (x if name == "x" else y) * (number + turn)
            found = (x * y * (number + turn) + own).cpu()
            expected = (hosts["x"] * hosts["y"] + hosts[name]) * (number + turn)
            if not torch.allclose(found, expected, rtol=1e-4, atol=1e-4):
                wrong.append(name)

    threads = [threading.Thread(target=read, args=(name, 1)) for name in "xyxy"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def check(found: Any, expected: torch.Tensor) -> None:
    torch.testing.assert_close(plain(found).cpu(), expected, rtol=1e-4, atol=1e-4)


def test_a_compiled_step_sees_which_arguments_are_one_tensor(
    given_tensors: dict[str, Any], hosts: dict[str, torch.Tensor]
) -> None:
    step = xd.compile(lambda a, others: a @ others["b"] @ others["c"])
    for a, b, c in ("xyx", "xyy", "xxy", "xyz", "xyy", "yxx"):
        found = step(given_tensors[a], {"b": given_tensors[b], "c": given_tensors[c].detach()})
        check(found, hosts[a] @ hosts[b] @ hosts[c])


def test_a_compiled_step_that_is_given_a_function(
    given_tensors: dict[str, Any], hosts: dict[str, torch.Tensor]
) -> None:
    step = xd.compile(lambda f, a, b: f(a, b))
    for f in (lambda a, b: a + a * b, lambda a, b: b + a * b):
        check(step(f, given_tensors["x"], given_tensors["y"]), f(hosts["x"], hosts["y"]))


def test_compiled_steps_on_plain_tensors(hosts: dict[str, torch.Tensor]) -> None:
    x, y = hosts["x"], hosts["y"]
    for f in (lambda a, b: a @ b @ a + 2, lambda a, b: a @ b @ b + 2):
        step = xd.compile(f)
        check(step(x, y), f(x, y))
        check(step(x.to("xla"), y.to("xla")), f(x, y))


def test_local_views(given_tensors: dict[str, Any], hosts: dict[str, torch.Tensor]) -> None:
    x, y = (given_tensors[name].to_local() for name in "xy")
    a, b = hosts["x"][:4], hosts["y"][:4]  # the first device's
    for f in (lambda a, b: a + a * b, lambda a, b: b + a * b):
        for step in (f, xd.compile(f)):
            found: Any = step(x, y)
            torch_xla.sync()
            torch.testing.assert_close(found.cpu(), f(a, b))


def test_closures_of_a_step_have_keys_of_their_own(
    given_tensors: dict[str, Any], hosts: dict[str, torch.Tensor]
) -> None:
    xm = pytest.importorskip("torch_xla.core.xla_model")
    x, y = (plain(given_tensors[name]) for name in "xy")
    found: list[torch.Tensor] = []

    def step(f: Any, a: Any) -> Any:
        xm.add_step_closure(lambda: found.append(f(x, y).cpu()))
        return a * 4

    compiled_step = xd.compile(step)
    for f in (lambda a, b: a + a * b, lambda a, b: b + a * b):
        compiled_step(f, given_tensors["x"])
        check(found[-1], f(hosts["x"], hosts["y"]))


def test_a_payload_is_remembered_once(given_tensors: dict[str, Any]) -> None:
    x = given_tensors["x"]
    x.mul_(1)
    before = len(torch_xla_program_keys._alive)
    for _ in range(20):
        x.mul_(1.5).add_(1)
        x.redistribute(placements=[Replicate(), Shard(0)])
    assert len(torch_xla_program_keys._alive) == before


def test_an_alias_makes_no_other_program(given_tensors: dict[str, Any]) -> None:
    x, y = given_tensors["x"], given_tensors["y"]
    counts = []
    for turn in range(6):
        result = x @ y + x
        kept = [result.detach() for _ in range(turn % 3)]
        torch_xla.sync()
        counts.append(compiled())
        del kept, result
    assert counts[1:] == counts[:1] * 5


@pytest.mark.parametrize("read", [torch.Tensor.cpu, synced])
def test_a_device_error_can_be_caught(read: Callable[[torch.Tensor], Any]) -> None:
    wide = torch.ones(1 << 22, device="xla")
    torch_xla.sync()
    with pytest.raises(RuntimeError, match=r"RESOURCE_EXHAUSTED|Out of memory"):
        read(wide[:, None] * wide[None, :] + 1)
    assert float(wide[0].item()) == 1


def test_automatic_sharding_keeps_its_mesh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_AUTO_SPMD_MESH", "2,4")
    with keyed("digest"):
        assert os.environ["XLA_AUTO_SPMD_MESH"] == "digest"
    assert os.environ["XLA_AUTO_SPMD_MESH"] == "2,4"
    # Not by XLA_AUTO_SPMD: torch_xla, once it has seen that, shards by itself for good.
    monkeypatch.setattr(torch_xla._XLAC, "_xla_get_auto_sharding", lambda: True)
    with keyed("digest"):
        assert os.environ["XLA_AUTO_SPMD_MESH"] == "2,4"


def test_a_python_value_chooses_between_alike_tensors(mesh: xd.DeviceMesh) -> None:
    """The step's digest holds as long as what Python had when it was taken."""
    x, y = (xd.distribute_tensor(torch.randn(8, 8, dtype=torch.float64), mesh) for _ in range(2))
    first = True

    def step() -> torch.Tensor:
        return (x if first else y) + x * y

    compiled = xd.compile(step)
    for turn in range(4):
        first = turn % 2 == 0
        expected = (x if first else y).cpu() + x.cpu() * y.cpu()
        torch.testing.assert_close(compiled().cpu(), expected)
