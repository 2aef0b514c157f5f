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

from xla_dtensor.hosts.hugging_face.load import LoadedWeights, load_hf
from xla_dtensor.hosts.hugging_face.save import save_hf

__all__ = ["LoadedWeights", "load_hf", "save_hf"]
