"""The doctor: what is installed, which runtime would be chosen, does it work, what to do next.

It answers for installations that are incomplete or broken, so it imports none of the packages that
it asks about: versions come from metadata, and a runtime is started in a process of its own. Names
of the runtimes are therefore repeated here; a test holds them equal to those of `registry`.

Example:
    >>> diagnosis = examine(time_limit_seconds=120)  # doctest: +SKIP
    >>> diagnosis.choice.runtime, diagnosis.works  # doctest: +SKIP
    ('jax', True)
"""

from __future__ import annotations

from xla_dtensor.doctor.diagnosis import BUILT_IN_RUNTIMES, Choice, Diagnosis, choose, examine

__all__ = ["BUILT_IN_RUNTIMES", "Choice", "Diagnosis", "choose", "examine"]
