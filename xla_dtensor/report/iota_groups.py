"""Replica groups that XLA prints as a reshaped and transposed iota.

`[2,4]<=[8]` is iota(8) as 2 groups of 4: {0,1,2,3} {4,5,6,7}. `[4,2]<=[2,4]T(1,0)` is iota(8) as
(2, 4), transposed, as 4 groups of 2: {0,4} {1,5} {2,6} {3,7}.
"""

import math
import re

import numpy as np
from numpy.typing import NDArray

from xla_dtensor.report.errors import HloError
from xla_dtensor.report.hlo_numbers import checked_devices

_LIST = r"[0-9]{1,12}(?:,[0-9]{1,12})*"
_IOTA = re.compile(rf"\[({_LIST})\]<=\[({_LIST})\](?:T\(({_LIST})\))?")
_MOST_DIMS = 32
"""What NumPy takes; XLA writes few."""


def parse_iota(text: str) -> NDArray[np.int64] | None:
    """Reads an iota array.

    Args:
        text: without spaces.

    Returns:
        The array, in the shape that stands before `<=`; None for text in another syntax.

    Raises:
        HloError: shapes of different sizes, or T(...) that is no permutation.

    Example:
        >>> parse_iota("[4,2]<=[2,4]T(1,0)").tolist()
        [[0, 4], [1, 5], [2, 6], [3, 7]]
    """
    match = _IOTA.fullmatch(text)
    if match is None:
        return None
    shape, dims, perm = (tuple(map(int, re.findall(r"\d+", part or ""))) for part in match.groups())
    if math.prod(shape) != math.prod(dims):
        raise HloError(f"{text} was given. {shape} and {dims} differ in size. Give equal sizes.")
    if perm and sorted(perm) != list(range(len(dims))):
        raise HloError(f"{text} was given. T{perm} is no permutation of {len(dims)} dims. Fix it.")
    if max(len(shape), len(dims)) > _MOST_DIMS:
        raise HloError(f"{text[:80]} was given. It has over {_MOST_DIMS} dims. Give fewer.")
    checked_devices(math.prod(dims), text)
    devices = np.arange(math.prod(dims), dtype=np.int64).reshape(dims)
    return devices.transpose(perm or None).reshape(shape)
