"""Families of Transformers' models by XDTrainer, beside plain Transformers: five steps each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import xla_dtensor as xd
from tests.xla_dtensor.integrations.families import (
    FAMILIES,
    family_collator,
    family_model,
    family_rows,
)
from tests.xla_dtensor.integrations.tiny import arguments, difference, losses

pytestmark = [
    pytest.mark.usefixtures("runtime"),
    pytest.mark.only_on("jax"),
    pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed in v6:FutureWarning"),
]
STEPS = 5
# At 1e-8 Adam makes steps of whole size of gradients that are zero but for rounding, such as those
# of a key's bias.
OPTIONS: dict[str, Any] = {"max_steps": STEPS, "adam_epsilon": 1e-5}


def share(model: Any) -> float:
    """The largest part of the parameters' bytes that one device holds."""
    bytes_of: dict[int, int] = {}
    for parameter in model.parameters():
        for shard in parameter.jax().addressable_shards:
            device = shard.device.id
            bytes_of[device] = bytes_of.get(device, 0) + shard.data.nbytes
    assert len(bytes_of) == 8
    return max(bytes_of.values()) / sum(p.numel() * p.element_size() for p in model.parameters())


@pytest.mark.parametrize(
    "name",
    [
        name if name == "llava" else pytest.param(name, marks=pytest.mark.thorough)
        for name in FAMILIES
    ],
)
def test_five_steps_are_plain_transformers(tmp_path: Path, name: str) -> None:
    import transformers

    from xla_dtensor.integrations.transformers import XDTrainer

    family = FAMILIES[name]
    model = family_model(family)
    shape, axes = ((4, 2), ("fsdp", "tp")) if model._tp_plan else ((8,), ("fsdp",))
    mesh = xd.init_device_mesh("xla", shape, mesh_dim_names=axes)
    data: Any = {"train_dataset": family_rows(family), "data_collator": family_collator(family)}
    plain: Any = transformers.Trainer(
        family_model(family), arguments(tmp_path, 8, **OPTIONS), **data
    )
    plain.train()
    # Of its values the plain run has changed more than a hundred times what may differ.
    assert difference(model, plain.model) > 1e-3
    ours = XDTrainer(model, arguments(tmp_path, 8 // shape[0], **OPTIONS), mesh=mesh, **data)
    ours.train()
    assert len(losses(ours)) == 2 * STEPS
    # Losses and norms of gradients; of larger ones than 1 that part.
    assert losses(ours) == pytest.approx(losses(plain), rel=1e-5, abs=1e-5)
    assert difference(ours.model, plain.model) < 1e-5
    assert ours.programs[1].stats()["traces"] == 1
    assert share(ours.model) < 0.25
