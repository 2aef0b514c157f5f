"""materialize: a model built without values gets them, each device its own part.

    with torch.device("meta"):
        model = Model()                              shapes only
    shard_module(model, mesh, rules)                 or distribute_module, or fully_shard
    materialize(model, seed=0)                       the values, where they lie

The values are those of an initialisation that was not sharded, and no host or device holds more
than its part of the model and the parameter being made. `rng` says which random numbers:

==========  =======================================  ============================================
rng         equal to, bit by bit                     cost
==========  =======================================  ============================================
"device"    the same initialisation of DTensors on   each device draws its part
            one device, any other mesh, any number
            of processes
"torch"     ``torch.manual_seed(seed); Model()``     every process draws the whole model, a few
            on one CPU                               MB at a time
==========  =======================================  ============================================

Parameters get memory as by ``to_empty``, and then the model's own functions initialise it. A
dispatch mode sees their ops. In-place draws, fills, and copies of host tensors are made anew, each
device its part; with "torch", draws and arithmetic run on the host, on the blocks that this
process's devices hold. Other ops, such as ``linalg.qr``, have the whole parameter on each device,
with "torch" on each host.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch
from torch import nn
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.distributed.tensor import Shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from mesh_utils import Mesh
from xla_dtensor.core import Layout
from xla_dtensor.core.argument_types import argument_types
from xla_dtensor.core.errors import ArgumentTypeError, DistributeError, RngStateError
from xla_dtensor.dtensor.api import distribute_tensor
from xla_dtensor.dtensor.dcp import layout_to_load
from xla_dtensor.dtensor.dtensor import DTensor
from xla_dtensor.dtensor.mesh import DeviceMesh, as_device_mesh, is_off_mesh
from xla_dtensor.nn.host_blocks import HostBlocks, torch_draws
from xla_dtensor.runtimes.live_objects import live_objects
from xla_dtensor.runtimes.nested import leaves, map_nested
from xla_dtensor.runtimes.registry import get_runtime
from xla_dtensor.runtimes.written import written_targets, written_values

__all__ = ["materialize"]

aten = torch.ops.aten
Rng: TypeAlias = Literal["device", "torch"]

_NAMES_SHOWN = 12

_DRAWS = {aten.normal_, aten.uniform_, aten.exponential_, aten.bernoulli_, aten.random_}
_DRAWS |= {aten.cauchy_, aten.log_normal_, aten.geometric_}
# What gives an element a value whatever it held before.
_INITIALISES = _DRAWS | {aten.zero_, aten.fill_, aten.copy_}


@argument_types
def materialize(
    module: nn.Module,
    mesh: Any = None,
    *,
    seed: int | None = None,
    rng: Literal["device", "torch"] = "device",
    init: Callable[[nn.Module], Any] | str | Literal[False] | None = None,
) -> nn.Module:
    """Give a model that was built on the meta device its values, in place.

    Parameters stay the objects that they are, so an optimizer may have been made before; tied
    weights stay tied. What has values already keeps them, and the random numbers of the rest are as
    if it had been drawn, too.

    Args:
        module: The model, its parameters distributed on the meta device.
        mesh: Where parameters and buffers are replicated that are no DTensors yet. None: such
            parameters are refused, such buffers become plain tensors of the host.
        seed: What the random numbers start from; generators stay where they are. None: the
            generators in use are drawn from.
        rng: Which random numbers; see :mod:`xla_dtensor.nn.materialize`.
        init: What initialises the model after the modules' own ``reset_parameters`` and Hugging
            Face's ``_init_weights``: a function that is called with each module, submodules first
            (as ``model.apply(init)``), or the name of a method of the model. False: nothing is
            drawn, and a checkpoint is to be loaded; only buffers that no checkpoint has are made.

    Returns:
        The same model. If an error is raised, it is on the meta device as before.

    Raises:
        DistributeError: A tensor whose value nobody gives, by name; a parameter that is no DTensor;
            a model that needs an `init`.
        RngStateError: The processes of the job would draw from different states.
        ArgumentTypeError: Not a module, or a wrong argument.

    Example:
        >>> import torch, xla_dtensor as xd
        >>> mesh = xd.init_device_mesh("xla", (8,), mesh_dim_names=("tp",))
        >>> model = torch.nn.Linear(4, 16, device="meta")
        >>> model = xd.shard_module(model, mesh, {"": "colwise"})
        >>> materialize(model, seed=0, rng="torch").weight.placements
        (Shard(dim=0),)
        >>> _ = torch.manual_seed(0)
        >>> bool((model.weight.cpu() == torch.nn.Linear(4, 16).weight).all())
        True
    """
    _check_arguments(module, seed, rng)
    _check_init(module, init)
    device_mesh = None if mesh is None else as_device_mesh(mesh)
    entries = _entries(module)
    on_meta = [entry for entry in entries if not entry.is_final]
    _refuse_plain(on_meta, device_mesh)
    undo: list[Callable[[], None]] = []
    try:
        undo.extend(_allocate(entry, device_mesh) for entry in on_meta)
        _initialise(module, entries, seed, rng, init)
        _refuse_uninitialised(entries, init)
        _refuse_attributes(module)
    except BaseException:
        for restore in reversed(undo):
            restore()
        raise
    return module


def _check_arguments(module: Any, seed: Any, rng: Any) -> None:
    if not isinstance(module, nn.Module):
        raise ArgumentTypeError(
            f"materialize was called with an object of type={type(module).__name__}. Only a "
            "torch.nn.Module has parameters to be made. Pass a module, or make a tensor with "
            "xla_dtensor.randn."
        )
    if rng not in ("device", "torch"):
        raise ArgumentTypeError(
            f"materialize was called with rng={rng!r}. It says whose random numbers are drawn. "
            'Pass "device" for the devices\' own, or "torch" for those of PyTorch on a CPU.'
        )
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
        raise ArgumentTypeError(
            f"materialize was called with seed={seed!r} of type={type(seed).__name__}. A seed is "
            "an integer. Pass the same one in every process, or None."
        )
    if get_runtime().is_abstract:
        raise DistributeError(
            "materialize was called where tensors have no values, with "
            f"runtime={get_runtime().name!r}. Their devices are not here. Leave the model on the "
            "meta device."
        )


def _initialise(
    module: nn.Module, entries: list[_Entry], seed: int | None, rng: Rng, init: Any
) -> None:
    modules: set[int] | None = None
    if init is False:
        for entry in entries:
            entry.is_final |= entry.is_saved
        modules = {id(owner) for e in entries if not e.is_final for owner, _ in e.places}
        seed = seed or 0  # what is drawn is dropped, and moves no generator
    elif seed is not None or rng == "torch":
        _check_same_numbers(seed)
    mode = _DeviceInit(entries) if rng == "device" else _TorchInit(entries)
    with _seeded(seed), torch.no_grad(), _truncated_normals(rng), mode:
        for owner, initialise in _initialisations(module, init, modules):
            mode.owner = owner
            initialise()
            mode.end_module()
    _adopt_replacements(entries)


# ---------------------------------------------------------------------------- The model's tensors
#
# A parameter on the meta device stays the object that it is: it is given the content of one with
# memory, so an optimizer that was made before, fully_shard's hooks and tied modules see it. A
# tensor that is no DTensor yet cannot become one in place, and is replaced wherever it is.


@dataclass(eq=False)
class _Entry:
    """A parameter or a buffer, with all places that share it."""

    name: str
    tensor: Any
    is_buffer: bool
    is_saved: bool  # whether checkpoints have it
    is_final: bool  # it has its values, or a checkpoint will give them: writes are left out
    places: list[tuple[nn.Module, str]] = field(default_factory=list)
    num_initialised: int = 0  # elements that were given a value

    @property
    def is_complete(self) -> bool:
        """Whether all elements have a value, or none is asked of this process."""
        if self.is_final or _is_elsewhere(self.tensor):
            return True
        return self.num_initialised >= self.tensor.numel()

    def replace(self, tensor: torch.Tensor) -> None:
        """Put another tensor in all places."""
        for module, name in self.places:
            _slots(module, self.is_buffer)[name] = tensor
        self.tensor = tensor


def _slots(module: Any, is_buffer: bool) -> dict[str, Any]:
    return module._buffers if is_buffer else module._parameters


def _entries(model: nn.Module) -> list[_Entry]:
    """Return the parameters and buffers of a model, each once, in the order of its modules."""
    entries: dict[int, _Entry] = {}
    for path, module in model.named_modules():
        for is_buffer in (False, True):
            for name, tensor in _slots(module, is_buffer).items():
                if tensor is None:
                    continue
                if id(tensor) not in entries:
                    is_saved = not is_buffer or name not in module._non_persistent_buffers_set
                    full_name = f"{path}.{name}" if path else name
                    entries[id(tensor)] = _Entry(
                        full_name, tensor, is_buffer, is_saved, is_final=not tensor.is_meta
                    )
                entries[id(tensor)].places.append((module, name))
    return list(entries.values())


def _is_elsewhere(tensor: Any) -> bool:
    """Tell whether a tensor lies on devices of other processes only."""
    return isinstance(tensor, TorchDTensor) and is_off_mesh(tensor._spec.mesh)  # pyright: ignore


def _allocate(entry: _Entry, mesh: DeviceMesh | None) -> Callable[[], None]:
    """Give a tensor on the meta device zeros where it lies; what is returned takes them back."""
    meta = entry.tensor
    if _is_elsewhere(meta):
        return lambda: None
    new: Any = meta.detach()
    if mesh is not None and not isinstance(meta, DTensor):
        new = distribute_tensor(new, mesh)
    if not isinstance(new, DTensor):
        new = torch.zeros_like(new, device="cpu")
    elif not _is_elsewhere(new):
        new = torch.empty_like(new, device="xla")
    if isinstance(meta, nn.Parameter):
        new = nn.Parameter(new, meta.requires_grad)
    vars(new).update(vars(meta))
    if isinstance(meta, DTensor):
        _swap(entry, new)
        return lambda: torch.utils.swap_tensors(meta, new)
    entry.replace(new)
    return lambda: entry.replace(meta)


def _swap(entry: _Entry, new: torch.Tensor) -> None:
    tensor = entry.tensor
    hooks = tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None)
    reason = "It has gradient hooks, which would be lost" if hooks else ""
    if not reason:
        try:
            torch.utils.swap_tensors(tensor, new)
        except RuntimeError as error:
            reason = f"torch cannot give it another content: {error}".rstrip(".")
    if reason:
        raise DistributeError(
            f"materialize was called on a model with {entry.name}={tensor!r} on the meta device. "
            f"{reason}. Materialize before anything else holds the parameter."
        )


def _adopt_replacements(entries: list[_Entry]) -> None:
    """Take what an initialisation has put in a tensor's place: ``module.bias = Parameter(...)``."""
    for entry in entries:
        module, name = entry.places[0]
        new = _slots(module, entry.is_buffer).get(name)
        if new is entry.tensor or entry.is_final:
            continue
        if new is None or new.is_meta:
            entry.num_initialised = 0
            continue
        old, entry.num_initialised = entry.tensor, new.numel()
        if isinstance(old, DTensor) and not isinstance(new, DTensor):
            new = distribute_tensor(new.detach(), old.device_mesh, old.placements)
            new = new if entry.is_buffer else nn.Parameter(new, old.requires_grad)
        entry.replace(new)


def _refuse_plain(on_meta: list[_Entry], mesh: DeviceMesh | None) -> None:
    """Refuse parameters that are no DTensors: without a mesh, or where an optimizer holds them."""
    names = {
        id(e.tensor): e.name
        for e in on_meta
        if not e.is_buffer and not isinstance(e.tensor, DTensor)
    }
    if names and mesh is None:
        raise DistributeError(
            f"materialize was called without a mesh on a model with {_shown([*names.values()])}. "
            "These parameters are on the meta device, and nothing says where they are to lie. Call "
            "shard_module, distribute_module or fully_shard first, or pass mesh= to replicate them."
        )
    for optimizer in live_objects(torch.optim.Optimizer) if names else ():
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        name = next((names[id(p)] for p in parameters if id(p) in names), None)
        if name is not None:
            raise DistributeError(
                f"materialize was called with a mesh on a model whose {name} is no DTensor "
                f"yet, and an optimizer={type(optimizer).__name__} holds it. Replicating makes "
                "another parameter, which that optimizer would not see. Call "
                "distribute_module(model, mesh) before the optimizer is made."
            )


def _refuse_uninitialised(entries: list[_Entry], init: Any) -> None:
    """Refuse tensors whose values nobody has given."""
    missing = [e for e in entries if not e.is_complete]
    if not missing:
        return
    names = [f"{e.name} ({e.num_initialised} of {e.tensor.numel()} elements)" for e in missing]
    reason = "no initialisation has given all their values"
    if init is False:
        reason = "no checkpoint has these buffers, and nothing computes them anew"
    raise DistributeError(
        f"materialize was called on a model with unknown={_shown(names)}. They were made on the "
        f"meta device, where what a constructor computes is lost, and {reason}. Give the module a "
        "reset_parameters(), or pass init=function, which is called with each module and writes to "
        "them in place."
    )


def _refuse_attributes(model: nn.Module) -> None:
    """Refuse a tensor on the meta device that is neither parameter nor buffer."""
    names = [
        f"{path}.{name}" if path else name
        for path, module in model.named_modules()
        for name, tensor in vars(module).items()
        if isinstance(tensor, torch.Tensor)
        and not isinstance(tensor, nn.Parameter)
        and tensor.is_meta
        and not _is_elsewhere(tensor)
    ]
    if names:
        raise DistributeError(
            f"materialize was called on a model with attributes={_shown(names)}. These tensors "
            "are on the meta device, and neither parameters nor buffers, so nothing can give them "
            "values. Register them with register_buffer, or make them outside of "
            "torch.device('meta')."
        )


def _shown(names: list[str]) -> str:
    more = len(names) - _NAMES_SHOWN
    return ", ".join(names[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")


# --------------------------------------------------------- Which functions initialise the model
#
# First each module's own, submodules first, as constructors run: reset_parameters(), or
# _reset_parameters() of nn.MultiheadAttention and nn.Transformer. A model of Hugging Face, which
# may be part of another one, ends its constructor with _init_weights(module) for each module in it
# that no inner model has initialised. Last comes the caller's function.


def _check_init(model: nn.Module, init: Any) -> None:
    """Refuse an `init` that is none, or a model that needs one."""
    if isinstance(init, str):
        if not callable(getattr(model, init, None)):
            raise DistributeError(
                f"materialize was called with init={init!r}. A {type(model).__name__} has no such "
                "method. Pass the name of a method of the model, or a function of one module."
            )
    elif init is None:
        for module in model.modules():
            if hasattr(module, "_init_weights") and not _is_hugging_face(module):
                raise DistributeError(
                    "materialize was called with init=None on a model with a "
                    f"{type(module).__name__}, which has _init_weights. It is no Hugging Face "
                    "model, so what its constructor does with that method cannot be known. Pass "
                    "init=model._init_weights if it is applied to every module, else a function "
                    "that does what the constructor does."
                )
    elif init is not False and not callable(init):
        raise ArgumentTypeError(
            f"materialize was called with init={init!r} of type={type(init).__name__}. It says "
            "how values are made. Pass a function of one module, the name of a method of the "
            "model, False to leave values to a checkpoint, or None."
        )


def _initialisations(
    model: nn.Module, init: Any, modules: set[int] | None
) -> Iterator[tuple[nn.Module | None, Callable[[], Any]]]:
    """Yield the calls that initialise a model in order, each with the module whose own it is."""
    initialised: set[int] = set()
    for module in _children_first(model, set()):
        reset = _own_reset(module)
        if reset is not None and (modules is None or id(module) in modules):
            yield module, reset
        if _is_hugging_face(module):
            for part in _children_first(module, initialised):
                if modules is None or id(part) in modules:
                    part.__dict__.pop("_is_hf_initialized", None)
                    yield part, lambda module=module, part=part: module._init_weights(part)
    if isinstance(init, str):
        yield None, getattr(model, init)
    elif callable(init):
        for module in _children_first(model, set()):
            yield None, lambda module=module: init(module)


def _children_first(module: nn.Module, seen: set[int]) -> Iterator[Any]:
    if id(module) in seen:
        return
    seen.add(id(module))
    for child in module.children():
        yield from _children_first(child, seen)
    yield module


def _own_reset(module: nn.Module) -> Callable[[], Any] | None:
    for name in ("reset_parameters", "_reset_parameters"):
        reset: Any = getattr(module, name, None)
        if callable(reset):
            with contextlib.suppress(TypeError):  # it needs arguments
                inspect.signature(reset).bind()
                return reset
    return None


def _is_hugging_face(module: nn.Module) -> bool:
    return all(hasattr(module, name) for name in ("_init_weights", "init_weights", "post_init"))


# ----------------------------------------------------------------------------- Random numbers


@contextlib.contextmanager
def _seeded(seed: int | None) -> Iterator[None]:
    """Let all draws start from a seed, and leave the generators where they are."""
    if seed is None:
        yield
        return
    runtime = get_runtime()
    with torch.random.fork_rng(devices=[]), runtime.using_rng(runtime.new_rng(seed)):
        torch.manual_seed(seed)
        yield
    # The draws left marks by which a repeated forward pass finds its numbers again. They were of
    # another generator, and must not be found.
    runtime.set_rng_state(runtime.get_rng_state())


def _check_same_numbers(seed: int | None) -> None:
    """Refuse processes that would draw different numbers; all of them, so that none waits."""
    runtime = get_runtime()
    ids, own = runtime.device_ids(), sorted(runtime.addressable_device_ids())
    if len(own) == len(ids):
        return
    state = torch.get_rng_state().numpy().tobytes() if seed is None else repr(seed).encode()
    mesh = as_device_mesh(Mesh(list(ids), (len(ids),), ("process",)))
    layout = Layout.from_placements([Shard(0)], 1, mesh.value)
    number = torch.tensor([zlib.crc32(state)], dtype=torch.int64)
    payload = runtime.from_shards(dict.fromkeys(own, number), (len(ids),), layout)
    if DTensor._wrapping(payload, mesh, (Shard(0),)).cpu().unique().numel() > 1:
        raise RngStateError(
            f"materialize was called with seed={seed} in processes that would draw different "
            "numbers. The parts of a parameter would not be of one whole. Pass the same seed in "
            "each process."
        )


@contextlib.contextmanager
def _truncated_normals(rng: Rng) -> Iterator[None]:
    """Let ``nn.init.trunc_normal_`` take DTensors, for a while."""
    # Newer versions of torch draw until all values are within bounds, with masks over the whole
    # tensor and new_tensor, which a DTensor does not have. "torch" runs that on the host, whole.
    # "device" draws once, as older versions do, by the inverse of the distribution function.
    name = "_no_grad_trunc_normal_"
    original: Any = getattr(nn.init, name)
    if "new_tensor" not in original.__code__.co_names:
        yield
        return

    def truncated(
        tensor: Any, mean: float, std: float, a: float, b: float, generator: Any = None
    ) -> Any:
        if not isinstance(tensor, DTensor):
            return original(tensor, mean, std, a, b, generator)
        if rng == "torch":
            host_tensor = torch.empty(tensor.shape, dtype=tensor.dtype)
            return tensor.copy_(original(host_tensor, mean, std, a, b, generator))
        low, high = (math.erf((bound - mean) / std / math.sqrt(2.0)) for bound in (a, b))
        tensor.uniform_(low, high, generator=generator)
        return tensor.erfinv_().mul_(std * math.sqrt(2.0)).add_(mean).clamp_(min=a, max=b)

    setattr(nn.init, name, truncated)
    try:
        yield
    finally:
        setattr(nn.init, name, original)


# ------------------------------------------------------------------- The ops of an initialisation


class _DeviceInit(TorchDispatchMode):
    """While a model is initialised, every op passes here. Each device draws its own part.

    An initialisation writes to parameters in place: to themselves, to ``.data``, to views. How many
    elements got a value is counted, so that what nobody initialised can be named. Writes to final
    tensors are left out, but the generator moves on as if they were drawn. The same holds for a
    tied tensor, which its first module initialises: where constructors drew for two modules, what
    the second drew was dropped when they were tied.
    """

    def __init__(self, entries: Sequence[_Entry]) -> None:
        super().__init__()
        # By id, and not by weak reference: a tensor with one cannot be swapped back.
        self._entries = {id(entry.tensor): entry for entry in entries}
        self._views: Any = WeakIdKeyDictionary()
        # Whose own initialisation runs; None while it is the caller's, after all is tied.
        self.owner: nn.Module | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            self._write(func, args, kwargs)
            return written_targets(func, args, kwargs)
        makes_views = any(r.alias_info is not None for r in func._schema.returns)
        if makes_views and isinstance(args[0], torch.Tensor):
            views = func(*args, **kwargs)
            entry = self._entry(args[0])
            if entry is not None:
                self._views.update((view, entry) for view in leaves(views))
            return views
        if any(isinstance(leaf, DTensor) for leaf in leaves((tuple(args), kwargs))):
            return self._compute(func, args, kwargs)
        return func(*args, **kwargs)

    def _entry(self, tensor: torch.Tensor) -> _Entry | None:
        return self._entries.get(id(tensor)) or self._views.get(tensor)

    def _is_final(self, entry: _Entry | None) -> bool:
        if entry is None:
            return False
        modules = [module for module, _ in entry.places]
        return entry.is_final or (self.owner in modules and self.owner is not modules[0])

    def _write(self, func: Any, args: Sequence[Any], kwargs: Any) -> None:
        targets = [t for t in leaves(written_values(func, args, kwargs)) if t is not None]
        entries = [self._entry(target) for target in targets]
        target = targets[0] if targets else None
        if _is_elsewhere(target) or any(self._is_final(entry) for entry in entries):
            if func.overloadpacket in _DRAWS:
                self._skip_draw(func, target, args, kwargs)
            return
        if len(targets) == 1 and isinstance(target, DTensor):
            self._write_to(target, func, args, kwargs)
        else:
            func(*args, **kwargs)
        if func.overloadpacket in _INITIALISES or "out" in kwargs:
            for target, entry in zip(targets, entries, strict=True):
                if entry is not None:
                    entry.num_initialised += target.numel()

    def _write_to(self, target: DTensor, func: Any, args: Sequence[Any], kwargs: Any) -> None:
        inputs = [a for a in (*args[1:], *kwargs.values()) if isinstance(a, (torch.Tensor, list))]
        if func.overloadpacket in _DRAWS and not inputs:
            if target.numel():
                self._draw(func, target, args, kwargs)
        elif func in (aten.zero_.default, aten.fill_.Scalar):
            fill = args[1] if len(args) > 1 else 0
            shape, layout = tuple(target.shape), layout_to_load(target)
            _assign(target, get_runtime().make(fill, shape, target.dtype, layout))
        elif func in (aten.eye.out, aten.eye.m_out):
            _copy_from_host(target, torch.eye(*target.shape))
        elif func is aten.copy_.default and not isinstance(args[1], DTensor):
            _copy_from_host(target, args[1])
        elif torch.Tag.pointwise in func.tags and args and not inputs:
            self._change(func, target, args, kwargs)
        else:
            func(*args, **kwargs)

    def _draw(self, func: Any, target: DTensor, args: Sequence[Any], kwargs: Any) -> None:
        # Bit by bit what the runtime's eager ops draw on one device: standard numbers, counted by
        # their position in the whole, and scaled by one op after the other, so that no compiler
        # makes one rounding of two.
        if func not in (aten.normal_.default, aten.uniform_.default):
            func(*args, **kwargs)
            return
        runtime, arguments = get_runtime(), _arguments(func, args, kwargs)
        if func is aten.normal_.default:
            kind, shift, scale = "normal", arguments["mean"], arguments["std"]
        else:
            kind, shift, scale = "uniform", arguments["from"], arguments["to"] - arguments["from"]
        rng: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if arguments["generator"] is not None:
            most = 2**63 - 1
            number = torch.randint(most, (), device="cpu", generator=arguments["generator"])
            rng = runtime.using_rng(runtime.new_rng(int(number)))
        wide = torch.promote_types(target.dtype, torch.float32)
        with rng:
            payload = runtime.make(kind, tuple(target.shape), wide, layout_to_load(target))
        numbers = DTensor._wrapping(payload, target._spec.mesh, target._spec.placements)
        if scale != 1:
            numbers.mul_(scale)
        if shift != 0:
            numbers.add_(shift)
        _assign(target, numbers._local_tensor)

    def _skip_draw(self, func: Any, target: Any, args: Sequence[Any], kwargs: Any) -> None:
        """Leave the generator where a draw would have left it."""
        if target.numel() and _arguments(func, args, kwargs)["generator"] is None:
            own = list(get_runtime().addressable_device_ids())
            layout = Layout.replicated(Mesh(own, (len(own),), ("own",)), 1)
            get_runtime().make("uniform", (1,), torch.float32, layout)

    def _change(self, func: Any, target: DTensor, args: Sequence[Any], kwargs: Any) -> None:
        """Run an in-place op that takes numbers only."""
        func(*args, **kwargs)

    def _compute(self, func: Any, args: Sequence[Any], kwargs: Any) -> Any:
        """Run an op that makes new tensors of DTensors."""
        return func(*args, **kwargs)

    def end_module(self) -> None:
        """Run what is pending."""
        # A lazy program must not grow with the model; the cut is the same on every mesh.
        if not get_runtime().has_loops:
            get_runtime().synchronize()


def _arguments(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return an op's arguments by name, with the defaults of those that were not passed."""
    formals = func._schema.arguments
    defaults = {formal.name: formal.default_value for formal in formals}
    positional = zip((formal.name for formal in formals), args, strict=False)
    return {**defaults, **dict(positional), **kwargs}


def _assign(target: DTensor, payload: torch.Tensor) -> None:
    """Give a tensor, which may be a view, the values of a payload of its shape."""
    get_runtime().run_op(aten.copy_.default, (target._local_tensor, payload), {})


def _copy_from_host(target: DTensor, source: torch.Tensor) -> None:
    host_tensor = source.detach().to("cpu", target.dtype).expand(target.shape)
    _assign(target, get_runtime().put(host_tensor, layout_to_load(target)))


# ----------------------------------------- rng="torch": drawn by torch's CPU generator on each host
#
# The CPU's stream is sequential, so every process draws all of it, run by run, and keeps what its
# devices hold. Arithmetic is done on the host as well, on the blocks of this process: XLA's erfinv
# is not torch's in the last bit.


class _TorchInit(_DeviceInit):
    """The values are plain PyTorch's, bit by bit."""

    def _draw(self, func: Any, target: DTensor, args: Sequence[Any], kwargs: Any) -> None:
        blocks = HostBlocks(target)
        for start, values in torch_draws(func, target, args, kwargs):
            blocks.write(start, values)
        _assign(target, blocks.payload())

    def _skip_draw(self, func: Any, target: Any, args: Sequence[Any], kwargs: Any) -> None:
        for _ in torch_draws(func, target, args, kwargs):
            pass

    def _change(self, func: Any, target: DTensor, args: Sequence[Any], kwargs: Any) -> None:
        blocks = HostBlocks(target, read=True)
        for buffer in blocks.buffers.values():
            func(buffer, *args[1:], **kwargs)
        _assign(target, blocks.payload())

    def _compute(self, func: Any, args: Sequence[Any], kwargs: Any) -> Any:

        def on_host(leaf: Any) -> Any:
            return leaf.cpu() if isinstance(leaf, DTensor) else leaf

        host_args, host_kwargs = map_nested(on_host, (tuple(args), dict(kwargs)))
        if "device" in host_kwargs:
            host_kwargs["device"] = torch.device("cpu")
        return func(*host_args, **host_kwargs)
