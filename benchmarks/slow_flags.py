"""What sets of XLA flags for on-chip memory cost libtpu, and what they do: docs/reports/flags.md.

    python -m benchmarks.slow_flags                            all: half an hour
    python -m benchmarks.slow_flags --only llama3_8b_v5e       goes on with what is kept
    python -m benchmarks.slow_flags --evidence FOLDER --index  rewrites the page from what is kept

For each chip one of its jobs is planned twice, with all flags that `launch` runs it with and
without the set. The model has the sizes of the reference model and 4 of its layers. CPU seconds are
those of the whole command. Nothing runs on a TPU.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from mesh_utils import JobConfig
from xla_dtensor.report.compile_report import CompileReport
from xla_dtensor.report.texts import bytes_text

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reports" / "flags.md"
MODELS = ROOT / "tpu_configs" / "models.yaml"
NUM_LAYERS = 4
LIMIT_SECONDS = 1800


@dataclass(frozen=True, slots=True)
class Case:
    """A job, and the set of flags in question.

    Attributes:
        job: its name in tpu_configs/jobs.
        flag_set: the set.
        model: a reference model, of which it takes 4 layers.
    """

    job: str
    flag_set: str
    model: str


CASES = (
    Case("llama3_8b_v5e", "dense-vmem", "llama3-8b"),
    Case("llama3_8b_v6e", "dense-vmem", "llama3-8b"),
    Case("llama3_70b_tpu7x", "dense-vmem", "llama3-8b"),
    Case("mixtral_8x7b_v5p", "moe-vmem", "mixtral-8x7b"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Compiles what is not kept, and writes the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.slow_flags", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--only", choices=[case.job for case in CASES], action="append")
    parser.add_argument("--evidence", type=Path, default=Path("out/slow_flags"))
    parser.add_argument("--index", action="store_true", help="compile nothing")
    asked = parser.parse_args(arguments)
    wanted = [case for case in CASES if asked.only is None or case.job in asked.only]
    if not asked.index:
        for case in wanted:
            for with_set in (False, True):
                folder = _folder(asked.evidence, case, with_set)
                if not (folder / "cpu_seconds.txt").exists():
                    compile_case(case, with_set, folder)
    PAGE.write_text(page(asked.evidence), encoding="utf-8")
    return 0


def _folder(evidence: Path, case: Case, with_set: bool) -> Path:
    return evidence / case.job / ("with" if with_set else "without")


def words_of(case: Case, with_set: bool, model: Path | str) -> list[str]:
    """Return the command line of a case, after ``plan``."""
    words = [case.job, "--model", str(model), "--all-flags"]
    return words if with_set else [*words, "--without-flags", case.flag_set]


def compile_case(case: Case, with_set: bool, folder: Path) -> None:
    """Runs one command, and keeps how long it took.

    Args:
        case: what to compile.
        with_set: with its set of flags, or without.
        folder: where the evidence goes.
    """
    folder.mkdir(parents=True, exist_ok=True)
    model = folder / "config.json"
    model.write_text(json.dumps(model_config(case.model)), encoding="utf-8")
    words = words_of(case, with_set, model)
    print(f"plan {' '.join(words)}", flush=True)
    command = [sys.executable, "-m", "xla_dtensor", "plan", *words, "--no-cache"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [*command, "--out", str(folder), "--time-limit", str(LIMIT_SECONDS)], check=False
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print(f"  {seconds:.0f} CPU seconds, exit status {done.returncode}", flush=True)
    if (folder / "report.json").exists():
        (folder / "cpu_seconds.txt").write_text(f"{seconds:.0f}\n", encoding="utf-8")


def model_config(name: str) -> Any:
    """Return a reference model's config.json, with 4 layers."""
    figures = yaml.safe_load(MODELS.read_text("utf-8"))["models"][name]["figures"].values()
    return {key: value for part in figures for key, value in part.items()} | {
        "num_hidden_layers": NUM_LAYERS
    }


def page(evidence: Path) -> str:
    """Write what is kept as a page.

    Args:
        evidence: what the commands left.

    Returns:
        Markdown.
    """
    return "\n".join([_HEAD, *_rows(evidence), "", *_differences(evidence)]).rstrip() + "\n"


def _kept(evidence: Path) -> Iterator[tuple[Case, list[CompileReport], list[int]]]:
    for case in CASES:
        folders = [_folder(evidence, case, with_set) for with_set in (False, True)]
        if all((folder / "cpu_seconds.txt").exists() for folder in folders):
            yield (
                case,
                [CompileReport.load(folder / "report.json") for folder in folders],
                [int((folder / "cpu_seconds.txt").read_text("utf-8")) for folder in folders],
            )


def _rows(evidence: Path) -> Iterator[str]:
    for case, _, (without, with_set) in _kept(evidence):
        accelerator = JobConfig.load(case.job).accelerator
        yield (
            f"| {accelerator} | {case.flag_set} | {case.model} | {without} | {with_set} "
            f"| {with_set / without:.1f} |"
        )


def _differences(evidence: Path) -> Iterator[str]:
    for case, (without, with_set), _ in _kept(evidence):
        changes = without.diff(with_set)
        yield f"## {case.job}, {case.model}: without {case.flag_set}, and with it"
        yield ""
        titles = "Memory of one device", "Communication of one step, per device"
        for title, rows in zip(titles, (changes.memory, changes.collectives), strict=True):
            yield f"| {title} | without | with |"
            yield "| --- | ---: | ---: |"
            for row in rows:
                yield f"| {row.what} | {bytes_text(row.before)} | {bytes_text(row.after)} |"
            yield ""


_HEAD = """# Sets of XLA flags that cost the compiler time

Written by `python -m benchmarks.slow_flags`. `plan` leaves out sets of flags that are slow to
compile, `launch` runs with them, and `plan --all-flags` compiles what `launch` runs. Here a job of
each chip was compiled both ways by libtpu, with 4 layers of the model; nothing ran on a TPU. CPU
seconds are those of the whole command, on two cores.

| machine | set | model, 4 layers | CPU s without | CPU s with | factor |
| --- | --- | --- | ---: | ---: | ---: |"""


if __name__ == "__main__":
    raise SystemExit(main())
