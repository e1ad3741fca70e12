"""`save_state` and `load_state`: resuming, other world sizes, FSDP2's and DDP's checkpoints."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from accelerate.state import PartialState
from accelerate.utils import (
    DataLoaderConfiguration,
    FullyShardedDataParallelPlugin,
    ProjectConfiguration,
    fsdp_utils,
)
from torch import nn
from torch.distributed.fsdp import fully_shard

from accelerate_sshsdp import SSHSDPPlugin, engine_of
from sshsdp.comm import rendezvous
from tests.accelerate.models import Pair, loader, make
from tests.accelerate.training import grouped, new_accelerator, step, warm_up
from tests.support.matrices import iterating_in_full

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.accelerate.conftest import Ranks

NUM_BATCHES = 6


@dataclass
class Counter:
    """An object for `register_for_checkpointing`."""

    values: list[float] = field(default_factory=list)

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = state["values"]


class Training:
    """A prepared training, in steps that a test chooses."""

    def __init__(self, which: str = "ours", kind: str = "llama", **options: Any) -> None:
        # Batches are the same for every number of ranks.
        batches = DataLoaderConfiguration(split_batches=True)
        self.accelerator = new_accelerator(which, dataloader_config=batches, **options)
        torch.manual_seed(1 + self.accelerator.process_index)
        model = make(kind)
        optimizer = torch.optim.AdamW(grouped(model), lr=1e-2)
        self.model, self.optimizer, self.batches, self.schedule = self.accelerator.prepare(
            model, optimizer, loader(kind, 4 * NUM_BATCHES), warm_up(optimizer)
        )
        self.losses = Counter()
        self._iterator: Any = None
        self.accelerator.register_for_checkpointing(self.losses)

    def run(self, start: int, stop: int) -> list[float]:
        """Train on batches ``[start, stop)`` of the epoch; the losses over all ranks."""
        if self._iterator is None:
            self._iterator = iter(self.accelerator.skip_first_batches(self.batches, start))
        for batch in itertools.islice(self._iterator, stop - start):
            loss, _ = step(self.accelerator, self.model, self.optimizer, self.schedule, batch)
            self.losses.values.append(loss)
        return self.losses.values[start - stop :]


def _train_and_save(folder: Path, options: dict[str, Any], stop: int = 3) -> list[float]:
    training = Training(**options)
    training.run(0, stop)
    training.accelerator.save_state(folder)
    noise, rate = random.random(), training.schedule.get_last_lr()
    losses = training.run(stop, NUM_BATCHES)
    # The random numbers go on where they were.
    again = Training(**options)
    random.seed(0)
    again.accelerator.load_state(folder)
    assert random.random() == noise
    assert again.losses.values == training.losses.values[:stop]
    assert again.schedule.get_last_lr() == rate
    assert again.run(stop, NUM_BATCHES) == losses
    assert not [path for path in folder.parent.iterdir() if path.name.startswith(".")]
    return losses


def _resume(folder: Path, options: dict[str, Any]) -> list[float]:
    training = Training(**options)
    training.accelerator.load_state(folder)
    return training.run(3, NUM_BATCHES)


def _run_without_stop(options: dict[str, Any]) -> list[float]:
    return Training("ddp", **options).run(0, NUM_BATCHES)[3:]


@pytest.mark.parametrize("kind", ["llama", "t5"])
def test_resuming_equals_a_run_without_a_stop_on_any_number_of_ranks(
    one_rank: Ranks, two_ranks: Ranks, four_ranks: Ranks, tmp_path: Path, kind: str
) -> None:
    """Universal checkpoints resumed as from scratch, or on the same number of ranks only.

    huggingface/accelerate#3971, deepspeedai/DeepSpeed#2898, #3810, #6691, pytorch/torchtitan#811.
    """
    folder = tmp_path / "state"
    options: dict[str, Any] = {"kind": kind}
    losses = two_ranks.run(_train_and_save, folder, options)[0]
    assert losses == pytest.approx(two_ranks.run(_run_without_stop, options)[0], rel=1e-5)
    assert one_rank.run(_resume, folder, options)[0] == pytest.approx(losses, rel=1e-5)
    options["sshsdp_plugin"] = SSHSDPPlugin(replicate_size=2, packs=True)
    assert four_ranks.run(_resume, folder, options)[0] == pytest.approx(losses, rel=1e-5)


def _resume_mid_accumulation(folder: Path) -> list[float]:
    options: dict[str, Any] = {"gradient_accumulation_steps": 2, "mixed_precision": "bf16"}
    if dist.get_world_size() == 2:
        return _train_and_save(folder, options, 4)
    training = Training(**options)
    training.accelerator.load_state(folder)
    # Ranks that were not there before count micro-batches as the others do.
    assert training.accelerator.step == 4
    return training.run(4, NUM_BATCHES)


def test_new_ranks_accumulate_in_step_with_the_others(
    two_ranks: Ranks, four_ranks: Ranks, tmp_path: Path
) -> None:
    losses = two_ranks.run(_resume_mid_accumulation, tmp_path / "state")[0]
    resumed = four_ranks.run(_resume_mid_accumulation, tmp_path / "state")[0]
    assert resumed == pytest.approx(losses, rel=1e-2)


def _muon_with_adamw(which: str, folder: Path) -> list[float]:
    """Two optimizers of one model, prepared apart; ours is saved and resumed half-way."""
    batch = torch.arange(24).view(2, 12) + dist.get_rank()

    def prepare() -> tuple[Any, ...]:
        accelerator = new_accelerator(which)
        model = make("llama")
        matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
        others = [p for p in model.parameters() if not any(p is matrix for matrix in matrices)]
        muon = accelerator.prepare(torch.optim.Muon(matrices, lr=1e-2))
        model = accelerator.prepare(model)
        return accelerator, model, muon, accelerator.prepare(torch.optim.AdamW(others, lr=1e-2))

    def train(num_steps: int) -> list[float]:
        losses = []
        for _ in range(num_steps):
            loss = model(input_ids=batch, labels=batch).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            for one in (muon, adamw):
                with iterating_in_full():
                    one.step()
                one.zero_grad()
            losses.append(accelerator.reduce(loss.detach(), "mean").item())
        return losses

    accelerator, model, muon, adamw = prepare()
    losses = train(2)
    if which == "ours":
        accelerator.save_state(folder)
        expected = train(2)
        accelerator, model, muon, adamw = prepare()
        accelerator.load_state(folder)
        assert train(2) == expected
        return losses + expected
    return losses + train(2)


def test_two_optimizers_of_one_model_train_as_in_ddp_and_resume(
    two_ranks: Ranks, tmp_path: Path
) -> None:
    ours, theirs = (
        two_ranks.run(_muon_with_adamw, which, tmp_path / "state")[0] for which in ("ours", "ddp")
    )
    assert ours == pytest.approx(theirs, rel=1e-5)


# Others' checkpoints


def _save_ddp(folder: Path) -> list[float]:
    training = Training("ddp")
    training.run(0, 3)
    training.accelerator.save_state(str(folder))
    return training.run(3, NUM_BATCHES)


def test_a_checkpoint_of_ddp_loads(two_ranks: Ranks, tmp_path: Path) -> None:
    """Sharded runs could not read DDP's: pytorch/pytorch#86479, #113673."""
    losses = two_ranks.run(_save_ddp, tmp_path / "ddp")[0]
    assert two_ranks.run(_resume, tmp_path / "ddp", {})[0] == pytest.approx(losses, rel=1e-5)


def _accelerate_fsdp2(folder: Path, saves: bool) -> list[float]:
    """Save, or load and go on, with Accelerate's own functions for FSDP2."""
    PartialState(cpu=True)
    model = make("llama")
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(grouped(model), lr=1e-2)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT")
    host = SimpleNamespace(
        process_index=dist.get_rank(),
        is_main_process=dist.get_rank() == 0,
        num_processes=2,
        is_fsdp2=True,
        wait_for_everyone=dist.barrier,
    )
    batch = {"input_ids": torch.arange(8).view(2, 4) + dist.get_rank()}
    batch["labels"] = batch["input_ids"]

    def train(num_steps: int) -> list[float]:
        losses = []
        for _ in range(num_steps):
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    if not saves:
        fsdp_utils.load_fsdp_model(plugin, host, model, str(folder))
        fsdp_utils.load_fsdp_optimizer(plugin, host, optimizer, model, str(folder))
        return train(3)
    train(2)
    fsdp_utils.save_fsdp_model(plugin, host, model, folder)
    fsdp_utils.save_fsdp_optimizer(plugin, host, optimizer, model, folder)
    return train(3)


def _ours(folder: Path, saves: bool) -> list[float]:
    accelerator = new_accelerator("ours")
    model = make("llama")
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(grouped(model), lr=1e-2))
    batch = {"input_ids": torch.arange(8).view(2, 4) + accelerator.process_index}
    batch["labels"] = batch["input_ids"]
    losses = []
    if not saves:
        accelerator.load_state(folder)
    for index in range(5 if saves else 3):
        if saves and index == 2:
            accelerator.save_state(folder)
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses[-3:]


def test_checkpoints_go_to_and_from_accelerates_fsdp2(two_ranks: Ranks, tmp_path: Path) -> None:
    """With SHARDED_STATE_DICT, and with the step counts of Adam (huggingface/accelerate#3971)."""
    theirs = two_ranks.run(_accelerate_fsdp2, tmp_path / "theirs", True)
    ours = two_ranks.run(_ours, tmp_path / "ours", True)
    for rank in range(2):
        assert ours[rank] == pytest.approx(theirs[rank], rel=1e-5)
    assert two_ranks.run(_ours, tmp_path / "theirs", False)[1] == pytest.approx(ours[1], rel=1e-5)
    loaded = two_ranks.run(_accelerate_fsdp2, tmp_path / "ours", False)
    assert loaded[1] == pytest.approx(theirs[1], rel=1e-5)


# Names, limits, hooks


def _save_many(folder: Path) -> None:
    project = ProjectConfiguration(str(folder), automatic_checkpoint_naming=True, total_limit=2)
    training = Training(project_config=project)
    for index in range(3):
        training.run(index, index + 1)
        training.accelerator.save_state()
        training.accelerator.wait_for_everyone()
    kept = ["checkpoint_1", "checkpoint_2"]
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == kept
    losses = training.run(3, NUM_BATCHES)

    project = ProjectConfiguration(str(folder), automatic_checkpoint_naming=True, total_limit=2)
    training = Training(project_config=project)
    with pytest.raises(FileExistsError, match="load it first, or set project_configuration"):
        project.iteration = 2
        training.accelerator.save_state()
    # Of a save that ended early; it is not taken for a checkpoint.
    (folder / "checkpoints" / ".checkpoint_7.saving").mkdir(exist_ok=True)
    training.accelerator.load_state()
    assert training.run(3, NUM_BATCHES) == losses
    training.accelerator.wait_for_everyone()
    training.accelerator.save_state()
    training.accelerator.wait_for_everyone()
    assert (folder / "checkpoints" / "checkpoint_3" / "optimizer_0").is_dir()
    assert not (folder / "checkpoints" / "checkpoint_1").exists()


def test_numbered_checkpoints_are_kept_up_to_the_limit_and_go_on_after_a_load(
    two_ranks: Ranks, tmp_path: Path
) -> None:
    two_ranks.run(_save_many, tmp_path)


def _save_with_hooks(folder: Path) -> None:
    accelerator = new_accelerator("ours")
    adapter, model = Pair(), make("llama")
    adapter, model, a, b = accelerator.prepare(
        adapter,
        model,
        torch.optim.SGD(adapter.parameters(), lr=0.1, momentum=0.9),
        torch.optim.AdamW(model.parameters()),
    )

    def save(models: list[nn.Module], weights: list[Any], output_dir: str) -> None:
        assert models == [adapter, model]
        assert [*weights[0]] == [name for name, _ in adapter.named_parameters()]
        state = accelerator.get_state_dict(models[0])
        if accelerator.is_main_process:
            # As diffusers' scripts do it, on the main process alone.
            torch.save(state, Path(output_dir) / "adapter.pt")
            weights.pop(0)

    def load(models: list[nn.Module], input_dir: str) -> None:
        state = torch.load(Path(input_dir) / "adapter.pt")
        engine_of(models.pop(0)).load_full_state_dict(state)

    handle = accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)
    accelerator.save_state(folder)
    names = {path.name for path in folder.iterdir()}
    assert {"adapter.pt", "pytorch_model_fsdp_0", "optimizer_0", "optimizer_1"} <= names
    assert "pytorch_model_fsdp_1" not in names

    before = [p.tensor.clone() for e in accelerator.engines for _, p in e.update_parameters()]
    accelerator.backward(adapter(torch.ones(1, 6)).sum())
    accelerator.backward(model(input_ids=torch.ones(1, 3, dtype=torch.long)).logits.sum())
    a.step(), b.step(), a.zero_grad(), b.zero_grad()
    accelerator.load_state(folder)
    after = [p.tensor for e in accelerator.engines for _, p in e.update_parameters()]
    assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True))

    handle.remove()
    accelerator.register_save_state_pre_hook(lambda models, weights, _: weights.append({}))
    with pytest.raises((ValueError, RuntimeError), match="put something into `weights`"):
        accelerator.save_state(folder)


def test_hooks_save_and_load_models_themselves(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks.run(_save_with_hooks, tmp_path / "state")


# Failures


class _Failing:
    def state_dict(self) -> dict[str, Any]:
        raise OSError("disk full")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def _fail_to_save(folder: Path) -> None:
    accelerator = new_accelerator("ours")
    model = Pair()
    model, _ = accelerator.prepare(model, torch.optim.Adam(model.parameters()))
    accelerator.save_state(folder)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        (folder / "tokenizer").mkdir()
        (folder / "tokenizer" / "vocabulary.txt").write_text("a b c")
        (folder / "notes.txt").write_text("mine")
        (folder / "random_states_7.pkl").write_text("of a larger world")
        # Only one rank fails.
        accelerator.register_for_checkpointing(_Failing())
    accelerator.wait_for_everyone()
    before = _sizes(folder)
    with pytest.raises((OSError, RuntimeError), match="disk full"):
        accelerator.save_state(folder)
    accelerator.wait_for_everyone()
    assert _sizes(folder) == before
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    accelerator._custom_objects.clear()
    accelerator.load_state(folder)

    # What others have put there stays when it succeeds.
    accelerator.save_state(folder)
    accelerator.wait_for_everyone()
    assert (folder / "tokenizer" / "vocabulary.txt").read_text() == "a b c"
    assert (folder / "notes.txt").read_text() == "mine"
    assert not (folder / "random_states_7.pkl").exists()


def _sizes(folder: Path) -> dict[str, int]:
    return {str(p): p.stat().st_size for p in sorted(folder.rglob("*")) if p.is_file()}


def test_a_failed_save_leaves_what_was_there(two_ranks: Ranks, tmp_path: Path) -> None:
    """Cleanup had deleted the last good checkpoint: KempnerInstitute/KempnerForge#102."""
    two_ranks.run(_fail_to_save, tmp_path / "outputs" / "state")


def _save_on_rank_0_only(folder: Path) -> None:
    training = Training()
    with patch.object(rendezvous, "MISSING_RANKS_TIMEOUT", timedelta(seconds=0.5)):
        if training.accelerator.is_main_process:
            with pytest.raises(RuntimeError, match=r"ranks \[1\] did not call it within"):
                training.accelerator.save_state(folder)
    dist.barrier()
    assert not folder.exists()
    training.accelerator.save_state(folder)


def test_a_rank_that_does_not_save_is_named(two_ranks: Ranks, tmp_path: Path) -> None:
    """It hung: huggingface/accelerate#2000, pytorch/pytorch#122903."""
    two_ranks.run(_save_on_rank_0_only, tmp_path / "state")


def _mistakes(folder: Path) -> None:
    accelerator = new_accelerator("ours")
    model = Pair()
    accelerator.prepare(model, torch.optim.Adam(model.parameters()))
    with pytest.raises(ValueError, match=r"save_state\(\) needs output_dir"):
        accelerator.save_state()
    with pytest.raises(ValueError, match=r"load_state\(\) needs input_dir"):
        accelerator.load_state()
    with pytest.raises(ValueError, match=r"there is no directory .*nowhere"):
        accelerator.load_state(folder / "nowhere")
    accelerator.save_state(folder)
    other = new_accelerator("ours")
    other.prepare(Pair(5))
    with pytest.raises(ValueError, match=r"has shape \(6, 6\) in the checkpoint"):
        other.load_state(folder)
    more = Pair()
    more.head = nn.Linear(2, 2)
    other = new_accelerator("ours")
    other.prepare(more)
    with pytest.raises(ValueError, match="head"):
        other.load_state(folder)
    other.load_state(folder, strict=False)
    second = Pair()
    other.prepare(second)
    with pytest.raises((FileNotFoundError, RuntimeError), match=r"no weights of Pair \(model 1\)"):
        other.load_state(folder)

    for_nodes = ProjectConfiguration(save_on_each_node=True)
    with pytest.raises(ValueError, match="one directory that all nodes see"):
        new_accelerator("ours", project_config=for_nodes).save_state(folder)


def test_mistakes_with_checkpoints_are_named(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks.run(_mistakes, tmp_path / "state")


def _fp16(folder: Path) -> None:
    training = Training(mixed_precision="fp16")
    training.run(0, 1)
    training.accelerator.scaler.update(new_scale=512.0)
    training.accelerator.save_state(folder)
    again = Training(mixed_precision="fp16")
    again.accelerator.load_state(folder)
    again.run(1, 2)
    assert again.accelerator.scaler.get_scale() == 512.0


def test_the_loss_scale_is_part_of_the_state(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks.run(_fp16, tmp_path / "state")


# Exports


def _export(folder: Path) -> Sequence[str]:
    from safetensors.torch import load_file

    training = Training(mixed_precision="bf16")
    training.run(0, 2)
    accelerator, model = training.accelerator, training.model
    state = accelerator.get_state_dict(model)
    assert bool(state) == accelerator.is_main_process
    accelerator.save_model(model, folder / "model", max_shard_size="4KB")
    accelerator.unwrap_model(model).save_pretrained(folder / "pretrained")
    accelerator.wait_for_everyone()
    files = sorted(path.name for path in (folder / "model").iterdir())
    found: dict[str, torch.Tensor] = {}
    for name in files:
        if name.endswith(".safetensors"):
            found.update(load_file(folder / "model" / name))
    assert "lm_head.weight" not in found or "model.embed_tokens.weight" not in found
    loaded = type(model).from_pretrained(folder / "pretrained")
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert loaded.config.dtype == torch.float32
    weights = loaded.state_dict()
    for name, value in state.items():
        assert value.dtype == torch.float32
        assert torch.equal(weights[name], value), name
        if name in found:
            assert torch.equal(found[name], value), name
    return files


def test_exports_hold_the_masters_and_tied_weights_once(two_ranks: Ranks, tmp_path: Path) -> None:
    files = two_ranks.run(_export, tmp_path)[0]
    assert "model.safetensors.index.json" in files
    assert len(files) > 3
