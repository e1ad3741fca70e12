"""Writing and reading checkpoint directories, complete or not at all.

A save writes a hidden directory beside the target and renames it at the end. The checkpoint that
was there before is moved aside just before and removed just after, so at every moment one whole
checkpoint is on disk::

    .name.saving  --rename-->  name          (written by every rank, then synchronised)
    name          --rename-->  .name.old     (if there was one; removed at the end)
"""

from __future__ import annotations

import logging
import os
import shutil
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.distributed.checkpoint.metadata import Metadata

__all__ = ["MISSING_RANKS_TIMEOUT", "load", "load_extra", "read_metadata", "save"]

logger = logging.getLogger(__name__)

EXTRA_FILE = "extra.pt"

# How long a save or load waits for ranks that did not call it.
MISSING_RANKS_TIMEOUT = timedelta(minutes=5)


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _meet(caller: str) -> None:
    """Wait until every rank is here.

    Raises:
        RuntimeError: Some ranks did not come; they are named.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    store = dist.distributed_c10d._get_default_store()
    # Each rank counts its meetings in the store, which lives as long as the process group.
    own_count = f"sshsdp/meetings/{_rank()}"
    meeting = f"sshsdp/meeting/{store.add(own_count, 1)}"
    keys = [f"{meeting}/{rank}" for rank in range(dist.get_world_size())]
    store.set(keys[_rank()], "here")
    try:
        store.wait(keys, MISSING_RANKS_TIMEOUT)
    except Exception as error:
        store.add(own_count, -1)
        missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
        raise RuntimeError(
            f"{caller} is collective, and ranks {missing} did not call it within "
            f"{MISSING_RANKS_TIMEOUT.total_seconds():.0f} s: call it on every rank, not on rank 0 "
            "only"
        ) from error


def _on_rank_0(action: Any, what: str) -> None:
    """Run ``action`` on rank 0; raise its failure on every rank."""
    failure: list[Any] = [None]
    if _rank() == 0:
        try:
            action()
        except Exception as error:
            failure[0] = f"{type(error).__name__}: {error}"
    if dist.is_initialized():
        dist.broadcast_object_list(failure, src=0)
    if failure[0] is not None:
        raise RuntimeError(f"{what} failed on rank 0: {failure[0]}")


def save(state_dict: Mapping[str, Any], path: str | Path, extra: Mapping[str, Any]) -> None:
    """Write a checkpoint directory. Collective.

    Args:
        state_dict: Nested dict of tensors and picklable values, the same keys on every rank.
        path: The directory; a checkpoint that is there is replaced once the new one is complete.
        extra: Anything that ``torch.load(weights_only=True)`` reads back; rank 0's is written.

    Raises:
        RuntimeError: Some rank failed or did not come. What was at ``path`` before is still there.
    """
    path = Path(path)
    _meet("engine.save()")
    saving = path.parent / f".{path.name}.saving"

    def prepare() -> None:
        _recover(path)
        shutil.rmtree(saving, ignore_errors=True)
        saving.mkdir(parents=True)

    _on_rank_0(prepare, f"preparing {saving}")
    try:
        dcp_save(dict(state_dict), checkpoint_id=saving, no_dist=not dist.is_initialized())
    except CheckpointException as error:
        raise _as_error(f"saving {path}", error) from error

    def commit() -> None:
        torch.save(dict(extra), saving / EXTRA_FILE)
        _synchronise(saving)
        old = _old(path)
        shutil.rmtree(old, ignore_errors=True)
        if path.exists():
            path.rename(old)
        saving.rename(path)
        _synchronise(path.parent)
        if old.is_dir():
            shutil.rmtree(old)
        else:
            old.unlink(missing_ok=True)

    _on_rank_0(commit, f"committing {path}")


def load(state_dict: dict[str, Any], path: str | Path) -> None:
    """Read into the tensors of ``state_dict``, and replace its other values. Collective.

    Raises:
        RuntimeError: Some rank failed or did not come.
    """
    _meet("engine.load()")
    try:
        dcp_load(
            state_dict,
            checkpoint_id=_existing(path),
            planner=DefaultLoadPlanner(),
            no_dist=not dist.is_initialized(),
        )
    except CheckpointException as error:
        raise _as_error(f"loading {path}", error) from error


def load_extra(path: str | Path) -> dict[str, Any]:
    """The ``extra`` of a checkpoint; empty if there is none (an FSDP2 checkpoint, say)."""
    file = _existing(path) / EXTRA_FILE
    if not file.exists():
        return {}
    extra: dict[str, Any] = torch.load(file, weights_only=True)
    return extra


def read_metadata(path: str | Path) -> Metadata:
    """What a checkpoint holds: flattened names, shapes, dtypes and chunks.

    Raises:
        FileNotFoundError: There is no complete checkpoint at ``path``.
    """
    return FileSystemReader(_existing(path)).read_metadata()


def _existing(path: str | Path) -> Path:
    path = Path(path)
    found = path if path.exists() else _old(path)
    if not (found / ".metadata").exists():
        raise FileNotFoundError(
            f"{path} is not a complete distributed checkpoint: it has no .metadata file"
        )
    if found != path:
        logger.warning("%s was being replaced when a save ended early: reading %s", path, found)
    return found


def _old(path: Path) -> Path:
    return path.parent / f".{path.name}.old"


def _recover(path: Path) -> None:
    # A save that ended between its two renames has left the previous checkpoint aside.
    if not path.exists() and _old(path).exists():
        _old(path).rename(path)


def _synchronise(directory: Path) -> None:
    """Have the files of a directory, and their names, on disk."""
    for file in (*directory.iterdir(), directory):
        if file.is_file() or file == directory:
            descriptor = os.open(file, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


def _as_error(what: str, error: CheckpointException) -> RuntimeError:
    # CheckpointException derives from BaseException: `except Exception` would miss it.
    causes = "; ".join(f"rank {rank}: {failure[0]!r}" for rank, failure in error.failures.items())
    return RuntimeError(f"{what} failed: {causes}")
