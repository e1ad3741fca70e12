"""transformers' Trainer, and trainers built on it, with models sharded by the engine.

Example:
    >>> from accelerate_sshsdp.hf import SSHSDPTrainer  # doctest: +SKIP
    >>> trainer = SSHSDPTrainer(model, TrainingArguments(bf16=True), ...)  # doctest: +SKIP
    >>> trainer.train()  # doctest: +SKIP
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from torch import nn
from transformers import Trainer, trainer
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME
from transformers.utils import (
    ADAPTER_SAFE_WEIGHTS_NAME,
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_NAME,
)

import sshsdp
from accelerate_sshsdp.accelerator import Accelerator
from accelerate_sshsdp.checkpoints import load_optimizer, load_weights
from accelerate_sshsdp.optimizers import unwrap_optimizer
from accelerate_sshsdp.sharding import engine_of

if TYPE_CHECKING:
    from accelerate_sshsdp.plugin import SSHSDPPlugin

__all__ = ["SSHSDPTrainer", "SSHSDPTrainerMixin"]


# A directory beside the weights, the scheduler and the RNG states of a Trainer's checkpoint.
_OPTIMIZER = "optimizer_0"


class SSHSDPTrainerMixin:
    """Lets a Trainer shard its model with SS-HSDP: ``class Mine(SSHSDPTrainerMixin, Trainer)``.

    Checkpoints are the Trainer's: safetensors that ``from_pretrained`` reads, with the optimizer's
    state as a ``torch.distributed.checkpoint`` directory beside them. They load on any number of
    ranks, and so do those that a stock Trainer wrote.

    Args:
        *args: As for the Trainer.
        sshsdp_plugin: How to shard; default: ``SSHSDPPlugin()``, which reads the environment and
            the configuration file.
        **kwargs: As for the Trainer.
    """

    # The Trainer's own.
    accelerator: Accelerator
    model: nn.Module
    optimizer: Any
    lr_scheduler: Any
    args: Any
    state: Any

    def __init__(
        self, *args: Any, sshsdp_plugin: SSHSDPPlugin | None = None, **kwargs: Any
    ) -> None:
        """See the class."""
        self._sshsdp_plugin = sshsdp_plugin
        super().__init__(*args, **kwargs)

    def create_accelerator_and_postprocess(self) -> None:
        """Create our accelerator where the Trainer would create Accelerate's own."""
        ours = functools.partial(Accelerator, sshsdp_plugin=self._sshsdp_plugin)
        with patch.object(trainer, "Accelerator", ours):
            super().create_accelerator_and_postprocess()

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Leave the model where it is: the engine places shards."""

    def _has_mixed_mesh_grads(self, model: nn.Module) -> bool:
        """No: the accelerator clips, and runtime parameters have no gradients to look at."""
        return False

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        """Have all ranks generate equally long: every token gathers weights."""
        if hasattr(self, "_gen_kwargs"):
            self._gen_kwargs.setdefault("synced_gpus", True)
        return super().prediction_step(*args, **kwargs)

    # Checkpoints

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save master weights, gathered on the main process, and what belongs to them. Collective.

        Args:
            output_dir: Default: ``args.output_dir``.
            _internal_call: As in the Trainer.
        """
        if engine_of(self.model) is None:
            super().save_model(output_dir, _internal_call)
            return
        output_dir = self.args.output_dir if output_dir is None else output_dir
        state = self.accelerator.get_state_dict(self.model)
        sshsdp.on_rank_0(lambda: self._save(output_dir, state_dict=state), "Trainer.save_model()")
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        engine = engine_of(self.model)
        if engine is None:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        optimizer = unwrap_optimizer(self.optimizer)
        sshsdp.write_checkpoint(
            "Trainer's checkpoint",
            Path(output_dir) / _OPTIMIZER,
            lambda: ({"optimizer": engine.optimizer_state_dict(optimizer)}, {}),
        )
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER_NAME)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        engine = engine_of(self.model)
        if checkpoint is None or engine is None:
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        candidates = [Path(checkpoint) / name for name in (_OPTIMIZER, OPTIMIZER_NAME)]
        found = next((file for file in candidates if file.exists()), None)
        scheduler = Path(checkpoint) / SCHEDULER_NAME
        # As in the Trainer, weights alone are a checkpoint to start from (save_only_model).
        if found is None or not scheduler.is_file():
            return
        load_optimizer(engine, unwrap_optimizer(self.optimizer), found)
        self.lr_scheduler.load_state_dict(torch.load(scheduler, weights_only=True))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        # Usually the model is not sharded yet.
        if engine_of(self.model) is None:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        else:
            self._load_weights(resume_from_checkpoint)

    def _load_best_model(self) -> None:
        if engine_of(self.model) is None:
            super()._load_best_model()
        else:
            self._load_weights(self.state.best_model_checkpoint)

    def _load_weights(self, directory: str) -> None:
        engine = engine_of(self.model)
        assert engine is not None
        if (Path(directory) / ADAPTER_SAFE_WEIGHTS_NAME).exists():
            _load_adapter(engine, self.model, directory)
            return
        names = (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_NAME)
        files = [Path(directory) / name for name in names if (Path(directory) / name).exists()]
        if not files:
            raise FileNotFoundError(f"{directory} has no weights: none of {', '.join(names)}")
        load_weights(engine, self.model, files[0])


def _load_adapter(engine: sshsdp.Engine, model: Any, directory: str) -> None:
    from peft import load_peft_weights, set_peft_model_state_dict

    with engine.unsharded():
        weights = load_peft_weights(directory, device="cpu")
        set_peft_model_state_dict(model, weights, adapter_name=model.active_adapters[0])


class SSHSDPTrainer(SSHSDPTrainerMixin, Trainer):
    """``transformers.Trainer`` whose model is sharded by SS-HSDP."""
