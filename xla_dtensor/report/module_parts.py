"""Which part of a collective is whose, where XLA has made one of several.

XLA combines small collectives: the gradients of all layers become one all-reduce with an operand
for each. Its name then lists theirs, in the order of the operands:

    jit(step)/(reduce_sum:backward/Net/up/dot_general:backward/Net/down/dot_general)

Where there are as many names as arrays, each array is one name's. (Equal names are not dropped:
seen in programs of XLA for CPU.) Where the numbers differ, nobody can tell.
"""

from __future__ import annotations

from xla_dtensor.report.attribution import Origin, origin_of
from xla_dtensor.report.collective import Collective

__all__ = ["named_parts", "names_of", "parts_of"]


def names_of(op_name: str | None) -> tuple[str, ...]:
    """Lists the names in the name of an instruction.

    Args:
        op_name: as the compiler's metadata has it.

    Returns:
        The names, each with what stands before all of them; one where XLA has combined nothing.

    Example:
        >>> names_of("jit(f)/(mul:backward/Net/dot_general)")
        ('jit(f)/mul', 'jit(f)/backward/Net/dot_general')
    """
    if not op_name:
        return ()
    if not op_name.endswith(")"):
        return (op_name,)
    depth = 0
    for place in range(len(op_name) - 1, -1, -1):
        depth += (op_name[place] == ")") - (op_name[place] == "(")
        if depth == 0:
            before, inside = op_name[:place], op_name[place + 1 : -1]
            if before and not before.endswith("/"):
                return (op_name,)  # jit(f), transpose(jvp(f)): a call, not a list
            return tuple(before + name for name in _split(inside))
    return (op_name,)


def named_parts(collective: Collective) -> tuple[tuple[str | None, int], ...]:
    """Says for what each array of a collective was made.

    Args:
        collective: any; a combined one has several arrays.

    Returns:
        Names, and the bytes of one device in one run; together the collective's payload. The first
        name for everything where it is not known which array is whose.
    """
    names = names_of(collective.op_name)
    results = collective.result_bytes >= collective.operand_bytes
    arrays = collective.results if results else collective.operands
    if len(names) < 2 or len(names) != len(arrays):
        return ((names[0] if names else None, collective.payload_bytes),)
    return tuple((name, array.bytes) for name, array in zip(names, arrays, strict=True))


def parts_of(collective: Collective) -> tuple[tuple[Origin, int], ...]:
    """Says whose each array of a collective is.

    Args:
        collective: any; a combined one has several arrays.

    Returns:
        Origins, and the bytes as in `named_parts`.
    """
    # The one line of source that a combined collective has is that of its first part.
    return tuple(
        (origin_of(name, collective.source if place == 0 else ()), size)
        for place, (name, size) in enumerate(named_parts(collective))
    )


def _split(text: str) -> list[str]:
    names, depth = [""], 0
    for letter in text:
        depth += (letter == "(") - (letter == ")")
        if letter == ":" and depth == 0:
            names.append("")
        else:
            names[-1] += letter
    return [name for name in names if name]
