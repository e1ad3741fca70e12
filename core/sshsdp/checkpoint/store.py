"""Writing and reading checkpoint directories, complete or not at all.

A save writes a hidden directory beside the target and renames it at the end. The checkpoint that
was there before is moved aside just before and removed just after, so at every moment one whole
checkpoint is on disk::

    .name.saving  --rename-->  name          (written by every rank, then synchronised)
    name          --rename-->  .name.old     (if there was one; removed at the end)

The directory must be on a file system that all ranks see.
"""

from __future__ import annotations

import io
import logging
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from sshsdp.checkpoint.rendezvous import on_rank_0, together

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch.distributed.checkpoint.metadata import Metadata

__all__ = ["load_extra", "read", "read_metadata", "save"]

logger = logging.getLogger(__name__)

EXTRA_FILE = "extra.pt"
METADATA_FILE = ".metadata"


def save(
    make_state: Callable[[], Mapping[str, Any]], path: str | Path, extra: Mapping[str, Any]
) -> None:
    """Write a checkpoint directory. Collective.

    Args:
        make_state: Gives the nested dict of tensors and picklable values, with the same keys on
            every rank. Local; if it fails on one rank, no rank writes.
        path: The directory; a checkpoint that is there is replaced, whole, once the new one is
            complete. A link is followed.
        extra: Anything that ``torch.load(weights_only=True)`` reads back; rank 0's is written.

    Raises:
        RuntimeError: Some rank failed or did not come, or what is at ``path`` is no checkpoint.
            What was at ``path`` before is still there.
        ValueError: ``extra`` could not be read back.
    """
    path = Path(os.path.realpath(path))
    saving = path.parent / f".{path.name}.saving"
    state, extra_bytes = together("engine.save()", lambda: (make_state(), _serialise(extra)))

    def prepare() -> None:
        _recover(path)
        _refuse_to_replace(path)
        shutil.rmtree(saving, ignore_errors=True)
        saving.mkdir(parents=True)

    def commit() -> None:
        (saving / EXTRA_FILE).write_bytes(extra_bytes)
        _synchronise(saving)
        old = _old(path)
        shutil.rmtree(old, ignore_errors=True)
        if path.exists():
            path.rename(old)
        saving.rename(path)
        _flush(path.parent)
        shutil.rmtree(old, ignore_errors=True)

    try:
        on_rank_0(prepare, f"preparing {saving}")
        dcp_save(dict(state), checkpoint_id=saving, no_dist=not dist.is_initialized())
        on_rank_0(commit, f"committing {path}")
    except BaseException as error:
        if not dist.is_initialized() or dist.get_rank() == 0:
            _recover(path)
            # A full disk must not stay full.
            shutil.rmtree(saving, ignore_errors=True)
        if isinstance(error, CheckpointException):
            raise _as_error(f"saving {path}", error) from error
        raise


def _serialise(extra: Mapping[str, Any]) -> bytes:
    """What `load_extra` will read, tried out before hours of work depend on it."""
    buffer = io.BytesIO()
    try:
        torch.save(dict(extra), buffer)
        buffer.seek(0)
        torch.load(buffer, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ValueError(
            "extra must hold numbers, strings, tensors and containers of them only, because it is "
            "read back with torch.load(weights_only=True), which refuses it"
        ) from error
    return buffer.getvalue()


def _refuse_to_replace(path: Path) -> None:
    """Keep a wrong path, such as the folder of all checkpoints, from being wiped."""
    if path.is_dir():
        if any(path.iterdir()) and not (path / METADATA_FILE).exists():
            raise FileExistsError(
                f"{path} is a directory with other things than a checkpoint in it, which a save "
                "would remove: give the checkpoint a directory of its own"
            )
    elif path.exists():
        raise FileExistsError(f"{path} is a file: give the checkpoint a directory of its own")


def read(state_dict: dict[str, Any], path: str | Path) -> None:
    """Read into the tensors of ``state_dict``, and replace its other values. Collective.

    Call it on every rank, after `together`.

    Raises:
        RuntimeError: Some rank failed.
    """
    try:
        dcp_load(
            state_dict,
            checkpoint_id=_existing(path),
            planner=DefaultLoadPlanner(),
            no_dist=not dist.is_initialized(),
        )
    except CheckpointException as error:
        raise _as_error(
            f"loading {path} (some values may have been read: load again before training)", error
        ) from error


def load_extra(path: str | Path) -> dict[str, Any]:
    """The ``extra`` of a checkpoint; empty if there is none (an FSDP2 checkpoint, say)."""
    file = _existing(path) / EXTRA_FILE
    if not file.exists():
        return {}
    extra: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
    return extra


def read_metadata(path: str | Path) -> Metadata:
    """What a checkpoint holds: flattened names, shapes, dtypes and chunks.

    Raises:
        FileNotFoundError: There is no complete checkpoint at ``path``.
    """
    return FileSystemReader(_existing(path)).read_metadata()


def _existing(path: str | Path) -> Path:
    path = Path(os.path.realpath(path))
    found = path if path.exists() else _old(path)
    if not (found / METADATA_FILE).exists():
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
    for file in directory.iterdir():
        _flush(file)
    _flush(directory)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _as_error(what: str, error: CheckpointException) -> RuntimeError:
    # CheckpointException derives from BaseException: `except Exception` would miss it.
    causes = "; ".join(f"rank {rank}: {failure[0]!r}" for rank, failure in error.failures.items())
    return RuntimeError(f"{what} failed: {causes}")
