"""Checkpoints of the Trainer: both formats, any world size, to and from other strategies."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fsspec
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.testing import assert_close

import lightning_sshsdp
from tests.lightning.comparing import assert_same_weights, weights_of
from tests.lightning.modules import LanguageModule, make_trainer, token_loader

if TYPE_CHECKING:
    from tests.lightning.conftest import Ranks
    from tests.support.interpreters import Interpreter

FORMATS = ["sharded", "full"]
GLOBAL_BATCH = 4


def _strategy(name: str) -> Any:
    if name in FORMATS:
        return lightning_sshsdp.SSHSDPStrategy(checkpoint=name)
    return name


def _fit(
    strategy: str,
    epochs: int,
    options: dict[str, Any],
    ckpt_path: str | None = None,
    **trainer_options: Any,
) -> Any:
    world_size = int(os.environ["WORLD_SIZE"])
    loader = token_loader(32 // (GLOBAL_BATCH // world_size), GLOBAL_BATCH // world_size)
    module = LanguageModule(**options)
    trainer = make_trainer(
        _strategy(strategy), max_epochs=epochs, devices=world_size, **trainer_options
    )
    trainer.fit(module, loader, ckpt_path=ckpt_path)
    return trainer


def _interrupted(
    first: str, second: str, options: dict[str, Any], path: str
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    straight = weights_of(_fit(second, 2, options))
    _fit(first, 1, options).save_checkpoint(path)
    # Another seed: everything must come from the checkpoint.
    resumed = _fit(second, 2, {**options, "seed": 5}, ckpt_path=path)
    assert resumed.global_step == 16
    if options.get("scheduler"):
        rate = resumed.optimizers[0].param_groups[0]["lr"]
        assert rate == pytest.approx(options.get("lr", 1e-2) * 0.5**8)
    return straight, weights_of(resumed)


class TestResuming:
    """A full checkpoint of plain SGD has an empty state: ModelParallelStrategy's IndexError."""

    @pytest.mark.parametrize("checkpoint", FORMATS)
    @pytest.mark.parametrize(
        "options", [{"scheduler": True}, {"optimizer": "momentum"}, {"optimizer": "sgd"}]
    )
    def test_resuming_changes_no_bit(
        self, two_ranks: Ranks, tmp_path: Path, checkpoint: str, options: dict[str, Any]
    ) -> None:
        path = str(tmp_path / "half.ckpt")
        for straight, resumed in two_ranks.run(_interrupted, checkpoint, checkpoint, options, path):
            assert_same_weights(resumed, straight, rtol=0)
        assert Path(path).is_dir() == (checkpoint == "sharded")


@pytest.mark.parametrize(("first", "second"), [("ddp", "sharded"), ("full", "ddp")])
def test_ddp_and_sshsdp_resume_from_each_other(
    two_ranks: Ranks, tmp_path: Path, first: str, second: str
) -> None:
    path = str(tmp_path / "half.ckpt")
    options = {"scheduler": True}
    for straight, resumed in two_ranks.run(_interrupted, first, second, options, path):
        assert_same_weights(resumed, straight)


def _fit_and_save(strategy: str, epochs: int, path: str, ckpt_path: str | None) -> Any:
    trainer = _fit(strategy, epochs, {"seed": 1 if ckpt_path is None else 5}, ckpt_path)
    trainer.save_checkpoint(path)
    return weights_of(trainer)


@pytest.mark.parametrize("checkpoint", FORMATS)
def test_any_number_of_ranks_goes_on(
    one_rank: Ranks,
    two_ranks: Ranks,
    four_ranks: Ranks,
    tmp_path: Path,
    checkpoint: str,
) -> None:
    """From two ranks to one to four, one epoch each."""
    paths = [str(tmp_path / name) for name in ("first", "second", "third")]
    two_ranks.run(_fit_and_save, checkpoint, 1, paths[0], None)
    one_rank.run(_fit_and_save, checkpoint, 2, paths[1], paths[0])
    resumed = four_ranks.run(_fit_and_save, checkpoint, 3, paths[2], paths[1])
    straight = two_ranks.run(_fit_and_save, checkpoint, 3, str(tmp_path / "straight"), None)
    assert_same_weights(resumed[3], straight[0])


class _FullyShardModule(LanguageModule):
    def configure_model(self) -> None:
        super().configure_model()
        for block in self.model.blocks:
            fully_shard(block, mesh=self.device_mesh["data_parallel"])
        fully_shard(self.model, mesh=self.device_mesh["data_parallel"])


def _resume_from_fsdp2(path: str) -> tuple[Any, Any]:
    options = {"optimizer": "momentum"}
    straight = weights_of(_fit("ddp", 2, options))
    strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    trainer = make_trainer(strategy, max_epochs=1)
    trainer.fit(_FullyShardModule(**options), token_loader(16))
    trainer.save_checkpoint(path)
    return straight, weights_of(_fit("sharded", 2, {**options, "seed": 5}, ckpt_path=path))


def test_checkpoints_of_lightnings_fsdp2_strategy_load(two_ranks: Ranks, tmp_path: Path) -> None:
    for straight, resumed in two_ranks.run(_resume_from_fsdp2, str(tmp_path / "fsdp2.ckpt")):
        assert_same_weights(resumed, straight)


class TestConsolidation:
    """The command of ``lightning.pytorch`` is a KeyError on ModelParallelStrategy's directories."""

    @pytest.mark.parametrize("package", ["lightning.pytorch", "lightning.fabric"])
    def test_consolidated_checkpoints_are_ordinary_ones(
        self, two_ranks: Ranks, interpreter: Interpreter, tmp_path: Path, package: str
    ) -> None:
        path, whole = tmp_path / "sharded.ckpt", tmp_path / "whole.ckpt"
        weights = two_ranks.run(_fit_and_save, "sharded", 1, str(path), None)[0]
        command = f"{package}.utilities.consolidate_checkpoint"
        subprocess.run(
            [interpreter.executable, "-m", command, str(path), "--output_file", str(whole)],
            env=interpreter.environment,
            check=True,
            timeout=100,
        )
        if package == "lightning.fabric":
            consolidated = torch.load(whole)["model"]
            assert_same_weights({name: consolidated[name] for name in weights}, weights, rtol=0)
            return
        module = LanguageModule.load_from_checkpoint(whole)
        assert_same_weights(module.state_dict(), weights, rtol=0)
        ddp = two_ranks.run(_fit_and_save, "ddp", 2, str(tmp_path / "ddp.ckpt"), str(whole))[0]
        ours = two_ranks.run(_fit_and_save, "full", 2, str(tmp_path / "ours.ckpt"), str(path))[0]
        assert_same_weights(ours, ddp)


class TestLoadFromCheckpoint:
    """Lightning alone raises IsADirectoryError for a sharded checkpoint."""

    @pytest.mark.parametrize("checkpoint", FORMATS)
    def test_load_from_checkpoint_needs_no_strategy(
        self, two_ranks: Ranks, tmp_path: Path, checkpoint: str
    ) -> None:
        path = str(tmp_path / "some.ckpt")
        weights = two_ranks.run(_fit_and_save, checkpoint, 1, path, None)[0]
        module = LanguageModule.load_from_checkpoint(path)
        assert module.hparams.seed == 1
        assert_same_weights(module.state_dict(), weights, rtol=0)


class _TwoOptimizers(LanguageModule):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(self.loss(batch))
        for optimizer in self.optimizers():
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        rest = [p for n, p in self.named_parameters() if "blocks" not in n]
        blocks = self.model.blocks.parameters()
        return [torch.optim.AdamW(rest, lr=0.01), torch.optim.SGD(blocks, 0.01, momentum=0.9)]


def _two_optimizers(checkpoint: str, path: str) -> None:
    trainer = make_trainer(_strategy(checkpoint), max_epochs=2)
    trainer.fit(_TwoOptimizers(), token_loader(16))
    straight = weights_of(trainer)
    trainer = make_trainer(_strategy(checkpoint))
    trainer.fit(_TwoOptimizers(), token_loader(16))
    trainer.save_checkpoint(path)
    trainer = make_trainer(_strategy(checkpoint), max_epochs=2)
    trainer.fit(_TwoOptimizers(), token_loader(16), ckpt_path=path)
    assert_same_weights(weights_of(trainer), straight, rtol=0)
    with pytest.raises(RuntimeError, match=r"1 optimizers, .* states of 2"):
        make_trainer(_strategy(checkpoint)).fit(LanguageModule(), token_loader(), ckpt_path=path)


@pytest.mark.parametrize("checkpoint", FORMATS)
def test_each_of_two_optimizers_gets_its_own_state(
    two_ranks: Ranks, tmp_path: Path, checkpoint: str
) -> None:
    two_ranks.run(_two_optimizers, checkpoint, str(tmp_path / "two.ckpt"))


def _fit_with_callback(checkpoint: str, directory: str) -> tuple[list[str], float, float]:
    callback = ModelCheckpoint(
        directory, monitor="val_loss", save_top_k=2, save_last=True, filename="{epoch}"
    )
    module = LanguageModule()
    trainer = make_trainer(
        _strategy(checkpoint), max_epochs=4, callbacks=callback, enable_checkpointing=True
    )
    trainer.fit(module, token_loader(16), token_loader(8))
    best = trainer.validate(ckpt_path="best", dataloaders=token_loader(8), verbose=False)
    return sorted(os.listdir(directory)), float(callback.best_model_score), best[0]["val_loss"]


@pytest.mark.parametrize("checkpoint", FORMATS)
def test_model_checkpoint_keeps_the_best_and_the_last(
    two_ranks: Ranks, tmp_path: Path, checkpoint: str
) -> None:
    files, best, validated = two_ranks.run(_fit_with_callback, checkpoint, str(tmp_path))[0]
    assert len(files) == 3, files
    assert "last.ckpt" in files
    assert validated == pytest.approx(best, rel=1e-6)


def _weights_only(checkpoint: str, path: str) -> tuple[Any, Any, int]:
    trainer = _fit(checkpoint, 1, {})
    trainer.save_checkpoint(path, weights_only=True)
    resumed = _fit(checkpoint, 1, {"seed": 5}, ckpt_path=path)
    return weights_of(trainer), weights_of(resumed), len(resumed.optimizers[0].state)


class TestWeightsOnly:
    """ModelParallelStrategy cannot fit from a sharded one, and no strategy from a full one."""

    @pytest.mark.parametrize("checkpoint", FORMATS)
    def test_fit_starts_from_a_weights_only_checkpoint(
        self, two_ranks: Ranks, tmp_path: Path, checkpoint: str
    ) -> None:
        for saved, resumed, num_states in two_ranks.run(
            _weights_only, checkpoint, str(tmp_path / "weights.ckpt")
        ):
            # The epoch was complete, so nothing was trained after loading.
            assert_same_weights(resumed, saved, rtol=0)
            assert num_states == 0


class _Bigger(LanguageModule):
    def __init__(self, strict: bool, **options: Any) -> None:
        super().__init__(**options)
        self.strict_loading = strict
        self.extra = torch.nn.Linear(3, 2)
        torch.nn.init.constant_(self.extra.weight, 0.5)


def _loads_other_names(checkpoint: str, path: str) -> None:
    saved = weights_of(_fit(checkpoint, 1, {}))
    trainer = make_trainer(_strategy(checkpoint))
    trainer.fit(LanguageModule(), token_loader(16))
    trainer.save_checkpoint(path)
    loose = make_trainer(_strategy(checkpoint), inference_mode=False)
    module = _Bigger(strict=False, seed=5)
    loose.validate(module, token_loader(4), ckpt_path=path, verbose=False)
    weights = weights_of(loose)
    assert_close(weights.pop("extra.weight"), torch.full((2, 3), 0.5))
    weights.pop("extra.bias")
    assert weights.keys() == saved.keys()
    assert not torch.equal(weights["model.norm.weight"], torch.ones(16))
    with pytest.raises((RuntimeError, ValueError), match=r"extra\.weight"):
        make_trainer(_strategy(checkpoint)).validate(
            _Bigger(strict=True), token_loader(4), ckpt_path=path, verbose=False
        )


class TestStrictLoading:
    """``strict_loading=False`` fails on ModelParallelStrategy's sharded checkpoints."""

    @pytest.mark.parametrize("checkpoint", FORMATS)
    def test_missing_names_are_an_error_only_when_loading_is_strict(
        self, two_ranks: Ranks, tmp_path: Path, checkpoint: str
    ) -> None:
        two_ranks.run(_loads_other_names, checkpoint, str(tmp_path / "some.ckpt"))


def _replaces_each_other(directory: str) -> None:
    path = os.path.join(directory, "some.ckpt")
    sharded, full = _fit("sharded", 1, {}), _fit("full", 1, {})
    for trainer in (sharded, full, sharded, sharded, full):
        trainer.save_checkpoint(path)
        assert os.path.isdir(path) == (trainer is sharded)
        assert os.listdir(directory) == ["some.ckpt"]
        trainer.strategy.barrier()
    other = Path(directory, "other")
    other.mkdir(exist_ok=True)
    (other / "precious").write_text("x")
    sharded.strategy.barrier()
    for trainer in (sharded, full):
        with pytest.raises(RuntimeError, match=r"other is a directory"):
            trainer.save_checkpoint(other)
    with pytest.raises(TypeError, match="storage_options"):
        sharded.save_checkpoint(path, storage_options={"a": 1})
    with pytest.raises(ValueError, match="URL"):
        sharded.save_checkpoint("memory://bucket/some.ckpt")
    full.save_checkpoint(f"memory://bucket/{full.global_rank}.ckpt")
    assert fsspec.filesystem("memory").exists("/bucket/0.ckpt") == (full.global_rank == 0)


def test_either_format_replaces_the_other(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks.run(_replaces_each_other, str(tmp_path))


class _KeepsBlocks(LanguageModule):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        checkpoint["state_dict"] = {k: v for k, v in state.items() if "blocks" in k}
        checkpoint["mine"] = {"note": Path("a")}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.note = checkpoint["mine"]["note"]


def _uses_hooks(checkpoint: str, path: str) -> None:
    trainer = make_trainer(_strategy(checkpoint))
    trainer.fit(_KeepsBlocks(), token_loader(16))
    trainer.save_checkpoint(path)
    with pytest.raises(Exception, match="weights_only"):
        make_trainer(_strategy(checkpoint)).validate(
            _KeepsBlocks(), token_loader(4), ckpt_path=path, verbose=False
        )
    module = _KeepsBlocks(seed=5)
    module.strict_loading = False
    loading = make_trainer(_strategy(checkpoint))
    loading.validate(module, token_loader(4), ckpt_path=path, verbose=False, weights_only=False)
    assert module.note == Path("a")
    trained, loaded, fresh = weights_of(trainer), weights_of(loading), _KeepsBlocks(seed=5)
    for name, value in fresh.state_dict().items():
        expected = trained[name] if "blocks" in name else value
        assert_close(loaded[name], expected, rtol=0, atol=0, msg=name)


@pytest.mark.parametrize("checkpoint", FORMATS)
def test_hooks_change_what_is_saved_and_weights_only_is_honoured(
    two_ranks: Ranks, tmp_path: Path, checkpoint: str
) -> None:
    """Lightning drops ``weights_only`` for strategies that restore after their set-up."""
    two_ranks.run(_uses_hooks, checkpoint, str(tmp_path / "some.ckpt"))


def test_a_checkpoint_io_needs_the_full_format() -> None:
    with pytest.raises(ValueError, match="checkpoint='full'"):
        make_trainer("sshsdp", plugins=TorchCheckpointIO())
    strategy = lightning_sshsdp.SSHSDPStrategy(checkpoint="full", checkpoint_io=TorchCheckpointIO())
    assert isinstance(strategy.checkpoint_io, TorchCheckpointIO)
