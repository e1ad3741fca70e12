"""Param groups that are added to an attached optimizer, as in gradual unfreezing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import sshsdp
from tests.support.compare import assert_weights_close
from tests.support.training import OWN_DTYPES

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.usefixtures("double")


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 3))


def batch(step: int) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(step))


def run(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        model(batch(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        model.zero_grad()


def add(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    optimizer.add_param_group({"params": [*model[0].parameters()], "lr": 0.05})


def make(kind: str, model: nn.Sequential) -> torch.optim.Optimizer:
    classes: dict[str, Any] = {"adamw": torch.optim.AdamW, "adafactor": torch.optim.Adafactor}
    return classes[kind]([*model[2].parameters(), *model[4].parameters()], lr=0.01)  # type: ignore[no-any-return]


def extend_sharded(kind: str, units: Any) -> dict[str, torch.Tensor]:
    model = build()
    engine = sshsdp.shard(model, units=units, **OWN_DTYPES)
    optimizer = engine.attach(make(kind, model))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100)
    run(model, optimizer, range(3))
    add(model, optimizer)
    with pytest.raises(RuntimeError, match=r"'0\.(weight|bias)'.*engine\.attach\(optimizer\)"):
        optimizer.step()
    engine.attach(optimizer)
    assert len(optimizer.param_groups) == 2
    assert scheduler.optimizer is optimizer
    run(model, optimizer, range(3, 8))
    weights = engine.full_state_dict()
    engine.close()
    return weights


@pytest.mark.parametrize(
    ("kind", "units"), [("adamw", None), ("adamw", ["0", "2", "4"]), ("adafactor", ["0", "2", "4"])]
)
def test_an_added_group_trains_from_then_on(
    workers: Callable[[int], Any], kind: str, units: Any
) -> None:
    model = build()
    optimizer = make(kind, model)
    run(model, optimizer, range(3))
    add(model, optimizer)
    run(model, optimizer, range(3, 8))
    actual = workers(2).run(extend_sharded, kind, units)[0]
    assert_weights_close(actual, model.state_dict())
