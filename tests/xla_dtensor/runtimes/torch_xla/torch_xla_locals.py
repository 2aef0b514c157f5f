"""What tests of local views on torch_xla share: a layer above the runtime, and a list of ops."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from xla_dtensor.core import Layout, ManualRegion
from xla_dtensor.runtimes.base import Runtime
from xla_dtensor.runtimes.nested import leaves, map_nested
from xla_dtensor.runtimes.written import written_targets

__all__ = [
    "GRADIENTS",
    "OPS",
    "REFUSED",
    "Local",
    "gradient",
    "localized",
    "on_devices",
    "own",
    "stack_layout",
    "stacked",
]

Function = Callable[[torch.Tensor], Any]
_torch: Any = torch


class Local(torch.Tensor):
    """A local payload with every op run on it, and autograd above: what a user layer would be."""

    payload: Any
    runtime: Runtime

    @staticmethod
    def __new__(cls, payload: torch.Tensor, runtime: Runtime) -> Local:
        made = torch.Tensor._make_wrapper_subclass(  # pyright: ignore[reportAttributeAccessIssue]
            cls, payload.shape, dtype=payload.dtype, device=payload.device
        )
        made.payload, made.runtime = payload, runtime
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore[reportAssignmentType]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        runtime = next(v for v in leaves((args, kwargs)) if isinstance(v, Local)).runtime
        inner = lambda v: v.payload if isinstance(v, Local) else v  # noqa: E731
        result = runtime.run_local_op(func, map_nested(inner, args), map_nested(inner, kwargs))
        if torch.Tag.inplace_view in func.tags:
            changed = Local(args[0].payload, runtime)
            torch.Tensor.data.__set__(args[0], changed)  # pyright: ignore
            return args[0]
        if func._schema.is_mutable:
            return written_targets(func, args, kwargs)
        return map_nested(lambda v: Local(v, runtime) if isinstance(v, torch.Tensor) else v, result)


def stack_layout(region: ManualRegion, ndim: int) -> Layout:
    """Of a tensor with one dim for each axis of the region in front."""
    spec = (*region.axes, *[None] * (ndim - len(region.axes)))
    return Layout.from_partition_spec(spec, region.mesh)


def own(runtime: Runtime, stack: torch.Tensor, region: ManualRegion) -> Any:
    """Give each device its own of a payload of shape [*sizes of the region's axes, *local]."""
    local = runtime.enter_local(stack, stack_layout(region, stack.ndim), region)
    for _ in region.axes:
        local = runtime.run_local_op(torch.ops.aten.squeeze.dim, (local, 0), {})
    return Local(local, runtime)


def stacked(local: Any, region: ManualRegion) -> torch.Tensor:
    """The inverse of `own`."""
    payload, runtime = local.payload, local.runtime
    for _ in region.axes:
        payload = runtime.run_local_op(torch.ops.aten.unsqueeze.default, (payload, 0), {})
    return runtime.leave_local(payload, stack_layout(region, payload.ndim), region)


def localized(runtime: Runtime, values: torch.Tensor, region: ManualRegion) -> Any:
    """Give each device its own of host values of shape [*sizes of the region's axes, *local]."""
    return own(runtime, runtime.put(values, stack_layout(region, values.ndim)), region)


def on_devices(runtime: Runtime, local: Any, region: ManualRegion) -> torch.Tensor:
    """The inverse of `localized`, on the host."""
    return runtime.to_host(stacked(local, region))


TABLE = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))
MASK = TABLE > 0.3
ROWS = torch.tensor([3, 1, 2])


def gradient(function: Function) -> Function:
    """The function that returns the gradient of the sum of squares of another's result."""

    def run(x: torch.Tensor) -> torch.Tensor:
        leaf = x.detach().requires_grad_()
        function(leaf).square().sum().backward()
        assert leaf.grad is not None
        return leaf.grad

    return run


def moe_loop(x: torch.Tensor) -> torch.Tensor:
    values, experts = x.softmax(-1).topk(2, -1)
    out = torch.zeros_like(x)
    for expert in range(8):
        weight = (values * (experts == expert)).sum(-1, keepdim=True)
        out = out + weight * (x @ TABLE + expert)
    return out


def moe_dispatch(x: torch.Tensor) -> torch.Tensor:
    experts = x.topk(2, -1)[1].reshape(-1)
    order = experts.argsort(stable=True)
    routed = x.repeat_interleave(2, 0)[order] * 2
    back = torch.zeros_like(routed)
    back[order] = routed
    return back.view(8, 2, 8).sum(1) + F.one_hot(experts, 8).sum(0)


def attention(x: torch.Tensor) -> torch.Tensor:
    heads = (x @ TABLE).view(1, 8, 2, 4).transpose(1, 2)
    out = F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
    return out.transpose(1, 2).reshape(8, 8) @ TABLE


def written(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y.mul_(2)
    y[:, 2] = 7.0
    y[0].add_(1)
    y.t()[1:3].sub_(0.5)
    y[ROWS] = TABLE[:3]
    y[5] = TABLE[5]
    y.masked_fill_(MASK, 0.25)
    y.view(4, 2, 8)[1].transpose(0, 1)[::2].copy_(x[:4, :2])
    return y


def fresh(x: torch.Tensor) -> torch.Tensor:
    y = x.new_zeros(4, 8)
    y.add_(x[:4])
    y[1] = x[2]
    y[ROWS[:1], x[0].argmax().view(1)] = 9.0
    return y


def masked(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y[y > 0.3] = 2.0
    y[:, y[0] > 1] = x[0, 0]
    y[y.sum(1) > 4] = TABLE[0]
    y.index_put_((y < -1,), torch.tensor(0.5), accumulate=True)
    return y.masked_fill_(x < -1.5, 3.0)


def by_index(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y[x.argmax(-1), x.argmin(-1)] = x[0]
    y.scatter_(1, x.topk(3, -1)[1], 1.0)
    y.index_add_(0, x.argmax(-1), x)
    return y.t().index_copy_(0, x[0].argsort(), x)


def adam(x: torch.Tensor) -> torch.Tensor:
    weights, means = [x.clone(), x[0].clone()], [torch.zeros_like(x), torch.zeros_like(x[0])]
    _torch._foreach_lerp_(means, weights, 0.1)
    _torch._foreach_mul_(weights, 0.9)
    _torch._foreach_addcdiv_(weights, means, [m.abs() + 1 for m in means], -0.1)
    roots = _torch._foreach_sqrt([w.abs() for w in weights])
    return weights[0] + roots[1]


def square(x: torch.Tensor) -> torch.Tensor:
    return x.view(1, 1, 8, 8)


def reshaped(x: torch.Tensor) -> torch.Tensor:
    y = x[:, :1].clone()
    y.t_().unsqueeze_(0).squeeze_(1).add_(1)
    return y


OPS: Mapping[str, Function] = {
    "pointwise": lambda x: torch.tanh(x) * 2 + x.exp().clamp(0, 1) - x.sigmoid() / 3.5,
    "compare": lambda x: ((x > 0) & (x < TABLE)).to(torch.int32),
    "matmul": lambda x: x @ x.t() @ x[0] + x[0] @ x[1] + TABLE @ x[0],
    "bmm": lambda x: x.view(2, 4, 8) @ x.view(2, 8, 4),
    "einsum": lambda x: torch.einsum("ijk,ilk->ijl", x.view(2, 4, 8), x.view(2, 4, 8)),
    "linear": lambda x: F.linear(x, x, x[0]) + F.linear(x, TABLE, TABLE[0]),
    "addmm": lambda x: torch.addmm(TABLE, x, x) + torch.outer(x[0], x[1]),
    "softmax": lambda x: x.softmax(-1) + x.log_softmax(0),
    "topk": lambda x: x.topk(3, -1)[0] + x.topk(3, -1)[1],
    "sort": lambda x: x.sort(-1, descending=True)[0] + x.argsort(0),
    "kthvalue": lambda x: x.kthvalue(3, -1)[0],
    "argmax": lambda x: x.argmax(-1) // 3 + x.argmin(),
    "extrema": lambda x: x.max(0)[0] + x.min(1)[1] + x.amax() + x.cummax(0)[0],
    "reductions": lambda x: x.sum(0) + x.mean(1) + x.var(0) + x.norm() + x.prod(1) + x.std(),
    "any_all": lambda x: x.any() + (x > 0).all(0) + (x > 0).count_nonzero(),
    "scans": lambda x: x.cumsum(0) + x.cumprod(1) + x.logsumexp(-1),
    "views": lambda x: x.view(4, 2, 8).transpose(0, 2).reshape(8, 8)[1:5].squeeze().t(),
    "expand": lambda x: x[2].flatten().unsqueeze(0).expand(3, 8),
    "diagonal": lambda x: x.diagonal() + x.diag() + x.trace(),
    "windows": lambda x: x.unfold(0, 2, 2) * 2,
    "movedim": lambda x: x.view(2, 4, 8).movedim(0, 2).unbind(0)[3],
    "cat": lambda x: torch.cat([x, x * 2, TABLE], 1),
    "stack": lambda x: torch.stack([x, TABLE]).roll(1, 0).flip(1),
    "split": lambda x: torch.cat(x.split([3, 5])[::-1]) + torch.cat(x.chunk(2)[::-1]),
    "repeat": lambda x: x.repeat(2, 1) + x.tile(2, 1) + x.repeat_interleave(2, 0),
    "pad": lambda x: F.pad(x, (1, 2)) + F.pad(x, (0, 3)),
    "triangles": lambda x: x.triu(1) + x.tril(),
    "cast": lambda x: x.to(torch.bfloat16).to(torch.float64),
    "written": written,
    "fresh": fresh,
    "masked": masked,
    "by_index": by_index,
    "reshaped": reshaped,
    "index": lambda x: x[ROWS, 1:] + x[x.argmax(-1)[:3], 1:] + x[MASK][:7],
    "index_points": lambda x: x[x.argmax(-1), x.argmin(-1)],
    "index_select": lambda x: x.index_select(0, x.argmax(-1)) + x.take(x.argmax(-1)),
    "gather": lambda x: x.gather(1, x.topk(3, -1)[1]),
    "take_along": lambda x: torch.take_along_dim(x, x.argsort(-1), -1),
    "scatter": lambda x: torch.zeros_like(x).scatter(1, x.argsort(1), x),
    "scatter_add": lambda x: x.scatter_add(0, x.argmax(0, keepdim=True), x),
    "scatter_reduce": lambda x: x.scatter_reduce(0, x.argsort(0), x, "amax"),
    "index_put": lambda x: torch.zeros_like(x).index_put((x.argmax(-1),), x, accumulate=True),
    "where": lambda x: torch.where(x > 0, x, 0.0) + x.masked_fill(x > TABLE, -9.0),
    "layer_norm": lambda x: F.layer_norm(x, (8,), x[0], TABLE[1]),
    "batch_norm": lambda x: F.batch_norm(x, x[0].detach(), x[1].detach().abs(), x[2], x[3]),
    "batch_norm_training": lambda x: F.batch_norm(x.view(2, 2, 4, 4), None, None, training=True),
    "group_norm": lambda x: F.group_norm(x.view(2, 4, 8), 2) + F.instance_norm(x.view(2, 4, 8)),
    "rms_norm": lambda x: F.rms_norm(x, (8,), x[0]) + F.normalize(x),
    "activations": lambda x: F.gelu(x) + F.silu(x) + F.relu(x) + F.softplus(x) + F.elu(x),
    "gates": lambda x: F.glu(x) + F.prelu(x, x[0][:1])[:, :4],
    "attention": attention,
    "conv1d": lambda x: F.conv1d(x.view(2, 4, 8), x[:6].reshape(4, 4, 3), x[0][:4]),
    "conv2d": lambda x: F.conv2d(square(x), x.view(4, 1, 4, 4), x[0][:4], padding=1),
    "conv2d_host": lambda x: F.conv2d(square(x), TABLE[:4, :4].view(1, 1, 4, 4)),
    "conv_grouped": lambda x: F.conv2d(x.view(1, 4, 4, 4), x[:4].reshape(4, 1, 4, 2), groups=4),
    "conv_transposed": lambda x: F.conv_transpose2d(square(x), x.view(1, 4, 4, 4)),
    "pooling": lambda x: F.max_pool2d(square(x), 2) + F.avg_pool2d(square(x), 2),
    "embedding": lambda x: F.embedding(x.argmax(-1), TABLE) + F.embedding(x.argmax(-1), x),
    "losses": lambda x: F.cross_entropy(x, x.argmin(-1)) + F.mse_loss(x, TABLE),
    "one_hot": lambda x: F.one_hot(x.argmax(-1), 8),
    "new": lambda x: (x.new_zeros(8, 8) + 1) @ torch.full_like(x, 3.5) + torch.ones_like(x),
    "host": lambda x: x * torch.tensor(2.5) + torch.arange(8) + torch.eye(8),
    "remainders": lambda x: x % 3 + x // 2 + torch.fmod(x, 2) + x.argsort(-1) // 3,
    "svd": lambda x: torch.linalg.svdvals(x),
    "foreach": adam,
    "moe_loop": moe_loop,
    "moe_dispatch": moe_dispatch,
    "checkpoint": lambda x: checkpoint(lambda t: (t @ t).softmax(-1), x, use_reentrant=False),
    "detach": lambda x: x.detach() + 0,
}
GRADIENTS = (
    *("linear", "einsum", "softmax", "topk", "sort", "scans", "cat", "index", "index_points"),
    *("gather", "scatter", "index_put", "where", "layer_norm"),
    "batch_norm_training",
    *("group_norm", "rms_norm", "activations", "gates", "attention", "conv1d", "conv2d"),
    *("conv_grouped", "conv_transposed", "pooling", "embedding", "losses", "moe_loop"),
    *("moe_dispatch", "checkpoint", "written"),
)
REFUSED: Mapping[str, Function] = {
    "as_strided": lambda x: x.as_strided((4, 4), (1, 2)),
    "overlapping windows": lambda x: x.unfold(0, 3, 2),
    "qr": lambda x: torch.linalg.qr(x)[0],
    "cholesky": lambda x: torch.linalg.cholesky(x),
    "solve": lambda x: torch.linalg.solve(x, TABLE),
    "fft": lambda x: torch.fft.fft(x),
    "median": lambda x: x.median(-1)[0],
    "mode": lambda x: x.mode(-1)[0],
    "searchsorted": lambda x: torch.searchsorted(x[0], x),
    "histc": lambda x: x.histc(4),
    "rrelu": lambda x: F.rrelu(x, training=True),
}
