"""Settings that a traced step depends on besides its arguments.

A program traced under one setting must not serve a call under another. torch has some that are in
force around a call, ``with torch.autocast(...): step(x)``; the layers above the runtimes register
how to read theirs. A runtime makes them part of what it finds programs by.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch

__all__ = ["register_setting", "trace_settings"]

_DEVICE_TYPES = ("cpu", "xla")  # which the runtimes' tensors report
_readers: dict[str, Callable[[], Hashable]] = {}


def register_setting(name: str, read: Callable[[], Hashable]) -> None:
    """Make what `read` returns part of what tells programs apart.

    Args:
        name: What the setting is called; a second one of the same name replaces the first.
        read: Called on every call of a compiled step, in the thread of the call.
    """
    _readers[name] = read


def trace_settings() -> tuple[tuple[str, Hashable], ...]:
    """Return the present value of every setting, by name: torch's, then the registered ones."""
    return (
        ("the precision of float32 products", torch.get_float32_matmul_precision()),
        ("grad mode", torch.is_grad_enabled()),
        ("inference mode", torch.is_inference_mode_enabled()),
        ("autocast", tuple(map(_autocast_dtype, _DEVICE_TYPES))),
        ("the default dtype", torch.get_default_dtype()),
        ("the default device", str(torch.get_default_device())),
        ("deterministic algorithms", torch.are_deterministic_algorithms_enabled()),
        ("kernels of attention", _attention_kernels()),
        ("modes for functions", _function_modes()),
        *((name, read()) for name, read in _readers.items()),
    )


def _attention_kernels() -> tuple[bool, ...]:
    found = torch.backends.cuda
    return (
        found.flash_sdp_enabled(),
        found.mem_efficient_sdp_enabled(),
        found.math_sdp_enabled(),
        found.cudnn_sdp_enabled(),
    )


def _function_modes() -> tuple[int, ...]:
    """Return what tells the modes of the user's apart that see every function of torch."""
    if not torch._C._len_torch_function_stack():
        return ()
    return tuple(id(mode) for mode in torch.overrides._get_current_function_mode_stack())


def _autocast_dtype(device_type: str) -> torch.dtype | None:
    on = torch.is_autocast_enabled(device_type)
    return torch.get_autocast_dtype(device_type) if on else None
