"""A checkpoint is complete or absent, and misuse is told on every rank."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import FileSystemWriter

import sshsdp
from sshsdp.checkpoint import rendezvous, store
from tests.checkpoint.training import make_sshsdp, train
from tests.support.workers import WorkersFailedError

if TYPE_CHECKING:
    from collections.abc import Callable


def failing_save(folder: Path) -> tuple[str, bool, list[str]]:
    """A second save fails on rank 1 alone; is the first one still there?"""
    model, attached, engine = make_sshsdp("adamw")
    path = folder / "checkpoint"
    engine.save(path, attached, extra={"number": 1})
    before = engine.full_state_dict(rank0_only=False)
    train(model, attached, 0, 1)
    original = FileSystemWriter.write_data

    def write_data(*args: Any) -> Any:
        if dist.get_rank() == 1:
            raise OSError("no space left on device")
        return original(*args)

    FileSystemWriter.write_data = write_data
    try:
        engine.save(path, attached, extra={"number": 2})
        message = "no error"
    except RuntimeError as error:
        message = str(error)
    finally:
        FileSystemWriter.write_data = original
    number = engine.load(path, attached)["number"]
    after = engine.full_state_dict(rank0_only=False)
    same = number == 1 and all(torch.equal(before[key], after[key]) for key in before)
    return message, same, sorted(entry.name for entry in folder.iterdir())


def test_a_failed_save_keeps_the_old_checkpoint(
    tmp_path: Path, workers: Callable[[int], Any]
) -> None:
    for message, same, _ in workers(2).run(failing_save, tmp_path):
        assert "rank 1: OSError('no space left on device')" in message
        assert same


def save_twice(folder: Path) -> list[str]:
    """Replace a checkpoint, with leftovers of a crashed save in the way."""
    _, attached, engine = make_sshsdp("adamw")
    if dist.get_rank() == 0:
        (folder / ".checkpoint.saving").mkdir()
        (folder / ".checkpoint.saving" / "leftover").write_text("x")
    engine.save(folder / "checkpoint", attached)
    engine.save(folder / "checkpoint", attached)
    return sorted(entry.name for entry in folder.iterdir())


def test_a_save_replaces_a_checkpoint_and_leaves_nothing_else(
    tmp_path: Path, workers: Callable[[int], Any]
) -> None:
    assert workers(2).run(save_twice, tmp_path)[0] == ["checkpoint"]


def load_after_a_crash(folder: Path) -> dict[str, Any]:
    """A save that ended between its two renames has left the old checkpoint aside."""
    _, attached, engine = make_sshsdp("adamw")
    engine.save(folder / "checkpoint", attached, extra={"kept": True})
    dist.barrier()
    if dist.get_rank() == 0:
        (folder / "checkpoint").rename(folder / ".checkpoint.old")
    dist.barrier()
    return engine.load(folder / "checkpoint", attached)


def test_a_crash_between_the_renames_loses_nothing(
    tmp_path: Path, workers: Callable[[int], Any]
) -> None:
    assert workers(2).run(load_after_a_crash, tmp_path)[0] == {"kept": True}


def save_on_rank_0_only(folder: Path) -> str:
    """What happens if only the main rank saves."""
    _, attached, engine = make_sshsdp("adamw")
    rendezvous.MISSING_RANKS_TIMEOUT = timedelta(seconds=2)
    try:
        if dist.get_rank() == 0:
            engine.save(folder / "checkpoint", attached)
    except RuntimeError as error:
        return str(error)
    finally:
        rendezvous.MISSING_RANKS_TIMEOUT = timedelta(minutes=5)
        dist.barrier()
    return ""


def test_a_save_on_one_rank_names_the_missing_ones(
    tmp_path: Path, workers: Callable[[int], Any]
) -> None:
    """huggingface/accelerate#2000: `if is_main: save()` hung until the process group's timeout."""
    message = workers(2).run(save_on_rank_0_only, tmp_path)[0]
    assert "ranks [1]" in message


def load_wrong(folder: Path, case: str) -> str:
    """Errors of loading a checkpoint into something else."""
    _, attached, engine = make_sshsdp("adamw")
    engine.save(folder / "checkpoint", attached)
    model = nn.Linear(8, 1)
    update = sshsdp.UpdatePolicy()
    if case == "narrow":
        torch.manual_seed(0)
        from tests.checkpoint.training import Odd

        model = Odd()
        update = sshsdp.UpdatePolicy(dtype=torch.bfloat16)
    elif case == "shape":
        model = nn.ModuleDict({"head": nn.Linear(8, 2)})
    other = sshsdp.shard(model, update=update)
    try:
        if case == "absent":
            other.load(folder / "nothing")
        else:
            other.load(folder / "checkpoint", strict=case != "shape")
    except (ValueError, FileNotFoundError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("names", "ValueError: engine.load(): missing in the checkpoint: weight, bias"),
        ("shape", "ValueError: engine.load(): 'head.weight' has shape (1, 8)"),
        ("narrow", "would be rounded to torch.bfloat16"),
        ("absent", "FileNotFoundError"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(
    tmp_path: Path, workers: Callable[[int], Any], case: str, expected: str
) -> None:
    for message in workers(2).run(load_wrong, tmp_path, case):
        assert expected in message


def load_mid_step(folder: Path) -> str:
    """Loading between forward and backward."""
    model, attached, engine = make_sshsdp("adamw")
    engine.save(folder / "checkpoint", attached)
    message = ""

    def load_now(*_: Any) -> None:
        nonlocal message
        try:
            engine.load(folder / "checkpoint", attached)
        except RuntimeError as error:
            message = str(error)

    handle = model.head.register_forward_hook(load_now)
    train(model, attached, 0, 1)
    handle.remove()
    return message


def test_loading_inside_a_step_is_refused(tmp_path: Path, workers: Callable[[int], Any]) -> None:
    """pytorch/pytorch#117421: state loaded between forward and backward was ignored."""
    assert "between forward and backward" in workers(2).run(load_mid_step, tmp_path)[0]


def test_workers_report_failures(workers: Callable[[int], Any]) -> None:
    with pytest.raises(WorkersFailedError):
        workers(2).run(load_wrong, Path("/proc/none"), "names")
