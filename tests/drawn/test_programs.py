"""Programs of fixed seeds are right, or refused by name; `make fuzz` draws others."""

from __future__ import annotations

import pytest
import torch

from tests.drawn.judge import expected_of
from tests.drawn.ours import verdict_of
from tests.drawn.run import program_of
from xla_dtensor.runtimes import Runtime

# "unjudged": plain torch's own error is larger than what could be told from a wrong value.
FINE = {"right", "refused", "unjudged"}
BATCH = 4
# A seed means another program where torch has other ops: these are the contracts' two.
TORCH = {"jax": "2.15.", "torch_xla": "2.9."}


# What casts complex numbers to real ones warns, as in PyTorch.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("mesh")
@pytest.mark.parametrize("batch", range(6))
def test_drawn_programs(runtime: Runtime, batch: int) -> None:
    if not torch.__version__.startswith(TORCH[runtime.name]):
        pytest.skip(f"on {runtime.name} these are programs of torch {TORCH[runtime.name]}*")
    bad = []
    for seed in range(10_000 + BATCH * batch, 10_000 + BATCH * (batch + 1)):
        program = program_of(f"program/{seed}")
        verdict = verdict_of(program, expected_of(program))
        if verdict.kind not in FINE:
            bad.append(f"program/{seed} on {runtime.name}: {verdict.kind}: {verdict.note}")
    assert not bad


# What reduces, and what is computed with each element or row; see run.py, ``--selected``.
ON_ROWS = ("std", "var", "add", "where", "any", "amax", "softmax", "masked_select", "clone")


@pytest.mark.only_on("jax")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("mesh")
@pytest.mark.parametrize("batch", range(3))
def test_drawn_selections(runtime: Runtime, batch: int) -> None:
    if not torch.__version__.startswith(TORCH[runtime.name]):
        pytest.skip(f"on {runtime.name} these are programs of torch {TORCH[runtime.name]}*")
    bad = []
    for name in ON_ROWS[batch::3]:
        program = program_of(f"selected/{name}/float32/5")
        verdict = verdict_of(program, expected_of(program))
        if verdict.kind not in FINE:
            bad.append(f"selected/{name}/float32/5: {verdict.kind}: {verdict.note}")
    assert not bad
