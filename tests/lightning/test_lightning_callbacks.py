"""Callbacks that look at, or change, what the strategy shards: each works, or says why not."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest
import torch
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    Callback,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    ModelSummary,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities import grad_norm
from torch.testing import assert_close
from torch.utils.data import DataLoader, Subset

import lightning_sshsdp
from tests.lightning.comparing import assert_same_weights, weights_of
from tests.lightning.modules import LanguageModule, make_trainer, token_loader

if TYPE_CHECKING:
    from pathlib import Path

    from tests.lightning.conftest import Ranks


class _Finetuning(BaseFinetuning):
    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.model.blocks)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch > 0:
            block = pl_module.model.blocks[epoch - 1]
            self.unfreeze_and_add_param_group(block, optimizer, lr=3e-3)


class _Finetuned(LanguageModule):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        trained = [p for p in self.parameters() if p.requires_grad]
        kind = torch.optim.AdamW if self.hparams.optimizer == "adamw" else torch.optim.SGD
        options = {} if self.hparams.optimizer == "adamw" else {"momentum": 0.9}
        return kind(trained, lr=1e-2, weight_decay=0.1, **options)


def _my_rows() -> DataLoader:
    """Every fourth row and the next ones: a rank's part of batches of four rows in order."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dataset, batch = token_loader(8, batch_size=4).dataset, 4 // size
    rows = [4 * step + batch * rank + row for step in range(8) for row in range(batch)]
    return DataLoader(Subset(dataset, rows), batch_size=batch)


def _finetune(
    strategy: str, optimizer: str, path: str | None, precision: str = "32-true"
) -> tuple[list[float], dict[str, torch.Tensor], list[float]]:
    module = _Finetuned(optimizer)
    size = int(os.environ["WORLD_SIZE"])
    options = {"devices": size, "use_distributed_sampler": False, "precision": precision}
    trainer = make_trainer(strategy, callbacks=_Finetuning(), max_epochs=3, **options)
    trainer.fit(module, _my_rows())
    if path is not None:
        trainer.save_checkpoint(path)
        trainer = make_trainer(strategy, callbacks=_Finetuning(), max_epochs=4, **options)
        module = _Finetuned(optimizer, seed=5)
        trainer.fit(module, _my_rows(), ckpt_path=path)
    rates = [group["lr"] for group in trainer.optimizers[0].param_groups]
    return module.losses, weights_of(trainer), rates


@pytest.mark.parametrize("optimizer", ["momentum", "adamw"])
@pytest.mark.parametrize("resumes", [False, True])
def test_finetuning_unfreezes_block_by_block(
    one_rank: Ranks, two_ranks: Ranks, tmp_path: Path, optimizer: str, resumes: bool
) -> None:
    """DDP never reduces gradients of parameters that were frozen when it was set up."""
    paths = [str(tmp_path / name) if resumes else None for name in ("plain.ckpt", "sharded.ckpt")]
    _, expected, rates = one_rank.run(_finetune, "auto", optimizer, paths[0])[0]
    assert len(rates) == 3 + resumes
    for _, weights, our_rates in two_ranks.run(_finetune, "sshsdp", optimizer, paths[1]):
        assert our_rates == rates
        assert_same_weights(weights, expected)


def test_finetuning_keeps_the_precision_of_masters(two_ranks: Ranks) -> None:
    _, mixed, _ = two_ranks.run(_finetune, "sshsdp", "momentum", None, "bf16-mixed")[0]
    changed = mixed["model.embedding.weight"]
    assert changed.dtype == torch.float32
    assert not torch.equal(changed, changed.bfloat16().float())


def _find_rate(strategy: str) -> tuple[Any, Any, dict[str, torch.Tensor]]:
    module = LanguageModule()
    trainer = make_trainer(strategy)
    finder = Tuner(trainer).lr_find(
        module, token_loader(64), num_training=20, min_lr=1e-4, max_lr=1.0, attr_name="lr"
    )
    trainer.fit(module, token_loader(16))
    return finder.results["loss"], finder.suggestion(), weights_of(trainer)


def test_the_learning_rate_finder_finds_what_it_finds_with_ddp(
    two_ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ddp, ours = two_ranks.run(_find_rate, "ddp"), two_ranks.run(_find_rate, "sshsdp")
    for (losses, rate, weights), (expected, wanted, reference) in zip(ours, ddp, strict=True):
        assert_close(losses, expected, rtol=1e-4, atol=0)
        assert rate == pytest.approx(wanted)
        assert_same_weights(weights, reference, rtol=1e-4)


def _refuses_averaging() -> None:
    averagers = [
        EMAWeightAveraging(decay=0.9),
        StochasticWeightAveraging(1e-2, swa_epoch_start=1),
    ]
    for callback in averagers:
        with pytest.raises(RuntimeError, match=r"lightning_sshsdp\.WeightAveraging"):
            make_trainer(callbacks=callback).fit(LanguageModule(), token_loader())


def _average(
    strategy: str, callback: Any, path: str | None, epochs: int = 2
) -> tuple[Any, list[float], dict[str, torch.Tensor]]:
    checkpoint = {"sshsdp": "sharded"}.get(strategy, "full")
    if strategy != "ddp":
        strategy = lightning_sshsdp.SSHSDPStrategy(checkpoint=checkpoint)
    module = LanguageModule(scheduler=True)
    trainer = make_trainer(strategy, callbacks=callback, max_epochs=epochs)
    trainer.fit(module, token_loader(16), token_loader(8), ckpt_path=path)
    return trainer, float(trainer.callback_metrics["val_loss"]), weights_of(trainer)


def _averages_like_lightning(decay: float | None, first: int) -> None:
    theirs: Any = EMAWeightAveraging(decay=decay or 0.5, update_starting_at_step=first)
    if decay is None:
        theirs = WeightAveraging()
        theirs.should_update = lambda step_idx=None, epoch_idx=None: (step_idx or -1) >= first
    _, loss, weights = _average("ddp", theirs, None)
    ours = lightning_sshsdp.WeightAveraging(decay, start_step=first)
    _, our_loss, our_weights = _average("sshsdp", ours, None)
    assert our_loss == pytest.approx(loss, rel=1e-5)
    assert_same_weights(our_weights, weights)


class _SavesAfterFirstEpoch(Callback):
    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == 0:
            trainer.save_checkpoint(self.path)


def _resumes_averages(checkpoint: str, path: str) -> None:
    callbacks = [lightning_sshsdp.WeightAveraging(0.8), _SavesAfterFirstEpoch(path)]
    _, loss, straight = _average(checkpoint, callbacks, None)
    resuming = lightning_sshsdp.WeightAveraging(0.8)
    _, resumed_loss, resumed = _average(checkpoint, resuming, path)
    assert resumed_loss == loss
    assert_same_weights(resumed, straight, rtol=0)
    first, _, averages = _average(checkpoint, lightning_sshsdp.WeightAveraging(0.8), None, 1)
    loaded = LanguageModule.load_from_checkpoint(path)
    assert_same_weights(loaded.state_dict(), averages, rtol=0)
    first.strategy.barrier()


class TestAveraging:
    """EMA's deepcopy asserts with ModelParallelStrategy, and SWA averages nothing, in silence."""

    def test_callbacks_that_average_whole_models_are_refused(self, two_ranks: Ranks) -> None:
        two_ranks.run(_refuses_averaging)

    @pytest.mark.parametrize(("decay", "first"), [(0.9, 0), (0.5, 5), (None, 3)])
    def test_averages_on_shards_are_lightnings_averages(
        self, two_ranks: Ranks, decay: float | None, first: int
    ) -> None:
        two_ranks.run(_averages_like_lightning, decay, first)

    @pytest.mark.parametrize("checkpoint", ["sshsdp", "full"])
    def test_averages_are_saved_as_the_model_and_go_on_after_resuming(
        self, two_ranks: Ranks, tmp_path: Path, checkpoint: str
    ) -> None:
        two_ranks.run(_resumes_averages, checkpoint, str(tmp_path / "some.ckpt"))

    @pytest.mark.parametrize("options", [{"decay": 1.5}, {"every_n_steps": 0}, {"start_step": -1}])
    def test_wrong_averaging_options_are_named(self, options: dict[str, Any]) -> None:
        with pytest.raises(ValueError, match=next(iter(options))):
            lightning_sshsdp.WeightAveraging(**options)


class _LogsNorms(LanguageModule):
    def __init__(self, norm: Any, kind: Any, **options: Any) -> None:
        super().__init__(**options)
        self.norm, self.kind = norm, kind
        self.norms: list[dict[str, float]] = []
        self.model.blocks[0].requires_grad_(False)
        self.unused = torch.nn.Parameter(torch.ones(2))

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        norms = self.norm(self, self.kind)
        self.norms.append({name: float(value) for name, value in norms.items()})


def _gradient_norms(kind: Any) -> None:
    # Lightning's own, which knows sharded modules once this package is there.
    reference, module = _LogsNorms(grad_norm, kind), _LogsNorms(grad_norm, kind)
    make_trainer("ddp_find_unused_parameters_true").fit(reference, token_loader(16))
    make_trainer().fit(module, token_loader(16))
    assert len(module.norms) == 8
    for norms, expected in zip(module.norms, reference.norms, strict=True):
        # DDP gives unused parameters zeros, and so their norm.
        wanted = {k: v for k, v in expected.items() if "unused" not in k}
        assert_close(norms, wanted, rtol=1e-4, atol=1e-7)
    with pytest.raises(ValueError, match="positive"):
        lightning_sshsdp.grad_norm(module, 0)
    with pytest.raises(ValueError, match="not sharded"):
        lightning_sshsdp.grad_norm(reference, 2)


class TestGradientNorms:
    """Lightning's ``grad_norm`` raises with ModelParallelStrategy."""

    @pytest.mark.parametrize("kind", [2, "inf"])
    def test_norms_of_single_gradients_are_those_of_ddp(self, two_ranks: Ranks, kind: Any) -> None:
        two_ranks.run(_gradient_norms, kind)


def _other_callbacks() -> dict[str, torch.Tensor]:
    results = []
    for strategy in ("ddp", "sshsdp"):
        callbacks = [ModelSummary(2), GradientAccumulationScheduler({0: 2, 1: 1})]
        trainer = make_trainer(
            strategy, callbacks=callbacks, max_epochs=2, enable_model_summary=True
        )
        trainer.fit(LanguageModule(), token_loader(16))
        assert trainer.global_step == 4 + 8
        results.append(weights_of(trainer))
    assert_same_weights(results[1], results[0])


def test_summary_and_accumulation_schedule_work(two_ranks: Ranks) -> None:
    two_ranks.run(_other_callbacks)
