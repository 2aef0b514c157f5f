"""The lower bound of activations, and the batch that it is for, against sums by hand."""

from __future__ import annotations

import pytest

from mesh_utils import JobConfig
from mesh_utils.errors import JobError
from xla_dtensor.core.rules import read_rules
from xla_dtensor.plan.estimate import Batch, axes_of_tokens, batch_of, decoder_activations
from xla_dtensor.plan.model_sizes import ModelSizes


def parts_of(name: str, per_group: int = 1, dtype: str = "bfloat16") -> dict[str, tuple[int, int]]:
    job = JobConfig.load(name)
    sizes = ModelSizes.load(str(job.model))
    bound = decoder_activations(
        sizes, batch_of(job, per_group=per_group), read_rules(job.sharding or {}), dtype
    )
    assert bound.device_bytes == sum(part.device_bytes for part in bound.parts)
    assert all(part.why for part in bound.parts)
    return {part.name: (part.count, part.each_bytes) for part in bound.parts}


def test_fsdp() -> None:
    found = parts_of("llama3_8b_v5e", per_group=2)
    assert found["inputs of layers"] == (32, 2 * 8192 * 4096 * 2)
    assert found["the last layer's output"] == (1, 2 * 8192 * 4096 * 2)
    assert found["inner values of a feed-forward part"] == (2, 2 * 8192 * 14336 * 2)


def test_tensor_parallelism_cuts_the_inner_values_only() -> None:
    found = parts_of("llama3_70b_v5p", dtype="float32")
    assert found["inputs of layers"] == (80, 8192 * 8192 * 4)
    assert found["inner values of a feed-forward part"] == (2, 8192 * 28672 // 4 * 4)


def test_a_cut_sequence() -> None:
    found = parts_of("llama3_70b_v6e_long")
    assert found["inputs of layers"] == (80, 8192 // 8 * 8192 * 2)
    assert found["inner values of a feed-forward part"] == (2, 8192 // 8 * 28672 * 2)


def test_experts() -> None:
    """Two experts per token; tokens and experts are cut over the same 128 devices."""
    found = parts_of("mixtral_8x7b_v5p")
    assert found["inner values of a feed-forward part"] == (2, 2 * 8192 * 14336 * 2)


def test_batch() -> None:
    job = JobConfig.load("llama3_70b_v5p_2slices")
    batch = batch_of(job, sequence=4096, per_group=3)
    assert batch == Batch(768, 4096, ("dp", "fsdp"), (), {"dp": 2, "fsdp": 128, "tp": 4})
    assert (batch.groups, batch.tokens, batch.device_tokens) == (256, 768 * 4096, 3 * 4096)
    assert batch.placement == (("dp", "fsdp"), None)
    assert batch_of(job, sequences=512).device_tokens == 2 * 8192


@pytest.mark.parametrize("options", [{"sequences": 100}, {"per_group": 0}, {"sequence": 0}])
def test_batches_that_cannot_be(options: dict[str, int]) -> None:
    with pytest.raises(JobError, match=r"was given sequences=\d+ of length=\d+\. .* Pass positive"):
        batch_of(JobConfig.load("llama3_8b_v5e"), **options)


def test_axes_of_tokens() -> None:
    sizes = {"dp": 2, "fsdp": 4, "tp": 4}
    assert axes_of_tokens(None, sizes) == (("dp", "fsdp"), (), ())
    other = read_rules({"parameters": {"**": None}, "tp_axis": "dp"})
    assert axes_of_tokens(other, sizes) == (("fsdp", "tp"), (), ())
    given = read_rules(
        {
            "activations": {
                "model.norm": ["dp", None],
                "model.layers.*": ["dp", ["tp", "fsdp"], None],
            }
        }
    )
    assert axes_of_tokens(given, sizes) == (("dp",), ("tp", "fsdp"), ())
