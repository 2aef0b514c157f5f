"""Instructions over several lines."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from xla_dtensor.report.hlo import HloModule
from xla_dtensor.report.hlo_text import whole_lines

# As libtpu 0.0.42.1 prints the splash attention kernel, shortened.
KERNEL = """HloModule jit_f, num_partitions=4

ENTRY %main (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  %kernel = (f32[8]{0}, f32[8]{0}) custom-call(%p), custom_call_target="t", \
frontend_attributes={kernel_metadata={
"xprof_metadata":"{\\"block_q\\": 512, \\"q_layout\\": 1}"
}}, metadata={op_name="jit(f)/splash" stack_frame_id=71}, backend_config={"body":"TUzv="}
  %first = f32[8]{0} get-tuple-element(%kernel), index=0, frontend_attributes={kernel_metadata={
"xprof_metadata":"{\\"block_q\\": 512, \\"q_layout\\": 1}"
}}, metadata={op_name="jit(f)/splash" stack_frame_id=71}
  ROOT %sum = f32[8]{0} add(%first, %p)
}
"""


def test_a_kernel_with_line_breaks_is_read() -> None:
    module = HloModule.parse(KERNEL)
    assert module.unread == ()
    found = module.computations["main"].instructions
    assert list(found) == ["p", "kernel", "first", "sum"]
    assert 'op_name="jit(f)/splash"' in found["first"].rest
    assert found["first"].attributes["index"] == "0"


def test_what_is_never_closed_stays_as_it_is() -> None:
    lines = ["%a = f32[] add(%b), x={", "%c = f32[] add(%d)", "}"]
    assert list(whole_lines(lines)) == lines


@given(st.lists(st.text('{}"% =a\\', max_size=12), max_size=12))
def test_nothing_is_lost(lines: list[str]) -> None:
    joined = list(whole_lines(lines))
    assert "".join("".join(joined).split()) == "".join("".join(lines).split())
