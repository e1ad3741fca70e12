"""Troubles with transformers' Trainer that broke other engines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file
from transformers import TrainerCallback

from accelerate_sshsdp.sharding import engine_of
from tests.accelerate.trainers import history, trainer

if TYPE_CHECKING:
    from pathlib import Path

    from tests.accelerate.conftest import Ranks


class _RunsOutOfMemoryOnce(TrainerCallback):
    def __init__(self) -> None:
        self.has_raised = False

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not self.has_raised:
            self.has_raised = True
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")


def _finds_a_batch_size(folder: Path) -> None:
    retried = trainer("ours", folder, auto_find_batch_size=True)
    retried.add_callback(_RunsOutOfMemoryOnce())
    retried.train()
    assert retried.state.train_batch_size < 4
    smaller = trainer("ours", folder, per_device_train_batch_size=retried.state.train_batch_size)
    smaller.train()
    assert history(retried, "loss") == history(smaller, "loss")


def test_a_second_try_with_a_smaller_batch_trains_the_same_model(
    two_ranks: Ranks, tmp_path: Path
) -> None:
    """A wrapped model was wrapped again: huggingface/transformers#34113."""
    two_ranks.run(_finds_a_batch_size, tmp_path)


def _saves_all(folder: Path) -> None:
    one = trainer("ours", folder, save_strategy="steps", save_steps=3)
    one.train()
    engine = engine_of(one.model)
    assert engine is not None
    for step in (3, 6):
        saved = load_file(folder / f"checkpoint-{step}" / "model.safetensors")
        # Each weight once, whole, under the model's own name.
        weights = {name: p.shape for name, p in one.model.named_parameters()}
        assert {name: value.shape for name, value in saved.items()} == weights
        assert any(value.abs().sum() > 0 for value in saved.values())
    again = type(one.model).from_pretrained(folder / "checkpoint-6")
    tokens = torch.arange(12)[None] % 7
    one.model.eval()
    with torch.no_grad():
        torch.testing.assert_close(again.eval()(tokens).logits, one.model(tokens).logits)


def test_every_checkpoint_has_a_model_that_plain_transformers_loads(
    two_ranks: Ranks, tmp_path: Path
) -> None:
    """There was none, or one that did not resume: huggingface/transformers#30491, #26186."""
    two_ranks.run(_saves_all, tmp_path)
