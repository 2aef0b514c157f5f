"""The package's extras, and what it ships."""

from __future__ import annotations

import configparser
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tools import dry_runs
from tools.dry_runs import EXTRAS

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def config() -> configparser.ConfigParser:
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg", encoding="utf-8")
    return parser


def lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line]


def project_name(requirement: str) -> str:
    return re.split(r"[\[<>=!~; ]", requirement)[0]


def test_extras(config: configparser.ConfigParser) -> None:
    assert tuple(config["options.extras_require"]) == EXTRAS


def test_core_needs_no_tensor_library(config: configparser.ConfigParser) -> None:
    core = lines(config["options"]["install_requires"])
    assert [project_name(requirement) for requirement in core] == [
        "Jinja2",
        "numpy",
        "PyYAML",
        "rich",
        "typeguard",
    ]


def test_one_version_of_cuda_for_jax_and_torch(config: configparser.ConfigParser) -> None:
    assert "torch==2.9.*" in lines(config["options.extras_require"]["cuda12"])
    assert "torch>=2.13" in lines(config["options.extras_require"]["cuda13"])


@pytest.mark.parametrize("extra", ["torch-xla", "torch-xla-tpu"])
def test_torch_xla_pins_its_torch(config: configparser.ConfigParser, extra: str) -> None:
    _, torch, torch_xla = lines(config["options.extras_require"][extra])
    assert torch == "torch==2.9.*"
    assert re.fullmatch(r"torch_xla(\[tpu\])?==2\.9\.\*", torch_xla)


def test_unsupported_torch_is_left_out(config: configparser.ConfigParser) -> None:
    (torch,) = (
        requirement
        for requirement in lines(config["options.extras_require"]["jax"])
        if project_name(requirement) == "torch"
    )
    assert torch == "torch>=2.9,!=2.10.*,!=2.11.*,!=2.12.*"


def test_same_jax_everywhere(config: configparser.ConfigParser) -> None:
    extras = config["options.extras_require"]
    found = [line for extra in EXTRAS for line in lines(extras[extra])]
    versions = {line.partition(">")[2] for line in found if project_name(line) == "jax"}
    assert versions == {"=0.10,<0.13"}


def test_the_two_tpu_extras_are_told_apart() -> None:
    text = " ".join((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split())
    assert "The extras `tpu` and `torch-xla-tpu` exclude each other" in text


def test_pyproject_holds_build_and_tools_only() -> None:
    content = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert set(content) == {"build-system", "tool"}
    assert set(content["tool"]) == {"ruff", "pyright"}


@pytest.mark.parametrize("package", ["xla_dtensor", "mesh_utils"])
def test_types_are_shipped(config: configparser.ConfigParser, package: str) -> None:
    assert (ROOT / package / "py.typed").is_file()
    assert "py.typed" in config["options.package_data"][package]


def test_license() -> None:
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License" in text
    assert "END OF TERMS AND CONDITIONS" in text


def test_the_table_of_dry_runs_is_whole() -> None:
    """What the index says to each row is asked by tools/dry_runs.py, a part of `make test-all`."""
    assert all(set(refused) <= set(dry_runs.PYTHONS) for refused in dry_runs.REFUSED.values())


def test_pythons(config: configparser.ConfigParser) -> None:
    named = re.findall(r"Python :: (3\.\d+)", config["metadata"]["classifiers"])
    assert tuple(named) == dry_runs.PYTHONS
    assert config["options"]["python_requires"] == f">={named[0]}"


@pytest.mark.thorough
def test_wheel_holds_the_data(tmp_path: Path) -> None:
    source = tmp_path / "source"
    for folder in ("mesh_utils", "xla_dtensor", "tpu_configs", "tests", "tools"):
        shutil.copytree(
            ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__")
        )
    for file in ("setup.cfg", "pyproject.toml", "LICENSE"):
        shutil.copy(ROOT / file, source)
    pip = [sys.executable, "-m", "pip", "wheel", "-qq", "--no-deps", "--wheel-dir", str(tmp_path)]
    subprocess.run([*pip, "."], cwd=source, check=True, capture_output=True, timeout=300)
    (wheel,) = tmp_path.glob("*.whl")
    listing = subprocess.run(
        [sys.executable, "-m", "zipfile", "-l", str(wheel)],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    shipped = {line.split()[0] for line in listing.splitlines()[1:]}
    for folder in ("mesh_utils", "xla_dtensor", "tpu_configs"):
        for suffix in ("*.py", "*.yaml", "*.j2", "py.typed"):
            expected = {str(path.relative_to(ROOT)) for path in (ROOT / folder).rglob(suffix)}
            assert expected <= shipped
    assert not any(name.startswith(("tests/", "examples/", "tools/")) for name in shipped)
