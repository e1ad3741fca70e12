"""Saves that end early, and ranks that fail or do not come, cost no checkpoint."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest
import torch.distributed as dist
from lightning.fabric import Fabric
from torch import nn
from torch.distributed.checkpoint import FileSystemWriter

import lightning_sshsdp
from sshsdp.comm import rendezvous
from tests.lightning.comparing import assert_same_weights, weights_of
from tests.lightning.modules import LanguageModule, make_trainer, token_loader

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.lightning.conftest import Ranks

FORMATS = ["sharded", "full"]


def _trained(checkpoint: str) -> Any:
    trainer = make_trainer(lightning_sshsdp.SSHSDPStrategy(checkpoint=checkpoint))
    trainer.fit(LanguageModule(), token_loader(8))
    return trainer


def _loads(checkpoint: str, path: Path) -> dict[str, Any]:
    trainer = make_trainer(lightning_sshsdp.SSHSDPStrategy(checkpoint=checkpoint))
    module = LanguageModule(seed=5)
    trainer.validate(module, token_loader(4), ckpt_path=str(path), verbose=False)
    return weights_of(trainer)


def _fabric(checkpoint: str) -> tuple[Fabric, Any, Any]:
    strategy = lightning_sshsdp.FabricSSHSDPStrategy(checkpoint=checkpoint)
    fabric = Fabric(strategy=strategy, accelerator="cpu", devices=2)
    fabric.launch()
    return fabric, fabric.setup_module(nn.Linear(3, 2)), {"number": 1}


def _on_rank_0(action: Callable[[], Any]) -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        action()
    dist.barrier()


def _ends_between_renames(path: Path) -> None:
    trainer = _trained("sharded")
    trainer.save_checkpoint(path)
    saved = weights_of(trainer)
    aside = path.with_name(f".{path.name}.old")
    _on_rank_0(lambda: path.rename(aside))
    assert_same_weights(_loads("full", path), saved, rtol=0)
    module = LanguageModule.load_from_checkpoint(path)
    assert_same_weights(module.state_dict(), saved, rtol=0)
    dist.barrier()
    # The next save cleans up, whichever kind it is.
    trainer.save_checkpoint(path)
    assert os.listdir(path.parent) == [path.name]
    _on_rank_0(lambda: path.rename(aside))
    make_full = _trained("full")
    make_full.save_checkpoint(path)
    assert path.is_file()
    assert os.listdir(path.parent) == [path.name]


def test_a_program_killed_between_the_renames_loses_nothing(
    two_ranks: Ranks, tmp_path: Path
) -> None:
    two_ranks.run(_ends_between_renames, tmp_path / "some.ckpt")


def _fabric_ends_between_renames(path: Path) -> None:
    fabric, model, state = _fabric("sharded")
    fabric.save(path, {"model": model, **state})
    _on_rank_0(lambda: path.rename(path.with_name(f".{path.name}.old")))
    assert fabric.load(path, {"model": model}) == state


def test_fabric_finds_what_a_killed_program_left_aside(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks.run(_fabric_ends_between_renames, tmp_path / "some.ckpt")


def _fails_while_saving(checkpoint: str, path: Path) -> None:
    trainer = _trained("sharded")
    trainer.save_checkpoint(path)
    before = sorted(os.listdir(path))
    failing = _trained(checkpoint)
    original = FileSystemWriter.write_data

    def write_data(*args: Any) -> Any:
        if dist.get_rank() == 1:
            raise OSError("disk full")
        return original(*args)

    error, files = OSError("disk full"), failing.strategy.checkpoint_io
    with (
        patch.object(FileSystemWriter, "write_data", write_data),
        patch.object(files, "save_checkpoint", side_effect=error),
        pytest.raises(RuntimeError, match="disk full"),
    ):
        failing.save_checkpoint(path)
    dist.barrier()
    assert sorted(os.listdir(path)) == before
    assert os.listdir(path.parent) == [path.name]
    _loads("sharded", path)


@pytest.mark.parametrize("checkpoint", FORMATS)
def test_a_save_that_fails_on_one_rank_leaves_the_old_checkpoint(
    two_ranks: Ranks, tmp_path: Path, checkpoint: str
) -> None:
    two_ranks.run(_fails_while_saving, checkpoint, tmp_path / "some.ckpt")


def _rank_0_saves_alone(checkpoint: str, path: Path) -> None:
    trainer = _trained(checkpoint)
    fabric, model, state = _fabric(checkpoint)
    saves = {
        "trainer": lambda: trainer.save_checkpoint(path),
        "fabric": lambda: fabric.save(path, {"model": model, **state}),
    }
    for save in saves.values():
        if dist.get_rank() == 0:
            with (
                patch.object(rendezvous, "MISSING_RANKS_TIMEOUT", timedelta(seconds=0.5)),
                pytest.raises(RuntimeError, match=r"is collective, and ranks \[1\] did not call"),
            ):
                save()
        dist.barrier()
        assert not path.exists()
    for save in saves.values():
        save()
        dist.barrier()
        assert path.exists()


@pytest.mark.parametrize("checkpoint", FORMATS)
def test_a_save_on_rank_0_alone_names_the_ranks_that_do_not_come(
    two_ranks: Ranks, tmp_path: Path, checkpoint: str
) -> None:
    """``if trainer.is_global_zero: trainer.save_checkpoint(...)`` hangs with other strategies."""
    two_ranks.run(_rank_0_saves_alone, checkpoint, tmp_path / "some.ckpt")


class _Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.state: dict[str, Any] = {"steps": 0}

    def get_extra_state(self) -> Any:
        return self.state

    def set_extra_state(self, state: Any) -> None:
        self.state = state


class _KeepsExtraState(LanguageModule):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.counts = _Counts()

    def on_train_batch_end(self, *_: Any) -> None:
        self.counts.state["steps"] += 1


def _keeps_extra_state(first: str, second: str, path: Path) -> None:
    def strategy(name: str) -> Any:
        return name if name == "ddp" else lightning_sshsdp.SSHSDPStrategy(checkpoint=name)

    trainer = make_trainer(strategy(first))
    trainer.fit(_KeepsExtraState(), token_loader(8))
    trainer.save_checkpoint(path)
    dist.barrier()
    module = _KeepsExtraState(seed=5)
    make_trainer(strategy(second), max_epochs=2).fit(module, token_loader(8), ckpt_path=str(path))
    assert module.counts.state == {"steps": 8}
    assert _KeepsExtraState.load_from_checkpoint(path).counts.state == {"steps": 4}


@pytest.mark.parametrize(
    ("first", "second"),
    [("sharded", "sharded"), ("full", "full"), ("ddp", "sharded"), ("full", "ddp")],
)
def test_extra_states_of_modules_are_saved(
    two_ranks: Ranks, tmp_path: Path, first: str, second: str
) -> None:
    two_ranks.run(_keeps_extra_state, first, second, tmp_path / "some.ckpt")
