"""Small LightningModules and data for the tests."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

VOCABULARY, WIDTH, LENGTH = 29, 16, 6


class Block(nn.Module):
    """A residual block with normalisation."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class LanguageModel(nn.Module):
    """Embedding, blocks and a tied head."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(depth))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class LanguageModule(pl.LightningModule):
    """Trains a `LanguageModel`; options cover the ways in which people write modules."""

    def __init__(
        self,
        optimizer: str = "adamw",
        lr: float = 1e-2,
        scheduler: bool = False,
        in_configure_model: bool = False,
        seed: int = 1,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.losses: list[float] = []
        self.model: LanguageModel | None = None
        if not in_configure_model:
            self._build()

    def _build(self) -> None:
        torch.manual_seed(self.hparams.seed)
        self.model = LanguageModel()

    def configure_model(self) -> None:
        if self.model is None:
            self._build()

    def loss(self, batch: Any) -> torch.Tensor:
        tokens = batch[0]
        logits = self.model(tokens[:, :-1])
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        self.losses.append(loss.item())
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.model(batch[0]).argmax(-1)

    def configure_optimizers(self) -> Any:
        optimizer = self.make_optimizer()
        if not self.hparams.scheduler:
            return optimizer
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }

    def make_optimizer(self) -> torch.optim.Optimizer:
        lr = self.hparams.lr
        if self.hparams.optimizer == "adamw":
            decayed = [p for p in self.parameters() if p.ndim > 1]
            others = [p for p in self.parameters() if p.ndim <= 1]
            groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others}]
            return torch.optim.AdamW(groups, lr=lr, weight_decay=0.0)
        if self.hparams.optimizer == "momentum":
            return torch.optim.SGD(self.parameters(), lr=lr, momentum=0.9)
        return torch.optim.SGD(self.parameters(), lr=lr)


def token_loader(num_batches: int = 8, batch_size: int = 2, seed: int = 7) -> DataLoader:
    """``num_batches`` batches of random tokens, to be dealt out to the ranks."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCABULARY, (num_batches * batch_size, LENGTH), generator=generator)
    return DataLoader(TensorDataset(tokens), batch_size=batch_size)


def make_trainer(strategy: Any = "sshsdp", **options: Any) -> pl.Trainer:
    """A quiet Trainer on two CPU processes (or as many as ``devices`` says)."""
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 2,
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return pl.Trainer(strategy=strategy, **{**defaults, **options})
