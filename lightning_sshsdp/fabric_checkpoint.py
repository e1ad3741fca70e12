"""Saving and loading through Fabric: one file or a directory, of any world size.

Sharded modules and attached optimizers in the given state are stored under the user's own keys: in
the ``torch.distributed.checkpoint`` directory, or as whole tensors in one file. Everything else
goes into the directory's ``meta.pt``, or into the file.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import sshsdp
from lightning_sshsdp.environment import StepWrapper, engine_of_wrapper
from lightning_sshsdp.sharded_files import (
    check_local,
    is_sharded_checkpoint,
    load_sharded_model,
    load_sharded_optimizer,
    read_metadata,
    save_sharded,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["FabricCheckpointMixin"]

_SAVE = "fabric.save()"


class FabricCheckpointMixin:
    """The checkpoint methods of the Fabric strategy."""

    # States of single objects

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """Collective: this rank's shards under the original names, or whole tensors on rank 0."""
        if not isinstance(module, StepWrapper):
            return module.state_dict()
        engine = engine_of_wrapper(module)
        if self._checkpoint_format == "sharded":
            return engine.model_state_dict()
        return engine.full_state_dict()

    def load_module_state_dict(
        self, module: nn.Module, state_dict: Mapping[str, Any], strict: bool = True
    ) -> None:
        """Collective: load whole tensors; rank 0's are used."""
        if isinstance(module, StepWrapper):
            engine_of_wrapper(module).load_full_state_dict(state_dict, strict=strict)
        else:
            module.load_state_dict(state_dict, strict=strict)

    def get_optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Collective: this rank's shards by parameter name, or torch's own form on rank 0."""
        engine = self._attached_engine(optimizer)
        if self._checkpoint_format == "sharded":
            return engine.optimizer_state_dict(optimizer)
        return engine.full_optimizer_state_dict(optimizer)

    def _attached_engine(self, optimizer: torch.optim.Optimizer) -> sshsdp.Engine:
        engine: sshsdp.Engine | None = self._engine_of_optimizer(optimizer)
        if engine is None:
            raise ValueError(
                f"this {type(optimizer).__name__} was not set up: call "
                "fabric.setup(model, optimizer) first"
            )
        return engine

    # Files

    def save_checkpoint(
        self,
        path: Any,
        state: dict[str, Any],
        storage_options: Any | None = None,
        filter: dict[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        """Write a checkpoint. Collective; complete or absent.

        Raises:
            TypeError: ``storage_options`` were given, which only single files take.
            ValueError: The state holds no module that was set up, or a sharded checkpoint would go
                to a URL.
            RuntimeError: A rank failed or did not call, or a directory that is no checkpoint is in
                the way. What was at the path is still there.
        """
        if not any(isinstance(value, StepWrapper) for value in state.values()):
            raise ValueError(
                "the checkpoint state holds no module that was set up: save(path, {'model': model, "
                "...}) with what fabric.setup() returned"
            )
        converted = self._convert_stateful_objects_in_state(state, filter=filter or {})
        if self._checkpoint_format == "sharded":
            if storage_options is not None:
                raise TypeError(
                    "storage_options are for checkpoint='full': a CheckpointIO takes them"
                )
            check_local(path)
            shards = {key: value for key, value in converted.items() if _is_sharded(state[key])}
            rest = {key: value for key, value in converted.items() if key not in shards}
            save_sharded(_SAVE, Path(path), shards, rest)
            return
        sshsdp.write_checkpoint_file(
            _SAVE,
            path,
            lambda: self.checkpoint_io.save_checkpoint(
                checkpoint=converted, path=path, storage_options=storage_options
            ),
        )

    def load_checkpoint(
        self,
        path: Any,
        state: nn.Module | torch.optim.Optimizer | dict[str, Any] | None = None,
        strict: bool = True,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Load a checkpoint of either kind into a state. Collective.

        Args:
            path: A directory or a file.
            state: What to restore: a dictionary as it was saved; or one module or optimizer, from a
                file that holds nothing but its state dict; or nothing, to get everything back
                whole.
            strict: Whether names in the state and in the checkpoint must agree.
            weights_only: As in ``torch.load``.

        Returns:
            What was in the checkpoint and not in ``state``.

        Raises:
            KeyError: ``strict``, and the checkpoint has no such key.
        """
        given = self.broadcast(path)
        path = sshsdp.find_checkpoint(given)
        if is_sharded_checkpoint(path):
            return self._load_directory(path, state, strict, weights_only)
        # A URL stays as it was given.
        checkpoint = self._read_file(path if path.exists() else given, weights_only)
        if not state:
            return checkpoint
        if not isinstance(state, dict):
            self._load_into(state, checkpoint, strict)
            return {}
        for key, value in state.items():
            if key not in checkpoint:
                _refuse_missing(key, checkpoint, strict)
            elif not self._load_into(value, checkpoint[key], strict):
                state[key] = checkpoint[key]
            checkpoint.pop(key, None)
        return checkpoint

    def _load_directory(
        self, path: Path, state: Any, strict: bool, weights_only: bool | None
    ) -> dict[str, Any]:
        if not state:
            whole = self.family.fabric_name("utilities.load._load_distributed_checkpoint")(path)
            return {**whole, **read_metadata(path, weights_only)}
        if not isinstance(state, dict):
            raise ValueError(
                f"{path} is a sharded checkpoint with several parts: load it into the state that "
                "was saved, load(path, {'model': model, ...})"
            )
        metadata = read_metadata(path, weights_only)
        for key, value in state.items():
            if isinstance(value, StepWrapper):
                load_sharded_model(engine_of_wrapper(value), path, key, strict=strict)
            elif isinstance(value, torch.optim.Optimizer):
                if not load_sharded_optimizer(self._attached_engine(value), value, path, key):
                    _refuse_missing(key, metadata, strict)
            elif key not in metadata:
                _refuse_missing(key, metadata, strict)
            elif not self._load_into(value, metadata[key], strict):
                state[key] = metadata[key]
            metadata.pop(key, None)
        return metadata

    def _read_file(self, path: str | Path, weights_only: bool | None) -> dict[str, Any]:
        if self._checkpoint_io is None and Path(path).is_file():
            # Only rank 0 reads the tensors: the others must not hold a copy each.
            whole: dict[str, Any] = torch.load(
                path, map_location="cpu", mmap=True, weights_only=weights_only
            )
            return whole
        loaded: dict[str, Any] = self.checkpoint_io.load_checkpoint(path, weights_only=weights_only)
        return loaded

    def _load_into(self, value: Any, saved: Any, strict: bool) -> bool:
        """Load into an object that can; returns whether it could."""
        if isinstance(value, nn.Module):
            self.load_module_state_dict(value, saved, strict=strict)
        elif isinstance(value, torch.optim.Optimizer):
            self._attached_engine(value).load_full_optimizer_state_dict(value, saved)
        elif hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
            value.load_state_dict(saved)
        else:
            return False
        return True


def _is_sharded(value: Any) -> bool:
    return isinstance(value, (StepWrapper, torch.optim.Optimizer))


def _refuse_missing(key: str, checkpoint: Mapping[str, Any], strict: bool) -> None:
    if strict:
        raise KeyError(
            f"the checkpoint has no key {key!r}, only {sorted(checkpoint)}: pass strict=False to "
            "do without it"
        )
