"""torch_xla's own scripts: unchanged, with one import changed, and as docs/coming_from.md says.

Each script of ``scripts/`` stands there once, as torch_xla has it. What else is run is made of it
by replacing text, so nothing but the replaced text can differ. Every run is a process of its own.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from xla_dtensor.core import OpSharding

ROOT = Path(__file__).resolve().parents[3]
SCRIPTS = Path(__file__).parent / "scripts"
DOC = ROOT / "docs" / "coming_from.md"
TIMEOUT_SECONDS = 120

IMPORT_CHANGE = {"import torch_xla.distributed.spmd as xs": "import xla_dtensor.spmd as xs"}
JAX_CHANGES = IMPORT_CHANGE | {
    "import torch_xla": "import xla_dtensor as xd",
    "import torch_xla.core.xla_model as xm": "",
    "import torch_xla.distributed.parallel_loader as pl": "",
    "import torch_xla.runtime as xr": "import xla_dtensor as xd",
    "xr.use_spmd()": 'xd.get_runtime("jax")',
    "xr.global_runtime_device_count()": "len(xd.get_runtime().device_ids())",
    "device = torch_xla.device()": "",
    "device = xm.xla_device()": "",
    "model.to(device)": "xd.distribute_module(model, mesh)",
    ".to(device)": "",
    "pl.MpDeviceLoader(batches, device, input_sharding=rows)": (
        "([xs.mark_sharding(t, rows.mesh, rows.partition_spec) for t in batch] "
        "for batch in batches)"
    ),
    "@torch_xla.compile": "@xd.compile",
    "torch_xla.sync()": "",
    "xm.mark_step()": "",
    "xm.optimizer_step(optimizer)": "optimizer.step()",
}

# What the scripts ask for. Of the data parallel one, the parameters were not annotated at all.
ASKED = {
    "data_parallel": {"x": "{devices=[8,1]<=[8]}"},
    "fully_sharded": {
        name + moment: "{devices=[8,1]<=[8]}"
        for name in ("embedding.weight", "up.weight", "down.weight", "head.weight")
        for moment in ("", ".exp_avg")
    },
    "tensor_parallel": {
        "qkv.weight": "{devices=[4,2]<=[2,4]T(1,0)}",
        "qkv.bias": "{devices=[4,2]<=[2,4]T(1,0) last_tile_dim_replicate}",
        "out.weight": "{devices=[1,4,2]<=[2,4]T(1,0) last_tile_dim_replicate}",
        "up.weight": "{devices=[4,1,2]<=[2,4]T(1,0) last_tile_dim_replicate}",
        "down.weight": "{devices=[1,8]<=[8]}",
    },
}


def script(name: str) -> str:
    return (SCRIPTS / f"{name}.py").read_text()


def changed(text: str, changes: dict[str, str]) -> str:
    """`text` with the replacements made, the longest first; a name is replaced whole only."""
    for old in sorted(changes, key=len, reverse=True):
        text = re.sub(rf"{re.escape(old)}(?![\w.])", lambda _, old=old: changes[old], text)
    return text


def losses_and_shardings(printed: str) -> tuple[list[float], dict[str, OpSharding]]:
    losses: list[float] = []
    shardings: dict[str, OpSharding] = {}
    for line in printed.splitlines():
        kind, _, rest = line.partition(" ")
        if kind == "loss":
            losses.append(float(rest))
        elif kind == "sharding":
            name, _, text = rest.partition(" ")
            shardings[name] = OpSharding.parse(text).canonical()
    return losses, shardings


def run(program: str, folder: Path, **settings: str) -> tuple[list[float], dict[str, OpSharding]]:
    """Run a program in a process that knows of no runtime but by what the program does."""
    inherited = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith("XLA_") and key not in ("PJRT_DEVICE", "CPU_NUM_DEVICES")
    }
    path = folder / "program.py"
    path.write_text(program)
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", str(path)],
        env={**inherited, "PYTHONPATH": str(ROOT), "NPROC": "64", **settings},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return losses_and_shardings(done.stdout)


def unsharded_losses(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> list[float]:
    """The script's losses in plain PyTorch on one CPU: every call of torch_xla does nothing."""

    def keep(t: object, *_: object) -> object:
        return t

    shown = SimpleNamespace(sharding_spec="{replicated}")
    spmd = SimpleNamespace(
        Mesh=lambda *_: None,
        ShardingSpec=lambda *_: None,
        XLAShardedTensor=lambda _: shown,
        mark_sharding=keep,
        mark_sharding_with_gradients=keep,
        set_global_mesh=keep,
        wrap_if_sharded=lambda _: shown,
    )
    xm = SimpleNamespace(
        xla_device=lambda: "cpu", mark_step=lambda: None, optimizer_step=lambda o: o.step()
    )
    pl = SimpleNamespace(MpDeviceLoader=lambda batches, device, input_sharding: batches)
    xr = SimpleNamespace(use_spmd=lambda: None, global_runtime_device_count=lambda: 8)
    torch_xla = SimpleNamespace(
        device=lambda: "cpu",
        compile=keep,
        sync=lambda: None,
        core=SimpleNamespace(xla_model=xm),
        distributed=SimpleNamespace(parallel_loader=pl, spmd=spmd),
        runtime=xr,
    )
    for module, stands_for in {
        "torch_xla": torch_xla,
        "torch_xla.core": torch_xla.core,
        "torch_xla.core.xla_model": xm,
        "torch_xla.distributed": torch_xla.distributed,
        "torch_xla.distributed.parallel_loader": pl,
        "torch_xla.distributed.spmd": spmd,
        "torch_xla.runtime": xr,
    }.items():
        monkeypatch.setitem(sys.modules, module, stands_for)
    exec(compile(script(name), name, "exec"), {"__name__": name})
    losses, _ = losses_and_shardings(capsys.readouterr().out)
    assert len(losses) == 6
    assert len(set(losses)) == 6
    return losses


def asked(name: str) -> dict[str, OpSharding]:
    return {key: OpSharding.parse(text).canonical() for key, text in ASKED[name].items()}


@pytest.mark.on_runtime
@pytest.mark.only_on("torch_xla")
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="torch_xla's own", marks=pytest.mark.thorough),
        pytest.param(IMPORT_CHANGE, id="one import"),
    ],
)
@pytest.mark.parametrize("name", list(ASKED))
def test_with_torch_xla(
    name: str,
    changes: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    program = changed(script(name), changes)
    assert ("xla_dtensor" in program) == bool(changes)
    losses, shardings = run(program, tmp_path, PJRT_DEVICE="CPU", CPU_NUM_DEVICES="8")
    assert losses == pytest.approx(unsharded_losses(name, monkeypatch, capsys), abs=1e-4)
    assert shardings == asked(name)


@pytest.mark.thorough
@pytest.mark.on_runtime
@pytest.mark.only_on("jax")
@pytest.mark.parametrize("name", list(ASKED))
def test_on_jax_after_the_replacements(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program = changed(script(name), JAX_CHANGES)
    assert re.search(r"torch_xla\b(?!')|\b(xm|xr|pl)\.", program.partition('"""\n')[2]) is None
    unsharded = unsharded_losses(name, monkeypatch, capsys)
    program = f"{program}\nimport sys\nassert 'torch_xla' not in sys.modules\n"
    losses, shardings = run(program, tmp_path, JAX_PLATFORMS="cpu", XLA_DTENSOR_CPU_DEVICES="8")
    assert losses == pytest.approx(unsharded, abs=1e-4)
    assert shardings == asked(name)


FSDP_V2 = """
import sys, numpy as np, torch, torch_xla, torch_xla.runtime as xr
import xla_dtensor.spmd as xs
from torch_xla.experimental.spmd_fully_sharded_data_parallel import SpmdFullyShardedDataParallel

if sys.argv[1] == "the user":
    xr.use_spmd()
mesh = xs.Mesh(np.arange(8), (8, 1), ("fsdp", "model"))
model = torch.nn.Sequential(torch.nn.Linear(16, 8), torch.nn.Linear(8, 4)).to("xla")
torch_xla.sync()
model = SpmdFullyShardedDataParallel(model, mesh=mesh)
x = torch.ones(16, 16).to("xla").requires_grad_()
xs.mark_sharding(x, mesh, ("fsdp", None))
print("loss", model(x).pow(2).mean().item())
for name, parameter in model.named_parameters():
    print(name, torch_xla._XLAC._get_xla_sharding_spec(parameter))
"""


@pytest.mark.on_runtime
@pytest.mark.only_on("torch_xla")
@pytest.mark.thorough
@pytest.mark.parametrize("starter", ["the user", "we"])
def test_fsdp_v2_takes_our_mesh(starter: str) -> None:
    # Not this session's XLA_DISABLE_FUNCTIONALIZATION, which we would set.
    env = {name: value for name, value in os.environ.items() if not name.startswith("XLA_")}
    env |= {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "8", "PYTHONPATH": str(ROOT)}
    env["XLA_DTENSOR_RUNTIME"] = "torch_xla"
    done = subprocess.run(
        [sys.executable, "-c", FSDP_V2, starter],
        env=env,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = dict(line.rsplit(" ", 1) for line in done.stdout.splitlines() if "{" in line)
    assert len(lines) == 4
    for name, text in lines.items():
        tiles = (1, 8) if name.endswith("weight") else (8,)
        assert OpSharding.parse(text).canonical().tile_dims == tiles, name


def test_one_import_is_one_line() -> None:
    for name in ASKED:
        before, after = script(name), changed(script(name), IMPORT_CHANGE)
        lines = zip(before.splitlines(), after.splitlines(), strict=True)
        assert [new for old, new in lines if old != new] == list(IMPORT_CHANGE.values())


def test_every_replacement_is_needed_by_a_script() -> None:
    for old in JAX_CHANGES:
        fewer = {key: new for key, new in JAX_CHANGES.items() if key != old}
        assert any(
            changed(script(name), fewer) != changed(script(name), JAX_CHANGES) for name in ASKED
        ), old


def test_the_replacements_are_those_of_the_doc() -> None:
    _, _, section = DOC.read_text().partition("### The same script on the JAX runtime")
    table = section.partition("\n### ")[0]
    rows = [line.split("|")[1:-1] for line in table.splitlines() if line.startswith("| `")]
    listed = {old.strip(" `"): new.strip().strip("`") for old, new in rows}
    assert listed == {old: new or "nothing" for old, new in JAX_CHANGES.items()}
