"""Which temporaries are in a device's memory when they take the most: an estimate.

The arrays that live at each moment are known from the schedule (see value_flow.py); where the
compiler puts them is not. The estimate is the sum of those that live at the worst moment. The
compiler's figure is larger where gaps between arrays cannot be used, and smaller where it puts
temporaries into memory that results take later.
"""

from dataclasses import dataclass

from xla_dtensor.report.hlo_layout import DEVICE_SPACE
from xla_dtensor.report.hlo_module import HloModule, Instruction
from xla_dtensor.report.hlo_shape import ArrayShape
from xla_dtensor.report.value_flow import Value, ValueFlow

__all__ = ["LiveBuffer", "LivePeak", "live_peak"]


@dataclass(frozen=True, slots=True)
class LiveBuffer:
    """A temporary array.

    Attributes:
        bytes: what it takes in memory, tiles filled up.
        shape: dtype and dims.
        instruction: what makes it: of several values in one place, the largest's; of equal ones
            the first that says what it is for, which a loop and an empty buffer do not.
    """

    bytes: int
    shape: ArrayShape
    instruction: Instruction


@dataclass(frozen=True, slots=True)
class LivePeak:
    """The moment when the temporaries take the most.

    Attributes:
        bytes: what they take then.
        buffers: those that live then, the largest first.
        all_bytes: what all temporaries would take without sharing any memory.
    """

    bytes: int = 0
    buffers: tuple[LiveBuffer, ...] = ()
    all_bytes: int = 0


def live_peak(module: HloModule) -> LivePeak:
    """Finds the moment when a program's temporaries take the most.

    Args:
        module: a scheduled module (`is_scheduled=true`), read whole.

    Returns:
        The peak; 0 bytes of a module without temporaries.

    Example:
        >>> text = '''HloModule m, is_scheduled=true
        ... ENTRY %main (p: f32[8]) -> f32[8] {
        ...   %p = f32[8]{0} parameter(0)
        ...   %a = f32[8]{0} negate(%p)
        ...   ROOT %b = f32[8]{0} add(%a, %p)
        ... }'''
        >>> live_peak(HloModule.parse(text)).bytes
        32
    """
    flow = ValueFlow.of(module)
    kept = {flow.group(number) for number in flow.results}
    kept |= {flow.group(number) for number, value in enumerate(flow.values) if value.is_input}
    steps: list[tuple[int, int, int]] = []
    sizes: dict[int, int] = {}
    groups = {group: values for group, values in flow.groups().items() if group not in kept}
    for group, values in groups.items():
        sizes[group] = max(_bytes(value) for value in values)
        if sizes[group]:
            for birth, death in _spans(values):
                steps += [(birth, 1, group), (death + 1, 0, group)]
    alive: set[int] = set()
    best: set[int] = set()
    most = now = 0
    for _, begins, group in sorted(steps):
        if begins:
            alive.add(group)
            now += sizes[group]
            if now > most:
                most, best = now, set(alive)
        else:
            alive.discard(group)
            now -= sizes[group]
    buffers = [_buffer(groups[group]) for group in best]
    buffers.sort(key=lambda buffer: (-buffer.bytes, buffer.instruction.name))
    return LivePeak(most, tuple(buffers), sum(sizes.values()))


def _bytes(value: Value) -> int:
    made_by = value.instruction.opcode
    if value.array.space != DEVICE_SPACE or made_by == "constant":
        return 0
    return value.array.padded_bytes


def _spans(values: list[Value]) -> list[tuple[int, int]]:
    """When one of them lives: spans that do not overlap."""
    spans: list[tuple[int, int]] = []
    for birth, death in sorted((value.birth, value.death) for value in values):
        if spans and birth <= spans[-1][1] + 1:
            spans[-1] = (spans[-1][0], max(death, spans[-1][1]))
        else:
            spans.append((birth, death))
    return spans


def _buffer(values: list[Value]) -> LiveBuffer:
    largest = max(values, key=lambda value: (_bytes(value), _is_named(value)))
    return LiveBuffer(_bytes(largest), largest.array.shape, largest.instruction)


def _is_named(value: Value) -> bool:
    text = value.instruction.rest
    return (
        value.instruction.opcode != "while" and "AllocateBuffer" not in text and "op_name=" in text
    )
