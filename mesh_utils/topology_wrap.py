"""Settles the wrap and the twist of a slice: said by the caller, or by the table of real slices."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import SupportsIndex

from mesh_utils.errors import TopologyError
from mesh_utils.hardware import Chip
from mesh_utils.mesh_input import as_integer
from mesh_utils.slice_table import Shape3, Wrap3
from mesh_utils.topology_name import shape_text

_MOST = 1 << 20  # of slices, hosts or chips: far more than were ever built


@dataclass(frozen=True)
class Links:
    """What was settled.

    Attributes:
        wrap: for each dim whether it wraps; None where it is not known.
        twist: whether the slice is a twisted torus.
        is_real: whether it is a slice that can be had.
        assumptions: what was taken without being said.
    """

    wrap: Wrap3 | None
    twist: bool
    is_real: bool
    assumptions: tuple[str, ...] = ()


def settle_links(
    name: str,
    chip: Chip | None,
    shape: Shape3,
    wrap: Sequence[bool] | None,
    twist: bool | None,
    allow_unreal: bool,
) -> Links:
    """Settles wrap and twist of a whole slice.

    Args:
        name: the topology, as it was asked for.
        chip: the chip; None where it is not known, and then nothing is looked up.
        shape: the chips of the slice.
        wrap: what the caller says of the wrap.
        twist: what the caller says of the twist.
        allow_unreal: whether the slice may be none that can be had.

    Returns:
        What holds.

    Raises:
        TopologyError: no real slice, or not with that wrap or twist.
    """
    said = read_wrap(name, wrap, shape)
    real = chip is not None and chip.slices.is_real(shape)
    if chip is not None and not real and not allow_unreal:
        _refuse_unreal(name, chip, shape)
    known = chip.slices.wrap(shape) if chip is not None else None
    if chip is not None and known is not None and said not in (None, known) and not allow_unreal:
        raise TopologyError(
            f"Topology {name!r} was asked for with wrap={said}. A slice of {_text(chip, shape)} of "
            f"{chip.title} has wrap={known} ({chip.slices.source}). "
            "Leave wrap out, or pass allow_unreal=True."
        )
    settled = known if said is None else said
    assumptions: tuple[str, ...] = ()
    if twist is None and chip is not None and chip.slices.twists(shape):
        assumptions = (
            f"twist=False: this slice can be a twisted torus, and {name!r} does not say",
        )
    if twist:
        _refuse_twist(name, chip, shape, settled, allow_unreal)
    return Links(settled, bool(twist), real and said in (None, known), assumptions)


def read_wrap(name: str, wrap: Sequence[bool] | None, shape: Shape3) -> Wrap3 | None:
    """Reads a wrap.

    Args:
        name: the topology, for the message.
        wrap: up to three flags; dims beyond them do not wrap.
        shape: the chips of the box; dims of one or two chips do not wrap.

    Returns:
        The flags; None for None.

    Raises:
        TopologyError: they are no flags.
    """
    if wrap is None:
        return None
    flags = tuple(wrap) if isinstance(wrap, (tuple, list)) else ()
    if not 1 <= len(flags) <= 3 or any(flag not in (True, False) for flag in flags):
        raise TopologyError(
            f"Topology {name!r} was asked for with wrap={wrap!r}. That is no flag for each dim. "
            "Pass up to three, in x, y and z, such as (True, True, False)."
        )
    padded = (*(bool(flag) for flag in flags), False, False)
    return (
        padded[0] and shape[0] > 2,
        padded[1] and shape[1] > 2,
        padded[2] and shape[2] > 2,
    )


def read_shape(name: str, given: Sequence[SupportsIndex]) -> Shape3:
    """Reads a box of chips.

    Args:
        name: the argument, for the message.
        given: up to three positive integers.

    Returns:
        Chips in x, y and z.

    Raises:
        TopologyError: they are no such integers.

    Example:
        >>> read_shape("shape", (4, 2))
        (4, 2, 1)
    """
    is_list = isinstance(given, (tuple, list))
    sizes = [as_integer(size) or 0 for size in given] if is_list else []
    if not 1 <= len(sizes) <= 3 or min(sizes) < 1:
        raise TopologyError(
            f"A topology was asked for with {name}={given!r}. That is no box of chips. "
            "Pass up to three positive integers: the chips in x, y and z."
        )
    padded = [*sizes, 1, 1]
    return (padded[0], padded[1], padded[2])


def read_count(
    name: str, named: int | None, given: SupportsIndex | None, what: str = "num_slices"
) -> int:
    """Reads a count that may be said twice.

    Args:
        name: the topology, for the message.
        named: what its name says; None if nothing.
        given: what the caller says; None if nothing.
        what: the argument, for the message.

    Returns:
        The count; 1 where nobody says.

    Raises:
        TopologyError: no positive integer, or two counts that differ.

    Example:
        >>> read_count("v5e:4x4", None, 2)
        2
    """
    count = None if given is None else as_integer(given)
    bad = given is not None and count is None
    if named is not None and count is not None and named != count:
        raise TopologyError(
            f"Topology {name!r} was asked for with {what}={given}. The name says {named}. "
            f"Pass {what} or write it in the name, not two numbers."
        )
    found = named if count is None else count
    if bad or (found is not None and found < 1):
        raise TopologyError(
            f"Topology {name!r} was asked for with {what}={given if named is None else named!r}. "
            f"That is no positive integer. Pass {what}=1 or more."
        )
    if found is not None and found > _MOST:
        raise TopologyError(
            f"Topology {name!r} was asked for with {what}={found}. There are not so many. Pass "
            f"{what}={_MOST} or less."
        )
    return found or 1


def _refuse_unreal(name: str, chip: Chip, shape: Shape3) -> None:
    near = ", ".join(f"'{chip.name}:{_text(chip, real)}'" for real in chip.slices.nearest(shape))
    raise TopologyError(
        f"Topology {name!r} was asked for. {chip.title} has no slice of {_text(chip, shape)}. "
        f"Pass {near}; or pass allow_unreal=True, with wrap=."
    )


def _refuse_twist(
    name: str, chip: Chip | None, shape: Shape3, wrap: Wrap3 | None, allow_unreal: bool
) -> None:
    low, middle, high = sorted(shape)
    if not (high == 2 * low and middle in (low, high)) or wrap not in (None, (True, True, True)):
        near = None if chip is None else chip.slices.nearest_twisted(shape)
        example = "'v5p:4x4x8_twisted'"
        if chip is not None and near is not None:
            example = f"'{chip.name}:{_text(chip, near)}_twisted'"
        raise TopologyError(
            f"Topology {name!r} was asked for as a twisted torus of {shape_text(shape)} with "
            f"wrap={wrap}. Only k x k x 2k and k x 2k x 2k chips that wrap in every dim are "
            f"twisted. Pass {example}, or twist=False."
        )
    if chip is not None and not chip.slices.twists(shape) and not allow_unreal:
        raise TopologyError(
            f"Topology {name!r} was asked for as a twisted torus. {chip.title} has no twisted "
            "slices that are known. Pass twist=False, or allow_unreal=True."
        )


def _text(chip: Chip, shape: Shape3) -> str:
    return shape_text(shape, chip.torus_rank)
