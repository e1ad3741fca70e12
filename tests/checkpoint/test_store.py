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
from sshsdp.checkpoint import store
from sshsdp.comm import rendezvous
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
    for message, same, names in workers(2).run(failing_save, tmp_path):
        assert "rank 1: OSError('no space left on device')" in message
        assert same
        assert names == ["checkpoint"]


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


def write_parts(folder: Path, fails: bool) -> list[str]:
    """A checkpoint of two parts, one of each rank; rank 1 may fail after it has written."""

    def keep_others(old: Path, new: Path) -> None:
        (new / "kept").write_text((old / "0").read_text())

    with sshsdp.checkpoint_directory("save_parts()", folder / "parts", keep_others) as path:
        (path / str(dist.get_rank())).write_text(str(fails))
        if fails and dist.get_rank() == 1:
            raise OSError("disk full")
    return sorted(entry.name for entry in (folder / "parts").iterdir())


def test_a_checkpoint_of_parts_is_complete_or_absent(
    tmp_path: Path, workers: Callable[[int], Any]
) -> None:
    with pytest.raises(WorkersFailedError, match=r"failed on other ranks: rank 1: OSError: disk"):
        workers(2).run(write_parts, tmp_path, True)
    assert not [*tmp_path.iterdir()]
    assert workers(2).run(write_parts, tmp_path, False) == [["0", "1"]] * 2
    with pytest.raises(WorkersFailedError, match="disk full"):
        workers(2).run(write_parts, tmp_path, True)
    assert [entry.name for entry in tmp_path.iterdir()] == ["parts"]
    assert (tmp_path / "parts" / "1").read_text() == "False"
    assert workers(2).run(write_parts, tmp_path, False)[0] == ["0", "1", "kept"]


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


class Unknown:
    """Something that ``torch.load(weights_only=True)`` refuses."""


def save_to(folder: Path, target: str, extra: Any) -> tuple[str, list[str]]:
    """Save to a path where something is already; the error, and what is there afterwards."""
    _, attached, engine = make_sshsdp("adamw")
    engine.save(folder / "checkpoint", attached, extra={"number": 1})
    message = ""
    try:
        engine.save(folder / target, attached, extra=extra)
    except (RuntimeError, ValueError) as error:
        message = str(error)
    return message, sorted(str(entry.relative_to(folder)) for entry in folder.rglob("*"))


@pytest.mark.parametrize(
    ("target", "extra", "expected"),
    [
        ("others", {}, "is a directory with other things than a checkpoint in it"),
        ("file", {}, "is a file"),
        ("checkpoint", {"object": Unknown()}, "extra must hold numbers, strings, tensors"),
    ],
)
def test_a_save_that_would_destroy_or_be_unreadable_changes_nothing(
    tmp_path: Path, workers: Callable[[int], Any], target: str, extra: Any, expected: str
) -> None:
    (tmp_path / "others").mkdir()
    (tmp_path / "others" / "precious.txt").write_text("x")
    (tmp_path / "file").write_text("x")
    for message, names in workers(2).run(save_to, tmp_path, target, extra):
        assert expected in message
        assert {"file", "others", "others/precious.txt"} <= set(names)
        assert not any(".saving" in name for name in names)
    assert store.load_extra(tmp_path / "checkpoint") == {"number": 1}


def test_a_save_follows_a_link(tmp_path: Path, workers: Callable[[int], Any]) -> None:
    (tmp_path / "latest").symlink_to(tmp_path / "checkpoint")
    for message, names in workers(2).run(save_to, tmp_path, "latest", {"number": 2}):
        assert not message
        assert {"checkpoint", "latest"} == {name.partition("/")[0] for name in names}
    assert (tmp_path / "latest").is_symlink()
    assert store.load_extra(tmp_path / "checkpoint") == {"number": 2}


def load_frozen(folder: Path) -> tuple[torch.dtype, bool]:
    """A checkpoint of fp32 weights into a model whose frozen weights are held in bf16."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False))
    expected = model[1].weight.detach().clone()
    plain = sshsdp.shard(
        nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)),
        runtime=sshsdp.RuntimePolicy(dtype=torch.float32),
    )
    plain.load_full_state_dict(model.state_dict())
    plain.save(folder / "checkpoint")
    engine = sshsdp.shard(model, runtime=sshsdp.RuntimePolicy(dtype=torch.bfloat16))
    engine.load(folder / "checkpoint")
    frozen = engine.full_state_dict(rank0_only=False)["1.weight"]
    return frozen.dtype, torch.equal(frozen, expected.bfloat16())


def test_frozen_weights_are_rounded_at_load_as_at_the_start(
    tmp_path: Path, workers: Callable[[int], Any]
) -> None:
    assert workers(2).run(load_frozen, tmp_path) == [(torch.bfloat16, True)] * 2


class Counter(nn.Module):
    """A buffer with whole numbers."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("count", torch.tensor(3_000_000_001).to(dtype))


def load_narrower_buffer(folder: Path) -> str:
    """An int64 buffer of a checkpoint into an int32 one."""
    sshsdp.shard(Counter(torch.int64)).save(folder / "checkpoint")
    try:
        sshsdp.shard(Counter(torch.int32)).load(folder / "checkpoint")
    except ValueError as error:
        return str(error)
    return "no error"


def test_whole_numbers_are_not_narrowed_either(
    tmp_path: Path, workers: Callable[[int], Any]
) -> None:
    """pytorch/pytorch#187138: a load cast to the template's narrower dtype in silence."""
    message = workers(1).run(load_narrower_buffer, tmp_path)[0]
    assert "'count' is torch.int64 in the checkpoint and would be rounded to torch.int32" in message
    assert "UpdatePolicy" not in message


def keep_only_rank_0(folder: Path) -> list[str]:
    """Two programs share one process group: a save on one rank, then on both."""
    _, attached, engine = make_sshsdp("adamw")
    messages = []
    if dist.get_rank() == 0:
        rendezvous.MISSING_RANKS_TIMEOUT = timedelta(seconds=1)
        try:
            engine.save(folder / "checkpoint", attached)
        except RuntimeError as error:
            messages.append(str(error))
        finally:
            rendezvous.MISSING_RANKS_TIMEOUT = timedelta(minutes=5)
    dist.barrier()
    engine.save(folder / "checkpoint", attached)
    return messages


def test_after_a_save_on_one_rank_the_next_on_all_succeeds(
    tmp_path: Path, workers: Callable[[int], Any]
) -> None:
    assert "ranks [1]" in workers(2).run(keep_only_rank_0, tmp_path)[0][0]
    assert (tmp_path / "checkpoint" / ".metadata").exists()


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


def whole_state_on_rank_0_only(kind: str) -> str:
    """What happens if only the main rank asks for whole tensors."""
    _, attached, engine = make_sshsdp("adamw")
    rendezvous.MISSING_RANKS_TIMEOUT = timedelta(seconds=1)
    message = ""
    try:
        if dist.get_rank() == 0 and kind == "model":
            engine.full_state_dict()
        elif dist.get_rank() == 0:
            engine.full_optimizer_state_dict(attached)
    except RuntimeError as error:
        message = str(error)
    finally:
        rendezvous.MISSING_RANKS_TIMEOUT = timedelta(minutes=5)
        dist.barrier()
    assert engine.full_state_dict(rank0_only=False)
    return message


@pytest.mark.parametrize("kind", ["model", "optimizer"])
def test_whole_states_on_one_rank_name_the_missing_ones(
    workers: Callable[[int], Any], kind: str
) -> None:
    message = workers(2).run(whole_state_on_rank_0_only, kind)[0]
    assert "state_dict() is collective, and ranks [1] did not call it" in message


def save_to_differing_paths(folder: Path) -> None:
    """Each rank makes up a name of its own, from the time, say."""
    _, attached, engine = make_sshsdp("adamw")
    engine.save(folder / f"at-{dist.get_rank()}", attached)


def test_the_path_of_rank_0_counts(tmp_path: Path, workers: Callable[[int], Any]) -> None:
    workers(2).run(save_to_differing_paths, tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["at-0"]
    assert sshsdp.read_checkpoint(tmp_path / "at-0")["head.weight"].shape == (1, 8)
    with pytest.raises(ValueError, match="holds nothing under 'models'; it has model, optimizer"):
        sshsdp.read_checkpoint(tmp_path / "at-0", "models")
