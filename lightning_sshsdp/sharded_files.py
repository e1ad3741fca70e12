"""Checkpoint directories: shards, and a ``meta.pt`` for everything that is no shard."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    import sshsdp

__all__ = [
    "check_local",
    "count_sharded_optimizers",
    "is_sharded_checkpoint",
    "load_sharded_model",
    "load_sharded_optimizer",
    "read_metadata",
    "read_whole_model",
    "save_file",
    "save_sharded",
]

METADATA_FILE = "meta.pt"


def is_sharded_checkpoint(path: Path) -> bool:
    """Whether a path is a directory that `save_sharded` (or Lightning) wrote."""
    return (path / METADATA_FILE).is_file()


def check_local(path: str | Path) -> None:
    """Refuse URLs: every rank writes to a directory that all of them see.

    Raises:
        ValueError: It is one.
    """
    if ":/" in str(path):
        raise ValueError(
            f"{path} is a URL, and sharded checkpoints go to a shared file system: save there and "
            "copy, or give the strategy checkpoint='full'"
        )


def save_sharded(path: Path, states: Mapping[str, Any], metadata: Mapping[str, Any]) -> None:
    """Write a directory beside ``path``, then put it there. Collective.

    Replaces a file or a checkpoint directory at ``path``. Killed in the middle, it leaves what was
    there before.

    Raises:
        IsADirectoryError: A directory that is no checkpoint is in the way.
        RuntimeError: A rank could not write.
    """
    unfinished = path.with_name(f".{path.name}.unfinished")
    _on_rank_0(lambda: _prepare(path, unfinished))
    try:
        dcp.save(dict(states), storage_writer=dcp.FileSystemWriter(unfinished))
    except CheckpointException as error:
        # It derives from BaseException, so that Lightning would not clean up.
        raise RuntimeError(f"could not write the checkpoint {path}: {error}") from error

    def finish() -> None:
        torch.save(dict(metadata), unfinished / METADATA_FILE)
        _replace(unfinished, path)

    _on_rank_0(finish)


def _prepare(path: Path, unfinished: Path) -> None:
    _refuse_other_directories(path)
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)


def _replace(new: Path, path: Path) -> None:
    if path.is_dir():
        old = _aside(path)
        path.rename(old)
        new.rename(path)
        shutil.rmtree(old)
        return
    path.unlink(missing_ok=True)
    new.rename(path)


def _on_rank_0(action: Callable[[], None]) -> None:
    """Run ``action`` on rank 0; raise its error on every rank, so that none waits in vain."""
    outcome: list[Exception | None] = [None]
    if dist.get_rank() == 0:
        try:
            action()
        except Exception as error:
            outcome[0] = error
    dist.broadcast_object_list(outcome, src=0)
    if outcome[0] is not None:
        raise outcome[0]


def save_file(path: Path, write: Callable[[], None]) -> None:
    """Call ``write`` on rank 0 to write a file to ``path``. Collective.

    A checkpoint directory at ``path`` makes way, and is there again if ``write`` fails.

    Raises:
        IsADirectoryError: A directory that is no checkpoint is in the way.
    """

    def replace() -> None:
        _refuse_other_directories(path)
        if not path.is_dir():
            write()
            return
        old = _aside(path)
        path.rename(old)
        try:
            write()
        except BaseException:
            old.rename(path)
            raise
        shutil.rmtree(old)

    _on_rank_0(replace)


def _refuse_other_directories(path: Path) -> None:
    if path.is_dir() and not is_sharded_checkpoint(path):
        raise IsADirectoryError(f"the checkpoint path is a directory, but no checkpoint: {path}")


def _aside(path: Path) -> Path:
    old = path.with_name(f".{path.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    return old


def read_metadata(path: Path, weights_only: bool | None) -> dict[str, Any]:
    """What is in ``meta.pt``."""
    metadata: dict[str, Any] = torch.load(
        path / METADATA_FILE, map_location="cpu", weights_only=weights_only
    )
    return metadata


def load_sharded_model(engine: sshsdp.Engine, path: Path, key: str, *, strict: bool) -> None:
    """Read the model's shards from under ``key``. Collective.

    Raises:
        ValueError: Names or shapes in the file and in the model differ (names: if ``strict``).
    """
    names = _top_level_keys(path)
    # Lightning's ModelParallelStrategy calls the model otherwise than its FSDPStrategy.
    if key not in names and key == "model" and "state_dict" in names:
        key = "state_dict"
    engine.load_model_checkpoint(path, key, strict=strict)


def load_sharded_optimizer(
    engine: sshsdp.Engine, optimizer: torch.optim.Optimizer, path: Path, key: str
) -> bool:
    """Read an optimizer's shards from under ``key``; returns whether there are any. Collective."""
    if key not in _top_level_keys(path):
        return False
    engine.load_optimizer_checkpoint(optimizer, path, key)
    return True


def count_sharded_optimizers(path: Path) -> int:
    """How many optimizers' states a Trainer's checkpoint directory holds."""
    return sum(key.startswith("optimizer_") for key in _top_level_keys(path))


def _top_level_keys(path: Path) -> set[str]:
    metadata = dcp.FileSystemReader(path).read_metadata()
    return {name.partition(".")[0] for name in metadata.state_dict_metadata}


def read_whole_model(path: Path) -> dict[str, torch.Tensor]:
    """All of the model's tensors, whole, on the CPU. Local; needs no process group."""
    entries = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    for prefix in ("model.", "state_dict."):
        tensors = {
            name: torch.empty(entry.size, dtype=entry.properties.dtype)
            for name, entry in entries.items()
            if name.startswith(prefix) and isinstance(entry, TensorStorageMetadata)
        }
        if tensors:
            dcp.load(tensors, checkpoint_id=path, no_dist=True)
            return {name.removeprefix(prefix): value for name, value in tensors.items()}
    raise ValueError(f"the checkpoint {path} holds no model, only {sorted(_top_level_keys(path))}")
