"""Where a checkpoint is on disk: complete or absent, whenever the program is killed.

A save writes beside the target and renames at the end. What was there before is moved aside just
before and removed just after, so at every moment one whole checkpoint is on disk::

    .name.saving  --rename-->  name          (written by every rank, then synchronised)
    name          --rename-->  .name.old     (if there was one; removed at the end)
"""

from __future__ import annotations

import logging
import os
import shutil
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["CheckpointPlace", "find_checkpoint"]

logger = logging.getLogger(__name__)


class CheckpointPlace:
    """The paths of one checkpoint, and the moves between them. Local; for one rank to call."""

    def __init__(self, path: str | Path) -> None:
        """Follow links; touch nothing."""
        self.path = Path(os.path.realpath(path))
        self.unfinished = self.path.parent / f".{self.path.name}.saving"
        self._old = self.path.parent / f".{self.path.name}.old"

    def find(self) -> Path:
        """Where the checkpoint is now: aside, if a save ended between its two renames."""
        if self.path.exists() or not self._old.exists():
            return self.path
        if not dist.is_initialized() or dist.get_rank() == 0:
            logger.warning(
                "%s was being replaced when a save ended early: reading %s", self.path, self._old
            )
        return self._old

    def recover(self) -> None:
        """Put a checkpoint that an earlier save left aside back in its place."""
        if not self.path.exists() and self._old.exists():
            self._old.rename(self.path)

    def begin(self) -> None:
        """Make an empty directory to write to."""
        _remove(self.unfinished)
        self.unfinished.mkdir(parents=True)

    def commit(self) -> None:
        """Put what was written in place of what is there."""
        for file in self.unfinished.iterdir():
            _flush(file)
        _flush(self.unfinished)
        with self.cleared():
            self.unfinished.rename(self.path)
            _flush(self.path.parent)

    def abandon(self) -> None:
        """Remove what was written: a full disk must not stay full."""
        self.recover()
        _remove(self.unfinished)

    @contextmanager
    def cleared(self) -> Iterator[None]:
        """Have nothing at the path; what was there is back if the block fails, else removed."""
        self.recover()
        _remove(self._old)
        if self.path.exists():
            self.path.rename(self._old)
        try:
            yield
        except BaseException:
            if self._old.exists():
                _remove(self.path)
                self.recover()
            raise
        _remove(self._old)


def find_checkpoint(path: str | Path) -> Path:
    """The path at which a checkpoint is to be read.

    It is another one than ``path`` if a program was killed just as it replaced the checkpoint, and
    ``path`` itself if there is nothing at all.
    """
    place = CheckpointPlace(path)
    found = place.find()
    return Path(path) if found == place.path else found


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _flush(path: Path) -> None:
    """Have a file, or the names in a directory, on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
