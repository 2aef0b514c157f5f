"""What payloads were told of how to lie, on torch_xla: in place, remembered, put back after writes.

torch_xla keeps an annotation with the value, not with the tensor: an op in place may answer with a
value that has none. What payloads were asked to lie like is therefore kept here, beside them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from xla_dtensor.core import OpSharding
from xla_dtensor.runtimes.torch_xla_bases import note_alias, note_base, note_source
from xla_dtensor.runtimes.torch_xla_payload import functionalization, to_payload
from xla_dtensor.runtimes.torch_xla_program_keys import remember
from xla_dtensor.runtimes.torch_xla_sharding import parse_annotation, to_annotation, xlac
from xla_dtensor.runtimes.torch_xla_uneven import UnevenPayloads

__all__ = ["Annotations"]


class Annotations:
    """The annotations of living payloads.

    Args:
        uneven: Where payloads are noted that are to be cut unevenly.
        check_global: Raises for what is no global payload.
        wraps_all: Whether torch_xla wraps all tensors for functionalization itself.
    """

    def __init__(
        self,
        uneven: UnevenPayloads,
        check_global: Callable[[torch.Tensor], None],
        wraps_all: bool,
    ) -> None:
        self._uneven, self._check_global, self._wraps_all = uneven, check_global, wraps_all
        self._of: Any = WeakIdKeyDictionary()
        self._empty: Any = WeakIdKeyDictionary()

    def of(self, payload: torch.Tensor) -> OpSharding | None:
        """Return what a payload was told; None when it was told nothing."""
        return self._of.get(payload)

    def of_empty(self, payload: torch.Tensor) -> OpSharding:
        """Return how a payload without elements is said to lie."""
        return self._empty.get(payload, OpSharding.replicated())

    def note(self, payload: torch.Tensor, sharding: OpSharding) -> torch.Tensor:
        """Remember that a payload was told to lie as `sharding` says; return it."""
        self._of[payload] = sharding.canonical()
        remember(payload)
        if payload.numel() == 0:
            self._empty[payload] = sharding.canonical()
            return payload
        note_base(payload, to_annotation(sharding))
        return self._uneven.note(payload, sharding)

    def follow(self, source: Any, result: torch.Tensor) -> None:
        """Remember of an alias what is known of its source."""
        self._uneven.follow(source, result)
        sharding = self._of.get(source)
        if sharding is not None:
            self._of[result] = sharding
            note_alias(source, result)

    def annotate(self, payload: torch.Tensor, sharding: OpSharding) -> None:
        """Tell XLA in place how a payload is to lie, and remember it."""
        self.annotate_view(payload, sharding)
        self.note(payload, sharding)

    def annotate_view(self, payload: torch.Tensor, sharding: OpSharding) -> None:
        """Tell XLA in place how a payload is to lie."""
        self._check_global(payload)
        if payload.numel() == 0:
            return
        with functionalization():
            finished = not xlac()._check_tensor_need_materialization([payload])[0]
            found = xlac()._get_xla_sharding_spec(payload) if finished else None
            if found and parse_annotation(found) == sharding:
                return
            if found == "":
                # Straight from the host: cut now, so that the whole need not fit on each device.
                xlac()._xla_mark_sharding(payload, to_annotation(sharding))
            else:
                if not finished:
                    # A pending value does not take a second one, such as after a clearing.
                    xlac()._xla_clear_sharding(payload)
                # A node of its own. mark_sharding would annotate what this is a clone of as well.
                xlac()._xla_annotate_custom_sharding(payload, to_annotation(sharding))

    def annotate_written(self, base: torch.Tensor, sharding: OpSharding) -> None:
        """Tell XLA how a payload is to lie that was written to through a view, if nothing does."""
        with functionalization():
            told = base.numel() == 0 or xlac()._get_xla_op_sharding(base) is not None
        if not told:
            self.annotate_view(base, sharding)

    def is_told(self, payload: torch.Tensor) -> bool:
        """Tell whether a payload, or its value, carries an annotation."""
        with functionalization():
            told = xlac()._get_xla_op_sharding(payload) is not None
        return told or payload in self._of

    def clear(self, payload: torch.Tensor) -> None:
        """Take back what a payload was told; it is replicated then."""
        # torch_xla's own clearing leaves finished data cut as it was, and a pending value without
        # the attribute that its partitioner insists on.
        self.annotate(payload, OpSharding.replicated())
        self._of.pop(payload, None)

    def correct_fsdp_v2(self) -> None:
        """Let torch_xla's FSDPv2 shard parameters that nobody marked.

        It leaves out those that say how they lie, and one that a `sync()` or a second `.to("xla")`
        has met says "{replicated}".
        """
        name = "torch_xla.experimental.spmd_fully_sharded_data_parallel"
        wrapper = importlib.import_module(name).SpmdFullyShardedDataParallel
        its_own = wrapper.__init__

        @wraps(its_own)
        def init(self_: Any, module: Any, *args: Any, **kwargs: Any) -> None:
            if isinstance(module, torch.nn.Module):
                for parameter in module.to("xla").parameters():
                    text = xlac()._get_xla_sharding_spec(parameter)
                    if text == "{replicated}" and parameter not in self._of:
                        xlac()._xla_clear_sharding(parameter)
            its_own(self_, module, *args, **kwargs)

        wrapper.__init__ = init

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a payload over the storage of a plain device tensor: writes to one reach both."""
        with functionalization():
            base = to_payload(tensor.detach())
            payload = base.detach()
        if not self._wraps_all:
            note_source(payload, base, tensor)
        if tensor in self._of:
            self._of[payload] = self._of[tensor]
            note_base(payload, to_annotation(self._of[payload]))
        return payload
