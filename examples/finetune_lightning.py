r"""Fine-tune a causal language model with Lightning and ``strategy="sshsdp"``.

As it stands it trains SmolLM2-135M on the King James Bible, on two CPU processes, in a few minutes
and without a network::

    python examples/finetune_lightning.py

With a hub and GPUs the same file trains whatever ``from_pretrained`` can load::

    python examples/finetune_lightning.py --model Qwen/Qwen2.5-7B --text notes.txt \
        --accelerator cuda --devices 8 --precision bf16-mixed --gradient-checkpointing \
        --sequence-length 4096 --steps 1000 --learning-rate 1e-5

It measures the perplexity of held-out text, trains for ``--epochs``, saves a checkpoint, loads that
into a new model and trains on for ``--resumed-epochs``, measures again, exports with
``save_pretrained``, and checks that plain transformers loads the export, computes the same logits
and generates from it. It says what it is doing all the while; the last line of output is a JSON
object.
"""

# The first line is to be seen before the imports, which take seconds.
# ruff: noqa: E402

from __future__ import annotations

import gc
import json
import logging
import math
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from stages import stage

stage("importing torch, Lightning and transformers")

import torch
import torch.distributed as dist
import typer
from language_model import check_export, make_adamw, make_schedule, write_export
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from pretrained import PACKAGED, model_directory
from progress import LossHistory, is_on_terminal, progress
from text import load_text, split_into_sequences
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from lightning_sshsdp import ThroughputMonitor


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the command line says; see `main`."""

    model: str
    text: str
    output: Path
    strategy: str
    accelerator: str
    devices: int
    num_nodes: int
    precision: Literal["32-true", "bf16-mixed", "bf16-true"]
    epochs: int
    resumed_epochs: int
    steps: int
    batch_size: int
    accumulate: int
    sequence_length: int
    held_out: int
    learning_rate: float
    warmup_steps: int
    clip: float
    gradient_checkpointing: bool
    seed: int

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.devices * self.num_nodes

    @property
    def total_steps(self) -> int:
        """Optimizer steps before and after the checkpoint."""
        return (self.epochs + self.resumed_epochs) * self.steps

    @property
    def load_dtype(self) -> torch.dtype:
        """What the update parameters are kept in."""
        return torch.bfloat16 if self.precision == "bf16-true" else torch.float32


class LanguageModel(LightningModule):
    """A Hugging Face causal language model. Batches are ``[batch, length]`` token ids."""

    def __init__(self, directory: str, options: Options) -> None:
        """Load nothing yet."""
        super().__init__()
        self.directory = directory
        self.options = options
        self.model: Any = None

    def configure_model(self) -> None:
        """Load the pretrained weights, once."""
        if self.model is not None:
            return
        stage(f"loading {self.directory}")
        self.model = AutoModelForCausalLM.from_pretrained(
            self.directory, dtype=self.options.load_dtype
        )
        self.model.train()
        if self.options.gradient_checkpointing:
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
        self.log("held_out_loss", self._loss(batch), sync_dist=True, batch_size=len(batch))

    def predict_step(self, batch: Tensor, batch_idx: int) -> tuple[Tensor, Tensor]:
        """The batch and its logits."""
        return batch, self.model(input_ids=batch, use_cache=False).logits

    def configure_optimizers(self) -> dict[str, Any]:
        """AdamW, no weight decay on norms and biases; warm-up, then a cosine down to a tenth."""
        # Lightning does not clip for a fused optimizer under autocast.
        fused = not self.options.precision.endswith("-mixed")
        optimizer = make_adamw(self.parameters(), self.options.learning_rate, fused)
        schedule = make_schedule(optimizer, self.options.warmup_steps, self.options.total_steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def make_trainer(options: Options, max_epochs: int, history: LossHistory) -> Trainer:
    """A Trainer that ends with a checkpoint after ``max_epochs``."""
    checkpoints = ModelCheckpoint(
        options.output / "checkpoints", filename="step-{step}", auto_insert_metric_name=False
    )
    return Trainer(
        strategy=options.strategy,
        accelerator=options.accelerator,
        devices=options.devices,
        num_nodes=options.num_nodes,
        precision=options.precision,
        max_epochs=max_epochs,
        limit_train_batches=options.steps * options.accumulate,
        limit_predict_batches=1,  # enough to check the export
        accumulate_grad_batches=options.accumulate,
        gradient_clip_val=options.clip,
        log_every_n_steps=1,
        logger=CSVLogger(options.output, name=None),
        callbacks=[checkpoints, history, ThroughputMonitor(prefix=""), progress()],
        enable_model_summary=False,
        enable_progress_bar=is_on_terminal(),
    )


def export(trainer: Trainer, module: LanguageModel, tokenizer: Any, directory: Path) -> None:
    """Write an ordinary model directory, in the dtype that the layers ran in. Collective."""
    engine = getattr(trainer.strategy, "engine", None)
    state = module.state_dict() if engine is None else engine.full_state_dict()
    if trainer.is_global_zero:
        weights = {name.removeprefix("model."): tensor for name, tensor in state.items()}
        write_export(module.model, weights, tokenizer, directory)


def perplexity(trainer: Trainer, module: LanguageModel, loader: DataLoader[Tensor]) -> float:
    """Of held-out text. Collective."""
    (metrics,) = trainer.validate(module, loader, verbose=False)
    return math.exp(metrics["held_out_loss"])


def finetune(options: Options) -> dict[str, Any] | None:
    """Run it all.

    Returns:
        What is printed at the end; None on every rank but the first.
    """
    directory = model_directory(options.model)
    stage(f"tokenizing {options.text}")
    tokenizer = AutoTokenizer.from_pretrained(directory)
    sequences_per_step = options.batch_size * options.accumulate * options.world_size
    train, held_out = split_into_sequences(
        load_text(options.text),
        tokenizer,
        length=options.sequence_length,
        num_train=options.total_steps * sequences_per_step,
        num_held_out=options.held_out // options.world_size * options.world_size,
    )
    train_loader = DataLoader(train, options.batch_size, shuffle=True)
    held_out_loader = DataLoader(held_out, options.batch_size)
    history = LossHistory()

    trainer = make_trainer(options, options.epochs, history)
    module = LanguageModel(directory, options)
    stage(f"starting the other processes ({options.world_size} in all)")
    before = perplexity(trainer, module, held_out_loader)
    stage(f"held-out perplexity {before:.2f}; training for {options.epochs * options.steps} steps")
    trainer.fit(module, train_loader)
    checkpoint = trainer.checkpoint_callback.best_model_path
    del module

    resumed_at = trainer.global_step
    stage(f"resuming from {checkpoint} in a new model, for the other steps")
    trainer = make_trainer(options, options.epochs + options.resumed_epochs, history)
    module = LanguageModel(directory, options)
    trainer.fit(module, train_loader, ckpt_path=checkpoint)
    shown = trainer.progress_bar_metrics
    speed = {name: shown[name] for name in ("tokens_per_second", "mfu")}

    stage("measuring held-out perplexity again")
    after = perplexity(trainer, module, held_out_loader)
    stage(f"held-out perplexity {after:.2f}; exporting to {options.output / 'export'}")
    export(trainer, module, tokenizer, options.output / "export")
    stage("checking the export with plain transformers")
    batch, logits = trainer.predict(module, held_out_loader)[0]
    if not trainer.is_global_zero:
        return None
    reloads, written = check_export(options.output / "export", batch, logits)
    print(f"the exported model writes: {written!r}")
    return {
        "strategy": options.strategy,
        "world_size": trainer.world_size,
        "precision": options.precision,
        "parameters": module.model.num_parameters(),
        "steps": trainer.global_step,
        "resumed_at_step": resumed_at,
        "first_loss": history.losses[0],
        "last_loss": history.losses[-1],
        "metric": "held-out perplexity",
        "metric_before": before,
        "metric_after": after,
        **speed,
        "checkpoint": str(checkpoint),
        "export": str(options.output / "export"),
        "export_reloads": reloads,
    }


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    model: Annotated[str, typer.Option(help="Name or directory for from_pretrained.")] = PACKAGED,
    text: Annotated[str, typer.Option(help="bible, python, or a text file.")] = "bible",
    output: Annotated[Path, typer.Option(help="For checkpoints, metrics and the export.")] = Path(
        "outputs/finetune_lightning"
    ),
    strategy: Annotated[str, typer.Option(help="For the Trainer; ddp to compare.")] = "sshsdp",
    accelerator: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    devices: Annotated[int, typer.Option(help="Processes on each machine.")] = 2,
    num_nodes: Annotated[int, typer.Option(help="Machines.")] = 1,
    precision: Annotated[
        Literal["32-true", "bf16-mixed", "bf16-true"], typer.Option(help="For the Trainer.")
    ] = "32-true",
    epochs: Annotated[int, typer.Option(help="Before the checkpoint.")] = 1,
    resumed_epochs: Annotated[int, typer.Option(help="After it.")] = 1,
    steps: Annotated[int, typer.Option(help="Optimizer steps in an epoch.")] = 8,
    batch_size: Annotated[int, typer.Option(help="Sequences on each rank.")] = 2,
    accumulate: Annotated[int, typer.Option(help="Micro-batches in an optimizer step.")] = 1,
    sequence_length: Annotated[int, typer.Option(help="In tokens.")] = 128,
    held_out: Annotated[int, typer.Option(help="Held-out sequences.")] = 16,
    learning_rate: Annotated[float, typer.Option(help="After the warm-up.")] = 1e-4,
    warmup_steps: Annotated[int, typer.Option(help="Optimizer steps.")] = 3,
    clip: Annotated[float, typer.Option(help="Largest gradient norm.")] = 1.0,
    gradient_checkpointing: Annotated[bool, typer.Option(help="Recompute activations.")] = False,
    seed: Annotated[int, typer.Option(help="Of the order of the text.")] = 0,
) -> None:
    """Fine-tune a causal language model, resume from a checkpoint, evaluate and export."""
    options = Options(**locals())
    transformers_logging.disable_progress_bar()
    # The latter two have words for every CUDA library that a machine without CUDA cannot load.
    for name in ("lightning.pytorch", "torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)
    # Advice on loader processes, samplers and validation that does not fit this program.
    warnings.filterwarnings("ignore", module=r"lightning\.pytorch")
    seed_everything(seed, verbose=False)
    result = finetune(options)
    if dist.is_initialized():
        # The other ranks have nothing more to say when the last line is printed.
        dist.barrier()
        # Whatever still refers to a gloo group keeps its threads running, and a thread that lets go
        # of its last tensor while Python shuts down aborts the process (torch 2.13).
        gc.collect()
        dist.destroy_process_group()
    if result is not None:
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    app()
