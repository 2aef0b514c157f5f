"""Whose an instruction is, read from names and lines that compilers printed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xla_dtensor.report.finding import PHASES, Origin, origin_of, user_line
from xla_dtensor.report.hlo import SourceLine

SCAN = "jit(program)/Model/layers/while/body/closed_call"
BACK = "jit(program)/backward/Model/while/body/closed_call"
LOOP = "jit(program)/backward/Model/layers/while/body/closed_call"


# Printed for compiled steps of this package and of JAX: name, module, phase, op.
NAMES = f"""
jit(traced)/Llama/layers.0/attention/dot_general | layers.0.attention | forward | dot_general
jit(traced)/backward/Llama/layers.1/mlp/w1/mul | layers.1.mlp.w1 | backward | mul
jit(program)/Model/embed/gather | embed | forward | gather
jit(program)/Model/add | Model | forward | add
jit(program)/jit(log_softmax)/exp | - | forward | exp
jit(program)/optimizer/sqrt | - | optimizer | sqrt
{SCAN}/0/attention/wq/dot_general | layers.*.attention.wq | forward | dot_general
{SCAN}/0/attention/...qd,...kd->...qk/dot_general | layers.*.attention | forward | dot_general
{SCAN}/0/attention/blockwise_attention/exp | layers.*.attention | forward | exp
jit(program)/Model/layers/while | layers | forward | -
{BACK}/0/up/dot_general | *.up | backward | dot_general
{LOOP}/0/up/dot_general | layers.*.up | backward | dot_general
{LOOP}/backward/0/up/dot_general | layers.*.up | backward | dot_general
{LOOP}/backward/Model/layers/0/up/dot_general | layers.*.up | backward | dot_general
jit(program)/backward/model/layers/while/body/backward/0/up/dot | model.layers.*.up | backward | dot
{SCAN}/0/at/cond/branch_0_fun/splash_attention/vmap(s)/mha/call | layers.*.at | forward | call
jit(program)/Model/backward/exp | - | backward | exp
{BACK}/backward/Model/layers/0/up/reduce_sum | layers.*.up | backward | reduce_sum
{BACK}/backward/Model/layers/0/attention/transpose(jvp())/mul | layers.*.attention | backward | mul
{BACK}/(backward/Model/layers/0/down/dot:0/attention/qd->qk/dot) | layers.*.down | backward | dot
jit(loss)/transpose(jvp())/while/body/closed_call/dot_general | - | backward | dot_general
jit(loss)/transpose(jvp(Llama))/head/checkpoint/rematted_computation/mul | head | backward | mul
jit(loss)/jvp(Llama/layers.3)/mlp/tanh | layers.3.mlp | forward | tanh
state_in[3] | - | other | state_in[3]
broadcast.131 | - | other | broadcast.131
"""


@pytest.mark.parametrize("row", NAMES.strip().splitlines())
def test_names(row: str) -> None:
    op_name, *told = (part.strip() for part in row.split(" | "))
    module, phase, op = (None if part == "-" else part for part in told)
    assert origin_of(op_name) == Origin(module, phase, op)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("op_name", ["", None])
def test_no_name(op_name: str | None) -> None:
    assert origin_of(op_name) == Origin()


def lines(*files: str) -> tuple[SourceLine, ...]:
    return tuple(SourceLine(file, number) for number, file in enumerate(files, 1))


SITE = "/venv/lib/python3.11/site-packages"


@pytest.mark.parametrize(
    "file",
    [
        "/home/user/project/xla_dtensor/runtimes/jax/lower/matmul.py",
        "/elsewhere/checkout/xla_dtensor/dtensor/dispatch.py",
        f"{SITE}/xla_dtensor/dtensor/dtensor.py",
        f"{SITE}/torch/_ops.py",
        f"{SITE}/jax/_src/pjit.py",
        "C:\\venv\\Lib\\site-packages\\torch\\nn\\functional.py",
        "/usr/lib/python3.11/contextlib.py",
        "<frozen importlib._bootstrap>",
        "",
    ],
)
def test_lines_of_frameworks_are_skipped(file: str) -> None:
    assert user_line(lines(file)) is None
    assert user_line(lines(file, "train.py", "main.py")) == SourceLine("train.py", 2)


@pytest.mark.parametrize(
    "file",
    [
        "train.py",
        f"{SITE}/transformers/models/llama.py",
        "/home/torch/train.py",
        "/home/user/project/tests/xla_dtensor/test_training.py",
        "/home/user/project/xla_dtensor/models/decoder.py",
        f"{SITE}/xla_dtensor/models/decoder.py",
    ],
)
def test_lines_of_users_are_kept(file: str) -> None:
    assert user_line(lines(f"{SITE}/torch/x.py", file)) == SourceLine(file, 2)


def test_the_optimizers_own_lines_tell_its_phase() -> None:
    """Its ops stand in the scope of the backward where none was opened for it."""
    source = lines(f"{SITE}/torch/optim/adam.py", "train.py")
    found = origin_of("jit(program)/backward/Model/sqrt", source)
    assert found == Origin(None, "optimizer", "sqrt", SourceLine("train.py", 2))


def test_it_reads_well() -> None:
    assert str(origin_of("jit(f)/M/up/add", lines("a.py"))) == "up (forward), add, a.py:1"
    assert str(Origin()) == "no module (other)"


PIECES = st.sampled_from(
    [
        *("jit(", "jvp(", "transpose(", "(", ")", "/", "/", ":", "while", "body", "closed_call"),
        *("backward", "optimizer", "Llama", "0", "layers.0", "*", "é", '"'),
    ]
)


@given(
    name=st.one_of(st.text(max_size=80), st.lists(PIECES, max_size=30).map("".join), st.none()),
    files=st.lists(st.text(max_size=30), max_size=4),
)
def test_any_name_has_an_origin(name: str | None, files: list[str]) -> None:
    found = origin_of(name, lines(*files))
    assert found.phase in PHASES
    assert found.module is None or found.module
    assert found.op is None or found.op
    assert str(found)


def test_a_name_nested_too_deeply_is_read_as_far_as_it_goes() -> None:
    assert origin_of("(" * 5000 + "a" + ")" * 5000).phase in PHASES
    assert origin_of("jvp(" * 5000 + "a" + ")" * 5000 + "/b").op == "b"
