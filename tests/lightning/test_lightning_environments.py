"""The strategy where users put it: YAML files, SLURM jobs, several nodes, compiled modules."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest
import torch
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.plugins.environments import SLURMEnvironment
from torch import nn

import lightning_sshsdp
import sshsdp
from tests.lightning.comparing import assert_same_weights, assert_trains_like_ddp, weights_of
from tests.lightning.modules import Block, LanguageModule, make_trainer, token_loader

if TYPE_CHECKING:
    from pathlib import Path

    from tests.lightning.conftest import Ranks

CONFIG = """
trainer:
  accelerator: cpu
  devices: 2
  max_epochs: 1
  logger: false
  enable_checkpointing: false
  enable_progress_bar: false
  enable_model_summary: false
  precision: bf16-mixed
  strategy:
    class_path: lightning_sshsdp.SSHSDPStrategy
    init_args:
      units: [tests.lightning.modules.Block, "model.nor*"]
      runtime: {prefetch: 0, reshard_after_forward: false, formats: {"*head*": float32}}
      update: {reduce_dtype: bfloat16}
      shard_size: 2
      checkpoint: full
      timeout: "00:10:00"
  callbacks:
    - class_path: lightning_sshsdp.ThroughputMonitor
      init_args: {peak_flops: 1.0e+12}
model: {optimizer: momentum}
"""


def _train_from_yaml(path: str) -> None:
    class Module(LanguageModule):
        def train_dataloader(self) -> Any:
            return token_loader()

    arguments = ["--config", path]
    cli = LightningCLI(Module, args=arguments, run=False, save_config_callback=None)
    cli.trainer.fit(cli.model)
    strategy = cli.trainer.strategy
    assert type(strategy) is lightning_sshsdp.SSHSDPStrategy
    engine = strategy.engine
    assert engine.runtime.prefetch == 0
    assert not engine.runtime.reshard_after_forward
    assert engine.runtime.formats["*head*"] == sshsdp.DenseFormat(torch.float32)
    assert engine.runtime.dtype == torch.bfloat16
    assert engine.update.reduce_dtype == torch.bfloat16
    assert engine.update.dtype == torch.float32
    names = [unit.name for unit in engine.units]
    assert {"model.blocks.0", "model.blocks.2", "model.norm"} <= {*names}, names
    assert strategy._timeout.total_seconds() == 600
    assert len(cli.model.losses) == 4


def test_a_yaml_file_configures_everything(two_ranks: Ranks, tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(CONFIG)
    two_ranks.run(_train_from_yaml, str(config))


def _slurm(rank: int) -> dict[str, str]:
    return {
        "SLURM_JOB_ID": "17",
        "SLURM_JOB_NAME": "train",
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "1",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": "0",
        "SLURM_NODEID": str(rank),
        "SLURM_NODELIST": "localhost",
    }


def _train_on_two_slurm_nodes() -> None:
    reference = LanguageModule()
    ddp = make_trainer("ddp")
    ddp.fit(reference, token_loader(16))
    kept = {k: v for k, v in os.environ.items() if k != "TORCHELASTIC_RUN_ID"}
    slurm = _slurm(int(kept["RANK"]))
    with patch.dict(os.environ, {**kept, **slurm}, clear=True):
        trainer = make_trainer("sshsdp", devices=1, num_nodes=2)
        trainer.fit(LanguageModule(), token_loader(16))
        strategy = trainer.strategy
        assert isinstance(strategy.cluster_environment, SLURMEnvironment)
        assert (strategy.num_nodes, strategy.world_size, strategy.local_rank) == (2, 2, 0)
        assert strategy.global_rank == torch.distributed.get_rank()
    # Inside a node, ranks shard; over nodes, they replicate, and share the update.
    assert strategy.device_mesh.mesh_dim_names == ("replicate", "shard")
    assert strategy.device_mesh.shape == (2, 1)
    assert_same_weights(weights_of(trainer), weights_of(ddp))


def test_nodes_of_a_slurm_job_become_replicas(two_ranks: Ranks) -> None:
    two_ranks.run(_train_on_two_slurm_nodes)


class _Compiled(LanguageModule):
    def __init__(self, how: str) -> None:
        super().__init__()
        blocks = self.model.blocks
        if how == "in place":
            for block in blocks:
                block.compile(backend="inductor")
        elif how == "wrapped":
            for index, block in enumerate(blocks):
                blocks[index] = torch.compile(block, backend="aot_eager")
        else:
            self.model.compile(backend="aot_eager")


def _compiled_trains(how: str) -> int:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    # Inductor writes vector code although ATen, whose headers it needs for that, was told not to.
    has_vectors = torch.backends.cpu.get_cpu_capability() != "DEFAULT"
    with torch._inductor.config.patch({"cpp.simdlen": None if has_vectors else 1}):
        assert_trains_like_ddp(lambda: _Compiled(how), rtol=1e-4)
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("how", ["in place", "wrapped", "model"])
def test_compiled_submodules_train_like_ddp(two_ranks: Ranks, how: str) -> None:
    assert min(two_ranks.run(_compiled_trains, how)) > 0


def test_a_compiled_lightning_module_is_refused_with_what_to_do_instead() -> None:
    trainer = make_trainer("sshsdp", devices=1)
    with pytest.raises(RuntimeError, match=r"block\.compile\(\)"):
        trainer.fit(torch.compile(LanguageModule()), token_loader())


def _shards_the_named_units() -> list[str]:
    strategy = lightning_sshsdp.SSHSDPStrategy(units=[Block])
    trainer = make_trainer(strategy)
    trainer.fit(LanguageModule(), token_loader())
    with pytest.raises(ValueError, match="Nothing"):
        make_trainer(lightning_sshsdp.SSHSDPStrategy(units=["Nothing*"])).fit(
            LanguageModule(), token_loader()
        )
    return [unit.name for unit in trainer.strategy.engine.units]


def test_units_can_be_classes_and_unknown_patterns_are_named(two_ranks: Ranks) -> None:
    names = two_ranks.run(_shards_the_named_units)[0]
    assert names[1:] == [f"model.blocks.{index}" for index in range(3)]


class _Metric(nn.Module):
    """Keeps a tensor that is neither parameter nor buffer, as torchmetrics does."""

    def __init__(self) -> None:
        super().__init__()
        self.total = torch.zeros(())
        self.devices: list[torch.device] = []

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        self.devices.append(fn(self.total).device)
        return super()._apply(fn, recurse)


class _WithMetric(LanguageModule):
    def __init__(self) -> None:
        super().__init__()
        self.metric = _Metric()


def _moves_metrics() -> int:
    module = _WithMetric()
    make_trainer().fit(module, token_loader())
    return len(module.metric.devices)


def test_metrics_are_moved_to_the_device(two_ranks: Ranks) -> None:
    assert min(two_ranks.run(_moves_metrics)) >= 1
