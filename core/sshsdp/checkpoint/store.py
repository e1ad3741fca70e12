"""Writing and reading checkpoints of all ranks, complete or not at all.

How a checkpoint replaces another is told in `sshsdp.checkpoint.place`. The directory must be on a
file system that all ranks see.
"""

from __future__ import annotations

import contextlib
import io
import warnings
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from sshsdp.checkpoint.model_state import listed, template, top_level_names
from sshsdp.checkpoint.place import CheckpointPlace, find_checkpoint
from sshsdp.comm.rendezvous import on_rank_0, together

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from torch.distributed.checkpoint.metadata import Metadata

__all__ = [
    "checkpoint_directory",
    "load_extra",
    "read",
    "read_checkpoint",
    "read_metadata",
    "save",
    "write_checkpoint",
    "write_checkpoint_file",
]

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
            complete. A link is followed. Rank 0's counts.
        extra: Anything that ``torch.load(weights_only=True)`` reads back; rank 0's is written.

    Raises:
        RuntimeError: Some rank failed or did not come, or what is at ``path`` is no checkpoint.
            What was at ``path`` before is still there.
        ValueError: ``extra`` could not be read back.
    """
    write_checkpoint("engine.save()", path, lambda: (make_state(), {EXTRA_FILE: _serialise(extra)}))


def write_checkpoint(
    caller: str,
    path: str | Path,
    make: Callable[[], tuple[Mapping[str, Any], Mapping[str, bytes]]],
    *,
    replaces_files: bool = False,
) -> None:
    """Write a checkpoint directory with files of the caller's own in it. Collective.

    Args:
        caller: What the user called, for messages.
        path: The directory; rank 0's counts.
        make: Gives the nested dict of tensors and picklable values, with the same keys on every
            rank, and files by name, of which rank 0's are written. Local; if it fails on one rank,
            no rank writes.
        replaces_files: Whether a file at ``path`` may be replaced.

    Raises:
        RuntimeError: Some rank failed or did not come, or what is at ``path`` is no checkpoint.
            What was at ``path`` before is still there.
    """
    state, files = together(caller, make)
    place = CheckpointPlace(_of_rank_0(path))

    def prepare() -> None:
        place.recover()
        _refuse_to_replace(place.path, replaces_files)
        place.begin()

    def commit() -> None:
        for name, content in files.items():
            (place.unfinished / name).write_bytes(content)
        place.commit()

    try:
        on_rank_0(prepare, f"preparing {place.unfinished}")
        dcp_save(dict(state), checkpoint_id=place.unfinished, no_dist=not dist.is_initialized())
        on_rank_0(commit, f"committing {place.path}")
    except BaseException as error:
        if not dist.is_initialized() or dist.get_rank() == 0:
            place.abandon()
        if isinstance(error, CheckpointException):
            raise _as_error(f"saving {place.path}", error) from error
        raise


@contextlib.contextmanager
def checkpoint_directory(
    caller: str, path: str | Path, keep_others: Callable[[Path, Path], None]
) -> Iterator[Path]:
    """A directory for a checkpoint of several parts, complete or absent as a whole. Collective.

    Every rank writes its files inside the block. At its end they all meet, and what has been
    written takes the place of what is at ``path``; if some rank failed, nothing does.

    Args:
        caller: What the user called, for messages.
        path: The directory; rank 0's counts.
        keep_others: Called on rank 0 with the directory that is to be replaced and the new one:
            copies what in the old one is none of the caller's.

    Yields:
        Where to write.

    Raises:
        RuntimeError: Some rank failed or did not come. What was at ``path`` before is still there.
    """
    together(caller, lambda: None)
    place = CheckpointPlace(_of_rank_0(path))

    def begin() -> None:
        place.recover()
        if place.path.exists() and not place.path.is_dir():
            raise NotADirectoryError(f"{place.path} is a file")
        place.begin()

    def finish(failure: Exception | None) -> None:
        if failure is not None:
            raise failure

    def commit() -> None:
        if place.path.exists():
            keep_others(place.path, place.unfinished)
        place.commit()

    failure = None
    try:
        on_rank_0(begin, f"preparing {place.unfinished}")
        try:
            yield place.unfinished
        except Exception as error:
            failure = error
        together(caller, lambda: finish(failure))
        on_rank_0(commit, f"committing {place.path}")
    except BaseException:
        if not dist.is_initialized() or dist.get_rank() == 0:
            place.abandon()
        raise


def write_checkpoint_file(caller: str, path: str | Path, write: Callable[[], None]) -> None:
    """Have rank 0 write a checkpoint that is one file. Collective.

    Args:
        caller: What the user called, for messages.
        path: Where; a checkpoint directory there is replaced.
        write: Writes the file to ``path``, where no directory is in its way.

    Raises:
        RuntimeError: Rank 0 failed, some rank did not come, or another directory is in the way.
            What was at ``path`` before is still there.
    """
    together(caller, lambda: None)
    place = CheckpointPlace(path)

    def replace() -> None:
        place.recover()
        if not place.path.is_dir():
            write()
            return
        if not (place.path / METADATA_FILE).exists():
            raise IsADirectoryError(f"{path} is a directory, and not a checkpoint")
        with place.cleared():
            write()

    on_rank_0(replace, f"saving {path}")


def _of_rank_0(path: str | Path) -> str | Path:
    # Paths with a time in them differ between ranks.
    given = [path]
    if dist.is_initialized():
        dist.broadcast_object_list(given, src=0)
    return given[0]


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


def _refuse_to_replace(path: Path, replaces_files: bool) -> None:
    """Keep a wrong path, such as the folder of all checkpoints, from being wiped."""
    if path.is_dir():
        if any(path.iterdir()) and not (path / METADATA_FILE).exists():
            raise FileExistsError(
                f"{path} is a directory with other things than a checkpoint in it, which a save "
                "would remove: give the checkpoint a directory of its own"
            )
    elif path.exists() and not replaces_files:
        raise FileExistsError(f"{path} is a file: give the checkpoint a directory of its own")


def read(state_dict: dict[str, Any], path: str | Path) -> None:
    """Read into the tensors of ``state_dict``, and replace its other values. Collective.

    Call it on every rank, after `together`.

    Raises:
        RuntimeError: Some rank failed.
    """
    _read(state_dict, path, no_dist=not dist.is_initialized())


def _read(state_dict: dict[str, Any], path: str | Path, *, no_dist: bool) -> None:
    try:
        dcp_load(
            state_dict,
            checkpoint_id=_existing(path),
            planner=DefaultLoadPlanner(),
            no_dist=no_dist,
        )
    except CheckpointException as error:
        raise _as_error(
            f"loading {path} (some values may have been read: load again before training)", error
        ) from error


def read_checkpoint(path: str | Path, key: str = "model") -> dict[str, Any]:
    """What a checkpoint directory holds under ``key``, whole, on the CPU.

    Local: needs no model, no process group and no other rank.

    Raises:
        FileNotFoundError: There is no complete checkpoint at ``path``.
        ValueError: It holds nothing under ``key``.
    """
    metadata = read_metadata(path)
    whole = template(metadata, key)
    if not whole:
        raise ValueError(
            f"the checkpoint {path} holds nothing under {key!r}; it has "
            f"{listed(top_level_names(metadata))}"
        )
    state: dict[str, Any] = {key: whole}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        _read(state, path, no_dist=True)
    found: dict[str, Any] = state[key]
    return found


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
    found = find_checkpoint(path)
    if not (found / METADATA_FILE).exists():
        raise FileNotFoundError(
            f"{path} is not a complete distributed checkpoint: it has no .metadata file"
        )
    return found


def _as_error(what: str, error: CheckpointException) -> RuntimeError:
    # CheckpointException derives from BaseException: `except Exception` would miss it.
    causes = "; ".join(f"rank {rank}: {failure[0]!r}" for rank, failure in error.failures.items())
    return RuntimeError(f"{what} failed: {causes}")
