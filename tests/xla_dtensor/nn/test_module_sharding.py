"""shard_module: a Llama-like model by rules, its YAML forms, hooks on outputs, and refusals."""

from __future__ import annotations

import copy
import pickle
import re
import subprocess
import sys
from collections import namedtuple
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Replicate, Shard

import xla_dtensor as xd
from mesh_utils import Mesh
from xla_dtensor.core import Layout
from xla_dtensor.core.errors import RulesError
from xla_dtensor.core.rules import ShardingRules, rules_as_data
from xla_dtensor.errors import ArgumentTypeError, DistributeError
from xla_dtensor.nn.shard_module import load_rules, shard_module, sharding_plan
from xla_dtensor.runtimes import Runtime

VOCAB, WIDTH, HEADS, HIDDEN = 32, 16, 4, 32

TORCHPRIME = """
# Weights
model.embed_tokens.weight: [tp, dp]
model.layers.*.self_attn.q_proj.weight: [tp, dp]
model.layers.*.self_attn.k_proj.weight: [tp, dp]
model.layers.*.self_attn.v_proj.weight: [tp, dp]
model.layers.*.self_attn.o_proj.weight: ['dp', 'tp']
model.layers.*.mlp.up_proj.weight: [[dp, tp], null]
model.layers.*.mlp.down_proj.weight: [dp, tp]
model.layers.*.input_layernorm.weight: [dp]
model.norm.weight: [null]

# Activations
model.layers.*.self_attn.q_proj: [dp, null, tp]
model.layers.*[0]: [dp, null, null]  # the first output of the layer
"""
HF_PLAN = """
tp_plan:
  model.layers.*.self_attn.q_proj: colwise
  model.layers.*.self_attn.k_proj: colwise
  model.layers.*.self_attn.v_proj: colwise
  model.layers.*.self_attn.o_proj: rowwise
  model.layers.*.mlp.up_proj: colwise
  model.layers.*.mlp.down_proj: rowwise_rep
  model.layers.*.mlp: gather
  lm_head: colwise_rep
"""
COLUMN, ROW = "[tp, -]", "[-, tp]"
BY_TORCHPRIME = {
    "embed_tokens.weight": "[tp, dp]",
    "lm_head.weight": "[tp, dp]",
    "q_proj.weight": "[tp, dp]",
    "q_proj.bias": "[-]",
    "o_proj.weight": "[dp, tp]",
    "up_proj.weight": "[dp.tp, -]",
    "input_layernorm.weight": "[dp]",
    "model.norm.weight": "[-]",
    "positions": "[-, -]",
}
BY_HF_PLAN = {
    "embed_tokens.weight": COLUMN,
    "lm_head.weight": COLUMN,
    "q_proj.weight": COLUMN,
    "q_proj.bias": "[tp]",
    "o_proj.weight": ROW,
    "up_proj.weight": COLUMN,
    "down_proj.weight": ROW,
    "input_layernorm.weight": "[-]",
}


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(WIDTH, WIDTH)
        self.k_proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.v_proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.o_proj = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            p(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up_proj = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down_proj = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.up_proj(x)))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(), Mlp()
        self.input_layernorm = nn.RMSNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, str]:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(x), "cache"


class Decoder(nn.Module):
    positions: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.norm = nn.RMSNorm(WIDTH)
        self.register_buffer("positions", torch.linspace(-1, 1, 8 * WIDTH).view(8, WIDTH))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed_tokens(tokens) + self.positions
        for layer in self.layers:
            x, _ = layer(x)
        return self.norm(x)


class Llama(nn.Module):
    """Embedding and head are one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Decoder()
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.model(tokens))


def loss_of(model: nn.Module, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())


@pytest.fixture
def rules_path(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    path = tmp_path / "rules.yaml"
    path.write_text(request.param, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("rules_path", "expected"),
    [(TORCHPRIME, BY_TORCHPRIME), (HF_PLAN, BY_HF_PLAN)],
    ids=["torchprime", "hf"],
    indirect=["rules_path"],
)
def test_llama(
    runtime: Runtime, mesh: xd.DeviceMesh, rules_path: Path, expected: dict[str, str]
) -> None:
    torch.manual_seed(0)
    model = Llama()
    reference = copy.deepcopy(model)
    plan = sharding_plan(model, mesh, rules_path, unmatched="replicate")
    assert shard_module(model, mesh, rules_path, unmatched="replicate") is model
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    for end, text in expected.items():
        found = {str(plan[path]) for path in plan if path.endswith(end)}
        assert found == {text}, end
    for path, tensor in tensors.items():
        assert isinstance(tensor, xd.DTensor)
        assert tensor.mesh_layout == plan[path]
        assert tensor.xla_sharding() == plan[path].op_sharding(runtime.root(mesh.value))
        assert torch.equal(tensor.cpu(), reference.state_dict()[path])
    assert model.lm_head.weight is model.model.embed_tokens.weight

    tokens, labels = torch.randint(VOCAB, (4, 8)), torch.randint(VOCAB, (4, 8))
    sharded = [Shard(0), Replicate()]
    loss = loss_of(model, *(xd.distribute_tensor(t, mesh, sharded) for t in (tokens, labels)))
    expected_loss = loss_of(reference, tokens, labels)
    torch.testing.assert_close(cast("Any", loss.detach()).cpu(), expected_loss.detach())
    loss.backward()
    expected_loss.backward()
    for (path, mine), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert mine.grad is not None, path
        torch.testing.assert_close(mine.grad.cpu(), theirs.grad, rtol=1e-4, atol=1e-5)


def test_outputs_lie_as_rules_say(runtime: Runtime, mesh: xd.DeviceMesh, tmp_path: Path) -> None:
    path = tmp_path / "rules.yaml"
    path.write_text(TORCHPRIME, encoding="utf-8")
    model = shard_module(Llama(), mesh, path, unmatched="replicate")
    seen: dict[str, Any] = {}
    decoder = cast("Any", model).model
    for name, part in (("q", decoder.layers[1].self_attn.q_proj), ("layer", decoder.layers[0])):
        part.register_forward_hook(lambda m, i, out, name=name: seen.update({name: out}))
    tokens = torch.randint(VOCAB, (4, 8))
    out = model(xd.distribute_tensor(tokens, mesh, [Replicate(), Replicate()]))
    root = runtime.root(mesh.value)

    def lies(text: str) -> Any:
        return Layout.parse(text, mesh.value).op_sharding(root)

    assert seen["q"].xla_sharding() == lies("[dp, -, tp]")
    assert str(seen["q"].mesh_layout) == "[dp, -, tp]"
    hidden, cache = seen["layer"]
    assert hidden.xla_sharding() == lies("[dp, -, -]")
    assert cache == "cache"
    assert out.shape == (4, 8, VOCAB)


def test_hooks_place_gradients_too(runtime: Runtime, mesh: xd.DeviceMesh) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    rules = {"**": None, "0()": ["tp", "dp"]}
    shard_module(model, mesh, rules)
    grads: list[Any] = []
    x = xd.distribute_tensor(torch.randn(8, 8), mesh)
    with torch.no_grad():
        placed = model[0](x)
    y = model[0](x)
    y.grad_fn.register_hook(lambda into, out: grads.extend(into))
    model[1](y).square().sum().backward()
    assert str(placed.mesh_layout) == str(y.mesh_layout) == "[tp, dp]"
    asked = Layout.parse("[tp, dp]", mesh.value).op_sharding(runtime.root(mesh.value))
    assert placed.xla_sharding() == asked
    assert grads[0].xla_sharding() == asked


@pytest.mark.parametrize("gathered", [False, True])
def test_rules_decide_the_compiled_program(mesh: xd.DeviceMesh, gathered: bool) -> None:
    """A device computes its part of the first matmul, and all of it only if a rule says so."""
    torch.manual_seed(0)
    x = torch.randn(16, 32)
    model = nn.Sequential(nn.Linear(32, 64, bias=False), nn.Linear(64, 32, bias=False))
    reference = copy.deepcopy(model)
    output = [None, None] if gathered else ["dp", "tp"]
    shard_module(model, mesh, {"0": "colwise", "1": "rowwise", "0()": output})
    step = xd.compile(lambda x: model(x).square().sum())
    with torch.no_grad():
        found = step(xd.distribute_tensor(x, mesh, [Shard(0), Replicate()]))
        torch.testing.assert_close(found.cpu(), reference(x).square().sum())
    text = step.hlo()
    # It is computed whole, or in parts that are then gathered: XLA's choice.
    made = re.findall(r"= f32\[([\d,]+)\]\S* (?:dot|custom-call|all-gather|\w*fusion)\(", text)
    assert ("16,64" in made) == gathered, text
    assert ("8,16" in made) or gathered, text
    assert ("all-gather" in text) == gathered


class Returns(nn.Module):
    """Returns what it is told to make of its weight times the input."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.make = make

    def forward(self, x: torch.Tensor) -> Any:
        return self.make(self.inner(x))


Pair = namedtuple("Pair", "first second")


@pytest.mark.parametrize(
    "make",
    [lambda y: (y, 1), lambda y: [y, 1], lambda y: Pair(y, 1)],
    ids=["tuple", "list", "named"],
)
def test_an_output_among_several(mesh: xd.DeviceMesh, make: Any) -> None:
    model = shard_module(Returns(make), mesh, {"**": None, "()[0]": ["dp", None]})
    out = model(torch.ones(8, 8))
    assert type(out) is type(make(0))
    assert str(out[0].mesh_layout) == "[dp, -]"
    assert out[1] == 1


@pytest.mark.parametrize(
    ("make", "pattern", "text"),
    [
        (
            lambda y: (y, 1),
            "()",
            r"rule '\(\)' says \[dp, -\] of what.*'' returns.*type=tuple. A tuple",
        ),
        (
            lambda y: (y, 1),
            "()[1]",
            r"index=1 of what.*A int cannot be placed. Write the pattern with",
        ),
        (lambda y: (y, 1), "()[2]", "There is no such output. Write the pattern without an index"),
        (lambda y: y, "()[0]", r"type=DTensor\. There is no such output"),
        (lambda y: y.sum(0), "()", r"shape=\(8,\) has 1 dims. Write one entry per dim"),
    ],
)
def test_outputs_that_rules_do_not_fit(
    mesh: xd.DeviceMesh, make: Any, pattern: str, text: str
) -> None:
    model = shard_module(Returns(make), mesh, {"**": None, pattern: ["dp", None]})
    with pytest.raises(RulesError, match=text):
        model(torch.ones(8, 8))


def test_frozen_uneven_and_half_precision(mesh: xd.DeviceMesh) -> None:
    model = nn.Linear(8, 10).bfloat16()
    model.weight.requires_grad_(False)
    weight = model.weight.clone()
    plan = sharding_plan(model, mesh, {"": "colwise"})
    assert [t.padding_bytes for t in plan.tensors] == [2 * 8 * 2, 2 * 2]
    shard_module(model, mesh, {"": "colwise"})
    assert not model.weight.requires_grad
    assert model.bias.requires_grad
    assert model.weight.dtype == torch.bfloat16
    assert str(cast("Any", model.weight).mesh_layout) == COLUMN
    assert torch.equal(model.weight.cpu(), weight)


def test_a_model_that_does_not_fit_is_left_alone(mesh: xd.DeviceMesh) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    with pytest.raises(RulesError, match=r"no rule matches \*\.bias \(x2\) of shape \(8,\)"):
        shard_module(model, mesh, {"*.weight": ["tp", None]})
    assert not any(isinstance(p, xd.DTensor) for p in model.parameters())
    shard_module(model, mesh, {"*": "colwise"})


def test_second_call_and_other_placements_are_refused(mesh: xd.DeviceMesh) -> None:
    model = shard_module(nn.Linear(8, 8), mesh, {"": "colwise"})
    with pytest.raises(DistributeError, match="called on a Linear that it was called on before"):
        shard_module(model, mesh, {"": "colwise"})
    other = xd.distribute_module(nn.Linear(8, 8), mesh)
    with pytest.raises(DistributeError, match=r"'weight' is DTensor.*the rules say \[tp, -\]"):
        shard_module(other, mesh, {"": "colwise"})
    weight = other.weight
    assert shard_module(other, mesh, {"**": None}).weight is weight


def test_not_a_module(mesh: xd.DeviceMesh) -> None:
    with pytest.raises(ArgumentTypeError, match=r"type=list\. Only a torch\.nn\.Module"):
        shard_module(cast("Any", [1]), mesh, {})


def test_meta_model_stays_abstract(mesh: xd.DeviceMesh) -> None:
    with torch.device("meta"):
        model = Llama()
    shard_module(
        model, mesh, {"**.q_proj.weight": ["tp", None], "**": None, "lm_head()": ["dp"] * 1}
    )
    weight = cast("Any", model.model.layers[0]).self_attn.q_proj.weight
    assert weight.is_meta
    assert str(weight.mesh_layout) == COLUMN
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_hooks_survive_pickling(mesh: xd.DeviceMesh) -> None:
    model = shard_module(nn.Linear(8, 8), mesh, {"**": None, "()": ["dp", None]})
    twin = pickle.loads(pickle.dumps(model))
    x = torch.randn(8, 8)
    assert str(twin(x).mesh_layout) == "[dp, -]"
    assert torch.equal(twin(x).detach().cpu(), model(x).detach().cpu())


def test_planning_starts_no_runtime() -> None:
    code = (
        "import torch\n"
        "from mesh_utils import Mesh\n"
        "from xla_dtensor.nn.shard_module import sharding_plan\n"
        "from xla_dtensor.runtimes import current_runtime\n"
        "with torch.device('meta'):\n"
        "    model = torch.nn.Linear(1 << 20, 1 << 20, bias=False)\n"
        "print(sharding_plan(model, Mesh.arange((1024,), ('tp',)), {'weight': ['tp', None]}))\n"
        "print(current_runtime())\n"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "4,294,967,296  4,398,046,511,104" in out.stdout
    assert out.stdout.endswith("None\n")


MESH = Mesh.arange((2, 4), ("dp", "tp"))


def test_table_of_llama(tmp_path: Path) -> None:
    path = tmp_path / "rules.yaml"
    path.write_text(TORCHPRIME, encoding="utf-8")
    with torch.device("meta"):
        plan = sharding_plan(Llama(), MESH, str(path), unmatched="replicate")
    lines = str(plan).splitlines()
    assert lines[1].split()[:7] == [
        "model.embed_tokens.weight", "(32,", "16)", "[tp,", "dp]", "256", "2,048"
    ]  # fmt: skip
    assert any(
        re.match(r"model\.layers\.\*\.mlp\.up_proj\.weight x2 +\(32, 16\) ", s) for s in lines
    )
    assert any(line.startswith("lm_head.weight") and "tied to" in line for line in lines)
    assert any(line.startswith("model.layers.*()[0] x2 ") for line in lines)


def test_yaml_round_trip(tmp_path: Path) -> None:
    import yaml

    for number, text in enumerate((TORCHPRIME, HF_PLAN)):
        source, target = tmp_path / f"{number}.yaml", tmp_path / f"{number}_again.yaml"
        source.write_text(text, encoding="utf-8")
        rules = load_rules(source)
        assert isinstance(rules, ShardingRules)
        assert len(rules.rules) == text.count(":") - text.count("tp_plan:")
        target.write_text(yaml.safe_dump(rules_as_data(rules)), encoding="utf-8")
        assert load_rules(str(target)) == rules


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [tp]\na: [dp]\n", "the key 'a' is there twice"),
        ("a: [tp\n", r"rules\.yaml'. That failed: .*while parsing.*Pass the path of a YAML file"),
        ("", "the rules are of type=NoneType"),
        ("[" * 5000, "That failed: maximum recursion depth"),
        ("\xff", "That failed: 'utf-8' codec can't decode"),
    ],
)
def test_bad_yaml(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "rules.yaml"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(RulesError, match=f"(?s){message}"):
        load_rules(path)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(RulesError, match=r"none\.yaml'\. That failed: .*No such file"):
        load_rules(tmp_path / "none.yaml")
