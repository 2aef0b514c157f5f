"""Sharding rules: what patterns match, which rule wins, what is refused, the plan and its table."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh_utils import Mesh
from xla_dtensor.core import Layout, LayoutError, local_shape
from xla_dtensor.core.errors import RulesError
from xla_dtensor.core.rules import (
    STYLES,
    ShardingRule,
    ShardingRules,
    TensorFacts,
    read_rules,
    rules_as_data,
    table,
)

MESH = Mesh.arange((2, 4), ("fsdp", "tp"))
LAYERS = {f"layers.{i}.mlp.{n}.weight": (16, 8) for i in range(3) for n in ("up", "gate")}

names = st.text("ab", min_size=1, max_size=5)
paths = st.lists(names, max_size=5).map(".".join)
globs = st.lists(
    st.one_of(st.text("ab*", min_size=1, max_size=5).filter(lambda c: "**" not in c), st.just("**"))
    | st.just("*"),
    max_size=5,
).map(".".join)


def oracle(pattern: list[str], path: list[str]) -> bool:
    """Component by component, with fnmatch inside of one."""
    if not pattern:
        return not path
    if pattern[0] == "**":
        return any(oracle(pattern[1:], path[skip:]) for skip in range(len(path) + 1))
    return bool(path) and fnmatchcase(path[0], pattern[0]) and oracle(pattern[1:], path[1:])


def components(path: str) -> list[str]:
    return path.split(".") if path else []


@given(pattern=globs, path=paths)
def test_globs_match_component_by_component(pattern: str, path: str) -> None:
    expected = oracle(components(pattern), components(path))
    assert ShardingRule(pattern, None).matches(path) == expected


LONG = ["*a" * 20 + "b", "**.a." * 20 + "b", "**.*a*a*a*a*b.**.*a*a*b"]


@pytest.mark.parametrize("pattern", LONG)
def test_globs_do_not_search_without_end(pattern: str) -> None:
    """Each of them took longer than anybody waits; they do not match."""
    rule = ShardingRule(pattern, ())
    for path in ("a" * 80, ".".join(["a" * 40] * 40), ".".join(["a"] * 80)):
        assert not rule.matches(path)


@given(path=paths, data=st.data())
def test_a_path_with_stars_put_in_still_matches(path: str, data: st.DataObject) -> None:
    """The test above rarely draws a match; here every draw is one."""
    parts = components(path)
    starred = [data.draw(st.sampled_from([part, "*", part[:1] + "*", "**"])) for part in parts]
    assert ShardingRule(".".join(starred), None).matches(path)
    assert ShardingRule(".".join(["**", *starred, "**"]), None).matches(path)
    assert not ShardingRule(".".join([*parts, "*"]), None).matches(path)


@pytest.mark.parametrize(
    ("pattern", "path", "matched"),
    [
        ("layers.*.mlp.up.weight", "layers.3.mlp.up.weight", True),
        ("layers.*.mlp.up.weight", "layers.3.0.mlp.up.weight", False),
        ("layers.*.mlp.up.weight", "model.layers.3.mlp.up.weight", False),
        ("**.weight", "weight", True),
        ("**.weight", "a.b.weight", True),
        ("**.weight", "a.weight_g", False),
        ("*_proj.weight", "q_proj.weight", True),
        ("w", "w1", False),
        ("re:.*norm.*", "layers.0.norm1.weight", True),
        ("re:norm", "layers.norm", False),
        (r"re:layers\.[01]\.w", "layers.1.w", True),
        (r"re:layers\.[01]\.w", "layers.2.w", False),
        (r"re:w\d", "w1", True),
    ],
)
def test_patterns(pattern: str, path: str, matched: bool) -> None:
    assert ShardingRule(pattern, None).matches(path) is matched


def test_first_match_wins_and_the_rest_is_shadowed() -> None:
    rules = ShardingRules(
        [
            ("layers.1.mlp.up.weight", [None, "tp"]),
            ("layers.*.mlp.*.weight", ["tp", "fsdp"]),
            ("**", None),
        ]
    )
    plan = rules.resolve(LAYERS | {"norm": (8,)}, MESH)
    assert {path: str(layout) for path, layout in plan.items()} == {
        path: "[-]" if path == "norm" else "[-, tp]" if "1.mlp.up" in path else "[tp, fsdp]"
        for path in plan
    }
    by_path = {tensor.path: tensor for tensor in plan.tensors}
    assert by_path["layers.1.mlp.up.weight"].shadowed == ("layers.*.mlp.*.weight", "**")
    assert by_path["norm"].shadowed == ()
    assert "shadowed: layers.*.mlp.*.weight by layers.1.mlp.up.weight (1 tensor)" in str(plan)
    assert "shadowed: ** by layers.*.mlp.*.weight (5 tensors)" in str(plan)


@given(order=st.permutations(["a.*", "a.b", "**"]))
def test_order_decides(order: list[str]) -> None:
    entries = {"a.*": ["fsdp"], "a.b": ["tp"], "**": [None]}
    rules = ShardingRules([(pattern, entries[pattern]) for pattern in order])
    plan = rules.resolve({"a.b": (8,)}, MESH)
    assert plan.tensors[0].pattern == order[0]
    assert plan["a.b"] == Layout.from_aliases(tuple(entries[order[0]]), MESH)


@pytest.mark.parametrize(
    ("written", "text"),
    [
        (["tp", None], "[tp, -]"),
        (("None", "tp"), "[-, tp]"),
        ([["tp", "fsdp"], None], "[tp.fsdp, -]"),
        ([("fsdp", "tp"), []], "[fsdp.tp, -]"),
        (None, "[-, -]"),
    ],
)
def test_placements_are_read_as_aliases(written: Any, text: str) -> None:
    assert str(ShardingRules([("w", written)]).resolve({"w": (16, 16)}, MESH)["w"]) == text


# The rows of a table of embeddings are its outputs in the sense of a weight.
OUTPUTS_ARE_CUT = {
    *(style for style in STYLES if "colwise" in style and style != "embedding_colwise"),
    "embedding_rowwise",
}


def test_styles_of_parameters() -> None:
    """Transformers' plans name the experts' stacked weights, and biases, themselves."""
    shapes = {
        "mlp.experts.gate_up_proj": (4, 32, 8),
        "mlp.experts.gate_up_proj_bias": (4, 32),
        "mlp.experts.down_proj": (4, 8, 16),
        "mlp.experts.down_proj_bias": (4, 8),
        "attn.sinks": (8,),
    }
    experts = "mlp.experts"
    plan = {
        f"{experts}.gate_up_proj": "packed_colwise",
        f"{experts}.gate_up_proj_bias": "packed_colwise",
        f"{experts}.down_proj": "rowwise",
        f"{experts}.down_proj_bias": "rowwise",
        experts: "moe_tp_experts",
        "attn.sinks": "colwise",
        "attn": "local_params",
    }
    modules = ["", "mlp", experts, "attn"]
    lies = read_rules({"tp_plan": plan}).resolve(shapes, MESH, modules=modules)
    assert [str(layout) for layout in lies.values()] == [
        "[-, tp, -]",
        "[-, tp]",
        "[-, -, tp]",
        "[-, -]",
        "[tp]",
    ]
    by_expert = read_rules({"tp_plan": dict.fromkeys(list(shapes)[:2], "grouped_gemm")})
    lies = by_expert.resolve(shapes, MESH, unmatched="replicate")
    assert [str(layout) for layout in lies.values()][:2] == ["[tp, -, -]", "[tp, -]"]
    with pytest.raises(RulesError, match=r"'grouped_gemm' is for weights of rank 3 and more, but"):
        read_rules({"q": "grouped_gemm"}).resolve({"q.weight": (8, 8)}, MESH)


@pytest.mark.parametrize("style", [style for style in STYLES if style != "grouped_gemm"])
def test_styles_place_weight_and_bias(style: str) -> None:
    shapes = {"m.0.q.weight": (8, 8), "m.0.q.bias": (8,), "m.0.qq.weight": (8, 8)}
    rules = ShardingRules([("m.*.q", style), ("m.0.qq.weight", None), ("**", None)], tp_axis="tp")
    plan = rules.resolve(shapes, MESH)
    column = style in OUTPUTS_ARE_CUT
    row = not column and ("rowwise" in style or style == "embedding_colwise")
    assert str(plan["m.0.q.weight"]) == ("[tp, -]" if column else "[-, tp]" if row else "[-, -]")
    assert str(plan["m.0.q.bias"]) == ("[tp]" if column else "[-]")
    assert plan.tensors[2].pattern == "m.0.qq.weight"


def test_a_style_about_movement_needs_no_weight() -> None:
    rules = ShardingRules([("mlp", "gather"), ("**", None)])
    assert str(rules.resolve({"mlp.up.weight": (8, 8)}, MESH, modules=["", "mlp"])) == (
        "tensor         shape   placements  bytes/device  bytes  padding  rule\n"
        "mlp.up.weight  (8, 8)  [-, -]               256    256        0  **\n"
        "total x1                                    256    256        0"
    )
    with pytest.raises(RulesError, match="'mpl' matches nothing"):
        ShardingRules([("mpl", "gather"), ("**", None)]).resolve(
            {"mlp.up.weight": (8, 8)}, MESH, modules=["", "mlp"]
        )


def test_outputs() -> None:
    rules = ShardingRules(
        [
            ("*.weight", ["tp", None]),
            ("*[0]", ["fsdp", None, None]),
            ("head", ["fsdp", None, "tp"]),  # matches no tensor, and a module
            ("()", ["fsdp"]),
        ],
        activations=[("re:(head|up)", [None, "tp"])],
    )
    plan = rules.resolve({"up.weight": (8, 8)}, MESH, modules=["", "up", "head"])
    found = {(o.path, o.index): (str(o.layout), o.pattern, o.shadowed) for o in plan.outputs}
    assert found == {
        ("up", 0): ("[fsdp, -, -]", "*[0]", ()),
        ("head", 0): ("[fsdp, -, -]", "*[0]", ()),
        ("head", None): ("[fsdp, -, tp]", "head", ("re:(head|up)",)),
        ("", None): ("[fsdp]", "()", ()),
        ("up", None): ("[-, tp]", "re:(head|up)", ()),
    }
    assert "head()[0]  [fsdp, -, -]   *[0]" in str(plan)
    assert "shadowed: re:(head|up) by head (1 output)" in str(plan)


def test_one_error_lists_everything() -> None:
    rules = ShardingRules(
        [
            ("layers.*.mlp.up.weight", ["tp"]),
            ("layers.*.mlp.gate.weight", ["expert", None]),
            ("layer.*.norm", [None]),
            ("head", "colwise"),
            ("emb", "rowwise"),
        ],
        activations=[("layers.*", ["data", None]), ("blocks.*", [None])],
        tp_axis="tensor",
    )
    shapes = LAYERS | {f"layers.{i}.norm": (8,) for i in range(3)} | {"head.weight": (8, 8)}
    with pytest.raises(RulesError) as raised:
        rules.resolve(shapes, MESH, modules=["", "layers.0"])
    assert str(raised.value) == (
        "7 sharding rules were resolved for 10 tensors on a mesh with fsdp=2, tp=4. They do not "
        "fit in 9 points:\n"
        "- 'layers.*.mlp.gate.weight' names axis 'expert', which the mesh does not have\n"
        "- 'head' cuts along tp_axis='tensor', which the mesh does not have\n"
        "- 'emb' cuts along tp_axis='tensor', which the mesh does not have\n"
        "- 'layers.*' names axis 'data', which the mesh does not have\n"
        "- 'layer.*.norm' matches nothing\n"
        "- 'emb', a rule of style 'rowwise', matches no module's weight or bias\n"
        "- 'layers.*.mlp.up.weight' has 1 entry, but layers.*.mlp.up.weight (x3) has shape "
        "(16, 8)\n- no rule matches layers.*.norm (x3) of shape (8,)\n"
        "- 'blocks.*' matches no module\n"
        "Correct these rules, or pass unmatched='replicate' for parameters that need none."
    )
    assert isinstance(raised.value, LayoutError)


def test_a_long_list_is_cut_short() -> None:
    shapes = {f"w{chr(97 + i)}": (8,) for i in range(14)}
    with pytest.raises(
        RulesError, match=r"in 14 points:(?s:.*)- no rule matches wj(?s:.*)and 4 more"
    ) as e:
        ShardingRules([]).resolve(shapes, MESH)
    assert str(e.value).count("\n- ") == 11


def test_unmatched() -> None:
    facts = {"w": TensorFacts((8, 8)), "b": TensorFacts((3,), is_buffer=True)}
    rules = ShardingRules([])
    with pytest.raises(RulesError, match=r"in 1 point:\n- no rule matches w of shape \(8, 8\)\n"):
        rules.resolve(facts, MESH)
    plan = rules.resolve(facts, MESH, unmatched="replicate")
    assert {path: str(layout) for path, layout in plan.items()} == {"w": "[-, -]", "b": "[-]"}
    assert "(no rule)" in table(plan)
    with pytest.raises(RulesError, match=r"unmatched='ignore'.*Pass 'error' or 'replicate'"):
        rules.resolve(facts, MESH, unmatched="ignore")  # pyright: ignore[reportArgumentType]


def test_tied_weights_need_one_rule_and_agree() -> None:
    facts = {
        "emb.weight": TensorFacts((16, 8)),
        "head.weight": TensorFacts((16, 8), same_as="emb.weight"),
    }
    for pattern in facts:
        plan = ShardingRules([(pattern, ["tp", None])]).resolve(facts, MESH)
        assert [str(layout) for layout in plan.values()] == ["[tp, -]"] * 2
    assert "(tied to emb.weight)" in str(plan)
    assert str(plan).splitlines()[3].split() == ["total", "x2", "128", "512", "0"]
    with pytest.raises(
        RulesError,
        match=r"head.weight is tied to emb.weight, but 'head' "
        r"says \[tp, -\] and 'emb' says \[-, tp\]",
    ):
        ShardingRules([("emb", "rowwise"), ("head", "colwise")]).resolve(facts, MESH)


@given(
    shape=st.tuples(st.integers(0, 20), st.integers(1, 20)),
    entries=st.sampled_from([(None, None), ("tp", None), ("tp", "fsdp"), (("fsdp", "tp"), None)]),
    itemsize=st.sampled_from([1, 2, 4, 8]),
)
def test_bytes_are_those_of_the_shards(
    shape: tuple[int, int], entries: tuple[Any, ...], itemsize: int
) -> None:
    facts = TensorFacts(shape, itemsize)
    tensor = ShardingRules([("w", entries)]).resolve({"w": facts}, MESH).tensors[0]
    shards = [local_shape(tensor.layout, shape, (i, j)) for i in range(2) for j in range(4)]
    assert {shard.padded_size_bytes(itemsize) for shard in shards} == {tensor.device_bytes}
    assert tensor.total_bytes == shape[0] * shape[1] * itemsize
    cuts = [local_shape(tensor.layout, (8, 8), (i, j)).offset for i in range(2) for j in range(4)]
    assert tensor.padding_bytes == len(set(cuts)) * tensor.device_bytes - tensor.total_bytes


def test_uneven_dims_are_allowed_and_shown() -> None:
    plan = ShardingRules([("w", ["tp"])]).resolve({"w": (10,)}, MESH)
    assert str(plan) == (
        "tensor    shape  placements  bytes/device  bytes  padding  rule\n"
        "w         (10,)  [tp]                  12     40        8  w\n"
        "total x1                               12     40        8"
    )


def test_the_table_folds_equal_layers_only() -> None:
    shapes = {f"layers.{i}.w": (8, 4 * (1 + i // 3)) for i in range(4)} | {"v2.w": (8, 4)}
    lines = str(ShardingRules([("**", ["tp", None])]).resolve(shapes, MESH)).splitlines()
    assert [line.split()[:4] for line in lines[1:4]] == [
        ["layers.*.w", "x3", "(8,", "4)"],
        ["layers.3.w", "(8,", "8)", "[tp,"],
        ["v2.w", "(8,", "4)", "[tp,"],
    ]


BAD_RULES = [
    ("a..b", [None], "pattern='a..b' .*between single dots.*Pass such a path"),
    ("a.b**", [None], r"pattern='a.b\*\*'.*'\*\*' alone"),
    ("a.[0-3].b", [None], "A glob has components.*or 're:' and a regular expression"),
    ("re:(", [None], r"no regular expression: missing \).*Pass one that Python's re compiles"),
    ("a", "tp", r"'tp' is no style, and placements are a list. Pass \[tp\], or one of colwise,"),
    ("a", "colwize", "'colwize' is no style"),
    ("a", 3, "A int is not read. Pass a list with one entry per tensor dim"),
    ("a", [0], "The entry 0 is no name of an axis. Pass names"),
    ("a", [["tp", ["dp"]]], "is no name of an axis"),
    ("a", ["tp", "tp"], "The axis 'tp' occurs twice, and cuts one dim once. Pass each"),
    ("a[0]", "colwise", "It is a rule for outputs, whose rank no model tells. Pass one entry per"),
    ("a()", None, "It is a rule for outputs"),
    (3, [None], "A int is no pattern. Pass a path"),
]


@pytest.mark.parametrize(("pattern", "placements", "text"), BAD_RULES, ids=str)
def test_rules_that_cannot_be_read(pattern: Any, placements: Any, text: str) -> None:
    with pytest.raises(RulesError, match=text):
        ShardingRule(pattern, placements)


def test_activations_cannot_be_styles() -> None:
    with pytest.raises(RulesError, match=r"pattern='a', placements='colwise'.*rule for outputs"):
        ShardingRules([], activations=[("a", "colwise")])


FORMS: list[Any] = [
    {"a.weight": ["tp", None], "b": "colwise"},
    [["a.weight", ["tp", None]], ("b", "colwise")],
    [{"a.weight": ["tp", None]}, ShardingRule("b", "colwise")],
    {"parameters": {"a.weight": ["tp", None]}, "tp_plan": {"b": "colwise"}, "activations": None},
    {"remat": ["Layer"], "sharding": {"a.weight": ["tp", None], "b": "colwise"}},
]


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_forms_of_data(form: Any) -> None:
    expected = ShardingRules([("a.weight", ("tp", None)), ("b", "colwise")])
    assert read_rules(form) == expected
    assert read_rules(rules_as_data(read_rules(form))) == expected


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (3, "the rules are of type=int. They are patterns with placements. Pass a mapping"),
        ({"parameters": "w"}, "parameters are of type=str"),
        ({"activations": {}, "layers.*": [None]}, r"'layers.\*' is none of them: parameters"),
        ({"tp_axis": 1}, "tp_axis=1. It is the name of the axis.*Pass a string"),
        ({"tp_plan": {"a": ["tp"]}}, r"tp_plan was read with 'a': \('tp',\).*under 'parameters'"),
        ([["a"]], r"the entry \['a'\]. Each entry of a list is one rule. Pass \[pattern"),
        ({0: [None]}, "the pattern 0 of type=int. A pattern is text. Write it in quotes"),
    ],
)
def test_data_of_another_form(data: Any, text: str) -> None:
    with pytest.raises(RulesError, match=text):
        read_rules(data)


def test_plan_is_a_mapping() -> None:
    plan = ShardingRules([("**", None)]).resolve(LAYERS, MESH)
    assert dict(plan) == {path: Layout.replicated(MESH, 2) for path in LAYERS}
    assert len(plan) == 6
    with pytest.raises(KeyError, match=re.escape("layers.9")):
        plan["layers.9"]
