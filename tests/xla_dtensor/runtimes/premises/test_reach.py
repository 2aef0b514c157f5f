"""What a step reaches is found in bounded time, however much lies behind it."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from tests.xla_dtensor.runtimes.premises.test_premises import premises_of, run_source, why
from xla_dtensor.runtimes.premises.reach import Reach


class Node:
    def __init__(self, number: int) -> None:
        self.number = number
        self.next: list[Node] = []


def test_much_is_looked_into_in_few_lookups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Objects times names times functions would take for ever."""
    nodes = [Node(number) for number in range(3000)]
    for one, other in itertools.pairwise(nodes):
        one.next.append(other)
    parts = [f"def f{i}(q): return q.at{i}.bt{i}.number.next.zz{i}" for i in range(300)]
    calls = "\n".join(f"    f{i}(q)" for i in range(300))
    source = "\n".join(
        [*parts, f"def every(q):\n{calls}", "def step(): return [*map(each, nodes)]"]
    )
    names: dict[str, Any] = {"nodes": nodes}
    run_source(f"{source}\ndef each(q): return every(q)", names)
    run_source("def step2():\n    for n in nodes: every(n)", names)
    lookups, attribute = [0], Reach.attribute

    def counted(reach: Reach, owner: Any, name: str) -> Any:
        lookups[0] += 1
        return attribute(reach, owner, name)

    monkeypatch.setattr(Reach, "attribute", counted)
    for step in (names["step"], names["step2"]):
        lookups[0] = 0
        premises = premises_of(step)
        assert lookups[0] < 30_000
        assert why(premises) is None
        nodes[2000].number += 1
        assert "Node.number changed from 2000 to 2001" in str(why(premises))
        nodes[2000].number -= 1


def test_a_model_of_a_hub_leads_to_its_layers_and_not_to_the_hub() -> None:
    """Texts of a configuration lead to model cards, templates and symbolic algebra."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "vocab_size": 32,
    }
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2))
    optimizer = torch.optim.AdamW(model.parameters())

    def step(ids: torch.Tensor) -> None:
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()

    reach = Reach.of(step)
    files = {function.__code__.co_filename for function in reach.functions()}
    assert any(file.endswith("modeling_llama.py") for file in files)
    assert not [file for file in files if "/jinja2/" in file or "/sympy/" in file]
    assert len(reach.functions()) < 1000
    premises = premises_of(step)
    model.config.use_cache = not model.config.use_cache
    assert "use_cache" in str(why(premises))
