"""What the commands about reports have in common: how they refuse, and their exit statuses."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

from xla_dtensor.cli.refusal import REFUSED

__all__ = ["STATUSES", "fits_status", "status_or_refusal"]

DOES_NOT_FIT = 1

STATUSES = "Exit status 0 if it fits or nobody knows, 1 if it does not fit, 2 for what is refused."
"""What the exit statuses mean, for the help."""


def fits_status(fits: bool | None) -> int:
    """The exit status of a report.

    Args:
        fits: Whether the step fits; None if nobody knows.

    Returns:
        1 if it does not fit, else 0.

    Example:
        >>> fits_status(True), fits_status(None), fits_status(False)
        (0, 0, 1)
    """
    return DOES_NOT_FIT if fits is False else 0


def status_or_refusal(
    command: Callable[[argparse.Namespace], int],
) -> Callable[[argparse.Namespace], int]:
    """Makes a command say in words what it refuses, without a traceback.

    Args:
        command: What to do, returning the exit status.

    Returns:
        The same; 2 after a refusal.
    """

    def run(asked: argparse.Namespace) -> int:
        from mesh_utils.errors import MeshError
        from xla_dtensor.report.errors import EvidenceError, HloError, ReportError

        try:
            return command(asked)
        except (MeshError, EvidenceError, HloError, ReportError) as error:
            print(f"error: {error}", file=sys.stderr)
        except (OSError, UnicodeDecodeError) as error:
            name = getattr(error, "filename", None)
            why = getattr(error, "strerror", None) or error
            print(
                f"error: The file {str(name)!r} was asked for. The system says: {why}. "
                "Pass a path that can be opened.",
                file=sys.stderr,
            )
        return REFUSED

    return run
