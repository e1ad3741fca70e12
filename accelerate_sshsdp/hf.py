"""transformers' Trainer, and trainers built on it, with models sharded by the engine.

Example:
    >>> from accelerate_sshsdp.hf import SSHSDPTrainer  # doctest: +SKIP
    >>> trainer = SSHSDPTrainer(model, TrainingArguments(bf16=True), ...)  # doctest: +SKIP
    >>> trainer.train()  # doctest: +SKIP
"""

from __future__ import annotations

import functools
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from transformers import Trainer, trainer

from accelerate_sshsdp.accelerator import Accelerator
from accelerate_sshsdp.plugin import SSHSDPPlugin

__all__ = ["SSHSDPTrainer", "SSHSDPTrainerMixin"]


class SSHSDPTrainerMixin:
    """Lets a Trainer shard its model with SS-HSDP: ``class Mine(SSHSDPTrainerMixin, Trainer)``.

    Args:
        *args: As for the Trainer.
        sshsdp_plugin: How to shard; default: ``SSHSDPPlugin()``, which reads the environment and
            the configuration file.
        **kwargs: As for the Trainer.
    """

    accelerator: Accelerator

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


class SSHSDPTrainer(SSHSDPTrainerMixin, Trainer):
    """``transformers.Trainer`` whose model is sharded by SS-HSDP."""
