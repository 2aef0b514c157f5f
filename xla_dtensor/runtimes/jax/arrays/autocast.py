"""``torch.autocast(mesh.device_type)`` on the JAX runtime.

A mesh's device type is "xla", its tensors say "cpu", and torch has no list of ops for autocast on
"xla". So an op on a mesh's tensor runs under the CPU's autocast, in the dtype that was asked for:

    with torch.autocast("xla", dtype=torch.bfloat16):
        layer(x)             as under torch.autocast("cpu", dtype=torch.bfloat16)
        plain @ plain        float32: plain tensors do not carry the key AutocastXLA

torch_xla has kernels for the same key, which leave tensors of a mesh alone. Where it is imported as
well, before or after the runtime starts (libraries do that without being asked), these here take
their place. What passes all other ops on is registered once only, or torch ends the process: ours
is withdrawn while torch_xla is imported.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch._C import DispatchKeySet
from torch.utils import checkpoint

from xla_dtensor.core.errors import UnsupportedOpError

__all__ = ["KEY", "register"]

KEY = DispatchKeySet(torch._C._dispatch_key_parse("AutocastXLA"))  # pyright: ignore
_registrations: list[torch.library.Library] = []
_TORCH_XLA = "torch_xla"


def register() -> None:
    """Install a kernel for each op that autocast knows on the CPU; again it does nothing."""
    if _registrations:
        return
    checkpoint._get_autocast_kwargs = functools.partial(
        _state_for_checkpoint, checkpoint._get_autocast_kwargs
    )
    if _TORCH_XLA not in sys.modules:
        sys.meta_path.insert(0, _BesideTorchXla())
        fallback = torch.library.Library("_", "IMPL")
        fallback.fallback(torch.library.fallthrough_kernel, "AutocastXLA")
        _registrations.append(fallback)
    _register_kernels()


def _register_kernels() -> None:
    library = torch.library.Library("aten", "IMPL")
    _registrations.append(library)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(?s).*verriding a previously registered kernel")
        for name in torch._C._dispatch_get_all_op_names():
            if not torch._C._dispatch_has_kernel_for_dispatch_key(name, "AutocastCPU"):
                continue
            namespace, _, qualified = name.partition("::")
            packet, _, overload = qualified.partition(".")
            if namespace == "aten":
                op = getattr(getattr(torch.ops.aten, packet), overload or "default")
                library.impl(
                    qualified, functools.partial(_under_autocast_of_cpu, op), "AutocastXLA"
                )


class _BesideTorchXla(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Withdraws what is registered before torch_xla is imported, and registers kernels after it."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Stand between torch_xla and its own loader; other modules are not looked at."""
        if fullname != _TORCH_XLA:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            sys.meta_path.insert(0, self)
            return None
        self.loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> Any:
        """Make the module as its own loader does."""
        return self.loader.create_module(spec)

    def exec_module(self, module: Any) -> None:
        """Import it while nothing of ours is registered."""
        for library in _registrations:
            library._destroy()
        _registrations.clear()
        module.__loader__ = module.__spec__.loader = self.loader
        self.loader.exec_module(module)
        _register_kernels()


def _under_autocast_of_cpu(op: Any, *args: Any, **kwargs: Any) -> Any:
    if any(isinstance(x, torch.Tensor) and x.device.type == "xla" for x in args):
        raise UnsupportedOpError(
            f"The op {op} was called under autocast on a tensor of torch_xla. This process started "
            "the JAX runtime, whose autocast has taken the place of torch_xla's. Use one process "
            "for each, or get_runtime('torch_xla')."
        )
    dtype = torch.get_autocast_dtype("xla")
    with torch._C._ExcludeDispatchKeyGuard(KEY), torch.autocast("cpu", dtype=dtype):
        return op(*args, **kwargs)


def _state_for_checkpoint(original: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """What ``torch.utils.checkpoint`` keeps for the recomputation: of "cuda" and of "cpu"."""
    of_device, of_cpu = original(*args, **kwargs)
    if torch.is_autocast_enabled("xla") and not of_cpu["enabled"]:
        of_cpu = {**of_cpu, "enabled": True, "dtype": torch.get_autocast_dtype("xla")}
    return of_device, of_cpu
