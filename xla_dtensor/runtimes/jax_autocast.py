"""``torch.autocast(mesh.device_type)`` on the JAX runtime.

A mesh's device type is "xla", its tensors say "cpu", and torch has no list of ops for autocast on
"xla". So an op on a mesh's tensor runs under the CPU's autocast, in the dtype that was asked for:

    with torch.autocast("xla", dtype=torch.bfloat16):
        layer(x)             as under torch.autocast("cpu", dtype=torch.bfloat16)
        plain @ plain        float32: plain tensors do not carry the key AutocastXLA
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch._C import DispatchKeySet
from torch.utils import checkpoint

__all__ = ["KEY", "register"]

KEY = DispatchKeySet(torch._C._dispatch_key_parse("AutocastXLA"))  # pyright: ignore
_registrations: list[torch.library.Library] = []


def register() -> None:
    """Install a kernel for each op that autocast knows on the CPU; again it does nothing."""
    if _registrations:
        return
    others = torch.library.Library("_", "IMPL")
    others.fallback(torch.library.fallthrough_kernel, "AutocastXLA")
    library = torch.library.Library("aten", "IMPL")
    for name in torch._C._dispatch_get_all_op_names():
        if not torch._C._dispatch_has_kernel_for_dispatch_key(name, "AutocastCPU"):
            continue
        namespace, _, rest = name.partition("::")
        packet, _, overload = rest.partition(".")
        if namespace == "aten":
            op = getattr(getattr(torch.ops.aten, packet), overload or "default")
            library.impl(rest, functools.partial(_under_autocast_of_cpu, op), "AutocastXLA")
    _registrations.extend((others, library))
    checkpoint._get_autocast_kwargs = functools.partial(
        _state_for_checkpoint, checkpoint._get_autocast_kwargs
    )


def _under_autocast_of_cpu(op: Any, *args: Any, **kwargs: Any) -> Any:
    dtype = torch.get_autocast_dtype("xla")
    with torch._C._ExcludeDispatchKeyGuard(KEY), torch.autocast("cpu", dtype=dtype):
        return op(*args, **kwargs)


def _state_for_checkpoint(original: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """What ``torch.utils.checkpoint`` keeps for the recomputation: of "cuda" and of "cpu"."""
    of_device, of_cpu = original(*args, **kwargs)
    if torch.is_autocast_enabled("xla") and not of_cpu["enabled"]:
        of_cpu = {**of_cpu, "enabled": True, "dtype": torch.get_autocast_dtype("xla")}
    return of_device, of_cpu
