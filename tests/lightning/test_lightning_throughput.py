"""The throughput callback counts what it says it counts."""

from __future__ import annotations

import csv
from typing import TYPE_CHECKING, Any

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger

import lightning_sshsdp
from lightning_sshsdp.throughput import count_tokens, training_flops_per_token
from tests.lightning.modules import (
    LENGTH,
    VOCABULARY,
    WIDTH,
    LanguageModel,
    LanguageModule,
    make_trainer,
    token_loader,
)

if TYPE_CHECKING:
    from pathlib import Path

    from tests.lightning.conftest import Ranks


def _monitored(directory: str, strategy: str) -> list[dict[str, float]]:
    monitor = lightning_sshsdp.ThroughputMonitor(peak_flops=1e9, every_n_steps=2)
    logger = CSVLogger(directory, name=strategy, version=0)
    trainer = make_trainer(
        strategy,
        callbacks=monitor,
        logger=logger,
        log_every_n_steps=1,
        accumulate_grad_batches=2,
    )
    trainer.fit(LanguageModule(), token_loader(16), token_loader(4))
    if trainer.global_rank != 0:
        return []
    with open(f"{directory}/{strategy}/version_0/metrics.csv") as file:
        rows = list(csv.DictReader(file))
    return [
        {name: float(value) for name, value in row.items() if value}
        for row in rows
        if row.get("throughput/tokens_per_second")
    ]


def test_values_reach_the_logger(two_ranks: Ranks, tmp_path: Path) -> None:
    rows = two_ranks.run(_monitored, str(tmp_path), "sshsdp")[0]
    assert len(rows) == 2, rows
    flops_per_token = training_flops_per_token(LanguageModel())
    for row in rows:
        seconds = 2 * row["throughput/step_seconds"]
        # Two steps of two batches of two rows on two ranks.
        tokens = 2 * 2 * 2 * 2 * LENGTH
        assert row["throughput/tokens_per_second"] == pytest.approx(tokens / seconds, rel=1e-3)
        achieved = row["throughput/tokens_per_second"] * flops_per_token
        assert row["throughput/mfu"] == pytest.approx(achieved / 2e9, rel=1e-3)
        assert row["throughput/memory_gb"] > 0.01
        parameter_mb = sum(p.nbytes for p in LanguageModel().parameters()) / 1e6
        # Half of the parameters arrive at most twice for each of two batches, half of the gradients
        # once.
        assert parameter_mb < row["throughput/received_mb/shard"] <= 2.6 * parameter_mb
        assert 0 < row["throughput/gathered_mb"] <= 1.1 * parameter_mb


def test_it_works_with_other_strategies(two_ranks: Ranks, tmp_path: Path) -> None:
    rows = two_ranks.run(_monitored, str(tmp_path), "ddp")[0]
    assert rows
    assert not any("received" in name for name in rows[0])


def test_flops_count_matrices_once_and_frozen_ones_less() -> None:
    model = LanguageModel(depth=2)
    blocks = 2 * (2 * WIDTH * WIDTH * 2)
    head = VOCABULARY * WIDTH
    assert training_flops_per_token(model) == 6 * (blocks + head)
    model.blocks.requires_grad_(False)
    assert training_flops_per_token(model) == 4 * blocks + 6 * head


@pytest.mark.parametrize(
    ("batch", "tokens"),
    [
        ({"input_ids": torch.zeros(3, 5, dtype=torch.long), "x": torch.zeros(7)}, 15),
        ((torch.zeros(4, 8), torch.zeros(4, dtype=torch.long)), 4),
        ([torch.zeros(2, 6, dtype=torch.int32)], 12),
    ],
)
def test_tokens_of_common_batches(batch: Any, tokens: int) -> None:
    assert count_tokens(batch) == tokens
