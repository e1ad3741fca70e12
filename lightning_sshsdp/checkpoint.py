"""Saving and loading through the Trainer: one file or a directory, of any world size.

A sharded checkpoint is a ``torch.distributed.checkpoint`` directory with the keys ``model`` and
``optimizer_0``, ``optimizer_1`` ..., and a file ``meta.pt`` with everything else, as Lightning's
own FSDP strategy writes it. A full checkpoint is an ordinary ``.ckpt`` file.

Note: loading waits for sharding. Lightning restores the module and the callbacks before the
strategy is set up, as it does for DDP (a strategy that asks for the other order gets no
``weights_only``). The module may still be on meta then, so `load_model_state_dict` keeps what it
was given until `setup` has sharded the module.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

import sshsdp
from lightning_sshsdp.environment import engine_of, unwrap_optimizer
from lightning_sshsdp.sharded_files import (
    check_local,
    count_sharded_optimizers,
    is_sharded_checkpoint,
    load_sharded_model,
    load_sharded_optimizer,
    read_metadata,
    save_sharded,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["CURRENT_STATE", "CheckpointMixin"]

# Where callbacks that average weights keep the current ones, as Lightning's WeightAveraging does.
CURRENT_STATE = "current_model_state"

_SAVE = "trainer.save_checkpoint()"

logger = logging.getLogger(__name__)


class _Waiting(NamedTuple):
    """Model state that waits for the module to be sharded."""

    checkpoint: Mapping[str, Any]
    strict: bool


class CheckpointMixin:
    """The checkpoint methods of the Trainer strategy."""

    def _init_loading(self) -> None:
        self._waiting: _Waiting | None = None
        self._directory: Path | None = None

    @property
    def engine(self) -> sshsdp.Engine:
        """The engine that shards the current LightningModule.

        Raises:
            RuntimeError: It has not been sharded yet.
        """
        module = self.lightning_module
        engine = None if module is None else engine_of(module)
        if engine is None:
            raise RuntimeError("there is no engine before the Trainer has set the strategy up")
        return engine

    # Saving

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Collective: this rank's shards under the original names, or whole tensors on rank 0."""
        if self._checkpoint_format == "sharded":
            return self.engine.model_state_dict()
        return self.engine.full_state_dict()

    @torch.no_grad()
    def state_of_shards(self, shards: list[torch.Tensor]) -> dict[str, Any]:
        """What `lightning_module_state_dict` would be with these masters. Collective.

        Args:
            shards: One tensor for each of the engine's ``update_shards``.
        """
        if self._checkpoint_format == "sharded":
            return self.engine.model_state_dict(shards)
        masters = self.engine.update_shards
        kept = [shard.clone() for shard in masters]
        for shard, values in zip(masters, shards, strict=True):
            shard.copy_(values)
        try:
            return self.engine.full_state_dict()
        finally:
            for shard, values in zip(masters, kept, strict=True):
                shard.copy_(values)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Collective: this rank's shards by parameter name, or torch's own form on rank 0."""
        optimizer = unwrap_optimizer(optimizer)
        if not any(optimizer is attached for attached in self.engine.optimizers):
            return {}
        if self._checkpoint_format == "sharded":
            return self.engine.optimizer_state_dict(optimizer)
        return self.engine.full_optimizer_state_dict(optimizer)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None
    ) -> None:
        """Write a checkpoint. Collective; complete or absent.

        Raises:
            TypeError: ``storage_options`` were given, which only single files take.
            ValueError: A sharded checkpoint would go to a URL.
            RuntimeError: A rank failed or did not call, or a directory that is no checkpoint is in
                the way. What was at the path is still there.
        """
        if self._checkpoint_format == "sharded":
            if storage_options is not None:
                raise TypeError(
                    "storage_options are for checkpoint='full': a CheckpointIO takes them"
                )
            check_local(filepath)
            states = {"model": checkpoint.pop("state_dict")}
            if CURRENT_STATE in checkpoint:
                states[CURRENT_STATE] = checkpoint.pop(CURRENT_STATE)
            for index, state in enumerate(checkpoint.pop("optimizer_states", [])):
                states[f"optimizer_{index}"] = state
            save_sharded(_SAVE, Path(filepath), states, checkpoint)
            return
        write = super().save_checkpoint
        sshsdp.write_checkpoint_file(
            _SAVE, filepath, lambda: write(checkpoint, filepath, storage_options)
        )

    # Loading

    def load_checkpoint(
        self, checkpoint_path: Any, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a checkpoint of either kind, by this strategy, DDP or FSDP, of any world size.

        Of a sharded one only the metadata is read here: its tensors are read straight into the
        shards. A checkpoint without optimizer states starts the optimizers afresh.
        """
        checkpoint_path = self.broadcast(checkpoint_path)
        path = sshsdp.find_checkpoint(checkpoint_path)
        self._directory = path if is_sharded_checkpoint(path) else None
        if self._directory is not None:
            checkpoint = read_metadata(path, weights_only)
            checkpoint.setdefault("optimizer_states", [])
        elif self._checkpoint_io is None and path.is_file():
            # Only rank 0 reads the tensors: the others must not hold a copy each.
            checkpoint = torch.load(path, map_location="cpu", mmap=True, weights_only=weights_only)
        else:
            # A URL stays as it was given.
            given = path if path.exists() else checkpoint_path
            checkpoint = super().load_checkpoint(given, weights_only=weights_only)
        if "lr_schedulers" not in checkpoint and self.lightning_module.trainer.state.fn == "fit":
            log = logger.warning if self.is_global_zero else logger.debug
            log(
                "%s holds only the model (save_weights_only): optimizers and learning rate "
                "schedulers start afresh",
                path,
            )
            checkpoint.setdefault("optimizer_states", [])
            checkpoint["lr_schedulers"] = []
        return checkpoint

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the module's state now if it is sharded, else as soon as it is."""
        self._waiting = _Waiting(checkpoint, strict)
        if engine_of(self.lightning_module) is not None:
            self._load_waiting_model_state()

    def _load_waiting_model_state(self) -> None:
        waiting, self._waiting = self._waiting, None
        if waiting is None:
            return
        if self._directory is not None:
            load_sharded_model(self.engine, self._directory, "model", strict=waiting.strict)
        else:
            state_dict = waiting.checkpoint["state_dict"]
            self.engine.load_full_state_dict(state_dict, strict=waiting.strict)

    def load_current_state(self, whole: Mapping[str, Any] | None) -> None:
        """Load the weights that a checkpoint of averages holds beside them. Collective.

        Args:
            whole: What a full checkpoint has under `CURRENT_STATE`; sharded ones are read again.
        """
        if self._directory is not None:
            load_sharded_model(self.engine, self._directory, CURRENT_STATE, strict=True)
        else:
            self.engine.load_full_state_dict(whole or {})

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the states of the attached optimizers. Lightning calls it when fitting.

        Raises:
            RuntimeError: The checkpoint holds states of more or fewer optimizers.
        """
        states = checkpoint["optimizer_states"]
        attached = self.engine.optimizers
        num_saved = len(states)
        if self._directory is not None:
            num_saved = count_sharded_optimizers(self._directory)
        if num_saved not in (0, len(self.optimizers)):
            raise RuntimeError(
                f"configure_optimizers() returned {len(self.optimizers)} optimizers, and the "
                f"checkpoint has the states of {num_saved}"
            )
        for index, optimizer in enumerate(map(unwrap_optimizer, self.optimizers)):
            if not any(optimizer is known for known in attached):
                continue
            if self._directory is not None:
                key = f"optimizer_{index}"
                load_sharded_optimizer(self.engine, optimizer, self._directory, key)
            elif index < len(states):
                self.engine.load_full_optimizer_state_dict(optimizer, states[index])
