"""install(): what torch tells a script of its devices and processes is what the mesh's machine has.

A script written for torchrun asks which accelerator there is, how many, makes a process group and
moves its model to the device. After ``xd.install()`` it gets these answers, beside what
:mod:`xla_dtensor.nn.install` leads to "xla" meshes:

=======================================  ======================================================
torch.accelerator                        "xla", with this process's devices; ``synchronize()``
                                         waits for them; there is nothing to set
``torch.device("xla")``, "xla:0" of a    the host's memory, as the JAX runtime reports ``cpu``
factory or ``.to``                       (docs/decisions/device.md); the mesh takes it from there
torch.distributed.init_process_group     :func:`~xla_dtensor.hosts.processes.init_distributed`,
                                         unless it is told who is who
get_default_backend_for_device("xla")    "gloo", among the processes
``RANK``, ``LOCAL_RANK``                  those of the process, where nobody has set them
=======================================  ======================================================

Who asks how many devices there are, or for a mesh of them, joins the job and makes its group, as
torch's ``init_device_mesh`` does. Where torch has an accelerator of its own, that is the
accelerator until a runtime runs or ``XLA_DTENSOR_RUNTIME`` names one. torch's own code gets torch's
answers.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed
import torch.distributed.distributed_c10d as c10d

from xla_dtensor.hosts import processes
from xla_dtensor.nn import install as functions
from xla_dtensor.runtimes.registry import current_runtime, get_runtime

__all__ = ["install"]

dist: Any = torch.distributed


def install() -> None:
    """Let torch.distributed.tensor's functions work on "xla" meshes, and "xla" be the accelerator.

    Example:
        >>> import torch, xla_dtensor as xd
        >>> xd.install()
        >>> from torch.distributed.tensor import Shard, distribute_tensor
        >>> mesh = xd.init_device_mesh("xla", (8,))
        >>> distribute_tensor(torch.ones(8, 2), mesh, [Shard(0)])
        DTensor(shape=(8, 2), dtype=float32, placements=(S(0)), mesh=(0=8), local_shape=(1, 2))
        >>> torch.accelerator.current_accelerator(), torch.accelerator.device_count()
        (device(type='xla'), 8)
        >>> xd.uninstall()
    """
    if functions.is_installed():
        return
    functions.install(started)
    for name, answer in _ANSWERS.items():
        original = getattr(torch.accelerator, name, None)
        if original is not None:
            functions.put(original, _asked(original, answer))
    functions.put(c10d.init_process_group, _group(c10d.init_process_group))
    original = c10d.get_default_backend_for_device
    functions.put(original, _backend(original))
    if processes.chosen_runtime() == "jax":
        _take_xla_for_the_host()


def started() -> None:
    """Join the job that the environment, or torch's group, tells of; make a group where none is."""
    if current_runtime() is not None and dist.is_initialized():
        return
    if not dist.is_initialized():
        functions.at_uninstall(_destroy_group)
    process = processes.init_distributed(*_told_by_group())
    # How many there are is not said: a script would make a mesh of as many devices.
    for name, number in {"RANK": process.index, "LOCAL_RANK": process.local_index}.items():
        if name not in os.environ:
            os.environ[name] = str(number)
            functions.at_uninstall(functools.partial(os.environ.pop, name, None))


def _destroy_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _told_by_group() -> tuple[str | None, int | None, int | None]:
    """Return where the processes of torch's group meet, where the environment does not say it."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None, None, None
    if processes.place_from_environment() != processes.Place():
        return None, None, None
    host = os.environ.get("MASTER_ADDR", "127.0.0.1")
    message = [f"{host}:{processes.free_port_here()}"]
    dist.broadcast_object_list(message, src=0)
    return message[0], dist.get_world_size(), dist.get_rank()


# ------------------------------------------------------------------------------- Which accelerator


def _device_count() -> int:
    started()
    return len(get_runtime().addressable_device_ids())


def _synchronize(device: Any = None) -> None:
    started()
    get_runtime().synchronize()


_ANSWERS: dict[str, Callable[..., Any]] = {
    "is_available": lambda: True,
    "device_count": _device_count,
    "current_accelerator": lambda check_available=False: torch.device("xla"),
    "current_device_index": lambda: 0,
    "set_device_index": lambda device: None,
    "device_index": lambda device: contextlib.nullcontext(),
    "synchronize": _synchronize,
}


def _asked(original: Callable[..., Any], answer: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original, updated=())
    def ask(*args: Any, **kwargs: Any) -> Any:
        by_torch = str(sys._getframe(1).f_globals.get("__name__")).split(".")[0] == "torch"
        ours = not by_torch and functions.is_accelerator()
        return (answer if ours else original)(*args, **kwargs)

    return ask


# -------------------------------------------------------------------------------- The process group


def _group(original: Callable[..., Any]) -> Callable[..., Any]:
    """Join the job where the call does not say who is who; a group of its own is of hosts."""

    @functools.wraps(original)
    def init_process_group(
        backend: str | None = None,
        init_method: str | None = None,
        timeout: Any = None,
        world_size: int = -1,
        rank: int = -1,
        store: Any = None,
        *args: Any,
        **options: Any,
    ) -> None:
        is_explicit = init_method is not None or store is not None or (world_size, rank) != (-1, -1)
        if not (is_explicit or args) and functions.is_accelerator():
            processes.init_distributed()  # a group that is there already stays
            return
        if _host(options.get("device_id")) == "cpu":
            del options["device_id"]
        original(backend, init_method, timeout, world_size, rank, store, *args, **options)

    return init_process_group


def _backend(original: Callable[..., str]) -> Callable[..., str]:
    @functools.wraps(original)
    def get_default_backend_for_device(device: str | torch.device) -> str:
        return "gloo" if torch.device(device).type == "xla" else original(device)

    return get_default_backend_for_device


# ---------------------------------------------------------------------- The device "xla" on a host
#
# torch without torch_xla knows the device, and has no kernel that makes a tensor there. Ours make
# one in the host's memory, and all factories end in these two. `to`, `tensor` and `as_tensor` ask
# for more than a kernel where the device has no index, so they get the host by name.


def _take_xla_for_the_host() -> None:
    if "torch_xla" in sys.modules:
        return
    library = torch.library.Library("aten", "IMPL", "XLA")
    library.impl("empty.memory_format", _empty)
    library.impl("empty_strided", _empty_strided)
    functions.at_uninstall(library._destroy)
    for name in ("tensor", "as_tensor"):
        original = getattr(torch, name)
        functions.put(original, _by_name(original))
    functions.put_attribute(torch.Tensor, "to", _by_place(torch.Tensor.to))


def _empty(size: Any, *, device: Any = None, **options: Any) -> torch.Tensor:
    return torch.empty(size, device="cpu", **options)


def _empty_strided(size: Any, stride: Any, *, device: Any = None, **options: Any) -> torch.Tensor:
    return torch.empty_strided(size, stride, device="cpu", **options)


def _by_name(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def make(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = _host(kwargs["device"])
        return original(*args, **kwargs)

    return make


def _by_place(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if args:
            args = (_host(args[0]), *args[1:])
        elif "device" in kwargs:
            kwargs["device"] = _host(kwargs["device"])
        return original(tensor, *args, **kwargs)

    return to


def _host(device: Any) -> Any:
    """Return "cpu" for the device "xla", and anything else as it is."""
    is_xla = isinstance(device, torch.device) and device.type == "xla"
    is_xla = is_xla or (isinstance(device, str) and device.partition(":")[0] == "xla")
    return "cpu" if is_xla else device
