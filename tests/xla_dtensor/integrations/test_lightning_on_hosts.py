"""Lightning's Trainer and Fabric in a job of two processes of four devices, beside the plain ones.

What Lightning's own code warns of is named here.
"""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.hosts import Hosts

TASKS = "tests.xla_dtensor.host_tasks_lightning"

pytestmark = [
    pytest.mark.filterwarnings("ignore:`isinstance\\(treespec, LeafSpec\\)` is deprecated"),
    pytest.mark.filterwarnings("ignore:The '\\w+' does not have many workers"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
]


def test_a_fit(hosts: Callable[..., Hosts], tmp_path: Path) -> None:
    """Two epochs and a checkpoint, and one more on another mesh; the last batches are of 12 rows.

    Each process's loader has all rows. One of the processes writes the log, and removes the
    checkpoint before the last one.
    """
    from tests.xla_dtensor.integrations import lightning_modules as m

    module = m.made(m.Net, 0.0, 32, True)
    plain = m.Run(None, module, epochs=3, is_shuffled=True, limit_val_batches=1)
    seen = []
    for shape, epochs in (((8,), 2), ((4, 2), 3)):
        answers = hosts(2, 4).run(
            f"{TASKS}:fit_by_lightning", folder=str(tmp_path), shape=shape, epochs=epochs
        )
        for rank, answer in enumerate(answers):
            assert answer["rank"] == rank
            assert answer["writes"] == (rank == 0, rank == 0)
            assert answer["layout"] == "[fsdp, -]"
            assert answer["traces"] == [
                ("predict_step", 1, 1),
                ("training_step", 6 if epochs == 2 else 3, 2),
                ("validation_step", 2 if epochs == 2 else 1, 1),
            ]
        assert answers[0]["seen"] == answers[1]["seen"]
        seen += answers[0]["seen"]
    for ours, theirs in zip(seen, plain.seen, strict=True):
        # After a checkpoint is loaded, Lightning has no metrics of the epoch before.
        assert ours == pytest.approx({name: theirs[name] for name in ours}, abs=1e-5)
    assert len(seen[5]) == len(plain.seen[5]) > 5
    predictions = plain.trainer.predict(plain.module, m.rows(25, 2, 32))
    for answer in answers:
        torch.testing.assert_close(answer["predictions"], predictions, atol=1e-5, rtol=0)
        torch.testing.assert_close(answer["values"], m.values(plain.module), atol=1e-5, rtol=0)
    assert sorted(path.name for path in tmp_path.glob("*.ckpt")) == [
        "epoch=2-step=9.ckpt",
        "last.ckpt",
    ]
    with open(tmp_path / "log" / "metrics.csv", encoding="utf-8") as file:
        steps = [row["step"] for row in csv.DictReader(file) if row["loss_step"]]
    assert steps == ["6", "7", "8"]


def test_a_loop_of_fabric(hosts: Callable[..., Hosts], tmp_path: Path) -> None:
    """An epoch and a checkpoint, and another epoch of a fresh model that has loaded it."""
    from lightning.fabric import Fabric

    from tests.xla_dtensor.integrations.test_lightning import Loop, modules

    plain = Loop(Fabric(accelerator="cpu"), False, epochs=2)
    task = f"{TASKS}:train_by_fabric"
    first = hosts(2, 4).run(task, folder=str(tmp_path), load=False)
    later = hosts(2, 4).run(task, folder=str(tmp_path), load=True)
    for rank, (one, other) in enumerate(zip(first, later, strict=True)):
        torch.testing.assert_close(one["seen"] + other["seen"], plain.seen, atol=1e-5, rtol=0)
        wanted = modules().values(plain.model)
        torch.testing.assert_close(other["values"], wanted, atol=1e-5, rtol=0)
        assert (one["epoch"], other["epoch"]) == (0, 1)
        assert one["rank"] == rank
        assert one["over processes"] == [[10.0, 11.0], 10.5, 1]
