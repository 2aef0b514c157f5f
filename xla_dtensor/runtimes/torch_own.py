"""torch's own functions and modules, where importing torch_xla has put others in their place.

torch_xla 2.9 replaces two names of ``torch.nn`` for the whole process once anybody imports it::

    nn.utils.clip_grad_norm_    refuses foreach=True, and reads gradients one by one
    nn.GRU                      fails on a DTensor, on either runtime

torch's own work on both runtimes, so they come back: when a runtime starts, and where a step is
traced, because torch_xla may be imported in between. Whoever wants torch_xla's GRU for its own
tensors finds it in ``torch_xla.experimental.gru``.

`past_functions` gives methods of torch's own for which others stand while a step is traced.

`ReadOnHost` is what torch's own methods of numbers, lists and memory do for a tensor that lies on
devices: torch has them for tensors of its own, and would read memory that there is none of.

`make_wrapper` makes a tensor of a class of ours, in inference mode too::

    with torch.inference_mode():
        weight.t()      weight is from before, so its view counts the same writes: it is no tensor
                        of inference mode. torch does so for its own tensors; what a class makes
                        there is one, and torch fails to give it the count.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import nn
from torch.nn.modules import rnn
from torch.nn.utils import clip_grad
from torch.utils.weak import WeakIdKeyDictionary

from xla_dtensor.core.errors import DistributeError

__all__ = ["ReadOnHost", "byte_for", "make_wrapper", "past_functions", "put_back"]

_byte_of: Any = WeakIdKeyDictionary()
_make: Any = torch.Tensor._make_wrapper_subclass


def put_back() -> None:
    """Give torch its own functions back where torch_xla's are; leave anybody else's alone."""
    if _is_torch_xlas(nn.utils.clip_grad_norm_):
        nn.utils.clip_grad_norm_ = clip_grad.clip_grad_norm_
    if _is_torch_xlas(nn.GRU):
        nn.GRU = rnn.GRU
        # How torch_xla's own class, which others may still hold, learns that nobody replaced it.
        rnn.GRU._orig = None  # pyright: ignore[reportAttributeAccessIssue]


def past_functions(name: str) -> Callable[[torch.Tensor], Any]:
    """Return a method of all tensors, past what stands for it on torch.Tensor meanwhile.

    Under a mode of functions, such as ``with torch.device("cpu")``, torch looks each method up
    there by its name.
    """
    method: Any = getattr(torch._C.TensorBase, name)

    def call(tensor: torch.Tensor) -> Any:
        with torch._C.DisableTorchFunction():
            return method(tensor)

    return call


class ReadOnHost:
    """Methods of tensors that lie on devices, whose `cpu` returns the whole value on the host."""

    def __format__(self: Any, format_spec: str) -> str:
        # torch formats a number only when the type is exactly Tensor.
        number = format_spec and self.ndim == 0 and not self.is_meta
        return format(self.item(), format_spec) if number else super().__format__(format_spec)

    def new_tensor(self: Any, data: Any, **options: Any) -> torch.Tensor:
        """Return a plain CPU tensor of `data`, of this tensor's dtype where none is given."""
        options = {"dtype": self.dtype, **{k: v for k, v in options.items() if v is not None}}
        return torch.tensor(data, **options)

    def new(self: Any, *args: Any, **options: Any) -> torch.Tensor:
        """Return what PyTorch's oldest constructor gives: of a size, or of data.

        ``torch.distributions`` calls it with a ``torch.Size``: a new tensor that lies as this one.
        """
        first = args[0] if args else 0
        if isinstance(first, torch.Size | int):
            return self.new_empty(first if isinstance(first, torch.Size) else args or (0,))
        return first if isinstance(first, torch.Tensor) else self.new_tensor(first)

    def data_ptr(self) -> int:
        """Return the address of the whole value on the host: a copy, kept while the tensor lives.

        For what reads memory, such as safetensors. What is written there is lost.
        """
        return self._on_host().data_ptr()

    def storage(self) -> Any:
        """Return the bytes that :meth:`data_ptr` points to."""
        return self._on_host().untyped_storage()

    def share_memory_(self) -> NoReturn:
        """Refuse: other processes cannot reach the devices' memory.

        Raises:
            DistributeError: Always.
        """
        raise DistributeError(
            f"share_memory_() was called on {self!r}. Its parts lie in the memory of devices, "
            "which no other process can open. Give processes full_tensor().cpu(), or a checkpoint."
        )

    def apply_(self, *_: Any) -> NoReturn:
        """Refuse, as torch does for every tensor that is not on the host.

        Raises:
            DistributeError: Always.
        """
        raise DistributeError(
            f"apply_(), map_() or map2_() was called on {self!r}. They call Python for each "
            "element, which lie on devices. Take full_tensor().cpu().apply_(function)."
        )

    map_ = map2_ = apply_

    def __dlpack__(self, **options: Any) -> Any:
        return self._on_host().__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self._on_host().__dlpack_device__()

    def _on_host(self: Any) -> torch.Tensor:
        # Read anew each time: a compiled step writes without a trace in the tensor's version. The
        # copy is the same one while its bytes are, so that no address is freed under a reader.
        copy, last_copy = self.cpu().contiguous(), getattr(self, "_host_copy", None)
        if last_copy is None or not torch.equal(_bytes(last_copy), _bytes(copy)):
            self._host_copy = last_copy = copy
        return last_copy


def byte_for(payload: Any) -> torch.UntypedStorage:
    """Return a byte of the host that stands for memory on devices: its address is its own.

    For what asks which tensors share memory, as savers do. It lives as long as that memory.
    """
    memory = getattr(payload, "_storage", payload)
    return _byte_of.setdefault(memory, torch.UntypedStorage(1))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


def make_wrapper(cls: type, shape: Any, **options: Any) -> Any:
    """Return what ``torch.Tensor._make_wrapper_subclass`` does, outside of inference mode.

    Args:
        cls: The class.
        shape: The tensor's shape.
        **options: As torch's function takes them.
    """
    if not torch.is_inference_mode_enabled():
        return _make(cls, shape, **options)
    with torch.inference_mode(False):
        return _make(cls, shape, **options)


def _is_torch_xlas(thing: Any) -> bool:
    return thing.__module__.partition(".")[0] == "torch_xla"
