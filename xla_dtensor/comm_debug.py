"""CommDebugMode counts torch's collectives, and there are none here: a warning says so.

PyTorch's DTensor calls collectives, and ``torch.distributed.tensor.debug.CommDebugMode`` counts the
calls. Here the partitioner puts them into the compiled program, where no mode of Python's sees
them, and the count would be 0 whatever is communicated. What a program communicates is read from
the program itself::

    step = xd.compile(function)
    step(x)
    summarize(collectives(step.hlo()))      of xla_dtensor.report
"""

from __future__ import annotations

import warnings

from torch.nn.modules import module as torch_module

__all__ = ["module_hooks", "warn_if_communication_is_counted"]

_TRACKERS = "torch.distributed.tensor.debug._comm_mode"
_WARNED = "_xla_dtensor_has_warned"

# CommDebugMode takes itself off the stack of modes while an op runs, but its hooks stay.
module_hooks = torch_module._global_forward_pre_hooks


def warn_if_communication_is_counted() -> None:
    """Warn, once per CommDebugMode that is open, that it counts nothing of what XLA does.

    To be called where an op on a DTensor arrives while `module_hooks` is not empty.

    Example:
        >>> import torch, xla_dtensor as xd
        >>> from torch.distributed.tensor.debug import CommDebugMode
        >>> mesh = xd.init_device_mesh("xla", (8,))
        >>> with warnings.catch_warnings(record=True) as caught, CommDebugMode() as mode:
        ...     _ = xd.distribute_tensor(torch.ones(8), mesh) + 1
        >>> len(caught), mode.get_total_counts()
        (1, 0)
    """
    for hook in list(module_hooks.values()):
        tracker = getattr(hook, "__self__", None)
        if type(tracker).__module__ == _TRACKERS and _WARNED not in vars(tracker):
            setattr(tracker, _WARNED, True)
            warnings.warn(
                "CommDebugMode saw an op on a DTensor of xla_dtensor. It counts calls of "
                "collectives, but here XLA's partitioner makes them, and the counts stay 0. Pass "
                "the hlo() of a function compiled with xla_dtensor.compile to "
                "xla_dtensor.report.collectives.",
                UserWarning,
                stacklevel=3,
            )
