"""MpDeviceLoader: torch_xla's loader by its name and arguments, on every runtime."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from xla_dtensor.core.errors import DataError
from xla_dtensor.hosts.data.loader import ShardedLoader

__all__ = ["MpDeviceLoader"]


class MpDeviceLoader:
    """Gives DTensors where torch_xla's class of this name gives annotated device tensors.

    Args:
        loader: Any iterable of host batches.
        device: Accepted for torch_xla's signature: the mesh of `input_sharding` says where.
        input_sharding: A ``ShardingSpec``, or some in the batch's structure. With
            ``minibatch=True`` each process's loader gives its own rows, else the whole batch.
        device_prefetch_size: Global batches that wait on the devices.
        **options: torch_xla's other options, which have nothing to set here, and those of
            :class:`ShardedLoader`.

    A batch with too few rows is dropped; pass `last` for something else.

    Raises:
        DataError: No input_sharding, or a batches_per_execution other than 1.

    Example:
        >>> import torch, xla_dtensor.spmd as xs
        >>> rows = xs.ShardingSpec(xs.Mesh(range(8), (8,), ("data",)), ("data", None))
        >>> loader = MpDeviceLoader([torch.ones(16, 4)], "xla", input_sharding=rows)
        >>> [tuple(batch.shape) for batch in loader]
        [(16, 4)]
    """

    def __init__(
        self,
        loader: Iterable[Any],
        device: Any = None,
        *,
        input_sharding: Any = None,
        device_prefetch_size: int = 8,
        **options: Any,
    ) -> None:
        batches = options.pop("batches_per_execution", 1)
        if input_sharding is None or batches != 1:
            raise DataError(
                f"MpDeviceLoader was called with input_sharding={input_sharding!r} and "
                f"batches_per_execution={batches}. It has to know "
                "on which mesh a batch lies, and a step ends where the program says so. Pass a "
                "ShardingSpec; put several batches into one compiled step by hand."
            )
        for name in ("loader_prefetch_size", "host_to_device_transfer_threads", "batchdim"):
            options.pop(name, None)
        self._loader = loader
        self._sharded = ShardedLoader(
            loader, input_sharding=input_sharding, prefetch=device_prefetch_size, **options
        )

    def __iter__(self) -> Iterator[Any]:
        """Begin an epoch."""
        return iter(self._sharded)

    def __len__(self) -> int:
        """Return the loader's own length."""
        return len(self._sharded)

    def close(self) -> None:
        """Stop reading ahead."""
        self._sharded.close()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the :class:`ShardedLoader` behind it."""
        return self._sharded.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after the batch after which `state` was taken."""
        self._sharded.load_state_dict(state)
