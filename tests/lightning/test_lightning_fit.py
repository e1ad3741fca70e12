"""``Trainer(strategy="sshsdp").fit`` computes what DDP computes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from unittest.mock import MagicMock, patch

import pytest
import torch
from lightning.pytorch.callbacks import Callback, LearningRateMonitor
from torch import nn
from torch.testing import assert_close

import lightning_sshsdp
from tests.lightning.comparing import assert_same_weights, assert_trains_like_ddp, weights_of
from tests.lightning.modules import LanguageModule, make_trainer, token_loader

if TYPE_CHECKING:
    from tests.lightning.conftest import Ranks


def _trains_like_ddp(module_options: dict[str, Any], trainer_options: dict[str, Any]) -> None:
    assert_trains_like_ddp(lambda: LanguageModule(**module_options), **trainer_options)


@pytest.mark.parametrize(
    ("module_options", "trainer_options"),
    [
        ({}, {}),
        ({"optimizer": "sgd"}, {}),
        ({"optimizer": "momentum", "scheduler": True}, {}),
        ({"in_configure_model": True}, {}),
        ({}, {"accumulate_grad_batches": 4, "max_epochs": 2}),
        ({"optimizer": "momentum"}, {"gradient_clip_val": 0.3}),
        (
            {"optimizer": "momentum"},
            {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
        ),
        ({}, {"accumulate_grad_batches": 3, "gradient_clip_val": 0.3}),
    ],
)
def test_losses_and_weights_equal_ddp(
    two_ranks: Ranks, module_options: dict[str, Any], trainer_options: dict[str, Any]
) -> None:
    two_ranks.run(_trains_like_ddp, module_options, trainer_options)


@pytest.mark.parametrize("module_options", [{}, {"optimizer": "momentum", "scheduler": True}])
def test_one_process_trains_like_ddp(one_rank: Ranks, module_options: dict[str, Any]) -> None:
    one_rank.run(_trains_like_ddp, module_options, {"devices": 1, "gradient_clip_val": 0.3})


def _trains_on_2_by_2() -> None:
    strategy = lightning_sshsdp.SSHSDPStrategy(replicate_size=2)
    trainer = assert_trains_like_ddp(LanguageModule, strategy, devices=4)
    assert trainer.strategy.device_mesh.mesh_dim_names == ("replicate", "shard")
    assert trainer.strategy.device_mesh.shape == (2, 2)


def test_four_ranks_train_like_ddp_on_a_2d_mesh(four_ranks: Ranks) -> None:
    four_ranks.run(_trains_on_2_by_2)


class _OddModule(LanguageModule):
    """A frozen block, a parameter that no step uses, and an optimizer made before anything else."""

    def __init__(self) -> None:
        super().__init__()
        self.model.blocks[1].requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(3, 5))
        trained = [p for p in self.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=1e-2, weight_decay=0.1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.optimizer


def _odd_module_trains() -> None:
    trainer = assert_trains_like_ddp(_OddModule)
    weights = weights_of(trainer)
    assert_close(weights["unused"], torch.ones(3, 5), rtol=0, atol=0)
    fresh = _OddModule().state_dict()
    name = "model.blocks.1.up.weight"
    assert_close(weights[name], fresh[name], rtol=0, atol=0)


class _CountReductions(Callback):
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.context = trainer.strategy.engine.record_collectives()
        self.records = self.context.__enter__()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.context.__exit__(None, None, None)


def _reductions(accumulate: int) -> tuple[int, int]:
    counter = _CountReductions()
    trainer = make_trainer(accumulate_grad_batches=accumulate, callbacks=counter)
    trainer.fit(LanguageModule(), token_loader(16))
    reductions = [record for record in counter.records if record.kind == "reduce_scatter"]
    return trainer.global_step, len(reductions)


def _counts_reductions() -> None:
    steps, every_batch = _reductions(1)
    fewer_steps, accumulated = _reductions(4)
    assert (steps, fewer_steps) == (8, 2)
    assert every_batch == 4 * accumulated, (every_batch, accumulated)
    assert accumulated > 0


class TestAccumulation:
    """ModelParallelStrategy reduces in every micro-batch: 16 times for 4 x 2 instead of 4."""

    def test_accumulation_reduces_once_per_step(self, two_ranks: Ranks) -> None:
        two_ranks.run(_counts_reductions)


class _Foreign(LanguageModule):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([nn.Parameter(torch.zeros(3))], lr=0.1)


class _LBFGS(LanguageModule):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(self.parameters())


def _refuses_optimizers() -> None:
    with pytest.raises(ValueError, match=r"model\.parameters\(\)"):
        make_trainer().fit(_Foreign(), token_loader())
    with pytest.raises(ValueError, match="LBFGS"):
        make_trainer().fit(_LBFGS(), token_loader())


class TestOptimizersMadeBeforeSharding:
    """ModelParallelStrategy trains nothing with them, in silence."""

    def test_frozen_and_unused_parameters_stay_and_an_early_optimizer_trains(
        self,
        two_ranks: Ranks,
    ) -> None:
        two_ranks.run(_odd_module_trains)

    def test_optimizers_that_could_not_train_are_refused(self, two_ranks: Ranks) -> None:
        two_ranks.run(_refuses_optimizers)


class _Seen(Callback):
    def __init__(self) -> None:
        self.rows: list[torch.Tensor] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, *_: Any) -> None:
        self.rows.append(batch[0])


def _seen_rows() -> torch.Tensor:
    seen = _Seen()
    make_trainer(callbacks=seen).fit(LanguageModule(), token_loader(8))
    return torch.cat(seen.rows)


class TestDefaultMesh:
    """ModelParallelStrategy's default sizes give every rank of a node the same data."""

    def test_ranks_see_disjoint_data(self, two_ranks: Ranks) -> None:
        first, second = two_ranks.run(_seen_rows)
        everything = {tuple(row.tolist()) for row in token_loader(8).dataset.tensors[0]}
        rows = [{tuple(row.tolist()) for row in seen} for seen in (first, second)]
        assert rows[0].isdisjoint(rows[1])
        assert rows[0] | rows[1] == everything


class _Rates(LearningRateMonitor):
    def on_train_batch_start(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        rates = [group["lr"] for group in trainer.optimizers[0].param_groups]
        self.seen = [*getattr(self, "seen", []), rates]


def _scheduled_rates(strategy: str) -> list[list[float]]:
    rates = _Rates("step")
    from lightning.pytorch.loggers import CSVLogger

    trainer = make_trainer(strategy, callbacks=rates, logger=CSVLogger("/tmp", version=strategy))
    trainer.fit(LanguageModule(scheduler=True), token_loader(16))
    return rates.seen


def test_schedulers_change_the_rates_that_the_optimizer_uses(two_ranks: Ranks) -> None:
    ours, ddp = two_ranks.run(_scheduled_rates, "sshsdp"), two_ranks.run(_scheduled_rates, "ddp")
    assert ours == ddp
    assert ours[0][0][0] > ours[0][-1][0]


def _all_stages(strategy: str) -> tuple[list[float], Any, dict[str, torch.Tensor]]:
    module = LanguageModule()
    trainer = make_trainer(strategy, max_epochs=1)
    loader = token_loader(8)
    results: list[float] = []
    results += trainer.validate(module, loader, verbose=False)[0].values()
    trainer.fit(module, token_loader(16), loader)
    results.append(float(trainer.callback_metrics["val_loss"]))
    results += trainer.test(module, loader, verbose=False)[0].values()
    predictions = trainer.predict(module, loader)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, token_loader(16), loader)
    results += trainer.validate(module, loader, verbose=False)[0].values()
    return results, predictions, weights_of(trainer)


def test_every_order_of_stages_gives_what_ddp_gives(two_ranks: Ranks) -> None:
    ours, ddp = two_ranks.run(_all_stages, "sshsdp"), two_ranks.run(_all_stages, "ddp")
    for (results, predictions, weights), (expected, wanted, reference) in zip(
        ours, ddp, strict=True
    ):
        assert len(results) == 4
        assert_close(results, expected, rtol=1e-5, atol=0)
        assert_same_weights(weights, reference)
        assert all(torch.equal(a, b) for a, b in zip(predictions, wanted, strict=True))


def _validate_then_fit_under_inference_mode() -> None:
    # Lightning runs no inference mode on gloo, which would hide what happens on GPUs.
    module = LanguageModule()
    trainer = make_trainer()
    pretended = MagicMock()
    pretended.get_backend.return_value = "nccl"
    with patch("lightning.pytorch.loops.utilities.dist", pretended):
        trainer.validate(module, token_loader(), verbose=False)
        trainer.fit(module, token_loader())
    pretended.get_backend.assert_called()
    assert trainer.global_step == 4


def test_fit_after_validate_works_where_lightning_uses_inference_mode(
    two_ranks: Ranks,
) -> None:
    two_ranks.run(_validate_then_fit_under_inference_mode)


def _second_trainer() -> None:
    results = {}
    for strategy in ("ddp", "sshsdp"):
        module = LanguageModule()
        make_trainer(strategy).fit(module, token_loader(16))
        trainer = make_trainer(strategy)
        trainer.fit(module, token_loader(16, seed=8))
        results[strategy] = weights_of(trainer)
    assert_same_weights(results["sshsdp"], results["ddp"])


def test_another_trainer_may_go_on_with_the_module(two_ranks: Ranks) -> None:
    two_ranks.run(_second_trainer)
