r"""Instructions that XLA prints over several lines, put together again.

XLA writes an instruction into one line, except where an attribute holds line breaks of its own, as
the metadata of a Pallas kernel does:

    %a = f32[8]{0} custom-call(%p), frontend_attributes={kernel_metadata={
    "xprof_metadata":"{\"block_q\": 512}"
    }}, metadata={op_name="jit(f)/pallas_call"}

A line whose brackets stay open goes on until they are closed. One that is never closed is left as
it is, for who reads it to say so.
"""

import re
from collections.abc import Iterator, Sequence

__all__ = ["whole_lines"]

_BEGINS = re.compile(r"\s*(?:ROOT )?%?[\w.\-]+ = ")
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"')
_MOST_LINES = 256


def whole_lines(lines: Sequence[str]) -> Iterator[str]:
    """Puts the lines of an instruction together.

    Args:
        lines: those of a module.

    Yields:
        The lines, fewer of them.

    Example:
        >>> list(whole_lines(["%a = f32[] add(%b), x={y={", '"z": "}"', "}}, c=d", "}"]))
        ['%a = f32[] add(%b), x={y={ "z": "}" }}, c=d', '}']
    """
    at = 0
    while at < len(lines):
        size = _length(lines, at)
        yield lines[at] if size == 1 else " ".join(lines[at : at + size])
        at += size


def _length(lines: Sequence[str], at: int) -> int:
    """How many lines an instruction has; 1 for all else."""
    first = lines[at]
    if first.count("{") == first.count("}") or not _BEGINS.match(first):
        return 1
    depth = 0
    for size, line in enumerate(lines[at : at + _MOST_LINES], 1):
        if size > 1 and (_BEGINS.match(line) or line.strip() == "}"):
            return 1  # the next instruction, or the end of the computation
        bare = _QUOTED.sub("", line)
        depth += bare.count("{") - bare.count("}")
        if depth <= 0:
            return size
    return 1
