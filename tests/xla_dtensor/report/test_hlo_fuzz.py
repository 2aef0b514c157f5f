"""Programs with faults in them: nothing but an HloError is raised, and what is lost is told."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from mesh_utils import Mesh, Topology, assign
from tests.xla_dtensor.report.golden_programs import GOLDEN, PROGRAMS
from xla_dtensor.report.findings import findings
from xla_dtensor.report.hlo_text import HloError
from xla_dtensor.report.reading import collectives, read_hlo
from xla_dtensor.report.report import Evidence, Held
from xla_dtensor.report.roofline import roofline

NAMES = sorted(path.stem for path in GOLDEN.glob("*.hlo"))
ROUNDS = 8
MOST_LINES = 160

NUMBERS = ("0", "1", "-1", "7", "00", "99999999999", "9" * 30, "9" * 5000, "x", "٣")
PIECES = ("{", "}", "(", ")", "[", "]", ",", "=", "%", '"', "\\", "->", "<=", "é", "\x00", "\n")


def change_number(text: str, rng: random.Random) -> str:
    places = list(re.finditer(r"\d+", text))
    place = rng.choice(places)
    return text[: place.start()] + rng.choice(NUMBERS) + text[place.end() :]


def change_groups(text: str, rng: random.Random) -> str:
    places = list(
        re.finditer(r"(?<=replica_groups=)[^ ]*|(?<=pairs=)[^ ]*|num_partitions=\d+", text)
    )
    if not places:
        return change_number(text, rng)
    place = rng.choice(places)
    changed = change_number(place[0] + "0", rng)
    return text[: place.start()] + changed + text[place.end() :]


def cut(text: str, rng: random.Random) -> str:
    start = rng.randrange(len(text))
    return text[:start] + text[start + rng.randrange(1, 200) :]


def end(text: str, rng: random.Random) -> str:
    return text[: rng.randrange(len(text))]


def insert(text: str, rng: random.Random) -> str:
    start = rng.randrange(len(text))
    return text[:start] + rng.choice(PIECES) * rng.choice((1, 1, 2, 3000)) + text[start:]


def swap_lines(text: str, rng: random.Random) -> str:
    lines = text.split("\n")
    one, other = rng.randrange(len(lines)), rng.randrange(len(lines))
    lines[one], lines[other] = lines[other], lines[one]
    return "\n".join(lines)


def repeat_line(text: str, rng: random.Random) -> str:
    lines = text.split("\n")
    lines.insert(rng.randrange(len(lines)), rng.choice(lines))
    return "\n".join(lines)


def swap_words(text: str, rng: random.Random) -> str:
    words = re.findall(r"[\w.\-]{3,}", text)
    return text.replace(rng.choice(words), rng.choice(words), rng.choice((1, 2, -1)))


MUTATIONS: tuple[Callable[[str, random.Random], str], ...] = (
    *(change_number, change_groups, cut, end, insert, swap_lines, repeat_line, swap_words),
)


def part_of(text: str, rng: random.Random) -> str:
    """The header and some of the lines that follow each other: a long program is slow to change."""
    lines = text.split("\n")
    if len(lines) <= MOST_LINES:
        return text
    start = rng.randrange(1, len(lines) - MOST_LINES)
    return "\n".join([lines[0], *lines[start : start + MOST_LINES]])


def place_of(name: str) -> tuple[Topology, Mesh]:
    program = PROGRAMS.get(name.removeprefix("plan_"))
    if program is not None:
        return program.parsed, program.mesh
    if name == "tpu_two_slices":
        topology = Topology.parse("2xv5e:4x4")
        return topology, assign(topology, (4, 4), (2, 1), axis_names=("dp", "tp")).mesh
    shape, box = {
        "tpu_v5e_train": ((4, 4), "v5e:4x4"),
        "tpu_v5p_train": ((16, 4), "v5p:4x4x4"),
    }.get(name, ((2, 4), "v5e:2x4"))
    return Topology.parse(box), assign(Topology.parse(box), shape, axis_names=("dp", "tp")).mesh


@pytest.mark.parametrize("name", NAMES)
def test_a_program_with_faults_is_read_as_far_as_it_goes(name: str) -> None:
    text = (Path(GOLDEN) / f"{name}.hlo").read_text()
    topology, mesh = place_of(name)
    weight = Held("w", "parameter", (1024, 512), "bf16", (64, 512), input=0)
    rng = random.Random(name)
    for mutation in MUTATIONS:
        for _ in range(ROUNDS):
            broken = part_of(text, rng)
            for _ in range(rng.randrange(1, 4)):
                broken = mutation(broken, rng) or "HloModule m"
            evidence = Evidence("broken", broken, mesh, topology, (weight,), flops=1e12)
            reading = read_hlo(broken, mesh, evidence.granules)
            try:
                found = collectives(broken, mesh, evidence.granules)
            except HloError:
                # What the strict reader refuses, the other one says.
                assert reading.unread
            else:
                assert reading.collectives == found
            findings(evidence, None, (), roofline(evidence, reading.collectives))


HEAD = "HloModule m, num_partitions=4\nENTRY %main (p: f32[8]) -> f32[8] {\n"
SUM = "%sum = f32[8]{0} all-reduce(%p), channel_id=1, replica_groups="
P = "  %p = f32[8]{0} parameter(0)\n"


def test_what_cannot_be_read_is_told() -> None:
    text = f"{HEAD}{P}  {SUM}[1,4]<=[4]\n  ?? nothing like an instruction\n  {SUM}<new>\n}}\n"
    text = text.replace("%sum", "%first", 1)
    reading = read_hlo(text, Mesh.arange((4,), ("dp",)))
    assert [item.name for item in reading.collectives] == ["first"]
    assert [each.where for each in reading.unread] == [
        "main, '?? nothing like an instruction'",
        "main, %sum",
    ]
    (finding,) = findings(Evidence("t", text, Mesh.arange((4,), ("dp",))))
    assert (finding.code, finding.severity) == ("hlo-unread", "note")
    assert "2 parts" in finding.title
    assert "main, %sum" in finding.detail


def test_a_program_that_ends_too_early_is_told() -> None:
    reading = read_hlo(f"{HEAD}{P}")
    assert reading.unread[0].why == "its closing bracket is not there" or reading.unread
    assert read_hlo("no program").unread[0].where == "the whole program"


def test_another_mesh_leaves_the_axes_out() -> None:
    reading = read_hlo(f"{HEAD}{P}  {SUM}[1,4]<=[4]\n}}\n", Mesh.arange((3,), ("dp",)))
    assert reading.collectives[0].axes is None
    assert "mesh axes" in reading.unread[0].where


def test_constants_of_several_lines_are_no_loss() -> None:
    constant = "  %c = f32[2,2]{1,0} constant({\n    { 1, -2.5e-3 },\n    { nan, inf }\n  })\n"
    reading = read_hlo(f"{HEAD}{P}{constant}  {SUM}[1,4]<=[4]\n}}\n")
    assert (len(reading.collectives), reading.unread) == (1, ())


@pytest.mark.parametrize(
    "groups",
    [
        "[99999999999]<=[99999999999]",
        "[1]<=[" + ",".join(["1"] * 70) + "]",
        "mesh['x'=9999999999] {'x'}",
    ],
)
def test_groups_that_no_machine_has_are_refused_before_they_are_made(groups: str) -> None:
    with pytest.raises(HloError, match=r"The replica groups .* were given\. .*\. Pass"):
        collectives(f"{HEAD}{P}  {SUM}{groups}\n}}\n")


def test_a_program_of_too_many_devices_is_refused() -> None:
    with pytest.raises(HloError, match=r"has 1e\+11 devices, more than any machine\. Pass"):
        collectives("HloModule m, num_partitions=100000000000\n")
