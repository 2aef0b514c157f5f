"""Names: what a tensor of a module is called in the files."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from xla_dtensor.errors import ArgumentTypeError, WeightsError
from xla_dtensor.hosts.hugging_face.names import NameRules, Piece, stored_by_transformers


def keys(rules: NameRules, path: str, shape: tuple[int, ...] = (4, 2), there: Any = None) -> Any:
    return [piece.key for piece in rules.pieces(path, shape, there)]


def test_names_stay_where_no_pattern_fits() -> None:
    assert keys(NameRules(), "a.b") == ["a.b"]
    assert keys(NameRules({"a.*.c": "x.*"}), "a.b") == ["a.b"]


@pytest.mark.parametrize(
    ("pattern", "key", "path", "expected"),
    [
        ("layers.*.wq", "model.layers.*.q", "layers.11.wq", "model.layers.11.q"),
        ("*.*.w", "x.*.y.*", "a.b.w", "x.a.y.b"),
        ("**", "model.**", "a.b.c", "model.a.b.c"),
        ("**.gate", "**.router", "gate", "router"),
        ("**.gate", "**.router", "a.b.gate", "a.b.router"),
        ("l*.w", "layer_*.w", "l7.w", "layer_7.w"),
        ("a.b", "c", "a.b", "c"),
        ("a+.b", "c", "aa.b", "aa.b"),  # not a regular expression
    ],
)
def test_wildcards_are_carried_over(pattern: str, key: str, path: str, expected: str) -> None:
    assert keys(NameRules({pattern: key}), path) == [expected]


def test_the_first_pattern_counts_and_none_is_in_no_file() -> None:
    rules = NameRules({"a.*": None, "**": "x.**"})
    assert keys(rules, "a.b") == []
    assert keys(rules, "b.b") == ["x.b.b"]
    assert keys(NameRules(lambda name: name.upper()), "a.b") == ["A.B"]
    assert keys(NameRules(lambda name: None), "a.b") == []


def test_joined_and_stacked_tensors_are_cut() -> None:
    rules = NameRules({"qkv": [("q", 4), ("k", 1), ("v", 1)], "**.up": ["**.#.a", "**.#.b"]})
    q, k, v = rules.pieces("qkv", (6, 3))
    assert (q.shape, k.shape, v.shape) == ((4, 3), (1, 3), (1, 3))
    assert k.at == (slice(4, 5), slice(0, 3))
    pieces = rules.pieces("e.up", (2, 6, 5))
    assert [piece.key for piece in pieces] == ["e.0.a", "e.0.b", "e.1.a", "e.1.b"]
    assert pieces[3] == Piece("e.1.b", (slice(1, 2), slice(3, 6), slice(0, 5)), stacked=True)
    assert pieces[3].shape == (3, 5)


def test_experts_are_found_as_the_files_have_them() -> None:
    path, shape = "model.layers.3.mlp.experts.gate_up_proj", (2, 6, 4)
    prefix = "model.layers.3.block_sparse_moe.experts"
    one_by_one = [f"{prefix}.{i}.w{n}.weight" for i in (0, 1) for n in (1, 3)]
    assert keys(NameRules(), path, shape, {path}) == [path]
    assert keys(NameRules(), path, shape, set(one_by_one)) == one_by_one
    assert keys(NameRules(), path, shape, {one_by_one[2]}) == one_by_one
    assert keys(NameRules(), path, shape, {"other"}) == [path]
    # Written as models of that type are.
    assert keys(NameRules(None, "mixtral"), path, shape) == one_by_one
    assert keys(NameRules(None, "llama"), path, shape) == [path]
    # Behind a name of one's own, too.
    mine = NameRules({"blocks.*.gate_up": "model.layers.*.mlp.experts.gate_up_proj"}, "mixtral")
    assert keys(mine, "blocks.3.gate_up", shape) == one_by_one


def test_transformers_says_how_it_stores_its_models() -> None:
    hf: Any = pytest.importorskip("transformers")
    sizes = {"vocab_size": 8, "hidden_size": 4, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = hf.Qwen3MoeConfig(**sizes, num_experts=3, moe_intermediate_size=6, head_dim=2)
    with torch.device("meta"):
        model = hf.AutoModelForCausalLM.from_config(config)
    stored = stored_by_transformers(torch.nn.ModuleDict({"inner": model}))
    layer = "inner.model.layers.1.mlp"
    pieces = stored[f"{layer}.experts.gate_up_proj"]
    assert [piece.key for piece in pieces] == [
        f"{layer}.experts.{i}.{name}_proj.weight" for name in ("gate", "up") for i in range(3)
    ]
    assert pieces[4] == Piece(
        f"{layer}.experts.1.up_proj.weight", (slice(1, 2), slice(6, 12), slice(0, 4)), stacked=True
    )
    assert stored[f"{layer}.gate.weight"] == (
        Piece(f"{layer}.gate.weight", (slice(0, 3), slice(0, 4))),
    )
    assert set(stored) == {f"inner.{name}" for name in model.state_dict()}
    rules = NameRules(stored=stored)
    path, shape = f"{layer}.experts.gate_up_proj", (3, 12, 4)
    assert rules.pieces(path, shape) == pieces
    assert rules.pieces(path, shape, {pieces[2].key}) == pieces
    assert keys(rules, path, shape, {path}) == [path]
    assert stored_by_transformers(torch.nn.Linear(2, 2)) == {}


@pytest.mark.parametrize(
    ("names", "shape", "error", "text"),
    [
        (["a"], (4, 2), ArgumentTypeError, r"names=\['a'\] was passed, of type=list"),
        ({"a.*": "b"}, (4, 2), WeightsError, r"the pattern 'a\.\*' for 'b'.* on both sides"),
        ({"**": "b.*"}, (4, 2), WeightsError, r"carried over in order"),
        ({"w": 3}, (4, 2), ArgumentTypeError, r"names gives 3 for 'w'"),
        ({"w": [("a", 1, 2)]}, (4, 2), ArgumentTypeError, r"list of str or of \(str, length\)"),
        (lambda name: 1.5, (4, 2), ArgumentTypeError, r"names gives 1\.5 for 'w'"),
        ({"w": ["a", "b", "c"]}, (4, 2), WeightsError, r"4 elements are not 3 equal parts"),
        ({"w": [("a", 1), ("b", 2)]}, (4, 2), WeightsError, r"The lengths are not 4 together"),
        ({"w": ["a.#", "b"]}, (4, 2), WeightsError, r"only some have a #"),
        ({"w": ["a", "b"]}, (), WeightsError, r"no such dim"),
    ],
)
def test_rules_that_do_not_fit_are_refused(
    names: Any, shape: tuple[int, ...], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        NameRules(names).pieces("w", shape)
