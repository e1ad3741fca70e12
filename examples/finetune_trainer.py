r"""Fine-tune a causal language model with transformers' Trainer.

As it stands it trains SmolLM2-135M on the King James Bible, on two CPU processes, in a few minutes
and without a network::

    accelerate launch --config_file examples/finetune_accelerate.yaml examples/finetune_trainer.py

Only the class differs from a program for the stock Trainer: ``SSHSDPTrainer``. It measures the
perplexity of held-out text, trains, measures again, exports, and checks that plain transformers
loads the export. Stopped and started again, it goes on from its last checkpoint. With
``--optimizer muon``, hidden matrices are trained by Muon. The last line of output is a JSON object.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
import transformers
import typer
from language_model import check_export
from pretrained import PACKAGED, model_directory
from text import load_text, split_into_sequences
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from accelerate_sshsdp.hf import SSHSDPTrainer
from sshsdp.optim import muon_with_adamw

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


class MuonTrainer(SSHSDPTrainer):
    """Muon for hidden matrices, AdamW for the rest."""

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """See the Trainer."""
        if self.optimizer is None:
            self.optimizer = muon_with_adamw(
                self.model, lr=self.args.learning_rate, weight_decay=self.args.weight_decay
            )
        return self.optimizer


TRAINERS = {"adamw": SSHSDPTrainer, "muon": MuonTrainer}


def rows(sequences: Tensor) -> list[dict[str, Tensor]]:
    """What the Trainer feeds to a causal language model."""
    return [{"input_ids": sequence, "labels": sequence} for sequence in sequences]


def finetune(
    arguments: TrainingArguments,
    model: str,
    text: str,
    *,
    sequence_length: int,
    held_out: int,
    optimizer: str = "adamw",
    adapt: Callable[[Any], Any] = lambda model: model,
) -> tuple[Any, dict[str, Any]]:
    """Train, evaluate and save.

    Args:
        arguments: Of the Trainer.
        model: Name or directory for ``from_pretrained``.
        text: See `text.load_text`.
        sequence_length: In tokens.
        held_out: Held-out sequences.
        optimizer: Key of `TRAINERS`.
        adapt: Makes of the pretrained model what is trained.

    Returns:
        The trainer, and what is printed at the end.
    """
    directory = model_directory(model)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    per_step = arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps
    train, evaluated = split_into_sequences(
        load_text(text),
        tokenizer,
        length=sequence_length,
        num_train=arguments.max_steps * per_step * arguments.world_size,
        num_held_out=held_out,
    )
    pretrained = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    trainer = TRAINERS[optimizer](
        adapt(pretrained),
        arguments,
        train_dataset=rows(train),
        eval_dataset=rows(evaluated),
        processing_class=tokenizer,
    )
    before = trainer.evaluate()["eval_loss"]
    output = arguments.output_dir
    last = get_last_checkpoint(output) if Path(output).is_dir() else None
    trainer.train(resume_from_checkpoint=last)
    after = trainer.evaluate()["eval_loss"]
    export = Path(output) / "export"
    trainer.save_model(str(export))
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    return trainer, {
        "world_size": arguments.world_size,
        "steps": trainer.state.global_step,
        "resumed_from": last,
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "metric": "held-out perplexity",
        "metric_before": math.exp(before),
        "metric_after": math.exp(after),
        "export": str(export),
    }


def arguments_for(output: Path, **options: Any) -> TrainingArguments:
    """What both examples choose for the Trainer."""
    transformers.utils.logging.set_verbosity_error()
    return TrainingArguments(
        str(output),
        use_cpu=not torch.cuda.is_available(),
        per_device_eval_batch_size=options["per_device_train_batch_size"],
        warmup_steps=3,
        lr_scheduler_type="cosine",
        logging_steps=1,
        save_strategy="steps",
        save_steps=max(options["max_steps"] // 2, 1),
        report_to=[],
        disable_tqdm=True,
        **options,
    )


@app.command()
def main(
    model: Annotated[str, typer.Option(help="Name or directory for from_pretrained.")] = PACKAGED,
    text: Annotated[str, typer.Option(help="bible, python, or a text file.")] = "bible",
    output: Annotated[Path, typer.Option(help="For checkpoints and the export.")] = Path(
        "outputs/finetune_trainer"
    ),
    optimizer: Annotated[str, typer.Option(help="adamw or muon.")] = "adamw",
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = 24,
    batch_size: Annotated[int, typer.Option(help="Sequences on each rank.")] = 2,
    accumulate: Annotated[int, typer.Option(help="Micro-batches in an optimizer step.")] = 1,
    sequence_length: Annotated[int, typer.Option(help="In tokens.")] = 256,
    held_out: Annotated[int, typer.Option(help="Held-out sequences.")] = 16,
    learning_rate: Annotated[float, typer.Option(help="After the warm-up.")] = 1e-4,
) -> None:
    """Fine-tune a causal language model, evaluate and export."""
    arguments = arguments_for(
        output,
        max_steps=steps,
        per_device_train_batch_size=batch_size,
        gradient_accumulation_steps=accumulate,
        learning_rate=learning_rate,
        weight_decay=0.1,
    )
    trainer, result = finetune(
        arguments,
        model,
        text,
        sequence_length=sequence_length,
        held_out=held_out,
        optimizer=optimizer,
    )
    batch = trainer.eval_dataset[0]["input_ids"][None].to(arguments.device)
    trainer.model.eval()
    with torch.no_grad():
        logits = trainer.model(input_ids=batch).logits
    trainer.accelerator.wait_for_everyone()
    if trainer.is_world_process_zero():
        is_exact = trainer.accelerator.mixed_precision == "no"
        result["export_reloads"], written = check_export(
            Path(result["export"]), batch, logits, 1e-4 if is_exact else 3e-2
        )
        print(f"the exported model writes: {written!r}")
    trainer.accelerator.wait_for_everyone()
    trainer.accelerator.end_training()
    if trainer.is_world_process_zero():
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    app()
