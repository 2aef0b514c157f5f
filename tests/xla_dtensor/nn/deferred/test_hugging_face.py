"""Models of Hugging Face get their values on the mesh, by their own initialisation."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import xla_dtensor as xd
from tests.xla_dtensor import hugging_face
from tests.xla_dtensor.host_tasks_init import checksums

hf = pytest.importorskip("transformers")


def on_meta(mesh: xd.DeviceMesh, name: str) -> Any:
    with torch.device("meta"):
        return xd.distribute_module(getattr(hugging_face, name)(hf), mesh)


@pytest.mark.parametrize("name", ["_llama", "_t5"])
def test_values_are_those_of_an_eager_model(mesh: xd.DeviceMesh, name: str) -> None:
    model = xd.materialize(on_meta(mesh, name), seed=0, rng="torch")
    torch.manual_seed(0)
    expected = getattr(hugging_face, name)(hf)
    assert checksums(model) == checksums(expected)
    for buffer, value in expected.named_buffers():
        assert torch.equal(model.get_buffer(buffer).cpu(), value), buffer


def test_memory_only_still_has_its_frequencies(mesh: xd.DeviceMesh) -> None:
    model = xd.materialize(on_meta(mesh, "_llama"), init=False)
    torch.manual_seed(0)
    expected = hugging_face._llama(hf)
    for buffer, value in expected.named_buffers():
        assert torch.equal(model.get_buffer(buffer).cpu(), value), buffer
    model.load_state_dict(expected.state_dict())
    assert checksums(model) == checksums(expected)
