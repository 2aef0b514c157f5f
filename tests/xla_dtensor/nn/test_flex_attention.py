"""flex_attention of tensors on a mesh beside torch's own, and beside the formula."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.attention.flex_attention as torchs
from torch.distributed.tensor import Replicate, Shard

import xla_dtensor as xd
from xla_dtensor.errors import ArgumentTypeError

pytestmark = pytest.mark.only_on("jax")

LENGTH, HEADS = 16, 4
PLACEMENTS = (Shard(0), Shard(1))
DOCUMENTS = torch.tensor([0] * 5 + [1] * 7 + [2] * 4)
BIAS = torch.randn(HEADS, LENGTH, LENGTH, generator=torch.Generator().manual_seed(1)).double()
SLOPES = torch.tensor([1.0, 0.5, 0.25, 0.125]).double()


@pytest.fixture
def flex(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    monkeypatch.setattr(torchs, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    xd.install()
    yield torchs.flex_attention
    xd.uninstall()


def drawn(batch: int = 2, heads: int = HEADS, length: int = LENGTH) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(batch, heads, length, 8, generator=generator).double() for _ in range(3)]


def causal(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return q >= kv


def slopes(put: Any) -> Any:
    slopes = put(SLOPES)
    return lambda s, b, h, q, kv: s + slopes[h] * (kv - q)


def bias(put: Any) -> Any:
    bias = put(BIAS)
    return lambda s, b, h, q, kv: s + bias[h, q, kv]


def documents(put: Any) -> Any:
    documents = put(DOCUMENTS)
    return lambda b, h, q, kv: (documents[q] == documents[kv]) & (q >= kv)


# Each is given what puts a tensor where queries are.
SCORES: dict[str, Any] = {
    "none": lambda put: None,
    "distance": lambda put: lambda s, b, h, q, kv: s + (q - kv) * 0.1,
    "soft cap": lambda put: lambda s, b, h, q, kv: 5 * torch.tanh(s / 5),
    "slopes": slopes,
    "bias": bias,
    "window": lambda put: lambda s, b, h, q, kv: torch.where(q - kv < 3, s, -float("inf")),
}
MASKS: dict[str, Any] = {
    "none": lambda put: None,
    "causal": lambda put: causal,
    "documents": documents,
    "rows that see nothing": lambda put: lambda b, h, q, kv: (q >= kv) & (q > 3),
    "heads": lambda put: lambda b, h, q, kv: kv <= q - h,
}


def block_mask(name: str, put: Any) -> Any:
    """The blocks are found on the host; the function is of tensors where `put` puts them."""
    on_host, mask_mod = (MASKS[name](how) for how in (lambda tensor: tensor, put))
    if on_host is None:
        return None
    made = torchs.create_block_mask(on_host, None, HEADS, LENGTH, LENGTH, "cpu", BLOCK_SIZE=4)
    made.mask_mod = mask_mod
    return made


def whole(mesh: Any, tensor: torch.Tensor) -> Any:
    return xd.distribute_tensor(tensor, mesh, [Replicate()] * mesh.ndim)


def on_host(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor().detach().cpu()


def by_hand(q: Any, k: Any, v: Any, score_mod: Any = None, mask_mod: Any = None) -> Any:
    """Compute the formula, with all places at once."""
    scores = (q @ k.mT) * q.shape[-1] ** -0.5
    places = [
        torch.arange(n).view([-1 if at == dim else 1 for at in range(4)])
        for dim, n in enumerate(scores.shape)
    ]
    if score_mod is not None:
        scores = score_mod(scores, *places)
    if mask_mod is not None:
        scores = scores.masked_fill(~mask_mod(*places), float("-inf"))
    return scores.softmax(-1).nan_to_num() @ v


def gradients(attention: Any, tensors: Any) -> list[Any]:
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    out = attention(*leaves)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), leaves)]


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize(
    ("score", "mask"),
    [
        *((score, "causal") for score in SCORES),
        *(("none", mask) for mask in MASKS),
        ("bias", "documents"),
        ("distance", "rows that see nothing"),
        ("soft cap", "none"),
    ],
)
def test_values_and_gradients(
    mesh: xd.DeviceMesh, flex: Any, score: str, mask: str, is_compiled: bool
) -> None:
    tensors = drawn()
    put = partial(whole, mesh)
    options = {"score_mod": SCORES[score](put), "block_mask": block_mask(mask, put)}
    plain = {"score_mod": SCORES[score](torch.clone), "block_mask": block_mask(mask, torch.clone)}
    step = partial(gradients, partial(flex, **options))
    given = [xd.distribute_tensor(tensor, mesh, PLACEMENTS) for tensor in tensors]
    found = (xd.compile(step) if is_compiled else step)(given)
    assert found[0].placements == PLACEMENTS
    mods = {"score_mod": plain["score_mod"], "mask_mod": MASKS[mask](torch.clone)}
    expected = gradients(partial(by_hand, **mods), tensors)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(on_host(mine), theirs, rtol=0, atol=1e-12)
    torch.testing.assert_close(flex(*tensors, **plain), expected[0], rtol=0, atol=1e-12)


def test_rows_and_heads_stay_cut(mesh: xd.DeviceMesh, flex: Any) -> None:
    options = {"score_mod": SCORES["distance"](None), "block_mask": block_mask("causal", None)}
    step = xd.compile(partial(gradients, partial(flex, **options)))
    step([xd.distribute_tensor(tensor, mesh, PLACEMENTS) for tensor in drawn()])
    collectives = r"\b(all-gather|all-reduce|all-to-all|collective-permute)(-start)?\("
    assert not re.search(collectives, step.hlo())
    assert "f64[1,1,16,16]" in step.hlo()


def test_gradient_of_a_learned_bias(mesh: xd.DeviceMesh, flex: Any) -> None:
    def gradient(attention: Any, tensors: Any, bias: torch.Tensor) -> torch.Tensor:
        bias = bias.detach().requires_grad_()
        out = attention(*tensors, lambda s, b, h, q, kv: s + bias[h, q, kv])
        return torch.autograd.grad(out.square().sum(), bias)[0]

    tensors = drawn()
    given = [xd.distribute_tensor(tensor, mesh, PLACEMENTS) for tensor in tensors]
    found = xd.compile(partial(gradient, flex))(given, whole(mesh, BIAS))
    expected = gradient(by_hand, tensors, BIAS)
    torch.testing.assert_close(on_host(found), expected, rtol=0, atol=1e-12)


def test_a_mask_of_documents_is_made_in_the_step(mesh: xd.DeviceMesh, flex: Any) -> None:
    def step(q: Any, k: Any, v: Any, documents: Any) -> Any:
        mask_mod = MASKS["documents"](lambda _: documents)
        made = torchs.create_block_mask(mask_mod, None, None, LENGTH, LENGTH, q.device)
        return flex(q, k, v, block_mask=made)

    tensors = drawn()
    given = [xd.distribute_tensor(tensor, mesh, PLACEMENTS) for tensor in tensors]
    expected = by_hand(*tensors, mask_mod=documents(torch.clone))
    for run in (step, xd.compile(step)):
        found = on_host(run(*given, documents=whole(mesh, DOCUMENTS)))
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_the_blocks_of_a_list_alone(mesh: xd.DeviceMesh, flex: Any) -> None:
    """Without a function; and with one that full blocks are not asked of."""
    counts, columns = torch.tensor([[[1, 2, 1, 0]]]), torch.zeros(1, 1, 4, 4, dtype=torch.int64)
    columns[..., 0], full_columns = torch.tensor([0, 1, 2, 0]), torch.full((1, 1, 4, 4), 3)
    full = torch.tensor([[[0, 0, 0, 1]]]), full_columns
    made = torchs.BlockMask.from_kv_blocks(counts, columns, *full, BLOCK_SIZE=4, mask_mod=causal)
    seen = torch.zeros(LENGTH, LENGTH, dtype=torch.bool)
    for row, column in ((0, 0), (1, 1), (1, 0), (2, 2)):
        seen[row * 4 : row * 4 + 4, column * 4 : column * 4 + 4] = True
    seen &= torch.ones_like(seen).tril()
    seen[12:, 12:] = True
    q, k, v = drawn()
    given = [xd.distribute_tensor(tensor, mesh, PLACEMENTS) for tensor in (q, k, v)]
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)
    found = on_host(flex(*given, block_mask=made))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.filterwarnings("ignore:return_lse is deprecated:FutureWarning")
def test_sums(mesh: xd.DeviceMesh, flex: Any) -> None:
    tensors = drawn()
    given = [xd.distribute_tensor(tensor, mesh, PLACEMENTS) for tensor in tensors]
    mask = block_mask("rows that see nothing", torch.clone)
    expected = flex(*tensors, block_mask=mask, return_lse=True)
    found = flex(*given, block_mask=mask, return_lse=True)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(on_host(mine), theirs, rtol=0, atol=1e-12)
    assert torch.isinf(on_host(found[1])[..., :4]).all()
    if hasattr(torchs, "AuxRequest"):
        request = torchs.AuxRequest(lse=True, max_scores=True)
        out, sums = flex(*given, block_mask=mask, return_aux=request)
        torch.testing.assert_close(on_host(sums.lse), expected[1], rtol=0, atol=1e-12)
        scores = tensors[0] @ tensors[1].mT * 8**-0.5
        largest = scores.masked_fill(~torch.ones(LENGTH, LENGTH).tril().bool(), -torch.inf).amax(-1)
        torch.testing.assert_close(on_host(sums.max_scores)[..., 4:], largest[..., 4:])
        torch.testing.assert_close(on_host(out), expected[0], rtol=0, atol=1e-12)


def test_forms(mesh: xd.DeviceMesh, flex: Any) -> None:
    """Grouped heads, one batch of keys, uneven parts, a cut length, bfloat16, local views."""
    near, mask = SCORES["distance"](None), block_mask("causal", None)

    def check(tensors: Any, placements: Any, atol: float = 1e-12, **options: Any) -> None:
        given = [
            xd.distribute_tensor(tensor, mesh, [p if tensor.shape[i] > 1 else Replicate()
                                                for i, p in enumerate(placements)])
            for tensor in tensors
        ]  # fmt: skip
        found = on_host(flex(*given, score_mod=near, **options))
        batch = tensors[0].shape[0]
        expected = flex(
            *(tensor.expand(batch, -1, -1, -1) for tensor in tensors), score_mod=near, **options
        )
        assert found.dtype == expected.dtype
        torch.testing.assert_close(found, expected, rtol=0, atol=atol)

    q, k, v = drawn()
    check((q, k[:, :2], v[:, :2]), PLACEMENTS, enable_gqa=True, block_mask=mask)
    check((q, k[:1], v[:1]), PLACEMENTS)
    check(drawn(3, 5, 10), PLACEMENTS)
    check((q, k, v), (Shard(0), Shard(2)), block_mask=mask)
    check([tensor.bfloat16() for tensor in (q, k, v)], PLACEMENTS, 1e-2, block_mask=mask)
    views = [xd.distribute_tensor(tensor, mesh, PLACEMENTS).to_local() for tensor in (q, k, v)]
    found = xd.DTensor.from_local(flex(*views, score_mod=near), mesh, PLACEMENTS)
    torch.testing.assert_close(on_host(found), flex(q, k, v, near), rtol=0, atol=1e-12)


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
def test_under_torch_compile(mesh: xd.DeviceMesh, flex: Any) -> None:
    """As everybody calls it: Inductor, which it is compiled by, leaves it alone."""
    compiled, mask = torch.compile(flex), block_mask("causal", None)
    given = [xd.distribute_tensor(tensor, mesh, PLACEMENTS) for tensor in drawn()]
    attention = partial(compiled, score_mod=SCORES["soft cap"](None), block_mask=mask)
    expected = by_hand(*drawn(), score_mod=SCORES["soft cap"](None), mask_mod=causal)
    for run in (attention, xd.compile(attention)):
        torch.testing.assert_close(on_host(run(*given)), expected, rtol=0, atol=1e-12)


def test_what_is_refused(mesh: xd.DeviceMesh, flex: Any) -> None:
    q, k, v = (xd.distribute_tensor(tensor, mesh, [Shard(0), Replicate()]) for tensor in drawn())
    for wrong, words in (
        ((q[0], k, v), r"takes \(batch, heads, length, size\) each"),
        ((q, k[:, :2], v[:, :2]), "4 heads of queries and 2 of keys. Pass enable_gqa=True"),
        ((q, k, v[:, :, :8]), "have one batch, heads and length"),
    ):
        with pytest.raises(ArgumentTypeError, match=words):
            flex(*wrong)
