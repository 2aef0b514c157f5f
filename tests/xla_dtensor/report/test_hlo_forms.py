"""How XLA may print a collective: starts and dones, tuples, loops, transfers, odd dtypes."""

import pytest

from mesh_utils import Mesh
from xla_dtensor.report import Collective, HloError, collectives, num_partitions

MESH = Mesh.arange((2, 4), ("dp", "tp"))
TP = "channel_id=1, replica_groups=[2,4]<=[8], use_global_device_ids=true"


def program(*lines: str, header: str = "num_partitions=8", before: str = "") -> str:
    body = "\n".join(f"  {line}" for line in lines)
    return f"HloModule m, {header}\n{before}\nENTRY %main (p: f32[8]) -> f32[8] {{\n{body}\n}}\n"


def one(*lines: str, **options: str) -> Collective:
    (item,) = collectives(program(*lines, **options), MESH)
    return item


P = "%p = f32[8]{0} parameter(0)"
Q = "%q = bf16[4]{0} parameter(1)"


@pytest.mark.parametrize(
    ("line", "operands", "results"),
    [
        (f"f32[8]{{0}} all-reduce-start(%p), {TP}", ["f32[8]"], ["f32[8]"]),
        (
            f"(f32[8]{{0}}, bf16[4]{{0}}) all-reduce-start(%p, %q), {TP}",
            ["f32[8]", "bf16[4]"],
            ["f32[8]", "bf16[4]"],
        ),
        (
            f"((f32[8]{{0}}), f32[8]{{0}}, u32[]) all-reduce-start(%p), {TP}",
            ["f32[8]"],
            ["f32[8]"],
        ),
        (f"(f32[8]{{0}}, f32[32]{{0}}) all-gather-start(%p), {TP}", ["f32[8]"], ["f32[32]"]),
        (
            f"((f32[8], bf16[4]), (f32[32], bf16[16])) all-gather-start(%p, %q), {TP}",
            ["f32[8]", "bf16[4]"],
            ["f32[32]", "bf16[16]"],
        ),
        (
            "((f32[8]{0}), f32[2]{0}) reduce-scatter-start(%p), "
            f'async_execution_thread="parallel", {TP}, dimensions={{0}}, to_apply=%add',
            ["f32[8]"],
            ["f32[2]"],
        ),
        (
            "((f32[8]{0}), f32[8]{0}, s32[]) all-to-all-start(%p), "
            "channel_id=1, replica_groups=[2,4]<=[8], dimensions={0}",
            ["f32[8]"],
            ["f32[8]"],
        ),
        (
            "((f32[8]), f32[8]) collective-broadcast-start(%p), channel_id=1, "
            "replica_groups={{0,1,2,3},{4,5,6,7}}",
            ["f32[8]"],
            ["f32[8]"],
        ),
    ],
)
def test_a_start_has_the_shapes_of_the_whole_and_its_done_is_not_counted(line, operands, results):
    kind = line.split("(%")[0].split(" ")[-1]
    done = f"ROOT %d = f32[8]{{0}} {kind.removesuffix('start')}done(%s)"
    item = one(P, Q, f"%s = {line}", done)
    assert item.kind == kind.removesuffix("-start")
    assert [str(shape) for shape in item.operands] == operands
    assert [str(shape) for shape in item.results] == results
    assert (item.axes, item.is_async) == (("tp",), True)


def test_groups_on_a_made_up_mesh_keep_the_device_ids_printed_behind_it():
    mesh_groups = "mesh['axis_0'=4,'axis_1'=2], device_ids=([2,4]T(1,0)) {'axis_1'}"
    item = one(
        P,
        f"ROOT %a = f32[8]{{0}} all-reduce(%p), channel_id=1, replica_groups={mesh_groups}, "
        "use_global_device_ids=true, to_apply=%add",
    )
    assert item.replica_groups is not None
    assert item.replica_groups.groups == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert item.axes == ("dp",)


def test_a_permute_start_has_its_contexts_left_out():
    item = one(
        P,
        "%s = (f32[8]{0:T(128)}, f32[8]{0:T(128)S(1)}, u32[]{:S(2)}, u32[]{:S(2)}) "
        "collective-permute-start(%p), channel_id=1, source_target_pairs={{0,4},{4,0}}",
        "ROOT %d = f32[8]{0} collective-permute-done(%s)",
    )
    assert (item.operand_bytes, item.result_bytes, item.axes) == (32, 32, ("dp",))


def test_a_start_around_a_computation_is_counted_inside_it():
    wrapped = f"""
%wrapped (x: f32[8]) -> f32[2] {{
  %x = f32[8]{{0}} parameter(0)
  ROOT %rs = f32[2]{{0}} reduce-scatter(%x), {TP}, dimensions={{0}}, to_apply=%add
}}, execution_thread="parallel"
"""
    item = one(
        P,
        '%s = ((f32[8]{0}), f32[2]{0}, s32[]) async-start(%p), async_execution_thread="parallel", '
        'calls=%wrapped, metadata={op_name="jit(f)/psum_scatter" source_file="f.py" source_line=3}',
        "%u = ((f32[8]{0}), f32[2]{0}, s32[]) async-update(%s), calls=%wrapped",
        "ROOT %d = f32[2]{0} async-done(%u), calls=%wrapped",
        before=wrapped,
    )
    assert (item.kind, item.computation, item.executions) == ("reduce-scatter", "wrapped", 1)
    assert item.is_async
    assert (item.op_name, item.source_file, item.source_line) == ("jit(f)/psum_scatter", "f.py", 3)


def test_a_ragged_all_to_all_moves_its_first_operand():
    item = one(
        P,
        "%n = s64[8]{0} parameter(1)",
        "ROOT %r = f32[8]{0} ragged-all-to-all(%p, %p, %n, %n, %n, /*index=5*/%n), "
        "channel_id=1, replica_groups={{0,1,2,3},{4,5,6,7}}",
    )
    assert (item.kind, item.operand_bytes, item.result_bytes) == ("ragged-all-to-all", 32, 32)
    assert item.axes == ("tp",)


@pytest.mark.parametrize("quote", ["", '"'])
def test_sends_and_receives_between_devices(quote):
    pairs = f"_xla_send_recv_source_target_pairs={quote}{{{{0,1}},{{4,5}}}}{quote}"
    text = program(
        P,
        "%t = token[] after-all()",
        "%r = (f32[8]{0}, u32[], token[]) recv(%t), channel_id=2, "
        f'frontend_attributes={{_xla_send_recv_pipeline="0",{pairs}}}',
        "%s = (f32[8]{0}, u32[], token[]) send(%p, %t), channel_id=3, "
        f"frontend_attributes={{{pairs}}}, control-predecessors={{%r}}",
        "%rd = (f32[8]{0}, token[]) recv-done(%r), channel_id=2",
        "%sd = token[] send-done(%s), channel_id=3",
    )
    received, sent = collectives(text, MESH)
    assert (received.kind, received.operand_bytes, received.result_bytes) == ("recv", 0, 32)
    assert (sent.kind, sent.operand_bytes, sent.result_bytes) == ("send", 32, 0)
    assert received.axes == sent.axes == ("tp",)
    assert sent.source_target_pairs == ((0, 1), (4, 5))
    assert received.frontend_attributes[0] == ("_xla_send_recv_pipeline", "0")


def test_a_host_callback_is_no_collective():
    text = program(
        P,
        "%t = token[] after-all()",
        "%s = (f32[8]{0}, u32[], token[]) send(%p, %t), channel_id=1, is_host_transfer=true, "
        'frontend_attributes={_xla_host_transfer_handler_name="tf_rendezvous"}',
    )
    assert collectives(text) == ()


@pytest.mark.parametrize(
    ("shape", "size"),
    [
        ("pred[3]{0}", 3),
        ("bf16[4,256]{1,0:T(8,128)(2,1)}", 2048),
        ("f32[]", 4),
        ("f64[2]{0}", 16),
        ("s64[2,2]{1,0}", 32),
        ("u32[5]", 20),
        ("f8e4m3fn[7]{0}", 7),
        ("f8e5m2[7]{0}", 7),
        ("f8e8m0fnu[7]{0}", 7),
        ("f4e2m1fn[8]{0}", 8),
        ("s4[8]{0}", 8),  # XLA gives it a byte ...
        ("s4[9]{0:T(128)(8,1)E(4)}", 5),  # ... unless the layout packs it
        ("c64[2]{0}", 16),
        ("c128[2]{0}", 32),
        ("f32[<=5,3]{1,0}", 60),
        ("f32[0,3]{1,0}", 0),
        ("(f32[8]{0}, /*index=1*/(bf16[2]{0}, token[]))", 36),
    ],
)
def test_the_bytes_of_every_dtype(shape, size):
    item = one(f"%p = {shape} parameter(0)", f"ROOT %a = {shape} all-reduce(%p), {TP}")
    assert (item.operand_bytes, item.result_bytes, item.payload_bytes) == (size, size, size)


def test_operands_may_be_printed_with_their_shapes():
    item = one(P, f"ROOT %g = f32[32]{{0}} all-gather(f32[8]{{0:T(8,128)}} %p), {TP}")
    assert (item.operand_bytes, item.result_bytes) == (32, 128)
    alone = one(f"ROOT %g = (f32[32], s32[4]) all-gather(f32[8] %a, s32[1] %b), {TP}")
    assert [str(shape) for shape in alone.operands] == ["f32[8]", "s32[1]"]


def test_names_may_be_printed_without_percent():
    text = program(P, f"ROOT a.1-x_2 = f32[8]{{0}} all-reduce(p), {TP}").replace("%", "")
    assert [item.name for item in collectives(text, MESH)] == ["a.1-x_2"]


def test_strings_may_hold_anything():
    item = one(
        P,
        f"ROOT %a = f32[8]{{0}} all-reduce(%p), {TP}, to_apply=%add, "
        r'metadata={op_name="f(\"a, b={1}\", calls=%main) /*x*/" source_file="a b.py" '
        r'source_line=12}, backend_config={"debug":"\nreplica_groups={{0}} \"}}"}',
    )
    assert item.op_name == 'f("a, b={1}", calls=%main) /*x*/'
    assert (item.source_file, item.source_line) == ("a b.py", 12)
    assert (item.axes, item.executions) == (("tp",), 1)


def test_a_collective_spread_over_fusions_counts_once_even_if_its_start_is_not_found():
    part = f'all-gather(%x), {TP}, frontend_attributes={{chain_id="CHAIN"}}, backend_config={{'
    part += '"async_collective_fusion_config":{"flag_start":"2","flag_end":"8"}}'
    fused = "".join(
        f"%part.{name} (x: f32[8]) -> f32[32] {{\n  %x = f32[8]{{0}} parameter(0)\n"
        f"  ROOT %gather.{name} = f32[32]{{0}} {part.replace('CHAIN', chain)}\n}}\n\n"
        for name, chain in (("a", "0"), ("b", "0"), ("c", "1"))
    )
    calls = [f"%f.{name} = f32[32]{{0}} fusion(%p), calls=%part.{name}" for name in "abc"]
    found = collectives(program(P, *calls, before=fused), MESH)
    assert [item.name for item in found] == ["gather.a", "gather.c"]
    assert all(item.is_async for item in found)


def test_a_custom_calls_text_is_no_collective():
    text = program(
        P,
        'ROOT %c = f32[8]{0} custom-call(%p), custom_call_target="x", '
        'backend_config="%a = f32[8]{0} all-reduce(%p), replica_groups={}"',
    )
    assert collectives(text) == ()


# What the numbers in the groups mean.


@pytest.mark.parametrize(
    ("attributes", "axes"),
    [
        ("channel_id=1, replica_groups={}, use_global_device_ids=true", ("dp", "tp")),
        ("channel_id=1, replica_groups={{0}}", ("dp", "tp")),  # all partitions of replica 0
        ("replica_groups={{0}}", ()),  # replica 0 alone
        ("replica_groups={}", ()),
        (
            "channel_id=1, replica_groups=[8,1]<=[8], use_global_device_ids=true",
            (),
        ),
        (
            "channel_id=1, replica_groups={{0,1,2,3},{4,5},{6,7}}, use_global_device_ids=true",
            None,
        ),
        (
            "channel_id=1, replica_groups={{0,5},{1,4},{2,7},{3,6}}, use_global_device_ids=true",
            None,
        ),
        ("channel_id=1, replica_groups=[2,8]<=[16], use_global_device_ids=true", None),
    ],
)
def test_what_the_numbers_mean_in_an_all_reduce(attributes, axes):
    assert one(P, f"ROOT %a = f32[8]{{0}} all-reduce(%p), {attributes}").axes == axes


@pytest.mark.parametrize(
    ("attributes", "axes"),
    [
        ("replica_groups={{0,1}}", ("dp",)),  # the same partition of both replicas
        ("channel_id=1, replica_groups={{0},{1}}", ("tp",)),  # all partitions of a replica
        ("channel_id=1, replica_groups={{0,1}}", ("dp", "tp")),
        ("channel_id=1, replica_groups=[2,4]<=[8], use_global_device_ids=true", ("tp",)),
    ],
)
def test_replicas_and_partitions_are_both_devices(attributes, axes):
    line = f"ROOT %a = f32[8]{{0}} all-reduce(%p), {attributes}"
    assert one(P, line, header="replica_count=2, num_partitions=4").axes == axes


def test_partitions_in_each_replica():
    line = "ROOT %a = f32[8]{0} all-to-all(%p), channel_id=1, replica_groups=[2,2]<=[4]"
    item = one(P, line, header="replica_count=2, num_partitions=4")
    assert item.axes == ("tp:(2)2",)


def test_a_mesh_cut_from_a_root_names_places_of_the_root():
    line = f"ROOT %a = f32[8]{{0}} all-reduce(%p), {TP}"
    text = program(P, line)
    assert collectives(text, MESH["tp", "dp"])[0].axes == ("tp",)
    assert collectives(text, MESH["tp"])[0].axes == ("tp",)
    permuted = Mesh([3, 1, 0, 2, 7, 5, 4, 6], (2, 4), ("dp", "tp"))
    assert collectives(text, permuted)[0].axes == ("tp",)


# Loops and calls.

BODY = """
%add (x: f32[], y: f32[]) -> f32[] {{
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}}

%condition (c: (s32[], f32[8], s32[])) -> pred[] {{
  %c = (s32[], f32[8]{{0}}, s32[]) parameter(0)
  %i = s32[] get-tuple-element(%c), index=0
  %n = s32[] {limit}
  ROOT %lt = pred[] compare(%i, %n), direction={direction}
}}

%body (b: (s32[], f32[8], s32[])) -> (s32[], f32[8], s32[]) {{
  %b = (s32[], f32[8]{{0}}, s32[]) parameter(0)
  %j = s32[]{{:T(128)}} get-tuple-element(%b), index=0
  %copy = s32[] copy(%j)
  %k = s32[] get-tuple-element(%b), index=2
  %one = s32[] constant({step})
  %next = s32[] {update}
  %x.1 = f32[8]{{0}} get-tuple-element(%b), index=1
  %a = f32[8]{{0}} all-reduce(%x.1), channel_id=1, replica_groups={{}}, to_apply=%add
  ROOT %t = (s32[], f32[8]{{0}}, s32[]) tuple(%next, %a, /*index=2*/%{kept})
}}
"""
LOOP = "%w = (s32[], f32[8]{0}, s32[]) while(%start), condition=%condition, body=%body"


KNOWN = ', backend_config={{"known_trip_count":{{"n":{}}}}}'


def loop(**changes: str) -> Collective:
    defaults = {
        "limit": "constant(10)",
        "direction": "LT",
        "step": "1",
        "kept": "k",
        "update": "add(%copy, %one)",
        "start": "constant(0)",
        "while_attributes": "",
    }
    parts = defaults | changes
    return one(
        P,
        f"%zero = s32[] {parts.pop('start')}",
        "%limit = s32[] constant(7)",
        "%start = (s32[], f32[8]{0}, s32[]) tuple(%zero, %p, %limit)",
        LOOP + parts.pop("while_attributes"),
        "ROOT %r = f32[8]{0} get-tuple-element(%w), index=1",
        before=BODY.format(**parts),
    )


@pytest.mark.parametrize(
    ("changes", "executions"),
    [
        ({}, 10),
        ({"start": "constant(4)"}, 6),
        ({"start": "constant(12)"}, 0),
        ({"step": "3"}, 4),
        ({"update": "add(%one, %copy)"}, 10),
        ({"limit": "get-tuple-element(%c), index=2"}, 7),  # stays what it was at the start
        ({"limit": "get-tuple-element(%c), index=2", "kept": "one"}, None),  # does not stay
        ({"limit": "parameter(1)"}, None),
        ({"direction": "NE"}, None),
        ({"step": "0"}, None),
        ({"update": "multiply(%copy, %one)"}, None),
        ({"update": "add(%k, %one)"}, None),  # not the counter
        ({"start": "parameter(1)"}, None),
        (
            {
                "direction": "NE",
                "while_attributes": ', backend_config={"known_trip_count":{"n":"6"}}',
            },
            6,
        ),
        (
            {
                "direction": "NE",
                "while_attributes": ', backend_config={"known_trip_count":{"n":6}}',
            },
            6,
        ),
    ],
)
def test_the_trip_count_is_read_or_worked_out_or_unknown(changes, executions):
    item = loop(**changes)
    assert (item.in_loop, item.executions, item.computation) == (True, executions, "body")


def test_loops_in_loops_and_calls_multiply():
    inner = """
%inner (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  ROOT %a = f32[8]{0} all-reduce(%x), channel_id=1, replica_groups={}
}

%middle (m: f32[8]) -> f32[8] {
  %m = f32[8]{0} parameter(0)
  %m.1 = f32[8]{0} call(%m), to_apply=%inner
  ROOT %m.2 = f32[8]{0} while(%m.1), condition=%no, body=%inner, \
backend_config={"known_trip_count":{"n":"3"}}
}
"""
    item = one(
        P,
        "%w = f32[8]{0} while(%p), condition=%no, body=%middle, "
        'backend_config={"known_trip_count":{"n":"5"}}',
        "ROOT %c = f32[8]{0} fusion(%w), kind=kLoop, calls=%inner",
        before=inner,
    )
    assert (item.executions, item.in_loop) == (5 * (1 + 3) + 1, True)


def test_every_branch_of_a_conditional_is_counted():
    branches = "".join(
        f"%{name} (x: f32[8]) -> f32[8] {{\n  %x = f32[8]{{0}} parameter(0)\n"
        f"  ROOT %r.{name} = f32[8]{{0}} all-reduce(%x), {TP}\n}}\n\n"
        for name in ("yes", "no", "maybe")
    )
    text = program(
        P,
        "%i = s32[] parameter(1)",
        "%c = f32[8]{0} conditional(%i, %p, %p), branch_computations={%yes, %no}",
        "ROOT %d = f32[8]{0} conditional(%i, %p, %p), true_computation=%maybe, "
        "false_computation=%no",
        before=branches,
    )
    found = {item.computation: (item.executions, item.in_loop) for item in collectives(text)}
    assert found == {"yes": (1, False), "no": (2, False), "maybe": (1, False)}


# What is refused.


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "no HLO module"),
        ("module @jit_f attributes {mhlo.num_partitions = 8 : i32} {", "no HLO module"),
        (program(P, "ROOT %a = f32[8] all-reduce(%p), replica_groups={{0,1}"), "syntaxes"),
        (program(P, "ROOT %a = f32[8] all-reduce(%p), replica_groups={{0},{0}}"), "two groups"),
        (program(f"ROOT %a = f32[8] all-reduce(%gone), {TP}"), "does not define it"),
        (program(P, f"ROOT %a = q7[8] all-reduce(%p), {TP}"), "not known"),
        (program(P, f"ROOT %a = f32[?] all-reduce(%p), {TP}"), "no array"),
        (program(P, f"ROOT %a = (f32[8] f32[8]) all-reduce(%p), {TP}"), "no array"),
        (
            program(P, "ROOT %a = f32[8] collective-permute(%p), source_target_pairs={{0,1},{2}}"),
            "no list of pairs",
        ),
    ],
)
def test_what_cannot_be_read_says_what_why_and_what_instead(text, why):
    with pytest.raises(HloError) as caught:
        collectives(text, MESH)
    message = str(caught.value)
    assert why in message
    assert message.count(". Pass ") == 1
    assert message.endswith(".")


def test_groups_of_one_are_alone_on_every_slice():
    line = "ROOT %a = f32[8]{0} all-to-all(%p), channel_id=1, replica_groups=[8,1]<=[8]"
    assert collectives(program(P, line), Mesh.arange((2, 8)))[0].axes == ()


def test_frames_may_name_no_parent_by_zero():
    tables = """
FileNames
1 "a.py"

FileLocations
1 {file_name_id=1 function_name_id=1 line=3}
2 {file_name_id=1 function_name_id=1 line=9}

StackFrames
1 {file_location_id=1 parent_frame_id=0}
2 {file_location_id=2 parent_frame_id=1}
"""
    line = f"ROOT %a = f32[8]{{0}} all-reduce(%p), {TP}, metadata={{stack_frame_id=2}}"
    item = one(P, line, before=tables)
    assert [str(place) for place in item.source] == ["a.py:9", "a.py:3"]
    assert item.op_name is None


def test_a_mesh_of_another_size_is_refused():
    text = program(P)
    with pytest.raises(HloError, match=r"program of 8 devices\. 12 devices do not run it\. Pass"):
        collectives(text, Mesh.arange((12,)))
    with pytest.raises(HloError, match=r"Granules of 4 devices .*\. Pass 16 granules"):
        collectives(text, Mesh.arange((16,)), [0, 0, 1, 1])


def test_num_partitions_is_one_where_none_is_printed():
    assert num_partitions("HloModule m, is_scheduled=true") == 1
    assert num_partitions(program(P)) == 8
    with pytest.raises(HloError, match="no HLO module"):
        num_partitions("func.func @main()")
