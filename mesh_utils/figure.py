"""Figure: a number and who says it."""

from dataclasses import dataclass

from mesh_utils.errors import MeshError

UNITS = {
    "": 1.0,
    "GB": 1e9,
    "GiB": 2.0**30,
    "GB/s": 1e9,
    "GiB/s": 2.0**30,
    "Gbit/s": 1e9 / 8,
    "TFLOP/s": 1e12,
}
"""What a unit of the files is in bytes, bytes per second or FLOP per second."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure of a hardware file.

    Attributes:
        value: in bytes, bytes per second, FLOP per second, or a count; None where not known.
        source: who says so; "" where it is not known.
        note: how the figure follows from what the source says.
        reason: why it is not known; "" where it is.
        others: the same figure from other sources, where there are any.

    Example:
        >>> Figure(95 * 2**30, "Cloud").whole
        102005473280
    """

    value: float | None
    source: str
    note: str = ""
    reason: str = ""
    others: tuple["Figure", ...] = ()

    @property
    def whole(self) -> int | None:
        """The value as an integer: bytes, or a count."""
        return None if self.value is None else round(self.value)

    @property
    def is_disputed(self) -> bool:
        """Whether another source gives another value, by more than 1 %."""
        if self.value is None:
            return False
        given = [other.value for other in self.others if other.value is not None]
        return any(abs(value - self.value) > 0.01 * abs(self.value) for value in given)

    def needed(self, what: str) -> float:
        """The value, where one cannot go on without it.

        Args:
            what: what it is of, for the message.

        Returns:
            The value.

        Raises:
            MeshError: it is not known.
        """
        if self.value is None:
            raise MeshError(
                f"{what} was asked for. It is not known: {self.reason or 'no source gives it'}. "
                "Pass the figure yourself, or ask for what needs none."
            )
        return self.value
