"""Transformers' ``generate()`` on a mesh: a program for the prompt, and one for each next token.

    compile_generate(model)                                  model lies on a mesh
    model.generate(ids, cache_implementation="static")       as ever

The loop is Transformers' own, on the host: ids, masks, logits processors, drawing, beams, stopping.
So what is drawn is what a plain model draws from the same seed. What the loop calls for each token,
the model's ``forward``, is a program::

    on the host    ids (4, 1), masks (4, 1, 1, 64), position 17
    on the mesh    forward(ids, ..., cache: keys, values (4, 8, 64, 128) of each layer)
                   keys and values are written in place, their memory is donated
    on the host    logits (4, 1, 32000)

* The cache is the StaticCache that ``generate`` makes or is given. Its keys and values lie on the
  mesh from the first call on, cut over rows and heads. Its lengths stay on the host, where the loop
  reads them for masks; the program gets a copy and returns the new ones.
* What layers hold beside tensors tells programs from each other: empty layers (the prompt) from
  filled ones. Layers with a window branch on their length in Python; for a next token `_Window`
  takes their place in the program, which does the same on tensors.
* A prompt of another length is another program. Pad prompts to a few lengths, on the left, and give
  ``max_cache_len`` where what is generated differs in length.

Invariant: between calls a cache is what Transformers would have left, but that its keys and values
are DTensors.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from transformers import Cache
from transformers.cache_utils import (
    CacheLayerMixin,
    DummyLayer,
    LinearAttentionCacheLayerMixin,
    StaticLayer,
    StaticSlidingWindowLayer,
)
from transformers.utils.output_capturing import maybe_install_capturing_hooks

import xla_dtensor as xd
from xla_dtensor.core.errors import ArgumentTypeError
from xla_dtensor.dtensor.dtensor import DTensor
from xla_dtensor.dtensor.mesh import DeviceMesh
from xla_dtensor.nn.model_plan import row_placements
from xla_dtensor.runtimes.base import CompiledStep

__all__ = ["compile_generate"]

_INPUTS = ("decoder_input_ids", "input_ids", "decoder_inputs_embeds", "inputs_embeds")
# What layers hold of their length: a tensor, and an int where they have a window.
_LENGTH, _COUNT = "cumulative_length", "cumulative_length_int"
_PARTS = (Cache, CacheLayerMixin, LinearAttentionCacheLayerMixin, DummyLayer)


def compile_generate(model: Any, *, tp_axis: str = "tp") -> CompiledStep:
    """Let a model's ``generate()`` run programs on its mesh.

    The model's ``forward`` is replaced, on this object: a call with a static cache is a program,
    any other is what it was. An encoder's is replaced as well. ``del model.forward`` takes it back.

    Args:
        model: A model of Transformers, on a mesh.
        tp_axis: The axis that cuts the cache's heads, where it divides them. Rows are cut over the
            other axes, where their product divides them.

    Returns:
        The compiled step that runs: its ``stats()`` counts traces, its ``hlo()`` is the program.

    Raises:
        ArgumentTypeError: The model lies on no mesh. Calls raise it for a cache that grows.

    Example:
        >>> import torch, transformers, xla_dtensor as xd
        >>> from xla_dtensor.nn.model_plan import put_model
        >>> mesh = xd.init_device_mesh("xla", (4, 2), mesh_dim_names=("fsdp", "tp"))
        >>> config = transformers.LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=32,
        ...     num_hidden_layers=1, num_attention_heads=2)
        >>> model = put_model(transformers.LlamaForCausalLM(config).eval(), mesh)
        >>> program = compile_generate(model)
        >>> ids = torch.arange(8).reshape(4, 2)
        >>> ids = model.generate(ids, max_new_tokens=5, do_sample=False, eos_token_id=None,
        ...                      cache_implementation="static")
        >>> ids.shape, program.stats()["traces"]
        (torch.Size([4, 7]), 2)
    """
    if isinstance(model.forward, _Decoder):
        return model.forward.program
    meshes = [p.device_mesh for p in model.parameters() if isinstance(p, DTensor)]
    if not meshes:
        raise ArgumentTypeError(
            f"compile_generate was given a {type(model).__name__} that lies on no mesh. Its "
            "programs run on the mesh of its parameters. Put it there first: "
            "xd.shard_module(model, mesh, rules), or put_model(model, mesh)."
        )
    if model.config.is_encoder_decoder:
        encoder = model.get_encoder()
        encoder.forward = _Encoder(encoder, meshes[0], tp_axis)
    maybe_install_capturing_hooks(model)  # as its first training step would, between two programs
    model.forward = decoder = _Decoder(model, meshes[0], tp_axis)
    if not hasattr(model, "_reorder_cache"):
        model._reorder_cache = decoder.reorder_cache
    return decoder.program


class _OnMesh:
    """What runs a module's forward as a program, on inputs that come from the host."""

    def __init__(self, module: nn.Module, mesh: DeviceMesh, tp_axis: str) -> None:
        self._forward = module.forward
        self._mesh = mesh
        self._rows = row_placements(mesh, tp_axis=tp_axis)
        # ``generate`` asks which arguments a model takes.
        self.__signature__ = inspect.signature(module.forward)

    def _put(self, inputs: dict[str, Any], num_rows: int) -> dict[str, Any]:
        """Put inputs on the mesh: what has the batch's rows, by rows."""

        def put(leaf: Any) -> Any:
            if not _is_of_host(leaf):
                return leaf
            has_rows = leaf.ndim > 0 and len(leaf) == num_rows
            return xd.distribute_tensor(leaf, self._mesh, self._lies(leaf.shape[:has_rows]))

        return pytree.tree_map(put, inputs)

    def _lies(self, shape: Sequence[int]) -> list[Placement]:
        """Return how a tensor lies whose first dims are rows and heads, where these are divided."""
        sizes = self._mesh.shape
        cut = [
            math.prod(n for n, p in zip(sizes, self._rows, strict=True) if p.is_shard() is is_row)
            for is_row in (True, False)
        ]
        dims = [dim for dim in range(min(len(shape), 2)) if shape[dim] % cut[dim] == 0]
        axis_dims = [0 if placement.is_shard() else 1 for placement in self._rows]
        return [Shard(dim) if dim in dims else Replicate() for dim in axis_dims]

    def _everywhere(self, tensor: Any) -> torch.Tensor:
        return tensor.redistribute(self._mesh, [Replicate()] * self._mesh.ndim)


class _Encoder(_OnMesh):
    """An encoder's forward. ``generate`` calls it once, before there is a cache."""

    def __init__(self, module: nn.Module, mesh: DeviceMesh, tp_axis: str) -> None:
        super().__init__(module, mesh, tp_axis)
        self.program = xd.compile(self._forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        first = next(filter(_is_of_host, pytree.tree_leaves(kwargs)), None)
        if first is None or args:  # in a training step
            return self._forward(*args, **kwargs)
        with torch.no_grad():
            return self.program(**self._put(kwargs, len(first)))


class _Decoder(_OnMesh):
    """A model's forward: a program where there is a cache. See the module docstring."""

    def __init__(self, module: nn.Module, mesh: DeviceMesh, tp_axis: str) -> None:
        super().__init__(module, mesh, tp_axis)
        self.program = xd.compile(self._step)
        self._reorder = xd.compile(self._reorder_step)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        name = next(
            (name for name, argument in kwargs.items() if isinstance(argument, Cache)), None
        )
        tokens = next((kwargs[key] for key in _INPUTS if kwargs.get(key) is not None), None)
        if name is None or tokens is None or args:
            return self._forward(*args, **kwargs)
        cache = kwargs.pop(name)
        if not cache.is_compileable:
            raise ArgumentTypeError(
                f"generate() was called with a {type(cache).__name__} on a model that "
                "compile_generate has prepared. Its tensors grow with each token, and each shape "
                "would be a program of its own. Pass cache_implementation='static', or a "
                "StaticCache."
            )
        layers = _static_layers(cache)
        # The zero is for caches that have no such layers, of Mamba's states only.
        lengths = xd.distribute_tensor(torch.tensor([0, *map(_count, layers)]), self._mesh)
        state = _state_of(cache, tokens.shape[1])
        with torch.no_grad():
            inputs = self._put(kwargs, len(tokens))
            outputs, changed, lengths = self.program(name, state, lengths, **inputs)
        _put_changes(cache, changed)
        for layer, count in zip(layers, lengths.cpu().tolist()[1:], strict=True):
            _set_count(layer, count)
        logits = outputs.get("logits")
        if isinstance(logits, DTensor):
            outputs["logits"] = logits.cpu()
        outputs[name] = cache
        return outputs

    def reorder_cache(self, cache: Cache, beam_idx: Any) -> Cache:
        """Change the rows of a cache between two tokens, as beams ask for: a program as well."""
        state = _state_of(cache, 1)
        if any(isinstance(leaf, DTensor) for leaf in pytree.tree_leaves(state)):
            self._reorder(state, xd.distribute_tensor(beam_idx, self._mesh))
        else:
            cache.reorder_cache(beam_idx)
        return cache

    def _reorder_step(self, state: Any, beam_idx: torch.Tensor) -> None:
        cache = _part_of(state)
        for layer in _static_layers(cache):
            setattr(layer, _LENGTH, torch.ones(()))  # layers ask whether they hold anything
        cache.reorder_cache(beam_idx)
        pairs = zip(pytree.tree_leaves(state), pytree.tree_leaves(_state_of(cache, 1)), strict=True)
        for old, new in pairs:
            if old is not new:
                old.copy_(new)

    def _step(
        self, name: str, state: Any, lengths: torch.Tensor, **inputs: Any
    ) -> tuple[Any, Any, torch.Tensor]:
        cache = _part_of(state)
        layers = _static_layers(cache)
        first, *layer_lengths = lengths.unbind()
        for layer, length in zip(layers, layer_lengths, strict=True):
            setattr(layer, _LENGTH, length.clone())
        for layer in _layers(cache):
            layer.lazy_initialization = functools.partial(self._made_on_mesh, layer)
        outputs = self._forward(**inputs, **{name: cache})
        for layer in _layers(cache):  # or it would hold itself, and outlast the step
            del layer.lazy_initialization
        new_lengths = self._everywhere(torch.stack([first, *map(_count_after, layers)]))
        outputs = type(outputs)(**{key: v for key, v in outputs.items() if v is not cache})
        if isinstance(outputs.get("logits"), DTensor):
            outputs["logits"] = self._everywhere(outputs["logits"])
        return outputs, _changes(cache, state), new_lengths

    def _made_on_mesh(self, layer: Any, *states: torch.Tensor, **named: torch.Tensor) -> None:
        """Make a layer's tensors, as it does by itself, but on the mesh."""
        with _ZerosOnMesh(self._mesh, self._lies):
            type(layer).lazy_initialization(layer, *states, **named)


class _ZerosOnMesh(TorchFunctionMode):
    """In its block ``torch.zeros(shape)`` of floating point lies on a mesh, as `lies` says."""

    def __init__(self, mesh: DeviceMesh, lies: Callable[[Sequence[int]], list[Placement]]) -> None:
        super().__init__()
        self._mesh = mesh
        self._lies = lies

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is not torch.zeros:
            return func(*args, **kwargs)
        like = func(*args, **{**kwargs, "device": "meta"})
        if not like.is_floating_point():
            return func(*args, **kwargs)
        placements = self._lies(like.shape)
        return xd.zeros(like.shape, dtype=like.dtype, device_mesh=self._mesh, placements=placements)


def _is_of_host(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and not isinstance(leaf, DTensor)


# ------------------------------------------------------------------- A cache as arguments of a step
#
# A part is a cache or a layer of one: an object whose attributes are tensors, numbers, and other
# parts in lists and dicts. Its state is a dict of them, with its class: arguments that a compiled
# step takes like any. What has changed leaves the step the same way, a list's items by their
# numbers; a tensor that was written to has not changed.

_SAME = object()


def _state_of(value: Any, num_tokens: int) -> Any:
    if isinstance(value, _PARTS):
        kind, left_out = type(value), {_LENGTH}
        if isinstance(value, StaticSlidingWindowLayer) and value.is_initialized and num_tokens == 1:
            kind, left_out = _window_of(kind), {_LENGTH, _COUNT}
        fields = {name: field for name, field in vars(value).items() if name not in left_out}
        return {"class": kind, **{name: _state_of(f, num_tokens) for name, f in fields.items()}}
    return _mapped(value, functools.partial(_state_of, num_tokens=num_tokens))


def _part_of(state: Any) -> Any:
    if isinstance(state, dict) and "class" in state:
        part = object.__new__(state["class"])
        fields = {name: _part_of(field) for name, field in state.items() if name != "class"}
        vars(part).update(fields)
        return part
    return _mapped(state, _part_of)


def _changes(part: Any, state: dict[str, Any]) -> dict[str, Any]:
    """Return what a part holds after the step that its state before does not have."""
    pairs = {n: _change(new, state.get(n)) for n, new in vars(part).items() if n != _LENGTH}
    return {name: change for name, change in pairs.items() if change is not _SAME}


def _change(new: Any, old: Any) -> Any:
    if isinstance(new, _PARTS):
        return _changes(new, old) or _SAME
    if isinstance(new, torch.Tensor):
        return _SAME if new is old else new
    if type(new) is dict and type(old) is dict:
        pairs = {name: _change(entry, old.get(name)) for name, entry in new.items()}
        return {name: change for name, change in pairs.items() if change is not _SAME} or _SAME
    if type(new) is list and type(old) is list:
        return _change(dict(enumerate(new)), dict(enumerate(old)))
    return _SAME if type(new) is type(old) and new == old else new


def _put_changes(part: Any, changes: dict[str, Any]) -> None:
    for name, change in changes.items():
        setattr(part, name, _after(getattr(part, name, None), change))


def _after(old: Any, change: Any) -> Any:
    if isinstance(old, _PARTS):
        _put_changes(old, change)
    elif isinstance(old, (list, dict)) and isinstance(change, dict):
        for name, inner_change in change.items():
            old[name] = _after(old[name] if isinstance(old, list) else old.get(name), inner_change)
    else:
        return change
    return old


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """Apply a function to what is in a list or a dict; anything else is itself."""
    if type(value) is list:
        return [change(entry) for entry in value]
    if type(value) is dict:
        return {name: change(entry) for name, entry in value.items()}
    return value


def _layers(part: Any) -> Iterator[Any]:
    """Yield the layers of a cache, those of the caches in it too."""
    if isinstance(part, Cache):
        for field in vars(part).values():
            yield from field if isinstance(field, list) else _layers(field)


def _static_layers(cache: Cache) -> list[Any]:
    return [layer for layer in _layers(cache) if isinstance(layer, StaticLayer)]


def _count(layer: Any) -> int:
    has_window = isinstance(layer, StaticSlidingWindowLayer)
    return getattr(layer, _COUNT) if has_window else int(getattr(layer, _LENGTH))


def _set_count(layer: Any, count: int) -> None:
    setattr(layer, _LENGTH, torch.tensor(count))
    if isinstance(layer, StaticSlidingWindowLayer):
        setattr(layer, _COUNT, count)


def _count_after(layer: Any) -> torch.Tensor:
    """Return a layer's length in the program: layers with a window count in Python."""
    length = getattr(layer, _LENGTH)
    return torch.full_like(length, getattr(layer, _COUNT)) if hasattr(layer, _COUNT) else length


class _Window(StaticSlidingWindowLayer):
    """A layer with a window, for one more token, full or not: what the base does, on tensors."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        last = self.max_cache_len - 1
        is_full = self.cumulative_length > last
        place = self.cumulative_length.clamp(max=last).reshape(1)
        buffers: Any = (self.keys, self.values)
        for buffer, new in zip(buffers, (key_states, value_states), strict=True):
            window = torch.where(is_full, buffer.roll(-1, dims=-2), buffer)
            buffer.copy_(window.index_copy(2, place, new))
        self.cumulative_length.add_(1)
        return buffers

    def get_seq_length(self) -> Any:
        return self.cumulative_length

    def get_mask_sizes(self, query_length: int) -> tuple[int, Any]:
        return self.max_cache_len, (self.cumulative_length - self.max_cache_len + 1).clamp(min=0)


@functools.cache
def _window_of(kind: type) -> type:
    """Return the class that takes the place of a class of layers with a window."""
    return type(f"_{kind.__name__}", (_Window, kind), {})
