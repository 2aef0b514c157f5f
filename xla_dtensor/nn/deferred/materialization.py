"""materialize: which tensors of a module get values, in which order, and from whom."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.tensor import Shard

from mesh_utils import Mesh
from xla_dtensor.core import Layout
from xla_dtensor.core.argument_types import argument_types
from xla_dtensor.core.errors import ArgumentTypeError, DistributeError, RngStateError
from xla_dtensor.dtensor.api import distribute_tensor
from xla_dtensor.dtensor.dtensor import DTensor
from xla_dtensor.dtensor.mesh import as_device_mesh
from xla_dtensor.nn.deferred.device import DeviceMaker
from xla_dtensor.nn.deferred.draws import Maker
from xla_dtensor.nn.deferred.inits import check_init, initialisations
from xla_dtensor.nn.deferred.mode import Initialising
from xla_dtensor.nn.deferred.tensors import (
    Entry,
    give_memory,
    model_entries,
    refuse_stale,
    refuse_unknown,
)
from xla_dtensor.nn.deferred.torch import TorchMaker
from xla_dtensor.nn.deferred.truncated import truncated_normals
from xla_dtensor.runtimes.live_objects import live_objects
from xla_dtensor.runtimes.registry import get_runtime

__all__ = ["materialize"]


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
        rng: Which random numbers; see :mod:`xla_dtensor.nn.deferred`.
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
    check_init(module, init)
    on = None if mesh is None else as_device_mesh(mesh)
    entries = model_entries(module)
    to_make = [entry for entry in entries if not entry.kept]
    if on is None:
        _refuse_plain(to_make)
    else:
        _refuse_optimizers(to_make)
    undo: list[Callable[[], None]] = []
    try:
        undo.extend(give_memory(entry, on) for entry in to_make)
        _initialise(module, entries, seed, rng, init)
        refuse_unknown(entries, initialised=init is not False)
        refuse_stale(module)
    except BaseException:
        for back in reversed(undo):
            back()
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


def _refuse_plain(to_make: list[Entry]) -> None:
    plain = [e.name for e in to_make if not e.is_buffer and not isinstance(e.tensor, DTensor)]
    if plain:
        more = f" and {len(plain) - 12} more" if len(plain) > 12 else ""
        raise DistributeError(
            f"materialize was called without a mesh on a model with {', '.join(plain[:12])}{more}. "
            "These parameters are on the meta device, and nothing says where they are to lie. Call "
            "shard_module, distribute_module or fully_shard first, or pass mesh= to replicate them."
        )


def _refuse_optimizers(to_make: list[Entry]) -> None:
    """Refuse parameters that will be other objects, where an optimizer holds them."""
    plain = {
        id(e.tensor): e.name
        for e in to_make
        if not e.is_buffer and not isinstance(e.tensor, DTensor)
    }
    if not plain:
        return
    for found in live_objects(torch.optim.Optimizer):
        held = [plain[id(p)] for g in found.param_groups for p in g["params"] if id(p) in plain]
        if held:
            raise DistributeError(
                f"materialize was called with a mesh on a model whose {held[0]} is no DTensor "
                f"yet, and an optimizer={type(found).__name__} holds it. Replicating makes "
                "another parameter, which that optimizer would not see. Call "
                "distribute_module(model, mesh) before the optimizer is made."
            )


def _initialise(
    module: nn.Module,
    entries: list[Entry],
    seed: int | None,
    rng: Literal["device", "torch"],
    init: Any,
) -> None:
    only: set[int] | None = None
    if init is False:
        unsaved = [e for e in entries if not e.is_saved and not e.kept]
        only = {id(owner) for entry in unsaved for owner, _ in entry.places}
        seed = seed or 0  # what is drawn is dropped, and moves no generator
    elif seed is not None or rng == "torch":
        _check_same_numbers(seed)
    lent = [] if only is None else [e for e in entries if e.is_saved and not e.kept]
    for entry in lent:
        entry.kept = True
    maker = DeviceMaker() if rng == "device" else TorchMaker()
    try:
        with _seeded(seed), torch.no_grad(), truncated_normals(rng):
            _run(initialisations(module, init, only), Initialising(maker, entries), maker)
    finally:
        for entry in lent:
            entry.kept = False
    _take_replaced(entries)


def _run(calls: Iterable[tuple[Any, Callable[[], Any]]], mode: Initialising, maker: Maker) -> None:
    with mode:
        for owner, call in calls:
            mode.owner = owner
            call()
            maker.between_modules()


def _take_replaced(entries: list[Entry]) -> None:
    """See what an initialisation has put in a tensor's place: ``module.bias = Parameter(...)``."""
    for entry in entries:
        module, name = entry.places[0]
        slots: Any = module._buffers if entry.is_buffer else module._parameters
        now = slots.get(name)
        if now is entry.tensor or entry.kept:
            continue
        if now is None or now.is_meta:
            entry.given = 0
            continue
        before, entry.given = entry.tensor, now.numel()
        if isinstance(before, DTensor) and not isinstance(now, DTensor):
            now = distribute_tensor(now.detach(), before.device_mesh, before.placements)
            if not entry.is_buffer:
                now = nn.Parameter(now, before.requires_grad)
        entry.replace(now)


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
    ids, mine = runtime.device_ids(), set(runtime.addressable_device_ids())
    if len(mine) == len(ids):
        return
    state = torch.get_rng_state().numpy().tobytes() if seed is None else repr(seed).encode()
    mesh = as_device_mesh(Mesh(list(ids), (len(ids),), ("process",)))
    layout = Layout.from_placements([Shard(0)], 1, mesh.value)
    number = torch.tensor([zlib.crc32(state)], dtype=torch.int64)
    payload = runtime.from_shards(dict.fromkeys(sorted(mine), number), (len(ids),), layout)
    numbers = DTensor._wrapping(payload, mesh, (Shard(0),)).cpu()
    if numbers.unique().numel() > 1:
        raise RngStateError(
            f"materialize was called with seed={seed} in processes that would draw different "
            "numbers. The parts of a parameter would not be of one whole. Pass the same seed in "
            "each process."
        )
