"""What torchtitan asks for and does not get here: the messages that docs/torchtitan.md quotes."""

# torchtitan is installed for the newest torch only.
# pyright: reportMissingImports=false

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.tensor.parallel import loss_parallel

import xla_dtensor as xd
from tests.documents import ROOT
from tests.torchtitan.jobs import BATCH, LENGTH, Job, Run, job
from xla_dtensor.errors import (
    DistributeError,
    LocalViewError,
    ProcessGroupError,
    UnsupportedOpError,
    XlaDTensorError,
)

pytestmark = pytest.mark.only_on("jax")

Parallel = Callable[[str | Job], Run]
DOC = (ROOT / "docs" / "torchtitan.md").read_text()

# What a job is refused with; the text is quoted in the document, up to "...".
REFUSED = {
    "async TP": (
        job(
            shard=2,
            tensor=4,
            compile_config={"enable": True, "enable_async_tensor_parallel": True},
        ),
        ProcessGroupError,
        "The group_name of the members along 'tp' was asked for, as of a process group.",
    ),
    "torch.compile per block": (
        job(shard=8, compile_config={"enable": True}),
        UnsupportedOpError,
        "fully_shard was called on a module after module.compile().",
    ),
    "CPU offloading": (
        job(shard=8, training={"enable_cpu_offload": True}),
        UnsupportedOpError,
        "fully_shard was called with CPUOffloadPolicy.",
    ),
    "spmd_types": (
        job(shard=8, backend="spmd_types"),
        ProcessGroupError,
        "The process group of an axis of the mesh (dp=8) was asked for.",
    ),
    "spmd_types, TP": (
        job(shard=2, tensor=4, backend="spmd_types"),
        RuntimeError,
        "Passing an axis name to a redistribution or collective API requires an ambient "
        "DeviceMesh.",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_jobs(parallel: Parallel, name: str) -> None:
    asked, kind, text = REFUSED[name]
    with pytest.raises(kind) as raised:
        parallel(asked)
    assert str(raised.value).startswith(text)
    assert text in DOC


def refused(call: Callable[[], Any], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind) as raised:
        call()
    assert isinstance(raised.value, XlaDTensorError)
    assert str(raised.value).startswith(text)
    assert text in DOC


def test_context_parallel(parallel: Parallel) -> None:
    run = parallel(job(shard=2, context_parallel_degree=4))
    tokens, _ = run.batch()
    shape = (BATCH, LENGTH, 16, 16)
    refused(
        lambda: run.model(tokens),
        DistributeError,
        f"from_local was called with a plain tensor of shape={shape} and S(1) for axis 'cp'",
    )


def test_the_loss_under_tensor_parallelism(parallel: Parallel) -> None:
    from torchtitan.components.loss import cross_entropy_loss

    run = parallel("FSDP+TP")
    tokens, labels = run.batch()
    pred = run.model(tokens)
    with loss_parallel():
        refused(
            lambda: cross_entropy_loss(pred, labels),
            LocalViewError,
            "MemberNumber(tp: 512, 1024, 1536, 2048) < 2048 was asked for, as one value for all",
        )


def test_inputs_under_full_dtensor(parallel: Parallel) -> None:
    from torchtitan.distributed.full_dtensor import parallelize_inputs

    run = parallel(job(shard=8, backend="full_dtensor"))
    tokens = torch.zeros(BATCH, LENGTH, dtype=torch.int64)
    refused(
        lambda: parallelize_inputs(run.dims, tokens, tokens, {}),
        DistributeError,
        f"from_local was called with a plain tensor of shape={(BATCH, LENGTH)} and S(0) for axis",
    )


def test_flex_attention(installed: None) -> None:
    """torch's own refusal, of a tensor that says it is on a CPU, where install() came later."""
    from torch.nn.attention.flex_attention import flex_attention

    torchs: Any = inspect.unwrap(flex_attention)
    mesh = xd.init_device_mesh("xla", (8,))
    q = xd.distribute_tensor(torch.ones(8, 1, 16, 16, requires_grad=True), mesh).to_local()
    text = "FlexAttention does not support backward on CPU."
    with pytest.raises(NotImplementedError, match=text):
        torchs(q, q, q)
    assert text in DOC


def test_the_device_type(installed: None) -> None:
    """Without the first changed line torchtitan makes its mesh for the device that torch finds."""
    utils: Any = importlib.import_module("torchtitan.tools.utils")
    assert utils.device_type != "xla"
    assert 'parallel_dims.device_type = "xla"' in DOC
