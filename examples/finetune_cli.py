r"""Fine-tune a causal language model from a YAML file, with LightningCLI.

``finetune_cli.yaml`` says what to train, on what and how, the strategy's options included. As it
stands it trains SmolLM2-135M on the King James Bible, on two CPU processes::

    python examples/finetune_cli.py fit --config examples/finetune_cli.yaml
    python examples/finetune_cli.py validate --config examples/finetune_cli.yaml \
        --ckpt_path outputs/finetune_cli/checkpoints/last.ckpt

Whatever is in the file can be given on the command line as well, for example
``--trainer.devices 8 --trainer.accelerator cuda --trainer.precision bf16-mixed
--trainer.strategy.shard_size 4``.
"""

from __future__ import annotations

import logging
import warnings
from typing import TYPE_CHECKING, Any

from language_model import make_adamw, make_schedule
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.cli import LightningCLI
from pretrained import PACKAGED, model_directory
from text import load_text, split_into_sequences
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer

if TYPE_CHECKING:
    from torch import Tensor


class LanguageModel(LightningModule):
    """A Hugging Face causal language model. Batches are ``[batch, length]`` token ids."""

    def __init__(
        self,
        model: str = PACKAGED,
        learning_rate: float = 1e-4,
        warmup_steps: int = 3,
        gradient_checkpointing: bool = False,
    ) -> None:
        """Load nothing yet.

        Args:
            model: Name or directory for ``from_pretrained``.
            learning_rate: After the warm-up.
            warmup_steps: Optimizer steps.
            gradient_checkpointing: Recompute activations in the backward pass.
        """
        super().__init__()
        self.save_hyperparameters()
        self.model: Any = None

    def configure_model(self) -> None:
        """Load the pretrained weights, once."""
        if self.model is not None:
            return
        directory = model_directory(self.hparams.model)
        self.model = AutoModelForCausalLM.from_pretrained(directory).train()
        if self.hparams.gradient_checkpointing:
            self.model.gradient_checkpointing_enable()

    def _loss(self, batch: Tensor) -> Tensor:
        loss: Tensor = self.model(input_ids=batch, labels=batch, use_cache=False).loss
        return loss

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Next-token loss."""
        loss = self._loss(batch)
        self.log("loss", loss.detach(), prog_bar=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        """Held-out loss. All sequences are equally long, so the mean over batches is exact."""
        loss = self._loss(batch)
        self.log("held_out_loss", loss, prog_bar=True, sync_dist=True, batch_size=len(batch))

    def configure_optimizers(self) -> dict[str, Any]:
        """AdamW; warm-up, then a cosine down to a tenth."""
        # Lightning does not clip for a fused optimizer under autocast.
        fused = not str(self.trainer.precision).endswith("-mixed")
        optimizer = make_adamw(self.parameters(), self.hparams.learning_rate, fused)
        total = int(self.trainer.estimated_stepping_batches)
        schedule = make_schedule(optimizer, self.hparams.warmup_steps, total)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Text(LightningDataModule):
    """Training and held-out sequences of one text."""

    def __init__(
        self,
        model: str = PACKAGED,
        text: str = "bible",
        sequence_length: int = 256,
        batch_size: int = 2,
        train: int = 96,
        held_out: int = 16,
    ) -> None:
        """Read nothing yet.

        Args:
            model: Whose tokenizer cuts the text.
            text: ``bible``, ``python``, or a text file.
            sequence_length: In tokens.
            batch_size: Sequences on each rank.
            train: Sequences to train on, of the start of the text.
            held_out: Sequences to validate on, of the end of the text.
        """
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage: str) -> None:
        """Cut the text."""
        tokenizer = AutoTokenizer.from_pretrained(model_directory(self.hparams.model))
        self.train, self.held_out = split_into_sequences(
            load_text(self.hparams.text),
            tokenizer,
            length=self.hparams.sequence_length,
            num_train=self.hparams.train,
            num_held_out=self.hparams.held_out,
        )

    def train_dataloader(self) -> DataLoader[Tensor]:
        """Shuffled."""
        return DataLoader(self.train, self.hparams.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[Tensor]:
        """In order."""
        return DataLoader(self.held_out, self.hparams.batch_size)


class CLI(LightningCLI):
    """Takes one model name for the weights and for the tokenizer."""

    def add_arguments_to_parser(self, parser: Any) -> None:
        """Link the two."""
        parser.link_arguments("model.model", "data.model")


def main() -> None:
    """Do what the command line and the file say."""
    # Advice on loader processes, samplers and validation that does not fit this program.
    warnings.filterwarnings("ignore", module=r"lightning\.pytorch")
    # These have words for every CUDA library that a machine without CUDA cannot load.
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)
    CLI(LanguageModel, Text, save_config_kwargs={"overwrite": True})


if __name__ == "__main__":
    main()
