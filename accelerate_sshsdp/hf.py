"""transformers' Trainer, and trainers built on it, with models sharded by the engine.

Example:
    >>> from accelerate_sshsdp.hf import SSHSDPTrainer  # doctest: +SKIP
    >>> trainer = SSHSDPTrainer(model, TrainingArguments(bf16=True), ...)  # doctest: +SKIP
    >>> trainer.train()  # doctest: +SKIP
"""

from __future__ import annotations

import functools
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from torch import nn
from transformers import Trainer, trainer
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, rotate_checkpoints
from transformers.utils import (
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
_SAVE = "Trainer's checkpoint"

logger = logging.getLogger(__name__)


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
        # A checkpoint whose weights are read once the model is sharded.
        self._weights_to_load: str | None = None
        super().__init__(*args, **kwargs)

    def create_accelerator_and_postprocess(self) -> None:
        """Create our accelerator where the Trainer would create Accelerate's own.

        Raises:
            ValueError: The training arguments ask for what shards cannot do; it is named.
        """
        _refuse(self.args)
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

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Save a checkpoint that is complete or absent, as a failed save must lose no older one."""
        if engine_of(self.model) is None:
            super()._save_checkpoint(model, trial)
            return
        args, state = self.args, self.state
        run = Path(self._get_output_dir(trial=trial))
        path = run / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
        save = super()._save_checkpoint
        with sshsdp.checkpoint_directory(_SAVE, path, _replace_all) as folder:
            # The Trainer gives the directory its name, and pushes and deletes when it has written.
            with (
                patch.object(self, "_get_output_dir", lambda trial: str(folder)),
                patch.object(args, "push_to_hub", False),
                patch.object(args, "save_total_limit", None),
            ):
                sshsdp.together(_SAVE, lambda: save(model, trial))
            if args.should_save:
                for entry in (written := folder / path.name).iterdir():
                    entry.rename(folder / entry.name)
                written.rmdir()
            # It was looked for where this one was being written.
            best = run / f"{PREFIX_CHECKPOINT_DIR}-{state.best_global_step}"
            if state.best_global_step and (best == path or best.exists()):
                state.best_model_checkpoint = str(best)
            if args.should_save:
                state.save_to_json(str(folder / TRAINER_STATE_NAME))
        if args.push_to_hub:
            self._push_from_checkpoint(str(path))
        if args.should_save:
            rotate_checkpoints(
                output_dir=str(run),
                save_total_limit=args.save_total_limit,
                best_model_checkpoint=state.best_model_checkpoint,
                use_mtime=True,
            )

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
            _SAVE,
            Path(output_dir) / _OPTIMIZER,
            lambda: ({"optimizer": engine.optimizer_state_dict(optimizer)}, {}),
        )
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER_NAME)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        engine = engine_of(self.model)
        weights, self._weights_to_load = self._weights_to_load, None
        if weights is not None:
            self._load_weights(weights)
        if checkpoint is None or engine is None:
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        candidates = [Path(checkpoint) / name for name in (_OPTIMIZER, OPTIMIZER_NAME)]
        found = next((file for file in candidates if file.exists()), None)
        scheduler = Path(checkpoint) / SCHEDULER_NAME
        if found is None or not scheduler.is_file():
            logger.warning(
                "%s has no state of the optimizer (save_only_model?): training goes on with these "
                "weights, and an optimizer and a schedule that are new",
                checkpoint,
            )
            return
        load_optimizer(engine, unwrap_optimizer(self.optimizer), found)
        self.lr_scheduler.load_state_dict(torch.load(scheduler, weights_only=True))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if engine_of(self.model) is None:
            # Masters keep what a model in bf16 would round, and they are not there yet.
            self._weights_to_load = resume_from_checkpoint
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
        if hasattr(self.model, "peft_config"):
            _load_adapters(engine, self.model, Path(directory))
            return
        names = (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_NAME)
        files = [Path(directory) / name for name in names if (Path(directory) / name).exists()]
        if not files:
            raise FileNotFoundError(f"{directory} has no weights: none of {', '.join(names)}")
        load_weights(engine, self.model, files[0])


def _refuse(args: Any) -> None:
    if args.save_on_each_node:
        raise ValueError(
            "TrainingArguments(save_on_each_node=True): a checkpoint of shards is one directory "
            "that all nodes see: leave it off"
        )
    for name in ("bf16_full_eval", "fp16_full_eval"):
        if getattr(args, name):
            raise ValueError(
                f"TrainingArguments({name}=True) would convert a sharded model: use "
                f"{name.removesuffix('_full_eval')}=True, with which all batches run in low "
                "precision, evaluation as well"
            )


def _replace_all(old: Path, new: Path) -> None:
    """Nothing of an old checkpoint of the same step stays."""


def _load_adapters(engine: sshsdp.Engine, model: Any, directory: Path) -> None:
    """Load PEFT's adapters as it saves them: the default one, and others in subdirectories."""
    from peft import load_peft_weights, set_peft_model_state_dict

    for name, config in model.peft_config.items():
        if config.is_prompt_learning:
            raise ValueError(
                f"the adapter {name!r} is of the kind {config.peft_type.value}, whose weights "
                "cannot be loaded into shards: load them before the model is prepared"
            )
        folder = directory if name == "default" else directory / name
        if not (folder / "adapter_config.json").exists():
            raise FileNotFoundError(f"{folder} has no adapter {name!r}")
        weights = load_peft_weights(str(folder), device="cpu")
        # PEFT asks for the names, and masters take the values.
        with (
            patch.object(model, "state_dict", lambda: dict(model.named_parameters())),
            patch.object(model, "load_state_dict", engine.load_full_state_dict),
        ):
            set_peft_model_state_dict(model, weights, adapter_name=name)


class SSHSDPTrainer(SSHSDPTrainerMixin, Trainer):
    """``transformers.Trainer`` whose model is sharded by SS-HSDP."""
