"""Troubles that people had with checkpoints of sharded models, and that are not to be had here.

More of them are in `test_accelerate_checkpoints` and `test_accelerate_prepare`, by name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from accelerate.utils import ProjectConfiguration, merge_fsdp_weights
from safetensors.torch import load_file

from accelerate_sshsdp import SSHSDPPlugin, engine_of
from tests.accelerate.models import LENGTH, make
from tests.accelerate.training import grouped, new_accelerator

if TYPE_CHECKING:
    from pathlib import Path

    from tests.accelerate.conftest import Ranks


class Training:
    """A Llama, AdamW, and one batch for each rank."""

    def __init__(self, which: str = "ours", seed: int = 0, **options: Any) -> None:
        self.accelerator = new_accelerator(which, **options)
        model = make("llama", seed)
        optimizer = torch.optim.AdamW(grouped(model), lr=1e-2)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        self.batch = torch.arange(LENGTH).unsqueeze(0) + self.accelerator.process_index

    def loss(self) -> torch.Tensor:
        return self.model(input_ids=self.batch, labels=self.batch).loss

    def step(self) -> float:
        """One step; the loss before it."""
        loss = self.loss()
        self.accelerator.backward(loss)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


def _load_into_other_weights(folder: Path) -> None:
    saved = Training(mixed_precision="bf16")
    saved.step()
    saved.accelerator.save_state(folder)
    with torch.no_grad():
        expected = saved.loss().item()
    losses = [saved.step() for _ in range(2)]

    loaded = Training(seed=1, mixed_precision="bf16")
    loaded.step()
    loaded.accelerator.load_state(folder)
    with torch.no_grad():
        assert loaded.loss().item() == expected
    assert [loaded.step() for _ in range(2)] == losses


def test_loaded_weights_count_from_the_next_forward_on(two_ranks: Ranks, tmp_path: Path) -> None:
    """They took effect after the next step: NVIDIA-NeMo/Megatron-Bridge#3397, and diverged later:
    ISEEKYAN/Megatron-LM#104.
    """
    two_ranks.run(_load_into_other_weights, tmp_path / "state")


def _load_weights_alone() -> None:
    training = Training(mixed_precision="bf16")
    engine = engine_of(training.model)
    training.step()
    state = {name: torch.full_like(value, 0.25) for name, value in engine.full_state_dict().items()}
    engine.load_full_state_dict(state)
    for group in training.optimizer.param_groups:
        group["lr"] = 1e-6
    training.step()
    for name, value in engine.full_state_dict().items():
        torch.testing.assert_close(value, torch.full_like(value, 0.25), rtol=0, atol=1e-4, msg=name)


def test_a_step_does_not_undo_loaded_weights(two_ranks: Ranks) -> None:
    """The masters stayed what they had been: NovaSky-AI/SkyRL#2149."""
    two_ranks.run(_load_weights_alone)


def _freeze_then_save(folder: Path) -> None:
    training = Training()
    training.step()
    embedding = training.model.model.embed_tokens.weight
    embedding.requires_grad_(False)
    training.accelerator.save_state(folder)
    expected = engine_of(training.model).full_optimizer_state_dict(training.optimizer.optimizer)
    loaded = Training(seed=1)
    loaded.accelerator.load_state(folder)
    state = engine_of(loaded.model).full_optimizer_state_dict(loaded.optimizer.optimizer)
    assert state.keys() == expected.keys()
    if loaded.accelerator.is_main_process:
        assert sorted(state["state"]) == [*range(len([*loaded.model.parameters()]))]
        for index, values in state["state"].items():
            assert torch.equal(values["exp_avg"], expected["state"][index]["exp_avg"])
            assert values["step"] == 1


def test_state_of_parameters_that_were_frozen_later_is_saved(
    two_ranks: Ranks, tmp_path: Path
) -> None:
    """It was dropped, and missing state gave a TypeError: pytorch/pytorch#192202, #192224."""
    two_ranks.run(_freeze_then_save, tmp_path / "state")


def _load_into_narrower_masters(folder: Path) -> None:
    Training().accelerator.save_state(folder)
    narrow = Training(sshsdp_plugin=SSHSDPPlugin(update_dtype="bfloat16"))
    with pytest.raises(ValueError, match=r"would be rounded to torch\.bfloat16"):
        narrow.accelerator.load_state(folder)


def test_loading_does_not_round_in_silence(two_ranks: Ranks, tmp_path: Path) -> None:
    """fp32 weights were cast to bf16 without a word: pytorch/pytorch#187138."""
    two_ranks.run(_load_into_narrower_masters, tmp_path / "state")


def _save_sharded(folder: Path) -> dict[str, torch.Tensor]:
    training = Training(sshsdp_plugin=SSHSDPPlugin(packs=True))
    training.step()
    training.accelerator.save_state(folder)
    return training.accelerator.get_state_dict(training.model)


def test_a_checkpoint_reads_back_under_the_models_names_and_shapes(
    two_ranks: Ranks, tmp_path: Path
) -> None:
    """Shards off the usual grid would give wrong offsets: NVIDIA/Megatron-LM#6024.

    Accelerate's own tool (`accelerate merge-weights`) reads them.
    """
    weights = two_ranks.run(_save_sharded, tmp_path / "state")[0]
    merge_fsdp_weights(str(tmp_path / "state" / "pytorch_model_fsdp_0"), str(tmp_path / "merged"))
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    # Tied weights are there once.
    assert {*weights} - {*merged} <= {"lm_head.weight"}
    for name, value in merged.items():
        assert torch.equal(value, weights[name]), name


def _fail_with_a_limit_of_one(folder: Path) -> None:
    project = ProjectConfiguration(str(folder), automatic_checkpoint_naming=True, total_limit=1)
    training = Training(project_config=project)
    training.accelerator.save_state()

    def fail(models: Any, weights: Any, output_dir: str) -> None:
        raise OSError("disk full")

    hook = training.accelerator.register_save_state_pre_hook(fail)
    with pytest.raises(OSError, match="disk full"):
        training.accelerator.save_state()
    hook.remove()
    training.accelerator.wait_for_everyone()
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["checkpoint_0"]
    training.accelerator.load_state()
    training.accelerator.save_state()
    training.accelerator.wait_for_everyone()
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["checkpoint_1"]


def test_the_last_checkpoint_is_deleted_only_when_the_next_is_complete(
    two_ranks: Ranks, tmp_path: Path
) -> None:
    """Cleanup had deleted the last good one: KempnerInstitute/KempnerForge#102."""
    two_ranks.run(_fail_with_a_limit_of_one, tmp_path)


def _to_plain_torch() -> tuple[list[float], list[float]]:
    training = Training()
    training.step()
    engine = engine_of(training.model)
    weights = engine.full_state_dict(rank0_only=False)
    states: list[Any] = [engine.full_optimizer_state_dict(training.optimizer.optimizer)]
    torch.distributed.broadcast_object_list(states, src=0)
    ours = [training.step() for _ in range(3)]

    plain = Training("ddp", seed=1)
    plain.accelerator.unwrap_model(plain.model).load_state_dict(weights)
    plain.optimizer.load_state_dict(states[0])
    return ours, [plain.step() for _ in range(3)]


def test_plain_torch_goes_on_with_our_state_dicts(two_ranks: Ranks) -> None:
    """Neither could read the other's: pytorch/pytorch#86479, #113673."""
    ours, theirs = two_ranks.run(_to_plain_torch)[0]
    assert ours == pytest.approx(theirs, rel=1e-5)
