"""The HTML report: one file, nothing from outside, and whatever a name says stays text."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh_utils import Mesh
from tests.xla_dtensor.report.sample_evidence import GIB, WEIGHT, evidence, mlp_evidence
from xla_dtensor.report import Evidence
from xla_dtensor.report.compile_report import CompileReport
from xla_dtensor.report.finding import Finding, Origin
from xla_dtensor.report.hlo import SourceLine

VOID = {"meta", "br"}
DRAWN = {"rect", "line"}


class Page(HTMLParser):
    """Reads a page strictly: every tag is closed in order, every name is one of ours."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.links: list[str] = []
        self.words = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        for name, value in attrs:
            self.attributes.add(name)
            if name in ("href", "src", "xlink:href") or "url(" in (value or ""):
                self.links.append(value or "")
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words += data


@pytest.fixture(scope="module")
def report() -> CompileReport:
    return CompileReport.of(evidence())


TAGS = {
    *("html", "head", "meta", "title", "style", "body", "main", "h1", "h2", "h3", "p", "b", "div"),
    *("span", "svg", "g", "rect", "text", "line", "ul", "ol", "li", "details", "summary", "table"),
    *("thead", "tbody", "tr", "th", "td", "figure", "figcaption", "pre", "dl", "dt", "dd"),
}


def test_it_needs_nothing_from_outside_and_runs_nothing(report: CompileReport) -> None:
    text = report.to_html()
    page = Page(text)
    assert page.tags <= TAGS
    assert page.links == []
    assert not re.search(r"https?:|@import|url\(|<script|javascript", text)
    assert not [name for name in page.attributes if name.startswith("on")]


def test_it_says_what_there_is_to_say(report: CompileReport) -> None:
    words = Page(report.to_html()).words
    for sentence in (
        "two layers",
        "v5e:4x4: TPU v5e, 16 chips (4 x 4), 4 hosts",
        "Findings",
        "embed.weight",
        "train.py:19",
        "modelled",
        "layers.*.w1.weight",
        "dim 0: 1,024 by dp 4",
        "each device holds 256 x 1,024, 512 KiB",
        "python -m xla_dtensor plan job.yaml",
        "libtpu",
    ):
        assert sentence in words, sentence
    assert words.index("Does it fit?") < words.index("Findings") < words.index("Memory of one")


@pytest.mark.parametrize(
    ("temporaries", "headline"), [(3 * GIB, "Fits"), (30 * GIB, "Does not fit")]
)
def test_the_verdict_is_on_top(temporaries: int, headline: str) -> None:
    text = CompileReport.of(evidence(temporaries=temporaries)).to_html()
    assert f"<b>{headline}</b>" in text.partition("Findings")[0]


def test_parts_between_slices_stand_out() -> None:
    text = CompileReport.of(evidence("tpu_two_slices")).to_html()
    assert "between slices (DCN)" in text
    assert 'class="row dcn"' in text
    assert "dp (2 of 8)" in text


def test_a_real_program_has_a_picture_of_each_parameter() -> None:
    report = CompileReport.of(mlp_evidence())
    text = report.to_html()
    assert text.count("<figure>") == 2
    assert text.count('class="tile first"') == 2
    # 4 x 4 tiles, of which one is filled.
    assert text.count('class="tile"') == 2 * 15
    assert report.memory.unexplained_bytes == 0
    assert "the compiler did not say" in text


def test_large_axes_are_abridged_and_copies_are_sheets() -> None:
    line = replace(WEIGHT, shape=(4096, 64), device_shape=(16, 64), requested=None, input=None)
    line = replace(line, chosen="Shard(0), Replicate()", output=None)
    mesh = Mesh.arange((256, 2), ("fsdp", "tp"))
    text = CompileReport.of(Evidence("t", "HloModule m", mesh, held=(line,))).to_html()
    assert "fsdp 255" in text
    assert "fsdp 100" not in text
    assert text.count('class="sheet"') == 2
    assert "copied along tp 2" in text


HOSTILE = st.text(max_size=20) | st.sampled_from(
    ["</style><script>alert(1)</script>", '" onload="x', "<svg/onload=x>", "&lt;", "]]>", "<!--"]
)


@given(HOSTILE, HOSTILE, HOSTILE)
def test_no_name_becomes_markup(one: str, two: str, three: str) -> None:
    origin = Origin(one, "forward", two, SourceLine(three, 1))
    given = CompileReport.of(evidence())
    lines = [replace(line, origin=origin, kind=two) for line in given.collectives]
    lines[0] = replace(lines[0], axes=(one, two))
    hostile = replace(
        given,
        title=one,
        command=two,
        machine=replace(given.machine, name=three, words=one),
        mesh=tuple(replace(axis, name=f"{two}{i}") for i, axis in enumerate(given.mesh)),
        findings=(Finding("error", one, two, three, one, origin),),
        collectives=tuple(lines),
        tensors=tuple(replace(line, name=one + line.name) for line in given.tensors),
        versions={one: two},
        options={two: three},
        attributes={three: one},
        unread=(one, two),
    )
    text = hostile.to_html()
    page = Page(text)
    assert page.tags <= TAGS
    assert page.links == []
    assert not [name for name in page.attributes if name.startswith("on")]
    assert text.encode()
    assert hostile.to_markdown().encode()
    assert CompileReport.from_json(hostile.to_json()) == hostile
