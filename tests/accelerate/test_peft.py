"""LoRA through PEFT: adapters train in shards, the frozen base costs its runtime shards alone."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file

from accelerate_sshsdp.sharding import engine_of
from tests.accelerate.models import make
from tests.accelerate.trainers import history, trainer

if TYPE_CHECKING:
    from tests.accelerate.conftest import Ranks


def adapted() -> Any:
    """A small decoder with adapters that do something from the start."""
    model = make("llama")
    torch.manual_seed(1)
    config = LoraConfig(
        r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False
    )
    return get_peft_model(model, config)


def _trains_adapters(folder: Path) -> None:
    runs = {}
    for side in ("ddp", "ours"):
        runs[side] = trainer(
            side, folder / side, model=adapted(), save_strategy="steps", save_steps=4
        )
        runs[side].train()
    ours, theirs = runs["ours"], runs["ddp"]
    assert history(ours, "loss") == pytest.approx(history(theirs, "loss"), rel=1e-5)
    checkpoint = folder / "ours" / "checkpoint-4"
    assert (checkpoint / "adapter_model.safetensors").stat().st_size < 100_000
    assert not (checkpoint / "model.safetensors").exists()

    resumed = trainer("ours", folder / "again", model=adapted())
    resumed.train(resume_from_checkpoint=str(checkpoint))
    weights = ours.accelerator.get_state_dict(ours.model)
    for name, value in resumed.accelerator.get_state_dict(resumed.model).items():
        torch.testing.assert_close(value, weights[name], rtol=0, atol=0)

    ours.save_model(folder / "final")
    ours.accelerator.wait_for_everyone()
    plain = PeftModel.from_pretrained(make("llama"), folder / "final").eval()
    tokens = torch.arange(12)[None] % 7
    ours.model.eval()
    with torch.no_grad():
        expected, found = ours.model(tokens).logits, plain(tokens).logits
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        merged = plain.merge_and_unload()
        torch.testing.assert_close(merged(tokens).logits, expected, rtol=1e-4, atol=1e-4)


def test_adapters_train_as_with_ddp_and_are_saved_resumed_and_merged(
    two_ranks: Ranks, tmp_path: Path
) -> None:
    two_ranks.run(_trains_adapters, tmp_path)


def _keeps_the_best_adapters(folder: Path) -> None:
    one = trainer(
        "ours",
        folder,
        model=adapted(),
        bf16=True,
        save_strategy="steps",
        save_steps=2,
        eval_strategy="steps",
        eval_steps=2,
        load_best_model_at_end=True,
        # Losses fall, so that the one called best is not the last.
        metric_for_best_model="eval_loss",
        greater_is_better=True,
    )
    one.train()
    best = Path(one.state.best_model_checkpoint)
    assert best.is_dir() and best.name == "checkpoint-2"
    saved = load_file(best / "adapter_model.safetensors")
    weights = one.accelerator.get_state_dict(one.model)
    found = {name.replace(".default.", "."): value for name, value in weights.items()}
    for name, value in saved.items():
        torch.testing.assert_close(found.get(name, value), value, rtol=0, atol=0)
    assert not found or saved.keys() <= found.keys()


def test_the_best_adapters_are_loaded_at_the_end(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks.run(_keeps_the_best_adapters, tmp_path)


def _frozen_base_is_lean(folder: Path) -> None:
    one = trainer("ours", folder, model=adapted(), bf16=True)
    one.train()
    engine = engine_of(one.model)
    assert engine is not None
    adapters = {n for n, p in one.model.named_parameters() if p.requires_grad}
    assert adapters and all("lora_" in name for name in adapters)
    trained = sum(p.numel() for p in one.model.parameters() if p.requires_grad)
    for space in engine.spaces:
        assert space.runtime.dtype == torch.bfloat16 or not space.trainable
    masters = sum(space.update_shard.nbytes for space in engine.spaces if space.trainable)
    padding = sum(space.layout.padding for space in engine.spaces if space.trainable)
    assert masters == (trained + padding) * 4 // 2
    # Gradients of adapters only: those of the base would be many times as much.
    assert 0 < engine.stats.peak_gradient_bytes <= (trained + padding) * 4
    state = [value for entry in one.optimizer.state.values() for value in entry.values()]
    assert sum(value.nbytes for value in state if value.dim()) <= 2 * masters


def test_a_frozen_base_has_no_masters_and_no_gradients(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks.run(_frozen_base_is_lean, tmp_path)
