"""One training loop, as the Accelerate documentation writes it, for ours and for stock DDP."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import accelerate
import torch
from torch import nn

from accelerate_sshsdp import Accelerator
from tests.accelerate.conftest import forget_state
from tests.accelerate.models import loader, make


def new_accelerator(kind: str, **options: Any) -> Any:
    """Ours, or Accelerate's own DDP, in a process that forgets any earlier one."""
    forget_state()
    return Accelerator(**options) if kind == "ours" else accelerate.Accelerator(cpu=True, **options)


@dataclass
class Record:
    """What a training left behind."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)


def grouped(model: nn.Module) -> list[dict[str, Any]]:
    """Param groups as the Trainer makes them."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
    ]


def warm_up(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """A schedule whose every step matters."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 9))


def step(accelerator: Any, model: Any, optimizer: Any, schedule: Any, batch: Any) -> Any:
    """One micro-batch; returns the loss over all ranks, and the norm if gradients were reduced."""
    norm = None
    with accelerator.accumulate(model):
        loss = model(**batch).loss
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return accelerator.gather(loss.detach().float()).mean().item(), norm


def train(
    accelerator: Any, kind: str, *, epochs: int = 2, size: int = 30, frozen: tuple[str, ...] = ()
) -> Record:
    """Train a model of a kind; the last batches are uneven."""
    model = make(kind)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(frozen) if frozen else True)
    optimizer = torch.optim.AdamW(grouped(model), lr=1e-2)
    schedule = warm_up(optimizer)
    model, optimizer, batches, schedule = accelerator.prepare(
        model, optimizer, loader(kind, size), schedule
    )
    record = Record()
    for _ in range(epochs):
        for batch in batches:
            loss, norm = step(accelerator, model, optimizer, schedule, batch)
            record.losses.append(loss)
            record.rates.append(optimizer.param_groups[0]["lr"])
            if norm is not None:
                record.norms.append(float(norm))
    record.weights = accelerator.get_state_dict(model)
    return record
