"""Several query heads to one key head: the group is a dim of its own, keys are not repeated.

q [b, (g r), q, d]  ->  [b, g, r, q, d]        k [b, g, k, d]  ->  [b, g, 1, k, d]
"""

from __future__ import annotations

from typing import Any

__all__ = ["HeadGroups"]


class HeadGroups:
    """How query heads share key heads; where there are as many, everything stays as it is.

    Args:
        q: (..., query heads, queries, dim).
        k: (..., key heads, keys, dim).
    """

    def __init__(self, q: Any, k: Any) -> None:
        self._heads = None
        if q.ndim > 2 and k.ndim > 2 and q.shape[-3] != k.shape[-3]:
            self._heads = k.shape[-3], q.shape[-3] // k.shape[-3]

    def query(self, tensor: Any, after: int = 3) -> Any:
        """Split the heads of a tensor that has them `after` dims from its end."""
        if self._heads is None:
            return tensor
        at = tensor.ndim - after
        return tensor.reshape(*tensor.shape[:at], *self._heads, *tensor.shape[at + 1 :])

    def key(self, tensor: Any) -> Any:
        """Give keys or values a dim of size 1 for the group."""
        return tensor if self._heads is None else tensor[..., None, :, :]

    def mask(self, mask: Any = None) -> Any:
        """Give a mask the same dims, if it has heads."""
        if mask is None or self._heads is None or mask.ndim < 3:
            return mask
        return mask[..., None, :, :] if mask.shape[-3] == 1 else self.query(mask)

    def flat(self, tensor: Any, after: int) -> Any:
        """Put the heads of a result together, `after` dims from its end."""
        if self._heads is None:
            return tensor
        at = tensor.ndim - after - 1
        heads = self._heads[0] * self._heads[1]
        return tensor.reshape(*tensor.shape[:at], heads, *tensor.shape[at + 2 :])
