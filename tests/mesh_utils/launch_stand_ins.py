"""Stand-ins for what launchers' scripts call, and the words that reached them."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import yaml

from mesh_utils import JobConfig
from mesh_utils.launch.variables import JOB, job_text

WORDS = ["python", "train.py", "--steps", "10"]
IMAGE = "us-docker.pkg.dev/project/repository/train:1"
AWKWARD = [
    "a b",
    "",
    "'",
    '"',
    "$HOME",
    "$(date)",
    "`date`",
    "\\",
    "a\nb",
    "*",
    "~",
    "é",
    "😀",
    "#",
]

# Each call: how many words, then the words, each before a 0 character.
STAND_IN = """#!/bin/bash
printf '%s\\0' "$(($# + 1))" "${0##*/}" "$@" >> "$CALLS"
if [[ " $* " == *" describe "* ]]; then cat "$STATE"; fi
"""
SHOW = 'printf "%s\\0" "$@"'


def make_tools(folder: Path) -> Path:
    """Fills a folder with stand-ins for what scripts call."""
    for name in ("gcloud", "xpk", "srun", "torchrun", "sudo"):
        path = folder / name
        path.write_text(STAND_IN)
        path.chmod(0o755)
    (folder / "state").write_text("ACTIVE\n")
    return folder


def call(script: str, tools: Path, **variables: str) -> list[list[str]]:
    """Runs a script with stand-ins, and says what it called."""
    calls = tools / "calls"
    calls.write_bytes(b"")
    done = shell(script, tools, CALLS=str(calls), STATE=str(tools / "state"), **variables)
    assert done.returncode == 0, done.stderr.decode()
    rest, found = shown(calls.read_bytes()), list[list[str]]()
    while rest:
        end = int(rest[0]) + 1
        found.append(rest[1:end])
        rest = rest[end:]
    return found


def shell(script: str, tools: Path | None, **variables: str) -> subprocess.CompletedProcess[bytes]:
    path = os.environ["PATH"] if tools is None else f"{tools}:{os.environ['PATH']}"
    return subprocess.run(
        ["bash"],
        input=script.encode(),
        env={"PATH": path, "HOME": "/home/nobody", **variables},
        capture_output=True,
        timeout=60,
        check=False,
    )


def shown(output: bytes) -> list[str]:
    return output.decode().split("\0")[:-1]


def option(arguments: list[str], name: str) -> str:
    (found,) = (word for word in arguments if word.startswith(f"--{name}="))
    return found.partition("=")[2]


def job(name: str = "llama3_70b_v5p_2slices") -> JobConfig:
    return JobConfig.load(name)


def small(**changes: Any) -> JobConfig:
    axes = {"dp": {"dcn": -1}, "tp": {"ici": -1}}
    return JobConfig.parse({"name": "x", "accelerator": "v5e:4x4", "axes": axes, **changes})


def told(found: JobConfig) -> dict[str, str]:
    """The variables that every launcher sets: XLA flags, and the job itself."""
    return found.environment() | {JOB: job_text(found)}


def pod_of(text: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The replicated job of a JobSet, and its pod."""
    manifest = yaml.safe_load(text)
    assert (manifest["apiVersion"], manifest["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    (replicated,) = manifest["spec"]["replicatedJobs"]
    return replicated, replicated["template"]["spec"]["template"]["spec"]


def variables_of(container: dict[str, Any]) -> dict[str, str]:
    return {each["name"]: in_pod(each["value"], {}) for each in container["env"] if "value" in each}


def in_pod(text: str, env: dict[str, str]) -> str:
    """What Kubernetes makes of a word: $(NAME) is replaced if NAME is known, $$ is a dollar."""
    pattern = re.compile(r"\$\$|\$\(([^)]*)\)")
    return pattern.sub(lambda found: "$" if found[0] == "$$" else env.get(found[1], found[0]), text)
