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

import contextlib
import functools
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from xla_dtensor.core.argument_types import argument_types
from xla_dtensor.core.errors import ArgumentTypeError, ScanError
from xla_dtensor.runtimes.base import Layers
from xla_dtensor.runtimes.registry import current_runtime, get_runtime
from xla_dtensor.runtimes.whole_ops import AS_SEEN, LinearResult, Remat

__all__ = ["ScannedLayers", "checkpoint_name", "scan_layers"]


# ------------------------------------------------------------------------------------- Equal blocks
#
# Are these modules equal but for the values of their parameters and buffers?
#
# Layers that run as one loop share one piece of Python: the first one's. This module finds the
# first thing in which another layer would have behaved otherwise, and says where it is.

_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_always_called",
)
_OWN = frozenset({"_parameters", "_buffers", "_modules", *_HOOKS}) | frozenset(
    name for name in vars(nn.Module()) if "state_dict" in name
)
_DEPTH = 8
_absent = object()


def check_equal(blocks: Sequence[nn.Module], ignored: Sequence[str] = ()) -> None:
    """Raise at the first difference between layers in anything but the values of tensors."""
    first = dict(blocks[0].named_modules(remove_duplicate=False))
    for index, block in enumerate(blocks[1:], 1):
        modules = dict(block.named_modules(remove_duplicate=False))
        if list(first) != list(modules):
            extra = next(iter(set(first) ^ set(modules)))
            _refuse(index, extra, "a module that the other has not")
        for path, module in first.items():
            for name, x, y in _differences(module, modules[path], ignored):
                _refuse(index, f"{path}.{name}".strip("."), f"{y} where layer 0 has {x}")
        if _ties(blocks[0]) != _ties(block):
            _refuse(index, "parameters", "other tensors in common")


def tensors_of(
    blocks: Sequence[nn.Module], chosen: Callable[[torch.Tensor], bool]
) -> tuple[list[str], list[list[torch.Tensor]]]:
    """Return names and, by layer, the parameters and buffers that a loop has to read."""
    names: list[str] = []
    columns: list[list[torch.Tensor]] = []
    everything = [_tensors(block) for block in blocks]
    for name, tensor in everything[0].items():
        column = [tensors[name] for tensors in everything]
        if all(map(chosen, column)):
            names.append(name)
            columns.append(column)
        elif any(map(chosen, column)) or not all(_same_host(tensor, t) for t in column[1:]):
            raise ScanError(
                f"scan_layers has layers whose {name!r} is not on the mesh and not the same in "
                "all of them. A loop reads what differs from stacked tensors on the mesh. Place "
                "it: shard_module(model, mesh, rules), or distribute_tensor."
            )
        elif isinstance(tensor, nn.Parameter) and tensor.requires_grad:
            raise ScanError(
                f"scan_layers has layers whose parameter {name!r} is not on the mesh and requires "
                "grad. A loop differentiates tensors on the mesh. Place it: shard_module(model, "
                "mesh, rules), or distribute_tensor."
            )
    return names, [[column[i] for column in columns] for i in range(len(blocks))]


@contextlib.contextmanager
def holding(
    block: nn.Module, names: Sequence[str], tensors: Sequence[torch.Tensor]
) -> Iterator[None]:
    """Let `block` have other parameters and buffers, wherever these are used, for a while."""
    tensors_by_name = _tensors(block)
    stand_ins = {
        id(tensors_by_name[name]): tensor for name, tensor in zip(names, tensors, strict=True)
    }
    slots = [
        (table, name, tensor)
        for module in block.modules()
        for table in (module._parameters, module._buffers)
        for name, tensor in table.items()
        if id(tensor) in stand_ins
    ]
    try:
        for table, name, tensor in slots:
            table[name] = stand_ins[id(tensor)]  # pyright: ignore[reportArgumentType]
        yield
    finally:
        for table, name, tensor in slots:
            table[name] = tensor  # pyright: ignore[reportArgumentType]


def _tensors(block: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(block.named_parameters()), **dict(block.named_buffers())}


def _same_host(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a is b or (a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b))


def _ties(block: nn.Module) -> list[int]:
    """Return for each parameter the place of the first one that is the same tensor."""
    places: dict[int, int] = {}
    named = block.named_parameters(remove_duplicate=False)
    return [places.setdefault(id(p), i) for i, (_, p) in enumerate(named)]


def _refuse(index: int, where: str, what: str) -> NoReturn:
    raise ScanError(
        f"scan_layers was called with layers that differ: layer {index} has at {where!r} {what}. "
        "Its layers run as one loop over the first one's code. Make them equal, scan each run of "
        "equal layers by itself, or pass ignore=[name] for an attribute that the block never uses."
    )


# ------------------------------------------------------------------------------ One pair of modules


def _differences(a: nn.Module, b: nn.Module, ignored: Sequence[str]) -> Iterator[tuple[Any, ...]]:
    if type(a) is not type(b):
        yield "", type(a).__name__, type(b).__name__
    for kind in ("_parameters", "_buffers"):
        yield from _tensor_differences(getattr(a, kind), getattr(b, kind))
    for kind in _HOOKS:
        a_hooks, b_hooks = getattr(a, kind), getattr(b, kind)
        if not _same(list(a_hooks.values()), list(b_hooks.values())):
            yield kind, f"{len(a_hooks)} hooks", f"{len(b_hooks)} that differ"
    a_vars, b_vars = _attributes(a), _attributes(b)
    for name in (*a_vars, *(n for n in b_vars if n not in a_vars)):
        x, y = a_vars.get(name, _absent), b_vars.get(name, _absent)
        if name not in ignored and not _same(x, y):
            yield name, _short(x), _short(y)


def _attributes(module: nn.Module) -> dict[str, Any]:
    return {name: attribute for name, attribute in vars(module).items() if name not in _OWN}


def _tensor_differences(a_table: Any, b_table: Any) -> Iterator[tuple[Any, ...]]:
    if list(a_table) != list(b_table):
        yield "", list(a_table), list(b_table)
    for name, a in a_table.items():
        b = b_table[name]
        if (a is None) != (b is None):
            yield name, _short(a), _short(b)
        if a is None or b is None:
            continue
        for what, x, y in zip(_FACTS, _facts(a), _facts(b), strict=True):
            if x != y:
                yield name, f"{what}={x}", f"{what}={y}"


_FACTS = ("type", "shape", "dtype", "requires_grad", "mesh", "placements", "sharding")


def _facts(tensor: torch.Tensor) -> tuple[Any, ...]:
    spec = getattr(tensor, "_spec", None)
    payload = getattr(tensor, "_local_tensor", tensor)
    storage = getattr(payload, "_storage", None)
    return (
        type(tensor).__name__,
        tuple(tensor.shape),
        tensor.dtype,
        tensor.requires_grad,
        getattr(spec, "mesh", None),
        getattr(spec, "placements", None),
        getattr(storage, "sharding", None),
    )


# ------------------------------------------------------------------------------- One pair of values


def _same(a: Any, b: Any, depth: int = _DEPTH) -> bool:
    """Tell whether code that uses `a` would do the same with `b`."""
    if a is b:
        return True
    if type(a) is not type(b) or depth == 0:
        return False
    if isinstance(a, torch.Tensor):
        plain = type(a) is torch.Tensor
        return plain and _same_host(a, b)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(_same(x, y, depth - 1) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict):
        return list(a) == list(b) and all(_same(a[k], b[k], depth - 1) for k in a)
    if isinstance(a, (types.FunctionType, types.MethodType, functools.partial)):
        return _same_function(a, b, depth)
    if isinstance(a, nn.Module):
        return not any(True for _ in _differences(a, b, ()))
    by_identity = type(a).__eq__ is object.__eq__ and hasattr(a, "__dict__")
    return _equal(a, b) or (by_identity and _same(vars(a), vars(b), depth - 1))


def _same_function(a: Any, b: Any, depth: int) -> bool:
    if isinstance(a, functools.partial):
        a_parts, b_parts = ((f.func, f.args, f.keywords) for f in (a, b))
        return _same(a_parts, b_parts, depth - 1)
    if isinstance(a, types.MethodType):
        owners = isinstance(a.__self__, nn.Module)  # compared where the module itself is
        return a.__func__ is b.__func__ and (owners or _same(a.__self__, b.__self__, depth - 1))
    a_parts, b_parts = (
        (f.__defaults__, f.__kwdefaults__, [cell.cell_contents for cell in f.__closure__ or ()])
        for f in (a, b)
    )
    return a.__code__ is b.__code__ and _same(a_parts, b_parts, depth - 1)


def _equal(a: Any, b: Any) -> bool:
    # A hook of shard_module knows the path of its module, for its errors only.
    if hasattr(a, "layout") and hasattr(a, "pattern") and hasattr(a, "index"):
        return (a.layout, a.index) == (b.layout, b.index)
    try:
        return bool(a == b)
    except Exception:
        return False


def _short(attribute: Any) -> str:
    text = "nothing" if attribute is _absent else repr(attribute)
    return text if len(text) <= 60 else f"{text[:57]}..."


# -------------------------------------------------------------------------------------------- Remat
#
# Names for values, by which a loop of layers keeps some of them for its backward pass.


def checkpoint_name(x: torch.Tensor, name: str) -> torch.Tensor:
    """Give a value in a block a name that ``scan_layers(..., remat="save:name")`` can keep.

    The values are `x`'s, and so is the gradient. Outside of :func:`xla_dtensor.scan_layers`, and on
    a runtime other than JAX's, it returns `x` itself.

    Args:
        x: A tensor.
        name: Its name; several values may have the same.

    Returns:
        A tensor of the same values.

    Raises:
        ArgumentTypeError: Not a tensor, or not a text without commas.

    Example:
        >>> checkpoint_name(torch.ones(2), "mlp").tolist()
        [1.0, 1.0]
    """
    if not isinstance(x, torch.Tensor) or not isinstance(name, str) or not name or "," in name:
        raise ArgumentTypeError(
            f"checkpoint_name was called with x of type={type(x).__name__}, name={name!r}. A name "
            "is a text without commas, and only tensors have one. Pass a tensor and a text."
        )
    payload = getattr(x, "_local_tensor", x)
    runtime = get_runtime() if type(payload) is not torch.Tensor else None
    if runtime is None or not runtime.has_loops or not runtime.is_payload(payload):
        return x
    return _Named.apply(x, name)  # pyright: ignore[reportReturnType]


class _Named(LinearResult):
    @staticmethod
    def forward(ctx: Any, x: Any, name: str) -> Any:
        payload = getattr(x, "_local_tensor", x)
        named = get_runtime().named(payload, name)
        return named if payload is x else x.rewrapped(named)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad, None


# ------------------------------------------------------------------------------------- scan_layers


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
    modules = list(layers) if is_list else []
    no_module = next((layer for layer in modules if not isinstance(layer, nn.Module)), None)
    if no_module is not None or not modules:
        kind = type(no_module or layers).__name__
        what = "no layers" if is_list and not modules else f"a {kind}"
        raise ArgumentTypeError(
            f"scan_layers was called with {what}. It runs modules that are equal but for their "
            "parameters. Pass an nn.ModuleList, or a list of modules."
        )
    scanned = ScannedLayers(modules, Remat.of(remat), tuple(ignore))
    check_equal(modules, scanned.ignored)
    return scanned


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

    def __getitem__(self, idx: Any) -> Any:
        """Return one layer, or those of a slice as layers that are scanned alike."""
        if not isinstance(idx, slice):
            return super().__getitem__(idx)
        return ScannedLayers(list(self._modules.values())[idx], self.remat, self.ignored)  # pyright: ignore[reportArgumentType]

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
        is_loop = len(self) > 0 and runtime is not None and runtime.has_loops
        if is_loop and _is_on_mesh(self, x):
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
        products = [op for ops in AS_SEEN.values() for op in ops]
        saved = [op for op in products if op.name() in ("aten::mm", "aten::addmm")]
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

    def call(carry: Sequence[Any], shared_tensors: Sequence[Any]) -> Sequence[Any]:
        filled = list(leaves)
        for i, tensor in zip(shared, shared_tensors, strict=True):
            filled[i] = tensor
        more_args, more_kwargs = tree_unflatten(filled, tree)
        output = template(tree_unflatten(list(carry), carry_tree), *more_args, **more_kwargs)
        outputs, output_tree = tree_flatten(output)
        if output_tree != carry_tree:
            raise ScanError(
                f"A block of scan_layers returned {_kind(output)} where it was given {_kind(x)}. "
                "What one layer returns is the next one's first argument. Return the same kind, "
                "e.g. x and not (x,)."
            )
        return outputs

    swapped = functools.partial(holding, template, names)
    loop = Layers(call, swapped, tensors, names, blocks)
    outputs = runtime.run_layers(loop, carry, [leaves[i] for i in shared], layers.remat)
    return tree_unflatten(outputs, carry_tree)


def _kind(output: Any) -> str:
    kind = type(output).__name__
    return f"a {kind} of {len(output)}" if isinstance(output, (tuple, list, dict)) else f"a {kind}"


def _is_payload(runtime: Any, leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and runtime.is_payload(_payload(leaf))


def _check_carry(carry: Sequence[Any]) -> None:
    runtime: Any = current_runtime()
    for leaf in carry:
        if getattr(leaf, "_is_per_device", False):
            raise ScanError(
                f"scan_layers was called with {leaf!r}. A loop's value is a global tensor here. "
                "Call it on the DTensor, and enter the local view inside the block."
            )
        if not _is_payload(runtime, leaf):
            raise ScanError(
                f"scan_layers was called with a first argument of type={type(leaf).__name__} that "
                "is not on the mesh, and layers that are. What goes from layer to layer is of one "
                "kind. Pass distribute_tensor(x, mesh, placements)."
            )


def _check_shared(leaves: Sequence[Any], shared: Sequence[int]) -> None:
    for i, leaf in enumerate(leaves):
        if getattr(leaf, "_is_per_device", False) or (
            i not in shared and isinstance(leaf, torch.Tensor) and leaf.requires_grad
        ):
            raise ScanError(
                f"scan_layers was called with a shared argument of type={type(leaf).__name__} "
                "that needs a gradient or is local to each device. Only global tensors on the mesh "
                "get one in a loop. Pass distribute_tensor(value, mesh, placements)."
            )
