"""What happens around training: set-up on meta, failures, metrics, flags of the Trainer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from torchmetrics.classification import MulticlassAccuracy

import lightning_sshsdp
from tests.lightning.comparing import assert_same_weights, assert_trains_like_ddp, weights_of
from tests.lightning.modules import VOCABULARY, LanguageModule, make_trainer, token_loader

if TYPE_CHECKING:
    from tests.lightning.conftest import Ranks


def _starts_on_meta(empty_init: bool) -> None:
    trainer = make_trainer()
    with trainer.init_module(empty_init=empty_init):
        module = LanguageModule()
    assert {p.device.type for p in module.parameters()} == {"meta" if empty_init else "cpu"}
    trainer.fit(module, token_loader(16))
    assert {p.device.type for p in module.parameters()} == {"cpu"}
    weights = weights_of(trainer)
    everyone = trainer.strategy.all_gather(weights["model.blocks.1.up.weight"])
    assert torch.equal(everyone[0], everyone[1])
    assert weights["model.norm.weight"].sub(1).abs().max() < 0.1
    assert module.losses[-1] < module.losses[0]


@pytest.mark.parametrize("empty_init", [True, False])
def test_modules_are_made_on_meta_or_not(two_ranks: Ranks, empty_init: bool) -> None:
    two_ranks.run(_starts_on_meta, empty_init)


class _ConfiguredOnMeta(LanguageModule):
    """Rank 0 holds the values; the others need no memory for them."""

    def __init__(self, **options: Any) -> None:
        super().__init__(in_configure_model=True, **options)

    def configure_model(self) -> None:
        if self.model is None:
            mesh = self.device_mesh
            with torch.device("cpu" if self.global_rank == 0 or mesh is None else "meta"):
                super().configure_model()


def test_other_ranks_may_stay_on_meta(two_ranks: Ranks) -> None:
    two_ranks.run(_trains_with_ranks_on_meta)


def _trains_with_ranks_on_meta() -> None:
    reference = LanguageModule()
    ddp = make_trainer("ddp")
    ddp.fit(reference, token_loader(16))
    trainer = make_trainer()
    trainer.fit(_ConfiguredOnMeta(), token_loader(16))
    assert_same_weights(weights_of(trainer), weights_of(ddp))


class _Fails(LanguageModule):
    """Raises in the middle of a forward, or between forward and backward."""

    fails_in: str | None = None

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.fails_in == "forward" and batch_idx == 2:
            self.model.blocks[0](torch.zeros(1, 16))
            raise RuntimeError("in the middle")
        return super().training_step(batch, batch_idx)

    def on_before_backward(self, loss: torch.Tensor) -> None:
        if self.fails_in == "backward" and self.trainer.global_step == 2:
            raise RuntimeError("in the middle")


def _goes_on_after_failure(where: str) -> None:
    results = []
    for strategy in ("ddp", "sshsdp"):
        module = _Fails("momentum")
        module.fails_in = where
        trainer = make_trainer(strategy)
        with pytest.raises(RuntimeError, match="in the middle"):
            trainer.fit(module, token_loader(16))
        module.fails_in = None
        trainer = make_trainer(strategy)
        trainer.fit(module, token_loader(16))
        results.append(weights_of(trainer))
    assert_same_weights(results[1], results[0])


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_module_survives_an_exception_on_all_ranks(two_ranks: Ranks, where: str) -> None:
    two_ranks.run(_goes_on_after_failure, where)


class _WithMetric(LanguageModule):
    def __init__(self) -> None:
        super().__init__()
        self.accuracy = MulticlassAccuracy(VOCABULARY, average="micro")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        logits = self.model(batch[0][:, :-1])
        self.accuracy(logits.flatten(0, 1), batch[0][:, 1:].flatten())
        self.log("accuracy", self.accuracy)


def _measures(strategy: str) -> float:
    trainer = make_trainer(strategy)
    result = trainer.validate(_WithMetric(), token_loader(16), verbose=False)
    return result[0]["accuracy"]


def test_metrics_are_computed_over_all_ranks(two_ranks: Ranks) -> None:
    ours = two_ranks.run(_measures, "sshsdp")
    assert ours == two_ranks.run(_measures, "ddp")
    assert ours[0] == ours[1]


class _BatchNorm(LanguageModule):
    def __init__(self) -> None:
        super().__init__()
        self.running = nn.BatchNorm1d(VOCABULARY)

    def loss(self, batch: Any) -> torch.Tensor:
        logits = self.running(self.model(batch[0][:, :-1]).flatten(0, 1))
        return nn.functional.cross_entropy(logits, batch[0][:, 1:].flatten())


def _trains_with_buffers() -> None:
    reference, module = _BatchNorm(), _BatchNorm()
    ddp, trainer = make_trainer("ddp"), make_trainer(barebones=True)
    ddp.fit(reference, token_loader(16))
    trainer.fit(module, token_loader(16))
    assert_close(module.losses, reference.losses, rtol=1e-5, atol=1e-6)
    weights, expected = weights_of(trainer), weights_of(ddp)
    parameters = {name for name, _ in reference.named_parameters()}
    assert_same_weights(
        {k: v for k, v in weights.items() if k in parameters},
        {k: v for k, v in expected.items() if k in parameters},
    )
    assert weights["running.num_batches_tracked"] == 8


def test_batch_norm_trains_with_local_statistics(two_ranks: Ranks) -> None:
    two_ranks.run(_trains_with_buffers)


def _evaluates_under_inference_mode() -> None:
    results = []
    for strategy in ("ddp", "sshsdp"):
        module = LanguageModule()
        trainer = make_trainer(strategy)
        trainer.fit(module, token_loader(16))
        with torch.inference_mode():
            trainer.test(module, token_loader(8), verbose=False)
        trainer.fit_loop.max_epochs = 2
        trainer.fit(module, token_loader(16))
        results.append(weights_of(trainer))
    assert_same_weights(results[1], results[0])


def test_users_may_evaluate_under_inference_mode(two_ranks: Ranks) -> None:
    two_ranks.run(_evaluates_under_inference_mode)


def _replicates_and_offloads() -> None:
    strategy = lightning_sshsdp.SSHSDPStrategy(
        replicate_size=2,
        runtime={"reshard_after_forward": False, "prefetch": 2},
        update={"sharding": "replicated", "device": "cpu"},
    )
    assert_trains_like_ddp(LanguageModule, strategy, gradient_clip_val=0.3)


def test_options_of_both_policies_reach_the_engine(two_ranks: Ranks) -> None:
    two_ranks.run(_replicates_and_offloads)
