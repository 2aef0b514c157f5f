"""The metadata that torch.distributed.checkpoint reads: a checkpoint is one of its own, too.

    torch.distributed.checkpoint.load(state, checkpoint_id="runs/a/step_00000042")

It checks no checksums. This library reads the manifest only, and never this file, which is a
pickle.
"""

from __future__ import annotations

import pickle
from typing import Any

import torch

from xla_dtensor.hosts.checkpoint.manifest import Entry, Manifest

__all__ = ["metadata_bytes"]


def metadata_bytes(manifest: Manifest) -> bytes:
    """Return the content of ``.metadata`` for a manifest."""
    # Here, because it takes 0.3 s to import, and only who saves needs it.
    from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex

    keys: dict[str, Any] = {
        name: BytesStorageMetadata() if entry.shape is None else _tensor_metadata(entry)
        for name, entry in manifest.entries.items()
    }
    places = {
        MetadataIndex(name, chunk.offset if entry.shape is not None else None): _StorageInfo(
            chunk.file, chunk.start, chunk.length
        )
        for name, entry in manifest.entries.items()
        for chunk in entry.chunks
    }
    paths = {
        name: entry.path if entry.of_process is None else (name,)
        for name, entry in manifest.entries.items()
    }
    metadata = Metadata(keys, planner_data=paths, storage_data=places)
    metadata.version = CURRENT_DCP_VERSION
    return pickle.dumps(metadata)


def _tensor_metadata(entry: Entry) -> object:
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        TensorProperties,
        TensorStorageMetadata,
    )

    assert entry.shape is not None
    chunks = [
        ChunkStorageMetadata(offsets=torch.Size(c.offset), sizes=torch.Size(c.shape))
        for c in entry.chunks
    ]
    properties = TensorProperties(dtype=getattr(torch, str(entry.dtype)))
    return TensorStorageMetadata(properties, torch.Size(entry.shape), chunks)
