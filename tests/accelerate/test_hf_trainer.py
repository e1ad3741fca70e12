"""transformers' Trainer with the mixin: training equals the stock Trainer's under DDP."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.accelerate.trainers import history, trainer

if TYPE_CHECKING:
    from pathlib import Path

    from tests.accelerate.conftest import Ranks


def _assert_trains_like_ddp(
    folder: Path, kind: str, changes: dict[str, Any], tolerance: float = 1e-5
) -> None:
    theirs = trainer("ddp", folder, kind, **changes)
    theirs.train()
    ours = trainer("ours", folder, kind, **changes)
    ours.train()
    for keys in (("loss",), ("eval_loss", "train_loss")):
        assert history(ours, *keys) == pytest.approx(history(theirs, *keys), rel=tolerance)
    assert history(ours, "grad_norm") == pytest.approx(history(theirs, "grad_norm"), rel=1e-4)
    assert history(ours, "learning_rate") == history(theirs, "learning_rate")
    assert len({*history(ours, "loss")}) > 3
    weights = ours.accelerator.get_state_dict(ours.model)
    for name, value in weights.items():
        torch.testing.assert_close(value, theirs.model.state_dict()[name], rtol=0, atol=tolerance)


@pytest.mark.parametrize("kind", ["llama", "t5"])
def test_losses_norms_rates_and_weights_equal_ddp(
    two_ranks: Ranks, tmp_path: Path, kind: str
) -> None:
    """Accumulation, clipping, decay groups, warm-up, evaluation, an uneven last batch."""
    evaluation = {"eval_strategy": "steps", "eval_steps": 2, "include_num_input_tokens_seen": "all"}
    two_ranks.run(_assert_trains_like_ddp, tmp_path, kind, evaluation)


@pytest.mark.parametrize(
    "changes",
    [
        {"gradient_checkpointing": True, "max_grad_norm": 0.0},
        {"optim": "adafactor", "lr_scheduler_type": "cosine"},
        {"optim": "sgd", "learning_rate": 0.3, "lr_scheduler_type": "constant"},
        {"label_smoothing_factor": 0.1, "gradient_accumulation_steps": 1},
    ],
    ids=lambda changes: "{}={}".format(*next(iter(changes.items()))),
)
def test_choices_equal_ddp(two_ranks: Ranks, tmp_path: Path, changes: dict[str, Any]) -> None:
    two_ranks.run(_assert_trains_like_ddp, tmp_path, "llama", changes)
