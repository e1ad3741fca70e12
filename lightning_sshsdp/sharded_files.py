"""Checkpoint directories: shards, and a ``meta.pt`` for everything that is no shard.

How one checkpoint replaces another is the engine's business (`sshsdp.write_checkpoint`).
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import sshsdp

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__all__ = [
    "check_local",
    "count_sharded_optimizers",
    "is_sharded_checkpoint",
    "load_sharded_model",
    "load_sharded_optimizer",
    "read_metadata",
    "read_whole_model",
    "save_sharded",
]

METADATA_FILE = "meta.pt"


def is_sharded_checkpoint(path: Path) -> bool:
    """Whether a path is a directory that `save_sharded` (or Lightning) wrote.

    Raises:
        ValueError: It is another directory.
    """
    if path.is_dir() and not (path / METADATA_FILE).is_file():
        raise ValueError(
            f"{path} is a directory without {METADATA_FILE}, and so no checkpoint that the Trainer "
            "or Fabric wrote; one that engine.save() or torch.distributed.checkpoint wrote is read "
            "by engine.load()"
        )
    return path.is_dir()


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


def save_sharded(
    caller: str, path: Path, states: Mapping[str, Any], metadata: Mapping[str, Any]
) -> None:
    """Write a directory. Collective; complete or absent.

    Args:
        caller: What the user called, for messages.
        path: Where; a file or a checkpoint directory there is replaced. Rank 0's counts.
        states: Shards by key.
        metadata: Everything else; rank 0's is written.

    Raises:
        RuntimeError: A rank could not write or did not come, or a directory that is no checkpoint
            is in the way. What was at ``path`` is still there.
    """

    def make() -> tuple[Mapping[str, Any], dict[str, bytes]]:
        if dist.get_rank() != 0:
            return states, {}
        buffer = io.BytesIO()
        torch.save(dict(metadata), buffer)
        return states, {METADATA_FILE: buffer.getvalue()}

    sshsdp.write_checkpoint(caller, path, make, replaces_files=True)


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
    engine.load_model_checkpoint(path, _model_key(path, key), strict=strict)


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


def read_whole_model(path: Path) -> dict[str, Any]:
    """The model's state dict, whole, on the CPU. Local; needs no process group."""
    return sshsdp.read_checkpoint(path, _model_key(path, "model"))


def _model_key(path: Path, key: str) -> str:
    # Lightning's ModelParallelStrategy calls the model otherwise than its FSDPStrategy.
    names = _top_level_keys(path)
    return "state_dict" if key == "model" and key not in names and "state_dict" in names else key


def _top_level_keys(path: Path) -> set[str]:
    metadata = dcp.FileSystemReader(path).read_metadata()
    return {name.partition(".")[0] for name in metadata.state_dict_metadata}
