"""PerDeviceTensor: a tensor that has one value on each device, all of one shape.

The base of :class:`~xla_dtensor.local_view.LocalView` (what ``to_local()`` gives) and
:class:`~xla_dtensor.manual_tensor.ManualTensor` (what ``enable_manual_sharding`` gives). Both wrap
a runtime's payload for all devices' values, below autograd, as DTensor wraps its payload; they
differ in what may be mixed with them and read of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import torch

from mesh_utils import Axis
from xla_dtensor.core import ManualRegion
from xla_dtensor.runtimes.registry import get_runtime

__all__ = ["PerDeviceTensor"]

Self = TypeVar("Self", bound="PerDeviceTensor")


class PerDeviceTensor(torch.Tensor):
    """What each device has of something: the shape is one device's."""

    # Seen by modules that cannot import this class.
    _is_per_device = True

    _payload: torch.Tensor
    _region: ManualRegion

    @classmethod
    def _wrapping(
        cls: type[Self], payload: torch.Tensor, region: ManualRegion, requires_grad: bool = False
    ) -> Self:
        """Wrap `payload`, the runtime's tensor for all devices, of one device's shape."""
        runtime = get_runtime()
        # On a device of its own an op on local tensors is not kept whole: it runs on a stack.
        on_cpu = torch.device(runtime.torch_device).type == "cpu"
        keys = {"_extra_dispatch_keys": runtime.extra_dispatch_keys} if on_cpu else {}
        self = torch.Tensor._make_wrapper_subclass(
            cls,
            payload.shape,
            strides=payload.stride(),
            storage_offset=payload.storage_offset(),
            dtype=payload.dtype,
            device=payload.device,
            requires_grad=requires_grad,
            **keys,
        )
        self._payload = payload
        self._region = region
        return self  # pyright: ignore[reportReturnType]

    if TYPE_CHECKING:

        def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    @property
    def region(self) -> ManualRegion:
        """The mesh axes along which the tensor is per device."""
        return self._region

    def _like(self: Self, payload: torch.Tensor) -> Self:
        """Return another tensor of this class and region."""
        return self._wrapping(payload, self._region)

    def _communicated(self: Self, name: str, axes: tuple[Axis, ...], options: Any) -> Self:
        """Run a collective, below autograd."""
        raise NotImplementedError

    def _varies_over(self, axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
        """Return those of `axes` along which devices may hold different values."""
        return axes

    def _labelled(self: Self, varying: frozenset[Axis]) -> Self:
        """Return the same values, said to differ along these axes too."""
        return self

    def _reshaped_in_place(self) -> Any:
        """Follow the payload, whose shape ``t_``, ``squeeze_`` and the like have changed."""
        with torch._C.DisableTorchFunctionSubclass():
            torch.Tensor.data.__set__(self, self._like(self._payload))  # pyright: ignore
        return self
