"""Killed at any moment, a save leaves one whole checkpoint."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

from sshsdp.checkpoint import store
from tests.checkpoint.training import make_sshsdp
from tests.support.workers import WorkersFailedError

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def save_number(path: Path, number: int) -> None:
    """A checkpoint in which everything is ``number``."""
    store.save(lambda: {"x": torch.full((5,), float(number))}, path, {"number": number})


def load_number(path: Path) -> int:
    """The number in a checkpoint, which must be the same everywhere."""
    state = {"x": torch.empty(5)}
    store.read(state, path)
    number = store.load_extra(path)["number"]
    assert state["x"].tolist() == [number] * 5
    return number


def save_and_die(path: Path, num_operations: int) -> None:
    """Replace the checkpoint, and die before the operation on files after so many."""
    left = num_operations

    def dying(function: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left -= 1
            return function(*args, **kwargs)

        return run

    os.fsync, shutil.rmtree = dying(os.fsync), dying(shutil.rmtree)
    for name in ("rename", "mkdir", "write_bytes"):
        setattr(Path, name, dying(getattr(Path, name)))
    save_number(path, 2)


def die_after(path: Path, num_operations: int) -> bool:
    """Whether the process died on the way."""
    process = multiprocessing.get_context("fork").Process(
        target=save_and_die, args=(path, num_operations)
    )
    process.start()
    process.join()
    assert process.exitcode in (0, -signal.SIGKILL)
    return process.exitcode != 0


def test_killed_before_any_operation_on_files_a_save_leaves_a_whole_checkpoint(
    tmp_path: Path,
) -> None:
    found = []
    while True:
        folder = tmp_path / str(len(found))
        path = folder / "checkpoint"
        save_number(path, 1)
        died = die_after(path, len(found))
        found.append(load_number(path))
        save_number(path, 3)
        assert load_number(path) == 3
        assert [entry.name for entry in folder.iterdir()] == ["checkpoint"]
        if not died:
            break
    # The old one until a certain moment, the new one from then on.
    assert found == sorted(found)
    assert (found[0], found[-1]) == (1, 2)
    assert len(found) > 8


def test_killed_in_its_first_save_a_program_leaves_nothing_that_looks_like_a_checkpoint(
    tmp_path: Path,
) -> None:
    """vllm-project/speculators#739: an interrupted save was picked for a resume."""
    path = tmp_path / "checkpoint"
    assert die_after(path, 3)
    assert [entry.name for entry in tmp_path.iterdir()] == [".checkpoint.saving"]
    with pytest.raises(FileNotFoundError, match="not a complete distributed checkpoint"):
        store.read_metadata(path)


def save_twice(folder: Path, dies: bool) -> None:
    """The second save loses rank 1 while it writes."""
    _, attached, engine = make_sshsdp("adamw")
    engine.save(folder / "checkpoint", attached, extra={"number": 1})
    if dies and dist.get_rank() == 1:
        os.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL)
    engine.save(folder / "checkpoint", attached, extra={"number": 2})


def load(folder: Path) -> Any:
    """The number that a resumed program sees."""
    _, attached, engine = make_sshsdp("adamw")
    return engine.load(folder / "checkpoint", attached)["number"]


def test_a_rank_that_dies_while_it_writes_costs_no_checkpoint(
    tmp_path: Path, workers: Callable[[int], Any]
) -> None:
    """KempnerInstitute/KempnerForge#102: the last good checkpoint went before the new was whole."""
    with pytest.raises(WorkersFailedError, match="rank 1 of 2 the process died"):
        workers(2).run(save_twice, tmp_path, True)
    assert workers(2).run(load, tmp_path) == [1, 1]
    workers(2).run(save_twice, tmp_path, False)
    assert workers(2).run(load, tmp_path) == [2, 2]
    assert [entry.name for entry in tmp_path.iterdir()] == ["checkpoint"]
