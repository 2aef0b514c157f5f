"""Whether compiled steps check the values that decide what they compute, as eager ops do.

An eager op raises for an index that a tensor does not have. A compiled step has no values while it
is traced, and runs to its end whatever they are: what it reads or writes there is NaN, and whole
numbers have no NaN. Here each op of ``index_bounds`` gets a flag, an output of the program, and the
call raises once the step has run::

    with xd.check_values():
        step(x, i)    IndexRangeError: aten::index was called with the index 8 for dim 0 of size 8.

Invariants:

* A program traced with checks serves no call without, and the other way round.
* No host callback is made: flags are outputs, small ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from xla_dtensor.runtimes.trace_settings import register_setting

__all__ = ["are_checked", "check_values"]

_checked: ContextVar[bool] = ContextVar("check_values", default=False)
are_checked = _checked.get
register_setting("check_values", are_checked)


@contextmanager
def check_values(enabled: bool = True) -> Iterator[None]:
    """Let compiled steps raise where an index or another number is out of range.

    Eager ops do so anyhow. Each call of a step waits for its flags, and each check of an index that
    is sharded costs a reduction over the devices; so this is for finding a fault. On the JAX
    runtime; on torch_xla nothing changes.

    Args:
        enabled: False switches an outer ``check_values()`` off.

    Yields:
        None. What was before is back afterwards.

    Raises:
        IndexRangeError: By the call of a step, with the op, the value, its range and the line of
            the first op that was out of range. The step has run: the tensors that it writes to
            hold what it computed.

    Example:
        >>> import torch, xla_dtensor as xd
        >>> mesh = xd.init_device_mesh("xla", (2, 4), mesh_dim_names=("dp", "tp"))
        >>> rows = xd.distribute_tensor(torch.arange(8), mesh, ("dp",))
        >>> step = xd.compile(lambda rows, i: rows[i])
        >>> with xd.check_values():
        ...     step(rows, xd.distribute_tensor(torch.tensor([3, 7]), mesh)).full_tensor()
        tensor([3, 7])
    """
    token = _checked.set(enabled)
    try:
        yield
    finally:
        _checked.reset(token)
