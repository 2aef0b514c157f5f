"""Modules and runs of Lightning for its tests, which import this file when they run."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

CLASSES = 8


class Net(pl.LightningModule):
    """Logs its loss and a metric of torchmetrics; a cosine schedule per step."""

    def __init__(self, dropout: float = 0.0, width: int = 32, with_metric: bool = False) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Linear(16, width), nn.ReLU(), nn.Dropout(dropout), nn.Linear(width, CLASSES)
        )
        self.accuracy = MulticlassAccuracy(num_classes=CLASSES) if with_metric else None

    def training_step(self, batch: Any, batch_idx: Any) -> Any:
        x, y = batch
        output = self.net(x)
        loss = cross_entropy(output, y)
        self.log("loss", loss, on_step=True, on_epoch=True)
        if self.accuracy is not None:
            self.accuracy(output, y)
            self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: Any) -> Any:
        x, y = batch
        output = self.net(x)
        self.log_dict({"val_loss": cross_entropy(output, y), "val_max": output.max()})

    def test_step(self, batch: Any, batch_idx: Any) -> Any:
        return self.validation_step(batch, batch_idx)

    def predict_step(self, batch: Any, batch_idx: Any) -> Any:
        return {"logits": self.net(batch[0])}

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }


class Manual(Net):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: Any) -> Any:
        x, y = batch
        optimizer: Any = self.optimizers()
        loss = cross_entropy(self.net(x), y)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        self.log("loss", loss, on_step=True, on_epoch=True)
        return {"loss": loss.detach()}


class Hooks(Net):
    """Hooks between the step and the update, which log, and an update of its own."""

    def on_after_backward(self) -> None:
        first: Any = self.net[0]
        self.log("largest", first.weight.grad.abs().max())

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        gradients = [p.grad for p in self.parameters() if p.grad is not None]
        self.log("norm", torch.nn.utils.get_total_norm(gradients))

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **options: Any) -> None:
        self.clip_gradients(optimizer, *args, **options)

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None
    ) -> None:
        optimizer.param_groups[0]["lr"] = 1e-3 * (1 + batch_idx)
        optimizer.step(closure=optimizer_closure)


class Numbered(Net):
    """Does something else on every second batch, and hands on its number."""

    def training_step(self, batch: Any, batch_idx: Any) -> Any:
        loss = super().training_step(batch, batch_idx)
        if batch_idx % 2 == 0:
            self.log("even", loss * 2)
        return {"loss": loss, "number": batch_idx + 0}


class Counting(Net):
    """Reads a counter of Lightning in its step."""

    def training_step(self, batch: Any, batch_idx: Any) -> Any:
        self.log("step", float(self.global_step))
        return super().training_step(batch, batch_idx)


class Reading(Net):
    def validation_step(self, batch: Any, batch_idx: Any) -> Any:
        self.log("val_loss", float(cross_entropy(self.net(batch[0]), batch[1])))


class Iterating(Net):
    def training_step(self, dataloader_iter: Any) -> Any:
        batch, _, _ = next(dataloader_iter)
        return super().training_step(batch, 0)


class SearchingLines(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


class Seen(pl.Callback):
    """Reads after each batch what the trainer has."""

    def __init__(self) -> None:
        self.seen: list[dict[str, float]] = []

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        metrics = {key: float(value) for key, value in trainer.callback_metrics.items()}
        self.seen.append({"output": float(outputs["loss"]), **metrics})


def rows(
    count: int, seed: int = 0, batch_size: int = 16, is_shuffled: bool = False
) -> DataLoader[Any]:
    """A loader whose last batch may have fewer rows than the others.

    Shuffled, it has the rows as Lightning takes them where there are several processes.
    """
    g = torch.Generator().manual_seed(seed)
    x, y = torch.randn(count, 16, generator=g), torch.randint(0, CLASSES, (count,), generator=g)
    data = TensorDataset(x, y)
    sampler = DistributedSampler(data, 1, 0) if is_shuffled else None
    return DataLoader(data, batch_size, sampler=sampler)


class Run:
    """A fit: its trainer, its module and what a callback saw. Without a strategy, plain Lightning.

    Attributes:
        traces: Of each program, the step that it is of, its calls and its traces.
    """

    def __init__(
        self,
        strategy: Any,
        module: pl.LightningModule,
        *,
        epochs: Any = 2,
        count: int = 44,
        batch_size: int = 16,
        is_shuffled: bool = False,
        callbacks: Any = (),
        checkpoint: Any = None,
        **options: Any,
    ) -> None:
        seen = Seen()
        where = {"strategy": strategy} if strategy is not None else {"accelerator": "cpu"}
        options = {"gradient_clip_val": 0.5, "logger": False, **options}
        options = {"enable_checkpointing": False, "enable_progress_bar": False, **options}
        self.trainer = pl.Trainer(
            max_epochs=epochs,
            enable_model_summary=False,
            num_sanity_val_steps=0,
            callbacks=[seen, *callbacks],
            **where,
            **options,
        )
        loaders = rows(count, 0, batch_size, is_shuffled), rows(24, 1, batch_size)
        self.trainer.fit(module, *loaders, ckpt_path=checkpoint)
        self.module, self.seen = module, seen.seen
        self.strategy: Any = strategy

    @property
    def traces(self) -> list[tuple[str, int, int]]:
        found = [
            (key[0], program.stats()["calls"], program.stats()["traces"])
            for key, program in self.strategy.steps.programs.items()
        ]
        return sorted(found)


def values(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().cpu() for name, tensor in module.state_dict().items()}


def made(kind: Any, *args: Any, **options: Any) -> Any:
    """A module, the same one each time."""
    torch.manual_seed(0)
    return kind(*args, **options)
