"""Which collectives somebody has asked for, decided by names, axes, kinds and sizes."""

from __future__ import annotations

from typing import Any

import pytest

from mesh_utils import Mesh
from xla_dtensor.report import collectives
from xla_dtensor.report.attribution import ANY, Allowance, AskedFor, changes_in, scope_name, unasked

SIZES = {"dp": 2, "tp": 4}
GATHER = "f32[64]{0} all-gather(%p), dimensions={0},"
SUM = "f32[16]{0} all-reduce(%p),"
OVER = {"tp": "replica_groups=[2,4]<=[8]", "dp": "replica_groups=[4,2]<=[2,4]T(1,0)"}


def left(what: str, axis: str, name: str, asked: list[AskedFor], **allowed: Any) -> list[str]:
    """The kinds that nobody asked for in a program with one collective."""
    text = (
        "HloModule m, num_partitions=8\n\nENTRY %main (p: f32[16]) -> f32[16] {\n"
        "  %p = f32[16]{0} parameter(0)\n"
        f"  %c = {what} channel_id=1, {OVER[axis]}, use_global_device_ids=true, "
        f'metadata={{op_name="jit(f)/{name}"}}\n'
        "  ROOT %r = f32[16]{0} copy(%p)\n}"
    )
    found = collectives(text, Mesh.arange((2, 4), ("dp", "tp")))
    return [one.kind for one in unasked(found, asked, SIZES, Allowance(**allowed))]


def redistribute(change: dict[str, tuple[str, str]] | None, elements: int = 64) -> AskedFor:
    return AskedFor((("mlp/max", "mlp/max"),), change, elements, 4)


@pytest.mark.parametrize(
    ("what", "axis", "name", "asked", "is_left"),
    [
        (GATHER, "tp", "mlp/max", redistribute({"tp": ("S1", "R")}), False),
        (GATHER, "tp", "mlp/down/dot_general", redistribute({"tp": ("S1", "R")}), True),
        (GATHER, "dp", "mlp/max", redistribute({"tp": ("S1", "R")}), True),
        (GATHER, "tp", "mlp/max", redistribute({"tp": ("R", "S1")}), True),
        (GATHER, "tp", "mlp/max", redistribute({}), True),
        (GATHER, "tp", "mlp/max", redistribute(None), False),
        (GATHER, "tp", "mlp/max", redistribute({"tp": ("S1", "R")}, 16), True),  # too large
        (SUM, "tp", "mlp/max", redistribute({"tp": ("P", "R")}), False),
        (SUM, "tp", "mlp/max", redistribute({"tp": ("P", "S0")}, 4), False),  # of four parts
        (SUM, "dp", "mlp/max", redistribute({"tp": ("P", "R")}), True),
        (SUM, "tp", "mlp/shard_map/psum", redistribute({}), False),  # called by name
        (GATHER, "tp", "redistribute[tp=S0.R]/jit(g)", redistribute({}), False),
        (GATHER, "dp", "redistribute[tp=S0.R]/jit(g)", redistribute({}), True),
        (GATHER, "dp", f"0/{ANY}/jit(g)", redistribute({}), False),
    ],
)
def test_what_is_asked_for(what: str, axis: str, name: str, asked: AskedFor, is_left: bool) -> None:
    assert bool(left(what, axis, name, [asked])) == is_left


@pytest.mark.parametrize(
    ("allowed", "is_left"),
    [
        ({}, True),
        ({"kinds": ("all-reduce",)}, False),
        ({"kinds": ("all-gather",)}, True),
        ({"modules": ("layers.1",)}, False),
        ({"modules": ("layers",)}, False),
        ({"modules": ("layer",)}, True),
        ({"gradients": ("tp", "dp")}, False),
        ({"gradients": ("dp",)}, True),
        ({"below_bytes": 65}, False),
        ({"below_bytes": 64}, True),
    ],
)
def test_allowances(allowed: dict[str, Any], is_left: bool) -> None:
    name = "backward/Net/layers.1/up/dot_general"
    assert bool(left(SUM, "tp", name, [], **allowed)) == is_left


def test_only_gradients_are_let_through_as_gradients() -> None:
    assert left(SUM, "tp", "Net/up/dot_general", [], gradients=("tp",)) == ["all-reduce"]
    gather = "backward/Net/up/dot_general"
    assert left(GATHER, "tp", gather, [], gradients=("tp",)) == ["all-gather"]


def test_scopes_come_back() -> None:
    name = scope_name([("dp", "S0", "R"), ("tp", "R", "R"), ("a/b[1]", "P", "S2")])
    assert changes_in(f"x/{name}/y") == {"dp": ("S0", "R"), "a/b[1]": ("P", "S2")}
    assert changes_in(scope_name([])) == {}
    assert changes_in(ANY) is None
    with pytest.raises(ValueError, match="no redistribute"):
        changes_in("mlp/down")
