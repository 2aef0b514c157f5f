"""Attention that never holds all scores: values, gradients, shardings, and what is in memory."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import xla_dtensor as xd
from tests.libtpu import needs_libtpu, run_with_libtpu
from xla_dtensor.errors import ArgumentTypeError
from xla_dtensor.report import collectives
from xla_dtensor.runtimes import Runtime
from xla_dtensor.runtimes import whole_ops as attention_choice

pytestmark = pytest.mark.usefixtures("runtime")

_generator = torch.Generator().manual_seed(5)


def f(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=_generator)


def seen(*shape: int) -> torch.Tensor:
    """Return a mask of which some row sees nothing."""
    mask = torch.rand(shape, generator=_generator) > 0.3
    mask[..., 2, :] = False
    return mask


# Heads of the keys, number of keys, options. There are 4 query heads and 700 queries.
CASES: dict[str, tuple[int, int, dict[str, Any]]] = {
    "plain": (4, 1100, {}),
    "causal": (4, 700, {"is_causal": True}),
    "causal, more keys": (4, 1100, {"is_causal": True}),
    "causal, fewer keys": (4, 513, {"is_causal": True}),
    "one block": (4, 100, {}),
    "scale": (4, 700, {"scale": 0.3}),
    "bool mask": (4, 1100, {"attn_mask": seen(700, 1100)}),
    "bool mask per head": (4, 700, {"attn_mask": seen(2, 4, 700, 700)}),
    "float mask": (4, 700, {"attn_mask": f(700, 700)}),
    "mask of columns": (4, 700, {"attn_mask": seen(700, 1)}),
    "grouped": (2, 700, {"enable_gqa": True}),
    "grouped, causal": (1, 700, {"enable_gqa": True, "is_causal": True}),
    "grouped, mask": (2, 700, {"enable_gqa": True, "attn_mask": seen(2, 1, 700, 700)}),
    "grouped, mask per head": (2, 700, {"enable_gqa": True, "attn_mask": f(4, 700, 700)}),
}


@pytest.mark.thorough
@pytest.mark.only_on("jax")
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(mesh: xd.DeviceMesh, name: str) -> None:
    heads, keys, options = CASES[name]
    inputs = f(2, 4, 700, 8), f(2, heads, keys, 8), f(2, heads, keys, 16)
    exact: list[Any] = [t.double().requires_grad_() for t in inputs]
    ours: list[Any] = [
        xd.distribute_tensor(t, mesh, ("dp", None, None, None)).requires_grad_() for t in inputs
    ]
    mask = options.get("attn_mask")
    wide = options if mask is None or mask.dtype == torch.bool else {"attn_mask": mask.double()}
    expected = F.scaled_dot_product_attention(*exact, **{**options, **wide})
    cotangent = f(*expected.shape)
    expected.backward(cotangent.double())
    with xd.attention_kernel("lean"):
        found: Any = F.scaled_dot_product_attention(*ours, **options)
        found.backward(xd.distribute_tensor(cotangent, mesh))
        with torch.inference_mode():
            again: Any = F.scaled_dot_product_attention(*ours, **options)
    torch.testing.assert_close(found.detach().cpu(), expected.float(), rtol=1e-5, atol=1e-5)
    assert torch.equal(again.cpu(), found.detach().cpu())
    for mine, theirs in zip(ours, exact, strict=True):
        assert theirs.grad is not None
        torch.testing.assert_close(mine.grad.cpu(), theirs.grad.float(), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("kernel", ["plain", "lean"])
@pytest.mark.parametrize("added", [False, True])
def test_a_row_that_sees_nothing_is_zero(mesh: xd.DeviceMesh, kernel: Any, added: bool) -> None:
    mask: Any = seen(5, 7)
    mask = torch.where(mask, 0.0, float("-inf")) if added else mask
    inputs = f(2, 4, 5, 8), f(2, 4, 7, 8), f(2, 4, 7, 8)
    plain = [t.clone().requires_grad_() for t in inputs]
    ours: list[Any] = [
        xd.distribute_tensor(t, mesh, ("dp", None, None, None)).requires_grad_() for t in inputs
    ]
    expected = F.scaled_dot_product_attention(*plain, attn_mask=mask)
    with xd.attention_kernel(kernel):
        found: Any = F.scaled_dot_product_attention(*ours, attn_mask=mask)
        assert not found[:, :, 2].any()
        torch.testing.assert_close(found.detach().cpu(), expected.detach())
        expected.sum().backward()
        found.sum().backward()
    for mine, theirs in zip(ours, plain, strict=True):
        torch.testing.assert_close(mine.grad.cpu(), theirs.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.only_on("jax")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes(mesh: xd.DeviceMesh, dtype: torch.dtype) -> None:
    inputs = [f(2, 2, 600, 8).to(dtype) for _ in range(3)]
    exact: list[Any] = [t.double().requires_grad_() for t in inputs]
    ours: list[Any] = [
        xd.distribute_tensor(t, mesh, ("dp", None, None, None)).requires_grad_() for t in inputs
    ]
    F.scaled_dot_product_attention(
        exact[0], exact[1], exact[2], is_causal=True
    ).square().sum().backward()
    with xd.attention_kernel("lean"):
        found: Any = F.scaled_dot_product_attention(ours[0], ours[1], ours[2], is_causal=True)
        found.square().sum().backward()
    assert found.dtype == dtype
    close = 1e-10 if dtype == torch.float64 else 3e-2
    for mine, theirs in zip(ours, exact, strict=True):
        assert theirs.grad is not None
        assert mine.grad.dtype == dtype
        torch.testing.assert_close(mine.grad.cpu().double(), theirs.grad, rtol=close, atol=close)


def step_of(kernel: str, length: int, *, again: bool = False) -> Any:
    def attention(q: Any, k: Any, v: Any) -> Any:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    def step(*inputs: Any) -> Any:
        leaves = [t.detach().requires_grad_() for t in inputs]
        with xd.attention_kernel(kernel):  # type: ignore[arg-type]
            out: Any
            if again:
                out = checkpoint(attention, *leaves, use_reentrant=False)
            else:
                out = attention(*leaves)
            out.square().sum().backward()
        return [out.detach(), *(t.grad for t in leaves)]

    return xd.compile(step)


def arguments(mesh: xd.DeviceMesh, length: int) -> list[Any]:
    return [
        xd.distribute_tensor(f(2, heads, length, 16), mesh, ("dp", "tp", None, None))
        for heads in (8, 4, 4)
    ]


@pytest.mark.only_on("jax")
@pytest.mark.parametrize("again", [False, True], ids=["kept", "checkpoint"])
def test_no_scores_no_collectives_in_a_step(mesh: xd.DeviceMesh, again: bool) -> None:
    given = arguments(mesh, 1100)
    lean, plain = step_of("lean", 1100, again=again), step_of("plain", 1100)
    found, expected = lean(*given), plain(*given)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.cpu(), b.cpu(), rtol=1e-4, atol=1e-4)
    text = lean.hlo()
    assert "1100,1100" in plain.hlo()
    assert "1100,1100" not in text
    # One sequence and 2 of 8 heads on each device, 512 keys at a time; nothing is sent.
    assert re.search(r"f32\[1,1,2,1100,512\]", text)
    assert not collectives(text)


@pytest.mark.only_on("jax")
def test_long_sequences_take_it_by_themselves(mesh: xd.DeviceMesh) -> None:
    given = arguments(mesh, 1024)
    auto = step_of("auto", 1024)
    auto(*given)
    assert "1024,1024" not in auto.hlo()
    assert "blockwise_attention" in auto.hlo()
    short = step_of("auto", 64)
    short(*arguments(mesh, 64))
    assert "64,64" in short.hlo()


def test_the_choice_is_given_back_and_checked(runtime: Runtime) -> None:
    q = torch.empty(2, 8, 16, 4, device="meta")
    with xd.attention_kernel("lean"):
        assert attention_choice.is_lean(q, q, q) == (runtime.name == "jax")
        with xd.attention_kernel("plain"):
            assert not attention_choice.is_lean(q, q, q)
        assert not attention_choice.is_lean(q[:, :0], q, q) or runtime.name != "jax"
    assert not attention_choice.is_lean(q, q, q)
    with (
        pytest.raises(ArgumentTypeError, match="'auto', 'plain' or 'lean'"),
        xd.attention_kernel(
            "flash"  # type: ignore[arg-type]
        ),
    ):
        pass


@pytest.mark.only_on("jax")
@pytest.mark.usefixtures("runtime")
def test_a_gpus_kernel_is_taken_at_any_length(monkeypatch: pytest.MonkeyPatch) -> None:
    from xla_dtensor.runtimes.jax.arrays import values

    q = torch.empty(2, 8, 16, 8, dtype=torch.bfloat16, device="meta")
    assert not attention_choice.is_lean(q, q, q)
    monkeypatch.setattr(values, "platform", lambda: "gpu")
    assert attention_choice.is_lean(q, q, q, is_causal=True)
    assert not attention_choice.is_lean(q, q, q, mask=q[..., :1])
    assert not attention_choice.is_lean(q[:, :, :4], q, q, is_causal=True)
    assert not attention_choice.is_lean(q.float(), q.float(), q.float())
    with xd.attention_kernel("plain"):
        assert not attention_choice.is_lean(q, q, q)


@pytest.mark.only_on("jax")
def test_another_choice_traces_anew(mesh: xd.DeviceMesh) -> None:
    q = xd.distribute_tensor(f(2, 4, 40, 8), mesh, ("dp", None, None, None))
    run = xd.compile(lambda: F.scaled_dot_product_attention(q, q, q))
    run()
    assert "blockwise_attention" not in run.hlo()
    with xd.attention_kernel("lean"):
        run()
        assert "blockwise_attention" in run.hlo()
    assert run.stats()["traces"] == 2


# ---------------------------------------------------------------------- the TPU's kernel

SPLASH_SHAPES = {"heads alike": (4, 4), "grouped": (8, 4), "one key head": (2, 1)}


@pytest.mark.thorough
@pytest.mark.only_on("jax")
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("name", SPLASH_SHAPES)
def test_splash_in_interpret_mode(mesh: xd.DeviceMesh, name: str, is_causal: bool) -> None:
    """The kernel itself, run by JAX on CPU devices: values, gradients, and who holds what."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import NamedSharding, PartitionSpec

    from xla_dtensor.runtimes.jax.lower import attention as attention_lean
    from xla_dtensor.runtimes.jax.lower import attention as attention_splash

    heads, key_heads = SPLASH_SHAPES[name]
    q, grad = (f(2, heads, 256, 128).numpy() for _ in range(2))
    k, v = (f(2, key_heads, 256, 128).numpy() for _ in range(2))
    scale = 128**-0.5
    devices = np.array(jax.devices()[:8]).reshape(2, 4)
    cut = "tp" if key_heads == 4 else None
    lies = NamedSharding(jax.sharding.Mesh(devices, ("dp", "tp")), PartitionSpec("dp", cut))
    kernel: Any = attention_splash.Kernel(is_causal, scale, lies, interpret=True)
    assert attention_splash.fits(jnp.asarray(q), jnp.asarray(k), jnp.asarray(v), None)

    def both(q: Any, k: Any, v: Any, grad: Any) -> Any:
        output, log_sum = kernel.forward(q, k, v)
        return output, log_sum, *kernel.backward(grad, q, k, v, output, log_sum)

    lean: Any = attention_lean
    given = [jnp.asarray(t) for t in (q, k, v)]
    expected = lean.lean_forward(*given, None, is_causal, scale)
    grads = lean.lean_backward(jnp.asarray(grad), *given, None, *expected, is_causal, scale)
    compiled: Any = (
        jax.jit(both).lower(*(jax.device_put(t, lies) for t in (q, k, v, grad))).compile()
    )
    found = compiled(*(jax.device_put(t, lies) for t in (q, k, v, grad)))
    for ours, theirs in zip(found, (*expected, *grads), strict=True):
        assert ours.sharding.is_equivalent_to(lies, ours.ndim)
        np.testing.assert_allclose(np.asarray(ours), np.asarray(theirs), rtol=1e-4, atol=1e-5)
    assert not collectives(compiled.as_text())


def test_what_splash_takes() -> None:
    from xla_dtensor.runtimes.jax.lower.attention import fits

    def shaped(*shape: int, dtype: str = "bfloat16") -> Any:
        import jax

        return jax.ShapeDtypeStruct(shape, dtype)

    good = shaped(2, 4, 256, 128)
    assert fits(good, good, good, None)
    assert fits(shaped(2, 8, 384, 128), good, good, None)
    wrong = {
        "mask": (good, good, good, shaped(256, 256)),
        "narrow head": (*[shaped(2, 4, 256, 64)] * 3, None),
        "odd length": (shaped(2, 4, 200, 128), good, good, None),
        "heads": (shaped(2, 6, 256, 128), good, good, None),
        "float64": (*[shaped(2, 4, 256, 128, dtype="float64")] * 3, None),
        "no heads": (*[shaped(4, 256, 128)] * 3, None),
    }
    assert {name for name, given in wrong.items() if fits(*given)} == set()


LIBTPU = """
import sys
import torch
import torch.nn.functional as F
from jax.experimental import topologies
import xla_dtensor as xd
from tests.libtpu import needs_libtpu, run_with_libtpu
xd.get_runtime("jax", num_cpu_devices=8)
mesh = xd.init_device_mesh("xla", (2, 4), mesh_dim_names=("dp", "tp"))
def step(*inputs):
    leaves = [t.detach().requires_grad_() for t in inputs]
    out = F.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True)
    out.square().sum().backward()
    return [t.grad for t in leaves]
run = xd.compile(step)
run(*(xd.distribute_tensor(torch.randn(2, heads, 1024, 128).bfloat16(), mesh,
                           ("dp", "tp", None, None)) for heads in (8, 4, 4)))
assert "splash" not in run.hlo()
devices = topologies.get_topology_desc("v5e:2x4", "tpu").devices
open(sys.argv[1], "w").write(run.hlo_for(sorted(devices, key=lambda device: device.id)))
"""


@pytest.mark.thorough
@pytest.mark.only_on("jax")
@needs_libtpu
def test_libtpu_compiles_the_kernel(tmp_path: Path) -> None:
    run_with_libtpu(LIBTPU, str(tmp_path / "hlo"), folder=tmp_path)
    text = (tmp_path / "hlo").read_text()
    kernels = re.findall(r"%splash_mha_(\w+?)_(?:no_)?residuals[.\d]* = .*tpu_custom_call", text)
    assert sorted(kernels) == ["dkv", "dq", "fwd"]
    assert "1024,1024" not in text
    assert "blockwise" not in text
    # One sequence and 2 of 8 heads each; nothing is sent.
    assert "bf16[2,1024,128]" in text
    assert not collectives(text)


def test_where_heads_lie(mesh: xd.DeviceMesh) -> None:
    def put(heads: int, *spec: Any, over: Any = mesh) -> Any:
        return xd.distribute_tensor(torch.zeros(2, heads, 16, 8), over, spec)

    def lies(q: Any, k: Any) -> str:
        return attention_choice.where_heads_lie(q, k, k).partition(" #")[0]

    cut = put(8, "dp", "tp", None, None)
    assert lies(cut, put(4, "dp", "tp", None, None)) == "[dp, tp, -, -] on (dp=2, tp=4)"
    # What does not agree, and what does not divide, is not cut.
    assert lies(cut, put(4, "dp", None, None, None)) == "[dp, -, -, -] on (dp=2, tp=4)"
    assert lies(cut, put(2, "dp", "tp", None, None)) == "[dp, -, -, -] on (dp=2, tp=4)"
    assert lies(cut, put(4, None, None, "dp", None)) == ""
    assert lies(cut, torch.zeros(2, 4, 16, 8)) == ""
    other = xd.init_device_mesh("xla", (4, 2), mesh_dim_names=("dp", "tp"))
    assert lies(cut, put(4, "dp", "tp", None, None, over=other)) == ""
    of_submesh = put(4, None, "tp", None, None, over=mesh["tp"])
    assert lies(of_submesh, of_submesh) == "[-, tp, -, -] on (dp=2, tp=4)"
