"""What a run of the named tests says of a mutant.

`killed`    a named test failed in its own call, which an assertion or an error of the library did
`SURVIVED`  all named tests passed, were skipped, or are no part of the suite that must find it
`broken`    the mutant is no such fault: the package did not import, a name is unknown, a fixture
            failed, the process ended, or time was up
`not tried` the interpreter has another version of a package than the mutant needs
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from tools.mutants.mutant import Mutant
from tools.mutants.trial import Run

__all__ = [
    "BROKEN",
    "KILLED",
    "NOT_TRIED",
    "SURVIVED",
    "Verdict",
    "baseline_faults",
    "judge",
    "not_tried",
]

KILLED, SURVIVED, BROKEN, NOT_TRIED = "killed", "SURVIVED", "broken", "not tried"
_NO_TEST_WAS_CHOSEN = 5  # pytest's exit status
_OF_THE_TEXT = ("CollectError", "ImportError", "ModuleNotFoundError", "NameError", "SyntaxError")


@dataclass(frozen=True)
class Verdict:
    """How one mutant fared.

    Args:
        id: The mutant's.
        verdict: `killed`, `SURVIVED`, `broken` or `not tried`.
        by: The test that found it, or the one that says why not.
        why: Its error, in a line.
        seconds: Wall time of the tests.
        kind: The mutant's.
        area: The mutant's.
        runtime: The mutant's.
    """

    id: str
    verdict: str
    by: str
    why: str
    seconds: float
    kind: str
    area: str
    runtime: str

    def as_data(self) -> dict[str, object]:
        """Return plain data for JSON."""
        return asdict(self)


def judge(mutant: Mutant, run: Run) -> Verdict:
    """Judge a run of the mutant's tests."""
    return _of(mutant, *_judged(run), run.seconds)


def not_tried(mutant: Mutant, why: str) -> Verdict:
    """Return the verdict on a mutant that cannot be seen here."""
    return _of(mutant, NOT_TRIED, "", why, 0.0)


def _of(mutant: Mutant, verdict: str, by: str, why: str, seconds: float) -> Verdict:
    kinds = mutant.kind, mutant.area, mutant.runtime
    return Verdict(mutant.id, verdict, by, why, round(seconds, 1), *kinds)


def _judged(run: Run) -> tuple[str, str, str]:
    for ending in run.endings:
        if ending.outcome in ("failed", "broken"):
            is_fault = ending.outcome == "failed" and ending.error not in _OF_THE_TEXT
            why = f"{ending.error}: {ending.text}"
            return KILLED if is_fault else BROKEN, ending.test, why
    if run.status == 0:
        return SURVIVED, "", "all named tests passed, or were skipped"
    if run.status == _NO_TEST_WAS_CHOSEN:
        return SURVIVED, "", "none of the named tests is part of the contract"
    last = run.tail.strip().splitlines()[-1:] or [""]
    why = "time was up" if run.status is None else f"exit status {run.status}: {last[0]}"
    return BROKEN, "", why


def baseline_faults(tests: tuple[str, ...], run: Run) -> list[str]:
    """Return what is wrong with a run without a mutant, in which each named test has to pass."""
    faults = [
        f"{ending.test} {ending.outcome} without a mutant: {ending.error} {ending.text}"
        for ending in run.endings
        if ending.outcome != "passed"
    ]
    passed = [ending.test for ending in run.endings if ending.outcome == "passed"]
    faults += [
        f"{test} did not run without a mutant"
        for test in tests
        if not any(name == test or name.startswith((f"{test}[", f"{test}::")) for name in passed)
    ]
    if run.status != 0 and not faults:
        faults.append(f"pytest ended with {run.status} without a mutant: {run.tail[-500:]}")
    return faults
