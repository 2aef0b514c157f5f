"""torch.compile of code with DTensors: values, gradients, shardings, graphs and recompilations."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.exc import TorchRuntimeError, Unsupported
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._pytree import tree_leaves

import xla_dtensor as xd
from tests.xla_dtensor.compiling import Counting, compiled, lies_as, put
from xla_dtensor.errors import CompileError
from xla_dtensor.runtimes import Runtime
from xla_dtensor.runtimes.functional import Names

pytestmark = pytest.mark.usefixtures("fresh_compiler")

R, S0, S1 = Replicate(), Shard(0), Shard(1)


# ---------------------------------------------------------------------- ops and moves


def test_ops_have_values_and_labels_of_eager_ones(mesh: xd.DeviceMesh, backend: str) -> None:
    x, w = torch.randn(8, 4), torch.randn(4, 12)
    dx, dw = put(mesh, x, S0, R), put(mesh, w, R, S1)

    def function(x: Any, w: Any) -> Any:
        return (x * 2 + 1).relu() @ w

    result = compiled(function, backend)(dx, dw)
    assert isinstance(result, xd.DTensor)
    assert result.placements == function(dx, dw).placements == (S0, S1)
    torch.testing.assert_close(result.cpu(), function(x, w))


@pytest.mark.parametrize("placements", [(R, S0), (S1, S0), (R, R), (S0, S0)])
def test_redistribute(mesh: xd.DeviceMesh, backend: str, placements: Any) -> None:
    values = torch.arange(64.0).reshape(16, 4)
    x = put(mesh, values, S0, S1)
    result = compiled(lambda x: x.redistribute(mesh, placements), backend)(x)
    assert lies_as(result, x.redistribute(mesh, placements))
    assert result.xla_sharding() == put(mesh, values, *placements).xla_sharding()
    assert torch.equal(result.cpu(), values)
    assert x.xla_sharding() == put(mesh, values, S0, S1).xla_sharding()


def test_uneven_sizes(mesh: xd.DeviceMesh, backend: str) -> None:
    values = torch.randn(7, 5)
    x = put(mesh, values, S0, S1)
    function = compiled(lambda x: x.redistribute(mesh, [R, S0]).sin(), backend)
    torch.testing.assert_close(function(x).cpu(), values.sin())


def test_full_tensor(mesh: xd.DeviceMesh, backend: str, runtime: Runtime) -> None:
    values = torch.randn(8, 4)
    x = put(mesh, values, S0, S1)
    whole = compiled(lambda x: x.full_tensor() + 1, backend)(x)
    assert not isinstance(whole, xd.DTensor)
    # What comes out can be mixed with DTensors, as an eager full_tensor() can.
    assert isinstance(x * whole, xd.DTensor)
    torch.testing.assert_close((x * whole).cpu(), values * (values + 1))


# torch_xla's back end says that it cannot compile a host tensor, and runs the graph op by op.
@pytest.mark.filterwarnings("ignore:Found tensor with shape:UserWarning")
def test_distribute_tensor(mesh: xd.DeviceMesh, backend: str) -> None:
    values = torch.arange(32.0).reshape(8, 4)
    result = compiled(lambda t: xd.distribute_tensor(t, mesh, [R, S0]), backend)(values)
    assert lies_as(result, put(mesh, values, R, S0))
    assert torch.equal(result.cpu(), values)


def test_host_tensors_in_a_graph(mesh: xd.DeviceMesh) -> None:
    values = torch.randn(8, 4)
    function = compiled(lambda x, host: x * host + torch.arange(4.0))
    result = function(put(mesh, values, S0, S1), torch.full((8, 4), 3.0))
    torch.testing.assert_close(result.cpu(), values * 3 + torch.arange(4.0))


def test_writes_reach_the_inputs(mesh: xd.DeviceMesh) -> None:
    def function(x: Any, y: Any) -> Any:
        x.add_(y)
        return x * 2

    x, y = put(mesh, torch.ones(8, 4), S0, S1), put(mesh, torch.ones(8, 4), S0, R)
    sharding = x.xla_sharding()
    result = compiled(function)(x, y)
    assert torch.equal(x.cpu(), torch.full((8, 4), 2.0))
    assert torch.equal(result.cpu(), torch.full((8, 4), 4.0))
    assert x.xla_sharding() == sharding


def test_tensors_made_like_another_lie_as_it_does(mesh: xd.DeviceMesh, backend: str) -> None:
    x = put(mesh, torch.ones(8, 4), S0, S1)
    result = compiled(lambda x: torch.zeros_like(x), backend)(x)
    assert result.xla_sharding() == x.xla_sharding()
    assert torch.equal(result.cpu(), torch.zeros(8, 4))


@pytest.mark.only_on("torch_xla")
def test_ops_that_torch_xla_gets_wrong(mesh: xd.DeviceMesh) -> None:
    large = torch.full((8,), 2**40)

    def function(x: Any, n: Any) -> Any:
        y = x * 1
        y[torch.tensor([1, 3])] = 7.0
        return y, n // 3, (n * 1).floor_divide_(7), y.amax()

    x = torch.randn(7, 4)
    found = compiled(function)(put(mesh, x, S0, S1), put(mesh, large, S0, R))
    for one, other in zip(found, function(x, large), strict=True):
        assert torch.equal(one.cpu(), other)


# ---------------------------------------------------------------------- graphs


def _graphs_of(function: Callable[..., Any], *inputs: Any) -> list[torch.fx.Graph]:
    """Trace forward and backward; return Dynamo's graph and AOTAutograd's two."""
    graphs: list[torch.fx.Graph] = []

    def keep(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph.graph)
        return make_boxed_func(graph.forward)

    def both(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph.graph)
        return aot_autograd(fw_compiler=keep)(graph, inputs)

    compiled(function, both)(*inputs).backward()
    return graphs


def test_calls_in_the_graph_take_tensors_and_constants(mesh: xd.DeviceMesh) -> None:
    def function(x: Any, host: Any) -> Any:
        moved = x.redistribute(mesh, [S0, S1]) + xd.distribute_tensor(host, mesh, [S0, R])
        return moved.full_tensor().sum()

    x = put(mesh, torch.ones(8, 4), S0, R).requires_grad_()
    dynamo, forward, backward = _graphs_of(function, x, torch.ones(8, 4))
    assert len([node for node in dynamo.nodes if "redistribute" in str(node.target)]) == 1
    for node in (*forward.nodes, *backward.nodes):
        if node.op == "call_function":
            leaves = tree_leaves((node.args, node.kwargs))
            kinds = (torch.fx.Node, int, float, bool, str, torch.dtype, torch.device, type(None))
            assert all(isinstance(leaf, kinds) for leaf in leaves), node
    text = str(forward)
    for call in ("constrain", "put", "to_plain"):
        assert f"torch.ops.xla_dtensor.{call}.default" in text
    assert "[dp, tp] on (dp=2, tp=4)" in text
    # The gradient is moved back to where the input lay.
    assert "[dp, -] on (dp=2, tp=4)" in str(backward)


@pytest.mark.only_on("jax")
def test_a_linear_stays_whole(mesh: xd.DeviceMesh) -> None:
    x, w = put(mesh, torch.randn(8, 6, 4), S0, R), put(mesh, torch.randn(4, 4), R, S0)
    w.requires_grad_()
    _, forward, backward = _graphs_of(lambda x, w: F.linear(x, w).sum(), x, w)
    assert "xla_dtensor.aten_linear.default" in str(forward)
    assert "view" not in str(forward)
    assert "xla_dtensor.linear_weight_grad.default" in str(backward)


# ---------------------------------------------------------------------- recompilation


def _targets(mesh: xd.DeviceMesh) -> list[tuple[xd.DeviceMesh, list[Any], int]]:
    """Mesh, placements, and how many graphs there are after a call with them."""
    other = xd.init_device_mesh("xla", (4, 2), mesh_dim_names=("dp", "tp"))
    flat = xd.init_device_mesh("xla", (8,), mesh_dim_names=("all",))
    strided = _StridedShard(0, split_factor=4)
    return [
        (mesh, [S0, R], 1),
        (mesh, [S0, R], 1),
        (mesh, [R, S0], 2),
        (other, [R, S0], 3),
        (flat, [S0], 4),
        (mesh, [strided, S0], 5),
        (mesh, [S0, S0], 6),  # in torch 2.9 a _StridedShard equals a Shard
        (mesh, [strided, S0], 6),
        (mesh, [S0, R], 6),
    ]


def test_another_target_is_compiled_anew(mesh: xd.DeviceMesh) -> None:
    values, graphs = torch.arange(64.0).reshape(16, 4), Counting()
    function = compiled(lambda x, mesh, placements: x.redistribute(mesh, placements), graphs)
    x = put(mesh, values, S0, S1)
    for target, placements, count in _targets(mesh):
        result = function(x, target, placements)
        assert graphs.count == count
        assert lies_as(result, x.redistribute(target, placements))
        assert torch.equal(result.cpu(), values)


def test_another_input_is_compiled_anew(mesh: xd.DeviceMesh) -> None:
    values, graphs = torch.arange(64.0).reshape(16, 4), Counting()
    function = compiled(lambda x: x * 2, graphs)
    for target, placements, count in _targets(mesh):
        x = put(target, values, *placements)
        result = function(x)
        assert graphs.count == count
        assert lies_as(result, x * 2)
        assert torch.equal(result.cpu(), values * 2)


def test_another_distribution_is_compiled_anew(mesh: xd.DeviceMesh) -> None:
    values, graphs = torch.arange(64.0).reshape(16, 4), Counting()
    function = compiled(lambda x, mesh, p: xd.distribute_tensor(x, mesh, p), graphs)
    for target, placements, count in _targets(mesh):
        result = function(values, target, placements)
        assert graphs.count == count
        assert lies_as(result, put(target, values, *placements))
        assert torch.equal(result.cpu(), values)


def test_other_shapes_and_dtypes(mesh: xd.DeviceMesh) -> None:
    graphs = Counting()
    function = compiled(lambda x: x.redistribute(mesh, [S0, R]).sum(0) + x.shape[0], graphs)
    for rows, dtype in (
        (8, torch.float32),
        (16, torch.float32),
        (7, torch.float32),
        (8, torch.int64),
    ):
        values = torch.arange(rows * 4).reshape(rows, 4).to(dtype)
        result = function(put(mesh, values, R, S0))
        assert torch.equal(result.cpu(), values.sum(0) + rows)
    assert 1 < graphs.count <= 4


# ---------------------------------------------------------------------- training


class Block(nn.Module):
    """Two linear layers and a norm, with a redistribute where a plan would put one."""

    def __init__(self, mesh: xd.DeviceMesh) -> None:
        super().__init__()
        self.mesh = mesh
        self.up, self.norm, self.down = nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 16)

    def forward(self, x: Any) -> Any:
        hidden = self.norm(F.gelu(self.up(x)))
        if isinstance(hidden, xd.DTensor):
            hidden = hidden.redistribute(self.mesh, [S0, Shard(2)])
        return self.down(hidden)


def _distributed(block: Block, mesh: xd.DeviceMesh) -> Block:
    def partition(name: str, module: nn.Module, mesh: xd.DeviceMesh) -> None:
        if isinstance(module, nn.Linear):
            placements = [R, S0] if name == "up" else [R, S1]
            weight = xd.distribute_tensor(module.weight.detach(), mesh, placements)
            module.weight = nn.Parameter(weight)

    xd.distribute_module(block, mesh, partition)
    return block


@pytest.mark.thorough
def test_training_equals_eager_and_plain_torch(mesh: xd.DeviceMesh, backend: str) -> None:
    torch.manual_seed(0)
    plain = Block(mesh)
    eager = _distributed(copy.deepcopy(plain), mesh)
    traced = copy.deepcopy(eager)
    graphs = Counting(backend)
    module = torch.compile(traced, backend=graphs, fullgraph=True)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (plain, eager, traced)]
    for _ in range(3):
        x, y = torch.randn(8, 6, 16), torch.randn(8, 6, 16)
        losses = [((plain(x) - y) ** 2).mean()]
        dx, dy = put(mesh, x, S0, R), put(mesh, y, S0, R)
        losses += [((model(dx) - dy) ** 2).mean() for model in (eager, module)]
        for loss in losses:
            loss.backward()
        found = [loss.detach().cpu() for loss in losses]
        torch.testing.assert_close(found[2], found[0])
        torch.testing.assert_close(found[2], found[1])
        trios = zip(plain.parameters(), eager.parameters(), traced.parameters(), strict=True)
        for one, two, three in trios:
            assert isinstance(three.grad, xd.DTensor)
            assert two.grad is not None
            torch.testing.assert_close(three.grad.cpu(), one.grad, atol=1e-6, rtol=1e-5)
            torch.testing.assert_close(three.grad.cpu(), two.grad.cpu(), atol=1e-6, rtol=1e-5)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert graphs.count == 1


@pytest.mark.parametrize("of_grad", [(R, R), (S0, R), (R, S0)])
def test_gradients_that_lie_otherwise_than_expected(mesh: xd.DeviceMesh, of_grad: Any) -> None:
    values, weights = torch.randn(8, 4), torch.randn(8, 4)
    x = put(mesh, values, S0, S1).requires_grad_()
    result = compiled(lambda x: x.sin())(x)
    result.backward(put(mesh, weights, *of_grad))
    torch.testing.assert_close(x.grad.cpu(), weights * values.cos())


def test_a_pending_output_takes_a_whole_gradient(mesh: xd.DeviceMesh) -> None:
    x = put(mesh, torch.randn(8, 4), S0, S1).requires_grad_()
    total = compiled(lambda x: x.sum())(x)
    assert total.placements == (Partial("sum"), Partial("sum"))
    tangent = total.__coerce_tangent_metadata__()
    assert tangent.placements == (R, R)
    total.backward()
    assert torch.equal(x.grad.cpu(), torch.ones(8, 4))


def test_gradient_of_a_full_tensor(mesh: xd.DeviceMesh, backend: str) -> None:
    values, weights = torch.randn(8, 4), torch.randn(8, 4)
    x = put(mesh, values, S0, S1).requires_grad_()
    whole = compiled(lambda x: x.full_tensor(grad_placements=("dp", None)), backend)(x)
    (whole * put(mesh, weights, R, R).full_tensor()).sum().backward()
    torch.testing.assert_close(x.grad.cpu(), weights)


# ---------------------------------------------------------------------- inside of a compiled step


def test_inside_of_a_compiled_step(mesh: xd.DeviceMesh) -> None:
    graphs = Counting()
    function = compiled(lambda x: x.redistribute(mesh, [S0, R]) * 2, graphs)
    step = xd.compile(lambda x: function(x) + 1)
    x = put(mesh, torch.ones(8, 4), S0, S1)
    for _ in range(3):
        result = step(x)
        assert torch.equal(result.cpu(), torch.full((8, 4), 3.0))
    assert graphs.count == 1
    # Dynamo puts its functions among the globals while it compiles, so the second call finds more
    # than the first did.
    assert step.stats()["traces"] <= 2


# ---------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x, mesh: x.redistribute(mesh, [Shard(5), R]), r"The dim 5 does not exist"),
        (
            lambda x, mesh: xd.distribute_tensor(torch.ones(3), mesh, [Shard(5), R]),
            r"The dim 5 does not exist",
        ),
        (
            lambda x, mesh: xd.distribute_tensor(torch.ones(3)),
            r"without a mesh inside torch\.compile",
        ),
    ],
)
def test_refusals_name_the_mistake(mesh: xd.DeviceMesh, function: Any, message: str) -> None:
    # A dim that is not there is an IndexError, which Dynamo of torch 2.15 lets through as it is.
    with pytest.raises((TorchRuntimeError, IndexError), match=message):
        compiled(function)(put(mesh, torch.ones(8, 4), S0, S1), mesh)


def test_a_leaf_is_not_made_inside(mesh: xd.DeviceMesh) -> None:
    function = compiled(lambda t: xd.distribute_tensor(t, mesh, [S0, R]))
    with pytest.raises(TorchRuntimeError, match="that requires grad"):
        function(torch.ones(8, 4, requires_grad=True))


@pytest.mark.only_on("jax")
def test_a_plain_tensor_of_jax_is_no_input_of_a_full_graph(mesh: xd.DeviceMesh) -> None:
    whole = put(mesh, torch.ones(8, 4), S0, S1).full_tensor()
    with pytest.raises(Unsupported, match="JaxTensor"):
        compiled(lambda t: t * 2)(whole)
    double = torch.compile(lambda t: t * 2, backend="aot_eager")
    assert torch.equal(double(whole).cpu(), torch.full((8, 4), 2.0))


def test_a_graph_of_another_process() -> None:
    with pytest.raises(CompileError, match=r"names the layout 'x #9'\. This process"):
        Names("layout").value("x #9")


# ---------------------------------------------------------------------- Inductor


# torch 2.13 warns where it imports Inductor.
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("backend_", ["inductor", None])
def test_inductor_leaves_code_alone(mesh: xd.DeviceMesh, backend_: str | None) -> None:
    """Its kernels read memory that there is none of: the process ended."""
    scale = put(mesh, torch.full((4,), 3.0), R, R)
    options: Any = {} if backend_ is None else {"backend": backend_}
    function = torch.compile(lambda x: (x * scale + 1).sin(), **options)
    x, host = torch.randn(8, 4), torch.randn(4)
    expected = (x * 3 + 1).sin()
    for run in (function, xd.compile(function)):
        torch.testing.assert_close(run(put(mesh, x, S0, R)).cpu(), expected)
    scale = scale.to_local()
    local = function(put(mesh, x, R, R).to_local())
    torch.testing.assert_close(xd.DTensor.from_local(local, mesh, [R, R]).cpu(), expected)
    scale = torch.full((4,), 3.0)
    torch.testing.assert_close(function(host).cpu(), (host * 3 + 1).sin())


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
def test_inductor_and_a_full_graph(mesh: xd.DeviceMesh) -> None:
    function = torch.compile(lambda x: x * 2, fullgraph=True)
    with pytest.raises(Unsupported, match=r"met a tensor on a mesh.*xla_dtensor\.compile on the"):
        function(put(mesh, torch.ones(8, 4), S0, R))


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
# torch 2.9 looks at what runs below code that it leaves alone.
@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace the builtin")
@pytest.mark.filterwarnings("ignore:Using `torch.compile.module.` when there are global hooks")
def test_a_module_that_torch_compiled_trains(mesh: xd.DeviceMesh) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 4), nn.GELU())
    inner: Any = xd.distribute_module(copy.deepcopy(plain), mesh)
    model = torch.compile(inner)

    def step(x: torch.Tensor) -> None:
        model(x).square().sum().backward()

    x = torch.randn(8, 4)
    plain(x).square().sum().backward()
    for run in (step, xd.compile(step)):
        model.zero_grad()
        run(put(mesh, x, S0, R))
        torch.testing.assert_close(inner[0].weight.grad.cpu(), plain[0].weight.grad)
