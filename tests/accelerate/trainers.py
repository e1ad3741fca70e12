"""transformers' trainers, ours and stock ones under DDP, on the small models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers import (
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainingArguments,
)

from accelerate_sshsdp.hf import SSHSDPTrainer, SSHSDPTrainerMixin
from tests.accelerate.conftest import forget_state
from tests.accelerate.models import dataset, make

if TYPE_CHECKING:
    from pathlib import Path


class SSHSDPSeq2SeqTrainer(SSHSDPTrainerMixin, Seq2SeqTrainer):
    """As a user would write it."""


TRAINERS: dict[tuple[str, bool], Any] = {
    ("ours", False): SSHSDPTrainer,
    ("ddp", False): Trainer,
    ("ours", True): SSHSDPSeq2SeqTrainer,
    ("ddp", True): Seq2SeqTrainer,
}


def arguments(folder: str | Path, cls: Any = TrainingArguments, **changes: Any) -> Any:
    """Six steps of two micro-batches, with all that may change a step."""
    fields = {
        "use_cpu": True,
        "num_train_epochs": 3,
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-2,
        "warmup_steps": 3,
        "weight_decay": 0.1,
        "max_grad_norm": 0.5,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    return cls(str(folder), **{**fields, **changes})


def trainer(
    side: str,
    folder: str | Path,
    kind: str = "llama",
    model: Any = None,
    *,
    seq2seq: bool = False,
    **changes: Any,
) -> Any:
    """A trainer in a process that forgets any earlier one; the last batches are uneven.

    Args:
        side: ``"ours"`` or ``"ddp"``.
        folder: Where it saves.
        kind: Of the model, and of the data.
        model: Default: a new one of that kind.
        seq2seq: Whether it is a `Seq2SeqTrainer`.
        **changes: Of the training arguments; those of the trainer in ``trainer_options``.
    """
    forget_state()
    options = changes.pop("trainer_options", {})
    return TRAINERS[side, seq2seq](
        make(kind) if model is None else model,
        arguments(folder, Seq2SeqTrainingArguments if seq2seq else TrainingArguments, **changes),
        train_dataset=dataset(kind),
        eval_dataset=dataset(kind, 10),
        **options,
    )


def history(of: Any, *keys: str) -> list[float]:
    """What was logged under these keys, in order."""
    return [float(row[key]) for row in of.state.log_history for key in keys if key in row]
