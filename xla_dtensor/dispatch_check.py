"""Does this torch hand a DTensor subclass's ops to the subclass? Asked once, at import.

From torch 2.10 on, ops on DTensors are dispatched in C++. Versions 2.10 to 2.12 take that path for
subclasses too, past an overridden ``__torch_dispatch__``: every op would then run PyTorch's own
DTensor logic on a global tensor that it believes to be local, and be wrong without an error. A
version number does not tell builds apart, so a probe decides.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor as TorchDTensor

from xla_dtensor.errors import RuntimeSetupError

__all__ = ["check_dispatch"]


def check_dispatch(base: type[torch.Tensor] = TorchDTensor) -> None:
    """Raise unless an op on a subclass of `base` reaches the subclass.

    Raises:
        RuntimeSetupError: It does not.
    """
    seen: list[Any] = []

    class Probe(base):
        @classmethod
        def __torch_dispatch__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(func)
            return torch.zeros(())

    probe = torch.Tensor._make_wrapper_subclass(Probe, (), dtype=torch.float32)
    try:
        torch.ops.aten.neg.default(probe)
    except Exception:
        seen.clear()  # the other path ran, and stumbled over a probe without a spec
    if not seen:
        raise RuntimeSetupError(
            f"xla_dtensor was imported with torch {torch.__version__}. This torch dispatches ops "
            "on DTensor subclasses in C++, past the subclass, and results would be wrong without "
            "an error. Install torch 2.9 (with torch_xla) or torch 2.13 or newer."
        )
