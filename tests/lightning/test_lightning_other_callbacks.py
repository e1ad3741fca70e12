"""Lightning's other callbacks, flags and plugins: each works, or says why not."""

from __future__ import annotations

import copy
import os
from typing import TYPE_CHECKING, Any

import pytest
from lightning.pytorch.callbacks import (
    Callback,
    EarlyStopping,
    ModelPruning,
    OnExceptionCheckpoint,
    ThroughputMonitor,
    Timer,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.tuner import Tuner
from torch.optim.swa_utils import AveragedModel

import lightning_sshsdp
from tests.lightning.comparing import assert_same_weights, weights_of
from tests.lightning.modules import LanguageModule, make_trainer, token_loader

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from tests.lightning.conftest import Ranks


class _WithLoader(LanguageModule):
    batch_size = 2
    flops_per_batch = 1000

    def train_dataloader(self) -> Any:
        return token_loader(16, self.batch_size)


def _lightnings_throughput(directory: str) -> set[str]:
    monitor = ThroughputMonitor(lambda batch: batch[0].size(0), window_size=3)
    trainer = make_trainer(
        callbacks=monitor, logger=CSVLogger(directory, version=0), log_every_n_steps=1
    )
    trainer.fit(_WithLoader())
    return {*trainer.logged_metrics}


def test_lightnings_throughput_monitor_measures(two_ranks: Ranks, tmp_path: Path) -> None:
    names = two_ranks.run(_lightnings_throughput, str(tmp_path))[0]
    assert {"train/device/samples_per_sec", "train/samples_per_sec"} <= names


class _Fails(LanguageModule):
    fails = True

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.fails and self.global_step == 3:
            raise RuntimeError("in the middle")
        return super().training_step(batch, batch_idx)


def _saves_on_exception(strategy: str, directory: str) -> tuple[int, dict[str, torch.Tensor]]:
    callback = OnExceptionCheckpoint(directory, filename="failed")
    trainer = make_trainer(strategy, callbacks=callback, enable_checkpointing=True)
    with pytest.raises(RuntimeError, match="in the middle"):
        trainer.fit(_Fails(), token_loader(16))
    trainer.strategy.barrier()
    assert os.listdir(directory) == ["failed.ckpt"]
    module = _Fails(seed=5)
    module.fails = False
    resumed = make_trainer(strategy)
    resumed.fit(module, token_loader(16), ckpt_path=f"{directory}/failed.ckpt")
    return resumed.global_step, weights_of(resumed)


def test_a_checkpoint_saved_on_an_exception_resumes_as_with_ddp(
    two_ranks: Ranks, tmp_path: Path
) -> None:
    steps, ours = two_ranks.run(_saves_on_exception, "sshsdp", str(tmp_path / "ours"))[0]
    expected_steps, expected = two_ranks.run(_saves_on_exception, "ddp", str(tmp_path / "ddp"))[0]
    assert steps == expected_steps == 8
    assert_same_weights(ours, expected)


def _saves_asynchronously(path: Path) -> None:
    strategy = lightning_sshsdp.SSHSDPStrategy(checkpoint="full")
    plugin = AsyncCheckpointIO()
    trainer = make_trainer(strategy, plugins=plugin)
    trainer.fit(LanguageModule(), token_loader(8))
    trainer.save_checkpoint(path)
    plugin.teardown()
    trainer.strategy.barrier()
    loaded = LanguageModule.load_from_checkpoint(path).state_dict()
    assert_same_weights(loaded, weights_of(trainer), rtol=0)


def test_asynchronous_checkpoint_files(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks.run(_saves_asynchronously, tmp_path / "some.ckpt")


class _StopsOnRank1(Callback):
    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        trainer.should_stop = trainer.strategy.reduce_boolean_decision(
            trainer.global_step >= 3 and trainer.global_rank == 1, all=False
        )


def _stops() -> tuple[int, int]:
    trainer = make_trainer(
        callbacks=[EarlyStopping("train_loss", patience=0, mode="max"), Timer()],
        max_epochs=9,
        detect_anomaly=True,
        profiler="simple",
    )
    trainer.fit(LanguageModule(), token_loader(8))
    early = trainer.current_epoch
    trainer = make_trainer(callbacks=_StopsOnRank1(), max_epochs=9)
    trainer.fit(LanguageModule(), token_loader(16))
    return early, trainer.global_step


def test_all_ranks_stop_together(two_ranks: Ranks) -> None:
    stops = two_ranks.run(_stops)
    assert stops[0] == stops[1]
    assert stops[0][0] < 9
    assert stops[0][1] == 3


def _refuses_what_needs_whole_parameters() -> None:
    hint = r"parameter 'model\.embedding\.weight' is sharded .* engine\.unsharded"
    pruning = ModelPruning("l1_unstructured", amount=0.5)
    with pytest.raises(RuntimeError, match=hint):
        make_trainer(callbacks=pruning).fit(LanguageModule(), token_loader(4))
    with pytest.raises(ValueError, match="not supported with distributed"):
        Tuner(make_trainer()).scale_batch_size(_WithLoader())
    trainer, module = make_trainer(), LanguageModule()
    trainer.fit(module, token_loader(4))
    for attempt in (
        copy.deepcopy,
        AveragedModel,
        lambda model: model.half(),
        lambda model: model.state_dict(),
        lambda model: model.load_state_dict(LanguageModule().model.state_dict()),
    ):
        with pytest.raises(RuntimeError, match=r"is sharded .* engine\.unsharded"):
            attempt(module.model)
    with trainer.strategy.engine.unsharded():
        copied = copy.deepcopy(module.model.norm.weight.detach())
    assert copied.shape == (16,)


def test_what_needs_whole_parameters_says_so_and_names_the_way_out(two_ranks: Ranks) -> None:
    """EMA by deepcopy asserts in torch with Lightning's ModelParallelStrategy."""
    two_ranks.run(_refuses_what_needs_whole_parameters)
