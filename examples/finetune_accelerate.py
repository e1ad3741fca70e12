r"""Fine-tune a causal language model in a loop of one's own, with Hugging Face Accelerate.

As it stands it trains SmolLM2-135M on the King James Bible, on two CPU processes, in a few minutes
and without a network::

    accelerate launch --config_file examples/finetune_accelerate.yaml \
        examples/finetune_accelerate.py

``accelerate-sshsdp config`` has asked for what is in the YAML file. The program does what
``finetune_lightning.py`` does: measures the perplexity of held-out text, trains, saves a
checkpoint, loads that into a new model and trains on, measures again, exports with
``save_pretrained``, and checks that plain transformers loads the export. The last line of output is
a JSON object.

The loop is that of any program for Accelerate. With ``--plain`` it runs with Accelerate's own
``Accelerator`` and DDP, to compare; start that with ``torchrun --nproc-per-node 2``.
"""

from __future__ import annotations

import json
import logging
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import accelerate
import torch
import typer
from language_model import check_export, make_adamw, make_schedule
from pretrained import PACKAGED, model_directory
from text import load_text, split_into_sequences
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

import accelerate_sshsdp


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the command line says; see `main`."""

    model: str
    text: str
    output: Path
    plain: bool
    steps: int
    batch_size: int
    accumulate: int
    sequence_length: int
    held_out: int
    learning_rate: float
    warmup_steps: int
    clip: float
    seed: int


@dataclass
class Progress:
    """How far a run is; part of its checkpoints."""

    step: int = 0

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """From a checkpoint."""
        self.step = state["step"]


class Run:
    """A model, its optimizer and its learning rate, prepared, and how far they are."""

    def __init__(
        self,
        accelerator: accelerate.Accelerator,
        directory: str,
        options: Options,
        progress: Progress,
    ) -> None:
        """Load pretrained weights and shard them. Collective."""
        self.accelerator = accelerator
        self.options = options
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).train()
        optimizer = make_adamw(model.parameters(), options.learning_rate, fused=True)
        # Accelerate steps a schedule once for each process.
        total = 2 * options.steps * accelerator.num_processes
        schedule = make_schedule(optimizer, options.warmup_steps * accelerator.num_processes, total)
        self.model, self.optimizer, self.schedule = accelerator.prepare(model, optimizer, schedule)
        self.progress = progress

    def loss(self, batch: Tensor) -> Tensor:
        """Next-token loss."""
        loss: Tensor = self.model(input_ids=batch, labels=batch, use_cache=False).loss
        return loss

    def train(self, batches: Any, until: int) -> list[float]:
        """Train until so many steps are done; returns the loss of each. Collective."""
        accelerator, losses = self.accelerator, []
        # A resumed run takes the text up where the checkpoint left it.
        start = self.progress.step * self.options.accumulate
        for batch in accelerator.skip_first_batches(batches, start):
            with accelerator.accumulate(self.model):
                loss = self.loss(batch)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(self.model.parameters(), self.options.clip)
                self.optimizer.step()
                self.schedule.step()
                self.optimizer.zero_grad()
            if accelerator.sync_gradients:
                self.progress.step += 1
                losses.append(float(accelerator.reduce(loss.detach(), "mean")))
                accelerator.print(f"step {self.progress.step}  loss {losses[-1]:.4g}", flush=True)
            if self.progress.step == until:
                break
        return losses

    @torch.no_grad()
    def perplexity(self, batches: Any) -> float:
        """Of held-out text. Collective."""
        self.model.eval()
        losses = torch.stack([self.loss(batch) for batch in batches])
        self.model.train()
        # All sequences are equally long, so the mean over batches is exact.
        return math.exp(float(self.accelerator.reduce(losses.mean(), "mean")))


def finetune(accelerator: accelerate.Accelerator, options: Options) -> dict[str, Any] | None:
    """Run it all.

    Returns:
        What is printed at the end; None on every rank but the first.
    """
    world_size = accelerator.num_processes
    directory = model_directory(options.model)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    train, held_out = split_into_sequences(
        load_text(options.text),
        tokenizer,
        length=options.sequence_length,
        num_train=2 * options.steps * options.batch_size * options.accumulate * world_size,
        num_held_out=options.held_out // world_size * world_size,
    )
    batches, held_out_batches = accelerator.prepare(
        DataLoader(train, options.batch_size), DataLoader(held_out, options.batch_size)
    )
    half, checkpoint = options.steps, options.output / "checkpoint"

    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    run = Run(accelerator, directory, options, progress)
    before = run.perplexity(held_out_batches)
    losses = run.train(batches, half)
    accelerator.save_state(str(checkpoint))
    accelerator.free_memory()
    del run

    progress.step = 0
    run = Run(accelerator, directory, options, progress)
    accelerator.load_state(str(checkpoint))
    resumed_at = progress.step
    losses += run.train(batches, 2 * half)
    after = run.perplexity(held_out_batches)

    batch = next(iter(held_out_batches))
    with torch.no_grad():
        logits = run.model(input_ids=batch, use_cache=False).logits
    export = options.output / "export"
    accelerator.unwrap_model(run.model).save_pretrained(
        export,
        is_main_process=accelerator.is_main_process,
        state_dict=accelerator.get_state_dict(run.model),
    )
    if not accelerator.is_main_process:
        return None
    tokenizer.save_pretrained(export)
    is_exact = accelerator.mixed_precision == "no"
    reloads, written = check_export(export, batch, logits, 1e-4 if is_exact else 3e-2)
    print(f"the exported model writes: {written!r}")
    return {
        "plain": options.plain,
        "world_size": world_size,
        "precision": accelerator.mixed_precision,
        "steps": progress.step,
        "resumed_at_step": resumed_at,
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "metric": "held-out perplexity",
        "metric_before": before,
        "metric_after": after,
        "checkpoint": str(checkpoint),
        "export": str(export),
        "export_reloads": reloads,
    }


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    model: Annotated[str, typer.Option(help="Name or directory for from_pretrained.")] = PACKAGED,
    text: Annotated[str, typer.Option(help="bible, python, or a text file.")] = "bible",
    output: Annotated[Path, typer.Option(help="For the checkpoint and the export.")] = Path(
        "outputs/finetune_accelerate"
    ),
    plain: Annotated[bool, typer.Option("--plain", help="Accelerate's own DDP, on CPU.")] = False,
    steps: Annotated[int, typer.Option(help="Optimizer steps before the checkpoint.")] = 12,
    batch_size: Annotated[int, typer.Option(help="Sequences on each rank.")] = 2,
    accumulate: Annotated[int, typer.Option(help="Micro-batches in an optimizer step.")] = 1,
    sequence_length: Annotated[int, typer.Option(help="In tokens.")] = 256,
    held_out: Annotated[int, typer.Option(help="Held-out sequences.")] = 16,
    learning_rate: Annotated[float, typer.Option(help="After the warm-up.")] = 1e-4,
    warmup_steps: Annotated[int, typer.Option(help="Optimizer steps.")] = 3,
    clip: Annotated[float, typer.Option(help="Largest gradient norm.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Of everything random.")] = 0,
) -> None:
    """Fine-tune a causal language model, resume from a checkpoint, evaluate and export."""
    options = Options(**locals())
    transformers_logging.disable_progress_bar()
    # These have words for every CUDA library that a machine without CUDA cannot load.
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)
    accelerator = (
        accelerate.Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
        if plain
        else accelerate_sshsdp.Accelerator(gradient_accumulation_steps=accumulate)
    )
    accelerate.utils.set_seed(seed)
    result = finetune(accelerator, options)
    # The other ranks have nothing more to say when the last line is printed.
    accelerator.wait_for_everyone()
    accelerator.end_training()
    if result is not None:
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    app()
