"""``python -m xla_dtensor env``: what is installed and which runtime works."""

from __future__ import annotations

import argparse
import json
import math

__all__ = ["add_env"]

_DEFAULT_TIME_LIMIT_SECONDS = 120.0


def add_env(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command ``env``.

    Args:
        commands: The commands of the parser.
    """
    env = commands.add_parser(
        "env",
        help="show what is installed, start each runtime, say what is wrong and what to install",
        description=(
            "Shows versions, conflicts and the runtime that would be chosen, and starts each "
            "runtime in a process of its own. Exit status 0 if at least one of them works, else 1."
        ),
    )
    env.add_argument("--json", action="store_true", help="print JSON instead of text")
    env.add_argument(
        "--runtime",
        metavar="NAME",
        help="start only this runtime, as get_runtime(NAME) would",
    )
    env.add_argument(
        "--time-limit",
        type=_seconds,
        default=_DEFAULT_TIME_LIMIT_SECONDS,
        metavar="SECONDS",
        help="how long a runtime may take to start (default: %(default)g)",
    )
    env.set_defaults(command=_env)


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds < math.inf:
        raise ValueError(f"{text} is no time limit")
    return seconds


def _env(asked: argparse.Namespace) -> int:
    from xla_dtensor.doctor.diagnosis import examine
    from xla_dtensor.doctor.text import to_text

    diagnosis = examine(asked.runtime, time_limit_seconds=asked.time_limit)
    print(json.dumps(diagnosis.to_dict(), indent=1) if asked.json else to_text(diagnosis))
    return 0 if diagnosis.works else 1
