"""Faults that reports once had, or that were found while they were built: a row for each.

A row returns what is found and what it has to be. See tools/mutants/mutants.yaml.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from mesh_utils import Mesh
from xla_dtensor.report import collectives
from xla_dtensor.report.hlo_text import entry_layouts

ROWS: list[Callable[[], tuple[Any, Any]]] = []
MESH = Mesh.arange((2, 4), ("dp", "tp"))
TP = "channel_id=1, replica_groups=[2,4]<=[8], use_global_device_ids=true"


def row(function: Callable[[], tuple[Any, Any]]) -> Callable[[], tuple[Any, Any]]:
    """Register a row."""
    ROWS.append(function)
    return function


@pytest.mark.parametrize("function", ROWS, ids=lambda function: function.__name__)
def test_row(function: Callable[[], tuple[Any, Any]]) -> None:
    found, expected = function()
    assert found == expected


def program(*lines: str, before: str = "", header: str = "num_partitions=8") -> str:
    """Return a program whose entry has these instructions."""
    body = "\n".join(f"  {line}" for line in ("%p = f32[8]{0} parameter(0)", *lines))
    return f"HloModule m, {header}\n{before}\nENTRY %main (p: f32[8]) -> f32[8] {{\n{body}\n}}\n"


def named(name: str) -> str:
    return f'metadata={{op_name="jit(f)/model/{name}"}}'


@row
def inputs_that_come_as_one_tuple() -> tuple[Any, Any]:
    """Above 2,000 arrays libtpu takes one tuple."""
    header = "entry_computation_layout={((f32[8]{0}, bf16[4]{0}))->(f32[8]{0})}"
    found = entry_layouts(f"HloModule m, {header}")
    assert found is not None
    return [str(each.shape) for each in found.inputs], ["f32[8]", "bf16[4]"]


@row
def a_kernel_over_several_lines() -> tuple[Any, Any]:
    """What is reduced of it is told by its name, which stands on its last line."""
    kernel = (
        '%k = f32[8]{0} custom-call(%p), custom_call_target="x", backend_config={"a":\n{"b": 1}}'
    )
    reduced = f"ROOT %a = f32[8]{{0}} all-reduce(%k), {TP}, to_apply=%add"
    (one,) = collectives(program(f"{kernel}, {named('attention/splash')}", reduced), MESH)
    return one.op_name, "jit(f)/model/attention/splash"


@row
def what_a_start_gives_is_counted_once() -> tuple[Any, Any]:
    lines = (
        f"%s = (f32[8]{{0}}, f32[32]{{0}}) all-gather-start(%p), {TP}, dimensions={{0}}",
        "ROOT %d = f32[32]{0} all-gather-done(%s)",
    )
    (one,) = collectives(program(*lines), MESH)
    return [str(each) for each in one.results], ["f32[32]"]


@row
def device_ids_behind_a_mesh_that_xla_made_up() -> tuple[Any, Any]:
    ids = "replica_groups=mesh['x'=4,'y'=2] {'y'}"
    line = f"ROOT %a = f32[8]{{0}} all-reduce(%p), channel_id=1, {ids}, use_global_device_ids=true"
    (one,) = collectives(program(line), MESH)
    return one.axes, ("tp:(2)2",)


LOOP = """
%condition (c: (s32[], f32[8])) -> pred[] {
  %c = (s32[], f32[8]{0}) parameter(0)
  %i = s32[] get-tuple-element(%c), index=0
  %n = s32[] constant(6)
  ROOT %lt = pred[] compare(%i, %n), direction=LT
}

%body (b: (s32[], f32[8])) -> (s32[], f32[8]) {
  %b = (s32[], f32[8]{0}) parameter(0)
  %j = s32[] get-tuple-element(%b), index=0
  %two = s32[] constant(2)
  %next = s32[] add(%two, %j)
  %x = f32[8]{0} get-tuple-element(%b), index=1
  %a = f32[8]{0} all-reduce(%x), TP, to_apply=%add
  ROOT %t = (s32[], f32[8]{0}) tuple(%next, %a)
}
""".replace("TP", TP)


@row
def a_loop_of_a_tpu_is_counted() -> tuple[Any, Any]:
    """XLA for TPU does not print how often a loop runs."""
    lines = (
        "%zero = s32[] constant(0)",
        "%start = (s32[], f32[8]{0}) tuple(%zero, %p)",
        "%w = (s32[], f32[8]{0}) while(%start), condition=%condition, body=%body",
        "ROOT %r = f32[8]{0} get-tuple-element(%w), index=1",
    )
    (one,) = collectives(program(*lines, before=LOOP), MESH)
    return (one.executions, one.in_loop), (3, True)


@row
def a_collective_that_xla_moved_into_the_next_turn() -> tuple[Any, Any]:
    """What the last turn has made is reduced in this one: its name is that of the maker."""
    body = LOOP.replace(
        f"%a = f32[8]{{0}} all-reduce(%x), {TP}, to_apply=%add",
        f"%a = f32[8]{{0}} all-reduce(%x), {TP}, to_apply=%add\n"
        f"  %y = f32[8]{{0}} multiply(%k, %k), {named('layers/while/body/0/up/dot_general')}\n",
    ).replace("%x = ", "%k = f32[8]{0} constant({1})\n  %x = ")
    body = body.replace("tuple(%next, %a)", "tuple(%next, %y)")
    lines = (
        "%zero = s32[] constant(0)",
        "%start = (s32[], f32[8]{0}) tuple(%zero, %p)",
        "%w = (s32[], f32[8]{0}) while(%start), condition=%condition, body=%body",
        "ROOT %r = f32[8]{0} get-tuple-element(%w), index=1",
    )
    (one,) = collectives(program(*lines, before=body), MESH)
    return one.op_name, "jit(f)/model/layers/while/body/0/up/dot_general"


@row
def frames_whose_parents_are_numbered_from_one() -> tuple[Any, Any]:
    tables = (
        'FileNames\n1 "lib.py"\n2 "user.py"\n\n'
        "FileLocations\n1 {file_name_id=1 line=7}\n2 {file_name_id=2 line=9}\n\n"
        "StackFrames\n1 {file_location_id=2 parent_frame_id=1}\n"
        "2 {file_location_id=1 parent_frame_id=2}\n"
    )
    line = (
        f'ROOT %a = f32[8]{{0}} all-reduce(%p), {TP}, metadata={{op_name="a/b" stack_frame_id=2}}'
    )
    text = program(line, before=tables)
    (one,) = collectives(text, MESH)
    return [str(each) for each in one.source], ["lib.py:7", "user.py:9"]
