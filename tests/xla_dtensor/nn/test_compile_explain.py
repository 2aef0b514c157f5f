"""`step.explain()`, a log line for each trace, and a limit to their number."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest
import torch
from torch import nn

import xla_dtensor as xd
from xla_dtensor.errors import CompileError

LIMIT = "XLA_DTENSOR_MOST_TRACES"


class Trainer:
    def __init__(self, mesh: xd.DeviceMesh) -> None:
        self.model = xd.distribute_module(nn.Linear(8, 8), mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.scale, self.losses = 1.0, list[Any]()

    def step(self, x: torch.Tensor) -> torch.Tensor:
        self.optimizer.zero_grad()
        self.loss = (self.model(x) * self.scale).square().mean()
        self.loss.backward()
        self.optimizer.step()
        self.losses.append(self.loss)
        return self.loss


def rows(text: str, title: str) -> list[list[str]]:
    """Return the rows of a table, by what stands in its columns."""
    lines = text.splitlines()
    table = lines[lines.index(title) + 1 :]
    end = table.index("") if "" in table else len(table)
    return [re.split(r" {2,}", line.strip()) for line in table[:end]]


@pytest.mark.only_on("jax")
def test_what_a_program_is_made_of(mesh: xd.DeviceMesh) -> None:
    trainer, x = Trainer(mesh), xd.distribute_tensor(torch.ones(4, 8), mesh)
    step = xd.compile(trainer.step)
    with pytest.raises(CompileError, match="before its first call"):
        step.explain()
    step(x)
    trainer.scale = 2.0
    for _ in range(2):
        step(x)
    text = step.explain()
    assert text.splitlines()[0] == "Trainer.step: 3 calls, 2 traces"
    inputs = {row[0]: row[1:] for row in rows(text, "Inputs of the program")}
    # The weight and the bias, their two moments and counters, and the generator's state.
    assert inputs["read and written, donated"][0] in ("8 tensors", "9 tensors")
    assert inputs["arguments"] == ["1 tensors", "128 B"]
    assert inputs["of these, Python's numbers"] == ["2"]  # the learning rate, scale
    of_guards = rows(text, "Guards, by what holds them")[1:]
    guards = {(row[0], row[1]): row[2] for row in of_guards if len(row) == 3}  # or folded
    assert set(guards["Trainer", "object"].split(", ")) >= {"scale", "model", "optimizer"}
    assert "losses" in guards["Trainer", "object"]
    assert rows(text, "Done after each run") == [["Trainer.loss"], ["Trainer.losses"]]
    reasons = rows(text, "Traces")[1:]
    assert reasons == [["1", "first call"], ["2", "Trainer.scale changed from 1.0 to 2.0"]]
    seconds = rows(text, "Seconds")
    assert seconds[0] == ["trace", "lower", "compile"]
    assert [row[0] for row in seconds[1:]] == ["trace 1", "trace 2"]
    assert all(float(number) >= 0 for row in seconds[1:] for number in row[1:])
    spent = {row[0]: float(row[1]) for row in rows(text, "Milliseconds of the last call")}
    assert spent.keys() == {"guards", "launch"}
    assert all(spent.values())


@pytest.mark.only_on("torch_xla")
def test_a_runtime_that_knows_less(mesh: xd.DeviceMesh) -> None:
    step = xd.compile(lambda x: x * 2)
    step(xd.distribute_tensor(torch.ones(4), mesh))
    assert step.explain().splitlines()[1:] == ["  first call"]


@pytest.mark.only_on("jax")
def test_each_trace_is_a_line_of_the_log(
    mesh: xd.DeviceMesh, caplog: pytest.LogCaptureFixture
) -> None:
    by, x = [0.0], xd.distribute_tensor(torch.ones(4), mesh)
    step = xd.compile(lambda x: x * by[0])
    with caplog.at_level(logging.INFO, "xla_dtensor"):
        for number in range(5):
            by[0] = float(number)
            step(x)
    lines = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert len(lines) == 5
    assert [level for level, _ in lines] == ["INFO"] * 3 + ["WARNING"] * 2
    assert "is traced for the 2th time, in call 2: element 0 of" in lines[1][1]
    assert "changed from 0.0 to 1.0" in lines[1][1]


@pytest.mark.only_on("jax")
def test_a_limit(mesh: xd.DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LIMIT, "2")
    by, x = [0.0], xd.distribute_tensor(torch.ones(4), mesh)
    step = xd.compile(lambda x: x * by[0])
    for number in range(2):
        by[0] = float(number)
        step(x)
    step(x)
    by[0] = 2.0
    with pytest.raises(CompileError, match=f"changed from 1.0 to 2.0. {LIMIT}=2 allows no more"):
        step(x)
    by[0] = 1.0
    assert step(x).full_tensor().tolist() == [1.0] * 4
    monkeypatch.setenv(LIMIT, "many")
    with pytest.raises(CompileError, match=f"{LIMIT}='many'"):
        xd.compile(lambda x: x)
