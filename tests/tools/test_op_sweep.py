"""The op sweep: it tells right from wrong, survives its children, and finds nothing wrong."""

from __future__ import annotations

import json
import random
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.testing._internal.opinfo.core import SampleInput

from tools.op_sweep.__main__ import main
from tools.op_sweep.compare import difference, differences
from tools.op_sweep.judge import Row, judge_op, worst
from tools.op_sweep.parent import Sweep
from tools.op_sweep.samples import find_ops, op_names
from tools.op_sweep.tables import markdown, write_tables
from xla_dtensor import DeviceMesh, DTensor, distribute_tensor
from xla_dtensor.errors import UnsupportedOpError

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
NOT_RIGHT = {"crash", "hang", "wrong"}


# --------------------------------------------------------------------- comparing


@pytest.mark.parametrize(
    ("found", "expected", "told"),
    [
        (torch.ones(2), torch.ones(2), None),
        (torch.ones(2), torch.ones(3), "shape (2,), not (3,)"),
        (torch.ones(2), torch.ones(2, dtype=torch.float64), "float32, not float64"),
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.1]), "1 of 2 values, such as 2, not 2.1"),
        (torch.tensor([1, 2]), torch.tensor([1, 3]), "1 of 2 values, such as 2, not 3"),
        (torch.tensor(float("nan")), torch.tensor(float("nan")), None),
        (torch.tensor(1.0), torch.tensor(float("inf")), "1 of 1 values, such as 1, not inf"),
        (torch.tensor(float("inf")), torch.tensor(float("inf")), None),
        (None, torch.zeros(2), None),
        (None, torch.ones(2), "a NoneType, not a tensor"),
        (torch.ones(()), 1.0, "a tensor, not a float"),
        (1.00001, 1.0, None),
        (2, 1, "2, not 1"),
    ],
)
def test_differences(found: Any, expected: Any, told: str | None) -> None:
    assert difference(found, expected, None) == told


def test_rounding_is_measured_by_plain_torch() -> None:
    exact = torch.tensor([1.0], dtype=torch.float64)
    plain, ours = torch.tensor([1.001]), torch.tensor([0.995])
    assert difference(ours, plain, exact) is None
    assert difference(torch.tensor([0.98]), plain, exact) is not None


def test_each_result_is_compared() -> None:
    same, other = torch.ones(2), torch.zeros(2)
    assert differences((same, same), (same, same), None) is None
    assert str(differences((same, other), (same, same), None)).startswith("result 1: 2 of 2")
    assert differences((same,), (same, same), None) == "1 results, not 2"
    assert differences(other, same, None, only_kind=True) is None


# --------------------------------------------------------------------- judging


def made_up(op: Callable[..., Any], *inputs: torch.Tensor) -> Any:
    """An entry as op_db has them."""

    def sample_inputs(device: str, dtype: torch.dtype, requires_grad: bool) -> Any:
        given = inputs or (torch.linspace(-1, 1, 24).reshape(4, 6),)
        for tensor in given:
            floating = tensor.is_floating_point()
            yield SampleInput(tensor.clone().requires_grad_(requires_grad and floating))

    return SimpleNamespace(
        full_name="made_up",
        name="made_up",
        op=op,
        dtypes={torch.float32},
        supports_autograd=True,
        sample_inputs=sample_inputs,
    )


@pytest.fixture
def judge(mesh: DeviceMesh) -> Callable[..., Row]:
    def judged(op: Any, number: int = 1) -> Row:
        put = lambda tensor, placements: distribute_tensor(tensor, mesh, placements)  # noqa: E731
        return judge_op(op, put, number, 0)

    return judged


class _WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0] * 3


def test_right(judge: Callable[..., Row]) -> None:
    row = judge(made_up(torch.exp))
    assert (row.forward, row.backward, row.note) == ({"right": 1}, {"right": 1}, "")


def test_wrong_value_is_found(judge: Callable[..., Row]) -> None:
    row = judge(made_up(lambda x: x + (isinstance(x, DTensor) and x.shape[0] == 4)))
    assert row.forward == {"wrong": 1}
    assert re.match(r"24 of 24 values, such as 0, not -1 \(\(4, 6\) (S\d|R),", row.note)


def test_wrong_gradient_is_found(judge: Callable[..., Row]) -> None:
    row = judge(made_up(lambda x: _WrongGradient.apply(x) if isinstance(x, DTensor) else x * 2))
    assert (row.forward, row.backward) == ({"right": 1}, {"wrong": 1})
    assert row.note.startswith("backward: 24 of 24 values")


def test_refusal_and_error_are_told_apart(judge: Callable[..., Row]) -> None:
    def refuse(x: torch.Tensor) -> torch.Tensor:
        if isinstance(x, DTensor):
            raise UnsupportedOpError("made_up is refused. For a reason. Do otherwise.")
        return x + 0

    def fail(x: torch.Tensor) -> torch.Tensor:
        if isinstance(x, DTensor):
            raise KeyError("made_up")
        return x + 0

    row = judge(made_up(refuse))
    assert row.forward == {"refused": 1}
    assert row.note == "UnsupportedOpError: made_up is refused"
    row = judge(made_up(fail))
    assert row.forward == {"raised": 1}
    assert row.note.startswith("KeyError: 'made_up' at test_op_sweep.py:")


def test_random_ops_are_compared_in_kind(judge: Callable[..., Row]) -> None:
    row = judge(made_up(lambda x: x + torch.rand_like(x)))
    assert (row.forward, row.backward) == ({"right": 1}, {})
    assert row.note == "random: shape and dtype compared"
    row = judge(made_up(lambda x: torch.rand_like(x)[: 2 if isinstance(x, DTensor) else 4]))
    assert row.forward == {"wrong": 1}


def test_what_is_not_compared_is_said(judge: Callable[..., Row]) -> None:
    whole = torch.ones(4, 4)
    cases = (whole.to_sparse(), "sparse"), (whole + 1j, "complex")
    for tensor, reason in cases:
        row = judge(made_up(lambda x: x + x, tensor))
        assert (row.forward, row.note) == ({"skipped": 1}, reason)
    invalid = made_up(lambda x: x.reshape(5))
    assert judge(invalid).note.startswith("plain torch raises RuntimeError: shape '[5]' is invalid")


def test_same_seed_same_calls(judge: Callable[..., Row]) -> None:
    (op,) = find_ops(["sub"])
    first, second = (judge(op, number=2).as_json() | {"seconds": 0} for _ in range(2))
    assert first == second


# --------------------------------------------------------------------- children

CHILD = """
import json, os, sys, time
options = dict(zip(sys.argv[1::2], sys.argv[2::2]))
with open(options["--notes"], "a") as notes:
    for op in options["--ops"].split(","):
        print(json.dumps({"started": op}), file=notes, flush=True)
        if op == "crashes":
            os.abort()
        if op == "hangs":
            time.sleep(60)
        row = {"op": op, "seed": 0, "samples": 1, "forward": {"right": 1}, "backward": {}}
        print(json.dumps(row | {"note": "", "seconds": 1.0}), file=notes, flush=True)
"""


@pytest.fixture
def sweep(tmp_path: Path) -> Sweep:
    script = tmp_path / "child.py"
    script.write_text(CHILD)
    notes = tmp_path / "notes.jsonl"
    return Sweep("jax", 0, 1, notes, op_seconds=2.0, command=(sys.executable, str(script)))


def test_a_crash_and_a_hang_are_noted_and_survived(sweep: Sweep) -> None:
    rows = sweep.run(["a", "crashes", "b", "hangs", "c"])
    kinds = {name: worst(row["forward"]) for name, row in rows.items()}
    expected = {"a": "right", "crashes": "crash", "b": "right", "hangs": "hang", "c": "right"}
    assert kinds == expected
    assert rows["crashes"]["note"] == "crash (status -6)"


def test_goes_on_where_it_stopped(sweep: Sweep) -> None:
    assert set(sweep.run(["a"])) == {"a"}
    before = sweep.notes.read_text()
    assert set(sweep.run(["a", "b"])) == {"a", "b"}
    assert sweep.notes.read_text().startswith(before)
    assert sweep.notes.read_text().count('"started": "a"') == 1
    assert set(sweep.run(["a", "b", "c"], until=0.0)) == {"a", "b"}


def test_a_child_that_cannot_start_is_an_error(tmp_path: Path) -> None:
    sweep = Sweep("jax", 0, 1, tmp_path / "n.jsonl", command=(sys.executable, "-c", "import nope"))
    with pytest.raises(RuntimeError, match="before its first op"):
        sweep.run(["a"])


# --------------------------------------------------------------------- tables

ROWS = {
    "abs": Row("abs", 0, 3, {"right": 3}, {"right": 2}).as_json() | {"seconds": 2.0},
    "svd": Row("svd", 0, 3, {"refused": 2, "right": 1}, {}, "Error: a | b").as_json(),
}


def test_tables(tmp_path: Path) -> None:
    page = markdown("jax", ROWS, "2.9.0")
    assert "| abs | right | right |  |\n" in page
    assert "| svd | refused (1 right) | - | Error: a \\| b |\n" in page
    assert "| right | 1 | 1 |\n" in page
    assert "--runtime jax --seed 0 --samples 3 --ops NAME" in page
    write_tables(tmp_path, "jax", ROWS, "2.9.0")
    write_tables(tmp_path, "torch_xla", ROWS, "2.9.0")
    tables = json.loads((tmp_path / "op_table.json").read_text())
    assert tables["jax"] == tables["torch_xla"]
    assert tables["jax"]["ops"]["svd"] == [{"refused": 2, "right": 1}, {}]


@pytest.mark.parametrize("name", ["jax", "torch_xla"])
def test_the_published_table_is_whole_and_has_nothing_wrong(name: str) -> None:
    table = json.loads((DOCS / "op_table.json").read_text(encoding="utf-8"))[name]
    if torch.__version__.split("+")[0] == table["torch"].split("+")[0]:
        assert set(table["ops"]) == set(op_names())
    page = (DOCS / f"op_table_{name}.md").read_text(encoding="utf-8")
    for op, parts in table["ops"].items():
        assert not {worst(counts) for counts in parts} & (NOT_RIGHT | {"raised"}), op
        assert f"\n| {op} | " in page


def test_command_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    notes = tmp_path / "notes.jsonl"
    row = {"op": "abs"} | ROWS["abs"]
    notes.write_text(json.dumps(row) + "\n")
    assert main(["--ops", "abs", "--notes", str(notes), "--tables", str(tmp_path)]) == 0
    assert "abs: {'right': 3} {'right': 2}" in capsys.readouterr().out
    assert (tmp_path / "op_table_jax.md").exists()
    notes.write_text(json.dumps(row | {"backward": {"wrong": 1}}) + "\n")
    assert main(["--ops", "abs", "--notes", str(notes)]) == 1


# --------------------------------------------------------------------- sweeping


def test_no_op_of_a_few_is_wrong(judge: Callable[..., Row]) -> None:
    names = random.Random(2).sample(op_names(), len(op_names()) // 50)
    for op in find_ops(names):
        row = judge(op)
        kinds = {worst(row.forward), worst(row.backward)}
        assert not kinds & {"wrong", "raised"}, row


@pytest.mark.thorough
def test_no_op_of_many_is_wrong(runtime: Any, tmp_path: Path) -> None:
    names = random.Random(3).sample(op_names(), len(op_names()) // 6)
    rows = Sweep(runtime.name, 3, 2, tmp_path / "notes.jsonl").run(names)
    bad = [r for r in rows.values() if {*r["forward"], *r["backward"]} & {*NOT_RIGHT, "raised"}]
    assert len(rows) == len(names)
    assert not bad
