"""Payloads cut unevenly: torch_xla's programs return them replicated, this puts them back.

XLA, as torch_xla 2.9 calls it, replicates each result of a program that its sharding does not cut
evenly, whatever was annotated. An embedding of 50,257 rows over 4 devices would thus be whole on
every device after the first optimizer step. There is no way to tell it otherwise, and no way to
move a finished value but through the host. So that is what happens, once per program and payload,
with one warning: values and shards are right, time is lost. Even dims cost nothing.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from xla_dtensor.core import OpSharding
from xla_dtensor.runtimes.torch_xla_sharding import (
    cut_unevenly,
    parse_annotation,
    to_annotation,
    xlac,
)

__all__ = ["UnevenPayloads"]

_log = logging.getLogger(__name__)


class UnevenPayloads:
    """The living payloads that were asked to be cut unevenly, and how."""

    def __init__(self) -> None:
        self._asked: Any = WeakIdKeyDictionary()
        self._warned = False

    def note(self, payload: torch.Tensor, sharding: OpSharding) -> torch.Tensor:
        """Remember `payload` if `sharding` cuts a dim of it unevenly, else forget it; return it."""
        if payload.numel() and sharding.is_tiled and cut_unevenly(payload, sharding):
            self._asked[payload] = sharding
        else:
            self._asked.pop(payload, None)
        return payload

    def __contains__(self, payload: object) -> bool:
        return bool(self._asked) and payload in self._asked

    def of(self, payload: torch.Tensor) -> OpSharding:
        """Return how a payload that is noted was asked to be cut."""
        return self._asked[payload]

    def follow(self, source: object, result: object) -> None:
        """Remember `result` as lying like `source`, of which it is an alias."""
        sharding = self._asked.get(source) if self._asked else None
        if sharding is not None:
            self._asked[result] = sharding

    def restore(self) -> None:
        """Cut again what finished programs returned replicated."""
        for payload, sharding in list(self._asked.items()):
            if xlac()._check_tensor_need_materialization([payload])[0]:
                continue
            found = parse_annotation(xlac()._get_xla_sharding_spec(payload))
            if found != sharding and found == OpSharding.replicated():
                self._warn(payload, sharding)
                xlac()._xla_wait_device_ops([])
                xlac()._xla_mark_sharding(payload, to_annotation(sharding))

    def _warn(self, payload: torch.Tensor, sharding: OpSharding) -> None:
        if not self._warned:
            self._warned = True
            tile = sharding.shape_per_tile(payload.shape)
            even = [full * sharding.num_tiles(dim) for dim, full in enumerate(tile)]
            _log.warning(
                "A tensor of shape=%s is cut unevenly by %s. torch_xla returns it replicated from "
                "each program, and it is cut again through the host, which is slow. Pad it, for "
                "example to shape=%s. (Said once.)",
                tuple(payload.shape),
                sharding,
                tuple(even),
            )
