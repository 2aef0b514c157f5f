"""Hugging Face weights on several processes, of which none has all."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.hosts import Hosts
from tests.xla_dtensor.host_tasks_hf import wide
from xla_dtensor.hosts.blocks import whole_block
from xla_dtensor.hosts.hugging_face import save_hf
from xla_dtensor.hosts.hugging_face.files import WeightFiles
from xla_dtensor.models.decoder import Llama, Mixtral
from xla_dtensor.plan.model_sizes import ModelSizes

TASKS = "tests.xla_dtensor.host_tasks_hf"


def values(folder: Path) -> dict[str, torch.Tensor]:
    """Everything in a folder's files."""
    with WeightFiles(folder) as files:
        return {
            key: files.read(key, whole_block(t.shape), torch.empty(t.shape, dtype=t.dtype))
            for key, t in files.tensors.items()
        }


def made(kind: str, folder: Path) -> torch.nn.Module:
    sizes = ModelSizes.load(kind)
    torch.manual_seed(0)
    model = Mixtral(sizes) if sizes.num_local_experts else Llama(sizes)
    save_hf(folder, model)
    return model


@pytest.mark.parametrize("kind", ["llama-tiny", "mixtral-tiny"])
def test_each_process_reads_its_blocks_and_all_write_the_same_weights(
    hosts: Callable[..., Hosts], tmp_path: Path, kind: str
) -> None:
    model = made(kind, tmp_path / "first")
    found = hosts(2, 4).run(
        f"{TASKS}:load_and_save",
        source=str(tmp_path / "first"),
        target=str(tmp_path / "again"),
        model=kind,
    )
    whole_bytes = sum(p.nbytes for p in model.parameters())
    parameters = dict(model.named_parameters())
    for each in found:
        blocks = 0
        for name, shards in each["held"].items():
            for index, data in shards:
                part = tuple(slice(*bounds) for bounds in index)
                assert torch.equal(data, parameters[name].detach()[part]), (name, part)
                blocks += data.nbytes
        # Rows of so small a model are not worth skipping: parts of them are read whole.
        assert blocks <= each["read"] < 3 * whole_bytes
    assert sorted(p.name for p in (tmp_path / "again").glob("*.safetensors")) == sorted(
        found[0]["files"]
    )
    assert len(found[0]["files"]) > 2
    assert found[0]["files"] == found[1]["files"]
    first, again = values(tmp_path / "first"), values(tmp_path / "again")
    assert first.keys() == again.keys()
    assert all(torch.equal(first[key], again[key]) for key in first)


@pytest.mark.parametrize(
    ("experts", "lone", "shares"),
    [
        (["dp", None, "tp"], ["tp", "dp"], (0.5, 0.5)),
        ([None, "tp", "dp"], [None, ("tp", "dp")], (0.5, 0.5)),
        (["dp", "tp", None], None, (0.5, 1)),
        ([None, None, ("dp", "tp")], [None, ("dp", "tp")], (0.5, 0.5)),
    ],
)
def test_each_process_reads_the_bytes_that_it_holds_and_no_others(
    hosts: Callable[..., Hosts],
    tmp_path: Path,
    experts: Any,
    lone: Any,
    shares: tuple[float, float],
) -> None:
    names = {"experts": ["expert.#.gate", "expert.#.up"]}
    model = wide("cpu")
    save_hf(tmp_path, model, names=names, max_shard_bytes="200KB")
    found = hosts(2, 4).run(
        f"{TASKS}:count_bytes",
        source=str(tmp_path),
        names=names,
        rules={"experts": experts, "lone": lone},
    )
    sizes = [parameter.nbytes for parameter in model.parameters()]
    expected = int(sum(size * share for size, share in zip(sizes, shares, strict=True)))
    assert found == [(expected, expected)] * 2


@pytest.mark.parametrize(
    ("fault", "text"),
    [("disk", r"Process 1 could not: .*"), ("names", "different modules or arguments")],
)
def test_a_save_that_fails_in_one_process_fails_in_all_and_leaves_nothing(
    hosts: Callable[..., Hosts], tmp_path: Path, fault: str, text: str
) -> None:
    made("llama-tiny", tmp_path / "first")
    target = tmp_path / "again"
    said: list[Any] = hosts(2, 4).run(
        f"{TASKS}:save_with_a_fault",
        source=str(tmp_path / "first"),
        target=str(target),
        fault=fault,
    )
    assert all(re.search(text, message) for message in said), said
    assert not target.exists() or not list(target.iterdir())
