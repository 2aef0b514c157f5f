"""Read XLA tensors by one function, which gives their program a key of its own.

Whatever reads an XLA tensor in Python passes one of five aten kernels: ``cpu()``, ``item()`` and
``print``, ``host.copy_(x)``, ``out=``, and the kernels that torch_xla runs on the host. They are
overridden at XLA's dispatch key, where plain tensors of users arrive as well::

    x.cpu()  ->  aten::_to_copy, XLA  ->  _xla_get_cpu_tensors([x])  (``torch_xla_program_keys``)

That function lets other threads run while it compiles and copies, and raises what goes wrong.
torch_xla's own kernels do neither when they are called from Python as kernels: an error of the
device ends the process there. So they are called only for what reads nothing.
"""

from __future__ import annotations

import functools
import importlib
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

__all__ = ["correct_reads"]

_overrides: list[torch.library.Library] = []
_aten = torch.ops.aten


def correct_reads() -> None:
    """Override the kernels that read; calling it again does nothing."""
    if _overrides:
        return
    library = torch.library.Library("aten", "IMPL")
    _overrides.append(library)
    for name, read in _READS.items():
        kernel = functools.partial(read, torch.library.get_kernel(f"aten::{name}", "XLA"))
        with warnings.catch_warnings():  # that a kernel is overridden
            warnings.simplefilter("ignore", UserWarning)
            library.impl(name, kernel, "XLA", with_keyset=True, allow_override=True)


def _values(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return tensors as they are on the host; a number that stands for one comes as a number."""
    tensors = [t if isinstance(t, torch.Tensor) else torch.tensor(t) for t in tensors]
    on_devices = [tensor for tensor in tensors if _is_on_devices(tensor)]
    xlac = importlib.import_module("torch_xla")._XLAC
    read = iter(xlac._xla_get_cpu_tensors(on_devices) if on_devices else [])
    return [next(read) if _is_on_devices(tensor) else tensor for tensor in tensors]


def _is_on_devices(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "xla"


def _to_copy(own: Any, keys: Any, of: torch.Tensor, **options: Any) -> torch.Tensor:
    device = options.get("device")
    if device is None or device.type in ("xla", "meta"):
        return own.call_boxed(keys, of, **options)
    (value,) = _values([of])
    return _aten._to_copy.default(value, **options) if _changes(value, options) else value


def _changes(value: torch.Tensor, options: dict[str, Any]) -> bool:
    kept = (None, torch.preserve_format, torch.contiguous_format)
    return (
        options["device"].type != "cpu"
        or options.get("dtype") not in (None, value.dtype)
        or options.get("layout") not in (None, value.layout)
        or options.get("memory_format") not in kept
        or bool(options.get("pin_memory"))
    )


def _to_cpu(own: Any, keys: Any, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    del own, keys
    return _values(tensors)


def _copy_(own: Any, keys: Any, to: torch.Tensor, of: torch.Tensor, *rest: Any) -> torch.Tensor:
    return _read_into(to, of) if _is_host(to) else own.call_boxed(keys, to, of, *rest)


def _copy_from(own: Any, keys: Any, of: torch.Tensor, to: torch.Tensor, *rest: Any) -> torch.Tensor:
    return _read_into(to, of) if _is_host(to) else own.call_boxed(keys, of, to, *rest)


def _copy_from_and_resize(own: Any, keys: Any, of: torch.Tensor, to: torch.Tensor) -> torch.Tensor:
    if not _is_host(to):
        return own.call_boxed(keys, of, to)
    return _read_into(_aten.resize_.default(to, of.shape), of)


def _is_host(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu"


def _read_into(to: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
    return _aten.copy_.default(to, *_values([of]))


_READS: dict[str, Callable[..., Any]] = {
    "_to_copy": _to_copy,
    "_to_cpu": _to_cpu,
    "copy_": _copy_,
    "_copy_from": _copy_from,
    "_copy_from_and_resize": _copy_from_and_resize,
}
