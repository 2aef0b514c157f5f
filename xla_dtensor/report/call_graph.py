"""How often each computation of an HLO module runs, and which run in loops.

Each call multiplies: a computation called from a loop of 4 inside a loop of 3 runs 12 times. Of a
conditional every branch is counted, as if taken.
"""

import re
from dataclasses import dataclass

from xla_dtensor.report.hlo_module import Computation, HloModule, Instruction
from xla_dtensor.report.trip_count import trip_count

_CALLED = re.compile(
    r"\b(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)"
)
_CALLED_LIST = re.compile(r"\b(?:branch_computations|called_computations|calls)=\{([^{}]*)\}")
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"')
_CALLERS = ("fusion", "call", "while", "conditional", "custom-call", "async-start", "call-start")


@dataclass(frozen=True, slots=True)
class Runs:
    """How a computation runs.

    Attributes:
        times: how often in one run of the program; None if a loop around it has no known count.
        in_loop: whether a while loop is around it.
        caller: the instruction that calls it; None for the entry. The last one, if several do.
        calling: the name of the computation in which that stands; "" for the entry.
    """

    times: int | None
    in_loop: bool
    caller: Instruction | None
    calling: str = ""


def computation_runs(module: HloModule) -> dict[str, Runs]:
    """Counts the runs of every computation.

    Args:
        module: the module.

    Returns:
        The runs by the name of the computation. One that nothing calls runs once.

    Example:
        >>> module = HloModule.parse('''HloModule m
        ... ENTRY %main () -> s32[] {
        ... }''')
        >>> computation_runs(module)["main"].times
        1
    """
    calls: dict[str, list[tuple[str, Instruction, int | None]]] = {}
    for computation in module.computations.values():
        for instruction in computation.instructions.values():
            if instruction.opcode in _CALLERS:
                trips = _trips(module, computation, instruction)
                for called in called_computations(instruction):
                    calls.setdefault(called, []).append((computation.name, instruction, trips))
    runs: dict[str, Runs] = {}
    for name in module.computations:
        _count(name, calls, runs)
    return runs


def called_computations(instruction: Instruction) -> tuple[str, ...]:
    """Lists the computations that an instruction calls.

    Args:
        instruction: any instruction.

    Returns:
        Their names, without %.
    """
    text = _QUOTED.sub('""', instruction.rest)
    names = _CALLED.findall(text)
    for listed in _CALLED_LIST.findall(text):
        names += [name.strip().removeprefix("%") for name in listed.split(",") if name.strip()]
    return tuple(names)


def _trips(module: HloModule, caller: Computation, instruction: Instruction) -> int | None:
    return trip_count(module, caller, instruction) if instruction.opcode == "while" else 1


def _count(
    name: str,
    calls: dict[str, list[tuple[str, Instruction, int | None]]],
    runs: dict[str, Runs],
) -> Runs:
    if name in runs:
        return runs[name]
    # What calls itself, which no program does, is taken to run an unknown number of times.
    runs[name] = Runs(None, False, None)
    found = Runs(0, False, None) if name in calls else Runs(1, False, None)
    for calling, instruction, trips in calls.get(name, ()):
        outer = _count(calling, calls, runs)
        times = None
        if found.times is not None and outer.times is not None and trips is not None:
            times = found.times + outer.times * trips
        in_loop = found.in_loop or outer.in_loop or instruction.opcode == "while"
        found = Runs(times, in_loop, instruction, calling)
    runs[name] = found
    return found
