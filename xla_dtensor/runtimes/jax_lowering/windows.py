"""The windows of a pooling op: over which dims, how far padded, how many elements each has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["Windows"]


@dataclass(frozen=True)
class Windows:
    """Windows over the last dims of a tensor, one number per dim in each field.

    Attributes:
        sizes: The image.
        kernel: Elements per window.
        stride: Elements between the starts of windows.
        padding: Elements added before and after the image.
        dilation: Elements between those of one window.
        outputs: How many windows.

    Example:
        >>> Windows.of((8, 3, 5, 5), 2, [3], [2], 1, ceil_mode=False).outputs
        (3, 3)
    """

    sizes: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    outputs: tuple[int, ...]

    @staticmethod
    def of(
        shape: Sequence[int],
        ndim: int,
        kernel: Any,
        stride: Any,
        padding: Any,
        ceil_mode: bool,
        dilation: Any = 1,
    ) -> Windows:
        """Return the windows that torch's arguments mean.

        Args:
            shape: Of the input; its last `ndim` dims are the image.
            ndim: How many dims windows have.
            kernel: As torch takes it: one number for all dims, or one each.
            stride: The same; empty for the kernel's.
            padding: The same.
            ceil_mode: Whether a window may lack elements at the end.
            dilation: As `kernel`.
        """

        def each(value: Any) -> tuple[int, ...]:
            value = (value,) if isinstance(value, int) else tuple(value)
            return value * ndim if len(value) == 1 else value

        sizes = tuple(shape[len(shape) - ndim :])
        size, steps = each(kernel), each(stride) if stride else each(kernel)
        pads, gaps = each(padding), each(dilation)
        outputs: list[int] = []
        for n, k, s, p, d in zip(sizes, size, steps, pads, gaps, strict=True):
            count = (n + 2 * p - d * (k - 1) - 1 + (s - 1 if ceil_mode else 0)) // s + 1
            # None may start behind the image and the padding before it.
            outputs.append(count - (ceil_mode and (count - 1) * s >= n + p))
        return Windows(sizes, size, steps, pads, gaps, tuple(outputs))

    def reduce_window(self, ndim: int) -> dict[str, Any]:
        """Return the options of ``lax.reduce_window`` for a tensor of `ndim` dims."""
        rest = ndim - len(self.sizes)
        return {
            "window_dimensions": (1,) * rest + self.kernel,
            "window_strides": (1,) * rest + self.stride,
            "padding": [(0, 0)] * rest + list(zip(self.padding, self.padding_after, strict=True)),
            "window_dilation": (1,) * rest + self.dilation,
        }

    @property
    def padding_after(self) -> list[int]:
        """The padding that windows reach behind the image; with ceil_mode it may exceed torch's."""
        lacks: list[int] = []
        for dim, size in enumerate(self.sizes):
            reach = self.dilation[dim] * (self.kernel[dim] - 1) + 1
            end = self.stride[dim] * (self.outputs[dim] - 1) + reach
            lacks.append(max(end - size - self.padding[dim], 0))
        return lacks

    def counts(self, with_padding: bool) -> Any:
        """Return how many elements each window has, an array over the windows.

        Args:
            with_padding: Count torch's padding too, though nothing behind it.
        """
        total = np.ones((), np.int64)
        for dim, size in enumerate(self.sizes):
            pad = self.padding[dim]
            start = np.arange(self.outputs[dim]) * self.stride[dim] - pad
            end = np.minimum(start + self.kernel[dim], size + pad)
            if not with_padding:
                start, end = np.maximum(start, 0), np.minimum(end, size)
            total = total[..., None] * (end - start)
        return total
