r"""Fine-tune a causal language model in a loop of one's own, with Fabric and ``strategy="sshsdp"``.

As it stands it trains SmolLM2-135M on the King James Bible, on two CPU processes, in a few minutes
and without a network::

    python examples/finetune_fabric.py

It does what ``finetune_lightning.py`` does: measures the perplexity of held-out text, trains, saves
a checkpoint, loads that into a new model and trains on, measures again, exports with
``save_pretrained``, and checks that plain transformers loads the export. The last line of output is
a JSON object.
"""

from __future__ import annotations

import gc
import json
import logging
import math
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import torch.distributed as dist
import typer
from language_model import check_export, make_adamw, make_schedule, write_export
from lightning.fabric import Fabric, seed_everything
from pretrained import PACKAGED, model_directory
from text import load_text, split_into_sequences
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from lightning_sshsdp import engine_of


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the command line says; see `main`."""

    model: str
    text: str
    output: Path
    strategy: str
    accelerator: str
    devices: int
    precision: Literal["32-true", "bf16-mixed", "bf16-true"]
    steps: int
    batch_size: int
    accumulate: int
    sequence_length: int
    held_out: int
    learning_rate: float
    warmup_steps: int
    clip: float
    seed: int


class Run:
    """A model, its optimizer and its learning rate, set up by Fabric, and how far they are."""

    def __init__(self, fabric: Fabric, directory: str, options: Options) -> None:
        """Load pretrained weights and shard them. Collective."""
        self.fabric = fabric
        self.options = options
        dtype = torch.bfloat16 if options.precision == "bf16-true" else torch.float32
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).train()
        optimizer = make_adamw(model.parameters(), options.learning_rate, fused=True)
        self.schedule = make_schedule(optimizer, options.warmup_steps, 2 * options.steps)
        self.model, self.optimizer = fabric.setup(model, optimizer)
        self.step = 0

    def loss(self, batch: Tensor) -> Tensor:
        """Next-token loss."""
        loss: Tensor = self.model(input_ids=batch, labels=batch, use_cache=False).loss
        return loss

    def train(self, batches: DataLoader[Tensor], until: int) -> list[float]:
        """Train until so many steps are done; returns the loss of each. Collective."""
        losses = []
        # A resumed run takes the text up where the checkpoint left it.
        remaining = islice(batches, self.step * self.options.accumulate, None)
        while self.step < until:
            for index in range(self.options.accumulate):
                # Gradients are reduced over ranks once for each step.
                is_last = index + 1 == self.options.accumulate
                with self.fabric.no_backward_sync(self.model, enabled=not is_last):
                    loss = self.loss(next(remaining))
                    self.fabric.backward(loss / self.options.accumulate)
            self.fabric.clip_gradients(self.model, self.optimizer, max_norm=self.options.clip)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.schedule.step()
            self.step += 1
            losses.append(float(self.fabric.all_reduce(loss.detach(), reduce_op="mean")))
            self.fabric.print(f"step {self.step}  loss {losses[-1]:.4g}", flush=True)
        return losses

    @torch.no_grad()
    def perplexity(self, batches: DataLoader[Tensor]) -> float:
        """Of held-out text. Collective."""
        self.model.eval()
        losses = torch.stack([self.loss(batch) for batch in batches])
        self.model.train()
        # All sequences are equally long, so the mean over batches is exact.
        return math.exp(float(self.fabric.all_reduce(losses.mean(), reduce_op="mean")))

    @property
    def state(self) -> dict[str, Any]:
        """What a checkpoint holds."""
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "schedule": self.schedule,
            "step": self.step,
        }

    def resume(self, path: Path) -> None:
        """Go on where a checkpoint ended. Collective."""
        state = self.state
        self.fabric.load(path, state)
        self.step = state["step"]

    def weights(self) -> dict[str, Tensor]:
        """The whole state dict, on rank 0. Collective."""
        engine = engine_of(self.model.module)
        return self.model.state_dict() if engine is None else engine.full_state_dict()


def finetune(fabric: Fabric, options: Options) -> dict[str, Any] | None:
    """Run it all.

    Returns:
        What is printed at the end; None on every rank but the first.
    """
    directory = model_directory(options.model)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    train, held_out = split_into_sequences(
        load_text(options.text),
        tokenizer,
        length=options.sequence_length,
        num_train=2 * options.steps * options.batch_size * options.accumulate * fabric.world_size,
        num_held_out=options.held_out // fabric.world_size * fabric.world_size,
    )
    batches, held_out_batches = fabric.setup_dataloaders(
        DataLoader(train, options.batch_size), DataLoader(held_out, options.batch_size)
    )
    half, checkpoint = options.steps, options.output / "checkpoint"

    run = Run(fabric, directory, options)
    before = run.perplexity(held_out_batches)
    losses = run.train(batches, half)
    fabric.save(checkpoint, run.state)
    del run

    run = Run(fabric, directory, options)
    run.resume(checkpoint)
    resumed_at = run.step
    losses += run.train(batches, 2 * half)
    after = run.perplexity(held_out_batches)

    batch = next(iter(held_out_batches))
    with torch.no_grad():
        logits = run.model(input_ids=batch, use_cache=False).logits
    weights, export = run.weights(), options.output / "export"
    if not fabric.is_global_zero:
        return None
    write_export(run.model.module, weights, tokenizer, export)
    reloads, written = check_export(export, batch, logits)
    print(f"the exported model writes: {written!r}")
    return {
        "strategy": options.strategy,
        "world_size": fabric.world_size,
        "precision": options.precision,
        "steps": run.step,
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
        "outputs/finetune_fabric"
    ),
    strategy: Annotated[str, typer.Option(help="For Fabric; ddp to compare.")] = "sshsdp",
    accelerator: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    devices: Annotated[int, typer.Option(help="Processes.")] = 2,
    precision: Annotated[
        Literal["32-true", "bf16-mixed", "bf16-true"], typer.Option(help="For Fabric.")
    ] = "32-true",
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
    fabric = Fabric(
        strategy=strategy, accelerator=accelerator, devices=devices, precision=precision
    )
    fabric.launch()
    seed_everything(seed, verbose=False)
    result = finetune(fabric, options)
    # The other ranks have nothing more to say when the last line is printed.
    fabric.barrier()
    if dist.is_initialized():
        # Whatever still refers to a gloo group keeps its threads running, and a thread that lets go
        # of its last tensor while Python shuts down aborts the process (torch 2.13).
        gc.collect()
        dist.destroy_process_group()
    if result is not None:
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    app()
