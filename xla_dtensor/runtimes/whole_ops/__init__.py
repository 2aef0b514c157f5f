"""Keep linear, matmul and attention whole: one op forward, one backward, no flattening.

torch runs these three as composites: their kernels reshape batch, sequence or head dims together
before anything below autograd can see the op. Here they are kernels of their own
(:mod:`~xla_dtensor.runtimes.whole_ops.kernels` registers them), differentiated by Functions
(:mod:`~xla_dtensor.runtimes.whole_ops.autograd`) whose backward is whole as well.
"""

from xla_dtensor.runtimes.whole_ops.attention import attention_kernel, is_lean, where_heads_lie
from xla_dtensor.runtimes.whole_ops.autograd import (
    LinearResult,
    OneResult,
    below,
    has_tangent,
    refuse_second,
    save,
    saved,
)
from xla_dtensor.runtimes.whole_ops.kernels import (
    AS_SEEN,
    WHOLE_OPS,
    Remat,
    is_foreach,
    linear_loss,
    linear_loss_backward,
    num_places,
    register,
    run_foreach,
    writes_to_a_list,
)

__all__ = [
    "AS_SEEN",
    "WHOLE_OPS",
    "LinearResult",
    "OneResult",
    "Remat",
    "attention_kernel",
    "below",
    "has_tangent",
    "is_foreach",
    "is_lean",
    "linear_loss",
    "linear_loss_backward",
    "num_places",
    "refuse_second",
    "register",
    "run_foreach",
    "save",
    "saved",
    "where_heads_lie",
    "writes_to_a_list",
]
