"""torch.compile of code on each device's own tensors: to_local, from_local, local_map."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import nn
from torch._dynamo import trace_rules
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.experimental import local_map
from torch.utils._pytree import tree_leaves

import xla_dtensor as xd
from tests.xla_dtensor.compiling import Counting, compiled, put
from xla_dtensor.collectives import all_gather, pmax, psum, reduce_scatter
from xla_dtensor.errors import LocalViewError
from xla_dtensor.runtimes import Runtime

pytestmark = pytest.mark.usefixtures("fresh_compiler")

R, P, S0, S1 = Replicate(), Partial(), Shard(0), Shard(1)


def values_and_gradients(function: Callable[..., Any], *inputs: Any) -> list[torch.Tensor]:
    """Return what a function gives, and the gradients of its squared sum, on the host."""
    inputs = tuple(t.detach().clone().requires_grad_(t.is_floating_point()) for t in inputs)
    result = function(*inputs)
    (result * result).sum().backward()
    found: list[Any] = [result.detach(), *(t.grad for t in inputs if t.requires_grad)]
    return [t.cpu() for t in found]


def check(function: Any, plain: Any, backend: Any, inputs: Any, hosts: Any) -> None:
    """Compare with the plain function on plain tensors: values, and all gradients."""
    found = values_and_gradients(compiled(function, backend), *inputs)
    for one, other in zip(found, values_and_gradients(plain, *hosts), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


# ---------------------------------------------------------------------- there and back


def mlp(mesh: xd.DeviceMesh, x: Any, up: Any, down: Any) -> Any:
    """A tensor-parallel MLP on local tensors, as one writes it by hand."""
    x = x.to_local(grad_placements=[S0, P])
    hidden = F.gelu(x @ up.to_local(grad_placements=[P, S1]))
    out = hidden @ down.to_local(grad_placements=[P, S0])
    return xd.DTensor.from_local(out, mesh, [S0, P]).redistribute(mesh, [S0, R])


def plain_mlp(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    return F.gelu(x @ up) @ down


def _mlp_inputs(mesh: xd.DeviceMesh) -> tuple[list[Any], list[torch.Tensor]]:
    hosts = [torch.randn(8, 4), torch.randn(4, 16), torch.randn(16, 4)]
    placements = ([S0, R], [R, S1], [R, S0])
    return [put(mesh, t, *p) for t, p in zip(hosts, placements, strict=True)], hosts


def test_a_tensor_parallel_mlp(mesh: xd.DeviceMesh, backend: str) -> None:
    inputs, hosts = _mlp_inputs(mesh)
    check(functools.partial(mlp, mesh), plain_mlp, backend, inputs, hosts)


@pytest.mark.thorough
@pytest.mark.parametrize("placements", [(S0, S1), (R, R), (S1, S0), (S0, S0), (R, S1)])
def test_there_and_back(mesh: xd.DeviceMesh, backend: str, placements: Any) -> None:
    values = torch.randn(16, 8)
    x = put(mesh, values, *placements)

    def function(x: Any) -> Any:
        return xd.DTensor.from_local((x.to_local() * 3).sin(), mesh, placements)

    result = compiled(function, backend)(x)
    assert result.placements == placements
    assert result.xla_sharding() == function(x).xla_sharding()
    check(function, lambda x: (x * 3).sin(), backend, [x], [values])


@pytest.mark.parametrize("op", ["sum", "avg", "max", "min", "product"])
def test_parts_of_a_reduction(mesh: xd.DeviceMesh, op: str) -> None:
    values = torch.randn(8, 4)

    def function(x: Any) -> Any:
        parts = x.to_local() + 2
        return xd.DTensor.from_local(parts, mesh, [Partial(op), S1]).redistribute(mesh, [R, S1])

    def plain(x: torch.Tensor) -> torch.Tensor:
        first, second = (x + 2).chunk(2)
        return {
            "sum": lambda: first + second,
            "avg": lambda: (first + second) / 2,
            "max": lambda: torch.maximum(first, second),
            "min": lambda: torch.minimum(first, second),
            "product": lambda: first * second,
        }[op]()

    check(function, plain, "aot_eager", [put(mesh, values, S0, S1)], [values])


def test_gradients_that_lie_as_from_local_says(mesh: xd.DeviceMesh, backend: str) -> None:
    values = torch.randn(8, 4)

    def function(x: Any) -> Any:
        view = x.to_local(grad_placements=[S0, S1]) * 2
        return xd.DTensor.from_local(view, mesh, [S0, S1], grad_placements=[S0, S1])

    check(function, lambda x: x * 2, backend, [put(mesh, values, S0, S1)], [values])


def test_the_first_devices_values(mesh: xd.DeviceMesh) -> None:
    def function(x: Any) -> Any:
        return xd.DTensor.from_local(x.to_local() * 2, mesh, [R, S0], run_check=True)

    values = torch.randn(8, 4)
    x = put(mesh, values, S0, S1)
    result = compiled(lambda x: function(x.redistribute(mesh, [S0, R])))(x)
    assert torch.equal(result.cpu(), values[:4].repeat(4, 1) * 2)


def test_a_shape_that_equal_shards_do_not_make(mesh: xd.DeviceMesh, backend: str) -> None:
    """Uneven shards: pointwise ops and sums work, what could read padding is refused."""
    values = torch.randn(7, 4)
    x = put(mesh, values, R, S0)

    def function(x: Any) -> Any:
        view = x.to_local()
        total = psum(view.sum(0), "tp")
        return xd.DTensor.from_local(view * 2 + total, mesh, [R, S0], shape=(7, 4), stride=(4, 1))

    check(function, lambda x: x * 2 + x.sum(0), backend, [x], [values])
    with pytest.raises(Exception, match="called on an uneven local view"):
        compiled(lambda x: x.to_local().amax(0), backend)(x)


def test_on_a_submesh(mesh: xd.DeviceMesh, backend: str) -> None:
    """Local along tp only; that the batch is cut along dp stays known."""
    tp, values = mesh["tp"], torch.randn(8, 8)

    def function(x: Any) -> Any:
        view = x.to_local().sin() * 2
        return xd.DTensor.from_local(psum(view, "tp") + view, tp, [S1])

    def plain(x: torch.Tensor) -> torch.Tensor:
        x = x.sin() * 2
        return x + sum(x.chunk(4, 1)).repeat(1, 4)  # pyright: ignore

    x = put(mesh, values, S0, S1).redistribute(tp, [S1])
    found, eager = compiled(function, backend)(x), function(x)
    assert found._spec.outer_cuts == eager._spec.outer_cuts == (("dp", 0),)
    assert found.xla_sharding() == eager.xla_sharding() == put(mesh, values, S0, S1).xla_sharding()
    check(function, plain, backend, [x], [values])


# ---------------------------------------------------------------------- between the borders


def test_collectives(mesh: xd.DeviceMesh, backend: str) -> None:
    values = torch.randn(8, 8)

    def function(x: Any) -> Any:
        view = x.to_local()
        view = view / psum(view.exp().sum(1, keepdim=True), "tp")
        rows = all_gather(view, axis="tp", dim=1)
        highest = pmax(x=view.amax(1, keepdim=True), axis="tp").detach()
        return xd.DTensor.from_local(reduce_scatter(rows, ("tp",), 1) - highest, mesh, [S0, S1])

    def plain(x: torch.Tensor) -> torch.Tensor:
        x = x / x.exp().sum(1, keepdim=True)
        return x * 4 - x.amax(1, keepdim=True).detach()

    check(function, plain, backend, [put(mesh, values, S0, S1)], [values])


# torch_xla's own back end runs graphs with host tensors op by op, with a warning.
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_plain_parameter_gets_the_sum_of_its_gradients(
    mesh: xd.DeviceMesh, backend: str, runtime: Runtime
) -> None:
    values, weight = torch.randn(8, 4), torch.randn(4, 4)

    def function(x: Any, w: Any) -> Any:
        y = F.linear(x.to_local(), w).relu()
        return xd.DTensor.from_local(y, mesh, [S0, S0])

    inputs = [put(mesh, values, S0, S0), weight]
    check(function, lambda x, w: F.linear(x, w).relu(), backend, inputs, [values, weight])


def test_a_plain_tensor_on_every_device(mesh: xd.DeviceMesh) -> None:
    def function(x: Any, host: torch.Tensor) -> Any:
        whole = xd.DTensor.from_local(host, mesh, [R, R])
        alike = xd.DTensor.from_local(host, mesh, [R, P], same_on_every_device=True)
        return x * whole + alike

    values, host = torch.randn(8, 4), torch.randn(8, 4)
    inputs = [put(mesh, values, S0, S1), host]
    found, eager = (values_and_gradients(f, *inputs) for f in (compiled(function), function))
    torch.testing.assert_close(found[0], values * host + 4 * host)
    for one, other in zip(found, eager, strict=True):
        torch.testing.assert_close(one, other)


def test_writes_reach_the_dtensor(mesh: xd.DeviceMesh, backend: str) -> None:
    """A local tensor is the DTensor's own memory, in compiled code as well."""

    def function(x: Any) -> Any:
        view = x.to_local()
        view[0].mul_(10)
        x.add_(1)
        return x * 1, xd.DTensor.from_local(view + 0, mesh, [S0, S1])

    x, plain = (put(mesh, torch.ones(8, 4), S0, S1) for _ in range(2))
    found, expected = compiled(function, backend)(x), function(plain)
    assert x.cpu()[0, 0] == 11
    assert x.cpu()[1, 0] == 2
    assert torch.equal(x.cpu(), plain.cpu())
    assert x.xla_sharding() == plain.xla_sharding()
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.cpu(), other.cpu())


def test_views_and_writes_between_the_borders(mesh: xd.DeviceMesh, backend: str) -> None:
    values = torch.randn(8, 8)

    def local(x: Any) -> Any:
        y = x * 1
        y[:, 1].add_(3)
        y.t()[0].mul_(2)
        out = torch.zeros_like(x)
        out[1] = y[0]
        return torch.cat([y, out], 1).view(-1, 2, x.shape[1]).transpose(0, 1).sum(0)

    def function(x: Any) -> Any:
        return xd.DTensor.from_local(local(x.to_local()), mesh, [S0, R])

    def plain(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([local(rows) for rows in x.chunk(2)])

    check(function, plain, backend, [put(mesh, values, S0, R)], [values])


def test_dropout_differs_between_devices(mesh: xd.DeviceMesh, backend: str) -> None:
    def function(x: Any) -> Any:
        return xd.DTensor.from_local(F.dropout(x.to_local(), 0.5), mesh, [S0, S0])

    result = compiled(function, backend)(put(mesh, torch.ones(8, 64), S0, S0)).cpu()
    assert set(result.unique().tolist()) == {0.0, 2.0}
    assert len({tuple(row.tolist()) for row in result}) == 8


def test_views_come_out_and_go_in(mesh: xd.DeviceMesh, backend: str) -> None:
    values = torch.randn(8, 4)
    x = put(mesh, values, S0, S1)
    view = compiled(lambda x: x.to_local() * 2, backend)(x)
    assert isinstance(view, xd.LocalView)
    assert view.varying == {"dp", "tp"}
    assert len(view.addressable_shards()) == 8
    back = compiled(lambda v: xd.DTensor.from_local(v + 1, mesh, [S0, S1]), backend)(view)
    torch.testing.assert_close(back.cpu(), values * 2 + 1)


def test_a_view_is_not_written_to_across_the_border(mesh: xd.DeviceMesh) -> None:
    x = put(mesh, torch.ones(8, 4), S0, S1)
    view = compiled(lambda x: x.to_local())(x)
    with pytest.raises(LocalViewError, match="other side of the border of a compiled function"):
        view.add_(1)
    assert torch.equal(view.clone().add_(1).cpu(), torch.full((4, 1), 2.0))
    with pytest.raises(Exception, match="other side of the border of a compiled function"):
        compiled(lambda view: view.add_(1))(x.to_local())
    assert torch.equal(x.cpu(), torch.ones(8, 4))


# ---------------------------------------------------------------------- local_map


def test_local_map(mesh: xd.DeviceMesh, backend: str) -> None:
    """PyTorch's own, with one of its functional collectives."""
    x, w = torch.randn(8, 8), torch.randn(8, 4)

    def product(x: Any, w: Any) -> Any:
        return funcol.all_reduce(x @ w, "sum", (mesh, 1))

    torch.compile(torch.sin, backend="eager")(x)  # Dynamo has seen torch's own functions first
    xd.install()
    try:
        # As making a process group does: Dynamo looks for what it knows by name anew.
        trace_rules.clear_lru_cache()
        make: Any = local_map
        mapped = make(
            product,
            out_placements=[S0, R],
            in_placements=([S0, S1], [R, S0]),
            in_grad_placements=([S0, S1], [P, S0]),
            device_mesh=mesh,
        )
        inputs = [put(mesh, x, S0, S1), put(mesh, w, R, S0)]
        check(mapped, torch.matmul, backend, inputs, [x, w])
    finally:
        xd.uninstall()


def test_custom_shard(mesh: xd.DeviceMesh, backend: str) -> None:
    values = torch.randn(8, 4)
    rows = xd.custom_shard(
        lambda x: x.sin().sum(0), mesh, out_placements=((P, R),), in_placements=((S0, R),)
    )
    check(rows, lambda x: x.sin().sum(0), backend, [put(mesh, values, S0, R)], [values])


# ---------------------------------------------------------------------- graphs


def test_calls_in_the_graph_take_tensors_and_constants(mesh: xd.DeviceMesh) -> None:
    graphs: list[torch.fx.Graph] = []

    def keep(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph.graph)
        return make_boxed_func(graph.forward)

    inputs, _ = _mlp_inputs(mesh)
    inputs = [t.requires_grad_() for t in inputs]
    function = compiled(functools.partial(mlp, mesh), aot_autograd(fw_compiler=keep))
    function(*inputs).sum().backward()
    kinds = (torch.fx.Node, int, float, bool, str, torch.dtype, torch.device, type(None))
    calls = [n for graph in graphs for n in graph.nodes if n.op == "call_function"]
    for node in calls:
        leaves = tree_leaves((node.args, node.kwargs))
        assert all(isinstance(leaf, kinds) for leaf in leaves), node
    forward, backward = map(str, graphs)
    for text, crossings in ((forward, (3, 1)), (backward, (1, 3))):
        assert text.count("xla_dtensor.to_local.default") == crossings[0]
        assert text.count("xla_dtensor.from_local.default") == crossings[1]
    assert "(8, 4) as [dp, -] on (dp=2, tp=4)" in forward
    # On torch_xla a call that may have to be corrected has a name of its own.
    assert re.search(r"= call_function\[target=torch\.ops\.\S*aten[._]gelu", forward)
    assert "[size" not in forward


def test_a_program_communicates_what_the_code_says(mesh: xd.DeviceMesh) -> None:
    """Inside of a compiled step: the sum over tp, and nothing else."""
    inputs, hosts = _mlp_inputs(mesh)
    graphs = Counting()
    function = compiled(functools.partial(mlp, mesh), graphs)
    step = xd.compile(lambda x, up, down: function(x, up, down))
    result: Any = step(*inputs)
    torch.testing.assert_close(result.cpu(), plain_mlp(*hosts), rtol=1e-4, atol=1e-4)
    collectives = re.findall(r" (all-\w+|reduce-scatter|collective-permute)\(", step.hlo())
    assert collectives == ["all-reduce"]
    assert graphs.count == 1


# ---------------------------------------------------------------------- recompilation


def test_compiled_anew_for_another_mesh_placement_or_shape_only(mesh: xd.DeviceMesh) -> None:
    graphs = Counting()
    other = xd.init_device_mesh("xla", (4, 2), mesh_dim_names=("dp", "tp"))

    def function(x: Any, mesh: Any, placements: Any) -> Any:
        view = x.to_local()
        return xd.DTensor.from_local(psum(view * 2, "tp") / 2, mesh, placements)

    call = compiled(function, graphs)
    rows = [
        (mesh, (S0, R), 8, 1),
        (mesh, (S0, R), 8, 1),
        (mesh, (S1, R), 8, 2),
        (other, (S0, R), 8, 3),
        (mesh, (S0, R), 16, 4),
        (other, (S0, R), 8, 4),
        (mesh, (S1, R), 8, 4),
        (mesh, (S0, R), 16, 4),
    ]
    for target, placements, size, count in rows:
        values = torch.randn(size, 8)
        result = call(put(target, values, *placements), target, placements)
        assert graphs.count == count, (target, placements, size)
        torch.testing.assert_close(result.cpu(), values * target.value.size("tp"))


# ---------------------------------------------------------------------- training


class LocalBlock(nn.Module):
    """A block whose MLP is written on local tensors."""

    def __init__(self, mesh: xd.DeviceMesh) -> None:
        super().__init__()
        self.mesh = mesh
        self.norm = nn.LayerNorm(8)
        self.up, self.down = nn.Parameter(torch.randn(8, 16)), nn.Parameter(torch.randn(16, 8))

    def forward(self, x: Any) -> Any:
        x = self.norm(x)
        if isinstance(x, xd.DTensor):
            return mlp(self.mesh, x.redistribute(self.mesh, [S0, R]), self.up, self.down)
        return plain_mlp(x, self.up, self.down)


@pytest.mark.thorough
def test_training(mesh: xd.DeviceMesh, backend: str) -> None:
    torch.manual_seed(0)
    plain, ours = LocalBlock(mesh), LocalBlock(mesh)
    ours.load_state_dict(plain.state_dict())

    def partition(name: str, module: nn.Module, mesh: xd.DeviceMesh) -> None:
        if isinstance(module, LocalBlock):
            module.up = nn.Parameter(put(mesh, module.up.detach(), R, S1))
            module.down = nn.Parameter(put(mesh, module.down.detach(), R, S0))

    xd.distribute_module(ours, mesh, partition)
    graphs = Counting(backend)
    module = torch.compile(ours, backend=graphs, fullgraph=True)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (plain, ours)]
    for _ in range(3):
        x = torch.randn(8, 8)
        losses = [plain(x).square().mean(), module(put(mesh, x, S0, R)).square().mean()]
        for loss, optimizer in zip(losses, optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
        torch.testing.assert_close(losses[1].detach().cpu(), losses[0].detach())
        for one, other in zip(ours.parameters(), plain.parameters(), strict=True):
            grad: Any = one.grad
            torch.testing.assert_close(grad.cpu(), other.grad, rtol=1e-4, atol=1e-5)
        for optimizer in optimizers:
            optimizer.step()
    assert graphs.count == 1
