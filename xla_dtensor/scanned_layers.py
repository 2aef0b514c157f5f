"""scan_layers: equal layers as one loop, which XLA compiles once.

    self.layers = nn.ModuleList(Block(config) for _ in range(32))      as before
    self.layers = xd.scan_layers(self.layers, remat="full")            the same parameters and names
    ...
    x = self.layers(x, mask)                                           instead of the for loop

On the JAX runtime the program has one loop over the layers and one back, each with one layer's code
whatever their number, and `remat` says what the backward pass keeps of each layer. On torch_xla,
and off the mesh, the layers run one by one, under ``torch.utils.checkpoint`` where `remat` asks for
it. The numbers are the same.

What is a loop must be equal in each turn, so the layers may differ in the values of parameters and
buffers only. Parameters are read, stacked, in each call; they stay what they are otherwise:
sharded as they were, with their names, their gradients and their optimizer state.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from xla_dtensor.argument_types import argument_types
from xla_dtensor.equal_blocks import check_equal, holding, tensors_of
from xla_dtensor.errors import ArgumentTypeError, ScanError
from xla_dtensor.runtimes.layers import Layers
from xla_dtensor.runtimes.registry import current_runtime
from xla_dtensor.runtimes.remat import AS_SEEN, Remat

__all__ = ["ScannedLayers", "scan_layers"]


@argument_types
def scan_layers(
    layers: Iterable[nn.Module], remat: Any = "full", *, ignore: Sequence[str] = ()
) -> ScannedLayers:
    """Return the layers as one module that runs them as a loop.

    Args:
        layers: The layers, an ``nn.ModuleList`` as a rule. They are taken over, not copied.
        remat: What the backward pass keeps of each layer. Everything else is computed again.

            ================  ==================================================================
            "none"            all that it needs
            "full"            the layer's input
            "dots"            and the results of matmuls and convolutions
            "dots_no_batch"   and the results of matmuls without batch dims: not attention's
            "save:A,B"        and the values that the block named with ``xd.checkpoint_name``
            "offload:A,B"     the same, but in the host's memory
            a function        a ``context_fn`` of ``torch.utils.checkpoint``: what its policy saves
            ================  ==================================================================
        ignore: Names of attributes in which layers may differ, because the block does not use them:
            "layer_idx", say. The loop uses those of the first layer.

    Returns:
        A module to be called as ``layers(x, *shared, **shared)``. `x` is a tensor, or a tuple of
        tensors, as the block returns it; the other arguments are given to each layer. It is an
        ``nn.ModuleList`` of the same layers, so parameters are called ``layers.0....`` as before.

    Raises:
        ScanError: The layers differ (the first difference is named), or `remat` is unknown. On a
            call: a block that writes to a buffer, or that returns something else than it is given.
        ArgumentTypeError: No modules.

    Example:
        >>> import torch, xla_dtensor as xd
        >>> mesh = xd.init_device_mesh("xla", (2, 4), mesh_dim_names=("dp", "tp"))
        >>> blocks = [nn.Linear(8, 8) for _ in range(3)]
        >>> layers = xd.shard_module(xd.scan_layers(blocks), mesh, {"*.weight": ["tp", None]},
        ...                          unmatched="replicate")
        >>> layers(xd.distribute_tensor(torch.ones(4, 8), mesh)).shape
        torch.Size([4, 8])
        >>> [name for name, _ in layers.named_parameters()][:2]
        ['0.weight', '0.bias']
    """
    is_list = isinstance(layers, Iterable) and not isinstance(layers, (nn.ModuleDict, str))
    found = list(layers) if is_list else []
    wrong = next((layer for layer in found if not isinstance(layer, nn.Module)), None)
    if wrong is not None or not found:
        what = "no layers" if is_list and not found else f"a {type(wrong or layers).__name__}"
        raise ArgumentTypeError(
            f"scan_layers was called with {what}. It runs modules that are equal but for their "
            "parameters. Pass an nn.ModuleList, or a list of modules."
        )
    made = ScannedLayers(found, Remat.of(remat), tuple(ignore))
    check_equal(found, made.ignored)
    return made


class ScannedLayers(nn.ModuleList):
    """What :func:`scan_layers` returns.

    Args:
        layers: The layers.
        remat: What the backward pass keeps.
        ignored: Attributes in which layers may differ.
    """

    def __init__(self, layers: Sequence[nn.Module], remat: Remat, ignored: tuple[str, ...]) -> None:
        super().__init__(layers)
        self.remat, self.ignored = remat, ignored

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the layers one after the other.

        Args:
            x: What the first is given, and each returns: a tensor, or a tuple of tensors.
            *args: What each layer is given besides.
            **kwargs: The same, by name.

        Returns:
            What the last layer returns.

        Raises:
            ScanError: See :func:`scan_layers`.
        """
        runtime = current_runtime()
        if runtime is not None and runtime.has_loops and _is_on_mesh(self, x):
            return _loop(self, x, args, kwargs)
        return _unrolled(self, x, args, kwargs)


def _payload(tensor: torch.Tensor) -> torch.Tensor:
    return getattr(tensor, "_local_tensor", tensor)


def _is_on_mesh(layers: nn.ModuleList, x: Any) -> bool:
    """Tell whether tensors of the runtime are involved, and none that only stands for one."""
    runtime = current_runtime()
    assert runtime is not None
    tensors = [*tree_flatten(x)[0], *layers.parameters(), *layers.buffers()]
    payloads = [_payload(t) for t in tensors if isinstance(t, torch.Tensor)]
    if torch.compiler.is_compiling() or any(p.is_meta for p in payloads):
        return False
    return any(map(runtime.is_payload, payloads))


# ---------------------------------------------------------------------- one by one


def _unrolled(layers: ScannedLayers, x: Any, args: Any, kwargs: Any) -> Any:
    options = _checkpoint_options(layers.remat)
    for layer in layers:
        if options is None or not torch.is_grad_enabled():
            x = layer(x, *args, **kwargs)
        else:
            x = checkpoint(_on_copy, layer, x, *args, use_reentrant=False, **options, **kwargs)
    return x


def _on_copy(layer: nn.Module, x: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a layer on a copy: what it writes to its input must not be seen when it runs again."""
    return layer(tree_map_only(torch.Tensor, torch.clone, x), *args, **kwargs)


def _checkpoint_options(remat: Remat) -> dict[str, Any] | None:
    """Return arguments of torch's checkpoint; None for no checkpoint."""
    if remat.kind == "none":
        return None
    if remat.kind == "offload":
        raise ScanError(
            f"remat={remat.text!r} was asked for where the layers run one by one. Only a loop on "
            "the JAX runtime can move values to the host's memory. Pass 'full', or 'save:' with "
            "the same names."
        )
    if remat.contexts is not None:
        return {"context_fn": remat.contexts}
    if remat.kind in ("dots", "dots_no_batch"):
        batched = () if remat.kind == "dots_no_batch" else (torch.ops.aten.bmm.default,)
        seen = [op for ops in AS_SEEN.values() for op in ops]
        saved = [op for op in seen if op.name() in ("aten::mm", "aten::addmm")]
        contexts = functools.partial(create_selective_checkpoint_contexts, [*saved, *batched])
        return {"context_fn": contexts}
    return {}


# ---------------------------------------------------------------------- as a loop


def _loop(layers: ScannedLayers, x: Any, args: Any, kwargs: Any) -> Any:
    blocks = list(layers)
    check_equal(blocks, layers.ignored)
    carry, carry_tree = tree_flatten(x)
    _check_carry(carry)
    leaves, tree = tree_flatten((args, kwargs))
    runtime: Any = current_runtime()
    shared = [i for i, v in enumerate(leaves) if _is_payload(runtime, v)]
    _check_shared(leaves, shared)
    names, tensors = tensors_of(blocks, lambda t: _is_payload(runtime, t))
    template = blocks[0]

    def call(carry: Sequence[Any], given: Sequence[Any]) -> Sequence[Any]:
        filled = list(leaves)
        for i, tensor in zip(shared, given, strict=True):
            filled[i] = tensor
        more_args, more_kwargs = tree_unflatten(filled, tree)
        made = template(tree_unflatten(list(carry), carry_tree), *more_args, **more_kwargs)
        outputs, made_tree = tree_flatten(made)
        if made_tree != carry_tree:
            raise ScanError(
                f"A block of scan_layers returned {_kind(made)} where it was given {_kind(x)}. "
                "What one layer returns is the next one's first argument. Return the same kind, "
                "e.g. x and not (x,)."
            )
        return outputs

    swapped = functools.partial(holding, template, names)
    whole = Layers(call, swapped, tensors, names, tuple(layers.modules()))
    found = runtime.run_layers(whole, carry, [leaves[i] for i in shared], layers.remat)
    return tree_unflatten(found, carry_tree)


def _kind(value: Any) -> str:
    kind = type(value).__name__
    return f"a {kind} of {len(value)}" if isinstance(value, (tuple, list, dict)) else f"a {kind}"


def _is_payload(runtime: Any, value: Any) -> bool:
    return isinstance(value, torch.Tensor) and runtime.is_payload(_payload(value))


def _check_carry(carry: Sequence[Any]) -> None:
    runtime: Any = current_runtime()
    for value in carry:
        if getattr(value, "_is_per_device", False):
            raise ScanError(
                f"scan_layers was called with {value!r}. A loop's value is a global tensor here. "
                "Call it on the DTensor, and enter the local view inside the block."
            )
        if not _is_payload(runtime, value):
            raise ScanError(
                f"scan_layers was called with a first argument of type={type(value).__name__} that "
                "is not on the mesh, and layers that are. What goes from layer to layer is of one "
                "kind. Pass distribute_tensor(x, mesh, placements)."
            )


def _check_shared(leaves: Sequence[Any], shared: Sequence[int]) -> None:
    for i, value in enumerate(leaves):
        if getattr(value, "_is_per_device", False) or (
            i not in shared and isinstance(value, torch.Tensor) and value.requires_grad
        ):
            raise ScanError(
                f"scan_layers was called with a shared argument of type={type(value).__name__} "
                "that needs a gradient or is local to each device. Only global tensors on the mesh "
                "get one in a loop. Pass distribute_tensor(value, mesh, placements)."
            )
