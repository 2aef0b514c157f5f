"""``python -m xla_dtensor plan --quick``: what it prints, its exit status, what it refuses."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from xla_dtensor.cli import main
from xla_dtensor.plan.model_sizes import ModelSizes


def run(*words: str) -> int:
    return main(["plan", *words, "--quick"])


def read(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, Any]:
    status = run(*words, "--json")
    return status, json.loads(capsys.readouterr().out)


def test_a_plan_that_may_fit(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("tpu_configs/jobs/llama3_70b_v5p.yaml") == 0
    shown = capsys.readouterr().out
    assert "llama3-70b, 131.417 GiB of parameters, on v5p:8x8x8, 512 devices" in shown
    assert re.search(r"^ *parameters +723 +278,233,088 +265\.3 MiB$", shown, re.MULTILINE)
    assert re.search(r"^ *inputs of layers +80 +10,737,418,240 ", shown, re.MULTILINE)
    assert "Not refused: at most 83.839 GiB are left." in shown
    assert "only compiling tells whether it fits" in shown
    assert re.search(
        r"model\.layers\.\*\.mlp\.down_proj\.weight x80 +8192 x 28672 +\[fsdp, tp\] +70", shown
    )
    assert "whole on every device: 161 parameters, 2.5 MiB" in shown


def test_one_that_cannot(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("llama3_8b_v6e_8", "--model", "llama3-405b") == 1
    shown = capsys.readouterr().out
    assert "CANNOT FIT, whatever the batch:" in shown
    assert "608,823,611,844 bytes per device > 33,543,694,582" in shown
    status, data = read(capsys, "llama3_8b_v6e_8", "--model", "llama3-405b")
    assert (status, data["cannot_fit"], data["exact_bytes"]) == (1, True, 608_823_611_844)


def test_a_batch_that_cannot(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("llama3_8b_v5e", "--per-group", "7") == 1
    assert "DOES NOT FIT with this batch: at least" in capsys.readouterr().out
    status, data = read(capsys, "llama3_8b_v5e", "--per-group", "7", "--sequence", "4096")
    assert status == 0
    assert (data["sequences"], data["sequence_tokens"]) == (7 * 256, 4096)
    assert data["lower_bound_bytes"] < data["capacity_bytes"]


def test_optimizer_and_dtype(capsys: pytest.CaptureFixture[str]) -> None:
    def state(*words: str) -> int:
        data = read(capsys, "llama3_8b_v5e", *words)[1]
        (found,) = (part for part in data["parts"] if part["role"] == "optimizer state")
        return found["device_bytes"]

    counters = 4 * 291
    full = state() - counters
    assert state("--optimizer", "adamw-bf16") - counters == full // 2
    assert state("--optimizer", "adamw-master") - counters == full // 2 * 3
    assert state("--optimizer", "sgd") == 0
    assert state("--optimizer", "sgd-momentum", "--dtype", "float32") == full // 2


def test_sweep(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("llama3_70b_v5p", "--sweep", "fsdp=*,tp=*") == 0
    lines = capsys.readouterr().out.splitlines()
    assert "modelled" in lines[1]
    assert lines[4].split()[:2] == ["fsdp=512", "tp=1"]
    assert lines[-1].endswith("does not fit with this batch, by the lower bound")
    status, data = read(capsys, "llama3_70b_v5p", "--sweep", "fsdp=*,tp=*")
    assert (status, len(data["meshes"]), data["meshes"][0]["axes"]) == (
        0,
        10,
        {"fsdp": 512, "tp": 1},
    )
    assert run("llama3_8b_v6e_8", "--model", "llama3-405b", "--sweep", "fsdp=*") == 1


def test_smallest(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("llama3_8b_v5e", "--smallest", "v5e") == 0
    assert capsys.readouterr().out.startswith("v5e:2x4, 8 devices, fsdp=8: at least 13.476 GiB")
    assert read(capsys, "llama3_8b_v5e", "--smallest", "v5e")[1]["axes"] == {"fsdp": 8}
    assert run("llama3_405b_v5p_4slices", "--smallest", "v2") == 1
    assert "No slice of v2 is large enough" in capsys.readouterr().out
    assert read(capsys, "llama3_405b_v5p_4slices", "--smallest", "v2")[1]["topology"] is None


def test_max_batch(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("llama3_8b_v5e", "--max-batch") == 0
    assert "At most 6 sequences of 8,192 tokens" in capsys.readouterr().out
    assert read(capsys, "llama3_8b_v5e", "--max-batch")[1]["sequences_at_most"] == 6 * 256
    assert run("llama3_405b_v6e_2slices", "--sequence", "65536", "--max-batch") == 1
    assert "Not even one sequence" in capsys.readouterr().out


def test_a_config_of_hugging_face(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    sizes = ModelSizes.load("llama3-8b")
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    config = {name: getattr(sizes, name) for name in (*names, "vocab_size", "num_key_value_heads")}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config | {"model_type": "llama"}))
    ours = read(capsys, "llama3_8b_v5e")[1]
    theirs = read(capsys, "llama3_8b_v5e", "--model", str(path))[1]
    assert theirs["parts"] == ours["parts"]


def test_layer_inputs_in_the_hosts_memory(capsys: pytest.CaptureFixture[str]) -> None:
    """The published batch of this job fits with offloading only."""
    job, batch = "llama3_405b_v6e_2slices", ("--per-group", "4")
    assert read(capsys, job)[0] == 0
    status, whole = read(capsys, job, *batch)
    assert (status, whole["batch_cannot_fit"], whole["cannot_fit"]) == (1, True, False)
    status, data = read(capsys, job, *batch, "--remat", "offload:layer_input")
    assert status == 0
    kept = 125 * 4 * 8192 * 16384 // 4 * 2
    assert whole["lower_bound_bytes"] - data["lower_bound_bytes"] == kept


def test_gradients_one_by_one(capsys: pytest.CaptureFixture[str]) -> None:
    whole = read(capsys, "llama3_8b_v5e")[1]
    data = read(capsys, "llama3_8b_v5e", "--gradients", "one-by-one")[1]
    gradients = next(part for part in whole["parts"] if part["role"] == "gradient")
    largest = 128256 * 4096 * 2 // 256
    assert whole["exact_bytes"] - data["exact_bytes"] == gradients["device_bytes"] - largest


def test_a_file_and_any_folder(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The template, copied next to a job somewhere else: as a module, and as a file."""
    pytest.importorskip("torch")
    from xla_dtensor.models import own_model

    template = Path(own_model.__file__)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path])
    shutil.copy(template, "my_own_plan.py")
    Path("own.yaml").write_text(
        "name: own\naccelerator: v6e:2x4\naxes: {fsdp: {ici: -1}}\n"
        'sharding: {"*.weight": [fsdp, null], "*.bias": [null]}\n'
    )
    ours = read(capsys, "own.yaml", "--model", "my_own_plan:training")
    assert ours == read(capsys, "own.yaml", "--model", "my_own_plan.py:training")
    assert ours[0] == 0


def test_a_model_of_ones_own(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("torch")
    job = tmp_path / "own.yaml"
    job.write_text(
        "name: own\naccelerator: v6e:2x4\nmodel: xla_dtensor.models.own_model:training\n"
        'axes: {fsdp: {ici: -1}}\nsharding: {"*.weight": [fsdp, null], "*.bias": [null]}\n'
    )
    status, data = read(capsys, str(job))
    biases, weights = 4096 + 16384, 2 * 4096 * 16384
    assert status == 0
    assert data["parts"][0]["device_bytes"] == 2 * (weights // 8 + biases)
    assert run(str(job)) == 0
    assert "activations are not known without compiling" in capsys.readouterr().out
    assert run(str(job), "--max-batch") == 1


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["nobody"], "Job 'nobody' was asked for."),
        (["llama3_8b_v5e", "--model", "llama9"], "Model 'llama9' was asked for."),
        (["llama3_8b_v5e", "--model", "json:nothing"], "Model 'json:nothing' was asked for."),
        (["llama3_8b_v5e", "--model", "builtins:repr"], "was called with the job"),
        (["llama3_8b_v5e", "--sequence", "0"], "with --sequence 0. It has to be"),
        (["llama3_8b_v5e", "--dtype", "f7"], "dtype='f7'"),
        (["llama3_8b_v5e", "--optimizer", "lion"], "The optimizer 'lion' was asked for."),
        (["llama3_8b_v5e", "--sweep", "tp=*"], "It has no axis 'tp'."),
        (["llama3_8b_v5e", "--smallest", "v9"], "Chip 'v9' was asked for."),
        (["mixtral_8x7b_v5p", "--model", "llama3-8b"], "'**.mlp.gate.weight' matches nothing"),
    ],
)
def test_refusals(capsys: pytest.CaptureFixture[str], words: list[str], text: str) -> None:
    assert run(*words) == 2
    assert text in capsys.readouterr().err


def test_from_an_installed_package_in_any_folder(tmp_path: Path) -> None:
    """Nothing of the repository but what a wheel holds is on the path."""
    pytest.importorskip("torch")
    site, here = tmp_path / "site-packages", tmp_path / "here"
    here.mkdir()
    root = Path(__file__).resolve().parents[3]
    for package in ("xla_dtensor", "mesh_utils", "tpu_configs"):
        shutil.copytree(root / package, site / package, ignore=shutil.ignore_patterns("__pyc*"))
    script = (
        "import sys; from xla_dtensor.plan.aot import function_of\n"
        "from xla_dtensor.plan.search import REFERENCE\n"
        "made = function_of(REFERENCE)\n"
        "print(sys.modules[made.__module__].__file__)\n"
        "from xla_dtensor.cli import main\n"
        "sys.exit(main(['plan', 'llama3_8b_v5e', '--quick']))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=here,
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(site / "xla_dtensor" / "models"))
    assert "Not refused" in done.stdout


QWEN = {
    "model_type": "qwen3",
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
}


def test_another_model_of_transformers(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    config = tmp_path / "config.json"
    config.write_text(json.dumps(QWEN))
    status, data = read(capsys, "llama3_8b_v6e_8", "--model", str(config))
    heads, matrices = 64 * (2 * 64 + 2 * 32), 3 * 64 * 128
    cut = 2 * (heads + matrices) + 2 * 256 * 64
    norms = 2 * (2 * 64 + 2 * 8) + 64
    assert status == 0
    assert data["parts"][0]["device_bytes"] == 2 * (cut // 8 + norms)

    config.write_text(json.dumps(QWEN | {"attention_bias": True}))
    assert run("llama3_8b_v6e_8", "--model", str(config)) == 2
    assert "q_proj.bias" in capsys.readouterr().err  # no rule of the job matches it

    config.write_text(json.dumps({"model_type": "t5"}))
    assert run("llama3_8b_v6e_8", "--model", str(config)) == 2
    assert "makes no causal language model" in capsys.readouterr().err

    monkeypatch.setattr("xla_dtensor.plan.search.find_spec", lambda _: None)
    assert run("llama3_8b_v6e_8", "--model", str(config)) == 2
    assert "Install transformers, or pass a module:function" in capsys.readouterr().err
