"""What Lightning's own tests of its FSDP and model-parallel strategies check, checked here."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.pytorch.plugins.environments import LightningEnvironment
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing import assert_close

import lightning_sshsdp
from tests.lightning.comparing import assert_same_weights, assert_trains_like_ddp, weights_of
from tests.lightning.modules import (
    VOCABULARY,
    Block,
    LanguageModel,
    LanguageModule,
    make_trainer,
    token_loader,
)

if TYPE_CHECKING:
    from pathlib import Path

    from tests.lightning.conftest import Ranks

FORMATS = ["sharded", "full"]


def _strategy(checkpoint: str, **options: Any) -> Any:
    return lightning_sshsdp.SSHSDPStrategy(checkpoint=checkpoint, **options)


def _fabric(checkpoint: str = "sharded", **options: Any) -> Fabric:
    strategy = lightning_sshsdp.FabricSSHSDPStrategy(checkpoint=checkpoint)
    fabric = Fabric(strategy=strategy, accelerator="cpu", devices=2, **options)
    fabric.launch()
    return fabric


# The mesh


class _LooksAtMesh(LanguageModule):
    def configure_model(self) -> None:
        super().configure_model()
        self.seen = self.device_mesh


def _meshes() -> list[Any]:
    seen = []
    for sizes in ({"shard_size": 1}, {"shard_size": 4}, {"replicate_size": 2}, {}):
        module = _LooksAtMesh(in_configure_model=True)
        trainer = make_trainer(lightning_sshsdp.SSHSDPStrategy(**sizes), devices=4)
        trainer.fit(module, token_loader(4))
        assert isinstance(module.seen, DeviceMesh)
        seen.append((module.seen.mesh_dim_names, tuple(module.seen.shape)))
    return seen


def test_configure_model_sees_the_mesh_of_the_sizes_asked_for(four_ranks: Ranks) -> None:
    both = ("replicate", "shard")
    expected = [(both, (4, 1)), (("shard",), (4,)), (both, (2, 2)), (("shard",), (4,))]
    assert four_ranks.run(_meshes) == [expected] * 4


# State dicts and files


def _states(checkpoint: str) -> tuple[list[str], list[str], int]:
    module = LanguageModule()
    names = list(module.state_dict())
    trainer = make_trainer(_strategy(checkpoint))
    trainer.fit(module, token_loader(4))
    optimizer = trainer.strategy.optimizer_state(trainer.optimizers[0])
    return names, list(trainer.strategy.lightning_module_state_dict()), len(optimizer)


@pytest.mark.parametrize("checkpoint", FORMATS)
def test_state_dicts_have_the_names_of_the_plain_module(two_ranks: Ranks, checkpoint: str) -> None:
    (names, first, optimizer), (_, second, other) = two_ranks.run(_states, checkpoint)
    assert first == names
    assert optimizer == 2
    assert (second, other) == ((names, 2) if checkpoint == "sharded" else ([], 0))


def _files(path: Path) -> None:
    trainer = make_trainer(default_root_dir=path, enable_checkpointing=True)
    trainer.fit(LanguageModule(), token_loader(8))
    saved = trainer.strategy.broadcast(trainer.checkpoint_callback.best_model_path)
    assert {*os.listdir(saved)} == {"meta.pt", ".metadata", "__0_0.distcp", "__1_0.distcp"}
    metadata = torch.load(f"{saved}/meta.pt", weights_only=True)
    assert "pytorch-lightning_version" in metadata
    assert len(metadata["callbacks"]) == 1
    assert not {"state_dict", "optimizer_states"} & {*metadata}


def test_directories_hold_shards_and_metadata_apart(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks.run(_files, tmp_path)


def _no_checkpoint(path: Path) -> None:
    for checkpoint in FORMATS:
        with pytest.raises(ValueError, match=r"empty is a directory without meta\.pt"):
            make_trainer(_strategy(checkpoint)).fit(
                LanguageModule(), token_loader(4), ckpt_path=str(path)
            )
        fabric = _fabric(checkpoint)
        model = fabric.setup_module(nn.Linear(2, 2))
        with pytest.raises(ValueError, match=r"empty is a directory without meta\.pt"):
            fabric.load(path, {"model": model})


def test_directories_that_are_no_checkpoints_are_refused(two_ranks: Ranks, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    two_ranks.run(_no_checkpoint, tmp_path / "empty")


def _over_a_url(path: Path) -> None:
    url = f"local://{path}"
    trainer = make_trainer(_strategy("full"))
    trainer.fit(LanguageModule(), token_loader(8))
    trainer.save_checkpoint(url)
    loading = make_trainer(_strategy("full"))
    loading.validate(LanguageModule(seed=5), token_loader(4), ckpt_path=url, verbose=False)
    assert_same_weights(weights_of(loading), weights_of(trainer), rtol=0)

    fabric = _fabric("full")
    model, state = fabric.setup_module(nn.Linear(2, 2)), {"steps": 5}
    fabric.save(f"{url}.fabric", {"model": model, **state})
    assert fabric.load(f"{url}.fabric", {"model": model}) == state
    with pytest.raises(ValueError, match=r"local://.* is a URL, .* checkpoint='full'"):
        _fabric().save(url, {"model": model})


def test_full_checkpoints_go_to_urls(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks.run(_over_a_url, tmp_path / "some.ckpt")
    assert (tmp_path / "some.ckpt").is_file()
    assert (tmp_path / "some.ckpt.fabric").is_file()


def _several_models(checkpoint: str, path: Path) -> None:
    """Lightning's strategies save one sharded model in a checkpoint, no more."""
    fabric = _fabric(checkpoint)

    def make(seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        made: dict[str, Any] = {}
        for name in ("student", "teacher"):
            model = nn.Linear(3, 2)
            optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
            made[name], made[f"optimizer_of_{name}"] = fabric.setup(model, optimizer)
            fabric.backward(made[name](torch.ones(2, 3)).square().sum())
            made[f"optimizer_of_{name}"].step()
        return made

    def weights(state: dict[str, Any]) -> dict[str, Any]:
        models = [lightning_sshsdp.engine_of(state[name].module) for name in ("student", "teacher")]
        return {str(i): engine.full_state_dict(rank0_only=False) for i, engine in enumerate(models)}

    saved = make(1)
    fabric.save(path, saved)
    loaded = make(2)
    fabric.load(path, loaded)
    assert_close(weights(loaded), weights(saved), rtol=0, atol=0)
    assert fabric.device == loaded["student"].device == torch.device("cpu")
    if checkpoint == "sharded":
        with pytest.raises(ValueError, match="several parts"):
            fabric.load_raw(path, loaded["student"])


@pytest.mark.parametrize("checkpoint", FORMATS)
def test_one_checkpoint_holds_several_models(
    two_ranks: Ranks, tmp_path: Path, checkpoint: str
) -> None:
    two_ranks.run(_several_models, checkpoint, tmp_path / "some.ckpt")


def _raw_optimizer(path: Path) -> None:
    plain = nn.Linear(3, 2)
    trained = torch.optim.Adam(plain.parameters(), lr=0.3)
    plain(torch.ones(1, 3)).sum().backward()
    trained.step()
    fabric = _fabric()
    if fabric.global_rank == 0:
        torch.save(trained.state_dict(), path)
    fabric.barrier()
    model = nn.Linear(3, 2)
    model, optimizer = fabric.setup(model, torch.optim.Adam(model.parameters()))
    fabric.load_raw(path, optimizer)
    engine = lightning_sshsdp.engine_of(model.module)
    whole = engine.full_optimizer_state_dict(optimizer.optimizer)
    if fabric.global_rank == 0:
        assert_close(whole["state"], trained.state_dict()["state"], rtol=0, atol=0)
    assert optimizer.param_groups[0]["lr"] == 0.3


def test_a_plain_optimizers_own_file_loads(two_ranks: Ranks, tmp_path: Path) -> None:
    """Lightning's strategies refuse it."""
    two_ranks.run(_raw_optimizer, tmp_path / "optimizer.pt")


# Stages and modules


def _stages(strategy: Any, path: Path) -> tuple[list[float], Any]:
    module, loader = LanguageModule(), token_loader(8)
    trainer = make_trainer(strategy)
    trainer.fit(module, token_loader(16))
    results = [*trainer.test(module, loader, verbose=False)[0].values()]
    trainer.save_checkpoint(path.with_name("after-test"))
    trainer.save_checkpoint(path, weights_only=True)
    with torch.inference_mode():
        results += trainer.test(module, loader, verbose=False)[0].values()
        results += trainer.test(
            module, loader, ckpt_path=str(path), verbose=False, weights_only=True
        )[0].values()
        predicted = trainer.predict(module, loader)
        again = trainer.predict(module, loader, ckpt_path=str(path.with_name("after-test")))
    assert all(torch.equal(a, b) for a, b in zip(predicted, again, strict=True))
    return results, predicted


@pytest.mark.parametrize("checkpoint", FORMATS)
def test_checkpoints_are_saved_and_loaded_in_every_stage(
    two_ranks: Ranks, tmp_path: Path, checkpoint: str
) -> None:
    ours = two_ranks.run(_stages, _strategy(checkpoint), tmp_path / "ours" / "some.ckpt")
    ddp = two_ranks.run(_stages, "ddp", tmp_path / "ddp" / "some.ckpt")
    for (results, predicted), (expected, wanted) in zip(ours, ddp, strict=True):
        assert_close(results, expected, rtol=1e-5, atol=0)
        assert len(set(results)) == 1
        assert all(torch.equal(a, b) for a, b in zip(predicted, wanted, strict=True))


def _init_contexts(precision: str, expected: torch.dtype) -> None:
    for empty_init, device in ((False, "cpu"), (True, "meta")):
        trainer = make_trainer(precision=precision)
        fabric = _fabric(precision=precision)
        with trainer.init_module(empty_init=empty_init):
            module = LanguageModule()
        with fabric.init_module(empty_init=empty_init):
            model = LanguageModel()
        for parameter in [*module.parameters(), *model.parameters()]:
            assert (parameter.device.type, parameter.dtype) == (device, expected)
        trainer.fit(module, token_loader(4))
        fabric.setup_module(model)
        for parameter in [*module.parameters(), *model.parameters()]:
            assert (parameter.device.type, parameter.dtype) == ("cpu", expected)


@pytest.mark.parametrize(
    ("precision", "expected"),
    [("32-true", torch.float32), ("16-true", torch.float16), ("bf16-true", torch.bfloat16)],
)
def test_modules_are_made_in_the_dtype_of_the_precision(
    two_ranks: Ranks, precision: str, expected: torch.dtype
) -> None:
    two_ranks.run(_init_contexts, precision, expected)


class _Recomputes(LanguageModule):
    def __init__(self) -> None:
        super().__init__()
        apply_activation_checkpointing(self.model, check_fn=lambda m: isinstance(m, Block))


def _recomputes(path: Path) -> None:
    names = list(LanguageModule().state_dict())
    trainer = assert_trains_like_ddp(_Recomputes)
    assert list(weights_of(trainer)) == names
    trainer.save_checkpoint(path)
    plain = LanguageModule.load_from_checkpoint(path)
    assert_same_weights(plain.state_dict(), weights_of(trainer), rtol=0)


def test_blocks_in_checkpoint_wrappers_train_and_keep_their_names(
    two_ranks: Ranks, tmp_path: Path
) -> None:
    two_ranks.run(_recomputes, tmp_path / "some.ckpt")


class _Compiled(LanguageModule):
    def configure_model(self) -> None:
        if self.model is None:
            super().configure_model()
            self.model = torch.compile(self.model, backend="aot_eager")


def _saves_compiled(checkpoint: str, path: Path) -> None:
    trainer = make_trainer(_strategy(checkpoint))
    trainer.fit(_Compiled(in_configure_model=True), token_loader(8))
    trainer.save_checkpoint(path)
    loaded = _Compiled.load_from_checkpoint(path)
    # The names that torch gives: whoever loads the file without us compiles, too.
    assert any("_orig_mod" in name for name in loaded.state_dict())
    assert_same_weights(dict(loaded.state_dict()), weights_of(trainer), rtol=0)
    resumed = make_trainer(_strategy(checkpoint), max_epochs=2)
    resumed.fit(_Compiled(in_configure_model=True), token_loader(8), ckpt_path=str(path))
    assert resumed.global_step == 8


@pytest.mark.parametrize("checkpoint", FORMATS)
def test_compiled_submodules_are_saved_under_torchs_names(
    two_ranks: Ranks, tmp_path: Path, checkpoint: str
) -> None:
    two_ranks.run(_saves_compiled, checkpoint, tmp_path / "some.ckpt")


class _BatchNorm(LanguageModule):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(VOCABULARY)

    def loss(self, batch: Any) -> torch.Tensor:
        logits = self.norm(self.model(batch[0][:, :-1]).flatten(0, 1))
        return nn.functional.cross_entropy(logits, batch[0][:, 1:].flatten())


def _synchronises_batch_norm() -> float:
    module = _BatchNorm()
    trainer = make_trainer(sync_batchnorm=True)
    # Training synchronised batch norm needs a GPU.
    (metrics,) = trainer.validate(module, token_loader(4), verbose=False)
    assert isinstance(module.norm, nn.SyncBatchNorm)
    return metrics["val_loss"]


def test_sync_batchnorm_converts_before_sharding(two_ranks: Ranks) -> None:
    first, second = two_ranks.run(_synchronises_batch_norm)
    assert first == second


class _ShardedAlready(LanguageModule):
    def configure_model(self) -> None:
        super().configure_model()
        for block in self.model.blocks:
            fully_shard(block, mesh=init_device_mesh("cpu", (2,)))


def _refuses_fsdp2() -> None:
    with pytest.raises(ValueError, match=r"'model\.blocks\.0\.\S+' is a DTensor"):
        make_trainer().fit(_ShardedAlready(), token_loader(4))
    model = LanguageModel()
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    with pytest.raises(ValueError, match="is a DTensor"):
        _fabric().setup_module(model)


def test_modules_that_something_else_has_sharded_are_refused(two_ranks: Ranks) -> None:
    two_ranks.run(_refuses_fsdp2)


class _NoOptimizer(LanguageModule):
    def configure_optimizers(self) -> None:
        return None


def _fits_without_optimizer() -> None:
    module = _NoOptimizer()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    trainer = make_trainer()
    trainer.fit(module, token_loader(4))
    assert_same_weights(weights_of(trainer), before, rtol=0)


def test_a_module_without_optimizers_runs(two_ranks: Ranks) -> None:
    two_ranks.run(_fits_without_optimizer)


# Processes


def test_the_timeout_reaches_the_process_group() -> None:
    wanted = timedelta(seconds=30)
    for kind in (lightning_sshsdp.SSHSDPStrategy, lightning_sshsdp.FabricSSHSDPStrategy):
        strategy = kind(timeout=wanted, parallel_devices=[torch.device("cpu")])
        strategy.cluster_environment = LightningEnvironment()
        strategy.accelerator = Mock()
        strategy._lightning_module = Mock(_compiler_ctx=None)
        with (
            patch("torch.distributed.init_process_group") as init,
            patch.object(kind, "_make_mesh"),
        ):
            strategy.setup_environment()
        assert init.call_args.kwargs["timeout"] == wanted
        assert init.call_args.args == ("gloo",)


def _rejects_mesh(sizes: dict[str, int]) -> None:
    # Nothing below is collective, and no rank may leave before all have come.
    dist.barrier()
    with pytest.raises(ValueError, match="their product must be the number of processes"):
        make_trainer(lightning_sshsdp.SSHSDPStrategy(**sizes)).fit(
            LanguageModule(), token_loader(4)
        )


@pytest.mark.parametrize(
    "sizes", [{"shard_size": 3}, {"replicate_size": 2, "shard_size": 2}, {"replicate_size": 4}]
)
def test_sizes_that_do_not_make_up_the_world_are_named(
    two_ranks: Ranks, sizes: dict[str, int]
) -> None:
    two_ranks.run(_rejects_mesh, sizes)
