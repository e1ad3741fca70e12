"""Saving and loading whole trainings: what `save_state` and `load_state` do with shards.

Models and optimizers are written as Accelerate writes those of FSDP2 with SHARDED_STATE_DICT, so
that either reads the other's; everything else is left to Accelerate::

    checkpoint/
      pytorch_model_fsdp_0/   a torch.distributed.checkpoint directory with the key "model"
      optimizer_0/            the same with the key "optimizer"
      scheduler.bin, random_states_0.pkl, scaler.pt, custom_checkpoint_0.pkl ...

The directory is written beside its place and renamed at the end, so it is complete or absent, and
what was there before a save that fails is there after it.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from accelerate.utils import MODEL_NAME, OPTIMIZER_NAME, SAFE_MODEL_NAME
from accelerate.utils.constants import FSDP_MODEL_NAME
from safetensors.torch import load_file

import sshsdp
from accelerate_sshsdp.environment import ensure_process_group
from accelerate_sshsdp.optimizers import unwrap_optimizer
from accelerate_sshsdp.sharding import engine_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import nn

__all__ = ["CheckpointsMixin", "load_optimizer", "load_weights"]

logger = logging.getLogger(__name__)

_SAVE, _LOAD = "accelerator.save_state()", "accelerator.load_state()"
# What Accelerate and this module write. Whatever else is in a directory belongs to the user.
_OWN = re.compile(
    rf"({FSDP_MODEL_NAME}|{OPTIMIZER_NAME})(_\d+)?(\.bin)?"
    rf"|({MODEL_NAME}|{SAFE_MODEL_NAME})(_\d+)?\.(bin|safetensors)"
    r"|(scheduler|sampler|dl_state_dict)(_\d+)?\.bin|scaler\.pt"
    r"|random_states_\d+\.pkl|custom_checkpoint_\d+\.pkl"
)
_NUMBERED = re.compile(r"checkpoint_(\d+)")


class CheckpointsMixin:
    """The checkpoint methods of `Accelerator`; Accelerate's class comes after it in the bases."""

    # Accelerate's own.
    step: int
    _models: list[nn.Module]
    _optimizers: list[Any]
    _save_model_state_pre_hook: dict[int, Callable[..., None]]
    _load_model_state_pre_hook: dict[int, Callable[..., None]]

    def save_state(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        safe_serialization: bool = True,
        **save_model_func_kwargs: Any,
    ) -> Path:
        """Save models, optimizers, schedulers, samplers, the scaler, RNG and registered objects.

        Collective: call it on every rank. The directory must be one that all ranks see; it appears,
        or replaces the one that is there, once everything in it has been written. Files of others
        in it stay. Old checkpoints beyond ``ProjectConfiguration(total_limit)`` are deleted after
        that.

        Args:
            output_dir: The directory; not used with ``automatic_checkpoint_naming``.
            safe_serialization: As in Accelerate, for models that are not sharded.
            **save_model_func_kwargs: As in Accelerate.

        Returns:
            The directory.

        Raises:
            RuntimeError: Some rank failed or did not call; it is named.
            ValueError: There is no place to save to.
        """
        ensure_process_group()
        configuration = self.project_configuration
        if not self.sync_gradients:
            logger.warning(
                "save_state() between the micro-batches of one step: the gradients accumulated so "
                "far are not part of a checkpoint"
            )
        path = Path(_of_rank_0(sshsdp.together(_SAVE, lambda: self._place_to_save(output_dir))))
        save = super().save_state
        with sshsdp.checkpoint_directory(_SAVE, path, _keep_others) as folder:
            for index, engine in enumerate(self._run_save_hooks(folder)):
                engine.save(folder / f"{FSDP_MODEL_NAME}_{index}")
            for index, (engine, optimizer) in enumerate(self._sharded_optimizers()):
                state = functools.partial(engine.optimizer_state_dict, optimizer)
                sshsdp.write_checkpoint(
                    _SAVE,
                    folder / f"{OPTIMIZER_NAME}_{index}",
                    lambda state=state: ({"optimizer": state()}, {}),
                )
            with self._without_shards():
                save(str(folder), safe_serialization, **save_model_func_kwargs)
        if configuration.automatic_checkpoint_naming:
            sshsdp.on_rank_0(
                lambda: _prune(path, configuration.total_limit),
                "deleting checkpoints beyond total_limit",
            )
        return path

    def load_state(
        self,
        input_dir: str | os.PathLike[str] | None = None,
        load_kwargs: dict[str, Any] | None = None,
        **load_model_func_kwargs: Any,
    ) -> None:
        """Load what `save_state` has saved, on any number of ranks. Collective.

        Checkpoints of Accelerate's FSDP2 (SHARDED_STATE_DICT) and of its DDP load as well.

        Args:
            input_dir: The directory; default with ``automatic_checkpoint_naming``: the latest,
                after which saving goes on with the next number.
            load_kwargs: As in Accelerate, for what is not sharded.
            **load_model_func_kwargs: ``strict=False`` lets a model have other parameters than the
                checkpoint; others as in Accelerate.

        Raises:
            FileNotFoundError: There is no model, or no optimizer, in the directory.
            RuntimeError: Another rank failed or did not call; or a forward waits for its backward.
            ValueError: There is no such directory, or a model or optimizer does not fit.
        """
        ensure_process_group()
        found = sshsdp.together(_LOAD, lambda: self._place_to_load(input_dir))
        path = Path(_of_rank_0(found))
        models = [*self._models]
        for hook in self._load_model_state_pre_hook.values():
            hook(models, str(path))
        sharded = [(engine, m) for m in models if (engine := engine_of(m)) is not None]
        optimizers = self._sharded_optimizers()
        model_files, optimizer_files = sshsdp.together(
            _LOAD,
            lambda: (
                [_find_model(path, index, model) for index, (_, model) in enumerate(sharded)],
                [_find_optimizer(path, index, one) for index, (_, one) in enumerate(optimizers)],
            ),
        )
        strict = load_model_func_kwargs.pop("strict", True)
        for (engine, model), file in zip(sharded, model_files, strict=True):
            load_weights(engine, model, file, strict)
        for (engine, optimizer), file in zip(optimizers, optimizer_files, strict=True):
            load_optimizer(engine, optimizer, file)
        if not strict:
            load_model_func_kwargs["strict"] = False
        load = super().load_state
        with self._without_shards(models):
            sshsdp.together(_LOAD, lambda: load(str(path), load_kwargs, **load_model_func_kwargs))
        # It is in the files of the RNG states, and new ranks have none.
        self.step = _of_rank_0(self.step)
        if input_dir is None:
            self.project_configuration.iteration = _number(path) + 1

    def _place_to_save(self, output_dir: str | os.PathLike[str] | None) -> Path:
        configuration = self.project_configuration
        if configuration.save_on_each_node:
            raise ValueError(
                "ProjectConfiguration(save_on_each_node=True): a checkpoint of shards is one "
                "directory that all nodes see: leave it off"
            )
        if not configuration.automatic_checkpoint_naming:
            if output_dir is None:
                raise ValueError(
                    "save_state() needs output_dir, or ProjectConfiguration(project_dir=..., "
                    "automatic_checkpoint_naming=True)"
                )
            return Path(output_dir)
        if self.project_dir is None:
            raise ValueError(
                "automatic_checkpoint_naming needs a place: ProjectConfiguration(project_dir=...)"
            )
        path = Path(self.project_dir) / "checkpoints" / f"checkpoint_{self.save_iteration}"
        if path.exists():
            raise FileExistsError(
                f"{path} is there already: load it first, or set project_configuration.iteration "
                "to the number to go on with"
            )
        return path

    def _place_to_load(self, input_dir: str | os.PathLike[str] | None) -> Path:
        if input_dir is not None:
            path = sshsdp.find_checkpoint(Path(input_dir).expanduser())
            if not path.is_dir():
                raise ValueError(f"load_state: there is no directory {path}")
            return path
        if not self.project_configuration.automatic_checkpoint_naming:
            raise ValueError("load_state() needs input_dir without automatic_checkpoint_naming")
        folder = Path(self.project_dir) / "checkpoints"
        checkpoints = _numbered(folder)
        if not checkpoints:
            raise ValueError(f"load_state: there is no checkpoint in {folder}")
        return checkpoints[-1]

    def _sharded_optimizers(self) -> list[tuple[sshsdp.Engine, torch.optim.Optimizer]]:
        """The optimizers that are attached to an engine, in order of preparation."""
        engine_by_optimizer = {o: engine for engine in self.engines for o in engine.optimizers}
        prepared = [unwrap_optimizer(one) for one in self._optimizers]
        return [(engine_by_optimizer[o], o) for o in prepared if o in engine_by_optimizer]

    def _run_save_hooks(self, folder: Path) -> list[sshsdp.Engine]:
        """The engines whose models remain to be saved after the user's hooks."""
        engines = self.engines

        def run() -> list[int]:
            states = [engine.model_state_dict() for engine in engines]
            weights = [*states]
            for hook in self._save_model_state_pre_hook.values():
                hook(self._models, weights, str(folder))
            if any(not any(one is state for state in states) for one in weights):
                raise ValueError(
                    "a hook of register_save_state_pre_hook put something into `weights`: it may "
                    "only take out what it has saved itself"
                )
            return [i for i, state in enumerate(states) if any(state is one for one in weights)]

        # Hooks often work on the main process alone.
        return [engines[index] for index in _of_rank_0(sshsdp.together(_SAVE, run))]

    @contextlib.contextmanager
    def _without_shards(self, models: Sequence[nn.Module] | None = None) -> Iterator[None]:
        """Show Accelerate's own methods only what is not sharded, and no hooks."""
        attached = [optimizer for _, optimizer in self._sharded_optimizers()]
        shown = {
            "_models": [
                m for m in (self._models if models is None else models) if engine_of(m) is None
            ],
            "_optimizers": [
                one
                for one in self._optimizers
                if not any(unwrap_optimizer(one) is other for other in attached)
            ],
            "_save_model_state_pre_hook": {},
            "_load_model_state_pre_hook": {},
        }
        kept = {name: getattr(self, name) for name in shown}
        configuration = self.project_configuration
        naming = configuration.automatic_checkpoint_naming
        vars(self).update(shown)
        configuration.automatic_checkpoint_naming = False
        try:
            yield
        finally:
            vars(self).update(kept)
            configuration.automatic_checkpoint_naming = naming


def _of_rank_0(value: Any) -> Any:
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


# Files


def _keep_others(old: Path, new: Path) -> None:
    """Have what others put into a checkpoint's directory in the new one as well."""
    for source in old.iterdir():
        target = new / source.name
        if _OWN.fullmatch(source.name) or target.exists():
            continue
        if source.is_dir() and not source.is_symlink():
            shutil.copytree(source, target, symlinks=True, copy_function=_link)
        else:
            _link(source, target)


def _link(source: str | Path, target: str | Path) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:
        # Not every file system has links.
        shutil.copy2(source, target, follow_symlinks=False)


def _numbered(folder: Path) -> list[Path]:
    """The checkpoints that have a number for a name, in order."""
    found = [path for path in folder.glob("checkpoint_*") if _NUMBERED.fullmatch(path.name)]
    return sorted(found, key=_number)


def _number(path: Path) -> int:
    found = _NUMBERED.fullmatch(path.name)
    assert found is not None
    return int(found[1])


def _prune(latest: Path, limit: int | None) -> None:
    """Delete the oldest checkpoints beside ``latest`` until there are ``limit`` in all."""
    if limit is None:
        return
    others = [path for path in _numbered(latest.parent) if path.name != latest.name]
    for path in others[: max(len(others) + 1 - limit, 0)]:
        logger.info("deleting %s, as there may be %d checkpoints", path, limit)
        shutil.rmtree(path)


def _find_model(path: Path, index: int, model: nn.Module) -> Path:
    suffix = f"_{index}" if index else ""
    return _first_of(
        f"no weights of {type(model).__name__} (model {index})",
        path / f"{FSDP_MODEL_NAME}_{index}",
        path / f"{SAFE_MODEL_NAME}{suffix}.safetensors",
        path / f"{MODEL_NAME}{suffix}.bin",
    )


def _find_optimizer(path: Path, index: int, optimizer: torch.optim.Optimizer) -> Path:
    suffix = f"_{index}" if index else ""
    return _first_of(
        f"no state of {type(optimizer).__name__} (optimizer {index})",
        path / f"{OPTIMIZER_NAME}_{index}",
        path / f"{OPTIMIZER_NAME}{suffix}.bin",
    )


def _first_of(what: str, *candidates: Path) -> Path:
    for path in candidates:
        if path.exists():
            return path
    names = ", ".join(path.name for path in candidates)
    raise FileNotFoundError(f"{candidates[0].parent} has {what}: none of {names} is there")


def load_weights(engine: sshsdp.Engine, model: nn.Module, file: Path, strict: bool = True) -> None:
    """Load what `save_state`, DDP or ``save_pretrained`` has written. Collective.

    Args:
        engine: Of the model.
        model: For messages.
        file: A checkpoint directory, safetensors (or the index of several), or a pickled dict.
        strict: Whether other names than the model's are an error.
    """
    if file.is_dir():
        keys = engine.load_model_checkpoint(file, strict=strict)
    else:
        keys = engine.load_full_state_dict(_read_on_rank_0(file), strict=strict)
    if (keys.missing_keys or keys.unexpected_keys) and dist.get_rank() == 0:
        logger.warning(
            "%s: missing in the checkpoint: %s; not in the model: %s",
            type(model).__name__,
            ", ".join(keys.missing_keys) or "nothing",
            ", ".join(keys.unexpected_keys) or "nothing",
        )


def load_optimizer(engine: sshsdp.Engine, optimizer: torch.optim.Optimizer, file: Path) -> None:
    """Load an optimizer's state, from a checkpoint directory or a pickled dict. Collective."""
    if file.is_dir():
        engine.load_optimizer_checkpoint(optimizer, file)
    else:
        engine.load_full_optimizer_state_dict(optimizer, _read_on_rank_0(file))


def _read_on_rank_0(file: Path) -> dict[str, Any]:
    """A plain state dict, as DDP and single processes write it."""
    state: dict[str, Any] = {}

    def read() -> None:
        if file.suffix == ".json":
            names = json.loads(file.read_text(encoding="utf-8"))["weight_map"].values()
            for name in sorted({*names}):
                state.update(load_file(file.parent / name))
        elif file.suffix == ".safetensors":
            state.update(load_file(file))
        else:
            state.update(torch.load(file, map_location="cpu", weights_only=True))

    sshsdp.on_rank_0(read, f"reading {file}")
    return state
