"""Collectives without metadata of their own are told by the right neighbour."""

from __future__ import annotations

import pytest

from xla_dtensor.report.reading import collectives

GROUPS = "channel_id=1, replica_groups={{0,1}}, use_global_device_ids=true"


def named(name: str) -> str:
    return f'metadata={{op_name="jit(f)/model/{name}"}}'


def only_name(text: str) -> str | None:
    (one,) = collectives(text)
    return one.op_name


# A layer's slice of the stacked weights is gathered for a product.
GATHERED = f"""HloModule m
ENTRY %main (p: f32[8,2,4], i: s32[]) -> f32[4,4] {{
  %p = f32[8,2,4]{{2,1,0}} parameter(0), metadata={{op_name="weights"}}
  %i = s32[] parameter(1)
  %j = s32[] add(%i, %i), {named("layers/while/body/sub")}
  %part = f32[2,4]{{1,0}} dynamic-slice(%p, %j, %j), {named("layers/while/body/dynamic_slice")}
  %whole = f32[4,4]{{1,0}} all-gather(%part), dimensions={{0}}, {GROUPS}
  ROOT %product = f32[4,4]{{1,0}} dot(%whole, %whole), {named("layers/while/body/0/up/dot_general")}
}}
"""


def test_a_gather_is_for_who_uses_it_not_for_the_slice_or_its_number() -> None:
    assert only_name(GATHERED) == "jit(f)/model/layers/while/body/0/up/dot_general"


def test_a_slice_says_something_where_nobody_else_does() -> None:
    text = GATHERED.replace(named("layers/while/body/0/up/dot_general"), "sharding={replicated}")
    assert only_name(text) == "jit(f)/model/layers/while/body/dynamic_slice"


# XLA of JAX 0.12 names what moves an input by that input. In the fusion a product takes it.
OF_AN_INPUT = f"""HloModule m
%fused (a: f32[4,4], b: f32[4,4]) -> f32[4,4] {{
  %a = f32[4,4]{{1,0}} parameter(0)
  %b = f32[4,4]{{1,0}} parameter(1)
  %product = f32[4,4]{{1,0}} dot(%a, %b), {named("up/dot_general")}
  ROOT %positive = f32[4,4]{{1,0}} maximum(%product, %product), {named("max")}
}}
ENTRY %main (p: f32[2,4], x: f32[4,4]) -> f32[4,4] {{
  %p = f32[2,4]{{1,0}} parameter(0), metadata={{op_name="state_in[0]"}}
  %x = f32[4,4]{{1,0}} parameter(1), metadata={{op_name="arguments_in[0]"}}
  %whole = f32[4,4]{{1,0}} all-gather(%p), dimensions={{0}}, {GROUPS}, \
metadata={{op_name="state_in[0]"}}
  ROOT %fusion = f32[4,4]{{1,0}} fusion(%x, %whole), kind=kOutput, calls=%fused, {named("max")}
}}
"""


def test_what_moves_an_input_is_for_the_op_that_uses_it_in_a_fusion() -> None:
    assert only_name(OF_AN_INPUT) == "jit(f)/model/up/dot_general"
    alone = OF_AN_INPUT.replace("%x, %whole", "%x, %x").replace("ROOT %fusion", "%fusion")
    assert only_name(alone.replace("  %whole", "  ROOT %whole")) == "state_in[0]"


# The transfer runs beside the product of another module, from which only its semaphores lead on.
BESIDE = f"""HloModule m
%start (a: f32[2,4]) -> (f32[2,4], f32[4,4], u32[]) {{
  %a = f32[2,4]{{1,0}} parameter(0)
  %gathered = f32[4,4]{{1,0}} all-gather(%a), dimensions={{0}}, {GROUPS}
  ROOT %t = (f32[2,4]{{1,0}}, f32[4,4]{{1,0}}, u32[]{{:S(2)}}) custom-call(%gathered)
}}
ENTRY %main (p: f32[2,4], x: f32[4,4]) -> (f32[4,4], f32[4,4]) {{
  %p = f32[2,4]{{1,0}} parameter(0)
  %x = f32[4,4]{{1,0}} parameter(1)
  %async-collective-start = (f32[2,4]{{1,0}}, f32[4,4]{{1,0}}, u32[]{{:S(2)}}) fusion(%p), \
kind=kCustom, calls=%start
  %e0 = f32[4,4]{{1,0}} get-tuple-element(%async-collective-start), index=1
  %e1 = u32[]{{:S(2)}} get-tuple-element(%async-collective-start), index=2
  %other = (f32[4,4]{{1,0}}, f32[4,4]{{1,0}}, u32[]{{:S(2)}}) fusion(%x, %e0, %e1), kind=kOutput, \
calls=%beside, {named("first/dot_general")}
  %f0 = f32[4,4]{{1,0}} get-tuple-element(%other), index=0
  %f1 = f32[4,4]{{1,0}} get-tuple-element(%other), index=1
  %f2 = u32[]{{:S(2)}} get-tuple-element(%other), index=2
  %after = f32[4,4]{{1,0}} tanh(%f0), {named("first/tanh")}
  %async-collective-done = f32[4,4]{{1,0}} fusion(%f1, %f2), kind=kCustom, calls=%done
  %product = f32[4,4]{{1,0}} dot(%async-collective-done, %after), {named("second/dot_general")}
  ROOT %r = (f32[4,4]{{1,0}}, f32[4,4]{{1,0}}) tuple(%after, %product)
}}
"""


def test_a_transfer_beside_another_product_is_not_that_products() -> None:
    assert only_name(BESIDE) == "jit(f)/model/second/dot_general"


# A loop: what is gathered in a turn is used in the next, and what a turn has made the next reduces.
PIPELINED = f"""HloModule m
%sum (a: f32[], b: f32[]) -> f32[] {{
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %c = f32[] add(%a, %b)
}}
%body (s: (f32[2,4], f32[4,4], f32[4,4])) -> (f32[2,4], f32[4,4], f32[4,4]) {{
  %s = (f32[2,4]{{1,0}}, f32[4,4]{{1,0}}, f32[4,4]{{1,0}}) parameter(0)
  %w = f32[2,4]{{1,0}} get-tuple-element(%s), index=0
  %ready = f32[4,4]{{1,0}} get-tuple-element(%s), index=1
  %late = f32[4,4]{{1,0}} get-tuple-element(%s), index=2
  %reduced = f32[4,4]{{1,0}} all-reduce(%late), to_apply=%sum, {GROUPS}
  %used = f32[4,4]{{1,0}} dot(%ready, %ready), {named("used/dot_general")}
  %made = f32[4,4]{{1,0}} negate(%used), {named("made/neg")}
  %next = f32[4,4]{{1,0}} all-gather(%w), dimensions={{0}}, {GROUPS}
  ROOT %r = (f32[2,4]{{1,0}}, f32[4,4]{{1,0}}, f32[4,4]{{1,0}}) tuple(%w, %next, %made)
}}
ENTRY %main (p: (f32[2,4], f32[4,4], f32[4,4])) -> (f32[2,4], f32[4,4], f32[4,4]) {{
  %p = (f32[2,4]{{1,0}}, f32[4,4]{{1,0}}, f32[4,4]{{1,0}}) parameter(0)
  ROOT %w = (f32[2,4]{{1,0}}, f32[4,4]{{1,0}}, f32[4,4]{{1,0}}) while(%p), condition=%c, body=%body
}}
"""


def test_what_a_loop_fetches_ahead_or_reduces_late() -> None:
    names = {one.kind: one.op_name for one in collectives(PIPELINED)}
    assert names == {
        "all-gather": "jit(f)/model/used/dot_general",
        "all-reduce": "jit(f)/model/made/neg",
    }


@pytest.mark.parametrize("text", [GATHERED, BESIDE, PIPELINED])
def test_without_any_name_there_is_none(text: str) -> None:
    bare = "\n".join(line.partition(", metadata=")[0] for line in text.splitlines())
    assert all(one.op_name is None for one in collectives(bare))
