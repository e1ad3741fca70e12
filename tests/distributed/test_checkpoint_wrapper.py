"""Blocks inside torch's wrapper for activation checkpointing keep the names of their state dict."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from torch.testing import assert_close

import sshsdp

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


class Block(nn.Module):
    """A linear layer and an activation."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x))


class Model(nn.Module):
    """Some blocks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def train(path: Path, units: Any) -> None:
    """Train wrapped blocks; weights and names are those of blocks that are not wrapped."""
    reference, model = Model(), Model()
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Block))
    names = list(reference.state_dict())
    assert list(model.state_dict()) == names
    engine = sshsdp.shard(
        model,
        units=units,
        runtime=sshsdp.RuntimePolicy(dtype=None),
    )
    optimizer = engine.attach(torch.optim.AdamW(model.parameters(), lr=0.01))
    expected = torch.optim.AdamW(reference.parameters(), lr=0.01)
    x = torch.ones(2, 6)
    for module, stepper in ((reference, expected), (model, optimizer)):
        for _ in range(3):
            module(x).square().sum().backward()
            stepper.step()
            stepper.zero_grad()
    whole = engine.full_state_dict(rank0_only=False)
    assert list(whole) == names
    assert_close(whole, dict(reference.state_dict()), rtol=1e-5, atol=1e-6)
    assert [unit.name for unit in engine.units][1:] == [f"blocks.{index}" for index in range(3)]
    engine.save(path, optimizer)
    plain = Model()
    other = sshsdp.shard(plain)
    other.load(path, other.attach(torch.optim.AdamW(plain.parameters())))
    assert_close(other.full_state_dict(rank0_only=False), whole, rtol=0, atol=0)


@pytest.mark.parametrize("units", [None, [Block], ["blocks.?"]])
def test_wrapped_blocks_train_and_save_under_their_own_names(
    workers: Callable[[int], Any], tmp_path: Path, units: Any
) -> None:
    workers(2).run(train, tmp_path / "checkpoint", units)
