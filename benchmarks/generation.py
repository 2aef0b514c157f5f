"""What a token costs: ``generate()`` on a mesh, beside plain PyTorch and a JAX loop by hand.

    NPROC=64 python -m benchmarks.generation
    NPROC=64 python -m benchmarks.generation --tokens 16 --rounds 2

| way | what it does |
|---|---|
| plain | Transformers' ``generate`` on this host's CPU, by PyTorch's kernels |
| mesh | the same call, cache_implementation="static", after ``compile_generate`` |
| JAX | prefill and decode as two ``jax.jit``, cut the same way, argmax on the devices, no id read |

Llama of 4 layers, hidden size 256, 8 query and 4 key heads, vocabulary 1024, float32, 8 prompts of
16 tokens, greedy; a mesh (fsdp=4, tp=2) of 8 virtual CPU devices. All ways run in turns within one
process and give the same tokens, which is checked. Nothing else is asserted.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.timing import RESULTS, store

SIZES: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
_ROWS, _PROMPT = 8, 16


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark, prints its table and stores its figures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.generation", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--tokens", type=int, default=64, help="per prompt (default: 64)")
    parser.add_argument("--rounds", type=int, default=5, help="per way (default: 5)")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for the JSON file")
    asked = parser.parse_args(arguments)
    ways = ways_of(asked.tokens)
    tokens = {name: way() for name, way in ways.items()}  # compiles
    for name, found in tokens.items():
        if not torch.equal(found, tokens["plain"]):
            raise SystemExit(f"The way {name} generates other tokens than plain PyTorch.")
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(asked.rounds):
        for name, way in ways.items():
            began = time.perf_counter()
            way()
            seconds[name].append(time.perf_counter() - began)
    rows = [_row(name, times, asked.tokens) for name, times in seconds.items()]
    print(f"{'way':8}{'ms/token':>10}{'median':>10}{'tokens/s':>10}")
    for row in rows:
        print(
            f"{row['way']:8}{row['ms_min']:10.2f}{row['ms_median']:10.2f}"
            f"{row['tokens_per_second']:10.0f}"
        )
    print(f"Stored in {store('generation', {'rows': rows}, asked.results)}")
    return 0


def _row(name: str, times: Sequence[float], tokens: int) -> dict[str, Any]:
    return {
        "way": name,
        "ms_min": 1e3 * min(times) / tokens,
        "ms_median": 1e3 * statistics.median(times) / tokens,
        "tokens_per_second": _ROWS * tokens / min(times),
    }


def ways_of(tokens: int) -> dict[str, Callable[[], torch.Tensor]]:
    """Return what generates `tokens` more for each prompt, by name.

    Args:
        tokens: How many.
    """
    import transformers

    import xla_dtensor as xd
    from xla_dtensor.integrations.generation import compile_generate
    from xla_dtensor.nn.model_plan import put_model

    xd.get_runtime("jax", num_cpu_devices=8)
    torch.manual_seed(0)
    model: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.1)
    ids = torch.randint(2, SIZES["vocab_size"], (_ROWS, _PROMPT))
    by_hand = _JaxLlama(model, tokens)
    given = {"max_new_tokens": tokens, "do_sample": False}
    plain = partial(model.generate, ids, **given)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    ours: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).eval()
    ours.load_state_dict(weights)
    put_model(ours, xd.init_device_mesh("xla", (4, 2), mesh_dim_names=("fsdp", "tp")))
    compile_generate(ours)
    mesh = partial(ours.generate, ids, cache_implementation="static", **given)
    return {"plain": plain, "mesh": mesh, "JAX": partial(by_hand.generate, ids)}


class _JaxLlama:
    """The same model as a JAX user would write it for decoding."""

    def __init__(self, model: Any, tokens: int) -> None:
        import jax
        from jax.sharding import Mesh, NamedSharding, PartitionSpec

        devices = jax.devices()[:8]
        import numpy as np

        mesh = Mesh(np.array(devices).reshape(4, 2), ("fsdp", "tp"))
        self._put = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))
        rows = ("o_proj", "down_proj")
        self._weights = {
            name: self._put(
                np.asarray(value.detach()),
                *(
                    ()
                    if value.ndim < 2
                    else ("fsdp", "tp")
                    if any(row in name for row in rows)
                    else ("tp", "fsdp")
                ),
            )
            for name, value in model.named_parameters()
        }
        self._tokens, self._length = tokens, _PROMPT + tokens
        frequency = np.asarray(model.model.rotary_emb.inv_freq)
        step = partial(_forward, frequency)
        self._prefill = jax.jit(step, donate_argnums=2)
        self._decode = jax.jit(step, donate_argnums=2)

    def generate(self, ids: torch.Tensor) -> torch.Tensor:
        import jax.numpy as jnp
        import numpy as np

        heads, width = SIZES["num_key_value_heads"], SIZES["hidden_size"] // 8
        shape = (_ROWS, self._length, heads, width)
        layers = range(SIZES["num_hidden_layers"])
        cache = [
            tuple(self._put(np.zeros(shape, np.float32), "fsdp", None, "tp") for _ in "kv")
            for _ in layers
        ]
        new = self._put(np.asarray(ids, np.int32), "fsdp")
        position, found = jnp.int32(0), []
        for number in range(self._tokens):
            run = self._decode if number else self._prefill
            new, cache, position = run(self._weights, new, cache, position)
            found.append(new)
        return torch.cat([ids, torch.from_numpy(np.concatenate(found, 1)).long()], dim=1)


def _forward(frequency: Any, weights: Any, ids: Any, cache: Any, position: Any) -> Any:
    """Return the next ids, the cache, and the next position."""
    import jax
    import jax.numpy as jnp

    length, total = ids.shape[1], cache[0][0].shape[1]
    places = position + jnp.arange(length)
    angles = places[:, None] * frequency
    cos, sin = (jnp.tile(f(angles), 2)[:, None] for f in (jnp.cos, jnp.sin))
    seen = jnp.arange(total) <= places[:, None]
    x = weights["model.embed_tokens.weight"][ids]
    kept = []
    for number, (keys, values) in enumerate(cache):
        at = f"model.layers.{number}."
        h = _normed(x, weights[f"{at}input_layernorm.weight"])
        q, k, v = (
            (h @ weights[f"{at}self_attn.{name}_proj.weight"].T).reshape(*ids.shape, -1, 32)
            for name in "qkv"
        )
        q, k = (_turned(each, cos, sin) for each in (q, k))
        keys = jax.lax.dynamic_update_slice(keys, k, (0, position, 0, 0))
        values = jax.lax.dynamic_update_slice(values, v, (0, position, 0, 0))
        kept.append((keys, values))
        q = q.reshape(*ids.shape, keys.shape[2], -1, 32)
        scores = jnp.einsum("bqhgd,bkhd->bhgqk", q, keys) / 32**0.5
        scores = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
        out = jnp.einsum("bhgqk,bkhd->bqhgd", scores, values).reshape(*ids.shape, -1)
        x = x + out @ weights[f"{at}self_attn.o_proj.weight"].T
        h = _normed(x, weights[f"{at}post_attention_layernorm.weight"])
        gate, up = (h @ weights[f"{at}mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        x = x + (jax.nn.silu(gate) * up) @ weights[f"{at}mlp.down_proj.weight"].T
    x = _normed(x[:, -1:], weights["model.norm.weight"])
    logits = x @ weights["lm_head.weight"].T
    return logits.argmax(-1).astype(ids.dtype), kept, position + length


def _normed(x: Any, weight: Any) -> Any:
    import jax
    import jax.numpy as jnp

    return weight * x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def _turned(x: Any, cos: Any, sin: Any) -> Any:
    import jax.numpy as jnp

    first, second = jnp.split(x, 2, axis=-1)
    return x * cos + jnp.concatenate([-second, first], axis=-1) * sin


if __name__ == "__main__":
    raise SystemExit(main())
