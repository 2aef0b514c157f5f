"""The jobs that come with the package: they fit, their meshes are found, their rules cut evenly.

Rules are resolved against the parameters of the real models, as Hugging Face Transformers names and
shapes them: one layer of each, made without memory.
"""

from __future__ import annotations

import configparser
import math
import re
import warnings
from functools import cache
from pathlib import Path

import pytest
import yaml

from mesh_utils import JobConfig, Network, create_hybrid_device_mesh
from mesh_utils.job import job_names
from xla_dtensor.core.rules import read_rules

FOLDER = Path(__file__).resolve().parents[2] / "tpu_configs" / "jobs"
NAMES = sorted(path.stem for path in FOLDER.glob("*.yaml"))

# Of the models' published configurations: hidden, intermediate, heads, key and value heads, layers,
# vocabulary.
SIZES = {
    "llama3-8b": (4096, 14336, 32, 8, 32, 128256),
    "llama3-70b": (8192, 28672, 64, 8, 80, 128256),
    "llama3-405b": (16384, 53248, 128, 8, 126, 128256),
    "mixtral-8x7b": (4096, 14336, 32, 8, 32, 32000),
}
BILLIONS = {"llama3-8b": 8.03, "llama3-70b": 70.55, "llama3-405b": 405.85, "mixtral-8x7b": 46.7}


@cache
def shapes_of(model: str) -> dict[str, tuple[int, ...]]:
    """The parameters of one layer and what is around it, by path."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    hidden, intermediate, heads, kv_heads, _, vocabulary = SIZES[model]
    kind = transformers.MixtralConfig if model.startswith("mixtral") else transformers.LlamaConfig
    config = kind(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        num_hidden_layers=1,
        vocab_size=vocabulary,
        tie_word_embeddings=False,
    )
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = transformers.AutoModelForCausalLM.from_config(config)
    return {name: tuple(value.shape) for name, value in made.named_parameters()}


def test_names() -> None:
    assert tuple(NAMES) == job_names()
    assert len(NAMES) >= 12


def test_what_they_cover() -> None:
    jobs = [JobConfig.load(name) for name in NAMES]
    kinds = {(job.chip.name, job.num_slices > 1) for job in jobs}
    assert {("v5e", False), ("v5p", False), ("v6e", False), ("tpu7x", False)} <= kinds
    assert {("v5e", True), ("v5p", True), ("v6e", True), ("h100", True)} <= kinds
    assert {job.model for job in jobs} == set(SIZES)
    topologies = {job.topology().name for job in jobs}
    assert {"8xh100:8", "gb200:72", "v5e:16x16", "v5p:8x8x8", "2xv5p:8x8x8"} <= topologies
    assert len({job.name for job in jobs}) == len(jobs)


@pytest.mark.parametrize("name", NAMES)
def test_it_fits_and_its_mesh_is_found(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        job = JobConfig.load(FOLDER / f"{name}.yaml")
    job.check_valid()
    assert job == JobConfig.load(name)
    topology = job.topology()
    assert topology.is_real
    assert math.prod(job.ici_mesh_shape) == topology.devices_per_slice
    assert math.prod(job.dcn_mesh_shape) == topology.num_slices
    found = job.assignment()
    found.check_valid()
    assert found.is_exact
    assert found.warnings == job.warnings == ()
    mesh = job.mesh()
    mesh.check_valid()
    assert mesh.device_ids.tolist() == found.device_ids.tolist()
    # The last axis is the hungriest: it has the links, where it does not run over DCN.
    network, last = Network.of(topology), found.links[-1]
    assert last >= min(2.0, network.bound(job.axes[-1].size)) or topology.torus_rank == 0


@pytest.mark.parametrize("name", NAMES)
def test_drop_in_gives_its_mesh(name: str) -> None:
    job = JobConfig.load(name)
    made = create_hybrid_device_mesh(job.ici_mesh_shape, job.dcn_mesh_shape, job.topology())
    assert [device.id for device in made.reshape(-1)] == job.mesh().device_ids.reshape(-1).tolist()


@pytest.mark.parametrize("name", NAMES)
def test_rules_cut_the_model_evenly(name: str) -> None:
    job = JobConfig.load(name)
    shapes = shapes_of(str(job.model))
    modules = {path.rpartition(".")[0] for path in shapes} | {"model.layers.0"}
    mesh = job.mesh()
    plan = read_rules(job.sharding).resolve(shapes, mesh, modules=modules)
    assert {tensor.path: tensor.padding_bytes for tensor in plan.tensors} == dict.fromkeys(
        shapes, 0
    )
    cut = {tensor.path: tensor.total_bytes // tensor.device_bytes for tensor in plan.tensors}
    # Everything but norms is cut over all devices of a copy of the model.
    copies = math.prod(axis.size for axis in job.axes if axis.name == "dp")
    for path, shape in shapes.items():
        if len(shape) > 1:
            assert cut[path] == mesh.device_ids.size // copies, path


@pytest.mark.parametrize("name", NAMES)
def test_its_state_fits(name: str) -> None:
    """Weights and gradients in bfloat16, AdamW's moments in float32, within the usable HBM."""
    job = JobConfig.load(name)
    shapes, (*_, layers, _) = shapes_of(str(job.model)), SIZES[str(job.model)]
    mesh = job.mesh()
    plan = read_rules(job.sharding).resolve(shapes, mesh)
    total = local = 0.0
    for tensor in plan.tensors:
        times = layers if ".layers." in tensor.path else 1
        total += times * math.prod(tensor.facts.shape)
        local += times * tensor.device_bytes / tensor.facts.itemsize_bytes
    assert total / 1e9 == pytest.approx(BILLIONS[str(job.model)], rel=0.01)
    chip = job.chip
    room = chip.usable_hbm_bytes or (chip.hbm_bytes or 0) * 0.9
    assert local * (2 + 2 + 4 + 4) < 0.7 * room


@pytest.mark.parametrize("name", NAMES)
def test_it_names_its_source(name: str) -> None:
    text = (FOLDER / f"{name}.yaml").read_text(encoding="utf-8")
    comment = "".join(line for line in text.splitlines(True) if line.startswith("#"))
    assert re.search(r"https://github\.com/\S+|No public job of this shape was\n# found", comment)
    assert yaml.safe_load(text)["name"] == JobConfig.load(name).name


def test_document_lists_them() -> None:
    document = FOLDER.parents[1] / "docs" / "jobs.md"
    rows = re.findall(
        r"^\| `(\w+)` \| `([^`]+)` \| (.+) \| ([\w-]+) \|$",
        document.read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    assert [row[0] for row in rows] == NAMES
    for name, topology, axes, model in rows:
        job = JobConfig.load(name)
        assert (job.topology().name, job.model) == (topology, model)
        assert ", ".join(map(str, job.axes)) == axes


def test_every_file_is_shipped() -> None:
    config = configparser.ConfigParser()
    config.read(FOLDER.parents[1] / "setup.cfg", encoding="utf-8")
    patterns = config["options.package_data"]["tpu_configs"].split(", ")
    folder = FOLDER.parent
    shipped = {path for pattern in patterns for path in folder.glob(pattern)}
    there = {path for path in folder.rglob("*") if path.suffix in (".yaml", ".sh")}
    assert there <= shipped
    assert {"jobs", "launch", "hardware", "tpu_configs"} == {path.parent.name for path in there}
