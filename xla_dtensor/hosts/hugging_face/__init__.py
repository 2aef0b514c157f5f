"""Weights of Hugging Face: safetensors files into a sharded module, and out of it.

    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)      shapes, no values
    xd.shard_module(model, mesh, rules)
    checkpoint.load_hf("Llama-3.1-8B", model)              each process reads its own blocks
    ...
    checkpoint.save_hf("finetuned", model)                 transformers loads the folder

No process ever holds a whole sharded tensor in its host's memory. Loading needs no communication.
Saving gathers a piece of at most 128 MiB at a time; each file is written by one process. What the
files call a tensor, and how experts are stored, is transformers' own knowledge or the caller's: see
:mod:`xla_dtensor.hosts.hugging_face.names`.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn

from xla_dtensor.core.argument_types import argument_types
from xla_dtensor.hosts.hugging_face.load import LoadedWeights, load_weights
from xla_dtensor.hosts.hugging_face.names import Names
from xla_dtensor.hosts.hugging_face.save import save_weights

__all__ = ["LoadedWeights", "load_hf", "save_hf"]


@argument_types
def load_hf(
    path: str | os.PathLike[str],
    module: nn.Module,
    *,
    names: Names = None,
    dtype: torch.dtype | str | None = None,
    strict: bool = True,
    progress: bool = True,
) -> LoadedWeights:
    """Give a module the weights of safetensors files, in place.

    Each process reads the blocks that its devices hold, tile by tile. Everything is checked before
    the first value is changed. On several processes each calls this; they do not wait for others.

    Args:
        path: A folder with ``model.safetensors``, or with ``model.safetensors.index.json`` and what
            that names; or one of these files.
        module: Parameters and persistent buffers that are DTensors get their tiles, on the meta
            device too; plain tensors get the whole. Parameters stay the objects that they are, as
            far as torch can do that. Buffers that no file has stay on the meta device:
            ``xd.materialize(module, init=False)`` makes these.
        names: What tensors are called in the files, where that is not their name in the module:
            patterns, or a function, see :mod:`xla_dtensor.hosts.hugging_face.names`. How
            transformers stores its own models is known without it.
        dtype: What floating-point tensors become; "auto": what they are in the files; None: what
            they are in the module.
        strict: Refuse tensors that only the module or only the files have, and two values for a
            tied tensor. Buffers that files of old versions have, and the module makes by itself,
            do not count.
        progress: Show a bar, where tqdm is installed and stderr is a terminal.

    Returns:
        What was loaded, what was missing and unexpected, and how many bytes this process read.

    Raises:
        WeightsError: Files that are damaged or not there, or that do not fit the module: names
            differ (strict), or shapes do.
        ArgumentTypeError: Not a module, or `names` of another kind.

    Example:
        >>> import tempfile, xla_dtensor as xd
        >>> mesh = xd.init_device_mesh("xla", (2, 4), mesh_dim_names=("dp", "tp"))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     names = save_hf(folder, nn.Linear(4, 8))
        ...     with torch.device("meta"):
        ...         model = nn.Linear(4, 8)
        ...     _ = xd.shard_module(model, mesh, {"weight": ["tp", None], "bias": ["tp"]})
        ...     load_hf(folder, model).bytes_read
        160
        >>> model.weight.is_meta, model.weight.local_shape
        (False, torch.Size([2, 4]))
    """
    return load_weights(path, module, names, dtype, strict, progress)


@argument_types
def save_hf(
    path: str | os.PathLike[str],
    module: nn.Module,
    *,
    max_shard_bytes: int | str = "5GB",
    names: Names = None,
    dtype: torch.dtype | None = None,
    config: Any = None,
    progress: bool = True,
) -> tuple[str, ...]:
    """Write a module's weights as safetensors files that transformers reads.

    One file, or several with an index. Each is written by one process from its beginning to its
    end; what other processes hold of it is gathered in pieces of at most 128 MiB. Files get their
    names when all are whole, so a save that fails leaves the folder as it was. A tied tensor is
    written once, under its first name, as transformers does.

    Args:
        path: The folder. It is made; weights of an earlier save in it are replaced. Several
            processes need the same folder, on a file system that all of them see.
        module: The module. Several processes that hold parts of it all have to call this alike.
        max_shard_bytes: Most bytes of a file, or a text such as "5GB".
        names: As for :func:`load_hf`, so that what loads a module also saves it. Without it a
            model of a known type is written as transformers does, experts one by one.
        dtype: What floating-point tensors become in the files.
        config: For ``config.json``: a mapping, a config of transformers, or ModelSizes. None: that
            of the module, if it has one.
        progress: Show a bar, in the first process.

    Returns:
        The names of the files of weights.

    Raises:
        WeightsError: A tensor without values, a name twice, processes that are called differently,
            or one that cannot write. All of them raise then.
        ArgumentTypeError: Not a module, or `names` or `config` of another kind.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_hf(folder, nn.Linear(4, 8), max_shard_bytes=128)
        ('model-00001-of-00002.safetensors', 'model-00002-of-00002.safetensors')
    """
    return save_weights(path, module, max_shard_bytes, names, dtype, config, progress)
