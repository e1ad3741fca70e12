"""What the examples show while they train: a progress bar on a terminal, lines in a file."""

from __future__ import annotations

import sys
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import RichProgressBar
from lightning.pytorch.callbacks.progress.rich_progress import RichProgressBarTheme


class LossHistory(Callback):
    """Keeps what the module logged as ``loss`` with each optimizer step.

    Attributes:
        losses: Of the last micro-batch of each step.
    """

    def __init__(self) -> None:
        """Start with nothing."""
        self.losses: list[float] = []

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Note the loss if this batch ended a step."""
        if _ended_step(trainer, batch_idx):
            self.losses.append(float(trainer.callback_metrics["loss"]))


class StepLines(Callback):
    """Prints what a progress bar would show, a line for each optimizer step."""

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Print if this batch ended a step."""
        if trainer.is_global_zero and _ended_step(trainer, batch_idx):
            metrics = trainer.progress_bar_metrics
            shown = "  ".join(f"{name} {float(value):.4g}" for name, value in metrics.items())
            print(f"step {trainer.global_step}  {shown}", flush=True)


def progress() -> Callback:
    """A progress bar on a terminal, else lines."""
    if not is_on_terminal():
        return StepLines()
    return RichProgressBar(theme=RichProgressBarTheme(metrics_format=".4g"))


def is_on_terminal() -> bool:
    """Whether a progress bar has a terminal to be drawn on."""
    return sys.stdout.isatty()


def _ended_step(trainer: Trainer, batch_idx: int) -> bool:
    every = trainer.accumulate_grad_batches
    return (batch_idx + 1) % every == 0 or batch_idx + 1 == trainer.num_training_batches
