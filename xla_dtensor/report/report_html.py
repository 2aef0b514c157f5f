"""A report as one HTML file: nothing from outside, no script, for light and dark screens.

The order is that of the questions: does it fit, what is wrong, where does the memory go, who talks
to whom, how long does it take, how do the parameters lie; and at the end how it was made.
"""

from __future__ import annotations

from collections.abc import Iterator

from xla_dtensor.report.compile_report import CompileReport
from xla_dtensor.report.finding import Finding
from xla_dtensor.report.quantities import bytes_text, seconds_text, share_text
from xla_dtensor.report.report_document import NOT_FROM_COMPILER, finding_place
from xla_dtensor.report.report_html_charts import axis_bars, memory_bar, roofline_bars
from xla_dtensor.report.report_html_elements import Element, element, join, table_element
from xla_dtensor.report.report_html_sharding import sharding_pictures
from xla_dtensor.report.report_html_style import STYLE
from xla_dtensor.report.report_tables import (
    Table,
    axes_table,
    buffers_table,
    collectives_table,
    differing_table,
    made_by_table,
    memory_table,
    roofline_table,
    tensors_table,
)
from xla_dtensor.report.report_words import mesh_axes_text, step_words, verdict

__all__ = ["to_html"]

_WORDS = (
    ("device", "one chip, or one core where a chip shows as two devices"),
    ("mesh axis", "a named direction in which the devices are arranged, such as fsdp or tp"),
    ("ICI", "the fast links between the chips of one slice (pod)"),
    ("DCN", "the slower data centre network between slices"),
    ("temporaries", "what the step makes and drops: activations, gradients, gathered weights"),
    ("padding", "what the memory layout adds, since the hardware stores tiles"),
    ("all-gather", "each device gets the parts of all others: a sharded weight made whole"),
    ("reduce-scatter", "a sum over devices, of which each keeps its part: sharded gradients"),
    ("all-reduce", "a sum over devices that each of them gets whole"),
    ("MFU", "useful floating-point operations per second, as a share of the hardware's peak"),
    ("modelled", "computed from the speeds of the machine and the program; nothing was run"),
)


def to_html(report: CompileReport) -> str:
    """Writes a report as a page.

    Args:
        report: the report.

    Returns:
        The whole file.
    """
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("title", f"{report.title}: compile report"),
        Element((f"<style>{STYLE}</style>",)),
    )
    body = element("body", element("main", join(*_page(report))))
    page = element("html", head, body, lang="en")
    return f"<!DOCTYPE html>\n{page[0]}\n"


def _page(report: CompileReport) -> Iterator[Element | None]:
    machine = report.machine
    where = f"{machine.name}: {machine.words}" if machine.name else machine.words
    yield element("h1", report.title)
    yield element(
        "p",
        "What this training step will do on ",
        element("b", where),
        ". It was compiled for that machine, not run on it.",
        class_="quiet",
    )
    yield _cards(report)
    yield from _findings(report)
    yield from _memory(report)
    yield from _communication(report)
    yield from _time(report)
    yield from _layouts(report)
    if report.unread:
        yield element("h2", "What could not be read")
        yield element("ul", *(element("li", sentence) for sentence in report.unread))
    yield from _made(report)


def _cards(report: CompileReport) -> Element:
    memory, model = report.memory, report.roofline
    tone = {True: "good", False: "bad", None: "unknown"}[memory.fits]
    headline = {True: "Fits", False: "Does not fit", None: "Not known"}[memory.fits]
    cards = [
        _card("Does it fit?", headline, verdict(report).split(": ", 1)[-1], tone),
        _card(
            "Communication",
            bytes_text(report.collective_bytes),
            f"per device and step; {share_text(report.attribution.share)} of it has a mesh axis "
            "and a line of source"
            if report.collective_bytes
            else "no device talks to another",
        ),
        _card("Mesh", f"{report.machine.devices:,} devices", mesh_axes_text(report.mesh)),
    ]
    if model is not None:
        worst = seconds_text(model.step_seconds_no_overlap)
        mfu = "" if model.mfu is None else f"MFU {share_text(model.mfu)}, "
        words = f"{mfu}bound by {model.binding}; {worst} if nothing overlaps"
        cards.insert(1, _card("One step (modelled)", seconds_text(model.step_seconds), words))
    return element("div", *cards, class_="cards")


def _card(question: str, answer: str, words: str, tone: str | None = None) -> Element:
    classes = " ".join(word for word in ("card", tone) if word)
    return element(
        "div",
        element("span", question),
        element("b", answer),
        element("span", words),
        class_=classes,
    )


def _findings(report: CompileReport) -> Iterator[Element]:
    yield element("h2", "Findings")
    if not report.findings:
        yield element(
            "div",
            element("p", "Nothing to look at was found."),
            class_="finding none",
        )
    for finding in report.findings:
        yield _finding(finding)


def _finding(finding: Finding) -> Element:
    place = finding_place(finding)
    severity = finding.severity if finding.severity in ("error", "warning") else "note"
    return element(
        "div",
        element("span", finding.severity, class_="severity"),
        " ",
        element("b", finding.title),
        element("p", finding.detail) if finding.detail else None,
        element("p", element("b", "To try: "), finding.fix) if finding.fix else None,
        element("p", place, class_="quiet code") if place else None,
        class_=f"finding {severity}",
    )


def _memory(report: CompileReport) -> Iterator[Element]:
    yield element("h2", "Memory of one device")
    said = "" if report.memory.from_compiler else f" {NOT_FROM_COMPILER}"
    words = f"What each device holds at the worst moment of a step.{said}"
    yield element("p", words, class_="quiet")
    yield memory_bar(report)
    if report.memory.causes:
        yield element("h3", "The largest causes")
        yield element("ol", *(element("li", cause.text) for cause in report.memory.causes))
    yield _details("The same as a table", memory_table(report))
    if report.memory.largest:
        yield _details("The largest buffers, and what made them", buffers_table(report))


def _communication(report: CompileReport) -> Iterator[Element | None]:
    yield element("h2", "Communication of one step, per device")
    bars = axis_bars(report)
    if bars is None:
        yield element("p", "No device talks to another.")
        return
    yield element(
        "p",
        "Bytes that each device sends and receives together with the others along a mesh axis: of "
        "each collective the larger of what goes in and out, as often as it runs.",
        class_="quiet",
    )
    yield bars
    moving = [line for line in report.collectives if line.moves]
    yield element("h3", "The largest collectives, and the lines they were made for")
    yield table_element(collectives_table(moving, report))
    yield _details("By axis, network and phase", axes_table(report))
    rest = report.attribution.rest
    if 0 < len(rest) < len(moving):
        yield _details("Without an axis or a line of source", collectives_table(rest, report))


def _time(report: CompileReport) -> Iterator[Element | None]:
    yield element("h2", "Time of one step ", element("span", "modelled", class_="badge"))
    bars = roofline_bars(report)
    if bars is None:
        yield element("p", f"Not modelled: {report.no_roofline or 'nothing to model'}.")
        return
    yield element(
        "p",
        "How long each part of the machine would be busy if it did nothing else and wasted "
        "nothing. The longest binds. A model, not a measurement.",
        class_="quiet",
    )
    yield bars
    yield element("p", f"A step takes {step_words(report)}.")
    yield _details("The same as a table", roofline_table(report))
    for each in () if report.roofline is None else report.roofline.assumptions:
        yield element("p", f"Assumed: {each}.", class_="quiet")


def _layouts(report: CompileReport) -> Iterator[Element | None]:
    pictures = sharding_pictures(report)
    if pictures is not None:
        yield element("h2", "How the largest parameters lie on the mesh")
        yield element(
            "p",
            "Each box is a parameter, cut into the tiles that the devices hold. At the sides stand "
            "the places of those devices along the mesh axes. Blue is the tile of the first "
            "device; sheets behind a box are copies.",
            class_="quiet",
        )
        yield pictures
    if any(line.differs for line in report.tensors):
        yield element("h3", "Compiled otherwise than asked for")
        yield table_element(differing_table(report))
    if report.tensors:
        yield _details("All arrays that outlive a step, the largest first", tensors_table(report))


def _made(report: CompileReport) -> Iterator[Element]:
    yield element("h2", "How this was made")
    if report.command:
        yield element("pre", report.command)
    if report.flops is not None:
        yield element(
            "p",
            f"{report.flops:.4g} floating-point operations a step on all devices, recomputation "
            f"not counted; matrix products in {report.compute_dtype}.",
        )
    table = made_by_table(report)
    if table.rows:
        yield table_element(table)
    words = [part for word, text in _WORDS for part in (element("dt", word), element("dd", text))]
    yield element("details", element("summary", "Words"), element("dl", *words))


def _details(title: str, table: Table) -> Element:
    return element("details", element("summary", title), table_element(table))
