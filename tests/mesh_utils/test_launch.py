"""What launchers get: YAML and scripts that say what the job says, and what is refused.

Scripts are run, with stand-ins for gcloud, xpk, srun and torchrun that write down their arguments.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from mesh_utils import JobError
from mesh_utils.job import job_names
from mesh_utils.launch import LAUNCHERS, launchers_for, render
from mesh_utils.launch.text import dns_name
from tests.mesh_utils.launch_stand_ins import (
    AWKWARD,
    IMAGE,
    WORDS,
    call,
    in_pod,
    job,
    make_tools,
    option,
    pod_of,
    shell,
    shown,
    small,
    told,
    variables_of,
)


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tools(tmp_path_factory.mktemp("tools"))


# every job, every launcher


@pytest.mark.parametrize("name", job_names())
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_every_job(name: str, launcher: str, tools: Path) -> None:
    found = job(name)
    if launcher not in launchers_for(found):
        with pytest.raises(JobError, match="does not start jobs on"):
            render(found, launcher, command=WORDS)
        return
    image = None if launcher == "torchrun" else IMAGE
    text = render(found, launcher, command=WORDS, image=image)
    assert text == render(found, launcher, command=WORDS, image=image)
    assert "@@" not in text
    (flags,) = found.environment().values()
    assert flags in text
    if launcher == "jobset":
        yaml.safe_load(text)
    else:
        checked = subprocess.run(["bash", "-n"], input=text, text=True, check=False)
        assert checked.returncode == 0


@pytest.mark.parametrize(
    ("name", "slices", "hosts", "accelerator", "topology", "chips"),
    [
        ("llama3_8b_v5e", 1, 64, "tpu-v5-lite-podslice", "16x16", 4),
        ("llama3_8b_v5e_4slices", 4, 64, "tpu-v5-lite-podslice", "16x16", 4),
        ("llama3_8b_v6e_8", 1, 2, "tpu-v6e-slice", "2x4", 4),
        ("llama3_405b_v6e_2slices", 2, 64, "tpu-v6e-slice", "16x16", 4),
        ("llama3_70b_v5p", 1, 128, "tpu-v5p-slice", "8x8x8", 4),
        ("llama3_405b_v5p_4slices", 4, 128, "tpu-v5p-slice", "8x8x8", 4),
        ("mixtral_8x7b_v5p", 1, 32, "tpu-v5p-slice", "4x4x8", 4),
        ("llama3_405b_tpu7x", 1, 64, "tpu7x", "4x8x8", 4),
    ],
)
def test_jobset_of_tpus(
    name: str, slices: int, hosts: int, accelerator: str, topology: str, chips: int
) -> None:
    found = job(name)
    text = render(found, "jobset", command=WORDS, image=IMAGE, env={"HF_HOME": "/data $x"})
    replicated, pod = pod_of(text)
    spec = replicated["template"]["spec"]
    assert replicated["replicas"] == slices
    assert spec["completions"] == spec["parallelism"] == hosts
    assert slices * hosts == found.topology().num_hosts
    assert slices * hosts * chips == found.topology().num_chips
    assert spec["completionMode"] == "Indexed"
    assert pod["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": accelerator,
        "cloud.google.com/gke-tpu-topology": topology,
    }
    annotations = yaml.safe_load(text)["metadata"]["annotations"]
    assert annotations == {
        "alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"
    }
    (container,) = pod["containers"]
    assert container["image"] == IMAGE
    assert container["command"] == WORDS
    assert container["resources"]["limits"] == {"google.com/tpu": chips}
    # GKE sets what libtpu needs to join slices; set here, it would be set for one of them.
    assert variables_of(container) == told(found) | {"HF_HOME": "/data $x"}
    assert ("--megascale_grpc_premap_memory_bytes" in str(container["env"])) == (slices > 1)


@pytest.mark.parametrize(
    ("name", "slices", "hosts", "accelerator", "chips"),
    [
        ("llama3_70b_h100", 8, 1, "nvidia-h100-80gb", 8),
        ("llama3_70b_gb200", 1, 18, "nvidia-gb200", 4),
        ("llama3_405b_gb200", 1, 16, "nvidia-gb200", 4),
    ],
)
def test_jobset_of_gpus(name: str, slices: int, hosts: int, accelerator: str, chips: int) -> None:
    found = job(name)
    text = render(found, "jobset", command=WORDS, image=IMAGE)
    replicated, pod = pod_of(text)
    spec = replicated["template"]["spec"]
    assert (replicated["replicas"], spec["completions"], spec["parallelism"]) == (
        slices,
        hosts,
        hosts,
    )
    assert pod["nodeSelector"] == {"cloud.google.com/gke-accelerator": accelerator}
    (container,) = pod["containers"]
    assert container["resources"] == {"limits": {"nvidia.com/gpu": chips}}
    given = variables_of(container)
    dns = dns_name(found.name)
    assert given.pop("JAX_COORDINATOR_ADDRESS") == f"{dns}-slice-0-0.{dns}:8476"
    assert given.pop("JAX_NUM_PROCESSES") == str(slices * hosts)
    assert given == told(found)
    on_one_pool = "exclusive-topology" in text
    assert on_one_pool == (hosts > 1)
    assert ("arm64" in text) == (accelerator == "nvidia-gb200")


@pytest.mark.parametrize(
    ("accelerator", "place", "process", "partition"),
    [
        ("4xh100:8", (3, 0), "3", "3"),
        ("2xgb200:72", (1, 5), "23", "1"),
        ("gb200:72", (0, 5), "5", ""),
    ],
)
def test_pods_of_gpus_know_their_number(
    accelerator: str, place: tuple[int, int], process: str, partition: str
) -> None:
    show = ["bash", "-c", 'printf "%s\\0" "$JAX_PROCESS_ID" "${JAX_PARTITION_INDEX-}"']
    text = render(small(accelerator=accelerator), "jobset", command=show, image=IMAGE)
    (container,) = pod_of(text)[1]["containers"]
    command = [in_pod(word, {}) for word in container["command"]]
    indices = {"JOB_INDEX": str(place[0]), "POD_INDEX": str(place[1])}
    done = subprocess.run(command, env=os.environ | indices, capture_output=True, check=True)
    assert shown(done.stdout) == [process, partition]
    fields = {each["name"]: each.get("valueFrom") for each in container["env"]}
    assert "jobset.sigs.k8s.io/job-index" in str(fields["JOB_INDEX"])
    assert "batch.kubernetes.io/job-completion-index" in str(fields["POD_INDEX"])


def test_options_of_jobset() -> None:
    found = job("llama3_70b_gb200")
    text = render(
        found,
        "jobset",
        command=WORDS,
        image=IMAGE,
        namespace="team",
        queue="multislice-queue",
        max_restarts="3",
        claim_template="rack",
    )
    manifest = yaml.safe_load(text)
    assert manifest["metadata"]["namespace"] == "team"
    assert manifest["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": "multislice-queue"}
    assert manifest["spec"]["failurePolicy"]["maxRestarts"] == 3
    pod = pod_of(text)[1]
    (claim,) = pod["resourceClaims"]
    assert claim["resourceClaimTemplateName"] == "rack"
    assert pod["containers"][0]["resources"]["claims"] == [{"name": claim["name"]}]
    plain = yaml.safe_load(render(found, "jobset", command=WORDS, image=IMAGE))
    assert not {"namespace", "labels"} & plain["metadata"].keys()


def test_xpk(tools: Path) -> None:
    text = render(job(), "xpk", command=WORDS, image=IMAGE, zone="us-east5-a", env={"A": "b c"})
    (called,) = call(text, tools, CLUSTER="mine", PROJECT="my project")
    assert called[:3] == ["xpk", "workload", "create"]
    assert option(called, "device-type") == "v5p-8x8x8"
    assert option(called, "num-slices") == "2"
    assert option(called, "docker-image") == IMAGE
    assert option(called, "project") == "my project"
    assert option(called, "zone") == "us-east5-a"
    assert option(called, "command") == shlex.join(WORDS)
    env = dict(word[6:].split("=", 1) for word in called if word.startswith("--env="))
    assert env == told(job()) | {"A": "b c"}


@pytest.mark.parametrize(
    ("name", "device", "count"),
    [
        ("llama3_70b_h100", "h100-80gb-8", "--num-nodes=8"),
        ("llama3_70b_gb200", "gb200-4", "--num-nodes=18"),
        ("llama3_405b_tpu7x", "tpu7x-4x8x8", "--num-slices=1"),
        ("llama3_8b_v5e_4slices", "v5litepod-16x16", "--num-slices=4"),
    ],
)
def test_xpk_devices(name: str, device: str, count: str, tools: Path) -> None:
    text = render(job(name), "xpk", command=WORDS)
    (called,) = call(text, tools, CLUSTER="c", PROJECT="p", ZONE="z")
    assert option(called, "device-type") == device
    assert count in called
    assert not [word for word in called if word.startswith("--docker-image")]


def test_scripts_ask_for_what_is_not_set(tools: Path) -> None:
    text = render(job(), "xpk", command=WORDS)
    done = shell(text, tools, CALLS="/dev/null", PROJECT="p", ZONE="z")
    assert done.returncode != 0
    assert b"Set CLUSTER to your GKE cluster" in done.stderr


def test_queued(tools: Path) -> None:
    text = render(job(), "queued", command=WORDS, project="p", zone="z", capacity="spot")
    created, described, ssh = call(text, tools)
    for called in (created, described, ssh):
        assert called[1:4] == ["compute", "tpus", "queued-resources"]
        assert called[5] == "llama3-70b-v5p-2slices"
        assert {"--project=p", "--zone=z"} <= set(called)
    assert [created[4], described[4], ssh[4]] == ["create", "describe", "ssh"]
    assert option(created, "accelerator-type") == "v5p-1024"
    assert option(created, "runtime-version") == "v2-alpha-tpuv5"
    assert option(created, "node-count") == "2"
    assert "--spot" in created
    assert (option(ssh, "worker"), option(ssh, "node")) == ("all", "all")
    assert int(option(ssh, "batch-size")) == job().topology().num_hosts == 256
    done = shell(option(ssh, "command").replace(shlex.join(WORDS), "env"), None)
    lines = done.stdout.decode().splitlines()
    (flags,) = job().environment().values()
    assert f"LIBTPU_INIT_ARGS={flags}" in lines


def test_queued_slices_without_a_name_of_cloud(tools: Path) -> None:
    text = render(small(accelerator="v5p:4x4x16"), "queued", command=WORDS, project="p", zone="z")
    created = call(text, tools)[0]
    assert (option(created, "type"), option(created, "topology")) == ("v5p", "4x4x16")
    assert option(created, "node-id") == "x"


def test_queued_in_docker(tools: Path) -> None:
    text = render(job(), "queued", command=[*WORDS, "a b"], image=IMAGE, project="p", zone="z")
    ssh = call(text, tools)[2]
    (run,) = call(option(ssh, "command"), tools)
    at = run.index(IMAGE)
    assert run[:4] == ["sudo", "docker", "run", "--rm"]
    assert run[at + 1 :] == [*WORDS, "a b"]
    (flags,) = job().environment().values()
    assert f"--env=LIBTPU_INIT_ARGS={flags}" in run[:at]


@pytest.mark.parametrize("state", ["FAILED", "SUSPENDED"])
def test_queued_gives_up(state: str, tools: Path) -> None:
    text = render(job(), "queued", command=WORDS, project="p", zone="z")
    (tools / "failed").write_text(f"{state}\n")
    done = shell(text, tools, CALLS="/dev/null", STATE=str(tools / "failed"))
    assert done.returncode == 1
    assert f"llama3-70b-v5p-2slices is {state}" in done.stderr.decode()


@pytest.mark.parametrize(
    ("name", "nodes", "per_node", "segment"),
    [
        ("llama3_70b_h100", 8, 8, None),
        ("llama3_70b_gb200", 18, 4, 18),
    ],
)
def test_slurm(name: str, nodes: int, per_node: int, segment: int | None, tools: Path) -> None:
    text = render(
        job(name), "slurm", command=WORDS, image=IMAGE, partition="big", account="me", time="1:00"
    )
    directives = dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(\S+))?$", text, re.MULTILINE))
    assert directives["nodes"] == str(nodes)
    assert directives["ntasks-per-node"] == directives["gpus-per-node"] == str(per_node)
    assert directives.get("segment") == (None if segment is None else str(segment))
    assert (directives["partition"], directives["account"], directives["time"]) == (
        "big",
        "me",
        "1:00",
    )
    # Slurm stops reading directives at the first line that is no comment.
    before = text.partition("\nset -euo")[0]
    assert all(line.startswith("#") for line in before.splitlines())
    (called,) = call(text, tools)
    assert option(called, "container-image") == IMAGE
    assert called[-len(WORDS) :] == WORDS


@pytest.mark.parametrize(
    ("accelerator", "node", "partition"),
    [("4xh100:8", "3", "3"), ("2xgb200:72", "19", "1"), ("gb200:72", "19", "")],
)
@pytest.mark.parametrize("launcher", ["slurm", "torchrun"])
def test_processes_know_their_slice(
    launcher: str, accelerator: str, node: str, partition: str, tools: Path
) -> None:
    show = ["bash", "-c", 'printf "%s\\0" "${JAX_PARTITION_INDEX-}" "${JAX_PROCESS_ID-}"']
    text = render(small(accelerator=accelerator), launcher, command=show)
    (called,) = call(text, tools, MASTER_ADDR="head", NODE_RANK=node)
    inside = called[called.index("bash") :]
    ranks = {"SLURM_NODEID": node, "GROUP_RANK": node, "RANK": "7", "LOCAL_RANK": "3"}
    ranks |= {"MASTER_ADDR": "head", "MASTER_PORT": "29500", "WORLD_SIZE": "32"}
    done = subprocess.run(inside, env=os.environ | ranks, capture_output=True, check=True)
    assert shown(done.stdout) == [partition, "7" if launcher == "torchrun" else ""]


def test_torchrun(tools: Path) -> None:
    text = render(job("llama3_70b_h100"), "torchrun", command=WORDS)
    (called,) = call(text, tools, MASTER_ADDR="head", NODE_RANK="3")
    assert option(called, "nnodes") == "8"
    assert option(called, "nproc-per-node") == "8"
    assert option(called, "node-rank") == "3"
    assert option(called, "master-addr") == "head"
    assert "--no-python" in called
    assert called[-len(WORDS) :] == WORDS


@pytest.mark.thorough
def test_torchrun_itself(tmp_path: Path) -> None:
    """The real one, with two processes on this machine."""
    torchrun = Path(sys.executable).parent / "torchrun"
    if not torchrun.exists():
        pytest.skip("torchrun is not installed")
    seen = '"$JAX_COORDINATOR_ADDRESS" "$JAX_NUM_PROCESSES" "$JAX_LOCAL_DEVICE_IDS" "$@"'
    shows = f'printf "%s\\0" {seen} > {tmp_path}/"$JAX_PROCESS_ID"'
    found = small(accelerator="h100:2")
    text = render(found, "torchrun", command=["bash", "-c", shows, "bash", *AWKWARD])
    done = shell(text, torchrun.parent, MASTER_ADDR="127.0.0.1", NODE_RANK="0", MASTER_PORT="29671")
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    for rank in ("0", "1"):
        told = shown((tmp_path / rank).read_bytes())
        assert told == ["127.0.0.1:29672", "2", rank, *AWKWARD]


# refusals


@pytest.mark.parametrize(
    ("name", "launcher", "changes", "message"),
    [
        ("llama3_8b_v5e", "jobsett", {}, r"no such launcher. Pass 'jobset', or one of xpk, queued"),
        ("llama3_8b_v5e", "slurm", {}, r"not start jobs on TPU v5e. Pass one of jobset, xpk, que"),
        ("llama3_8b_h100", "queued", {}, r"not start jobs on NVIDIA H100.*torchrun, slurm"),
        ("llama3_8b_v5e", "jobset", {"image": None}, r"without an image. Pods run.*Pass image="),
        ("llama3_8b_h100", "torchrun", {}, r"image='us-.*processes, not containers. Pass no image"),
        ("llama3_8b_v5e", "queued", {"zon": "z"}, r"no such option. Pass 'zone', or one of proj"),
        (
            "llama3_8b_h100",
            "torchrun",
            {"zone": "z"},
            r"no such option. Pass one of max_res",
        ),
        ("llama3_8b_v5e", "queued", {"zone": "a b"}, r"zone='a b'.*one word of printable ASCII"),
        ("llama3_8b_v5e", "queued", {"zone": ""}, r"zone=''.*one word"),
        ("llama3_8b_v5e", "queued", {"capacity": "cheap"}, r"'cheap'. .*Pass one of spot,"),
        ("llama3_8b_v5e", "jobset", {"max_restarts": "x"}, r"max_restarts='x'. That is no number"),
        ("llama3_8b_v5e", "jobset", {"image": "a b"}, r"image='a b'.*one word"),
        ("llama3_8b_v5e", "xpk", {"command": "python x.py"}, r"command='python x.py'. .*list of w"),
        ("llama3_8b_v5e", "xpk", {"command": []}, r"command=\[\].*one or more"),
        ("llama3_8b_v5e", "xpk", {"command": ["a", 3]}, r"command=\['a', 3\]"),
        ("llama3_8b_v5e", "xpk", {"command": ["a\0"]}, r"without the character 0"),
        ("llama3_8b_v5e", "xpk", {"command": ["\ud800"]}, r"a list of words"),
        (
            "llama3_8b_v5e",
            "xpk",
            {"env": {"A B": "c"}},
            r"variable 'A B'='c'. Names are of letters",
        ),
        ("llama3_8b_v5e", "xpk", {"env": {"A": 3}}, r"variable 'A'=3.*values are text"),
        (
            "llama3_8b_v5e",
            "xpk",
            {"env": {"A": '"'}},
            r"xpk writes values into YAML.*Pass 'jobset'",
        ),
        (
            "llama3_8b_v5e",
            "xpk",
            {"env": {"LIBTPU_INIT_ARGS": "--xla_a=1"}},
            r"XLA flags are in that variable. Write them under xla_flags: flags",
        ),
    ],
)
def test_refusals(name: str, launcher: str, changes: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"command": WORDS, "image": IMAGE, **changes}
    with pytest.raises(JobError, match=message) as caught:
        render(job(name), launcher, **arguments)
    assert str(caught.value).count(". ") >= 2


def test_slices_that_gke_does_not_join() -> None:
    with pytest.raises(JobError, match=r"GKE joins only slices of several hosts. Pass 'queued'"):
        render(small(accelerator="2xv6e:2x2"), "jobset", command=WORDS, image=IMAGE)
    assert "replicas: 1" in render(
        small(accelerator="v6e:2x2"), "jobset", command=WORDS, image=IMAGE
    )


def test_chips_without_names() -> None:
    found = small(accelerator="v3-32", wrap=[True, True])
    with pytest.raises(JobError, match=r"No label of GKE is known for TPU v3. Pass 'queued'"):
        render(found, "jobset", command=WORDS, image=IMAGE)
    with pytest.raises(JobError, match=r"runtime version of TPU v3.*Pass runtime_version="):
        render(found, "queued", command=WORDS)
    assert "--runtime-version=tpu-vm" in render(
        found, "queued", command=WORDS, runtime_version="tpu-vm"
    )
    with pytest.raises(JobError, match=r"xpk slice of TPU v3"):
        render(found, "xpk", command=WORDS)


def test_name_without_letters() -> None:
    with pytest.raises(JobError, match=r"no letter and no digit.*such as llama3-70b"):
        render(small(name="---"), "queued", command=WORDS)
