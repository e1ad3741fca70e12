r"""Fine-tune adapters (LoRA) of a causal language model with transformers' Trainer and PEFT.

As it stands it adapts SmolLM2-135M to the King James Bible, on two CPU processes, in a few minutes
and without a network::

    accelerate launch --config_file examples/finetune_accelerate.yaml examples/lora_trainer.py

The base is frozen: of it, a rank holds its runtime shard, and no master, gradient or optimizer
state. The export is what ``PeftModel.from_pretrained`` loads. The last line of output is a JSON
object.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from finetune_trainer import arguments_for, finetune
from peft import LoraConfig, PeftModel, get_peft_model
from pretrained import PACKAGED, model_directory
from transformers import AutoModelForCausalLM

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@torch.no_grad()
def check_adapters(directory: Path, model: str, batch: Any, logits: Any) -> bool:
    """Whether plain PEFT, with the adapters merged, gives the trained model's logits."""
    base = AutoModelForCausalLM.from_pretrained(model_directory(model), dtype=torch.float32)
    merged = PeftModel.from_pretrained(base, directory).merge_and_unload().eval()
    error = torch.linalg.vector_norm(merged(input_ids=batch.cpu()).logits - logits.float().cpu())
    return bool(error <= 3e-2 * torch.linalg.vector_norm(logits.float().cpu()))


@app.command()
def main(
    model: Annotated[str, typer.Option(help="Name or directory for from_pretrained.")] = PACKAGED,
    text: Annotated[str, typer.Option(help="bible, python, or a text file.")] = "bible",
    output: Annotated[Path, typer.Option(help="For checkpoints and the export.")] = Path(
        "outputs/lora_trainer"
    ),
    rank: Annotated[int, typer.Option(help="Of the adapters.")] = 16,
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = 24,
    batch_size: Annotated[int, typer.Option(help="Sequences on each rank.")] = 2,
    sequence_length: Annotated[int, typer.Option(help="In tokens.")] = 256,
    held_out: Annotated[int, typer.Option(help="Held-out sequences.")] = 16,
    learning_rate: Annotated[float, typer.Option(help="After the warm-up.")] = 1e-3,
) -> None:
    """Fine-tune adapters, evaluate and export."""
    arguments = arguments_for(
        output,
        max_steps=steps,
        per_device_train_batch_size=batch_size,
        learning_rate=learning_rate,
    )
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear")
    trainer, result = finetune(
        arguments,
        model,
        text,
        sequence_length=sequence_length,
        held_out=held_out,
        adapt=lambda pretrained: get_peft_model(pretrained, config),
    )
    batch = trainer.eval_dataset[0]["input_ids"][None].to(arguments.device)
    trainer.model.eval()
    with torch.no_grad():
        logits = trainer.model(input_ids=batch).logits
    trained, total = trainer.model.get_nb_trainable_parameters()
    result["trained_share"] = trained / total
    if trainer.is_world_process_zero():
        result["export_reloads"] = check_adapters(Path(result["export"]), model, batch, logits)
    trainer.accelerator.wait_for_everyone()
    trainer.accelerator.end_training()
    if trainer.is_world_process_zero():
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    app()
